"""What can be said of a run on Graphcore IPUs: the config section `backend.ipu`, the rules of PopTorch 3.4, its Options.

Plain data: PopTorch is imported by `make_options` alone. Sources: PopTorch, branch sdk-release-3.4 (poptorch/python/options.py,
popart_compiler/source/CompilerImpl.cpp, Compiler.cpp), and PopART (willow/src/transforms/pipeline.cpp). Nothing here was
run on hardware.

    stages         0   1   2   3   4                 ipus: [0, 1, 1, 2, 3]
    IPUs           0 | 1   1 | 2 | 3                 F = 4 forward stages, 2F - 1 = 7 stages in training
"""

from __future__ import annotations

import importlib.util
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from pydantic import BeforeValidator, StrictBool, field_validator
from typing_extensions import Annotated, Literal

from ipu_pipe.job.values import Count, NotNegative, Positive, Section, Whole, number
from ipu_pipe.schedule.methods import Method, Pipeline, resolve_method

MOST_IPUS = 64  # of one process
PRECISIONS = ("float32", "16.16", "16.32", "32.32")
RECOMPUTATION = {"none": 0, "standard": 1, "norm_only": 2, "pipeline": 3, "recompute_all": 4}  # popart's numbers
LOCATIONS = ("activation", "weight", "optimizer", "accumulator")
OVERLAP = {"accumulation_loop": "OverlapAccumulationLoop", "device_iteration_loop": "OverlapDeviceIterationLoop"}
MISSING = (
    "PopTorch is not installed: it is a wheel inside Graphcore's Poplar SDK 3.4 (not on PyPI), for Python 3.8 and "
    "torch 2.0.1; "
    "what runs here is backend.name=emulator with backend.ipu=null and precision=float32"
)


