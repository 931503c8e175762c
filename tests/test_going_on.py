"""Test runs that resume longer or on another backend, and runs that begin with weights."""

from __future__ import annotations

import functools
import shutil
from pathlib import Path
from typing import Any, Dict, List

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from ipu_pipe.errors import BadInput, end_process
from ipu_pipe.run.build import build
from ipu_pipe.run.setup import set_up
from ipu_pipe.run.train import train
from tests.support.models import Composed, Versioned
from tests.support.processes import run_in_group
from tests.support.runs import (
    assert_same,
    assert_same_state,
    find_checkpoint,
    list_faults,
    needs_processes,
    read_json,
    read_numbers,
    read_weights,
)
from tests.test_resume import read_times
from tests.test_train import DIGITS, make_set_options, make_short_config, run_train_tool  # noqa: F401

BASE = [
    "optimizer.momentum=0.9", "optimizer.lr=0.02", "checkpoint.every=4", "checkpoint.keep=9", "log.every=1",
    "model.args.width=8", "evaluate.every=0", "evaluate.subset=32", "stages=3", "gradient_accumulation=2",
]  # fmt: skip
COSINE = "lr_schedule={name: cosine, warmup_steps: 2, total_steps: 14}"


def train_base(out: Path, *over: str, **how: Any) -> Dict[str, Any]:
    """Train the base config with overrides and return the report."""
    return train(make_short_config(*BASE, *over), out, quiet=True, **how)


def read_update_metrics(out: Path) -> List[Dict[str, Any]]:
    """Return the lines of metrics that belong to updates, without speeds."""
    return [line for line in read_numbers(out) if "train_loss" in line]


# ---- longer

