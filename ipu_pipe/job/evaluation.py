"""Evaluation: loss and metrics over the test set, of the weights as they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import torch

from ipu_pipe.job.metrics import DEFAULT, Counting, Metric, count_right, is_cross_entropy
from ipu_pipe.job.record import Setup
from ipu_pipe.local.blocks import SumOfLosses, get_blocks
from ipu_pipe.model.batch import call_model, count_samples, take_samples
from ipu_pipe.model.loss import Loss, get_labels, get_plain_loss, take_scores
from ipu_pipe.model.precision import get_given_loss
from ipu_pipe.model.restoring import modes_restored

TEST_BATCH = 128  # samples of one forward; BatchNorm does not see it, it evaluates by running statistics


class EvaluationResult(NamedTuple):
    """The result of an evaluation: test loss, and metrics by name; None where there is none."""

    loss: Optional[float] = None
    metrics: Dict[str, Optional[float]] = {}

    @property
    def accuracy(self) -> Optional[float]:
        """The metric of that name; None if it was not asked for."""
        return self.metrics.get("accuracy")

    def to_record(self, prefix: str = "test_") -> Dict[str, Optional[float]]:
        """Return the values by name, as files have them: loss and accuracy first, even if they were not asked for."""
        values = {"loss": self.loss, "accuracy": self.accuracy, **self.metrics}
        return {f"{prefix}{name}": value for name, value in values.items()}


GREATER = ("accuracy", "top", "r2")  # beginnings of metrics of which more is better


def is_better(name: str, value: float, other: float) -> bool:
    """Return whether a metric's value is better than another; `name` may begin with test_ or validation_."""
    return value > other if name.partition("_")[2].startswith(GREATER) else value < other


@dataclass
class Position:
    """How far a run has come: what a checkpoint must hold besides tensors. Times are in seconds of training alone."""

    update: int = 0
    epoch_loss: float = 0.0  # sum over the epoch's updates so far, for the mean
    epoch_updates: int = 0
    seconds: float = 0.0
    timed_updates: int = 0
    best_name: str = "test_loss"  # of the figure by which an evaluation is the best
    best_value: Optional[float] = None
    best_step: Optional[int] = None
    initial: EvaluationResult = EvaluationResult()
    plateau: Optional[Dict[str, Any]] = None  # of a learning rate that follows evaluations

    def add_update(self, loss: float, begins_epoch: bool) -> None:
        """Count one more update with its mean training loss."""
        if begins_epoch:
            self.epoch_loss, self.epoch_updates = 0.0, 0
        self.epoch_loss, self.epoch_updates = self.epoch_loss + loss, self.epoch_updates + 1

    def add_evaluation(self, name: str, value: Optional[float]) -> None:
        """Note an evaluation made now as the best one if its figure `name` is; the one before training is never the best."""
        if name != self.best_name:  # the run was resumed with another
            self.best_name, self.best_value, self.best_step = name, None, None
        if value is not None and self.update and (self.best_value is None or is_better(name, value, self.best_value)):
            self.best_value, self.best_step = value, self.update

    @property
    def best(self) -> Optional[Dict[str, Any]]:
        """The step with the best figure, for the summary."""
        return None if self.best_step is None else {"step": self.best_step, self.best_name: self.best_value}


def collect_by_block(evaluations: Sequence[EvaluationResult], split: str = "test") -> Dict[str, List[Optional[float]]]:
    """Return the evaluations of blocks as one list per name."""
    records = [one.to_record(f"block_{split}_") for one in evaluations]
    return {name: [record[name] for record in records] for name in records[0]}