def _io_tiles(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 32 <= value <= 192 or value % 2:
        raise ValueError("must be an even number from 32 to 192")
    return value


class TensorLocation(Section):
    """Where tensors of one class live (poptorch.TensorLocationSettings); null: where PopTorch puts them."""

    on_chip: Optional[StrictBool] = None
    replicated_tensor_sharding: StrictBool = False
    min_elements_for_off_chip: Optional[Whole] = None
    min_elements_for_replicated_tensor_sharding: Optional[Whole] = None
    io_tiles_to_load: StrictBool = False
    io_tiles_to_store: StrictBool = False


class TensorLocations(Section):
    """Options.TensorLocations. `num_io_tiles`: tiles of each IPU set aside for input and output."""

    activation: TensorLocation = TensorLocation()
    weight: TensorLocation = TensorLocation()
    optimizer: TensorLocation = TensorLocation()
    accumulator: TensorLocation = TensorLocation()
    num_io_tiles: Optional[Annotated[int, BeforeValidator(_io_tiles)]] = None


class DataLoading(Section):
    """How a call's input is made: `sync`, when it is asked for, or `async`, ahead of time in a process of its own, through
    shared memory (poptorch.AsynchronousDataAccessor)."""

    mode: Literal["sync", "async"] = "sync"
    buffer_size: Count = 3
    miss_sleep_time_in_ms: NotNegative = 0.1
    early_preload: StrictBool = False
    sharing_strategy: Literal["shared_memory", "file_system", "fork", "forkserver"] = "forkserver"


class Profile(Section):
    """Graph and execution profile (`profile.pop`) under `directory`, and system trace (`.pvti`) under `pvti`. Full profiles
    change memory and times. `blocks`: only Block programs whose names match (PopVision's lightweight profile)."""

    directory: Optional[str] = None
    pvti: Optional[str] = None
    blocks: Optional[str] = None


class IpuConfig(Section):
    """Keys of `backend: {name: poptorch, ipu: {...}}`: poptorch.Options under their own names, with PopTorch's defaults but
    for `output_mode` (PopTorch's, `final`, would report the loss of a batch's last microbatch). docs/ipu.md has the list."""

    device_iterations: Count = 1
    inference_device_iterations: Optional[Count] = None
    ipus: Optional[List[Whole]] = None
    ipu_ids: Optional[List[Whole]] = None
    auto_round_num_ipus: StrictBool = False
    broadcast_buffers: StrictBool = True
    local: Literal["fused", "decoupled"] = "fused"
    detach_for_evaluation: StrictBool = True

    available_memory_proportion: Any = None
    partials: Literal["float", "half"] = "float"
    stochastic_rounding: StrictBool = False
    floating_point_exceptions: StrictBool = False
    stable_norm: StrictBool = False
    convolution_dithering: StrictBool = False
    loss_scaling: Positive = 1.0
    automatic_loss_scaling: StrictBool = False
    mean_reduction_strategy: Literal["post", "running", "post_and_loss"] = "post"
    use_combined_accum: StrictBool = False
    accum_type: Literal["float32", "float16"] = "float32"
    velocity_accum_type: Literal["float32", "float16"] = "float32"
    first_order_momentum_accum_type: Literal["float32", "float16"] = "float32"
    second_order_momentum_accum_type: Literal["float32", "float16"] = "float32"

    recomputation: Literal["auto", "none", "standard", "norm_only", "pipeline", "recompute_all"] = "auto"
    tensor_locations: TensorLocations = TensorLocations()
    overlapped_io: Literal["none", "accumulation_loop", "device_iteration_loop"] = "none"
    prefetch_buffering_depth: Optional[Count] = None

    output_mode: Literal["all", "final", "sum", "every_n"] = "all"
    output_return_period: Count = 1
    data_loading: DataLoading = DataLoading()
    synthetic_data: StrictBool = False

    executable_cache: Optional[str] = None
    compile_only: StrictBool = False
    use_ipu_model: StrictBool = False
    offline_target: Optional[Literal[1, 2, 21]] = None
    connection_type: Literal["always", "on_demand"] = "always"
    wait_for_ipu: StrictBool = False
    sync_pattern: Literal["full", "single_pipeline", "replica_and_ladder"] = "full"
    progress_bar: StrictBool = True

    log_cycle_count: StrictBool = False
    profile: Profile = Profile()
    engine_options: Dict[str, str] = {}
    popart_options: Dict[str, Any] = {}

    @field_validator("available_memory_proportion")
    @classmethod
    def _proportion(cls, value: Any) -> Any:
        """Null, a share of each IPU's memory, or one for each IPU."""
        given = value if isinstance(value, (list, tuple)) else [value]
        shares = [number(share) for share in given]
        if value is None or (shares and all(share is not None and 0 <= share <= 1 for share in shares)):
            return value if value is None else shares if isinstance(value, (list, tuple)) else shares[0]
        raise ValueError("must be null, a number from 0 to 1, or a list of such, one an IPU")

    @field_validator("popart_options")
    @classmethod
    def _popart(cls, value: Dict[str, Any]) -> Dict[str, Any]:
        wrong = [key for key, one in value.items() if not isinstance(one, (bool, int, float, str, list, dict))]
        if wrong:
            raise ValueError(f"{wrong[0]}: must be a number, text, true, false, a list or a mapping")
        return value


# ---- where stages run


class Placement(NamedTuple):
    """Stage s on IPU `ipu_of[s]` of each replica."""

    ipu_of: Tuple[int, ...]

    @property
    def runs(self) -> List[Tuple[int, List[int]]]:
        """(IPU, stages): neighbours on one IPU are one of PopTorch's stages."""
        found: List[Tuple[int, List[int]]] = []
        for stage, ipu in enumerate(self.ipu_of):
            if found and found[-1][0] == ipu:
                found[-1][1].append(stage)
            else:
                found.append((ipu, [stage]))
        return found

    @property
    def forward_stages(self) -> int:
        """F: how often the IPU changes in a forward, plus one."""
        return len(self.runs)

    @property
    def ipus(self) -> int:
        """IPUs of one replica, idle ones below the highest included."""
        return max(self.ipu_of) + 1

    @property
    def least_accumulation(self) -> int:
        """Microbatches that an update must have in a pipeline: as many as stages in training, 2F - 1."""
        return 2 * self.forward_stages - 1

    def cycles(self, accumulation: int) -> int:
        """Pipeline cycles of an update, fill and flush included: a cycle holds a forward and a backward of every stage."""
        return accumulation + 2 * self.forward_stages - 2


def placement(ipu: IpuConfig, stages: int) -> Placement:
    """Stage s on IPU s, unless `ipus` says otherwise."""
    return Placement(tuple(ipu.ipus) if ipu.ipus is not None else tuple(range(stages)))


def reserved(ipus: int) -> int:
    """The power of two that PopTorch attaches for so many IPUs."""
    return 1 << (ipus - 1).bit_length()


def is_pipelined(method: Method) -> bool:
    """Whether PopTorch runs the method as PipelinedExecution; `naive` is a ShardedExecution."""
    return method.pipeline is not Pipeline.SEQUENTIAL


# ---- what cannot be, from the config alone

_NEAREST = {
    "pipedream": "pipedream_flush (1F1B with a flush), or local_greedy, whose blocks wait for no gradient",
    "pipedream_2bw": "pipedream_flush with a larger gradient_accumulation",
    "pipemare": "pipedream_flush, or local_greedy",
    "pipelined_backprop": "pipedream_flush, or local_greedy",
    "spectrain": "pipedream_flush, or local_greedy",
    "local_overlapping": "local_greedy, or local_chunked with larger blocks",
}


def method_faults(method: Method) -> List[str]:
    """Why PopTorch cannot run the method, and which near one it can."""
    nearest = _NEAREST.get(method.name, "gpipe or pipedream_flush")
    if method.is_stale:
        return [
            f"method: {method.name}: a PopTorch pipeline is flushed at every weight update and keeps one version of "
            "the weights, "
            f"so no pass can read old ones: use {nearest}, or backend.name emulator or distributed"
        ]
    if method.structure is not None and method.structure.overlap:
        return [
            f"method: {method.name}: a layer's weights would be on two IPUs, which PopART refuses in a pipeline: use "
            f"{nearest}"
        ]
    return []


def config_faults(config: Any) -> List[str]:
    """What no IPU can do of a whole Config, `key: value: what is allowed`, before model and data are made; and what of the
    keys of IPUs another backend cannot."""
    backend, ipu = config.backend, config.backend.ipu
    if backend.name != "poptorch":
        if config.precision in ("16.16", "16.32", "32.32"):
            return [
                f"precision: {config.precision}: is of backend.name poptorch, must be float32, float64 or bfloat16 "
                f"with {backend.name}"
            ]
        return []
    args = config.method_settings()
    method = resolve_method(config.method, args)
    faults = method_faults(method)
    if config.precision not in PRECISIONS:
        faults.append(
            f"precision: {config.precision}: no IPU computes in it: must be {', '.join(PRECISIONS[1:])} or float32"
        )
    if backend.device != "cpu":
        faults.append(f"backend.device: {backend.device}: poptorch's host is the CPU: must be cpu")
    faults += _clip_faults(config, ipu)
    faults += _execution_faults(config, ipu, method)
    faults += _local_faults(config, ipu, method, args)
    faults += _location_faults(config, ipu)
    faults += _target_faults(ipu)
    if not faults and ipu.local == "fused":
        faults += _stage_faults(config, ipu, method)
    return faults


def _key(name: str, value: Any) -> str:
    shown = {True: "true", False: "false"}.get(value, value) if isinstance(value, bool) else value
    return f"backend.ipu.{name}: {shown}"


def _clip_faults(config: Any, ipu: IpuConfig) -> List[str]:
    faults = []
    if config.clip is not None and config.clip.scope != "global":
        faults.append(
            f"clip.scope: {config.clip.scope}: PopTorch clips by the global norm alone (max_grad_norm): must be global"
        )
    if ipu.use_combined_accum and ipu.tensor_locations.optimizer != TensorLocation():
        faults.append(
            _key("use_combined_accum", True)
            + ": leaves no optimizer state that tensor_locations.optimizer could place: "
            "use false, or leave that out"
        )
    return faults


def _execution_faults(config: Any, ipu: IpuConfig, method: Method) -> List[str]:
    faults, accumulation = [], config.gradient_accumulation
    if ipu.overlapped_io != "none":
        if is_pipelined(method):
            faults.append(
                f"{_key('overlapped_io', ipu.overlapped_io)}: PopTorch overlaps no input and output with a pipeline: "
                "must be none "
                "(prefetch_buffering_depth buffers instead), or method naive"
            )
        if ipu.tensor_locations.num_io_tiles is None:
            faults.append(
                f"{_key('overlapped_io', ipu.overlapped_io)}: needs tensor_locations.num_io_tiles, 32 or more"
            )
        if ipu.output_mode not in ("all", "sum"):
            faults.append(f"{_key('output_mode', ipu.output_mode)}: with overlapped_io it must be all or sum")
    if ipu.output_mode == "every_n" and accumulation % ipu.output_return_period:
        faults.append(
            f"{_key('output_return_period', ipu.output_return_period)}: must divide gradient_accumulation {accumulation}"
        )
    if ipu.output_mode != "every_n" and ipu.output_return_period != 1:
        faults.append(
            f"{_key('output_return_period', ipu.output_return_period)}: is of output_mode every_n: must be 1 with "
            f"{ipu.output_mode}"
        )
    if config.recompute and ipu.recomputation == "none":
        faults.append("recompute: true: contradicts backend.ipu.recomputation none: set one of them otherwise")
    if ipu.device_iterations > 1:
        faults += _iteration_faults(config, ipu.device_iterations)
    return faults


def _iteration_faults(config: Any, iterations: int) -> List[str]:
    """A call is D updates: nothing can happen between them."""
    key, faults = _key("device_iterations", iterations), []
    for name, value in (("steps", config.steps), ("checkpoint.every", config.checkpoint.every)):
        if value is not None and value % iterations:
            faults.append(f"{key}: a call is so many updates: must divide {name} {value}")
    schedule = config.lr_schedule
    if schedule.name in ("cosine", "linear") or schedule.warmup_steps:
        what = schedule.name if schedule.name in ("cosine", "linear") else "a warm-up"
        faults.append(
            f"{key}: the updates of a call share one learning rate, which {what} changes at each: must be 1, or lr_schedule"
            " constant or step without warmup_steps"
        )
    return faults


def _local_faults(config: Any, ipu: IpuConfig, method: Method, args: Mapping[str, Any]) -> List[str]:
    faults = []
    if ipu.local == "decoupled":
        if method.structure is None:
            faults.append(
                f"{_key('local', 'decoupled')}: {method.name} has one loss: must be fused, or a local_ method"
            )
        elif method.structure.layers is not None:
            faults.append(f"{_key('local', 'decoupled')}: {method.name} trains one block alone: must be fused")
        if config.replicas > 1:
            faults.append(f"replicas: {config.replicas}: not with backend.ipu.local decoupled: must be 1")
        if ipu.device_iterations > 1:
            faults.append(f"{_key('device_iterations', ipu.device_iterations)}: must be 1 with local decoupled")
        if ipu.ipus is not None:
            faults.append(
                f"{_key('ipus', ipu.ipus)}: with local decoupled every block has a device of its own: use ipu_ids, ids "
                "of gc-info"
            )
        if ipu.data_loading.mode == "async":
            faults.append(f"{_key('data_loading.mode', 'async')}: must be sync with local decoupled")
        if ipu.output_mode != "all":
            faults.append(
                f"{_key('output_mode', ipu.output_mode)}: must be all with local decoupled, which hands activations on"
            )
        if ipu.compile_only:
            faults.append(f"{_key('compile_only', True)}: not with local decoupled: must be false, or local fused")
    elif args.get("block_accumulation") is not None:
        faults.append(
            f"method_args.block_accumulation: {args['block_accumulation']}: in one graph all blocks are updated "
            "together: leave it"
            " out, or set backend.ipu.local=decoupled"
        )
    if ipu.local == "decoupled" and ipu.profile != Profile():
        why = "its processes would write one profile over the other: leave backend.ipu.profile out"
        faults.append(f"{_key('local', ipu.local)}: {why}")
    if ipu.ipu_ids is not None and under_poprun():
        faults.append(f"{_key('ipu_ids', ipu.ipu_ids)}: not under poprun, which chooses the devices: leave it out")
    if ipu.local == "fused" and ipu.ipu_ids is not None and len(ipu.ipu_ids) != 1:
        faults.append(f"{_key('ipu_ids', ipu.ipu_ids)}: must be one id of gc-info, that of a device with all the IPUs")
    if method.structure is not None and config.clip is not None:
        faults.append(
            f"clip: PopTorch's norm is over all blocks, those of {method.name} know only their own: must be null"
        )
    return faults


def _location_faults(config: Any, ipu: IpuConfig) -> List[str]:
    faults, locations = [], ipu.tensor_locations
    for name in LOCATIONS:
        location = getattr(locations, name)
        key = f"tensor_locations.{name}"
        if location.replicated_tensor_sharding and config.replicas == 1:
            faults.append(
                f"{_key(key + '.replicated_tensor_sharding', True)}: shards over replicas, of which there is one: must "
                "be false, or "
                "replicas 2 or more"
            )
        for tiles in ("io_tiles_to_load", "io_tiles_to_store"):
            if getattr(location, tiles) and locations.num_io_tiles is None:
                faults.append(f"{_key(f'{key}.{tiles}', True)}: needs tensor_locations.num_io_tiles, 32 or more")
    return faults


def _target_faults(ipu: IpuConfig) -> List[str]:
    faults = []
    if ipu.offline_target is not None and not ipu.compile_only:
        faults.append(f"{_key('offline_target', ipu.offline_target)}: nothing can run on it: needs compile_only: true")
    if ipu.offline_target is not None and ipu.use_ipu_model:
        faults.append(f"{_key('use_ipu_model', True)}: not together with offline_target: set one of them")
    if ipu.log_cycle_count and ipu.use_ipu_model:
        faults.append(f"{_key('log_cycle_count', True)}: cycles are counted by hardware alone: must be false")
    return faults


def _stage_faults(config: Any, ipu: IpuConfig, method: Method) -> List[str]:
    """Where the config itself says how many stages there are."""
    stages = config.stages
    count = stages["count"] if isinstance(stages, dict) and "count" in stages else stages
    count = len(stages) + 1 if isinstance(stages, list) else count
    if isinstance(count, bool) or not isinstance(count, int) or method.structure is not None:
        return []
    return placement_faults(config, ipu, method, count)


def placement_faults(config: Any, ipu: IpuConfig, method: Method, stages: int) -> List[str]:
    """What is wrong with so many stages on their IPUs."""
    if ipu.ipus is not None and len(ipu.ipus) != stages:
        return [f"{_key('ipus', ipu.ipus)}: must name an IPU for each of {stages} stages"]
    place, faults = placement(ipu, stages), []
    if place.ipu_of[0] != 0:
        faults.append(
            f"{_key('ipus', ipu.ipus)}: the first stage must be on IPU 0, which PopTorch counts as a stage anyhow"
        )
    accumulation, least = config.gradient_accumulation, place.least_accumulation
    if is_pipelined(method) and place.ipus > 1 and accumulation < least:
        faults.append(
            f"gradient_accumulation: {accumulation}: a PopTorch pipeline of {place.forward_stages} stages needs at least "
            f"2 x {place.forward_stages} - 1 = {least} microbatches an update: raise it (and lower micro_batch_size), "
            "take fewer "
            "stages, or method naive"
        )
    wished = ipu.inference_device_iterations
    if wished is not None and is_pipelined(method) and wished < place.forward_stages:
        faults.append(
            f"{_key('inference_device_iterations', wished)}: a pipeline of {place.forward_stages} stages needs as many "
            "at least"
        )
    if isinstance(ipu.available_memory_proportion, list) and len(ipu.available_memory_proportion) != place.ipus:
        faults.append(
            f"{_key('available_memory_proportion', ipu.available_memory_proportion)}: must be one number, or "
            f"{place.ipus}, one an IPU"
        )
    return faults + _count_faults(config, ipu, place)


def under_poprun() -> bool:
    """Whether Graphcore's launcher started several processes: each then counts its own replicas, once it has asked."""
    if importlib.util.find_spec("popdist") is None:
        return False
    import popdist

    return bool(popdist.isPopdistEnvSet())


def _count_faults(config: Any, ipu: IpuConfig, place: Placement) -> List[str]:
    replicas = config.replicas
    total = place.ipus * replicas
    said = f"{place.ipus} IPUs x replicas {replicas} = {total}" if replicas > 1 else f"{total} IPUs"
    if ipu.use_ipu_model or ipu.offline_target is not None:
        return []
    whole_powers = total & (total - 1) == 0
    if not whole_powers and not ipu.auto_round_num_ipus:
        return [
            f"stages: {said}: IPUs are reserved by powers of 2, here {reserved(total)}: take another number of stages "
            "or replicas, "
            "put two stages on one with backend.ipu.ipus, or auto_round_num_ipus: true, which leaves "
            f"{reserved(total) - total} idle"
        ]
    if reserved(total) > MOST_IPUS and not under_poprun():
        return [
            f"replicas: {replicas}: {said}: a process drives at most {MOST_IPUS}: take fewer, or start several "
            "processes with"
            " poprun --num-instances"
        ]
    return []


# ---- what cannot be, once the model is there


class ModelFacts(NamedTuple):
    """What the rules need of a model: `shared`, names of weights and buffers -> stages that use them, where there are several;
    `order`, stages in the order in which a forward begins them; `empty`, stages at which nothing begins; `moving`, buffers that
    training writes; `optimizer`, class name and the settings of its groups."""

    stages: int
    shared: Mapping[str, Sequence[int]]
    order: Sequence[int]
    empty: Sequence[int]
    moving: Sequence[str]
    optimizer: Tuple[str, Sequence[Mapping[str, Any]]]
    updates: int
    updates_per_epoch: int


def refuses(config: Any, facts: ModelFacts, local_replicas: Optional[int] = None) -> List[str]:
    """Reasons why PopTorch cannot run the job, each with its remedy; empty if none is known. `local_replicas`: of this process,
    where poprun started several."""
    ipu = config.backend.ipu
    method = resolve_method(config.method, config.method_settings())
    if local_replicas is not None:
        config = config.model_copy(update={"replicas": local_replicas})
    decoupled = ipu.local == "decoupled" and method.structure is not None
    faults = [] if decoupled else placement_faults(config, ipu, method, facts.stages)
    if faults:
        return faults
    place = Placement((0,)) if decoupled else placement(ipu, facts.stages)
    if decoupled and ipu.ipu_ids is not None and len(ipu.ipu_ids) != facts.stages:
        faults.append(f"{_key('ipu_ids', ipu.ipu_ids)}: must name a device for each of {facts.stages} blocks")
    shares = ipu.available_memory_proportion
    if decoupled and isinstance(shares, list) and len(shares) != facts.stages:
        faults.append(
            f"{_key('available_memory_proportion', shares)}: must be one number, or {facts.stages}, one a block"
        )
    if not decoupled:
        faults += _layout_faults(facts, place, method)
    if facts.moving and config.replicas > 1 and ipu.broadcast_buffers:
        faults.append(
            f"{_key('broadcast_buffers', True)}: training writes {_some(facts.moving)} on each of {config.replicas} "
            "replicas apart, which "
            "PopTorch does not broadcast: set it to false (the first replica's are kept), or use GroupNorm"
        )
    if local_replicas is not None:
        faults += _location_faults(config, ipu)  # weights are sharded over a process's own replicas
        if reserved(place.ipus * local_replicas) > MOST_IPUS:
            faults.append(
                f"replicas: {local_replicas} of each process on {place.ipus} IPUs: a process drives at most {MOST_IPUS}: start"
                " more with poprun --num-instances"
            )
    faults += _kind_faults(facts.optimizer, ipu, config.clip is not None)
    if ipu.device_iterations > 1:
        faults += _alignment_faults(config, ipu.device_iterations, facts)
    return faults


def _layout_faults(facts: ModelFacts, place: Placement, method: Method) -> List[str]:
    faults = []
    if facts.empty:
        faults.append(
            f"stages: {', '.join(map(str, facts.empty))}: nothing begins there, so it cannot be on an IPU: take fewer "
            "stages, or names"
        )
    if list(facts.order) != sorted(set(facts.order)):
        faults.append(
            f"stages: a forward begins them in the order {', '.join(map(str, facts.order))}: on IPUs each must begin "
            "once, in order"
        )
    for name, stages in facts.shared.items():
        used = sorted({place.ipu_of[s] for s in stages})
        if len(used) > 1 and is_pipelined(method):
            faults.append(
                f"model: {name}: used by stages {', '.join(map(str, stages))} on IPUs {', '.join(map(str, used))}, but "
                "a weight or buffer "
                "lies on one: put them on the same with backend.ipu.ipus, or cut elsewhere"
            )
    return faults


# PopTorch's optimizers, and which of their tensors may be float16
ACCUMULATORS = {
    "SGD": ("accum_type", "velocity_accum_type"),
    "Adam": ("accum_type", "first_order_momentum_accum_type", "second_order_momentum_accum_type"),
}
ACCUMULATORS["AdamW"] = ACCUMULATORS["RMSprop"] = ACCUMULATORS["Adam"]
_UNREAD = ("maximize", "differentiable", "capturable", "amsgrad", "nesterov")


def _kind_faults(optimizer: Tuple[str, Sequence[Mapping[str, Any]]], ipu: IpuConfig, clips: bool) -> List[str]:
    """What PopTorch has not of the optimizer that trains, whatever the config's own says."""
    kind, groups = optimizer
    if kind not in ACCUMULATORS:
        return [f"optimizer: {kind}: PopTorch has none such: must be torch.optim's {', '.join(ACCUMULATORS)}"]
    set_ = [key for key in _UNREAD if any(group.get(key) for group in groups)]
    faults = [f"optimizer.{key}: true: PopTorch does not have it: must be false" for key in set_]
    for key in sorted({key for keys in ACCUMULATORS.values() for key in keys}):
        if getattr(ipu, key) != "float32" and key not in ACCUMULATORS[kind]:
            owners = [name for name, keys in ACCUMULATORS.items() if key in keys]
            faults.append(f"{_key(key, getattr(ipu, key))}: {kind} has none: it is of {', '.join(owners)}")
    if ipu.use_combined_accum and kind != "SGD":
        faults.append(f"{_key('use_combined_accum', True)}: {kind} has none: it is of SGD")
    if clips and kind == "RMSprop":
        faults.append("clip: PopTorch clips with SGD, Adam and AdamW alone, not with RMSprop: must be null")
    return faults


def _alignment_faults(config: Any, iterations: int, facts: ModelFacts) -> List[str]:
    key, every = _key("device_iterations", iterations), config.evaluate.every * facts.updates_per_epoch
    faults = []
    if facts.updates % iterations:
        faults.append(f"{key}: a call is so many updates: must divide the run's {facts.updates} (steps, epochs)")
    elif every and every < facts.updates and every % iterations:
        faults.append(f"{key}: must divide the {every} updates between evaluations (evaluate.every)")
    milestones = [epoch * facts.updates_per_epoch for epoch in config.lr_schedule.milestones]
    if any(-(-m // 1) % iterations for m in milestones):
        faults.append(
            f"{key}: the updates of a call share one learning rate: must divide lr_schedule.milestones in updates"
        )
    return faults


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


# ---- poptorch.Options


def make_options(
    config: Any, place: Placement, training: bool, seed: int, base: Optional[Any] = None, ipu_id: Optional[int] = None,
    accumulation: Optional[int] = None,
) -> Any:  # fmt: skip
    """poptorch.Options of a run's training or inference model. `base`: options to fill in, those of popdist, which has set
    replicas and processes. `ipu_id`: of gc-info, None: any device. `accumulation`: microbatches an update, None: the config's.
    """
    import poptorch  # only here

    ipu: IpuConfig = config.backend.ipu
    method = resolve_method(config.method, config.method_settings())
    options = poptorch.Options() if base is None else base
    if base is None:
        options.Distributed.disable()  # mpirun alone would make it one of several
        options.replicationFactor(config.replicas)
        if ipu_id is not None:
            options.useIpuId(ipu_id)
    _set_execution(options, config, place, training, is_pipelined(method), accumulation)
    _set_numbers(options, ipu, place, training)
    _set_memory(options, ipu, place, training, config.recompute, is_pipelined(method) and place.ipus > 1)
    _set_target(options, ipu)
    _set_profile(options, ipu, training)
    options.randomSeed(seed)
    for name, value in ipu.popart_options.items():
        options._Popart.set(name, value)
    return options


def stage_name(stage: int) -> str:
    """The block with which a stage begins."""
    return f"stage{stage}"


def _set_execution(
    options: Any, config: Any, place: Placement, training: bool, pipelined: bool, accumulation: Optional[int]
) -> None:
    import poptorch

    ipu: IpuConfig = config.backend.ipu
    stages = [poptorch.Stage(*map(stage_name, stages)).ipu(index) for index, stages in place.runs]
    strategy = poptorch.PipelinedExecution if pipelined else poptorch.ShardedExecution
    options.setExecutionStrategy(strategy(*stages))
    options.autoRoundNumIPUs(ipu.auto_round_num_ipus)
    options.broadcastBuffers(ipu.broadcast_buffers)
    if not training:
        options.deviceIterations(inference_iterations(ipu, place, pipelined))
        options.outputMode(poptorch.OutputMode.All)
        return
    options.deviceIterations(ipu.device_iterations)
    options.Training.gradientAccumulation(accumulation or config.gradient_accumulation)
    options.Training.accumulationAndReplicationReductionType(poptorch.ReductionType.Mean)
    strategies = {"post": "Post", "running": "Running", "post_and_loss": "PostAndLoss"}
    options.Training.setMeanAccumulationAndReplicationReductionStrategy(
        getattr(poptorch.MeanReductionStrategy, strategies[ipu.mean_reduction_strategy])
    )
    if ipu.automatic_loss_scaling:
        options.Training.setAutomaticLossScaling(True)
    modes = {"all": "All", "final": "Final", "sum": "Sum", "every_n": "EveryN"}
    mode = getattr(poptorch.OutputMode, modes[ipu.output_mode])
    if ipu.output_mode == "every_n":
        options.outputMode(mode, ipu.output_return_period)
    else:
        options.outputMode(mode)


def inference_iterations(ipu: IpuConfig, place: Placement, pipelined: bool) -> int:
    """Microbatches of an evaluation's call: as many as keep the pipeline's stages busy, unless said otherwise."""
    return ipu.inference_device_iterations or (place.forward_stages if pipelined else 1)


def _set_numbers(options: Any, ipu: IpuConfig, place: Placement, training: bool) -> None:
    import torch

    options.Precision.setPartialsType({"float": torch.float, "half": torch.half}[ipu.partials])
    options.Precision.enableStochasticRounding(ipu.stochastic_rounding and training)  # PopTorch advises against it elsewhere
    if ipu.floating_point_exceptions:
        options.Precision.enableFloatingPointExceptions(True)
    if ipu.stable_norm:
        options.enableStableNorm(True)
    if ipu.convolution_dithering:
        partials = {"partialsType": ipu.partials}  # setPartialsType's own, which setConvolutionDithering would replace
        options._Popart.set("convolutionOptions", {**partials, "enableConvDithering": "true"})
    share = ipu.available_memory_proportion
    if share is not None:
        shares = share if isinstance(share, list) else [share] * place.ipus
        options.setAvailableMemoryProportion({f"IPU{index}": float(one) for index, one in enumerate(shares)})


def _set_memory(
    options: Any, ipu: IpuConfig, place: Placement, training: bool, recompute: bool, pipelined: bool
) -> None:
    if training:
        mode = ipu.recomputation
        if mode == "auto" and recompute and not pipelined:
            mode = "standard"  # a pipeline recomputes unless told not to
        if mode != "auto":
            options._Popart.set("autoRecomputation", RECOMPUTATION[mode])
            if not pipelined and mode in ("standard", "recompute_all"):
                options._Popart.set("explicitRecomputation", True)
    _set_locations(options, ipu.tensor_locations, training)
    if ipu.prefetch_buffering_depth is not None:
        options._Popart.set("defaultPrefetchBufferingDepth", ipu.prefetch_buffering_depth)
    if ipu.executable_cache is not None:
        options.enableExecutableCaching(ipu.executable_cache)


def _set_locations(options: Any, locations: TensorLocations, training: bool) -> None:
    import poptorch

    if locations.num_io_tiles is not None:
        options.TensorLocations.numIOTiles(locations.num_io_tiles)
    for name in LOCATIONS if training else ("activation", "weight"):
        wanted: TensorLocation = getattr(locations, name)
        if wanted == TensorLocation():
            continue
        settings = poptorch.TensorLocationSettings()
        if wanted.on_chip is not None:
            settings.useOnChipStorage(wanted.on_chip)
        if wanted.replicated_tensor_sharding and training:
            settings.useReplicatedTensorSharding(True)
        if wanted.min_elements_for_off_chip is not None:
            settings.minElementsForOffChip(wanted.min_elements_for_off_chip)
        if wanted.min_elements_for_replicated_tensor_sharding is not None:
            settings.minElementsForReplicatedTensorSharding(wanted.min_elements_for_replicated_tensor_sharding)
        if wanted.io_tiles_to_load:
            settings.useIOTilesToLoad(True)
        if wanted.io_tiles_to_store:
            settings.useIOTilesToStore(True)
        getattr(options.TensorLocations, f"set{name.capitalize()}Location")(settings)


def _set_target(options: Any, ipu: IpuConfig) -> None:
    import poptorch

    if ipu.offline_target is not None:
        options.useOfflineIpuTarget(ipu.offline_target)
    else:
        types = {"always": "Always", "on_demand": "OnDemand"}
        options.connectionType(getattr(poptorch.ConnectionType, types[ipu.connection_type]))
    if ipu.use_ipu_model:
        options.useIpuModel(True)
    patterns = {"full": "Full", "single_pipeline": "SinglePipeline", "replica_and_ladder": "ReplicaAndLadder"}
    options.syncPattern(getattr(poptorch.SyncPattern, patterns[ipu.sync_pattern]))
    options.showCompilationProgressBar(ipu.progress_bar)
    if ipu.synthetic_data:
        options.enableSyntheticData(True)


def model_name(training: bool) -> str:
    """The folder of a model's profile."""
    return "training" if training else "inference"


def _set_profile(options: Any, ipu: IpuConfig, training: bool) -> None:
    """Engine options are merged here: setEngineOptions replaces the whole map."""
    options.logCycleCount(ipu.log_cycle_count)
    options.modelName(model_name(training))
    engine = dict(ipu.engine_options)
    if ipu.profile.directory is not None:
        engine = {
            "debug.allowOutOfMemory": "true",
            "autoReport.all": "true",
            "autoReport.directory": ipu.profile.directory,
            **engine,
        }
        if ipu.profile.blocks is not None:
            engine = {"profiler.blocks.filter": ipu.profile.blocks, **engine}
    if engine:
        options._Popart.setEngineOptions(engine)
