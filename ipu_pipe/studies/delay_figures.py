"""The figures of two papers that follow from theory alone, as data: PipeMare's 5(a), 5(b), 6, 10, 16 and Kosson et al.'s 3
to 7, 12.

Each is a function that gives a `Figure`: panels of lines or a map of colours, with what they are in words. Where a paper
does not print a number that its figure was made with, ours is in the title. PipeMare's Figures 17 and 18 are training runs:
experiments in configs/experiments/.
"""

from __future__ import annotations

import math
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple

import numpy as np
from numpy.typing import ArrayLike

from ipu_pipe.stability.recurrences import (
    Recurrence,
    compute_discrepancy_decay,
    compute_impulse_response,
    compute_spike_coefficients,
    make_delayed_sgd,
    make_pipemare,
    simulate,
)
from ipu_pipe.stability.roots import (
    Floats,
    LoopGain,
    compute_root_radius,
    derive_loop_gain,
    find_best_momentum,
    find_largest_stable_step,
    find_least_half_life,
    find_least_half_lives,
)
from ipu_pipe.studies.delayed_regression import largest_curvature, losses, regression_set

YANG = "Yang et al. 2021 (PipeMare)"
KOSSON = "Kosson et al. 2021 (Pipelined Backpropagation at Scale)"


class Line(NamedTuple):
    """`style`: matplotlib's, of the line; where there is a value that is not finite, there is a gap."""

    label: str
    x: List[float]
    y: List[float]
    style: str = "-"


class Colours(NamedTuple):
    """`values`: by row (y), then column (x); not finite or beyond `most`: drawn in `beyond`."""

    x: List[float]
    y: List[float]
    values: List[List[float]]
    label: str
    most: float
    beyond: str = "black"


class Panel(NamedTuple):
    """One picture of a figure. `x_scale`, `y_scale`: linear or log; `y_range`: what is shown."""

    title: str
    x_label: str
    y_label: str
    lines: Tuple[Line, ...] = ()
    colours: Optional[Colours] = None
    x_scale: str = "linear"
    y_scale: str = "linear"
    y_range: Optional[Tuple[float, float]] = None


class Figure(NamedTuple):
    """`seen`: what the data say of the paper's own statement, in a sentence. `note`: what it was computed with."""

    source: str
    title: str
    panels: Tuple[Panel, ...]
    seen: str
    rows: int = 1
    note: str = "from the characteristic polynomials: nothing is trained, nothing drawn at random"


NOISE = "one path of the recurrence each, with the same noise, of seed 0"


def line(label: str, x: ArrayLike, y: ArrayLike, style: str = "-") -> Line:
    """To four digits, as pictures show."""
    return Line(label, _rounded(x), _rounded(y), style)


def _rounded(values: ArrayLike) -> List[float]:
    return [float(f"{value:.4g}") for value in np.asarray(values, np.float64).tolist()]


# ---- PipeMare


def pipemare_5a() -> Figure:
    """Trajectories of the plain model with noise, by delay."""
    updates, step = 250, 0.2
    noise = np.random.default_rng(0).normal(size=updates)
    delays, limits = (0, 5, 10), {d: 2 * math.sin(math.pi / (4 * d + 2)) for d in (0, 5, 10)}
    paths = {d: simulate(make_delayed_sgd(d), steps=step, updates=updates, noise=noise) for d in delays}
    lines = [line(f"delay {d} (stable below {limits[d]:.3f})", range(updates + 1), paths[d] ** 2 / 2) for d in delays]
    ends = {d: float((paths[d][-50:] ** 2 / 2).max()) for d in delays}
    panel = Panel("", "update", "loss w²/2", tuple(lines), y_scale="log", y_range=(1e-4, 1e6))
    return Figure(
        f"{YANG}, Figure 5(a)", f"A quadratic of curvature 1, step {step}, noise N(0, 1), by delay", (panel,),
        f"greatest loss of the last 50 updates: {', '.join(f'{ends[d]:.3g} with delay {d}' for d in delays)}",
        note=NOISE,
    )  # fmt: skip


