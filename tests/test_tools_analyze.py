"""Check tools/analyze.py: its answers as text, JSON and picture, and its messages about bad
input."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict

import numpy as np
import pytest

import ipu_pipe
from ipu_pipe.cli import analyze
from ipu_pipe.report.analysis import picture
from ipu_pipe.schedule.clock import Costs
from ipu_pipe.trace.events import Counter, Events
from tests.support.modelled import play_method
from tests.support.runs import ROOT, list_faults
from tests.test_trace_store import write_trace


def write_run_folder(path: Path, slow: int = 20) -> Path:
    """Write the traces of two ranks of PipeDream: a pass takes 2 milliseconds on the first and
    `slow` on the second. Return the folder."""
    costs = Costs([2.0, slow], [2.0, slow], [0.0, 0.0])
    played = play_method("pipedream", 2, 6, 1, costs, unit_ns=1e6, boundary_bytes=[64])
    flops = {"forward_flops": 1e6, "backward_flops": 1e6, "crossing_bytes": 8}
    metadata = {
        "method": "pipedream", "method_args": {}, "stages": 2, "accumulate": 1, "microbatches": 6,
        "backend": "distributed", "device_of_stage": [0, 1], "modelled": False, "planned_bubble_fraction": 0.25,
        "units": [{"name": f"layer{i}", "stage": int(i > 1), **flops} for i in range(6)],
    }  # fmt: skip
    for rank in (0, 1):
        events = [event for event in played.rows if event.device == rank]
        counters = [Counter(rank, "weights (bytes)", 0, 1e6 * (rank + 1))]
        write_trace(path / "trace" / f"rank-{rank}.trace", events, counters, **metadata)
    return path


def run_analyze(capsys: pytest.CaptureFixture[str], *arguments: Any) -> str:
    analyze.main([str(argument) for argument in arguments])
    return capsys.readouterr().out


def test_the_answer_comes_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = run_analyze(capsys, write_run_folder(tmp_path / "run")).splitlines()
    assert lines[2] == "Bottleneck: stage 1 on device 1"
    assert "10 times " in lines[3] and " device 0 waits for it 90.2% " in lines[4]
    assert " stage 1 at layer4 instead of layer2" in lines[6]


def test_the_json_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run_folder(tmp_path / "run")
    content: Dict[str, Any] = json.loads(run_analyze(capsys, run, "--json"))
    assert json.loads(json.dumps(ipu_pipe.analyze_run(run))) == content
    assert content["span_ns"] == 244_000_000
    assert content["devices"][0]["waits_for"] == {"1": 220_000_000}
    assert content["utilization"] + content["bubble_fraction"] == pytest.approx(1)
    assert content["stages"][0]["of_greatest"] == pytest.approx(0.1)
    assert content["imbalance"] == pytest.approx(0.45)
    assert content["modelled"] is False and content["bottleneck"]["gain"] > 0.2
    link = {"src": 0, "dst": 1, "bytes": 64 * 6, "messages": 6}
    assert link.items() <= content["links"][0].items()
    assert [memory["peak_bytes"] for memory in content["memory"]] == [1_000_000, 2_000_000]


def test_two_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = write_run_folder(tmp_path / "one"), write_run_folder(tmp_path / "two", slow=10)
    words = run_analyze(capsys, one, "--against", two).split()
    assert "not known" in " ".join(words) and "span 244 ms 124 ms +96.8%" in " ".join(words)
    for run, rate in ((one, 0.1), (two, 0.2)):
        (run / "config.yaml").write_text(f"method: pipedream\noptimizer: {{lr: {rate}}}\n")
    assert "optimizer.lr: 0.1 | 0.2\n" in run_analyze(capsys, one, "--against", two)
    assert ": none\n" in run_analyze(capsys, one, "--against", one)
    content = json.loads(run_analyze(capsys, one, "--against", two, "--json"))
    assert content["against"]["other"]["span_ns"] == 124_000_000
    row = {"name": "span_ns", "this": 244_000_000, "other": 124_000_000, "difference": 120_000_000}
    assert row in content["against"]["differences"]


def test_a_picture_and_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    run, made = write_run_folder(tmp_path / "run $x_1$"), tmp_path / "made"
    run_analyze(capsys, run, "--png", made / "a.png", "--html", made / "a.html")
    assert (made / "a.png").read_bytes().startswith(b"\x89PNG")
    assert (made / "a.html").read_text(encoding="utf-8").startswith("<!doctype html>")


def test_a_window_of_many_events_is_drawn() -> None:
    columns = {"start": 10 * np.arange(40_000), "end": 10 * np.arange(40_000) + 9}
    events = Events.from_columns(40_000, **columns, device=0, stage=0, kind=0, microbatch=0)
    begin, end = picture.choose_window(events)
    inside = ((events.start < end) & (events.end > begin)).sum()
    assert begin < 200_000 < end and 0 < inside <= picture.MOST_EVENTS_PER_DEVICE
    assert picture.choose_window(events.select(slice(0, 40))) == (0, 399)


@pytest.mark.parametrize(
    "options, message",
    [
        ("nothing", "nothing: no such run or trace"),
        ("run --against words", "words: "),
        ("run --png run", "--png: run: is a folder"),
        ("run --to a.xlsx", ".parquet"),
        ("profile.pop", "which is not installed"),
        ("none/profile.pop", "no such profile"),
        ("profile.pop --html a.html", "--html: goes with a trace; profile.pop has no events"),
        ("", "RUN"),
    ],
)
def test_bad_input(
    options: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_run_folder(tmp_path / "run")
    (tmp_path / "words").write_text("hello")
    (tmp_path / "profile.pop").write_bytes(b"\0")
    (fault,) = list_faults(analyze.main, options.split())
    assert message in fault


@pytest.mark.slow
def test_the_benchmark_runs() -> None:
    options = "tools/bench_analyze.py --events 5600 --foreign 200 --json".split()
    command = [sys.executable, *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert [row["events"] for row in json.loads(done.stdout)] == [5600, 200]
