"""Processes give the emulator's bits in whole runs and in loops, of a config or of arguments of `ipu_pipe.train`.

    ROWS     arguments of `ipu_pipe.train`; of a feature they are made in the file that tests it
    LOOPS    a `Pipeline` in a loop of one's own

A row trains on the emulator, and on ranks that stay alive from row to row; then everything that the ranks return equals what
the emulator returned, to the last bit. Every method, rule, model and placement is trained by `tests/test_simulation.py`.
"""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any, Callable, Dict, NamedTuple

import pytest
import torch

from ipu_pipe.config.load import configure, load_config
from ipu_pipe.config.schema import BackendConfig
from ipu_pipe.run.train import train
from tests.simulation.cases import DEADLINE
from tests.simulation.network import Network
from tests.simulation.ranks import assert_same_values, check_run, prepare_keys
from tests.support import rank_group
from tests.support.loops import Loop, take_share
from tests.support.rank_group import RankGroups
from tests.support.runs import (
    DIGITS,
    find_checkpoint,
    needs_processes,
    read_numbers,
    read_state,
    read_summary,
)
from tests.support.slow import mark_slow
from tests.test_pipeline_processes import ON_PROCESSES
from tests.test_processes import SHORT

pytestmark = needs_processes
groups = rank_group.groups
REPORTED = ("forward_delay", "backward_delay", "weight_copies", "optimizer_bytes")  # by stage


class RunRow(NamedTuple):
    """A function that returns new arguments of `ipu_pipe.train`, and on how many ranks they train."""

    make: Callable[[], Dict[str, Any]]
    ranks: int = 2
    missing: str = ""  # reason to skip it: a package that is not installed


def train_digits(*settings: str, ranks: int = 2, missing: str = "") -> RunRow:
    """Return a row of the digits' file, with settings over SHORT."""
    return RunRow(lambda: {"config": load_config(DIGITS, [*SHORT, *settings])}, ranks, missing)


def train_model(entry: str, base: Dict[str, Any], ranks: int = 2, **keys: Any) -> RunRow:
    """Return a row of a config, of which `base` has the usual keys."""
    return RunRow(
        lambda: {"config": configure(**{**base, "model": {"entry": entry}, **keys})}, ranks
    )


def call_feature(
    entry: str, *arguments: Any, item: str = "", ranks: int = 2, missing: str = "", **keys: Any
) -> RunRow:
    """Return a row whose arguments a function "module:name" makes. `item`: of the runs that it returns."""

    def make() -> Dict[str, Any]:
        module, _, name = entry.partition(":")
        result = getattr(importlib.import_module(module), name)(*arguments, **keys)
        return result[item]() if item else result

    return RunRow(make, ranks, missing)


def describe_cut_model(name: str) -> Dict[str, Any]:
    """Return a run of a model of another library; skip the test without the library."""
    pytest.importorskip("tests.vision_libraries")
    from tests.third_party_models import CASES

    case = CASES[name]
    model = {"entry": f"tests.third_party_models:{case.entry}"}
    keys = {**CUT, "model": model, "data": case.data, "stages": case.list_stages(2)}
    return {"config": configure(method="gpipe", **keys)}


