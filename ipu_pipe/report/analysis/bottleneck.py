"""Find the bottleneck of a traced run, its reason and a remedy, such as moving stage boundaries.

The bottleneck is the first of these of which the condition holds:

    outside         evaluation, checkpoints and pauses take more than half of the span on a device
    data            a device waits for its batches longer than any device computes
    host            nothing that is recorded accounts for more than half of the span on a device that the others wait for
    link            a link is busy longer for a microbatch than any device computes for one
    communication   all devices together, and the slowest one, spend more time on messages alone than on computing
    stage           otherwise: the stage of the device that computes longest for a microbatch

A modelled time has a spread. Where another device is as slow within it, no device is named, and
where another stage of the device is, no stage; no cut is advised that gains less than the spread.

The remedy for a slow stage is usually another cut. `find_best_move` divides each stage's measured
time among its units in proportion to their FLOPs, cuts the units anew, and plays both cuts by the
run's schedule. For example stage 0 takes 4 ms and has the units a, b, c with 1, 2 and 1 GFLOP, and
stage 1 takes 2 ms for the unit d:

    cut now     a b c | d     4 and 2 ms          estimated times of the units: a 1, b 2, c 1, d 2 ms
    cut then    a b | c d     3 and 3 ms          gain 4 / 3 - 1 = 33 % in a long pipeline without bubbles
"""

from __future__ import annotations

from itertools import product
from typing import Callable, Collection, Iterator, Mapping, NamedTuple, Sequence

import numpy as np
from numpy.typing import NDArray

from ipu_pipe.errors import BadInput
from ipu_pipe.model.balance import find_best_cut
from ipu_pipe.plan.batch_times import BatchTimes
from ipu_pipe.report.analysis.devices import HOST
from ipu_pipe.report.analysis.metadata import RunMetadata
from ipu_pipe.report.analysis.stages import find_longest, measure_device_spreads
from ipu_pipe.report.analysis.text import Analysis, Row, describe_origin, format_share, format_time
from ipu_pipe.schedule.clock import Costs, Transfer, clock
from ipu_pipe.schedule.methods import Timeline
from ipu_pipe.schedule.timelines import make_schedule

STAGE = "stage"
LINK = "link"
COMMUNICATION = "communication"
DATA = "data"
UNRECORDED = "host"
OUTSIDE = "outside"
# stages whose times differ by no larger share count as equal
EVEN = 0.05
# the share of the span that stragglers must lose to be reported
NOTABLE = 0.05
# the share by which a replica must be slower than the others to be reported
NOTABLE_REPLICA = 0.25
# messages on one host that take longer, at fewer bytes a second, are late for another reason
SLOWEST_MESSAGE_NS = 1_000_000
SLOWEST_COPY = 50_000_000
# the least gain for which another boundary is advised
WORTHWHILE = 0.02


class Cause(NamedTuple):
    """A bottleneck: the `device` (None if it cannot be told), `what` of it (STAGE, LINK, ...), and
    the sentences `why` and `do`, without a full stop.
    """

    device: int | None
    what: str
    why: str
    do: str


