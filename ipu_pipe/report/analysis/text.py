"""The figures of a trace as text: the answer first, then tables; and the figures of two traces side
by side.
"""

from __future__ import annotations

import math
from typing import Any, Dict, Iterator, Sequence

from ipu_pipe.text import escape_lines, format_bytes, list_some

# the most rows of a table, and of a list of two traces' differences
MOST_ROWS = 16
MOST_COMPARED = 2
# the figures of a trace, by the keys of `tools/analyze.py --json`, and a row of one of its lists
Analysis = Dict[str, Any]
Row = Dict[str, Any]

PARTS = ("busy_ns", "communication_ns", "wait_ns", "ramp_up_ns", "ramp_down_ns", "idle_ns")
DEVICE_HEAD = (
    "device",
    "busy",
    "communication",
    "waits",
    "ramp up",
    "ramp down",
    "idle",
    "waits for device",
    "idle in",
)
HALVES = {"input gradient": "input_gradient_ns", "weight gradient": "weight_gradient_ns"}
STAGE_HEAD = (
    "stage",
    "forward",
    "backward",
    *HALVES,
    "update",
    "per microbatch",
    "of slowest",
    "spread",
    "GFLOP/s",
    "forward delay",
    "backward delay",
    "until update",
)
LINK_HEAD = ("link", "carries", "messages", "sent", "per microbatch", "min latency", "median")
STRAGGLER_HEAD = ("stragglers of stage", "kind", "count", "lost", "median", "longest")

# what a device of a trace covers, where it is not one device
ALL_IPUS = "all IPUs"
WHY_NOT_BY_IPU = (
    "device 0 is all IPUs of a replica together, as the host sees them: a call does not tell what "
    "each IPU computes and waits "
    "for, so no bubble and no slowest stage are known; backend.ipu.profile.directory has PopVision "
    "record each IPU"
)

# ---- numbers


def format_time(ns: float | None) -> str:
    """Format a time with three digits and a unit; "-" if it is not known."""
    if ns is None:
        return "-"
    for power, unit in ((9, "s"), (6, "ms"), (3, "us")):
        if abs(ns) >= 10**power:
            return (
                f"{ns / 10**power:.3g} {unit}"
                # three digits of more than 1000 s would be written with an exponent
                if abs(ns) < 10 ** (power + 3)
                else f"{ns / 10**power:,.0f} {unit}"
            )
    return f"{ns:.3g} ns"


def format_share(part: float, whole: float) -> str:
    """Format `part` of `whole` in percent; "-" if the whole is 0."""
    return f"{part / whole:.1%}" if whole else "-"


def format_percent(value: float | None) -> str:
    """Format a fraction in percent; "-" if it is not known."""
    return "-" if value is None else f"{value:.1%}"


def describe_origin(analysis: Analysis) -> str:
    """Return whether the times of an analysis were modelled or measured."""
    return "modelled" if analysis["modelled"] else "measured"


def describe_spread(analysis: Analysis) -> str:
    """Return whether times were modelled or measured, and the spread of modelled ones."""
    spread = analysis["spread"]
    return describe_origin(analysis) + ("" if spread is None else f", spread {spread:.1%}")


def _format_size(size: float | None) -> str:
    return "-" if size is None else format_bytes(size)


def _format_lag(lag: Row | None) -> str:
    return "-" if lag is None else f"{lag['mean']:.3g} (max {lag['greatest']})"


# ---- one analysis


def format_analysis(analysis: Analysis) -> str:
    """Format all figures for a terminal."""
    tables = (
        _format_devices,
        _format_stages,
        _format_links,
        _format_memory,
        _format_stragglers,
        _format_tracepoints,
    )
    blocks = [
        _format_head(analysis),
        _format_answer(analysis),
        _format_path(analysis),
        *(form(analysis) for form in tables),
    ]
    blocks.append([f"note: {note}" for note in analysis["notes"]])
    # names in a trace are not ours, and may have characters that a terminal obeys
    return escape_lines("\n\n".join("\n".join(block) for block in blocks if block))


