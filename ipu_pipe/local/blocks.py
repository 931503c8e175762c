"""Local-parallel training: blocks of a model that each have a loss of their own (Laskin et al.
2020).

    x -> block 0 -> | detach -> block 1 -> | detach -> block 2 -> output -> loss
              head 0 -> loss         head 1 -> loss

An auxiliary head turns a block's activations into outputs of the model's own form. No gradient
crosses a boundary, so every block is trained by its own loss alone. Evaluation uses the last
block's output, which is the model's.

With an overlap of 1 block j trains layer j - 1 as well, and the two gradients of a layer are
averaged:

    block 1:  x1 -> layer 0' -> layer 1 -> head 1        layer 0' is a duplicate of layer 0, kept equal by the averaging
    block 2:  x2 -> layer 1' -> layer 2 -> head 2        x2 is the input of layer 1

`ipu_pipe.local.structures` says which stages form a block, by method.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, Mapping, Sequence

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map

from ipu_pipe.cut.cutting import Piece, cut_model
from ipu_pipe.cut.loss_verification import LossStage, LossTrial, list_foreign_reads
from ipu_pipe.cut.verification import verify_pieces
from ipu_pipe.errors import BadInput, raise_faults, summarize
from ipu_pipe.local.heads import AugLocal, Heads, MakeHead, make_head
from ipu_pipe.model.batch import call_model, get_first_tensor, join_arguments
from ipu_pipe.model.devices import fork_random, seed_random
from ipu_pipe.model.loss import BlockOutputs, Loss, Take, describe_output
from ipu_pipe.model.modes import enter_training
from ipu_pipe.model.observation import Observation, observe_effects, observe_training
from ipu_pipe.model.precision import cast_forward, get_user_loss, is_cast
from ipu_pipe.model.randomness import KeyedRandomness, derive_seed, draw_from
from ipu_pipe.model.restoring import restore_all, restore_buffers, restore_function, restore_modes
from ipu_pipe.model.stages import Footprint, Partition, make_footprint
from ipu_pipe.refusals import BATCH, EMULATOR, Words

# the name of the auxiliary heads in a model
HEADS = "local_heads"


class Blocks:
    """The blocks of a model that have losses of their own.

    `begins`: the names of the modules at which the second and later blocks begin. `trains_last`:
    only the last block trains; the others are frozen and there are no heads. `take` extracts from
    the model's output what its loss needs; heads return the same form.
    """

    def __init__(
        self,
        model: nn.Module,
        begins: Sequence[str],
        x: Any,
        seed: int = 0,
        trains_last: bool = False,
        head: Heads | None = None,
        take: Take | None = None,
    ) -> None:
        self.model = model
        self.pieces = cut_model(model, begins, x)
        self.crossings = self.pieces[0].cut.crossings
        verify_pieces(model, self.pieces, x)
        with torch.no_grad():
            # copies of the model need this recording too
            self.pieces[0].cut.prepare(x, training=False)
        # the number of previous blocks that each block trains too, 0 or 1
        self.overlap = 0
        # by piece but the last: parameter name -> tensor in the same memory, which the next block
        # trains
        self._duplicates: list[dict[str, torch.Tensor]] = []
        untrained = self.pieces[:-1] if trains_last else []
        self._frozen = [p for piece in untrained for p in piece.parameters() if p.requires_grad]
        for parameter in self._frozen:
            parameter.requires_grad_(False)
        self.heads = nn.ModuleDict(
            {} if trains_last else self._make_heads(begins, x, seed, head, take)
        )

    def _make_heads(
        self, begins: Sequence[str], x: Any, seed: int, head: Heads | None, take: Take | None
    ) -> dict[str, nn.Module]:
        model = self.model
        make_default: MakeHead = getattr(model, "local_head", None) or partial(make_head, model)
        output, boundary_values = self._run_pieces(x)
        output = output if take is None else take(output)
        if not isinstance(output, torch.Tensor):
            raise BadInput(
                f"model: returns {describe_output(output)}: blocks need one tensor for the loss; "
                f"{Words('let the model return that', 'set model.output')}"
            )
        heads: dict[str, nn.Module] = {}
        device = get_first_tensor(x).device
        with fork_random(device):
            # a seed of their own: with or without heads the model's other draws are the same
            seed_random(derive_seed(seed, HEADS), device)
            activations = [
                get_activation(value, f"stages: {begin}:")
                for begin, value in zip(begins, boundary_values)
            ]
            for index, (begin, activation) in enumerate(zip(begins, activations)):
                try:
                    if isinstance(head, AugLocal):
                        built = head.make(model, index, activations, output)
                    else:
                        built = (head or make_default)(activation, output)
                    # under autocast activations have fewer bits than the weights, which stay
                    # float32
                    built.to(device, torch.float32 if is_cast(model) else activation.dtype)
                    if is_cast(model):
                        cast_forward(built, device.type)
                    # a user's function may return it in evaluation mode
                    enter_training(built)
                    with restore_modes(built):
                        # in evaluation mode, so that running statistics do not change
                        shape = tuple(built.eval()(activation).shape)
                        overwrites = _overwrites_input(built, activation)
                except BadInput:
                    raise
                # the user's function may raise anything
                except Exception as error:
                    raise BadInput(
                        f"method_args.head: before {begin}: {summarize(error)}"
                    ) from error
                if shape != tuple(output.shape):
                    raise BadInput(
                        f"method_args.head: before {begin}: returns {shape}, must return "
                        f"{tuple(output.shape)}"
                    )
                if overwrites:
                    # the next block reads the same activations
                    built.register_forward_pre_hook(lambda _, inputs: (inputs[0].clone(),))
                heads[str(index)] = built
        return heads

    def _run_pieces(self, x: Any) -> tuple[Any, list[Any]]:
        """Return the model's output, and the value at each boundary, in evaluation."""
        values: list[Any] = [x]
        model = self.model
        with torch.no_grad(), restore_all(model):
            model.eval()
            for piece in self.pieces:
                values.append(piece(values[-1]))
        return values[-1], values[1:-1]

    def get_head(self, index: int) -> nn.Module | None:
        """Return the auxiliary head of a block; None for the last block, and if there are no
        heads.
        """
        return self.heads[str(index)] if str(index) in self.heads else None

    def compute_outputs(self, x: Any) -> BlockOutputs:
        """Return the outputs of all blocks in the modules' present mode, of which no gradient
        passes from block to block.
        """
        outputs = BlockOutputs()
        # duplicates return the same values, and are there for their gradients
        overlaps = self._duplicates and self.overlap and torch.is_grad_enabled()
        entering = x
        # the input of the previous piece, and the random state before it
        previous: tuple[Any, torch.Tensor] | None = None
        for index, piece in enumerate(self.pieces):
            value = entering
            if previous is not None:
                value = self._run_duplicate(index - 1, *previous)
            if overlaps:
                previous = entering, torch.get_rng_state()
            value = piece(value)
            # the next block's gradients end here
            entering = tree_map(torch.Tensor.detach, value)
            head = self.get_head(index)
            if head is not None:
                outputs.append(head(get_activation(value)))
            elif piece is self.pieces[-1]:
                outputs.append(value)
        return outputs

    # ---- overlap

    def add_duplicates(self) -> None:
        """Let each block train the previous one as well, as a duplicate with the same weights and
        separate gradients.
        """
        self.overlap = 1
        # the input is used twice
        self.pieces[0].copies_input = True
        self._duplicates = [
            {
                name: p.detach().requires_grad_(p.requires_grad)
                for name, p in piece.named_parameters()
            }
            for piece in self.pieces[:-1]
        ]

    def _run_duplicate(self, index: int, value: Any, random_state: torch.Tensor) -> Any:
        """Run the duplicate of piece `index` from the `random_state` from which the piece itself
        drew.
        """
        piece = self.pieces[index]
        duplicate = self._duplicates[index]
        for name, parameter in piece.named_parameters():
            # a caller may have given the weight other memory, as vector_to_parameters does
            duplicate[name].data = parameter.data
            for kind in ("_backward_hooks", "_post_accumulate_grad_hooks"):
                hooks = getattr(parameter, kind, None)
                # the same dictionary, so that later ones act on both
                if hooks is not getattr(duplicate[name], kind, None):
                    setattr(duplicate[name], kind, hooks)
        # only the layer's own block updates its running statistics
        with restore_buffers(piece), draw_from(random_state):
            return torch.func.functional_call(piece, duplicate, (value,))

    def average_duplicates(self) -> None:
        """Replace the gradient of each layer by its mean over the blocks that train it; called
        before an update.
        """
        for piece, duplicate in zip(self.pieces, self._duplicates):
            for name, parameter in piece.named_parameters():
                tensor = duplicate[name]
                parameter.grad = average_gradients([parameter.grad, tensor.grad])
                # the next update gathers anew
                tensor.grad = None

    def forget_duplicates(self) -> None:
        """Drop the duplicates: a process that runs one block trains the layers of its own model
        instead.
        """
        self._duplicates = []

    def unfreeze(self) -> None:
        """Let the whole model train again."""
        for parameter in self._frozen:
            parameter.requires_grad_(True)


