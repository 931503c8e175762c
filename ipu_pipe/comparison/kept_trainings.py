"""The folder of a comparison, from which another call continues after an interruption.

comparison.json                          the loop, the stages and their times
trainings/gpipe-x0.3-seed1.json          one training, written in one step
"""

from __future__ import annotations

import contextlib
import dis
import functools
import hashlib
import inspect
import json
import re
import types
from dataclasses import asdict
from itertools import islice
from pathlib import Path, PurePath
from typing import Any, Callable, Iterator
from urllib.parse import quote

import torch

from ipu_pipe.comparison.recording import LoopFunction
from ipu_pipe.comparison.stage_times import Reference, StageTimes
from ipu_pipe.comparison.trainings import MethodRow, Training
from ipu_pipe.errors import BadInput, guard_writing
from ipu_pipe.files import parse_path, read_file, write_text
from ipu_pipe.hardware.description import read_hardware
from ipu_pipe.store.folder import LOCK, lock_folder
from ipu_pipe.text import show

RECORD = "comparison.json"
# the second in the body of a class inside a function
GLOBAL_READS = ("LOAD_GLOBAL", "LOAD_NAME")


class KeptTrainings:
    """The trainings in a folder; None: nothing is kept.

    Raise `BadInput` if the folder holds something else, or a comparison with another `key`.
    """

    def __init__(self, folder: Path | None, key: dict[str, Any], stage_times: StageTimes) -> None:
        self._folder = folder
        self._key = key
        self._stage_times = stage_times
        if folder is None:
            return
        if (folder / RECORD).exists():
            with _name_damage(folder / RECORD):
                self._load_times(_read(folder / RECORD))
        # the lock is there already: the folder is locked before it is looked at
        elif any(path.name != LOCK for path in folder.iterdir()):
            why = f"has files and no {RECORD}: must be new, empty, or the folder of a comparison"
            raise BadInput(f"out: {folder}: {why}")

    def _load_times(self, record: Any) -> None:
        for name, value in self._key.items():
            if record[name] != value:
                why = f"{name}: is another one than that of the comparison which is kept there"
                if name == "loop":
                    before = str(record[name]).splitlines()
                    new = (line.strip() for line in value.splitlines() if line not in before)
                    why += "".join(f", as it has the line {show(line)}" for line in islice(new, 1))
                raise BadInput(f"out: {self._folder}: {why}: choose another folder")
        if record["times"] is not None:
            # times of another version have other fields, which is a TypeError
            self._stage_times.reference = Reference(**record["times"])

    def read(self, row: MethodRow, rate: float, seed: int) -> Training | None:
        """Return a training that is kept, or None. Raise `BadInput` if the method had other
        arguments.
        """
        if self._folder is None or not self._name_file(row, rate, seed).exists():
            return None
        file = self._name_file(row, rate, seed)
        with _name_damage(file):
            record = _read(file)
            # the caller may have given the label to another method since
            if record["arguments"] != convert_to_json(row.arguments):
                why = f"{row.label} had other arguments: use another label or folder"
                raise BadInput(f"out: {file}: {why}")
            return Training(**record["training"])

    def write(self, row: MethodRow, rate: float, seed: int, training: Training) -> None:
        """Keep a training, and the stage times, which the first one has measured."""
        if self._folder is None:
            return
        file = self._name_file(row, rate, seed)
        # only now: a comparison that is refused at once leaves no folder
        with guard_writing(file.parent):
            file.parent.mkdir(exist_ok=True)
        # the times first: a training without them could not be compared with the others
        record = {**self._key, "times": self._stage_times.export()}
        write_text(self._folder / RECORD, json.dumps(record))
        # NaN stays: the loss of a training that was let go on
        record = {"arguments": row.arguments, "training": asdict(training)}
        write_text(file, json.dumps(record, default=_describe))

    def _name_file(self, row: MethodRow, rate: float, seed: int) -> Path:
        assert self._folder is not None
        # a label is free text and may hold a slash
        name = quote(row.label, safe="")
        # repr has all digits, so that no two rates share a file
        return self._folder / "trainings" / f"{name}-x{rate!r}-seed{seed}.json"


@contextlib.contextmanager
def open_kept(
    out: str | Path | None,
    run: LoopFunction,
    stages: Any,
    stage_times: StageTimes,
    say: Callable[[str], None],
) -> Iterator[KeptTrainings]:
    """Give the trainings that are kept in the folder `out`, locked against other calls; say how to
    continue after an interruption.
    """
    loop = describe_loop(run)
    if out is not None and not loop:
        raise BadInput(
            "out: run has no source here, by which a change of it would be noticed: must be None, or run a function of a file"
        )
    hardware = None
    if stage_times.hardware is not None:
        hardware = read_hardware(stage_times.hardware, "hardware")
    key = {"loop": loop, "stages": stages, "hardware": hardware}
    # a record comes back with lists for tuples, and must compare equal
    key = convert_to_json(key)
    if out is None:
        yield KeptTrainings(None, key, stage_times)
        return
    folder = parse_path(out, "out")
    with lock_folder(folder, say):
        try:
            yield KeptTrainings(folder, key, stage_times)
        except KeyboardInterrupt:
            say(f"compare: interrupted; the same call continues with the trainings in {folder}")
            raise


