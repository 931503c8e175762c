"""The caller's optimizer in a pipeline: it stays the handle for settings and state, and another one like it steps.

    the caller's    group 0: lr 0.1    group 1: lr 0.01, no weight decay          its schedulers change these
    steps           stage 0, of 0      stage 0, of 1      stage 1, of 0 ...       gets the settings of its batch

A stage makes update k when later batches have entered the pipeline already. So the settings of all groups are copied when a batch
is given, and belong to that batch's update on every stage, however late.
"""

from __future__ import annotations

import collections
import copy
from collections.abc import MutableMapping
from typing import Any, Dict, Iterator, List, Mapping, Optional

import torch
from torch import nn

from ipu_pipe.errors import BadInput
from ipu_pipe.pipeline.arguments import check_heads
from ipu_pipe.text import describe_kind
from ipu_pipe.update.optimizer import Groups

# keys of a caller's parameter group that are not settings of a step
NOT_SETTINGS = ("params", "initial_lr")


class SharedState(MutableMapping):  # type: ignore[type-arg]
    """The state of the optimizer that steps: of the caller's parameters in the caller's optimizer, of others apart.

    Others are the auxiliary heads and master copies that a method or precision adds; the caller's `state_dict` leaves them out.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._own = {p for group in optimizer.param_groups for p in group["params"]}
        self._added: Dict[Any, Dict[str, Any]] = collections.defaultdict(dict)

    def _find(self, parameter: Any) -> Any:
        # `load_state_dict` of the caller's optimizer makes a new dictionary
        return self._optimizer.state if parameter in self._own else self._added

    def __getitem__(self, parameter: Any) -> Any:
        return self._find(parameter)[parameter]

    def __setitem__(self, parameter: Any, value: Any) -> None:
        self._find(parameter)[parameter] = value

    def __delitem__(self, parameter: Any) -> None:
        del self._find(parameter)[parameter]

    def __contains__(self, parameter: Any) -> bool:
        return parameter in self._find(parameter)

    def __iter__(self) -> Iterator[Any]:
        yield from list(self._optimizer.state)
        yield from list(self._added)

    def __len__(self) -> int:
        return len(self._optimizer.state) + len(self._added)


class OptimizerView(torch.optim.Optimizer):
    """The caller's optimizer for a framework that steps it: the same groups, settings and state, but `step` changes nothing."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        # not the base class's: groups, state and hooks are those of the caller's
        self.optimizer = optimizer

    def __getattr__(self, name: str) -> Any:
        # the groups, the state and the defaults, also when the caller has loaded others
        return getattr(self.__dict__["optimizer"], name)

    def step(self, closure: Any = None) -> Any:
        """Return the closure's result. The pipeline has made the step, or makes it when the batch's backwards are done."""
        return None if closure is None else closure()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: the pipeline clears gradients."""

    def state_dict(self) -> Dict[str, Any]:
        """Return the state of the caller's optimizer."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: Dict[str, Any]) -> None:
        """Load the state of the caller's optimizer."""
        self.optimizer.load_state_dict(state_dict)

    def add_param_group(self, param_group: Dict[str, Any]) -> None:
        """Add a group to the caller's optimizer, which the pipeline refuses."""
        self.optimizer.add_param_group(param_group)


