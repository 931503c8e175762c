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


# Words of other libraries -> names of ours, several separated by spaces.
ALSO_CALLED = {
    "1f1b": "pipedream_flush pipedream",
    "schedule1f1b": "pipedream_flush",
    "dapple": "pipedream_flush",
    "2bw": "pipedream_2bw",
    "pb": "pipelined_backprop",
    "localsgd": "local_sgd",
    "diloco": "local_sgd",
    "rpd": "randomized_pipedream",
    "afab": "gpipe",
    "fill_drain": "gpipe",
    "schedulegpipe": "gpipe",
    **dict.fromkeys(("interleaved", "vpp", "scheduleinterleaved1f1b"), "interleaved_1f1b"),
    **dict.fromkeys(("bfs", "breadth_first", "scheduleloopedbfs"), "looped_bfs"),
    **dict.fromkeys(("zero_bubble", "zerobubble", "zb", "zb1p"), "zb_h1"),
    "zb2p": "zb_h2",
    **dict.fromkeys(("zbvzerobubble", "schedulezbvzerobubble"), "zbv"),
    "scheduleinterleavedzerobubble": "interleaved_zb",
    **dict.fromkeys(("dualpipe", "dualpipev", "scheduledualpipev"), "dualpipe_v"),
    **dict.fromkeys(("bf16_true", "torch.bfloat16"), "bfloat16"),
    # autocast is meant by most
    "bf16": "bfloat16_mixed bfloat16",
    **dict.fromkeys(("float16", "fp16", "half", "16", "torch.float16"), "float16 bfloat16_mixed"),
    **dict.fromkeys(
        ("bf16_mixed", "16_mixed", "mixed", "mixed_precision", "amp", "autocast"), "bfloat16_mixed"
    ),
    **dict.fromkeys(
        ("fp32", "single", "float", "32", "32_true", "tf32", "torch.float32"), "float32"
    ),
    **dict.fromkeys(("fp64", "double", "64", "64_true", "torch.float64"), "float64"),
    "accumulation_steps": "gradient_accumulation",
    "grad_accum": "gradient_accumulation",
    "max_steps": "steps",
    "learning_rate": "lr",
    "gpu": "cuda",
    "nvidia": "cuda",
    "tpu": "xla",
    **dict.fromkeys(("gloo", "nccl", "torchrun", "processes", "ddp"), "distributed"),
    "ipu": "poptorch gc200",
    "ipus": "poptorch",
    "popart": "poptorch",
    "single_process": "emulator",
    "mk1": "gc2",
    "mk2": "gc200",
    "localhost": "this",
    "adamw_torch": "adamw",
    **dict.fromkeys(
        ("cosineannealinglr", "cosine_annealing", "warmup_cosine", "cosine_with_warmup"), "cosine"
    ),
    **dict.fromkeys(("multisteplr", "steplr", "multistep"), "step"),
    "reducelronplateau": "plateau",
    **dict.fromkeys(("linearlr", "linear_with_warmup"), "linear"),
    "constantlr": "constant",
    **dict.fromkeys(("ce", "xent", "softmax"), "cross_entropy"),
    "nll": "nll_loss",
    "mse": "mse_loss",
    "l2": "mse_loss",
    "l1": "l1_loss",
    "mae": "l1_loss",
    "bce": "binary_cross_entropy",
    "huber": "huber_loss",
    "own": "model",
    "acc": "accuracy",
    "imagenet": "image_folder",
    "imagefolder": "image_folder",
    "random": "synthetic",
    "fake": "synthetic",
    "fmnist": "fashion_mnist",
    "tiny_shakespeare": "shakespeare",
}


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


def format_bytes(size: float) -> str:
    """Return a number of bytes in the decimal units of datasheets, such as 14.7 GB."""
    for power, unit in ((12, "TB"), (9, "GB"), (6, "MB"), (3, "kB")):
        if size >= 10**power:
            return f"{size / 10**power:.3g} {unit}"
    return f"{size:.0f} bytes"
