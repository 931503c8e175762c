"""The experiments of tools/reproduce.py: what each of them provides, the paper's claims, and the files of an outcome."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Optional, Protocol, Sequence, Tuple

from ipu_pipe.errors import BadInput, guard_writing
from ipu_pipe.files import write, write_json

Finals = Mapping[str, float]  # row label -> the final value of the row


@dataclass(frozen=True)
class Request:
    """The options of one call: where runs are kept, and instead of an experiment's own its seeds, rows and size.

    `jobs` runs go on at a time; `say` prints progress.
    """

    runs: Path
    seeds: Sequence[int] = ()
    rows: Sequence[str] = ()
    full: bool = False
    jobs: int = 1
    say: Callable[[str], None] = print

    def refuse(self, name: str, reason: str, *options: str) -> None:
        """Raise `BadInput` for those of `options` (seeds, rows, full) that were given; `reason` says why they do not apply."""
        given_options = [option for option in options if getattr(self, option)]
        if given_options:
            raise BadInput([f"--{option}: {name}: {reason}; leave it out" for option in given_options])


@dataclass(frozen=True)
class Outcome:
    """What an experiment found.

    `results` is the JSON that programs read, `table` the same as Markdown, `curves` joins the JSON in the file alone. `pictures`
    maps a file name to the function that draws it; `folder` is where the files go by default.
    """

    results: Dict[str, Any]
    table: str
    folder: Path
    curves: List[Dict[str, Any]] = field(default_factory=list)
    pictures: Mapping[str, Callable[[Path], Any]] = field(default_factory=dict)

    def write(self, folder: Path) -> List[Path]:
        """Write results.json, table.md and the pictures into `folder` and return their paths."""
        with guard_writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        curves = {"curves": self.curves} if self.curves else {}
        files = [
            write_json(folder / "results.json", {**self.results, **curves}),
            write(folder / "table.md", self.table),
        ]
        for name, draw in self.pictures.items():
            draw(folder / name)
            files.append(folder / name)
        return files


class Experiment(Protocol):
    """Anything that tools/reproduce.py can list, check and run."""

    @property
    def name(self) -> str:
        """The name on the command line."""

    @property
    def title(self) -> str:
        """One line on what is compared."""

    @property
    def source(self) -> str:
        """The paper, with its tables or figures."""

    def describe_size(self) -> str:
        """Return its rows and seeds in words."""

    def check(self, request: Request) -> None:
        """Raise `BadInput` for options that do not apply."""

    def run(self, request: Request) -> Outcome:
        """Run it."""


@dataclass(frozen=True)
class Claim:
    """A statement of the paper, and the condition on the final values under which these runs agree with it."""

    text: str
    holds: Callable[[Finals], bool]


def check_claims(claims: Sequence[Claim], finals: Finals) -> Dict[str, Any]:
    """Return the keys "statements", "agrees" and "differences" of the results, by the final values of the rows."""
    return list_statements({claim.text: bool(claim.holds(finals)) for claim in claims})


def list_statements(holds_by_text: Mapping[str, bool]) -> Dict[str, Any]:
    """Return the keys "statements", "agrees" and "differences" of the results."""
    return {
        "statements": [{"statement": text, "reproduced": holds} for text, holds in holds_by_text.items()],
        "agrees": all(holds_by_text.values()),
        "differences": [f"not reproduced: {text}" for text, holds in holds_by_text.items() if not holds],
    }


def make_markdown(
    results: Mapping[str, Any], notes: Sequence[str], head: Sequence[str], rows: Sequence[Sequence[Any]]
) -> str:
    """Return title, notes and table as Markdown; if the results have statements, whether each of them holds."""
    lines = [f"# {results['title']}", "", *notes, "", *make_table(head, rows)]
    if results.get("statements"):
        said = [(s["statement"], "holds" if s["reproduced"] else "does not hold") for s in results["statements"]]
        lines += ["", *make_table(("the paper says", "in the means of these runs"), said)]
    return "\n".join(lines).rstrip() + "\n"


def make_table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> List[str]:
    """Return the lines of a Markdown table; None is an empty cell."""
    cells = [["" if value is None else str(value) for value in row] for row in [head, ["---"] * len(head), *rows]]
    return [f"| {' | '.join(row)} |" for row in cells]


# ---- tables of predictions, which run nothing


@dataclass(frozen=True)
class PredictionTable:
    """A table of what the planner predicts beside what a paper measured.

    `predict` returns the rows, notes on the table as a whole and differences from the paper in words. `columns` are (key of
    a row, heading). No run is made: all follows from models by shape, hardware files and schedules, in seconds.
    """

    name: str
    title: str
    source: str
    columns: Sequence[Tuple[str, str]]
    predict: Callable[[], "PredictedRows"]

    def describe_size(self) -> str:
        """Return that it is a prediction."""
        return "predicted"

    def check(self, request: Request) -> None:
        """Raise `BadInput` for any choice of seeds, rows or size."""
        request.refuse(self.name, "it is predicted, not run", "rows", "seeds", "full")

    def run(self, request: Request) -> Outcome:
        """Predict the table."""
        predicted = self.predict()
        results = {
            "experiment": self.name, "title": self.title, "source": self.source, "predicted": True, "rows": predicted.rows,
            "notes": predicted.notes, "agrees": not predicted.differences, "differences": predicted.differences,
        }  # fmt: skip
        intro = (
            f"Source: {self.source}. Made by `python tools/reproduce.py {self.name}`. Everything not printed in the paper is"
            " predicted."
        )
        rows = [[_show(row.get(key)) for key, _ in self.columns] for row in predicted.rows]
        table = make_markdown(results, [intro], [heading for _, heading in self.columns], rows)
        table += "\n" + "\n".join(f"- {note}" for note in predicted.notes) + "\n"
        if predicted.differences:
            table += "\nDifferent from the paper:\n\n" + "\n".join(f"- {text}" for text in predicted.differences) + "\n"
        return Outcome(results, table, request.runs / self.name)


@dataclass(frozen=True)
class PredictedRows:
    """The rows of a prediction; `notes` on the whole table, assumptions included; `differences` from the paper in words."""

    rows: List[Dict[str, Any]]
    notes: List[str]
    differences: List[str]


def _show(value: Any) -> Optional[str]:
    return None if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def compute_mean_error(predicted: Sequence[float], printed: Sequence[float]) -> float:
    """Return the mean absolute difference."""
    return sum(abs(a - b) for a, b in zip(predicted, printed)) / len(printed)
