"""Options: strict dictionaries with a method for every key, frozen once a DataLoader or a model has them."""

from __future__ import annotations

import copy
import os
import types
from typing import Any, Dict, List, Mapping, Optional, Set, Union

import torch

from poptorch import enums
from poptorch._errors import cpp_error
from poptorch._signatures import DATA, typed
from poptorch.strategies import PipelinedExecution

__all__ = ["Options", "TensorLocationSettings"]


class OptionsDict:
    """Keys that were declared can be read as attributes and set to values of their default's type; nothing else can."""

    def __init__(self, **default_values: Any) -> None:
        self.__dict__.update(_values=default_values, _is_frozen=False)

    def checkIsFrozen(self, option: Optional[str] = None) -> None:
        if self.__dict__["_is_frozen"]:
            raise AttributeError("Can't modify frozen Options")

    def set(self, **kwargs: Any) -> None:
        self.checkIsFrozen()
        for option, value in kwargs.items():
            assert self.exists(option), f"Invalid option {option}, valid options are {list(self._values)}"
            expected = type(self._values[option])
            assert isinstance(value, expected), (
                f"Unexpected type {type(value)} for option {option}. Expected {expected}"
            )
            self._values[option] = value

    def createOrSet(self, **kwargs: Any) -> None:
        self.checkIsFrozen()
        for option, value in kwargs.items():
            if self.exists(option):
                self.set(**{option: value})
            else:
                self._values[option] = value

    def exists(self, option: str) -> bool:
        return option in self.__dict__["_values"]

    def deleteIfExists(self, option: str) -> None:
        self.checkIsFrozen()
        self._values.pop(option, None)

    def toDict(self) -> Dict[str, Any]:
        return dict(self._values)

    def _freeze(self) -> None:
        self.__dict__["_is_frozen"] = True

    def __getattr__(self, option: str) -> Any:
        if "_values" not in self.__dict__ or not self.exists(option):
            raise AttributeError(f"Invalid attribute {option}.")
        return self._values[option]

    def __setattr__(self, option: str, value: Any) -> None:
        self.checkIsFrozen()
        if not option.startswith("_"):
            self.set(**{option: value})
        elif option in self.__dict__:
            self.__dict__[option] = value
        else:
            raise AttributeError(f"Invalid private attribute {option}. Valid attributes: {list(self.__dict__)}")

    def __deepcopy__(self, memo: Dict[int, Any]) -> Any:
        other = self.__class__.__new__(self.__class__)
        memo[id(self)] = other
        other.__dict__.update({key: copy.deepcopy(value, memo) for key, value in self.__dict__.items()})
        other.__dict__["_is_frozen"] = False
        return other


class _PopartOptions:
    """popart.SessionOptions by name."""

    def __init__(self) -> None:
        self.__dict__.update(_is_frozen=False, _options=dict(DATA["default_popart_values"]))

    @property
    def options(self) -> Mapping[str, Any]:
        """What was set. Read-only here: PopTorch's is a plain dict through which frozen options could be changed."""
        return types.MappingProxyType(self._options)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"Invalid attribute {name}.")

    def __deepcopy__(self, memo: Dict[int, Any]) -> "_PopartOptions":
        other = _PopartOptions()
        other._options.update(copy.deepcopy(self._options, memo))
        return other

    def _freeze(self) -> None:
        self.__dict__["_is_frozen"] = True

    def checkIsFrozen(self, option: Optional[str] = None) -> None:
        if self._is_frozen:
            raise AttributeError("Can't modify frozen Options")

    @typed("_Popart.set", unchecked=["value"])
    def set(self, key: str, value: Union[int, float, str, List[str], Set[str]]) -> "_PopartOptions":
        """PopTorch finds an unknown name or a wrong type only when it compiles; the double at once."""
        self.checkIsFrozen()
        kind = _popart_kind(value)
        if DATA["popart_session_options"].get(key) != kind:
            raise cpp_error(f"Unknown {kind} option {key}")
        self._options[key] = value
        return self

    @typed("_Popart.setEngineOptions")
    def setEngineOptions(self, engine_options: Dict[str, str]) -> "_PopartOptions":
        return self.set("engineOptions", dict(engine_options))


def _popart_kind(value: Any) -> str:
    """The C++ type a Python value becomes; enums have to be given as ints, NumPy's integers are refused."""
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, int):
        return "uint64" if value >= 0 else "negative int"
    if type(value) is float:
        return "floating point"
    if isinstance(value, str):
        return "string"
    return "container" if isinstance(value, (list, tuple, set, dict)) else type(value).__name__


