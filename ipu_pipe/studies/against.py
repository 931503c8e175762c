"""A run against another method, such as an asynchronous one against GPipe: with as many samples, and with as much time.

Samples alone hide what a pipeline that never empties is for: it trains on more of them in the same time. Time is planned: slots
of the schedule, in each of which every stage does one pass, so that a run of M microbatches takes 2 M / (busy share) of them.

At equal time a method that empties the pipeline may choose how many microbatches K make an update: more leave fewer slots idle,
but make fewer updates. It is run with some, and the best one counts. Against the config's own N the learning rate is K / N times
as high (linear scaling, Goyal et al. 2017); warm-up and milestones come at the same share of the samples, and of the run.
"""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from typing import List, Optional, Sequence

from ipu_pipe.backends.ranks import are_joined, is_main, run_on_main
from ipu_pipe.config.compare import keep_recorded_stages
from ipu_pipe.config.load import load_recorded
from ipu_pipe.config.schema import Config
from ipu_pipe.errors import RunFault
from ipu_pipe.files import write_json
from ipu_pipe.run.folder import check_folder, check_unlocked, replace_nonfinite
from ipu_pipe.run.progress import Progress
from ipu_pipe.run.train import check, reserve_folder, train
from ipu_pipe.schedule.methods import resolve_method
from ipu_pipe.schedule.timelines import compute_utilization
from ipu_pipe.studies.stories import Run, Summary, diverged, draw, planned_slots, record, run_of, stories

TIMES = (1, 2, 4, 8)  # the config's own microbatches an update, where none are given


def train_against(
    config: Config,
    other: Config,
    out: Path,
    accumulations: Sequence[int] = (),
    resume: bool = False,
    overwrite: bool = False,
    quiet: bool = False,
) -> str:
    """Train by `config` into `out`, then by `other` with as many samples and, where that takes longer by the schedule, with as
    much time, in folders in `out`. Leaves `against.json` and, where matplotlib is there, `against.png`; returns what is to be
    said. Raises BadInput before the first run has taken its time."""
    say = Progress(quiet or not is_main()).say
    second = folder_of(out, other.method)
    again = resume and (second / "config.yaml").exists()
    counts = choices(other, accumulations)
    check(other, second, resume=again, overwrite=overwrite)
    run_on_main(lambda: _check_folders([folder_of(out, other.method, count) for count in counts], resume, overwrite))
    with reserve_folder(second, resume=again, overwrite=overwrite):
        first_summary = train(config, out, resume=resume, overwrite=overwrite, quiet=quiet)
    say(f"\nas many samples by {other.method}:")
    other = keep_recorded_stages(load_recorded(out / "config.yaml"), other)  # the same stages
    other_summary = train(other, second, resume=again, overwrite=overwrite, quiet=quiet)
    both = run_of(config, first_summary, out), run_of(other, other_summary, second)
    timed: List[Run] = []
    if both[1].slots > both[0].slots * (1 + 1 / both[0].steps):
        for count in counts:
            chosen = at_equal_time(other, count, first_summary)
            if chosen is not None:
                say(f"\nas much time by {other.method}, {count} microbatches an update:")
                timed.append(
                    _timed(chosen, folder_of(out, other.method, count), resume, overwrite, quiet, both[0].slots)
                )
    told = record(config, first_summary["model"]["stages"], both, timed)

    def leave() -> None:
        write_json(out / "against.json", replace_nonfinite(told))
        if importlib.util.find_spec("matplotlib") is not None:
            draw(told, out / "against.png")

    run_on_main(leave)
    return stories(first_summary, other_summary, both, timed)


def _check_folders(folders: Sequence[Path], resume: bool, overwrite: bool) -> None:
    for folder in folders:
        check_folder(folder, resume and (folder / "config.yaml").exists(), overwrite)
        check_unlocked(folder)


def _timed(config: Config, folder: Path, resume: bool, overwrite: bool, quiet: bool, slots: float) -> Run:
    """A run at equal time; what its rate is too high for is told, not raised."""
    again = resume and (folder / "config.yaml").exists()
    try:
        return run_of(config, train(config, folder, resume=again, overwrite=overwrite, quiet=quiet), folder)
    except RunFault as error:
        if "loss is" not in str(error) or are_joined():
            raise
        return diverged(config, str(error).split(";")[0], slots)


def folder_of(out: Path, method: str, accumulate: Optional[int] = None) -> Path:
    """Where a run of the other method is: at equal samples, or at equal time with so many microbatches an update."""
    return out / (method if accumulate is None else f"{method}-accumulate-{accumulate}")


def choices(config: Config, asked: Sequence[int] = ()) -> List[int]:
    """Microbatches an update that the other method is run with at equal time: those asked for, else some; its own alone where
    they leave no slot less idle."""
    own = config.gradient_accumulation
    if asked:
        return list(dict.fromkeys(asked))
    return [own * times for times in (TIMES if resolve_method(config.method).flushes else TIMES[:1])]


def at_equal_time(config: Config, accumulate: int, first: Summary) -> Optional[Config]:
    """The config of the other method with `accumulate` microbatches an update and as many updates as take no longer than the run
    of the summary `first`; None where that is less than two, or an epoch holds no such update."""
    own, slots = config.gradient_accumulation, planned_slots(first)
    share = compute_utilization(resolve_method(config.method, config.method_settings()), first["model"]["stages"], accumulate)
    steps = math.floor(slots * share / (2 * accumulate) * (1 + 1e-12))
    if steps < 2 or accumulate > first["updates_per_epoch"] * own:
        return None
    optimizer, rates = config.optimizer, config.lr_schedule
    if optimizer.lr is not None and not optimizer.reference_batch_size:  # which scales by itself
        optimizer = optimizer.model_copy(update={"lr": optimizer.lr * accumulate / own})
    part = steps * accumulate / (first["steps"] * own)  # of the samples
    rates = rates.model_copy(
        update={
            "warmup_steps": math.ceil(rates.warmup_steps * own / accumulate),
            "milestones": [epoch * part for epoch in rates.milestones],
        }
    )
    changes = {"gradient_accumulation": accumulate, "steps": steps, "optimizer": optimizer, "lr_schedule": rates}
    return config.model_copy(update=changes)
