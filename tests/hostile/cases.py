"""The record of a case, the base inputs that all kinds mutate, and common values and kinds of damage."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence

# Digits in a few updates: the smallest run that has stages, delays, an evaluation and checkpoints.
BASE: Dict[str, Any] = {
    "model": {"entry": "models.mlp:mlp", "args": {"inputs": 64, "width": 16, "layers": 4, "classes": 10}},
    "data": {"name": "digits", "subset": 128, "test_subset": 32}, "method": "pipedream", "stages": 4,
    "micro_batch_size": 8, "gradient_accumulation": 4, "optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9},
    "steps": 6, "evaluate": {"every": 1}, "checkpoint": {"every": 2, "keep": 9},
    "log": {"every": 1, "tensorboard": False},
}  # fmt: skip

BYTES = [b"\xff", b"\xed\xa0\x80", b"a\xffb", b"\xc3", b"\x80=1", b"seed=\xff"]
FindDifference = Callable[[str], Optional[str]]


class Bases(NamedTuple):
    """Run folders that all cases copy: `run` was interrupted after update 4 of 6, `end` is the finished run."""

    run: Path
    end: Path


class Case(NamedTuple):
    """A command of tools/`tool`.py with `argv`, run in its own folder; `mutation` describes the mutation.

    `find_difference` gets the standard output of a command with exit code 0. It returns a difference between
    the result and the saved run, which the command should have refused, or None.
    """

    tool: str
    argv: Sequence[str]
    mutation: str
    find_difference: Optional[FindDifference] = None


CaseMaker = Callable[[random.Random, Path, Bases], Case]

HUGE: List[Any] = [
    2**31,
    2**31 - 1,
    2**53,
    2**63,
    2**64,
    10**30,
    10**309,
    -1,
    -(2**63),
    0,
    1,
    3,
    1000,
]
FLOATS: List[Any] = [
    1e308, -1e308, 1e-308, 5e-324, float("inf"), float("-inf"), float("nan"), 0.0, -0.0, 0.5, 1.0, 1e18,
]  # fmt: skip
TEXTS: List[Any] = [
    "", " ", "a" * 5000, "\0", "a\0b", "\x1b[31mred", "line\nline", "\u2028", "\u202eevil", "ß€😀", "..", "/", "/dev/null",
    "1e400", ".inf", "true", "null", "~", "=", ":", "a:b", "models.mlp:none", "models.mlp:mlp", "-", "--set", "%s", "{}",
    "${HOME}", "gpipe", "sgd", "cross_entropy", "finest", "optimal", "0x10", "1_000", "é" * 300, "*", "&a", "!!int 3",
]  # fmt: skip
NESTED: List[Any] = [
    [], {}, [[]], {"a": {"b": {"c": {}}}}, [1, "a", None], {"count": 3}, {"count": 3, "by": "time"}, {"finest": 2},
    [None] * 300, {str(i): i for i in range(300)}, [True, False], {"updates": 2}, {"max": 3, "mean": 1}, {"": ""},
]  # fmt: skip


def draw_value(rng: random.Random) -> Any:
    """Draw a plain value, mostly of a wrong type or size."""
    pool = rng.choice([HUGE, FLOATS, TEXTS, NESTED, [None, True, False]])
    if rng.random() < 0.05:
        deep: Any = 1
        for _ in range(rng.choice([10, 60, 130])):
            deep = [deep] if rng.random() < 0.5 else {"a": deep}
        return deep
    return rng.choice(pool)


def damage_bytes(content: bytes, rng: random.Random) -> bytes:
    """Return `content` with bytes flipped, cut, repeated or inserted."""
    if not content:
        return rng.choice([b"\0", b"{}", b"[", b"\xff"])
    at = rng.randrange(len(content))
    how = rng.randrange(8)
    if how == 0:
        flipped = bytearray(content)
        for _ in range(rng.choice([1, 1, 1, 5, 50])):
            flipped[rng.randrange(len(flipped))] ^= 1 << rng.randrange(8)
        return bytes(flipped)
    if how == 1:
        return content[:at]
    if how == 2:
        return content[:at] + content[at + rng.choice([1, 2, 10, 100]) :]
    if how == 3:
        end = min(len(content), at + rng.choice([1, 10, 100, 1000]))
        return content[:end] + content[at:end] * rng.choice([1, 2, 50]) + content[end:]
    if how == 4:
        junk = rng.choice([
            b"\0", b"\xff\xfe", b"\xed\xa0\x80", b"\n", b"\t", b"\x1b[2J", b"9" * 5000, b"[" * 600, b"{" * 600,
        ])  # fmt: skip
        return content[:at] + junk + content[at:]
    if how == 5:
        return b""
    if how == 6:
        return bytes(rng.randrange(256) for _ in range(rng.choice([1, 8, 300])))
    return content + content


def damage_file(path: Path, rng: random.Random) -> str:
    """Change the bytes of a file, or replace it by something else. Return a description."""
    how = rng.choice(
        ["bytes"] * 6
        + ["gone", "renamed", "folder", "pipe", "link to itself", "dead link", "device", "empty"]
    )
    if how == "bytes":
        path.write_bytes(damage_bytes(path.read_bytes(), rng))
        return f"{path.name}: bytes damaged"
    if how == "renamed":
        path.rename(path.with_name(path.name + ".old"))
        return f"{path.name}: renamed"
    path.unlink()
    if how == "folder":
        path.mkdir()
    elif how == "pipe":
        os.mkfifo(path)
    elif how == "link to itself":
        path.symlink_to(path.name)
    elif how == "dead link":
        path.symlink_to("nowhere")
    elif how == "device":
        path.symlink_to(rng.choice(["/dev/null", "/dev/zero"]))
    elif how == "empty":
        path.write_bytes(b"")
    return f"{path.name}: {how}"


def draw_word(rng: random.Random) -> str:
    """Draw an odd word for a command line."""
    how = rng.random()
    if how < 0.15:
        return os.fsdecode(rng.choice(BYTES))
    if how < 0.5:
        return str(rng.choice([*HUGE, *FLOATS]))
    if how < 0.6:
        return "9" * 5000
    return str(rng.choice(TEXTS)).replace("\0", "")  # the system passes no NUL to a process


def make_odd_output(rng: random.Random, folder: Path, name: str) -> str:
    """Make a path to write to: new, a device, a link, a folder, or impossible."""
    path = folder / name
    how = rng.choice(
        ["new", "new", "device", "full", "link", "dead link", "loop", "folder", "below a file"]
    )
    if how == "link":
        (folder / "target").touch()
        path.symlink_to("target")
    elif how in ("dead link", "loop"):
        path.symlink_to("nowhere" if how == "dead link" else path.name)
    elif how == "folder":
        path.mkdir()
    elif how in (
        "device",
        "full",
    ):  # by a link, so that a bug of ours replaces no device of the machine
        path.symlink_to("/dev/null" if how == "device" else "/dev/full")
    elif how == "below a file":
        (folder / "file").touch()
        return f"file/{name}"
    return name
