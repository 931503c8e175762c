"""Native trace format: columns in compressed blocks, written during a run, so that the file of a
killed run can be read.

    ipu_pipe trace 1\\n  block  block  ...           block:  tag (4 bytes), rows, bytes, checksum (each uint32), zlib's bytes

The blocks of events and counters hold their columns one after another; a block of counters begins
with the length of a JSON list of names, indexed by its second column. "clck" gives what to add to
this file's times to get those of the run's first rank. "meta" is JSON and extends the metadata,
which also name the codes of the columns. A block that the end of the file cuts off is left out; a
block with a wrong checksum makes the file unreadable.
"""

from __future__ import annotations

import json
import struct
import zlib
from pathlib import Path
from typing import Any, BinaryIO, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from ipu_pipe.errors import BadInput, guard_writing
from ipu_pipe.files import open_file
from ipu_pipe.trace.events import (
    EVENT_TYPES,
    FARTHEST_NS,
    KINDS,
    PAYLOADS,
    Counters,
    Events,
    Trace,
    check_trace,
    concatenate_counters,
    concatenate_events,
)

SUFFIX = ".trace"
MAGIC = b"ipu_pipe trace 1\n"
HEAD = struct.Struct("<4sIII")
META = b"meta"
EVENTS = b"evnt"
COUNTERS = b"cntr"
CLOCK = b"clck"
COUNTER_TYPES = (np.int32, np.uint16, np.int64, np.float64)
MAX_BLOCK_ROWS = 1 << 16
ZLIB_LEVEL = 1


class TraceWriter:
    """A trace file that is being written; it replaces an earlier one. All methods raise `RunFault`
    if the disk refuses.
    """

    def __init__(self, path: Path, metadata: dict[str, Any]) -> None:
        self.path = path
        with guard_writing(path, "the trace"):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file: BinaryIO = path.open("wb")
            self._file.write(MAGIC)
        # with the names of the codes, which another version may number otherwise
        self._write(META, 0, json.dumps({"kinds": KINDS, "carried": PAYLOADS, **metadata}).encode())

    def synchronize(self, local_ns: int, offset_ns: int) -> None:
        """Record that around the local time `local_ns` the first rank's clock is `offset_ns` ahead
        of this one's.
        """
        self._write(CLOCK, 1, struct.pack("<qq", local_ns, offset_ns))

    def write_events(self, events: Events) -> None:
        """Write events, in blocks."""
        for begin in range(0, len(events.start), MAX_BLOCK_ROWS):
            part = events.select(slice(begin, begin + MAX_BLOCK_ROWS))
            self._write(EVENTS, len(part.start), b"".join(column.tobytes() for column in part))

    def write_counters(self, counters: Counters) -> None:
        """Write counters as one block."""
        if len(counters.time):
            codes = {name: code for code, name in enumerate(dict.fromkeys(counters.name.tolist()))}
            text = json.dumps(list(codes)).encode()
            columns = counters._replace(
                name=np.array([codes[name] for name in counters.name.tolist()], np.uint16)
            )
            payload = (
                struct.pack("<I", len(text))
                + text
                + b"".join(column.tobytes() for column in columns)
            )
            self._write(COUNTERS, len(counters.time), payload)

    def flush(self) -> None:
        """Flush the written data to the operating system, which keeps it if this process is
        killed.
        """
        with guard_writing(self.path, "the trace"):
            self._file.flush()

    def close(self) -> None:
        """Flush and close the file."""
        with guard_writing(self.path, "the trace"):
            self._file.close()

    def _write(self, tag: bytes, rows: int, payload: bytes) -> None:
        # fast rather than small: it is written while the run trains
        packed = zlib.compress(payload, ZLIB_LEVEL)
        with guard_writing(self.path, "the trace"):
            self._file.write(HEAD.pack(tag, rows, len(packed), zlib.crc32(packed)) + packed)


def find_store_files(folder: Path) -> list[Path]:
    """Return the trace files of a run's folder, one per rank."""
    return sorted((folder / "trace").glob(f"*{SUFFIX}"))


