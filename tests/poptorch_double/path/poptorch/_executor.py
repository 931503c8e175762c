"""PoplarExecutor: the wrapped model, from compiling to destroying, in PopTorch's order and with its checks."""

from __future__ import annotations

import copy
import inspect
import json
import os
import time
import weakref
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple, Union

import torch

from poptorch import _device, _optimizers, _trace, _wrapping, enums, optim
from poptorch._errors import (
    DoubleRefuses,
    Error,
    make_cpp_error,
    make_py_error,
    make_unmodelled_error,
)
from poptorch._program import Program
from poptorch._record import ApiCall, Compilation, Run, recorded
from poptorch._signatures import follow_api
from poptorch.options import Options
from poptorch.strategies import PipelinedExecution, ShardedExecution

NO_EXECUTABLE = "Model has not been compiled or has been destroyed."
DEFAULT_SEED = 42  # [U] of an executable whose options give none
EVENTS = ("input", "input_complete", "output", "output_complete")


class PoplarExecutor:
    """The wrapped model. Made by trainingModel and inferenceModel only."""

    def __init__(
        self,
        model: Any,
        options: Optional[Options],
        training: bool,
        optimizer: Any,
        user_model: Any,
    ) -> None:
        set_ = object.__setattr__
        set_(self, "_user_model", user_model)
        set_(self, "_model", model)
        self._index = recorded.executors
        recorded.executors += 1
        self._holder = next(_device.holders)
        self._training = training
        self._options = self._copy_options(options)
        self._program: Optional[Program] = None
        self._compilation: Optional[Compilation] = None
        self._compiled_inputs: Any = None
        self._reserved = 0
        self._is_attached = False
        self._lost: Optional[Error] = None
        self._dirty_host_weights = False
        self._host_weights_version = 0
        self._stamps: Dict[str, List[List[float]]] = {event: [[]] for event in EVENTS}
        self._cycles: Optional[int] = None
        self._profile: Optional[Tuple[Path, Path]] = None
        self._signature = inspect.signature(model.forward)
        self._optimizer: Any = None
        self._description: Optional[_optimizers.Description] = None
        self._optimizer_is_pending = (
            False  # an optimizer that was set and has not reached the device
        )
        if training:
            self._names = {id(p): name for name, p in user_model.named_parameters()}
            self._take_optimizer(optimizer or optim.SGD(user_model.parameters(), lr=0.01))
            self._check_all_in_groups()
            self._options._freeze()
            _wrapping.wrap(user_model, self)
        self._options._freeze()
        weakref.finalize(self, _device.release, self._holder)

    def _copy_options(self, options: Optional[Options]) -> Options:
        """Freeze the given options, and return a copy with the default output mode filled in."""
        if options is not None and not isinstance(options, Options):
            raise make_py_error(
                f"Invalid type: 'options' is of type {type(options)} (Expected poptorch.Options)"
            )
        if options is None:
            options = Options()
        else:
            options._freeze()
            options = copy.deepcopy(options)
        if options.defaultOutputMode():
            options.outputMode(enums.OutputMode.Final if self._training else enums.OutputMode.All)
        accumulation = options.Training.gradient_accumulation
        if not self._training and accumulation != 1:
            raise make_py_error(
                "Training.gradientAccumulation must be 1 when running a poptorch.inferenceModel()."
            )
        return options

    def _check_all_in_groups(self) -> None:
        """Refuse a parameter that is in no group. [U] PopTorch trains it with the optimizer's
        defaults."""
        assert self._description is not None
        listed = {name for group in self._description.parameters for name in group}
        missing = [
            n for n, p in self._user_model.named_parameters() if p.requires_grad and n not in listed
        ]
        if missing:
            raise DoubleRefuses(f"parameters in no group of the optimizer: {', '.join(missing)}")

    # ---- attributes

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_"):
            raise DoubleRefuses(
                f"{name} set on a PoplarExecutor: PopTorch would take it and do nothing with it"
            )
        object.__setattr__(self, name, value)

    @property
    def model(self) -> Any:
        return self._user_model

    @property
    def options(self) -> Options:
        return self._options

    # ---- weights

    def _get_program(self) -> Program:
        if self._program is None:
            raise make_py_error(NO_EXECUTABLE)
        return self._program

    def _list_host_tensors(self) -> Dict[str, torch.Tensor]:
        return {**dict(self._model.named_parameters()), **dict(self._model.named_buffers())}

    @follow_api("PoplarExecutor.copyWeightsToHostIfNeeded")
    def copyWeightsToHostIfNeeded(self) -> bool:
        return self._sync_if_needed()

    def _sync_if_needed(self) -> bool:
        if not self._dirty_host_weights:
            return False
        with ApiCall():  # not the user's call: not recorded
            self.copyWeightsToHost()
        return True

    @follow_api("PoplarExecutor.copyWeightsToHost")
    def copyWeightsToHost(self) -> None:
        program = self._get_program()
        self._dirty_host_weights = (
            False  # before anything touches the parameters, and whatever comes of it
        )
        self._check_alive()
        if not self._is_attached:  # [U]
            raise make_cpp_error("Device is not attached")
        with self._guard_faults():
            recorded.event("copyWeightsToHost", self._index)
        program.download(self._list_host_tensors())
        self._host_weights_version += 1

    @follow_api("PoplarExecutor.copyWeightsToDevice")
    def copyWeightsToDevice(self) -> None:
        """Copy the host's weights. Training since the last copy to the host is lost, as in
        PopTorch."""
        program = self._get_program()
        self._check_alive()
        if not self._is_attached:  # [U]
            raise make_cpp_error("Device is not attached")
        self._dirty_host_weights = False
        self._read_optimizer_state()
        recorded.event("copyWeightsToDevice", self._index)
        program.upload(self._list_host_tensors())

    # ---- the optimizer

    def _take_optimizer(self, optimizer: Any) -> None:
        """Describe an optimizer, and let a PopTorch optimizer's state_dict() fetch the state
        from the device."""
        description = _optimizers.describe_optimizer(optimizer, self._names, self._options)
        if self._program is not None and optimizer is not self._optimizer:
            raise make_unmodelled_error("another optimizer in place of the compiled one")
        if isinstance(optimizer, optim.Optimizer):
            parent = weakref.ref(self)

            def state_dict() -> Dict[str, Any]:
                executor = parent()
                if executor is not None:
                    executor._read_optimizer_state()
                return optimizer.get_state_dict()

            optimizer.state_dict = state_dict
        self._optimizer_is_pending = self._optimizer_is_pending or description != self._description
        self._optimizer, self._description = optimizer, description

    @follow_api("PoplarExecutor.setOptimizer")
    def setOptimizer(self, optimizer: "torch.optim.Optimizer") -> None:
        if not self._training:  # [U]
            raise DoubleRefuses("an inference model has no optimizer")
        self._take_optimizer(optimizer)
        if self._is_ready():
            self._update_optimizer()
            self._write_optimizer_state()

    def _update_optimizer(self) -> None:
        """Send a new description to the device; while detached it waits for the next attachment."""
        program = self._get_program()
        if self._optimizer_is_pending and program.twin is not None:
            assert self._description is not None
            _optimizers.check_replacement(program.twin.compiled, self._description)
            program.twin.update(self._description)
        self._optimizer_is_pending = False

    def _read_optimizer_state(self) -> None:
        optimizer = self._optimizer
        if (
            isinstance(optimizer, optim.Optimizer)
            and optimizer.host_state_is_dirty
            and self._program is not None
        ):
            assert not self._optimizer_is_pending, (
                "Both host and ipu states cannot be dirty at the same time."
            )
            self._check_alive()
            assert self._program.twin is not None
            optimizer.set_state_dict(self._program.twin.read())
            optimizer.ipu_state_is_dirty = False

    def _write_optimizer_state(self) -> None:
        optimizer = self._optimizer
        if isinstance(optimizer, optim.Optimizer) and optimizer.ipu_state_is_dirty:
            assert self._program is not None and self._program.twin is not None
            assert not optimizer.host_state_is_dirty, (
                "Both host and ipu states cannot be dirty at the same time."
            )
            if optimizer.has_state():
                self._program.twin.write(optimizer._state_dict["ipu_state"])
            optimizer.ipu_state_is_dirty = False

    # ---- compiling

    def _bind_arguments(self, args: Any, kwargs: Any) -> Tuple[Tuple[Any, ...], Dict[str, Any]]:
        """Return the call's arguments in one form: positional in order with the defaults filled
        in. Others are a TypeError here."""
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return bound.args, bound.kwargs

    def _compile(self, arguments: Any) -> None:
        options = self._options
        recorded.event("compile", self._index)
        self._check_options()
        seed = options.random_seed if options.exists("random_seed") else DEFAULT_SEED
        program = Program(self._model, options, self._training, seed)
        program.check_inputs(_trace.list_tensors(arguments))
        trace, layout, losses = program.trace(arguments, options._execution_strategy)
        self._check_layout(trace, layout)
        self._reserved = self._count_ipus(layout.ipus_per_replica)
        if self._training:
            assert self._description is not None
            program.twin = _optimizers.Twin(self._description, program.parameters())
            program.strategy = _optimizers.choose_mean_strategy(self._description, options)
        self._program, self._compiled_inputs = program, arguments
        recomputation = options._Popart.options.get(
            "autoRecomputation", 3 if layout.pipelined else 0
        )
        self._compilation = Compilation(
            self._index, self._training, options.toDict(), type(options._execution_strategy).__name__, trace.blocks,
            dict(sorted(layout.stages.items())), layout.ipus_per_replica, self._reserved, layout.forward_stages,
            layout.parameters, losses, [tuple(t.shape) for t in _trace.list_tensors(program.cut_microbatch(arguments, 0))],
            self._description.to_dict() if self._description else None, recomputation,
        )  # fmt: skip
        recorded.compilations.append(self._compilation)
        self._begin_profile()
        if options.connection_type != enums.ConnectionType.Never:
            self._attach()

    def _get_compilation(self) -> Compilation:
        assert self._compilation is not None
        return self._compilation

    def _check_options(self) -> None:
        """Refuse options that are wrong for every model."""
        options = self._options
        if (
            options.connection_type == enums.ConnectionType.Never
            and self._uses_simulator()
            and options.exists("ipu_version")
        ):
            raise make_cpp_error(
                "The offline IPU target cannot be used if the IPU model is enabled"
            )
        if options.connection_type == enums.ConnectionType.Never:
            if options.exists("ipu_id"):
                raise make_cpp_error("Offline compilation targeting a specific id not supported")
            if options._Popart.options["instrumentWithHardwareCycleCounter"]:
                raise make_cpp_error(
                    "Cycle count logging is only supported on actual IPU hardware."
                )
        steps = options.device_iterations * options.Training.gradient_accumulation
        if (
            options.output_mode == enums.OutputMode.EveryN and steps % options.output_return_period
        ):  # [U]
            raise make_cpp_error(f"output_return_period does not divide {steps} micro-batches")
        for name, location in options.TensorLocations.toDict().items():
            if not isinstance(location, dict):
                continue
            if (
                location.get("useReplicatedTensorSharding") and options.replication_factor == 1
            ):  # [U]
                raise make_cpp_error(
                    f"{name}: replicated tensor sharding needs more than one replica"
                )
            tiles = location.get("useIOTilesToLoad") or location.get("useIOTilesToStore")
            if tiles and not options.TensorLocations.exists("numIOTiles"):  # [U]
                raise make_cpp_error(
                    f"{name}: IO tiles are used, but none allocated by TensorLocations.numIOTiles"
                )

    def _check_layout(self, trace: Any, layout: Any) -> None:
        """Refuse what PopTorch refuses when it knows the model's stages."""
        options, stages = self._options, layout.forward_stages
        if trace.overlapped:
            if _is_pipeline(options._execution_strategy):
                raise make_cpp_error(
                    "Overlapped IO is not supported with poptorch.PipelinedExecution."
                )
            if not options.TensorLocations.exists("numIOTiles"):
                raise make_cpp_error(
                    "No IO tiles allocated. You must allocate at least 32 IO tiles."
                )
            if options.output_mode not in (enums.OutputMode.All, enums.OutputMode.Sum):
                raise make_cpp_error("Unsupported output mode for overlapped IO.")
        if not layout.pipelined:
            return
        if self._training and options.Training.gradient_accumulation < 2 * stages - 1:
            least = (
                f"must be greater than or equal to the number of pipeline stages ({2 * stages - 1})"
            )
            raise make_cpp_error(f"poptorch.Options().Training.gradientAccumulation {least}")
        if not self._training and options.device_iterations < stages:
            raise make_cpp_error(
                f"deviceIterations must be greater than or equal to the number of pipeline stages ({stages})"
            )

    def _uses_simulator(self) -> bool:
        """Return whether the simulator is used; the option precedes the environment variable."""
        if self._options.exists("use_model"):
            return bool(self._options.use_model)
        return os.environ.get("POPTORCH_IPU_MODEL", "0") not in ("", "0")

    def _count_ipus(self, per_replica: int) -> int:
        options, count = self._options, per_replica * self._options.replication_factor
        launcher_ipus = options._ipus_per_replica
        if launcher_ipus is not None and launcher_ipus != _device.round_up(
            per_replica
        ):  # [U] the launcher's reaction
            raise make_cpp_error(
                f"The model uses {per_replica} IPUs, but popdist.poptorch.Options has {launcher_ipus}"
            )
        if self._uses_simulator() or options.connection_type == enums.ConnectionType.Never:
            return count
        return _device.reserve(count, options.auto_round_num_ipus)

    @follow_api("PoplarExecutor.compile")
    def compile(self, *args, **kwargs) -> None:
        arguments = self._bind_arguments(args, kwargs)
        if self._program is not None:
            recorded.warn("Call to compile() ignored: the executable is already compiled")
        else:
            self._compile(arguments)

    # ---- running

    @follow_api("PoplarExecutor.__call__")
    def __call__(self, *args, **kwargs):
        assert self._options.connection_type != enums.ConnectionType.Never, (
            "Trying to run a model on an offline device (ConnectionType.Never): use model.compile(inputs) instead of "
            "model(inputs)"
        )
        arguments = self._bind_arguments(args, kwargs)
        if self._program is None:
            self._compile(arguments)
        self._check_alive()
        if not self._is_attached:
            self.attachToDevice()
        if not self._training:
            self._follow_training()
        program = self._get_program()
        self._check_inputs(self._compiled_inputs, arguments)
        program.check_inputs(_trace.list_tensors(arguments))
        self._write_optimizer_state()
        if (
            self._options.Distributed.numProcesses > 1
            and self._training
            and not os.environ.get("POPTORCH_DOUBLE_ALONE")
        ):
            raise make_unmodelled_error(
                "averaging gradients over processes (POPTORCH_DOUBLE_ALONE=1: each trains for itself)"
            )
        with self._guard_faults():
            recorded.event("execute", self._index)
        begun = time.perf_counter()
        output = program.run(arguments)
        self._record_times(arguments, output, begun)
        recorded.runs.append(Run(
            self._index, [tuple(t.shape) for t in _trace.list_tensors(arguments)],
            program.iterations if self._training else 0,
        ))  # fmt: skip
        if self._training:
            self._dirty_host_weights = True
            if isinstance(self._optimizer, optim.Optimizer):
                self._optimizer.host_state_is_dirty = True
        for tensor in _trace.list_tensors(output):
            tensor.backward = _refuse_backward
        return output

    def _follow_training(self) -> None:
        """Fetch weights that another executor trains, if the model was wrapped for training
        before."""
        model = self._user_model
        if not _wrapping.is_wrapped(model):
            return
        model.copyWeightsToHostIfNeeded()  # may be another executor's weights
        version = model._host_weights_version
        if version is not None and self._host_weights_version != version:
            self.copyWeightsToDevice()
            self._host_weights_version = version

    def _check_inputs(self, compiled: Any, passed: Any) -> None:
        names = list(self._signature.parameters)
        if len(compiled[0]) != len(passed[0]):
            raise make_py_error(
                f"Number of positional arguments mismatch: expected {len(compiled[0])}, got {len(passed[0])}."
            )
        for place, (one, other) in enumerate(zip(compiled[0], passed[0])):
            _check_same_input(
                names[place] if place < len(names) else f"*{names[-1]}[{place}]", one, other
            )
        _check_same_input("named arguments", compiled[1], passed[1])

    def _record_times(self, arguments: Any, output: Any, begun: float) -> None:
        """Record time stamps of host stream callbacks, one for each microbatch and replica
        (CompilerImpl.cpp, StepIO), spread evenly over the call."""
        assert self._program is not None
        program, took = self._program, time.perf_counter() - begun
        count = program.iterations * program.accumulation * program.replicas
        shares = {"input": 0.0, "input_complete": 0.1, "output": 0.9, "output_complete": 1.0}
        streams = {
            "input": len(_trace.list_tensors(arguments)),
            "output": len(_trace.list_tensors(output)),
        }
        for event, share in shares.items():
            times = [begun + took * (i + share) / count for i in range(count)]
            self._stamps[event] = [list(times) for _ in range(streams[event.split("_")[0]])] or [[]]
        stages = self._get_compilation().forward_stages
        depth = self._program.accumulation + (2 * stages - 2 if self._training else stages - 1)
        self._cycles = 1000 * program.iterations * depth  # a thousand cycles a pipeline cycle

    # ---- timing

    def _measure_latency(
        self, begin: str, begin_of: Any, end: str, end_of: Any
    ) -> Tuple[float, float, float]:
        starts = [begin_of(times) for times in zip(*self._stamps[begin])]
        ends = [end_of(times) for times in zip(*self._stamps[end])]
        lengths = [b - a for a, b in zip(starts, ends)]
        return (min(lengths), max(lengths), sum(lengths) / len(lengths))

    @follow_api("PoplarExecutor.getHostIpuLatency")
    def getHostIpuLatency(self):
        return self._measure_latency("input", min, "input_complete", max)

    @follow_api("PoplarExecutor.getComputeLatency")
    def getComputeLatency(self):
        return self._measure_latency("input_complete", max, "output", max)

    @follow_api("PoplarExecutor.getIpuHostLatency")
    def getIpuHostLatency(self):
        return self._measure_latency("output", min, "output_complete", max)

    @follow_api("PoplarExecutor.getLatency")
    def getLatency(self):
        return self._measure_latency("input", min, "output_complete", max)

    @follow_api("PoplarExecutor.cycleCount")
    def cycleCount(self) -> int:
        if not self._options._Popart.options["instrumentWithHardwareCycleCounter"]:
            raise make_py_error(
                "Cycle count logging is disabled. Please set option logCycleCount to True to enable."
            )
        if self._program is None or self._cycles is None:
            raise make_py_error("Please run the model at least once before obtaining cycle count.")
        if self._uses_simulator():
            raise make_cpp_error("Cycle counts need IPU hardware")
        return self._cycles

    # ---- the device

    def _guard_faults(self) -> Any:
        return _FaultGuard(self)

    def _check_alive(self) -> None:
        """Raise the device fault again. After a fault no call is possible; weights that were not
        copied to the host are lost. [U]"""
        if self._lost is not None:
            again = type(self._lost)(self._lost.message, self._lost.type)
            again.__dict__.update(self._lost.__dict__)
            raise again

    def _is_ready(self) -> bool:
        return self._program is not None and self._is_attached

    @follow_api("PoplarExecutor.isAttachedToDevice")
    def isAttachedToDevice(self) -> bool:
        return self._is_ready()

    @follow_api("PoplarExecutor.isCompiled")
    def isCompiled(self) -> bool:
        return self._program is not None

    def _attach(self) -> None:
        recorded.event("attach", self._index)
        if not self._uses_simulator():
            ipu_id = self._options.ipu_id if self._options.exists("ipu_id") else None
            _device.acquire(self._holder, self._reserved, ipu_id)
        self._is_attached = True
        with ApiCall():
            self.copyWeightsToDevice()
        if self._training:
            self._update_optimizer()
        if isinstance(self._optimizer, optim.Optimizer):
            if self._optimizer.has_state():
                self._optimizer.ipu_state_is_dirty = True
                self._write_optimizer_state()
            else:
                self._optimizer.host_state_is_dirty, self._optimizer.ipu_state_is_dirty = (
                    True,
                    False,
                )

    @follow_api("PoplarExecutor.attachToDevice")
    def attachToDevice(self) -> None:
        self._get_program()
        assert self._options.connection_type != enums.ConnectionType.Never, (
            "Trying to attach to an offline device (ConnectionType.Never)"
        )
        if self._is_attached:
            raise make_py_error("Device is already attached")
        self._attach()

    @follow_api("PoplarExecutor.detachFromDevice")
    def detachFromDevice(self) -> None:
        self._get_program()
        if not self._is_attached:
            raise make_py_error("Device is not attached")
        if self._training:
            self._sync_if_needed()
            self._read_optimizer_state()
        recorded.event("detach", self._index)
        self._is_attached = False
        _device.release(self._holder)
        self._end_profile()

    @follow_api("PoplarExecutor.destroy")
    def destroy(self) -> None:
        """Destroy the executable. Before the first compilation this does nothing: the model
        stays wrapped."""
        if self._program is None:
            return
        if self._training:
            self._sync_if_needed()
            self._read_optimizer_state()
        recorded.event("destroy", self._index)
        self._program, self._is_attached = None, False
        _device.release(self._holder)
        self._end_profile()
        if self._training:
            _wrapping.unwrap(self._user_model)

    # ---- profile.pop, in a form that the double of pva reads

    def _begin_profile(self) -> None:
        engine = dict(self._options._Popart.options.get("engineOptions", {}))
        engine.update(
            json.loads(os.environ.get("POPLAR_ENGINE_OPTIONS") or "{}")
        )  # the environment wins
        if engine.get("autoReport.all") != "true":
            return
        default = "training" if self._training else "inference"
        name = self._options.model_name if self._options.exists("model_name") else default
        folder = Path(engine.get("autoReport.directory", ".")) / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder.parent / "debug.cbor").write_bytes(b"")
        file = folder / f"profile_{os.getpid()}_{self._index}.pop"
        compilation = self._get_compilation()
        file.write_text(
            json.dumps({"ipus": compilation.ipus, "replicas": self._options.replication_factor})
        )
        self._profile = file, folder / "profile.pop"

    def _end_profile(self) -> None:
        """Give the report its name, which it gets when the engine is destroyed."""
        if self._profile is not None:
            os.replace(*self._profile)
            self._profile = None


