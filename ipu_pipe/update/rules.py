"""The table of update rules that tame staleness: what they do to a gradient, a rate, a step, and to the weights that passes read.

What each function of a row is given and gives is in ipu_pipe.update.rule. Three rules correct the weights w of a version when a
pass reads it, each to w + c x with x kept beside the optimizer's state: the velocity, the difference or the accumulator:

    weight_prediction    forward     w - lr T v, or w + T (w_t - w_{t-1})
    spectrain            both        w - lr T v, T by pass
    t2                   backward    w - (lag of this pass) delta, recomputation likewise
"""

from __future__ import annotations

import functools
import math
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

import torch

from ipu_pipe.schedule.methods import Method, Pipeline, Reads
from ipu_pipe.stability import recurrences
from ipu_pipe.update.rule import Follow, Reading, Rule, Setting, Tensors

OPTIMAL = "optimal"
VELOCITY = "momentum_buffer"  # in the state of torch.optim.SGD


# ---- gradients and rates


def shrunk(setting: Setting, gradients: Tensors) -> Tensors:
    """Gradients times c^D."""
    torch._foreach_mul_(gradients, float(setting.values["factor"]) ** setting.lag)
    return gradients


def rescheduled(setting: Setting, rate: float, k: int) -> float:
    """lr / max(D, 1)^p, p = 1 - min(k / K, 1)."""
    power = 1 - min(k / setting.values["anneal_updates"], 1.0)
    # Python's own power: NumPy's may differ in the last bit from machine to machine
    return rate / max(setting.lag, 1.0) ** power


def block_rate(setting: Setting, rate: float, k: int) -> float:
    """The block's factor times lr."""
    return rate * float(setting.values[setting.stage])


# ---- steps


def _momentum_sgd_faults(key: str, settings: Any, kind: str, options: Mapping[str, Any]) -> List[str]:
    if kind != "sgd":
        return [
            f"method_args.{key}: {kind}: is defined by the velocity of SGD with momentum (v <- m v + g, w <- w - lr v), and "
            f"{kind}'s step is no such thing"
        ]
    odd = [name for name in ("nesterov", "dampening", "maximize") if options.get(name)]
    return [
        f"method_args.{key}: optimizer.{name}: the rule is defined on plain momentum, without {name}" for name in odd
    ]


def spike_coefficients(setting: Setting, momentum: float) -> Tuple[float, float]:
    """(a, b) of a stage: SC_kD with a = m^(kD), b = (1 - m^(kD)) / (1 - m), or any a and b."""
    if setting.values.get("a") is not None:
        return float(setting.values["a"]), float(setting.values["b"])
    return recurrences.compute_spike_coefficients(momentum, setting.values["scale"] * setting.lag)


def compensated(
    setting: Setting, options: Mapping[str, Any], velocity: Tensors, gradients: Tensors
) -> List[Tuple[Tensors, float]]:
    """What makes w - lr v_{t+1}, the optimizer's own step, into w - lr (a v_{t+1} + b g_t)."""
    a, b = spike_coefficients(setting, options["momentum"])
    return [(velocity, options["lr"] * (1 - a)), (gradients, -options["lr"] * b)]


# ---- T2: the backward reads w - n delta, n the lag of that pass

DELTA = "t2_delta"


def discrepancy_decay(setting: Setting) -> float:
    """gamma: decay^(1/D), or, with decay `optimal`, 1 - 2/(D + 1), the optimum on a quadratic."""
    decay = setting.values["decay"]
    return recurrences.compute_discrepancy_decay(None if decay == OPTIMAL else decay, max(setting.lag, 1.0))


def discrepancy_state(setting: Setting) -> Mapping[str, Follow]:
    """delta <- gamma delta + (1 - gamma) (w_{t+1} - w_t)."""
    gamma = discrepancy_decay(setting)

    def follow(delta: Tensors, step: Tensors) -> Tensors:
        torch._foreach_mul_(delta, gamma)
        torch._foreach_add_(delta, step, alpha=1 - gamma)
        return delta

    return {DELTA: follow}


