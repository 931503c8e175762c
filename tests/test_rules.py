"""Check every update rule: its equation by hand in exact arithmetic, the literal replay, no effect
without delay, resuming.

One table drives the tests: a rule without a row is not tested, and a test fails.
"""

from __future__ import annotations

import functools
import itertools
import math
from fractions import Fraction as Q
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

import numpy as np
import pytest
import torch
from torch import nn

from ipu_pipe.errors import BadInput
from ipu_pipe.schedule.delays import DelaySampler
from ipu_pipe.schedule.methods import resolve_method
from ipu_pipe.schedule.timelines import make_schedule
from ipu_pipe.schedule.versions import VersionTable, find_segment_ends
from ipu_pipe.update.apply import FORWARD, UpdateRules
from ipu_pipe.update.optimizer import OptimizersByGroup
from ipu_pipe.update.rates import scale_for_update_size
from ipu_pipe.update.rules import RULES, Setting, compute_spectrain_horizon, list_conflicts
from tests.staged_models import MODELS, draw_microbatches, join_stages
from tests.support.emulating import make_rules
from tests.support.pairs import cover_pairs
from tests.support.slow import mark_slow
from tests.test_emulator_exact import (
    assert_equals_stages,
    compare_with_literal_replay,
    make_seeded_stages,
    train_in_plain_loop,
    train_literally,
    train_on_emulator,
)

SGD = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=1e-2)
ADAMW = functools.partial(torch.optim.AdamW, lr=0.01, weight_decay=1e-2)


def make_mixed(parameters: Any, lr: float) -> torch.optim.Optimizer:
    """Return Muon on matrices and AdamW on the rest, from parameter groups or from one stage's parameters."""
    groups = parameters if isinstance(parameters[0], dict) else [{"params": parameters, "stage": 0}]
    optimizers = []
    for member, make in enumerate(
        (getattr(torch.optim, "Muon", torch.optim.SGD), torch.optim.AdamW)
    ):
        chosen = []
        for group in groups:
            params = [p for p in group["params"] if (p.dim() == 2) == (member == 0)]
            chosen += [{**group, "member": member, "params": params}] if params else []
        optimizers += [make(chosen, lr=lr)] if chosen else []
    return OptimizersByGroup(optimizers)


MIXED = functools.partial(make_mixed, lr=0.01)
LR, M = Q(1, 4), Q(1, 2)  # dyadic, so that floating point computes exactly
GRADIENTS = [Q(1), Q(-3, 2), Q(1, 4)]
START = Q(2)


class Row(NamedTuple):
    """A rule and how it is tested.

    `method` and `args` are as in a config; the rule is defined on `optimizers`. `hand` returns the
    weight after three updates with GRADIENTS and a staleness of 2, and the weights that its forward
    and its backward (2 updates later) then read.
    """

    method: str
    args: Dict[str, Any]
    optimizers: Tuple[Any, ...] = (SGD, ADAMW)
    hand: Any = None
    exact: bool = True  # bitwise; spike compensation's step is summed in another order
    switch: int = 0


Steps = List[Tuple[Q, Q]]


def step_by_hand(rates: Any = (LR,) * 3, shrink: Q = Q(1), a: Q = Q(1), b: Q = Q(0)) -> Steps:
    """Return (w, v) at the start and after each update of SGD with momentum: w <- w - lr (a v + b g)."""
    states = [(START, Q(0))]
    for rate, g in zip(rates, GRADIENTS):
        w, v = states[-1]
        v = M * v + shrink * g
        states.append((w - rate * (a * v + b * shrink * g), v))
    return states


def spike_by_hand(scale: int = 1) -> Steps:
    a = M ** (2 * scale)
    return step_by_hand(a=a, b=(1 - a) / (1 - M))


def predict_by_hand(states: Steps, forward: int = 0, backward: int = 0) -> Tuple[Q, Q, Q]:
    """Return the newest weight, and what passes read that predict by these numbers of updates."""
    w, v = states[-1]
    return w, w - LR * forward * v, w - LR * backward * v


