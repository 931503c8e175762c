"""Two analyses side by side: each number of both, and the difference."""

from __future__ import annotations

from typing import Any, Dict, Iterator, List, Tuple

from ipu_pipe.report.analysis.words import how
from ipu_pipe.text import escape_lines

Figures = Dict[str, Any]
# Records in a list are known by these of their keys.
NAMES = ("index", "stage", "device", "src", "dst", "carries", "kind")
LEFT_OUT = ("over_time", "microbatches", "longest", "move")


def numbers(found: Any, name: str = "") -> Iterator[Tuple[str, float]]:
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
                yield from numbers(value, f"{name}.{key}" if name else str(key))
    else:
        for value in found:
            if isinstance(value, dict):
                which = " ".join(str(value[key]) for key in NAMES if key in value)
                yield from numbers(value, f"{name}[{which}]")


def _names(key: str, within: str) -> bool:
    """Whether a key is what its record is known by."""
    return key in NAMES and within.endswith("]")


def differences(found: Figures, other: Figures) -> List[Figures]:
    """A record a number: name, both values (null where one has none), and the second less the first."""
    one, two = dict(numbers(found)), dict(numbers(other))
    return [
        {
            "name": name,
            "this": one.get(name),
            "other": two.get(name),
            "difference": one[name] - two[name] if name in one and name in two else None,
        }
        for name in dict.fromkeys([*one, *two])
    ]


def in_words(found: Figures, other: Figures) -> str:
    """A table of them."""
    rows = [("", "this", "other", "this - other", "of other")]
    for each in differences(found, other):
        part = each["difference"] / abs(each["other"]) if each["difference"] is not None and each["other"] else None
        values = (_shown(each[key]) for key in ("this", "other", "difference"))
        rows.append((each["name"], *values, "-" if part is None else f"{part:+.1%}"))
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    lines = [f"this:  {found['source']} ({how(found)})", f"other: {other['source']} ({how(other)})", ""]
    lines += [
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:]))]).rstrip()
        for row in rows
    ]
    return escape_lines("\n".join(lines))


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:.6g}"
