"""A model's units: the places where a stage may begin and what runs from each to the next, counted
by shape or measured.

Counted: one forward and backward on shapes, which take no memory: a model of billions of
parameters, made under `torch.device("meta")`, is counted on any machine. If the forward depends on
values, it is counted with a few real samples. A measurement gives the seconds of each unit's passes
of a real microbatch, on the microbatch's device.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple, Sequence

from torch import nn

from ipu_pipe.errors import BadInput, summarize
from ipu_pipe.hardware.unit_costs import MeasuredPasses, Unit
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
from ipu_pipe.model.meta import can_run_on_meta, make_shapes, move_to_meta
from ipu_pipe.model.observation import (
    Observation,
    find_weight_uses,
    observe_costs,
    observe_execution,
)
from ipu_pipe.model.precision import get_uncast_loss, restore_forward
from ipu_pipe.model.restoring import restore_all
from ipu_pipe.model.stages import list_top_cut_points
from ipu_pipe.model.timing import combine_spreads, time_passes

# samples of a real forward; a batch norm refuses one sample
FEW = 2


class CountedUnits(NamedTuple):
    """Units in the order of execution, and `how` their figures were found, for the user."""

    units: tuple[Unit, ...]
    how: str


def count_units(
    model: nn.Module,
    x: Any,
    begins: Sequence[str] = (),
    loss: Loss | None = None,
    y: Any = None,
) -> CountedUnits:
    """Return the units of a model that takes microbatches like `x`: between modules of its
    top-level sequence and at `begins`.

    Figures are for a sample. Model, `x` and `y` may be on the meta device. The `loss` of its
    outputs and labels `y`, where given, is in the last unit. A tensor that two units keep belongs
    to the first. Raise `BadInput` if the model cannot be counted.
    """
    try:
        order = observe_execution(model, x)
        # sizes are scaled by the precision later
        with restore_forward(model):
            seen, samples = _observe(model, x, get_uncast_loss(loss), y)
    except BadInput:
        raise
    # the user's model may raise anything
    except Exception as error:
        raise BadInput(
            f"model: it cannot be counted on {describe_tensors(x)}: {summarize(error)}"
        ) from error
    how = (
        "by shape"
        if samples == count_samples(x) and can_run_on_meta(model, x)
        else f"in a forward and backward of {samples} samples"
    )
    cut_points = list_top_cut_points(model, order)
    # the model itself has no name to show
    first = cut_points[0] or next(call.name for call in seen.calls if call.computes)
    later = {*cut_points[1:], *begins} - {first}
    starts = [0, *[i for i, call in enumerate(seen.calls) if call.name in later]]
    names = [first, *[seen.calls[i].name for i in starts[1:]]]
    # weights that the loss alone reads: the pass with costs does not find them
    seen.unread = order.unread
    parameters_by_call = _count_parameters(model, seen)
    # storage -> the last unit that keeps it
    last_keeper: dict[int, int] = {}
    units = []
    ends = [*starts[1:], len(seen.calls)]
    for i, (name, start, end) in enumerate(zip(names, starts, ends)):
        calls_inside = seen.calls[start:end]
        saved = {storage: size for call in calls_inside for storage, size in call.saved.items()}
        # bytes that previous units keep too, by the distance to the last of them
        also_kept: dict[int, float] = {}
        for storage in [storage for storage in saved if storage in last_keeper]:
            distance = i - last_keeper[storage]
            also_kept[distance] = also_kept.get(distance, 0.0) + saved.pop(storage) / samples
            last_keeper[storage] = i
        last_keeper.update(dict.fromkeys(saved, i))
        units.append(
            Unit(
                name,
                sum(call.flops for call in calls_inside) / samples,
                sum(call.backward_flops for call in calls_inside) / samples,
                sum(parameters_by_call[start:end]),
                # nothing leaves the last unit
                (seen.live[end] if end < len(seen.calls) else 0) / samples,
                sum(saved.values()) / samples,
                next((p.element_size() for p in model.parameters()), 4),
                forward_moved=sum(call.moved for call in calls_inside) / samples,
                backward_moved=sum(call.backward_moved for call in calls_inside) / samples,
                also_kept=tuple(sorted(also_kept.items())),
            )
        )
    return CountedUnits(tuple(units), f"FLOPs {HOW}, {how}")


def _observe(
    model: nn.Module,
    x: Any,
    loss: Loss | None,
    y: Any,
) -> tuple[Observation, int]:
    """Observe a forward and backward; return the observation and its number of samples."""

    def run_pass(x: Any, y: Any) -> Any:
        return call_model(model, x) if loss is None else loss(call_model(model, x), y)

    if can_run_on_meta(model, x):
        try:
            with move_to_meta(model):
                shapes, labels = make_shapes((x, y))
                return observe_costs(
                    model, shapes, lambda: run_pass(shapes, labels)
                ), count_samples(x)
        # its forward reads values, and then may raise anything
        except Exception:
            # there are no values with which to try again
            if get_first_tensor(x).is_meta:
                raise
    # the forward may write to its input
    few = clone_tensors(take_samples(x, FEW))
    with restore_all(model):
        return observe_costs(
            model, few, lambda: run_pass(few, take_samples(y, FEW))
        ), count_samples(few)


def _count_parameters(model: nn.Module, seen: Observation) -> list[int]:
    """Return the number of trained values of each call. A weight that is used twice counts for the
    first call.
    """
    counts = [0] * len(seen.calls)
    for name, uses in find_weight_uses(model, seen).items():
        parameter = model.get_parameter(name)
        counts[min(use.call for use in uses)] += parameter.numel() * parameter.requires_grad
    return counts


# ---- measured


def measure_units(
    counted: CountedUnits,
    model: nn.Module,
    loss: Loss,
    x: Any,
    y: Any,
) -> CountedUnits:
    """Return the units with the seconds of their passes of the microbatch `x`, `y` on its device.

    The least of repeated passes. The model is left as it was. On torch 2.0 a backward's time is
    divided in proportion to the FLOPs of the backwards.
    """
    begins = {unit.name: i for i, unit in enumerate(counted.units)}
    seconds = time_passes(
        model,
        lambda: [loss(call_model(model, clone_tensors(x)), y)],
        begins,
        [unit.backward_flops for unit in counted.units],
    )
    unit_seconds = [f + b for f, b in zip(seconds.forward, seconds.backward)]
    spread = combine_spreads(unit_seconds, seconds.spread)
    passes = [
        MeasuredPasses(count_samples(x), *times) for times in zip(seconds.forward, seconds.backward)
    ]
    measured = [
        # beside those of other sizes, between which seconds are interpolated
        replace(unit, measured=(*unit.measured, times))
        for unit, times in zip(counted.units, passes)
    ]
    return CountedUnits(
        tuple(measured),
        f"{counted.how}; seconds measured with {count_samples(x)} samples on "
        f"{get_first_tensor(x).device.type}, which repeat within {spread:.1%}",
    )
