"""The poptorch.Options of a run. Only the functions import PopTorch.

Source: PopTorch, branch sdk-release-3.4 (poptorch/python/options.py). Not run on hardware.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any, Callable, Mapping, Sequence

from ipu_pipe.backends.ipu.config import IpuConfig
from ipu_pipe.backends.ipu.placement import PIPELINED, Placement, get_execution
from ipu_pipe.data import DataSource
from ipu_pipe.job.record import Job
from ipu_pipe.replay.work import require_finite
from ipu_pipe.schedule.methods import Method

# popart's numbers
RECOMPUTATION = {"none": 0, "standard": 1, "norm_only": 2, "pipeline": 3, "recompute_all": 4}
# those that an inference model does not have
TRAINING_ALONE = (
    "Training",
    "setAccumulatorLocation",
    "setOptimizerLocation",
    "useReplicatedTensorSharding",
)


@dataclass(frozen=True)
class IpuOptions:
    """The options of the backend, by their names in a config.

    `data`: the source that a loader's worker reads; `updates`: of the run, up to which it reads.
    `require_finite(k, losses)`: raises `Divergence`.
    """

    ipu: IpuConfig
    precision: str
    replicas: int
    micro_batch_size: int
    gradient_accumulation: int
    recompute: bool
    data: DataSource
    updates: int
    require_finite: Callable[[int, Sequence[float]], None]

    @classmethod
    def of(cls, job: Job) -> IpuOptions:
        """Return the options of a job."""
        config = job.config
        return cls(
            config.ipu,
            config.precision,
            config.replicas,
            config.micro_batch_size,
            config.gradient_accumulation,
            config.recompute,
            job.data,
            job.updates,
            partial(require_finite, job),
        )


def make_options(
    chosen: IpuOptions,
    method: Method,
    placement: Placement,
    training: bool,
    seed: int,
    base: Any | None = None,
    ipu_id: int | None = None,
) -> Any:
    """Return the poptorch.Options of a run's training or inference model.

    `base`: popdist's options, which have the replicas and processes already. `ipu_id`: an id of
    gc-info, None for any device.
    """
    import poptorch
    import torch

    ipu = chosen.ipu
    execution = get_execution(method)
    assert execution is not None, "check_method refuses a method that PopTorch does not run"
    options = poptorch.Options() if base is None else base
    if base is None:
        # under mpirun PopTorch would take this process for one of several
        options.Distributed.disable()
        options.replicationFactor(chosen.replicas)
        if ipu_id is not None:
            options.useIpuId(ipu_id)
    stages = [
        # neighboring stages on one IPU are one stage for PopTorch
        poptorch.Stage(*map(name_stage, stages)).ipu(index)
        for index, stages in placement.poptorch_stages
    ]
    options.setExecutionStrategy(getattr(poptorch, execution)(*stages))
    is_pipeline = execution == PIPELINED
    output_mode = find_member(poptorch.OutputMode, ipu.output_mode if training else "all")
    # by default a call of an evaluation has one microbatch per stage, which keeps all stages busy
    iterations = ipu.inference_device_iterations or (placement.forward_stages if is_pipeline else 1)
    settings = {
        "autoRoundNumIPUs": ipu.auto_round_num_ipus,
        "broadcastBuffers": ipu.broadcast_buffers,
        "deviceIterations": ipu.device_iterations if training else iterations,
        "enableExecutableCaching": ipu.executable_cache,
        "modelName": "training" if training else "inference",
        "outputMode": output_mode,
        "randomSeed": seed,
        "setAvailableMemoryProportion": _share_memory(
            ipu.available_memory_proportion, placement.ipu_count
        ),
        # PopTorch advises against stochastic rounding in inference
        "Precision.enableStochasticRounding": ipu.stochastic_rounding and training,
        "Precision.setPartialsType": getattr(torch, ipu.partials),
        "_Popart.setEngineOptions": _make_engine_options(ipu) or None,
    }
    popart = ipu.popart_options.model_dump()
    if "convolutionOptions" in popart:
        # they replace those of setPartialsType
        popart["convolutionOptions"] = {
            "partialsType": ipu.partials,
            **popart["convolutionOptions"],
        }
    if training:
        settings["Training.gradientAccumulation"] = chosen.gradient_accumulation
        settings["Training.accumulationAndReplicationReductionType"] = poptorch.ReductionType.Mean
        is_split = is_pipeline and placement.ipu_count > 1
        # an option that the config names wins over one that follows from its other keys
        popart = {**_choose_recomputation(chosen, is_split), **popart}
    for name, value in settings.items():
        # None leaves PopTorch's own default
        if value is not None:
            attrgetter(name)(options)(value)
    for name, value in popart.items():
        options._Popart.set(name, value)
    # last, so that an option by its own name wins
    apply_options(options, ipu.options.model_dump(), training)
    return options


def apply_options(target: Any, options: Mapping[str, Any], training: bool) -> None:
    """Call the methods of a poptorch.Options, or of a part of it, by their names."""
    import poptorch

    enums = (poptorch.ConnectionType, poptorch.SyncPattern, poptorch.MeanReductionStrategy)
    members = {name: member for one in enums for name, member in one.__members__.items()}
    for name, value in options.items():
        if name in TRAINING_ALONE and not training:
            continue
        if not isinstance(value, dict):
            getattr(target, name)(members.get(value, value))
        elif name.startswith("set"):
            location = poptorch.TensorLocationSettings()
            apply_options(location, value, training)
            getattr(target, name)(location)
        else:
            apply_options(getattr(target, name), value, training)


def _choose_recomputation(chosen: IpuOptions, is_split: bool) -> dict[str, Any]:
    """Return PopART's options of recomputation. A pipeline of several IPUs recomputes by default."""
    mode = chosen.ipu.recomputation
    if mode == "auto" and chosen.recompute and not is_split:
        mode = "standard"
    popart: dict[str, Any] = {} if mode == "auto" else {"autoRecomputation": RECOMPUTATION[mode]}
    if mode in ("standard", "recompute_all") and not is_split:
        popart["explicitRecomputation"] = True
    return popart


def find_member(enum: Any, key: str) -> Any:
    """Return the member of a PopTorch enum for a config's `key`: shared_memory is SharedMemory."""
    return next(getattr(enum, name) for name in dir(enum) if name.lower() == key.replace("_", ""))


def name_stage(stage: int) -> str:
    """Return the name of the block with which a stage begins."""
    return f"stage{stage}"


def _share_memory(share: Any, ipus: int) -> dict[str, float] | None:
    shares = share if isinstance(share, list) else [share] * ipus
    return (
        None if share is None else {f"IPU{index}": float(one) for index, one in enumerate(shares)}
    )


def _make_engine_options(ipu: IpuConfig) -> dict[str, str]:
    """Return Poplar's engine options in one map, because setEngineOptions replaces the whole
    map.
    """
    folder = ipu.profile.directory
    if folder is None:
        return ipu.engine_options
    report = {
        # a model that does not fit is compiled all the same, so that its profile shows why
        "debug.allowOutOfMemory": "true",
        "autoReport.all": "true",
        "autoReport.directory": folder,
    }
    return {**report, **ipu.engine_options}
