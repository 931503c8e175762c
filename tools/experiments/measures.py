"""The measures of a training run that experiments can name, each a row of `MEASURES`.

test_accuracy    of the final weights; test loss and accuracy by epoch and time
test_loss        of the final weights; test loss by epoch and time
training_loss    of the last `window` microbatches, and of each window before; of the whole run if it is shorter
angles           between each block's local gradient and the true one, every `every` updates   (Laskin et al. 2020, Figure 6(a))
fit              how well the training samples are learned, beside the test samples            (Figures 6(b) and 6(c))
filters          the first layer's weights, `tensor`, as an image                              (Figure 7)
"""

from __future__ import annotations

import copy
import functools
import json
import math
import statistics
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import numpy as np
import torch
from torch import nn
from typing_extensions import Literal

from ipu_pipe.backends.interface import StepResult
from ipu_pipe.config.schema import Config
from ipu_pipe.config.values import Count, Section
from ipu_pipe.data import TensorData
from ipu_pipe.errors import BadInput, Divergence
from ipu_pipe.job.evaluation import evaluate
from ipu_pipe.job.record import Job, PlannedJob
from ipu_pipe.local.blocks import get_blocks
from ipu_pipe.model.batch import call_model, clone_tensors, get_first_tensor
from ipu_pipe.model.loss import Loss, compute_losses
from ipu_pipe.model.modes import set_mode
from ipu_pipe.model.observation import observe_effects
from ipu_pipe.model.randomness import KeyedRandomness
from ipu_pipe.model.restoring import restore_all, restore_buffers, restore_modes
from ipu_pipe.pipeline.flow import Flow
from ipu_pipe.report.plots import open_figure
from ipu_pipe.run.build import build
from ipu_pipe.run.train import train
from ipu_pipe.schedule.methods import METHODS
from ipu_pipe.store import checkpoint
from tools.experiments.plots import describe_seeds, plot_mean_with_range
from tools.experiments.verdicts import Claim, Verdict, judge

# the result of a run as plain data: see `make_result`
Result = Dict[str, Any]
# results of runs with their label and seed
Runs = Sequence[Mapping[str, Any]]


class MeasureOptions(Section):
    """The key `measure` of an experiment's file: a name, and the options of the measures that have
    some.

    `fill_and_drain`: time is counted in steps of a forward and a backward on each stage, so that
    methods that flush are busy for N / (N + 2 S) of it (Kosson et al. 2021, equation 1); else in
    slots of one pass, by the method's timeline.
    """

    name: Literal["test_accuracy", "test_loss", "training_loss", "angles", "fit", "filters"] = (
        "test_accuracy"
    )
    fill_and_drain: bool = False
    every: Count = 10
    samples: Count = 200
    window: Count = 64
    tensor: str = "conv1.weight"


# ---- measures that read the files of a run


def make_result(
    final: Optional[float],
    curve: Sequence[Any],
    step: int,
    values: Mapping[str, Any],
    best: Any = None,
    diverged: Any = None,
) -> Result:
    """Return a run's result with its measured values. `diverged`: why the loss was not finite,
    which leaves no final value.
    """
    ended = bool(curve) and not diverged
    measured = {
        "final": final if ended else None,
        "best": best if ended else None,
        "curve": list(curve),
    }
    return {**measured, "values": dict(values), "diverged": diverged, "step": step}


def train_run(
    config: Config, out: Path, overwrite: bool, fill_and_drain: bool = False
) -> Tuple[List[Dict[str, Any]], Optional[str]]:
    """Train a run, or resume it if it was interrupted. Return its records and why it diverged,
    which is a result, or None.

    The records are the lines of its metrics.jsonl, each with its "time": an epoch of a pipeline
    without bubbles takes 1.
    """
    diverged = None
    try:
        resume = not overwrite and (out / "config.yaml").exists()
        summary = train(config, out, resume=resume, overwrite=overwrite, quiet=True)
        phases, per_epoch, stages = (
            summary["phases"],
            summary["updates_per_epoch"],
            summary["model"]["stages"],
        )
    except Divergence as error:
        job, diverged = build(config), error.reason
        phases, per_epoch, stages = job.describe_phases(), job.updates_per_epoch, len(job.partition)
    if fill_and_drain:
        N = config.gradient_accumulation
        phases = [
            {
                **phase,
                "planned_utilization": N / (N + 2 * stages)
                if METHODS[phase["method"]].flushes
                else 1.0,
            }
            for phase in phases
        ]
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    for record in records:
        record["time"] = compute_normalized_time(phases, record["step"]) / per_epoch
    return records, diverged


