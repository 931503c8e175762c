"""Planned memory per stage and device (memory.json), and the papers' figures."""

from __future__ import annotations

from typing import Any, Iterable, Mapping, Sequence

import torch

from ipu_pipe.backends.interface import Report
from ipu_pipe.backends.table import get_backend
from ipu_pipe.hardware.memory import (
    KeptCounts,
    StageSizes,
    count_kept_microbatches,
    sum_stage_bytes,
)
from ipu_pipe.hardware.paper_figures import PipelineSizes, compute_paper_figures
from ipu_pipe.job.record import Job
from ipu_pipe.local.blocks import get_blocks
from ipu_pipe.model.batch import count_bytes
from ipu_pipe.replay.run import Run
from ipu_pipe.schedule.actions import SPLIT_PASSES
from ipu_pipe.schedule.stretches import IntArray
from ipu_pipe.schedule.table import list_stages
from ipu_pipe.schedule.versions import count_weight_copies
from ipu_pipe.update.optimizer import count_moments, get_kind, list_kinds


def build_memory_record(job: Job, measured: Report) -> dict[str, Any]:
    """Return the contents of `memory.json`.

    They are the planned memory of each stage and device; the greatest bytes of weight versions
    besides the newest, of each stage's process or of the emulator; and as `peak_memory` the
    greatest bytes of each device, by category.
    """
    planned = plan_memory(job, measured.optimizer_bytes)
    peaks = {} if measured.peak_memory is None else {"peak_memory": measured.peak_memory}
    if measured.links is None:
        # the emulator holds the versions of all stages in one process
        version_bytes = sum(measured.version_bytes) if job.config.backend.facts.emulates else None
        return {**planned, "emulator_bytes": version_bytes, **peaks}
    rows = [
        {**row, "version_bytes": size}
        for row, size in zip(planned["stages"], measured.version_bytes)
    ]
    return {**planned, "stages": rows, **peaks}


def plan_memory(job: Job, optimizer_bytes: Sequence[int] | None = None) -> dict[str, Any]:
    """Return the planned memory of all "stages" and "devices". `optimizer_bytes`: as measured, by
    stage.
    """
    table = build_memory_table(job, optimizer_bytes)
    return {
        "stages": [{"index": s, **row} for s, row in enumerate(table)],
        "devices": _build_device_memory(job, table),
    }


def _build_device_memory(
    job: Job,
    table: Sequence[Mapping[str, int]],
) -> list[dict[str, Any]]:
    """Return the planned bytes of each device; `table`: the rows of its stages from
    `build_memory_table`.

    Stages on one device peak at different times, so take the peak of their sum over the schedule;
    with recomputation, take the sum of their peaks, which may be a little more.
    """
    order = job.method.order
    activation_bytes = [row["activation_bytes"] for row in table]
    if (
        not job.config.recomputes
        and job.method.segments is None
        and len(set(job.placement)) < len(table)
    ):
        # a whole backward frees all that its forward keeps
        share = 1.0 if order is None else order.weight_share
        peaks = job.schedule.peak_activations(share, job.footprint.saved_bytes, job.placement)
    else:
        peaks = [
            sum(activation_bytes[s] for s in list_stages(job.placement, d))
            for d in sorted(set(job.placement))
        ]
    rows = []
    for device, peak in zip(sorted(set(job.placement)), peaks):
        stages = list_stages(job.placement, device)
        sums = {
            kind: sum(table[s][kind] for s in stages)
            for kind in ("weight_bytes", "gradient_bytes", "optimizer_bytes")
        }
        rows.append({"index": device, "stages": stages, **sums, "activation_bytes": int(peak)})
    return rows


def _count_kept(job: Job) -> tuple[IntArray, KeptCounts]:
    """Return the microbatches in flight on each stage, and the versions and microbatches that each
    stage keeps.
    """
    backend_in_flight = get_backend(job.config).count_in_flight(job)
    in_flight = job.schedule.max_in_flight() if backend_in_flight is None else backend_in_flight
    microbatches = count_kept_microbatches(
        in_flight.tolist(),
        job.config.recomputes,
        job.method.segments,
        job.method.turn,
        job.schedule.passes == SPLIT_PASSES,
    )
    if job.config.recomputes and backend_in_flight is not None:
        # such a pipeline does not recompute its last stage
        microbatches.inputs[in_flight == 1] = 0
    return in_flight, KeptCounts(count_weight_copies(job.table), *microbatches)


