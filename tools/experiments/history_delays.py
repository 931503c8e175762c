"""Compute PipeDream's delays in the global history of block updates from its timeline, and draw
LocalSGD's timelines.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, Dict, Mapping, Sequence

import numpy as np

from ipu_pipe.report.plots import open_figure
from ipu_pipe.schedule.actions import Kind
from ipu_pipe.schedule.delays import compute_greatest_delay, compute_least_delay, compute_mean_delay
from ipu_pipe.schedule.global_history import count_history_delays
from ipu_pipe.schedule.methods import resolve_method
from ipu_pipe.schedule.timelines import make_schedule
from ipu_pipe.schedule.versions import VersionTable
from tools.experiments.experiment import Experiment, Findings, Request
from tools.experiments.verdicts import judge_exactly

STAGES = range(2, 41)


def find_delays(request: Request, folder: Path) -> Findings:
    """Compare the delays of each number of stages with the paper's closed forms; nothing is
    trained.
    """
    delays = {P: compute_delays(P) for P in STAGES}
    deep = [P for P in STAGES if P >= 10]
    exponents = {
        key: fit_exponent(deep, [delays[P][key] for P in deep]) for key in ("mean", "greatest")
    }
    laws = {
        "the greatest is P^2 - P/2, for odd P P^2 - (P+1)/2": ("greatest", compute_greatest_delay),
        "the mean is (P^2 - 1)/2": ("mean", compute_mean_delay),
        "the least is floor((P-1)/2)": ("least", compute_least_delay),
    }
    verdicts = []
    for text, (key, law) in laws.items():
        difference = max(abs(delays[P][key] - law(P)) for P in STAGES)
        verdicts.append(judge_exactly(text, difference < 1e-9, difference))
    difference = max(abs(exponent - 2) for exponent in exponents.values())
    claim = "both grow as P^2 (exponent fitted from P = 10 on within 0.05 of 2)"
    verdicts.append(judge_exactly(claim, difference < 0.05, difference))
    rows = [
        {
            "method": "pipedream",
            "args": {"stages": P},
            "step": None,
            "final": delays[P]["greatest"],
            **delays[P],
        }
        for P in STAGES
    ]
    shown = ", ".join(f"{key} P^{value:.3f}" for key, value in exponents.items())
    return Findings(
        {"rows": rows, "exponents": exponents},
        verdicts,
        f", from the timeline; fitted from P = 10 on: {shown}.",
        ("P", "least", "10th percentile", "mean", "greatest"),
        [
            (P, row["least"], f"{row['low']:g}", f"{row['mean']:g}", row["greatest"])
            for P, row in delays.items()
        ],
        pictures={
            "delays.png": functools.partial(draw_delays, delays),
            "timelines.png": draw_timelines,
        },
    )


DELAYS = Experiment(
    "rpd_delays",
    "PipeDream's delays in the global history of block updates, by number of stages",
    "randomized PipeDream, Figure 6, Lemma C.1 and Figure 3",
    f"{STAGES[0]} to {STAGES[-1]} stages",
    find_delays,
)


def compute_delays(stages: int) -> Dict[str, float]:
    """Return the least, tenth percentile, mean and greatest steady delay, in block updates, over
    active and read stages.
    """
    method = resolve_method("pipedream")
    table = VersionTable(make_schedule(method, stages, 8 * stages, 1), method)
    history = count_history_delays(table, 3 * stages, 4 * stages)
    delays = history.written[:, None, :] - history.read[None, :, :]
    low = float(np.percentile(delays, 10))
    return {
        "least": int(delays.min()),
        "low": low,
        "mean": float(delays.mean()),
        "greatest": int(delays.max()),
    }


def fit_exponent(stages: Sequence[int], values: Sequence[float]) -> float:
    """Return p of the least-squares fit of log value = p log P + c."""
    return float(np.polyfit(np.log(stages), np.log(values), 1)[0])


def draw_delays(delays: Mapping[int, Mapping[str, Any]], file: Path) -> None:
    """Draw Figure 6: the mean, the range from the tenth percentile to the greatest, and the
    quadratic laws.
    """
    stages = list(delays)
    low, mean, greatest = (
        [row[key] for row in delays.values()] for key in ("low", "mean", "greatest")
    )
    title = "Delays of PipeDream in the global history of block updates, in the steady part"
    note = (
        "from the planned timeline, no training; band: from the tenth percentile to the "
        "greatest, over stages and blocks read"
    )
    with open_figure(file, (8, 5), title=title, note=note) as (axes,):
        (line,) = axes.plot(stages, mean, label="mean, from the timeline")
        axes.fill_between(stages, low, greatest, color=line.get_color(), alpha=0.2, linewidth=0)
        axes.plot(stages, [P * P / 2 for P in stages], "--", label="P^2 / 2")
        axes.plot(stages, [P * P - P / 2 for P in stages], "--", label="P^2 - P/2")
        axes.set(xlabel="stages", ylabel="delay (block updates)")
        axes.legend()


def draw_timelines(file: Path) -> None:
    """Draw Figure 3: 1F1B and LocalSGD with short and long rounds; a row for each stage, a column
    for each slot (planned).
    """
    P, M = 4, 16
    schedules = {"PipeDream": make_schedule(resolve_method("pipedream"), P, M, 1)}
    for K in (1, 2):
        method = resolve_method("local_sgd", {"local_steps": K})
        schedules[f"LocalSGD, R = {P}, K = {K}"] = make_schedule(method, P, M, P)
    longest = max(schedule.slot_count for schedule in schedules.values())
    title = f"Timelines of {M} microbatches on {P} stages (planned)"
    note = (
        "light: forward, dark: backward, white: idle; R replicas that are averaged every K "
        "local steps"
    )
    with open_figure(file, (5, 2.8), len(schedules), title=title, note=note) as axes:
        for panel, (name, schedule) in zip(axes, schedules.items()):
            grids = schedule.spell_out(0, schedule.slot_count)
            cells = np.zeros((P, longest))
            for shade, kind in ((1, Kind.FORWARD), (2, Kind.BACKWARD)):
                cells[:, : schedule.slot_count][grids[kind] >= 0] = shade
            panel.imshow(
                cells, aspect="auto", cmap="Blues", vmin=0, vmax=3, interpolation="nearest"
            )
            busy = schedule.busy_share()
            panel.set(
                title=f"{name}: {schedule.slot_count} slots, {busy:.0%} busy",
                xlabel="slot",
                ylabel="stage",
            )
