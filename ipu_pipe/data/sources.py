"""Sources of batches: their protocol, the split of a batch into inputs and labels, and sources in
memory.
"""

from __future__ import annotations

import copy
import zlib
from typing import Any, Iterator, Mapping, Protocol, Sequence, Tuple, runtime_checkable

import torch

from ipu_pipe.errors import BadInput
from ipu_pipe.model.batch import list_tensors
from ipu_pipe.model.loss import split_requested_fields
from ipu_pipe.model.randomness import derive_seed
from ipu_pipe.text import show

# inputs and labels
Pair = Tuple[torch.Tensor, torch.Tensor]
# the default names of the labels in a mapping: the first that is present
LABELS = ("labels", "label", "target", "targets")
# the zeros on each side of an image out of which it is cropped
BORDER = 4


@runtime_checkable
class DataSource(Protocol):
    """The interface of training data. Write one for your own data, or wrap a loader with
    `from_loader`.

    A batch is a pair (inputs, labels), or a tuple of more whose last is the labels, or a mapping
    with the labels under a name of `LABELS`. Inputs are a tensor, or tensors in mappings, tuples
    and lists to any depth, each with the samples as its first
    dimension: the model gets a mapping as keyword arguments, a tuple or list as positional ones.
    None may stand for what it is not given. With `loss: model` the model gets the whole batch,
    labels too, in the same way.

    A source may have attributes: `labels`, the name of the labels in its mappings; `train_samples`,
    the samples of an epoch if no microbatch were dropped; `data_files`, the files that it reads,
    whose hashes the run's record keeps; `validation`, a source whose test set is held out of the
    training set for the evaluations during a run; `train_batches(epoch, indices, batch_size)`,
    several microbatches as one batch, where reading them together is faster.
    """

    def train_batches_per_epoch(self, batch_size: int) -> int | None:
        """Return the number of full microbatches of `batch_size` in an epoch; a last one that is
        not full is dropped.

        Return None if that is not known: the run then has `steps` updates of one epoch, number 0,
        whose microbatches do not end.
        """

    def train_batch(self, epoch: int, index: int, batch_size: int) -> Any:
        """Return microbatch `index` of `epoch`, both counted from 0, of `batch_size` samples."""

    def test_batches(self, batch_size: int) -> Iterator[Any]:
        """Yield the whole test set in order, at most `batch_size` samples at a time."""


def split_batch(
    batch: Any, labels: str | None = None, whole: bool = False, asked: tuple[str, ...] = ()
) -> tuple[Any, Any]:
    """Split a batch into inputs and labels.

    `labels` is their name in a mapping, if it is none of `LABELS`. If `whole`, the model gets all
    of the batch, and the labels may be missing (None). `asked` are the names that the loss asks for
    besides labels. Raise `BadInput` if the labels cannot be found.
    """
    if asked:
        return split_requested_fields(batch, *split_batch(batch, labels), asked)
    if isinstance(batch, Mapping):
        name = labels or next((key for key in LABELS if key in batch), None)
        if whole:
            # a model that computes its loss may know its labels by another name
            return batch, None if name is None else batch.get(name)
        if name is None or name not in batch:
            why = f"has no {labels}" if labels else f"{', '.join(LABELS)}: none is among them"
            raise BadInput(
                f"data: a batch of {', '.join(map(str, batch))}: which are its labels? {why}: say "
                f"their name, as "
                "from_loader(..., labels=NAME), or take loss: model"
            )
        return {key: value for key, value in batch.items() if key != name}, batch[name]
    if isinstance(batch, (tuple, list)) and len(batch) > 1:
        if whole:
            return tuple(batch), batch[-1]
        # a model of one input gets it alone, of several a tuple
        return batch[0] if len(batch) == 2 else tuple(batch[:-1]), batch[-1]
    if whole:
        return batch, None
    raise BadInput(
        f"data: a batch is a "
        f"{type(batch).__name__}{' of one' if isinstance(batch, (tuple, list)) else ''}: must be "
        f"(inputs, "
        "labels) or a mapping that holds labels"
    )


def compute_checksum(batch: Any, before: int = 0) -> int:
    """Return the CRC-32 of the tensors of all batches so far; `before` is that of the earlier
    batches.
    """
    for tensor in list_tensors(batch):
        # a view as bytes needs contiguous memory, and a dimension, which a scalar has not
        numbers = tensor.detach().cpu().contiguous().reshape(-1)
        before = zlib.crc32(numbers.view(torch.uint8).numpy().data, before)
    return before


