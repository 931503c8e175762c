"""Compute and draw the figures that follow from theory alone: PipeMare's 5(a), 5(b), 6, 10, 16,
Kosson et al.'s 3 to 7, 12.

Each function returns a figure as data. The title states each number that we chose because the paper
does not print it. PipeMare's Figures 17 and 18 are training runs: experiments in
configs/experiments/.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ipu_pipe.report.plots import open_figure
from ipu_pipe.stability import recurrences, roots
from ipu_pipe.stability.recurrences import Floats, Recurrence
from ipu_pipe.stability.roots import LoopGain
from tools.experiments.half_lives import (
    compute_impulse_response,
    find_best_momentum,
    find_least_half_life,
    find_least_half_lives,
)

# ---- a figure as data, which is its JSON, and its picture

# the result of `make_panel`
Panel = Dict[str, Any]


class TheoryFigure(NamedTuple):
    """A figure of `panels` in `rows` rows.

    `seen`: a sentence on what the data say of the paper's statement. `note`: how they were
    computed.
    """

    source: str
    title: str
    panels: List[Panel]
    seen: str
    rows: int = 1
    note: str = "from the characteristic polynomials: nothing is trained, nothing drawn at random"


def make_panel(
    x_label: str,
    y_label: str,
    x: ArrayLike,
    lines: Mapping[str, ArrayLike],
    title: str = "",
    style: str = "-",
    **more: Any,
) -> Panel:
    """Return one picture of a figure, with a line for each label in matplotlib's `style`.

    `more`: its colours, x_scale and y_scale ("linear" or "log"), and the y_range that is shown.
    """
    scales = {"colours": None, "x_scale": "linear", "y_scale": "linear", "y_range": None, **more}
    panel = {"title": title, "x_label": x_label, "y_label": y_label, "lines": [], **scales}
    for label, y in lines.items():
        add_line(panel, label, x, y, style)
    return panel


def add_line(panel: Panel, label: str, x: ArrayLike, y: ArrayLike, style: str) -> None:
    """Add a line, with a gap where a value is not finite."""
    panel["lines"].append(
        {"label": label, "x": round_values(x), "y": round_values(y), "style": style}
    )


def make_colours(
    x: ArrayLike, y: ArrayLike, values: ArrayLike, label: str, most: float, beyond: str = "black"
) -> Dict[str, Any]:
    """Return values by row (y), then column (x); those that are not finite or above `most` are
    drawn in the colour `beyond`.
    """
    rows = np.asarray(values).tolist()
    return {
        "x": round_values(x),
        "y": round_values(y),
        "values": rows,
        "label": label,
        "most": most,
        "beyond": beyond,
    }


def round_values(values: ArrayLike) -> List[float]:
    """Return values rounded to four digits, as pictures show."""
    return [float(f"{value:.4g}") for value in np.asarray(values, np.float64).tolist()]


def draw(figure: TheoryFigure, file: Path) -> None:
    """Draw a figure into a PNG file."""
    count = len(figure.panels)
    size = (6.5, 4.5) if count == 1 else (5.2, 4.0) if figure.rows == 1 else (4.4, 3.5)
    with open_figure(
        file, size, count, figure.rows, title=figure.title, note=figure.note
    ) as all_axes:
        for axes, panel in zip(all_axes, figure.panels):
            axes.set(
                **{
                    f"{name}{end}": panel[f"{name}_{end}"]
                    for name in "xy"
                    for end in ("scale", "label")
                }
            )
            axes.set_title(panel["title"], fontsize="medium")
            if panel["colours"] is not None:
                _draw_colours(axes, **panel["colours"])
            for line in panel["lines"]:
                axes.plot(line["x"], line["y"], line["style"], label=line["label"], markersize=3)
            if panel["y_range"] is not None:
                axes.set_ylim(*panel["y_range"])
            if panel["lines"]:
                axes.legend(fontsize="x-small")


def _draw_colours(
    axes: Any,
    x: List[float],
    y: List[float],
    values: List[List[float]],
    label: str,
    most: float,
    beyond: str,
) -> None:
    array = np.array(values, np.float64)
    masked = np.ma.masked_invalid(np.where(array <= most, array, np.nan))
    axes.set_facecolor(beyond)
    mesh = axes.pcolormesh(x, y, masked, shading="nearest", cmap="viridis", rasterized=True)
    axes.figure.colorbar(mesh, ax=axes, label=label)
    if y[0] > y[-1]:
        axes.invert_yaxis()


# ---- the figures

YANG = "Yang et al. 2021 (PipeMare)"
KOSSON = "Kosson et al. 2021 (Pipelined Backpropagation at Scale)"
NOISE = "one path of the recurrence each, with the same noise, of seed 0"


# ---- PipeMare


def simulate_losses(recurrence: Recurrence, step: float, updates: int) -> Floats:
    """Return the losses w^2 / 2 along a path of a recurrence with noise N(0, 1) of seed 0."""
    noise = np.random.default_rng(0).normal(size=updates)
    return recurrences.simulate(recurrence, steps=step, updates=updates, noise=noise) ** 2 / 2


def compute_pipemare_5a() -> TheoryFigure:
    """Compute trajectories of the plain model with noise, by delay."""
    updates, step = 250, 0.2
    losses = {
        d: simulate_losses(recurrences.make_delayed_sgd(d), step, updates) for d in (0, 5, 10)
    }
    lines = {
        f"delay {d} (stable below {2 * math.sin(math.pi / (4 * d + 2)):.3f})": loss
        for d, loss in losses.items()
    }
    ends = ", ".join(f"{loss[-50:].max():.3g} with delay {d}" for d, loss in losses.items())
    panel = make_panel(
        "update", "loss w²/2", range(updates + 1), lines, y_scale="log", y_range=(1e-4, 1e6)
    )
    return TheoryFigure(
        f"{YANG}, Figure 5(a)",
        f"A quadratic of curvature 1, step {step}, noise N(0, 1), by delay",
        [panel],
        f"greatest loss of the last 50 updates: {ends}",
        note=NOISE,
    )


def compute_pipemare_5b(updates: int = 100_000) -> TheoryFigure:
    """Compute losses of delayed SGD on a linear regression, by step and delay."""
    data = load_regression()
    steps, delays = np.geomspace(1e-3, 1, 25), np.array([1, 2, 4, 8, 16, 32, 64, 128])
    losses = train_delayed(data, steps, delays, updates)
    limit = 2 / compute_largest_curvature(data) * np.sin(np.pi / (4 * delays + 2))
    ratio = np.array([float(steps[np.isfinite(row)].max()) for row in losses]) / limit
    colours = make_colours(
        delays, steps, np.where(np.isfinite(losses), losses, np.nan).T, "loss", 1.0, "red"
    )
    panel = make_panel(
        "delay (updates)",
        "step",
        delays,
        {"Lemma 1, largest curvature": limit},
        style="k-",
        colours=colours,
        x_scale="log",
        y_scale="log",
    )
    return TheoryFigure(
        f"{YANG}, Figure 5(b)",
        f"Linear regression by delayed SGD, {data.name}, {updates:,} updates of {data.batch} "
        f"samples;\nred: diverged",
        [panel],
        f"{data.name} in place of cpusmall; greatest step of the grid (a factor of "
        f"{steps[1] / steps[0]:.2f} apart) that does"
        f" not diverge over Lemma 1's: {ratio.min():.2f} to {ratio.max():.2f}",
        note="one run a cell, all with the same batches, of seed 0",
    )


def compute_pipemare_6() -> TheoryFigure:
    """Compute discrepancy between the passes' weights, and T2 against it."""
    forward, backward, step, updates = 10, 6, 0.05, 250
    losses = {
        f"discrepancy {d:g}": simulate_losses(
            recurrences.make_pipemare(forward, backward, d), step, updates
        )
        for d in (0.0, 3.0, 5.0)
    }
    models = {
        "discrepancy 5": recurrences.make_pipemare(forward, backward, 5.0),
        "discrepancy 5, T2 (D = 0.1)": recurrences.make_pipemare(
            forward, backward, 5.0, recurrences.compute_discrepancy_decay(0.1, forward - backward)
        ),
        "no discrepancy": recurrences.make_pipemare(forward, backward),
    }
    paths = make_panel(
        "update",
        "loss w²/2",
        range(updates + 1),
        losses,
        title=f"step {step}, noise N(0, 1)",
        y_scale="log",
        y_range=(1e-4, 1e8),
    )
    return TheoryFigure(
        f"{YANG}, Figure 6",
        f"Passes that read different weights: forward delay {forward}, backward {backward}, "
        f"curvature 1",
        [paths, compute_radii(models)],
        "largest stable steps: " + list_limits(models),
        note=f"left: {NOISE}; right: from the characteristic polynomials",
    )


