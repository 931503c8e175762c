"""Test objects passed from Python: files record them, checks use them, models keep their dtype."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn

import ipu_pipe
from ipu_pipe.config.load import load_config
from ipu_pipe.config.sections import GIVEN
from ipu_pipe.errors import BadInput
from ipu_pipe.job.overrides import describe
from ipu_pipe.run.build import build
from ipu_pipe.run.train import train
from tests.support.processes import run_in_group
from tests.support.runs import DIGITS, list_faults, needs_processes, read_summary

SHORT = [
    "steps=2",
    "log.tensorboard=false",
    "evaluate.subset=32",
    "gradient_accumulation=4",
    "backend.threads=1",
]
SGD = functools.partial(torch.optim.SGD, lr=0.25, momentum=0.5)


def make_small_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10))


def load_two_stage_config(*sets: str) -> Any:
    return load_config(DIGITS, [*SHORT, "stages=2", *sets])


def train_two_stages(folder: Path, *sets: str, **objects: Any) -> Any:
    return train(load_two_stage_config(*sets), folder, quiet=True, **objects)


class Averaging(torch.optim.SGD):
    """An optimizer that must be switched before an evaluation, as schedule-free ones."""

    def eval(self) -> None: ...

    def train(self) -> None: ...


class Counting(torch.optim.SGD):
    """An optimizer that keeps a number in its groups, as Prodigy."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1


def test_a_partial_is_described_by_all_that_it_binds() -> None:
    """Story: runs with partial(f, 0.1) and partial(f, 0.9) were the same to a resume."""
    loss = functools.partial(nn.CrossEntropyLoss(label_smoothing=0.5), 0.1, reduction="sum")
    described = describe(loss)
    assert described.name == "torch.nn.modules.loss.CrossEntropyLoss"
    settings = described.settings
    assert settings["argument 0"] == 0.1 and settings["label_smoothing"] == 0.5
    assert settings["reduction"] == "sum"


class Stretched(torch.optim.SGD):
    """An optimizer whose factor is no setting of a group."""

    def __init__(self, params: Any, lr: float, factor: float = 1.0) -> None:
        super().__init__(params, lr)
        self.factor = factor

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.data.sub_(p.grad, alpha=group["lr"] * self.factor)


def test_an_optimizer_that_was_made_keeps_its_hooks_and_attributes(tmp_path: Path) -> None:
    """Story: it was made again from its class and its groups' settings."""
    ends = []
    for factor in (1.0, 0.5):
        model, calls = make_small_model(), []
        optimizer = Stretched(model.parameters(), 0.1 / factor, factor)
        optimizer.register_step_post_hook(lambda *_, calls=calls: calls.append(1))
        train_two_stages(tmp_path / str(factor), model=model, optimizer=optimizer)
        assert calls
        ends.append([*model.parameters()])
    torch.testing.assert_close(*ends)


class Around(torch.optim.Optimizer):
    """An optimizer that steps another one, as Lookahead."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__([{"params": group["params"]} for group in inner.param_groups], {})
        self.inner = inner

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()


def test_an_optimizer_around_another_one_is_refused(tmp_path: Path) -> None:
    """Story: the inner one steps the groups of the whole model, with rates of its own."""
    model = make_small_model()
    optimizer = Around(SGD(model.parameters()))
    refused = "^optimizer: Around: inner: is an optimizer of its own"
    with pytest.raises(BadInput, match=refused):
        train_two_stages(tmp_path, model=model, optimizer=optimizer)
    pipe = ipu_pipe.Pipeline(
        model, nn.functional.cross_entropy, optimizer, "gpipe", stages=2, microbatches=1
    )
    with pytest.raises(BadInput, match=refused):
        pipe.step(torch.randn(4, 1, 8, 8), torch.zeros(4, dtype=torch.int64))


def test_an_optimizer_that_must_be_switched_is_refused(tmp_path: Path) -> None:
    """Story: evaluations of a schedule-free optimizer measured the weights that it trains."""
    optimizer = functools.partial(Averaging, lr=0.1)
    with pytest.raises(BadInput, match="^optimizer: Averaging: evaluates other weights than it"):
        train_two_stages(tmp_path / "run", optimizer=optimizer)
    assert not (tmp_path / "run").exists()


def test_a_run_whose_optimizer_keeps_numbers_in_its_groups_is_not_resumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Story: a resumed run began with the numbers of the start, without a word."""
    optimizer = functools.partial(Counting, lr=0.1)
    train(load_two_stage_config("checkpoint.every=1"), tmp_path, optimizer=optimizer)
    assert capsys.readouterr().out.count("keeps k outside of its parameters' entries") == 1
    longer = ["checkpoint.every=1", "steps=4"]
    with pytest.raises(BadInput, match="optimizer: keeps k outside of its parameters' entries"):
        train_two_stages(tmp_path, *longer, optimizer=optimizer, resume=True)


def train_counting_on_the_last_stage(rank: int, folder: Path) -> None:
    counting = "{match: ['3.*'], name: 'tests.test_given:Counting', lr: 0.1}"
    groups = f"optimizer={{groups: [{counting}, {{name: sgd, lr: 0.1}}]}}"
    train_two_stages(folder / "run", "backend.name=distributed", groups, model=make_small_model())


