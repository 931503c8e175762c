"""What an engine reads of a run: one frozen record.

It does not say where the arguments came from, what is written, or when the run ends.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable, NamedTuple

import torch
from torch import nn

from ipu_pipe.data.sources import compute_checksum
from ipu_pipe.job.record import Job
from ipu_pipe.model.batch import check_same_shapes, count_bytes
from ipu_pipe.model.loss import Loss, LossWeight
from ipu_pipe.model.observation import Observation
from ipu_pipe.model.precision import ModelPrecision
from ipu_pipe.model.stages import Footprint, Partition
from ipu_pipe.schedule.methods import Method
from ipu_pipe.schedule.versions import VersionTable
from ipu_pipe.update.apply import UpdateRules


class Batches(NamedTuple):
    """Where the batches of a run come from.

    `read(m, replica)` returns microbatch m as the data source does, `prepare(batch)` moves it to
    the device, `weigh(batch, k, m, replica)` returns its weight in the mean loss of update k, and
    `compute_checksum(batch)` is equal on processes that read the same. `name`: of the data, in
    messages. `reads_again`: whether a microbatch can be read once more.
    """

    read: Callable[[int, int], Any]
    prepare: Callable[[Any], tuple[Any, Any]]
    weigh: Callable[[Any, int, int, int], float]
    compute_checksum: Callable[[Any], int]
    name: str
    reads_again: bool

    @classmethod
    def of(cls, job: Job) -> Batches:
        """Return the batches of a job."""
        return cls(
            job.read_microbatch,
            job.prepare_batch,
            job.weigh_microbatch,
            # a rank of an open run may lack inputs or labels, and knows which
            getattr(job.data, "compute_checksum", compute_checksum),
            job.data_name,
            getattr(job.data, "reads_again", True),
        )

    def load(self, m: int, replica: int = 0) -> tuple[Any, Any]:
        """Return inputs and labels of microbatch m, on the device."""
        return self.prepare(self.read(m, replica))


@dataclass(frozen=True)
class Run:
    """A run as an engine sees it.

    model, loss:  trained in place; the mean loss of a microbatch, or one for each block.
    loss_weight:  the weight of a microbatch in the mean loss of its update; None: all count the same.
    device:       of this process.
    precision:    the dtypes of weights, inputs and updates, and the master copies.
    partition:    the stages, in order, and the parameters of each.
    placement:    the device of each stage.
    table:        the weight versions that passes read, with the schedule and the method.
    rules:        the optimizer of the stages in this process, and the update rules.
    clip:         (norm, scope); None: no clipping.
    replicas:     those that take turns in a batch: copies of the pipeline, or LocalSGD's own.
    samples:      of an update, on all replicas.
    per_epoch:    the updates of an epoch; None if the data has no length.
    example:      the first microbatch (x, y), on the device.
    observation:  what a training pass of it does: side effects, draws, tensors that cross.
    footprint:    the cost of each stage: operations and bytes.
    seed:         of dropout and of the methods that draw.
    trace:        the updates whose events are recorded.
    batches:      how its microbatches are read.
    options:      the backend's own, a frozen record of its folder; None if it has none.
    """

    model: nn.Module
    loss: Loss
    loss_weight: LossWeight | None
    device: torch.device
    precision: ModelPrecision
    partition: Partition
    placement: tuple[int, ...]
    table: VersionTable
    rules: UpdateRules
    clip: tuple[float, str] | None
    replicas: int
    samples: int
    per_epoch: int | None
    example: tuple[Any, Any]
    observation: Observation
    footprint: Footprint
    seed: int
    trace: range
    batches: Batches
    options: Any

    @classmethod
    def of(cls, job: Job, options: Any) -> Run:
        """Return what an engine reads of a job."""
        clip = job.config.clip
        return cls(
            job.model,
            job.loss,
            job.loss_weight,
            job.device,
            job.precision,
            job.partition,
            job.placement,
            job.table,
            job.rules,
            (clip.norm, clip.scope) if clip else None,
            job.replica_count,
            job.global_batch_size,
            job.updates_per_epoch,
            job.example,
            job.observation,
            job.footprint,
            job.config.seed,
            job.traced_updates,
            Batches.of(job),
            options,
        )

    @property
    def method(self) -> Method:
        """The method of the version table."""
        return self.table.method

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer of the stages in this process."""
        return self.rules.optimizer

    def load(self, m: int) -> tuple[Any, Any]:
        """Return microbatch m of the only replica. Raise `BadInput` if it has other shapes than the
        first one.
        """
        x, y = self.batches.load(m)
        check_same_shapes(x, self.example[0], m, "inputs")
        # a loss may compute otherwise with labels of another kind, as cross-entropy does
        check_same_shapes(y, self.example[1], m, "labels")
        return x, y

    def list_trained(self, stage: int) -> dict[str, nn.Parameter]:
        """Return the tensors of a stage that an optimizer updates, by the names of the weights."""
        names = self.partition.stages[stage].parameters
        weights = {name: self.model.get_parameter(name) for name in names}
        return {n: self.precision.get_trained(p) for n, p in weights.items() if p.requires_grad}

    def count_master_bytes(self) -> list[int]:
        """Return the bytes of each stage's master weights, 0 if it has none."""
        # shards are in the weights' memory
        if self.precision.is_sharded:
            return [0] * len(self.partition)
        get_trained = self.precision.get_trained
        sizes = []
        for stage in self.partition.stages:
            weights = [self.model.get_parameter(name) for name in stage.parameters]
            # `get_trained` returns the weight itself if it has no master
            sizes.append(count_bytes([m for p in weights if (m := get_trained(p)) is not p]))
        return sizes
