"""Tables of what the planner predicts beside what papers measured: what they are, as JSON and as Markdown.

No run is made: all comes from models by shape, descriptions of hardware and schedules. Each table is made in seconds.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Tuple

from ipu_pipe.errors import guard_writing
from ipu_pipe.files import write


@dataclass(frozen=True)
class Predicted:
    """One table. `columns`: key of a row and heading. `notes`: what it says as a whole, assumptions included. `differences`:
    where the prediction is not what the paper found, in words; none: it agrees."""

    experiment: str
    title: str
    source: str
    columns: Tuple[Tuple[str, str], ...]
    rows: List[Dict[str, Any]]
    notes: List[str]
    differences: List[str]


def as_json(found: Predicted) -> Dict[str, Any]:
    """For programs."""
    return {
        "experiment": found.experiment,
        "title": found.title,
        "source": found.source,
        "predicted": True,
        "rows": found.rows,
        "notes": found.notes,
        "agrees": not found.differences,
        "differences": found.differences,
    }


def as_markdown(found: Predicted) -> str:
    """For people and docs."""
    lines = [
        f"# {found.title}",
        "",
        f"Source: {found.source}. Made by `python tools/reproduce.py {found.experiment}`. All but what is printed in the paper is"
        " predicted.",
        "",
        "| " + " | ".join(heading for _, heading in found.columns) + " |",
        "| " + " | ".join("---" for _ in found.columns) + " |",
    ]
    lines += ["| " + " | ".join(_shown(row.get(key)) for key, _ in found.columns) + " |" for row in found.rows]
    lines += ["", *[f"- {note}" for note in found.notes]]
    lines += ["", "As the paper found." if not found.differences else "Not as the paper found:", ""]
    lines += [f"- {text}" for text in found.differences]
    return "\n".join(lines).rstrip() + "\n"


def _shown(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def write_table(found: Predicted, folder: Path) -> List[Path]:
    """results.json and table.md, in `folder`."""
    with guard_writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    results = write(folder / "results.json", json.dumps(as_json(found), indent=1) + "\n")
    return [results, write(folder / "table.md", as_markdown(found))]


def mean_error(predicted: List[float], printed: List[float]) -> float:
    """Of the rows, absolute."""
    return sum(abs(a - b) for a, b in zip(predicted, printed)) / len(printed)
