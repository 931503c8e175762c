"""Check that a weight of several stages is trained as in plain PyTorch, stored once, or refused
with the reason."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, Dict, List, Tuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import cross_entropy

import ipu_pipe
from ipu_pipe.backends.processes.layout import require_separable
from ipu_pipe.cut.cutting import cut_model
from ipu_pipe.cut.verification import verify_pieces
from ipu_pipe.model.stages import begin_stage, partition
from ipu_pipe.schedule.methods import METHODS, resolve_method
from ipu_pipe.schedule.timelines import make_schedule
from ipu_pipe.schedule.versions import VersionTable
from tests.slot_simulation import PLAYED
from tests.staged_models import TIED, TIES, draw_microbatches, join_stages, make_repeating_model
from tests.support.models import Composed
from tests.support.processes import run_in_group
from tests.support.runs import list_faults, needs_processes
from tests.test_emulator_exact import (
    OPTIMIZERS,
    train_in_plain_loop,
    train_literally,
    train_on_emulator,
)

SHARING = [name for name, method in PLAYED.items() if method.one_version]
FLUSHING = [name for name in SHARING if METHODS[name].flushes]


def make_seeded_stages(name: str, dtype: torch.dtype = torch.float64) -> List[nn.Module]:
    torch.manual_seed(3)
    return [stage.to(dtype) for stage in TIED[name]()]


def separate_replicas(stages: List[nn.Module], name: str) -> List[nn.Module]:
    """Replace each replica of a shared weight by a copy, and return the stages."""
    for s, ties in TIES[name].items():
        for weight in ties:
            module, _, leaf = weight.rpartition(".")
            submodule = stages[s].get_submodule(module)
            setattr(submodule, leaf, nn.Parameter(getattr(submodule, leaf).detach().clone()))
    return stages


# ---- methods that share weights


def test_methods_that_flush_and_2bw_share_weights() -> None:
    assert SHARING == ["naive", "gpipe", "pipedream_flush", "pipedream_2bw"]


@given(st.sampled_from(SHARING), st.integers(2, 6), st.integers(1, 4), st.integers(0, 5), st.data())
def test_all_stages_of_methods_that_share_read_one_version_of_a_microbatch(
    name: str, stages: int, batch: int, extra_batches: int, data: Any
) -> None:
    method = resolve_method(name)
    accumulate = batch if name != "pipedream_2bw" else max(batch, stages)
    count = accumulate * (extra_batches + 2)
    drains = data.draw(
        st.lists(st.integers(1, extra_batches + 1).map(lambda k: k * accumulate), unique=True).map(
            sorted
        )
    )
    forward, backward = VersionTable(
        make_schedule(method, stages, count, accumulate, drains), method
    ).window(0, count)
    assert (forward == forward[0]).all() and (backward == forward).all()


@pytest.mark.parametrize(
    "name", [n for n, m in METHODS.items() if not m.one_version and m.is_pipeline]
)
def test_stages_of_other_methods_read_different_versions(name: str) -> None:
    method = resolve_method(name)
    forward, _ = VersionTable(make_schedule(method, 4, 40, 1), method).window(0, 40)
    assert (forward != forward[0]).any()


# ---- stages of a shared weight


def test_the_first_stage_that_uses_a_weight_holds_it_whatever_its_name() -> None:
    """Its name is that of the first module of the model that has it, here of the module that
    runs last."""

    head, embedding = (nn.Linear(4, 4, bias=False) for _ in range(2))
    head.weight = embedding.weight
    middle = begin_stage(nn.Linear(4, 4))
    parts = {"head": begin_stage(head), "middle": middle, "embedding": embedding}
    model = Composed(lambda m, x: m.head(m.middle(m.embedding(x))), **parts)
    part = partition(model, torch.randn(2, 4), one_stage=None)
    assert [list(stage.parameters) for stage in part.stages] == [
        ["head.weight"],
        ["middle.weight", "middle.bias"],
        [],
    ]
    assert {name: [tuple(use) for use in uses] for name, uses in part.shared.items()} == {
        "head.weight": [(0, "embedding.weight", False), (2, "head.weight", False)]
    }
    assert [part.list_replicas(s) for s in range(3)] == [[], [], ["head.weight"]]


def test_a_module_that_runs_on_two_stages_uses_its_weights_on_both() -> None:
    part = partition(make_repeating_model(), torch.randn(2, 12), one_stage=None)
    names = [["0.weight", "0.bias"], ["1.weight", "1.bias"], [], ["4.weight", "4.bias"]]
    assert [list(stage.parameters) for stage in part.stages] == names
    assert part.list_replicas(2) == ["1.weight", "1.bias"]


def test_a_count_divides_a_shared_weight_where_it_may() -> None:
    model, x = join_stages(TIED["tied"]()), torch.randn(3, 12)
    part = partition(model, x, 3, one_stage=None)
    assert len(part) == 3 and part.list_replicas(2) == ["1.0.weight"]
    assert not partition(model, x, 3).shared


# ---- refusals


@pytest.mark.parametrize("name", [n for n, m in METHODS.items() if not m.one_version])
def test_other_methods_refuse_a_shared_weight_with_reason_and_remedy(name: str) -> None:
    (fault,) = list_faults(
        partition,
        join_stages(TIED["tied"]()),
        torch.randn(3, 12),
        one_stage=resolve_method(name).one_stage_reason,
    )
    beginning = "stages: 1.0.weight on stage 1 and 3.0.weight on stage 3 are one shared weight: both uses must be in one stage: "
    assert fault.startswith(f"{beginning}with {name} ")
    remedies = (
        ": cut elsewhere, untie them, or use method naive, gpipe, pipedream_flush, pipedream_2bw"
    )
    remedies += ", method_args: {tied: holder}" if METHODS[name].can_share_weights else ""
    assert fault.endswith(remedies)
    reasons = {
        "local_sgd": "replicas step by themselves",
        "randomized_pipedream": "single stages step by themselves",
    }
    why = (
        "two gradients" if METHODS[name].structure is not None else reasons.get(name, "two delays")
    )
    assert why in fault


# ---- weights


@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
@pytest.mark.parametrize("model", list(TIED))
@pytest.mark.parametrize("method", SHARING)
@pytest.mark.parametrize("accumulate, drains", [(5, ()), (7, (21, 28)), (1, ())])
def test_weights_equal_those_of_the_literal_replay(
    method: str, model: str, optimizer: str, accumulate: int, drains: Tuple[int, ...]
) -> None:
    resolved = resolve_method(method)
    if method == "pipedream_2bw":
        accumulate = max(accumulate, 5)
    stages, microbatches = make_seeded_stages(model), draw_microbatches(accumulate * 8)
    twin, unsplit = separate_replicas(copy.deepcopy(stages), model), join_stages(stages)
    emulator = train_on_emulator(
        unsplit, resolved, accumulate, microbatches, OPTIMIZERS[optimizer], drains
    )
    replayed = train_literally(
        twin, resolved, accumulate, microbatches, OPTIMIZERS[optimizer], drains, ties=TIES[model]
    )
    states = emulator.work.rules.optimizer.state
    parameters = [p for s, stage in enumerate(replayed) for p in stage.parameters.values()]
    for (name, ours), theirs in zip(unsplit.named_parameters(), parameters):
        assert torch.equal(ours, theirs), name
        (counterpart,) = [
            stage.optimizer.state[theirs]
            for stage in replayed
            if stage.optimizer and theirs in stage.optimizer.state
        ]
        assert all(
            torch.equal(states[ours][entry], value) for entry, value in counterpart.items()
        ), name
    assert len(parameters) == len(list(unsplit.parameters()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model", [*TIED, "twice"])
@pytest.mark.parametrize("method", FLUSHING)
def test_methods_that_flush_are_plain_training(method: str, model: str, dtype: torch.dtype) -> None:
    unsplit = (
        make_repeating_model().to(dtype)
        if model == "twice"
        else join_stages(make_seeded_stages(model, dtype))
    )
    data, twin = draw_microbatches(24, dtype=dtype), copy.deepcopy(unsplit)
    train_on_emulator(unsplit, resolve_method(method), 4, data, OPTIMIZERS["sgd"])
    train_in_plain_loop(twin, data, 4, OPTIMIZERS["sgd"])
    for (name, ours), theirs in zip(unsplit.named_parameters(), twin.parameters()):
        assert torch.equal(ours, theirs), name


def test_the_pieces_self_check_adds_gradients_as_autograd_does() -> None:
    """One piece uses the weight twice and the next piece once: the sum of two gradients does not
    occur in the whole model."""
    model, x = (
        join_stages(make_seeded_stages("thrice", torch.float32)),
        draw_microbatches(1, 16, torch.float32)[0][0],
    )
    verify_pieces(model, cut_model(model, ["4"], x), x)


# ---- one weight of several stages of an asynchronous method: method_args {tied: holder}

HOLDING: Dict[str, Dict[str, Any]] = {
    "pipedream": {},
    "pipelined_backprop": {"stash": True},
    "pipemare": {"stash": True, "t1": {"anneal_updates": 20}},
}


def draw_tied_tokens(k: int) -> Tuple[torch.Tensor, torch.Tensor]:
    x = torch.randint(0, 11, (6, 4), generator=torch.Generator().manual_seed(k))
    return x, (x * 3 + 1) % 11


class TiedNet(nn.Module):
    """An embedding, three layers, and a head that is the embedding; four stages."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedding(x)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(x).transpose(1, 2)


