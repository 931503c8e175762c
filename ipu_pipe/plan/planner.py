"""The planner: units of a model, hardware and limits -> configurations, best first, with reasons."""

from __future__ import annotations

from dataclasses import replace
from typing import List, Sequence, Tuple

from ipu_pipe.errors import BadInput
from ipu_pipe.hardware.times import state_bytes
from ipu_pipe.plan.answer import Answer
from ipu_pipe.plan.candidates import Candidate, candidates
from ipu_pipe.plan.prediction import Problem
from ipu_pipe.plan.reasons import STREAMED, binding, smallest_change
from ipu_pipe.plan.search import search
from ipu_pipe.text import show

SHOWN = 10  # configurations
MOST_DEVICES, MOST_BATCH = 4_096, 1_000_000_000  # of a plan: what is greater takes minutes


def make_plan(
    problem: Problem, methods: Sequence[str], devices: int, greatest_batch: int, count: int = SHOWN
) -> Answer:
    """The `count` configurations with the greatest predicted throughput on all of so many `devices`, for updates of at most
    `greatest_batch` samples. Where nothing fits and the devices have streaming memory, with the optimizer's state there."""
    for key, value, most in (("devices", devices, MOST_DEVICES), ("batch", greatest_batch, MOST_BATCH)):
        if not 1 <= value <= most:
            raise BadInput(f"--{key}: {show(value)}: must be a whole number from 1 to {most}")
    asked = tuple(candidates(methods, devices, len(problem.units), greatest_batch))
    found, change = search(problem, asked, count), None
    if not found.best and may_stream(problem):
        problem, change = replace(problem, streamed=True), f"{STREAMED}, as planned here"
        found = search(problem, asked, count)
    plans = tuple((each, binding(problem, each)) for each in found.best)
    if not plans:
        change = smallest_change(problem, asked, _with_more(problem, methods, devices, greatest_batch))
    return Answer(problem, devices, plans, found.refused, change)


def may_stream(problem: Problem) -> bool:
    """Whether there is optimizer state, on the device, that streaming memory could hold."""
    state = state_bytes(problem.precision, problem.optimizer)
    return not problem.streamed and problem.hardware.device.streaming_bytes is not None and state > 0


def _with_more(
    problem: Problem, methods: Sequence[str], devices: int, greatest_batch: int
) -> List[Tuple[int, Sequence[Candidate]]]:
    """Candidates for twice, four times and eight times the devices, as far as the hardware's links join them."""
    most = problem.hardware.most_devices
    numbers = [devices * factor for factor in (2, 4, 8) if most is None or devices * factor <= most]
    units = len(problem.units)
    return [(number, tuple(candidates(methods, number, units, greatest_batch, (True,)))) for number in numbers]
