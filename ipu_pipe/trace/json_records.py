"""Parse a JSON trace in Chrome's format as far as Chrome and Perfetto read it.

Both viewers read a byte order mark, control characters inside names, an array without its end, and
a file that breaks off. `parse_records` gives each record to a function as soon as it is parsed, so
that memory never contains millions of dictionaries.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from pathlib import Path
from typing import Any, BinaryIO, Callable, Dict, NamedTuple

from ipu_pipe.errors import BadInput
from ipu_pipe.files import open_file

GZIP = b"\x1f\x8b"
# bytes of JSON in a file
MOST_TEXT = 1 << 30
PIECE = 1 << 20
# a time, and a duration after it, up to this one fit into int64 as nanoseconds
MOST_US = 4 * 10**15
# a float64 holds all decimals (nanoseconds) of a time in microseconds with up to 12 digits before
# the point
MOST_DIGITS = 12
_EVENTS_KEY = re.compile(r'"traceEvents"\s*:\s*\[')
_DECIMAL = re.compile(r"\s*(-?)(\d{1,16})(?:\.(\d{1,30}))?\s*")
Record = Dict[str, Any]


class LongNumber(float):
    """A decimal number with more digits than a float64 can hold, and a thousand times it (exact)."""

    thousandfold: int


class Parsed(NamedTuple):
    """The keys of a file besides its records, and where its text breaks off (-1: it does not)."""

    keys: dict[str, Any]
    cut_at: int


def parse_records(path: Path, take: Callable[[Record], Record | None], most_bytes: int) -> Parsed:
    """Parse a trace file and give `take` each object in it, inner ones first; it returns None for a
    record that it has taken, and any other object unchanged.

    Raise `BadInput` for more than `most_bytes` of JSON, and `ValueError` for text that is not JSON
    from the beginning.
    """
    text, is_whole = _read_text(path, most_bytes)
    taken = 0

    def count(record: Record) -> Record | None:
        nonlocal taken
        rest = take(record)
        taken += rest is None
        return rest

    decoder = json.JSONDecoder(object_hook=count, parse_float=_parse_number, strict=False)
    try:
        document = decoder.decode(text)
    except json.JSONDecodeError:
        if not taken:
            raise
        head = _EVENTS_KEY.search(text)
        # the keys before the records are whole; those after them are lost
        keys = json.loads(text[: head.end()] + "]}", strict=False) if head else {}
        return Parsed(keys, len(text.encode()))
    keys = {"traceEvents": document} if isinstance(document, list) else document
    records = keys.pop("traceEvents", None)
    if not isinstance(records, list) or any(record is not None for record in records):
        raise ValueError("traceEvents: must be a list of objects with a ph")
    return Parsed(dict(keys), -1 if is_whole else len(text.encode()))


def _read_text(path: Path, most_bytes: int) -> tuple[str, bool]:
    """Return a file's text, unpacked, and whether its packed bytes are whole."""
    with open_file(path) as raw:
        is_packed = raw.read(2) == GZIP
        raw.seek(0)
        content, is_whole = (
            _unpack(raw, most_bytes) if is_packed else (raw.read(most_bytes + 1), True)
        )
    if len(content) > most_bytes:
        raise BadInput(
            f"{path}: holds more than {most_bytes >> 20} MiB of JSON: record fewer updates "
            f"(log.trace)"
        )
    return content.decode("utf-8-sig", errors="replace"), is_whole


def _unpack(raw: BinaryIO, most_bytes: int) -> tuple[bytes, bool]:
    """Unpack a gzipped file as far as it goes, and say whether it is whole."""
    pieces: list[bytes] = []
    size = 0
    with gzip.open(raw) as file:
        try:
            while size <= most_bytes:
                piece = file.read1(PIECE)  # type: ignore[attr-defined]
                if not piece:
                    return b"".join(pieces), True
                pieces.append(piece)
                size += len(piece)
        except EOFError:
            return b"".join(pieces), False
        except zlib.error:
            # the bytes after the damage do not exist, those before it have no checksum
            if not pieces:
                raise
            return b"".join(pieces), False
    return b"".join(pieces), True


def _parse_number(text: str) -> float:
    return _parse_text(text) if text.find(".") > MOST_DIGITS else float(text)


def _parse_text(text: str) -> float:
    """Return the number that a text is. Raise ValueError if it is none."""
    number = LongNumber(text)
    try:
        # exact: a float64 does not hold all digits of a time since 1970
        number.thousandfold = _read_thousandfold(text)
    except ValueError:
        return float(text)
    return number


def _read_thousandfold(text: str) -> int:
    """Return a thousand times a decimal number, rounded to a whole one, exactly. Raise ValueError
    for other text.
    """
    match = _DECIMAL.fullmatch(text)
    if match is None:
        raise ValueError("is not a decimal number")
    sign, whole, decimals = match.groups()
    tenths = int(whole + (decimals or "").ljust(4, "0")[:4])
    return -((tenths + 5) // 10) if sign else (tenths + 5) // 10


def read_time(value: Any) -> int:
    """Return a time in microseconds, a number or its text, as whole nanoseconds. Raise ValueError
    for anything else.
    """
    if isinstance(value, str):
        value = _parse_text(value)
    if type(value) is LongNumber and -MOST_US < value < MOST_US:
        return value.thousandfold
    if type(value) is float and -MOST_US < value < MOST_US:
        return round(value * 1000)
    if type(value) is int and -MOST_US < value < MOST_US:
        return value * 1000
    raise ValueError("is not a number of microseconds")
