"""The named data sets, read from their official layouts and checked by size and hash.

cifar10        cifar-10-batches-bin/: a label byte, then 1024 red, green and blue bytes a sample (Krizhevsky 2009)
mnist          train-images-idx3-ubyte and so on, IDX files (LeCun et al. 1998, CC BY-SA 3.0)
fashion_mnist  the same layout (Xiao et al. 2017, MIT)
shakespeare    shakespeare/shakespeare.txt: 42 works (public domain), 5 million characters, 84 different ones; not the Tiny
               Shakespeare of Karpathy 2015
translation    translation/: english.txt and spanish.txt, 31,077 verses of the Bible, one per line (public domain); 19,581 pairs
               have at most 32 tokens. In some ten chapters, about 1 %, the two texts count verses
               otherwise
verses         the English verses of `translation` as plain text for a language model, quotes and dashes in ASCII
digits         8x8 images with scikit-learn (BSD-3), 1437 training and 360 test samples drawn once; no download
image_folder   ImageNet-style folders train/CLASS/*.jpg and val/CLASS/*.jpg; `bytes: true` leaves normalizing to the model
synthetic      random numbers of a stated shape, bytes where `bytes: true`

cifar10, mnist, fashion_mnist and digits can have random labels instead of the real ones
(`random_labels: true`, Zhang et al. 2017): how many of them a model can learn says how much it can
memorize.
"""

from __future__ import annotations

import gzip
import os
from concurrent.futures import ThreadPoolExecutor
from importlib import util
from pathlib import Path
from shlex import quote
from typing import Any, Callable, Mapping, NamedTuple, Sequence

import numpy as np
import torch

from ipu_pipe.data.sources import (
    DataSource,
    Pair,
    SyntheticData,
    TensorData,
    require_int,
    split_off_test,
    take_subset,
)
from ipu_pipe.data.text import TextData, TranslationData
from ipu_pipe.errors import BadInput, raise_faults
from ipu_pipe.files import hash_file, parse_path
from ipu_pipe.model.randomness import derive_seed
from ipu_pipe.text import find_nearest, show

IDX_BYTES = {
    "train-images-idx3-ubyte": 47_040_016,
    "train-labels-idx1-ubyte": 60_008,
    "t10k-images-idx3-ubyte": 7_840_016,
    "t10k-labels-idx1-ubyte": 10_008,
}


def _list_idx_files(*sums: str) -> dict[str, tuple[str, int]]:
    return {file: (md5, size) for (file, size), md5 in zip(IDX_BYTES.items(), sums)}


# set -> file -> MD5 and size in bytes. Text sets without official files have those that
# `data.fetch` makes.
FILES: dict[str, dict[str, tuple[str, int]]] = {
    "cifar10": {
        "data_batch_1.bin": ("5dd7e06a14cb22eb9f671a540d1b7c25", 30_730_000),
        "data_batch_2.bin": ("5ea93a67294ea407fff1d09f752e9692", 30_730_000),
        "data_batch_3.bin": ("942cd6a4bcdd0dd3c604fbe906cb4421", 30_730_000),
        "data_batch_4.bin": ("ae636b3ba5c66a11e91e8cb52e771fcb", 30_730_000),
        "data_batch_5.bin": ("53f37980c15c3d472c316c40844f3f0d", 30_730_000),
        "test_batch.bin": ("803d5f7f4d78ea53de84dbe85f74fb6d", 30_730_000),
    },
    "mnist": _list_idx_files(
        "6bbc9ace898e44ae57da46a324031adb",
        "a25bea736e30d166cdddb491f175f624",
        "2646ac647ad5339dbf082846283269ea",
        "27ae3e4e09519cfbb04c329615203637",
    ),
    "fashion_mnist": _list_idx_files(
        "f4a8712d7a061bf5bd6d2ca38dc4d50a",
        "9018921c3c673c538a1fc5bad174d6f9",
        "8181f5470baa50b63fa0f6fddb340f0a",
        "15d484375f8d13e6eb1aabb0c3f46965",
    ),
    "shakespeare": {"shakespeare.txt": ("0b06525d99aa77283538f1cf04572f7d", 5_057_239)},
    "translation": {
        "english.txt": ("60c9e2573b0bce282cf8ff87d4d00a55", 4_025_051),
        "spanish.txt": ("8ee486bd8b7494b5856071e0d68a6c46", 3_937_698),
    },
}
FOLDERS = {
    **{name: name for name in FILES},
    "cifar10": "cifar-10-batches-bin",
    "fashion_mnist": "fashion-mnist",
}


