"""Check parameter groups by stage, weight decay exceptions, clipping, and the state of
optimizers."""

from __future__ import annotations

from typing import Any, Dict

import pytest
import torch
from torch import nn

from ipu_pipe.errors import BadInput
from ipu_pipe.model.stages import begin_stage, partition
from ipu_pipe.schedule.actions import Kind
from ipu_pipe.schedule.methods import resolve_method
from ipu_pipe.schedule.timelines import make_schedule
from ipu_pipe.update import clipping
from ipu_pipe.update import optimizer as update
from ipu_pipe.update.clipping import DelayedGlobalNorm
from ipu_pipe.update.optimizer import count_moments, import_state, list_kinds, make_groups


def make_staged_model() -> Any:
    model = nn.Sequential(
        nn.Linear(4, 4), nn.LayerNorm(4), begin_stage(nn.Linear(4, 4)), begin_stage(nn.ReLU())
    )
    return model, partition(model, torch.randn(2, 4))


def test_a_group_a_stage_and_one_more_without_decay() -> None:
    model, part = make_staged_model()
    groups = make_groups(model, part)
    assert [(g["stage"], len(g["params"])) for g in groups] == [(0, 4), (1, 2)]
    groups = make_groups(model, part, "norms_and_biases")
    assert [(g["stage"], len(g["params"]), g.get("weight_decay")) for g in groups] == [
        (0, 1, None), (0, 3, 0.0), (1, 1, None), (1, 1, 0.0)
    ]  # fmt: skip
    groups = make_groups(model, part, ["2.*"])
    assert [(g["stage"], g.get("weight_decay")) for g in groups] == [(0, None), (1, 0.0)]


def test_groups_without_parameters_are_refused() -> None:
    model, part = make_staged_model()
    with pytest.raises(BadInput, match=r"optimizer.no_decay: 7\.\*: matches no parameter"):
        make_groups(model, part, ["7.*"])
    with pytest.raises(BadInput, match="nothing to train"):
        make_groups(model.requires_grad_(False), part)


def clip_gradients(optimizer: torch.optim.Optimizer, norm: float, scope: str) -> None:
    """Clip the gradients as an update of a run does, with all stages in one process."""
    stages = {group["stage"]: group["params"] for group in optimizer.param_groups}
    clipping.GradientClipping(
        (norm, scope), stages, make_schedule(resolve_method("gpipe"), 2, 4, 2)
    ).clip(0)


@pytest.mark.parametrize("scope", ["global", "stage"])
def test_clipping_bounds_the_norm_of_its_scope(scope: str) -> None:
    model, part = make_staged_model()
    optimizer = torch.optim.SGD(make_groups(model, part), lr=0.1)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    model[0].weight.grad.mul_(10)
    unclipped = [p.grad.clone() for p in model.parameters()]
    clip_gradients(optimizer, 1000.0, scope)
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), unclipped))
    clip_gradients(optimizer, 2.0, scope)
    norms = [
        torch.cat([p.grad.flatten() for p in g["params"]]).norm().item()
        for g in optimizer.param_groups
    ]
    if scope == "stage":
        assert norms == pytest.approx([2.0, 2.0], rel=1e-4)
    else:
        assert sum(n * n for n in norms) ** 0.5 == pytest.approx(2.0, rel=1e-4) and norms[1] < 0.5