class _PrecisionOptions(OptionsDict):
    def __init__(self, popart: _PopartOptions) -> None:
        super().__init__()
        self.__dict__["_popart"] = popart

    @typed("Precision.enableFloatingPointExceptions", says="enableFloatingPointExceptions needs to be set to a bool")
    def enableFloatingPointExceptions(self, enabled: bool) -> "_PrecisionOptions":
        self._popart.set("enableFloatingPointChecks", enabled)
        return self

    @typed("Precision.enableStochasticRounding")
    def enableStochasticRounding(self, enabled: bool) -> "_PrecisionOptions":
        self._popart.set("enableStochasticRounding", enabled)
        return self

    @typed(
        "Precision.setPartialsType",
        error=ValueError,
        says="parameter to setPartialsType should be either torch.float or torch.half",
    )
    def setPartialsType(self, dtype: torch.dtype) -> "_PrecisionOptions":
        names = {torch.float: "float", torch.half: "half"}
        if dtype not in names:
            raise ValueError("parameter to setPartialsType should be either torch.float or torch.half")
        self._popart.set("partialsTypeMatMuls", names[dtype])
        self._popart.set("convolutionOptions", {"partialsType": names[dtype]})
        return self


class _TrainingOptions(OptionsDict):
    def __init__(self, popart: _PopartOptions) -> None:
        values = DATA["default_training_values"]
        reduction = "accumulation_and_replication_reduction_type"
        strategy = "meanAccumulationAndReplicationReductionStrategy"
        super().__init__(**{
            **values,
            reduction: enums.ReductionType(values[reduction]),
            strategy: enums.MeanReductionStrategy(values[strategy]),
        })  # fmt: skip
        self.__dict__["_popart"] = popart

    @typed("Training.gradientAccumulation")
    def gradientAccumulation(self, gradient_accumulation: int) -> "_TrainingOptions":
        self.checkIsFrozen()
        assert gradient_accumulation >= 1, f"gradientAccumulation must be at least 1, not {gradient_accumulation}"
        self.set(gradient_accumulation=gradient_accumulation)
        return self

    @typed(
        "Training.accumulationAndReplicationReductionType",
        error=ValueError,
        says="accumulationAndReplicationReductionType must be set to poptorch.ReductionType.Mean or "
        "poptorch.ReductionType.Sum",
    )
    def accumulationAndReplicationReductionType(self, reduction_type: "enums.ReductionType") -> "_TrainingOptions":
        if reduction_type == enums.ReductionType.NoReduction:
            raise ValueError(
                "accumulationAndReplicationReductionType must be set to poptorch.ReductionType.Mean or "
                "poptorch.ReductionType.Sum"
            )
        self.set(accumulation_and_replication_reduction_type=reduction_type)
        return self

    @typed("Training.setMeanAccumulationAndReplicationReductionStrategy")
    def setMeanAccumulationAndReplicationReductionStrategy(
        self, mean_reduction_strategy: "enums.MeanReductionStrategy"
    ) -> "_TrainingOptions":
        self.set(meanAccumulationAndReplicationReductionStrategy=mean_reduction_strategy)
        return self

    @typed("Training.setAutomaticLossScaling")
    def setAutomaticLossScaling(self, enabled: bool) -> "_TrainingOptions":
        self._popart.set("automaticLossScalingSettings.enabled", enabled)
        return self


class _DistributedOptions(OptionsDict):
    def __init__(self) -> None:
        super().__init__(num_distributed_processes=1, distributed_process_id=0)
        self._from_environment("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK")  # so mpirun alone makes it distributed

    def _from_environment(self, size: str, rank: str) -> None:
        self.set(
            num_distributed_processes=int(os.environ.get(size, "1")),
            distributed_process_id=int(os.environ.get(rank, "0")),
        )

    @typed("Distributed.disable")
    def disable(self) -> "_DistributedOptions":
        self.set(num_distributed_processes=1, distributed_process_id=0)
        return self

    @property
    def processId(self) -> int:
        return int(self.distributed_process_id)

    @property
    def numProcesses(self) -> int:
        return int(self.num_distributed_processes)


class TensorLocationSettings(OptionsDict):
    """Where a class of tensors lives."""

    def __init__(self) -> None:
        super().__init__()

    @typed("TensorLocationSettings.minElementsForOffChip")
    def minElementsForOffChip(self, min_elements: int) -> "TensorLocationSettings":
        self.createOrSet(minElementsForOffChip=min_elements)
        return self

    @typed("TensorLocationSettings.minElementsForReplicatedTensorSharding")
    def minElementsForReplicatedTensorSharding(self, min_elements: int) -> "TensorLocationSettings":
        self.createOrSet(minElementsForReplicatedTensorSharding=min_elements)
        return self

    @typed("TensorLocationSettings.useOnChipStorage", unchecked=["use"])
    def useOnChipStorage(self, use: bool = True) -> "TensorLocationSettings":
        if use is None:  # keeps it undefined
            self.deleteIfExists("onChip")
        else:
            assert isinstance(use, bool), f"Unexpected type {type(use)} for option use. Expected {bool}"
            self.createOrSet(onChip=int(use))
        return self

    @typed("TensorLocationSettings.useReplicatedTensorSharding")
    def useReplicatedTensorSharding(self, use: bool = True) -> "TensorLocationSettings":
        self.createOrSet(useReplicatedTensorSharding=int(use))
        return self

    @typed("TensorLocationSettings.useIOTilesToLoad")
    def useIOTilesToLoad(self, use: bool = True) -> "TensorLocationSettings":
        self.createOrSet(useIOTilesToLoad=int(use))
        return self

    @typed("TensorLocationSettings.useIOTilesToStore")
    def useIOTilesToStore(self, use: bool = True) -> "TensorLocationSettings":
        self.createOrSet(useIOTilesToStore=int(use))
        return self