def find_bottleneck(
    analysis: Analysis, loads: dict[int, float], move: Row, run: RunMetadata
) -> Row | None:
    """Return the row of the analysis, None if no device computes, or if one device stands for all:
    its time does not tell which of them holds the run up. `why` and `do` are sentences without a
    full stop.

    `analysis`: all but the bottleneck. `loads`: nanoseconds for a microbatch by device, empty where
    they are not known. `move`: of `find_best_move`.
    """
    busy = {device["index"]: device["busy_ns"] for device in analysis["devices"]}
    # without times for a microbatch the devices are compared by all that they computed
    by_device = loads or {device: float(ns) for device, ns in busy.items()}
    # devices with equal loads, such as replicas, are told apart by all that they computed
    slowest = max(by_device, key=lambda device: (by_device[device], busy[device]), default=-1)
    if not by_device or not busy[slowest]:
        return None
    stages = [stage for stage in analysis["stages"] if slowest in stage["devices"]]
    longest_stages = _find_longest_stages(stages)
    cause = _find_time_outside(analysis, slowest)
    # of all IPUs together only the time outside of training is known
    if cause is None and analysis["devices"][0].get("covers"):
        return None
    # in the order of the table above
    cause = cause or _find_slow_data(analysis, busy[slowest])
    cause = cause or _find_slow_host(analysis, busy[slowest])
    # no cause of its own: it is added to one that it may explain
    starved = _describe_starved(analysis, loads.get(slowest, 0.0), run)
    cause = cause or _find_slow_link(analysis, loads, slowest)
    cause = cause or _find_communication(analysis, slowest, run)
    spreads = measure_device_spreads(analysis["stages"])
    # without the spread, traces of one unchanged pipeline name now one stage, now another
    longest = find_longest(by_device, spreads)
    if cause is None and len(longest) > 1:
        cause, longest_stages = _describe_equals(analysis, longest, spreads, by_device, move, run)
    elif cause is None:
        unit = "per microbatch" if loads else "in all"
        on_device = f" with stage{_list_words(longest_stages)}" if stages else ""
        others = ", ".join(str(s["index"]) for s in stages if s["index"] not in longest_stages)
        place = f"device {slowest}{on_device}{others and f' (and {others})'}"
        computes = f"{place} computes for {format_time(by_device[slowest])} {unit}"
        replicas = {device for stage in stages for device in stage["devices"]}
        # replicas do the same work, so the device is compared with those of other stages
        others_of = {d: ns for d, ns in by_device.items() if d == slowest or d not in replicas}
        slower = [*_compare_replicas(busy, slowest, replicas)]
        further = [*slower, *_explain(analysis, slowest)]
        why = "; ".join([computes + _compare(slowest, others_of), *further])
        do = _advise(analysis, by_device, move, run, "its")
        # another cut makes no machine faster
        if slower:
            do = "find what slows this replica, such as its machine or its data"
        cause = Cause(slowest, STAGE, why, do)
    elif cause.device != slowest:
        # one subject: the stage of the device that is named
        longest_stages = _find_longest_stages(
            [stage for stage in analysis["stages"] if cause.device in stage["devices"]]
        )
    if starved and cause.what in (LINK, COMMUNICATION, STAGE):
        cause = cause._replace(why=f"{cause.why}; {starved}")
        if cause.what != STAGE:
            cause = cause._replace(do=f"give each rank a core of its own; else {cause.do}")
    is_one = len(longest_stages) == 1
    return {
        "stage": longest_stages[0] if is_one else None,
        "within_spread": [] if is_one else longest_stages,
        **cause._asdict(),
        **move,
    }


def _find_longest_stages(stages: Sequence[Row]) -> list[int]:
    """Return the stage, of those of a device, that computes longest; several if they are as long
    within their spread.
    """
    if not stages:
        return []
    is_known = all(stage["spread"] is not None for stage in stages)
    return find_longest(
        {stage["index"]: stage["busy_ns"] for stage in stages},
        {stage["index"]: stage["spread"] for stage in stages} if is_known else {},
    )


def _describe_equals(
    analysis: Analysis,
    longest: Sequence[int],
    spreads: Mapping[int, float],
    loads: Mapping[int, float],
    move: Row,
    run: RunMetadata,
) -> tuple[Cause, list[int]]:
    """Return a cause without a device, for the devices `longest` that are as slow as one another
    within the spread, and their stages.
    """
    stages = [
        stage["index"]
        for stage in analysis["stages"]
        if not set(longest).isdisjoint(stage["devices"])
    ]
    # where devices have several stages it is the devices that are equal
    noun = "stage" if len(stages) == len(longest) else "device"
    equals = stages if noun == "stage" else sorted(longest)
    spread = max(spreads[device] for device in longest)
    name = f"no one {noun} is slowest: {noun}{_list_words(equals)} are within the spread of "
    why = "; ".join([f"{name}{spread:.1%}", *_explain(analysis, None)])
    return Cause(None, STAGE, why, _advise(analysis, loads, move, run, "their")), stages


def _list_words(numbers: Sequence[int]) -> str:
    """Format numbers after a noun in the singular: " 1", "s 1 and 2", "s 0, 1 and 3"."""
    *first, last = map(str, numbers)
    return f"s {', '.join(first)} and {last}" if first else f" {last}"


