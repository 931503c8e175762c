"""Events as Chakra's execution traces (*.et), which network simulators such as ASTRA-sim play.

A trace is a graph of nodes for each rank, RUN.0.et, RUN.1.et, ...; a simulator gives messages times
of its own, so a graph has needs and no waits:

    rank 0   F0 ---> F1 ---> B0      passes, updates and averages in their order
              \\       \\       |
               send    send   recv   a send needs what made its payload, a pass what it receives

A receive needs what the device computes before it, so that a simulator with one message at a time
does not wait in it too soon. All needs are data dependencies: not every reader of Chakra's regards
control dependencies. The two ends of a message have one tag.

Field numbers and names are of github.com/mlcommons/chakra 1.0, schema/protobuf/et_def.proto and
src/feeder.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Tuple

import numpy as np
from numpy.typing import NDArray

from ipu_pipe.errors import BadInput
from ipu_pipe.files import atomic_file
from ipu_pipe.schedule.actions import Kind
from ipu_pipe.trace import events as ev
from ipu_pipe.trace.chrome import (
    PAYLOAD_OF_KIND,
    find_arrows,
    find_named_stages,
    make_name,
    match_first,
)
from ipu_pipe.trace.events import PAYLOAD_CODE, Trace
from ipu_pipe.trace.perfetto import encode, encode_integer

VERSION = "1.0.0"
# fields of a message by their names, in the order in which they are written
NODE = {"id": 1, "name": 2, "type": 3, "needs": 5, "start": 6, "duration": 7, "inputs": 8}
NODE["attribute"] = 10
ATTRIBUTE = {"name": 1, "int32": 7, "int64": 9, "bool": 27, "string": 29}
METADATA = 1
COMPUTE = 4
SEND = 5
RECV = 6
COLLECTIVE = 7
ALL_REDUCE = 0
# of PyTorch's execution traces, where readers find the ranks of each process group
GROUPS = "## process_group:init ##"
# a norm of a stage's gradients
NORM_BYTES = 8


# where a node stands among those of its rank: (start, number of the event in their order, order)
Place = Tuple[int, int, int]


class Node(NamedTuple):
    """A node of a rank. `place`: where it stands; `needs`: the places of others; `attributes`: the
    type and value of each name.
    """

    place: Place
    name: str
    type: int
    needs: list[Place]
    duration_ns: int
    attributes: Dict[str, tuple[str, int | str]]


def write_chakra(path: Path, trace: Trace) -> list[Path]:
    """Write a file for each device: of RUN.et RUN.0.et, RUN.1.et, ... Return their paths. Raise
    `BadInput` for a trace whose collectives are of unknown kinds, `RunFault` if the disk refuses.
    """
    if trace.events.is_kind(ev.COLLECTIVE).any():
        raise BadInput(
            f"{path}: cannot be written: the trace does not say of which kind its collectives are"
        )
    graph = _Graph(trace)
    paths = []
    for device, nodes in graph.build_nodes().items():
        paths.append(path.with_suffix(f".{device}{path.suffix}"))
        with atomic_file(paths[-1], "the trace") as temporary, temporary.open("wb") as file:
            for message in (encode({"version": 1}, version=VERSION), *_encode_nodes(nodes, graph)):
                # a protobuf message has no end of its own, so its length precedes it
                file.write(encode_integer(len(message)) + message)
    return paths


class _Graph:
    """The nodes of all devices, and the groups of their collectives."""

    def __init__(self, trace: Trace) -> None:
        self.events = events = trace.events
        self.origin = int(events.start.min())
        self.groups: list[list[int]] = []
        self._named = find_named_stages(events)
        # norms of all stages are exchanged in an update; what waits for them is their exchange
        is_norm = events.is_kind(ev.WAIT) & (events.carries == PAYLOAD_CODE["norms"])
        is_average = events.is_kind(Kind.AVERAGE.word)
        # of one replica, within which norms are exchanged
        devices = max(trace.metadata.get("device_of_stage") or [0]) + 1
        self._group = np.full(len(events.start), -1)
        self._number_groups(is_average, events.stage)
        self._number_groups(is_norm & (events.peer < 0), events.device // devices)
        is_ordered = events.is_kind(*ev.COMPUTE, *ev.OUTSIDE) | (self._group >= 0) | is_average
        # the number of each event by start and, as an event of no length comes first, by end
        self._number = np.empty(len(events.start), np.intp)
        self._number[np.lexsort((events.end, events.start))] = np.arange(len(events.start))
        self._ordered: Dict[int, NDArray[np.intp]] = {}
        for device, places in ev.group_indices(events.device):
            of_device = places[is_ordered[places]]
            self._ordered[device] = of_device[np.argsort(self._number[of_device])]
        self._arrows = find_arrows(events, trace.metadata)
        # the place of what a device does before an event, as a list of one or none
        self._before: Dict[int, list[Place]] = {}

    def _number_groups(self, is_collective: NDArray[np.bool_], key: NDArray[np.int32]) -> None:
        """Number the groups of devices that take part in collectives with one key."""
        for value in np.unique(key[is_collective]).tolist():
            chosen = is_collective & (key == value)
            devices, counts = np.unique(self.events.device[chosen], return_counts=True)
            ranks = devices.tolist()
            # the other replicas of a simulated one are not in the trace, and a rank of a trace that
            # was cut may miss some
            if len(ranks) > 1 and len({*counts.tolist()}) == 1:
                if ranks not in self.groups:
                    self.groups.append(ranks)
                self._group[chosen] = self.groups.index(ranks)

    def build_nodes(self) -> Dict[int, List[Node]]:
        """Return the nodes of each device, in an order in which none needs a later one."""
        nodes: Dict[int, List[Node]] = {device: [] for device in self._ordered}
        ordered: Dict[int, Node] = {}
        for device, places in self._ordered.items():
            before: list[Place] = []
            for index, event in zip(places.tolist(), self.events.select(places).rows()):
                self._before[index] = before
                node = self._make_node(index, event, before)
                before = [node.place]
                ordered[index] = node
                nodes[device].append(node)
        self._add_messages(nodes, ordered)
        return {device: sorted(of_device) for device, of_device in nodes.items()}

    def _make_node(self, index: int, event: ev.Event, before: list[Place]) -> Node:
        group = int(self._group[index])
        is_host = event.kind in ev.OUTSIDE
        attributes: Dict[str, tuple[str, int | str]] = {"is_cpu_op": ("bool", int(is_host))}
        if group >= 0:
            size = NORM_BYTES if event.kind == ev.WAIT else event.bytes or 0
            attributes["comm_type"] = ("int64", ALL_REDUCE)
            attributes["comm_size"] = ("int64", size)
            attributes["pg_name"] = ("string", str(group))
        name = make_name(event.kind, event.microbatch, int(self._named[index]), event.peer)
        return Node(
            (event.start_ns, int(self._number[index]), 0),
            f"norms {event.microbatch}" if event.kind == ev.WAIT else name,
            COMPUTE if group < 0 else COLLECTIVE,
            [*before],
            event.end_ns - event.start_ns,
            attributes,
        )

    def _add_messages(self, nodes: Dict[int, List[Node]], ordered: Dict[int, Node]) -> None:
        """Add the sends and receives, and what they and the passes need."""
        events = self.events
        makers = self._find_makers()
        for tag, (source, target) in enumerate(
            zip(self._arrows.source.tolist(), self._arrows.target.tolist())
        ):
            sender = int(events.device[source])
            receiver = int(events.device[target])
            taker = self._find_taker(target, ordered)
            maker = int(makers[source])
            # the passes of one device need their order alone; an arrow back in time, of a damaged
            # trace, would make a node need itself
            is_back = taker >= 0 and maker >= 0 and events.start[taker] < events.start[maker]
            if sender == receiver or is_back:
                continue
            microbatch = int(events.microbatch[source])
            attributes: Dict[str, tuple[str, int | str]] = {
                "is_cpu_op": ("bool", 0),
                "comm_src": ("int32", sender),
                "comm_dst": ("int32", receiver),
                "comm_size": ("int64", max(int(events.bytes[source]), 0)),
                "comm_tag": ("int32", tag),
            }
            # where no sends are recorded a pass stands for its own, and has its time already
            took = int((events.end - events.start)[source]) * bool(events.is_kind("send")[source])
            place = (int(events.start[source]), int(self._number[source]), 1 + tag)
            needs = [ordered[maker].place] if maker >= 0 else []
            # a send may start as its pass does, and end sooner
            place = max([place, *((start, number, 1 + tag) for start, number, _ in needs)])
            nodes[sender].append(Node(place, f"send {microbatch}", SEND, needs, took, attributes))
            # [1] just before the pass that takes it, or where it was taken
            at = target if taker < 0 else taker
            place = (int(events.start[at]), int(self._number[at]), tag - len(self._arrows.source))
            needs = [*self._before.get(taker, [])]
            nodes[receiver].append(Node(place, f"recv {microbatch}", RECV, needs, 0, attributes))
            if taker >= 0:
                ordered[taker].needs.append(place)

    def _find_makers(self) -> NDArray[np.int64]:
        """Return for each event the one that makes what it sends: of a send the pass of its stage
        and microbatch, or else the one before; of a pass itself.
        """
        events = self.events
        makers = np.arange(len(events.start))
        sends = np.flatnonzero(events.is_kind("send"))
        passes = np.flatnonzero(PAYLOAD_OF_KIND[events.kind] > 0)
        columns = (events.device, events.stage, events.microbatch)
        matched = match_first(
            [*(column[sends] for column in columns), events.carries[sends]],
            [*(column[passes] for column in columns), PAYLOAD_OF_KIND[events.kind[passes]]],
            events.start[passes],
        )
        makers[sends] = np.append(passes, -1)[matched]
        # weights and norms are of no pass
        for send in sends[matched < 0].tolist():
            places = self._ordered[int(events.device[send])]
            before = np.searchsorted(events.start[places], events.start[send], side="right") - 1
            makers[send] = places[before] if before >= 0 else -1
        return makers

    def _find_taker(self, target: int, ordered: Dict[int, Node]) -> int:
        """Return the event that needs what arrives at `target`: a pass, or what follows a receive;
        -1 if nothing follows.
        """
        if target in ordered:
            return target
        places = self._ordered[int(self.events.device[target])]
        after = np.searchsorted(self.events.start[places], self.events.end[target])
        return int(places[after]) if after < len(places) else -1


def _encode_nodes(nodes: List[Node], graph: _Graph) -> List[bytes]:
    """Return the encoded nodes of a rank, numbered in their order, behind the process groups."""
    listed = [{"pg_name": str(n), "ranks": ranks} for n, ranks in enumerate(graph.groups)]
    inputs = encode({"values": 1}, values=f"['{json.dumps(listed)}']")
    encoded = [encode(NODE, id=0, name=GROUPS, type=METADATA, inputs=inputs)] if listed else []
    # from 1, as the node of the groups is 0
    numbers = {node.place: number for number, node in enumerate(nodes, 1)}
    for node in nodes:
        needs = b"".join(encode_integer(numbers[place]) for place in dict.fromkeys(node.needs))
        attributes: List[Any] = [
            encode(ATTRIBUTE, **{"name": name, kind: value})
            for name, (kind, value) in node.attributes.items()
        ]
        head = encode(
            NODE,
            id=numbers[node.place],
            name=node.name,
            type=node.type,
            needs=needs or None,
            # Chakra counts microseconds
            start=(node.place[0] - graph.origin) // 1000,
            duration=round(node.duration_ns / 1000),
        )
        parts = [encode(NODE, attribute=attribute) for attribute in attributes]
        encoded.append(head + b"".join(parts))
    return encoded
