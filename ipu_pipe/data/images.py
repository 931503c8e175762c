"""ImageNet-style folders of images. An image is decoded when it is read."""

from __future__ import annotations

import os
import random
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Callable, Iterator, Sequence

import numpy as np
import torch
from PIL import Image

from ipu_pipe.data.sources import Pair, SampledData, draw_order, require_int
from ipu_pipe.errors import BadInput
from ipu_pipe.model.randomness import derive_seed

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp")
# the most pixels of an image, a quarter of a GiB; Pillow warns of decompression bombs above it
MOST_PIXELS = 89_478_485
# mean and standard deviation of ImageNet's training images, by channel
MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)


class ImageFolder(SampledData):
    """Images in `root/train/CLASS/*` and `root/val/CLASS/*` or `root/validation/CLASS/*`; classes
    are the sorted folder names of `train`.

    Training images are a random part of 8 to 100 % of the area and an aspect from 3/4 to 4/3,
    scaled to `size` and mirrored at random; test images have their shorter side scaled to 8/7 of
    `size` and the middle cut out. `threads` decode at a time. If `bytes`, images stay 8-bit
    numbers, for a model that normalizes them itself; else they are normalized here, in float32.
    """

    def __init__(
        self,
        root: str | None,
        seed: int,
        size: int = 224,
        subset: int | None = None,
        test_subset: int | None = None,
        threads: int = 2,
        bytes: bool = False,
    ) -> None:
        for key, count in (("size", size), ("threads", threads)):
            require_int(key, count)
        # `_open` refuses images that Pillow would warn of
        warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)
        self._size = size
        self._seed = seed
        self._as_bytes = bytes
        if root is None:
            raise BadInput("data.root: missing: set it to the folder that contains train/ and val/")
        classes = _list_classes(Path(root) / "train")
        self.classes = len(classes)
        # not by the run's seed: runs with other seeds have the same subset
        generator = torch.Generator().manual_seed(derive_seed(0, "subset"))

        def draw_subset(
            key: str, count: int | None, files: list[tuple[Path, int]]
        ) -> list[tuple[Path, int]]:
            require_int(key, count, 1, len(files), optional=True)
            if count is None:
                return files
            # drawn: the first files are all of one class
            return [
                files[i] for i in torch.randperm(len(files), generator=generator)[:count].tolist()
            ]

        self._train = draw_subset("subset", subset, _list_images(Path(root) / "train", classes))
        self._test = draw_subset(
            "test_subset", test_subset, _list_images(_find_test_folder(Path(root)), classes)
        )
        self._threads = threads
        self.train_samples = len(self._train)
        self.test_samples = len(self._test)
        self._epoch = -1
        self._order = torch.empty(0)

    @property
    def data_files(self) -> list[Path]:
        """The files of both parts."""
        held_out = [] if self.validation is None else self.validation._test  # type: ignore[attr-defined]
        return [path for path, _ in [*self._train, *held_out, *self._test]]

    def _split_training_set(
        self, validation: Any, held_out: torch.Tensor, remaining: torch.Tensor
    ) -> None:
        validation._test = [self._train[i] for i in held_out.tolist()]
        self._train = [self._train[i] for i in remaining.tolist()]

    def take_train(self, epoch: int, positions: Sequence[int]) -> Pair:
        """Return the images at these positions of an epoch."""
        if epoch != self._epoch:
            self._order = draw_order(self._seed, epoch, len(self._train))
            self._epoch = epoch
        samples = [self._train[int(self._order[position])] for position in positions]
        seeds = [derive_seed(self._seed, epoch, position) for position in positions]
        return self._load(self._load_cropped_at_random, samples, seeds)

    def take_test(self, positions: range) -> Pair:
        """Return the images at these positions of the test set."""
        return self._load(self._load_middle, self._test[positions.start : positions.stop])

    def test_shard(self, batch_size: int, shard: int, shards: int) -> Iterator[Pair]:
        """Yield the batches of the test set with `number % shards == shard`, and read no others."""
        for start in range(shard * batch_size, self.test_samples, shards * batch_size):
            yield self.take_test(range(start, start + batch_size))

    def train_batches(self, epoch: int, indices: Sequence[int], batch_size: int) -> Pair:
        """Return the microbatches `indices` of `epoch` as one batch, whose images all threads
        decode together.
        """
        positions = [
            position
            for index in indices
            for position in range(index * batch_size, (index + 1) * batch_size)
        ]
        return self.take_train(epoch, positions)

    def _load(self, load: Callable[..., tuple[np.ndarray, int]], *arguments: Any) -> Pair:
        """Return a batch of what `load` returns for each of the arguments."""
        # threads for a batch alone, so that a copy in another process has none to make again
        with ThreadPoolExecutor(self._threads) as pool:
            samples = list(pool.map(load, *arguments))
        # Pillow has the channels last
        x = torch.from_numpy(np.stack([image for image, _ in samples])).permute(0, 3, 1, 2)
        labels = torch.tensor([label for _, label in samples])
        if self._as_bytes:
            return x.contiguous(), labels
        x = (x.float().div_(255) - torch.tensor(MEAN).view(1, 3, 1, 1)) / torch.tensor(STD).view(
            1, 3, 1, 1
        )
        return x.contiguous(), labels

    def _open(self, path: Path) -> Any:
        # pathlib raises if the folder cannot be read
        if not os.path.isfile(path):
            raise BadInput(f"data: {path}: is not a file: must be an image")
        try:
            with Image.open(path) as image:
                # the size is in the file's header; nothing is decoded yet
                width, height = image.size
                if width * height <= MOST_PIXELS:
                    # some of ImageNet's files are grey or CMYK
                    return image.convert("RGB")
        except Exception as error:
            raise BadInput(f"data: {path}: cannot be read as an image: {error}") from None
        raise BadInput(
            f"data: {path}: {width} x {height} pixels: must be at most {MOST_PIXELS} in all"
        )

    def _load_cropped_at_random(
        self, sample: tuple[Path, int], seed: int
    ) -> tuple[np.ndarray, int]:
        path, label = sample
        image = self._open(path)
        draw = random.Random(seed)
        width, height = image.size
        # ten tries, as torchvision's RandomResizedCrop
        for _ in range(10):
            area = width * height * draw.uniform(0.08, 1.0)
            # uniform in the logarithm, so that portrait and landscape are equally likely
            aspect = np.exp(draw.uniform(np.log(3 / 4), np.log(4 / 3)))
            w = round((area * aspect) ** 0.5)
            h = round((area / aspect) ** 0.5)
            if 0 < w <= width and 0 < h <= height:
                break
        else:
            w = h = min(width, height)
        left = draw.randint(0, width - w)
        top = draw.randint(0, height - h)
        part = image.resize(
            (self._size, self._size),
            Image.Resampling.BILINEAR,
            (left, top, left + w, top + h),
        )
        pixels = np.asarray(part)
        return (pixels[:, ::-1] if draw.random() < 0.5 else pixels), label

    def _load_middle(self, sample: tuple[Path, int]) -> tuple[np.ndarray, int]:
        path, label = sample
        image = self._open(path)
        # 256 for 224, as ImageNet is usually evaluated
        short = round(self._size * 8 / 7)
        scale = short / min(image.size)
        scaled = [max(short, round(side * scale)) for side in image.size]
        # the middle of the scaled image in the pixels of the file: scaled whole, a strip of 1 x
        # 20000 would take 6 GB
        begins = [
            (side - self._size) // 2 * (length / side) for side, length in zip(scaled, image.size)
        ]
        ends = [
            begin + self._size * (length / side)
            for begin, side, length in zip(begins, scaled, image.size)
        ]
        # rounding may lead past the edge, which Pillow refuses
        right = min(ends[0], image.width)
        lower = min(ends[1], image.height)
        box = (begins[0], begins[1], right, lower)
        return np.asarray(
            image.resize((self._size, self._size), Image.Resampling.BILINEAR, box)
        ), label


def _find_test_folder(root: Path) -> Path:
    """Return the folder of the test images: val, or validation if only that exists."""
    other = root / "validation"
    return other if other.is_dir() and not (root / "val").is_dir() else root / "val"


def _list_classes(folder: Path) -> list[str]:
    names = (
        sorted(path.name for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []
    )
    if not names:
        raise BadInput(f"data.root: {folder}: must be a folder with one folder of images a class")
    return names


def _list_images(folder: Path, classes: list[str]) -> list[tuple[Path, int]]:
    if not folder.is_dir():
        raise BadInput(
            f"data.root: {folder}: does not exist: image_folder needs train/ and val/ (or validation/)"
        )
    unknown = sorted(p.name for p in folder.iterdir() if p.is_dir() and p.name not in classes)
    if unknown:
        raise BadInput(f"data.root: {folder / unknown[0]}: a class that train/ does not have")
    files = [
        (path, label)
        for label, name in enumerate(classes)
        # a file system's own order is not the same everywhere, and samples are drawn by position
        for path in sorted((folder / name).glob("*"))
        if path.suffix.lower() in SUFFIXES
    ]
    if not files:
        raise BadInput(f"data.root: {folder}: contains no images ({', '.join(SUFFIXES)})")
    return files
