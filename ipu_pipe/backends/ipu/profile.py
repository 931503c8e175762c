"""What a run on IPUs tells of itself: times of each call as events and counters, and PopVision's profile in numbers.

call    |-- send --|-------- update k --------|-- recv --|      device 0 is all IPUs together, as the host sees them
"""

from __future__ import annotations

import contextlib
import importlib.util
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional

from ipu_pipe.backends.ipu.config import IpuConfig
from ipu_pipe.backends.ipu.options import INFERENCE, TRAINING
from ipu_pipe.trace.events import Counter, Event

ALL = 0  # the device of events of the whole pipeline
NO_STAGE = -1


class CallTimes:
    """Events and counters of the calls that make one of `updates`, of all stages together or of one on its own
    device."""

    def __init__(self, updates: range, stage: int = NO_STAGE, device: int = ALL) -> None:
        self.events: List[Event] = []
        self.counters: List[Counter] = []
        self.cycles: Optional[int] = None  # of the last call, of the first replica
        self.latency: Dict[str, float] = {}  # seconds, means over the last call's microbatches, by PopTorch
        self._updates = updates
        self._stage, self._device = stage, device

    def add_call(
        self, executor: Any, k: int, iterations: int, start_ns: int, end_ns: int, samples: int, sent: int, received: int
    ) -> None:
        """Add the events of one call that made `iterations` updates from k on, of so many samples, `sent` and `received`
        bytes."""
        self.latency = _read_latencies(executor)
        if executor.options._Popart.options.get("instrumentWithHardwareCycleCounter"):
            self.cycles = _read_figure(executor.cycleCount)
        if not any(update in self._updates for update in range(k, k + iterations)):
            return
        add = self.events.append
        begin = min(start_ns + round(self.latency.get("host_to_ipu", 0.0) * 1e9), end_ns)
        end = max(end_ns - round(self.latency.get("ipu_to_host", 0.0) * 1e9), begin)
        add(Event(self._stage, self._device, "send", -1, start_ns, begin, k, sent))
        for i in range(iterations):
            edges = [begin + (end - begin) * j // iterations for j in (i, i + 1)]
            add(Event(self._stage, self._device, "update", k + i, edges[0], edges[1], k + i + 1, None))
        add(Event(self._stage, self._device, "recv", -1, end, end_ns, k + iterations, received))
        self.counters.append(Counter(self._device, "samples/s", start_ns, samples * 1e9 / max(end_ns - start_ns, 1)))
        for name, seconds in self.latency.items():
            self.counters.append(Counter(self._device, f"{name} latency (ms)", start_ns, seconds * 1e3))
        if self.cycles is not None:
            self.counters.append(Counter(self._device, "IPU cycles an update", start_ns, self.cycles / iterations))

    def add(self, kind: str, k: int, start_ns: int, end_ns: int) -> None:
        """Add an evaluation or checkpoint after k updates."""
        self.events.append(Event(self._stage, self._device, kind, -1, start_ns, end_ns, k, None))


def _read_figure(figure: Callable[[], Any]) -> Any:
    """Return a figure of PopTorch's, or None: it asserts that its host's time stamps fit, and a run does not end for want of a
    time. A lost device shows at the next call."""
    try:
        return figure()
    except Exception:
        return None


def _read_latencies(executor: Any) -> Dict[str, float]:
    asked = {
        "host_to_ipu": executor.getHostIpuLatency,
        "compute": executor.getComputeLatency,
        "ipu_to_host": executor.getIpuHostLatency,
        "round_trip": executor.getLatency,
    }
    latencies = {name: _read_figure(getter) for name, getter in asked.items()}
    return {name: times[2] for name, times in latencies.items() if times is not None}  # (least, most, mean)


def open_channel() -> Any:
    """Open a channel of PopVision's system trace; it writes where the SDK's libpvti is there and PVTI_OPTIONS was set."""
    import poptorch

    return poptorch.profiling.Channel("ipu_pipe")


def read_profiles(ipu: IpuConfig) -> Optional[Dict[str, Any]]:
    """Read each model's profile.pop (training, inference) once its engine is gone; None where none was asked for."""
    if ipu.profile.directory is None:
        return None
    if importlib.util.find_spec("pva") is None:
        return {"note": f"libpva is not installed: open the profiles in {ipu.profile.directory} with PopVision"}
    profiles: Dict[str, Any] = {}
    for model in (TRAINING, INFERENCE):
        path = Path(ipu.profile.directory) / model / "profile.pop"
        if path.is_file():
            profiles[model] = read_profile(path)
    return profiles


def read_profile(path: Path) -> Dict[str, Any]:
    """Read memory, cycles and exchange bytes by IPU from a profile.pop with libpva. Memory is the sum over an IPU's tiles; a
    model fits where its fullest tile does. What the report does not hold is null."""
    import pva

    debug = path.parent.parent / "debug.cbor"
    report = pva.openReport(str(path), str(debug)) if debug.is_file() else pva.openReport(str(path))
    target = report.compilation.target
    tiles_per_ipu, ipus = target.tilesPerIpu, target.numIPUs
    tiles = [tile.memory for tile in report.compilation.tiles]
    devices: List[Dict[str, Any]] = []
    for index in range(ipus):
        memories = tiles[index * tiles_per_ipu : (index + 1) * tiles_per_ipu]
        sizes = [memory.total.includingGaps for memory in memories]
        devices.append(
            {
                "ipu": index,
                "memory_bytes": sum(sizes),
                "greatest_tile_bytes": max(sizes, default=None),
                "always_live_bytes": sum(memory.alwaysLiveBytes for memory in memories),
            }
        )
    cycles = None
    exchanged = {"cycles": "cycles", "exchange_in_bytes": "dataIn", "exchange_out_bytes": "dataOut"}
    for device in devices:
        device.update(dict.fromkeys(exchanged))
    with contextlib.suppress(AttributeError, RuntimeError):  # an execution profile was not asked for, or did not fit
        for index, device in enumerate(devices):
            steps = [step.ipus[index] for step in report.execution.steps]
            device.update({key: sum(getattr(step, name) for step in steps) for key, name in exchanged.items()})
        cycles = report.execution.totalCycles.total
    live = [step.notAlwaysLiveMemory.bytes for step in report.compilation.livenessProgramSteps]
    return {
        "poplar": report.poplarVersion.string,
        "clock_hz": target.clockFrequency,
        "ipus": ipus,
        "replicas": target.numReplicas,
        "peak_live_bytes": sum(device["always_live_bytes"] for device in devices) + max(live, default=0),
        "total_cycles": cycles,
        "devices": devices,
    }
