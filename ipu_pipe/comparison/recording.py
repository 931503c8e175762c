"""Record one training of a loop: the losses of its updates, its evaluations, and when each update
would be made on devices.

    run(pipeline, seed)            the caller's loop
      pipeline(model, ...)         a `RecordedPipeline`: method, stages and seed are filled in
        step, drain, close         note the losses of the updates that leave
        evaluate                   notes its values
"""

from __future__ import annotations

import json
import math
import time
from typing import Any, Callable, Mapping

import numpy as np
import torch

from ipu_pipe.comparison.stage_times import StageTimes
from ipu_pipe.comparison.trainings import Training
from ipu_pipe.errors import BadInput, Divergence
from ipu_pipe.job.record import Length, RunSetup
from ipu_pipe.model.randomness import RandomStates, restore_random_states
from ipu_pipe.pipeline.pipeline import Pipeline, Update, count_stages
from ipu_pipe.report.memory import plan_memory
from ipu_pipe.run.build import count_updates
from ipu_pipe.schedule.clock import Costs
from ipu_pipe.schedule.methods import METHODS

LoopFunction = Callable[[Any, int], Any]


class RecordedPipeline(Pipeline):
    """A pipeline that notes what a comparison needs, and multiplies the learning rates of its
    updates by `rate_factor`, after the loop's scheduler.
    """

    def __init__(
        self, *args: Any, rate_factor: float, stage_times: StageTimes, **keys: Any
    ) -> None:
        super().__init__(*args, **keys)
        if not self._config.backend.facts.emulates:
            raise BadInput(
                f"backend: {self._config.backend.name}: unsupported: a comparison drives one "
                f"process: must be emulator, which computes the same weights"
            )
        # not in the optimizer's rates, which the loop's scheduler sets anew
        self._handle.rate_factor = rate_factor
        self._stage_times = stage_times
        self._costs: Costs | None = None
        self.record = Training()

    def step(self, *args: Any, **keys: Any) -> list[Update]:
        """Make a step, and note the losses that leave."""
        is_first = not self.updates
        try:
            updates = self._note(super().step(*args, **keys))
        except ValueError as error:
            # such as a batch that does not divide into the method's microbatches
            if is_first and not isinstance(error, BadInput):
                raise BadInput(str(error)) from error
            raise
        if is_first:
            # at the start, so that a method whose time cannot be told does not train first
            engine = self._require_flow().engine
            self._costs = self._stage_times.make_costs(self._require_job(), engine)
        return updates

    def drain(self) -> list[Update]:
        """Drain, and note the losses that leave."""
        return self._note(super().drain())

    def close(self) -> list[Update]:
        """Close, and note the losses that leave."""
        return self._note(super().close())

    def evaluate(self, batches: Any, metrics: Any = None) -> dict[str, float | None]:
        """Evaluate, and note the values."""
        values = super().evaluate(batches, metrics)
        self.record.evaluations.append({"update": self.updates, **values})
        return values

    def _note(self, updates: list[Update]) -> list[Update]:
        self.record.losses += [update.loss for update in updates]
        return updates

    def count_updates(self, setup: RunSetup) -> Length:
        """Return the updates of an epoch, None for data without a length, and of the run of a
        config, as `train` would count them for this pipeline's method. Raise `BadInput`.
        """
        config = self._config
        method_args = config.method_args
        if self._method.rounds is not None:
            method_args = method_args.model_copy(update={"replicas": self.microbatches})
        changes = {"method": config.method, "method_args": method_args}
        return count_updates(setup.config.model_copy(update=changes), setup.data)

    def complete_record(self) -> Training:
        """Return the record of a training that has ended. Raise `BadInput` if no step was made."""
        if not self.updates:
            raise BadInput("run: made no step with the pipeline: must train")
        job = self._plan_job("compare")
        record = self.record
        # the first step of a training may diverge
        if self._costs is not None:
            seconds_at = job.play_updates(self._costs, self._require_flow().drains, self.updates)
            # updates that were in flight when a training diverged have no loss
            record.seconds_at = seconds_at[: len(record.losses)].tolist()
        record.samples_per_update = job.global_batch_size
        record.microbatches = job.schedule.accumulate
        record.devices = len(set(job.placement))
        record.stages = plan_memory(job)["stages"]
        return record


