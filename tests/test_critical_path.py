"""The critical path: it covers the span, follows what was waited for, and tells what shorter passes would save."""

from __future__ import annotations

from typing import Any, Dict, List

from ipu_pipe.report.analysis.critical_path import measure_critical_path
from ipu_pipe.trace.events import Event, Events


def event(
    device: int, kind: str, start: int, end: int, m: int = 0, peer: int = -1, carries: str = ""
) -> Event:
    return Event(device, device, kind, m, start, end, 0, None, peer, carries)


# F0 of both stages, B0 of both, and a message each way that takes 5 until it has arrived
ONE_MICROBATCH = [
    event(0, "forward", 0, 50), event(0, "send", 50, 55, 0, 1, "activations"),
    event(1, "wait", 0, 60, 0, 0, "activations"), event(1, "recv", 60, 62, 0, 0, "activations"),
    event(1, "forward", 62, 100), event(1, "backward", 100, 200), event(1, "send", 200, 205, 0, 0, "gradients"),
    event(0, "wait", 55, 210, 0, 1, "gradients"), event(0, "recv", 210, 212, 0, 1, "gradients"),
    event(0, "backward", 212, 300),
]  # fmt: skip


def measure(events: List[Event]) -> Dict[str, Any]:
    path = measure_critical_path(Events.from_rows(events), {})
    assert path is not None
    return path


def test_the_path_follows_the_messages() -> None:
    path = measure(ONE_MICROBATCH)
    pieces = [(p["device"], p["kind"], p["start_ns"], p["duration_ns"]) for p in path["pieces"]]
    assert pieces == [
        (0, "forward", 0, 50), (0, "send", 50, 5), (1, "message", 55, 5), (1, "recv", 60, 2), (1, "forward", 62, 38),
        (1, "backward", 100, 100), (1, "send", 200, 5), (0, "message", 205, 5), (0, "recv", 210, 2), (0, "backward", 212, 88),
    ]  # fmt: skip
    assert [(row["stage"], row["ns"]) for row in path["stages"]] == [(0, 138), (1, 138)]
    links = [(row["src"], row["dst"], row["ns"]) for row in path["links"]]
    assert links == [(0, 1, 12), (1, 0, 12)]
    assert sum(row["ns"] for row in path["kinds"]) == 300
    # what passes save that are a tenth shorter
    saved = {(row["stage"], row["kind"]): row["saves_ns"] for row in path["what_if"]}
    assert saved == {(0, "forward"): 5, (0, "backward"): 9, (1, "forward"): 4, (1, "backward"): 10}


def test_a_pass_beside_the_path_saves_nothing() -> None:
    """Device 1 waits for device 0's long pass; what it computes meanwhile does not matter."""
    events = [
        event(0, "forward", 0, 100), event(0, "send", 100, 105, 0, 1, "activations"), event(1, "backward", 0, 20, 7),
        event(1, "wait", 20, 105, 0, 0, "activations"), event(1, "forward", 105, 150),
    ]  # fmt: skip
    path = measure(events)
    saved = {(row["stage"], row["kind"]): row["saves_ns"] for row in path["what_if"]}
    assert saved == {(0, "forward"): 10, (1, "forward"): 4, (1, "backward"): 0}
    assert [row["stage"] for row in path["stages"]] == [0, 1]


def test_two_that_wait_for_each_other_end() -> None:
    events = [
        event(0, "wait", 0, 50, peer=1),
        event(1, "wait", 0, 50, peer=0),
        event(0, "forward", 50, 60),
    ]
    assert sum(row["ns"] for row in measure(events)["kinds"]) == 60
