"""Compare timed schedules with times in closed form."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ipu_pipe.errors import BadInput
from ipu_pipe.hardware.memory import make_lockstep_schedule
from ipu_pipe.schedule.actions import PASSES, Kind
from ipu_pipe.schedule.clock import Costs, Transfer, clock, make_slot_costs
from ipu_pipe.schedule.methods import METHODS, resolve_method
from ipu_pipe.schedule.rows import from_rows
from ipu_pipe.schedule.table import Schedule, SlotHolds
from ipu_pipe.schedule.timelines import make_schedule
from tests.slot_simulation import PLAYED


@pytest.mark.parametrize("name", PLAYED)
@pytest.mark.parametrize(("P", "M", "N"), [(1, 5, 2), (3, 20, 3), (4, 11, 5), (6, 7, 7)])
def test_unit_costs_give_the_slots(name: str, P: int, M: int, N: int) -> None:
    """Check the whole and a window; where a slot holds both passes, the forward takes its first
    half."""
    schedule = make_schedule(METHODS[name], P, M, N)
    costs = make_slot_costs(schedule)
    is_one, is_both = (schedule.slot_holds is holds for holds in (SlotHolds.ONE, SlotHolds.BOTH))
    for count in (M, N):
        times = clock(schedule, costs, count)
        for kind in PASSES:
            start = schedule.slots(kind, 0, count) + 0.5 * (is_both and kind is Kind.BACKWARD)
            assert (times.start[kind] == start).all()
            assert (times.end[kind] == start + 1 / schedule.slot_capacity).all()
            # no planned pass is later than necessary
            eager = clock(schedule, replace(costs, slot=0.0), count)
            assert not is_one or (eager.start[kind] == start).all()
        ends = schedule.slots(Kind.UPDATE, 0, count // N) + 1
        assert (times.start[Kind.UPDATE] == ends).all() and (times.end[Kind.UPDATE] == ends).all()


def test_an_update_waits_for_all_of_its_batch_in_whatever_order() -> None:
    schedule = from_rows([["F1", "F0", "B1", "B0"], ["F1", "F0", "B1", "B0"]], 2)
    times = clock(schedule, Costs([1, 1], [2, 2], [5, 3], link=1))
    assert times.start[Kind.FORWARD].tolist() == [[1, 0], [3, 2]]
    assert times.start[Kind.BACKWARD].tolist() == [[9, 7], [6, 4]]
    assert times.start[Kind.UPDATE].tolist() == [[11], [8]] and times.finish == 16


# ---- messages


def make_equal_costs(stages: int, **keys: Any) -> Costs:
    """Return equal costs for every stage: a forward of 1, a backward of 2, no update."""
    return Costs([1.0] * stages, [2.0] * stages, [0.0] * stages, **keys)


def test_latency_delays_and_occupies_nothing() -> None:
    """GPipe waits for the latency once a stage forward, and once a stage backward."""
    latencies = [Transfer(0.0, 2.5, (f"wire {s}",)) for s in range(3)]
    schedule = make_schedule(resolve_method("gpipe"), 4, 6, 6)
    times = clock(schedule, make_equal_costs(4, onward=latencies, back=latencies))
    assert times.finish == (6 + 3) * 3 + 2 * 3 * 2.5


@pytest.mark.parametrize("microbatches", [1, 10])
def test_a_slow_link_is_the_bottleneck(microbatches: int) -> None:
    """On two stages with messages of 5 seconds GPipe takes one forward, all messages, the last
    forward, then the backwards."""
    schedule = make_schedule(resolve_method("gpipe"), 2, microbatches, microbatches)
    slow = [Transfer(5.0, 0.0, ("slow",))]
    times = clock(schedule, make_equal_costs(2, onward=slow, back=[Transfer()]))
    assert times.finish == 1 + 5 * microbatches + 1 + 2 * microbatches + 2
    assert times.link_busy == {"slow": 5.0 * microbatches}
    blocks = make_schedule(resolve_method("local_greedy"), 2, 100, 1)
    starts = clock(blocks, make_equal_costs(2, onward=slow)).start[Kind.FORWARD]
    assert (starts[1, 1:] - starts[1, :-1] == 5).all()


def test_messages_that_share_a_link_follow_one_another_as_they_come() -> None:
    """Two boundaries of local blocks share a link: 2 messages of 2 seconds a microbatch,
    although no stage takes more than 3."""
    wire = [Transfer(2.0, 0.0, ("wire",))]
    blocks = make_schedule(resolve_method("local_greedy"), 3, 100, 1)
    shared = clock(blocks, make_equal_costs(3, onward=wire * 2))
    assert shared.finish > 100 * 4 and shared.link_busy == {"wire": 400.0}
    other = Transfer(2.0, 0.0, ("other",))
    # the last stage begins when two forwards and their messages are over
    separate = clock(blocks, make_equal_costs(3, onward=[*wire, other]))
    assert separate.finish == 100 * 3 + 2 * (1 + 2)
    # first come, first served: the message of stage 1 at 3.5 delays that of stage 0 from 4 to 5
    costs = make_equal_costs(3, onward=[Transfer(1.5, 0.0, ("wire",))] * 2)
    times = clock(make_schedule(resolve_method("local_greedy"), 3, 2, 1), costs)
    assert times.start[Kind.FORWARD].tolist() == [[0.0, 3.0], [2.5, 6.5], [5.0, 9.0]]


def test_replicas_sum_their_gradients_before_each_update() -> None:
    costs = Costs([1.0], [2.0], [0.5], reduce=[Transfer(3.0, 1.0, ("ring",))])
    times = clock(make_schedule(resolve_method("gpipe"), 1, 6, 2), costs)
    assert times.start[Kind.UPDATE].tolist() == [[10.0, 20.5, 31.0]] and times.finish == 31.5
    assert times.link_busy == {"ring": 9.0}


def test_an_all_reduce_waits_for_the_activations_on_its_link() -> None:
    """On two stages of local blocks the first stage's all-reduce shares the link with its
    activations."""
    onward, reduce = ([Transfer(seconds, 0.0, ("wire",))] for seconds in (4.0, 2.0))
    costs = make_equal_costs(2, onward=onward, reduce=[*reduce, Transfer()])
    times = clock(make_schedule(resolve_method("local_greedy"), 2, 1, 1), costs)
    assert times.start[Kind.UPDATE].tolist() == [[7.0], [8.0]]


# ---- lock-step


def sum_slowest_stages(schedule: Schedule, costs: Costs) -> float:
    """Sum over the cycles of PopTorch's timeline the work of the slowest stage."""
    grids = schedule.spell_out(0, schedule.slot_count)
    forward, backward = (
        np.array([seconds]).T * (grids[kind] >= 0)
        for kind, seconds in ((Kind.FORWARD, costs.forward), (Kind.BACKWARD, costs.backward))
    )
    return float((forward + backward).max(axis=0).sum())


