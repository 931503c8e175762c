"""What the analysis says of a run, checked against clock-made traces, version tables and traces written by hand."""

from __future__ import annotations

import json
from typing import Any, Dict, List, Sequence

import numpy as np
import pytest

from ipu_pipe.errors import BadInput
from ipu_pipe.report.analysis.analyze import analyze
from ipu_pipe.report.analysis.devices import MOST_POINTS
from ipu_pipe.report.analysis.text import compute_differences, format_analysis, format_comparison
from ipu_pipe.report.run_trace import build_modelled_events
from ipu_pipe.schedule.clock import Costs, clock
from ipu_pipe.schedule.methods import METHODS, resolve_method
from ipu_pipe.schedule.timelines import make_schedule
from ipu_pipe.schedule.versions import VersionTable
from ipu_pipe.trace.events import WAIT, Counter, Counters, Event, Events, Trace

UNITS = [4.0, 1.0, 1.0, 1.0, 1.0, 2.0, 2.0, 4.0]  # what each takes forward, in microseconds; backward twice that


def modelled(name: str, begins: Sequence[int], accumulate: int, batches: int, **more: Any) -> Trace:
    """A trace by the clock of a model of UNITS whose stages begin so."""
    method = resolve_method(name, {})
    edges = [*begins, len(UNITS)]
    forward = [sum(UNITS[a:b]) for a, b in zip(edges, edges[1:])]
    count, stages = accumulate * batches, len(begins)
    schedule = make_schedule(method, stages, count, accumulate)
    table = VersionTable(schedule, method)
    times = clock(schedule, Costs(forward, [2 * each for each in forward], [0.5] * stages))
    events, counters = build_modelled_events(
        times, (table.forward(0, count), table.backward(0, count)), accumulate, 1000.0, range(stages), [100] * stages
    )
    units = [
        {"name": f"layer{i}", "stage": sum(i >= begin for begin in begins) - 1, "forward_flops": 1e9 * each,
         "backward_flops": 2e9 * each, "crossing_bytes": 100}
        for i, each in enumerate(UNITS)
    ]  # fmt: skip
    metadata = {
        "method": name, "method_args": {}, "stages": stages, "accumulate": accumulate, "microbatches": count, "modelled": True,
        "device_of_stage": list(range(stages)), "units": units, "planned_bubble_fraction": 1 - schedule.busy_share(), **more,
    }  # fmt: skip
    return Trace(events, counters, metadata)


def by_hand(events: Sequence[Event], counters: Sequence[Counter] = (), **metadata: Any) -> Dict[str, Any]:
    found = analyze(Trace(Events.from_rows(events), Counters.from_rows(counters), metadata), "a trace")
    json.dumps(found, allow_nan=False)
    return found


def event(device: int, kind: str, start: int, end: int, microbatch: int = 0, **more: Any) -> Event:
    given: Dict[str, Any] = {"stage": device, "version": 0, "bytes": None, **more}
    return Event(device=device, kind=kind, microbatch=microbatch, start_ns=start, end_ns=end, **given)


# ---- the bottleneck, and what moving a boundary gains


@pytest.mark.parametrize(
    "name, accumulate, batches", [("gpipe", 6, 2), ("pipedream_flush", 6, 2), ("pipedream", 1, 400)]
)
def test_what_a_move_gains_is_what_moving_it_gives(name: str, accumulate: int, batches: int) -> None:
    """The gain that is told of one cut is found by cutting so and looking at the clock's trace of that."""
    before = analyze(modelled(name, [0, 1, 2], accumulate, batches), "before")
    found = before["bottleneck"]
    assert (found["what"], found["stage"], found["device"]) == ("stage", 2, 2)
    begins = [int(unit[len("layer") :]) for unit in found["move"]["begins_then"]]
    assert begins != [0, 1, 2] and found["gain"] > 0.3
    assert found["move"]["busy_now_ns"] == [12000.0, 3000.0, 33000.0]
    after = analyze(modelled(name, begins, accumulate, batches), "after")
    assert found["move"]["busy_then_ns"] == [stage["forward_ns"] + stage["backward_ns"] for stage in after["stages"]]
    # for pipedream the ends of the run, where the pipeline fills and drains, are a small part of it
    measured = before["span_ns"] / after["span_ns"] - 1
    assert found["gain"] == pytest.approx(measured, rel=0.02 if name == "pipedream" else 1e-6)
    assert after["bottleneck"]["gain"] == 0.0
    assert f"stage 1 at layer{begins[1]} instead of layer1" in found["do"]
    # the layers take as long as their FLOPs say
    assert found["time_per_flop_ratio"] == pytest.approx(1) and found["gain_range"] == pytest.approx([found["gain"]] * 2)


