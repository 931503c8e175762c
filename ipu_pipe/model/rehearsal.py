"""Pieces of a model rehearsed before they train: whole against chained pieces, on one microbatch, bit for bit.

The recording that pieces are made from does not see all that a forward may do (`torch.no_grad()` or autocast around modules,
random numbers and buffers outside modules, tensors kept aside). What comes out otherwise is refused instead of trained.
"""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Sequence

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map

from ipu_pipe.errors import BadInput, first_line
from ipu_pipe.model.cutting import Piece
from ipu_pipe.model.probe import random_modules, undisturbed
from ipu_pipe.model.randomness import KeyedRandomness, derived_seed

Found = Dict[str, Optional[torch.Tensor]]
FEW = 2  # samples; a batch norm refuses one


def refuse_other_pieces(model: nn.Module, parts: Sequence[Piece], x: torch.Tensor) -> None:
    """Refuse (BadInput) pieces that do not compute what the model does: modules' outputs, gradients, buffers. The model is
    left as it was."""
    if x.is_meta:  # no values, nothing to compare
        return
    if len(x) > FEW and _few_agree(model, parts, x[:FEW]):
        return
    keyed = random_modules(model, x)
    whole = _run(model, parts, x, keyed, chained=False)
    try:
        pieces = _run(model, parts, x, keyed, chained=True)
    except Exception as error:  # whatever the user's model raises
        raise _refusal(model, f"its pieces fail: {first_line(error)}") from error
    wrong = [what for what in [*whole, *pieces] if not _same(whole.get(what), pieces.get(what))]
    if wrong:  # what differs from time to time proves nothing
        again = _run(model, parts, x, keyed, chained=False)
        wrong = [what for what in wrong if _same(whole.get(what), again.get(what))]
    if wrong:
        raise _refusal(model, _told(wrong[0], whole.get(wrong[0]), pieces.get(wrong[0]), parts))


def _few_agree(model: nn.Module, parts: Sequence[Piece], x: torch.Tensor) -> bool:
    """Whether pieces and whole do the same with a few samples, which tells as much as all, in less time. False where it cannot be
    said of so few: a model for microbatches of one size, say."""
    try:
        keyed = random_modules(model, x)
        whole, pieces = (_run(model, parts, x, keyed, chained) for chained in (False, True))
    except Exception:  # whatever the user's model raises: all samples tell
        return False
    return whole.keys() == pieces.keys() and all(_same(whole[what], pieces[what]) for what in whole)


def _refusal(model: nn.Module, why: str) -> BadInput:
    return BadInput(
        f"model: {type(model).__name__}: cut into pieces it is not the same model: {why}: move what its forward does outside "
        "modules into modules, or use backend: {name: emulator} with a method without blocks"
    )


def _told(what: str, whole: Any, piece: Any, parts: Sequence[Piece]) -> str:
    kind, _, name = what.partition(" ")
    stage = next((s for s, part in enumerate(parts) if name in part.names), None)
    place = f"{kind} of {name}" + (f" (stage {stage})" if stage is not None else "") if name else kind
    if whole is None or piece is None:
        return f"the {place} is there in only one of them (no_grad around modules?)"
    if whole.dtype != piece.dtype:
        return f"the {place} is {piece.dtype} in pieces, {whole.dtype} in the whole (autocast around modules?)"
    if whole.requires_grad != piece.requires_grad:
        return f"the {place} needs a gradient in only one of them (no_grad around modules?)"
    return f"the {place} differs"


def _same(a: Optional[torch.Tensor], b: Optional[torch.Tensor]) -> bool:
    if a is None or b is None:
        return a is b
    alike = a.shape == b.shape and a.dtype == b.dtype and a.requires_grad == b.requires_grad
    return alike and bool(((a == b) | ((a != a) & (b != b))).all())


def _run(model: nn.Module, parts: Sequence[Piece], x: torch.Tensor, keyed: Sequence[str], chained: bool) -> Found:
    """All that a forward and backward in training give, in order: what modules give out, gradients, buffers."""
    found: Found = {}
    handles: List[Any] = []

    def keep(name: str) -> Any:
        def after(module: nn.Module, inputs: Any, output: Any) -> None:
            for i, tensor in enumerate(_tensors(output)):
                what = f"output {name}" if not i else f"output {name} [{i}]"
                found[what] = tensor.detach().clone().requires_grad_(tensor.requires_grad)

        return after

    own = set(vars(model))
    with undisturbed(model):
        model.train()
        randomness = KeyedRandomness(model, keyed, 0, x.device)
        try:
            for part in parts:
                handles += [link.register_forward_hook(keep(name)) for name, link in zip(part.names, part.links)]
            torch.manual_seed(derived_seed("rehearsal"))
            given = x.clone()
            outputs, backward = _chain(parts, given) if chained else (model(given), None)
            results = [t for t in _tensors(outputs) if t.requires_grad]
            found.update({f"result [{i}]": t.detach().clone() for i, t in enumerate(_tensors(outputs))})
            generator = torch.Generator().manual_seed(derived_seed("rehearsal"))
            directions = [torch.randn(t.shape, generator=generator).to(t.device, t.dtype) for t in results]
            if results:
                torch.autograd.backward(results, directions)
            if backward is not None:
                backward()
        finally:
            randomness.remove()
            for handle in handles:
                handle.remove()
            for name in set(vars(model)) - own:
                delattr(model, name)
        named = model.named_parameters()
        found.update({f"gradient {name}": None if p.grad is None else p.grad.clone() for name, p in named})
        found.update({f"buffer {name}": b.detach().clone() for name, b in model.named_buffers()})
    return found


def _chain(parts: Sequence[Piece], x: torch.Tensor) -> Any:
    """The output of the last piece, each given copies of what the one before hands on, as over messages; and what does the
    backwards of the others once the last one's is done."""
    handed: List[List[torch.Tensor]] = []
    entered: List[List[torch.Tensor]] = []
    value: Any = x
    for part in parts:
        value = part(value)
        if part is not parts[-1]:
            handed.append(_tensors(value))
            value = tree_map(
                lambda t: t.detach().clone().requires_grad_(t.requires_grad) if isinstance(t, torch.Tensor) else t,
                value,
            )
            entered.append(_tensors(value))

    def backward() -> None:
        for outs, ins in zip(reversed(handed), reversed(entered)):
            pairs = [(out, into.grad) for out, into in zip(outs, ins) if into.grad is not None and out.requires_grad]
            if pairs:
                torch.autograd.backward([out for out, _ in pairs], [grad for _, grad in pairs])

    return value, backward


def _tensors(value: Any) -> List[torch.Tensor]:
    return [t for t in tree_flatten(value)[0] if isinstance(t, torch.Tensor)]
