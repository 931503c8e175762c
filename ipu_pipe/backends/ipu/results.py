"""From what a call gives to the results of its updates."""

from __future__ import annotations

from typing import List, Optional, Sequence, Tuple

import torch
import torch.distributed as dist

from ipu_pipe.backends.interface import StepResult
from ipu_pipe.backends.ipu.faults import check_finite
from ipu_pipe.backends.ranks import are_joined
from ipu_pipe.job.record import Job
from ipu_pipe.local.blocks import get_blocks


def losses_of(job: Job) -> int:
    """How many losses the model has: one, or one of each block that trains."""
    blocks = get_blocks(job.model)
    return 1 if blocks is None else len(blocks.heads) + 1


def results_of(job: Job, k: int, found: Sequence[torch.Tensor]) -> List[StepResult]:
    """Of update k and the others of its call: mean losses and shares of right answers over what the output mode gives."""
    config, ipu, blocks = job.config, job.config.ipu, losses_of(job)
    iterations = ipu.device_iterations
    losses = found[1].double().reshape(-1, blocks)
    answers = found[2].double().reshape(-1, blocks, 2) if len(found) > 2 else None
    parts = iterations if ipu.output_mode in ("all", "every_n") else 1
    means = losses.reshape(parts, -1, blocks).mean(dim=1)
    if ipu.output_mode == "sum":
        means /= iterations * config.gradient_accumulation
    right = None if answers is None else answers.reshape(parts, -1, blocks, 2).sum(dim=1)
    means, right = _over_instances(means, right)
    samples = config.micro_batch_size * config.gradient_accumulation * config.replicas
    results = []
    for i in range(iterations):
        row = means[min(i, parts - 1)].tolist()
        shares: List[Optional[float]] = [None] * blocks
        if right is not None:
            counted = right[min(i, parts - 1)]
            shares = (counted[:, 0] / counted[:, 1].clamp(min=1)).tolist()
        check_finite(config, k + i, row)
        each = tuple(zip(row, shares)) if blocks > 1 else ()
        results.append(StepResult(row[-1], shares[-1], samples, each))
    return results


def _over_instances(means: torch.Tensor, right: Optional[torch.Tensor]) -> Tuple[torch.Tensor, Optional[torch.Tensor]]:
    """Over poprun's instances, where there are several."""
    if not are_joined():
        return means, right
    dist.all_reduce(means)
    if right is not None:
        dist.all_reduce(right)
    return means / dist.get_world_size(), right
