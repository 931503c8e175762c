"""The figures of two papers that follow from theory alone: PipeMare's 5(a), 5(b), 6, 10, 16 and Kosson et al.'s 3 to 7, 12.

Each function returns a figure as data. Where a paper does not print a number that its figure was made with, ours is in the title.
PipeMare's Figures 17 and 18 are training runs: experiments in configs/experiments/.
"""

from __future__ import annotations

import math
from importlib import util
from typing import Callable, Dict, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ipu_pipe.errors import BadInput
from ipu_pipe.stability.recurrences import (
    Floats,
    Recurrence,
    compute_discrepancy_decay,
    compute_impulse_response,
    compute_spike_coefficients,
    make_delayed_sgd,
    make_pipemare,
    simulate,
)
from ipu_pipe.stability.roots import (
    LoopGain,
    compute_root_radius,
    derive_loop_gain,
    find_best_momentum,
    find_largest_stable_step,
    find_least_half_life,
    find_least_half_lives,
)
from ipu_pipe.studies.theory_panels import ColourMap, Panel, TheoryFigure, make_line, round_values

YANG = "Yang et al. 2021 (PipeMare)"
KOSSON = "Kosson et al. 2021 (Pipelined Backpropagation at Scale)"
NOISE = "one path of the recurrence each, with the same noise, of seed 0"


# ---- PipeMare


def compute_pipemare_5a() -> TheoryFigure:
    """Compute trajectories of the plain model with noise, by delay."""
    updates, step = 250, 0.2
    noise = np.random.default_rng(0).normal(size=updates)
    delays, limits = (0, 5, 10), {d: 2 * math.sin(math.pi / (4 * d + 2)) for d in (0, 5, 10)}
    paths = {d: simulate(make_delayed_sgd(d), steps=step, updates=updates, noise=noise) for d in delays}
    lines = [
        make_line(f"delay {d} (stable below {limits[d]:.3f})", range(updates + 1), paths[d] ** 2 / 2) for d in delays
    ]
    ends = {d: float((paths[d][-50:] ** 2 / 2).max()) for d in delays}
    panel = Panel("", "update", "loss w²/2", tuple(lines), y_scale="log", y_range=(1e-4, 1e6))
    return TheoryFigure(
        f"{YANG}, Figure 5(a)", f"A quadratic of curvature 1, step {step}, noise N(0, 1), by delay", (panel,),
        f"greatest loss of the last 50 updates: {', '.join(f'{ends[d]:.3g} with delay {d}' for d in delays)}",
        note=NOISE,
    )  # fmt: skip


def compute_pipemare_5b(updates: int = 100_000) -> TheoryFigure:
    """Compute losses of delayed SGD on a linear regression, by step and delay."""
    data = load_regression()
    steps, delays = np.geomspace(1e-3, 1, 25), np.array([1, 2, 4, 8, 16, 32, 64, 128])
    final_losses = train_delayed(data, steps, delays, updates)
    curvature = compute_largest_curvature(data)
    limit = 2 / curvature * np.sin(np.pi / (4 * delays + 2))
    alive = [float(steps[np.isfinite(row)].max()) for row in final_losses]
    ratio = np.array(alive) / limit
    colours = ColourMap(
        round_values(delays),
        round_values(steps),
        np.where(np.isfinite(final_losses), final_losses, np.nan).T.tolist(),
        "loss",
        1.0,
        "red",
    )
    panel = Panel(
        "",
        "delay (updates)",
        "step",
        (make_line("Lemma 1, largest curvature", delays, limit, "k-"),),
        colours,
        "log",
        "log",
    )
    return TheoryFigure(
        f"{YANG}, Figure 5(b)",
        f"Linear regression by delayed SGD, {data.name}, {updates:,} updates of {data.batch} samples;\nred: diverged",
        (panel,),
        f"{data.name} in place of cpusmall; greatest step of the grid (a factor of {steps[1] / steps[0]:.2f} apart) that does"
        f" not diverge over Lemma 1's: {ratio.min():.2f} to {ratio.max():.2f}",
        note="one run a cell, all with the same batches, of seed 0",
    )


