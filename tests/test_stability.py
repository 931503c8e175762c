"""Check stability on a quadratic: the papers' polynomials and lemmas, and simulated recurrences,
against root radii and steps."""

from __future__ import annotations

import itertools
import math
from typing import Any, List, NamedTuple, Tuple

import numpy as np
import pytest

from ipu_pipe.schedule.delays import compute_greatest_delay
from ipu_pipe.stability.recurrences import (
    Recurrence,
    compute_discrepancy_decay,
    compute_spike_coefficients,
    make_delayed_sgd,
    make_pipemare,
    read_newest_delta,
    simulate,
)
from ipu_pipe.stability.roots import (
    compute_root_radius,
    derive_loop_gain,
    find_largest_stable_step,
    find_stable_steps,
    find_steps_within,
)
from tools.experiments.bounds import bound_local_sgd, bound_rpd, bound_rpd_pl
from tools.experiments.half_lives import (
    compute_half_life,
    find_best_momentum,
    find_least_half_life,
    find_least_half_lives,
    find_widest_ranges,
)

DELAYS = [0, 1, 7, 100]


def make_polynomial(*parts: Tuple[int, float]) -> List[float]:
    """Return the coefficients, highest power first, of a polynomial given as (power,
    coefficient) pairs."""
    highest = max(power for power, _ in parts)
    return [sum(c for p, c in parts if p == power) for power in range(highest, -1, -1)]


def assert_roots(recurrence: Recurrence, step: float, expected: Any) -> None:
    """Assert that a recurrence's polynomial has these roots, except roots at 0, of which one
    derivation may have more."""
    fixed, per_step = derive_loop_gain(recurrence).expand_polynomial()
    derived = list(fixed + step * per_step)
    assert np.trim_zeros(derived, "b") == pytest.approx(
        np.trim_zeros(list(expected), "b"), abs=1e-12
    )


def find_limit(recurrence: Recurrence) -> float:
    """Return the largest stable step."""
    return find_largest_stable_step(derive_loop_gain(recurrence))


# ---- the polynomials of the papers (with the sign of GDM's last term corrected)


@pytest.mark.parametrize("D, m", [(1, 0.6), (2, 0.0), (12, 0.95)])
def test_pipelined_backpropagations_polynomials(D: int, m: float) -> None:
    """The polynomial of both compensations contains those of one and of none."""
    k, T, a, b = 0.3, 3.5, 0.7, 1.3
    for (own, last), horizon in itertools.product(((1, 0), (a, b)), (0, T)):
        ahead, both = 1 + horizon, own + last
        expected = make_polynomial(
            (D + 3, 1), (D + 2, -(1 + m)), (D + 1, m), (2, k * both * ahead),
            (1, -k * (ahead * m * last + horizon * both)), (0, k * horizon * m * last),
        )  # fmt: skip
        assert_roots(make_delayed_sgd(D, m, (own, last), horizon), k, expected)
    inner = np.polyadd([1, -m] + [0] * D, [k * T])
    velocity = np.polyadd(np.polymul([1, -1], inner), [k * (a + b), -k * b * m])
    assert_roots(make_delayed_sgd(D, m, (a, b), T, by_velocity=True), k, velocity)


@pytest.mark.parametrize("D, m", [(1, 0.9), (4, 0.3), (12, 0.9)])
def test_on_a_quadratic_spike_compensation_is_weight_prediction(D: int, m: float) -> None:
    """Check equations 44 to 47 of Kosson et al. 2021."""
    T = 3.5
    for horizon, compensated in (
        (m * (1 - m**D) / (1 - m), compute_spike_coefficients(m, D)),
        (T, (1 - (1 - m) / m * T, T / m)),
    ):
        fixed, per_step = derive_loop_gain(make_delayed_sgd(D, m, compensated)).expand_polynomial()
        assert_roots(make_delayed_sgd(D, m, horizon=horizon), 0.3, fixed + 0.3 * per_step)


