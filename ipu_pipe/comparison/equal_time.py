"""Compare a run with another method, such as an asynchronous one with GPipe: at equal samples, and
at equal time.

Comparing at equal samples hides the gain of a pipeline that never drains: it trains on more samples
in the same time. Time is planned: the clock of `compare` plays the schedules, with one slot for each pass
of a stage (`Job.play_updates`).

At equal time a method that drains the pipeline may choose how many microbatches K make an update:
more leave fewer slots idle but make fewer updates. Several K are run, and the best one counts.
Against the config's own N the learning rate is K / N times as high (linear scaling, Goyal et al.
2017); warm-up and milestones come at the same share of the samples and of the run.
"""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path
from typing import Any, Mapping, NamedTuple, Sequence

import numpy as np

from ipu_pipe.backends.ranks import are_joined, is_main, run_on_main
from ipu_pipe.config.compare import keep_recorded_choices
from ipu_pipe.config.load import load_recorded
from ipu_pipe.config.schema import Config
from ipu_pipe.config.sections import LrSchedule
from ipu_pipe.errors import Divergence
from ipu_pipe.files import write_json
from ipu_pipe.report.plots import open_figure
from ipu_pipe.report.position import describe_divergence
from ipu_pipe.report.run_text import format_busy, format_number, format_throughput
from ipu_pipe.run.planning import build_for_planning
from ipu_pipe.run.progress import Progress
from ipu_pipe.run.train import check, reserve_folder, train
from ipu_pipe.schedule.methods import resolve_method
from ipu_pipe.store.folder import check_folder, is_restarted

# default multiples of the config's microbatches per update
TIMES = (1, 2, 4, 8)
Summary = Mapping[str, Any]


class ComparedRun(NamedTuple):
    """A run that has ended; `curve` has (slots, test loss, test accuracy) of each evaluation,
    `diverged` the words on a run that diverged, `devices` their number by the schedule, 0 for a run
    that ended so.
    """

    method: str
    accumulate: int
    rate: float | None
    steps: int
    samples: int
    slots: float
    final: Mapping[str, float | None]
    curve: list[tuple[float, float | None, float | None]]
    diverged: str | None = None
    devices: int = 0


def train_against(
    config: Config,
    other: Config,
    out: Path,
    accumulations: Sequence[int] = (),
    resume: bool = False,
    overwrite: bool = False,
    quiet: bool = False,
) -> str:
    """Train by `config` into `out`, then by `other` with as many samples and, if its schedule takes
    longer, with as much time.

    The other runs are in folders in `out`. Write `against.json` and, if matplotlib is installed,
    `against.png`; return the comparison in words. Raise `BadInput` before the first run starts.
    """
    say = Progress(quiet or not is_main()).say
    other = match_samples(config, other)
    same_samples_folder = name_folder(out, other.method)
    folders = {
        count: name_folder(out, other.method, count)
        for count in choose_accumulations(other, accumulations)
    }
    # one process looks: by the time another does, the folders may have been begun
    starts = run_on_main(
        lambda: {
            folder: choose_resume_options(folder, resume, overwrite)
            for folder in (same_samples_folder, *folders.values())
        }
    )
    # the second run's faults, before the first one trains for days
    check(other, same_samples_folder, **starts[same_samples_folder])
    run_on_main(lambda: [check_folder(folder, **starts[folder]) for folder in folders.values()])
    # the first run may take days, after which the second one must still have its folder
    with reserve_folder(same_samples_folder, **starts[same_samples_folder]):
        summary = train(config, out, resume=resume, overwrite=overwrite, quiet=quiet)
    say(f"\n{other.method} on as many samples:")
    # measured stages would differ at a second measurement, and so would the two runs
    other = keep_recorded_choices(load_recorded(out / "config.yaml"), other)
    other_summary = train(other, same_samples_folder, quiet=quiet, **starts[same_samples_folder])
    # learning rates that the method advised
    other = keep_recorded_choices(load_recorded(same_samples_folder / "config.yaml"), other)
    # the recorded config has the stages and rates that the run itself has chosen
    run = read_run(load_recorded(out / "config.yaml"), summary, out)
    same_samples = read_run(other, other_summary, same_samples_folder)
    same_time: list[ComparedRun] = []
    # a method that is no slower has had its time with the same samples
    if takes_longer(same_samples, run):
        for count, folder in folders.items():
            fitted = fit_into_time(other, count, summary, run.slots)
            if fitted is not None:
                say(f"\n{other.method} for as much time, with {count} microbatches per update:")
                same_time.append(
                    _train_for_same_time(fitted, folder, starts[folder], quiet, run.slots)
                )
    record = make_record(config, summary["model"]["stages"], run, same_samples, same_time)

    def write() -> None:
        write_json(out / "against.json", record)
        if importlib.util.find_spec("matplotlib") is not None:
            draw(record, out / "against.png")

    run_on_main(write)
    return describe(summary, other_summary, run, same_samples, same_time)


