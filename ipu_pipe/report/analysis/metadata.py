"""The metadata of a run's trace: which keys it may have, and the method whose schedule it names."""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, Optional, Tuple

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError
from typing_extensions import Annotated

from ipu_pipe.config.backend_facts import BACKEND_FACTS
from ipu_pipe.config.sections import MethodArgs
from ipu_pipe.errors import BadInput
from ipu_pipe.schedule.methods import Method, resolve_method
from ipu_pipe.text import show
from ipu_pipe.trace.events import Events

# each device has a row, also without an event, which a damaged number must not make millions
MOST_DEVICES = 1 << 16

Count = Annotated[int, Field(ge=1, lt=1 << 31)]
Flops = Annotated[float, Field(ge=0, lt=1e30)]
Spread = Annotated[float, Field(ge=0, lt=1e30)]
Device = Annotated[int, Field(ge=0, lt=1 << 20)]


class UnitMetadata(BaseModel):
    """A unit of the model (`ipu_pipe.trace.events.UnitRow`)."""

    model_config = ConfigDict(strict=True)
    name: str
    stage: int
    forward_flops: Flops
    backward_flops: Flops


class RunMetadata(BaseModel):
    """The metadata that `ipu_pipe.job.record.make_trace_metadata` writes; None if absent. Other
    tools' traces have none.
    """

    # a text or a bool is no number, whoever has written the trace
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
    # of other tools: why waits are not told from messages, and whether these end when waited for
    why_no_waits: Optional[str] = None
    messages_end_late: Optional[bool] = None
    # of other tools: the number of machines
    hosts: Optional[Count] = None
    # of other tools: the ranks of the run, of which the trace may have fewer
    ranks: Optional[Count] = None
    # how far the modelled times of each stage may be off by chance, as a share of them; traces
    # before it was recorded, and costs that were not measured, have none
    spread: Optional[List[Spread]] = None
    planned_bubble_fraction: Optional[Annotated[float, Field(ge=0, lt=1 << 31)]] = None
    units: Optional[List[UnitMetadata]] = None
    _resolved: Tuple[Optional[Method], str] = PrivateAttr((None, ""))

    @property
    def known_method(self) -> Optional[Method]:
        """The method; None if its schedule cannot be rebuilt, for the reason `why_no_method`."""
        return self._resolved[0]

    @property
    def why_no_method(self) -> str:
        """The reason why the method's schedule cannot be rebuilt."""
        return self._resolved[1]

    @property
    def devices(self) -> List[int]:
        """The devices that the trace covers, with or without events; those of the first replica
        first.

        A modelled trace plays one replica. The host of IPUs records each device that it sees: none
        is added.
        """
        if not self._host_sees_devices:
            return []
        of_replica = sorted(set(self.device_of_stage or ()))
        # other replicas of a simulated trace have no events, and would be reported as idle
        replicas = 1 if self.modelled else self.replicas or 1
        return [
            device + replica * len(of_replica)
            for replica in range(replicas)
            for device in of_replica
        ]

    def has_one_device(self, events: Events) -> bool:
        """Tell whether the trace's one device is all IPUs together: PopTorch's host sees no stage
        inside a call.
        """
        return not self._host_sees_devices and not (events.stage >= 0).any()

    @property
    def waits_for_actions(self) -> bool:
        """Whether the host that recorded the trace waited for each action."""
        facts = BACKEND_FACTS.get(self.backend or "")
        return facts is not None and facts.waits_for_actions and not self.modelled

    @property
    def _host_sees_devices(self) -> bool:
        """Whether the host that recorded the trace saw each device, as hosts do unless their
        backend says otherwise.
        """
        facts = BACKEND_FACTS.get(self.backend or "")
        return facts is None or facts.host_sees_devices

    def sum_flops(self) -> Dict[int, float]:
        """Return each stage's FLOPs of a microbatch, forward and backward."""
        flops_by_stage: Dict[int, float] = {}
        for unit in self.units or ():
            flops = unit.forward_flops + unit.backward_flops
            flops_by_stage[unit.stage] = flops_by_stage.get(unit.stage, 0) + flops
        return flops_by_stage


def validate_metadata(source: str, metadata: Mapping[str, Any]) -> RunMetadata:
    """Validate a trace's metadata and resolve its method. Raise `BadInput`, one line per fault, for
    values that no run writes.

    `source`: the trace's path, for the faults.
    """
    try:
        run = RunMetadata.model_validate(dict(metadata))
    except ValidationError as error:
        # one line for a key, though each entry of a list may have a fault
        faults = {
            str(fault["loc"][0]): f"{show(fault['input'])}: {fault['msg']}"
            for fault in error.errors()
        }
        raise BadInput(
            [f"{source}: metadata: {key}: {fault}" for key, fault in faults.items()]
        ) from None
    devices = len(set(run.device_of_stage or ()))
    if (run.replicas or 1) * devices > MOST_DEVICES:
        raise BadInput(
            f"{source}: metadata: replicas: {run.replicas}: must be at most {MOST_DEVICES} "
            f"devices, {devices} per replica"
        )
    run._resolved = _resolve(run)
    return run


def _resolve(run: RunMetadata) -> Tuple[Optional[Method], str]:
    if run.method is None:
        return None, "the trace does not name its method"
    args = run.method_args or {}
    try:
        known = MethodArgs.model_validate(args).model_dump(exclude_none=True)
        devices = run.device_of_stage or [0]
        order = resolve_method(run.method).order
        if order is not None and not order.fixed:
            # the trace records it as the placement of its stages
            known["stages_per_device"] = len(devices) // len(set(devices))
        return resolve_method(run.method, known), ""
    except BadInput as error:
        return None, f"the method's schedule cannot be rebuilt: {error.faults[0]}"
    except ValidationError:
        return None, f"the method's schedule cannot be rebuilt: invalid method_args: {show(args)}"
