"""Refusals as records, and the two languages in which a border says them: the arguments of
`Pipeline`, and a config's keys.

    Refusal("clip", "global", f"... is not known: use {Argument('clip', (0.7, 'stage'))}")

    Pipeline    clip: global: ... is not known: use clip=(0.7, "stage")
    a config    clip.scope: global: ... is not known: use clip: {scope: stage, norm: 0.7}

`BadInput` keeps its lines in both languages, and says a config's until it leaves a `Pipeline`.
"""

from __future__ import annotations

import enum
import json
import re
from typing import Any, Mapping, NamedTuple

from ipu_pipe.text import show

# Rare and printable signs around the words that differ, so that they are found in any sentence.
BEGIN = "\u27e6"
BETWEEN = "\u2980"
END = "\u27e7"
# the one table between keys of a config, or their sections, and arguments
ARGUMENTS = {
    "backend.name": "backend",
    "backend.device": "device",
    "backend.deadline": "deadline",
    # after its keys, because the first name that fits is taken
    "backend": "backend_args",
    "gradient_accumulation": "microbatches",
    "method_args.warmup": "warmup",
    "log.trace": "trace",
    "optimizer.name": "optimizer",
    "clip.norm": "clip",
    "clip.scope": "clip",
    "ema.decay": "ema",
}
# the last of two keys counts: an argument `clip` is refused as clip.scope
KEYS = {argument: key for key, argument in ARGUMENTS.items()}


class Language(enum.Enum):
    """Who reads a line: the caller of `Pipeline`, or the writer of a config."""

    # replacements of re.sub: the group of the words that are left
    PYTHON = r"\1"
    CONFIG = r"\2"

    def say(self, line: str) -> str:
        """Return a line in this language."""
        return re.sub(f"{BEGIN}(.*?){BETWEEN}(.*?){END}", self.value, line)


class Words(NamedTuple):
    """Words in the sentence of a refusal that a `Language` chooses from."""

    python: str
    config: str

    def __str__(self) -> str:
        is_same = self.python == self.config
        return self.config if is_same else f"{BEGIN}{self.python}{BETWEEN}{self.config}{END}"


# values in both languages
NONE = Words("None", "null")
TRUE = Words("True", "true")
FALSE = Words("False", "false")


class Argument(NamedTuple):
    """An argument of `Pipeline` in the sentence of a refusal, with its value if a remedy sets it.

    `argument`: with dots for a part of it, such as backend_args.program. `value`: Python literals.
    """

    argument: str
    value: Any = None

    def __str__(self) -> str:
        key = _rename(self.argument, KEYS)
        if self.value is None:
            words = Words(self.argument, key)
        # a pair in Python, a section of two keys in a config
        elif self.argument == "clip":
            norm, scope = self.value
            section = f"clip: {{scope: {scope}, norm: {norm:g}}}"
            words = Words(f'clip=({norm:g}, "{scope}")', section)
        else:
            literal = repr(self.value).replace("'", '"')
            words = Words(f"{self.argument}={literal}", f"{key}: {_write_yaml(self.value)}")
        return str(words)


# the backend that runs whatever another one cannot; the batches, and a model's own loss
EMULATOR = Argument("backend", "emulator")
BATCH = Words("batch", "data")
OWN_LOSS = Words("loss=None", "loss: model")


class Refusal(NamedTuple):
    """Why an argument is refused: its name, its value, and the reason with the remedy."""

    argument: str
    value: Any
    reason: str

    def __str__(self) -> str:
        return f"{Argument(self.argument)}: {show_value(self.value)}: {self.reason}"


def name_key(key: str) -> str:
    """Return a key of a config that a refusal names, an argument to Python's callers."""
    return str(Words(_rename(key, ARGUMENTS), key))


def show_value(value: Any) -> str:
    """Return a refused value as each language writes it."""
    return str(Words(show(value), show_in_config(value)))


def show_in_config(value: Any) -> str:
    """Return a value as a config file has it."""
    return _write_yaml(value) if value is None or isinstance(value, bool) else show(value)


def _write_yaml(value: Any) -> str:
    # YAML contains JSON, and its short texts need no quotes
    return json.dumps(value).replace('"', "")


def _rename(name: str, names: Mapping[str, str]) -> str:
    """Return a name with the first of the `names` that it is, or is a part of, replaced."""
    for old, new in names.items():
        if name == old or name.startswith(f"{old}."):
            return new + name[len(old) :]
    return name
