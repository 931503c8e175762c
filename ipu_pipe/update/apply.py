"""Apply the update rules of a run (`update.rules`) over one torch.optim optimizer.

    compute_corrections   before a pass: what to add to the weights that it reads
    compensate            around a backward: change the gradients of one microbatch
    step                  an update: change gradients, clip, step the optimizer, change the step, move the rules' state

`StageState` gives rules a stage's parameters and their entries in the optimizer's state.
"""

from __future__ import annotations

import collections
import contextlib
from dataclasses import dataclass
from typing import Any, Callable, Iterable, Iterator, Mapping, NamedTuple, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from ipu_pipe.schedule.methods import Method
from ipu_pipe.schedule.table import IntArray
from ipu_pipe.update.optimizer import (
    RecordedSettings,
    copy_group,
    copy_setting,
    get_kind,
    list_parts,
    show_groups,
)
from ipu_pipe.update.rules import (
    BY_RATE,
    DIRECTIONS,
    STEP,
    Follow,
    Move,
    Reading,
    Rule,
    Setting,
    Step,
    Tensors,
    select_rules,
)

Floats = NDArray[np.float64]

# codes of the correction of a version; -n: the correction of a rule with `reads_lag` for a backward
# of lag n
PLAIN = 0
FORWARD = 1
BACKWARD = 2


@dataclass
class StageState:
    """A stage's groups in the optimizer, with the trained parameters.

    `state`: the optimizer's `state`; `shares`: the ratio of each group's learning rate to the
    schedule's; `kinds`: the kind of each group's optimizer.
    """

    index: int
    groups: list[dict[str, Any]]
    state: Any
    shares: list[float]
    kinds: list[str]

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """The parameters of all groups, in order."""
        return [p for group in self.groups for p in group["params"]]

    def get_entry(self, name: str) -> Tensors | None:
        """Return the entry `name` of the optimizer's state for each parameter, None if no parameter
        has it yet.

        It is 0 for a parameter that has had no gradient. `STEP` is computed from the state.
        """
        if name == STEP:
            kinds = zip(self.groups, self.kinds)
            values = [
                self._compute_direction(p, group, kind)
                for group, kind in kinds
                for p in group["params"]
            ]
        else:
            values = [self.state[p].get(name) if p in self.state else None for p in self.parameters]
        if all(value is None for value in values):
            return None
        return [
            torch.zeros_like(p) if value is None else value
            for p, value in zip(self.parameters, values)
        ]

    def _compute_direction(
        self, p: torch.nn.Parameter, group: Mapping[str, Any], kind: str
    ) -> torch.Tensor | None:
        entry, compute = DIRECTIONS[kind]
        # before its first step a parameter has no direction
        return compute(group, self.state[p]) if p in self.state and entry in self.state[p] else None

    def scale_by_group(self, tensors: Tensors, factors: Sequence[float]) -> Tensors:
        """Multiply tensors, one for each parameter, by the factor of the parameter's group."""
        # most runs have one rate for all groups: no product, which would be a copy
        if all(factor == 1 for factor in factors):
            return tensors
        by_parameter = [
            factor for group, factor in zip(self.groups, factors) for _ in group["params"]
        ]
        return [x * factor for x, factor in zip(tensors, by_parameter)]


# the entry of the optimizer's state with the moving average of a parameter
AVERAGE = "ema"

# (update, parameter group of the optimizer) -> the group's settings for that update
GroupSettings = Callable[[int, Mapping[str, Any]], Mapping[str, Any]]


class _SteppedGroup(NamedTuple):
    """The parameters of one group that have a gradient in an update, and their gradients with
    weight decay added.
    """

    stage: StageState
    group: Mapping[str, Any]
    parameters: list[torch.nn.Parameter]
    gradients: Tensors


class ChosenRules(NamedTuple):
    """The rules of a run: each rule with its setting for each stage, in order.

    `batches_per_step`: the batches that each stage accumulates before its optimizer steps.
    """

    rules: list[tuple[Rule, list[Setting]]]
    batches_per_step: list[int]