class _FaultGuard:
    """Context in which a device error loses the device. Its IPUs stay in use until the
    executable is destroyed."""

    def __init__(self, executor: PoplarExecutor) -> None:
        self._executor = executor

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if isinstance(error, Error):
            self._executor._lost = error


def _is_pipeline(strategy: Any) -> bool:
    return isinstance(strategy, PipelinedExecution) and not isinstance(strategy, ShardedExecution)


def _refuse_backward(*_: Any, **__: Any) -> None:
    raise make_py_error("backward() cannot be called explicitly on outputs of a PopTorch model.")


def _check_same_input(name: str, compiled: Any, passed: Any) -> None:
    """Refuse an input whose shape, type or plain value differs from the compiled one."""
    if isinstance(compiled, torch.Tensor) and isinstance(passed, torch.Tensor):
        for what, one, other in (
            ("Data type", compiled.dtype, passed.dtype),
            ("Shape", compiled.shape, passed.shape),
        ):
            if one != other:
                raise make_py_error(f"{what} mismatch for {name}: expected {one} but got {other}.")
        return
    if type(compiled) is not type(passed):
        raise make_py_error(
            f"Type mismatch for {name}: expected {type(compiled)} but got {type(passed)}."
        )
    if compiled != passed:
        raise make_py_error(f"Value mismatch for {name}: expected {compiled} but got {passed}.")


