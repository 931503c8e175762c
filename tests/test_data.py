"""Check ipu_pipe.data: official layouts and their refusals, order, augmentation, users' loaders, folders of images."""

from __future__ import annotations

import itertools
import os
import pickle
import random
from pathlib import Path
from typing import Any, Dict, Iterator, List, Tuple
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch.utils import data as torch_data
from torch.utils.data import DataLoader, IterableDataset

from ipu_pipe.data import DataSource, TensorData, from_loader, load_data, sets
from ipu_pipe.data.sources import BORDER, crop_and_mirror
from models.resnet import FromBytes
from tests.support.data import (
    assert_samples_follow_seed_and_epoch,
    epoch_of,
    one_line,
    write_pictures,
)
from tests.support.runs import list_faults
from tests.test_fetch import make_idx_files, pin_files, write_files

CIFAR_ROWS, CIFAR_TEST_ROWS = 3, 4  # in each training file, in the test file
CIFAR_MEAN, CIFAR_STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


@pytest.fixture
def cifar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a small cifar10 in its official layout, and return the root."""
    folder, draw, contents = tmp_path / "cifar-10-batches-bin", np.random.RandomState(0), {}
    for file in sets.FILES["cifar10"]:
        count = CIFAR_TEST_ROWS if file.startswith("test") else CIFAR_ROWS
        rows = draw.randint(0, 256, (count, 3073)).astype(np.uint8)
        rows[:, 0] %= 10
        contents[file] = rows.tobytes()
    write_files(folder, contents)
    pin_files(monkeypatch, "cifar10", contents)
    return tmp_path


def read_cifar_rows(root: Path, file: str) -> Any:
    """Read the rows of a file of cifar10: a label and 3,072 pixels each."""
    return np.fromfile(root / "cifar-10-batches-bin" / file, np.uint8).reshape(-1, 3073)


def assert_images_are(
    images: torch.Tensor, labels: torch.Tensor, expected: Dict[bytes, int], mean: Any, std: Any
) -> None:
    """Assert that normalized images are those of the files, each once, with its label."""
    left = dict(expected)
    for image, label in zip(images.numpy(), labels.tolist()):
        assert left.pop(np.rint((image * std + mean) * 255).astype(np.uint8).tobytes()) == label
    assert not left


# ---- official layouts


def test_cifar10_is_read_from_its_layout(cifar: Path) -> None:
    data = load_data("cifar10", cifar, augment=False)
    rows = np.concatenate([read_cifar_rows(cifar, f"data_batch_{n}.bin") for n in range(1, 6)])
    assert data.train_batches_per_epoch(4) == 3
    x, y = epoch_of(data, 0, 15)
    assert x.shape == (15, 3, 32, 32) and x.dtype == torch.float32 and y.dtype == torch.int64
    mean, std = (np.array(value).reshape(3, 1, 1) for value in (CIFAR_MEAN, CIFAR_STD))
    # red, green and blue planes in the order of the file
    assert_images_are(x, y, {bytes(row[1:]): int(row[0]) for row in rows}, mean, std)
    ((test_x, test_y),) = data.test_batches(100)
    rows = read_cifar_rows(cifar, "test_batch.bin")
    assert test_y.tolist() == rows[:, 0].tolist()
    expected_images = (rows[:, 1:].reshape(-1, 3, 32, 32) / 255.0 - mean) / std
    np.testing.assert_allclose(test_x.numpy(), expected_images, rtol=0, atol=1e-5)
    shifted = epoch_of(load_data("cifar10", cifar), 0, 15)  # augmented by default
    assert torch.equal(y, shifted[1]) and not torch.equal(x, shifted[0])
    # subsets are the first samples
    some = load_data("cifar10", cifar, augment=False, subset=2, test_subset=3)
    first = read_cifar_rows(cifar, "data_batch_1.bin")[:2, 0]
    assert sorted(epoch_of(some, 0, 1)[1].tolist()) == sorted(first.tolist())
    assert torch.equal(next(iter(some.test_batches(100)))[0], test_x[:3])


@pytest.mark.parametrize(
    "name, folder, mean, std",
    [("mnist", "mnist", 0.1307, 0.3081), ("fashion_mnist", "fashion-mnist", 0.2860, 0.3530)],
)
def test_idx_files_are_read_from_their_layout(
    name: str, folder: str, mean: float, std: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    contents = make_idx_files()
    write_files(tmp_path / folder, contents)
    pin_files(monkeypatch, name, contents)
    data = load_data(name, tmp_path)
    for part, (x, y) in {"train": epoch_of(data, 3, 6), "t10k": next(data.test_batches(9))}.items():
        images = contents[f"{part}-images-idx3-ubyte"][16:]
        expected = {images[784 * i : 784 * (i + 1)]: i for i in range(len(images) // 784)}
        assert x.shape[1:] == (1, 28, 28)
        assert_images_are(x[:, 0], y, expected, mean, std)


def _cut_file(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _alter_file(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def test_each_damaged_file_has_its_line_with_the_remedy(cifar: Path) -> None:
    damages = {
        "data_batch_1": (_cut_file, "bytes, must be"),
        "data_batch_3": (_alter_file, "MD5"),
        "test_batch": (os.remove, "missing"),
    }
    paths = [cifar / "cifar-10-batches-bin" / f"{name}.bin" for name in damages]
    for path, (damage, _) in zip(paths, damages.values()):
        damage(path)
    faults = sorted(list_faults(load_data, "cifar10", cifar))
    remedy = f"delete the folder and run: python tools/fetch_data.py cifar10 --root {cifar}"
    for fault, path, (_, words) in itertools.zip_longest(faults, paths, damages.values()):
        one_line([fault], str(path), words, remedy)


def test_a_set_without_a_root_is_in_the_folder_of_the_variable_or_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("IPU_PIPE_DATA", raising=False)
    for name, folder in sets.FOLDERS.items():
        faults = list_faults(load_data, name)
        remedy = f"python tools/fetch_data.py {name}"
        one_line(faults, str(tmp_path / ".cache" / "ipu_pipe" / folder), "does not exist", remedy)
    monkeypatch.setenv("IPU_PIPE_DATA", str(tmp_path / "variable"))
    for name, folder in (("mnist", "mnist"), ("image_folder", "train")):
        one_line(list_faults(load_data, name), str(tmp_path / "variable" / folder))


# ---- order and augmentation


def make_tensor_data(seed: int = 0, **keys: Any) -> TensorData:
    """Make 24 images of bytes whose labels are their numbers."""
    x = torch.randint(0, 256, (24, 3, 8, 8), generator=torch.Generator().manual_seed(0))
    return TensorData((x.byte(), torch.arange(24)), (x.byte(), torch.arange(24)), seed, **keys)


def make_image_folder(root: Path, seed: int, **keys: Any) -> DataSource:
    if not root.exists():
        write_pictures(root, 3, train=4, val=2)
    return load_data("image_folder", root, seed=seed, size=8, **keys)


@pytest.mark.parametrize("kind", ["tensors", "augmented", "images", "synthetic", "loader"])
def test_samples_depend_on_seed_and_epoch_alone(kind: str, tmp_path: Path) -> None:
    threads = itertools.count(1)
    makers: Dict[str, Any] = {
        "tensors": make_tensor_data,
        "augmented": lambda seed: make_tensor_data(seed, augment=True),
        "images": lambda seed: make_image_folder(tmp_path / "x", seed, threads=next(threads)),
        "synthetic": lambda seed: load_data("synthetic", shape=[2, 3], subset=24, seed=seed),
        "loader": lambda seed: from_loader(make_loader(24, shuffle=True), seed=seed),
    }
    sizes = {"loader": [4], "images": [12, 1, 4]}.get(kind, [24, 8, 1, 12])
    assert_samples_follow_seed_and_epoch(makers[kind], sizes)


@pytest.mark.parametrize("kind", ["tensors", "images"])
def test_augmentation_differs_by_epoch_and_seed(kind: str, tmp_path: Path) -> None:
    """With one sample, so that the order makes no difference."""

    def read_sample(seed: int, epoch: int) -> bytes:
        if kind == "images":
            data = make_image_folder(tmp_path / "x", seed, subset=1)
        else:
            pair = [part[:1] for part in make_tensor_data().train]
            data = TensorData(pair, pair, seed, augment=True)
        return data.train_batch(epoch, 0, 1)[0].numpy().tobytes()

    for places in (range(5), range(0, 50, 10)):
        assert len({read_sample(*divmod(place, 10)) for place in places}) > 1


def test_crop_and_mirror_equals_a_plain_loop() -> None:
    generator, height, width = torch.Generator().manual_seed(0), 5, 9
    x = torch.randint(1, 256, (12, 3, height, width), generator=generator).byte()
    shifts = torch.randint(0, 2 * BORDER + 1, (12, 2), generator=generator)
    shifts[:3] = torch.tensor([[0, 0], [BORDER, BORDER], [2 * BORDER, 2 * BORDER]])
    mirrored = torch.arange(12) % 2 == 1
    expected = torch.zeros_like(x)
    for n, row, column in itertools.product(range(12), range(height), range(width)):
        r, c = row + int(shifts[n, 0]) - BORDER, column + int(shifts[n, 1]) - BORDER
        if 0 <= r < height and 0 <= c < width:
            expected[n, :, row, width - 1 - column if mirrored[n] else column] = x[n, :, r, c]
    images = crop_and_mirror(x, shifts, mirrored)
    assert images.dtype == x.dtype and images.is_contiguous() and torch.equal(images, expected)


def test_the_border_is_black_and_test_batches_are_copies_without_augmentation() -> None:
    """Story: a model whose first operation is in place changed the test set."""
    x, y = torch.full((64, 1, 6, 6), 255, dtype=torch.uint8), torch.zeros(64).long()
    data = TensorData((x, y), (x, y), 0, True, mean=[0.5], std=[0.25])
    # zero before normalization: not the mean
    assert epoch_of(data, 0, 64)[0].unique().tolist() == [-2.0, 2.0]
    assert next(iter(data.test_batches(64)))[0].unique().tolist() == [2.0]
    plain = TensorData((y, y.float()), (y, y.float()))
    for batch, labels in plain.test_batches(40):
        assert batch.dtype == torch.int64  # numbers are passed unchanged
        batch.add_(1)
        labels.add_(1)
    assert not any(part.any() for part in plain.test)


# ---- options and refusals

REFUSED: List[Tuple[str, Dict[str, Any], List[str]]] = [
    ("cifar10", {"subset": True}, ["data.subset: True: must be from 1 to 15"]),
    ("cifar10", {"test_subset": 5}, ["data.test_subset: 5: must be from 1 to 4"]),
    ("cifar", {}, ["data.name: cifar:", "nearest is cifar10", *sets.SETS]),
    ("digits", {"agument": True}, ["data.agument: True: unknown key for digits", "nearest is augment"]),
    ("digits", {"augment": "yes"}, ["data.augment: yes: must be true or false"]),
    ("synthetic", {"shape": [3, 0]}, ["data.shape", "whole numbers >= 1"]),
    ("synthetic", {"classes": 0}, ["data.classes", "whole numbers >= 1"]),
    ("synthetic", {"subset": None}, ["data.subset: None: must be a whole number >= 1"]),
    ("image_folder", {"subset": 13}, ["data.subset: 13", "from 1 to 12"]),
    ("image_folder", {"test_subset": 7}, ["data.test_subset: 7", "from 1 to 6"]),
    ("image_folder", {"size": 0}, ["data.size: 0", "whole number >= 1"]),
    ("image_folder", {"bytes": 1}, ["data.bytes: 1", "must be true or false"]),
]  # fmt: skip


@pytest.mark.parametrize("name, options, words", REFUSED)
def test_options_that_a_set_does_not_have_are_refused(
    name: str, options: Dict[str, Any], words: List[str], cifar: Path, image_root: Path
) -> None:
    roots = {"cifar10": [cifar], "image_folder": [image_root]}
    one_line(list_faults(load_data, name, *roots.get(name, []), **options), *words)


# ---- digits and synthetic


def test_digits_are_normalized_and_split() -> None:
    pytest.importorskip("sklearn")
    data, other = load_data("digits"), load_data("digits", seed=9)
    (x, y), ((test_x, test_y),) = epoch_of(data, 0, 1437), data.test_batches(1000)
    assert x.shape == (1437, 1, 8, 8) and test_x.shape == (360, 1, 8, 8)
    values = (torch.cat([x, test_x]) * 0.3760 + 0.3053) * 16
    assert torch.allclose(values, values.round().clamp(0, 16), atol=1e-4)
    assert y.unique().tolist() == test_y.unique().tolist() == list(range(10))
    # the split does not depend on the seed; no sample is in both parts
    assert torch.equal(next(iter(other.test_batches(360)))[1], test_y)
    assert len(values.round().flatten(1).unique(dim=0)) == 1797


def test_synthetic_samples_have_their_shape_and_classes() -> None:
    data = load_data("synthetic", shape=[2, 5], classes=3, subset=10, test_subset=7)
    x, y = epoch_of(data, 1, 10)
    assert x.shape == (10, 2, 5) and {*y.tolist()} == {0, 1, 2}
    for a, b in zip(next(iter(data.test_batches(7))), zip(*data.test_batches(4))):
        assert torch.equal(a, torch.cat(b))


# ---- users' loaders


def make_loader(count: int = 23, **options: Any) -> DataLoader[Any]:
    """Make a loader of numbered samples, in batches of 4 by default."""
    numbers = torch.arange(count)
    batches = {} if "batch_sampler" in options else {"batch_size": 4}
    return DataLoader(
        torch_data.TensorDataset(numbers.float().view(-1, 1), numbers), **{**batches, **options}
    )


def test_loader_respects_the_seed_of_its_own_generator_and_leaves_it_as_it_was() -> None:
    """Story: the generator was reseeded, so that seeds 42 and 7 gave the same run."""

    def read_order(user_seed: int, epoch: int) -> List[int]:
        torch.rand(3)
        generator = torch.Generator().manual_seed(user_seed)
        state = generator.get_state()
        loader = make_loader(24, shuffle=True, generator=generator)
        order = epoch_of(from_loader(loader), epoch, 4)[1].tolist()
        assert torch.equal(generator.get_state(), state)
        return order

    plain = make_loader(24, shuffle=True, generator=torch.Generator().manual_seed(42))
    assert read_order(42, 0) == torch.cat([y for _, y in plain]).tolist()
    orders = [read_order(*pair) for pair in ((42, 0), (7, 0), (42, 1), (7, 1), (42, 2))]
    assert read_order(42, 1) == orders[2] and len({*map(tuple, orders)}) == 5


class RandomPairs(torch_data.Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([random.random(), np.random.rand()]), index


def test_loader_draws_alike_from_pythons_and_numpys_generators() -> None:
    def read_batch(epoch: int, index: int) -> List[float]:
        random.random(), np.random.rand(2)
        states = random.getstate(), np.random.get_state()[1].tolist()
        x, _ = from_loader(DataLoader(RandomPairs(), batch_size=4)).train_batch(epoch, index, 4)
        assert states == (random.getstate(), np.random.get_state()[1].tolist())
        return [float(value) for value in x.flatten()]

    assert read_batch(0, 1) == read_batch(0, 1) != read_batch(0, 0)
    assert read_batch(1, 1) != read_batch(0, 1)


def make_sampled_loader(batched: Any) -> DataSource:
    """Make a shuffled loader, or one of a sampler that has a generator of its own."""
    generator = torch.Generator().manual_seed(1)
    sampler = torch_data.RandomSampler(range(24), generator=generator)  # type: ignore[arg-type]
    batches = torch_data.BatchSampler(sampler, 4, False)
    own: Any = {"batch_sampler": batches} if batched else {"sampler": sampler}
    return from_loader(make_loader(24, **({"shuffle": True} if batched is None else own)))


@pytest.mark.parametrize("batched", [None, False, True])
def test_loader_resumes_and_repeats_by_index(batched: Any) -> None:
    """Story: a sampler's own generator was not reset, so that a resumed run saw another order."""
    whole, resumed = make_sampled_loader(batched), make_sampled_loader(batched)
    first, second = (epoch_of(whole, epoch, 4)[1] for epoch in (0, 1))
    assert not torch.equal(first, second)
    for index in (3, 3, 4, 1, 2, 0):  # ahead, the same again, on, and back
        assert torch.equal(resumed.train_batch(1, index, 4)[1], second[4 * index : 4 * index + 4])
    assert torch.equal(resumed.train_batch(0, 2, 4)[1], first[8:12])  # an earlier epoch again