@pytest.mark.parametrize("forward, backward", [(1, 0), (6, 2), (10, 6), (10, 0)])
def test_pipemares_polynomials(forward: int, backward: int) -> None:
    step, h, delta, phi, middle, g = 0.07, 1.5, 4.0, -2.0, (forward + backward) // 2, 0.8
    gap = forward - backward
    for m in (0.0, 0.9):
        with_gap = make_polynomial(
            (forward + 1, 1), (forward, -1 - m), (forward - 1, m), (gap, -step * delta), (0, step * (h + delta))
        )  # fmt: skip
        pipemare = make_pipemare(forward, backward, delta, curvature=h, momentum=m)
        assert_roots(pipemare, step, with_gap)

    def make_correction(size: float, difference: int) -> Any:
        """Return -step size z^n (z - g) + step size z^n n (1 - g) (z - 1)."""
        inner = np.polysub(np.array([1, -1]) * difference * (1 - g), [1, -g])
        return np.polymul([step * size] + [0] * difference, inner)

    start = np.polyadd(
        np.polymul(np.poly([1, g]), [1] + [0] * forward), step * (h + delta) * np.array([1, -g])
    )
    corrected = np.polyadd(start, make_correction(delta, gap))
    assert_roots(make_pipemare(forward, backward, delta, g, curvature=h), step, corrected)
    split = np.polyadd(
        np.polyadd(start, make_correction(delta - phi, gap)), make_correction(phi, forward - middle)
    )
    assert_roots(make_pipemare(forward, backward, delta, g, (middle, phi), h), step, split)


# ---- Lemmas 1 to 3 of PipeMare


@pytest.mark.parametrize("delay", DELAYS)
@pytest.mark.parametrize("curvature", [1e-3, 40.0])
def test_lemma_1_is_the_largest_stable_step(delay: int, curvature: float) -> None:
    loop = derive_loop_gain(make_delayed_sgd(delay, curvature=curvature))
    limit = 2 / curvature * math.sin(math.pi / (4 * delay + 2))
    assert find_stable_steps(loop) == [(0, pytest.approx(limit, rel=1e-12))]
    inside, outside = compute_root_radius(loop, np.array([0.999, 1.001]) * limit)
    assert 0.997 < inside < 1 < outside < 1.003