def _find_time_outside(analysis: Analysis, slowest: int) -> Cause | None:
    """Return the time outside training as the cause, of the device `slowest`, if on a device it is
    more than half of the span.
    """
    outside = max(analysis["devices"], key=lambda device: device["outside_ns"])
    span = analysis["span_ns"]
    if 2 * outside["outside_ns"] <= span:
        return None
    kinds = {kind: ns for kind, ns in outside["idle_in"].items() if kind != HOST and ns}
    most = f" (mostly {max(kinds, key=lambda kind: kinds[kind])})" if kinds else ""
    why = (
        f"evaluation, checkpoints and pauses take {format_share(outside['outside_ns'], span)} of "
        f"the span{most}"
    )
    return Cause(
        slowest, OUTSIDE, why, "evaluate or save less often (evaluate.every, checkpoint.every)"
    )


def _find_slow_data(analysis: Analysis, busy_ns: int) -> Cause | None:
    """Return the data loader as the cause if a device waits for it longer than the slowest one
    computes and than any link is busy.
    """
    device = max(analysis["devices"], key=lambda device: device["data_ns"])
    waited = device["data_ns"]
    # a shorter wait would go on as one for what is slower
    if waited <= max(busy_ns, _find_busiest_ns(analysis)):
        return None
    why = (
        f"device {device['index']} waits for its batches {format_share(waited, analysis['span_ns'])} "
        f"of the time, and the slowest device computes for {format_share(busy_ns, analysis['span_ns'])}"
    )
    return Cause(
        device["index"],
        DATA,
        why,
        "load batches ahead: more workers, or data that is prepared once",
    )


def _find_slow_host(analysis: Analysis, busy_ns: int) -> Cause | None:
    """Return what the host does without a record of it as the cause, if it takes more than half of
    the span on one of several devices, and another device waits for that one as long.
    """
    span = analysis["span_ns"]

    devices = analysis["devices"]
    silent_ns, number = max((d["idle_in"][HOST] + d["ramp_up_ns"], d["index"]) for d in devices)
    waited_ns = max(device["waits_for"].get(str(number), 0) for device in devices)
    # both: a host that is silent while nobody waits for it holds nothing up
    if 2 * min(silent_ns, waited_ns) <= span or silent_ns <= max(
        busy_ns, _find_busiest_ns(analysis)
    ):
        return None
    why = (
        f"no event accounts for {format_share(silent_ns, span)} of device {number}'s time, "
        f"in which others wait for it: its host loads data, writes logs or does other work that is "
        f"not recorded"
    )
    do = "load batches ahead and log less often; a range around each part of the loop would name it"
    return Cause(number, UNRECORDED, why, do)


def _find_busiest_ns(analysis: Analysis) -> int:
    """Return how long the busiest link is busy."""
    return max((link["busy_ns"] for link in analysis["links"]), default=0)


def _find_slow_link(analysis: Analysis, loads: dict[int, float], slowest: int) -> Cause | None:
    """Return the busiest link as the cause if a microbatch's messages take longer than its passes
    on the slowest device.
    """
    link = max(
        analysis["links"], key=lambda link: link["busy_ns_per_microbatch"] or 0.0, default=None
    )
    # without times for a microbatch nothing tells which is longer
    if link is None or not loads or (link["busy_ns_per_microbatch"] or 0.0) <= loads[slowest]:
        return None
    why = (
        f"messages from device {link['src']} to {link['dst']} ({link['carries']}) take "
        f"{format_time(link['busy_ns_per_microbatch'])} per microbatch, and device {slowest}, the "
        f"slowest, "
        f"computes for {format_time(loads[slowest])}"
    )
    do = (
        "choose a boundary that fewer bytes cross, send a smaller dtype (precision), or use a "
        "faster link"
    )
    return Cause(link["src"], LINK, why, do)


def _find_communication(analysis: Analysis, slowest: int, run: RunMetadata) -> Cause | None:
    """Return communication as the cause if all devices together, and the slowest one alone, spend
    more time on it than on computing.
    """
    devices = analysis["devices"]
    busiest = next(device for device in devices if device["index"] == slowest)
    if sum(device["communication_ns"] for device in devices) <= sum(
        device["busy_ns"] for device in devices
    ):
        return None
    if busiest["communication_ns"] <= busiest["busy_ns"]:
        return None
    talking = max(devices, key=lambda device: device["communication_ns"])
    training_ns = analysis["span_ns"] - talking["outside_ns"]
    why = (
        f"communication without overlapping compute takes "
        f"{format_share(talking['communication_ns'], training_ns)} of the "
        f"time of device {talking['index']}, and compute "
        f"{format_share(talking['busy_ns'], training_ns)}"
    )
    do = "send fewer bytes, or fewer and larger messages"
    if run.why_no_waits:
        why += f"; how much of it is waiting for another device is not known: {run.why_no_waits}"
        do = f"find what the messages wait for; then {do}"
    return Cause(talking["index"], COMMUNICATION, why, do)


