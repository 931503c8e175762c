"""The poptorch.Options of a run. Only the functions import PopTorch.

Source: PopTorch, branch sdk-release-3.4 (poptorch/python/options.py). Not run on hardware.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any, Callable, Sequence

from ipu_pipe.backends.ipu.config import LOCATIONS, IpuConfig, TensorLocations
from ipu_pipe.backends.ipu.placement import PIPELINED, Placement, get_execution
from ipu_pipe.data import DataSource
from ipu_pipe.job.record import Job
from ipu_pipe.replay.work import require_finite
from ipu_pipe.schedule.methods import Method

# popart's numbers
RECOMPUTATION = {"none": 0, "standard": 1, "norm_only": 2, "pipeline": 3, "recompute_all": 4}
# names of the models and of their profile folders
TRAINING = "training"
INFERENCE = "inference"


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
        poptorch.Stage(*map(name_stage, stages)).ipu(index)
        for index, stages in placement.poptorch_stages
    ]
    options.setExecutionStrategy(getattr(poptorch, execution)(*stages))
    is_pipeline = execution == PIPELINED
    is_split = is_pipeline and placement.ipu_count > 1
    # a pipeline recomputes by default
    mode = ipu.recomputation
    if mode == "auto" and chosen.recompute and not is_split:
        mode = "standard"
    settings = _list_settings(ipu, training)
    settings["randomSeed"] = seed
    settings["setAvailableMemoryProportion"] = _share_memory(
        ipu.available_memory_proportion, placement.ipu_count
    )
    popart: dict[str, Any] = {"defaultPrefetchBufferingDepth": ipu.prefetch_buffering_depth}
    if ipu.convolution_dithering:
        # set the partials type again, because setConvolutionDithering would drop it
        popart["convolutionOptions"] = {"partialsType": ipu.partials, "enableConvDithering": "true"}
    if training:
        settings.update(_list_training_settings(ipu, chosen.gradient_accumulation))
        popart["autoRecomputation"] = RECOMPUTATION.get(mode)
        popart["explicitRecomputation"] = (
            mode in ("standard", "recompute_all") and not is_split
        ) or None
        period = [ipu.output_return_period] if ipu.output_mode == "every_n" else []
        options.outputMode(find_member(poptorch.OutputMode, ipu.output_mode), *period)
    else:
        # by default a call of an evaluation has one microbatch per stage, which keeps all stages
        # busy
        settings["deviceIterations"] = ipu.inference_device_iterations or (
            placement.forward_stages if is_pipeline else 1
        )
        options.outputMode(poptorch.OutputMode.All)
    for name, value in settings.items():
        if value is not None:
            attrgetter(name)(options)(value)
    set_here = {name: value for name, value in popart.items() if value is not None}
    for name, value in {**set_here, **ipu.popart_options}.items():
        options._Popart.set(name, value)
    _set_locations(options, ipu.tensor_locations, training)
    return options


def _list_settings(ipu: Any, training: bool) -> dict[str, Any]:
    """Return the settings that a training and an inference model share, option -> value; None
    leaves PopTorch's default.
    """
    import poptorch
    import torch

    return {
        "autoRoundNumIPUs": ipu.auto_round_num_ipus,
        "broadcastBuffers": ipu.broadcast_buffers,
        "logCycleCount": ipu.log_cycle_count,
        "modelName": TRAINING if training else INFERENCE,
        "Precision.setPartialsType": {"float": torch.float, "half": torch.half}[ipu.partials],
        # PopTorch advises against stochastic rounding in inference
        "Precision.enableStochasticRounding": ipu.stochastic_rounding and training,
        "Precision.enableFloatingPointExceptions": ipu.floating_point_exceptions or None,
        "enableStableNorm": ipu.stable_norm or None,
        "useOfflineIpuTarget": ipu.offline_target,
        "connectionType": find_member(poptorch.ConnectionType, ipu.connection_type)
        if ipu.offline_target is None
        else None,
        "useIpuModel": ipu.use_ipu_model or None,
        "syncPattern": find_member(poptorch.SyncPattern, ipu.sync_pattern),
        "showCompilationProgressBar": ipu.progress_bar,
        "enableSyntheticData": ipu.synthetic_data or None,
        "enableExecutableCaching": ipu.executable_cache,
        "TensorLocations.numIOTiles": ipu.tensor_locations.num_io_tiles,
        "_Popart.setEngineOptions": _make_engine_options(ipu) or None,
    }


def find_member(enum: Any, key: str) -> Any:
    """Return the member of a PopTorch enum that a config calls `key`: every_n is EveryN, forkserver
    is ForkServer.
    """
    return next(getattr(enum, name) for name in dir(enum) if name.lower() == key.replace("_", ""))


def name_stage(stage: int) -> str:
    """Return the name of the block with which a stage begins."""
    return f"stage{stage}"


def _list_training_settings(ipu: IpuConfig, accumulation: int) -> dict[str, Any]:
    import poptorch

    strategy = find_member(poptorch.MeanReductionStrategy, ipu.mean_reduction_strategy)
    return {
        "deviceIterations": ipu.device_iterations,
        "Training.gradientAccumulation": accumulation,
        "Training.accumulationAndReplicationReductionType": poptorch.ReductionType.Mean,
        "Training.setMeanAccumulationAndReplicationReductionStrategy": strategy,
        "Training.setAutomaticLossScaling": ipu.automatic_loss_scaling or None,
    }


def _share_memory(share: Any, ipus: int) -> dict[str, float] | None:
    shares = share if isinstance(share, list) else [share] * ipus
    return (
        None if share is None else {f"IPU{index}": float(one) for index, one in enumerate(shares)}
    )


def _make_engine_options(ipu: IpuConfig) -> dict[str, str]:
    """Return Poplar's engine options in one map, because setEngineOptions replaces the whole
    map.
    """
    report = {}
    folder = ipu.profile.directory
    if folder is not None:
        report = {
            "debug.allowOutOfMemory": "true",
            "autoReport.all": "true",
            "autoReport.directory": folder,
        }
    if report and ipu.profile.blocks is not None:
        report["profiler.blocks.filter"] = ipu.profile.blocks
    return {**report, **ipu.engine_options}


SETTERS = {
    "on_chip": "useOnChipStorage",
    "replicated_tensor_sharding": "useReplicatedTensorSharding",
    "min_elements_for_off_chip": "minElementsForOffChip",
    "min_elements_for_replicated_tensor_sharding": "minElementsForReplicatedTensorSharding",
    "io_tiles_to_load": "useIOTilesToLoad",
    "io_tiles_to_store": "useIOTilesToStore",
}


def _set_locations(options: Any, locations: TensorLocations, training: bool) -> None:
    """Place the tensors of each class; inference has no optimizer, accumulators or sharding."""
    import poptorch

    for name in LOCATIONS if training else ("activation", "weight"):
        wanted = getattr(locations, name).model_dump(exclude_defaults=True)
        if not wanted:
            continue
        settings = poptorch.TensorLocationSettings()
        for key, value in wanted.items():
            if training or key != "replicated_tensor_sharding":
                getattr(settings, SETTERS[key])(value)
        getattr(options.TensorLocations, f"set{name.capitalize()}Location")(settings)
