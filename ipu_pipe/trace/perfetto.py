"""Events as Perfetto's own protobuf (*.pftrace), which ui.perfetto.dev opens.

Beside Chrome's JSON it has exact nanoseconds, flows, and one group of tracks for a device, in which
messages that overlap lie in lanes instead of being drawn over one another. A file is a sequence of
packets; a name is written once and then referred to by a number (interned).

    device 1                   a process track
      compute, stage 1         |F0|   wait   |F1|        its slices
      communication            |recv| |recv|             lanes with one name, which the page joins
      communication               |recv|
      memory: activations      ___/---\\___              a counter

Field numbers are of github.com/google/perfetto, protos/perfetto/trace.
"""

from __future__ import annotations

import heapq
import math
import struct
from itertools import count
from pathlib import Path
from typing import Any, Dict, Iterator, List

import numpy as np
from numpy.typing import NDArray

from ipu_pipe.files import atomic_file
from ipu_pipe.trace import events as ev
from ipu_pipe.trace.chrome import describe_stages, find_arrows, find_named_stages, make_name
from ipu_pipe.trace.events import Events, Trace

# fields of a message by their names, in the order in which they are written
PACKET = {"descriptor": 60, "time": 8, "sequence": 10, "interned": 12, "flags": 13, "event": 11}
DESCRIPTOR = {"uuid": 1, "name": 2, "process": 3, "parent": 5, "counter": 8, "rank": 12}
PROCESS = {"pid": 1, "name": 6}
EVENT = {"category": 3, "annotations": 4, "type": 9, "track": 11, "name": 10, "value": 44}
FLOW_FROM = 47
FLOW_TO = 48
ANNOTATION = {"name": 1, "int": 4, "text": 17}
INTERNED = {"category": 1, "name": 2, "argument": 3, "text": 29}
ENTRY = {"number": 1, "text": 2}
SLICE_BEGIN = 1
SLICE_END = 2
COUNTER = 4
UNIT_BYTES = 3
# of the one sequence of packets: that nothing is interned yet, and that what is interned is needed
CLEARED = 1
NEEDS_INTERNED = 2
# of one device, numbers of tracks
TRACKS = 1 << 32

# most integers are of one byte
_SHORT = [bytes([value]) for value in range(1 << 7)]


def write_perfetto(path: Path, trace: Trace) -> None:
    """Write a trace as Perfetto's protobuf. Raise `RunFault` if the disk refuses."""
    # times are unsigned there
    origin = min(0, int(trace.events.start.min(initial=0)), int(trace.counters.time.min(initial=0)))
    with atomic_file(path, "the trace") as temporary, temporary.open("wb") as file:
        writer = _PacketWriter(origin)
        for packet in writer.list_packets(trace):
            # every packet is field 1 of the file
            file.write(b"\x0a" + encode_integer(len(packet)) + packet)


def encode_integer(value: int) -> bytes:
    """Return a whole number as a varint, seven bits a byte; one below 0 in two's complement."""
    if 0 <= value < 1 << 7:
        return _SHORT[value]
    value &= (1 << 64) - 1
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def encode(fields: Dict[str, int], **values: Any) -> bytes:
    """Return a message of the fields that are not None: integers, floats, texts and messages."""
    encoded = b""
    for name, value in values.items():
        if isinstance(value, int):
            encoded += encode_integer(fields[name] << 3) + encode_integer(value)
        elif isinstance(value, float):
            encoded += encode_integer(fields[name] << 3 | 1) + struct.pack("<d", value)
        elif value is not None:
            # a text from JSON may have half a surrogate pair, which UTF-8 cannot hold
            content = value.encode(errors="replace") if isinstance(value, str) else value
            head = encode_integer(fields[name] << 3 | 2)
            encoded += head + encode_integer(len(content)) + content
    return encoded


