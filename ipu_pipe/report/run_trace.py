"""The trace that a run leaves: as its devices measured it, or, where no device has a clock, its schedule played by the clock with
the measured times of its stages; and the rates that follow from that play."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple, Optional

import numpy as np

from ipu_pipe.backends.interface import Report
from ipu_pipe.job.record import Job, make_trace_metadata
from ipu_pipe.model.flops import BACKWARD
from ipu_pipe.model.timing import StageSeconds
from ipu_pipe.report.position import Position
from ipu_pipe.schedule.actions import Kind
from ipu_pipe.schedule.clock import Costs, clock, play_run
from ipu_pipe.trace.chrome import write_chrome
from ipu_pipe.trace.events import Counters
from ipu_pipe.trace.modelled import build_modelled_events
from ipu_pipe.trace.store import SUFFIX, TraceWriter


class CostsOfStages(NamedTuple):
    """Costs of the clock in seconds, a sentence on where they are from, and whether they were measured."""

    costs: Costs
    why: str
    measured: bool


class ModelledRates(NamedTuple):
    """Of a whole run by the clock: the share of the devices' time in passes and updates, and the samples per second."""

    utilization: float
    samples_per_second: float


def write_measured_trace(job: Job, path: Path, measured: Report) -> None:
    """Write what the devices did in the updates that `log.trace` names, as Chrome JSON; times count from the first event."""
    events, counters = measured.events, measured.counters
    assert events is not None
    begin = int(events.start.min()) if len(events.start) else 0
    events = events._replace(start=events.start - begin, end=events.end - begin)
    events = events.select(np.argsort(events.start, kind="stable"))
    counters = Counters.from_rows([]) if counters is None else counters._replace(time=counters.time - begin)
    write_chrome(path, events, counters, {**make_trace_metadata(job), "modelled": False})


def write_modelled_trace(job: Job, folder: Path, costs: CostsOfStages) -> None:
    """Write the played schedule of the updates that `log.trace` names into a run's folder, as columns and as Chrome JSON."""
    schedule, batch = job.schedule, job.schedule.accumulate
    count = min(schedule.microbatches, job.traced.stop * batch)
    metadata = {**make_trace_metadata(job), "modelled": True, "why_modelled": costs.why}
    events, counters = build_modelled_events(
        clock(schedule, costs.costs, count, job.placement),
        (job.table.forward(0, count), job.table.backward(0, count)),
        accumulate=batch,
        unit_ns=1e9,
        device_of_stage=job.placement,
        boundary_bytes=job.footprint.boundary_bytes,
        gradients_cross=metadata["gradients_cross"],
        updates=job.traced,
        is_whole=schedule.is_whole if Kind.WEIGHT_GRADIENT in schedule.passes else None,
    )
    writer = TraceWriter(folder / "trace" / f"modelled{SUFFIX}", metadata)
    writer.write_events(events)
    writer.write_counters(counters)
    writer.close()
    write_chrome(folder / "trace.json.gz", events, counters, metadata)


def choose_stage_costs(job: Job, seconds: Optional[StageSeconds], position: Position) -> CostsOfStages:
    """Return the measured costs of the stages; without them the time of a microbatch, divided in proportion to FLOPs."""
    why = "the emulator runs all stages in one process, where no device has a clock: times are the schedule's by the clock, with"
    if seconds is not None and seconds.forward and any(seconds.forward + seconds.backward):
        costs = Costs(seconds.forward, seconds.backward, seconds.update)
        return CostsOfStages(costs, f"{why} each stage's passes measured here ({seconds.how})", True)
    reason = f", since {seconds.how}" if seconds is not None and not seconds.forward else ""
    forward = list(job.footprint.forward_flops)
    backward = list(job.footprint.backward_flops or [BACKWARD * flops for flops in forward])
    total = sum(forward) + sum(backward)
    if not total:
        forward, backward, total = [1.0] * len(job.part), [1.0] * len(job.part), 2.0 * len(job.part)
    seconds_of_update = position.seconds / position.timed_updates if position.timed_updates else 1.0
    scale = seconds_of_update / (job.schedule.accumulate * job.config.replicas) / total
    costs = Costs([scale * f for f in forward], [scale * b for b in backward], [0.0] * len(job.part))
    return CostsOfStages(costs, f"{why} each stage's FLOPs as its share of what a microbatch took{reason}", False)


def compute_modelled_rates(job: Job, costs: Costs) -> ModelledRates:
    """Return busy / (devices x span) and samples / span. The phases of a run, such as a warm-up by GPipe, are played
    separately."""
    busy = span = 0.0
    for _, updates, schedule in job.list_phases():
        microbatches = updates * schedule.accumulate
        busy += microbatches * (sum(costs.forward) + sum(costs.backward)) + updates * sum(costs.update)
        span += play_run(schedule, costs, microbatches, job.placement)
    return ModelledRates(busy / (span * len(set(job.placement))), job.updates * job.batch / span)
