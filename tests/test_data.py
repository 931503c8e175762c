"""Check ipu_pipe.data: official layouts and their refusals, order, augmentation, users' loaders, folders of images."""

from __future__ import annotations

import hashlib
import itertools
import os
import pickle
import random
from pathlib import Path
from typing import Any, Dict, Iterator, List, Tuple

import numpy as np
import pytest
import torch
from torch.utils import data as torch_data
from torch.utils.data import DataLoader, Dataset, IterableDataset

from ipu_pipe.data import DataSource, TensorData, from_loader, load_data, sets
from ipu_pipe.data.sources import BORDER, crop_and_mirror
from ipu_pipe.errors import BadInput
from models.resnet import FromBytes
from tests.support.data import epoch_of, one_line
from tests.support.runs import list_faults

Table = Dict[str, Tuple[str, int]]
CIFAR_ROWS, CIFAR_TEST_ROWS = 3, 4  # in each training file, in the test file
CIFAR_MEAN, CIFAR_STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


def expect_files(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the table of official files of the set `name` by the files in `folder`."""
    contents = {file: (folder / file).read_bytes() for file in sets.FILES[name]}
    table: Table = {
        file: (hashlib.md5(content).hexdigest(), len(content)) for file, content in contents.items()
    }
    monkeypatch.setitem(sets.FILES, name, table)


@pytest.fixture
def cifar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a small cifar10 in its official layout, and return the root."""
    folder, draw = tmp_path / "cifar-10-batches-bin", np.random.RandomState(0)
    folder.mkdir()
    for file in sets.FILES["cifar10"]:
        count = CIFAR_TEST_ROWS if file.startswith("test") else CIFAR_ROWS
        rows = draw.randint(0, 256, (count, 3073)).astype(np.uint8)
        rows[:, 0] %= 10
        rows.tofile(folder / file)
    expect_files("cifar10", folder, monkeypatch)
    return tmp_path


def read_cifar_rows(root: Path, file: str) -> Any:
    """Read the rows of a file of cifar10: a label and 3,072 pixels each."""
    return np.fromfile(root / "cifar-10-batches-bin" / file, np.uint8).reshape(-1, 3073)


def write_idx_files(folder: Path, train: int = 7, test: int = 5) -> Dict[str, np.ndarray]:
    """Write IDX files of 28x28 images into `folder`; return their arrays."""
    folder.mkdir()
    random, arrays = np.random.RandomState(1), {}
    for part, count in (("train", train), ("t10k", test)):
        images = random.randint(0, 256, (count, 28, 28)).astype(np.uint8)
        labels = random.randint(0, 10, count).astype(np.uint8)
        header = np.array([2051, count, 28, 28], dtype=">i4").tobytes()
        (folder / f"{part}-images-idx3-ubyte").write_bytes(header + images.tobytes())
        header = np.array([2049, count], dtype=">i4").tobytes()
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(header + labels.tobytes())
        arrays[f"{part} images"], arrays[f"{part} labels"] = images, labels
    return arrays


def make_numbered_data(
    count: int, test: int = 3, seed: int = 0, augment: bool = False
) -> TensorData:
    """Make samples whose values and labels are their numbers."""
    x, y = torch.arange(count).float().view(-1, 1, 1, 1).expand(count, 1, 4, 4), torch.arange(count)
    return TensorData((x, y), (x[:test], y[:test]), seed, augment)


# ---- official layouts


def test_cifar10_is_read_from_its_layout(cifar: Path) -> None:
    data = load_data("cifar10", cifar, augment=False)
    rows = np.concatenate([read_cifar_rows(cifar, f"data_batch_{n}.bin") for n in range(1, 6)])
    assert data.train_batches_per_epoch(5) == 3 and data.train_batches_per_epoch(4) == 3
    x, y = epoch_of(data, 0, 15)
    assert x.shape == (15, 3, 32, 32) and x.dtype == torch.float32 and y.dtype == torch.int64
    mean, std = np.array(CIFAR_MEAN).reshape(3, 1, 1), np.array(CIFAR_STD).reshape(3, 1, 1)
    expected = {bytes(row[1:]): int(row[0]) for row in rows}
    for image, label in zip(x.numpy(), y.tolist()):
        pixels = np.rint((image * std + mean) * 255).astype(np.uint8)
        assert (
            expected.pop(pixels.tobytes()) == label
        )  # red, green and blue planes in the order of the file
    assert not expected
    (test_x, test_y), *rest = data.test_batches(100)
    rows = read_cifar_rows(cifar, "test_batch.bin")
    assert not rest and test_y.tolist() == rows[:, 0].tolist()
    expected_images = (rows[:, 1:].reshape(-1, 3, 32, 32) / 255.0 - mean) / std
    np.testing.assert_allclose(test_x.numpy(), expected_images, rtol=0, atol=1e-5)
    shifted = epoch_of(load_data("cifar10", cifar), 0, 15)  # augmented by default
    assert torch.equal(y, shifted[1]) and not torch.equal(x, shifted[0])


@pytest.mark.parametrize(
    "name, folder, mean, std",
    [("mnist", "mnist", 0.1307, 0.3081), ("fashion_mnist", "fashion-mnist", 0.2860, 0.3530)],
)
def test_idx_files_are_read_from_their_layout(
    name: str, folder: str, mean: float, std: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays = write_idx_files(tmp_path / folder)
    expect_files(name, tmp_path / folder, monkeypatch)
    data = load_data(name, tmp_path)
    assert data.train_batches_per_epoch(2) == 3
    x, y = next(iter(data.test_batches(10)))
    assert x.shape == (5, 1, 28, 28) and y.tolist() == arrays["t10k labels"].tolist()
    np.testing.assert_allclose(
        x[:, 0].numpy(), (arrays["t10k images"] / 255.0 - mean) / std, rtol=0, atol=1e-5
    )
    x, y = epoch_of(data, 3, 7)
    labels = {
        image.tobytes(): int(label)
        for image, label in zip(arrays["train images"], arrays["train labels"])
    }
    for image, label in zip(x[:, 0].numpy(), y.tolist()):
        assert labels.pop(np.rint((image * std + mean) * 255).astype(np.uint8).tobytes()) == label
    assert not labels


def test_idx_labels_of_another_set_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "mnist"
    write_idx_files(folder)
    os.replace(folder / "t10k-labels-idx1-ubyte", folder / "train-labels-idx1-ubyte")
    (folder / "t10k-labels-idx1-ubyte").write_bytes(b"\0" * 8)
    expect_files("mnist", folder, monkeypatch)
    one_line(
        list_faults(load_data, "mnist", tmp_path),
        "train-images-idx3-ubyte",
        "train-labels-idx1-ubyte",
    )


def _cut_file(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _alter_file(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(bytes(content))


def test_each_damaged_file_has_its_line_with_the_remedy(cifar: Path) -> None:
    damages = {
        "data_batch_1": (_cut_file, "bytes, must be"),
        "data_batch_3": (_alter_file, "MD5"),
        "test_batch": (os.remove, "missing"),
    }
    paths = [cifar / "cifar-10-batches-bin" / f"{name}.bin" for name in damages]
    for path, (damage, _) in zip(paths, damages.values()):
        damage(path)
    faults = list_faults(load_data, "cifar10", cifar)
    for fault, path, (_, words) in itertools.zip_longest(sorted(faults), paths, damages.values()):
        one_line(
            [fault],
            str(path),
            words,
            "delete the folder",
            f"python tools/fetch_data.py cifar10 --root {cifar}",
        )


@pytest.mark.parametrize("name", list(sets.FILES))
def test_a_missing_folder_has_a_line_with_the_remedy(name: str, tmp_path: Path) -> None:
    faults = list_faults(load_data, name, tmp_path)
    one_line(
        faults,
        str(tmp_path / sets.FOLDERS[name]),
        "does not exist",
        f"python tools/fetch_data.py {name} --root",
    )


def test_the_default_root_is_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("IPU_PIPE_DATA", raising=False)
    faults = list_faults(load_data, "mnist")
    one_line(faults, str(tmp_path / ".cache" / "ipu_pipe" / "mnist"))
    assert faults[0].endswith("python tools/fetch_data.py mnist")


def test_the_variable_comes_after_the_root_and_before_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("IPU_PIPE_DATA", str(tmp_path / "variable"))
    for name, folder in (("mnist", "mnist"), ("image_folder", "train")):
        one_line(list_faults(load_data, name), str(tmp_path / "variable" / folder))
        one_line(list_faults(load_data, name, tmp_path / "root"), str(tmp_path / "root" / folder))


# ---- order and augmentation


def test_order_depends_on_seed_and_epoch_alone() -> None:
    orders = {
        (seed, epoch): epoch_of(make_numbered_data(50, seed=seed), epoch, 5)[1]
        for seed in (0, 1)
        for epoch in (0, 1, 2)
    }
    keys = list(orders)
    assert all(not torch.equal(orders[a], orders[b]) for i, a in enumerate(keys) for b in keys[:i])
    used = make_numbered_data(50, seed=1)
    for seed, epoch in [
        (1, 2),
        (1, 0),
        (1, 2),
        (1, 1),
    ]:  # whatever was drawn before, also from torch's global generator
        torch.rand(3)
        assert torch.equal(epoch_of(used, epoch, 5)[1], orders[seed, epoch])
    assert torch.equal(used.train_batch(2, 7, 5)[1], orders[1, 2][35:40])


def test_reading_leaves_the_global_random_state() -> None:
    state = torch.random.get_rng_state()
    epoch_of(make_numbered_data(20, augment=True), 0, 5)
    next(iter(load_data("synthetic").test_batches(4)))
    from_loader(make_loader(shuffle=True)).train_batch(0, 0, 4)
    assert torch.equal(state, torch.random.get_rng_state())


@pytest.mark.parametrize("augment", [False, True])
def test_batch_size_does_not_change_samples(augment: bool) -> None:
    torch.manual_seed(0)
    x, y = torch.randint(0, 256, (24, 3, 8, 8), dtype=torch.uint8), torch.arange(24)
    expected = epoch_of(TensorData((x, y), (x, y), 3, augment), 5, 24)
    for size in (1, 4, 8, 12):
        images, labels = epoch_of(TensorData((x, y), (x, y), 3, augment), 5, size)
        assert torch.equal(images, expected[0]) and torch.equal(labels, expected[1])


def test_an_epoch_has_every_sample_once() -> None:
    data = make_numbered_data(30)
    for epoch in range(3):
        x, y = epoch_of(data, epoch, 6)
        assert sorted(y.tolist()) == list(range(30)) and torch.equal(x[:, 0, 0, 0].long(), y)
    assert data.train_batches_per_epoch(7) == 4 and len(set(epoch_of(data, 0, 7)[1].tolist())) == 28


def test_augmentation_differs_by_epoch_and_seed() -> None:
    torch.manual_seed(0)
    x, y = torch.rand(16, 1, 8, 8), torch.arange(16)

    def read_by_label(seed: int, epoch: int) -> torch.Tensor:
        images, labels = epoch_of(TensorData((x, y), (x, y), seed, augment=True), epoch, 16)
        return images[labels.argsort()]

    assert torch.equal(read_by_label(0, 0), read_by_label(0, 0))
    assert not torch.equal(read_by_label(0, 0), read_by_label(0, 1)) and not torch.equal(
        read_by_label(0, 0), read_by_label(1, 0)
    )


@pytest.mark.parametrize("shape, dtype", [((3, 32, 32), torch.uint8), ((1, 5, 9), torch.float32)])
def test_crop_and_mirror_equals_a_plain_loop(
    shape: Tuple[int, int, int], dtype: torch.dtype
) -> None:
    generator, (_, height, width) = torch.Generator().manual_seed(0), shape
    x = torch.randint(1, 256, (12, *shape), generator=generator).to(dtype)
    shifts = torch.randint(0, 2 * BORDER + 1, (12, 2), generator=generator)
    shifts[:3] = torch.tensor([[0, 0], [BORDER, BORDER], [2 * BORDER, 2 * BORDER]])
    mirrored = torch.arange(12) % 2 == 1
    expected = torch.zeros_like(x)
    for n, row, column in itertools.product(range(12), range(height), range(width)):
        r, c = row + int(shifts[n, 0]) - BORDER, column + int(shifts[n, 1]) - BORDER
        if 0 <= r < height and 0 <= c < width:
            expected[n, :, row, width - 1 - column if mirrored[n] else column] = x[n, :, r, c]
    images = crop_and_mirror(x, shifts, mirrored)
    assert images.dtype == dtype and images.is_contiguous() and torch.equal(images, expected)
    assert torch.equal(images[1], x[1].flip(2))  # without a shift: the mirrored image


def test_train_batch_augments_as_drawn() -> None:
    """The border is zero before normalization: black, not the mean."""
    x, y = torch.full((64, 1, 6, 6), 255, dtype=torch.uint8), torch.zeros(64).long()
    data = TensorData((x, y), (x, y), 0, True, mean=[0.5], std=[0.25])
    assert epoch_of(data, 0, 64)[0].unique().tolist() == [-2.0, 2.0]
    assert next(iter(data.test_batches(64)))[0].unique().tolist() == [
        2.0
    ]  # tests are not augmented


def test_channels_are_normalized_separately() -> None:
    x = torch.tensor([0, 51, 255], dtype=torch.uint8).view(1, 3, 1, 1).expand(4, 3, 2, 2)
    y = torch.zeros(4).long()
    data = TensorData((x, y), (x, y), mean=(0.0, 0.1, 0.5), std=(1.0, 0.5, 0.25))
    for images in (data.train_batch(0, 0, 4)[0], next(data.test_batches(4))[0]):
        torch.testing.assert_close(images[0, :, 0, 0], torch.tensor([0.0, 0.2, 2.0]))
    plain = TensorData((x, y), (x, y)).train_batch(0, 0, 4)[0]
    torch.testing.assert_close(plain[0, :, 0, 0], torch.tensor([0.0, 0.2, 1.0]))
    assert x.unique().tolist() == [0, 51, 255]  # the samples are unchanged


def test_numbers_of_any_shape_are_passed_unchanged() -> None:
    tokens, y = torch.arange(12).view(6, 2), torch.arange(6)
    x, labels = TensorData((tokens, y), (tokens, y)).train_batch(0, 0, 6)
    assert x.dtype == torch.int64 and torch.equal(x, tokens[labels])


def test_test_batches_are_in_order_and_the_last_may_be_short() -> None:
    batches = list(make_numbered_data(12, test=10).test_batches(4))
    assert [y.tolist() for _, y in batches] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert all(torch.equal(x[:, 0, 0, 0].long(), y) for x, y in batches)


# ---- options


def test_subsets_are_the_first_samples(cifar: Path) -> None:
    whole = load_data("cifar10", cifar, augment=False)
    some = load_data("cifar10", cifar, augment=False, subset=2, test_subset=3)
    assert some.train_batches_per_epoch(1) == 2 and whole.train_batches_per_epoch(1) == 15
    first = read_cifar_rows(cifar, "data_batch_1.bin")[:2, 0]
    assert sorted(epoch_of(some, 0, 1)[1].tolist()) == sorted(first.tolist())
    x, y = next(iter(some.test_batches(100)))
    x_all, y_all = next(iter(whole.test_batches(100)))
    assert len(x) == 3 and torch.equal(x, x_all[:3]) and torch.equal(y, y_all[:3])
    assert load_data("cifar10", cifar, subset=15, test_subset=4).train_batches_per_epoch(15) == 1


@pytest.mark.parametrize("key, most", [("subset", 15), ("test_subset", 4)])
def test_subsets_are_refused(cifar: Path, key: str, most: int) -> None:
    for value in (0, -1, most + 1, 2.5, "3", True):
        one_line(
            list_faults(load_data, "cifar10", cifar, **{key: value}),
            f"data.{key}: {value}: must be from 1 to {most}",
        )


def test_unknown_set_names_the_nearest() -> None:
    one_line(list_faults(load_data, "cifar"), "data.name: cifar:", "nearest is cifar10", *sets.SETS)
    assert "nearest" not in list_faults(load_data, "qqqq")[0]


def test_unknown_options_name_the_nearest() -> None:
    first, second = list_faults(load_data, "digits", agument=True, zzz=1)
    assert first.startswith("data.agument: True: unknown key for digits") and first.endswith(
        "nearest is augment"
    )
    assert "root, augment, subset, test_subset" in second and "nearest" not in second
    faults = list_faults(load_data, "synthetic", augment=True)
    one_line(
        faults, "data.augment", "unknown key for synthetic", "shape, classes, subset, test_subset"
    )
    one_line(
        list_faults(load_data, "digits", augment="yes"), "data.augment: yes: must be true or false"
    )


# ---- digits and synthetic


def test_digits_are_normalized_and_split() -> None:
    pytest.importorskip("sklearn")
    data = load_data("digits")
    x, y = epoch_of(data, 0, 1437)
    (test_x, test_y), *rest = data.test_batches(1000)
    assert x.shape == (1437, 1, 8, 8) and test_x.shape == (360, 1, 8, 8) and not rest
    for part, labels in ((x, y), (test_x, test_y)):
        values = part * 0.3760 + 0.3053
        assert abs(float(values.min())) < 1e-5 and abs(float(values.max()) - 1) < 1e-5
        assert torch.allclose(values * 16, (values * 16).round(), atol=1e-4)
        assert labels.unique().tolist() == list(range(10))
    assert abs(float(x.mean())) < 0.01 and abs(float(x.std()) - 1) < 0.01
    # the split does not depend on the seed; no sample is in both parts
    other = load_data("digits", seed=9)
    assert torch.equal(next(iter(other.test_batches(360)))[1], test_y)
    everything = torch.cat([x, test_x]).flatten(1)
    assert len(everything.unique(dim=0)) == 1797
    assert not torch.equal(epoch_of(other, 0, 1437)[1], y)


def test_synthetic_is_repeated() -> None:
    data = load_data("synthetic", shape=[2, 5], classes=3, subset=10, test_subset=7, seed=4)
    again = load_data("synthetic", shape=(2, 5), classes=3, subset=10, test_subset=7, seed=4)
    assert data.train_batches_per_epoch(4) == 2
    x, y = data.train_batch(1, 1, 4)
    assert (
        x.shape == (4, 2, 5)
        and y.shape == (4,)
        and y.dtype == torch.int64
        and set(y.tolist()) <= {0, 1, 2}
    )
    assert all(torch.equal(a, b) for a, b in zip((x, y), again.train_batch(1, 1, 4)))
    assert not torch.equal(x, data.train_batch(1, 0, 4)[0]) and not torch.equal(
        x, data.train_batch(0, 1, 4)[0]
    )
    other = load_data("synthetic", shape=[2, 5], seed=5)
    assert not torch.equal(x, other.train_batch(1, 1, 4)[0])
    assert [x.shape for x, _ in data.test_batches(4)] == [(4, 2, 5), (3, 2, 5)]
    assert all(torch.equal(a[0], b[0]) for a, b in zip(data.test_batches(4), again.test_batches(4)))
    default = load_data("synthetic")
    assert (
        default.train_batch(0, 0, 2)[0].shape == (2, 3, 32, 32)
        and default.train_batches_per_epoch(1) == 1024
    )


def test_synthetic_samples_do_not_depend_on_the_batch_size() -> None:
    data = load_data("synthetic", shape=[2, 3], classes=5, subset=16, test_subset=6, seed=2)
    expected = epoch_of(data, 1, 16)
    for size in (1, 4, 8):
        assert all(torch.equal(a, b) for a, b in zip(epoch_of(data, 1, size), expected))
    whole = next(iter(data.test_batches(6)))
    for place in (0, 1):
        assert torch.equal(torch.cat([pair[place] for pair in data.test_batches(4)]), whole[place])


@pytest.mark.parametrize(
    "options", [{"shape": []}, {"shape": 3}, {"shape": [3, 0]}, {"shape": ["a"]}, {"classes": 0}]
)
def test_synthetic_shape_is_refused(options: Dict[str, Any]) -> None:
    one_line(
        list_faults(load_data, "synthetic", **options),
        "data.shape",
        "data.classes",
        "whole numbers >= 1",
    )


@pytest.mark.parametrize("key", ["subset", "test_subset"])
@pytest.mark.parametrize("value", [0, -3, 1.5, None])
def test_synthetic_subset_is_refused(key: str, value: Any) -> None:
    one_line(
        list_faults(load_data, "synthetic", **{key: value}),
        f"data.{key}: {value}: must be a whole number >= 1",
    )


# ---- users' loaders


def make_loader(count: int = 23, **options: Any) -> DataLoader[Any]:
    """Make a loader of numbered samples, in batches of 4 by default."""
    numbers = torch.arange(count)
    batches = {} if "batch_sampler" in options else {"batch_size": 4}
    return DataLoader(
        torch_data.TensorDataset(numbers.float().view(-1, 1), numbers), **{**batches, **options}
    )


def test_loader_shuffles_by_seed_and_epoch() -> None:
    """The order does not depend on the global random state."""

    def read_order(seed: int, epoch: int) -> List[int]:
        torch.rand(len(orders) + 1)
        orders.append(
            epoch_of(from_loader(make_loader(shuffle=True), seed=seed), epoch, 4)[1].tolist()
        )
        return orders[-1]

    orders: List[List[int]] = []
    first = read_order(0, 0)
    assert read_order(0, 0) == first and first != list(range(20)) and len(set(first)) == 20
    assert (
        read_order(0, 1) != first
        and read_order(1, 0) != first
        and read_order(0, 1) == read_order(0, 1)
    )


def test_loader_respects_the_seed_of_its_own_generator() -> None:
    """Story: the generator was reseeded, so that seeds 42 and 7 gave the same run."""

    def read_order(user_seed: int, epoch: int) -> List[int]:
        torch.rand(3)
        user_loader = make_loader(shuffle=True, generator=torch.Generator().manual_seed(user_seed))
        return epoch_of(from_loader(user_loader), epoch, 4)[1].tolist()

    plain = torch.cat(
        [y for _, y in make_loader(shuffle=True, generator=torch.Generator().manual_seed(42))]
    )[:20].tolist()
    assert read_order(42, 0) == plain and read_order(7, 0) != plain
    assert read_order(42, 1) == read_order(42, 1) and read_order(42, 1) not in (
        plain,
        read_order(7, 1),
        read_order(42, 2),
    )


def test_loader_leaves_its_own_generator_as_it_was() -> None:
    generator = torch.Generator().manual_seed(42)
    for _ in range(2):  # a second run over the same loader begins like the first
        epoch_of(from_loader(make_loader(shuffle=True, generator=generator)), 1, 4)
        assert torch.equal(generator.get_state(), torch.Generator().manual_seed(42).get_state())


def test_loader_draws_alike_from_pythons_and_numpys_generators() -> None:
    class Noisy(Dataset[Any]):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> Any:
            return torch.tensor([random.random(), np.random.rand()]), index

    def read_batch(epoch: int, index: int) -> List[float]:
        random.random(), np.random.rand(2)
        x, _ = from_loader(DataLoader(Noisy(), batch_size=4)).train_batch(epoch, index, 4)
        return [float(value) for value in x.flatten()]

    assert read_batch(0, 1) == read_batch(0, 1) != read_batch(0, 0) and read_batch(
        1, 1
    ) != read_batch(0, 1)
    states = random.getstate(), np.random.get_state()[1].tolist()
    from_loader(DataLoader(Noisy(), batch_size=4)).train_batch(0, 0, 4)
    assert states == (random.getstate(), np.random.get_state()[1].tolist())


def test_loader_resumes_and_repeats_by_index() -> None:
    whole = epoch_of(from_loader(make_loader(shuffle=True)), 2, 4)[1]
    resumed = from_loader(make_loader(shuffle=True))
    for index in (3, 3, 4, 1, 2, 0):  # ahead, the same again, on, and back
        assert torch.equal(resumed.train_batch(2, index, 4)[1], whole[4 * index : 4 * index + 4])
    other = resumed.train_batch(3, 0, 4)[1]
    assert not torch.equal(other, whole[:4])
    assert torch.equal(resumed.train_batch(2, 2, 4)[1], whole[8:12])  # an earlier epoch again


def test_loader_drops_the_last_short_batch() -> None:
    assert from_loader(make_loader(23)).train_batches_per_epoch(4) == 5
    assert from_loader(make_loader(24)).train_batches_per_epoch(4) == 6
    assert from_loader(make_loader(23, drop_last=True)).train_batches_per_epoch(4) == 5
    batches = [(torch.zeros(4, 1), torch.zeros(4))] * 3
    assert (
        from_loader(batches).train_batches_per_epoch(4) == 3
    )  # any sequence of batches may be a loader
    for data, index, size, words in (
        (make_loader(23), 5, 4, "batches of 3, micro_batch_size is 4"),
        (make_loader(), 0, 8, "batches of 4, micro_batch_size is 8"),
        (batches[:1], 2, 4, "ended after 1 batches"),
    ):
        one_line(list_faults(from_loader(data).train_batch, 0, index, size), words)


@pytest.mark.parametrize("sizes, words", [
    ([4, 4, 4, 2], ["batch 4 of 4 has 2 samples", "drop_last=True"]),
    ([4, 3, 4, 4], ["batch 2 of 4 has 3 samples, its first 4"]),
    ([3, 4, 4, 4], ["batch 2 of 4 has 4 samples, its first 3"]),
    ([4, 4, 4, 6], ["batch 4 of 4 has 6 samples, its first 4"]),
])  # fmt: skip
def test_batches_of_several_sizes_are_reported_with_their_place(
    sizes: List[int], words: List[str]
) -> None:
    """Story: the fault of a loader's smaller last batch named micro_batch_size, which nobody had set."""
    data = from_loader([(torch.zeros(size, 1), torch.zeros(size)) for size in sizes])
    first = data.read_batch_size()
    assert first == sizes[0]
    (fault,) = list_faults(lambda: [data.train_batch(0, index, first) for index in range(4)])
    assert all(word in fault for word in words) and "micro_batch_size" not in fault
    assert ("drop_last" in fault) == ("drop_last=True" in words)


def test_loader_counts_the_batches_of_its_sampler() -> None:
    """Story: the batches of the whole set were counted, and the run failed where the sampler ended."""
    for sampler, drop_last, batches in (
        (range(10), False, 2),
        (range(10), True, 2),
        (range(12), False, 3),
    ):
        for options in (
            {"sampler": torch_data.SubsetRandomSampler(sampler), "drop_last": drop_last},
            {
                "batch_sampler": torch_data.BatchSampler(
                    torch_data.SequentialSampler(sampler), 4, drop_last
                )
            },
        ):
            data = from_loader(make_loader(**options))
            assert (
                data.train_batches_per_epoch(4) == batches
                and len(epoch_of(data, 0, 4)[1]) == 4 * batches
            )
    data = from_loader(make_loader(batch_sampler=[[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]))
    assert data.train_batches_per_epoch(4) == 3 and epoch_of(data, 0, 4)[1].tolist() == list(
        range(12)
    )


class CountedStream(IterableDataset):  # type: ignore[type-arg]
    """A stream of eleven samples with a length."""

    def __iter__(self) -> Iterator[Any]:
        return iter([(torch.zeros(1), torch.tensor(n)) for n in range(11)])

    def __len__(self) -> int:
        return 11


def test_loader_of_a_stream_counts_full_batches() -> None:
    data = from_loader(DataLoader(CountedStream(), batch_size=4))
    assert data.train_batches_per_epoch(4) == 2 and epoch_of(data, 0, 4)[1].tolist() == list(
        range(8)
    )


class UncountedStream(IterableDataset):  # type: ignore[type-arg]
    """The same stream without a length."""

    def __iter__(self) -> Iterator[Any]:
        return iter(CountedStream())


def test_the_incomplete_batch_of_a_stream_is_dropped_where_its_size_was_read_first() -> None:
    data = from_loader(DataLoader(UncountedStream(), batch_size=4))
    assert data.train_batches_per_epoch(4) is None and data.read_batch_size() == 4
    numbers = [data.train_batch(0, index, 4)[1].tolist() for index in range(5)]
    assert numbers == [[0, 1, 2, 3], [4, 5, 6, 7]] * 2 + [[0, 1, 2, 3]]


@pytest.mark.parametrize("batched", [False, True])
def test_generators_of_samplers_are_seeded_by_epoch(batched: bool) -> None:
    """Story: a sampler's own generator was not reset, so that a resumed run saw another order."""

    def make_source() -> Any:
        sampler = torch_data.RandomSampler(range(24), generator=torch.Generator().manual_seed(1))  # type: ignore[arg-type]
        batches = (
            {"batch_sampler": torch_data.BatchSampler(sampler, 4, False)}
            if batched
            else {"sampler": sampler}
        )
        return from_loader(make_loader(24, **batches))

    whole = make_source()
    first = epoch_of(whole, 0, 4)[1]
    second = epoch_of(whole, 1, 4)[1]
    assert torch.equal(epoch_of(make_source(), 1, 4)[1], second) and not torch.equal(first, second)


def test_a_loader_for_tests_keeps_its_batches() -> None:
    data = from_loader(make_loader(), make_loader(6))
    assert isinstance(data, DataSource)
    assert [y.tolist() for _, y in data.test_batches(3)] == [[0, 1, 2, 3], [4, 5]]
    assert list(from_loader(make_loader()).test_batches(3)) == []


# ---- folders of images

SIZES = [(40, 30), (30, 40), (24, 24), (60, 20)]  # width, height


def write_image_files(root: Path) -> Path:
    """Write JPEGs in ImageNet's folders: three classes, each of one colour, with four training and two test images."""
    image = pytest.importorskip("PIL.Image")
    for part, count in (("train", 4), ("val", 2)):
        for name, colour in (("red", (250, 0, 0)), ("green", (0, 250, 0)), ("blue", (0, 0, 250))):
            (root / part / name).mkdir(parents=True)
            for n in range(count):
                pixels = np.zeros((*SIZES[n][::-1], 3), dtype=np.uint8) + np.array(
                    colour, dtype=np.uint8
                )
                pixels[:, : SIZES[n][0] // 2] //= 2  # the left half darker
                image.fromarray(pixels).save(
                    root / part / name / f"{n}.{'JPEG' if n else 'jpg'}", quality=95
                )
    (root / "train" / "red" / "notes.txt").write_text("no image")
    return root


@pytest.fixture
def image_root(tmp_path: Path) -> Path:
    """Write a folder of images, and return it."""
    return write_image_files(tmp_path / "images")


def test_image_folder_shapes_and_classes(image_root: Path) -> None:
    data = load_data("image_folder", image_root, size=16)
    assert data.classes == 3 and data.train_batches_per_epoch(5) == 2  # type: ignore[attr-defined]
    x, y = epoch_of(data, 0, 12)
    assert x.shape == (12, 3, 16, 16) and x.dtype == torch.float32 and y.dtype == torch.int64
    assert sorted(y.tolist()) == [0] * 4 + [1] * 4 + [2] * 4
    batches = list(data.test_batches(4))
    assert [len(labels) for _, labels in batches] == [4, 2]
    assert torch.cat([labels for _, labels in batches]).tolist() == [0, 0, 1, 1, 2, 2]
    mean, std = (
        torch.tensor(v).view(3, 1, 1) for v in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    )
    for images, labels in [(x, y), *batches]:
        for image, label in zip(images * std + mean, labels.tolist()):
            assert -1e-5 < float(image.min()) and float(image.max()) < 1 + 1e-5
            assert int(image.mean(dim=(1, 2)).argmax()) == 2 - label  # sorted: blue, green, red


def test_image_folder_with_graphcores_name_of_the_test_images(image_root: Path) -> None:
    before = next(iter(load_data("image_folder", image_root, size=16).test_batches(6)))
    (image_root / "val").rename(image_root / "validation")
    after = next(iter(load_data("image_folder", image_root, size=16).test_batches(6)))
    assert all(torch.equal(a, b) for a, b in zip(before, after))
    (image_root / "validation").rename(image_root / "else")
    with pytest.raises(BadInput, match=f"data.root: {image_root / 'val'}: "):
        load_data("image_folder", image_root, size=16)


def test_image_folder_crops_the_middle_of_test_images(image_root: Path) -> None:
    x, _ = next(iter(load_data("image_folder", image_root, size=16).test_batches(1)))
    blue = x[0, 2] * 0.225 + 0.406
    assert (
        blue[:, :6].mean() < 0.6 < 0.85 < blue[:, 10:].mean()
    )  # darker left of the middle, as in the file


def test_image_folder_is_repeated(image_root: Path) -> None:
    def read_images(
        seed: int, epoch: int, size: int, threads: int = 2
    ) -> Tuple[torch.Tensor, torch.Tensor]:
        return epoch_of(
            load_data("image_folder", image_root, seed=seed, size=16, threads=threads), epoch, size
        )

    x, y = read_images(0, 1, 4)
    for size, threads in ((4, 1), (12, 3), (1, 2)):
        again = read_images(0, 1, size, threads)
        assert torch.equal(x, again[0]) and torch.equal(y, again[1])
    assert not torch.equal(x, read_images(1, 1, 4)[0]) and not torch.equal(
        x, read_images(0, 0, 4)[0]
    )


def test_image_folder_can_be_pickled_for_another_process(image_root: Path) -> None:
    """Story: PopTorch's asynchronous loader could not pickle its threads and Pillow's module, so that no job started."""
    data = load_data("image_folder", image_root, size=16)
    before = data.train_batch(0, 1, 3)
    for source in (data, load_data("image_folder", image_root, size=16)):
        after = pickle.loads(pickle.dumps(source)).train_batch(0, 1, 3)
        assert all(torch.equal(a, b) for a, b in zip(before, after))


def test_bytes_are_normalized_where_the_model_is(image_root: Path) -> None:
    here, there = (
        load_data("image_folder", image_root, size=16, bytes=value) for value in (False, True)
    )
    pairs = [(here.train_batch(0, 0, 12), there.train_batch(0, 0, 12))]
    pairs += list(zip(here.test_batches(4), there.test_batches(4)))
    for (x, y), (raw, labels) in pairs:
        assert raw.dtype == torch.uint8 and raw.is_contiguous() and torch.equal(y, labels)
        torch.testing.assert_close(FromBytes()(raw), x)
    synthetic = load_data("synthetic", shape=[3, 4, 4], bytes=True)
    raw = synthetic.train_batch(0, 0, 64)[0]
    assert raw.dtype == torch.uint8 and (int(raw.min()), int(raw.max())) == (0, 255)
    assert torch.equal(raw[5:6], synthetic.train_batch(0, 5, 1)[0])
    one_line(
        list_faults(load_data, "image_folder", image_root, bytes=1),
        "data.bytes: 1",
        "must be true or false",
    )


def test_image_folder_subsets(image_root: Path) -> None:
    data = load_data("image_folder", image_root, size=8, subset=6, test_subset=3)
    again = load_data("image_folder", image_root, seed=5, size=8, subset=6, test_subset=3)
    assert data.train_batches_per_epoch(1) == 6
    labels = epoch_of(data, 0, 6)[1]
    assert len(set(labels.tolist())) > 1  # not the first class alone
    assert sorted(labels.tolist()) == sorted(
        epoch_of(again, 0, 6)[1].tolist()
    )  # the files do not depend on the seed
    assert sum(len(y) for _, y in data.test_batches(2)) == 3


@pytest.mark.parametrize(
    "key, value, allowed",
    [
        ("subset", 13, "from 1 to 12"), ("subset", 0, "from 1 to 12"), ("test_subset", 7, "from 1 to 6"),
        ("size", 0, "whole number >= 1"), ("threads", 0, "whole number >= 1"),
    ],
)  # fmt: skip
def test_image_folder_numbers_are_refused(
    image_root: Path, key: str, value: int, allowed: str
) -> None:
    one_line(
        list_faults(load_data, "image_folder", image_root, **{key: value}),
        f"data.{key}: {value}",
        allowed,
    )


def test_image_folder_refusals(
    image_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("IPU_PIPE_DATA", raising=False)
    one_line(list_faults(load_data, "image_folder"), "data.root", "train/ and val/")
    faults = list_faults(load_data, "image_folder", tmp_path / "nowhere")
    one_line(faults, str(tmp_path / "nowhere" / "train"), "one folder of images a class")
    (image_root / "val" / "yellow").mkdir()
    one_line(
        list_faults(load_data, "image_folder", image_root),
        str(image_root / "val" / "yellow"),
        "train/ does not have",
    )
    os.rename(image_root / "val", image_root / "test")
    one_line(
        list_faults(load_data, "image_folder", image_root),
        str(image_root / "val"),
        "does not exist",
    )
    for name in ("red", "green", "blue"):
        (image_root / "val" / name).mkdir(parents=True)
    one_line(
        list_faults(load_data, "image_folder", image_root),
        str(image_root / "val"),
        "contains no images",
        ".jpg",
    )


@pytest.mark.parametrize("cut", [False, True])
def test_image_folder_corrupt_image_is_named(image_root: Path, cut: bool) -> None:
    for part, file in (("train", "2.JPEG"), ("val", "1.JPEG")):
        path = image_root / part / "green" / file
        path.write_bytes(path.read_bytes()[:-200] if cut else b"no image at all")
    data = load_data("image_folder", image_root, size=8)
    faults = list_faults(data.train_batch, 0, 0, 12)
    one_line(faults, str(image_root / "train" / "green" / "2.JPEG"), "cannot be read as an image")
    faults = list_faults(lambda: list(data.test_batches(6)))
    one_line(faults, str(image_root / "val" / "green" / "1.JPEG"), "cannot be read as an image")


def test_the_middle_of_an_image_equals_that_of_the_scaled_image(image_root: Path) -> None:
    """They differ by at most 1 of 255. Story: the whole image was scaled first, and one of 1 x 20000 pixels took 6 GB."""
    image = pytest.importorskip("PIL.Image")
    rng, path, sizes = np.random.default_rng(0), image_root / "val" / "blue" / "0.png", []
    data: Any = load_data("image_folder", image_root, size=32)
    for width, height in ((300, 500), (37, 51), (64, 64), (10, 9), (257, 36)):
        image.fromarray(rng.integers(0, 256, (height, width, 3)).astype(np.uint8)).save(path)
        scale = 37 / min(width, height)  # 8/7 of 32
        whole = image.open(path).resize(
            (round(width * scale), round(height * scale)), image.Resampling.BILINEAR
        )
        left, top = (whole.width - 32) // 2, (whole.height - 32) // 2
        expected = np.asarray(whole.crop((left, top, left + 32, top + 32))).astype(int)
        assert abs(data._load_middle((path, 0))[0].astype(int) - expected).max() <= 1
    resize = image.Image.resize
    image.new("L", (1, 20000), 200).save(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            image.Image,
            "resize",
            lambda self, size, *how: sizes.append(size) or resize(self, size, *how),
        )
        assert (data._load_middle((path, 0))[0] == 200).all() and sizes == [(32, 32)]


@pytest.mark.parametrize(
    "size, words", [((10_000, 9_000), "10000 x 9000 pixels: must be"), ((20_000, 9_000), "bomb")]
)
def test_an_image_that_unpacks_to_gigabytes_is_refused_unread(
    image_root: Path, size: Tuple[int, int], words: str, recwarn: pytest.WarningsRecorder
) -> None:
    pytest.importorskip("PIL.Image").new("1", size).save(image_root / "val" / "blue" / "0.png")
    faults = list_faults(next, iter(load_data("image_folder", image_root, size=8).test_batches(3)))
    one_line(faults, str(image_root / "val" / "blue" / "0.png"), words)
    assert not recwarn.list


def test_a_pipe_among_images_is_refused(image_root: Path) -> None:
    os.mkfifo(image_root / "val" / "blue" / "0.png")
    with pytest.raises(BadInput, match="0.png: is not a file: must be an image"):
        next(iter(load_data("image_folder", image_root, size=8).test_batches(3)))


def test_test_batches_are_copies_of_the_samples() -> None:
    """Story: a model whose first operation is in place changed the test set."""
    x = torch.randn(6, 3)
    data = TensorData((x, torch.arange(6)), (x, torch.arange(6)))
    before = x.clone()
    for batch, labels in data.test_batches(4):
        batch.mul_(0)
        labels.mul_(0)
    assert torch.equal(x, before) and data.test[1].tolist() == list(range(6))
