"""Measure the processor time of each test, and list those that run less often.

    python -m pytest -n 2 -m 'not browser' -p tests.seconds

writes two lists, which tests/conftest.py reads; if files are named, only their cases are written anew.

- tests/dear_cases.txt, marked slow: `make test` leaves them out. A case is dear if it takes more than 0.1 seconds of
  processor time, its processes counted; of each function the cheapest case stays, unless it takes more than half a
  second. A case that found a fault of tests/mutants stays always.
- tests/nightly_cases.txt, marked nightly: `make test-slow` leaves them out. These are the slow cases that take more than
  half a second beside a cheaper one of their function, and all of more than ten seconds. Of the functions of COMMON the
  cheapest case stays.

A case that was renamed runs again with the others.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
from collections import defaultdict
from pathlib import Path
from typing import Dict, FrozenSet, Iterator, List, Mapping, Set

import pytest

FILE = Path(__file__).with_name("dear_cases.txt")
NIGHTLY_FILE = Path(__file__).with_name("nightly_cases.txt")
FAULTS = Path(__file__).with_name("mutants") / "results.json"
DEAR = 0.1
# what even the only case of a function may take
DEAREST = 0.5
# `make test-slow` takes eleven minutes with these
NIGHTLY = 0.5
NIGHTLIEST = 10.0
# no quicker test does what these do
COMMON = (
    "tests/test_families.py::test_two_processes_do_what_the_page_says",
    "tests/test_first_hour.py::test_each_step_of_a_guide_says_what_the_page_shows",
    "tests/test_first_hour.py::test_readmes_commands_work_in_an_empty_home",
    "tests/test_measures.py::test_each_measure_writes_its_results",
    "tests/test_mesh.py::test_a_mesh_gives_the_emulators_weights",
    "tests/test_mesh.py::test_a_state_goes_from_the_emulator_to_a_mesh_and_back",
    "tests/test_poptorch_starts.py::test_a_config_trains_saves_and_resumes_on_the_double",
    "tests/test_processes.py::test_two_nodes_give_the_emulators_weights_and_all_outputs",
    "tests/test_seam.py::test_walks_on_two_ranks_have_the_weights_of_the_literal_replay",
    "tests/test_simulation.py::test_a_rank_may_be_lost_at_any_call",
)

_seconds: Dict[str, float] = {}
# the cases that are marked slow where they stand
_marked: Set[str] = set()


@functools.lru_cache(maxsize=None)
def read_cases(file: Path) -> FrozenSet[str]:
    """Return the node ids in a list of cases."""
    return frozenset(file.read_text(encoding="utf-8").splitlines() if file.exists() else [])


def read_dear_cases() -> FrozenSet[str]:
    """Return the node ids of the dear cases."""
    return read_cases(FILE)


def read_nightly_cases() -> FrozenSet[str]:
    """Return the node ids of the nightly cases."""
    return read_cases(NIGHTLY_FILE)


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
    elif call.when == "teardown":
        seconds = _read_processor_seconds() - item.stash[_BEGIN]
        report.user_properties.append(("processor_seconds", seconds))
        report.user_properties.append(("is_marked_slow", _is_slow_by_itself(item)))


_BEGIN = pytest.StashKey[float]()


def _is_slow_by_itself(item: pytest.Item) -> bool:
    """Return whether a test is marked where it stands, and not by the list."""
    return len(list(item.iter_markers("slow"))) > (item.nodeid in read_dear_cases())


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Collect the seconds of a test."""
    for name, value in report.user_properties:
        if name == "processor_seconds":
            _seconds[report.nodeid] = value
        elif name == "is_marked_slow" and value:
            _marked.add(report.nodeid)


def read_kept_cases() -> FrozenSet[str]:
    """Return the node ids of the cases that found a fault of tests/mutants."""
    results = json.loads(FAULTS.read_text(encoding="utf-8")) if FAULTS.exists() else {}
    return frozenset(result["killed_by"] for result in results.values())


def _sort_by_function(seconds: Mapping[str, float]) -> List[List[str]]:
    """Return the cases of each function, the cheapest first."""
    by_function: Dict[str, List[str]] = defaultdict(list)
    for case in sorted(seconds, key=lambda case: (seconds[case], case)):
        by_function[case.partition("[")[0]].append(case)
    return list(by_function.values())


def choose_dear_cases(seconds: Mapping[str, float], kept: FrozenSet[str]) -> FrozenSet[str]:
    """Return the cases, by their seconds, that are dear, without those that are `kept`."""
    return frozenset(
        case
        for cases in _sort_by_function(seconds)
        for number, case in enumerate(cases)
        if case not in kept and seconds[case] > (DEAR if number else DEAREST)
    )


def choose_nightly_cases(seconds: Mapping[str, float]) -> FrozenSet[str]:
    """Return the cases, by the seconds of all slow ones, that only `make test-all` runs."""
    return frozenset(
        case
        for cases in _sort_by_function(seconds)
        for number, case in enumerate(cases)
        if seconds[case] > (NIGHTLY if number else NIGHTLIEST)
        and (number or not case.startswith(COMMON))
    )


def _write_cases(file: Path, cases: FrozenSet[str]) -> None:
    """Write a list of cases. Those of files that were not measured stay in it."""
    measured = {case.partition("::")[0] for case in _seconds}
    others = {case for case in read_cases(file) if case.partition("::")[0] not in measured}
    file.write_text("\n".join(sorted(cases | others)) + "\n", encoding="utf-8")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the lists, in the process that has started the workers."""
    if hasattr(session.config, "workerinput") or not _seconds:
        return
    unmarked = {case: _seconds[case] for case in _seconds.keys() - _marked}
    dear = choose_dear_cases(unmarked, read_kept_cases())
    nightly = choose_nightly_cases({case: _seconds[case] for case in dear | _marked})
    _write_cases(FILE, dear)
    _write_cases(NIGHTLY_FILE, nightly)
    for name, cases in {
        "quick": unmarked.keys() - dear,
        "slow": (dear | _marked) - nightly,
        "nightly": nightly,
    }.items():
        print(f"\n{name}: {len(cases)} cases, {sum(map(_seconds.__getitem__, cases)):.0f} s")
