"""A job on Graphcore IPUs by PopTorch 3.4. Written to its API and tested against tests/poptorch_double: not run on hardware.

    job.model -> copy, BeginBlock at every stage -> trainingModel  -> one call: D updates of GA microbatches on R replicas
                                                 -> inferenceModel -> the test set, with the same weights

PopTorch's own pipeline runs both gpipe and pipedream_flush: fill, GA microbatches, flush, update. The user's model is never
wrapped: weights come back into it when the run ends. A session is all that hangs on one set of IPUs; after a device error
that PopTorch calls recoverable a new one starts from the last checkpoint's state and does the updates since then again.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import os
import sys
import time
import traceback
from collections import deque
from typing import Any, Callable, Deque, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple, TypeVar

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map

from ipu_pipe.backends.interface import Engine, Report, State, StepResult
from ipu_pipe.backends.ipu import model as ipu_model
from ipu_pipe.backends.ipu import options as ipu_options
from ipu_pipe.backends.ipu import profile as ipu_profile
from ipu_pipe.backends.ipu.feed import Feed
from ipu_pipe.backends.ipu.options import DataLoading, IpuConfig, Placement
from ipu_pipe.errors import BadInput, RunFault, end_process
from ipu_pipe.job.config import Config
from ipu_pipe.job.evaluation import Tally, test_batches
from ipu_pipe.job.position import Measured
from ipu_pipe.job.record import Job
from ipu_pipe.local.blocks import blocks_of
from ipu_pipe.model.randomness import derived_seed

Result = TypeVar("Result")
FRONT_END = (
    AssertionError,
    ValueError,
    AttributeError,
    TypeError,
    KeyError,
    IndexError,
    NotImplementedError,
    RuntimeError,
)
HINTS = (
    (
        ("Out of memory", "Memory allocation error"),
        "take more stages or a smaller micro_batch_size, or recomputation, tensor_locations.optimizer.on_chip=false, "
        "partials=half, another available_memory_proportion",
    ),
    (
        ("Failed to acquire", "No IPU detected", "No device found"),
        "see gc-info -l; backend.ipu.wait_for_ipu=true waits for others to end",
    ),
    (
        ('Parameter "weight" is unsupported',),
        "no class weights in PopTorch's losses: multiply what reduction='none' gives by the labels' weights",
    ),
)


# ---- starting


def is_under_poprun() -> bool:
    """Whether Graphcore's launcher started this process as one of several."""
    if importlib.util.find_spec("popdist") is None:
        return False
    import popdist

    return bool(popdist.isPopdistEnvSet())


class Instance(NamedTuple):
    """This process's share: replicas `first` to `first + replicas`. `base`: makes popdist's options, None without "
    "poprun."""

    first: int
    replicas: int
    base: Optional[Callable[[int], Any]] = None


def instance(config: Config) -> Instance:
    """What this process does of the run. Raises BadInput where poprun started another number of replicas."""
    if not is_under_poprun():
        return Instance(0, config.replicas)
    import popdist
    import popdist.poptorch

    popdist.init()
    local, total = popdist.getNumLocalReplicas(), popdist.getNumTotalReplicas()
    if total != config.replicas:
        raise BadInput(f"replicas: {config.replicas}: poprun started {total} (--num-replicas): must be the same")
    return Instance(
        popdist.getInstanceIndex() * local, local, lambda ipus: popdist.poptorch.Options(ipus_per_replica=ipus)
    )


# ---- what cannot be


# ---- faults


def forget_frames(error: Optional[BaseException]) -> None:
    """Clear the local variables of the calls that an exception, and what it came from, has passed: one of them is what holds the
    IPUs. Where it was raised stays known."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


@contextlib.contextmanager
def told(doing: str) -> Iterator[None]:
    """What PopTorch raises, of either family, becomes one line; errors that it calls recoverable pass."""
    import poptorch

    try:
        yield
    except (BadInput, RunFault, poptorch.RecoverableError):
        raise
    except poptorch.Error as error:
        forget_frames(error)
        raise RunFault(f"poptorch: {doing}: {_said(error)}") from error
    except FRONT_END as error:
        forget_frames(error)
        raise RunFault(f"poptorch: {doing}: {type(error).__name__}: {' '.join(str(error).split())[:400]}") from error


def _said(error: Any) -> str:
    text = " ".join(str(error.message).split())
    hint = next((hint for words, hint in HINTS if any(word in text for word in words)), "")
    return f"{error.type}: {text[:400]}" + (f": {hint}" if hint else "")


# ---- a session


class Held(NamedTuple):
    """Weights and optimizer state when `update` updates are done, by unsplit names and by PopTorch's."""

    update: int
    model: Dict[str, torch.Tensor]
    optimizer: Optional[Dict[str, Any]]


