"""Write the trace of a run and compute rates from it.

The trace is measured by the devices. If no device has a clock, it is simulated: the clock plays the
schedule with the measured times of the stages."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple, Sequence

import numpy as np
from numpy.typing import NDArray

from ipu_pipe.backends.interface import Report
from ipu_pipe.job.record import Job, make_trace_metadata
from ipu_pipe.model.flops import BACKWARD
from ipu_pipe.model.timing import StageSeconds
from ipu_pipe.report.position import Position
from ipu_pipe.schedule.actions import SPLIT_PASSES, Kind, get_pass_needs
from ipu_pipe.schedule.clock import Costs, Times, clock, estimate_run_time
from ipu_pipe.schedule.runs import IntArray
from ipu_pipe.schedule.table import list_stages
from ipu_pipe.trace import events as ev
from ipu_pipe.trace.chrome import write_chrome
from ipu_pipe.trace.events import KIND_CODE, PAYLOAD_CODE, WAIT, Counters, Events
from ipu_pipe.trace.store import SUFFIX, TraceWriter

# ---- events of a schedule that the clock has played: passes, updates, messages and waits
#
# device 0   F0 F1 wait........... B0        B0 needs the gradients of B0 on device 1, which came last:
# device 1      F0 wait  B0                  device 0 waits for device 1
# device 2         F0 B0

IN_FLIGHT = "microbatches in flight"
# offset of the stage that a message comes from -> its content
CROSSING = {-1: "activations", +1: "gradients"}
# rows of an array of the inputs that actions get from other devices
ARRIVAL, SENDER, PAYLOAD = range(3)
# The order of events that begin at one time; passes come last.
_ORDER = {"send": 0, Kind.UPDATE.word: 1, WAIT: 2, "pause": 2}
_ORDER_OF_CODE = np.array([_ORDER.get(kind, 3) for kind in ev.KINDS], np.int8)


def build_modelled_events(
    times: Times,
    versions: tuple[IntArray, IntArray],
    accumulate: int,
    unit_ns: float,
    device_of_stage: Sequence[int],
    boundary_bytes: Sequence[int] | None = None,
    gradients_cross: bool = True,
    updates: range | None = None,
    is_whole: NDArray[np.bool_] | None = None,
) -> tuple[Events, Counters]:
    """Return the events of a played schedule, device by device in their order, and its counters of
    microbatches in flight.

    `times`: of the actions, in units of `unit_ns`. `versions`: the ones that forwards and backwards
    read, each (P, M). `boundary_bytes[s]`: the bytes that stage s sends to stage s + 1 for a
    microbatch, and gets back unless `gradients_cross` is false; None: no messages. `updates`: to be
    recorded (None: all); gaps between them become pauses. `is_whole`: in a schedule with split
    backwards, the backwards (P, M) that are a single pass, which takes the time of their input
    gradient.
    """
    start, end = (
        {kind: np.rint(moments * unit_ns).astype(np.int64) for kind, moments in column.items()}
        for column in times[:2]
    )
    stages = len(device_of_stage)

    def build_actions(kind: Kind, s: int) -> tuple[Events, Events, IntArray]:
        """Return the actions of a stage, their messages, and an array (3, n) of the rows ARRIVAL,
        SENDER and PAYLOAD: when the input of each action from another device arrived, that device,
        and the payload; -1 if the action needs no such input.
        """
        index = np.arange(start[kind].shape[1])
        is_update = kind is Kind.UPDATE
        is_forward = kind is Kind.FORWARD
        version = index + 1 if is_update else versions[not is_forward][s, : len(index)]
        target = (
            s + 1
            if is_forward
            else s - 1
            if kind in (Kind.BACKWARD, Kind.INPUT_GRADIENT) and gradients_cross
            else -1
        )
        sends = boundary_bytes is not None and 0 <= target < stages
        columns = {
            "stage": s,
            "device": device_of_stage[s],
            "microbatch": index,
            "end": end[kind][s],
            "bytes": boundary_bytes[min(s, target)] if boundary_bytes is not None and sends else -1,
        }
        not_split = np.zeros(len(index), np.bool_)
        if is_whole is not None and kind in SPLIT_PASSES[1:]:
            not_split = is_whole[s, : len(index)]
        code = np.where(not_split, KIND_CODE[Kind.BACKWARD.word], KIND_CODE[kind.word])
        actions = Events.from_columns(
            len(index), **columns, kind=code, start=start[kind][s], version=version
        )
        messages = Events.from_rows([])
        if sends and device_of_stage[target] != device_of_stage[s]:
            # at the end of each pass; the clock lets messages take no time of the device
            messages = Events.from_columns(
                len(index),
                **columns,
                kind=KIND_CODE["send"],
                start=end[kind][s],
                peer=device_of_stage[target],
                carries=PAYLOAD_CODE[CROSSING[s - target]],
            )
        inputs = np.full((3, len(index)), -1, np.int64)
        for need in get_pass_needs(kind, local=not gradients_cross) if not is_update else ():
            source = s + need.offset
            if 0 <= source < stages and device_of_stage[source] != device_of_stage[s]:
                inputs[ARRIVAL], inputs[SENDER] = end[need.kind][source], device_of_stage[source]
                inputs[PAYLOAD] = PAYLOAD_CODE[CROSSING[need.offset]]
                break
        if kind is Kind.WEIGHT_GRADIENT:
            actions = actions.select(~not_split)
            inputs = inputs[:, ~not_split]
        return actions, messages, inputs

    # the last pass, which completes a microbatch on its stage
    completing = list(start)[-2]
    events: list[Events] = []
    counters: list[Counters] = []
    for device in dict.fromkeys(device_of_stage):
        here = list_stages(device_of_stage, device)
        actions, messages, inputs = zip(*(build_actions(kind, s) for s in here for kind in start))
        waits = _find_waits(ev.concatenate_events(actions), np.concatenate(inputs, axis=1))
        events.append(
            _select_updates(
                _sort(ev.concatenate_events([*actions, waits, *messages])), accumulate, updates
            )
        )
        counters.append(
            _count_in_flight(device, end[Kind.FORWARD][here].ravel(), end[completing][here].ravel())
        )
    return ev.concatenate_events(events), ev.concatenate_counters(counters)


def _get_order(events: Events) -> NDArray[np.intp]:
    return np.lexsort((_ORDER_OF_CODE[events.kind], events.start))


def _sort(events: Events) -> Events:
    return events.select(_get_order(events))


def _find_waits(actions: Events, inputs: IntArray) -> Events:
    """Return the gaps between a device's actions; a gap is a wait if the input of the next action
    arrived within it.
    """
    order = _get_order(actions)
    actions = actions.select(order)
    inputs = inputs[:, order]
    free = np.concatenate([[0], np.maximum.accumulate(actions.end)[:-1]])
    gap = actions.start > free
    actions = actions.select(gap)
    inputs = inputs[:, gap]
    free = free[gap]
    came_late = inputs[ARRIVAL] > free
    return Events.from_columns(
        len(free),
        stage=actions.stage,
        device=actions.device,
        kind=KIND_CODE[WAIT],
        microbatch=actions.microbatch,
        start=free,
        end=actions.start,
        peer=np.where(came_late, inputs[SENDER], -1),
        carries=np.where(came_late, inputs[PAYLOAD], 0),
    )


def _select_updates(events: Events, accumulate: int, updates: range | None) -> Events:
    """Return a device's events of these updates, with pauses in place of updates that are left
    out.
    """
    if updates is None:
        return events
    update = np.where(
        events.is_kind(Kind.UPDATE.word), events.microbatch, events.microbatch // accumulate
    )
    recorded = np.flatnonzero(np.isin(update, updates))
    before = recorded[:-1]
    after = recorded[1:]
    start = np.maximum.accumulate(events.end)[before]
    end = events.start[after]
    pause = (after - before > 1) & (end > start)
    pauses = Events.from_columns(
        int(pause.sum()),
        device=events.device[:1],
        kind=KIND_CODE["pause"],
        start=start[pause],
        end=end[pause],
    )
    return _sort(ev.concatenate_events([events.select(recorded), pauses]))


def _count_in_flight(device: int, forward_ends: IntArray, last_ends: IntArray) -> Counters:
    """Count the microbatches whose activations a device keeps: from the end of the forward to the
    end of the last pass.
    """
    times = np.concatenate([forward_ends, last_ends])
    steps = np.repeat([1.0, -1.0], [len(forward_ends), len(last_ends)])
    order = np.argsort(times, kind="stable")
    values = np.cumsum(steps[order])
    times = times[order]
    # keep the last of several changes at one time
    is_last = np.append(times[1:] != times[:-1], True)
    count = int(is_last.sum())
    names = np.full(count, IN_FLIGHT, object)
    return Counters(np.full(count, device, np.int32), names, times[is_last], values[is_last])


# ---- the trace of a run


class StageCosts(NamedTuple):
    """The clock's costs in seconds, a sentence on their source, and whether they were measured."""

    costs: Costs
    origin: str
    are_measured: bool


