"""The exact single-process emulator: run replays one after another on the whole, unsplit model.

It is exact because the forward and the backward of a replay read weight versions that *earlier*
replays have made (`ReplayPlan` checks this). So the microbatches that a pipeline works on at once
can run one after another:

    for each replay:   [1] load what the forwards read    [2] forward
                       [3] load what the backwards read   [4] backward
                       [5] update the stages that it updates

With recomputation the forward runs twice, in [2] with the forward's weights and again with the
weights of the recomputation.

Gradients accumulate in the order of the microbatches, as in plain training, so the results of a
synchronous method equal plain training bit for bit. If a file of rows orders a stage's backwards
differently, they accumulate in that order. BatchNorm's running statistics belong to the stage:
every forward changes them, in the order of the microbatches, and they have no versions, because a
stage of the pipeline runs its forwards in that order too.
"""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from typing import Any, Callable, ContextManager, Iterable, Iterator, List, Mapping, Sequence, Tuple

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from ipu_pipe.backends.interface import StepResult
from ipu_pipe.errors import BadInput
from ipu_pipe.job.user_code import StageWatch
from ipu_pipe.local.blocks import get_blocks
from ipu_pipe.model.batch import call_model, clone_tensors, count_samples, get_first_tensor
from ipu_pipe.model.loss import (
    BlockOutputs,
    compute_losses,
    compute_zero_losses,
    count_right,
    take_scores,
)
from ipu_pipe.model.observation import observe_effects
from ipu_pipe.model.randomness import KeyedRandomness
from ipu_pipe.model.restoring import restore_buffers
from ipu_pipe.model.stages import Partition
from ipu_pipe.model.watching import FunctionWatch
from ipu_pipe.replay.replays import Replay, ReplayPlan
from ipu_pipe.replay.replicas import GradientReplicas, IndependentReplicas
from ipu_pipe.replay.weights import make_weight_store
from ipu_pipe.replay.work import LossShare, MicrobatchResult, Work, average, tabulate
from ipu_pipe.schedule.table import Schedule
from ipu_pipe.schedule.versions import find_segment_ends
from ipu_pipe.update.clipping import GradientClipping

# (x, y)
Microbatch = Tuple[Any, Any]
# the output, and a loss for each block that has its own
Forward = Tuple[Any, List[torch.Tensor]]


