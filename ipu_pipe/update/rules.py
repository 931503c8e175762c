"""Update rules against staleness: a table of rows with a key, a source, an equation and pure
functions.

A rule acts on each stage by that stage's lag D, in updates, with any torch.optim optimizer for
which it is defined. An update applies, in this order and within each line in the order of the
table:

    compensate  g_m <- compensate(g_m, w_now - w_read) of each microbatch m          (as soon as its backward is done)
    rate        lr <- rate(lr, k)
    gradient    g <- gradient(g)                                                     (then clipping)
    step        the optimizer's own step, then w <- w + c x for each (x, c) of step(move)
    state       each additional entry of the optimizer's state <- its function of the old value and of w_{t+1} - w_t

A pass that reads a version of the weights w gets w + c x for each (entry, c) of `read`, where x is
the optimizer's state of that name *at that version*. The functions are independent of other stages
and of one another.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, Callable, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import torch

from ipu_pipe.refusals import Argument, name_key
from ipu_pipe.schedule.methods import Method, Reads, Timeline
from ipu_pipe.stability import recurrences

# one tensor for each parameter of a stage
Tensors = List[torch.Tensor]


class Setting(NamedTuple):
    """The settings of a rule on one stage of a run.

    `values`: the values of its key in method_args; `lag`: the stage's lag D in updates
    (`VersionTable.rule_lag`); `accumulate`: the microbatches N of an update.
    """

    values: Any
    stage: int
    lag: float
    method: Method
    accumulate: int


class Reading(NamedTuple):
    """A pass that reads a version: a forward if `is_forward`, else a backward or a recomputation.

    `lag`: the lag of this backward in updates for rules with `reads_lag`, else 0; `rate`: the
    learning rate of the next update after that version.
    """

    is_forward: bool
    lag: int = 0
    rate: float = 0.0


# (old value of an entry, w_{t+1} - w_t) -> new value; the function may overwrite the old value but
# not the step
Follow = Callable[[Tensors, Tensors], Tensors]
# (setting, gradients of a microbatch, w_now - w_read or None if it is 0, entries by name); changes
# gradients and entries in place
Compensate = Callable[["Setting", Tensors, Optional[Tensors], Mapping[str, Tensors]], None]


class Move(NamedTuple):
    """A step of the optimizer over the parameters of one group.

    `options`: the options of the group; `states`: the optimizer's state of each parameter;
    `gradients`: the gradients of the step with weight decay, as in the velocity; `step`: w_{t+1} -
    w_t by the optimizer alone, empty unless the rule has state.
    """

    options: Mapping[str, Any]
    states: list[Mapping[str, Any]]
    gradients: Tensors
    step: Tensors

    @property
    def velocity(self) -> Tensors:
        """The velocity of SGD after the step."""
        return (
            [state[VELOCITY] for state in self.states]
            if self.options["momentum"]
            else self.gradients
        )


Step = Callable[[Setting, Move], List[Tuple[Tensors, float]]]


def get_own_settings(rule: Rule, args: Mapping[str, Any], method: Method) -> Any:
    """Return the value of the rule's key in method_args."""
    return args.get(rule.key)