def get_default_root() -> Path:
    """Return the folder of data sets: $IPU_PIPE_DATA, else ~/.cache/ipu_pipe."""
    return Path(os.environ.get("IPU_PIPE_DATA") or Path.home() / ".cache" / "ipu_pipe")


def verify_files(name: str, folder: Path, root: str | Path | None) -> None:
    """Raise `BadInput`, one line for each file that is missing, cut short or altered, and say how
    to fetch it.
    """
    where = f" --root {quote(str(root))}" if root is not None else ""
    remedy = f"run: python tools/fetch_data.py {name}{where}"
    if not folder.is_dir():
        raise BadInput(f"data: {name}: {folder}: does not exist: {remedy}")
    # fetching does not replace an existing folder
    remedy = f"delete the folder and {remedy}"
    paths = [folder / file for file in FILES[name]]
    # threads gain here, since hashing lets go of Python's lock
    with ThreadPoolExecutor() as pool:
        reasons = list(pool.map(_explain_damage, paths, FILES[name].values()))
    raise_faults(
        [f"data: {name}: {path}: {why}: {remedy}" for path, why in zip(paths, reasons) if why]
    )


def _explain_damage(path: Path, expected: tuple[str, int]) -> str:
    """Return why a file is not the one with the expected MD5 and size, "" if it is."""
    md5, size = expected
    if not path.is_file():
        return "missing"
    # the size first: it says more than a wrong hash, and reads nothing
    if path.stat().st_size != size:
        return f"{path.stat().st_size} bytes, must be {size}"
    return "" if hash_file(path, "md5") == md5 else f"its MD5 is not {md5}"


def _resolve_folder(name: str, root: str | None) -> Path:
    """Return the folder of a set in its official layout. Raise `BadInput` if a file is missing or
    has another size or MD5.
    """
    folder = Path(root or get_default_root()) / FOLDERS[name]
    verify_files(name, folder, root)
    return folder


# ---- layouts


def read_cifar(path: Path) -> Pair:
    """Read images (n, 3, 32, 32) and labels (n,) of one file in CIFAR-10's binary layout."""
    # (n, 3073): a label, then 1024 bytes of each colour
    rows = torch.from_numpy(np.fromfile(path, dtype=np.uint8)).view(-1, 3073)
    return rows[:, 1:].reshape(-1, 3, 32, 32), rows[:, 0].long()


def read_idx(images: Path, labels: Path) -> Pair:
    """Read images (n, 1, H, W) and labels (n,) of a pair of IDX files."""
    raw = np.fromfile(images, dtype=np.uint8)
    # IDX headers are big-endian; 2051 and 2049 stand for bytes in three dimensions and in one
    magic, count, height, width = raw[:16].view(">i4").tolist()
    raw_labels = np.fromfile(labels, dtype=np.uint8)
    if magic != 2051 or raw_labels[:8].view(">i4").tolist() != [2049, count]:
        raise BadInput(
            f"data: {images}: no IDX file of images, or {labels.name} does not belong to it"
        )
    # behind headers of four numbers and of two
    return torch.from_numpy(raw[16:]).view(count, 1, height, width), torch.from_numpy(
        raw_labels[8:]
    ).long()


