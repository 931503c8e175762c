"""What a run tells: the plan before it starts, `summary.json`, the trace of the schedule as executed, the closing words."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

import numpy as np
import torch

from ipu_pipe.backends.interface import Report
from ipu_pipe.backends.table import backend_of
from ipu_pipe.job.config import Config
from ipu_pipe.job.determinism import numerics
from ipu_pipe.job.position import Position
from ipu_pipe.job.record import DTYPES, Job
from ipu_pipe.local.blocks import blocks_of
from ipu_pipe.model.stages import describe
from ipu_pipe.report import trace
from ipu_pipe.schedule import clock
from ipu_pipe.schedule import figures as accounting
from ipu_pipe.schedule.drawing import format_text

MIB = 2**20
SHOWN_STAGES = 12


# ---- before


def opening(job: Job, done: int = 0) -> str:
    """The plan in a few lines, for the start of a run."""
    config = job.config
    parameters = sum(p.numel() for p in job.model.parameters())
    lines = [job.note] if job.note else []
    others = job.own_types.others(DTYPES[config.precision]) if job.own_types is not None else []
    if others:
        lines.append(
            f"precision: the model given in {' and '.join(others)} is trained in {config.precision}, and cast back at the end"
        )
    lines += [
        f"{_model_name(config)}: {parameters:,} parameters on {len(job.part)} stages; method {job.method.name}, "
        f"backend {config.backend.name} on {job.device_kind}",
        f"global batch size {job.batch} = micro_batch_size {config.micro_batch_size} x "
        f"gradient_accumulation {config.gradient_accumulation} x replicas {config.replicas}; "
        f"{job.updates - done} updates, {job.updates_per_epoch} an epoch",
    ]
    return "\n".join(lines)


def plan(job: Job) -> str:
    """All that `--dry-run` prints: stages, schedule, delays, predicted memory and traffic."""
    table = memory_table(job)
    lines = [
        opening(job),
        "",
        "stage  begins with                      parameters   lag  copies  in flight  memory (MiB)  sends on (KiB)",
    ]
    rows = describe(job.part, job.model)
    for (index, name, size), row in zip(rows, table):
        if SHOWN_STAGES // 2 <= index < len(rows) - SHOWN_STAGES // 2:
            lines += ["  ..."] if index == SHOWN_STAGES // 2 else []
            continue
        total = (row["weight_bytes"] + row["optimizer_bytes"] + row["activation_bytes"] + row["gradient_bytes"]) / MIB
        sends = job.footprint.boundary_bytes[index] / 1024 if index < len(rows) - 1 else 0.0
        lines.append(
            f"{index:5d}  {name or '(no weights)':30s} {size:12,d} {row['forward_delay']:5d} {row['weight_copies']:7d} "
            f"{row['in_flight']:10d} {total:13.2f} {sends:15.1f}"
        )
    busy = job.utilization()
    weights, state, activations = (
        sum(row[kind] for row in table) / MIB for kind in ("weight_bytes", "optimizer_bytes", "activation_bytes")
    )
    lines += [
        "",
        "lag: how many updates old the weights are that a forward reads when its gradient is used, greatest in the steady state",
        "memory: weight versions, gradients, optimizer state and activations in flight, as planned from one microbatch",
        f"in all: {weights:.1f} MiB weights, {state:.1f} optimizer, {activations:.1f} activations",
        *_rated(job),
        f"schedule: {job.schedule.slot_count:,} slots, stages busy {busy:.1%} of them (fill and drain included)",
        "",
        *_schedule_beginning(job),
    ]
    return "\n".join(lines)


def _rated(job: Job) -> List[str]:
    figures = memory_figures(job)
    if figures is None:
        return []
    return [
        f"weights, gradients and optimizer: {figures['weight_optimizer_copies']:.2f} copies of the weights, "
        f"{figures['weight_optimizer_ratio']:.2f} of what the synchronous method holds"
    ]


def _schedule_beginning(job: Job) -> List[str]:
    if len(job.part) > 40:
        return [f"the schedule has {len(job.part)} rows: tools/schedule.py prints it"]
    return ["its beginning:", format_text(job.schedule, last_slot=max(24, 2 * len(job.part) + 6))]


def memory_table(job: Job, held: Optional[Sequence[int]] = None) -> List[Dict[str, int]]:
    """Per stage, as planned: copies, lag, microbatches in flight, and the bytes of each kind that a device needs."""
    sizes = {name: p.numel() * p.element_size() for name, p in job.model.named_parameters()}
    planned = _planned_optimizer_bytes(job) if held is None or not any(held) else held
    rows = []
    lags, backward_lags = job.table.greatest_lag(), job.table.greatest_backward_lag()
    copies, in_flight = job.table.weight_copies(), job.schedule.max_in_flight()
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
        kept = accounting.held(in_flight, job.method.segments, job.method.turn)
        return [
            int(inputs * x + activations * size)
            for inputs, activations, x, size in zip(kept.inputs, kept.activations, entering, saved)
        ]
    return [count * size for count, size in zip(in_flight, saved)]


def memory_figures(job: Job) -> Optional[Dict[str, Any]]:
    """The papers' figures for this model and method (`schedule.figures.report`); None for optimizers they do not rate."""
    kind = _optimizer_kind(job)
    if kind is None:
        return None
    sizes = {name: p.numel() * p.element_size() for name, p in job.model.named_parameters()}
    accumulate = job.schedule.accumulate
    return accounting.report(
        weight_bytes=[sum(sizes[name] for name in stage.parameters) for stage in job.part.stages],
        saved_bytes=job.footprint.saved_bytes,
        input_bytes=_input_bytes(job),
        optimizer=kind,
        t2=any(rule.measures(stage.index) for rule in job.rules.rules for stage in job.part.stages),
        method=job.method,
        accumulate=accumulate,
        microbatches=accumulate,
        depth=len(job.part),
        segments=job.method.segments,
        in_flight=job.schedule.max_in_flight().tolist(),
        weight_copies=job.table.weight_copies().tolist(),
    )


