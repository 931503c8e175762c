"""Learning rates as pure functions of the update index, so that a resumed run continues them exactly.

Schedulers of torch.optim are played once over an optimizer that trains nothing, with one parameter group for each of the config's
`optimizer.groups`: rules rescale a rate, stages read it ahead, and so only the rates that a scheduler sets are kept.
"""

from __future__ import annotations

import math
import warnings
from typing import Any, Callable, Dict, List, Mapping, Optional, Tuple

import torch

from ipu_pipe.errors import BadInput, summarize
from ipu_pipe.text import describe_kind, show


def compute_rate(settings: Any, base: float, k: int, updates: int, updates_per_epoch: Optional[int]) -> float:
    """Return the learning rate of update k of `updates` in all, both counted from 0.

    `settings` has `name`, `warmup_steps` w, `milestones` (in epochs) and `gamma`. With t = (k - w) / (updates - w), the
    share done after the warm-up:

        constant  base                          cosine  base (1 + cos(pi t)) / 2
        step      base gamma^(milestones passed)    linear  base (1 - t)

    times (k + 1) / w during the first w updates.
    """
    w = settings.warmup_steps
    done = min(max(k - w, 0) / max(updates - w, 1), 1.0)
    factor = min((k + 1) / w, 1.0) if w else 1.0
    if settings.name == "cosine":
        return base * factor * (1 + math.cos(math.pi * done)) / 2
    if settings.name == "linear":
        return base * factor * (1 - done)
    if settings.name == "step":
        assert updates_per_epoch is not None  # of data that has epochs
        return base * factor * settings.gamma ** sum(k >= epoch * updates_per_epoch for epoch in settings.milestones)
    return base * factor


def make_rate(
    settings: Any, base: float, updates: int, updates_per_epoch: Optional[int], per_call: int = 1
) -> Callable[[int], float]:
    """Return the learning rate as a function of the update, before the update rules.

    Where the updated stages are drawn, one stage may have more updates than the run has steps. The `per_call` updates that a
    device makes in one call have the rate of its first.
    """
    total = (settings.total_steps or updates) if settings.falls else updates
    last = total - 1 if settings.falls else None

    def rate(k: int) -> float:
        k -= k % per_call
        return compute_rate(settings, base, k if last is None else min(k, last), total, updates_per_epoch)

    return rate


def scale_for_update_size(lr: float, momentum: float, reference: int, size: int) -> Tuple[float, float]:
    """Return (lr, momentum) for updates of `size` samples, given those for updates of `reference` samples.

    m = m_r^(N/N_r), lr = lr_r (1 - m) N / ((1 - m_r) N_r), N = `size`, N_r = `reference` (Chiley et al. 2019; Kosson et al. 2021,
    equation 9).
    """
    scaled = momentum ** (size / reference) if momentum else 0.0
    return lr * (1 - scaled) * size / ((1 - momentum) * reference), scaled


def choose_anneal_updates(first_milestone: Optional[int], warmup: int, updates: int) -> int:
    """Return T1's K, in updates, where none is given (PipeMare, section 3.1).

    A quarter of the first constant phase of a step schedule, or 5 x the linear warm-up, or a quarter of the run.
    """
    return max(first_milestone // 4 if first_milestone else 5 * warmup if warmup else math.ceil(updates / 4), 1)


class Plateau:
    """The learning rate of torch's ReduceLROnPlateau, which follows evaluations; `args` are its arguments.

    All processes step it by the same figures after each evaluation, where the pipeline is empty and no pass has read ahead.
    """

    def __init__(self, base: float, args: Mapping[str, Any]) -> None:
        for key, value in args.items():  # torch takes any, and fails or raises the rate at an evaluation hours later
            values = value if key == "min_lr" and isinstance(value, (list, tuple)) else [value]
            if key in PLATEAU_NUMBERS and any(type(one) not in (int, float) or one < 0 for one in values):
                raise BadInput(f"lr_schedule.args.{key}: {show(value)}: must be a number >= 0")
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=base)
        self._group = optimizer.param_groups[0]
        try:
            self._scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, **args)
        except (TypeError, ValueError) as error:
            raise BadInput(f"lr_schedule.args: {show(dict(args))}: {error}") from None

    @property
    def rate(self) -> float:
        """The learning rate now."""
        return float(self._group["lr"])

    def step(self, value: Optional[float]) -> None:
        """Follow an evaluation."""
        if value is not None:
            self._scheduler.step(value)

    def state(self) -> Dict[str, Any]:
        """Return the state for a checkpoint, as JSON can hold it."""
        best = self._scheduler.best
        state = {key: getattr(self._scheduler, key) for key in PLATEAU_STATE}
        return {"rate": self.rate, "best": best if math.isfinite(best) else None, **state}

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""
        self._group["lr"] = state["rate"]
        if state["best"] is not None:
            self._scheduler.best = state["best"]
        for key in PLATEAU_STATE:
            setattr(self._scheduler, key, state[key])


