"""Pictures and tables of the probes of local-parallel training, and a first layer's weights as an image (Figure 7)."""

from __future__ import annotations

import itertools
import math
import statistics
import textwrap
from pathlib import Path
from typing import Any, Dict, Iterable, Mapping, Optional, Sequence, Tuple

import numpy as np
import torch

from ipu_pipe.config.load import load_recorded
from ipu_pipe.config.schema import Config
from ipu_pipe.errors import BadInput
from ipu_pipe.files import atomic_file
from ipu_pipe.report.plots import describe_seeds, describe_sizes, open_figure, plot_mean_with_range
from ipu_pipe.run import checkpoint


def plot_angles(runs: Sequence[Mapping[str, Any]], config: Config, file: Path) -> None:
    """Draw the angles by update: a line for each block, a panel for each method."""
    from matplotlib import colormaps

    title = f"Angle of each block's gradient to the true one: {_name_model(config)}"
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
    """Draw accuracy and loss on training and test samples by chunk size: the mean over seeds, with the range shaded."""
    title = f"local_chunked by the size of its blocks: {_name_model(config)}"
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
    """Draw training loss and accuracy on random labels by update, a line for each method."""
    title = f"Random labels learned by heart: {_name_model(config)}"
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


def _name_model(config: Config) -> str:
    return config.model.entry.rpartition(":")[2]


