"""The definition that the emulator must agree with: execute the schedule slot by slot and stage by stage, slowly.

Every stage is a separate module with its own parameters, optimizer and inbox. Weight versions are only the counts of a stage's
updates: a stage has its current weights, it stashes what its method requires, and the slots alone decide which weights are the
newest. The update rules are written from their papers' equations, without ipu_pipe.update.rules.
"""

from __future__ import annotations

import contextlib
import copy
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


def compute_delay(method: Method, stages: int, stage: int, accumulate: int) -> float:
    """Return the delay D, in updates, of a stage (counted from 0) by the papers' closed forms."""
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
    """The update rules of one stage, which act from update `switch` on. `args` are those of a config."""

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
        self.args, self.method, self.lr = args, method, lr
        self.switch, self.accumulate = switch, accumulate
        # the rate of each update, where a caller changes it between two calls
        self.rates: List[float] = []
        self.delay = compute_delay(method, stages, stage, accumulate)
        self.backward_horizon = 0.0
        if method.name == "spectrain" and stages > 1:
            self.backward_horizon = math.ceil(
                stage / (1 if method.pipeline is Timeline.DATAFLOW else 2) / accumulate
            )

    def compute_rate(self, k: int) -> float:
        """Return the learning rate of update k by PipeMare's T1: lr / tau^p."""
        lr = self.rates[k] if self.rates else self.lr
        if "t1" not in self.args or k < self.switch:
            return lr
        power = 1 - min((k - self.switch) / self.args["t1"]["anneal_updates"], 1)
        return lr / max(self.delay, 1) ** power

    def forward(self, weights: Weights, state: "State", k: int) -> Weights:
        """Return the weights that a forward reads in place of version k, which is `weights` with the state `state`."""
        if k < self.switch:
            return weights
        if self.method.name == "spectrain":
            horizon = self.delay + self.backward_horizon
            return self._predict(weights, state.velocity, k, horizon)
        rule = self.args.get("weight_prediction")
        if not rule or not self.delay:
            return weights
        horizon = rule["scale"] * self.delay
        if rule["form"] == "difference":
            return {n: w.add(state.difference[n], alpha=horizon) for n, w in weights.items()}
        steps = state.direction if rule["form"] == "optimizer" else state.velocity
        return self._predict(weights, steps, k, horizon)

    def _predict(self, weights: Weights, steps: Weights, k: int, horizon: float) -> Weights:
        alpha = -self.compute_rate(k) * horizon
        return {name: w.add(steps[name], alpha=alpha) for name, w in weights.items()}

    def backward(self, weights: Weights, state: "State", k: int, delay: int) -> Weights:
        """Return the weights that a backward or a recomputation reads in place of the newest `weights`, `delay` updates after the
        forward's."""
        if k < self.switch:
            return weights
        if self.method.name == "spectrain" and self.backward_horizon:
            return self._predict(weights, state.velocity, k, self.backward_horizon)
        if "t2" in self.args and delay:
            return {
                name: w.add(state.delta[name], alpha=-float(delay)) for name, w in weights.items()
            }
        return weights


class State:
    """Tensors that a stage keeps for each weight version besides the weights."""

    def __init__(self, weights: Weights) -> None:
        self.velocity, self.difference, self.delta, self.squared_step, self.direction = (
            {name: torch.zeros_like(w) for name, w in weights.items()} for _ in range(5)
        )
        self.delayed: Weights = {}  # the optimizer's own step