class PipelineMaker:
    """Make the pipeline of one training as `ipu_pipe.Pipeline` would, with the `arguments` that the
    comparison fills in.

        pipe = pipeline(model, loss, optimizer, microbatches=4)
    """

    def __init__(
        self, arguments: Mapping[str, Any], rate_factor: float, seed: int, stage_times: StageTimes
    ) -> None:
        self._arguments = arguments
        self._rate_factor = rate_factor
        self._seed = seed
        self._stage_times = stage_times
        self.pipe: RecordedPipeline | None = None

    def __call__(self, model: Any, loss: Any, optimizer: Any, **keys: Any) -> RecordedPipeline:
        """Return the pipeline. Raise `BadInput` for arguments that the comparison fills in, and for
        a second pipeline.
        """
        if self.pipe is not None:
            raise BadInput("run: makes two pipelines in one training: must make one")
        for key in ("method", "stages"):
            if key in keys:
                raise BadInput(f"pipeline: {key}: filled in by the comparison: leave it out")
        # a loop may pass a seed of its own; what the comparison fills in comes last
        arguments = {"seed": self._seed, **keys, **self._arguments}
        reference = self._stage_times.reference
        # measured again, the stages might begin elsewhere
        if reference is not None and are_measured(arguments["stages"]):
            arguments["stages"] = reference.begins
        note = _translate_clip(arguments, count_stages(model, arguments["stages"]))
        self.pipe = RecordedPipeline(
            model,
            loss,
            optimizer,
            rate_factor=self._rate_factor,
            stage_times=self._stage_times,
            **arguments,
        )
        self.pipe.record.notes += filter(None, [note])
        return self.pipe


def are_measured(stages: Any) -> bool:
    return isinstance(stages, Mapping) and stages.get("by") == "time"


def _translate_clip(arguments: dict[str, Any], stages: int | None) -> str:
    """Divide a clip of all gradients together among the stages of a method that does not flush.
    Return a sentence on it, "" if nothing was changed.
    """
    clip: Any = arguments.get("clip")
    # a number alone means all gradients together
    is_pair = isinstance(clip, (tuple, list)) and list(clip[1:]) == ["global"]
    norm: Any = clip[0] if is_pair else clip
    is_global = isinstance(norm, (int, float))
    if not is_global or METHODS[arguments["method"]].flushes:
        return ""
    if stages is None:
        raise BadInput(f"stages: {arguments['stages']}: a global clip is divided: must be a count")
    # the norm that each of equally large gradients has
    share = norm / math.sqrt(stages)
    arguments["clip"] = share, "stage"
    how = f"divided by the root of {stages}"
    return f"the global clip of {norm:g} is {share:.3g} for each stage ({how})"


def train_once(
    run: LoopFunction,
    arguments: Mapping[str, Any],
    rate_factor: float,
    seed: int,
    stage_times: StageTimes,
) -> Training:
    """Return one training of the loop with these arguments of `Pipeline`. Raise `BadInput` if the
    method cannot run it; the loop's own exceptions pass unchanged.

    The global generators are seeded, and have their states back afterwards.
    """
    maker = PipelineMaker(arguments, rate_factor, seed, stage_times)
    began = time.perf_counter()
    diverged = ""
    returned = None
    with restore_random_states():
        RandomStates.from_seed(seed).write()
        try:
            returned = run(maker, seed)
            if maker.pipe is not None:
                # the loop may have left it open, with updates in flight
                maker.pipe.close()
        except Divergence as error:
            diverged = error.reason
        finally:
            # a loop that has failed leaves its optimizer and model to others
            if maker.pipe is not None:
                maker.pipe.abort()
    if maker.pipe is None:
        raise BadInput("run: made no pipeline: must call pipeline(model, loss, optimizer)")
    training = maker.pipe.complete_record()
    training.diverged = diverged
    try:
        # there and back, so that a training from the folder equals one from here
        training.returned = json.loads(json.dumps(returned, default=_convert))
    except (TypeError, ValueError):
        # such as a dictionary by tuples
        training.returned = repr(returned)
    training.wall_seconds = time.perf_counter() - began
    return training


def _convert(value: Any) -> Any:
    """Return what the loop returned as JSON has it: numbers of tensors, the text of other
    objects.
    """
    is_array = isinstance(value, (torch.Tensor, np.ndarray, np.generic))
    return value.tolist() if is_array else repr(value)
