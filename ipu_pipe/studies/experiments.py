"""Experiments: a table of runs of one base config, by rows and seeds, with what the paper leads one to expect.

An experiment is a YAML file:

    title, source     what it is and which table or figure of which paper it follows
    base              a complete config (see ipu_pipe.config.load)
    full              what replaces keys of `base` for the paper's own size (`--full`), for a GPU
    seeds             a list
    rows              label -> keys that replace those of `base`; {} is the base itself
    expect            a list of {better, than, by}: labels, and by how much the mean final accuracy must exceed the other's

Runs that are finished are not run again, so that an interrupted experiment goes on where it was.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

from ipu_pipe.config.compare import describe_changes
from ipu_pipe.config.load import configure, load_recorded
from ipu_pipe.config.yaml_files import merge_keys, read_yaml
from ipu_pipe.errors import BadInput, RunFault, guard_writing
from ipu_pipe.files import write
from ipu_pipe.report.plots import describe_seeds, describe_sizes, open_figure, plot_mean_with_range
from ipu_pipe.studies.worker_pool import in_workers
from ipu_pipe.text import show

KEYS = ("title", "source", "base", "full", "seeds", "rows", "expect")


@dataclass(frozen=True)
class Experiment:
    """What a file of an experiment says; `name` is the file's."""

    name: str
    title: str
    source: str
    base: Dict[str, Any]
    full: Dict[str, Any]
    seeds: List[int]
    rows: Dict[str, Dict[str, Any]]
    expect: List[Dict[str, Any]]

    def config(self, label: str, seed: int, full: bool) -> Dict[str, Any]:
        """The run's config as plain data."""
        changed = merge_keys(merge_keys(self.base, self.full if full else {}), self.rows[label])
        return merge_keys(changed, {"seed": seed, "log": {"tensorboard": False}, "checkpoint": {"keep": 1}})


@dataclass(frozen=True)
class Run:
    """One finished run: `curve` of (epoch, normalized time, test loss, test accuracy); `diverged`: what was said, or None.

    Normalized time counts what a pipeline without bubbles takes for an epoch as 1.
    """

    label: str
    seed: int
    curve: List[Tuple[float, float, float, float]]
    diverged: Optional[str]
    step: int
    seconds: float

    @property
    def final(self) -> Optional[float]:
        """Accuracy of the final weights; of a run that diverged, None."""
        return None if self.diverged or not self.curve else self.curve[-1][3]


def load_experiment(path: Path) -> Experiment:
    """Read and check an experiment's file, all its configs included. Raises BadInput."""
    raw = read_yaml(path)
    faults = [f"{path}: {show(key)}: unknown key, allowed are {', '.join(KEYS)}" for key in raw if key not in KEYS]
    for key, kind, what in (
        ("title", str, "text"), ("source", str, "text"), ("base", dict, "a mapping"), ("rows", dict, "a mapping"),
        ("seeds", list, "a list of whole numbers"),
    ):  # fmt: skip
        if not isinstance(raw.get(key), kind) or not raw[key]:
            faults.append(f"{path}: {show(key)}: {show(raw.get(key))}: must be {what}")
    faults += _shape_faults(path, raw) if not faults else []
    if faults:
        raise BadInput(faults)
    experiment = Experiment(
        path.stem, raw["title"], raw["source"], raw["base"], raw.get("full") or {}, list(raw["seeds"]),
        {f"{label}": dict(keys or {}) for label, keys in raw["rows"].items()}, list(raw.get("expect") or []),
    )  # fmt: skip
    for number, entry in enumerate(experiment.expect):
        for key in ("better", "than"):
            if entry.get(key) not in experiment.rows:
                faults.append(f"{path}: expect.{number}.{key}: {show(entry.get(key))}: must be one of the rows")
    for label in experiment.rows:
        for full in (False, True):
            try:
                configure(**experiment.config(label, 0, full))
            except BadInput as error:
                place = "full" if full else "base"
                faults += [fault.replace("configure:", f"{path}: rows.{label} on {place}:") for fault in error.faults]
    if faults:
        raise BadInput(faults)
    return experiment