class CountedStream(IterableDataset):  # type: ignore[type-arg]
    """A stream of eleven samples with a length."""

    def __iter__(self) -> Iterator[Any]:
        return iter([(torch.zeros(1), torch.tensor(n)) for n in range(11)])

    def __len__(self) -> int:
        return 11


class UncountedStream(IterableDataset):  # type: ignore[type-arg]
    """The same stream without a length."""

    def __iter__(self) -> Iterator[Any]:
        return iter(CountedStream())


@pytest.mark.parametrize("loader, batches", [
    (make_loader(23), 5), (make_loader(23, drop_last=True), 5),
    # any sequence of batches may be a loader
    ([(torch.zeros(4, 1), torch.zeros(4))] * 3, 3),
    # story: the batches of the whole set were counted, and the run failed where the sampler ended
    (make_loader(sampler=torch_data.SubsetRandomSampler(range(10))), 2),
    (make_loader(batch_sampler=torch_data.BatchSampler(range(10), 4, False)), 2),
    (DataLoader(CountedStream(), batch_size=4), 2),
])  # fmt: skip
def test_full_batches_are_counted(loader: Any, batches: int) -> None:
    data = from_loader(loader)
    assert data.train_batches_per_epoch(4) == batches
    assert len(epoch_of(data, 0, 4)[1]) == 4 * batches
    (fault,) = list_faults(data.train_batch, 0, batches, 4)
    assert " samples, its first 4" in fault or f"ended after {batches} batches" in fault
    (fault,) = list_faults(data.train_batch, 0, 0, 8)
    assert "batches of 4, micro_batch_size is 8" in fault


