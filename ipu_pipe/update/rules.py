"""Update rules that tame staleness: what they do to a learning rate, a gradient, a step, and to the weights that a pass reads.

A rule acts on each stage by that stage's lag D, in updates (`VersionTable.rule_lag`), over any torch.optim optimizer that it
is defined on. Rules compose; an update applies them in this order:

    gradients     gradient_shrinking         g <- c^D g                                (then clipping)
    rate          t1                         lr <- lr / max(D, 1)^p
    step          the optimizer's own, then spike_compensation's difference to it
    accumulators  t2's delta, the difference w_t - w_{t-1} for weight_prediction

and three of them correct the weights w of a version when a pass reads it, each to w + c x with x a tensor that is kept beside
the optimizer's state: the velocity, the difference or the accumulator *at that version*.

    weight_prediction    forward     w - lr T v, or w + T (w_t - w_{t-1})
    spectrain            both        w - lr T v, T by pass
    t2                   backward    w - (lag of this pass) delta, recomputation likewise

A stage without lag is left alone by every rule, to the last bit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple, Type

import numpy as np
import torch
from numpy.typing import NDArray

from ipu_pipe.schedule.methods import Method, Pipeline, Reads
from ipu_pipe.schedule.runs import IntArray

Tensors = List[torch.Tensor]
Floats = NDArray[np.float64]

PLAIN, FORWARD, BACKWARD = 0, 1, 2  # how a version is corrected; -n: by t2 for a lag of n
OPTIMAL = "optimal"


@dataclass
class StageState:
    """A stage's trainable parameters and its groups in the optimizer."""

    index: int
    groups: List[Dict[str, Any]]
    state: Any  # optimizer.state

    @property
    def parameters(self) -> List[torch.nn.Parameter]:
        """Those of all groups, in order."""
        return [p for group in self.groups for p in group["params"]]

    def entries(self, name: str) -> Optional[Tensors]:
        """The optimizer state `name` of each parameter, or None before the first update has made it. What a parameter
        lacks that never had a gradient is 0."""
        held = [self.state[p].get(name) if p in self.state else None for p in self.parameters]
        if all(value is None for value in held):
            return None
        return [torch.zeros_like(p) if value is None else value for p, value in zip(self.parameters, held)]


class Rule:
    """One rule, set for a run. `lag`: D of each stage, shape (P,), in updates. Nothing is done at all by this one."""

    key = ""  # in method_args
    source = ""
    equation = ""

    def __init__(self, settings: Mapping[str, Any], lag: Floats) -> None:
        self.lag = lag

    @classmethod
    def optimizer_faults(cls, settings: Mapping[str, Any], kind: str, options: Mapping[str, Any]) -> List[str]:
        """Why the rule is not defined on the optimizer `kind` (sgd, adam, adamw) with these `options`."""
        return []

    @classmethod
    def method_faults(cls, settings: Mapping[str, Any], method: Method, given: Sequence[str]) -> List[str]:
        """Why the rule cannot act with the method and the other rules `given` (keys)."""
        return []

    def rates(self, rates: Floats, k: int) -> Floats:
        """Learning rate (P,) of update k, counted from the switch to asynchronous training."""
        return rates

    def change_gradients(self, stage: StageState) -> None:
        """Before clipping and the step."""

    def before_step(self, stage: StageState) -> None:
        """When gradients and rate are final."""

    def after_step(self, stage: StageState) -> None:
        """When the optimizer has stepped."""

    def measures(self, stage: int) -> bool:
        """Whether `accumulate` wants this stage's step."""
        return False

    def accumulate(self, stage: StageState, step: Tensors) -> None:
        """`step`: w_{t+1} - w_t of each parameter, which may be kept. Their gradients are still there: a parameter without
        one has not moved, and must get no state, by which optimizers know what they have not seen yet."""