def match_samples(config: Config, other: Config) -> Config:
    """Return the other config with as many updates as take the samples of `config`'s: some methods
    have batches of their own.
    """
    # epochs are as many samples for both
    if config.steps is None:
        return other
    size, other_size = (build_for_planning(one).global_batch_size for one in (config, other))
    changes = {
        "steps": math.ceil(config.steps * size / other_size),
        "lr_schedule": other.lr_schedule.scale_updates(size / other_size),
    }
    return other.model_copy(update=changes)


def choose_resume_options(folder: Path, resume: bool, overwrite: bool) -> dict[str, Any]:
    """Return the arguments `resume` and `overwrite` of `train` for the run in a folder.

    After a restart by the launcher, a run of the earlier attempt is resumed. Older runs are resumed
    only with `resume`.
    """
    restarted = is_restarted(folder)
    return {
        "resume": restarted or (resume and (folder / "config.yaml").exists()),
        # a launcher repeats the command, which must not delete what the earlier attempt has trained
        "overwrite": overwrite and not restarted,
    }


def _train_for_same_time(
    config: Config, folder: Path, start: Mapping[str, Any], quiet: bool, slots: float
) -> ComparedRun:
    """Train a run at equal time. A loss that is not finite is a result here, since the rate may be
    too high.
    """
    try:
        return read_run(config, train(config, folder, quiet=quiet, **start), folder)
    except Divergence as error:
        # the other ranks do not know of it
        if are_joined():
            raise
        steps = config.steps or 0
        samples = steps * config.micro_batch_size * config.gradient_accumulation * config.replicas
        return ComparedRun(
            config.method,
            config.gradient_accumulation,
            config.optimizer.lr,
            steps,
            samples,
            slots,
            {},
            [],
            error.reason,
        )


def name_folder(out: Path, method: str, accumulate: int | None = None) -> Path:
    """Return the folder of a run of the other method: at equal samples, or at equal time with
    `accumulate` microbatches.
    """
    return out / (method if accumulate is None else f"{method}-accumulate-{accumulate}")


def choose_accumulations(config: Config, wanted: Sequence[int] = ()) -> list[int]:
    """Return the microbatches per update to try at equal time.

    These are the `wanted` ones, or multiples of the config's number, or only that number if the
    method does not flush.
    """
    if wanted:
        return list(dict.fromkeys(wanted))
    times = TIMES if resolve_method(config.method).flushes else TIMES[:1]
    return [config.gradient_accumulation * factor for factor in times]


