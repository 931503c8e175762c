"""Sources of replays for the studies, made of the same table row as a training run's."""

from __future__ import annotations

from typing import Any, Mapping

from ipu_pipe.backends.randomized import RandomizedReplays
from ipu_pipe.schedule.methods import resolve_method
from ipu_pipe.schedule.timelines import make_schedule
from ipu_pipe.schedule.versions import VersionTable


def randomized_source(
    stages: int, microbatches: int, batches: int, args: Mapping[str, Any], seed: int
) -> RandomizedReplays:
    """Randomized PipeDream with as many block updates as PipeDream makes of so many microbatches; `args`: method_args."""
    method = resolve_method("randomized_pipedream", args)
    assert method.history is not None
    table = VersionTable(make_schedule(method, stages, microbatches, 1), method)
    return RandomizedReplays(table, method.history, batches, seed)
