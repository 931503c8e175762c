"""`summary.json`: what a run was and what came of it."""

from __future__ import annotations

from typing import Any, Dict, Optional, Sequence

from ipu_pipe.backends.interface import Report
from ipu_pipe.errors import BadInput
from ipu_pipe.job.numerics import record_numerics
from ipu_pipe.job.position import Measured, Position
from ipu_pipe.job.record import Job
from ipu_pipe.report.memory import memory_figures, memory_table
from ipu_pipe.report.modelled import StageCosts, modelled
from ipu_pipe.report.traffic import links, measured_links, shared_links
from ipu_pipe.report.words import model_name

SCHEMA = 2
OF_A_STAGE = (
    "parameters", "weight_copies", "weight_bytes", "optimizer_bytes", "activation_bytes", "forward_delay", "backward_delay",
)  # fmt: skip


def summarise(
    job: Job,
    position: Position,
    final: Measured,
    measured: Report,
    tested: Sequence[Measured] = (),
    costs: Optional[StageCosts] = None,
    stopped: Optional[str] = None,
) -> Dict[str, Any]:
    """The contents of `summary.json`. `costs`: of the stages, where no device has a clock; `stopped`:
    why the run ended sooner than planned."""
    config = job.config
    rate = position.timed_updates * job.batch / position.seconds if position.seconds else None
    return {
        "schema": SCHEMA,
        "method": job.method.name,
        "backend": config.backend.name,
        "device": job.device_kind,
        "numerics": record_numerics(config.backend),
        "precision": {"name": config.precision, **job.numbers.record},
        "model": {
            "entry": model_name(config),
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
        "planned_steps": job.updates,
        "stopped": stopped,
        "best": position.best,
        "samples": position.update * job.batch,
        "updates_per_epoch": job.updates_per_epoch,
        "initial": position.initial.record(),
        "final": {
            "train_loss": position.epoch_loss / position.epoch_updates if position.epoch_updates else None,
            **final.record(),
        },
        "throughput_samples_per_second": rate,
        **_utilization(job, measured, costs),
        "stages_begin_at": job.part.begin_names(),
        "phases": job.phases(),
        "stages": [
            {"index": index, **{key: row[key] for key in OF_A_STAGE}}
            for index, row in enumerate(memory_table(job, measured.optimizer_bytes))
        ],
        "links": links(job) if measured.links is None else measured_links(measured.links, measured.microbatches),
        **_block_records(job, measured, tested),
        "memory": memory_figures(job),
    }


def _utilization(job: Job, measured: Report, costs: Optional[StageCosts]) -> Dict[str, Optional[float]]:
    """Busy shares. Measured: nanoseconds in passes and updates over those of the whole span, summed over the devices; the bubble
    is the rest, so waits and communication. Planned: of the schedule's unit slots, PopTorch's own where it has one. Modelled: by
    the clock with measured costs, None where these were not measured."""
    planned = job.planned_utilization() if measured.utilization is None else measured.utilization
    span = sum(device.span_ns for device in measured.times or ())
    busy = sum(device.busy_ns for device in measured.times or ()) / span if span else None
    played = modelled(job, costs.costs) if costs is not None and costs.measured else None
    return {
        "utilization": busy,
        "bubble_fraction": None if busy is None else 1 - busy,
        "planned_utilization": planned,
        "planned_bubble_fraction": 1 - planned,
        "modelled_utilization": None if played is None else played.utilization,
        "modelled_samples_per_second": None if played is None else played.samples_per_second,
    }


def upgraded(summary: Dict[str, Any], place: str = "summary.json") -> Dict[str, Any]:
    """A summary that this or an earlier version wrote, as this one does. In schema 1 `utilization` was what the schedule says.
    Raises BadInput, with `place`, of a later version's."""
    schema = summary.get("schema")
    if isinstance(schema, int) and schema > SCHEMA:
        raise BadInput(
            f"{place}: schema: {schema}: this version reads schema 1 to {SCHEMA}: use the ipu_pipe that wrote it"
        )
    if summary.get("schema") != 1:
        return summary
    planned = {"utilization": "planned_utilization", "bubble_fraction": "planned_bubble_fraction"}
    unknown = dict.fromkeys(("utilization", "bubble_fraction", "modelled_utilization", "modelled_samples_per_second"))
    phases = [{planned.get(key, key): value for key, value in phase.items()} for phase in summary.get("phases", ())]
    renamed = {planned.get(key, key): value for key, value in summary.items()}
    return {**renamed, **unknown, "phases": phases, "schema": SCHEMA}


def _block_records(job: Job, measured: Report, tested: Sequence[Measured]) -> Dict[str, Any]:
    """Of methods with losses of their own: each block's test loss and accuracy by its own head, the model's own last; and the
    traffic of gradients of shared layers, apart from `links`."""
    if job.method.structure is None:
        return {}
    first = len(job.part) - len(tested)
    blocks = [{"index": first + i, **found.record()} for i, found in enumerate(tested)]
    shared = shared_links(job) if measured.shared is None else measured_links(measured.shared, measured.microbatches)
    return {"blocks": blocks, "shared_layer_links": shared}
