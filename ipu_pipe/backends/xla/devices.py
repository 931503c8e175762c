"""The devices of an XLA platform, and the stages on them.

One process drives all devices of a platform. XLA's own CPU client can stand for several devices
(`backend.devices`), so that a run on four of them needs no accelerator.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Sequence

import numpy as np
from torch import nn

from ipu_pipe.backends.processes.layout import can_cut, cut_at
from ipu_pipe.config.schema import BackendConfig, PipelineConfig
from ipu_pipe.cut.graphs import StageGraphs
from ipu_pipe.errors import BadInput, summarize
from ipu_pipe.job.factories import Placed, place_whole
from ipu_pipe.launcher import read_launch
from ipu_pipe.model.loss import Take
from ipu_pipe.model.stages import group_stages, partition
from ipu_pipe.refusals import Argument
from ipu_pipe.schedule.methods import Method

OLDEST_JAX = (0, 10)
# platform -> what brings it
_REMEDIES = {
    "tpu": ": on a TPU VM, pip install 'jax[tpu]'",
    "tt": ": with a Tenstorrent card, pip install jax-tt-plugin",
}


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


def keep_compiled(cache: str | bool | None) -> None:
    """Let jax keep compiled programs in a folder, so that another process does not compile them
    again. `cache`: the folder, False for none, None for the user's cache.
    """
    jax = import_jax()
    from jax.experimental.compilation_cache import compilation_cache

    # a folder that the caller or the environment has set stays
    if cache is None and jax.config.jax_compilation_cache_dir:
        return
    if cache is None:
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        cache = str(Path(home) / "ipu_pipe" / "xla" / _describe_processor())
    jax.config.update("jax_compilation_cache_dir", cache or None)
    # what was compiled so far in this process has opened another folder
    compilation_cache.reset_cache()
    # most passes compile in less than the second from which on jax would keep them
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)


def _describe_processor() -> str:
    """Return a name for processors of the same instructions: a program of another may not run."""
    facts = platform.machine()
    # other systems than Linux have no such file
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        facts += next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return hashlib.sha256(facts.encode()).hexdigest()[:12]


def list_devices(settings: BackendConfig) -> list[Any]:
    """Return the devices of the platform, as many as `devices` says, or all.

    Raise `BadInput` if the platform is not there or has fewer.
    """
    jax = import_jax()
    kind = settings.platform or "cpu"
    count = settings.devices
    if kind == "cpu" and count:
        # it has no effect once jax has begun
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", count)
    try:
        devices = jax.devices(kind)
    except RuntimeError as error:
        raise BadInput(
            f"{Argument('backend_args.platform')}: {kind}: jax has no such platform here"
            f"{_REMEDIES.get(kind, '')}: {summarize(error)}"
        ) from None
    # not >=, because an error that is NaN must be refused, too
    if kind != "cpu" and not measure_product_error(devices[0]) < 0.1:
        raise BadInput(
            f"{Argument('backend_args.platform')}: {kind}: the first device multiplies wrong, as one "
            "does that is only described: it needs the hardware itself"
        )
    if count and count > len(devices):
        more = ""
        if kind == "cpu":
            more = f", or begin with XLA_FLAGS=--xla_force_host_platform_device_count={count}"
        raise BadInput(
            f"{Argument('backend_args.devices')}: {count}: jax has {len(devices)} {kind} devices: "
            f"must be at most that{more}"
        )
    return list(devices[: count or len(devices)])


@functools.lru_cache(maxsize=None)
def measure_product_error(device: Any) -> float:
    """Return the greatest error of a product of float32 matrices by the product of their absolute
    values: 1e-7 of float32, up to 1e-3 of TF32, 6e-3 of bfloat16, and 0.8 of a device that returns
    zeros, as Tenstorrent's mock does.
    """
    import jax

    # a fixed draw, so that a device has one figure
    x, y = np.random.default_rng(0).standard_normal((2, 32, 32), np.float32)
    product = jax.numpy.matmul(*jax.device_put((x, y), device), precision="highest")
    # in float64 on the host, whose own error does not count
    error = np.abs(np.asarray(product) - x.astype(np.float64) @ y)
    return float((error / (np.abs(x) @ np.abs(y))).max())


def launch(config: PipelineConfig, asked: Any) -> None:
    """Raise `BadInput` if a launcher has started several processes: one drives all devices."""
    if read_launch().world > 1:
        raise BadInput(
            f"{Argument('backend')}: xla: one process drives all devices: start it without "
            f"torchrun, or set {Argument('backend', 'distributed')}"
        )
    list_devices(config.backend)


def place(
    config: PipelineConfig, method: Method, model: nn.Module, x: Any, take: Take | None
) -> Placed:
    """Cut the model into its stages, and place neighboring stages on the same device if there are
    fewer devices than stages. Raise `BadInput` if the model cannot be cut so.
    """
    # refused by its name when the job is known
    if method.structure:
        return place_whole(config, method, model, x, take)
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
    # an order of the method's own places the stages itself
    if method.order is None:
        heads = group_stages(model, requested, min(len(devices), stages), x)
        # the device of a stage is the number of groups that begin up to it
        placement = tuple(sum(head <= s for head in heads) for s in range(stages))
    return placed._replace(local_stages=None, placement=placement)
