"""A job's model and loss in the form that PopTorch compiles.

    forward(x, y)   body(x) -> outputs -> losses, all in one graph
                    -> final loss, loss of each block (P,), numbers of correct and of counted labels (P, 2)
    forward(x)      -> outputs, for evaluation

Blocks with losses of their own (local-parallel training) form one graph. Their boundaries are
detached and their losses summed, so each block's gradient comes from its own loss only. A loss is
computed on its block's IPU, before the next block begins:

    IPU 0: block 0, head 0, loss 0 | IPU 1: block 1, head 1, loss 1 | IPU 2: block 2, loss 2, sum
"""

from __future__ import annotations

import copy
from typing import Any, Iterator, Sequence

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_map

from ipu_pipe.backends.ipu.options import name_stage
from ipu_pipe.cut.cutting import Piece
from ipu_pipe.local.blocks import HEADS, get_activation, get_blocks
from ipu_pipe.model.loss import Loss, count_right, get_block_loss
from ipu_pipe.model.stages import Partition


class WholeModel(nn.Module):
    """A copy of a model with one loss."""

    losses = 1

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = copy.deepcopy(model)

    def run_blocks(self, x: torch.Tensor) -> Iterator[tuple[Any, Any]]:
        """Yield the model's output, and None for the activations."""
        yield self.model(x), None


class LocalBlocks(nn.Module):
    """Copies of a model's blocks with losses of their own, in one graph: all blocks, or some from
    number `first` on.
    """

    def __init__(
        self, model: nn.Module, heads: nn.ModuleDict, pieces: Sequence[Piece], first: int = 0
    ) -> None:
        super().__init__()
        self.model = model
        self.heads = heads
        # a tuple, so that they are not children: their modules belong to the model
        self._pieces = tuple(piece.copy_to(model) for piece in pieces)
        self._first = first
        last = len(pieces) - 1
        self.losses = sum(i == last or str(first + i) in heads for i in range(len(pieces)))

    def run_blocks(self, x: torch.Tensor) -> Iterator[tuple[Any, Any]]:
        """Yield (outputs, detached activations for the next block) of each block that has a loss,
        the whole model's last.

        A block runs when its item is taken.
        """
        value: Any = x
        for index, piece in enumerate(self._pieces, self._first):
            # set here, because the pieces are no children, which eval() would reach
            piece.training = self.training
            value = piece(value)
            # detached: the next block's gradient ends here
            activations = tree_map(torch.Tensor.detach, value)
            if str(index) in self.heads:
                yield self.heads[str(index)](get_activation(value)), activations
            elif piece is self._pieces[-1]:
                yield value, activations
            value = activations


def copy_body(model: nn.Module) -> Any:
    """Return a copy of a whole model, or of all blocks of a model with blocks."""
    blocks = get_blocks(model)
    if blocks is None:
        return WholeModel(model)
    return LocalBlocks(copy.deepcopy(blocks.model), copy.deepcopy(blocks.heads), blocks.pieces)


def copy_piece(piece: Piece) -> nn.Module:
    """Return a module with copies of one piece's modules and weights under the model's names, and
    nothing else.
    """
    # one memo for all copies, so that tied weights stay tied
    root, memo = nn.Module(), {}  # type: ignore[var-annotated]
    for name, called in zip(piece.names, piece.called):
        owner, _, last = name.rpartition(".")
        _make_path(root, owner)._modules[last] = copy.deepcopy(called, memo)
    for name, partial in zip(piece.cut.owners[piece.stage], piece.partial):
        module = _make_path(root, name)
        module._parameters.update(copy.deepcopy(dict(partial._parameters), memo))
        module._buffers.update(copy.deepcopy(dict(partial._buffers), memo))
    return root


def _make_path(root: nn.Module, path: str) -> nn.Module:
    """Return the module at `path`; make it if it does not exist."""
    for part in filter(None, path.split(".")):
        # two names may begin with the same path
        root._modules.setdefault(part, nn.Module())
        root = root._modules[part]  # type: ignore[assignment]
    return root