class ModelledRates(NamedTuple):
    """Rates of a simulated run: the share of the devices' time in passes and updates, and the
    samples per second.
    """

    utilization: float
    samples_per_second: float


def write_measured_trace(job: Job, path: Path, measured: Report) -> None:
    """Write the devices' events of the updates of `log.trace` as Chrome JSON; times count from the
    first event.
    """
    events = measured.events
    counters = measured.counters
    assert events is not None
    begin = int(events.start.min()) if len(events.start) else 0
    events = events._replace(start=events.start - begin, end=events.end - begin)
    events = events.select(np.argsort(events.start, kind="stable"))
    counters = (
        Counters.from_rows([])
        if counters is None
        else counters._replace(time=counters.time - begin)
    )
    metadata = {**make_trace_metadata(job), "modelled": False}
    if measured.utilization is not None:
        # the devices have a schedule of their own
        metadata["planned_utilization"] = measured.utilization
        metadata["planned_bubble_fraction"] = 1 - measured.utilization
    write_chrome(path, events, counters, metadata)


def write_modelled_trace(job: Job, folder: Path, costs: StageCosts) -> None:
    """Write the played schedule of the updates that `log.trace` names into a run's folder, as
    columns and as Chrome JSON.
    """
    schedule = job.schedule
    batch = job.schedule.accumulate
    count = min(schedule.microbatches, job.traced_updates.stop * batch)
    metadata = {**make_trace_metadata(job), "modelled": True, "why_modelled": costs.origin}
    events, counters = build_modelled_events(
        clock(schedule, costs.costs, count, job.placement),
        (job.table.forward(0, count), job.table.backward(0, count)),
        accumulate=batch,
        unit_ns=1e9,
        device_of_stage=job.placement,
        boundary_bytes=job.footprint.boundary_bytes,
        gradients_cross=metadata["gradients_cross"],
        updates=job.traced_updates,
        is_whole=schedule.is_whole if Kind.WEIGHT_GRADIENT in schedule.passes else None,
    )
    writer = TraceWriter(folder / "trace" / f"modelled{SUFFIX}", metadata)
    writer.write_events(events)
    writer.write_counters(counters)
    writer.close()
    write_chrome(folder / "trace.json.gz", events, counters, metadata)


