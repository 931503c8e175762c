"""`Pipeline`: train a model under any method from a loop of the caller's own, one batch a step.

step k      gives batch k, then every process runs exactly the actions of slots before stage 0's first forward of batch k + 1
the cut     is consistent: what an action needs has an earlier slot, so no process waits for another's next step
results     leave with the step at whose cut all stages have made their update, the same step on every backend

slot     0   1   2   3   4   5   6   7   8   9       pipedream, 3 stages
stage 0  F0  F1  F2  .   .   B0* F3  B1* F4  B2*     | step 0 | step 1 | step 2 ......... | step 3 . | step 4
stage 1  .   F0  F1  F2  B0* .   B1* F3  B2* F4      update 0 is made by all stages in slot 5: step 2 returns it
stage 2  .   .   F0  B0* F1  B1* F2  B2* F3  B3*
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
import tempfile
import warnings
import weakref
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from ipu_pipe.backends import world
from ipu_pipe.backends.interface import (
    CheckpointState,
    Engine,
    StepResult,
)
from ipu_pipe.backends.processes.agreement import compare_inputs, compare_settings
from ipu_pipe.backends.processes.lost_ranks import CallRecord, LostRank
from ipu_pipe.backends.ranks import are_joined, gather_objects, run_on_main
from ipu_pipe.backends.table import launch
from ipu_pipe.config.load import configure_pipeline
from ipu_pipe.config.schema import PipelineConfig
from ipu_pipe.errors import BadInput, Divergence, RunFault, locate_faults, raise_faults, say_in
from ipu_pipe.job.factories import make_loss_weight
from ipu_pipe.job.metrics import make_metrics
from ipu_pipe.job.record import Job
from ipu_pipe.job.user_code import attribute_faults
from ipu_pipe.local.blocks import HEADS, get_blocks
from ipu_pipe.model.batch import count_samples, map_tensors
from ipu_pipe.model.devices import get_kind, read_autocast
from ipu_pipe.model.loss import OwnLoss, wrap_loss
from ipu_pipe.model.modes import describe_modes
from ipu_pipe.model.precision import export_loss
from ipu_pipe.model.randomness import restore_random_states
from ipu_pipe.model.restoring import record_modes, restore_modes
from ipu_pipe.model.stages import Partition
from ipu_pipe.pipeline.absent import AbsentWeights
from ipu_pipe.pipeline.arguments import (
    DEADLINE,
    count_replicas,
    make_backend_section,
    make_clip_section,
    require_current_gpu,
    require_group,
    require_iterable,
    require_kinds,
    require_metrics,
    require_values,
    require_weights_for,
)
from ipu_pipe.pipeline.batches import (
    GivenBatches,
    Microbatch,
    copy_memory,
    divide_batch,
    interleave_replicas,
    require_samples,
    sum_floats,
    take_pairs,
    unwrap,
)
from ipu_pipe.pipeline.build import LoopClient, build_job, make_setup, set_process_state
from ipu_pipe.pipeline.checks import find_rule_faults, require_device
from ipu_pipe.pipeline.flow import Flow
from ipu_pipe.pipeline.optimizer import OptimizerHandle, OptimizerView, explain_closure
from ipu_pipe.pipeline.seam import (
    BLOCKS,
    LIVE,
    NEVER,
    OF_HOOKS,
    REBUILT,
    Change,
    Objects,
    Seam,
    compute_checksums,
    explain_refusal,
    get_treatment,
)
from ipu_pipe.pipeline.sharding import PrepareStage
from ipu_pipe.pipeline.state import (
    SavedState,
    check_layout,
    check_loss,
    check_tensors,
    describe_state,
    hand_over,
    is_joined,
    parse_state,
    select_averages,
    take_back,
)
from ipu_pipe.pipeline.trace import PipelineTrace, choose_traced_updates, write_trace
from ipu_pipe.pipeline.turns import Turns, take_turn
from ipu_pipe.refusals import Language
from ipu_pipe.replay.work import require_finite
from ipu_pipe.report.memory import build_memory_record
from ipu_pipe.schedule.methods import DefaultAccumulate, Method, Rounds, resolve_method
from ipu_pipe.schedule.table import Schedule
from ipu_pipe.schedule.versions import VersionTable
from ipu_pipe.store.checkpoint import load_weights
from ipu_pipe.text import describe_kind, list_some
from ipu_pipe.update.optimizer import copy_group

# kinds of changes that replicas with weights of their own (LocalSGD) must all get
OF_REPLICAS = ("weight", "buffer", "optimizer")
PRECISIONS = {torch.float64: "float64", torch.bfloat16: "bfloat16"}


@dataclass(frozen=True)
class Update:
    """An update that has left the pipeline.

    index:    its number, from 0.
    loss:     the mean over its microbatches and replicas; None if all have the weight 0.
    accuracy: the same mean; None where labels have no accuracy.
    blocks:   (loss, accuracy) of each block with a loss of its own, the whole model last; empty if
              there is one loss.
    """

    index: int
    loss: float | None
    accuracy: float | None = None
    blocks: tuple[tuple[float | None, float | None], ...] = ()

    def __repr__(self) -> str:
        """Return the fields that have a value, in short."""
        fields = [str(self.index), f"loss={_format_number(self.loss)}"]
        if self.accuracy is not None:
            fields.append(f"accuracy={_format_number(self.accuracy)}")
        if self.blocks:
            losses = ", ".join(_format_number(loss) for loss, _ in self.blocks)
            fields.append(f"losses of blocks=({losses})")
        return f"Update({', '.join(fields)})"


class UpdateNumber(int):
    """The number of an update, from 0, for a function of `Pipeline.on_update`.

    averaged: whether replicas with weights of their own (LocalSGD) have been averaged; False after
    the step of one of them.
    """

    averaged = False


class Pipeline:
    """Train `model` in place under a pipeline or local-parallel method, one batch a `step`.

        pipe = ipu_pipe.Pipeline(
            model, loss, optimizer, method="pipemare", stages=8, microbatches=4
        )
        for x, y in loader:
            for update in pipe.step(x, y):  # the updates that left the pipeline in this call
                print(update.index, update.loss)
            scheduler.step()
        print(pipe.evaluate(test_loader, ["accuracy"]))
        torch.save(pipe.state_dict(), "checkpoint.pt")

    What is trained

    model:      trained in place, in its own dtype, by the modes that its modules have (in training
                mode if it comes in evaluation mode as a whole).
    loss:       `loss(output, y) -> ()`, the mean over a microbatch; None: the model returns its own
                loss.
    loss_weight: the weight of a microbatch in its update's mean loss: "tokens" (labels that are not
                ignored), or a function of the labels; by default all count the same.
    optimizer:  over the model's parameters, in any groups; parameters in no group are not changed.
                It stays the handle for learning rates and other settings, which are copied at each
                `step` for that batch's update, on every stage. The
                pipeline steps it: `optimizer.step()` raises. Its `state` is filled as usual: on
                processes of the stages here, on xla and IPUs of none; `state_dict()` collects it.
    heads:      settings in which the auxiliary heads of a local method differ from the optimizer's
                first group, such as {"lr": 0.1}; these stay as they are when a scheduler changes
                the group.
    by_stage:   settings of the optimizer that differ by stage: a list of one value a stage, or
                {"from": a, "to": b} by a stage's delay; {"lr": [0.1, 0.05]} keeps the proportion of
                the stages' rates to a group's under a scheduler.
    clip:       (norm, scope), such as (1.0, "stage"); scope "stage", "global" (methods that flush)
                or "delayed_global". A norm alone has the scope "global" with methods that flush,
                else "stage".
    ema:        the decay of a moving average of the weights, such as 0.999, with each update;
                `evaluate` and `predict` use the averages, and `averages()` returns them.
    precision:  "float32", "float64", "bfloat16" or "bfloat16_mixed"; by default the model's own
                dtype.
    seed:       of dropout and of the methods that draw.
    allow_nonfinite: go on after a loss that is not finite; otherwise `step` raises `Divergence`.

    How: the method

    method:     such as "gpipe", "pipedream_2bw", "pipemare" or "local_greedy";
                `list(ipu_pipe.METHODS)` has all names.
    method_args: its rules and changes, as in a config: {"t1": {"anneal_updates": 1000}, "t2":
                {"decay": 0.5}} are PipeMare's rates by delay and its correction, {"stash": True}
                keeps weight versions, and so on.
    stages:     where the model is cut: a count, "finest", the names of the modules at which the
                second and later stages begin (["1", "2", "3"] for four), or a mapping as in a
                config; by default where `ipu_pipe.begin_stage` marks it.
    microbatches: the microbatches N of an update; by default the number of stages for methods that
                flush and PipeDream-2BW, else 1.
    warmup:     updates at the start that run as in GPipe (PipeMare, W).
    recompute:  whether backwards recompute the activations of their stage from its input: the same
                weights in less memory, on processes and IPUs (the emulator has one microbatch's
                activations anyway). Split backwards keep them between their halves.
    replicas:   R copies of the pipeline, which average gradients. On processes each rank passes its
                own replica's batch, as under DistributedDataParallel
                (`DistributedSampler(num_replicas=pipe.replicas, rank=pipe.replica)`); the emulator
                takes the R batches in one, one after another.

    Where: the devices

    backend:    "emulator" (one process); "distributed" (one process per device: the pipeline joins
                torchrun's processes, or takes a process group of the caller's; fewer processes than
                stages hold neighbouring ones, but local methods need one for each); "poptorch"
                (Graphcore IPUs, where a step makes `updates_per_call` updates; not run on
                hardware); "xla" (XLA's devices, see docs/accelerators.md). `backend_args`: further
                keys of a config's backend, such as `threads` and `ipu`.
    device:     "cpu", "cuda" or another kind of device that torch has here; by default where the
                model is. It is the current device of that kind, to which the model is moved.
    stages_per_device: for methods with virtual stages; by default the method's own number.
    reduction:  how processes average the gradients of replicas: "exact", the emulator's bits, or
                "fast", beside the backward.
    process_group: of torch.distributed: the ranks that hold the stages, in the order of its ranks;
                by default all. It may be a dimension of a DeviceMesh, beside others of your own.
    data_group: the ranks that hold the same stages in other pipelines like this one. They are its
                replicas: each takes its own batch, and gradients are averaged over them.
    prepare_stage: `prepare_stage(stage, index)` shards the weights of a stage of this rank in place,
                by FSDP2's `fully_shard` or `parallelize_module`, after the model was cut
                (docs/mesh.md).
    deadline:   the seconds that a rank waits for another. A rank whose own code between two calls
                takes longer ends the pipeline on all ranks, with a line that names the call which
                it has not made.
    hardware:   the devices for which `stages` are planned ("auto", or a mapping by "hardware"), as
                in a config.

    What is seen

    trace:      the updates whose events `trace()` writes, a range; True: about the first 512
                microbatches.
    example:    a microbatch (x, y) for a process that is given no inputs or labels, and to evaluate
                or predict before the first step; else the first step's first one serves.

    On processes all ranks make the object with equal arguments and call the same methods in the
    same order. A rank needs x if `takes_inputs` and y if `takes_labels`, and may pass None for the
    other. Collectives of the caller between calls are allowed.

    Raise `BadInput` if the arguments or the model do not fit, at the latest in the first `step`. An
    error inside a call breaks the object on all ranks: every later call but `close` raises
    `RunFault`. In one process a first step that is refused changes nothing: mend the batch and step
    again.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[Any, Any], torch.Tensor] | None,
        optimizer: torch.optim.Optimizer,
        method: str = "gpipe",
        *,
        loss_weight: Callable[[Any], float] | str | None = None,
        stages: Any = None,
        stages_per_device: int | None = None,
        microbatches: int | None = None,
        method_args: Mapping[str, Any] | None = None,
        warmup: int = 0,
        clip: float | tuple[float, str] | None = None,
        ema: float | None = None,
        precision: str | None = None,
        recompute: bool = False,
        replicas: int = 1,
        reduction: str = "exact",
        seed: int = 0,
        heads: Mapping[str, Any] | None = None,
        by_stage: Mapping[str, Any] | None = None,
        backend: str = "emulator",
        device: str | torch.device | None = None,
        process_group: Any = None,
        data_group: Any = None,
        prepare_stage: PrepareStage | None = None,
        deadline: float = DEADLINE,
        backend_args: Mapping[str, Any] | None = None,
        hardware: Any = None,
        allow_nonfinite: bool = False,
        trace: range | bool | None = None,
        example: tuple[Any, Any] | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise BadInput(f"model: {describe_kind(model)}: must be a torch.nn.Module")
        require_values(model)
        # a class can be called, too, but with settings instead of outputs
        if loss is not None and (not callable(loss) or isinstance(loss, type)):
            raise BadInput(
                f"loss: {describe_kind(loss)}: must be a function of outputs and labels, or None "
                f"for the model's own"
            )
        require_kinds(method_args, backend_args, warmup, example, deadline)
        self.model = model
        self._loss = loss
        self._stage_count = count_stages(model, stages)
        require_weights_for(model, stages)
        # None stands for what is not given, as null in a config
        args = {key: value for key, value in (method_args or {}).items() if value is not None}
        if "warmup" in args:
            raise BadInput("method_args.warmup: use the argument warmup, a number of updates")
        if warmup:
            # a loop has no epochs: `build_job` takes the number for updates
            args["warmup"] = {"epochs": warmup}
        keys: dict[str, Any] = {
            "method": method,
            "method_args": args,
            "stages": stages,
            "stages_per_device": stages_per_device,
            "precision": _find_precision(model) if precision is None else precision,
            "recompute": recompute,
            "replicas": count_replicas(replicas, process_group, data_group),
            "reduction": reduction,
            "seed": seed,
            "backend": make_backend_section(model, backend, device, deadline, backend_args),
            "hardware": hardware,
            "allow_nonfinite": allow_nonfinite,
            "loss_weight": loss_weight if isinstance(loss_weight, str) else None,
            "clip": make_clip_section(clip, method),
            "ema": None if ema is None else {"decay": ema},
        }
        asked: dict[str, Any] = {"warmup": warmup, "heads": heads, "by_stage": by_stage}
        with say_in(Language.PYTHON):
            self._config, self._method = _configure(keys, microbatches, self._stage_count, asked)
            accumulate = self._config.gradient_accumulation
            self._traced_updates = choose_traced_updates(trace, accumulate)
            # as given; those of the config stay where they were cut, until a module is replaced
            self._stages = self._config.stages
            kind = get_kind(self._config.backend.device)
            # a missing GPU is named at the first step
            if not kind.is_cuda:
                require_device(kind.name)
            # whether there is a loss, but not which: ranks have objects of their own
            asked["loss"] = None if loss is None else "a function"
            asked["trace"] = self._traced_updates or None
            self._column = self._join(process_group, data_group, asked)
            require_current_gpu(model, device)
        self._example = example
        self._loss_weight = loss_weight
        self._prepare_stage = prepare_stage
        self._handle = OptimizerHandle(optimizer, model, heads, by_stage)
        # a pipeline that was never built may be dropped without `close`
        weakref.finalize(self, self._handle.release).atexit = False
        self._view = OptimizerView(optimizer)
        # weak, so that an optimizer which outlives its pipeline does not keep it
        self._handle.switch = weakref.WeakMethod(self._switch_optimizer)
        self._job: Job | None = None
        self._flow: Flow | None = None
        self._absent = AbsentWeights(model)
        self._seam: Seam | None = None
        # updates that left in a drain that `evaluate` and the like have made
        self._pending: list[Update] = []
        # of the batches of updates in flight
        self._sums: dict[int, list[torch.Tensor]] = {}
        self._callbacks: list[Callable[[UpdateNumber, int, list[nn.Parameter]], None]] = []
        self._is_broken = self._is_closed = False
        self._turns = Turns(self._column)
        self._loaded: SavedState | None = None
        # the modules' modes in training, from the first step on
        self._modes: dict[nn.Module, bool] = {}
        # those that drew nothing when the stages were built, by name
        self._idle_dropouts: list[tuple[str, _DropoutNd]] = []
        # of each group, those that are not 0, when they were last checked
        self._settings_that_fit: list[set[str]] = []
        # of the events that this process records, until they are written
        self._events_folder: tempfile.TemporaryDirectory[str] | None = None
        self._calls = CallRecord(is_shared=self._config.backend.facts.uses_processes)

    def _join(
        self, process_group: Any, data_group: Any, asked: Mapping[str, Any]
    ) -> world.Column | None:
        """Meet the other ranks, and return this pipeline's column of them."""
        for argument, group in (("process_group", process_group), ("data_group", data_group)):
            require_group(argument, group, self._config.backend)
        column = world.make_column(process_group, data_group)
        with world.enter(column):
            # with what was asked for, since ranks must agree on it, too, and the config does not
            # have all of it
            launch(self._config, asked)
        return column

    # ---- the loop

    @take_turn
    def step(
        self,
        x: Any = None,
        y: Any = None,
        *,
        microbatches: Iterable[tuple[Any, Any]] | None = None,
    ) -> list[Update]:
        """Give one update's batch to the pipeline. Return the updates that left it in this call, in
        order, maybe none.

        x, y: tensors, or tensors in mappings, tuples and lists, of N x B samples, which are divided
        into N microbatches in order; or `microbatches`, N pairs (x, y). B is that of the first step
        on processes and IPUs. On IPUs a step takes the batches of `updates_per_call` updates in
        one, one after another, and makes them all with the settings of now.

        Raise `ValueError` if the batch does not divide, `RuntimeError` under `no_grad` or autocast,
        `Divergence` if the loss of an update that leaves is not finite, and the exceptions of the
        model and the loss.
        """
        self._require_usable("step")
        if not torch.is_grad_enabled():
            raise RuntimeError("step: called under no_grad: training needs gradients")
        _require_no_autocast("step")
        if self._flow is not None and not self.model.training:
            raise RuntimeError("step: the model is in evaluation mode: call model.train() first")
        self._handle.require_parameters()
        self._handle.require_settings()
        if self._handle.is_evaluating:
            raise RuntimeError(
                "step: the optimizer is in evaluation mode: call optimizer.train() first"
            )
        self._require_settings_that_fit()
        # before the batch, because it may build the pipeline anew
        cut_by = self._settle()
        if cut_by is not None:
            # at once, since a batch that is refused must leave a pipeline that evaluates
            with self._break_on_error("step"):
                self._build(cut_by)
        # before anything runs: a batch that does not divide breaks nothing
        batch = self._divide(x, y, microbatches)
        self._handle.count_as_stepped()
        # of the batch as it came, which has fewer tensors than its microbatches
        sums = sum_floats(batch if microbatches is not None else (x, y))
        with self._break_on_error("step"):
            job, flow = self._build(batch[0])
            self._require_parts(batch)
            if self._outlives_step(job):
                batch = [copy_memory(part) for part in batch]
            size = len(batch) // self.updates_per_call
            for i in range(self.updates_per_call):
                k = flow.given + i
                # the settings of now are those of this batch, however late its update is made
                self._handle.record(k)
                self._sums[k] = sums
                self._data.give(self._number(batch[i * size : (i + 1) * size], k))
            # once for all, since each lending walks over all weights
            with flow.lend_gradients():
                for _ in range(self.updates_per_call):
                    flow.give()
                return self._report(job, flow.take())

    @take_turn
    def drain(self) -> list[Update]:
        """Run the pipeline empty. Return the updates that left it and were not returned yet; the
        next step fills it again.

        A drain changes what is trained: the passes after it read weights that are less stale.
        Calling it again changes nothing. Raise `ValueError` where the method cannot
        drain (`can_drain`).
        """
        self._require_usable("drain")
        return self._drain_and_take("drain")

    def _drain_and_take(self, call: str) -> list[Update]:
        self._drain(call)
        pending = self._pending
        self._pending = []
        return pending

    @property
    def can_drain(self) -> bool:
        """Whether the pipeline may drain now: not within a round of an outer optimizer or of
        accumulating blocks.
        """
        return self._find_undrainable() is None

    @property
    def updates_per_call(self) -> int:
        """The updates that a step makes: `device_iterations` on IPUs, else 1."""
        return self._config.updates_per_call

    @property
    def updates(self) -> int:
        """The number of updates whose batches were given; those of a state that was loaded
        count.
        """
        if self._loaded is not None:
            return self._loaded.updates
        return self._flow.given if self._flow is not None else 0

    @property
    def in_flight(self) -> int:
        """The updates whose batches were given and that have not left the pipeline."""
        return self.updates - self.finished

    @property
    def finished(self) -> int:
        """The updates that have left the pipeline."""
        if self._loaded is not None:
            return self._loaded.updates
        return self._flow.left if self._flow is not None else 0

    @property
    def microbatches(self) -> int:
        """The microbatches of a step in this process: N of an update, or one for each replica or
        stage that takes its own.
        """
        return self._microbatches_per_step

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer for a framework that steps it, or counts its steps: its `step` changes
        nothing.
        """
        return self._view

    # ---- the place of this process

    @property
    def replicas(self) -> int:
        """The copies of the pipeline."""
        return self._config.replicas

    @property
    def replica(self) -> int:
        """The replica of this process, as `rank` of a DistributedSampler; 0 on the emulator, which
        has all.
        """
        return 0 if not are_joined() else self._find_place()[0]

    @property
    def rank_in_pipeline(self) -> int:
        """The device of this process within its replica; 0 on the emulator."""
        return 0 if not are_joined() else self._find_place()[1]

    def _find_place(self) -> tuple[int, int]:
        """Return the replica and the device of this rank."""
        with world.enter(self._column):
            # ranks are numbered replica by replica
            replica, device = divmod(world.get_rank(), world.count_devices(self.replicas))
            return (replica if world.get_data_group() is None else world.get_replica()), device

    @property
    def takes_inputs(self) -> bool:
        """Whether this process needs the inputs of a batch. Before the first step known for one
        process only.
        """

        def needs_inputs(job: Job, stages: Sequence[int]) -> bool:
            blocks = get_blocks(job.model)
            # a block that trains a duplicate of the first stage begins with the data, too
            return min(stages) <= (0 if blocks is None else blocks.overlap)

        return self._hold_stage(needs_inputs)

    @property
    def takes_labels(self) -> bool:
        """Whether this process needs the labels of a batch. Before the first step known for one
        process only.
        """

        def needs_labels(job: Job, stages: Sequence[int]) -> bool:
            blocks = get_blocks(job.model)
            last = len(job.partition) - 1
            # the loss of a block's head takes the labels, too
            heads = [] if blocks is None else [s for s in stages if blocks.get_head(s) is not None]
            return last in stages or bool(heads)

        return self._hold_stage(needs_labels)

    def _hold_stage(self, test: Callable[[Job, Sequence[int]], bool]) -> bool:
        # one process has all stages; of several, none knows its own before the first step
        if self._job is None or not are_joined():
            return True
        here = [
            s for s, device in enumerate(self._job.placement) if device == self.rank_in_pipeline
        ]
        return test(self._job, here)

    # ---- evaluation and prediction

    @take_turn
    def evaluate(self, batches: Iterable[Any], metrics: Any = None) -> dict[str, float | None]:
        """Drain, and return the mean loss and the metrics over `batches`, pairs (x, y) of any size.

        metrics: a list of names ("accuracy", and others of a config), functions `f(output, y)` and
        objects with `update` and `compute` (as in torchmetrics), or a mapping from names to them;
        None: the loss alone. All ranks pass the same batches and get the same values. A batch
        counts by its samples. The modules' modes are restored.
        """
        self._require_usable("evaluate")
        # before anything runs: the same faults on all ranks break nothing
        chosen = make_metrics(require_metrics(metrics))
        require_iterable("evaluate", "batches", batches)
        job, engine = self._pause("evaluate")
        with self._break_on_error("evaluate", only_reads=True):
            # on all ranks, also where none is read: the start of a DataLoader draws a seed
            iterator = iter(batches)

            def read(shard: int = 0, shards: int = 1) -> Iterator[tuple[Any, Any]]:
                for batch in itertools.islice(iterator, shard, None, shards):
                    yield job.prepare_batch(batch if self._loss is not None else unwrap(batch))

            # inside `whole_model` the weights are not rounded
            with job.precision.put_rounded():
                # after those of its blocks comes the result of the whole model
                result = engine.evaluate(read, chosen)[-1]
        # no metric has this name: `make_metrics` refuses it
        return {"loss": result.loss, **result.metrics}

    @take_turn
    def predict(self, x: Any) -> Any:
        """Drain, and return the model's output for inputs `x` in evaluation mode, on every rank,
        without gradients; with `ema` that of the averaged weights. All ranks pass the same inputs.
        """
        job, engine = self._pause("predict")
        with self._break_on_error("predict", only_reads=True):
            # a model with its own loss takes a whole batch, labels too
            moved = job.move_to_device(x, None)[0] if self._loss is None else _move_inputs(job, x)
            with job.precision.put_rounded():
                return engine.predict(moved)

    @take_turn
    def averages(self) -> dict[str, torch.Tensor]:
        """Drain, and return the moving averages of the weights (`ema`) by the names of the weights;
        all ranks call it, others than 0 get {}.

        A weight that has had no gradient is left out: it has not moved.
        """
        if self._config.ema is None:
            raise BadInput(
                "averages: the pipeline keeps none: make it with ema=0.999, or another decay"
            )
        job, engine = self._pause("averages")
        with self._break_on_error("averages", only_reads=True):
            state = engine.collect_state()
            return {} if state is None else select_averages(state, job.model)

    @contextlib.contextmanager
    def whole_model(self, *, everywhere: bool = False) -> Iterator[nn.Module | None]:
        """Drain, and give rank 0 the whole model with the newest weights inside the context; all
        ranks enter it.

            with pipe.whole_model() as model:
                if model is not None:
                    torch.save(model.state_dict(), "weights.pt")

        Other ranks get None, and the model with `everywhere=True`, with the running statistics
        (BatchNorm) of their replica in their own stages. The modules' modes are restored. Weights
        and buffers that are changed inside are trained on from there; on processes every rank makes
        the same change, with `everywhere=True`. Raise `RuntimeError` where a change is not taken
        over.
        """
        # not by `take_turn`: a function that yields returns before the body of the caller's `with`
        # has run
        with self._turns.take("whole_model"):
            job, engine = self._pause("whole_model")
            with self._break_on_error("whole_model", only_reads=True):
                with engine.hold_whole_model(everywhere, masters=True) as copied, restore_modes(
                    self.model
                ):
                    # ranks of sharded weights have no other whole model than the copy
                    is_copy = job.precision.is_sharded
                    # a rank without a copy has nothing to compare
                    whole = (copied or nn.Module()) if is_copy else self.model
                    # by checksums, because a write through .data leaves no other trace
                    before = compute_checksums(whole)
                    if self._seam is not None:
                        # the newest values are no changes of the caller's
                        self._seam.note_other_call()
                    yield whole if everywhere or engine.is_main else None
                    if self._seam is not None and engine.leaves_weights_stale:
                        # a compiled program has these as they were: the next step must know
                        self._seam.keep_changes(("value", "loss"))
                    has_changed = compute_checksums(whole) != before
                # a refusal breaks a pipeline on processes: only some ranks may have the change
                if has_changed and is_copy:
                    raise RuntimeError(
                        "whole_model: weights or buffers were changed in a copy of the sharded "
                        "ones: use pipe.load_state_dict()"
                    )
                if has_changed:
                    self._take_tensors(everywhere)

    def _take_tensors(self, everywhere: bool) -> None:
        """Train on from the weights and buffers that the caller has changed in the whole model."""
        facts = self._config.backend.facts
        flow = self._require_flow()
        if facts.uses_processes and not everywhere:
            raise RuntimeError(
                "whole_model: weights or buffers were changed on one rank: use "
                "whole_model(everywhere=True), and make the same change on every rank"
            )
        if facts.loads_poptorch_state:
            raise RuntimeError(
                "whole_model: weights or buffers were changed, which the IPUs would not see: use "
                "pipe.load_state_dict()"
            )
        self._require_equal_replicas("whole_model", "weights or buffers were changed")
        has_masters = self._require_job().precision.masters is not None
        has_copies = flow.engine.leaves_weights_stale or self._method.rounds is not None
        # the engine has pointers to weights that were rounded anew
        if has_copies or has_masters:
            flow.engine.reopen(flow.given, flow.table, is_loaded=has_copies)

    # ---- state

    @take_turn
    def state_dict(self, *, drain: bool = True, sharded: bool = False) -> dict[str, Any]:
        """Drain, and return what `load_state_dict` needs to continue bit for bit; all ranks call
        it, rank 0 gets the state.

        sharded: each rank gets the part of its own stages instead, which its rank can load with the
        same ranks and stages.

        It has the weights and buffers, the optimizer's state by parameter name (heads, outer
        optimizers and replicas' weights too) and its groups' settings, and the position.
        Schedulers, loaders and torch's generators are the caller's. Other ranks get {} of a whole
        state. The drain changes what follows: a run equals its resumed copy if it took a state
        there too. Raise `RunFault` with `drain=False` if an update is in flight.
        """
        self._require_usable("state_dict")
        if not drain and self.in_flight:
            raise RunFault(
                f"state_dict: {self.in_flight} updates are in flight: call drain() first"
            )
        self._drain("state_dict")
        own_keys = self._handle.list_own_keys()
        if own_keys:
            # 3: the caller's line, past the wrapper `take_turn`
            warnings.warn(
                f"state_dict: the optimizer's state has entries under keys of its own, "
                f"{list_some(own_keys)}, which this state lacks: save optimizer.state_dict(), too",
                stacklevel=3,
            )
        flow = self._flow
        if flow is None:
            return self._describe_loaded(sharded)
        with self._break_on_error("state_dict", only_reads=True):
            state = (
                flow.engine.collect_part(every_replica=True)
                if sharded
                else flow.engine.collect_state()
            )
            settings = self._collect_settings()
        is_part = sharded and are_joined()
        layout = self._describe_layout(self._require_job()) if is_part else None
        return self._describe_state(state, settings, layout)

    def _describe_state(
        self, state: CheckpointState | None, settings: Any, layout: Any = None
    ) -> dict[str, Any]:
        """Return the state of an engine with the settings and the position; {} for None."""
        if state is None:
            return {}
        flow = self._require_flow()
        partition = self._require_job().partition
        return describe_state(
            state,
            self._config.method,
            settings,
            flow.given,
            flow.drains,
            layout,
            None if partition.spread else partition.begin_names(),
            world.get_world_size() if are_joined() else 1,
        )

    def _describe_loaded(self, sharded: bool) -> dict[str, Any]:
        """Return the state that was loaded before the first step, with the weights and settings of
        now.
        """
        saved = self._loaded
        if saved is None:
            raise RunFault(
                "state_dict: no step was made yet: save the states of the model and the optimizer "
                "themselves"
            )
        is_part = saved.layout is not None
        if are_joined() and is_part != sharded:
            form = "a part" if is_part else "a whole state"
            raise RunFault(f"state_dict: {form} was loaded: make a step first, or ask for that")
        if are_joined() and not is_part and world.get_rank():
            return {}
        # the weights of a part are loaded with the first step
        model = {} if is_part else self.model.state_dict()
        saved = take_back(saved, self.model, self._handle.optimizer)
        weights = {**model, **saved.model}
        loss = saved.loss if is_part else export_loss(self._loss)
        state = CheckpointState(weights, saved.optimizer, saved.plain, loss)
        settings = self._handle.export_settings()
        return describe_state(
            state,
            self._config.method,
            settings,
            saved.updates,
            saved.drains,
            saved.layout,
            saved.stages,
            saved.ranks,
        )

    def _collect_settings(self) -> dict[str, Any]:
        """Return the settings of the caller's groups. On processes, all ranks take those that the
        optimizer itself has written from a rank with parameters of the group.
        """
        settings = self._handle.export_settings()
        if not (self._handle.may_write_settings and are_joined()):
            return settings
        here = {
            group["member"]
            for group in self._require_job().optimizer.param_groups
            if any(p.numel() for p in group["params"])
        }
        groups = settings["groups"]
        # a stage steps only its own parameters, so that a rank may have old settings of others
        for other in gather_objects(
            {member: groups[member] for member in here if member < len(groups)}
        ):
            for member, group in other.items():
                groups[member] = group
        return settings

    @take_turn
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken, on any backend and number of ranks; every rank
        passes the whole state.

        Instead every rank may pass its own part (`state_dict(sharded=True)`), with the same ranks
        and stages, or all parts in one, as `torch.distributed.checkpoint` joins them. The
        optimizer's groups get the settings that they had, as in its own `load_state_dict`: load a
        scheduler's state too. Updates in flight are finished first, and their results dropped.
        Before the first step `evaluate` needs the pipeline's `example`.

        Raise `BadInput` for a state that does not fit, before anything has changed. The state is
        copied. Weights that are written after it, before the first step, are trained on; those of a
        part are loaded with the first step.
        """
        self._require_usable("load_state_dict")
        if self._flow is not None and not self._flow.is_empty:
            self._require_drainable("load_state_dict")
        with locate_faults("load_state_dict"):
            # before the drain, so that a state that is refused has changed nothing
            saved = self._parse_state(state)
        self._drain("load_state_dict")
        # results of before the state are dropped with it
        self._pending = []
        if saved.settings is not None:
            self._handle.import_settings(saved.settings)
        self._loaded = saved
        if self._flow is not None:
            with self._break_on_error("load_state_dict"):
                self._load(self._require_job(), self._flow)
        # the stages of this rank, which a part must fit, are known with the first step
        elif saved.layout is None:
            is_counted = isinstance(self._stages, (int, Mapping))
            # another first microbatch would balance the same number of stages otherwise
            if is_counted and saved.stages and len(saved.stages) + 1 == self._stage_count:
                self._config = self._config.model_copy(update={"stages": saved.stages})
            # heads are made with the first step
            weights = {n: value for n, value in saved.model.items() if not n.startswith(HEADS)}
            load_weights(self.model, weights, "load_state_dict")
            self._load_loss(saved)
            self._loaded = hand_over(saved, self.model, self._handle.optimizer)

    def _parse_state(self, state: Any) -> SavedState:
        """Return a copy of a state. Raise `BadInput` if it does not fit; nothing has changed
        then.
        """
        handle = self._handle
        facts = self._config.backend.facts
        job = self._job
        is_elementwise = not handle.may_write_settings
        # weights that are elsewhere still have their shapes
        self._absent.show()
        try:
            saved = parse_state(state, self._config.method, handle, facts.loads_poptorch_state)
            if is_joined(saved, self.model.state_dict().keys()):
                saved = saved._replace(layout=None)
            check_loss(saved.loss, self._loss)
            if job is None:
                # with all names of a tied weight, since it is not known here which one the stages
                # will use
                names = dict(self.model.named_parameters(remove_duplicate=False))
                check_tensors(saved, self.model, names, is_elementwise)
            else:
                if saved.layout is not None:
                    here = self._describe_layout(job) if are_joined() else None
                    check_layout(saved.layout, here)
                # a state has whole tensors, also of weights of which there are shards here
                named = dict(job.model.named_parameters())
                trained = named if job.precision.is_sharded else job.get_trained()
                check_tensors(saved, job.model, trained, is_elementwise)
        finally:
            self._absent.hide()
        return saved

    def _load_loss(self, saved: SavedState) -> None:
        if saved.loss:
            assert isinstance(self._loss, nn.Module)
            self._loss.load_state_dict(saved.loss)

    # ---- what others see

    @take_turn
    def on_update(self, call: Callable[[UpdateNumber, int, list[nn.Parameter]], None]) -> None:
        """Call `call(update, stage, parameters)` in the stage's process after each of its updates,
        with its trained parameters.

        update: its number, from 0. The parameters have the new weights, and are read only. Replicas
        of LocalSGD call it after the step of each, with its weights, and once more after their
        average, where `update.averaged` is True. PopTorch refuses it.
        """
        why = self._config.backend.facts.why_weights_are_hidden
        if why:
            raise BadInput(f"on_update: {why}: use whole_model() between steps, or another backend")
        if not callable(call):
            raise BadInput(
                f"on_update: {describe_kind(call)}: must be a function (update, stage, parameters)"
            )
        self._callbacks.append(call)

    @property
    def schedule(self) -> Schedule:
        """The schedule of the batches given so far, with the drains, or of the first updates if
        there are fewer.
        """
        table = self._plan_job("schedule").table
        return replace(table.schedule, read_versions=table.window)

    @property
    def versions(self) -> VersionTable:
        """The weight version that each pass of `schedule` reads."""
        return self._plan_job("versions").table

    @take_turn
    def trace(self, path: str | Path | None = None) -> PipelineTrace | None:
        """Write the events of the updates `trace` of the pipeline so far, and a page that shows
        them; all ranks call it.

        path: a folder for `trace.json.gz` and `trace.html`; by default a new temporary one. Return
        on rank 0 what a notebook shows as the page, None on other ranks. On processes the events
        are measured. The emulator has no device with a clock: there the clock plays the schedule
        with each stage's passes measured now. Training does not change by it.
        """
        self._require_usable("trace")
        job = self._plan_job("trace", exactly=True)
        traced = job.traced_updates
        if not traced:
            raise BadInput(
                "trace: no update was recorded: make the pipeline with trace=True, or a range of "
                "updates"
            )
        if traced.start >= self.updates:
            raise BadInput(
                f"trace: update {traced.start} is the first that is recorded: {self.updates} were "
                f"made so far"
            )
        folder = Path(tempfile.mkdtemp(prefix="ipu_pipe-") if path is None else path)
        with self._break_on_error("trace", only_reads=True):
            return write_trace(replace(job, folder=folder), self._require_flow().engine, folder)

    @take_turn
    def memory(self) -> dict[str, Any]:
        """Return the planned bytes of each stage and device, and measured peaks; all ranks call it,
        others than 0 get {}.

        "stages": weight copies, delays, microbatches in flight, and bytes of weights, gradients,
        optimizer and activations. "devices": the same by device. "peak_memory": the measured peak
        of each device by category, in bytes; it begins anew when a change between two steps, such
        as a frozen weight, builds the stages again.
        """
        self._require_usable("memory")
        job = self._plan_job("memory")
        with self._break_on_error("memory", only_reads=True):
            measured = self._require_flow().engine.report()
        return {} if measured is None else build_memory_record(job, measured)

    @property
    def partition(self) -> Partition:
        """The stages of the model."""
        return self._require_built("partition").partition

    # ---- the end

    @take_turn
    def close(self) -> list[Update]:
        """Drain, and leave the model as an ordinary one with the newest weights on every rank.
        Return the last updates.

        Within a round of an outer optimizer or of accumulating blocks (`can_drain`) the batches in
        flight are finished and the round is not, with a warning. After an error end without waiting
        for other ranks. Calling it again changes nothing.
        """
        if self._is_closed:
            return []
        updates: list[Update] = []
        if not self._is_broken:
            updates = self._drain_and_take("close") if self.can_drain else self._end_within_round()
            # also if the engine fails to end: a second close must not wait for ranks that have gone
            self._is_closed = True
            if self._flow is not None:
                with self._break_on_error("close"):
                    self._flow.engine.close()
                    self._flow.engine.disconnect()
        self._end()
        return updates

    @take_turn
    def abort(self) -> None:
        """End at once, without waiting for other ranks; the model has the weights of this
        moment.
        """
        if not self._is_closed:
            # so that the engine is aborted, and waits for nobody
            self._is_broken = True
            self._end()

    def _end(self) -> None:
        self._is_closed = True
        self._calls.close()
        if self._is_broken and self._flow is not None:
            # the error that ended the loop is the one to report
            with contextlib.suppress(Exception):
                self._flow.engine.abort()
        self._absent.end()
        if self._job is not None:
            # the caller goes on with a model in the dtype in which it was trained
            self._job.precision.give_back(keep=True)
        self._handle.release()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to be copied or pickled."""
        raise TypeError(
            "Pipeline: cannot be copied or pickled, since it drives the model's own tensors: save "
            "pipe.state_dict(), and load it into a new Pipeline over a copied model"
        )

    def __repr__(self) -> str:
        """Return what is trained how, and how far."""
        stages = self._stage_count if self._job is None else len(self._job.partition)
        state = ", closed" if self._is_closed else ", broken" if self._is_broken else ""
        return (
            f"Pipeline(method={self._config.method!r}, stages={stages}, "
            f"microbatches={self._config.gradient_accumulation}, "
            f"backend={self._config.backend.name!r}, updates={self.updates}, "
            f"in_flight={self.in_flight}{state})"
        )

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        if error is None:
            self.close()
            return
        if not self._is_broken and self._flow is not None:
            # the loop has failed, not the pipeline
            self._absent.end()
            self._flow.engine.keep_newest()
        self.abort()

    # ---- inside: building

    def _build(self, first: Microbatch) -> tuple[Job, Flow]:
        """Build the job and its flow from the first microbatch, once."""
        if self._job is not None and self._flow is not None:
            return self._job, self._flow
        example = first if self._example is None else Microbatch(*self._example)
        x = example.x if first.x is None else first.x
        y = example.y if first.y is None else first.y
        if x is None or (y is None and self._loss is not None):
            raise BadInput(
                "step: this rank gets no inputs or labels: give an example=(x, y), a microbatch, "
                "to the pipeline"
            )
        self._data = GivenBatches(Microbatch(x, y), passes_whole=self._loss is None)
        config = self._config.model_copy(update={"micro_batch_size": count_samples(x)})
        if self._loaded is not None:
            # before the model is converted
            self._loaded = take_back(self._loaded, self.model, self._handle.optimizer)
        with attribute_faults(lambda: "before training"), contextlib.ExitStack() as undo:
            # a batch or arguments that do not fit leave the model and the optimizer as they were
            if self._loaded is not None:
                # `_load` puts in what this process needs of it
                state = self._handle.optimizer.state
                entries = {p: state[p] for p in state if isinstance(p, torch.Tensor)}
                undo.callback(state.update, entries)
                for p in entries:
                    del state[p]
            self._handle.claim()
            undo.callback(self._handle.release)
            undo.callback(record_modes(self.model))
            # a device that is missing has no generator to restore
            require_device(config.backend.device)
            device = torch.device(config.backend.device)
            # building seeds the generators and runs the model; the loop's own draws must not change
            # by it
            with restore_random_states(device):
                # other shapes on a rank would end in gloo's abort, which names no cause
                compare_inputs(x, self.replica)
                # later ones are compared with each result
                if not self._modes:
                    compare_settings(self._handle.describe_settings())
                set_process_state(config, device)
                loss = OwnLoss() if self._loss is None else wrap_loss(self._loss)
                client = LoopClient(self._handle, self._prepare_stage, self._traced_updates)
                weight = make_loss_weight(self._loss_weight, loss)
                setup = make_setup(config, self.model, self._data, loss, weight, device, client)
                # with its values, since a conversion to fewer bits loses some
                undo.callback(setup.precision.give_back)
                job = build_job(setup, client)
                job.rules.after_update = self._call_back
                if job.traced_updates:
                    # one built anew goes on with the events of the earlier one
                    if self._events_folder is None:
                        self._events_folder = tempfile.TemporaryDirectory(prefix="ipu_pipe-")
                    job.folder = Path(self._events_folder.name)
                flow = Flow(job, 0 if self._loaded is None else self._loaded.updates)
            undo.pop_all()
        self._job = job
        self._flow = flow
        if self._handle.may_write_settings:
            job.rules.after_step = self._handle.write_back
        for line in describe_modes(self.model, job.came_evaluating):
            # 4: the caller's line, past `step` and its wrapper `take_turn`
            warnings.warn(line, stacklevel=4)
        self._note_modules()
        self._stage_count = len(job.partition)
        if flow.engine.newest_model is None or flow.engine.leaves_weights_stale:
            self._absent.arm(hides_memory=flow.engine.leaves_weights_stale)
        if self._loaded is not None:
            self._load(job, flow)
        # last, because building has moved weights and modes itself
        self._seam = self._look_at_objects(job)
        return job, flow

    def _note_modules(self) -> None:
        """Note what the stages are built for: the modes of modules, and which draw nothing."""
        self._modes = {module: module.training for module in self.model.modules()}
        self._idle_dropouts = [
            (name, module)
            for name, module in self.model.named_modules()
            if isinstance(module, _DropoutNd) and not module.p
        ]

    def _look_at_objects(self, job: Job) -> Seam:
        """Return the pictures of the caller's objects as they are now."""
        # an update writes the masters over weights that the caller has changed
        looks_at: Sequence[str] = ("weight",) if job.precision.has_rounded_weights else ()
        # replicas with weights of their own have copies of what the caller has
        looks_at = OF_REPLICAS if job.method.rounds is not None else looks_at
        backend = self._row_of_seam
        optimizer = self._handle.optimizer
        if get_treatment(backend, "optimizer") == NEVER:
            # the state is on devices: of one that the caller clears, empty entries go
            for group in optimizer.param_groups:
                for p in group["params"]:
                    optimizer.state[p]
        objects = Objects(self.model, optimizer, self._loss)
        return Seam(backend, objects, looks_at)

    def _describe_layout(self, job: Job) -> dict[str, Any]:
        """Return the place of this rank and of all stages, by which its part of a state is
        known.
        """
        stages = list(job.partition.begin_names())
        return {
            "rank": world.get_rank(),
            "ranks": world.get_world_size(),
            "stages": stages,
            "placement": list(job.placement),
        }

    def _load(self, job: Job, flow: Flow) -> None:
        """Put the state that was loaded into the model, the optimizer and the position."""
        saved = self._loaded
        self._loaded = None
        assert saved is not None
        if saved.layout is not None:
            here = self._describe_layout(job) if are_joined() else None
            with locate_faults("load_state_dict"):
                check_layout(saved.layout, here)
        flow.load(saved)
        self._load_loss(saved)
        if self._seam is not None:
            self._seam.forget_changes(
                lambda change: change.kind in ("weight", "optimizer") or change.where in saved.model
            )
        self._handle.forget()
        self._data.forget()
        self._sums.clear()

    # ---- inside: batches

    def _divide(
        self, x: Any, y: Any, microbatches: Iterable[tuple[Any, Any]] | None
    ) -> list[Microbatch]:
        """Return the microbatches of a step. Raise `ValueError` if they are not as many as the
        update has.
        """
        count = self._microbatches_per_step
        if microbatches is None:
            is_empty = x is None and y is None
            batch = [Microbatch(None, None)] * count if is_empty else divide_batch(x, y, count)
        elif x is not None or y is not None:
            raise ValueError("step: give x and y, or microbatches, not both")
        else:
            batch = take_pairs(microbatches, count)
        # several processes know their stages from the first step on
        if self._job is not None or not are_joined():
            self._require_parts(batch)
        if self._job is not None and are_joined():
            require_samples(batch, self._job.config.micro_batch_size)
        if self._config.backend.facts.compiles_updates:
            self._require_size(batch)
        return batch

    def _outlives_step(self, job: Job) -> bool:
        """Return whether passes read a batch after its step, when the caller may use its memory
        again.
        """
        engine = self._require_flow().engine
        is_read_at_once = engine.makes_updates_at_once or engine.is_empty_after_calls
        # a method that flushes ends all passes of a batch within its step
        return not (is_read_at_once or job.method.flushes)

    def _require_size(self, batch: list[Microbatch]) -> None:
        """Raise `ValueError` if a microbatch has another number of samples than the program is
        compiled for.
        """
        sizes = [count_samples(microbatch.x) for microbatch in batch]
        compiled = sizes[0] if self._job is None else self._job.config.micro_batch_size
        wrong = [size for size in sizes if size != compiled]
        if wrong:
            raise ValueError(
                f"step: a microbatch of {wrong[0]} samples: must have {compiled}, for which "
                f"it compiles"
            )

    def _require_parts(self, batch: list[Microbatch]) -> None:
        """Raise `ValueError` if a microbatch lacks what this process needs of it; no example may
        stand in for that.
        """
        has_own_loss = self._loss is None
        needed = {
            "x": self.takes_inputs or (has_own_loss and self.takes_labels),
            "y": self.takes_labels and not has_own_loss,
        }
        for name, is_needed in needed.items():
            if is_needed and any(getattr(microbatch, name) is None for microbatch in batch):
                x = batch[0].x
                is_pair = name == "y" and isinstance(x, (tuple, list)) and len(x) == 2
                hint = ": x is a pair: unpack a batch, as in step(*batch)" if is_pair else ""
                raise ValueError(
                    f"step: {name} is None: this process needs it (pipe.takes_inputs, "
                    f"pipe.takes_labels){hint}"
                )

    @property
    def _microbatches_per_step(self) -> int:
        method = self._method
        config = self._config
        if method.rounds is not None:
            return method.rounds.replicas or self._require_stage_count()
        if method.history is not None:
            return self._require_stage_count()
        here = 1 if config.backend.facts.uses_processes else config.replicas
        return config.gradient_accumulation * here * self.updates_per_call

    def _require_stage_count(self) -> int:
        """Return the number of stages. Raise `BadInput` if it is needed before the model is
        divided.
        """
        if self._stage_count is None:
            why = f"{self._method.name} takes as many microbatches: must be a count or names"
            raise BadInput(f"stages: {self._config.stages}: {why}")
        return self._stage_count

    def _number(self, batch: list[Microbatch], k: int) -> dict[int, Microbatch]:
        """Return the microbatches of batch k that this process reads, by the number under which it
        reads them.
        """
        # stages in the middle read no data
        if not (self.takes_inputs or self.takes_labels):
            return {}
        job = self._require_job()
        first = k * len(batch)
        # replicas take turns in the numbers of microbatches, as they do in a data set
        if self._config.backend.facts.uses_processes and self.replicas > 1:
            return {
                (first + i) * self.replicas + self.replica: part for i, part in enumerate(batch)
            }
        if job.method.rounds is None and self.replicas > 1:
            batch = interleave_replicas(batch, self.replicas)
        return dict(enumerate(batch, first))

    # ---- inside: what the caller has changed between two calls

    def _require_settings_that_fit(self) -> None:
        """Raise `BadInput` for settings of the optimizer, which the caller may have changed, that
        the method's rules or the backend do not support.
        """
        if self._flow is None:
            return
        optimizer = self._handle.optimizer
        groups = optimizer.param_groups
        # nearly all steps change numbers alone, such as a learning rate
        are_set = [
            {key for key, value in group.items() if isinstance(value, (bool, int, float)) and value}
            for group in groups
        ]
        # a backend may compile the numbers, too
        faults = self._flow.engine.list_setting_faults(groups)
        if are_set != self._settings_that_fit:
            faults = find_rule_faults(self._require_job(), optimizer) + faults
        raise_faults(list(dict.fromkeys(faults)))
        self._settings_that_fit = are_set

    def _settle(self) -> Microbatch | None:
        """Take over what the caller has changed since the last call. Return the microbatch by which
        the stages must be built anew, None if there is nothing to build or the next one may do.
        Raise `RuntimeError`, naming the change, if the backend cannot.
        """
        backend = self._row_of_seam
        must_rebuild = must_copy = cuts_anew = False
        # one that begins to draw is a mode: its draws are keyed from the next build on
        changes = [Change("mode", f"{name}.p") for name, module in self._idle_dropouts if module.p]
        for change in [*changes, *([] if self._seam is None else self._seam.list_changes())]:
            if change.where in self._require_flow().engine.stale_values:
                # it was written over an old value
                change = change._replace(kind="buffer")
            treatment = get_treatment(backend, change.kind)
            if backend == BLOCKS and self._runs_whole(change):
                continue
            if treatment == NEVER or (self.in_flight and treatment != LIVE):
                raise RuntimeError(explain_refusal("step", backend, change, self.in_flight))
            if self._method.rounds is not None and _concerns_replicas(change, self._method.rounds):
                self._require_equal_replicas("step", f"{change.where}: was changed")
                must_copy = True
            if treatment == REBUILT and not self._runs_whole(change):
                if self._require_job().precision.is_sharded:
                    raise RuntimeError(
                        f"step: {change.where}: was changed after the last call, and stages that "
                        f"prepare_stage has sharded are not cut again: set it back, or change it "
                        f"before the first step"
                    )
                must_rebuild = True
                cuts_anew |= change.kind == "module"
        # after the loop, because a later change may be refused
        if self._job is not None:
            self._take_written_weights()
            self._job.precision.forget_written()
        if must_rebuild:
            return self._rebuild(cuts_anew)
        if must_copy:
            flow = self._require_flow()
            flow.engine.reopen(flow.given, flow.table, is_loaded=True)
        return None

    def _take_written_weights(self) -> None:
        """Take over rounded weights that the caller has written, before a call reads masters."""
        precision = self._require_job().precision
        if self._seam is not None and precision.has_rounded_weights:
            changes = self._seam.list_changes()
            precision.take_written({change.where for change in changes if change.kind == "weight"})

    def _require_equal_replicas(self, call: str, change: str) -> None:
        """Raise `RuntimeError` for a change of the caller's, in words, if LocalSGD's replicas have
        other weights than the model now: it would reach one of them.
        """
        rounds = self._method.rounds
        if rounds is None:
            return
        if rounds.outer is not None:
            why = "replicas with an outer optimizer have weights of their own"
            raise RuntimeError(f"{call}: {change}: {why}: use pipe.load_state_dict()")
        if self.in_flight:
            raise RuntimeError(
                f"{call}: {change} within a round, in which replicas have weights of their own: "
                f"call pipe.drain() before the change"
            )

    def _require_unchanged(self, call: str) -> None:
        """Raise `RuntimeError` if a drain would run passes of earlier batches with what the caller
        has changed since, or average it with replicas that do not have it; passes run in the modes
        of their steps.
        """
        rounds = self._method.rounds
        uses_processes = self._config.backend.facts.uses_processes
        if self._seam is None or not self.in_flight or (rounds is None and not uses_processes):
            return
        for change in self._seam.list_changes():
            # a state that is loaded replaces what all replicas have
            if (
                rounds is not None
                and call != "load_state_dict"
                and _concerns_replicas(change, rounds)
            ):
                self._require_equal_replicas(call, f"{change.where}: was changed")
            if change.kind != "mode" and uses_processes:
                line = explain_refusal(call, self._config.backend.name, change, self.in_flight)
                raise RuntimeError(line)

    @property
    def _row_of_seam(self) -> str:
        """What `TAKEN_OVER` calls this backend."""
        config = self._config
        is_cut = config.backend.facts.emulates and self._method.structure is not None
        return BLOCKS if is_cut else config.backend.name

    def _runs_whole(self, change: Change) -> bool:
        """Return whether a value or a hook is that of a module that runs whole, and so is read by
        the next forward; a module that a cut goes through runs as recorded pieces.
        """
        is_cut = self._config.backend.facts.uses_processes or self._method.structure is not None
        if change.kind not in ("value", "hook") or not is_cut:
            return False
        job = self._require_job()
        # of which each stage has a copy, with hooks of its own
        if change.where.replace(OF_HOOKS, "") in job.partition.list_tied(job.model):
            return False
        begins = job.partition.begin_names()
        cut_modules = {
            ".".join(name.split(".")[:depth]) or "model"
            for name in begins
            for depth in range(len(name.split(".")))
        }
        return change.where.rpartition(".")[0] not in cut_modules

    def _rebuild(self, cuts_anew: bool) -> Microbatch | None:
        """Make ready to build again from the caller's present objects, with the state of now, while
        no update is in flight. Return the microbatch to build by, None if the next one may do.

        `cuts_anew`: otherwise the stages stay as they are cut, where a count is balanced anew if
        other weights are frozen and no head has been fitted to a cut.
        """
        self._drain("step")
        job = self._require_job()
        engine = self._require_flow().engine
        with self._break_on_error("step"):
            state = engine.collect_state()
            # the engine's tensors are the model's own, which the next build changes
            saved = None if state is None else self._copy_state(state)
            # every rank loads the whole state
            saved = run_on_main(lambda: saved)
            assert saved is not None
            # the ranks of other stages have an old one
            self._load_loss(saved)
            # without `disconnect`: the processes stay joined for the next engine
            engine.close()
            job.precision.give_back(keep=True)
        self._absent.end()
        self._handle.release()
        self._job = self._flow = self._seam = None
        self._loaded = saved
        # what is compiled for one shape may be built for another one now
        if cuts_anew or self._config.backend.facts.compiles_updates:
            self._config = self._config.model_copy(update={"stages": self._stages})
            return None
        stages = job.config.stages
        if job.method.structure is not None and not job.partition.spread:
            # heads stay where they fit, though frozen weights have fewer FLOPs
            stages = job.partition.begin_names()
        self._config = self._config.model_copy(update={"stages": stages})
        # not the next microbatch: one of another length has other FLOPs
        return self._data.example

    def _copy_state(self, state: CheckpointState) -> SavedState:
        """Return a copy of an engine's state at the position of now."""
        flow = self._require_flow()
        return SavedState(
            {name: value.clone() for name, value in state.model.items()},
            {name: value.clone() for name, value in state.optimizer.items()},
            copy.deepcopy(state.plain),
            dict(state.loss),
            None,
            flow.given,
            list(flow.drains),
        )

    def _switch_optimizer(self, mode: str) -> None:
        """Switch the optimizer that steps to the weights of evaluation or training, of its own."""
        job = self._job
        inner = self._handle.optimizer if job is None else job.optimizer
        call = f"optimizer.{mode}()"
        # of the class, since the caller's object has the handle's function in its place
        switch = getattr(type(inner), mode)
        if job is None or self._is_closed:
            switch(inner)
            return
        self._require_usable(call)
        with world.enter(self._column):
            self._drain(call)
        with self._break_on_error(call):
            # switching writes into the groups
            before = [copy_group(group) for group in inner.param_groups]
            switch(inner)
            # schedule-free optimizers keep their mode in the groups
            for group, settings in zip(inner.param_groups, before):
                self._handle.write_back(group, settings)
            if job.rules.masters is not None:
                job.rules.masters.write_weights(job.rules.weight_master_pairs)

    # ---- inside: results

    def _report(self, job: Job, results: Iterable[tuple[int, StepResult]]) -> list[Update]:
        """Return the pending updates and those that leave now. Raise `Divergence` if a loss is not
        finite.
        """
        updates = self._pending
        self._pending = []
        for k, result in results:
            sums = self._sums.pop(k, [])
            try:
                require_finite(job, k, result.losses)
            except Divergence as error:
                if all(bool(total.isfinite()) for total in sums):
                    raise
                advice = (
                    "its batch has numbers that are not finite: mend the data, or skip the batch"
                )
                raise Divergence(error.reason, advice) from None
            updates.append(Update(k, result.loss, result.accuracy, result.blocks))
        # no stage steps an update that has left once more
        self._handle.forget_before(self.finished)
        return updates

    # ---- inside: drains

    def _drain(self, call: str) -> None:
        """Run the pipeline empty, and keep its updates as pending."""
        job = self._job
        flow = self._flow
        if job is None or flow is None or flow.is_empty:
            return
        self._require_drainable(call)
        _require_no_autocast(call)
        self._require_unchanged(call)
        with self._break_on_error(call), _enable_gradients(), self._set_modes_of_steps():
            self._pending = self._report(job, flow.drain())

    def _require_drainable(self, call: str) -> None:
        undrainable = self._find_undrainable()
        if undrainable is not None:
            raise ValueError(f"{call}: {undrainable}")

    @contextlib.contextmanager
    def _set_modes_of_steps(self) -> Iterator[None]:
        """Give the passes in flight the modes of their steps, whatever the caller has set since;
        the caller's come back.
        """
        set_since = [(m, m.training) for m, mode in self._modes.items() if m.training != mode]
        for module, _ in set_since:
            module.training = self._modes[module]
        try:
            yield
        finally:
            for module, mode in set_since:
                module.training = mode

    def _end_within_round(self) -> list[Update]:
        """Run the pipeline empty within a round, which does not end. Return the updates."""
        assert self._job is not None and self._flow is not None
        warnings.warn(f"close: {self._find_undrainable()}: closes without that step", stacklevel=5)
        with self._break_on_error("close"), _enable_gradients(), self._set_modes_of_steps():
            return self._report(self._job, self._flow.finish())

    def _plan_job(self, call: str, exactly: bool = False) -> Job:
        """Return the job with a schedule that ends after the batches given so far; unless
        `exactly`, where it is steady.
        """
        job = self._require_built(call)
        N = job.schedule.accumulate
        P = len(job.partition)
        updates = self.updates if exactly else max(self.updates, -(-3 * P // N) + 1)
        return job.close(updates, self._require_flow().drains)

    def _find_undrainable(self) -> str | None:
        """Return why the method cannot drain now, and when it can; None if it can."""
        method = self._method
        args = self._config.method_settings()
        if not self.updates:
            return None
        every = 1
        what = ""
        if method.rounds is not None and method.rounds.outer is not None:
            every = method.rounds.interval(self._require_stage_count())
            what = "replicas synchronize by an outer optimizer"
        for count in args.get("block_accumulation", ()):
            # the least common multiple, after which no block has gathered gradients
            every = every * count // math.gcd(every, count)
            what = "a block accumulates the gradients of several updates"
        if self.updates % every == 0:
            return None
        following = -(-self.updates // every) * every
        return (
            f"{what}: after {self.updates} updates the pipeline cannot drain, the next time is "
            f"after {following}"
        )

    def _pause(self, call: str) -> tuple[Job, Engine]:
        """Drain for a call between two steps, and return what it works with."""
        self._require_usable(call)
        if self._example is not None:
            # a loop may evaluate before its first step
            with self._break_on_error(call), _enable_gradients():
                self._build(Microbatch(*self._example))
        self._drain(call)
        job = self._require_built(call)
        return job, self._require_flow().engine

    # ---- inside: errors

    def _require_usable(self, call: str) -> None:
        if self._is_closed:
            raise RunFault(f"{call}: the pipeline is closed")
        if self._is_broken:
            raise RunFault(
                f"{call}: an earlier call has failed, so weights and messages are unfinished: "
                f"close() this pipeline, and make a new one"
            )

    def _require_built(self, call: str) -> Job:
        if self._job is None:
            remedy = "make a step first, or give the pipeline an example"
            raise RunFault(f"{call}: the stages are known from the first step on: {remedy}")
        return self._job

    def _require_job(self) -> Job:
        assert self._job is not None
        return self._job

    def _require_flow(self) -> Flow:
        assert self._flow is not None
        return self._flow

    @contextlib.contextmanager
    def _break_on_error(self, call: str, only_reads: bool = False) -> Iterator[None]:
        """Break the object if an exception leaves the context, unless nothing was changed: in one
        process alone, before the object is built, or in a call that `only_reads`. Name the call
        that a lost rank has not made.
        """
        try:
            with self._calls.enter(f"step {self.updates}" if call == "step" else call):
                if self._seam is not None and call != "step":
                    self._take_written_weights()
                    self._seam.begin_other_call()
                self._absent.show()
                yield
                self._absent.hide()
            if self._seam is not None:
                self._seam.note_step() if call == "step" else self._seam.note_other_call()
        except BaseException as error:
            # a fault of the backend's own, such as a lost device, is not the caller's
            has_changed = self._flow is not None and (not only_reads or isinstance(error, RunFault))
            # other ranks may have gone on
            self._is_broken |= has_changed or self._config.backend.facts.uses_processes
            if not self._is_broken:
                self._absent.hide()
                # the newest weights, which a failed call has brought to the host, are no changes of
                # the caller's; the body of `whole_model` may have made some
                if self._seam is not None and call != "whole_model":
                    self._seam.note_other_call()
            elif self._flow is not None:
                self._flow.leave(error)
            # SAM, for one, asserts that its step gets a closure
            if isinstance(error, AssertionError) and "closure" in str(error):
                raise BadInput(explain_closure(self._handle.optimizer)) from error
            if isinstance(error, RunFault) and isinstance(error.__cause__, LostRank):
                raise RunFault(
                    f"{error}; {self._calls.explain(error.__cause__.ranks)}"
                ) from error.__cause__
            raise

    def _call_back(self, update: int, stages: Sequence[int], averaged: bool) -> None:
        if not self._callbacks:
            return
        number = UpdateNumber(update)
        number.averaged = averaged
        by_stage = self._require_job().rules.stages
        for stage in stages:
            parameters = by_stage[stage].parameters if stage in by_stage else []
            for call in self._callbacks:
                call(number, stage, parameters)


@contextlib.contextmanager
def _enable_gradients() -> Iterator[None]:
    """Enable gradients inside the context: a loop evaluates, saves and closes under no_grad or
    inference_mode, but a drain has backwards to run, and building makes a trial step.
    """
    with torch.inference_mode(False), torch.enable_grad():
        yield


def _format_number(value: float | None) -> str:
    return "None" if value is None else f"{value:.6g}"


def count_stages(model: nn.Module, stages: Any) -> int | None:
    """Return the number of stages if the arguments tell it, else None."""
    if stages is None:
        marked = [m for m in model.modules() if getattr(m, "begins_stage", False)]
        return len(marked) + 1
    if isinstance(stages, int):
        return stages
    if isinstance(stages, (list, tuple)):
        return len(stages) + 1
    return stages.get("count") if isinstance(stages, Mapping) else None


def _configure(
    keys: Mapping[str, Any],
    microbatches: int | None,
    stage_count: int | None,
    asked: Mapping[str, Any],
) -> tuple[PipelineConfig, Method]:
    """Return the config of `keys` and its method. Raise `BadInput` for a method that a loop cannot
    have, or that does not fit the `heads` and the settings `by_stage` that were `asked` for.
    """
    heads = asked["heads"]
    by_stage = asked["by_stage"]
    if microbatches is None:
        # checks the method's name before its default is looked up
        configure_pipeline(**keys)
        microbatches = _choose_microbatches(keys["method"], keys["method_args"], stage_count)
    config = configure_pipeline(gradient_accumulation=microbatches, **keys)
    method = resolve_method(config.method, config.method_settings())
    if heads is not None and method.structure is None:
        raise BadInput(
            f"heads: {heads}: method {config.method} adds no auxiliary heads: leave it out"
        )
    if by_stage is not None and config.backend.facts.loads_poptorch_state:
        why = "PopTorch gets one optimizer with the same settings on all stages"
        raise BadInput(f"by_stage: {by_stage}: {why}: must be None")
    if method.history is not None and method.history.order == "schedule":
        raise BadInput(
            "method_args.order: schedule: takes batches in another order than a loop gives them: "
            'use "random"'
        )
    return config, method


def _choose_microbatches(name: str, args: Mapping[str, Any], stage_count: int | None) -> int:
    """Return the default N of a method. Raise `BadInput` if it is the number of stages, which is
    not known yet.
    """
    method = resolve_method(name, args)
    # each of their microbatches is an update
    if method.rounds is not None or method.history is not None:
        return 1
    if not method.flushes and method.default_accumulate is DefaultAccumulate.ONE:
        return 1
    if stage_count is None:
        why = f"{name} has as many as stages by default, whose number the model decides"
        raise BadInput(f"microbatches: None: {why}: must be given")
    return stage_count


def _find_precision(model: nn.Module) -> str:
    """Return the precision of the model's own dtype: that of all its floating-point parameters,
    else float32. Raise `BadInput` for float16.
    """
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
    if torch.float16 in dtypes:
        raise BadInput(
            'model: float16: unsupported: use model.float() with precision="bfloat16_mixed" '
            "(autocast), or model.bfloat16()"
        )
    return PRECISIONS.get(dtypes.pop(), "float32") if len(dtypes) == 1 else "float32"


def _concerns_replicas(change: Change, rounds: Rounds) -> bool:
    """Return whether replicas with weights of their own must all get a change; hooks are shared, and
    with an outer optimizer each replica has entries of its own.
    """
    if change.kind == "optimizer":
        return rounds.outer is None and change.where.startswith("optimizer.state")
    return change.kind in OF_REPLICAS


def _move_inputs(job: Job, x: Any) -> Any:
    """Return inputs on the pipeline's device, in its precision."""
    dtype = job.precision.inputs
    return map_tensors(lambda t: t.to(job.device, dtype if t.is_floating_point() else t.dtype), x)


def _require_no_autocast(call: str) -> None:
    """Raise `RuntimeError` where passes would run in another precision than the pipeline's."""
    if any(is_cast for _, is_cast, _ in read_autocast()):
        raise RuntimeError(
            f'{call}: called under autocast: use Pipeline(..., precision="bfloat16_mixed") instead'
        )