@pytest.mark.parametrize("P, M, N", [(1, 4, 2), (4, 14, 7)])
def test_lock_step_is_the_sum_over_cycles_of_the_slowest_stage(P: int, M: int, N: int) -> None:
    costs = Costs(
        [1.0, 3.0, 2.0, 1.5][:P],
        [2.0, 4.0, 7.0, 1.0][:P],
        [0.5, 0.25, 0.75, 1.0][:P],
        lockstep=True,
    )
    for method in ("gpipe", "pipedream_flush", "naive"):
        batch = 1 if method == "naive" else N
        schedule = make_lockstep_schedule(resolve_method(method), P, M, batch)
        # updates follow when the pipeline is empty
        updates = M // batch * max(costs.update)
        assert clock(schedule, costs).finish == sum_slowest_stages(schedule, costs) + updates


def test_blocks_in_lock_step_take_the_slowest_block_a_microbatch_and_update_within_it() -> None:
    costs = Costs([1.0, 2.0], [2.0, 3.0], [0.5, 0.25], lockstep=True)
    times = clock(make_lockstep_schedule(resolve_method("local_greedy"), 2, 10, 1), costs)
    assert times.finish == 3.5 + 9 * 5.25 + 5 + 0.5  # both blocks make the last update together


def test_all_messages_of_a_cycle_go_together_when_its_passes_are_done() -> None:
    """On separate links the longest message counts, on one link messages add up; the next cycle
    begins when all have arrived."""
    # F | FF.. : onward in cycles 0 to 2, back in cycles 1 to 3
    schedule = make_lockstep_schedule(resolve_method("gpipe"), 2, 3, 3)
    costs = make_equal_costs(
        2, onward=[Transfer(1.0, 0.5, ("a",))], back=[Transfer(2.0, 0.0, ("b",))], lockstep=True
    )
    plain = clock(schedule, make_equal_costs(2, lockstep=True)).finish
    assert clock(schedule, costs).finish == plain + 1.5 + 2 * 2.5 + 2
    one = replace(costs, back=[Transfer(2.0, 0.0, ("a",))])
    assert clock(schedule, one).finish == plain + 1.5 + 2 * 3.5 + 2
    summing = replace(costs, reduce=[Transfer(4.0, 1.0, ("a",)), Transfer(3.0, 0.0, ("b",))])
    assert clock(schedule, summing).finish == clock(schedule, costs).finish + 5


@pytest.mark.parametrize(
    "key", ["backward", "update", "weight_gradient", "onward", "back", "reduce"]
)
def test_costs_without_a_figure_for_every_stage_are_refused(key: str) -> None:
    """A damaged trace that lacked a stage's messages once ended `analyze` in a traceback."""
    whole = Costs([1.0] * 3, [2.0] * 3, [0.0] * 3)
    with pytest.raises(BadInput, match=f"^costs: {key}: 1 "):
        replace(whole, **{key: [Transfer()] if key in ("onward", "back", "reduce") else [1.0]})
