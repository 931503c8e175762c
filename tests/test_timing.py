"""Timed schedules against times known in closed form."""

from __future__ import annotations

import pytest

from ipu_pipe.schedule.clock import simulate
from ipu_pipe.schedule.methods import resolve_method
from ipu_pipe.schedule.timelines import make_schedule


@pytest.mark.parametrize("stages, accumulate", [(2, 2), (2, 8), (4, 4), (4, 16)])
def test_flushed_pipelines_take_their_bubbles(stages: int, accumulate: int) -> None:
    """Equal stages: (N + P - 1)(f + b) a batch."""
    for method in ("gpipe", "pipedream_flush"):
        schedule = make_schedule(resolve_method(method), stages, 3 * accumulate, accumulate)
        time = simulate(schedule, [1.0] * stages, [2.0] * stages, [0.0] * stages)
        assert time == pytest.approx(3 * (accumulate + stages - 1) * 3.0)


def test_asynchronous_pipelines_run_at_the_pace_of_the_slowest_stage() -> None:
    for method in ("pipedream", "pipemare"):
        schedule = make_schedule(resolve_method(method), 2, 400, 4)
        time = simulate(schedule, [1.0, 1.5], [2.0, 2.5], [0.4, 0.4])
        assert time == pytest.approx(400 * (4.0 + 0.1), rel=0.01)


def test_one_microbatch_at_a_time_takes_all_passes_and_links_in_turn() -> None:
    schedule = make_schedule(resolve_method("naive"), 3, 5, 1)
    assert simulate(schedule, [1, 2, 3], [4, 5, 6], [0, 0, 0], link=0.5) == pytest.approx(5 * (21 + 4 * 0.5))