# ---- the functions of the module


def _get_module(model: Any) -> Any:
    return model._user_model if isinstance(model, PoplarExecutor) else model


@follow_api("trainingModel", unchecked=["options"])
def trainingModel(
    model: Union["torch.nn.Module", "PoplarExecutor"],
    options: Optional["Options"] = None,
    optimizer: Optional["torch.optim.Optimizer"] = None,
) -> PoplarExecutor:
    model = _get_module(model)
    if _wrapping.is_wrapped(model):
        raise RuntimeError("Model has already been wrapped in 'poptorch.trainingModel'.")
    return PoplarExecutor(copy.copy(model), options, True, optimizer, model)


@follow_api("inferenceModel", unchecked=["options"])
def inferenceModel(
    model: Union["torch.nn.Module", "PoplarExecutor"], options: Optional["Options"] = None
) -> PoplarExecutor:
    """Copy the model shallowly: parameters are shared, and whether it was wrapped for training before is kept."""
    model = _get_module(model)
    other = type(model).__new__(type(model))
    other.__dict__.update(model.__dict__)
    return PoplarExecutor(other, options, False, None, other)


@follow_api("ipuHardwareIsAvailable")
def ipuHardwareIsAvailable(num_ipus: int = 1) -> bool:
    return 0 < num_ipus <= _device.count_ipus()
