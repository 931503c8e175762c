"""Check tools/analyze.py: its answers as text, JSON and picture, and its messages about bad
input."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict, List

import pytest

import ipu_pipe
from ipu_pipe.cli import analyze
from ipu_pipe.report.analysis import picture
from ipu_pipe.trace.events import WAIT, Counter, Counters, Event, Events
from ipu_pipe.trace.store import TraceWriter
from tests.support.runs import ROOT, list_faults

PARTS = ("busy_ns", "wait_ns", "communication_ns", "ramp_up_ns", "ramp_down_ns", "idle_ns")


def write_run_folder(path: Path, slow: int = 20, microbatches: int = 6) -> Path:
    """Write the traces of two ranks: a pass takes 2 milliseconds on the first and `slow` on the
    second. Return the folder."""
    flops = {"forward_flops": 1e6, "backward_flops": 1e6, "crossing_bytes": 8}
    metadata = {
        "method": "pipedream", "method_args": {}, "stages": 2, "accumulate": 1, "microbatches": microbatches,
        "backend": "distributed", "device_of_stage": [0, 1], "modelled": False, "planned_bubble_fraction": 0.25,
        "units": [{"name": f"layer{i}", "stage": int(i > 1), **flops} for i in range(6)],
    }  # fmt: skip
    for rank, length in ((0, 2), (1, slow)):
        events: List[Event] = []
        counters: List[Counter] = []
        for m in range(microbatches):
            at, ready, back, end = (
                1_000_000 * ms
                for ms in (
                    2 * m * slow,
                    2 * m * slow + length,
                    2 * (m + 1) * slow - length,
                    2 * (m + 1) * slow,
                )
            )
            events.append(Event(rank, rank, "forward", m, at, ready, m, None))
            events.append(Event(rank, rank, "backward", m, back, end, m, None))
            if rank == 0:
                events.append(Event(0, 0, "send", m, back, back + 1000, -1, 64, 1, "activations"))
                events.append(Event(0, 0, WAIT, m, ready, back, -1, None, 1, "gradients"))
            events.append(Event(rank, rank, "update", m, end, end, m + 1, None))
            counters.append(Counter(rank, "weights (bytes)", at, 1e6 * (rank + 1)))
        writer = TraceWriter(path / "trace" / f"rank-{rank}.trace", metadata)
        writer.write_events(Events.from_rows(events))
        writer.write_counters(Counters.from_rows(counters))
        writer.close()
    return path


def run_analyze(capsys: pytest.CaptureFixture[str], *arguments: Any) -> str:
    analyze.main([str(argument) for argument in arguments])
    return capsys.readouterr().out


def test_the_answer_comes_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = run_analyze(capsys, write_run_folder(tmp_path / "run")).splitlines()
    assert lines[0].endswith("run: pipedream, 2 stages, 2 devices, 240 ms, measured")
    assert lines[2] == "Bottleneck: stage 1 on device 1"
    assert (
        "10 times the mean of the others" in lines[3]
        and "device 0 waits for it 90.0% of the time" in lines[4]
    )
    assert "begin stage 1 at layer4 instead of layer2" in lines[6] and "predicted" in lines[6]


def test_the_json_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run_folder(tmp_path / "run")
    content: Dict[str, Any] = json.loads(run_analyze(capsys, run, "--json"))
    assert json.loads(json.dumps(ipu_pipe.analyze_run(run))) == content
    for device in content["devices"]:
        assert sum(device[part] for part in PARTS) == content["span_ns"] == 240_000_000
    assert content["devices"][0]["waits_for"] == {"1": 216_000_000}
    assert content["utilization"] + content["bubble_fraction"] == pytest.approx(1)
    assert content["modelled"] is False and content["bottleneck"]["gain"] > 0.2
    link = {"src": 0, "dst": 1, "bytes": 64 * 6, "messages": 6}
    assert link.items() <= content["links"][0].items()
    assert [memory["peak_bytes"] for memory in content["memory"]] == [1_000_000, 2_000_000]


def test_two_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = write_run_folder(tmp_path / "one"), write_run_folder(tmp_path / "two", slow=10)
    lines = [
        " ".join(line.split()) for line in run_analyze(capsys, one, "--against", two).splitlines()
    ]
    assert "not known" in lines[2] and "span 240 ms 120 ms +100.0%" in lines
    assert "stage 1, per microbatch 40 ms 20 ms +100.0%" in lines
    for run, rate in ((one, 0.1), (two, 0.2)):
        (run / "config.yaml").write_text(f"method: pipedream\noptimizer: {{lr: {rate}}}\n")
    assert "optimizer.lr: 0.1 | 0.2\n" in run_analyze(capsys, one, "--against", two)
    assert ": none\n" in run_analyze(capsys, one, "--against", one)
    content = json.loads(run_analyze(capsys, one, "--against", two, "--json"))
    assert content["against"]["other"]["span_ns"] == 120_000_000
    row = {"name": "span_ns", "this": 240_000_000, "other": 120_000_000, "difference": 120_000_000}
    assert row in content["against"]["differences"]


def test_a_picture_and_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    run, made = write_run_folder(tmp_path / "run $x_1$"), tmp_path / "made"
    run_analyze(capsys, run, "--png", made / "a.png", "--html", made / "a.html")
    assert (made / "a.png").read_bytes().startswith(b"\x89PNG")
    assert (made / "a.html").read_text(encoding="utf-8").startswith("<!doctype html>")


def test_a_window_of_many_events_is_drawn() -> None:
    rows = [(d, m) for m in range(10_000) for d in range(4)]
    events = Events.from_rows(
        Event(d, d, "forward", m, 10 * m, 10 * m + 9, 0, None) for d, m in rows
    )
    begin, end = picture.choose_window(events)
    inside = ((events.start < end) & (events.end > begin)).sum()
    assert begin < 50_000 < end
    assert 4 * picture.MOST_EVENTS_PER_DEVICE - 8 <= inside <= picture.MOST_EVENTS
    assert picture.choose_window(events.select(slice(0, 40))) == (0, 99)


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
        ("run --html", "expected one argument"),
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


def test_exit_codes(tmp_path: Path) -> None:
    (tmp_path / "cut.json").write_text('{"traceEvents": [{"ph": "X"')
    command = [sys.executable, str(ROOT / "tools" / "analyze.py"), "cut.json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith("error: cut.json: cannot be read as a Chrome trace: ")


@pytest.mark.slow
def test_the_benchmark_runs() -> None:
    options = "tools/bench_analyze.py --events 5600 --foreign 200 --json".split()
    command = [sys.executable, *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert [row["events"] for row in json.loads(done.stdout)] == [5600, 200]