@pytest.mark.parametrize("sizes, words", [
    ([4, 4, 2], ["batch 3 of 3 has 2 samples", "drop_last=True"]),
    ([3, 4], ["batch 2 of 2 has 4 samples, its first 3"]),
])  # fmt: skip
def test_batches_of_several_sizes_are_reported_with_their_place(
    sizes: List[int], words: List[str]
) -> None:
    """Story: the fault of a loader's smaller last batch named micro_batch_size, which nobody had set."""
    data = from_loader([(torch.zeros(size, 1), torch.zeros(size)) for size in sizes])
    first = data.read_batch_size()
    (fault,) = list_faults(lambda: [data.train_batch(0, index, first) for index in range(3)])
    assert all(word in fault for word in words) and "micro_batch_size" not in fault
    assert ("drop_last" in fault) == (len(words) > 1)


def test_the_incomplete_batch_of_a_stream_is_dropped_where_its_size_was_read_first() -> None:
    data = from_loader(DataLoader(UncountedStream(), batch_size=4))
    assert data.train_batches_per_epoch(4) is None and data.read_batch_size() == 4
    numbers = [data.train_batch(0, index, 4)[1].tolist() for index in range(5)]
    assert numbers == [[0, 1, 2, 3], [4, 5, 6, 7]] * 2 + [[0, 1, 2, 3]]


