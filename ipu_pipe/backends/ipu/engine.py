"""Train a job on Graphcore IPUs with PopTorch 3.4: the engine that the run's loop calls for
updates, evaluations and checkpoints.

    run.model -> copy, a poptorch.BeginBlock per stage -> trainingModel  -> a call trains D updates of N microbatches, R replicas
                                                       -> inferenceModel -> evaluates with the same weights

A call is one execution on the device: D (device_iterations) updates. PopTorch's own pipeline fills,
runs N microbatches, flushes and updates, which is both gpipe and pipedream_flush. The executors are
the two compiled models; they are made from a copy of the user's model, into which weights are
copied back at evaluations, at checkpoints and at the end.

After a device error that PopTorch calls recoverable, the engine makes new executors from the state
that was last copied to the host and repeats the updates since then. In a loop of the caller's own
such an error ends the run, since its batches are not kept.

Tested against tests/poptorch_double; not run on hardware.
"""

from __future__ import annotations

import gc
import itertools
import sys
import time
from typing import Any, Callable, Iterable, Iterator, Mapping, TypeVar

import torch
import torch.distributed as dist

from ipu_pipe.backends.interface import CheckpointState, HostModelEngine, Report, StepResult
from ipu_pipe.backends.ipu.config import DataLoading
from ipu_pipe.backends.ipu.executors import (
    Executors,
    Snapshot,
    describe_error,
    describe_errors,
    forget_frames,
)
from ipu_pipe.backends.ipu.feed import Calls, Feed, fill_up, split_into_calls, trim_output
from ipu_pipe.backends.ipu.optimizer import (
    count_state_bytes,
    export_state,
    import_state,
    list_changed_settings,
    require_compiled_settings,
)
from ipu_pipe.backends.ipu.options import IpuOptions, make_options
from ipu_pipe.backends.ipu.placement import (
    Placement,
    is_pipelined,
    place_stages,
    read_poprun_share,
    round_up_ipus,
)
from ipu_pipe.backends.ipu.profile import CallTimes, read_profiles
from ipu_pipe.backends.ipu.wrapping import wrap
from ipu_pipe.backends.ranks import are_joined
from ipu_pipe.errors import BadInput, RunFault, end_process
from ipu_pipe.job.evaluation import BatchReader, EvaluationResult, Metrics, Tally, evaluate_sums
from ipu_pipe.local.blocks import get_blocks
from ipu_pipe.model.randomness import derive_seed
from ipu_pipe.model.restoring import load_state
from ipu_pipe.refusals import name_key
from ipu_pipe.replay.run import Run
from ipu_pipe.schedule.versions import VersionTable
from ipu_pipe.trace.events import Counters, Events

Result = TypeVar("Result")


