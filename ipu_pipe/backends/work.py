"""What emulator and processes carry out of a job, and the check of losses that all backends have in common."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Iterable, Optional, Sequence, Tuple

from ipu_pipe.backends.replays import Replays, TableReplays
from ipu_pipe.errors import RunFault
from ipu_pipe.job.record import Job
from ipu_pipe.model.probe import Loss
from ipu_pipe.schedule.methods import Method
from ipu_pipe.schedule.table import Schedule
from ipu_pipe.schedule.versions import VersionTable
from ipu_pipe.update.apply import UpdateRules


@dataclass(frozen=True)
class Work:
    """What is done, wherever the stages are.

    `table`: who reads what, over the schedule. `rules`: the update rules, over an optimizer that holds the parameters of the
    stages that are here. `clip`: (norm, scope) or None. `allow_nonfinite`: a loss that is no finite number ends nothing.
    `microbatch`: the first to come, after a resume. `replays`: what is read and updated, where that is not the table's.
    """

    loss: Loss
    table: VersionTable
    rules: UpdateRules
    clip: Optional[Tuple[float, str]] = None
    allow_nonfinite: bool = False
    microbatch: int = 0
    replays: Optional[Replays] = None

    @classmethod
    def of(cls, job: Job, first_update: int) -> Work:
        """A job's, to go on with update `first_update`."""
        config = job.config
        clip = (config.clip.norm, config.clip.scope) if config.clip else None
        first = first_update * config.gradient_accumulation
        return cls(job.loss, job.table, job.rules, clip, config.allow_nonfinite, first)

    def source(self, replicas: Sequence[int]) -> Replays:
        """The replays of these replicas of the pipeline."""
        return self.replays if self.replays is not None else TableReplays(self.table, replicas)

    @property
    def method(self) -> Method:
        """That of the table."""
        return self.table.method

    @property
    def schedule(self) -> Schedule:
        """That of the table."""
        return self.table.schedule

    @property
    def accumulate(self) -> int:
        """Microbatches of an update."""
        return self.table.schedule.accumulate

    @property
    def update(self) -> int:
        """The first update to come."""
        return self.microbatch // self.accumulate

    def refuse_nonfinite(self, k: int, losses: Iterable[float]) -> None:
        """Raises RunFault where a loss of update k is not a finite number, unless that is allowed."""
        if not self.allow_nonfinite:
            refuse_nonfinite(self.method.name, k, losses)


def refuse_nonfinite(method: str, k: int, losses: Iterable[float], more_advice: str = "") -> None:
    """Raises RunFault where a loss of update k is not a finite number."""
    wrong = [loss for loss in losses if not math.isfinite(loss)]
    if wrong:
        raise RunFault(
            f"update {k} of method {method}: the training loss is {wrong[0]}; a smaller optimizer.lr or "
            f"lr_schedule.warmup_steps may help{more_advice} (allow_nonfinite: true goes on regardless)"
        )
