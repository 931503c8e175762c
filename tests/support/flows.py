"""Train a job, or run the rows of an interpreter, batch by batch."""

from __future__ import annotations

import math
from functools import partial
from typing import Dict, Iterator, List, Tuple

import torch

from ipu_pipe.backends.interface import Engine, StepResult
from ipu_pipe.backends.processes.interpreter import Interpreter
from ipu_pipe.job.evaluation import EvaluationResult, load_test_batches
from ipu_pipe.job.record import Job
from ipu_pipe.pipeline.flow import Flow
from ipu_pipe.schedule.actions import Kind
from ipu_pipe.schedule.table import Schedule


def train_updates(job: Job, updates: int) -> Tuple[Flow, List[StepResult]]:
    """Train updates on the emulator.

    Return the flow, whose engine the caller closes, and the results of the updates.
    """
    flow = Flow(job)
    results: List[StepResult] = []
    for k in range(updates):
        flow.give()
        # the emulator has made it, before it leaves the pipeline
        results.append(flow.engine.take(k))
    return flow, results


def evaluate_on_test_set(engine: Engine, job: Job) -> List[EvaluationResult]:
    """Return an engine's results on the job's test set, as `run.loop` asks for them."""
    return engine.evaluate(partial(load_test_batches, job), job.metrics)


def run_batches(
    interpreter: Interpreter, schedule: Schedule, first: int, last: int
) -> Iterator[Tuple[int, Dict[int, torch.Tensor]]]:
    """Run the batches [first, last) of a row; yield each update with its table when it completes.

    A batch ends where the next one enters stage 0. The schedule is closed: its last batch ends with
    it.
    """
    for batch in range(first, last):
        cut: float = math.inf
        if batch + 1 < schedule.update_count:
            begin = (batch + 1) * schedule.accumulate
            forwards = schedule.slots(Kind.FORWARD, begin, begin + schedule.accumulate, slice(0, 1))
            cut = int(forwards.min())
        yield from interpreter.advance(cut, batch + 1)
