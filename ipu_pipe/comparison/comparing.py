"""Compare methods on a loop of the caller's own: `compare` trains by each method, at a few
multiples of the loop's learning rate, with several seeds.

    for rate in rates: for seed in seeds: for method in methods    shows early which methods run
    where a method's best rate is the smallest or the largest      one more rate
"""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any, Mapping, Sequence, Tuple

from ipu_pipe.comparison.kept_trainings import KeptTrainings, open_kept
from ipu_pipe.comparison.loop_comparison import LoopComparison
from ipu_pipe.comparison.processes import choose_process_count, open_workers
from ipu_pipe.comparison.recording import LoopFunction, are_measured, train_once
from ipu_pipe.comparison.stage_times import StageTimes
from ipu_pipe.comparison.trainings import MethodRow, Training
from ipu_pipe.errors import BadInput, raise_faults, say_in
from ipu_pipe.hardware.description import read_hardware
from ipu_pipe.job.factories import explain_wrong_call
from ipu_pipe.refusals import Language
from ipu_pipe.run.progress import Bar, Progress
from ipu_pipe.schedule.methods import require_known_methods
from ipu_pipe.text import format_count, show

# (method, multiple of the rate, seed) of a training
Job = Tuple[MethodRow, float, int]


def compare(
    run: LoopFunction,
    methods: Sequence[str] | Mapping[str, Any],
    *,
    stages: Any,
    seeds: int | Sequence[int] = 3,
    rates: Sequence[float] = (1, 0.3, 0.1),
    hardware: Any = None,
    out: str | Path | None = None,
    processes: int | None = None,
    quiet: bool = False,
) -> LoopComparison:
    """Train a loop by each of `methods`, and compare their losses against samples and against the
    time that devices would take.

        def run(pipeline, seed):
            torch.manual_seed(seed)
            model, optimizer, scheduler = make_training()
            with pipeline(model, loss, optimizer) as pipe:
                for x, y in train_loader:
                    pipe.step(x, y)
                    scheduler.step()
                pipe.evaluate(test_loader, ["accuracy"])

        result = ipu_pipe.compare(run, ["gpipe", "pipedream_2bw", "pipemare"], stages=8)
        print(result)
        result.save("compare.html")

    run:      the loop. `pipeline(model, loss, optimizer, ...)` makes what `ipu_pipe.Pipeline`
              would, with the method, the stages and the seed filled in. What it returns is kept.
    methods:  names, the first of which is the baseline; or a mapping from labels to arguments of
              `Pipeline`, such as {"PipeMare": {"method": "pipemare", "microbatches": 4}}.
    stages:   the same stages for all, as in `Pipeline`.
    seeds:    how many, from 0 on, or which.
    rates:    multiples of the loop's learning rate, which act after its scheduler. Each method is
              compared at its best one; if that is at the edge, one more is tried.
    hardware: the devices that times are predicted for, as "h100x8"; None: the stages are measured
              on this machine, once for all methods.
    out:      a folder that keeps each training, so that the same call continues after Ctrl-C.
    processes: the most trainings at once, in forked processes; None: as many as there are cores,
              where torch computes in one thread. What a loop writes into objects outside itself
              stays in its process: 1 trains one after another, here.
    quiet:    print nothing.

    Raise `BadInput` if the arguments do not fit or no method can run. A method that cannot run is a
    row with the reason. Exceptions of the loop pass unchanged.
    """
    with say_in(Language.PYTHON):
        rows = _parse_methods(methods, stages)
        seed_list = _parse_seeds(seeds)
        rate_list = _parse_rates(rates)
        why = explain_wrong_call(run, "pipeline", "seed")
        raise_faults([f"run: {why}"] if why else [])
        if hardware is not None:
            # for its faults alone, before anything trains
            read_hardware(hardware, "hardware")
            if are_measured(stages):
                why = "is measured on this machine, and times are predicted for hardware"
                raise BadInput(f"stages: by: time: {why}: must be a number, names, or by flops")
        if processes is not None and (type(processes) is not int or processes < 1):
            raise BadInput(f"processes: {show(processes)}: must be a count from 1, or None")
        stage_times = StageTimes(hardware)
        progress = Progress(quiet)
        with open_kept(out, run, stages, stage_times, progress.say) as kept_trainings:
            comparing = _Comparing(run, stage_times, progress, kept_trainings, processes)
            comparing.compare(rows, rate_list, seed_list)
        return LoopComparison(rows, stage_times.describe(), stage_times.spread)


