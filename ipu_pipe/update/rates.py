"""Learning rates as pure functions of the update index, so that a resumed run continues them
exactly.

Schedulers of torch.optim are simulated once over a dummy optimizer, with one parameter group for
each of the config's `optimizer.groups`. Only the rates that a scheduler sets are kept, because
rules rescale a rate and stages read it ahead.
"""

from __future__ import annotations

import math
import warnings
from typing import Any, Callable, Mapping

import torch

from ipu_pipe.errors import BadInput, summarize
from ipu_pipe.text import describe_kind, show


def compute_rate(
    settings: Any, base: float, k: int, updates: int, updates_per_epoch: int | None
) -> float:
    """Return the learning rate of update k of `updates` in all, both counted from 0.

    `settings` has `name`, `warmup_steps` w, `milestones` (in epochs) and `gamma`. With t = (k - w)
    / (updates - w), the share done after the warm-up:

        constant  base                          cosine  base (1 + cos(pi t)) / 2
        step      base gamma^(milestones passed)    linear  base (1 - t)

    times (k + 1) / w during the first w updates.
    """
    w = settings.warmup_steps
    # a warm-up may be as long as the run
    done = min(max(k - w, 0) / max(updates - w, 1), 1.0)
    factor = min((k + 1) / w, 1.0) if w else 1.0
    if settings.name == "cosine":
        return base * factor * (1 + math.cos(math.pi * done)) / 2
    if settings.name == "linear":
        return base * factor * (1 - done)
    if settings.name == "step":
        assert updates_per_epoch is not None
        return (
            base
            * factor
            * settings.gamma ** sum(k >= epoch * updates_per_epoch for epoch in settings.milestones)
        )
    return base * factor


def make_rate(
    settings: Any, base: float, updates: int, updates_per_epoch: int | None, per_call: int = 1
) -> Callable[[int], float]:
    """Return the learning rate as a function of the update, before the update rules.

    The `per_call` updates that a device makes in one call all have the rate of the first.
    """
    total = (settings.total_steps or updates) if settings.falls else updates
    # randomized methods may update one stage more often than the run has steps, so k is clamped
    last = total - 1 if settings.falls else None

    def rate(k: int) -> float:
        k -= k % per_call
        return compute_rate(
            settings, base, k if last is None else min(k, last), total, updates_per_epoch
        )

    return rate


def scale_for_update_size(
    lr: float, momentum: float, reference: int, size: int
) -> tuple[float, float]:
    """Return (lr, momentum) for updates of `size` samples, given those for updates of `reference`
    samples.

    m = m_r^(N/N_r), lr = lr_r (1 - m) N / ((1 - m_r) N_r), N = `size`, N_r = `reference` (Chiley et
    al. 2019; Kosson et al. 2021, equation 9).
    """
    scaled = momentum ** (size / reference) if momentum else 0.0
    return lr * (1 - scaled) * size / ((1 - momentum) * reference), scaled


# the rate of a method without delay where a config sets none
DEFAULT_RATE = 0.05


def advise_rate(delay: float) -> float:
    """Return the learning rate for a run that sets none, whose greatest delay is `delay` updates.

        DEFAULT_RATE sin(pi / (4 D + 2)),      D = `delay`

    With a delay of D updates, plain SGD is stable up to (2 / curvature) sin(pi / (4 D + 2))
    (PipeMare, Lemma 1). So the rate is the same share of the limit as DEFAULT_RATE is without delay.
    It is rounded to four digits, so that the printed rate is the whole rate.
    """
    return float(f"{DEFAULT_RATE * math.sin(math.pi / (4 * delay + 2)):.4g}")


def choose_anneal_updates(first_milestone: int | None, warmup: int, updates: int) -> int:
    """Return the default of T1's K, in updates (PipeMare, section 3.1).

    It is a quarter of the first constant phase of a step schedule, or 5 x the linear warm-up, or a
    quarter of the run.
    """
    return max(
        first_milestone // 4
        if first_milestone
        else 5 * warmup
        if warmup
        else math.ceil(updates / 4),
        1,
    )


def make_plateau(
    base: float, args: Mapping[str, Any]
) -> torch.optim.lr_scheduler.ReduceLROnPlateau:
    """Return torch's ReduceLROnPlateau over an optimizer of one number, whose rate is the run's;
    `args` are its arguments.

    All processes step it with the same figures after each evaluation, where the pipeline is empty
    and no pass has read ahead.
    """
    # torch accepts any value here, and fails or increases the rate at an evaluation hours later
    for key, value in args.items():
        # torch takes a list of it, one for each group
        numbers = value if key == "min_lr" and isinstance(value, (list, tuple)) else [value]
        if key in PLATEAU_NUMBERS and any(
            type(number) not in (int, float) or number < 0 for number in numbers
        ):
            raise BadInput(f"lr_schedule.args.{key}: {show(value)}: must be a number >= 0")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=base)
    try:
        return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, **args)
    except (TypeError, ValueError) as error:
        raise BadInput(f"lr_schedule.args: {show(dict(args))}: {error}") from None


def get_present_rate(scheduler: Any) -> float:
    """Return the learning rate that a scheduler has set."""
    return float(scheduler.optimizer.param_groups[0]["lr"])


def export_plateau(scheduler: Any) -> dict[str, Any]:
    """Return the state of a scheduler of `make_plateau` for a checkpoint, as JSON values."""
    # JSON has no infinity, which is the best value before the first evaluation
    best = scheduler.best if math.isfinite(scheduler.best) else None
    return {
        "rate": get_present_rate(scheduler),
        "best": best,
        **{key: getattr(scheduler, key) for key in PLATEAU_STATE},
    }


