"""Verify before training that a model's pieces, run in a chain, compute what the whole model
computes, bit for bit.

The recording behind the pieces may miss parts of a forward (numbers that Python computes from a
tensor's values, counters, tensors kept in attributes). So pieces and whole model run on other
values than the recorded ones, twice in training, and any difference is refused. The same passes
show effects of the whole model's training that pieces on several processes cannot have.
"""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any, Callable, Mapping, NamedTuple, Sequence

import torch
from torch import nn
from torch.utils._pytree import tree_map

from ipu_pipe.cut.crossing import get_memory_order, invert_order
from ipu_pipe.cut.cutting import Piece
from ipu_pipe.errors import BadInput, summarize
from ipu_pipe.model.batch import call_model, clone_tensors, flatten_tensors
from ipu_pipe.model.devices import get_kind
from ipu_pipe.model.modes import set_mode
from ipu_pipe.model.observation import ForwardEffects, has_equal_values, observe_effects
from ipu_pipe.model.precision import is_cast
from ipu_pipe.model.randomness import KeyedRandomness, derive_seed
from ipu_pipe.model.restoring import restore_all, restore_modes
from ipu_pipe.text import list_some


class TrainingEffects(NamedTuple):
    """The side effects of the whole model's training pass.

    `forward`: those of its forward. `changed_by_backward`: buffers that its backward changes (a
    checkpoint in it runs modules again). `checkpointed`: modules that its backward runs again but
    the pieces' backwards do not (the checkpoint itself is cut).
    """

    forward: ForwardEffects
    changed_by_backward: list[str] = []
    checkpointed: list[str] = []


def verify_pieces(model: nn.Module, pieces: Sequence[Piece], x: Any) -> TrainingEffects:
    """Raise `BadInput` if pieces and model differ: in module outputs, gradients and buffers in
    training, or in the output in evaluation. The model is left as it was; its cut keeps the
    recordings and the layouts of gradients that cross it.
    """
    # meta tensors have no values to compare
    if any(t.is_meta for t in flatten_tensors(x)):
        return TrainingEffects(ForwardEffects())
    with torch.no_grad():
        pieces[0].cut.prepare(x, training=False)
    x = tree_map(change_values, x)
    effects = TrainingEffects(observe_effects(model, x))
    for training in (True, False):
        run = partial(_run, model, pieces, x, effects.forward, training)
        whole = run(chained=False)
        try:
            chained = run(chained=True)
        # the user's model may raise anything
        except Exception as error:
            raise _make_refusal(model, f"its pieces fail: {summarize(error)}") from error
        differing = _list_differing(whole.tensors, chained.tensors)
        if differing:
            # if the whole model's own output varies, a difference proves nothing
            unstable = _list_differing(whole.tensors, run(chained=False).tensors)
            varying = [label for label in differing if label in unstable]
            differing = [label for label in differing if label not in unstable]
            is_output = bool(varying) and varying[0].startswith(("output", "result"))
            if (
                is_output
                and not differing
                and not get_kind(flatten_tensors(x)[0].device).is_accelerator
            ):
                why = (
                    "something draws random numbers from a generator of its own, which no seed "
                    "of a microbatch reaches"
                )
                raise _make_refusal(
                    model, f"the {varying[0]} differs each time: {why}", "draw without one"
                )
        if differing:
            label = differing[0]
            drawing = _find_cut_random_modules(pieces, effects.forward) if training else []
            expected = whole.tensors.get(label)
            actual = chained.tensors.get(label)
            raise _make_refusal(
                model,
                _describe_difference(label, expected, actual, pieces),
                _choose_remedy(model, label, expected is not None and actual is not None, drawing),
            )
        if training:
            checkpointed = [name for name in whole.rerun if name not in chained.rerun]
            effects = TrainingEffects(effects.forward, whole.changed_by_backward, checkpointed)
    return effects


def _list_differing(
    expected: Mapping[str, torch.Tensor | None], actual: Mapping[str, torch.Tensor | None]
) -> list[str]:
    """Return the labels whose tensors differ or exist in only one of two passes, in order."""
    return [
        label
        for label in dict.fromkeys([*expected, *actual])
        if not _is_same(expected.get(label), actual.get(label))
    ]