@pytest.mark.parametrize("forward", DELAYS[1:])
@pytest.mark.parametrize("discrepancy", [0.01, 300.0])
def test_lemma_2_bounds_it_where_passes_read_different_weights(
    forward: int, discrepancy: float
) -> None:
    for backward, curvature in ((0, 0.2), (forward // 2, 30.0), (9 * forward // 10, 0.2)):
        limit = find_limit(make_pipemare(forward, backward, discrepancy, curvature=curvature))
        plain = 2 / curvature * math.sin(math.pi / (4 * forward + 2))
        assert 0 < limit <= min(2 / (discrepancy * (forward - backward)), plain)


@pytest.mark.parametrize("delay", DELAYS[1:])
@pytest.mark.parametrize("momentum", [0.1, 0.999])
def test_lemma_3_bounds_it_with_momentum(delay: int, momentum: float) -> None:
    for curvature in (0.2, 30.0):
        limit = find_limit(make_delayed_sgd(delay, momentum, curvature=curvature))
        assert 0 < limit <= 4 / curvature * math.sin(math.pi / (4 * delay + 2))


# ---- root radii, stable steps and the recurrences agree


def draw_recurrence(rng: np.random.Generator) -> Recurrence:
    """Draw one of the papers' rules with random numbers."""
    m = float(rng.choice([0.0, rng.uniform(0, 0.98)]))
    if rng.random() < 0.5:
        delay = int(rng.integers(0, 13))
        compensated = [
            (1.0, 0.0),
            compute_spike_coefficients(m, delay),
            (rng.uniform(0.1, 2), rng.uniform(0, 3)),
        ]
        horizon = float(rng.choice([0.0, delay, rng.uniform(0, 8)]))
        by_velocity = bool(rng.random() < 0.5)
        return make_delayed_sgd(
            delay, m, compensated[rng.integers(3)], horizon, by_velocity, rng.uniform(0.3, 3)
        )
    forward, backward = sorted(rng.integers(0, 13, 2), reverse=True)
    middle = int(rng.integers(backward, forward + 1))
    decay = rng.uniform(0, 0.95) if rng.random() < 0.6 else None
    recompute = (middle, rng.uniform(-6, 6)) if rng.random() < 0.5 else None
    return make_pipemare(
        int(forward), int(backward), rng.uniform(-8, 8), decay, recompute, rng.uniform(0.3, 3), m
    )


def test_steps_within_a_circle_have_all_roots_inside_it() -> None:
    """The stable steps are those within the unit circle, and end on it."""
    rng = np.random.default_rng(1)
    radii = np.array([0.6, 0.83, 0.97, 0.9991])
    inside_count = 0
    for _ in range(100):
        loop = derive_loop_gain(draw_recurrence(rng))
        stable_steps = find_stable_steps(loop)
        steps = np.exp(rng.uniform(np.log(1e-4), np.log(6), 25))
        radius = compute_root_radius(loop, steps)
        for circle, result in zip([*radii, 1], [*find_steps_within(loop, radii), stable_steps]):
            inside = np.array([any(low < step < high for low, high in result) for step in steps])
            assert ((radius < circle) == inside)[np.abs(radius - circle) > 1e-9].all()
            inside_count += inside.sum()
        ends = [end for interval in stable_steps for end in interval if 0 < end < np.inf]
        assert compute_root_radius(loop, np.array(ends)) == pytest.approx([1] * len(ends), abs=1e-6)
    assert inside_count > 300


def test_stability_need_not_be_monotone() -> None:
    """With an immediate backward and momentum a step that is too large is unstable, and a larger
    one is stable again."""
    loop = derive_loop_gain(make_pipemare(5, 0, -0.7766, momentum=0.9))
    (zero, first), (second, last) = find_stable_steps(loop)
    assert (zero, first, second, last) == pytest.approx((0, 0.1556, 0.4271, 1.439), rel=1e-3)
    assert find_largest_stable_step(loop) == first


def test_simulated_recurrences_grow_as_their_roots_predict() -> None:
    """Simulate several step sizes of each rule; near the unit circle growth is too slow to be
    measured."""
    rng = np.random.default_rng(3)
    clear_count = 0
    for _ in range(45):
        recurrence = draw_recurrence(rng)
        steps = np.exp(rng.uniform(np.log(1e-2), np.log(4), 24))
        radius = compute_root_radius(derive_loop_gain(recurrence), steps)
        path = np.abs(simulate(recurrence, steps=steps, updates=500))
        previous, last = path[-400:-200].max(axis=0), path[-200:].max(axis=0)
        # a w that overflows is not finite, one that vanishes is 0 in both windows
        falls = (last <= previous) & np.isfinite(last)
        is_clear = np.abs(radius - 1) > 0.02
        clear_count += is_clear.sum()
        assert (falls == (radius < 1))[is_clear].all(), recurrence
    assert clear_count > 500


# ---- equivalent rules


def test_the_decay_of_t2() -> None:
    assert compute_discrepancy_decay(0.1, 4) ** 4 == pytest.approx(0.1)
    assert compute_discrepancy_decay(None, 400) ** 400 == pytest.approx(math.exp(-2), rel=0.01)


def test_t2_as_printed_shrinks_the_stable_range_that_t2_as_trained_enlarges() -> None:
    """Delays 40 and 39, Delta 100."""
    trained = make_pipemare(40, 39, 100.0, compute_discrepancy_decay(None, 1))
    recurrences = (make_pipemare(40, 39, 100.0), read_newest_delta(trained), trained)
    limits = [find_limit(one) for one in recurrences]
    assert limits == pytest.approx([0.008257, 0.004988, 0.038783], rel=1e-3)


def test_t2_enlarges_the_stable_range_in_all_sampled_settings() -> None:
    """PipeMare's B.4 claims it for all Delta > 0 and all forward delays up to 40; the least gain of
    these 78 is 1.3 %."""
    gains = [
        find_limit(make_pipemare(forward, backward, discrepancy, decay))
        / find_limit(make_pipemare(forward, backward, discrepancy))
        for forward in (1, 2, 3, 5, 8, 13, 20, 40)
        for backward in {0, 1, forward // 2, forward - 1} - {forward}
        for decay in [compute_discrepancy_decay(None, forward - backward)]
        for discrepancy in (0.5, 5.0, 100.0)
    ]
    assert len(gains) == 78 and min(gains) == pytest.approx(1.0129, abs=1e-4)


# ---- half-lives


def test_half_lives_without_delay_are_those_of_the_best_heavy_ball() -> None:
    """The best momentum is ((sqrt(kappa) - 1) / (sqrt(kappa) + 1))^2, and the root radius its
    square root."""
    root = (math.sqrt(1e3) - 1) / (math.sqrt(1e3) + 1)
    life, momentum = find_best_momentum(lambda m: derive_loop_gain(make_delayed_sgd(0, m)), 1e3)
    assert life == pytest.approx(compute_half_life(np.array(root)), rel=0.05)
    assert 1 - momentum == pytest.approx(1 - root**2, rel=0.1)


def test_half_lives_are_the_worst_root_over_the_range_of_curvatures() -> None:
    """Search a grid of rates, with all roots by eigenvalues."""
    compensated = make_delayed_sgd(2, 0.7, compute_spike_coefficients(0.7, 2), 2.0)
    for one in (compensated, make_delayed_sgd(4, 0.3, horizon=8.0)):
        loop, condition = derive_loop_gain(one), 50.0
        radius = compute_root_radius(loop, np.geomspace(1e-4, 4, 3001))
        width = round(math.log(condition) / math.log(4e4) * 3000)
        worst = np.lib.stride_tricks.sliding_window_view(radius, width + 1).max(axis=1).min()
        life = find_least_half_life(loop, condition)
        assert life == pytest.approx(compute_half_life(worst), rel=0.02)
        assert 1 <= find_least_half_lives(loop, np.array([condition]))[0] / life < 1.17
        below, above = find_widest_ranges(loop, worst ** np.array([1.05, 0.95]))
        assert below < condition < above


# ---- bounds


class Quadratic(NamedTuple):
    """f = mean over b of (x - c_b)' A_b (x - c_b) / 2; its gradient is (mean x - offset)."""

    matrices: Any
    centres: Any
    mean: Any
    offset: Any
    least: Any
    L: float


def make_quadratic(seed: int) -> Quadratic:
    """Draw five matrices and their optima."""
    rng = np.random.default_rng(seed)
    roots = rng.normal(size=(5, 6, 6))
    A = roots @ roots.transpose(0, 2, 1) / 6
    centres = rng.normal(size=(5, 6))
    mean, offset = A.mean(axis=0), np.einsum("bij,bj->i", A, centres) / len(A)
    greatest = float(np.linalg.eigvalsh(mean).max())
    return Quadratic(A, centres, mean, offset, np.linalg.solve(mean, offset), greatest)


class BlockRuns(NamedTuple):
    """Runs of Algorithm 1 on a quadratic: f and the squared norm of its gradient before each update,
    (seeds, updates), and the largest gradient of a block."""

    losses: Any
    squares: Any
    largest: float
    gap: float


def run_algorithm_1(lr: float, blocks: int, updates: int, seeds: int = 6) -> BlockRuns:
    """Run RPD by its definition on the quadratic of seed 0; losses are above the least one."""
    A, centres, mean, offset, least, _ = make_quadratic(0)
    delay, size = compute_greatest_delay(blocks), 6 // blocks
    losses, squares = np.zeros((2, seeds, updates))
    largest = 0.0
    for seed in range(seeds):
        rng, path = np.random.default_rng(seed), [np.zeros(6)]
        for k in range(updates):
            away = path[k] - least
            losses[seed, k] = away @ mean @ away / 2
            squares[seed, k] = np.sum((mean @ path[k] - offset) ** 2)
            age = rng.integers(0, min(delay, k) + 1, blocks)
            stale = np.concatenate(
                [path[k - d][j * size : (j + 1) * size] for j, d in enumerate(age)]
            )
            s, b = rng.integers(blocks), rng.integers(len(A))
            block = slice(s * size, (s + 1) * size)
            gradient = (A[b] @ (stale - centres[b]))[block]
            largest = max(largest, float(np.linalg.norm(gradient)))
            path.append(path[k].copy())
            path[-1][block] -= lr * gradient
    return BlockRuns(losses, squares, largest, float(least @ mean @ least / 2))


def test_rpd_stays_below_its_bound() -> None:
    """Run Algorithm 1 on a quadratic, and take the bound with the block gradients of the run."""
    L, blocks, updates = make_quadratic(0).L, 3, 400
    for lr in (0.3 / L, 0.03 / L):
        runs = run_algorithm_1(lr, blocks, updates)
        assert (
            runs.squares.mean() < bound_rpd(lr, updates, blocks, 7, runs.gap, L, runs.largest).total
        )


@pytest.mark.parametrize("blocks", [2, 3, 6])
def test_rpd_stays_below_theorem_h1(blocks: int) -> None:
    """On a quadratic mu is the least eigenvalue. In 6 settings, with the block gradients of the
    runs; without noise the bound is the loss at the start, and shrinks by 1 - lr mu / P."""
    quadratic = make_quadratic(0)
    L, mu = quadratic.L, float(np.linalg.eigvalsh(quadratic.mean).min())
    delay = compute_greatest_delay(blocks)
    for lr in (0.3 / L, 0.01 / L):
        runs = run_algorithm_1(lr, blocks, 300)
        for k in (1, 100, 299):
            bound = bound_rpd_pl(lr, k, blocks, delay, runs.gap, L, runs.largest, mu)
            assert runs.losses[:, k].mean() < bound
        after_one = bound_rpd_pl(lr, 1, blocks, delay, runs.gap, L, 0.0, mu)
        assert after_one == pytest.approx(runs.losses[0, 0] * (1 - lr * mu / blocks))


def test_local_sgd_stays_below_its_bound() -> None:
    A, centres, mean, offset, least, L = make_quadratic(1)
    replicas, local, rounds, blocks = 4, 5, 40, 3
    lr = 0.1 / L
    norms, square, deviation = [], 0.0, 0.0
    for seed in range(4):
        rng, x = np.random.default_rng(seed), np.zeros((replicas, 6))
        for _ in range(rounds):
            for _ in range(local):
                norms.append(float(np.sum((mean @ x.mean(axis=0) - offset) ** 2)))
                for r in range(replicas):
                    every = np.einsum("bij,bj->bi", A, x[r] - centres)
                    away = every - every.mean(axis=0)
                    square = max(square, float((every**2).sum(axis=1).mean()))
                    deviation = max(deviation, float((away**2).sum(axis=1).mean()))
                    x[r] = x[r] - lr * every[rng.integers(len(A))]
            x[:] = x.mean(axis=0)
    passes, gap = rounds * local * blocks * replicas, float(offset @ least / 2)
    sizes = (math.sqrt(square), math.sqrt(deviation))
    bound = bound_local_sgd(lr, passes, blocks, replicas, local, gap, L, *sizes)
    assert np.mean(norms) < bound.total


def test_bounds_have_their_parts() -> None:
    """Compare with values computed by hand for lr 1/2, K 100, P 4, gap 3, L 2, G 5."""
    bound = bound_rpd(0.5, 100, 4, 14, 3.0, 2.0, 5.0)
    assert bound == (2 * 4 * 3 / 50, 0.5 * 4 * 2 * 25, 0.25 * 4 * 196 * 25)
    assert bound.total == pytest.approx(sum(bound[:3]))
    local = bound_local_sgd(0.5, 1600, 4, 4, 5, 3.0, 2.0, 5.0, 1.5)
    assert local == (2 * 3 / (0.5 * 100), 0.5 * 2 * 2.25 / 4, 4 * 0.25 * 25 * 25 * 4)
    assert math.isnan(bound_local_sgd(0.51, 1600, 4, 4, 5, 3.0, 2.0, 5.0, 1.5).total)
    assert [compute_greatest_delay(P) for P in (2, 3, 8, 9)] == [3, 7, 60, 76]
    settled = bound_rpd_pl(0.1, 10**6, 4, 14, 3.0, 2.0, 5.0, 0.5)
    parts = bound_rpd(0.1, 10**6, 4, 14, 3.0, 2.0, 5.0)
    assert settled == pytest.approx(parts.noise + parts.staleness)
    assert bound_rpd_pl(0.1, 0 + 1, 4, 14, 3.0, 2.0, 5.0, 0.5) > 3.0 * (1 - 0.1 * 0.5 / 4)