class IpuEngine(HostModelEngine):
    """The compiled models on this process's IPUs, and the state from which new ones start.

    A subclass says what a call trains, and makes the executors. `options`: those of the model that
    is compiled here.
    """

    executors: Executors | None = None
    # the number of losses of an evaluation, and those that are computed here
    _loss_count = 1
    _losses_here = slice(None)
    _ipu_id: int | None = None

    def __init__(self, run: Run, placement: Placement, timeline: CallTimes) -> None:
        """`placement`: of the model that is compiled here."""
        import poptorch

        super().__init__(run)
        self.options: IpuOptions = run.options
        self.ipu = self.options.ipu
        self._placement = placement
        self._timeline = timeline
        self._world = dist.get_world_size() if are_joined() else 1
        self._rank = dist.get_rank() if are_joined() else 0
        self.is_main = self._rank == 0
        # PopVision's system trace is written if the SDK's libpvti is installed and PVTI_OPTIONS is
        # set
        self._channel = poptorch.profiling.Channel("ipu_pipe")

    def _read_host(self, update: int) -> None:
        """Start from the host's weights and optimizer state, after this many updates."""
        # clones, because a snapshot must outlive later updates of the host's model
        model = {
            name: value.detach().clone() for name, value in self.run.model.state_dict().items()
        }
        self._saved = Snapshot(update, model, import_state(self.run.optimizer))
        self._done = update

    def _make_executors(self, example: torch.Tensor, block: int | None = None) -> None:
        run = self.run
        wrapped = wrap(run.model, run.loss, run.partition, self.options.precision, block)
        self.executors = Executors(
            run, wrapped, self._make_options, example, self._saved, self._timeline
        )

    def _make_options(self, training: bool) -> Any:
        # by the update it starts from, so that a restart does not draw the first masks again
        seed = derive_seed(self.run.seed, "ipu", self._saved.update, self._rank) % 2**32
        # randomSeed seeds the host's generator, too
        with torch.random.fork_rng(devices=[]):
            return make_options(
                self.options,
                self.run.method,
                self._placement,
                training,
                seed,
                self._make_base_options(),
                self._ipu_id,
            )

    def _make_base_options(self) -> Any:
        """Return the options of the launcher, None if it has none."""

    def _run(self, doing: str, work: Callable[[Executors], Result]) -> Result:
        """Return the result of `work`, whose faults say what it was `doing`."""
        raise NotImplementedError

    # ---- evaluation

    def evaluate(self, batches: BatchReader, metrics: Metrics) -> list[EvaluationResult]:
        start = time.perf_counter_ns()
        with self._channel.tracepoint("evaluate"):
            sums = self._run(
                "evaluation", lambda executors: self._sum_outputs(executors, batches, metrics)
            )
        self._timeline.add("evaluate", self._done, start)
        return [evaluate_sums(metrics, row) for row in sums]

    def _sum_outputs(
        self, executors: Executors, batches: BatchReader, metrics: Metrics
    ) -> torch.Tensor:
        """Return the sums of every loss's tally over all processes."""
        example = (*self.run.example, 0)
        tallies = [Tally(self.run.loss, metrics) for _ in range(self._loss_count)]
        with executors.hold_inference():
            calls = split_into_calls(self._read_shard(batches), executors.rows)
            # counted, because blocks of other processes know a call by its number
            for number in itertools.count():
                x, y, count = next(calls, example)
                if not self._is_any_left(count):
                    break
                # every process makes the call, also with no samples of its own
                outputs = self._infer(executors, fill_up(x, executors.rows), number)
                for tally, output in zip(tallies[self._losses_here], outputs) if count else ():
                    tally.add(trim_output(output, count), y[:count], count)
        sums = torch.stack([tally.sums for tally in tallies])
        if self._world > 1:
            # sums of samples, so that processes may have different numbers of them
            dist.all_reduce(sums)
        return sums

    def _read_shard(self, batches: BatchReader) -> Iterator[Any]:
        """Return the batches that this process evaluates."""
        return batches()

    def _is_any_left(self, count: int) -> bool:
        """Return whether any process has samples left; `count`: those of the next call here."""
        return count > 0

    def _infer(self, executors: Executors, x: torch.Tensor, number: int) -> list[Any]:
        """Return the outputs of the losses that are computed here, in one call."""
        return executors.infer(x)

    # ---- state

    def copy_to_host(self) -> None:
        # the newest snapshot may be of this update already
        if self.executors is not None and self._saved.update != self._done:
            snapshot = self._run("state", lambda executors: executors.snapshot(self._done))
            self._saved = snapshot
        # weights of blocks of other processes stay as they are
        load_state(self.run.model, {**self.run.model.state_dict(), **self._saved.model})

    def collect_state(self) -> CheckpointState | None:
        start = time.perf_counter_ns()
        with self._channel.tracepoint("checkpoint"):
            self.update_host()
        self._timeline.add("checkpoint", self._done, start)
        return CheckpointState(self._saved.model, *self._export_state())

    def _export_state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        names = [name for name in self.names.values() if name in self._saved.model]
        return export_state(self._saved.optimizer, names)

    def close(self) -> None:
        """Copy the newest weights into the user's model and release the IPUs."""
        if self.executors is not None:
            self.update_host()
        self.abort()

    def _drop(self) -> None:
        """Release the IPUs."""
        if self.executors is not None:
            self.executors.drop()
            self.executors = None
            # a lost executor must not hold its device
            gc.collect()

    def abort(self) -> None:
        self._drop()
        self.release_blocks()


