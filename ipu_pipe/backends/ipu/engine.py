"""A job on Graphcore IPUs by PopTorch 3.4. Written to its API and tested against tests/poptorch_double: not run on hardware.

    job.model -> copy, BeginBlock at every stage -> trainingModel  -> one call: D updates of GA microbatches on R replicas
                                                 -> inferenceModel -> the test set, with the same weights

PopTorch's own pipeline runs both gpipe and pipedream_flush: fill, GA microbatches, flush, update. The user's model is never
wrapped: weights come back into it at evaluations, checkpoints and the end.

A session is all that hangs on one set of IPUs; after a device error
that PopTorch calls recoverable a new one starts from the last checkpoint's state and does the updates since then again.
"""

from __future__ import annotations

import gc
import sys
import time
from collections import deque
from typing import Any, Callable, Deque, List, Optional, TypeVar

import torch.distributed as dist
from torch import nn

from ipu_pipe.backends.interface import CheckpointState, Engine, Report, StepResult
from ipu_pipe.backends.ipu import profile as ipu_profile
from ipu_pipe.backends.ipu.faults import check_hardware, describe_error, forget_frames
from ipu_pipe.backends.ipu.optimizer import IpuState, check_state, count_state_bytes, export_state, import_state
from ipu_pipe.backends.ipu.placement import Placement, is_pipelined, place_stages, round_up_ipus
from ipu_pipe.backends.ipu.poprun import read_instance
from ipu_pipe.backends.ipu.session import Session, Snapshot
from ipu_pipe.backends.ranks import are_joined
from ipu_pipe.errors import BadInput, RunFault, end_process
from ipu_pipe.job.evaluation import EvaluationResult
from ipu_pipe.job.record import Job
from ipu_pipe.model.restoring import load_state
from ipu_pipe.trace.events import Counters, Events

Result = TypeVar("Result")


class PoptorchEngine(Engine):
    """A session at a time, and what to start the next one from."""

    def __init__(self, job: Job, first_update: int) -> None:
        super().__init__(job)
        config = job.config
        self.ipu = config.ipu
        self._share = read_instance(config)
        self.is_main = self._share.first == 0
        self._place = place_stages(self.ipu, len(job.part))
        optimizer = import_state(job.optimizer)
        check_state(optimizer, job.optimizer, self.ipu)
        job.optimizer.state.clear()  # PopTorch's entries mean nothing to it
        start = {name: value.detach().clone() for name, value in job.model.state_dict().items()}
        self._last = Snapshot(first_update, start, optimizer)
        if first_update % self.ipu.device_iterations:
            raise BadInput(
                f"backend.ipu.device_iterations: {self.ipu.device_iterations}: must divide the {first_update} updates "
                "that are done"
            )
        check_hardware(self.ipu, round_up_ipus(self._place.ipus * self._share.replicas))
        self._done, self._may_retry = first_update, True
        self._fetched = first_update  # the update whose weights the job's model holds
        self.updates_per_call = self.ipu.device_iterations
        self._results: Deque[StepResult] = deque()
        self._timeline = ipu_profile.CallTimes(job.traced)
        self._channel = ipu_profile.open_channel()
        self._session: Optional[Session] = self._new_session()
        if self.ipu.compile_only:
            self._compile_only()

    def _new_session(self) -> Session:
        return Session(self.job, self._last, self._share, self._place, self._timeline)

    def _compile_only(self) -> None:
        """Compile, say so and leave with exit code 0: nothing is trained."""
        assert self._session is not None
        try:
            self._guarded(lambda session: session.compile())
        finally:
            self.abort()
        if self.is_main:
            cache = f", cached in {self.ipu.executable_cache}" if self.ipu.executable_cache else ""
            print(f"compiled for {self._place.ipus} IPUs x replicas {self._share.replicas}{cache}; nothing was run")
        if self._others:
            end_process(0)
        sys.exit(0)

    # --- faults of the device

    def _guarded(self, work: Callable[[Session], Result]) -> Result:
        """Run `work`; after a recoverable device error run it once more, from the last checkpoint's state."""
        import poptorch

        assert self._session is not None, "the engine is closed"
        try:
            return work(self._session)
        except poptorch.RecoverableError as error:
            if not self._may_retry or self._others:
                raise _give_up(error, self._done, self._others) from error
            said = f"device error ({error.recovery_action}): {describe_error(error)}"
            forget_frames(error)
        try:
            self._recover(said)
            return work(self._session)
        except poptorch.RecoverableError as error:
            raise _give_up(error, self._done, self._others) from error

    @property
    def _others(self) -> bool:
        """Tell whether other instances of poprun take part, which cannot go back."""
        return are_joined() and dist.get_world_size() > 1

    def _recover(self, said: str) -> None:
        """Start a new session and bring it to where the lost one was. `said`: the error in words."""
        assert self._session is not None
        self._may_retry = False
        if self.is_main:
            again = self._done - self._last.update
            print(
                f"poptorch: {said}: starting anew from update {self._last.update}; {again} updates are done again",
                file=sys.stderr,
                flush=True,
            )
        self._session.drop()
        self._session = None
        gc.collect()  # the lost executor must not hold its device
        self._session = self._new_session()
        for past in range(self._last.update, self._done, self.ipu.device_iterations):
            self._session.call(past)

    # --- what an engine does

    def step(self, k: int) -> StepResult:
        if not self._results:
            assert k == self._done, f"update {self._done} is next, not {k}"
            with self._channel.tracepoint(f"update {k}"):
                self._results.extend(self._guarded(lambda session: session.call(k)))
            self._done += self.ipu.device_iterations
        return self._results.popleft()

    def end(self, done: int, asked: bool) -> int:
        return self.job.updates if self._results else super().end(done, asked)  # no end inside a call

    def evaluate(self) -> List[EvaluationResult]:
        assert not self._results, "an evaluation inside a call"
        start = time.perf_counter_ns()
        with self._channel.tracepoint("evaluate"):
            results = self._guarded(lambda session: session.evaluate())
            self._fetch(self._guarded(lambda session: session.snapshot(self._done, with_optimizer=False)))
        self._timeline.add("evaluate", self._done, start, time.perf_counter_ns())
        return results

    def state(self) -> Optional[CheckpointState]:
        assert not self._results, "a checkpoint inside a call"
        start = time.perf_counter_ns()
        with self._channel.tracepoint("checkpoint"):
            self._last = self._guarded(lambda session: session.snapshot(self._done))
        self._fetch(self._last)
        self._may_retry = True
        self._timeline.add("checkpoint", self._done, start, time.perf_counter_ns())
        if not self.is_main:
            return None
        return CheckpointState(self._last.model, *export_state(self._last.optimizer, list(self.names.values())))

    def _fetch(self, snapshot: Snapshot) -> None:
        """Copy a snapshot's weights into the user's model."""
        load_state(self.job.model, snapshot.model)
        self._fetched = snapshot.update

    def current_model(self) -> Optional[nn.Module]:
        return super().current_model() if self._fetched == self._done and not self._results else None

    def report(self) -> Optional[Report]:
        return _make_report(self.job, self._place, self._last.optimizer, self._timeline) if self.is_main else None

    def close(self) -> None:
        """Copy the newest weights into the user's model and give the IPUs back."""
        if self._session is None:
            return
        if self._last.update != self._done:
            self._last = self._guarded(lambda session: session.snapshot(self._done))
        self._fetch(self._last)
        self.abort()

    def abort(self) -> None:
        if self._session is not None:
            self._session.drop()
            self._session = None
            gc.collect()
        self.release_blocks()


