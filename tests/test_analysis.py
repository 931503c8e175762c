"""Check the analysis of a run against modelled traces, version tables and traces written by hand."""

from __future__ import annotations

import json
from typing import Any, Dict, List, Sequence

import numpy as np
import pytest

from ipu_pipe.report.analysis.analyze import analyze
from ipu_pipe.report.analysis.devices import MOST_POINTS
from ipu_pipe.report.analysis.text import compute_differences
from ipu_pipe.schedule.clock import Costs
from ipu_pipe.schedule.methods import METHODS
from ipu_pipe.schedule.timelines import make_schedule
from ipu_pipe.schedule.versions import VersionTable
from ipu_pipe.trace.events import WAIT, Counter, Counters, Event, Events, Trace
from tests.support.modelled import play_method
from tests.support.runs import list_faults

# forward times in microseconds; a backward takes twice as long
UNITS = [4.0, 1.0, 1.0, 1.0, 1.0, 2.0, 2.0, 4.0]


def make_modelled_trace(
    name: str, begins: Sequence[int], accumulate: int, batches: int, flops: Sequence[float] = UNITS
) -> Trace:
    """Make the modelled trace of UNITS with stages at `begins`; with zbv a backward takes three forwards, and is split."""
    backward = 3 if name == "zbv" else 2
    edges = [*begins, len(UNITS)]
    forward = [sum(UNITS[a:b]) for a, b in zip(edges, edges[1:])]
    count, stages = accumulate * batches, len(begins)
    both = [backward * cost for cost in forward]
    costs = Costs(forward, both, [0.5] * stages, weight_gradient=forward if name == "zbv" else ())
    played = play_method(
        name, stages, count, accumulate, costs, 1000.0, boundary_bytes=[100] * stages
    )
    units = [
        {"name": f"layer{i}", "stage": sum(i >= begin for begin in begins) - 1, "forward_flops": 1e9 * work,
         "backward_flops": 1e9 * backward * work, "crossing_bytes": 100}
        for i, work in enumerate(flops)
    ]  # fmt: skip
    metadata = {
        "method": name, "method_args": {}, "stages": stages, "accumulate": accumulate, "microbatches": count, "modelled": True,
        "device_of_stage": list(played.schedule.device_of_stage), "units": units,
        "planned_bubble_fraction": 1 - played.schedule.busy_share(),
    }  # fmt: skip
    return Trace(played.events, played.counters, metadata)


def move(result: Dict[str, Any]) -> List[int]:
    """Return the layers at which stages begin after the advised move."""
    return [int(unit[len("layer") :]) for unit in result["bottleneck"]["move"]["begins_then"]]


def analyze_events(
    events: Sequence[Event], counters: Sequence[Counter] = (), **metadata: Any
) -> Dict[str, Any]:
    """Analyze a trace of these events, and check that the analysis is valid JSON."""
    analysis = analyze(
        Trace(Events.from_rows(events), Counters.from_rows(counters), metadata), "a trace"
    )
    json.dumps(analysis, allow_nan=False)
    return analysis


def make_event(
    device: int, kind: str, start: int, end: int, microbatch: int = 0, **more: Any
) -> Event:
    fields: Dict[str, Any] = {"stage": device, "version": 0, "bytes": None, **more}
    return Event(
        device=device, kind=kind, microbatch=microbatch, start_ns=start, end_ns=end, **fields
    )


# ---- the bottleneck, and the gain from moving a boundary


