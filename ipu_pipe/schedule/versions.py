"""Weight versions: the version that each forward, backward and recomputation of a schedule reads,
lags, and copies of the weights.

Version v of a stage is its whole state (weights, velocity, accumulators) after v updates of that
stage. All results are computed from the schedule and the method's reading rule, window by window,
so that a long run needs little memory. PipeDream on two stages with an update per microbatch (*);
stage 0 reads:

    slot     0   1   2   3   4   5   6   7
    stage 0  F0  F1  .   B0* F2  B1* F3  B2*      forward  0 0 1 2    the newest version then
    stage 1  .   F0  B0* F1  B1* F2  B2* F3       backward 0 0 1 2    the stashed version of its forward

Symbols: P stages, M microbatches, N microbatches per update, s a stage, m a microbatch, all counted
from 0.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Iterator, NamedTuple, Sequence

import numpy as np
from numpy.typing import NDArray

from ipu_pipe.errors import BadInput
from ipu_pipe.schedule.actions import PASSES, Action, Kind
from ipu_pipe.schedule.delays import DelaySampler, find_mean_delays
from ipu_pipe.schedule.drawing import draw_html, format_versions
from ipu_pipe.schedule.methods import Method, Reads, find_method, require_sizes
from ipu_pipe.schedule.stretches import ALL_STAGES, IntArray
from ipu_pipe.schedule.table import Schedule
from ipu_pipe.schedule.timelines import make_schedule

# ---- recomputation by segments of stages (PipeMare, appendix A): the stages that recompute, their slots and stored microbatches
#
# segments        0 0 0 1 1 1         two segments of three stages
# heads           x . . x . .         the first stage stores its inputs and needs no other stage's recomputation
# recomputes      5 3 1 5 3 1         steps before its own backward (turn 1): 2 (last stage of the segment - s) + turn


class KeptMicrobatches(NamedTuple):
    """The microbatches (P,) of which a stage stores only its input, and of which it stores all
    activations.
    """

    inputs: IntArray
    activations: IntArray


def find_segment_ends(stages: int, segments: int) -> IntArray:
    """Return the last stage of each stage's segment (P,): `segments` of nearly equal length, longer
    ones first.

    0 means the square root of P, rounded (PipeMare's optimum). Raise `BadInput` for more segments
    than stages.
    """
    segments = segments or max(round(stages**0.5), 1)
    if not 1 <= segments <= stages:
        raise BadInput(
            f"method_args.recompute.segments: {segments}: must be from 1 to the number of stages, "
            f"{stages}"
        )
    lengths = [len(part) for part in np.array_split(np.arange(stages), segments)]
    return np.repeat(np.cumsum(lengths) - 1, lengths)


def find_segment_heads(ends: IntArray) -> NDArray[np.bool_]:
    """Return whether each stage (P,) is the first of its segment, from the `ends` of
    `find_segment_ends`.
    """
    return np.concatenate([[True], ends[1:] != ends[:-1]])


def recompute_slots(
    schedule: Schedule, method: Method, first: int, last: int, stages: slice = ALL_STAGES
) -> IntArray:
    """Return the slots (P, last - first) in which the activations of the microbatches [first, last)
    are recomputed.

    A segment's recomputation runs forward through it, one stage per step, and ends with the step in
    which its last stage turns
    a microbatch around: stage s of a segment that ends with stage z recomputes 2 (z - s) + turn
    steps before its own backward.
    """
    assert method.segments is not None
    s = np.arange(schedule.stages)[stages]
    ends = find_segment_ends(schedule.stages, method.segments)[stages]
    turn = method.turn if schedule.stages > 1 else 0
    # the slots of whole segments, of which each stage takes the row of its last one
    backward = schedule.slots(Kind.BACKWARD, first, last, slice(int(ends[0]), int(ends[-1]) + 1))
    return np.asarray(backward[ends - ends[0]] - turn - (ends - s)[:, None])


def count_kept_by_segments(in_flight: Sequence[int], segments: int, turn: int) -> KeptMicrobatches:
    """Return the microbatches that the dataflow schedule stores with recomputation by segments;
    `in_flight` (P,) are in flight.

    They are counted as in `Schedule.max_in_flight`. Stage s of a segment that ends with stage z
    recomputes 2(z-s) + `turn` steps before its own backward, and both of these steps count: it
    stores the activations of 2(z-s) + `turn` + 1 microbatches, or of all in flight. The head of a
    segment stores the inputs of the others until it recomputes them. PipeMare's appendix A.3 leaves
    out the turn and the microbatch of the step itself: turn + 1 fewer on every stage.
    """
    microbatches = np.asarray(in_flight, np.int64)
    P = len(microbatches)
    ends = find_segment_ends(P, segments)
    # microbatches from a recomputation to its backward, both included
    recomputed = 2 * (ends - np.arange(P)) + (turn if P > 1 else 0) + 1
    activations = np.minimum(microbatches, recomputed)
    return KeptMicrobatches(
        np.where(find_segment_heads(ends), microbatches - activations, 0), activations
    )


# ---- versions

# cells of a (stages, microbatches) window, some tens of MiB for each array
WINDOW = 1 << 22


class VersionTable:
    """The weight versions that a schedule's passes read under a method's rule.

    Reading a window raises `BadInput` if a pass would read a version that does not exist by then,
    or an update of its own or a
    later microbatch: such a schedule cannot be replayed microbatch by microbatch.
    """

    def __init__(self, schedule: Schedule, method: str | Method, seed: int = 0) -> None:
        """`method`: its name or row. `seed`: the seed of drawn delays."""
        method = find_method(method)
        if schedule.stages == 1 and method.delay is None:
            # a single stage is plain training
            method = replace(method, forward_reads=Reads.NEWEST)
        self.schedule = schedule
        self.method = method
        # in a split backward the input gradient reads weights and the weight gradient reads none
        self._reading_pass = dict(zip(PASSES, schedule.passes))
        # the schedule may have been made for another method
        if method.delay is not None:
            require_sizes(method, schedule.stages, schedule.microbatches, schedule.accumulate)
        if method.delay is not None and method.delay.drawn:
            self.sampler = DelaySampler(method.delay, self._mean_delays, seed)

    # ---- the table

    def forward(self, first: int, last: int, stages: slice = ALL_STAGES) -> IntArray:
        """Return the versions (P, last - first) that the forwards of the microbatches [first, last)
        read.
        """
        return self.window(first, last, stages)[0]

    def backward(self, first: int, last: int, stages: slice = ALL_STAGES) -> IntArray:
        """Return the versions (P, last - first) that the backwards of the microbatches [first,
        last) read.
        """
        return self.window(first, last, stages)[1]

    def window(
        self, first: int, last: int, stages: slice = ALL_STAGES
    ) -> tuple[IntArray, IntArray]:
        """Return the checked forward and backward versions of the microbatches [first, last)."""
        newest = {
            kind: self._find_newest(self._reading_pass[kind], first, last, stages)
            for kind in PASSES
        }
        # delayed reads count from the version to which the gradient is applied, and LocalSGD's by
        # replica, so the schedule does not bound them
        if self.method.delay is not None or self.method.rounds is not None:
            batch = np.arange(first, last) // self.schedule.accumulate
            newest[Kind.FORWARD] = newest[Kind.BACKWARD] = np.broadcast_to(
                batch, newest[Kind.BACKWARD].shape
            )
        forward = self._read(self.method.forward_reads, newest[Kind.FORWARD], None, first, stages)
        backward = self._read(
            self.method.backward_reads, newest[Kind.BACKWARD], forward, first, stages
        )
        self._check(forward, backward, newest, first, stages)
        return forward, backward

    def recompute(self, first: int, last: int) -> IntArray:
        """Return the versions (P, last - first) with which the activations of the microbatches
        [first, last) are recomputed.

        They are the newest versions at that time (PipeMare, appendix A).
        """
        slots = recompute_slots(self.schedule, self.method, first, last)
        versions = self.schedule.count_before(Kind.UPDATE, slots) if last > first else slots
        forward, backward = self.window(first, last)
        assert ((forward <= versions) & (versions <= backward)).all(), (
            "recomputed between forward and backward"
        )
        return versions

    def _find_newest(self, kind: Kind, first: int, last: int, stages: slice) -> IntArray:
        """Return the newest versions (P, n) in the slots of these passes: the updates that the
        stage made before.
        """
        slots = self.schedule.slots(kind, first, last, stages)
        return self.schedule.count_before(Kind.UPDATE, slots, stages) if last > first else slots

    def _read(
        self, rule: Reads, newest: IntArray, forward: IntArray | None, first: int, stages: slice
    ) -> IntArray:
        """Return the versions (P, n) that passes read by `rule`; `forward`: the versions that their
        forwards read.
        """
        if rule in (Reads.NEWEST, Reads.OWN):
            return newest
        if rule is Reads.STASHED:
            assert forward is not None, "only a backward can read a stashed version"
            return forward
        microbatch = np.arange(first, first + newest.shape[1])
        batch = microbatch // self.schedule.accumulate
        delay = self.method.delay
        # after a drain only the newest version exists, as at the start
        begin = self.schedule.find_drains(microbatch) // self.schedule.accumulate
        if rule is Reads.DOUBLE_BUFFERED:
            return np.broadcast_to(np.maximum(batch - 1, begin), newest.shape).copy()
        assert delay is not None
        delays: IntArray = np.array(delay.greatest)
        if delay.drawn:
            delays = self.sampler(first, first + len(microbatch))[stages]
        elif delay.table is not None:
            delays = np.array(delay.table)[stages][:, microbatch % self.schedule.accumulate]
        return np.maximum(newest - delays, begin)

    def _check(
        self,
        forward: IntArray,
        backward: IntArray,
        newest: dict[Kind, IntArray],
        first: int,
        stages: slice,
    ) -> None:
        """Raise `BadInput` for a version that a pass cannot read."""
        batch = np.arange(first, first + forward.shape[1]) // self.schedule.accumulate
        for wrong, kind, fault in (
            (forward < 0, Kind.FORWARD, "reads a version below 0"),
            (
                forward > newest[Kind.FORWARD],
                Kind.FORWARD,
                "reads a version that does not exist yet",
            ),
            (
                backward > newest[Kind.BACKWARD],
                Kind.BACKWARD,
                "reads a version that does not exist yet",
            ),
            (backward < forward, Kind.BACKWARD, "reads an older version than its forward"),
            (
                backward > batch,
                Kind.BACKWARD,
                "reads an update made by its own or a later microbatch",
            ),
        ):
            if wrong.any():
                row, column = np.unravel_index(int(np.argmax(wrong)), wrong.shape)
                stage = range(*stages.indices(self.schedule.stages))[int(row)]
                action = Action(self._reading_pass[kind], first + int(column), stage)
                raise BadInput(f"schedule: {action} {fault}: it cannot be replayed")

    def __repr__(self) -> str:
        return format_versions(self.schedule, self.window, self.greatest_lag())

    def _repr_html_(self) -> str:
        return draw_html(self.schedule, self.window)

    # ---- lags in updates of the stage itself

    def greatest_lag(self) -> IntArray:
        """Return each stage's greatest steady lag (P,): the updates between a forward's version and
        the use of its gradient.

        It depends only on the method, the stages and N: a run too short for the steady state has
        the same lag.
        """
        return self._steady_lags[0]

    def greatest_backward_lag(self) -> IntArray:
        """Return the greatest steady lag (P,) of the versions that backwards read, 0 if they read
        the newest.
        """
        return self._steady_lags[1]

    def rule_lag(self) -> NDArray[np.float64]:
        """Return the lag (P,) that update rules use: the greatest steady lag, or the mean of drawn
        delays.
        """
        if self.method.delay is not None and self.method.delay.drawn:
            return self._mean_delays
        return self.greatest_lag().astype(np.float64)

    @cached_property
    def _mean_delays(self) -> NDArray[np.float64]:
        """The means of drawn delays; by default the lags of the method's pipeline (PipeMare,
        appendix E).
        """
        delay = self.method.delay
        lags = None
        assert delay is not None
        if delay.mean is None:
            pipeline = replace(
                self.method, forward_reads=Reads.NEWEST, backward_reads=Reads.NEWEST, delay=None
            )
            lags = VersionTable(self.schedule, pipeline).greatest_lag()
        return find_mean_delays(delay, self.schedule.stages, lags)

    @cached_property
    def _steady_lags(self) -> tuple[IntArray, IntArray]:
        P = self.schedule.stages
        N = self.schedule.accumulate
        if self.method.delay is not None:
            lag = self.method.delay.find_greatest(P)
            return lag, lag if self.method.backward_reads is Reads.STASHED else np.zeros_like(lag)
        history = self.method.history
        if history is not None and history.delays != "schedule":
            return history.greatest_lag(P), history.greatest_lag(P)
        if self.method.flushes:
            return np.zeros(P, np.int64), np.zeros(P, np.int64)
        start = N * (-(-2 * P // N) + 1)
        end = N * (-(-2 * P // N) + 2)
        # from microbatch 2P on lags repeat with period N; orders by device also repeat with the
        # period of their rounds
        if self.method.order is not None:
            start = N * (-(-6 * P // N) + round(self.method.order.activation_limit) * P)
            end = start + N * P
        steady = VersionTable(make_schedule(self.method, P, end, N), self.method)
        forward_lag = np.zeros(P, np.int64)
        backward_lag = np.zeros(P, np.int64)
        width = max(WINDOW // P, 1)
        for first in range(start, end, width):
            last = min(first + width, end)
            # the gradient of m is applied to version floor(m/N)
            batch = np.arange(first, last) // N
            forward, backward = steady.window(first, last)
            forward_lag = np.maximum(forward_lag, (batch - forward).max(axis=1))
            backward_lag = np.maximum(backward_lag, (batch - backward).max(axis=1))
        return forward_lag, backward_lag


# ---- copies of the weights


def count_weight_copies(table: VersionTable) -> IntArray:
    """Return the peak number (P,) of each stage's versions that are alive at once in this run,
    including the newest.

    A version is alive from its update until the last pass that reads it, and at least until the
    next update. The start counts
    too: PipeDream may have more copies there than later.
    """
    P = table.schedule.stages
    N = table.schedule.accumulate
    history = table.method.history
    if table.method.delay is not None or (history is not None and history.delays != "schedule"):
        # the schedule does not determine the versions, so count all that a pass may read
        return table.greatest_lag() + 1
    # each replica has one version
    if table.method.rounds is not None:
        return np.full(P, N)
    # no pass reads an old version
    if table.method.flushes:
        return np.ones(P, np.int64)
    # a stretch reaches its steady state within `reach`
    reach = N * (-(-4 * (P + N) // N))
    copies = np.ones(P, np.int64)
    # between stretches the pipeline is empty and only the newest version exists, so stretches of
    # one length are equal
    for stretch in {
        (stretch.microbatches, stretch.slots): stretch for stretch in table.schedule.stretches
    }.values():
        first = stretch.first_microbatch
        last = min(stretch.first_microbatch + reach, stretch.end_microbatch)
        for stages in _split_stages(P, last - first):
            copies[stages] = np.maximum(copies[stages], _count_alive(table, first, last, stages))
    return copies


def _count_alive(table: VersionTable, first: int, last: int, stages: slice) -> IntArray:
    """Return the peak number of versions alive at once between the microbatches `first` (a multiple
    of N) and `last`.

    The moments in a slot are 0 forward, 1 backward, 2 update. A version that ends at a moment makes
    room for one that begins then.
    """
    N = table.schedule.accumulate
    forward, backward = table.window(first, last, stages)
    oldest = int(forward.min())
    newest = last // N
    rows = np.arange(forward.shape[0])[:, None]
    update_moment = 3 * table.schedule.slots(Kind.UPDATE, first // N, newest, stages) + 2
    # -1: there since before the first slot
    begin = np.full((len(rows), newest - oldest + 1), -1, np.int64)
    # update k makes version k + 1 and supersedes version k
    begin[:, first // N + 1 - oldest :] = update_moment
    end = np.full_like(begin, -1)
    end[:, first // N - oldest : -1] = update_moment
    # the newest lives to the end of the run
    end[:, -1] = 3 * table.schedule.slot_count
    for moment, version in enumerate((forward, backward)):
        read = 3 * table.schedule.slots(table.schedule.passes[moment], first, last, stages) + moment
        np.maximum.at(end, (rows, version - oldest), read)
    # two ascending halves, which a stable sort merges fast
    events = np.sort(np.concatenate([2 * end, 2 * begin + 1], axis=1), axis=1, kind="stable")
    # even numbers are ends, which come before a beginning at the same moment
    alive = np.cumsum(np.where(events & 1, 1, -1), axis=1)
    return np.asarray(alive.max(axis=1))


def _split_stages(stages: int, width: int) -> Iterator[slice]:
    """Yield slices of consecutive stages, as many at a time as a window of `width` microbatches
    allows.
    """
    height = max(WINDOW // max(width, 1), 1)
    for first in range(0, stages, height):
        yield slice(first, min(first + height, stages))
