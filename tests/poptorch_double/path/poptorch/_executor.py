"""PoplarExecutor: the wrapped model, from compiling to destroying, in PopTorch's order and with its checks."""

from __future__ import annotations

import copy
import inspect
import json
import os
import time
import weakref
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

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

NO_EXECUTABLE = "Model has not been compiled or has been destroyed."
DEFAULT_SEED = 42  # [U] of an executable whose options give none
# when the callbacks of host streams are called, as a share of the time of a microbatch
SHARES = {"input": 0.0, "input_complete": 0.1, "output": 0.9, "output_complete": 1.0}
# latencies: from the least or greatest time of an event to the greatest of another
LATENCIES = {
    "getHostIpuLatency": (min, "input", "input_complete"),
    "getComputeLatency": (max, "input_complete", "output"),
    "getIpuHostLatency": (min, "output", "output_complete"),
    "getLatency": (min, "input", "output_complete"),
}


class PoplarExecutor:
    """The wrapped model. Made by trainingModel and inferenceModel only."""

    def __init__(
        self, model: Any, options: Any, training: bool, optimizer: Any, user_model: Any
    ) -> None:
        object.__setattr__(self, "_user_model", user_model)
        object.__setattr__(self, "_model", model)
        self._index = recorded.executors
        recorded.executors += 1
        self._holder = next(_device.holders)
        self._training = training
        self._options = self._copy_options(options)
        self._program: Optional[Program] = None
        self._compilation: Any = None
        self._compiled_inputs: Any = None
        self._reserved = 0
        self._is_attached = False
        self._lost: Optional[Error] = None
        self._dirty_host_weights = False
        self._host_weights_version = 0
        self._stamps: Dict[str, List[List[float]]] = {event: [[]] for event in SHARES}
        self._cycles: Optional[int] = None
        self._profile: Optional[Tuple[Path, Path]] = None
        self._signature = inspect.signature(model.forward)
        self._optimizer: Any = None
        self._description: Any = None
        # an optimizer that was set and has not reached the device
        self._optimizer_is_pending = False
        if training:
            self._names = {id(p): name for name, p in user_model.named_parameters()}
            self._take_optimizer(optimizer or optim.SGD(user_model.parameters(), lr=0.01))
            listed = {name for group in self._description.parameters for name in group}
            missing = [
                n for n, p in user_model.named_parameters() if p.requires_grad and n not in listed
            ]
            if missing:  # [U] PopTorch trains them with the optimizer's defaults
                raise DoubleRefuses(
                    f"parameters in no group of the optimizer: {', '.join(missing)}"
                )
            _wrapping.wrap(user_model, self)
        self._options._freeze()
        weakref.finalize(self, _device.release, self._holder)

    def _copy_options(self, options: Optional[Options]) -> Options:
        """Freeze the given options, and return a copy with the default output mode filled in."""
        if not isinstance(options, (Options, type(None))):
            raise make_py_error(
                f"Invalid type: 'options' is of type {type(options)} (Expected poptorch.Options)"
            )
        if options is not None:
            options._freeze()
        options = copy.deepcopy(options) or Options()
        if options.defaultOutputMode():
            options.outputMode(enums.OutputMode.Final if self._training else enums.OutputMode.All)
        if not self._training and options.Training.gradient_accumulation != 1:
            raise make_py_error(
                "Training.gradientAccumulation must be 1 when running a poptorch.inferenceModel()."
            )
        return options

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
        # before anything touches the parameters, and whatever comes of it
        self._dirty_host_weights = False
        self._require_device()
        self._run_on_device("copyWeightsToHost")
        program.download(self._list_host_tensors())
        self._host_weights_version += 1

    @follow_api("PoplarExecutor.copyWeightsToDevice")
    def copyWeightsToDevice(self) -> None:
        """Copy the host's weights. Training since the last copy to the host is lost, as in
        PopTorch."""
        program = self._get_program()
        self._require_device()
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
        if self._program is not None and self._is_attached:
            self._update_optimizer()
            self._write_optimizer_state()

    def _update_optimizer(self) -> None:
        """Send a new description to the device; while detached it waits for the next attachment."""
        program = self._get_program()
        if self._optimizer_is_pending and program.twin is not None:
            _optimizers.check_replacement(program.twin.compiled, self._description)
            program.twin.update(self._description)
        self._optimizer_is_pending = False

    def _read_optimizer_state(self) -> None:
        optimizer = self._optimizer
        if self._training and optimizer.host_state_is_dirty and self._program is not None:
            assert not self._optimizer_is_pending, (
                "Both host and ipu states cannot be dirty at the same time."
            )
            self._check_alive()
            assert self._program.twin is not None
            optimizer.set_state_dict(self._program.twin.read())
            optimizer.ipu_state_is_dirty = False

    def _write_optimizer_state(self) -> None:
        optimizer = self._optimizer
        if self._training and optimizer.ipu_state_is_dirty:
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
        self._check_layout(layout)
        self._reserved = self._count_ipus(layout.ipus_per_replica)
        if self._training:
            program.twin = _optimizers.Twin(self._description, program.parameters())
            program.strategy = _optimizers.choose_mean_strategy(self._description, options)
        self._program, self._compiled_inputs = program, arguments
        self._compilation = Compilation(
            self._training, options.toDict(), type(options._execution_strategy).__name__,
            dict(sorted(layout.stages.items())), self._reserved, layout.forward_stages, layout.parameters, losses,
            [tuple(t.shape) for t in _trace.list_tensors(program.cut_microbatch(arguments, 0))],
            self._description.to_dict() if self._description else None,
        )  # fmt: skip
        recorded.compilations.append(self._compilation)
        self._begin_profile()
        if options.connection_type != enums.ConnectionType.Never:
            self._attach()

    def _check_options(self) -> None:
        """Refuse options that are wrong for every model."""
        options = self._options
        if options.connection_type == enums.ConnectionType.Never:
            for is_wrong, why in (
                (self._uses_simulator() and options.exists("ipu_version"),
                 "The offline IPU target cannot be used if the IPU model is enabled"),
                (options.exists("ipu_id"), "Offline compilation targeting a specific id not supported"),
                (options._Popart.options["instrumentWithHardwareCycleCounter"],
                 "Cycle count logging is only supported on actual IPU hardware."),
            ):  # fmt: skip
                if is_wrong:
                    raise make_cpp_error(why)
        locations = options.TensorLocations
        for name, location in locations.toDict().items():
            chosen = location if isinstance(location, dict) else {}
            if chosen.get("useReplicatedTensorSharding") and options.replication_factor == 1:  # [U]
                raise make_cpp_error(
                    f"{name}: replicated tensor sharding needs more than one replica"
                )
            tiles = chosen.get("useIOTilesToLoad") or chosen.get("useIOTilesToStore")
            if tiles and not locations.exists("numIOTiles"):  # [U]
                raise make_cpp_error(
                    f"{name}: IO tiles are used, but none allocated by TensorLocations.numIOTiles"
                )

    def _check_layout(self, layout: Any) -> None:
        """Refuse what PopTorch refuses when it knows the model's stages."""
        name, count = "deviceIterations", self._options.device_iterations
        least = layout.forward_stages
        if self._training:
            name, count = "gradientAccumulation", self._options.Training.gradient_accumulation
            least = 2 * least - 1
        if layout.pipelined and count < least:
            raise make_cpp_error(
                f"{name} must be greater than or equal to the number of pipeline stages ({least})"
            )

    def _count_ipus(self, per_replica: int) -> int:
        options, count = self._options, per_replica * self._options.replication_factor
        launcher_ipus = options._ipus_per_replica
        # [U] the launcher's reaction
        if launcher_ipus not in (None, _device.round_up(per_replica)):
            raise make_cpp_error(
                f"The model uses {per_replica} IPUs, but popdist.poptorch.Options has {launcher_ipus}"
            )
        if self._uses_simulator() or options.connection_type == enums.ConnectionType.Never:
            return count
        return _device.reserve(count, options.auto_round_num_ipus)

    def _uses_simulator(self) -> bool:
        """Return whether the simulator is used; the option precedes the environment variable."""
        if self._options.exists("use_model"):
            return bool(self._options.use_model)
        return os.environ.get("POPTORCH_IPU_MODEL", "0") not in ("", "0")

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
        compiled = self._compiled_inputs
        if len(compiled[0]) != len(arguments[0]):
            raise make_py_error(
                f"Number of positional arguments mismatch: expected {len(compiled[0])}, got {len(arguments[0])}."
            )
        names = [*self._signature.parameters, *map(str, range(len(compiled[0])))]
        for name, one, other in [
            *zip(names, compiled[0], arguments[0]),
            ("named arguments", compiled[1], arguments[1]),
        ]:
            _check_same_input(name, one, other)
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
        self._run_on_device("execute")
        begun = time.perf_counter()
        output = program.run(arguments)
        self._record_times(arguments, output, begun)
        shapes = [tuple(t.shape) for t in _trace.list_tensors(arguments)]
        recorded.runs.append(Run(shapes, program.iterations if self._training else 0))
        if self._training:
            self._dirty_host_weights = True
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

    # ---- timing

    def _record_times(self, arguments: Any, output: Any, begun: float) -> None:
        """Record time stamps of host stream callbacks, one for each microbatch and replica
        (CompilerImpl.cpp, StepIO), spread evenly over the call."""
        program = self._get_program()
        took = (time.perf_counter() - begun) / program.microbatches
        for event, share in SHARES.items():
            streams = _trace.list_tensors(arguments if event.startswith("input") else output)
            times = [begun + took * (i + share) for i in range(program.microbatches)]
            self._stamps[event] = [list(times) for _ in streams] or [[]]
        stages = self._compilation.forward_stages
        depth = program.accumulation + (2 * stages - 2 if self._training else stages - 1)
        self._cycles = 1000 * program.iterations * depth  # a thousand cycles a pipeline cycle

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

    def _run_on_device(self, event: str) -> None:
        """Record an event. A device error loses the device; its IPUs stay in use until the
        executable is destroyed."""
        try:
            recorded.event(event, self._index)
        except Error as error:
            self._lost = error
            raise

    def _check_alive(self) -> None:
        """Raise the device fault again. After a fault no call is possible; weights that were not
        copied to the host are lost. [U]"""
        if self._lost is not None:
            again = type(self._lost)(self._lost.message, self._lost.type)
            again.__dict__.update(self._lost.__dict__)
            raise again

    def _require_device(self) -> None:
        self._check_alive()
        if not self._is_attached:  # [U]
            raise make_cpp_error("Device is not attached")

    @follow_api("PoplarExecutor.isAttachedToDevice")
    def isAttachedToDevice(self) -> bool:
        return self._program is not None and self._is_attached

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
            has_state = self._optimizer.has_state()
            self._optimizer.ipu_state_is_dirty = has_state
            if has_state:
                self._write_optimizer_state()
            else:
                self._optimizer.host_state_is_dirty = True

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
        # the environment wins
        engine.update(json.loads(os.environ.get("POPLAR_ENGINE_OPTIONS") or "{}"))
        if engine.get("autoReport.all") != "true":
            return
        default = "training" if self._training else "inference"
        name = self._options.model_name if self._options.exists("model_name") else default
        folder = Path(engine.get("autoReport.directory", ".")) / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder.parent / "debug.cbor").write_bytes(b"")
        file = folder / f"profile_{os.getpid()}_{self._index}.pop"
        sizes = {"ipus": self._compilation.ipus, "replicas": self._options.replication_factor}
        file.write_text(json.dumps(sizes))
        self._profile = file, folder / "profile.pop"

    def _end_profile(self) -> None:
        """Give the report its name, which it gets when the engine is destroyed."""
        if self._profile is not None:
            os.replace(*self._profile)
            self._profile = None