@pytest.mark.parametrize(
    "name, begins, accumulate, batches",
    [
        ("gpipe", [0, 1, 2], 6, 2),
        ("pipedream_flush", [0, 1, 2], 6, 2),
        ("pipedream", [0, 1, 2], 1, 400),
        ("zbv", [0, 1, 2, 3], 6, 1),
    ],
)
def test_the_stated_gain_of_a_move_is_that_of_the_moved_stages(
    name: str, begins: List[int], accumulate: int, batches: int
) -> None:
    """Check the stated gain of a move against the modelled trace of the moved stages."""
    before = analyze(make_modelled_trace(name, begins, accumulate, batches), "before")
    result = before["bottleneck"]
    assert result["what"] == "stage" and result["gain"] > 0.3
    after = analyze(make_modelled_trace(name, move(before), accumulate, batches), "after")
    # for pipedream the ends of the run, where the pipeline fills and drains, are a small part of it
    measured = before["span_ns"] / after["span_ns"] - 1
    assert result["gain"] == pytest.approx(measured, rel=0.02 if name == "pipedream" else 1e-6)
    if len(begins) == 3:
        assert (result["stage"], result["device"], after["bottleneck"]["gain"]) == (2, 2, 0.0)
        assert result["move"]["busy_now_ns"] == [12000.0, 3000.0, 33000.0]
        sums = [stage["forward_ns"] + stage["backward_ns"] for stage in after["stages"]]
        assert result["move"]["busy_then_ns"] == sums
        # the layers' times are proportional to their FLOPs
        assert result["time_per_flop_ratio"] == pytest.approx(1)
        assert result["gain_range"] == pytest.approx([result["gain"]] * 2)


@pytest.mark.parametrize("begins", [[0, 1, 2], [0, 5, 7], [0, 3, 6], [0, 6, 7]])
def test_the_gain_is_within_its_range_if_flops_do_not_predict_times(begins: List[int]) -> None:
    before = analyze(make_modelled_trace("pipedream_flush", begins, 6, 2, [1.0] * 8), "before")
    result = before["bottleneck"]
    after = analyze(make_modelled_trace("pipedream_flush", move(before), 6, 2), "after")
    low, high = result["gain_range"]
    assert low <= result["gain"] <= high and result["time_per_flop_ratio"] > 1
    assert low - 1e-9 <= before["span_ns"] / after["span_ns"] - 1 <= high + 1e-9


def test_even_stages_are_reported_as_the_schedules_own_bubble() -> None:
    """Story: the devices of other replicas, which a modelled trace does not have, were reported as 100 % idle."""
    trace = make_modelled_trace("gpipe", [0, 5], 2, 3)
    result = analyze(trace, "even")
    # (P - 1) / (N + P - 1), Huang et al. 2019; slightly different, since updates count as compute
    assert result["planned_bubble_fraction"] == pytest.approx(1 / 3)
    assert result["bubble_fraction"] == pytest.approx(1 / 3, abs=0.01)
    worst = result["bottleneck"]
    assert result["imbalance"] == worst["gain"] == worst["gain_if_balanced"] == 0.0
    assert "more microbatches per update" in worst["do"]
    one_of_two = analyze(trace._replace(metadata={**trace.metadata, "replicas": 2}), "x")
    assert one_of_two["devices"] == result["devices"]
    assert any("2 replicas" in note for note in one_of_two["notes"])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("units", None),
        ("method", None),
        ("method", "of another version"),
        ("stages", 1 << 30),
        ("accumulate", 1 << 30),
    ],
)
def test_a_missing_gain_has_a_reason(key: str, value: Any) -> None:
    """The schedule cannot be rebuilt, or is impossible."""
    trace = make_modelled_trace("gpipe", [0, 1, 2], 3, 2)
    metadata = {k: v for k, v in {**trace.metadata, key: value}.items() if v is not None}
    result = analyze(trace._replace(metadata=metadata), "x")["bottleneck"]
    assert result["gain"] is None and result["move"] is None and result["why_no_gain"]


def test_a_link_or_evaluations_may_be_the_bottleneck() -> None:
    passes = [make_event(d, "forward", 100 * d, 100 * d + 100) for d in (0, 1)]
    send = make_event(0, "send", 100, 900, peer=1, carries="activations", bytes=8)
    result = analyze_events([*passes, send])["bottleneck"]
    assert (result["what"], result["device"]) == ("link", 0)
    result = analyze_events([*passes, make_event(1, "evaluate", 4000, 40000)])["bottleneck"]
    assert result["what"] == "outside"


# ---- stages, stragglers, FLOPs