def extrapolate_by_hand(states: Steps) -> Tuple[Q, Q, Q]:
    (before, _), (w, _) = states[-2:]
    return w, w + 2 * (w - before), w


def correct_by_hand(gamma: Q) -> Tuple[Q, Q, Q]:
    # gamma = (1/4)^(1/2) = 1/2, or optimal: 1 - 2/3 = 1/3; the backward reads w - 2 delta
    weights, delta = [w for w, _ in step_by_hand()], Q(0)
    for old, new in zip(weights, weights[1:]):
        delta = gamma * delta + (1 - gamma) * (new - old)
    return weights[-1], weights[-1], weights[-1] - 2 * delta


def feed_back_by_hand(scale: Q) -> Tuple[Q, Q, Q]:
    # the optimizer's own steps are d_t = -lr v_t; from the second on, w gets 2 k (d_t - d_{t-1}) more, as the staleness is 2
    w, steps = START, [-LR * v for _, v in step_by_hand()[1:]]
    for before, step in zip([steps[0], *steps], steps):
        w = w + step + 2 * scale * (step - before)
    return w, w, w


PB = "pipelined_backprop"
SC, WP = {"scale": 1.0}, {"form": "velocity", "scale": 1.0}
DC = {"scale": 4.0, "adaptive": False, "decay": 0.75}
WPW = {"form": "difference", "scale": 1.0}
OPT = {"form": "optimizer", "scale": 1.0}
ROWS: Dict[str, Row] = {
    "t1": Row("pipemare", {"t1": {"anneal_updates": 1}}, hand=predict_by_hand(step_by_hand((LR / 2, LR, LR)))),
    "t2": Row("pipemare", {"t2": {"decay": 0.25}}, hand=correct_by_hand(Q(1, 2))),
    "t2-optimal": Row("pipemare", {"t2": {"decay": "optimal"}}, hand=correct_by_hand(Q(1, 3))),
    "t1+t2": Row("pipemare", {"t1": {"anneal_updates": 5}, "t2": {"decay": 0.135}}),
    "t2-1f1b": Row("pipemare", {"schedule": "1f1b", "t2": {"decay": 0.135}}),
    "t1+t2+warmup": Row("pipemare", {"t1": {"anneal_updates": 5}, "t2": {"decay": 0.135}}, switch=3),
    "recompute": Row("pipemare", {"recompute": {"segments": 2}}),
    "recompute-turn0": Row(PB, {"recompute": {"segments": 3}}),
    "recompute-whole": Row("pipemare", {"recompute": {"segments": 1}}),
    "recompute+t2": Row("pipemare", {"recompute": {"segments": 2}, "t2": {"decay": 0.135}}),
    "hogwild": Row("pipemare", {"hogwild": {"max": 6, "mean": 2.0}}),
    "hogwild-inconsistent": Row("pipemare", {"hogwild": {"max": 6, "mean": 2.0}, "stash": False}),
    "delay+both": Row(
        PB, {"constant_delay": {"updates": 3}, "spike_compensation": SC, "weight_prediction": WP}, (SGD,), exact=False
    ),
    "delay+t2": Row(PB, {"constant_delay": {"updates": 3}, "t2": {"decay": 0.5}}),
    "spike": Row(PB, {"spike_compensation": SC}, (SGD,), predict_by_hand(spike_by_hand()), exact=False),
    "spike-2D": Row(PB, {"spike_compensation": {"scale": 2.0}}, (SGD,), predict_by_hand(spike_by_hand(2)), exact=False),
    "spike-general": Row(PB, {"spike_compensation": {"a": 0.75, "b": 0.125}}, (SGD,),
                         predict_by_hand(step_by_hand(a=Q(3, 4), b=Q(1, 8))), exact=False),
    "prediction": Row(PB, {"weight_prediction": WP}, (SGD,), predict_by_hand(step_by_hand(), 2)),
    "prediction-2D": Row(
        PB, {"weight_prediction": {"form": "velocity", "scale": 2.0}}, (SGD,), predict_by_hand(step_by_hand(), 4)
    ),
    "prediction-stash": Row(PB, {"weight_prediction": WP, "stash": True}, (SGD,)),
    "prediction-2bw": Row("pipedream_2bw", {"weight_prediction": WPW}),
    "difference": Row(PB, {"weight_prediction": WPW}, hand=extrapolate_by_hand(step_by_hand())),
    "difference-stash": Row("pipedream", {"weight_prediction": WPW}),
    "both": Row(
        PB, {"spike_compensation": SC, "weight_prediction": WP}, (SGD,), predict_by_hand(spike_by_hand(), 2), exact=False
    ),
    "both-difference": Row(
        PB, {"spike_compensation": SC, "weight_prediction": WPW}, (SGD,), extrapolate_by_hand(spike_by_hand()), exact=False
    ),
    "prediction+t1": Row(PB, {"weight_prediction": WP, "t1": {"anneal_updates": 9}}, (SGD,)),
    "shrinking": Row(PB, {"gradient_shrinking": {"factor": 0.5}},
                     hand=predict_by_hand(step_by_hand(shrink=Q(1, 4)))),
    "compensation-adaptive": Row("pipedream", {"delay_compensation": {**DC, "adaptive": True}}),
    "compensation-warmup": Row(PB, {"stash": True, "delay_compensation": {**DC, "adaptive": True}}, switch=2),
    "compensation-delay": Row(PB, {"constant_delay": {"updates": 2}, "stash": True, "delay_compensation": DC}),
    "gap": Row("pipedream", {"gap_aware": {"decay": 0.75}}),
    "gap-2bw": Row("pipedream_2bw", {"gap_aware": {"decay": 0.5}}, (SGD, ADAMW, MIXED)),
    "gap-warmup": Row(PB, {"stash": True, "gap_aware": {"decay": 0.5}}, switch=2),
    "prediction-optimizer": Row(
        "pipedream", {"stash": False, "weight_prediction": OPT},
        hand=predict_by_hand(step_by_hand(), 2),
    ),
    "prediction-optimizer+t1": Row(
        "pipemare", {"weight_prediction": {"form": "optimizer", "scale": 2.0}, "t1": {"anneal_updates": 9}}
    ),
    "feedback": Row(PB, {"error_feedback": {"scale": 0.5}}, hand=feed_back_by_hand(Q(1, 2))),
    "feedback-2bw": Row("pipedream_2bw", {"error_feedback": {"scale": 1.0}}, (SGD, ADAMW, MIXED)),
    "feedback+t2": Row("pipemare", {"error_feedback": {"scale": 0.25}, "t2": {"decay": 0.25}}, (SGD, MIXED)),
    "spectrain": Row("spectrain", {}, (SGD,), predict_by_hand(step_by_hand(), 3, 1)),
    "spectrain-1f1b": Row("spectrain", {"schedule": "1f1b"}, (SGD,)),
    "plain": Row(PB, {}, hand=predict_by_hand(step_by_hand())),
}  # fmt: skip