def compute_normalized_time(phases: Sequence[Mapping[str, Any]], step: int) -> float:
    """Return the time of `step` updates, in updates of a pipeline without bubbles. `phases` is from
    summary.json.
    """
    total, updates_left = 0.0, step
    for phase in phases:
        count = min(updates_left, phase["updates"])
        total += count / phase["planned_utilization"]
        updates_left -= count
    return total


def measure_test_accuracy(
    config: Config, out: Path, options: MeasureOptions, overwrite: bool
) -> Result:
    """Train a run; its curve has (epoch, time, test loss, test accuracy) of each evaluation."""
    records, diverged = train_run(config, out, overwrite, options.fill_and_drain)
    return _summarize_curve(
        _list_evaluations(records, "test_loss", "test_accuracy"), max, records, diverged
    )


def measure_test_loss(
    config: Config, out: Path, options: MeasureOptions, overwrite: bool
) -> Result:
    """Train a run; its curve has (epoch, time, test loss) of each evaluation."""
    records, diverged = train_run(config, out, overwrite, options.fill_and_drain)
    return _summarize_curve(_list_evaluations(records, "test_loss"), min, records, diverged)


def _list_evaluations(records: Runs, *values: str) -> List[List[Any]]:
    keys = ("epoch", "time", *values)
    return [
        [record[key] for key in keys] for record in records if record.get(values[-1]) is not None
    ]


def measure_training_loss(
    config: Config, out: Path, options: MeasureOptions, overwrite: bool
) -> Result:
    """Train a run that logs every update; its curve has (epoch, time, mean loss) of each window of
    whole updates.
    """
    records, diverged = train_run(config, out, overwrite)
    losses = [record for record in records if record.get("train_loss") is not None]
    replicas = (
        config.method_args.replicas or config.replicas
    )  # LocalSGD's, or copies of the pipeline
    window_updates = options.window // (replicas * config.gradient_accumulation)
    length, curve = max(min(window_updates, len(losses)), 1), []
    # the last window ends with the last update
    for end in range(len(losses) % length + length, len(losses) + 1, length):
        mean = statistics.mean(record["train_loss"] for record in losses[end - length : end])
        curve.append([losses[end - 1]["epoch"], losses[end - 1]["time"], mean])
    result = _summarize_curve(curve, min, records, diverged)
    # a window of a run that diverged says nothing of its beginning
    return {**result, "begin": losses[0]["train_loss"]} if diverged and losses else result


def _summarize_curve(
    curve: Sequence[Sequence[Any]],
    choose: Callable[..., Any],
    records: Runs,
    diverged: Optional[str],
) -> Result:
    """Return the result whose final value is the last one of the last point; `choose` takes the
    best of all points.
    """
    values = [point[-1] for point in curve] or [None]
    step = max((record["step"] for record in records), default=0)
    return make_result(values[-1], curve, step, {}, choose(values), diverged)


def measure_filters(config: Config, out: Path, options: MeasureOptions, overwrite: bool) -> Result:
    """Train a run and return the weights of its first convolution, (n, C, H, W), beside its test
    accuracy.

    "mean colour" is the share of a filter's squared norm that is the norm of its mean colour, the
    mean over the filters.
    """
    result = measure_test_accuracy(config, out, options, overwrite)
    tensors = checkpoint.read_weights(checkpoint.find_newest(out))
    filters = tensors.get(options.tensor)
    if filters is None or filters.dim() != 4 or filters.shape[1] not in (1, 3):
        raise BadInput(
            f"measure.tensor: {options.tensor}: is not a tensor of shape (n, 1 or 3, H, W) of the "
            f"model"
        )
    filters = filters.double()
    colours = filters.mean(dim=(2, 3)).square().sum(1) * filters.shape[2] * filters.shape[3]
    share = float((colours / filters.square().sum(dim=(1, 2, 3))).mean())
    return {**result, "values": {"mean colour": share}, "filters": filters.tolist()}