def test_stragglers_and_flops() -> None:
    lengths = [500 if m == 7 else 100 for m in range(10)]
    events = [make_event(0, "forward", 1000 * m, 1000 * m + n, m) for m, n in enumerate(lengths)]
    events += [make_event(0, "backward", 1000 * m + 600, 1000 * m + 700, m) for m in range(10)]
    flops = {"forward_flops": 30.0, "backward_flops": 60.0, "crossing_bytes": 0}
    unit = {"name": "a", "stage": 0, **flops}
    result = analyze_events(events, units=[unit])
    assert result["stragglers"] == [
        {"stage": 0, "kind": "forward", "count": 1, "lost_ns": 400, "median_ns": 100.0,
         "longest": [{"microbatch": 7, "at_ns": 7000, "duration_ns": 500}]}
    ]  # fmt: skip
    (stage,) = result["stages"]
    assert stage["flops_per_second"] == pytest.approx(90 * 10 / 2400 * 1e9)
    keys = ("forward_ns", "busy_ns", "busy_ns_per_microbatch")
    assert [stage[key] for key in keys] == [100.0, 2400, 200.0]


def test_halves_of_backwards_and_several_stages_of_a_device() -> None:
    """The time of a backward is the mean over whole and split ones; a device reports its busy time for each of its stages."""
    events = [make_event(0, "forward", 100 * m, 100 * m + 10, m) for m in range(4)]
    events += [make_event(0, "backward", 100 * m + 20, 100 * m + 50, m) for m in (0, 1, 2)]
    halves = [(0, "input gradient", 320, 332, 3), (0, "weight gradient", 340, 346, 3)]
    other = [make_event(0, "forward", 100 * m + 60, 100 * m + 65, m, stage=3) for m in range(2)]
    result = analyze_events([*events, *(make_event(*row) for row in halves), *other])
    (device,) = result["devices"]
    assert (device["stages"], device["busy_ns"]) == ([0, 3], 158)
    assert device["busy_ns_by_stage"] == {"0": 40 + 90 + 18, "3": 10}
    keys = ("backward_ns", "input_gradient_ns", "weight_gradient_ns")
    expected = [[(3 * 30 + 18) / 4, 12, 6], [None] * 3]
    assert [[stage[key] for key in keys] for stage in result["stages"]] == expected


# ---- staleness


@pytest.mark.parametrize(
    "name", ["gpipe", "pipedream", "pipedream_2bw", "pipemare", "local_greedy"]
)
def test_staleness_is_the_version_tables(name: str) -> None:
    staleness = analyze(make_modelled_trace(name, [0, 2, 5], 4, 6), "x")["staleness"]
    table = VersionTable(make_schedule(METHODS[name], 3, 24, 4), METHODS[name])
    update = np.arange(24) // 4
    for row, *versions in zip(staleness, table.forward(0, 24), table.backward(0, 24)):
        lags = [update - version for version in versions]
        expected = [{"mean": lag.mean(), "greatest": lag.max()} for lag in lags]
        assert [row["forward_versions"], row["backward_versions"]] == expected
        assert row["time_ns"] is not None


def test_staleness_in_time() -> None:
    events = [make_event(0, "forward", 10 * m, 10 * m + 5, m) for m in range(4)]
    events += [
        make_event(0, "update", at, at + 20, k, version=k + 1) for k, at in ((0, 100), (1, 200))
    ]
    (row,) = analyze_events(events, accumulate=2)["staleness"]
    assert row["time_ns"] == {"median": (110 + 120 + 190 + 200) / 4, "greatest": 200}
    assert row["forward_versions"] == {"mean": 0.5, "greatest": 1}
    assert row["backward_versions"] is None


# ---- links