def _describe_starved(analysis: Analysis, load_ns: float, run: RunMetadata) -> str:
    """Return the sentence that a message on one host takes far longer than a copy of its bytes,
    if that is a notable part of a microbatch's compute; "" if not.
    """
    link = max(analysis["links"], key=lambda link: link["busy_ns"], default=None)
    if link is None or run.hosts != 1 or not run.messages_end_late:
        return ""
    took = link["busy_ns"] / link["messages"]
    size = link["bytes"] / link["messages"] if link["bytes"] is not None else None
    # in bytes a second, of a time in nanoseconds
    is_fast = size is not None and size * 1e9 > SLOWEST_COPY * took
    if is_fast or took < SLOWEST_MESSAGE_NS or took < load_ns / 4:
        return ""
    message = "a message" if size is None else f"a message of {size:,.0f} bytes"
    return (
        f"{message} takes {format_time(took)} on one host"
        f"{', where it needs microseconds' if size is not None else ''}: unless it is large, ranks "
        f"share cores, or the receiver is late"
    )


def _compare(slowest: int, loads: Mapping[int, float]) -> str:
    """Compare the load of the slowest device with the other devices' loads."""
    others = [load for device, load in loads.items() if device != slowest]
    mean = sum(others) / len(others) if others else 0.0
    if not mean:
        return ""
    if loads[slowest] <= (1 + EVEN) * mean:
        return f", about as long as the others ({format_time(mean)})"
    return f", {loads[slowest] / mean:.3g} times the mean of the others ({format_time(mean)})"


def _compare_replicas(
    busy: Mapping[int, int], slowest: int, replicas: Collection[int]
) -> Iterator[str]:
    """Yield that a device computes longer than the devices with the same stages, if it does."""
    others = [busy[device] for device in replicas if device != slowest]
    mean = sum(others) / len(others) if others else 0.0
    if mean and busy[slowest] > (1 + NOTABLE_REPLICA) * mean:
        yield (
            f"it computes {busy[slowest] / mean:.3g} times as long as the replicas of its stage "
            f"(device{_list_words(sorted(set(replicas) - {slowest}))})"
        )


def _explain(analysis: Analysis, slowest: int | None) -> Iterator[str]:
    """Yield further findings about a run whose bottleneck is the device `slowest`, if it is one."""
    devices = analysis["devices"]
    span = analysis["span_ns"]
    # the keys are texts, as JSON has them
    waiting = max(devices, key=lambda device: device["waits_for"].get(str(slowest), 0))
    waited = waiting["waits_for"].get(str(slowest))
    if waited:
        yield (
            f"device {waiting['index']} waits for it "
            f"{format_share(waited, span - waiting['outside_ns'])} of the time"
        )
    bubble = analysis["bubble_fraction"]
    planned = analysis["planned_bubble_fraction"]
    if bubble is not None and planned is not None and len(devices) > 1:
        yield f"the bubble is {bubble:.1%}, the schedule's own {planned:.1%} (planned)"
    worst = max(analysis["stragglers"], key=lambda group: group["lost_ns"], default=None)
    if worst is not None and worst["lost_ns"] > NOTABLE * span:
        yield (
            f"{worst['count']} of stage {worst['stage']}'s passes ({worst['kind']}) are much "
            f"longer than its others, together "
            f"{format_share(worst['lost_ns'], span)} of the span, the longest "
            f"{format_time(worst['longest'][0]['duration_ns'])}"
        )
    silent = max(devices, key=lambda device: device["idle_in"][HOST])
    if 4 * silent["idle_in"][HOST] > span:
        yield (
            f"no event accounts for {format_share(silent['idle_in'][HOST], span)} of device "
            f"{silent['index']}'s span"
        )


