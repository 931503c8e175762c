"""Local-parallel training: blocks of a model that each have a loss of their own (Laskin et al. 2020).

    x -> block 0 -> | detach -> block 1 -> | detach -> block 2 -> output -> loss
              head 0 -> loss         head 1 -> loss

An auxiliary head turns a block's activations into outputs of the model's own kind; no gradient crosses a boundary, so every
block is trained by its own loss alone. Evaluation uses the last block's output, which is the model's.

With an overlap of 1 block j trains layer j - 1 once more, and the two gradients of a layer are averaged:

    block 1:  x1 -> layer 0' -> layer 1 -> head 1        layer 0' is a duplicate of layer 0, kept equal by the averaging
    block 2:  x2 -> layer 1' -> layer 2 -> head 2        x2: what enters layer 1
"""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map

from ipu_pipe.errors import BadInput, first_line
from ipu_pipe.model.buffers import buffers_restored
from ipu_pipe.model.cutting import crossings, links_of, merge_stages, pieces, writes_over
from ipu_pipe.model.modes import modes_restored
from ipu_pipe.model.probe import Loss
from ipu_pipe.model.randomness import derived_seed
from ipu_pipe.model.rehearsal import refuse_other_pieces
from ipu_pipe.model.stages import Partition, partition
from ipu_pipe.schedule.methods import Structure

HEADS = "local_heads"  # the name of auxiliary heads in a model (ipu_pipe.local.blocks)

GROUPS = 8  # of a head's GroupNorm

# (an example of the activations at the end of a block, one of the model's outputs) -> head
MakeHead = Callable[[torch.Tensor, torch.Tensor], nn.Module]


class Outputs(List[Any]):
    """What a model in training gives whose blocks have losses of their own: every block's outputs, the model's own last."""


class SumOfLosses:
    """The loss of each block's outputs, summed; for a single output the loss itself."""

    def __init__(self, loss: Loss) -> None:
        self.each = loss

    def __call__(self, output: Any, y: Any) -> torch.Tensor:
        losses = losses_of(self, output, y)
        return losses[0] if len(losses) == 1 else torch.stack([loss.reshape(()) for loss in losses]).sum()


def losses_of(loss: Loss, output: Any, y: Any) -> List[torch.Tensor]:
    """One loss for each block that has its own, the model's own last."""
    each = loss.each if isinstance(loss, SumOfLosses) else loss
    return [each(own, y) for own in (output if isinstance(output, Outputs) else [output])]


# ---- heads