def compute_pipemare_t2() -> TheoryFigure:
    """Compute T2's two readings: delta as old as the weights that are read, and the newest delta."""
    forward, discrepancy = 40, 100.0
    backwards = list(range(forward))

    def find_limits(make: Callable[[int], Recurrence]) -> Floats:
        return np.array([find_limit(make(backward)) for backward in backwards])

    def make_trained(backward: int) -> Recurrence:
        gamma = recurrences.compute_discrepancy_decay(None, forward - backward)
        return recurrences.make_pipemare(forward, backward, discrepancy, gamma)

    limits = {
        "without T2": find_limits(lambda b: recurrences.make_pipemare(forward, b, discrepancy)),
        "T2 as trained (B.4, D.1)": find_limits(make_trained),
        "T2 as printed (section 3.2)": find_limits(
            lambda b: recurrences.read_newest_delta(make_trained(b))
        ),
    }
    panel = make_panel(
        "delay of the backward", "largest stable step", backwards, limits, y_scale="log"
    )
    seen = "; ".join(f"{name} {values[-1]:.4f}" for name, values in limits.items())
    return TheoryFigure(
        f"{YANG}, section 3.2, B.4 and D.1",
        f"T2's two readings, forward delay {forward}, Delta {discrepancy:g}",
        [panel],
        f"largest stable step with delays {forward} and {backwards[-1]}: {seen}",
    )