class BlockedModel(nn.Module):
    """A model whose blocks are trained by losses of their own. It returns `BlockOutputs` in
    training, else the model's output.

    Its parameters and buffers are those of the model, under their names, and those of the heads
    under `local_heads.INDEX`.
    """

    def __init__(self, blocks: Blocks) -> None:
        super().__init__()
        model = blocks.model
        if hasattr(model, HEADS):
            raise BadInput(
                f"model: {HEADS}: this name belongs to the auxiliary heads; rename the module"
            )
        # add_module would refuse names of attributes
        self._modules.update(model._modules)
        # share the dictionaries, do not copy them
        self._parameters = model._parameters
        self._buffers = model._buffers
        self._non_persistent_buffers_set = set(model._non_persistent_buffers_set)
        self._modules[HEADS] = blocks.heads
        self._local_blocks = blocks

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Return `BlockOutputs` in training, else the model's output."""
        if not self.training:
            return self._local_blocks.model(*inputs, **named)
        return self._local_blocks.compute_outputs(join_arguments(inputs, named))


def get_blocks(model: nn.Module) -> Blocks | None:
    """Return the blocks of a `BlockedModel`; None for other models."""
    return model._local_blocks if isinstance(model, BlockedModel) else None


def _overwrites_input(module: nn.Module, value: torch.Tensor) -> bool:
    """Tell whether a module first overwrites its input in place."""
    try:
        # autograd refuses to write to a leaf, and so tells of a write to the input
        module(value.detach().clone().requires_grad_())
    except RuntimeError as error:
        return "leaf Variable that requires grad" in str(error)
    return False


