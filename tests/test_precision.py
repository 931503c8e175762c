"""bfloat16_mixed: autocast where a backward reads its forward's weights, float32 masters elsewhere; its weights are rows of
tests/test_emulator_exact.py and tests/test_rules.py. A caller's model has its own dtype and modes again after training.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import shutil
from pathlib import Path
from typing import Any, List

import pytest
import torch
from torch import nn

from ipu_pipe.config.schema import Config
from ipu_pipe.errors import BadInput
from ipu_pipe.hardware.description import read_hardware
from ipu_pipe.hardware.memory import KeptCounts, compute_stage_memory
from ipu_pipe.hardware.precision import MASTERS, MIXED
from ipu_pipe.hardware.unit_costs import Unit
from ipu_pipe.plan.candidates import Candidate
from ipu_pipe.plan.planner import search
from ipu_pipe.plan.prediction import Problem
from ipu_pipe.report.memory import build_memory_table
from ipu_pipe.report.run_text import format_opening
from ipu_pipe.run.build import build
from ipu_pipe.run.train import evaluate_checkpoint, train
from tests.support.runs import assert_same_state, read_json, read_state, read_summary, read_weights
from tests.test_train import make_short_config

LOW = torch.bfloat16
autocast = functools.partial(torch.autocast, "cpu", LOW)


def make_small_config(*over: str) -> Config:
    small = "evaluate.subset=96", "model.args.width=8", "stages=3", "steps=8"
    return make_short_config(*small, *over)


PLAIN = ["precision=bfloat16"]
AUTOCAST = ["precision=bfloat16_mixed"]
MASTERED = ["method=pipemare", "method_args.t2={}", *AUTOCAST]


def make_normed_mlp() -> nn.Sequential:
    torch.manual_seed(4)
    first, second, last = nn.Linear(64, 12), nn.Linear(12, 12), nn.Linear(12, 10)
    norm, relu = nn.BatchNorm1d(12), nn.ReLU()
    return nn.Sequential(nn.Flatten(), first, norm, relu, second, nn.ReLU(), last)


def test_checkpoints_hold_the_masters_and_a_run_resumes_from_them(tmp_path: Path) -> None:
    whole_run, cut = tmp_path / "whole", tmp_path / "cut"
    config = make_small_config(*MASTERED, "checkpoint.every=4", "checkpoint.keep=9")
    train(config, whole_run, quiet=True)
    shutil.copytree(whole_run, cut)
    train(config, cut, resume_from=4, quiet=True)
    assert_same_state(whole_run, cut)
    assert {value.dtype for value in read_state(cut).values()} == {torch.float32}
    saved = read_weights(cut, 4)
    assert any(not torch.equal(value, value.bfloat16().float()) for value in saved.values())
    evaluated = evaluate_checkpoint(config, cut / "checkpoints" / "step-8")
    assert evaluated["test_loss"] == read_summary(cut)["final"]["test_loss"]
    other = make_small_config(*MASTERED[:2], "precision=float32", "steps=12")
    with pytest.raises(BadInput, match="precision: bfloat16_mixed -> float32"):
        train(other, cut, resume=True, quiet=True)


@pytest.mark.parametrize("end, keys", [
    *[("done", keys) for keys in (PLAIN, AUTOCAST, MASTERED)], ("fault", AUTOCAST), ("Ctrl-C", MASTERED),
    ("refused", PLAIN), ("refused", AUTOCAST),
], ids=str)  # fmt: skip
def test_a_callers_model_has_its_dtype_and_modes_again_at_the_end(
    end: str, keys: List[str], tmp_path: Path
) -> None:
    """Story: when the data was refused, the model had been cast and stayed so."""
    model = make_normed_mlp()
    model[2].eval()
    before, modes = copy.deepcopy(model.state_dict()), [m.training for m in model.modules()]
    endings = {"fault": ValueError, "Ctrl-C": KeyboardInterrupt, "refused": BadInput}

    class Ends(nn.CrossEntropyLoss):
        calls = 0

        def forward(self, output: Any, y: Any) -> Any:
            self.calls += torch.is_grad_enabled()
            if self.calls == 24 and end != "done":
                raise endings[end]
            return super().forward(output, y)

    over = ["data={name: nothing_such}"] if end == "refused" else []
    config = make_small_config(*keys, *over)
    with pytest.raises(endings[end]) if end in endings else contextlib.nullcontext():
        train(config, tmp_path / "run", model=model, loss=Ends(), quiet=True)
    assert [m.training for m in model.modules()] == modes
    after = model.state_dict()
    assert [value.dtype for value in after.values()] == [value.dtype for value in before.values()]
    assert model.eval()(torch.zeros(4, 1, 8, 8)).dtype == torch.float32
    assert "forward" not in vars(model)
    assert torch.equal(after["1.weight"], before["1.weight"]) == (end == "refused")
    if end == "done":
        saved = read_weights(tmp_path / "run", 8)
        assert all(torch.equal(value.float(), after[key].float()) for key, value in saved.items())


def test_keep_dtype_leaves_a_callers_model_in_the_dtype_of_the_training(tmp_path: Path) -> None:
    dtypes = []
    for number, keys in enumerate((PLAIN, MASTERED, AUTOCAST)):
        model = make_normed_mlp()
        config = make_small_config(*keys, "steps=1")
        train(config, tmp_path / str(number), model=model, quiet=True, keep_dtype=True)
        dtypes.append([model[i].weight.dtype for i in (1, 2)])
    assert dtypes == [[LOW, LOW], [LOW, torch.float32], [torch.float32, torch.float32]]


class AutocastLayers(nn.Sequential):
    """Layers under an autocast of the model's own, and a layer after them that expects autocast, too."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with autocast():
            x = self[1](self[0](x))
        return self[2](x).float()  # type: ignore[no-any-return]


