"""What holds a run up, why, and what to do about it."""

from __future__ import annotations

from typing import Any, Dict, Iterator, Optional

from ipu_pipe.report.analysis.devices import HOST
from ipu_pipe.report.analysis.facts import RunFacts
from ipu_pipe.report.analysis.text import describe_origin, format_share, format_time

STAGE, LINK, COMMUNICATION, OUTSIDE = "stage", "link", "communication", "outside"
EVEN = 0.05  # stages whose times differ by no more count as equal
NOTABLE = 0.05  # share of the span that stragglers must lose to be named
WORTHWHILE = 0.02  # least gain for which a boundary is advised
Figures = Dict[str, Any]


def find_bottleneck(figures: Figures, loads: Dict[int, float], move: Figures, facts: RunFacts) -> Optional[Figures]:
    """Return the row of the analysis; None where no device computes. `why` and `do` are sentences without a full stop.

    `figures`: of the rest of the analysis. `loads`: nanoseconds for a microbatch by device, empty where they are not known.
    `move`: of `find_best_move`.
    """
    devices, span = figures["devices"], figures["span_ns"]
    busy = {device["index"]: device["busy_ns"] for device in devices}
    is_by_microbatch, loads = bool(loads), loads or {device: float(ns) for device, ns in busy.items()}
    slowest = max(loads, key=lambda device: (loads[device], busy[device]), default=-1)
    if not loads or not busy[slowest]:
        return None
    stages = [stage for stage in figures["stages"] if slowest in stage["devices"]]
    stage = max(stages, key=lambda stage: stage["busy_ns"])["index"] if stages else None
    outside = max(devices, key=lambda device: device["outside_ns"])
    link = max(figures["links"], key=lambda link: link["busy_ns_per_microbatch"] or 0.0, default=None)
    talking = max(devices, key=lambda device: device["communication_ns"])
    device, what = slowest, STAGE
    if 2 * outside["outside_ns"] > span:
        what, do = OUTSIDE, "evaluate or save less often (evaluate.every, checkpoint.every)"
        kinds = {kind: ns for kind, ns in outside["idle_in"].items() if kind != HOST and ns}
        most = f" (mostly {max(kinds, key=lambda kind: kinds[kind])})" if kinds else ""
        share = format_share(outside["outside_ns"], span)
        why = f"evaluation, checkpoints and pauses take {share} of the span{most}"
    elif link is not None and is_by_microbatch and (link["busy_ns_per_microbatch"] or 0.0) > loads[slowest]:
        device, what = link["src"], LINK
        why = (
            f"messages from device {link['src']} to {link['dst']} ({link['carries']}) take "
            f"{format_time(link['busy_ns_per_microbatch'])} for a microbatch, and device {slowest}, which computes longest, "
            f"takes {format_time(loads[slowest])}"
        )
        do = "begin the stage where less crosses, send smaller numbers (precision), or use a faster link"
    elif sum(entry["communication_ns"] for entry in devices) > sum(busy.values()):
        device, what = talking["index"], COMMUNICATION
        training_ns = span - talking["outside_ns"]
        why = (
            f"messages under which nothing is computed take {format_share(talking['communication_ns'], training_ns)} of the "
            f"time of device {device}, and compute {format_share(talking['busy_ns'], training_ns)}"
        )
        do = "see what the messages wait for; then send less, or larger messages"
    else:
        reason = f"device {slowest}" + (f" with stage {stage}" if stage is not None else "")
        others = [str(other["index"]) for other in stages if other["index"] != stage]
        reason += f" (and {', '.join(others)})" if others else ""
        reason += f" computes {format_time(loads[slowest])} {'for a microbatch' if is_by_microbatch else 'in all'}"
        why = "; ".join([reason + _compare(slowest, loads), *_explain(figures, slowest)])
        do = _advise(figures, loads, move, facts)
    return {"stage": stage, "device": device, "what": what, "why": why, "do": do, **move}


def _compare(slowest: int, loads: Dict[int, float]) -> str:
    """Compare the load of the slowest device with those of the others."""
    others = [load for device, load in loads.items() if device != slowest]
    mean = sum(others) / len(others) if others else 0.0
    if not mean:
        return ""
    if loads[slowest] <= (1 + EVEN) * mean:
        return f", about as long as the others ({format_time(mean)})"
    return f", {loads[slowest] / mean:.3g} times what the others do on average ({format_time(mean)})"


def _explain(figures: Figures, slowest: int) -> Iterator[str]:
    """Yield what else the trace says of a run whose device `slowest` holds the others up."""
    devices, span = figures["devices"], figures["span_ns"]
    waiting = max(devices, key=lambda device: device["waits_for"].get(str(slowest), 0))
    waited = waiting["waits_for"].get(str(slowest))
    if waited:
        yield f"device {waiting['index']} waits for it {format_share(waited, span - waiting['outside_ns'])} of the time"
    bubble, planned = figures["bubble_fraction"], figures["planned_bubble_fraction"]
    if bubble is not None and planned is not None and len(devices) > 1:
        yield f"the bubble is {bubble:.1%}, the schedule's own {planned:.1%} (planned)"
    worst = max(figures["stragglers"], key=lambda group: group["lost_ns"], default=None)
    if worst is not None and worst["lost_ns"] > NOTABLE * span:
        yield (
            f"{worst['count']} of stage {worst['stage']}'s passes ({worst['kind']}) take far longer than its others, in all "
            f"{format_share(worst['lost_ns'], span)} of the span, one {format_time(worst['longest'][0]['duration_ns'])}"
        )
    silent = max(devices, key=lambda device: device["idle_in"][HOST])
    if 4 * silent["idle_in"][HOST] > span:
        yield f"no event accounts for {format_share(silent['idle_in'][HOST], span)} of device {silent['index']}'s span"


def _advise(figures: Figures, loads: Dict[int, float], move: Figures, facts: RunFacts) -> str:
    gain, even, planned = move["gain"], move["gain_if_balanced"], figures["planned_bubble_fraction"]
    if gain is not None and gain >= WORTHWHILE:
        pairs = enumerate(zip(move["move"]["begins_now"], move["move"]["begins_then"]))
        moves = " and ".join(f"stage {s} at {then} instead of {now}" for s, (now, then) in pairs if now != then)
        low, high = move["gain_range"]
        return (
            f"{'begin' if low > 0 else 'try to begin'} {moves}: {gain:.0%} more throughput, between {low:+.0%} and {high:+.0%} "
            f"(predicted: each stage's {describe_origin(figures)} time is divided among its layers in proportion to their FLOPs; "
            f"those of a stage may differ from that as much as stages do, {move['time_per_flop_ratio']:.2g} times; train for "
            "some updates with the new boundary to confirm it)"
        )
    if len(figures["devices"]) == 1:
        return "one device: more stages, or a smaller model"
    if max(loads.values()) > (1 + EVEN) * sum(loads.values()) / len(loads):
        if gain is not None:
            return "no other boundary helps by much: where a single unit is too large, offer a finer place to begin a stage"
        hope = f"{even:.0%} more throughput at most, predicted" if even else "faster"
        return (
            f"move work away from it: if all stages took equally long, {hope} "
            f"(which boundary is not known: {move['why_no_gain']})"
        )
    if planned is not None and planned > 0.1 and facts.known_method is not None and facts.known_method.flushes:
        return "more microbatches an update, or a method that does not drain the pipeline"
    return "stages are even: faster devices, or more of them"
