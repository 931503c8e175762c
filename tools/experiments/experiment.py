"""Run an experiment, several training runs at a time, and write its results.

An `Experiment` is run for a `Request`, the options of the command line. Its `make_findings` makes
the runs and returns `Findings`: rows, a table, and verdicts on the paper's claims. An `Outcome` is
their report as JSON and Markdown. Runs are kept in a folder, and finished runs are not repeated.
"""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Sequence, TypeVar

from ipu_pipe.errors import RunFault, find_user_fault, guard_writing, raise_faults
from ipu_pipe.files import write_json, write_text
from ipu_pipe.launcher import end_with
from ipu_pipe.text import suggest
from tools.experiments.verdicts import COLUMNS, Verdict, make_results

Key = TypeVar("Key")
# the result of a run, which must be picklable
Value = TypeVar("Value")


@dataclass(frozen=True)
class Request:
    """The options of one call: the folder of runs, and seeds, rows, epochs and size in place of the
    experiment's own.

    `jobs` runs are made at a time. `say` prints progress.
    """

    runs: Path
    seeds: Sequence[int] = ()
    rows: Sequence[str] = ()
    full: bool = False
    epochs: Optional[int] = None
    jobs: int = 1
    say: Callable[[str], None] = print


@dataclass(frozen=True)
class Findings:
    """The results of an experiment's runs.

    `results` are the JSON keys that only this experiment has. The table has `columns` and `cells`.
    `conditions` are printed after the command that made the table, `notes` are listed below it.
    `curves` go into results.json. `pictures` maps a file name to the function that draws it.
    """

    results: Dict[str, Any]
    verdicts: Sequence[Verdict]
    conditions: str
    columns: Sequence[str]
    cells: Sequence[Sequence[Any]]
    notes: Sequence[str] = ()
    curves: Sequence[Mapping[str, Any]] = ()
    pictures: Mapping[str, Callable[[Path], Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """The report of an experiment: `results` is the JSON that programs read, `table` the same as
    Markdown.

    `folder` is where the files go by default.
    """

    results: Dict[str, Any]
    table: str
    folder: Path
    findings: Findings

    def write(self, folder: Path) -> List[Path]:
        """Write results.json, table.md and the pictures into `folder` and return their paths."""
        with guard_writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        curves, pictures = self.findings.curves, self.findings.pictures
        write_json(
            folder / "results.json", {**self.results, **({"curves": curves} if curves else {})}
        )
        write_text(folder / "table.md", self.table)
        for name, draw in pictures.items():
            draw(folder / name)
        return [folder / name for name in ("results.json", "table.md", *pictures)]


@dataclass(frozen=True)
class Experiment:
    """An experiment that tools/reproduce.py can list, check and run.

    `size` describes its rows and seeds in words. `make_findings` makes the runs of a request in a
    folder; the request lists all rows and seeds.
    `labels` are the rows that can be chosen, `seeds` the default seeds, `epochs` the default
    length (0 if it is not counted in epochs), and `has_full` says whether
    the paper's size can be run. Options without a choice are refused. `hours` is the approximate
    time on one core.
    """

    name: str
    title: str
    source: str
    size: str
    make_findings: Callable[[Request, Path], Findings]
    labels: Sequence[str] = ()
    seeds: Sequence[int] = ()
    has_full: bool = False
    hours: float = 0.0
    epochs: float = 0

    def check(self, request: Request) -> None:
        """Raise `BadInput` for options that do not apply and for rows that do not exist."""
        options = {"rows": self.labels, "seeds": self.seeds, "full": self.has_full}
        options["epochs"] = self.epochs
        faults = [
            f"--{option}: {self.name}: it has none to choose from; leave the option out"
            for option, allowed in options.items()
            if getattr(request, option) and not allowed
        ]
        unknown = [label for label in request.rows if label not in self.labels]
        if self.labels:
            allowed = f"must be one of {', '.join(self.labels)}"
            faults += [
                f"--rows: {label}: {allowed}{suggest(label, self.labels)}" for label in unknown
            ]
        raise_faults(faults)

    def describe(self) -> Dict[str, Any]:
        """Return the keys of the results that say which experiment it is."""
        return {"experiment": self.name, "title": self.title, "source": self.source}

    def run(self, request: Request) -> Outcome:
        """Make the unfinished runs and report the results."""
        full = request.full and self.has_full
        epochs = request.epochs if self.epochs else None
        size = (" --full" if full else "") + (f" --epochs {epochs}" if epochs else "")
        folder = request.runs / (self.name + size.replace(" --", "-").replace(" ", "-"))
        rows, seeds = request.rows or self.labels, request.seeds or self.seeds
        chosen = replace(request, rows=rows, seeds=seeds, full=full, epochs=epochs)
        return self.report(self.make_findings(chosen, folder), folder, size)

    def publish(
        self, request: Request, out: Optional[Path], tell: Callable[[str], None]
    ) -> Dict[str, Any]:
        """Make the unfinished runs, write the results into `out/NAME` (None: beside the runs), tell
        them, and return the JSON.
        """
        outcome = self.run(request)
        files = outcome.write(out / self.name if out else outcome.folder)
        tell(outcome.table)
        tell("files:\n  " + "\n  ".join(map(str, files)))
        return outcome.results

    def report(self, findings: Findings, folder: Path, size: str = "") -> Outcome:
        """Return findings as JSON and as Markdown: title, table, the verdicts on the paper's
        claims, notes. `size`: the options of the command that change the runs' length.
        """
        command = f"python tools/reproduce.py {self.name}{size}"
        intro = f"Source: {self.source}. Made by `{command}`{findings.conditions}"
        lines = [f"# {self.title}", "", intro, "", *make_table(findings.columns, findings.cells)]
        if findings.verdicts:
            lines += ["", *make_table(COLUMNS, findings.verdicts)]
        if findings.notes:
            lines += ["", *(f"- {note}" for note in findings.notes)]
        results = {**self.describe(), **findings.results, **make_results(findings.verdicts)}
        return Outcome(results, "\n".join(lines) + "\n", folder, findings)


# ---- the runs


def run_all(
    work: Callable[..., Value],
    arguments: Mapping[Key, Sequence[Any]],
    request: Request,
    describe: Callable[[Key, Value], str],
) -> Dict[Key, Value]:
    """Return `work(*arguments[key])` of each key in their order; say after each run how it ended
    and the time that is left.

    `request.jobs` runs go on at a time, in processes of their own. A fault of one ends all: workers
    that go on would hold up the end of this process. A fault of the user's code is raised as its
    `UserFault`, since not every exception can be pickled.
    """
    results: Dict[Key, Value] = {}
    start = time.monotonic()
    with ProcessPoolExecutor(
        min(request.jobs, len(arguments)),
        mp_context=get_context("spawn"),
        initializer=_start_worker,
        initargs=(os.getpid(),),
    ) as pool:
        waiting: Dict["Future[Value]", Key] = {
            pool.submit(call_with_picklable_faults, work, values): key
            for key, values in arguments.items()
        }
        try:
            while waiting:
                for future in wait(waiting, return_when=FIRST_COMPLETED).done:
                    key, result = waiting.pop(future), future.result()
                    results[key] = result
                    minutes_left = (time.monotonic() - start) / len(results) * len(waiting) / 60
                    request.say(
                        f"[{len(results)}/{len(arguments)}] {describe(key, result)} "
                        f"({minutes_left:.0f} min left)"
                    )
        except BaseException as error:
            # a run in progress is resumed next time; the pool then fails the runs that wait by
            # itself
            for process in list((pool._processes or {}).values()):
                process.terminate()
            if isinstance(error, BrokenProcessPool):
                raise RunFault(
                    "a process that trains one of the runs was killed (out of memory?)"
                ) from error
            raise
    return {key: results[key] for key in arguments}


def _start_worker(parent: int) -> None:
    end_with(parent)
    # after Ctrl-C the parent ends its workers
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def call_with_picklable_faults(work: Callable[..., Value], arguments: Sequence[Any]) -> Value:
    """Return `work(*arguments)`; raise a fault of the user's code as `UserFault`, which can be
    pickled.
    """
    try:
        return work(*arguments)
    except Exception as error:
        fault = find_user_fault(error)
        if fault is None:
            raise
        raise fault from None


# ---- tables


def make_table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> List[str]:
    """Return the lines of a Markdown table; None is an empty cell, floats have four digits."""

    def show(value: Any) -> str:
        return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)

    cells = [[show(value) for value in row] for row in [head, ["---"] * len(head), *rows]]
    return [f"| {' | '.join(row)} |" for row in cells]


# ---- tables of predictions, which run nothing


class PredictedRows(NamedTuple):
    """The rows of a table of predictions, notes on its assumptions, and `pictures` as in
    `Findings`.
    """

    rows: List[Dict[str, Any]]
    notes: List[str]
    verdicts: List[Verdict]
    pictures: Mapping[str, Callable[[Path], Any]] = {}


def make_prediction(
    name: str,
    title: str,
    source: str,
    columns: Mapping[str, str],
    predict: Callable[[], PredictedRows],
) -> Experiment:
    """Return a table of the planner's predictions beside a paper's measurements. `columns`: key of
    a row -> heading.

    No run is made: predictions are computed from model shapes, hardware files and schedules within
    seconds.
    """

    def make_findings(request: Request, folder: Path) -> Findings:
        rows, notes, verdicts, pictures = predict()
        results = {"predicted": True, "rows": rows, "notes": notes}
        conditions = ". Everything not printed in the paper is predicted."
        cells = [[row.get(key) for key in columns] for row in rows]
        return Findings(
            results, verdicts, conditions, list(columns.values()), cells, notes, pictures=pictures
        )

    return Experiment(name, title, source, "predicted", make_findings)
