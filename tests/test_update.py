"""Check parameter groups, clipping, optimizers' state, and two papers' optimizers, written again in NumPy."""

from __future__ import annotations

from typing import Any, Dict

import numpy as np
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
from ipu_pipe.update.optimizer import (
    count_moments,
    import_state,
    list_kinds,
    make_factory_of,
    make_groups,
)
from models.optimizers import BasisRotation
from tests.support.emulating import make_rules


def make_staged_model() -> Any:
    model = nn.Sequential(
        nn.Linear(4, 4), nn.LayerNorm(4), begin_stage(nn.Linear(4, 4)), begin_stage(nn.ReLU())
    )
    return model, partition(model, torch.randn(2, 4))


@pytest.mark.parametrize("no_decay, expected", [
    ([], [(0, 4, None), (1, 2, None)]),
    ("norms_and_biases", [(0, 1, None), (0, 3, 0.0), (1, 1, None), (1, 1, 0.0)]),
    (["2.*"], [(0, 4, None), (1, 2, 0.0)]),
])  # fmt: skip
def test_a_group_a_stage_and_one_more_without_decay(no_decay: Any, expected: Any) -> None:
    groups = make_groups(*make_staged_model(), no_decay)
    assert [(g["stage"], len(g["params"]), g.get("weight_decay")) for g in groups] == expected


def test_groups_and_optimizers_that_cannot_be_made_are_refused() -> None:
    model, part = make_staged_model()
    with pytest.raises(BadInput, match=r"optimizer.no_decay: 7\.\*: matches no parameter"):
        make_groups(model, part, ["7.*"])
    with pytest.raises(BadInput, match="^optimizer: BasisRotation: .*ndim: 2"):
        make_factory_of(BasisRotation)(make_groups(model, part))
    with pytest.raises(BadInput, match="nothing to train"):
        make_groups(model.requires_grad_(False), part)
    with pytest.raises(BadInput, match="optimizer.name: lion: must be one of sgd, adam, adamw"):
        update.make_factory_by_name("lion")


# ---- clipping


