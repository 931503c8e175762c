"""Our own trace file: columns in compressed blocks, written as a run goes, so that what a killed run leaves can be read.

    ipu_pipe trace 1\\n  block  block  ...           block:  tag (4 bytes), rows, bytes, checksum (each uint32), then the bytes

A block of events or counters is its columns one after another, compressed (zlib); "clock" says what to add to this file's times
to get those of the run's first rank; "meta" is JSON and adds to what is known, names of columns' codes included. A block that the
end of the file cuts off is left out; one that is damaged makes the file no trace.
"""

from __future__ import annotations

import json
import struct
import zlib
from pathlib import Path
from typing import Any, BinaryIO, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np
from numpy.typing import NDArray

from ipu_pipe.errors import BadInput, RunFault
from ipu_pipe.trace.events import (
    COUNTER_TYPES,
    EVENT_TYPES,
    FARTHEST_NS,
    KINDS,
    PAYLOADS,
    Counters,
    Events,
    Trace,
    check_columns,
    concatenate_counters,
    concatenate_events,
    refuse_later_schema,
)

SUFFIX = ".trace"
MAGIC = b"ipu_pipe trace 1\n"
HEAD = struct.Struct("<4sIII")
META, EVENTS, COUNTERS, CLOCK = b"meta", b"evnt", b"cntr", b"clck"
ROWS = 1 << 16  # in a block, at most
LEVEL = 1
# A file of zeros is a thousandth of what it holds. More than this is refused, before there is memory for it: 22 million events.
MOST_BYTES = 1 << 30
MOST_METADATA = 1 << 26
ROW_BYTES = sum(np.dtype(kind).itemsize for kind in EVENT_TYPES.values())


class TraceWriter:
    """Writes one file, replacing an earlier one. Raises RunFault if the disk refuses."""

    def __init__(self, path: Path, metadata: Dict[str, Any]) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file: BinaryIO = path.open("wb")
            self._file.write(MAGIC)
        except OSError as error:
            raise RunFault(f"{path}: the trace cannot be written: {error.strerror or error}") from None
        self.add_metadata({"kinds": KINDS, "carried": PAYLOADS, **metadata})

    def add_metadata(self, metadata: Dict[str, Any]) -> None:
        """Add to the metadata, or replace some."""
        self._write(META, 0, json.dumps(metadata).encode())

    def synchronize(self, local_ns: int, offset_ns: int) -> None:
        """Say what to add to this file's times, around `local_ns`, to get those of the first rank."""
        self._write(CLOCK, 1, struct.pack("<qq", local_ns, offset_ns))

    def write_events(self, events: Events) -> None:
        """Write columns at once, in blocks."""
        for begin in range(0, len(events.start), ROWS):
            part = events.select(slice(begin, begin + ROWS))
            self._write(EVENTS, len(part.start), _packed(part, EVENT_TYPES))

    def write_counters(self, counters: Counters) -> None:
        """Write columns at once."""
        if len(counters.time):
            names = json.dumps(counters.names).encode()
            columns = _packed(counters[:4], COUNTER_TYPES)
            self._write(COUNTERS, len(counters.time), struct.pack("<I", len(names)) + names + columns)

    def flush(self) -> None:
        """Hand all that was written to the system, which keeps it if this process is killed."""
        try:
            self._file.flush()
        except OSError as error:
            raise RunFault(f"{self.path}: the trace cannot be written: {error.strerror or error}") from None

    def close(self) -> None:
        """End the file."""
        if not self._file.closed:
            self.flush()
            self._file.close()

    def _write(self, tag: bytes, rows: int, payload: bytes) -> None:
        packed = zlib.compress(payload, LEVEL)
        try:
            self._file.write(HEAD.pack(tag, rows, len(packed), zlib.crc32(packed)) + packed)
        except OSError as error:
            raise RunFault(f"{self.path}: the trace cannot be written: {error.strerror or error}") from None


def _packed(columns: Sequence[Any], types: Dict[str, Any]) -> bytes:
    return b"".join(np.ascontiguousarray(column, kind).tobytes() for column, kind in zip(columns, types.values()))


def _unpacked(payload: bytes, rows: int, types: Dict[str, Any]) -> List[Any]:
    found, at = [], 0
    for kind in types.values():
        size = rows * np.dtype(kind).itemsize
        found.append(np.frombuffer(payload[at : at + size], kind))
        at += size
    if at != len(payload):
        raise ValueError(f"a block of {rows} rows has {len(payload)} bytes, not {at}")
    return found


class _Block(NamedTuple):
    tag: bytes
    rows: int
    payload: bytes


class Allowance:
    """Bytes that may still be unpacked, of all files of a trace."""

    def __init__(self, left: int) -> None:
        self.left = left

    def unpack(self, packed: bytes, most: int) -> bytes:
        """Decompress a block of at most `most` bytes. Raises ValueError where it has more, or more than are left."""
        unpacker, most = zlib.decompressobj(), min(most, self.left)
        payload = unpacker.decompress(packed, most + 1)
        if len(payload) > most:
            raise ValueError("holds too much: record fewer updates (log.trace)")
        if not unpacker.eof:
            raise ValueError("a block ends too early")
        self.take(len(payload))
        return payload

    def take(self, size: int) -> None:
        """Use up some. Raises ValueError where there are not so many left."""
        self.left -= size
        if self.left < 0:
            raise ValueError("holds too much: record fewer updates (log.trace)")


