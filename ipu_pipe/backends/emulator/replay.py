"""The exact single-process emulator: a schedule replayed microbatch after microbatch on the whole, unsplit model.

Why this is exact: a stage's forward and backward of microbatch m read weights that only updates made by *earlier*
microbatches have reached (the version table checks it), so the microbatches can be done one after another:

    for each microbatch m:   [1] load what the forwards read    [2] forward
                             [3] load what the backwards read   [4] backward
                             [5] if m completes a batch: update every stage

With recomputation the model runs forward twice, [2] with the forward's weights and again with those of the recomputation.

Gradients accumulate in the order of the microbatches, as in plain training, so a synchronous method's numbers are plain
training's to the last bit. BatchNorm's running statistics are the stage's own state, moved by every forward in the order
of the microbatches and never versioned: a stage of the pipeline does its forwards in that order too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Iterable, Iterator, List, Optional, Sequence, Tuple

import torch
from torch import nn

from ipu_pipe.backends.emulator.recompute import Recomputation
from ipu_pipe.backends.interface import StepResult
from ipu_pipe.backends.weights import Overwriting, ReadPlan, Swapping, Unversioned
from ipu_pipe.errors import RunFault
from ipu_pipe.job.blame import StageWatch
from ipu_pipe.job.evaluation import right_answers
from ipu_pipe.local.blocks import Outputs, blocks_of, losses_of
from ipu_pipe.model.probe import Loss, random_modules
from ipu_pipe.model.randomness import KeyedRandomness
from ipu_pipe.model.stages import Partition
from ipu_pipe.schedule.methods import Method
from ipu_pipe.schedule.versions import VersionTable, segment_ends
from ipu_pipe.update import clipping
from ipu_pipe.update.apply import UpdateRules
from ipu_pipe.update.groups import parameters_by_stage


@dataclass(frozen=True)
class _Unread:
    """What an update measured, still on its device: sums of the losses of `count` microbatches, shares of right answers."""

    update: int
    losses: List[torch.Tensor]
    shares: List[Optional[torch.Tensor]]
    samples: int
    count: int


class Emulator:
    """Trains `model` in place by the method that `table` describes, one `step` an update.

    `rules`: the update rules over `optimizer`. `clip`: (norm, scope) or None. `microbatch`: the first to come, after
    a resume. `replicas`: copies of the pipeline that train on microbatches of their own, gradients averaged. Ask `refuses`
    first: what it names would run, but not exactly.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        part: Partition,
        method: Method,
        table: VersionTable,
        optimizer: torch.optim.Optimizer,
        rules: UpdateRules,
        example: Tuple[torch.Tensor, torch.Tensor],
        seed: int = 0,
        clip: Optional[Tuple[float, str]] = None,
        allow_nonfinite: bool = False,
        microbatch: int = 0,
        replicas: int = 1,
    ) -> None:
        self.model, self.optimizer, self._blocks = model, optimizer, blocks_of(model)
        self.update = microbatch // table.schedule.accumulate
        self._loss, self._method, self._rules, self._clip = loss, method, rules, clip
        self._delayed: Optional[clipping.DelayedGlobalNorm] = None
        if clip is not None and clip[1] == "delayed_global":
            self._delayed = clipping.DelayedGlobalNorm(clip[0], table.schedule)
        self._allow_nonfinite = allow_nonfinite
        self._microbatch = microbatch
        self._unread: List[_Unread] = []
        self._accumulate = table.schedule.accumulate
        # a read reaches back over the microbatches in flight, the batches being gathered, and a delay of so many updates
        reach = 2 * len(part) + 2 * self._accumulate + 2
        if method.delay is not None:
            reach = (method.delay.greatest + 2) * self._accumulate
        self._plan = ReadPlan(table, rules, reach)
        self.weights = self._history(part)
        self._random = KeyedRandomness(model, random_modules(model, example[0]), seed, example[0].device)
        self._replicas = _Replicas(model, replicas) if replicas > 1 else None
        self._watch, self._last_stage = StageWatch(model, part), len(part) - 1
        self._doing = "data"
        self._recomputation: Optional[Recomputation] = None
        if method.segments is not None and method.reads_old(len(part)):
            self._recomputation = Recomputation(model, part, segment_ends(len(part), method.segments).tolist())

    def _history(self, part: Partition) -> Unversioned:
        if not self._method.reads_old(len(part)):
            return Unversioned()
        stages = [self._rules.stages[s].parameters if s in self._rules.stages else [] for s in range(len(part))]
        kind = Swapping if self._method.backward_reads == "stashed" else Overwriting
        return kind(stages, self.update, self._rules.corrections)

    def step(self, microbatches: Iterable[Tuple[torch.Tensor, torch.Tensor]]) -> StepResult:
        """Forward and backward of one batch's microbatches (x, y), in order, then the update of every stage. With replicas:
        each one's first microbatch, then each one's second, and so on."""
        self._batch(microbatches)
        result = self.read()[-1]
        self._update()
        return result

    def advance(self, microbatches: Iterable[Tuple[torch.Tensor, torch.Tensor]]) -> None:
        """`step`, of which `read` tells what it measured: a GPU goes on meanwhile. A loss that is not finite is told as late."""
        self._batch(microbatches)
        self._update()

    def _batch(self, microbatches: Iterable[Tuple[torch.Tensor, torch.Tensor]]) -> None:
        total: List[Any] = []
        right: List[Any] = []
        samples = count = 0
        width = self._replicas.count if self._replicas else 1
        for x, y in microbatches:
            losses, answers = self._pass(x, y, count % width)
            total = [a + b for a, b in zip(total, losses)] if total else losses
            right = (
                [a if b is None else b if a is None else a + b for a, b in zip(right, answers)] if right else answers
            )
            samples, count = samples + len(x), count + 1
            self._doing = "data"  # of the next one, if there is any
        assert count == self._accumulate * width, f"{count} microbatches given, a batch has {self._accumulate * width}"
        shares = [None if answers is None else answers[0] / answers[1].clamp(min=1) for answers in right]
        self._unread.append(_Unread(self.update, total, shares, samples, count))

    def read(self) -> List[StepResult]:
        """What was measured since the last reading, by update. Raises RunFault where a loss is not finite."""
        unread, self._unread = self._unread, []
        losses = _values([loss for batch in unread for loss in batch.losses])
        shares = _values([share for batch in unread for share in batch.shares if share is not None])
        results = []
        for batch in unread:
            means = [next(losses) / batch.count for _ in batch.losses]
            wrong = [mean for mean in means if not _is_finite(mean)]
            if not self._allow_nonfinite and wrong:
                raise RunFault(
                    f"update {batch.update} of method {self._method.name}: the training loss is {wrong[0]}; a smaller "
                    "optimizer.lr or lr_schedule.warmup_steps may help (allow_nonfinite: true goes on regardless)"
                )
            own = [None if share is None else next(shares) for share in batch.shares]
            blocks = tuple(zip(means, own)) if len(means) > 1 else ()
            results.append(StepResult(means[-1], own[-1], batch.samples, blocks))
        return results

    def _pass(
        self, x: torch.Tensor, y: torch.Tensor, replica: int
    ) -> Tuple[List[torch.Tensor], List[Optional[torch.Tensor]]]:
        """Loss and right answers of the output; of each block's where they have losses of their own."""
        m, width = self._microbatch, self._replicas.count if self._replicas else 1
        self._random.microbatch = m * width + replica
        if self._replicas:
            self._replicas.enter(replica)

        def forward() -> Tuple[Any, List[torch.Tensor]]:
            self._watch.stage = 0
            output = self.model(x)
            self._watch.stage = self._last_stage
            return output, losses_of(self._loss, output, y)

        self.weights.load(self._plan.read("forward", m))
        self._doing = "forward"
        if self._recomputation is None:
            output, losses = forward()
            to_backward = losses
        else:
            output, losses = self._recomputation.record(forward)
            self.weights.load(self._plan.read("recompute", m))
            self._doing = "recomputation"
            _, to_backward = self._recomputation.repeat(forward)
        self.weights.load(self._plan.read("backward", m))
        self._doing = "backward"
        torch.autograd.backward([loss / self._accumulate for loss in to_backward])
        if self._replicas:
            self._replicas.leave(replica)
        if replica == width - 1:
            self._microbatch += 1
            self.weights.release(self._plan.oldest(self._microbatch))
        outputs = output if isinstance(output, Outputs) else [output]
        return [loss.detach() for loss in losses], [right_answers(own, y) for own in outputs]

    def _update(self) -> None:
        self._doing = "update"
        self.weights.before_update(self._plan.read_later(self.update, self._microbatch - 1))
        if self._replicas:
            self._replicas.average()
        if self._blocks is not None:
            self._blocks.average_duplicates()
        self._rules.step(self.update, self._clipping)
        self.update += 1
        self.weights.release(self._plan.oldest(self._microbatch))
        self._doing = "data"

    def _clipping(self) -> None:
        if self._delayed is not None:
            stages = parameters_by_stage(self.optimizer)
            norms = {stage: clipping.own_norm(parameters) for stage, parameters in stages.items()}
            for stage, parameters in stages.items():
                self._delayed.clip(self.update, parameters, norms[stage])
            self._delayed.remember(self.update, [norms.get(stage) for stage in range(self._plan.stages)])
        elif self._clip:
            clipping.clip(self.optimizer, *self._clip)

    @property
    def whereabouts(self) -> str:
        """What it is doing, in words for a fault. The backward of the whole model does not tell its stages apart."""
        if self._doing == "update":
            return f"update {self.update}"
        stage = f", stage {self._watch.stage}" if self._doing in ("forward", "recomputation") else ""
        return f"update {self.update}, microbatch {self._microbatch}{stage}, {self._doing}"

    def close(self) -> None:
        """Leave the model as an ordinary one: newest weights in its parameters, no hooks."""
        self.weights.rest()
        self._random.remove()
        self._watch.remove()