@pytest.mark.parametrize("begins", [[0, 1, 2], [0, 5, 7], [0, 3, 6], [0, 6, 7]])
def test_where_flops_do_not_tell_times_the_gain_lies_in_the_range(begins: List[int]) -> None:
    units = [
        {"name": f"layer{i}", "stage": sum(i >= begin for begin in begins) - 1, "forward_flops": 1e9, "backward_flops": 2e9}
        for i in range(len(UNITS))
    ]
    before = analyze(modelled("pipedream_flush", begins, 6, 2, units=units), "before")
    found = before["bottleneck"]
    moved = [int(unit[len("layer") :]) for unit in found["move"]["begins_then"]]
    after = analyze(modelled("pipedream_flush", moved, 6, 2), "after")
    low, high = found["gain_range"]
    assert low <= found["gain"] <= high and found["time_per_flop_ratio"] > 1
    assert low - 1e-9 <= before["span_ns"] / after["span_ns"] - 1 <= high + 1e-9


def test_even_stages_are_told_as_the_schedules_own_bubble() -> None:
    found = analyze(modelled("gpipe", [0, 5], 2, 3), "even")
    # (P - 1) / (N + P - 1), Huang et al. 2019; a little else for the updates, which are compute
    assert found["planned_bubble_fraction"] == pytest.approx(1 / 3)
    assert found["bubble_fraction"] == pytest.approx(1 / 3, abs=0.01)
    assert found["imbalance"] == found["bottleneck"]["gain"] == found["bottleneck"]["gain_if_balanced"] == 0.0
    assert "more microbatches an update" in found["bottleneck"]["do"]


def test_why_there_is_no_gain() -> None:
    trace = modelled("gpipe", [0, 1, 2], 3, 2)
    cases = {
        "units": "units",
        "method": "does not say its method",
    }
    for key, said in cases.items():
        metadata = {other: value for other, value in trace.metadata.items() if other != key}
        found = analyze(trace._replace(metadata=metadata), "x")["bottleneck"]
        assert found["gain"] is None and found["move"] is None and said in found["why_no_gain"]
    assert analyze(trace, "x")["bottleneck"]["gain_if_balanced"] > 0.3
    other = analyze(trace._replace(metadata={**trace.metadata, "method": "of another version"}), "x")
    assert "cannot be rebuilt" in other["bottleneck"]["why_no_gain"]


def test_a_link_or_evaluations_may_hold_a_run_up() -> None:
    passes = [event(d, "forward", 1000 * m + 100 * d, 1000 * m + 100 * d + 100, m) for m in range(4) for d in (0, 1)]
    sends = [
        event(0, "send", 1000 * m + 100, 1000 * m + 900, m, peer=1, carries="activations", bytes=8) for m in range(4)
    ]
    found = by_hand([*passes, *sends])["bottleneck"]
    assert (found["what"], found["device"]) == ("link", 0) and "800 ns" in found["why"]
    found = by_hand([*passes, event(1, "evaluate", 4000, 40000)])["bottleneck"]
    assert found["what"] == "outside" and "evaluat" in found["why"]


