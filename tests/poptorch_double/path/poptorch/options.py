"""Options: strict dictionaries with a method for every key, frozen once a DataLoader or a model has them."""

from __future__ import annotations

import copy
import os
import types
from typing import Any, Dict, List, Mapping, Optional, Set, Tuple, Union

import torch

from poptorch import enums
from poptorch._errors import make_cpp_error, make_unmodelled_error
from poptorch._signatures import DATA, follow_api
from poptorch.strategies import PipelinedExecution


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
            assert self.exists(option), (
                f"Invalid option {option}, valid options are {list(self._values)}"
            )
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
            raise AttributeError(
                f"Invalid private attribute {option}. Valid attributes: {list(self.__dict__)}"
            )

    def __deepcopy__(self, memo: Dict[int, Any]) -> Any:
        other = self.__class__.__new__(self.__class__)
        memo[id(self)] = other
        other.__dict__.update(
            {key: copy.deepcopy(value, memo) for key, value in self.__dict__.items()}
        )
        other.__dict__["_is_frozen"] = False
        return other


class _PopartOptions:
    """Double of popart.SessionOptions, by name."""

    def __init__(self) -> None:
        self.__dict__.update(_is_frozen=False, _options=dict(DATA["default_popart_values"]))

    @property
    def options(self) -> Mapping[str, Any]:
        """Return the options. Read-only here: PopTorch's is a plain dict through which frozen
        options could be changed."""
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

    @follow_api("_Popart.set", unchecked=["value"])
    def set(self, key: str, value: Union[int, float, str, List[str], Set[str]]) -> "_PopartOptions":
        """Set an option. PopTorch refuses an unknown name or a wrong type when it compiles, the
        double at once."""
        self.checkIsFrozen()
        kind = _find_popart_kind(value)
        if DATA["popart_session_options"].get(key) != kind:
            raise make_cpp_error(f"Unknown {kind} option {key}")
        self._options[key] = value
        return self

    @follow_api("_Popart.setEngineOptions")
    def setEngineOptions(self, engine_options: Dict[str, str]) -> "_PopartOptions":
        return self.set("engineOptions", dict(engine_options))


def _find_popart_kind(value: Any) -> str:
    """Return the C++ type that a Python value becomes; enums must be ints, and NumPy's integers
    are refused."""
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, int):
        return "uint64" if value >= 0 else "negative int"
    if type(value) is float:
        return "floating point"
    if isinstance(value, str):
        return "string"
    return "container" if isinstance(value, (list, tuple, set, dict)) else type(value).__name__


# ---- methods that set one option: name -> its place ("": declared, "new": declared or created, "popart"), its key, a conversion,
# ---- and PopTorch's condition on the value besides its type

PARTIALS = {torch.float: "float", torch.half: "half"}
SYNTHETIC = DATA["popart_enums_as_int"]["syntheticDataMode"]
COUNT = (lambda value: value >= 1, "must be at least 1")


def _get_value(enumeration: Any) -> Any:
    return enumeration.value


def _parse_proportions(shares: Dict[str, float]) -> Dict[int, float]:
    for key, share in shares.items():
        assert key.startswith("IPU"), (
            'Available memory proportions are expected to be in a dictionary of {"IPU0": 0.5} where the 0 in IPU '
            f"is the index of the IPU. Invalid key: {key}"
        )
        assert 0 <= share <= 1, f"{key}: a share of the memory lies between 0 and 1, not {share}"
    return {int(key[3:]): share for key, share in shares.items()}


