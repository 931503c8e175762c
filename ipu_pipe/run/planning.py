"""A job to look at, not to run: built by shape where that tells what the numbers would.

Weights and microbatches are then shapes without memory, so that a plan of any model takes a second. What only numbers tell is
left to the run: whether pieces of the model compute what the whole does, and whether the CPU has all operations in the precision.
"""

from __future__ import annotations

from torch import nn

from ipu_pipe.backends.table import get_backend
from ipu_pipe.config.schema import Config
from ipu_pipe.job.record import Job
from ipu_pipe.model.nests import numbers
from ipu_pipe.model.shapes import SMALL, shapes_only
from ipu_pipe.run.build import build
from ipu_pipe.run.callbacks import refuse_callbacks


def planned(config: Config) -> Job:
    """The job that `config` describes, for its figures alone. Raises BadInput as `run.build.build` does."""
    refuse_callbacks(config)
    if _may_be_shapes(config):
        try:
            with shapes_only():
                job = build(config, by_shape=True)
            if _tells(job):
                return job
        except Exception:  # made from numbers, or looking at them, or at fault, which is told below
            pass
    return build(config)


def _may_be_shapes(config: Config) -> bool:
    times = isinstance(config.stages, dict) and config.stages.get("by") == "time"
    return get_backend(config).emulates and config.backend.device == "cpu" and not config.init_from and not times


def _tells(job: Job) -> bool:
    """Of few numbers all is computed as it is, and so it is where the CPU's own kernels keep other things (recurrent layers)."""
    held = numbers(job.example[0]) + sum(p.numel() for p in job.model.parameters())
    return held > SMALL and not any(isinstance(module, nn.RNNBase) for module in job.model.modules())