def format_table(
    head: Sequence[str], rows: Sequence[Sequence[str]], left: int = 0, most: int = MOST_ROWS
) -> list[str]:
    """Format rows as lines, of many the first `most`; the first `left` columns are aligned to the
    left, the others to the right, and left out where no row has a value. Return nothing for no
    rows.
    """
    columns = [
        (name, *column)
        for place, (name, *column) in enumerate(zip(head, *rows))
        if place < left or {*column} - {"-"}
    ]
    # with the head
    shown = [*zip(*columns)][: most + 1] if rows else []
    widths = [max(map(len, column)) for column in zip(*shown)]
    lines = []
    for row in shown:
        cells = [
            cell.ljust(w) if i < left else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(row, widths))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines + ([f"... and {len(rows) - most} more"] if len(rows) > most else [])


def count_devices(analysis: Analysis) -> str:
    """Return the number of devices of an analysis as text, or what its one device covers."""
    count = len(analysis["devices"])
    covered = analysis["devices"][0].get("covers")
    return f"{covered} as one device" if covered else f"{count} device{'s' * (count != 1)}"


def describe_busy(analysis: Analysis) -> str:
    """Return the busy share of the devices and the bubble beside the planned one; what is not known
    is left out.
    """
    planned = analysis["planned_bubble_fraction"]
    busy = analysis["utilization"]
    known = []
    if busy is not None:
        origin = describe_spread(analysis)
        bubble = analysis["bubble_fraction"]
        known.append(
            f"devices are busy {format_percent(busy)} of the time, bubble {format_percent(bubble)} "
            f"({origin})"
        )
    if planned is not None:
        known.append(f"the schedule alone has {format_percent(planned)} (planned)")
    return "; ".join(known)


def name_device(device: Row) -> str:
    """Return a device's number, with what it covers if it is more than one device."""
    return f"{device['index']} ({device['covers']})" if "covers" in device else str(device["index"])


def _format_head(analysis: Analysis) -> list[str]:
    stages = f"{len(analysis['stages'])} stages, " if analysis["stages"] else ""
    line = (
        f"{analysis['source']}: {analysis['method'] or 'unknown method'}, "
        f"{stages}{count_devices(analysis)}, "
        f"{format_time(analysis['span_ns'])}, {describe_spread(analysis)}"
    )
    return [line] + ([f"modelled: {analysis['why_modelled']}"] if analysis["why_modelled"] else [])


def _format_answer(analysis: Analysis) -> list[str]:
    worst = analysis["bottleneck"]
    busy = describe_busy(analysis)
    # one device that stands for all computes, and does not tell which of them is slow
    if worst is None and any(device["busy_ns"] for device in analysis["devices"]):
        return [
            "Bottleneck: not known (see the note below)",
            *([busy[0].upper() + busy[1:]] if busy else []),
        ]
    if worst is None:
        return ["no device computes anything"]
    place = _name_bottleneck(worst)
    # a finding a line
    why = "\n       ".join(worst["why"].split("; "))
    lines = [f"Bottleneck: {place}", f"  why: {why}", f"  do:  {worst['do']}"]
    if busy:
        # not capitalize, which makes all other letters small
        lines.append(busy[0].upper() + busy[1:])
    overlap = analysis["overlap"]
    if overlap["share"] is not None:
        lines.append(
            f"Of the communication, {format_percent(overlap['share'])} overlaps with compute"
        )
    return lines


def _name_bottleneck(worst: Row) -> str:
    device = "not known" if worst["device"] is None else f"device {worst['device']}"
    return {
        "stage": f"stage {worst['stage']} on {device}" if worst["stage"] is not None else device,
        "link": f"the link from {device}",
        "communication": "communication",
        "data": f"the data of {device}",
        "host": f"the host of {device}",
        "outside": "time outside of training",
    }[worst["what"]]


