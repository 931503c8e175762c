"""Experiments that train a table of configurations by several seeds: the files in configs/experiments/.

    title, source     what is compared, and which table or figure of which paper it follows
    base              a complete config (see ipu_pipe.config.load)
    full              keys that replace those of `base` for the paper's own size (`--full`), for a GPU
    seeds             a list of whole numbers
    rows              label -> keys that replace those of `base`; {} is the base itself
    expect            a list of {better, than, by}: the mean final accuracy of row `better` exceeds that of row `than` by `by`

Finished runs are not run again, so an interrupted experiment continues where it was.
"""

from __future__ import annotations

import contextlib
import functools
import json
import statistics
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

from ipu_pipe.config.compare import describe_changes
from ipu_pipe.config.load import configure, load_recorded
from ipu_pipe.config.yaml_files import merge_keys, read_yaml
from ipu_pipe.errors import BadInput, RunFault
from ipu_pipe.files import write
from ipu_pipe.report.plots import describe_seeds, describe_sizes, open_figure, plot_mean_with_range
from ipu_pipe.studies.experiment import Claim, Finals, Outcome, Request, check_claims, make_markdown
from ipu_pipe.studies.worker_pool import run_in_workers
from ipu_pipe.text import show

KEYS = ("title", "source", "base", "full", "seeds", "rows", "expect")


@dataclass(frozen=True)
class GridRun:
    """One finished run.

    `curve` has (epoch, normalized time, test loss, test accuracy) of each evaluation, where normalized time counts an epoch of a
    pipeline without bubbles as 1. `diverged` is the message of a run whose loss was not finite, else None.
    """

    label: str
    seed: int
    curve: List[Tuple[float, float, float, float]]
    diverged: Optional[str]
    step: int
    seconds: float

    @property
    def final(self) -> Optional[float]:
        """The accuracy of the final weights; None if the run diverged."""
        return None if self.diverged or not self.curve else self.curve[-1][3]


@dataclass(frozen=True)
class TrainingGrid:
    """The content of an experiment's file; `name` is the file's."""

    name: str
    title: str
    source: str
    base: Dict[str, Any]
    full: Dict[str, Any]
    seeds: List[int]
    rows: Dict[str, Dict[str, Any]]
    expect: List[Dict[str, Any]]

    def make_config(self, label: str, seed: int, full: bool) -> Dict[str, Any]:
        """Return the config of a run as plain data."""
        changed = merge_keys(merge_keys(self.base, self.full if full else {}), self.rows[label])
        return merge_keys(changed, {"seed": seed, "log": {"tensorboard": False}, "checkpoint": {"keep": 1}})

    def describe_size(self) -> str:
        """Return the number of rows and seeds in words."""
        return f"{len(self.rows)} rows, {len(self.seeds)} seeds"

    def check(self, request: Request) -> None:
        """Raise `BadInput` for rows that it does not have."""
        for label in request.rows:
            if label not in self.rows:
                raise BadInput(f"--rows: {label}: must be one of {', '.join(self.rows)}")

    def run(self, request: Request) -> Outcome:
        """Train all rows by all seeds, then compare them."""
        grid = self
        if request.rows:
            rows = {label: self.rows[label] for label in request.rows}
            expect = [entry for entry in self.expect if {entry["better"], entry["than"]} <= set(rows)]
            grid = replace(self, rows=rows, expect=expect)
        seeds = list(request.seeds) or self.seeds
        folder = request.runs / (self.name + ("-full" if request.full else ""))
        request.say(f"{self.title}: {len(grid.rows)} rows x {len(seeds)} seeds")
        runs = run_grid(grid, folder, seeds, request.jobs, request.full, request.say)
        results = summarize(grid, runs, request.full)
        command = f"python tools/reproduce.py {self.name}" + (" --full" if request.full else "")
        curves = [{"label": r.label, "seed": r.seed, "diverged": r.diverged, "curve": r.curve} for r in runs]
        pictures = {
            f"accuracy_by_{axis}.png": functools.partial(draw_accuracy, results, runs, axis)
            for axis in ("epoch", "time")
        }
        return Outcome(results, make_grid_table(results, command), folder, curves, pictures)

    def make_claims(self) -> List[Claim]:
        """Return the entries of `expect` as claims on final accuracies; a row that diverged has -1."""

        def make(entry: Mapping[str, Any]) -> Claim:
            by = float(entry.get("by", 0.0))

            def holds(finals: Finals) -> bool:
                better, than = finals[entry["better"]], finals[entry["than"]]
                return better - than >= by and better >= 0

            return Claim(f"{entry['better']} is better than {entry['than']}" + (f" by {by:.1%}" if by else ""), holds)

        return [make(entry) for entry in self.expect]


