"""PopVision's system trace and the folder of its profiles, by the double of Graphcore's library."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ipu_pipe.report.analysis.analyze import analyze_run
from ipu_pipe.trace.reading import read_trace
from tests.support.runs import list_faults
from tests.test_tools_analyze import run_analyze

pytest_plugins = ["poptorch_double"]  # the fixture `poptorch`


def write_trace(path: Path, updates: int = 3) -> Path:
    """A thread that compiles and makes updates, each within it an execution of PopTorch's, and one that loads data."""
    rows: list[Any] = [[1, "PopTorch", "compile", 0, 5000, []]]
    for k in range(updates):
        at = 10_000 + 100 * k
        rows.append(
            [1, "ipu_pipe", f"update {k}", at, 90, [["PopTorch", "execute", at + 5, 80.5, []]]]
        )
    rows.append([1, "ipu_pipe", "evaluate", 20_000, 50, []])
    rows.append([2, "Loader", "batch", 10_000, 10, []])
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_system_trace_shows_our_updates_and_poptorchs_tracepoints(
    poptorch: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_trace(tmp_path / "a.pvti")
    found = analyze_run(path)
    (device,) = found["devices"]
    figures = [device[key] for key in ("covers", "busy_ns", "outside_ns")]
    assert figures == ["all IPUs", 270_000, 50_000]
    # nobody measured single IPUs
    assert found["utilization"] is found["bubble_fraction"] is found["bottleneck"] is None
    keys = ("channel", "label", "count", "total_ns")
    assert [tuple(row[key] for key in keys) for row in found["tracepoints"]] == [
        ("PopTorch", "compile", 1, 5_000_000), ("PopTorch", "execute", 3, 241_500), ("ipu_pipe", "evaluate", 1, 50_000),
        ("Loader", "batch", 1, 10_000),
    ]  # fmt: skip
    printed = run_analyze(capsys, path, "--html", tmp_path / "a.html")
    assert "all IPUs as one device" in printed and "compile" in printed
    assert "compile" in (tmp_path / "a.html").read_text()


def test_evaluations_and_checkpoints_have_the_version_of_the_updates(
    poptorch: Any, tmp_path: Path
) -> None:
    """Story: a checkpoint after an evaluation had a version more than the updates made."""
    path = write_trace(tmp_path / "a.pvti")
    path.write_text(path.read_text() + json.dumps([1, "ipu_pipe", "checkpoint", 20_100, 5, []]))
    events = read_trace(path).events
    assert [event.version for event in events.rows()] == [1, 2, 3, 3, 3]


def test_a_system_trace_of_others(poptorch: Any, tmp_path: Path) -> None:
    (tmp_path / "a.pvti").write_text(json.dumps([1, "PopTorch", "compile", 0, 5, []]))
    (fault,) = list_faults(read_trace, tmp_path / "a.pvti")
    assert "no tracepoints of ipu_pipe" in fault and "PopTorch" in fault
    (tmp_path / "b.pvti").write_text("SQLite")
    (fault,) = list_faults(read_trace, tmp_path / "b.pvti")
    assert "cannot be read by pva" in fault


def test_without_the_library(tmp_path: Path) -> None:
    (fault,) = list_faults(read_trace, write_trace(tmp_path / "a.pvti"))
    assert "not installed" in fault
    (fault,) = list_faults(read_trace, tmp_path / "none.pvti")
    assert "cannot be read" in fault


def test_the_folder_of_a_profile(
    poptorch: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("training", "inference"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "profile.pop").write_text(json.dumps({"ipus": 2, "replicas": 1}))
    content = json.loads(run_analyze(capsys, tmp_path))
    assert [Path(file).parent.name for file in content["profile"]] == ["inference", "training"]
    assert json.loads(run_analyze(capsys, tmp_path / "training"))["profile"]