def _format_path(analysis: Analysis) -> list[str]:
    """Format the critical path in two lines: its shares, and the pass to shorten first. Another
    stage would be on it by chance where several are as slow within the spread.
    """
    path = analysis["critical_path"]
    if path is None or (analysis["bottleneck"] or {}).get("within_spread"):
        return []
    parts = [(f"stage {row['stage']}", row["share"]) for row in path["stages"]]
    parts += [(f"link {row['src']} -> {row['dst']}", row["share"]) for row in path["links"]]
    parts = sorted(parts, key=lambda part: -part[1])[:4]
    left = 1 - sum(share for _, share in parts)
    # less would be printed as 0.0%
    rest = f", other {left:.1%}" if left > 0.0005 else ""
    lines = [
        "Critical path: "
        + (", ".join(f"{name} {share:.1%}" for name, share in parts) or "no stage")
        + rest
    ]
    # they are sorted, so that the second one is the closest rival
    best, *others = path["what_if"] or [None]
    rivals = [other["saves_ns"] * (1 + (analysis["spread"] or 0.0)) for other in others[:1]]
    # not the first of two whose gains are as large within the spread
    if best is not None and (
        analysis["spread"] is None or best["saves_ns"] > max(rivals, default=0)
    ):
        lines.append(
            f"  if the {best['kind']} passes of stage {best['stage']} were {best['shorter']:.0%} "
            f"shorter: {format_time(best['saves_ns'])} ({best['share']:.1%}) less (predicted)"
        )
    return lines


def _format_devices(analysis: Analysis) -> list[str]:
    span = analysis["span_ns"]
    rows = []
    # of one stage a device the column would only repeat `busy`
    shared = any(len(d["stages"]) > 1 for d in analysis["devices"])
    for d in analysis["devices"]:
        waits = sorted(d["waits_for"].items(), key=lambda item: -item[1])
        most = ", ".join(f"{device} {format_share(ns, span)}" for device, ns in waits[:3])
        kinds = ", ".join(
            f"{kind} {format_share(ns, span)}" for kind, ns in d["idle_in"].items() if ns
        )
        stages = ", ".join(
            f"{stage} {format_share(ns, span)}" for stage, ns in d["busy_ns_by_stage"].items()
        )
        shares = [format_share(d[part], span) for part in PARTS]
        rows.append([name_device(d), *[stages or "-"] * shared, *shares, most or "-", kinds or "-"])
    return format_table([DEVICE_HEAD[0], *["busy in stage"] * shared, *DEVICE_HEAD[1:]], rows)


def _format_stages(analysis: Analysis) -> list[str]:
    staleness = {row["stage"]: row for row in analysis["staleness"]}
    rows = []
    for s in analysis["stages"]:
        stale = staleness.get(s["index"], {})
        rate = s["flops_per_second"]
        rows.append(
            [
                str(s["index"]),
                *map(
                    format_time,
                    (s["forward_ns"], s["backward_ns"], *(s[key] for key in HALVES.values())),
                ),
                *map(format_time, (s["update_ns"], s["busy_ns_per_microbatch"])),
                format_percent(s["of_greatest"]),
                format_percent(s["spread"]),
                "-" if rate is None else f"{rate / 1e9:.3g}",
                *(_format_lag(stale.get(key)) for key in ("forward_versions", "backward_versions")),
                format_time((stale.get("time_ns") or {}).get("median")),
            ]
        )
    return format_table(
        STAGE_HEAD, rows if any(s["microbatches"] for s in analysis["stages"]) else []
    )


def _format_links(analysis: Analysis) -> list[str]:
    rows = []
    for link in analysis["links"]:
        latency = link["latency_ns"] or {}
        rows.append(
            [
                f"{link['src']} -> {link['dst']}",
                link["carries"],
                str(link["messages"]),
                _format_size(link["bytes"]),
                _format_size(link["bytes_per_microbatch"]),
                format_time(latency.get("min")),
                format_time(latency.get("median")),
            ]
        )
    return format_table(LINK_HEAD, rows, left=2)


