"""What came of a run against another method: in words, as JSON, as a picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from ipu_pipe.config.schema import Config
from ipu_pipe.report.plots import open_figure
from ipu_pipe.report.run_text import format_busy, format_number, format_throughput

Summary = Mapping[str, Any]


def planned_slots(summary: Summary) -> float:
    """How long a run takes by its schedule, in slots of one pass."""
    batch = summary["batch"]
    return 2.0 * summary["steps"] * batch["gradient_accumulation"] / summary["planned_utilization"]


class Run(NamedTuple):
    """A run that has ended. `curve`: (slots, test loss, test accuracy) at each evaluation; `diverged`: why it ended early."""

    method: str
    accumulate: int
    rate: Optional[float]
    steps: int
    samples: int
    slots: float
    final: Mapping[str, Optional[float]]
    curve: List[Tuple[float, Optional[float], Optional[float]]]
    diverged: Optional[str] = None

    def value(self, what: str) -> Optional[float]:
        """The final test accuracy or loss."""
        return self.final.get(what)


def run_of(config: Config, summary: Summary, folder: Path) -> Run:
    """From its summary and its metrics.jsonl."""
    slots, steps = planned_slots(summary), summary["steps"]
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    curve = [
        (slots * line["step"] / steps, line["test_loss"], line["test_accuracy"])
        for line in lines
        if "test_loss" in line
    ]
    return Run(
        summary["method"], config.gradient_accumulation, config.optimizer.lr, steps, summary["samples"], slots,
        summary["final"], curve,
    )  # fmt: skip


def diverged(config: Config, why: str, slots: float) -> Run:
    """A run that was to take so many slots, whose loss was not finite."""
    size = config.micro_batch_size * config.gradient_accumulation * config.replicas
    steps = config.steps or 0
    return Run(
        config.method, config.gradient_accumulation, config.optimizer.lr, steps, steps * size, slots, {}, [], why
    )


def measure(runs: Sequence[Run]) -> str:
    """By what they are compared: test_accuracy, or test_loss where that has no meaning."""
    return "test_loss" if any(run.value("test_accuracy") is None for run in runs) else "test_accuracy"


def best(runs: Sequence[Run], what: str) -> Optional[Run]:
    """The one that ended best."""
    sign = 1 if what == "test_accuracy" else -1
    known = [(sign * value, -i) for i, run in enumerate(runs) for value in [run.value(what)] if value is not None]
    return runs[-max(known)[1]] if known else None


def stories(first: Summary, second: Summary, runs: Tuple[Run, Run], timed: Sequence[Run]) -> str:
    """How far apart they ended at equal samples and at equal time; the last line is the throughput of the first run. `timed`:
    the other method's runs that took as long as the first one; none where it takes no longer anyway."""
    ours, theirs = runs
    what = measure(runs)
    lines = [
        "",
        f"the same samples, {ours.samples:,}: {what.replace('_', ' ')} {format_number(ours.value(what), 3)} by {ours.method}, "
        f"{format_number(theirs.value(what), 3)} by {theirs.method}: {_apart(ours, theirs, what)}",
        f"  by the schedule (planned) {ours.method} takes {ours.slots:,.0f} slots, {theirs.method} {theirs.slots:,.0f}",
    ]
    found = best(timed, what)
    if not timed and theirs.slots <= ours.slots * (1 + 1 / max(ours.steps, 1)):
        lines.append(f"the same time: {theirs.method} takes no longer")
    elif found is None:
        lines.append(f"the same time: no run of {theirs.method} ended within it")
    else:
        lines.append(
            f"the same time, {ours.slots:,.0f} slots (planned): {what.replace('_', ' ')} {format_number(ours.value(what), 3)} by "
            f"{ours.method}, {format_number(found.value(what), 3)} by {found.method} at its best: {_apart(ours, found, what)}"
        )
    for run in timed:
        rate = "" if run.rate is None else f", rate {run.rate:g}"
        ended = run.diverged or format_number(run.value(what), 3)
        lines.append(
            f"  {run.method} with {run.accumulate} microbatches an update: {run.steps} updates, {run.samples:,} samples{rate}: "
            f"{ended}"
        )
    lines += [
        f"busy by {ours.method}: {format_busy(first)}",
        f"busy by {theirs.method}: {format_busy(second)}",
        format_throughput(first),
    ]
    return "\n".join(lines)


def _apart(ours: Run, theirs: Run, what: str) -> str:
    a, b = ours.value(what), theirs.value(what)
    if a is None or b is None:
        return "unknown"
    return f"{(a - b) * 100:+.1f} points" if what == "test_accuracy" else f"{a - b:+.3f}"


def record(config: Config, stages: int, runs: Tuple[Run, Run], timed: Sequence[Run]) -> Dict[str, Any]:
    """The same as JSON: `against.json`."""
    ours, theirs = runs
    return {
        "schema": 1,
        "model": config.model.entry,
        "data": config.data.name,
        "seed": config.seed,
        "stages": stages,
        "micro_batch_size": config.micro_batch_size,
        "evaluated": config.evaluate.subset,
        "time": "slots of the schedule (planned), one pass of a stage each",
        "run": _told(ours),
        "same_samples": _told(theirs),
        "same_time": [_told(run) for run in timed],
    }


def _told(run: Run) -> Dict[str, Any]:
    curve = [{"slots": slots, "test_loss": loss, "test_accuracy": accuracy} for slots, loss, accuracy in run.curve]
    return {**run._asdict(), "final": dict(run.final), "curve": curve}


def draw(told: Mapping[str, Any], file: Path) -> None:
    """Test accuracy (or loss) against time by the schedule, as a PNG file; `told`: of against.json."""
    runs = [told["run"], told["same_samples"], *told["same_time"]]
    what = "test_loss" if any(p["test_accuracy"] is None for run in runs for p in run["curve"]) else "test_accuracy"
    first = told["run"]
    images = f" on {told['evaluated']:,} samples" if told["evaluated"] else ""
    title = (
        f"{told['model'].rpartition(':')[2]} on {told['stages']} stages, {told['data']}: {first['steps']} updates by "
        f"{first['method']}, {first['samples']:,} samples"
    )
    note = f"microbatches of {told['micro_batch_size']}; one run a line, seed {told['seed']}; time is planned, not measured"
    with open_figure(file, (9, 5), title=title, note=note) as (axes,):
        for run in runs:
            if not run["curve"]:
                continue
            is_first = run is first
            end = run["curve"][-1][what]
            size = f"{run['accumulate']} microbatches an update: {run['samples']:,} samples"
            label = f"{run['method']}, {size}, {format_number(end, 3)}"
            axes.plot(
                [p["slots"] for p in run["curve"]], [p[what] for p in run["curve"]],
                marker="o", markersize=4, linewidth=2.5 if is_first else 1.3, label=label,
            )  # fmt: skip
        axes.axvline(first["slots"], color="gray", linestyle=":", linewidth=1)
        axes.set(
            xlabel="time by the schedule: slots (planned), in each of which a stage does one pass",
            ylabel=what.replace("_", " ") + images,
        )
        axes.text(first["slots"], axes.get_ylim()[1], " equal time", color="gray", va="top")
        axes.legend(fontsize="small", loc="lower right")