class _Comparing:
    """A comparison that is under way."""

    def __init__(
        self,
        run: LoopFunction,
        stage_times: StageTimes,
        progress: Progress,
        kept_trainings: KeptTrainings,
        processes: int | None,
    ) -> None:
        self._run = run
        self._stage_times = stage_times
        self._progress = progress
        self._kept = kept_trainings
        self._processes = processes
        self._refused: list[BadInput] = []
        self._is_ready = False

    def compare(
        self, rows: Sequence[MethodRow], rates: Sequence[float], seeds: Sequence[int]
    ) -> None:
        """Put all trainings into the rows. Raise `BadInput` if no method can run."""
        count = len(rows) * len(rates) * len(seeds)
        sizes = " x ".join(
            format_count(len(part), name)
            for part, name in ((rows, "method"), (rates, "rate"), (seeds, "seed"))
        )
        rest = ""
        if len(rates) > 1:
            rest = f", and up to {len(rows) * len(seeds)} more where a best rate is at the edge"
        if count > len(rows):
            rest += f"; rates=(1,), seeds=1 would make {len(rows)}"
        self._progress.say(f"compare: {sizes}: {format_count(count, 'training')}{rest}")
        jobs = itertools.product(rates, seeds, rows)
        # the rows vary fastest, so that every method is asked once before one is trained twice
        self._train([(row, rate, seed) for rate, seed, row in jobs])
        if all(row.reason for row in rows):
            # the first method's reason, since it is tried first
            raise self._refused[0]
        more = [(row, find_more(row, rates)) for row in rows if not row.reason]
        self._train([(row, rate, seed) for row, rate in more for seed in seeds if rate])
        if all(row.reason for row in rows):
            raise self._refused[0]
        for row, rate in more:
            if rate and not row.reason:
                row.notes.append(_describe_more(row, rate))

    def _train(self, jobs: Sequence[Job]) -> None:
        """Make these trainings, or read those that are kept."""
        missing = []
        for row, rate, seed in jobs:
            training = self._kept.read(row, rate, seed)
            if training is None:
                missing.append((row, rate, seed))
            else:
                _note(row, rate, seed, training)
        done = len(jobs) - len(missing)
        if done and missing:
            self._progress.say(f"compare: {done} of {len(jobs)} trainings are in the folder")
        first = None
        while missing and not self._is_ready:
            # here, since all share the stage times, and the processes torch's threads
            first, *missing = missing
            self._keep(first, self._try(first))
            self._is_ready = self._stage_times.are_known and not first[0].reason
            # a method that has been refused is not tried again
            missing = [job for job in missing if not job[0].reason]
        # only now: a config's loop has set torch's threads in its first training
        count, why = choose_process_count(self._processes)
        count = max(1, min(count, len(missing)))
        if first and missing:
            at_once = f"{count} at once" if count > 1 else f"one after another ({why})"
            self._say_time(first, len(missing), count, at_once)
        begun = len(jobs) - len(missing)
        # a generator, for what is refused meanwhile
        numbers = (n for n in range(len(missing)) if not missing[n][0].reason)
        # forked before the bar, which has a thread
        with open_workers(count, self._try, missing, _describe_job) as run_jobs:
            with self._progress.show_bar(len(jobs), begun, None, "training") as bar:
                for job, result in run_jobs(numbers):
                    self._keep(job, result, bar)

    def _try(self, job: Job) -> Training | BadInput:
        """Return a training, or why its method cannot run."""
        row, rate, seed = job
        try:
            return train_once(self._run, row.arguments, rate, seed, self._stage_times)
        except BadInput as error:
            return error

    def _keep(self, job: Job, result: Training | BadInput, bar: Bar | None = None) -> None:
        """Keep a training, or note why its method cannot run."""
        row, rate, seed = job
        if isinstance(result, BadInput):
            result.say(Language.PYTHON)
            row.reason = "; ".join(result.faults)
            self._refused.append(result)
            return
        self._kept.write(row, rate, seed, result)
        _note(row, rate, seed, result)
        samples = result.samples_per_update * len(result.losses)
        # an infinite one would stay in the bar's average
        final = result.final if math.isfinite(result.final) else None
        if bar is not None:
            bar.advance(final, None, samples / result.wall_seconds)

    def _say_time(self, first: Job, count_left: int, processes: int, at_once: str) -> None:
        row, rate, seed = first
        # the others do not measure the stages
        seconds = row.trainings[rate][seed].wall_seconds - self._stage_times.measuring_seconds
        self._progress.say(
            f"compare: the first training took {format_seconds(seconds)}: "
            f"{format_count(count_left, 'training')} more, {at_once}, about "
            f"{format_seconds(seconds * count_left / processes)}"
        )