@dataclass(frozen=True)
class Rule:
    """One rule. All functions are optional.

    `key`: its key in method_args, if it has one. `set_by(rule, args, method)`: returns the rule's
    settings in a run with these resolved method_args, None if it does not act.
    `method_faults(settings, method, keys of the acting rules)` and
    `optimizer_faults(settings, kind, options)`: return the reasons why it cannot act; `kind` is
    sgd, adam, adamw or another optimizer.

    `compensate(setting, gradients, age, entries)`: changes the gradients of one microbatch, which
    are divided by N, and the rule's entries in place. `age`: the newest weights minus the weights
    that the microbatch's passes read. `gradient(setting, gradients)` -> gradients; it may overwrite
    its argument. `rate(setting, rate, k)` -> rate of update k, counted from the switch to
    asynchronous training. `step(setting, move)` -> (x, c) pairs. `state(setting)` -> name ->
    function that moves the entry after a step; None: `compensate` changes it. Entries are tensors
    of the parameters' shapes in the optimizer's state, initially 0. Memory and checkpoints use
    these names. `read(setting, reading)` -> (entry, c) pairs; a coefficient of 0 corrects nothing.

    `needs_lag`: the rule does nothing on a stage without lag. `reads_lag`: its `read` of a backward
    depends on that pass's lag. `follows_optimizer`: its entries follow the optimizer's own steps,
    without the additions of rules.
    """

    key: str
    source: str
    equation: str
    set_by: Callable[[Rule, Mapping[str, Any], Method], Any] = get_own_settings
    method_faults: Callable[[Any, Method, Sequence[str]], list[str]] | None = None
    optimizer_faults: Callable[[Any, str, Mapping[str, Any]], list[str]] | None = None

    compensate: Compensate | None = None
    gradient: Callable[[Setting, Tensors], Tensors] | None = None
    rate: Callable[[Setting, float, int], float] | None = None
    step: Step | None = None
    state: Callable[[Setting], Mapping[str, Follow | None]] | None = None
    read: Callable[[Setting, Reading], list[tuple[str, float]]] | None = None

    needs_lag: bool = True
    reads_lag: bool = False
    follows_optimizer: bool = False

    def acts_on(self, setting: Setting) -> bool:
        """Return whether the rule does anything on the stage."""
        return bool(setting.lag) or not self.needs_lag


OPTIMAL = "optimal"
# the entry of the velocity in the state of torch.optim.SGD
VELOCITY = "momentum_buffer"


# ---- gradients and rates


def shrink_gradients(setting: Setting, gradients: Tensors) -> Tensors:
    """Scale gradients: g <- c^D g, c = `factor`, D = `lag`.

    Gradient shrinking (Zhuang et al. 2019, as cited by Kosson et al. 2021).
    """
    torch._foreach_mul_(gradients, float(setting.values["factor"]) ** setting.lag)
    return gradients


def reschedule_rate(setting: Setting, rate: float, k: int) -> float:
    """Lower the rate: lr / max(D, 1)^p, p = 1 - min(k / K, 1), K = `anneal_updates`, D = `lag`
    (PipeMare, section 3.1, T1).
    """
    power = 1 - min(k / setting.values["anneal_updates"], 1.0)
    # Python's power, because NumPy's may differ in the last bit between machines
    return rate / max(setting.lag, 1.0) ** power


def scale_block_rate(setting: Setting, rate: float, k: int) -> float:
    """Scale the rate of a block by its factor f_i: lr_i = f_i lr (Laskin et al. 2020, section
    3).
    """
    return rate * float(setting.values[setting.stage])


# ---- delay compensation

MEAN_SQUARE = "delay_mean_square"
MEAN_SQUARE_EPS = 1e-7


def compensate_delay(
    setting: Setting, gradients: Tensors, age: Tensors | None, entries: Mapping[str, Tensors]
) -> None:
    """Correct the gradient of a microbatch to g + c g*g*(w_now - w_read), by element (Zheng et al.
    2017, DC-ASGD).

    c = lambda, or with `adaptive` c = lambda / sqrt(s + 1e-7), s <- decay s + (1 - decay) g*g. g is
    the gradient of the microbatch's own loss, h = g / N its part of the update's gradient, to which
    h + c N h*h*(w_now - w_read) is added.
    """
    values = setting.values
    N = setting.accumulate
    if values["adaptive"]:
        torch._foreach_mul_(entries[MEAN_SQUARE], values["decay"])
        # the gradients are h = g / N, so that g*g = N^2 h*h
        torch._foreach_addcmul_(
            entries[MEAN_SQUARE], gradients, gradients, value=(1 - values["decay"]) * N**2
        )
    if age is None:
        return
    # h*h (w_now - w_read)
    terms = torch._foreach_mul(torch._foreach_mul(gradients, gradients), age)
    if values["adaptive"]:
        roots = torch._foreach_sqrt(torch._foreach_add(entries[MEAN_SQUARE], MEAN_SQUARE_EPS))
        terms = torch._foreach_div(terms, roots)
    torch._foreach_add_(gradients, terms, alpha=values["scale"] * N)


