"""Check schedules: the closed forms against the simulated policies, the proof that they run, and
how they print."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Dict, List, Optional, Tuple

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from slot_simulation import PLAYED, Simulated, simulate

import ipu_pipe
from ipu_pipe.errors import BadInput
from ipu_pipe.schedule.actions import Action, Kind, list_needs
from ipu_pipe.schedule.clock import Costs, clock
from ipu_pipe.schedule.methods import METHODS, Method, Reads, Timeline, resolve_method
from ipu_pipe.schedule.rows import format_csv, format_text, from_rows
from ipu_pipe.schedule.stretches import LaidOut, Stretch
from ipu_pipe.schedule.table import Schedule, SlotHolds
from ipu_pipe.schedule.timelines import compute_utilization, make_schedule
from ipu_pipe.schedule.versions import (
    VersionTable,
)
from tests.support.runs import list_faults
from tests.support.slow import mark_slow

SIZES = [(P, M) for P in range(1, 8) for M in (*range(1, 9), 12, 13, 20)]


def list_update_sizes(method: Method, P: int, M: int) -> List[int]:
    """Return some update sizes N: one, several that do and do not divide M, the whole run, more
    than the run."""
    smallest = P if method.forward_reads is Reads.DOUBLE_BUFFERED else 1
    return sorted(N for N in {1, 2, 3, 7, M, P, P + 1} if N >= smallest)


def simulate_method(method: Method, P: int, M: int, N: int) -> Simulated:
    return simulate(method.pipeline, P, M, N, method.turn)


# --- the closed forms


# one of each kind of timeline, which `make test` runs
QUICK = {"gpipe", "pipedream_flush", "pipedream", "pipelined_backprop", "local_overlapping"}


@pytest.mark.parametrize("name", mark_slow(PLAYED, QUICK.__contains__))
def test_slots_equal_the_simulated_ones(name: str) -> None:
    """Of forwards, backwards and updates, and the most microbatches in flight."""
    method = METHODS[name]
    for P, M in SIZES:
        for N in list_update_sizes(method, P, M):
            schedule = make_schedule(method, P, M, N)
            played, length, updates = simulate_method(method, P, M, N)
            slots = {
                (s, kind.value, m): slot
                for kind in (Kind.FORWARD, Kind.BACKWARD)
                for (s, m), slot in np.ndenumerate(schedule.slots(kind, 0, M))
            }
            assert slots == played and schedule.slot_count == length, (P, M, N)
            made = schedule.slots(Kind.UPDATE, 0, schedule.update_count).tolist()
            assert made == [[slot for slot, _ in row] for row in updates]
            for s, most in enumerate(schedule.max_in_flight().tolist()):
                begun, ended = ([played[s, kind, m] for m in range(M)] for kind in "FB")
                counts = [sum(f <= at <= b for f, b in zip(begun, ended)) for at in begun]
                assert max(counts) == most, (P, M, N)


@pytest.mark.parametrize("name", PLAYED)
def test_windows_and_counts_agree_with_the_simulated_slots(name: str) -> None:
    method = METHODS[name]
    for P, M, N in ((1, 5, 2), (3, 20, 3), (4, 11, 5), (6, 7, 7), (7, 20, 8)):
        expected, schedule = simulate_method(method, P, M, N), make_schedule(method, P, M, N)
        cells: Dict[Tuple[int, int], str] = {}
        for (s, kind, m), slot in sorted(expected.slots.items(), key=lambda item: item[0][1]):
            cells[s, slot] = f"{kind}{m} {cells.get((s, slot), '')}".strip()  # forwards first
        for s in range(P):
            for first, last in ((0, expected.length), (3, 7)):
                shown = [cells.get((s, slot)) for slot in range(first, last)]
                assert schedule.cells(s, first, last) == shown
        slots = np.arange(schedule.slot_count + 1)
        grids = schedule.spell_out(0, schedule.slot_count)
        grids[Kind.UPDATE] = schedule.update_grid(0, schedule.slot_count)
        for kind, grid in grids.items():
            counted = np.cumsum(np.pad(grid >= 0, ((0, 0), (1, 0))), axis=1)
            assert (schedule.count_before(kind, slots) == counted).all(), kind
        busy = len(expected.slots) / (P * expected.length * schedule.slot_capacity)
        assert schedule.busy_share() == pytest.approx(busy, rel=1e-12)


@pytest.mark.parametrize("P", [1, 2, 8, 107])
def test_planned_utilization(P: int) -> None:
    for N in (1, 4, 16):
        expected = {"naive": 1 / P, **dict.fromkeys(("gpipe", "pipedream_flush"), N / (N + P - 1))}
        expected.update(dict.fromkeys(("pipedream", "pipemare", "pipelined_backprop"), 1.0))
        for name, share in expected.items():
            assert compute_utilization(METHODS[name], P, N) == pytest.approx(share, rel=1e-12)
    assert compute_utilization(METHODS["pipedream_2bw"], P, P) == 1.0


def test_thousands_of_stages_take_no_memory() -> None:
    for name, method in PLAYED.items():
        schedule = make_schedule(method, 2000, 20000, 2000 if name == "pipedream_2bw" else 1)
        assert schedule.slots(Kind.FORWARD, 10000, 10001).shape == (2000, 1)


# --- drains


@pytest.mark.parametrize("name", PLAYED)
def test_the_pipeline_is_empty_at_a_drain_and_then_starts_over(name: str) -> None:
    method, P, N = METHODS[name], 3, 4
    schedule = make_schedule(method, P, 30, N, drains=(8, 16, 28))
    assert schedule.microbatches == schedule.stretches[-1].end_microbatch == 30
    for first, last in ((0, 8), (8, 16), (16, 28), (28, 30)):
        alone = make_schedule(method, P, last - first, N)
        start = schedule.slots(Kind.FORWARD, first, first + 1)[0, 0]
        for kind in (Kind.FORWARD, Kind.BACKWARD):
            slots = schedule.slots(kind, first, last) - start
            assert (slots == alone.slots(kind, 0, last - first)).all()
        # the next slot, without a gap
        ends = schedule.slots(Kind.BACKWARD, first, last).max() + 1
        assert last == 30 or ends == schedule.slots(Kind.FORWARD, last, last + 1)[0, 0]
    assert (np.diff(schedule.slots(Kind.UPDATE, 0, 7), axis=1) > 0).all()


def test_equal_segments_are_one_part_and_end_at_a_drain() -> None:
    parts = make_schedule(METHODS["pipemare"], 3, 1000, 2, drains=range(0, 1000, 10)).stretches
    assert [(part.repeats, part.microbatches) for part in parts] == [(100, 10)]
    drained = make_schedule(METHODS["pipedream"], 3, 40, 4, drains=[8, 24])
    intervals = [drained.get_drain_interval(k) for k in range(10)]
    assert intervals == [(0, 2)] * 2 + [(2, 6)] * 4 + [(6, 10)] * 4
    rounds = resolve_method("local_sgd", {"local_steps": 5})
    of_rounds = make_schedule(rounds, 3, 24, 2, drains=[6])
    intervals = [of_rounds.get_drain_interval(k) for k in range(12)]
    assert intervals == [(0, 3)] * 3 + [(3, 8)] * 5 + [(8, 12)] * 4
    for name in ("naive", "gpipe", "pipedream_flush"):  # empty after every update, or within it
        flushed = make_schedule(METHODS[name], 3, 40, 4)
        assert [flushed.get_drain_interval(k) for k in range(10)] == [(k, k + 1) for k in range(10)]


@pytest.mark.parametrize("drain", [3, -2, 12])
def test_drains_within_a_batch_or_outside_the_run_are_refused(drain: int) -> None:
    for name in ("pipemare", "gpipe"):
        with pytest.raises(BadInput, match=f"drains: {drain}: must be a multiple of accumulate"):
            make_schedule(METHODS[name], 2, 10, 2, drains=[drain])


def test_a_warm_up_is_of_whole_batches_unless_the_run_ends_within_it() -> None:
    with pytest.raises(BadInput, match="synchronous: 3: must be a multiple of accumulate"):
        make_schedule(METHODS["pipemare"], 2, 10, 2, synchronous=3)
    assert make_schedule(METHODS["pipemare"], 2, 10, 2, synchronous=11).microbatches == 10


# --- the needs of an action, and the proof


@pytest.mark.parametrize("kind, stage, needs", [
    (Kind.FORWARD, 0, []), (Kind.FORWARD, 2, ["F1 on stage 1"]), (Kind.BACKWARD, 1, ["F1 on stage 1", "B1 on stage 2"]),
    (Kind.BACKWARD, 2, ["F1 on stage 2"]), (Kind.INPUT_GRADIENT, 1, ["F1 on stage 1", "I1 on stage 2"]),
    (Kind.WEIGHT_GRADIENT, 1, ["I1 on stage 1"]), (Kind.RECOMPUTE, 2, ["F1 on stage 2", "R1 on stage 1"]),
])  # fmt: skip
def test_the_actions_that_an_action_needs(kind: Kind, stage: int, needs: List[str]) -> None:
    assert [str(need) for need in list_needs(Action(kind, 1, stage), 3)] == needs


def lay_out_slots(forward: Any, backward: Any, holds: SlotHolds = SlotHolds.ONE) -> Schedule:
    """Return a schedule of slots by stage and microbatch, one batch."""
    tables = {Kind.FORWARD: np.array(forward), Kind.BACKWARD: np.array(backward)}
    P, M = tables[Kind.FORWARD].shape
    return Schedule(P, M, M, holds, (Stretch(0, 0, 1, 64, M, LaidOut(tables)),))


@pytest.mark.parametrize("forward, backward, message", [
    ([[0, 1], [0, 2]], [[5, 7], [4, 6]], "F0 on stage 1 is in slot 0, but needs F0 on stage 0"),
    ([[0, 1], [1, 2]], [[3, 6], [3, 5]], "B0 on stage 0 is in slot 3, but needs B0 on stage 1, which is in slot 3"),
    ([[0, 1], [1, 3]], [[5, 7], [3, 6]], "stage 1 has two actions in slot 3"),
    ([[0, 1], [1, 5]], [[4, 6], [3, 4]], "B1 on stage 1 is in slot 4, but needs F1 on stage 1, which is in slot 5"),
    ([[0, 1], [1, 2]], [[4, 64], [3, 5]], "B1 on stage 0 is outside"),
])  # fmt: skip
def test_schedules_that_cannot_run_are_refused_naming_the_action(
    forward: Any, backward: Any, message: str
) -> None:
    with pytest.raises(BadInput, match=message):
        lay_out_slots(forward, backward)


def test_stages_of_one_device_must_not_act_at_once() -> None:
    """Collisions are checked by device: GPipe's three stages collide on two devices; stages that
    take turns may share one."""
    schedule = make_schedule(METHODS["gpipe"], 3, 2, 2)
    both = make_schedule(METHODS["pipemare"], 3, 4, 1)
    for colliding, placement, message in (
        (
            schedule,
            (0, 7, 7),
            "device 7 has two actions in slot 2",
        ),  # F1 of stage 1 and F0 of stage 2
        (schedule, (0, 1), "2 devices: must be one for each of 3 stages"),
        (both, (0, 1, 0), "device 0 has two actions in slot 2"),
    ):
        with pytest.raises(BadInput, match=message):
            replace(colliding, placement=placement)
    one = replace(make_schedule(METHODS["naive"], 3, 2, 1), placement=(4, 4, 4))
    assert one.device_of_stage == (4, 4, 4) and one.busy_share() == 1
    # B0 of stage 1 begins after U0 of stage 2
    eager = clock(one, Costs([1, 2, 3], [4, 5, 6], [1, 1, 1]))
    assert eager.start[Kind.BACKWARD].tolist() == [[19, 43], [13, 37], [6, 30]]
    separate = replace(schedule, placement=(2, 1, 0))
    assert separate.busy_share() == schedule.busy_share()


runs_strategy = st.lists(
    st.tuples(st.integers(0, 12), st.integers(1, 5), st.integers(1, 4)), min_size=1, max_size=3
)


@settings(max_examples=400, deadline=None)
@given(runs_strategy, runs_strategy, st.sampled_from(SlotHolds))
@example(
    [(10, 4, 4)], [(17, 4, 1)], SlotHolds.BOTH
)  # forwards slower than backwards: most in flight before the first backward
def test_the_compact_proof_agrees_with_checking_every_slot(
    forwards: List[Tuple[int, int, int]],
    backwards: List[Tuple[int, int, int]],
    slot_holds: SlotHolds,
) -> None:
    """Draw affine runs on one stage: they are accepted exactly if no slot is overfull and no
    backward precedes its forward."""
    counts = [count for _, count, _ in forwards]
    backwards = [(b[0] + 3, count, b[2]) for b, count in zip(backwards * 3, counts)]
    slots: Dict[int, List[int]] = {0: [], 1: []}
    for kind, group in ((0, forwards), (1, backwards)):
        for start, count, step in group:
            slots[kind] += [start + step * k for k in range(count)]
    fits = all(len(set(taken)) == len(taken) for taken in slots.values())
    if slot_holds is SlotHolds.ONE:
        fits = fits and not set(slots[0]) & set(slots[1])
    is_both = slot_holds is SlotHolds.BOTH
    fits = fits and all(b >= f if is_both else b > f for f, b in zip(slots[0], slots[1]))
    try:
        schedule = lay_out_slots([slots[0]], [slots[1]], slot_holds)
    except BadInput:
        assert not fits
    else:
        assert fits
        in_flight = [sum(f <= at <= b for f, b in zip(slots[0], slots[1])) for at in slots[0]]
        assert schedule.max_in_flight().tolist() == [max(in_flight)]


# --- rows written by hand


def list_schedule_cells(schedule: Schedule) -> List[List[Optional[str]]]:
    return [schedule.cells(s) for s in range(schedule.stages)]


def list_schedule_rows(schedule: Schedule) -> List[List[str]]:
    return [[cell for cell in cells if cell] for cells in list_schedule_cells(schedule)]


@pytest.mark.parametrize(
    "name", ["naive", "gpipe", "pipedream_flush", "pipedream", "pipedream_2bw"]
)
def test_the_planned_rows_written_by_hand_get_the_planned_slots(name: str) -> None:
    """Closed-form schedules delay nothing. (Flush methods: one batch, since rows alone have no
    flush.)"""
    for P, M in ((1, 1), (2, 5), (4, 9), (7, 20)):
        planned = make_schedule(METHODS[name], P, 1 if name == "naive" else M, max(M, P))
        from_cells = from_rows(list_schedule_rows(planned), planned.accumulate)
        assert list_schedule_cells(from_cells) == list_schedule_cells(planned)


def test_steps_that_hold_both_written_by_hand() -> None:
    planned = make_schedule(METHODS["pipelined_backprop"], 3, 6, 1)
    from_cells = from_rows(list_schedule_rows(planned), 1, slot_holds=SlotHolds.BOTH)
    assert list_schedule_cells(from_cells) == list_schedule_cells(planned)


# --- printing


@pytest.mark.parametrize(
    ("name", "reason"), [("pipedream", "no updates between"), ("pipemare", "one action per slot")]
)
def test_csv_refuses_what_pytorch_cannot_express(name: str, reason: str) -> None:
    with pytest.raises(BadInput, match=reason):
        format_csv(make_schedule(METHODS[name], 2, 4, 1))


# --- the table of methods


@pytest.mark.parametrize("name, args, axes", [
    ("pipelined_backprop", {"stash": True, "turn": None}, (Timeline.DATAFLOW, 0, Reads.STASHED)),
    ("pipedream", {"schedule": "dataflow", "turn": 1}, (Timeline.DATAFLOW, 1, Reads.STASHED)),
    ("pipemare", {"schedule": "1f1b"}, (Timeline.ONE_F_ONE_B, 0, Reads.NEWEST)),
])  # fmt: skip
def test_method_arguments_change_the_axes(name: str, args: Dict[str, Any], axes: Any) -> None:
    method = resolve_method(name, args)
    assert (method.pipeline, method.turn, method.backward_reads) == axes


def test_capped_1f1b_holds_fewer_microbatches_in_the_same_time() -> None:
    """In the randomized PipeDream paper's timeline only stage 0 is capped, in the original
    PipeDream every stage."""
    P, M = 6, 40
    usual, capped = (
        make_schedule(resolve_method("pipedream", {"schedule": name}), P, M, 1)
        for name in ("1f1b", "1f1b_capped")
    )
    assert usual.max_in_flight().tolist() == [6, 6, 6, 5, 3, 1]
    assert capped.max_in_flight().tolist() == [6, 5, 4, 3, 2, 1]
    assert usual.slot_count == capped.slot_count


@pytest.mark.parametrize("name, args, message", [
    ("pipdream", {}, "method: pipdream: .* did you mean pipedream?"),
    ("gpipe", {"stash": True}, "method_args.stash: true: "),
    ("pipedream_2bw", {"schedule": "dataflow"}, "method_args.schedule: dataflow: "),
    ("pipedream", {"turn": 1}, "method_args.turn: 1: "),
    ("pipemare", {"turn": 2}, "method_args.turn: 2: "),
    ("pipemare", {"turn": True}, "method_args.turn: true: "),
    ("pipemare", {"schedule": "gpipe"}, "method_args.schedule: gpipe: "),
    ("pipemare", {"stash": "yes"}, "method_args.stash: yes: "),
    ("pipedream", {"stages_per_device": 0}, "stages_per_device: 0: "),
])  # fmt: skip
def test_methods_refuse_with_the_reason(name: str, args: Dict[str, object], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        ipu_pipe.resolve_method(name, args)


def test_schedules_and_versions_take_a_methods_name_and_are_shown_by_their_sizes() -> None:
    """A name once raised an AttributeError, and the repr of a schedule contained the arrays of its runs."""
    schedule = make_schedule("pipedream", 4, 6, 3)
    assert format_text(schedule) == format_text(make_schedule(METHODS["pipedream"], 4, 6, 3))
    assert VersionTable(schedule, "pipedream").backward(0, 6).shape == (4, 6)
    assert "zbv" in repr(make_schedule("zbv", 4, 6, 3))
    assert len(repr(make_schedule("pipedream", 64, 960, 3))) < 100
    assert "pipedream_flush" in list_faults(make_schedule, "pipedream_flsh", 4, 6, 6)[0]


def test_impossible_sizes_name_every_fault() -> None:
    faults = list_faults(make_schedule, METHODS["gpipe"], 0, -1, 0)
    assert [fault.split(":")[0] for fault in faults] == ["stages", "microbatches", "accumulate"]
    with pytest.raises(
        BadInput, match="accumulate: 3: pipedream_2bw keeps two weight versions.* here 4"
    ):
        make_schedule(METHODS["pipedream_2bw"], 4, 8, 3)