class Wrapped(nn.Module):
    """The module that PopTorch compiles.

    `is_half`: outputs are in half precision, and losses are computed in float32.
    `passes_activations`: the outputs include the activations for the next block.
    """

    def __init__(
        self,
        body: Any,
        loss: Loss,
        is_half: bool = False,
        passes_activations: bool = False,
    ) -> None:
        super().__init__()
        block_loss = get_block_loss(loss)
        self.body = body
        # one for each block: a tensor of the loss's own cannot be on two IPUs
        self.loss: Any = [block_loss] * body.losses
        if isinstance(block_loss, nn.Module):
            self.loss = nn.ModuleList([copy.deepcopy(block_loss) for _ in range(body.losses)])
        self._is_half = is_half
        self._passes_activations = passes_activations

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> Any:
        """Run a microbatch x with its labels y, in training; the module's docstring says what it
        returns.
        """
        import poptorch

        # operations before the first boundary would otherwise belong to no listed block
        poptorch.Block.start(name_stage(0))
        losses = []
        counts_of_right = []
        outputs = []
        passed_on = []
        for loss, (output, activations) in zip(self.loss, self.body.run_blocks(x)):
            passed_on = [activations] if self._passes_activations else []
            if y is None:
                outputs.append(output)
                continue
            if self._is_half:
                output = tree_map(lambda t: t.float() if t.is_floating_point() else t, output)
            losses.append(loss(output, y))
            counts_of_right.append(count_right(output, y))
        if losses:
            total = losses[0]
            for other in losses[1:]:
                total = total + other
            by_block = torch.stack([loss.detach().reshape(()) for loss in losses])
            known_counts = [counts for counts in counts_of_right if counts is not None]
            # by this mark PopTorch finds the loss with which the backward begins
            outputs = [poptorch.identity_loss(total, "none"), by_block]
            # either all blocks count, or none: one tensor has a row for each
            if len(known_counts) == len(counts_of_right):
                outputs.append(torch.stack(known_counts))
        return (*outputs, *passed_on)


def get_unsplit_name(name: str) -> str | None:
    """Return the name in the user's model of a tensor of Wrapped; None for the loss's own."""
    for prefix, prefix_here in (("body.model.", ""), ("body.heads.", f"{HEADS}.")):
        if name.startswith(prefix):
            return prefix_here + name[len(prefix) :]
    return None


def wrap(
    model: nn.Module,
    loss: Loss,
    part: Partition,
    precision: str,
    block: int | None = None,
) -> Wrapped:
    """Return a copy of the model as PopTorch wants it, its stages marked. The user's own stays as
    it is. With `block`, a copy of that block alone, for an IPU of its own; it hands its activations
    on unless it is the last.
    """
    import poptorch

    blocks = get_blocks(model)
    if blocks is None or block is None:
        body = copy_body(model)
    else:
        heads = {
            name: copy.deepcopy(head) for name, head in blocks.heads.items() if name == str(block)
        }
        body = LocalBlocks(
            copy_piece(blocks.pieces[block]), nn.ModuleDict(heads), [blocks.pieces[block]], block
        )
    if precision == "16.16":
        body.half()
    # PopART keeps integer tensors as constants (JitDispatch.cpp): a BatchNorm's number of batches
    # counts in float32
    for module in body.modules():
        if isinstance(module, _NormBase) and module.num_batches_tracked is not None:
            module.num_batches_tracked = module.num_batches_tracked.float()
    for name, stage in part.begins.items() if block is None else ():
        poptorch.BeginBlock(body.model.get_submodule(name), name_stage(stage))
    passes_activations = blocks is not None and block is not None and block < len(blocks.pieces) - 1
    return Wrapped(body, loss, precision.startswith("16"), passes_activations)