def _optimizer_kind(job: Job) -> Optional[str]:
    if isinstance(job.optimizer, (torch.optim.Adam, torch.optim.AdamW)):
        return "adam"
    if isinstance(job.optimizer, torch.optim.SGD):
        return "momentum" if any(group["momentum"] for group in job.optimizer.param_groups) else "sgd"
    return None


def _planned_optimizer_bytes(job: Job) -> List[int]:
    """State that the optimizer will hold: one copy with momentum, two for Adam (its step counts are left out), one more for
    each rule that accumulates on the stage; 0 for optimizers not known."""
    moments = {"adam": 2, "momentum": 1}.get(_optimizer_kind(job) or "", 0)
    planned = [0] * len(job.part)
    for group in job.groups:
        stage = group["stage"]
        copies = moments + sum(rule.measures(stage) for rule in job.rules.rules)
        planned[stage] += copies * sum(p.numel() * p.element_size() for p in group["params"])
    return [own + moments * size for own, size in zip(planned, _behind_bytes(job))]


# ---- after


def summarise(
    job: Job,
    position: Position,
    final: Tuple[Optional[float], Optional[float]],
    measured: Report,
    tested: Sequence[Tuple[Optional[float], Optional[float]]] = (),
) -> Dict[str, Any]:
    """The contents of `summary.json`."""
    config = job.config
    busy = job.utilization() if measured.utilization is None else measured.utilization
    rate = position.timed_updates * job.batch / position.seconds if position.seconds else None
    return {
        "schema": 1,
        "method": job.method.name,
        "backend": config.backend.name,
        "device": job.device_kind,
        "numerics": numerics(config.backend),
        "model": {
            "entry": _model_name(config),
            "parameters": sum(p.numel() for p in job.model.parameters()),
            "stages": len(job.part),
        },
        "batch": {
            "micro_batch_size": config.micro_batch_size,
            "gradient_accumulation": config.gradient_accumulation,
            "replicas": config.replicas,
            "global_batch_size": job.batch,
        },
        "optimizer": job.used.optimizer.model_dump() if job.used.optimizer else None,
        "loss": job.used.loss.model_dump(exclude={"groups"}) if job.used.loss else None,
        "steps": position.update,
        "samples": position.update * job.batch,
        "updates_per_epoch": job.updates_per_epoch,
        "initial": dict(zip(("test_loss", "test_accuracy"), position.initial)),
        "final": {
            "train_loss": position.epoch_loss / position.epoch_updates if position.epoch_updates else None,
            "test_loss": final[0],
            "test_accuracy": final[1],
        },
        "throughput_samples_per_second": rate,
        "utilization": busy,
        "bubble_fraction": 1 - busy,
        "stages_begin_at": job.part.begin_names(),
        "phases": job.phases(),
        "stages": [_stage_record(index, row) for index, row in enumerate(memory_table(job, measured.optimizer_bytes))],
        "links": links(job) if measured.links is None else _measured_links(measured.links, measured.microbatches),
        **_block_records(job, measured, tested),
        "memory": memory_figures(job),
    }


