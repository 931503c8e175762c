"""The devices of an XLA platform, and the stages on them.

One process drives all devices of a platform. XLA's own CPU client can stand for several devices
(`backend.devices`), so that a run on four of them needs no accelerator.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any, Sequence

from torch import nn

from ipu_pipe.backends.processes.layout import can_cut, cut_at
from ipu_pipe.config.schema import BackendConfig, Config
from ipu_pipe.cut.graphs import StageGraphs
from ipu_pipe.errors import BadInput, summarize
from ipu_pipe.job.factories import Placed
from ipu_pipe.launcher import read_launch
from ipu_pipe.model.stages import group_stages, partition
from ipu_pipe.refusals import EMULATOR, Argument
from ipu_pipe.schedule.methods import Method

OLDEST_JAX = (0, 10)


@dataclass(frozen=True)
class XlaOptions:
    """The options of the backend.

    `devices`: of the platform, on which the stages are placed. `graphs`: of each stage. `program`:
    what a compiled program holds, an `action` or a `slot`; None: what the stages suggest.
    """

    devices: Sequence[Any]
    graphs: Sequence[StageGraphs]
    program: str | None


def import_jax() -> Any:
    """Import jax, with 64-bit types, which labels and float64 need. Raise `BadInput` if it is
    missing or too old.
    """
    how = "pip install 'ipu_pipe[xla]', with Python 3.11 or later"
    try:
        import jax
    except ImportError as error:
        raise BadInput(f"{Argument('backend')}: xla: needs jax ({error}): {how}") from None
    version = tuple(int(part) for part in jax.__version__.split(".")[:2])
    if version < OLDEST_JAX:
        raise BadInput(f"{Argument('backend')}: xla: jax {jax.__version__} is too old: {how}")
    jax.config.update("jax_enable_x64", True)
    return jax


def list_devices(settings: BackendConfig) -> list[Any]:
    """Return the devices of the platform, as many as `devices` says, or all.

    Raise `BadInput` if the platform is not there or has fewer.
    """
    jax = import_jax()
    platform = settings.platform or "cpu"
    count = settings.devices
    if platform == "cpu" and count:
        # it has no effect once jax has begun
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", count)
    try:
        devices = jax.devices(platform)
    except RuntimeError as error:
        how = ": on a TPU VM, pip install 'jax[tpu]'" if platform == "tpu" else ""
        raise BadInput(
            f"{Argument('backend_args.platform')}: {platform}: jax has no such platform here"
            f"{how}: {summarize(error)}"
        ) from None
    if count and count > len(devices):
        more = ""
        if platform == "cpu":
            more = f", or begin with XLA_FLAGS=--xla_force_host_platform_device_count={count}"
        raise BadInput(
            f"{Argument('backend_args.devices')}: {count}: jax has {len(devices)} {platform} devices: "
            f"must be at most that{more}"
        )
    return list(devices[: count or len(devices)])


def launch(config: Config, asked: Any) -> None:
    """Raise `BadInput` if a launcher has started several processes: one drives all devices."""
    if read_launch().world > 1:
        raise BadInput(
            f"{Argument('backend')}: xla: one process drives all devices: start it without "
            f"torchrun, or set {Argument('backend', 'distributed')}"
        )
    list_devices(config.backend)


def place(config: Config, method: Method, model: nn.Module, x: Any) -> Placed:
    """Cut the model into its stages, and place neighboring stages on the same device if there are
    fewer devices than stages. Raise `BadInput` if the model cannot be cut so.
    """
    if method.structure:
        raise BadInput(
            f"method: {method.name}: blocks with losses of their own do not run on xla: use "
            f"{EMULATOR}"
        )
    devices = list_devices(config.backend)
    requested = partition(model, x, config.stages, one_stage=method.one_stage_reason)
    if not can_cut(method, model, requested, x):
        raise BadInput(
            f"stages: {len(requested)}: they divide the weights of modules, which xla cannot: use "
            f"fewer stages"
        )
    stages = len(requested)
    # that no two stages share a device is the strictest case for what the stages may share
    placed = cut_at(method, model, requested.begin_names(), tuple(range(stages)), 0, x)
    placement: tuple[int, ...] = ()
    if method.order is None:
        heads = group_stages(model, requested, min(len(devices), stages), x)
        placement = tuple(sum(head <= s for head in heads) for s in range(stages))
    return placed._replace(local_stages=None, placement=placement)
