"""Chakra's execution traces: played as a network simulator plays them, the graph of a modelled trace has its span."""

from __future__ import annotations

import heapq
import json
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Tuple

import pytest

from ipu_pipe.errors import BadInput
from ipu_pipe.schedule.clock import Costs
from ipu_pipe.trace.chakra import write_chakra
from ipu_pipe.trace.events import Counters, Event, Events, Trace
from ipu_pipe.trace.reading import read_trace
from tests.support.modelled import play_method
from tests.support.runs import list_faults
from tests.test_perfetto import decode, read_integer

SEND, RECV, COLLECTIVE = 5, 6, 7
METHODS = {
    "gpipe": {}, "pipedream": {}, "pipedream_flush": {}, "pipedream_2bw": {}, "zb_h1": {}, "zbv": {}, "dualpipe_v": {},
    "interleaved_1f1b": {"stages_per_device": 2},
}  # fmt: skip


class GraphNode(NamedTuple):
    """Hold a node as it was read."""

    name: str
    type: int
    needs: Tuple[int, ...]
    microseconds: int
    attributes: Dict[str, Any]
    inputs: str


def read_packed(content: bytes) -> Tuple[int, ...]:
    """Return whole numbers that follow one another."""
    numbers, place = [], 0
    while place < len(content):
        number, place = read_integer(content, place)
        numbers.append(number)
    return tuple(numbers)


def read_graph(path: Path) -> Dict[int, GraphNode]:
    """Return the nodes of a file, whose messages each have their length before them."""
    content, place, messages = path.read_bytes(), 0, []
    while place < len(content):
        length, place = read_integer(content, place)
        messages.append([*decode(content[place : place + length])])
        place += length
    assert messages[0] == [(1, b"1.0.0")]
    nodes = {}
    for message in messages[1:]:
        fields = dict(message)
        attributes = {}
        for number, value in message:
            if number == 10:
                (_, name), (_, of_name) = decode(value)
                attributes[name.decode()] = of_name
        inputs = dict(decode(fields.get(8, b""))).get(1, b"").decode()
        needs = read_packed(fields.get(5, b""))
        assert all(need in nodes for need in needs)
        nodes[fields[1]] = GraphNode(
            fields[2].decode(), fields[3], needs, fields.get(7, 0), attributes, inputs
        )
    return nodes


def play(graphs: Dict[int, Dict[int, GraphNode]], latency: int, messages: int) -> int:
    """Play the graphs of all ranks and return the end of the last node.

    A rank computes one node at a time, and has at most so many messages of its own under way. A
    message arrives `latency` after its send was issued.
    """
    time = 0
    done: Dict[Tuple[int, int], int] = {}
    arrived: Dict[int, int] = {}
    under_way: List[Tuple[int, Tuple[int, int]]] = []
    waiting = {rank: dict(nodes) for rank, nodes in graphs.items()}
    receives: List[Tuple[int, int]] = []
    busy = {(rank, what): 0 for rank in graphs for what in ("compute", "message")}
    while any(waiting.values()) or under_way or receives:
        for rank, nodes in waiting.items():
            for number, node in [*nodes.items()]:
                what = "message" if node.type in (SEND, RECV) else "compute"
                is_free = busy[rank, what] < (messages if what == "message" else 1)
                if not is_free or any((rank, need) not in done for need in node.needs):
                    continue
                busy[rank, what] += 1
                del nodes[number]
                if node.type == RECV:
                    receives.append((rank, number))
                    continue
                if node.type == SEND:
                    arrived[node.attributes["comm_tag"]] = time + latency
                takes = latency if node.type == SEND else node.microseconds
                heapq.heappush(under_way, (time + takes, (rank, number)))
        for receive in [*receives]:
            tag = graphs[receive[0]][receive[1]].attributes["comm_tag"]
            if tag in arrived:
                receives.remove(receive)
                heapq.heappush(under_way, (max(arrived[tag], time), receive))
        assert under_way, f"stuck at {time}: {receives}"
        time, (rank, number) = heapq.heappop(under_way)
        done[rank, number] = time
        is_message = graphs[rank][number].type in (SEND, RECV)
        busy[rank, "message" if is_message else "compute"] -= 1
    return time


def build_modelled_trace(name: str) -> Trace:
    """Return the modelled trace of a method, in whole microseconds."""
    costs = Costs([3, 11, 5, 4], [7, 2, 13, 8], [1, 2, 3, 1], weight_gradient=[3, 1, 6, 2])
    keys = {"args": METHODS[name], "unit_ns": 1000.0, "boundary_bytes": [100] * 3}
    played = play_method(name, 4, 8, 4, costs, **keys)
    return make_trace(played.events, [*played.schedule.device_of_stage])


def make_trace(events: Events, devices: List[int]) -> Trace:
    return Trace(events, Counters.from_rows([]), {"device_of_stage": devices})


