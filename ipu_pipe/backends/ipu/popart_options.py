"""The names of PopART's session options with their types.

PopTorch itself finds an unknown one only when it compiles.

Source: PopTorch and PopART, branch sdk-release-3.4.
"""

from __future__ import annotations

import warnings
from importlib import metadata
from typing import Any, Iterator

from ipu_pipe.config.values import Case
from ipu_pipe.text import find_nearest

VERSION = "3.4.0"

_NAMES_BY_TYPE = {
    "bool": """
        aliasZeroCopy auto_round_num_ipus automaticLossScalingSettings.enabled
        batchSerializationSettings.concatOnExecutionPhaseChange
        batchSerializationSettings.concatOnPipelineStageChange
        batchSerializationSettings.concatOnVirtualGraphChange broadcast_buffers compileEngine
        constantWeights decomposeGradSum delayVarUpdates disableGradAccumulationTensorStreams
        disableOptimizerStateTensorStreams dotOpNames enableDistributedReplicatedGraphs
        enableEngineCaching enableExplicitIR enableExplicitMainLoops enableFloatingPointChecks
        enableFullyConnectedPass enableGradientAccumulation enableInplaceAmbiguityChecking
        enableLoadAndOffloadRNGState enableMergeExchange enableNonStableSoftmax enableOutlining
        enableOutliningCopyCostPruning enablePipelining enablePrefetchDatastreams
        enableReplicatedGraphs enableSerializedMatmuls enableStableNorm enableStochasticRounding
        enableSupportedDataTypeCasting ensureFp32LossScaleTensor explicitRecomputation
        exportPoplarComputationGraph exportPoplarVertexGraph groupHostSync
        groupNormStridedChannelGrouping instrumentWithHardwareCycleCounter opxAliasChecking
        opxModifyChecking rearrangeAnchorsOnHost rearrangeStreamsOnHost
        replicatedCollectivesSettings.mergeAllReduceCollectives
        replicatedCollectivesSettings.prepareScheduleForMergingCollectives
        scheduleNonWeightUpdateGradientConsumersEarly separateCallOpPdfs separate_backward_phase
        serial_phases_execution strictOpVersions useHostCopyOps use_model
    """,
    "uint64": """
        accumulateOuterFragmentSettings.schedule accumulationAndReplicationReductionType
        accumulationFactor accumulation_and_replication_reduction_type autoRecomputation
        autodiffSettings.stitchStrategy
        automaticLossScalingSettings.gradientTensorTrackingMethod
        automaticLossScalingSettings.updatePeriod batchSerializationSettings.batchSchedule
        batchSerializationSettings.factor batchSerializationSettings.method
        batchSerializationSettings.transformContext compilationProgressTotal connection_type
        defaultBufferingDepth defaultPrefetchBufferingDepth device_iterations
        distributed_process_id executionPhaseSettings.phases executionPhaseSettings.stages
        execution_mode finalDotOp firstDotOp globalReplicaOffset globalReplicationFactor
        gradient_accumulation input_cgt input_group_size ipu_id ipu_version looseThresholdAtPeak
        max_repeat_logs meanAccumulationAndReplicationReductionStrategy mergeVarUpdate
        mergeVarUpdateMemThreshold numIOTiles num_distributed_processes output_mode
        output_return_period random_seed replication_factor subgraphCopyingStrategy
        swapLimitScheduler sync_pattern syntheticDataMode tensors_liveness
        transitiveClosureOptimizationThreshold virtualGraphMode
    """,
    "floating point": """
        automaticLossScalingSettings.binEdgeLocation
        automaticLossScalingSettings.thresholdUpperCountProportion outlineSequenceBreakCost
        outlineThreshold timeLimitScheduler
    """,
    "string": """
        cachePath customCodeletCompileFlags kahnTieBreaker logDir log_dir model_name
        partialsTypeMatMuls saveInitializersToFile serializedPoprithmsShiftGraphsDir
    """,
    "container": """
        accumulateOuterFragmentSettings.excludedVirtualGraphs convolutionOptions customCodelets
        dotChecks engineOptions gclOptions hardwareInstrumentations lstmOptions matmulOptions
        reportOptions updatableNamedBuffers
    """,
}
TYPES: dict[str, str] = {
    name: kind for kind, names in _NAMES_BY_TYPE.items() for name in names.split()
}

_WORDS = {
    "bool": "true or false",
    "uint64": "a whole number >= 0 (enums too)",
    "floating point": "a number with a point, such as 1.0",
    "string": "text",
    "container": "a list or a map",
}


def list_popart_cases(options: dict[str, Any]) -> Iterator[Case]:
    """Yield the cases of `popart_options` that PopART does not have, or of which it takes another
    type.
    """
    for name, value in options.items():
        key = f"ipu.popart_options.{name}"
        expected = TYPES.get(name)
        if expected is None and _has_other_sdk():
            warnings.warn(
                f"backend.{key}: PopART {VERSION} has no such session option; the installed SDK "
                f"may, and says so when it compiles",
                stacklevel=2,
            )
        elif expected is None:
            near = find_nearest(name, TYPES)
            hint = f": nearest is {near}" if near else ""
            why = f"PopART {VERSION} has no such session option ({len(TYPES)} are known){hint}"
            yield Case(True, key, why, value)
        elif _find_type(value) != expected:
            yield Case(True, key, f"PopART {VERSION} takes {_WORDS[expected]}", value)


def _has_other_sdk() -> bool:
    """Return whether another PopTorch than the one of the published names is installed."""
    try:
        return not metadata.version("poptorch").startswith(VERSION[:3])
    except metadata.PackageNotFoundError:
        return False


def _find_type(value: Any) -> str:
    """Return the C++ type that PopTorch makes of a value; "" if there is none."""
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, int):
        return "uint64" if value >= 0 else ""
    if isinstance(value, float):
        return "floating point"
    if isinstance(value, str):
        return "string"
    return "container" if isinstance(value, (list, dict)) else ""