def discrepancy_read(setting: Setting, reading: Reading) -> List[Tuple[str, float]]:
    """w - n delta in a backward."""
    return [] if reading.is_forward else [(DELTA, -float(reading.lag))]


def discrepancy_faults(settings: Any, method: Method, given: Sequence[str]) -> List[str]:
    """Both passes must read other weights, and nothing else make up for it."""
    if method.backward_reads is not Reads.NEWEST:
        return [
            f"method_args.t2: with {method.name} here both passes read the same weights: there is nothing to correct"
        ]
    if "weight_prediction" in given:
        return ["method_args.t2: not together with weight_prediction: both make up for the same discrepancy"]
    return []


# ---- weight prediction: v is the velocity of the optimizer, also where spike compensation makes the step another one

LAST_STEP = "last_step"


def prediction_state(setting: Setting) -> Mapping[str, Follow]:
    """Of the form `difference`: w_t - w_{t-1}."""
    return {LAST_STEP: lambda _, step: step} if setting.values["form"] == "difference" else {}


def prediction_read(setting: Setting, reading: Reading) -> List[Tuple[str, float]]:
    """w - lr T v (`velocity`) or w + T (w_t - w_{t-1}) (`difference`) in a forward, T = scale D."""
    horizon = setting.values["scale"] * setting.lag if reading.is_forward else 0.0
    if setting.values["form"] == "difference":
        return [(LAST_STEP, horizon)]
    return [(VELOCITY, -reading.rate * horizon)]


def prediction_faults(settings: Any, method: Method, given: Sequence[str]) -> List[str]:
    """It predicts once, and no paper defines it for recomputation."""
    if method.predicts:
        return [f"method_args.weight_prediction: {method.name} is a weight prediction by itself"]
    if method.segments is not None:
        return ["method_args.weight_prediction: not together with recompute, for which no paper defines it"]
    return []


def prediction_optimizer_faults(settings: Any, kind: str, options: Mapping[str, Any]) -> List[str]:
    """The form `velocity` needs one."""
    if settings["form"] == "difference":
        return []
    faults = _momentum_sgd_faults("weight_prediction", settings, kind, options)
    if faults and kind != "sgd":
        return [f"{faults[0]}: use form: difference"]
    if not faults and not options.get("momentum"):
        return [f"method_args.weight_prediction: optimizer.momentum: {options.get('momentum') or 0}: must be above 0"]
    return faults


# ---- SpecTrain: stage s predicts the weights of the time at which the first stage's backward of that microbatch ends


def spectrain_settings(rule: Rule, args: Mapping[str, Any], method: Method) -> Optional[Dict[str, Any]]:
    """It is a method's own prediction, not one that is added."""
    return {"form": "velocity", "scale": 1.0} if method.predicts else None


def spectrain_horizon(setting: Setting, is_forward: bool) -> float:
    """T: from the backward that time is s steps away (dataflow), s/2 updates (1F1B); the forward is the stage's lag D earlier
    still."""
    steps = setting.stage / (1 if setting.method.pipeline is Pipeline.DATAFLOW else 2)
    ahead = float(math.ceil(steps / setting.accumulate))
    return setting.lag + ahead if is_forward else ahead


def spectrain_read(setting: Setting, reading: Reading) -> List[Tuple[str, float]]:
    """w - lr T v in both passes."""
    return [(VELOCITY, -reading.rate * spectrain_horizon(setting, reading.is_forward))]


def spectrain_optimizer_faults(settings: Any, kind: str, options: Mapping[str, Any]) -> List[str]:
    """As for a prediction by velocity, which here the method asks for."""
    return [
        fault.replace("method_args.weight_prediction", "method").replace(": use form: difference", "")
        for fault in prediction_optimizer_faults(settings, kind, options)
    ]


# ---- NAG-RPD: x_hat = x + beta (x - x of the iterate before), where that one changed the block


def nag_settings(rule: Rule, args: Mapping[str, Any], method: Method) -> Any:
    """beta."""
    return None if method.history is None else method.history.nag


