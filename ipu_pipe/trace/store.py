"""Our own trace file: columns in compressed blocks, written as a run goes on, so that the file of a killed run can be read.

    ipu_pipe trace 1\\n  block  block  ...           block:  tag (4 bytes), rows, bytes, checksum (each uint32), zlib's bytes

The blocks of events and counters hold their columns one after another. "clck" says what to add to this file's times to get those
of the run's first rank. "meta" is JSON and extends the metadata, which also name the codes of the columns. A block that the end
of the file cuts off is left out; a block with a wrong checksum makes the file unreadable.
"""

from __future__ import annotations

import json
import struct
import zlib
from pathlib import Path
from typing import Any, BinaryIO, Dict, Iterator, List, Optional, Sequence, Tuple

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
ROWS = 1 << 16  # of a block, at most
LEVEL = 1  # of zlib
ROW_BYTES = sum(np.dtype(kind).itemsize for kind in EVENT_TYPES.values())
# A file of zeros is a thousandth of what it unpacks to. More than this is refused before memory is taken for it.
MOST_BYTES = 1 << 30  # 22 million events
MOST_METADATA = 1 << 26


class TraceWriter:
    """A trace file that is being written; it replaces an earlier one. All methods raise `RunFault` if the disk refuses."""

    def __init__(self, path: Path, metadata: Dict[str, Any]) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file: BinaryIO = path.open("wb")
            self._file.write(MAGIC)
        except OSError as error:
            raise self._make_fault(error) from None
        self.add_metadata({"kinds": KINDS, "carried": PAYLOADS, **metadata})

    def add_metadata(self, metadata: Dict[str, Any]) -> None:
        """Add keys to the metadata, or replace their values."""
        self._write(META, 0, json.dumps(metadata).encode())

    def synchronize(self, local_ns: int, offset_ns: int) -> None:
        """Record that around the local time `local_ns` the first rank's clock is `offset_ns` ahead of this one's."""
        self._write(CLOCK, 1, struct.pack("<qq", local_ns, offset_ns))

    def write_events(self, events: Events) -> None:
        """Write events, in blocks."""
        for begin in range(0, len(events.start), ROWS):
            part = events.select(slice(begin, begin + ROWS))
            self._write(EVENTS, len(part.start), _pack(part, EVENT_TYPES))

    def write_counters(self, counters: Counters) -> None:
        """Write counters as one block."""
        if len(counters.time):
            names = json.dumps(counters.names).encode()
            payload = struct.pack("<I", len(names)) + names + _pack(counters[:4], COUNTER_TYPES)
            self._write(COUNTERS, len(counters.time), payload)

    def flush(self) -> None:
        """Hand what was written to the operating system, which keeps it if this process is killed."""
        try:
            self._file.flush()
        except OSError as error:
            raise self._make_fault(error) from None

    def close(self) -> None:
        """Flush and close the file."""
        if not self._file.closed:
            self.flush()
            self._file.close()

    def _write(self, tag: bytes, rows: int, payload: bytes) -> None:
        packed = zlib.compress(payload, LEVEL)
        try:
            self._file.write(HEAD.pack(tag, rows, len(packed), zlib.crc32(packed)) + packed)
        except OSError as error:
            raise self._make_fault(error) from None

    def _make_fault(self, error: OSError) -> RunFault:
        return RunFault(f"{self.path}: the trace cannot be written: {error.strerror or error}")


class Allowance:
    """How many bytes may still be unpacked, of all files of a trace."""

    def __init__(self, left: int) -> None:
        self.left = left

    def unpack(self, packed: bytes, most: int) -> bytes:
        """Decompress a block of at most `most` bytes. Raise ValueError if it has more, or more than are left."""
        unpacker, most = zlib.decompressobj(), min(most, self.left)
        payload = unpacker.decompress(packed, most + 1)
        self.take(len(payload) if len(payload) <= most else self.left + 1)
        if not unpacker.eof:
            raise ValueError("a block ends too early")
        return payload

    def take(self, size: int) -> None:
        """Use up `size` bytes. Raise ValueError if fewer are left."""
        self.left -= size
        if self.left < 0:
            raise ValueError("holds too much: record fewer updates (log.trace)")


