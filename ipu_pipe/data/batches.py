"""Batches: the protocol of data sources, and sources in memory."""

from __future__ import annotations

import copy
import zlib
from typing import Any, Iterator, List, Mapping, Optional, Sequence, Tuple

import torch

from ipu_pipe.errors import BadInput
from ipu_pipe.model.batch import list_tensors
from ipu_pipe.model.loss import split_requested_fields
from ipu_pipe.model.randomness import derive_seed
from ipu_pipe.text import show

try:
    from typing import Protocol, runtime_checkable
except ImportError:  # pragma: no cover
    from typing_extensions import Protocol, runtime_checkable  # type: ignore[assignment]

Pair = Tuple[torch.Tensor, torch.Tensor]


# the default names of the labels in a mapping: the first that is present
LABELS = ("labels", "label", "target", "targets")


@runtime_checkable
class DataSource(Protocol):
    """The interface of training data. Write one for your own data, or wrap a loader with `from_loader`.

    A batch is a pair (inputs, labels), or a tuple of more whose last is the labels, or a mapping with the labels under a name of
    `LABELS`. Inputs are a tensor, or tensors in mappings, tuples and lists to any depth, each with the samples as its first
    dimension: the model gets a mapping as keyword arguments, a tuple or list as positional ones. None may stand for what it is
    not given. With `loss: model` the model gets the whole batch, labels too, in the same way.

    A source may have attributes: `labels`, the name of the labels in its mappings; `train_samples`, how many samples an epoch
    would have if no microbatch were dropped; `data_files`, the files that it reads, whose hashes the run's record keeps;
    `validation`, a source whose test set is held out of the training set for the evaluations during a run;
    `train_batches(epoch, indices, batch_size)`, several microbatches as one batch, where reading them together is faster.
    """

    def train_batches_per_epoch(self, batch_size: int) -> Optional[int]:
        """Return how many full microbatches of `batch_size` an epoch has; a last one that is not full is dropped.

        Return None if that is not known: the run then has `steps` updates of one epoch, number 0, whose microbatches do not end.
        """

    def train_batch(self, epoch: int, index: int, batch_size: int) -> Any:
        """Return microbatch `index` of `epoch`, both counted from 0, of `batch_size` samples."""

    def test_batches(self, batch_size: int) -> Iterator[Any]:
        """Yield the whole test set in order, at most `batch_size` samples at a time."""


def split_batch(
    batch: Any, labels: Optional[str] = None, whole: bool = False, asked: Tuple[str, ...] = ()
) -> Tuple[Any, Any]:
    """Split a batch into inputs and labels.

    `labels` is their name in a mapping, if it is none of `LABELS`. If `whole`, the model gets all of the batch, and the labels
    may be missing (None). `asked` are the names that the loss asks for besides labels. Raise `BadInput` if the labels cannot be
    found.
    """
    if asked:
        return split_requested_fields(batch, *split_batch(batch, labels), asked)
    if isinstance(batch, Mapping):
        name = labels or next((key for key in LABELS if key in batch), None)
        if whole:
            return batch, None if name is None else batch.get(name)
        if name is None or name not in batch:
            why = f"has no {labels}" if labels else f"{', '.join(LABELS)}: none is among them"
            raise BadInput(
                f"data: a batch of {', '.join(map(str, batch))}: which are its labels? {why}: say their name, as "
                "from_loader(..., labels=NAME), or take loss: model"
            )
        return {key: value for key, value in batch.items() if key != name}, batch[name]
    if isinstance(batch, (tuple, list)) and len(batch) > 1:
        if whole:
            return tuple(batch), batch[-1]
        return batch[0] if len(batch) == 2 else tuple(batch[:-1]), batch[-1]
    if whole:
        return batch, None
    raise BadInput(
        f"data: a batch is a {type(batch).__name__}{' of one' if isinstance(batch, (tuple, list)) else ''}: must be (inputs, "
        "labels) or a mapping that holds labels"
    )


def compute_checksum(batch: Any, before: int = 0) -> int:
    """Return the CRC-32 of the tensors of a batch, continuing `before`, the checksum of earlier batches."""
    for tensor in list_tensors(batch):
        numbers = tensor.detach().cpu().contiguous().reshape(-1)
        before = zlib.crc32(numbers.view(torch.uint8).numpy().data, before)
    return before


