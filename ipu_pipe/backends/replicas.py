"""Replicas of a pipeline on one model, one after another: each with gradients, or with weights, of its own."""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Sequence

import torch
from torch import nn

from ipu_pipe.backends.work import Work


class IndependentReplicas:
    """What each replica has for itself between two averagings: trained weights, the optimizer's state and buffers.

    All of it is averaged, stage by stage: velocities and moments like the weights that they belong to, running statistics too;
    what is no real number (counters) is the first replica's. So replicas are alike after each round, and a checkpoint taken
    there holds one of them.
    """

    def __init__(
        self, model: nn.Module, parameters: Sequence[nn.Parameter], optimizer: torch.optim.Optimizer, count: int
    ) -> None:
        """`parameters`: those that the optimizer trains; `model`: whose buffers."""
        self.count, self._inside = count, 0
        self._parameters = list(parameters)
        self._places = [(module, name) for module in model.modules() for name in module._buffers]
        self._optimizer_state = optimizer.state
        self._weights = [[p.data for p in self._parameters]]
        self._states: List[Dict[Any, Dict[str, Any]]] = [dict(optimizer.state)]
        self._buffers = [[module._buffers[name] for module, name in self._places]]
        for _ in range(1, count):
            self._weights.append([w.clone() for w in self._weights[0]])
            self._states.append({p: {key: _copy(v) for key, v in own.items()} for p, own in self._states[0].items()})
            self._buffers.append([None if b is None else b.clone() for b in self._buffers[0]])

    def enter(self, replica: int) -> None:
        """Put a replica's into the model and the optimizer, in place of what is there."""
        if replica == self._inside:
            return
        self._keep()
        self._inside = replica
        for p, w in zip(self._parameters, self._weights[replica]):
            p.data = w
        self._optimizer_state.clear()
        self._optimizer_state.update(self._states[replica])
        for (module, name), buffer in zip(self._places, self._buffers[replica]):
            module._buffers[name] = buffer

    def _keep(self) -> None:
        """What the model and the optimizer hold now is the replica's that is inside."""
        self._weights[self._inside] = [p.data for p in self._parameters]
        self._states[self._inside] = dict(self._optimizer_state)
        self._buffers[self._inside] = [module._buffers[name] for module, name in self._places]

    def average(self) -> None:
        """The barrier: every replica has the mean of all, added up in their order. The first is in the model then."""
        self._keep()
        with torch.no_grad():
            for held in zip(*self._weights):
                average(held)
            for held in zip(*self._buffers):
                average(held)
            for p, own in self._states[0].items():
                for key in own:
                    average([state[p][key] for state in self._states])
        self.enter(0)

    @classmethod
    def of(cls, work: Work, model: nn.Module) -> Optional[IndependentReplicas]:
        """Those of a job's replicas of the stages that are here, where it has such."""
        if work.method.rounds is None:
            return None
        held = [p for stage in work.rules.stages.values() for p in stage.parameters]
        return cls(model, held, work.rules.optimizer, work.schedule.accumulate)

    def end_step(self, work: Work, step: int) -> None:
        """All replicas have done a step; the last of a round ends with the barrier."""
        if work.schedule.stretch(step)[1] == step + 1:
            self.average()

    @property
    def held_bytes(self) -> int:
        """Of the weights that are not in the model."""
        return sum(w.numel() * w.element_size() for w in self._weights[0]) * (self.count - 1)


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def average(held: Any) -> None:
    """Write the mean of tensors of real numbers into each; of others, the first. What is no tensor is left."""
    if not isinstance(held[0], torch.Tensor) or len(held) == 1:
        return
    total = held[0].clone()
    if total.is_floating_point():
        for other in held[1:]:
            total += other
        total /= len(held)
    for own in held:
        own.copy_(total)


class GradientReplicas:
    """What replicas of a pipeline do not share: gradients until they are averaged, and buffers (running statistics), of which
    those of the first are the model's."""

    def __init__(self, model: nn.Module, parameters: Sequence[nn.Parameter], count: int) -> None:
        """`parameters`: those that the optimizer trains."""
        self.count = count
        self._parameters = list(parameters)
        self._gradients: List[List[Optional[torch.Tensor]]] = [[None] * len(self._parameters) for _ in range(count)]
        self._places = [(module, name) for module in model.modules() for name in module._buffers]
        own = [module._buffers[name] for module, name in self._places]
        self._buffers = [own] + [[None if b is None else b.clone() for b in own] for _ in range(count - 1)]

    def enter(self, replica: int) -> None:
        """Put a replica's gradients and buffers into the model."""
        for p, gradient in zip(self._parameters, self._gradients[replica]):
            p.grad = gradient
        self._bind(replica)

    def _bind(self, replica: int) -> None:
        for (module, name), buffer in zip(self._places, self._buffers[replica]):
            module._buffers[name] = buffer

    def leave(self, replica: int) -> None:
        """Take them out again."""
        self._gradients[replica] = [p.grad for p in self._parameters]
        self._buffers[replica] = [module._buffers[name] for module, name in self._places]

    def average(self) -> None:
        """The mean of all gradients into the parameters, the first replica's buffers into the model."""
        for i, p in enumerate(self._parameters):
            given = [g for g in (gradients[i] for gradients in self._gradients) if g is not None]
            total = given[0] if given else None
            for g in given[1:]:
                total = total + g  # type: ignore[operator]
            p.grad = None if total is None else total / self.count
        self._gradients = [[None] * len(self._parameters) for _ in range(self.count)]
        self._bind(0)
