"""Measure the processor time of each test, and list the dear cases that `make test` leaves out.

    python -m pytest -n 2 -m 'not browser' -p tests.seconds

writes tests/dear_cases.txt; if files are named, their cases alone are written anew. A case is dear if it takes more than
0.1 seconds of processor time, its processes counted; of each function the cheapest case stays, unless it takes more
than half a second. A case that found a fault of tests/mutants stays always. tests/conftest.py marks the listed cases
slow. A case that was renamed runs again with the others.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
from collections import defaultdict
from pathlib import Path
from typing import Dict, FrozenSet, Iterator, List

import pytest

FILE = Path(__file__).with_name("dear_cases.txt")
FAULTS = Path(__file__).with_name("mutants") / "results.json"
DEAR = 0.1
# what even the only case of a function may take
DEAREST = 0.5

_seconds: Dict[str, float] = {}


@functools.lru_cache(maxsize=None)
def read_dear_cases() -> FrozenSet[str]:
    """Return the node ids of the dear cases."""
    return frozenset(FILE.read_text(encoding="utf-8").splitlines() if FILE.exists() else [])


def _read_processor_seconds() -> float:
    """Return the time of this process and of all that it has started, on Linux also of those that it has not waited for:
    the server that forks commands ends last."""
    times = os.times()
    ticks = {}
    parents = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        # a process may end meanwhile
        with contextlib.suppress(OSError):
            # after the name of the command, which may have spaces
            fields = file.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            parents[int(file.parent.name)] = int(fields[1])
            ticks[int(file.parent.name)] = sum(map(int, fields[11:15]))
    here = {os.getpid()}
    while grown := {one for one, parent in parents.items() if parent in here} - here:
        here |= grown
    below = sum(ticks.get(one, 0) for one in here - {os.getpid()}) / os.sysconf("SC_CLK_TCK")
    return times.user + times.system + times.children_user + times.children_system + below


@pytest.hookimpl(hookwrapper=True, tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo) -> Iterator[None]:
    """Attach the seconds of a test to its last report, which comes here from all workers."""
    report = (yield).get_result()
    if call.when == "setup":
        item.stash[_BEGIN] = _read_processor_seconds()
    elif call.when == "teardown" and not _is_slow_by_itself(item):
        seconds = _read_processor_seconds() - item.stash[_BEGIN]
        report.user_properties.append(("processor_seconds", seconds))


_BEGIN = pytest.StashKey[float]()


def _is_slow_by_itself(item: pytest.Item) -> bool:
    """Return whether a test is marked where it stands, and not by the list."""
    return len(list(item.iter_markers("slow"))) > (item.nodeid in read_dear_cases())


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Collect the seconds of a test."""
    for name, value in report.user_properties:
        if name == "processor_seconds":
            _seconds[report.nodeid] = value


def read_kept_cases() -> FrozenSet[str]:
    """Return the node ids of the cases that found a fault of tests/mutants."""
    results = json.loads(FAULTS.read_text(encoding="utf-8")) if FAULTS.exists() else {}
    return frozenset(result["killed_by"] for result in results.values())


def choose_dear_cases(seconds: Dict[str, float], kept: FrozenSet[str]) -> List[str]:
    """Return the cases, by their seconds, that are dear, without those that are `kept`."""
    by_function: Dict[str, List[str]] = defaultdict(list)
    for case in sorted(seconds, key=lambda case: (seconds[case], case)):
        by_function[case.partition("[")[0]].append(case)
    return sorted(
        case
        for cases in by_function.values()
        for number, case in enumerate(cases)
        if case not in kept and seconds[case] > (DEAR if number else DEAREST)
    )


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the list, in the process that has started the workers."""
    if not hasattr(session.config, "workerinput") and _seconds:
        files = {case.partition("::")[0] for case in _seconds}
        elsewhere = {case for case in read_dear_cases() if case.partition("::")[0] not in files}
        dear_cases = choose_dear_cases(_seconds, read_kept_cases())
        FILE.write_text("\n".join(sorted({*dear_cases, *elsewhere})) + "\n", encoding="utf-8")
        left = sum(_seconds.values()) - sum(map(_seconds.__getitem__, dear_cases))
        print(
            f"\n{len(dear_cases)} of {len(_seconds)} cases are dear; the others take {left:.0f} s"
        )