def _format_memory(analysis: Analysis) -> list[str]:
    names = list(dict.fromkeys(name for row in analysis["memory"] for name in row["categories"]))
    rows = [
        [
            str(row["device"]),
            format_bytes(row["peak_bytes"]),
            format_time(row["at_ns"]),
            *(_format_size(row["categories"].get(name)) for name in names),
            str(len(row["microbatches"])),
        ]
        for row in analysis["memory"]
    ]
    return format_table(["device", "peak", "at", *names, "microbatches"], rows)


def _format_stragglers(analysis: Analysis) -> list[str]:
    rows = []
    for group in sorted(analysis["stragglers"], key=lambda group: -group["lost_ns"]):
        worst = group["longest"][0]
        rows.append(
            [
                str(group["stage"]),
                group["kind"],
                str(group["count"]),
                format_time(group["lost_ns"]),
                format_time(group["median_ns"]),
                f"{format_time(worst['duration_ns'])} at {format_time(worst['at_ns'])}",
            ]
        )
    return format_table(STRAGGLER_HEAD, rows)


def _format_tracepoints(analysis: Analysis) -> list[str]:
    rows = [
        [row["channel"], row["label"], str(row["count"])]
        + [format_time(row[key]) for key in ("total_ns", "longest_ns")]
        for row in analysis["tracepoints"]
    ]
    return format_table(("channel", "tracepoint", "count", "total", "longest"), rows, left=2)


# ---- two analyses

# A record in a list is identified by these of its keys.
IDENTIFYING = ("index", "covers", "stage", "device", "src", "dst", "carries", "kind")
NOT_COMPARED = ("over_time", "microbatches", "longest", "move", "pieces")


def list_numbers(value: Any, name: str = "") -> Iterator[tuple[str, float]]:
    """Yield every number of an analysis with its path, such as devices[0].busy_ns."""
    # a bool is an int to isinstance
    if value is None or isinstance(value, (bool, str)):
        return
    if isinstance(value, (int, float)):
        yield name, value
    elif isinstance(value, dict):
        for key, inner in value.items():
            # by type: a stage's `microbatches` is a number, a device's at its peak a list
            skipped = key in NOT_COMPARED and isinstance(inner, (list, dict))
            # it is in the name of the row already
            identifies = key in IDENTIFYING and name.endswith("]")
            # two traces have no common clock, so their begins cannot be compared
            if key != "begin_ns" and not skipped and not identifies:
                yield from list_numbers(inner, f"{name}.{key}" if name else str(key))
    else:
        for inner in value:
            if isinstance(inner, dict):
                identity = " ".join(str(inner[key]) for key in IDENTIFYING if key in inner)
                yield from list_numbers(inner, f"{name}[{identity}]")


def compute_differences(analysis: Analysis, other: Analysis) -> list[Row]:
    """Return a row for each figure: its name, both values (null if missing), and the first minus
    the second.
    """
    first = dict(list_numbers(analysis))
    second = dict(list_numbers(other))
    return [
        {
            "name": name,
            "this": first.get(name),
            "other": second.get(name),
            "difference": first[name] - second[name] if name in first and name in second else None,
        }
        for name in dict.fromkeys([*first, *second])
    ]


def format_comparison(
    analysis: Analysis, other: Analysis, settings: Sequence[str] | None = None
) -> str:
    """Format the main figures of two analyses side by side: bottleneck, span, bubble, and each
    stage's time per microbatch.

    `settings`: the config keys that differ, with both values, or None if they are not known.
    """
    lines = [
        f"{name} {figures['source']}: {figures['method'] or 'unknown method'}, "
        f"{count_devices(figures)}, "
        f"{describe_origin(figures)}"
        for name, figures in (("this: ", analysis), ("other:", other))
    ]
    if settings is None:
        lines.append("different settings: not known (give the folders of two runs)")
    else:
        lines.append(
            f"different settings (this | other): {list_some(settings, MOST_ROWS) or 'none'}"
        )
    worst = [figures["bottleneck"] for figures in (analysis, other)]
    rows = [
        ["bottleneck", *("-" if one is None else _name_bottleneck(one) for one in worst), ""],
        _compare_times("span", analysis["span_ns"], other["span_ns"], (analysis, other)),
        _compare_bubbles(analysis, other),
    ]
    rows += _compare_rows(
        "stage {index}, per microbatch",
        "busy_ns_per_microbatch",
        analysis["stages"],
        other["stages"],
    )
    rows += _compare_rows(
        "link {src} -> {dst}, {carries}",
        "busy_ns_per_microbatch",
        analysis["links"],
        other["links"],
    )
    peaks = [
        max((row["peak_bytes"] for row in figures["memory"]), default=None)
        for figures in (analysis, other)
    ]
    # a peak of 0 has no share
    change = f"{peaks[0] / peaks[1] - 1:+.1%}" if peaks[0] is not None and peaks[1] else "-"
    rows.append(["greatest memory peak", *map(_format_size, peaks), change])
    # without rows that neither trace knows
    rows = [row for row in rows if {*row[1:]} - {"-", ""}]
    lines += format_table(("", "this", "other", "this - other"), rows, left=1)
    return escape_lines("\n".join(lines))


