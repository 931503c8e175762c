"""Check that a weight of several stages is trained as in plain PyTorch, stored once, or refused
with the reason."""

from __future__ import annotations

import copy
from typing import Any, List, Tuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ipu_pipe.cut.cutting import cut_model
from ipu_pipe.cut.verification import verify_pieces
from ipu_pipe.model.stages import begin_stage, partition
from ipu_pipe.schedule.methods import METHODS, resolve_method
from ipu_pipe.schedule.timelines import make_schedule
from ipu_pipe.schedule.versions import VersionTable
from tests.slot_simulation import PLAYED
from tests.staged_models import TIED, TIES, draw_microbatches, join_stages, make_repeating_model
from tests.support.models import Composed
from tests.support.runs import list_faults
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
    assert fault.endswith(
        ": cut elsewhere, untie them, or use method naive, gpipe, pipedream_flush, pipedream_2bw"
    )
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