class SampledData:
    """The base of sources with a known number of samples, which subclasses take by position in an
    epoch or the test set.
    """

    train_samples: int
    test_samples: int
    validation: SampledData | None = None

    def split_off_validation(self, part: float, seed: int) -> None:
        """Move samples of the training set, drawn by the seed, into `validation`, whose test set
        they are.

        `part` is their number, or their share if it is below 1. Raise `BadInput` if none would be
        left on either side.
        """
        count = round(part * self.train_samples) if part < 1 else int(part)
        if not 0 < count < self.train_samples:
            allowed = f"leave some of the {self.train_samples} training samples on both sides"
            raise BadInput(f"data.validation: {show(part)}: must {allowed}")
        generator = torch.Generator().manual_seed(derive_seed(seed, "validation"))
        order = torch.randperm(self.train_samples, generator=generator)
        self.validation = copy.copy(self)
        self.validation.test_samples = count
        self.train_samples = self.train_samples - count
        self._split_training_set(
            self.validation, order[:count].sort().values, order[count:].sort().values
        )

    def _split_training_set(
        self, validation: Any, held_out: torch.Tensor, remaining: torch.Tensor
    ) -> None:
        """Make the samples `held_out` the test set of the copy `validation`, and keep only the
        samples `remaining` here.
        """
        raise NotImplementedError

    def train_batches_per_epoch(self, batch_size: int) -> int:
        """Return the number of full microbatches in an epoch."""
        return self.train_samples // batch_size

    def train_batch(self, epoch: int, index: int, batch_size: int) -> Pair:
        """Return microbatch `index` of `epoch`: the positions [index b, (index + 1) b) of the
        epoch's order.
        """
        return self.take_train(epoch, range(index * batch_size, (index + 1) * batch_size))

    def test_batches(self, batch_size: int) -> Iterator[Pair]:
        """Yield the test set in order."""
        for start in range(0, self.test_samples, batch_size):
            yield self.take_test(range(start, min(start + batch_size, self.test_samples)))

    def take_train(self, epoch: int, positions: range) -> Pair:
        """Return the samples at these positions of an epoch."""
        raise NotImplementedError

    def take_test(self, positions: range) -> Pair:
        """Return the samples at these positions of the test set."""
        raise NotImplementedError


def draw_order(seed: int, epoch: int, count: int) -> torch.Tensor:
    """Return the order of an epoch's `count` samples."""
    generator = torch.Generator().manual_seed(derive_seed(seed, "order", epoch))
    return torch.randperm(count, generator=generator)


class TensorData(SampledData):
    """Samples held in memory: images as bytes (n, C, H, W) or numbers of any shape, with labels
    (n,).

    If `augment`, images are cropped at random out of a zero border of 4 pixels and mirrored at
    random, drawn by (seed, epoch, position). `mean` and `std` are by channel, of values between 0
    and 1 where the samples are bytes.
    """

    def __init__(
        self,
        train: Pair,
        test: Pair,
        seed: int = 0,
        augment: bool = False,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
    ) -> None:
        self.train = train
        self.test = test
        self.augment = augment
        self.train_samples = len(train[0])
        self.test_samples = len(test[0])
        self._seed = seed
        self._mean = _reshape_by_channel(mean, train[0])
        self._std = _reshape_by_channel(std, train[0])
        self._epoch = -1

    def _split_training_set(
        self, validation: Any, held_out: torch.Tensor, remaining: torch.Tensor
    ) -> None:
        validation.test = self.train[0][held_out], self.train[1][held_out]
        # the copy must not keep all samples in memory
        self.train = validation.train = self.train[0][remaining], self.train[1][remaining]

    def take_train(self, epoch: int, positions: range) -> Pair:
        """Return the samples at these positions of an epoch."""
        if epoch != self._epoch:
            self._draw_epoch(epoch)
        part = slice(positions.start, positions.stop)
        chosen = self._order[part]
        # an index by a tensor copies, so that a model may write into its input
        x = self.train[0][chosen]
        if self.augment:
            x = crop_and_mirror(x, self._shifts[part], self._mirrored[part])
        return self._normalize(x), self.train[1][chosen]

    def take_test(self, positions: range) -> Pair:
        """Return the samples at these positions of the test set."""
        # clone, because a model may write into its input
        x, y = (part[positions.start : positions.stop].clone() for part in self.test)
        return self._normalize(x), y

    def _draw_epoch(self, epoch: int) -> None:
        """Draw the order and the augmentation of an epoch, by position in the epoch."""
        count = self.train_samples
        generator = torch.Generator()
        self._order = draw_order(self._seed, epoch, count)
        generator.manual_seed(derive_seed(self._seed, "augmentation", epoch))
        # for the whole epoch at once, so that microbatches of any size find the same
        self._shifts = torch.randint(0, 2 * BORDER + 1, (count, 2), generator=generator)
        self._mirrored = torch.randint(0, 2, (count,), generator=generator).bool()
        self._epoch = epoch

    def _normalize(self, x: torch.Tensor) -> torch.Tensor:
        is_bytes = x.dtype == torch.uint8
        # of bytes this makes a copy, which may then be written in place
        if is_bytes:
            x = x.float().div_(255)
        if self._mean is None or self._std is None:
            return x
        return (x.sub_(self._mean) if is_bytes else x - self._mean).div_(self._std)


