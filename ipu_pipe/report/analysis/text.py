"""How times and shares are shown."""

from __future__ import annotations

from typing import Any, Dict, Iterator, List, Optional, Sequence, Tuple

from ipu_pipe.text import escape_lines, format_bytes


def format_time(ns: Optional[float]) -> str:
    """Three digits and a unit; "-" where it is not known."""
    if ns is None:
        return "-"
    for power, unit in ((9, "s"), (6, "ms"), (3, "us")):
        if abs(ns) >= 10**power:
            return f"{ns / 10**power:.3g} {unit}" if abs(ns) < 10 ** (power + 3) else f"{ns / 10**power:,.0f} {unit}"
    return f"{ns:.3g} ns"


def format_share(part: float, whole: float) -> str:
    """In percent; "-" of nothing."""
    return f"{part / whole:.1%}" if whole else "-"


MOST_ROWS = 16  # of a table
Figures = Dict[str, Any]


def format_analysis(found: Figures) -> str:
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


def describe_origin(found: Figures) -> str:
    """Which kind of times these are."""
    return "modelled" if found["modelled"] else "measured"


def format_percent(value: Optional[float]) -> str:
    """ "-" where it is not known."""
    return "-" if value is None else f"{value:.1%}"


def _head(found: Figures) -> List[str]:
    method = found["method"] or "a method that is not told"
    stages = f"{len(found['stages'])} stages, " if found["stages"] else ""
    span = format_time(found["span_ns"])
    line = f"{found['source']}: {method}, {stages}{len(found['devices'])} devices, {span}, {describe_origin(found)}"
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
    bound = "" if planned is None else f"; the schedule alone leaves {format_percent(planned)} (planned)"
    lines += [
        f"Devices are busy {format_percent(found['utilization'])} of their time, "
        f"bubble {format_percent(found['bubble_fraction'])} ({describe_origin(found)}){bound}"
    ]
    overlap = found["overlap"]
    if overlap["communication_ns"]:
        lines.append(f"Of the communication, {format_percent(overlap['share'])} is hidden under compute")
    return lines


def format_table(head: Sequence[str], rows: Sequence[Sequence[str]], left: int = 0) -> List[str]:
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
        most = ", ".join(f"{who} {format_share(ns, span)}" for who, ns in waits[:3])
        kinds = ", ".join(f"{kind} {format_share(ns, span)}" for kind, ns in d["idle_in"].items() if ns)
        rows.append([str(d["index"]), *(format_share(d[part], span) for part in parts), most or "-", kinds or "-"])
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
    return format_table(head, rows)


def _stages(found: Figures) -> List[str]:
    stale = {each["stage"]: each for each in found["staleness"]}
    rows = []
    for s in found["stages"]:
        old = stale.get(s["index"], {})
        rate = s["flops_per_second"]
        rows.append([
            str(s["index"]), *map(format_time, (s["forward_ns"], s["backward_ns"], s["update_ns"], s["busy_ns_per_microbatch"])),
            format_percent(s["of_greatest"]), "-" if rate is None else f"{rate / 1e9:.3g}",
            *(_lag(old.get(key)) for key in ("forward_versions", "backward_versions")),
            format_time((old.get("time_ns") or {}).get("median")),
        ])  # fmt: skip
    head = [
        "stage", "forward", "backward", "update", "a microbatch", "of the slowest", "GFLOP/s", "forward's lag", "backward's lag",
        "until applied",
    ]  # fmt: skip
    told = any(s["microbatches"] for s in found["stages"])
    return format_table(head, rows) if told else []


def _lag(lag: Optional[Figures]) -> str:
    return "-" if lag is None else f"{lag['mean']:.3g} (max {lag['greatest']})"


def _links(found: Figures) -> List[str]:
    rows = []
    for link in found["links"]:
        took = link["latency_ns"]
        rows.append([
            f"{link['src']} -> {link['dst']}", link["carries"], str(link["messages"]), _bytes(link["bytes"]),
            _bytes(link["bytes_per_microbatch"]), format_time(took and took["min"]), format_time(took and took["median"]),
        ])  # fmt: skip
    head = ["link", "carries", "messages", "sent", "a microbatch", "least latency", "median"]
    return format_table(head, rows, left=2) if rows else []


def _bytes(size: Optional[float]) -> str:
    return "-" if size is None else format_bytes(size)


def _memory(found: Figures) -> List[str]:
    names = list(dict.fromkeys(name for each in found["memory"] for name in each["categories"]))
    rows = [
        [str(each["device"]), format_bytes(each["peak_bytes"]), format_time(each["at_ns"]),
         *(_bytes(each["categories"].get(name)) for name in names), str(len(each["microbatches"]))]
        for each in found["memory"]
    ]  # fmt: skip
    return format_table(["device", "most held", "at", *names, "microbatches"], rows) if rows else []


def _stragglers(found: Figures) -> List[str]:
    rows = []
    for each in sorted(found["stragglers"], key=lambda each: -each["lost_ns"]):
        worst = each["longest"][0]
        rows.append([
            str(each["stage"]), each["kind"], str(each["count"]), format_time(each["lost_ns"]), format_time(each["median_ns"]),
            f"{format_time(worst['duration_ns'])} at {format_time(worst['at_ns'])}",
        ])  # fmt: skip
    head = ["stragglers of stage", "kind", "count", "lost", "median", "longest"]
    return format_table(head, rows) if rows else []


# Records in a list are known by these of their keys.
NAMES = ("index", "stage", "device", "src", "dst", "carries", "kind")
LEFT_OUT = ("over_time", "microbatches", "longest", "move")


def list_numbers(found: Any, name: str = "") -> Iterator[Tuple[str, float]]:
    """Every number of an analysis with its path: devices[0].busy_ns."""
    if isinstance(found, bool) or found is None or isinstance(found, str):
        return
    if isinstance(found, (int, float)):
        yield name, found
    elif isinstance(found, dict):
        for key, value in found.items():
            if (
                key != "begin_ns"
                and not (key in LEFT_OUT and isinstance(value, (list, dict)))
                and not _names(key, name)
            ):
                yield from list_numbers(value, f"{name}.{key}" if name else str(key))
    else:
        for value in found:
            if isinstance(value, dict):
                which = " ".join(str(value[key]) for key in NAMES if key in value)
                yield from list_numbers(value, f"{name}[{which}]")


def _names(key: str, within: str) -> bool:
    """Whether a key is what its record is known by."""
    return key in NAMES and within.endswith("]")


def compute_differences(found: Figures, other: Figures) -> List[Figures]:
    """A record a number: name, both values (null where one has none), and the second less the first."""
    one, two = dict(list_numbers(found)), dict(list_numbers(other))
    return [
        {
            "name": name,
            "this": one.get(name),
            "other": two.get(name),
            "difference": one[name] - two[name] if name in one and name in two else None,
        }
        for name in dict.fromkeys([*one, *two])
    ]


def format_comparison(found: Figures, other: Figures) -> str:
    """A table of them."""
    rows = [("", "this", "other", "this - other", "of other")]
    for each in compute_differences(found, other):
        part = each["difference"] / abs(each["other"]) if each["difference"] is not None and each["other"] else None
        values = (_shown(each[key]) for key in ("this", "other", "difference"))
        rows.append((each["name"], *values, "-" if part is None else f"{part:+.1%}"))
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    lines = [
        f"this:  {found['source']} ({describe_origin(found)})",
        f"other: {other['source']} ({describe_origin(other)})",
        "",
    ]
    lines += [
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:]))]).rstrip()
        for row in rows
    ]
    return escape_lines("\n".join(lines))


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:.6g}"
