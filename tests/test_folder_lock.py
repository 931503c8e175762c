"""One run a folder: a second one is refused in one line and the first loses nothing; a lock left behind locks nothing; what
--overwrite may delete."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Dict, Iterator, List

import pytest

from ipu_pipe.backends.emulator.replay import Emulator
from ipu_pipe.compare.method_comparison import compare_methods
from ipu_pipe.config.load import load_config
from ipu_pipe.errors import BadInput
from ipu_pipe.run import loop
from ipu_pipe.run.train import reserve_folder, train
from ipu_pipe.store import folder
from ipu_pipe.store.folder import RunFolder, check_folder, lock_folder
from tests.support.runs import DIGITS, ROOT, read_metrics
from tests.test_train import run_train_here

SHORT = [
    "steps=4", "log.tensorboard=false", "log.every=1", "evaluate.every=0", "gradient_accumulation=4", "micro_batch_size=8",
    "backend.threads=1", "checkpoint.every=2",
]  # fmt: skip


def config(*sets: str) -> Any:
    return load_config(DIGITS, [*SHORT, *sets])


def sets(*pairs: str) -> List[str]:
    return [item for pair in (*SHORT, *pairs) for item in ("--set", pair)]


def files(folder: Path) -> Dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


@contextlib.contextmanager
def holder(
    folder: Path, body: str = "print('held', flush=True); input()"
) -> Iterator["subprocess.Popen[str]"]:
    """Another process with the folder's lock."""
    code = f"from pathlib import Path\nfrom ipu_pipe.store.folder import lock_folder\nimport os\n" \
           f"lock = lock_folder(Path({str(folder)!r}))\nlock.__enter__()\n{body}"  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    try:
        assert process.stdout is not None and process.stdout.readline().startswith("held")
        yield process
    finally:
        process.kill()
        process.communicate()


def wait_for(happened: Any, seconds: float = 120.0) -> None:
    until = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < until
        time.sleep(0.02)


# ---- two runs in one folder


def test_a_second_run_in_a_folder_is_refused_and_the_first_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Story: --resume beside a live run left 37 of 124 lines of its metrics with exit code 0; --overwrite deleted its files."""
    out, steps = tmp_path / "run", 40
    arguments = [DIGITS, *sets(f"steps={steps}"), "--out", str(out)]
    go, stands = tmp_path / "go", tmp_path / "stands"
    # a run that stands still in its second half until it is told to go on
    code = f"""
