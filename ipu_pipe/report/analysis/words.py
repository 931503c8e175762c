"""An analysis in words: the answer first, then tables."""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Sequence

from ipu_pipe.report.analysis.shown_times import share, time_text
from ipu_pipe.text import escape_lines, format_bytes

MOST_ROWS = 16  # of a table
Figures = Dict[str, Any]


def in_words(found: Figures) -> str:
    """All of it, for a terminal."""
    blocks = [
        _head(found),
        _answer(found),
        _devices(found),
        _stages(found),
        _links(found),
        _memory(found),
        _stragglers(found),
        [f"note: {note}" for note in found["notes"]],
    ]
    return escape_lines("\n\n".join("\n".join(block) for block in blocks if block))


def how(found: Figures) -> str:
    """Which kind of times these are."""
    return "modelled" if found["modelled"] else "measured"


def percent(value: Optional[float]) -> str:
    """ "-" where it is not known."""
    return "-" if value is None else f"{value:.1%}"


def _head(found: Figures) -> List[str]:
    method = found["method"] or "a method that is not told"
    stages = f"{len(found['stages'])} stages, " if found["stages"] else ""
    line = f"{found['source']}: {method}, {stages}{len(found['devices'])} devices, {time_text(found['span_ns'])}, {how(found)}"
    return [line] + ([f"modelled: {found['why_modelled']}"] if found["why_modelled"] else [])


def _answer(found: Figures) -> List[str]:
    what = found["bottleneck"]
    if what is None:
        return ["no device computes anything"]
    holds = {
        "stage": f"stage {what['stage']} on device {what['device']}" if what["stage"] is not None else f"device {what['device']}",
        "link": f"the link from device {what['device']}",
        "communication": "communication",
        "outside": "what is outside of training",
    }[what["what"]]  # fmt: skip
    why = "\n       ".join(what["why"].split("; "))
    lines = [f"What holds it up: {holds}", f"  why: {why}", f"  do:  {what['do']}"]
    planned = found["planned_bubble_fraction"]
    bound = "" if planned is None else f"; the schedule alone leaves {percent(planned)} (planned)"
    lines += [
        f"Devices are busy {percent(found['utilization'])} of their time, bubble {percent(found['bubble_fraction'])} "
        f"({how(found)}){bound}"
    ]
    overlap = found["overlap"]
    if overlap["communication_ns"]:
        lines.append(f"Of the communication, {percent(overlap['share'])} is hidden under compute")
    return lines


def table(head: Sequence[str], rows: Sequence[Sequence[str]], left: int = 0) -> List[str]:
    """Columns to the right, but for the first `left`."""
    shown = [list(head), *(list(row) for row in rows[:MOST_ROWS])]
    widths = [max(len(row[i]) for row in shown) for i in range(len(head))]
    lines = [
        "  ".join(cell.ljust(w) if i < left else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths))).rstrip()
        for row in shown
    ]
    return lines + ([f"... and {len(rows) - MOST_ROWS} more"] if len(rows) > MOST_ROWS else [])


def _devices(found: Figures) -> List[str]:
    span = found["span_ns"]
    rows = []
    for d in found["devices"]:
        waits = sorted(d["waits_for"].items(), key=lambda item: -item[1])
        parts = ("busy_ns", "communication_ns", "wait_ns", "ramp_up_ns", "ramp_down_ns", "idle_ns")
        most = ", ".join(f"{who} {share(ns, span)}" for who, ns in waits[:3])
        kinds = ", ".join(f"{kind} {share(ns, span)}" for kind, ns in d["idle_in"].items() if ns)
        rows.append([str(d["index"]), *(share(d[part], span) for part in parts), most or "-", kinds or "-"])
    head = [
        "device",
        "busy",
        "communication",
        "waits",
        "ramp up",
        "ramp down",
        "idle",
        "waits for device",
        "idle in",
    ]
    return table(head, rows)


def _stages(found: Figures) -> List[str]:
    stale = {each["stage"]: each for each in found["staleness"]}
    rows = []
    for s in found["stages"]:
        old = stale.get(s["index"], {})
        rate = s["flops_per_second"]
        rows.append([
            str(s["index"]), *(time_text(s[key]) for key in ("forward_ns", "backward_ns", "update_ns", "busy_ns_per_microbatch")),
            percent(s["of_greatest"]), "-" if rate is None else f"{rate / 1e9:.3g}",
            *(_lag(old.get(key)) for key in ("forward_versions", "backward_versions")),
            time_text((old.get("time_ns") or {}).get("median")),
        ])  # fmt: skip
    head = [
        "stage", "forward", "backward", "update", "a microbatch", "of the slowest", "GFLOP/s", "forward's lag", "backward's lag",
        "until applied",
    ]  # fmt: skip
    told = any(s["microbatches"] for s in found["stages"])
    return table(head, rows) if told else []


def _lag(lag: Optional[Figures]) -> str:
    return "-" if lag is None else f"{lag['mean']:.3g} (max {lag['greatest']})"


def _links(found: Figures) -> List[str]:
    rows = []
    for link in found["links"]:
        took = link["latency_ns"]
        rows.append([
            f"{link['src']} -> {link['dst']}", link["carries"], str(link["messages"]), _bytes(link["bytes"]),
            _bytes(link["bytes_per_microbatch"]), time_text(took and took["min"]), time_text(took and took["median"]),
        ])  # fmt: skip
    head = ["link", "carries", "messages", "sent", "a microbatch", "least latency", "median"]
    return table(head, rows, left=2) if rows else []


def _bytes(size: Optional[float]) -> str:
    return "-" if size is None else format_bytes(size)


def _memory(found: Figures) -> List[str]:
    names = list(dict.fromkeys(name for each in found["memory"] for name in each["categories"]))
    rows = [
        [str(each["device"]), format_bytes(each["peak_bytes"]), time_text(each["at_ns"]),
         *(_bytes(each["categories"].get(name)) for name in names), str(len(each["microbatches"]))]
        for each in found["memory"]
    ]  # fmt: skip
    return table(["device", "most held", "at", *names, "microbatches"], rows) if rows else []


def _stragglers(found: Figures) -> List[str]:
    rows = []
    for each in sorted(found["stragglers"], key=lambda each: -each["lost_ns"]):
        worst = each["longest"][0]
        rows.append([
            str(each["stage"]), each["kind"], str(each["count"]), time_text(each["lost_ns"]), time_text(each["median_ns"]),
            f"{time_text(worst['duration_ns'])} at {time_text(worst['at_ns'])}",
        ])  # fmt: skip
    head = ["stragglers of stage", "kind", "count", "lost", "median", "longest"]
    return table(head, rows) if rows else []
