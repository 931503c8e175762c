"""The stability of a run by theory, before it trains: the delay, learning rate and largest stable rate of each stage, and
remedies.

The run is built as for training and not trained. Each stage is modelled as its config says: momentum (Nesterov's too), T2, spike
compensation, weight prediction, SpecTrain, gradient shrinking, stashed or newest weights, rates with T1. Weight decay, clipping,
the synchronous updates of a warm-up and the separate weights of recomputation are left out.
"""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Sequence, Tuple

import numpy as np
from torch import nn

from ipu_pipe.backends.table import get_backend
from ipu_pipe.config.schema import Config
from ipu_pipe.errors import BadInput
from ipu_pipe.files import replace_nonfinite
from ipu_pipe.job.record import Job
from ipu_pipe.job.stability import derive_recurrence, list_inapplicable
from ipu_pipe.model.batch import map_tensors
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
from ipu_pipe.studies.curvature import Curvature, measure_curvature

MOST_RATES = 1000  # updates at which the rate is evaluated


def analyze_config(config: Config, **options: Any) -> Dict[str, Any]:
    """Return the stability of the run that a config describes; `options` are those of `analyze_job`. Raise `BadInput`."""
    if not get_backend(config).emulates:
        raise BadInput(
            f"backend.name: {config.backend.name}: stability is computed for the whole model in one process; use"
            " --set backend.name=emulator"
        )
    return analyze_job(build(config), **options)


def analyze_job(
    job: Job,
    samples: int = 128,
    iterations: int = 100,
    seed: int = 0,
    curvature: Optional[float] = None,
    by_stage: bool = False,
) -> Dict[str, Any]:
    """Return the stability of a job's stages as plain data.

    The curvature is measured on the first `samples` of the first epoch, or is `curvature`. With `by_stage` each stage has
    its own, with the weights of the others held. Raise `BadInput` for a job that the theory does not cover.
    """
    faults = list_inapplicable(job)
    if faults:
        raise BadInput(faults)
    lags = job.table.greatest_lag().tolist(), job.table.greatest_backward_lag().tolist()
    differ = any(a != b for a, b in zip(*lags))
    measured = _measure(job, samples, iterations, seed, differ, by_stage) if curvature is None else []
    values = [one.value for one in measured[1:]] if by_stage else [curvature or measured[0].value] * len(job.part)
    discrepancy = measured[0].discrepancy or 0.0 if measured else 0.0
    rates, at = _find_greatest_rates(job)
    stages = [
        StageDynamics(s, derive_recurrence(job, s, lags[0][s], lags[1][s], discrepancy), float(rates[s]), value)
        for s, value in enumerate(values)
    ]
    margins = compute_margins(stages)
    base = float(max(job.rate(k) for k in _choose_updates(job)))
    shares: Sequence[Optional[float]] = measured[0].shares if measured else [None] * len(stages)
    whole = None  # the largest stable rate with the delays of all stages at once, which needs their shares
    if measured and base:
        largest = find_largest_joint_rate(stages, measured[0].shares, base, measured[0].value)
        whole = {"rate": base, "largest_stable_rate": largest, "margin": largest / base}
    stability: Dict[str, Any] = replace_nonfinite({
        "method": job.method.name,
        "curvature": _describe_curvature(job, measured, curvature, samples, seed, by_stage),
        "rates_of_update": at,
        "stages": [_describe_stage(margin, share) for margin, share in zip(margins, shares)],
        "whole": whole,
        "advice": describe_margins(margins),
    })  # fmt: skip
    return stability


def _choose_updates(job: Job) -> List[int]:
    """Return the updates after a warm-up at which the rate is evaluated: all, or `MOST_RATES` evenly spread ones."""
    first = min(job.rules.switch, job.updates - 1)
    return sorted(
        {round(k) for k in np.linspace(first, job.updates - 1, min(MOST_RATES, job.updates - first)).tolist()}
    )


