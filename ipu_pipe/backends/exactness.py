"""What emulator and processes cannot train exactly, and so refuse."""

from __future__ import annotations

from typing import List

from ipu_pipe.job.record import Job
from ipu_pipe.model.probe import derived_weights
from ipu_pipe.schedule.methods import Reads
from ipu_pipe.shown import first_of


def exactness_faults(job: Job) -> List[str]:
    """Reasons why a job cannot be run exactly; empty if it can."""
    method, stages, reasons = job.method, len(job.part), []
    scope = job.config.clip.scope if job.config.clip else None
    if scope == "delayed_global" and method.flushes:
        reasons.append(
            f"clip.scope: delayed_global: with {method.name} the global norm itself is known: use scope: global"
        )
    if scope == "global" and method.reads_old(stages):
        reasons.append(
            f"clip.scope: global: with {method.name} a stage updates before the others' gradients exist, so the global norm "
            "is not known: use scope: stage, scope: delayed_global, or a synchronous method"
        )
    if method.reads_old(stages) and method.backward_reads is Reads.NEWEST:
        names = derived_weights(job.model, job.loss, *job.example)
        if names:
            reasons.append(
                f"model: with {method.name} the backward must read newer weights than the forward, but the forward keeps "
                f"tensors derived from {first_of(names)} (weight norm, autocast, InstanceNorm and the like do): use layers "
                "that use their weights directly, or method_args: {stash: true}"
            )
    return reasons