def compute_pipemare_10() -> TheoryFigure:
    """Compute the largest stable step by discrepancy."""
    forward, backward = 40, 10
    gamma = recurrences.compute_discrepancy_decay(None, forward - backward)
    sensitivities = np.linspace(-100, 100, 401)

    def find_limits(decay: Optional[float]) -> Floats:
        models = [
            recurrences.make_pipemare(forward, backward, d, decay) for d in sensitivities.tolist()
        ]
        return np.array([find_limit(one) for one in models])

    plain, corrected = find_limits(None), find_limits(gamma)
    gains = corrected[sensitivities > 0] / plain[sensitivities > 0]
    worse = sensitivities[corrected < plain * (1 - 1e-9)]
    lines = {"without T2": plain, f"T2, gamma = 1 - 2/31 = {gamma:.3f}": corrected}
    return TheoryFigure(
        f"{YANG}, Figure 10",
        f"Largest stable step by discrepancy: forward delay {forward}, backward {backward}, "
        f"curvature 1",
        [make_panel("discrepancy", "largest stable step", sensitivities, lines, y_scale="log")],
        f"for discrepancies above 0 T2 raises the step by {gains.min():.2f} to {gains.max():.2f} "
        f"times;"
        + (
            f" it lowers it between {worse.min():g} and {worse.max():g}"
            if len(worse)
            else " it lowers it nowhere"
        ),
    )


def compute_pipemare_16() -> TheoryFigure:
    """Compute recomputation with other weights, and T2 against it."""
    decay = recurrences.compute_discrepancy_decay(0.1, 9)
    models = {
        "recomputed with other weights": recurrences.make_pipemare(
            10, 1, 10.0, recompute=(4, -5.0)
        ),
        "the same, T2 (D = 0.1)": recurrences.make_pipemare(10, 1, 10.0, decay, (4, -5.0)),
        "no recomputation, discrepancy 10": recurrences.make_pipemare(10, 1, 10.0),
        "no discrepancy": recurrences.make_pipemare(10, 1),
    }
    return TheoryFigure(
        f"{YANG}, Figure 16",
        "Recomputation with other weights: forward delay 10, recomputation 4, backward "
        "1;\ndiscrepancy 10, Phi -5, curvature 1",
        [compute_radii(models)],
        "largest stable steps: " + list_limits(models),
    )


