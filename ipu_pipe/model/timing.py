"""Seconds of the parts of a model's passes, measured on the device where the model is.

A hook marks where a part begins in the forward, hooks on autograd nodes where it begins in the backward.
"""

from __future__ import annotations

import bisect
import statistics
import time
from typing import Any, Callable, List, Mapping, NamedTuple, Sequence, Tuple

import torch
from torch import nn


class PassSeconds(NamedTuple):
    """Seconds of each part, forward and backward, of one microbatch, and of the whole backward. `backward` is empty where PyTorch
    does not number its autograd nodes (2.0)."""

    forward: List[float]
    backward: List[float]
    whole_backward: float


class StageSeconds(NamedTuple):
    """Seconds of each stage's passes of a microbatch and of its part of an update, measured on this machine, which did them one
    after another. `forward` is empty if nothing was measured, and `how` says why."""

    forward: Tuple[float, ...]
    backward: Tuple[float, ...]
    update: Tuple[float, ...]
    how: str


def take_median(runs: Sequence[PassSeconds]) -> PassSeconds:
    """Return the median of each part over some runs."""
    forward, backward = ([statistics.median(values) for values in zip(*(run[way] for run in runs))] for way in (0, 1))
    return PassSeconds(forward, backward, statistics.median(run.whole_backward for run in runs))


def time_passes(
    model: nn.Module, losses: Callable[[], Sequence[torch.Tensor]], begins: Mapping[str, int], parts: int, on_gpu: bool
) -> PassSeconds:
    """Time one forward, `losses()`, and its backward. Gradients are added to the parameters'.

    begins: module -> the part that begins when it first runs; parts run in order, and what follows the model is the last one's.
    """
    clock = _Clock(parts, on_gpu)
    next_node = getattr(torch._C._autograd, "_get_sequence_nr", None)
    nodes: List[Tuple[int, int]] = [(-1, 0)]  # the first autograd node of a part, and the part
    handles = []
    for name, part in begins.items():

        def enter(module: nn.Module, inputs: Any, part: int = part) -> None:
            if part > nodes[-1][1]:  # its first run
                clock.enter(part)
                nodes.append((next_node() if next_node is not None else 0, part))

        handles.append(model.get_submodule(name).register_forward_pre_hook(enter))
    try:
        clock.enter(0)
        values = [value for value in losses() if value.grad_fn is not None]
        forward = clock.leave()
    finally:
        for handle in handles:
            handle.remove()
    if next_node is not None:
        numbers = [number for number, _ in nodes]
        _hook_nodes(
            [value.grad_fn for value in values], clock, lambda node: nodes[bisect.bisect_right(numbers, node) - 1][1]
        )
    start = time.perf_counter()
    clock.enter(parts - 1)
    if values:
        torch.autograd.backward(values)
    backward = clock.leave()
    return PassSeconds(forward, backward if next_node is not None else [], time.perf_counter() - start)


def _hook_nodes(roots: Sequence[Any], clock: _Clock, part_of: Callable[[int], int]) -> None:
    """Have the clock count each autograd node before `roots` that computes for its part: from the end of the previous node, so
    that hooks on tensors count for their node. Adding up gradients counts for the node that made them."""
    todo, seen = list(roots), set(roots)
    while todo:
        node = todo.pop()
        if node.next_functions:  # a leaf's only adds up
            part = part_of(node._sequence_nr())
            node.register_prehook(lambda gradients, part=part: clock.set_part(part))
            node.register_hook(lambda given, gradients: clock.count())
        others = [other for other, _ in node.next_functions if other is not None and other not in seen]
        seen.update(others)
        todo += others


class _Clock:
    """Seconds of each part, of which one runs at a time."""

    def __init__(self, parts: int, waits: bool) -> None:
        self._seconds, self._part, self._since, self._waits = [0.0] * parts, 0, 0.0, waits

    def enter(self, part: int) -> None:
        """Count time for this part from now on."""
        if part != self._part or not self._since:
            self._stop()
            self._part = part
            self._since = time.perf_counter()

    def set_part(self, part: int) -> None:
        """Count the time since the last count, and what follows, for this part."""
        self._part = part

    def count(self) -> None:
        """Count the time up to here."""
        self._stop()
        self._since = time.perf_counter()

    def leave(self) -> List[float]:
        """Return the seconds of all parts and start again from zero."""
        self._stop()
        seconds, self._seconds, self._since = self._seconds, [0.0] * len(self._seconds), 0.0
        return seconds

    def _stop(self) -> None:
        if self._waits:
            torch.cuda.synchronize()
        if self._since:
            self._seconds[self._part] += time.perf_counter() - self._since
