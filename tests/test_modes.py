"""Test modules in evaluation mode, which stay in it, and models in it, which train."""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from pathlib import Path
from typing import Any, Deque, Dict, Iterator, List, Optional

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import ipu_pipe
from ipu_pipe.errors import RunFault
from ipu_pipe.run.build import build
from ipu_pipe.run.predict import predict
from tests.support.models import Composed
from tests.support.processes import Runs
from tests.support.runs import assert_same, list_faults, read_weights
from tests.test_emulator_exact import train_in_plain_loop

pytest_plugins = ["poptorch_double"]  # the fixture `poptorch`
SGD = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9)
STAGES = ["3"]
STEPS = 4
METHODS = ["pipemare", "randomized_pipedream", "local_sgd", "local_greedy"]
ACCUMULATION = 2


class Spy(nn.Module):
    """Record the mode of each forward that autograd follows."""

    def __init__(self) -> None:
        super().__init__()
        # a list would be restored after each trial pass
        self.modes: Deque[bool] = deque()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():
            self.modes.append(self.training)
        return x


def make_dropout_model() -> nn.Sequential:
    """Return a model with a BatchNorm and a dropout that are frozen, and two that train."""
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.BatchNorm1d(8), nn.Dropout(0.5)))
    first = [nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh()]
    model = nn.Sequential(*first, block, nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4))
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.running_mean.normal_()  # type: ignore[union-attr]
            module.running_var.uniform_(0.5, 2)  # type: ignore[union-attr]
    model[1].eval()
    model[3].eval()
    return model


FROZEN = (
    "1.running_mean",
    "1.running_var",
    "1.num_batches_tracked",
    "3.1.0.running_mean",
    "3.1.0.running_var",
)


def draw_class_batches() -> List[Any]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(8, 4, 8, generator=generator)
    return list(zip(x, torch.randint(0, 4, (8, 4), generator=generator)))


def make_modes_run(
    model: Optional[nn.Module] = None, method: str = "gpipe", **keys: Any
) -> Dict[str, Any]:
    """Return the arguments of a run of `STEPS` updates that is evaluated in the middle."""
    settings: Dict[str, Any] = {
        "stages": STAGES, "steps": STEPS, "gradient_accumulation": ACCUMULATION,
        "evaluate": {"steps": 2}, "checkpoint": {"every": 2, "keep": 9}, "log": {"tensorboard": False},
    }  # fmt: skip
    batches = draw_class_batches()
    return {
        "config": ipu_pipe.configure(method=method, **{**settings, **keys}), "optimizer": SGD,
        "model": make_dropout_model() if model is None else model, "data": ipu_pipe.from_loader(batches, batches[:2]),
    }  # fmt: skip


def train_in_own_modes(model: nn.Module) -> nn.Module:
    """Train by plain PyTorch, in the modes that the modules have."""
    train_in_plain_loop(model, draw_class_batches(), ACCUMULATION, SGD)
    return model


def read_modes(model: nn.Module) -> Dict[str, bool]:
    return {name: module.training for name, module in model.named_modules()}


def test_modules_in_evaluation_mode_train_as_in_a_plain_loop(tmp_path: Path) -> None:
    """Story: `model.train()` at the build and before the timing of stages woke them."""
    model = make_dropout_model()
    before = read_modes(model)
    ipu_pipe.train(out=tmp_path / "run", quiet=True, **make_modes_run(model))
    assert_same(model.state_dict(), train_in_own_modes(make_dropout_model()).state_dict())
    assert read_modes(model) == before


@pytest.mark.parametrize("method", METHODS)
def test_every_method_leaves_frozen_statistics(method: str, tmp_path: Path) -> None:
    model, before = make_dropout_model(), make_dropout_model().state_dict()
    keys = {"gradient_accumulation": 1} if method in ("randomized_pipedream", "local_sgd") else {}
    ipu_pipe.train(out=tmp_path / "run", quiet=True, **make_modes_run(model, method, **keys))
    after = model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in FROZEN)
    assert not torch.equal(before["4.running_mean"], after["4.running_mean"])
    assert not torch.equal(before["1.weight"], after["1.weight"])
    assert read_modes(model) == read_modes(make_dropout_model())


@pytest.mark.parametrize("method", ["gpipe", "local_greedy"])
def test_all_training_passes_see_frozen_modules_in_evaluation_mode(
    method: str, tmp_path: Path
) -> None:
    """This holds also for observation, verification of pieces, and the timing of stages."""
    model, training, frozen = make_dropout_model(), Spy(), Spy().eval()
    model[2], model[5] = training, frozen
    ipu_pipe.train(out=tmp_path, quiet=True, **make_modes_run(model, method))
    assert any(training.modes) and not any(frozen.modes)
    assert len(frozen.modes) > STEPS * ACCUMULATION