# ---- folders of images


@pytest.fixture
def image_root(tmp_path: Path) -> Path:
    """Write three classes of pictures, whose green tells the class; return their folder."""
    write_pictures(tmp_path / "images", 3, train=4, val=2)
    for file in (tmp_path / "images").rglob("1.png"):
        file.rename(file.with_suffix(".JPEG"))
    (tmp_path / "images" / "train" / "0" / "notes.txt").write_text("no image")
    return tmp_path / "images"


def test_image_folder_shapes_and_classes(image_root: Path) -> None:
    data = load_data("image_folder", image_root, size=16)
    assert data.classes == 3 and data.train_batches_per_epoch(5) == 2  # type: ignore[attr-defined]
    x, y = epoch_of(data, 0, 12)
    assert x.shape == (12, 3, 16, 16) and x.dtype == torch.float32 and y.dtype == torch.int64
    assert sorted(y.tolist()) == [0] * 4 + [1] * 4 + [2] * 4
    batches = list(data.test_batches(4))
    assert [labels.tolist() for _, labels in batches] == [[0, 0, 1, 1], [2, 2]]
    for images, labels in [(x, y), *batches]:
        green = (images[:, 1] * 0.224 + 0.456) * 255
        torch.testing.assert_close(green, (60.0 * labels).view(-1, 1, 1).expand_as(green))
    # some of all classes, whatever seed
    labels, other = (
        load_data("image_folder", image_root, seed=seed, subset=6).train_batch(0, 0, 6)[1].tolist()
        for seed in (0, 5)
    )
    assert len(set(labels)) > 1 and sorted(labels) == sorted(other)
    # graphcore's name of the test images
    (image_root / "val").rename(image_root / "validation")
    after = load_data("image_folder", image_root, size=16).test_batches(4)
    assert torch.equal(next(iter(after))[0], batches[0][0])