class _PacketWriter:
    """Makes packets, and interns their texts."""

    def __init__(self, origin: int) -> None:
        self._origin = origin
        self._numbers: Dict[tuple[str, str], int] = {}
        self._annotations: Dict[tuple[str, int | str], bytes] = {}
        self._interned = b""
        self._flags = CLEARED | NEEDS_INTERNED

    def list_packets(self, trace: Trace) -> Iterator[bytes]:
        """Yield the packets of a trace."""
        flows = _list_flows(trace)
        self._named_stages = find_named_stages(trace.events)
        events = trace.events
        devices = {*np.unique(events.device).tolist(), *np.unique(trace.counters.device).tolist()}
        for device in sorted(devices):
            places = np.flatnonzero(events.device == device)
            # 0 is the process of the system's idle threads
            process = encode(PROCESS, pid=device + 1, name=f"device {device}")
            yield self._describe(device * TRACKS + 1, process=process, rank=device)
            yield from self._list_slices(device, events, places, flows)
        for number, series in enumerate(ev.build_counter_series(trace.counters)):
            yield from self._list_counters(number, series)

    def _describe(self, uuid: int, **values: Any) -> bytes:
        descriptor = encode(DESCRIPTOR, uuid=uuid, **values)
        # a reader drops packets that need what is interned before the first one clears it
        return encode(PACKET, descriptor=descriptor, sequence=1)

    def _list_slices(
        self, device: int, events: Events, places: NDArray[np.intp], flows: Dict[int, bytes]
    ) -> Iterator[bytes]:
        """Yield the slices of a device, track by track."""
        is_message = events.is_kind(*ev.COMMUNICATION)[places]
        stages = describe_stages(events.stage[places])
        number = count(2)
        for name, of_track in ((stages, ~is_message), ("communication", is_message)):
            chosen = places[of_track]
            for lane in _divide_lanes(events, chosen[np.lexsort((chosen, events.start[chosen]))]):
                uuid = device * TRACKS + next(number)
                yield self._describe(uuid, name=name, parent=device * TRACKS + 1)
                # an end names no slice: it ends the last one that has begun on its track
                end = encode(EVENT, type=SLICE_END, track=uuid)
                for row, event in zip(lane, events.select(lane).rows()):
                    stage = int(self._named_stages[row])
                    label = make_name(event.kind, event.microbatch, stage, event.peer)
                    yield self._begin_slice(uuid, event, label, flows.get(row, b""))
                    yield self._make_packet(event.end_ns, end)

    def _begin_slice(self, uuid: int, event: ev.Event, name: str, flow: bytes) -> bytes:
        arguments = {
            "stage": event.stage,
            "microbatch": event.microbatch,
            "version": event.version,
            "peer": event.peer,
            "bytes": -1 if event.bytes is None else event.bytes,
            "carries": event.carries or -1,
        }
        annotations = [self._annotate(item) for item in arguments.items() if item[1] != -1]
        encoded = encode(
            EVENT,
            category=self._intern("category", event.kind),
            type=SLICE_BEGIN,
            track=uuid,
            name=self._intern("name", name),
        )
        return self._make_packet(event.start_ns, b"".join([encoded, *annotations, flow]))

    def _annotate(self, argument: tuple[str, int | str]) -> bytes:
        """Return the encoded argument of a slice."""
        # slices repeat their arguments, of which each is encoded once
        encoded = self._annotations.get(argument)
        if encoded is None:
            name, value = argument
            number = self._intern("argument", name)
            text = self._intern("text", value) if isinstance(value, str) else None
            content = value if text is None else None
            annotation = encode(ANNOTATION, name=number, int=content, text=text)
            encoded = self._annotations[argument] = encode(EVENT, annotations=annotation)
        return encoded

    def _list_counters(self, number: int, series: ev.CounterSeries) -> Iterator[bytes]:
        """Yield the values of a device's counters, each on a track of its own."""
        for index, (name, column) in enumerate(series.values.items()):
            # in the upper half of the device's numbers, which its lanes do not reach
            uuid = series.device * TRACKS + (1 << 31) + number * len(ev.MEMORY) + index
            unit = encode({"unit": 3}, unit=UNIT_BYTES) if name.endswith("(bytes)") else b""
            parent = series.device * TRACKS + 1
            yield self._describe(uuid, name=name, parent=parent, counter=unit)
            for time, value in zip(series.times.tolist(), column.tolist()):
                if math.isfinite(value):
                    # a float: `encode` writes an int as a varint, which this field is not
                    event = encode(EVENT, type=COUNTER, track=uuid, value=float(value))
                    yield self._make_packet(time, event)

    def _make_packet(self, time: int, event: bytes) -> bytes:
        interned = self._interned or None
        flags = self._flags
        self._interned = b""
        # only the first packet clears what is interned
        self._flags = NEEDS_INTERNED
        return encode(
            PACKET,
            time=time - self._origin,
            sequence=1,
            interned=interned,
            flags=flags,
            event=event,
        )

    def _intern(self, field: str, text: str) -> int:
        """Return the number of a text; its first packet brings the text."""
        number = self._numbers.get((field, text))
        if number is None:
            number = self._numbers[field, text] = len(self._numbers) + 1
            entry = encode(ENTRY, number=number, text=text)
            self._interned += encode(INTERNED, **{field: entry})
        return number


def _divide_lanes(events: Events, places: NDArray[np.intp]) -> List[List[int]]:
    """Return the events, in the order of their starts, in as few lanes as hold them without an
    overlap.
    """
    lanes: List[List[int]] = []
    # ends of lanes, the least one first
    free: List[tuple[int, int]] = []
    starts = events.start[places].tolist()
    for place, start, end in zip(places.tolist(), starts, events.end[places].tolist()):
        # the lane that ended first, if that is free by now
        lane = heapq.heappop(free)[1] if free and free[0][0] <= start else len(lanes)
        if lane == len(lanes):
            lanes.append([])
        lanes[lane].append(place)
        heapq.heappush(free, (end, lane))
    return lanes


def _list_flows(trace: Trace) -> Dict[int, bytes]:
    """Return the encoded ends of flows by the places of their events."""
    arrows = find_arrows(trace.events, trace.metadata)
    flows: Dict[int, bytes] = {}
    for number, source, target in zip(count(1), arrows.source.tolist(), arrows.target.tolist()):
        for place, field in ((source, FLOW_FROM), (target, FLOW_TO)):
            end = encode_integer(field << 3 | 1) + struct.pack("<Q", number)
            flows[place] = flows.get(place, b"") + end
    return flows
