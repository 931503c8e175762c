"""Play a method's schedule and return the modelled events, for tests of traces."""

from __future__ import annotations

from typing import Any, List, NamedTuple, Optional

from ipu_pipe.report.run_trace import build_modelled_events
from ipu_pipe.schedule.clock import Costs, clock, make_slot_costs
from ipu_pipe.schedule.methods import resolve_method
from ipu_pipe.schedule.timelines import make_schedule
from ipu_pipe.schedule.versions import VersionTable
from ipu_pipe.trace.events import Counters, Event, Events


class PlayedMethod(NamedTuple):
    """The schedule of a method, the weights' versions, and what a modelled run records."""

    schedule: Any
    table: VersionTable
    events: Events
    counters: Counters

    @property
    def rows(self) -> List[Event]:
        """Return the events one by one."""
        return list(self.events.rows())


def play_method(
    name: str,
    stages: int,
    microbatches: int,
    accumulate: int,
    costs: Optional[Costs] = None,
    unit_ns: float = 1.0,
    **more: Any,
) -> PlayedMethod:
    """Play a method with these costs, by default of one slot a pass; `more`: `args` of the method,
    and arguments of `build_modelled_events`."""
    method = resolve_method(name, more.pop("args", {}))
    schedule = make_schedule(method, stages, microbatches, accumulate)
    table = VersionTable(schedule, method)
    versions = table.forward(0, microbatches), table.backward(0, microbatches)
    keys = {"device_of_stage": schedule.device_of_stage, **more}
    if len(schedule.passes) > 2:
        keys["is_whole"] = schedule.is_whole
    times = clock(schedule, costs or make_slot_costs(schedule))
    return PlayedMethod(schedule, table, *build_modelled_events(times, versions, unit_ns, **keys))
