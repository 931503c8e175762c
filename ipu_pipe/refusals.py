"""Refusals as records, and the two languages in which a border says them: the arguments of
`Pipeline`, and a config's keys.

    Refusal("clip", "global", f"... is not known: use {Argument('clip', (0.7, 'stage'))}")

    Pipeline    clip: global: ... is not known: use clip=(0.7, "stage")
    a config    clip.scope: global: ... is not known: use clip: {scope: stage, norm: 0.7}
"""

from __future__ import annotations

import ast
import re
from typing import Any, Callable, Mapping, NamedTuple

from ipu_pipe.text import show

# Rare brackets, so that a setting inside a sentence is found whatever surrounds it. They are
# printable, because control characters are escaped where a line is folded.
BEGIN = "\u27e6"
END = "\u27e7"


class Argument(NamedTuple):
    """An argument of `Pipeline` in the sentence of a refusal, with its value if a remedy sets it.

    Its text is a mark that waits for a `Language`. `value`: None, or Python literals.
    """

    argument: str
    value: Any = None

    def __str__(self) -> str:
        return f"{BEGIN}{self.argument}={self.value!r}{END}"

    def __format__(self, spec: str) -> str:
        return str(self)


class Refusal(NamedTuple):
    """Why an argument is refused: its name, its value, and the reason with the remedy."""

    argument: str
    value: Any
    reason: str

    def __str__(self) -> str:
        value = self.value if isinstance(self.value, str) else show(self.value)
        return f"{Argument(self.argument)}: {value}: {self.reason}"


class Language(NamedTuple):
    """How settings are named and set.

    `names`: the names that differ from the arguments; `assign(argument, value)`: a line to paste.
    """

    names: Mapping[str, str]
    assign: Callable[[str, Any], str]

    def say(self, line: str) -> str:
        """Return a line with its settings in this language."""
        return re.sub(f"{BEGIN}([^{END}=]*)=([^{END}]*){END}", self._say_setting, line)

    def _say_setting(self, mark: re.Match[str]) -> str:
        argument = mark[1]
        value = ast.literal_eval(mark[2])
        if value is None:
            return self.names.get(argument, argument)
        return self.assign(argument, value)


def _assign_in_python(argument: str, value: Any) -> str:
    if argument == "clip":
        return f'clip=({value[0]:g}, "{value[1]}")'
    return f'{argument}="{value}"' if isinstance(value, str) else f"{argument}={value!r}"


def _assign_in_config(argument: str, value: Any) -> str:
    if argument == "clip":
        return f"clip: {{scope: {value[1]}, norm: {value[0]:g}}}"
    shown = value if isinstance(value, str) else show(value)
    return f"{CONFIG.names.get(argument, argument)}: {shown}"


PYTHON = Language({}, _assign_in_python)
# the one table between arguments and keys
CONFIG = Language(
    {
        "clip": "clip.scope",
        "backend": "backend.name",
        "device": "backend.device",
        "deadline": "backend.deadline",
        "microbatches": "gradient_accumulation",
        "warmup": "method_args.warmup",
        "backend_args": "backend",
    },
    _assign_in_config,
)
