"""Check a config, its stages and a model for features that IPUs do not support, before anything
compiles.

Each fault is a line `key: value: reason and remedy`. Sources: PopTorch, branch sdk-release-3.4
(poptorch/python/options.py, popart_compiler/source/Compiler.cpp), PopART. Not run on hardware. This
file does not import torch, so that configs load fast.
"""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, Any, Iterable, Iterator, Mapping, Sequence

from ipu_pipe.backends.ipu.config import TABLE
from ipu_pipe.backends.ipu.placement import (
    get_execution,
    is_pipelined,
    is_under_poprun,
    place_stages,
    read_poprun_share,
    round_up_ipus,
)
from ipu_pipe.config.schema import Config, PipelineConfig
from ipu_pipe.config.values import Case
from ipu_pipe.refusals import FALSE, NONE, Argument, name_key, show_value
from ipu_pipe.schedule.methods import Method
from ipu_pipe.schedule.rows import find_split_or_overlapped
from ipu_pipe.text import list_some

if TYPE_CHECKING:
    from ipu_pipe.backends.ipu.model_facts import ModelFacts

PRECISIONS = ("16.16", "16.32", "32.32", "float32")
OPTIMIZERS = ("sgd", "adam", "adamw", "rmsprop")
MEAN_STRATEGY = "ipu.options.Training.setMeanAccumulationAndReplicationReductionStrategy"
TENSOR_LOCATIONS = "ipu.options.TensorLocations"
LOCATIONS = [name for name in TABLE["options"]["TensorLocations"] if name.startswith("set")]
IPUS = name_key("backend.ipu.ipus")


def describe_cases(config: PipelineConfig, cases: Iterable[Case]) -> list[str]:
    """Return `key: value: reason` of the cases that apply; a key that begins with `ipu.` means
    backend.ipu.
    """
    faults = []
    for case in cases:
        if case.applies:
            value = case.read_value(config)
            section = "backend." if case.key.startswith("ipu.") else ""
            place = name_key(section + case.key)
            faults.append(f"{place}: {show_value(value)}: {case.reason}")
    return faults


def check_method(method: Method) -> list[str]:
    """Return the reason why PopTorch cannot run the method, with a similar method that it can run;
    empty if it can.
    """
    if get_execution(method) is not None:
        return []
    why = (
        "PopTorch flushes its pipeline at every weight update, keeps one version of the weights, "
        "each on one IPU, and has its own order of passes"
    )
    cell = None
    if method.order is not None and method.order.file:
        cell = find_split_or_overlapped(method.order.file)
    near = "pipedream_flush (1F1B with a flush), local_greedy, whose blocks wait for no gradient"
    return [
        f"method: {method.name}: {why}{f' ({cell})' if cell else ''}: use {near}, or "
        f"{Argument('backend')} emulator or distributed"
    ]


def check_config(config: PipelineConfig, method: Method) -> list[str]:
    """Return why IPUs cannot run a config of backend poptorch whose method is resolved, before
    model and data are made.
    """
    cases = [
        *_list_option_cases(config),
        *_list_location_cases(config),
        *_list_sharding_cases(config, config.replicas),
        *_list_block_cases(config, method),
    ]
    faults = check_method(method) + describe_cases(config, cases)
    # the placement is looked up below, which needs settings that are sound
    if not faults and config.ipu.local == "fused" and method.structure is None:
        stages = config.stages.get("count") if isinstance(config.stages, dict) else config.stages
        # other forms have a number of stages only when the model is there (`check_model`)
        count = len(stages) + 1 if isinstance(stages, list) else stages
        faults += check_placement(config, method, count) if isinstance(count, int) else []
    return faults


def list_run_faults(config: Config) -> list[str]:
    """Return why IPUs cannot run what a config says of its optimizer and its checkpoints."""
    why = f"PopTorch gets one optimizer with the same settings on all stages: must be {NONE}"
    groups = config.optimizer.groups
    is_sharded = config.checkpoint is not None and config.checkpoint.format == "sharded"
    has_several_processes = config.ipu.local == "decoupled" or is_under_poprun()
    cases = [
        Case(groups, "optimizer.groups", why, f"{len(groups)} with optimizers of their own"),
        Case(config.optimizer.by_stage, "optimizer.by_stage", why),
        Case(
            is_sharded and has_several_processes,
            "checkpoint.format",
            "the first process writes the whole checkpoint: must be single",
        ),
    ]
    return describe_cases(config, cases)