SETTERS: Dict[str, Tuple[Any, ...]] = {
    "Options.autoRoundNumIPUs": ("", "auto_round_num_ipus"),
    "Options.deviceIterations": ("", "device_iterations", None, COUNT),
    "Options.replicationFactor": ("", "replication_factor", None, COUNT),
    "Options.broadcastBuffers": ("", "broadcast_buffers"),
    "Options.modelName": ("new", "model_name"),
    "Options.setAvailableMemoryProportion": ("", "available_memory_proportion", _parse_proportions),
    "Options.useIpuModel": ("new", "use_model"),
    "Options.useIpuId": ("new", "ipu_id"),
    "Options.connectionType": ("", "connection_type", _get_value),
    "Options.syncPattern": ("", "sync_pattern", _get_value),
    "Options.enableStableNorm": ("popart", "enableStableNorm"),
    "Options.logCycleCount": ("popart", "instrumentWithHardwareCycleCounter"),
    "Options.enableSyntheticData": (
        "popart", "syntheticDataMode", lambda enabled: SYNTHETIC["RandomNormal" if enabled else "Off"],
    ),
    "Precision.enableFloatingPointExceptions": ("popart", "enableFloatingPointChecks"),
    "Precision.enableStochasticRounding": ("popart", "enableStochasticRounding"),
    "Training.gradientAccumulation": ("", "gradient_accumulation", None, COUNT),
    "Training.accumulationAndReplicationReductionType": (
        "", "accumulation_and_replication_reduction_type", None,
        (lambda value: value == enums.ReductionType.Mean, "the double models the mean alone"),
    ),
    "Training.setMeanAccumulationAndReplicationReductionStrategy": ("", "meanAccumulationAndReplicationReductionStrategy"),
    "Training.setAutomaticLossScaling": ("popart", "automaticLossScalingSettings.enabled"),
    "TensorLocationSettings.minElementsForOffChip": ("new", "minElementsForOffChip"),
    "TensorLocationSettings.minElementsForReplicatedTensorSharding": ("new", "minElementsForReplicatedTensorSharding"),
    "TensorLocationSettings.useOnChipStorage": ("new", "onChip", int),
    "TensorLocationSettings.useReplicatedTensorSharding": ("new", "useReplicatedTensorSharding", int),
    "TensorLocationSettings.useIOTilesToLoad": ("new", "useIOTilesToLoad", int),
    "TensorLocationSettings.useIOTilesToStore": ("new", "useIOTilesToStore", int),
    "TensorLocations.numIOTiles": (
        "new", "numIOTiles", None,
        (lambda n: 32 <= n <= 192 and n % 2 == 0, "numIOTiles must be an even number between 32 and 192."),
    ),
    **{f"TensorLocations.set{name.capitalize()}Location": ("new", f"location_{name}", lambda location: location.toDict())
       for name in ("activation", "weight", "optimizer", "accumulator")},
}  # fmt: skip


def _add_setters(kind: Any) -> Any:
    """Add the methods of the table to a class."""
    owner = (
        kind.__name__.strip("_")
        .replace("PrecisionOptions", "Precision")
        .replace("TrainingOptions", "Training")
    )
    owner = owner.replace("TensorLocationOptions", "TensorLocations")
    for name, row in SETTERS.items():
        if name.split(".")[0] == owner:
            setattr(kind, name.split(".")[1], _make_setter(name, *row))
    return kind


def _make_setter(name: str, where: str, key: str, convert: Any = None, demand: Any = None) -> Any:
    @follow_api(name)
    def set_option(self, value):  # type: ignore[no-untyped-def]
        self.checkIsFrozen()
        if demand is not None:
            assert demand[0](value), f"{name}: {demand[1]}, not {value}"
        value = value if convert is None else convert(value)
        if where == "popart":
            self._popart.set(key, value)
        else:
            (self.createOrSet if where else self.set)(**{key: value})
        return self

    return set_option


@_add_setters
class _PrecisionOptions(OptionsDict):
    def __init__(self, popart: _PopartOptions) -> None:
        super().__init__()
        self.__dict__["_popart"] = popart

    @follow_api("Precision.setPartialsType", unchecked=["dtype"])
    def setPartialsType(self, dtype: torch.dtype) -> "_PrecisionOptions":
        if dtype not in PARTIALS:
            raise ValueError(
                "parameter to setPartialsType should be either torch.float or torch.half"
            )
        self._popart.set("partialsTypeMatMuls", PARTIALS[dtype])
        self._popart.set("convolutionOptions", {"partialsType": PARTIALS[dtype]})
        return self


@_add_setters
class _TrainingOptions(OptionsDict):
    def __init__(self, popart: _PopartOptions) -> None:
        values = dict(DATA["default_training_values"])
        for key, kind in (("accumulation_and_replication_reduction_type", enums.ReductionType),
                          ("meanAccumulationAndReplicationReductionStrategy", enums.MeanReductionStrategy)):  # fmt: skip
            values[key] = kind(values[key])
        super().__init__(**values)
        self.__dict__["_popart"] = popart


