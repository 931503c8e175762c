"""Optimizers that are more than a rule for each tensor: what they share between parameters, and what
they keep in their groups, found on a small copy.

    four tiny parameters, gradients of 1e-3 and 1e3, five steps
      one group                  as in plain PyTorch
      four groups                other weights: the parameters of a group depend on each other
      four optimizers            other weights: all parameters do, by a norm or an estimate

A pipeline gives each stage groups of its own, and on processes an optimizer of its own. torch's own
optimizers are known, and not tried.
"""

from __future__ import annotations

import collections
import copy
import warnings
from typing import NamedTuple, Sequence

import torch
from torch import nn

from ipu_pipe.errors import summarize
from ipu_pipe.model.devices import fork_random, seed_random
from ipu_pipe.update.optimizer import ELEMENTWISE, copy_group

STEPS = 5
SCALES = (1e-3, 1e3, 1e-3, 1e3)
SIDE = 4
# of the largest move; the same sums in another order differ by less
TOLERANCE = 1e-6
# for a group whose rate is 0, as at the beginning of a warm-up
RATE = 0.1


class Coupling(NamedTuple):
    """What an optimizer shares: between the parameters `of_a_group`, between those `of_all` groups;
    and whether it `keeps_settings`, writes into its groups when it steps. `fault`: why it could not
    be tried, which leaves all of this unknown.
    """

    of_a_group: bool = False
    of_all: bool = False
    keeps_settings: bool = False
    fault: str = ""


def find_coupling(optimizer: torch.optim.Optimizer) -> Coupling:
    """Return what an optimizer shares between parameters, or why it cannot be tried."""
    if type(optimizer) in ELEMENTWISE:
        return Coupling()
    # the caller's generators stay where they are
    with fork_random(None):
        try:
            together, keeps_settings = _try(optimizer, [SCALES])
            # an optimizer that draws numbers gives other weights in every try
            again, _ = _try(optimizer, [SCALES], seed=1)
            if not _are_close(together, again):
                return Coupling(keeps_settings=keeps_settings)
            groups, _ = _try(optimizer, [[scale] for scale in SCALES])
            alone = [
                _try(optimizer, [[scale]], number)[0][0] for number, scale in enumerate(SCALES)
            ]
        # some need a closure, or parameters of their own
        except Exception as error:
            return Coupling(fault=summarize(error))
    of_a_group = not _are_close(together, groups)
    return Coupling(of_a_group, not _are_close(together, alone), keeps_settings)


def _try(
    optimizer: torch.optim.Optimizer,
    groups: Sequence[Sequence[float]],
    first: int = 0,
    seed: int = 0,
) -> tuple[list[torch.Tensor], bool]:
    """Return how far parameters move in groups with gradients of these scales, and whether the
    optimizer has written into its groups; `first`: the number of the first parameter.
    """
    seed_random(seed, None)
    numbers = torch.Generator().manual_seed(0)
    shape = (len(SCALES), STEPS + 1, SIDE, SIDE)
    # float64, so that rounding lies far below TOLERANCE
    values = torch.randn(shape, generator=numbers, dtype=torch.float64)[first:]
    # the constructor's arguments are not known
    trial = object.__new__(type(optimizer))
    left_out = ("param_groups", "state", "step", "eval", "train")
    attributes = {key: value for key, value in vars(optimizer).items() if key not in left_out}
    for key, value in attributes.items():
        # hooks are the caller's: they count real steps
        is_hooks = key.endswith("_hooks")
        vars(trial)[key] = collections.OrderedDict() if is_hooks else copy.deepcopy(value)
    settings = copy_group(optimizer.param_groups[0])
    if isinstance(settings["lr"], torch.Tensor) or not settings["lr"]:
        settings["lr"] = RATE
    parameters = [nn.Parameter(value[0].clone()) for value in values[: sum(map(len, groups))]]
    rest = iter(parameters)
    trial.param_groups = [
        {**copy.deepcopy(settings), "params": [next(rest) for _ in group]} for group in groups
    ]
    trial.state = collections.defaultdict(dict)
    before = [copy_group(group) for group in trial.param_groups]
    # optimizers with weights of evaluation ask for it
    switch = getattr(trial, "train", None)
    if callable(switch):
        switch()
    scales = [scale for group in groups for scale in group]
    for step in range(1, STEPS + 1):
        for p, value, scale in zip(parameters, values, scales):
            p.grad = value[step] * scale
        trial.step()
    moves = [p.detach() - value[0] for p, value in zip(parameters, values)]
    after = [copy_group(group) for group in trial.param_groups]
    # as text, because == of settings that are tensors is no truth value
    return moves, str(before) != str(after)


def _are_close(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> bool:
    """Return whether moves are equal but for rounding, those of each parameter by its own size."""
    return all(bool((a - b).abs().max() <= TOLERANCE * a.abs().max()) for a, b in zip(one, other))


def list_faults(
    optimizer: torch.optim.Optimizer, steps_at_once: bool, has_stages: bool, takes_turns: bool
) -> list[str]:
    """List the reasons why an optimizer cannot step in a pipeline; warn if they are not known.

    `steps_at_once`: one optimizer steps all stages in each update. `has_stages`: there are several.
    `takes_turns`: replicas with weights of their own step it one after another.
    """
    name = type(optimizer).__name__
    coupling = find_coupling(optimizer)
    # a warning, since an optimizer may need a GPU or parameters of its own, and be right
    if has_stages and coupling.fault and not steps_at_once:
        warnings.warn(
            f"optimizer: {name}: a trial of its step on a small copy failed ({coupling.fault}): if "
            f"the step of a parameter depends on other parameters or their order, the weights will "
            f"be wrong, since each stage steps by itself",
            stacklevel=2,
        )
    if takes_turns and coupling.keeps_settings:
        return [
            f"optimizer: {name}: keeps a state in its groups, and replicas with weights of their "
            f"own would share it: use another optimizer"
        ]
    if has_stages and coupling.of_a_group:
        return [
            f"optimizer: {name}: the step of a parameter depends on the others of its group, and "
            f"stages have groups of their own: use another optimizer"
        ]
    if has_stages and coupling.of_all and not steps_at_once:
        norm = next((k for k in optimizer.param_groups[0] if "max" in k and "norm" in k), None)
        instead = "" if norm is None else f"set its {norm} to None or 0 and use clip, "
        return [
            f"optimizer: {name}: the step of a parameter depends on those of other stages, which "
            f"step by themselves: {instead}use another optimizer, or the emulator with a method "
            f"that flushes"
        ]
    return []