def test_the_table_has_every_rule() -> None:
    of_blocks = {"block_rates", "nag"}  # in tests/test_local.py and tests/test_asynchrony.py
    assert set(RULES) - of_blocks <= {
        key for row in ROWS.values() for key in (*row.args, row.method)
    }


# ---- by hand


def make_one_weight_rules(row: Row) -> Tuple[nn.Parameter, UpdateRules]:
    """Return a single weight on the second of three stages, where PB has a staleness of 2, and
    its rules."""
    method = resolve_method(row.method, row.args)
    weight = nn.Parameter(torch.tensor([float(START)], dtype=torch.float64))
    optimizer = torch.optim.SGD([{"params": [weight], "stage": 1}], lr=float(LR), momentum=float(M))
    return weight, make_rules(optimizer, method, np.array([4.0, 2.0, 0.0]), row.args)


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if row.hand])
def test_three_updates_are_those_computed_by_hand(name: str) -> None:
    row = ROWS[name]
    weight, rules = make_one_weight_rules(row)
    for k, g in enumerate(GRADIENTS):
        weight.grad = torch.tensor([float(g)], dtype=torch.float64)
        rules.step(k, None)
        assert weight.grad is None
    versions = np.array([3, 3, 3])
    codes = [rules.encode_forwards(versions)[1], rules.encode_backwards(versions, versions - 2)[1]]
    weight = weight.detach()
    values = [float(weight)]
    for code in codes:
        pairs = rules.compute_corrections(1, int(code), 3) if code else []
        values.append(float(weight) + sum(c * float(x[0]) for x, c in pairs))
    for value, expected in zip(values, row.hand):
        dyadic = expected.denominator & (expected.denominator - 1) == 0
        assert value == pytest.approx(float(expected), rel=0 if dyadic else 1e-15, abs=0)


