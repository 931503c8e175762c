"""The facts of a job's model that decide whether PopTorch can train it, from one observed training forward, and what they refuse.

Sources: PopTorch, branch sdk-release-3.4 (dispatchers/JitDispatch.cpp: integer buffers; RequiresGrad.cpp: no_grad), and torch
2.0.1's type checks of convolutions. Not run on hardware.
"""

from __future__ import annotations

from typing import Any, Dict, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Set, Tuple

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten

from ipu_pipe.backends.ipu.check_config import check_locations
from ipu_pipe.backends.ipu.config import show_key
from ipu_pipe.backends.ipu.optimizer import ACCUMULATORS
from ipu_pipe.backends.ipu.placement import (
    MOST_IPUS,
    Placement,
    check_placement,
    is_pipelined,
    place_stages,
    round_up_ipus,
)
from ipu_pipe.config.schema import Config
from ipu_pipe.job.record import Job
from ipu_pipe.model.restoring import buffers_restored
from ipu_pipe.schedule.methods import Method
from ipu_pipe.text import list_some

# These read a tensor's shape alone: a gradient could not flow through them anyway.
_SHAPE_ONLY = frozenset(
    "detach zeros_like ones_like full_like empty_like rand_like randn_like new_zeros new_ones new_full new_empty new_tensor "
    "__get__".split()
)
_CONVOLUTIONS = tuple(f"conv{kind}{n}d" for kind in ("", "_transpose") for n in (1, 2, 3))


class ModelFacts(NamedTuple):
    """`shared`: names of weights and buffers -> the stages that use them, where there are several. `order`: stages in the order
    that a forward begins them. `empty`: stages at which nothing begins. `written`: floating-point buffers that training writes;
    `counters`: integer ones. `optimizer`: class name and parameter groups. `functions`: classes of torch.autograd.Function in the
    gradient's path. `ungraded`: operations inside torch.no_grad() through which a gradient would flow without it.
    `biased_convolutions`: modules that call a convolution with a bias. `input_type`: of the model's input."""

    stages: int
    shared: Mapping[str, Sequence[int]]
    order: Sequence[int]
    empty: Sequence[int]
    written: Sequence[str]
    optimizer: Tuple[str, Sequence[Mapping[str, Any]]]
    updates: int
    updates_per_epoch: int
    counters: Sequence[str] = ()
    functions: Sequence[str] = ()
    ungraded: Sequence[str] = ()
    biased_convolutions: Sequence[str] = ()
    input_type: torch.dtype = torch.float32


class _Observer(TorchFunctionMode):
    """Notes, operation by operation, the stage that uses each weight and what PopTorch would compute otherwise."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.stage = 0
        self.stages: Dict[str, Set[int]] = {}
        self.ungraded: List[str] = []
        self.biased: List[str] = []
        self.modules: List[str] = []  # those that are running, the innermost last
        self._names = {id(t): name for name, t in [*model.named_parameters(), *model.named_buffers()]}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name, where = getattr(func, "__name__", str(func)), self.modules[-1] if self.modules else "the loss"
        inputs = [value for value in tree_flatten((args, kwargs))[0] if isinstance(value, torch.Tensor)]
        for tensor in inputs:
            if id(tensor) in self._names:
                self.stages.setdefault(self._names[id(tensor)], set()).add(self.stage)
        if name in _CONVOLUTIONS and (kwargs.get("bias") is not None or (len(args) > 2 and args[2] is not None)):
            self.biased.append(where)
        loses_gradient = (
            not torch.is_grad_enabled() and name not in _SHAPE_ONLY and any(t.requires_grad for t in inputs)
        )
        result = func(*args, **kwargs)
        if loses_gradient:
            outputs = [value for value in tree_flatten(result)[0] if isinstance(value, torch.Tensor)]
            if any(t.is_floating_point() for t in outputs):
                self.ungraded.append(f"{name} in {where}")
        return result


def observe_model(job: Job) -> ModelFacts:
    """Return the facts that one training forward of the job's example and its loss, on the CPU, show of its model."""
    model, part, (x, y) = job.model, job.part, job.example
    observer, order, handles = _Observer(model), [], []
    for name, stage in part.begins.items():

        def enter_stage(module: nn.Module, inputs: Any, stage: int = stage) -> None:
            observer.stage = stage
            order.append(stage)

        handles.append(model.get_submodule(name).register_forward_pre_hook(enter_stage))
    for name, module in model.named_modules():
        handles.append(
            module.register_forward_pre_hook(lambda _, __, name=name: observer.modules.append(name or "model"))
        )
        handles.append(module.register_forward_hook(lambda *_: observer.modules.pop() and None))
    before = {name: (t, t.clone()) for name, t in model.named_buffers()}
    try:
        with torch.enable_grad(), torch.random.fork_rng(devices=[]), buffers_restored(model):
            with observer:
                loss = job.loss(model(x.clone()), y)
            now = dict(model.named_buffers())
            moving = [name for name, (t, old) in before.items() if now[name] is not t or not torch.equal(t, old)]
    finally:
        for handle in handles:
            handle.remove()
    functions = sorted(set(_find_functions(loss)))
    kind = type(job.optimizer)
    is_torchs = kind.__module__.startswith("torch.optim")
    assert job.updates_per_epoch is not None, "data without a length is refused before"
    return ModelFacts(
        stages=len(part),
        shared={name: sorted(stages) for name, stages in observer.stages.items() if len(stages) > 1},
        order=order,
        empty=sorted(set(range(1, len(part))) - set(part.begins.values())),
        written=[name for name in moving if before[name][0].is_floating_point()],
        optimizer=(kind.__name__ if is_torchs else f"{kind.__module__}.{kind.__name__}", job.optimizer.param_groups),
        updates=job.updates,
        updates_per_epoch=job.updates_per_epoch,
        counters=[name for name in moving if not before[name][0].is_floating_point() and not _is_counted(model, name)],
        functions=functions,
        ungraded=[] if functions else sorted(set(observer.ungraded)),  # autograd runs their forwards without a gradient
        biased_convolutions=sorted(set(observer.biased)),
        input_type=x.dtype,
    )


