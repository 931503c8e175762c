"""Processes as a row of the table of backends."""

from __future__ import annotations

from ipu_pipe.backends.exactness import exactness_faults
from ipu_pipe.backends.interface import Backend, refuse_foreign
from ipu_pipe.backends.processes.engine import ProcessEngine
from ipu_pipe.backends.processes.group import check_launch, start
from ipu_pipe.backends.processes.placing import place
from ipu_pipe.job.record import Job


def make(job: Job, first_update: int) -> ProcessEngine:
    """This process's engine, to go on with update `first_update`."""
    refuse_foreign(job.optimizer)
    return ProcessEngine(job, first_update)


BACKEND = Backend(check_launch, start, place, exactness_faults, lambda job: "", make)
