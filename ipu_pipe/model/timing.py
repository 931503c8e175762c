"""Measure the seconds of the parts of a model's passes, on the model's device.

A hook marks the beginning of a part in the forward; hooks on autograd nodes mark it in the
backward.
"""

from __future__ import annotations

import bisect
import contextlib
import math
import statistics
import time
from typing import Any, Callable, Mapping, NamedTuple, Sequence

import torch
from torch import nn

from ipu_pipe.model.devices import DeviceKind, find_kind
from ipu_pipe.model.restoring import restore_all


class PassSeconds(NamedTuple):
    """The seconds of each part of a microbatch, forward and backward: medians of `repeats`
    passes.
    """

    forward: list[float]
    backward: list[float]
    repeats: int


class StageSeconds(NamedTuple):
    """The seconds of each stage's passes of a microbatch and of its part of an update, measured one
    after another on this machine.

    `how` describes the measurement. If nothing was measured, `forward` is empty and `how` gives the
    reason.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    update: tuple[float, ...]
    how: str


REPEATS = 3


def time_passes(
    model: nn.Module,
    losses: Callable[[], Sequence[torch.Tensor]],
    begins: Mapping[str, int],
    backward_flops: Sequence[float],
    repeats: int = REPEATS,
    warm_up: int = 0,
    enough: float = math.inf,
) -> PassSeconds:
    """Time forwards, `losses()`, and their backwards: `repeats` after `warm_up` passes, stopping
    after `enough` seconds.

    The model is left as it was. begins: module -> the part that begins when it first runs. Parts
    run in order; the loss belongs to the last part. backward_flops: FLOPs of each part, by which
    the backward's time is divided if PyTorch does not number its autograd nodes (2.0).
    """
    kind = find_kind(model.parameters())
    runs: list[tuple[list[float], list[float]]] = []
    began = time.perf_counter()
    with restore_all(model):
        while len(runs) < warm_up + repeats and (not runs or time.perf_counter() - began < enough):
            runs.append(_time_pass(model, losses, begins, backward_flops, kind))
    forward, backward = (
        [statistics.median(parts) for parts in zip(*way)] for way in zip(*runs[warm_up:])
    )
    return PassSeconds(forward, backward, len(runs) - warm_up)


def _time_pass(
    model: nn.Module,
    losses: Callable[[], Sequence[torch.Tensor]],
    begins: Mapping[str, int],
    backward_flops: Sequence[float],
    kind: DeviceKind,
) -> tuple[list[float], list[float]]:
    parts = len(backward_flops)
    clock = _Clock(parts, kind)
    next_node = getattr(torch._C._autograd, "_get_sequence_nr", None)
    # (the first autograd node of a part, the part)
    nodes: list[tuple[int, int]] = [(-1, 0)]

    def enter(part: int) -> None:
        if part > nodes[-1][1]:
            clock.enter(part)
            nodes.append((next_node() if next_node is not None else 0, part))

    with contextlib.ExitStack() as hooks:
        for name, part in begins.items():
            module = model.get_submodule(name)
            hooks.enter_context(module.register_forward_pre_hook(lambda *_, part=part: enter(part)))  # type: ignore[misc]
        clock.enter(0)
        values = [value for value in losses() if value.grad_fn is not None]
        forward = clock.leave()
    if next_node is not None:
        numbers = [number for number, _ in nodes]
        _hook_nodes(
            [value.grad_fn for value in values],
            clock,
            lambda node: nodes[bisect.bisect_right(numbers, node) - 1][1],
        )
    start = time.perf_counter()
    clock.enter(parts - 1)
    if values:
        torch.autograd.backward(values)
    backward = clock.leave()
    if next_node is None:
        share = (time.perf_counter() - start) / (sum(backward_flops) or 1.0)
        backward = [share * flops for flops in backward_flops]
    return forward, backward


def _hook_nodes(roots: Sequence[Any], clock: _Clock, part_of: Callable[[int], int]) -> None:
    """Make the clock count each computing autograd node of the graph of `roots` for the node's
    part.

    The time of a node begins at the end of the previous one, so hooks on tensors count for their
    node. Adding up gradients counts for the node that made them.
    """
    todo = list(roots)
    seen = set(roots)
    while todo:
        node = todo.pop()
        # a node without next functions only accumulates the gradient of a leaf
        if node.next_functions:
            part = part_of(node._sequence_nr())
            node.register_prehook(lambda gradients, part=part: clock.set_part(part))
            node.register_hook(lambda given, gradients: clock.count())
        others = [
            other for other, _ in node.next_functions if other is not None and other not in seen
        ]
        seen.update(others)
        todo += others


class _Clock:
    """A clock for parts that run one at a time; it waits for a device of `kind` before it is
    read.
    """

    def __init__(self, parts: int, kind: DeviceKind) -> None:
        self._seconds = [0.0] * parts
        self._part = 0
        self._since = 0.0
        self._kind = kind

    def enter(self, part: int) -> None:
        """Count time for this part from now on."""
        if part != self._part or not self._since:
            self._stop()
            self._part = part
            self._since = time.perf_counter()

    def set_part(self, part: int) -> None:
        """Count the time since the last count and the time from now on for this part."""
        self._part = part

    def count(self) -> None:
        """Count the time since the last count for the current part."""
        self._stop()
        self._since = time.perf_counter()

    def leave(self) -> list[float]:
        """Return the seconds of all parts and start again from zero."""
        self._stop()
        seconds = self._seconds
        self._seconds = [0.0] * len(self._seconds)
        self._since = 0.0
        return seconds

    def _stop(self) -> None:
        self._kind.synchronize()
        if self._since:
            self._seconds[self._part] += time.perf_counter() - self._since
