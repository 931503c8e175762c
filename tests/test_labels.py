"""Test that wrong labels are reported before a GPU's kernel meets them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ipu_pipe.config.load import configure
from ipu_pipe.data import TensorData
from ipu_pipe.errors import BadInput
from ipu_pipe.model.loss import LabelRange, find_label_range
from ipu_pipe.pipeline.build import set_up
from ipu_pipe.run.build import build

OUTPUT, LABELS = torch.zeros(3, 5), torch.zeros(3, dtype=torch.int64)


@pytest.mark.parametrize(
    "loss, output, y, expected",
    [
        (nn.functional.cross_entropy, OUTPUT, LABELS, LabelRange(5)),
        (nn.CrossEntropyLoss(ignore_index=7), OUTPUT, LABELS, LabelRange(5, 7)),
        (
            nn.CrossEntropyLoss(),
            torch.zeros(3, 5, 2),
            torch.zeros(3, 2, dtype=torch.int64),
            LabelRange(5),
        ),
        (nn.functional.cross_entropy, OUTPUT, torch.zeros(3, 5), None),  # shares of each class
        (nn.functional.mse_loss, OUTPUT, LABELS, None),
    ],
)
def test_cross_entropy_allows_the_models_classes(
    loss: Any, output: Any, y: Any, expected: Any
) -> None:
    assert find_label_range(loss, output, y) == expected


def make_wrong_label_data(wrong: int, at: int) -> TensorData:
    y = torch.zeros(8, dtype=torch.int64)
    y[at] = wrong
    return TensorData((torch.randn(8, 4), y), (torch.randn(2, 4), y[:2]))


def configure_one_step() -> Any:
    unused = "tests.test_labels:unused"
    return configure(model={"entry": unused}, data={"name": unused}, micro_batch_size=8, steps=1)


@pytest.mark.parametrize("wrong", [3, -1])
def test_a_wrong_label_of_the_first_microbatch_is_reported_with_the_classes(wrong: int) -> None:
    with pytest.raises(
        BadInput, match=f"data: label {wrong}: the model gives 3 classes: must be from 0 to 2"
    ):
        build(configure_one_step(), nn.Linear(4, 3), make_wrong_label_data(wrong, 5))
    build(
        configure_one_step(), nn.Linear(4, 3), make_wrong_label_data(-100, 5)
    )  # which the loss leaves out


def test_labels_of_later_microbatches_are_checked_on_the_host() -> None:
    job = build(configure_one_step(), nn.Linear(4, 3), make_wrong_label_data(2, 5))
    job.device = torch.device("cuda")  # which this test must not need
    with pytest.raises(BadInput, match="data: label 9: the model gives 3 classes"):
        job.move_to_device(torch.zeros(1, 4), torch.tensor([9]))
    setup = set_up(configure_one_step(), nn.Linear(4, 3), make_wrong_label_data(2, 5))
    assert setup.label_range is None  # nothing is known of the model yet


def test_the_check_synchronizes_with_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CUDA kernel reports an error only when the host synchronizes."""

    class Faulty(torch.Tensor):
        device = torch.device("cuda", 0)  # type: ignore[assignment]

    def fail() -> None:
        raise RuntimeError("device-side assert triggered")

    monkeypatch.setattr(torch.cuda, "synchronize", fail)

    def loss(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return output.mean().as_subclass(Faulty)

    with pytest.raises(
        BadInput, match="model: it fails on a microbatch .* device-side assert triggered"
    ):
        build(configure_one_step(), nn.Linear(4, 3), make_wrong_label_data(2, 5), loss)
