"""Validate the metadata of a trace file and resolve its method."""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, Optional, Tuple

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError
from typing_extensions import Annotated

from ipu_pipe.config.sections import MethodArgs
from ipu_pipe.errors import BadInput
from ipu_pipe.schedule.methods import Method, resolve_method
from ipu_pipe.text import show

MOST_DEVICES = 1 << 16

Count = Annotated[int, Field(ge=1, lt=1 << 31)]
Flops = Annotated[float, Field(ge=0, lt=1e30)]
Device = Annotated[int, Field(ge=0, lt=1 << 20)]


class UnitFacts(BaseModel):
    """A unit of the model (`ipu_pipe.trace.events.UnitRow`)."""

    model_config = ConfigDict(strict=True)
    name: str
    stage: int
    forward_flops: Flops
    backward_flops: Flops


class RunFacts(BaseModel):
    """Run metadata; None if absent. See `ipu_pipe.job.record.make_trace_metadata`."""

    model_config = ConfigDict(strict=True)
    method: Optional[str] = None
    method_args: Optional[Dict[str, Any]] = None
    backend: Optional[str] = None
    modelled: Optional[bool] = None
    why_modelled: Optional[str] = None
    stages: Optional[Count] = None
    accumulate: Optional[Count] = None
    replicas: Optional[Count] = None
    device_of_stage: Optional[List[Device]] = None
    gradients_cross: Optional[bool] = None
    planned_bubble_fraction: Optional[Annotated[float, Field(ge=0, lt=1 << 31)]] = None
    units: Optional[List[UnitFacts]] = None
    _resolved: Tuple[Optional[Method], str] = PrivateAttr((None, ""))

    @property
    def known_method(self) -> Optional[Method]:
        """Return the method; None if its schedule cannot be rebuilt, for the reason `why_no_method`."""
        return self._resolved[0]

    @property
    def why_no_method(self) -> str:
        """Return why the method's schedule cannot be rebuilt."""
        return self._resolved[1]

    @property
    def devices(self) -> List[int]:
        """Return all devices of the run."""
        first = sorted(set(self.device_of_stage or ()))
        return [device + replica * len(first) for replica in range(self.replicas or 1) for device in first]

    def sum_flops(self) -> Dict[int, float]:
        """Return each stage's FLOPs of a microbatch, forward and backward."""
        flops_by_stage: Dict[int, float] = {}
        for unit in self.units or ():
            flops = unit.forward_flops + unit.backward_flops
            flops_by_stage[unit.stage] = flops_by_stage.get(unit.stage, 0) + flops
        return flops_by_stage


def read_run_facts(where: Any, metadata: Mapping[str, Any]) -> RunFacts:
    """Validate metadata. Raise `BadInput`, one line per fault, for values that no run writes."""
    try:
        facts = RunFacts.model_validate(dict(metadata))
    except ValidationError as error:
        faults = {str(fault["loc"][0]): f"{show(fault['input'])}: {fault['msg']}" for fault in error.errors()}
        raise BadInput([f"{where}: metadata: {key}: {fault}" for key, fault in faults.items()]) from None
    devices = len(set(facts.device_of_stage or ()))
    if (facts.replicas or 1) * devices > MOST_DEVICES:
        raise BadInput(
            f"{where}: metadata: replicas: {facts.replicas}: must be at most {MOST_DEVICES} devices, {devices} per replica"
        )
    facts._resolved = _resolve(facts)
    return facts


def _resolve(facts: RunFacts) -> Tuple[Optional[Method], str]:
    if facts.method is None:
        return None, "the trace does not say its method"
    args = facts.method_args or {}
    try:
        known = MethodArgs.model_validate(args).model_dump(exclude_none=True)
        devices = facts.device_of_stage or [0]
        order = resolve_method(facts.method).order
        if order is not None and not order.fixed:
            known["stages_per_device"] = len(devices) // len(set(devices))
        return resolve_method(facts.method, known), ""
    except BadInput as error:
        return None, f"the method's schedule cannot be rebuilt: {error.faults[0]}"
    except ValidationError:
        return None, f"the method's schedule cannot be rebuilt: invalid method_args: {show(args)}"