def _shape_faults(path: Path, raw: Mapping[str, Any]) -> List[str]:
    """What is of the wrong type inside an experiment's file, or would be two runs in one folder."""
    faults = []
    if not isinstance(raw.get("full") or {}, dict):
        faults.append(f"{path}: full: {show(raw['full'])}: must be a mapping")
    if not all(isinstance(seed, int) and not isinstance(seed, bool) and seed >= 0 for seed in raw["seeds"]):
        faults.append(f"{path}: seeds: {show(raw['seeds'])}: must be a list of whole numbers")
    folders: Dict[str, str] = {}
    for label, keys in raw["rows"].items():
        if not isinstance(keys or {}, dict):
            faults.append(f"{path}: rows.{label}: {show(keys)}: must be a mapping of keys that replace those of base")
        other = folders.setdefault(_folder(f"{label}"), f"{label}")
        if other != f"{label}":
            faults.append(f"{path}: rows.{label}: its runs would be in the folder of {other}: must be called otherwise")
    expect = raw.get("expect") or []
    if not isinstance(expect, list) or not all(isinstance(entry, dict) for entry in expect):
        return [*faults, f"{path}: expect: {show(expect)}: must be a list of {{better, than, by}}"]
    for number, entry in enumerate(expect):
        by = entry.get("by", 0.0)
        if isinstance(by, bool) or not isinstance(by, (int, float)):
            faults.append(f"{path}: expect.{number}.by: {show(by)}: must be a number")
    return faults


def run_experiment(
    experiment: Experiment,
    out: Path,
    seeds: Sequence[int],
    jobs: int,
    full: bool = False,
    say: Callable[[str], None] = print,
) -> List[Run]:
    """All runs, `jobs` at a time in processes of their own, each in `out/LABEL/seed-S`; by row, then seed.

    A run whose loss is not finite is a result: it diverged. Any other fault ends all.
    """
    wanted = {
        (label, seed): (experiment.config(label, seed, full), str(out / _folder(label) / f"seed-{seed}"))
        for seed in seeds
        for label in experiment.rows
    }
    done: Dict[Tuple[str, int], Run] = {}
    start = time.monotonic()
    with contextlib.closing(in_workers(_work, wanted, jobs)) as finished:
        for (label, seed), result in finished:
            run = Run(label, seed, **result)
            done[label, seed] = run
            left = (time.monotonic() - start) / len(done) * (len(wanted) - len(done))
            place = f"[{len(done)}/{len(wanted)}] {label}, seed {seed}"
            say(f"{place}: {_outcome(run)} ({run.seconds:.0f} s; {left / 60:.0f} min left)")
    return [done[label, seed] for label in experiment.rows for seed in seeds]


def _outcome(run: Run) -> str:
    if run.diverged:
        return f"diverged: {run.diverged}"
    return f"test accuracy {run.final:.4f}" if run.final is not None else "done"


def _folder(label: str) -> str:
    return "".join(c if c.isalnum() or c in "+-._" else "_" for c in label)


def _work(config: Dict[str, Any], folder: str) -> Dict[str, Any]:
    """One run, in a process of its own: resumed if it was interrupted, read if it is finished."""
    from ipu_pipe.run import train
    from ipu_pipe.run.build import build

    out, start = Path(folder), time.monotonic()
    marker = out / "diverged.json"
    settings = configure(**config)
    again = marker.is_file() and bool(describe_changes(load_recorded(out / "config.yaml"), settings))
    if marker.is_file() and not again:
        return dict(json.loads(marker.read_text()))
    try:
        resume = (out / "config.yaml").exists() and not again
        summary = train.train(settings, out, resume=resume, overwrite=again, quiet=True)
    except RunFault as error:
        if "loss is" not in str(error):
            raise
        job = build(settings)
        result = _result(out, job.phases(), job.updates_per_epoch)
        result.update(diverged=str(error).split(";")[0], seconds=time.monotonic() - start)
        write(marker, json.dumps(result))
        return result
    rate = summary["throughput_samples_per_second"]
    seconds = summary["samples"] / rate if rate else 0.0
    return {**_result(out, summary["phases"], summary["updates_per_epoch"]), "diverged": None, "seconds": seconds}


def _result(out: Path, phases: Sequence[Mapping[str, Any]], per_epoch: Any) -> Dict[str, Any]:
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    curve = [
        (r["epoch"], normalized_time(phases, r["step"]) / per_epoch, r["test_loss"], r["test_accuracy"])
        for r in records
        if r.get("test_accuracy") is not None
    ]
    return {"curve": curve, "step": max((r["step"] for r in records), default=0)}


def normalized_time(phases: Sequence[Mapping[str, Any]], step: int) -> float:
    """Time of `step` updates, in updates of a pipeline without bubbles. `phases`: as in summary.json, in order."""
    total, left = 0.0, step
    for phase in phases:
        count = min(left, phase["updates"])
        total += count / phase["planned_utilization"]
        left -= count
    return total


# ---- results


