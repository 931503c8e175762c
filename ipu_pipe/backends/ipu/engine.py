"""Train a job on Graphcore IPUs with PopTorch 3.4: the engine that the run's loop calls for
updates, evaluations and checkpoints.

    run.model -> copy, a poptorch.BeginBlock per stage -> trainingModel  -> a call trains D updates of N microbatches, R replicas
                                                       -> inferenceModel -> evaluates with the same weights

A call is one execution on the device: D (device_iterations) updates. PopTorch's own pipeline fills,
runs N microbatches, flushes and updates, which is both gpipe and pipedream_flush. The executors are
the two compiled models; they are made from a copy of the user's model, into which weights are
copied back at evaluations, at checkpoints and at the end.

After a device error that PopTorch calls recoverable, the engine makes new executors from the state
of the last checkpoint and repeats the updates since then. In a loop of the caller's own such an
error ends the run, since its batches are not kept.

Tested against tests/poptorch_double; not run on hardware.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import time
from typing import Any, Callable, Iterator, TypeVar

import torch
import torch.distributed as dist

from ipu_pipe.backends.interface import CheckpointState, Engine, Report, StepResult
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
    require_compiled_settings,
)
from ipu_pipe.backends.ipu.options import IpuOptions, make_options
from ipu_pipe.backends.ipu.placement import (
    is_pipelined,
    place_stages,
    read_poprun_share,
    round_up_ipus,
)
from ipu_pipe.backends.ipu.profile import CallTimes, read_profiles
from ipu_pipe.backends.ipu.wrapping import get_unsplit_name, wrap
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


class PoptorchEngine(Engine):
    """The executors of this process's replicas, their data loader, and the snapshot from which new
    ones start.
    """

    # PopTorch flushes its pipeline at each update
    makes_updates_at_once = is_empty_after_calls = True
    leaves_weights_stale = True

    def __init__(self, run: Run, first_update: int, table: VersionTable) -> None:
        import poptorch

        super().__init__(run)
        self.options: IpuOptions = run.options
        self.ipu = self.options.ipu
        self.updates_per_call = self.ipu.device_iterations
        self._share = read_poprun_share(self.options.replicas)
        self.is_main = self._share.first == 0
        # number of other poprun instances; if there are any, a device error ends the run: they
        # cannot restart together
        self._other_instances = dist.get_world_size() - 1 if are_joined() else 0
        self._placement = place_stages(self.ipu, len(run.partition))
        blocks = get_blocks(run.model)
        self._loss_count = 1 if blocks is None else len(blocks.heads) + 1
        # a caller's loop gives a batch once
        self._reads_again = run.batches.reads_again
        self._may_retry = self._reads_again
        if self._other_instances:
            self.newest_model = None
        self._results: dict[int, StepResult] = {}
        self._timeline = CallTimes(run.trace)
        # PopVision's system trace is written if the SDK's libpvti is installed and PVTI_OPTIONS is
        # set
        self._channel = poptorch.profiling.Channel("ipu_pipe")
        self.executors: Executors | None = None
        self.reopen(first_update, table, is_loaded=True)
        if self.ipu.compile_only:
            self._compile_only()

    def _start(self) -> None:
        """Make executors and data loader that continue from the last snapshot."""
        run = self.run
        last = self._last_snapshot
        share = self._share
        wrapped = wrap(run.model, run.loss, run.partition, self.options.precision, self.ipu)
        tensors = {
            get_unsplit_name(name): t for name, t in wrapped.state_dict(keep_vars=True).items()
        }
        with torch.no_grad():
            for name, value in last.model.items():
                tensors[name].copy_(value)
        executors = Executors(
            run,
            wrapped,
            self._make_options,
            run.example[0],
            last.optimizer,
            last.update,
            self._timeline,
        )
        replicas = range(share.first, share.first + share.replicas)
        self.calls = Calls(
            self.options.data,
            self.options,
            run.per_epoch,
            range(last.update, self.options.updates),
            replicas,
        )
        with describe_errors("starting the data loader"):
            loading = DataLoading() if self.ipu.compile_only else self.ipu.data_loading
            self.feed = Feed(self.calls, loading, executors.training_options)
        self.executors = executors

    def _make_options(self, training: bool) -> Any:
        popdist_options = None
        ipus = self._placement.ipu_count
        if self._share.make_options is not None:
            popdist_options = self._share.make_options(
                round_up_ipus(ipus) if self.ipu.auto_round_num_ipus else ipus
            )
        seed = derive_seed(self.run.seed, "ipu", self._last_snapshot.update) % 2**32
        # randomSeed seeds the host's generator, too
        with torch.random.fork_rng(devices=[]):
            ipu_id = self.ipu.ipu_ids[0] if self.ipu.ipu_ids else None
            return make_options(
                self.options,
                self.run.method,
                self._placement,
                training,
                seed,
                popdist_options,
                ipu_id,
            )

    def _compile_only(self) -> None:
        """Compile both models without running them, print that and exit with code 0."""

        def compile_both(executors: Executors) -> None:
            executors.compile(*self.calls[0])
            # the second model needs the first one's IPUs
            executors.leave_training(True)
            executors.make_inference()

        try:
            self._run_with_retry(compile_both)
        finally:
            self.abort()
        if self.is_main:
            cache = f", cached in {self.ipu.executable_cache}" if self.ipu.executable_cache else ""
            print(
                f"compiled for {self._placement.ipu_count} IPUs x replicas "
                f"{self._share.replicas}{cache}; nothing was run"
            )
        if self._other_instances:
            end_process(0)
        sys.exit(0)

    # ---- device errors

    def _run_with_retry(self, work: Callable[[Executors], Result]) -> Result:
        """Run `work`; after a recoverable device error run it once more, from the last checkpoint's
        state.
        """
        import poptorch

        assert self.executors is not None, "the engine is closed"
        try:
            return work(self.executors)
        except poptorch.RecoverableError as error:
            if not self._may_retry or self._other_instances:
                raise self._give_up(error) from error
            reason = f"device error ({error.recovery_action}): {describe_error(error)}"
            forget_frames(error)
        try:
            self._recover(reason)
            return work(self.executors)
        except poptorch.RecoverableError as error:
            raise self._give_up(error) from error

    def _recover(self, reason: str) -> None:
        """Start new executors and repeat the updates since the last snapshot."""
        self._may_retry = False
        if self.is_main:
            repeated = self._updates_done - self._last_snapshot.update
            text = (
                f"restarting from update {self._last_snapshot.update}; repeating {repeated} updates"
            )
            print(f"poptorch: {reason}: {text}", file=sys.stderr, flush=True)
        self._drop()
        self._start()
        assert self.executors is not None
        for k in range(self._last_snapshot.update, self._updates_done, self.updates_per_call):
            self._call(self.executors, k)

    def _give_up(self, error: Any) -> RunFault:
        """Return the fault for a device error after which this run cannot retry."""
        forget_frames(error)
        times = " for the second time since the last checkpoint"
        remedy = "do what it asks for (vipu reset partition, gc-reset)"
        then = "go on with --resume"
        if self._other_instances:
            times = ""
            remedy = "the other instances cannot retry: do what it asks for"
        if not self._reads_again:
            times = ""
            then = "load the last state_dict into a new pipeline"
            remedy = f"a loop's batches are not kept, so no update can be repeated: {remedy}"
        return RunFault(
            f"poptorch: after update {self._updates_done}: device error "
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
        assert k == self._updates_done, f"update {self._updates_done} is next, not {k}"
        require_compiled_settings(self.run.optimizer, self.run.rules, k)
        with self._channel.tracepoint(f"update {k}"):
            results = self._run_with_retry(lambda executors: self._call(executors, k))
        self._results.update(enumerate(results, k))
        self._updates_done += self.updates_per_call
        self.newest_model = None

    def take(self, k: int) -> StepResult:
        return self._results.pop(k)

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
        model = {
            name: value.detach().clone() for name, value in self.run.model.state_dict().items()
        }
        optimizer = import_state(self.run.optimizer, self.ipu)
        self._last_snapshot = Snapshot(update, model, optimizer)
        self._updates_done = update
        self._drop()
        self._start()

    def predict(self, x: Any) -> Any:
        return self._run_with_retry(lambda executors: self._compute_outputs(executors, x))

    def _compute_outputs(self, executors: Executors, x: torch.Tensor) -> torch.Tensor:
        """Return the model's output for inputs of any number of samples, computed by the inference
        model.
        """
        executors.begin_evaluation()
        outputs = []
        for part in x.split(executors.rows):
            output = executors.infer(fill_up(part, executors.rows))[-1]
            outputs.append(trim_output(output, len(part)))
        executors.end_evaluation()
        return torch.cat(outputs)

    @contextlib.contextmanager
    def hold_whole_model(self, everywhere: bool = True) -> Iterator[None]:
        if self.newest_model is None:
            self._load_newest_weights()
        yield

    def _call(self, executors: Executors, k: int) -> list[StepResult]:
        """Make the updates k to k + D - 1 in one call; return mean losses and accuracies over the
        outputs of the output mode.
        """
        blocks = self._loss_count
        iterations = self.updates_per_call
        x, y = self.feed.take()
        _, losses, *accuracy_outputs = executors.call(range(k, k + iterations), k, x, y)
        row_count = iterations if self.ipu.output_mode in ("all", "every_n") else 1
        means = losses.double().reshape(row_count, -1, blocks).mean(dim=1)
        if self.ipu.output_mode == "sum":
            means /= iterations * self.options.gradient_accumulation
        counts_of_right = torch.full((row_count, blocks, 2), float("nan"), dtype=torch.float64)
        if accuracy_outputs:
            counts_of_right = (
                accuracy_outputs[0].double().reshape(row_count, -1, blocks, 2).sum(dim=1)
            )
        if self._other_instances:
            dist.all_reduce(means)
            dist.all_reduce(counts_of_right)
            means /= self._other_instances + 1
        results = []
        for i in range(iterations):
            row = means[min(i, row_count - 1)].tolist()
            counts = counts_of_right[min(i, row_count - 1)].tolist()
            by_block = tuple(
                (loss, n / max(total, 1) if accuracy_outputs else None)
                for loss, (n, total) in zip(row, counts)
            )
            results.append(
                StepResult(*by_block[-1], self.run.samples, by_block if blocks > 1 else ())
            )
        return results

    def evaluate(self, batches: BatchReader, metrics: Metrics) -> list[EvaluationResult]:
        assert not self._results, "an evaluation inside a call"
        start = time.perf_counter_ns()
        with self._channel.tracepoint("evaluate"):
            results = self._run_with_retry(
                lambda executors: self._evaluate_batches(executors, batches, metrics)
            )
            self._load_newest_weights()
        self._timeline.add("evaluate", self._updates_done, start)
        return results

    def _evaluate_batches(
        self, executors: Executors, batches: BatchReader, metrics: Metrics
    ) -> list[EvaluationResult]:
        """Evaluate on the inference model; each of poprun's instances evaluates a share of the
        batches.
        """
        tallies = [Tally(self.run.loss, metrics) for _ in range(self._loss_count)]
        executors.begin_evaluation()
        rank, world = (dist.get_rank(), dist.get_world_size()) if self._other_instances else (0, 1)
        calls = split_into_calls(batches(rank, world), executors.rows)
        while True:
            x, y, count = next(calls, (self.run.example[0], self.run.example[1], 0))
            total = torch.tensor([count])
            # replicas of all instances wait for one another, so an instance that has no batch left
            # evaluates the example
            if self._other_instances:
                dist.all_reduce(total)
            if not total:
                break
            for tally, output in zip(tallies, executors.infer(fill_up(x, executors.rows))):
                if count:
                    tally.add(trim_output(output, count), y[:count], count)
        executors.end_evaluation()
        sums = [tally.sums for tally in tallies]
        for part in sums if self._other_instances else ():
            dist.all_reduce(part)
        return [evaluate_sums(metrics, part) for part in sums]

    def collect_state(self) -> CheckpointState | None:
        assert not self._results, "a checkpoint inside a call"
        start = time.perf_counter_ns()
        with self._channel.tracepoint("checkpoint"):
            self._last_snapshot = self._run_with_retry(
                lambda executors: executors.snapshot(self._updates_done)
            )
        self._load_into_model(self._last_snapshot)
        self._may_retry = self._reads_again
        self._timeline.add("checkpoint", self._updates_done, start)
        return CheckpointState(self._last_snapshot.model, *self._export()) if self.is_main else None

    def _export(self) -> Any:
        return export_state(self._last_snapshot.optimizer, list(self.names.values()))

    def _load_newest_weights(self) -> None:
        """Copy the weights that the IPUs have now into the user's model."""
        done = self._updates_done
        snapshot = self._run_with_retry(
            lambda executors: executors.snapshot(done, with_optimizer=False)
        )
        self._load_into_model(snapshot)

    def _load_into_model(self, snapshot: Snapshot) -> None:
        """Copy a snapshot's weights into the user's model."""
        load_state(self.run.model, snapshot.model)
        if not self._other_instances:
            self.newest_model = self.run.model

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
            count_state_bytes(self._export()[0], self.run.partition),
            [0],
            None,
            Events.from_rows(self._timeline.events),
            counters=Counters.from_rows(self._timeline.counters),
            utilization=busy,
            files={"ipu.json": figures},
        )

    def close(self) -> None:
        """Copy the newest weights into the user's model and release the IPUs."""
        if self.executors is None:
            return
        if self._last_snapshot.update != self._updates_done:
            self._last_snapshot = self._run_with_retry(
                lambda executors: executors.snapshot(self._updates_done)
            )
        self._load_into_model(self._last_snapshot)
        self.abort()

    def _drop(self) -> None:
        """Release the IPUs and stop the data loader."""
        if self.executors is not None:
            self.executors.drop()
            self.feed.close()
            self.executors = None
            # a lost executor must not hold its device
            gc.collect()

    def keep_newest(self) -> None:
        if self.executors is not None and self.newest_model is None:
            self._load_newest_weights()

    def abort(self) -> None:
        self._drop()
        self.release_blocks()
