"""Format values and texts of unknown length and content on one line: shortened, with control
characters escaped.
"""

from __future__ import annotations

import difflib
import re
from typing import Any, Iterable, Sequence

# characters
MOST_OF_A_VALUE = 160
MOST_OF_A_LINE = 2000
# the longest word of another library that must be written exactly
MOST_EXACT = 4


def show(value: Any) -> str:
    """Return a value as text on one line, cut after `MOST_OF_A_VALUE` characters."""
    try:
        text = str(value)
    # numbers with too many digits, or objects of the user's own
    except Exception as error:
        text = f"({type(value).__name__} that cannot be shown: {type(error).__name__})"
    return _cut(escape(text), MOST_OF_A_VALUE)


def format_estimate(value: float, digits: int) -> str:
    """Return a number with `digits` significant digits and separators of thousands: 40,000."""
    # g alone has six digits, and writes an exponent from a million on
    return f"{float(f'{value:.{digits}g}'):,.12g}"


def describe_kind(value: Any) -> str:
    """Return a number or None as text, and of any other value its type: a Tensor, the class
    Linear.
    """
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
    """Return text with all that a terminal obeys, breaks the line at or cannot print as Python
    writes it, such as \\x1b.
    """
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text
    )


def escape_lines(text: str) -> str:
    """Return text of several lines for a terminal, with each line escaped."""
    return "\n".join(map(escape, text.split("\n")))


# names of ours, several separated by spaces -> words of other libraries for them
OTHER_WORDS = {
    "pipedream_flush pipedream": "1f1b",
    "pipedream_flush": "schedule1f1b dapple",
    "pipedream_2bw": "2bw",
    "pipelined_backprop": "pb",
    "local_sgd": "localsgd diloco",
    "randomized_pipedream": "rpd",
    "gpipe": "afab fill_drain schedulegpipe",
    "interleaved_1f1b": "interleaved vpp scheduleinterleaved1f1b",
    "looped_bfs": "bfs breadth_first scheduleloopedbfs",
    "zb_h1": "zero_bubble zerobubble zb zb1p",
    "zb_h2": "zb2p",
    "zbv": "zbvzerobubble schedulezbvzerobubble",
    "interleaved_zb": "scheduleinterleavedzerobubble",
    "dualpipe_v": "dualpipe dualpipev scheduledualpipev",
    "bfloat16": "bf16_true torch.bfloat16",
    # autocast is meant by most
    "bfloat16_mixed bfloat16": "bf16",
    "float16 bfloat16_mixed": "float16 fp16 half 16 torch.float16",
    "bfloat16_mixed": "bf16_mixed 16_mixed mixed mixed_precision amp autocast",
    "float32": "fp32 single float 32 32_true tf32 torch.float32",
    "float64": "fp64 double 64 64_true torch.float64",
    "gradient_accumulation": "accumulation_steps grad_accum",
    "steps": "max_steps",
    "lr": "learning_rate",
    "cuda": "gpu nvidia",
    "xla": "tpu",
    "distributed": "gloo nccl torchrun processes ddp",
    "poptorch gc200": "ipu",
    "poptorch": "ipus popart",
    "emulator": "single_process",
    "gc2": "mk1",
    "gc200": "mk2",
    "this": "localhost",
    "adamw": "adamw_torch",
    "cosine": "cosineannealinglr cosine_annealing warmup_cosine cosine_with_warmup",
    "step": "multisteplr steplr multistep",
    "plateau": "reducelronplateau",
    "linear": "linearlr linear_with_warmup",
    "constant": "constantlr",
    "cross_entropy": "ce xent softmax",
    "nll_loss": "nll",
    "mse_loss": "mse l2",
    "l1_loss": "l1 mae",
    "binary_cross_entropy": "bce",
    "huber_loss": "huber",
    "model": "own",
    "accuracy": "acc",
    "image_folder": "imagenet imagefolder",
    "synthetic": "random fake",
    "fashion_mnist": "fmnist",
    "shakespeare": "tiny_shakespeare",
}
ALSO_CALLED = {word: names for names, words in OTHER_WORDS.items() for word in words.split()}


def _normalize(name: Any) -> str:
    """Return a name without case, hyphens, and the number of a device (cuda:0)."""
    return re.sub(r":\d+$", "", show(name).lower().replace("-", "_"))


def find_alias(name: Any, known: Iterable[str]) -> str:
    """Return which of the `known` names another library calls `name`, separated by "or"; "" if
    none.
    """
    names = ALSO_CALLED.get(_normalize(name), "").split()
    return " or ".join(meant for meant in names if meant in known)


def find_nearest(name: Any, known: Iterable[Any], count: int = 1, cutoff: float = 0.6) -> str:
    """Return at most `count` known names that may have been meant, the likeliest first, separated
    by commas.

    A name counts from the similarity `cutoff` on, as in difflib; "" if there is none. An equal name
    that differs in case or hyphens, and an alias (`find_alias`), counts alone.
    """
    names = list(map(str, known))
    spelled: dict[str, str] = {}
    for spelling in names:
        spelled.setdefault(_normalize(spelling), spelling)
    meant = _normalize(name)
    exact = spelled.get(meant) or find_alias(name, names)
    # a word that means something else is not a misspelling of a similar one: tpu of cpu
    if exact or meant in ALSO_CALLED:
        return exact
    # a misspelled word of another library; short ones such as ipu and gpu are similar without being
    # meant
    for alias in ALSO_CALLED:
        if len(alias) > MOST_EXACT:
            spelled.setdefault(alias, find_alias(alias, names))
    close = difflib.get_close_matches(
        meant, [word for word, spelling in spelled.items() if spelling], count, cutoff
    )
    # a name and a word for it may both be close
    return ", ".join(dict.fromkeys(spelled[word] for word in close))


def suggest(name: Any, known: Iterable[Any]) -> str:
    """Return the end of a fault that names the nearest known name; "" if there is none."""
    nearest = find_nearest(name, known)
    return f"; did you mean {nearest}?" if nearest else ""


def list_some(names: Sequence[Any], most: int = 4) -> str:
    """Return the first `most` names separated by commas, and how many more there are."""
    return ", ".join(map(str, names[:most])) + (
        f" and {len(names) - most} more" if len(names) > most else ""
    )


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]}... ({len(text)} characters)"


def format_count(number: int, name: str) -> str:
    """Return a number of things in words: 1 seed, 2 seeds."""
    return f"{number} {name}" if number == 1 else f"{number} {name}s"


def format_bytes(size: float) -> str:
    """Return a number of bytes in the decimal units of datasheets, such as 14.7 GB."""
    for power, unit in ((12, "TB"), (9, "GB"), (6, "MB"), (3, "kB")):
        if size >= 10**power:
            return f"{size / 10**power:.3g} {unit}"
    return f"{size:.0f} bytes"
