"""Evaluate the current weights: loss and metrics over the test or validation set."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any, Callable, Iterable, Iterator, NamedTuple, Sequence

import torch
from torch import nn

from ipu_pipe.errors import BadInput, summarize
from ipu_pipe.job.metrics import DEFAULT, Metric, MetricSums
from ipu_pipe.job.record import RunSetup
from ipu_pipe.local.blocks import get_blocks
from ipu_pipe.model.batch import call_model, count_samples, describe_tensors, take_samples
from ipu_pipe.model.devices import fork_random
from ipu_pipe.model.loss import (
    Loss,
    call_loss,
    count_right,
    describe_output,
    get_block_loss,
    get_labels,
    get_plain_loss,
    is_cross_entropy,
    is_sum,
    take_scores,
)
from ipu_pipe.model.precision import get_uncast_loss
from ipu_pipe.model.restoring import restore_all, restore_modes
from ipu_pipe.text import describe_kind

# samples of one forward; the size does not matter for BatchNorm, which uses running statistics here
TEST_BATCH = 128

# (shard, shards) -> the batches of that shard, inputs and labels on the run's device; without
# arguments all of them
BatchReader = Callable[..., Iterator[Any]]
Metrics = Sequence[Metric]


class EvaluationResult(NamedTuple):
    """The result of an evaluation: loss, and metrics by name; None where there is none."""

    loss: float | None = None
    metrics: dict[str, float | None] = {}

    @property
    def accuracy(self) -> float | None:
        """Accuracy, or None if not configured."""
        return self.metrics.get("accuracy")

    def to_record(self, prefix: str = "test_") -> dict[str, float | None]:
        """Return the values by their names in files: loss and accuracy first, even if accuracy is
        not configured.
        """
        values = {"loss": self.loss, "accuracy": self.accuracy, **self.metrics}
        return {f"{prefix}{name}": value for name, value in values.items()}


def collect_by_block(
    evaluations: Sequence[EvaluationResult], split: str = "test"
) -> dict[str, list[float | None]]:
    """Return the evaluations of blocks as one list per name."""
    records = [evaluation.to_record(f"block_{split}_") for evaluation in evaluations]
    return {name: [record[name] for record in records] for name in records[0]}


def load_test_batches(
    setup: RunSetup, split: str = "test", shard: int = 0, shards: int = 1
) -> Iterator[tuple[Any, Any]]:
    """Yield the test set, or the validation set, in batches on the run's device, up to
    `evaluate.subset` samples.

    With several `shards`, only the batches with `number % shards == shard`; data with
    `test_shard(batch_size, shard, shards)` reads no others.
    """
    subset = setup.config.evaluate.subset
    samples = 0
    data: Any = setup.data if split == "test" else setup.validation
    read_shard = getattr(data, "test_shard", None)
    # a subset ends after a number of samples, which nobody counts who reads one shard alone
    if shards > 1 and read_shard is not None and not subset:
        yield from map(setup.prepare_batch, read_shard(TEST_BATCH, shard, shards))
        return
    batches = data.test_batches(TEST_BATCH)
    if not isinstance(batches, Iterable):
        raise BadInput(
            f"data: test_batches: returned {describe_kind(batches)}: must return an iterable of "
            f"batches"
        )
    for number, batch in enumerate(batches):
        x, y = setup.prepare_batch(batch)
        if subset:
            # the last batch may reach beyond the subset
            x = take_samples(x, subset - samples)
            y = take_samples(y, subset - samples)
        samples += count_samples(x)
        # after counting, so that every shard ends at the same batch of a subset
        if number % shards == shard:
            yield x, y
        if subset and samples >= subset:
            return


class Tally:
    """Accumulate loss and metrics over test batches.

    Cross-entropy is averaged over labels other than -100, other losses over samples, and the sums
    of a batch (`reduction="sum"`) as well.
    """

    def __init__(self, loss: Loss, metrics: Metrics = DEFAULT) -> None:
        self._loss = get_block_loss(loss)
        # the user's loss, without what the library puts around it
        plain = get_uncast_loss(get_plain_loss(self._loss))
        self._counts_labels = is_cross_entropy(plain)
        self._is_sum = is_sum(plain)
        # two sums: of the loss times its weight, and of the weight
        self._losses = MetricSums(self._sum_loss, 2)
        self._metrics = [metric.make_sums() for metric in metrics]

    def add(self, output: Any, y: Any, samples: int) -> None:
        """Add a batch's outputs and labels."""
        scores = take_scores(self._loss, output)
        self._losses.add(output, y, samples)
        for metric in self._metrics:
            metric.add(scores, get_labels(y), samples)

    def _sum_loss(self, output: Any, y: Any, samples: int) -> torch.Tensor:
        """Return the loss times its weight, or the sum that it is, and the weight  # (2,)"""
        answers = count_right(take_scores(self._loss, output), y) if self._counts_labels else None
        loss = call_loss(self._loss, output, y).detach().double().reshape(())
        weight = torch.full_like(loss, samples) if answers is None else answers[1].double()
        # do not read the numbers here, because that would make a GPU wait; `where`, because a mean
        # over no label is NaN, which the weight 0 alone would not remove
        total = loss if self._is_sum else loss * weight
        return torch.stack([torch.where(weight > 0, total, torch.zeros_like(loss)), weight])

    @property
    def sums(self) -> torch.Tensor:
        """The loss, its weight and the sums of each metric, on the CPU."""
        return torch.cat([sums.sums().cpu() for sums in (self._losses, *self._metrics)])


