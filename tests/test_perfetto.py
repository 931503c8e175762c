"""Perfetto's protobuf: read back by a small decoder, and by the published schema where `perfetto` is installed."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any, Dict, Iterator, List, Tuple

import pytest

from ipu_pipe.trace.events import Counter, Counters, Event, Events, Trace
from ipu_pipe.trace.perfetto import write_perfetto

# two messages of device 0 overlap; a time is before 0; an event has no length
EVENTS = [
    Event(0, 0, "forward", 0, -5, 10, 3, None),
    Event(0, 0, "send", 0, 10, 20, -1, 64, 1, "activations"),
    Event(0, 0, "send", 1, 12, 40, -1, 64, 1, "activations"),
    Event(1, 1, "wait", 0, 0, 18, -1, None, 0, "activations"),
    Event(1, 1, "forward", 0, 20, 20, 3, None),
    Event(1, 1, "forward", 1, 20, 30, 3, None),
]
COUNTERS = [
    Counter(1, "weights (bytes)", 0, 7.0),
    Counter(1, "weights (bytes)", 9, 12.5),
    Counter(0, "loss", 3, 0.5),
]
TRACE = Trace(Events.from_rows(EVENTS), Counters.from_rows(COUNTERS), {})
Fields = List[Tuple[int, Any]]


def read_integer(content: bytes, place: int) -> Tuple[int, int]:
    """Return the whole number at a place, of seven bits a byte, and the place behind it."""
    value = shift = 0
    while True:
        byte = content[place]
        place += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, place


def decode(content: bytes) -> Iterator[Tuple[int, Any]]:
    """Yield number and value of each field of a message."""
    place = 0
    while place < len(content):
        key, place = read_integer(content, place)
        number, kind = divmod(key, 8)
        if kind == 0:
            value, place = read_integer(content, place)
            yield number, value
            continue
        size = 8
        if kind == 2:
            size, place = read_integer(content, place)
        yield number, content[place : place + size]
        place += size


class Reader:
    """The tracks of a file: names, and the begins, ends and values on them."""

    def __init__(self, path: Path) -> None:
        # the names of each track and of the one above it
        self.names: Dict[int, Tuple[str, str]] = {0: ("", "")}
        self.points: Dict[int, List[Tuple[int, int, Any]]] = {}
        self.flows: Dict[bytes, List[str]] = {}
        self.texts: Dict[Tuple[int, int], str] = {}
        for number, packet in decode(path.read_bytes()):
            assert number == 1
            self.take(dict(decode(packet)))

    def take(self, packet: Dict[int, Any]) -> None:
        assert packet[10] == 1
        for kind, entry in decode(packet.get(12, b"")):
            fields = dict(decode(entry))
            self.texts[kind, fields[1]] = fields[2].decode()
        if 60 in packet:
            track = dict(decode(packet[60]))
            process = dict(decode(track.get(3, b"")))
            name = (track.get(2) or process[6]).decode()
            self.names[track[1]] = self.names[track.get(5, 0)][1], name
        if 11 in packet:
            fields = [*decode(packet[11])]
            self.take_event(packet[8], fields, dict(fields))

    def take_event(self, time: int, fields: Fields, event: Dict[int, Any]) -> None:
        value: Any = None
        if event[9] == 1:
            annotations = [dict(decode(content)) for number, content in fields if number == 4]
            value = {
                self.texts[3, a[1]]: a[4] if 4 in a else self.texts[29, a[17]] for a in annotations
            }
            value["name"] = self.texts[2, event[10]]
            for number, flow in fields:
                if number in (47, 48):
                    self.flows.setdefault(flow, []).append(value["name"])
        elif event[9] == 4:
            (value,) = struct.unpack("<d", event[44])
        self.points.setdefault(event[11], []).append((time, event[9], value))

    def list_slices(self, device: str, name: str) -> List[List[Tuple[int, int, str]]]:
        """Return the slices of all tracks of a name below a device's, which must not overlap."""
        lanes = []
        for track, points in self.points.items():
            if self.names[track] == (device, name):
                begins, ends = points[::2], points[1::2]
                assert [kind for _, kind, _ in points] == [1, 2] * len(begins)
                times = [time for time, _, _ in points]
                assert times == sorted(times)
                lanes.append([(b[0], e[0], b[2]["name"]) for b, e in zip(begins, ends)])
        return lanes


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_perfetto(tmp_path / "run.pftrace", TRACE)
    return tmp_path / "run.pftrace"


def test_what_was_written_is_read_back(path: Path) -> None:
    reader = Reader(path)
    # times count from the least one, which is below 0
    assert reader.list_slices("device 0", "compute, stage 0") == [[(0, 15, "F0")]]
    assert reader.list_slices("device 0", "communication") == [
        [(15, 25, "send 0")],
        [(17, 45, "send 1")],
    ]
    assert reader.list_slices("device 1", "compute, stage 1") == [
        [(5, 23, "wait for device 0"), (25, 25, "F0"), (25, 35, "F1")]
    ]
    assert sorted(map(tuple, reader.flows.values())) == [("send 0", "F0"), ("send 1", "F1")]
    values = {
        reader.names[t][1]: [p[::2] for p in points]
        for t, points in reader.points.items()
        if points[0][1] == 4
    }
    assert values == {"weights (bytes)": [(5, 7.0), (14, 12.5)], "loss": [(8, 0.5)]}
    events = [event for points in reader.points.values() for *_, event in points if event]
    wanted = {"stage": 0, "microbatch": 0, "peer": 1, "bytes": 64, "carries": "activations"}
    assert {**wanted, "name": "send 0"} in events


def test_the_published_schema_has_every_field(path: Path) -> None:
    """`pip install perfetto` brings the schema."""
    schema = pytest.importorskip("perfetto.protos.perfetto.trace.perfetto_trace_pb2")
    unknown = pytest.importorskip("google.protobuf.unknown_fields")
    trace = schema.Trace()
    trace.ParseFromString(path.read_bytes())
    messages = [trace]
    for message in messages:
        assert not len(unknown.UnknownFieldSet(message))
        for field, value in message.ListFields():
            if field.type == field.TYPE_MESSAGE:
                messages += [*value] if field.is_repeated else [value]
    kinds = [packet.track_event.type for packet in trace.packet if packet.HasField("track_event")]
    slices = schema.TrackEvent
    assert kinds.count(slices.TYPE_SLICE_BEGIN) == kinds.count(slices.TYPE_SLICE_END) == len(EVENTS)
    assert kinds.count(slices.TYPE_COUNTER) == len(COUNTERS)
