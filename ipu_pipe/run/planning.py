"""Build a job for its figures, not to run it: on the meta device if that gives the same figures;
and rank plans of a config.

Weights and microbatches then have shapes but no memory, so a plan of any model takes a second. Two
checks need values and are
left to the run: that the pieces of the model equal the whole, and that the CPU has all operations
in the precision.
"""

from __future__ import annotations

import platform
from dataclasses import replace
from typing import Any, Callable, NamedTuple, Sequence

import torch
from torch import nn

from ipu_pipe.config.schema import Config
from ipu_pipe.config.sections import OWN, DataConfig
from ipu_pipe.data.loaders import LoaderData
from ipu_pipe.data.sets import require_known_options
from ipu_pipe.data.sources import split_batch
from ipu_pipe.data.stand_in import ENTRY, describe_stand_in, find_missing_folder
from ipu_pipe.errors import BadInput, raise_faults
from ipu_pipe.hardware.description import read_hardware
from ipu_pipe.hardware.model_units import CountedUnits, count_units, measure_units
from ipu_pipe.hardware.precision import PRECISIONS
from ipu_pipe.job.factories import (
    count_config_moments,
    make_data,
    make_loss,
    make_model,
    resolve_head,
)
from ipu_pipe.job.overrides import Overrides
from ipu_pipe.job.record import PlannedJob
from ipu_pipe.model.batch import (
    count_bytes,
    count_numbers,
    count_samples,
    map_tensors,
    take_samples,
)
from ipu_pipe.model.meta import build_on_meta, compute_on_meta
from ipu_pipe.pipeline.build import get_take_of_heads
from ipu_pipe.plan.answer import convert_to_json
from ipu_pipe.plan.blocks import BlockUnits, count_blocks
from ipu_pipe.plan.candidates import choose_methods
from ipu_pipe.plan.config_cut import list_counted_shortages, make_problem
from ipu_pipe.plan.planner import SHOWN, make_plan
from ipu_pipe.plan.prediction import Problem
from ipu_pipe.run.build import build
from ipu_pipe.run.callbacks import make_callbacks, require_supported_callbacks
from ipu_pipe.run.setup import choose_batch_size, set_up
from ipu_pipe.schedule.methods import METHODS
from ipu_pipe.text import suggest

# elements of a model and a microbatch up to which real tensors cost little
SMALL = 300_000


def build_for_planning(config: Config) -> PlannedJob:
    """Build the job that `config` describes for its figures only. Raise `BadInput` as
    `run.build.build` does.
    """
    # building a model by its values, which reports all other faults, may take half a minute
    raise_faults(list_counted_shortages(config))
    config, replaced = replace_missing_data(config)
    # for their methods alone: nothing of the user's is constructed
    called = make_callbacks(config, None, empty=True)
    job = _build_by_shape(config) or build(config)
    require_supported_callbacks(job, called)
    job.note = "\n".join(filter(None, [replaced, job.note]))
    return job


def replace_missing_data(config: Config) -> tuple[Config, str]:
    """Return the config with random data of the set's shape if the set's files are missing, and a
    line that says so, '' if they are there.
    """
    options = config.data.options()
    # random data have no folder
    folder = find_missing_folder(config.data.name, options.pop("root", None))
    if folder is None:
        return config, ""
    known = {key: value for key, value in options.items() if key != "validation"}
    # a wrong option must be refused here as it would be beside the files
    require_known_options(config.data.name, known)
    keys = {"name": ENTRY, "of": config.data.name, **options}
    data = DataConfig.model_validate(keys)
    line = describe_stand_in(config.data.name, folder)
    return config.model_copy(update={"data": data}), line


def _build_by_shape(config: Config) -> PlannedJob | None:
    """Build the job on the meta device; return None if it needs values, if it is small, or if it
    has a fault.
    """
    # a measurement needs values, and so do weights from a file
    times = isinstance(config.stages, dict) and config.stages.get("by") == "time"
    if (
        (config.backend.facts.emulates or config.backend.facts.trains_on)
        and config.backend.device == "cpu"
        and not config.init_from
        and not times
    ):
        try:
            with compute_on_meta():
                job = build(config, by_shape=True)
            numbers = count_numbers(job.example[0]) + sum(p.numel() for p in job.model.parameters())
            # the meta device does not tell the costs of recurrent layers
            if numbers > SMALL and not any(
                isinstance(module, nn.RNNBase) for module in job.model.modules()
            ):
                return job
        # the model may need values; `build` reports any other fault
        except Exception:
            pass
    return None


class ConfigUnits(NamedTuple):
    """The units of a config's model: their costs, the bytes of a sample that enter the first one,
    the samples of a microbatch, and the additional costs of local blocks, None unless they were
    asked for.
    """

    costed: CountedUnits
    entering: float
    samples: int
    blocks: BlockUnits | None = None


def count_config_units(config: Config, measured: bool = False, blocks: bool = False) -> ConfigUnits:
    """Count the costs of the units of the config's model and loss. Raise `BadInput`.

    They are counted on the meta device if the model allows it. `measured`: they are timed on this
    machine with microbatches of the config's size and of twice that (for a loader: its own size and
    half of that). `blocks`: add the costs of local losses.
    """
    config, _ = replace_missing_data(config)
    model, costed, x, samples = _measure_units(config) if measured else _count_units(config)
    entering = count_bytes(x) / count_samples(x)
    if not blocks:
        return ConfigUnits(costed, entering, samples)
    counted = count_blocks(
        model,
        x,
        costed.units,
        resolve_head(config),
        get_take_of_heads(make_loss(config, Overrides()), config.method),
    )
    return ConfigUnits(costed, entering, samples, counted)