def _find_greatest_rates(job: Job) -> Tuple[Floats, List[int]]:
    """Return the greatest rate of each stage, and the first update that has it."""
    updates = _choose_updates(job)
    rates = np.stack([job.rules.rates(k) for k in updates])  # (updates, stages)
    return rates.max(axis=0), [updates[i] for i in rates.argmax(axis=0).tolist()]


def _measure(job: Job, samples: int, iterations: int, seed: int, differ: bool, by_stage: bool) -> List[Curvature]:
    """Measure the curvature of the whole model and, with `by_stage`, then of each stage."""
    if job.data.train_batches_per_epoch(samples) == 0:
        raise BadInput(f"--samples: {samples}: the training set has fewer samples")
    x, y = job.prepare_batch(job.data.train_batch(0, 0, samples))
    if job.config.precision == "bfloat16":
        job.model.float()
        x = map_tensors(lambda t: t.float() if t.is_floating_point() else t, x)
    parameters: List[List[nn.Parameter]] = [[] for _ in job.part.stages]
    for group in job.whole.param_groups:
        parameters[group["stage"]] += group["params"]
    curvatures = [measure_curvature(job.model, job.loss, x, y, parameters, iterations, seed=seed, discrepancy=differ)]
    if by_stage:
        still = Curvature(0.0, (), 0, 0.0)
        curvatures += [
            measure_curvature(job.model, job.loss, x, y, [p], iterations, seed=seed) if p else still for p in parameters
        ]
    return curvatures


def _describe_curvature(
    job: Job, measured: Sequence[Curvature], given: Optional[float], samples: int, seed: int, by_stage: bool
) -> Dict[str, Any]:
    if not measured:
        return {"value": given, "how": "given"}
    first = measured[0]
    return {
        "value": first.value,
        "how": "power iteration on the Hessian of the training loss"
        + (", each stage's block of it" if by_stage else ""),
        "iterations": first.iterations,
        "residual": first.residual,
        "seed": seed,
        "samples": samples,
        "weights": job.config.init_from.path if job.config.init_from else "as the run begins",
        "discrepancy": first.discrepancy,
    }


def _describe_stage(margin: StabilityMargin, share: Optional[float]) -> Dict[str, Any]:
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
            {"rule": remedy.change, "largest_stable_rate": remedy.largest_rate, "margin": remedy.margin}
            for remedy in margin.remedies
        ],
    }


def format_stability(stability: Dict[str, Any]) -> str:
    """Return the stability as text: the curvature, a table of stages, and advice."""
    c = stability["curvature"]
    how = c["how"]
    if "iterations" in c:
        how += (
            f": {c['iterations']} iterations, residual {c['residual']:.2g}, seed {c['seed']}, {c['samples']} samples, "
        )
        how += f"weights {c['weights']}"
    lines = [f"{stability['method']}: curvature {c['value']:.4g} ({how})"]
    if c.get("discrepancy") is not None:
        lines.append(f"discrepancy (the backward's part of it): {c['discrepancy']:.3g} of the curvature")
    head = ["stage", "delay", "share", "rate", "largest stable", "margin", "raised most by"]
    rows = []
    for s in stability["stages"]:
        best = s["raised_by"][0] if s["raised_by"] else None
        rows.append([
            str(s["index"]),
            f"{s['delay']}" + (f"/{s['backward_delay']}" if s["backward_delay"] != s["delay"] else ""),
            _show(s["share"]), _show(s["rate"]), _show(s["largest_stable_rate"]), _show(s["margin"]),
            f"{best['rule']} ({_show(best['margin'])})" if best else "-",
        ])  # fmt: skip
    if stability["whole"] is not None:
        w = stability["whole"]
        rows.append(["all", "", "1", _show(w["rate"]), _show(w["largest_stable_rate"]), _show(w["margin"]), ""])
    lines += ["", *format_table(head, rows, most=len(rows)), ""]
    return "\n".join([*lines, *stability["advice"]])


def _show(value: Optional[float]) -> str:
    return "-" if value is None else f"{value:.3g}"