def compute_pipemare_6() -> TheoryFigure:
    """Compute discrepancy between the passes' weights, and T2 against it."""
    forward, backward, step, updates = 10, 6, 0.05, 250
    noise = np.random.default_rng(0).normal(size=updates)
    gamma = compute_discrepancy_decay(0.1, forward - backward)
    paths = {
        d: simulate(make_pipemare(forward, backward, d), steps=step, updates=updates, noise=noise)
        for d in (0.0, 3.0, 5.0)
    }
    trajectories = [make_line(f"discrepancy {d:g}", range(updates + 1), path**2 / 2) for d, path in paths.items()]
    models = {
        "discrepancy 5": make_pipemare(forward, backward, 5.0),
        "discrepancy 5, T2 (D = 0.1)": make_pipemare(forward, backward, 5.0, gamma),
        "no discrepancy": make_pipemare(forward, backward),
    }
    return TheoryFigure(
        f"{YANG}, Figure 6",
        f"Passes that read different weights: forward delay {forward}, backward {backward}, curvature 1",
        (
            Panel(f"step {step}, noise N(0, 1)", "update", "loss w²/2", tuple(trajectories), y_scale="log", y_range=(1e-4,
            1e8)), _draw_radii(models, np.linspace(0.001, 0.25, 120)),
        ),
        "largest stable steps: " + _list_limits(models),
        note=f"left: {NOISE}; right: from the characteristic polynomials",
    )  # fmt: skip


def compute_pipemare_10() -> TheoryFigure:
    """Compute the largest stable step by discrepancy."""
    forward, backward = 40, 10
    gamma = compute_discrepancy_decay(None, forward - backward)
    sensitivities = np.linspace(-100, 100, 401)
    limits = {
        label: np.array(
            [
                find_largest_stable_step(derive_loop_gain(make_pipemare(forward, backward, d, decay)))
                for d in sensitivities.tolist()
            ]
        )
        for label, decay in (("without T2", None), (f"T2, gamma = 1 - 2/31 = {gamma:.3f}", gamma))
    }
    plain, corrected = limits.values()
    gains = corrected[sensitivities > 0] / plain[sensitivities > 0]
    worse = sensitivities[corrected < plain * (1 - 1e-9)]
    return TheoryFigure(
        f"{YANG}, Figure 10",
        f"Largest stable step by discrepancy: forward delay {forward}, backward {backward}, curvature 1",
        (
            Panel("", "discrepancy", "largest stable step", tuple(make_line(k, sensitivities, v) for k, v in limits.items()),
                  y_scale="log"),
        ),
        f"for discrepancies above 0 T2 raises the step by {gains.min():.2f} to {gains.max():.2f} times;"
        + (f" it lowers it between {worse.min():g} and {worse.max():g}" if len(worse) else " it lowers it nowhere"),
    )  # fmt: skip


def compute_pipemare_16() -> TheoryFigure:
    """Compute recomputation with other weights, and T2 against it."""
    gamma = compute_discrepancy_decay(0.1, 9)
    models = {
        "recomputed with other weights": make_pipemare(10, 1, 10.0, recompute=(4, -5.0)),
        "the same, T2 (D = 0.1)": make_pipemare(10, 1, 10.0, gamma, (4, -5.0)),
        "no recomputation, discrepancy 10": make_pipemare(10, 1, 10.0),
        "no discrepancy": make_pipemare(10, 1),
    }
    return TheoryFigure(
        f"{YANG}, Figure 16",
        "Recomputation with other weights: forward delay 10, recomputation 4, backward 1;\ndiscrepancy 10, Phi -5, curvature 1",
        (_draw_radii(models, np.linspace(0.001, 0.25, 120)),),
        "largest stable steps: " + _list_limits(models),
    )


