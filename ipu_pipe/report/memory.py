"""What each stage's device needs, as planned from one microbatch and the schedule; the papers' figures for it; `memory.json`."""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Sequence

import torch

from ipu_pipe.backends.interface import Report
from ipu_pipe.backends.table import backend_of
from ipu_pipe.job.record import Job
from ipu_pipe.local.blocks import blocks_of
from ipu_pipe.schedule import figures
from ipu_pipe.schedule.copies import weight_copies


def memory_record(job: Job, measured: Report) -> Dict[str, Any]:
    """The contents of `memory.json`: what each stage's device needs as planned, and the greatest bytes of weight versions
    besides the newest that were held: by each stage's process, or by the emulator for all."""
    stages = [{"index": s, **row} for s, row in enumerate(memory_table(job, measured.optimizer_bytes))]
    if measured.links is None:
        held = sum(measured.version_bytes) if backend_of(job.config).emulates else None
        return {"stages": stages, "emulator_bytes": held}
    return {"stages": [{**row, "version_bytes": held} for row, held in zip(stages, measured.version_bytes)]}


def memory_table(job: Job, held: Optional[Sequence[int]] = None) -> List[Dict[str, int]]:
    """Per stage, as planned: copies, lag, microbatches in flight, and the bytes of each kind that a device needs."""
    sizes = {name: p.numel() * p.element_size() for name, p in job.model.named_parameters()}
    planned = _planned_optimizer_bytes(job) if held is None or not any(held) else held
    rows = []
    lags, backward_lags = job.table.greatest_lag(), job.table.greatest_backward_lag()
    copies, in_flight = weight_copies(job.table), job.schedule.max_in_flight()
    activations = _activation_bytes(job, in_flight.tolist())
    trained = [0] * len(job.part)
    for group in job.groups:
        trained[group["stage"]] += sum(p.numel() * p.element_size() for p in group["params"])
    behind = _behind_bytes(job)
    for stage in job.part.stages:
        s = stage.index
        weights = sum(sizes[name] for name in stage.parameters) + behind[s]
        rows.append({
            "parameters": sum(job.model.get_parameter(name).numel() for name in stage.parameters),
            "weight_copies": int(copies[s]),
            "weight_bytes": weights * int(copies[s]),
            "gradient_bytes": trained[s] + behind[s],
            "optimizer_bytes": planned[s],
            "activation_bytes": activations[s],
            "forward_delay": int(lags[s]),
            "backward_delay": int(backward_lags[s]),
            "in_flight": int(in_flight[s]),
        })  # fmt: skip
    return rows


def _behind_bytes(job: Job) -> List[int]:
    """Weights of the layer behind that each stage's device holds too, where blocks share layers."""
    blocks = blocks_of(job.model)
    if blocks is None or not blocks.overlap:
        return [0] * len(job.part)
    own = [sum(p.numel() * p.element_size() for p in piece.parameters()) for piece in blocks.pieces]
    return [0, *own[:-1]]


def _input_bytes(job: Job) -> List[int]:
    """What enters each stage with a microbatch."""
    x = job.example[0]
    return [x.numel() * x.element_size(), *job.footprint.boundary_bytes]


def _activation_bytes(job: Job, in_flight: Sequence[int]) -> List[int]:
    """What each stage holds at most: all that its microbatches in flight leave there, or, recomputing, the inputs of its
    segment (of itself alone, with `recompute: true`) and the activations between recomputation and backward."""
    saved, entering = job.footprint.saved_bytes, _input_bytes(job)
    if job.config.recompute:
        return [count * x + size for count, x, size in zip(in_flight, entering, saved)]
    if job.method.segments is not None and len(job.part) > 1:
        kept = figures.held(in_flight, job.method.segments, job.method.turn)
        return [
            int(inputs * x + activations * size)
            for inputs, activations, x, size in zip(kept.inputs, kept.activations, entering, saved)
        ]
    return [count * size for count, size in zip(in_flight, saved)]


def _planned_optimizer_bytes(job: Job) -> List[int]:
    """State that the optimizer will hold: one copy with momentum, two for Adam (its step counts are left out), one more for
    each rule that accumulates on the stage; 0 for optimizers not known."""
    moments = {"adam": 2, "momentum": 1}.get(_optimizer_kind(job) or "", 0)
    planned = [0] * len(job.part)
    for group in job.groups:
        stage = group["stage"]
        copies = moments + len(job.rules.entries(stage))
        planned[stage] += copies * sum(p.numel() * p.element_size() for p in group["params"])
    return [own + moments * size for own, size in zip(planned, _behind_bytes(job))]


def _optimizer_kind(job: Job) -> Optional[str]:
    if isinstance(job.optimizer, (torch.optim.Adam, torch.optim.AdamW)):
        return "adam"
    if isinstance(job.optimizer, torch.optim.SGD):
        return "momentum" if any(group["momentum"] for group in job.optimizer.param_groups) else "sgd"
    return None


def memory_figures(job: Job) -> Optional[Dict[str, Any]]:
    """The papers' figures for this model and method (`schedule.figures.report`); None for optimizers they do not rate."""
    kind = _optimizer_kind(job)
    if kind is None:
        return None
    sizes = {name: p.numel() * p.element_size() for name, p in job.model.named_parameters()}
    accumulate = job.schedule.accumulate
    return figures.report(
        weight_bytes=[sum(sizes[name] for name in stage.parameters) for stage in job.part.stages],
        saved_bytes=job.footprint.saved_bytes,
        input_bytes=_input_bytes(job),
        optimizer=kind,
        t2=any(job.rules.entries(stage.index) for stage in job.part.stages),
        method=job.method,
        accumulate=accumulate,
        microbatches=accumulate,
        depth=len(job.part),
        segments=job.method.segments,
        in_flight=job.schedule.max_in_flight().tolist(),
        weight_copies=weight_copies(job.table).tolist(),
    )