class Rescheduling(Rule):
    """T1: the rate of update k is lr / max(D, 1)^p, p = 1 - min(k / K, 1)."""

    key, source = "t1", "PipeMare (Yang et al. 2021), section 3.1, T1"
    equation = "lr_i = lr / tau_i^p, p = 1 - min(k/K, 1)"

    def __init__(self, settings: Mapping[str, Any], lag: Floats) -> None:
        super().__init__(settings, lag)
        self._anneal = settings["anneal_updates"]

    def rates(self, rates: Floats, k: int) -> Floats:
        power = 1 - min(k / self._anneal, 1.0)
        # Python's own power: NumPy's may differ in the last bit from machine to machine
        return np.array([rate / max(lag, 1.0) ** power for rate, lag in zip(rates.tolist(), self.lag.tolist())])


class GradientShrinking(Rule):
    """Gradients times c^D."""

    key, source = "gradient_shrinking", "Zhuang et al. 2019, as cited by Kosson et al. 2021"
    equation = "g <- c^D g"

    def __init__(self, settings: Mapping[str, Any], lag: Floats) -> None:
        super().__init__(settings, lag)
        self._factor = [float(settings["factor"]) ** d for d in lag.tolist()]

    def change_gradients(self, stage: StageState) -> None:
        if self.lag[stage.index]:
            gradients = [p.grad for p in stage.parameters if p.grad is not None]
            if gradients:
                torch._foreach_mul_(gradients, self._factor[stage.index])


def _is_momentum_sgd(key: str, kind: str, options: Mapping[str, Any]) -> List[str]:
    if kind != "sgd":
        return [
            f"method_args.{key}: {kind}: is defined by the velocity of SGD with momentum (v <- m v + g, w <- w - lr v), and "
            f"{kind}'s step is no such thing"
        ]
    odd = [name for name in ("nesterov", "dampening", "maximize") if options.get(name)]
    return [
        f"method_args.{key}: optimizer.{name}: the rule is defined on plain momentum, without {name}" for name in odd
    ]


class SpikeCompensation(Rule):
    """w <- w - lr (a v_{t+1} + b g_t): SC_kD with a = m^(kD), b = (1 - m^(kD)) / (1 - m), or any a and b.

    g_t holds the optimizer's weight decay, as the velocity does. Done as the optimizer's own step w - lr v_{t+1} and then
    the difference to it.
    """

    key, source = "spike_compensation", "Kosson et al. 2021, section 3.2"
    equation = "v <- m v + g; w <- w - lr (a v + b g)"

    def __init__(self, settings: Mapping[str, Any], lag: Floats) -> None:
        super().__init__(settings, lag)
        self._settings = settings
        self._gradients: Dict[int, List[Tuple[Dict[str, Any], List[torch.nn.Parameter], Tensors]]] = {}

    @classmethod
    def optimizer_faults(cls, settings: Mapping[str, Any], kind: str, options: Mapping[str, Any]) -> List[str]:
        return _is_momentum_sgd(cls.key, kind, options)

    def coefficients(self, stage: int, momentum: float) -> Tuple[float, float]:
        """(a, b) of a stage."""
        if self._settings.get("a") is not None:
            return float(self._settings["a"]), float(self._settings["b"])
        decayed = momentum ** (self._settings["scale"] * float(self.lag[stage]))
        return decayed, (1 - decayed) / (1 - momentum)

    def before_step(self, stage: StageState) -> None:
        if not self.lag[stage.index]:
            return
        kept = []
        for group in stage.groups:
            moved = [p for p in group["params"] if p.grad is not None]
            gradients = [p.grad for p in moved]
            if group["weight_decay"] and moved:
                values = [p.detach() for p in moved]
                gradients = list(torch._foreach_add(gradients, values, alpha=group["weight_decay"]))
            kept.append((group, moved, gradients))
        self._gradients[stage.index] = kept

    def after_step(self, stage: StageState) -> None:
        for group, moved, gradients in self._gradients.pop(stage.index, ()):
            if not moved:
                continue
            rate, momentum = group["lr"], group["momentum"]
            a, b = self.coefficients(stage.index, momentum)
            values = [p.detach() for p in moved]
            velocity = [stage.state[p]["momentum_buffer"] for p in moved] if momentum else gradients
            torch._foreach_add_(values, velocity, alpha=rate * (1 - a))
            torch._foreach_add_(values, gradients, alpha=-rate * b)