def _model_name(config: Config) -> str:
    """The config's entry, or the class of the model that Python gave."""
    given = config.given.model if config.given is not None else None
    return config.model.entry if given is None else given.name


def _block_records(
    job: Job, measured: Report, tested: Sequence[Tuple[Optional[float], Optional[float]]]
) -> Dict[str, Any]:
    """Of methods with losses of their own: each block's test loss and accuracy by its own head, the model's own last; and the
    traffic of gradients of shared layers, apart from `links`."""
    if job.method.structure is None:
        return {}
    first = len(job.part) - len(tested)
    blocks = [
        {"index": first + i, "test_loss": loss, "test_accuracy": accuracy} for i, (loss, accuracy) in enumerate(tested)
    ]
    shared = shared_links(job) if measured.shared is None else _measured_links(measured.shared, measured.microbatches)
    return {"blocks": blocks, "shared_layer_links": shared}


def shared_links(job: Job) -> List[Dict[str, Any]]:
    """Gradients of shared layers that neighbours exchange in an update, as planned; none without an overlap."""
    blocks = blocks_of(job.model)
    if blocks is None or not blocks.overlap:
        return []
    entries, messages = [], job.schedule.update_count
    for s, piece in enumerate(blocks.pieces[:-1]):
        size = sum(p.numel() * p.element_size() for p in piece.parameters() if p.requires_grad)
        for src, dst in ((s, s + 1), (s + 1, s)):
            per_microbatch = size * messages // max(job.schedule.microbatches, 1)
            entry = {"src": src, "dst": dst, "bytes": size * messages, "messages": messages}
            entries.append({**entry, "bytes_per_microbatch": per_microbatch})
    return entries


def _stage_record(index: int, row: Dict[str, int]) -> Dict[str, Any]:
    return {
        "index": index,
        "parameters": row["parameters"],
        "weight_copies": row["weight_copies"],
        "weight_bytes": row["weight_bytes"],
        "optimizer_bytes": row["optimizer_bytes"],
        "activation_bytes": row["activation_bytes"],
        "forward_delay": row["forward_delay"],
        "backward_delay": row["backward_delay"],
    }


def links(job: Job) -> List[Dict[str, int]]:
    """Traffic between neighbouring stages as planned, one entry a direction: activations on, gradients back where they cross.
    Where a stage holds the layer before its own too, it is given what enters that one (the second stage has the input)."""
    messages = job.schedule.microbatches
    sizes, structure = list(enumerate(job.footprint.boundary_bytes)), job.method.structure
    if structure is not None and structure.overlap:
        sizes = [(s + structure.overlap, size) for s, size in sizes if s + structure.overlap < len(job.part) - 1]
    entries = []
    for s, size in sizes:
        for src, dst in ((s, s + 1),) if structure is not None else ((s, s + 1), (s + 1, s)):
            entries.append(
                {"src": src, "dst": dst, "bytes": size * messages, "messages": messages, "bytes_per_microbatch": size}
            )
    return entries


def slot_nanoseconds(job: Job, position: Position) -> float:
    """Measured mean time of a slot: the emulator does all stages' work in turn, so a slot stands for P stages' share."""
    if not position.timed_updates:
        return 1e6
    seconds = position.seconds / position.timed_updates * job.updates
    return 1e9 * seconds / job.schedule.slot_count


def memory(job: Job, measured: Report) -> Dict[str, Any]:
    """The contents of `memory.json`: what each stage's device needs as planned, and the greatest bytes of weight versions
    besides the newest that were held: by each stage's process, or by the emulator for all."""
    stages = [{"index": s, **row} for s, row in enumerate(memory_table(job, measured.optimizer_bytes))]
    if measured.links is None:
        held = sum(measured.version_bytes) if backend_of(job.config).emulates else None
        return {"stages": stages, "emulator_bytes": held}
    return {"stages": [{**row, "version_bytes": held} for row, held in zip(stages, measured.version_bytes)]}


