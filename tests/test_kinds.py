"""Test arguments of a wrong type from Python, and wrong labels: one line names each, and nothing is written."""

from __future__ import annotations

import copy
import functools
import re
from pathlib import Path
from typing import Any, Dict, List

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ipu_pipe
from ipu_pipe.data import TensorData
from ipu_pipe.errors import BadInput
from ipu_pipe.model.loss import LabelRange, find_label_range
from ipu_pipe.run.build import build
from ipu_pipe.run.planning import build_for_planning
from ipu_pipe.run.setup import set_up
from tests.support.models import Composed
from tests.support.runs import list_faults
from tests.test_train import make_short_config

X, Y = torch.randn(32, 8), torch.arange(32) % 4
SET = TensorDataset(X, Y)
SHORT = {"micro_batch_size": 8, "steps": 2, "log": {"tensorboard": False}}


def make_weighted_loss(weight: nn.Parameter) -> nn.Module:
    """Return a loss with a parameter."""

    def compute(module: Any, output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(output * module.weight.sum(), y)

    return Composed(compute, weight=weight)


class Misnamed(ipu_pipe.Callback):
    def on_epoch_end(self, now: ipu_pipe.Moment) -> None:
        pass


class MisnamedStopping(ipu_pipe.EarlyStopping, Misnamed):
    pass


def make_two_stage_model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), ipu_pipe.begin_stage(nn.Linear(8, 4)))


def make_loaders() -> Any:
    return ipu_pipe.from_loader(DataLoader(SET, 8), DataLoader(SET, 32))


def divide_by_zero(*arguments: Any) -> Any:
    return 1 / 0


WRONG: Dict[
    str, Dict[str, Any]
] = {  # story: most of these ended in an AttributeError or a TypeError of ours
    "config: a dict: must be the result of ipu_pipe.configure": {"config": {}},
    "model: the class Linear: must be a torch.nn.Module": {"model": nn.Linear},
    "model: missing: must be given": {"model": None},
    "data: a DataLoader: must be a DataSource": {"data": DataLoader(SET, 8)},
    "loss: 3: must be a function of outputs and labels": {"loss": 3},
    "loss: Composed: weight: no optimizer would train": {
        "loss": make_weighted_loss(nn.Parameter(torch.ones(1)))
    },
    r"loss: it fails on the model's output, a tensor of shape \(8, 4\) and labels \(8,\), .*: Zero": {
        "loss": divide_by_zero
    },
    "model.output: it fails on the model's output, a tensor of shape": {
        "output": lambda output: output.logits
    },
    "model.output: logits: the model returns a tensor .* which has no parts: leave it out": {
        "output": "logits"
    },
    "output: 1.5: must be a field's name": {"output": 1.5},
    "model: it fails on a microbatch .* which loss: model calls with the labels too: TypeError": {
        "loss": "model"
    },
    "optimizer: SGD: .* unexpected keyword argument 'lrr'": {
        "optimizer": functools.partial(torch.optim.SGD, lrr=1)
    },
    "lr_scheduler: a StepLR: must be a function of an optimizer": {
        "lr_scheduler": torch.optim.lr_scheduler.StepLR(
            torch.optim.SGD(make_two_stage_model().parameters(), lr=1), 3
        )
    },
    "metrics: a str: must be a list": {"metrics": "accuracy"},  # story: a line a letter
    # story: reported only by the first evaluation, when the folder existed already
    r"metrics: mse: outputs \(32, 4\) and labels \(32,\): must be tensors of one shape": {
        "metrics": ["mse"]
    },
    r"metrics: divide_by_zero: fails on a tensor of shape \(32, 4\) and labels .*: Zero": {
        "metrics": [divide_by_zero]
    },
    "metrics: f: returned None: must return one number": {"metrics": {"f": lambda output, y: None}},
    "callbacks: a Misnamed: must be a list": {"callbacks": Misnamed()},
    "callbacks: Misnamed.on_epoch_end: ": {"callbacks": [Misnamed()]},
    "overwrite: True: cannot be combined with resume": {"overwrite": True, "resume": True},
    "--resume-from: 3: .* contains no run": {"resume_from": 3},
    "--out: .*must name a folder": {"out": ""},
    "--out: 3: .*must name a folder": {"out": 3},
}


