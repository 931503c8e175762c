"""What theory says of a run before it trains: stage by stage its delay, the largest stable rate, the run's own, and what
would help.

The run is built as for training and not trained. Each stage steps as its config says: momentum (Nesterov's too), T2, spike
compensation, weight prediction, SpecTrain, gradient shrinking, stashed or newest weights, rates with T1; weight decay,
clipping and a warm-up's synchronous updates are left out, and so are recomputation's weights of their own.
"""

from __future__ import annotations

import math
from typing import Any, Dict, List, Optional, Sequence, Tuple

import numpy as np
from torch import nn

from ipu_pipe.backends.table import get_backend
from ipu_pipe.config.schema import Config
from ipu_pipe.errors import BadInput
from ipu_pipe.job.record import Job
from ipu_pipe.job.stability import derive_recurrence, list_inapplicable
from ipu_pipe.model.batch import map_tensors
from ipu_pipe.run.build import build
from ipu_pipe.stability.advice import (
    StabilityMargin,
    StageDynamics,
    compute_margins,
    describe_margins,
    find_largest_joint_rate,
)
from ipu_pipe.stability.recurrences import Floats
from ipu_pipe.studies.curvature import Curvature, sharpest

MOST_RATES = 1000  # updates of which the rate is looked at


def examine(config: Config, **how: Any) -> Dict[str, Any]:
    """The findings about the run that a config describes; `how` as of `findings`. Raises BadInput."""
    if not get_backend(config).emulates:
        raise BadInput(
            f"backend.name: {config.backend.name}: one process looks at the whole model: --set backend.name=emulator"
        )
    return findings(build(config), **how)


def findings(
    job: Job,
    samples: int = 128,
    iterations: int = 100,
    seed: int = 0,
    curvature: Optional[float] = None,
    by_stage: bool = False,
) -> Dict[str, Any]:
    """The findings as plain data. `curvature`: given instead of measured on the first `samples` of the first epoch; `by_stage`:
    each stage's own, the others' weights held. Raises BadInput for what the theory is not about."""
    faults = list_inapplicable(job)
    if faults:
        raise BadInput(faults)
    lags = job.table.greatest_lag().tolist(), job.table.greatest_backward_lag().tolist()
    differ = any(a != b for a, b in zip(*lags))
    measured = _measure(job, samples, iterations, seed, differ, by_stage) if curvature is None else []
    values = [one.value for one in measured[1:]] if by_stage else [curvature or measured[0].value] * len(job.part)
    apart = measured[0].discrepancy or 0.0 if measured else 0.0
    rates, at = _rates(job)
    stages = [
        StageDynamics(s, derive_recurrence(job, s, lags[0][s], lags[1][s], apart), float(rates[s]), value)
        for s, value in enumerate(values)
    ]
    found = compute_margins(stages)
    base = float(max(job.rate(k) for k in _looked_at(job)))
    return {
        "method": job.method.name,
        "curvature": _curvature_json(job, measured, curvature, samples, seed, by_stage),
        "rates_of_update": at,
        "stages": [
            _stage_json(verdict, measured[0].shares[s] if measured else None) for s, verdict in enumerate(found)
        ],
        "whole": _whole(stages, measured, base, rates),
        "advice": describe_margins(found),
    }


def _looked_at(job: Job) -> List[int]:
    """Updates after the switch to the method's own: all, or evenly so many."""
    first = min(job.rules.switch, job.updates - 1)
    return sorted(
        {round(k) for k in np.linspace(first, job.updates - 1, min(MOST_RATES, job.updates - first)).tolist()}
    )


def _rates(job: Job) -> Tuple[Floats, List[int]]:
    """Each stage's greatest rate, and of which update it is first."""
    updates = _looked_at(job)
    every = np.stack([job.rules.rates(k) for k in updates])  # (updates, stages)
    return every.max(axis=0), [updates[i] for i in every.argmax(axis=0).tolist()]