class Session:
    """A copy of the model, its executors and its input: all that is lost with a device."""

    def __init__(self, job: Job, held: Held, share: Instance, place: Placement) -> None:
        import poptorch

        config = job.config
        assert config.backend.ipu is not None
        self.job, self.ipu, self.share, self.place = job, config.backend.ipu, share, place
        self.timeline = ipu_profile.Timeline(0, 0)
        self.wrapped = ipu_model.wrap(job.model, job.loss, job.part, config.precision, self.ipu)
        self._load(held.model)
        own = {ipu_model.unsplit(name): p for name, p in self.wrapped.named_parameters()}
        names = {p: name for name, p in job.model.named_parameters()}
        clip = config.clip.norm if config.clip else None
        with told("making the optimizer"):
            self.optimizer = ipu_model.translate(job.optimizer, names, own, self.ipu, clip)  # type: ignore[arg-type]
            if held.optimizer is not None:
                self.optimizer.load_state_dict({**self.optimizer.get_state_dict(), **held.optimizer, "ipu_param": {}})
        self._set_rates(held.update)
        with told("making the training model"):
            options = self._options(True, held.update)
            self.training = poptorch.trainingModel(self.wrapped, options, self.optimizer)
        self.inference: Optional[Any] = None
        self.calls = ipu_model.Calls(
            job.data, config, job.updates_per_epoch, held.update, job.updates, share.first, share.replicas
        )
        self._first = held.update
        with told("starting the data loader"):
            loading = DataLoading() if self.ipu.compile_only else self.ipu.data_loading
            self._feed = Feed(self.calls, job.data, loading, options)

    def _load(self, tensors: Dict[str, torch.Tensor]) -> None:
        own = {ipu_model.unsplit(name): t for name, t in self.wrapped.state_dict(keep_vars=True).items()}
        with torch.no_grad():
            for name, value in tensors.items():
                own[name].copy_(value)

    def _options(self, training: bool, update: int) -> Any:
        base = None
        if self.share.base is not None:
            asked = ipu_options.reserved(self.place.ipus) if self.ipu.auto_round_num_ipus else self.place.ipus
            base = self.share.base(asked)
        seed = derived_seed(self.job.config.seed, "ipu", update) % 2**32
        with torch.random.fork_rng(devices=[]):  # randomSeed seeds the host's generator, too
            ipu_id = self.ipu.ipu_ids[0] if self.ipu.ipu_ids else None
            return ipu_options.make_options(self.job.config, self.place, training, seed, base, ipu_id)

    # --- training

    def compile(self) -> None:
        """Compile both models, run none. Compiling attaches, and the second model needs the first one's IPUs."""
        with told("compiling the training model"):
            self.training.compile(*self.calls[0])
            if self.training.isAttachedToDevice():
                self.training.detachFromDevice()
        self._make_inference()

    def call(self, k: int) -> List[StepResult]:
        """Updates k to k + D of one call."""
        iterations = self.ipu.device_iterations
        x, y = self._feed.take()
        if not self.training.isCompiled():
            with told("compiling the training model"):
                self.training.compile(x, y)
        if not self.training.isAttachedToDevice():
            with told("attaching to the IPUs"):
                self.training.attachToDevice()
        if self._set_rates(k):  # when attached: attaching writes back the rate that was read at the last detachment
            with told("setting the learning rate"):
                self.training.setOptimizer(self.optimizer)
        start_ns = time.perf_counter_ns()
        with told(f"update {k}"):
            found = self.training(x, y)
        end_ns = time.perf_counter_ns()
        sent, received = (sum(t.numel() * t.element_size() for t in tensors) for tensors in ((x, y), found))
        self.timeline.add_call(self.training, k, iterations, start_ns, end_ns, len(x), sent, received)
        return self._results(k, found)

    def _set_rates(self, k: int) -> bool:
        """Set the optimizer's rates to those of update k; whether any changed."""
        return ipu_model.set_rates(self.optimizer, self.job.rules.rates(k))

    def _results(self, k: int, found: Sequence[torch.Tensor]) -> List[StepResult]:
        """Of each update: mean losses and shares of right answers over what the output mode gives."""
        config, iterations, blocks = self.job.config, self.ipu.device_iterations, self._blocks
        losses = found[1].double().reshape(-1, blocks)
        answers = found[2].double().reshape(-1, blocks, 2) if len(found) > 2 else None
        parts = iterations if self.ipu.output_mode in ("all", "every_n") else 1
        means = losses.reshape(parts, -1, blocks).mean(dim=1)
        if self.ipu.output_mode == "sum":
            means /= iterations * config.gradient_accumulation
        right = None if answers is None else answers.reshape(parts, -1, blocks, 2).sum(dim=1)
        means, right = _over_instances(means, right)
        samples = config.micro_batch_size * config.gradient_accumulation * config.replicas
        results = []
        for i in range(iterations):
            row = means[min(i, parts - 1)].tolist()
            shares: List[Optional[float]] = [None] * blocks
            if right is not None:
                counted = right[min(i, parts - 1)]
                shares = (counted[:, 0] / counted[:, 1].clamp(min=1)).tolist()
            check_finite(config, k + i, row)
            each = tuple(zip(row, shares)) if blocks > 1 else ()
            results.append(StepResult(row[-1], shares[-1], samples, each))
        return results

    @property
    def _blocks(self) -> int:
        blocks = blocks_of(self.job.model)
        return 1 if blocks is None else len(blocks.heads) + 1

    # --- evaluation

    def _make_inference(self) -> Any:
        """The inference model, made after the training model and compiled in evaluation mode."""
        import poptorch

        if self.inference is None:
            modes = [(module, module.training) for module in self.wrapped.modules()]
            self.wrapped.eval()
            try:
                with told("compiling the inference model"):
                    made = poptorch.inferenceModel(self.wrapped, self._options(False, self._first))
                    x = ipu_model.as_input(self.job.example[0], self.job.config.precision)
                    rows = self._rows(made)
                    made.compile(_filled(x, rows))
            finally:
                for module, mode in modes:
                    module.training = mode
            self.inference = made
        return self.inference

    def _rows(self, inference: Any) -> int:
        """Samples of an evaluation's call."""
        options = inference.options
        return int(self.job.config.micro_batch_size * options.device_iterations * options.replication_factor)

    def evaluate(self) -> List[Measured]:
        """The test set on the inference model, with the training model's weights."""
        with told("making room for the evaluation"):
            if self.training.isCompiled() and self.training.isAttachedToDevice():
                if self.ipu.detach_for_evaluation:
                    self.training.detachFromDevice()  # weights and optimizer state come to the host
                else:
                    self.training.copyWeightsToHostIfNeeded()
        inference = self._make_inference()
        with told("attaching to the IPUs"):
            if inference.isAttachedToDevice():
                inference.copyWeightsToDevice()
            else:
                inference.attachToDevice()
        found = self._tally(inference)
        if self.ipu.detach_for_evaluation:
            with told("leaving the evaluation's IPUs"):
                inference.detachFromDevice()
        return found

    def _tally(self, inference: Any) -> List[Measured]:
        tallies = [Tally(self.job.loss) for _ in range(self._blocks)]
        for x, y, count in in_calls(test_batches(self.job), self._rows(inference)):
            with told("evaluation"):
                outputs = inference(ipu_model.as_input(x, self.job.config.precision))
            for tally, output in zip(tallies, outputs):
                own = tree_map(lambda t: (t.float() if t.is_floating_point() else t)[:count], output)
                tally.add(own, y[:count], count)
        return [tally.measured for tally in tallies]

    # --- state

    def held(self, update: int) -> Held:
        """Weights and optimizer state as they are, copies."""
        with told("reading the weights"):
            if self.training.isCompiled() and self.training.isAttachedToDevice():
                self.training.copyWeightsToHostIfNeeded()
            model = {}
            for name, value in self.wrapped.state_dict().items():
                own = ipu_model.unsplit(name)
                if own is not None:
                    model[own] = value.detach().clone()
            optimizer = ipu_model.read_state(self.optimizer)
        like = self.job.model.state_dict()
        return Held(update, {name: value.to(like[name].dtype) for name, value in model.items()}, optimizer)

    def drop(self) -> None:
        """Give the IPUs back, without a word where they are lost already. `destroy` first reads what a lost device no longer
        tells and so frees nothing: then what holds the IPUs goes with the last reference to it."""
        for executor in (self.inference, self.training):
            if executor is not None:
                with contextlib.suppress(Exception):
                    executor.destroy()
        self._feed.close()
        self.training = self.inference = self.optimizer = None