def _draw_radii(models: Dict[str, Recurrence], steps: Floats) -> Panel:
    lines = [
        make_line(label, steps, compute_root_radius(derive_loop_gain(one), steps)) for label, one in models.items()
    ]
    edge = make_line("stable below", steps[[0, -1]], [1, 1], "k:")
    return Panel("greatest root by step", "step", "greatest root", (*lines, edge))


def _list_limits(models: Dict[str, Recurrence]) -> str:
    return ", ".join(
        f"{find_largest_stable_step(derive_loop_gain(one)):.4f} ({label})" for label, one in models.items()
    )


# ---- pipelined backpropagation


Rule = Callable[[float], LoopGain]  # momentum -> loop


def make_gdm(delay: int) -> Rule:
    """Return SGD with momentum."""
    return lambda m: derive_loop_gain(make_delayed_sgd(delay, m))


def make_compensated(delay: int) -> Rule:
    """Return spike compensation SC_D."""
    return lambda m: derive_loop_gain(make_delayed_sgd(delay, m, compute_spike_coefficients(m, delay)))


def make_predicted(delay: int, horizon: float) -> Rule:
    """Return linear weight prediction LWP."""
    return lambda m: derive_loop_gain(make_delayed_sgd(delay, m, horizon=horizon))


def make_combined(delay: int) -> Rule:
    """Return the combination LWP_w,D + SC_D."""
    return lambda m: derive_loop_gain(make_delayed_sgd(delay, m, compute_spike_coefficients(m, delay), delay))


def make_nesterov(delay: int) -> Rule:
    """Return Nesterov's momentum, w <- w - step (m v + g)."""
    return lambda m: derive_loop_gain(make_delayed_sgd(delay, m, (m, 1.0)))


def compute_pb_3() -> TheoryFigure:
    """Compute what a gradient adds to each update."""
    delay, m, times = 6, 0.85, 25
    spike = compute_spike_coefficients(m, delay)
    early = compute_impulse_response(make_delayed_sgd(0, m), times)
    panels = [
        Panel(title, "update after the gradient was computed", "contribution", (make_line("this", range(times), response, "o-"),
              make_line("no delay", range(times), early, ":")))
        for title, response in (
            ("no delay", early),
            (f"delay {delay}", compute_impulse_response(make_delayed_sgd(delay, m), times)),
            (f"delay {delay}, spike compensation", compute_impulse_response(make_delayed_sgd(delay, m, spike), times)),
        )
    ]  # fmt: skip
    late = compute_impulse_response(make_delayed_sgd(delay, m, spike), times)
    return TheoryFigure(
        f"{KOSSON}, Figure 3", f"Impulse response of SGD with momentum {m}", tuple(panels),
        f"the spike, {late[delay]:.3f}, is the sum of the contributions missed by then, {early[: delay + 1].sum():.3f}; after it"
        " the responses are the same",
    )  # fmt: skip


def compute_pb_4() -> TheoryFigure:
    """Compute the greatest root by normalized rate and momentum."""
    rates, rest = np.geomspace(1e-9, 4, 56), np.geomspace(1, 1e-5, 41)
    rules = {
        "SGD with momentum, no delay": make_gdm(0),
        "SGD with momentum, delay 1": make_gdm(1),
        "SC_D, delay 1": make_compensated(1),
        "Nesterov's momentum, no delay": make_nesterov(0),
        "LWP_D, delay 1": make_predicted(1, 1.0),
        "LWP_w,D + SC_D, delay 1": make_combined(1),
    }
    panels, areas = [], []
    for title, rule in rules.items():
        radius = np.stack([compute_root_radius(rule(1 - r), rates) for r in rest.tolist()])
        areas.append(f"{(radius < 1).mean():.3f} ({title})")
        margin = np.where(radius < 1, np.log10(np.maximum(1 - radius, 1e-12)), np.nan)
        colours = ColourMap(
            round_values(rates),
            round_values(rest),
            [round_values(row) for row in margin],
            "log10 (1 - greatest root)",
            0.0,
        )
        panels.append(Panel(title, "rate times curvature", "1 - momentum", (), colours, "log", "log"))
    return TheoryFigure(
        f"{KOSSON}, Figure 4", "Greatest root by normalized rate and momentum; black: unstable", tuple(panels),
        f"stable shares of the area shown: {', '.join(areas)}", 2,
    )  # fmt: skip


