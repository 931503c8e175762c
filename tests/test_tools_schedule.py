"""Check tools/schedule.py: its output and its refusals."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Callable

import pytest

from ipu_pipe.cli import schedule
from tests.command_line import CommandResult, run_here
from tests.support.runs import ROOT

ScheduleCommand = Callable[..., CommandResult]


@pytest.fixture
def run_schedule(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> ScheduleCommand:
    """Return a function that runs `schedule` with the words of a text as arguments."""
    return lambda words: run_here(schedule, *words.split(), monkeypatch=monkeypatch, capsys=capsys)


@pytest.mark.parametrize(
    ("tool", "words", "fault"),
    [
        ("schedule.py", "gpipe --stages 1 --microbatches 0", "microbatches: 0: "),
        pytest.param("analyze.py", "gone", "gone: ", marks=pytest.mark.slow),
    ],
)
def test_as_a_command_from_another_folder(
    tool: str, words: str, fault: str, tmp_path: Path
) -> None:
    command = [sys.executable, str(ROOT / "tools" / tool), *words.split()]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=str(tmp_path))
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith(f"error: {fault}")


def test_the_json_output_of_a_schedule(run_schedule: ScheduleCommand) -> None:
    completed = run_schedule("pipelined_backprop --stages 2 --microbatches 3 --format json")
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
    ("method", "accumulate", "flushes"),
    [("naive", 1, True), ("gpipe", 8, True), ("pipedream", 1, False), ("pipedream_2bw", 4, False)],
)
def test_default_accumulate(
    run_schedule: ScheduleCommand, method: str, accumulate: int, flushes: bool
) -> None:
    completed = run_schedule(f"{method} --stages 4 --microbatches 8 --format json")
    description = json.loads(completed.stdout)
    assert description["accumulate"] == accumulate
    assert (description["max_delay"] is None) == (description["mean_delay"] is None) == flushes


def test_text_draws_the_timeline_and_sums_it_up(run_schedule: ScheduleCommand) -> None:
    lines = run_schedule("pipedream --stages 3 --microbatches 4").stdout.splitlines()
    assert (
        "stage 1  .   F0  F1  F2  B0* .   B1* F3  B2* .   B3* ." in lines and "slots: 12" in lines
    )
    # of a large schedule the beginning
    large = run_schedule("gpipe --stages 200 --microbatches 5000 --accumulate 50").stdout
    assert "(slots 0 to 119 of 49800, 64 of 200 stages shown)" in large and large.count("\n") < 150
    part = run_schedule("gpipe --stages 2 --microbatches 50 --slots 100:102")
    assert "slot     100  101" in part.stdout.splitlines()


def test_csv(run_schedule: ScheduleCommand) -> None:
    completed = run_schedule("gpipe --stages 2 --microbatches 2 --format csv")
    assert completed == (0, "0F0,0F1,,,0B0,0B1\n,1F0,1F1,1B0,1B1,\n", "")
    several = run_schedule("gpipe --stages 1 --microbatches 2 --accumulate 1 --format csv")
    assert several.stdout == "0F0,0B0,0F1,0B1\n"
    assert several.stderr.startswith("note: the rows contain several batches")


def test_method_arguments_reach_the_schedule(run_schedule: ScheduleCommand) -> None:
    def describe(words: str) -> Any:
        return json.loads(run_schedule(f"{words} --stages 3 --microbatches 8 --format json").stdout)

    stashed = describe("pipelined_backprop --stash true")
    assert stashed["weight_copies"] == [5, 3, 1]
    assert stashed["backward_version"] == stashed["forward_version"]
    assert describe("pipedream --schedule dataflow --turn 1")["slots"] == 8 + 2 * 2 + 1
    assert describe("pipemare --drains 4")["forward_version"][0][4] == 4


@pytest.mark.parametrize("words, error", [
    ("pipdream --stages 2 --microbatches 2", "method: pipdream: "),
    ("pipedream_2bw --stages 4 --microbatches 8 --accumulate 3", "accumulate: 3: "),
    ("pipedream --stages 2 --microbatches 2 --accumulate 0", "accumulate: 0: "),
    ("gpipe --stages two --microbatches 2", "--stages: "),
    ("gpipe --stages 2", "the following arguments are required: --microbatches"),
    ("gpipe --stages 2 --microbatches 2 --format xml", "--format: "),
    ("gpipe --stages 2 --microbatches 2 --stash true", "method_args.stash: true: "),
    ("pipedream --stages 2 --microbatches 3 --format csv", "format: csv: "),
    ("pipemare --stages 2 --microbatches 3 --drains 9", "drains: 9: "),
    ("pipemare --stages 2 --microbatches 3 --slots 50:60", "--slots: 50:60: "),
    ("pipemare --stages 2 --microbatches 3 --slots 5", "--slots: "),
    # numbers that would take for ever
    ("pipedream --stages 2147483648 --microbatches 4", "--stages: 2147483648: "),
    ("gpipe --stages 4 --microbatches 2147483648", "--microbatches: 2147483648: "),
    ("gpipe --stages 4 --microbatches 1000000 --format json", "--microbatches: 1000000: "),
    ("gpipe --stages 4 --microbatches 8 --slots 0:100000000000000000000", "--slots: "),
    ("pipedream --stages 4 --microbatches 8 --work 1,1", "--work: 1,1: "),
])  # fmt: skip
def test_bad_input_is_reported_in_one_line(
    run_schedule: ScheduleCommand, words: str, error: str
) -> None:
    completed = run_schedule(words)
    assert (completed.returncode, completed.stdout) == (2, "")
    (line,) = completed.stderr.splitlines()
    assert line.startswith("error: " + error)