def check_finite(config: Config, update: int, losses: Sequence[float]) -> None:
    """RunFault for a loss that is no finite number."""
    wrong = [loss for loss in losses if loss != loss or abs(loss) == float("inf")]
    if wrong and not config.allow_nonfinite:
        raise RunFault(
            f"update {update} of method {config.method}: the training loss is {wrong[0]}; a smaller optimizer.lr or "
            "lr_schedule.warmup_steps may help, with half precision another backend.ipu.loss_scaling "
            "(allow_nonfinite: true goes "
            "on regardless)"
        )


def _over_instances(means: torch.Tensor, right: Optional[torch.Tensor]) -> Tuple[torch.Tensor, Optional[torch.Tensor]]:
    """Over poprun's instances, where there are several."""
    if not (dist.is_available() and dist.is_initialized()):
        return means, right
    dist.all_reduce(means)
    if right is not None:
        dist.all_reduce(right)
    return means / dist.get_world_size(), right


def in_calls(batches: Iterator[Tuple[Any, Any]], rows: int) -> Iterator[Tuple[Any, Any, int]]:
    """Batches of any size as calls of `rows` samples, the last filled up, and how many are the test set's own."""
    held: List[Tuple[Any, Any]] = []
    count = 0
    for x, y in batches:
        held.append((x, y))
        count += len(x)
        while count >= rows:
            joined = tuple(torch.cat([pair[i] for pair in held]) for i in range(2))
            yield joined[0][:rows], joined[1][:rows], rows
            held, count = [(joined[0][rows:], joined[1][rows:])], count - rows
    if count:
        x, y = (torch.cat([pair[i] for pair in held]) for i in range(2))
        yield _filled(x, rows), _filled(y, rows), count


