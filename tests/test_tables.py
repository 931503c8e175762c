"""Events as tables: each format holds the same rows, and what is not known is empty."""

from __future__ import annotations

import csv
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any, List, Tuple

import pytest

from ipu_pipe.trace.reading import read_trace
from ipu_pipe.trace.tables import COLUMNS, make_event_frame, write_table
from tests.test_tools_analyze import run_analyze, write_run_folder


def list_expected(run: Path) -> List[Tuple[Any, ...]]:
    return [
        tuple(None if value in (-1, "") else value for value in event)
        for event in read_trace(run).events.rows()
    ]


def test_csv_and_sqlite_hold_the_events(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run_folder(tmp_path / "run")
    for name in ("a.csv", "a.sqlite"):
        run_analyze(capsys, run, "--to", tmp_path / name)
    expected = list_expected(run)
    with (tmp_path / "a.csv").open(encoding="utf-8") as file:
        head, *rows = csv.reader(file)
    names = "stage device kind microbatch start_ns end_ns version bytes peer carries"
    assert head == names.split()
    assert rows == [["" if value is None else str(value) for value in row] for row in expected]
    with closing(sqlite3.connect(tmp_path / "a.sqlite")) as connection:
        assert connection.execute("SELECT * FROM events").fetchall() == expected
        (counters,) = connection.execute("SELECT count(*) FROM counters").fetchone()
        (busy,) = connection.execute(
            "SELECT sum(end_ns - start_ns) FROM events WHERE kind = 'forward' AND device = 1"
        ).fetchone()
    assert counters == len(read_trace(run).counters.time) and busy == 6 * 20_000_000


def test_parquet_and_data_frames(tmp_path: Path) -> None:
    run = write_run_folder(tmp_path / "run")
    trace = read_trace(run)
    parquet = pytest.importorskip("pyarrow.parquet")
    write_table(tmp_path / "a.parquet", trace)
    rows = parquet.read_table(tmp_path / "a.parquet").to_pylist()
    assert [tuple(row.values()) for row in rows] == list_expected(run)
    pytest.importorskip("pandas")
    frame = make_event_frame(trace.events)
    assert [*frame.columns] == [*COLUMNS] and len(frame) == len(rows)
    assert frame[frame.kind == "update"].peer.isna().all()