def test_each_group_has_its_own_settings_and_prediction() -> None:
    """Update k of a group uses the group's settings; a prediction for version v uses the group's rate of update v."""
    weights = [nn.Parameter(torch.ones(1, dtype=torch.float64)) for _ in range(2)]
    groups = [{"params": [weight], "stage": 0, "number": i} for i, weight in enumerate(weights)]
    # (rate, momentum) by group and update
    settings = [[(0.5, 0.5), (0.0, 0.25)], [(0.25, 0.5), (4.0, 0.5)]]
    args = {"weight_prediction": WP}
    optimizer, method = torch.optim.SGD(groups, lr=1.0, momentum=0.5), resolve_method(PB, args)
    find = lambda k, group: dict(zip(("lr", "momentum"), settings[group["number"]][k]))  # noqa: E731
    rules = make_rules(optimizer, method, np.array([2.0]), args, settings=find)
    for k in range(2):
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        rules.step(k, None)
    # velocities 1 then momentum + 1
    assert [weight.item() for weight in weights] == [0.5 - 0.0 * 1.25, 0.75 - 4.0 * 1.5]
    # version 1, with a staleness of 2 updates: w - 2 lr v, with the rate of update 1
    code = int(rules.encode_forwards(np.array([1]))[0])
    [(x, c)] = rules.compute_corrections(0, code, 1)
    assert [c * x[0].item(), c * x[1].item()] == [0.0, -2 * 4.0 * 1.5]
    # the same by factors of the velocities, as compiled programs take them
    [(_, factors)] = rules.list_corrections(0, code, 1)
    assert [factors[id(weight)] for weight in weights] == [0.0, -2 * 4.0]


@pytest.mark.parametrize("adaptive", [False, True])
def test_delay_compensation_is_that_computed_by_hand(adaptive: bool) -> None:
    """One update has two microbatches: halved gradients 3 and -1, read 1/2 and 0 away from the
    newest weight; each becomes g + 4 g g (w_now - w_read)."""
    args = {"delay_compensation": {"scale": 4.0, "adaptive": adaptive, "decay": 0.5}}
    weight = nn.Parameter(torch.tensor([2.0], dtype=torch.float64))
    optimizer = torch.optim.Adam([{"params": [weight], "stage": 0}], lr=0.25)
    rules = make_rules(optimizer, resolve_method("pipedream"), np.array([1.0]), args, 2)
    for g, age in ((3.0, [torch.tensor([0.5], dtype=torch.float64)]), (-1.0, None)):
        with rules.compensate(0, [0], lambda stage: age):
            (weight * g / 2).sum().backward()
    # the mean of squares is 9/2 when the first microbatch is corrected, then (9/2 + 1) / 2
    first = 3 + 4 * 9 * 0.5 / (math.sqrt(4.5 + 1e-7) if adaptive else 1)
    assert float(weight.grad) == pytest.approx((first - 1) / 2, rel=1e-15)
    assert not optimizer.state
    rules.step(0, lambda k: None)
    assert [float(optimizer.state[weight][name]) for name in rules.list_entries(0)] == [
        2.75
    ] * adaptive