def test_a_model_in_evaluation_mode_is_trained_in_training_mode(
    tmp_path: Path, capsys: Any
) -> None:
    """A model is in evaluation mode as `from_pretrained` returns it."""
    model = make_model_without_dropout()
    expected = train_in_own_modes(make_model_without_dropout().train())
    ipu_pipe.train(out=tmp_path / "run", **make_modes_run(model.eval()))
    assert_same(model.state_dict(), expected.state_dict())
    assert not any(module.training for module in model.modules())
    assert "model: came in evaluation mode: trained in training mode\n" in capsys.readouterr().out


def make_model_without_dropout() -> nn.Sequential:
    model = make_dropout_model()
    model[3][1][1].p = 0.0
    return model


def make_entry_model(classes: int = 4) -> nn.Module:
    """Return the model of a config that names this function."""
    return make_dropout_model()


def test_a_line_names_frozen_modules_and_the_model_of_a_config_keeps_them_too(
    tmp_path: Path, capsys: Any
) -> None:
    arguments = {**make_modes_run(), "model": None}
    entry = arguments["config"].model.model_copy(
        update={"entry": "tests.test_modes:make_entry_model"}
    )
    arguments["config"] = arguments["config"].model_copy(update={"model": entry})
    for quiet in (False, True):
        ipu_pipe.train(out=tmp_path / str(quiet), quiet=quiet, **arguments)
        lines = capsys.readouterr().out.splitlines()
        assert ("model: 6 modules stay in evaluation mode: 1, 3" in lines) is not quiet
        assert not (quiet and lines)
    saved, before = read_weights(tmp_path / "True"), make_dropout_model().state_dict()
    assert all(torch.equal(before[name], saved[name]) for name in FROZEN)


class Freezing(nn.Sequential):
    """Freeze the first modules whenever the mode is set, and in evaluation all of them.

    Detection models do so.
    """

    def train(self, mode: bool = True) -> Freezing:
        super().train(mode)
        self[1].eval()
        for index, module in enumerate(self):
            module.requires_grad_(mode and index > 1)
        return self


def test_a_models_own_train_decides_and_an_evaluation_freezes_nothing(tmp_path: Path) -> None:
    """Story: evaluations did not restore `requires_grad`: after the first nothing was trained."""
    model = Freezing(*make_dropout_model().train())
    assert all(module.training for module in model.modules())  # `train` was not called yet
    ipu_pipe.train(out=tmp_path / "run", quiet=True, **make_modes_run(model, stages=1))
    trained, before = model.state_dict(), make_dropout_model().state_dict()
    for name in ("0.weight", "1.weight", "1.running_mean"):
        assert torch.equal(trained[name], before[name])
    assert not torch.equal(trained["6.weight"], before["6.weight"])
    assert all(p.requires_grad for p in model.parameters())


def test_an_evaluation_by_blocks_runs_the_model_in_evaluation_mode(tmp_path: Path) -> None:
    """Story: the pieces of a model with local losses stayed in training mode."""
    torch.manual_seed(0)

    def run_parts(m: Any, x: torch.Tensor) -> torch.Tensor:
        return m.b(torch.tanh(m.a(x)) * (3 if m.training else 1))  # type: ignore[no-any-return]

    model = Composed(run_parts, a=nn.Linear(8, 8), b=nn.Linear(8, 4))
    arguments = make_modes_run(model, "local_greedy", stages=["b"])
    summary = ipu_pipe.train(out=tmp_path / "run", quiet=True, **arguments)
    x, y = (torch.cat(parts) for parts in zip(*draw_class_batches()[:2]))
    expected = float(F.cross_entropy(predict(model, x), y))
    assert summary["final"]["test_loss"] == pytest.approx(expected, rel=1e-6)


class Waking(ipu_pipe.Callback):
    """Evaluate as in a plain loop, whose `model.train()` wakes all modules."""

    def __init__(self, model: nn.Module, when: str) -> None:
        self._model, self._when = model, when

    def on_evaluation(self, now: Any) -> None:
        if self._when == "evaluation":
            self._model.eval()
            self._model.train()

    def on_end(self, now: Any) -> None:
        self._model.eval()


@pytest.mark.parametrize("when", ["evaluation", "end"])
def test_a_callback_that_changes_a_mode_is_refused_by_name(when: str, tmp_path: Path) -> None:
    arguments = make_modes_run()
    arguments["callbacks"] = [Waking(arguments["model"], when)]
    refused = pytest.raises(RunFault, match="^callbacks: on_evaluation after update 2: .* of 1: ")
    with refused if when == "evaluation" else contextlib.nullcontext():
        ipu_pipe.train(out=tmp_path, quiet=True, **arguments)


