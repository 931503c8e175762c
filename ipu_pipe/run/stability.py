"""Compute the stability of a run by theory, before it trains: delay, rate, largest stable rate and
remedies of each stage.

The run is built as for training and not trained. Each stage is modelled as its config says:
momentum (Nesterov's too), T2, spike compensation, weight prediction, SpecTrain, gradient shrinking,
stashed or newest weights, rates with T1. Weight decay, clipping, the synchronous updates of a
warm-up and the separate weights of recomputation are left out.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, ContextManager, List, Mapping, Sequence

import numpy as np
import torch
from torch import nn

from ipu_pipe.config.schema import Config
from ipu_pipe.config.sections import InitFrom
from ipu_pipe.errors import BadInput, raise_faults, summarize
from ipu_pipe.files import replace_nonfinite
from ipu_pipe.job.record import PlannedJob
from ipu_pipe.job.stability import derive_recurrence, list_inapplicable
from ipu_pipe.model.batch import call_model, clone_tensors, map_tensors
from ipu_pipe.model.loss import Loss
from ipu_pipe.model.modes import set_mode
from ipu_pipe.model.observation import observe_effects
from ipu_pipe.model.restoring import restore_all
from ipu_pipe.report.analysis.text import format_table
from ipu_pipe.run.build import build
from ipu_pipe.stability.advice import (
    StabilityMargin,
    StageDynamics,
    compute_margins,
    describe_margins,
    find_largest_joint_rate,
)
from ipu_pipe.stability.recurrences import Floats
from ipu_pipe.store.checkpoint import list_steps
from ipu_pipe.store.folder import read_summary

# ---- the largest eigenvalue of the Hessian of a loss on a batch, by power iteration

Vector = List[torch.Tensor]


@dataclass(frozen=True)
class Curvature:
    """The largest eigenvalue (`value`) of a Hessian with its unit eigenvector v, and how well the
    iteration converged.

    `shares` are the stages' shares of the squared norm of v, `residual` is |Hv - value v| / value
    of the last iteration. `discrepancy`, if it was measured, is by how much the gradient along v
    falls when the weights of the backward alone move along v, as a multiple of the value
    (PipeMare's Delta / lambda).
    """

    value: float
    shares: tuple[float, ...]
    iterations: int
    residual: float
    discrepancy: float | None = None


def measure_curvature(
    model: nn.Module,
    loss: Loss,
    batch: tuple[Any, Any],
    stages: Sequence[Sequence[nn.Parameter]],
    iterations: int = 100,
    tolerance: float = 0.01,
    seed: int = 0,
    discrepancy: bool = False,
) -> Curvature:
    """Measure the curvature of the loss of a `batch` (x, y) by power iteration from a vector drawn
    by `seed`.

    It ends when the residual is at most `tolerance`, or after `iterations`. If the eigenvalue of
    the greatest magnitude is negative, it is subtracted and the iteration goes on. A Hessian-vector
    product is the gradient of (gradient . vector) from one forward of the batch, with norms as in
    training and random modules as in evaluation. The model is left as it was. `stages` are the
    parameters that move, by stage. Raise `BadInput` if the model cannot be differentiated twice or
    has no positive curvature.
    """
    x, y = batch
    parameters = [p for stage in stages for p in stage]
    generator = torch.Generator().manual_seed(seed)
    # drawn on the CPU, so that a seed gives the same vector for every device
    start = [torch.randn(p.shape, generator=generator).to(p.device, p.dtype) for p in parameters]

    def compute_loss() -> torch.Tensor:
        # a model may change its input in place, and the batch is used again
        return loss(call_model(model, clone_tensors(x)), y)

    with restore_all(model), _allow_second_derivatives():
        _fix_random_modules(model, x)
        try:
            # once: every product of the iteration differentiates this gradient again
            gradient = _differentiate(compute_loss(), parameters, create_graph=True)
            value, v, done, residual = _iterate_power(
                lambda v: _multiply_hessian(gradient, parameters, v), start, iterations, tolerance
            )
        except (RuntimeError, NotImplementedError) as error:
            raise BadInput(
                f"model: its curvature cannot be measured: {summarize(error)}: give it by "
                f"--curvature"
            ) from error
        # written so that it also refuses NaN
        if not value > 0:
            raise BadInput(
                f"model: found no direction of positive curvature in {done} iterations; raise "
                f"--iterations or"
                " give it by --curvature"
            )
        squares = iter([float((part**2).sum()) for part in v])
        # v has the parameters of one stage after those of another
        shares = tuple(sum(next(squares) for _ in stage) for stage in stages)
        discrepancy_value = (
            _measure_discrepancy(compute_loss, parameters, v) / value if discrepancy else None
        )
    return Curvature(value, shares, done, residual, discrepancy_value)


def _fix_random_modules(model: nn.Module, x: Any) -> None:
    """Set the modules that draw random numbers to evaluation, all others to their training
    modes.
    """
    names = observe_effects(model, x).draws
    set_mode(model, training=True)
    for name in names:
        model.get_submodule(name).training = False


def _allow_second_derivatives() -> ContextManager[Any]:
    """Return a context in which attention uses plain operations: its fused kernels have no second
    derivative.
    """
    try:
        from torch.nn.attention import SDPBackend, sdpa_kernel
    # torch 2.0 has no fused attention kernel for training on CPUs
    except ImportError:
        return contextlib.nullcontext()
    return sdpa_kernel(SDPBackend.MATH)


def _differentiate(
    values: Any, parameters: Sequence[nn.Parameter], weights: Vector | None = None, **graph: bool
) -> Vector:
    """Return the gradient of a scalar, or of the sum of `values` times `weights`; zeros for a
    parameter without a part in it.
    """
    gradients = torch.autograd.grad(values, list(parameters), weights, allow_unused=True, **graph)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, gradients)]


def _multiply_hessian(gradient: Vector, parameters: Sequence[nn.Parameter], v: Vector) -> Vector:
    # a gradient that depends on no parameter has no second derivative
    pairs = [(g, part) for g, part in zip(gradient, v) if g.requires_grad]
    if not pairs:
        return [torch.zeros_like(part) for part in v]
    return _differentiate(
        [g for g, _ in pairs], parameters, [part for _, part in pairs], retain_graph=True
    )


def _compute_dot(a: Vector, b: Vector) -> float:
    return float(sum((p * q).sum() for p, q in zip(a, b)))


def _iterate_power(
    multiply_hessian: Callable[[Vector], Vector], v: Vector, iterations: int, tolerance: float
) -> tuple[float, Vector, int, float]:
    """Return (eigenvalue, unit eigenvector, iterations, residual)."""
    shift = 0.0
    done = 0
    residual = float("inf")
    value = 0.0
    length = _compute_dot(v, v) ** 0.5
    v = [part / length for part in v]
    while done < iterations:
        done += 1
        product = multiply_hessian(v)
        # the Rayleigh quotient, as v has length 1
        value = _compute_dot(v, product)
        error = sum(float(((h - value * part) ** 2).sum()) for h, part in zip(product, v)) ** 0.5
        residual = error / abs(value) if value else float("inf")
        if residual <= tolerance:
            if value > 0:
                break
            # this is the negative end of the spectrum: continue with the positive one
            shift = min(shift, value)
        # H - shift I has the same eigenvectors, and its greatest eigenvalue is at the positive end
        product = [h - shift * part for h, part in zip(product, v)]
        length = _compute_dot(product, product) ** 0.5
        # the product is 0: there is no direction in which to go on
        if not length:
            break
        v = [part / length for part in product]
    return value, v, done, residual


def _measure_discrepancy(
    compute_loss: Callable[[], torch.Tensor], parameters: Sequence[nn.Parameter], v: Vector
) -> float:
    """Return -v . (derivative of the gradient by the weights that the backward reads) v.

    It is a central difference, with weights written in place between forward and backward.
    """
    # in proportion to the weights: a shorter step would be lost in float32's rounding
    step = 1e-3 * float(sum((p.detach() ** 2).sum() for p in parameters)) ** 0.5
    weights = [p.detach().clone() for p in parameters]

    def compute_slope(distance: float) -> float:
        """Return the gradient along v of a pass whose backward reads weights moved by `distance`
        times v.
        """
        value = compute_loss()
        try:
            for p, part in zip(parameters, v):
                # by .data: autograd counts changes of p itself, and would refuse the backward
                p.data.add_(part, alpha=distance)
            gradient = _differentiate(value, parameters)
        finally:
            # copied, because subtracting what was added would leave rounding errors
            for p, weight in zip(parameters, weights):
                p.data.copy_(weight)
        return _compute_dot(gradient, v)

    return -(compute_slope(step) - compute_slope(-step)) / (2 * step)


# ---- stability of a run

CURVATURE_GROWS = (
    "curvature changes in training: a margin above 1 at these weights does not say that the run "
    "stays stable"
)
# the most updates at which the rate is evaluated
MOST_RATES = 1000


def analyze_config(config: Config, **options: Any) -> dict[str, Any]:
    """Return the stability of the run that a config describes; `options` are those of
    `analyze_job`. Raise `BadInput`.
    """
    if not config.backend.facts.emulates:
        raise BadInput(
            f"backend.name: {config.backend.name}: stability is computed for the whole model in "
            f"one process; use"
            " --set backend.name=emulator"
        )
    return analyze_job(build(config), **options)


def analyze_run(config: Config, folder: Path, **options: Any) -> dict[str, Any]:
    """Return the stability of the run in `folder`, measured where its curvature is greatest: at its
    initial weights or at one of its checkpoints.

    `checkpoints` has what was measured at each of them. A run that diverged, or whose loss did not
    fall, is not called stable. Raise `BadInput`.
    """
    analyses = [analyze_config(config, **options)]
    points = [_describe_point("initial weights", analyses[0])]
    checkpoints = folder / "checkpoints"
    # a given curvature is the same everywhere
    steps = list_steps(checkpoints) if options.get("curvature") is None else []
    # step 0 has the initial weights, which are measured already
    for step in filter(None, steps):
        weights = InitFrom(path=str(checkpoints / f"step-{step}"))
        name = f"checkpoint of update {step}"
        try:
            analysis = analyze_config(config.model_copy(update={"init_from": weights}), **options)
        # such as weights that are not finite
        except BadInput as error:
            points.append({"weights": name, "fault": error.faults[0]})
        else:
            points.append(_describe_point(name, analysis))
            analyses.append(analysis)
    sharpest = max(analyses, key=lambda analysis: float(analysis["curvature"]["value"]))
    result = {**sharpest, "checkpoints": points}
    summary = read_summary(folder)
    outcome = "this run has not ended, or ended by a fault" if summary is None else None
    if summary is not None and summary.get("finding") is not None:
        outcome = f"of this run: {summary['finding']}"
    if outcome is not None:
        # the first line says that no stage exceeds its limit, if none does
        is_over = any((stage["margin"] or 0.0) < 1 for stage in result["stages"])
        result["advice"] = [outcome, *result["advice"][0 if is_over else 1 :]]
    return result


def _describe_point(weights: str, analysis: Mapping[str, Any]) -> dict[str, Any]:
    whole = analysis["whole"]
    margin = None if whole is None else whole["margin"]
    return {"weights": weights, "curvature": analysis["curvature"]["value"], "margin": margin}


def analyze_job(
    job: PlannedJob,
    samples: int = 128,
    iterations: int = 100,
    seed: int = 0,
    curvature: float | None = None,
    by_stage: bool = False,
) -> dict[str, Any]:
    """Return the stability of a job's stages as plain data.

    The curvature is measured on the first `samples` of the first epoch, or is `curvature`. With
    `by_stage` each stage has its own, with the weights of the others fixed. Raise `BadInput` for a
    job that the theory does not cover.
    """
    raise_faults(list_inapplicable(job))
    forward_lags = job.table.greatest_lag().tolist()
    backward_lags = job.table.greatest_backward_lag().tolist()
    # passes that read the same weights have none
    has_discrepancy = forward_lags != backward_lags
    measured = (
        _measure(job, samples, iterations, seed, has_discrepancy, by_stage)
        if curvature is None
        else []
    )
    values = (
        [one.value for one in measured[1:]]
        if by_stage
        else [curvature or measured[0].value] * len(job.partition)
    )
    # a curvature that was given says nothing of the discrepancy
    discrepancy = measured[0].discrepancy or 0.0 if measured else 0.0
    rates, rate_updates = _find_greatest_rates(job)
    stages = []
    for s, value in enumerate(values):
        recurrence = derive_recurrence(job, s, forward_lags[s], backward_lags[s], discrepancy)
        stages.append(StageDynamics(s, recurrence, float(rates[s]), value))
    margins = compute_margins(stages)
    base = float(max(job.rate(k) for k in _choose_updates(job)))
    shares: Sequence[float | None] = measured[0].shares if measured else [None] * len(stages)
    # the largest stable rate with the delays of all stages at once, which needs their shares
    whole = None
    # a rate of 0 has no margin
    if measured and base:
        largest = find_largest_joint_rate(stages, measured[0].shares, base, measured[0].value)
        whole = {"rate": base, "largest_stable_rate": largest, "margin": largest / base}
    stability: dict[str, Any] = replace_nonfinite(
        {
            "method": job.method.name,
            "curvature": _describe_curvature(job, measured, curvature, samples, seed, by_stage),
            "rates_of_update": rate_updates,
            "stages": [_describe_stage(margin, share) for margin, share in zip(margins, shares)],
            "whole": whole,
            "advice": [*describe_margins(margins), *([CURVATURE_GROWS] if measured else [])],
        }
    )
    return stability


def _choose_updates(job: PlannedJob) -> list[int]:
    """Return the updates after a warm-up at which the rate is evaluated: all, or `MOST_RATES`
    evenly spread ones.
    """
    # a run may be shorter than its warm-up
    first = min(job.rules.switch, job.updates - 1)
    return sorted(
        {
            round(k)
            for k in np.linspace(
                first, job.updates - 1, min(MOST_RATES, job.updates - first)
            ).tolist()
        }
    )


def _find_greatest_rates(job: PlannedJob) -> tuple[Floats, list[int]]:
    """Return the greatest rate of each stage, and the first update that has it."""
    updates = _choose_updates(job)
    rates = np.stack([job.rules.rates(k) for k in updates])  # (updates, stages)
    return rates.max(axis=0), [updates[i] for i in rates.argmax(axis=0).tolist()]


def _measure(
    job: PlannedJob, samples: int, iterations: int, seed: int, has_discrepancy: bool, by_stage: bool
) -> list[Curvature]:
    """Return the curvature of the whole model and, with `by_stage`, then of each stage."""
    if job.data.train_batches_per_epoch(samples) == 0:
        raise BadInput(f"--samples: {samples}: the training set has fewer samples")
    x, y = job.prepare_batch(job.data.train_batch(0, 0, samples))
    if job.config.precision == "bfloat16":
        # bfloat16 rounds by nearly the tolerance of the residual
        job.model.float()
        x = map_tensors(lambda t: t.float() if t.is_floating_point() else t, x)
    parameters: list[list[nn.Parameter]] = [[] for _ in job.partition.stages]
    for group in job.full_optimizer.param_groups:
        # by the optimizer's groups, since frozen weights do not move
        parameters[group["stage"]] += group["params"]
    curvatures = [
        measure_curvature(
            job.model,
            job.loss,
            (x, y),
            parameters,
            iterations,
            seed=seed,
            discrepancy=has_discrepancy,
        )
    ]
    if by_stage:
        without_parameters = Curvature(0.0, (), 0, 0.0)
        curvatures += [
            measure_curvature(job.model, job.loss, (x, y), [p], iterations, seed=seed)
            if p
            else without_parameters
            for p in parameters
        ]
    return curvatures


def _describe_curvature(
    job: PlannedJob,
    measured: Sequence[Curvature],
    configured: float | None,
    samples: int,
    seed: int,
    by_stage: bool,
) -> dict[str, Any]:
    if not measured:
        return {"value": configured, "how": "given"}
    first = measured[0]
    return {
        "value": first.value,
        "how": "power iteration on the Hessian of the training loss"
        + (", each stage's block of it" if by_stage else ""),
        "iterations": first.iterations,
        "residual": first.residual,
        "seed": seed,
        "samples": samples,
        "weights": job.config.init_from.path if job.config.init_from else "initial",
        "discrepancy": first.discrepancy,
    }


def _describe_stage(margin: StabilityMargin, share: float | None) -> dict[str, Any]:
    stage = margin.stage
    return {
        "index": stage.index,
        "delay": stage.delay,
        "backward_delay": stage.updates.reads[-1].delay,
        "curvature": stage.curvature,
        "share": share,
        "rate": stage.rate,
        "largest_stable_rate": margin.largest_rate,
        "margin": margin.margin,
        "raised_by": [
            {
                "rule": remedy.change,
                "largest_stable_rate": remedy.largest_rate,
                "margin": remedy.margin,
            }
            for remedy in margin.remedies
        ],
    }


def format_stability(stability: dict[str, Any]) -> str:
    """Return the stability as text: the curvature, a table of stages, and advice."""
    curvature = stability["curvature"]
    how = curvature["how"]
    where = ""
    if "iterations" in curvature:
        words = ": {iterations} iterations, residual {residual:.2g}, seed {seed}, {samples} samples"
        how += words.format(**curvature)
        weights = curvature["weights"]
        where = (
            " at the initial weights" if weights == "initial" else f" at the weights of {weights}"
        )
    lines = [f"{stability['method']}: curvature {curvature['value']:.4g}{where} ({how})"]
    for point in stability.get("checkpoints", ()):
        measured = (
            point.get("fault")
            or f"curvature {point['curvature']:.4g}, margin {_show(point['margin'])}"
        )
        lines.append(f"  {point['weights']}: {measured}")
    if curvature.get("discrepancy") is not None:
        lines.append(
            f"discrepancy (PipeMare's Delta): {curvature['discrepancy']:.3g} of the curvature"
        )
    head = ["stage", "delay", "share", "rate", "largest stable", "margin", "best remedy"]
    rows = []
    for stage in stability["stages"]:
        best = stage["raised_by"][0] if stage["raised_by"] else None
        rows.append(
            [
                str(stage["index"]),
                f"{stage['delay']}"
                + (
                    f"/{stage['backward_delay']}"
                    if stage["backward_delay"] != stage["delay"]
                    else ""
                ),
                *(_show(stage[key]) for key in ("share", "rate", "largest_stable_rate", "margin")),
                f"{best['rule']} ({_show(best['margin'])})" if best else "-",
            ]
        )
    if stability["whole"] is not None:
        whole = stability["whole"]
        rows.append(
            [
                "all",
                "",
                "1",
                *(_show(whole[key]) for key in ("rate", "largest_stable_rate", "margin")),
                "",
            ]
        )
    lines += ["", *format_table(head, rows, most=len(rows)), ""]
    return "\n".join([*lines, *stability["advice"]])


def _show(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