def test_delay_compensation_keeps_its_mean_square_beside_an_optimizer_without_state() -> None:
    """A checkpoint of SGD without momentum once lacked the mean square, so a resumed run began
    it at 0."""
    args = {"delay_compensation": {"scale": 1.0, "adaptive": True, "decay": 0.5}}
    weight, unused = (nn.Parameter(torch.tensor([2.0], dtype=torch.float64)) for _ in range(2))
    optimizer = torch.optim.SGD([{"params": [weight, unused], "stage": 0}], lr=0.25)
    rules = make_rules(optimizer, resolve_method("pipedream"), np.array([1.0]), args)
    with rules.compensate(0, [0], lambda stage: None):
        (weight * 3.0).sum().backward()
    rules.step(0, None)
    assert {p: float(state["delay_mean_square"]) for p, state in optimizer.state.items()} == {
        weight: 4.5
    }


def test_a_prediction_by_the_steps_of_adam_by_hand() -> None:
    """In PipeOptim a forward reads w - lr T m_hat / (sqrt(v_hat) + eps); here T is 3 and lr 0.1."""
    weight, never = (nn.Parameter(torch.tensor([2.0], dtype=torch.float64)) for _ in range(2))
    group = {"params": [weight, never], "stage": 0}
    optimizer = torch.optim.AdamW([group], lr=0.1, betas=(0.9, 0.99), weight_decay=0.0)
    method = resolve_method("pipedream", {"stash": False})
    rules = make_rules(optimizer, method, np.array([3.0]), {"weight_prediction": OPT})
    m = v = 0.0
    assert rules.compute_corrections(0, FORWARD, 0) == [] and rules.list_entries(0) == []
    for t, g in enumerate((0.5, -1.0, 0.25), 1):
        weight.grad = torch.tensor([g], dtype=torch.float64)
        rules.step(t - 1, None)
        m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
        ((x, c),) = rules.compute_corrections(0, FORWARD, t)
        direction = (m / (1 - 0.9**t)) / (math.sqrt(v / (1 - 0.99**t)) + 1e-8)
        assert c * float(x[0]) == pytest.approx(-0.3 * direction, rel=1e-14) and float(x[1]) == 0


def test_spike_compensation_with_delay_one_is_nesterov() -> None:
    data = draw_microbatches(12)
    method = resolve_method(PB, {"constant_delay": {"updates": 1}, "stash": True})
    sgd = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    nesterov, compensated = (join_stages(make_seeded_stages("mlp")) for _ in range(2))
    train_on_emulator(nesterov, method, 1, data, functools.partial(sgd, nesterov=True))
    train_on_emulator(compensated, method, 1, data, sgd, args={"spike_compensation": SC})
    for p, q in zip(nesterov.parameters(), compensated.parameters()):
        assert torch.allclose(p, q, rtol=1e-12, atol=1e-13)


# ---- against the literal replay


ATTRIBUTES = {
    "-".join(map(str, values)): values
    for values in itertools.product(ROWS, MODELS, (1, 3), ("plain", "drains", "mixed"))
}
# gradients of several microbatches are compensated before they are added up
SEVERAL = ["compensation-adaptive-mlp-3-plain", "compensation-delay-mlp-3-plain", "gap-mlp-3-plain"]


@pytest.mark.parametrize(
    "case", mark_slow(cover_pairs(ATTRIBUTES, SEVERAL), lambda case: ATTRIBUTES[case][1] == "mlp")
)
def test_weights_equal_those_of_the_literal_replay(case: str) -> None:
    name, model, accumulate, feature = ATTRIBUTES[case]
    row = ROWS[name]
    tolerance = 0.0 if row.exact else 1e-2 if feature == "mixed" else 1e-8
    for make_optimizer in row.optimizers:
        compare_with_literal_replay(
            row.method, row.args, model, make_optimizer, accumulate, feature, row.switch, tolerance
        )


