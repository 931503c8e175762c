"""Traces with their analyses for the tests of the page: four processes, whose stage 1 is twice as slow."""

from __future__ import annotations

from typing import Any, Dict, Tuple

from ipu_pipe.report.analysis.analyze import analyze
from ipu_pipe.report.run_trace import build_modelled_events
from ipu_pipe.schedule.actions import Kind
from ipu_pipe.schedule.clock import Costs, clock
from ipu_pipe.schedule.methods import METHODS, resolve_method
from ipu_pipe.schedule.timelines import make_schedule
from ipu_pipe.schedule.versions import VersionTable
from ipu_pipe.trace.events import MEMORY, Counter, Counters, Event, Events, Trace

STAGES, ACCUMULATE, MICROBATCHES = 4, 4, 40
SIZE = 1 << 19  # bytes of a boundary tensor
HOSTILE = '<script>window.hostile = true</script><img src="x" onerror="window.hostile = true">'


def make_example_trace(name: str = "an example") -> Tuple[Trace, Dict[str, Any]]:
    """Make a trace of PipeDream-Flush with waits, sends and memory; the run and one module are called `name`."""
    schedule = make_schedule(METHODS["pipedream_flush"], STAGES, MICROBATCHES, ACCUMULATE)
    table = VersionTable(schedule, METHODS["pipedream_flush"])
    costs = Costs([1.0, 2.1, 1.0, 0.9], [1.9, 4.0, 2.0, 1.8], [0.2] * STAGES, link=0.1)
    modelled, _ = build_modelled_events(
        clock(schedule, costs), (table.forward(0, MICROBATCHES), table.backward(0, MICROBATCHES)),
        unit_ns=1e6, device_of_stage=range(STAGES), boundary_bytes=[SIZE] * (STAGES - 1),
    )  # fmt: skip
    work = [event for event in modelled.rows() if event.kind in ("forward", "backward", "update")]
    events = [*work]
    counters = [
        Counter(s, name, 0, (s + 2.0) * SIZE)
        for s in range(STAGES)
        for name in (MEMORY["weights"], MEMORY["versions"])
    ]
    for s in range(STAGES):
        alive, at = 0, 0
        for e in sorted((e for e in work if e.device == s), key=lambda e: (e.end_ns, e.start_ns)):
            towards = 1 if e.kind == Kind.FORWARD.word else -1
            what = "activations" if towards > 0 else "gradients"
            if e.start_ns - at > 1000 and e.kind != "update":
                events.append(
                    Event(s, s, "wait", e.microbatch, at, e.start_ns, -1, None, s - towards, what)
                )
            if e.bytes is not None:
                events.append(
                    Event(
                        s,
                        s,
                        "send",
                        e.microbatch,
                        e.end_ns,
                        e.end_ns + 90_000,
                        -1,
                        e.bytes,
                        s + towards,
                        what,
                    )
                )
            if e.kind != "update":
                alive += towards
                counters.append(Counter(s, MEMORY["activations"], e.end_ns, 3.0 * alive * SIZE))
                counters.append(
                    Counter(s, MEMORY["gradients"], e.end_ns, 2.0 * SIZE * (towards < 0))
                )
            at = e.end_ns
    metadata = {
        "schema": 1, "run": name, "method": "pipedream_flush", "method_args": {}, "backend": "distributed", "stages": STAGES,
        "replicas": 1, "microbatches": MICROBATCHES, "accumulate": ACCUMULATE, "step_samples": 8 * ACCUMULATE,
        "device_of_stage": [*range(STAGES)], "modelled": False, "gradients_cross": True, "planned_utilization": 0.57,
        "planned_bubble_fraction": 0.43,
        "units": [
            {"name": name if u == 2 * 2 else f"blocks.{u // 2}.{u % 2}", "stage": u // 2, "forward_flops": 5e8,
             "backward_flops": 1e9, "crossing_bytes": SIZE} for u in range(2 * STAGES)
        ],
    }  # fmt: skip
    trace = Trace(Events.from_rows(events), Counters.from_rows(counters), metadata)
    return trace, analyze(trace, "runs/example")


def make_split_example_trace() -> Tuple[Trace, Dict[str, Any]]:
    """Make a modelled trace of DualPipeV: split and whole backwards, two stages on each of two devices."""
    method = resolve_method("dualpipe_v")
    schedule = make_schedule(method, STAGES, 2 * ACCUMULATE, ACCUMULATE)
    table = VersionTable(schedule, method)
    versions = table.forward(0, schedule.microbatches), table.backward(0, schedule.microbatches)
    times = clock(schedule, Costs([1.0] * STAGES, [2.0] * STAGES, [0.2] * STAGES))
    events, counters = build_modelled_events(
        times, versions, 1e6, schedule.device_of_stage, is_whole=schedule.is_whole
    )
    metadata = {
        "method": method.name,
        "stages": STAGES,
        "accumulate": ACCUMULATE,
        "device_of_stage": [0, 1, 1, 0],
    }
    trace = Trace(events, counters, {**metadata, "modelled": True})
    return trace, analyze(trace, "runs/split")