class Mixing(nn.Linear):
    """Mix the tokens: the FLOPs grow with the square of their number."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + super().forward(x) @ x.transpose(1, 2) @ x  # (samples, tokens, width)


def test_a_mode_that_changes_leaves_the_cut_where_longer_samples_would_move_it() -> None:
    """Story: the stages were cut anew by the FLOPs of the next microbatch."""
    torch.manual_seed(0)
    layers = [Mixing(8, 8), nn.Dropout(), *(nn.Linear(8, 8) for _ in range(4))]
    average = lambda m, x: m.last(m.body(x).mean(1))  # noqa: E731
    model: Any = Composed(average, body=nn.Sequential(*layers), last=nn.Linear(8, 4))
    with open_pipeline(model, "local_greedy", 2, lr=0.0) as pipe:
        cuts = []
        for tokens in (1, 100):
            pipe.step(torch.zeros(2, tokens, 8), torch.tensor([0, 1]))
            pipe.drain()
            cuts.append(list(pipe.partition.begins))
            model.body[1].eval()
        model.body[1].train()
        # what was built again evaluates also if the batch is refused
        with pytest.raises(ValueError, match="0 samples"):
            pipe.step(torch.zeros(0, 1, 8), torch.zeros(0))
        assert pipe.predict(torch.zeros(1, 1, 8)).shape == (1, 4)
    assert cuts[0] == cuts[1]


def make_waist() -> nn.Sequential:
    """Make a model whose widths alternate, so that heads at other places have other shapes."""
    widths = (8, 8, 16, 8, 16, 8, 16, 8)
    layers = [layer for a, b in zip(widths, widths[1:]) for layer in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(8, 3))


@contextlib.contextmanager
def open_pipeline(
    model: nn.Module, method: str, stages: Any, lr: float = 0.1
) -> Iterator[ipu_pipe.Pipeline]:
    """Open a pipeline of single microbatches."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    with ipu_pipe.Pipeline(
        model, F.cross_entropy, optimizer, method, stages=stages, microbatches=1
    ) as pipe:
        yield pipe


WAIST_BATCH = torch.ones(2, 8), torch.tensor([0, 1])


def test_heads_stay_where_they_fit_when_weights_are_frozen() -> None:
    """Story: frozen weights have fewer FLOPs, so the stages moved, and their heads did not fit."""
    model = make_waist()
    with open_pipeline(model, "local_greedy", 3) as pipe:
        pipe.step(*WAIST_BATCH)
        pipe.drain()
        begins = list(pipe.partition.begins)
        model[:6].requires_grad_(False)
        pipe.step(*WAIST_BATCH)
        assert list(pipe.partition.begins) == begins


def test_a_count_cuts_anew_after_a_module_was_replaced_also_if_it_was_built_again_before() -> None:
    """Story: stages cut by time kept the names of modules that were gone."""
    model = make_waist()
    with open_pipeline(model, "gpipe", {"count": 3, "by": "time"}) as pipe:
        pipe.step(*WAIST_BATCH)
        model[0].requires_grad_(False)
        pipe.step(*WAIST_BATCH)
        model[1] = nn.Tanh()
        del model[6:14]
        pipe.step(*WAIST_BATCH)
        assert all(int(name) < len(model) for name in pipe.partition.begins)


# ---- other backends


def make_frozen_head(activation: torch.Tensor, output: torch.Tensor) -> nn.Module:
    """Return a head with a frozen BatchNorm."""
    head = nn.Sequential(
        nn.BatchNorm1d(activation.shape[1]), nn.Linear(activation.shape[1], output.shape[1])
    )
    head[0].eval()
    return head


def make_recomputed() -> nn.Module:
    """Return the model with its frozen BatchNorm in a checkpoint."""
    model = make_dropout_model()
    run = lambda m, x: checkpoint(m.inner, x, use_reentrant=False)  # noqa: E731
    model[1] = Composed(run, inner=model[1])
    return model


def list_runs() -> Runs:
    heads = {"method_args": {"head": "tests.test_modes:make_frozen_head"}}
    return {
        "gpipe": functools.partial(make_modes_run),
        "pipedream": functools.partial(make_modes_run, None, "pipedream"),
        "recompute": functools.partial(make_modes_run, None, "gpipe", recompute=True),
        "checkpoint": lambda: make_modes_run(make_recomputed()),
        "local": functools.partial(make_modes_run, None, "local_greedy", **heads),
    }  # fmt: skip


def make_ipu_run(backend: str, model: Optional[nn.Module] = None) -> Dict[str, Any]:
    keys = {"evaluate": {"every": 0}, "gradient_accumulation": 4, "steps": 2}
    return make_modes_run(model, backend={"name": backend}, **keys)


def test_a_dropout_that_is_off_stays_off_on_ipus(tmp_path: Path, poptorch: Any) -> None:
    weights = []
    for backend in ("emulator", "poptorch"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 4))
        model[2].eval()
        ipu_pipe.train(out=tmp_path / backend, quiet=True, **make_ipu_run(backend, model))
        weights.append(model.state_dict())
    assert_same(*weights)


def test_a_frozen_batchnorm_that_a_gradient_passes_is_refused_on_ipus(poptorch: Any) -> None:
    """PopART has no gradient of such a BatchNorm."""
    arguments = make_ipu_run("poptorch")
    (fault,) = list_faults(build, **arguments)
    assert "1, 3.1.0" in fault and "GroupNorm" in fault
    for name, parameter in arguments["model"].named_parameters():
        parameter.requires_grad_(int(name[0]) > 3)
    build(**arguments)
