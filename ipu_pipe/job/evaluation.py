"""The test set: loss and metrics of the weights as they are."""

from __future__ import annotations

from typing import Any, Dict, Iterator, List, Optional, Sequence, Tuple

import torch

from ipu_pipe.job.metrics import DEFAULT, Counting, Metric, count_right, is_cross_entropy
from ipu_pipe.job.position import Measured
from ipu_pipe.job.record import Setup
from ipu_pipe.local.blocks import SumOfLosses, get_blocks
from ipu_pipe.model.asking import labels_of
from ipu_pipe.model.calling import call
from ipu_pipe.model.nests import few, sample_count
from ipu_pipe.model.outputs import plain, scores
from ipu_pipe.model.precision import plain_loss
from ipu_pipe.model.probe import Loss
from ipu_pipe.model.restoring import modes_restored

TEST_BATCH = 128  # samples of one evaluation forward; BatchNorm does not see it, it evaluates by running statistics


def test_batches(setup: Setup) -> Iterator[Tuple[Any, Any]]:
    """The test set on the run's device, up to `evaluate.subset` samples."""
    subset, seen = setup.config.evaluate.subset, 0
    for batch in setup.data.test_batches(TEST_BATCH):
        x, y = setup.ready(batch)
        if subset:
            x, y = few(x, subset - seen), few(y, subset - seen)
        seen += sample_count(x)
        yield x, y
        if subset and seen >= subset:
            return


class Tally:
    """Sums over batches. Cross-entropy's mean is over the labels that it counts, whatever the batches; another loss's over
    the samples."""

    def __init__(self, loss: Loss, metrics: Sequence[Metric] = DEFAULT, sums: Optional[torch.Tensor] = None) -> None:
        """`sums`: of a tally that is done: loss, its weight, then those of each metric."""
        self._loss = loss.each if isinstance(loss, SumOfLosses) else loss
        self._metrics, self._done = metrics, sums
        self._losses = Counting(self._of_batch, 2)
        self._counting = [metric.begin() for metric in metrics]

    @classmethod
    def of(cls, setup: Setup, sums: Optional[torch.Tensor] = None) -> Tally:
        """Of a run's loss and metrics."""
        return cls(setup.loss, setup.metrics, sums)

    def add(self, output: Any, y: Any, samples: int) -> None:
        """A batch's outputs and labels."""
        taken = scores(self._loss, output)
        self._losses.add(output, y, samples)
        for counting in self._counting:
            counting.add(taken, labels_of(y), samples)

    def _of_batch(self, output: Any, y: Any, samples: int) -> torch.Tensor:
        """The loss times its weight, the weight."""
        answers = count_right(scores(self._loss, output), y) if is_cross_entropy(plain_loss(plain(self._loss))) else None
        loss = self._loss(output, y).detach().double().reshape(())
        weight = torch.full_like(loss, samples) if answers is None else answers[1].double()
        # all stays on its device: to read a batch's numbers would hold a GPU up
        return torch.stack([torch.where(weight > 0, loss * weight, torch.zeros_like(loss)), weight])

    @property
    def sums(self) -> torch.Tensor:
        """All of them."""
        if self._done is not None:
            return self._done
        return torch.cat([each.sums().cpu() for each in (self._losses, *self._counting)])

    @property
    def measured(self) -> Measured:
        """Mean loss and metrics; None where there is none."""
        loss, weight, *others = self.sums.tolist()
        found: Dict[str, Optional[float]] = {}
        for metric in self._metrics:
            found[metric.name], others = metric.value(others[: metric.width]), others[metric.width :]
        return Measured(loss / weight if weight else None, found)


def evaluate(setup: Setup) -> List[Measured]:
    """Mean loss and metrics over the test set, or its configured subset, None where there is none: of the model's output, and
    before it of every block's that has a loss of its own."""
    model, blocks = setup.model, get_blocks(setup.model)
    tallies: List[Tally] = []
    with torch.no_grad(), modes_restored(model):
        model.eval()
        for x, y in test_batches(setup):
            outputs = blocks.outputs(x) if blocks is not None else [call(model, x)]
            tallies = tallies or [Tally.of(setup) for _ in outputs]
            for tally, output in zip(tallies, outputs):
                tally.add(output, y, sample_count(x))
    return [tally.measured for tally in tallies or [Tally.of(setup)]]
