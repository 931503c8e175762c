"""What no IPU can do of a config alone, each with its remedy.

Sources: PopTorch, branch sdk-release-3.4 (poptorch/python/options.py, popart_compiler/source/Compiler.cpp). Not run on hardware.
"""

from __future__ import annotations

from typing import Any, List, Mapping

from ipu_pipe.backends.ipu.config import LOCATIONS, IpuConfig, IpuProfile, TensorLocation, show_key
from ipu_pipe.backends.ipu.placement import check_method, check_placement, is_pipelined, is_under_poprun
from ipu_pipe.config.schema import Config
from ipu_pipe.hardware.precision import MIXED
from ipu_pipe.schedule.methods import Method

PRECISIONS = ("float32", "16.16", "16.32", "32.32")


def check_config(config: Config, method: Method) -> List[str]:
    """Return what no IPU can do of a config whose method is resolved, `key: value: what is allowed`, before model and data are
    made; for other backends, which of its keys need PopTorch."""
    backend = config.backend
    if backend.name != "poptorch":
        if config.precision in ("16.16", "16.32", "32.32"):
            return [
                f"precision: {config.precision}: is of backend.name poptorch, must be float32, float64, bfloat16 or "
                f"{MIXED} with {backend.name}"
            ]
        return []
    ipu, args = config.ipu, config.method_settings()
    faults = check_method(method)
    if config.precision not in PRECISIONS:
        faults.append(
            f"precision: {config.precision}: no IPU computes in it: must be {', '.join(PRECISIONS[1:])} or float32"
        )
    if backend.device != "cpu":
        faults.append(f"backend.device: {backend.device}: poptorch's host is the CPU: must be cpu")
    faults += _check_clipping(config, ipu)
    faults += _check_execution(config, ipu, method)
    faults += _check_blocks(config, ipu, method, args)
    faults += check_locations(config, ipu)
    faults += _check_target(ipu)
    if not faults and ipu.local == "fused":
        faults += _check_stages(config, ipu, method)
    return faults


def check_stage_count(config: Config, method: Method, stages: int) -> List[str]:
    """Return why that many stages cannot run; empty on other backends than PopTorch's."""
    return [] if config.backend.ipu is None else check_placement(config, config.ipu, method, stages)


def _check_clipping(config: Config, ipu: IpuConfig) -> List[str]:
    faults = []
    if config.clip is not None and config.clip.scope != "global":
        faults.append(
            f"clip.scope: {config.clip.scope}: PopTorch clips by the global norm alone (max_grad_norm): must be global"
        )
    if ipu.use_combined_accum and ipu.tensor_locations.optimizer != TensorLocation():
        faults.append(
            show_key("use_combined_accum", True)
            + ": leaves no optimizer state that tensor_locations.optimizer could place: "
            "use false, or leave that out"
        )
    return faults


def _check_execution(config: Config, ipu: IpuConfig, method: Method) -> List[str]:
    faults, accumulation = [], config.gradient_accumulation
    if ipu.overlapped_io != "none":
        if is_pipelined(method):
            faults.append(
                f"{show_key('overlapped_io', ipu.overlapped_io)}: PopTorch overlaps no input and output with a "
                "pipeline: must be none (prefetch_buffering_depth buffers instead), or method naive"
            )
        if ipu.tensor_locations.num_io_tiles is None:
            faults.append(
                f"{show_key('overlapped_io', ipu.overlapped_io)}: needs tensor_locations.num_io_tiles, 32 or more"
            )
        if ipu.output_mode not in ("all", "sum"):
            faults.append(f"{show_key('output_mode', ipu.output_mode)}: with overlapped_io it must be all or sum")
    if ipu.output_mode == "every_n" and accumulation % ipu.output_return_period:
        faults.append(
            f"{show_key('output_return_period', ipu.output_return_period)}: must divide gradient_accumulation {accumulation}"
        )
    if ipu.output_mode != "every_n" and ipu.output_return_period != 1:
        faults.append(
            f"{show_key('output_return_period', ipu.output_return_period)}: is of output_mode every_n: must be 1 with "
            f"{ipu.output_mode}"
        )
    if config.recompute and ipu.recomputation == "none":
        faults.append("recompute: true: contradicts backend.ipu.recomputation none: set one of them otherwise")
    if ipu.device_iterations > 1:
        faults += _check_iterations(config, ipu.device_iterations)
    return faults


def _check_iterations(config: Config, iterations: int) -> List[str]:
    """Return what would have to happen between the updates of a call, which are made in one go."""
    key, faults = show_key("device_iterations", iterations), []
    for name, value in (("steps", config.steps), ("checkpoint.every", config.checkpoint.every)):
        if value is not None and value % iterations:
            faults.append(f"{key}: a call is so many updates: must divide {name} {value}")
    schedule = config.lr_schedule
    if schedule.name not in ("constant", "step") or schedule.warmup_steps:
        what = schedule.name if schedule.name not in ("constant", "step") else "a warm-up"
        faults.append(
            f"{key}: the updates of a call share one learning rate, which {what} changes at each: must be 1, or lr_schedule"
            " constant or step without warmup_steps"
        )
    return faults