class LiteralStage:
    """One stage: weights in memory, one graph for each microbatch in flight, an optimizer of its own.

    `ties`: the weights that it shares with an earlier stage, as (stage, name there). It has no optimizer for them: it reads the
    version that has been sent, and sends the gradient of each backward there. `reads`: dtypes of the weights that passes read,
    where these are rounded from the float32 weights of the stage; the module computes in them. `around`: a context for every
    forward (autocast).
    """

    def __init__(
        self,
        module: nn.Module,
        make_optimizer: Callable[[List[nn.Parameter]], Any],
        rules: LiteralRules,
        ties: Mapping[str, Tuple["LiteralStage", str]] = {},
        reads: Optional[Mapping[str, torch.dtype]] = None,
        around: Callable[[], ContextManager[Any]] = contextlib.nullcontext,
    ) -> None:
        self.module, self.rules, self.ties, self.around = module, rules, ties, around
        self.parameters = {name: p for name, p in module.named_parameters() if name not in ties}
        self.reads = reads or {name: p.dtype for name, p in module.named_parameters()}
        # gradients of a microbatch from a later stage
        self.received_gradients: Dict[Tuple[int, str], torch.Tensor] = {}
        self.sent_version = 0  # the newest version that later stages have
        self.optimizer = make_optimizer(list(self.parameters.values())) if self.parameters else None
        self.history = [self._copy_weights()]  # weights after 0, 1, 2, ... updates of this stage
        self.states = [State(self.history[0])]
        self.in_flight: Dict[int, Any] = {}
        self.forward_version: Dict[int, int] = {}
        self.computed: Dict[int, Weights] = {}
        self.mean_square: Weights = {}  # of microbatches' gradients (DC-ASGD)

    def _copy_weights(self) -> Weights:
        return {name: p.detach().clone() for name, p in self.parameters.items()}

    @property
    def version(self) -> int:
        return len(self.history) - 1

    def forward(
        self, m: int, inputs: Sequence[torch.Tensor], version: Optional[int] = None
    ) -> Tuple[torch.Tensor, ...]:
        """Run the forward of microbatch m. `version` None: read its newest weights, and the newest that others have sent."""
        read_version = self.version if version is None else version
        weights = self.history[read_version]
        trained = self._select_trained(weights)
        predicted = self.rules.forward(trained, self.states[read_version], read_version)
        self.forward_version[m] = read_version
        tied = self._get_tied_weights(version)
        return self._run_forward(m, inputs, {**weights, **predicted, **tied})

    def _select_trained(self, weights: Weights) -> Weights:
        """Return the weights that are trained: a frozen one is read as it is."""
        return {name: w for name, w in weights.items() if self.parameters[name].requires_grad}

    def _get_tied_weights(self, version: Optional[int] = None) -> Weights:
        return {
            name: stage.get_known_weight(there, version)
            for name, (stage, there) in self.ties.items()
        }

    def get_known_weight(self, name: str, version: Optional[int]) -> torch.Tensor:
        """Return a weight in a version that later stages have, by default the newest."""
        if name in self.ties:
            stage, there = self.ties[name]
            return stage.get_known_weight(there, version)
        assert version is None or version <= self.sent_version, "this version has not been sent yet"
        return self.history[self.sent_version if version is None else version][name]

    def recompute(
        self, m: int, inputs: Optional[Sequence[torch.Tensor]]
    ) -> Tuple[torch.Tensor, ...]:
        """Run the forward again with the current weights; `inputs` None: those of the
        forward, which the first stage of a segment keeps."""
        buffers = [b.clone() for b in self.module.buffers()]
        stashed_inputs = self.in_flight[m][1] if inputs is None else inputs
        outputs = self._run_forward(m, stashed_inputs, self._read_now(m))
        for b, value in zip(self.module.buffers(), buffers):
            b.data.copy_(value)
        return outputs

    def _read_now(self, m: int) -> Weights:
        weights = self.history[-1]
        corrected = self.rules.backward(
            self._select_trained(weights),
            self.states[-1],
            self.version,
            self.version - self.forward_version[m],
        )
        return {**weights, **corrected}

    def _run_forward(
        self, m: int, inputs: Sequence[torch.Tensor], weights: Weights
    ) -> Tuple[torch.Tensor, ...]:
        read = {
            name: w.clone()
            .to(self.reads[name])
            .requires_grad_(name in self.ties or self.parameters[name].requires_grad)
            for name, w in weights.items()
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
        """Run the backward of microbatch m. `split`: the weight gradients are added later, by `gather`."""
        read, received, _ = self.in_flight.pop(m)
        if newest:  # the backward reads the current weights
            for name, w in {**self._read_now(m), **self._get_tied_weights()}.items():
                read[name].data.copy_(w)
        pairs = [(o, g) for o, g in zip(outputs, gradients) if o.requires_grad]
        torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])
        for name, w in read.items():
            if (m, name) in self.received_gradients:
                w.grad = self.received_gradients.pop((m, name)) + w.grad
        self.outgoing_gradients = [
            (stage.received_gradients, (m, there), read[name].grad)
            for name, (stage, there) in self.ties.items()
        ]
        self.computed[m] = read
        if not split:
            self.gather(m)
        return [x.grad for x in received]

    def gather(self, m: int) -> None:
        """Add the weight gradients of a microbatch to those of the update."""
        read = self.computed.pop(m)
        for name, p in self.parameters.items():
            if read[name].grad is not None:
                gradient = self._compensate(name, read[name].grad.to(p.dtype), read[name].detach())
                p.grad = gradient.clone() if p.grad is None else p.grad + gradient

    def _compensate(self, name: str, gradient: torch.Tensor, read: torch.Tensor) -> torch.Tensor:
        """Return a gradient h divided by Gap-Aware's 1 + abs(w_now - w_read) / sqrt(s), or compensated by DC-ASGD:
        h + lambda N h h (w_now - w_read); the microbatch's is g = N h."""
        rules = self.rules
        if not rules.delay or self.version < rules.switch:
            return gradient
        if "gap_aware" in rules.args:
            gap = (self.history[-1][name] - read).abs() / (
                self.states[-1].squared_step[name].sqrt() + 1e-8
            )
            return gradient / (1 + gap)
        rule = rules.args.get("delay_compensation")
        if rule is None:
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
        state = self._step() if self.optimizer else self.states[-1]
        self.states.append(state)
        self.history.append(self._copy_weights())

    def _step(self) -> State:
        """Make a step of the optimizer with the rules, and return the state of the new version."""
        k, rules = self.version, self.rules
        args, delay = rules.args if k >= rules.switch else {}, rules.delay
        group, before = self.optimizer.param_groups[0], self.states[-1]
        for one in self.optimizer.param_groups:
            one["lr"] = rules.compute_rate(k)
        # a frozen weight has no gradient
        trained = {n: p for n, p in self.parameters.items() if p.grad is not None}
        for p in trained.values():
            if "gradient_shrinking" in args:
                p.grad *= args["gradient_shrinking"]["factor"] ** delay  # type: ignore[operator]
        gradients = {name: p.grad.clone() for name, p in trained.items()}  # type: ignore[union-attr]
        hooks = self.optimizer._optimizer_step_post_hooks
        self.optimizer._optimizer_step_post_hooks = {}
        self.optimizer.step()
        state = State(self.history[-1])
        for name, p in trained.items():
            old, moments = self.history[-1][name], self.optimizer.state[p]
            if "momentum_buffer" in moments:
                state.velocity[name] = moments["momentum_buffer"].clone()
                state.direction[name] = state.velocity[name]
            if "exp_avg" in moments and "weight_prediction" in args:  # m_hat / (sqrt(v_hat) + eps)
                b1, b2 = group["betas"]
                m_hat = moments["exp_avg"] / (1 - b1 ** float(moments["step"]))
                v_hat = moments["exp_avg_sq"] / (1 - b2 ** float(moments["step"]))
                state.direction[name] = m_hat / (v_hat.sqrt() + group["eps"])
            rule = args.get("spike_compensation") if delay else None
            if rule:  # the step from the old weights by the paper's equation; the velocity is the optimizer's
                m, g = group["momentum"], gradients[name] + group["weight_decay"] * old
                share = m ** (rule.get("scale", 0) * delay)
                a, b = rule.get("a", share), rule.get("b", (1 - share) / (1 - m))
                p.data.copy_(old - group["lr"] * (a * state.velocity[name] + b * g))
            if (
                "error_feedback" in args and delay
            ):  # the error of the previous step, whose right value is known now
                share, step = args["error_feedback"]["scale"] * delay, p.data - old
                previous = before.delayed.get(name, step)
                state.delayed[name] = step
                p.data.copy_(p.data.add(step, alpha=share).add(previous, alpha=-share))
        # a caller's hook gets the weights of the whole update
        for hook in hooks.values():
            hook(self.optimizer, (), {})
        self.optimizer._optimizer_step_post_hooks = hooks
        self.optimizer.zero_grad()
        for name, p in trained.items():
            step = p.data - self.history[-1][name]
            state.difference[name] = step
            if "gap_aware" in args and delay:
                decay = args["gap_aware"]["decay"]
                mean = decay * before.squared_step[name]
                state.squared_step[name] = mean.addcmul(step, step, value=1 - decay)
            if "t2" in args and delay:
                decay = args["t2"]["decay"]
                gamma = 1 - 2 / (delay + 1) if decay == "optimal" else decay ** (1 / delay)
                state.delta[name] = (gamma * before.delta[name]).add(step, alpha=1 - gamma)
        return state


