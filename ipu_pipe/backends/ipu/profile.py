"""The measurements of a run on IPUs: events and counters of each call, and the figures of
PopVision's profile.

call    |-- send --|-------- update k --------|-- recv --|      device 0 is all IPUs together, as the host sees them
"""

from __future__ import annotations

import contextlib
import importlib.util
import time
from pathlib import Path
from typing import Any, Callable

from ipu_pipe.backends.ipu.config import IpuConfig
from ipu_pipe.trace.events import Counter, Event

# device and stage of events of the whole pipeline
ALL_IPUS = 0
NO_STAGE = -1
LATENCY_GETTERS = {
    "host_to_ipu": "getHostIpuLatency",
    "compute": "getComputeLatency",
    "ipu_to_host": "getIpuHostLatency",
    "round_trip": "getLatency",
}


class CallTimes:
    """The events and counters of calls that make one of `updates`: of all stages together, or of
    one stage and its device.
    """

    def __init__(self, updates: range, stage: int = NO_STAGE, device: int = ALL_IPUS) -> None:
        self.events: list[Event] = []
        self.counters: list[Counter] = []
        # the cycles of the last call on the first replica
        self.cycles: int | None = None
        # PopTorch's latencies in seconds, means over the microbatches of the last call
        self.latency: dict[str, float] = {}
        self._updates = updates
        self._stage = stage
        self._device = device

    def add_call(
        self,
        executor: Any,
        updates: range,
        start_ns: int,
        end_ns: int,
        samples: int,
        sent: int,
        received: int,
    ) -> None:
        """Add the events of one call that made `updates` of `samples` samples; `sent` and
        `received` are bytes.
        """
        latencies = {
            name: _read_figure(getattr(executor, getter))
            for name, getter in LATENCY_GETTERS.items()
        }
        # the times are (least, most, mean)
        self.latency = {name: times[2] for name, times in latencies.items() if times is not None}
        # None unless the option logCycleCount is set
        self.cycles = _read_figure(executor.cycleCount)
        if not any(update in self._updates for update in updates):
            return
        # latencies are means, which may be longer than this one call
        begin = min(start_ns + round(self.latency.get("host_to_ipu", 0.0) * 1e9), end_ns)
        end = max(end_ns - round(self.latency.get("ipu_to_host", 0.0) * 1e9), begin)
        # the host sees one call, so all its updates are taken to last equally long
        edges = [begin + (end - begin) * i // len(updates) for i in range(len(updates) + 1)]
        self._add("send", -1, start_ns, begin, updates.start, sent)
        for k, start, stop in zip(updates, edges, edges[1:]):
            self._add("update", k, start, stop, k + 1)
        self._add("recv", -1, end, end_ns, updates.stop, received)
        figures = {"samples/s": samples * 1e9 / max(end_ns - start_ns, 1)}
        figures.update(
            {f"{name} latency (ms)": seconds * 1e3 for name, seconds in self.latency.items()}
        )
        if self.cycles is not None:
            figures["IPU cycles an update"] = self.cycles / len(updates)
        self.counters += [
            Counter(self._device, name, start_ns, value) for name, value in figures.items()
        ]

    def _add(
        self,
        kind: str,
        number: int,
        start_ns: int,
        end_ns: int,
        version: int,
        size: int | None = None,
    ) -> None:
        self.events.append(
            Event(self._stage, self._device, kind, number, start_ns, end_ns, version, size)
        )

    def add(self, kind: str, k: int, start_ns: int) -> None:
        """Add an evaluation or checkpoint after k updates, which ends now."""
        self._add(kind, -1, start_ns, time.perf_counter_ns(), k)

    def describe(self) -> dict[str, Any]:
        """Return the figures of the last call, as `ipu.json` has them."""
        return {"latency_seconds": self.latency or None, "cycles_of_the_last_call": self.cycles}


def _read_figure(figure: Callable[[], Any]) -> Any:
    """Return a figure of PopTorch, None if PopTorch raises: it asserts consistent time stamps, and
    a missing time must not end a run. A lost device shows at the next call."""
    try:
        return figure()
    except Exception:
        return None


def read_profiles(ipu: IpuConfig) -> dict[str, Any] | None:
    """Read the profile.pop of each model (training, inference) after its engine has ended; None if
    the config asks for none, or Graphcore's libpva is not installed.
    """
    if ipu.profile.directory is None or importlib.util.find_spec("pva") is None:
        return None
    paths = Path(ipu.profile.directory).glob("*/profile.pop")
    return {path.parent.name: read_profile(path) for path in sorted(paths)}


def read_profile(path: Path) -> dict[str, Any]:
    """Read memory, cycles and exchange bytes of each IPU from a profile.pop with libpva.

    Memory is the sum over an IPU's tiles. A model fits if its fullest tile fits. Without an
    execution profile, which may not be configured or may not fit, there are no cycles and bytes.
    """
    import pva

    report = pva.openReport(str(path))
    target = report.compilation.target
    tiles = [tile.memory.total.includingGaps for tile in report.compilation.tiles]
    steps: Any = []
    with contextlib.suppress(AttributeError, RuntimeError):
        steps = list(report.execution.steps)
    devices = []
    for index in range(target.numIPUs):
        # the report lists the tiles of all IPUs one after another
        sizes = tiles[index * target.tilesPerIpu : (index + 1) * target.tilesPerIpu]
        work = [step.ipus[index] for step in steps]
        devices.append(
            {
                "ipu": index,
                "memory_bytes": sum(sizes),
                "greatest_tile_bytes": max(sizes),
                "cycles": sum(one.cycles for one in work) if work else None,
                "exchange_in_bytes": sum(one.dataIn for one in work) if work else None,
                "exchange_out_bytes": sum(one.dataOut for one in work) if work else None,
            }
        )
    return {"ipus": target.numIPUs, "replicas": target.numReplicas, "devices": devices}
