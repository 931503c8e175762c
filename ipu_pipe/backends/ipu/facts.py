"""What one forward of the built model shows of it: what the refusals need to know."""

from __future__ import annotations

from typing import Any, Dict, Mapping, NamedTuple, Sequence, Set, Tuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten

from ipu_pipe.model.restoring import buffers_restored
from ipu_pipe.model.stages import Partition


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


class _Uses(TorchFunctionMode):
    """Sees at which stage each weight and buffer is used."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.stage = 0
        self.stages: Dict[str, Set[int]] = {}
        self._names = {id(t): name for name, t in [*model.named_parameters(), *model.named_buffers()]}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in tree_flatten((args, kwargs or {}))[0]:
            if isinstance(tensor, torch.Tensor) and id(tensor) in self._names:
                self.stages.setdefault(self._names[id(tensor)], set()).add(self.stage)
        return func(*args, **(kwargs or {}))


def facts(
    model: nn.Module,
    part: Partition,
    x: torch.Tensor,
    optimizer: torch.optim.Optimizer,
    updates: int,
    updates_per_epoch: int,
) -> ModelFacts:
    """What one training forward of a microbatch `x` on the CPU shows."""
    uses, order, handles = _Uses(model), [], []
    for name, stage in part.begins.items():

        def enter(module: nn.Module, inputs: Any, stage: int = stage) -> None:
            uses.stage = stage
            order.append(stage)

        handles.append(model.get_submodule(name).register_forward_pre_hook(enter))
    before = {name: (t, t.clone()) for name, t in model.named_buffers()}
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]), buffers_restored(model):
            with uses:
                model(x.clone())
            now = dict(model.named_buffers())
            moving = [name for name, (t, old) in before.items() if now[name] is not t or not torch.equal(t, old)]
    finally:
        for handle in handles:
            handle.remove()
    kind = type(optimizer)
    plain = kind.__name__ if kind.__module__.startswith("torch.optim") else f"{kind.__module__}.{kind.__name__}"
    return ModelFacts(
        stages=len(part),
        shared={name: sorted(stages) for name, stages in uses.stages.items() if len(stages) > 1},
        order=order,
        empty=sorted(set(range(1, len(part))) - set(part.begins.values())),
        moving=moving,
        optimizer=(plain, optimizer.param_groups),
        updates=updates,
        updates_per_epoch=updates_per_epoch,
    )