class SampledData:
    """Samples of a known number, which subclasses take by their places in an epoch, or in the test set."""

    train_samples: int
    test_samples: int
    validation: Optional[SampledData] = None

    def split_off_validation(self, part: float, seed: int) -> None:
        """Move samples of the training set, drawn by the seed, into `validation`, whose test set they are.

        `part` is their number, or their share if it is below 1. Raise `BadInput` if none would be left on either side.
        """
        count = round(part * self.train_samples) if part < 1 else int(part)
        if not 0 < count < self.train_samples:
            allowed = f"leave some of the {self.train_samples} training samples on both sides"
            raise BadInput(f"data.validation: {show(part)}: must {allowed}")
        generator = torch.Generator().manual_seed(derive_seed(seed, "validation"))
        order = torch.randperm(self.train_samples, generator=generator)
        self.validation = copy.copy(self)
        self.validation.test_samples, self.train_samples = count, self.train_samples - count
        self._move_to_test(self.validation, order[:count].sort().values, order[count:].sort().values)

    def _move_to_test(self, other: Any, moved: torch.Tensor, left: torch.Tensor) -> None:
        """Use the training samples `moved` as the test set of the copy `other` and keep only the samples `left` here."""
        raise NotImplementedError

    def train_batches_per_epoch(self, batch_size: int) -> int:
        """Return how many full microbatches an epoch has."""
        return self.train_samples // batch_size

    def train_batch(self, epoch: int, index: int, batch_size: int) -> Pair:
        """Return microbatch `index` of `epoch`: the places [index b, (index + 1) b) of the epoch's order."""
        return self.take_train(epoch, range(index * batch_size, (index + 1) * batch_size))

    def test_batches(self, batch_size: int) -> Iterator[Pair]:
        """Yield the test set in order."""
        for start in range(0, self.test_samples, batch_size):
            yield self.take_test(range(start, min(start + batch_size, self.test_samples)))

    def take_train(self, epoch: int, places: range) -> Pair:
        """Return the samples at these places of an epoch."""
        raise NotImplementedError

    def take_test(self, places: range) -> Pair:
        """Return the samples at these places of the test set."""
        raise NotImplementedError


def draw_order(seed: int, epoch: int, count: int) -> torch.Tensor:
    """Return the order of an epoch's `count` samples."""
    generator = torch.Generator().manual_seed(derive_seed(seed, "order", epoch))
    return torch.randperm(count, generator=generator)


class TensorData(SampledData):
    """Samples held in memory: images as bytes (n, C, H, W) or numbers of any shape, with labels (n,).

    If `augment`, images are cropped at random out of a zero border of 4 pixels and mirrored at random, drawn by (seed, epoch,
    place). `mean` and `std` are by channel, of values between 0 and 1 where the samples are bytes.
    """

    def __init__(
        self,
        train: Pair,
        test: Pair,
        seed: int = 0,
        augment: bool = False,
        mean: Optional[Sequence[float]] = None,
        std: Optional[Sequence[float]] = None,
    ) -> None:
        self.train, self.test, self.augment = train, test, augment
        self.train_samples, self.test_samples = len(train[0]), len(test[0])
        self._seed = seed
        self._mean, self._std = _by_channel(mean, train[0]), _by_channel(std, train[0])
        self._epoch = -1

    def _move_to_test(self, other: Any, moved: torch.Tensor, left: torch.Tensor) -> None:
        other.test = self.train[0][moved], self.train[1][moved]
        # the copy must not keep the left-out samples in memory
        self.train = other.train = self.train[0][left], self.train[1][left]

    def take_train(self, epoch: int, places: range) -> Pair:
        """Return the samples at these places of an epoch."""
        if epoch != self._epoch:
            self._draw_epoch(epoch)
        part = slice(places.start, places.stop)
        chosen = self._order[part]
        x = self.train[0][chosen]
        if self.augment:
            x = crop_and_mirror(x, self._shifts[part], self._mirrored[part])
        return self._normalized(x), self.train[1][chosen]

    def take_test(self, places: range) -> Pair:
        """Return the samples at these places of the test set."""
        # clone, because a model may write into its input
        x, y = (part[places.start : places.stop].clone() for part in self.test)
        return self._normalized(x), y

    def _draw_epoch(self, epoch: int) -> None:
        """Draw the order and the augmentation of an epoch, by place in it."""
        count, generator = self.train_samples, torch.Generator()
        self._order = draw_order(self._seed, epoch, count)
        generator.manual_seed(derive_seed(self._seed, "augmentation", epoch))
        self._shifts = torch.randint(0, 2 * BORDER + 1, (count, 2), generator=generator)
        self._mirrored = torch.randint(0, 2, (count,), generator=generator).bool()
        self._epoch = epoch

    def _normalized(self, x: torch.Tensor) -> torch.Tensor:
        # then the result below is a copy, which may be changed in place
        is_bytes = x.dtype == torch.uint8
        if is_bytes:
            x = x.float().div_(255)
        if self._mean is None or self._std is None:
            return x
        return (x.sub_(self._mean) if is_bytes else x - self._mean).div_(self._std)