def _check_blocks(config: Config, ipu: IpuConfig, method: Method, args: Mapping[str, Any]) -> List[str]:
    faults = []
    if ipu.local == "decoupled":
        if method.structure is None:
            faults.append(
                f"{show_key('local', 'decoupled')}: {method.name} has one loss: must be fused, or a local_ method"
            )
        elif method.structure.layers is not None:
            faults.append(f"{show_key('local', 'decoupled')}: {method.name} trains one block alone: must be fused")
        if config.replicas > 1:
            faults.append(f"replicas: {config.replicas}: not with backend.ipu.local decoupled: must be 1")
        if ipu.device_iterations > 1:
            faults.append(f"{show_key('device_iterations', ipu.device_iterations)}: must be 1 with local decoupled")
        if ipu.ipus is not None:
            faults.append(
                f"{show_key('ipus', ipu.ipus)}: with local decoupled every block has a device of its own: use ipu_ids, ids "
                "of gc-info"
            )
        if ipu.data_loading.mode == "async":
            faults.append(f"{show_key('data_loading.mode', 'async')}: must be sync with local decoupled")
        if ipu.output_mode != "all":
            faults.append(
                f"{show_key('output_mode', ipu.output_mode)}: must be all with local decoupled, which hands activations on"
            )
        if ipu.compile_only:
            faults.append(f"{show_key('compile_only', True)}: not with local decoupled: must be false, or local fused")
    elif args.get("block_accumulation") is not None:
        faults.append(
            f"method_args.block_accumulation: {args['block_accumulation']}: in one graph all blocks are updated "
            "together: leave it out, or set backend.ipu.local=decoupled"
        )
    if ipu.local == "decoupled" and ipu.profile != IpuProfile():
        why = "its processes would write one profile over the other: leave backend.ipu.profile out"
        faults.append(f"{show_key('local', ipu.local)}: {why}")
    if ipu.ipu_ids is not None and is_under_poprun():
        faults.append(f"{show_key('ipu_ids', ipu.ipu_ids)}: not under poprun, which chooses the devices: leave it out")
    if ipu.local == "fused" and ipu.ipu_ids is not None and len(ipu.ipu_ids) != 1:
        faults.append(
            f"{show_key('ipu_ids', ipu.ipu_ids)}: must be one id of gc-info, that of a device with all the IPUs"
        )
    if method.structure is not None and config.clip is not None:
        faults.append(
            f"clip: PopTorch's norm is over all blocks, those of {method.name} know only their own: must be null"
        )
    return faults


def check_locations(config: Config, ipu: IpuConfig) -> List[str]:
    faults, locations = [], ipu.tensor_locations
    for name in LOCATIONS:
        location = getattr(locations, name)
        key = f"tensor_locations.{name}"
        if location.replicated_tensor_sharding and config.replicas == 1:
            faults.append(
                f"{show_key(key + '.replicated_tensor_sharding', True)}: shards over replicas, of which there is one: "
                "must be false, or replicas 2 or more"
            )
        for tiles in ("io_tiles_to_load", "io_tiles_to_store"):
            if getattr(location, tiles) and locations.num_io_tiles is None:
                faults.append(f"{show_key(f'{key}.{tiles}', True)}: needs tensor_locations.num_io_tiles, 32 or more")
    return faults


def _check_target(ipu: IpuConfig) -> List[str]:
    faults = []
    if ipu.offline_target is not None and not ipu.compile_only:
        faults.append(
            f"{show_key('offline_target', ipu.offline_target)}: nothing can run on it: needs compile_only: true"
        )
    if ipu.offline_target is not None and ipu.use_ipu_model:
        faults.append(f"{show_key('use_ipu_model', True)}: not together with offline_target: set one of them")
    for key in ("ipu_ids", "log_cycle_count"):
        if ipu.offline_target is not None and getattr(ipu, key):
            faults.append(
                f"{show_key(key, getattr(ipu, key))}: not with offline_target, which has no device: leave it out"
            )
    if ipu.log_cycle_count and ipu.use_ipu_model:
        faults.append(f"{show_key('log_cycle_count', True)}: cycles are counted by hardware alone: must be false")
    return faults


def _check_stages(config: Config, ipu: IpuConfig, method: Method) -> List[str]:
    """Return the faults of the placement where the config itself says how many stages there are."""
    stages = config.stages
    count = stages["count"] if isinstance(stages, dict) and "count" in stages else stages
    count = len(stages) + 1 if isinstance(stages, list) else count
    if isinstance(count, bool) or not isinstance(count, int) or method.structure is not None:
        return []
    return check_placement(config, ipu, method, count)
