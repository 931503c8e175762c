"""The reference page of a config's keys, generated from the schema.

Types and defaults come from the fields, meanings from the docstrings, and allowed values from the error message of a wrong value.
"""

from __future__ import annotations

import inspect
import json
import re
import typing
from typing import Any, Dict, List, NamedTuple, Tuple, Type

from pydantic import BaseModel, ValidationError

from ipu_pipe.config.faults import WRITTEN, format_faults
from ipu_pipe.config.load import configure
from ipu_pipe.config.schema import Config, import_outer
from ipu_pipe.config.sections import StageCount, StageFinest
from ipu_pipe.errors import BadInput

# the sections of keys whose annotation names none
FORMS: Dict[str, Tuple[Type[BaseModel], ...]] = {"stages": (StageCount, StageFinest), "ipu": (import_outer("ipu"),)}
# one or several keys and a colon, in a docstring
ENTRY = re.compile(r"((?:`\w+`(?:, | and )?)+): ")
# faults of the type, which the table has in a column of its own
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
WORDS = {
    int: "whole number",
    float: "number",
    bool: "true, false",
    str: "text",
    dict: "mapping",
    list: "list",
    tuple: "list",
}


class Key(NamedTuple):
    """Row of the table: a key, with Markdown text in each column."""

    key: str
    type: str
    default: str
    allowed: str
    meaning: str


def sections() -> Dict[Type[BaseModel], List[str]]:
    """Return each section's places in a config (`optimizer`, ...), with the config itself, at place '', first."""
    places_by_section: Dict[Type[BaseModel], List[str]] = {}
    todo: List[Tuple[str, Type[BaseModel]]] = [("", Config)]
    while todo:
        place, section = todo.pop(0)
        places_by_section.setdefault(section, []).append(place)
        for name, field in section.model_fields.items():
            inner = FORMS.get(name) or _find_sections(field.annotation)
            todo += [(f"{place}.{name}".lstrip("."), nested) for nested in inner if name not in WRITTEN]
    return places_by_section


def keys(section: Type[BaseModel]) -> List[Key]:
    """List the rows of a section."""
    _, meanings = explained(section)
    return [
        Key(
            name,
            kind(field.annotation),
            _format_default(field),
            _describe_allowed(section, name),
            meanings.get(name, ""),
        )
        for name, field in section.model_fields.items()
        if name not in WRITTEN
    ]


def explained(section: Type[BaseModel]) -> Tuple[str, Dict[str, str]]:
    """Split a section's docstring into its description of the section and its meanings by key."""
    parts = ENTRY.split(" ".join(inspect.getdoc(section).split()))
    meanings = {}
    for names, meaning in zip(parts[1::2], parts[2::2]):
        meanings.update({name: meaning.strip().rstrip(".") for name in re.findall(r"`(\w+)`", names)})
    return parts[0].strip(), meanings


def kind(annotation: Any) -> str:
    """Describe a field's type in words."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if inspect.isclass(annotation) and issubclass(annotation, BaseModel):
        return "section"
    if str(origin) in ("typing.Annotated", "<class 'typing.Annotated'>"):
        return kind(arguments[0])
    if origin is typing.Union:
        kinds = [kind(argument) for argument in arguments if argument is not type(None)]
        null = type(None) in arguments and kinds != ["section"]
        return ", ".join(dict.fromkeys(kinds)) + (" or null" if null else "")
    if origin is typing.Literal or "Literal" in str(origin):
        return ", ".join(f"`{value}`" for value in arguments)
    if origin in (list, tuple):
        return f"list of {kind(arguments[0])}"
    return WORDS.get(origin or annotation, "see there")


def page() -> str:
    """Return the Markdown of the page."""
    lines = [
        "# Keys of a config",
        "",
        "Generated from the schema that checks a config. How to use it: [configuration](../configuration.md).",
        "",
    ]
    for section, places in sections().items():
        whole, meanings = explained(section)
        columns = Key._fields if meanings else Key._fields[:-1]
        lines += [*(f"## {place or 'A config'}" for place in places), "", _link_pages(whole), ""]
        lines += [f"| {' | '.join(columns)} |", "| --- " * len(columns) + "|"]
        for key in keys(section):
            inner = re.sub("[^a-z0-9_]", "", f"{places[0]}{key.key}")
            name = f"[`{key.key}`](#{inner})" if key.type == "section" else f"`{key.key}`"
            cells = key._replace(
                key=name, default=f"`{key.default}`" if key.default else "", meaning=_link_pages(key.meaning)
            )
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells[: len(columns)]) + " |")
        lines.append("")
    return "\n".join(lines)


def _link_pages(text: str) -> str:
    """Return the text with the names of documentation pages as links."""
    return re.sub(r"docs/(\w+)\.md", r"[\1](../\1.md)", text)


def _format_default(field: Any) -> str:
    """Format the default of a field as JSON; '' for a section."""
    if field.is_required():
        return "(must be given)"
    value = field.get_default(call_default_factory=True)
    return "" if isinstance(value, BaseModel) else json.dumps(value)


def _describe_allowed(section: Type[BaseModel], name: str) -> str:
    """Return the allowed values, from the error message of a value that no key takes; "" if the type tells them all."""
    bounds = _describe_bounds(section, name)
    if bounds:
        return bounds
    messages: List[str] = []
    try:
        section.model_validate({name: object()})
    except ValidationError as error:
        details = [
            detail for detail in error.errors() if detail["loc"][0] == name and detail["type"] not in TYPE_ERRORS
        ]
        messages = [line for detail in details for line in format_faults([detail], {}, "", Config, {})]
    if section is Config and kind(section.model_fields[name].annotation) == "text":
        try:
            configure(**{name: "?"})
        except BadInput as error:
            messages = [fault for fault in error.faults if f"{name}: ?" in fault]
    matches = [
        re.search(r"must be (?:one of )?(.*?)(?:; did you mean.*|: no run has so many)?$", line) for line in messages
    ]
    return " or ".join(dict.fromkeys(match.group(1) for match in matches if match))


def _describe_bounds(section: Type[BaseModel], name: str) -> str:
    """Return the limits of a number; those that only keep slips away are left out."""
    schema = section.model_json_schema()["properties"][name]
    texts = []
    for form in schema.get("anyOf", [schema]):
        form = form.get("items", form)
        least = [f"{sign} {form[key]:g}" for key, sign in (("minimum", ">="), ("exclusiveMinimum", ">")) if key in form]
        most = [f"{sign} {form[key]:g}" for key, sign in (("maximum", "<="), ("exclusiveMaximum", "<")) if key in form]
        if least:
            most = most if form.get("maximum", 0) <= 1000 else []
            texts.append(f"a {'whole ' * (form.get('type') == 'integer')}number {' and '.join([*least, *most])}")
    return texts[0] if texts else ""


def _find_sections(annotation: Any) -> Tuple[Type[BaseModel], ...]:
    """Return the sections in an annotation, such as `Optional[Section]`."""
    types = (annotation, *typing.get_args(annotation))
    return tuple(t for t in types if inspect.isclass(t) and issubclass(t, BaseModel))
