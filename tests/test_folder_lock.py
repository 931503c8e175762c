"""Test the lock of a run's folder.

A second run in a folder is refused in one line and the first loses nothing; a lock that was left
behind locks nothing; --overwrite deletes only files of runs.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict, Iterator, List
from unittest.mock import Mock, patch

import pytest

import ipu_pipe
from ipu_pipe.backends.emulator.replay import Emulator
from ipu_pipe.comparison.method_comparison import compare_methods
from ipu_pipe.config.load import load_config
from ipu_pipe.errors import BadInput
from ipu_pipe.run import loop
from ipu_pipe.run.train import reserve_folder, train
from ipu_pipe.store import folder
from ipu_pipe.store.folder import check_folder, lock_folder
from tests.support.runs import DIGITS, ROOT, list_faults, read_column
from tests.test_train import run_train_tool  # noqa: F401

SHORT = [
    "steps=4", "log.tensorboard=false", "log.every=1", "evaluate.every=0", "gradient_accumulation=4", "micro_batch_size=8",
    "backend.threads=1", "checkpoint.every=2",
]  # fmt: skip


def load_short_config(*sets: str) -> Any:
    return load_config(DIGITS, [*SHORT, *sets])


def read_tree(folder: Path) -> Dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


@contextlib.contextmanager
def hold_lock(folder: Path, body: str = "") -> Iterator["subprocess.Popen[str]"]:
    """Start another process that locks the folder, and runs `body`."""
    code = f"""
import os, time
from pathlib import Path
from ipu_pipe.store.folder import lock_folder
lock = lock_folder(Path({str(folder)!r}))
lock.__enter__()
{body}
print('locked', flush=True)
time.sleep(600)
"""
    command = [sys.executable, "-c", code]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert process.stdout is not None and process.stdout.readline() == "locked\n"
        yield process
    finally:
        process.kill()
        process.wait()


# ---- two runs in one folder


def test_a_second_run_in_a_folder_is_refused_and_the_first_loses_nothing(
    tmp_path: Path,
    run_train_tool: Any,  # noqa: F811
) -> None:
    """The second run is refused in one line, whichever option it has.

    Story: --resume beside a live run left 37 of 124 lines of its metrics with exit code 0;
    --overwrite deleted its files.
    """
    arguments = [DIGITS, "--out", str(tmp_path), "--set", *SHORT]

    def start_second_runs(now: ipu_pipe.Moment) -> None:
        before = read_tree(tmp_path)
        for option in ("--resume", "--overwrite"):
            code, _, line = run_train_tool(*arguments, option)
            assert code == 2 and line.count("\n") == 1
            assert f"--out: {tmp_path}: process {os.getpid()} writes a run there: " in line
        assert read_tree(tmp_path) == before

    callback = ipu_pipe.Callback()
    callback.on_step = start_second_runs  # type: ignore[method-assign]
    train(load_short_config(), tmp_path, quiet=True, callbacks=[callback])
    assert len(read_column(tmp_path, "train_loss")) == 4
    assert not (tmp_path / ".lock").exists()


@pytest.mark.slow
def test_a_comparison_locks_both_folders(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    run_train_tool: Any,  # noqa: F811
) -> None:
    out, step, locks = tmp_path / "run", Emulator.advance, []

    def note_locks_and_step(self: Any, microbatches: Any) -> Any:
        locks.append([(out / name / ".lock").exists() for name in (".", "gpipe")])
        return step(self, microbatches)

    monkeypatch.setattr(Emulator, "advance", note_locks_and_step)
    arguments = [DIGITS, "--out", str(out), "--against", "gpipe", "--overwrite", "--set", *SHORT]
    assert run_train_tool(*arguments, "steps=2")[0] == 0
    assert locks == [[True, True]] * 2 + [[False, True]] * 2
    before = read_tree(out)
    with hold_lock(out / "gpipe"):
        code, _, error_line = run_train_tool(*arguments)
        assert code == 2 and "gpipe: process" in error_line and error_line.count("\n") == 1
    assert {k: v for k, v in read_tree(out).items() if ".lock" not in k} == before
    compared = tmp_path / "compared"
    with hold_lock(compared / "gpipe"):
        with pytest.raises(BadInput, match="gpipe: process .* writes a run there"):
            compare_methods(load_short_config(), ["gpipe"], compared, 2, overwrite=True, say=str)


# ---- the lock


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_the_lock_ends_with_its_holder_and_leaves_no_run(tmp_path: Path) -> None:
    """A worker that loads data may outlive a killed run by seconds, and must not keep the lock."""
    run = tmp_path / "run"
    child = f"""
child = os.fork()
if not child:
    time.sleep(600)
