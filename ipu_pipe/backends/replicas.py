"""Replicas of a pipeline on one model, one after another: each with gradients, or with weights, of its own."""

from __future__ import annotations

import copy
from typing import Any, Dict, List, Optional, Sequence, Tuple

import torch
from torch import nn

from ipu_pipe.backends.work import Work

Place = Tuple[nn.Module, str]  # of a buffer: its module and its name there


def _find_buffers(model: nn.Module) -> List[Place]:
    return [(module, name) for module in model.modules() for name in module._buffers]


def _get_buffers(places: Sequence[Place]) -> List[Optional[torch.Tensor]]:
    return [module._buffers[name] for module, name in places]


def _set_buffers(places: Sequence[Place], buffers: Sequence[Optional[torch.Tensor]]) -> None:
    for (module, name), buffer in zip(places, buffers):
        module._buffers[name] = buffer


class GradientReplicas:
    """`count` replicas that share the weights and average their gradients before each update.

    Each has gradients of its own until then, and buffers (running statistics) of its own, of which the first one's are the
    model's.
    """

    def __init__(self, model: nn.Module, parameters: Sequence[nn.Parameter], count: int) -> None:
        """`parameters`: those that the optimizer trains."""
        self.count, self._parameters, self._places = count, list(parameters), _find_buffers(model)
        self._gradients: List[List[Optional[torch.Tensor]]] = [[None] * len(self._parameters) for _ in range(count)]
        first = _get_buffers(self._places)
        self._buffers = [first] + [[None if b is None else b.clone() for b in first] for _ in range(count - 1)]

    def enter(self, replica: int) -> None:
        """Put a replica's gradients and buffers into the model."""
        for p, gradient in zip(self._parameters, self._gradients[replica]):
            p.grad = gradient
        _set_buffers(self._places, self._buffers[replica])

    def leave(self, replica: int) -> None:
        """Take a replica's gradients and buffers from the model."""
        self._gradients[replica] = [p.grad for p in self._parameters]
        self._buffers[replica] = _get_buffers(self._places)

    def average(self) -> None:
        """Put the mean of all gradients into the parameters, and the first replica's buffers into the model."""
        for i, p in enumerate(self._parameters):
            gradients = [g for g in (of_replica[i] for of_replica in self._gradients) if g is not None]
            total = gradients[0] if gradients else None
            for gradient in gradients[1:]:
                total = total + gradient  # type: ignore[operator]
            p.grad = None if total is None else total / self.count
        self._gradients = [[None] * len(self._parameters) for _ in range(self.count)]
        _set_buffers(self._places, self._buffers[0])


class IndependentReplicas:
    """`count` replicas with weights, optimizer state and buffers of their own between two averagings (LocalSGD).

    All of these are averaged, stage by stage: velocities and moments like the weights that they belong to, running statistics
    too; what is not a real number (counters) is the first replica's. So replicas are alike after each round, and a checkpoint
    taken there holds one of them.
    """

    def __init__(
        self, model: nn.Module, parameters: Sequence[nn.Parameter], optimizer: torch.optim.Optimizer, count: int
    ) -> None:
        """`parameters`: those that the optimizer trains; `model`: the module with the buffers."""
        self.count, self._entered = count, 0
        self._parameters, self._places = list(parameters), _find_buffers(model)
        self._optimizer_state = optimizer.state
        self._weights = [[p.data for p in self._parameters]]
        self._states: List[Dict[Any, Dict[str, Any]]] = [self._get_states()]
        self._buffers = [_get_buffers(self._places)]
        for _ in range(1, count):
            self._weights.append([w.clone() for w in self._weights[0]])
            self._states.append({p: copy.deepcopy(state) for p, state in self._states[0].items()})
            self._buffers.append([None if b is None else b.clone() for b in self._buffers[0]])

    @classmethod
    def create(cls, work: Work, model: nn.Module, stages: Sequence[int]) -> Optional[IndependentReplicas]:
        """Return the replicas of `stages`, whose module is `model`; None if the job has no such replicas."""
        if work.method.rounds is None:
            return None
        parameters = [p for stage in stages if stage in work.rules.stages for p in work.rules.stages[stage].parameters]
        return cls(model, parameters, work.rules.optimizer, work.schedule.accumulate)

    def enter(self, replica: int) -> None:
        """Put a replica into the model and the optimizer, in place of the one that is there."""
        if replica == self._entered:
            return
        self._save()
        self._entered = replica
        for p, w in zip(self._parameters, self._weights[replica]):
            p.data = w
        for p in self._parameters:
            self._optimizer_state.pop(p, None)
        self._optimizer_state.update(self._states[replica])
        _set_buffers(self._places, self._buffers[replica])

    def _get_states(self) -> Dict[Any, Dict[str, Any]]:
        return {p: self._optimizer_state[p] for p in self._parameters if p in self._optimizer_state}

    def _save(self) -> None:
        """Keep what the model and the optimizer hold now for the replica that is in them."""
        self._weights[self._entered] = [p.data for p in self._parameters]
        self._states[self._entered] = self._get_states()
        self._buffers[self._entered] = _get_buffers(self._places)

    def end_step(self, work: Work, step: int) -> None:
        """Give every replica the mean of all, added up in their order, and put the first into the model.

        Do nothing unless the step, which all have done, is the last of a round.
        """
        if work.schedule.stretch(step)[1] != step + 1:
            return
        self._save()
        with torch.no_grad():
            for tensors in (*zip(*self._weights), *zip(*self._buffers)):
                _average(tensors)
            for p, state in self._states[0].items():
                for key in state:
                    _average([of_replica[p][key] for of_replica in self._states])
        self.enter(0)

    @property
    def held_bytes(self) -> int:
        """Bytes of the weights that are not in the model."""
        return sum(w.numel() * w.element_size() for w in self._weights[0]) * (self.count - 1)


def _average(values: Sequence[Any]) -> None:
    """Write the mean of tensors of real numbers into each of them, of other tensors the first; leave what is not a tensor."""
    if not isinstance(values[0], torch.Tensor) or len(values) == 1:
        return
    total = values[0].clone()
    if total.is_floating_point():
        for other in values[1:]:
            total += other
        total /= len(values)
    for tensor in values:
        tensor.copy_(total)
