"""The jobs that the XLA backend refuses, each by name, before anything is compiled."""

from __future__ import annotations

from typing import Any

import torch

from ipu_pipe.backends.features import list_lacking
from ipu_pipe.backends.xla.devices import list_devices
from ipu_pipe.cut.graphs import trace_pieces
from ipu_pipe.job.record import Job
from ipu_pipe.refusals import EMULATOR, Argument, name_key
from ipu_pipe.replay.work import list_exactness_faults
from ipu_pipe.schedule.methods import Reads, Timeline
from ipu_pipe.text import list_some
from ipu_pipe.update.optimizer import get_kind
from ipu_pipe.update.rules import select_rules

# the rules that may read the step of an optimizer
PREDICTIONS = ("weight_prediction", "spectrain")
REMEDY = f"use {EMULATOR}"


def list_faults(job: Job) -> list[str]:
    """Return the reasons why XLA devices cannot train a job, one line each, besides the features
    that they lack. The stages' graphs are traced, and kept, if there is no other reason.
    """
    faults = [
        *(f"{fault}: {REMEDY}" for fault, applies in _list_settings(job).items() if applies),
        *(f"{fault}: {REMEDY}" for fault in _list_optimizer_faults(job)),
        # of clipping, which is refused anyway, nothing more
        *(fault for fault in list_exactness_faults(job) if str(Argument("clip")) not in fault),
    ]
    if job.config.backend.program == "slot":
        faults += list_slot_faults(job)
    # a job that was placed for another backend is not cut
    if faults or list_lacking(job) or not job.pieces:
        return faults
    return _list_missing_operations(job)


def list_slot_faults(job: Job) -> list[str]:
    """Return why a program a slot cannot run a job, one line each."""
    method = job.method
    reads = (method.forward_reads, method.backward_reads)
    is_dataflow = method.pipeline is Timeline.DATAFLOW and reads == (Reads.NEWEST, Reads.NEWEST)
    # devices in use, of which a placement may name more
    devices = len({device % len(list_devices(job.config.backend)) for device in job.placement})
    rules = [rule.key for rule, _ in select_rules(job.config.method_settings(), method)]
    kinds = {get_kind(job.full_optimizer, group) for group in job.full_optimizer.param_groups}
    faults = {
        f"method: {method.name}: must be one whose passes read the newest weights in a dataflow "
        "pipeline, such as pipelined_backprop or pipemare": not is_dataflow,
        f"{Argument('warmup')}: synchronous updates have another order": job.rules.switch > 0,
        f"{Argument('backend_args.devices')}: {devices}: a program runs on one device": devices > 1,
        f"{Argument('trace')}: a program has no times of its actions: leave it out": bool(
            job.traced_updates
        ),
        f"method_args.{list_some(rules)}: weights are predicted by the step of Adam": kinds
        != {"sgd"}
        and any(rule in PREDICTIONS for rule in rules),
    }
    return [
        f"{Argument('backend_args.program')}: slot: {fault}"
        for fault, applies in faults.items()
        if applies
    ]


def _list_missing_operations(job: Job) -> list[str]:
    """Return the operations of each stage that cannot be lowered."""
    from ipu_pipe.backends.xla.lower import list_missing

    # kept: `make_options` hands them to the engine
    job.stage_graphs = trace_pieces(job.pieces, job.example, job.loss)
    faults = []
    for s, graphs in enumerate(job.stage_graphs):
        missing = [*list_missing(graphs.forward), *list_missing(graphs.backward)]
        if missing:
            names = list_some(list(dict.fromkeys(missing)))
            faults.append(f"model: stage {s}: xla has no {names}: {REMEDY}")
    return faults


def _list_settings(job: Job) -> dict[str, Any]:
    """Return the settings that the devices do not support: fault -> whether it applies."""
    backend = job.config.backend
    is_double = any(p.dtype == torch.float64 for p in job.model.parameters())
    return {
        f"precision: float64: {backend.platform} devices have none": is_double
        and backend.platform in ("tpu", "tt"),
        f"{Argument('device')}: {backend.device}: belongs to the host, must be cpu with xla": backend.device
        != "cpu",
    }


def _list_optimizer_faults(job: Job) -> list[str]:
    """Return why the optimizer, or a rule, has no function of arrays."""
    from ipu_pipe.backends.xla.update import KINDS, RULES, list_unsupported

    faults = []
    optimizer = job.full_optimizer
    for group in optimizer.param_groups:
        kind = get_kind(optimizer, group)
        if kind not in KINDS:
            faults.append(f"{name_key('optimizer.name')}: {kind}: xla has {', '.join(KINDS)}")
    faults += list_unsupported(optimizer.param_groups)
    acting = select_rules(job.config.method_settings(), job.method)
    faults += [
        f"method_args.{rule.key}: xla does not have this rule"
        for rule, _ in acting
        if rule.key not in RULES
    ]
    return list(dict.fromkeys(faults))
