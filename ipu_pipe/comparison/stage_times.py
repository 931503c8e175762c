"""One set of stage times for all methods of a comparison, with which `Job.play_updates` plays their
schedules.

The times are measured once, at the first step of the first training, or predicted for hardware. A
method with other microbatches, auxiliary heads or recomputation gets them in proportion to its
stages' FLOPs, so that a difference between two methods is never one between two measurements.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, replace
from typing import Any, Sequence

import numpy as np
import torch

from ipu_pipe.backends.interface import Engine
from ipu_pipe.errors import BadInput, RunFault
from ipu_pipe.job.record import Job
from ipu_pipe.model.timing import FloatArray, StageSeconds, combine_spreads
from ipu_pipe.plan.config_cut import predict_config_cut
from ipu_pipe.schedule.clock import Costs


@dataclass(frozen=True)
class Reference:
    """The measured times of each stage for a microbatch of `samples`.

    begins: the modules at which the second and later stages begin. forward, backward, update,
    spread: as in `StageSeconds`, backwards without recomputation. flops: of each stage's
    forward and of its backward.
    """

    begins: Sequence[str]
    samples: int
    forward: Sequence[float]
    backward: Sequence[float]
    update: Sequence[float]
    spread: Sequence[float]
    flops: Sequence[Sequence[float]]
    how: str


class StageTimes:
    """The stage times of a comparison, for all methods.

    hardware: the devices that times are predicted for; None: they are measured here. reference:
    what was measured; None before the first training. measuring_seconds: how long that took.
    """

    def __init__(self, hardware: Any = None) -> None:
        self.hardware = hardware
        self.reference: Reference | None = None
        self.measuring_seconds = 0.0

    def make_costs(self, job: Job, engine: Engine) -> Costs:
        """Return the costs of a training's stages for the clock. Raise `BadInput` if the method has
        no schedule to play, or its times cannot be predicted for the hardware.
        """
        if job.method.history is not None:
            why = "updates single stages at random times, so no schedule gives its time"
            raise BadInput(f"method: {job.method.name}: {why}")
        if self.hardware is not None:
            config = job.config.model_copy(update={"hardware": self.hardware})
            # the training itself has no hardware: its stages must not be planned for it
            return predict_config_cut(replace(job, config=config)).prediction.costs
        if self.reference is None:
            began = time.perf_counter()
            self.reference = _make_reference(job, measure_stages(engine))
            self.measuring_seconds = time.perf_counter() - began
        return _scale(self.reference, job)

    @property
    def are_known(self) -> bool:
        """Return whether all trainings from now on have the same times."""
        return self.hardware is not None or self.reference is not None

    @property
    def spread(self) -> float:
        """Return how far the time of a pipeline may be off by chance, as a share of it; 0 if the
        times are predicted.
        """
        if self.reference is None:
            return 0.0
        passes = np.add(self.reference.forward, self.reference.backward)
        return combine_spreads(passes.tolist(), self.reference.spread)

    def describe(self) -> str:
        """Return a sentence on the origin of the times."""
        if not self.are_known:
            return "There are no times: each training diverged at its first step."
        if self.reference is None:
            return f"Times are predicted for {self.hardware}, messages included."
        return (
            f"Times are modelled from stages measured on this machine by one thread "
            f"({self.reference.how}; within {self.spread:.1%}). Messages take no time."
        )

    def export(self) -> dict[str, Any] | None:
        """Return what was measured as plain data, None if nothing was."""
        return None if self.reference is None else asdict(self.reference)


def measure_stages(engine: Engine) -> StageSeconds:
    """Measure the stages. Raise `RunFault` if that is not possible."""
    # on a busy machine several threads wait for each other, by any amount; one thread's processor
    # time is its own
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        measured = engine.profile()
    finally:
        torch.set_num_threads(threads)
    if measured is None or not measured.forward:
        why = "no times" if measured is None else measured.how
        raise RunFault(f"compare: {why}: give hardware, for which times are predicted")
    return measured


def _make_reference(job: Job, measured: StageSeconds) -> Reference:
    backward = np.array(measured.backward)
    # methods that always recompute were timed with it
    if job.method.segments is not None:
        backward -= measured.forward
    return Reference(
        job.partition.begin_names(),
        job.config.micro_batch_size,
        measured.forward,
        backward.tolist(),
        measured.update,
        measured.spread,
        _count_flops(job),
        measured.how.replace("after training", "at the first step"),
    )


def _count_flops(job: Job) -> tuple[Sequence[float], Sequence[float]]:
    """Return the FLOPs of the forward and of the backward of each stage's microbatch."""
    footprint = job.footprint
    # only the shares of stages count, which forwards have, too, where backwards were not counted
    return footprint.forward_flops, footprint.backward_flops or footprint.forward_flops


def _scale(reference: Reference, job: Job) -> Costs:
    """Return the costs of a job's stages: the measured times in proportion to FLOPs, or to samples
    where a stage has none.
    """
    stage_of = _group_stages(reference, job)
    by_samples = job.config.micro_batch_size / reference.samples

    def scale(
        seconds: Sequence[float], before: Sequence[float], flops: Sequence[float]
    ) -> FloatArray:
        # (stages of the job,): measured stages that make one of its own are added up
        flops_before = np.bincount(stage_of, before)
        shares = np.full(len(flops), by_samples)
        np.divide(flops, flops_before, out=shares, where=flops_before > 0)
        return np.bincount(stage_of, seconds) * shares

    forward_flops, backward_flops = _count_flops(job)
    forward = scale(reference.forward, reference.flops[0], forward_flops)
    backward = scale(reference.backward, reference.flops[1], backward_flops)
    # a backward runs the forward once more
    if job.config.recomputes or job.method.segments is not None:
        backward = backward + forward
    # not scaled: an update takes as long for any microbatch
    update = np.bincount(stage_of, reference.update)
    return Costs(forward.tolist(), backward.tolist(), update.tolist())


def _group_stages(reference: Reference, job: Job) -> list[int]:
    """Return the job's stage of each measured stage: a method whose blocks are several stages has
    fewer. Raise `BadInput` if it is cut elsewhere.
    """
    begins = job.partition.begin_names()
    stage_of = [0]
    for name in reference.begins:
        # a measured stage at whose module this method begins none belongs to the one before
        stage_of.append(stage_of[-1] + (name in begins))
    if stage_of[-1] + 1 != len(job.partition):
        why = "is cut at other modules than the first method: must have the same stages"
        raise BadInput(f"stages: {job.method.name} {why}")
    return stage_of
