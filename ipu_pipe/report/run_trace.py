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
from ipu_pipe.model.timing import StageSeconds, combine_spreads
from ipu_pipe.report.position import Position
from ipu_pipe.schedule.actions import SPLIT_PASSES, Kind, get_pass_needs
from ipu_pipe.schedule.clock import Costs, Times, clock
from ipu_pipe.schedule.stretches import IntArray
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


class _PlayedSchedule(NamedTuple):
    """The times of a schedule's actions in ns by kind, each (P, n), and the data of its events.

    The other fields: as in `build_modelled_events`.
    """

    start: dict[Kind, IntArray]
    end: dict[Kind, IntArray]
    versions: tuple[IntArray, IntArray]
    device_of_stage: Sequence[int]
    boundary_bytes: Sequence[int] | None
    gradients_cross: bool
    is_whole: NDArray[np.bool_] | None

    def find_target(self, kind: Kind, s: int) -> int | None:
        """Return the stage to which stage s sends the result of its passes of this kind."""
        if kind is Kind.FORWARD:
            target = s + 1
        elif kind in (Kind.BACKWARD, Kind.INPUT_GRADIENT) and self.gradients_cross:
            target = s - 1
        else:
            return None
        return target if 0 <= target < len(self.device_of_stage) else None

    def count_sent_bytes(self, kind: Kind, s: int) -> int:
        """Return the bytes that stage s sends for a microbatch, or -1 if it sends none."""
        target = self.find_target(kind, s)
        if self.boundary_bytes is None or target is None:
            return -1
        return self.boundary_bytes[min(s, target)]

    def is_whole_backward(self, kind: Kind, s: int) -> NDArray[np.bool_]:
        """Return which actions (n,) belong to a whole backward, in a schedule with split ones."""
        count = self.start[kind].shape[1]
        if self.is_whole is None or kind not in SPLIT_PASSES[1:]:
            return np.zeros(count, np.bool_)
        return self.is_whole[s, :count]


def build_modelled_events(
    times: Times,
    versions: tuple[IntArray, IntArray],
    unit_ns: float,
    device_of_stage: Sequence[int],
    boundary_bytes: Sequence[int] | None = None,
    gradients_cross: bool = True,
    is_whole: NDArray[np.bool_] | None = None,
) -> tuple[Events, Counters]:
    """Return the events of a played schedule, device by device in their order, and its counters of
    microbatches in flight.

    `times`: of the actions, in units of `unit_ns`. `versions`: the ones that forwards and backwards
    read, each (P, M). `boundary_bytes[s]`: the bytes that stage s sends to stage s + 1 for a
    microbatch, and gets back unless `gradients_cross` is false; None: no messages. `is_whole`: in a
    schedule with split backwards, the backwards (P, M) that are a single pass, which takes the time
    of their input gradient.
    """
    start, end = (
        {kind: np.rint(moments * unit_ns).astype(np.int64) for kind, moments in column.items()}
        for column in times[:2]
    )
    played = _PlayedSchedule(
        start, end, versions, device_of_stage, boundary_bytes, gradients_cross, is_whole
    )
    # the last pass, which completes a microbatch on its stage
    completing = list(start)[-2]
    events: list[Events] = []
    counters: list[Counters] = []
    for device in dict.fromkeys(device_of_stage):
        stages = list_stages(device_of_stage, device)
        events.append(_build_device_events(played, stages))
        forward_ends = end[Kind.FORWARD][stages].ravel()
        counters.append(_count_in_flight(device, forward_ends, end[completing][stages].ravel()))
    return ev.concatenate_events(events), ev.concatenate_counters(counters)


def _build_device_events(played: _PlayedSchedule, stages: Sequence[int]) -> Events:
    """Return the actions, waits and messages of a device with these stages, in order."""
    actions: list[Events] = []
    messages: list[Events] = []
    inputs: list[IntArray] = []
    for s in stages:
        for kind in played.start:
            stage_actions, stage_inputs = _build_actions(played, kind, s)
            actions.append(stage_actions)
            inputs.append(stage_inputs)
            messages.append(_build_messages(played, kind, s))
    waits = _find_waits(ev.concatenate_events(actions), np.concatenate(inputs, axis=1))
    return _sort(ev.concatenate_events([*actions, waits, *messages]))


def _build_actions(played: _PlayedSchedule, kind: Kind, s: int) -> tuple[Events, IntArray]:
    """Return a stage's actions of one kind, and their inputs as `_find_inputs` does."""
    index = np.arange(played.start[kind].shape[1])
    if kind is Kind.UPDATE:
        version = index + 1
    else:
        # False and True are the places of forwards and backwards
        version = played.versions[kind is not Kind.FORWARD][s, : len(index)]
    is_whole = played.is_whole_backward(kind, s)
    actions = Events.from_columns(
        len(index),
        stage=s,
        device=played.device_of_stage[s],
        kind=np.where(is_whole, KIND_CODE[Kind.BACKWARD.word], KIND_CODE[kind.word]),
        microbatch=index,
        start=played.start[kind][s],
        end=played.end[kind][s],
        version=version,
        bytes=played.count_sent_bytes(kind, s),
    )
    inputs = _find_inputs(played, kind, s)
    # a whole backward has no weight gradient of its own
    if kind is Kind.WEIGHT_GRADIENT:
        return actions.select(~is_whole), inputs[:, ~is_whole]
    return actions, inputs


