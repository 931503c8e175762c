"""The definition that the emulator is held against: the schedule carried out slot by slot, stage by stage, slowly.

Every stage is a module of its own with its own parameters, optimizer and inbox. Nothing here knows of versions by number
beyond counting a stage's updates: a stage has weights *now*, it stashes what its method says, the slots alone decide what is
newest when, and the update rules are written out from their papers' equations, without a line of ipu_pipe.update.rules.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any, Callable, ContextManager, Dict, List, Mapping, Optional, Sequence, Tuple

import torch
from torch import nn
from torch.func import functional_call

from ipu_pipe.schedule.actions import Kind
from ipu_pipe.schedule.methods import Method, Reads, Timeline
from ipu_pipe.schedule.table import Schedule

Batch = Tuple[torch.Tensor, torch.Tensor]
Weights = Dict[str, torch.Tensor]


def lag_formula(method: Method, stages: int, stage: int, accumulate: int) -> float:
    """Return D of a stage, counted from 0, by the papers' closed forms."""
    if method.delay is not None and not method.delay.drawn:
        return (
            method.delay.greatest if method.delay.table is None else max(method.delay.table[stage])
        )
    if stages == 1 or method.flushes:
        return 0
    if method.name == "pipedream_2bw":
        return 1
    microbatches = (
        2 * (stages - 1 - stage) + method.turn
        if method.pipeline is Timeline.DATAFLOW
        else stages - 1 - stage
    )
    return math.ceil(microbatches / accumulate)


class LiteralRules:
    """The update rules of one stage. `args` as in a config; lr of update k is `rate(k)`; rules act from update `switch` on."""

    def __init__(
        self,
        args: Mapping[str, Any],
        method: Method,
        stages: int,
        stage: int,
        accumulate: int,
        lr: float,
        switch: int = 0,
    ) -> None:
        self.args, self.method, self.lr, self.switch, self.accumulate = (
            args,
            method,
            lr,
            switch,
            accumulate,
        )
        self.lag = lag_formula(method, stages, stage, accumulate)
        self.ahead = 0.0
        if method.name == "spectrain" and stages > 1:
            self.ahead = math.ceil(
                stage / (1 if method.pipeline is Timeline.DATAFLOW else 2) / accumulate
            )

    def rate(self, k: int) -> float:
        """T1: lr / tau^p."""
        if "t1" not in self.args or k < self.switch:
            return self.lr
        power = 1 - min((k - self.switch) / self.args["t1"]["anneal_updates"], 1)
        return self.lr / max(self.lag, 1) ** power

    def forward(self, weights: Weights, state: "State", k: int) -> Weights:
        """Return what a forward reads instead of the version `weights`, whose state is `state`, after k updates."""
        if k < self.switch:
            return weights
        if self.method.name == "spectrain":
            return self._ahead(weights, state, k, self.lag + self.ahead)
        rule = self.args.get("weight_prediction")
        if rule and self.lag:
            horizon = rule["scale"] * self.lag
            if rule["form"] == "velocity":
                return self._ahead(weights, state, k, horizon)
            if rule["form"] == "optimizer":
                return {
                    name: w.add(state.direction[name], alpha=-self.rate(k) * horizon)
                    for name, w in weights.items()
                }
            return {
                name: w.add(state.difference[name], alpha=horizon) for name, w in weights.items()
            }
        return weights

    def _ahead(self, weights: Weights, state: "State", k: int, horizon: float) -> Weights:
        return {
            name: w.add(state.velocity[name], alpha=-self.rate(k) * horizon)
            for name, w in weights.items()
        }

    def backward(self, weights: Weights, state: "State", k: int, lag: int) -> Weights:
        """Return what a backward or a recomputation reads instead of the newest `weights`, `lag` updates after the forward's."""
        if k < self.switch:
            return weights
        if self.method.name == "spectrain" and self.ahead:
            return self._ahead(weights, state, k, self.ahead)
        if "t2" in self.args and lag:
            return {
                name: w.add(state.delta[name], alpha=-float(lag)) for name, w in weights.items()
            }
        return weights


class State:
    """What a stage keeps beside its weights."""

    def __init__(self, weights: Weights) -> None:
        self.velocity = {name: torch.zeros_like(w) for name, w in weights.items()}
        self.difference = {name: torch.zeros_like(w) for name, w in weights.items()}
        self.delta = {name: torch.zeros_like(w) for name, w in weights.items()}
        self.direction = {name: torch.zeros_like(w) for name, w in weights.items()}
        self.delayed: Weights = {}  # the optimizer's own step