def _add_latency(name: str, begin_of: Any, begin: str, end: str) -> None:
    def measure(self: Any) -> Tuple[float, float, float]:
        starts = [begin_of(times) for times in zip(*self._stamps[begin])]
        ends = [max(times) for times in zip(*self._stamps[end])]
        lengths = [b - a for a, b in zip(starts, ends)]
        return (min(lengths), max(lengths), sum(lengths) / len(lengths))

    setattr(PoplarExecutor, name, follow_api(f"PoplarExecutor.{name}")(measure))


for _name, _row in LATENCIES.items():
    _add_latency(_name, *_row)


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


@follow_api("trainingModel", unchecked=["options"])
def trainingModel(model: Any, options: Any, optimizer: Any) -> PoplarExecutor:
    model = getattr(model, "_user_model", model)
    if _wrapping.is_wrapped(model):
        raise RuntimeError("Model has already been wrapped in 'poptorch.trainingModel'.")
    return PoplarExecutor(copy.copy(model), options, True, optimizer, model)


@follow_api("inferenceModel", unchecked=["options"])
def inferenceModel(model: Any, options: Any) -> PoplarExecutor:
    """Copy the model shallowly: parameters are shared, and whether it was wrapped for training before is kept."""
    model = getattr(model, "_user_model", model)
    other = type(model).__new__(type(model))
    other.__dict__.update(model.__dict__)
    return PoplarExecutor(other, options, False, None, other)


@follow_api("ipuHardwareIsAvailable")
def ipuHardwareIsAvailable(num_ipus: int = 1) -> bool:
    return 0 < num_ipus <= _device.count_ipus()