class TokenHead(nn.Module):
    """Layer norm and projection: (B, T, W) -> (B, classes, T), or (B, classes) of the tokens' mean (the paper's Transformers)."""

    def __init__(self, width: int, classes: int, mean: bool) -> None:
        super().__init__()
        self.norm, self.projection, self._mean = nn.LayerNorm(width), nn.Linear(width, classes), mean

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (B, T, W)."""
        x = self.norm(x)
        return self.projection(x.mean(dim=1)) if self._mean else self.projection(x).transpose(1, 2)


def image_head(channels: int, classes: int, batch_norm: bool) -> nn.Module:
    """Norm, ReLU, mean over space, linear: (B, C, H, W) -> (B, classes) (the paper's ResNets; GroupNorm where the model has no
    BatchNorm, so that one sample a microbatch will do)."""
    groups = next(g for g in range(min(GROUPS, channels), 0, -1) if channels % g == 0)
    norm = nn.BatchNorm2d(channels) if batch_norm else nn.GroupNorm(groups, channels)
    return nn.Sequential(norm, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


def make_head(model: nn.Module, activation: torch.Tensor, output: torch.Tensor) -> nn.Module:
    """The head for activations of this shape, by model family: images, tokens, or vectors (linear). Raises BadInput."""
    shape, classes = tuple(activation.shape), output.shape[1] if output.dim() > 1 else 0
    if len(shape) == 4 and output.dim() == 2:
        norms = any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())
        return image_head(shape[1], classes, norms)
    if len(shape) == 3 and output.dim() in (2, 3):
        return TokenHead(shape[2], classes, mean=output.dim() == 2)
    if len(shape) == 2 and output.dim() == 2:
        return nn.Linear(shape[1], classes)
    raise BadInput(
        f"model: no auxiliary head is known for activations {shape} and outputs {tuple(output.shape)}: set method_args.head to"
        " module:function, which makes one from an example of both"
    )


# ---- blocks


class Blocks:
    """The blocks of a model that have losses of their own. `begins`: names of the modules at which the second and later ones
    begin. `trains_last`: only the last one trains, the others are frozen; there are no heads then.
    """

    def __init__(
        self,
        model: nn.Module,
        begins: Sequence[str],
        x: torch.Tensor,
        seed: int = 0,
        trains_last: bool = False,
        head: Optional[MakeHead] = None,
    ) -> None:
        self.model = model
        self.pieces = pieces(model, begins, x)
        self.crossings = crossings(self.pieces, model, x)
        refuse_other_pieces(model, self.pieces, x)
        self.overlap = 0  # so many blocks before its own are in each
        self._duplicates: List[Dict[str, torch.Tensor]] = []
        before = self.pieces[:-1] if trains_last else []
        self._frozen = [p for piece in before for p in piece.parameters() if p.requires_grad]
        for parameter in self._frozen:
            parameter.requires_grad_(False)
        self.heads = nn.ModuleDict({} if trains_last else self._heads(begins, x, seed, head))

    def _heads(
        self, begins: Sequence[str], x: torch.Tensor, seed: int, head: Optional[MakeHead]
    ) -> Dict[str, nn.Module]:
        model = self.model
        make = head or getattr(model, "local_head", None) or (lambda a, o: make_head(model, a, o))
        output, activations = self._examples(x)
        made: Dict[str, nn.Module] = {}
        devices = [x.device] if x.is_cuda else []
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(derived_seed(seed, HEADS))
            for index, (begin, value) in enumerate(zip(begins, activations)):
                activation = _one(value, begin)
                try:
                    built = make(activation, output)
                    found = tuple(built.to(x.device, activation.dtype).eval()(activation).shape)
                except BadInput:
                    raise
                except Exception as error:  # whatever the user's function raises
                    raise BadInput(f"method_args.head: before {begin}: {first_line(error)}") from error
                if found != tuple(output.shape):
                    raise BadInput(f"method_args.head: before {begin}: gives {found}, must give {tuple(output.shape)}")
                if writes_over(built, activation):
                    built.register_forward_pre_hook(lambda _, inputs: (inputs[0].clone(),))
                made[str(index)] = built.train()
        return made

    def _examples(self, x: torch.Tensor) -> Tuple[torch.Tensor, List[Any]]:
        """The model's output, and what is handed on at each boundary."""
        model, found, value = self.model, [], x
        with torch.no_grad(), buffers_restored(model), modes_restored(model):
            model.eval()
            for piece in self.pieces:
                value = piece(value)
                found.append(value)
        return found[-1], found[:-1]

    def head(self, index: int) -> Optional[nn.Module]:
        """The auxiliary head of a block; None for the last one, and where there are none."""
        return self.heads[str(index)] if str(index) in self.heads else None

    def train(self, x: torch.Tensor) -> Outputs:
        """The forward in training: no gradient passes from block to block."""
        outputs, entered = Outputs(), [x]
        for index, piece in enumerate(self.pieces):
            first = max(0, index - self.overlap)
            value = entered[first]
            for again in range(first, index):
                value = self._run_duplicate(index, again, value)
            value = piece(value)
            entered.append(tree_map(torch.Tensor.detach, value))
            head = self.head(index)
            if head is not None:
                outputs.append(head(one_activation(value)))
            elif piece is self.pieces[-1]:
                outputs.append(value)
        return outputs

    def outputs(self, x: torch.Tensor) -> Outputs:
        """As the blocks are, in evaluation: each one's outputs."""
        found, value = Outputs(), x
        for index, piece in enumerate(self.pieces):
            value = piece(value)
            head = self.head(index)
            if head is not None:
                found.append(head(one_activation(value)))
        return Outputs([*found, value])

    # --- overlap

    def share(self, overlap: int) -> None:
        """From now on so many blocks before its own are in each block, as duplicates: the same weights, gradients apart."""
        self.overlap = overlap
        self.pieces[0].begins_in_place = True  # the input is taken twice
        for index in range(len(self.pieces)):
            for again in range(max(0, index - overlap), index):
                if self.pieces[again].own_weights():
                    raise BadInput(
                        "model: local_overlapping: weights of the model itself cannot be duplicated: put them into modules"
                    )
        self._duplicates = [self._duplicate(index) for index in range(len(self.pieces))]

    def _duplicate(self, index: int) -> Dict[str, torch.Tensor]:
        """Of the weights of the pieces before block `index` that it holds too: "piece/name" -> tensor in the same memory."""
        found = {}
        for again in range(max(0, index - self.overlap), index):
            for name, parameter in self.pieces[again].named_parameters():
                found[f"{again}/{name}"] = parameter.detach().requires_grad_(parameter.requires_grad)
        return found

    def _run_duplicate(self, index: int, again: int, value: Any) -> Any:
        own = {
            key.partition("/")[2]: tensor
            for key, tensor in self._duplicates[index].items()
            if key.partition("/")[0] == str(again)
        }
        piece = self.pieces[again]
        with buffers_restored(piece):  # the block that owns the layer moves its running statistics
            return torch.func.functional_call(piece, own, (value,))

    def average_duplicates(self) -> None:
        """Before an update: each layer's gradient becomes the mean over the blocks that hold it."""
        for again, piece in enumerate(self.pieces):
            for name, parameter in piece.named_parameters():
                held = [parameter.grad]
                for duplicates in self._duplicates:
                    tensor = duplicates.get(f"{again}/{name}")
                    if tensor is not None:
                        held.append(tensor.grad)
                        tensor.grad = None
                parameter.grad = mean_gradient(held)

    def forget_duplicates(self) -> None:
        """Where each block is in a process of its own, its duplicates are the layers of this process's model."""
        self._duplicates = []

    def release(self) -> None:
        """The model trains as a whole again."""
        for parameter in self._frozen:
            parameter.requires_grad_(True)