# ---- the file


def load_grid(path: Path) -> TrainingGrid:
    """Read an experiment's file and check all its configs. Raise `BadInput` with every fault."""
    raw = read_yaml(path)
    faults = [f"{show(key)}: unknown key, allowed are {', '.join(KEYS)}" for key in raw if key not in KEYS]
    faults += _list_type_faults(raw)
    if not faults:
        grid = TrainingGrid(
            path.stem, raw["title"], raw["source"], raw["base"], raw.get("full") or {}, list(raw["seeds"]),
            {f"{label}": dict(keys or {}) for label, keys in raw["rows"].items()}, list(raw.get("expect") or []),
        )  # fmt: skip
        faults = _list_content_faults(grid)
    if faults:
        raise BadInput([f"{path}: {fault}" for fault in faults])
    return grid


def _list_type_faults(raw: Mapping[str, Any]) -> List[str]:
    """Return what has the wrong type in the data of a file, one line each."""

    def is_mapping(value: Any) -> bool:
        return isinstance(value, dict)

    def is_text(value: Any) -> bool:
        return isinstance(value, str) and bool(value)

    def is_seeds(value: Any) -> bool:
        return bool(value) and isinstance(value, list) and all(type(seed) is int and seed >= 0 for seed in value)

    def is_expect(value: Any) -> bool:
        return isinstance(value, list) and all(isinstance(entry, dict) for entry in value)

    forms: List[Tuple[str, Callable[[Any], bool], str]] = [
        ("title", is_text, "text"), ("source", is_text, "text"), ("base", is_mapping, "a mapping"),
        ("full", lambda value: is_mapping(value or {}), "a mapping"), ("seeds", is_seeds, "a list of whole numbers"),
        ("rows", lambda value: is_mapping(value) and bool(value), "a mapping"),
        ("expect", lambda value: is_expect(value or []), "a list of {better, than, by}"),
    ]  # fmt: skip
    faults = [f"{key}: {show(raw.get(key))}: must be {what}" for key, fits, what in forms if not fits(raw.get(key))]
    if faults:
        return faults
    for label, keys in raw["rows"].items():
        if not is_mapping(keys or {}):
            faults.append(f"rows.{label}: {show(keys)}: must be a mapping of keys that replace those of base")
    for number, entry in enumerate(raw.get("expect") or []):
        if type(entry.get("by", 0.0)) not in (int, float):
            faults.append(f"expect.{number}.by: {show(entry['by'])}: must be a number")
    return faults


def _list_content_faults(grid: TrainingGrid) -> List[str]:
    """Return rows that share a folder, rows that do not exist and keys that are wrong in a config, one line each."""
    faults = []
    folders: Dict[str, str] = {}
    for label in grid.rows:
        other = folders.setdefault(name_folder(label), label)
        if other != label:
            faults.append(f"rows.{label}: its runs would share a folder with {other}; rename it")
    for number, entry in enumerate(grid.expect):
        for key in ("better", "than"):
            if entry.get(key) not in grid.rows:
                faults.append(f"expect.{number}.{key}: {show(entry.get(key))}: must be one of the rows")
    for label in grid.rows:
        for full in (False, True):
            try:
                configure(**grid.make_config(label, 0, full))
            except BadInput as error:
                place = f"rows.{label} on {'full' if full else 'base'}:"
                faults += [fault.replace("configure:", place) for fault in error.faults]
    return faults


