"""Measure the seconds of the parts of a model's passes, on the model's device.

A hook marks the beginning of a part in the forward; hooks on autograd nodes mark it in the
backward. Other work on the machine only ever makes a pass longer, so that the least of repeated
passes is the time of the part: the passes are repeated until the BEST least ones agree ("K-best",
Bryant and O'Hallaron, Computer Systems, 2003, section 9.4).
"""

from __future__ import annotations

import bisect
import contextlib
import time
from typing import Any, Callable, Mapping, NamedTuple, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from ipu_pipe.model.devices import DeviceKind, find_kind
from ipu_pipe.model.restoring import restore_all

# Windows has no such module
try:
    import resource
except ImportError:
    resource = None  # type: ignore[assignment]

FloatArray = NDArray[np.float64]
Clock = Callable[[], float]


class PassSeconds(NamedTuple):
    """The seconds of each part of a microbatch, forward and backward, and their spread
    (`BestSeconds`).
    """

    forward: list[float]
    backward: list[float]
    spread: list[float]


class StageSeconds(NamedTuple):
    """The seconds of each stage's passes of a microbatch and of its part of an update, measured one
    after another on this machine.

    `how` describes the measurement. If nothing was measured, `forward` is empty and `how` gives the
    reason. `spread`: how far the time of each stage may be off by chance, as a share of it.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    update: tuple[float, ...]
    how: str
    spread: tuple[float, ...] = ()


# ---- repeat until the least times agree

# The spread is that of the BEST least times. With three of them, one in four series of ten passes
# that were recorded on a busy machine (tests/noisy_stage_times.json is of it) named a stage that is
# no slower than another; with five none did, and a stage that is twice as slow was named.
BEST = 5
# the spread, as a share of the longest part, at which the times are not repeated any more
SMALL = 0.02
# On a busy machine three passes name any stage as the slowest, and forty the same one each time.
MOST_REPEATS = 40
# the seconds for one stage, after which the times are not repeated any more
SECONDS_OF_STAGE = 1.0
# the same for a model whose stages are not chosen yet
SECONDS_OF_MODEL = 5.0


class BestSeconds(NamedTuple):
    """The least of repeated times (ways, parts), and the `spread` (parts,) of the sum of a part's
    ways: how much longer the BEST-least one is, as a share of the least.
    """

    least: FloatArray
    spread: FloatArray


def repeat_until_close(
    measure: Callable[[Clock], FloatArray], kind: DeviceKind, seconds: float
) -> BestSeconds:
    """Repeat `measure`, which returns seconds (ways, parts) by a clock, until the spread of every
    part is SMALL beside the longest part, or until `seconds` have passed; at least twice, since one
    time has no spread.

    On a CPU the clock is the thread's processor time, which other processes do not lengthen, unless
    the thread waited in the first measurement: what it waits for is part of its time.
    """
    began = time.perf_counter()
    waits = _count_waits()
    times = [measure(time.perf_counter)]
    never_waits = waits is not None and waits == _count_waits()
    clock = time.thread_time if never_waits and not kind.is_accelerator else time.perf_counter
    times.append(measure(clock))
    best = find_best(times)
    while len(times) < MOST_REPEATS and time.perf_counter() - began < seconds:
        part_seconds = best.least.sum(axis=0)
        is_close = (best.spread * part_seconds).max() <= SMALL * part_seconds.max()
        if is_close and len(times) >= BEST:
            break
        times.append(measure(clock))
        best = find_best(times)
    return best


def find_best(times: Sequence[FloatArray]) -> BestSeconds:
    """Return the least of times (ways, parts) that were measured one after another."""
    ordered = np.sort(np.stack(times), axis=0)[:BEST]
    least = ordered[0].sum(axis=0)
    excess = ordered[-1].sum(axis=0) - least
    return BestSeconds(ordered[0], compute_share(excess, least))


def compute_share(part: FloatArray, whole: FloatArray) -> FloatArray:
    """Return `part` / `whole`, 0 where the whole is 0."""
    return np.divide(part, whole, out=np.zeros_like(whole), where=whole > 0)


def combine_spreads(times: Sequence[float], spreads: Sequence[float]) -> float:
    """Return how far the time of a pipeline may be off by chance, as a share of it: by as much as
    that of its longest stage.
    """
    longest = max(times, default=0.0)
    return max(t * spread for t, spread in zip(times, spreads)) / longest if longest else 0.0


def _count_waits() -> int | None:
    """Return how often this thread has waited: slept, or waited for other threads or a file; None
    if the system does not tell.
    """
    who = getattr(resource, "RUSAGE_THREAD", None)
    return None if resource is None or who is None else resource.getrusage(who).ru_nvcsw


# ---- the parts of a pass


def time_passes(
    model: nn.Module,
    losses: Callable[[], Sequence[torch.Tensor]],
    begins: Mapping[str, int],
    backward_flops: Sequence[float],
    seconds: float = SECONDS_OF_MODEL,
) -> PassSeconds:
    """Time forwards, `losses()`, and their backwards, for about `seconds` at most.

    The model is left as it was. begins: module -> the part that begins when it first runs. Parts
    run in order; the loss belongs to the last part. backward_flops: FLOPs of each part, by which
    the backward's time is divided if PyTorch does not number its autograd nodes (2.0).
    """
    kind = find_kind(model.parameters())
    with restore_all(model):
        best = repeat_until_close(
            lambda clock: _time_pass(model, losses, begins, backward_flops, kind, clock),
            kind,
            seconds,
        )
    forward, backward = best.least.tolist()
    return PassSeconds(forward, backward, best.spread.tolist())


def _time_pass(
    model: nn.Module,
    losses: Callable[[], Sequence[torch.Tensor]],
    begins: Mapping[str, int],
    backward_flops: Sequence[float],
    kind: DeviceKind,
    read_seconds: Clock,
) -> FloatArray:
    """Return the seconds of the forward and of the backward of each part (2, parts)."""
    parts = len(backward_flops)
    clock = _Clock(parts, kind, read_seconds)
    next_node = getattr(torch._C._autograd, "_get_sequence_nr", None)
    # (the first autograd node of a part, the part)
    nodes: list[tuple[int, int]] = [(-1, 0)]

    def enter(part: int) -> None:
        # a module that runs again does not begin its part anew
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
    clock.enter(parts - 1)
    if values:
        torch.autograd.backward(values)
    backward = clock.leave()
    if next_node is None:
        # operations without a formula have no FLOPs, and all may be such
        share = sum(backward) / (sum(backward_flops) or 1.0)
        backward = [share * flops for flops in backward_flops]
    return np.array([forward, backward])


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
    read by `read_seconds`.
    """

    def __init__(self, parts: int, kind: DeviceKind, read_seconds: Clock) -> None:
        self._seconds = [0.0] * parts
        self._part = 0
        self._since: float | None = None
        self._kind = kind
        self._read_seconds = read_seconds

    def enter(self, part: int) -> None:
        """Count time for this part from now on."""
        if part != self._part or self._since is None:
            self._stop()
            self._part = part
            self._since = self._read_seconds()

    def set_part(self, part: int) -> None:
        """Count the time since the last count and the time from now on for this part."""
        self._part = part

    def count(self) -> None:
        """Count the time since the last count for the current part."""
        self._stop()
        self._since = self._read_seconds()

    def leave(self) -> list[float]:
        """Return the seconds of all parts and start again from zero."""
        self._stop()
        seconds = self._seconds
        self._seconds = [0.0] * len(self._seconds)
        self._since = None
        return seconds

    def _stop(self) -> None:
        self._kind.synchronize()
        if self._since is not None:
            self._seconds[self._part] += self._read_seconds() - self._since
