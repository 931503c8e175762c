"""The exact single-process emulator: replays, one after another, on the whole, unsplit model.

Why this is exact: a stage's forward and backward read weights that only updates made by *earlier* replays have reached (the plan
of the replays checks it), so the microbatches that a pipeline works on at once can be done one after another:

    for each replay:   [1] load what the forwards read    [2] forward
                       [3] load what the backwards read   [4] backward
                       [5] update the stages that it updates

With recomputation the model runs forward twice, [2] with the forward's weights and again with those of the recomputation.

Gradients accumulate in the order of the microbatches, as in plain training, so a synchronous method's numbers are plain
training's to the last bit. BatchNorm's running statistics are the stage's own state, moved by every forward in the order
of the microbatches and never versioned: a stage of the pipeline does its forwards in that order too.
"""

from __future__ import annotations

from typing import Any, Iterable, List, Mapping, Optional, Tuple

import torch
from torch import nn

from ipu_pipe.backends.emulator.measuring import BatchResults, Measurements
from ipu_pipe.backends.emulator.recompute import Recomputation
from ipu_pipe.backends.emulator.single_stage import BuffersOfOneStage
from ipu_pipe.backends.interface import StepResult
from ipu_pipe.backends.replays import Replay, ReplayPlan
from ipu_pipe.backends.replicas import GradientReplicas, IndependentReplicas
from ipu_pipe.backends.weights import make_weight_store
from ipu_pipe.backends.work import Work
from ipu_pipe.job.metrics import count_right
from ipu_pipe.job.user_code import StageWatch
from ipu_pipe.local.blocks import BlockOutputs, compute_losses, extract_scores, get_blocks
from ipu_pipe.model.batch import call_model, count_samples, get_first_tensor
from ipu_pipe.model.partition import Partition
from ipu_pipe.model.probe import observe_effects
from ipu_pipe.model.randomness import KeyedRandomness
from ipu_pipe.schedule.recompute import find_segment_ends
from ipu_pipe.update.clipping import GradientClipping

Microbatch = Tuple[Any, Any]  # x, y
Forward = Tuple[Any, List[torch.Tensor]]  # output, losses