@pytest.mark.slow
@needs_processes
def test_a_checkpoint_knows_what_the_optimizer_of_another_rank_keeps(tmp_path: Path) -> None:
    """Story: rank 0 wrote only what the optimizer of its own stages had written into its groups."""
    run_in_group(2, train_counting_on_the_last_stage, tmp_path)
    (manifest, *_) = tmp_path.glob("run/checkpoints/*/manifest.json")
    assert json.loads(manifest.read_text())["written_settings"] == ["k"]


def test_files_record_objects_from_python_and_resuming_compares_them(tmp_path: Path) -> None:
    """Story: config.yaml named an optimizer and a loss that were not used; summary.json did not."""
    objects = {
        "model": make_small_model(),
        "loss": nn.CrossEntropyLoss(label_smoothing=0.125),
        "optimizer": SGD,
    }

    def train_here(**changes: Any) -> Any:
        return train_two_stages(tmp_path, **{**objects, **changes})

    report = train_here()
    saved = yaml.safe_load((tmp_path / "config.yaml").read_text())
    names = saved["model"]["entry"], saved["loss"], saved["optimizer"]["name"]
    assert names == (GIVEN, GIVEN, GIVEN) and saved["optimizer"]["lr"] is None
    given = saved["given"]
    assert given["optimizer"]["name"] == "torch.optim.sgd.SGD" and given["data"] is None
    assert {"lr": 0.25, "momentum": 0.5}.items() <= given["optimizer"]["settings"].items()
    assert given["model"]["name"].endswith("Sequential")
    assert given["loss"]["name"].endswith("CrossEntropyLoss")
    assert read_summary(tmp_path) == report and report["optimizer"] == given["optimizer"]
    assert report["loss"]["name"] == given["loss"]["name"]
    assert report["model"]["entry"] == given["model"]["name"]

    (tmp_path / "summary.json").unlink()
    assert train_here(resume=True)["optimizer"] == report["optimizer"]
    (tmp_path / "summary.json").unlink()
    for changes, message in (
        ({"optimizer": functools.partial(SGD, lr=0.5)}, r"optimizer\.settings\.lr: saved with 0\.25, this run has 0\.5"),
        ({"loss": nn.CrossEntropyLoss()}, r"settings\.label_smoothing: 0\.125 -> 0\.0"),
    ):  # fmt: skip
        with pytest.raises(BadInput, match=message):
            train_here(resume=True, **changes)
    faults = list_faults(train_here, resume=True, **dict.fromkeys(objects))
    keys = [fault.partition(":")[0] for fault in faults]
    assert keys == ["given.model", "given.loss", "given.optimizer"]


def test_a_config_of_a_run_with_objects_from_python_is_refused_without_them(tmp_path: Path) -> None:
    file = tmp_path / "run" / "config.yaml"
    train_two_stages(file.parent, optimizer=SGD)
    config = load_config(file)
    for attempt in (lambda: build(config), lambda: train(config, tmp_path / "b")):
        (fault,) = list_faults(attempt)
        assert fault.startswith("given.optimizer: torch.optim.sgd")
    assert not (tmp_path / "b").exists()
    first, again = (build(one, optimizer=SGD) for one in (load_two_stage_config(), config))
    assert first.config == again.config
    with pytest.raises(BadInput, match="optimizer.name.*without given.optimizer"):
        load_config(file, ["given=null"])


def test_the_configs_own_optimizer_is_in_the_summary(tmp_path: Path) -> None:
    report = train_two_stages(tmp_path, "optimizer={name: adam, lr: 0.01, momentum: null}")
    assert report["optimizer"]["name"] == "torch.optim.adam.Adam"
    assert report["optimizer"]["settings"]["lr"] == 0.01
    assert report["loss"] == {"name": "torch.nn.functional.cross_entropy", "settings": {}}
    assert load_config(tmp_path / "config.yaml").given is None


def test_rules_check_the_optimizer_from_python() -> None:
    """Story: spectrain was refused for the config's SGD, although SGD with momentum was passed."""

    def make_optimizer_by_halves(groups: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([groups[0], {**groups[1], "nesterov": True}], lr=0.1, momentum=0.9)

    spectrain = load_two_stage_config("method=spectrain", "optimizer.momentum=0")
    build(spectrain, optimizer=SGD)
    spikes = ["method=pipedream", "method_args={spike_compensation: {}}"]
    compensated = load_two_stage_config(*spikes, "optimizer={name: adam, momentum: null}")
    build(compensated, optimizer=SGD)
    for config, optimizer, message in (
        (spectrain, None, "method: optimizer.momentum: 0: must be above 0"),
        (spectrain, functools.partial(torch.optim.SGD, lr=0.1), "momentum: 0"),
        # of the second stage alone
        (compensated, make_optimizer_by_halves, "optimizer.nesterov"),
        (compensated, None, "which adam does not have"),
    ):
        with pytest.raises(BadInput, match=message):
            build(config, optimizer=optimizer)
