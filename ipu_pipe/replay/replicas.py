"""Replicas of a pipeline that take turns on one model: each has gradients of its own, or weights of
its own.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import re
from typing import Any, Iterator, Mapping, Sequence, Tuple

import torch
from torch import nn

from ipu_pipe.local.blocks import average_gradients
from ipu_pipe.replay.work import Work
from ipu_pipe.schedule.methods import Outer

# prefixes and the name of entries in a parameter's optimizer state of a checkpoint:
# "replica2.weight", "outer.momentum_buffer"
REPLICA = "replica"
OUTER = "outer"
WEIGHT = "weight"
_ENTRY = re.compile(rf"({REPLICA}\d+|{OUTER})\.")

# a buffer: its module and its name there
BufferKey = Tuple[nn.Module, str]


def _list_buffers(model: nn.Module) -> list[BufferKey]:
    return [(module, name) for module in model.modules() for name in module._buffers]


def _get_buffers(keys: Sequence[BufferKey]) -> list[torch.Tensor | None]:
    return [module._buffers[name] for module, name in keys]


def _set_buffers(keys: Sequence[BufferKey], buffers: Sequence[torch.Tensor | None]) -> None:
    for (module, name), buffer in zip(keys, buffers):
        module._buffers[name] = buffer


def _describe_buffers(buffers: Sequence[torch.Tensor | None]) -> list[tuple[int, int] | None]:
    """Return what changes when a buffer is replaced or written."""
    return [
        # a buffer that was made in inference mode has no version
        None if b is None else (id(b), -1 if b.is_inference() else b._version)
        for b in buffers
    ]


class GradientReplicas:
    """`count` replicas that share the weights and average their gradients before each update.

    Each replica has its own gradients until then and its own buffers (running statistics). The
    first replica's buffers are the model's.
    """

    def __init__(self, model: nn.Module, parameters: Sequence[nn.Parameter], count: int) -> None:
        """`parameters`: the parameters that the optimizer trains."""
        self.count = count
        self._parameters = list(parameters)
        self._buffer_keys = _list_buffers(model)
        self._gradients: list[list[torch.Tensor | None]] = [
            [None] * len(self._parameters) for _ in range(count)
        ]
        first = _get_buffers(self._buffer_keys)
        self._buffers = [first] + [
            [None if b is None else b.clone() for b in first] for _ in range(count - 1)
        ]
        # the model's buffers at the beginning, and after each batch; none within a batch
        self._left = _describe_buffers(first)

    def enter(self, replica: int) -> None:
        """Put a replica's gradients and buffers into the model."""
        if self._left:
            self._share_changed_buffers()
        for p, gradient in zip(self._parameters, self._gradients[replica]):
            p.grad = gradient
        _set_buffers(self._buffer_keys, self._buffers[replica])

    def leave(self, replica: int) -> None:
        """Take a replica's gradients and buffers from the model."""
        self._gradients[replica] = [p.grad for p in self._parameters]
        self._buffers[replica] = _get_buffers(self._buffer_keys)

    def average(self) -> None:
        """Put the mean of all gradients into the parameters, and the first replica's buffers into
        the model.
        """
        for i, p in enumerate(self._parameters):
            p.grad = average_gradients([gradients[i] for gradients in self._gradients])
        self._gradients = [[None] * len(self._parameters) for _ in range(self.count)]
        _set_buffers(self._buffer_keys, self._buffers[0])
        self._left = _describe_buffers(self._buffers[0])

    def _share_changed_buffers(self) -> None:
        """Give all replicas the buffers that the caller has changed in the model since the last
        batch.
        """
        buffers = _get_buffers(self._buffer_keys)
        for i, (before, now) in enumerate(zip(self._left, _describe_buffers(buffers))):
            if now != before:
                buffer = buffers[i]
                for of_replica in self._buffers:
                    of_replica[i] = None if buffer is None else buffer.clone()
                self._buffers[0][i] = buffer
        self._left = []