def read_store(path: Path, allowance: Optional[Allowance] = None) -> Trace:
    """Read a trace file; its times are those of the run's first rank. Raise `BadInput` if it is not a trace, is damaged, or holds
    more than the `allowance` (None: no limit, for a run's own file)."""
    notes: List[str] = []
    metadata: Dict[str, Any] = {}
    events: List[Events] = []
    counters: List[Counters] = []
    clock: List[Tuple[int, int]] = []
    try:
        for tag, rows, payload in _read_blocks(path, notes, allowance or Allowance(1 << 62)):
            if tag == META:
                metadata.update(json.loads(payload))
            elif tag == EVENTS:
                events.append(Events(*_unpack(payload, rows, EVENT_TYPES)))
            elif tag == COUNTERS:
                (length,) = struct.unpack_from("<I", payload)
                names = tuple(map(str, json.loads(payload[4 : 4 + length])))
                device, name, time, value = _unpack(payload[4 + length :], rows, COUNTER_TYPES)
                counters.append(Counters(device, name, time, value, names))
                check_columns(path, Events.from_rows([]), counters[-1])
            elif tag == CLOCK:
                clock.append(struct.unpack("<qq", payload))
                if max(map(abs, clock[-1])) >= FARTHEST_NS:
                    raise ValueError("a reading of the clock is too far from 0")
        all_events = _map_codes(concatenate_events(events), metadata)
    except BadInput:
        raise
    except (ValueError, struct.error, TypeError, IndexError, RecursionError, zlib.error) as error:
        raise BadInput(f"{path}: cannot be read as a trace: {error}") from None
    all_counters = concatenate_counters(counters)
    check_columns(path, all_events, all_counters)
    if clock:
        start, end, time = (_convert(times, clock) for times in (all_events.start, all_events.end, all_counters.time))
        all_events, all_counters = all_events._replace(start=start, end=end), all_counters._replace(time=time)
    refuse_later_schema(metadata, path)
    return Trace(all_events, all_counters, metadata, tuple(notes))


def find_store_files(folder: Path) -> List[Path]:
    """Return the trace files of a run's folder, one a rank."""
    return sorted((folder / "trace").glob(f"*{SUFFIX}"))


def _pack(columns: Sequence[Any], types: Dict[str, Any]) -> bytes:
    return b"".join(np.ascontiguousarray(column, kind).tobytes() for column, kind in zip(columns, types.values()))


def _unpack(payload: bytes, rows: int, types: Dict[str, Any]) -> List[Any]:
    sizes = [rows * np.dtype(kind).itemsize for kind in types.values()]
    if len(payload) != sum(sizes):
        raise ValueError(f"a block of {rows} rows has {len(payload)} bytes, not {sum(sizes)}")
    ends = np.cumsum(sizes).tolist()
    return [np.frombuffer(payload[end - size : end], kind) for size, end, kind in zip(sizes, ends, types.values())]


def _read_blocks(path: Path, notes: List[str], allowance: Allowance) -> Iterator[Tuple[bytes, int, bytes]]:
    """Yield the tag, the number of rows and the unpacked bytes of each block."""
    try:
        file = path.open("rb")
    except OSError as error:
        raise BadInput(f"{path}: cannot be read: {error.strerror or error}") from None
    with file:
        if file.read(len(MAGIC)) != MAGIC:
            raise BadInput(f"{path}: is not a trace of ipu_pipe: must begin with {MAGIC.decode().strip()!r}")
        while True:
            at, head = file.tell(), file.read(HEAD.size)
            if not head:
                return
            tag, rows, size, checksum = HEAD.unpack(head) if len(head) == HEAD.size else (b"", 0, 0, 0)
            packed = file.read(size)
            if len(head) < HEAD.size or len(packed) < size:
                notes.append(f"{path}: ends within a block (byte {at}), which is left out")
                return
            if zlib.crc32(packed) != checksum:
                raise BadInput(f"{path}: is damaged: the block at byte {at} does not have its checksum")
            yield tag, rows, allowance.unpack(packed, MOST_METADATA if tag == META else MOST_BYTES)


def _map_codes(events: Events, metadata: Dict[str, Any]) -> Events:
    """Return events of a file of another version with this version's codes, and take the names of the codes out of the
    metadata."""
    for column, key, names in (("kind", "kinds", KINDS), ("carries", "carried", PAYLOADS)):
        names_then, codes = metadata.pop(key, names), getattr(events, column)
        unknown = [name for name in names_then if name not in names]
        if unknown:
            raise ValueError(f"{key}: {', '.join(map(str, unknown))}: not known to this version")
        if ((codes < 0) | (codes >= len(names_then))).any():
            raise ValueError(f"{column}: a code without a name")
        if tuple(names_then) != names:
            code_now = np.array([names.index(name) for name in names_then], np.int8)
            events = events._replace(**{column: code_now[codes]})
    return events


def _convert(times: NDArray[np.int64], clock: Sequence[Tuple[int, int]]) -> NDArray[np.int64]:
    """Return times by the first rank's clock, from readings (local time, offset): the offset is interpolated between two readings
    and constant before the first and after the last."""
    local, offset = np.array(sorted(clock), np.int64).T
    # relative to the first reading, because a float64 does not hold all digits of the times themselves
    drift = np.interp(times - local[0], local - local[0], offset - offset[0])
    return times + offset[0] + np.rint(drift).astype(np.int64)