class LiteralStage:
    """One stage: weights in memory, one graph a microbatch in flight, an optimizer of its own.

    `ties`: its weights that are an earlier stage's, by that stage and the weight's name there. Such a stage has no optimizer for
    them: it reads what has come of them, and the gradient of each backward goes there. `reads`: dtypes of the weights that passes
    read, where these are roundings of those that the stage keeps, in float32; the module computes in them. `around`: what every
    forward runs in (autocast).
    """

    def __init__(
        self,
        module: nn.Module,
        make_optimizer: Callable[[List[nn.Parameter]], Any],
        rules: Optional[LiteralRules] = None,
        ties: Mapping[str, Tuple["LiteralStage", str]] = {},
        reads: Optional[Mapping[str, torch.dtype]] = None,
        around: Callable[[], ContextManager[Any]] = contextlib.nullcontext,
    ) -> None:
        self.module, self.rules, self.ties, self.around = module, rules, ties, around
        self.parameters = {name: p for name, p in module.named_parameters() if name not in ties}
        self.reads = reads or {name: p.dtype for name, p in module.named_parameters()}
        self.came: Dict[
            Tuple[int, str], torch.Tensor
        ] = {}  # gradients of a microbatch from a later stage
        self.known = 0  # the version that later stages have got
        self.optimizer = make_optimizer(list(self.parameters.values())) if self.parameters else None
        self.history = [self._now()]  # weights after 0, 1, 2, ... updates of this stage
        self.states = [State(self.history[0])]
        self.in_flight: Dict[int, Any] = {}
        self.forward_version: Dict[int, int] = {}
        self.computed: Dict[int, Weights] = {}
        self.mean_square: Weights = {}  # of microbatches' gradients (DC-ASGD)

    def _now(self) -> Weights:
        return {name: p.detach().clone() for name, p in self.parameters.items()}

    @property
    def version(self) -> int:
        return len(self.history) - 1

    def forward(
        self, m: int, inputs: Sequence[torch.Tensor], version: Optional[int] = None
    ) -> Tuple[torch.Tensor, ...]:
        """`version` None: the newest of its own weights, and of others' what has come."""
        read_version = self.version if version is None else version
        weights = self.history[read_version]
        if self.rules:
            weights = self.rules.forward(weights, self.states[read_version], read_version)
        self.forward_version[m] = read_version
        return self._run(m, inputs, {**weights, **self._tied(version)})

    def _tied(self, version: Optional[int] = None) -> Weights:
        return {name: stage.told(there, version) for name, (stage, there) in self.ties.items()}

    def told(self, name: str, version: Optional[int]) -> torch.Tensor:
        """Return a weight as a later stage has it, in its newest version if None."""
        if name in self.ties:
            stage, there = self.ties[name]
            return stage.told(there, version)
        assert version is None or version <= self.known, "it has not come yet"
        return self.history[self.known if version is None else version][name]

    def recompute(
        self, m: int, inputs: Optional[Sequence[torch.Tensor]]
    ) -> Tuple[torch.Tensor, ...]:
        """Run the forward again with what is in memory now; `inputs` None: those of the
        forward, which a segment's head kept."""
        buffers = [b.clone() for b in self.module.buffers()]
        input_kept = self.in_flight[m][1] if inputs is None else inputs
        outputs = self._run(m, input_kept, self._read_now(m))
        for b, value in zip(self.module.buffers(), buffers):
            b.data.copy_(value)
        return outputs

    def _read_now(self, m: int) -> Weights:
        weights = self.history[-1]
        if self.rules:
            weights = self.rules.backward(
                weights, self.states[-1], self.version, self.version - self.forward_version[m]
            )
        return weights

    def _run(
        self, m: int, inputs: Sequence[torch.Tensor], weights: Weights
    ) -> Tuple[torch.Tensor, ...]:
        read = {
            name: w.clone().to(self.reads[name]).requires_grad_() for name, w in weights.items()
        }
        received = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in inputs]
        with self.around():
            outputs = functional_call(
                self.module, read, (received[0] if len(received) == 1 else tuple(received),)
            )
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        self.in_flight[m] = (read, received, outputs)
        return outputs

    def backward(
        self,
        m: int,
        outputs: Sequence[torch.Tensor],
        gradients: Sequence[Any],
        newest: bool,
        split: bool = False,
    ) -> List[Any]:
        """`split`: the weight gradients are gathered later."""
        read, received, _ = self.in_flight.pop(m)
        if newest:  # the backward finds in memory what the stage holds now
            for name, w in {**self._read_now(m), **self._tied()}.items():
                read[name].data.copy_(w)
        pairs = [(o, g) for o, g in zip(outputs, gradients) if o.requires_grad]
        torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])
        for name, w in read.items():
            if (m, name) in self.came:
                w.grad = self.came.pop((m, name)) + w.grad
        self.gives = [
            (stage.came, (m, there), read[name].grad) for name, (stage, there) in self.ties.items()
        ]
        self.computed[m] = read
        if not split:
            self.gather(m)
        return [x.grad for x in received]

    def gather(self, m: int) -> None:
        """Add the weight gradients of a microbatch, which a split backward has only now."""
        read = self.computed.pop(m)
        for name, p in self.parameters.items():
            if read[name].grad is not None:
                gradient = self._compensate(name, read[name].grad.to(p.dtype), read[name].detach())
                p.grad = gradient.clone() if p.grad is None else p.grad + gradient

    def _compensate(self, name: str, gradient: torch.Tensor, read: torch.Tensor) -> torch.Tensor:
        """DC-ASGD: of the microbatch's own gradient g = N h, h + lambda N h h (w_now - w_read)."""
        rules = self.rules
        rule = (
            rules.args.get("delay_compensation")
            if rules and rules.lag and self.version >= rules.switch
            else None
        )
        if rules is None or rule is None:
            return gradient
        term = gradient * gradient * (self.history[-1][name] - read)
        if rule["adaptive"]:
            decay, N = rule["decay"], rules.accumulate
            s = self.mean_square.get(name, torch.zeros_like(read))
            self.mean_square[name] = s = (decay * s).addcmul(
                gradient, gradient, value=(1 - decay) * N**2
            )
            term = term / (s + 1e-7).sqrt()
        return gradient.add(term, alpha=rule["scale"] * rules.accumulate)

    def update(self) -> None:
        k, rules = self.version, self.rules
        if self.optimizer:
            args: Mapping[str, Any] = rules.args if rules and k >= rules.switch else {}
            lag = rules.lag if rules else 0
            group = self.optimizer.param_groups[0]
            for one in self.optimizer.param_groups if rules else ():
                one["lr"] = rules.rate(k)  # type: ignore[union-attr]
            for p in self.parameters.values():
                if "gradient_shrinking" in args:
                    p.grad *= args["gradient_shrinking"]["factor"] ** lag
            gradients = {name: p.grad.clone() for name, p in self.parameters.items()}
            self.optimizer.step()
            self.optimizer.zero_grad()
            state = State(self.history[-1])
            for name, p in self.parameters.items():
                old = self.history[-1][name]
                if "momentum_buffer" in self.optimizer.state[p]:
                    state.velocity[name] = self.optimizer.state[p]["momentum_buffer"].clone()
                    state.direction[name] = state.velocity[name]
                if (
                    "exp_avg" in self.optimizer.state[p] and "weight_prediction" in args
                ):  # m_hat / (sqrt(v_hat) + eps)
                    moments, (b1, b2) = self.optimizer.state[p], group["betas"]
                    m_hat = moments["exp_avg"] / (1 - b1 ** float(moments["step"]))
                    v_hat = moments["exp_avg_sq"] / (1 - b2 ** float(moments["step"]))
                    state.direction[name] = m_hat / (v_hat.sqrt() + group["eps"])
                rule = args.get("spike_compensation")
                if (
                    rule and lag
                ):  # the step from the old weights by the paper's equation; the velocity is the optimizer's
                    m, g = group["momentum"], gradients[name] + group["weight_decay"] * old
                    a = rule["a"] if rule.get("a") is not None else m ** (rule["scale"] * lag)
                    b = (
                        rule["b"]
                        if rule.get("b") is not None
                        else (1 - m ** (rule["scale"] * lag)) / (1 - m)
                    )
                    p.data.copy_(old - group["lr"] * (a * state.velocity[name] + b * g))
                if (
                    "error_feedback" in args and lag
                ):  # the error of the step before: what it should have been, now known
                    share, step = args["error_feedback"]["scale"] * lag, p.data - old
                    before = self.states[-1].delayed.get(name, step)
                    state.delayed[name] = step
                    p.data.copy_(p.data.add(step, alpha=share).add(before, alpha=-share))
                state.difference[name] = p.data - old
                if "t2" in args and lag:
                    decay = args["t2"]["decay"]
                    gamma = 1 - 2 / (lag + 1) if decay == "optimal" else decay ** (1 / lag)
                    before = self.states[-1].delta[name]
                    state.delta[name] = (gamma * before).add(p.data - old, alpha=1 - gamma)
            self.states.append(state)
        else:
            self.states.append(self.states[-1])
        self.history.append(self._now())


