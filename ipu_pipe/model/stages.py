"""Model -> stages: where a stage begins, and which parameters belong to which stage.

A *stage* is a group of parameters (and weightless operations) that share one delay. Boundaries are marked in the model,

    self.conv2 = begin_stage(nn.Conv2d(16, 16, 3))     # a new stage begins when conv2 first runs

or chosen from outside by names, by a count that balances a cost, or as fine as possible. Whatever way, a stage holds all
that runs from its first module to the next boundary, in the order of execution seen in one forward of an example:

    forward    conv1  norm1  relu | conv2  norm2 | add | pool  linear | loss
    stage            0            |      1       |  2  |       3      |  4
"""

from __future__ import annotations

from typing import Any, List, Mapping, Optional, Sequence, Tuple, TypeVar, Union

from torch import nn

from ipu_pipe.errors import BadInput
from ipu_pipe.model.balancing import COSTS, balance_stages, compute_costs, spread_weights
from ipu_pipe.model.observation import check_runs_modules, group_weights, observe_execution
from ipu_pipe.model.partition import Partition, build_partition, check_names, open_stages, refuse_shared

Module = TypeVar("Module", bound=nn.Module)
StageChoice = Union[None, str, int, Sequence[str], Mapping[str, Any]]


def begin_stage(module: Module) -> Module:
    """Mark that a new pipeline stage begins when `module` first runs; returns the module itself.

    The mark survives copying and pickling and changes neither the module's behaviour nor its state dict.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"begin_stage takes a torch.nn.Module, not {type(module).__name__}")
    module.begins_stage = True  # type: ignore[assignment]
    return module


def partition(
    model: nn.Module,
    example: Any,
    stages: StageChoice = None,
    between_top: bool = False,
    one_stage: Optional[str] = "",
) -> Partition:
    """Assign every parameter of `model` to a stage.

    `example`: one microbatch of input, run in evaluation and in training mode without gradients to see the order of
    execution: evaluation's, or training's where modules run in training alone (auxiliary heads).
    `stages`: None, the model's own `begin_stage` marks; a list of module names at which stages begin (stage 0 begins with
    the model); a whole number, that many stages balanced by FLOPs, or `{"count": 4, "by": "flops" | "parameters" | "time"}`;
    "finest", one stage a weight tensor in the order of execution, weight and bias of one module together (107 for
    ResNet-50), or `{"finest": P}`, which puts weight j of n on stage `floor(j P / n)`, some stages then without weights.
    A count gives exactly so many stages: between modules of the model's top-level sequence if no stage then costs over
    half more than it must, else at any modules, nested ones too (see `ipu_pipe.model.balance`). `between_top`: always the
    former where its modules are enough, for devices that hand activations on.
    `one_stage`: why all uses of a weight must lie in one stage; None: they need not (`schedule.methods.Method.one_stage`).

    Raises BadInput: unknown module names, impossible counts, a weight used in two stages where it may not.
    """
    part = _partition(model, example, stages, between_top, one_stage is None)
    if one_stage is not None:
        refuse_shared(part, one_stage)
    return part


def _partition(model: nn.Module, example: Any, stages: StageChoice, between_top: bool, shares: bool) -> Partition:
    balances = not (stages is None or isinstance(stages, (list, tuple)) or stages == "finest")
    calls, stages_of_calls = observe_execution(model, example, counted=balances)
    check_runs_modules(calls)
    if stages is None:
        begins = open_stages(calls, {c.name for c in calls if getattr(c.module, "begins_stage", False)})
        return build_partition(model, calls, stages_of_calls, begins)
    if isinstance(stages, (list, tuple)):
        check_names(model, calls, stages)
        return build_partition(model, calls, stages_of_calls, open_stages(calls, set(stages)))
    count, by, finest = _read_choice(stages)
    groups = group_weights(model, calls)
    if finest or count > len(groups):
        return spread_weights(model, calls, stages_of_calls, groups, count or len(groups))
    costs = compute_costs(model, calls, groups, by, example)
    return balance_stages(model, calls, stages_of_calls, groups, count, costs, between_top, shares)


def _read_choice(stages: Any) -> Tuple[int, str, bool]:
    """Read (count, cost, finest) of a choice that is not a list; count 0 stands for one stage a weight."""
    if stages == "finest":
        return 0, "flops", True
    if isinstance(stages, int) and not isinstance(stages, bool):
        stages = {"count": stages}
    if isinstance(stages, Mapping) and set(stages) == {"finest"}:
        count, by, finest = stages["finest"], "flops", True
    elif isinstance(stages, Mapping) and "count" in stages and set(stages) <= {"count", "by"}:
        count, by, finest = stages["count"], stages.get("by", "flops"), False
    else:
        raise BadInput(
            f"stages: {stages}: must be a count, 'finest', a list of module names, {{count: P, by: {'|'.join(COSTS)}}} "
            "or {finest: P}"
        )
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise BadInput(f"stages: {count}: must be a whole number >= 1")
    if by not in COSTS:
        raise BadInput(f"stages: by: {by}: must be one of {', '.join(COSTS)}")
    return count, by, finest


def describe_stages(part: Partition, model: nn.Module) -> List[Tuple[int, str, int]]:
    """Return (index, first module, number of parameters) of each stage, for printing."""
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    return [(s.index, s.name, sum(sizes[n] for n in s.parameters)) for s in part.stages]