def read_store(path: Path, most_bytes: int = 1 << 62) -> Trace:
    """Read a trace file; its times are those of the run's first rank. Raise `BadInput` if it is not
    a trace, is damaged, or unpacks to more than `most_bytes` (by default no limit, for a run's own
    file).
    """
    notes: list[str] = []
    metadata: dict[str, Any] = {}
    events: list[Events] = []
    counters: list[Counters] = []
    clock: list[tuple[int, int]] = []
    try:
        for tag, rows, payload in _read_blocks(path, notes, most_bytes):
            if tag == META:
                metadata.update(json.loads(payload))
            elif tag == EVENTS:
                events.append(Events(*_unpack(payload, rows, [*EVENT_TYPES.values()])))
            elif tag == COUNTERS:
                begin = 4 + struct.unpack_from("<I", payload)[0]
                names = np.array([str(name) for name in json.loads(payload[4:begin])], object)
                device, codes, times, values = _unpack(payload[begin:], rows, COUNTER_TYPES)
                counters.append(Counters(device, names[codes], times, values))
            elif tag == CLOCK:
                clock.append(struct.unpack("<qq", payload))
        trace = Trace(
            concatenate_events(events), concatenate_counters(counters), metadata, tuple(notes)
        )
        if max((abs(value) for reading in clock for value in reading), default=0) >= FARTHEST_NS:
            raise ValueError("a reading of the clock is too far from 0")
        trace = trace._replace(events=_map_codes(trace.events, metadata))
    # a `BadInput` is a ValueError, and names the file already
    except BadInput:
        raise
    # an IndexError, for example, of a counter whose code has no name
    except (ValueError, struct.error, TypeError, IndexError, RecursionError, zlib.error) as error:
        raise BadInput(f"{path}: cannot be read as a trace: {error}") from None
    check_trace(path, trace.events, trace.counters, metadata)
    return _shift_times(trace, clock) if clock else trace


def _unpack(payload: bytes, rows: int, types: Sequence[Any]) -> list[Any]:
    """Return the columns of a block."""
    ends = np.cumsum([rows * np.dtype(kind).itemsize for kind in types]).tolist()
    if len(payload) != ends[-1]:
        raise ValueError(f"a block of {rows} rows has {len(payload)} bytes, not {ends[-1]}")
    return [
        np.frombuffer(payload[begin:end], kind) for begin, end, kind in zip([0, *ends], ends, types)
    ]


def _read_blocks(
    path: Path, notes: list[str], most_bytes: int
) -> Iterator[tuple[bytes, int, bytes]]:
    """Yield the tag, the number of rows and the unpacked bytes of each block. Raise ValueError for
    more than `most_bytes`.
    """
    try:
        file = open_file(path)
    except OSError as error:
        raise BadInput(f"{path}: cannot be read: {error.strerror or error}") from None
    with file:
        if file.read(len(MAGIC)) != MAGIC:
            raise BadInput(
                f"{path}: is not a trace of ipu_pipe: must begin with {MAGIC.decode().strip()!r}"
            )
        while True:
            offset = file.tell()
            head = file.read(HEAD.size)
            if not head:
                return
            # a head that is cut off asks for one byte, which is not there, and so counts as a cut
            # block
            tag, rows, size, checksum = (
                HEAD.unpack(head) if len(head) == HEAD.size else (b"", 0, 1, 0)
            )
            packed = file.read(size)
            if len(packed) < size:
                notes.append(f"{path}: ends within a block (byte {offset}), which is left out")
                return
            # before unpacking: zlib's own errors would not say where
            if zlib.crc32(packed) != checksum:
                raise BadInput(
                    f"{path}: is damaged: the block at byte {offset} does not have its checksum"
                )
            # unpack no more than is allowed: a file of zeros unpacks to a thousand times its size
            payload = zlib.decompressobj().decompress(packed, most_bytes + 1)
            most_bytes -= len(payload)
            if most_bytes < 0:
                raise ValueError("exceeds the size limit: record fewer updates (log.trace)")
            yield tag, rows, payload


def _map_codes(events: Events, metadata: dict[str, Any]) -> Events:
    """Return the events of a file with this version's codes, and remove the names of the codes from
    the metadata.
    """
    for column, key, names in (("kind", "kinds", KINDS), ("carries", "carried", PAYLOADS)):
        file_names = metadata.pop(key, names)
        codes = getattr(events, column)
        unknown = [name for name in file_names if name not in names]
        if unknown:
            raise ValueError(f"{key}: {', '.join(map(str, unknown))}: not known to this version")
        # NumPy would take a negative code from the end of the names
        if (codes < 0).any():
            raise ValueError(f"{column}: a code without a name")
        if tuple(file_names) != names or (codes >= len(names)).any():
            events = events._replace(
                **{column: np.array([names.index(name) for name in file_names], np.int8)[codes]}
            )
    return events


def _shift_times(trace: Trace, clock: Sequence[tuple[int, int]]) -> Trace:
    """Return a trace by the first rank's clock, from readings (local time, offset): the offset is
    interpolated between two readings and constant before the first and after the last."""
    # sorted, as np.interp needs rising times
    local, offset = np.array(sorted(clock), np.int64).T

    def shift(times: NDArray[np.int64]) -> NDArray[np.int64]:
        # take times relative to the first reading, because a float64 does not hold all digits of
        # the times themselves
        drift = np.interp(times - local[0], local - local[0], offset - offset[0])
        return times + offset[0] + np.rint(drift).astype(np.int64)

    events = trace.events
    counters = trace.counters
    events = events._replace(start=shift(events.start), end=shift(events.end))
    return trace._replace(events=events, counters=counters._replace(time=shift(counters.time)))
