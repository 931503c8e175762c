"""Write docs/reference/keys.md, the page of all keys of a config, from the schema, and the list of
what a backend lacks in docs/reference/unsupported.md from the table of features: `python tools/write_keys.py`.

Types and defaults come from the fields, meanings from the docstrings, allowed values from the error
message of a wrong value, and examples from the configs of this repository.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
import typing
from functools import lru_cache
from pathlib import Path
from typing import Any, Dict, Iterator, List, NamedTuple, Tuple, Type

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from pydantic import BaseModel, ValidationError  # noqa: E402

from ipu_pipe.backends.features import FEATURES  # noqa: E402
from ipu_pipe.backends.table import BACKENDS  # noqa: E402
from ipu_pipe.config.faults import WRITTEN, format_faults  # noqa: E402
from ipu_pipe.config.load import configure, parse_yaml  # noqa: E402
from ipu_pipe.config.schema import Config, PipelineConfig, import_outer  # noqa: E402
from ipu_pipe.config.sections import StageCount, StageFinest  # noqa: E402
from ipu_pipe.errors import BadInput  # noqa: E402
from ipu_pipe.refusals import Language  # noqa: E402

PAGE = ROOT / "docs" / "reference" / "keys.md"
UNSUPPORTED = ROOT / "docs" / "reference" / "unsupported.md"
SECTION_OF_FEATURES = "## What a backend lacks\n"
# the names of the backends in its list
TITLES = {"emulator": "emulator", "distributed": "processes", "poptorch": "IPUs", "xla": "xla"}
# the value of a key that has keys of its own
SECTION = "section"
# docs/reference/ipu.md has the keys of this section
DESCRIBED_ELSEWHERE = "backend.ipu"
# a longer value is not an example of one line
LONGEST_EXAMPLE = 60
# the default of a key that has none
REQUIRED = "(required)"

# the sections of keys whose annotation names none
FORMS: Dict[str, Tuple[Type[BaseModel], ...]] = {
    "stages": (StageCount, StageFinest),
    "ipu": (import_outer("ipu"),),
}
# one or several keys and a colon, in a docstring
ENTRY = re.compile(r"((?:`\w+`(?:, | and )?)+): ")
# faults of the type, which describe_type puts into words
TYPE_ERRORS = (
    "missing",
    "literal_error",
    "model_type",
    "bool_type",
    "string_type",
    "dict_type",
    "list_type",
    "tuple_type",
)
# limits of a number in a JSON schema
LIMITS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
WORDS = {
    int: "integer",
    float: "number",
    bool: "true, false",
    str: "text",
    dict: "mapping",
    list: "list",
    tuple: "list",
}


class Key(NamedTuple):
    """A key of the page, with the Markdown of its parts."""

    key: str
    value: str
    default: str
    meaning: str
    example: str


def collect_sections() -> Dict[Type[BaseModel], List[str]]:
    """Return each section's places in a config (`optimizer`, ...), with the config itself, at place
    '', first.
    """
    places_by_section: Dict[Type[BaseModel], List[str]] = {}
    todo: List[Tuple[str, Type[BaseModel]]] = [("", Config)]
    while todo:
        place, section = todo.pop(0)
        places_by_section.setdefault(section, []).append(place)
        for name, field in section.model_fields.items():
            inner = FORMS.get(name) or _find_sections(field.annotation)
            todo += [
                (f"{place}.{name}".lstrip("."), nested) for nested in inner if name not in WRITTEN
            ]
    return places_by_section


def list_keys(section: Type[BaseModel], place: str) -> List[Key]:
    """List the keys of a section, which is at `place` in a config."""
    description, meanings = split_docstring(section)
    shared = re.findall(r"`(\w+)`", "".join(description.rpartition(" are as in ")[:2]))
    rows = []
    # what must be given comes first
    for name, field in sorted(
        section.model_fields.items(), key=lambda one: not one[1].is_required()
    ):
        if name in WRITTEN:
            continue
        default = _format_default(field)
        value = _describe_value(section, name)
        if default == "null":
            value = re.sub(" or null$", "", value)
        example = ""
        if value != SECTION:
            example = _find_example(f"{place}.{name}".lstrip("."), default, value)
        # the keys that a section shares with another one have a row there
        if name in meanings or name not in shared:
            rows.append(Key(name, value, default, meanings.get(name, ""), example))
    return rows


def _describe_value(section: Type[BaseModel], name: str) -> str:
    """Describe the values that a key may have: those that an error message allows, else those of
    its type.
    """
    annotation = section.model_fields[name].annotation
    type_text = SECTION if name in FORMS and annotation is Any else describe_type(annotation)
    allowed = _describe_allowed(section, name)
    if type_text == SECTION or not allowed:
        return type_text
    or_null = " or null" if type_text.endswith(" or null") and "null" not in allowed else ""
    return allowed + or_null


def split_docstring(section: Type[BaseModel]) -> Tuple[str, Dict[str, str]]:
    """Split a section's docstring into its description of the section and its meanings by key, of
    which a section that it extends may have some.
    """
    base = section.__base__
    meanings = split_docstring(base)[1] if base is PipelineConfig else {}
    parts = ENTRY.split(" ".join((inspect.getdoc(section) or "").split()))
    for names, meaning in zip(parts[1::2], parts[2::2]):
        meanings.update(
            {name: meaning.strip().rstrip(".;") for name in re.findall(r"`(\w+)`", names)}
        )
    return parts[0].strip().rstrip(";"), meanings


def describe_type(annotation: Any) -> str:
    """Describe a field's type in words."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if inspect.isclass(annotation) and issubclass(annotation, BaseModel):
        return SECTION
    if str(origin) in ("typing.Annotated", "<class 'typing.Annotated'>"):
        return describe_type(arguments[0])
    if origin is typing.Union:
        kinds = [describe_type(argument) for argument in arguments if argument is not type(None)]
        null = type(None) in arguments and kinds != [SECTION]
        return ", ".join(dict.fromkeys(kinds)) + (" or null" if null else "")
    if origin is typing.Literal or "Literal" in str(origin):
        return ", ".join(f"`{value}`" for value in arguments)
    if origin in (list, tuple):
        return f"list of {describe_type(arguments[0])}"
    return WORDS.get(origin or annotation, "see there")


