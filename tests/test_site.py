"""Check the documentation: every key of a config is explained, every link has a target."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, List

import pytest
import yaml
from pydantic import ValidationError

from ipu_pipe.config.load import configure
from ipu_pipe.errors import BadInput
from ipu_pipe.schedule.methods import METHODS
from ipu_pipe.update.rules import RULES
from tools import draw_prices
from tools import write_keys as keys

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = [
    *sorted(DOCS.rglob("*.md")),
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
]


def test_every_key_of_a_config_is_explained() -> None:
    """Each section's docstring has `key`: meaning, or names the key; and no key that was removed.
    PopTorch's own keys are in docs/reference/ipu.md."""
    silent = []
    for section, places in keys.collect_sections().items():
        whole, explained = keys.split_docstring(section)
        if not places[0].startswith("backend.ipu"):
            silent += [
                f"{section.__name__}: {key.key}"
                for key in keys.list_keys(section, places[0])
                if not key.meaning and f"`{key.key}`" not in whole
            ]
        assert {*explained} <= {*section.model_fields}
    assert silent == []


def test_the_committed_page_of_keys_matches_the_schema() -> None:
    assert keys.PAGE.read_text(encoding="utf-8") == keys.format_page(), (
        "run: python tools/write_keys.py"
    )


def test_docs_have_a_row_for_every_method_and_rule() -> None:
    """Story: a trial method had no row in the docs, and the tests of its schedule passed."""
    text = (ROOT / "README.md").read_text() + (DOCS / "schedules.md").read_text()
    first_cells = [line.split(" | ")[0] for line in text.splitlines() if line.startswith("| `")]
    named = {name for cell in first_cells for name in re.findall(r"`(\w+)`", cell)}
    assert METHODS.keys() - named == set()
    pages = ("rules.md", "randomized.md", "local_parallel.md")
    text = "".join((DOCS / page).read_text() for page in pages)
    assert [key for key in RULES if f"`{key}" not in text] == []


def test_the_example_of_a_key_is_a_valid_value() -> None:
    """The section may miss other keys."""
    faults: List[Any] = []
    count = 0
    for section, places in keys.collect_sections().items():
        for key in keys.list_keys(section, places[0]):
            if key.example:
                count += 1
                try:
                    section.model_validate({key.key: json.loads(key.example)})
                except ValidationError as error:
                    faults += [
                        one
                        for one in error.errors()
                        if one["type"] != "setting" and one["loc"][:1] == (key.key,)
                    ]
    assert count > 10 and faults == []


def test_keys_that_the_documentation_names_are_keys() -> None:
    """Check keys in running text, as `stages.by`, and in YAML, as `checkpoint: {every: 3}`;
    values are not checked."""
    keys_of_schema = {
        f"{place}.{name}".lstrip(".")
        for section, places in keys.collect_sections().items()
        for place in places
        for name in section.model_fields
    }
    # names of arguments and files
    files = ("init_from.json", "ema.safetensors", "optimizer.safetensors")
    open_ended = ("model.", "data.", "given.", "metrics.", *files)
    wrong = []
    for page in PAGES[:-1]:  # the changelog names removed keys
        for code in re.findall(r"(?<!`)`([^`]+)`(?!`)", page.read_text(encoding="utf-8")):
            text = " ".join(code.split())
            if re.split(r"\W", text)[0] not in keys_of_schema:
                continue
            if re.fullmatch(r"\w+(\.\w+)+", text) and not text.startswith(open_ended):
                wrong += [text] if text not in keys_of_schema else []
            if re.match(r"\w+: ", text) and "..." not in text:
                try:
                    configure(**yaml.safe_load(text))
                except BadInput as error:
                    wrong += [fault for fault in error.faults if "unknown key" in fault]
    assert wrong == []


def test_the_committed_picture_matches_the_stored_results() -> None:
    assert draw_prices.PICTURE.read_text(encoding="utf-8") == draw_prices.draw_picture(), (
        "run: python tools/draw_prices.py"
    )


def test_the_code_tour_names_files_that_exist() -> None:
    tour = (DOCS / "code_tour.md").read_text(encoding="utf-8")
    tops = (ROOT, ROOT / "ipu_pipe")
    files = sorted(set(re.findall(r"[\w/]+/\w+\.py", tour)))
    assert [name for name in files if not any((top / name).is_file() for top in tops)] == []
    assert files


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_have_a_target(page: Path) -> None:
    """The site has a page for a folder with one, and cannot copy others."""
    links = re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))
    paths = [link.partition("#")[0] for link in links if ":" not in link and link[0] != "#"]
    lost = [
        path
        for path in paths
        if not (page.parent / path).is_file()
        and not any((page.parent / path / name).is_file() for name in ("README.md", "table.md"))
    ]
    assert lost == []