def pipemare_5b(updates: int = 100_000) -> Figure:
    """Losses of delayed SGD on a linear regression, by step and delay."""
    data = regression_set()
    steps, delays = np.geomspace(1e-3, 1, 25), np.array([1, 2, 4, 8, 16, 32, 64, 128])
    found = losses(data, steps, delays, updates)
    curvature = largest_curvature(data)
    limit = 2 / curvature * np.sin(np.pi / (4 * delays + 2))
    alive = [float(steps[np.isfinite(row)].max()) for row in found]
    ratio = np.array(alive) / limit
    colours = Colours(
        _rounded(delays),
        _rounded(steps),
        np.where(np.isfinite(found), found, np.nan).T.tolist(),
        "loss",
        1.0,
        "red",
    )
    panel = Panel(
        "", "delay (updates)", "step", (line("Lemma 1, largest curvature", delays, limit, "k-"),), colours, "log", "log"
    )
    return Figure(
        f"{YANG}, Figure 5(b)",
        f"Linear regression by delayed SGD, {data.name}, {updates:,} updates of {data.batch} samples;\nred: diverged",
        (panel,),
        f"{data.name} in place of cpusmall; greatest step of the grid (a factor of {steps[1] / steps[0]:.2f} apart) that does"
        f" not diverge over Lemma 1's: {ratio.min():.2f} to {ratio.max():.2f}",
        note="one run a cell, all with the same batches, of seed 0",
    )


def pipemare_6() -> Figure:
    """Discrepancy between the passes' weights, and T2 against it."""
    forward, backward, step, updates = 10, 6, 0.05, 250
    noise = np.random.default_rng(0).normal(size=updates)
    gamma = compute_discrepancy_decay(0.1, forward - backward)
    paths = {
        d: simulate(make_pipemare(forward, backward, d), steps=step, updates=updates, noise=noise)
        for d in (0.0, 3.0, 5.0)
    }
    trajectories = [line(f"discrepancy {d:g}", range(updates + 1), path**2 / 2) for d, path in paths.items()]
    models = {
        "discrepancy 5": make_pipemare(forward, backward, 5.0),
        "discrepancy 5, T2 (D = 0.1)": make_pipemare(forward, backward, 5.0, gamma),
        "no discrepancy": make_pipemare(forward, backward),
    }
    return Figure(
        f"{YANG}, Figure 6",
        f"Passes that read different weights: forward delay {forward}, backward {backward}, curvature 1",
        (
            Panel(f"step {step}, noise N(0, 1)", "update", "loss w²/2", tuple(trajectories), y_scale="log", y_range=(1e-4,
            1e8)), _radii(models, np.linspace(0.001, 0.25, 120)),
        ),
        "largest stable steps: " + _limits(models),
        note=f"left: {NOISE}; right: from the characteristic polynomials",
    )  # fmt: skip


def pipemare_10() -> Figure:
    """The largest stable step by discrepancy."""
    forward, backward = 40, 10
    gamma = compute_discrepancy_decay(None, forward - backward)
    sensitivities = np.linspace(-100, 100, 401)
    found = {
        label: np.array(
            [
                find_largest_stable_step(derive_loop_gain(make_pipemare(forward, backward, d, decay)))
                for d in sensitivities.tolist()
            ]
        )
        for label, decay in (("without T2", None), (f"T2, gamma = 1 - 2/31 = {gamma:.3f}", gamma))
    }
    plain, corrected = found.values()
    gains = corrected[sensitivities > 0] / plain[sensitivities > 0]
    worse = sensitivities[corrected < plain * (1 - 1e-9)]
    return Figure(
        f"{YANG}, Figure 10",
        f"Largest stable step by discrepancy: forward delay {forward}, backward {backward}, curvature 1",
        (
            Panel("", "discrepancy", "largest stable step", tuple(line(k, sensitivities, v) for k, v in found.items()),
                  y_scale="log"),
        ),
        f"for discrepancies above 0 T2 raises the step by {gains.min():.2f} to {gains.max():.2f} times;"
        + (f" it lowers it between {worse.min():g} and {worse.max():g}" if len(worse) else " it lowers it nowhere"),
    )  # fmt: skip


def pipemare_16() -> Figure:
    """Recomputation with other weights, and T2 against it."""
    gamma = compute_discrepancy_decay(0.1, 9)
    models = {
        "recomputed with other weights": make_pipemare(10, 1, 10.0, recompute=(4, -5.0)),
        "the same, T2 (D = 0.1)": make_pipemare(10, 1, 10.0, gamma, (4, -5.0)),
        "no recomputation, discrepancy 10": make_pipemare(10, 1, 10.0),
        "no discrepancy": make_pipemare(10, 1),
    }
    return Figure(
        f"{YANG}, Figure 16",
        "Recomputation with other weights: forward delay 10, recomputation 4, backward 1;\ndiscrepancy 10, Phi -5, curvature 1",
        (_radii(models, np.linspace(0.001, 0.25, 120)),),
        "largest stable steps: " + _limits(models),
    )


