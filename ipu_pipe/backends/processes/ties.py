"""Tied weights, which several stages use: the first such stage holds the weight and its optimizer
state, the others a copy.

    stage    0, holds w             2                      5
    B(m)                                                   h5        the gradient of its own backward
                                    h5 + h2     <---------           adds its own to the received gradient, as autograd would
             (h5 + h2) + h0   <---------
    U(k)     w of version k + 1 -------------------------------->    arrives before a forward reads it

All stages read one version for a microbatch (`schedule.methods.Method.one_version`), so the sum
equals the gradient of the whole model bit for bit. Two stages exchange all their tied weights in
one message.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Iterator, List, Mapping, Sequence

import torch
from torch import nn

from ipu_pipe.backends.processes.layout import find_tied_weights
from ipu_pipe.backends.processes.mail import TIED, WEIGHTS, Link, Mail, Message, Shapes
from ipu_pipe.backends.processes.split import WeightGradients
from ipu_pipe.cut.crossing import TensorSpec
from ipu_pipe.cut.cutting import Piece

Weights = List[nn.Parameter]


@dataclass(frozen=True)
class Ties:
    """The tied weights of a stage; each map goes from another stage to weights.

    `gradients_to`, `gradients_from`: the weights whose gradients it sends and receives.
    `copies_of`: its copies of weights that the other stage holds. `copied_to`: its own weights that
    the other stage copies. Two stages of one rank use the same tensor and need no copy. `links`:
    the links of all stages for tied weights, in the same order on every rank.
    """

    gradients_to: Mapping[int, Weights] = field(default_factory=dict)
    gradients_from: Mapping[int, Weights] = field(default_factory=dict)
    copies_of: Mapping[int, Weights] = field(default_factory=dict)
    copied_to: Mapping[int, Weights] = field(default_factory=dict)
    links: Sequence[Link] = ()

    def list_needs(self, kind: str) -> Iterator[tuple[int, Shapes]]:
        """Yield (source stage, shapes) of the messages of a backward (TIED) or after an update
        (WEIGHTS).
        """
        for source, weights in (self.gradients_from if kind == TIED else self.copies_of).items():
            yield source, tuple(TensorSpec(tuple(p.shape), p.dtype, False) for p in weights)


def find_ties(
    model: nn.Module,
    cut: Sequence[Piece],
    stage: int,
    placement: Sequence[int],
) -> Ties:
    """Return the tied weights of a stage of a cut model. `placement`: the device of each stage."""
    ties = Ties({}, {}, {}, {})
    links: dict[Link, None] = {}
    parameters = dict(model.named_parameters())
    for name, stages in find_tied_weights(cut).items():
        holder = stages[0]
        # a gradient goes from user to user: sums at the holder would have another order than
        # autograd's
        for previous_user, user in zip(stages, stages[1:]):
            links.update(dict.fromkeys([(user, previous_user, TIED), (holder, user, WEIGHTS)]))
            tables = [
                (user, previous_user, ties.gradients_to),
                (previous_user, user, ties.gradients_from),
            ]
            if placement[user] != placement[holder]:
                tables += [(user, holder, ties.copies_of), (holder, user, ties.copied_to)]
            for here, other, table in tables:
                if here == stage:
                    table.setdefault(other, []).append(parameters[name])  # type: ignore[attr-defined]
    return Ties(
        ties.gradients_to, ties.gradients_from, ties.copies_of, ties.copied_to, sorted(links)
    )


class TiedWeights:
    """Send and receive the tied weights of a stage and their gradients. `version`: the version of
    the copies now.

    `held_bytes`: the bytes of the copies' versions besides the loaded one; `peak_bytes`: their
    peak.
    """

    def __init__(self, ties: Ties, stage: int, mail: Mail, version: int) -> None:
        self._ties = ties
        self._stage = stage
        self._mail = mail
        self._copies = [p for weights in ties.copies_of.values() for p in weights]
        self._size = sum(p.numel() * p.element_size() for p in self._copies)
        # all ranks begin with the same weights (`agreement`)
        self._versions: dict[int, list[torch.Tensor]] = {version: [p.data for p in self._copies]}
        self._newest = self._loaded = version
        # the gradients of the newest backward, until they are sent
        self._gradients: list[torch.Tensor | None] = []
        self.held_bytes = self.peak_bytes = 0

    def load(self, version: int) -> None:
        """Put a version of the copies into the parameters; wait for it if it has not arrived."""
        if version == self._loaded or not self._copies:
            return
        # the holder sends every version, so each is received, even one that no pass here reads
        while self._newest < version:
            received = [
                self._mail.receive(Message(WEIGHTS, self._newest, source, self._stage))
                for source in self._ties.copies_of
            ]
            self._newest += 1
            self._versions[self._newest] = [tensor for tensors in received for tensor in tensors]
        # the caller may have given the parameters other tensors between two calls
        if self._loaded in self._versions:
            self._versions[self._loaded] = [p.data for p in self._copies]
        # by pointer: only the holder steps the weight
        for p, value in zip(self._copies, self._versions[version]):
            p.data = value
        self._loaded = version
        self._count_bytes()

    def release(self, oldest: int) -> None:
        """Drop the versions before `oldest`, which no later pass reads."""
        for version in [v for v in self._versions if v < oldest]:
            del self._versions[version]
        self._count_bytes()

    def _count_bytes(self) -> None:
        # the loaded version is the parameters' own memory
        self.held_bytes = self._size * (len(self._versions) - (self._loaded in self._versions))
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)

    def receive_gradients(self, m: int) -> list[tuple[nn.Parameter, torch.Tensor]]:
        """Return the nonzero gradients of tied weights from later stages' backwards of microbatch
        m.
        """
        received = [
            (p, gradient)
            for source, weights in self._ties.gradients_from.items()
            for p, gradient in zip(
                weights, self._mail.receive(Message(TIED, m, source, self._stage))
            )
        ]
        # zeros stand for no gradient, and adding them could turn None into a gradient
        return [(p, gradient) for p, gradient in received if bool(gradient.any())]

    @property
    def weights(self) -> list[nn.Parameter]:
        """The weights whose gradients the stage sends or receives."""
        tables = (self._ties.gradients_to, self._ties.gradients_from)
        return [p for table in tables for weights in table.values() for p in weights]

    def take_gradients(self, deferred: WeightGradients) -> None:
        """Take the gradients for earlier stages out of the result of a split backward."""
        self._gradients = [
            deferred.take(p) for weights in self._ties.gradients_to.values() for p in weights
        ]

    @contextlib.contextmanager
    def separate_gradients(self) -> Iterator[None]:
        """Keep the gradients of copied weights from the backward inside the context apart from
        those accumulated before.

        On one rank a copy and its holder are the same tensor, which already has accumulated
        gradients.
        """
        copies = [p for weights in self._ties.gradients_to.values() for p in weights]
        accumulated = [p.grad for p in copies]
        for p in copies:
            p.grad = None
        yield
        self._gradients = [p.grad for p in copies]
        for p, gradient in zip(copies, accumulated):
            p.grad = gradient

    def send_gradients(self, m: int) -> None:
        """Send the tied gradients of microbatch m's backward to earlier stages."""
        gradients = iter(self._gradients)
        for target, weights in self._ties.gradients_to.items():
            values = [
                # the receiver waits for a tensor of known shape; it takes zeros for no gradient
                torch.zeros_like(p) if gradient is None else gradient
                for p, gradient in zip(weights, gradients)
            ]
            self._mail.send(Message(TIED, m, self._stage, target), values)
        self._gradients = []

    def send_weights(self, k: int) -> None:
        """Send this stage's tied weights after update k to the stages with copies."""
        # without a copy: a version that is read is overwritten only after gradients that came of it
        for target, weights in self._ties.copied_to.items():
            self._mail.send(Message(WEIGHTS, k, self._stage, target), weights)
