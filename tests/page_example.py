"""Traces with their analyses for the tests of the page: four processes, whose stage 1 is twice as slow."""

from __future__ import annotations

from typing import Any, Dict, Tuple

from ipu_pipe.report.analysis.analyze import analyze
from ipu_pipe.schedule.clock import Costs
from ipu_pipe.trace.events import MEMORY, Counter, Counters, Trace
from tests.support.modelled import play_method

STAGES, ACCUMULATE, MICROBATCHES = 4, 4, 40
SIZE = 1 << 19  # bytes of a boundary tensor
HOSTILE = '<script>window.hostile = true</script><img src="x" onerror="window.hostile = true">'


def make_example_trace(name: str = "an example") -> Tuple[Trace, Dict[str, Any]]:
    """Make a trace of PipeDream-Flush with waits, sends and memory; the run and one module are called `name`."""
    costs = Costs([1.0, 2.1, 1.0, 0.9], [1.9, 4.0, 2.0, 1.8], [0.2] * STAGES, link=0.1)
    keys = {"unit_ns": 1e6, "boundary_bytes": [SIZE] * (STAGES - 1)}
    played = play_method("pipedream_flush", STAGES, MICROBATCHES, ACCUMULATE, costs, **keys)
    counters = [
        Counter(s, MEMORY[kind], 0, (s + 2.0) * SIZE)
        for s in range(STAGES)
        for kind in ("weights", "versions")
    ]
    for s in range(STAGES):
        alive = 0
        passes = [e for e in played.rows if e.device == s and e.kind in ("forward", "backward")]
        for e in sorted(passes, key=lambda e: e.end_ns):
            is_backward = e.kind == "backward"
            alive += -1 if is_backward else 1
            sizes = {"activations": 3.0 * alive, "gradients": 2.0 * is_backward}
            for kind, size in sizes.items():
                counters.append(Counter(s, MEMORY[kind], e.end_ns, size * SIZE))
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
    trace = Trace(played.events, Counters.from_rows(counters), metadata)
    return trace, analyze(trace, "runs/example")


def make_split_example_trace() -> Tuple[Trace, Dict[str, Any]]:
    """Make a modelled trace of DualPipeV: split and whole backwards, two stages on each of two devices."""
    costs = Costs([1.0] * STAGES, [2.0] * STAGES, [0.2] * STAGES)
    played = play_method("dualpipe_v", STAGES, 2 * ACCUMULATE, ACCUMULATE, costs, unit_ns=1e6)
    metadata = {"method": "dualpipe_v", "stages": STAGES, "accumulate": ACCUMULATE}
    metadata.update(modelled=True, device_of_stage=[0, 1, 1, 0])
    trace = Trace(played.events, played.counters, metadata)
    return trace, analyze(trace, "runs/split")
