"""Experiments (a) to (d) of the randomized PipeDream paper, on objectives of one weight vector:
quadratics and logistic regression. Every row is run with a grid of learning rates, and the best one
counts.

Data, drawn orders and delays, and gradient noise follow the seed; the paper has seed 0 alone. To
add an experiment, write a record in `VECTOR_GRIDS`. Experiment (e) trains a Transformer:
configs/experiments/local_sgd_transformer.yaml.
"""

from __future__ import annotations

import functools
import itertools
import math
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from ipu_pipe.report.plots import open_figure
from ipu_pipe.schedule.delays import compute_greatest_delay
from tools.experiments import vector_runs
from tools.experiments.experiment import Experiment, Findings, Request, run_all
from tools.experiments.plots import describe_seeds, plot_mean_with_range
from tools.experiments.vector_runs import Floats, Objective
from tools.experiments.verdicts import Claim, judge

MEASURED = "f - f*"


class VectorRow(NamedTuple):
    """A method on some stages, for some microbatches (jobs of LocalSGD), run with each of `rates`;
    cut after `slots`, if any.
    """

    label: str
    method: str
    args: Dict[str, Any]
    stages: int
    microbatches: int
    rates: Floats
    slots: Optional[int] = None


class StepRun(NamedTuple):
    """A run of a row with one learning rate (`step`, the paper's word); `curve` has (block updates,
    slots, f - f*).
    """

    label: str
    method: str
    args: Dict[str, Any]
    step: float
    curve: List[Tuple[int, int, float]]

    @property
    def final(self) -> float:
        """Return the objective at the end; infinite if the run diverged."""
        return self.curve[-1][2]


BestRuns = Dict[str, Dict[int, StepRun]]  # row -> seed -> run


@dataclass(frozen=True)
class VectorGrid:
    """The rows of an experiment on the objective that a seed draws.

    With `by_stages` the rows are "METHOD P=stages" and drawn against the number of stages. A row of
    `tracked` is compared with another along the whole run: its distance is what claims find under
    "ROW from OTHER".
    """

    name: str
    title: str
    source: str
    setting: str
    make_objective: Callable[[int], Objective]
    rows: Sequence[VectorRow]
    claims: Sequence[Claim]
    by_stages: bool = False
    tracked: Sequence[Tuple[str, str]] = ()

    def make_experiment(self) -> Experiment:
        """Return the experiment that runs all seeds, each in a process of its own, and compares the
        best step of each row.
        """
        return Experiment(
            self.name,
            self.title,
            self.source,
            f"{len(SEEDS)} seeds",
            self.make_findings,
            seeds=SEEDS,
        )

    def make_findings(self, request: Request, folder: Path) -> Findings:
        """Run all seeds and compare the best step of each row; nothing is kept in the folder."""
        arguments = {seed: (self.name, seed) for seed in request.seeds}
        return compare(
            self,
            run_all(
                run_named, arguments, request, lambda seed, runs: f"seed {seed}: {len(runs)} runs"
            ),
        )


def run_named(name: str, seed: int) -> List[StepRun]:
    """Run one seed of a grid in a worker process, to which the grid itself cannot be sent."""
    return run_seed(VECTOR_GRIDS[name], seed)


def run_seed(grid: VectorGrid, seed: int) -> List[StepRun]:
    """Run every row with all of its learning rates at once; neighbouring rows of randomized
    PipeDream share their products.
    """
    objective, runs = grid.make_objective(seed), []
    least = objective.optimum
    for (method, P, M), rows_of_kind in itertools.groupby(
        grid.rows, lambda row: (row.method, row.stages, row.microbatches)
    ):
        rows = list(rows_of_kind)
        if method == "pipedream":
            curves = [vector_runs.run_pipedream(objective, P, M, row.rates, seed) for row in rows]
        elif method == "local_sgd":
            curves = [
                vector_runs.run_local_sgd(
                    objective,
                    P,
                    row.args["replicas"],
                    row.args["local_steps"],
                    M,
                    row.rates,
                    seed,
                    row.slots,
                )
                for row in rows
            ]
        else:
            sources = [
                vector_runs.make_randomized_source(P, M, objective.batches, row.args, seed)
                for row in rows
            ]
            curves = vector_runs.run_randomized(objective, sources, rows[0].rates, seed)
        for row, curve in zip(rows, curves):
            for g, rate in enumerate(row.rates.tolist()):
                values = (curve.values[:, g] - least).tolist()
                points = list(zip(curve.updates.tolist(), curve.slots.tolist(), values))
                runs.append(StepRun(row.label, row.method, row.args, rate, points))
    return runs


