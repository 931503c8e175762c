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
from typing import Any, Callable, Dict, NamedTuple, Optional, Sequence

import torch
from torch import nn
from torch.utils._pytree import tree_map

from ipu_pipe.cut.crossing import (
    get_memory_order,
    get_raw_gradient,
    record_raw_gradient,
)
from ipu_pipe.cut.cutting import Piece
from ipu_pipe.errors import BadInput, summarize
from ipu_pipe.model.batch import call_model, clone_tensors, flatten_tensors
from ipu_pipe.model.devices import get_kind, seed_random
from ipu_pipe.model.modes import set_mode
from ipu_pipe.model.observation import ForwardEffects, has_equal_values, observe_effects
from ipu_pipe.model.randomness import KeyedRandomness, derive_seed
from ipu_pipe.model.restoring import restore_all, restore_modes
from ipu_pipe.text import list_some

_Tensors = Dict[str, Optional[torch.Tensor]]


class TrainingEffects(NamedTuple):
    """The side effects of the whole model's training pass.

    `forward`: those of its forward. `changed_by_backward`: buffers that its backward changes (a
    checkpoint in it runs modules again). `checkpointed`: modules that its backward runs again but
    the pieces' backwards do not (the checkpoint itself is cut).
    """

    forward: ForwardEffects
    changed_by_backward: list[str] = []
    checkpointed: list[str] = []


def verify_pieces(
    model: nn.Module, pieces: Sequence[Piece], x: Any, modes: Sequence[bool] = (True, False)
) -> TrainingEffects:
    """Raise `BadInput` if pieces and model differ: in module outputs, gradients and buffers in
    training, or in the output in evaluation. The model is left as it was; its cut keeps the
    recordings and the layouts of gradients that cross it.

    `modes`: training (True), evaluation (False), or both.
    """
    # meta tensors have no values to compare
    if any(t.is_meta for t in flatten_tensors(x)):
        return TrainingEffects(ForwardEffects())
    for training in modes:
        # a model that needs gradients in its forward (forces by `autograd.grad`) trains only
        with torch.set_grad_enabled(training), contextlib.suppress(RuntimeError):
            pieces[0].cut.prepare(x, training)
    x = tree_map(change_values, x)
    effects = TrainingEffects(observe_effects(model, x))
    for training in modes:
        run = partial(_run, model, pieces, x, effects.forward, training)
        try:
            whole = run(chained=False)
        # a model that takes gradients in its forward fails in evaluation, also when it is whole
        except RuntimeError:
            if training:
                raise
            return effects
        try:
            chained = run(chained=True)
        except BadInput:
            raise
        # the user's model may raise anything
        except Exception as error:
            raise _make_refusal(model, f"its pieces fail: {summarize(error)}") from error
        differing = _list_differing(whole.tensors, chained.tensors)
        if differing:
            again = run(chained=False).tensors
            why = _explain_difference(pieces, differing, whole.tensors, chained.tensors, again)
            if why:
                raise _make_refusal(model, why + _describe_draws(model, pieces, effects.forward))
        if training:
            checkpointed = [name for name in whole.rerun if name not in chained.rerun]
            effects = TrainingEffects(effects.forward, whole.changed_by_backward, checkpointed)
    return effects


def _list_differing(expected: _Tensors, actual: _Tensors) -> list[str]:
    """Return the labels whose tensors differ or exist in only one of two passes, in order."""
    return [
        label
        for label in dict.fromkeys([*expected, *actual])
        if not _is_same(expected.get(label), actual.get(label))
    ]


def _explain_difference(
    pieces: Sequence[Piece],
    differing: Sequence[str],
    whole: _Tensors,
    chained: _Tensors,
    again: _Tensors,
) -> str:
    """Describe the first tensor that differs between whole model and pieces; "" if all that differ
    vary by themselves, as in `again`, another pass of the whole model.

    Outputs of a CPU never vary by themselves, as kernels of an accelerator may.
    """
    unstable = _list_differing(whole, again)
    for label in differing:
        kind, _, name = label.partition(" ")
        stage = next((f" (stage {p.stage})" for p in pieces if name in p.names), "")
        subject = f"the {kind} of {name}{stage}" if name else f"the {kind}"
        expected, actual = whole.get(label), chained.get(label)
        if label not in unstable:
            return f"{subject} {_describe_difference(expected, actual)}"
        assert expected is not None
        if kind in ("output", "result") and not get_kind(expected.device).is_accelerator:
            return (
                f"{subject} differs each time: something draws random numbers from a generator of "
                "its own, which no seed of a microbatch reaches"
            )
    return ""


def _describe_draws(model: nn.Module, pieces: Sequence[Piece], effects: ForwardEffects) -> str:
    """Name the modules in which stages begin and whose own forward draws random numbers."""
    uncut = {m for piece in pieces for called in piece.called for m in called.modules()}
    cut = [name for name in effects.draws if model.get_submodule(name) not in uncut]
    names = list_some([name or "the model itself" for name in cut])
    return f"; a stage begins inside {names}, which draws random numbers by itself" if cut else ""


