"""A run's poptorch.Options. PopTorch is imported by the functions alone.

Source: PopTorch, branch sdk-release-3.4 (poptorch/python/options.py). Not run on hardware.
"""

from __future__ import annotations

from typing import Any, Optional

from ipu_pipe.backends.ipu.config import LOCATIONS, IpuConfig, TensorLocation, TensorLocations
from ipu_pipe.backends.ipu.placement import Execution, Placement, get_execution
from ipu_pipe.config.schema import Config
from ipu_pipe.schedule.methods import Method

RECOMPUTATION = {"none": 0, "standard": 1, "norm_only": 2, "pipeline": 3, "recompute_all": 4}  # popart's numbers


def make_options(
    config: Config, method: Method, place: Placement, training: bool, seed: int, base: Optional[Any] = None,
    ipu_id: Optional[int] = None, accumulation: Optional[int] = None,
) -> Any:  # fmt: skip
    """Return the poptorch.Options of a run's training or inference model. `base`: options to fill in, those of popdist, which has
    set replicas and processes. `ipu_id`: of gc-info, None for any device. `accumulation`: microbatches of an update, None for the
    config's."""
    import poptorch  # only here

    ipu = config.ipu
    execution = get_execution(method)
    assert execution is not None, "a config with a method that no row says runs is refused"
    pipelined = execution is Execution.PIPELINED
    options = poptorch.Options() if base is None else base
    if base is None:
        options.Distributed.disable()  # mpirun alone would make it one of several
        options.replicationFactor(config.replicas)
        if ipu_id is not None:
            options.useIpuId(ipu_id)
    _set_execution(options, config, place, training, execution, accumulation)
    _set_numbers(options, ipu, place, training)
    _set_memory(options, ipu, place, training, config.recompute, pipelined and place.ipus > 1)
    _set_target(options, ipu)
    _set_profile(options, ipu, training)
    options.randomSeed(seed)
    for name, value in ipu.popart_options.items():
        options._Popart.set(name, value)
    return options


def find_member(enum: Any, key: str) -> Any:
    """Return the member of a PopTorch enum that a config calls `key`: every_n is EveryN, forkserver is ForkServer."""
    return next(getattr(enum, name) for name in dir(enum) if name.lower() == key.replace("_", ""))


def name_stage(stage: int) -> str:
    """Return the name of the block with which a stage begins."""
    return f"stage{stage}"


def _set_execution(
    options: Any, config: Config, place: Placement, training: bool, execution: Execution, accumulation: Optional[int]
) -> None:
    import poptorch

    ipu = config.ipu
    stages = [poptorch.Stage(*map(name_stage, stages)).ipu(index) for index, stages in place.runs]
    options.setExecutionStrategy(getattr(poptorch, execution.value)(*stages))
    options.autoRoundNumIPUs(ipu.auto_round_num_ipus)
    options.broadcastBuffers(ipu.broadcast_buffers)
    if not training:
        options.deviceIterations(count_inference_iterations(ipu, place, execution is Execution.PIPELINED))
        options.outputMode(poptorch.OutputMode.All)
        return
    options.deviceIterations(ipu.device_iterations)
    options.Training.gradientAccumulation(accumulation or config.gradient_accumulation)
    options.Training.accumulationAndReplicationReductionType(poptorch.ReductionType.Mean)
    strategy = find_member(poptorch.MeanReductionStrategy, ipu.mean_reduction_strategy)
    options.Training.setMeanAccumulationAndReplicationReductionStrategy(strategy)
    if ipu.automatic_loss_scaling:
        options.Training.setAutomaticLossScaling(True)
    period = [ipu.output_return_period] if ipu.output_mode == "every_n" else []
    options.outputMode(find_member(poptorch.OutputMode, ipu.output_mode), *period)


def count_inference_iterations(ipu: IpuConfig, place: Placement, pipelined: bool) -> int:
    """Count the microbatches of an evaluation's call: as many as keep the pipeline's stages busy, unless the config says
    otherwise."""
    return ipu.inference_device_iterations or (place.forward_stages if pipelined else 1)