class Emulator:
    """Trains `model` in place as `work` says, one `step` an update.

    `draws`: the modules that draw random numbers, where they are known (`ipu_pipe.model.probe.ForwardEffects`).
    `replicas`: copies of the pipeline that train on microbatches of their own, gradients averaged. Ask `list_exactness_faults`
    first: what it names would run, but not exactly.
    """

    def __init__(
        self,
        work: Work,
        model: nn.Module,
        part: Partition,
        example: Microbatch,
        seed: int = 0,
        replicas: int = 1,
        draws: Optional[Mapping[str, int]] = None,
    ) -> None:
        self.work, self.model, self._blocks = work, model, get_blocks(model)
        self.update, self._number = work.update * work.block_updates, work.first_replay(replicas)
        self._plan = ReplayPlan(work.source(range(replicas)), work.rules, self._number)
        self._replay: Optional[Replay] = None
        self._microbatch = work.microbatch
        self.weights = make_weight_store(work, range(len(part)), self._plan.made(self._number))
        stages = {s: state.parameters for s, state in work.rules.stages.items()}
        self._clipping = GradientClipping(work.clip, stages, work.schedule)
        self._measured = Measurements(work)
        draws = observe_effects(model, example[0]).draws if draws is None else draws
        self._random = KeyedRandomness(model, draws, seed, get_first_tensor(example[0]).device)
        self._width = replicas
        self._own = IndependentReplicas.of(work, model)
        trained = [p for parameters in stages.values() for p in parameters]
        self._replicas = GradientReplicas(model, trained, replicas) if replicas > 1 and self._own is None else None
        self._watch, self._last_stage = StageWatch(model, part), len(part) - 1
        self._buffers = BuffersOfOneStage(model, self._watch) if work.block_updates > 1 else None
        self._doing = "data"
        self._recomputation: Optional[Recomputation] = None
        if work.method.segments is not None and work.method.reads_old(len(part)):
            self._recomputation = Recomputation(
                model, part, find_segment_ends(len(part), work.method.segments).tolist()
            )

    def step(self, microbatches: Iterable[Microbatch]) -> StepResult:
        """The replays up to the next that updates, each with its microbatch (x, y) of those given, then the update. With
        replicas: each one's first microbatch, then each one's second, and so on."""
        replay = self._batch(microbatches)
        result = self.read()[-1]
        self._update(replay)
        return result

    def advance(self, microbatches: Iterable[Microbatch]) -> None:
        """`step`, of which `read` tells what it measured: a GPU goes on meanwhile. A loss that is not finite is told as late."""
        self._update(self._batch(microbatches))

    def read(self) -> List[StepResult]:
        """What was measured since the last reading, by update. Raises RunFault where a loss is not finite."""
        return self._measured.read()

    @property
    def replay(self) -> Replay:
        """The one that is next."""
        if self._replay is None:
            self._replay = self._plan.replay(self._number)
            self._microbatch = self._replay.microbatch
        return self._replay

    def _batch(self, microbatches: Iterable[Microbatch]) -> Replay:
        """The replays of an update, the last of which says which stages it is of."""
        results = BatchResults()
        for x, y in microbatches:
            replay = self.replay
            results.add(*self._pass(replay, x, y), count_samples(x))
            self._doing = "data"  # of the next one, if there is any
        assert results.count and len(replay.updates), (
            f"{results.count} microbatches given: not those up to the next update"
        )
        self._measured.add(self.update // self.work.block_updates, results)
        return replay

    def _pass(self, replay: Replay, x: Any, y: Any) -> Tuple[List[torch.Tensor], List[Optional[torch.Tensor]]]:
        """Loss and right answers of the output; of each block's where they have losses of their own."""
        if self._replicas:
            self._replicas.enter(replay.replica)
        if self._own:
            self._own.enter(replay.replica)
        if self._buffers:
            self._buffers.stage = int(replay.updates[0])
        (output, losses), to_backward = self._forward(replay, x, y)
        self.weights.load(replay.backward)
        self._doing = "backward"
        with self._random.backward(self._drawn_as(replay)):  # where checkpoints run forwards again
            torch.autograd.backward([loss / self.work.accumulate for loss in to_backward])
        self.work.rules.collect()
        if self._replicas:
            self._replicas.leave(replay.replica)
        if self._own:  # its step: the others' do not wait for it, nor it for them
            self.work.rules.step(self.update, lambda: self._clipping(self.update))
        self._number, self._replay = self._number + 1, None
        self.weights.release(self._plan.oldest(self._number))
        outputs = output if isinstance(output, BlockOutputs) else [output]
        return [loss.detach() for loss in losses], [
            count_right(extract_scores(self.work.loss, own), y) for own in outputs
        ]

    def _drawn_as(self, replay: Replay) -> int:
        """Return the number of a microbatch among those of all replicas, which keys its draws."""
        return replay.microbatch * self._width + replay.replica

    def _forward(self, replay: Replay, x: Any, y: Any) -> Tuple[Forward, List[torch.Tensor]]:
        """The forward that counts, and the losses that the backward starts from: those of a second one where activations are
        recomputed."""

        def forward() -> Forward:
            self._watch.stage = 0
            with self._random.forward(self._drawn_as(replay)):
                output = call_model(self.model, x)
            self._watch.stage = self._last_stage
            return output, compute_losses(self.work.loss, output, y)

        self.weights.load(replay.forward)
        self._doing = "forward"
        if self._recomputation is None or replay.recompute is None:
            done = forward()
            return done, done[1]
        done = self._recomputation.record(forward)
        self.weights.load(replay.recompute)
        self._doing = "recomputation"
        return done, self._recomputation.repeat(forward)[1]

    def _update(self, replay: Replay) -> None:
        self._doing, done = "update", self._number - 1
        if self._own:
            self._own.end_step(self.work, self.update)
            self.update, self._doing = self.update + 1, "data"
            return
        stages = None if len(replay.updates) == self._last_stage + 1 else replay.updates.tolist()
        self.weights.before_update(self._plan.read_later(self._plan.made(done), done), stages)
        if self._replicas:
            self._replicas.average()
        if self._blocks is not None:
            self._blocks.average_duplicates()
        first = int(replay.updates[0])
        step = self.work.step_of(self.update, first, int(self._plan.made(done)[first]))
        self.work.rules.step(step, lambda: self._clipping(step), stages)
        self.update += 1
        self.weights.release(self._plan.oldest(self._number))
        self._doing = "data"

    @property
    def peak_bytes(self) -> int:
        """The most bytes of weights held at once besides those in the model."""
        return self.weights.peak_bytes if self._own is None else self._own.held_bytes

    @property
    def whereabouts(self) -> str:
        """What it is doing, in words for a fault. The backward of the whole model does not tell its stages apart."""
        place = f"{'block ' * (self.work.block_updates > 1)}update {self.update}"
        if self._doing == "update":
            return place
        stage = f", stage {self._watch.stage}" if self._doing in ("forward", "recomputation") else ""
        return f"{place}, microbatch {self._microbatch}{stage}, {self._doing}"

    def close(self) -> None:
        """Leave the model as an ordinary one: newest weights in its parameters, no hooks."""
        self.weights.rest()
        self._random.remove()
        self._watch.remove()
        if self._buffers:
            self._buffers.remove()
