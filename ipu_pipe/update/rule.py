"""What an update rule is: a row with its key, source and equation, and a pure function for each thing that it changes.

A rule acts on each stage by that stage's lag D, in updates, over any torch.optim optimizer that it is defined on. An update
applies the rules in the order of their table, and each of these in turn:

    gradient    g <- gradient(g)                                                     (then clipping)
    rate        lr <- rate(lr, k)
    step        the optimizer's own step, then w <- w + c x for each (x, c) of step(velocity, g)
    state       each entry kept beside the optimizer's <- its own function of what it was and of w_{t+1} - w_t

and a pass that reads a version of the weights w gets w + c x for each (entry, c) of `read`, x the optimizer's state of that
name *at that version*. The functions know nothing of stages other than theirs, nor of one another.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import torch

from ipu_pipe.schedule.methods import Method

Tensors = List[torch.Tensor]  # one for each parameter of a stage that it is about


class Setting(NamedTuple):
    """A rule as it is set for one stage of a run. `values`: of its key in method_args; `lag`: D of the stage, in updates
    (`VersionTable.rule_lag`); `accumulate`: N."""

    values: Any
    stage: int
    lag: float
    method: Method
    accumulate: int


class Reading(NamedTuple):
    """A pass about to read a version. `is_forward`: or else a backward or a recomputation; `lag`: of this backward, in updates,
    where the rule asks for it (`reads_lag`), else 0; `rate`: the learning rate of the update that is next at that version."""

    is_forward: bool
    lag: int = 0
    rate: float = 0.0


# (what an entry was, w_{t+1} - w_t) -> what it is; the old value is given away, the step is not but may be kept
Follow = Callable[[Tensors, Tensors], Tensors]
# (setting, options of the optimizer's group, velocity, gradients) -> (x, c) pairs
Step = Callable[[Setting, Mapping[str, Any], Tensors, Tensors], List[Tuple[Tensors, float]]]


def _own_key(rule: Rule, args: Mapping[str, Any], method: Method) -> Any:
    return args.get(rule.key)


@dataclass(frozen=True)
class Rule:
    """One rule. All functions are optional; those on tensors may write into tensors that are said to be given away.

    `set_by(rule, args, method)`: the rule's settings in a run with these method_args (resolved), None where it does not act.
    `method_faults(settings, method, keys of the rules that act)` and `optimizer_faults(settings, kind, options)`, kind being
    sgd, adam or adamw: why it cannot.

    `gradient(setting, gradients)` -> gradients; the given ones are given away.
    `rate(setting, rate, k)` -> rate of update k, counted from the switch to asynchronous training.
    `step(setting, options, velocity, gradients)` -> (x, c) pairs; `options`: the optimizer's, of the parameters' group;
    `gradients`: before the step, with the optimizer's weight decay, as the velocity has it.
    `state(setting)` -> the entries kept on the stage beside the optimizer's state, tensors in the parameters' shapes that
    begin at 0, and how each follows the steps. Memory is counted and checkpoints are checked by these names.
    `read(setting, reading)` -> (entry, c) pairs; coefficients of 0 correct nothing.
    """

    key: str  # in method_args, if it has one there
    source: str
    equation: str
    set_by: Callable[[Rule, Mapping[str, Any], Method], Any] = _own_key
    method_faults: Optional[Callable[[Any, Method, Sequence[str]], List[str]]] = None
    optimizer_faults: Optional[Callable[[Any, str, Mapping[str, Any]], List[str]]] = None

    gradient: Optional[Callable[[Setting, Tensors], Tensors]] = None
    rate: Optional[Callable[[Setting, float, int], float]] = None
    step: Optional[Step] = None
    state: Optional[Callable[[Setting], Mapping[str, Follow]]] = None
    read: Optional[Callable[[Setting, Reading], List[Tuple[str, float]]]] = None

    needs_lag: bool = True  # a stage without lag is left alone, to the last bit
    reads_lag: bool = False  # its `read` of a backward goes by the lag of that pass

    def acts_on(self, setting: Setting) -> bool:
        """Whether it does anything on the stage."""
        return bool(setting.lag) or not self.needs_lag
