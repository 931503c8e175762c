"""Rates of any scheduler of torch.optim: played once over an optimizer that trains nothing.

Here a rate is a function of the update alone: rules rescale it, stages read it ahead, and a resumed run continues it exactly. So
the scheduler is made and stepped before the run, and only what it sets the rate to is kept.
"""

from __future__ import annotations

import math
import warnings
from typing import Any, Callable, List

import torch

from ipu_pipe.errors import BadInput, summarize
from ipu_pipe.text import describe_kind

SchedulerFactory = Callable[[torch.optim.Optimizer], Any]  # gives a torch.optim.lr_scheduler
KEY = "lr_schedule"


def play(
    make: SchedulerFactory, optimizer: torch.optim.Optimizer, base: float, updates: int, every: int = 1
) -> List[float]:
    """The rate of each of so many updates. `optimizer`: the run's, with the rate `base`, left as it is; `every`: updates after
    which the scheduler is stepped. Raises BadInput."""
    like = _stand_in(optimizer, base)
    (group,) = like.param_groups
    kept = _others(group)
    rates: List[float] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            scheduler = make(like)
            _refuse_odd(scheduler, like)
            for k in range(updates):
                if k and k % every == 0:
                    like.step()
                    scheduler.step()
                rates.append(float(group["lr"]))
                if _others(group, kept) != kept:
                    break
        except BadInput:
            raise
        except Exception as error:  # whatever the scheduler raises, such as one that was planned shorter
            raise BadInput(f"{KEY}: {_name(make)}: at update {len(rates)} of {updates}: {summarize(error)}") from error
    moved = [key for key in kept if group[key] != kept[key]]
    if moved:
        raise BadInput(
            f"{KEY}: {type(scheduler).__name__}: changes {' and '.join(moved)}: a schedule here sets the learning rate alone"
            " (cycle_momentum=False)"
        )
    if not all(math.isfinite(rate) and rate >= 0 for rate in rates):
        raise BadInput(f"{KEY}: {type(scheduler).__name__}: gives rates that are no numbers >= 0")
    return rates


def _stand_in(optimizer: torch.optim.Optimizer, base: float) -> torch.optim.Optimizer:
    """An optimizer of one parameter with the run's settings, those of its first group, and the rate `base`."""
    like = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=base)
    like.defaults = dict(optimizer.defaults)
    settings = {key: value for key, value in optimizer.param_groups[0].items() if key not in ("params", "stage")}
    like.param_groups[0].update({"momentum": 0.0, **settings, "lr": base})
    return like


def _others(group: Any, known: Any = None) -> Any:
    """All settings but the rate; of those that `known` has."""
    left = ("params", "lr", "initial_lr")
    return {key: value for key, value in group.items() if key not in left and (known is None or key in known)}


def _refuse_odd(scheduler: Any, optimizer: torch.optim.Optimizer) -> None:
    kind = type(scheduler).__name__
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise BadInput(
            f"{KEY}: {kind}: follows what evaluations measure; here a rate is a function of the update alone, as rules that"
            " change it and resumed runs need: use another scheduler, or early_stopping"
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