def _measure(job: Job, samples: int, iterations: int, seed: int, differ: bool, by_stage: bool) -> List[Curvature]:
    """Of the whole model, and then, where asked, of each stage."""
    if job.data.train_batches_per_epoch(samples) == 0:
        raise BadInput(f"--samples: {samples}: the training set has not so many")
    x, y = job.prepare_batch(job.data.train_batch(0, 0, samples))
    if job.config.precision == "bfloat16":
        job.model.float()
        x = map_tensors(lambda t: t.float() if t.is_floating_point() else t, x)
    own: List[List[nn.Parameter]] = [[] for _ in job.part.stages]
    for group in job.groups:
        own[group["stage"]] += group["params"]
    found = [sharpest(job.model, job.loss, x, y, own, iterations, seed=seed, discrepancy=differ)]
    if by_stage:
        still = Curvature(0.0, (), 0, 0.0)
        found += [sharpest(job.model, job.loss, x, y, [p], iterations, seed=seed) if p else still for p in own]
    return found


def _whole(
    stages: Sequence[StageDynamics], measured: Sequence[Curvature], base: float, rates: Floats
) -> Optional[Dict[str, Any]]:
    """All stages along the sharpest direction; none where its shares are not known."""
    if not measured or not base:
        return None
    largest = find_largest_joint_rate(stages, measured[0].shares, base, measured[0].value)
    return {"rate": base, "largest_stable_rate": _finite(largest), "margin": _finite(largest / base)}


def _curvature_json(
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


def _stage_json(verdict: StabilityMargin, share: Optional[float]) -> Dict[str, Any]:
    stage = verdict.stage
    return {
        "index": stage.index,
        "delay": stage.delay,
        "backward_delay": stage.updates.reads[-1].delay,
        "curvature": stage.curvature,
        "share": share,
        "rate": stage.rate,
        "largest_stable_rate": _finite(verdict.largest_rate),
        "margin": _finite(verdict.margin),
        "raised_by": [
            {"rule": r.change, "largest_stable_rate": _finite(r.largest_rate), "margin": _finite(r.margin)}
            for r in verdict.remedies
        ],
    }


def _finite(value: float) -> Optional[float]:
    return value if math.isfinite(value) else None


def in_words(found: Dict[str, Any]) -> str:
    """The findings as a table, what they rest on, and what to do."""
    c = found["curvature"]
    how = c["how"]
    if "iterations" in c:
        how += (
            f": {c['iterations']} iterations, residual {c['residual']:.2g}, seed {c['seed']}, {c['samples']} samples, "
        )
        how += f"weights {c['weights']}"
    lines = [f"{found['method']}: curvature {c['value']:.4g} ({how})"]
    if c.get("discrepancy") is not None:
        lines.append(f"discrepancy (the backward's part of it): {c['discrepancy']:.3g} of the curvature")
    head = ["stage", "delay", "share", "rate", "largest stable", "margin", "raised most by"]
    rows = [head]
    for s in found["stages"]:
        best = s["raised_by"][0] if s["raised_by"] else None
        rows.append([
            str(s["index"]),
            f"{s['delay']}" + (f"/{s['backward_delay']}" if s["backward_delay"] != s["delay"] else ""),
            _shown(s["share"]), _shown(s["rate"]), _shown(s["largest_stable_rate"]), _shown(s["margin"]),
            f"{best['rule']} ({_shown(best['margin'])})" if best else "-",
        ])  # fmt: skip
    if found["whole"] is not None:
        w = found["whole"]
        rows.append(["all", "", "1", _shown(w["rate"]), _shown(w["largest_stable_rate"]), _shown(w["margin"]), ""])
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    lines += ["", *("  ".join(cell.rjust(w) for cell, w in zip(row, widths)).rstrip() for row in rows), ""]
    return "\n".join([*lines, *found["advice"]])


def _shown(value: Optional[float]) -> str:
    return "-" if value is None else f"{value:.3g}"
