"""Runs of randomized PipeDream and LocalSGD from configs: refused settings, and resuming with the same numbers."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, Dict, List

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import ipu_pipe
from ipu_pipe.cli import schedule as schedule_command
from ipu_pipe.config.load import configure
from ipu_pipe.run.build import build
from ipu_pipe.run.train import train
from tests.support.runs import ROOT, assert_same, assert_same_weights, list_faults


def make_digits_config(method: str, args: Dict[str, Any] = {}, **keys: Any) -> Any:
    return configure(**{
        "model": {"entry": "models.mlp:mlp"}, "data": {"name": "digits"}, "method": method, "method_args": args,
        "optimizer": {"lr": 0.02, "momentum": 0.9}, "steps": 9, "backend": {"threads": 1}, "evaluate": {"every": 0},
        "log": {"tensorboard": False}, "checkpoint": {"every": 4, "keep": 9}, **keys,
    })  # fmt: skip


@pytest.fixture(autouse=True)
def change_to_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


RUNS: List[Any] = [
    ("randomized_pipedream", {}),
    ("randomized_pipedream", {"delay_bound": 6, "nag": 0.5}),
    ("randomized_pipedream", {"order": "schedule", "delays": "schedule"}),
    ("local_sgd", {"local_steps": 3}),
    ("local_sgd", {"replicas": 2, "local_steps": 30}),
]


@pytest.mark.parametrize("method, args", RUNS)
def test_a_resumed_run_ends_with_the_same_numbers(
    method: str, args: Dict[str, Any], tmp_path: Path
) -> None:
    whole = train(make_digits_config(method, args), tmp_path / "whole", quiet=True)
    train(make_digits_config(method, args), tmp_path / "again", quiet=True)
    again = train(make_digits_config(method, args), tmp_path / "again", resume_from=4, quiet=True)
    assert again["final"] == whole["final"] and again["steps"] == 9
    assert_same_weights(tmp_path / "whole", tmp_path / "again")


def test_the_number_of_replicas_is_that_of_the_stages_and_stays(tmp_path: Path) -> None:
    summary = train(make_digits_config("local_sgd"), tmp_path / "run", quiet=True)
    assert summary["model"]["stages"] == 5 and summary["batch"]["global_batch_size"] == 5 * 8
    assert summary["samples"] == 9 * 5 * 8
    assert [stage["weight_copies"] for stage in summary["stages"]] == [5] * 5
    assert [stage["forward_delay"] for stage in summary["stages"]] == [0] * 5
    longer = train(
        make_digits_config("local_sgd", steps=11, stages=2),
        tmp_path / "run",
        resume=True,
        quiet=True,
    )
    assert longer["batch"]["global_batch_size"] == 5 * 8 and longer["model"]["stages"] == 2


@pytest.mark.parametrize(
    "args, lags",
    [
        ({"delay_bound": 5}, [5] * 5),  # all five updates in between may be of one stage
        ({"delay_bound": 5, "order": "schedule"}, [1] * 5),
        ({"order": "schedule", "delays": "schedule"}, [4, 3, 2, 1, 0]),
    ],
)
def test_randomized_pipedream_holds_as_many_versions_as_its_bound(
    args: Dict[str, Any], lags: List[int]
) -> None:
    assert (
        build(make_digits_config("randomized_pipedream", args)).table.greatest_lag().tolist()
        == lags
    )


@pytest.mark.parametrize(
    "method, keys, place",
    [
        (
            "randomized_pipedream",
            {"gradient_accumulation": 2},
            "gradient_accumulation: 2: randomized_pipedream updates single",
        ),
        (
            "local_sgd",
            {"replicas": 2},
            "replicas: 2: local_sgd has replicas that step by themselves",
        ),
        ("local_sgd", {"clip": {"norm": 1.0, "scope": "global"}}, "clip.scope: global: local_sgd "),
        (
            "randomized_pipedream",
            {"args": {"t1": {}}},
            "method_args.t1: not with randomized_pipedream",
        ),
    ],
)
def test_settings_without_meaning_for_a_method_are_refused(
    method: str, keys: Dict[str, Any], place: str
) -> None:
    faults = list_faults(lambda: build(make_digits_config(method, **keys)))
    assert any(place in fault for fault in faults), faults


def test_a_negative_bound_is_refused_at_its_place() -> None:
    (fault,) = list_faults(make_digits_config, "randomized_pipedream", {"delay_bound": -3})
    assert fault.startswith("configure: method_args.delay_bound: -3: ")


def test_a_method_without_a_timeline_has_no_schedule_to_print() -> None:
    faults = list_faults(
        schedule_command.main, ["randomized_pipedream", "--stages", "4", "--microbatches", "8"]
    )
    assert "randomized_pipedream: has no timeline" in faults[0]


class Experts(nn.Module):
    """Two heads, of which the sign of the inputs chooses one."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.left, self.right = nn.Linear(3, 3), nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        head = self.left if float(x.detach().sum()) < 0 else self.right
        return head(torch.tanh(self.stem(x)))


def test_replicas_of_local_sgd_that_used_other_weights_average_what_they_have() -> None:
    """Story: Adam has no state of a weight that a replica has not used; the end of the round was a KeyError."""
    torch.manual_seed(0)
    model = Experts().double()
    nets = [copy.deepcopy(model) for _ in range(2)]
    optimizers = [torch.optim.Adam(net.parameters(), lr=0.1) for net in nets]
    pipe = ipu_pipe.Pipeline(
        model,
        cross_entropy,
        torch.optim.Adam(model.parameters(), lr=0.1),
        "local_sgd",
        stages=1,
        microbatches=1,
        method_args={"replicas": 2, "local_steps": 2},
    )
    for k, signs in enumerate([(-1, 1), (-1, 1), (1, -1), (1, 1), (-1, 1), (-1, -1)]):
        xs = [torch.rand(4, 3, dtype=torch.float64) * sign for sign in signs]
        ys = [torch.randint(0, 2, (4,)) for _ in signs]
        pipe.step(torch.cat(xs), torch.cat(ys))
        for net, optimizer, x, y in zip(nets, optimizers, xs, ys):
            optimizer.zero_grad()
            cross_entropy(net(x), y).backward()
            optimizer.step()
        if k % 2:
            average_what_is_there(nets, optimizers)
    pipe.close()
    assert_same(model.state_dict(), nets[0].state_dict())


def average_what_is_there(nets: List[nn.Module], optimizers: List[torch.optim.Optimizer]) -> None:
    """Set weights to the mean of all, and the optimizers' state to the mean of those that have it."""
    for parameters in zip(*(net.parameters() for net in nets)):
        mean = sum(p.data for p in parameters) / len(parameters)
        states = [one.state.get(p, {}) for one, p in zip(optimizers, parameters)]
        means = {
            key: sum(s[key] for s in states if s) / len([s for s in states if s])
            for key in {**states[0], **states[1]}
        }
        for optimizer, p in zip(optimizers, parameters):
            p.data = mean.clone()
            optimizer.state[p] = {key: value.clone() for key, value in means.items()}
