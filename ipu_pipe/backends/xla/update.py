"""One stage's optimizer and update rules as pure functions of arrays.

torch's optimizer on the host stays the owner of all settings: its groups get the settings of an
update, and its state gets the arrays' values for a checkpoint, under torch's names. The step itself
is one compiled function of weights, gradients, state and numbers. It follows the operations of
torch's optimizers one by one, so that in float64 both agree to the last digits.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Callable, Iterable, Mapping, NamedTuple, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import torch

from ipu_pipe.update.apply import StageState, UpdateRules
from ipu_pipe.update.optimizer import get_kind
from ipu_pipe.update.rules import (
    DELTA,
    LAST_STEP,
    STEP,
    VELOCITY,
    Rule,
    Setting,
    compute_discrepancy_decay,
    compute_spike_coefficients,
)

Arrays = Sequence[Any]
# the rules whose functions are here, and those that change only rates or corrections of reads
RULES = (
    "gradient_shrinking",
    "t1",
    "spike_compensation",
    "t2",
    "weight_prediction",
    "spectrain",
)
KINDS = ("sgd", "adam", "adamw")
# settings of an optimizer that its functions here do not know
UNSUPPORTED_SETTINGS = ("amsgrad", "maximize", "fused", "capturable", "differentiable")


def list_unsupported(groups: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return a fault for each setting of parameter groups that has no function of arrays."""
    faults = [
        f"optimizer.{key}: xla does not support it"
        for group in groups
        for key in UNSUPPORTED_SETTINGS
        if group.get(key)
    ]
    return list(dict.fromkeys(faults))


class Options(NamedTuple):
    """What a compiled step depends on, for one parameter."""

    kind: str
    has_momentum: bool
    nesterov: bool
    decays: bool


class Numbers(NamedTuple):
    """The numbers of one parameter's step; those of Adam after its bias correction.

    `kept`: what is kept of the velocity, 0 in the first step, which has no dampening either.
    """

    lr: float
    weight_decay: float
    momentum: float = 0.0
    kept: float = 0.0
    dampening: float = 0.0
    beta1: float = 0.0
    beta2: float = 0.0
    eps: float = 0.0
    step_size: float = 0.0
    root: float = 1.0
    # factors of the rules: of the gradient, of velocity and gradient in the step, of delta
    shrinkage: float = 1.0
    of_velocity: float = 0.0
    of_gradient: float = 0.0
    gamma: float = 0.0


def _step_sgd(options: Options, n: Numbers, w: Any, g: Any, state: dict[str, Any]) -> Any:
    """Step as torch.optim.SGD; v <- m v + (1 - dampening) g, w <- w - lr v."""
    d = g + n.weight_decay * w if options.decays else g
    gradient = d
    # without momentum the gradient stands for the velocity
    velocity = d
    if options.has_momentum:
        # a schedule may give a momentum to an optimizer that began without
        old = state.get(VELOCITY, jnp.zeros_like(w))
        velocity = n.kept * old + (1 - n.dampening) * d
        state[VELOCITY] = velocity
        d = d + n.momentum * velocity if options.nesterov else velocity
    return w - n.lr * d, velocity, gradient


def _step_adam(options: Options, n: Numbers, w: Any, g: Any, state: dict[str, Any]) -> Any:
    """Step as torch.optim.Adam and AdamW, whose weight decay does not pass through the moments."""
    if options.decays and options.kind == "adamw":
        w = w * (1 - n.lr * n.weight_decay)
    elif options.decays:
        g = g + n.weight_decay * w
    mean, square = state["exp_avg"], state["exp_avg_sq"]
    # as torch's lerp_, which rounds differently from beta1 * mean + (1 - beta1) * g
    mean = mean + (1 - n.beta1) * (g - mean)
    square = n.beta2 * square + (1 - n.beta2) * g * g
    state.update(exp_avg=mean, exp_avg_sq=square)
    # as in torch, eps is added after the root is corrected
    return w - n.step_size * (mean / (jnp.sqrt(square) / n.root + n.eps)), mean, g


