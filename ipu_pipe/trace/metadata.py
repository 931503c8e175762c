"""What a trace says of its run besides events: the keys of its metadata. What is not known is left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, List, Mapping, TypedDict

from ipu_pipe.errors import BadInput

SCHEMA = 1


class UnitRow(TypedDict):
    """A place where a stage may begin, and what follows up to the next one. FLOPs and bytes of one microbatch; `crossing_bytes`:
    what goes into it from the unit before."""

    name: str
    stage: int
    forward_flops: float
    backward_flops: float
    crossing_bytes: int


class Window(TypedDict):
    """Which updates are recorded: from `begin` up to, not including, `end`, of them one in `every`."""

    begin: int
    end: int
    every: int


class Metadata(TypedDict, total=False):
    """The keys. `modelled`: times come from the clock, by `why_modelled`, not from a device. `method_args`: as in the config, so
    that the schedule can be made again. `device_of_stage`: of one replica; replica r's devices follow, so many on.
    `planned_utilization`, `planned_bubble_fraction`: of the schedule in unit slots. `step_samples`: of an update."""

    schema: int
    run: str
    method: str
    method_args: Dict[str, Any]
    backend: str
    stages: int
    replicas: int
    microbatches: int
    accumulate: int
    step_samples: int
    device_of_stage: List[int]
    window: Window
    modelled: bool
    why_modelled: str
    gradients_cross: bool
    planned_utilization: float
    planned_bubble_fraction: float
    units: List[UnitRow]


def refuse_later(metadata: Mapping[str, Any], path: Path) -> None:
    """Refuse (BadInput) a trace that a later ipu_pipe wrote."""
    schema = metadata.get("schema")
    if isinstance(schema, int) and schema > SCHEMA:
        raise BadInput(f"{path}: schema: {schema}: this version reads up to {SCHEMA}: use the ipu_pipe that wrote it")