Path({str(tmp_path / "child")!r}).write_text(str(child))
"""
    with hold_lock(run, child) as other:
        held = f"^--out: .*run: process {other.pid} writes a run there"
        with pytest.raises(BadInput, match=held):
            train(load_short_config(), run, quiet=True)
        other.kill()
        other.wait()
        try:
            assert [path.name for path in run.iterdir()] == [".lock"]
            for overwrite in (False, True):
                assert check_folder(run, overwrite=overwrite) == []
            train(load_short_config(), run, quiet=True)
        finally:
            os.kill(int((tmp_path / "child").read_text()), signal.SIGKILL)
    assert not (run / ".lock").exists()


def test_a_lock_on_a_removed_file_is_taken_again(tmp_path: Path, monkeypatch: Any) -> None:
    flock, calls = folder.fcntl.flock, []

    def remove_then_lock(descriptor: int, how: int) -> None:
        if not calls:
            (tmp_path / ".lock").unlink()
        calls.append(descriptor)
        flock(descriptor, how)

    monkeypatch.setattr(folder.fcntl, "flock", remove_then_lock)
    with lock_folder(tmp_path):
        assert len(calls) == 2 and (tmp_path / ".lock").exists()
        with pytest.raises(BadInput, match=f"process {os.getpid()} writes"), lock_folder(tmp_path):
            pass


def test_a_refused_run_removes_the_folder_that_it_created(tmp_path: Path) -> None:
    with pytest.raises(BadInput):
        train(load_short_config("stages=[nowhere]"), tmp_path / "a" / "b", quiet=True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_reported_and_used(
    code: int, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(folder.fcntl, "flock", Mock(side_effect=OSError(code, "no")))
    lines: List[str] = []
    with reserve_folder(tmp_path, say=lines.append):
        (tmp_path / "config.yaml").write_text("")
    (line,) = lines
    assert line.startswith(f"{tmp_path}: no locks on this file system: ")
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]


# ---- --overwrite


def test_overwriting_deletes_only_files_of_the_run(tmp_path: Path) -> None:
    train(load_short_config("log.tensorboard=true"), tmp_path, quiet=True)
    left = {"notes.txt", "tensorboard/mine.txt", "checkpoints/mine.pt", "elsewhere/model.pt"}
    (tmp_path / "elsewhere").mkdir()
    for name in (*left, "checkpoints/step-2/extra", ".summary.json.part"):
        (tmp_path / name).write_text("mine")
    (tmp_path / "checkpoints" / ".step-9.part").mkdir()
    (tmp_path / "checkpoints" / "step-7").symlink_to(tmp_path / "elsewhere")
    # the first thing that is done in the emptied folder
    fail_to_overwrite(tmp_path, loop, "write_json")
    assert set(read_tree(tmp_path)) == left


def fail_to_overwrite(out: Path, module: Any, function: str) -> None:
    """Overwrite a run where a function of a module fails."""
    failing = patch.object(module, function, side_effect=ZeroDivisionError)
    with failing, pytest.raises(ZeroDivisionError):
        train(load_short_config(), out, overwrite=True, quiet=True)


def test_a_half_deleted_folder_still_counts_as_a_run(tmp_path: Path) -> None:
    train(load_short_config(), tmp_path, quiet=True)
    fail_to_overwrite(tmp_path, folder.shutil, "rmtree")
    train(load_short_config(), tmp_path, overwrite=True, quiet=True)


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_run_that_was_killed_at_its_beginning_is_replaced(
    overwrite: bool, tmp_path: Path
) -> None:
    """Story: --overwrite said that the folder was not a run's."""
    (tmp_path / "record.json").write_text("[{}]")
    assert check_folder(tmp_path, overwrite=overwrite) == []


FOREIGN = {
    "another program's checkpoints": "checkpoints/step-1/weights",
    "another program's tensorboard": "tensorboard/events.out.tfevents.1",
    "a config written by hand": "config.yaml",
    "anything else": "thesis/chapter.tex",
}


@pytest.mark.parametrize("what", FOREIGN)
def test_overwriting_a_folder_that_is_not_a_run_is_refused(what: str, tmp_path: Path) -> None:
    """Story: checkpoints/ and tensorboard/ of any folder were deleted."""
    file = tmp_path / FOREIGN[what]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(Path(DIGITS).read_text() if "hand" in what else "method: other\n")
    before = read_tree(tmp_path)
    (fault,) = list_faults(train, load_short_config(), tmp_path, overwrite=True, quiet=True)
    assert fault.startswith(f"--overwrite: {tmp_path}: ") and "the folder is not a run" in fault
    assert read_tree(tmp_path) == before


def test_an_empty_folder_name_is_refused(run_train_tool: Any) -> None:  # noqa: F811
    """Story: an empty name was the current folder."""
    for options in (["--out", ""], ["--out", " ", "--overwrite"]):
        code, _, line = run_train_tool(DIGITS, *options)
        assert code == 2 and "--out" in line and "must name a folder" in line