def _measured_links(sent: Mapping[Tuple[int, int], Tuple[int, int]], microbatches: int) -> List[Dict[str, Any]]:
    """Of `microbatches`, those since the run was last resumed."""
    return [
        {
            "src": src,
            "dst": dst,
            "bytes": size,
            "messages": messages,
            "bytes_per_microbatch": size // max(microbatches, 1),
        }
        for (src, dst), (size, messages) in sorted(sent.items())
    ]


def write_trace(
    job: Job,
    path: Path,
    slot_ns: float,
    measured: Optional[Sequence[trace.Event]] = None,
    measured_counters: Sequence[trace.Counter] = (),
) -> None:
    """Write what the devices did, or, where they have no clocks of their own, the schedule as executed; of long runs the first
    microbatches (the metadata say which)."""
    schedule, table = job.schedule, job.table
    most = job.config.log.trace_microbatches
    count = min(schedule.microbatches, most)
    batch = schedule.accumulate
    if count < schedule.microbatches:
        count = max(batch, count // batch * batch)
    metadata: Dict[str, Any] = {
        "method": job.method.name,
        "stages": len(job.part),
        "microbatches": schedule.microbatches,
        "traced_microbatches": count,
        "gradients_cross": job.method.structure is None,
    }
    if measured is not None:
        begin = min((event.start_ns for event in measured), default=0)
        events = [e._replace(start_ns=e.start_ns - begin, end_ns=e.end_ns - begin) for e in measured]
        values = [c._replace(time_ns=c.time_ns - begin) for c in measured_counters]
        trace.write_chrome(path, sorted(events, key=lambda e: e.start_ns), values, {**metadata, "modelled": False})
        return
    events, counters = clock.modelled_events(
        clock.clock(schedule, clock.slot_costs(schedule), count),
        (table.forward(0, count), table.backward(0, count)),
        accumulate=batch,
        unit_ns=slot_ns,
        device_of_stage=schedule.device_of_stage,
        boundary_bytes=job.footprint.boundary_bytes,
        gradients_cross=job.method.structure is None,
    )
    why = "the emulator runs all stages in one process: times are slots times the measured mean slot"
    trace.write_chrome(path, events, counters, {**metadata, "modelled": True, "why_modelled": why, "slot_ns": slot_ns})


def closing(report: Dict[str, Any], folder: Path) -> str:
    """The readable summary at the end of a run; its last line is the contract's throughput line."""
    first, last = report["initial"], report["final"]
    lags = [stage["forward_delay"] for stage in report["stages"]]
    copies = np.array([stage["weight_copies"] for stage in report["stages"]])
    lines = [
        "",
        f"{report['method']} on {report['model']['stages']} stages: {report['steps']} updates of "
        f"{report['batch']['global_batch_size']} samples",
        f"  test accuracy {_percent(first['test_accuracy'])} -> {_percent(last['test_accuracy'])}, "
        f"test loss {_number(first['test_loss'])} -> {_number(last['test_loss'])}, training loss {_number(last['train_loss'])}",
        f"  stages busy {report['utilization']:.1%} of the schedule's slots; greatest lag {_range(lags)} updates; "
        f"weight copies {_range(copies.tolist())} a stage",
        "  where to look:",
        f"    {folder / 'summary.json'}   all numbers",
        f"    {folder / 'trace.json.gz'}  the schedule as executed: open it in ui.perfetto.dev",
        f"    {folder / 'metrics.jsonl'}  losses and rates by update; tensorboard --logdir {folder}",
        f"    {folder / 'checkpoints'}    weights",
    ]
    rate = report["throughput_samples_per_second"]
    lines.append(
        f"throughput: {rate:.1f} samples/sec" if rate is not None else "throughput: not measured (one update only)"
    )
    return "\n".join(lines)


def _percent(value: Optional[float]) -> str:
    return "unknown" if value is None else f"{value:.3f}"


def _number(value: Optional[float]) -> str:
    return "unknown" if value is None else f"{value:.4f}"


def _range(values: Sequence[int]) -> str:
    return str(values[0]) if min(values) == max(values) else f"{min(values)} to {max(values)}"
