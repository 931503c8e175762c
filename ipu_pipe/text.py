"""Format values and texts of unknown length and content on one line: shortened, with control characters escaped."""

from __future__ import annotations

import difflib
from typing import Any, Iterable, Sequence

# characters
MOST_OF_A_VALUE = 160
MOST_OF_A_LINE = 2000


def show(value: Any) -> str:
    """Return a value as text on one line, cut after `MOST_OF_A_VALUE` characters."""
    try:
        text = str(value)
    # numbers with too many digits, or objects of the user's own
    except Exception as error:
        text = f"({type(value).__name__} that cannot be shown: {type(error).__name__})"
    return _cut(escape(text), MOST_OF_A_VALUE)


def describe_kind(value: Any) -> str:
    """Return a number or None as text, and of any other value its type: a Tensor, the class Linear."""
    if value is None or isinstance(value, (bool, int, float)):
        return show(value)
    if isinstance(value, type):
        return f"the class {value.__name__}"
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def fold_lines(text: str) -> str:
    """Return text as one printable line, cut after `MOST_OF_A_LINE` characters."""
    return _cut(escape(" ".join(text.split())), MOST_OF_A_LINE)


def escape(text: str) -> str:
    """Return text with all that a terminal obeys, breaks the line at or cannot print as Python writes it, such as \\x1b."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def escape_lines(text: str) -> str:
    """Return text of several lines for a terminal, with each line escaped."""
    return "\n".join(map(escape, text.split("\n")))


# Words of other libraries for names of ours.
ALSO_CALLED = {
    "1f1b": "pipedream_flush", "dapple": "pipedream_flush", "2bw": "pipedream_2bw", "pb": "pipelined_backprop",
    "localsgd": "local_sgd", "rpd": "randomized_pipedream", "bf16": "bfloat16",
    **dict.fromkeys(("float16", "fp16", "half", "mixed", "amp", "autocast", "bf16_mixed", "16_mixed"), "bfloat16_mixed"),
    "fp32": "float32", "single": "float32",
    "fp64": "float64", "double": "float64",
    "accumulation_steps": "gradient_accumulation", "grad_accum": "gradient_accumulation", "max_steps": "steps",
    "learning_rate": "lr", "gpu": "cuda",
    "interleaved": "interleaved_1f1b", "zero_bubble": "zb_h1", "zb1p": "zb_h1", "zb2p": "zb_h2", "dualpipe": "dualpipe_v",
    "dualpipev": "dualpipe_v", "zbvzerobubble": "zbv", "schedulegpipe": "gpipe", "schedule1f1b": "pipedream_flush",
    "gloo": "distributed", "nccl": "distributed", "torchrun": "distributed",
    "processes": "distributed", "ipu": "poptorch", "cosineannealinglr": "cosine", "multisteplr": "step", "steplr": "step",
}  # fmt: skip


def find_alias(name: Any, known: Iterable[str]) -> str:
    """Return which of the `known` names another library calls `name`; "" if none."""
    alias = ALSO_CALLED.get(show(name).lower().replace("-", "_"), "")
    return alias if alias in known else ""


def find_nearest(name: Any, known: Iterable[Any], count: int = 1, cutoff: float = 0.6) -> str:
    """Return at most `count` known names that may have been meant, the likeliest first, separated by commas.

    A name counts from the similarity `cutoff` on, as in difflib; "" if there is none. An alias (`find_alias`) counts alone.
    """
    names = list(map(str, known))
    return find_alias(name, names) or ", ".join(difflib.get_close_matches(show(name), names, count, cutoff))


def list_some(names: Sequence[Any], most: int = 4) -> str:
    """Return the first `most` names separated by commas, and how many more there are."""
    return ", ".join(map(str, names[:most])) + (f" and {len(names) - most} more" if len(names) > most else "")


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]}... ({len(text)} characters)"


def format_bytes(size: float) -> str:
    """Return a number of bytes in the decimal units of datasheets, such as 14.7 GB."""
    for power, unit in ((12, "TB"), (9, "GB"), (6, "MB"), (3, "kB")):
        if size >= 10**power:
            return f"{size / 10**power:.3g} {unit}"
    return f"{size:.0f} bytes"
