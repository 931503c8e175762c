"""The time of each stage's passes and updates on this machine, from a few passes of a microbatch after training."""

from __future__ import annotations

import copy
import statistics
import time
from typing import List

import torch

from ipu_pipe.errors import summarize
from ipu_pipe.job.record import Job
from ipu_pipe.local.blocks import compute_losses
from ipu_pipe.model.batch import call_model, clone_tensors, count_samples
from ipu_pipe.model.flops import BACKWARD
from ipu_pipe.model.restoring import modes_restored
from ipu_pipe.model.timing import REPEATS, PassSeconds, StageSeconds, time_passes
from ipu_pipe.update.optimizer import list_parts

ENOUGH = 0.5  # seconds, after which there is no repeat; the process has trained: nothing is left to warm up


def profile(job: Job) -> StageSeconds:
    """Return medians over passes of the job's example, or only the reason if the user's code cannot do another pass.

    Weights, buffers, gradients and random states stay as they are.
    """
    try:
        passes = _time_passes(job)
        update = _time_updates(job)
    # the user's code may raise anything, but must not lose a finished run
    except Exception as error:
        return StageSeconds((), (), (), f"its stages could not be timed ({summarize(error)})")
    backward = passes.backward
    # activations are recomputed
    if job.method.segments is not None:
        backward = [f + b for f, b in zip(passes.forward, backward)]
    how = f"medians of {passes.repeats} passes of {count_samples(job.example[0])} samples when the training was done"
    return StageSeconds(tuple(passes.forward), tuple(backward), tuple(update), how)


def _time_passes(job: Job) -> PassSeconds:
    x, y = job.example
    footprint = job.footprint
    flops = footprint.backward_flops or tuple(BACKWARD * f for f in footprint.forward_flops)

    def losses() -> List[torch.Tensor]:
        return compute_losses(job.loss, call_model(job.model, clone_tensors(x)), clone_tensors(y))

    with modes_restored(job.model):
        job.model.train()
        return time_passes(job.model, losses, job.part.begins, flops, enough=ENOUGH)


def _time_updates(job: Job) -> List[float]:
    """Return the time of a step of a copy of the optimizer, for each stage; without what rules add.

    It is 0 for an optimizer that is not torch's: that may count its steps.
    """
    seconds = [0.0] * len(job.part)
    parts = list_parts(job.optimizer)
    if not all(type(part).__module__.startswith("torch.optim.") for part in parts):
        return seconds
    for part in copy.deepcopy(parts):
        groups = part.param_groups
        for stage in range(len(job.part)):
            part.param_groups = [group for group in groups if group["stage"] == stage]
            parameters = [p for group in part.param_groups for p in group["params"]]
            for p in parameters:
                p.grad = torch.zeros_like(p)
            if parameters:
                seconds[stage] += statistics.median(_time_step(part, job.device.type) for _ in range(REPEATS))
    return seconds


def _time_step(optimizer: torch.optim.Optimizer, device: str) -> float:
    start = time.perf_counter()
    optimizer.step()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start