def test_a_model_with_its_own_autocast_is_observed_under_autocast() -> None:
    """Story: the search for its stages ran outside of autocast, where the model fails."""
    model = AutocastLayers(nn.Flatten(), nn.Linear(64, 12), nn.Linear(12, 10))
    assert len(build(make_small_config(*AUTOCAST, "stages=2"), model=model).partition) == 2


def test_the_meaning_of_a_precision_is_printed_or_it_is_refused() -> None:
    for keys, words in ((AUTOCAST, "under autocast"), (MASTERED, "a backward of pipemare reads")):
        assert words in format_opening(build(make_small_config(*keys)))
    with pytest.raises(BadInput, match="precision: bfloat16_mixed: is not supported on IPUs"):
        make_small_config(*AUTOCAST, "backend={name: poptorch}", "method=gpipe")


@pytest.mark.parametrize("keys", [["method=pipedream", *AUTOCAST], MASTERED], ids=str)
def test_memory_is_what_was_planned(keys: List[str], tmp_path: Path) -> None:
    config = make_small_config(*keys, "optimizer.momentum=0.9", "steps=4")
    job, is_mastered = build(config), keys is MASTERED
    summary = train(config, tmp_path, quiet=True)
    assert summary["precision"] == {
        "name": MIXED,
        "weights": "bfloat16" if is_mastered else "float32",
        "autocast": None if is_mastered else "bfloat16",
        "masters": "float32" if is_mastered else None,
    }
    (peak,) = read_json(tmp_path / "memory.json")["peak_memory"]
    planned = build_memory_table(job)
    weights, gradients, state = (
        sum(row[f"{kind}_bytes"] for row in planned) for kind in ("weight", "gradient", "optimizer")
    )
    numbers = sum(p.numel() for p in job.model.parameters())
    corrected = sum(
        job.model.get_parameter(name).numel()
        for stage in job.partition.stages
        if job.rules.list_entries(stage.index)
        for name in stage.parameters
    )
    assert peak["weights"] == (2 if is_mastered else 4) * numbers
    assert peak["gradients"] == 4 * numbers == gradients
    # momentum; the masters; T2's accumulators
    assert peak["optimizer"] == 4 * ((1 + is_mastered) * numbers + corrected) == state
    assert is_mastered or weights == peak["weights"] + peak["versions"]


def test_a_plan_counts_memory_by_each_methods_resolved_precision() -> None:
    unit = Unit("a", 1e6, 2e6, 1000, 400.0, 2000.0, 4)
    plain = read_hardware("h100x8")
    problem = Problem((unit,), 256.0, plain, 1e9, MIXED, 2)
    problems = [problem, problem.adapt_to("pipemare")]
    assert problem.adapt_to("pipedream").precision == MIXED
    assert [adapted.precision for adapted in problems] == [MIXED, MASTERS]
    assert [adapted.input_bytes for adapted in problems] == [256.0, 128.0]
    memories = [
        compute_stage_memory(
            unit,
            0.0,
            KeptCounts(2, 0, 3),
            precision=adapted.precision,
            samples=2,
            moments=adapted.moments,
        )
        for adapted in problems
    ]
    # weights and an older version; gradients; moments and master; activations of half size, in the first
    # case with autocast's copies of the weights
    assert [tuple(memory)[:5] for memory in memories] == [
        (4000, 4000, 4000, 8000, 0),
        (2000, 2000, 4000, 12000, 0),
    ]
    assert [memory.activations for memory in memories] == [3 * (2 * 1000 + 2000), 3 * 2 * 1000]
    candidate = Candidate("pipemare", 1, 1, 2, 1, False)
    assert search(problem, [candidate], 1).best[0].memory[0].weights == 2000
