"""Draw docs/prices.svg, README's picture: two schedules, and what each costs by the stored results.

`python tools/draw_prices.py`. The prices are those of docs/results/equal_time, whose runs have
these stages and updates.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import List

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from ipu_pipe.schedule.actions import Kind  # noqa: E402
from ipu_pipe.schedule.colours import COLOURS, choose_ink  # noqa: E402
from ipu_pipe.schedule.methods import resolve_method  # noqa: E402
from ipu_pipe.schedule.timelines import make_schedule  # noqa: E402

PICTURE = ROOT / "docs" / "prices.svg"
RESULTS = ROOT / "docs" / "results" / "equal_time" / "results.json"
# row of the results -> method; of the same samples
ROWS = {"GPipe, equal samples": "gpipe", "PipeDream": "pipedream"}
STAGES, MICROBATCHES, ACCUMULATE = 4, 12, 2
SLOTS = 24
CELL_WIDTH, CELL_HEIGHT, LEFT, PANEL_HEIGHT = 28, 22, 64, 150


def draw_picture() -> str:
    """Return the picture as SVG."""
    row_by_label = {
        row["label"]: row for row in json.loads(RESULTS.read_text(encoding="utf-8"))["rows"]
    }
    least_time = min(row_by_label[label]["normalized_time"] for label in ROWS)
    width = LEFT + SLOTS * CELL_WIDTH + 10
    height = PANEL_HEIGHT * len(ROWS) + 24
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    for index, (label, method) in enumerate(ROWS.items()):
        row = row_by_label[label]
        times = row["normalized_time"] / least_time
        price = (
            f"time {times:.1f} (planned), test accuracy {100 * row['final']:.1f} ± "
            f"{100 * row['std']:.1f} % (measured)"
        )
        lines += draw_panel(method, price, PANEL_HEIGHT * index)
    caption = (
        "F forward, B backward, * update, grey: idle. ResNet-20 on CIFAR-10, four stages, "
        "400 updates of 2 microbatches."
    )
    lines.append(f'<text x="10" y="{height - 10}" fill="#555555">{caption}</text>')
    return "\n".join([*lines, "</svg>", ""])


def draw_panel(method: str, price: str, top: int) -> List[str]:
    """Return the SVG of the first slots of a method's schedule, under its name and its price."""
    schedule = make_schedule(resolve_method(method), STAGES, MICROBATCHES, ACCUMULATE)
    microbatches = schedule.spell_out(0, SLOTS)
    updates = schedule.update_grid(0, SLOTS)
    lines = [
        f'<text x="10" y="{top + 24}" font-size="14"><tspan font-weight="bold">{method}</tspan>: {price}</text>'
    ]
    for stage in range(STAGES):
        y = top + 36 + stage * (CELL_HEIGHT + 3)
        lines.append(f'<text x="10" y="{y + 15}">stage {stage}</text>')
        for slot in range(SLOTS):
            x = LEFT + slot * CELL_WIDTH
            text, colour = "", "#e6e8ea"
            for kind in (Kind.FORWARD, Kind.BACKWARD):
                microbatch = int(microbatches[kind][stage, slot])
                if microbatch >= 0:
                    mark = "*" if kind is Kind.BACKWARD and updates[stage, slot] >= 0 else ""
                    text = f"{kind.value}{microbatch}{mark}"
                    colour = COLOURS[kind.word][0]
            lines.append(
                f'<rect x="{x}" y="{y}" width="{CELL_WIDTH - 2}" height="{CELL_HEIGHT}" fill="{colour}"/>'
            )
            if text:
                middle = x + (CELL_WIDTH - 2) / 2
                ink = choose_ink(colour)
                lines.append(
                    f'<text x="{middle:g}" y="{y + 15}" font-size="11" text-anchor="middle" fill="{ink}">{text}</text>'
                )
    return lines


if __name__ == "__main__":
    PICTURE.write_text(draw_picture(), encoding="utf-8")
