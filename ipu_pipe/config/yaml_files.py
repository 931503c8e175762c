"""YAML files of keys: read within bounds, each value with the place it came from, and written so that they read the same.

YAML can say more than a config means, and what it cannot mean is refused with file and line: tags but those of plain
data, an alias within what it names, text that no file could hold. The bounds are far above any config of ours (the largest
has 60 values on 4 levels) and keep what is read, checked and shown within seconds.
"""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

import yaml

from ipu_pipe.errors import BadInput
from ipu_pipe.text import show

MOST_BYTES = 2**19  # of a file
MOST_VALUES = 50_000  # of a file, those counted again that aliases repeat
MOST_LEVELS = 50  # of mappings and lists in one another
MOST_DIGITS = 400  # characters of a number: the longest float has 309 before its point
MOST_FILES = 20  # that extend one another

Origins = Dict[str, str]  # key with dots -> the file or option that it came from

_TAG = "tag:yaml.org,2002:"
_KINDS = ("null", "bool", "int", "float", "str", "seq", "map", "merge")


class _Refused(yaml.MarkedYAMLError):
    """Valid YAML that is not taken; the problem says why."""


class _Loader(yaml.SafeLoader):
    """YAML 1.2 as people mean it: 1e-3 is a number, no and 2026-01-01 are text, 010 is ten, a key stands once."""

    def __init__(self, text: str, level: int) -> None:
        super().__init__(text)
        self._level, self._deepest = level, level  # where the composer is, and the deepest level it has seen below
        self._values = 0
        self._known: Dict[int, Tuple[int, int]] = {}  # id of a finished node -> values in it, levels below it

    def compose_node(self, parent: Any, index: Any) -> Any:
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        if self.check_event(yaml.AliasEvent):  # type: ignore[no-untyped-call]
            node = super().compose_node(parent, index)  # type: ignore[no-untyped-call]
            if id(node) not in self._known:
                raise _Refused(
                    problem=f"*{show(event.anchor)} stands within what it names", problem_mark=event.start_mark
                )
            values, below = self._known[id(node)]
            self._count(values, self._level + 1 + below, event)
            return node
        values, deepest = self._values, self._deepest
        self._level += 1
        self._deepest = self._level
        self._count(1, self._level, event)
        node = super().compose_node(parent, index)  # type: ignore[no-untyped-call]
        self._known[id(node)] = self._values - values, self._deepest - self._level
        self._level, self._deepest = self._level - 1, max(deepest, self._deepest)
        return node

    def _count(self, values: int, level: int, event: Any) -> None:
        self._values, self._deepest = self._values + values, max(self._deepest, level)
        why = None
        if self._deepest > MOST_LEVELS:
            why = f"nested deeper than {MOST_LEVELS} levels"
        elif self._values > MOST_VALUES:
            why = f"more than {MOST_VALUES} values, those counted again that aliases repeat"
        if why:
            raise _Refused(problem=f"{why}: no config needs that", problem_mark=event.start_mark)


class _Dumper(yaml.SafeDumper):
    """Quotes all text that a reader of YAML 1.1 or 1.2 would take for something else."""