def _filled(x: torch.Tensor, rows: int) -> torch.Tensor:
    """x, its last sample repeated up to so many."""
    return torch.cat([x, x[-1:].expand(rows - len(x), *x.shape[1:])]) if len(x) < rows else x[:rows]


# ---- the engine


def check_hardware(ipu: IpuConfig, count: int) -> None:
    """Refuse (BadInput) where so many IPUs are not there, before a compilation that may take an hour."""
    import poptorch

    simulated = ipu.use_ipu_model or ipu.offline_target is not None
    if simulated or ipu.wait_for_ipu or os.environ.get("POPTORCH_IPU_MODEL", "0") not in ("", "0"):
        return
    if not poptorch.ipuHardwareIsAvailable(count):
        raise BadInput(
            f"backend.name: poptorch: this machine has no device of {count} IPUs: take fewer stages or replicas, or compile "
            "without one: backend.ipu.compile_only=true backend.ipu.offline_target=2"
        )


class PoptorchEngine(Engine):
    """A session at a time, and what to start the next one from."""

    def __init__(self, job: Job, first_update: int) -> None:
        super().__init__(job)
        config = job.config
        assert config.backend.ipu is not None
        self.ipu: IpuConfig = config.backend.ipu
        self._share = instance(config)
        self.is_main = self._share.first == 0
        self._place = ipu_options.placement(self.ipu, len(job.part))
        optimizer = ipu_model.import_state(job.optimizer)
        job.optimizer.state.clear()  # PopTorch's entries mean nothing to it
        start = {name: value.detach().clone() for name, value in job.model.state_dict().items()}
        self._last = Held(first_update, start, optimizer)
        if first_update % self.ipu.device_iterations:
            raise BadInput(
                f"backend.ipu.device_iterations: {self.ipu.device_iterations}: must divide the {first_update} updates "
                "that are done"
            )
        self._check_hardware()
        self._done, self._may_retry = first_update, True
        self._results: Deque[StepResult] = deque()
        traced = max(config.log.trace_microbatches // config.gradient_accumulation, 1)
        self._timeline = ipu_profile.Timeline(first_update, first_update + traced)
        self._channel = ipu_profile.tracepoints()
        self._session: Optional[Session] = self._new_session()
        if self.ipu.compile_only:
            self._compile_only()

    def _check_hardware(self) -> None:
        check_hardware(self.ipu, ipu_options.reserved(self._place.ipus * self._share.replicas))

    def _new_session(self) -> Session:
        session = Session(self.job, self._last, self._share, self._place)
        session.timeline = self._timeline
        return session

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
        """`work`; after a recoverable device error once more, from the last checkpoint's state."""
        import poptorch

        assert self._session is not None, "the engine is closed"
        try:
            return work(self._session)
        except poptorch.RecoverableError as error:
            if not self._may_retry or self._others:
                raise self._given_up(error) from error
            said = f"device error ({error.recovery_action}): {_said(error)}"
            forget_frames(error)
        try:
            self._recover(said)
            return work(self._session)
        except poptorch.RecoverableError as error:
            raise self._given_up(error) from error

    @property
    def _others(self) -> bool:
        """Whether poprun's other instances take part, which cannot go back."""
        return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1

    def _given_up(self, error: Any) -> RunFault:
        forget_frames(error)
        if self._others:
            return RunFault(
                f"poptorch: after update {self._done}: device error ({error.recovery_action}): {_said(error)}: the other "
                "instances cannot go back: do what it asks for, then go on with --resume"
            )
        return RunFault(
            f"poptorch: after update {self._done}: device error ({error.recovery_action}) for the second time since "
            "the last checkpoint: "
            f"{_said(error)}: do what it asks for (vipu reset partition, gc-reset), then go on with --resume"
        )

    def _recover(self, said: str) -> None:
        """A new session, brought to where the lost one was. `said`: of the error."""
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

    def evaluate(self) -> List[Measured]:
        assert not self._results, "an evaluation inside a call"
        start = time.perf_counter_ns()
        with self._channel.tracepoint("evaluate"):
            found = self._guarded(lambda session: session.evaluate())
        self._timeline.add("evaluate", self._done, start, time.perf_counter_ns())
        return found

    def state(self) -> Optional[State]:
        assert not self._results, "a checkpoint inside a call"
        start = time.perf_counter_ns()
        with self._channel.tracepoint("checkpoint"):
            self._last = self._guarded(lambda session: session.held(self._done))
        self._may_retry = True
        self._timeline.add("checkpoint", self._done, start, time.perf_counter_ns())
        if not self.is_main:
            return None
        names = [name for name, _ in self.job.model.named_parameters()]
        return State(self._last.model, *ipu_model.export_state(self._last.optimizer or {}, names))

    def report(self) -> Optional[Report]:
        if not self.is_main:
            return None
        config, place = self.job.config, self._place
        names = [name for name, _ in self.job.model.named_parameters()]
        tensors, _ = ipu_model.export_state(self._last.optimizer or {}, names)
        accumulation = config.gradient_accumulation
        pipelined = ipu_options.is_pipelined(self.job.method)
        busy = accumulation / place.cycles(accumulation) if pipelined else 1 / place.forward_stages
        numbers = {
            "forward_stages": place.forward_stages,
            "ipus_per_replica": place.ipus,
            "replicas": config.replicas,
            "execution": "PipelinedExecution" if pipelined else "ShardedExecution",
            "pipeline_cycles_an_update": place.cycles(accumulation) if pipelined else None,
            "full_cycles_share": busy,
            "latency_seconds": self._timeline.latency or None,
            "cycles_of_the_last_call": self._timeline.cycles,
            "profiles": ipu_profile.profiles(self.ipu),
        }
        return Report(
            ipu_model.state_bytes(tensors, self.job.part), [0], None, self._timeline.events,
            counters=self._timeline.counters, utilization=busy, files={"ipu.json": numbers},
        )  # fmt: skip

    def close(self) -> None:
        """Newest weights in the user's model, nothing left on the IPUs."""
        if self._session is None:
            return
        if self._last.update != self._done:
            self._last = self._guarded(lambda session: session.held(self._done))
        self.job.model.load_state_dict(self._last.model)
        self.abort()

    def abort(self) -> None:
        if self._session is not None:
            self._session.drop()
            self._session = None
            gc.collect()
        blocks = blocks_of(self.job.model)
        if blocks is not None:
            blocks.release()


