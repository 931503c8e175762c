"""The table of backends, by the name that a config gives them, and the steps that all backends
share.
"""

from __future__ import annotations

from typing import Mapping

from ipu_pipe.backends.emulator import engine as emulator
from ipu_pipe.backends.interface import Backend, Engine
from ipu_pipe.backends.ipu import backend as ipu
from ipu_pipe.backends.processes import engine as processes
from ipu_pipe.backends.processes.launch import leave as leave_group
from ipu_pipe.backends.ranks import is_distributed
from ipu_pipe.backends.xla import backend as xla
from ipu_pipe.config.schema import PipelineConfig
from ipu_pipe.errors import BadInput, raise_faults
from ipu_pipe.job.record import Job
from ipu_pipe.launcher import end_with_launcher, read_launch
from ipu_pipe.refusals import Argument
from ipu_pipe.replay.run import Run
from ipu_pipe.schedule.versions import VersionTable

BACKENDS: dict[str, Backend] = {
    "emulator": emulator.BACKEND,
    "distributed": processes.BACKEND,
    "poptorch": ipu.BACKEND,
    "xla": xla.BACKEND,
}


def get_backend(config: PipelineConfig) -> Backend:
    """Return the backend that a config names."""
    return BACKENDS[config.backend.name]


def launch(config: PipelineConfig, asked: Mapping[str, object] | None = None) -> None:
    """Join the other processes of the run, if there are any. `asked`: the command line of this
    process, option -> value.

    Raise `BadInput` on every process if the processes have different options or configs, or if the
    backend cannot run under this launcher.
    """
    where = read_launch()
    backend = get_backend(config)
    raise_faults(where.faults)
    # each of its processes would train the whole run
    if config.backend.facts.emulates and where.world > 1:
        how = f"start it without torchrun, or set {Argument('backend', 'distributed')}"
        raise BadInput(f"{Argument('backend')}: {config.backend.name}: runs in one process: {how}")
    # a process ends with its launcher: this begins before joining, because the rendezvous disappears
    # when the launcher exits
    if is_distributed():
        end_with_launcher()
    backend.launch(config, asked or {})
    # under poprun a process knows its rank only after the launch
    if is_distributed():
        end_with_launcher()


def leave() -> None:
    """Leave the other processes at the end of a run."""
    if is_distributed():
        leave_group()


def make_engine(job: Job, first_update: int, table: VersionTable) -> Engine:
    """Return this process's engine, which continues with update `first_update` by the schedule of
    `table`.
    """
    backend = get_backend(job.config)
    run = Run.of(job, backend.make_options(job))
    return backend.make_engine(run, first_update, table)