# ---- the runs


def run_grid(
    grid: TrainingGrid,
    out: Path,
    seeds: Sequence[int],
    jobs: int,
    full: bool = False,
    say: Callable[[str], None] = print,
) -> List[GridRun]:
    """Train every row by every seed, `jobs` at a time in processes of their own, each in `out/LABEL/seed-S`.

    Return the runs by row, then seed. A run whose loss is not finite is a result: it diverged. Any other fault ends all runs.
    """
    arguments = {
        (label, seed): (grid.make_config(label, seed, full), str(out / name_folder(label) / f"seed-{seed}"))
        for seed in seeds
        for label in grid.rows
    }
    done: Dict[Tuple[str, int], GridRun] = {}
    start = time.monotonic()
    with contextlib.closing(run_in_workers(train_one, arguments, jobs)) as finished:
        for (label, seed), result in finished:
            run = GridRun(label, seed, **result)
            done[label, seed] = run
            left = (time.monotonic() - start) / len(done) * (len(arguments) - len(done))
            outcome = f"diverged: {run.diverged}" if run.diverged else "done"
            if run.final is not None:
                outcome = f"test accuracy {run.final:.4f}"
            place = f"[{len(done)}/{len(arguments)}] {label}, seed {seed}"
            say(f"{place}: {outcome} ({run.seconds:.0f} s; {left / 60:.0f} min left)")
    return [done[label, seed] for label in grid.rows for seed in seeds]


def name_folder(label: str) -> str:
    """Return the folder name of a row."""
    return "".join(c if c.isalnum() or c in "+-._" else "_" for c in label)


def train_one(config: Dict[str, Any], folder: str) -> Dict[str, Any]:
    """Train one run, resume it if it was interrupted, or read it if it is finished; return the fields of `GridRun`."""
    from ipu_pipe.run import train
    from ipu_pipe.run.build import build

    out, start = Path(folder), time.monotonic()
    marker = out / "diverged.json"
    settings = configure(**config)
    changed = marker.is_file() and bool(describe_changes(load_recorded(out / "config.yaml"), settings))
    if marker.is_file() and not changed:
        return dict(json.loads(marker.read_text()))
    try:
        resume = (out / "config.yaml").exists() and not changed
        summary = train.train(settings, out, resume=resume, overwrite=changed, quiet=True)
    except RunFault as error:
        if "loss is" not in str(error):
            raise
        job = build(settings)
        result = _read_curve(out, job.describe_phases(), job.updates_per_epoch)
        result.update(diverged=str(error).split(";")[0], seconds=time.monotonic() - start)
        write(marker, json.dumps(result))
        return result
    rate = summary["throughput_samples_per_second"]
    seconds = summary["samples"] / rate if rate else 0.0
    return {**_read_curve(out, summary["phases"], summary["updates_per_epoch"]), "diverged": None, "seconds": seconds}


def _read_curve(out: Path, phases: Sequence[Mapping[str, Any]], per_epoch: Any) -> Dict[str, Any]:
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    curve = [
        (r["epoch"], compute_normalized_time(phases, r["step"]) / per_epoch, r["test_loss"], r["test_accuracy"])
        for r in records
        if r.get("test_accuracy") is not None
    ]
    return {"curve": curve, "step": max((r["step"] for r in records), default=0)}


def compute_normalized_time(phases: Sequence[Mapping[str, Any]], step: int) -> float:
    """Return the time of `step` updates, in updates of a pipeline without bubbles. `phases` are those of summary.json."""
    total, left = 0.0, step
    for phase in phases:
        count = min(left, phase["updates"])
        total += count / phase["planned_utilization"]
        left -= count
    return total


# ---- the results