def describe_loop(run: Any) -> str:
    """Return the text by which a changed loop is noticed: its source, that of the functions and
    classes of its file that it uses, and the plain values that all of these read, a line each. ""
    if no source can be read.
    """
    source = getattr(run, "source", None)
    if source is not None:
        return str(source)
    module = getattr(_unwrap(run), "__module__", "")
    sources: set[tuple[str, str]] = set()
    lines: list[str] = []
    seen: set[int] = set()
    named_values: list[tuple[str, Any]] = [("", run)]
    while named_values:
        name, value = named_values.pop()
        if _is_plain(value):
            lines.append(f"{name} = {_format_plain(value)}")
            continue
        # objects may refer to one another in a circle
        if id(value) in seen:
            continue
        seen.add(id(value))
        if inspect.isfunction(value) or inspect.isclass(value):
            # code of other files is not followed, which would lead through all of torch
            if value.__module__ != module:
                continue
            name = value.__qualname__
            # what was typed at a prompt has no source
            with contextlib.suppress(OSError, TypeError):
                sources.add((name, inspect.getsource(value)))
        named_values += _list_read(name, value, module)
    # sorted, because a new order of definitions in the file is no change of the loop
    texts = [text for _, text in sorted(sources)]
    return "\n".join([*texts, *sorted(lines)]) if texts else ""


def _unwrap(run: Any) -> Any:
    while isinstance(run, functools.partial):
        run = run.func
    return run


def _is_plain(value: Any) -> bool:
    """Return whether a value is a number, a text or the like, or a collection of such."""
    if isinstance(value, dict):
        return all(map(_is_scalar, [*value, *value.values()]))
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(map(_is_scalar, value))
    return _is_scalar(value)


def _is_scalar(value: Any) -> bool:
    kinds = (bool, int, float, complex, str, bytes, PurePath, torch.dtype, torch.device)
    return value is None or isinstance(value, kinds)


def _format_plain(value: Any) -> str:
    """Return a line for a plain value, which is the same in another process."""
    # the order of a set of texts differs from process to process
    text = repr(sorted(value, key=repr) if isinstance(value, (set, frozenset)) else value)
    # a list may be a whole data set
    return text if len(text) < 200 else f"sha256 {hashlib.sha256(text.encode()).hexdigest()}"


def _list_read(name: str, value: Any, module: str) -> list[tuple[str, Any]]:
    """List what a value of the file `module` leads to, under names that start with its own."""
    if isinstance(value, functools.partial):
        arguments: dict[Any, Any] = {**dict(enumerate(value.args)), **value.keywords}
        return [(name, value.func), *((f"{name}({key})", arguments[key]) for key in arguments)]
    if inspect.ismethod(value):
        return [(name, value.__func__), (name, value.__self__)]
    if isinstance(value, (staticmethod, classmethod)):
        return [(name, value.__func__)]
    if isinstance(value, property):
        return [(name, value.fget)]
    if inspect.isfunction(value):
        return [(f"{name}: {key}", one) for key, one in _list_used(value)]
    if inspect.isclass(value):
        # Python's own attributes, such as the number of the first line, are no values of the loop
        is_values = {
            key: not key.startswith("__") or inspect.isfunction(one)
            for key, one in vars(value).items()
        }
        members = [(f"{name}.{key}", one) for key, one in vars(value).items() if is_values[key]]
        return [*((name, base) for base in value.__bases__), *members]
    if isinstance(value, dict):
        return [(name, type(value)), *((f"{name}[{_describe(key)}]", value[key]) for key in value)]
    if isinstance(value, (list, tuple)):
        return [(name, type(value)), *((f"{name}[{i}]", one) for i, one in enumerate(value))]
    if type(value).__module__ == module:
        attributes = getattr(value, "__dict__", {})
        return [(name, type(value)), *((f"{name}.{key}", attributes[key]) for key in attributes)]
    return []


def _list_used(function: types.FunctionType) -> list[tuple[str, Any]]:
    """List what a function reads outside of itself: globals, the values of an enclosing function,
    and the defaults of its parameters.
    """
    names = dict.fromkeys(_list_names(function.__code__))
    values = {name: function.__globals__[name] for name in names if name in function.__globals__}
    enclosed = inspect.getclosurevars(function).nonlocals
    defaults = {"defaults": function.__defaults__, "keyword defaults": function.__kwdefaults__}
    return [*values.items(), *enclosed.items(), *(item for item in defaults.items() if item[1])]


def _list_names(code: types.CodeType) -> list[str]:
    """List the global names that a function and those inside it read."""
    read = [one.argval for one in dis.get_instructions(code) if one.opname in GLOBAL_READS]
    # lambdas, inner functions and (before Python 3.12) comprehensions have code objects of their
    # own
    inner = [part for part in code.co_consts if isinstance(part, types.CodeType)]
    return [*read, *(name for part in inner for name in _list_names(part))]


def convert_to_json(value: Any) -> Any:
    """Return a value as JSON gives it back."""
    return json.loads(json.dumps(value, default=_describe))


def _describe(value: Any) -> str:
    """Return a text of an object that is the same in another process."""
    if inspect.isfunction(value) or inspect.isclass(value):
        return f"{value.__module__}.{value.__qualname__}"
    # an address differs from process to process
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def _read(file: Path) -> Any:
    try:
        return json.loads(read_file(file))
    except (OSError, ValueError) as error:
        raise BadInput(f"out: {file}: cannot be read: {error}") from error


@contextlib.contextmanager
def _name_damage(file: Path) -> Iterator[None]:
    """Raise `BadInput` for a record that lacks keys, or has others."""
    try:
        yield
    except (KeyError, TypeError) as error:
        raise BadInput(f"out: {file}: is no record of this version: {error}") from error