def make_tied_pipeline(method: str, **keys: Any) -> ipu_pipe.Pipeline:
    torch.manual_seed(0)
    net = TiedNet().double()
    sgd = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    stages = ["layers.0", "layers.1", "head"]
    args = {"tied": "holder", **HOLDING[method]}
    return ipu_pipe.Pipeline(
        net, cross_entropy, sgd, method, stages=stages, microbatches=1, method_args=args, **keys
    )


def train_holding(method: str, **keys: Any) -> Dict[str, torch.Tensor]:
    """Train with a drain in between, and return the weights."""
    with make_tied_pipeline(method, **keys) as pipe:
        for k in range(12):
            pipe.step(*draw_tied_tokens(k))
            if k == 7:
                pipe.drain()
        state = pipe.state_dict()
    return dict(state.get("model", {}))


@pytest.mark.parametrize("method", ["pipedream", "pipelined_backprop"])
def test_a_tied_weight_has_the_version_of_its_first_stage_in_all_uses(method: str) -> None:
    """By hand: each stage reads versions of its own, and the tied weight those of stage 0."""
    pipe = make_tied_pipeline(method)
    for k in range(12):
        pipe.step(*draw_tied_tokens(k))
    versions = pipe.versions.forward(0, 12)
    pipe.drain()
    torch.manual_seed(0)
    net = TiedNet().double()
    named = dict(net.named_parameters())
    history = [{name: p.detach().clone() for name, p in named.items()}]
    momenta = {name: torch.zeros_like(p) for name, p in named.items()}
    for m in range(12):
        for name, p in named.items():
            stage = 0 if "layers" not in name else min(int(name.split(".")[1]) + 1, 2)
            p.data = history[int(versions[stage, m])][name].clone()
            p.grad = None
        x, y = draw_tied_tokens(m)
        cross_entropy(net(x), y).backward()
        newest = {}
        for name, p in named.items():
            momenta[name] = 0.9 * momenta[name] + p.grad
            newest[name] = history[-1][name] - 0.1 * momenta[name]
        history.append(newest)
    trained = dict(pipe.model.named_parameters())
    assert int(versions[0, 11]) < int(versions[3, 11])
    for name, value in history[-1].items():
        assert float((trained[name] - value).abs().max()) < 1e-12, name


