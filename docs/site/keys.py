"""The keys of a config as a page, from its schema: type and default from the fields, meaning from the docstrings, what is allowed
from the line that a wrong value would get."""

from __future__ import annotations

import inspect
import json
import re
import typing
from typing import Any, Dict, List, NamedTuple, Tuple, Type

from pydantic import BaseModel, ValidationError

from ipu_pipe.config.faults import WRITTEN, format_faults
from ipu_pipe.config.load import configure
from ipu_pipe.config.outer import find_section
from ipu_pipe.config.schema import Config
from ipu_pipe.config.sections import StageCount, StageFinest
from ipu_pipe.errors import BadInput

# of keys of any type, their sections
FORMS: Dict[str, Tuple[Type[BaseModel], ...]] = {"stages": (StageCount, StageFinest), "ipu": (find_section("ipu"),)}
# a key, or several, with a colon, in a docstring
ENTRY = re.compile(r"((?:`\w+`(?:, | and )?)+): ")
SAID_BY_TYPE = (
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
    """A row of the table."""

    key: str
    type: str
    default: str
    allowed: str
    meaning: str


def sections() -> Dict[Type[BaseModel], List[str]]:
    """Every section with the places that it has in a config, the config itself first."""
    found: Dict[Type[BaseModel], List[str]] = {}
    todo: List[Tuple[str, Type[BaseModel]]] = [("", Config)]
    while todo:
        place, section = todo.pop(0)
        found.setdefault(section, []).append(place)
        for name, field in section.model_fields.items():
            inner = FORMS.get(name) or _sections_in(field.annotation)
            todo += [(f"{place}.{name}".lstrip("."), each) for each in inner if name not in WRITTEN]
    return found


def keys(section: Type[BaseModel]) -> List[Key]:
    """The rows of a section."""
    _, meanings = explained(section)
    return [
        Key(name, kind(field.annotation), _default(field), _allowed(section, name), meanings.get(name, ""))
        for name, field in section.model_fields.items()
        if name not in WRITTEN
    ]


def explained(section: Type[BaseModel]) -> Tuple[str, Dict[str, str]]:
    """What a section's docstring says of it all, and of each key."""
    parts = ENTRY.split(" ".join(inspect.getdoc(section).split()))
    meanings = {}
    for names, meaning in zip(parts[1::2], parts[2::2]):
        meanings.update({name: meaning.strip().rstrip(".") for name in re.findall(r"`(\w+)`", names)})
    return parts[0].strip(), meanings


def kind(annotation: Any) -> str:
    """A field's type in words."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if inspect.isclass(annotation) and issubclass(annotation, BaseModel):
        return "section"
    if str(origin) in ("typing.Annotated", "<class 'typing.Annotated'>"):
        return kind(arguments[0])
    if origin is typing.Union:
        given = [kind(each) for each in arguments if each is not type(None)]
        null = type(None) in arguments and given != ["section"]
        return ", ".join(dict.fromkeys(given)) + (" or null" if null else "")
    if origin is typing.Literal or "Literal" in str(origin):
        return ", ".join(f"`{each}`" for each in arguments)
    if origin in (list, tuple):
        return f"list of {kind(arguments[0])}"
    return WORDS.get(origin or annotation, "see there")


def page() -> str:
    """The whole page."""
    lines = [
        "# Keys of a config",
        "",
        "Made from the schema that checks a config. How to use it: [configuration](../configuration.md).",
        "",
    ]
    for section, places in sections().items():
        whole, meanings = explained(section)
        columns = Key._fields if meanings else Key._fields[:-1]
        lines += [*(f"## {place or 'A config'}" for place in places), "", _linked(whole), ""]
        lines += [f"| {' | '.join(columns)} |", "| --- " * len(columns) + "|"]
        for key in keys(section):
            inner = re.sub("[^a-z0-9_]", "", f"{places[0]}{key.key}")
            name = f"[`{key.key}`](#{inner})" if key.type == "section" else f"`{key.key}`"
            cells = key._replace(
                key=name, default=f"`{key.default}`" if key.default else "", meaning=_linked(key.meaning)
            )
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells[: len(columns)]) + " |")
        lines.append("")
    return "\n".join(lines)


def _linked(text: str) -> str:
    """Pages that are named become links."""
    return re.sub(r"docs/(\w+)\.md", r"[\1](../\1.md)", text)


def _default(field: Any) -> str:
    if field.is_required():
        return "(must be given)"
    value = field.get_default(call_default_factory=True)
    return "" if isinstance(value, BaseModel) else json.dumps(value)


def _allowed(section: Type[BaseModel], name: str) -> str:
    """What the line about a value that nothing takes says; "" where the type says it."""
    said: List[str] = []
    try:
        section.model_validate({name: object()})
    except ValidationError as error:
        own = [detail for detail in error.errors() if detail["loc"][0] == name and detail["type"] not in SAID_BY_TYPE]
        said = [line for detail in own for line in format_faults([detail], {}, "", Config, {})]
    if section is Config and kind(section.model_fields[name].annotation) == "text":
        try:
            configure(**{name: "?"})
        except BadInput as error:
            said = [fault for fault in error.faults if f"{name}: ?" in fault]
    found = [
        re.search(r"must be (?:one of )?(.*?)(?:; did you mean.*|: no run has so many)?$", line) for line in said
    ]
    return " or ".join(dict.fromkeys(match.group(1) for match in found if match))


def _sections_in(annotation: Any) -> Tuple[Type[BaseModel], ...]:
    given = (annotation, *typing.get_args(annotation))
    return tuple(each for each in given if inspect.isclass(each) and issubclass(each, BaseModel))