@pytest.mark.parametrize("scope", ["global", "stage"])
def test_clipping_takes_the_kernels_that_a_process_takes(
    scope: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process of a stage knows only its own gradients' norms; torch's clipping takes all
    gradients at once on a GPU."""
    model, part = make_staged_model()
    optimizer = torch.optim.SGD(make_groups(model, part), lr=0.1)
    stages = {group["stage"]: group["params"] for group in optimizer.param_groups}
    model(torch.randn(2, 4)).square().sum().backward()
    gradients = {p: p.grad.clone() for p in model.parameters()}
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", None)
    clip_gradients(optimizer, 0.5, scope)
    clipped = {p: p.grad.clone() for p in model.parameters()}
    for p, gradient in gradients.items():
        p.grad = gradient
    norms_by_stage = {
        s: clipping.compute_gradient_norms(parameters) for s, parameters in stages.items()
    }
    all_norms = [norm for norms in norms_by_stage.values() for norm in norms]
    for s, parameters in stages.items():
        clipping.clip_to_norm(0.5, parameters, norms_by_stage[s] if scope == "stage" else all_norms)
    assert all(torch.equal(p.grad, clipped[p]) for p in model.parameters())


@pytest.mark.parametrize(
    "options, place", [({}, "cpu"), ({"fused": True}, "meta"), ({"capturable": True}, "meta")]
)
def test_step_counts_resume_where_the_optimizer_keeps_them(options: Any, place: str) -> None:
    """Fused and capturable optimizers keep their counts on the parameters' device; the meta
    device stands in for it."""
    weight = nn.Parameter(torch.zeros(2, device="meta"))
    optimizer = torch.optim.Adam([weight], lr=0.1)
    optimizer.param_groups[0].update(options)
    saved = {
        "w/step": torch.tensor(3.0),
        "w/exp_avg": torch.zeros(2),
        "w/replica1.step": torch.tensor(3.0),
    }
    import_state(optimizer, {weight: "w"}, saved, {})
    state = optimizer.state[weight]
    assert (
        state["step"].device.type == state["replica1.step"].device.type == place
        and state["exp_avg"].device.type == "meta"
    )


def test_unknown_optimizers_are_refused() -> None:
    with pytest.raises(BadInput, match="optimizer.name: lion: must be one of sgd, adam, adamw"):
        update.make_factory_by_name("lion")


def test_a_delayed_global_norm_is_the_newest_that_all_stages_have() -> None:
    """PipeDream on 4 stages makes update k in slot 7 + 2k on stage 0 and in slot 4 + 2k on stage
    3: two updates must lie between."""
    schedule = make_schedule(resolve_method("pipedream"), 4, 40, 1, [20])
    delayed = DelayedGlobalNorm(1.0, schedule)
    slots = schedule.slots(Kind.UPDATE, 0, 20)
    assert delayed.lag == 2
    for k in range(20):
        complete_updates = [j for j in range(k) if slots[:, j].max() < slots[:, k].min()]
        assert delayed.get_source(k) == (complete_updates[-1] if complete_updates else None)
    assert (
        delayed.get_source(20) is None
        and delayed.get_source(21) is None
        and delayed.get_source(22) == 20
    )
    assert [delayed.is_needed(k) for k in (17, 18, 19, 20)] == [True, False, False, True]
    p = torch.nn.Parameter(torch.zeros(2))
    p.grad = torch.tensor([3.0, 4.0])
    delayed.remember(5, [6.0, None, 8.0, 0.0])
    delayed.clip(7, [p], 5.0)  # by update 5's norm of 10
    assert torch.allclose(p.grad, torch.tensor([0.3, 0.4]))
    delayed.clip(0, [p], 5.0)  # no norm is known yet, so its own norm, 5, is used
    assert torch.allclose(p.grad, torch.tensor([0.06, 0.08]))


@pytest.mark.parametrize("made_by, settings", [
    (torch.optim.SGD, {}), (torch.optim.SGD, {"momentum": 0.9}), (torch.optim.Adam, {}), (torch.optim.AdamW, {}),
    (torch.optim.Adam, {"amsgrad": True}), (torch.optim.RMSprop, {}), (torch.optim.RMSprop, {"momentum": 0.9}),
    (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}), (torch.optim.Adagrad, {}), (torch.optim.NAdam, {}),
    (torch.optim.RAdam, {}), (torch.optim.Adamax, {}), (torch.optim.Adadelta, {}),
])  # fmt: skip
def test_moments_are_counted_as_the_optimizer_keeps_them(
    made_by: Any, settings: Dict[str, Any]
) -> None:
    parameter = torch.nn.Parameter(torch.ones(3, 2))
    optimizer = made_by([parameter], lr=0.1, **settings)
    parameter.grad = torch.ones(3, 2)
    optimizer.step()
    moments = [
        v
        for v in optimizer.state[parameter].values()
        if isinstance(v, torch.Tensor) and v.shape == parameter.shape
    ]
    assert count_moments(list_kinds(optimizer)[0], optimizer.param_groups[0]) == len(moments)
