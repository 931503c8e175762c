"""Local-parallel training: blocks of a model that each have a loss of their own (Laskin et al. 2020).

    x -> block 0 -> | detach -> block 1 -> | detach -> block 2 -> output -> loss
              head 0 -> loss         head 1 -> loss

An auxiliary head turns a block's activations into outputs of the model's own kind; no gradient crosses a boundary, so every
block is trained by its own loss alone. Evaluation uses the last block's output, which is the model's.

Which stages form a block is a method's structure (ipu_pipe.local.structures).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Dict, List, Optional, Sequence, Tuple

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map

from ipu_pipe.errors import BadInput, summarize
from ipu_pipe.local.heads import MakeHead, make_head
from ipu_pipe.model.batch import get_first_tensor, join_arguments
from ipu_pipe.model.cutting import Piece, cut_model
from ipu_pipe.model.loss import Loss, Take, describe_output, take_scores
from ipu_pipe.model.partition import Partition
from ipu_pipe.model.precision import cast_forward, is_cast
from ipu_pipe.model.probe import Footprint, observe_footprint
from ipu_pipe.model.randomness import derive_seed, draw_from
from ipu_pipe.model.rehearsal import rehearse
from ipu_pipe.model.restoring import buffers_restored, undisturbed

HEADS = "local_heads"  # the name of auxiliary heads in a model (ipu_pipe.local.blocks)


class BlockOutputs(List[Any]):
    """What a model in training gives whose blocks have losses of their own: every block's outputs, the model's own last."""


class SumOfLosses:
    """The loss of each block's outputs, summed; for a single output the loss itself."""

    def __init__(self, loss: Loss) -> None:
        self.each = loss

    def __call__(self, output: Any, y: Any) -> torch.Tensor:
        losses = compute_losses(self, output, y)
        return losses[0] if len(losses) == 1 else torch.stack([loss.reshape(()) for loss in losses]).sum()


def compute_losses(loss: Loss, output: Any, y: Any) -> List[torch.Tensor]:
    """One loss for each block that has its own, the model's own last."""
    each = loss.each if isinstance(loss, SumOfLosses) else loss
    return [each(own, y) for own in (output if isinstance(output, BlockOutputs) else [output])]


def extract_scores(loss: Loss, output: Any) -> Any:
    """What of an output its loss is of."""
    return take_scores(loss.each if isinstance(loss, SumOfLosses) else loss, output)