# ---- results


def find_best_runs(runs: Mapping[int, List[StepRun]]) -> BestRuns:
    """Return for each row and seed the run with the least final objective."""
    best: BestRuns = {}
    for seed, runs_of_seed in runs.items():
        for run in runs_of_seed:
            by_seed = best.setdefault(run.label, {})
            by_seed[seed] = min(by_seed.get(seed, run), run, key=lambda one: one.final)
    return best


def compare(grid: VectorGrid, runs: Mapping[int, List[StepRun]]) -> Findings:
    """Summarize the runs by seed: `final` of a row is the mean over the seeds, with the best step
    of each.
    """
    best = find_best_runs(runs)
    runs_of_any_seed = next(iter(runs.values()))
    rows = [_summarize_row(label, by_seed, runs_of_any_seed) for label, by_seed in best.items()]
    finals = {
        label: {seed: run.final for seed, run in by_seed.items()} for label, by_seed in best.items()
    }
    distances = {
        f"{row} from {other}": {
            seed: compute_distance(run, best[other][seed]) for seed, run in best[row].items()
        }
        for row, other in grid.tracked
    }
    seeds = list(runs)
    draw = draw_by_stages if grid.by_stages else draw_curves
    note = f"{grid.setting}; best step of each row; {describe_seeds(seeds)}"
    return Findings(
        {
            "setting": grid.setting,
            "measures": MEASURED,
            "seeds": seeds,
            "rows": rows,
            "distances": distances,
        },
        [judge(claim, {**finals, **distances}) for claim in grid.claims],
        f"; seeds {', '.join(map(str, seeds))} (data, draws and noise).\n{grid.setting}. Best step "
        f"of each row by the final value"
        f" of {MEASURED}, mean and standard deviation.",
        ("row", "best step by seed", f"final {MEASURED}", "by seed", "block updates", "slots"),
        [_make_cells(row) for row in rows],
        curves=[
            {"label": label, "seed": seed, "step": run.step, "curve": run.curve}
            for label, by_seed in best.items()
            for seed, run in by_seed.items()
        ],
        pictures={"curves.png": functools.partial(draw, best, grid.title, note)},
    )


def _summarize_row(
    label: str, by_seed: Mapping[int, StepRun], runs_of_any_seed: Sequence[StepRun]
) -> Dict[str, Any]:
    """Return the results of a row from its runs with the best step of each seed."""
    first = next(iter(by_seed.values()))
    values = [run.final for run in by_seed.values()]
    updates, slots, _ = first.curve[-1]
    return {
        "label": label,
        "method": first.method,
        "args": first.args,
        "step": first.step,
        "final": statistics.mean(values),
        "std": statistics.stdev(values) if len(values) > 1 else None,
        "step_by_seed": {str(seed): run.step for seed, run in by_seed.items()},
        "final_by_seed": {str(seed): run.final for seed, run in by_seed.items()},
        "updates": updates,
        "slots": slots,
        "stable_steps": sorted(
            run.step
            for run in runs_of_any_seed
            if run.label == label and run.final < run.curve[0][2]
        ),
    }


def _make_cells(row: Mapping[str, Any]) -> Tuple[str, ...]:
    deviation = "" if row["std"] is None else f" +- {row['std']:.2g}"
    return (
        row["label"],
        ", ".join(show_power(step) for step in row["step_by_seed"].values()),
        f"{row['final']:.6g}{deviation}",
        ", ".join(f"{value:.6g}" for value in row["final_by_seed"].values()),
        f"{row['updates']:,}",
        f"{row['slots']:,}",
    )


