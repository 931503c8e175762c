"""What a trace's metadata say of its run, checked: a file may say anything."""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Tuple

from ipu_pipe.config.method_args import MethodArgs
from ipu_pipe.errors import BadInput
from ipu_pipe.schedule.methods import Method, resolve_method
from ipu_pipe.schedule.timelines import compute_utilization, make_schedule
from ipu_pipe.text import show
from ipu_pipe.trace.events import UnitRow

MOST_STAGES = 1 << 12
MOST_PLANNED = 1 << 20  # stages times microbatches: a schedule longer than that is not made again only to be counted
MOST_DEVICES = 1 << 16


class RunFacts(NamedTuple):
    """None and empty: not told. `why_no_method`: why its schedule cannot be made again."""

    name: Optional[str]
    backend: Optional[str]
    modelled: bool
    why_modelled: Optional[str]
    method: Optional[Method]
    why_no_method: str
    stages: Optional[int]
    accumulate: Optional[int]
    microbatches: Optional[int]
    replicas: int
    device_of_stage: Tuple[int, ...]
    gradients_cross: bool
    units: Tuple[UnitRow, ...]
    planned_bubble: Optional[float]

    @property
    def devices(self) -> List[int]:
        """All that the run has."""
        first = sorted(set(self.device_of_stage))
        return [device + replica * len(first) for replica in range(self.replicas) for device in first]

    def flops(self) -> Dict[int, float]:
        """Return each stage's FLOPs of a microbatch, forward and backward."""
        by_stage: Dict[int, float] = {}
        for unit in self.units:
            flops = unit["forward_flops"] + unit["backward_flops"]
            by_stage[unit["stage"]] = by_stage.get(unit["stage"], 0) + flops
        return by_stage

    def planned_bubble_fraction(self) -> Optional[float]:
        """As told, or of the schedule made again: of all of it, or where that is long, of the steady state."""
        if self.planned_bubble is not None or self.method is None or not self.stages or not self.accumulate:
            return self.planned_bubble
        try:
            if self.stages > MOST_STAGES:
                return None
            if not self.microbatches or self.stages * self.microbatches > MOST_PLANNED:
                return 1 - compute_utilization(self.method, self.stages, self.accumulate)
            return 1 - make_schedule(self.method, self.stages, self.microbatches, self.accumulate).busy_share()
        except BadInput:  # what the trace says of its run does not fit together
            return None


def read_run_facts(where: Any, metadata: Mapping[str, Any]) -> RunFacts:
    """Raises BadInput, a line a fault, for values that no run writes."""
    faults: List[str] = []

    def told(key: str, allowed: Any, what: str, least: float = 0) -> Any:
        value = metadata.get(key)
        good = isinstance(value, allowed) and (isinstance(value, bool) is (allowed is bool))
        if value is None or (good and (not isinstance(value, (int, float)) or least <= value < 1 << 31)):
            return value
        faults.append(f"{key}: {show(value)}: must be {what}")
        return None

    name, backend = told("method", str, "a name"), told("backend", str, "a name")
    stages, accumulate = told("stages", int, "a whole number", 1), told("accumulate", int, "a whole number", 1)
    count = told("traced_microbatches", int, "a whole number") or told("microbatches", int, "a whole number")
    placed = told("device_of_stage", list, "devices") or []
    if not all(isinstance(device, int) and 0 <= device < 1 << 20 for device in placed):
        faults.append(f"device_of_stage: {show(placed)}: must be devices")
    planned = told("planned_bubble_fraction", (int, float), "a share")
    args = told("method_args", dict, "a mapping") or {}
    units = told("units", list, "units") or []
    faults += [
        f"units: {show(unit)}: must be {list(UnitRow.__annotations__)}" for unit in units if not _is_unit(unit)
    ][:1]
    replicas = told("replicas", int, "a whole number", 1) or 1
    if not faults and replicas * len(set(placed)) > MOST_DEVICES:
        faults.append(
            f"replicas: {replicas}: must be at most {MOST_DEVICES} devices in all, {len(set(placed))} a replica"
        )
    modelled, crosses = told("modelled", bool, "true or false"), told("gradients_cross", bool, "true or false")
    why = told("why_modelled", str, "a sentence")
    if faults:
        raise BadInput([f"{where}: metadata: {fault}" for fault in faults])
    method, why_not = _method(name, args)
    return RunFacts(
        name, backend, bool(modelled), why, method, why_not, stages, accumulate, count, replicas, tuple(placed),
        crosses is not False, tuple(units), planned,
    )  # fmt: skip


def _is_unit(unit: Any) -> bool:
    if not isinstance(unit, dict) or not isinstance(unit.get("name"), str) or not isinstance(unit.get("stage"), int):
        return False
    flops = [unit.get("forward_flops"), unit.get("backward_flops")]
    return all(isinstance(value, (int, float)) and 0 <= value < 1e30 for value in flops)


def _method(name: Optional[str], args: Dict[str, Any]) -> Tuple[Optional[Method], str]:
    if name is None:
        return None, "the trace does not say its method"
    try:
        checked = MethodArgs.model_validate(args).model_dump(exclude_none=True)
        return resolve_method(name, checked), ""
    except BadInput as error:
        return None, f"the method's schedule cannot be made again: {error.faults[0]}"
    except ValueError:  # pydantic's
        return None, f"the method's schedule cannot be made again: method_args: {show(args)}: are not valid"
