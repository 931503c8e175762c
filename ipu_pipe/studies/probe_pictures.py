"""Plots and tables of what the probes of local-parallel training found."""

from __future__ import annotations

import itertools
import math
import statistics
from pathlib import Path
from typing import Any, Iterable, Mapping, Optional, Sequence

from ipu_pipe.config.schema import Config
from ipu_pipe.report.plots import describe_seeds, describe_sizes, open_figure, plot_mean_with_range


def plot_angles(runs: Sequence[Mapping[str, Any]], config: Config, file: Path) -> None:
    """Angle by update, a line a block, a panel a method."""
    from matplotlib import colormaps

    title = f"Angle of each block's gradient to the true one: {_model(config)}"
    with open_figure(
        file, (6.5, 5), len(runs), title=title, note=f"{describe_sizes(config)}; seed {config.seed} alone"
    ) as panels:
        for axes, run in zip(panels, runs):
            updates = [point["update"] for point in run["points"]]
            for j, name in enumerate(run["blocks"]):
                degrees = [point["degrees"][j] for point in run["points"]]
                shown = [math.nan if value is None else value for value in degrees]
                shade = colormaps["viridis"](j / max(1, len(run["blocks"]) - 1) * 0.9)
                axes.plot(updates, shown, marker="o", markersize=3, color=shade, label=f"{j}: {name}")
            axes.axhline(90, color="black", linestyle="--", linewidth=1)
            axes.set(xlabel="update", ylabel="angle to the true gradient (degrees)", title=run["method"])
            axes.set_ylim(bottom=-2)
            axes.legend(
                fontsize="x-small", title="block", title_fontsize="x-small", loc="upper left", bbox_to_anchor=(1, 1)
            )


def plot_chunks(runs: Sequence[Mapping[str, Any]], config: Config, file: Path) -> None:
    """Accuracy and loss on training and test samples by chunk size, mean over seeds with the range shaded."""
    title = f"local_chunked by the size of its blocks: {_model(config)}"
    note = f"{describe_sizes(config)}; {describe_seeds([run['seed'] for run in runs])}"
    with open_figure(file, (6, 4.5), 2, title=title, note=note) as panels:
        for axes, what in zip(panels, ("accuracy", "loss")):
            chunks = sorted({run["chunk"] for run in runs})
            for part in ("train", "test"):
                values = [[run[f"{part}_{what}"] for run in runs if run["chunk"] == size] for size in chunks]
                if any(value is None for group in values for value in group):
                    continue
                plot_mean_with_range(axes, chunks, values, label=part)
            axes.set(xlabel="stages a block", ylabel=what, xticks=chunks)
            axes.legend()


def plot_labels(runs: Sequence[Mapping[str, Any]], config: Config, file: Path) -> None:
    """Training loss and accuracy on random labels by update, a line a method."""
    title = f"Random labels learned by heart: {_model(config)}"
    with open_figure(
        file, (6, 4.5), 2, title=title, note=f"{describe_sizes(config)}; seed {config.seed} alone"
    ) as panels:
        for axes, what in zip(panels, ("loss", "accuracy")):
            for run in runs:
                points = [point for point in run["points"] if point[f"train_{what}"] is not None]
                updates, values = [p["update"] for p in points], [p[f"train_{what}"] for p in points]
                axes.plot(updates, values, label=run["label"])
            axes.set(xlabel="update", ylabel=f"training {what}, random labels")
            axes.legend(fontsize="small")


def _model(config: Config) -> str:
    return config.model.entry.rpartition(":")[2]


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Markdown; fractions with three digits, None as a dash."""
    lines = [head, ["---"] * len(head)]
    for row in rows:
        lines.append(["-" if v is None else f"{v:.3f}" if isinstance(v, float) else f"{v}" for v in row])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def angles_table(runs: Sequence[Mapping[str, Any]]) -> str:
    """Degrees by block: before training, in the middle, at the end, and the least cosine seen."""
    rows = []
    for run in runs:
        points = run["points"]
        moments = [points[0], points[len(points) // 2], points[-1]]
        for j, name in enumerate(run["blocks"]):
            shown = [None if p["degrees"][j] is None else f"{p['degrees'][j]:.1f}" for p in moments]
            cosines = [p["cosines"][j] for p in points if p["cosines"][j] is not None]
            rows.append([run["method"], f"{j}: {name}", *shown, min(cosines) if cosines else None])
    updates = [run["points"][i]["update"] for run in runs[:1] for i in (0, len(run["points"]) // 2, -1)]
    return table(["method", "block", *(f"degrees, update {k}" for k in updates), "least cosine"], rows)


def chunks_table(runs: Sequence[Mapping[str, Any]]) -> str:
    """Means over seeds by chunk size; gaps are test loss less train loss, and train accuracy less test accuracy."""
    rows = []
    for size, group in itertools.groupby(sorted(runs, key=lambda run: int(run["chunk"])), lambda run: run["chunk"]):
        own = list(group)

        def mean(key: str) -> Optional[float]:
            values = [run[key] for run in own]
            return None if None in values else statistics.mean(values)

        loss, test_loss, right, test_right = (
            mean(key) for key in ("train_loss", "test_loss", "train_accuracy", "test_accuracy")
        )
        gap = None if loss is None or test_loss is None else test_loss - loss
        lost = None if right is None or test_right is None else right - test_right
        rows.append([size, own[0]["blocks"], len(own), loss, test_loss, gap, right, test_right, lost])
    head = "stages a block, blocks, seeds, train loss, test loss, gap, train accuracy, test accuracy, gap"
    return table(head.split(", "), rows)


def labels_table(runs: Sequence[Mapping[str, Any]]) -> str:
    """By method: the last updates' loss and accuracy, and those of the final weights in evaluation."""
    rows = [
        [
            run["label"], run["blocks"], run["points"][-1]["update"], run["points"][-1]["train_loss"],
            run["points"][-1]["train_accuracy"], run["train_loss"], run["train_accuracy"],
        ]
        for run in runs
    ]  # fmt: skip
    return table(
        ["method", "blocks", "updates", "loss in training", "accuracy", "final weights' loss", "accuracy"], rows
    )
