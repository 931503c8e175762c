"""Experiments (a) to (e) of the randomized PipeDream paper: every row is run with a grid of learning rates, and the best one
counts.

Data, drawn orders and delays, and gradient noise follow the seed; the paper has seed 0 alone. To add an experiment, write a
function from a seed to its runs and a record in `STEP_GRIDS`.
"""

from __future__ import annotations

import functools
import json
import math
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Sequence, Tuple

import numpy as np

from ipu_pipe.config.load import configure
from ipu_pipe.report.plots import describe_seeds, open_figure, plot_mean_with_range
from ipu_pipe.schedule.delays import compute_greatest_delay
from ipu_pipe.schedule.methods import resolve_method
from ipu_pipe.schedule.timelines import make_schedule
from ipu_pipe.studies.experiment import Claim, Finals, Outcome, Request, check_claims, make_markdown
from ipu_pipe.studies.objectives import (
    Floats,
    Objective,
    make_logistic_regression,
    make_random_quadratic,
    make_tridiagonal_quadratic,
)
from ipu_pipe.studies.vector_runs import (
    Curve,
    count_jobs,
    count_microbatches,
    make_randomized_source,
    run_local_sgd,
    run_pipedream,
    run_randomized,
)
from ipu_pipe.studies.worker_pool import run_in_workers


class StepRun(NamedTuple):
    """One run of a row with one learning rate (`step`, the papers' word); `curve` has (block updates, slots, objective)."""

    label: str
    method: str
    args: Dict[str, Any]
    step: float
    curve: List[Tuple[int, int, float]]

    @property
    def final(self) -> float:
        """The objective at the end; infinite if the run diverged."""
        return self.curve[-1][2]


@dataclass(frozen=True)
class StepGrid:
    """An experiment; `measures` is the objective, small where a method does well; `run_seed` makes all runs of a seed."""

    name: str
    title: str
    source: str
    measures: str
    run_seed: Callable[[int], List[StepRun]]
    claims: Sequence[Claim]
    seeds: Sequence[int] = (0, 1, 2)
    setting: str = ""
    by_stages: bool = False  # rows are "METHOD P=stages": drawn against the number of stages

    def describe_size(self) -> str:
        """Return the number of seeds in words."""
        return f"{len(self.seeds)} seeds"

    def check(self, request: Request) -> None:
        """Raise `BadInput` for a choice of rows or size."""
        request.refuse(self.name, "it has one size and no rows to choose from", "full", "rows")

    def run(self, request: Request) -> Outcome:
        """Run all seeds, each in a process of its own, and compare the best step of each row."""
        seeds = request.seeds or self.seeds
        request.say(f"{self.title}: {len(seeds)} seeds")
        runs: Dict[int, List[StepRun]] = {}
        arguments = {seed: (self.name, seed) for seed in seeds}
        for seed, result in run_in_workers(_run_seed, arguments, request.jobs):
            runs[seed] = [StepRun(*run) for run in result["runs"]]
            request.say(f"seed {seed}: {len(runs[seed])} runs")
        return self.compare(dict(sorted(runs.items())), request.runs / self.name)

    def compare(self, runs: Mapping[int, List[StepRun]], folder: Path) -> Outcome:
        """Return the outcome of runs by seed."""
        results = summarize(self, runs)
        curves = [
            {"label": label, "seed": seed, "step": run.step, "curve": run.curve}
            for label, best in find_best_runs(runs).items()
            for seed, run in best.items()
        ]
        draw = functools.partial(draw_by_stages if self.by_stages else draw_curves, self, runs)
        return Outcome(results, make_step_table(self, results), folder, curves, {"curves.png": draw})


def _run_seed(name: str, seed: int) -> Dict[str, Any]:
    """Run one seed in a worker process, to which a grid itself cannot be sent."""
    return {"runs": [tuple(run) for run in STEP_GRIDS[name].run_seed(seed)]}


# ---- results