def _set_numbers(options: Any, ipu: IpuConfig, place: Placement, training: bool) -> None:
    import torch

    options.Precision.setPartialsType({"float": torch.float, "half": torch.half}[ipu.partials])
    options.Precision.enableStochasticRounding(
        ipu.stochastic_rounding and training
    )  # PopTorch advises against it elsewhere
    if ipu.floating_point_exceptions:
        options.Precision.enableFloatingPointExceptions(True)
    if ipu.stable_norm:
        options.enableStableNorm(True)
    if ipu.convolution_dithering:
        partials = {"partialsType": ipu.partials}  # setPartialsType's own, which setConvolutionDithering would replace
        options._Popart.set("convolutionOptions", {**partials, "enableConvDithering": "true"})
    share = ipu.available_memory_proportion
    if share is not None:
        shares = share if isinstance(share, list) else [share] * place.ipus
        options.setAvailableMemoryProportion({f"IPU{index}": float(one) for index, one in enumerate(shares)})


def _set_memory(
    options: Any, ipu: IpuConfig, place: Placement, training: bool, recompute: bool, pipelined: bool
) -> None:
    if training:
        mode = ipu.recomputation
        if mode == "auto" and recompute and not pipelined:
            mode = "standard"  # a pipeline recomputes unless told not to
        if mode != "auto":
            options._Popart.set("autoRecomputation", RECOMPUTATION[mode])
            if not pipelined and mode in ("standard", "recompute_all"):
                options._Popart.set("explicitRecomputation", True)
    _set_locations(options, ipu.tensor_locations, training)
    if ipu.prefetch_buffering_depth is not None:
        options._Popart.set("defaultPrefetchBufferingDepth", ipu.prefetch_buffering_depth)
    if ipu.executable_cache is not None:
        options.enableExecutableCaching(ipu.executable_cache)


def _set_locations(options: Any, locations: TensorLocations, training: bool) -> None:
    import poptorch

    if locations.num_io_tiles is not None:
        options.TensorLocations.numIOTiles(locations.num_io_tiles)
    for name in LOCATIONS if training else ("activation", "weight"):
        wanted: TensorLocation = getattr(locations, name)
        if wanted == TensorLocation():
            continue
        settings = poptorch.TensorLocationSettings()
        if wanted.on_chip is not None:
            settings.useOnChipStorage(wanted.on_chip)
        if wanted.replicated_tensor_sharding and training:
            settings.useReplicatedTensorSharding(True)
        if wanted.min_elements_for_off_chip is not None:
            settings.minElementsForOffChip(wanted.min_elements_for_off_chip)
        if wanted.min_elements_for_replicated_tensor_sharding is not None:
            settings.minElementsForReplicatedTensorSharding(wanted.min_elements_for_replicated_tensor_sharding)
        if wanted.io_tiles_to_load:
            settings.useIOTilesToLoad(True)
        if wanted.io_tiles_to_store:
            settings.useIOTilesToStore(True)
        getattr(options.TensorLocations, f"set{name.capitalize()}Location")(settings)


def _set_target(options: Any, ipu: IpuConfig) -> None:
    import poptorch

    if ipu.offline_target is not None:
        options.useOfflineIpuTarget(ipu.offline_target)
    else:
        options.connectionType(find_member(poptorch.ConnectionType, ipu.connection_type))
    if ipu.use_ipu_model:
        options.useIpuModel(True)
    options.syncPattern(find_member(poptorch.SyncPattern, ipu.sync_pattern))
    options.showCompilationProgressBar(ipu.progress_bar)
    if ipu.synthetic_data:
        options.enableSyntheticData(True)


def name_model(training: bool) -> str:
    """Return the name of a model, which is the folder of its profile."""
    return "training" if training else "inference"


def _set_profile(options: Any, ipu: IpuConfig, training: bool) -> None:
    """Set names, cycle counts and engine options, merged here since setEngineOptions replaces the whole map."""
    options.logCycleCount(ipu.log_cycle_count)
    options.modelName(name_model(training))
    engine = dict(ipu.engine_options)
    if ipu.profile.directory is not None:
        engine = {
            "debug.allowOutOfMemory": "true",
            "autoReport.all": "true",
            "autoReport.directory": ipu.profile.directory,
            **engine,
        }
        if ipu.profile.blocks is not None:
            engine = {"profiler.blocks.filter": ipu.profile.blocks, **engine}
    if engine:
        options._Popart.setEngineOptions(engine)
