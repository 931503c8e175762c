"""Test DiLoCo and Streaming DiLoCo: torchft's numbers, a plain loop, resumed runs, refusals."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, Dict, List

import pytest
import torch
from torch import nn

from ipu_pipe.backends.emulator.replay import Emulator
from ipu_pipe.model.stages import begin_stage, partition
from ipu_pipe.replay.replicas import IndependentReplicas
from ipu_pipe.replay.work import Work
from ipu_pipe.report.memory import build_memory_table
from ipu_pipe.run.build import build
from ipu_pipe.run.train import train
from ipu_pipe.schedule.methods import Outer, resolve_method
from ipu_pipe.schedule.timelines import make_schedule
from ipu_pipe.schedule.versions import VersionTable
from ipu_pipe.update.apply import UpdateRules, choose_rules
from ipu_pipe.update.optimizer import make_groups
from tests.staged_models import draw_microbatches, join_stages
from tests.support.models import Composed
from tests.support.runs import assert_same_weights, list_faults
from tests.test_asynchrony import (
    assert_same_stages,
    cross_entropy,
    make_float64_stages,
    train_stages_on_emulator,
)
from tests.test_asynchrony_runs import ROOT, make_digits_config

OUTER = {
    "name": "sgd",
    "lr": 0.7,
    "momentum": 0.9,
    "nesterov": True,
    "fragments": 1,
    "offset": 0,
    "delay": 0,
    "mix": 0.0,
}

# Weights before each local step that pytorch/torchft records for two fragments of one weight each, at commit 73dafea in
# test_fixtures/torchft.diloco_regression_test.DiLoCoMockedUpdateTest.*.json: two replicas, gradients of 2, first weights 1,
# plain SGD within at rate 1 and outside at rate 2, synchronization every 6 steps. By (delay, mix), of both fragments.
TORCHFT = {
    (0, 0.0): (
        [1, -1, -3, -11, -13, -15, -17, -19, -21, -35, -37, -39, -41, -43, -45, -59, -61, -63, -65, -67, -69, -83],
        [1, -1, -3, -5, -7, -9, -23, -25, -27, -29, -31, -33, -47, -49, -51, -53, -55, -57, -71, -73, -75, -77],
    ),
    (0, 0.5): (
        [1, -1, -3, -8, -10, -12, -14, -16, -18, -24.5, -26.5, -28.5, -30.5, -32.5, -34.5, -40.25],
        [1, -1, -3, -5, -7, -9, -17, -19, -21, -23, -25, -27, -32, -34, -36, -38],
    ),
    (0, 1.0): ([1 - 2 * step for step in range(16)],) * 2,
    (1, 0.0): (
        [1, -1, -3, -7, -9, -11, -13, -15, -17, -27, -29, -31, -33, -35, -37, -47],
        [1, -1, -3, -5, -7, -9, -19, -21, -23, -25, -27, -29, -39, -41, -43, -45],
    ),
    (1, 0.5): (
        [1, -1, -3, -6, -8, -10, -12, -14, -16, -21.5, -23.5, -25.5, -27.5, -29.5, -31.5, -35.75],
        [1, -1, -3, -5, -7, -9, -15, -17, -19, -21, -23, -25, -29, -31, -33, -35],
    ),
    (1, 1.0): ([1 - 2 * step for step in range(16)],) * 2,
}  # fmt: skip


def make_doubling_layer() -> nn.Module:
    """Return a layer x + 2 w, of which the gradient of w is 2."""
    return Composed(lambda m, x: x + 2 * m.w, w=nn.Parameter(torch.ones(1)))


@pytest.mark.parametrize("delay, mix", list(TORCHFT))
def test_weights_are_those_that_torchft_recorded(delay: int, mix: float) -> None:
    """The first row covers the seventh file, too: its replica that does not fail continues in the
    same way for six steps."""
    by_fragment = TORCHFT[delay, mix]
    steps = max(map(len, by_fragment)) - 1
    model = nn.Sequential(make_doubling_layer(), begin_stage(make_doubling_layer()))
    batch = (torch.zeros(1, 1), torch.zeros(1))
    outer = {
        **OUTER,
        "lr": 2.0,
        "momentum": 0.0,
        "nesterov": False,
        "fragments": 2,
        "delay": delay,
        "mix": mix,
    }
    method = resolve_method("local_sgd", {"replicas": 2, "local_steps": 6, "outer": outer})
    part = partition(model, batch[0])
    schedule = make_schedule(method, 2, 2 * steps, 2)
    table = VersionTable(schedule, method)
    optimizer = torch.optim.SGD(make_groups(model, part), lr=1.0)
    rules = UpdateRules(choose_rules({}, method, table.rule_lag(), 1), optimizer, lambda k: 1.0)
    emulator = Emulator(
        Work(lambda output, y: output.mean(), table, rules), model, part, batch, 0, 2
    )
    history = [[1.0, 1.0]]
    for _ in range(steps - steps % 3):
        emulator.step([batch] * 2)
        history.append([float(module.w.detach()) for module in model])
    for fragment, recorded in enumerate(by_fragment):
        assert [weights[fragment] for weights in history][: len(recorded)] == recorded[
            : len(history)
        ]


ARGUMENTS: List[Dict[str, Any]] = [
    {},
    {"delay": 1, "mix": 0.25, "nesterov": False},
    {"fragments": 2, "offset": 1, "delay": 1, "mix": 0.5},
    {"fragments": "per_stage"},
]


@pytest.mark.parametrize("outer", ARGUMENTS, ids=str)
@pytest.mark.parametrize("drains", [[], [5]])
def test_the_weights_are_those_of_the_papers_loop(outer: Dict[str, Any], drains: List[int]) -> None:
    """Replicas have their own optimizers; torch.optim.SGD steps a fragment of the shared weights
    when a round ends."""
    R, steps, data = 3, 18, draw_microbatches(54)
    settings: Dict[str, Any] = {**OUTER, **outer}
    ours, first = make_float64_stages("mlp"), make_float64_stages("mlp")
    P = len(first)
    F = P if settings["fragments"] == "per_stage" else settings["fragments"]
    H = 2 * F if F > 1 else 3
    method = resolve_method("local_sgd", {"replicas": R, "local_steps": H, "outer": settings})
    train_stages_on_emulator(ours, method, steps, data, [d * R for d in drains])
    nets = [copy.deepcopy(first) for _ in range(R)]
    inner = [
        torch.optim.SGD(join_stages(net).parameters(), lr=0.2, momentum=0.9, weight_decay=1e-3)
        for net in nets
    ]
    shared = [[nn.Parameter(p.detach().clone()) for p in stage.parameters()] for stage in first]
    step_outer = torch.optim.SGD(
        [p for stage in shared for p in stage],
        settings["lr"],
        settings["momentum"],
        nesterov=settings["nesterov"],
    )
    begin = 0
    while begin < steps:
        end = min([begin + H // F, steps, *[d for d in drains if d > begin]])
        turn = ((end - 1) // (H // F) + settings["offset"]) % F
        stages = [s for s in range(P) if s * F // P == turn]
        deltas: Dict[int, List[torch.Tensor]] = {}
        for h in range(begin, end):
            for r in range(R):
                inner[r].param_groups[0]["lr"] = 0.2 / (h + 1)
                x, y = data[h * R + r]
                inner[r].zero_grad()
                cross_entropy(join_stages(nets[r])(x), y).backward()
                inner[r].step()
                if h == max(end - 1 - settings["delay"], begin - 1) or (
                    h == end - 1 and r not in deltas
                ):
                    deltas[r] = [
                        a.detach() - b.detach()
                        for s in stages
                        for a, b in zip(shared[s], nets[r][s].parameters())
                    ]
        step_outer.zero_grad()
        for i, p in enumerate([p for s in stages for p in shared[s]]):
            p.grad = (deltas[0][i] + deltas[1][i] + deltas[2][i]) / R
        step_outer.step()
        for net in nets:
            for s in stages:
                for p, new in zip(net[s].parameters(), shared[s]):
                    p.data = torch.lerp(new.detach(), p.data, settings["mix"])
        begin = end
    assert_same_stages(ours, nets[0])


@pytest.mark.parametrize("outer", [{}, {"fragments": 2, "delay": 1, "mix": 0.5}], ids=str)
@pytest.mark.parametrize(
    "optimizer",
    [{"lr": 0.02, "momentum": 0.9}, {"name": "adamw", "lr": 0.01}],
    ids=["sgd", "adamw"],
)
def test_a_resumed_run_ends_with_the_same_numbers(
    outer: Dict[str, Any],
    optimizer: Dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(ROOT)
    chosen = make_digits_config(
        "local_sgd",
        {"replicas": 3, "local_steps": 4, "outer": outer},
        steps=12,
        optimizer=optimizer,
    )
    complete = train(chosen, tmp_path / "whole", quiet=True)
    train(chosen, tmp_path / "again", quiet=True)
    resumed_report = train(chosen, tmp_path / "again", resume_from=4, quiet=True)
    assert resumed_report["final"] == complete["final"]
    assert_same_weights(tmp_path / "whole", tmp_path / "again")
    # three replicas' moments, the outer optimizer's weights and velocity; Adam's step counts are not planned
    job = build(chosen)
    moments, counts = (
        (2, 3 * 4 * len(list(job.model.parameters()))) if "name" in optimizer else (1, 0)
    )
    planned = sum(row["optimizer_bytes"] for row in build_memory_table(job))
    assert planned == (3 * moments + 2) * 4 * complete["model"]["parameters"]
    assert sum(stage["optimizer_bytes"] for stage in complete["stages"]) == planned + counts


def test_an_optimizers_own_entries_stay() -> None:
    """Story: `outer_velocity` of a user's optimizer was deleted at each checkpoint."""
    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight])
    optimizer.state[weight].update({"outer_velocity": torch.ones(1), "replicas": 2})
    with IndependentReplicas(nn.Module(), [weight], optimizer, 2, Outer(), [0]).export_replicas():
        assert {"replica1.weight", "replica1.replicas", "outer.weight"} < set(
            optimizer.state[weight]
        )
    assert list(optimizer.state[weight]) == ["outer_velocity", "replicas"]


