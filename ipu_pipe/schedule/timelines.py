"""Make the schedule of a method: which stage runs which pass in which slot.

A schedule consists of stretches, each from an empty pipeline to an empty one. Every pipeline here
returns the slots of a stretch as a formula (`stretches.py`), under a drawing of it; methods given
by an order of each device are laid out by `_make_ordered`. P stages, M microbatches, N microbatches
per update; s and m are a stage and a microbatch; slots count from 0. The size of a stretch is its
number of microbatches.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby
from typing import Callable, NamedTuple, Sequence, Tuple

import numpy as np

from ipu_pipe.errors import BadInput, raise_faults
from ipu_pipe.schedule.actions import Kind
from ipu_pipe.schedule.methods import Method, Timeline, find_method, require_sizes
from ipu_pipe.schedule.orders import get_period, make_device_rows
from ipu_pipe.schedule.rows import lay_out
from ipu_pipe.schedule.stretches import IntArray, Slots, Stretch
from ipu_pipe.schedule.table import Schedule, SlotHolds

F = Kind.FORWARD

# (number of slots, formula) of a pipeline from empty to empty
SlotsAndFormula = Tuple[int, Slots]

# the updates of an open schedule, more than any training makes; a formula needs no memory for them
OPEN = 1 << 40


def make_schedule(
    method: str | Method,
    stages: int,
    microbatches: int,
    accumulate: int,
    drains: Sequence[int] = (),
    synchronous: int = 0,
) -> Schedule:
    """Make the schedule of `method` for P `stages`, M `microbatches` and N = `accumulate`
    microbatches per update.

    `method`: its name, or the row that `resolve_method` returns, with other settings. `drains`:
    microbatches, multiples of N, before which the pipeline drains and refills (evaluation,
    checkpoints); a method that flushes is empty there anyway. `synchronous`: the number of
    microbatches at the start, a multiple of N, that run as in GPipe (PipeMare's warm-up, W). Raise
    `BadInput` for an unknown name and for impossible sizes (see `require_sizes`).
    """
    method = find_method(method)
    require_sizes(method, stages, microbatches, accumulate)
    if method.order is not None:
        sizes = _split_at_drains(drains, microbatches, accumulate)
        # a method that flushes is empty at drains anyway
        if method.flushes:
            batches, rest = divmod(microbatches, accumulate)
            sizes = [(accumulate, batches), (rest, 1)]
        return _make_ordered(method, stages, microbatches, accumulate, sizes)
    # a single stage is not a pipeline
    turn = method.turn if stages > 1 else 0
    # check the drains, also for methods that ignore them
    _split_at_drains(drains, microbatches, accumulate)
    # a short run may end within its warm-up
    warm = min(synchronous, microbatches)
    if warm % accumulate and warm < microbatches:
        raise BadInput(f"synchronous: {warm}: must be a multiple of accumulate ({accumulate})")
    stretches: list[Stretch] = []
    for pipeline, count in ((Timeline.FILL_DRAIN, warm), (method.pipeline, microbatches - warm)):
        definition = PIPELINES[pipeline]
        if pipeline is Timeline.LOCAL_SGD:
            assert method.rounds is not None
            interval = method.rounds.interval(stages)
            sizes = _split_into_rounds(drains, count, accumulate, interval * accumulate)
        elif definition.longest is None:
            # from the end of the warm-up, which drains after each batch
            later = [drain - warm for drain in drains if drain >= warm]
            sizes = _split_at_drains(later, count, accumulate)
        else:
            longest = definition.longest(accumulate)
            sizes = [(longest, count // longest), (count % longest, 1)]
        for size, repeats in sizes:
            # a run without warm-up, or of whole batches alone, leaves empty ones
            if size and repeats:
                third = accumulate if definition.by_accumulate else turn
                slots, find = definition.stretch(stages, size, third)
                first_slot, first = (
                    (stretches[-1].end_slot, stretches[-1].end_microbatch) if stretches else (0, 0)
                )
                stretches.append(Stretch(first_slot, first, repeats, slots, size, find))
    definition = PIPELINES[method.pipeline]
    holds = definition.slot_holds
    local = definition.local
    return Schedule(
        stages, microbatches, accumulate, holds, tuple(stretches), local, name=method.name
    )


def open_schedule(
    method: Method, stages: int, accumulate: int, drains: Sequence[int] = (), synchronous: int = 0
) -> Schedule:
    """Make a schedule whose end is not known yet: its last stretch goes on for `OPEN` updates.

    `drains`: the updates before which the pipeline has drained so far; `synchronous`: the updates
    at the start that run as in GPipe. The versions that passes read before a drain do not depend on
    what follows, so a run may begin with an open schedule, and drain by making another one with the
    update of the drain as its last.
    """
    marks = [update * accumulate for update in drains]
    return make_schedule(
        method, stages, OPEN * accumulate, accumulate, marks, synchronous * accumulate
    )


def _make_ordered(
    method: Method,
    stages: int,
    microbatches: int,
    accumulate: int,
    sizes: Sequence[tuple[int, int]],
) -> Schedule:
    """Make the schedule of a method that is given by its devices' orders; `sizes`: as
    `_split_at_drains` returns them.
    """
    stretches: list[Stretch] = []
    placement: tuple[int, ...] = ()
    for size, repeats in sizes:
        if size and repeats:
            stretch, placement = _lay_out_order(method, stages, size)
            first_slot, first = (
                (stretches[-1].end_slot, stretches[-1].end_microbatch) if stretches else (0, 0)
            )
            stretches.append(
                replace(stretch, first_slot=first_slot, first_microbatch=first, repeats=repeats)
            )
    return Schedule(
        stages,
        microbatches,
        accumulate,
        SlotHolds.ONE,
        tuple(stretches),
        placement=placement,
        name=method.name,
    )


def _lay_out_order(method: Method, stages: int, size: int) -> tuple[Stretch, tuple[int, ...]]:
    """Return a stretch of `size` microbatches and its placement; a long stretch repeats its steady
    middle.
    """
    order = method.order
    assert order is not None
    period = get_period(order, stages)
    # enough microbatches to fill the pipeline; weight gradients may be late by the activation limit
    filling = 2 * (6 + round(order.activation_limit)) * period
    repeated = 0 if method.flushes else max(size - filling - size % period, 0)
    rows = make_device_rows(method, stages, size - repeated)
    stretch = lay_out(rows)
    return (stretch.lengthen(repeated, period) if repeated else stretch), rows.placement


def _split_at_drains(
    drains: Sequence[int], microbatches: int, accumulate: int
) -> list[tuple[int, int]]:
    """Return the stretches between drains as pairs (size, number of consecutive stretches of that
    size).
    """
    faults = [
        f"drains: {drain}: must be a multiple of accumulate ({accumulate}) from 0 to "
        f"{microbatches} microbatches"
        for drain in drains
        if drain % accumulate or not 0 <= drain <= microbatches
    ]
    raise_faults(faults)
    # a drain at the start or the end is where the pipeline is empty anyway
    edges = sorted({0, microbatches, *drains})
    sizes = (last - first for first, last in zip(edges, edges[1:]))
    return [(size, len(list(equal))) for size, equal in groupby(sizes)]


def _split_into_rounds(
    drains: Sequence[int], microbatches: int, accumulate: int, longest: int
) -> list[tuple[int, int]]:
    """Return the rounds of at most `longest` microbatches as pairs (see `_split_at_drains`); each
    drain ends one.
    """
    rounds: list[tuple[int, int]] = []
    for size, repeats in _split_at_drains(drains, microbatches, accumulate):
        whole, rest = divmod(size, longest)
        rounds += (
            [(longest, whole * repeats)] if not rest else [(longest, whole), (rest, 1)] * repeats
        )
    return rounds


def compute_utilization(method: Method, stages: int, accumulate: int) -> float:
    """Return the planned busy share in the steady state, or of a whole batch or round with its
    bubbles if the pipeline drains.
    """
    if method.flushes or method.rounds is not None:
        batches = 1 if method.rounds is None else method.rounds.steps
        return make_schedule(method, stages, batches * accumulate, accumulate).busy_share()
    # pipelines that never drain repeat every one or two slots, or with each batch, from slot 3P on
    period = accumulate + (stages > 1) if method.pipeline is Timeline.LOCAL_SHARED else 2
    start = 3 * stages
    microbatches = 4 * stages + 2 + period
    # orders of passes on devices are steady after at most 9 P v slots, v the
    # stages per device; they repeat every 2 P slots, or
    # 3 P with split backwards, and 12 P microbatches last longer than one such period
    if method.order is not None:
        start = 9 * stages * method.order.stages_per_device
        period = stages * (3 if method.order.splits else 2)
        microbatches = 12 * stages
    return make_schedule(method, stages, microbatches, accumulate).busy_share(start, start + period)


def amortize_utilization(phases: Sequence[tuple[float, float]]) -> float:
    """Return the utilization sum(E) / sum(E/u) of a run in phases, each of length E > 0 and
    utilization u in (0, 1].

    For example, asynchronous epochs (u = 1) after synchronous ones (PipeMare, W).
    """
    return sum(length for length, _ in phases) / sum(length / busy for length, busy in phases)


# ---- the pipelines
#
# All take P, M and a third number: N where the table below says `by_accumulate`, otherwise the
# turn, which only `_dataflow` uses.


def _fill_drain(P: int, M: int, turn: int) -> SlotsAndFormula:
    """Run all forwards of the batch, then all backwards in the order of the forwards: GPipe's
    trapezoids. P = 3, M = 3:

    stage 0  F0  F1  F2  .   .   .   .   B0  B1  B2
    stage 1  .   F0  F1  F2  .   .   B0  B1  B2  .
    stage 2  .   .   F0  F1  F2  B0  B1  B2  .   .

    With a batch of one microbatch it is `naive`: one at a time through all stages and back.
    """
    return 2 * (M + P - 1), lambda kind, s, m: m + (s if kind is F else M + 2 * (P - 1) - s)


def _capped_1f1b(P: int, M: int, turn: int) -> SlotsAndFormula:
    """Keep at most P-s microbatches in flight on stage s. P = 3, M = 4:

    stage 0  F0  F1  F2  .   .   B0  F3  B1  .   B2  .   B3
    stage 1  .   F0  F1  .   B0  F2  B1  F3  B2  .   B3  .
    stage 2  .   .   F0  B0  F1  B1  F2  B2  F3  B3  .   .
    """

    def find(kind: Kind, s: IntArray, m: IntArray) -> IntArray:
        if kind is not F:
            return _alternate(P, s, m)
        return s + np.where(m < P - s, m, 2 * m)

    return 2 * (M + P - 1), find


def _alternate(P: int, s: IntArray, m: IntArray) -> IntArray:
    """Return the backwards of every 1F1B timeline: the last stage turns a microbatch around at
    once, every second slot.
    """
    return 2 * P - 1 - s + 2 * m


def _pipedream_1f1b(P: int, M: int, turn: int) -> SlotsAndFormula:
    """Keep at most P microbatches in flight, counted at stage 0 only, so that stage 1 runs ahead
    (F2). P = 3, M = 4:

    stage 0  F0  F1  F2  .   .   B0  F3  B1  .   B2  .   B3
    stage 1  .   F0  F1  F2  B0  .   B1  F3  B2  .   B3  .
    stage 2  .   .   F0  B0  F1  B1  F2  B2  F3  B3  .   .

    The first P microbatches enter one per slot, later ones every second slot. Of the first P a
    stage forwards `ahead` as they arrive, until its first backward is ready, and the rest in the
    slots between backwards.
    """

    def find(kind: Kind, s: IntArray, m: IntArray) -> IntArray:
        if kind is not F:
            return _alternate(P, s, m)
        ahead = np.minimum(P, 2 * (P - s) - 1)
        return s + np.where(m < ahead, m, np.where(m < P, 2 * (m - P + s + 1), 2 * m))

    return 2 * (M + P - 1), find


def _local_sgd(P: int, M: int, accumulate: int) -> SlotsAndFormula:
    """Run `_pipedream_1f1b` over the steps of a round, with R replicas (N here) in turn.

    A replica's next step begins on a stage when its previous one is done there. P = 3, R = 2, two
    steps each:

    stage 0  F0  F1  .   .   .   B0  F2  B1  F3  .   .   B2  .   B3
    stage 1  .   F0  F1  .   B0  .   B1  F2  .   F3  B2  .   B3  .
    stage 2  .   .   F0  B0  F1  B1  .   .   F2  B2  F3  B3  .   .

    The next round is a stretch of its own, which begins when the last backward has left stage 0.
    With as many replicas as stages no replica waits for its own step. With fewer, a step takes 2P
    slots, and after the first step replicas follow one another every second slot.
    """
    if accumulate >= P or M <= accumulate:
        return _pipedream_1f1b(P, M, 0)
    _, find_first = _pipedream_1f1b(P, accumulate, 0)

    def find(kind: Kind, s: IntArray, m: IntArray) -> IntArray:
        step, replica = np.divmod(m, accumulate)
        later = 2 * P * step + 2 * replica + (s if kind is F else 2 * P - 1 - s)
        return np.where(step == 0, find_first(kind, s, m), later)

    steps, rest = divmod(M - 1, accumulate)
    return 2 * P * (steps + 1) + 2 * rest, find


def _dataflow(P: int, M: int, turn: int) -> SlotsAndFormula:
    """Run in every step a forward of the arrived activations and a backward of the arrived
    gradient. P = 2, M = 3:

    turn 0  stage 0  F0     F1     F2 B0  B1     B2         turn 1  stage 0  F0     F1     F2     B0     B1     B2
            stage 1  .      F0 B0  F1 B1  F2 B2  .                  stage 1  .      F0     F1 B0  F2 B1  B2     .

    The last stage's two passes of a microbatch share the step (turn 0), or are a step apart (turn
    1).
    """
    slots = M + 2 * (P - 1) + turn
    return slots, lambda kind, s, m: m + (s if kind is F else 2 * (P - 1) - s + turn)


def _local(P: int, M: int, turn: int) -> SlotsAndFormula:
    """Run in every step a forward of the arrived activations and then its backward from the stage's
    own loss. P = 3, M = 4:

    stage 0  F0 B0  F1 B1  F2 B2  F3 B3  .      .
    stage 1  .      F0 B0  F1 B1  F2 B2  F3 B3  .
    stage 2  .      .      F0 B0  F1 B1  F2 B2  F3 B3
    """
    return M + P - 1, lambda kind, s, m: m + s


def _local_shared(P: int, M: int, accumulate: int) -> SlotsAndFormula:
    """Run as `_local`, but begin a batch only after the next stage has done the previous one. P =
    3, M = 4, N = 2:

    stage 0  F0 B0  F1 B1  .      F2 B2  F3 B3  .      .
    stage 1  .      F0 B0  F1 B1  .      F2 B2  F3 B3  .
    stage 2  .      .      F0 B0  F1 B1  .      F2 B2  F3 B3

    The update needs that stage's gradient of the shared layer.
    """
    wait = 1 if P > 1 else 0
    slots = M + wait * ((M - 1) // accumulate) + P - 1
    return slots, lambda kind, s, m: m + wait * (m // accumulate) + s


class PipelineDefinition(NamedTuple):
    """A pipeline from empty to empty: its `stretch` (slots and formula) as a function of P, M and
    the turn, or N if `by_accumulate`.

    `longest`: the most microbatches of a stretch as a function of N; None: it never drains.
    `slot_holds` and `local` as in `Schedule`.
    """

    stretch: Callable[[int, int, int], SlotsAndFormula]
    longest: Callable[[int], int] | None = None
    slot_holds: SlotHolds = SlotHolds.ONE
    local: bool = False
    by_accumulate: bool = False


PIPELINES: dict[Timeline, PipelineDefinition] = {
    Timeline.SEQUENTIAL: PipelineDefinition(_fill_drain, lambda accumulate: 1),
    Timeline.FILL_DRAIN: PipelineDefinition(_fill_drain, lambda accumulate: accumulate),
    Timeline.ONE_F_ONE_B_FLUSH: PipelineDefinition(_capped_1f1b, lambda accumulate: accumulate),
    Timeline.ONE_F_ONE_B: PipelineDefinition(_pipedream_1f1b),
    Timeline.ONE_F_ONE_B_CAPPED: PipelineDefinition(_capped_1f1b),
    Timeline.LOCAL_SGD: PipelineDefinition(_local_sgd, by_accumulate=True),
    Timeline.DATAFLOW: PipelineDefinition(_dataflow, slot_holds=SlotHolds.BOTH),
    Timeline.LOCAL: PipelineDefinition(_local, slot_holds=SlotHolds.BOTH, local=True),
    Timeline.LOCAL_SHARED: PipelineDefinition(
        _local_shared, slot_holds=SlotHolds.BOTH, local=True, by_accumulate=True
    ),
}
