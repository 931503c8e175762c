"""The test set: loss and accuracy of the weights as they are."""

from __future__ import annotations

from typing import Any, Iterator, List, Optional, Tuple

import torch
from torch import nn

from ipu_pipe.job.position import Measured
from ipu_pipe.job.record import Setup
from ipu_pipe.local.blocks import SumOfLosses, blocks_of
from ipu_pipe.model.modes import modes_restored
from ipu_pipe.model.precision import plain_loss
from ipu_pipe.model.probe import Loss

TEST_BATCH = 128  # samples of one evaluation forward; BatchNorm does not see it, it evaluates by running statistics


def test_batches(setup: Setup) -> Iterator[Tuple[Any, Any]]:
    """The test set on the run's device, up to `evaluate.subset` samples."""
    subset, seen = setup.config.evaluate.subset, 0
    for x, y in setup.data.test_batches(TEST_BATCH):
        x, y = setup.to_device(x, y)
        if subset:
            x, y = x[: subset - seen], y[: subset - seen]
        seen += len(x)
        yield x, y
        if subset and seen >= subset:
            return


class Tally:
    """Sums over batches. Cross-entropy's mean is over the labels that it counts, whatever the batches; another loss's over
    the samples."""

    def __init__(self, loss: Loss, sums: Optional[torch.Tensor] = None) -> None:
        """`sums`: of a tally that is done: loss, its weight, right answers, counted labels, batches without them."""
        self.sums = torch.zeros(5, dtype=torch.float64) if sums is None else sums
        self._loss = loss.each if isinstance(loss, SumOfLosses) else loss

    def add(self, output: Any, y: Any, samples: int) -> None:
        """A batch's outputs and labels."""
        answers = right_answers(output, y)
        loss = self._loss(output, y).detach().double().reshape(())
        weight = torch.full_like(loss, samples)
        if answers is not None and _counts_labels(self._loss):
            weight = answers[1].double()
        known = torch.zeros(2).to(loss) if answers is None else answers.to(loss)
        without = torch.full_like(loss, answers is None)
        # all stays on its device: to read a batch's numbers would hold a GPU up
        weighed = torch.where(weight > 0, loss * weight, torch.zeros_like(loss))
        self.sums = self.sums.to(loss.device) + torch.stack([weighed, weight, known[0], known[1], without])

    @property
    def measured(self) -> Measured:
        """(mean loss, accuracy as a fraction); None where there is none."""
        loss, weight, right, counted, without = self.sums.tolist()
        accuracy: Optional[float] = right / counted if counted and not without else None
        return loss / weight if weight else None, accuracy


def _counts_labels(loss: Loss) -> bool:
    """Whether a loss is cross-entropy as a mean over all labels but -100."""
    loss = plain_loss(loss)
    if isinstance(loss, nn.CrossEntropyLoss):
        return loss.weight is None and loss.ignore_index == -100
    return loss is nn.functional.cross_entropy


def evaluate(setup: Setup) -> List[Measured]:
    """(mean loss, accuracy as a fraction) over the test set, or its configured subset, None where there is none: of the model's
    output, and before it of every block's that has a loss of its own."""
    model, blocks = setup.model, blocks_of(setup.model)
    tallies: List[Tally] = []
    with torch.no_grad(), modes_restored(model):
        model.eval()
        for x, y in test_batches(setup):
            outputs = blocks.outputs(x) if blocks is not None else [model(x)]
            tallies = tallies or [Tally(setup.loss) for _ in outputs]
            for tally, output in zip(tallies, outputs):
                tally.add(output, y, len(x))
    return [tally.measured for tally in tallies] or [(None, None)]


def right_answers(output: Any, y: Any) -> Optional[torch.Tensor]:
    """(right, counted): labels at which the greatest of the outputs lies, and labels that are not -100 (which cross-entropy
    leaves out). None unless outputs are (b, classes, ...) and labels whole numbers (b, ...)."""
    if not isinstance(output, torch.Tensor) or not isinstance(y, torch.Tensor) or y.is_floating_point():
        return None
    if output.dim() != y.dim() + 1 or output.shape[0] != y.shape[0] or output.shape[2:] != y.shape[1:]:
        return None
    return torch.stack([(output.detach().argmax(dim=1) == y).sum(), (y != -100).sum()])
