"""The randomized PipeDream paper's experiments (a) to (e): what runs, with which grids, and what the paper leads one to expect.

Each is a function of a seed that gives the runs of that seed: a row's label, method and arguments, a step, a curve. Data, drawn
orders and delays, and gradient noise are the seed's; the paper has seed 0 alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Sequence

import numpy as np

from ipu_pipe.schedule.delays import compute_greatest_delay
from ipu_pipe.studies.asynchrony.block_runs import (
    Curve,
    Objective,
    jobs_for,
    local_sgd,
    microbatches_for,
    pipedream,
    randomized,
)
from ipu_pipe.studies.asynchrony.sources import randomized_source
from ipu_pipe.studies.asynchrony.transformer import transformer_runs
from ipu_pipe.studies.objectives.functions import (
    Floats,
    logistic_regression,
    random_quadratic,
    tridiagonal_quadratic,
)


class Tried(NamedTuple):
    """One run of a row: `step` of the grid; (updates, slots, objective) along it."""

    label: str
    method: str
    args: Dict[str, Any]
    step: float
    curve: List["tuple[int, int, float]"]

    @property
    def final(self) -> float:
        """The objective at the end; infinite where it diverged."""
        return self.curve[-1][2]


Finals = Mapping[str, float]  # label -> the final objective of its best step, the mean over the seeds


@dataclass(frozen=True)
class Statement:
    """What the paper says, and whether the finals agree."""

    text: str
    holds: Callable[[Finals], bool]


@dataclass(frozen=True)
class Study:
    """An experiment of the paper. `measures`: what is small where a method does well."""

    name: str
    title: str
    source: str
    measures: str
    runs: Callable[[int], List[Tried]]
    statements: Sequence[Statement]
    seeds: Sequence[int] = (0, 1, 2)
    setting: str = ""


def powers(low: int, high: int) -> Floats:
    """2^low to 2^high."""
    return np.asarray(2.0 ** np.arange(low, high + 1))


def _tried(label: str, method: str, args: Dict[str, Any], rates: Floats, curve: Curve, least: float) -> List[Tried]:
    """A run for each step; the objective less its least value."""
    return [
        Tried(
            label, method, args, float(rate),
            [(int(k), int(slot), float(v)) for k, slot, v in zip(curve.updates, curve.slots, curve.values[:, g] - least)],
        )
        for g, rate in enumerate(rates)
    ]  # fmt: skip


# ---- (a) PipeDream against randomized PipeDream

BOUNDS = (8, 30, 60, 180, 420)


def rpd_quadratic(seed: int) -> List[Tried]:
    """P = 8, 400 microbatches: 3200 block updates each."""
    objective, P, M, rates = random_quadratic(2000, 512, 100, seed), 8, 400, powers(-8, 0)
    least = objective.optimum
    found = _tried("PipeDream", "pipedream", {}, rates, pipedream(objective, P, M, rates, seed), least)
    args = [{"delay_bound": bound} for bound in BOUNDS]
    sources = [randomized_source(P, M, objective.batches, each, seed) for each in args]
    for each, curve in zip(args, randomized(objective, sources, rates, seed)):
        found += _tried(f"RPD {each['delay_bound']}", "randomized_pipedream", each, rates, curve, least)
    return found


# ---- (b), (d) PipeDream against LocalSGD

LOCAL_STEPS = (2, 5, 30)


def _against_local_sgd(
    objective: Objective, P: int, slots: int, rates: Floats, local_rates: Floats, seed: int
) -> List[Tried]:
    """PipeDream's microbatches in so many slots; of LocalSGD's timeline of as many jobs, which is longer, so many slots."""
    least, M = objective.optimum, microbatches_for(slots, P)
    curve = pipedream(objective, P, M, rates, seed)
    found = _tried("PipeDream", "pipedream", {}, rates, curve, least)
    for K in LOCAL_STEPS:
        args = {"replicas": P, "local_steps": K}
        curve = local_sgd(objective, P, P, K, M, local_rates, seed, slots)
        found += _tried(f"LocalSGD K={K}", "local_sgd", args, local_rates, curve, least)
    return found


def local_sgd_quadratic(seed: int) -> List[Tried]:
    """P = R = 16, 1230 slots: PipeDream's 600 microbatches."""
    objective = tridiagonal_quadratic(600, 512, 5, seed)
    return _against_local_sgd(objective, 16, 1230, powers(-12, 2), powers(-12, 2), seed)


def local_sgd_logistic(seed: int) -> List[Tried]:
    """P = R = 16, 830 slots: PipeDream's 400 microbatches."""
    objective = logistic_regression(50, 512, 1, 1e-4, 0.5, seed)
    return _against_local_sgd(objective, 16, 830, powers(-12, -3), powers(-8, 2), seed)


# ---- (c) scaling with the stages

STAGES = (2, 4, 8, 16, 32, 64, 128)