def results(experiment: Experiment, runs: Sequence[Run], full: bool) -> Dict[str, Any]:
    """The results as JSON: a row a label, and where they are not what was expected."""
    rows: List[Dict[str, Any]] = []
    for label in experiment.rows:
        own = [run for run in runs if run.label == label]
        config = configure(**experiment.config(label, 0, full))
        finals = [run.final for run in own if run.final is not None]
        best = [max(a for _, _, _, a in run.curve) for run in own if run.final is not None]
        times = [run.curve[-1][1] for run in own if run.curve and not run.diverged]
        rows.append({
            "label": label,
            "method": config.method,
            "args": config.method_settings(),
            "step": max(run.step for run in own),
            "final": statistics.mean(finals) if len(finals) == len(own) else None,
            "std": statistics.stdev(finals) if len(finals) > 1 else None,
            "best": statistics.mean(best) if best else None,
            "final_by_seed": {str(run.seed): run.final for run in own},
            "diverged": sum(run.diverged is not None for run in own),
            "normalized_time": statistics.mean(times) if times else None,
        })  # fmt: skip
    unmet = _differences(experiment, {row["label"]: row for row in rows})
    return {
        "experiment": experiment.name,
        "title": experiment.title,
        "source": experiment.source,
        "setting": describe_sizes(configure(**experiment.config(next(iter(experiment.rows)), 0, full))),
        "full_size": full,
        "seeds": sorted({run.seed for run in runs}),
        "rows": rows,
        "agrees": not unmet,
        "differences": unmet,
    }


def _differences(experiment: Experiment, rows: Mapping[str, Mapping[str, Any]]) -> List[str]:
    """Expectations that do not hold. A run that diverged is worse than any that did not."""
    found = []
    for entry in experiment.expect:
        better, than = rows[entry["better"]], rows[entry["than"]]
        by = float(entry.get("by", 0.0))
        a, b = (-1.0 if row["final"] is None else row["final"] for row in (better, than))
        if a - b < by or a < 0:
            found.append(
                f"{entry['better']} ({_percent(better)}) was expected to be better than {entry['than']} ({_percent(than)})"
                + (f" by {by:.1%}" if by else "")
            )
    return found


def _percent(row: Mapping[str, Any]) -> str:
    if row["final"] is None:
        return f"{row['diverged']} of {len(row['final_by_seed'])} runs diverged"
    return f"{row['final']:.1%}" + (f" +- {row['std']:.1%}" if row["std"] is not None else "")


def table(found: Mapping[str, Any], command: str) -> str:
    """The results as Markdown."""
    lines = [
        f"# {found['title']}",
        "",
        f"Source: {found['source']}. Made by `{command}`; seeds {', '.join(map(str, found['seeds']))}; final test accuracy, "
        "mean and standard deviation. Time: epochs divided by the pipeline's utilization.",
        "",
        "| row | method | final accuracy | by seed | time |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in found["rows"]:
        seeds = ", ".join("diverged" if v is None else f"{v:.3f}" for v in row["final_by_seed"].values())
        took = "" if row["normalized_time"] is None else f"{row['normalized_time']:.2f}"
        lines.append(f"| {row['label']} | {row['method']} | {_percent(row)} | {seeds} | {took} |")
    lines += ["", "Expected of the paper and found so." if found["agrees"] else "Expected and not found so:", ""]
    lines += [f"- {text}" for text in found["differences"]]
    return "\n".join(lines).rstrip() + "\n"


def plot(found: Mapping[str, Any], runs: Sequence[Run], labels: Sequence[str], folder: Path) -> List[Path]:
    """Test accuracy against epoch and against normalized time, mean over seeds with the range shaded, as PNG files."""
    note = f"{found['setting']}; {describe_seeds(found['seeds'])}"
    pictures = {
        folder / "accuracy_by_epoch.png": "epoch",
        folder / "accuracy_by_time.png": "time (epochs / utilization)",
    }
    for place, (file, axis) in enumerate(pictures.items()):
        with open_figure(file, (8, 5), title=found["title"], note=note) as (axes,):
            for label in labels:
                own = [run for run in runs if run.label == label and run.curve]
                length = min((len(run.curve) for run in own), default=0)
                # on the logarithmic axis of time there is no place for the beginning
                points = [[run.curve[i] for run in own] for i in range(place, length)]
                if points:
                    x = [statistics.mean(point[place] for point in group) for group in points]
                    accuracies = [[point[3] for point in group] for group in points]
                    diverged = " (diverged)" if any(run.diverged for run in own) else ""
                    plot_mean_with_range(axes, x, accuracies, markersize=3, label=label + diverged)
            if place:
                axes.set_xscale("log")
            axes.set(xlabel=axis, ylabel="test accuracy")
            if axes.lines:
                axes.legend(fontsize="small")
    return list(pictures)


def write_results(
    found: Dict[str, Any], runs: Sequence[Run], labels: Sequence[str], command: str, folder: Path
) -> List[Path]:
    """results.json, table.md and the plots, in `folder`."""
    with guard_writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    curves = [{"label": r.label, "seed": r.seed, "diverged": r.diverged, "curve": r.curve} for r in runs]
    results = write(folder / "results.json", json.dumps({**found, "curves": curves}, indent=1))
    return [results, write(folder / "table.md", table(found, command)), *plot(found, runs, labels, folder)]