class DiscrepancyCorrection(Rule):
    """T2: the backward reads w - n delta, n the lag of that pass; delta <- gamma delta + (1 - gamma) (w_{t+1} - w_t).

    gamma = decay^(1/D), or, with decay `optimal`, 1 - 2/(D + 1), the optimum on a quadratic.
    """

    key, source = "t2", "PipeMare (Yang et al. 2021), section 3.2, T2"
    equation = "u = w - (tau_fwd - tau_bkwd) delta; delta <- gamma delta + (1 - gamma) (w_{t+1} - w_t)"
    entry = "t2_delta"

    def __init__(self, settings: Mapping[str, Any], lag: Floats) -> None:
        super().__init__(settings, lag)
        decay = settings["decay"]
        self.gamma = [
            1 - 2 / (tau + 1) if decay == OPTIMAL else float(decay) ** (1 / tau)
            for tau in np.maximum(lag, 1.0).tolist()
        ]

    @classmethod
    def method_faults(cls, settings: Mapping[str, Any], method: Method, given: Sequence[str]) -> List[str]:
        if method.backward_reads is not Reads.NEWEST:
            return [
                f"method_args.t2: with {method.name} here both passes read the same weights: there is nothing to correct"
            ]
        for other in ("weight_prediction",):
            if other in given:
                return [f"method_args.t2: not together with {other}: both make up for the same discrepancy"]
        return []

    def measures(self, stage: int) -> bool:
        return bool(self.lag[stage])

    def accumulate(self, stage: StageState, step: Tensors) -> None:
        gamma = self.gamma[stage.index]
        moved = [
            (p, value) for p, value in zip(stage.parameters, step) if p.grad is not None or self.entry in stage.state[p]
        ]
        if moved:
            deltas = [stage.state[p].setdefault(self.entry, torch.zeros_like(value)) for p, value in moved]
            torch._foreach_mul_(deltas, gamma)
            torch._foreach_add_(deltas, [value for _, value in moved], alpha=1 - gamma)


class WeightPrediction(Rule):
    """Linear weight prediction: the forward reads w - lr T v (`velocity`) or w + T (w_t - w_{t-1}) (`difference`), T = scale D.

    v is the velocity of the optimizer, also where spike compensation makes the step another one; lr the rate of the update
    that is next at that version.
    """

    key, source = "weight_prediction", "Kosson et al. 2021, section 3.3"
    equation = "forward reads w - lr T v, or w + T (w_t - w_{t-1})"
    entry = "last_step"

    def __init__(self, settings: Mapping[str, Any], lag: Floats) -> None:
        super().__init__(settings, lag)
        self.form = settings["form"]
        scale = settings["scale"]
        self.horizons: Dict[int, Floats] = {FORWARD: scale * lag, BACKWARD: np.zeros_like(lag)}

    @classmethod
    def optimizer_faults(cls, settings: Mapping[str, Any], kind: str, options: Mapping[str, Any]) -> List[str]:
        if settings["form"] == "difference":
            return []
        faults = _is_momentum_sgd(cls.key, kind, options)
        if faults and kind != "sgd":
            return [f"{faults[0]}: use form: difference"]
        if not faults and not options.get("momentum"):
            return [f"method_args.{cls.key}: optimizer.momentum: {options.get('momentum') or 0}: must be above 0"]
        return faults

    @classmethod
    def method_faults(cls, settings: Mapping[str, Any], method: Method, given: Sequence[str]) -> List[str]:
        if method.predicts:
            return [f"method_args.{cls.key}: {method.name} is a weight prediction by itself"]
        if method.segments is not None:
            return [f"method_args.{cls.key}: not together with recompute, for which no paper defines it"]
        return []

    def measures(self, stage: int) -> bool:
        return self.form == "difference" and bool(self.horizons[FORWARD][stage])

    def accumulate(self, stage: StageState, step: Tensors) -> None:
        for p, value in zip(stage.parameters, step):
            if p.grad is not None or self.entry in stage.state[p]:
                stage.state[p][self.entry] = value

    def offset(self, stage: StageState, code: int, rate: float) -> Tuple[Optional[Tensors], float]:
        """x and c of w + c x."""
        horizon = float(self.horizons[code][stage.index])
        if self.form == "difference":
            return stage.entries(self.entry), horizon
        return stage.entries("momentum_buffer"), -rate * horizon