def build_memory_table(
    job: Job, optimizer_bytes: Sequence[int] | None = None
) -> list[dict[str, int]]:
    """Return a planned row for each stage: weight copies, delays, microbatches in flight, and bytes
    of each category on its device.

    `optimizer_bytes`: as measured, by stage.
    """
    parameters = dict(job.model.named_parameters())
    in_flight, counts = _count_kept(job)
    # replicas of local SGD have weights and optimizer state of their own; an outer optimizer has
    # weights and a velocity
    rounds = job.method.rounds
    copies_of_state = job.replica_count if rounds is not None else 1
    copies_of_outer = (
        1 + bool(rounds.outer.momentum) if rounds is not None and rounds.outer is not None else 0
    )
    trained = _count_trained_bytes(job)
    shared = _count_shared_layer_bytes(job)
    masters = Run.of(job, None).count_master_bytes()
    moments = _count_trained_bytes(job, times_moments=True)
    max_moments = _count_max_moments(job)
    delays = job.table.greatest_lag()
    backward_delays = job.table.greatest_backward_lag()
    rows = []
    for stage, entering in zip(job.partition.stages, _count_input_bytes(job)):
        s = stage.index
        weights, frozen = _count_weight_bytes(parameters, stage.parameters)
        # copies of weights of an earlier stage, to which one microbatch's gradient is on its way
        tied, frozen_copies = _count_weight_bytes(parameters, job.partition.list_replicas(s))
        # a stage without trained weights has no versions to keep
        if not weights + shared[s] + tied:
            counts.copies[s] = 1
        sizes = StageSizes(
            weights=weights + shared[s] + tied,
            frozen=frozen + frozen_copies,
            gradients=trained[s] + shared[s] + tied,
            optimizer=(moments[s] + max_moments * shared[s]) * copies_of_state + masters[s],
            # what rules keep, the average of `ema`, and an outer optimizer's weights and velocity
            accumulators=(
                len(job.rules.list_entries(s)) + (job.rules.decay is not None) + copies_of_outer
            )
            * trained[s],
            saved=job.footprint.saved_bytes[s],
            entering=entering,
        )
        share = job.precision.shares.get(s)
        if share is not None:
            # sharding divides what belongs to weights; a rank's activations stay whole
            of_weights = ("weights", "frozen", "gradients", "optimizer", "accumulators")
            sizes = sizes._replace(
                **{key: round(share * getattr(sizes, key)) for key in of_weights}
            )
        planned = sum_stage_bytes(counts.select(s), sizes)
        state = planned.optimizer + planned.accumulators
        rows.append(
            {
                "parameters": sum(parameters[name].numel() for name in stage.parameters),
                "weight_copies": int(counts.copies[s]),
                "weight_bytes": planned.weights + planned.versions,
                "gradient_bytes": planned.gradients,
                "optimizer_bytes": optimizer_bytes[s]
                if optimizer_bytes is not None and any(optimizer_bytes)
                else state,
                "activation_bytes": planned.activations,
                "forward_delay": int(delays[s]),
                "backward_delay": int(backward_delays[s]),
                "in_flight": int(in_flight[s]),
            }
        )
    return rows


def _count_max_moments(job: Job) -> int:
    """Return the copies of the weights in the optimizer's state, of the parameter group with the
    most.
    """
    return max(
        count_moments(get_kind(job.full_optimizer, group), group)
        for group in job.full_optimizer.param_groups
    )


def _count_weight_bytes(
    parameters: Mapping[str, torch.Tensor], names: Iterable[str]
) -> tuple[int, int]:
    """Return the bytes of the trained weights among these names, and of the frozen ones."""
    weights = [parameters[name] for name in names]
    trained = count_bytes([weight for weight in weights if weight.requires_grad])
    return trained, count_bytes(weights) - trained


def _count_shared_layer_bytes(job: Job) -> list[int]:
    """Return the bytes of the previous stage's layer of which each device holds a copy, if blocks
    share layers.
    """
    blocks = get_blocks(job.model)
    if blocks is None or not blocks.overlap:
        return [0] * len(job.partition)
    # the first stage has none before it
    return [0, *(count_bytes(list(piece.parameters())) for piece in blocks.pieces[:-1])]


def _count_input_bytes(job: Job) -> list[int]:
    """Return the bytes that enter each stage with a microbatch."""
    return [count_bytes(job.example[0]), *job.footprint.boundary_bytes]


def _count_trained_bytes(job: Job, times_moments: bool = False) -> list[int]:
    """Return the bytes of each stage that the optimizer updates: weights, or their float32 masters.

    `times_moments`: multiply each parameter's bytes by its copies in the optimizer's state.
    """
    trained = [0] * len(job.partition)
    for group in job.full_optimizer.param_groups:
        copies = count_moments(get_kind(job.full_optimizer, group), group) if times_moments else 1
        trained[group["stage"]] += copies * count_bytes(group["params"])
    return trained


def compute_memory_figures(job: Job) -> dict[str, Any] | None:
    """Return the papers' figures for this model and method; None for frozen weights and for
    optimizers that the papers do not rate.
    """
    is_frozen = any(not p.requires_grad for p in job.model.parameters())
    if is_frozen or not {"sgd", "adam", "adamw"}.issuperset(list_kinds(job.full_optimizer)):
        return None
    sizes = {name: count_bytes(p) for name, p in job.model.named_parameters()}
    pipeline = PipelineSizes(
        weight_bytes=[
            sum(sizes[name] for name in stage.parameters) for stage in job.partition.stages
        ],
        saved_bytes=job.footprint.saved_bytes,
        input_bytes=_count_input_bytes(job),
        moments=_count_max_moments(job),
        t2=max(len(job.rules.list_entries(stage.index)) for stage in job.partition.stages),
        method=job.method,
        accumulate=job.schedule.accumulate,
        in_flight=job.schedule.max_in_flight().tolist(),
        weight_copies=count_weight_copies(job.table).tolist(),
    )
    return compute_paper_figures(pipeline)
