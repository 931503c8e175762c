"""A model's units: the places where a stage may begin and what runs from each to the next, counted by shape or measured.

Counted: one forward and backward on shapes, which take no memory: a model of billions of parameters, made under
`torch.device("meta")`, is counted on any machine. Where the forward looks at values, of a few real samples. Measured: seconds of
each unit's passes of a real microbatch, on the device where it lies.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Dict, NamedTuple, Optional, Sequence, Tuple

from torch import nn

from ipu_pipe.errors import BadInput, summarize
from ipu_pipe.hardware.unit_costs import MeasuredPasses, Unit
from ipu_pipe.model.balancing import list_top_places
from ipu_pipe.model.batch import (
    call_model,
    clone_tensors,
    count_samples,
    describe_tensors,
    get_first_tensor,
    take_samples,
)
from ipu_pipe.model.flops import HOW
from ipu_pipe.model.loss import Loss
from ipu_pipe.model.meta import can_run_on_meta, move_to_meta, to_meta
from ipu_pipe.model.observation import (
    Observation,
    check_runs_modules,
    find_running_ancestor,
    list_parameters,
    observe_costs,
    observe_execution,
)
from ipu_pipe.model.precision import get_given_loss, uncast_temporarily
from ipu_pipe.model.restoring import undisturbed
from ipu_pipe.model.timing import take_median, time_passes

FEW = 2  # samples of a real forward; a batch norm refuses one


class CountedUnits(NamedTuple):
    """Units in the order of execution, and how their figures were come by, for the user."""

    units: Tuple[Unit, ...]
    how: str


def count_units(
    model: nn.Module, x: Any, begins: Sequence[str] = (), loss: Optional[Loss] = None, y: Any = None
) -> CountedUnits:
    """The units of a model that takes microbatches like `x`, between modules of its top-level sequence and at the modules
    `begins`, figures for a sample. Model, `x` and `y` may lie on the meta device. The `loss` of its outputs and labels `y`, where
    given, is in the last one. What two units keep of one memory is the first one's. Raises BadInput."""
    try:
        calls, runs = observe_execution(model, x)
        check_runs_modules(calls)
        with uncast_temporarily(model):  # what a precision makes of the sizes is the caller's
            seen, samples = _counted(model, x, get_given_loss(loss), y)
    except BadInput:
        raise
    except Exception as error:  # whatever the user's model raises
        raise BadInput(f"model: it cannot be counted on {describe_tensors(x)}: {summarize(error)}") from error
    how = (
        "by shape"
        if samples == count_samples(x) and can_run_on_meta(model, x)
        else f"in a forward and backward of {samples} samples"
    )
    places = list_top_places(model, calls, runs)
    first = places[0] or next(each.name for each in seen.calls if each.works)
    wanted = {*places[1:], *begins} - {first}
    starts = [0, *[i for i, each in enumerate(seen.calls) if each.name in wanted]]
    names = [first, *[seen.calls[i].name for i in starts[1:]]]
    owned = _parameters(model, seen)
    kept: Dict[int, int] = {}  # memory -> the last unit that keeps it
    units = []
    for i, (name, a, b) in enumerate(zip(names, starts, [*starts[1:], len(seen.calls)])):
        own = seen.calls[a:b]
        saved = {place: size for each in own for place, size in each.saved.items()}
        again: Dict[int, float] = {}
        for place in [place for place in saved if place in kept]:
            again[i - kept[place]] = again.get(i - kept[place], 0.0) + saved.pop(place) / samples
            kept[place] = i
        kept.update(dict.fromkeys(saved, i))
        units.append(
            Unit(
                name,
                sum(each.flops for each in own) / samples,
                sum(each.backward_flops for each in own) / samples,
                sum(owned.get(each.name, 0) for each in own),
                (seen.live[b] if b < len(seen.calls) else 0) / samples,
                sum(saved.values()) / samples,
                next((p.element_size() for p in model.parameters()), 4),
                forward_moved=sum(each.moved for each in own) / samples,
                backward_moved=sum(each.backward_moved for each in own) / samples,
                also_kept=tuple(sorted(again.items())),
            )
        )
    return CountedUnits(tuple(units), f"FLOPs {HOW}, {how}")


def _counted(model: nn.Module, x: Any, loss: Optional[Loss], y: Any) -> Tuple[Observation, int]:
    """A pass, and of how many samples."""

    def passed(x: Any, y: Any) -> Any:
        return call_model(model, x) if loss is None else loss(call_model(model, x), y)

    if can_run_on_meta(model, x):
        try:
            with move_to_meta(model):
                shapes, labels = to_meta((x, y))
                return observe_costs(model, shapes, lambda: passed(shapes, labels)), count_samples(x)
        except Exception:  # its forward looks at values: what the user's code raises then may be anything
            if get_first_tensor(x).is_meta:
                raise
    some = clone_tensors(take_samples(x, FEW))
    with undisturbed(model):
        return observe_costs(model, some, lambda: passed(some, take_samples(y, FEW))), count_samples(some)


def _parameters(model: nn.Module, seen: Observation) -> Dict[str, int]:
    """Trained numbers that each call answers for, a weight used twice where it is used first."""
    order = {each.name: i for i, each in enumerate(seen.calls)}
    first: Dict[int, Tuple[int, int]] = {}
    for module, _, parameter in list_parameters(model):
        if parameter.requires_grad:
            place = order[find_running_ancestor(module, order)]
            first[id(parameter)] = (min(place, first.get(id(parameter), (place, 0))[0]), parameter.numel())
    found: Dict[str, int] = {}
    for place, size in first.values():
        found[seen.calls[place].name] = found.get(seen.calls[place].name, 0) + size
    return found


# ---- measured


def measure_units(
    costed: CountedUnits, model: nn.Module, loss: Loss, x: Any, y: Any, warm_up: int = 2, repeats: int = 5
) -> CountedUnits:
    """The units with the seconds of their passes of the microbatch `x`, `y` on its device, medians of `repeats` after a
    `warm_up`. The model is left as it was. On torch 2.0 a backward's time is divided as the FLOPs of the backwards are."""
    begins = {unit.name: i for i, unit in enumerate(costed.units)}
    with undisturbed(model):
        runs = [
            time_passes(
                model,
                lambda: [loss(call_model(model, clone_tensors(x)), y)],
                begins,
                len(begins),
                get_first_tensor(x).is_cuda,
            )
            for _ in range(warm_up + repeats)
        ]
    found = take_median(runs[warm_up:])
    made = []
    for i, unit in enumerate(costed.units):
        if found.backward:
            backward = found.backward[i]
        else:
            whole = sum(each.backward_flops for each in costed.units) or 1.0
            backward = found.whole_backward * unit.backward_flops / whole
        made.append(
            replace(unit, measured=(*unit.measured, MeasuredPasses(count_samples(x), found.forward[i], backward)))
        )
    return CountedUnits(
        tuple(made),
        f"{costed.how}; seconds measured with {count_samples(x)} samples on {get_first_tensor(x).device.type}",
    )
