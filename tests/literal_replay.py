"""The definition that the emulator is held against: the schedule carried out slot by slot, stage by stage, slowly.

Every stage is a module of its own with its own parameters, optimizer and inbox. Nothing here knows of versions by number:
a stage has weights *now*, it stashes what its method says, and the slots alone decide what is newest when.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Sequence, Tuple

import torch
from torch import nn
from torch.func import functional_call

from ipu_pipe.methods import Method
from ipu_pipe.schedule import Kind, Schedule

Batch = Tuple[torch.Tensor, torch.Tensor]


class LiteralStage:
    """One stage: weights in memory, one graph a microbatch in flight, an optimizer of its own."""

    def __init__(self, module: nn.Module, make_optimizer: Callable[[List[nn.Parameter]], Any]) -> None:
        self.module = module
        self.parameters = dict(module.named_parameters())
        self.optimizer = make_optimizer(list(self.parameters.values())) if self.parameters else None
        self.history = [self._now()]  # weights after 0, 1, 2, ... updates of this stage
        self.in_flight: Dict[int, Any] = {}

    def _now(self) -> Dict[str, torch.Tensor]:
        return {name: p.detach().clone() for name, p in self.parameters.items()}

    def forward(
        self, m: int, inputs: Sequence[torch.Tensor], weights: Dict[str, torch.Tensor]
    ) -> Tuple[torch.Tensor, ...]:
        read = {name: w.clone().requires_grad_() for name, w in weights.items()}
        received = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in inputs]
        outputs = functional_call(self.module, read, (received[0] if len(received) == 1 else tuple(received),))
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        self.in_flight[m] = (read, received, outputs)
        return outputs

    def backward(self, m: int, outputs: Sequence[torch.Tensor], gradients: Sequence[Any], newest: bool) -> List[Any]:
        read, received, _ = self.in_flight.pop(m)
        if newest:  # the backward finds in memory what the stage holds now
            for name, w in read.items():
                w.data.copy_(self.parameters[name].data)
        pairs = [(o, g) for o, g in zip(outputs, gradients) if o.requires_grad]
        torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])
        for name, p in self.parameters.items():
            if read[name].grad is not None:
                p.grad = read[name].grad.clone() if p.grad is None else p.grad + read[name].grad
        return [x.grad for x in received]

    def update(self) -> None:
        if self.optimizer:
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.history.append(self._now())


def replay(
    stages: List[LiteralStage],
    schedule: Schedule,
    method: Method,
    batches: Sequence[Batch],
    loss: Callable[[Any, Any], torch.Tensor],
    drains: Sequence[int] = (),
) -> None:
    """Carry out `schedule` on `stages`: in each slot every stage does its forward, then its backward, then its update.

    2BW reads one version behind its batch's; at the start and after each of the `drains` (microbatches) there is but one.
    """
    last, accumulate = len(stages) - 1, schedule.accumulate
    count = schedule.microbatches
    forwards = _by_slot(schedule.slots(Kind.FORWARD, 0, count))
    backwards = _by_slot(schedule.slots(Kind.BACKWARD, 0, count))
    activations: Dict[Tuple[int, int], Sequence[torch.Tensor]] = {(0, m): (x,) for m, (x, _) in enumerate(batches)}
    gradients: Dict[Tuple[int, int], Sequence[Any]] = {}
    for slot in range(schedule.slot_count):
        sent: List[Any] = []  # arrives when the slot is over
        for s, stage in enumerate(stages):
            m = forwards.get((slot, s))
            if m is not None:
                weights = stage.history[-1]
                if method.forward_reads == "double_buffered" and last:
                    begin = max([0, *[drain for drain in drains if drain <= m]]) // accumulate
                    weights = stage.history[max(m // accumulate - 1, begin)]
                outputs = stage.forward(m, activations.pop((s, m)), weights)
                sent.append((activations, (s + 1, m), outputs))
            m = backwards.get((slot, s))
            if m is not None:
                outputs = stage.in_flight[m][2]
                grads: Sequence[Any] = [None]
                if s == last:
                    outputs = (loss(outputs[0], batches[m][1]) / accumulate,)
                else:
                    grads = gradients.pop((s, m))
                back = stage.backward(m, outputs, grads, newest=method.backward_reads == "newest")
                sent.append((gradients, (s - 1, m), back))
                if (m + 1) % accumulate == 0:
                    stage.update()
        for box, key, tensors in sent:
            box[key] = tensors


def _by_slot(slots: Any) -> Dict[Tuple[int, int], int]:
    return {(int(slot), s): m for s, row in enumerate(slots.tolist()) for m, slot in enumerate(row)}