class Emulator:
    """Train `model` in place as `work` says, one update per `step`.

    `replicas`: the number of copies of the pipeline, which train on different microbatches and
    average their gradients. `draws`: the modules that draw random numbers, if known
    (`ipu_pipe.model.observation.ForwardEffects`). A job for which `list_exactness_faults` returns
    reasons would run, but not exactly.
    """

    def __init__(
        self,
        work: Work,
        model: nn.Module,
        part: Partition,
        example: Microbatch,
        seed: int = 0,
        replicas: int = 1,
        draws: Mapping[str, int] | None = None,
    ) -> None:
        self.work = work
        self.model = model
        self._blocks = get_blocks(model)
        self.update = work.update * work.block_updates
        self._number = work.find_first_replay(replicas)
        self._plan = ReplayPlan(work.make_replays(range(replicas)), work.rules, self._number)
        self._replay: Replay | None = None
        self.weights = make_weight_store(
            work, range(len(part)), self._plan.count_updates(self._number).tolist()
        )
        stages = {s: state.parameters for s, state in work.rules.stages.items()}
        self._clipping = GradientClipping(work.clip, stages, work.schedule)
        draws = observe_effects(model, example[0]).draws if draws is None else draws
        device = get_first_tensor(example[0]).device
        self._random = KeyedRandomness(model, draws, seed, device) if draws else None
        self._replica_count = replicas
        self._independent = IndependentReplicas.create(work, model, range(len(part)))
        self._gradient_replicas: GradientReplicas | None = None
        if replicas > 1 and self._independent is None:
            parameters = [p for stage_parameters in stages.values() for p in stage_parameters]
            self._gradient_replicas = GradientReplicas(model, parameters, replicas)
        # a sum of floats depends on its order, so gradients are added in that of the row
        self._row_order = (
            None if work.schedule.in_order else GradientsInRowOrder(work.schedule, stages)
        )
        self._watch = StageWatch(model, part)
        self._last_stage = len(part) - 1
        self._stage_buffers = StageBuffers(model, self._watch) if work.block_updates > 1 else None
        self._recomputation: Recomputation | None = None
        if work.method.segments is not None and work.method.reads_old(len(part)):
            self._recomputation = Recomputation(
                model, part, find_segment_ends(len(part), work.method.segments).tolist()
            )
        # (update, samples, results by block) of updates whose results were not read yet
        self._unread: list[tuple[int, int, list[list[MicrobatchResult]]]] = []
        # error messages name the current phase and microbatch
        self._phase = "data"
        self._microbatch = work.microbatch

    # ---- steps

    def step(
        self, microbatches: Iterable[Microbatch], weights: Sequence[float] | None = None
    ) -> StepResult:
        """Carry out the replays up to the next update, each on its microbatch (x, y), and the
        update.

        With replicas the microbatches are the first of each replica, then the second of each, and
        so on. `weights`: their weights in the mean loss; None if all count the same.
        """
        self.advance(microbatches, weights)
        return self.read()[-1]

    def advance(
        self, microbatches: Iterable[Microbatch], weights: Sequence[float] | None = None
    ) -> None:
        """Do a step without reading its result, for which the host would wait for a GPU; `read`
        returns the result later.
        """
        self._update(self._run_batch(microbatches, weights))

    def read(self) -> list[StepResult]:
        """Return the results of the updates since the last call."""
        unread = self._unread
        self._unread = []
        steps = []
        for _, samples, by_block in unread:
            blocks = [average(tabulate(results)) for results in by_block]
            steps.append(StepResult(*blocks[-1], samples, tuple(blocks) if len(blocks) > 1 else ()))
        return steps

    @property
    def replay(self) -> Replay:
        """The next replay."""
        if self._replay is None:
            # looked up once: data and passes ask for the same one
            self._replay = self._plan.replay(self._number)
            self._microbatch = self._replay.microbatch
        return self._replay

    def list_replays(self) -> list[Replay]:
        """Return the replays up to the next update."""
        replays = [self.replay]
        while not len(replays[-1].updates):
            replays.append(self._plan.replay(self._number + len(replays)))
        return replays

    def _run_batch(
        self, microbatches: Iterable[Microbatch], weights: Sequence[float] | None
    ) -> Replay:
        """Run the replays of an update and return the last one, which names the stages to
        update.
        """
        weight_of: Iterator[LossShare | None] = itertools.repeat(None)
        if weights is not None:
            weight_of = iter(self.work.compute_weights(weights, self._replica_count))
        by_microbatch: list[list[MicrobatchResult]] = []
        samples = 0
        for x, y in microbatches:
            replay = self.replay
            by_microbatch.append(self._run(replay, x, y, next(weight_of)))
            samples += count_samples(x)
            # a fault from here on is one of loading the next microbatch
            self._phase = "data"
        assert by_microbatch and len(replay.updates), (
            f"{len(by_microbatch)} microbatches: not those up to the next update"
        )
        # (blocks, microbatches)
        by_block = [list(results) for results in zip(*by_microbatch)]
        self._unread.append((self.update // self.work.block_updates, samples, by_block))
        return replay

    def _run(
        self, replay: Replay, x: Any, y: Any, weight: LossShare | None
    ) -> list[MicrobatchResult]:
        """Carry out the passes of a replay; return the result of the model, or one for each block
        that has a loss of its own.
        """
        if self._gradient_replicas:
            self._gradient_replicas.enter(replay.replica)
        if self._independent:
            self._independent.enter(replay.replica)
        if self._stage_buffers:
            # with drawn updates each replay updates one stage
            self._stage_buffers.stage = int(replay.updates[0])
        (output, losses), losses_for_backward = self._forward(replay, x, y, weight)
        self.weights.load(replay.backward)
        self._phase = "backward"
        rules = self.work.rules
        stages = range(self._last_stage + 1)
        with rules.compensate(self.update, stages, self.weights.compute_age), self._key_draws(
            replay, is_backward=True
        ):
            # the draws are keyed here too because a checkpoint runs forwards again
            torch.autograd.backward(
                [self.work.scale_loss(loss, weight) for loss in losses_for_backward]
            )
        if self._row_order:
            # while this microbatch's gradients are alone in the parameters
            self._row_order.gather(replay.replica, replay.microbatch)
        if self._gradient_replicas:
            self._gradient_replicas.leave(replay.replica)
        # replicas with weights of their own do not wait for each other, so this one steps now
        if self._independent:
            self.work.rules.step(self.update, self._clipping.clip)
            self._independent.end_replica_step(self.work, self.update)
        self._number = self._number + 1
        self._replay = None
        self.weights.release(self._plan.find_oldest(self._number))
        outputs = output if isinstance(output, BlockOutputs) else [output]
        # the loss itself would keep the graph until the result is read
        return [
            MicrobatchResult(
                loss.detach(), count_right(take_scores(self.work.loss, block_output), y), weight
            )
            for loss, block_output in zip(losses, outputs)
        ]

    def _key_draws(self, replay: Replay, is_backward: bool) -> ContextManager[None]:
        """Key the draws of a pass by the number of its microbatch among all replicas'."""
        if self._random is None:
            return nullcontext()
        # one sequence over all replicas, so that no two of them draw alike
        number = replay.microbatch * self._replica_count + replay.replica
        return self._random.backward(number) if is_backward else self._random.forward(number)

    def _forward(
        self, replay: Replay, x: Any, y: Any, weight: LossShare | None
    ) -> tuple[Forward, list[torch.Tensor]]:
        """Return the forward's result, and the losses to start the backward from (with
        recomputation the second forward's).
        """

        def forward(x: Any, y: Any) -> Forward:
            # hooks only raise it, so each forward begins at 0
            self._watch.stage = 0
            # inputs of another shape are recorded before draws are keyed, whose calls are counted
            if self._blocks is not None:
                self._blocks.pieces[0].cut.prepare(x, training=True)
            with self._key_draws(replay, is_backward=False):
                output = call_model(self.model, x)
            # the loss belongs to the last stage
            self._watch.stage = self._last_stage
            # a mean over no labels is NaN, which a weight of 0 would not remove
            if weight is not None and not weight.share:
                return output, compute_zero_losses(self.work.loss, output)
            return output, compute_losses(self.work.loss, output, y)

        self.weights.load(replay.forward)
        self._phase = "forward"
        if self._recomputation is None or replay.recompute is None:
            result = forward(x, y)
            return result, result[1]
        # copies, because the model and the loss may write to what they get
        copies = clone_tensors((x, y))
        result = self._recomputation.record(lambda: forward(*copies))
        self.weights.load(replay.recompute)
        self._phase = "recomputation"
        return result, self._recomputation.repeat(lambda: forward(x, y))[1]

    def _update(self, replay: Replay) -> None:
        self._phase = "update"
        # the replay that has just ended, whose updates these are
        done = self._number - 1
        if self._independent:
            self._independent.end_step(self.work, self.update)
            self.update = self.update + 1
            self._phase = "data"
            return
        stages = None if len(replay.updates) == self._last_stage + 1 else replay.updates.tolist()
        versions = self._plan.count_updates(done)
        # before the step, which overwrites what later replays still read
        self.weights.stash_before_update(self._plan.find_later_reads(versions, done), stages)
        if self._gradient_replicas:
            self._gradient_replicas.average()
        if self._blocks is not None:
            self._blocks.average_duplicates()
        first = int(replay.updates[0])
        step = self.work.find_step(self.update, first, int(versions[first]))
        self.work.rules.step(step, self._clipping.clip, stages)
        # gradients accumulate until any stage is updated, then all are cleared
        if stages is not None:
            self.work.rules.optimizer.zero_grad(set_to_none=True)
        self.work.rules.after_update(
            self.update // self.work.block_updates, replay.updates.tolist(), False
        )
        self.update += 1
        self.weights.release(self._plan.find_oldest(self._number))
        self._phase = "data"

    def end_round(self, work: Work) -> None:
        """End a round of replicas with weights of their own early, if the schedule of `work` drains
        before the next update.
        """
        last = self.update - 1
        if (
            self._independent is not None
            and self.work.schedule.get_drain_interval(last)[1] != self.update
        ):
            self._independent.end_step(work, last)

    # ---- checkpoints, reports, end

    def export_replicas(self) -> ContextManager[None]:
        """Hold everything that a checkpoint needs in the optimizer's state inside the context."""
        return (
            self._independent.export_replicas() if self._independent is not None else nullcontext()
        )

    def list_other_states(self) -> list[Mapping[Any, Mapping[str, Any]]]:
        """List by parameter the optimizer state of the replicas that are not in the model."""
        return self._independent.list_other_states() if self._independent is not None else []

    @property
    def peak_bytes(self) -> int:
        """The peak bytes of weights besides the model's."""
        return (
            self.weights.peak_bytes if self._independent is None else self._independent.held_bytes
        )

    @property
    def activity(self) -> str:
        """The current activity, in words for a fault. The backward of the whole model does not know
        its stage.
        """
        update = f"{'block ' * (self.work.block_updates > 1)}update {self.update}"
        if self._phase == "update":
            return update
        stage = (
            f", stage {self._watch.stage}" if self._phase in ("forward", "recomputation") else ""
        )
        return f"{update}, microbatch {self._microbatch}{stage}, {self._phase}"

    def close(self) -> None:
        """Leave the model as an ordinary one: newest weights in its parameters, no hooks."""
        self.weights.load_newest()
        if self._random is not None:
            self._random.remove()
        self._watch.remove()
        if self._stage_buffers:
            self._stage_buffers.remove()


class GradientsInRowOrder:
    """Sum the gradients of a batch in the order of the backwards in each stage's row. `stages`:
    stage -> parameters.
    """

    def __init__(self, schedule: Schedule, stages: Mapping[int, Sequence[nn.Parameter]]) -> None:
        self._schedule = schedule
        self._stages = stages
        self._by_replica: dict[int, list[dict[nn.Parameter, torch.Tensor]]] = {}

    def gather(self, replica: int, microbatch: int) -> None:
        """Move the gradients of a microbatch out of the parameters; after the last microbatch of a
        batch put the sums in.
        """
        parameters = [p for stage_parameters in self._stages.values() for p in stage_parameters]
        batch = self._by_replica.setdefault(replica, [])
        batch.append({p: p.grad for p in parameters if p.grad is not None})
        for p in parameters:
            p.grad = None
        if len(batch) < self._schedule.accumulate:
            return
        del self._by_replica[replica]
        ends = self._schedule.slots(
            self._schedule.passes[-1], microbatch + 1 - len(batch), microbatch + 1
        )
        for stage, order in enumerate(ends.argsort(axis=1).tolist()):
            for p in self._stages.get(stage, ()):
                for gradients in (batch[m] for m in order):
                    if p in gradients:
                        p.grad = gradients[p] if p.grad is None else p.grad + gradients[p]


class StageBuffers:
    """Let a forward change the buffers (running statistics) of one stage only, for replays that
    update one stage.

    P replays run the whole model P times, but a pipeline would change the statistics of each stage
    once. So the buffers of all stages but `stage` are restored after each module has run in
    training. The caller sets `stage` before a forward.
    """

    def __init__(self, model: nn.Module, watch: StageWatch) -> None:
        self.stage = 0
        self._watch = watch
        self._saved: dict[nn.Module, list[Any]] = {}
        self._hooks: list[Any] = []
        for module in model.modules():
            if module._buffers:
                self._hooks.append(module.register_forward_pre_hook(self._save))
                self._hooks.append(module.register_forward_hook(self._restore))

    def _save(self, module: nn.Module, inputs: Any) -> None:
        if module.training and self._watch.stage != self.stage:
            buffers = module._buffers.items()
            self._saved[module] = [
                (name, b, None if b is None else b.detach().clone()) for name, b in buffers
            ]

    def _restore(self, module: nn.Module, inputs: Any, output: Any) -> None:
        for name, buffer, value in self._saved.pop(module, ()):
            module._buffers[name] = buffer
            if buffer is not None:
                buffer.data.copy_(value)

    def remove(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()


# ---- recomputation of activations with the weights of the time of recomputation, on the whole model (PipeMare, appendix A)
#
# In a pipeline each segment of stages stores only its inputs, and runs its forward again before its
# backward, with the weights that are in memory then. Here the model runs twice:
#
#     record   the forward that gives the output: store every tensor that crosses into a later segment
#     repeat   the forward that autograd records: replace each crossing tensor by the stored one, so that each segment starts
#              from its actual inputs; gradients pass through the replacement

# (number of the operation, index of the argument)
ArgumentPosition = Tuple[int, int]


class Recomputation:
    """Run a model twice and track the segment that computed each tensor. `segment_of`: the last
    stage of each stage's segment.
    """

    def __init__(self, model: nn.Module, part: Partition, segment_of: Sequence[int]) -> None:
        self._model = model
        self._part = part
        self._segment_of = list(segment_of)
        self._repeats = False
        # the stored tensors that cross into a later segment
        self._stored: dict[ArgumentPosition, torch.Tensor] = {}
        # id of a tensor -> its segment, for one forward; the reference keeps the id from being used
        # again
        self._segments: dict[int, tuple[int, torch.Tensor]] = {}
        self._replaced: dict[int, torch.Tensor] = {}
        self._operation = 0

    def record(self, run: Callable[[], Any]) -> Any:
        """Return `run()`, a forward of the model without a graph, and store the tensors that cross
        into later segments.

        Raise `BadInput` if an operation changes such a tensor in place.
        """
        self._stored = {}
        with torch.no_grad():
            return self._run(run, repeats=False)

    def repeat(self, run: Callable[[], Any]) -> Any:
        """Return `run()`, the same forward with the present parameters, and restore the buffers."""
        with restore_buffers(self._model):
            result = self._run(run, repeats=True)
        self._stored = {}
        return result

    def _run(self, run: Callable[[], Any], repeats: bool) -> Any:
        self._repeats = repeats
        self._operation = 0
        with StageWatch(self._model, self._part) as self._watch, FunctionWatch(self._call):
            result = run()
        self._segments = {}
        self._replaced = {}
        return result

    def _call(self, func: Any, args: Any, kwargs: Any) -> Any:
        segment = self._segment_of[self._watch.stage]
        flat, shape = tree_flatten((args, kwargs))
        for index, value in enumerate(flat):
            if (
                isinstance(value, torch.Tensor)
                and self._segments.get(id(value), (segment, value))[0] < segment
            ):
                flat[index] = self._store_or_replace(value, (self._operation, index))
        self._operation += 1
        args, kwargs = tree_unflatten(flat, shape)
        if self._repeats:
            result = func(*args, **kwargs)
        else:
            # detached and viewed tensors share the counter, so an operation on a view is seen too
            versions = [value._version for value in self._stored.values()]
            result = func(*args, **kwargs)
            if versions != [value._version for value in self._stored.values()]:
                name = getattr(func, "__name__", str(func))
                why = (
                    "changes a tensor of an earlier segment in place: use the out-of-place "
                    "operation"
                )
                raise BadInput(f"method_args.recompute: {name}: {why}")
        for value in tree_flatten(result)[0]:
            if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
                self._segments[id(value)] = (segment, value)
        return result

    def _store_or_replace(self, value: torch.Tensor, position: ArgumentPosition) -> torch.Tensor:
        """Store a tensor that crosses into a later segment, or return its replacement in the second
        forward.
        """
        if not self._repeats:
            self._stored[position] = value.detach()
            return value
        if id(value) not in self._replaced:
            self._replaced[id(value)] = _StraightThrough.apply(value, self._stored[position])  # type: ignore[no-untyped-call]
        return self._replaced[id(value)]


class _StraightThrough(torch.autograd.Function):
    """Return the value of the second argument; the gradient goes to the first."""

    @staticmethod
    def forward(ctx: Any, repeated: torch.Tensor, stored: torch.Tensor) -> torch.Tensor:
        return stored.view_as(stored)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, None
