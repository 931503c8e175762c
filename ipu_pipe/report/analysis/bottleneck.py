"""What holds a run up, why, and what to do about it."""

from __future__ import annotations

from typing import Dict, List, NamedTuple, Optional, Sequence

from ipu_pipe.report.analysis.boundaries import BoundaryMove
from ipu_pipe.report.analysis.device_time import DeviceTime
from ipu_pipe.report.analysis.facts import RunFacts
from ipu_pipe.report.analysis.links import LinkTraffic
from ipu_pipe.report.analysis.stages import StageTimes
from ipu_pipe.report.analysis.text import format_share, format_time

STAGE, LINK, COMMUNICATION, OUTSIDE = "stage", "link", "communication", "outside"
EVEN = 0.05  # stages that differ by no more take equally long
NOTABLE = 0.05  # of the span
WORTH = 0.02  # a gain below that is none


class Bottleneck(NamedTuple):
    """`what`: STAGE, LINK, COMMUNICATION or OUTSIDE. `why` and `do`: sentences without a full stop."""

    stage: Optional[int]
    device: Optional[int]
    what: str
    why: str
    do: str


class BottleneckEvidence(NamedTuple):
    """What is looked at to find it. `loads`: nanoseconds for a microbatch by device, empty where microbatches are not told."""

    parts: Sequence[DeviceTime]
    stages: Sequence[StageTimes]
    links: Sequence[LinkTraffic]
    loads: Dict[int, float]
    move: BoundaryMove
    facts: RunFacts
    bubble: Optional[float]
    planned: Optional[float]


def find_bottleneck(seen: BottleneckEvidence) -> Optional[Bottleneck]:
    """None where no device computes."""
    by_device = {part.device: part for part in seen.parts}
    loads = seen.loads or {part.device: float(part.busy_ns) for part in seen.parts}
    device = max(loads, key=lambda each: (loads[each], by_device[each].busy_ns), default=-1)
    if not loads or not by_device[device].busy_ns:
        return None
    own = [stage for stage in seen.stages if device in stage.devices]
    stage = max(own, key=lambda each: each.busy_ns).stage if own else None
    outside = max(seen.parts, key=lambda part: part.outside_ns)
    if 2 * outside.outside_ns > outside.span_ns:
        kinds = {kind: ns for kind, ns in outside.idle_in.items() if kind != "host" and ns}
        most = f" ({max(kinds, key=lambda kind: kinds[kind])} most)" if kinds else ""
        why = f"evaluation, checkpoints and pauses take {format_share(outside.outside_ns, outside.span_ns)} of the span{most}"
        return Bottleneck(stage, device, OUTSIDE, why, "evaluate or save less often (evaluate.every, checkpoint.every)")
    slow = max(seen.links, key=lambda link: link.busy_each_ns, default=None)
    if slow is not None and seen.loads and slow.busy_each_ns > loads[device]:
        why = (
            f"messages from device {slow.source} to {slow.target} ({slow.carries}) take {format_time(slow.busy_each_ns)} for a "
            f"microbatch, and device {device}, which computes longest, {format_time(loads[device])}"
        )
        do = "begin the stage where less crosses, send smaller numbers (precision), or use a faster link"
        return Bottleneck(stage, slow.source, LINK, why, do)
    talks = max(seen.parts, key=lambda part: part.communication_ns)
    if sum(part.communication_ns for part in seen.parts) > sum(part.busy_ns for part in seen.parts):
        why = (
            f"messages under which nothing is computed take {format_share(talks.communication_ns, talks.own_ns)} of the time of "
            f"device {talks.device}, and compute {format_share(talks.busy_ns, talks.own_ns)}"
        )
        return Bottleneck(
            stage, talks.device, COMMUNICATION, why, "see what they wait for; then send less, or larger messages"
        )
    return Bottleneck(stage, device, STAGE, "; ".join(_why(seen, device, stage, loads)), _do(seen, loads))


def _why(seen: BottleneckEvidence, device: int, stage: Optional[int], loads: Dict[int, float]) -> List[str]:
    each = "for a microbatch" if seen.loads else "in all"
    others = [load for other, load in loads.items() if other != device]
    said = f"device {device}" + (f" with stage {stage}" if stage is not None else "")
    said += f" computes {format_time(loads[device])} {each}"
    found = [said]
    if others:
        mean = sum(others) / len(others)
        if mean and loads[device] <= (1 + EVEN) * mean:
            found = [f"{said}, about as long as the others ({format_time(mean)})"]
        elif mean:
            found = [f"{said}, {loads[device] / mean:.3g} times what the others do on average ({format_time(mean)})"]
    waiting = max(seen.parts, key=lambda part: part.waits_for.get(device, 0))
    if waiting.waits_for.get(device):
        waits = format_share(waiting.waits_for[device], waiting.own_ns)
        found.append(f"device {waiting.device} waits for it {waits} of the time")
    if seen.bubble is not None and seen.planned is not None and len(seen.parts) > 1:
        found.append(f"the bubble is {seen.bubble:.1%}, the schedule's own {seen.planned:.1%} (planned)")
    far = max((each for own in seen.stages for each in own.stragglers), key=lambda each: each.lost_ns, default=None)
    if far is not None and far.lost_ns > NOTABLE * seen.parts[0].span_ns:
        found.append(
            f"{far.count} of stage {far.stage}'s passes ({far.kind}) take far longer than its others, in all "
            f"{format_share(far.lost_ns, seen.parts[0].span_ns)} of the span, one {format_time(far.longest[0].duration_ns)}"
        )
    silent = max(seen.parts, key=lambda part: part.idle_in["host"])
    if 4 * silent.idle_in["host"] > silent.span_ns:
        found.append(
            f"of {format_share(silent.idle_in['host'], silent.span_ns)} of device {silent.device}'s span no event tells"
        )
    return found


def _do(seen: BottleneckEvidence, loads: Dict[int, float]) -> str:
    move = seen.move
    if move.gain is not None and move.gain >= WORTH:
        return (
            f"begin {' and '.join(move.moves)}: {move.gain:.0%} more throughput (predicted: each stage's "
            f"{'modelled' if seen.facts.modelled else 'measured'} time is divided among its layers in proportion to their FLOPs, "
            "which real layers do not follow exactly; train for some updates with the new boundary to confirm it)"
        )
    if len(seen.parts) == 1:
        return "one device: more stages, or a smaller model"
    uneven = max(loads.values()) > (1 + EVEN) * sum(loads.values()) / len(loads)
    if uneven and move.gain is not None:
        return "no other boundary helps by much: where a single unit is too large, offer a finer place to begin a stage"
    if uneven:
        more = f"up to {move.if_balanced:.0%} more throughput, predicted" if move.if_balanced else "faster"
        return f"move work away from it: if all stages took equally long, {more} (which boundary: not known, {move.why_not})"
    if seen.planned is not None and seen.planned > 0.1 and seen.facts.method is not None and seen.facts.method.flushes:
        return "more microbatches an update, or a method that does not empty the pipeline"
    return "stages are even: faster devices, or more of them"
