"""Judge stored results anew, and run nothing: after a change of `tools.experiments.verdicts` or of
what an experiment's file expects.

    python -m tools.experiments.rejudge docs/results

The difference, its standard error and the seeds of each claim stay as they were measured. The
tables of predictions are left alone: they take seconds to make again.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence

import yaml

from ipu_pipe.files import write_text
from ipu_pipe.shipped import find_configs
from tools.experiments.experiment import make_table
from tools.experiments.training_grids import TrainingGrid, list_notes
from tools.experiments.vector_grids import VECTOR_GRIDS
from tools.experiments.verdicts import COLUMNS, NOT_RUN, Claim, Verdict, make_results, weigh


def read_grid(name: str) -> Optional[TrainingGrid]:
    """Return the experiment's file, None if it is a record in Python."""
    path = find_configs() / "experiments" / f"{name}.yaml"
    if not path.is_file():
        return None
    return TrainingGrid.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))


def list_claims(name: str, grid: Optional[TrainingGrid]) -> List[Claim]:
    """Return the claims of an experiment's file or record, which come before those of its measure."""
    if grid is not None:
        measure = grid.get_measure()
        return [entry.make_claim(measure, grid.added) for entry in grid.expect]
    return list(VECTOR_GRIDS[name].claims) if name in VECTOR_GRIDS else []


def judge_again(stored: Mapping[str, Any], claims: Sequence[Claim]) -> List[Verdict]:
    """Return the verdicts of stored results by today's rules."""
    finals = {row["label"]: row["final"] for row in stored["rows"] if "label" in row}
    verdicts = []
    for number, entry in enumerate(stored["verdicts"]):
        before = Verdict(**entry)
        claim = Claim(before.claim, (), lambda finals: 0.0)
        if number < len(claims):
            claim = claims[number]
        is_exact = before.seeds is None
        if is_exact or before.verdict == NOT_RUN or before.difference is None:
            verdicts.append(before._replace(claim=claim.text))
            continue
        means = [finals.get(label) for label in claim.rows]
        seeds = before.seeds or 0
        verdicts.append(weigh(claim, before.difference, before.standard_error, seeds, means))
    return verdicts


def replace_verdicts(table: str, verdicts: List[Verdict], notes: List[str]) -> str:
    """Return the Markdown of a table with other verdicts, and with `notes` at its end."""
    lines = table.splitlines()
    begin = next(i for i, line in enumerate(lines) if line.startswith(f"| {COLUMNS[0]} |"))
    end = next((i for i in range(begin, len(lines)) if not lines[i]), len(lines))
    missing = [f"- {note}" for note in notes if f"- {note}" not in lines]
    rest = lines[end:] + ([""] + missing if missing else [])
    return "\n".join([*lines[:begin], *make_table(COLUMNS, verdicts), *rest]) + "\n"


def rejudge(folder: Path) -> bool:
    """Judge the results in a folder anew; return whether anything changed."""
    text = (folder / "results.json").read_text(encoding="utf-8")
    stored: Dict[str, Any] = json.loads(text)
    grid = read_grid(folder.name)
    if not stored.get("verdicts") or folder.name.startswith("plan_"):
        return False
    verdicts = judge_again(stored, list_claims(folder.name, grid))
    results = {**stored, **make_results(verdicts)}
    table = (folder / "table.md").read_text(encoding="utf-8")
    notes = [] if grid is None else list_notes(grid)
    changed = replace_verdicts(table, verdicts, notes)
    if results == stored and changed == table:
        return False
    indent = None if len(text.splitlines()) == 1 else 1
    write_text(folder / "results.json", json.dumps(results, indent=indent) + "\n")
    write_text(folder / "table.md", changed)
    return True


if __name__ == "__main__":
    for file in sorted(Path(sys.argv[1]).glob("*/results.json")):
        if rejudge(file.parent):
            print(file.parent.name)
