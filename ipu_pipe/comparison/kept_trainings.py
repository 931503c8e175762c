"""The folder of a comparison, from which another call continues after an interruption.

comparison.json                          the loop, the stages and their times
trainings/gpipe-x0.3-seed1.json          one training, written in one step
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import re
import types
from dataclasses import asdict
from pathlib import Path
from typing import Any, Callable, Iterator
from urllib.parse import quote

from ipu_pipe.comparison.recording import LoopFunction
from ipu_pipe.comparison.stage_times import Reference, StageTimes
from ipu_pipe.comparison.trainings import MethodRow, Training
from ipu_pipe.errors import BadInput, guard_writing
from ipu_pipe.files import parse_path, read_file, write_text
from ipu_pipe.hardware.description import read_hardware
from ipu_pipe.store.folder import LOCK, lock_folder

RECORD = "comparison.json"


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
    classes of its file that it uses, and the plain values that it was made with. "" if no source
    can be read.
    """
    source = getattr(run, "source", None)
    if source is not None:
        return str(source)
    texts: dict[str, str] = {}
    values: list[str] = []
    seen: set[int] = set()
    parts: list[Any] = [run]
    module = getattr(_unwrap(run), "__module__", "")
    while parts:
        part = parts.pop()
        if isinstance(part, functools.partial):
            parts += [part.func, *part.args, *part.keywords.values()]
        elif inspect.ismethod(part):
            parts += [part.__func__, part.__self__]
        elif inspect.isfunction(part) or inspect.isclass(part):
            name = part.__qualname__
            # code of other files is not followed, which would lead through all of torch
            if part.__module__ != module or name in texts:
                continue
            # what was typed at a prompt has no source
            with contextlib.suppress(OSError, TypeError):
                texts[name] = inspect.getsource(part)
            parts += part.__bases__ if inspect.isclass(part) else []
            for function in vars(part).values() if inspect.isclass(part) else [part]:
                parts += _list_used(function) if inspect.isfunction(function) else []
        elif isinstance(part, (bool, int, float, str)):
            values.append(repr(part))
        # objects may refer to one another in a circle
        elif type(part).__module__ == module and id(part) not in seen:
            seen.add(id(part))
            parts += [type(part), *getattr(part, "__dict__", {}).values()]
    # sorted, because a new order of definitions in the file is no change of the loop
    return "\n".join([*(texts[name] for name in sorted(texts)), *sorted(values)]) if texts else ""


def _unwrap(run: Any) -> Any:
    while isinstance(run, functools.partial):
        run = run.func
    return run


def _list_used(function: types.FunctionType) -> list[Any]:
    """List what a function reads outside of itself: functions and classes by global names, and the
    values of an enclosing function.
    """
    values = map(function.__globals__.get, _list_names(function.__code__))
    codes = [value for value in values if inspect.isfunction(value) or inspect.isclass(value)]
    return [*codes, *inspect.getclosurevars(function).nonlocals.values()]


def _list_names(code: types.CodeType) -> list[str]:
    """List the names that a function and those inside it read outside of themselves."""
    # lambdas, inner functions and (before Python 3.12) comprehensions have code objects of their
    # own
    inner = [part for part in code.co_consts if isinstance(part, types.CodeType)]
    return [*code.co_names, *(name for part in inner for name in _list_names(part))]


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