# not FTPipe's, which is its optimizer's eps
GAP_EPS = 1e-8
STEP_SQUARE = "gap_step_square"


def penalize_gap(
    setting: Setting, gradients: Tensors, age: Tensors | None, entries: Mapping[str, Tensors]
) -> None:
    """Divide the gradient of a microbatch by 1 + abs(w_now - w_read) / (sqrt(s) + 1e-8), by element
    (Barkai et al. 2020, Gap-Aware).

    s is a moving mean of squared steps (`follow_squared_steps`), so that a gap is counted in steps.
    """
    if age is None:
        return
    roots = torch._foreach_add(torch._foreach_sqrt(entries[STEP_SQUARE]), GAP_EPS)
    gaps = torch._foreach_div(torch._foreach_abs(age), roots)
    torch._foreach_div_(gradients, torch._foreach_add(gaps, 1))


def follow_squared_steps(setting: Setting) -> Mapping[str, Follow]:
    """Keep s <- decay s + (1 - decay) (w_{t+1} - w_t)^2; its bias is not corrected (FTPipe)."""
    decay = setting.values["decay"]

    def follow(square: Tensors, step: Tensors) -> Tensors:
        torch._foreach_mul_(square, decay)
        torch._foreach_addcmul_(square, step, step, value=1 - decay)
        return square

    return {STEP_SQUARE: follow}


def list_compensation_conflicts(
    key: str, settings: Any, method: Method, acting_keys: Sequence[str]
) -> list[str]:
    """List the reasons why a gradient does not belong to a single version of the weights, or why
    another rule than `key` changes it.
    """
    if method.predicts:
        why = f"{method.name} is itself a weight prediction, and both compensate for the same delay"
        return [f"method_args.{key}: {why}"]
    if method.backward_reads is not Reads.STASHED:
        return [
            f"method_args.{key}: with {method.name} here the passes of a microbatch "
            f"read different weights, but the rule needs one version: set "
            f"{Argument('method_args', {'stash': True})}"
        ]
    if method.order is not None and method.order.splits:
        return [
            f"method_args.{key}: not with split_backward, whose weight gradients come "
            "after later updates"
        ]
    others = {"weight_prediction", "delay_compensation"}.intersection(acting_keys) - {key}
    return [
        f"method_args.{key}: cannot be combined with {other}: both compensate for the same delay"
        for other in sorted(others)
    ]


# ---- steps


def _list_momentum_conflicts(
    key: str, settings: Any, kind: str, options: Mapping[str, Any]
) -> list[str]:
    """List the reasons why the rule `key`, defined for SGD with plain momentum, is not defined for
    this optimizer.
    """
    if kind != "sgd":
        return [
            f"method_args.{key}: {kind}: is defined by the velocity of SGD with momentum (v <- m v "
            f"+ g, w <- w - lr v), which "
            f"{kind} does not have"
        ]
    odd = [name for name in ("nesterov", "dampening", "maximize") if options.get(name)]
    return [
        f"method_args.{key}: optimizer.{name}: the rule is defined on plain momentum, without "
        f"{name}"
        for name in odd
    ]


def compute_spike_coefficients(setting: Setting, momentum: float) -> tuple[float, float]:
    """Return (a, b) of a stage (Kosson et al. 2021, section 3.2).

    SC_kD has a = m^(kD), b = (1 - m^(kD)) / (1 - m), k = `scale`, D = `lag`, m = momentum; any a
    and b may be given.
    """
    if setting.values.get("a") is not None:
        return float(setting.values["a"]), float(setting.values["b"])
    return recurrences.compute_spike_coefficients(momentum, setting.values["scale"] * setting.lag)