import sys, time
from pathlib import Path
from ipu_pipe.backends.emulator.replay import Emulator
step = Emulator.step
def waiting(self, microbatches):
    if self.update == {steps // 2}:
        Path({str(stands)!r}).touch()
        while not Path({str(go)!r}).exists():
            time.sleep(0.02)
    return step(self, microbatches)
Emulator.step = waiting
sys.argv = ['train', *{arguments!r}]
from ipu_pipe.cli.train import main
main()
"""
    python = [sys.executable, "-c", code]
    live = subprocess.Popen(
        python, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    try:
        wait_for(lambda: stands.exists() or live.poll() is not None)
        before = files(out)
        for option in ("--resume", "--overwrite"):
            exit_code, _, complaint = run_train_here(
                *arguments, option, monkeypatch=monkeypatch, capsys=capsys
            )
            assert exit_code == 2 and complaint.count("\n") == 1
            assert complaint.startswith(
                f"error: --out: {out}: process {live.pid} writes a run there: "
            )
            assert complaint.endswith("wait for it, or give another folder\n")
        assert files(out) == before
        go.touch()
        _, error = live.communicate(timeout=120)
    finally:
        live.kill()
        live.wait()
    assert live.returncode == 0, error
    assert [line["step"] for line in read_metrics(out) if "train_loss" in line] == list(
        range(1, steps + 1)
    )
    assert not (out / ".lock").exists()


@pytest.mark.slow
def test_a_comparison_holds_both_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    out, step, seen = tmp_path / "run", Emulator.step, []

    def looking(self: Any, microbatches: Any) -> Any:
        seen.append([(out / name / ".lock").exists() for name in (".", "gpipe")])
        with pytest.raises(
            BadInput, match=f"process {os.getpid()} writes a run there"
        ), lock_folder(out / "gpipe"):
            pass
        return step(self, microbatches)

    monkeypatch.setattr(Emulator, "step", looking)
    arguments = [DIGITS, *sets("steps=2"), "--out", str(out), "--against", "gpipe", "--overwrite"]
    for _ in range(2):
        assert run_train_here(*arguments, monkeypatch=monkeypatch, capsys=capsys)[0] == 0
    assert (
        seen == [[True, True]] * 2 + [[False, True]] * 2 + [[True, True]] * 2 + [[False, True]] * 2
    )
    with holder(out / "gpipe"):
        before = files(out)
        code, _, complaint = run_train_here(*arguments, monkeypatch=monkeypatch, capsys=capsys)
        assert code == 2 and "gpipe: process" in complaint and complaint.count("\n") == 1
        assert files(out) == before
        with pytest.raises(BadInput, match="gpipe: process .* writes a run there"):
            compare_methods(config(), ["gpipe"], out, 2, overwrite=True, say=lambda text: None)
        assert files(out) == before


# ---- the lock


def test_the_lock_is_freed_by_its_holders_death_and_what_it_leaves_is_no_run(
    tmp_path: Path,
) -> None:
    with holder(tmp_path / "run") as other:
        with pytest.raises(
            BadInput, match=f"^--out: .*run: process {other.pid} writes a run there"
        ):
            train(config(), tmp_path / "run", quiet=True)
        os.kill(other.pid, signal.SIGKILL)
        other.wait()
    assert [path.name for path in (tmp_path / "run").iterdir()] == [".lock"]
    for overwrite in (False, True):
        assert check_folder(tmp_path / "run", overwrite=overwrite) == []
    train(config(), tmp_path / "run", quiet=True)
    assert not (tmp_path / "run" / ".lock").exists()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_does_not_keep_the_lock(tmp_path: Path) -> None:
    """A worker that loads data may outlive a killed run by seconds."""
    body = "child = os.fork()\nif not child:\n    import time; time.sleep(30); os._exit(0)\n"
    body += "print('held', child, flush=True); input()"
    with holder(tmp_path, "print('held', flush=True)\n" + body) as other:
        assert other.stdout is not None
        child = int(other.stdout.readline().split()[1])
        try:
            os.kill(other.pid, signal.SIGKILL)
            other.wait()
            with lock_folder(tmp_path):
                pass
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_lock_of_a_file_that_its_holder_has_just_removed_is_taken_again(
    tmp_path: Path, monkeypatch: Any
) -> None:
    flock, calls = folder.fcntl.flock, []

    def racing(descriptor: int, how: int) -> None:
        if not calls:
            (tmp_path / ".lock").unlink()
        calls.append(descriptor)
        flock(descriptor, how)

    monkeypatch.setattr(folder.fcntl, "flock", racing)
    with lock_folder(tmp_path):
        assert len(calls) == 2 and (tmp_path / ".lock").exists()
        with pytest.raises(BadInput, match=f"process {os.getpid()} writes"), lock_folder(tmp_path):
            pass


def test_a_folder_made_for_a_run_that_is_refused_is_gone_again(tmp_path: Path) -> None:
    with pytest.raises(BadInput):
        train(config("stages=[nowhere]"), tmp_path / "a" / "b", quiet=True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_reported_and_used(
    code: int, tmp_path: Path, monkeypatch: Any
) -> None:
    def none(*_: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(folder.fcntl, "flock", none)
    lines: List[str] = []
    with reserve_folder(tmp_path / "run", say=lines.append):
        RunFolder(tmp_path / "run").forget("trace")
        (tmp_path / "run" / "config.yaml").write_text("")
    assert lines == [
        f"{tmp_path / 'run'}: no locks on this file system: nothing keeps a second run out of this folder"
    ]
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["config.yaml"]


# ---- what --overwrite touches


def test_overwriting_deletes_what_the_run_wrote_and_nothing_else(tmp_path: Path) -> None:
    train(config("log.tensorboard=true"), tmp_path, quiet=True)
    for name in (
        "notes.txt",
        "tensorboard/mine.txt",
        "checkpoints/mine.pt",
        "checkpoints/step-2/extra",
    ):
        (tmp_path / name).write_text("mine")
    (tmp_path / "checkpoints" / ".step-9.part").mkdir()
    (tmp_path / ".summary.json.part").write_text("")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "model.pt").write_text("mine")
    (tmp_path / "checkpoints" / "step-7").symlink_to(tmp_path / "elsewhere")
    left = {"notes.txt", "tensorboard/mine.txt", "checkpoints/mine.pt", "elsewhere/model.pt"}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(
            loop, "write_json", lambda *_: 1 / 0
        )  # the first thing that is done in the emptied folder
        with pytest.raises(ZeroDivisionError):
            train(config(), tmp_path, overwrite=True, quiet=True)
    assert set(files(tmp_path)) == left


def test_a_folder_half_deleted_is_still_known_for_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(config(), tmp_path, quiet=True)
    with monkeypatch.context() as patched:
        patched.setattr(folder.shutil, "rmtree", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            train(config(), tmp_path, overwrite=True, quiet=True)
    train(config(), tmp_path, overwrite=True, quiet=True)


FOREIGN = {
    "another program's checkpoints": "checkpoints/step-1/weights",
    "another program's tensorboard": "tensorboard/events.out.tfevents.1",
    "another program's config": "config.yaml",
    "a config written by hand": "config.yaml",
    "anything else": "thesis/chapter.tex",
}


@pytest.mark.parametrize("what", FOREIGN)
def test_overwriting_a_folder_that_is_no_runs_is_refused(what: str, tmp_path: Path) -> None:
    """Story: checkpoints/ and tensorboard/ of any folder were deleted."""
    file = tmp_path / FOREIGN[what]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(Path(DIGITS).read_text() if "hand" in what else "method: other\n")
    before = files(tmp_path)
    with pytest.raises(
        BadInput, match=f"^--overwrite: {tmp_path}: .*the folder is not a run"
    ) as refused:
        train(config(), tmp_path, overwrite=True, quiet=True)
    assert len(refused.value.faults) == 1 and files(tmp_path) == before


def test_an_empty_name_is_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Story: it was the current folder."""
    for arguments in ([DIGITS, "--out", ""], [DIGITS, "--out", " ", "--overwrite"]):
        code, _, complaint = run_train_here(*arguments, monkeypatch=monkeypatch, capsys=capsys)
        assert (
            code == 2
            and "--out" in complaint
            and "must name a folder" in complaint
            and complaint.count("\n") == 1
        )
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadInput, match="must name a folder"):
        train(config(), "", quiet=True)
    assert list(tmp_path.iterdir()) == []
