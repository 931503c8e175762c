"""Cut a config's model by the planner (`stages: auto` and `{count: P, by: hardware}`), and predict
a config's own cut.

All figures are predicted, for the config's method, microbatch, accumulation, replicas and
recomputation.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple, Sequence

import numpy as np
from torch import nn

from ipu_pipe.config.schema import PipelineConfig, import_outer
from ipu_pipe.errors import BadInput, raise_faults
from ipu_pipe.hardware.description import Hardware, read_hardware
from ipu_pipe.hardware.model_units import FEW, count_units
from ipu_pipe.hardware.precision import PRECISIONS
from ipu_pipe.hardware.unit_costs import Unit
from ipu_pipe.job.factories import resolve_head
from ipu_pipe.job.record import Job
from ipu_pipe.local.blocks import get_blocks
from ipu_pipe.model.balance import IntArray, StagePrices, find_best_cut
from ipu_pipe.model.batch import count_bytes, count_samples, take_samples
from ipu_pipe.model.loss import Loss, get_block_loss
from ipu_pipe.model.observation import group_weights, observe_execution
from ipu_pipe.model.stages import explain_too_many
from ipu_pipe.plan.blocks import BlockUnits, count_blocks
from ipu_pipe.plan.candidates import Candidate, list_schedules
from ipu_pipe.plan.planner import Bottleneck, find_bottleneck, find_least_memory, search
from ipu_pipe.plan.prediction import Prediction, Problem, predict_fastest
from ipu_pipe.schedule.methods import METHODS, Method, Timeline, resolve_method
from ipu_pipe.schedule.timelines import make_schedule
from ipu_pipe.text import format_bytes
from ipu_pipe.update.optimizer import count_most_moments


def make_problem(
    config: PipelineConfig,
    units: Sequence[Unit],
    entering: float,
    hardware: Hardware,
    moments: int,
    *,
    memory: float | None = None,
    precision: str | None = None,
) -> Problem:
    """Return the planning problem of a config's model.

    `entering`: bytes of a sample that enter the first unit. `moments`: the tensors of a weight's
    shape that the optimizer keeps. `memory`: usable bytes of a device,
    instead of the hardware's. `precision`: instead of the config's. Raise `BadInput` if the
    hardware has no rate for the precision.
    """
    precision = precision or config.precision
    # raises `BadInput` without a rate
    hardware.find_rate(precision)
    # the batch was counted beside the model as it is here; a run has the numbers of its precision
    scale = PRECISIONS[precision].data / units[0].number_bytes
    usable = hardware.device.usable_bytes if memory is None else memory
    ipu = config.backend.ipu
    off_chip = ipu is not None and ipu.streams_state
    streamed = off_chip and hardware.device.streaming_bytes is not None
    return Problem(
        tuple(units), entering * scale, hardware, usable, precision, moments, streamed=streamed
    )


def make_candidate(config: PipelineConfig, depth: int) -> Candidate:
    """Return the config as a candidate on `depth` devices."""
    row = METHODS[config.method]
    schedule = config.method_args.schedule
    return Candidate(
        config.method,
        depth,
        config.replicas,
        config.micro_batch_size,
        config.gradient_accumulation,
        config.recomputes,
        config.stages_per_device or row.stages_per_device,
        # None is the method's own schedule, as in the candidates of a search
        None if schedule in (None, row.pipeline.value) else Timeline(schedule),
    )


def choose_stages(
    config: PipelineConfig,
    method: Method,
    model: nn.Module,
    loss: Loss,
    example: tuple[Any, Any],
    moments: int,
    processes: int | None = None,
) -> list[str]:
    """Return the modules at which stages 1 and later begin, for a config whose `stages` leave them
    to the planner.

    The number of stages is `processes` (of each replica; None: not on processes), or `count`, or
    else the number with the greatest predicted throughput that the hardware has devices for. The
    cut balances the hardware's times within its memory, or FLOPs if the config names no hardware.
    Raise `BadInput` if no cut is possible.
    """
    stages_text = (
        "auto" if config.stages == "auto" else f"{{count: {config.stages['count']}, by: hardware}}"
    )
    unplanned = _explain_unplanned(method, config.hardware)
    if method.structure is not None and isinstance(method.structure.blocks, tuple):
        unplanned = "method_args.blocks names the blocks, each of which is a stage"
    if unplanned is not None:
        raise BadInput(f"stages: {stages_text}: {unplanned}: must be names, a count or finest")
    stages_per_device = method.stages_per_device
    count = None if processes is None else processes * stages_per_device
    if config.stages != "auto":
        # what the config says goes before the number of processes
        count = config.stages["count"]
    if count is not None and count % stages_per_device:
        raise BadInput(
            f"stages: {stages_text}: must be a multiple of the {stages_per_device} stages on each "
            f"device of {method.name}"
        )
    if count is None and method.structure is not None and method.structure.blocks is not None:
        assert isinstance(method.structure.blocks, int)
        # each block is a stage
        count = method.structure.blocks
    x, y = example
    # figures are for a sample, so that a few are enough
    units = count_units(model, take_samples(x, FEW), (), loss, take_samples(y, FEW)).units
    if count is not None and count <= len(units):
        most = len(group_weights(model, observe_execution(model, take_samples(x, FEW))))
        # as a cut by a count would refuse it
        raise_faults([explain_too_many(count, most)] if count > most else [])
    blocks = _count_blocks(config, method, model, x, units)
    starts: Sequence[int] | None
    if config.hardware is None:
        starts = _cut_by_flops(units, count, blocks)
        if starts is None:
            raise BadInput(
                f"stages: {stages_text}: {count} stages: the model has {len(units)} places where a "
                f"stage may begin"
            )
    else:
        starts = _cut_by_times(config, method, units, blocks, x, moments, stages_text, count)
    return [units[start].name for start in starts[1:]]


def _explain_unplanned(method: Method, hardware: Any) -> str | None:
    """Return why the planner cannot cut or predict a method's stages on `hardware` (as in a
    config), None if it can.
    """
    structure = method.structure
    row = METHODS[method.name]
    if method.order is not None and (not method.flushes or method.pipeline is Timeline.ROWS):
        return f"{method.name} is not planned by device"
    if (
        method.order is not None
        and hardware is not None
        and read_hardware(hardware, "hardware").lockstep
    ):
        return f"devices in lock-step do not run {method.name}"
    order = method.order
    # any number of stages on a device can be planned
    if order is not None and row.order is not None:
        order = replace(order, stages_per_device=row.order.stages_per_device)
    if method.pipeline not in (row.pipeline, *list_schedules(row)) or order != row.order:
        return f"the planner knows {method.name} without method_args that change its schedule"
    if structure is None:
        return None
    if structure.overlap or structure.layers:
        return (
            f"the planner knows pipelines of one loss and a block a stage, not the blocks of "
            f"{method.name}"
        )
    return None


def _count_blocks(
    config: PipelineConfig, method: Method, model: nn.Module, x: Any, units: Sequence[Unit]
) -> BlockUnits | None:
    """Return the additional costs of blocks with their own losses and the config's heads, None if
    the method has no blocks.
    """
    if method.structure is None:
        return None
    return count_blocks(model, take_samples(x, FEW), units, resolve_head(config))


def _cut_by_flops(
    units: Sequence[Unit], count: int | None, blocks: BlockUnits | None
) -> list[int] | None:
    assert count is not None
    work = [_sum_flops(unit) for unit in units]
    heads = np.zeros(len(units) + 1)  # (n + 1,)
    spared = np.zeros(len(units) + 1)  # (n + 1,)
    if blocks is not None:
        # by the unit before which the block ends; nothing ends at 0, and the last block has no head
        heads[1:-1] = [_sum_flops(head) for head in blocks.heads]
        # by the unit with which the block begins; the first one computes no gradient of the data
        # anyway
        spared[1:-1] = [
            _sum_flops(unit) - _sum_flops(first) for unit, first in zip(units[1:], blocks.first[1:])
        ]
    sums = np.concatenate([[0.0], np.cumsum(work)])

    def price(first: IntArray, end: IntArray) -> StagePrices:
        flops = sums[end] - sums[first] + heads[end] - spared[first]
        # the same wherever the stage is
        return lambda k: flops

    # what a unit adds to a stage at the least
    return find_best_cut((np.array(work) - spared[:-1]).tolist(), count, price)


def _sum_flops(unit: Unit) -> float:
    return unit.forward_flops + unit.backward_flops


def _cut_by_times(
    config: PipelineConfig,
    method: Method,
    units: Sequence[Unit],
    blocks: BlockUnits | None,
    x: Any,
    moments: int,
    stages_text: str,
    count: int | None,
) -> Sequence[int]:
    assert config.hardware is not None
    hardware = read_hardware(config.hardware, "hardware")
    width = config.replicas
    if count is None and width > hardware.devices:
        raise BadInput(
            f"replicas: {width}: stages: {stages_text}: hardware {hardware.name} has "
            f"{hardware.devices} devices"
        )
    problem = make_problem(config, units, _count_sample_bytes(x), hardware, moments)
    problem = replace(problem, blocks=blocks)
    stages_per_device = method.stages_per_device
    if count is not None and count <= len(units):
        shortage = _explain_shortage(config, hardware, count, stages_per_device)
        raise_faults([shortage] if shortage is not None else [])
    # the method may refuse some of these, as 2BW refuses more stages than microbatches
    depths: Sequence[int] = range(
        1, min(hardware.devices // width, len(units) // stages_per_device) + 1
    )
    runnable = [
        depth
        for depth in depths
        if count is None and _can_run(config, method, depth * stages_per_device)
    ]
    if count is not None:
        # one number is not tried: if it cannot run, the build says why
        depths = runnable = [count // stages_per_device]
    candidates = [make_candidate(config, depth) for depth in runnable]
    if not candidates and depths:
        # raise the method's own reason if it refuses every number of stages
        make_schedule(
            method,
            max(depths) * stages_per_device,
            config.gradient_accumulation,
            config.gradient_accumulation,
        )
    best = search(problem, candidates, 1).best
    if best:
        return best[0].starts
    # for the message alone: how much memory would do
    least = find_least_memory(problem, candidates)
    if least is None:
        raise BadInput(
            f"stages: {stages_text}: the model has {len(units)} places where a stage may begin"
        )
    raise BadInput(
        f"stages: {stages_text}: no cut fits hardware {hardware.name}, "
        f"{format_bytes(int(problem.memory_bytes))} usable on each"
        f" device: {least[1].depth} stages need {format_bytes(int(least[0]))} (predicted)"
    )


def _can_run(config: PipelineConfig, method: Method, stages: int) -> bool:
    """Return whether the method and the backend would run the config on `stages` stages."""
    try:
        make_schedule(method, stages, config.gradient_accumulation, config.gradient_accumulation)
    except BadInput:
        return False
    # by name, because a backend's folder is above this one
    return not import_outer("check_stages")(config, method, stages)


def _count_sample_bytes(x: Any) -> float:
    return count_bytes(x) / count_samples(x)


class ConfigCut(NamedTuple):
    """The prediction of a config's stages on its hardware, with its bottleneck."""

    problem: Problem
    prediction: Prediction
    bottleneck: Bottleneck


