"""Random data with the shapes and sizes of a named set, where the set's files are missing.

A plan, a dry run and a rehearsal need the shape of a sample and the number of samples, not the
samples. Sizes: Krizhevsky 2009, LeCun et al. 1998, Russakovsky et al. 2015 (ILSVRC 2012, which
`image_folder` is taken to hold), and the texts that `fetch_data` makes.
"""

from __future__ import annotations

import os
import string
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ipu_pipe.data.sets import FOLDERS, get_default_root, require_cifar_size
from ipu_pipe.data.sources import DataSource, SyntheticData, require_int
from ipu_pipe.data.text import TextData, TranslationData

ENTRY = f"{__name__}:make_stand_in"


class ImageSet(NamedTuple):
    """The shape and size of a set of images: (channels, side, side)."""

    channels: int
    side: int
    classes: int
    samples: int
    test_samples: int


IMAGES = {
    "cifar10": ImageSet(3, 32, 10, 50_000, 10_000),
    "mnist": ImageSet(1, 28, 10, 60_000, 10_000),
    "fashion_mnist": ImageSet(1, 28, 10, 60_000, 10_000),
    "image_folder": ImageSet(3, 224, 1000, 1_281_167, 50_000),
}
# text set -> (characters, different characters); sizes are not below the set's, so that no subset
# is refused that the set has
TEXTS = {"shakespeare": (5_057_239, 84), "verses": (4_025_051, 80)}
# of `translation`: pairs, and the different words of each language
PAIRS = 31_077
WORDS = (13_000, 28_000)
# tokens of the longest line, with which about as many pairs as in the set have at most 32
LONGEST = 48


def find_missing_folder(name: str, root: str | None) -> Path | None:
    """Return the folder of a set whose files are missing and which has a stand-in, None for any
    other set."""
    if name == "image_folder":
        folder = Path(root or os.environ.get("IPU_PIPE_DATA") or "") / "train"
        return None if folder.is_dir() else folder
    if name not in IMAGES and name not in TEXTS and name != "translation":
        return None
    folder = Path(root or get_default_root()) / FOLDERS.get(name, "translation")
    return None if folder.is_dir() else folder


def describe_stand_in(name: str, folder: Path) -> str:
    """Return a line about the data that replaces the set `name`."""
    what = f"random text of {name}'s size"
    if name in IMAGES:
        images = IMAGES[name]
        what = f"random images, {images.samples:,} of {images.classes} classes"
    if name == "translation":
        what = f"{PAIRS:,} pairs of random lines"
    return f"data: {name}: {folder}: does not exist: planned with {what}"


def make_stand_in(of: str, **options: Any) -> DataSource:
    """Make random data of the set `of` with the options of this set. Raise `BadInput` if they do
    not fit.
    """
    validation = options.pop("validation", None)
    # nothing is read
    options.pop("root", None)
    subset = options.get("subset")
    test_subset = options.get("test_subset")
    source: Any
    if of in IMAGES:
        images = IMAGES[of]
        side = options.get("size", images.side)
        if of == "cifar10":
            require_cifar_size(side)
        for key, count in (("size", side), ("threads", options.get("threads", 1))):
            require_int(key, count)
        # a folder may have more images than ImageNet
        if of != "image_folder":
            require_int("subset", subset, 1, images.samples, optional=True)
            require_int("test_subset", test_subset, 1, images.test_samples, optional=True)
        source = SyntheticData(
            (images.channels, side, side),
            images.classes,
            subset or images.samples,
            test_subset or images.test_samples,
            seed=0,
            bytes=options.get("bytes", False),
        )
    elif of in TEXTS:
        length, different = TEXTS[of]
        characters = string.printable.encode()[:different]
        drawn = np.random.default_rng(0).integers(0, different, length)
        text = np.frombuffer(characters, np.uint8)[drawn].tobytes()
        source = TextData(text, 0, **options)
    else:
        english, spanish = map(_draw_lines, WORDS)
        source = TranslationData(english, spanish, 0, **options)
    if validation is not None:
        source.split_off_validation(validation, 0)
    return source


def _draw_lines(words: int) -> list[str]:
    """Draw PAIRS lines of 2 to LONGEST tokens, the same lengths for each language."""
    lengths = np.random.default_rng(0).integers(2, LONGEST + 1, PAIRS)
    # words that are numbers: each counts as one token
    drawn = np.random.default_rng(words).integers(0, words, lengths.sum()).astype(str).tolist()
    ends = np.cumsum(lengths)
    return [" ".join(drawn[end - length : end]) for end, length in zip(ends, lengths)]
