"""Runs of randomized PipeDream and LocalSGD from configs: refused settings, and resuming with the same numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, List

import pytest

from ipu_pipe.cli import schedule as schedule_command
from ipu_pipe.config.load import configure
from ipu_pipe.run.build import build
from ipu_pipe.run.train import train
from tests.support.runs import ROOT, assert_same_weights, list_faults


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
