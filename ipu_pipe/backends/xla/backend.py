"""The row of the XLA backend in the table of backends, which imports jax when it is first used."""

from __future__ import annotations

import torch

from ipu_pipe.backends.interface import Backend, Engine
from ipu_pipe.backends.xla.devices import (
    XlaOptions,
    import_jax,
    keep_compiled,
    launch,
    list_devices,
    place,
)
from ipu_pipe.backends.xla.faults import list_faults, list_slot_faults
from ipu_pipe.job.record import Job
from ipu_pipe.replay.run import Run
from ipu_pipe.schedule.versions import VersionTable


def make_options(job: Job) -> XlaOptions:
    """Return the options of a job whose graphs were traced."""
    # before the first program is compiled, which would open another folder
    keep_compiled(job.config.backend.cache)
    program = job.config.backend.program
    # only the default falls back; a program that the config names is refused with its reasons
    if program is None and list_slot_faults(job):
        program = "action"
    return XlaOptions(list_devices(job.config.backend), job.stage_graphs, program)


def make_engine(run: Run, first_update: int, table: VersionTable) -> Engine:
    """Return the engine, which continues with update `first_update`."""
    from ipu_pipe.backends.xla.engine import XlaEngine

    return XlaEngine(run, first_update, table)


def describe(job: Job) -> str:
    """Return a line on the devices of the stages."""
    devices = list_devices(job.config.backend)
    # with too few devices some hold several rows of the placement
    used = min(len(devices), max(job.placement) + 1)
    return (
        f"{len(job.partition)} stages on {used} {devices[0].platform} devices of XLA "
        f"(jax {import_jax().__version__}, {devices[0].device_kind}), torch {torch.__version__}"
    )


BACKEND = Backend(place, list_faults, make_engine, make_options, launch, describe)
