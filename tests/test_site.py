"""Check the documentation: every key of a config is explained, every link has a target."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Dict, List, Type

import pytest
import yaml
from pydantic import BaseModel, ValidationError

from ipu_pipe.config.load import configure
from ipu_pipe.config.values import Section
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
    """Each section's docstring has `key`: meaning, or names the key. PopTorch's own keys are in
    docs/reference/ipu.md."""
    silent = []
    for section, places in keys.collect_sections().items():
        whole, _ = keys.split_docstring(section)
        silent += [
            f"{section.__name__}: `{key.key}`: has no meaning in the docstring"
            for key in keys.list_keys(section, places[0])
            if not key.meaning
            and f"`{key.key}`" not in whole
            and not places[0].startswith("backend.ipu")
        ]
    assert silent == []


def test_no_docstring_explains_a_removed_key() -> None:
    removed_keys = {
        f"{section.__name__}: {key}"
        for section in keys.collect_sections()
        for key in keys.split_docstring(section)[1]
        if key not in section.model_fields
    }
    assert removed_keys == set()


def test_the_page_of_keys_has_types_defaults_and_allowed_values() -> None:
    page = keys.format_page()
    assert '- `method` (`"gpipe"`): naive, gpipe, ' in page and ", rows; the training" in page
    assert "- `micro_batch_size` (`8`): integer >= 1; samples of a microbatch" in page
    assert "- [`t1`](#method_argst1) (`null`): PipeMare's rescheduled rates\n" in page
    assert "\n## method_args.t1\n" in page
    assert "- `decay` (`0.1353352832366127`): a number > 0 and < 1, or optimal; " in page
    # a default of false says that the values are true and false
    assert "- `recompute` (`false`): activation checkpointing" in page
    assert "- `stash`: true, false; whether" in page
    assert "- `path` (required): text; a file of weights" in page
    assert "given" not in re.findall(r"^- \[?`(\w+)`", page, re.MULTILINE)


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


def test_a_section_without_keys_has_no_list() -> None:
    class Nothing(Section):
        """A rule without settings."""

    lines = keys.format_section(Nothing, ["method_args.nothing"])
    assert lines == ["## method_args.nothing", "", "A rule without settings.", ""]


def test_the_example_of_a_key_is_a_valid_value() -> None:
    examples: Dict[str, List[str]] = {}
    for section, places in keys.collect_sections().items():
        for key in keys.list_keys(section, places[0]):
            if key.example:
                value = json.loads(key.example)
                examples[f"{places[0]}.{key.key}"] = list_faults_of_key(section, key.key, value)
    assert len(examples) > 10
    assert {place: faults for place, faults in examples.items() if faults} == {}


def list_faults_of_key(section: Type[BaseModel], name: str, value: Any) -> List[str]:
    """Return the errors of a section about one key, whatever it reports about other keys."""
    try:
        section.model_validate({name: value})
    except ValidationError as error:
        return [
            detail["msg"]
            for detail in error.errors()
            if detail["loc"][:1] == (name,) and detail["type"] != "setting"
        ]
    return []


def test_keys_that_the_documentation_names_are_keys() -> None:
    """Check keys in running text, as `stages.by`, and in YAML, as `checkpoint: {every: 3}`;
    values are not checked."""
    sections = [
        (section, place) for section, places in keys.collect_sections().items() for place in places
    ]
    keys_of_schema = {
        f"{place}.{name}".lstrip(".")
        for section, place in sections
        for name in section.model_fields
    }
    # names of arguments and files
    open_ended = (
        "model.",
        "data.",
        "given.",
        "metrics.",
        "init_from.json",
        "ema.safetensors",
        "optimizer.safetensors",
    )
    wrong = []
    for page in PAGES[:-1]:  # the changelog names removed keys
        for code in re.findall(r"(?<!`)`([^`]+)`(?!`)", page.read_text(encoding="utf-8")):
            text = " ".join(code.split())
            top = re.split(r"\W", text)[0]
            if top not in keys_of_schema:
                continue
            if (
                re.fullmatch(r"\w+(\.\w+)+", text)
                and text not in keys_of_schema
                and not text.startswith(open_ended)
            ):
                wrong.append(f"{page.name}: {text}")
            if re.match(r"\w+: ", text) and "..." not in text:
                try:
                    configure(**yaml.safe_load(text))
                except BadInput as error:
                    wrong += [
                        f"{page.name}: {fault}" for fault in error.faults if "unknown key" in fault
                    ]
    assert wrong == []


def test_the_committed_picture_matches_the_stored_results() -> None:
    assert draw_prices.PICTURE.read_text(encoding="utf-8") == draw_prices.draw_picture(), (
        "run: python tools/draw_prices.py"
    )


def test_the_code_tour_names_files_that_exist() -> None:
    tour = (DOCS / "code_tour.md").read_text(encoding="utf-8")
    files = set(re.findall(r"[\w/]+/\w+\.py", tour))
    assert [
        name
        for name in sorted(files)
        if not any((top / name).is_file() for top in (ROOT, ROOT / "ipu_pipe"))
    ] == []
    in_order = re.findall(r"^\d\. \*\*`([\w/]+\.py)`", tour, re.MULTILINE)
    assert len(in_order) == 5
    assert len(tour.split()) <= 500


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
