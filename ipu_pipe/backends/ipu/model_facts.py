"""The facts of a job's model that decide whether PopTorch can train it, from one observed training
forward.

Sources: PopTorch, branch sdk-release-3.4 (dispatchers/JitDispatch.cpp: integer buffers;
RequiresGrad.cpp: no_grad) and PopART (op/batchnorm.cpp: the gradient reads the batch's statistics,
which a BatchNorm in evaluation mode does not compute). Not run on hardware.
"""

from __future__ import annotations

import contextlib
from typing import Any, Iterator, Mapping, NamedTuple, Sequence

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from ipu_pipe.job.record import Job
from ipu_pipe.model.batch import list_tensors
from ipu_pipe.model.precision import get_user_loss
from ipu_pipe.model.restoring import restore_attributes, restore_buffers, restore_function
from ipu_pipe.model.watching import FunctionWatch
from ipu_pipe.schedule.timelines import OPEN
from ipu_pipe.update.optimizer import list_kinds

# stands for a module's name where none runs
LOSS = "the loss"
# These operations read only a tensor's shape, so no gradient flows through them anyway.
_SHAPE_ONLY = frozenset(
    "detach zeros_like ones_like full_like empty_like rand_like randn_like new_zeros new_ones "
    "new_full new_empty new_tensor "
    "__get__".split()
)


class ModelFacts(NamedTuple):
    """The facts of a model and its optimizer.

    `shared`: names of weights and buffers that several stages use -> these stages. `order`: the
    stages in the order in which a forward begins them. `empty`: stages at which no module begins.
    `written`: floating-point buffers that training writes; `counters`: integer buffers that it
    writes. `optimizer`: kind (`list_kinds`) and parameter groups. `functions`: classes of
    torch.autograd.Function in the gradient's path. `ungraded`: operations inside torch.no_grad()
    through which a gradient would flow without it. `fixed_norms`: normalizations that use their
    running statistics (evaluation mode) in the gradient's path. `input_type`: dtype of the model's
    input. `has_loop`: a caller's loop gives the batches.
    """

    stages: int
    shared: Mapping[str, Sequence[int]]
    order: Sequence[int]
    empty: Sequence[int]
    written: Sequence[str]
    optimizer: tuple[str, Sequence[Mapping[str, Any]]]
    has_loop: bool = False
    counters: Sequence[str] = ()
    functions: Sequence[str] = ()
    ungraded: Sequence[str] = ()
    fixed_norms: Sequence[str] = ()
    input_type: torch.dtype = torch.float32


class Observer:
    """Collect the facts of one forward: functions of torch and modules report to it as they run.

    `users`: name of a weight -> the stages that use it; `ungraded`: operations that lose a
    gradient; `order`: the stages in the order in which they began; `fixed_norms`: norms in training
    that use their running statistics; `running`: names of the running modules, the innermost last.
    """

    def __init__(self, job: Job) -> None:
        model = job.model
        tensors = [*model.named_parameters(), *model.named_buffers()]
        self.users: dict[str, set[int]] = {}
        self.ungraded: set[str] = set()
        self.order = [0]
        self.fixed_norms: list[str] = []
        self._weight_names = {id(tensor): name for name, tensor in tensors}
        self._begins = job.partition.begins
        self.running = [LOSS]

    def record_call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call a function of torch and return its result."""
        name = getattr(func, "__name__", str(func))
        inputs = list_tensors((args, kwargs))
        for tensor in inputs:
            if id(tensor) in self._weight_names:
                users = self.users.setdefault(self._weight_names[id(tensor)], set())
                # the stage that runs now
                users.add(self.order[-1])
        without_gradient = not torch.is_grad_enabled() and name not in _SHAPE_ONLY
        loses_gradient = without_gradient and any(t.requires_grad for t in inputs)
        # after the inputs were examined, which the function may change
        result = func(*args, **kwargs)
        if loses_gradient and any(t.is_floating_point() for t in list_tensors(result)):
            self.ungraded.add(f"{name} in {self.running[-1]}")
        return result

    def begin_module(self, name: str) -> None:
        """Note that a module's forward begins, and the stage that begins with it."""
        self.running.append(name or "model")
        if name in self._begins:
            self.order.append(self._begins[name])

    def end_module(self, name: str, module: nn.Module, output: Any) -> None:
        """Note that a module's forward has ended."""
        self.running.pop()
        uses_running_statistics = (
            isinstance(module, _NormBase)
            and not module.training
            and module.running_mean is not None
        )
        if uses_running_statistics and output.requires_grad and name not in self.fixed_norms:
            self.fixed_norms.append(name)


