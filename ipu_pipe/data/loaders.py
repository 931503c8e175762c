"""Wrap a user's own loaders, with a length or without, as a source of batches."""

from __future__ import annotations

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
        # the pass that is read, the index of its next batch, and the newest batch
        self._epoch = -1
        self._next_index = 0
        self._newest_batch: Any = None
        self._batches: Iterator[Any] = iter(())
        self._batch_size = 1
        # samples of the first batch of a pass
        self._first_count: int | None = None
        self._generators = _list_generators(train)
        # the user's seeds apply, so that the first pass equals a plain loop over the loader
        self._initial_states = [generator.get_state() for generator in self._generators]

    @property
    def dataset(self) -> Any:
        """The data set of the training loader, or the loader itself if it has no data set."""
        return getattr(self._train, "dataset", self._train)

    def _get_length(self) -> int | None:
        # a DataLoader of an IterableDataset has a length that raises
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
        # the sampler of batches, where there is one, knows their size
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
        if index == 0 or self._first_count != batch_size:
            return (
                f"data: the loader gives batches of {count}, micro_batch_size is {batch_size}: "
                f"they must agree"
            )
        length = self._get_length()
        is_last = length is not None and index == length - 1 and count < batch_size
        remedy = (
            "the last one is incomplete: make the loader with drop_last=True, or leave that batch out"
            if is_last
            else "all must have as many, since each is a microbatch: see its batch_size or batch sampler"
        )
        place = f"{index + 1}" if length is None else f"{index + 1} of {length}"
        return f"data: the loader's batch {place} has {count} samples, its first {batch_size}: {remedy}"

    def read_batch_size(self) -> int | None:
        """Return the samples of the first batch, None if it has no tensor."""
        # 1: no batch counts as incomplete while the size is not known
        self._first_count = _count_samples(self._read_batch(0, 0, 1))
        return self._first_count

    def _read_batch(self, epoch: int, index: int, batch_size: int) -> Any:
        """Read on to batch `index` of pass `epoch`, from the pass's beginning if that batch has
        been passed; return it.
        """
        # it may not be known at the first batch
        self._batch_size = batch_size
        # the newest batch is still here, and may be asked for again
        if epoch != self._epoch or index < self._next_index - 1:
            self._epoch = epoch
            self._next_index = 0
            self._batches = self._read_passes(epoch)
        while self._next_index <= index:
            try:
                self._newest_batch = next(self._batches)
            except Exception:
                # the pass cannot go on: another call begins it again
                self._epoch = -1
                raise
            self._next_index += 1
        return self._newest_batch

    def _read_passes(self, number: int) -> Iterator[Any]:
        """Yield the batches of pass `number`, and of those after it if the loader has no length."""
        has_length = self._get_length() is not None
        count = 0
        while True:
            count_before = count
            incomplete: Any = None
            for batch in self._read_pass(number):
                # in the middle it is a fault; at the end of a loader without a length it is dropped
                if incomplete is not None:
                    yield incomplete
                    incomplete = None
                if not has_length and self._is_incomplete(batch):
                    incomplete = batch
                else:
                    count += 1
                    yield batch
            if has_length:
                raise BadInput(
                    f"data: the training loader ended after {count} batches, its length says more"
                )
            if count == count_before:
                again = (
                    f"ended after {count} batches (can it be iterated over twice?), started again "
                    "it "
                )
                raise BadInput(
                    f"data: the training loader {again if count else ''}gives no batch of "
                    f"{self._batch_size} samples"
                )
            number += 1

    def _is_incomplete(self, batch: Any) -> bool:
        count = _count_samples(batch)
        return count is not None and count < self._batch_size

    def _read_pass(self, number: int) -> Iterator[Any]:
        """Yield the batches of a pass of the loader.

        All that it draws is a function of the seeds and the pass, so that a resumed run and every
        rank draw the same. The caller's random states are restored after each batch.
        """
        seed = derive_seed(self._seed, "loader", number)
        states = RandomStates.from_seed(seed)
        loader_states = self._initial_states
        if number:
            # the state stands for the seed that the user gave it
            seeds = [
                derive_seed(seed, state.numpy().tobytes().hex()) for state in self._initial_states
            ]
            loader_states = [torch.Generator().manual_seed(one).get_state() for one in seeds]
        iterator: Iterator[Any] | None = None
        # workers that persist would draw on from the previous pass: a DataLoader keeps them here
        if getattr(self._train, "persistent_workers", False):
            vars(self._train)["_iterator"] = None
        while True:
            callers = [generator.get_state() for generator in self._generators]
            with restore_random_states():
                states.write()
                _set_states(self._generators, loader_states)
                try:
                    # a DataLoader draws its order and its workers' seed in `iter`, which therefore
                    # is in here
                    iterator = iter(self._train) if iterator is None else iterator
                    batch = next(iterator, _END)
                finally:
                    states = RandomStates.read()
                    loader_states = [generator.get_state() for generator in self._generators]
                    _set_states(self._generators, callers)
            # a batch may be None, so that None cannot say the end
            if batch is _END:
                return
            yield batch

    def test_batches(self, batch_size: int) -> Iterator[Any]:
        """Yield the test loader's batches as they come."""
        yield from self._test if self._test is not None else ()


def _set_states(generators: Sequence[torch.Generator], states: Sequence[torch.Tensor]) -> None:
    for generator, state in zip(generators, states):
        generator.set_state(state)


def _list_generators(loader: Any) -> list[torch.Generator]:
    """Collect the torch generators that a loader and its samplers hold, each once."""
    batches = getattr(loader, "batch_sampler", None)
    objects = (loader, getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None))
    candidates = (getattr(item, "generator", None) for item in objects)
    generators = {
        id(g): g
        for g in candidates
        # the default one is among the random states
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
    # these can be iterated over, but what they give is no batch
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
    data set holds itself (`numpy.random.default_rng()`) are not seeded: give them seeds. Workers
    begin anew with each pass, also with `persistent_workers`: a resumed run draws the same. A loader
    without a length (of an IterableDataset) needs a config with `steps`; where it ends, it is
    started again.
    """
    return LoaderData(train, test, seed, labels, files, validation)
