"""PipeDream's delays in the global history of block updates, as its timeline gives them, and LocalSGD's timelines, drawn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Dict, List, Sequence

import numpy as np

from ipu_pipe.errors import guard_writing
from ipu_pipe.files import write
from ipu_pipe.report.plots import open_figure
from ipu_pipe.schedule.actions import Kind
from ipu_pipe.schedule.delays import compute_greatest_delay, compute_least_delay, compute_mean_delay
from ipu_pipe.schedule.global_history import count_history_delays
from ipu_pipe.schedule.methods import resolve_method
from ipu_pipe.schedule.table import Schedule
from ipu_pipe.schedule.timelines import make_schedule
from ipu_pipe.schedule.versions import VersionTable

NAME = "rpd_delays"
TITLE = "PipeDream's delays in the global history of block updates, by number of stages"
SOURCE = "randomized PipeDream, Figure 6, Lemma C.1 and Figure 3"
STAGES = range(2, 41)


def statistics_of(stages: int) -> Dict[str, float]:
    """Least, tenth percentile, mean and greatest delay, in block updates, of steady PipeDream, over active and read stages."""
    method = resolve_method("pipedream")
    table = VersionTable(make_schedule(method, stages, 8 * stages, 1), method)
    found = count_history_delays(table, 3 * stages, 4 * stages)
    delays = found.written[:, None, :] - found.read[None, :, :]
    low = float(np.percentile(delays, 10))
    return {"least": int(delays.min()), "low": low, "mean": float(delays.mean()), "greatest": int(delays.max())}


def exponent(stages: Sequence[int], values: Sequence[float]) -> float:
    """p of the least-squares fit of log value = p log P + c."""
    return float(np.polyfit(np.log(stages), np.log(values), 1)[0])


def results() -> Dict[str, Any]:
    """The statistics of every number of stages, with the closed forms and how well they fit."""
    found = {P: statistics_of(P) for P in STAGES}
    rows = [
        {"method": "pipedream", "args": {"stages": P}, "step": None, "final": found[P]["greatest"], **found[P]}
        for P in STAGES
    ]
    deep = [P for P in STAGES if P >= 10]
    fits = {key: exponent(deep, [found[P][key] for P in deep]) for key in ("mean", "greatest")}
    said = {
        "the greatest is P^2 - P/2, for odd P P^2 - (P+1)/2": all(
            found[P]["greatest"] == compute_greatest_delay(P) for P in STAGES
        ),
        "the mean is (P^2 - 1)/2": all(abs(found[P]["mean"] - compute_mean_delay(P)) < 1e-9 for P in STAGES),
        "the least is floor((P-1)/2)": all(found[P]["least"] == compute_least_delay(P) for P in STAGES),
        "both grow as P^2 (exponent fitted from P = 10 on within 0.05 of 2)": all(
            abs(fit - 2) < 0.05 for fit in fits.values()
        ),
    }
    return {
        "experiment": NAME, "title": TITLE, "source": SOURCE, "rows": rows, "exponents": fits,
        "statements": [{"statement": text, "reproduced": bool(holds)} for text, holds in said.items()],
        "agrees": all(said.values()), "differences": [f"not reproduced: {text}" for text, holds in said.items() if not holds],
    }  # fmt: skip


def table(found: Dict[str, Any], command: str) -> str:
    """The results as Markdown."""
    fits = ", ".join(f"{key} P^{value:.3f}" for key, value in found["exponents"].items())
    lines = [
        f"# {TITLE}",
        "",
        f"Source: {SOURCE}. Made by `{command}`, from the timeline; fitted from P = 10 on: {fits}.",
        "",
    ]
    lines += ["| P | least | 10th percentile | mean | greatest |", "| --- | --- | --- | --- | --- |"]
    for row in found["rows"]:
        lines.append(
            f"| {row['args']['stages']} | {row['least']} | {row['low']:g} | {row['mean']:g} | {row['greatest']} |"
        )
    lines += ["", "| the paper says | |", "| --- | --- |"]
    lines += [
        f"| {each['statement']} | {'reproduced' if each['reproduced'] else 'not reproduced'} |"
        for each in found["statements"]
    ]
    return "\n".join(lines) + "\n"


def write_delays(command: str, folder: Path) -> Dict[str, Any]:
    """results.json, table.md, delays.png and timelines.png in `folder`; gives the results."""
    with guard_writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    found = results()
    write(folder / "results.json", json.dumps(found, indent=1))
    write(folder / "table.md", table(found, command))
    _draw_delays(found, folder / "delays.png")
    _draw_timelines(folder / "timelines.png")
    return found


def _draw_delays(found: Dict[str, Any], file: Path) -> None:
    """Figure 6: the mean, what lies between the tenth percentile and the greatest, and the quadratic laws."""
    stages = list(STAGES)
    values: Dict[str, List[float]] = {key: [row[key] for row in found["rows"]] for key in ("low", "mean", "greatest")}
    title = "Delays of PipeDream in the global history of block updates, in the steady part"
    note = "from the planned timeline, no training; band: from the tenth percentile to the greatest, over stages and blocks read"
    with open_figure(file, (8, 5), title=title, note=note) as (axes,):
        (line,) = axes.plot(stages, values["mean"], label="mean, from the timeline")
        axes.fill_between(stages, values["low"], values["greatest"], color=line.get_color(), alpha=0.2, linewidth=0)
        axes.plot(stages, [P * P / 2 for P in stages], "--", label="P^2 / 2")
        axes.plot(stages, [P * P - P / 2 for P in stages], "--", label="P^2 - P/2")
        axes.set(xlabel="stages", ylabel="delay (block updates)")
        axes.legend()


def _draw_timelines(file: Path) -> None:
    """Figure 3: 1F1B and LocalSGD with short and long rounds, a row a stage, a column a slot (planned)."""
    P, M = 4, 16
    shown = {"PipeDream": make_schedule(resolve_method("pipedream"), P, M, 1)}
    for K in (1, 2):
        method = resolve_method("local_sgd", {"local_steps": K})
        shown[f"LocalSGD, R = {P}, K = {K}"] = make_schedule(method, P, M, P)
    longest = max(schedule.slot_count for schedule in shown.values())
    title = f"Timelines of {M} microbatches on {P} stages (planned)"
    note = "light: forward, dark: backward, white: idle; R replicas that are averaged every K local steps"
    with open_figure(file, (5, 2.8), len(shown), title=title, note=note) as axes:
        for each, (name, schedule) in zip(axes, shown.items()):
            each.imshow(_cells(schedule, longest), aspect="auto", cmap="Blues", vmin=0, vmax=3, interpolation="nearest")
            busy = schedule.busy_share()
            each.set(title=f"{name}: {schedule.slot_count} slots, {busy:.0%} busy", xlabel="slot", ylabel="stage")


def _cells(schedule: Schedule, length: int) -> Any:
    """(P, slots): 0 idle, 1 forward, 2 backward."""
    grids = schedule.spell_out(0, schedule.slot_count)
    cells = np.zeros((schedule.stages, length))
    for shade, kind in ((1, Kind.FORWARD), (2, Kind.BACKWARD)):
        cells[:, : schedule.slot_count][grids[kind] >= 0] = shade
    return cells
