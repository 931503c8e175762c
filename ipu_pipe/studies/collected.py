"""The comparison of methods as text: what was measured beside what schedule and memory model say."""

from __future__ import annotations

from typing import Any, List, Mapping, Optional, Sequence

from ipu_pipe.model.flops import HOW

MIB = 2**20
Found = Mapping[str, Mapping[str, Any]]


def table(found: Found) -> str:
    """`found`: what `collection.collect` gives."""
    rows = [
        ["", "samples/s", "by round", "busy", "busy", "busy", "speedup", "speedup", "fullest device", "fullest device", "crosses",
         "crosses"],
        ["", "measured", "measured", "measured", "modelled", "planned", "measured", "modelled", "measured, MiB", "planned, MiB",
         "measured, MiB", "planned, MiB"],
        *(_row(found, name) for name in found["throughput"]),
    ]  # fmt: skip
    return "\n".join([
        *_aligned(rows),
        "",
        *_traffic(found["communication"]),
        "",
        "samples/s: the median over the rounds; on the emulator of this machine, which does all devices' work in turn.",
        "busy: the devices' time in passes and updates: measured where they have clocks; modelled by the clock with each",
        "stage's measured passes; planned: of the schedule's unit slots. crosses: of a microbatch, over all links.",
        f"speedup, against the first method: modelled is the schedule with each stage's FLOPs as times ({HOW}).",
    ])  # fmt: skip


def _row(found: Found, name: str) -> List[str]:
    speed, devices = found["throughput"][name], found["memory"][name]["devices"]
    rates = speed["samples_per_second_by_round"]
    held = [device["measured_bytes"] for device in devices if device["measured_bytes"] is not None]
    traffic = found["communication"][name]
    every = [link for kind in ("links", "shared_layer_links") for link in traffic.get(kind, ())]
    sent, expected = (
        sum(link[key] for link in every) / MIB for key in ("bytes_per_microbatch", "planned_bytes_per_microbatch")
    )
    return [
        name,
        _shown(speed["samples_per_second"], ".1f"),
        f"{min(rates):.1f} to {max(rates):.1f}" if len(rates) > 1 else "-",
        *(_shown(speed[key], ".1%") for key in ("utilization", "modelled_utilization", "planned_utilization")),
        *(_shown(speed[key], ".2f") for key in ("measured_speedup", "modelled_speedup")),
        _shown(max(held) / MIB if held else None, ".1f"),
        f"{max(device['bytes'] for device in devices) / MIB:.1f}",
        _shown(sent if speed["measured_speedup"] is not None else None, ".3f"),
        f"{expected:.3f}",
    ]


def _traffic(methods: Mapping[str, Any]) -> List[str]:
    """What each device receives and transmits for a microbatch."""
    count = max(len(traffic["devices"]) for traffic in methods.values())
    rows = [["a microbatch, MiB", "", *(f"device {d}" for d in range(count))]]
    for name, traffic in methods.items():
        for key in ("received", "transmitted"):
            rows.append([name, key, *(f"{device[f'{key}_bytes'] / MIB:.4f}" for device in traffic["devices"])])
    return _aligned(rows)


def _aligned(rows: Sequence[Sequence[str]]) -> List[str]:
    """Columns of one width each, the first to the left."""
    count = max(map(len, rows))
    full = [[*row, *[""] * (count - len(row))] for row in rows]
    wide = [max(len(row[i]) for row in full) for i in range(count)]
    return [
        "  ".join([row[0].ljust(wide[0]), *(c.rjust(w) for c, w in zip(row[1:], wide[1:]))]).rstrip() for row in full
    ]


def _shown(value: Optional[float], how: str) -> str:
    return "-" if value is None else format(value, how)