def find_best_runs(runs: Mapping[int, List[StepRun]]) -> Dict[str, Dict[int, StepRun]]:
    """Return for each row and seed the run with the least final objective."""
    best: Dict[str, Dict[int, StepRun]] = {}
    for seed, runs_of_seed in runs.items():
        for run in runs_of_seed:
            by_seed = best.setdefault(run.label, {})
            if seed not in by_seed or run.final < by_seed[seed].final:
                by_seed[seed] = run
    return best


def summarize(grid: StepGrid, runs: Mapping[int, List[StepRun]]) -> Dict[str, Any]:
    """Return the results as JSON: `final` is the mean over the seeds with the best step of each."""
    best = find_best_runs(runs)
    finals = {label: statistics.mean(run.final for run in by_seed.values()) for label, by_seed in best.items()}
    rows, runs_of_any_seed = [], next(iter(runs.values()))
    for label, by_seed in best.items():
        first, values = next(iter(by_seed.values())), [run.final for run in by_seed.values()]
        rows.append({
            "label": label, "method": first.method, "args": first.args, "step": first.step, "final": finals[label],
            "std": statistics.stdev(values) if len(values) > 1 else None,
            "step_by_seed": {str(seed): run.step for seed, run in by_seed.items()},
            "final_by_seed": {str(seed): run.final for seed, run in by_seed.items()},
            "updates": first.curve[-1][0], "slots": first.curve[-1][1],
            "stable_steps": sorted(
                run.step for run in runs_of_any_seed if run.label == label and run.final < run.curve[0][2]
            ),
        })  # fmt: skip
    return {
        "experiment": grid.name,
        "title": grid.title,
        "source": grid.source,
        "setting": grid.setting,
        "measures": grid.measures,
        "seeds": list(runs),
        "rows": rows,
        **check_claims(grid.claims, finals),
    }


def make_step_table(grid: StepGrid, results: Mapping[str, Any]) -> str:
    """Return the results as Markdown."""
    notes = [
        f"Source: {grid.source}. Made by `python tools/reproduce.py {grid.name}`; seeds {', '.join(map(str, results['seeds']))}"
        " (data, draws and noise).",
        f"{grid.setting}. Best step of each row by the final value of {grid.measures}, mean and standard deviation.",
    ]
    rows = []
    for row in results["rows"]:
        steps = ", ".join(f"2^{math.log2(step):.0f}" for step in row["step_by_seed"].values())
        spread = "" if row["std"] is None else f" +- {row['std']:.2g}"
        by_seed = ", ".join(f"{value:.6g}" for value in row["final_by_seed"].values())
        rows.append(
            (row["label"], steps, f"{row['final']:.6g}{spread}", by_seed, f"{row['updates']:,}", f"{row['slots']:,}")
        )
    head = ("row", "best step by seed", f"final {grid.measures}", "by seed", "block updates", "slots")
    return make_markdown(results, notes, head, rows)


def draw_curves(grid: StepGrid, runs: Mapping[int, List[StepRun]], file: Path) -> None:
    """Draw the best runs against block updates and against slots."""
    note = f"{grid.setting}; best step of each row; {describe_seeds(list(runs))}"
    with open_figure(file, (8, 5), 2, title=grid.title, note=note) as panels:
        for place, (axes, axis) in enumerate(zip(panels, ("block updates", "slots"))):
            for label, by_seed in find_best_runs(runs).items():
                points = list(zip(*(run.curve for run in by_seed.values())))
                steps = sorted({f"2^{math.log2(run.step):.0f}" for run in by_seed.values()})
                values = [[at[2] for at in point] for point in points]
                label = f"{label}, step {' or '.join(steps)}"
                plot_mean_with_range(axes, [point[0][place] for point in points], values, markersize=2, label=label)
            axes.set(xlabel=axis, ylabel=grid.measures)
            if grid.measures == "f - f*":
                axes.set_yscale("log")
            axes.legend(fontsize="small")