def replay(
    stages: List[LiteralStage],
    schedule: Schedule,
    method: Method,
    batches: Sequence[Batch],
    loss: Callable[[Any, Any], torch.Tensor],
    drains: Sequence[int] = (),
    delays: Any = None,
    shares: Optional[Sequence[float]] = None,
) -> None:
    """Carry out `schedule` on `stages`: in each slot every stage does its forward, then its backward, then its update.

    2BW reads one version behind its batch's; at the start and after each of the `drains` (microbatches) there is but one.
    `delays[s][m]`: where the method states them, the updates by which the forward's weights are older than the gradient's use.
    `shares[m]`: by which a microbatch's loss is multiplied, instead of 1 / N; 0: its loss is not read.
    """
    last, accumulate = len(stages) - 1, schedule.accumulate

    def scale_loss(output: torch.Tensor, m: int) -> torch.Tensor:
        if shares is None:
            return loss(output, batches[m][1]) / accumulate
        return loss(output, batches[m][1]) * shares[m] if shares[m] else output.sum() * 0

    count = schedule.microbatches
    forwards = _by_slot(schedule.slots(Kind.FORWARD, 0, count))
    # of a split backward the input gradient, and the weight gradient
    backwards, completions = (
        _by_slot(schedule.slots(kind, 0, count))
        for kind in (schedule.passes[1], schedule.passes[-1])
    )
    again = _recomputations(schedule, method) if method.segments is not None else {}
    activations: Dict[Tuple[int, int], Sequence[torch.Tensor]] = {
        (0, m): (x,) for m, (x, _) in enumerate(batches)
    }
    gradients: Dict[Tuple[int, int], Sequence[Any]] = {}
    repeated: Dict[Tuple[int, int], Sequence[torch.Tensor]] = {}
    if (
        delays is not None
    ):  # no pipeline's timing: one microbatch after another, with the stated delays
        for m in range(count):
            begin = max([0, *[drain for drain in drains if drain <= m]]) // accumulate
            inputs: Sequence[torch.Tensor] = (batches[m][0],)
            for s, stage in enumerate(stages):
                inputs = stage.forward(m, inputs, max(stage.version - int(delays[s][m]), begin))
            grads: Sequence[Any] = [None]
            for s in reversed(range(len(stages))):
                outputs = (scale_loss(inputs[0], m),) if s == last else stages[s].in_flight[m][2]
                grads = stages[s].backward(
                    m, outputs, grads, newest=method.backward_reads is Reads.NEWEST
                )
                if (m + 1) % accumulate == 0:
                    stages[s].update()
        return
    for slot in range(schedule.slot_count):
        sent: List[Any] = []  # arrives when the slot is over
        for stage in stages:
            stage.known = stage.version
        for s, stage in enumerate(stages):
            m = forwards.get((slot, s))
            if m is not None:
                version = None
                if method.forward_reads is Reads.DOUBLE_BUFFERED and last:
                    begin = max([0, *[drain for drain in drains if drain <= m]]) // accumulate
                    version = max(m // accumulate - 1, begin)
                outputs = stage.forward(m, activations.pop((s, m)), version)
                sent.append((activations, (s + 1, m), outputs))
            if (slot, s) in again:
                m, is_head = again[slot, s]
                outputs = stage.recompute(m, None if is_head else repeated.pop((s, m)))
                sent.append((repeated, (s + 1, m), outputs))
            m = backwards.get((slot, s))
            if m is not None:
                outputs = stage.in_flight[m][2]
                grads = [None]
                if s == last:
                    outputs = (scale_loss(outputs[0], m),)
                else:
                    grads = gradients.pop((s, m))
                newest = method.backward_reads is Reads.NEWEST
                back = stage.backward(m, outputs, grads, newest, split=len(schedule.passes) > 2)
                sent += [(gradients, (s - 1, m), back), *stage.gives]
            m = completions.get((slot, s))
            if m is not None:
                if m in stage.computed:
                    stage.gather(m)
                if (m + 1) % accumulate == 0:
                    stage.update()
        for box, key, tensors in sent:
            box[key] = tensors


def _recomputations(schedule: Schedule, method: Method) -> Dict[Tuple[int, int], Tuple[int, bool]]:
    """Return (slot, stage) -> (microbatch, whether the stage begins a segment): a wave through
    each segment, one stage a slot, that
    ends `turn` slots before its last stage's backward."""
    P = schedule.stages
    segments = method.segments or max(round(P**0.5), 1)
    lengths = [P // segments + (i < P % segments) for i in range(segments)]
    backward = schedule.slots(Kind.BACKWARD, 0, schedule.microbatches).tolist()
    runs, head = {}, 0
    for length in lengths:
        end = head + length - 1
        for s in range(head, end + 1):
            for m in range(schedule.microbatches):
                runs[backward[end][m] - (method.turn if P > 1 else 0) - (end - s), s] = (
                    m,
                    s == head,
                )
        head = end + 1
    return runs


def _by_slot(slots: Any) -> Dict[Tuple[int, int], int]:
    return {(int(slot), s): m for s, row in enumerate(slots.tolist()) for m, slot in enumerate(row)}