def run_observed(job: Job, observer: Observer) -> tuple[torch.Tensor, list[str]]:
    """Run one training forward of the job's example and return its loss and the names of the
    buffers that it wrote. The model's buffers and attributes are restored.
    """
    model = job.model
    x, y = job.example
    # clones beside the tensors: a module may write a buffer, or put another one in its place
    before = {name: (t, t.clone()) for name, t in model.named_buffers()}
    # a tensor on the meta device has no values by which a write would show
    versions = {name: t._version for name, t in model.named_buffers()}
    with contextlib.ExitStack() as hooks, torch.enable_grad(), torch.random.fork_rng(devices=[]):
        hooks.enter_context(restore_buffers(model))
        # a tensor with a graph, which a module has kept as an attribute, could not be copied with
        # the model
        hooks.enter_context(restore_attributes(model))
        hooks.enter_context(restore_function(get_user_loss(job.loss)))
        for name, module in model.named_modules():
            hooks.enter_context(
                module.register_forward_pre_hook(lambda *_, name=name: observer.begin_module(name))
            )  # type: ignore[misc]
            hooks.enter_context(
                module.register_forward_hook(
                    lambda m, _, output, name=name: observer.end_module(name, m, output)
                )  # type: ignore[misc]
            )
        with FunctionWatch(observer.record_call):
            # a clone, because the model may write to its input
            loss = job.loss(model(x.clone()), y)
        now = dict(model.named_buffers())
        written = [
            name
            for name, (t, old) in before.items()
            if now[name] is not t
            or (t._version > versions[name] if t.is_meta else not torch.equal(t, old))
        ]
    if x.is_meta:
        # the kernel of a normalization writes them without a new version
        written = list(dict.fromkeys([*written, *_list_running_statistics(model)]))
    return loss, written


def _list_running_statistics(model: nn.Module) -> list[str]:
    """Return the names of the running statistics that a training forward writes."""
    return [
        f"{owner}.{name}".lstrip(".")
        for owner, module in model.named_modules()
        if isinstance(module, _NormBase) and module.training
        for name, _ in module.named_buffers(recurse=False)
    ]


def observe_model(job: Job) -> ModelFacts:
    """Return the facts of a job's model, from one training forward of its example and its loss on
    the CPU.
    """
    model = job.model
    part = job.partition
    observer = Observer(job)
    loss, written = run_observed(job, observer)
    floating = {name for name, buffer in model.named_buffers() if buffer.is_floating_point()}
    functions = sorted(set(_find_functions(loss)))
    return ModelFacts(
        stages=len(part),
        shared={name: sorted(stages) for name, stages in observer.users.items() if len(stages) > 1},
        order=observer.order[1:],
        empty=sorted(set(range(1, len(part))) - set(part.begins.values())),
        written=[name for name in written if name in floating],
        optimizer=(list_kinds(job.optimizer)[0], job.optimizer.param_groups),
        has_loop=job.updates == OPEN,
        counters=[
            name for name in written if name not in floating and not _is_counted(model, name)
        ],
        functions=functions,
        # the forward of an autograd.Function runs without a gradient, so its operations would be
        # reported too
        ungraded=[] if functions else sorted(observer.ungraded),
        fixed_norms=observer.fixed_norms,
        input_type=job.example[0].dtype,
    )


def _is_counted(model: nn.Module, name: str) -> bool:
    """Tell whether a buffer is a BatchNorm's number of batches, which nothing reads and the IPU
    counts in float32.
    """
    owner, _, buffer = name.rpartition(".")
    module = model.get_submodule(owner)
    return (
        buffer == "num_batches_tracked"
        and isinstance(module, _NormBase)
        and module.momentum is not None
    )


def _find_functions(loss: torch.Tensor) -> Iterator[str]:
    """Yield the names of the torch.autograd.Function classes through which the loss's gradient
    flows.
    """
    waiting: list[Any] = [loss.grad_fn]
    seen: set[Any] = {None}
    while waiting:
        node = waiting.pop()
        if node not in seen:
            # a graph joins again, as after a skip connection
            seen.add(node)
            waiting += [next_node for next_node, _ in node.next_functions]
            if isinstance(node, torch.autograd.function.BackwardCFunction):
                # torch names the node after its Function, with this ending
                yield type(node).__name__.replace("Backward", "")