class BlockedModel(nn.Module):
    """A model whose blocks are trained by losses of their own. In training it gives `Outputs`, else the model's own output.

    Its parameters and buffers are the model's own, under their names, and the heads' under `local_heads.INDEX`.
    """

    def __init__(self, blocks: Blocks) -> None:
        super().__init__()
        model = blocks.model
        if hasattr(model, HEADS):
            raise BadInput(f"model: {HEADS}: is the name of the auxiliary heads: must be called otherwise")
        self._modules.update(model._modules)  # whatever their names: add_module refuses those of attributes
        self._parameters.update(model._parameters)
        self._buffers.update(model._buffers)
        self._non_persistent_buffers_set = set(model._non_persistent_buffers_set)
        self._modules[HEADS] = blocks.heads
        self._local_blocks = blocks

    def forward(self, x: torch.Tensor) -> Any:
        """`Outputs` in training, else the model's own output."""
        return self._local_blocks.train(x) if self.training else self._local_blocks.model(x)


def blocks_of(model: nn.Module) -> Optional[Blocks]:
    """The blocks that have losses of their own; None for other models."""
    return model._local_blocks if isinstance(model, BlockedModel) else None


def mean_gradient(gradients: Sequence[Optional[torch.Tensor]]) -> Optional[torch.Tensor]:
    """The mean of a layer's gradients in the order of its blocks; a block that does not reach it counts as zero."""
    given = [g for g in gradients if g is not None]
    if not given or len(gradients) == 1:
        return given[0] if given else None
    total = given[0]
    for g in given[1:]:
        total = total + g
    return total / len(gradients)


def one_activation(value: Any) -> torch.Tensor:
    """The one tensor of what a block hands on through which gradients would pass."""
    return next(t for t in tree_flatten(value)[0] if t.is_floating_point())


def _one(value: Any, begin: str) -> torch.Tensor:
    """As `one_activation`; refuses boundaries that a skip connection crosses."""
    crossing = [t for t in tree_flatten(value)[0] if t.is_floating_point()]
    if len(crossing) != 1:
        shapes = ", ".join(str(tuple(t.shape)) for t in crossing)
        raise BadInput(
            f"stages: {begin}: {len(crossing)} activations cross this boundary ({shapes}), one beside a skip connection: a block "
            "must end where only one does"
        )
    return crossing[0]


# ---- from a method


def make_blocks(
    model: nn.Module, x: torch.Tensor, structure: Structure, stages: Any, seed: int = 0, count: Optional[int] = None,
    head: Optional[MakeHead] = None,
) -> Tuple[BlockedModel, Partition]:  # fmt: skip
    """A model in blocks by a method's structure, and the partition with a block a stage. `stages`: as the config says them;
    `count`: how many blocks there must be (processes). Raises BadInput."""
    begins = _begins(model, x, structure, stages, count)
    if count is not None and len(begins) + 1 != count:
        raise BadInput(
            f"stages: {len(begins) + 1} blocks, each in a process of its own: start as many for each replica, not {count}"
        )
    blocks = Blocks(model, begins, x, seed, structure.layers is not None, head)
    made = BlockedModel(blocks)
    part = partition(made, x, begins if begins else 1)
    if structure.overlap:
        blocks.share(structure.overlap)
    return made, part


def _begins(model: nn.Module, x: torch.Tensor, structure: Structure, stages: Any, count: Optional[int]) -> List[str]:
    names = [name for name, _ in links_of(model, x)]
    if isinstance(structure.blocks, tuple):
        return _links_at(model, x, list(structure.blocks), names, "method_args.blocks")
    part = partition(model, x, stages, between_top=True)
    if structure.blocks is not None:
        try:
            return merge_stages(model, part, structure.blocks, x)
        except BadInput as error:
            key = f"method_args.blocks: {structure.blocks}:"
            raise BadInput([fault.replace(f"stages: {len(part)}:", key) for fault in error.faults]) from None
    begins = _links_at(model, x, part.begin_names(), names, "stages")
    if structure.layers is None:
        return begins
    if structure.layers > len(part):
        raise BadInput(f"method_args.layers: {structure.layers}: the model has {len(part)} stages")
    return begins[-structure.layers :][:1] if structure.layers < len(part) else []


def _links_at(model: nn.Module, x: torch.Tensor, begins: List[str], names: List[str], key: str) -> List[str]:
    """Each of `begins` as the link that it is or begins with; BadInput for what lies inside a block with a skip connection."""
    partition(model, x, begins if begins else 1)  # refuses unknown names and a wrong order
    found, faults = [], []
    for begin in begins:
        link = next((name for name in names if f"{name}.".startswith(f"{begin}.")), None)
        if link is None:
            around = next((name for name in names if f"{begin}.".startswith(f"{name}.")), "a module")
            faults.append(
                f"{key}: {begin}: lies inside {around}, whose other paths (a skip connection) cross there: must be one of"
                f" the model's top-level sequence, such as {around}"
            )
        else:
            found.append(link)
    if faults:
        raise BadInput(faults)
    return found