# ---- measures that read the model of a run on the emulator


def build_emulated(config: Config) -> PlannedJob:
    """Build a run for a measure that reads its model between updates."""
    if not config.backend.facts.emulates:
        raise BadInput(f"backend.name: {config.backend.name}: is measured on the emulator")
    return build(config)


def train_emulated(job: Job, after: Callable[[int, StepResult], None]) -> None:
    """Make all updates. Call `after` following each one, with the number of finished updates and
    the result.
    """
    flow = Flow(job)
    try:
        # the emulator has made an update when its batch is given, before it leaves the pipeline
        for k in range(job.updates):
            flow.give()
            after(k + 1, flow.engine.take(k))
    finally:
        flow.engine.close()


def measure_angles(config: Config, out: Path, options: MeasureOptions, overwrite: bool) -> Result:
    """Train blocks and measure their angles before the first update, after every `every` updates
    and at the end.

    They are of one batch of `samples` training samples. The curve has (update, degrees of each
    block, or None).
    """
    job = build_emulated(config)
    if get_blocks(job.model) is None:
        raise BadInput(
            f"method: {config.method}: trains no blocks by losses of their own, of which angles are"
        )
    if not job.data.train_batches_per_epoch(options.samples):
        raise BadInput(f"measure.samples: {options.samples}: the training set has fewer")
    x, y = job.prepare_batch(job.data.train_batch(0, 0, options.samples))
    draws = observe_draws(job.model, x)
    curve: List[List[Any]] = []

    def measure(done: int, result: Optional[StepResult] = None) -> None:
        if done % options.every == 0 or done == job.updates:
            curve.append(
                [done, *compute_block_angles(job.model, job.loss, x, y, draws, config.seed)]
            )

    measure(0)
    train_emulated(job, measure)
    blocks = get_blocks(job.model)
    assert blocks is not None
    names = [f"{j}: {piece.names[0]}" for j, piece in enumerate(blocks.pieces)]
    angles = [angle for angle in curve[-1][1:] if angle is not None]
    return make_result(
        statistics.mean(angles) if angles else None,
        curve,
        job.updates,
        dict(zip(names, curve[-1][1:])),
    )


def observe_draws(model: nn.Module, x: Any) -> Mapping[str, int]:
    """Return the modules of a model in blocks that draw random numbers, as `KeyedRandomness` takes
    them; before training.
    """
    blocks = get_blocks(model)
    assert blocks is not None
    # record a batch of this size without the hooks of an observer
    blocks.pieces[0].cut.prepare(x, training=True)
    return observe_effects(model, clone_tensors(x)).draws