def compute_radii(models: Dict[str, Recurrence]) -> Panel:
    """Return the greatest root of each model by step."""
    steps = np.linspace(0.001, 0.25, 120)
    lines = {
        label: roots.compute_root_radius(roots.derive_loop_gain(one), steps)
        for label, one in models.items()
    }
    panel = make_panel("step", "greatest root", steps, lines, title="greatest root by step")
    add_line(panel, "stable below", steps[[0, -1]], [1, 1], "k:")
    return panel


def list_limits(models: Dict[str, Recurrence]) -> str:
    """Return the largest stable step of each model in words."""
    return ", ".join(f"{find_limit(one):.4f} ({label})" for label, one in models.items())


def find_limit(recurrence: Recurrence) -> float:
    """Return the largest stable step of a recurrence."""
    return roots.find_largest_stable_step(roots.derive_loop_gain(recurrence))


# ---- pipelined backpropagation: rules by momentum m; its damping is 1 - m

Rule = Callable[[float], LoopGain]  # momentum -> loop


def make_rule(delay: int, spike: bool = False, horizon: float = 0.0) -> Rule:
    """Return SGD with momentum, with spike compensation SC_D if `spike` and weight prediction LWP
    over `horizon` updates.
    """

    def make(m: float) -> LoopGain:
        coefficients = recurrences.compute_spike_coefficients(m, delay) if spike else (1.0, 0.0)
        return roots.derive_loop_gain(recurrences.make_delayed_sgd(delay, m, coefficients, horizon))

    return make


def make_nesterov(m: float) -> LoopGain:
    """Return Nesterov's momentum without delay, w <- w - step (m v + g)."""
    return roots.derive_loop_gain(recurrences.make_delayed_sgd(0, m, (m, 1.0)))


RULES: Dict[str, Rule] = {
    "SGD with momentum, no delay": make_rule(0),
    "SGD with momentum, delay 1": make_rule(1),
    "SC_D, delay 1": make_rule(1, spike=True),
    "Nesterov's momentum, no delay": make_nesterov,
    "LWP_D, delay 1": make_rule(1, horizon=1.0),
    "LWP_w,D + SC_D, delay 1": make_rule(1, spike=True, horizon=1),
}


def compute_pb_3() -> TheoryFigure:
    """Compute what a gradient adds to each update."""
    delay, m, times = 6, 0.85, 25
    early = compute_impulse_response(recurrences.make_delayed_sgd(0, m), times)
    late = compute_impulse_response(
        recurrences.make_delayed_sgd(delay, m, recurrences.compute_spike_coefficients(m, delay)),
        times,
    )
    responses = {
        "no delay": early,
        f"delay {delay}": compute_impulse_response(recurrences.make_delayed_sgd(delay, m), times),
        f"delay {delay}, spike compensation": late,
    }
    panels = []
    for title, response in responses.items():
        panels.append(
            make_panel(
                "update after the gradient was computed",
                "contribution",
                range(times),
                {"this": response},
                title,
                "o-",
            )
        )
        add_line(panels[-1], "no delay", range(times), early, ":")
    return TheoryFigure(
        f"{KOSSON}, Figure 3",
        f"Impulse response of SGD with momentum {m}",
        panels,
        f"the spike, {late[delay]:.3f}, is the sum of the contributions missed by then, "
        f"{early[: delay + 1].sum():.3f}; after it"
        " the responses are the same",
    )