def _compare_rows(
    name: str, key: str, rows: Sequence[Row], others: Sequence[Row]
) -> list[list[str]]:
    """Compare the rows of two lists that have one name; of many the two that differ most."""
    times = {name.format(**row): row for row in rows}
    other_times = {name.format(**row): row for row in others}
    compared = []
    for label in dict.fromkeys([*times, *other_times]):
        row = times.get(label, {})
        other = other_times.get(label, {})
        time = row.get(key)
        other_time = other.get(key)
        # a row that one trace alone has comes first
        difference = float("inf")
        if time is not None and other_time is not None:
            difference = abs(time - other_time)
        elif time is None and other_time is None:
            continue
        compared.append((difference, _compare_times(label, time, other_time, (row, other))))
    compared.sort(key=lambda item: -item[0])
    lines = [line for _, line in compared[:MOST_COMPARED]]
    if len(compared) > MOST_COMPARED:
        lines[-1][0] += f" (and {len(compared) - MOST_COMPARED} that differ less)"
    return lines


def _compare_times(
    name: str,
    time: float | None,
    other: float | None,
    rows: tuple[Row, Row],
) -> list[str]:
    """Return a row of two times and their difference in percent of the second. `rows`: those of the
    times, whose noise or spread is how far each may be off by chance, as a share of it.
    """
    difference = "-"
    if time is not None and other:
        change = (time - other) / other
        difference = f"{change:+.1%}"
        doubts = [doubt for doubt in map(_get_doubt, rows) if doubt is not None]
        # of a time without one the doubt of the difference is not known
        if len(doubts) == len(rows):
            # errors that are independent add by their squares
            difference += _describe_doubt(rows, abs(change), math.hypot(*doubts))
    return [name, format_time(time), format_time(other), difference]


def _compare_bubbles(analysis: Analysis, other: Analysis) -> list[str]:
    """Return the row of two bubbles and their difference in points."""
    bubbles = analysis["bubble_fraction"], other["bubble_fraction"]
    points = "-"
    if None not in bubbles:
        change = bubbles[0] - bubbles[1]
        points = f"{100 * change:+.1f} points"
        spreads = analysis["spread"], other["spread"]
        if None not in spreads:
            # the spread is of the busy share, and the bubble is the rest
            doubts = [(1 - bubble) * spread for bubble, spread in zip(bubbles, spreads)]
            points += _describe_doubt((analysis, other), abs(change), math.hypot(*doubts))
    return ["bubble", *map(format_percent, bubbles), points]


def _get_doubt(row: Row) -> float | None:
    """Return how far the time of a row may be off by chance, as a share of it."""
    spread: float | None = row.get("spread")
    return row.get("noise") if spread is None else spread


def _describe_doubt(rows: tuple[Row, Row], change: float, doubt: float) -> str:
    """Return how far a difference may be off by chance, and whether it is within that."""
    # times that were the same each time have none
    if doubt < 0.0005:
        return ""
    name = "noise" if all(row.get("spread") is None for row in rows) else "spread"
    within = f", within {name}" if change <= doubt else ""
    return f" ({name} {doubt:.1%}{within})"