def change_values(t: Any) -> Any:
    """Return an input with other values that are valid for the model too."""
    if not isinstance(t, torch.Tensor) or not t.dim():
        return t
    # integers are repeated from the input itself, so that class and token numbers stay valid
    return t.flip(0) / 2 if t.is_floating_point() else t[torch.arange(len(t), device=t.device) // 2]


def _make_refusal(model: nn.Module, why: str) -> BadInput:
    return BadInput(
        f"model: {type(model).__name__}: cut into pieces it is not the same model: {why}: move "
        "what its forward does outside modules into modules (nn.Dropout in place of a functional "
        "dropout), begin no stage inside the module that does it, take "
        "precision float32 or bfloat16 in place of autocast where a weight is tied, or use "
        "backend: {name: emulator} with a method that has no blocks"
    )


def _describe_difference(expected: torch.Tensor | None, actual: torch.Tensor | None) -> str:
    if expected is None or actual is None or expected.requires_grad != actual.requires_grad:
        return "has a gradient in only one of them (no_grad around modules?)"
    kinds = [f"{t.dtype} of shape {tuple(t.shape)}" for t in (actual, expected)]
    if kinds[0] != kinds[1]:
        return f"is {kinds[0]} in pieces, {kinds[1]} in the whole (autocast around modules?)"
    # complex128 holds the values of every dtype
    difference = (expected.detach() - actual.detach().to(torch.complex128)).abs().max()
    return f"is the first tensor that differs, by up to {float(difference):.1e}"


def _is_same(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.dtype == b.dtype and a.requires_grad == b.requires_grad and has_equal_values(a, b)


class _Pass(NamedTuple):
    """The results of a pass: tensors by label (module outputs, gradients and buffers in training),
    the buffers that its backward changed, and the modules that its backward ran again."""

    tensors: _Tensors
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
    tensors: _Tensors = {}
    rerun: list[str] = []
    with restore_all(model), restore_modes(*pieces), torch.set_grad_enabled(training):
        set_mode(model, training)
        for piece in pieces:
            # not train(), which would change the modes of the modules inside
            piece.training = training
        device = flatten_tensors(x)[0].device
        randomness = KeyedRandomness(model, effects.draws, 0, device)
        with contextlib.ExitStack() as hooks:
            hooks.callback(randomness.remove)
            # in evaluation hooks would keep some modules off their fast paths
            if training:
                _record_outputs(pieces, tensors, hooks)
            # twice, because a model that counts its forwards may change in the second
            for _ in range(2 if training else 1):
                # for draws that are not keyed, equal in both forwards
                seed_random(derive_seed("verification"), device)
                batch = clone_tensors(x)
                with randomness.forward(0):
                    outputs, run_other_backwards = (
                        _chain(pieces, batch) if chained else (call_model(model, batch), None)
                    )
            results = flatten_tensors(outputs)
            tensors.update({f"result [{i}]": t.detach().clone() for i, t in enumerate(results)})
            before = {name: b.clone() for name, b in model.named_buffers()}
            # after the forwards, so that only runs of the backward are noted
            _record_reruns(model, rerun, hooks)
            # in evaluation only an output that is itself a weight requires a gradient
            if training:
                with randomness.backward(0):
                    _run_backward([t for t in results if t.requires_grad])
                    if run_other_backwards is not None:
                        run_other_backwards()
        # a checkpoint runs modules again, which may count in a buffer
        changed = [name for name, b in model.named_buffers() if not _is_same(b, before[name])]
        # in the order in which the backward reaches them, so that the first difference is the cause
        for name, p in reversed([*model.named_parameters()]):
            tensors[f"gradient {name}"] = None if p.grad is None else p.grad.clone()
        for name, buffer in model.named_buffers():
            tensors[f"buffer {name}"] = buffer.detach().clone()
    return _Pass(tensors, changed, rerun)


def _record_outputs(
    pieces: Sequence[Piece],
    tensors: _Tensors,
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
        # drawn on the CPU, so that every device gets the same
        direction = torch.randn(t.shape, generator=generator)
        directions.append(direction.to(t.device, t.dtype))
    if results:
        torch.autograd.backward(results, directions)


def _chain(pieces: Sequence[Piece], x: Any) -> tuple[Any, Callable[[], None]]:
    """Run the pieces in a chain, each on copies of the previous one's output, as over messages.

    Return the last output, and a function that runs the backwards of the other pieces after the
    last piece's backward.
    """
    # by cut: the tensors that a piece passes on, and the copies that the next piece gets
    sent: list[list[torch.Tensor]] = []
    arrived: list[list[torch.Tensor]] = []
    value: Any = x
    for piece in pieces:
        value = piece(value)
        if piece is not pieces[-1]:
            sent.append(flatten_tensors(value))
            value = tree_map(lambda t: t.detach().clone().requires_grad_(t.requires_grad), value)
            arrived.append(flatten_tensors(value))
            for t in arrived[-1]:
                record_raw_gradient(t)

    def run_other_backwards() -> None:
        orders: list[list[tuple[int, ...]]] = []
        for piece, outs, copies in zip(reversed(pieces[:-1]), reversed(sent), reversed(arrived)):
            gradients = [get_raw_gradient(t) for t in copies]
            orders.insert(
                0, [get_memory_order(out if g is None else g) for out, g in zip(outs, gradients)]
            )
            pairs = [
                # a message is contiguous in some order of dimensions
                (out, gradient if order else gradient.contiguous())
                for out, gradient, order in zip(outs, gradients, orders[0])
                if gradient is not None and out.requires_grad
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
