"""How times and shares are shown."""

from __future__ import annotations

from typing import Optional


def time_text(ns: Optional[float]) -> str:
    """Three digits and a unit; "-" where it is not known."""
    if ns is None:
        return "-"
    for power, unit in ((9, "s"), (6, "ms"), (3, "us")):
        if abs(ns) >= 10**power:
            return f"{ns / 10**power:.3g} {unit}" if abs(ns) < 10 ** (power + 3) else f"{ns / 10**power:,.0f} {unit}"
    return f"{ns:.3g} ns"


def share(part: float, whole: float) -> str:
    """In percent; "-" of nothing."""
    return f"{part / whole:.1%}" if whole else "-"
