"""The work that emulator and processes share: a job's computation, the jobs they cannot run
exactly, and the sum of losses.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Iterable, NamedTuple, Sequence

import torch
from torch import nn

from ipu_pipe.errors import Divergence
from ipu_pipe.job.record import Job
from ipu_pipe.job.stability import explain_divergence
from ipu_pipe.model.batch import get_first_tensor
from ipu_pipe.model.loss import Loss
from ipu_pipe.model.observation import list_at_one_address
from ipu_pipe.refusals import Argument, Refusal
from ipu_pipe.replay.replays import (
    RandomizedReplays,
    Replays,
    RoundReplays,
    StreamedReplays,
    TableReplays,
)
from ipu_pipe.replay.run import Run
from ipu_pipe.schedule.actions import Kind
from ipu_pipe.schedule.methods import Method, Reads
from ipu_pipe.schedule.table import Schedule
from ipu_pipe.schedule.versions import VersionTable
from ipu_pipe.text import list_some
from ipu_pipe.update.apply import UpdateRules
from ipu_pipe.update.clipping import explain_stage_scope


@dataclass(frozen=True)
class Work:
    """The computation of a job, independent of where its stages run.

    `table`: the weight versions that passes read, with the schedule. `rules`: the update rules and
    the optimizer, which holds the parameters of the stages in this process. `clip`: (norm, scope)
    or None. `microbatch`: the first microbatch to run, greater than 0 after a resume. `replays`:
    the source of replays if it is not the version table. `block_updates`: the number of updates of
    single stages that make one update of the run. `require_finite(update, losses)`: raises
    `Divergence` if a loss is not finite and the config does not allow it; by default nothing is
    checked. `weighs`: the microbatches of an update have weights (`LossShare`); otherwise all count
    the same.
    """

    loss: Loss
    table: VersionTable
    rules: UpdateRules
    clip: tuple[float, str] | None = None
    microbatch: int = 0
    replays: Replays | None = None
    block_updates: int = 1
    weighs: bool = False

    @classmethod
    def of(cls, run: Run, first_update: int, table: VersionTable) -> Work:
        """Return the work of a run that continues with update `first_update` by the versions of
        `table`.
        """
        history = table.method.history
        replays: Replays | None = None
        if history is not None:
            # without epochs nothing can be drawn from one
            replays = (
                StreamedReplays(table, history, 1, run.seed)
                if run.per_epoch is None
                else RandomizedReplays(table, history, run.per_epoch, run.seed)
            )
        return cls(
            run.loss,
            table,
            run.rules,
            run.clip,
            first_update * table.schedule.accumulate,
            replays,
            1 if history is None else len(run.partition),
            run.loss_weight is not None,
        )

    def make_replays(self, replicas: Sequence[int]) -> Replays:
        """Return the source of replays for these replicas of the pipeline."""
        if self.method.rounds is not None:
            return RoundReplays(self.schedule)
        return self.replays if self.replays is not None else TableReplays(self.table, replicas)

    @cached_property
    def method(self) -> Method:
        """The method of the version table."""
        return self.table.method

    @cached_property
    def schedule(self) -> Schedule:
        """The schedule of the version table."""
        return self.table.schedule

    @cached_property
    def accumulate(self) -> int:
        """The microbatches of an update, or of one replica's update if replicas have weights of
        their own.
        """
        return 1 if self.method.rounds is not None else self.table.schedule.accumulate

    @cached_property
    def update(self) -> int:
        """The first update to run."""
        return self.microbatch // self.schedule.accumulate

    def compute_weights(self, weights: Sequence[float], replicas: int) -> list[LossShare]:
        """Return the weights of an update's microbatches with their shares in its mean loss.

        `weights`: of microbatch 0 of each of `replicas`, of microbatch 1 of each, and so on.
        """
        # each microbatch is a replica's own update
        if self.method.rounds is not None:
            return [LossShare(weight, float(weight > 0)) for weight in weights]
        total = 0.0
        # not sum(), which compensates for rounding from Python 3.12 on
        for weight in weights:
            total += weight
        return [
            LossShare(weight, weight * replicas / total if weight else 0.0) for weight in weights
        ]

    def scale_loss(self, loss: torch.Tensor, weight: LossShare | None) -> torch.Tensor:
        """Return the part of a microbatch's loss in the loss of its update on one replica."""
        return loss / self.accumulate if weight is None else loss * weight.share

    def find_first_replay(self, replicas: int) -> int:
        """Return the number of the first replay to run; `replicas` of them take turns."""
        return (
            self.microbatch
            * (1 if self.method.rounds is not None else replicas)
            * self.block_updates
        )

    def find_step(self, update: int, stage: int, stage_update: int) -> int:
        """Return the index into the learning-rate schedule for an update: `update` of the run,
        `stage_update` of its stage.

        If single stages are updated in the schedule's order, the index counts the stage's updates,
        because the stages of a pipeline are not at the same update.
        """
        history = self.method.history
        if history is None or self.block_updates == 1:
            return update
        return stage_update if history.order == "schedule" else update // self.block_updates


