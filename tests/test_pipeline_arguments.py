"""Test arguments and behaviours of `Pipeline` one by one: the effect of each on the emulator,
and the same effect on two ranks."""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import time
from pathlib import Path
from typing import Any, Dict, List, Tuple

import pytest
import torch
import torch.distributed as dist

import ipu_pipe
from ipu_pipe.errors import BadInput, Divergence, RunFault
from ipu_pipe.pipeline.arguments import require_current_gpu
from tests.support.loops import (
    STAGES,
    Case,
    Loop,
    make_loop_batch,
    make_perceptron,
    take_share,
)
from tests.support.processes import run_in_group
from tests.support.runs import assert_same, needs_processes

ON_TWO = {"backend": "distributed", "deadline": 60}
PIPEDREAM = Case("pipedream", 2, stages=["5"])
GREEDY = Case("local_greedy", 2, stages=["5"])
REPLICAS = Case("pipedream_flush", 4, replicas=2)


def make_default_pipeline(**keys: Any) -> ipu_pipe.Pipeline:
    return Loop(Case("gpipe"), **keys).pipe


# ---- device and deadline


def test_the_device_is_the_models_or_the_argument() -> None:
    for arguments in ({}, {"device": torch.device("cpu")}, {"backend_args": {"device": "cpu"}}):
        backend = make_default_pipeline(deadline=20, **arguments)._config.backend
        assert (backend.device, backend.deadline) == ("cpu", 20)
    assert make_default_pipeline()._config.backend.deadline == 300
    assert make_default_pipeline(backend_args={"deadline": 7})._config.backend.deadline == 7


def test_a_gpu_that_is_not_the_current_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    for right in (None, "cpu", "cuda", "cuda:0"):
        require_current_gpu(make_perceptron(), right)
    with pytest.raises(BadInput, match="^device: cuda:1: the current one is cuda:0: "):
        require_current_gpu(make_perceptron(), torch.device("cuda:1"))


def call_late_within_the_deadline(rank: int, folder: Path) -> None:
    loop = Loop(PIPEDREAM, backend="distributed", deadline=60)
    for k in range(2):
        # long enough for the place to be published, and taken back
        time.sleep(1.5 if rank == k % 2 else 0)
        loop.run(k, k + 1, drains=False)
    assert loop.close() is loop.model


@pytest.mark.slow
@needs_processes
def test_a_rank_may_come_late_to_a_call(tmp_path: Path) -> None:
    run_in_group(2, call_late_within_the_deadline, tmp_path)


# ---- the process group


def pass_process_groups(rank: int, folder: Path) -> None:
    everyone = dist.new_group([0, 1])
    alone = [dist.new_group([r]) for r in range(2)]
    # on its own each rank is a pipeline
    for group in (everyone, alone[rank]):
        loop = Loop(PIPEDREAM, process_group=group, **ON_TWO)
        loop.run(0, 3)
        loop.close()
    for group, kind in ((alone[1 - rank], "a group without this rank"), ("gloo", "a str")):
        with pytest.raises(BadInput, match=f"^process_group: {kind}: "):
            Loop(PIPEDREAM, process_group=group, **ON_TWO)
    dist.get_backend_config = lambda group=None: "cuda:nccl"
    with pytest.raises(BadInput, match="the process group .cuda:nccl. has no backend for the CPU"):
        Loop(PIPEDREAM, **ON_TWO)


@needs_processes
def test_a_process_group_has_this_rank(tmp_path: Path) -> None:
    run_in_group(2, pass_process_groups, tmp_path)


# ---- settings of the auxiliary heads


def train_heads(**keys: Any) -> Tuple[Dict[str, Any], Dict[str, Any]]:
    """Return the states of a loop with local heads after one update and after four."""
    loop = Loop(GREEDY, **keys)
    loop.run(0, 1)
    first = loop.pipe.state_dict()
    loop.run(1, 4)
    last = loop.pipe.state_dict()
    loop.close()
    return first, last


def test_heads_have_settings_of_their_own() -> None:

    def get_head(state: Dict[str, Any]) -> torch.Tensor:
        return torch.cat([v.flatten() for name, v in state["model"].items() if "head" in name])

    same, default = train_heads(heads={"lr": 0.05}), train_heads()
    # the first update has the first group's rate in both
    assert_same(same[0]["model"], default[0]["model"])
    # later the scheduler changes the group's, and not the heads'
    assert not torch.equal(get_head(same[1]), get_head(default[1]))
    first, last = train_heads(heads={"lr": 0.0, "weight_decay": 0.0})
    assert torch.equal(get_head(first), get_head(last))
    # settings that are left out are the group's
    assert set(default[1]["optimizer"]) == set(last["optimizer"])


# ---- a state in parts


SHARDED = {
    "local_greedy": GREEDY,
    "replicas": REPLICAS,
    "zbv": Case("zbv", 4, stages=STAGES),
    "delayed": Case("pipedream", 2, stages=["5"], clip=(0.1, "delayed_global")),
    "local_sgd": Case("local_sgd", args={"replicas": 3, "local_steps": 2}, stages=["5"]),
}