def write_graphs(folder: Path, trace: Trace) -> Dict[int, Dict[int, GraphNode]]:
    """Write the files of a trace, and return what they hold by rank."""
    paths = write_chakra(folder / "run.et", trace)
    assert [path.name for path in paths] == [f"run.{n}.et" for n in range(len(paths))]
    return {rank: read_graph(path) for rank, path in enumerate(paths)}


@pytest.mark.parametrize("messages", [1, 1000])
@pytest.mark.parametrize("name", METHODS)
def test_the_graph_of_a_modelled_trace_has_its_span(
    name: str, messages: int, tmp_path: Path
) -> None:
    """Story: nothing else that plays pipelines has asynchronous ones as input."""
    trace = build_modelled_trace(name)
    graphs = write_graphs(tmp_path, trace)
    span = int(trace.events.end.max())
    assert play(graphs, 0, messages) * 1000 == span < play(graphs, 5, messages) * 1000
    nodes = [node for nodes in graphs.values() for node in nodes.values()]
    sent, received = (
        sorted(node.attributes["comm_tag"] for node in nodes if node.type == kind)
        for kind in (SEND, RECV)
    )
    assert sent == received and len({*sent}) == len(sent) > 0
    assert {node.attributes["comm_size"] for node in nodes if node.type == SEND} == {100}


# two stages with two replicas: an update with an average of the replicas and the norm of the stages
def list_replica_events(device: int) -> List[Event]:
    """Return the events of an update on a device."""
    stage = device % 2
    forward = Event(stage, device, "forward", 0, 0, 1000, 0, None)
    send = Event(stage, device, "send", 0, 1000, 1500, -1, 64, device + 1, "activations")
    recv = Event(stage, device, "recv", 0, 1500, 2000, -1, 64, device - 1, "activations")
    passes = [forward, send] if stage == 0 else [recv, forward._replace(start_ns=2000, end_ns=3000)]
    return [
        *passes,
        Event(stage, device, "average", 0, 4000, 6000, -1, 4096, -1, "gradients"),
        Event(stage, device, "wait", 0, 6000, 7000, -1, None, -1, "norms"),
        Event(stage, device, "update", 0, 7000, 8000, 1, None),
    ]


def test_averages_and_norms_are_collectives_of_their_groups(tmp_path: Path) -> None:
    events = [event for device in range(4) for event in list_replica_events(device)]
    graphs = write_graphs(tmp_path, make_trace(Events.from_rows(events), [0, 1]))
    names = ["## process_group:init ##", "recv 0", "F0", "average 0", "norms 0", "U0"]
    assert [node.name for node in graphs[1].values()] == names
    ranks = {
        group["pg_name"].encode(): group["ranks"] for group in json.loads(graphs[1][0].inputs[2:-2])
    }
    for rank, expected in enumerate([([0, 2], [0, 1]), ([1, 3], [0, 1]), ([0, 2], [2, 3])]):
        of_rank = [n.attributes for n in graphs[rank].values() if n.type == COLLECTIVE]
        assert tuple(ranks[a["pg_name"]] for a in of_rank) == expected
        assert [(a["comm_size"], a["comm_type"]) for a in of_rank] == [(4096, 0), (8, 0)]


@pytest.mark.parametrize("end", [500, 1500])
def test_no_node_needs_a_later_one_where_starts_are_equal(end: int, tmp_path: Path) -> None:
    """Story: of two events with one start the shorter one came first, but its node second."""
    events = [
        Event(0, 0, "forward", 0, 0, 1000, 0, None),
        Event(0, 0, "send", 0, 0, end, -1, 64, 1, "activations"),
        Event(0, 0, "update", 0, 0, 0, 1, None),
        Event(1, 1, "recv", 0, 2000, 2000, -1, 64, 0, "activations"),
        Event(1, 1, "forward", 0, 2000, 2000, 0, None),
    ]
    graphs = write_graphs(tmp_path, make_trace(Events.from_rows(events), [0, 1]))
    names = [[node.name for node in graphs[rank].values()] for rank in (0, 1)]
    assert names == [["U0", "F0", "send 0"], ["recv 0", "F0"]]


def test_what_has_no_graph_is_refused_by_name(tmp_path: Path) -> None:
    events = Events.from_rows([Event(0, 0, "collective", -1, 0, 5, -1, None)])
    with pytest.raises(BadInput, match="collectives"):
        write_chakra(tmp_path / "run.et", make_trace(events, []))
    assert not [*tmp_path.iterdir()]


def test_a_chakra_graph_is_refused_by_its_name(tmp_path: Path) -> None:
    write_graphs(tmp_path, build_modelled_trace("gpipe"))
    graph = {"schema": "1.1.1-chakra", "pid": 1, "nodes": [{"id": 1}]}
    (tmp_path / "run.json").write_text(json.dumps(graph))
    for name in ("run.0.et", "run.json"):
        (fault,) = list_faults(read_trace, tmp_path / name)
        assert "Chakra" in fault and "torch.profiler" in fault