class _Replicas:
    """What replicas of a pipeline do not share: gradients until they are averaged, and buffers (running statistics), of which
    those of the first are the model's."""

    def __init__(self, model: nn.Module, count: int) -> None:
        self.count = count
        self._parameters = list(model.parameters())
        self._gradients: List[List[Optional[torch.Tensor]]] = [[None] * len(self._parameters) for _ in range(count)]
        self._places = [(module, name) for module in model.modules() for name in module._buffers]
        own = [module._buffers[name] for module, name in self._places]
        self._buffers = [own] + [[None if b is None else b.clone() for b in own] for _ in range(count - 1)]

    def enter(self, replica: int) -> None:
        """Put a replica's gradients and buffers into the model."""
        for p, gradient in zip(self._parameters, self._gradients[replica]):
            p.grad = gradient
        self._bind(replica)

    def _bind(self, replica: int) -> None:
        for (module, name), buffer in zip(self._places, self._buffers[replica]):
            module._buffers[name] = buffer

    def leave(self, replica: int) -> None:
        """Take them out again."""
        self._gradients[replica] = [p.grad for p in self._parameters]
        self._buffers[replica] = [module._buffers[name] for module, name in self._places]

    def average(self) -> None:
        """The mean of all gradients into the parameters, the first replica's buffers into the model."""
        for i, p in enumerate(self._parameters):
            given = [g for g in (gradients[i] for gradients in self._gradients) if g is not None]
            total = given[0] if given else None
            for g in given[1:]:
                total = total + g  # type: ignore[operator]
            p.grad = None if total is None else total / self.count
        self._gradients = [[None] * len(self._parameters) for _ in range(self.count)]
        self._bind(0)


def _values(scalars: Sequence[torch.Tensor]) -> Iterator[float]:
    """Their values, for which a GPU is waited for once."""
    return iter(torch.stack([scalar.reshape(()) for scalar in scalars]).tolist() if scalars else [])


def _is_finite(value: float) -> bool:
    return value == value and abs(value) != float("inf")