def _advise(
    analysis: Analysis, loads: Mapping[int, float], move: Row, run: RunMetadata, whose: str
) -> str:
    """Return what to do about the slowest device or devices: `whose` work is too much."""
    gain = move["gain"]
    even = move["gain_if_balanced"]
    spread = analysis["spread"] or 0.0
    planned = analysis["planned_bubble_fraction"]
    # a gain below the spread may be chance
    if gain is not None and gain >= max(WORTHWHILE, spread):
        pairs = enumerate(zip(move["move"]["begins_now"], move["move"]["begins_then"]))
        moves = " and ".join(
            f"stage {s} at {then} instead of {now}" for s, (now, then) in pairs if now != then
        )
        low, high = move["gain_range"]
        return (
            f"{'begin' if low > 0 else 'try to begin'} {moves}: {gain:.0%} more throughput, "
            f"between {low:+.0%} and {high:+.0%} "
            f"(predicted: each stage's {describe_origin(analysis)} time is divided among its "
            f"layers in proportion to their "
            f"FLOPs; the range assumes that time per FLOP varies within a stage as much as between "
            f"stages, "
            f"by a factor of {move['time_per_flop_ratio']:.2g}; "
            "train a few updates with the new boundary to confirm it)"
        )
    host_ns = analysis["devices"][0]["idle_in"][HOST]
    # before advice on balance: a rank that is not in the trace may be the slow one
    if run.ranks is not None and run.ranks > len(analysis["devices"]):
        return f"give the traces of all {run.ranks} ranks: some do not tell who waits for whom"
    if len(analysis["devices"]) == 1 and 2 * host_ns > analysis["span_ns"]:
        return "let the host keep the device busy: larger or fewer operations, data loaded ahead"
    if len(analysis["devices"]) == 1:
        return "there is one device: use more devices, or a smaller model"
    if max(loads.values()) > (1 + max(EVEN, spread)) * sum(loads.values()) / len(loads):
        if gain is not None:
            much = f"more than the spread of {spread:.1%}" if spread > WORTHWHILE else "much"
            return (
                f"no other boundary helps by {much}: if a single unit is too large, let a stage "
                "begin inside it"
            )
        hope = (
            f"{even:.0%} more throughput at most, predicted" if even else "the run would be faster"
        )
        mean = sum(loads.values()) / len(loads)
        excess = 1 - mean / max(loads.values())
        return (
            f"move about {excess:.0%} of {whose} work to other stages, which would then compute "
            f"for {format_time(mean)} each: with equal stages {hope} "
            f"(which boundary to move is not known: {move['why_no_gain']})"
        )
    if (
        planned is not None
        and planned > 0.1
        and run.known_method is not None
        and run.known_method.flushes
    ):
        return "use more microbatches per update, or a method that does not drain the pipeline"
    if spread > EVEN:
        return (
            f"stages are balanced within the spread of {spread:.1%}: time them again while the "
            "machine does nothing else, or use faster devices, or more of them"
        )
    return "stages are balanced: use faster devices, or more of them"


# ---- the gain of moving stage boundaries: cut the units again by measured times, and play both cuts by the clock

# playing more stages takes seconds
MOST_STAGES = 128
# the most passes of an update
MOST_PLANNED = 1 << 20
# the most passes for methods whose updates are played pass by pass
MOST_PLAYED = 1 << 14
# the most stages whose times are varied
MOST_VARIED = 8
FloatArray = NDArray[np.float64]


