"""Annotate a model's stage boundaries once, then train it under any pipeline method.

    `begin_stage`   mark where a stage begins     `Pipeline`      from your own loop
    `partition`     a model's stages              `configure`     a run's settings
    `compare`       methods on your own loop
    `from_loader`   your own data loaders         `train`         run it

Names are imported when they are first used, so that `import ipu_pipe` and tools without PyTorch
stay quick. The files and folders, each of which imports only from those before it:

    text, refusals, errors, files, interrupts, launcher, shipped   the base
    schedule, stability, trace                           plans, theory and events, without torch
    model, cut, local, update                            a model, its pieces, blocks and updates
    config, hardware, data                               what is given: settings, devices, batches
    job                                                  a run, resolved
    plan                                                 which configuration to run
    replay, backends                                     what is computed, and where
    report, store                                        what a run writes
    pipeline                                             the object that all of this is for
    run, integrations, comparison, cli                   loops over it, and the commands
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "BadInput": "errors",
    "RunFault": "errors",
    "begin_stage": "model.stages",
    "partition": "model.stages",
    "METHODS": "schedule.methods",
    "make_schedule": "schedule.timelines",
    "from_rows": "schedule.rows",
    "format_text": "schedule.rows",
    "VersionTable": "schedule.versions",
    "configure": "config.load",
    "load_config": "config.load",
    "resolve_method": "config.load",
    "Callback": "run.callbacks",
    "EarlyStopping": "run.callbacks",
    "predict": "run.predict",
    "export": "run.export",
    "Moment": "run.callbacks",
    "Stop": "run.callbacks",
    "load_data": "data",
    "from_loader": "data",
    "trace_stages": "cut.graphs",
    "train": "run.train",
    "Pipeline": "pipeline.pipeline",
    "Update": "pipeline.pipeline",
    "compare": "comparison.comparing",
    "plan_config": "run.planning",
    "analyze_run": "report.analysis.analyze",
}

# for type checkers and editors, which do not call __getattr__
if TYPE_CHECKING:
    from ipu_pipe.comparison.comparing import compare
    from ipu_pipe.config.load import configure, load_config, resolve_method
    from ipu_pipe.cut.graphs import trace_stages
    from ipu_pipe.data import from_loader, load_data
    from ipu_pipe.errors import BadInput, RunFault
    from ipu_pipe.model.stages import begin_stage, partition
    from ipu_pipe.pipeline.pipeline import Pipeline, Update
    from ipu_pipe.report.analysis.analyze import analyze_run
    from ipu_pipe.run.callbacks import Callback, EarlyStopping, Moment, Stop
    from ipu_pipe.run.export import export
    from ipu_pipe.run.planning import plan_config
    from ipu_pipe.run.predict import predict
    from ipu_pipe.run.train import train
    from ipu_pipe.schedule.methods import METHODS
    from ipu_pipe.schedule.rows import format_text, from_rows
    from ipu_pipe.schedule.timelines import make_schedule
    from ipu_pipe.schedule.versions import VersionTable

__all__ = [
    "METHODS",
    "BadInput",
    "Callback",
    "EarlyStopping",
    "Moment",
    "Pipeline",
    "RunFault",
    "Stop",
    "Update",
    "VersionTable",
    "analyze_run",
    "begin_stage",
    "compare",
    "configure",
    "export",
    "format_text",
    "from_loader",
    "from_rows",
    "load_config",
    "load_data",
    "make_schedule",
    "partition",
    "plan_config",
    "predict",
    "resolve_method",
    "trace_stages",
    "train",
]


# Python calls it for names that the module does not have yet (PEP 562)
def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"ipu_pipe.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'ipu_pipe' has no attribute {name!r}")


# a shell completes names before they are imported
def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