def _radii(models: Dict[str, Recurrence], steps: Floats) -> Panel:
    lines = [line(label, steps, compute_root_radius(derive_loop_gain(one), steps)) for label, one in models.items()]
    edge = line("stable below", steps[[0, -1]], [1, 1], "k:")
    return Panel("greatest root by step", "step", "greatest root", (*lines, edge))


def _limits(models: Dict[str, Recurrence]) -> str:
    return ", ".join(
        f"{find_largest_stable_step(derive_loop_gain(one)):.4f} ({label})" for label, one in models.items()
    )


# ---- pipelined backpropagation


Rule = Callable[[float], LoopGain]  # momentum -> loop


def gdm(delay: int) -> Rule:
    """SGD with momentum."""
    return lambda m: derive_loop_gain(make_delayed_sgd(delay, m))


def compensated(delay: int) -> Rule:
    """SC_D."""
    return lambda m: derive_loop_gain(make_delayed_sgd(delay, m, compute_spike_coefficients(m, delay)))


def predicted(delay: int, horizon: float) -> Rule:
    """LWP."""
    return lambda m: derive_loop_gain(make_delayed_sgd(delay, m, horizon=horizon))


def combined(delay: int) -> Rule:
    """LWP_w,D + SC_D."""
    return lambda m: derive_loop_gain(make_delayed_sgd(delay, m, compute_spike_coefficients(m, delay), delay))


def nesterov(delay: int) -> Rule:
    """w <- w - step (m v + g)."""
    return lambda m: derive_loop_gain(make_delayed_sgd(delay, m, (m, 1.0)))


def pb_3() -> Figure:
    """What a gradient adds to each update."""
    delay, m, times = 6, 0.85, 25
    spike = compute_spike_coefficients(m, delay)
    early = compute_impulse_response(make_delayed_sgd(0, m), times)
    panels = [
        Panel(title, "update after the gradient was computed", "contribution", (line("this", range(times), response, "o-"),
              line("no delay", range(times), early, ":")))
        for title, response in (
            ("no delay", early),
            (f"delay {delay}", compute_impulse_response(make_delayed_sgd(delay, m), times)),
            (f"delay {delay}, spike compensation", compute_impulse_response(make_delayed_sgd(delay, m, spike), times)),
        )
    ]  # fmt: skip
    late = compute_impulse_response(make_delayed_sgd(delay, m, spike), times)
    return Figure(
        f"{KOSSON}, Figure 3", f"Impulse response of SGD with momentum {m}", tuple(panels),
        f"the spike, {late[delay]:.3f}, is the sum of the contributions missed by then, {early[: delay + 1].sum():.3f}; after it"
        " the responses are the same",
    )  # fmt: skip


def pb_4() -> Figure:
    """The greatest root by normalized rate and momentum."""
    rates, rest = np.geomspace(1e-9, 4, 56), np.geomspace(1, 1e-5, 41)
    rules = {
        "SGD with momentum, no delay": gdm(0),
        "SGD with momentum, delay 1": gdm(1),
        "SC_D, delay 1": compensated(1),
        "Nesterov's momentum, no delay": nesterov(0),
        "LWP_D, delay 1": predicted(1, 1.0),
        "LWP_w,D + SC_D, delay 1": combined(1),
    }
    panels, areas = [], []
    for title, rule in rules.items():
        radius = np.stack([compute_root_radius(rule(1 - r), rates) for r in rest.tolist()])
        areas.append(f"{(radius < 1).mean():.3f} ({title})")
        margin = np.where(radius < 1, np.log10(np.maximum(1 - radius, 1e-12)), np.nan)
        colours = Colours(
            _rounded(rates), _rounded(rest), [_rounded(row) for row in margin], "log10 (1 - greatest root)", 0.0
        )
        panels.append(Panel(title, "rate times curvature", "1 - momentum", (), colours, "log", "log"))
    return Figure(
        f"{KOSSON}, Figure 4", "Greatest root by normalized rate and momentum; black: unstable", tuple(panels),
        f"stable shares of the area shown: {', '.join(areas)}", 2,
    )  # fmt: skip