def test_image_folder_can_be_pickled_for_another_process(image_root: Path) -> None:
    """Story: PopTorch's asynchronous loader could not pickle its threads and Pillow's module, so that no job started."""
    data = load_data("image_folder", image_root, size=16)
    before = data.train_batch(0, 1, 3)
    after = pickle.loads(pickle.dumps(data)).train_batch(0, 1, 3)
    assert all(map(torch.equal, before, after))


def test_bytes_are_normalized_where_the_model_is(image_root: Path) -> None:
    here, there = (
        load_data("image_folder", image_root, size=16, bytes=value) for value in (False, True)
    )
    pairs = [(here.train_batch(0, 0, 12), there.train_batch(0, 0, 12))]
    for (x, y), (raw, labels) in [*pairs, *zip(here.test_batches(4), there.test_batches(4))]:
        assert raw.dtype == torch.uint8 and raw.is_contiguous() and torch.equal(y, labels)
        torch.testing.assert_close(FromBytes()(raw), x)
    raw = load_data("synthetic", shape=[3, 4, 4], bytes=True).train_batch(0, 0, 64)[0]
    assert raw.dtype == torch.uint8 and (int(raw.min()), int(raw.max())) == (0, 255)


def test_image_folder_refusals(image_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("IPU_PIPE_DATA", raising=False)
    test, away = image_root / "val", image_root / "test"
    one_line(list_faults(load_data, "image_folder"), "data.root", "train/ and val/")
    faults = list_faults(load_data, "image_folder", away)
    one_line(faults, str(away / "train"), "one folder of images a class")
    (test / "yellow").mkdir()
    faults = list_faults(load_data, "image_folder", image_root)
    one_line(faults, str(test / "yellow"), "train/ does not have")
    test.rename(away)
    one_line(list_faults(load_data, "image_folder", image_root), str(test), "does not exist")
    (test / "0").mkdir(parents=True)
    faults = list_faults(load_data, "image_folder", image_root)
    one_line(faults, str(test), "contains no images", ".jpg")


def write_large_image(path: Path, width: int) -> None:
    pytest.importorskip("PIL.Image").new("1", (width, 9_000)).save(path)


BROKEN = {
    "text": (lambda path: path.write_text("no image at all"), "cannot be read as an image"),
    "cut": (lambda path: path.write_bytes(path.read_bytes()[:-60]), "cannot be read as an image"),
    "pipe": (lambda path: (path.unlink(), os.mkfifo(path)), "is not a file: must be an image"),
    # an image that unpacks to gigabytes is refused unread
    "large": (lambda path: write_large_image(path, 10_000), "10000 x 9000 pixels: must be"),
    "bomb": (lambda path: write_large_image(path, 20_000), "bomb"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_an_image_that_cannot_be_read_is_named(
    kind: str, image_root: Path, recwarn: pytest.WarningsRecorder
) -> None:
    damage, words = BROKEN[kind]
    paths = [image_root / part / "1" / "0.png" for part in ("train", "val")]
    for path in paths:
        damage(path)
    data = load_data("image_folder", image_root, size=8)
    one_line(list_faults(data.train_batch, 0, 0, 12), str(paths[0]), words)
    one_line(list_faults(lambda: list(data.test_batches(6))), str(paths[1]), words)
    assert not recwarn.list


def test_the_middle_of_an_image_equals_that_of_the_scaled_image(tmp_path: Path) -> None:
    """They differ by at most 1 of 255. Story: the whole image was scaled first, and one of 1 x 20000 pixels took 6 GB."""
    image = pytest.importorskip("PIL.Image")
    rng, path = np.random.default_rng(0), tmp_path / "val" / "0" / "0.png"
    write_pictures(tmp_path, 1, train=1, val=1)
    data: Any = load_data("image_folder", tmp_path, size=32)
    for width, height in ((300, 500), (37, 51), (10, 9)):
        image.fromarray(rng.integers(0, 256, (height, width, 3)).astype(np.uint8)).save(path)
        scale = 37 / min(width, height)  # 8/7 of 32
        scaled = (round(width * scale), round(height * scale))
        whole = image.open(path).resize(scaled, image.Resampling.BILINEAR)
        left, top = (whole.width - 32) // 2, (whole.height - 32) // 2
        expected = np.asarray(whole.crop((left, top, left + 32, top + 32))).astype(int)
        assert abs(data._load_middle((path, 0))[0].astype(int) - expected).max() <= 1
    image.new("L", (1, 20000), 200).save(path)
    with patch.object(image.Image, "resize", autospec=True, side_effect=image.Image.resize) as used:
        assert (data._load_middle((path, 0))[0] == 200).all()
    assert [call.args[1] for call in used.call_args_list] == [(32, 32)]