@pytest.mark.parametrize("scope", ["global", "stage"])
def test_clipping_bounds_the_norm_of_its_scope(scope: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process of a stage knows only its own gradients' norms, and clips to the same bits; torch's clipping takes all
    gradients at once on a GPU."""
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", None)
    model, part = make_staged_model()
    stages = {group["stage"]: group["params"] for group in make_groups(model, part)}
    schedule = make_schedule(resolve_method("gpipe"), 2, 4, 2)
    gradients = {p: torch.randn_like(p) for p in model.parameters()}
    gradients[model[0].weight] *= 10
    norms = {s: torch.cat([gradients[p].flatten() for p in ps]).norm() for s, ps in stages.items()}
    if scope == "global":
        norms = dict.fromkeys(stages, torch.stack(list(norms.values())).norm())
    for bound in (1000.0, 2.0):
        for p, gradient in gradients.items():
            p.grad = gradient.clone()
        own = {s: clipping.compute_gradient_norms(ps) for s, ps in stages.items()}
        every = [norm for of_stage in own.values() for norm in of_stage]
        clipping.GradientClipping((bound, scope), stages, schedule).clip(0)
        for s, parameters in stages.items():
            clipped = [p.grad for p in parameters]
            factor = min(bound / norms[s], 1.0)
            for p in parameters:
                assert torch.allclose(p.grad, gradients[p] * factor, rtol=1e-4, atol=0)
                assert bound == 2.0 or torch.equal(p.grad, gradients[p])
                p.grad = gradients[p].clone()
            clipping.clip_to_norm(bound, parameters, own[s] if scope == "stage" else every)
            assert all(torch.equal(p.grad, expected) for p, expected in zip(parameters, clipped))


def test_a_delayed_global_norm_is_the_newest_that_all_stages_have() -> None:
    """PipeDream on 4 stages makes update k in slot 7 + 2k on stage 0 and in slot 4 + 2k on stage 3: two updates must lie
    between. After a drain no norm is known yet."""
    schedule = make_schedule(resolve_method("pipedream"), 4, 40, 1, [20])
    delayed = DelayedGlobalNorm(1.0, schedule)
    slots = schedule.slots(Kind.UPDATE, 0, 20)
    assert delayed.lag == 2
    for k in range(20):
        complete = [j for j in range(k) if slots[:, j].max() < slots[:, k].min()]
        assert delayed.get_source(k) == (complete[-1] if complete else None)
    assert [delayed.get_source(k) for k in (20, 21, 22)] == [None, None, 20]
    assert [delayed.is_needed(k) for k in (17, 18, 19, 20)] == [True, False, False, True]
    p = torch.nn.Parameter(torch.zeros(2))
    p.grad = torch.tensor([3.0, 4.0])
    delayed.remember(5, [6.0, None, 8.0, 0.0])
    delayed.clip(7, [p], 5.0)  # by update 5's norm of 10
    assert torch.allclose(p.grad, torch.tensor([0.3, 0.4]))
    delayed.clip(0, [p], 5.0)  # no norm is known yet, so its own norm, 5, is used
    assert torch.allclose(p.grad, torch.tensor([0.06, 0.08]))


# ---- state


@pytest.mark.parametrize(
    "options, place", [({}, "cpu"), ({"fused": True}, "meta"), ({"capturable": True}, "meta")]
)
def test_step_counts_resume_where_the_optimizer_keeps_them(options: Any, place: str) -> None:
    """Fused and capturable optimizers keep their counts on the parameters' device; the meta device stands in for it."""
    weight = nn.Parameter(torch.zeros(2, device="meta"))
    optimizer = torch.optim.Adam([weight], lr=0.1)
    optimizer.param_groups[0].update(options)
    count = torch.tensor(3.0)
    saved = {"w/step": count, "w/exp_avg": torch.zeros(2), "w/replica1.step": count}
    import_state(optimizer, {weight: "w"}, saved, {})
    places = {name: value.device.type for name, value in optimizer.state[weight].items()}
    assert places == {"step": place, "exp_avg": "meta", "replica1.step": place}


@pytest.mark.parametrize("kind, settings", [
    ("SGD", {}), ("SGD", {"momentum": 0.9}), ("AdamW", {}), ("Adam", {"amsgrad": True}), ("RMSprop", {}),
    ("RMSprop", {"momentum": 0.9, "centered": True}), ("Adagrad", {}), ("NAdam", {}), ("RAdam", {}), ("Adamax", {}),
    ("Adadelta", {}),
])  # fmt: skip
def test_moments_are_counted_as_the_optimizer_keeps_them(
    kind: str, settings: Dict[str, Any]
) -> None:
    parameter = torch.nn.Parameter(torch.ones(3, 2))
    optimizer = getattr(torch.optim, kind)([parameter], lr=0.1, **settings)
    parameter.grad = torch.ones(3, 2)
    optimizer.step()
    shapes = [getattr(value, "shape", None) for value in optimizer.state[parameter].values()]
    counted = count_moments(list_kinds(optimizer)[0], optimizer.param_groups[0])
    assert counted == shapes.count(parameter.shape)


# ---- two papers' optimizers in NumPy alone


def test_basis_rotation_is_adam_in_the_eigenbases_of_covariances() -> None:
    """arXiv 2602.03515, Algorithms 1 and 2: full-rank matrices have eigenvectors that are unique but for their sign."""
    rng, b, lr, decay = np.random.default_rng(8), 0.95, 0.02, 0.1
    w = rng.normal(size=(4, 4))
    weight = nn.Parameter(torch.from_numpy(w.copy()))
    optimizer = BasisRotation([weight], lr=lr, weight_decay=decay, frequency=3)
    mean, square, covariances = np.zeros_like(w), np.zeros_like(w), [0.0, 0.0]
    for t in range(1, 11):
        g = rng.normal(size=(4, 4))
        weight.grad = torch.from_numpy(g.copy())
        optimizer.step()
        mean = b * mean + (1 - b) * g
        covariances = [b * c + (1 - b) * x for c, x in zip(covariances, (g @ g.T, g.T @ g))]
        if t == 1:
            bases = [np.linalg.eigh(c)[1][:, ::-1] for c in covariances]
        elif t % 3 == 0:
            for axis, c in enumerate(covariances):
                order = np.argsort(-np.diag(bases[axis].T @ c @ bases[axis]))
                square = np.take(square, order, axis)
                bases[axis] = np.linalg.qr(c @ bases[axis][:, order])[0]
        U, V = bases
        square = b * square + (1 - b) * (U.T @ g @ V) ** 2
        rotated = (U.T @ mean @ V) / (np.sqrt(square) + 1e-8)
        rate = lr * np.sqrt(1 - b**t) / (1 - b**t)
        w = w - lr * decay * w - rate * U @ rotated @ V.T
        np.testing.assert_allclose(weight.detach().numpy(), w, rtol=0, atol=1e-9)


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_error_feedback_is_the_papers_for_a_delay_of_one(decay: float) -> None:
    """AdamW with arXiv 2606.30634's correction of delayed steps, c = 1: x <- x - u_t - (u_t - u_{t-1}), u the whole step.

    The first step is plain; an update without a gradient makes none, and sets the step that is remembered to 0.
    """
    rng = np.random.default_rng(3)
    w = rng.normal(size=(3, 2))
    weight = nn.Parameter(torch.from_numpy(w.copy()))
    optimizer = torch.optim.AdamW([{"params": [weight], "stage": 0}], lr=0.1, weight_decay=decay)
    method, args = resolve_method("pipedream_2bw"), {"error_feedback": {"scale": 1.0}}
    rules = make_rules(optimizer, method, np.array([1.0]), args, rate=lambda k: 0.1 * 0.8**k)
    mean, square, previous, steps = 0.0, 0.0, None, 0
    for k in range(12):
        is_missing = k in (0, 5, 6, 10)
        g = rng.normal(size=(3, 2))
        weight.grad = None if is_missing else torch.from_numpy(g.copy())
        rules.step(k, None)
        if is_missing:
            previous = None if previous is None else 0.0
        else:
            steps += 1
            mean, square = 0.9 * mean + 0.1 * g, 0.999 * square + 0.001 * g**2
            root = np.sqrt(square / (1 - 0.999**steps))
            u = 0.1 * 0.8**k * (mean / (1 - 0.9**steps) / (root + 1e-8) + decay * w)
            w = w - u - (u - (u if previous is None else previous))
            previous = u
        np.testing.assert_allclose(weight.detach().numpy(), w, rtol=0, atol=1e-14)
