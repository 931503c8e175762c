"""Train today's families of language models at tiny widths, as the page of third-party models says.

The table of docs/results/third_party.md is the expectation: a family is trained by each method of a
column, and its cell must say what came out.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Dict, List

import pytest
import torch

pytest.importorskip("transformers", minversion="5")

from ipu_pipe.errors import BadInput  # noqa: E402
from tools import sweep  # noqa: E402

PAGE = Path(__file__).resolve().parents[1] / "docs" / "results" / "third_party.md"
METHODS = ("gpipe", "pipedream", "pipedream_2bw")
# float32 in another order: the weights are about 0.02
TOLERANCE = 1e-6


def read_families() -> Dict[str, List[str]]:
    """Return the cells of the page's table, a row for each family: of METHODS, and of xla."""
    section = PAGE.read_text().partition("## Today's language models")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if "|" in line]
    assert rows[0] == ["family", *(f"`{method}`" for method in METHODS), "`gpipe` on xla"]
    return {family: cells for family, *cells in rows[2:]}


FAMILIES = read_families()


def shorten_verdicts(verdicts: List[str]) -> str:
    """Return a cell: one word if both verdicts (emulator, processes) are equal."""
    words = [verdict.partition(":")[0] for verdict in verdicts]
    return words[0] if len(set(words)) == 1 else " / ".join(words)


def test_the_page_says_what_the_stored_sweep_found() -> None:
    stored = json.loads((PAGE.parent / "third_party" / "results.json").read_text())["rows"]
    assert len(FAMILIES) >= 12
    for family, cells in FAMILIES.items():
        row = stored[f"transformers-{family}"]
        assert cells[:3] == [shorten_verdicts(row[method]) for method in METHODS], family


@pytest.mark.slow
@pytest.mark.parametrize("number, family", list(enumerate(FAMILIES)))
def test_two_processes_do_what_the_page_says(
    number: int, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`gpipe`, and the methods with old weights in turn: `make sweep` trains all by each."""
    methods = ("gpipe", METHODS[1 + number % 2])
    monkeypatch.setattr(sweep, "METHODS", methods)
    row = sweep._run_model(f"transformers-{family}", 500)
    for method in methods:
        assert FAMILIES[family][METHODS.index(method)] == shorten_verdicts(row[method]), row


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_xla_does_what_the_page_says(family: str, tmp_path: Path) -> None:
    pytest.importorskip("jax", reason="xla needs jax")
    name = f"transformers-{family}"
    try:
        model, summary = sweep._train(name, "gpipe", 2, "xla", tmp_path / "run")
    except BadInput as error:
        assert FAMILIES[family][3].startswith("refused") and str(error).startswith("model: ")
        return
    assert FAMILIES[family][3] == "within 1e-6"
    plain = sweep._train_plainly(name, "gpipe", summary["stages_begin_at"])
    for key, value in model.state_dict().items():
        assert torch.allclose(value, plain[key], rtol=0, atol=TOLERANCE), key