def import_plateau(scheduler: Any, state: Mapping[str, Any]) -> None:
    """Restore a state that `export_plateau` returned."""
    scheduler.optimizer.param_groups[0]["lr"] = state["rate"]
    # the infinity of a new scheduler stays
    if state["best"] is not None:
        scheduler.best = state["best"]
    for key in PLATEAU_STATE:
        setattr(scheduler, key, state[key])


PLATEAU_NUMBERS = ("factor", "patience", "threshold", "cooldown", "min_lr", "eps")
PLATEAU_STATE = ("num_bad_epochs", "cooldown_counter", "last_epoch")
# returns a torch.optim.lr_scheduler
SchedulerFactory = Callable[[torch.optim.Optimizer], Any]
KEY = "lr_schedule"


def simulate_scheduler(
    make: SchedulerFactory,
    optimizer: torch.optim.Optimizer,
    base: float,
    updates: int,
    every: int = 1,
    members: int = 1,
) -> list[list[float]]:
    """Return the rates that the scheduler of `make` sets: for each of `updates` updates, one for
    each of `members`, the config's `optimizer.groups`.

    The run's `optimizer` stays as it is. All groups begin with the rate `base`. The scheduler is
    stepped after each `every` updates. Raise `BadInput` if it is not a torch.optim.lr_scheduler, or
    changes more than the rate.
    """
    dummy = _make_dummy_optimizer(optimizer, base, members)
    # the list itself, so that another one in its place is noticed
    groups = dummy.param_groups
    rate_keys = ("params", "lr", "initial_lr")
    settings = [
        {key: value for key, value in group.items() if key not in rate_keys} for group in groups
    ]
    rates: list[list[float]] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            scheduler = make(dummy)
            _require_scheduler(scheduler, dummy)
            for k in range(updates):
                if k == every:
                    # a scheduler asks whether the optimizer has stepped: once, since steps take time
                    dummy.step()
                if k and k % every == 0:
                    scheduler.step()
                if (
                    dummy.param_groups is not groups
                    or len(groups) != members
                    or not all("lr" in group for group in groups)
                ):
                    raise BadInput(
                        f"{KEY}: {type(scheduler).__name__}: changes the optimizer's parameter "
                        f"groups"
                    )
                rates.append([float(group["lr"]) for group in groups])
                changed = [
                    key
                    for group, start in zip(groups, settings)
                    for key in start
                    if group.get(key) != start[key]
                ]
                if changed:
                    raise BadInput(
                        f"{KEY}: {type(scheduler).__name__}: changes "
                        f"{' and '.join(dict.fromkeys(changed))}: a schedule here"
                        " sets the learning rate alone (cycle_momentum=False)"
                    )
        except BadInput:
            raise
        # a scheduler may raise anything, for example if it is made for a shorter run
        except Exception as error:
            # a partial has no name, but what it calls
            factory: Any = getattr(make, "func", make)
            name = getattr(factory, "__name__", type(factory).__name__)
            raise BadInput(
                f"{KEY}: {name}: at update {len(rates)} of {updates}: {summarize(error)}"
            ) from error
    # an infinite rate would be found only by the update that it destroys
    if not all(math.isfinite(rate) and rate >= 0 for row in rates for rate in row):
        raise BadInput(
            f"{KEY}: {type(scheduler).__name__}: returned a rate that is negative or not finite"
        )
    return rates


def _make_dummy_optimizer(
    optimizer: torch.optim.Optimizer, base: float, members: int
) -> torch.optim.Optimizer:
    """Make an optimizer that trains one number in each of the config's groups.

    A group has the rate `base` and otherwise the settings of the first of the run's groups that
    come from it, if any trains.
    """
    # reversed, because the last one that is put in stays
    first = {group["member"]: group for group in reversed(optimizer.param_groups)}
    dummy = torch.optim.SGD(
        [{"params": [torch.nn.Parameter(torch.zeros(1))]} for _ in range(members)],
        lr=base,
    )
    # SGD.step reads `differentiable`, which Muon and others do not have
    dummy.defaults = {"differentiable": False, **optimizer.defaults}
    for number, group in first.items():
        settings = {
            key: value for key, value in group.items() if key not in ("params", "stage", "member")
        }
        # SGD's step reads a momentum, which groups of Adam lack
        dummy.param_groups[number].update({"momentum": 0.0, **settings, "lr": base})
    return dummy


def _require_scheduler(scheduler: Any, optimizer: torch.optim.Optimizer) -> None:
    """Raise `BadInput` unless `scheduler` is one of this optimizer whose rates depend on the update
    alone.
    """
    kind = type(scheduler).__name__
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise BadInput(
            f"{KEY}: {kind}: depends on evaluations; use {KEY}: {{name: plateau, args: {{...}}}} "
            f"with its arguments"
        )
    if not isinstance(scheduler, torch.optim.lr_scheduler.LRScheduler):
        raise BadInput(
            f"{KEY}: returned {describe_kind(scheduler)}: must return a torch.optim.lr_scheduler "
            f"of its argument"
        )
    if getattr(scheduler, "optimizer", optimizer) is not optimizer:
        raise BadInput(
            f"{KEY}: {kind}: is of another optimizer: must return a torch.optim.lr_scheduler of "
            f"its argument"
        )