def _make_report(job: Job, place: Placement, optimizer: Optional[IpuState], timeline: ipu_profile.CallTimes) -> Report:
    """Build the report: the pipeline by its placement, and what the calls measured."""
    config = job.config
    names = [name for name, _ in job.model.named_parameters()]
    tensors, _ = export_state(optimizer, names)
    accumulation = config.gradient_accumulation
    pipelined = is_pipelined(job.method)
    busy = accumulation / place.cycles(accumulation) if pipelined else 1 / place.forward_stages
    numbers = {
        "forward_stages": place.forward_stages,
        "ipus_per_replica": place.ipus,
        "replicas": config.replicas,
        "execution": "PipelinedExecution" if pipelined else "ShardedExecution",
        "pipeline_cycles_an_update": place.cycles(accumulation) if pipelined else None,
        "full_cycles_share": busy,
        "latency_seconds": timeline.latency or None,
        "cycles_of_the_last_call": timeline.cycles,
        "profiles": ipu_profile.read_profiles(config.ipu),
    }
    return Report(
        count_state_bytes(tensors, job.part), [0], None, Events.from_rows(timeline.events),
        counters=Counters.from_rows(timeline.counters), utilization=busy, files={"ipu.json": numbers},
    )  # fmt: skip


def _give_up(error: Any, done: int, others: bool) -> RunFault:
    """Return the fault for a device error after `done` updates from which this run cannot go back."""
    forget_frames(error)
    if others:
        return RunFault(
            f"poptorch: after update {done}: device error ({error.recovery_action}): {describe_error(error)}: the other "
            "instances cannot go back: do what it asks for, then go on with --resume"
        )
    return RunFault(
        f"poptorch: after update {done}: device error ({error.recovery_action}) for the second time since the last "
        f"checkpoint: {describe_error(error)}: do what it asks for (vipu reset partition, gc-reset), then go on with --resume"
    )
