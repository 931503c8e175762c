"""A test double of PopTorch 3.4; see the package around it. It does not check the version of torch, which PopTorch does."""

import os as _os
import sys as _sys

_sys.stderr.fileno()  # PopTorch hands it to faulthandler
_os.environ.setdefault("RDMAV_FORK_SAFE", "1")

from poptorch import _record, enums, ops, optim, options, profiling  # noqa: E402
from poptorch._data import AsynchronousDataAccessor, DataLoader  # noqa: E402
from poptorch._errors import ConfigFileError, Error, RecoverableError, UnrecoverableError  # noqa: E402
from poptorch._executor import (  # noqa: E402
    PoplarExecutor,
    inferenceModel,
    ipuHardwareIsAvailable,
    ipuHardwareVersion,
    isRunningOnIpu,
    load,
    registerCustomArgParser,
    registerPostCompileHook,
    registerPreCompileHook,
    setLogLevel,
    trainingModel,
)
from poptorch._record import recorded  # noqa: E402
from poptorch._signatures import DATA as _DATA  # noqa: E402
from poptorch.enums import *  # noqa: E402, F403
from poptorch.ops import (  # noqa: E402
    CPU,
    BeginBlock,
    Block,
    BlockFunction,
    MultiConv,
    NameScope,
    cond,
    ctc_beam_search_decoder,
    custom_op,
    dynamic_slice,
    dynamic_update,
    for_loop,
    fps,
    identity_loss,
    ipu_print_tensor,
    module_repr,
    nearest,
    nop,
    recomputationCheckpoint,
    removeBlocks,
    serializedMatMul,
    set_available_memory,
    set_overlap_for_input,
    set_overlap_for_output,
)
from poptorch.options import Options, TensorLocationSettings  # noqa: E402
from poptorch.strategies import (  # noqa: E402
    ParallelPhasedExecution,
    Phase,
    PipelinedExecution,
    SerialPhasedExecution,
    ShardedExecution,
    Stage,
)

__version__ = _DATA["version"]
__all__ = [*_DATA["enums"], "AsynchronousDataAccessor", "BeginBlock", "Block", "BlockFunction", "CPU", "ConfigFileError",
           "DataLoader", "Error", "MultiConv", "NameScope", "Options", "ParallelPhasedExecution", "Phase",
           "PipelinedExecution", "PoplarExecutor", "RecoverableError", "SerialPhasedExecution", "ShardedExecution", "Stage",
           "TensorLocationSettings", "UnrecoverableError", "cond", "ctc_beam_search_decoder", "custom_op", "dynamic_slice",
           "dynamic_update", "enums", "for_loop", "fps", "identity_loss", "inferenceModel", "ipuHardwareIsAvailable",
           "ipuHardwareVersion", "ipu_print_tensor", "isRunningOnIpu", "load", "module_repr", "nearest", "nop", "ops",
           "optim", "options", "profiling", "recomputationCheckpoint", "recorded", "registerCustomArgParser",
           "registerPostCompileHook", "registerPreCompileHook", "removeBlocks", "serializedMatMul", "setLogLevel",
           "set_available_memory", "set_overlap_for_input", "set_overlap_for_output", "trainingModel"]  # fmt: skip

_record.start()