def _list_option_cases(config: PipelineConfig) -> Iterator[Case]:
    """Yield the cases of options that do not fit together."""
    ipu = config.ipu
    clip = config.clip
    why = f"is not supported on IPUs: must be {', '.join(PRECISIONS[:-1])} or {PRECISIONS[-1]}"
    yield Case(config.precision not in PRECISIONS, "precision", why)
    why = "poptorch's host is the CPU: must be cpu"
    yield Case(config.backend.device != "cpu", "backend.device", why)
    why = "PopTorch clips by the global norm (max_grad_norm): must be global"
    yield Case(clip and clip.scope != "global", "clip.scope", why)
    why = f"contradicts {name_key('backend.ipu.recomputation')} none"
    yield Case(config.recompute and ipu.recomputation == "none", "recompute", why)
    why = "must be one number with setAutomaticLossScaling, which chooses it"
    is_automatic = ipu.options.Training.setAutomaticLossScaling
    yield Case(is_automatic and ipu.changes_loss_scaling, "ipu.loss_scaling", why)
    strategy = ipu.options.Training.setMeanAccumulationAndReplicationReductionStrategy
    is_replaced = ipu.optimizer_options.accum_type == "float16" and strategy not in (
        None,
        "Running",
    )
    why = "PopTorch replaces it with accum_type float16: must be Running, or leave it out"
    yield Case(is_replaced, MEAN_STRATEGY, why)
    why = "not under poprun, which chooses the devices: leave it out"
    yield Case(ipu.ipu_ids and is_under_poprun(), "ipu.ipu_ids", why)


def _list_location_cases(config: PipelineConfig) -> Iterator[Case]:
    """Yield the cases of options that PopTorch would ignore, of optimizer state and I/O tiles."""
    ipu = config.ipu
    locations = ipu.options.TensorLocations
    ignored = [
        *(f"optimizer_options.{name}" for name in ipu.optimizer_options.model_dump()),
        *(f"setOptimizerLocation.{name}" for name in locations.setOptimizerLocation.model_dump()),
    ]
    why = f"PopTorch would ignore {list_some(ignored)}: must be {FALSE}, or leave them out"
    yield Case(ipu.use_combined_accum and ignored, "ipu.use_combined_accum", why)
    for name in LOCATIONS:
        for key in ("useIOTilesToLoad", "useIOTilesToStore"):
            uses_tiles = getattr(getattr(locations, name), key) and not locations.numIOTiles
            why = "no tiles are reserved: set TensorLocations.numIOTiles, or leave it out"
            yield Case(uses_tiles, f"{TENSOR_LOCATIONS}.{name}.{key}", why)


def _list_sharding_cases(config: PipelineConfig, replicas: int) -> Iterator[Case]:
    """Yield the tensors that PopTorch would not shard, because this process has one replica."""
    for name in LOCATIONS if replicas == 1 else ():
        key = f"{TENSOR_LOCATIONS}.{name}.useReplicatedTensorSharding"
        why = (
            f"a process shards over its own replicas, here 1: must be {FALSE}, or more replicas for "
            "each process"
        )
        shards = getattr(config.ipu.options.TensorLocations, name).useReplicatedTensorSharding
        yield Case(shards, key, why)


def _list_block_cases(config: PipelineConfig, method: Method) -> Iterator[Case]:
    """Yield the cases of blocks with losses of their own, in one graph (fused) or in a process each
    (decoupled).
    """
    ipu = config.ipu
    blocks = method.structure
    yield Case(
        blocks and config.clip,
        "clip.norm",
        f"PopTorch's norm is over all blocks of {method.name}: must be {NONE}",
    )
    if ipu.local == "fused":
        why = (
            "one graph updates all blocks together: leave it out, or set "
            f"{name_key('backend.ipu.local')}=decoupled"
        )
        yield Case(
            config.method_settings().get("block_accumulation"),
            "method_args.block_accumulation",
            why,
        )
        why = "must be one id of gc-info, of a device with all the IPUs"
        yield Case(ipu.ipu_ids and len(ipu.ipu_ids) != 1, "ipu.ipu_ids", why)
        return
    yield Case(
        not blocks, "ipu.local", f"{method.name} has one loss: must be fused, or a local_ method"
    )
    yield Case(
        blocks and blocks.layers is not None,
        "ipu.local",
        f"{method.name} trains one block alone: must be fused",
    )
    # processes would overwrite each other's profile
    needed = {
        "ipu.profile.directory": None,
        "replicas": 1,
        "ipu.device_iterations": 1,
        "ipu.ipus": None,
        "ipu.data_loading.mode": "sync",
        "ipu.output_mode": "all",
        "ipu.compile_only": False,
    }
    for key, value in needed.items():
        yield Case(
            attrgetter(key)(config) != value,
            key,
            f"must be {show_value(value)} with {name_key('backend.ipu.local')} decoupled",
        )