def compute_block_angles(
    model: nn.Module, loss: Loss, x: Any, y: Any, draws: Mapping[str, int], seed: int = 0
) -> List[Optional[float]]:
    """Return the angle of each block's local gradient to the true one in degrees, 0 to 180.

    Below 90 degrees a step along one gradient also lowers the other's loss. The angle is None if a
    gradient is zero or not finite, or if the block does not train. The local gradient is that of
    the block's own loss; a layer of several blocks has the mean of their gradients. The true
    gradient is that of the last block's loss through the whole model. Both are taken at the same
    weights, in training mode, with the same buffers and random draws (of the modules `draws`, by
    `seed`). Weights, buffers, gradients, modes and random states are restored. The model must have
    blocks and be between two updates.
    """
    blocks = get_blocks(model)
    assert blocks is not None
    # of each block without its head
    parameters_by_block = [
        [t for t in piece.list_tensors() if isinstance(t, nn.Parameter) and t.requires_grad]
        for piece in blocks.pieces
    ]

    def compute_gradients(
        differentiated: nn.Module, combine: Callable[[], None]
    ) -> List[torch.Tensor]:
        """Return the gradient of each block as a float64 vector; `combine` is called before
        gradients are read.
        """
        for parameter in model.parameters():
            parameter.grad = None
        with restore_buffers(model), restore_buffers(blocks.model):
            with keyed.forward(0):
                output = call_model(differentiated, clone_tensors(x))
            with keyed.backward(0):
                torch.autograd.backward(compute_losses(loss, output, y))
        combine()
        return [
            torch.cat([flatten(p) for p in parameters]) if parameters else torch.zeros(0)
            for parameters in parameters_by_block
        ]

    def flatten(p: nn.Parameter) -> torch.Tensor:
        return (torch.zeros_like(p) if p.grad is None else p.grad).detach().double().flatten()

    with restore_all(model), restore_modes(blocks.model):
        keyed = KeyedRandomness(model, draws, seed, get_first_tensor(x).device)
        try:
            set_mode(model, training=True)
            set_mode(blocks.model, training=True)
            local = compute_gradients(model, blocks.average_duplicates)
            true = compute_gradients(blocks.model, lambda: None)
        finally:
            keyed.remove()
    return [compute_angle(a, b) for a, b in zip(local, true)]


def compute_angle(a: torch.Tensor, b: torch.Tensor) -> Optional[float]:
    """Return the angle between two vectors in degrees; None if one is zero or not finite.

    By Kahan's formula 2 atan(|a/|a| - b/|b|| / |a/|a| + b/|b||), which is exact for small angles,
    where the arc cosine is not.
    """
    lengths = float(a.norm()), float(b.norm())
    if not all(0 < length < math.inf for length in lengths):
        return None
    a, b = a / lengths[0], b / lengths[1]
    return math.degrees(2 * math.atan2(float((a - b).norm()), float((a + b).norm())))


def judge_angles(runs: Runs) -> List[Verdict]:
    """Judge Figure 6(a) by the first row: the mean angles of its blocks over the second half of the
    updates, without the last block, whose loss is the model's.
    """
    label = runs[0]["label"]
    greatest: Dict[int, float] = {}
    slopes: Dict[int, float] = {}
    for run in (run for run in runs if run["label"] == label):
        # a missing angle becomes nan, of which nothing can be told
        angles = np.array(
            [point[1:-1] for point in run["curve"] if 2 * point[0] >= run["step"]], dtype=np.float64
        )
        means = angles.mean(axis=0)
        known = bool(means.size and np.isfinite(means).all())
        greatest[run["seed"]] = float(means.max()) if known else math.nan
        slope = (
            -float(np.polyfit(np.arange(means.size), means, 1)[0])
            if known and means.size > 1
            else math.nan
        )
        slopes[run["seed"]] = slope
    below = Claim(
        f"{label}: mean angles of the blocks are below 90 degrees",
        (label,),
        lambda finals: 90 - finals[label],
    )
    rising = (
        f"{label}: a straight line through the mean angles rises away from the end (degrees "
        f"per block)"
    )
    return [
        judge(below, {label: greatest}),
        judge(Claim(rising, (label,), lambda finals: finals[label]), {label: slopes}),
    ]


def measure_fit(config: Config, out: Path, options: MeasureOptions, overwrite: bool) -> Result:
    """Train, then evaluate the final weights on the training samples, without augmentation, and on
    the test samples.

    The curve has (update, loss, accuracy) in training, means over every `every` updates.
    """
    job = build_emulated(config)
    if not isinstance(job.data, TensorData):
        raise BadInput(
            f"data: {config.data.name}: has no training samples in memory, which could be evaluated"
        )
    curve: List[List[Any]] = []
    window: List[StepResult] = []

    def gather(done: int, result: StepResult) -> None:
        window.append(result)
        if done % options.every == 0 or done == job.updates:
            accuracies = [one.accuracy for one in window if one.accuracy is not None]
            accuracy = statistics.mean(accuracies) if accuracies else None
            curve.append(
                [
                    done,
                    statistics.mean(one.loss for one in window if one.loss is not None),
                    accuracy,
                ]
            )
            window.clear()

    train_emulated(job, gather)
    # the training samples as a test set, which is normalized but not augmented
    job_on_training, job_on_training.data = copy.copy(job), copy.copy(job.data)
    job_on_training.data.test = job.data.train
    train_result, test_result = evaluate(job_on_training)[-1], evaluate(job)[-1]
    values = {
        "blocks": len(job.partition),
        "train loss": train_result.loss,
        "train accuracy": train_result.accuracy,
        "test loss": test_result.loss,
        "test accuracy": test_result.accuracy,
    }
    return make_result(train_result.accuracy, curve, job.updates, values)