def compensate_spike(setting: Setting, move: Move) -> list[tuple[Tensors, float]]:
    """Turn the optimizer's step w - lr v into w - lr (a v + b g), with v <- m v + g (Kosson et al.
    2021, section 3.2).
    """
    a, b = compute_spike_coefficients(setting, move.options["momentum"])
    # the optimizer has made w - lr v already
    return [
        (move.velocity, move.options["lr"] * (1 - a)),
        (move.gradients, -move.options["lr"] * b),
    ]


DELAYED_STEP = "delayed_step"


def feed_back_error(setting: Setting, move: Move) -> list[tuple[Tensors, float]]:
    """Add the error of the previous step to the optimizer's step d_t: w_{t+1} = w_t + d_t + k D
    (d_t - d_{t-1}), k = `scale`.

    With a delay of one update this is the correction of "One-Step Gradient Delay is Not a Barrier"
    (arXiv 2606.30634): d_t follows from the gradient at w_{t-1}. It should have been the step of
    the previous update, which was d_{t-1} instead; the error d_t - d_{t-1} is corrected now. For D
    updates the change is extrapolated, which is ours. The first step is not changed. An update
    without a gradient makes no step, so that the next one is added to 0.
    """
    factor = setting.values["scale"] * setting.lag
    # at first the step itself, so that the difference is 0
    previous_step = [state.get(DELAYED_STEP, step) for state, step in zip(move.states, move.step)]
    return [(move.step, factor), (previous_step, -factor)]


def list_feedback_conflicts(settings: Any, method: Method, acting_keys: Sequence[str]) -> list[str]:
    """List the rules that cannot be combined with error feedback, because they change the step
    too.
    """
    if "spike_compensation" in acting_keys:
        return [
            "method_args.error_feedback: cannot be combined with spike_compensation: both add to "
            "the step for the same delay"
        ]
    return []


# ---- T2: the backward reads w - n delta, n its lag

DELTA = "t2_delta"


def compute_discrepancy_decay(setting: Setting) -> float:
    """Return gamma = decay^(1/D), D = `lag` (PipeMare, section 3.2, T2).

    With decay `optimal`, gamma = 1 - 2/(D + 1), the optimum on a quadratic.
    """
    decay = setting.values["decay"]
    # the mean of drawn delays may be below 1
    return recurrences.compute_discrepancy_decay(
        None if decay == OPTIMAL else decay, max(setting.lag, 1.0)
    )


def track_discrepancy(setting: Setting) -> Mapping[str, Follow]:
    """Keep delta <- gamma delta + (1 - gamma) (w_{t+1} - w_t) (PipeMare, section 3.2, T2)."""
    gamma = compute_discrepancy_decay(setting)

    def follow(delta: Tensors, step: Tensors) -> Tensors:
        torch._foreach_mul_(delta, gamma)
        torch._foreach_add_(delta, step, alpha=1 - gamma)
        return delta

    return {DELTA: follow}


def read_discrepancy(setting: Setting, reading: Reading) -> list[tuple[str, float]]:
    """Correct the weights of a backward to w - n delta, n the lag of that pass (PipeMare, section
    3.2, T2).
    """
    return [] if reading.is_forward else [(DELTA, -float(reading.lag))]


def list_discrepancy_conflicts(
    settings: Any, method: Method, acting_keys: Sequence[str]
) -> list[str]:
    """List the reasons why T2 cannot act: both passes read the same weights, or another rule
    corrects the same discrepancy.
    """
    if method.backward_reads is not Reads.NEWEST:
        return [
            f"method_args.t2: with {method.name} here both passes read the same weights: there is "
            f"nothing to correct"
        ]
    if "weight_prediction" in acting_keys:
        return [
            "method_args.t2: cannot be combined with weight_prediction: both compensate for the "
            "same discrepancy"
        ]
    return []