# ---- no effect without delay


@pytest.mark.parametrize(
    "name", [name for name in ROWS if not resolve_method(ROWS[name].method, ROWS[name].args).delay]
)
def test_one_stage_is_plain_training(name: str) -> None:
    row, data = ROWS[name], draw_microbatches(12)
    args = {**row.args, "recompute": {"segments": 1}} if "recompute" in row.args else row.args
    twin = join_stages(make_seeded_stages("convolution"))
    unsplit = nn.Sequential(nn.Sequential(*make_seeded_stages("convolution")))
    method, make_optimizer = resolve_method(row.method, args), row.optimizers[0]
    train_on_emulator(unsplit, method, 2, data, make_optimizer, args=args, switch=row.switch)
    train_in_plain_loop(twin, data, 2, make_optimizer)
    assert_equals_stages(unsplit[0], list(twin))


# ---- reads


def test_horizons_of_spectrain() -> None:
    """The horizons are 2(S-1) - s forward and s backward on dataflow, P-1-s + ceil(s/2) and
    ceil(s/2) on 1F1B."""
    S = 6
    for schedule, pace in (("dataflow", 1), ("1f1b", 2)):
        method = resolve_method("spectrain", {"schedule": schedule})
        table = VersionTable(make_schedule(method, S, 40, 1), method)
        for s, staleness in enumerate(table.rule_lag().tolist()):
            setting = Setting(None, s, staleness, method, 1)
            backward = math.ceil(s / pace)
            forward = (2 // pace) * (S - 1 - s) + backward
            assert compute_spectrain_horizon(setting, is_forward=True) == forward
            assert compute_spectrain_horizon(setting, is_forward=False) == backward


@pytest.mark.parametrize("turn", [0, 1])
@pytest.mark.parametrize("accumulate", [1, 2, 5])
def test_recomputation_staleness_is_the_papers(turn: int, accumulate: int) -> None:
    """For stage j of a segment of S stages tau_recomp is ceil((2(S-j) + turn) / N) (PipeMare, appendix A, with our turn)."""
    args = {"turn": turn, "recompute": {"segments": 3}}
    method = resolve_method("pipemare", args)
    table = VersionTable(make_schedule(method, 11, 40 * accumulate, accumulate), method)
    window = 20 * accumulate, 30 * accumulate
    staleness = (table.backward(*window) - table.recompute(*window)).max(axis=1)
    places = [length - j for length in (4, 4, 3) for j in range(1, length + 1)]
    assert staleness.tolist() == [math.ceil((2 * left + turn) / accumulate) for left in places]
    assert find_segment_ends(107, 0)[0] == len(np.array_split(np.arange(107), 10)[0]) - 1


def compute_truncated_exponential(mean: float, greatest: int) -> Any:
    """Return the probabilities of the delays 0..greatest with a mean at most its half: exp(-rate d)
    over its sum, the rate by halving a bracket."""
    values, low, high = np.arange(greatest + 1), 0.0, 50.0
    for _ in range(100):
        rate = (low + high) / 2
        weights = np.exp(-rate * values)
        weights /= weights.sum()
        low, high = (rate, high) if weights @ values > mean else (low, rate)
    return weights


def test_drawn_delays_are_exponential_with_the_stated_mean() -> None:
    """Chi-square with 9 degrees of freedom; stages draw independently. A mean of half the greatest is uniform."""
    greatest, means, count = 9, [4.5, 2.0, 1.0, 0.25], 20_000
    method = resolve_method("pipemare", {"hogwild": {"max": greatest, "mean": means}})
    table = VersionTable(make_schedule(method, 4, count, 1), method, seed=4)
    delays = (np.arange(count) - table.forward(0, count))[:, greatest:]
    for mean, row in zip(means, delays):
        counts = np.bincount(row, minlength=greatest + 1)
        expected = compute_truncated_exponential(mean, greatest) * len(row)
        # 1 in 10,000
        assert ((counts - expected) ** 2 / expected)[expected > 1].sum() < 33.7
    assert abs(np.corrcoef(delays) - np.eye(4)).max() < 0.03


def test_drawn_delays_depend_on_the_seed_and_the_microbatch_alone() -> None:
    method = resolve_method("pipemare", {"hogwild": {"max": 5, "mean": 2.0}})
    assert method.delay is not None
    draws = [DelaySampler(method.delay, np.array([2.0, 2.0]), seed) for seed in (1, 1, 2)]
    assert (draws[0](0, 700)[:, 300:640] == draws[1](300, 640)).all()
    assert (draws[0](0, 700) != draws[2](0, 700)).any()


@pytest.mark.parametrize(
    "newest, method, args",
    [(False, "pipedream_2bw", {}), (True, "pipedream", {"schedule": "1f1b_capped"})],
)
def test_cyclic_data_parallelism_is_a_table_of_delays_and_a_pipeline(
    newest: bool, method: str, args: Any
) -> None:
    """Each microbatch begins two slots after the previous one. The delay is always 1, but in variant 2 (`newest`) it is 0 if
    s + i >= P - 1: the update of stage s is then complete when microbatch i of the next update arrives."""
    P, data, pipeline = 4, draw_microbatches(24), resolve_method(method, args)
    cyclic = [[0 if newest and s + i >= P - 1 else 1 for i in range(P)] for s in range(P)]
    table = VersionTable(make_schedule(pipeline, P, 5 * P, P), pipeline)
    m = np.arange(5 * P)
    assert (table.forward(0, 5 * P) == np.maximum(m // P - np.array(cyclic)[:, m % P], 0)).all()
    twin = make_seeded_stages("mlp")
    delayed = resolve_method("pipedream", {"constant_delay": {"updates": cyclic}})
    train_literally(twin, delayed, P, data, ADAMW)
    for either in (delayed, pipeline):
        unsplit = join_stages(make_seeded_stages("mlp"))
        train_on_emulator(unsplit, either, P, data, ADAMW)
        assert_equals_stages(unsplit, twin)


def test_a_table_of_delays_must_fit() -> None:
    method = resolve_method("pipedream", {"constant_delay": {"updates": [[1, 0], [0, 0]]}})
    assert VersionTable(make_schedule(method, 2, 8, 2), method).greatest_lag().tolist() == [1, 0]
    for P, N in ((3, 2), (2, 4)):
        with pytest.raises(BadInput, match="method_args.constant_delay.updates"):
            VersionTable(make_schedule(method, P, 8, N), method)


def test_hogwild_without_mean_takes_the_delays_of_the_pipeline() -> None:
    method = resolve_method("pipemare", {"hogwild": {"max": 20}})
    table = VersionTable(make_schedule(method, 4, 40, 1), method)
    assert table.rule_lag().tolist() == [7, 5, 3, 1]
    assert table.greatest_lag().tolist() == [20] * 4
    short = resolve_method("pipemare", {"hogwild": {"max": 13}})
    with pytest.raises(BadInput, match="max must be at least 14"):
        VersionTable(table.schedule, short).forward(0, 4)


# ---- refusals


MOMENTUM = {"momentum": 0.9}


@pytest.mark.parametrize("method, args, kind, options, message", [
    (PB, {"spike_compensation": SC}, "adamw", {}, "velocity of SGD"),
    (PB, {"weight_prediction": WP}, "adam", {}, "use form: difference"),
    (PB, {"weight_prediction": WP}, "sgd", {}, "must be above 0"),
    (PB, {"weight_prediction": WP}, "sgd", {"momentum": 0.9, "nesterov": True}, "without nesterov"),
    (PB, {"spike_compensation": SC}, "sgd", {"momentum": 0.9, "dampening": 0.1}, "without dampening"),
    ("pipemare", {"t2": {"decay": 0.1}, "stash": True}, "sgd", {}, "same weights"),
    (PB, {"t2": {"decay": 0.1}, "weight_prediction": WPW}, "sgd", {}, "same discrepancy"),
    (PB, {"recompute": {"segments": 2}, "weight_prediction": WPW}, "sgd", {}, "cannot be combined with recompute"),
    ("spectrain", {"weight_prediction": WPW}, "sgd", MOMENTUM, "itself a weight prediction"),
    ("spectrain", {}, "adamw", {}, "velocity of SGD"),
    ("spectrain", {"delay_compensation": DC}, "sgd", MOMENTUM, "itself a weight prediction"),
    (PB, {"delay_compensation": DC}, "sgd", {}, "{stash: true}"),
    ("pipedream", {"delay_compensation": DC, "weight_prediction": WPW}, "sgd", {}, "same delay"),
    ("pipedream", {"gap_aware": {"decay": 0.5}, "delay_compensation": DC}, "sgd", {}, "with delay_compensation: both"),
    ("pipedream", {"delay_compensation": DC, "split_backward": True}, "sgd", {}, "later updates"),
    (PB, {"weight_prediction": OPT}, "Muon", {}, "use form: difference"),
    (PB, {"weight_prediction": OPT}, "sgd", {}, "optimizer.momentum: 0"),
    (PB, {"weight_prediction": OPT}, "adam", {"amsgrad": True}, "optimizer.amsgrad"),
    (PB, {"error_feedback": {"scale": 1.0}, "spike_compensation": SC}, "sgd", MOMENTUM, "same delay"),
    *[("gpipe", rule, "sgd", {}, "no gradient is stale") for rule in (
        {"t1": {"anneal_updates": 3}}, {"warmup": {"epochs": 1}}
    )],
    (PB, {"t1": {"anneal_updates": 2}, "t2": {"decay": 0.1}}, "adamw", {}, None),
    (PB, {"weight_prediction": WPW}, "adamw", {}, None),
    ("pipemare", {"hogwild": {"max": 3}, "constant_delay": {"updates": 2}}, "sgd", {}, "cannot be combined"),
    ("pipemare", {"recompute": {"segments": 2}, "stash": True}, "sgd", {}, "recompute: true"),
    ("pipemare", {"recompute": {"segments": 2}, "schedule": "1f1b"}, "sgd", {}, "dataflow"),
    ("gpipe", {"hogwild": {"max": 3}}, "sgd", {}, "drains the pipeline"),
    ("pipedream_2bw", {"constant_delay": {"updates": 3}}, "sgd", {}, "two weight versions"),
    ("spectrain", {"stash": True}, "sgd", {}, "predicts"),
])  # fmt: skip
def test_rules_are_refused_with_the_reason(
    method: str, args: Any, kind: str, options: Any, message: Optional[str]
) -> None:
    """None: not refused."""
    try:
        faults = list_conflicts(args, resolve_method(method, args), kind, options)
    except BadInput as error:
        faults = error.faults
    assert any(message in fault for fault in faults) if message else not faults, faults


# ---- hyperparameters


def test_hyperparameters_for_another_update_size() -> None:
    """The scaling is m = m_r^(N/N_r), lr = lr_r (1-m) N / ((1-m_r) N_r) (Kosson et al. 2021,
    equation 9)."""
    lr, m = scale_for_update_size(0.1, 0.9, 128, 1)
    assert m == pytest.approx(0.9 ** (1 / 128))
    assert lr == pytest.approx(0.1 * (1 - m) / (0.1 * 128))
    assert scale_for_update_size(0.1, 0.9, 128, 128) == pytest.approx((0.1, 0.9))
    assert scale_for_update_size(0.4, 0.0, 64, 16) == (0.1, 0.0)
