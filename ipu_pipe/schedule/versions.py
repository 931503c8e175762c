"""Weight versions: which version each forward and backward of a schedule reads, and what follows from that.

Version v of a stage is its whole state (weights, velocity, accumulators) after v updates of that stage. Everything here
is computed from the schedule and the method's reading rule, window by window, so that a long run is never held whole.
Symbols: P stages, M microbatches, N microbatches an update, s a stage, m a microbatch, all counted from 0.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Dict, Iterator, NamedTuple, Optional, Tuple

import numpy as np
from numpy.typing import NDArray

from ipu_pipe.errors import BadInput
from ipu_pipe.schedule.actions import Action, Kind
from ipu_pipe.schedule.methods import Delay, Method, Reads
from ipu_pipe.schedule.runs import ALL_STAGES, PASSES, IntArray
from ipu_pipe.schedule.table import Schedule
from ipu_pipe.schedule.timelines import make_schedule

_WINDOW = 1 << 22  # cells of a (stages, microbatches) window: some tens of MiB for each array


class HistoryDelays(NamedTuple):
    """Where passes stand in the global history of block updates, (P, n) each.

    The gradient that stage a applies for microbatch m was taken at an iterate whose block r is
    `written[a, m] - read[r, m]` entries old.
    """

    written: IntArray  # entries before m's backward on stage a
    read: IntArray  # entries that m's forward on stage r has seen


class VersionTable:
    """The weight versions that a schedule's passes read under a method's rule.

    Raises BadInput, when the versions of a window are asked for, if a pass would read a version that does not exist by
    then, or updates by its own or a later microbatch: such a schedule cannot be replayed microbatch by microbatch.
    """

    def __init__(self, schedule: Schedule, method: Method, seed: int = 0) -> None:
        """`seed`: of the delays that are drawn, if the method draws any."""
        self.schedule = schedule
        if (
            schedule.stages == 1 and method.delay is None
        ):  # one stage is no pipeline: plain training, whatever the method
            method = replace(method, forward_reads=Reads.NEWEST)
        self.method = method
        self._seed = seed
        if method.delay is not None and method.delay.drawn:
            self._draws = _Draws(method.delay, self._mean_delays(), seed)

    # --- the table

    def forward(self, first: int, last: int, stages: slice = ALL_STAGES) -> IntArray:
        """The versions (P, last - first) that the forwards of the microbatches [first, last) read."""
        return self.window(first, last, stages)[0]

    def backward(self, first: int, last: int, stages: slice = ALL_STAGES) -> IntArray:
        """The versions (P, last - first) that the backwards of the microbatches [first, last) read."""
        return self.window(first, last, stages)[1]

    def window(self, first: int, last: int, stages: slice = ALL_STAGES) -> Tuple[IntArray, IntArray]:
        """Forward and backward versions of the microbatches [first, last), checked."""
        newest = {kind: self._newest(kind, first, last, stages) for kind in PASSES}
        if self.method.delay is not None:  # counted from the gradient's use; the schedule does not bound it
            newest[Kind.FORWARD] = newest[Kind.BACKWARD] = self._batch(first, newest[Kind.BACKWARD])
        forward = self._read(self.method.forward_reads, newest[Kind.FORWARD], None, first, stages)
        backward = self._read(self.method.backward_reads, newest[Kind.BACKWARD], forward, first, stages)
        self._check(forward, backward, newest, first, stages)
        return forward, backward

    def recompute(self, first: int, last: int, stages: slice = ALL_STAGES) -> IntArray:
        """The versions (P, last - first) with which the activations of the microbatches [first, last) are recomputed.

        A segment's recomputation runs forward through it, one stage a step, and ends with the step in which its last stage
        turns a microbatch around (PipeMare, appendix A): stage s of a segment that ends with stage z recomputes
        2 (z - s) + turn steps before its own backward, and reads the newest weights then.
        """
        assert self.method.segments is not None
        ends = segment_ends(self.schedule.stages, self.method.segments)
        begins = np.arange(self.schedule.stages)
        turn = self.method.turn if self.schedule.stages > 1 else 0
        slots = self.schedule.slots(Kind.BACKWARD, first, last)[ends] - turn - (ends - begins)[:, None]
        versions = self.schedule.count_before(Kind.UPDATE, slots[stages], stages) if last > first else slots[stages]
        forward, backward = self.window(first, last, stages)
        assert ((forward <= versions) & (versions <= backward)).all(), "recomputed between forward and backward"
        return versions

    def _batch(self, first: int, like: IntArray) -> IntArray:
        """The version (P, n) to which the gradient of each microbatch from `first` on is applied."""
        return np.broadcast_to(np.arange(first, first + like.shape[1]) // self.schedule.accumulate, like.shape)

    def _newest(self, kind: Kind, first: int, last: int, stages: slice) -> IntArray:
        slots = self.schedule.slots(kind, first, last, stages)
        return self.schedule.count_before(Kind.UPDATE, slots, stages) if last > first else slots

    def _read(self, rule: Reads, newest: IntArray, forward: Optional[IntArray], first: int, stages: slice) -> IntArray:
        if rule is Reads.NEWEST:
            return newest
        if rule is Reads.STASHED:
            assert forward is not None, "only a backward can read what was stashed"
            return forward
        microbatch = np.arange(first, first + newest.shape[1])
        batch, begin = microbatch // self.schedule.accumulate, np.zeros_like(microbatch)
        delay = self.method.delay
        for part in self.schedule.parts:  # after a drain only the newest version is left, as at the start
            inside = (part.first_microbatch <= microbatch) & (microbatch < part.end_microbatch)
            begin[inside] = microbatch[inside] - (microbatch[inside] - part.first_microbatch) % part.microbatches
        begin = begin // self.schedule.accumulate
        if rule is Reads.DOUBLE_BUFFERED:
            return np.broadcast_to(np.maximum(batch - 1, begin), newest.shape).copy()
        assert delay is not None
        delays = self._draws(first, first + len(microbatch))[stages] if delay.drawn else delay.greatest
        return np.maximum(newest - delays, begin)

    def _check(
        self, forward: IntArray, backward: IntArray, newest: Dict[Kind, IntArray], first: int, stages: slice
    ) -> None:
        batch = np.arange(first, first + forward.shape[1]) // self.schedule.accumulate
        for wrong, kind, what in (
            (forward < 0, Kind.FORWARD, "reads a version below 0"),
            (forward > newest[Kind.FORWARD], Kind.FORWARD, "reads a version that is not made yet"),
            (backward > newest[Kind.BACKWARD], Kind.BACKWARD, "reads a version that is not made yet"),
            (backward < forward, Kind.BACKWARD, "reads an older version than its forward"),
            (backward > batch, Kind.BACKWARD, "reads an update made by its own or a later microbatch"),
        ):
            if wrong.any():
                row, column = np.unravel_index(int(np.argmax(wrong)), wrong.shape)
                stage = range(*stages.indices(self.schedule.stages))[int(row)]
                raise BadInput(f"schedule: {Action(kind, first + int(column), stage)} {what}: it cannot be replayed")

    # --- lags, in updates of the stage itself

    def greatest_lag(self) -> IntArray:
        """Each stage's greatest steady lag (P,): updates between a forward's weights and the use of its gradient.

        It belongs to the method, the stages and N alone: a run too short to reach its steady state has the same.
        """
        return self._steady_lags[0]

    def greatest_backward_lag(self) -> IntArray:
        """As `greatest_lag`, for the weights that the backward reads (0 where it reads the newest)."""
        return self._steady_lags[1]

    def rule_lag(self) -> NDArray[np.float64]:
        """The lag (P,) by which the update rules go: the greatest steady one, or, where delays are drawn, their mean."""
        if self.method.delay is not None and self.method.delay.drawn:
            return self._mean_delays()
        return self.greatest_lag().astype(np.float64)

    def _mean_delays(self) -> NDArray[np.float64]:
        """Expectation (P,) of drawn delays. Raises BadInput where an exponential distribution over 0..D has none such."""
        delay, P = self.method.delay, self.schedule.stages
        assert delay is not None
        if delay.mean is None:
            pipeline = replace(self.method, forward_reads=Reads.NEWEST, backward_reads=Reads.NEWEST, delay=None)
            means = VersionTable(self.schedule, pipeline).greatest_lag().astype(np.float64)
        elif len(delay.mean) in (1, P):
            means = np.broadcast_to(np.asarray(delay.mean, np.float64), (P,)).copy()
        else:
            raise BadInput(
                f"method_args.hogwild.mean: {list(delay.mean)}: must be one number or one for each of {P} stages"
            )
        if (means > delay.greatest / 2).any():
            raise BadInput(
                f"method_args.hogwild.max: {delay.greatest}: an exponential distribution over 0..max has a mean of at most max/2;"
                f" the greatest mean here is {means.max():g}: max must be at least {2 * means.max():g}"
            )
        return means

    @cached_property
    def _steady_lags(self) -> Tuple[IntArray, IntArray]:
        P, N = self.schedule.stages, self.schedule.accumulate
        if self.method.delay is not None:
            lag = np.full(P, self.method.delay.greatest, np.int64)
            return lag, lag if self.method.backward_reads is Reads.STASHED else np.zeros_like(lag)
        start = N * (-(-2 * P // N) + 1)  # from microbatch 2P on, lags repeat with period N, to the last microbatch
        steady = VersionTable(make_schedule(self.method, P, start + N, N), self.method)
        forward_lag, backward_lag = np.zeros(P, np.int64), np.zeros(P, np.int64)
        width = max(_WINDOW // P, 1)
        for first in range(start, start + N, width):
            last = min(first + width, start + N)
            batch = np.arange(first, last) // N  # the gradient of m is applied to version floor(m/N)
            forward, backward = steady.window(first, last)
            forward_lag = np.maximum(forward_lag, (batch - forward).max(axis=1))
            backward_lag = np.maximum(backward_lag, (batch - backward).max(axis=1))
        return forward_lag, backward_lag

    # --- memory

    def weight_copies(self) -> IntArray:
        """The most versions (P,) of each stage that are alive at once in this run, the newest included.

        A version is alive from its making until the last pass that reads it, and at least until the next is made. The
        start-up counts: PipeDream's timeline may there keep more copies than later on.
        """
        P, N = self.schedule.stages, self.schedule.accumulate
        if self.method.delay is not None:  # no schedule's: all that a pass may read
            return self.greatest_lag() + 1
        reach = N * (-(-4 * (P + N) // N))  # by then a stretch has long been in its steady state
        copies = np.ones(P, np.int64)
        # the pipeline is empty between parts and only the newest version left: parts of one length are alike
        for part in {(part.microbatches, part.slots): part for part in self.schedule.parts}.values():
            first, last = part.first_microbatch, min(part.first_microbatch + reach, part.end_microbatch)
            for stages in _bands(P, last - first):
                copies[stages] = np.maximum(copies[stages], self._alive(first, last, stages))
        return copies

    def _alive(self, first: int, last: int, stages: slice) -> IntArray:
        """The most versions alive at once between the microbatches `first` (a multiple of N) and `last`.

        Moments in a slot: 0 forward, 1 backward, 2 update; what ends at a moment makes room for what is made then.
        """
        N = self.schedule.accumulate
        forward, backward = self.window(first, last, stages)
        oldest, newest, rows = int(forward.min()), last // N, np.arange(forward.shape[0])[:, None]
        update_moment = 3 * self.schedule.slots(Kind.UPDATE, first // N, newest, stages) + 2
        made = np.full((len(rows), newest - oldest + 1), -1, np.int64)
        made[:, first // N + 1 - oldest :] = update_moment  # update k makes version k + 1
        ended = np.full_like(made, -1)
        ended[:, first // N - oldest : -1] = update_moment  # and supersedes version k
        ended[:, -1] = 3 * self.schedule.slot_count
        for moment, (kind, version) in enumerate(((Kind.FORWARD, forward), (Kind.BACKWARD, backward))):
            read = 3 * self.schedule.slots(kind, first, last, stages) + moment
            np.maximum.at(ended, (rows, version - oldest), read)
        # Only stretches of two ascending runs: a stable sort merges them fast.
        events = np.sort(np.concatenate([2 * ended, 2 * made + 1], axis=1), axis=1, kind="stable")
        alive = np.cumsum(np.where(events & 1, 1, -1), axis=1)
        return np.asarray(alive.max(axis=1))

    # --- the global history of block updates

    def global_history_delay(self) -> Tuple[Optional[int], Optional[float]]:
        """The greatest and the mean global-history delay in the steady state; (None, None) where none reads old weights.

        Entries are single stages' updates in the order of (slot, stage); the delay of microbatch m, active stage a and
        read block r is the entries between m's forward on r and its backward on a (randomized PipeDream, section 4).
        The first and last quarter of the microbatches are left out, in whole batches, or, where no whole batch remains,
        as they are.
        """
        if not self.method.is_stale:
            return None, None
        first, last = self._middle()
        greatest, written_sum, read_sum = 0, 0, 0
        for start, stop in _spans(first, last, self.schedule.stages):
            delays = self.history_delays(start, stop)
            greatest = max(greatest, int((delays.written.max(axis=0) - delays.read.min(axis=0)).max()))
            written_sum += int(delays.written.sum())
            read_sum += int(delays.read.sum())
        return greatest, (written_sum - read_sum) / (self.schedule.stages * (last - first))

    def _middle(self) -> Tuple[int, int]:
        M, N = self.schedule.microbatches, self.schedule.accumulate
        first, last = -(-M // 4), -(-3 * M // 4)
        whole_first, whole_last = -(-first // N) * N, last // N * N
        if whole_first < whole_last:
            return whole_first, whole_last
        return (first, last) if first < last else (0, M)

    def history_delays(self, first: int, last: int) -> HistoryDelays:
        """The history before the backwards, and seen by the forwards, of the microbatches [first, last).

        A forward sees the entries of earlier slots and those of lower stages in its own slot. Where it reads an older
        version than the newest, it stands at the latest iterate that still holds that version.
        """
        schedule, N = self.schedule, self.schedule.accumulate
        forward = schedule.slots(Kind.FORWARD, first, last)
        backward = schedule.slots(Kind.BACKWARD, first, last)
        if self.method.forward_reads is Reads.NEWEST:
            return HistoryDelays(*self._entries_before(backward, forward))
        version = self.forward(first, last)
        low, high = int(version.min()), min(int(version.max()) + 1, schedule.update_count)
        if high <= low:
            return HistoryDelays(*self._entries_before(backward, forward))
        replaced = schedule.slots(Kind.UPDATE, low, high)  # update v is the entry that replaces version v
        written, seen, replacing = self._entries_before(backward, forward, replaced)
        held = np.take_along_axis(replacing, np.minimum(version - low, high - low - 1), axis=1)
        held = np.where(version < high, held, np.iinfo(np.int64).max)  # a version that is never replaced
        assert int(version.max()) <= last // N
        return HistoryDelays(written, np.minimum(seen, held))

    def _entries_before(self, *slots: IntArray) -> Tuple[IntArray, ...]:
        """For each array of slots (P, n), the entries before those slots' updates of the row's stage."""
        schedule = self.schedule
        start, stop = min(int(s.min()) for s in slots), max(int(s.max()) for s in slots) + 1
        made = schedule.update_grid(start, stop) >= 0  # (P, slots)
        below = np.cumsum(made, axis=0, dtype=np.int64)
        total = below[-1].copy()
        below -= made  # entries of lower stages in the slot
        earlier = int(schedule.count_before(Kind.UPDATE, np.array([start])).sum())
        below += earlier + np.cumsum(total) - total
        return tuple(np.take_along_axis(below, s - start, axis=1) for s in slots)


def segment_ends(stages: int, segments: int) -> IntArray:
    """The last stage of each stage's segment (P,): `segments` consecutive ones as equal as possible, longer ones first;
    0 stands for as many as the square root of P, rounded (PipeMare's optimum). Raises BadInput for more than P."""
    segments = segments or max(round(stages**0.5), 1)
    if not 1 <= segments <= stages:
        raise BadInput(f"method_args.recompute.segments: {segments}: must be from 1 to the number of stages, {stages}")
    lengths = [len(part) for part in np.array_split(np.arange(stages), segments)]
    return np.repeat(np.cumsum(lengths) - 1, lengths)


class _Draws:
    """Delays drawn by (seed, microbatch, stage) from P(d) ~ q^d on 0..D, the exponential distribution in whole updates."""

    BLOCK = 256  # microbatches that share a generator

    def __init__(self, delay: Delay, means: NDArray[np.float64], seed: int) -> None:
        self._seed = seed
        self._thresholds = np.stack([np.cumsum(_exponential(mean, delay.greatest)) for mean in means])
        self._blocks: Dict[int, IntArray] = {}

    def __call__(self, first: int, last: int) -> IntArray:
        """Delays (P, last - first) of the microbatches [first, last)."""
        if last <= first:
            return np.zeros((len(self._thresholds), 0), np.int64)
        blocks = range(first // self.BLOCK, (last - 1) // self.BLOCK + 1)
        joined = np.concatenate([self._block(block) for block in blocks], axis=1)
        start = blocks[0] * self.BLOCK
        return joined[:, first - start : last - start]

    def _block(self, block: int) -> IntArray:
        if block not in self._blocks:
            if len(self._blocks) > 64:
                self._blocks.clear()
            drawn = np.random.default_rng((self._seed, block)).random((self.BLOCK, len(self._thresholds))).T
            rows = [np.searchsorted(row, values, side="right") for row, values in zip(self._thresholds, drawn)]
            self._blocks[block] = np.minimum(np.stack(rows), self._thresholds.shape[1] - 1)
        return self._blocks[block]


def _exponential(mean: float, greatest: int) -> NDArray[np.float64]:
    """Probabilities (D + 1,) of 0..D, proportional to q^d, with this expectation (at most D/2), q by bisection."""
    values = np.arange(greatest + 1)
    low, high = 0.0, 1.0
    for _ in range(200):
        q = (low + high) / 2
        weights = q**values
        low, high = (q, high) if (weights * values).sum() / weights.sum() < mean else (low, q)
    weights = high**values
    return np.asarray(weights / weights.sum())


def _bands(stages: int, width: int) -> Iterator[slice]:
    """Consecutive stages, as many at a time as a window of `width` microbatches affords."""
    height = max(_WINDOW // max(width, 1), 1)
    for first in range(0, stages, height):
        yield slice(first, min(first + height, stages))


def _spans(first: int, last: int, stages: int) -> Iterator[Tuple[int, int]]:
    """Consecutive microbatches; at least 2P at a time, since passes of one microbatch are up to 2P slots apart."""
    width = max(_WINDOW // stages, 2 * stages)
    for start in range(first, last, width):
        yield start, min(start + width, last)
