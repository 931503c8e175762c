"""Results of the studies: the best step of each row, JSON, a table and a figure with the range over the seeds."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Sequence

from ipu_pipe.errors import guard_writing
from ipu_pipe.files import write
from ipu_pipe.report.plots import describe_seeds, open_figure, plot_mean_with_range
from ipu_pipe.studies.asynchrony.experiments import STAGES, Study, Tried
from ipu_pipe.studies.worker_pool import in_workers


def run_study(study: Study, seeds: Sequence[int], jobs: int, say: Callable[[str], None]) -> Dict[int, List[Tried]]:
    """All runs, by seed."""
    found: Dict[int, List[Tried]] = {}
    for (seed,), result in in_workers(_work, {(seed,): (study.name, seed) for seed in seeds}, jobs):
        found[seed] = [Tried(*run) for run in result["runs"]]
        say(f"seed {seed}: {len(found[seed])} runs")
    return dict(sorted(found.items()))


def _work(name: str, seed: int) -> Dict[str, Any]:
    from ipu_pipe.studies.asynchrony.experiments import STUDIES

    return {"runs": [tuple(run) for run in STUDIES[name].runs(seed)]}


def best_runs(found: Mapping[int, List[Tried]]) -> Dict[str, Dict[int, Tried]]:
    """Of each row and seed the run with the least final objective, by label."""
    best: Dict[str, Dict[int, Tried]] = {}
    for seed, runs in found.items():
        for run in runs:
            own = best.setdefault(run.label, {})
            if seed not in own or run.final < own[seed].final:
                own[seed] = run
    return best


def results(study: Study, found: Mapping[int, List[Tried]]) -> Dict[str, Any]:
    """The results as JSON. `step`, `final`: of the best step, the mean of the finals over the seeds."""
    best = best_runs(found)
    finals = {label: statistics.mean(run.final for run in own.values()) for label, own in best.items()}
    rows, any_seed = [], next(iter(found.values()))
    for label, own in best.items():
        first, values = next(iter(own.values())), [run.final for run in own.values()]
        rows.append({
            "label": label, "method": first.method, "args": first.args, "step": first.step, "final": finals[label],
            "std": statistics.stdev(values) if len(values) > 1 else None,
            "step_by_seed": {str(seed): run.step for seed, run in own.items()},
            "final_by_seed": {str(seed): run.final for seed, run in own.items()},
            "updates": first.curve[-1][0], "slots": first.curve[-1][1],
            "stable_steps": sorted(run.step for run in any_seed if run.label == label and run.final < run.curve[0][2]),
        })  # fmt: skip
    said = [{"statement": each.text, "reproduced": bool(each.holds(finals))} for each in study.statements]
    return {
        "experiment": study.name,
        "title": study.title,
        "source": study.source,
        "setting": study.setting,
        "measures": study.measures,
        "seeds": list(found),
        "rows": rows,
        "statements": said,
        "agrees": all(each["reproduced"] for each in said),
        "differences": [f"not reproduced: {each['statement']}" for each in said if not each["reproduced"]],
    }


def table(found: Mapping[str, Any], command: str) -> str:
    """The results as Markdown."""
    lines = [
        f"# {found['title']}", "",
        f"Source: {found['source']}. Made by `{command}`; seeds {', '.join(map(str, found['seeds']))} (data, draws and noise).",
        f"{found['setting']}. Best step of each row by the final value of {found['measures']}, mean and standard deviation.",
        "", f"| row | best step by seed | final {found['measures']} | by seed | block updates | slots |",
        "| --- | --- | --- | --- | --- | --- |",
    ]  # fmt: skip
    for row in found["rows"]:
        steps = ", ".join(f"2^{math.log2(step):.0f}" for step in row["step_by_seed"].values())
        each = ", ".join(f"{value:.6g}" for value in row["final_by_seed"].values())
        spread = "" if row["std"] is None else f" +- {row['std']:.2g}"
        lines.append(
            f"| {row['label']} | {steps} | {row['final']:.6g}{spread} | {each} | {row['updates']:,} | {row['slots']:,} |"
        )
    lines += ["", "| the paper says | |", "| --- | --- |"]
    lines += [
        f"| {s['statement']} | {'reproduced' if s['reproduced'] else 'not reproduced'} |" for s in found["statements"]
    ]
    return "\n".join(lines) + "\n"


def plot(study: Study, found: Mapping[int, List[Tried]], file: Path) -> Path:
    """The best runs against block updates and against slots, or, where rows tell stages apart, their ends against these."""
    best = best_runs(found)
    scales = study.name == "scaling_logistic"
    note = f"{study.setting}; best step of each row; {describe_seeds(list(found))}"
    with open_figure(file, (8, 5), 1 if scales else 2, title=study.title, note=note) as panels:
        if scales:
            for method in ("PipeDream", "RPD", "LocalSGD"):
                groups = [[run.final for run in best[f"{method} P={P}"].values()] for P in STAGES]
                plot_mean_with_range(panels[0], STAGES, groups, label=method)
            panels[0].set_xscale("log", base=2)
            panels[0].set(xlabel="stages", ylabel=f"final {study.measures}")
        else:
            for place, axis in enumerate(("block updates", "slots")):
                _curves(panels[place], best, place)
                panels[place].set(xlabel=axis, ylabel=study.measures)
        for axes in panels:
            if study.measures == "f - f*":
                axes.set_yscale("log")
            axes.legend(fontsize="small")
    return file


def _curves(axes: Any, best: Mapping[str, Mapping[int, Tried]], place: int) -> None:
    for label, own in best.items():
        points = list(zip(*(run.curve for run in own.values())))
        steps = sorted({f"2^{math.log2(run.step):.0f}" for run in own.values()})
        values = [[at[2] for at in point] for point in points]
        x = [point[0][place] for point in points]
        plot_mean_with_range(axes, x, values, markersize=2, label=f"{label}, step {' or '.join(steps)}")


def write_study(study: Study, found: Mapping[int, List[Tried]], command: str, folder: Path) -> Dict[str, Any]:
    """results.json, table.md and the figure in `folder`; gives the results."""
    with guard_writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    made = results(study, found)
    curves = [
        {"label": label, "seed": seed, "step": run.step, "curve": run.curve}
        for label, own in best_runs(found).items()
        for seed, run in own.items()
    ]
    write(folder / "results.json", json.dumps({**made, "curves": curves}))
    write(folder / "table.md", table(made, command))
    plot(study, found, folder / "curves.png")
    return made
