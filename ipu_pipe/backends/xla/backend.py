"""The row of the XLA backend in the table of backends, which imports jax when it is first used."""

from __future__ import annotations

from ipu_pipe.backends.interface import Backend, Engine
from ipu_pipe.backends.xla.devices import launch, place
from ipu_pipe.backends.xla.faults import list_faults
from ipu_pipe.job.record import Job
from ipu_pipe.replay.run import Batches, Run
from ipu_pipe.schedule.versions import VersionTable


def make_engine(job: Job, first_update: int, table: VersionTable) -> Engine:
    """Return the engine, which continues with update `first_update`."""
    from ipu_pipe.backends.xla.engine import XlaEngine, make_options

    return XlaEngine(Run.of(job, make_options(job)), Batches.of(job), first_update, table)


def describe(job: Job) -> str:
    """Return a line on the devices of the stages."""
    from ipu_pipe.backends.xla import engine

    return engine.describe(job)


BACKEND = Backend(place, list_faults, make_engine, launch, describe)