def compute_pb_5() -> TheoryFigure:
    """Compute the least half-life by condition number."""
    conditions, rest = np.geomspace(1, 1e6, 37), np.geomspace(1, 1e-5, 121)
    rules = {
        "SGD with momentum, delay 1": make_gdm(1),
        "SC_D, delay 1": make_compensated(1),
        "LWP_D, delay 1": make_predicted(1, 1.0),
        "LWP_w,D + SC_D, delay 1": make_combined(1),
        "SGD with momentum, no delay": make_gdm(0),
    }
    half_lives = {
        label: np.stack([find_least_half_lives(rule(1 - r), conditions, 300) for r in rest.tolist()]).min(axis=0)
        for label, rule in rules.items()
    }
    at = {label: values[18] for label, values in half_lives.items()}
    return TheoryFigure(
        f"{KOSSON}, Figure 5", "Least half-life of the error on a quadratic, over all rates and momenta",
        (
            Panel("", "condition number", "half-life (updates)",
                  tuple(make_line(k, conditions, v) for k, v in half_lives.items()), x_scale="log", y_scale="log"),
        ),
        "at a condition number of 1000: " + ", ".join(f"{value:.3g} ({label})" for label, value in at.items()),
    )  # fmt: skip


def compute_pb_6() -> TheoryFigure:
    """Compute the least half-life by delay."""
    delays = list(range(17))
    rules: Dict[str, Callable[[int], Rule]] = {
        "SGD with momentum": make_gdm, "LWP_D": lambda d: make_predicted(d, float(d)), "LWP_w,D + SC_D": make_combined,
    }  # fmt: skip
    half_lives = {label: [find_best_momentum(rule(d), 1e3)[0] for d in delays] for label, rule in rules.items()}
    return TheoryFigure(
        f"{KOSSON}, Figure 6", "Least half-life on a quadratic of condition number 1000, over all rates and momenta",
        (Panel("", "delay (updates)", "half-life (updates)", tuple(make_line(k, delays, v) for k, v in half_lives.items()),
        y_scale="log"),), "at a delay of 16: " + ", ".join(f"{values[-1]:.4g} ({label})" for label, values in half_lives.items()),
    )  # fmt: skip


def compute_pb_7() -> TheoryFigure:
    """Compute the least half-life by momentum and horizon."""
    rest = np.geomspace(1, 1e-5, 51)
    rules = {f"LWP, T = {T}": make_predicted(5, float(T)) for T in (0, 3, 5, 10, 20)}
    rules["LWP_w,D + SC_D"] = make_combined(5)
    half_lives = {
        label: [find_least_half_life(rule(1 - r), 1e3) for r in rest.tolist()] for label, rule in rules.items()
    }
    best = {label: 1 - rest[int(np.argmin(values))] for label, values in half_lives.items()}
    return TheoryFigure(
        f"{KOSSON}, Figure 7", "Least half-life on a quadratic of condition number 1000, delay 5, over all rates",
        (
            Panel("", "1 - momentum", "half-life (updates)", tuple(make_line(k, rest, v) for k, v in half_lives.items()),
                  x_scale="log", y_scale="log", y_range=(1e2, 1e4)),
        ),
        "best momentum: " + ", ".join(f"{m:.4g}, half-life {min(half_lives[k]):.3g} ({k})" for k, m in best.items()),
    )  # fmt: skip