def crop_and_mirror(x: torch.Tensor, shifts: torch.Tensor, mirrored: torch.Tensor) -> torch.Tensor:
    """Return images of the same shape, cropped out of `x` (b, C, H, W) with a border of 4 zeros;
    some are mirrored.

    `shifts` (b, 2): distances from the upper left corner (0 to 8, rows then columns). `mirrored`
    (b,): the images that are turned left to right. One gather does it for all images.
    """
    b, channels, height, width = x.shape
    padded = torch.nn.functional.pad(x, (BORDER,) * 4).flatten(2)  # (b, C, pixels)
    # (b, W), positions in a padded row
    columns = torch.arange(width).expand(b, width)
    columns = torch.where(mirrored[:, None], columns.flip(1), columns) + shifts[:, 1:]
    rows = torch.arange(height) + shifts[:, :1]  # (b, H)
    pixels = (
        rows[:, :, None] * (width + 2 * BORDER) + columns[:, None, :]
    )  # (b, H, W), positions in a padded plane
    return padded.gather(2, pixels.view(b, 1, -1).expand(b, channels, -1)).view_as(x)


def _reshape_by_channel(values: Sequence[float] | None, x: torch.Tensor) -> torch.Tensor | None:
    if values is None:
        return None
    # (1, C, 1, 1) of images
    return torch.tensor(values, dtype=torch.float32).view(1, -1, *[1] * (x.dim() - 2))


def require_int(
    key: str, value: Any, least: int = 1, most: int | None = None, optional: bool = False
) -> None:
    """Raise `BadInput` unless the value of `key` is an integer from `least` to `most`, or None if
    `key` is optional.
    """
    if optional and value is None:
        return
    # True is an int, too
    if type(value) is not int or value < least or (most is not None and value > most):
        allowed = f"a whole number >= {least}" if most is None else f"from {least} to {most}"
        raise BadInput(f"data.{key}: {show(value)}: must be {allowed}")


def take_subset(
    train: Pair, test: Pair, subset: int | None, test_subset: int | None
) -> tuple[Pair, Pair]:
    """Return the first `subset` training and `test_subset` test samples (None: all). Raise
    `BadInput` for bad counts.
    """
    require_int("subset", subset, 1, len(train[0]), optional=True)
    require_int("test_subset", test_subset, 1, len(test[0]), optional=True)
    train_subset = train[0][:subset], train[1][:subset]
    return train_subset, (test[0][:test_subset], test[1][:test_subset])


class SyntheticData(SampledData):
    """Random inputs and labels of a given shape, to measure throughput, memory and traffic. They
    are drawn on access.

    Each sample is drawn by (seed, epoch, position), so that it is the same in microbatches of any
    size. If `bytes`, inputs are 8-bit.
    """

    def __init__(
        self,
        shape: Sequence[int],
        classes: int,
        samples: int,
        test_samples: int,
        seed: int,
        bytes: bool = False,
    ) -> None:
        self._shape = list(shape)
        self._classes = classes
        self.train_samples = samples
        self.test_samples = test_samples
        self._seed = seed
        self._type = torch.uint8 if bytes else torch.float32
        self._test_part = "test"

    def _split_training_set(
        self, validation: Any, held_out: torch.Tensor, remaining: torch.Tensor
    ) -> None:
        # the validation set has its own samples, drawn like the test set's
        validation._test_part = "validation"

    def take_train(self, epoch: int, positions: range) -> Pair:
        """Return the samples at these positions of an epoch."""
        return self._draw(epoch, positions)

    def take_test(self, positions: range) -> Pair:
        """Return the samples at these positions of the test set."""
        return self._draw(self._test_part, positions)

    def _draw(self, part: Any, positions: range) -> Pair:
        generator = torch.Generator()
        x = torch.empty([len(positions), *self._shape], dtype=self._type)
        y = torch.empty(len(positions), dtype=torch.int64)
        for row, position in enumerate(positions):
            generator.manual_seed(derive_seed(self._seed, part, position))
            if x.is_floating_point():
                x[row].normal_(generator=generator)
            else:
                x[row].random_(0, 256, generator=generator)
            y[row] = torch.randint(0, self._classes, (), generator=generator)
        return x, y


def split_off_test(
    x: torch.Tensor,
    y: torch.Tensor,
    test: int,
    seed: int = 0,
) -> list[Pair]:
    """Return [training part, test part] of a set; the `test` samples of the test part are drawn by
    `seed`.
    """
    # not by the run's seed: runs with other seeds are evaluated on the same samples
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    test_order = order[:test]
    train_order = order[test:]
    return [(x[train_order], y[train_order]), (x[test_order], y[test_order])]