def _describe_job(job: Job) -> str:
    row, rate, seed = job
    return f"training of {row.label} at rate {rate:.3g}, seed {seed}"


def _note(row: MethodRow, rate: float, seed: int, training: Training) -> None:
    row.trainings.setdefault(rate, {})[seed] = training
    row.notes = list(training.notes)


def _describe_more(row: MethodRow, rate: float) -> str:
    """Return the line on the rate `rate` that was tried beside the given ones."""
    if not any(map(row.learns_at, row.trainings)):
        return f"no given rate trains, nor does {rate:.3g}: give smaller rates"
    if not any(row.learns_at(multiple) for multiple in row.trainings if multiple != rate):
        return f"no given rate trains; {rate:.3g} was tried, too, and does: give smaller rates"
    result = "is the best, at the edge of all" if row.best == rate else "is worse"
    return f"the best of the given rates was at the edge; {rate:.3g} was tried, too, and {result}"


def find_more(row: MethodRow, rates: Sequence[float]) -> float | None:
    """Return the rate beyond the best one of `rates` if this is at the edge, as the smallest is if
    none trains; None if it is not, or if a single rate was asked for.
    """
    ordered = sorted(rates)
    if len(ordered) < 2:
        return None
    best = row.best if any(map(row.learns_at, row.trainings)) else ordered[0]
    beyond = {
        # as far beyond the edge, as a factor, as the edge is from its neighbour
        ordered[0]: ordered[0] ** 2 / ordered[1],
        ordered[-1]: ordered[-1] ** 2 / ordered[-2],
    }
    # three digits, which are readable and name its file
    rate = float(f"{beyond[best]:.3g}") if best in beyond else None
    # rounding may have led back to one of them
    return None if rate in ordered else rate


def format_seconds(seconds: float) -> str:
    """Return a duration in a unit that fits."""
    if seconds < 90:
        return f"{seconds:.2g} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


# ---- the arguments


def _parse_methods(methods: Any, stages: Any) -> list[MethodRow]:
    """Return the methods as rows. Raise `BadInput` unless they are different names, or a mapping
    from labels to names or arguments of `Pipeline`.
    """
    is_list = isinstance(methods, (list, tuple))
    is_list = is_list and all(isinstance(name, str) for name in methods)
    named = dict.fromkeys(methods, {}) if is_list else methods
    # dict.fromkeys has a name that is given twice only once
    if not isinstance(named, Mapping) or not named or len(named) < len(methods):
        raise BadInput(
            f"methods: {show(methods)}: must be different names, such as ['gpipe', 'pipemare'], "
            f"or a mapping from labels to arguments of Pipeline"
        )
    rows = []
    for label, value in named.items():
        arguments = {"method": value} if isinstance(value, str) else value
        is_named = isinstance(arguments, Mapping) and isinstance(arguments.get("method", ""), str)
        if not is_named or "stages" in arguments:
            why = "must be a name, or arguments of Pipeline other than stages, method a name"
            raise BadInput(f"methods: {show(label)}: {show(value)}: {why}")
        # a label is the method's name unless the arguments have one
        rows.append(MethodRow(str(label), {"method": label, **arguments, "stages": stages}))
    require_known_methods([row.arguments["method"] for row in rows], "methods")
    return rows


def _parse_seeds(seeds: Any) -> list[int]:
    # not isinstance, for which True is a number
    chosen = list(range(seeds)) if type(seeds) is int else seeds
    if not _are_different(chosen) or not all(type(seed) is int and seed >= 0 for seed in chosen):
        raise BadInput(f"seeds: {show(seeds)}: must be a count from 1, or different whole numbers")
    return list(chosen)


def _parse_rates(rates: Any) -> list[float]:
    is_rate = [type(rate) in (int, float) and 0 < rate < math.inf for rate in _list(rates)]
    if not _are_different(rates) or not all(is_rate):
        why = "must be different multiples of the loop's rate, such as (1, 0.3)"
        raise BadInput(f"rates: {show(rates)}: {why}")
    return [float(rate) for rate in rates]


def _list(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (list, tuple, range)) else ()


def _are_different(values: Any) -> bool:
    """Return whether values are a list of at least one, and none twice."""
    chosen = _list(values)
    # not by a set: what a caller passes may not be hashable
    return bool(chosen) and not any(value in chosen[:i] for i, value in enumerate(chosen))