def compute_pb_12() -> TheoryFigure:
    """Compute the least half-life by horizon."""
    scales = np.concatenate([np.linspace(0, 4, 17), np.linspace(4.5, 10, 12)])
    cases = {f"condition {c:g}, delay {d}": (c, d) for c, d in ((1e3, 4), (1e3, 10), (1e5, 4))}
    half_lives = {
        label: [find_best_momentum(make_predicted(d, scale * d), c)[0] for scale in scales.tolist()]
        for label, (c, d) in cases.items()
    }
    best = {label: scales[int(np.argmin(values))] for label, values in half_lives.items()}
    return TheoryFigure(
        f"{KOSSON}, Figure 12", "Least half-life with LWP of horizon scale x delay, over all rates and momenta",
        (
            Panel("", "prediction scale T / D", "half-life (updates)",
                  tuple(make_line(k, scales, v) for k, v in half_lives.items()), y_scale="log"),
        ),
        "best scales: " + ", ".join(f"{scale:g} ({label})" for label, scale in best.items()),
    )  # fmt: skip


# ---- linear regression by SGD with delayed gradients, beside PipeMare's Lemma 1 (Figure 5(b))

GONE = 1e12  # a squared weight beyond which a run has diverged


class Regression(NamedTuple):
    """Features x (n, d) and targets y (n,), each of mean 0 and variance 1; `batch` samples make an update."""

    name: str
    x: Floats
    y: Floats
    batch: int = 32


def load_regression() -> Regression:
    """Return scikit-learn's diabetes set (442 samples, 10 features). Raise `BadInput` if scikit-learn is not installed."""
    if util.find_spec("sklearn") is None:
        raise BadInput("pipemare_5b: its data come with scikit-learn, which is not installed: pip install scikit-learn")
    from sklearn.datasets import load_diabetes

    x, y = load_diabetes(return_X_y=True, scaled=False)
    return Regression("diabetes (442 x 10)", (x - x.mean(axis=0)) / x.std(axis=0), (y - y.mean()) / y.std())


def compute_largest_curvature(data: Regression) -> float:
    """Return the largest eigenvalue of X'X / n, the Hessian of the loss mean (x w - y)^2 / 2."""
    return float(np.linalg.eigvalsh(data.x.T @ data.x / len(data.x)).max())


def train_delayed(data: Regression, steps: Floats, delays: NDArray[np.int64], updates: int, seed: int = 0) -> Floats:
    """Return the loss over all samples after training from 0, infinity where it diverged: shape (delays, steps).

    All runs see the same batches, drawn with replacement; an update uses the gradient at the weights `delay` updates old.
    """
    rng = np.random.default_rng(seed)
    ring = int(delays.max()) + 1
    history = np.zeros((ring, len(delays), len(steps), data.x.shape[1]))
    w, rows = history[0].copy(), np.arange(len(delays))
    rates = (steps / data.batch)[:, None]
    with np.errstate(over="ignore", invalid="ignore"):
        for t in range(updates):
            if t % 1000 == 0:
                chosen = rng.integers(0, len(data.x), (1000, data.batch))
                w[(w * w).sum(axis=2) > GONE] = np.nan
            x, y = data.x[chosen[t % 1000]], data.y[chosen[t % 1000]]
            stale = history[np.maximum(t - delays, 0) % ring, rows]
            w -= rates * ((stale @ x.T - y) @ x)
            history[(t + 1) % ring] = w
        rest = (w @ data.x.T - data.y) ** 2
        loss = rest.mean(axis=2) / 2
    return np.where(loss < GONE, loss, np.inf)


FIGURES: Dict[str, Callable[[], TheoryFigure]] = {
    "pipemare_5a": compute_pipemare_5a,
    "pipemare_5b": compute_pipemare_5b,
    "pipemare_6": compute_pipemare_6,
    "pipemare_10": compute_pipemare_10,
    "pipemare_16": compute_pipemare_16,
    "pb_3": compute_pb_3,
    "pb_4": compute_pb_4,
    "pb_5": compute_pb_5,
    "pb_6": compute_pb_6,
    "pb_7": compute_pb_7,
    "pb_12": compute_pb_12,
}
