"""A trace as of four processes, stage 1 twice as slow, and what an analysis says of it: for the page's tests."""

from __future__ import annotations

from typing import Any, Dict, List, Tuple

from ipu_pipe.schedule.actions import Kind
from ipu_pipe.schedule.clock import Costs, clock
from ipu_pipe.schedule.methods import METHODS
from ipu_pipe.schedule.timelines import make_schedule
from ipu_pipe.schedule.versions import VersionTable
from ipu_pipe.trace.events import MEMORY, Counter, Counters, Event, Events, Trace
from ipu_pipe.trace.modelled import build_modelled_events

STAGES, ACCUMULATE, MICROBATCHES = 4, 4, 40
SIZE = 1 << 19  # bytes of a boundary tensor
HOSTILE = '<script>window.hostile = true</script><img src="x" onerror="window.hostile = true">'


def example(name: str = "an example") -> Tuple[Trace, Dict[str, Any]]:
    """PipeDream-Flush with waits, sends and memory; a run and a stage's module called `name`."""
    schedule = make_schedule(METHODS["pipedream_flush"], STAGES, MICROBATCHES, ACCUMULATE)
    table = VersionTable(schedule, METHODS["pipedream_flush"])
    costs = Costs([1.0, 2.1, 1.0, 0.9], [1.9, 4.0, 2.0, 1.8], [0.2] * STAGES, link=0.1)
    made, _ = build_modelled_events(
        clock(schedule, costs), (table.forward(0, MICROBATCHES), table.backward(0, MICROBATCHES)),
        accumulate=ACCUMULATE, unit_ns=1e6, device_of_stage=range(STAGES), boundary_bytes=[SIZE] * (STAGES - 1),
    )  # fmt: skip
    work = [event for event in made.rows() if event.kind in ("forward", "backward", "update")]
    events = [*work]
    counters = [
        Counter(s, name, 0, (s + 2.0) * SIZE) for s in range(STAGES) for name in (MEMORY["weights"], MEMORY["versions"])
    ]
    for s in range(STAGES):
        alive, at = 0, 0
        for e in sorted((e for e in work if e.device == s), key=lambda e: (e.end_ns, e.start_ns)):
            towards = 1 if e.kind == Kind.FORWARD.word else -1
            what = "activations" if towards > 0 else "gradients"
            if e.start_ns - at > 1000 and e.kind != "update":
                events.append(Event(s, s, "wait", e.microbatch, at, e.start_ns, -1, None, s - towards, what))
            if e.bytes is not None:
                events.append(
                    Event(s, s, "send", e.microbatch, e.end_ns, e.end_ns + 90_000, -1, e.bytes, s + towards, what)
                )
            if e.kind != "update":
                alive += towards
                counters.append(Counter(s, MEMORY["activations"], e.end_ns, 3.0 * alive * SIZE))
                counters.append(Counter(s, MEMORY["gradients"], e.end_ns, 2.0 * SIZE * (towards < 0)))
            at = e.end_ns
    span = max(e.end_ns for e in events)
    metadata = {
        "schema": 2, "run": name, "method": "pipedream_flush", "method_args": {}, "backend": "distributed", "stages": STAGES,
        "replicas": 1, "microbatches": MICROBATCHES, "accumulate": ACCUMULATE, "step_samples": 8 * ACCUMULATE,
        "device_of_stage": [*range(STAGES)], "modelled": False, "gradients_cross": True, "planned_utilization": 0.57,
        "units": [
            {"name": name if u == 2 * 2 else f"blocks.{u // 2}.{u % 2}", "stage": u // 2, "forward_flops": 5e8,
             "backward_flops": 1e9, "crossing_bytes": SIZE} for u in range(2 * STAGES)
        ],
    }  # fmt: skip
    return Trace(Events.from_rows(events), Counters.from_rows(counters), metadata), _analysis(events, span)