@pytest.mark.parametrize("line", list(WRONG))
def test_arguments_of_a_wrong_type_are_reported_before_anything_is_written(
    line: str, tmp_path: Path
) -> None:
    usual = {
        "config": ipu_pipe.configure(**SHORT),
        "model": make_two_stage_model(),
        "data": make_loaders(),
        "loss": nn.functional.cross_entropy,
    }
    given = {"out": tmp_path / "run", **usual, **WRONG[line]}
    (fault,) = list_faults(ipu_pipe.train, quiet=True, **given)
    assert re.match(line, fault) and not (tmp_path / "run").exists()


def test_early_stopping_reports_each_wrong_argument() -> None:
    faults = list_faults(ipu_pipe.EarlyStopping, 3, mode="up", patience="x", min_delta=-1.0)
    keys = ("metric: 3", "mode: up", "patience: x", "min_delta: -1.0")
    assert [fault.rpartition(": ")[0] for fault in faults] == [
        f"EarlyStopping: {key}" for key in keys
    ]


def test_a_dry_run_reports_callbacks_that_cannot_be_built() -> None:
    """Story: only the run itself reported them."""
    ends = "tests.callbacks_of_runs:StoppingCallback"
    entries = f"[{{entry: '{ends}', args: {{afte: 3}}}}, 'tests.callbacks_of_runs:FailingCallback', 'tests.nothing:X']"
    faults = list_faults(build_for_planning, make_short_config(f"callbacks={entries}"))
    keys = [fault.partition(": ")[0] for fault in faults]
    (fault,) = list_faults(
        build_for_planning, make_short_config("callbacks=['tests.test_kinds:MisnamedStopping']")
    )
    assert "MisnamedStopping.on_epoch_end: unknown method" in fault
    assert keys == [f"callbacks.{ends}.afte", f"callbacks.{ends}.after", "callbacks"]


@pytest.mark.parametrize("line, arguments", [
    ("data: train: 3: must be a DataLoader, or another iterable of batches", (3,)),
    ("data: train: a Tensor: must be a DataLoader", (X,)),
    ("data: train: a TensorDataset: gives samples, not batches: must be a DataLoader of it", (SET,)),
    ("data: test: a str: must be a DataLoader", ([], "digits")),
    ("data: validation: 5: must be a DataLoader", ([], [], 0, None, (), 5)),
    ("data: labels: 3: must be their name", ([], None, 0, 3)),
])  # fmt: skip
def test_a_loader_that_gives_no_batches_is_refused(line: str, arguments: Any) -> None:
    """Story: the fault for a TensorDataset took the features of a sample for a batch."""
    (fault,) = list_faults(ipu_pipe.from_loader, *arguments)
    assert fault.startswith(line)


def test_a_loss_may_have_weights_of_the_model_and_frozen_weights(tmp_path: Path) -> None:
    net = make_two_stage_model()
    how = {"model": net, "data": make_loaders(), "quiet": True, "overwrite": True}
    for weight in (net[0].bias, nn.Parameter(torch.ones(1), requires_grad=False)):
        loss = make_weighted_loss(weight)
        report = ipu_pipe.train(ipu_pipe.configure(**SHORT), tmp_path / "run", loss=loss, **how)
        assert report["steps"] == 2


def test_the_trial_of_metrics_uses_test_data_and_draws_no_random_number(tmp_path: Path) -> None:
    """The trial is one test batch in evaluation mode; the numbers of the run do not change."""
    calls = []

    def record_call(output: torch.Tensor, y: torch.Tensor) -> float:
        calls.append((len(output), net.training))
        return 0.0

    net = make_two_stage_model()
    start = copy.deepcopy(net.state_dict())
    finals = []
    for metrics in ([], [record_call]):
        torch.manual_seed(3)
        net.load_state_dict(start)
        train_data, test_data = (DataLoader(SET, size, shuffle=True) for size in (8, 20))
        how = {
            "model": net,
            "data": ipu_pipe.from_loader(train_data, test_data),
            "quiet": True,
        }
        config = ipu_pipe.configure(**SHORT, metrics=[])
        report = ipu_pipe.train(config, tmp_path / str(len(metrics)), metrics=metrics, **how)
        finals.append(report["final"])
    plain, watched = finals
    assert all(plain[key] == watched[key] for key in ("train_loss", "test_loss"))
    assert calls == [(20, False), (20, False), (12, False), (20, False), (12, False)]


