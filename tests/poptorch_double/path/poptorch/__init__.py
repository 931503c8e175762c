"""A test double of PopTorch 3.4; see the package around it. It does not check the version of torch, which PopTorch does."""

import os as _os
import sys as _sys

_sys.stderr.fileno()  # PopTorch hands it to faulthandler
_os.environ.setdefault("RDMAV_FORK_SAFE", "1")

from poptorch import _record, enums, ops, optim, options, profiling, strategies  # noqa: E402, F401
from poptorch._data import DataLoader  # noqa: E402, F401
from poptorch._errors import Error, RecoverableError, UnrecoverableError  # noqa: E402, F401
from poptorch._executor import (  # noqa: E402, F401
    PoplarExecutor,
    inferenceModel,
    ipuHardwareIsAvailable,
    trainingModel,
)
from poptorch._record import recorded  # noqa: E402, F401
from poptorch._signatures import DATA as _DATA  # noqa: E402
from poptorch.enums import *  # noqa: E402, F403
from poptorch.ops import BeginBlock, Block, identity_loss  # noqa: E402, F401
from poptorch.options import Options, TensorLocationSettings  # noqa: E402, F401
from poptorch.strategies import PipelinedExecution, ShardedExecution, Stage  # noqa: E402, F401

__version__ = _DATA["version"]

_record.order_faults()
