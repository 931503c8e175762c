"""What holds a run up, why, and what to do about it."""

from __future__ import annotations

from typing import Any, Dict, List, NamedTuple, Optional, Sequence

from ipu_pipe.report.analysis.boundaries import BoundaryMove
from ipu_pipe.report.analysis.device_time import HOST, DeviceTime
from ipu_pipe.report.analysis.facts import RunFacts
from ipu_pipe.report.analysis.links import LinkTraffic
from ipu_pipe.report.analysis.stages import StageTimes
from ipu_pipe.report.analysis.text import format_share, format_time

STAGE, LINK, COMMUNICATION, OUTSIDE = "stage", "link", "communication", "outside"
EVEN = 0.05  # stages whose times differ by no more count as equal
NOTABLE = 0.05  # share of the span that stragglers must lose to be named
WORTHWHILE = 0.02  # least gain for which a boundary is advised


class BottleneckEvidence(NamedTuple):
    """What the bottleneck is found from. `loads`: nanoseconds for a microbatch by device, empty where they are not known."""

    devices: Sequence[DeviceTime]
    stages: Sequence[StageTimes]
    links: Sequence[LinkTraffic]
    loads: Dict[int, float]
    move: BoundaryMove
    facts: RunFacts
    bubble: Optional[float]
    planned_bubble: Optional[float]


def find_bottleneck(evidence: BottleneckEvidence) -> Optional[Dict[str, Any]]:
    """Return the row of the analysis; None where no device computes. `why` and `do` are sentences without a full stop."""
    devices, move = evidence.devices, evidence.move
    busy = {device.device: device.busy_ns for device in devices}
    loads = evidence.loads or {device: float(ns) for device, ns in busy.items()}
    slowest = max(loads, key=lambda device: (loads[device], busy[device]), default=-1)
    if not loads or not busy[slowest]:
        return None
    stages = [stage for stage in evidence.stages if slowest in stage.devices]
    stage = max(stages, key=lambda stage: stage.busy_ns).stage if stages else None
    outside = max(devices, key=lambda device: device.outside_ns)
    link = max(evidence.links, key=lambda link: link.busy_ns_per_microbatch, default=None)
    talking = max(devices, key=lambda device: device.communication_ns)
    device, what = slowest, STAGE
    if 2 * outside.outside_ns > outside.span_ns:
        what, do = OUTSIDE, "evaluate or save less often (evaluate.every, checkpoint.every)"
        kinds = {kind: ns for kind, ns in outside.idle_in.items() if kind != HOST and ns}
        most = f" (mostly {max(kinds, key=lambda kind: kinds[kind])})" if kinds else ""
        share = format_share(outside.outside_ns, outside.span_ns)
        why = f"evaluation, checkpoints and pauses take {share} of the span{most}"
    elif link is not None and evidence.loads and link.busy_ns_per_microbatch > loads[slowest]:
        device, what = link.src, LINK
        why = (
            f"messages from device {link.src} to {link.dst} ({link.carries}) take {format_time(link.busy_ns_per_microbatch)} "
            f"for a microbatch, and device {slowest}, which computes longest, takes {format_time(loads[slowest])}"
        )
        do = "begin the stage where less crosses, send smaller numbers (precision), or use a faster link"
    elif sum(entry.communication_ns for entry in devices) > sum(busy.values()):
        device, what = talking.device, COMMUNICATION
        why = (
            f"messages under which nothing is computed take {format_share(talking.communication_ns, talking.training_ns)} of the "
            f"time of device {talking.device}, and compute {format_share(talking.busy_ns, talking.training_ns)}"
        )
        do = "see what the messages wait for; then send less, or larger messages"
    else:
        why, do = "; ".join(_explain(evidence, slowest, stage, loads)), _advise(evidence, loads)
    return {
        "stage": stage,
        "device": device,
        "what": what,
        "why": why,
        "do": do,
        "gain": move.gain,
        "why_no_gain": move.why_no_gain,
        "gain_if_balanced": move.gain_if_balanced,
        "move": move.to_record(),
    }


def _explain(evidence: BottleneckEvidence, slowest: int, stage: Optional[int], loads: Dict[int, float]) -> List[str]:
    devices = evidence.devices
    reason = f"device {slowest}" + (f" with stage {stage}" if stage is not None else "")
    reason += f" computes {format_time(loads[slowest])} {'for a microbatch' if evidence.loads else 'in all'}"
    others = [load for device, load in loads.items() if device != slowest]
    mean = sum(others) / len(others) if others else 0.0
    if mean and loads[slowest] <= (1 + EVEN) * mean:
        reason += f", about as long as the others ({format_time(mean)})"
    elif mean:
        reason += f", {loads[slowest] / mean:.3g} times what the others do on average ({format_time(mean)})"
    reasons = [reason]
    waiting = max(devices, key=lambda device: device.waits_for.get(slowest, 0))
    if waiting.waits_for.get(slowest):
        share = format_share(waiting.waits_for[slowest], waiting.training_ns)
        reasons.append(f"device {waiting.device} waits for it {share} of the time")
    if evidence.bubble is not None and evidence.planned_bubble is not None and len(devices) > 1:
        reasons.append(
            f"the bubble is {evidence.bubble:.1%}, the schedule's own {evidence.planned_bubble:.1%} (planned)"
        )
    stragglers = [group for entry in evidence.stages for group in entry.stragglers]
    worst = max(stragglers, key=lambda group: group["lost_ns"], default=None)
    if worst is not None and worst["lost_ns"] > NOTABLE * devices[0].span_ns:
        reasons.append(
            f"{worst['count']} of stage {worst['stage']}'s passes ({worst['kind']}) take far longer than its others, in all "
            f"{format_share(worst['lost_ns'], devices[0].span_ns)} of the span, one "
            f"{format_time(worst['longest'][0]['duration_ns'])}"
        )
    silent = max(devices, key=lambda device: device.idle_in[HOST])
    if 4 * silent.idle_in[HOST] > silent.span_ns:
        share = format_share(silent.idle_in[HOST], silent.span_ns)
        reasons.append(f"no event accounts for {share} of device {silent.device}'s span")
    return reasons


def _advise(evidence: BottleneckEvidence, loads: Dict[int, float]) -> str:
    move, facts, planned = evidence.move, evidence.facts, evidence.planned_bubble
    if move.gain is not None and move.gain >= WORTHWHILE:
        return (
            f"begin {move.format_moves()}: {move.gain:.0%} more throughput (predicted: each stage's "
            f"{'modelled' if facts.modelled else 'measured'} time is divided among its layers in proportion to their FLOPs, "
            "which real layers do not follow exactly; train for some updates with the new boundary to confirm it)"
        )
    if len(evidence.devices) == 1:
        return "one device: more stages, or a smaller model"
    if max(loads.values()) > (1 + EVEN) * sum(loads.values()) / len(loads):
        if move.gain is not None:
            return "no other boundary helps by much: where a single unit is too large, offer a finer place to begin a stage"
        gain = f"{move.gain_if_balanced:.0%} more throughput at most, predicted" if move.gain_if_balanced else "faster"
        return (
            f"move work away from it: if all stages took equally long, {gain} "
            f"(which boundary is not known: {move.why_no_gain})"
        )
    if planned is not None and planned > 0.1 and facts.known_method is not None and facts.known_method.flushes:
        return "more microbatches an update, or a method that does not drain the pipeline"
    return "stages are even: faster devices, or more of them"
