"""The planner: units of a model, hardware and limits -> configurations, best first, with reasons."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Dict, List, Optional, Sequence, Tuple

from ipu_pipe.errors import BadInput
from ipu_pipe.hardware.unit_costs import count_state_bytes
from ipu_pipe.plan.candidates import Candidate, list_candidates
from ipu_pipe.plan.prediction import Prediction, Problem
from ipu_pipe.plan.reasons import STREAMED, Binding, find_binding
from ipu_pipe.plan.search import find_least_memory, search
from ipu_pipe.text import format_bytes, show

SHOWN = 10  # configurations
MOST_DEVICES, MOST_BATCH = 4_096, 1_000_000_000  # greater plans take minutes


@dataclass(frozen=True)
class Answer:
    """Configurations for a problem, best first, each with what holds it back; how many others were `refused`, by reason; and
    where nothing fits the `smallest_change` with which something would."""

    problem: Problem
    devices: int
    plans: Tuple[Tuple[Prediction, Binding], ...]
    refused: Dict[str, int]
    smallest_change: Optional[str] = None


def make_plan(
    problem: Problem, methods: Sequence[str], devices: int, greatest_batch: int, count: int = SHOWN
) -> Answer:
    """Return the `count` configurations with the greatest predicted throughput on all `devices`.

    For updates of at most `greatest_batch` samples. Where nothing fits and the devices have streaming memory, with the
    optimizer's state there. Raises BadInput for too many devices or samples.
    """
    for key, value, most in (("devices", devices, MOST_DEVICES), ("batch", greatest_batch, MOST_BATCH)):
        if not 1 <= value <= most:
            raise BadInput(f"--{key}: {show(value)}: must be an integer from 1 to {most}")
    asked = tuple(list_candidates(methods, devices, len(problem.units), greatest_batch))
    result, change = search(problem, asked, count), None
    if not result.best and _may_stream(problem):
        problem, change = replace(problem, streamed=True), f"{STREAMED}, as planned here"
        result = search(problem, asked, count)
    plans = tuple((prediction, find_binding(problem, prediction)) for prediction in result.best)
    if not plans:
        change = _find_smallest_change(problem, asked, methods, devices, greatest_batch)
    return Answer(problem, devices, plans, result.refused, change)


def _may_stream(problem: Problem) -> bool:
    """Return whether the device holds optimizer state that streaming memory could hold."""
    state = count_state_bytes(problem.precision, problem.moments)
    return not problem.streamed and problem.hardware.device.streaming_bytes is not None and state > 0


def _find_smallest_change(
    problem: Problem, asked: Sequence[Candidate], methods: Sequence[str], devices: int, greatest_batch: int
) -> Optional[str]:
    """Return what would make one of the candidates fit: more memory per device or more devices, whichever factor is smaller."""
    least = find_least_memory(problem, asked)
    if least is None:
        return None
    size, candidate = least
    memory = (
        f"{format_bytes(int(size))} of usable memory a device in place of {format_bytes(int(problem.memory_bytes))} "
        f"({_describe(candidate)})"
    )
    if problem.streamed:
        memory += ", optimizer state in streaming memory"
    for number in _list_more_devices(problem, devices):
        more = list_candidates(methods, number, len(problem.units), greatest_batch, (True,))
        needed = find_least_memory(problem, more)
        if needed is not None and needed[0] <= problem.memory_bytes:
            if number / devices < size / problem.memory_bytes:
                return f"{number} devices in place of {devices} ({_describe(needed[1])})"
            return f"{memory}, or {number} devices"
    return memory


def _list_more_devices(problem: Problem, devices: int) -> List[int]:
    """Return twice, four times and eight times the devices, as far as the hardware's links join them."""
    most = problem.hardware.most_devices
    return [devices * factor for factor in (2, 4, 8) if most is None or devices * factor <= most]


def _describe(asked: Candidate) -> str:
    again = ", recompute" if asked.recompute else ""
    return f"{asked.method}, depth {asked.depth}, width {asked.width}, micro_batch_size {asked.micro_batch_size}{again}"
