"""Make an emulator of a model, a schedule and update rules, for tests that step it by themselves."""

from __future__ import annotations

from typing import Any, Callable, Iterator, Mapping, Optional, Tuple

from torch import nn

from ipu_pipe.backends.emulator.replay import Emulator
from ipu_pipe.replay.work import Work
from ipu_pipe.schedule.versions import VersionTable
from ipu_pipe.update.apply import UpdateRules, choose_rules
from ipu_pipe.update.optimizer import make_groups


def make_emulator(
    model: nn.Module,
    part: Any,
    table: VersionTable,
    batch: Any,
    make_optimizer: Callable[..., Any],
    loss: Any = nn.functional.cross_entropy,
    args: Mapping[str, Any] = {},
    rate: Optional[Callable[[int], float]] = None,
    source: Any = None,
    block_updates: int = 1,
    replicas: int = 1,
    **settings: Any,
) -> Emulator:
    """Return an emulator of one update a step, or of `block_updates`.

    `batch`: a microbatch; `rate`: that of each update, by default the optimizer's; `source`: the replays, by default those of
    the table; `settings`: further arguments of `UpdateRules`.
    """
    optimizer, accumulate = make_optimizer(make_groups(model, part)), table.schedule.accumulate
    staleness = table.rule_lag()
    rules = make_rules(optimizer, table.method, staleness, args, accumulate, rate, **settings)
    work = Work(loss, table, rules, replays=source, block_updates=block_updates)
    return Emulator(work, model, part, batch, 0, replicas)


def make_rules(
    optimizer: Any,
    method: Any,
    staleness: Any,
    args: Mapping[str, Any] = {},
    accumulate: int = 1,
    rate: Optional[Callable[[int], float]] = None,
    **settings: Any,
) -> UpdateRules:
    """Return the update rules of a method for stages of this staleness, at the optimizer's rate unless `rate` is given.

    `settings`: further arguments of `UpdateRules`.
    """
    lr = optimizer.param_groups[0]["lr"]
    chosen = choose_rules(args, method, staleness, accumulate)
    return UpdateRules(chosen, optimizer, rate or (lambda k: lr), **settings)


def iterate_to_next_update(emulator: Emulator) -> Iterator[Tuple[int, int]]:
    """Yield the microbatch and the replica of each replay up to the one that updates."""
    while True:
        replay = emulator.replay
        yield replay.microbatch, replay.replica
        if len(replay.updates):
            return
