"""A job's stages as the theory of delayed updates has them, and what it says of one that diverges."""

from __future__ import annotations

from typing import List

import numpy as np

from ipu_pipe.job.record import Job
from ipu_pipe.stability.advice import Stage, verdicts
from ipu_pipe.stability.loops import loop_of
from ipu_pipe.stability.recurrences import Read, Recurrence
from ipu_pipe.stability.roots import largest_stable_step
from ipu_pipe.update.optimizer import kind
from ipu_pipe.update.rule import Setting
from ipu_pipe.update.rules import acting, discrepancy_decay, spectrain_horizon, spike_coefficients

REMEDIES = 2  # told of a stage


def against(job: Job) -> List[str]:
    """Why the theory is not about a job, a line each."""
    faults = []
    if kind(job.optimizer) != "sgd":
        faults.append(
            f"optimizer.name: {kind(job.optimizer)}: the theory is of SGD, with momentum or without: must be sgd"
        )
    elif any(group.get("maximize") for group in job.optimizer.param_groups):
        faults.append("optimizer.maximize: true: the theory is of descent")
    if job.method.structure is not None:
        faults.append(f"method: {job.method.name}: trains blocks by losses of their own: no gradient is stale")
    if job.method.delay is not None and job.method.delay.drawn:
        faults.append("method_args.hogwild: delays are drawn: the theory is of fixed ones: use constant_delay")
    return faults


def recurrence(job: Job, stage: int, forward: int, backward: int, apart: float = 0.0) -> Recurrence:
    """A stage's, of curvature 1: its passes read weights `forward` and `backward` updates old; `apart`: the discrepancy, as a
    share of the curvature."""
    options = job.optimizer.param_groups[0]
    momentum = float(options["momentum"])
    scale = 1 - options["dampening"] if momentum else 1.0
    a, b = (momentum * scale, 1.0) if options["nesterov"] else (scale, 0.0)
    shrink, ahead, back, correction, decay, by_velocity = 1.0, 0.0, 0.0, 0.0, 0.0, False
    for rule, values in acting(job.config.method_settings(), job.method):
        setting = Setting(values, stage, float(forward), job.method, job.config.gradient_accumulation)
        if not rule.acts_on(setting):
            continue
        if rule.key == "gradient_shrinking":
            shrink = float(values["factor"]) ** forward
        elif rule.key == "spike_compensation":
            a, b = spike_coefficients(setting, momentum)
        elif rule.key == "t2":
            correction, decay = float(forward - backward), discrepancy_decay(setting)
        elif rule.key == "weight_prediction":
            ahead, by_velocity = values["scale"] * forward, values["form"] == "velocity"
        elif rule.key == "spectrain":
            ahead, back, by_velocity = spectrain_horizon(setting, True), spectrain_horizon(setting, False), True
    first = Read(shrink * (1 + apart), forward, ahead, by_velocity)
    if backward == forward or not apart:
        return Recurrence((first._replace(sensitivity=shrink),), momentum, a, b)
    second = Read(-shrink * apart, backward, back, by_velocity, correction)
    return Recurrence((first, second), momentum, a, b, decay)


def bears_least(job: Job, update: int) -> str:
    """Of a loss that is not finite in this update: the stage that bears the least rate, by its delay; what rate that is, and
    which rules would raise it. The curvature is not known to a run: figures are in units of one over it, or relative."""
    lags, rates, given = job.table.greatest_lag(), job.rules.rates(update), job.config.method_settings()
    worst = int(np.argmax(rates * (2 * lags + 1)))  # as what is stable falls (PipeMare, Lemma 1)
    forward, backward = int(lags[worst]), int(job.table.greatest_backward_lag()[worst])
    if update < job.rules.switch or not forward or job.method.structure is not None:
        clip = "" if job.config.clip is not None else ", clip: {norm: ...} may"
        return f"; no stage reads old weights here, so that no rule against delays helps{clip}"
    told = f"; stage {worst} bears least: its forward reads weights {forward} update{'s' * (forward > 1)} old"
    if against(job):  # as of Adam
        return told + ("" if "t1" in given else ": method_args: {t1: {}} lowers its rate in the beginning")
    own = recurrence(job, worst, forward, backward)
    fresh = largest_stable_step(loop_of(own._replace(reads=(Read(1.0, 0),))))
    (verdict,) = verdicts([Stage(worst, own, float(rates[worst]), 1.0)])
    told += (
        f", so it is stable up to a rate of {verdict.largest_rate:.3g} / curvature, {verdict.largest_rate / fresh:.2g} times "
        f"that without delay, and steps at {verdict.stage.rate:.3g}"
    )
    helping = [remedy for remedy in verdict.remedies if remedy.change not in given][:REMEDIES]
    told += "".join(f"; with {r.change} it bears {r.margin / verdict.margin:.3g} times as much" for r in helping)
    return f"{told}; python tools/stability.py CONFIG measures the curvature"
