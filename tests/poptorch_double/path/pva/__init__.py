"""A test double of libpva's report, for the profile.pop that the double of PopTorch writes: small numbers, right names.

Every IPU has TILES tiles with ALWAYS bytes that always live, and two steps with 2 * ALWAYS and ALWAYS more. A step sends
and receives 1000 bytes and takes 500 cycles on every IPU.
"""

from __future__ import annotations

import json
from types import SimpleNamespace as _Record
from typing import Any, Optional

TILES = 4
ALWAYS = 1000
CLOCK = 1_850_000_000


def openReport(profile: str, debug: Optional[str] = None) -> Any:
    with open(profile) as file:
        content = json.load(file)
    ipus = content["ipus"]
    tile = _Record(
        memory=_Record(
            total=_Record(includingGaps=3 * ALWAYS, excludingGaps=3 * ALWAYS),
            alwaysLiveBytes=ALWAYS,
            notAlwaysLiveBytes=2 * ALWAYS,
            vertices=[],
        )
    )
    live = [
        _Record(notAlwaysLiveMemory=_Record(bytes=factor * ALWAYS * TILES * ipus))
        for factor in (2, 1)
    ]
    cycles = _Record(cyclesFrom=_Record(max=0), cyclesTo=_Record(max=500))
    one = _Record(cycles=500, activeCycles=cycles, dataIn=1000, dataOut=1000)
    steps = [
        _Record(ipus=[one] * ipus, program=_Record(name=f"step{i}", type="OnTileExecute"))
        for i in range(2)
    ]
    microseconds = _Record(start=0, end=10)
    target = _Record(
        numIPUs=ipus,
        numReplicas=content["replicas"],
        tilesPerIpu=TILES,
        numTiles=TILES * ipus,
        clockFrequency=CLOCK,
    )
    return _Record(
        compilation=_Record(
            target=target,
            graph=_Record(numComputeSets=2),
            tiles=[tile] * (TILES * ipus),
            livenessProgramSteps=live,
            alwaysLiveVariables=[_Record(size=ALWAYS)],
            programs=[],
        ),
        execution=_Record(
            steps=steps,
            runs=[_Record(steps=steps, microseconds=microseconds)],
            totalCycles=_Record(total=1000),
        ),
        poplarVersion=_Record(major=3, minor=4, point=0, string="3.4.0", packageHash="0"),
        version=_Record(major=3, minor=4, point=0),
    )


def openTrace(path: str) -> Any:
    """Open a system trace in a form of our own: lines of JSON, [thread, channel, label, start, duration, children]."""
    threads: dict[int, list[Any]] = {}
    with open(path) as file:
        for line in file:
            thread, *event = json.loads(line)
            threads.setdefault(thread, []).append(_make_tracepoint(event))
    process = _Record(
        pid=1, threads=[_Record(tid=tid, events=events) for tid, events in threads.items()]
    )
    return _Record(processes=[process])


def _make_tracepoint(event: list[Any]) -> Any:
    channel, label, start, duration, children = event
    inner = [_make_tracepoint(child) for child in children]
    return _Record(
        channel=channel, label=label, timestamp=start, duration=duration, children=lambda: inner
    )