class Measured(NamedTuple):
    """The measured times of P stages and the FLOPs of n units, each of forward and backward, and
    the stage of each unit.
    """

    times: FloatArray  # (2, P)
    flops: FloatArray  # (2, n)
    stage_of_unit: NDArray[np.int64]  # (n,)

    def estimate_unit_times(self, scale: float | FloatArray = 1.0) -> list[FloatArray]:
        """Divide each stage's times among its units by their FLOPs times `scale`, equally if they
        have none.
        """
        stage = self.stage_of_unit
        # (n,): how many units share the stage of each
        counts = np.bincount(self.stage_of_unit)[self.stage_of_unit]
        unit_times = []
        for time, work in zip(self.times, self.flops * scale):
            # (n,): the FLOPs of each unit's stage
            sums = np.bincount(stage, work)[stage]
            unit_times.append(
                np.where(
                    sums > 0,
                    # NumPy computes both branches, and would warn of a division by 0
                    time[stage] * work / np.where(sums > 0, sums, 1.0),
                    time[stage] / counts,
                )
            )
        return unit_times

    def compare_speeds(self) -> float:
        """Return how many times longer the slowest stage takes for a FLOP than the fastest."""
        time = self.times.sum(axis=0)
        flops = np.bincount(self.stage_of_unit, self.flops.sum(axis=0))
        # a stage without FLOPs has no time for one
        known = (flops > 0) & (time > 0)
        time_per_flop = time[known] / flops[known]
        return float(time_per_flop.max() / time_per_flop.min()) if known.any() else 1.0

    def vary_stage_times(self, starts: list[int], ratio: float) -> Iterator[list[FloatArray]]:
        """Yield the times of the stages that begin at the units `starts`: as estimated, and then
        with errors of the estimate.

        The error is that the units of one new stage take `ratio` times longer or shorter for a FLOP
        than the others with which
        they share a stage now: as much as the stages differ from one another.
        """
        estimate = [np.add.reduceat(times, starts) for times in self.estimate_unit_times()]
        yield estimate
        # (n,): the stage of each unit in the new cut
        new_stage = np.searchsorted(starts, np.arange(len(self.stage_of_unit)), side="right") - 1
        # each is played twice, which takes time, and errors of short stages hardly matter
        longest = np.argsort(-(estimate[0] + estimate[1]))[:MOST_VARIED]
        for stage, factor in product(longest, (ratio, 1 / ratio)):
            scale = np.where(new_stage == stage, factor, 1.0)
            yield [np.add.reduceat(times, starts) for times in self.estimate_unit_times(scale)]


def find_best_move(run: RunMetadata, stages: Sequence[Row], links: Sequence[Row]) -> Row:
    """Compare the cut whose slowest stage is the fastest possible with the cut of the run.

    Return keys of the analysis's row of the bottleneck. `gain`: how much throughput the other cut
    adds (0.25: a quarter), by the clock; `gain_if_balanced`: if all stages took equally long; None
    where it is not known, for the reason `why_no_gain`. `move`: the units at which stages begin now
    and then, and each stage's time for a microbatch. `gain_range`: the least and the greatest gain
    by `Measured.vary_stage_times` with the ratio `time_per_flop_ratio`.
    """
    answer: Row = dict.fromkeys(
        ("gain", "gain_range", "time_per_flop_ratio", "why_no_gain", "gain_if_balanced", "move")
    )
    answer["why_no_gain"] = _find_missing(run, stages)
    if answer["why_no_gain"]:
        return answer
    forward, backward = (
        np.array([stage[key] for stage in stages], np.float64)
        for key in ("forward_ns", "backward_ns")
    )
    play = _make_player(run, stages, links)
    try:
        time_now = play(forward, backward)
        # no cut does better: the same work, and no stage that is longer than another
        time_if_even = play(
            np.full(len(stages), forward.mean()),
            np.full(len(stages), backward.mean()),
        )
    # the metadata may contradict each other
    except BadInput as error:
        return {**answer, "why_no_gain": f"the schedule cannot be rebuilt: {error.faults[0]}"}
    answer["gain_if_balanced"] = time_now / time_if_even - 1
    units = run.units or []
    stage_of_unit = np.array([unit.stage for unit in units], np.int64)
    has_all_stages = set(stage_of_unit.tolist()) == set(range(len(stages)))
    if (np.diff(stage_of_unit) < 0).any() or not has_all_stages:
        why = (
            "units are not in the order of the stages"
            if units
            else "metadata does not list the units of the model"
        )
        return {**answer, "why_no_gain": f"the trace's {why}"}
    # (2, n)
    flops = np.array([[unit.forward_flops, unit.backward_flops] for unit in units], np.float64).T
    measured = Measured(np.stack([forward, backward]), flops, stage_of_unit)
    forwards, backwards = measured.estimate_unit_times()
    # the first unit of each stage, as they are in the stages' order
    starts_now = np.searchsorted(stage_of_unit, np.arange(len(stages))).tolist()
    starts = find_best_cut((forwards + backwards).tolist(), len(stages))
    assert starts is not None, "there are at least as many units as stages"
    # if the pipeline drains, an even cut is not always the fastest
    if play(np.add.reduceat(forwards, starts), np.add.reduceat(backwards, starts)) >= time_now:
        starts = starts_now
    ratio = measured.compare_speeds()
    gains = [0.0]
    if starts != starts_now:
        gains = [time_now / play(*times) - 1 for times in measured.vary_stage_times(starts, ratio)]
    move = {
        "begins_now": [units[i].name for i in starts_now],
        "begins_then": [units[i].name for i in starts],
        "busy_now_ns": (forward + backward).tolist(),
        "busy_then_ns": np.add.reduceat(forwards + backwards, starts).tolist(),
    }
    return {
        **answer,
        "gain": gains[0],
        "gain_range": [min(gains), max(gains)],
        "time_per_flop_ratio": ratio,
        "move": move,
    }