def format_page() -> str:
    """Return the Markdown of the page."""
    lines = [
        "# Keys of a config",
        "",
        "How to use a config: [configuration](../configuration.md). Each line has a key, its default in "
        "parentheses, its values, and its meaning with an example from `configs/`. Without parentheses "
        "the default is null, or that of the section's own keys.",
        "",
        "This page is generated from the schema by `python tools/write_keys.py`; do not edit it.",
        "",
    ]
    for section, places in collect_sections().items():
        if not places[0].startswith(f"{DESCRIBED_ELSEWHERE}."):
            lines += format_section(section, places)
    return "\n".join(lines).rstrip("\n") + "\n"


def format_section(section: Type[BaseModel], places: List[str]) -> List[str]:
    """Return the lines of a section: its places as headings, its description, and a list of its
    keys.
    """
    description, _ = split_docstring(section)
    lines = [f"## {place or 'A config'}" for place in places]
    if description:
        lines += ["", _link_pages(description)]
    rows = list_keys(section, places[0])
    # a rule may have no settings
    if places == [DESCRIBED_ELSEWHERE] or not rows:
        return [*lines, ""]
    return [*lines, "", *(_format_item(row, places[0]) for row in rows), ""]


def _format_item(row: Key, place: str) -> str:
    """Return a key of the section at `place` as an item of a list."""
    name = f"`{row.key}`"
    if row.value == SECTION:
        anchor = re.sub("[^a-z0-9_]", "", f"{place}{row.key}".lower())
        name = f"[{name}](#{anchor})"
    default = row.default
    # null is the default of most keys; of a section it says that there is none
    if default == REQUIRED:
        name += f" {REQUIRED}"
    elif default and (default != "null" or row.value == SECTION):
        name += f" (`{default}`)"
    # the link says that it is a section, and a default of true or false which values there are
    value = "" if row.value == SECTION or default in ("true", "false") else row.value
    meaning = _link_pages(row.meaning) + f" (`{row.example}`)" * bool(row.example)
    return f"- {name}: " + "; ".join(text for text in (value, meaning) if text)


@lru_cache(maxsize=None)
def _collect_examples() -> Dict[str, List[str]]:
    """Return the values that the repository's configs give each key, by its place, as JSON."""
    examples: Dict[str, List[str]] = {}
    for file in sorted((ROOT / "configs").rglob("*.yaml")):
        if file.parent.name == "hardware":
            continue
        for place, value in _walk("", parse_yaml(file.read_text(encoding="utf-8"), file.name)):
            examples.setdefault(place, []).append(json.dumps(value))
    return examples


def _walk(place: str, value: Any) -> Iterator[Tuple[str, Any]]:
    """Yield the place and the value of each key in a mapping of keys, and in the mappings in it."""
    yield place, value
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _walk(f"{place}.{key}".lstrip("."), inner)


def _find_example(place: str, default: str, value: str) -> str:
    """Return the shortest text, list or mapping that the repository's configs give a key, as JSON;
    '' for none. The column of values shows numbers and choices.
    """
    examples = [
        text
        for text in _collect_examples().get(place, [])
        if text[0] in '"[{' and text not in (default, "{}") and text.strip('"') not in value
    ]
    best = min(examples, key=lambda text: (len(text), text), default="")
    return best if len(best) <= LONGEST_EXAMPLE else ""