@pytest.mark.parametrize("method, args, keys, place", [
    ("local_sgd", {"local_steps": 4, "outer": {}}, {"steps": 9}, "method_args.outer: "),
    ("local_sgd", {"local_steps": 4, "outer": {"fragments": 3}}, {"steps": 8}, "method_args.local_steps: 4: "),
    ("local_sgd", {"local_steps": 9, "outer": {"fragments": 9}}, {"steps": 9}, "method_args.outer.fragments: 9: "),
    ("local_sgd", {"local_steps": 5, "outer": {"fragments": 2, "delay": 2}}, {"steps": 8}, "method_args.local_steps: 5: "),
    ("local_sgd", {"local_steps": 4, "outer": {"fragments": 2, "delay": 2}}, {"steps": 8}, "method_args.outer.delay: 2: "),
    ("local_sgd", {"local_steps": 4, "outer": {"offset": 1}}, {"steps": 8}, "method_args.outer.offset: 1: "),
    ("local_sgd", {"outer": {"mix": 1.5}}, {}, "method_args.outer.mix: 1.5: "),
    ("local_sgd", {"outer": {"momentum": 0}}, {}, "method_args.outer.nesterov: "),
    ("local_sgd", {"outer": {"fragments": 0}}, {}, "method_args.outer.fragments: 0: "),
    ("pipedream", {"outer": {}}, {}, "method_args.outer: "),
])  # fmt: skip
def test_impossible_outer_settings_are_refused(
    method: str, args: Any, keys: Any, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    faults = list_faults(
        lambda: train(make_digits_config(method, args, **keys), tmp_path / "run", quiet=True)
    )
    assert any(place in fault for fault in faults), faults
    assert not (tmp_path / "run").exists()