def choose_rules(
    args: Mapping[str, Any], method: Method, lag: Floats, accumulate: int
) -> ChosenRules:
    """Return the rules that act with these method_args (resolved).

    `lag` (P,): the mean delay of each stage's gradients in updates; `accumulate`: the microbatches
    of an update.
    """
    lags = lag.tolist()
    rules = [
        (rule, [Setting(values, s, x, method, accumulate) for s, x in enumerate(lags)])
        for rule, values in select_rules(args, method)
    ]
    return ChosenRules(rules, args.get("block_accumulation") or [1] * len(lags))


class UpdateRules:
    """All rules of a run over one optimizer.

    `rate(k)`: the learning rate of update k. `switch`: the first asynchronous update; earlier
    updates are plain, and no state of a rule changes. `masters`: the master copies (`Masters`) or shards (`Shards`), if the
    optimizer's parameters are master copies of a model's weights. `base`: the rate of which each
    parameter group's rate is a share. `decay`: the decay of a moving average of the weights in the
    optimizer's state, None for no average. `settings(k, group)`: the settings of a parameter group
    for update k, with its learning rate `lr` before the group's share and the rules; by default
    `rate(k)` alone.
    """

    def __init__(
        self,
        chosen: ChosenRules,
        optimizer: torch.optim.Optimizer,
        rate: Callable[[int], float],
        switch: int = 0,
        masters: Any = None,
        base: float | None = None,
        decay: float | None = None,
        settings: GroupSettings | None = None,
    ) -> None:
        self._settings: GroupSettings = settings or (lambda k, group: {"lr": rate(k)})
        self.decay = decay
        self.optimizer = optimizer
        self._rate = rate
        self.switch = switch
        self.stages = _group_by_stage(optimizer, base)
        trained = [p for stage in self.stages.values() for p in stage.parameters]
        self.masters = masters
        self.weight_master_pairs = masters.list_pairs(trained) if masters is not None else []
        self._rules = chosen.rules
        # the rules that act on the stages of this process
        self._active = [
            (stage, rule, settings[stage.index])
            for rule, settings in self._rules
            for stage in self.stages.values()
            if rule.acts_on(settings[stage.index])
        ]
        # the active rules with entries of the optimizer's state that move with an update
        states = [
            (stage, rule, rule.state(setting))
            for stage, rule, setting in self._active
            if rule.state is not None
        ]
        # None: `compensate` changes the entry, not the step
        self._tracked = [entry for entry in states if any(entry[2].values())]
        # called with each update and its stages at its beginning: after rules' `compensate`, before
        # clipping and their `gradient`
        self.observe: Callable[[int, Sequence[int]], None] | None = None
        # called after a step with a group that the optimizer may have written into, and its
        # settings before the step
        self.after_step: Callable[[Mapping[str, Any], Mapping[str, Any]], None] | None = None
        # called when these stages have made an update: (update, stages, averaged); of replicas with
        # weights of their own each calls it, and `averaged` once more after their average
        self.after_update: Callable[[int, Sequence[int], bool], None] = lambda *call: None
        # the changes that were written into a group last, by its id
        self._written: dict[int, Mapping[str, int]] = {}
        # entries that `compensate` changes with each microbatch
        self._compensated: dict[tuple[torch.nn.Parameter, str], torch.Tensor] = {}
        self.batches_per_step = chosen.batches_per_step
        # whether `compensate` does more than `collect`
        self.compensates = any(rule.compensate is not None for rule, _ in self._rules)
        self._stage_count = len(chosen.batches_per_step)
        self._reads_lag = any(rule.read is not None and rule.reads_lag for rule, _ in self._rules)
        self._codes = {code: self._encode_stages(code) for code in (FORWARD, BACKWARD)}

    def list_entries(self, stage: int) -> list[str]:
        """List the names of the state that rules keep for each parameter of the stage beside the
        optimizer's own.
        """
        return [
            name
            for rule, setting in self.list_acting(stage)
            if rule.state is not None
            for name in rule.state(setting)
        ]

    def list_acting(self, stage: int) -> list[tuple[Rule, Setting]]:
        """List the rules that act on a stage, with their settings."""
        return [
            (rule, settings[stage])
            for rule, settings in self._rules
            if rule.acts_on(settings[stage])
        ]

    # ---- corrections of the weights that passes read

    def _encode_stages(self, code: int) -> IntArray:
        """Return for each stage (P,) `code` if a rule corrects the weights that such a pass reads,
        else PLAIN.
        """
        # any rate but 0 tells whether a rule corrects
        reading = Reading(code == FORWARD, rate=1.0)
        corrects = [
            any(c for _, c in self._read(stage, reading)) for stage in range(self._stage_count)
        ]
        return np.where(corrects, code, PLAIN)

    def _read(self, stage: int, reading: Reading) -> list[tuple[str, float]]:
        """List the (entry, c) pairs of a stage's rules: of rules with `reads_lag` if `reading` has
        a lag, else of the others.
        """
        return [
            pair
            for rule, setting in self.list_acting(stage)
            if rule.read is not None and rule.reads_lag == bool(reading.lag)
            for pair in rule.read(setting, reading)
        ]

    def encode_forwards(self, versions: IntArray) -> IntArray:
        """Return the code of the correction for each forward that reads `versions`, (P,) or (P,
        n).
        """
        # versions of before the switch were made without rules, and are read as they are
        return np.where(versions >= self.switch, self._broadcast_code(FORWARD, versions), PLAIN)

    def encode_backwards(self, versions: IntArray, forward: IntArray) -> IntArray:
        """Return the code of the correction for each backward or recomputation; `forward`: the
        versions of the forwards.
        """
        if self._reads_lag:
            return np.where(versions >= self.switch, forward - versions, PLAIN)
        return np.where(versions >= self.switch, self._broadcast_code(BACKWARD, versions), PLAIN)

    def _broadcast_code(self, code: int, like: IntArray) -> IntArray:
        codes = self._codes[code]
        return codes if like.ndim == 1 else codes[:, None]

    def _list_reads(
        self, stage: int, code: int, version: int
    ) -> tuple[list[tuple[str, float]], list[float]]:
        """List (entry, c) pairs of a pass that reads a stage's version, and the share of each
        group's learning rate in corrections by it.
        """
        state = self.stages[stage]
        rates = [float(self._settings(version, group)["lr"]) for group in state.groups]
        # the rules are asked for one rate, of which each group's is a multiple
        reference = next(filter(None, rates), 0.0)
        shares = [
            share * (rate / reference if reference else 1.0)
            for rate, share in zip(rates, state.shares)
        ]
        rate = self._stage_rate(stage, version, reference)
        return self._read(stage, Reading(code == FORWARD, max(-code, 0), rate)), shares

    def list_corrections(
        self, stage: int, code: int, version: int
    ) -> list[tuple[str, dict[int, float]]]:
        """List (entry, factors) pairs that correct the weights w of a stage's version to w + the
        sum of factor times entry; `factors`: of each parameter, by its id.
        """
        pairs, shares = self._list_reads(stage, code, version)
        groups = list(zip(self.stages[stage].groups, shares))
        return [
            (
                entry,
                {
                    id(p): c * share if entry in BY_RATE else c
                    for group, share in groups
                    for p in group["params"]
                },
            )
            for entry, c in pairs
            if c
        ]

    def compute_corrections(
        self, stage: int, code: int, version: int
    ) -> list[tuple[Tensors, float]]:
        """Return (x, c) pairs that correct the weights w of a stage's *newest* version to w + the
        sum of c x; may be empty.
        """
        state = self.stages[stage]
        pairs, shares = self._list_reads(stage, code, version)
        corrections: list[tuple[Tensors, float]] = []
        for entry, c in pairs:
            x = state.get_entry(entry) if c else None
            if x is not None:
                corrections.append((state.scale_by_group(x, shares) if entry in BY_RATE else x, c))
        return corrections

    # ---- gradients of a microbatch

    @contextlib.contextmanager
    def compensate(
        self, k: int, stages: Sequence[int], compute_age: Callable[[int], Tensors | None]
    ) -> Iterator[None]:
        """Correct the gradients of the backward inside the context before they are added to the
        earlier ones of update k.

        `stages`: the stages of the backward. `compute_age(stage)`: the newest weights minus the
        weights that the microbatch read, None if equal.
        """
        active = self._active if k >= self.switch else []
        acting = [
            (stage, rule, setting)
            for stage, rule, setting in active
            if rule.compensate is not None and stage.index in stages
        ]
        # a backward adds to `grad`, but a rule may change the new part alone
        earlier = _take_gradients([stage for stage, _, _ in acting])
        yield
        self.collect()
        for stage, rule, setting in acting:
            assert rule.compensate is not None
            indices = [i for i, p in enumerate(stage.parameters) if p.grad is not None]
            parameters = [stage.parameters[i] for i in indices]
            follows = rule.state(setting) if rule.state is not None else {}
            entries = {
                name: [self._get_entry(stage, p, name, follow is None) for p in parameters]
                for name, follow in follows.items()
            }
            age = compute_age(stage.index)
            # bfloat16 weights have float32 masters, whose gradients these are
            ages = (
                None if age is None else [age[i].to(p.dtype) for i, p in zip(indices, parameters)]
            )
            if parameters:
                rule.compensate(
                    setting, [p.grad for p in parameters if p.grad is not None], ages, entries
                )
        for p, gradient in earlier:
            p.grad = gradient if p.grad is None else gradient + p.grad

    def _get_entry(
        self, stage: StageState, p: torch.nn.Parameter, name: str, changes: bool
    ) -> torch.Tensor:
        """Return a rule's entry. One that microbatches change (`changes`) joins the state after the
        optimizer's first step, which needs it empty.
        """
        if (p, name) in self._compensated:
            return self._compensated[p, name]
        entry = stage.state[p].get(name) if p in stage.state else None
        value: torch.Tensor = torch.zeros_like(p) if entry is None else entry
        if changes:
            self._compensated[p, name] = value
        return value

    def forget_compensated(self) -> None:
        """Forget the entries that microbatches change: the optimizer has another state now."""
        self._compensated.clear()

    # ---- updates

    def collect(self) -> None:
        """Move the gradients of weights to their master copies after a backward."""
        if self.weight_master_pairs:
            self.masters.collect_gradients(self.weight_master_pairs)

    def rates(self, k: int) -> Floats:
        """Return the learning rates (P,) of update k."""
        base = float(self._rate(k))
        return np.array([self._stage_rate(stage, k, base) for stage in range(self._stage_count)])

    def get_settings(self, k: int, group: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings of a parameter group for update k, with the learning rate `lr` that
        the rules make of it.
        """
        settings = dict(self._settings(k, group))
        settings["lr"] = float(self._stage_rate(group["stage"], k, float(settings["lr"])))
        return settings

    def list_settings(self, k: int) -> list[Any]:
        """List what the steps of update k take from its settings: those of each group of the
        caller's, and the stages' rates if rules make them.
        """
        groups = {
            group.get("member"): group for stage in self.stages.values() for group in stage.groups
        }
        settings = [dict(self._settings(k, group)) for group in groups.values()]
        makes_rates = any(rule.rate is not None for rule, _ in self._rules)
        return [settings, self.rates(k).tolist() if makes_rates else []]

    def _stage_rate(self, stage: int, k: int, rate: float) -> float:
        """Return the learning rate of one stage; `rate`: the schedule's."""
        for rule, settings in self._rules if k >= self.switch else ():
            rate = (
                rule.rate(settings[stage], rate, k - self.switch) if rule.rate is not None else rate
            )
        return rate

    def step(
        self, k: int, clip: Callable[[int], None] | None, stages: Sequence[int] | None = None
    ) -> None:
        """Carry out update k of these stages (all if None) from their gradients, and delete the
        gradients.

        `clip(k)` clips them, None for no clipping. Gradients of other stages, and of blocks that
        accumulate several batches, stay. Steps [2] to [5] carry out the rules (`update.rules`).
        """
        if self.observe is not None:
            self.observe(k, list(self.stages) if stages is None else stages)
        active = self._active if k >= self.switch else []
        others: list[StageState] = []
        if stages is not None:
            active = [
                (stage, rule, setting) for stage, rule, setting in active if stage.index in stages
            ]
            others = [stage for stage in self.stages.values() if stage.index not in stages]
        # [1] take away the gradients that stay, because the optimizer steps all that it finds
        other_gradients = _take_gradients(others) if others else []
        if max(self.batches_per_step) > 1:
            other_gradients += _take_incomplete(self.stages.values(), self.batches_per_step, k)
        # [2] the settings of this update; stages that step later may have others
        for stage in self.stages.values():
            if stage not in others:
                self.apply_settings(stage, k)
        # blocks that accumulate step after their last batch
        stepping = [
            stage
            for stage in self.stages.values()
            if stage not in others and (k + 1) % self.batches_per_step[stage.index] == 0
        ]
        tracking = [entry for entry in self._tracked if k >= self.switch and entry[0] not in others]
        before = {
            stage.index: [p.detach().clone() for p in stage.parameters] for stage, _, _ in tracking
        }
        # before the step: the average of a weight that did not move so far is the weight of now
        averages = self._begin_averages(others) if self.decay is not None else {}
        with torch.no_grad():
            # [3] gradients
            for stage, rule, setting in active:
                if rule.gradient is not None:
                    _change_gradients(rule.gradient, setting, stage)
            if clip is not None:
                clip(k)
            # [4] the step; weight decay in the gradients of rules reads the weights before it
            changing = [
                (rule.step, setting, _list_stepped_groups(stage))
                for stage, rule, setting in active
                if rule.step is not None
            ]
            with _delay_hooks(self.optimizer) if changing else contextlib.nullcontext():
                self._step_optimizer(stepping)
                # the optimizer's own steps, before the additions of rules
                steps = {s: _compute_step(self.stages[s], old) for s, old in before.items()}
                for change, setting, groups in changing:
                    for stepped in groups:
                        _change_step(change, setting, stepped, steps.get(stepped.stage.index))
            # [5] the state of rules
            for stage, rule, entries in tracking:
                # without additions the step is the optimizer's own
                ignores_changes = rule.follows_optimizer or not changing
                step = (
                    steps[stage.index]
                    if ignores_changes
                    else _compute_step(stage, before[stage.index])
                )
                _move_entries(stage, entries, step)
        for (p, name), entry in self._compensated.items():
            # SGD without momentum makes no state of its own
            if p in self.optimizer.state or p.grad is not None:
                self.optimizer.state[p][name] = entry
        # [6] averages, rounded weights, and the gradients that stay
        if self.decay is not None:
            self._move_averages(k, averages)
        if self.weight_master_pairs:
            unchanged = {id(p) for stage in others for p in stage.parameters}
            self.masters.write_weights(
                [pair for pair in self.weight_master_pairs if id(pair[1]) not in unchanged]
            )
        # None, because an optimizer steps a parameter whose gradient is zero
        self.optimizer.zero_grad(set_to_none=True)
        for p, gradient in other_gradients:
            p.grad = gradient

    def _step_optimizer(self, stages: Sequence[StageState]) -> None:
        """Step the optimizer, of which `stages` have gradients, and pass on what it has written into
        their groups.
        """
        if self.after_step is None:
            self.optimizer.step()
            return
        groups = [group for stage in stages for group in stage.groups]
        if not groups:
            return
        before = [copy_group(group) for group in groups]
        # one that counts its steps in its groups must not count those of other stages
        with show_groups(self.optimizer, groups):
            self.optimizer.step()
        for group, settings in zip(groups, before):
            self.after_step(group, settings)

    def apply_settings(self, stage: StageState, k: int) -> None:
        """Write the settings of update k, and the learning rate that the rules make of it, into a
        stage's groups.

        A recorded setting that the caller has not changed since is not written again: the optimizer
        may have changed it in its group.
        """
        for group, share in zip(stage.groups, stage.shares):
            settings = self._settings(k, group)
            if isinstance(settings, RecordedSettings):
                written = self._written.get(id(group), {})
                for key, change in settings.changes.items():
                    if written.get(key) != change:
                        group[key] = copy_setting(settings[key])
                self._written[id(group)] = settings.changes
            else:
                group.update(settings)
            # after the other settings, which have the rate before the rules
            group["lr"] = float(self._stage_rate(stage.index, k, float(settings["lr"]))) * share

    # ---- the moving average of the weights, as in torch.optim.swa_utils.AveragedModel

    def _begin_averages(
        self, others: Sequence[StageState]
    ) -> dict[torch.nn.Parameter, torch.Tensor]:
        """Return the average so far of each parameter that has had a gradient, except of the stages
        `others`.

        A parameter without any gradient has not moved and must get no state, because optimizers
        initialize it when it has none.
        """
        averages: dict[torch.nn.Parameter, torch.Tensor] = {}
        for stage in self.stages.values():
            for p in stage.parameters if stage not in others else ():
                average = stage.state[p].get(AVERAGE) if p in stage.state else None
                if average is not None or p.grad is not None:
                    averages[p] = p.detach().clone() if average is None else average
        return averages

    def _move_averages(self, k: int, averages: Mapping[torch.nn.Parameter, torch.Tensor]) -> None:
        """Move the averages towards the weights after update k; the first update's weights are the
        first average.
        """
        assert self.decay is not None
        for p, average in averages.items():
            # one parameter at a time, so that the same kernel runs on every backend
            self.optimizer.state[p][AVERAGE] = (
                average.copy_(p.detach()) if k == 0 else average.lerp_(p.detach(), 1 - self.decay)
            )

    @contextlib.contextmanager
    def hold_averages(self) -> Iterator[None]:
        """Put the averages of the weights into the model inside the context; without averages leave
        the newest weights.
        """
        # averages are of the masters, and passes read the weights
        weights: dict[torch.Tensor, torch.Tensor] = {
            master: weight for weight, master in self.weight_master_pairs
        }
        entries = [] if self.decay is None else list(self.optimizer.state.items())
        averages = [
            (weights.get(p, p), state[AVERAGE])
            for p, state in entries
            # what an optimizer keeps for itself has a key of its own
            if isinstance(p, torch.Tensor) and AVERAGE in state
        ]
        newest = [weight.data for weight, _ in averages]
        try:
            for weight, average in averages:
                # the averages of masters are float32
                weight.data = average.to(weight.dtype)
            yield
        finally:
            for (weight, _), value in zip(averages, newest):
                weight.data = value


def _group_by_stage(optimizer: torch.optim.Optimizer, base: float | None) -> dict[int, StageState]:
    """Return the stages of the optimizer's parameter groups."""
    stages: dict[int, StageState] = {}
    for group in optimizer.param_groups:
        stage = stages.setdefault(
            group["stage"], StageState(group["stage"], [], optimizer.state, [], [])
        )
        stage.groups.append(group)
        # without `base` each group's settings have a rate of their own
        stage.shares.append(group["lr"] / base if base else 1.0)
        stage.kinds.append(get_kind(optimizer, group))
    return stages


def _take_gradients(stages: Iterable[StageState]) -> list[tuple[torch.nn.Parameter, torch.Tensor]]:
    """Remove the gradients of stages and return them, because no optimizer steps a parameter
    without a gradient.
    """
    taken = [(p, p.grad) for stage in stages for p in stage.parameters if p.grad is not None]
    for p, _ in taken:
        p.grad = None
    return taken


def _take_incomplete(
    stages: Iterable[StageState], batches_per_step: Sequence[int], k: int
) -> list[tuple[torch.nn.Parameter, torch.Tensor]]:
    """Remove and return the gradients of stages that do not step at update k; divide those of
    stages that do by their number of batches."""
    taken: list[tuple[torch.nn.Parameter, torch.Tensor]] = []
    for stage in stages:
        count = batches_per_step[stage.index]
        if (k + 1) % count:
            taken += _take_gradients([stage])
        elif count > 1:
            for p in stage.parameters:
                if p.grad is not None:
                    p.grad /= count
    return taken


def _change_gradients(
    change: Callable[[Setting, Tensors], Tensors], setting: Setting, stage: StageState
) -> None:
    """Replace the gradients of a stage by those that a rule returns."""
    parameters = [p for p in stage.parameters if p.grad is not None]
    if parameters:
        for p, gradient in zip(
            parameters, change(setting, [p.grad for p in parameters if p.grad is not None])
        ):
            p.grad = gradient


def _list_stepped_groups(stage: StageState) -> list[_SteppedGroup]:
    """List the parameters that the update steps, by parameter group."""
    stepped = []
    for group in stage.groups:
        parameters = [p for p in group["params"] if p.grad is not None]
        gradients = [p.grad for p in parameters]
        if group.get("weight_decay") and parameters:
            values = [p.detach() for p in parameters]
            # as SGD adds it, before the velocity
            gradients = list(torch._foreach_add(gradients, values, alpha=group["weight_decay"]))
        if parameters:
            stepped.append(_SteppedGroup(stage, group, parameters, gradients))
    return stepped


@contextlib.contextmanager
def _delay_hooks(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Call the hooks after a step of the optimizer at the end of the context, where rules have made
    the whole step: a hook that clamps weights would find half of it.
    """
    hooks_by_part = {part: part._optimizer_step_post_hooks for part in list_parts(optimizer)}
    for part in hooks_by_part:
        part._optimizer_step_post_hooks = collections.OrderedDict()
    try:
        yield
    finally:
        for part, hooks in hooks_by_part.items():
            part._optimizer_step_post_hooks = hooks
    for part, hooks in hooks_by_part.items():
        for hook in list(hooks.values()):
            hook(part, (), {})  # its arguments: optimizer, args, kwargs


def _compute_step(stage: StageState, before: Tensors) -> Tensors:
    """Return the parameters of a stage minus their values `before`."""
    return list(torch._foreach_sub([p.detach() for p in stage.parameters], before))


def _change_step(
    change: Step, setting: Setting, stepped: _SteppedGroup, steps: Tensors | None
) -> None:
    """Add a rule's part to the step of the optimizer; `steps`: the steps of the stage's parameters,
    if they are known.
    """
    by_id = {id(p): step for p, step in zip(stepped.stage.parameters, steps or ())}
    states = [stepped.stage.state[p] for p in stepped.parameters]
    group_steps = [by_id[id(p)] for p in stepped.parameters if by_id]
    # in the parameters' own memory: adding to these changes them
    values = [p.detach() for p in stepped.parameters]
    for x, c in change(setting, Move(stepped.group, states, stepped.gradients, group_steps)):
        torch._foreach_add_(values, x, alpha=c)


def _move_entries(stage: StageState, entries: Mapping[str, Follow | None], step: Tensors) -> None:
    """Move a rule's entries by `step`.

    A parameter without a gradient has not moved and must get no state, because optimizers
    initialize it when it has none.
    """
    for entry, follow in entries.items():
        if follow is None:
            continue
        pairs = zip(stage.parameters, step)
        moved = [(p, value) for p, value in pairs if p.grad is not None or entry in stage.state[p]]
        if not moved:
            continue
        states = [stage.state[p].get(entry) for p, _ in moved]
        old = [torch.zeros_like(value) if x is None else x for x, (_, value) in zip(states, moved)]
        for (p, _), new in zip(moved, follow(old, [value for _, value in moved])):
            stage.state[p][entry] = new
