"""PipeDream's delays in the global history of block updates, from its timeline, and LocalSGD's timelines, drawn."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, List, Mapping, Sequence

import numpy as np

from ipu_pipe.report.plots import open_figure
from ipu_pipe.schedule.actions import Kind
from ipu_pipe.schedule.delays import compute_greatest_delay, compute_least_delay, compute_mean_delay
from ipu_pipe.schedule.global_history import count_history_delays
from ipu_pipe.schedule.methods import resolve_method
from ipu_pipe.schedule.table import Schedule
from ipu_pipe.schedule.timelines import make_schedule
from ipu_pipe.schedule.versions import VersionTable
from ipu_pipe.studies.experiment import Outcome, Request, list_statements, make_markdown

STAGES = range(2, 41)


class HistoryDelayStudy:
    """The experiment rpd_delays: it computes and draws, and runs nothing."""

    name = "rpd_delays"
    title = "PipeDream's delays in the global history of block updates, by number of stages"
    source = "randomized PipeDream, Figure 6, Lemma C.1 and Figure 3"

    def describe_size(self) -> str:
        """Return the range of stages in words."""
        return f"{STAGES[0]} to {STAGES[-1]} stages"

    def check(self, request: Request) -> None:
        """Raise `BadInput` for a choice of rows or size."""
        request.refuse(self.name, "it has one size and no rows to choose from", "full", "rows")

    def run(self, request: Request) -> Outcome:
        """Compare the delays of each number of stages with the paper's closed forms."""
        results = compute_results()
        fits = ", ".join(f"{key} P^{value:.3f}" for key, value in results["exponents"].items())
        intro = (
            f"Source: {self.source}. Made by `python tools/reproduce.py {self.name}`, from the timeline; fitted from P = 10 on: "
            f"{fits}."
        )
        rows = [
            (row["args"]["stages"], row["least"], f"{row['low']:g}", f"{row['mean']:g}", row["greatest"])
            for row in results["rows"]
        ]
        table = make_markdown(results, [intro], ("P", "least", "10th percentile", "mean", "greatest"), rows)
        pictures = {"delays.png": lambda file: draw_delays(results, file), "timelines.png": draw_timelines}
        return Outcome(results, table, request.runs / self.name, pictures=pictures)


def compute_delays(stages: int) -> Dict[str, float]:
    """Return the least, tenth percentile, mean and greatest steady delay, in block updates, over active and read stages."""
    method = resolve_method("pipedream")
    table = VersionTable(make_schedule(method, stages, 8 * stages, 1), method)
    history = count_history_delays(table, 3 * stages, 4 * stages)
    delays = history.written[:, None, :] - history.read[None, :, :]
    low = float(np.percentile(delays, 10))
    return {"least": int(delays.min()), "low": low, "mean": float(delays.mean()), "greatest": int(delays.max())}


def fit_exponent(stages: Sequence[int], values: Sequence[float]) -> float:
    """Return p of the least-squares fit of log value = p log P + c."""
    return float(np.polyfit(np.log(stages), np.log(values), 1)[0])


def compute_results() -> Dict[str, Any]:
    """Return the delays of every number of stages, the closed forms, and the fitted exponents, as JSON."""
    delays = {P: compute_delays(P) for P in STAGES}
    rows = [
        {"method": "pipedream", "args": {"stages": P}, "step": None, "final": delays[P]["greatest"], **delays[P]}
        for P in STAGES
    ]
    deep = [P for P in STAGES if P >= 10]
    fits = {key: fit_exponent(deep, [delays[P][key] for P in deep]) for key in ("mean", "greatest")}
    holds_by_text = {
        "the greatest is P^2 - P/2, for odd P P^2 - (P+1)/2": all(
            delays[P]["greatest"] == compute_greatest_delay(P) for P in STAGES
        ),
        "the mean is (P^2 - 1)/2": all(abs(delays[P]["mean"] - compute_mean_delay(P)) < 1e-9 for P in STAGES),
        "the least is floor((P-1)/2)": all(delays[P]["least"] == compute_least_delay(P) for P in STAGES),
        "both grow as P^2 (exponent fitted from P = 10 on within 0.05 of 2)": all(
            abs(fit - 2) < 0.05 for fit in fits.values()
        ),
    }
    return {
        "experiment": HistoryDelayStudy.name, "title": HistoryDelayStudy.title, "source": HistoryDelayStudy.source, "rows": rows,
        "exponents": fits, **list_statements(holds_by_text),
    }  # fmt: skip


def draw_delays(results: Mapping[str, Any], file: Path) -> None:
    """Draw Figure 6: the mean, the range from the tenth percentile to the greatest, and the quadratic laws."""
    stages = list(STAGES)
    values: Dict[str, List[float]] = {key: [row[key] for row in results["rows"]] for key in ("low", "mean", "greatest")}
    title = "Delays of PipeDream in the global history of block updates, in the steady part"
    note = "from the planned timeline, no training; band: from the tenth percentile to the greatest, over stages and blocks read"
    with open_figure(file, (8, 5), title=title, note=note) as (axes,):
        (line,) = axes.plot(stages, values["mean"], label="mean, from the timeline")
        axes.fill_between(stages, values["low"], values["greatest"], color=line.get_color(), alpha=0.2, linewidth=0)
        axes.plot(stages, [P * P / 2 for P in stages], "--", label="P^2 / 2")
        axes.plot(stages, [P * P - P / 2 for P in stages], "--", label="P^2 - P/2")
        axes.set(xlabel="stages", ylabel="delay (block updates)")
        axes.legend()


def draw_timelines(file: Path) -> None:
    """Draw Figure 3: 1F1B and LocalSGD with short and long rounds; a row for each stage, a column for each slot (planned)."""
    P, M = 4, 16
    shown = {"PipeDream": make_schedule(resolve_method("pipedream"), P, M, 1)}
    for K in (1, 2):
        method = resolve_method("local_sgd", {"local_steps": K})
        shown[f"LocalSGD, R = {P}, K = {K}"] = make_schedule(method, P, M, P)
    longest = max(schedule.slot_count for schedule in shown.values())
    title = f"Timelines of {M} microbatches on {P} stages (planned)"
    note = "light: forward, dark: backward, white: idle; R replicas that are averaged every K local steps"
    with open_figure(file, (5, 2.8), len(shown), title=title, note=note) as axes:
        for panel, (name, schedule) in zip(axes, shown.items()):
            panel.imshow(
                _make_cells(schedule, longest), aspect="auto", cmap="Blues", vmin=0, vmax=3, interpolation="nearest"
            )
            busy = schedule.busy_share()
            panel.set(title=f"{name}: {schedule.slot_count} slots, {busy:.0%} busy", xlabel="slot", ylabel="stage")


def _make_cells(schedule: Schedule, length: int) -> Any:
    """Return (P, slots): 0 idle, 1 forward, 2 backward."""
    grids = schedule.spell_out(0, schedule.slot_count)
    cells = np.zeros((schedule.stages, length))
    for shade, kind in ((1, Kind.FORWARD), (2, Kind.BACKWARD)):
        cells[:, : schedule.slot_count][grids[kind] >= 0] = shade
    return cells
