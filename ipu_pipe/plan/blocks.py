"""Count the costs of blocks with losses of their own: those of auxiliary heads, minus gradients
that are not computed.

    units       a   b | c   d | e          three blocks, each on its own device
    added             head    head         a head at the end of each block but the last
    spared              c       e          no gradient of a block's input, which is detached

Source: Laskin et al. 2020, section 3. The costs are counted on the meta device, in one pass for all
places where a block may begin.
"""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass, replace
from typing import Any, Sequence

import torch
from torch import nn

from ipu_pipe.errors import BadInput, raise_faults, summarize
from ipu_pipe.hardware.unit_costs import Unit
from ipu_pipe.local.heads import AugLocal, Heads, make_head
from ipu_pipe.model.batch import call_model, count_samples, list_tensors
from ipu_pipe.model.loss import Take
from ipu_pipe.model.meta import make_shapes, move_to_meta
from ipu_pipe.model.observation import ModuleCall, observe_costs


@dataclass(frozen=True)
class BlockUnits:
    """The costs of units in blocks with losses of their own.

    `heads[i]`: the cost of the head if a block ends with unit i (n - 1 of them, because the last
    block has no head). `first[i]`: the cost of unit i if a block begins with it, so that its
    backward computes no gradient of its input.
    """

    heads: tuple[Unit, ...]
    first: tuple[Unit, ...]


def count_blocks(
    model: nn.Module,
    x: Any,
    units: Sequence[Unit],
    head: Heads | None = None,
    take: Take | None = None,
) -> BlockUnits:
    """Count the blocks of a model whose `units` were counted with `x`; figures are for a sample.

    `head` makes the heads, by default the model's `local_head` or the usual head for the
    activations' shape, for the part of the output that `take` selects. Raise `BadInput` if a block
    cannot begin at every unit (a skip connection crosses), or without a head.
    """
    if isinstance(head, AugLocal):
        raise BadInput(
            "method_args.head: depth: its layers depend on where all blocks begin: name the stages"
        )
    make = head or getattr(model, "local_head", None) or functools.partial(make_head, model)
    try:
        with move_to_meta(model):
            whole = _BlockAtEveryUnit(model, [unit.name for unit in units[1:]])
            # a first pass only for the activations, by whose shapes the heads are made
            with torch.no_grad():
                call_model(whole, make_shapes(x))
            _refuse_skip_connections(units, whole, count_samples(x))
            output = whole.output if take is None else take(whole.output)
            for value in whole.ends:
                # a user's function may make it with values
                whole.heads.append(make(value, output).to("meta"))
            # a new input: the model may have written to the first one
            shapes = make_shapes(x)
            observed = observe_costs(whole, shapes, lambda: call_model(whole, shapes))
    except BadInput:
        raise
    # the user's code may raise anything
    except Exception as error:
        raise BadInput(
            f"model: its blocks cannot be counted by shape: {summarize(error)}"
        ) from error
    calls_of_units, calls_of_heads = _split_calls(observed.calls, [unit.name for unit in units])
    first = tuple(
        replace(
            unit,
            backward_flops=sum(call.backward_flops for call in calls) / count_samples(x),
            backward_moved=sum(call.backward_moved for call in calls) / count_samples(x),
        )
        for unit, calls in zip(units, calls_of_units)
    )
    heads = tuple(
        _make_head_unit(
            unit,
            head_module,
            calls,
            {storage for call in unit_calls for storage in call.saved},
            count_samples(x),
        )
        for unit, head_module, calls, unit_calls in zip(
            units, whole.heads, calls_of_heads, calls_of_units
        )
    )
    return BlockUnits(heads, first)


def _refuse_skip_connections(units: Sequence[Unit], whole: _BlockAtEveryUnit, samples: int) -> None:
    """Raise `BadInput` if more than the detached activation crosses the beginning of a unit."""
    # bytes of a sample are quotients, which may differ in the last digit
    most = [value.numel() * value.element_size() / samples * (1 + 1e-9) for value in whole.ends]
    raise_faults(
        [
            f"method: blocks with their own losses cannot begin at {unit.name}: a skip "
            f"connection crosses there"
            for unit, before, size in zip(units[1:], units, most)
            if before.output_bytes > size
        ]
    )


class _BlockAtEveryUnit(nn.Module):
    """A model with a block at every unit: it detaches the input of every module of `begins` and
    runs it through a head.
    """

    def __init__(self, model: nn.Module, begins: Sequence[str]) -> None:
        super().__init__()
        self.model = model
        self.heads = nn.ModuleList()
        self.begins = list(begins)
        # activations at the end of each unit but the last
        self.ends: list[torch.Tensor] = []
        self.output: Any = None

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Return the model's output and every head's."""
        # the module runs twice: without heads, then with them
        self.ends = []

        def enter(module: nn.Module, inputs: Any) -> Any:
            # integers that come along, such as positions, feed no head
            self.ends.append(next(t for t in list_tensors(inputs) if t.is_floating_point()))
            return tuple(
                value.detach() if isinstance(value, torch.Tensor) else value for value in inputs
            )

        with contextlib.ExitStack() as hooks:
            for name in self.begins:
                hooks.enter_context(self.model.get_submodule(name).register_forward_pre_hook(enter))
            self.output = self.model(*inputs, **named)
        # heads run after the whole model, so that their calls do not stand between those of a unit
        return [self.output, *[head(value) for head, value in zip(self.heads, self.ends)]]


def _split_calls(
    calls: Sequence[ModuleCall], names: Sequence[str]
) -> tuple[list[list[ModuleCall]], list[list[ModuleCall]]]:
    """Return the calls of each unit, and of each head."""
    unit_of_module: dict[str, int] = {
        f"model.{name}" if name else "model": i for i, name in enumerate(names)
    }
    of_units: list[list[ModuleCall]] = [[] for _ in names]
    of_heads: list[list[ModuleCall]] = [[] for _ in names[1:]]
    # calls come in the order of execution: until the next unit or head begins, all belong to this
    # one
    part = of_units[0]
    for call in calls:
        path = call.name.split(".")
        if path[0] == "heads" and len(path) > 1:
            part = of_heads[int(path[1])]
        elif call.name in unit_of_module:
            part = of_units[unit_of_module[call.name]]
        part.append(call)
    return of_units, of_heads


def _make_head_unit(
    unit: Unit, head: nn.Module, calls: Sequence[ModuleCall], saved_by_unit: Any, samples: int
) -> Unit:
    """Return the head after a unit as a unit, without the storages `saved_by_unit`, which are saved
    for the backward anyway.
    """
    saved = {
        storage: size
        for call in calls
        for storage, size in call.saved.items()
        if storage not in saved_by_unit
    }
    return Unit(
        f"head after {unit.name}",
        sum(call.flops for call in calls) / samples,
        sum(call.backward_flops for call in calls) / samples,
        sum(parameter.numel() for parameter in head.parameters() if parameter.requires_grad),
        # nothing leaves a head for another device
        0.0,
        sum(saved.values()) / samples,
        unit.number_bytes,
        forward_moved=sum(call.moved for call in calls) / samples,
        backward_moved=sum(call.backward_moved for call in calls) / samples,
    )
