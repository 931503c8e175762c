"""Timed schedules against times known in closed form."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ipu_pipe.schedule.actions import Kind
from ipu_pipe.schedule.clock import Costs, clock, slot_costs
from ipu_pipe.schedule.methods import METHODS, resolve_method
from ipu_pipe.schedule.rows import from_rows
from ipu_pipe.schedule.table import SlotHolds
from ipu_pipe.schedule.timelines import make_schedule


@pytest.mark.parametrize("stages, accumulate", [(2, 2), (2, 8), (4, 4), (4, 16)])
def test_flushed_pipelines_take_their_bubbles(stages: int, accumulate: int) -> None:
    """Equal stages: (N + P - 1)(f + b) a batch."""
    for method in ("gpipe", "pipedream_flush"):
        schedule = make_schedule(resolve_method(method), stages, 3 * accumulate, accumulate)
        time = clock(schedule, Costs([1.0] * stages, [2.0] * stages, [0.0] * stages)).finish
        assert time == pytest.approx(3 * (accumulate + stages - 1) * 3.0)


def test_asynchronous_pipelines_run_at_the_pace_of_the_slowest_stage() -> None:
    for method in ("pipedream", "pipemare"):
        schedule = make_schedule(resolve_method(method), 2, 400, 4)
        time = clock(schedule, Costs([1.0, 1.5], [2.0, 2.5], [0.4, 0.4])).finish
        assert time == pytest.approx(400 * (4.0 + 0.1), rel=0.01)


def test_one_microbatch_at_a_time_takes_all_passes_and_links_in_turn() -> None:
    schedule = make_schedule(resolve_method("naive"), 3, 5, 1)
    costs = Costs([1, 2, 3], [4, 5, 6], [0, 0, 0], link=0.5)
    assert clock(schedule, costs).finish == pytest.approx(5 * (21 + 4 * 0.5))


@pytest.mark.parametrize("name", METHODS)
def test_unit_costs_give_the_slots(name: str) -> None:
    """Of the whole and of a window; where a slot holds both passes, the forward takes its first half."""
    for P, M, N in ((1, 5, 2), (3, 20, 3), (4, 11, 5), (6, 7, 7)):
        schedule = make_schedule(METHODS[name], P, M, N)
        costs = slot_costs(schedule)
        for count in (M, N):
            times = clock(schedule, costs, count)
            for kind in (Kind.FORWARD, Kind.BACKWARD):
                slots = schedule.slots(kind, 0, count)
                late = 0.5 if schedule.slot_holds is SlotHolds.BOTH and kind is Kind.BACKWARD else 0.0
                assert (times.start[kind] == slots + late).all()
                assert (times.end[kind] == slots + late + 1 / schedule.slot_capacity).all()
            ends = schedule.slots(Kind.UPDATE, 0, count // N) + 1
            assert (times.start[Kind.UPDATE] == ends).all() and (times.end[Kind.UPDATE] == ends).all()
        if schedule.slot_holds is SlotHolds.ONE:  # no planned pass is later than it must be
            eager = clock(schedule, replace(costs, slot=0.0))
            assert all(
                (eager.start[kind] == schedule.slots(kind, 0, M)).all() for kind in (Kind.FORWARD, Kind.BACKWARD)
            )


def test_an_update_waits_for_all_of_its_batch_in_whatever_order() -> None:
    schedule = from_rows([["F1", "F0", "B1", "B0"], ["F1", "F0", "B1", "B0"]], 2)
    times = clock(schedule, Costs([1, 1], [2, 2], [5, 3], link=1))
    assert times.start[Kind.FORWARD].tolist() == [[1, 0], [3, 2]]
    assert times.start[Kind.BACKWARD].tolist() == [[9, 7], [6, 4]]
    assert times.start[Kind.UPDATE].tolist() == [[11], [8]] and times.finish == 16