def _choose_remedy(model: nn.Module, label: str, both_exist: bool, drawing: Sequence[str]) -> str:
    """Return the remedy for a tensor that differs in pieces. `both_exist`: neither pass lacks it;
    `drawing`: the cut modules whose own forward draws random numbers.
    """
    if label.startswith("gradient") and both_exist and is_cast(model):
        return (
            "autocast sums the gradient of a tied weight in bfloat16: use precision "
            "float32 or bfloat16"
        )
    if drawing:
        return (
            f"{list_some(drawing)}: a stage begins inside, and its own forward draws "
            f"random numbers (functional dropout):"
            " begin stages at modules outside of it, or draw in a module (nn.Dropout)"
        )
    return MOVE_INTO_MODULES


def _find_cut_random_modules(pieces: Sequence[Piece], effects: ForwardEffects) -> list[str]:
    """Return the modules in which stages begin and whose own forward draws random numbers."""
    uncut = [f"{name}." for piece in pieces for name in piece.names]
    return [
        name or "the model itself"
        for name in effects.draws
        if not any(f"{name}.".startswith(n) for n in uncut)
    ]


def change_values(t: Any) -> Any:
    """Return an input with other values that are valid for the model too."""
    if not isinstance(t, torch.Tensor) or not t.dim():
        return t
    return t.flip(0) / 2 if t.is_floating_point() else t[torch.arange(len(t), device=t.device) // 2]


MOVE_INTO_MODULES = "move what its forward does outside modules into modules"


def _make_refusal(model: nn.Module, why: str, remedy: str = MOVE_INTO_MODULES) -> BadInput:
    return BadInput(
        f"model: {type(model).__name__}: cut into pieces it is not the same model: {why}: "
        f"{remedy}, or use backend: "
        "{name: emulator} with a method that has no blocks"
    )


def _describe_difference(label: str, expected: Any, actual: Any, pieces: Sequence[Piece]) -> str:
    kind, _, name = label.partition(" ")
    stage = next((s for s, piece in enumerate(pieces) if name in piece.names), None)
    subject = (
        f"{kind} of {name}" + (f" (stage {stage})" if stage is not None else "") if name else kind
    )
    if expected is None or actual is None or expected.requires_grad != actual.requires_grad:
        return f"the {subject} has a gradient in only one of them (no_grad around modules?)"
    if expected.dtype != actual.dtype:
        return (
            f"the {subject} is {actual.dtype} in pieces, {expected.dtype} in the whole "
            f"(autocast around modules?)"
        )
    return f"the {subject} differs"


def _is_same(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.dtype == b.dtype and a.requires_grad == b.requires_grad and has_equal_values(a, b)


class _Pass(NamedTuple):
    """The results of a pass: tensors by label (module outputs, gradients and buffers in training),
    the buffers that its backward changed, and the modules that its backward ran again."""

    tensors: dict[str, torch.Tensor | None]
    changed_by_backward: list[str]
    rerun: list[str]


def _run(
    model: nn.Module,
    pieces: Sequence[Piece],
    x: Any,
    effects: ForwardEffects,
    training: bool,
    chained: bool,
) -> _Pass:
    """Run the whole model, or the pieces if `chained`: two training forwards and a backward, or one
    forward in evaluation.
    """
    tensors: dict[str, torch.Tensor | None] = {}
    rerun: list[str] = []
    with restore_all(model), restore_modes(*pieces), torch.set_grad_enabled(training):
        set_mode(model, training)
        for piece in pieces:
            piece.training = training
        randomness = KeyedRandomness(model, effects.draws, 0, flatten_tensors(x)[0].device)
        with contextlib.ExitStack() as hooks:
            hooks.callback(randomness.remove)
            # in evaluation hooks would keep some modules off their fast paths
            if training:
                _record_outputs(pieces, tensors, hooks)
            # twice, because a model that counts its forwards may change in the second
            for _ in range(2 if training else 1):
                torch.manual_seed(derive_seed("verification"))
                batch = clone_tensors(x)
                with randomness.forward(0):
                    outputs, run_other_backwards = (
                        _chain(pieces, batch) if chained else (call_model(model, batch), None)
                    )
            results = flatten_tensors(outputs)
            tensors.update({f"result [{i}]": t.detach().clone() for i, t in enumerate(results)})
            before = {name: b.clone() for name, b in model.named_buffers()}
            _record_reruns(model, rerun, hooks)
            # in evaluation only an output that is itself a weight requires a gradient
            if training:
                with randomness.backward(0):
                    _run_backward([t for t in results if t.requires_grad])
                    if run_other_backwards is not None:
                        run_other_backwards()
        changed = [name for name, b in model.named_buffers() if not _is_same(b, before[name])]
        for name, p in model.named_parameters():
            tensors[f"gradient {name}"] = None if p.grad is None else p.grad.clone()
        for name, buffer in model.named_buffers():
            tensors[f"buffer {name}"] = buffer.detach().clone()
    return _Pass(tensors, changed, rerun)


def _record_outputs(
    pieces: Sequence[Piece],
    tensors: dict[str, torch.Tensor | None],
    hooks: contextlib.ExitStack,
) -> None:
    """Let the modules of the pieces put their outputs into `tensors`, until `hooks` ends."""

    def record(name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        for i, tensor in enumerate(flatten_tensors(output)):
            label = f"output {name}" if not i else f"output {name} [{i}]"
            tensors[label] = tensor.detach().clone().requires_grad_(tensor.requires_grad)

    for piece in pieces:
        for name, module in zip(piece.names, piece.called):
            hooks.callback(module.register_forward_hook(partial(record, name)).remove)


def _record_reruns(model: nn.Module, rerun: list[str], hooks: contextlib.ExitStack) -> None:
    """Let the modules of a model add their names to `rerun` when they run, until `hooks` ends."""

    def record(name: str, module: nn.Module, inputs: Any) -> None:
        rerun.append(name)

    for name, module in model.named_modules():
        hooks.callback(module.register_forward_pre_hook(partial(record, name)).remove)


def _run_backward(results: Sequence[torch.Tensor]) -> None:
    """Run the backward from results with equal random gradients in every pass."""
    generator = torch.Generator().manual_seed(derive_seed("verification"))
    directions = []
    for t in results:
        direction = torch.randn(t.shape, generator=generator)
        directions.append(direction.to(t.device, t.dtype))
    if results:
        torch.autograd.backward(results, directions)


def _chain(pieces: Sequence[Piece], x: Any) -> tuple[Any, Callable[[], None]]:
    """Run the pieces in a chain, each on copies of the previous one's output, as over messages.

    Return the last output, and a function that runs the backwards of the other pieces after the
    last piece's backward.
    """
    # by cut
    sent: list[list[torch.Tensor]] = []
    # by cut and tensor, from hooks, because a leaf's `grad` would take the leaf's memory layout
    gradients: list[list[list[torch.Tensor]]] = []
    value: Any = x
    for piece in pieces:
        value = piece(value)
        if piece is not pieces[-1]:
            sent.append(flatten_tensors(value))
            value = tree_map(lambda t: t.detach().clone().requires_grad_(t.requires_grad), value)
            gradients.append([[] for _ in sent[-1]])
            for t, arrived in zip(flatten_tensors(value), gradients[-1]):
                if t.requires_grad:
                    t.register_hook(arrived.append)

    def run_other_backwards() -> None:
        orders: list[list[tuple[int, ...]]] = []
        for piece, outs, arrived in zip(reversed(pieces[:-1]), reversed(sent), reversed(gradients)):
            orders.insert(
                0,
                [get_memory_order(grads[0] if grads else out) for out, grads in zip(outs, arrived)],
            )
            pairs = [
                (out, _as_sent(grads[0], order))
                for out, grads, order in zip(outs, arrived, orders[0])
                if grads and out.requires_grad
            ]
            # a tied weight has gradients from later pieces: pass them on, so that autograd adds in
            # the same order
            later = [(p, p.grad) for p in piece.parameters() if p.grad is not None]
            for p, _ in later:
                p.grad = None
            pairs += later
            if pairs:
                torch.autograd.backward([out for out, _ in pairs], [grad for _, grad in pairs])
        pieces[0].cut.remember_gradients(orders)

    return value, run_other_backwards


def _as_sent(gradient: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    """Return a gradient as it comes out of a message: contiguous in this order of dimensions."""
    return (
        gradient.contiguous()
        if not order
        else gradient.permute(order).contiguous().permute(invert_order(order))
    )