def draw_by_stages(grid: StepGrid, runs: Mapping[int, List[StepRun]], file: Path) -> None:
    """Draw the final values of the best runs against the number of stages."""
    best = find_best_runs(runs)
    note = f"{grid.setting}; best step of each row; {describe_seeds(list(runs))}"
    with open_figure(file, (8, 5), title=grid.title, note=note) as (axes,):
        for method in ("PipeDream", "RPD", "LocalSGD"):
            groups = [[run.final for run in best[f"{method} P={P}"].values()] for P in STAGES]
            plot_mean_with_range(axes, STAGES, groups, label=method)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set(xlabel="stages", ylabel=f"final {grid.measures}")
        axes.legend(fontsize="small")


# ---- the runs


def make_powers(low: int, high: int) -> Floats:
    """Return 2^low to 2^high."""
    return np.asarray(2.0 ** np.arange(low, high + 1))


def split_curve(
    label: str, method: str, args: Dict[str, Any], rates: Floats, curve: Curve, least: float
) -> List[StepRun]:
    """Return one run for each rate, with the objective less its least value."""
    runs = []
    for g, rate in enumerate(rates):
        points = [
            (int(k), int(slot), float(v)) for k, slot, v in zip(curve.updates, curve.slots, curve.values[:, g] - least)
        ]
        runs.append(StepRun(label, method, args, float(rate), points))
    return runs


BOUNDS = (8, 30, 60, 180, 420)


def run_rpd_quadratic(seed: int) -> List[StepRun]:
    """Run (a) PipeDream against randomized PipeDream: P = 8, 400 microbatches, so 3200 block updates each."""
    objective, P, M, rates = make_random_quadratic(2000, 512, 100, seed), 8, 400, make_powers(-8, 0)
    least = objective.optimum
    runs = split_curve("PipeDream", "pipedream", {}, rates, run_pipedream(objective, P, M, rates, seed), least)
    args = [{"delay_bound": bound} for bound in BOUNDS]
    sources = [make_randomized_source(P, M, objective.batches, one, seed) for one in args]
    for one, curve in zip(args, run_randomized(objective, sources, rates, seed)):
        runs += split_curve(f"RPD {one['delay_bound']}", "randomized_pipedream", one, rates, curve, least)
    return runs


LOCAL_STEPS = (2, 5, 30)


def run_against_local_sgd(
    objective: Objective, P: int, slots: int, rates: Floats, local_rates: Floats, seed: int
) -> List[StepRun]:
    """Run (b) or (d), PipeDream against LocalSGD: PipeDream's microbatches in so many slots.

    LocalSGD's timeline of as many jobs is longer; it is cut after as many slots.
    """
    least, M = objective.optimum, count_microbatches(slots, P)
    curve = run_pipedream(objective, P, M, rates, seed)
    runs = split_curve("PipeDream", "pipedream", {}, rates, curve, least)
    for K in LOCAL_STEPS:
        args = {"replicas": P, "local_steps": K}
        curve = run_local_sgd(objective, P, P, K, M, local_rates, seed, slots)
        runs += split_curve(f"LocalSGD K={K}", "local_sgd", args, local_rates, curve, least)
    return runs


def run_local_sgd_quadratic(seed: int) -> List[StepRun]:
    """Run (b): P = R = 16, 1230 slots: PipeDream's 600 microbatches."""
    objective = make_tridiagonal_quadratic(600, 512, 5, seed)
    return run_against_local_sgd(objective, 16, 1230, make_powers(-12, 2), make_powers(-12, 2), seed)


def run_local_sgd_logistic(seed: int) -> List[StepRun]:
    """Run (d): P = R = 16, 830 slots: PipeDream's 400 microbatches."""
    objective = make_logistic_regression(50, 512, 1, 1e-4, 0.5, seed)
    return run_against_local_sgd(objective, 16, 830, make_powers(-12, -3), make_powers(-8, 2), seed)


STAGES = (2, 4, 8, 16, 32, 64, 128)