def choose_stage_costs(job: Job, seconds: StageSeconds | None, position: Position) -> StageCosts:
    """Return the measured costs of the stages; without them the time of a microbatch, divided in
    proportion to FLOPs.
    """
    why = (
        "the emulator runs all stages in one process, so no device can be timed: times are of "
        "the simulated schedule, with"
    )
    if seconds is not None and seconds.forward and any(seconds.forward + seconds.backward):
        costs = Costs(seconds.forward, seconds.backward, seconds.update)
        return StageCosts(
            costs, f"{why} each stage's passes measured on this machine ({seconds.how})", True
        )
    reason = f", since {seconds.how}" if seconds is not None and not seconds.forward else ""
    forward = list(job.footprint.forward_flops)
    backward = list(job.footprint.backward_flops or [BACKWARD * flops for flops in forward])
    total = sum(forward) + sum(backward)
    if not total:
        forward = [1.0] * len(job.partition)
        backward = [1.0] * len(job.partition)
        total = 2.0 * len(job.partition)
    seconds_of_update = position.seconds / position.timed_updates if position.timed_updates else 1.0
    scale = seconds_of_update / (job.schedule.accumulate * job.config.replicas) / total
    costs = Costs(
        [scale * f for f in forward],
        [scale * b for b in backward],
        [0.0] * len(job.partition),
    )
    return StageCosts(
        costs, f"{why} the time of a microbatch divided by the stages' FLOPs{reason}", False
    )


def compute_modelled_rates(job: Job, costs: Costs) -> ModelledRates:
    """Return busy / (devices x span) and samples / span. The phases of a run, such as a warm-up by
    GPipe, are played separately."""
    busy = span = 0.0
    for _, updates, schedule in job.list_phases():
        microbatches = updates * schedule.accumulate
        busy += microbatches * (sum(costs.forward) + sum(costs.backward)) + updates * sum(
            costs.update
        )
        span += estimate_run_time(schedule, costs, microbatches, job.placement)
    return ModelledRates(
        busy / (span * len(set(job.placement))), job.updates * job.global_batch_size / span
    )
