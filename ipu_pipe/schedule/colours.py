"""The colours of actions and events, in drawings of schedules, in the page of a trace and in its
picture.
"""

from __future__ import annotations

# on a light and on a dark ground; after Okabe and Ito 2008, whose colours also those tell apart who
# are colour-blind
COLOURS: dict[str, tuple[str, str]] = {
    "forward": ("#0072b2", "#3f9bdc"),
    "compute": ("#56656f", "#a3b1bb"),
    "recompute": ("#56b4e9", "#8fd0f7"),
    "backward": ("#e69f00", "#f0b43c"),
    "input gradient": ("#d55e00", "#ef7d33"),
    "weight gradient": ("#d9c41f", "#f0e442"),
    "update": ("#a8447f", "#d98abb"),
    "send": ("#009e73", "#27b98f"),
    "recv": ("#4fc1a3", "#7fdcc3"),
    "average": ("#00674b", "#129c77"),
    "collective": ("#00674b", "#129c77"),
    "wait": ("#c9cdd2", "#454c54"),
    "wait line": ("#8b939c", "#7d8791"),
    "evaluate": ("#8a6d9e", "#b79fc9"),
    "checkpoint": ("#5d4b6b", "#8f7aa0"),
    "pause": ("#e6e8ea", "#2a2f35"),
}


def choose_ink(colour: str) -> str:
    """Return black or white, whichever reads better on a colour #rrggbb, as the page does (`inkOn`
    in timeline.js).
    """
    # the relative luminance of WCAG 2; above 0.18 black has more contrast than white
    shares = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    red, green, blue = (
        share / 12.92 if share <= 0.04 else ((share + 0.055) / 1.055) ** 2.4 for share in shares
    )
    return "#111111" if 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.18 else "#ffffff"
