"""The record of a case, the base inputs that all kinds mutate, and common values and kinds of damage."""

from __future__ import annotations

import os
import random
import socket
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence

import yaml

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

HUGE: List[Any] = [2**31, 2**31 - 1, 2**63, 10**30, 10**309, -1, 0, 1, 1000]
FLOATS: List[Any] = [
    1e308, -1e308, 5e-324, float("inf"), float("nan"), -0.0, 0.5, 1e18,
]  # fmt: skip
TEXTS: List[Any] = [
    "", " ", "a" * 5000, "\0", "a\0b", "\x1b[31mred", "line\nline", "\u2028", "\u202eevil", "ß€😀", "..", "/", "/dev/null",
    "1e400", ".inf", "true", "null", "~", "=", ":", "a:b", "models.mlp:none", "models.mlp:mlp", "-", "--set", "%s", "{}",
    "${HOME}", "gpipe", "sgd", "cross_entropy", "finest", "optimal", "0x10", "1_000", "é" * 300, "*", "&a", "!!int 3",
]  # fmt: skip
NESTED: List[Any] = [
    [], {}, {"a": {"b": {"c": {}}}}, [1, "a", None], {"count": 3, "by": "time"}, {"finest": 2}, [None] * 300,
    [True, False], {"updates": 2}, {"max": 3, "mean": 1}, {"": ""},
]  # fmt: skip
JUNK = [
    b"\0",
    b"\xff\xfe",
    b"\xed\xa0\x80",
    b"\n",
    b"\t",
    b"\x1b[2J",
    b"9" * 5000,
    b"[" * 600,
    b"{" * 600,
]


def write_config(folder: Path, **changes: Any) -> None:
    """Write the base config with changed keys as config.yaml."""
    text = yaml.safe_dump({**BASE, **changes}, sort_keys=False)
    (folder / "config.yaml").write_text(text)


def draw_short_run(rng: random.Random) -> List[str]:
    """Draw the command line of a dry run, or of a run of two updates."""
    run = ["--out", "run", "--set", "steps=2"]
    return ["config.yaml", *rng.choice([["--dry-run"], run])]


def draw_value(rng: random.Random) -> Any:
    """Draw a plain value, mostly of a wrong type or size."""
    pool = rng.choice([HUGE, FLOATS, TEXTS, NESTED, [None, True, False]])
    if rng.random() < 0.05:
        deep: Any = 1
        for _ in range(rng.choice([10, 60, 130])):
            deep = [deep] if rng.random() < 0.5 else {"a": deep}
        return deep
    return rng.choice(pool)


def change_value(content: Any, rng: random.Random) -> str:
    """Change, remove or add one value in nested lists and mappings. Return its place."""
    place, section = [], content
    while True:
        key = rng.choice([*section] if isinstance(section, dict) else range(len(section)))
        place.append(str(key))
        old = section[key]
        if not isinstance(old, (dict, list)) or not old or rng.random() < 0.2:
            break
        section = old
    how = rng.random()
    if how < 0.2:
        del section[key]
    elif how < 0.5 and type(old) in (int, float):
        section[key] = old + rng.choice([1, -1, 0.5, 1e300])
    elif how < 0.6 and isinstance(section, dict):
        section["more"] = draw_value(rng)
    else:
        section[key] = draw_value(rng)
    return ".".join(place)


def damage_bytes(content: bytes, rng: random.Random) -> bytes:
    """Return `content` with bytes flipped, cut, repeated or inserted."""
    if not content:
        return rng.choice([b"\0", b"{}", b"[", b"\xff"])
    flipped = bytearray(content)
    for _ in range(rng.choice([1, 1, 1, 5, 50])):
        flipped[rng.randrange(len(flipped))] ^= 1 << rng.randrange(8)
    at = rng.randrange(len(content))
    end = at + rng.choice([1, 2, 10, 100, 1000])
    before, part, after = content[:at], content[at:end], content[end:]
    return rng.choice([
        bytes(flipped), before, before + after, before + part * rng.choice([2, 51]) + after,
        before + rng.choice(JUNK) + part + after, b"", content + content,
        bytes(rng.choices(range(256), k=rng.choice([1, 8, 300]))),
    ])  # fmt: skip


def link_to(target: str) -> Callable[[Path], None]:
    """Return a function that makes a link."""
    return lambda path: path.symlink_to(target)


def put_large(path: Path) -> None:
    """Put a file of 4 TiB without content."""
    path.touch()
    os.truncate(path, 2**42)


def put_socket(path: Path) -> None:
    """Put a socket; its path must be short."""
    here = os.getcwd()
    os.chdir(path.parent)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path.name)
    os.chdir(here)


# devices are put by links, so that a bug of ours replaces no device of the machine
PUT: Dict[str, Callable[[Path], Any]] = {
    "nothing": lambda path: None, "empty": Path.touch, "folder": Path.mkdir, "pipe": os.mkfifo, "socket": put_socket,
    "large": put_large, "closed": lambda path: path.touch(mode=0), "loop": lambda path: path.symlink_to(path.name),
    "link": link_to("target"), "dead link": link_to("nowhere"), "null": link_to("/dev/null"), "zeros": link_to("/dev/zero"),
    "full": link_to("/dev/full"),
}  # fmt: skip
IRREGULAR = [
    "pipe",
    "pipe",
    "zeros",
    "zeros",
    "null",
    "folder",
    "loop",
    "socket",
    "large",
    "closed",
]
ODD_FILES = ["nothing", "folder", "pipe", "loop", "dead link", "null", "zeros", "empty"]


def replace_file(path: Path, how: str) -> str:
    """Put something in the place of a file. Return a description."""
    if path.is_file():
        path.unlink()
    PUT[how](path)
    return f"{path.name}: {how}"


def damage_file(path: Path, rng: random.Random) -> str:
    """Change the bytes of a file, or replace it by something else. Return a description."""
    if rng.random() < 0.5:
        return replace_file(path, rng.choice(ODD_FILES))
    path.write_bytes(damage_bytes(path.read_bytes(), rng))
    return f"{path.name}: bytes damaged"


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
    (folder / "target").touch()
    how = rng.choice(
        ["nothing", "nothing", "null", "full", "link", "dead link", "loop", "folder", ""]
    )
    if not how:
        return f"target/{name}"
    PUT[how](folder / name)
    return name