# ---- pictures


class Gap(NamedTuple):
    """The difference between two rows: `groups` has its values by seed at each of `updates`."""

    name: str
    updates: List[float]
    groups: List[List[float]]


def collect_gaps(
    rows: Sequence[Mapping[str, Any]], runs: Runs, gaps: Mapping[str, Tuple[str, str]]
) -> List[Gap]:
    """Return the gaps (name -> row, row from which it is subtracted) with a seed that has both."""
    curves = {(run["label"], run["seed"]): run["curve"] for run in runs}
    steps = {row["label"]: row["step"] for row in rows}
    collected = []
    for name, (row, other) in gaps.items():
        pairs = [
            (curve, curves[other, seed])
            for (label, seed), curve in curves.items()
            if label == row and curve and curves.get((other, seed))
        ]
        if pairs:
            points = range(min(len(curve) for pair in pairs for curve in pair))
            by_epoch = pairs[0][0]
            updates_of_epoch = steps[row] / by_epoch[-1][0]
            updates = [by_epoch[i][0] * updates_of_epoch for i in points]
            groups = [[a[i][-1] - b[i][-1] for a, b in pairs] for i in points]
            collected.append(Gap(name, updates, groups))
    return collected


def draw_gaps(
    results: Mapping[str, Any],
    runs: Runs,
    file: Path,
    gaps: Mapping[str, Tuple[str, str]],
    quantity: str,
) -> None:
    """Draw gaps (as for `collect_gaps`) against the updates and, beside them, their ends."""
    note = f"{results['setting']}; {describe_seeds(results['seeds'])}; bars: standard deviations"
    collected = collect_gaps(results["rows"], runs, gaps)
    with open_figure(file, (6, 4.5), 2, title=results["title"], note=note) as (by_update, at_end):
        for place, gap in enumerate(collected):
            plot_mean_with_range(by_update, gap.updates, gap.groups, markersize=3, label=gap.name)
            last = gap.groups[-1]
            spread = statistics.stdev(last) if len(last) > 1 else 0.0
            at_end.errorbar([place], [statistics.mean(last)], [spread], fmt="o", capsize=4)
        by_update.set(xlabel="updates", ylabel=f"difference of {quantity}")
        by_update.legend(fontsize="small")
        at_end.set_xticks(range(len(collected)), [gap.name for gap in collected])
        at_end.set(xlabel="at the end", ylabel=f"difference of {quantity}")


def draw_finals(
    results: Mapping[str, Any],
    runs: Runs,
    file: Path,
    finals: Mapping[str, Mapping[str, Mapping[float, str]]],
    quantity: str,
) -> None:
    """Draw the final values of rows against a number, a panel for each: name of the number -> line
    -> number -> row. A cross on the axis is a row of which a run diverged.
    """
    by_row = {row["label"]: row["final_by_seed"].values() for row in results["rows"]}
    note = f"{results['setting']}; {describe_seeds(results['seeds'])}; crosses: runs that diverged"
    with open_figure(file, (5.5, 4.5), len(finals), title=results["title"], note=note) as panels:
        for axes, (name, lines) in zip(panels, finals.items()):
            for place, (line, row_by_number) in enumerate(lines.items()):
                values = {number: by_row[row] for number, row in row_by_number.items()}
                ended = {x: [v for v in vs if v is not None] for x, vs in values.items()}
                xs = [number for number, group in ended.items() if group]
                color = f"C{place}"
                groups = [ended[x] for x in xs]
                plot_mean_with_range(axes, xs, groups, markersize=4, label=line, color=color)
                crosses = [number for number, group in values.items() if None in group]
                # beside one another, at the foot of the panel
                height = 0.02 + 0.04 * place
                foot = axes.get_xaxis_transform()
                axes.plot(crosses, [height] * len(crosses), "x", color=color, transform=foot)
            axes.set_xscale("log")
            numbers = sorted({x for row_by_number in lines.values() for x in row_by_number})
            axes.set_xticks(numbers, [f"{number:g}" for number in numbers])
            axes.minorticks_off()
            axes.set(xlabel=name, ylabel=f"final {quantity}")
            axes.legend(fontsize="small")