_SCALARS = {
    "bool": (r"true|True|TRUE|false|False|FALSE", "tTfF"),
    "int": (r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789"),
    "float": (
        r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        "-+.0123456789",
    ),
    "null": (r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    "merge": (r"<<", "<"),
}
_FORMS = {name: re.compile(rf"^(?:{pattern})\Z") for name, (pattern, _) in _SCALARS.items()}
_Loader.yaml_implicit_resolvers = {}
for _name, (_, _first) in _SCALARS.items():
    for _reader_or_writer in (_Loader, _Dumper):
        _reader_or_writer.add_implicit_resolver(f"{_TAG}{_name}", _FORMS[_name], list(_first))


def _text(loader: _Loader, node: yaml.ScalarNode) -> str:
    text = str(loader.construct_scalar(node))
    if any("\ud800" <= c <= "\udfff" for c in text):  # by an escape such as "\ud800"
        raise _Refused(problem=f"{show(text)}: holds half a character", problem_mark=node.start_mark)
    return text


def _number(loader: _Loader, node: yaml.ScalarNode, kind: str) -> str:
    text = _of_form(loader, node, kind)
    if len(text) > MOST_DIGITS:
        raise _Refused(problem=f"{show(text)}: longer than any number meant", problem_mark=node.start_mark)
    return text


def _of_form(loader: _Loader, node: yaml.ScalarNode, kind: str) -> str:
    """The text of a scalar that has a tag, written or implied, and so must have its form."""
    text = _text(loader, node)
    if not _FORMS[kind].match(text):
        raise _Refused(problem=f"!!{kind} {show(text)}: is no {kind}", problem_mark=node.start_mark)
    return text


def _int(loader: _Loader, node: yaml.ScalarNode) -> int:
    text = _number(loader, node, "int")
    return int(text, 0) if text[:2] in ("0o", "0x") else int(text)


def _float(loader: _Loader, node: yaml.ScalarNode) -> float:
    text = _number(loader, node, "float").lower()
    return float(text.replace(".inf", "inf").replace(".nan", "nan"))


def _bool(loader: _Loader, node: yaml.ScalarNode) -> bool:
    return _of_form(loader, node, "bool").lower() == "true"


def _null(loader: _Loader, node: yaml.ScalarNode) -> None:
    _of_form(loader, node, "null")


def _mapping(loader: _Loader, node: yaml.MappingNode) -> Dict[Any, Any]:
    """A mapping in which each key stands once; what `<<` brings may be said again."""
    if not isinstance(node, yaml.MappingNode):
        raise _Refused(problem="!!map: must be a mapping of keys to values", problem_mark=node.start_mark)
    seen = set()
    for key_node in [key for key, _ in node.value if key.tag != f"{_TAG}merge"]:
        key = loader.construct_object(key_node, deep=True)
        mark = key_node.start_mark
        if not isinstance(key, (str, int, float, type(None))):
            raise _Refused(problem=f"{show(key)}: a key must be text", problem_mark=mark)
        if key in seen:
            raise _Refused(problem=f"{show(key)}: the key stands twice", problem_mark=mark)
        seen.add(key)
    return loader.construct_mapping(node)


def _foreign(loader: _Loader, node: yaml.Node) -> Any:
    tag = f"!!{node.tag[len(_TAG) :]}" if node.tag.startswith(_TAG) else node.tag
    allowed = ", ".join(f"!!{kind}" for kind in _KINDS[:-1])
    raise _Refused(problem=f"{show(tag)}: unknown tag, allowed are {allowed}", problem_mark=node.start_mark)


_Loader.yaml_constructors = {
    None: _foreign,
    f"{_TAG}null": _null,
    f"{_TAG}bool": _bool,
    f"{_TAG}int": _int,
    f"{_TAG}float": _float,
    f"{_TAG}str": _text,
    f"{_TAG}seq": yaml.SafeLoader.construct_yaml_seq,
    f"{_TAG}map": _mapping,
}


def parse_yaml(text: str, place: str, level: int = 0) -> Any:
    """The one document in `text`, plain data. `place` names it in faults, `level`: how deep it will stand. Raises BadInput."""
    try:
        loader = _Loader(text, level)
        return loader.get_single_data()  # type: ignore[no-untyped-call]
    except yaml.reader.ReaderError as error:
        line = f" line {text.count(chr(10), 0, error.position) + 1}:"
        raise BadInput(f"{place}:{line} holds {show(repr(chr(error.character)))}, which no YAML may") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" line {mark.line + 1}:" if mark else ""
        said = getattr(error, "problem", None) or str(error)
        why = said if isinstance(error, _Refused) else f"is no valid YAML: {said}"
        raise BadInput(f"{place}:{line} {why}") from None
    except (ValueError, OverflowError) as error:  # the escape "\UFFFFFFFF" names no character
        raise BadInput(f"{place}: is no valid YAML: {error}") from None


def dump_yaml(value: Any) -> str:
    """Plain data as YAML that reads as the same."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False)


def read_with_origins(path: Path, origins: Origins) -> Dict[str, Any]:
    """The keys of the file at `path`, on top of those of the file that its `extends` names; `origins` is filled in."""
    chain: List[Path] = []  # `path` and what it extends, in order
    raws: List[Dict[str, Any]] = []
    target: Optional[Path] = path
    while target is not None:
        raw = parse_yaml(_content(target), str(target))
        if not isinstance(raw, dict):
            raise BadInput(f"{target}: must be a mapping of keys to values, as in configs/mlp_digits.yaml")
        chain.append(target)
        raws.append(raw)
        target = _extended(raw.pop("extends"), chain) if "extends" in raw else None
    merged: Dict[str, Any] = {}
    for file, raw in zip(reversed(chain), reversed(raws)):
        note_origin(raw, "", str(file), origins)
        merged = merge_keys(merged, raw)
    return merged


def read_yaml(path: Path) -> Dict[str, Any]:
    """As `read_file`, where nobody asks where a key came from."""
    return read_with_origins(path, {})


def _extended(name: Any, chain: List[Path]) -> Path:
    """The file that the last of `chain` extends."""
    path = chain[-1]
    place = f"{path}: extends: {show(name)}"
    if not isinstance(name, str) or not name:
        raise BadInput(f"{place}: must be a file name")
    target = path.parent / name
    try:
        circle = any(os.path.samefile(target, other) for other in chain)
        is_file = target.is_file()
    except FileNotFoundError:
        raise BadInput(f"{place}: no such file beside {path.name}") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL within
        raise BadInput(f"{place}: {_reason(error)}") from None
    if circle:
        raise BadInput(f"{place}: the files extend one another in a circle")
    if not is_file:
        raise BadInput(f"{place}: is no file")
    if len(chain) >= MOST_FILES:
        raise BadInput(f"{place}: more than {MOST_FILES} files extend one another")
    return target


def _content(path: Path) -> str:
    """A file's text. A pipe or a device is refused unread: it may never end, or never begin."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            kind = os.fstat(handle).st_mode
            if not stat.S_ISREG(kind):
                what = "a folder" if stat.S_ISDIR(kind) else "a pipe or device"
                raise BadInput(f"{path}: is {what}, must be a file")
            with open(handle, "rb", closefd=False) as file:
                content = file.read(MOST_BYTES + 1)
        finally:
            os.close(handle)
    except FileNotFoundError:
        raise BadInput(f"{path}: no such config file") from None
    except PermissionError:
        raise BadInput(f"{path}: no permission to read it") from None
    except BadInput:
        raise
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise BadInput(f"{path}: cannot be read: {_reason(error)}") from None
    if len(content) > MOST_BYTES:
        raise BadInput(f"{path}: larger than {MOST_BYTES // 1024} KiB: no config is")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise BadInput(
            f"{path}: line {line}: byte 0x{content[error.start]:02x} is no UTF-8: save the file as UTF-8"
        ) from None


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


def note_origin(value: Any, key: str, origin: str, origins: Origins) -> None:
    """Write down that `value`, with all in it, came from `origin`."""
    origins[key] = origin
    if isinstance(value, dict):
        for name, item in value.items():
            note_origin(item, f"{key}.{name}" if key else str(name), origin, origins)


def merge_keys(base: Dict[str, Any], over: Dict[str, Any]) -> Dict[str, Any]:
    """`over` on top of `base`: mappings are joined, all else is replaced."""
    merged = dict(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = merge_keys(merged[key], value) if both else value
    return merged


def apply_override(raw: Dict[str, Any], text: str, origins: Origins) -> None:
    """Change `raw` by `text`, KEY=VALUE, the value being YAML. Raises BadInput."""
    key, equals, value = text.partition("=")
    names = key.split(".")
    if not equals or not all(names):
        raise BadInput(f"--set: {show(text)}: must be KEY=VALUE, such as optimizer.lr=0.1")
    place = f"--set {show(text)}"
    if len(names) > MOST_LEVELS:
        raise BadInput(f"{place}: nested deeper than {MOST_LEVELS} levels: no config needs that")
    parsed = parse_yaml(value, place, level=len(names))
    section, (*path, last) = raw, names
    for depth, name in enumerate(path, 1):
        held = section.get(name)
        section[name] = dict(held) if isinstance(held, dict) else {}  # a copy: aliases give several keys one mapping
        if not isinstance(held, dict):
            origins[".".join(names[:depth])] = place
        section = section[name]
    replaces = isinstance(parsed, dict) and isinstance(section.get(last), dict) and parsed
    section[last] = merge_keys(section[last], parsed) if replaces else parsed
    note_origin(parsed, key, place, origins)