def _analysis(events: List[Event], span: int) -> Dict[str, Any]:
    """By the shape that docs/traces.md gives; the numbers need only be such as can be."""
    devices = []
    for d in range(STAGES):
        took = dict.fromkeys(("busy", "wait"), 0)
        for e in events:
            if e.device == d and e.kind != "send":
                took["wait" if e.kind == "wait" else "busy"] += e.end_ns - e.start_ns
        rest = span - sum(took.values())
        devices.append({
            "index": d, "stages": [d], "busy_ns": took["busy"], "wait_ns": took["wait"], "communication_ns": rest // 4,
            "ramp_up_ns": rest // 4, "ramp_down_ns": rest // 4, "idle_ns": rest - 3 * (rest // 4),
            "waits_for": {str(p): took["wait"] // 2 for p in (d - 1, d + 1) if 0 <= p < STAGES},
            "idle_in": {"evaluate": 0, "checkpoint": 0, "pause": 0, "host": 0}, "utilization": took["busy"] / span,
        })  # fmt: skip
    used = sum(d["busy_ns"] for d in devices) / span / STAGES
    busy = [2.95e6, 6.15e6, 3.05e6, 2.75e6]
    return {
        "source": "runs/example", "method": "pipedream_flush", "backend": "distributed", "modelled": False, "why_modelled": None,
        "span_ns": span, "begin_ns": 0, "devices": devices, "utilization": used, "bubble_fraction": 1 - used,
        "planned_bubble_fraction": 0.43, "imbalance": 0.39,
        "stages": [
            {"index": s, "devices": [s], "microbatches": MICROBATCHES, "forward_ns": 1e6, "backward_ns": 2e6, "update_ns": 2e5,
             "busy_ns": int(busy[s] * MICROBATCHES), "busy_ns_per_microbatch": busy[s], "of_greatest": busy[s] / max(busy),
             "flops_per_microbatch": 1e9, "flops_per_second": 3.4e11} for s in range(STAGES)
        ],
        "overlap": {"communication_ns": 9_000_000, "hidden_ns": 7_000_000, "share": 7 / 9},
        "bottleneck": {
            "stage": 1, "device": 1, "what": "stage", "why": "it computes 6.2 ms for a microbatch, twice the next",
            "do": "Let stage 2 begin at blocks.1.1.", "gain": 0.31, "why_no_gain": None, "gain_if_balanced": 0.65,
            "move": {"begins_now": ["blocks.0.0", "blocks.1.0"], "begins_then": ["blocks.0.0", "blocks.0.1"],
                     "busy_now_ns": [2.95e6, 6.15e6], "busy_then_ns": [3.9e6, 5.2e6]},
        },
        "links": [
            {"src": a, "dst": b, "carries": what, "messages": MICROBATCHES, "bytes": SIZE * MICROBATCHES,
             "bytes_per_microbatch": SIZE, "busy_ns": 3_600_000,
             "latency_ns": {"waited": 31, "min": 90_000, "median": 131_000.0}, "counted": "messages"}
            for s in range(STAGES - 1) for a, b, what in ((s, s + 1, "activations"), (s + 1, s, "gradients"))
        ],
        "staleness": [
            {"stage": s, "forward_versions": {"mean": 3.0 - s, "greatest": 3 - s},
             "backward_versions": {"mean": 0.0, "greatest": 0},
             "time_ns": {"median": 1e7 * (4 - s), "greatest": 20_000_000 * (4 - s)}} for s in range(STAGES)
        ],
        "memory": [
            {"device": d, "peak_bytes": (2 * (d + 2) + 3 * (STAGES - d)) * SIZE, "at_ns": span // 3, "microbatches": [4, 5, 6],
             "categories": {"weights": (d + 2) * SIZE, "stashed activations": 3 * (STAGES - d) * SIZE},
             "over_time": [[0, 5], [9, 7]]}
            for d in range(STAGES)
        ],
        "stragglers": [{"stage": 3, "kind": "forward", "count": 2, "lost_ns": 5_000_000, "median_ns": 9e5,
                        "longest": [{"microbatch": 7, "at_ns": 60_000_000, "duration_ns": 3_500_000}]}],
        "notes": ["an example"],
    }  # fmt: skip