class _TensorLocationOptions(OptionsDict):
    def __init__(self) -> None:
        super().__init__()

    @typed("TensorLocations.numIOTiles")
    def numIOTiles(self, num_tiles: int) -> "_TensorLocationOptions":
        assert 32 <= num_tiles <= 192 and num_tiles % 2 == 0, "numIOTiles must be an even number between 32 and 192."
        self.createOrSet(numIOTiles=num_tiles)
        return self

    @typed("TensorLocations.setActivationLocation")
    def setActivationLocation(self, location: TensorLocationSettings) -> "_TensorLocationOptions":
        self.createOrSet(location_activation=location.toDict())
        return self

    @typed("TensorLocations.setWeightLocation")
    def setWeightLocation(self, location: TensorLocationSettings) -> "_TensorLocationOptions":
        self.createOrSet(location_weight=location.toDict())
        return self

    @typed("TensorLocations.setOptimizerLocation")
    def setOptimizerLocation(self, location: TensorLocationSettings) -> "_TensorLocationOptions":
        self.createOrSet(location_optimizer=location.toDict())
        return self

    @typed("TensorLocations.setAccumulatorLocation")
    def setAccumulatorLocation(self, location: TensorLocationSettings) -> "_TensorLocationOptions":
        self.createOrSet(location_accumulator=location.toDict())
        return self