def summarize(grid: TrainingGrid, runs: Sequence[GridRun], full: bool) -> Dict[str, Any]:
    """Return the results as JSON: a row for each label, and which claims hold."""
    rows: List[Dict[str, Any]] = []
    for label in grid.rows:
        runs_of_row = [run for run in runs if run.label == label]
        config = configure(**grid.make_config(label, 0, full))
        finals = [run.final for run in runs_of_row if run.final is not None]
        best = [max(a for _, _, _, a in run.curve) for run in runs_of_row if run.final is not None]
        times = [run.curve[-1][1] for run in runs_of_row if run.curve and not run.diverged]
        rows.append({
            "label": label,
            "method": config.method,
            "args": config.method_settings(),
            "step": max(run.step for run in runs_of_row),
            "final": statistics.mean(finals) if len(finals) == len(runs_of_row) else None,
            "std": statistics.stdev(finals) if len(finals) > 1 else None,
            "best": statistics.mean(best) if best else None,
            "final_by_seed": {str(run.seed): run.final for run in runs_of_row},
            "diverged": sum(run.diverged is not None for run in runs_of_row),
            "normalized_time": statistics.mean(times) if times else None,
        })  # fmt: skip
    by_label = {row["label"]: row for row in rows}
    checked = check_claims(
        grid.make_claims(), {row["label"]: -1.0 if row["final"] is None else row["final"] for row in rows}
    )
    checked["differences"] = [
        f"not reproduced: {statement['statement']}: {_show_accuracy(by_label[entry['better']])} against"
        f" {_show_accuracy(by_label[entry['than']])}"
        for entry, statement in zip(grid.expect, checked["statements"])
        if not statement["reproduced"]
    ]
    return {
        "experiment": grid.name,
        "title": grid.title,
        "source": grid.source,
        "setting": describe_sizes(configure(**grid.make_config(next(iter(grid.rows)), 0, full))),
        "full_size": full,
        "seeds": sorted({run.seed for run in runs}),
        "rows": rows,
        **checked,
    }


def make_grid_table(results: Mapping[str, Any], command: str) -> str:
    """Return the results as Markdown."""
    intro = (
        f"Source: {results['source']}. Made by `{command}`: {results['setting']}; seeds {', '.join(map(str, results['seeds']))}."
        " Final test accuracy, mean and standard deviation. Time: epochs divided by the pipeline's utilization."
    )
    rows = [
        (
            row["label"], row["method"], _show_accuracy(row),
            ", ".join("diverged" if v is None else f"{v:.3f}" for v in row["final_by_seed"].values()),
            None if row["normalized_time"] is None else f"{row['normalized_time']:.2f}",
        )
        for row in results["rows"]
    ]  # fmt: skip
    return make_markdown(results, [intro], ("row", "method", "final accuracy", "by seed", "time"), rows)


def _show_accuracy(row: Mapping[str, Any]) -> str:
    if row["final"] is None:
        return f"{row['diverged']} of {len(row['final_by_seed'])} runs diverged"
    return f"{row['final']:.1%}" + (f" +- {row['std']:.1%}" if row["std"] is not None else "")


def draw_accuracy(results: Mapping[str, Any], runs: Sequence[GridRun], axis: str, file: Path) -> None:
    """Draw test accuracy against "epoch" or normalized "time": the mean over the seeds, with the range shaded."""
    place = ("epoch", "time").index(axis)
    note = f"{results['setting']}; {describe_seeds(results['seeds'])}"
    with open_figure(file, (8, 5), title=results["title"], note=note) as (axes,):
        for label in dict.fromkeys(run.label for run in runs):
            runs_of_row = [run for run in runs if run.label == label and run.curve]
            length = min((len(run.curve) for run in runs_of_row), default=0)
            # the logarithmic axis of time has no place for time 0
            points = [[run.curve[i] for run in runs_of_row] for i in range(place, length)]
            if points:
                x = [statistics.mean(point[place] for point in group) for group in points]
                diverged = " (diverged)" if any(run.diverged for run in runs_of_row) else ""
                groups = [[point[3] for point in group] for group in points]
                plot_mean_with_range(axes, x, groups, markersize=3, label=label + diverged)
        if axis == "time":
            axes.set_xscale("log")
        axes.set(xlabel="time (epochs / utilization)" if axis == "time" else axis, ylabel="test accuracy")
        if axes.lines:
            axes.legend(fontsize="small")