def get_activation(value: Any, where: str = f"{BATCH}: with these inputs") -> torch.Tensor:
    """Return the one floating-point tensor among the values that a block passes on. Raise `BadInput`
    if there are several, as with a skip connection or a mask that the first microbatch lacks.
    """
    activations = [t for t in tree_flatten(value)[0] if t.is_floating_point()]
    if len(activations) != 1:
        shapes = ", ".join(str(tuple(t.shape)) for t in activations)
        raise BadInput(
            f"{where} {len(activations)} activations ({shapes}) cross a boundary of blocks, "
            "expected one: let the block end where no skip connection crosses, and give all "
            "microbatches the same inputs"
        )
    return activations[0]


def average_gradients(gradients: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    """Return the mean of gradients, of a layer in several blocks or replicas, summed in their
    order; None counts as zero.
    """
    present = [g for g in gradients if g is not None]
    if not present or len(gradients) == 1:
        return present[0] if present else None
    total = present[0]
    for g in present[1:]:
        # not in place, because the first gradient still belongs to its owner
        total = total + g
    return total / len(gradients)


def observe_blocks(model: nn.Module, loss: Loss, example: tuple[Any, Any]) -> Observation:
    """Observe a training pass of one microbatch of a model with blocks, without the costs of
    duplicates.
    """
    blocks = get_blocks(model)
    assert blocks is not None
    overlap = blocks.overlap
    # without duplicates, whose operations would be counted for the blocks' own
    blocks.overlap = 0
    try:
        with restore_function(get_user_loss(loss)):
            observation = observe_training(
                model, *example, lambda x, y: loss(call_model(model, x), y)
            )
    # also after a loss that fails
    finally:
        blocks.overlap = overlap
    if overlap:
        observation.effects = observe_effects(model, example[0])
    return observation


def measure_footprint(model: nn.Module, part: Partition, observation: Observation) -> Footprint:
    """Return the bytes and FLOPs of each stage of a model with blocks in the observed microbatch.

    Each block computes its own loss, so only activations cross boundaries.
    """
    blocks = get_blocks(model)
    plain = make_footprint(model, part, observation)
    assert blocks is not None
    saved = plain.saved_bytes
    # each device also holds the previous block's last layer
    if blocks.overlap:
        saved = tuple(size + (saved[s - 1] if s else 0) for s, size in enumerate(saved))
    sent = tuple(sum(t.bytes for t in crossing.tensors) for crossing in blocks.crossings)
    return replace(plain, saved_bytes=saved, boundary_bytes=sent)


def verify_losses(
    model: nn.Module,
    pieces: Sequence[Piece],
    loss: Loss,
    example: tuple[Any, Any],
    draws: Mapping[str, int],
) -> None:
    """Raise `BadInput` if a loss reads more of a cut model than its stage holds, the last one or
    each block that has a loss.

    `pieces`: the stages of a model without blocks; `draws`: the modules that draw random numbers
    (`ForwardEffects`).
    """
    blocks = get_blocks(model)
    if blocks is not None:
        pieces = blocks.pieces
    if len(pieces) < 2:
        return
    stages: list[LossStage] = []
    for piece in pieces:
        head = None if blocks is None else blocks.get_head(piece.stage)
        if head is not None:
            stages.append(
                LossStage(piece.stage, [piece, head], partial(_run_with_head, piece, head))
            )
        elif piece is pieces[-1]:
            stages.append(LossStage(piece.stage, [piece], piece))
    place = "where the model is cut the last stage computes it alone"
    remedy = (
        "compute the term in the forward of that stage and return it with the model's output, let "
        f"the model itself hold a weight that only the loss reads, or use {EMULATOR}"
    )
    if blocks is not None:
        place = "block {stage} computes it alone"
        remedy = (
            "put the term into a layer's backward by an autograd function, or use backend: "
            "{name: emulator} with a method that has no blocks"
        )
    randomness = KeyedRandomness(model, draws, 0, get_first_tensor(example[0]).device)
    try:
        raise_faults(
            list_foreign_reads(
                LossTrial(model, pieces, loss, example, randomness), stages, place, remedy
            )
        )
    finally:
        randomness.remove()


def _run_with_head(piece: Piece, head: nn.Module, value: Any) -> Any:
    return head(get_activation(piece(value)))