def show_power(step: float) -> str:
    """Return a step as a power of 2."""
    return f"2^{math.log2(step):.0f}"


def compute_distance(run: StepRun, other: StepRun) -> float:
    """Return how far apart two curves are in decades: the mean of |log10 a - log10 b| over the
    block updates of both.
    """
    updates, other_updates = ([point[0] for point in one.curve] for one in (run, other))
    values, other_values = (
        [count_decades(point[2]) for point in one.curve] for one in (run, other)
    )
    marks = np.linspace(0, min(updates[-1], other_updates[-1]), 241)
    difference = np.interp(marks, updates, values) - np.interp(marks, other_updates, other_values)
    return float(np.abs(difference).mean())


def draw_curves(best: BestRuns, title: str, note: str, file: Path) -> None:
    """Draw the best runs against block updates and against slots."""
    with open_figure(file, (8, 5), 2, title=title, note=note) as panels:
        for i, (axes, x_label) in enumerate(zip(panels, ("block updates", "slots"))):
            for label, by_seed in best.items():
                points = list(zip(*(run.curve for run in by_seed.values())))
                steps = sorted({show_power(run.step) for run in by_seed.values()})
                values = [[point[2] for point in by_run] for by_run in points]
                label = f"{label}, step {' or '.join(steps)}"
                plot_mean_with_range(
                    axes, [by_run[0][i] for by_run in points], values, markersize=2, label=label
                )
            axes.set(xlabel=x_label, ylabel=MEASURED, yscale="log")
            axes.legend(fontsize="small")


def draw_by_stages(best: BestRuns, title: str, note: str, file: Path) -> None:
    """Draw the final values of the best runs against the number of stages."""
    with open_figure(file, (8, 5), title=title, note=note) as (axes,):
        for method in dict.fromkeys(label.split(" P=")[0] for label in best):
            stages = [P for P in STAGES if f"{method} P={P}" in best]
            groups = [[run.final for run in best[f"{method} P={P}"].values()] for P in stages]
            plot_mean_with_range(axes, stages, groups, label=method)
        axes.set_xscale("log", base=2)
        axes.set(xlabel="stages", ylabel=f"final {MEASURED}", yscale="log")
        axes.legend(fontsize="small")


# ---- the records

SEEDS = (0, 1, 2)
BOUNDS = (8, 30, 60, 180, 420)
LOCAL_STEPS = (2, 5, 30)
LOCAL_LABELS = [f"LocalSGD K={K}" for K in LOCAL_STEPS]
STAGES = (2, 4, 8, 16, 32, 64, 128)
QUADRATIC_STAGES = STAGES[:-1]
CONTROL = "RPD without delays"
LOGISTIC = "d = 512, n = 50, batch 1, l2 1e-4, gradient noise 0.5"


def make_powers(low: int, high: int) -> Floats:
    """Return 2^low to 2^high."""
    return np.asarray(2.0 ** np.arange(low, high + 1))


def list_rows_against_local_sgd(
    P: int, slots: int, rates: Floats, local_rates: Floats
) -> List[VectorRow]:
    """Return PipeDream for as many microbatches as take `slots`, and LocalSGD for as many jobs.

    LocalSGD's timeline of these is longer; it is cut after `slots`.
    """
    M = vector_runs.count_microbatches(slots, P)
    return [
        VectorRow("PipeDream", "pipedream", {}, P, M, rates),
        *(
            VectorRow(
                f"LocalSGD K={K}",
                "local_sgd",
                {"replicas": P, "local_steps": K},
                P,
                M,
                local_rates,
                slots,
            )
            for K in LOCAL_STEPS
        ),
    ]