def make_table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return a Markdown table; fractions have three digits, None is a dash."""
    lines = [head, ["---"] * len(head)]
    for row in rows:
        lines.append(["-" if v is None else f"{v:.3f}" if isinstance(v, float) else f"{v}" for v in row])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def make_angles_table(runs: Sequence[Mapping[str, Any]]) -> str:
    """Return the degrees of each block before training, in the middle and at the end, and the least cosine, as Markdown."""
    rows = []
    for run in runs:
        points = run["points"]
        moments = [points[0], points[len(points) // 2], points[-1]]
        for j, name in enumerate(run["blocks"]):
            shown = [None if p["degrees"][j] is None else f"{p['degrees'][j]:.1f}" for p in moments]
            cosines = [p["cosines"][j] for p in points if p["cosines"][j] is not None]
            rows.append([run["method"], f"{j}: {name}", *shown, min(cosines) if cosines else None])
    updates = [run["points"][i]["update"] for run in runs[:1] for i in (0, len(run["points"]) // 2, -1)]
    return make_table(["method", "block", *(f"degrees, update {k}" for k in updates), "least cosine"], rows)


def make_chunks_table(runs: Sequence[Mapping[str, Any]]) -> str:
    """Return the means over seeds by chunk size as Markdown; gaps are test less train loss, and train less test accuracy."""
    rows = []
    for size, group in itertools.groupby(sorted(runs, key=lambda run: int(run["chunk"])), lambda run: run["chunk"]):
        runs_of_size = list(group)

        def mean(key: str) -> Optional[float]:
            values = [run[key] for run in runs_of_size]
            return None if None in values else statistics.mean(values)

        loss, test_loss, right, test_right = (
            mean(key) for key in ("train_loss", "test_loss", "train_accuracy", "test_accuracy")
        )
        gap = None if loss is None or test_loss is None else test_loss - loss
        lost = None if right is None or test_right is None else right - test_right
        rows.append([size, runs_of_size[0]["blocks"], len(runs_of_size), loss, test_loss, gap, right, test_right, lost])
    head = "stages a block, blocks, seeds, train loss, test loss, gap, train accuracy, test accuracy, gap"
    return make_table(head.split(", "), rows)


def make_labels_table(runs: Sequence[Mapping[str, Any]]) -> str:
    """Return loss and accuracy of the last updates, and of the final weights in evaluation, by method, as Markdown."""
    rows = [
        [
            run["label"], run["blocks"], run["points"][-1]["update"], run["points"][-1]["train_loss"],
            run["points"][-1]["train_accuracy"], run["train_loss"], run["train_accuracy"],
        ]
        for run in runs
    ]  # fmt: skip
    return make_table(
        ["method", "blocks", "updates", "loss in training", "accuracy", "final weights' loss", "accuracy"], rows
    )


# ---- filters

GAP = 2  # pixels between filters
WHITE = 255


def read_newest_weights(path: Path) -> Tuple[Path, Dict[str, torch.Tensor]]:
    """Return the file or checkpoint folder that was read, and its weights.

    `path` is a state dict's file, a checkpoint folder, or the folder of a run, of which the newest checkpoint counts. Raise
    `BadInput`.
    """
    path = checkpoint.find_newest(path)
    return path, checkpoint.read_weights(path)


def find_first_layer(
    tensors: Mapping[str, torch.Tensor],
    place: str,
    name: Optional[str] = None,
    shape: Optional[Sequence[int]] = None,
) -> Tuple[str, torch.Tensor]:
    """Return the name and the filters (n, C, H, W), C 1 or 3, of a state dict's first layer.

    It is the tensor `name`, else the only one of such a shape; with `shape` (C, H, W) the rows of a linear layer's weights
    (n, C H W). Raise `BadInput` that begins with `place`.
    """
    inputs = None if shape is None else int(np.prod(list(shape)))

    def fits(tensor: torch.Tensor) -> bool:
        if inputs is not None:
            return tensor.dim() == 2 and tensor.shape[1] == inputs
        return tensor.dim() == 4 and tensor.shape[1] in (1, 3)

    if shape is not None and (len(shape) != 3 or shape[0] not in (1, 3) or min(shape) < 1):
        raise BadInput(f"--shape: {' '.join(map(str, shape))}: must be C H W, with 1 or 3 channels")
    wanted = "(n, 1 or 3, H, W)" if inputs is None else f"(n, {inputs})"
    if name is not None and name not in tensors:
        raise BadInput(f"{place}: {name}: not there")
    tensors = {key: t for key, t in tensors.items() if not key.startswith(checkpoint.HEADS)}
    names = [name] if name is not None else [key for key, t in tensors.items() if fits(t)]
    if len(names) != 1:
        shown = f"{len(names)} tensors: {', '.join(names[:4])}" if names else "no tensor"
        raise BadInput(f"{place}: {shown} of shape {wanted}, one is wanted: say which by --name")
    filters = tensors[names[0]]
    if not fits(filters):
        raise BadInput(f"{place}: {names[0]}: its shape is {tuple(filters.shape)}, must be {wanted}")
    if not bool(torch.isfinite(filters).all()):
        raise BadInput(f"{place}: {names[0]}: holds values that are not finite")
    return names[0], filters.float() if shape is None else filters.float().view(-1, *shape)


def make_filters_image(
    filters: torch.Tensor, enlarge: Optional[int] = None, columns: Optional[int] = None
) -> np.ndarray:
    """Return filters (n, C, H, W), C 1 or 3, as an image of bytes (height, width, 3).

    Each filter is scaled from its own least (0) to its greatest value (255; a constant one is grey). They lie row by row in
    a grid of `columns` (default: about a square), 2 white pixels around each. A weight is a square of `enlarge` pixels a
    side (default: filters of about 40 pixels).
    """
    n, _, height, width = filters.shape
    columns = min(n, columns or math.ceil(math.sqrt(n)))
    enlarge = enlarge or max(1, -(-40 // max(height, width)))
    low, high = filters.amin(dim=(1, 2, 3), keepdim=True), filters.amax(dim=(1, 2, 3), keepdim=True)
    shares = torch.where(high > low, (filters - low) / (high - low), torch.full_like(filters, 0.5))
    pixels = (shares * WHITE).round().to(torch.uint8).expand(n, 3, height, width)
    pixels = pixels.repeat_interleave(enlarge, dim=2).repeat_interleave(enlarge, dim=3)
    down, across = pixels.shape[2] + GAP, pixels.shape[3] + GAP
    image = np.full((-(-n // columns) * down + GAP, columns * across + GAP, 3), WHITE, dtype=np.uint8)
    for i, one in enumerate(pixels.permute(0, 2, 3, 1).numpy()):  # (H, W, 3)
        top, left = i // columns * down + GAP, i % columns * across + GAP
        image[top : top + down - GAP, left : left + across - GAP] = one
    return image


def describe_runs(paths: Sequence[Path]) -> str:
    """Return the note below the filters of these checkpoints and files: sizes and seeds of the runs, and the scaling."""
    configs = [path.parent.parent / "config.yaml" for path in paths]
    runs = [load_recorded(config) for config in configs if config.is_file()]
    notes = dict.fromkeys(f"{describe_sizes(config)}; seed {config.seed} alone" for config in runs)
    return "; ".join([*notes, "each filter from its least weight (dark) to its greatest (bright)"])


def draw_filters(panels: Sequence[Tuple[str, np.ndarray]], file: Path, title: str = "", note: str = "") -> None:
    """Draw images of `make_filters_image` side by side, pixel by pixel, with titles above and a `note` below.

    The upper left corner of the first is at (0, 24), 24 lower if there is a `title` of all.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    line, between, letter, dots = 24, 16, 7, 100  # pixels: of a line of text, between two images, of a letter; an inch
    widths = [max(image.shape[1], letter * len(text)) for text, image in panels]
    width = sum(widths) + between * (len(panels) - 1)
    notes = textwrap.wrap(note, max(width // letter, 1))
    above = line if not title else 2 * line
    height = above + max(image.shape[0] for _, image in panels) + line * len(notes)
    figure = Figure(figsize=(width / dots, height / dots), dpi=dots)
    FigureCanvasAgg(figure)
    left = 0
    for (text, image), panel_width in zip(panels, widths):
        figure.figimage(image, left, height - above - image.shape[0], origin="upper")  # counted from below
        figure.text(left / width, 1 - (above - line / 2) / height, text, fontsize=9, va="center")
        left += panel_width + between
    figure.text(0.5, 1 - line / 2 / height, title, fontsize=10, va="center", ha="center")
    for i, words in enumerate(notes):
        figure.text(
            0.5, (len(notes) - i - 0.5) * line / height, words, fontsize=8, va="center", ha="center", color="dimgray"
        )
    with atomic_file(file) as temporary:
        figure.savefig(temporary, dpi=dots, format="png")