def check_placement(config: PipelineConfig, method: Method, stages: int) -> list[str]:
    """Return the reasons why `stages` stages cannot run on their IPUs; empty for other backends."""
    return (
        []
        if config.backend.ipu is None
        else describe_cases(config, _list_placement_cases(config, method, stages))
    )


def _list_placement_cases(config: PipelineConfig, method: Method, stages: int) -> Iterator[Case]:
    """Yield the cases of options that do not fit the number of stages and IPUs."""
    ipu = config.ipu
    pipelined = is_pipelined(method)
    # all that follows needs a placement of every stage
    if ipu.ipus is not None and len(ipu.ipus) != stages:
        yield Case(True, "ipu.ipus", f"must name an IPU for each of {stages} stages")
        return
    placement = place_stages(ipu, stages)
    forward = placement.forward_stages
    least = placement.least_accumulation
    shares = ipu.available_memory_proportion
    why = "the first stage must be on IPU 0, because PopTorch always counts IPU 0 as a stage"
    yield Case(placement.ipu_by_stage[0] != 0, "ipu.ipus", why)
    why = (
        f"a PopTorch pipeline of {forward} stages needs at least 2 x {forward} - 1 = {least} "
        f"microbatches per update"
    )
    # on one IPU nothing is pipelined, whatever the number of stages
    has_too_few = pipelined and placement.ipu_count > 1 and config.gradient_accumulation < least
    yield Case(has_too_few, "gradient_accumulation", why)
    why = f"must be one number, or {placement.ipu_count}, one per IPU"
    yield Case(
        isinstance(shares, list) and len(shares) != placement.ipu_count,
        "ipu.available_memory_proportion",
        why,
    )
    # a simulated device needs no IPUs
    if ipu.is_simulated:
        return
    total = placement.ipu_count * config.replicas
    reserved = round_up_ipus(total)
    counted = (
        f"{placement.ipu_count} IPUs x replicas {config.replicas} = {total}"
        if config.replicas > 1
        else f"{total} IPUs"
    )
    if total != reserved and not ipu.auto_round_num_ipus:
        remedy = (
            f"take another number of stages or replicas, put two on one with {IPUS}, "
            "or set auto_round_num_ipus"
        )
        yield Case(
            True, "stages", f"IPUs are reserved by powers of 2, here {reserved}: {remedy}", counted
        )


def check_model(config: PipelineConfig, method: Method, facts: ModelFacts) -> list[str]:
    """Return why PopTorch cannot run the job, with remedies; empty if no reason is known."""
    if config.ipu.local == "decoupled" and method.structure is not None:
        cases = _list_decoupled_cases(config, facts)
    else:
        # the cases of stages look up their IPUs, so the placement must be sound
        faults = check_placement(config, method, facts.stages)
        if faults:
            return faults
        cases = _list_stage_cases(config, method, facts)
    replicas = read_poprun_share(config.replicas).replicas
    model_cases = [*_list_model_cases(config, facts), *_list_sharding_cases(config, replicas)]
    if facts.has_loop:
        model_cases += _list_loop_cases(config)
    return describe_cases(
        config, [*cases, *model_cases, *_list_optimizer_cases(*facts.optimizer, config)]
    )


def _list_loop_cases(config: PipelineConfig) -> Iterator[Case]:
    """Yield the cases of options with which a loop of the caller's own, which gives the batches
    itself, cannot drive IPUs.
    """
    ipu = config.ipu
    why = "a loop of your own drives all IPUs from one process: must be fused"
    yield Case(ipu.local == "decoupled", "ipu.local", why)
    why = (
        "a loop of your own drives the IPUs of one process: start it without poprun's "
        "--num-instances"
    )
    share = read_poprun_share(config.replicas)
    yield Case(share.replicas != config.replicas, "backend.name", why)
    why = "a loop of your own loads the data: must be sync"
    yield Case(ipu.data_loading.mode == "async", "ipu.data_loading.mode", why)
    yield Case(
        ipu.compile_only, "ipu.compile_only", f"a loop of your own runs its steps: must be {FALSE}"
    )


def _list_decoupled_cases(config: PipelineConfig, facts: ModelFacts) -> Iterator[Case]:
    """Yield the cases of options that do not fit the number of blocks, each in a process of its
    own.
    """
    ids = config.ipu.ipu_ids
    shares = config.ipu.available_memory_proportion
    why = f"must name a device for each of {facts.stages} blocks"
    yield Case(ids is not None and len(ids) != facts.stages, "ipu.ipu_ids", why)
    why = f"must be one number, or {facts.stages}, one per block"
    yield Case(
        isinstance(shares, list) and len(shares) != facts.stages,
        "ipu.available_memory_proportion",
        why,
    )