def _count_units(config: Config) -> tuple[nn.Module, CountedUnits, Any, int]:
    loss = make_loss(config, Overrides())
    data = make_data(config)
    samples = choose_batch_size(config, data)
    # a loader has batches of one size; of other sources two samples are enough to count by
    batch = data.train_batch(0, 0, samples if isinstance(data, LoaderData) else 2)
    x, y = split_batch(
        batch, getattr(data, "labels", None), config.loss == OWN, getattr(loss, "asks", ())
    )
    try:
        with build_on_meta():
            model = make_model(config)
        return (
            model,
            count_units(
                model, map_tensors(_drop_values, x), (), loss, map_tensors(_drop_values, y)
            ),
            x,
            samples,
        )
    # the model may read values, which meta tensors do not have; the next lines raise any other
    # error again
    except Exception:
        model = make_model(config)
        return model, count_units(model, x, (), loss, y), x, samples


def _drop_values(t: torch.Tensor) -> torch.Tensor:
    return t.to("meta")


def _measure_units(config: Config) -> tuple[nn.Module, CountedUnits, Any, int]:
    threads = torch.get_num_threads()
    try:
        setup = set_up(config)
        samples = setup.config.micro_batch_size
        largest = samples if isinstance(setup.data, LoaderData) else 2 * samples
        x, y = setup.prepare_batch(setup.data.train_batch(0, 0, largest))
        costed = count_units(setup.model, x, (), setup.loss, y)
        # of two sizes, by which the planner predicts others
        for size in sorted({max(1, largest // 2), largest}):
            costed = measure_units(
                costed, setup.model, setup.loss, take_samples(x, size), take_samples(y, size)
            )
    finally:
        # set_up has set those of the config
        torch.set_num_threads(threads)
    return setup.model, costed, x, samples


# ---- plans


class PlanningRequest(NamedTuple):
    """What to plan for; None: as in the config. The fields are the arguments of `plan_config`."""

    hardware: str | None = None
    devices: int | None = None
    memory: float | None = None
    methods: Sequence[str] | None = None
    batch: int | None = None
    precision: str | None = None
    measure: bool | None = None


class PlanningProblem(NamedTuple):
    """The planning problem of a config: the problem, the methods to rank, the most samples of an
    update, and a description of how the model's costs were determined."""

    problem: Problem
    methods: list[str]
    batch: int
    how: str


def make_planning_problem(
    config: Config, request: PlanningRequest, say: Callable[[str], None] = lambda text: None
) -> PlanningProblem:
    """Return the planning problem of a config. Raise `BadInput`."""
    wanted_hardware = config.hardware if request.hardware is None else request.hardware
    # a fault names what the user has written
    key = "hardware" if request.hardware is None else "--hardware"
    devices = request.devices
    if wanted_hardware is None:
        raise BadInput(
            "--hardware: missing, and the config names none: must be a name of configs/hardware/ "
            "or a file"
        )
    described = read_hardware(wanted_hardware, key)
    if devices is not None:
        if described.devices < devices <= (described.most_devices or devices):
            say(
                f"--devices: {devices}: hardware {described.name} describes {described.devices}: "
                f"its links join the others"
            )
        described = described.with_devices(devices)
    chosen = choose_methods(config.method, request.methods, described.lockstep, say)
    precision = request.precision or config.precision
    if precision not in PRECISIONS:
        raise BadInput(
            f"--precision: {precision}: must be one of "
            f"{', '.join(PRECISIONS)}{suggest(precision, PRECISIONS)}"
        )
    usable = None
    if request.memory is not None:
        # --memory is all memory of a device, as `memory_bytes` is
        usable = request.memory * described.device.usable_share.value
    machine = described.measured_on
    is_this = machine is not None and (machine.name, machine.device) == (
        platform.node(),
        config.backend.device,
    )
    # a device of that description was a process of so many threads
    if machine is not None and is_this and config.backend.threads is None:
        config = config.model_copy(
            update={"backend": config.backend.model_copy(update={"threads": machine.threads})}
        )
    # other methods have no auxiliary heads to be counted
    of_blocks = any(METHODS[name].structure is not None for name in chosen)
    costed, entering, samples, blocks = count_config_units(
        config, is_this if request.measure is None else request.measure, of_blocks
    )
    problem = make_problem(
        config,
        costed.units,
        entering,
        described,
        count_config_moments(config),
        memory=usable,
        precision=precision,
    )
    greatest = request.batch or samples * config.gradient_accumulation * config.replicas
    return PlanningProblem(replace(problem, blocks=blocks), chosen, greatest, costed.how)


def plan_config(
    config: Config,
    hardware: str | None = None,
    *,
    devices: int | None = None,
    memory: float | None = None,
    methods: Sequence[str] | None = None,
    batch: int | None = None,
    precision: str | None = None,
    measure: bool | None = None,
    top: int = SHOWN,
) -> dict[str, Any]:
    """Rank configurations of a config's model by predicted samples per second; return the record of
    `tools/plan.py --json`.

    `hardware`: a name of configs/hardware or a file, by default the config's; `devices`: their
    number; `memory`: bytes of a device; `methods`: the methods to rank; `batch`: the most samples
    of an update; `measure`: time the model's parts on this machine instead of counting FLOPs, by
    default if the hardware is this machine. The record has no plan if none fits. Raise `BadInput`
    as the command does.
    """
    request = PlanningRequest(hardware, devices, memory, methods, batch, precision, measure)
    problem, chosen, greatest, _ = make_planning_problem(config, request)
    return convert_to_json(make_plan(problem, chosen, problem.hardware.devices, greatest, top))
