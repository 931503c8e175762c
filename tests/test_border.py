"""The border of the commands: output files, printed text, and the one line of a fault."""

from __future__ import annotations

import functools
import os
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Callable

import pytest

from ipu_pipe import BadInput, RunFault
from ipu_pipe.cli import plan, stability
from ipu_pipe.files import write_json, write_text
from ipu_pipe.trace.reading import read_trace
from tests.command_line import CommandResult, run_here
from tests.hostile.cases import PUT

CONFIG = "configs/mlp_digits.yaml"
HARDWARE = """
devices: 2
device:
  memory_bytes: 16e9
  usable_share: 0.9
  memory_bandwidth: {value: 9e11, source: "a sheet \\e[31mred\\e[0m \\a"}
  rates: {float32: {peak_flops: 1e13, achievable_share: 0.5}}
links: [{name: wire, bandwidth: 1e10, latency: 1e-5}]
"""


@pytest.fixture
def run_cli(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., CommandResult]:
    """Return the function that runs a command with arguments."""
    return functools.partial(run_here, monkeypatch=monkeypatch, capsys=capsys)


# ---- files


def test_a_file_is_written_through_a_link(tmp_path: Path) -> None:
    """Story: a link was replaced by a file, and its target kept the old content."""
    target, link = tmp_path / "target", tmp_path / "link"
    link.symlink_to(target)
    for text in ("new", "newer"):
        assert write_text(link, text) == link
        assert link.is_symlink() and target.read_text() == text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "target"]


@pytest.mark.parametrize("kind", ["full", "null", "loop", "folder"])
def test_what_is_not_a_file_is_not_replaced(kind: str, tmp_path: Path) -> None:
    """Story: `analyze --html /dev/full` replaced the device by a regular file, with exit code 0."""
    file = tmp_path / "file"
    PUT[kind](file)
    before = file.lstat()
    if kind == "null":
        write_json(file, {"a": 1})
    else:
        with pytest.raises(RunFault, match="^" + str(file)):
            write_text(file, "text")
    assert file.lstat() == before and [path.name for path in tmp_path.iterdir()] == ["file"]
    assert not file.is_file()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no pipes with names")
def test_a_pipe_is_written_to_if_it_has_a_reader(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(
        RunFault, match="^" + str(pipe)
    ):  # story: without a reader it waited forever
        write_text(pipe, "text")
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_text(pipe, "text")
    assert os.read(reader, 100) == b"text" and pipe.is_fifo()
    os.close(reader)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no pipes with names")
@pytest.mark.parametrize("name", ["rank0.trace", "trace.json"])
def test_a_trace_that_is_a_pipe_is_refused(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)  # story: the reader waited for a writer
    with pytest.raises(BadInput, match="^" + str(tmp_path / name)):
        read_trace(tmp_path)


# ---- arguments


@pytest.mark.parametrize("command, option, value", [
    (stability, "--seed", "9" * 5000), (stability, "--seed", "-1"), (stability, "--samples", "1e3"),
    (stability, "--curvature", "nan"), (plan, "--batch", "9" * 25), (plan, "--top", "0"),
])  # fmt: skip
def test_a_number_out_of_bounds_is_one_line(
    command: Any, option: str, value: str, run_cli: Any
) -> None:
    """Story: huge seeds and batches ended in a traceback."""
    code, out, error = run_cli(command, CONFIG, option, value)
    assert (code, out, error.count("\n")) == (2, "", 1)
    assert error.startswith(f"error: {option}: {value[:20]}") and len(error) < 2100


# ---- printed text


def test_a_terminals_escapes_are_printed_as_text(tmp_path: Path, run_cli: Any) -> None:
    """Story: the source of a hardware figure reached the terminal unescaped."""
    file = tmp_path / "hardware.yaml"
    file.write_text(HARDWARE)
    code, out, error = run_cli(plan, CONFIG, "--hardware", file, "--methods", "gpipe")
    assert code == 0, error
    assert "\\x1b[31mred" in out and all(line.isprintable() for line in (out + error).split("\n"))


@pytest.mark.parametrize("category, printed", [
    (UserWarning, "warning: two lines \\x1b[31mred\n"), (RuntimeWarning, ""), (DeprecationWarning, ""),
])  # fmt: skip
def test_a_warning_is_one_line_or_none(
    category: Any, printed: str, run_cli: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Story: Python printed warnings with the line of our code that raised them."""

    def main() -> None:
        for _ in range(2):
            warnings.warn("two lines\n\x1b[31mred", category, stacklevel=1)

    monkeypatch.setattr(sys, "warnoptions", [])
    monkeypatch.setattr("ipu_pipe.errors._printed_warnings", set())
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        assert run_cli(SimpleNamespace(main=main, __name__="command")) == (0, "", printed)