def fit_into_time(config: Config, accumulate: int, first: Summary, slots: float) -> Config | None:
    """Return the other method's config with `accumulate` microbatches per update and as many
    updates as are made within `slots`, the time of the run with the summary `first`.

    None if less than two fit, or an epoch holds no such update.
    """
    configured = config.gradient_accumulation
    # a device does two passes for each microbatch
    most = int(slots) // (2 * accumulate)
    # data without a length have no epoch to fill
    per_epoch = first["updates_per_epoch"] or math.inf
    if most < 2 or accumulate > per_epoch * configured:
        return None
    # played once, for more updates than fit: those that end in time are then counted
    longest = config.model_copy(update={"gradient_accumulation": accumulate, "steps": most})
    # its rates do not matter, and a schedule may be made for fewer updates
    job = build_for_planning(longest.model_copy(update={"lr_schedule": LrSchedule()}))
    ends = job.play_updates(None, job.drains, most)
    # an update that ends just in time must not be lost to rounding
    steps = int(np.searchsorted(ends, slots * (1 + 1e-12), "right"))
    if steps < 2:
        return None
    optimizer = config.optimizer
    lr_schedule = config.lr_schedule
    # a reference batch size scales the rate itself
    if not optimizer.reference_batch_size:
        optimizer = optimizer.scale_rate(accumulate / configured)
    # by samples, because replicas with weights of their own take more than the first run's
    share_of_samples = steps * job.global_batch_size / first["samples"]
    total = lr_schedule.total_steps
    rate_changes = {
        "warmup_steps": math.ceil(lr_schedule.warmup_steps * configured / accumulate),
        # the same share of a run that has another number of epochs, and of updates
        "milestones": [epoch * share_of_samples for epoch in lr_schedule.milestones],
        "total_steps": total and math.ceil(total * share_of_samples * configured / accumulate),
    }
    changes = {
        "steps": steps,
        "optimizer": optimizer,
        "lr_schedule": lr_schedule.model_copy(update=rate_changes),
    }
    return longest.model_copy(update=changes)


def takes_longer(run: ComparedRun, other: ComparedRun) -> bool:
    """Return whether a run takes longer than another one, by at least an update of the other
    one.
    """
    return run.slots > other.slots * (1 + 1 / max(other.steps, 1))


def read_run(config: Config, summary: Summary, folder: Path) -> ComparedRun:
    """Return a run from its summary and its metrics.jsonl."""
    steps = summary["steps"]
    job = build_for_planning(config)
    # the first evaluation is before any update
    slots = [0.0, *job.play_updates(None, job.drains, steps).tolist()]
    # a run of an earlier version has no such key
    diverged_after = summary.get("diverged_after")
    # those without a test loss are of training
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    curve = [
        (slots[line["step"]], line["test_loss"], line["test_accuracy"])
        for line in lines
        if "test_loss" in line
    ]
    return ComparedRun(
        summary["method"],
        config.gradient_accumulation,
        config.optimizer.lr,
        steps,
        summary["samples"],
        slots[-1],
        summary["final"],
        curve,
        None if diverged_after is None else describe_divergence(diverged_after),
        len(set(job.placement)),
    )


# ---- in words, as JSON, as a picture


def describe(
    summary: Summary,
    other_summary: Summary,
    run: ComparedRun,
    same_samples: ComparedRun,
    same_time: Sequence[ComparedRun],
) -> str:
    """Return how far apart the runs ended at equal samples and at equal time; the last line is the
    first run's throughput.

    `same_samples` and `same_time` are the other method's runs with as many samples and with as much
    time.
    """
    # accuracy is compared if both runs have one
    has_loss_alone = any(one.final.get("test_accuracy") is None for one in (run, same_samples))
    key = "test_loss" if has_loss_alone else "test_accuracy"

    def show(one: ComparedRun) -> str:
        return format_number(one.final.get(key), 3)

    def compare(other: ComparedRun, words: str = "") -> str:
        a = run.final.get(key)
        b = other.final.get(key)
        difference = "unknown"
        if a is not None and b is not None:
            difference = f"{a - b:+.3f}" if key == "test_loss" else f"{(a - b) * 100:+.1f} points"
        return (
            f"{key.replace('_', ' ')} {show(run)} by {run.method}, {show(other)} by "
            f"{other.method}{words}: {difference}"
        )

    best = find_best(same_time, key)
    at_equal_time = f"at equal time: no run of {same_samples.method} ended in time"
    if best is not None:
        at_equal_time = (
            f"at equal time, {run.slots:,.0f} slots (planned): {compare(best, ' at its best')}"
        )
    elif not same_time and not takes_longer(same_samples, run):
        at_equal_time = f"at equal time: {same_samples.method} takes no longer"
    lines = [
        "",
        f"at equal samples, {run.samples:,}: {compare(same_samples)}",
        f"  by the schedule (planned) {run.method} takes {run.slots:,.0f} slots, "
        f"{same_samples.method} {same_samples.slots:,.0f}",
        at_equal_time,
    ]
    if run.devices != same_samples.devices:
        lines.append(
            f"  {run.method} has {run.devices} devices, {same_samples.method} "
            f"{same_samples.devices}"
        )
    lines += [f"  {one.method}: {one.diverged}" for one in (run, same_samples) if one.diverged]
    for one in same_time:
        rate = "" if one.rate is None else f", rate {one.rate:g}"
        lines.append(
            f"  {one.method} with {one.accumulate} microbatches per update: {one.steps} updates, "
            f"{one.samples:,} samples{rate}: "
            f"{one.diverged or show(one)}"
        )
    lines.append(f"{run.method} busy: {format_busy(summary)}")
    lines.append(f"{same_samples.method} busy: {format_busy(other_summary)}")
    return "\n".join([*lines, format_throughput(summary)])