def list_scaling_rows(slots: int, rates: Floats, local_rates: Floats) -> List[VectorRow]:
    """Return all methods in `slots` slots on each number of stages.

    Randomized PipeDream makes PipeDream's block updates, with PipeDream's greatest delay as bound.
    """
    rows = []
    for P in STAGES:
        M, args = vector_runs.count_microbatches(slots, P), {"replicas": P, "local_steps": 5}
        rows += list_staleness_rows(P, M, rates)
        microbatches = vector_runs.count_local_sgd_microbatches(slots, P, P, 5)
        rows.append(VectorRow(f"LocalSGD P={P}", "local_sgd", args, P, microbatches, local_rates))
    return rows


def list_staleness_rows(P: int, M: int, rates: Floats) -> List[VectorRow]:
    """Return PipeDream, randomized PipeDream with PipeDream's greatest delay as bound, and as
    control without delays.

    All make the block updates of M microbatches; the randomized rows draw the same stages and
    microbatches.
    """
    bounds = {"RPD": compute_greatest_delay(P), CONTROL: 0}
    return [
        VectorRow(f"PipeDream P={P}", "pipedream", {}, P, M, rates),
        *(
            VectorRow(f"{name} P={P}", "randomized_pipedream", {"delay_bound": bound}, P, M, rates)
            for name, bound in bounds.items()
        ),
    ]


def make_logistic(seed: int) -> Objective:
    """Draw the logistic regression of experiments (c) and (d)."""
    return vector_runs.make_logistic_regression(50, 512, 1, 1e-4, 0.5, seed)


def count_decades(value: float) -> float:
    """Return log10 of a value of f - f*; -300 for 0."""
    return math.log10(max(value, 1e-300))


def compare_pairs(
    text: str, pairs: Sequence[Tuple[str, str]], choose: Callable[..., float] = min
) -> Claim:
    """Return the claim that in all pairs (with `choose` max: in one) the first row ends below the
    second, in decades.
    """

    def gap(finals: Mapping[str, float]) -> float:
        return choose(
            count_decades(finals[above]) - count_decades(finals[below]) for below, above in pairs
        )

    return Claim(text, list(dict.fromkeys(label for pair in pairs for label in pair)), gap)


def fit_growth(finals: Mapping[str, float], method: str, stages: Sequence[int]) -> float:
    """Return the slope of the line through the final values of a method by number of stages, in
    decades per doubling.
    """
    values = [count_decades(finals[f"{method} P={P}"]) for P in stages]
    return float(np.polyfit(np.log2(stages), values, 1)[0])


def claim_growth(method: str, stages: Sequence[int] = STAGES) -> Claim:
    """Return the claim that the final value grows with the number of stages."""
    labels = [f"{method} P={P}" for P in stages]
    text = f"{method} deteriorates as P grows (decades per doubling)"
    return Claim(text, labels, lambda finals: fit_growth(finals, method, stages))


def claim_growth_by_delay(method: str, control: str, stages: Sequence[int]) -> Claim:
    """Return the claim that the final value of a method grows faster than that of a control without
    delays.
    """
    labels = [f"{one} P={P}" for one in (method, control) for P in stages]
    text = f"delay is why {method} deteriorates: {control} does less (decades per doubling)"
    return Claim(
        text,
        labels,
        lambda finals: fit_growth(finals, method, stages) - fit_growth(finals, control, stages),
    )


def claim_tracking(row: str, other: str) -> Claim:
    """Return the claim that a row's curve stays within a factor of 2 of another's in the mean of
    the logarithms.
    """
    distance = f"{row} from {other}"
    text = f"{row} tracks {other} (mean distance of the log curves, within a factor of 2)"
    return Claim(text, (distance,), lambda finals: finals[distance], margin=math.log10(2))