# what chooses operations is static; the numbers change with the update, and would each compile anew
@partial(jax.jit, static_argnums=(0, 1))
def step_stage(
    options: tuple[Options, ...],
    rules: tuple[str, ...],
    numbers: Any,
    weights: Arrays,
    gradients: Arrays,
    states: Sequence[Mapping[str, Any]],
) -> tuple[list[Any], list[dict[str, Any]]]:
    """Step all parameters of a stage; return their new weights and states. `numbers`: a row each."""
    new_weights = []
    new_states = []
    for option, row, w, g, old in zip(options, numbers, weights, gradients, states):
        # the row has the widest type of the stage, which would widen narrower weights
        n = Numbers(*row.astype(w.dtype))
        # a copy: the function is traced, and must not change its arguments
        state = dict(old)
        g = g * n.shrinkage if "gradient_shrinking" in rules else g
        step = _step_sgd if option.kind == "sgd" else _step_adam
        new, velocity, gradient = step(option, n, w, g, state)
        if "spike_compensation" in rules:
            new = new + n.of_velocity * velocity + n.of_gradient * gradient
        if "t2" in rules:
            # T2's moving average of the steps, by the whole step with what the rules have added
            state[DELTA] = n.gamma * state[DELTA] + (1 - n.gamma) * (new - w)
        if LAST_STEP in rules:
            state[LAST_STEP] = new - w
        new_weights.append(new)
        new_states.append(state)
    return new_weights, new_states


@jax.jit
def _correct(weights: Arrays, entries: Arrays, factors: Arrays) -> list[Any]:
    return [w + c * x for w, x, c in zip(weights, entries, factors)]