# ---- weight prediction by the optimizer's own step

# not an entry of the state: the direction d of the optimizer's step w <- w - lr d, computed from
# the state
STEP = "step"
# the entries that are multiplied with the learning rate
BY_RATE = (VELOCITY, STEP)


def compute_adam_direction(options: Mapping[str, Any], state: Mapping[str, Any]) -> torch.Tensor:
    """Return m_hat / (sqrt(v_hat) + eps), m_hat = m / (1 - b1^t), v_hat = v / (1 - b2^t) (Kingma
    and Ba 2015).
    """
    (b1, b2), t = options["betas"], float(state["step"])
    root = (state["exp_avg_sq"] / (1 - b2**t)).sqrt()
    return (state["exp_avg"] / (1 - b1**t)) / (root + options["eps"])  # type: ignore[no-any-return]


# kind of optimizer -> (an entry that its first step makes, the function from a group's options and
# a parameter's state to the direction); AdamW's decoupled weight decay is left out, as in
# PipeOptim
DIRECTIONS: dict[
    str, tuple[str, Callable[[Mapping[str, Any], Mapping[str, Any]], torch.Tensor]]
] = {
    "sgd": (VELOCITY, lambda options, state: state[VELOCITY]),
    "adam": ("exp_avg", compute_adam_direction),
    "adamw": ("exp_avg", compute_adam_direction),
}


# ---- weight prediction: v is the velocity of the optimizer, even if spike compensation changes the step

LAST_STEP = "last_step"


def track_last_step(setting: Setting) -> Mapping[str, Follow]:
    """Keep w_t - w_{t-1}, for the form `difference`."""
    return {LAST_STEP: lambda _, step: step} if setting.values["form"] == "difference" else {}


def read_prediction(setting: Setting, reading: Reading) -> list[tuple[str, float]]:
    """Correct the weights of a forward, T = `scale` D.

    The form `velocity` reads w - lr T v, the form `difference` w + T (w_t - w_{t-1}) (Kosson et al.
    2021, section 3.3); the form `optimizer` w - lr T d, d = v of SGD with momentum and m_hat /
    (sqrt(v_hat) + eps) of Adam and AdamW (XPipe, Guan et al. 2019; PipeOptim, Guan et al. 2023).
    """
    horizon = setting.values["scale"] * setting.lag if reading.is_forward else 0.0
    if setting.values["form"] == "difference":
        return [(LAST_STEP, horizon)]
    return [(STEP if setting.values["form"] == "optimizer" else VELOCITY, -reading.rate * horizon)]


def list_prediction_conflicts(
    settings: Any, method: Method, acting_keys: Sequence[str]
) -> list[str]:
    """List the reasons why a prediction cannot be added: the method itself predicts, or no paper
    defines it for recomputation.
    """
    if method.predicts:
        return [f"method_args.weight_prediction: {method.name} is itself a weight prediction"]
    if method.segments is not None:
        return [
            "method_args.weight_prediction: cannot be combined with recompute, for which no paper "
            "defines it"
        ]
    return []


def list_velocity_conflicts(settings: Any, kind: str, options: Mapping[str, Any]) -> list[str]:
    """List the reasons why the form `velocity` has no velocity, or the form `optimizer` no known
    direction.
    """
    if settings["form"] == "difference":
        return []
    if settings["form"] == "optimizer" and kind != "sgd":
        if kind not in DIRECTIONS:
            known = "sgd with momentum, adam and adamw"
            return [
                f"method_args.weight_prediction: {kind}: form: optimizer supports only {known}: "
                f"use form: difference"
            ]
        odd = [name for name in ("amsgrad", "maximize") if options.get(name)]
        return [
            f"method_args.weight_prediction: optimizer.{name}: the form is defined without {name}"
            for name in odd
        ]
    faults = _list_momentum_conflicts("weight_prediction", settings, kind, options)
    if faults and kind != "sgd":
        return [f"{faults[0]}: use form: difference"]
    if not faults and not options.get("momentum"):
        return [
            f"method_args.weight_prediction: optimizer.momentum: {options.get('momentum') or 0}: "
            f"must be above 0"
        ]
    return faults


