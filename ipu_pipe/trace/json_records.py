"""A Chrome trace file read a piece at a time, so that a million records need no memory of their own for each."""

from __future__ import annotations

import gzip
import io
import json
import zlib
from pathlib import Path
from typing import Any, BinaryIO, Callable, Dict, List, TextIO

from ipu_pipe.errors import BadInput

PIECE = 1 << 20  # characters read at once
BATCH = 1 << 14  # records handed on at once
MOST = 1 << 26  # characters of a value, of records handed on at once, and of all other keys
GZIP = b"\x1f\x8b"
_decode = json.JSONDecoder().raw_decode


def read_records(path: Path, take: Callable[[List[Any]], None]) -> Dict[str, Any]:
    """Hand the records of a Chrome trace, plain or gzipped, to `take`, many at a time. Returns the file's other keys. Raises
    BadInput where it is none, or where `take` finds what it cannot use (ValueError, KeyError, TypeError, OverflowError)."""
    try:
        with path.open("rb") as raw:
            unpacked: BinaryIO = gzip.open(raw) if raw.read(2) == GZIP else raw  # type: ignore[assignment]
            raw.seek(0)
            with io.TextIOWrapper(unpacked, encoding="utf-8", errors="replace") as text:
                return _Reader(text).read(take)
    except (OSError, EOFError, zlib.error) as error:  # a broken gzip header is an OSError too, without an errno
        raise BadInput(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    except json.JSONDecodeError as error:
        what = "ends too early" if error.pos >= len(error.doc) else f"is no JSON: {error.msg}"
        raise BadInput(f"{path}: cannot be read as a Chrome trace: {what}") from None
    except KeyError as error:
        raise BadInput(f"{path}: cannot be read as a Chrome trace: {error}: missing, or not known") from None
    except (ValueError, TypeError, OverflowError, RecursionError, AttributeError) as error:
        raise BadInput(f"{path}: cannot be read as a Chrome trace: {type(error).__name__}: {error}") from None


class _Reader:
    """JSON taken value by value from a text of which a piece is held."""

    def __init__(self, file: TextIO) -> None:
        self._file, self._text, self._at, self._ended = file, "", 0, False
        self._size = 0  # characters of the value read last

    def read(self, take: Callable[[List[Any]], None]) -> Dict[str, Any]:
        """As `read_records`."""
        keys: Dict[str, Any] = {}
        if self._next() == "[":  # the records alone
            self._array(take)
            return keys
        found, others = False, 0
        self._expect("{")
        while self._next() != "}":
            key = self._value()
            self._expect(":")
            if key == "traceEvents":
                found = True
                self._next()
                self._array(take)
            else:
                keys[str(key)] = self._value()
                others += self._size
                if others > MOST:
                    raise ValueError("holds too much besides its events")
            if self._next() == ",":
                self._at += 1
        if not found:
            raise KeyError("traceEvents")
        return keys

    def _array(self, take: Callable[[List[Any]], None]) -> None:
        self._expect("[")
        some: List[Any] = []
        size = 0
        while self._next() != "]":
            some.append(self._value())
            size += self._size
            if self._next() == ",":
                self._at += 1
            elif self._text[self._at] != "]":
                self._expect(",")
            if len(some) == BATCH or size > MOST:
                take(some)
                some, size = [], 0
        self._at += 1
        take(some)

    def _value(self) -> Any:
        self._next()
        piece = PIECE
        while True:
            try:
                value, end = _decode(self._text, self._at)
                if end < len(self._text) or self._ended:
                    self._size, self._at = end - self._at, end
                    return value
            except json.JSONDecodeError:
                if self._ended:
                    raise
            if piece > MOST:
                raise ValueError("a value is too long")
            self._more(piece)
            piece *= 2  # a value longer than a piece is looked at from its beginning again

    def _next(self) -> str:
        """The next character that is no white space."""
        while True:
            text, at = self._text, self._at
            while at < len(text):
                if text[at] not in " \t\r\n":
                    self._at = at
                    return text[at]
                at += 1
            self._at = at
            if self._ended:
                raise json.JSONDecodeError("ends too early", text, at)
            self._more(PIECE)

    def _expect(self, character: str) -> None:
        if self._next() != character:
            raise json.JSONDecodeError(f"{character!r} expected", self._text, self._at)
        self._at += 1

    def _more(self, size: int) -> None:
        piece = self._file.read(size)
        self._ended = not piece
        self._text, self._at = self._text[self._at :] + piece, 0
