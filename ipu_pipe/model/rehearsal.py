"""Rehearse the pieces of a model before training: compare the whole model with the chained pieces on one microbatch, bit for bit.

The recording behind the pieces may miss parts of a forward (numbers that Python computes from a tensor's values, counters,
tensors kept in attributes). So pieces and whole model run on other values than the recorded ones, twice in training, and any
difference is refused.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import nn
from torch.utils._pytree import tree_map

from ipu_pipe.errors import BadInput, summarize
from ipu_pipe.model.batch import call_model, flatten_tensors
from ipu_pipe.model.cutting import Piece, get_memory_order, invert_order
from ipu_pipe.model.observation import ForwardEffects, observe_effects
from ipu_pipe.model.precision import is_cast
from ipu_pipe.model.randomness import KeyedRandomness, derive_seed
from ipu_pipe.model.restoring import modes_restored, undisturbed
from ipu_pipe.text import list_some


class Rehearsed(NamedTuple):
    """The result of a rehearsal for the whole model.

    `effects`: of its forward. `moved`: buffers that its backward changes (a checkpoint in it runs modules again). `again`:
    modules that its backward runs again but the pieces' backward does not (the checkpoint itself is cut).
    """

    effects: ForwardEffects
    moved: List[str] = []
    again: List[str] = []


def rehearse(model: nn.Module, parts: Sequence[Piece], x: Any) -> Rehearsed:
    """Raise `BadInput` if pieces and model differ: in module outputs, gradients and buffers in training, or in the output in
    evaluation. The model is left as it was."""
    # meta tensors have no values to compare
    if any(t.is_meta for t in flatten_tensors(x)):
        return Rehearsed(ForwardEffects())
    with torch.no_grad():
        parts[0].cut.prepare(x, training=False)
    x = tree_map(_vary, x)
    rehearsed = Rehearsed(observe_effects(model, x))
    for training in (True, False):
        run = partial(_run, model, parts, x, rehearsed.effects, training)
        whole = run(chained=False)
        try:
            chained = run(chained=True)
        # the user's model may raise anything
        except Exception as error:
            raise _make_refusal(model, f"its pieces fail: {summarize(error)}") from error
        a, b = whole.tensors, chained.tensors
        wrong = [what for what in [*a, *b] if not _is_same(a.get(what), b.get(what))]
        # if the whole model's own output varies, a difference proves nothing
        if wrong:
            again = run(chained=False).tensors
            drawn = [what for what in wrong if not _is_same(a.get(what), again.get(what))]
            wrong = [what for what in wrong if what not in drawn]
            if drawn and not wrong and drawn[0].startswith(("output", "result")) and not flatten_tensors(x)[0].is_cuda:
                why = "something draws random numbers from a generator of its own, which no seed of a microbatch reaches"
                raise _make_refusal(model, f"the {drawn[0]} differs each time: {why}", "draw without one")
        if wrong:
            first, other = a.get(wrong[0]), b.get(wrong[0])
            whole_modules = [name for part in parts for name in part.names]
            drawing = [name for name in rehearsed.effects.draws if not any(f"{name}.".startswith(f"{n}.") for n in whole_modules)]
            remedy = OUTSIDE
            if training and drawing:
                cut = list_some([name or "the model itself" for name in drawing])
                remedy = (
                    f"{cut}: a stage begins inside, and its own forward draws random numbers (functional dropout): begin stages"
                    " at modules outside of it, or draw in a module (nn.Dropout)"
                )
            if wrong[0].startswith("gradient") and first is not None and other is not None and is_cast(model):
                remedy = "autocast sums the gradient of a tied weight in bfloat16: use precision float32 or bfloat16"
            raise _make_refusal(model, _describe_difference(wrong[0], first, other, parts), remedy)
        if training:
            again_in_whole = [name for name in whole.again if name not in chained.again]
            rehearsed = rehearsed._replace(moved=whole.moved, again=again_in_whole)
    return rehearsed


def _vary(t: Any) -> Any:
    """Return an input with other values that are valid for the model too."""
    if not isinstance(t, torch.Tensor) or not t.dim():
        return t
    return t.flip(0) / 2 if t.is_floating_point() else t[torch.arange(len(t), device=t.device) // 2]


OUTSIDE = "move what its forward does outside modules into modules"


def _make_refusal(model: nn.Module, why: str, remedy: str = OUTSIDE) -> BadInput:
    return BadInput(
        f"model: {type(model).__name__}: cut into pieces it is not the same model: {why}: {remedy}, or use backend: "
        "{name: emulator} with a method that has no blocks"
    )


def _describe_difference(what: str, whole: Any, piece: Any, parts: Sequence[Piece]) -> str:
    kind, _, name = what.partition(" ")
    stage = next((s for s, part in enumerate(parts) if name in part.names), None)
    place = f"{kind} of {name}" + (f" (stage {stage})" if stage is not None else "") if name else kind
    if whole is None or piece is None or whole.requires_grad != piece.requires_grad:
        return f"the {place} has a gradient in only one of them (no_grad around modules?)"
    if whole.dtype != piece.dtype:
        return f"the {place} is {piece.dtype} in pieces, {whole.dtype} in the whole (autocast around modules?)"
    return f"the {place} differs"


def _is_same(a: Optional[torch.Tensor], b: Optional[torch.Tensor]) -> bool:
    if a is None or b is None:
        return a is b
    alike = a.shape == b.shape and a.dtype == b.dtype and a.requires_grad == b.requires_grad
    return alike and bool(((a == b) | ((a != a) & (b != b))).all())


class _Pass(NamedTuple):
    """The results of a pass: tensors by name (module outputs, gradients and buffers in training), the buffers that its backward
    changed, and the modules that its backward ran again."""

    tensors: Dict[str, Optional[torch.Tensor]]
    moved: List[str]
    again: List[str]


def _run(
    model: nn.Module, parts: Sequence[Piece], x: Any, effects: ForwardEffects, training: bool, chained: bool
) -> _Pass:
    tensors: Dict[str, Optional[torch.Tensor]] = {}
    again: List[str] = []
    handles: List[Any] = []

    def keep(name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        for i, tensor in enumerate(flatten_tensors(output)):
            what = f"output {name}" if not i else f"output {name} [{i}]"
            tensors[what] = tensor.detach().clone().requires_grad_(tensor.requires_grad)

    def note(name: str, module: nn.Module, inputs: Any) -> None:
        again.append(name)

    with undisturbed(model), modes_restored(*parts), torch.set_grad_enabled(training):
        model.train(training)
        for part in parts:
            part.training = training
        randomness = KeyedRandomness(model, effects.draws, 0, flatten_tensors(x)[0].device)
        try:
            # in evaluation hooks would keep some modules off their fast paths
            for part in parts if training else ():
                handles += [link.register_forward_hook(partial(keep, n)) for n, link in zip(part.names, part.links)]
            # twice, because a model that counts its forwards may change in the second
            for _ in range(2 if training else 1):
                torch.manual_seed(derive_seed("rehearsal"))
                batch = tree_map(lambda t: t.clone() if isinstance(t, torch.Tensor) else t, x)
                with randomness.forward(0):
                    outputs, backward = _chain(parts, batch) if chained else (call_model(model, batch), None)
            results = [t for t in flatten_tensors(outputs) if t.requires_grad]
            tensors.update({f"result [{i}]": t.detach().clone() for i, t in enumerate(flatten_tensors(outputs))})
            generator = torch.Generator().manual_seed(derive_seed("rehearsal"))
            before = {name: b.clone() for name, b in model.named_buffers()}
            directions = [torch.randn(t.shape, generator=generator).to(t.device, t.dtype) for t in results]
            handles += [m.register_forward_pre_hook(partial(note, name)) for name, m in model.named_modules()]
            with randomness.backward(0):
                if results:
                    torch.autograd.backward(results, directions)
                if backward is not None and training:
                    backward()
        finally:
            randomness.remove()
            for handle in handles:
                handle.remove()
        moved = [name for name, b in model.named_buffers() if not _is_same(b, before[name])]
        named = model.named_parameters()
        tensors.update({f"gradient {name}": None if p.grad is None else p.grad.clone() for name, p in named})
        tensors.update({f"buffer {name}": b.detach().clone() for name, b in model.named_buffers()})
    return _Pass(tensors, moved, again)


def _chain(parts: Sequence[Piece], x: Any) -> Tuple[Any, Callable[[], None]]:
    """Run the pieces in a chain, each on copies of the previous one's output, as over messages.

    Return the last output, and a function that runs the backwards of the other pieces after the last piece's backward.
    """
    # by cut
    sent: List[List[torch.Tensor]] = []
    # by cut and tensor, from hooks, because a leaf's `grad` would take the leaf's memory layout
    gradients: List[List[List[torch.Tensor]]] = []
    value: Any = x
    for part in parts:
        value = part(value)
        if part is not parts[-1]:
            sent.append(flatten_tensors(value))
            value = tree_map(lambda t: t.detach().clone().requires_grad_(t.requires_grad), value)
            gradients.append([[] for _ in sent[-1]])
            for t, arrived in zip(flatten_tensors(value), gradients[-1]):
                if t.requires_grad:
                    t.register_hook(arrived.append)

    def backward() -> None:
        orders: List[List[Tuple[int, ...]]] = []
        for part, outs, arrived in zip(reversed(parts[:-1]), reversed(sent), reversed(gradients)):
            orders.insert(0, [get_memory_order(grads[0] if grads else out) for out, grads in zip(outs, arrived)])
            pairs = [
                (out, _as_sent(grads[0], order))
                for out, grads, order in zip(outs, arrived, orders[0])
                if grads and out.requires_grad
            ]
            # a tied weight has gradients from later pieces: pass them on, so that autograd adds in the same order
            later = [(p, p.grad) for p in part.parameters() if p.grad is not None]
            for p, _ in later:
                p.grad = None
            pairs += later
            if pairs:
                torch.autograd.backward([out for out, _ in pairs], [grad for _, grad in pairs])
        parts[0].cut.remember_gradients(orders)

    return value, backward


def _as_sent(gradient: torch.Tensor, order: Tuple[int, ...]) -> torch.Tensor:
    """Return a gradient as it comes out of a message: contiguous in this order of dimensions."""
    return gradient.contiguous() if not order else gradient.permute(order).contiguous().permute(invert_order(order))
