"""Write docs/results/README.md: every claim of a paper that the stored results judge, by paper.

python -m tools.experiments.overview
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Dict, Iterator, List, Mapping

from ipu_pipe.files import write_text

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results"
PAGE = RESULTS / "README.md"
# the page's own sentences, above its tables
TEXT = Path(__file__).with_suffix(".txt")
# the start of an experiment's source -> the heading of its paper
PAPERS = {
    "Kosson": "Pipelined backpropagation at batch one (Kosson et al. 2021)",
    "Yang": "PipeMare (Yang et al. 2021)",
    "Narayanan": "PipeDream and PipeDream-2BW (Narayanan et al. 2019, 2021)",
    "Laskin": "Local-parallel training (Laskin et al. 2020)",
    "randomized": "Randomized PipeDream against LocalSGD",
    "the abstracts": "Later asynchronous methods",
    "arXiv": "Later asynchronous methods",
}
HEAD = [
    "| experiment | the paper says | difference | t | verdict |",
    "| --- | --- | --- | --- | --- |",
]


def read_results() -> Iterator[Mapping[str, Any]]:
    """Yield the stored results of the experiments that were run, in the order of their names.

    Predictions, which train nothing, have a page of their own.
    """
    for file in sorted(RESULTS.glob("*/results.json")):
        results = json.loads(file.read_text(encoding="utf-8"))
        if results.get("verdicts") and not file.parent.name.startswith("plan_"):
            yield results


def format_rows(results: Mapping[str, Any]) -> List[str]:
    """Format a row of the table for each claim that was judged."""
    name = results["experiment"]
    return [
        f"| [{name}]({name}/table.md) | {verdict['claim']} | {format_difference(verdict)} | "
        f"{format_number(verdict.get('t'))} | {verdict['verdict']} |"
        for verdict in results["verdicts"]
    ]


def format_difference(verdict: Mapping[str, Any]) -> str:
    """Format a difference with its standard error."""
    error = verdict.get("standard_error")
    spread = "" if error is None else f" ± {format_number(error)}"
    return f"{format_number(verdict.get('difference'))}{spread}"


def format_number(value: Any) -> str:
    """Format a number with three digits, "-" for None."""
    return "-" if value is None else f"{value:.3g}"


def format_page() -> str:
    """Format the page: its sentences, then a table for each paper."""
    rows: Dict[str, List[str]] = {heading: [] for heading in PAPERS.values()}
    for results in read_results():
        heading = next(h for start, h in PAPERS.items() if results["source"].startswith(start))
        rows[heading] += format_rows(results)
    tables = [
        "\n".join([f"## {heading}", "", *HEAD, *of_paper]) for heading, of_paper in rows.items()
    ]
    return "\n\n".join([TEXT.read_text(encoding="utf-8").strip(), *tables]) + "\n"


if __name__ == "__main__":
    write_text(PAGE, format_page())
