"""Test runs that torchrun restarts: kills change no number, and no restart resumes another run."""

from __future__ import annotations

import re
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from ipu_pipe.cli.train import _choose_folder
from ipu_pipe.config.load import load_config
from ipu_pipe.errors import BadInput
from ipu_pipe.run.train import train
from ipu_pipe.store.folder import read_starts
from tests import kills
from tests.support.runs import needs_processes, read_numbers
from tests.support.slow import mark_slow

SETTINGS = ["steps=4", "checkpoint.every=2", "evaluate.every=0", "log.tensorboard=false"]


@needs_processes
@pytest.mark.parametrize("kills_in_all", mark_slow([1, 12], lambda count: count == 1))
def test_killed_runs_end_as_if_never_killed(kills_in_all: int, tmp_path: Path) -> None:
    count, seed = 0, 0
    while count < kills_in_all:
        count += kills.run_seed(seed, tmp_path / str(seed))
        seed += 1
        assert seed < 12, "ranks outlive their kills: are their moments counted?"


@needs_processes
@pytest.mark.slow
def test_killed_runs_on_xla_end_as_if_never_killed(tmp_path: Path) -> None:
    pytest.importorskip("jax", reason="xla needs jax: pip install 'ipu_pipe[xla]'")
    counts = [kills.run_seed(seed, tmp_path / str(seed), "xla") for seed in range(2)]
    assert sum(counts) >= 2, "runs outlive their kills: are their moments counted?"


def sleep_a_minute(*arguments: Any) -> None:
    time.sleep(60)


def test_a_hanging_rank_is_not_mistaken_for_a_killed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kills, "_run_rank", sleep_a_minute)
    monkeypatch.setattr(kills, "PATIENCE", 0.2)
    with pytest.raises(AssertionError, match=r"ranks \[0, 1\] did not end"):
        kills.run_attempt(kills.Start(0, None, [], "job"), 2, tmp_path / "hanging")


def set_restart(monkeypatch: pytest.MonkeyPatch, attempt: int, job: str) -> None:
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(attempt))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", job)


def test_a_restart_resumes_only_its_own_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """A first start that meets the folder of another run is refused, and so is its restart."""
    config, killed = load_config(str(kills.DIGITS), SETTINGS), tmp_path / "killed"
    run = tmp_path / "run"
    set_restart(monkeypatch, 0, "one")
    train(config, run, quiet=True)
    for attempt in (0, 1):
        set_restart(monkeypatch, attempt, "two")
        with pytest.raises(BadInput, match="contains another run"):
            train(config, run)
    set_restart(monkeypatch, 1, "one")
    (run / "summary.json").unlink()  # killed before it was written
    for overwrite in (False, True):  # the first start has overwritten already, the restart must not
        train(config, run, overwrite=overwrite)
        assert "restart 1 " in capsys.readouterr().out
    assert [start["first_update"] for start in read_starts(run)] == [0, 4]
    # killed at its start
    killed.mkdir()
    shutil.copy(run / "record.json", killed)
    train(config, killed, quiet=True)
    assert read_numbers(killed) == read_numbers(run)


def test_a_restart_without_a_folder_finds_the_dated_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    set_restart(monkeypatch, 0, "one")
    assert re.fullmatch(r"runs/\d{4}-[-_\d]{14}_mlp\[1\]", str(_choose_folder("mlp[1]")))
    dated_folder = Path("runs/2000-01-01_00-00-00_mlp[1]")  # the brackets must not act as a pattern
    train(load_config(str(kills.DIGITS), SETTINGS), dated_folder, quiet=True)
    set_restart(monkeypatch, 1, "one")
    assert _choose_folder("mlp[1]") == dated_folder
    set_restart(monkeypatch, 1, "two")
    assert _choose_folder("mlp[1]") != dated_folder