# ---- SpecTrain: stage s predicts the weights at the end of the first stage's backward of the microbatch


def get_spectrain_settings(
    rule: Rule, args: Mapping[str, Any], method: Method
) -> dict[str, Any] | None:
    """Return the settings of a method that itself predicts, None for others."""
    return {"form": "velocity", "scale": 1.0} if method.predicts else None


def compute_spectrain_horizon(setting: Setting, is_forward: bool) -> float:
    """Return T, in updates (Chen et al. 2018, SpecTrain).

    A backward of stage s predicts the weights s updates ahead (dataflow) or s/2 (1F1B), in updates
    of N microbatches; its forward is the stage's lag D earlier still.
    """
    # a stage of the dataflow updates in each step, one of 1F1B in every second slot
    steps = setting.stage / (1 if setting.method.pipeline is Timeline.DATAFLOW else 2)
    ahead = float(math.ceil(steps / setting.accumulate))
    return setting.lag + ahead if is_forward else ahead


def read_spectrain(setting: Setting, reading: Reading) -> list[tuple[str, float]]:
    """Correct the weights of both passes to w - lr T v (Chen et al. 2018, SpecTrain)."""
    return [(VELOCITY, -reading.rate * compute_spectrain_horizon(setting, reading.is_forward))]


def list_spectrain_conflicts(settings: Any, kind: str, options: Mapping[str, Any]) -> list[str]:
    """List the reasons why the method, which predicts by velocity, cannot use this optimizer."""
    return [
        # the method itself predicts: the caller has set no such key
        fault.replace("method_args.weight_prediction", "method").replace(
            ": use form: difference", ""
        )
        for fault in list_velocity_conflicts(settings, kind, options)
    ]


# ---- NAG-RPD: x_hat = x + beta (x - previous x), if the previous iteration changed the block


def get_nag_settings(rule: Rule, args: Mapping[str, Any], method: Method) -> Any:
    """Return beta, None for methods without it."""
    return None if method.history is None else method.history.nag


def read_nag(setting: Setting, reading: Reading) -> list[tuple[str, float]]:
    """Correct the weights of both passes to w_t + beta (w_t - w_{t-1}) (the randomized PipeDream
    paper, appendix I).
    """
    return [(LAST_STEP, setting.values)]


# ---- the table of rules, in the order in which they act