def test_links_by_messages_and_their_latency() -> None:
    there: Dict[str, Any] = {"peer": 1, "carries": "activations", "bytes": 64}
    back: Dict[str, Any] = {"peer": 0, "carries": "gradients"}
    events = [make_event(0, "send", 100 * m, 100 * m + 5, m, **there) for m in range(3)]
    # the message of the last wait may have arrived before it
    waits = [(0, 12, 0), (190, 216, 2), (0, 1, 9), (101, 190, 1)]
    events += [make_event(1, WAIT, *wait, peer=0, carries="activations") for wait in waits]
    events += [make_event(1, WAIT, 0, 1, **back), make_event(1, "send", 300, 330, **back)]
    result = analyze_events([make_event(0, "forward", 0, 10), *events])["links"]
    assert result == [
        {"src": 0, "dst": 1, "carries": "activations", "messages": 3, "bytes": 192, "bytes_per_microbatch": 64.0, "busy_ns": 15,
         "busy_ns_per_microbatch": 5.0,
         "latency_ns": {"waited": 2, "min": 12, "median": 14.0}, "counted": "messages"},
        {"src": 1, "dst": 0, "carries": "gradients", "messages": 1, "bytes": None, "bytes_per_microbatch": None, "busy_ns": 30,
         "busy_ns_per_microbatch": 30.0,
         "latency_ns": None, "counted": "messages"},
    ]  # fmt: skip


# ---- memory


def test_memory_at_its_peak() -> None:
    sizes = [
        ("weights", 0, 100),
        ("activations", 5, 40),
        ("gradients", 20, 30),
        ("activations", 20, 10),
        ("activations", 30, 60),
    ]
    counters = [Counter(0, f"{what} (bytes)", at, float(size)) for what, at, size in sizes]
    counters += [
        Counter(0, "microbatches in flight", 31, 1e9),
        Counter(1, "weights (bytes)", 7, float("nan")),
    ]
    passes = [
        ("forward", 0, 10, 3),
        ("forward", 10, 25, 4),
        ("backward", 26, 29, 3),
        ("forward", 50, 60, 5),
    ]
    (result,) = analyze_events([make_event(0, *row) for row in passes], counters)["memory"]
    assert (result["peak_bytes"], result["at_ns"]) == (190, 30)
    assert result["categories"] == {"weights": 100, "gradients": 30, "activations": 60}
    assert result["microbatches"] == [4]
    assert result["over_time"] == [[0, 100], [5, 140], [20, 140], [30, 190]]


def test_memory_over_time_is_thinned_but_keeps_its_peak() -> None:
    counters = [Counter(0, "weights (bytes)", t, 1.0 + (t == 1234) * 98) for t in range(5000)]
    (result,) = analyze_events([make_event(0, "forward", 0, 5000)], counters)["memory"]
    assert len(result["over_time"]) == MOST_POINTS
    assert max(size for _, size in result["over_time"]) == result["peak_bytes"] == 99


# ---- the whole analysis


def test_replicas_devices_are_distinguished() -> None:
    rows = [(0, 0, 10, 0), (2, 0, 30, 0), (1, 10, 20, 1)]
    events = [make_event(d, "forward", start, end, stage=stage) for d, start, end, stage in rows]
    metadata = {"method": "gpipe", "stages": 2, "replicas": 2, "device_of_stage": [0, 1]}
    result = analyze_events(events, accumulate=1, microbatches=1, **metadata)
    assert [device["index"] for device in result["devices"]] == [0, 1, 2, 3]
    assert result["devices"][3]["idle_ns"] == 30 and result["stages"][0]["devices"] == [0, 2]
    # a figure that one of two analyses does not have
    other = analyze_events([make_event(0, "forward", 0, 16)])
    rows = {row["name"]: [*row.values()][1:] for row in compute_differences(result, other)}
    assert rows["devices[0].busy_ns"] == [10, 16, -6]
    assert rows["devices[1].busy_ns"] == [10, None, None]


def test_metadata_that_no_run_writes_are_refused() -> None:
    wrong = {
        "stages": "x",
        "accumulate": 0,
        "units": [3],
        "replicas": True,
        "device_of_stage": [-1],
    }
    faults = list_faults(analyze_events, [make_event(0, "forward", 0, 1)], **wrong, method=5)
    assert len(faults) == 6 and all("a trace: metadata: " in fault for fault in faults)