# instead of the file's optimizer
NO_OPTIMIZER = [f"optimizer.{key}=null" for key in ("name", "lr", "momentum")]
GROUPS = (
    "{groups: [{match: '*weight', ndim: 2, name: torch.optim.Muon, lr: 0.02}, {name: adamw, lr: 0.002, "
    "by_stage: {betas: {from: [0.9, 0.99], to: [0.99, 0.999]}}}]}"
)
ROTATION = (
    "{groups: [{ndim: 2, name: 'models.optimizers:BasisRotation', lr: 0.002, args: {frequency: 2}}, "
    "{name: adamw, lr: 0.002}]}"
)
PLATEAU = "{name: plateau, warmup_steps: 3, args: {factor: 0.5, patience: 0, threshold: 0.02, cooldown: 1}}"
TIED: Dict[str, Any] = {
    "data": {"name": "tests.tied_models:make_random_tokens"},
    "micro_batch_size": 2, "gradient_accumulation": 4, "steps": 6, "backend": {"threads": 1},
    "log": {"every": 1, "tensorboard": False}, "checkpoint": {"every": 3, "keep": 9},
}  # fmt: skip
# models that are cut: forwards that differentiate, write a weight, or begin a stage inside of a checkpoint
CUT: Dict[str, Any] = {
    "data": {"name": "digits", "subset": 64, "test_subset": 32}, "loss": "cross_entropy", "steps": 3, "micro_batch_size": 4,
    "gradient_accumulation": 2, "evaluate": {"subset": 6}, "log": {"tensorboard": False},
    "checkpoint": {"every": 3, "keep": 1}, "optimizer": {"name": "sgd", "lr": 0.01, "momentum": 0.9},
    "backend": {"threads": 1},
}  # fmt: skip
WITHOUT_TRANSFORMERS = "" if importlib.util.find_spec("transformers") else "needs transformers"
STAGED = "tests.staged_models"
BATCHES = "tests.test_batches:make_batch_arguments"
WEIGHTS = "tests.test_loss_weight:describe_run"
UNEVEN = [1, 9, 4, 10, 3, 0, 7, 2, 0, 0, 0, 0, 0, 5, 0, 8]  # tokens of microbatches
ROWS: Dict[str, RunRow] = {
    "t1-t2": train_digits(
        "method=pipemare", "stages=4", "method_args={t1: {anneal_updates: 5}, t2: {decay: 0.5}}", ranks=4
    ),
    # a sum of two gradients has but one order
    "three-replicas": train_digits(
        "method=pipedream", "stages=2", "replicas=3", "gradient_accumulation=2", "log.every=1", ranks=3
    ),
    "early-stopping": train_digits(
        "method=pipedream", "stages=4", "early_stopping={metric: loss, patience: 9}"
    ),
    "finest": train_digits("method=pipedream", "stages=finest"),
    # shared, unused and in-place modules
    "odd-modules": train_digits(
        f"model.entry={STAGED}:OddModel", "model.args={}", 'stages=["2", "3", "5"]', "method=pipedream", ranks=4
    ),
    # a replica that does not reach a weight counts as zero
    "unreached-weight": train_digits(
        f"model.entry={STAGED}:make_gate", "model.args={}", "stages=null", "replicas=2", "gradient_accumulation=1",
        "method=pipedream", ranks=4,
    ),
    "optimizers-by-group": train_digits(
        "method=pipemare", "clip={norm: 0.5, scope: delayed_global}", "stages=4", f"optimizer={GROUPS}", *NO_OPTIMIZER,
        missing="" if hasattr(torch.optim, "Muon") else "needs torch.optim.Muon",
    ),
    "gap-and-rotation": train_digits(
        "method=pipedream", "stages=4", "gradient_accumulation=2", "method_args={gap_aware: {decay: 0.9}}",
        f"optimizer={ROTATION}", *NO_OPTIMIZER,
    ),
    "plateau": train_digits(
        "method=spectrain", "stages=2", "gradient_accumulation=1", "evaluate.steps=2", "log.every=1",
        f"lr_schedule={PLATEAU}",
    ),
    "tied-replicas": train_model(
        "tests.tied_models:make_language_model", TIED, 4, method="pipedream_flush",
        optimizer={"name": "adam", "lr": 0.01, "weight_decay": 0.01}, clip={"norm": 0.3, "scope": "global"},
        stages=["block2"], replicas=2, steps=4, checkpoint={"every": 2},
    ),
    "tied-dropout": train_model(
        "", TIED, 4, model={"entry": "tests.tied_models:Gpt2", "args": {"dropout": 0.1, "layers": 4}},
        method="pipedream_2bw", optimizer={"name": "sgd", "lr": 0.1, "momentum": 0.9, "weight_decay": 0.01},
    )._replace(missing=WITHOUT_TRANSFORMERS),
    # a gradient inside a forward once failed in observations without gradients, and each observation on
    # each process once wrote weights
    "cut-make_forces": train_model(f"{STAGED}:make_forces", CUT, method="pipedream"),
    "cut-ShrinkingModel": train_model(f"{STAGED}:ShrinkingModel", CUT, method="gpipe"),
    "cut-make_cut_checkpoint": train_model(f"{STAGED}:make_cut_checkpoint", CUT, method="gpipe"),
    **{
        f"cut-{model}": call_feature(f"{__name__}:describe_cut_model", model)
        for model in ("torchvision-convnext", "timm-cait", "hf-mixtral")
    },
    "complex-buffer-zb_h1": call_feature("tests.test_complex_buffers:make_case_arguments", (True, "zb_h1")),
    "complex-buffer-not-saved": call_feature("tests.test_complex_buffers:make_case_arguments", (False, "pipedream")),
    "loss-reads-model": call_feature("tests.test_loss_reads_model:make_counted_run", "pipedream"),
    "head-in-loss-gpipe": call_feature("tests.test_unread_weights:make_head_run", "gpipe"),
    "head-in-loss-pipemare": call_feature("tests.test_unread_weights:make_head_run", "pipemare"),
    **{
        f"modes-{run}": call_feature("tests.test_modes:list_runs", item=run)
        for run in ("pipedream", "recompute", "checkpoint", "local")
    },
    **{f"batches-{run}": call_feature(BATCHES, run) for run in ("three", "own", "noisy", "seeded")},
    **{
        f"batches-{run}": call_feature(BATCHES, run, missing=WITHOUT_TRANSFORMERS)
        for run in ("bert", "gpt2", "vit", "blocks")
    },
    **{f"loss-weight-{method}": call_feature(WEIGHTS, method) for method in ("pipedream", "pipedream_2bw", "zb_h1")},
    "loss-weight-pipemare": call_feature(WEIGHTS, "pipemare", method_args={"recompute": {"segments": 1}}),
    "loss-weight-local_sgd": call_feature(WEIGHTS, "local_sgd", gradient_accumulation=1),
    "loss-weight-replicas": call_feature(
        WEIGHTS, "pipedream", [*UNEVEN, 0, 5, 0, 9, 0, 1, 0, 4, *UNEVEN[:8]], replicas=2, ranks=4
    ),
    "loss-weight-blocks": call_feature("tests.test_loss_weight:describe_blocks"),
}  # fmt: skip
# one of each kind
QUICK = (
    "t1-t2", "three-replicas", "tied-replicas", "cut-make_forces", "complex-buffer-zb_h1", "loss-reads-model",
    "head-in-loss-pipemare", "batches-three", "loss-weight-local_sgd",
)  # fmt: skip