def compute_pb_4() -> TheoryFigure:
    """Compute the greatest root by normalized rate and momentum."""
    rates, dampings = np.geomspace(1e-9, 4, 56), np.geomspace(1, 1e-5, 41)
    panels, areas = [], []
    for title, rule in RULES.items():
        radius = np.stack(
            [roots.compute_root_radius(rule(1 - r), rates) for r in dampings.tolist()]
        )
        areas.append(f"{(radius < 1).mean():.3f} ({title})")
        margin = np.where(radius < 1, np.log10(np.maximum(1 - radius, 1e-12)), np.nan)
        colours = make_colours(
            rates, dampings, [round_values(row) for row in margin], "log10 (1 - greatest root)", 0.0
        )
        scales = {"x_scale": "log", "y_scale": "log"}
        panels.append(
            make_panel(
                "rate times curvature", "1 - momentum", (), {}, title, colours=colours, **scales
            )
        )
    return TheoryFigure(
        f"{KOSSON}, Figure 4",
        "Greatest root by normalized rate and momentum; black: unstable",
        panels,
        f"stable shares of the area shown: {', '.join(areas)}",
        2,
    )


def make_half_life_figure(
    number: int,
    title: str,
    x_label: str,
    x: Sequence[float],
    lines: Mapping[str, Sequence[float]],
    seen: str,
    x_scale: str = "linear",
    y_range: Optional[Sequence[float]] = None,
) -> TheoryFigure:
    """Return one of Kosson et al.'s figures of the least half-life of the error on a quadratic."""
    panel = make_panel(
        x_label, "half-life (updates)", x, lines, x_scale=x_scale, y_scale="log", y_range=y_range
    )
    return TheoryFigure(f"{KOSSON}, Figure {number}", f"Least half-life {title}", [panel], seen)


def compute_pb_5() -> TheoryFigure:
    """Compute the least half-life by condition number."""
    conditions, dampings = np.geomspace(1, 1e6, 37), np.geomspace(1, 1e-5, 121)
    delayed = [label for label in RULES if label.endswith("delay 1")]
    half_lives = {
        label: np.stack(
            [find_least_half_lives(RULES[label](1 - r), conditions, 300) for r in dampings.tolist()]
        ).min(axis=0)
        for label in (*delayed, "SGD with momentum, no delay")
    }
    at_1000 = ", ".join(f"{values[18]:.3g} ({label})" for label, values in half_lives.items())
    return make_half_life_figure(
        5,
        "of the error on a quadratic, over all rates and momenta",
        "condition number",
        conditions.tolist(),
        {label: values.tolist() for label, values in half_lives.items()},
        f"at a condition number of 1000: {at_1000}",
        "log",
    )


def compute_pb_6() -> TheoryFigure:
    """Compute the least half-life by delay."""
    delays = list(range(17))
    rules: Dict[str, Callable[[int], Rule]] = {
        "SGD with momentum": make_rule,
        "LWP_D": lambda d: make_rule(d, horizon=float(d)),
        "LWP_w,D + SC_D": lambda d: make_rule(d, spike=True, horizon=d),
    }
    half_lives = {
        label: [find_best_momentum(rule(d), 1e3)[0] for d in delays]
        for label, rule in rules.items()
    }
    return make_half_life_figure(
        6,
        "on a quadratic of condition number 1000, over all rates and momenta",
        "delay (updates)",
        delays,
        half_lives,
        "at a delay of 16: "
        + ", ".join(f"{values[-1]:.4g} ({label})" for label, values in half_lives.items()),
    )


def compute_pb_7() -> TheoryFigure:
    """Compute the least half-life by momentum and horizon."""
    dampings = np.geomspace(1, 1e-5, 51).tolist()
    rules = {f"LWP, T = {T}": make_rule(5, horizon=float(T)) for T in (0, 3, 5, 10, 20)}
    rules["LWP_w,D + SC_D"] = make_rule(5, spike=True, horizon=5)
    half_lives = {
        label: [find_least_half_life(rule(1 - r), 1e3) for r in dampings]
        for label, rule in rules.items()
    }
    best = {label: 1 - dampings[int(np.argmin(values))] for label, values in half_lives.items()}
    return make_half_life_figure(
        7,
        "on a quadratic of condition number 1000, delay 5, over all rates",
        "1 - momentum",
        dampings,
        half_lives,
        "best momentum: "
        + ", ".join(f"{m:.4g}, half-life {min(half_lives[k]):.3g} ({k})" for k, m in best.items()),
        "log",
        (1e2, 1e4),
    )