class CommonTimePrediction(WeightPrediction):
    """SpecTrain: stage s predicts the weights of the time at which the first stage's backward of that microbatch ends.

    From the backward that is s steps away (dataflow), s/2 updates (1F1B); the forward is the stage's lag D earlier still.
    """

    key, source = "", "Chen et al. 2018 (SpecTrain), in the form of Kosson et al. 2021"
    equation = "both passes read w - lr T v; T = s (backward), D + s (forward)"

    def __init__(self, lag: Floats, method: Method, accumulate: int) -> None:
        super().__init__({"form": "velocity", "scale": 1.0}, lag)
        steps = np.arange(len(lag)) / (1 if method.pipeline is Pipeline.DATAFLOW else 2)
        ahead = np.ceil(steps / accumulate) if len(lag) > 1 else np.zeros(1)
        self.horizons = {FORWARD: lag + ahead, BACKWARD: ahead}


class BlockRates(Rule):
    """The learning rate of each block times a factor of its own."""

    key, source = "block_rates", "each block its own (Laskin et al. 2020, section 3)"
    equation = "lr_i = f_i lr"

    def __init__(self, settings: Sequence[float], lag: Floats) -> None:
        super().__init__({}, lag)
        self._factors = np.asarray(settings, np.float64)

    def rates(self, rates: Floats, k: int) -> Floats:
        return rates * self._factors


RULES: Dict[str, Type[Rule]] = {
    rule.key: rule
    for rule in (GradientShrinking, Rescheduling, SpikeCompensation, DiscrepancyCorrection, WeightPrediction)
}


def faults(args: Mapping[str, Any], method: Method, kind: str, options: Mapping[str, Any]) -> List[str]:
    """Why the rules in `args` (method_args, resolved) cannot act together with this method and optimizer; empty if they can."""
    given = [key for key in RULES if args.get(key) is not None]
    found: List[str] = []
    for key in [*given, *(["warmup"] if args.get("warmup") is not None else [])]:
        if not method.is_stale:
            found.append(f"method_args.{key}: with {method.name} no gradient is stale: there is nothing for it to do")
    if found:
        return found
    for key in given:
        found += RULES[key].method_faults(args[key], method, given)
        found += RULES[key].optimizer_faults(args[key], kind, options)
    if method.predicts:
        form = {"form": "velocity", "scale": 1.0}
        found += [
            fault.replace("method_args.weight_prediction", "method").replace(": use form: difference", "")
            for fault in WeightPrediction.optimizer_faults(form, kind, options)
        ]
    return found


