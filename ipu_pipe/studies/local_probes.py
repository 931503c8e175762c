"""What local-parallel training does to gradients, generalization, capacity and features (Laskin et al. 2020, section 5).

angles    between each block's local gradient and the true one, over training                               Figure 6(a)
chunks    training and test results of blocks of k stages, from greedy (k = 1) to backpropagation (all)     Figure 6(b)
labels    how well random labels are learned, by backpropagation and by local methods                       Figure 6(c)
filters   a first layer's weights as an image                                                               Figure 7

A run of a probe is a function from a config to plain data; `in_processes` does several at a time. Everything is trained by the
emulator.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import math
import os
import statistics
import time
from importlib import util
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import numpy as np
import torch
from torch import nn

from ipu_pipe.backends.interface import StepResult
from ipu_pipe.backends.table import backend_of, make_engine
from ipu_pipe.data import DataSource, TensorData
from ipu_pipe.data.batches import Pair
from ipu_pipe.data.images import ImageFolder
from ipu_pipe.errors import BadInput, writing
from ipu_pipe.job.config import Config, configure
from ipu_pipe.job.evaluation import TEST_BATCH, Tally
from ipu_pipe.job.position import Measured
from ipu_pipe.job.record import Job
from ipu_pipe.job.yaml_files import merge
from ipu_pipe.local.blocks import blocks_of, losses_of
from ipu_pipe.model.buffers import buffers_restored
from ipu_pipe.model.modes import modes_restored
from ipu_pipe.model.probe import Loss, random_modules, undisturbed
from ipu_pipe.model.randomness import KeyedRandomness
from ipu_pipe.run import checkpoint
from ipu_pipe.run.build import build
from ipu_pipe.schedule.methods import METHODS
from ipu_pipe.studies.worker_pool import in_workers

Say = Callable[[str], None]
LOCAL = tuple(name for name, method in METHODS.items() if method.structure is not None)
SOURCE = "Laskin et al. 2020 (Parallel Training of Deep Networks with Local Updates)"


# ---- angles


class Angle(NamedTuple):
    """Between two gradients: in degrees (0 to 180; below 90 the one descends the other's loss too), and its cosine."""

    degrees: float
    cosine: float


class GradientProbe:
    """The angle between each block's local gradient and the true one, on one fixed batch.

    Local: of the block's own loss, a layer of several blocks has the mean of theirs. True: of the last block's loss through the
    whole model. Both at the same weights, in training mode, with the same buffers and random draws; weights, buffers, gradients,
    modes and random states are left as found.

    `model`: a BlockedModel, between two updates; BadInput where it is another. `x`, `y`: the batch. `loss`: as
    `ipu_pipe.local.blocks.losses_of` takes it. `seed`: of the draws.
    """

    def __init__(self, model: nn.Module, loss: Loss, x: torch.Tensor, y: torch.Tensor, seed: int = 0) -> None:
        blocks = blocks_of(model)
        if blocks is None:
            raise BadInput(f"model: {type(model).__name__}: has no blocks that are trained by losses of their own")
        self._model, self._loss, self._x, self._y, self._seed, self._blocks = model, loss, x, y, seed, blocks
        self._random = random_modules(model, x.clone())
        # a block's layers without its head; none where they are frozen
        self._own = [
            [t for t in piece.tensors() if isinstance(t, nn.Parameter) and t.requires_grad] for piece in blocks.pieces
        ]

    def angles(self) -> List[Optional[Angle]]:
        """One for each block, in order; None where a gradient is zero, not finite, or the block does not train."""
        whole = self._blocks.model
        mode = whole.training
        with undisturbed(self._model):
            keyed = KeyedRandomness(self._model, self._random, self._seed, self._x.device)
            try:
                self._model.train()
                whole.train()
                local = self._gradients(self._model, self._blocks.average_duplicates)
                true = self._gradients(whole, lambda: None)
            finally:
                keyed.remove()
                whole.training = mode
        return [angle(a, b) for a, b in zip(local, true)]

    def _gradients(self, model: nn.Module, finish: Callable[[], None]) -> List[torch.Tensor]:
        """Of each block's layers, one vector of float64 a block."""
        for parameter in self._model.parameters():
            parameter.grad = None
        with buffers_restored(self._model), buffers_restored(self._blocks.model):
            torch.autograd.backward(losses_of(self._loss, model(self._x.clone()), self._y))
        finish()
        return [_vector([torch.zeros_like(p) if p.grad is None else p.grad for p in own]) for own in self._own]


def _vector(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([t.detach().double().flatten() for t in tensors]) if tensors else torch.zeros(0)


def angle(a: torch.Tensor, b: torch.Tensor) -> Optional[Angle]:
    """Between two vectors; None where one is zero or not finite. By Kahan's formula, exact for small angles, where the arc cosine
    is not: 2 atan(|a/|a| - b/|b|| / |a/|a| + b/|b||)."""
    lengths = float(a.norm()), float(b.norm())
    if not all(0 < length < math.inf for length in lengths):
        return None
    a, b = a / lengths[0], b / lengths[1]
    degrees = math.degrees(2 * math.atan2(float((a - b).norm()), float((a + b).norm())))
    return Angle(degrees, max(-1.0, min(1.0, float(a @ b))))


def angle_run(config: Config, method: str, every: int, samples: int) -> Dict[str, Any]:
    """Train by a local `method` and measure the angles before the first update, after each `every` and at the end, on a fixed
    batch of `samples` training samples. `points`: update, train_loss (of that update), and by block degrees and cosines, null
    where there is no angle. Raises BadInput."""
    start = time.monotonic()
    if method not in LOCAL:
        raise BadInput(f"--method: {method}: must be one of {', '.join(LOCAL)}")
    job = _build(config, {"method": method})
    blocks = blocks_of(job.model)
    assert blocks is not None
    if job.data.train_batches_per_epoch(samples) < 1:
        raise BadInput(f"--samples: {samples}: the training set has not so many")
    probe = GradientProbe(job.model, job.loss, *job.to_device(*job.data.train_batch(0, 0, samples)), seed=config.seed)
    points: List[Dict[str, Any]] = []

    def measure(done: int, loss: Optional[float]) -> None:
        found = probe.angles()
        points.append({
            "update": done,
            "train_loss": loss,
            "degrees": [None if each is None else each.degrees for each in found],
            "cosines": [None if each is None else each.cosine for each in found],
        })  # fmt: skip

    measure(0, None)
    _train(job, lambda k, result: measure(k, result.loss) if k % every == 0 or k == job.updates else None)
    names = [piece.names[0] for piece in blocks.pieces]
    return {"method": method, "blocks": names, "points": points, "seconds": time.monotonic() - start}


# ---- chunks and labels


def stage_begins(config: Config) -> List[str]:
    """Names at which the second and later stages begin, each of which can be a block. Raises BadInput."""
    return _build(config, {"method": "local_greedy"}).part.begin_names()


def chunked(begins: Sequence[str], size: int) -> Dict[str, Any]:
    """Config keys of blocks of `size` stages each, the last one shorter where they do not divide; all in one block is
    backpropagation. `begins`: as of `stage_begins`."""
    blocks = list(begins[size - 1 :: size])
    return {"method": "local_chunked", "method_args": {"blocks": blocks or 1}}


def chunk_run(config: Config, begins: Sequence[str], size: int, seed: int, samples: int) -> Dict[str, Any]:
    """Train blocks of `size` stages and evaluate the model on as many training samples, without augmentation, as test samples:
    at most `samples`. Losses are means over samples, accuracies fractions. Raises BadInput."""
    start = time.monotonic()
    job = _build(config, {"seed": seed, **chunked(begins, size)})
    count = min(
        samples, _count(training_batches(job, samples)), _count(_cut(job.data.test_batches(TEST_BATCH), samples))
    )
    if count < 1:
        raise BadInput("data: has no test samples, with which training samples are compared")
    _train(job, lambda k, result: None)
    train = measured(job, training_batches(job, count))
    test = measured(job, _cut(job.data.test_batches(TEST_BATCH), count))
    return {
        "chunk": size, "blocks": len(job.part), "seed": seed, "samples": count, "train_loss": train[0],
        "train_accuracy": train[1], "test_loss": test[0], "test_accuracy": test[1], "seconds": time.monotonic() - start,
    }  # fmt: skip


def label_run(config: Config, label: str, keys: Mapping[str, Any], every: int) -> Dict[str, Any]:
    """Train on random labels without augmentation by the method that the config `keys` say. `points`: mean loss and accuracy in
    training over each `every` updates; `train_loss` and `train_accuracy`: of the final weights in evaluation, on all training
    samples. Raises BadInput."""
    start = time.monotonic()
    job = _build(config, merge(dict(keys), {"data": {"random_labels": True, "augment": False}}))
    points: List[Dict[str, Any]] = []
    window: List[StepResult] = []

    def gather(done: int, result: StepResult) -> None:
        window.append(result)
        if done % every == 0 or done == job.updates:
            right = [result.accuracy for result in window if result.accuracy is not None]
            points.append({
                "update": done,
                "train_loss": statistics.mean(result.loss for result in window),
                "train_accuracy": statistics.mean(right) if len(right) == len(window) else None,
            })  # fmt: skip
            window.clear()

    _train(job, gather)
    loss, accuracy = measured(job, training_batches(job, None))
    return {
        "label": label, "blocks": len(job.part), "points": points, "train_loss": loss, "train_accuracy": accuracy,
        "epochs": job.updates / job.updates_per_epoch, "seconds": time.monotonic() - start,
    }  # fmt: skip


def _build(config: Config, keys: Dict[str, Any]) -> Job:
    if not backend_of(config).emulates:
        raise BadInput(f"backend.name: {config.backend.name}: probes run on the emulator")
    return build(configure(**merge(config.to_dict(), keys)))


def _train(job: Job, after: Callable[[int, StepResult], None]) -> None:
    """All updates; `after` each, with how many are done, what it measured."""
    engine = make_engine(job, 0)
    try:
        for k in range(job.updates):
            after(k + 1, engine.step(k))
    finally:
        engine.close()


def training_batches(job: Job, samples: Optional[int]) -> Iterator[Pair]:
    """The first `samples` (None: all) training samples without augmentation; of a source that is not held in memory, whole
    microbatches of its first epoch as they come. Raises BadInput for folders of images, which are always augmented."""
    data: DataSource = job.data
    if isinstance(data, ImageFolder):
        raise BadInput("data: image_folder: gives no training images without augmentation: use another set")
    if isinstance(data, TensorData):
        held = copy.copy(data)
        held.test = data.train  # which it normalizes and does not augment
        return _cut(held.test_batches(TEST_BATCH), samples)
    size = job.config.micro_batch_size
    return _cut((data.train_batch(0, i, size) for i in range(data.train_batches_per_epoch(size))), samples)


def _cut(batches: Iterable[Pair], samples: Optional[int]) -> Iterator[Pair]:
    left = math.inf if samples is None else samples
    for x, y in batches:
        take = int(min(left, len(x)))
        yield x[:take], y[:take]
        left -= take
        if left <= 0:
            return


def _count(batches: Iterable[Pair]) -> int:
    return sum(len(x) for x, _ in batches)


def measured(job: Job, batches: Iterable[Pair]) -> Measured:
    """Mean loss and accuracy (a fraction) of the model's own output over `batches`, in evaluation mode."""
    tally, model = Tally(job.loss), job.model
    with torch.no_grad(), modes_restored(model):
        model.eval()
        for x, y in batches:
            x, y = job.to_device(x, y)
            tally.add(model(x), y, len(x))
    return tally.measured


# ---- several runs


def in_processes(
    work: Callable[..., Dict[str, Any]], runs: Mapping[str, Sequence[Any]], jobs: int, say: Say
) -> List[Dict[str, Any]]:
    """`work(*arguments)` of each of `runs`, label -> arguments, `jobs` at a time in processes of their own (in this one if 1);
    in the order of `runs`. A fault of one ends all."""
    done: Dict[str, Dict[str, Any]] = {}

    def finished(label: str, result: Dict[str, Any]) -> None:
        done[label] = result
        say(f"[{len(done)}/{len(runs)}] {label} ({result['seconds']:.0f} s)")

    if jobs == 1:
        for label, arguments in runs.items():
            finished(label, work(*arguments))
        return list(done.values())
    with contextlib.closing(in_workers(work, runs, jobs)) as results:
        for label, result in results:
            finished(label, result)
    return [done[label] for label in runs]


# ---- filters


def read_weights(path: Path) -> Tuple[Path, Dict[str, torch.Tensor]]:
    """The file or checkpoint folder read, and its weights: `path` is a state dict's file, a checkpoint folder, or the folder of a
    run, of which the newest checkpoint counts. Raises BadInput."""
    steps = checkpoint.steps(path / "checkpoints")
    if steps:
        path = path / "checkpoints" / f"step-{steps[-1]}"
    return path, checkpoint.read_weights(path)


def first_layer(
    tensors: Mapping[str, torch.Tensor],
    place: str,
    name: Optional[str] = None,
    shape: Optional[Sequence[int]] = None,
) -> Tuple[str, torch.Tensor]:
    """The name and the filters (n, C, H, W), C 1 or 3, of a state dict's first layer: the tensor `name`, else the only one of
    such a shape; with `shape` (C, H, W) the rows of a linear layer's weights (n, C H W). Raises BadInput, beginning with `place`.
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
    own = {key: t for key, t in tensors.items() if not key.startswith(checkpoint.HEADS)}
    found = [name] if name is not None else [key for key, t in own.items() if fits(t)]
    if len(found) != 1:
        shown = f"{len(found)} tensors: {', '.join(found[:4])}" if found else "no tensor"
        raise BadInput(f"{place}: {shown} of shape {wanted}, one is wanted: say which by --name")
    filters = tensors[found[0]]
    if not fits(filters):
        raise BadInput(f"{place}: {found[0]}: its shape is {tuple(filters.shape)}, must be {wanted}")
    if not bool(torch.isfinite(filters).all()):
        raise BadInput(f"{place}: {found[0]}: holds values that are not finite")
    return found[0], filters.float() if shape is None else filters.float().view(-1, *shape)


GAP = 2  # pixels between filters
WHITE = 255


def filters_image(filters: torch.Tensor, enlarge: Optional[int] = None, columns: Optional[int] = None) -> np.ndarray:
    """Filters (n, C, H, W), C 1 or 3, as an image of bytes (height, width, 3): each one between its own least (0) and greatest
    value (255; one that is constant is grey), row by row in a grid of `columns` (default: about a square), 2 white pixels around
    each. `enlarge`: a weight is a square of so many pixels a side (default: filters of about 40 pixels)."""
    n, _, height, width = filters.shape
    columns = min(n, columns or math.ceil(math.sqrt(n)))
    enlarge = enlarge or max(1, -(-40 // max(height, width)))
    low, high = filters.amin(dim=(1, 2, 3), keepdim=True), filters.amax(dim=(1, 2, 3), keepdim=True)
    shares = torch.where(high > low, (filters - low) / (high - low), torch.full_like(filters, 0.5))
    pixels = (shares * WHITE).round().to(torch.uint8).expand(n, 3, height, width)
    pixels = pixels.repeat_interleave(enlarge, dim=2).repeat_interleave(enlarge, dim=3)
    down, across = pixels.shape[2] + GAP, pixels.shape[3] + GAP
    image = np.full((-(-n // columns) * down + GAP, columns * across + GAP, 3), WHITE, dtype=np.uint8)
    for i, each in enumerate(pixels.permute(0, 2, 3, 1).numpy()):  # (H, W, 3)
        top, left = i // columns * down + GAP, i % columns * across + GAP
        image[top : top + down - GAP, left : left + across - GAP] = each
    return image


# ---- what is written


def check_plots() -> None:
    """Refuse (BadInput) before anything is trained where nothing can be drawn."""
    if util.find_spec("matplotlib") is None:
        raise BadInput("plots need matplotlib, which is not installed: pip install matplotlib")


@contextlib.contextmanager
def _figure(file: Path, size: Tuple[float, float], panels: int = 1) -> Iterator[List[Any]]:
    """The axes of so many panels side by side, each of `size` inches; written to `file` at the end."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(size[0] * panels, size[1]), layout="constrained")
    FigureCanvasAgg(figure)
    axes = list(figure.subplots(1, panels, squeeze=False)[0])
    yield axes
    for each in axes:
        each.grid(alpha=0.3)
    with writing(file):
        figure.savefig(file, dpi=100)


def plot_angles(runs: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Angle by update, a line a block, a panel a method."""
    from matplotlib import colormaps

    with _figure(file, (6.5, 5), len(runs)) as panels:
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


def plot_chunks(runs: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Accuracy and loss on training and test samples by chunk size, mean over seeds with the range shaded."""
    with _figure(file, (6, 4.5), 2) as panels:
        for axes, what in zip(panels, ("accuracy", "loss")):
            sizes = sorted({run["chunk"] for run in runs})
            for part in ("train", "test"):
                values = [[run[f"{part}_{what}"] for run in runs if run["chunk"] == size] for size in sizes]
                if any(value is None for group in values for value in group):
                    continue
                (line,) = axes.plot(sizes, [statistics.mean(group) for group in values], marker="o", label=part)
                low, high = [min(group) for group in values], [max(group) for group in values]
                axes.fill_between(sizes, low, high, color=line.get_color(), alpha=0.15, linewidth=0)
            axes.set(xlabel="stages a block", ylabel=what, xticks=sizes)
            axes.legend()


def plot_labels(runs: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Training loss and accuracy on random labels by update, a line a method."""
    with _figure(file, (6, 4.5), 2) as panels:
        for axes, what in zip(panels, ("loss", "accuracy")):
            for run in runs:
                points = [point for point in run["points"] if point[f"train_{what}"] is not None]
                updates, values = [p["update"] for p in points], [p[f"train_{what}"] for p in points]
                axes.plot(updates, values, label=run["label"])
            axes.set(xlabel="update", ylabel=f"training {what}, random labels")
            axes.legend(fontsize="small")


def draw_filters(panels: Sequence[Tuple[str, np.ndarray]], file: Path) -> None:
    """Images of `filters_image`, titles above, side by side, pixel by pixel: the first one's upper left corner is at (0, 24)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    title, between, letter, dots = 24, 16, 7, 100  # pixels: above an image, between two, of a letter; an inch
    widths = [max(image.shape[1], letter * len(text)) for text, image in panels]
    width = sum(widths) + between * (len(panels) - 1)
    height = title + max(image.shape[0] for _, image in panels)
    figure = Figure(figsize=(width / dots, height / dots), dpi=dots)
    FigureCanvasAgg(figure)
    left = 0
    for (text, image), own in zip(panels, widths):
        figure.figimage(image, left, height - title - image.shape[0], origin="upper")  # counted from below
        figure.text(left / width, 1 - title / 2 / height, text, fontsize=9, va="center")
        left += own + between
    with writing(file):
        figure.savefig(file, dpi=dots)


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
    head = [
        "stages a block",
        "blocks",
        "seeds",
        "train loss",
        "test loss",
        "gap",
        "train accuracy",
        "test accuracy",
        "gap",
    ]
    return table(head, rows)


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


def write(file: Path, text: str) -> Path:
    """Write a file whole or not at all."""
    with writing(file):
        temporary = file.with_name(f".{file.name}.part")
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, file)
    return file


def write_json(file: Path, found: Mapping[str, Any]) -> Path:
    """As `write`."""
    return write(file, json.dumps(found, indent=1) + "\n")