def resume_from_parts(rank: int, folder: Path) -> None:
    for name, case in SHARDED.items():
        loop = Loop(case, share=take_share, **ON_TWO)
        loop.run(0, 4)
        whole, part = loop.pipe.state_dict(), loop.pipe.state_dict(sharded=True)
        assert bool(whole) == (rank == 0) and part["layout"]["rank"] == rank
        if rank == 0 and name == "delayed":
            assert set(part["model"]) < set(whole["model"])
        torch.save(part, folder / f"{name}-{rank}.pt")
        scheduler = copy.deepcopy(loop.scheduler.state_dict())
        loop.run(4, 8)
        expected = copy.deepcopy(loop.close().state_dict())
        part = torch.load(folder / f"{name}-{rank}.pt", weights_only=True)
        for used in (False, True):
            again = Loop(case, share=take_share, **ON_TWO)
            if used:
                again.run(0, 2)
            again.load(part, scheduler)
            again.run(4, 8)
            assert_same(expected, again.close().state_dict())


@pytest.mark.slow
@needs_processes
def test_each_rank_goes_on_from_its_own_part(tmp_path: Path) -> None:
    run_in_group(2, resume_from_parts, tmp_path)


def load_a_wrong_part(rank: int, folder: Path) -> None:
    loop = Loop(PIPEDREAM, **ON_TWO)
    loop.run(0, 2)
    part = loop.pipe.state_dict(sharded=True)
    parts = [None, None]
    dist.all_gather_object(parts, part)
    with pytest.raises(BadInput, match="^load_state_dict: layout .* a part fits its own rank"):
        loop.pipe.load_state_dict(parts[1 - rank])
    loop.close()
    other = Loop(PIPEDREAM._replace(stages=["8"]), **ON_TWO)
    other.pipe.load_state_dict(part)
    with pytest.raises(BadInput, match="^load_state_dict: layout "):
        other.run(2, 3)
    other.pipe.abort()


@needs_processes
def test_a_part_of_another_rank_or_layout_is_refused(tmp_path: Path) -> None:
    run_in_group(2, load_a_wrong_part, tmp_path)


def test_one_process_has_all_of_a_sharded_state() -> None:
    loop = Loop(PIPEDREAM)
    loop.run(0, 3)
    whole, part = loop.pipe.state_dict(), loop.pipe.state_dict(sharded=True)
    assert whole.keys() == part.keys()
    for key in ("model", "optimizer"):
        assert_same(whole[key], part[key])
    # parts that were joined have all weights, and fit any ranks
    part["layout"] = {"rank": 0}
    again, other = Loop(PIPEDREAM), Loop(PIPEDREAM)
    again.pipe.load_state_dict(part)
    again.run(3, 4)
    part["model"].popitem()
    other.pipe.load_state_dict(part)
    with pytest.raises(BadInput, match="^load_state_dict: layout "):
        other.run(3, 4)


# ---- the whole model


def change_on_rank_0(rank: int, folder: Path) -> None:
    loop = Loop(PIPEDREAM, **ON_TWO)
    loop.run(0, 1)
    refused = pytest.raises(RuntimeError, match="^whole_model: .* were changed on one rank")
    with refused if rank == 0 else contextlib.nullcontext(), loop.pipe.whole_model() as model:
        if model is not None:
            next(model.parameters()).data.zero_()
    # the stage of rank 0 has the change, and other stages have not
    with pytest.raises(RunFault, match="an earlier call has failed" if rank == 0 else "rank 0"):
        loop.run(1, 2)
    loop.pipe.abort()


@pytest.mark.slow
@needs_processes
def test_weights_that_one_rank_has_changed_are_not_trained_on(tmp_path: Path) -> None:
    run_in_group(2, change_on_rank_0, tmp_path)


# ---- reduction, allow_nonfinite, stages_per_device


def train_into_nan(rank: int, folder: Path, **keys: Any) -> None:
    """Train until batch 1, whose loss is not finite, ends the run, or does not."""
    for allowed in (False, True):
        loop = Loop(PIPEDREAM, allow_nonfinite=allowed, **keys)
        outcomes: List[str] = []
        for k in range(6):
            x, y = make_loop_batch(loop.case, k)
            try:
                outcomes.append(str(loop.pipe.step(x * float("nan") if k == 1 else x, y)))
            except Divergence as error:
                outcomes.append(str(error).partition(":")[0])
                break
        loop.pipe.abort()
        assert "loss=nan" in str(outcomes) if allowed else outcomes[-1].startswith("update 1 ")
        file = folder / f"{allowed}.json"
        # the emulator's, which comes first
        if not file.exists():
            file.write_text(json.dumps(outcomes))
        assert json.loads(file.read_text()) == outcomes


@needs_processes
def test_a_loss_that_is_not_finite_is_allowed_or_ends_all_ranks(tmp_path: Path) -> None:
    train_into_nan(0, tmp_path)
    run_in_group(2, functools.partial(train_into_nan, **ON_TWO), tmp_path)
