"""How a value or a line of unknown length and content is shown in a fault: on one line, cut, control characters escaped."""

from __future__ import annotations

import difflib
from typing import Any, Iterable, Sequence

MOST_OF_A_VALUE = 160  # characters
MOST_OF_A_LINE = 2000


def show(value: Any) -> str:
    """A value as Python says it, cut after `MOST_OF_A_VALUE` characters with how many there are."""
    try:
        text = str(value)
    except Exception as error:  # numbers of too many digits, objects of the user's own
        text = f"({type(value).__name__} that cannot be shown: {type(error).__name__})"
    return _cut(escape(text), MOST_OF_A_VALUE)


def describe_kind(value: Any) -> str:
    """A number or None as it is; of anything else what it is."""
    if value is None or isinstance(value, (bool, int, float)):
        return show(value)
    if isinstance(value, type):
        return f"the class {value.__name__}"
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def fold_lines(text: str) -> str:
    """A fault as one line: white space folded, the rest as in `shown`, cut after `MOST_OF_A_LINE` characters."""
    return _cut(escape(" ".join(text.split())), MOST_OF_A_LINE)


def escape(text: str) -> str:
    """`text` with what a terminal obeys, breaks the line at or cannot print written as Python writes it, such as \\x1b."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def escape_lines(text: str) -> str:
    """Return text of several lines for a terminal, each line as `escaped` makes it."""
    return "\n".join(map(escape, text.split("\n")))


# What others call what has another name here; of what is not here (interleaved, zero-bubble) the nearest.
ALSO_CALLED = {
    "1f1b": "pipedream_flush", "dapple": "pipedream_flush", "2bw": "pipedream_2bw", "pb": "pipelined_backprop",
    "localsgd": "local_sgd", "rpd": "randomized_pipedream", "bf16": "bfloat16",
    **dict.fromkeys(("float16", "fp16", "half", "mixed", "amp", "autocast", "bf16_mixed", "16_mixed"), "bfloat16_mixed"),
    "fp32": "float32", "single": "float32",
    "fp64": "float64", "double": "float64",
    "accumulation_steps": "gradient_accumulation", "grad_accum": "gradient_accumulation", "max_steps": "steps",
    "learning_rate": "lr", "gpu": "cuda",
    "interleaved": "pipedream_flush", "interleaved_1f1b": "pipedream_flush", "zero_bubble": "pipedream_flush",
    "zb_h1": "pipedream_flush", "dualpipe": "pipedream_flush", "schedulegpipe": "gpipe", "schedule1f1b": "pipedream_flush",
    "gloo": "distributed", "nccl": "distributed", "torchrun": "distributed",
    "processes": "distributed", "ipu": "poptorch", "cosineannealinglr": "cosine", "multisteplr": "step", "steplr": "step",
}  # fmt: skip


def find_alias(name: Any, known: Iterable[str]) -> str:
    """Which of `known` others call so; "" if none."""
    here = ALSO_CALLED.get(show(name).lower().replace("-", "_"), "")
    return here if here in known else ""


def find_nearest(name: Any, known: Iterable[Any], most: int = 1, alike: float = 0.6) -> str:
    """Which of `known` names may have been meant, the likeliest first, with commas; "" if none is `alike` (0 to 1) enough."""
    names = [str(each) for each in known]
    return find_alias(name, names) or ", ".join(difflib.get_close_matches(show(name), names, most, alike))


def list_some(names: Sequence[Any], most: int = 4) -> str:
    """The first `most` of `names`, with commas, and how many more there are."""
    return ", ".join(map(str, names[:most])) + (f" and {len(names) - most} more" if len(names) > most else "")


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]}... ({len(text)} characters)"


def format_bytes(size: float) -> str:
    """A number of bytes in words, in the decimal units of datasheets: 14.7 GB."""
    for power, unit in ((12, "TB"), (9, "GB"), (6, "MB"), (3, "kB")):
        if size >= 10**power:
            return f"{size / 10**power:.3g} {unit}"
    return f"{size:.0f} bytes"