def test_a_waiting_device_names_whom_it_waits_for() -> None:
    """Stage 0 takes 2 ms, stage 1 20 ms: device 0 waits."""
    events: List[Event] = []
    for m in range(5):
        at = m * 20_000_000
        events += [event(0, "forward", at, at + 2_000_000, m), event(0, WAIT, at + 2_000_000, at + 20_000_000, m, peer=1),
                   event(1, "forward", at, at + 20_000_000, m)]  # fmt: skip
    found = by_hand(events)
    assert (
        found["devices"][0]["busy_ns"] == 10_000_000
        and found["devices"][1]["busy_ns"] == found["span_ns"] == 100_000_000
    )
    assert found["devices"][0]["waits_for"] == {"1": 72_000_000} and found["devices"][0]["ramp_down_ns"] == 18_000_000
    assert found["bottleneck"]["stage"] == 1 and "device 0 waits for it 72.0% of the time" in found["bottleneck"]["why"]
    assert found["stages"][0]["of_greatest"] == pytest.approx(0.1) and found["imbalance"] == pytest.approx(0.45)
    assert "stage 1 on device 1" in format_analysis(found)


def test_what_a_move_gains_where_devices_have_several_stages() -> None:
    """By the clock, with the halves of backwards as the trace has them."""

    def trace(begins: Sequence[int]) -> Trace:
        method = resolve_method("zbv")
        edges = [*begins, len(UNITS)]
        forward = [sum(UNITS[a:b]) for a, b in zip(edges, edges[1:])]
        schedule = make_schedule(method, 4, 6, 6)
        table = VersionTable(schedule, method)
        costs = Costs(forward, [3 * f for f in forward], [0.5] * 4, weight_gradient=forward)
        events, _ = build_modelled_events(
            clock(schedule, costs), (table.forward(0, 6), table.backward(0, 6)), 6, 1000.0, schedule.device_of_stage
        )
        units = [
            {"name": f"layer{i}", "stage": sum(i >= begin for begin in begins) - 1, "forward_flops": each,
             "backward_flops": 3 * each, "crossing_bytes": 100}
            for i, each in enumerate(UNITS)
        ]  # fmt: skip
        metadata = {"method": "zbv", "stages": 4, "accumulate": 6, "device_of_stage": [0, 1, 1, 0], "units": units}
        return Trace(events, Counters.from_rows([]), metadata)

    before = analyze(trace([0, 1, 2, 3]), "before")
    found = before["bottleneck"]
    begins = [int(unit[len("layer") :]) for unit in found["move"]["begins_then"]]
    after = analyze(trace(begins), "after")
    assert found["gain"] > 0.3 and found["gain"] == pytest.approx(before["span_ns"] / after["span_ns"] - 1, rel=1e-6)


# ---- stages, stragglers, FLOPs


def test_stragglers_and_flops() -> None:
    events = [event(0, "forward", 1000 * m, 1000 * m + (500 if m == 7 else 100), m) for m in range(10)]
    events += [event(0, "backward", 1000 * m + 600, 1000 * m + 700, m) for m in range(10)]
    unit = {"name": "a", "stage": 0, "forward_flops": 30.0, "backward_flops": 60.0, "crossing_bytes": 0}
    found = by_hand(events, units=[unit])
    assert found["stragglers"] == [
        {"stage": 0, "kind": "forward", "count": 1, "lost_ns": 400, "median_ns": 100.0,
         "longest": [{"microbatch": 7, "at_ns": 7000, "duration_ns": 500}]}
    ]  # fmt: skip
    (stage,) = found["stages"]
    assert stage["flops_per_second"] == pytest.approx(90 * 10 / 2400 * 1e9)
    assert (stage["forward_ns"], stage["busy_ns"], stage["busy_ns_per_microbatch"]) == (100.0, 2400, 200.0)