def draw_means(
    results: Mapping[str, Any], runs: Runs, file: Path, x: int, x_label: str, y_label: str
) -> None:
    """Draw the last value of the points of each row's curves against value `x` of them: means over
    seeds, ranges shaded.
    """
    note = f"{results['setting']}; {describe_seeds(results['seeds'])}"
    with open_figure(file, (8, 5), title=results["title"], note=note) as (axes,):
        for label in dict.fromkeys(run["label"] for run in runs):
            runs_of_row = [run for run in runs if run["label"] == label and run["curve"]]
            length = min((len(run["curve"]) for run in runs_of_row), default=0)
            # the logarithmic axis of time has no place for time 0
            points = [
                [run["curve"][i] for run in runs_of_row]
                for i in range(int(x_label.startswith("time")), length)
            ]
            points = [group for group in points if all(point[-1] is not None for point in group)]
            if points:
                diverged = " (diverged)" if any(run["diverged"] for run in runs_of_row) else ""
                xs = [statistics.mean(point[x] for point in group) for group in points]
                groups = [[point[-1] for point in group] for group in points]
                plot_mean_with_range(axes, xs, groups, markersize=3, label=label + diverged)
        if x_label.startswith("time"):
            axes.set_xscale("log")
        axes.set(xlabel=x_label, ylabel=y_label)
        if axes.lines:
            axes.legend(fontsize="small")


def draw_angles(results: Mapping[str, Any], runs: Runs, file: Path) -> None:
    """Draw the angles by update: a line for each block, means over seeds with their ranges shaded,
    a panel for each row.
    """
    from matplotlib import colormaps

    labels = [row["label"] for row in results["rows"]]
    note = f"{results['setting']}; {describe_seeds(results['seeds'])}"
    with open_figure(file, (6.5, 5), len(labels), title=results["title"], note=note) as panels:
        for axes, label in zip(panels, labels):
            blocks = next(list(run["values"]) for run in runs if run["label"] == label)
            points = list(
                zip(*(run["curve"] for run in runs if run["label"] == label))
            )  # by update, then seed
            for j, name in enumerate(blocks, start=1):
                known = [
                    by_seed for by_seed in points if all(point[j] is not None for point in by_seed)
                ]
                updates, groups = (
                    [by_seed[0][0] for by_seed in known],
                    [[point[j] for point in by_seed] for by_seed in known],
                )
                shade = colormaps["viridis"]((j - 1) / max(1, len(blocks) - 1) * 0.9)
                plot_mean_with_range(axes, updates, groups, markersize=3, color=shade, label=name)
            axes.axhline(90, color="black", linestyle="--", linewidth=1)
            axes.set(xlabel="update", ylabel="angle to the true gradient (degrees)", title=label)
            axes.legend(fontsize="x-small", title="block", loc="upper left", bbox_to_anchor=(1, 1))


