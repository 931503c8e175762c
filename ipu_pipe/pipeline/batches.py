"""The batches of a caller's loop: divide one into microbatches, and hand them to a backend, which
asks for them by number.
"""

from __future__ import annotations

import itertools

# not from typing: its isinstance is slow
from collections.abc import Iterable
from typing import Any, Iterator, NamedTuple, Sequence

import torch

from ipu_pipe.data.sources import compute_checksum
from ipu_pipe.model.batch import clone_tensors, count_samples, list_tensors, map_tensors
from ipu_pipe.text import describe_kind


class Microbatch(NamedTuple):
    """Inputs and labels of a microbatch; None for the part that this process does not have."""

    x: Any
    y: Any


def divide_batch(x: Any, y: Any, count: int) -> list[Microbatch]:
    """Divide inputs and labels into `count` microbatches of equally many samples, in order, as
    views.

    `x`, `y`: tensors, or tensors in mappings, tuples and lists, with the samples as their first
    dimension; or None. Raise `ValueError` if the samples do not divide, or differ between tensors.
    """
    tensors = [*list_tensors(x), *list_tensors(y)]
    if not tensors:
        raise ValueError(
            "step: x and y hold no tensors: must be tensors, or mappings, tuples and lists of them"
        )
    if any(tensor.layout != torch.strided for tensor in tensors):
        raise ValueError("step: a tensor of the batch is sparse: must be dense, as of to_dense()")
    # a tensor of no dimensions has no samples to divide
    sizes = {len(tensor) for tensor in tensors if tensor.dim()}
    if len(sizes) > 1:
        raise ValueError(
            f"step: tensors of {' and '.join(map(str, sorted(sizes)))} samples: must have equally "
            f"many"
        )
    samples = sizes.pop() if sizes else 0
    if not samples or samples % count:
        raise ValueError(
            f"step: a batch of {samples} samples does not divide into {count} microbatches: must "
            f"be a multiple of"
            f" {count} (DataLoader(..., drop_last=True) leaves out a smaller last batch)"
        )
    size = samples // count

    def take_part(tensor: torch.Tensor, i: int) -> torch.Tensor:
        # a scalar goes with every microbatch
        if not tensor.dim():
            return tensor
        # by `data`, because autograd takes a write to one view for a write to all of them
        whole = tensor if tensor.requires_grad else tensor.data
        return whole[i * size : (i + 1) * size]

    def take(nest: Any, i: int) -> Any:
        return map_tensors(lambda tensor: take_part(tensor, i), nest)

    return [Microbatch(take(x, i), take(y, i)) for i in range(count)]


def take_pairs(pairs: Iterable[Any], count: int) -> list[Microbatch]:
    """Return `count` microbatches of pairs (x, y). Raise `ValueError` if they are not as many, or
    one is not a pair.
    """
    if not isinstance(pairs, Iterable):
        raise ValueError(f"step: microbatches: {describe_kind(pairs)}: must be {count} pairs")
    # an endless iterator is read no further
    batch = list(itertools.islice(pairs, count + 1))
    if len(batch) != count:
        listed = f"more than {count}" if len(batch) > count else len(batch)
        raise ValueError(f"step: {listed} microbatches: must be {count}")
    wrong = [
        i for i, pair in enumerate(batch) if not isinstance(pair, (tuple, list)) or len(pair) != 2
    ]
    if wrong:
        raise ValueError(
            f"step: microbatch {wrong[0]}: {describe_kind(batch[wrong[0]])}: must be a pair (x, y)"
        )
    return [Microbatch(*pair) for pair in batch]


def require_samples(batch: Sequence[Microbatch], samples: int) -> None:
    """Raise `ValueError` if a microbatch has another number of samples than those of the first
    step.
    """
    for i, microbatch in enumerate(batch):
        part = microbatch.y if microbatch.x is None else microbatch.x
        if part is not None and count_samples(part) != samples:
            raise ValueError(
                f"step: microbatch {i} has {count_samples(part)} samples, those of the first step "
                f"{samples}: processes take one"
                " size (DataLoader(..., drop_last=True) leaves out a smaller last batch)"
            )


def copy_memory(microbatch: Microbatch) -> Microbatch:
    """Return a microbatch in memory of its own, with the same strides: another layout could give
    other bits.
    """
    return Microbatch(*(map_tensors(_copy_span, part) for part in microbatch))


def _copy_span(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.requires_grad or not tensor.numel():
        return tensor.clone()
    # of views too that repeat or leave out memory, such as those of expand and unfold
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    memory = tensor.as_strided((span,), (1,)).clone()  # (span,)
    return memory.as_strided(tensor.shape, tensor.stride())


def sum_floats(nest: Any) -> list[torch.Tensor]:
    """Return the sum of each floating-point tensor: not finite if one of its numbers is not.

    Nobody reads them unless a loss is not finite, so that no device is waited for.
    """
    return [
        # a sum of float16 numbers may overflow though each of them is finite
        tensor.detach().sum(dtype=torch.promote_types(tensor.dtype, torch.float32))
        for tensor in list_tensors(nest)
        if tensor.is_floating_point()
    ]


def unwrap(batch: Any) -> Any:
    """Return the batch of a pair (batch, None): a model with its own loss takes no labels."""
    is_wrapped = isinstance(batch, (tuple, list)) and len(batch) == 2 and batch[1] is None
    return batch[0] if is_wrapped else batch


class GivenBatches:
    """A data source of the microbatches that a caller's loop has given and no stage has read yet.

    `example`: a microbatch whose parts stand in for those that this process does not have.
    `passes_whole`: the model computes its own loss, so that a microbatch is its input alone.
    `reads_again`: whether a microbatch can be read once more, after a device has failed.
    """

    reads_again = False

    def __init__(self, example: Microbatch, passes_whole: bool) -> None:
        # the caller may use the memory of a batch again
        self.example = Microbatch(clone_tensors(example.x), clone_tensors(example.y))
        self._passes_whole = passes_whole
        self._given: dict[int, Microbatch] = {}

    def give(self, microbatches: dict[int, Microbatch]) -> None:
        """Add microbatches by their number."""
        self._given.update(microbatches)

    def forget(self) -> None:
        """Drop the microbatches that were given and not read."""
        self._given.clear()

    def train_batches_per_epoch(self, batch_size: int) -> None:
        """Return None: the loop decides how many batches there are."""

    def train_batch(self, epoch: int, index: int, batch_size: int) -> Any:
        """Return a microbatch that was given, once; the example if it was not, to build the run."""
        microbatch = self._given.pop(index, self.example)
        x = self.example.x if microbatch.x is None else microbatch.x
        y = self.example.y if microbatch.y is None else microbatch.y
        return x if self._passes_whole else (x, y)

    def test_batches(self, batch_size: int) -> Iterator[Any]:
        """Return no batches: `Pipeline.evaluate` is given its own."""
        return iter(())

    def compute_checksum(self, batch: Any) -> int:
        """Return a checksum of a microbatch's labels, of all of it if they are inside, 0 if this
        process has none of its own.
        """
        labels, stand_in = (
            (batch, self.example.x) if self._passes_whole else (batch[1], self.example.y)
        )
        return 0 if labels is stand_in else compute_checksum(labels)


def interleave_replicas(microbatches: Sequence[Microbatch], replicas: int) -> list[Microbatch]:
    """Order the microbatches of `replicas` parts of a batch, one part after another, as the
    replicas take turns.
    """
    per_replica = len(microbatches) // replicas
    # microbatch i of replica r gets the number i * replicas + r
    return [microbatches[r * per_replica + i] for i in range(per_replica) for r in range(replicas)]
