"""A run's poptorch.Options. PopTorch is imported by the functions alone.

Source: PopTorch, branch sdk-release-3.4 (poptorch/python/options.py). Not run on hardware.
"""

from __future__ import annotations

from typing import Any, Optional

from ipu_pipe.backends.ipu.config import LOCATIONS, IpuConfig, TensorLocations
from ipu_pipe.backends.ipu.placement import PIPELINED, Placement, get_execution
from ipu_pipe.config.schema import Config
from ipu_pipe.schedule.methods import Method

RECOMPUTATION = {"none": 0, "standard": 1, "norm_only": 2, "pipeline": 3, "recompute_all": 4}  # popart's numbers
TRAINING, INFERENCE = "training", "inference"  # names of the models, which are the folders of their profiles


def make_options(
    config: Config, method: Method, place: Placement, training: bool, seed: int, base: Optional[Any] = None,
    ipu_id: Optional[int] = None, accumulation: Optional[int] = None,
) -> Any:  # fmt: skip
    """Return the poptorch.Options of a run's training or inference model. `base`: options to fill in, those of popdist, which has
    set replicas and processes. `ipu_id`: of gc-info, None for any device. `accumulation`: microbatches of an update, None for the
    config's."""
    import poptorch  # only here

    ipu, execution = config.ipu, get_execution(method)
    assert execution is not None, "a config with a method that no row says runs is refused"
    options = poptorch.Options() if base is None else base
    if base is None:
        options.Distributed.disable()  # mpirun alone would make it one of several
        options.replicationFactor(config.replicas)
        if ipu_id is not None:
            options.useIpuId(ipu_id)
    stages = [poptorch.Stage(*map(name_stage, stages)).ipu(index) for index, stages in place.runs]
    options.setExecutionStrategy(getattr(poptorch, execution)(*stages))
    options.autoRoundNumIPUs(ipu.auto_round_num_ipus)
    options.broadcastBuffers(ipu.broadcast_buffers)
    options.logCycleCount(ipu.log_cycle_count)
    options.modelName(TRAINING if training else INFERENCE)
    options.randomSeed(seed)
    is_pipeline = execution == PIPELINED
    if training:
        _set_training(options, ipu, accumulation or config.gradient_accumulation)
        _set_recomputation(options, ipu.recomputation, config.recompute, is_pipeline and place.ipus > 1)
    else:
        # an evaluation's call has as many microbatches as keep the stages busy, unless the config says otherwise
        options.deviceIterations(ipu.inference_device_iterations or (place.forward_stages if is_pipeline else 1))
        options.outputMode(poptorch.OutputMode.All)
    _set_numbers(options, ipu, place.ipus, training)
    _set_locations(options, ipu.tensor_locations, training)
    _set_target(options, ipu)
    for name, value in ipu.popart_options.items():
        options._Popart.set(name, value)
    return options


def find_member(enum: Any, key: str) -> Any:
    """Return the member of a PopTorch enum that a config calls `key`: every_n is EveryN, forkserver is ForkServer."""
    return next(getattr(enum, name) for name in dir(enum) if name.lower() == key.replace("_", ""))


def name_stage(stage: int) -> str:
    """Return the name of the block with which a stage begins."""
    return f"stage{stage}"


def _set_training(options: Any, ipu: IpuConfig, accumulation: int) -> None:
    import poptorch

    options.deviceIterations(ipu.device_iterations)
    options.Training.gradientAccumulation(accumulation)
    options.Training.accumulationAndReplicationReductionType(poptorch.ReductionType.Mean)
    strategy = find_member(poptorch.MeanReductionStrategy, ipu.mean_reduction_strategy)
    options.Training.setMeanAccumulationAndReplicationReductionStrategy(strategy)
    if ipu.automatic_loss_scaling:
        options.Training.setAutomaticLossScaling(True)
    period = [ipu.output_return_period] if ipu.output_mode == "every_n" else []
    options.outputMode(find_member(poptorch.OutputMode, ipu.output_mode), *period)


def _set_recomputation(options: Any, mode: str, recompute: bool, is_pipeline: bool) -> None:
    if mode == "auto" and recompute and not is_pipeline:
        mode = "standard"  # a pipeline recomputes unless told not to
    if mode != "auto":
        options._Popart.set("autoRecomputation", RECOMPUTATION[mode])
        if not is_pipeline and mode in ("standard", "recompute_all"):
            options._Popart.set("explicitRecomputation", True)


def _set_numbers(options: Any, ipu: IpuConfig, ipus: int, training: bool) -> None:
    import torch

    options.Precision.setPartialsType({"float": torch.float, "half": torch.half}[ipu.partials])
    # PopTorch advises against stochastic rounding in inference
    options.Precision.enableStochasticRounding(ipu.stochastic_rounding and training)
    if ipu.floating_point_exceptions:
        options.Precision.enableFloatingPointExceptions(True)
    if ipu.stable_norm:
        options.enableStableNorm(True)
    if ipu.convolution_dithering:
        partials = {"partialsType": ipu.partials}  # setPartialsType's own, which setConvolutionDithering would replace
        options._Popart.set("convolutionOptions", {**partials, "enableConvDithering": "true"})
    share = ipu.available_memory_proportion
    if share is not None:
        shares = share if isinstance(share, list) else [share] * ipus
        options.setAvailableMemoryProportion({f"IPU{index}": float(one) for index, one in enumerate(shares)})


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

    if locations.num_io_tiles is not None:
        options.TensorLocations.numIOTiles(locations.num_io_tiles)
    for name in LOCATIONS if training else ("activation", "weight"):
        wanted = getattr(locations, name).model_dump(exclude_defaults=True)
        if not wanted:
            continue
        settings = poptorch.TensorLocationSettings()
        for key, value in wanted.items():
            if training or key != "replicated_tensor_sharding":
                getattr(settings, SETTERS[key])(value)
        getattr(options.TensorLocations, f"set{name.capitalize()}Location")(settings)


def _set_target(options: Any, ipu: IpuConfig) -> None:
    """Choose the device, what runs beside the graph, and Poplar's engine options: merged here, since setEngineOptions replaces
    the whole map."""
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
    if ipu.prefetch_buffering_depth is not None:
        options._Popart.set("defaultPrefetchBufferingDepth", ipu.prefetch_buffering_depth)
    if ipu.executable_cache is not None:
        options.enableExecutableCaching(ipu.executable_cache)
    engine, folder = dict(ipu.engine_options), ipu.profile.directory
    if folder is not None:
        report = {"debug.allowOutOfMemory": "true", "autoReport.all": "true", "autoReport.directory": folder}
        if ipu.profile.blocks is not None:
            report["profiler.blocks.filter"] = ipu.profile.blocks
        engine = {**report, **engine}
    if engine:
        options._Popart.setEngineOptions(engine)