def train_holding_on_ranks(rank: int, folder: Path) -> None:
    for method in HOLDING:
        weights = train_holding(method, backend="distributed", deadline=60)
        if rank == 0:
            torch.save(weights, folder / f"{method}.pt")


@needs_processes
@pytest.mark.slow
def test_processes_hold_tied_weights_as_the_emulator(tmp_path: Path) -> None:
    run_in_group(4, train_holding_on_ranks, tmp_path)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for method in HOLDING:
        expected = train_holding(method)
        actual = torch.load(tmp_path / f"{method}.pt")
        assert all(torch.equal(value, actual[name]) for name, value in expected.items()), method
    torch.set_num_threads(threads)


@pytest.mark.parametrize("method", ["pipemare", "spectrain", "local_greedy", "local_sgd"])
def test_methods_whose_passes_read_several_versions_have_no_holder(method: str) -> None:
    (fault,) = list_faults(resolve_method, method, {"tied": "holder"})
    assert fault.startswith(f"method_args.tied: holder: with {method} ")


def test_a_stage_copies_weights_of_one_holder_only() -> None:
    net = TiedNet()
    net.layers[2].weight = net.layers[0].weight
    x = draw_tied_tokens(0)[0]
    # the embedding and layers.0 are of two stages, the head and layers.2 of one
    cut = cut_model(net, ["layers.0", "layers.2"], x)
    method = resolve_method("pipedream", {"tied": "holder"})
    effects = verify_pieces(net, cut, x)
    (fault,) = list_faults(require_separable, net, method, cut, (0, 1, 2), effects)
    assert fault.startswith("model: stage 2 uses weights that stages 0 and 1 hold")