def require_finite(job: Job, k: int, losses: Iterable[float | None]) -> None:
    """Raise `Divergence`, with what theory says, if a loss of update k is not a finite number,
    unless the config allows it.

    An update whose microbatches have no weight has no loss (None).
    """
    wrong = [loss for loss in losses if loss is not None and not math.isfinite(loss)]
    if not wrong or job.config.allow_nonfinite:
        return
    scaling = ""
    if job.config.backend.ipu is not None:
        scaling = ", or another loss_scaling of the backend's ipu in half precision,"
    advice = (
        f"a smaller learning rate or a warm-up of it{scaling} may help (allow_nonfinite continues "
        f"anyway)"
    )
    raise Divergence(
        f"update {k} of method {job.method.name}: the training loss is {wrong[0]}",
        f"{advice}{explain_divergence(job, k)}",
    )


# the remedy for two parameters in one memory
MAKE_ONE = "make them one parameter (b.weight = a.weight), or clone one"


def list_exactness_faults(job: Job) -> list[str]:
    """Return the reasons why emulator and processes cannot run a job exactly."""
    method = job.method
    reads_old = method.reads_old(len(job.partition))
    reasons = [str(refusal) for refusal in _explain_clipping(job)]
    if reads_old or job.config.replicas > 1:
        reasons += _explain_written_weights(job)
    if reads_old:
        reasons += _explain_shared_memory(job)
    if reads_old and method.backward_reads is Reads.NEWEST and job.observation.derived:
        reasons.append(
            f"model: with {method.name} the backward must read newer weights than the forward, "
            f"but the forward keeps tensors derived from {list_some(job.observation.derived)} "
            f"(weight norm, autocast, InstanceNorm and the like do): use layers that use their "
            f"weights directly, or {Argument('method_args', {'stash': True})}"
        )
    # a file of rows may have another order than the microbatches'
    if method.order is not None and method.order.file:
        reasons += _explain_order(job, method.order.file)
    return reasons


def _explain_clipping(job: Job) -> list[Refusal]:
    """Return why the gradients cannot be clipped by the norm that the config names."""
    method = job.method
    clip = job.config.clip
    if clip is None:
        return []
    if clip.scope == "delayed_global" and method.flushes:
        return [
            Refusal(
                "clip",
                "delayed_global",
                f"with {method.name} the global norm itself is known: use "
                f"{Argument('clip', (clip.norm, 'global'))}",
            )
        ]
    stages = len(job.partition)
    # methods that update single stages have a line of their own
    if clip.scope != "global" or not method.reads_old(stages) or method.history is not None:
        return []
    return [
        Refusal(
            "clip",
            "global",
            f"with {method.name} a stage updates before the others' gradients exist, so the global "
            f"norm is not known: use {explain_stage_scope(clip.norm, stages)}, "
            f"{Argument('clip', (clip.norm, 'delayed_global'))}, or a synchronous method",
        )
    ]


def _explain_written_weights(job: Job) -> list[str]:
    """Return why a forward may not write weights of which there are several versions or copies."""
    if get_first_tensor(job.example[0]).is_meta or not job.effects.weights:
        return []
    why = (
        "with replicas each would write its own"
        if job.config.replicas > 1
        else f"with {job.method.name} several versions are in use"
    )
    return [
        f"model: {list_some(job.effects.weights)}: the forward writes this weight (max_norm of "
        f"an embedding?), and {why}:"
        " write no weight, or use a method that flushes, without replicas"
    ]


def _explain_shared_memory(job: Job) -> list[str]:
    """Return a line for each memory of several parameters, which versions of one of them would take
    from the others.
    """
    parameters = dict(job.model.named_parameters())
    return [
        f"model: {list_some(names)}: parameters in one memory, and with {job.method.name} several "
        f"versions are in use, each in a memory of its own: {MAKE_ONE}"
        for names in list_at_one_address(parameters)
        # frozen ones have one version
        if any(parameters[name].requires_grad for name in names)
    ]


