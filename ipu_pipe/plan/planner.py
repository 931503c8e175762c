"""The planner: units of a model, hardware and limits -> configurations, best first, with reasons."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Dict, List, Optional, Sequence, Tuple

from ipu_pipe.errors import BadInput
from ipu_pipe.hardware.unit_costs import count_state_bytes
from ipu_pipe.plan.candidates import Candidate, list_candidates
from ipu_pipe.plan.prediction import (
    Prediction,
    Problem,
)
from ipu_pipe.plan.reasons import STREAMED, Binding, find_binding
from ipu_pipe.plan.search import find_least_memory, search
from ipu_pipe.text import format_bytes, show

SHOWN = 10  # configurations
MOST_DEVICES, MOST_BATCH = 4_096, 1_000_000_000  # of a plan: what is greater takes minutes


@dataclass(frozen=True)
class Answer:
    """Configurations for a problem, best first, each with what holds it back; `refused`: how many others, by reason;
    `smallest_change`: what would make something fit, where nothing does."""

    problem: Problem
    devices: int
    plans: Tuple[Tuple[Prediction, Binding], ...]
    refused: Dict[str, int]
    smallest_change: Optional[str] = None


def make_plan(
    problem: Problem, methods: Sequence[str], devices: int, greatest_batch: int, count: int = SHOWN
) -> Answer:
    """The `count` configurations with the greatest predicted throughput on all of so many `devices`, for updates of at most
    `greatest_batch` samples. Where nothing fits and the devices have streaming memory, with the optimizer's state there."""
    for key, value, most in (("devices", devices, MOST_DEVICES), ("batch", greatest_batch, MOST_BATCH)):
        if not 1 <= value <= most:
            raise BadInput(f"--{key}: {show(value)}: must be a whole number from 1 to {most}")
    asked = tuple(list_candidates(methods, devices, len(problem.units), greatest_batch))
    found, change = search(problem, asked, count), None
    if not found.best and may_stream(problem):
        problem, change = replace(problem, streamed=True), f"{STREAMED}, as planned here"
        found = search(problem, asked, count)
    plans = tuple((each, find_binding(problem, each)) for each in found.best)
    if not plans:
        change = find_smallest_change(problem, asked, _with_more(problem, methods, devices, greatest_batch))
    return Answer(problem, devices, plans, found.refused, change)


def may_stream(problem: Problem) -> bool:
    """Whether there is optimizer state, on the device, that streaming memory could hold."""
    state = count_state_bytes(problem.precision, problem.optimizer)
    return not problem.streamed and problem.hardware.device.streaming_bytes is not None and state > 0


def _with_more(
    problem: Problem, methods: Sequence[str], devices: int, greatest_batch: int
) -> List[Tuple[int, Sequence[Candidate]]]:
    """Candidates for twice, four times and eight times the devices, as far as the hardware's links join them."""
    most = problem.hardware.most_devices
    numbers = [devices * factor for factor in (2, 4, 8) if most is None or devices * factor <= most]
    units = len(problem.units)
    return [(number, tuple(list_candidates(methods, number, units, greatest_batch, (True,)))) for number in numbers]


def find_smallest_change(
    problem: Problem, asked: Sequence[Candidate], more_devices: Sequence[Tuple[int, Sequence[Candidate]]]
) -> Optional[str]:
    """What would make one of the candidates fit, where none does: so much memory a device, or so many devices, whichever is the
    smaller factor. `more_devices`: numbers of devices in rising order, and the candidates for each."""
    least = find_least_memory(problem, asked)
    if least is None:
        return None
    size, candidate = least
    factor = size / problem.memory_bytes
    said = (
        f"{format_bytes(int(size))} of usable memory a device in place of {format_bytes(int(problem.memory_bytes))} "
        f"({_words(candidate)})"
    )
    if problem.streamed:
        said += ", optimizer state in streaming memory"
    devices = candidate.devices
    for number, candidates in more_devices:
        needed = find_least_memory(problem, candidates)
        if needed is not None and needed[0] <= problem.memory_bytes:
            if number / devices < factor:
                return f"{number} devices in place of {devices} ({_words(needed[1])})"
            return f"{said}, or {number} devices"
    return said


def _words(asked: Candidate) -> str:
    again = ", recompute" if asked.recompute else ""
    return f"{asked.method}, depth {asked.depth}, width {asked.width}, micro_batch_size {asked.micro_batch_size}{again}"
