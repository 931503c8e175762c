"""The stages of a job as recurrences of the theory of delayed updates, and the explanation of a
loss that diverged.
"""

from __future__ import annotations

import numpy as np

from ipu_pipe.job.record import Job
from ipu_pipe.stability.advice import StageDynamics, compute_margins
from ipu_pipe.stability.recurrences import DelayedRead, Recurrence
from ipu_pipe.stability.roots import derive_loop_gain, find_largest_stable_step
from ipu_pipe.update.optimizer import list_kinds
from ipu_pipe.update.rules import (
    Setting,
    compute_discrepancy_decay,
    compute_spectrain_horizon,
    compute_spike_coefficients,
    select_rules,
)

# the rules in `derive_recurrence`, and those that change rates alone
COVERED_RULES = (
    "gradient_shrinking",
    "spike_compensation",
    "t2",
    "weight_prediction",
    "spectrain",
    "t1",
    "block_rates",
)
# the most remedies in an explanation
MOST_REMEDIES = 2


def list_inapplicable(job: Job) -> list[str]:
    """Return the reasons why the theory does not apply to a job, one line each."""
    faults = []
    kinds = list_kinds(job.full_optimizer)
    if kinds != ["sgd"]:
        faults.append(
            f"optimizer.name: {', '.join(kinds)}: the theory covers only SGD: must be sgd"
        )
    elif any(group.get("maximize") for group in job.full_optimizer.param_groups):
        faults.append("optimizer.maximize: true: the theory covers only descent")
    faults += [
        f"method_args.{key}: the theory does not cover it: must be null"
        for key in [rule.key for rule, _ in select_rules(job.config.method_settings(), job.method)]
        if key not in COVERED_RULES
    ]
    if job.method.structure is not None:
        faults.append(
            f"method: {job.method.name}: trains each block by its own loss: no gradient is stale"
        )
    if job.method.history is not None:
        faults.append(f"method: {job.method.name}: the theory does not cover updates of one stage")
    if job.method.delay is not None and job.method.delay.drawn:
        faults.append(
            "method_args.hogwild: delays are drawn: the theory covers fixed ones: use "
            "constant_delay"
        )
    if job.method.delay is not None and job.method.delay.table is not None:
        faults.append(
            "method_args.constant_delay: delays differ by microbatch: the theory covers one delay "
            "for all: use"
            " a number"
        )
    return faults


def derive_recurrence(
    job: Job, stage: int, forward: int, backward: int, discrepancy: float = 0.0
) -> Recurrence:
    """Return the recurrence of a stage for curvature 1, whose passes read weights `forward` and
    `backward` updates old.

    `discrepancy` is PipeMare's Delta, as a share of the curvature.
    """
    groups = job.full_optimizer.param_groups
    # a stage without weights has no group
    options = next((group for group in groups if group["stage"] == stage), groups[0])
    momentum = float(options["momentum"])
    # torch's SGD ignores dampening without momentum
    scale = 1 - options["dampening"] if momentum else 1.0
    a, b = (momentum * scale, 1.0) if options["nesterov"] else (scale, 0.0)
    factor = 1.0
    horizon = 0.0
    backward_horizon = 0.0
    correction = 0.0
    decay = 0.0
    by_velocity = False
    for rule, values in select_rules(job.config.method_settings(), job.method):
        setting = Setting(
            values, stage, float(forward), job.method, job.config.gradient_accumulation
        )
        if not rule.acts_on(setting):
            continue
        if rule.key == "gradient_shrinking":
            # a smaller gradient is that of a smaller curvature
            factor = float(values["factor"]) ** forward
        elif rule.key == "spike_compensation":
            a, b = compute_spike_coefficients(setting, momentum)
        elif rule.key == "t2":
            # T2 leads from the weights that the backward reads back to those of the forward
            correction = float(forward - backward)
            decay = compute_discrepancy_decay(setting)
        elif rule.key == "weight_prediction":
            horizon = values["scale"] * forward  # in updates
            by_velocity = values["form"] != "difference"  # SGD's own step is its velocity
        elif rule.key == "spectrain":
            horizon = compute_spectrain_horizon(setting, True)
            by_velocity = True
            backward_horizon = compute_spectrain_horizon(setting, False)
    forward_read = DelayedRead(factor * (1 + discrepancy), forward, horizon, by_velocity)
    # the second read would be of the same weights, or count nothing
    if backward == forward or not discrepancy:
        # two versions that do not differ have no discrepancy
        return Recurrence((forward_read._replace(sensitivity=factor),), momentum, a, b)
    backward_read = DelayedRead(
        -factor * discrepancy, backward, backward_horizon, by_velocity, correction
    )
    return Recurrence((forward_read, backward_read), momentum, a, b, decay)


def explain_divergence(job: Job, update: int) -> str:
    """Return the theory's explanation of a loss that is not finite at this update, to be appended
    to the error.

    It names the stage that tolerates the smallest learning rate, by its delay, that rate, and the
    rules that would raise it. The run does not know the curvature: rates are in units of 1 /
    curvature, or relative.
    """
    lags = job.table.greatest_lag()
    rates = job.rules.rates(update)
    used_rules = job.config.method_settings()
    # the stable rate decreases as 1 / (2 lag + 1) (PipeMare, Lemma 1)
    worst = int(np.argmax(rates * (2 * lags + 1)))
    forward = int(lags[worst])
    backward = int(job.table.greatest_backward_lag()[worst])
    if update < job.rules.switch or not forward or job.method.structure is not None:
        # a hint that the method or the backend would refuse is none
        is_supported = job.method.structure is None and job.config.backend.facts.clips_any_optimizer
        can_clip = job.config.clip is None and is_supported
        clip = "; clip: {norm: ...} may help" if can_clip else ""
        return (
            f"; no stage reads stale weights in this run, so rules against staleness cannot "
            f"help{clip}"
        )
    text = (
        f"; stage {worst} tolerates the smallest learning rate (its weights are {forward} "
        f"update{'s' * (forward > 1)} stale)"
    )
    # the theory does not cover Adam, for example
    if list_inapplicable(job):
        takes_t1 = job.method.history is None and "t1" not in used_rules
        advice = ": method_args: {t1: {}} lowers its rate at the start"
        return f"{text}{advice if takes_t1 else ''}"
    recurrence = derive_recurrence(job, worst, forward, backward)
    without_delay = find_largest_stable_step(
        # the same optimizer on weights that are never stale
        derive_loop_gain(recurrence._replace(reads=(DelayedRead(1.0, 0),)))
    )
    # the run does not know the curvature: the limit is that of 1
    (margin,) = compute_margins([StageDynamics(worst, recurrence, float(rates[worst]), 1.0)])
    text += (
        f": it is stable up to {margin.largest_rate:.3g} / curvature, "
        f"{margin.largest_rate / without_delay:.2g} times the limit "
        f"without delay, and uses {margin.stage.rate:.3g}"
    )
    remedies = [remedy for remedy in margin.remedies if remedy.change not in used_rules][
        :MOST_REMEDIES
    ]
    text += "".join(
        f"; with {r.change} it tolerates {r.margin / margin.margin:.3g} times as much"
        for r in remedies
    )
    return f"{text}; python tools/stability.py CONFIG measures the curvature"