def _explain_order(job: Job, file: str) -> list[str]:
    """Return why passes cannot run in the order of a file of rows: what they change depends on
    it.
    """
    reasons = []
    if not job.schedule.keeps_order(Kind.FORWARD):
        norms = [
            name
            for name, module in job.model.named_modules()
            if isinstance(module, nn.modules.batchnorm._NormBase)
        ]
        changed = [*norms, *job.effects.buffers]
        if changed:
            reasons.append(
                f"method_args.file: {file}: a stage does its forwards in another order than the "
                f"microbatches', and the model's"
                f" forward changes buffers ({list_some(changed)}): list the forwards in order"
            )
    tied = [] if job.schedule.in_order else list(job.partition.list_tied(job.model))
    if tied:
        reasons.append(
            f"method_args.file: {file}: a stage does its backwards in another order than the "
            f"microbatches', and stages"
            f" share weights ({list_some(tied)}): list the backwards in order"
        )
    return reasons


# ---- training loss and accuracy of an update: every backend sums in the same order and type
#
#     loss        (l_0 + l_1 + ... + l_n-1) / n    in float64, from left to right, over the losses of n microbatches
#                 (l_0 w_0 + ... + l_n-1 w_n-1) / (w_0 + ... + w_n-1) with weights; None if all are
#                 0
#     accuracy    right labels / counted labels    integers until the one division
#
# The order is microbatch 0 of each replica, microbatch 1 of each replica, and so on. Partial sums
# in another type or order would differ in the last digits between backends and between vector
# kernels.

# loss, right labels, counted labels; and the weight, if microbatches have weights
COLUMNS = 3


class LossShare(NamedTuple):
    """The weight of a microbatch and its share w R / W, by which its loss is multiplied; W: the sum
    over the update.

    Gradients are averaged over R replicas afterwards.
    """

    value: float
    share: float


class MicrobatchResult(NamedTuple):
    """The loss of a microbatch and its (right, counted) labels, None if accuracy is undefined. Both
    may be on a GPU.

    `weight`: its weight in the mean loss, None if all count the same.
    """

    loss: torch.Tensor  # ()
    label_counts: torch.Tensor | None  # (2,)
    weight: LossShare | None = None


def tabulate(results: Sequence[MicrobatchResult]) -> torch.Tensor:
    """Return a row (loss, right labels, counted labels) for each of n microbatches, (n, 3) in
    float64 on the host.

    With weights a row has the weight too, (n, 4). The labels are NaN if accuracy is undefined. The
    host waits here for a GPU that has not computed the results yet.
    """
    table = torch.full((len(results), COLUMNS), float("nan"), dtype=torch.float64)
    losses = [result.loss.detach().reshape(()) for result in results]
    # zero losses of outputs in half precision lie among those in full precision
    table[:, 0] = torch.stack(
        losses if results[0].weight is None else [loss.double() for loss in losses]
    )
    label_counts = {
        i: result.label_counts
        for i, result in enumerate(results)
        if result.label_counts is not None
    }
    if label_counts:
        table[list(label_counts), 1:] = torch.stack(list(label_counts.values())).to(table)
    weights = [result.weight.value for result in results if result.weight is not None]
    return (
        torch.cat([table, torch.tensor(weights, dtype=table.dtype)[:, None]], dim=1)
        if weights
        else table
    )


def average(table: torch.Tensor) -> tuple[float | None, float | None]:
    """Return the mean loss and the share of right labels of a table of `tabulate`."""
    rows: list[tuple[float, float, float]] = table[:, :COLUMNS].tolist()
    total = right = counted = 0.0
    # not sum(): from Python 3.12 on it compensates for rounding
    for loss, _, _ in rows:
        total += loss
    counts = [row[1:] for row in rows if not math.isnan(row[2])]
    for right_of_row, counted_of_row in counts:
        right = right + right_of_row
        counted = counted + counted_of_row
    accuracy = right / max(counted, 1.0) if counts else None
    if table.shape[1] > COLUMNS:
        return _average_by_weight(table), accuracy
    return total / len(rows), accuracy


def _average_by_weight(table: torch.Tensor) -> float | None:
    """Return the weighted mean of the losses; None without weight."""
    total = weight_sum = 0.0
    for loss, weight in table[:, [0, COLUMNS]].tolist():
        total += loss * weight
        weight_sum += weight
    return total / weight_sum if weight_sum else None