def evaluate_sums(metrics: Metrics, sums: torch.Tensor) -> EvaluationResult:
    """Return the mean loss and the metrics from the sums of a Tally, which may be added up over
    processes.
    """
    loss, weight, *rest = sums.tolist()
    values: dict[str, float | None] = {}
    for metric in metrics:
        values[metric.name] = metric.compute(rest[: metric.sum_count])
        rest = rest[metric.sum_count :]
    # no sample, or no label that counts: there is no mean
    return EvaluationResult(loss / weight if weight else None, values)


@contextlib.contextmanager
def enter_evaluation(model: nn.Module) -> Iterator[None]:
    """Put a model, which may be divided into blocks, into evaluation mode inside the context,
    without gradients.
    """
    blocks = get_blocks(model)
    # a model in blocks does not contain the user's own, nor its pieces
    models = [model] if blocks is None else [model, blocks.model, *blocks.pieces]
    with torch.no_grad(), restore_modes(*models):
        for one in models:
            one.eval()
        yield


def compute_outputs(model: nn.Module, x: Any) -> list[Any]:
    """Return the output of every block that has a loss of its own, then that of the model."""
    blocks = get_blocks(model)
    return [call_model(model, x)] if blocks is None else blocks.compute_outputs(x)


def try_metrics(setup: RunSetup) -> None:
    """Run the metrics on a batch of the test set before anything is written. Raise `BadInput` if
    one fails.
    """
    # the library's accuracy cannot fail: it is None for labels that have none
    metrics = [metric for metric in setup.metrics if metric not in DEFAULT]
    if not metrics or setup.device.type == "meta":
        return
    # the numbers of a run must not depend on whether it has metrics
    with fork_random(setup.device), torch.no_grad(), restore_all(setup.model):
        setup.model.eval()
        # a loop, since a data source may have no test set
        for x, labels in itertools.islice(load_test_batches(setup), 1):
            scores = take_scores(setup.loss, call_model(setup.model, x))
            y = get_labels(labels)
            for metric in metrics:
                try:
                    metric.make_sums().add(scores, y, count_samples(x))
                except BadInput:
                    raise
                # the user's metric may raise anything
                except Exception as error:
                    kinds = f"{describe_output(scores)} and labels {describe_tensors(y)}"
                    raise BadInput(
                        f"metrics: {metric.name}: fails on {kinds}: {summarize(error)}"
                    ) from error


def evaluate(setup: RunSetup) -> list[EvaluationResult]:
    """Evaluate on the test set, or its configured subset."""
    return evaluate_batches(setup.model, setup.loss, load_test_batches(setup), setup.metrics)


def evaluate_batches(
    model: nn.Module, loss: Loss, batches: Iterator[Any], metrics: Metrics
) -> list[EvaluationResult]:
    """Evaluate a model on batches (x, y) on its device.

    Return the result of every block that has a loss of its own, then that of the model's output.
    """
    tallies: list[Tally] = []
    with enter_evaluation(model):
        for x, y in batches:
            outputs = compute_outputs(model, x)
            # the first outputs tell how many losses there are
            tallies = tallies or [Tally(loss, metrics) for _ in outputs]
            for tally, output in zip(tallies, outputs):
                tally.add(output, y, count_samples(x))
    # without a batch the result is None for each value
    return [evaluate_sums(metrics, tally.sums) for tally in tallies or [Tally(loss, metrics)]]