class OuterOptimizer:
    """DiLoCo's outer optimizer: SGD on the weights w that the replicas last shared.

    Each round synchronizes one fragment of the weights (Streaming DiLoCo, Douillard et al. 2025;
    with one fragment DiLoCo, Douillard et al. 2023):

        [1] `delay` steps before the round's end    replica r: delta_r = w - w_r
        [2] at its end                              w <- SGD(w, mean over r of delta_r)
        [3]                                         replica r: w_r <- w + mix (w_r - w)
    """

    def __init__(
        self, settings: Outer, fragments: Sequence[int], weights: Sequence[torch.Tensor]
    ) -> None:
        """`fragments`: the number of the fragment of each weight."""
        self.settings = settings
        self._fragments = fragments
        self.shared = [nn.Parameter(w.clone()) for w in weights]
        self.sgd = torch.optim.SGD(
            [{"params": self.shared}], settings.lr, settings.momentum, nesterov=settings.nesterov
        )
        # the deltas of [1] by replica
        self._deltas: dict[int, list[torch.Tensor]] = {}

    def list_fragment(self, work: Work, step: int) -> list[int]:
        """Return the indices of the weights of the fragment that the round of `step`
        synchronizes.
        """
        stages = work.schedule.stages
        rounds = work.method.rounds
        assert rounds is not None
        turn = (work.schedule.get_drain_interval(step)[1] - 1) // rounds.interval(
            stages
        ) + self.settings.offset
        turn %= self.settings.count_fragments(stages)
        return [i for i, fragment in enumerate(self._fragments) if fragment == turn]

    def compute_deltas(
        self, replica: int, indices: Sequence[int], weights: Sequence[torch.Tensor]
    ) -> None:
        """Carry out [1] for a replica with these weights; `indices`: the result of
        `list_fragment`.
        """
        self._deltas[replica] = [self.shared[i].detach() - weights[i] for i in indices]

    def synchronize(
        self, indices: Sequence[int], weights: Sequence[Sequence[torch.Tensor]]
    ) -> None:
        """Carry out [2] and [3] for the weights of each replica, and [1] if the round was too short
        to have done it.
        """
        for replica, replica_weights in enumerate(weights):
            if replica not in self._deltas:
                self.compute_deltas(replica, indices, replica_weights)
        for i, *deltas in zip(indices, *(self._deltas[replica] for replica in range(len(weights)))):
            self.shared[i].grad = functools.reduce(torch.add, deltas) / len(deltas)
        self.sgd.step()
        # with a gradient of zeros, momentum would move the fragments whose round it is not
        self.sgd.zero_grad(set_to_none=True)
        for replica_weights in weights:
            for i in indices:
                # in place: the parameters of the replica that is in the model are these tensors
                replica_weights[i].copy_(self.shared[i].lerp(replica_weights[i], self.settings.mix))
        self._deltas.clear()


