"""What a run's trace says of the run."""

from __future__ import annotations

from ipu_pipe.job.record import Job
from ipu_pipe.trace.events import SCHEMA, TraceMetadata, TraceWindow


def make_trace_metadata(job: Job) -> TraceMetadata:
    """The metadata that the job alone decides; who knows the times adds what these are."""
    config, schedule, traced = job.config, job.schedule, job.traced
    planned = job.planned_utilization()
    return TraceMetadata(
        schema=SCHEMA,
        run="" if job.folder is None else job.folder.resolve().name,
        method=job.method.name,
        method_args=config.method_args.model_dump(mode="json", exclude_none=True),
        backend=config.backend.name,
        stages=len(job.part),
        replicas=config.replicas,
        microbatches=schedule.microbatches,
        accumulate=schedule.accumulate,
        step_samples=job.batch,
        device_of_stage=list(schedule.device_of_stage),
        window=TraceWindow(begin=traced.start, end=traced.stop, every=traced.step),
        gradients_cross=job.method.structure is None,
        planned_utilization=planned,
        planned_bubble_fraction=1 - planned,
        units=list(job.footprint.units),
    )
