"""Test the emulator on a CUDA device by the laws of the CPU tests."""

from __future__ import annotations

import copy
import functools
import shutil
from pathlib import Path
from typing import Any, List, Tuple

import pytest
import torch

from ipu_pipe.backends.emulator.replay import Emulator
from ipu_pipe.config.load import load_config
from ipu_pipe.config.schema import BackendConfig
from ipu_pipe.job.numerics import set_numerics
from ipu_pipe.model.observation import observe_effects
from ipu_pipe.model.randomness import KeyedRandomness
from ipu_pipe.run.train import train
from ipu_pipe.schedule.methods import resolve_method
from tests.slot_simulation import PLAYED
from tests.staged_models import MODELS, draw_microbatches, join_stages
from tests.support.runs import DIGITS, find_checkpoint, read_metrics
from tests.test_emulator_exact import (
    OPTIMIZERS,
    assert_equals_stages,
    make_seeded_stages,
    train_literally,
    train_on_emulator,
)
from tests.test_rules import ROWS

# spectrain is a row of the rules, blocks with losses of their own are those of test_local
WHOLE = [name for name, m in PLAYED.items() if name != "spectrain" and m.is_pipeline]
pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def use_deterministic_cuda() -> Any:
    set_numerics(BackendConfig(device="cuda"))  # as a run does
    yield
    set_numerics(BackendConfig(device="cuda", deterministic=False))


def train_both(
    name: str, args: Any, model: str, dtype: torch.dtype, make_optimizer: Any, switch: int = 0
) -> Tuple[torch.nn.Module, List[torch.nn.Module]]:
    """Return a model that the emulator has trained, and the stages of the literal replay."""
    data = [(x.cuda(), y.cuda()) for x, y in draw_microbatches(5 * 8, dtype=dtype)]
    stages = [stage.cuda() for stage in make_seeded_stages(model, dtype)]
    twin, unsplit = copy.deepcopy(stages), join_stages(stages)
    for train_one, of in ((train_on_emulator, unsplit), (train_literally, twin)):
        method = resolve_method(name, args)
        train_one(of, method, 5, data, make_optimizer, args=args, switch=switch)  # type: ignore[operator]
    return unsplit, twin


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("model", list(MODELS))
@pytest.mark.parametrize("method", WHOLE)
def test_weights_equal_those_of_the_literal_replay(
    method: str, model: str, dtype: torch.dtype
) -> None:
    assert_equals_stages(*train_both(method, {}, model, dtype, OPTIMIZERS["sgd"]))


@pytest.mark.parametrize("name", list(ROWS))
def test_rules_equal_those_of_the_literal_replay(name: str) -> None:
    row = ROWS[name]
    unsplit, twin = train_both(
        row.method, row.args, "residual", torch.float64, row.optimizers[0], row.switch
    )
    expected = join_stages(twin).state_dict()
    for key, value in unsplit.state_dict().items():
        assert torch.allclose(value, expected[key], rtol=1e-8, atol=1e-10), key


SHORT = [
    "backend.device=cuda", "steps=12", "log.tensorboard=false", "checkpoint.every=4", "checkpoint.keep=9", "stages=2",
]  # fmt: skip
ADAM = functools.partial(torch.optim.Adam, lr=1e-3)


@pytest.mark.parametrize(
    "sets, objects",
    [
        (["method=pipemare"], {}),
        (["optimizer.name=adam", "optimizer.lr=0.001"], {}),
        ([], {"optimizer": functools.partial(ADAM, fused=True)}),
        ([], {"optimizer": functools.partial(ADAM, capturable=True)}),
    ],
)
def test_a_resumed_run_gives_the_same_numbers_and_records_its_numerics(
    sets: List[str], objects: Any, tmp_path: Path
) -> None:
    config = load_config(DIGITS, [*SHORT, *sets])
    report = train(config, tmp_path, quiet=True, **objects)
    assert (
        report["numerics"]["deterministic_algorithms"]
        and not report["numerics"]["tf32_convolutions"]
    )
    for step in (8, 12):
        shutil.rmtree(find_checkpoint(tmp_path, step))
    (tmp_path / "summary.json").unlink()
    assert train(config, tmp_path, resume=True, quiet=True, **objects)["final"] == report["final"]


def test_losses_are_read_only_for_lines_and_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: List[int] = []
    read = Emulator.read
    monkeypatch.setattr(Emulator, "read", lambda self: reads.append(self.update) or read(self))  # type: ignore[func-returns-value]
    train(
        load_config(DIGITS, [*SHORT, "log.every=6", "evaluate.every=0"]),
        tmp_path / "run",
        quiet=True,
    )
    assert reads == [1, 4, 6, 8, 12]  # the first, checkpoints, lines
    assert [line["step"] for line in read_metrics(tmp_path / "run") if "train_loss" in line] == [
        6,
        12,
    ]


def test_draws_of_the_cpu_and_of_the_gpu_are_keyed() -> None:
    class Depth(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * float(torch.rand(()))

    model, x = (
        torch.nn.Sequential(Depth(), torch.nn.Dropout(0.5)).cuda(),
        torch.ones(64, device="cuda"),
    )
    calls = observe_effects(model, x).draws
    assert calls == {"0": 1, "1": 1}
    keyed, outputs = KeyedRandomness(model, calls, seed=4, device=x.device), []
    for _ in range(2):
        with keyed.forward(0):
            outputs.append(model(x))
    assert torch.equal(*outputs)
    keyed.remove()