class Blocks:
    """The blocks of a model that have losses of their own. `begins`: names of the modules at which the second and later ones
    begin. `trains_last`: only the last one trains, the others are frozen; there are no heads then. `take`: what the loss is of in
    the model's output, of which heads give the like.
    """

    def __init__(
        self,
        model: nn.Module,
        begins: Sequence[str],
        x: Any,
        seed: int = 0,
        trains_last: bool = False,
        head: Optional[MakeHead] = None,
        take: Optional[Take] = None,
    ) -> None:
        self.model = model
        self.pieces = cut_model(model, begins, x)
        self.crossings = self.pieces[0].cut.crossings
        rehearse(model, self.pieces, x)
        with torch.no_grad():
            self.pieces[0].cut.prepare(x, training=False)  # for copies of the model, too
        self.overlap = 0  # so many blocks before its own are in each
        self._duplicates: Optional[Duplicates] = None
        before = self.pieces[:-1] if trains_last else []
        self._frozen = [p for piece in before for p in piece.parameters() if p.requires_grad]
        for parameter in self._frozen:
            parameter.requires_grad_(False)
        self.heads = nn.ModuleDict({} if trains_last else self._heads(begins, x, seed, head, take))

    def _heads(
        self, begins: Sequence[str], x: Any, seed: int, head: Optional[MakeHead], take: Optional[Take]
    ) -> Dict[str, nn.Module]:
        model = self.model
        make = head or getattr(model, "local_head", None) or (lambda a, o: make_head(model, a, o))
        output, activations = self._examples(x)
        output = output if take is None else take(output)
        if not isinstance(output, torch.Tensor):
            raise BadInput(
                f"model: returns {describe_output(output)}: blocks need to know of which the loss is: set model.output"
            )
        made: Dict[str, nn.Module] = {}
        device = get_first_tensor(x).device
        devices = [device] if device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(derive_seed(seed, HEADS))
            for index, (begin, value) in enumerate(zip(begins, activations)):
                activation = _one(value, begin)
                try:
                    built = make(activation, output)
                    built.to(device, torch.float32 if is_cast(model) else activation.dtype)
                    if is_cast(model):
                        cast_forward(built, device.type)
                    found = tuple(built.eval()(activation).shape)
                except BadInput:
                    raise
                except Exception as error:  # whatever the user's function raises
                    raise BadInput(f"method_args.head: before {begin}: {summarize(error)}") from error
                if found != tuple(output.shape):
                    raise BadInput(f"method_args.head: before {begin}: gives {found}, must give {tuple(output.shape)}")
                if _writes_over(built, activation):
                    built.register_forward_pre_hook(lambda _, inputs: (inputs[0].clone(),))
                made[str(index)] = built.train()
        return made

    def _examples(self, x: Any) -> Tuple[Any, List[Any]]:
        """The model's output, and what is handed on at each boundary."""
        found: List[Any] = [x]
        model = self.model
        with torch.no_grad(), undisturbed(model):
            model.eval()
            for piece in self.pieces:
                found.append(piece(found[-1]))
        return found[-1], found[1:-1]

    def head(self, index: int) -> Optional[nn.Module]:
        """The auxiliary head of a block; None for the last one, and where there are none."""
        return self.heads[str(index)] if str(index) in self.heads else None

    def train(self, x: Any) -> BlockOutputs:
        """The forward in training: no gradient passes from block to block."""
        outputs, entered = BlockOutputs(), [x]
        drawn: List[torch.Tensor] = []  # random states from which pieces draw
        for index, piece in enumerate(self.pieces):
            first = max(0, index - self.overlap)
            value = entered[first]
            for again in range(first, index):
                assert self._duplicates is not None
                value = self._duplicates.run(index, again, value, drawn[again])
            if self.overlap:
                drawn.append(torch.get_rng_state())
            value = piece(value)
            entered.append(tree_map(torch.Tensor.detach, value))
            head = self.head(index)
            if head is not None:
                outputs.append(head(get_activation(value)))
            elif piece is self.pieces[-1]:
                outputs.append(value)
        return outputs

    def outputs(self, x: Any) -> BlockOutputs:
        """As the blocks are, in evaluation: each one's outputs."""
        found, value = BlockOutputs(), x
        for index, piece in enumerate(self.pieces):
            value = piece(value)
            head = self.head(index)
            if head is not None:
                found.append(head(get_activation(value)))
        return BlockOutputs([*found, value])

    # --- overlap

    def share(self, overlap: int) -> None:
        """From now on so many blocks before its own are in each block, as duplicates: the same weights, gradients apart."""
        self.overlap = overlap
        self.pieces[0].copies_input = True  # the input is taken twice
        self._duplicates = Duplicates(self.pieces, overlap)

    def average_duplicates(self) -> None:
        """Before an update: each layer's gradient becomes the mean over the blocks that hold it."""
        if self._duplicates is not None:
            self._duplicates.average()

    def forget_duplicates(self) -> None:
        """Where each block is in a process of its own, its duplicates are the layers of this process's model."""
        self._duplicates = None

    def release(self) -> None:
        """The model trains as a whole again."""
        for parameter in self._frozen:
            parameter.requires_grad_(True)


class BlockedModel(nn.Module):
    """A model whose blocks are trained by losses of their own. In training it gives `BlockOutputs`, else the model's own output.

    Its parameters and buffers are the model's own, under their names, and the heads' under `local_heads.INDEX`.
    """

    def __init__(self, blocks: Blocks) -> None:
        super().__init__()
        model = blocks.model
        if hasattr(model, HEADS):
            raise BadInput(f"model: {HEADS}: is the name of the auxiliary heads: must be called otherwise")
        self._modules.update(model._modules)  # whatever their names: add_module refuses those of attributes
        self._parameters = model._parameters  # the same tables: what stands in one stands in the other
        self._buffers = model._buffers
        self._non_persistent_buffers_set = set(model._non_persistent_buffers_set)
        self._modules[HEADS] = blocks.heads
        self._local_blocks = blocks

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """`BlockOutputs` in training, else the model's own output."""
        if not self.training:
            return self._local_blocks.model(*inputs, **named)
        return self._local_blocks.train(join_arguments(inputs, named))