def _link_pages(text: str) -> str:
    """Return the text with the names of documentation pages as links from docs/reference."""
    text = re.sub(r"docs/reference/((\w+)\.md)", r"[\2](\1)", text)
    return re.sub(r"docs/((?:\w+/)?(\w+)\.md)", r"[\2](../\1)", text)


def _format_default(field: Any) -> str:
    """Format the default of a field as JSON; '' for a section."""
    if field.is_required():
        return REQUIRED
    value = field.get_default(call_default_factory=True)
    return "" if isinstance(value, BaseModel) else json.dumps(value)


def _describe_allowed(section: Type[BaseModel], name: str) -> str:
    """Return the allowed values, from the error message of a value that no key takes; "" if the
    type tells them all.
    """
    bounds = _describe_bounds(section, name)
    if bounds:
        return bounds
    messages: List[str] = []
    try:
        section.model_validate({name: object()})
    except ValidationError as error:
        details = [
            detail
            for detail in error.errors()
            if detail["loc"][0] == name and detail["type"] not in TYPE_ERRORS
        ]
        messages = [
            Language.CONFIG.say(line)
            for detail in details
            for line in format_faults([detail], {}, "", Config, {})
        ]
    if section is Config and describe_type(section.model_fields[name].annotation) == "text":
        try:
            configure(**{name: "?"})
        except BadInput as error:
            messages = [fault for fault in error.faults if f"{name}: ?" in fault]
    matches = [
        re.search(r"must be (?:one of )?(.*?)(?:; did you mean.*|: no run has so many)?$", line)
        for line in messages
    ]
    return " or ".join(dict.fromkeys(match.group(1) for match in matches if match))


def _describe_bounds(section: Type[BaseModel], name: str) -> str:
    """Return the limits of a number; those that only keep slips away are left out. "" for a union
    of types that differ in them.
    """
    schema = section.model_json_schema()["properties"][name]
    forms = [form for form in schema.get("anyOf", [schema]) if form.get("type") != "null"]
    # the message of a union says what all its types allow
    if len({tuple(map(form.get, LIMITS)) for form in forms}) > 1:
        return ""
    texts = []
    for form in forms:
        prefix = "list, each " if "items" in form else ""
        form = form.get("items", form)
        least = [
            f"{sign} {form[key]:g}"
            for key, sign in (("minimum", ">="), ("exclusiveMinimum", ">"))
            if key in form
        ]
        most = [
            f"{sign} {form[key]:g}"
            for key, sign in (("maximum", "<="), ("exclusiveMaximum", "<"))
            if key in form
        ]
        if least:
            most = most if form.get("maximum", 0) <= 1000 else []
            texts.append(
                f"{prefix}{'integer' if form.get('type') == 'integer' else 'number'} "
                f"{' and '.join([*least, *most])}"
            )
    return texts[0] if texts else ""


def _find_sections(annotation: Any) -> Tuple[Type[BaseModel], ...]:
    """Return the sections in an annotation, such as `Optional[Section]`."""
    types = (annotation, *typing.get_args(annotation))
    return tuple(t for t in types if inspect.isclass(t) and issubclass(t, BaseModel))


def format_features() -> str:
    """Return the list of the features that a backend lacks, and why."""
    names_by_reasons: Dict[Tuple[str, ...], List[str]] = {}
    for feature in FEATURES:
        reasons = tuple(Language.CONFIG.say(feature.lacking.get(name, "")) for name in BACKENDS)
        names_by_reasons.setdefault(reasons, []).append(feature.name)
    lines = []
    for reasons, names in names_by_reasons.items():
        titles_by_reason: Dict[str, List[str]] = {}
        for backend, reason in zip(BACKENDS, reasons):
            if reason:
                titles_by_reason.setdefault(reason, []).append(TITLES[backend])
        faults = [f"{', '.join(titles)} ({why})" for why, titles in titles_by_reason.items()]
        lines.append(f"- **{', '.join(names)}**: {'; '.join(faults)}\n")
    return "".join(lines)


def write_features() -> None:
    """Write the list into its section of the page."""
    before, section, rest = UNSUPPORTED.read_text(encoding="utf-8").partition(SECTION_OF_FEATURES)
    introduction = rest.split("- **", 1)[0]
    after = rest[rest.index("\n## ") :]
    text = f"{before}{section}{introduction}{format_features()}{after}"
    UNSUPPORTED.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write_features()
    PAGE.write_text(format_page(), encoding="utf-8")
