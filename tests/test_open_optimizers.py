"""Test optimizers as a class, an instance or a factory, and any torch.optim.lr_scheduler."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any, List

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import ipu_pipe
from ipu_pipe.config.compare import compare_deciding, select_deciding
from ipu_pipe.data.sources import TensorData
from ipu_pipe.errors import BadInput
from ipu_pipe.run.build import build
from ipu_pipe.update.rates import simulate_scheduler
from tests.support.runs import list_faults, read_column, read_summary

HOW = {
    "micro_batch_size": 4,
    "log": {"tensorboard": False, "every": 1},
    "evaluate": {"every": 0},
    "stages": ["2"],
}


def make_tanh_model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 2))


def make_labelled_data() -> TensorData:
    generator = torch.Generator().manual_seed(1)
    pair = torch.randn(32, 5, generator=generator), torch.randint(0, 2, (32,), generator=generator)
    return TensorData(pair, pair)


def train_with_optimizer(
    out: Path, net: nn.Module, steps: int = 6, **how: Any
) -> List[torch.Tensor]:
    """Train a model with the given optimizer and scheduler. Return a copy of its weights."""
    keys = how.pop("keys", {})
    arguments = {"data": make_labelled_data(), "model": net, "quiet": True, **how}
    ipu_pipe.train(ipu_pipe.configure(steps=steps, **HOW, **keys), out, **arguments)
    return [p.detach().clone() for p in net.parameters()]


def train_without_pipeline(
    net: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any = None, steps: int = 6
) -> List[torch.Tensor]:
    """Train as one does without this library. Return a copy of the weights."""
    source = make_labelled_data()
    for k in range(steps):
        x, y = source.train_batch(*divmod(k, 8), 4)
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return [p.detach().clone() for p in net.parameters()]


def are_weights_equal(ours: List[torch.Tensor], theirs: List[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs))


def make_fine_tuning_groups(net: nn.Sequential) -> List[Any]:
    """Return groups with settings of their own, one of them over both stages."""
    biases = [net[0].bias, net[2].bias]
    return [
        {"params": [net[0].weight, net[2].weight], "weight_decay": 0.1},
        {"params": biases, "lr": 0.002},
    ]


@pytest.mark.parametrize("form", ["groups", "class", "pair", "factory", "yaml"])
def test_every_form_trains_as_plain_pytorch_does(form: str, tmp_path: Path) -> None:
    net, plain_model = make_tanh_model(), make_tanh_model()
    args = {"alpha": 0.9, "momentum": 0.5}
    with_rate = {"lr": 0.01, **args}
    make = functools.partial(torch.optim.RMSprop, **with_rate)
    is_grouped = form == "groups"
    parts = make_fine_tuning_groups(plain_model) if is_grouped else plain_model.parameters()
    forms = {
        "groups": {"optimizer": make(make_fine_tuning_groups(net))},
        "class": {"optimizer": torch.optim.RMSprop, "optimizer_args": with_rate},
        "pair": {"optimizer": (torch.optim.RMSprop, with_rate)},
        "factory": {"optimizer": make},
        "yaml": {"keys": {"optimizer": {"name": "torch.optim.RMSprop", "lr": 0.01, "args": args}}},
    }
    trained = train_with_optimizer(tmp_path / "run", net, **forms[form])
    assert are_weights_equal(trained, train_without_pipeline(plain_model, make(parts)))
    report = read_summary(tmp_path / "run")["optimizer"]
    assert report["name"] == "torch.optim.rmsprop.RMSprop" and report["settings"]["alpha"] == 0.9


def test_an_invalid_or_foreign_optimizer_is_reported_in_one_line(
    tmp_path: Path,
) -> None:
    net, other = make_tanh_model(), make_tanh_model()
    used = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    train_without_pipeline(net, used, steps=1)
    arguments_by_fault = {
        "optimizer: 3: must be a torch.optim class": {"optimizer": 3},
        "optimizer: the class Linear: must be": {"optimizer": nn.Linear},
        "optimizer: SGD: has stepped already": {"optimizer": used},
        "optimizer: SGD: lacks 2 of the 2 parameters of stage 0": {
            "optimizer": torch.optim.SGD(other.parameters(), lr=0.1)
        },

        "optimizer_args: need optimizer": {"optimizer_args": {"lr": 0.1}},
    }  # fmt: skip
    for message, arguments in arguments_by_fault.items():
        (fault,) = list_faults(train_with_optimizer, tmp_path / "run", net, **arguments)
        assert re.search(message, fault)
    assert not (tmp_path / "run").exists()


SCHEDULERS = {
    "OneCycleLR": {"max_lr": 0.1, "total_steps": 6, "cycle_momentum": False},
    "CyclicLR": {"base_lr": 0.01, "max_lr": 0.1, "step_size_up": 2, "cycle_momentum": False},
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_any_scheduler_gives_its_own_rates(name: str, tmp_path: Path) -> None:
    make = functools.partial(getattr(lr_scheduler, name), **SCHEDULERS[name])
    plain_model = make_tanh_model()
    optimizer = torch.optim.SGD(plain_model.parameters(), lr=0.05, momentum=0.9)
    expected = train_without_pipeline(plain_model, optimizer, make(optimizer))
    sgd = {"optimizer": {"name": "sgd", "lr": 0.05, "momentum": 0.9}}
    named = {"name": f"torch.optim.lr_scheduler.{name}", "args": SCHEDULERS[name]}
    rates = []
    for run, how in (
        ("object", {"keys": sgd, "lr_scheduler": make}),
        ("named", {"keys": {**sgd, "lr_schedule": named}}),
    ):
        trained = train_with_optimizer(tmp_path / run, make_tanh_model(), **how)
        assert are_weights_equal(trained, expected)
        rates.append(read_column(tmp_path / run, "lr"))
    assert rates[0] == rates[1] and len(set(rates[0])) > 2


def test_a_scheduler_may_be_stepped_by_epochs_and_composes_with_rules() -> None:
    schedule = {
        "name": "torch.optim.lr_scheduler.StepLR",
        "args": {"step_size": 1, "gamma": 0.5},
        "interval": "epoch",
    }
    t1 = {"method": "pipemare", "method_args": {"t1": {"anneal_updates": 4}}}
    config = ipu_pipe.configure(**HOW, **t1, lr_schedule=schedule, optimizer={"lr": 1.0}, epochs=3)
    job = build(config, make_tanh_model(), make_labelled_data())
    assert [job.rate(k) for k in (0, 7, 8, 15, 16, 23)] == [1.0, 1.0, 0.5, 0.5, 0.25, 0.25]
    assert job.rules.rates(20)[0] == 0.25 and 0 < job.rules.rates(1)[0] < 1.0


def make_single_optimizer(**settings: Any) -> torch.optim.Optimizer:
    group = {"params": [nn.Parameter(torch.zeros(1))], "member": 0}
    return torch.optim.SGD([group], lr=0.1, **settings)


def test_a_scheduler_that_cannot_be_simulated_is_reported_in_one_line() -> None:
    optimizer = make_single_optimizer(momentum=0.9)
    one_cycle = functools.partial(lr_scheduler.OneCycleLR, max_lr=0.1)
    maker_by_fault = {
        r"OneCycleLR: changes momentum: .*cycle_momentum=False": lambda o: one_cycle(o, total_steps=20),
        "ReduceLROnPlateau: depends on evaluations": lr_scheduler.ReduceLROnPlateau,
        "3: must return a torch.optim.lr_scheduler": lambda o: 3,
        "ExponentialLR: is of another optimizer": lambda o: lr_scheduler.ExponentialLR(make_single_optimizer(), 0.5),
        "at update 6 of 20: ValueError": lambda o: one_cycle(o, total_steps=5, cycle_momentum=False),
        "returned a rate that is negative or not finite": lambda o: lr_scheduler.LambdaLR(o, lambda k: float("nan")),
    }  # fmt: skip
    for message, make in maker_by_fault.items():
        (fault,) = list_faults(simulate_scheduler, make, optimizer, 0.1, 20)
        assert re.search(message, fault)
    assert optimizer.param_groups[0]["lr"] == 0.1 and optimizer.param_groups[0]["momentum"] == 0.9
    with pytest.raises(BadInput, match="lr_schedule.name: cosin: "):
        ipu_pipe.configure(lr_schedule={"name": "cosin"})
    with pytest.raises(BadInput, match="optimizer.momentum: 0.5: "):
        ipu_pipe.configure(optimizer={"name": "torch.optim.RMSprop", "momentum": 0.5})


def test_a_scheduler_is_simulated_for_optimizers_with_few_defaults() -> None:
    """Story: for torch's Muon and transformers' Adafactor, which have no `differentiable`, none could be."""
    optimizer = make_single_optimizer()
    optimizer.defaults = {"lr": 0.1}
    halving = functools.partial(lr_scheduler.ExponentialLR, gamma=0.5)
    assert simulate_scheduler(halving, optimizer, 0.1, 3) == [[0.1], [0.05], [0.025]]


def test_a_scheduler_from_python_is_recorded_and_required_when_resuming(tmp_path: Path) -> None:
    make, other = (functools.partial(lr_scheduler.ExponentialLR, gamma=g) for g in (0.9, 0.8))
    keys = {"checkpoint": {"every": 2}}
    train = functools.partial(train_with_optimizer, tmp_path, make_tanh_model(), keys=keys)
    train(lr_scheduler=make)
    for scheduler, fault in (
        (None, "given.lr_scheduler: .*ExponentialLR: the run that wrote this had it from Python"),
        (other, r"given.lr_scheduler.settings.gamma: 0.9 -> 0.8"),
    ):
        with pytest.raises(BadInput, match=fault):
            train(resume_from=2, lr_scheduler=scheduler)


def test_checkpoints_without_newer_keys_can_be_resumed() -> None:
    """A key that a manifest does not have counts as null or false.

    A new key with another default would refuse old checkpoints. Story: `model.compile: false` was
    such a key, and no checkpoint written before it could be resumed.
    """
    keys = select_deciding(ipu_pipe.configure().to_dict())
    old = dict(keys)
    for name in ("lr_schedule.args", "lr_schedule.interval", "optimizer.args", "model.compile"):
        del old[name]
    assert not compare_deciding(old, keys)
