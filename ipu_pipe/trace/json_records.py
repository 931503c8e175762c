"""Parse a JSON trace in Chrome's format, record by record, as far as Chrome and Perfetto read it.

Both viewers read a byte order mark, control characters inside names, an array without its end, and
a file that breaks off. The text is unpacked and decoded piece by piece and each record is given to
a function as soon as it is parsed, so that memory never contains a file's text or its records.

    {"schemaVersion": 1, "traceEvents": [ {"ph": ...}, {"ph": ...} ], "host_name": ...}
     |---- a key -----|                   |- record -| |- record -|   |---- a key ---|
"""

from __future__ import annotations

import codecs
import contextlib
import gzip
import json
import re
import zlib
from pathlib import Path
from typing import Any, BinaryIO, Callable, Dict, Iterator, NamedTuple, Optional

from ipu_pipe.errors import BadInput
from ipu_pipe.files import open_file
from ipu_pipe.text import format_bytes

GZIP = b"\x1f\x8b"
# bytes of JSON in a file
MOST_TEXT = 1 << 30
# bytes of text that are read at a time: the records of one piece are few enough that Python's
# collector of garbage leaves them alone; a value that needs more than the most is refused
PIECE = 1 << 16
MOST_VALUE = 1 << 22
# ends of objects that are tried
TRIES = 4
# a time, and a duration after it, up to this one fit into int64 as nanoseconds
MOST_US = 4 * 10**15
# a float64 holds all decimals (nanoseconds) of a time in microseconds with up to 12 digits before
# the point
MOST_DIGITS = 12
_SPACE = re.compile(r"[ \t\n\r]*")
_DECIMAL = re.compile(r"\s*(-?)(\d{1,16})(?:\.(\d{1,30}))?\s*")
# of JSON, after each of which a line says how far a file is read
REPORTED = 100_000_000
CHAKRA = (
    "is a Chakra execution trace, which has no times of devices: record the run with "
    "torch.profiler and give its export_chrome_trace"
)
Record = Dict[str, Any]
Report = Optional[Callable[[str], None]]


class LongNumber(float):
    """A decimal number with more digits than a float64 can hold, and a thousand times it (exact)."""

    thousandfold: int


class _Broken(ValueError):
    """The text is not JSON from a place on."""


class Parsed(NamedTuple):
    """The keys of a file besides its records, and where its text breaks off (-1: it does not)."""

    keys: dict[str, Any]
    cut_at: int


def parse_records(
    path: Path,
    take: Callable[[Record], None],
    most_bytes: int,
    report: Report = None,
) -> Parsed:
    """Parse a trace file and give each of its records, an object with a `ph`, to `take`, and how
    far a long one is read to `report`, a line after each of REPORTED bytes.

    Raise `BadInput` for more than `most_bytes` of JSON, and `ValueError` for text that is not JSON
    from the beginning or has no list of records.
    """
    keys: dict[str, Any] = {}
    with open_file(path) as raw:
        text = _Text(path, raw, most_bytes, report)
        try:
            has_records = _parse_document(text, keys, take)
            text.expect_end()
        # before any record it is no trace at all, after one a trace that breaks off
        except _Broken:
            if not text.records:
                raise
            return Parsed(keys, text.count_bytes())
    if not has_records:
        raise ValueError("traceEvents: must be a list of objects with a ph")
    return Parsed(keys, -1 if text.is_whole else text.count_bytes())


def _parse_document(text: _Text, keys: dict[str, Any], take: Callable[[Record], None]) -> bool:
    """Parse a list of records, or an object with one; return whether there is one."""
    if text.peek() == "[":
        text.parse_list(take)
        return True
    if text.peek() != "{":
        return False
    text.skip()
    has_records = False
    while text.peek() != "}":
        key = str(text.parse_value())
        text.expect(":")
        if key == "traceEvents" and text.peek() == "[":
            has_records = True
            text.parse_list(take)
        # Chakra's JSON has its graph there
        elif key == "nodes":
            raise ValueError(CHAKRA)
        else:
            keys[key] = text.parse_value()
        # a comma before the end is read, too
        if text.peek() != "}":
            text.expect(",")
    text.skip()
    return has_records