def _find_missing(run: RunMetadata, stages: Sequence[Row]) -> str | None:
    """Return the first reason why cuts cannot be played; None without any."""
    count = len(stages)
    devices = run.device_of_stage or []
    has_all = [stage["index"] for stage in stages] == list(range(count)) and (
        run.stages or count
    ) == count
    most = (
        MOST_PLANNED if run.known_method is None or run.known_method.order is None else MOST_PLAYED
    )
    without_times = any(not stage["forward_ns"] or stage["backward_ns"] is None for stage in stages)
    reasons = (
        (run.known_method is None, run.why_no_method),
        (not run.accumulate, "the trace does not record how many microbatches an update has"),
        (not has_all, "the trace does not contain all stages"),
        (
            bool(devices) and len(devices) != count,
            "the trace does not record the device of each stage",
        ),
        (
            not _knows_order(run),
            "several stages share a device, and the order of its passes is not known",
        ),
        (without_times, "the trace does not contain forwards and backwards of all stages"),
        (count == 1, "there is one stage"),
        (
            count * (run.accumulate or 0) > most,
            f"updates of more than {most} passes are not simulated",
        ),
        (count > MOST_STAGES, f"more than {MOST_STAGES} stages are not simulated"),
    )
    return next((why for applies, why in reasons if applies), None)


def _knows_order(run: RunMetadata) -> bool:
    """Return whether devices have one stage each, or a method by device that drains says what they
    do in which order.
    """
    method = run.known_method
    devices = run.device_of_stage or []
    if method is None or method.order is None:
        return len(set(devices)) == len(devices)
    return (
        method.flushes
        and method.pipeline is not Timeline.ROWS
        and list(method.order.place(len(devices))) == devices
    )


def _make_player(
    run: RunMetadata, stages: Sequence[Row], links: Sequence[Row]
) -> Callable[[FloatArray, FloatArray], float]:
    """Return a function from the times of forwards and backwards (P,) to the time of an update, by
    the run's schedule.
    """
    method = run.known_method
    accumulate = run.accumulate
    assert method is not None and accumulate is not None
    update = [stage["update_ns"] or 0.0 for stage in stages]
    devices = run.device_of_stage or [stage["devices"][0] for stage in stages]
    latency: dict[tuple[int, int], float] = {}
    for link in links:
        if link["latency_ns"]:
            way = link["src"], link["dst"]
            latency[way] = max(latency.get(way, 0.0), link["latency_ns"]["median"])
    halves = [(stage["input_gradient_ns"], stage["weight_gradient_ns"]) for stage in stages]
    weight_share = None
    if all(weight and first is not None for first, weight in halves):
        weight_share = np.array([weight / (first + weight) for first, weight in halves])
    pairs = list(zip(devices, devices[1:]))
    onward = tuple(Transfer(latency=latency.get((a, b), 0.0)) for a, b in pairs)
    back = tuple(Transfer(latency=latency.get((b, a), 0.0)) for a, b in pairs)

    def play(forward: FloatArray, backward: FloatArray) -> float:
        # the halves of a backward stay in the proportion in which they were measured
        weight = [] if weight_share is None else (backward * weight_share).tolist()
        costs = Costs(
            forward.tolist(),
            backward.tolist(),
            update,
            onward=onward,
            back=back,
            weight_gradient=weight,
        )
        if method.order is not None:
            return clock(make_schedule(method, len(forward), accumulate, accumulate), costs).finish
        return BatchTimes(method, len(forward), costs).compute(accumulate).seconds

    return play
