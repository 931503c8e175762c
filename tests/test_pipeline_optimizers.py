"""Optimizers that are more than a rule for each tensor, and ranks whose settings differ."""

from __future__ import annotations

import functools
import gc
import warnings
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Tuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import ipu_pipe
from ipu_pipe.errors import BadInput, RunFault
from ipu_pipe.pipeline.optimizer import OptimizerHandle
from ipu_pipe.update.coupling import Coupling, find_coupling, list_faults
from tests.support.processes import end_rank, run_in_group
from tests.support.runs import needs_processes
from tests.test_pipeline_state import (
    Harmonic,
    flatten,
    make_batch,
    make_model,
    make_pipeline,
    make_sgd,
)

UPDATES = 5


class Averaging(torch.optim.Optimizer):
    """Train weights y and evaluate their average x, as schedule-free optimizers do."""

    def __init__(self, params: Any, lr: float = 0.2) -> None:
        super().__init__(params, {"lr": lr, "k": 0, "trains": True})

    @torch.no_grad()
    def _switch(self, trains: bool) -> None:
        for group in self.param_groups:
            for p in group["params"] if group["trains"] != trains else ():
                if "x" in self.state[p]:
                    y = p.clone()
                    p.copy_(self.state[p]["x"])
                    self.state[p]["x"].copy_(y)
            group["trains"] = trains

    def eval(self) -> None:
        self._switch(False)

    def train(self) -> None:
        self._switch(True)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            assert group["trains"]
            group["k"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["lr"])
                    x = self.state[p].setdefault("x", p.clone())
                    x.lerp_(p, 1 / group["k"])