class _DistributedOptions(OptionsDict):
    def __init__(self) -> None:
        # so that mpirun alone makes it distributed
        size, rank = (
            int(os.environ.get(f"OMPI_COMM_WORLD_{key}", n))
            for key, n in (("SIZE", 1), ("RANK", 0))
        )
        super().__init__(num_distributed_processes=size, distributed_process_id=rank)

    @follow_api("Distributed.disable")
    def disable(self) -> "_DistributedOptions":
        self.set(num_distributed_processes=1, distributed_process_id=0)
        return self

    @property
    def processId(self) -> int:
        return int(self.distributed_process_id)

    @property
    def numProcesses(self) -> int:
        return int(self.num_distributed_processes)


@_add_setters
class TensorLocationSettings(OptionsDict):
    """Location of a class of tensors."""


@_add_setters
class _TensorLocationOptions(OptionsDict):
    pass


PARTS = ("Precision", "Training", "Distributed", "TensorLocations", "_Popart")


@_add_setters
class Options(OptionsDict):
    """All options of compiling and running a model."""

    @follow_api("Options")
    def __init__(self) -> None:
        super().__init__(**copy.deepcopy(DATA["default_option_values"]))
        popart = _PopartOptions()
        self.__dict__.update(
            _Popart=popart,
            _popart=popart,
            Precision=_PrecisionOptions(popart),
            Training=_TrainingOptions(popart),
            Distributed=_DistributedOptions(),
            TensorLocations=_TensorLocationOptions(),
            _execution_strategy=PipelinedExecution(),
            _show_compilation_progress_bar=True,
            _ipus_per_replica=None,  # popdist's
        )

    def _freeze(self) -> None:
        for part in PARTS:
            self.__dict__[part]._freeze()
        super()._freeze()

    @follow_api("Options.showCompilationProgressBar")
    def showCompilationProgressBar(self, show: bool) -> "Options":
        self._show_compilation_progress_bar = show
        return self

    @follow_api("Options.setExecutionStrategy", unchecked=["strategy"])
    def setExecutionStrategy(self, strategy: PipelinedExecution) -> "Options":
        assert isinstance(strategy, PipelinedExecution), (
            f"{type(strategy)} is no execution strategy"
        )
        self._execution_strategy = strategy
        return self

    @follow_api("Options.enableExecutableCaching")
    def enableExecutableCaching(self, path: str) -> "Options":
        self._popart.set("cachePath", path)
        self._popart.set("enableEngineCaching", True)
        return self

    @follow_api("Options.useOfflineIpuTarget")
    def useOfflineIpuTarget(self, ipu_version: int) -> "Options":
        self.checkIsFrozen()
        assert ipu_version in (1, 2, 21), (
            f"no IPU of version {ipu_version}: 1 is Mk1, 2 is Mk2, 21 is Mk2 with FP8"
        )
        self.set(connection_type=enums.ConnectionType.Never.value)
        self.createOrSet(ipu_version=ipu_version)
        return self

    @follow_api("Options.outputMode")
    def outputMode(self, output_mode: Any, output_return_period: Optional[int]) -> "Options":
        if output_mode == enums.OutputMode.EveryN:
            raise make_unmodelled_error("outputs of every n-th microbatch")
        self.set(output_mode=output_mode.value, output_return_period=output_return_period or 1)
        return self

    @follow_api("Options.defaultOutputMode")
    def defaultOutputMode(self) -> bool:
        return bool(self.output_mode == enums.OutputMode.Default)

    @follow_api("Options.randomSeed")
    def randomSeed(self, random_seed: int) -> "Options":
        self.checkIsFrozen()
        torch.manual_seed(random_seed)  # it seeds the host, too
        self.createOrSet(random_seed=random_seed)
        return self

    @follow_api("Options.toDict")
    def toDict(self) -> Dict[str, Any]:
        assert not self.defaultOutputMode(), "An output mode must be picked before serialisation"
        parts = (
            self._popart.options,
            self._values,
            self.Training._values,
            self.Distributed._values,
        )
        out: Dict[str, Any] = {**self._execution_strategy.backendOptions()}
        for part in (*parts, self.TensorLocations._values):
            assert not set(out) & set(part), (
                "Can't merge dictionaries, they have some keys in common"
            )
            out.update(part)
        return out