def test_halves_of_backwards_and_several_stages_of_a_device() -> None:
    """A stage that does whole and split backwards takes for one the mean of both; the device is busy for each of its stages."""
    events = [event(0, "forward", 100 * m, 100 * m + 10, m) for m in range(4)]
    events += [event(0, "backward", 100 * m + 20, 100 * m + 50, m) for m in (0, 1, 2)]
    events += [event(0, "input gradient", 320, 332, 3), event(0, "weight gradient", 340, 346, 3)]
    events += [event(0, "forward", 100 * m + 60, 100 * m + 65, m, stage=3) for m in range(2)]
    found = by_hand(events)
    assert found["devices"][0]["stages"] == [0, 3]
    assert found["devices"][0]["busy_ns_by_stage"] == {"0": 40 + 90 + 18, "3": 10}
    assert sum(found["devices"][0]["busy_ns_by_stage"].values()) == found["devices"][0]["busy_ns"]
    keys = ("backward_ns", "input_gradient_ns", "weight_gradient_ns")
    assert [found["stages"][0][key] for key in keys] == [(3 * 30 + 18) / 4, 12, 6]
    assert [found["stages"][1][key] for key in keys] == [None] * 3
    text = format_analysis(found)
    assert "weight gradient" in text and "busy in stage" in text
    plain = format_analysis(by_hand([event(0, "forward", 0, 10), event(0, "backward", 10, 20)]))
    assert "weight gradient" not in plain and "busy in stage" not in plain


# ---- staleness


@pytest.mark.parametrize("name", ["gpipe", "pipedream", "pipedream_2bw", "pipemare", "local_greedy"])
def test_staleness_is_the_version_tables(name: str) -> None:
    accumulate, batches = 4, 6
    trace = modelled(name, [0, 2, 5], accumulate, batches)
    method = METHODS[name]
    table = VersionTable(make_schedule(method, 3, accumulate * batches, accumulate), method)
    made = np.arange(accumulate * batches) // accumulate
    staleness = analyze(trace, "x")["staleness"]
    for row, *versions in zip(staleness, table.forward(0, len(made)), table.backward(0, len(made))):
        lags = [{"mean": (made - version).mean(), "greatest": (made - version).max()} for version in versions]
        assert [row["forward_versions"], row["backward_versions"]] == lags and row["time_ns"] is not None


def test_staleness_in_time() -> None:
    events = [event(0, "forward", 10 * m, 10 * m + 5, m) for m in range(4)]
    events += [event(0, "update", 100, 120, 0, version=1), event(0, "update", 200, 220, 1, version=2)]
    found = by_hand(events, accumulate=2)["staleness"]
    assert found[0]["time_ns"] == {"median": (110 + 120 + 190 + 200) / 4, "greatest": 200}
    assert found[0]["forward_versions"] == {"mean": 0.5, "greatest": 1} and found[0]["backward_versions"] is None


# ---- links


def test_links_by_messages_and_their_latency() -> None:
    events = [event(0, "forward", 0, 10)]
    for m in range(3):
        at = 100 * m
        events.append(event(0, "send", at, at + 5, m, peer=1, carries="activations", bytes=64))
    events += [
        event(1, WAIT, 0, 12, 0, peer=0, carries="activations"), event(1, WAIT, 190, 216, 2, peer=0, carries="activations"),
        event(1, WAIT, 0, 1, 9, peer=0, carries="activations"), event(1, WAIT, 0, 1, 0, peer=0, carries="gradients"),
        event(1, WAIT, 101, 190, 1, peer=0, carries="activations"),  # it may have been there
        event(1, "send", 300, 330, 0, peer=0, carries="gradients", bytes=None),
    ]  # fmt: skip
    found = by_hand(events)["links"]
    assert found == [
        {"src": 0, "dst": 1, "carries": "activations", "messages": 3, "bytes": 192, "bytes_per_microbatch": 64.0, "busy_ns": 15,
         "busy_ns_per_microbatch": 5.0,
         "latency_ns": {"waited": 2, "min": 12, "median": 14.0}, "counted": "messages"},
        {"src": 1, "dst": 0, "carries": "gradients", "messages": 1, "bytes": None, "bytes_per_microbatch": None, "busy_ns": 30,
         "busy_ns_per_microbatch": 30.0,
         "latency_ns": None, "counted": "messages"},
    ]  # fmt: skip


# ---- memory