def scaling_logistic(seed: int) -> List[Tried]:
    """3180 slots for every P; RPD makes the block updates that PipeDream makes in them, with its greatest delay as bound."""
    objective = logistic_regression(50, 512, 1, 1e-4, 0.5, seed)
    least, rates, local_rates, slots = objective.optimum, powers(-12, -3), powers(-8, 2), 3180
    found: List[Tried] = []
    for P in STAGES:
        M = microbatches_for(slots, P)
        found += _tried(f"PipeDream P={P}", "pipedream", {}, rates, pipedream(objective, P, M, rates, seed), least)
        args = {"delay_bound": compute_greatest_delay(P)}
        (curve,) = randomized(objective, [randomized_source(P, M, objective.batches, args, seed)], rates, seed)
        found += _tried(f"RPD P={P}", "randomized_pipedream", args, rates, curve, least)
        own = {"replicas": P, "local_steps": 5}
        curve = local_sgd(objective, P, P, 5, jobs_for(slots, P, P, 5), local_rates, seed)
        found += _tried(f"LocalSGD P={P}", "local_sgd", own, local_rates, curve, least)
    return found


# ---- what the paper says


def _below(better: str, *than: str) -> Callable[[Finals], bool]:
    return lambda finals: all(finals[better] < finals[other] for other in than)


def _tracks(finals: Finals) -> bool:
    return 0.5 < finals["RPD 60"] / finals["PipeDream"] < 2


def _falls_off(finals: Finals) -> bool:
    values = [finals[f"RPD {bound}"] for bound in BOUNDS]
    return all(a <= b for a, b in zip(values, values[1:]))


def _deteriorates(method: str) -> Callable[[Finals], bool]:
    """The three deepest pipelines against the three shallowest: a final alone is noisy."""
    return lambda finals: (
        sum(finals[f"{method} P={P}"] for P in STAGES[-3:]) > sum(finals[f"{method} P={P}"] for P in STAGES[:3])
    )


def _wins_at_many(finals: Finals) -> bool:
    return all(finals[f"LocalSGD P={P}"] < finals[f"PipeDream P={P}"] for P in (32, 64, 128))


LOCAL_LABELS = [f"LocalSGD K={K}" for K in LOCAL_STEPS]

STUDIES: Dict[str, Study] = {
    study.name: study
    for study in (
        Study(
            "rpd_quadratic", "PipeDream and randomized PipeDream on a random quadratic",
            "randomized PipeDream, Figure 2(a)", "f - f*", rpd_quadratic,
            [
                Statement("RPD with bound P^2 - P/2 = 60 tracks PipeDream (within a factor of 2 at the end)", _tracks),
                Statement("the larger the delay bound, the slower", _falls_off),
            ],
            setting="f = ||A x - b||^2 / 2n, n = 2000, d = 512, 20 batches of 100, P = 8, 400 microbatches, steps 2^-8 to 2^0",
        ),
        Study(
            "local_sgd_quadratic", "PipeDream and LocalSGD on Nesterov's tridiagonal quadratic",
            "randomized PipeDream, Figure 4(a)", "f - f*", local_sgd_quadratic,
            [Statement("PipeDream is better than LocalSGD", _below("PipeDream", *LOCAL_LABELS))],
            setting="d = 512, n = 600, batch 5, P = R = 16, 1230 slots, steps 2^-12 to 2^2",
        ),
        Study(
            "scaling_logistic", "Scaling with the number of stages on logistic regression",
            "randomized PipeDream, Figure 2(b)", "f - f*", scaling_logistic,
            [
                Statement("PipeDream deteriorates as P grows", _deteriorates("PipeDream")),
                Statement("RPD deteriorates as P grows", _deteriorates("RPD")),
                Statement("LocalSGD is better than PipeDream at many stages (32, 64, 128)", _wins_at_many),
            ],
            setting="d = 512, n = 50, batch 1, l2 1e-4, gradient noise 0.5, 3180 slots, R = P, K = 5, steps 2^-12 to 2^-3"
            " (LocalSGD 2^-8 to 2^2)",
        ),
        Study(
            "local_sgd_logistic", "PipeDream and LocalSGD on logistic regression",
            "randomized PipeDream, Figure 4(b)", "f - f*", local_sgd_logistic,
            [
                Statement(
                    "LocalSGD, with the best K, is better than PipeDream",
                    lambda finals: min(finals[label] for label in LOCAL_LABELS) < finals["PipeDream"],
                )
            ],
            setting="d = 512, n = 50, batch 1, l2 1e-4, gradient noise 0.5, P = R = 16, 830 slots, steps as for the scaling",
        ),
        Study(
            "local_sgd_transformer", "PipeDream and LocalSGD on a character Transformer",
            "randomized PipeDream, Figure 4(c)", "training loss of the last 64 microbatches",
            lambda seed: [Tried(*run) for run in transformer_runs(seed)],
            [
                Statement("PipeDream is better than LocalSGD", _below("PipeDream", *(f"LocalSGD K={K}" for K in (1, 4, 8)))),
                Statement("the longer the rounds, the better LocalSGD", lambda finals: (
                    finals["LocalSGD K=8"] <= finals["LocalSGD K=4"] <= finals["LocalSGD K=1"])),
            ],
            seeds=(0,),
            setting="embedding, 14 blocks and head (P = R = 16), width 64, 4 heads, batch 16, sequence 32, Tiny Shakespeare, 2078"
            " slots, step 2^-3; the paper's text is another, only the order of the methods is expected",
        ),
    )
}  # fmt: skip