class Options(OptionsDict):
    """All that controls how a model is compiled and run."""

    @typed("Options")
    def __init__(self) -> None:
        values = copy.deepcopy(DATA["default_option_values"])
        super().__init__(**values)
        popart = _PopartOptions()
        self.__dict__.update(
            _popart=popart,
            _precision=_PrecisionOptions(popart),
            _training=_TrainingOptions(popart),
            _distributed=_DistributedOptions(),
            _tensor_locations=_TensorLocationOptions(),
            _execution_strategy=PipelinedExecution(),
            _show_compilation_progress_bar=True,
            _ipus_per_replica=None,  # popdist's
        )
        if os.environ.get("POPTORCH_CACHE_DIR"):
            self.enableExecutableCaching(os.environ["POPTORCH_CACHE_DIR"])

    def _freeze(self) -> None:
        for part in ("_popart", "_precision", "_training", "_distributed", "_tensor_locations"):
            self.__dict__[part]._freeze()
        super()._freeze()

    def __deepcopy__(self, memo: Dict[int, Any]) -> Any:
        other = super().__deepcopy__(memo)
        for part in ("_precision", "_training"):  # both write into the copy's own _popart, as memo made sure
            assert other.__dict__[part].__dict__["_popart"] is other.__dict__["_popart"]
        return other

    @typed("Options.showCompilationProgressBar")
    def showCompilationProgressBar(self, show: bool = True) -> "Options":
        self._show_compilation_progress_bar = show
        return self

    @property
    def TensorLocations(self) -> _TensorLocationOptions:
        return self._tensor_locations

    @property
    def Distributed(self) -> _DistributedOptions:
        return self._distributed

    @property
    def Precision(self) -> _PrecisionOptions:
        return self._precision

    @property
    def Training(self) -> _TrainingOptions:
        return self._training

    @property
    def _Popart(self) -> _PopartOptions:
        return self._popart

    @typed("Options.autoRoundNumIPUs")
    def autoRoundNumIPUs(self, auto_round_num_ipus: bool = True) -> "Options":
        self.set(auto_round_num_ipus=auto_round_num_ipus)
        return self

    @typed("Options.deviceIterations")
    def deviceIterations(self, device_iterations: int) -> "Options":
        self.checkIsFrozen()
        assert device_iterations >= 1, f"deviceIterations must be at least 1, not {device_iterations}"
        self.set(device_iterations=device_iterations)
        return self

    @typed("Options.setExecutionStrategy", unchecked=["strategy"])
    def setExecutionStrategy(self, strategy: PipelinedExecution) -> "Options":
        assert isinstance(strategy, PipelinedExecution), f"{type(strategy)} is no execution strategy"
        self._execution_strategy = strategy
        return self

    @typed("Options.setAvailableMemoryProportion")
    def setAvailableMemoryProportion(self, available_memory_proportion: Dict[str, float]):
        proportions = {}
        for key, share in available_memory_proportion.items():
            assert key.startswith("IPU"), (
                'Available memory proportions are expected to be in a dictionary of {"IPU0": 0.5} where the 0 in IPU '
                f"is the index of the IPU. Invalid key: {key}"
            )
            assert 0 <= share <= 1, f"{key}: a share of the memory lies between 0 and 1, not {share}"
            proportions[int(key[3:])] = share
        self.set(available_memory_proportion=proportions)
        return self

    @typed("Options.replicationFactor")
    def replicationFactor(self, replication_factor: int) -> "Options":
        self.checkIsFrozen()
        assert replication_factor >= 1, f"replicationFactor must be at least 1, not {replication_factor}"
        self.set(replication_factor=replication_factor)
        return self

    @typed("Options.broadcastBuffers")
    def broadcastBuffers(self, broadcast_buffers: bool = True):
        self.set(broadcast_buffers=broadcast_buffers)
        return self

    @typed("Options.modelName")
    def modelName(self, name: str) -> "Options":
        self.createOrSet(model_name=name)
        return self

    @typed("Options.enableExecutableCaching", unchecked=["path"])
    def enableExecutableCaching(self, path: str) -> "Options":
        assert path is None or isinstance(path, str), f"Unexpected type {type(path)} for option path. Expected {str}"
        if path is not None:
            self._popart.set("cachePath", path)
        self._popart.set("enableEngineCaching", path is not None)
        return self

    @typed("Options.useIpuModel")
    def useIpuModel(self, use_model: bool) -> "Options":
        self.createOrSet(use_model=use_model)
        return self

    @typed("Options.connectionType")
    def connectionType(self, connection_type: "enums.ConnectionType") -> "Options":
        self.set(connection_type=connection_type.value)
        return self

    @typed("Options.syncPattern")
    def syncPattern(self, sync_pattern: "enums.SyncPattern") -> "Options":
        self.set(sync_pattern=sync_pattern.value)
        return self

    @typed("Options.useIpuId")
    def useIpuId(self, ipu_id: int) -> "Options":
        self.createOrSet(ipu_id=ipu_id)
        return self

    @typed("Options.useOfflineIpuTarget")
    def useOfflineIpuTarget(self, ipu_version: int = 2) -> "Options":
        self.checkIsFrozen()
        assert ipu_version in (1, 2, 21), f"no IPU of version {ipu_version}: 1 is Mk1, 2 is Mk2, 21 is Mk2 with FP8"
        self.set(connection_type=enums.ConnectionType.Never.value)
        self.createOrSet(ipu_version=ipu_version)
        return self

    @typed("Options.outputMode")
    def outputMode(self, output_mode: "enums.OutputMode", output_return_period: Optional[int] = None) -> "Options":
        if output_mode == enums.OutputMode.EveryN:
            assert output_return_period and output_return_period > 0, (
                "EveryN anchor must have output_return_period set to valid positive integer"
            )
        self.set(output_mode=output_mode.value, output_return_period=output_return_period or 1)
        return self

    @typed("Options.defaultOutputMode")
    def defaultOutputMode(self) -> bool:
        return bool(self.output_mode == enums.OutputMode.Default)

    @typed("Options.randomSeed")
    def randomSeed(self, random_seed: int) -> "Options":
        self.checkIsFrozen()
        torch.manual_seed(random_seed)  # it seeds the host, too
        self.createOrSet(random_seed=random_seed)
        return self

    @typed("Options.enableStableNorm")
    def enableStableNorm(self, enabled: bool) -> "Options":
        self._popart.set("enableStableNorm", enabled)
        return self

    @typed("Options.enableSyntheticData")
    def enableSyntheticData(self, enabled: bool) -> "Options":
        modes = DATA["popart_enums_as_int"]["syntheticDataMode"]
        self._popart.set("syntheticDataMode", modes["RandomNormal"] if enabled else modes["Off"])
        return self

    @typed("Options.logCycleCount")
    def logCycleCount(self, log_cycle_count: bool) -> "Options":
        self._popart.set("instrumentWithHardwareCycleCounter", log_cycle_count)
        return self

    @typed("Options.toDict")
    def toDict(self) -> Dict[str, Any]:
        assert not self.defaultOutputMode(), "An output mode must be picked before serialisation"
        parts = (self._popart.options, self._values, self._training._values, self._distributed._values)
        out: Dict[str, Any] = {**self._execution_strategy.backendOptions()}
        for part in (*parts, self._tensor_locations._values):
            assert not set(out) & set(part), "Can't merge dictionaries, they have some keys in common"
            out.update(part)
        return out