def _load_cifar10(
    root: str | None, seed: int, augment: bool = True, size: int = 32, **limits: Any
) -> DataSource:
    require_cifar_size(size)
    folder = _resolve_folder("cifar10", root)
    parts = [read_cifar(folder / file) for file in FILES["cifar10"]]
    images = torch.cat([x for x, _ in parts[:-1]])
    labels = torch.cat([y for _, y in parts[:-1]])
    train = images, labels
    train, test = ((_average_pixels(x, 32 // size), y) for x, y in (train, parts[-1]))
    normalization = Normalization((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
    return _limit_samples(train, test, seed, augment, normalization, **limits)


def require_cifar_size(size: Any) -> None:
    """Raise `BadInput` unless CIFAR-10's images can be averaged to `size` pixels a side."""
    if type(size) is not int or size not in (8, 16, 32):
        raise BadInput(
            f"data.size: {show(size)}: must be 32, or 16 or 8, to which images are averaged"
        )


def _average_pixels(x: torch.Tensor, factor: int) -> torch.Tensor:
    """Average each square of `factor` pixels a side of images (n, C, H, W) of bytes, for small
    experiments.
    """
    if factor == 1:
        return x
    n, channels, height, width = x.shape
    # (n, C, H / factor, factor, W / factor, factor)
    squares = x.view(n, channels, height // factor, factor, width // factor, factor)
    return squares.float().mean(dim=(3, 5)).round_().to(torch.uint8)


def _make_idx_loader(name: str, mean: float, std: float) -> Callable[..., DataSource]:
    def load(root: str | None, seed: int, augment: bool = False, **limits: Any) -> DataSource:
        folder = _resolve_folder(name, root)
        train, test = (
            read_idx(folder / f"{part}-images-idx3-ubyte", folder / f"{part}-labels-idx1-ubyte")
            for part in ("train", "t10k")
        )
        return _limit_samples(train, test, seed, augment, Normalization((mean,), (std,)), **limits)

    return load


def _load_shakespeare(root: str | None, seed: int, **options: Any) -> DataSource:
    return TextData(
        (_resolve_folder("shakespeare", root) / "shakespeare.txt").read_bytes(), seed, **options
    )


def _load_translation(root: str | None, seed: int, **options: Any) -> DataSource:
    folder = _resolve_folder("translation", root)
    english, spanish = (
        # not splitlines, which splits at other characters too: line i of one file belongs to line i
        # of the other
        (folder / file).read_text(encoding="utf-8").rstrip("\n").split("\n")
        for file in ("english.txt", "spanish.txt")
    )
    return TranslationData(english, spanish, seed, **options)


# the English verses' quotation marks and dash in ASCII
ASCII_MARKS = str.maketrans("‘’“”—", "''\"\"-")


def _load_verses(root: str | None, seed: int, **options: Any) -> DataSource:
    verses = (_resolve_folder("translation", root) / "english.txt").read_text(encoding="utf-8")
    # marks that have no form in ASCII are left out
    return TextData(verses.translate(ASCII_MARKS).encode("ascii", "ignore"), seed, **options)


def _find_digits_file() -> Path:
    # reading the file takes no time; importing scikit-learn takes a second
    package = util.find_spec("sklearn")
    assert package is not None and package.origin is not None
    return Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"


def _load_digits(root: str | None, seed: int, augment: bool = False, **limits: Any) -> DataSource:
    with gzip.open(_find_digits_file()) as table:
        rows = torch.from_numpy(np.loadtxt(table, delimiter=",", dtype=np.float32))
    # grey values are from 0 to 16
    images = rows[:, :64].reshape(-1, 1, 8, 8) / 16
    train, test = split_off_test(images, rows[:, 64].long(), test=360)
    return _limit_samples(train, test, seed, augment, Normalization((0.3053,), (0.3760,)), **limits)


class Normalization(NamedTuple):
    """The mean and standard deviation of the training images, by channel."""

    mean: Sequence[float]
    std: Sequence[float]


def _limit_samples(
    train: Pair,
    test: Pair,
    seed: int,
    augment: bool,
    normalization: Normalization,
    subset: int | None = None,
    test_subset: int | None = None,
    random_labels: bool = False,
) -> DataSource:
    """Make the data source of the first `subset` training and `test_subset` test samples, all if
    None.
    """
    # draw for the whole set, so that a subset has its first labels
    if random_labels:
        train = _draw_labels(train, seed, "train")
        test = _draw_labels(test, seed, "test")
    return TensorData(*take_subset(train, test, subset, test_subset), seed, augment, *normalization)


# the classes of the sets that can have random labels
CLASSES = 10


def _draw_labels(pair: Pair, seed: int, part: str) -> Pair:
    """Return the same samples with labels drawn by (seed, part, position), whatever the sample."""
    generator = torch.Generator().manual_seed(derive_seed(seed, "random labels", part))
    return pair[0], torch.randint(0, CLASSES, (len(pair[1]),), generator=generator)


def _make_synthetic(
    root: str | None,
    seed: int,
    shape: Sequence[int] = (3, 32, 32),
    classes: int = 10,
    subset: int = 1024,
    test_subset: int = 128,
    bytes: bool = False,
) -> DataSource:
    sizes = [*shape] if isinstance(shape, (list, tuple)) else [0]
    if not sizes or not all(isinstance(n, int) and n >= 1 for n in [*sizes, classes]):
        raise BadInput(
            f"data.shape: {show(shape)}, data.classes: {show(classes)}: must be whole numbers >= "
            f"1, as shape: [3, 32, 32]"
        )
    for key, count in (("subset", subset), ("test_subset", test_subset)):
        require_int(key, count)
    return SyntheticData(sizes, classes, subset, test_subset, seed, bytes)


def _load_image_folder(root: str | None, seed: int, **options: Any) -> DataSource:
    # Pillow is needed only here
    try:
        from ipu_pipe.data.images import ImageFolder
    except ImportError:
        raise BadInput(
            "data: image_folder: needs Pillow, which is not installed: pip install pillow"
        ) from None

    return ImageFolder(root or os.environ.get("IPU_PIPE_DATA") or None, seed, **options)


SETS: dict[str, Callable[..., DataSource]] = {
    "cifar10": _load_cifar10,
    "mnist": _make_idx_loader("mnist", 0.1307, 0.3081),
    "fashion_mnist": _make_idx_loader("fashion_mnist", 0.2860, 0.3530),
    "shakespeare": _load_shakespeare,
    "translation": _load_translation,
    "verses": _load_verses,
    "digits": _load_digits,
    "image_folder": _load_image_folder,
    "synthetic": _make_synthetic,
}
_OPTIONS: dict[str, list[str]] = {
    "cifar10": ["augment", "size", "subset", "test_subset", "random_labels"],
    "synthetic": ["shape", "classes", "subset", "test_subset", "bytes"],
    "image_folder": ["size", "subset", "test_subset", "threads", "bytes"],
    **dict.fromkeys(
        ("shakespeare", "verses"), ["context", "characters", "subset", "test_subset", "ascii"]
    ),
    "translation": ["length", "vocabulary", "subset", "test_subset"],
}


def require_known_options(name: str, options: Mapping[str, Any]) -> None:
    """Raise `BadInput` for options that the set `name` does not have, and for switches that are
    not true or false.
    """
    allowed = _OPTIONS.get(name, ["augment", "subset", "test_subset", "random_labels"])
    faults = []
    for key, value in options.items():
        if key not in allowed:
            near = find_nearest(key, allowed)
            faults.append(
                f"data.{show(key)}: {show(value)}: unknown key for {name}, allowed are "
                f"{', '.join(['root', *allowed, 'validation'])}"
                + (f", nearest is {near}" if near else "")
            )
        elif key in ("augment", "random_labels", "bytes", "ascii") and not isinstance(value, bool):
            faults.append(f"data.{show(key)}: {show(value)}: must be true or false")
    raise_faults(faults)


def load_data(
    name: str, root: str | Path | None = None, seed: int = 0, **options: Any
) -> DataSource:
    """Load the set called `name` from the folder `root` (default: `get_default_root()`), in the
    order of `seed`.

    All sets take `subset` and `test_subset`, the number of first samples to take, and `validation`,
    the number or share of the training samples that are held out, drawn by `seed`; for the options
    of each see SETS. With `random_labels` the labels of both parts are drawn by `seed`. Raise
    `BadInput` for unknown names and options and for data that is missing or damaged.
    """
    if name not in SETS:
        near = find_nearest(name, SETS)
        raise BadInput(
            f"data.name: {show(name)}: must be one of {', '.join(SETS)} or an import string "
            f"module:name" + (f", nearest is {near}" if near else "")
        )
    root = None if root is None else parse_path(root, "data.root")
    validation = options.pop("validation", None)
    require_known_options(name, options)
    try:
        source = SETS[name](str(root) if root is not None else None, seed, **options)
    # a name that is too long, a folder that nobody may read
    except OSError as error:
        place = error.filename or root or get_default_root()
        raise BadInput(f"data.root: {place}: cannot be read: {error.strerror or error}") from None
    # the verses are half of another set's files
    set_of_files = "translation" if name == "verses" else name
    if set_of_files in FILES:
        folder = Path(root or get_default_root()) / FOLDERS[set_of_files]
        # by vars, because the protocol does not declare the attribute
        vars(source)["data_files"] = [folder / file for file in FILES[set_of_files]]
    elif name == "digits":
        vars(source)["data_files"] = [_find_digits_file()]
    if validation is not None:
        source.split_off_validation(validation, seed)  # type: ignore[attr-defined]
    return source