class _Text:
    """The text of a file, of which a piece is held; `records`: the number that was parsed."""

    def __init__(self, path: Path, raw: BinaryIO, most_bytes: int, report: Report) -> None:
        self.is_whole = True
        self.records = 0
        self._path = path
        self._most_bytes = most_bytes
        self._raw = raw
        self._report = report
        self._pieces = _read_pieces(raw)
        # incremental: a piece may end inside a character
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")("replace")
        # not strict, because names of ranges may have control characters
        self._scan = json.JSONDecoder(parse_float=_parse_number, strict=False).scan_once  # type: ignore[attr-defined]
        self._bytes = 0
        self._at_end = False
        self._held = ""
        self._place = 0
        # whether it was not yet tried to parse all that is held
        self._is_fresh = False

    def count_bytes(self) -> int:
        """Return the bytes of text up to the current place."""
        return self._bytes - len(self._held[self._place :].encode(errors="replace"))

    def peek(self) -> str:
        """Return the next character that is not space, "" at the end."""
        while True:
            match = _SPACE.match(self._held, self._place)
            assert match is not None, "the pattern matches nothing, too"
            self._place = match.end()
            if self._place < len(self._held) or not self._read_on():
                return self._held[self._place : self._place + 1]

    def skip(self) -> None:
        """Go on by one character."""
        self._place += 1

    def expect(self, character: str) -> None:
        """Skip a character. Raise `_Broken` if it is not the next one."""
        if self.peek() != character:
            raise _Broken(f"expected {character!r} at byte {self.count_bytes()}")
        self.skip()

    def expect_end(self) -> None:
        """Raise `_Broken` if there is more text."""
        if self.peek():
            raise _Broken(f"has text after its end, at byte {self.count_bytes()}")

    def parse_value(self) -> Any:
        """Parse any value. Raise `_Broken` if it is none, or if the text ends before it."""
        self.peek()
        while True:
            try:
                value, end = self._scan(self._held, self._place)
                # a number may go on in the next piece: after a digit, or after 12. or 1e
                if self._at_end or self._held[end : end + 1] not in ("", ".", "e", "E"):
                    self._place = end
                    return value
            except (StopIteration, json.JSONDecodeError):
                if self._at_end:
                    raise _Broken(f"expected a value at byte {self.count_bytes()}") from None
            self._read_on()

    def parse_list(self, take: Callable[[Record], None]) -> None:
        """Parse a list of records."""
        self.expect("[")
        while self.peek() != "]":
            for record in self._parse_held() or [self.parse_value()]:
                if not isinstance(record, dict) or record.get("ph") is None:
                    raise ValueError("traceEvents: must be a list of objects with a ph")
                self.records += 1
                take(record)
            if self.peek() == ",":
                self.skip()
            elif self.peek() != "]":
                self.expect(",")
        self.skip()

    def _parse_held(self) -> list[Any]:
        """Parse the objects that are held whole at once, which is faster than one by one: up to one
        of the last places where an object seems to end. None if it ends at no such place.
        """
        cut = len(self._held)
        for _ in range(TRIES * self._is_fresh):
            # such places are inside records and texts, too: what precedes them does not parse
            cut = self._held.rfind("},", self._place, cut)
            if cut < 0:
                break
            text = f"[{self._held[self._place : cut + 1]}]"
            with contextlib.suppress(StopIteration, json.JSONDecodeError):
                values, end = self._scan(text, 0)
                if end == len(text):
                    self._place = cut + 1
                    return list(values)
        self._is_fresh = False
        return []

    def _read_on(self) -> bool:
        """Hold more text; return False at the end. Raise `BadInput` for too much."""
        self._held = self._held[self._place :]
        self._place = 0
        self._is_fresh = True
        # a value of many pieces is parsed anew whenever the text held has doubled
        missing = len(self._held) + 1
        # a value without an end would be held to the end of the file
        if len(self._held) >= MOST_VALUE:
            raise _Broken(f"has a value of more than {MOST_VALUE >> 20} MiB")
        parts = [self._held]
        while missing > 0 and not self._at_end:
            piece = self._read_piece()
            parts.append(self._decoder.decode(piece, final=not piece))
            missing -= len(parts[-1])
            self._at_end = not piece
        self._held = "".join(parts)
        return bool(self._held)

    def _read_piece(self) -> bytes:
        try:
            piece = next(self._pieces, b"")
        except (EOFError, zlib.error):
            # the bytes after the damage do not exist, those before it have no checksum
            if not self._bytes:
                raise
            self.is_whole = False
            return b""
        before = self._bytes // REPORTED
        self._bytes += len(piece)
        if self._report is not None and self._bytes // REPORTED > before:
            # of the packed bytes: how many there are unpacked is known only at the end
            share = self._raw.tell() / max(self._path.stat().st_size, 1)
            self._report(f"{self._path}: {share:.0%} read, {format_bytes(self._bytes)} of JSON")
        if self._bytes > self._most_bytes:
            raise BadInput(
                f"{self._path}: holds more than {self._most_bytes >> 20} MiB of JSON: record fewer "
                f"updates (log.trace)"
            )
        return piece


def _read_pieces(raw: BinaryIO) -> Iterator[bytes]:
    """Yield the bytes of a file, unpacked where it is gzipped."""
    is_packed = raw.read(2) == GZIP
    raw.seek(0)
    file: Any = gzip.open(raw) if is_packed else raw
    while True:
        # read1: a read would go on to PIECE bytes, and lose them all where the file is damaged
        piece = file.read1(PIECE)
        if not piece:
            return
        yield piece


def _parse_number(text: str) -> float:
    # nearly all numbers are short, and float alone is several times as fast
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
    # three decimals are nanoseconds, and the fourth one rounds
    tenths = int(whole + (decimals or "").ljust(4, "0")[:4])
    return -((tenths + 5) // 10) if sign else (tenths + 5) // 10


def read_time(value: Any) -> int:
    """Return a time in microseconds, a number or its text, as whole nanoseconds. Raise ValueError
    for anything else.
    """
    if isinstance(value, str):
        value = _parse_text(value)
    # by type: True is no time; a comparison with NaN is false
    if type(value) is LongNumber and -MOST_US < value < MOST_US:
        return value.thousandfold
    if type(value) is float and -MOST_US < value < MOST_US:
        return round(value * 1000)
    if type(value) is int and -MOST_US < value < MOST_US:
        return value * 1000
    raise ValueError("is not a number of microseconds")
