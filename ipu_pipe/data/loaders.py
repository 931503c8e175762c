"""Wrap a user's own loaders, with a length or without, as a source of batches."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any, Iterable, Iterator, Sequence

import torch
from torch.utils.data import Dataset, IterableDataset

from ipu_pipe.errors import BadInput
from ipu_pipe.model.batch import list_tensors
from ipu_pipe.model.randomness import RandomStates, derive_seed, restore_random_states
from ipu_pipe.text import describe_kind

_END = object()


class LoaderData:
    """A user's own loaders as a data source; see `from_loader`."""

    def __init__(
        self,
        train: Iterable[Any],
        test: Iterable[Any] | None,
        seed: int,
        labels: str | None = None,
        files: Sequence[str | Path] = (),
        validation: Iterable[Any] | None = None,
    ) -> None:
        for name, loader in (("train", train), ("test", test), ("validation", validation)):
            _require_batches(name, loader)
            if name != "train" and isinstance(loader, Iterator):
                kind = type(loader).__name__
                raise BadInput(
                    f"data: the {name} loader is a {kind}, which can be iterated over only once: "
                    f"must give its batches "
                    "at each evaluation"
                )
        if not (labels is None or isinstance(labels, str)):
            raise BadInput(
                f"data: labels: {describe_kind(labels)}: must be their name in batches that are "
                f"mappings"
            )
        self._train = train
        self._test = test
        self._seed = seed
        self.validation = (
            None if validation is None else LoaderData(validation, validation, seed, labels)
        )
        self.labels = labels
        self.data_files = list(files)
        self._epoch = -1
        self._next_index = 0
        # samples of the first batch of a pass
        self._first_count: int | None = None
        # the pass over the loader, and the batches taken from it
        self._pass_number = 0
        self._batches_of_pass = 0
        self._iterator: Iterator[Any] = iter(())
        # the random states of PyTorch, Python and numpy from which the loader draws, and those of
        # its own generators
        self._global_states = RandomStates.read()
        self._generators = _list_generators(train)
        # the user's seeds apply, so that the first pass equals a plain loop over the loader
        self._initial_generator_states = [generator.get_state() for generator in self._generators]
        self._generator_states = list(self._initial_generator_states)
        self._newest_batch: Any = None

    @property
    def dataset(self) -> Any:
        """The data set of the training loader, or the loader itself if it has no data set."""
        return getattr(self._train, "dataset", self._train)

    def _get_length(self) -> int | None:
        try:
            return len(self._train)  # type: ignore[arg-type]
        except TypeError:
            return None

    def train_batches_per_epoch(self, batch_size: int) -> int | None:
        """Return the loader's length, without an incomplete last batch where one can be recognized.

        Return None if the loader has no length.
        """
        count = self._get_length()
        batches = getattr(self._train, "batch_sampler", None)
        batches = self._train if batches is None else batches
        size = getattr(batches, "batch_size", None)
        samples = self.train_samples
        if (
            count is None
            or not isinstance(size, int)
            or samples is None
            or getattr(batches, "drop_last", False)
        ):
            return count
        return min(count, samples // size)

    @property
    def train_samples(self) -> int | None:
        """The samples that the loader draws in an epoch, None if that is not known."""
        batches = getattr(self._train, "batch_sampler", None)
        samples = getattr(self._train if batches is None else batches, "sampler", None)
        if not hasattr(samples, "__len__"):
            samples = getattr(self._train, "dataset", None)
        return len(samples) if hasattr(samples, "__len__") else None  # type: ignore[arg-type]

    def train_batch(self, epoch: int, index: int, batch_size: int) -> Any:
        """Return batch `index` of the loader's pass number `epoch`, passing over the batches before
        it.

        A loader without a length is started again at its end. Its last batch is left out if it is
        incomplete.
        """
        batch = self._read_batch(epoch, index, batch_size)
        count = _count_samples(batch)
        if index == 0:
            self._first_count = count
        if count is not None and count != batch_size:
            raise BadInput(self._describe_size(index, count, batch_size))
        return batch

    def _describe_size(self, index: int, count: int, batch_size: int) -> str:
        """Return the fault of batch `index`, whose `count` of samples is not that of a
        microbatch.
        """
        length = self._get_length()
        if index == 0 or self._first_count != batch_size:
            return (
                f"data: the loader gives batches of {count}, micro_batch_size is {batch_size}: "
                f"they must agree"
            )
        place = f"{index + 1}" if length is None else f"{index + 1} of {length}"
        sizes = f"data: the loader's batch {place} has {count} samples, its first {batch_size}"
        if length is not None and index == length - 1 and count < batch_size:
            return (
                f"{sizes}: the last one is incomplete: make the loader with drop_last=True, or "
                f"leave that batch out"
            )
        return (
            f"{sizes}: all must have as many, since each is a microbatch: see its batch_size or "
            f"batch sampler"
        )

    def read_batch_size(self) -> int | None:
        """Return the samples of the first batch, None if it has no tensor."""
        self._first_count = _count_samples(self._read_batch(0, 0, 1))
        return self._first_count

    def _read_batch(self, epoch: int, index: int, batch_size: int) -> Any:
        """Read on to batch `index` of pass `epoch`, from the pass's beginning if that batch has
        been passed; return it.
        """
        if epoch != self._epoch or index < self._next_index - 1:
            self._epoch = epoch
            self._next_index = 0
            self._begin_pass(epoch)
        while self._next_index <= index:
            self._newest_batch = self._take_next_batch(batch_size)
            self._next_index += 1
        return self._newest_batch

    def _begin_pass(self, number: int) -> None:
        """Begin a pass of the loader.

        All that it draws is a function of the seeds and the pass, so that a resumed run and every
        rank draw the same.
        """
        seed = derive_seed(self._seed, "loader", number)
        self._pass_number = number
        self._batches_of_pass = 0
        self._global_states = RandomStates.from_seed(seed)
        self._generator_states = list(self._initial_generator_states)
        if number:
            seeds = [
                derive_seed(seed, state.numpy().tobytes().hex())
                for state in self._initial_generator_states
            ]
            self._generator_states = [
                torch.Generator().manual_seed(seed).get_state() for seed in seeds
            ]
        with self._use_loader_states():
            self._iterator = iter(self._train)

    @contextlib.contextmanager
    def _use_loader_states(self) -> Iterator[None]:
        """Use the loader's own random states inside the context; restore the caller's afterwards."""
        callers = [generator.get_state() for generator in self._generators]
        with restore_random_states():
            self._global_states.write()
            for generator, state in zip(self._generators, self._generator_states):
                generator.set_state(state)
            try:
                yield
            finally:
                self._global_states = RandomStates.read()
                self._generator_states = [generator.get_state() for generator in self._generators]
                for generator, state in zip(self._generators, callers):
                    generator.set_state(state)

    def _take_next_batch(self, batch_size: int) -> Any:
        """Return the next batch: of the next pass, if this one ends and the loader has no
        length.
        """
        with self._use_loader_states():
            batch = next(self._iterator, _END)
            if (
                self._get_length() is None
                and batch is not _END
                and (_count_samples(batch) or batch_size) < batch_size
            ):
                after = next(self._iterator, _END)
                # an incomplete batch in the middle is a fault; at the end it is dropped
                batch = _END if after is _END else batch
        if batch is not _END:
            self._batches_of_pass += 1
            return batch
        if self._get_length() is not None:
            raise BadInput(
                f"data: the training loader ended after {self._next_index} batches, its length "
                f"says more"
            )
        if not self._batches_of_pass:
            again = (
                f"ended after {self._next_index} batches (can it be iterated over twice?), started "
                f"again it "
                if self._pass_number
                else ""
            )
            raise BadInput(
                f"data: the training loader {again}gives no batch of {batch_size} samples"
            )
        self._begin_pass(self._pass_number + 1)
        return self._take_next_batch(batch_size)

    def test_batches(self, batch_size: int) -> Iterator[Any]:
        """Yield the test loader's batches as they come."""
        yield from self._test if self._test is not None else ()


def _list_generators(loader: Any) -> list[torch.Generator]:
    """Collect the torch generators that a loader and its samplers hold, each once."""
    batches = getattr(loader, "batch_sampler", None)
    objects = (loader, getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None))
    candidates = (getattr(item, "generator", None) for item in objects)
    generators = {
        id(g): g
        for g in candidates
        if isinstance(g, torch.Generator) and g is not torch.default_generator
    }
    return list(generators.values())