def draw_fit(results: Mapping[str, Any], runs: Runs, file: Path) -> None:
    """Draw the accuracy of the final weights on training and test samples by row: means over seeds,
    ranges shaded.
    """
    labels = [row["label"] for row in results["rows"]]
    note = f"{results['setting']}; {describe_seeds(results['seeds'])}"
    with open_figure(file, (8, 5), title=results["title"], note=note) as (axes,):
        for key in ("train accuracy", "test accuracy"):
            groups = [
                [run["values"][key] for run in runs if run["label"] == label] for label in labels
            ]
            if all(value is not None for group in groups for value in group):
                plot_mean_with_range(axes, range(len(labels)), groups, label=key)
        axes.set_xticks(range(len(labels)), labels)
        axes.set(ylabel="accuracy of the final weights")
        axes.legend()


def draw_filters(results: Mapping[str, Any], runs: Runs, file: Path) -> None:
    """Draw the filters of the first seed, a panel for each row, each filter from its least weight
    to its greatest.
    """
    first = [run for run in runs if run["seed"] == runs[0]["seed"]]
    scaling = "each filter from its least weight (dark) to its greatest (bright)"
    note = f"{results['setting']}; seed {runs[0]['seed']} alone; {scaling}"
    with open_figure(file, (2.2, 2.5), len(first), title=results["title"], note=note) as panels:
        for axes, run in zip(panels, first):
            axes.imshow(make_filters_image(np.array(run["filters"])), interpolation="nearest")
            axes.set(title=run["label"])
            axes.set_axis_off()


def make_filters_image(filters: np.ndarray) -> np.ndarray:
    """Return filters (n, C, H, W), C 1 or 3, as an image (height, width, 3) of values from 0 to 1,
    in a square grid on white.

    Each filter is scaled from its own least (0) to its greatest value (1; a constant one is grey).
    """
    n, _, height, width = filters.shape
    columns = math.ceil(math.sqrt(n))
    image = np.ones((-(-n // columns) * (height + 1) + 1, columns * (width + 1) + 1, 3))
    for i, weights in enumerate(filters):
        spread = weights.max() - weights.min()
        top, left = i // columns * (height + 1) + 1, i % columns * (width + 1) + 1
        brightness = (weights - weights.min()) / spread if spread else np.full_like(weights, 0.5)
        image[top : top + height, left : left + width] = brightness.transpose(1, 2, 0)
    return image


# ---- the table

Draw = Callable[[Mapping[str, Any], Runs, Path], None]


class Measure(NamedTuple):
    """A row of the table: the `quantity` that is a run's final value, its format, and its `sign`,
    -1 if less is better.

    `judge` returns verdicts on what the paper says of this measure; most measures have none.
    """

    quantity: str
    format_spec: str
    sign: int
    run: Callable[[Config, Path, MeasureOptions, bool], Result]
    pictures: Mapping[str, Draw]
    judge: Callable[[Runs], List[Verdict]] = lambda runs: []


def _list_pictures(name: str, y_label: str) -> Dict[str, Draw]:
    """Return the pictures of a curve by epoch and by time."""
    return {
        f"{name}_by_epoch.png": functools.partial(
            draw_means, x=0, x_label="epoch", y_label=y_label
        ),
        f"{name}_by_time.png": functools.partial(
            draw_means, x=1, x_label="time (epochs / utilization)", y_label=y_label
        ),
    }


MEASURES: Dict[str, Measure] = {
    "test_accuracy": Measure(
        "test accuracy",
        ".1%",
        1,
        measure_test_accuracy,
        _list_pictures("accuracy", "test accuracy"),
    ),
    "test_loss": Measure(
        "test loss", ".3f", -1, measure_test_loss, _list_pictures("loss", "test loss")
    ),
    "training_loss": Measure(
        "training loss", ".4g", -1, measure_training_loss, _list_pictures("loss", "training loss")
    ),
    "angles": Measure(
        "mean angle, degrees", ".1f", -1, measure_angles, {"angles.png": draw_angles}, judge_angles
    ),
    "fit": Measure(
        "training accuracy",
        ".1%",
        1,
        measure_fit,
        {
            "accuracy.png": draw_fit,
            "training.png": functools.partial(
                draw_means, x=0, x_label="update", y_label="accuracy in training"
            ),
        },
    ),
    "filters": Measure("test accuracy", ".1%", 1, measure_filters, {"filters.png": draw_filters}),
}
