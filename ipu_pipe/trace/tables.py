"""Events as a table for other programs: one row an event, in CSV, SQLite or Parquet.

The columns are those of `Event`; what is not known is empty. CSV and SQLite need no other package,
Parquet needs pyarrow, and data frames need pandas.
"""

from __future__ import annotations

import csv
import importlib
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any, Iterator, Mapping, Sequence

import numpy as np

from ipu_pipe.errors import BadInput
from ipu_pipe.files import atomic_file
from ipu_pipe.trace.events import KINDS, PAYLOADS, Counters, Events, Trace

# column, its type in SQLite, and its meaning
COLUMNS = {
    "stage": "INTEGER",
    "device": "INTEGER NOT NULL",
    "kind": "TEXT NOT NULL",
    "microbatch": "INTEGER",
    "start_ns": "INTEGER NOT NULL",
    "end_ns": "INTEGER NOT NULL",
    "version": "INTEGER",
    "bytes": "INTEGER",
    "peer": "INTEGER",
    "carries": "TEXT",
}
# columns of which -1 means that they are not known
_OPTIONAL = ("stage", "microbatch", "version", "bytes", "peer")
ROWS_AT_ONCE = 1 << 16


def write_table(path: Path, trace: Trace) -> None:
    """Write the events of a trace; the suffix of the file says the format. Raise `BadInput` if a
    package for it is missing, and `RunFault` if the disk refuses.
    """
    write = {".csv": _write_csv, ".sqlite": _write_sqlite, ".parquet": _write_parquet}[path.suffix]
    with atomic_file(path, "the table") as temporary:
        write(temporary, trace)


def _list_rows(events: Events) -> Iterator[tuple[Any, ...]]:
    """Yield the rows of a table, with None for what is not known."""
    for begin in range(0, len(events.start), ROWS_AT_ONCE):
        part = events.select(slice(begin, begin + ROWS_AT_ONCE))
        values = []
        for name in COLUMNS:
            column = getattr(part, name.replace("_ns", ""))
            # Python's integers, because sqlite3 stores those of NumPy as bytes
            cells: list[Any] = column.tolist()
            if name in _OPTIONAL:
                cells = [None if value < 0 else value for value in cells]
            elif name == "kind":
                cells = [KINDS[code] for code in cells]
            elif name == "carries":
                cells = [PAYLOADS[code] or None for code in cells]
            values.append(cells)
        yield from zip(*values)


def _write_csv(path: Path, trace: Trace) -> None:
    # the csv module writes the ends of lines itself
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        writer.writerows(_list_rows(trace.events))


def _write_sqlite(path: Path, trace: Trace) -> None:
    columns = ", ".join(f"{name} {kind}" for name, kind in COLUMNS.items())
    # a process that was killed may have left a part, in which the table would exist already
    path.unlink(missing_ok=True)
    # the connection's own context commits, but does not close
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(f"CREATE TABLE events ({columns})")
        marks = ", ".join("?" * len(COLUMNS))
        connection.executemany(f"INSERT INTO events VALUES ({marks})", _list_rows(trace.events))
        connection.execute(
            "CREATE TABLE counters (device INTEGER, name TEXT, time_ns INTEGER, value REAL)"
        )
        connection.executemany("INSERT INTO counters VALUES (?, ?, ?, ?)", trace.counters.rows())


def _write_parquet(path: Path, trace: Trace) -> None:
    pyarrow = _import("pyarrow", "--to FILE.parquet")
    table = pyarrow.table({name: _make_arrow(pyarrow, name, trace.events) for name in COLUMNS})
    importlib.import_module("pyarrow.parquet").write_table(table, path)


def _make_arrow(pyarrow: Any, name: str, events: Events) -> Any:
    column = getattr(events, name.replace("_ns", ""))
    names = {"kind": KINDS, "carries": PAYLOADS}.get(name)
    if names is not None:
        texts = np.array([text or None for text in names], object)[column]
        return pyarrow.array(texts, pyarrow.string())
    return pyarrow.array(column, mask=column < 0 if name in _OPTIONAL else None)


def make_event_frame(events: Events) -> Any:
    """Return a data frame of pandas with a row for each event. Raise `BadInput` without pandas."""
    pandas = _import("pandas", "a data frame")
    frame = pandas.DataFrame({name: getattr(events, name.replace("_ns", "")) for name in COLUMNS})
    for name in _OPTIONAL:
        # the nullable type: a missing value would turn an int64 column into floats
        frame[name] = frame[name].astype("Int64").mask(frame[name] < 0)
    for name, texts in (("kind", KINDS), ("carries", PAYLOADS)):
        frame[name] = pandas.Categorical.from_codes(frame[name], list(texts))
    return frame


def make_counter_frame(counters: Counters) -> Any:
    """Return a data frame of pandas with one row a value. Raise `BadInput` if pandas is missing."""
    pandas = _import("pandas", "a data frame")
    columns = counters._asdict()
    return pandas.DataFrame(
        {("time_ns" if name == "time" else name): column for name, column in columns.items()}
    )


def make_frame(rows: Sequence[Mapping[str, Any]]) -> Any:
    """Return a data frame of pandas with one row each. Raise `BadInput` if pandas is missing."""
    return _import("pandas", "a data frame").DataFrame([*rows])


def _import(package: str, what: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError:
        raise BadInput(f"{what}: needs {package}: pip install {package}") from None