class UpdateRules:
    """All rules of a run over one optimizer. `rate`: learning rate of update k; `switch`: the first asynchronous update.

    Before the switch updates are plain ones and no accumulator moves.
    """

    def __init__(
        self,
        args: Mapping[str, Any],
        method: Method,
        lag: Floats,
        accumulate: int,
        optimizer: torch.optim.Optimizer,
        rate: Callable[[int], float],
        switch: int = 0,
    ) -> None:
        self._optimizer, self._rate, self.switch = optimizer, rate, switch
        by_stage: Dict[int, List[Dict[str, Any]]] = {}
        for group in optimizer.param_groups:
            by_stage.setdefault(group["stage"], []).append(group)
        self.stages = {index: StageState(index, groups, optimizer.state) for index, groups in by_stage.items()}
        self.rules = [RULES[key](args[key], lag) for key in RULES if args.get(key) is not None]
        if args.get("block_rates") is not None:
            self.rules.append(BlockRates(args["block_rates"], lag))
        self._every: List[int] = args.get("block_accumulation") or [1] * len(lag)
        self._corrects = any(isinstance(rule, DiscrepancyCorrection) for rule in self.rules)
        self._prediction: Optional[WeightPrediction] = next(
            (rule for rule in self.rules if isinstance(rule, WeightPrediction)), None
        )
        if method.predicts:
            self._prediction = CommonTimePrediction(lag, method, accumulate)
        self._codes = {
            code: np.where(self._prediction.horizons[code] != 0, code, PLAIN)
            if self._prediction
            else np.zeros(len(lag), int)
            for code in (FORWARD, BACKWARD)
        }
        self._count = len(lag)

    # --- reading

    def forward_codes(self, versions: IntArray) -> IntArray:
        """How the forwards that read `versions` (P,) or (P, n) correct them."""
        return np.where(versions >= self.switch, self._wide(FORWARD, versions), PLAIN)

    def backward_codes(self, versions: IntArray, forward: IntArray) -> IntArray:
        """How backwards (or recomputations) that read `versions` correct them, `forward` read by the forwards; same shapes."""
        if self._corrects:
            return np.where(versions >= self.switch, forward - versions, PLAIN)
        return np.where(versions >= self.switch, self._wide(BACKWARD, versions), PLAIN)

    def _wide(self, code: int, like: IntArray) -> IntArray:
        codes = self._codes[code]
        return codes if like.ndim == 1 else codes[:, None]

    def offset(self, stage: int, code: int, version: int) -> Tuple[Optional[Tensors], float]:
        """(x, c): the weights w of the *newest* version of a stage are corrected to w + c x; x None: nothing to correct yet."""
        state = self.stages[stage]
        if code < 0:
            return state.entries(DiscrepancyCorrection.entry), float(code)
        assert self._prediction is not None
        return self._prediction.offset(state, code, float(self.rates(version)[stage]))

    # --- updating

    def rates(self, k: int) -> Floats:
        """Learning rate (P,) of update k."""
        rates = np.full(self._count, self._rate(k))
        for rule in self.rules if k >= self.switch else ():
            rates = rule.rates(rates, k - self.switch)
        return rates

    def step(self, k: int, clip: Callable[[], None]) -> None:
        """Update k of every stage from the gradients at hand, which are then gone; those of blocks that gather more of them
        stay."""
        rules = self.rules if k >= self.switch else []
        gathering = self._gather(k)
        rates = self.rates(k)
        for group in self._optimizer.param_groups:
            group["lr"] = float(rates[group["stage"]])
        measured = {
            index: [p.detach().clone() for p in stage.parameters]
            for index, stage in self.stages.items()
            if any(rule.measures(index) for rule in rules)
        }
        with torch.no_grad():
            for rule in rules:
                for stage in self.stages.values():
                    rule.change_gradients(stage)
            clip()
            for rule in rules:
                for stage in self.stages.values():
                    rule.before_step(stage)
            self._optimizer.step()
            for rule in rules:
                for stage in self.stages.values():
                    rule.after_step(stage)
            for index, old in measured.items():
                stage = self.stages[index]
                step = list(torch._foreach_sub([p.detach() for p in stage.parameters], old))
                for rule in rules:
                    if rule.measures(index):
                        rule.accumulate(stage, step)
        self._optimizer.zero_grad(set_to_none=True)
        for p, gradient in gathering:
            p.grad = gradient

    def _gather(self, k: int) -> List[Tuple[torch.nn.Parameter, Optional[torch.Tensor]]]:
        """Take out the gradients of stages that do not step at update k; those that do get the mean of what they gathered."""
        taken: List[Tuple[torch.nn.Parameter, Optional[torch.Tensor]]] = []
        for index, stage in self.stages.items():
            every = self._every[index]
            if (k + 1) % every:
                taken += [(p, p.grad) for p in stage.parameters]
            elif every > 1:
                for p in stage.parameters:
                    if p.grad is not None:
                        p.grad /= every
        for p, _ in taken:
            p.grad = None
        return taken


def scaled_for_update_size(lr: float, momentum: float, reference: int, size: int) -> Tuple[float, float]:
    """(lr, momentum) for updates of `size` samples from those for `reference` samples: m = m_r^(N/N_r),
    lr = lr_r (1 - m) N / ((1 - m_r) N_r) (Chiley et al. 2019; Kosson et al. 2021, equation 9)."""
    scaled = momentum ** (size / reference) if momentum else 0.0
    return lr * (1 - scaled) * size / ((1 - momentum) * reference), scaled


def anneal_default(first_milestone: Optional[int], warmup: int, updates: int) -> int:
    """K where none is given, in updates: a quarter of the first constant phase of a step schedule, or 5 x the linear warm-up,
    or a quarter of the run (PipeMare, section 3.1)."""
    return max(first_milestone // 4 if first_milestone else 5 * warmup if warmup else math.ceil(updates / 4), 1)