def _require_batches(name: str, loader: Any) -> None:
    """Raise `BadInput` for loaders that yield no batches. The test loader is optional."""
    if loader is None and name != "train":
        return
    if isinstance(loader, Dataset) and not isinstance(loader, IterableDataset):
        raise BadInput(
            f"data: {name}: {describe_kind(loader)}: gives samples, not batches: must be a "
            f"DataLoader of it (if it gives batches,"
            " with batch_size=None)"
        )
    iterable = hasattr(loader, "__iter__") or hasattr(loader, "__getitem__")
    if not iterable or isinstance(loader, (str, type, torch.Tensor)):
        raise BadInput(
            f"data: {name}: {describe_kind(loader)}: must be a DataLoader, or another iterable of "
            f"batches"
        )


def _count_samples(batch: Any) -> int | None:
    """Return the number of samples of a batch by its first tensor, or None if it has no tensor
    (reported later).
    """
    batch_tensors = list_tensors(batch)
    return len(batch_tensors[0]) if batch_tensors and batch_tensors[0].dim() else None


def from_loader(
    train: Iterable[Any],
    test: Iterable[Any] | None = None,
    seed: int = 0,
    labels: str | None = None,
    files: Sequence[str | Path] = (),
    validation: Iterable[Any] | None = None,
) -> LoaderData:
    """Make a DataSource from loaders of batches, such as torch.utils.data.DataLoader; their batches
    are the microbatches.

    `labels` is the name of the labels in batches that are mappings, where it is not one of the
    usual; `files` are those that the
    loaders read: the run's record keeps their hashes, and a resume with other files is refused.
    With a `validation` loader a run is evaluated on its batches, and on the test loader's at the
    beginning and the end.

    A loader that shuffles is made to shuffle by (seed, epoch), so that a resumed run finds the same
    order: for each pass the global generators of PyTorch, Python and numpy are seeded by (seed,
    pass) while the loader draws. A `torch.Generator` of the loader or its samplers gives the first
    pass as the user seeded it, and each later pass by its seed and the pass. Generators that the
    data set holds itself (`numpy.random.default_rng()`) are not seeded: give them seeds. A loader
    without a length (of an IterableDataset) needs a config with `steps`; where it ends, it is
    started again.
    """
    return LoaderData(train, test, seed, labels, files, validation)