def average_nets(nets: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Set weights and running statistics to the mean of all, and the optimizers' state to the mean of those that have it."""
    buffers = zip(*([b for b in net.buffers() if b.is_floating_point()] for net in nets))
    for tensors in [*zip(*(net.parameters() for net in nets)), *buffers]:
        mean = sum(tensor.data for tensor in tensors) / len(tensors)
        states = [state for state in (o.state.get(t) for o, t in zip(optimizers, tensors)) if state]
        means = {key: sum(s[key] for s in states) / len(states) for s in states[:1] for key in s}
        for optimizer, tensor in zip(optimizers, tensors):
            tensor.data = mean.clone()
            if means:
                optimizer.state[tensor] = {key: value.clone() for key, value in means.items()}


class ActedStage(LiteralStage):
    """A stage of a sequential model whose caller acts between two steps. The act after step k comes
    where a plain loop over this stage alone would have it, in the order of the stage's own passes:

        stage     F(k)  F(k+1)  B(k)  U(k)  F(k+2)       the caller acts after step k
                      [1]                [2]

    [1] on modules, modes, hooks, the loss, buffers and weights that nobody trains: the forward of batch k + 1 sees it
    [2] on weights and the optimizer: version k + 1 is changed, and update k + 1 has the new settings

    Passes of earlier batches, recomputations too, see what their forward saw. There are two copies of the caller's objects, one
    for each moment; of both only this stage's part counts.
    """

    def __init__(
        self,
        make_objects: Callable[[], Any],
        part: slice,
        act: Callable[[int, Any], None],
        has_act: Callable[[int], bool],
        rules: LiteralRules,
        get_dtype: Callable[[nn.Module, torch.Tensor], torch.dtype],
    ) -> None:
        self.updated, self.read = make_objects(), make_objects()
        self.part, self.act, self.has_act, self.get_dtype = part, act, has_act, get_dtype
        module = self.updated.model[part]
        super().__init__(
            module, lambda ps: self.updated.optimizer, rules, reads=self._list_dtypes(module)
        )
        # by batch: the module that its passes run, its weights that nobody trains, the hooks of weights, the loss
        self.modules: Dict[int, nn.Module] = {}
        self.frozen: Dict[int, Weights] = {}
        self.hooks: Dict[int, Dict[str, List[Any]]] = {}
        self.losses: Dict[int, Any] = {}
        # before the first step, which is step 0
        self._act(-1)
        self._note_rate()

    def _list_dtypes(self, module: nn.Module) -> Dict[str, torch.dtype]:
        """Return the dtypes that passes read; `get_dtype` has that of a module's weight."""
        return {
            f"{place}.{name}": self.get_dtype(one, p)
            for place, one in module.named_modules()
            for name, p in one.named_parameters(recurse=False)
        }

    def _note_rate(self) -> None:
        self.rules.rates.append(self.updated.optimizer.param_groups[0]["lr"])

    def forward(
        self, m: int, inputs: Sequence[torch.Tensor], version: Optional[int] = None
    ) -> Tuple[torch.Tensor, ...]:
        batch, i = divmod(m, self.rules.accumulate)
        if i == 0:
            self._begin_batch(batch)
        return super().forward(m, inputs, version)

    def recompute(
        self, m: int, inputs: Optional[Sequence[torch.Tensor]]
    ) -> Tuple[torch.Tensor, ...]:
        self.module = self.modules[m // self.rules.accumulate]
        return super().recompute(m, inputs)

    def _begin_batch(self, batch: int) -> None:
        module = self.modules.get(batch - 1)
        if batch == 0 and self.has_act(-1):
            self.act(-1, self.read)
        if module is not None and self.has_act(batch - 1):
            past = copy.deepcopy(module)
            self.modules = {k: past if m is module else m for k, m in self.modules.items()}
            self._copy_buffers()
            trained = [(n, p) for n, p in module.named_parameters() if self._is_trained(p)]
            self.act(batch - 1, self.read)
            # the caller may freeze them, which is possible while nothing is in flight
            for name, p in trained:
                p.data = self.history[-1][name].clone()
            module = None
        # sliced again, because the caller may have replaced a module
        self.modules[batch] = module = module or self.read.model[self.part]
        self.frozen[batch] = {
            name: p.detach().clone()
            for name, p in module.named_parameters()
            if not self._is_trained(p)
        }
        self.hooks[batch] = {
            name: list((p._backward_hooks or {}).values()) for name, p in module.named_parameters()
        }
        self.losses[batch] = self.read.get_loss()

    def _get_frozen(self, m: int) -> Weights:
        """Return the weights that a microbatch reads and that nobody trains: they have no versions, as buffers."""
        return self.frozen[m // self.rules.accumulate]

    def _is_trained(self, p: nn.Parameter) -> bool:
        """Return whether a parameter of the copy that forwards read is trained."""
        groups = self.read.optimizer.param_groups
        return p.requires_grad and any(p is q for group in groups for q in group["params"])

    def _read_now(self, m: int) -> Weights:
        return {**super()._read_now(m), **self._get_frozen(m)}

    def _copy_buffers(self) -> None:
        """Give the module new buffers: backwards of passes in flight need the old ones."""
        for module in self.read.model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                module._buffers[name] = buffer.clone()

    def _run_forward(
        self, m: int, inputs: Sequence[torch.Tensor], weights: Weights
    ) -> Tuple[torch.Tensor, ...]:
        batch = m // self.rules.accumulate
        self.module = self.modules[batch]
        outputs = super()._run_forward(m, inputs, {**weights, **self._get_frozen(m)})
        for name, hooks in self.hooks[batch].items():
            for hook in hooks:
                self.in_flight[m][0][name].register_hook(hook)
        return outputs

    def update(self) -> None:
        k = self.version
        group = self.optimizer.param_groups[0]
        super().update()
        # T1 has scaled it
        group["lr"] = self.rules.rates[k]
        self._act(k)
        self._note_rate()

    def _act(self, k: int) -> None:
        """Change version k + 1 as the caller does after step k."""
        if not self.has_act(k):
            return
        self.act(k, self.updated)
        # the caller may have replaced a module
        module = self.updated.model[self.part]
        self.parameters = dict(module.named_parameters())
        self.reads = self._list_dtypes(module)
        self.history[-1] = self._copy_weights()
        for name, p in self.parameters.items():
            moments = self.optimizer.state.get(p, {})
            velocity = moments.get("momentum_buffer", torch.zeros_like(p.detach()))
            self.states[-1].velocity[name] = velocity.clone()
            self.states[-1].direction[name] = velocity.clone()
            # T2's accumulator is a part of the optimizer's state, which the caller may clear
            if not moments:
                self.states[-1].delta[name] = torch.zeros_like(velocity)

    def export(self) -> Weights:
        """Return the weights and buffers: a slice keeps the names of the whole model."""
        # one copy has trained the weights, the other one has run the forwards
        weights = dict(self.updated.model[self.part].named_parameters())
        buffers = dict(self.read.model[self.part].named_buffers())
        return {name: tensor.detach() for name, tensor in {**weights, **buffers}.items()}


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
    """Execute `schedule` on `stages`: in each slot every stage does its forward, then its backward, then its update.

    2BW reads the version before its batch's; at the start and after each of the `drains` (microbatches) there is only one.
    `delays[s][m]`: if the method states delays, the updates between the forward's weights and the use of the gradient.
    `shares[m]`: the factor of a microbatch's loss, instead of 1 / N; 0: its loss is not computed.
    """
    last, accumulate = len(stages) - 1, schedule.accumulate
    reads_newest = method.backward_reads is Reads.NEWEST

    def find_first_version(m: int) -> int:
        """Return the version that a drained pipeline had before microbatch m."""
        return max([0, *[drain for drain in drains if drain <= m]]) // accumulate

    def scale_loss(output: torch.Tensor, m: int) -> torch.Tensor:
        if shares is None:
            return loss(output, batches[m][1]) / accumulate
        return loss(output, batches[m][1]) * shares[m] if shares[m] else output.sum() * 0

    count = schedule.microbatches
    forwards = _index_by_slot(schedule.slots(Kind.FORWARD, 0, count))
    # of a split backward the input gradient, and the weight gradient
    backwards, completions = (
        _index_by_slot(schedule.slots(kind, 0, count))
        for kind in (schedule.passes[1], schedule.passes[-1])
    )
    again = _plan_recomputations(schedule, method) if method.segments is not None else {}
    activations: Dict[Tuple[int, int], Sequence[torch.Tensor]] = {
        (0, m): (x,) for m, (x, _) in enumerate(batches)
    }
    gradients: Dict[Tuple[int, int], Sequence[Any]] = {}
    repeated: Dict[Tuple[int, int], Sequence[torch.Tensor]] = {}
    if (
        delays is not None
    ):  # no pipeline's timing: one microbatch after another, with the stated delays
        for m in range(count):
            begin = find_first_version(m)
            inputs: Sequence[torch.Tensor] = (batches[m][0],)
            for s, stage in enumerate(stages):
                inputs = stage.forward(m, inputs, max(stage.version - int(delays[s][m]), begin))
            grads: Sequence[Any] = [None]
            for s in reversed(range(len(stages))):
                outputs = (scale_loss(inputs[0], m),) if s == last else stages[s].in_flight[m][2]
                grads = stages[s].backward(m, outputs, grads, reads_newest)
                if (m + 1) % accumulate == 0:
                    stages[s].update()
        return
    for slot in range(schedule.slot_count):
        sent: List[Any] = []  # arrives when the slot is over
        for stage in stages:
            stage.sent_version = stage.version
        for s, stage in enumerate(stages):
            m = forwards.get((slot, s))
            if m is not None:
                version = None
                if method.forward_reads is Reads.DOUBLE_BUFFERED and last:
                    version = max(m // accumulate - 1, find_first_version(m))
                outputs = stage.forward(m, activations.pop((s, m)), version)
                sent.append((activations, (s + 1, m), outputs))
            if (slot, s) in again:
                m, is_head = again[slot, s]
                outputs = stage.recompute(m, None if is_head else repeated.pop((s, m)))
                sent.append((repeated, (s + 1, m), outputs))
            m = backwards.get((slot, s))
            if m is not None:
                outputs = stage.in_flight[m][2]
                if s == last:
                    outputs, grads = (scale_loss(outputs[0], m),), [None]
                else:
                    grads = gradients.pop((s, m))
                split = len(schedule.passes) > 2
                back = stage.backward(m, outputs, grads, reads_newest, split)
                sent += [(gradients, (s - 1, m), back), *stage.outgoing_gradients]
            m = completions.get((slot, s))
            if m is not None:
                if m in stage.computed:
                    stage.gather(m)
                if (m + 1) % accumulate == 0:
                    stage.update()
        for box, key, tensors in sent:
            box[key] = tensors


def _plan_recomputations(
    schedule: Schedule, method: Method
) -> Dict[Tuple[int, int], Tuple[int, bool]]:
    """Return (slot, stage) -> (microbatch, whether the stage begins a segment).

    Recomputation is a wave through each segment, one stage a slot, that ends `turn` slots before the
    backward of its last stage.
    """
    P = schedule.stages
    segments = method.segments or max(round(P**0.5), 1)
    lengths = [P // segments + (i < P % segments) for i in range(segments)]
    backward = schedule.slots(Kind.BACKWARD, 0, schedule.microbatches).tolist()
    turn = method.turn if P > 1 else 0
    runs, head = {}, 0
    for length in lengths:
        end = head + length - 1
        for s in range(head, end + 1):
            for m, slot in enumerate(backward[end]):
                runs[slot - turn - (end - s), s] = (m, s == head)
        head = end + 1
    return runs


def _index_by_slot(slots: Any) -> Dict[Tuple[int, int], int]:
    return {(int(slot), s): m for s, row in enumerate(slots.tolist()) for m, slot in enumerate(row)}