def _build_messages(played: _PlayedSchedule, kind: Kind, s: int) -> Events:
    """Return the messages of a stage's passes of one kind to another device."""
    target = played.find_target(kind, s)
    if target is None or played.boundary_bytes is None:
        return Events.from_rows([])
    device = played.device_of_stage[s]
    if played.device_of_stage[target] == device:
        return Events.from_rows([])
    # at the end of each pass; the clock lets messages take no time of the device
    ends = played.end[kind][s]
    return Events.from_columns(
        len(ends),
        stage=s,
        device=device,
        kind=KIND_CODE["send"],
        microbatch=np.arange(len(ends)),
        start=ends,
        end=ends,
        bytes=played.count_sent_bytes(kind, s),
        peer=played.device_of_stage[target],
        carries=PAYLOAD_CODE[CROSSING[s - target]],
    )


def _find_inputs(played: _PlayedSchedule, kind: Kind, s: int) -> IntArray:
    """Return the rows ARRIVAL, SENDER and PAYLOAD (3, n): when the input of each action from
    another device arrived, that device, and the payload; -1 if the action needs no such input.
    """
    devices = played.device_of_stage
    inputs = np.full((3, played.start[kind].shape[1]), -1, np.int64)
    # its gradients are of its own stage's backwards
    if kind is Kind.UPDATE:
        return inputs
    for need in get_pass_needs(kind, local=not played.gradients_cross):
        source = s + need.offset
        if 0 <= source < len(devices) and devices[source] != devices[s]:
            inputs[ARRIVAL] = played.end[need.kind][source]
            inputs[SENDER] = devices[source]
            inputs[PAYLOAD] = PAYLOAD_CODE[CROSSING[need.offset]]
            break
    return inputs


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
    # when the device is through with all before each action
    free = np.concatenate([[0], np.maximum.accumulate(actions.end)[:-1]])
    gap = actions.start > free
    actions = actions.select(gap)
    inputs = inputs[:, gap]
    free = free[gap]
    # an input that was there before the gap is not what the device waits for
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


def select_updates(events: Events, accumulate: int, updates: range) -> Events:
    """Return the events of these updates, device by device, with pauses in place of updates that
    are left out.
    """
    devices = dict.fromkeys(events.device.tolist())
    by_device = [events.select(events.device == device) for device in devices]
    return ev.concatenate_events(
        [_select_updates_of_device(device, accumulate, updates) for device in by_device]
    )


def _select_updates_of_device(events: Events, accumulate: int, updates: range) -> Events:
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
    """The clock's costs in seconds, a sentence on their source, and whether they were measured.

    `spread`: how far the time of each stage may be off by chance, as a share of it; None if the
    costs were not measured.
    """

    costs: Costs
    origin: str
    are_measured: bool
    spread: tuple[float, ...] | None = None


class ModelledRates(NamedTuple):
    """Rates of a simulated run: the share of the devices' time in passes and updates, the samples
    per second, and how far both may be off by chance, as a share of them.
    """

    utilization: float
    samples_per_second: float
    spread: float | None


def write_measured_trace(job: Job, path: Path, measured: Report) -> None:
    """Write the devices' events of the updates of `log.trace` as Chrome JSON; times count from the
    first event.
    """
    events = measured.events
    counters = measured.counters
    assert events is not None
    begin = int(events.start.min()) if len(events.start) else 0
    # viewers hold microseconds as floats, which are exact only near 0
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
    # the clock plays from the start, as a later update depends on all before it
    count = min(schedule.microbatches, job.traced_updates.stop * batch)
    metadata = {**make_trace_metadata(job), "modelled": True, "why_modelled": costs.origin}
    if costs.spread is not None:
        metadata["spread"] = list(costs.spread)
    events, counters = build_modelled_events(
        clock(schedule, costs.costs, count, job.placement),
        (job.table.forward(0, count), job.table.backward(0, count)),
        # costs are in seconds
        unit_ns=1e9,
        device_of_stage=job.placement,
        boundary_bytes=job.footprint.boundary_bytes,
        gradients_cross=metadata["gradients_cross"],
        is_whole=schedule.is_whole if Kind.WEIGHT_GRADIENT in schedule.passes else None,
    )
    events = select_updates(events, batch, job.traced_updates)
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
            costs,
            f"{why} each stage's passes measured on this machine ({seconds.how})",
            True,
            seconds.spread,
        )
    reason = f", since {seconds.how}" if seconds is not None and not seconds.forward else ""
    forward = list(job.footprint.forward_flops)
    # where backwards were not counted
    backward = list(job.footprint.backward_flops or [BACKWARD * flops for flops in forward])
    total = sum(forward) + sum(backward)
    # a model of operations without FLOPs: all stages count as equal
    if not total:
        forward = [1.0] * len(job.partition)
        backward = [1.0] * len(job.partition)
        total = 2.0 * len(job.partition)
    seconds_of_update = position.seconds / position.timed_updates if position.timed_updates else 1.0
    # the emulator computes the microbatches of all replicas one after another
    scale = seconds_of_update / (job.schedule.accumulate * job.config.replicas) / total
    costs = Costs(
        [scale * f for f in forward],
        [scale * b for b in backward],
        [0.0] * len(job.partition),
    )
    return StageCosts(
        costs, f"{why} the time of a microbatch divided by the stages' FLOPs{reason}", False
    )


def compute_modelled_rates(
    job: Job, costs: Costs, spread: Sequence[float] | None = None
) -> ModelledRates:
    """Return busy / (devices x span) and samples / span. `spread`: of the time of each stage."""
    of_microbatch = sum(costs.forward) + sum(costs.backward)
    busy = job.updates * (job.schedule.accumulate * of_microbatch + sum(costs.update))
    span = float(job.play_updates(costs, job.drains, job.updates)[-1])
    loads = [f + b for f, b in zip(costs.forward, costs.backward)]
    return ModelledRates(
        busy / (span * len(set(job.placement))),
        job.updates * job.global_batch_size / span,
        None if spread is None else combine_spreads(loads, spread),
    )