PLATEAU_NUMBERS = ("factor", "patience", "threshold", "cooldown", "min_lr", "eps")
PLATEAU_STATE = ("num_bad_epochs", "cooldown_counter", "last_epoch")
SchedulerFactory = Callable[[torch.optim.Optimizer], Any]  # gives a torch.optim.lr_scheduler
KEY = "lr_schedule"


def play_scheduler(
    make: SchedulerFactory, optimizer: torch.optim.Optimizer, base: float, updates: int, every: int = 1
) -> List[List[float]]:
    """Return the rates of each of `updates` updates, as the scheduler that `make` makes sets them: one for each of the config's
    `optimizer.groups`.

    `optimizer` is the run's; it stays as it is. All groups begin with the rate `base`. The scheduler is stepped after each
    `every` updates. Raise `BadInput` if it is not a torch.optim.lr_scheduler, or changes more than the rate.
    """
    like = _stand_in(optimizer, base)
    groups = like.param_groups
    settings = [_others(group) for group in groups]
    rates: List[List[float]] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            scheduler = make(like)
            _require_scheduler(scheduler, like)
            for k in range(updates):
                if k and k % every == 0:
                    like.step()
                    scheduler.step()
                rates.append([float(group["lr"]) for group in groups])
                if [_others(group, known) for group, known in zip(groups, settings)] != settings:
                    break
        except BadInput:
            raise
        except Exception as error:  # whatever the scheduler raises, such as one that was planned shorter
            raise BadInput(f"{KEY}: {_name(make)}: at update {len(rates)} of {updates}: {summarize(error)}") from error
    moved = list(dict.fromkeys(key for group, known in zip(groups, settings) for key in known if group[key] != known[key]))
    if moved:
        raise BadInput(
            f"{KEY}: {type(scheduler).__name__}: changes {' and '.join(moved)}: a schedule here sets the learning rate alone"
            " (cycle_momentum=False)"
        )
    if not all(math.isfinite(rate) and rate >= 0 for row in rates for rate in row):
        raise BadInput(f"{KEY}: {type(scheduler).__name__}: gives rates that are no numbers >= 0")
    return rates


def _stand_in(optimizer: torch.optim.Optimizer, base: float) -> torch.optim.Optimizer:
    """Make an optimizer with a parameter for each of the config's groups, with the settings of the first of the run's groups that
    are made of it, and the rate `base`."""
    first = {group["member"]: group for group in reversed(optimizer.param_groups)}
    like = torch.optim.SGD([{"params": [torch.nn.Parameter(torch.zeros(1))]} for _ in range(max(first) + 1)], lr=base)
    like.defaults = {"differentiable": False, **optimizer.defaults}  # SGD.step reads it; Muon and others do not have it
    for number, group in first.items():
        settings = {key: value for key, value in group.items() if key not in ("params", "stage", "member")}
        like.param_groups[number].update({"momentum": 0.0, **settings, "lr": base})
    return like


def _others(group: Any, known: Any = None) -> Any:
    """Return all settings of a group but the rate, limited to those in `known` if given."""
    left = ("params", "lr", "initial_lr")
    return {key: value for key, value in group.items() if key not in left and (known is None or key in known)}


def _require_scheduler(scheduler: Any, optimizer: torch.optim.Optimizer) -> None:
    """Raise `BadInput` for what is not a scheduler of this optimizer whose rates depend on the update alone."""
    kind = type(scheduler).__name__
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise BadInput(
            f"{KEY}: {kind}: follows what evaluations measure, which is a schedule of its own here: use {KEY}: "
            "{name: plateau, args: {...}}, with its arguments"
        )
    if not isinstance(scheduler, torch.optim.lr_scheduler.LRScheduler):
        raise BadInput(
            f"{KEY}: gave {describe_kind(scheduler)}, must give a torch.optim.lr_scheduler of the optimizer that it is given"
        )
    if getattr(scheduler, "optimizer", optimizer) is not optimizer:
        raise BadInput(f"{KEY}: {kind}: is of another optimizer: must be made of the one that it is given")


def _name(make: Any) -> str:
    made_by = getattr(make, "func", make)
    return str(getattr(made_by, "__name__", type(made_by).__name__))