def test_memory_at_its_peak() -> None:
    counters = [
        Counter(0, "weights (bytes)", 0, 100.0), Counter(0, "activations (bytes)", 5, 40.0),
        Counter(0, "gradients (bytes)", 20, 30.0),
        Counter(0, "activations (bytes)", 20, 10.0), Counter(0, "activations (bytes)", 30, 60.0),
        Counter(0, "gradients (bytes)", 40, 0.0),
        Counter(0, "microbatches in flight", 31, 1e9), Counter(1, "weights (bytes)", 7, float("nan")),
    ]  # fmt: skip
    events = [
        event(0, "forward", 0, 10, 3),
        event(0, "forward", 10, 25, 4),
        event(0, "backward", 26, 29, 3),
        event(0, "forward", 50, 60, 5),
    ]
    (found,) = by_hand(events, counters)["memory"]
    assert (found["device"], found["peak_bytes"], found["at_ns"]) == (0, 190, 30)
    assert found["categories"] == {"weights": 100, "gradients": 30, "activations": 60}
    assert found["microbatches"] == [4]
    assert found["over_time"] == [[0, 100], [5, 140], [20, 140], [30, 190], [40, 160]]


def test_memory_over_time_is_thinned_but_keeps_its_peak() -> None:
    counters = [Counter(0, "weights (bytes)", t, 1.0 + (t == 1234) * 98) for t in range(5000)]
    (found,) = by_hand([event(0, "forward", 0, 5000)], counters)["memory"]
    assert (
        len(found["over_time"]) == MOST_POINTS
        and max(size for _, size in found["over_time"]) == found["peak_bytes"] == 99
    )


# ---- the whole


def test_replicas_devices_are_told_apart() -> None:
    events = [event(0, "forward", 0, 10), event(2, "forward", 0, 30, stage=0), event(1, "forward", 10, 20, stage=1)]
    found = by_hand(events, method="gpipe", stages=2, replicas=2, device_of_stage=[0, 1], accumulate=1, microbatches=1)
    assert [device["index"] for device in found["devices"]] == [0, 1, 2, 3] and found["devices"][3]["idle_ns"] == 30
    assert found["stages"][0]["devices"] == [0, 2]


def test_metadata_that_no_run_writes() -> None:
    with pytest.raises(BadInput) as caught:
        by_hand(
            [event(0, "forward", 0, 1)],
            stages="x",
            accumulate=0,
            units=[3],
            replicas=True,
            device_of_stage=[-1],
            method=5,
        )
    assert len(caught.value.faults) == 6 and all("a trace: metadata: " in fault for fault in caught.value.faults)


def test_metadata_of_which_no_schedule_can_be_made() -> None:
    passes = [
        event(0, "forward", 0, 1),
        event(0, "backward", 1, 2),
        event(1, "forward", 1, 2),
        event(1, "backward", 2, 3),
    ]
    for odd in (
        {"stages": 1 << 30},
        {"method": "pipedream_2bw", "accumulate": 1},
        {"accumulate": 1 << 30, "method": "gpipe"},
    ):
        found = by_hand(passes, **{"method": "gpipe", "stages": 2, "accumulate": 1, "microbatches": 4, **odd})
        assert found["span_ns"] == 3 and found["bottleneck"]["gain"] is None


def test_two_side_by_side() -> None:
    one, two = (by_hand([event(0, "forward", 0, end), event(1, "forward", 5, 20)]) for end in (10, 16))
    rows = {row["name"]: row for row in compute_differences(one, two)}
    assert rows["devices[0].busy_ns"] == {"name": "devices[0].busy_ns", "this": 10, "other": 16, "difference": -6}
    three = by_hand([event(0, "forward", 0, 10)])
    rows = {row["name"]: row for row in compute_differences(one, three)}
    assert rows["devices[1].busy_ns"] == {"name": "devices[1].busy_ns", "this": 15, "other": None, "difference": None}
    assert "devices[0].busy_ns" in format_comparison(one, two) and "-37.5%" in format_comparison(one, two)