def list_parameters(optimizer: torch.optim.Optimizer) -> List[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


class NormOfAll(torch.optim.SGD):
    """Divide by the norm of all gradients, as timm's Lamb with max_grad_norm does."""

    def __init__(self, params: Any, lr: float = 0.1, max_grad_norm: Optional[float] = 1.0) -> None:
        super().__init__(params, lr=lr)
        for group in self.param_groups:
            group["max_grad_norm"] = max_grad_norm

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        norm = self.param_groups[0]["max_grad_norm"]
        if norm:
            nn.utils.clip_grad_norm_(list_parameters(self), norm)
        super().step()


class NormOfGroup(torch.optim.SGD):
    """Divide by the norm of the gradients of each group."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            nn.utils.clip_grad_norm_(group["params"], 1.0)
        super().step()


class HarmonicArray(torch.optim.SGD):
    """Divide the rate by the number of steps, which an array of each group counts."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        for group in self.param_groups:
            group.update(counts=np.zeros(2), others=[torch.ones(2)])

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["counts"][0] += 1
            for p in group["params"]:
                p.sub_(p.grad, alpha=group["lr"] / group["counts"][0])


class Noisy(torch.optim.SGD):
    """Add noise to gradients: other weights in every run, whatever the groups."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in list_parameters(self):
            if p.grad is not None:
                p.grad.add_(torch.randn_like(p))
        super().step()


def train_plainly(
    optimizer_class: Callable[..., torch.optim.Optimizer], change: Callable[[int, Any], None]
) -> torch.Tensor:
    """Train on two microbatches an update without a pipeline; `change(k, optimizer)` before each."""
    model = make_model()
    optimizer = optimizer_class(model.parameters())
    for k in range(UPDATES):
        change(k, optimizer)
        optimizer.zero_grad()
        for x, y in zip(*(part.chunk(2) for part in make_batch(k))):
            (cross_entropy(model(x), y) / 2).backward()
        optimizer.step()
    return flatten(model)


def train_in_pipeline(
    optimizer_class: Callable[..., torch.optim.Optimizer],
    change: Callable[[int, Any], None],
    method: str = "gpipe",
    **keys: Any,
) -> Any:
    pipe = make_pipeline(method, optimizer_class, stages=["2"], **keys)
    optimizer = pipe.optimizer.optimizer
    for k in range(UPDATES):
        change(k, optimizer)
        pipe.step(*make_batch(k))
    pipe.close()
    return flatten(pipe.model), optimizer


def change_nothing(k: int, optimizer: Any) -> None:
    """Leave the optimizer as it is."""


def set_k_back(k: int, optimizer: Any) -> None:
    """Begin k again, to the number that it had at the beginning."""
    group = optimizer.param_groups[0]
    assert group["k"] == (k if k <= 3 else k - 3)
    if k == 3:
        group["k"] = group["k"] * 0


def change_group_by_group(k: int, optimizer: Any) -> None:
    """Change rates and momenta as OneCycleLR does, each group's by its own numbers."""
    for group, most in zip(optimizer.param_groups, (0.2, 0.1)):
        group.update(lr=most / (1 + k), momentum=0.9 - most * k)


def make_groups_of_dimensions(parameters: Any) -> torch.optim.Optimizer:
    """Return SGD with groups of matrices and vectors, without the first vector."""
    weights = list(parameters)
    matrices, vectors = ([p for p in weights if (p.dim() > 1) == is_matrix] for is_matrix in (1, 0))
    return torch.optim.SGD([{"params": matrices, "weight_decay": 1e-2}, {"params": vectors[1:]}])


def load_adamw(parameters: Any) -> torch.optim.Optimizer:
    """Return AdamW with the state of other steps."""
    weights = list(parameters)
    other = [p.detach().clone() for p in weights]
    optimizer, used = (torch.optim.AdamW(each, lr=0.01) for each in (weights, other))
    for p in other:
        p.grad = torch.ones_like(p)
    used.step()
    optimizer.load_state_dict(used.state_dict())
    return optimizer


OPTIMIZERS: Dict[str, Tuple[Callable[..., torch.optim.Optimizer], Callable[[int, Any], None]]] = {
    "keeps a number in its groups": (Harmonic, change_nothing),
    "and the caller sets it": (Harmonic, set_k_back),
    "keeps a tensor in its groups": (lambda p: Harmonic(p, k=torch.zeros(())), set_k_back),
    "keeps an array in its groups": (HarmonicArray, change_nothing),
    "norm of all": (NormOfAll, change_nothing),
    "averages": (Averaging, change_nothing),
    "groups": (make_groups_of_dimensions, change_group_by_group),
    "a loaded state": (load_adamw, change_nothing),
}


def test_settings_of_updates_in_flight_are_copies() -> None:
    """A stage may step with the rate of an update after the caller has changed the tensor in place."""
    model = nn.Linear(2, 2)
    rate = torch.tensor(0.5)
    handle = OptimizerHandle(torch.optim.SGD(model.parameters(), lr=rate), model)
    for k in range(2):
        handle.record(k)
        rate.mul_(0.5)
    group = {"member": 0, "stage": 0}
    assert [float(handle.get_settings(k, group)["lr"]) for k in range(2)] == [0.5, 0.25]
    handle.release()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_steps_as_in_a_plain_loop(name: str) -> None:
    """Story: the caller's old k was written over the optimizer's own before each step."""
    make_optimizer, change = OPTIMIZERS[name]
    weights, optimizer = train_in_pipeline(make_optimizer, change)
    assert torch.equal(weights, train_plainly(make_optimizer, change))
    group = optimizer.param_groups[0]
    if isinstance(optimizer, Harmonic):
        assert group["k"] == group["made"] == (2 if change is set_k_back else UPDATES)
    if isinstance(optimizer, HarmonicArray):
        assert group["counts"].tolist() == [UPDATES, 0]


def test_replicas_with_weights_of_their_own_refuse_a_state_in_groups() -> None:
    pipe = make_pipeline("local_sgd", Harmonic, microbatches=None)
    with pytest.raises(BadInput, match="^optimizer: Harmonic: keeps a state in its groups"):
        pipe.step(*(torch.cat([part] * 3) for part in make_batch(0)))


# ---- weights of evaluation


def evaluate_averages(
    rank: int, folder: Path, method: str, backend: str, precision: Optional[str] = None
) -> None:
    keys = {"stages": ["2"], "backend": backend, "precision": precision}
    pipe = make_pipeline(method, Averaging, **keys)
    optimizer = pipe.optimizer.optimizer
    outputs: List[Any] = []
    for k in range(UPDATES):
        pipe.step(*make_batch(k))
        if k == 2:
            # updates that are in flight are to be made to the weights of training
            assert pipe.in_flight
            optimizer.eval()
            outputs.append(pipe.predict(make_batch(90)[0]).tolist())
            with pytest.raises(RuntimeError, match="^step: the optimizer is in evaluation mode"):
                pipe.step(*make_batch(k))
            averages = pipe.model[0].weight.detach().clone()
            optimizer.train()
            assert backend != "emulator" or not torch.equal(pipe.model[0].weight, averages)
            outputs.append(pipe.predict(make_batch(90)[0]).tolist())
    pipe.close()
    if rank == 0:
        torch.save((outputs, flatten(pipe.model)), folder / f"{backend}.pt")


@pytest.mark.parametrize("method, precision", [("pipedream", None), ("pipemare", "bfloat16_mixed")])
def test_eval_of_an_optimizer_reaches_the_weights_that_are_evaluated(
    method: str, precision: Optional[str], tmp_path: Path
) -> None:
    """With master copies the caller's optimizer has no state of its own weights."""
    evaluate_averages(0, tmp_path, method, "emulator", precision)
    outputs, _ = torch.load(tmp_path / "emulator.pt")
    assert outputs[0] != outputs[1]


def test_a_collected_pipeline_leaves_the_optimizer_to_the_next_one() -> None:
    """Story: the first pipeline was collected after the second one had taken the optimizer, whose
    `eval` then switched the caller's object alone: steps trained on the weights of evaluation.
    """
    first = make_pipeline("gpipe", Averaging)
    first.step(*make_batch(0))
    first.close()
    model, optimizer = first.model, first.optimizer.optimizer
    keys = {"method": "gpipe", "stages": ["2"], "microbatches": 2}
    second = ipu_pipe.Pipeline(model, cross_entropy, optimizer, **keys)
    del first
    gc.collect()
    second.step(*make_batch(1))
    optimizer.eval()
    with pytest.raises(RuntimeError, match="^step: the optimizer is in evaluation mode"):
        second.step(*make_batch(2))
    second.close()
    assert not {"eval", "train"} & set(vars(optimizer))


@needs_processes
def test_eval_of_an_optimizer_reaches_all_ranks(tmp_path: Path) -> None:
    evaluate_averages(0, tmp_path, "pipedream", "emulator")
    run_in_group(2, evaluate_averages, tmp_path, "pipedream", "distributed")
    expected, end = torch.load(tmp_path / "emulator.pt")
    outputs, weights = torch.load(tmp_path / "distributed.pt")
    assert outputs == expected and torch.equal(weights, end)


# ---- coupled parameters


@pytest.mark.parametrize(
    "optimizer_class, coupling",
    [
        (Harmonic, Coupling(keeps_settings=True)),
        (Averaging, Coupling(keeps_settings=True)),
        (NormOfAll, Coupling(of_all=True)),
        (functools.partial(NormOfAll, max_grad_norm=None), Coupling()),
        (NormOfGroup, Coupling(of_a_group=True, of_all=True)),
        (Noisy, Coupling()),
    ],
)
def test_coupled_parameters_are_found_on_a_copy(optimizer_class: Any, coupling: Coupling) -> None:
    p = nn.Parameter(torch.ones(3))
    optimizer = optimizer_class([p], lr=0.0)
    torch.manual_seed(0)
    state = torch.get_rng_state()
    assert find_coupling(optimizer) == coupling
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(p, torch.ones(3)) and not optimizer.state and p.grad is None


def test_a_coupled_optimizer_is_refused_where_stages_step_apart() -> None:
    apart = make_pipeline("pipedream", NormOfAll)
    with pytest.raises(BadInput, match="^optimizer: NormOfAll: .*max_grad_norm.*clip.*emulator"):
        apart.step(*make_batch(0))
    by_group = make_pipeline("gpipe", functools.partial(NormOfGroup, lr=0.1))
    with pytest.raises(BadInput, match="^optimizer: NormOfGroup: .* others of its group"):
        by_group.step(*make_batch(0))


def refuse_coupled(rank: int, folder: Path) -> None:
    for method in ("gpipe", "pipedream"):
        pipe = make_pipeline(method, NormOfAll, stages=["2"], backend="distributed")
        with pytest.raises(BadInput, match="^optimizer: NormOfAll: "):
            pipe.step(*make_batch(0))
        pipe.abort()
    weights, optimizer = train_in_pipeline(Harmonic, change_nothing, backend="distributed")
    assert optimizer.param_groups[0]["k"] == UPDATES
    torch.save(weights, folder / f"{rank}.pt")


@needs_processes
def test_ranks_refuse_coupled_optimizers_and_keep_groups(tmp_path: Path) -> None:
    run_in_group(2, refuse_coupled, tmp_path)
    expected = train_plainly(Harmonic, change_nothing)
    for rank in range(2):
        assert torch.equal(torch.load(tmp_path / f"{rank}.pt"), expected)


# ---- ranks with other settings


def differ_later(rank: int, folder: Path, method: str, name: str, replicas: int) -> None:
    where = {"stages": ["2"], "backend": "distributed", "replicas": replicas}
    pipe = make_pipeline(method, functools.partial(make_sgd, lr=0.1 + rank), **where)
    with pytest.raises(BadInput, match="^optimizer: group 0: lr: "):
        pipe.step(*make_batch(0))
    pipe.abort()
    pipe = make_pipeline(method, **where)
    for k in range(4):
        # both ranks change the same, as schedulers do
        pipe.optimizer.param_groups[0]["lr"] = 0.1 / (k + 1)
        pipe.step(*make_batch(k))
    pipe.optimizer.param_groups[0][name] = 0.05 + rank / 100
    with pytest.raises(RunFault) as caught:
        for k in range(4, 12):
            pipe.step(*make_batch(k))
    # the other rank sees that this one has left
    if rank == 0:
        start = f"step: optimizer: {name}: rank 0 and rank 1 have different settings for step 4"
        assert str(caught.value).startswith(start)
    pipe.abort()
    end_rank(folder, rank)


@needs_processes
@pytest.mark.parametrize(
    "method, name, replicas", [("gpipe", "momentum", 1), ("pipedream", "lr", 1), ("gpipe", "lr", 2)]
)
def test_ranks_whose_settings_part_are_refused(
    method: str, name: str, replicas: int, tmp_path: Path
) -> None:
    """Each stage or replica was trained with its own rank's rate, and nobody said so."""
    run_in_group(2, differ_later, tmp_path, method, name, replicas)
    assert all((tmp_path / f"{rank}.ended").exists() for rank in range(2))


# ---- settings by stage


def make_groups_of_stages(parameters: Any) -> torch.optim.Optimizer:
    """Return SGD with a group for the weights of each of two stages."""
    weights = list(parameters)
    first = {"params": weights[:4], "lr": 0.1, "momentum": 0.5}
    return torch.optim.SGD([first, {"params": weights[4:], "lr": 0.05, "momentum": 0.9}])


def halve_rates(k: int, optimizer: Any) -> None:
    """Change every group's rate and weight decay at an update in the middle."""
    for group in optimizer.param_groups if k == 2 else ():
        group["lr"] *= 0.5
        group["weight_decay"] = 0.01


@pytest.mark.parametrize("backend", ["emulator", "xla"])
def test_settings_by_stage_are_those_of_groups_of_their_own(backend: str) -> None:
    if backend == "xla":
        pytest.importorskip("jax")
    by_stage = {"lr": [0.1, 0.05], "momentum": {"from": 0.9, "to": 0.5}}
    grouped, divided, plain = (
        train_in_pipeline(optimizer, halve_rates, method="pipedream", **keys)[0]
        for optimizer, keys in (
            # the first stage has the delay
            (make_groups_of_stages, {}),
            (make_sgd, {"by_stage": by_stage, "backend": backend}),
            (make_sgd, {}),
        )
    )
    assert torch.allclose(grouped, divided, rtol=1e-12, atol=1e-14)
    assert not torch.allclose(plain, grouped, rtol=1e-3)


def decouple_later(k: int, optimizer: Any) -> None:
    """Turn Adam into AdamW at an update in the middle."""
    if k == 2:
        optimizer.param_groups[0]["decoupled_weight_decay"] = True


@pytest.mark.parametrize("is_late", [False, True])
def test_adam_may_decouple_its_weight_decay_on_xla(is_late: bool) -> None:
    """Story: xla took the class for the kind, and stepped as Adam without the setting."""
    pytest.importorskip("jax")
    adam = functools.partial(
        torch.optim.Adam, lr=0.05, weight_decay=0.5, decoupled_weight_decay=not is_late
    )
    change = decouple_later if is_late else change_nothing
    weights, _ = train_in_pipeline(adam, change, backend="xla")
    # the first bias comes before a norm: Adam makes steps of the rounding of its gradient
    assert torch.allclose(weights, train_plainly(adam, change), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "by_stage, line",
    [
        ([0.1], r"by_stage: \[0.1\]: "),
        ({"rate": [1, 2]}, "by_stage: rate: "),
        ({"lr": 0.1}, "by_stage.lr: 0.1: "),
        ({"lr": [0.1, 0.2, 0.3]}, "by_stage.lr: .*: must be one for each of 2 stages"),
        ({"momentum": [0.1, -0.2]}, "by_stage: Invalid momentum value: -0.2"),
    ],
)
def test_wrong_settings_by_stage_are_one_line(by_stage: Any, line: str) -> None:
    with pytest.raises(BadInput, match=f"^{line}"):
        pipe = make_pipeline(by_stage=by_stage, stages=["2"])
        pipe.step(*make_batch(0))


class InOrder(torch.optim.SGD):
    """Keep momentum in a list, in the order of all parameters."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self.velocities = [torch.zeros_like(p) for p in list_parameters(self)]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p, velocity in zip(list_parameters(self), self.velocities):
            p.sub_(velocity.mul_(0.9).add_(p.grad), alpha=0.1)


def test_an_optimizer_that_cannot_be_tried_is_warned_about_where_stages_step_apart() -> None:
    optimizer = InOrder([nn.Parameter(torch.ones(3, 5))])
    with pytest.warns(UserWarning, match="^optimizer: InOrder: a trial of its step .* failed"):
        assert list_faults(optimizer, False, True, False) == []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert list_faults(optimizer, True, True, False) == []