def find_best(runs: Sequence[ComparedRun], key: str) -> ComparedRun | None:
    """Return the run with the best final "test_accuracy" or "test_loss"; the first of equals."""
    sign = 1 if key == "test_accuracy" else -1
    return max(
        (run for run in runs if run.final.get(key) is not None),
        key=lambda run: sign * (run.final[key] or 0.0),
        default=None,
    )


def make_record(
    config: Config,
    stages: int,
    run: ComparedRun,
    same_samples: ComparedRun,
    same_time: Sequence[ComparedRun],
) -> dict[str, Any]:
    """Return the comparison as JSON: `against.json`."""

    def convert(one: ComparedRun) -> dict[str, Any]:
        curve = [dict(zip(("slots", "test_loss", "test_accuracy"), point)) for point in one.curve]
        return {**one._asdict(), "final": dict(one.final), "curve": curve}

    return {
        "schema": 1,
        "model": config.model.entry,
        "data": config.data.name,
        "seed": config.seed,
        "stages": stages,
        "micro_batch_size": config.micro_batch_size,
        "evaluated": config.evaluate.subset,
        "time": "slots of the schedule (planned), one pass of a stage each",
        "run": convert(run),
        "same_samples": convert(same_samples),
        "same_time": [convert(one) for one in same_time],
    }


def draw(record: Mapping[str, Any], file: Path) -> None:
    """Draw test accuracy (or loss) against time by the schedule from the content of
    against.json.
    """
    runs = [record["run"], record["same_samples"], *record["same_time"]]
    has_accuracy = all(p["test_accuracy"] is not None for run in runs for p in run["curve"])
    key = "test_accuracy" if has_accuracy else "test_loss"
    first = record["run"]
    subset = f" on {record['evaluated']:,} samples" if record["evaluated"] else ""
    title = (
        f"{record['model'].rpartition(':')[2]} on {record['stages']} stages, {record['data']}: "
        f"{first['steps']} updates by "
        f"{first['method']}, {first['samples']:,} samples"
    )
    note = (
        f"microbatches of {record['micro_batch_size']}; one run a line, seed {record['seed']}; "
        f"time is planned, not measured"
    )
    with open_figure(file, (9, 5), title=title, note=note) as (axes,):
        for run in runs:
            # a run that has diverged has none
            if not run["curve"]:
                continue
            end = format_number(run["curve"][-1][key], 3)
            label = (
                f"{run['method']}, {run['accumulate']} microbatches per update: "
                f"{run['samples']:,} samples, {end}"
            )
            axes.plot(
                [p["slots"] for p in run["curve"]],
                [p[key] for p in run["curve"]],
                marker="o",
                markersize=4,
                linewidth=2.5 if run is first else 1.3,
                label=label,
            )
        axes.axvline(first["slots"], color="gray", linestyle=":", linewidth=1)
        axes.set(
            xlabel="time by the schedule: slots (planned), in each of which a stage does one pass",
            ylabel=key.replace("_", " ") + subset,
        )
        axes.text(first["slots"], axes.get_ylim()[1], " equal time", color="gray", va="top")
        axes.legend(fontsize="small", loc="lower right")
