"""What no IPU can do once the model is there, each with its remedy. See ipu_pipe.job.ipu.refusals for the config alone."""

from __future__ import annotations

from typing import Any, List, Mapping, Optional, Sequence, Tuple

from ipu_pipe.backends.ipu.facts import ModelFacts
from ipu_pipe.backends.ipu.optimizer import ACCUMULATORS
from ipu_pipe.config.schema import Config
from ipu_pipe.job.ipu.config import key_said
from ipu_pipe.job.ipu.methods import is_pipelined
from ipu_pipe.job.ipu.placement import MOST_IPUS, Placement, placement, placement_faults, reserved
from ipu_pipe.job.ipu.refusals import location_faults
from ipu_pipe.schedule.methods import Method
from ipu_pipe.text import list_some

_UNREAD = ("maximize", "differentiable", "capturable", "amsgrad")


def refuses(config: Config, method: Method, facts: ModelFacts, local_replicas: Optional[int] = None) -> List[str]:
    """Reasons why PopTorch cannot run the job, each with its remedy; empty if none is known. `local_replicas`: of this process,
    where poprun started several."""
    ipu = config.ipu
    if local_replicas is not None:
        config = config.model_copy(update={"replicas": local_replicas})
    decoupled = ipu.local == "decoupled" and method.structure is not None
    faults = [] if decoupled else placement_faults(config, ipu, method, facts.stages)
    if faults:
        return faults
    place = Placement((0,)) if decoupled else placement(ipu, facts.stages)
    if decoupled and ipu.ipu_ids is not None and len(ipu.ipu_ids) != facts.stages:
        faults.append(f"{key_said('ipu_ids', ipu.ipu_ids)}: must name a device for each of {facts.stages} blocks")
    shares = ipu.available_memory_proportion
    if decoupled and isinstance(shares, list) and len(shares) != facts.stages:
        faults.append(
            f"{key_said('available_memory_proportion', shares)}: must be one number, or {facts.stages}, one a block"
        )
    if not decoupled:
        faults += _layout_faults(facts, place, method)
    if facts.written and config.replicas > 1 and ipu.broadcast_buffers:
        faults.append(
            f"{key_said('broadcast_buffers', True)}: training writes {list_some(facts.written, 3)} on each of "
            f"{config.replicas} replicas apart, which PopTorch does not broadcast: set it to false (the first "
            "replica's are kept), or use GroupNorm"
        )
    if local_replicas is not None:
        faults += location_faults(config, ipu)  # weights are sharded over a process's own replicas
        if reserved(place.ipus * local_replicas) > MOST_IPUS:
            faults.append(
                f"replicas: {local_replicas} of each process on {place.ipus} IPUs: a process drives at most {MOST_IPUS}: start"
                " more with poprun --num-instances"
            )
    faults += _forward_faults(facts, config.precision)
    faults += _kind_faults(facts.optimizer, config)
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
                f"model: {name}: used by stages {', '.join(map(str, stages))} on IPUs {', '.join(map(str, used))}, "
                "but a weight or buffer lies on one: put them on the same with backend.ipu.ipus, or cut elsewhere"
            )
    return faults


def _forward_faults(facts: ModelFacts, precision: str) -> List[str]:
    """Return what of the forward PopTorch would accept and compute otherwise, or refuse when it compiles."""
    faults = [
        f"model: {name}: PopTorch differentiates the operations of a torch.autograd.Function's forward and never calls its "
        "backward: write it as plain operations"
        for name in facts.functions
    ]
    if facts.ungraded:
        faults.append(
            f"model: {list_some(facts.ungraded, 3)}: torch.no_grad() has no effect inside a forward on an IPU: use .detach() on "
            "what is read there"
        )
    if facts.counters:
        faults.append(
            f"model: {list_some(facts.counters, 3)}: training writes an integer buffer, which is a constant on an IPU: keep it "
            "in float32, or out of the forward"
        )
    if precision == "16.32" and not facts.input_type.is_floating_point:
        faults.append(
            f"precision: 16.32: inputs are {str(facts.input_type).replace('torch.', '')}, so that nothing would be computed in "
            "half precision: use 16.16 or 32.32"
        )
    elif precision == "16.32" and facts.biased_convolutions:
        faults.append(
            f"precision: 16.32: {list_some(facts.biased_convolutions, 3)}: torch 2.0.1 has no convolution of half-precision "
            "inputs with a float32 bias: use bias=False, 16.16 or 32.32"
        )
    return faults


def _kind_faults(optimizer: Tuple[str, Sequence[Mapping[str, Any]]], config: Config) -> List[str]:
    """What PopTorch has not of the optimizer that trains, whatever the config's own says."""
    (kind, groups), ipu, clips = optimizer, config.ipu, config.clip is not None
    if kind not in ACCUMULATORS:
        return [f"optimizer: {kind}: PopTorch has none such: must be torch.optim's {', '.join(ACCUMULATORS)}"]
    set_ = [key for key in _UNREAD if any(group.get(key) for group in groups)]
    faults = [f"optimizer.{key}: true: PopTorch does not have it: must be false" for key in set_]
    for key in sorted({key for keys in ACCUMULATORS.values() for key in keys}):
        if getattr(ipu, key) != "float32" and key not in ACCUMULATORS[kind]:
            owners = [name for name, keys in ACCUMULATORS.items() if key in keys]
            faults.append(f"{key_said(key, getattr(ipu, key))}: {kind} has none: it is of {', '.join(owners)}")
    if ipu.use_combined_accum and kind != "SGD":
        faults.append(f"{key_said('use_combined_accum', True)}: {kind} has none: it is of SGD")
    if any(group.get("dampening") for group in groups):
        faults.append(
            "optimizer.dampening: PopART's velocity starts at zero, PyTorch's at the first gradient, so that they would differ: "
            "must be 0"
        )
    if any(group.get("nesterov") for group in groups):
        faults += _nesterov_faults(config)
    if clips and kind == "RMSprop":
        faults.append("clip: PopTorch clips with SGD, Adam and AdamW alone, not with RMSprop: must be null")
    return faults


def _nesterov_faults(config: Config) -> List[str]:
    """PopART's Nesterov step takes the accumulator as it is (compoundscalarhelper.cpp: NesterovDampeningScaleFactor times
    DampeningScaleFactor is 1 / loss scale, whatever the mean's divisor): the mean only where that is kept running."""
    ipu, key = config.ipu, "optimizer.nesterov: true"
    if ipu.use_combined_accum:
        return [
            f"{key}: not with backend.ipu.use_combined_accum, which would take the sum of the gradients: set that to false"
        ]
    accumulates = config.gradient_accumulation * config.replicas > 1 or ipu.local == "decoupled"
    if accumulates and ipu.mean_reduction_strategy != "running" and ipu.accum_type != "float16":
        return [
            f"{key}: PopART would take the sum of the microbatches' gradients: set backend.ipu.mean_reduction_strategy=running"
        ]
    return []


def _alignment_faults(config: Config, iterations: int, facts: ModelFacts) -> List[str]:
    key, every = key_said("device_iterations", iterations), config.evaluate.interval(facts.updates_per_epoch)
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