BORDER = 4


def crop_and_mirror(x: torch.Tensor, shifts: torch.Tensor, mirrored: torch.Tensor) -> torch.Tensor:
    """Crop each image (C, H, W) of `x` (b, C, H, W) out of itself with a border of 4 zeros, and mirror some.

    `shifts` (b, 2) are distances from the upper left corner (0 to 8, rows then columns), `mirrored` (b,) says which are turned
    left to right. One gather does it for all.
    """
    b, channels, height, width = x.shape
    padded = torch.nn.functional.pad(x, (BORDER,) * 4).flatten(2)  # (b, C, pixels)
    columns = torch.arange(width).expand(b, width)
    columns = torch.where(mirrored[:, None], columns.flip(1), columns) + shifts[:, 1:]
    rows = torch.arange(height) + shifts[:, :1]
    pixels = rows[:, :, None] * (width + 2 * BORDER) + columns[:, None, :]  # (b, H, W), places in a padded plane
    return padded.gather(2, pixels.view(b, 1, -1).expand(b, channels, -1)).view_as(x)


def _by_channel(values: Optional[Sequence[float]], x: torch.Tensor) -> Optional[torch.Tensor]:
    if values is None:
        return None
    return torch.tensor(values, dtype=torch.float32).view(1, -1, *[1] * (x.dim() - 2))


def require_whole(
    key: str, value: Any, least: int = 1, most: Optional[int] = None, optional: bool = False
) -> None:
    """Raise `BadInput` unless the value of `key` is a whole number from `least` to `most`, or None if `key` is optional."""
    if optional and value is None:
        return
    if type(value) is not int or value < least or (most is not None and value > most):
        allowed = f"a whole number >= {least}" if most is None else f"from {least} to {most}"
        raise BadInput(f"data.{key}: {show(value)}: must be {allowed}")


def take_subset(train: Pair, test: Pair, subset: Optional[int], test_subset: Optional[int]) -> Tuple[Pair, Pair]:
    """Return the first `subset` training and `test_subset` test samples (None: all). Raise `BadInput` for bad counts."""
    require_whole("subset", subset, 1, len(train[0]), optional=True)
    require_whole("test_subset", test_subset, 1, len(test[0]), optional=True)
    return (train[0][:subset], train[1][:subset]), (test[0][:test_subset], test[1][:test_subset])


class SyntheticData(SampledData):
    """Random inputs and labels of a given shape, to measure throughput, memory and traffic. They are drawn on access.

    Each sample is drawn by (seed, epoch, place), so that it is the same in microbatches of any size. If `bytes`, inputs are
    8-bit.
    """

    def __init__(
        self, shape: Sequence[int], classes: int, samples: int, test_samples: int, seed: int, bytes: bool = False
    ) -> None:
        self._shape, self._classes, self.train_samples, self.test_samples = list(shape), classes, samples, test_samples
        self._seed, self._type = seed, torch.uint8 if bytes else torch.float32
        self._tested = "test"

    def _move_to_test(self, other: Any, moved: torch.Tensor, left: torch.Tensor) -> None:
        # the validation set has its own samples, drawn like the test set's
        other._tested = "validation"

    def take_train(self, epoch: int, places: range) -> Pair:
        """Return the samples at these places of an epoch."""
        return self._draw(epoch, places)

    def take_test(self, places: range) -> Pair:
        """Return the samples at these places of the test set."""
        return self._draw(self._tested, places)

    def _draw(self, part: Any, places: range) -> Pair:
        generator = torch.Generator()
        x = torch.empty([len(places), *self._shape], dtype=self._type)
        y = torch.empty(len(places), dtype=torch.int64)
        for row, place in enumerate(places):
            generator.manual_seed(derive_seed(self._seed, part, place))
            if x.is_floating_point():
                x[row].normal_(generator=generator)
            else:
                x[row].random_(0, 256, generator=generator)
            y[row] = torch.randint(0, self._classes, (), generator=generator)
        return x, y


def split_off_test(x: torch.Tensor, y: torch.Tensor, test: int, seed: int = 0) -> List[Pair]:
    """Split one set into [training part, test part], `test` samples drawn once by `seed`."""
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    return [(x[order[test:]], y[order[test:]]), (x[order[:test]], y[order[:test]])]