def average_outputs(
    rows: int, blocks: int, losses: torch.Tensor, counts: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the mean loss, correct and counted labels of each block  # (rows, blocks, 3)

    `losses` and `counts` are the outputs of a call, which the rows share evenly; without `counts`
    these are not numbers.
    """
    means = losses.double().reshape(rows, -1, blocks, 1).mean(dim=1)
    right = torch.full((rows, blocks, 2), float("nan"), dtype=torch.float64)
    if counts is not None:
        right = counts.double().reshape(rows, -1, blocks, 2).sum(dim=1)
    return torch.cat([means, right], dim=-1)


def make_result(figures: torch.Tensor, samples: int) -> StepResult:
    """Return an update's result from a row of `average_outputs`  # (blocks, 3)"""
    by_block = tuple(
        # NaN, the one value that differs from itself, stands for labels that were not counted
        (loss, None if counted != counted else right / max(counted, 1))
        for loss, right, counted in figures.tolist()
    )
    return StepResult(*by_block[-1], samples, by_block if len(by_block) > 1 else ())


class PoptorchEngine(IpuEngine):
    """All stages of this process's replicas, and their data loader."""

    # PopTorch flushes its pipeline at each update
    makes_updates_at_once = is_empty_after_calls = True

    def __init__(self, run: Run, first_update: int, table: VersionTable) -> None:
        options: IpuOptions = run.options
        placement = place_stages(options.ipu, len(run.partition))
        super().__init__(run, placement, CallTimes(run.trace))
        self.updates_per_call = self.ipu.device_iterations
        self._share = read_poprun_share(options.replicas)
        self._ipu_id = self.ipu.ipu_ids[0] if self.ipu.ipu_ids else None
        blocks = get_blocks(run.model)
        self._loss_count = 1 if blocks is None else len(blocks.heads) + 1
        # a caller's loop gives a batch once
        self._reads_again = run.batches.reads_again
        self._results: dict[int, StepResult] = {}
        self.reopen(first_update, table, is_loaded=True)
        if self.ipu.compile_only:
            self._compile_only()

    def _start(self) -> None:
        """Make executors and data loader that continue from the saved state."""
        self._make_executors(self.run.example[0])
        assert self.executors is not None
        share = self._share
        self.calls = Calls(
            self.options.data,
            self.options,
            self.run.per_epoch,
            range(self._saved.update, self.options.updates),
            range(share.first, share.first + share.replicas),
        )
        with describe_errors("starting the data loader"):
            # no call is run, so no worker loads any ahead
            loading = DataLoading() if self.ipu.compile_only else self.ipu.data_loading
            self.feed = Feed(self.calls, loading, self.executors.training_options)

    def _make_base_options(self) -> Any:
        ipus = self._placement.ipu_count
        ipus = round_up_ipus(ipus) if self.ipu.auto_round_num_ipus else ipus
        return None if self._share.make_options is None else self._share.make_options(ipus)

    def _compile_only(self) -> None:
        """Compile both models without running them, print that and exit with code 0."""

        def compile_both(executors: Executors) -> None:
            executors.compile(*self.calls[0])
            # the second model needs the first one's IPUs
            executors.leave_training(True)
            executors.make_inference()

        try:
            self._run("compiling", compile_both)
        finally:
            self.abort()
        if self.is_main:
            cache = f", cached in {self.ipu.executable_cache}" if self.ipu.executable_cache else ""
            print(
                f"compiled for {self._placement.ipu_count} IPUs x replicas "
                f"{self._share.replicas}{cache}; nothing was run"
            )
        if self._world > 1:
            end_process(0)
        sys.exit(0)

    # ---- device errors

    def _run(self, doing: str, work: Callable[[Executors], Result]) -> Result:
        """Run `work`; after a recoverable device error run it once more, from the saved state."""
        import poptorch

        assert self.executors is not None, "the engine is closed"
        try:
            return work(self.executors)
        except poptorch.RecoverableError as error:
            # other instances cannot go back to this snapshot
            if not self._may_retry or self._world > 1:
                raise self._give_up(error) from error
            reason = f"device error ({error.recovery_action}): {describe_error(error)}"
            # before new executors are made: one of the frames holds the device
            forget_frames(error)
        try:
            self._recover(reason)
            return work(self.executors)
        except poptorch.RecoverableError as error:
            raise self._give_up(error) from error

    def _recover(self, reason: str) -> None:
        """Start new executors and repeat the updates since the last snapshot."""
        # a device that fails again and again must not be tried for ever
        self._may_retry = False
        if self.is_main:
            repeated = self._done - self._saved.update
            text = f"restarting from update {self._saved.update}; repeating {repeated} updates"
            print(f"poptorch: {reason}: {text}", file=sys.stderr, flush=True)
        self._drop()
        self._start()
        assert self.executors is not None
        # results of repeated updates were reported before
        for k in range(self._saved.update, self._done, self.updates_per_call):
            self._call(self.executors, k)

    def _give_up(self, error: Any) -> RunFault:
        """Return the fault for a device error after which this run cannot retry."""
        forget_frames(error)
        times = " for the second time since the last checkpoint"
        remedy = "do what it asks for (vipu reset partition, gc-reset)"
        then = "go on with --resume"
        if self._world > 1:
            times = ""
            remedy = "the other instances cannot retry: do what it asks for"
        if not self._reads_again:
            times = ""
            then = "load the last state_dict into a new pipeline"
            remedy = f"a loop's batches are not kept, so no update can be repeated: {remedy}"
        return RunFault(
            f"poptorch: after update {self._done}: device error "
            f"({error.recovery_action}){times}: "
            f"{describe_error(error)}: "
            f"{remedy}, then {then}"
        )

    # ---- the interface of an engine

    def give(self, k: int, cut: float) -> None:
        """Make the updates of the call that begins with update k; do nothing at the call's other
        updates.
        """
        if k % self.updates_per_call:
            return
        assert k == self._done, f"update {self._done} is next, not {k}"
        require_compiled_settings(self.run.optimizer, self.run.rules, k)
        self.newest_model = None
        with self._channel.tracepoint(f"update {k}"):
            results = self._run("update", lambda executors: self._call(executors, k))
        self._results.update(enumerate(results, k))
        self._done += self.updates_per_call

    def take(self, k: int) -> StepResult:
        return self._results.pop(k)

    def list_setting_faults(self, groups: Iterable[Mapping[str, Any]]) -> list[str]:
        # the settings of heads are in no group of the caller's
        members = dict(enumerate(groups))
        return [
            fault
            for group in self.run.optimizer.param_groups
            for fault in list_changed_settings(group, members.get(group["member"], {}))
        ]

    def reopen(self, update: int, table: VersionTable, is_loaded: bool = False) -> None:
        # without a loaded state the executors go on: PopTorch's pipeline is empty after each update
        if not is_loaded:
            return
        # no call of the device would begin with it
        if update % self.updates_per_call:
            why = f"must divide the {update} updates that are done"
            raise BadInput(
                f"{name_key('backend.ipu.device_iterations')}: {self.updates_per_call}: {why}"
            )
        self._read_host(update)
        # a loop's batches cannot be read again
        self._may_retry = self._reads_again
        self._drop()
        self._start()

    def predict(self, x: Any) -> Any:
        return self._run("prediction", lambda executors: self._compute_outputs(executors, x))

    def _compute_outputs(self, executors: Executors, x: torch.Tensor) -> torch.Tensor:
        """Return the model's output for inputs of any number of samples, computed by the inference
        model.
        """
        outputs = []
        with executors.hold_inference():
            for part in x.split(executors.rows):
                output = executors.infer(fill_up(part, executors.rows))[-1]
                outputs.append(trim_output(output, len(part)))
        return torch.cat(outputs)

    def _call(self, executors: Executors, k: int) -> list[StepResult]:
        """Make the updates k to k + D - 1 in one call; return mean losses and accuracies over the
        outputs of the output mode.
        """
        iterations = self.updates_per_call
        _, *outputs = executors.call(range(k, k + iterations), k, *self.feed.take())
        rows = iterations if self.ipu.output_mode == "all" else 1
        # (rows, blocks, 3)
        figures = average_outputs(rows, self._loss_count, *outputs)
        if self.ipu.output_mode == "sum":
            # the device has added up the losses of all microbatches of the call
            figures[..., 0] /= iterations * self.options.gradient_accumulation
        if self._world > 1:
            dist.all_reduce(figures)
            # losses are means, the counts of labels are sums
            figures[..., 0] /= self._world
        # output modes other than all have one row for all updates of a call
        return [make_result(row, self.run.samples) for row in figures.expand(iterations, -1, -1)]

    def evaluate(self, batches: BatchReader, metrics: Metrics) -> list[EvaluationResult]:
        assert not self._results, "an evaluation inside a call"
        results = super().evaluate(batches, metrics)
        # callbacks see the newest weights
        self.update_host()
        return results

    def _read_shard(self, batches: BatchReader) -> Iterator[Any]:
        return batches(self._rank, self._world)

    def _is_any_left(self, count: int) -> bool:
        # replicas of all instances wait for one another, so an instance that has no batch left
        # evaluates the example
        total = torch.tensor([count])
        if self._world > 1:
            dist.all_reduce(total)
        return bool(total)

    def collect_state(self) -> CheckpointState | None:
        assert not self._results, "a checkpoint inside a call"
        state = super().collect_state()
        # a retry repeats no more than what follows this checkpoint
        self._may_retry = self._reads_again
        return state if self.is_main else None

    def report(self) -> Report | None:
        """Return the pipeline's placement and the measurements of the calls."""
        if not self.is_main:
            return None
        placement = self._placement
        accumulation = self.options.gradient_accumulation
        pipelined = is_pipelined(self.run.method)
        busy = (
            accumulation / placement.count_cycles(accumulation)
            if pipelined
            else 1 / placement.forward_stages
        )
        figures = {
            "forward_stages": placement.forward_stages,
            "ipus_per_replica": placement.ipu_count,
            "replicas": self.options.replicas,
            "execution": "PipelinedExecution" if pipelined else "ShardedExecution",
            "pipeline_cycles_an_update": placement.count_cycles(accumulation)
            if pipelined
            else None,
            "full_cycles_share": busy,
            **self._timeline.describe(),
            "profiles": read_profiles(self.ipu),
        }
        return Report(
            count_state_bytes(self._export_state()[0], self.run.partition),
            [0],
            None,
            Events.from_rows(self._timeline.events),
            counters=Counters.from_rows(self._timeline.counters),
            utilization=busy,
            files={"ipu.json": figures},
        )

    def _drop(self) -> None:
        if self.executors is not None:
            self.feed.close()
        super()._drop()