def load_test_batches(
    setup: Setup, split: str = "test", shard: int = 0, shards: int = 1
) -> Iterator[Tuple[Any, Any]]:
    """Yield the test set, or the validation set, in batches on the run's device, up to `evaluate.subset` samples; of several
    shards the batches with `number % shards == shard`. Data with `test_shard(batch_size, shard, shards)` reads no others."""
    subset, seen = setup.config.evaluate.subset, 0
    data: Any = setup.data if split == "test" else setup.validation
    read_shard = getattr(data, "test_shard", None)
    if shards > 1 and read_shard is not None and not subset:
        yield from map(setup.prepare_batch, read_shard(TEST_BATCH, shard, shards))
        return
    for number, batch in enumerate(data.test_batches(TEST_BATCH)):
        x, y = setup.prepare_batch(batch)
        if subset:
            x, y = take_samples(x, subset - seen), take_samples(y, subset - seen)
        seen += count_samples(x)
        if number % shards == shard:
            yield x, y
        if subset and seen >= subset:
            return


class Tally:
    """Sums over test batches. The mean of cross-entropy is over the labels that it counts, of another loss over the samples."""

    def __init__(self, loss: Loss, metrics: Sequence[Metric] = DEFAULT, sums: Optional[torch.Tensor] = None) -> None:
        """`sums`: of a tally that is complete: loss, its weight, then those of each metric."""
        self._loss = loss.loss if isinstance(loss, SumOfLosses) else loss
        self._counts_labels = is_cross_entropy(get_given_loss(get_plain_loss(self._loss)))
        self._metrics, self._complete = metrics, sums
        self._losses = Counting(self._sum_loss, 2)
        self._counting = [metric.begin() for metric in metrics]

    @classmethod
    def of(cls, setup: Setup, sums: Optional[torch.Tensor] = None) -> Tally:
        """Return a tally of a run's loss and metrics."""
        return cls(setup.loss, setup.metrics, sums)

    def add(self, output: Any, y: Any, samples: int) -> None:
        """Add a batch's outputs and labels."""
        taken = take_scores(self._loss, output)
        self._losses.add(output, y, samples)
        for counting in self._counting:
            counting.add(taken, get_labels(y), samples)

    def _sum_loss(self, output: Any, y: Any, samples: int) -> torch.Tensor:
        """Return the loss times its weight, and the weight  # (2,)"""
        answers = count_right(take_scores(self._loss, output), y) if self._counts_labels else None
        loss = self._loss(output, y).detach().double().reshape(())
        weight = torch.full_like(loss, samples) if answers is None else answers[1].double()
        # all stays on its device: reading a batch's numbers would make a GPU wait
        return torch.stack([torch.where(weight > 0, loss * weight, torch.zeros_like(loss)), weight])

    @property
    def sums(self) -> torch.Tensor:
        """The sums of the loss and of all metrics, on the CPU."""
        if self._complete is not None:
            return self._complete
        return torch.cat([counting.sums().cpu() for counting in (self._losses, *self._counting)])

    @property
    def evaluation(self) -> EvaluationResult:
        """The mean loss and the metrics; None where there is none."""
        loss, weight, *sums = self.sums.tolist()
        metrics: Dict[str, Optional[float]] = {}
        for metric in self._metrics:
            metrics[metric.name], sums = metric.value(sums[: metric.width]), sums[metric.width :]
        return EvaluationResult(loss / weight if weight else None, metrics)


def evaluate(setup: Setup, split: str = "test") -> List[EvaluationResult]:
    """Evaluate on the test or validation set, or its configured subset.

    Return the result of every block that has a loss of its own, then that of the model's output.
    """
    model, blocks = setup.model, get_blocks(setup.model)
    tallies: List[Tally] = []
    with torch.no_grad(), modes_restored(model):
        model.eval()
        for x, y in load_test_batches(setup, split):
            outputs = blocks.outputs(x) if blocks is not None else [call_model(model, x)]
            tallies = tallies or [Tally.of(setup) for _ in outputs]
            for tally, output in zip(tallies, outputs):
                tally.add(output, y, count_samples(x))
    return [tally.evaluation for tally in tallies or [Tally.of(setup)]]