def _explain_shortage(
    config: PipelineConfig, hardware: Hardware, stages: int, stages_per_device: int
) -> str | None:
    """Return the fault of a config whose stages and replicas need more devices than the hardware
    has; None if they fit.
    """
    on_device = f", {stages_per_device} on a device," if stages_per_device > 1 else ""
    how = f"stages {stages}{on_device} x replicas {config.replicas}"
    return hardware.explain_shortage(stages // stages_per_device * config.replicas, how)


def _explain_unpredicted(job: Job) -> str | None:
    """Return why the stages of a job cannot be predicted on any hardware; None if they can."""
    unplanned = _explain_unplanned(job.method, job.config.hardware)
    if unplanned is not None:
        return f"method: {unplanned}"
    if job.partition.spread:
        return (
            "stages: single weights are spread over them: the planner predicts stages of whole "
            "modules"
        )
    ipu = job.config.backend.ipu
    # the IPUs of a config may hold several stages each
    devices = set(job.placement) if ipu is None or ipu.ipus is None else set(ipu.ipus)
    if len(devices) < len(job.partition) // job.method.stages_per_device:
        return "stages: neighbours share a device: the planner predicts a device for each"
    return None


def list_shortages(job: Job) -> list[str]:
    """Return the fault of a job, whose config names hardware, that would be predicted on more
    devices than this has; [] without a prediction."""
    assert job.config.hardware is not None
    if _explain_unpredicted(job) is not None:
        return []
    hardware = read_hardware(job.config.hardware, "hardware")
    shortage = _explain_shortage(
        job.config, hardware, len(job.partition), job.method.stages_per_device
    )
    return [] if shortage is None else [shortage]


def list_counted_shortages(config: PipelineConfig) -> list[str]:
    """Return the fault of `list_shortages` before a model is made, for a config that counts its
    stages; [] if the stages must be made first.
    """
    ipu = config.backend.ipu
    shares_devices = ipu is not None and ipu.ipus is not None
    if config.hardware is None or config.backend.facts.uses_processes or shares_devices:
        return []
    # stage 0 begins with the model and is not named
    stages = len(config.stages) + 1 if isinstance(config.stages, list) else config.stages
    method = resolve_method(config.method, config.method_settings())
    if not isinstance(stages, int) or _explain_unplanned(method, config.hardware) is not None:
        return []
    hardware = read_hardware(config.hardware, "hardware")
    shortage = _explain_shortage(config, hardware, stages, method.stages_per_device)
    return [] if shortage is None else [shortage]


def predict_config_cut(job: Job) -> ConfigCut:
    """Predict the stages of a job whose config names hardware. Raise `BadInput` if that is not
    possible.
    """
    config, (x, y) = job.config, job.example
    assert config.hardware is not None
    unpredicted = _explain_unpredicted(job)
    raise_faults([unpredicted] if unpredicted is not None else list_shortages(job))
    hardware = read_hardware(config.hardware, "hardware")
    depth = len(job.partition) // job.method.stages_per_device
    begins = job.partition.begin_names()
    local_blocks = get_blocks(job.model)
    # the job's own heads are left out, since `_count_blocks` adds a head at every place of a cut
    model = job.model if local_blocks is None else local_blocks.model
    loss = get_block_loss(job.loss)
    units = count_units(model, take_samples(x, FEW), begins, loss, take_samples(y, FEW)).units
    blocks = _count_blocks(config, job.method, model, x, units)
    problem = make_problem(
        config, units, _count_sample_bytes(x), hardware, count_most_moments(job.full_optimizer)
    )
    problem = replace(problem, blocks=blocks)
    names = [unit.name for unit in units]
    prediction = predict_fastest(
        problem, make_candidate(config, depth), [0, *map(names.index, begins)]
    )
    return ConfigCut(problem, prediction, find_bottleneck(problem, prediction))


def predict_rate(job: Job) -> tuple[str, float] | None:
    """Return the hardware's name and the predicted samples per second; None without hardware or
    without a prediction.
    """
    if job.config.hardware is None:
        return None
    try:
        # a rate is an addition to the closing lines: none is no fault
        cut = predict_config_cut(job)
    except BadInput:
        return None
    return cut.problem.hardware.name, cut.prediction.samples_per_second