def _list_stage_cases(config: PipelineConfig, method: Method, facts: ModelFacts) -> Iterator[Case]:
    """Yield the cases of stages that are empty or out of order on their IPUs, and of weights that
    several IPUs would hold.
    """
    why = "the stage is empty: use fewer stages or other boundaries"
    yield Case(facts.empty, "stages", why, ", ".join(map(str, facts.empty)))
    order = f"a forward begins them in the order {', '.join(map(str, facts.order))}"
    is_disordered = list(facts.order) != sorted(set(facts.order))
    yield Case(is_disordered, "stages", "on IPUs each must begin once, in order", order)
    placement = place_stages(config.ipu, facts.stages)
    for name, stages in facts.shared.items() if is_pipelined(method) else ():
        ipus = sorted({placement.ipu_by_stage[s] for s in stages})
        users = f"stages {', '.join(map(str, stages))} on IPUs {', '.join(map(str, ipus))}"
        why = (
            f"used by {users}, but a parameter is stored on one IPU only: use {IPUS} "
            f"or other boundaries"
        )
        yield Case(len(ipus) > 1, "model", why, name)


def _list_model_cases(config: PipelineConfig, facts: ModelFacts) -> Iterator[Case]:
    """Yield the cases of options that do not fit the model's buffers, and of unsupported
    operations.
    """
    writes = facts.written and config.replicas > 1 and config.ipu.broadcast_buffers
    why = (
        f"training writes {list_some(facts.written, 3)} on each replica: must be {FALSE} (the "
        f"first's count), or GroupNorm"
    )
    yield Case(writes, "ipu.broadcast_buffers", why)
    # parts of the forward that PopTorch would compute differently or refuse to compile
    for names, why in (
        (
            facts.functions,
            "PopTorch never calls its backward (a torch.autograd.Function): use plain operations",
        ),
        (
            facts.ungraded,
            "torch.no_grad() has no effect inside a forward on an IPU: use .detach() on what is "
            "read",
        ),
        (
            facts.fixed_norms,
            "PopART has no gradient of a normalization in evaluation mode: use GroupNorm, or "
            "freeze by "
            "requires_grad_(False) its weights and all weights before it",
        ),
        (
            facts.counters,
            "training writes an integer buffer, a constant on an IPU: keep it in float32",
        ),
    ):
        yield Case(names, "model", why, list_some(names, 3))
    if config.precision == "16.32":
        dtype = str(facts.input_type).replace("torch.", "")
        why = f"inputs are {dtype}: nothing would be computed in half precision: use 16.16 or 32.32"
        yield Case(not facts.input_type.is_floating_point, "precision", why)


def _list_optimizer_cases(
    kind: str, groups: Sequence[Mapping[str, Any]], config: PipelineConfig
) -> Iterator[Case]:
    """Yield the cases of the optimizer in use, which may differ from the config's."""
    if kind not in OPTIMIZERS:
        yield Case(
            True,
            "optimizer",
            "unsupported: must be torch.optim's SGD, Adam, AdamW or RMSprop",
            kind,
        )
        return
    ipu = config.ipu
    # settings that are on in any group
    chosen = {
        key: value for group in groups for key, value in group.items() if key != "params" and value
    }
    for key in ("amsgrad", "capturable", "differentiable", "maximize"):
        yield Case(
            key in chosen, f"optimizer.{key}", f"PopTorch does not have it: must be {FALSE}", True
        )
    why = "PopART's velocity starts at zero, PyTorch's at the first gradient: must be 0"
    yield Case("dampening" in chosen, "optimizer.dampening", why, chosen.get("dampening"))
    centered = [group.get("centered", False) for group in groups]
    why = "PopTorch has one value for all groups: must be the same in all"
    yield Case(len(set(centered)) > 1, "optimizer.centered", why, centered)
    # PopART's Nesterov step uses the accumulator without dividing it by the number of microbatches
    # (compoundscalarhelper.cpp: NesterovDampeningScaleFactor times DampeningScaleFactor is 1 /
    # loss scale). It is the mean only with a running mean.
    accumulates = config.gradient_accumulation * config.replicas > 1 or ipu.local == "decoupled"
    mean_strategy = ipu.options.Training.setMeanAccumulationAndReplicationReductionStrategy
    running = mean_strategy == "Running" or ipu.optimizer_options.accum_type == "float16"
    remedy = f"set {name_key(f'backend.{MEAN_STRATEGY}')}=Running and use_combined_accum={FALSE}"
    why = f"PopART would take the sum of the microbatches' gradients: {remedy}"
    yield Case(
        "nesterov" in chosen and (ipu.use_combined_accum or (accumulates and not running)),
        "optimizer.nesterov",
        why,
        True,
    )