def run_scaling_logistic(seed: int) -> List[StepRun]:
    """Run (c): 3180 slots for every P; RPD makes PipeDream's block updates, with PipeDream's greatest delay as bound."""
    objective = make_logistic_regression(50, 512, 1, 1e-4, 0.5, seed)
    least, rates, local_rates, slots = objective.optimum, make_powers(-12, -3), make_powers(-8, 2), 3180
    runs: List[StepRun] = []
    for P in STAGES:
        M = count_microbatches(slots, P)
        curve = run_pipedream(objective, P, M, rates, seed)
        runs += split_curve(f"PipeDream P={P}", "pipedream", {}, rates, curve, least)
        bound = {"delay_bound": compute_greatest_delay(P)}
        source = make_randomized_source(P, M, objective.batches, bound, seed)
        (curve,) = run_randomized(objective, [source], rates, seed)
        runs += split_curve(f"RPD P={P}", "randomized_pipedream", bound, rates, curve, least)
        args = {"replicas": P, "local_steps": 5}
        curve = run_local_sgd(objective, P, P, 5, count_jobs(slots, P, P, 5), local_rates, seed)
        runs += split_curve(f"LocalSGD P={P}", "local_sgd", args, local_rates, curve, least)
    return runs


TRANSFORMER_STAGES, SLOTS, STEP = 16, 2078, 2.0**-3
LOSS_WINDOW = 64  # microbatches whose losses make a point of a curve
TRANSFORMER = {  # 0.7 M parameters
    "vocabulary": 84, "width": 64, "heads": 4, "blocks": TRANSFORMER_STAGES - 2, "context": 32, "gpt2": False,
}  # fmt: skip


def run_local_sgd_transformer(seed: int, slots: int = SLOTS) -> List[StepRun]:
    """Run (e): a character Transformer trained by the emulator: PipeDream, and LocalSGD with K = 1, 4 and 8, in so many slots."""
    P = TRANSFORMER_STAGES
    runs = [_train_transformer("PipeDream", "pipedream", {}, count_microbatches(slots, P), 1, slots, seed)]
    for K in (1, 4, 8):
        steps = count_jobs(slots, P, P, K) // P  # whole steps of all replicas
        args = {"replicas": P, "local_steps": K}
        runs.append(_train_transformer(f"LocalSGD K={K}", "local_sgd", args, steps, P, slots, seed))
    return runs