def test_metrics_get_labels_whatever_the_loss_takes_and_leave_the_model() -> None:
    def count_call(module: Any, x: torch.Tensor) -> torch.Tensor:
        module.calls = getattr(module, "calls", 0) + 1
        return x

    def loss(output: torch.Tensor, y: torch.Tensor, *, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(output, y)

    net = nn.Sequential(Composed(count_call), nn.Linear(8, 4))
    seen: List[int] = []
    metrics = {"labels": lambda output, y: seen.append(y.dim()) or 1.0}
    build(ipu_pipe.configure(**SHORT), metrics=metrics, model=net, data=make_loaders(), loss=loss)
    assert seen == [1] and not hasattr(net[0], "calls")


@pytest.mark.parametrize("words, arguments", [
    ("model: 3: must be a torch.nn.Module, or the folder", (3, X)),
    ("nowhere: no such folder or file", ("nowhere", X)),
    # story: a value for the whole batch was an IndexError
    ("data: a dict: must be a DataSource, a loader, or tensors of one length",
     (make_two_stage_model(), {"x": X, "scale": torch.tensor(2.0)})),
    ("data: inputs: is of type ndarray: must be a tensor", (make_two_stage_model(), X.numpy())),
])  # fmt: skip
def test_predict_reports_arguments_of_a_wrong_type(words: str, arguments: Any) -> None:
    (fault,) = list_faults(ipu_pipe.predict, *arguments)
    assert words in fault


KEYS = {
    "model.output=1.5": "model.output: 1.5: must be null, a field's name, an index, or module:function",
    "lr_schedule={name: torch.optim.lr_scheduler.StepLR, gamma: 0.5}": "lr_schedule.gamma: 0.5: ",
    "output=logits": "output: logits: unknown key, nearest is model.output",  # story: or given.output, which a run alone writes
    "early_stopping={restore_best: 1}": "early_stopping.restore_best: 1: must be a valid boolean",
    "metric=accuracy": "metric: accuracy: unknown key, nearest is metrics",  # story: early_stopping.metric
}


@pytest.mark.parametrize("key", list(KEYS))
def test_a_wrong_key_is_one_line(key: str) -> None:
    (fault,) = list_faults(make_short_config, key)
    assert f": {KEYS[key]}" in fault


# ---- labels: wrong ones are reported before a GPU's kernel meets them

OUTPUT, LABELS = torch.zeros(3, 5), torch.zeros(3, dtype=torch.int64)


@pytest.mark.parametrize("loss, output, y, expected", [
    (nn.functional.cross_entropy, OUTPUT, LABELS, LabelRange(5)),
    (nn.CrossEntropyLoss(ignore_index=7), torch.zeros(3, 5, 2), torch.zeros(3, 2, dtype=torch.int64), LabelRange(5, 7)),
    (nn.functional.cross_entropy, OUTPUT, torch.zeros(3, 5), None),  # shares of each class
    (nn.functional.mse_loss, OUTPUT, LABELS, None),
])  # fmt: skip
def test_cross_entropy_allows_the_models_classes(
    loss: Any, output: Any, y: Any, expected: Any
) -> None:
    assert find_label_range(loss, output, y) == expected


def describe_labels(wrong: int = 2) -> Any:
    """Return arguments of a run of three classes, whose first microbatch has this label."""
    y = torch.tensor([0, 0, 0, 0, 0, wrong, 0, 0])
    data = TensorData((torch.randn(8, 4), y), (torch.randn(2, 4), y[:2]))
    return ipu_pipe.configure(micro_batch_size=8, steps=1), nn.Linear(4, 3), data


def test_a_wrong_label_of_the_first_microbatch_is_reported_with_the_classes() -> None:
    for wrong in (3, -1):
        fault = f"data: label {wrong}: the model gives 3 classes: must be from 0 to 2"
        assert list_faults(build, *describe_labels(wrong)) == [fault]
    build(*describe_labels(-100))  # which the loss leaves out


def test_labels_of_later_microbatches_are_checked_on_the_host() -> None:
    job = build(*describe_labels())
    job.device = torch.device("cuda")  # which this test must not need
    with pytest.raises(BadInput, match="data: label 9: the model gives 3 classes"):
        job.move_to_device(torch.zeros(1, 4), torch.tensor([9]))
    setup = set_up(*describe_labels())
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
        build(*describe_labels(), loss)
