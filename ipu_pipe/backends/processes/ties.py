"""Weights that several stages use: the first of these holds the weight and its optimizer state, the others have a replica.

    stage    0, holds w             2                      5
    B(m)                                                   h5        of its own pass, sent on
                                    h5 + h2     <---------           begun with what came, so in the order of autograd
             (h5 + h2) + h0   <---------
    U(k)     w of version k + 1 -------------------------------->    each time, before a forward there reads it

All stages read one version of a microbatch (`schedule.methods.Method.one_version`), so the sum is that of the whole model's
backward, to the last bit. Shapes stand for what is exchanged: one message of all weights between two stages.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Dict, Iterator, List, Mapping, Sequence, Tuple

import torch
from torch import nn

from ipu_pipe.backends.processes.channels import Link
from ipu_pipe.backends.processes.mail import TIED, WEIGHTS, Mail, Message
from ipu_pipe.model.cutting import Piece, Shape

Weights = List[nn.Parameter]
Gradients = List[Tuple[nn.Parameter, torch.Tensor]]


@dataclass(frozen=True)
class Ties:
    """Of one stage, by other stages: weights whose gradients it `gives` them, and `takes` from them; replicas that it has of
    theirs (`held_by`), and they of its own (`copied_to`). `links`: between all stages, in an order that is the same on each."""

    gives: Mapping[int, Weights] = field(default_factory=dict)
    takes: Mapping[int, Weights] = field(default_factory=dict)
    held_by: Mapping[int, Weights] = field(default_factory=dict)
    copied_to: Mapping[int, Weights] = field(default_factory=dict)
    links: Sequence[Link] = ()

    def wanted(self, kind: str, index: int) -> Iterator[Tuple[int, Message, Tuple[Shape, ...]]]:
        """The messages with gradients that a backward needs, or with weights that come after an update, and their sources."""
        for source, weights in (self.takes if kind == TIED else self.held_by).items():
            yield source, Message(kind, index), tuple(Shape(tuple(p.shape), p.dtype, False) for p in weights)


def users(cut: Sequence[Piece]) -> Dict[str, List[int]]:
    """The stages that use each weight that several do, ascending."""
    found: Dict[str, List[int]] = {}
    for stage, piece in enumerate(cut):
        for name in piece.weights():
            found.setdefault(name, []).append(stage)
    return {name: stages for name, stages in found.items() if len(stages) > 1}


def ties_of(model: nn.Module, cut: Sequence[Piece], stage: int) -> Ties:
    """Those of a stage of a model that is cut."""
    gives: Dict[int, Weights] = {}
    takes: Dict[int, Weights] = {}
    held_by: Dict[int, Weights] = {}
    copied_to: Dict[int, Weights] = {}
    links: Dict[Link, None] = {}
    parameters = dict(model.named_parameters())
    for name, stages in users(cut).items():
        weight, holder = parameters[name], stages[0]
        for before, user in zip(stages, stages[1:]):
            links.update(dict.fromkeys([(user, before, TIED), (holder, user, WEIGHTS)]))
            for own, other, into in (
                (user, before, gives),
                (before, user, takes),
                (user, holder, held_by),
                (holder, user, copied_to),
            ):
                if own == stage:
                    into.setdefault(other, []).append(weight)
    return Ties(gives, takes, held_by, copied_to, sorted(links))


class Tied:
    """What a stage's passes and updates do for the weights that it shares. `version`: that of the replicas now."""

    def __init__(self, ties: Ties, mail: Mail, version: int) -> None:
        self._ties, self._mail = ties, mail
        self._replicas = [p for weights in ties.held_by.values() for p in weights]
        self._size = sum(p.numel() * p.element_size() for p in self._replicas)
        self._held: Dict[int, List[torch.Tensor]] = {version: [p.data for p in self._replicas]}
        self._newest = self._loaded = version
        self.peak_bytes = 0

    @property
    def held_bytes(self) -> int:
        """In versions of replicas besides the one that is in the parameters."""
        return self._size * (len(self._held) - (self._loaded in self._held))

    def load(self, version: int) -> None:
        """Put a version of the replicas, waited for if need be, into the parameters."""
        if version == self._loaded or not self._replicas:
            return
        while self._newest < version:
            came = [self._mail.receive(source, Message(WEIGHTS, self._newest)) for source in self._ties.held_by]
            self._newest += 1
            self._held[self._newest] = [tensor for tensors in came for tensor in tensors]
        for p, value in zip(self._replicas, self._held[version]):
            p.data = value
        self._loaded = version
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)

    def release(self, oldest: int) -> None:
        """Versions before `oldest` are not read any more."""
        for version in [v for v in self._held if v < oldest]:
            del self._held[version]

    def came(self, m: int) -> Gradients:
        """What later stages' backwards of microbatch m have of weights that are here, too, where any is there."""
        found = [
            (p, gradient)
            for source, weights in self._ties.takes.items()
            for p, gradient in zip(weights, self._mail.receive(source, Message(TIED, m)))
        ]
        return [(p, gradient) for p, gradient in found if bool(gradient.any())]

    def give(self, m: int) -> None:
        """Send the gradients that the backward of microbatch m has left for stages before."""
        for target, weights in self._ties.gives.items():
            gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in weights]
            for p in weights:
                p.grad = None
            self._mail.send(target, Message(TIED, m), gradients)

    def copy(self, k: int) -> None:
        """Send what update k has made of the weights held here."""
        for target, weights in self._ties.copied_to.items():
            self._mail.send(target, Message(WEIGHTS, k), weights)