def _train_transformer(
    label: str, method: str, args: Dict[str, Any], steps: int, replicas: int, slots: int, seed: int
) -> StepRun:
    """Train one row; a point of its curve is the mean loss over `LOSS_WINDOW` microbatches or, of LocalSGD, whole steps."""
    from ipu_pipe.run.train import train  # imports torch

    config = configure(
        model={"entry": "models.transformer:transformer_lm", "args": TRANSFORMER},
        data={"name": "shakespeare", "context": 32, "test_subset": 64},
        method=method, method_args=args, micro_batch_size=16, steps=steps, seed=seed,
        optimizer={"name": "sgd", "lr": STEP}, evaluate={"every": 0}, backend={"threads": 1},
        log={"every": 1, "tensorboard": False}, checkpoint={"keep": 1},
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        train(config, folder, quiet=True)
        lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    losses = [record["train_loss"] for record in map(json.loads, lines) if "train_loss" in record]
    stages = TRANSFORMER_STAGES
    end = make_schedule(resolve_method(method, args), stages, steps * replicas, replicas).slot_count
    every = max(LOSS_WINDOW // replicas, 1)
    curve = [
        (k * replicas * stages, k * end // steps, statistics.mean(losses[k - every : k]))
        for k in range(every, steps + 1, every)
    ]
    return StepRun(label, method, args, STEP, curve)


# ---- the records


def is_below(better: str, *than: str) -> Callable[[Finals], bool]:
    """Return the condition that a row ends below all of the others."""
    return lambda finals: all(finals[better] < finals[other] for other in than)


def grows_with_stages(method: str) -> Callable[[Finals], bool]:
    """Return the condition that the three deepest pipelines end above the three shallowest, in the mean."""

    def holds(finals: Finals) -> bool:
        values: List[Any] = [finals[f"{method} P={P}"] for P in STAGES]
        return bool(sum(values[-3:]) > sum(values[:3]))

    return holds


LOCAL_LABELS = [f"LocalSGD K={K}" for K in LOCAL_STEPS]
_LOGISTIC = "d = 512, n = 50, batch 1, l2 1e-4, gradient noise 0.5"

STEP_GRIDS: Dict[str, StepGrid] = {
    grid.name: grid
    for grid in (
        StepGrid(
            "rpd_quadratic", "PipeDream and randomized PipeDream on a random quadratic",
            "randomized PipeDream, Figure 2(a)", "f - f*", run_rpd_quadratic,
            [
                Claim(
                    "RPD with bound P^2 - P/2 = 60 tracks PipeDream (within a factor of 2 at the end)",
                    lambda finals: 0.5 < finals["RPD 60"] / finals["PipeDream"] < 2,
                ),
                Claim(
                    "the larger the delay bound, the slower",
                    lambda finals: all(
                        finals[f"RPD {a}"] <= finals[f"RPD {b}"] for a, b in zip(BOUNDS, BOUNDS[1:])
                    ),
                ),
            ],
            setting="f = ||A x - b||^2 / 2n, n = 2000, d = 512, 20 batches of 100, P = 8, 400 microbatches, steps 2^-8 to 2^0",
        ),
        StepGrid(
            "local_sgd_quadratic", "PipeDream and LocalSGD on Nesterov's tridiagonal quadratic",
            "randomized PipeDream, Figure 4(a)", "f - f*", run_local_sgd_quadratic,
            [Claim("PipeDream is better than LocalSGD", is_below("PipeDream", *LOCAL_LABELS))],
            setting="d = 512, n = 600, batch 5, P = R = 16, 1230 slots, steps 2^-12 to 2^2",
        ),
        StepGrid(
            "scaling_logistic", "Scaling with the number of stages on logistic regression",
            "randomized PipeDream, Figure 2(b)", "f - f*", run_scaling_logistic,
            [
                Claim("PipeDream deteriorates as P grows", grows_with_stages("PipeDream")),
                Claim("RPD deteriorates as P grows", grows_with_stages("RPD")),
                Claim(
                    "LocalSGD is better than PipeDream at many stages (32, 64, 128)",
                    lambda finals: all(is_below(f"LocalSGD P={P}", f"PipeDream P={P}")(finals) for P in (32, 64, 128)),
                ),
            ],
            setting=f"{_LOGISTIC}, 3180 slots, R = P, K = 5, steps 2^-12 to 2^-3 (LocalSGD 2^-8 to 2^2)",
            by_stages=True,
        ),
        StepGrid(
            "local_sgd_logistic", "PipeDream and LocalSGD on logistic regression",
            "randomized PipeDream, Figure 4(b)", "f - f*", run_local_sgd_logistic,
            [
                Claim(
                    "LocalSGD, with the best K, is better than PipeDream",
                    lambda finals: any(is_below(label, "PipeDream")(finals) for label in LOCAL_LABELS),
                )
            ],
            setting=f"{_LOGISTIC}, P = R = 16, 830 slots, steps as for the scaling",
        ),
        StepGrid(
            "local_sgd_transformer", "PipeDream and LocalSGD on a character Transformer",
            "randomized PipeDream, Figure 4(c)", "training loss of the last 64 microbatches", run_local_sgd_transformer,
            [
                Claim("PipeDream is better than LocalSGD", is_below("PipeDream", *(f"LocalSGD K={K}" for K in (1, 4, 8)))),
                Claim("the longer the rounds, the better LocalSGD", lambda finals: (
                    finals["LocalSGD K=8"] <= finals["LocalSGD K=4"] <= finals["LocalSGD K=1"])),
            ],
            seeds=(0,),
            setting="embedding, 14 blocks and head (P = R = 16), width 64, 4 heads, batch 16, sequence 32, Tiny Shakespeare, 2078"
            " slots, step 2^-3; the paper's text is another, only the order of the methods is expected",
        ),
    )
}  # fmt: skip