def read_store(path: Path, allowance: Optional[Allowance] = None) -> Trace:
    """What a file holds, by the clock of the run's first rank. Raises BadInput where it is none, or damaged, or where it holds
    more than the `allowance` (None: a run's own file, of whatever size)."""
    notes: List[str] = []
    metadata: Dict[str, Any] = {}
    events: List[Events] = []
    counters: List[Counters] = []
    clock: List[Tuple[int, int]] = []
    try:
        for block in _blocks(path, notes, allowance or Allowance(1 << 62)):
            if block.tag == META:
                metadata.update(json.loads(block.payload))
            elif block.tag == EVENTS:
                events.append(Events(*_unpacked(block.payload, block.rows, EVENT_TYPES)))
            elif block.tag == COUNTERS:
                (length,) = struct.unpack_from("<I", block.payload)
                names = tuple(json.loads(block.payload[4 : 4 + length]))
                columns = _unpacked(block.payload[4 + length :], block.rows, COUNTER_TYPES)
                if not all(isinstance(name, str) for name in names):
                    raise ValueError("the names of counters are not text")
                if len(columns[1]) and not 0 <= int(columns[1].min()) <= int(columns[1].max()) < len(names):
                    raise ValueError("a counter without a name")
                counters.append(Counters(columns[0], columns[1], columns[2], columns[3], names))
            elif block.tag == CLOCK:
                clock.append(struct.unpack("<qq", block.payload))
                if not max(map(abs, clock[-1])) < FARTHEST_NS:
                    raise ValueError("a reading of the clock too far from 0")
        found = _recoded(concatenate_events(events), metadata)
    except (ValueError, struct.error, TypeError, IndexError, RecursionError) as error:
        raise BadInput(f"{path}: cannot be read as a trace: {error}") from None
    values = concatenate_counters(counters)
    check_columns(path, found, values)
    if clock:
        found = found._replace(start=_by_first(found.start, clock), end=_by_first(found.end, clock))
        values = values._replace(time=_by_first(values.time, clock))
    refuse_later_schema(metadata, path)
    return Trace(found, values, metadata, tuple(notes))


def _blocks(path: Path, notes: List[str], allowance: Allowance) -> Iterator[_Block]:
    try:
        file = path.open("rb")
    except OSError as error:
        raise BadInput(f"{path}: cannot be read: {error.strerror or error}") from None
    with file:
        if file.read(len(MAGIC)) != MAGIC:
            raise BadInput(f"{path}: is no trace of ipu_pipe: must begin with {MAGIC.decode().strip()!r}")
        while True:
            at, head = file.tell(), file.read(HEAD.size)
            if not head:
                return
            tag, rows, size, checksum = HEAD.unpack(head) if len(head) == HEAD.size else (b"", 0, 0, 0)
            packed = file.read(size)
            if len(head) < HEAD.size or len(packed) < size:
                notes.append(f"{path}: ends within a block (byte {at}): what it held is left out")
                return
            if zlib.crc32(packed) != checksum:
                raise BadInput(f"{path}: is damaged: the block at byte {at} does not have its checksum")
            try:
                yield _Block(tag, rows, allowance.unpack(packed, MOST_METADATA if tag == META else MOST_BYTES))
            except zlib.error as error:
                raise BadInput(f"{path}: is damaged: the block at byte {at}: {error}") from None


def _recoded(events: Events, metadata: Dict[str, Any]) -> Events:
    """With this version's codes, where another one wrote the file."""
    for column, key, now in (("kind", "kinds", KINDS), ("carries", "carried", PAYLOADS)):
        names, codes = metadata.pop(key, now), getattr(events, column)
        unknown = [name for name in names if name not in now]
        if unknown:
            raise ValueError(f"{key}: {', '.join(map(str, unknown))}: not known to this version")
        if len(codes) and not 0 <= int(codes.min()) <= int(codes.max()) < len(names):
            raise ValueError(f"{column}: a code without a name")
        if tuple(names) != now:
            events = events._replace(**{column: np.array([now.index(name) for name in names], np.int8)[codes]})
    return events


def _by_first(times: NDArray[np.int64], clock: Sequence[Tuple[int, int]]) -> NDArray[np.int64]:
    """Times by the first rank's clock: between two readings the offset goes on a straight line, beyond them it stands."""
    local, offset = np.array(sorted(clock), np.int64).T
    # counted from the first reading: the moments themselves have more digits than a float
    drift = np.interp(times - local[0], local - local[0], offset - offset[0])
    return times + offset[0] + np.rint(drift).astype(np.int64)


def find_store_files(folder: Path) -> Optional[List[Path]]:
    """The files of a run folder, one a rank; None where it has none."""
    found = sorted((folder / "trace").glob(f"*{SUFFIX}"))
    return found or None
