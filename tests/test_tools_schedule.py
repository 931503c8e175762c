"""Check tools/schedule.py: its output and its refusals."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from pathlib import Path
from typing import Callable, List

import pytest

from ipu_pipe.cli import schedule
from tests.command_line import CommandResult, run_here

TOOL = Path(__file__).resolve().parents[1] / "tools" / "schedule.py"


ScheduleCommand = Callable[..., CommandResult]


@pytest.fixture
def run_schedule(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> ScheduleCommand:
    """Return a function that runs `schedule` with arguments."""
    return functools.partial(run_here, schedule, monkeypatch=monkeypatch, capsys=capsys)


def test_as_a_command_from_another_folder(tmp_path: Path) -> None:
    command = [sys.executable, str(TOOL), "gpipe", "--stages", "1", "--microbatches", "0"]
    completed = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=str(tmp_path)
    )
    assert (completed.returncode, completed.stdout) == (2, "")
    assert (
        completed.stderr.startswith("error: microbatches: 0: ")
        and completed.stderr.count("\n") == 1
    )


def test_the_json_output_of_a_schedule(run_schedule: ScheduleCommand) -> None:
    completed = run_schedule(
        "pipelined_backprop", "--stages", 2, "--microbatches", 3, "--format", "json"
    )
    assert (completed.returncode, completed.stderr) == (0, "")
    assert json.loads(completed.stdout) == {
        "method": "pipelined_backprop",
        "stages": 2,
        "microbatches": 3,
        "accumulate": 1,
        "slots": 5,
        "rows": [["F0", "F1", "F2 B0", "B1", "B2"], [None, "F0 B0", "F1 B1", "F2 B2", None]],
        "utilization": 1.0,
        "forward_version": [[0, 0, 0], [0, 1, 2]],
        "backward_version": [[0, 1, 2], [0, 1, 2]],
        "updates": [[[2, 0], [3, 1], [4, 2]], [[1, 0], [2, 1], [3, 2]]],
        "max_in_flight": [3, 1],
        "weight_copies": [1, 1],
        "max_delay": 4,
        "mean_delay": 1.75,
    }


@pytest.mark.parametrize(
    ("method", "accumulate"),
    [
        ("naive", 1),
        ("gpipe", 8),
        ("pipedream_flush", 8),
        ("pipedream", 1),
        ("pipedream_2bw", 4),
        ("pipemare", 1),
    ],
)
def test_default_accumulate(run_schedule: ScheduleCommand, method: str, accumulate: int) -> None:
    description = json.loads(
        run_schedule(method, "--stages", 4, "--microbatches", 8, "--format", "json").stdout
    )
    assert description["accumulate"] == accumulate
    assert (
        (description["max_delay"] is None)
        == (description["mean_delay"] is None)
        == (method in _FLUSHING)
    )


_FLUSHING = ("naive", "gpipe", "pipedream_flush")


def test_text_draws_the_timeline_and_sums_it_up(run_schedule: ScheduleCommand) -> None:
    completed = run_schedule("pipedream", "--stages", 3, "--microbatches", 4)
    assert (completed.returncode, completed.stderr) == (0, "")
    for line in (
        "stage 1  .   F0  F1  F2  B0* .   B1* F3  B2* .   B3* .",
        "slots: 12",
        "utilization: 1 in the steady state, 0.6667 over this run",
    ):
        assert line in completed.stdout.splitlines()


@pytest.mark.parametrize(
    "method, symbols", [("zb_h1", "IW="), ("dualpipe_v", "IW=@"), ("pipedream", "")]
)
def test_the_legend_explains_every_symbol_of_the_drawing(
    method: str, symbols: str, run_schedule: ScheduleCommand
) -> None:
    legend = (
        run_schedule(method, "--stages", 4, "--microbatches", 8)
        .stdout.partition("F forward, B backward")[2]
        .partition("*")[0]
    )
    for symbol, words in (
        ("I", "I input gradient"),
        ("W", "W weight gradient"),
        ("=", "= the second"),
        ("@", "@s of stage"),
    ):
        assert (words in legend) is (symbol in symbols), (symbol, legend)


def test_text_of_a_large_schedule_prints_and_mentions_its_beginning(
    run_schedule: ScheduleCommand,
) -> None:
    completed = run_schedule("gpipe", "--stages", 200, "--microbatches", 5000, "--accumulate", 50)
    assert "(slots 0 to 119 of 49800, 64 of 200 stages shown)" in completed.stdout.splitlines()
    assert len(completed.stdout.splitlines()) < 150
    part = run_schedule("gpipe", "--stages", 2, "--microbatches", 50, "--slots", "100:102")
    assert "slot     100  101" in part.stdout.splitlines()


def test_csv(run_schedule: ScheduleCommand) -> None:
    completed = run_schedule("gpipe", "--stages", 2, "--microbatches", 2, "--format", "csv")
    assert (completed.returncode, completed.stdout, completed.stderr) == (
        0,
        "0F0,0F1,,,0B0,0B1\n,1F0,1F1,1B0,1B1,\n",
        "",
    )
    several = run_schedule(
        "gpipe", "--stages", 1, "--microbatches", 2, "--accumulate", 1, "--format", "csv"
    )
    assert several.stdout == "0F0,0B0,0F1,0B1\n" and several.stderr.startswith(
        "note: the rows contain several batches"
    )


def test_method_arguments_reach_the_schedule(run_schedule: ScheduleCommand) -> None:
    options = ["--stages", 3, "--microbatches", 8, "--format", "json"]
    stashed = json.loads(run_schedule("pipelined_backprop", *options, "--stash", "true").stdout)
    assert (
        stashed["weight_copies"] == [5, 3, 1]
        and stashed["backward_version"] == stashed["forward_version"]
    )
    turned = json.loads(
        run_schedule("pipedream", *options, "--schedule", "dataflow", "--turn", 1).stdout
    )
    assert turned["slots"] == 8 + 2 * 2 + 1
    drained = json.loads(run_schedule("pipemare", *options, "--drains", 4).stdout)
    assert drained["forward_version"][0][4] == 4


@pytest.mark.parametrize("arguments, errors", [
    (["pipdream", "--stages", "2", "--microbatches", "2"], ["method: pipdream: "]),
    (["gpipe", "--stages", "0", "--microbatches", "-3"], ["stages: 0: must be", "microbatches: -3: must be"]),
    (["pipedream_2bw", "--stages", "4", "--microbatches", "8", "--accumulate", "3"], ["accumulate: 3: pipedream"]),
    (["pipedream", "--stages", "2", "--microbatches", "2", "--accumulate", "0"], ["accumulate: 0: "]),
    (["gpipe", "--stages", "two", "--microbatches", "2"], ["--stages: "]),
    (["gpipe", "--stages", "2"], ["the following arguments are required: --microbatches"]),
    (["gpipe", "--stages", "2", "--microbatches", "2", "--format", "xml"], ["--format: "]),
    (["gpipe", "--stages", "2", "--microbatches", "2", "--stash", "true"], ["method_args.stash: true: "]),
    (["pipedream", "--stages", "2", "--microbatches", "3", "--format", "csv"], ["format: csv: PyTorch"]),
    (["pipemare", "--stages", "2", "--microbatches", "3", "--drains", "9"], ["drains: 9: must be a multiple"]),
    (["pipemare", "--stages", "2", "--microbatches", "3", "--slots", "50:60"], ["--slots: 50:60: the schedule"]),
    (["pipemare", "--stages", "2", "--microbatches", "3", "--slots", "5"], ["--slots: "]),
])  # fmt: skip
def test_bad_input_is_reported_in_one_line_a_fault(
    run_schedule: ScheduleCommand, arguments: List[str], errors: List[str]
) -> None:
    completed = run_schedule(*arguments)
    assert completed.returncode == 2 and completed.stdout == ""
    lines = completed.stderr.splitlines()
    assert len(lines) == len(errors)
    for line, error in zip(lines, errors):
        assert line.startswith("error: " + error)


@pytest.mark.parametrize("arguments, key", [
    (["pipedream", "--stages", 2**31, "--microbatches", 4], "--stages: 2147483648: "),
    (["gpipe", "--stages", 4, "--microbatches", 2**31], "--microbatches: 2147483648: "),
    (["gpipe", "--stages", 4, "--microbatches", 10**6, "--format", "json"], "--microbatches: 1000000: "),
    (["gpipe", "--stages", 4, "--microbatches", 8, "--slots", f"0:{10**20}"], "--slots: "),
    (["pipedream", "--stages", 4, "--microbatches", 8, "--work", "1,1"], "--work: 1,1: "),
])  # fmt: skip
def test_numbers_that_would_take_for_ever_are_refused(
    run_schedule: ScheduleCommand, arguments: List[object], key: str
) -> None:
    completed = run_schedule(*arguments)
    assert (completed.returncode, completed.stdout) == (2, "")
    assert completed.stderr.startswith(f"error: {key}") and completed.stderr.count("\n") == 1