def get_blocks(model: nn.Module) -> Optional[Blocks]:
    """The blocks that have losses of their own; None for other models."""
    return model._local_blocks if isinstance(model, BlockedModel) else None


def _writes_over(part: nn.Module, value: torch.Tensor) -> bool:
    """Whether the first thing that a module does is to overwrite what it is given."""
    try:
        part(value.detach().clone().requires_grad_())
    except RuntimeError as error:
        return "leaf Variable that requires grad" in str(error)
    return False


def get_activation(value: Any) -> torch.Tensor:
    """The one tensor of what a block hands on through which gradients would pass."""
    return next(t for t in tree_flatten(value)[0] if t.is_floating_point())


def _one(value: Any, begin: str) -> torch.Tensor:
    """As `get_activation`; refuses boundaries that a skip connection crosses."""
    crossing = [t for t in tree_flatten(value)[0] if t.is_floating_point()]
    if len(crossing) != 1:
        shapes = ", ".join(str(tuple(t.shape)) for t in crossing)
        raise BadInput(
            f"stages: {begin}: {len(crossing)} activations cross this boundary ({shapes}), one beside a skip connection: a block "
            "must end where only one does"
        )
    return crossing[0]


class Duplicates:
    """What each block holds of the `overlap` pieces before its own: the same weights, gradients apart."""

    def __init__(self, pieces: Sequence[Piece], overlap: int) -> None:
        self._pieces = pieces
        # of each block: the number of a piece before its own -> name -> tensor in the same memory
        self._held = [
            {again: self._duplicate(pieces[again]) for again in range(max(0, index - overlap), index)}
            for index in range(len(pieces))
        ]

    def _duplicate(self, piece: Piece) -> Dict[str, torch.Tensor]:
        return {name: p.detach().requires_grad_(p.requires_grad) for name, p in piece.named_parameters()}

    def run(self, index: int, again: int, value: Any, drawn: torch.Tensor) -> Any:
        """Run piece `again`, as block `index` holds it, on what enters it; `drawn`: the random state from which the piece itself
        drew."""
        piece = self._pieces[again]
        with buffers_restored(piece), draw_from(drawn):  # the block that owns the layer moves its running statistics
            return torch.func.functional_call(piece, self._held[index][again], (value,))

    def average(self) -> None:
        """Each layer's gradient becomes the mean over the blocks that hold it."""
        for again, piece in enumerate(self._pieces):
            duplicates = [held[again] for held in self._held if again in held]
            for name, parameter in piece.named_parameters():
                parameter.grad = average_gradients([parameter.grad, *(tensors[name].grad for tensors in duplicates)])
                for tensors in duplicates:
                    tensors[name].grad = None


def average_gradients(gradients: Sequence[Optional[torch.Tensor]]) -> Optional[torch.Tensor]:
    """The mean of a layer's gradients in the order of its blocks; a block that does not reach it counts as zero."""
    given = [g for g in gradients if g is not None]
    if not given or len(gradients) == 1:
        return given[0] if given else None
    total = given[0]
    for g in given[1:]:
        total = total + g
    return total / len(gradients)


def measure_footprint(model: nn.Module, part: Partition, loss: Loss, example: Tuple[Any, Any]) -> Footprint:
    """As seen in one microbatch. Blocks with losses of their own take these where they are: only activations are handed on."""
    blocks = get_blocks(model)
    if blocks is None:
        return observe_footprint(model, part, loss, *example)
    overlap, blocks.overlap = blocks.overlap, 0
    found = observe_footprint(model, part, loss, *example)
    blocks.overlap = overlap
    saved = found.saved_bytes
    if overlap:  # the layer behind is on each block's device, too
        saved = tuple(own + (saved[s - 1] if s else 0) for s, own in enumerate(saved))
    sent = tuple(sum(t.bytes for t in crossing.tensors) for crossing in blocks.crossings)
    return replace(found, saved_bytes=saved, boundary_bytes=sent)