def nag_read(setting: Setting, reading: Reading) -> List[Tuple[str, float]]:
    """w_t + beta (w_t - w_{t-1}) in both passes."""
    return [(LAST_STEP, setting.values)]


# ---- the table, in the order in which they act


def _table(*rules: Rule) -> Dict[str, Rule]:
    return {rule.key: rule for rule in rules}


RULES: Dict[str, Rule] = _table(
    Rule("gradient_shrinking", "Zhuang et al. 2019, as cited by Kosson et al. 2021", "g <- c^D g", gradient=shrunk),
    Rule(
        "t1", "PipeMare (Yang et al. 2021), section 3.1, T1", "lr_i = lr / tau_i^p, p = 1 - min(k/K, 1)",
        rate=rescheduled,
    ),
    Rule(
        "spike_compensation", "Kosson et al. 2021, section 3.2", "v <- m v + g; w <- w - lr (a v + b g)",
        step=compensated,
        optimizer_faults=functools.partial(_momentum_sgd_faults, "spike_compensation"),
    ),
    Rule(
        "t2", "PipeMare (Yang et al. 2021), section 3.2, T2",
        "u = w - (tau_fwd - tau_bkwd) delta; delta <- gamma delta + (1 - gamma) (w_{t+1} - w_t)",
        state=discrepancy_state, read=discrepancy_read, reads_lag=True, method_faults=discrepancy_faults,
    ),
    Rule(
        "weight_prediction", "Kosson et al. 2021, section 3.3", "forward reads w - lr T v, or w + T (w_t - w_{t-1})",
        state=prediction_state, read=prediction_read,
        method_faults=prediction_faults, optimizer_faults=prediction_optimizer_faults,
    ),
    Rule(
        "block_rates", "each block its own (Laskin et al. 2020, section 3)", "lr_i = f_i lr",
        rate=block_rate, needs_lag=False,
    ),
    Rule(
        "spectrain", "Chen et al. 2018 (SpecTrain), in the form of Kosson et al. 2021",
        "both passes read w - lr T v; T = s (backward), D + s (forward)",
        set_by=spectrain_settings, read=spectrain_read, needs_lag=False, optimizer_faults=spectrain_optimizer_faults,
    ),
    Rule(
        "nag", "the randomized PipeDream paper, appendix I", "both passes read x_(k-d) + beta (x_(k-d) - x_(k-d-1))",
        set_by=nag_settings, state=lambda setting: {LAST_STEP: lambda _, step: step}, read=nag_read, needs_lag=False,
    ),
)  # fmt: skip


def acting(args: Mapping[str, Any], method: Method) -> List[Tuple[Rule, Any]]:
    """The rules that act in a run with these method_args (resolved), with their settings, in order."""
    found = [(rule, rule.set_by(rule, args, method)) for rule in RULES.values()]
    return [(rule, settings) for rule, settings in found if settings is not None]


def faults(args: Mapping[str, Any], method: Method, kind: str, options: Mapping[str, Any]) -> List[str]:
    """Why the rules in `args` (method_args, resolved) cannot act together with this method and optimizer; empty if they can."""
    chosen = acting(args, method)
    given = [rule.key for rule, _ in chosen]
    if not method.is_stale:
        idle = [rule.key for rule, _ in chosen if rule.needs_lag]
        idle += ["warmup"] if args.get("warmup") is not None else []
        if idle:
            why = "no gradient is stale: there is nothing for it to do"
            return [f"method_args.{key}: with {method.name} {why}" for key in idle]
    found: List[str] = []
    if method.history is not None:
        other = [rule.key for rule, _ in chosen if rule.key != "nag"] + ["warmup"] * (args.get("warmup") is not None)
        why = "its delays are of the history of all stages' updates, for which no rule is defined"
        return [f"method_args.{key}: not with {method.name}: {why}" for key in other]
    for rule, settings in chosen:
        found += rule.method_faults(settings, method, given) if rule.method_faults is not None else []
        found += rule.optimizer_faults(settings, kind, options) if rule.optimizer_faults is not None else []
    return found
