"""Runs of models that are cut, on two processes, have the emulator's weights and figures, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Dict

import pytest
import torch
from torch import nn

from ipu_pipe.config.load import configure
from ipu_pipe.errors import BadInput
from ipu_pipe.model.stages import begin_stage
from ipu_pipe.run.build import build
from ipu_pipe.run.train import train
from tests import forked
from tests.staged_models import ShrinkingModel
from tests.support.runs import assert_states_close, read_weights

SHORT: Dict[str, Any] = {
    "steps": 3, "micro_batch_size": 4, "gradient_accumulation": 2, "evaluate": {"subset": 6}, "log": {"tensorboard": False},
    "checkpoint": {"every": 3, "keep": 1}, "optimizer": {"name": "sgd", "lr": 0.01, "momentum": 0.9}, "loss": "cross_entropy",
}  # fmt: skip


DIGITS = {"name": "digits", "subset": 64, "test_subset": 32}


def test_a_forward_that_writes_a_weight_writes_it_as_often_as_it_runs() -> None:
    """Story: it was written two more times, by observations of the model in its two modes."""
    config = configure(
        method="gpipe",
        micro_batch_size=4,
        steps=1,
        data=DIGITS,
        backend={"threads": 1},
        optimizer={"name": "sgd", "lr": 1e-30},
    )
    model = ShrinkingModel()
    weight = model[1].weight.detach().clone()
    build(config, model)
    assert torch.equal(model[1].weight, weight)


def test_weights_that_a_forward_writes_have_no_versions() -> None:
    config = configure(method="pipedream", micro_batch_size=4, steps=1, data=DIGITS)
    with pytest.raises(BadInput, match="model: 1.weight"):
        build(config, ShrinkingModel())


def test_a_checkpoint_that_is_cut_is_refused_where_its_backward_reads_newer_weights(
    tmp_path: Path,
) -> None:
    keys = {
        **SHORT,
        "model": {"entry": "tests.staged_models:make_cut_checkpoint"},
        "data": DIGITS,
        "method": "pipemare",
    }
    (tmp_path / "config.yaml").write_text(
        json.dumps({**keys, "backend": {"name": "distributed", "threads": 1}})
    )
    output = forked.run_ranks(
        2, "train", [str(tmp_path / "config.yaml"), "--out", str(tmp_path / "run")]
    )
    assert output.code == 2 and "model: a, b:" in output.error


@pytest.mark.slow
def test_modules_of_stages_are_compiled_and_agree_within_rounding(tmp_path: Path) -> None:
    """Compiled kernels round differently: by at most 1e-5 for weights of size 1 after three updates."""
    keys = {
        **SHORT,
        "model": {"entry": "tests.test_cut_runs:make_dropout_classifier"},
        "data": DIGITS,
        "method": "gpipe",
    }
    train(configure(**{**keys, "backend": {"threads": 1}}), tmp_path / "emulator")
    keys["model"] = {**keys["model"], "compile": True}
    (tmp_path / "config.yaml").write_text(
        json.dumps({**keys, "backend": {"name": "distributed", "threads": 1}})
    )
    arguments = [str(tmp_path / "config.yaml"), "--out", str(tmp_path / "processes")]
    # a shared cache may contain kernels for another machine's instructions
    output = forked.run_ranks(
        2, "train", arguments, TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "cache")
    )
    assert output.code == 0, output.error
    assert_states_close(
        read_weights(tmp_path / "emulator", 3), read_weights(tmp_path / "processes", 3), atol=1e-5
    )
    with pytest.raises(BadInput, match="model.compile: processes alone"):
        build(configure(**{**keys, "backend": {"name": "emulator"}}))


def make_dropout_classifier() -> nn.Module:
    """Make a model with dropout, which must draw the same in compiled modules."""
    block = nn.Sequential(nn.Linear(64, 32), nn.Dropout(0.2), nn.Tanh())
    return nn.Sequential(nn.Flatten(), block, begin_stage(nn.Linear(32, 10)))