SINGLE = ["gradient_accumulation=1", "optimizer.momentum=0"]
LONGER = {
    "constant": ["method=pipedream_2bw", "gradient_accumulation=4"],
    "step": ["method=gpipe", "lr_schedule={name: step, milestones: [0.02, 0.1]}"],
    "linear": ["method=spectrain", "lr_schedule={name: linear, total_steps: 12}"],
    "t1 of cosine": ["method=pipemare", "method_args={t1: {}, t2: {}}", COSINE],
    "t1 of a linear warm-up": ["method=pipemare", "method_args={t1: {}}", "lr_schedule={warmup_steps: 2}"],
    "synchronous warm-up": ["method=pipemare", "method_args={warmup: {epochs: 0.1}, hogwild: {mean: 2, max: 5}}"],
    "drawn stages": ["method=randomized_pipedream", *SINGLE, "lr_schedule={name: cosine, total_steps: 12}"],
    "rounds": ["method=local_sgd", *SINGLE, "method_args={replicas: 2, local_steps: 2}"],
    "local blocks": ["method=local_greedy"],
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", LONGER)
def test_a_prolonged_run_equals_one_planned_that_long(name: str, tmp_path: Path) -> None:
    """Weights, optimizer state and the lines of all updates are bitwise equal.

    The shorter run ends where a checkpoint is written, so the pipelines of both are empty there.
    """
    grown, planned = tmp_path / "grown", tmp_path / "planned"
    train_base(grown, *LONGER[name], "steps=8")
    report = train_base(grown, *LONGER[name], "steps=12", resume=True)
    expected = train_base(planned, *LONGER[name], "steps=12")
    assert_same_state(grown, planned)
    lines = read_update_metrics(planned)
    assert read_update_metrics(grown) == lines and len(lines) == 12
    assert report["final"]["test_loss"] == expected["final"]["test_loss"]


FOLLOWING = {
    "lr_schedule.total_steps": ["lr_schedule.name=linear"],
    "lr_schedule.total_steps and method_args.t1.anneal_updates": [
        "method=pipemare", "method_args={t1: {}}", "lr_schedule.name=cosine",
    ],
}  # fmt: skip


@pytest.mark.parametrize("keys", list(FOLLOWING))
def test_a_run_whose_rates_follow_its_length_cannot_grow(keys: str, tmp_path: Path) -> None:
    """Story: it resumed at the rates of the longer run, but its first half had the others."""
    grow = functools.partial(train_base, tmp_path, *FOLLOWING[keys], "steps=6", resume=True)
    train_base(tmp_path, *FOLLOWING[keys], "steps=4")
    before = read_times(tmp_path)
    (fault,) = list_faults(grow)
    place = find_checkpoint(tmp_path, 4)
    assert fault.startswith(f"{place}: steps: saved in a run of 4, this one has 6")
    assert f": only a run that began with {keys} can grow" in fault
    assert before == read_times(tmp_path)
    # as if killed before its first checkpoint: all of it is the longer run's
    shutil.rmtree(place.parent)
    (tmp_path / "summary.json").unlink()
    assert grow()["steps"] == 6


def test_the_length_of_a_schedule_is_that_of_the_run_or_more(tmp_path: Path) -> None:
    too_short = make_short_config(*BASE, "lr_schedule={name: cosine, total_steps: 10}")
    with pytest.raises(BadInput, match="lr_schedule.total_steps: 10: must be at least the 12"):
        build(too_short)
    # of a constant rate
    with pytest.raises(BadInput, match="lr_schedule.total_steps: 10: "):
        make_short_config("lr_schedule.total_steps=10")


# ---- on another backend

RANKS = 2
PROCESSES = ["backend.name=distributed", f"stages={RANKS}"]
ELSEWHERE = {  # stages change nothing in a synchronous method, but the delays of the other one
    "gpipe": ["method=gpipe", "lr_schedule={warmup_steps: 6}"],
    "pipemare": ["method=pipemare", "method_args={t1: {anneal_updates: 9}, t2: {}}"],
}


def make_counting_model() -> nn.Module:
    """Return a model whose buffers count training forwards, which no state dict has."""

    def count(module: Any, x: torch.Tensor) -> torch.Tensor:
        if module.training:
            module.seen = module.seen + 1
        return x * 1.0

    torch.manual_seed(5)
    layers = [nn.Flatten()]
    for width in (64, 8):
        counting = Composed(count)
        counting.register_buffer("seen", torch.zeros(1), persistent=False)
        layers += [nn.Linear(width, 8), nn.BatchNorm1d(8), counting]
    return nn.Sequential(*layers, nn.Linear(8, 10)).to(torch.float64)


def collect_tensors(model: nn.Module) -> Dict[str, torch.Tensor]:
    """Return parameters and all buffers, also those that are not in the state dict."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def resume_on_rank(rank: int, folder: Path) -> None:
    """Resume each run after update 4 as one rank; then train a model of the caller."""
    for name, how in ELSEWHERE.items():
        train_base(folder / name, *how, *PROCESSES, "steps=12", resume=True)
    for method in OWN:
        model = train_own(folder / f"own-{method}", method, *PROCESSES)
        torch.save(collect_tensors(model), folder / f"{method}-{rank}.pt")
    end_process(0)


def train_own(out: Path, method: str, *over: str) -> nn.Module:
    """Train a model of the caller, and return it."""
    model = make_counting_model()
    keys = ["steps=3", *OWN[method], f"method={method}", *over, 'stages=["4"]']
    train_base(out, *keys, model=model)
    return model


# the last one with float32 masters
OWN = {"pipedream": [], "local_greedy": [], "pipemare": ["precision=bfloat16_mixed"]}


@needs_processes
def test_a_run_resumes_on_another_backend_and_every_rank_ends_with_the_whole_model(
    tmp_path: Path,
) -> None:
    """A run trains four stages on the emulator, two processes, then three stages on the emulator.

    Story: after a run on processes, a model that a rank had passed was not-a-number where that rank
    had not trained.
    """
    for name, how in ELSEWHERE.items():
        train_base(tmp_path / name, *how, "stages=4", "steps=4")
        shutil.copytree(tmp_path / name, tmp_path / f"{name}-emulator")
    run_in_group(RANKS, resume_on_rank, tmp_path)
    for name, how in ELSEWHERE.items():
        train_base(tmp_path / f"{name}-emulator", *how, f"stages={RANKS}", "steps=12", resume=True)
        assert_same_state(tmp_path / name, tmp_path / f"{name}-emulator")
        train_base(tmp_path / name, *how, "steps=14", resume=True)
    train_base(tmp_path / "whole", *ELSEWHERE["gpipe"], "stages=4", "steps=14")
    assert_same_state(tmp_path / "gpipe", tmp_path / "whole", 14)
    assert read_update_metrics(tmp_path / "gpipe") == read_update_metrics(tmp_path / "whole")
    for method in OWN:
        expected = collect_tensors(train_own(tmp_path / f"emulated-{method}", method))
        for rank in range(RANKS):
            assert_same(torch.load(tmp_path / f"{method}-{rank}.pt"), expected)
        assert {value.dtype for value in expected.values()} == {torch.float64, torch.int64}


def test_a_model_that_needs_its_version_in_a_state_dict_is_resumed(tmp_path: Path) -> None:
    model = Versioned(nn.Flatten(), nn.Linear(64, 8), nn.Linear(8, 10))
    train_base(tmp_path, "stages=2", "steps=4", model=model)
    train_base(tmp_path, "stages=2", "steps=8", model=model, resume=True)


# ---- from weights


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a finished run with checkpoints after 4 and 8 updates; tests must not change it."""
    out = tmp_path_factory.mktemp("ended") / "run"
    train_base(out, "steps=8")
    return out


def test_weights_load_into_a_model_with_a_new_head(
    finished_run: Path,
    tmp_path: Path,
    run_train_tool: Any,  # noqa: F811
) -> None:
    out, head = tmp_path / "tuned", "model.args.classes=12"
    keys = [head, f"init_from={{path: {finished_run}, strict: false}}", "steps=4"]
    code, output, error = run_train_tool(DIGITS, *make_set_options(*BASE, *keys), "--out", str(out))
    assert code == 0, error
    record = read_json(out / "init_from.json")
    new = {*record["new"]}
    assert {*record["left_out"]} == new and len(new) == 2
    (line,) = [line for line in output.splitlines() if line.startswith("init_from: ")]
    assert f"{record['taken']} parameters and buffers loaded" in line
    assert all(name in line for name in new)
    # a run begins with the newest weights of another
    loaded = {n: value for n, value in read_weights(finished_run, 8).items() if n not in new}
    first = set_up(make_short_config(*BASE, head)).model.state_dict()
    weights = set_up(make_short_config(*BASE, *keys)).model.state_dict()
    assert_same(weights, {**first, **loaded})
    assert train_base(out, *keys, "steps=8", resume=True)["steps"] == 8
    assert read_json(out / "init_from.json") == record


def test_weights_that_do_not_fit_are_refused_with_a_remedy(
    finished_run: Path, tmp_path: Path
) -> None:
    begun, nowhere, wrapped = (tmp_path / name for name in ("begun", "nowhere", "x.safetensors"))
    # as a run leaves it that ended before its first one
    (begun / "checkpoints").mkdir(parents=True)
    weights = read_weights(finished_run, 8)
    save_file({f"module.{name}": value for name, value in weights.items()}, wrapped)
    rows = [
        ([f"init_from={begun}"], f"init_from: {begun}: has no checkpoint"),
        ([f"init_from={nowhere}"], f"init_from: {nowhere}: no such file"),
        ([f"init_from={finished_run}", "model.args.classes=12"], "strict: false} takes what fits"),
        ([f"init_from={wrapped}"], "; nothing in it fits"),
        ([f"init_from={{path: {wrapped}, strict: false}}"], "; nothing in it fits"),
    ]
    for over, end in rows:
        assert list_faults(set_up, make_short_config(*BASE, *over))[-1].endswith(end)