VECTOR_GRIDS: Dict[str, VectorGrid] = {
    grid.name: grid
    for grid in (
        VectorGrid(
            "rpd_quadratic",
            "PipeDream and randomized PipeDream on a random quadratic",
            "randomized PipeDream, Figure 2(a)",
            "f = ||A x - b||^2 / 2n, n = 2000, d = 512, 20 batches of 100, P = 8, 400 "
            "microbatches, steps 2^-8 to 2^0",
            lambda seed: vector_runs.make_random_quadratic(2000, 512, 100, seed),
            [
                VectorRow("PipeDream", "pipedream", {}, 8, 400, make_powers(-8, 0)),
                *(
                    VectorRow(
                        f"RPD {bound}",
                        "randomized_pipedream",
                        {"delay_bound": bound},
                        8,
                        400,
                        make_powers(-8, 0),
                    )
                    for bound in BOUNDS
                ),
            ],
            [
                claim_tracking("RPD 60", "PipeDream"),
                compare_pairs(
                    "the larger the delay bound, the slower",
                    [(f"RPD {a}", f"RPD {b}") for a, b in zip(BOUNDS, BOUNDS[1:])],
                ),
            ],
            tracked=[("RPD 60", "PipeDream")],
        ),
        VectorGrid(
            "staleness_quadratic",
            "Staleness and its control, randomized PipeDream without delays, by number of stages",
            "randomized PipeDream, section 4 and Figure 2",
            "f = ||A x - b||^2 / 2n, n = 2000, d = 512, 20 batches of 100, 400 microbatches each, "
            "steps 2^-8 to 2^1",
            lambda seed: vector_runs.make_random_quadratic(2000, 512, 100, seed),
            [
                row
                for P in QUADRATIC_STAGES
                for row in list_staleness_rows(P, 400, make_powers(-8, 1))
            ],
            [
                claim_growth("PipeDream", QUADRATIC_STAGES),
                claim_growth("RPD", QUADRATIC_STAGES),
                claim_growth_by_delay("PipeDream", CONTROL, QUADRATIC_STAGES),
                claim_growth_by_delay("RPD", CONTROL, QUADRATIC_STAGES),
                *(claim_tracking(f"RPD P={P}", f"PipeDream P={P}") for P in QUADRATIC_STAGES),
            ],
            by_stages=True,
            tracked=[(f"RPD P={P}", f"PipeDream P={P}") for P in QUADRATIC_STAGES],
        ),
        VectorGrid(
            "local_sgd_quadratic",
            "PipeDream and LocalSGD on Nesterov's tridiagonal quadratic",
            "randomized PipeDream, Figure 4(a)",
            "d = 512, n = 600, batch 5, P = R = 16, 1230 slots, steps 2^-12 to 2^2",
            lambda seed: vector_runs.make_tridiagonal_quadratic(600, 512, 5, seed),
            list_rows_against_local_sgd(16, 1230, make_powers(-12, 2), make_powers(-12, 2)),
            [
                compare_pairs(
                    "PipeDream is better than LocalSGD",
                    [("PipeDream", label) for label in LOCAL_LABELS],
                )
            ],
        ),
        VectorGrid(
            "scaling_logistic",
            "Scaling with the number of stages on logistic regression",
            "randomized PipeDream, Figure 2(b)",
            f"{LOGISTIC}, 3180 slots, R = P, K = 5, steps 2^-12 to 2^-3 (LocalSGD 2^-8 to 2^2)",
            make_logistic,
            list_scaling_rows(3180, make_powers(-12, -3), make_powers(-8, 2)),
            [
                claim_growth("PipeDream"),
                claim_growth("RPD"),
                claim_growth_by_delay("RPD", CONTROL, STAGES),
                compare_pairs(
                    "LocalSGD is better than PipeDream at many stages (32, 64, 128)",
                    [(f"LocalSGD P={P}", f"PipeDream P={P}") for P in (32, 64, 128)],
                ),
            ],
            by_stages=True,
        ),
        VectorGrid(
            "local_sgd_logistic",
            "PipeDream and LocalSGD on logistic regression",
            "randomized PipeDream, Figure 4(b)",
            f"{LOGISTIC}, P = R = 16, 830 slots, steps as for the scaling",
            make_logistic,
            list_rows_against_local_sgd(16, 830, make_powers(-12, -3), make_powers(-8, 2)),
            [
                compare_pairs(
                    "LocalSGD, with the best K, is better than PipeDream",
                    [(label, "PipeDream") for label in LOCAL_LABELS],
                    max,
                )
            ],
        ),
    )
}