def train_row(rank: int, name: str, backend: str, folder: Path) -> Dict[str, Any]:
    """Train a row; rank 0 returns what it has written for all."""
    arguments = ROWS[name].make()
    settings = BackendConfig(name=backend, threads=1)  # type: ignore[arg-type]
    arguments["config"] = arguments["config"].model_copy(update={"backend": settings})
    train(out=folder / backend, quiet=True, **arguments)
    return read_run(folder / backend) if rank == 0 else {}


def read_run(out: Path) -> Dict[str, Any]:
    """Return weights and optimizer state of the last checkpoint, metrics, results and the stages' report."""
    summary = read_summary(out)
    assert find_checkpoint(out).name == f"step-{summary['steps']}"
    report = [{key: stage[key] for key in REPORTED} for stage in summary["stages"]]
    results = {key: summary[key] for key in ("initial", "final")}
    return {**read_state(out), "metrics": read_numbers(out), "stages": report, **results}


@pytest.mark.parametrize("name", mark_slow(ROWS, QUICK.__contains__))
def test_processes_give_the_emulators_bits(name: str, groups: RankGroups, tmp_path: Path) -> None:
    row = ROWS[name]
    if row.missing:
        pytest.skip(row.missing)
    expected = train_row(0, name, "emulator", tmp_path)
    results = groups.call(row.ranks, train_row, name, "distributed", tmp_path)
    assert_same_values(results[0], expected, "")


QUICK_LOOPS = {
    "pipedream", "pipemare_t1_t2", "pipedream_clip_delayed", "pipedream_replicas", "pb_virtual_split", "pipemare_recompute",
    "local_overlapping", "diloco", "zbv",
}  # fmt: skip


def run_loop(name: str, **keys: Any) -> Dict[str, Any]:
    """Return weights, losses, and which updates leave in which step."""
    loop = Loop(ON_PROCESSES[name], **keys)
    loop.run()
    state = loop.close().state_dict()
    return {**state, "losses": loop.losses, "left": loop.left}


def run_loop_on_rank(rank: int, name: str) -> Dict[str, Any]:
    """Return the same on each rank: `close` gives all of them the whole model."""
    keys: Dict[str, Any] = {"backend": "distributed", "backend_args": {"deadline": 60}}
    return run_loop(name, share=take_share, **keys)


@pytest.mark.parametrize("name", mark_slow(ON_PROCESSES, QUICK_LOOPS.__contains__))
def test_loops_on_processes_give_the_emulators_bits(name: str, groups: RankGroups) -> None:
    expected = run_loop(name)
    for values in groups.call(2, run_loop_on_rank, name):
        assert_same_values(values, expected, "")


# quick, on the simulated network


@pytest.mark.parametrize("method, count", [("pipedream", 1), ("pipedream_2bw", 2)])
def test_stages_keep_the_planned_weight_versions_and_no_more(method: str, count: int) -> None:
    prepared = prepare_keys("mlp", method=method, gradient_accumulation=count, steps=6)
    check_run(prepared, Network(1, 2, DEADLINE))