def _is_counted(model: nn.Module, name: str) -> bool:
    """Tell whether a buffer is a BatchNorm's number of batches, which nothing reads and the IPU counts in float32."""
    owner, _, last = name.rpartition(".")
    module = model.get_submodule(owner)
    return last == "num_batches_tracked" and isinstance(module, _NormBase) and module.momentum is not None


def _find_functions(loss: torch.Tensor) -> Iterator[str]:
    """Yield the names of the torch.autograd.Function classes through which the loss's gradient flows."""
    waiting, seen = [loss.grad_fn], set()
    while waiting:
        node: Any = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            yield type(node).__name__.replace("Backward", "")
        waiting += [following for following, _ in node.next_functions]


_UNREAD = ("maximize", "differentiable", "capturable", "amsgrad")


def check_model(config: Config, method: Method, facts: ModelFacts, local_replicas: Optional[int] = None) -> List[str]:
    """Return why PopTorch cannot run the job, each reason with its remedy; empty if none is known. `local_replicas`: of this
    process, where poprun started several."""
    ipu = config.ipu
    if local_replicas is not None:
        config = config.model_copy(update={"replicas": local_replicas})
    decoupled = ipu.local == "decoupled" and method.structure is not None
    faults = [] if decoupled else check_placement(config, ipu, method, facts.stages)
    if faults:
        return faults
    place = Placement((0,)) if decoupled else place_stages(ipu, facts.stages)
    if decoupled and ipu.ipu_ids is not None and len(ipu.ipu_ids) != facts.stages:
        faults.append(f"{show_key('ipu_ids', ipu.ipu_ids)}: must name a device for each of {facts.stages} blocks")
    shares = ipu.available_memory_proportion
    if decoupled and isinstance(shares, list) and len(shares) != facts.stages:
        faults.append(
            f"{show_key('available_memory_proportion', shares)}: must be one number, or {facts.stages}, one a block"
        )
    if not decoupled:
        faults += _check_layout(facts, place, method)
    if facts.written and config.replicas > 1 and ipu.broadcast_buffers:
        faults.append(
            f"{show_key('broadcast_buffers', True)}: training writes {list_some(facts.written, 3)} on each of "
            f"{config.replicas} replicas apart, which PopTorch does not broadcast: set it to false (the first "
            "replica's are kept), or use GroupNorm"
        )
    if local_replicas is not None:
        faults += check_locations(config, ipu)  # weights are sharded over a process's own replicas
        if round_up_ipus(place.ipus * local_replicas) > MOST_IPUS:
            faults.append(
                f"replicas: {local_replicas} of each process on {place.ipus} IPUs: a process drives at most {MOST_IPUS}: start"
                " more with poprun --num-instances"
            )
    faults += _check_forward(facts, config.precision)
    faults += _check_optimizer(facts.optimizer, config)
    if ipu.device_iterations > 1:
        faults += _check_alignment(config, ipu.device_iterations, facts)
    return faults


def _check_layout(facts: ModelFacts, place: Placement, method: Method) -> List[str]:
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


def _check_forward(facts: ModelFacts, precision: str) -> List[str]:
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


def _check_optimizer(optimizer: Tuple[str, Sequence[Mapping[str, Any]]], config: Config) -> List[str]:
    """Return what PopTorch does not have of the optimizer that trains, whatever the config's own says."""
    (kind, groups), ipu, clips = optimizer, config.ipu, config.clip is not None
    if kind not in ACCUMULATORS:
        return [f"optimizer: {kind}: PopTorch has none such: must be torch.optim's {', '.join(ACCUMULATORS)}"]
    set_ = [key for key in _UNREAD if any(group.get(key) for group in groups)]
    faults = [f"optimizer.{key}: true: PopTorch does not have it: must be false" for key in set_]
    for key in sorted({key for keys in ACCUMULATORS.values() for key in keys}):
        if getattr(ipu, key) != "float32" and key not in ACCUMULATORS[kind]:
            owners = [name for name, keys in ACCUMULATORS.items() if key in keys]
            faults.append(f"{show_key(key, getattr(ipu, key))}: {kind} has none: it is of {', '.join(owners)}")
    if ipu.use_combined_accum and kind != "SGD":
        faults.append(f"{show_key('use_combined_accum', True)}: {kind} has none: it is of SGD")
    if any(group.get("dampening") for group in groups):
        faults.append(
            "optimizer.dampening: PopART's velocity starts at zero, PyTorch's at the first gradient, so that they would differ: "
            "must be 0"
        )
    if any(group.get("nesterov") for group in groups):
        faults += _check_nesterov(config)
    if clips and kind == "RMSprop":
        faults.append("clip: PopTorch clips with SGD, Adam and AdamW alone, not with RMSprop: must be null")
    return faults


def _check_nesterov(config: Config) -> List[str]:
    """Return why Nesterov momentum would differ from PyTorch's. PopART's step takes the accumulator as it is
    (compoundscalarhelper.cpp: NesterovDampeningScaleFactor times DampeningScaleFactor is 1 / loss scale, whatever the mean's
    divisor): it is the mean only where that is kept running."""
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


def _check_alignment(config: Config, iterations: int, facts: ModelFacts) -> List[str]:
    key, every = show_key("device_iterations", iterations), config.evaluate.interval(facts.updates_per_epoch)
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