class OptimizerHandle:
    """The caller's optimizer: `copy_for(groups)` makes the one that steps, `record(k)` copies the settings for update k.

    `heads`: the settings in which the group of auxiliary heads differs from the first group; None: they are in the first group.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, heads: Optional[Mapping[str, Any]] = None) -> None:
        wrapped = getattr(optimizer, "optimizer", None)
        if isinstance(wrapped, torch.optim.Optimizer):
            why = f"wraps {describe_kind(wrapped)}: give that one, and let the wrapper's framework not prepare it"
            raise BadInput(f"optimizer: {describe_kind(optimizer)}: {why}")
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise BadInput(f"optimizer: {describe_kind(optimizer)}: must be a torch.optim.Optimizer over the model's parameters")
        if isinstance(optimizer, torch.optim.LBFGS):
            raise BadInput("optimizer: LBFGS: evaluates the loss several times in a step, which a pipeline cannot: use another")
        if heads is not None:
            check_heads(heads, optimizer)
        self.optimizer, self._heads = optimizer, heads
        self._member_of = {id(p): i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}
        self._settings: Dict[int, List[Dict[str, Any]]] = {}
        self._is_stepping = self._is_counted = False
        # registered on the caller's handle alone: the optimizer that steps has the caller's other hooks
        self._hook = optimizer.register_step_pre_hook(self._refuse_step)

    @property
    def group_count(self) -> int:
        """The number of parameter groups: the caller's, and one for heads that have settings of their own."""
        return len(self.optimizer.param_groups) + int(self._heads is not None)

    @property
    def heads_member(self) -> int:
        """The number of the group of auxiliary heads."""
        return 0 if self._heads is None else len(self.optimizer.param_groups)

    def find_member(self, parameter: nn.Parameter) -> Optional[int]:
        """Return the number of the caller's group of a parameter, None if it is in none."""
        return self._member_of.get(id(parameter))

    def copy_for(self, groups: Groups) -> torch.optim.Optimizer:
        """Return an optimizer like the caller's over other groups, each with a `member`, with the same hooks and state."""
        optimizer = self.optimizer
        inner = object.__new__(type(optimizer))
        inner.__dict__.update(optimizer.__dict__)
        # a scheduler has put a wrapper there, which calls the caller's optimizer
        inner.__dict__.pop("step", None)
        members = self._copy_all_settings()
        inner.param_groups = [{**members[group["member"]], **group} for group in groups]
        inner.state = SharedState(optimizer)  # type: ignore[assignment]
        return inner

    def _copy_all_settings(self) -> List[Dict[str, Any]]:
        """Return the present settings of each group."""
        settings = [self._copy_settings(group) for group in self.optimizer.param_groups]
        if self._heads is not None:
            settings.append({**self._copy_settings(self.optimizer.param_groups[0]), **self._heads})
        return settings

    @staticmethod
    def _copy_settings(group: Mapping[str, Any]) -> Dict[str, Any]:
        return {key: copy.copy(value) for key, value in group.items() if key not in NOT_SETTINGS}

    # ---- settings

    def record(self, k: int) -> None:
        """Copy the settings of all groups as those of update k. Raise `RuntimeError` if the caller has added a group."""
        groups = self.optimizer.param_groups
        if sum(len(group["params"]) for group in groups) != len(self._member_of):
            raise RuntimeError("step: the optimizer has other parameters than when the pipeline was made: make a new pipeline")
        self._settings[k] = self._copy_all_settings()

    def get_settings(self, k: int, group: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the settings of one of the inner optimizer's groups for update k."""
        # randomized methods may update one stage more often than batches were given
        newest = max(self._settings)
        return self._settings[min(k, newest)][group["member"]]

    def forget_before(self, k: int) -> None:
        """Drop the settings of updates before k, except the newest."""
        newest = max(self._settings, default=0)
        for old in [old for old in self._settings if old < min(k, newest)]:
            del self._settings[old]

    # ---- the caller's `step`

    def _refuse_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if optimizer is self.optimizer and not self._is_stepping:
            raise RuntimeError(
                "optimizer.step(): the pipeline steps this optimizer, each stage in its turn: call pipe.step(x, y) alone"
            )

    def count_as_stepped(self) -> None:
        """Let the caller's learning-rate schedulers see a step of the caller's optimizer, which changes nothing, once."""
        if self._is_counted:
            return
        self._is_counted = True
        parameters = [group["params"] for group in self.optimizer.param_groups]
        self._is_stepping = True
        try:
            for group in self.optimizer.param_groups:
                group["params"] = []
            self.optimizer.step()
        finally:
            for group, group_parameters in zip(self.optimizer.param_groups, parameters):
                group["params"] = group_parameters
            self._is_stepping = False

    def release(self) -> None:
        """Let the caller step the optimizer again."""
        self._hook.remove()