_ROWS = (
    Rule(
        "delay_compensation",
        "Zheng et al. 2017 (DC-ASGD)",
        "g <- g + lambda g*g*(w_now - w_read)",
        compensate=compensate_delay,
        method_faults=functools.partial(list_compensation_conflicts, "delay_compensation"),
        state=lambda setting: {MEAN_SQUARE: None} if setting.values["adaptive"] else {},
    ),
    Rule(
        "gap_aware",
        "Barkai et al. 2020 (Gap-Aware), in the form of FTPipe",
        "g <- g / (1 + |w_now - w_read| / sqrt(s)); s <- decay s + (1 - decay) (w_{t+1} - w_t)^2",
        compensate=penalize_gap,
        method_faults=functools.partial(list_compensation_conflicts, "gap_aware"),
        state=follow_squared_steps,
    ),
    Rule(
        "gradient_shrinking",
        "Zhuang et al. 2019, as cited by Kosson et al. 2021",
        "g <- c^D g",
        gradient=shrink_gradients,
    ),
    Rule(
        "t1",
        "PipeMare (Yang et al. 2021), section 3.1, T1",
        "lr_i = lr / tau_i^p, p = 1 - min(k/K, 1)",
        rate=reschedule_rate,
    ),
    Rule(
        "spike_compensation",
        "Kosson et al. 2021, section 3.2",
        "v <- m v + g; w <- w - lr (a v + b g)",
        step=compensate_spike,
        optimizer_faults=functools.partial(_list_momentum_conflicts, "spike_compensation"),
    ),
    Rule(
        "error_feedback",
        "arXiv 2606.30634; for delays above 1 ours",
        "w <- w + d_t + k D (d_t - d_{t-1})",
        step=feed_back_error,
        state=lambda setting: {DELAYED_STEP: lambda _, step: step},
        follows_optimizer=True,
        method_faults=list_feedback_conflicts,
    ),
    Rule(
        "t2",
        "PipeMare (Yang et al. 2021), section 3.2, T2",
        "u = w - (tau_fwd - tau_bkwd) delta; delta <- gamma delta + (1 - gamma) (w_{t+1} - w_t)",
        state=track_discrepancy,
        read=read_discrepancy,
        reads_lag=True,
        method_faults=list_discrepancy_conflicts,
    ),
    Rule(
        "weight_prediction",
        "Kosson et al. 2021, section 3.3; Guan et al. 2019, 2023",
        "forward reads w - lr T v, w + T (w_t - w_{t-1}), or w - lr T d of the optimizer's own "
        "step",
        state=track_last_step,
        read=read_prediction,
        method_faults=list_prediction_conflicts,
        optimizer_faults=list_velocity_conflicts,
    ),
    Rule(
        "block_rates",
        "each block its own (Laskin et al. 2020, section 3)",
        "lr_i = f_i lr",
        rate=scale_block_rate,
        needs_lag=False,
    ),
    Rule(
        "spectrain",
        "Chen et al. 2018 (SpecTrain), in the form of Kosson et al. 2021",
        "both passes read w - lr T v; T = s (backward), D + s (forward)",
        set_by=get_spectrain_settings,
        read=read_spectrain,
        needs_lag=False,
        optimizer_faults=list_spectrain_conflicts,
    ),
    Rule(
        "nag",
        "the randomized PipeDream paper, appendix I",
        "both passes read x_(k-d) + beta (x_(k-d) - x_(k-d-1))",
        set_by=get_nag_settings,
        state=lambda setting: {LAST_STEP: lambda _, step: step},
        read=read_nag,
        needs_lag=False,
    ),
)

RULES: dict[str, Rule] = {rule.key: rule for rule in _ROWS}


def select_rules(args: Mapping[str, Any], method: Method) -> list[tuple[Rule, Any]]:
    """Return the rules that act in a run with these method_args (resolved), with their settings, in
    the order of the table.
    """
    settings_of = [(rule, rule.set_by(rule, args, method)) for rule in RULES.values()]
    return [(rule, settings) for rule, settings in settings_of if settings is not None]


def list_conflicts(
    args: Mapping[str, Any], method: Method, kind: str, options: Mapping[str, Any]
) -> list[str]:
    """List the reasons why the rules in `args` (resolved method_args) cannot act with this method
    and optimizer.
    """
    acting = select_rules(args, method)
    keys = [rule.key for rule, _ in acting]
    if not method.is_stale:
        idle = [rule.key for rule, _ in acting if rule.needs_lag]
        # it runs without staleness until the method begins, which has none either
        idle += ["warmup"] if args.get("warmup") is not None else []
        if idle:
            why = "no gradient is stale: leave it out"
            return [f"{name_key(f'method_args.{key}')}: with {method.name} {why}" for key in idle]
    faults: list[str] = []
    if method.history is not None:
        other = [key for key in keys if key != "nag"] + ["warmup"] * (
            args.get("warmup") is not None
        )
        why = "its delays count updates of all stages, for which no rule is defined"
        return [f"{name_key(f'method_args.{key}')}: not with {method.name}: {why}" for key in other]
    for rule, settings in acting:
        faults += (
            rule.method_faults(settings, method, keys) if rule.method_faults is not None else []
        )
        faults += (
            rule.optimizer_faults(settings, kind, options)
            if rule.optimizer_faults is not None
            else []
        )
    return faults