def compute_pb_12() -> TheoryFigure:
    """Compute the least half-life by horizon."""
    scales = np.concatenate([np.linspace(0, 4, 17), np.linspace(4.5, 10, 12)]).tolist()
    cases = {f"condition {c:g}, delay {d}": (c, d) for c, d in ((1e3, 4), (1e3, 10), (1e5, 4))}
    half_lives = {
        label: [find_best_momentum(make_rule(d, horizon=scale * d), c)[0] for scale in scales]
        for label, (c, d) in cases.items()
    }
    best = {label: scales[int(np.argmin(values))] for label, values in half_lives.items()}
    return make_half_life_figure(
        12,
        "with LWP of horizon scale x delay, over all rates and momenta",
        "prediction scale T / D",
        scales,
        half_lives,
        "best scales: " + ", ".join(f"{scale:g} ({label})" for label, scale in best.items()),
    )


# ---- linear regression by SGD with delayed gradients, beside PipeMare's Lemma 1 (Figure 5(b))

# a run has diverged when the squared norm of its weights, or the loss, exceeds this
DIVERGED_SQUARE = 1e12


class Regression(NamedTuple):
    """Features x (n, d) and targets y (n,), each of mean 0 and variance 1; `batch` samples make an
    update.
    """

    name: str
    x: Floats
    y: Floats
    batch: int = 32


def load_regression() -> Regression:
    """Return scikit-learn's diabetes set (442 samples, 10 features)."""
    from sklearn.datasets import load_diabetes

    x, y = load_diabetes(return_X_y=True, scaled=False)
    return Regression(
        "diabetes (442 x 10)", (x - x.mean(axis=0)) / x.std(axis=0), (y - y.mean()) / y.std()
    )


def compute_largest_curvature(data: Regression) -> float:
    """Return the largest eigenvalue of X'X / n, the Hessian of the loss mean (x w - y)^2 / 2."""
    return float(np.linalg.eigvalsh(data.x.T @ data.x / len(data.x)).max())


def train_delayed(
    data: Regression, steps: Floats, delays: NDArray[np.int64], updates: int
) -> Floats:
    """Return the loss over all samples after training from 0, infinity where it diverged: shape
    (delays, steps).

    All runs see the same batches, drawn with replacement by seed 0. An update uses the gradient at
    weights `delay` updates old.
    """
    rng = np.random.default_rng(0)
    length = int(delays.max()) + 1
    # the newest weights, a ring of (delays, steps, d)
    history = np.zeros((length, len(delays), len(steps), data.x.shape[1]))
    w, rows = history[0].copy(), np.arange(len(delays))
    rates = (steps / data.batch)[:, None]
    with np.errstate(over="ignore", invalid="ignore"):
        for t in range(updates):
            if t % 1000 == 0:
                batches = rng.integers(0, len(data.x), (1000, data.batch))
                w[(w * w).sum(axis=2) > DIVERGED_SQUARE] = np.nan
            x, y = data.x[batches[t % 1000]], data.y[batches[t % 1000]]
            stale = history[np.maximum(t - delays, 0) % length, rows]
            w -= rates * ((stale @ x.T - y) @ x)
            history[(t + 1) % length] = w
        squares = (w @ data.x.T - data.y) ** 2
        loss = squares.mean(axis=2) / 2
    return np.where(loss < DIVERGED_SQUARE, loss, np.inf)


FIGURES: Dict[str, Callable[[], TheoryFigure]] = {
    function.__name__[len("compute_") :]: function
    for function in (
        compute_pipemare_5a,
        compute_pipemare_5b,
        compute_pipemare_6,
        compute_pipemare_t2,
        compute_pipemare_10,
        compute_pipemare_16,
        compute_pb_3,
        compute_pb_4,
        compute_pb_5,
        compute_pb_6,
        compute_pb_7,
        compute_pb_12,
    )
}