def pb_5() -> Figure:
    """The least half-life by condition number."""
    conditions, rest = np.geomspace(1, 1e6, 37), np.geomspace(1, 1e-5, 121)
    rules = {
        "SGD with momentum, delay 1": gdm(1),
        "SC_D, delay 1": compensated(1),
        "LWP_D, delay 1": predicted(1, 1.0),
        "LWP_w,D + SC_D, delay 1": combined(1),
        "SGD with momentum, no delay": gdm(0),
    }
    found = {
        label: np.stack([find_least_half_lives(rule(1 - r), conditions, 300) for r in rest.tolist()]).min(axis=0)
        for label, rule in rules.items()
    }
    at = {label: values[18] for label, values in found.items()}
    return Figure(
        f"{KOSSON}, Figure 5", "Least half-life of the error on a quadratic, over all rates and momenta",
        (
            Panel("", "condition number", "half-life (updates)", tuple(line(k, conditions, v) for k, v in found.items()),
                  x_scale="log", y_scale="log"),
        ),
        "at a condition number of 1000: " + ", ".join(f"{value:.3g} ({label})" for label, value in at.items()),
    )  # fmt: skip


def pb_6() -> Figure:
    """The least half-life by delay."""
    delays = list(range(17))
    rules: Dict[str, Callable[[int], Rule]] = {
        "SGD with momentum": gdm, "LWP_D": lambda d: predicted(d, float(d)), "LWP_w,D + SC_D": combined,
    }  # fmt: skip
    found = {label: [find_best_momentum(rule(d), 1e3)[0] for d in delays] for label, rule in rules.items()}
    return Figure(
        f"{KOSSON}, Figure 6", "Least half-life on a quadratic of condition number 1000, over all rates and momenta",
        (Panel("", "delay (updates)", "half-life (updates)", tuple(line(k, delays, v) for k, v in found.items()),
        y_scale="log"),), "at a delay of 16: " + ", ".join(f"{values[-1]:.4g} ({label})" for label, values in found.items()),
    )  # fmt: skip


def pb_7() -> Figure:
    """The least half-life by momentum and horizon."""
    rest = np.geomspace(1, 1e-5, 51)
    rules = {f"LWP, T = {T}": predicted(5, float(T)) for T in (0, 3, 5, 10, 20)}
    rules["LWP_w,D + SC_D"] = combined(5)
    found = {label: [find_least_half_life(rule(1 - r), 1e3) for r in rest.tolist()] for label, rule in rules.items()}
    best = {label: 1 - rest[int(np.argmin(values))] for label, values in found.items()}
    return Figure(
        f"{KOSSON}, Figure 7", "Least half-life on a quadratic of condition number 1000, delay 5, over all rates",
        (
            Panel("", "1 - momentum", "half-life (updates)", tuple(line(k, rest, v) for k, v in found.items()),
                  x_scale="log", y_scale="log", y_range=(1e2, 1e4)),
        ),
        "best momentum: " + ", ".join(f"{m:.4g}, half-life {min(found[k]):.3g} ({k})" for k, m in best.items()),
    )  # fmt: skip


def pb_12() -> Figure:
    """The least half-life by horizon."""
    scales = np.concatenate([np.linspace(0, 4, 17), np.linspace(4.5, 10, 12)])
    cases = {f"condition {c:g}, delay {d}": (c, d) for c, d in ((1e3, 4), (1e3, 10), (1e5, 4))}
    found = {
        label: [find_best_momentum(predicted(d, scale * d), c)[0] for scale in scales.tolist()]
        for label, (c, d) in cases.items()
    }
    best = {label: scales[int(np.argmin(values))] for label, values in found.items()}
    return Figure(
        f"{KOSSON}, Figure 12", "Least half-life with LWP of horizon scale x delay, over all rates and momenta",
        (
            Panel("", "prediction scale T / D", "half-life (updates)", tuple(line(k, scales, v) for k, v in found.items()),
                  y_scale="log"),
        ),
        "best scales: " + ", ".join(f"{scale:g} ({label})" for label, scale in best.items()),
    )  # fmt: skip


FIGURES: Dict[str, Callable[[], Figure]] = {
    make.__name__: make
    for make in (
        pipemare_5a, pipemare_5b, pipemare_6, pipemare_10, pipemare_16, pb_3, pb_4, pb_5, pb_6, pb_7, pb_12,
    )
}  # fmt: skip


def as_json(figure: Figure) -> Dict[str, Any]:
    """Plain data; what is not finite is null."""

    def plain(value: Any) -> Any:
        if hasattr(value, "_asdict"):
            return {key: plain(item) for key, item in value._asdict().items()}
        if isinstance(value, (list, tuple)):
            return [plain(item) for item in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return dict(plain(figure))