class IndependentReplicas:
    """`count` replicas that have their own weights, optimizer state and buffers between two
    averagings (LocalSGD).

    At the end of a round weights, velocities, moments and running statistics are averaged, stage by
    stage; tensors that are not floating point (counters) are taken from the first replica. So all
    replicas are equal after a round, and a checkpoint taken there holds one of them. With an
    `outer` optimizer only running statistics are averaged, the outer optimizer computes the
    weights, and a checkpoint holds all replicas: the first in the usual place, the others and
    `outer` as entries of the optimizer's state.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Sequence[nn.Parameter],
        optimizer: torch.optim.Optimizer,
        count: int,
        outer: Outer | None = None,
        fragments: Sequence[int] = (),
        stages: Sequence[int] = (),
    ) -> None:
        """`parameters`: the trained parameters; `model`: the module with the buffers; `fragments`:
        one number per parameter.
        """
        self.count = count
        self._current = 0
        self._stages = stages
        self._parameters = list(parameters)
        self._buffer_keys = _list_buffers(model)
        self._optimizer_state = optimizer.state
        # before the state is copied, so that no replica gets the entries of another
        entries = [self._take_entries(p) for p in self._parameters]
        self._weights = [[p.data for p in self._parameters]]
        self._states: list[dict[Any, dict[str, Any]]] = [self._get_states()]
        self._buffers = [_get_buffers(self._buffer_keys)]
        for _ in range(1, count):
            self._weights.append([w.clone() for w in self._weights[0]])
            self._states.append({p: copy.deepcopy(state) for p, state in self._states[0].items()})
            self._buffers.append([None if b is None else b.clone() for b in self._buffers[0]])
        self._outer = (
            OuterOptimizer(outer, fragments, self._weights[0]) if outer is not None else None
        )
        # last, because it overwrites the copies of the first replica
        self._restore(entries)

    @classmethod
    def create(
        cls, work: Work, model: nn.Module, stages: Sequence[int]
    ) -> IndependentReplicas | None:
        """Return the replicas of `stages`, whose module is `model`; None if the job has no such
        replicas.
        """
        if work.method.rounds is None:
            return None
        outer = work.method.rounds.outer
        count = work.schedule.stages
        updated = work.rules.stages
        parameters = [
            (stage, p) for stage in stages if stage in updated for p in updated[stage].parameters
        ]
        groups = outer.count_fragments(count) if outer is not None else 1
        fragments = [stage * groups // count for stage, _ in parameters]
        return cls(
            model,
            [p for _, p in parameters],
            work.rules.optimizer,
            work.schedule.accumulate,
            outer,
            fragments,
            stages,
        )

    # ---- checkpoints of replicas that differ

    def _take_entries(self, p: nn.Parameter) -> dict[str, Any]:
        """Remove the entries of replicas and of the outer optimizer from a parameter's state and
        return them.
        """
        # the state is a defaultdict, in which looking adds an empty entry
        state = self._optimizer_state[p] if p in self._optimizer_state else {}
        return {key: state.pop(key) for key in [key for key in state if _ENTRY.match(key)]}

    def _restore(self, entries: Sequence[dict[str, Any]]) -> None:
        """Set the other replicas and the outer optimizer to the entries of a checkpoint, one dict
        per parameter.
        """
        for i, (p, saved_entries) in enumerate(zip(self._parameters, entries)):
            for owner, weight, state in self._list_owners(i, p):
                for key in [key for key in saved_entries if key.startswith(f"{owner}.")]:
                    entry = key[len(owner) + 1 :]
                    value = saved_entries[key]
                    if entry == WEIGHT:
                        weight.copy_(value)
                    else:
                        state[entry] = value

    def _list_owners(
        self, i: int, p: nn.Parameter
    ) -> list[tuple[str, torch.Tensor, dict[str, Any]]]:
        """List (owner, weight, optimizer state) of parameter i for the outer optimizer and for all
        replicas but the first.
        """
        if self._outer is None:
            return []
        shared = self._outer.shared[i]
        others = [
            (f"{REPLICA}{r}", self._weights[r][i], self._states[r].setdefault(p, {}))
            for r in range(1, self.count)
        ]
        return [(OUTER, shared.data, self._outer.sgd.state[shared]), *others]

    @contextlib.contextmanager
    def export_replicas(self) -> Iterator[None]:
        """Hold the other replicas and the outer optimizer in the optimizer's state inside the
        context, between two rounds.
        """
        for i, p in enumerate(self._parameters):
            for owner, weight, state in self._list_owners(i, p):
                # older versions of SGD store a velocity of None if there is no momentum
                entries = {
                    f"{owner}.{key}": value for key, value in state.items() if value is not None
                }
                self._optimizer_state[p].update({f"{owner}.{WEIGHT}": weight, **entries})
        yield
        for p in self._parameters:
            self._take_entries(p)

    def enter(self, replica: int) -> None:
        """Replace the replica in the model and the optimizer by another one."""
        if replica == self._current:
            return
        self._save()
        self._current = replica
        for p, w in zip(self._parameters, self._weights[replica]):
            p.data = w
        for p in self._parameters:
            # a replica that has not stepped has no state, and must not find another one's
            self._optimizer_state.pop(p, None)
        self._optimizer_state.update(self._states[replica])
        _set_buffers(self._buffer_keys, self._buffers[replica])

    def _get_states(self) -> dict[Any, dict[str, Any]]:
        return {p: self._optimizer_state[p] for p in self._parameters if p in self._optimizer_state}

    def _save(self) -> None:
        """Store the weights, state and buffers of the replica that is in the model and the
        optimizer.
        """
        self._weights[self._current] = [p.data for p in self._parameters]
        self._states[self._current] = self._get_states()
        self._buffers[self._current] = _get_buffers(self._buffer_keys)

    def end_replica_step(self, work: Work, step: int) -> None:
        """Give the model's weights to the outer optimizer if `step` is `delay` steps before the end
        of its round.

        The replica in the model has just done the step, as `after_update` is told.
        """
        work.rules.after_update(step, self._stages, False)
        if (
            self._outer is not None
            and work.schedule.get_drain_interval(step)[1] - self._outer.settings.delay == step + 1
        ):
            weights = [p.data for p in self._parameters]
            self._outer.compute_deltas(
                self._current, self._outer.list_fragment(work, step), weights
            )

    def end_step(self, work: Work, step: int) -> None:
        """Average the replicas, in their order, or apply the outer optimizer, at the last step of a
        round; else do nothing.

        All replicas have done the step. The first one is in the model afterwards, as `after_update`
        is told.
        """
        if work.schedule.get_drain_interval(step)[1] != step + 1:
            return
        self._save()
        with torch.no_grad():
            if self._outer is not None:
                self._outer.synchronize(self._outer.list_fragment(work, step), self._weights)
            else:
                for tensors in zip(*self._weights):
                    _average(tensors)
                self._average_states()
            for buffers in zip(*self._buffers):
                _average(buffers)
        self.enter(0)
        work.rules.after_update(step, self._stages, True)

    def _average_states(self) -> None:
        """Average the optimizer's state over the replicas that have it.

        A replica has none of a weight that no gradient has reached there; it gets the average.
        """
        for p in self._parameters:
            entries = [states[p] for states in self._states if p in states]
            for key in dict.fromkeys(key for entry in entries for key in entry):
                values = [entry[key] for entry in entries if key in entry]
                _average(values)
                for states in self._states:
                    states.setdefault(p, {}).setdefault(key, copy.deepcopy(values[0]))
        # the replica that is in the optimizer is saved from there when the next one enters
        self._optimizer_state.update(self._states[self._current])

    def list_other_states(self) -> list[Mapping[Any, Mapping[str, Any]]]:
        """List by parameter the optimizer state of replicas that are not in the model, and the
        weights and state of `outer`.
        """
        others: list[Mapping[Any, Mapping[str, Any]]] = [
            s for r, s in enumerate(self._states) if r != self._current
        ]
        if self._outer is not None:
            state = self._outer.sgd.state
            pairs = zip(self._parameters, self._outer.shared)
            others.append({p: {WEIGHT: w, **state.get(w, {})} for p, w in pairs})
        return others

    @property
    def held_bytes(self) -> int:
        """Count the bytes of the weights of the replicas that are not in the model."""
        return sum(w.numel() * w.element_size() for w in self._weights[0]) * (self.count - 1)


def _average(values: Sequence[Any]) -> None:
    """Write the mean of floating-point tensors into each of them, or the first of other tensors;
    ignore other values.
    """
    if not isinstance(values[0], torch.Tensor) or len(values) == 1:
        return
    total = values[0].clone()
    if total.is_floating_point():
        for other in values[1:]:
            total += other
        total /= len(values)
    for tensor in values:
        tensor.copy_(total)