class StageOptimizer:
    """The optimizer of one stage's weights, in the order of `names`, with the state on `device`.

    `host`: the stage's groups in torch's optimizer; `parameters`: its parameters. `counts`: steps
    so far by weight, for Adam.
    """

    def __init__(
        self,
        rules: UpdateRules,
        stage: int,
        parameters: Sequence[torch.nn.Parameter],
        put: Callable[[Any], Any],
    ) -> None:
        self._rules = rules
        self._stage = stage
        self._put = put
        self._parameters = list(parameters)
        self._host: StageState | None = rules.stages.get(stage)
        self._acting: list[tuple[Rule, Setting]] = rules.list_acting(stage)
        groups = [] if self._host is None else zip(self._host.groups, self._host.kinds)
        group_of = {id(p): pair for pair in groups for p in pair[0]["params"]}
        # a parameter in no group is never changed
        self.stepped = [i for i, p in enumerate(parameters) if id(p) in group_of]
        self._groups = [group_of[id(parameters[i])] for i in self.stepped]
        self.counts = [0] * len(self.stepped)
        # until a velocity is loaded or made
        self._is_first = [True] * len(self.stepped)
        self._newest = 0
        # the numbers of the newest step, as rows and as an array on the device
        self._rows: list[Numbers] = []
        self._numbers: Any = None
        self.states: list[dict[str, Any]] = []
        self.load()

    @property
    def corrects_reads(self) -> bool:
        """Whether a rule may correct the weights that a pass reads."""
        return any(rule.read is not None for rule, _ in self._acting)

    def load(self) -> None:
        """Take the state that torch's optimizer has, or begin without one."""
        self.states = []
        for i, (number, (group, kind)) in enumerate(zip(self.stepped, self._groups)):
            p = self._parameters[number]
            host = dict(self._rules.optimizer.state.get(p, {}))
            # torch keeps it as a tensor in the state; here the host counts
            self.counts[i] = int(host.pop("step", 0))
            names = list(self._rules.list_entries(self._stage))
            if kind != "sgd":
                names += ["exp_avg", "exp_avg_sq"]
            elif group.get("momentum"):
                names.append(VELOCITY)
            # a state without a velocity is that of an optimizer that has not stepped with momentum
            self._is_first[i] = VELOCITY not in host
            zeros = {name: torch.zeros_like(p) for name in names}
            # older versions of SGD store None for no velocity
            tensors = {**zeros, **{k: v for k, v in host.items() if v is not None}}
            self.states.append({k: self._put(v.detach().numpy()) for k, v in tensors.items()})

    def export(self, is_started: bool) -> None:
        """Give torch's optimizer the state, under its own names. `is_started`: an update was
        made.
        """
        # torch's optimizer, too, has no state before its first step
        if not is_started:
            return
        state = self._rules.optimizer.state
        for number, count, arrays, (_, kind) in zip(
            self.stepped, self.counts, self.states, self._groups
        ):
            # copies, because a jax array's memory is read-only
            tensors = {k: torch.from_numpy(np.array(v)) for k, v in arrays.items()}
            if kind != "sgd":
                tensors = {"step": torch.tensor(float(count)), **tensors}
            state[self._parameters[number]] = tensors

    def step(self, k: int, weights: Arrays, gradients: Arrays) -> list[Any]:
        """Return the weights after update k; `gradients`: of the stepped weights."""
        if self._host is None or not self.stepped:
            return list(weights)
        rows = self.list_numbers(k)
        stepped = [weights[i] for i in self.stepped]
        # settings that do not change are copied to the device once
        if rows != self._rows:
            self._rows = rows
            self._numbers = self._put(np.array(rows, self.dtype))
        new, self.states = step_stage(
            self.options, self.list_rules(k), self._numbers, stepped, gradients, self.states
        )
        self.count_step()
        by_number = dict(zip(self.stepped, new))
        return [by_number.get(i, w) for i, w in enumerate(weights)]

    @property
    def dtype(self) -> Any:
        """The dtype of an update's numbers, the widest of the stepped weights'."""
        dtypes = [self._parameters[i].detach().numpy().dtype for i in self.stepped]
        return np.result_type(*dtypes) if dtypes else np.dtype(np.float64)

    def list_corrections(self, code: int, version: int) -> dict[str, list[float]]:
        """Return what a correction adds to the weights of a version: entry of the state -> factor
        of each stepped weight.
        """
        corrections = self._rules.list_corrections(self._stage, code, version)
        parameters = [self._parameters[i] for i in self.stepped]
        return {entry: [factors[id(p)] for p in parameters] for entry, factors in corrections}

    def count_step(self) -> None:
        """Note that all weights have made a step."""
        self.counts = [count + 1 for count in self.counts]
        # without a momentum a step makes no velocity
        self._is_first = [
            is_first and not group.get("momentum")
            for is_first, (group, _) in zip(self._is_first, self._groups)
        ]

    @property
    def options(self) -> tuple[Options, ...]:
        """The options of each stepped weight."""
        # most weights of a stage share a group
        by_group = {
            id(group): Options(
                get_kind(self._rules.optimizer, group),
                bool(group.get("momentum")),
                bool(group.get("nesterov")),
                bool(group.get("weight_decay")),
            )
            for group in {id(group): group for group, _ in self._groups}.values()
        }
        return tuple(by_group[id(group)] for group, _ in self._groups)

    def list_rules(self, k: int) -> tuple[str, ...]:
        """List the rules that act on update k, with the state that they follow."""
        if k < self._rules.switch:
            return ()
        followed = any(LAST_STEP in rule.state(s) for rule, s in self._acting if rule.state)
        return (*(rule.key for rule, _ in self._acting), *([LAST_STEP] if followed else []))

    def list_numbers(self, k: int) -> list[Numbers]:
        """List the numbers of update k of each stepped weight."""
        assert self._host is not None
        # into the host's groups, from which the numbers are read
        self._rules.apply_settings(self._host, k)
        acting = self._acting if k >= self._rules.switch else []
        # those of a group differ only by the steps of their weights so far
        computed: dict[tuple[int, int, bool], Numbers] = {}
        places = [
            (id(group), count, is_first)
            for (group, _), count, is_first in zip(self._groups, self.counts, self._is_first)
        ]
        for i, (place, (group, kind)) in enumerate(zip(places, self._groups)):
            if place not in computed:
                computed[place] = self._compute_numbers(i, group, kind, acting)
        return [computed[place] for place in places]

    def _compute_numbers(
        self,
        i: int,
        group: Mapping[str, Any],
        kind: str,
        acting: Sequence[tuple[Rule, Setting]],
    ) -> Numbers:
        lr = float(group["lr"])
        momentum = float(group.get("momentum", 0))
        numbers = Numbers(lr, float(group.get("weight_decay", 0)), momentum)
        if kind != "sgd":
            beta1, beta2 = group["betas"]
            count = self.counts[i] + 1
            numbers = numbers._replace(
                beta1=float(beta1),
                beta2=float(beta2),
                eps=float(group["eps"]),
                # in Python's floats, as torch computes it
                step_size=lr / (1 - beta1**count),
                root=(1 - beta2**count) ** 0.5,
            )
        # torch's SGD begins with the gradient itself as its velocity, without dampening
        elif not self._is_first[i]:
            numbers = numbers._replace(kept=momentum, dampening=float(group.get("dampening", 0)))
        for rule, setting in acting:
            if rule.key == "gradient_shrinking":
                numbers = numbers._replace(shrinkage=setting.values["factor"] ** setting.lag)
            elif rule.key == "spike_compensation":
                a, b = compute_spike_coefficients(setting, momentum)
                numbers = numbers._replace(of_velocity=lr * (1 - a), of_gradient=-lr * b)
            elif rule.key == "t2":
                numbers = numbers._replace(gamma=compute_discrepancy_decay(setting))
        return numbers

    def correct(
        self, version: int, code: int, weights: Arrays, states: Sequence[Mapping[str, Any]]
    ) -> list[Any]:
        """Return the weights of a version as a rule corrects them for a pass; `states`: the state
        of that version.
        """
        by_number = {number: weights[number] for number in self.stepped}
        for entry, factors in self._rules.list_corrections(self._stage, code, version):
            entries = {
                number: self._get_entry(entry, i, state, version)
                for i, (number, state) in enumerate(zip(self.stepped, states))
            }
            # before its first step a weight has no step to predict by
            entries = {number: x for number, x in entries.items() if x is not None}
            values = [by_number[number] for number in entries]
            # of the weight's dtype: a wider factor would widen the weight
            scales = [
                np.asarray(factors[id(self._parameters[number])], by_number[number].dtype)
                for number in entries
            ]
            by_number.update(zip(entries, _correct(values, list(entries.values()), scales)))
        return [by_number.get(i, w) for i, w in enumerate(weights)]

    def _get_entry(self, entry: str, i: int, state: Mapping[str, Any], version: int) -> Any:
        """Return an entry of a weight's state at a version; `STEP` is computed; None if there is
        none.
        """
        group, kind = self._groups[i]
        # SGD's step is its velocity; Adam's is computed from its moments
        if entry != STEP or kind == "sgd":
            return state.get(VELOCITY if entry == STEP else entry)
        # the steps of this weight when the version was the newest
        count = self.counts[i] - (self._newest - version)
        if count < 1:
            return None
        beta1, beta2 = group["betas"]
        root = jnp.sqrt(state["exp_avg_sq"] / (1 - beta2**count))
        return (state["exp_avg"] / (1 - beta1**count)) / (root + group["eps"])

    def count_version(self, version: int) -> None:
        """Note the newest version of the weights."""
        self._newest = version

    def count_bytes(self) -> int:
        """Count the bytes of the state, with the step counts that a checkpoint has."""
        arrays = sum(a.nbytes for state in self.states for a in state.values())
        # torch stores a count as a float32
        counts = 4 * sum(kind != "sgd" for _, kind in self._groups)
        return arrays + counts
