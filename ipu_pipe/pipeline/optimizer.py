"""The caller's optimizer in a pipeline: it stays the handle for settings and state, and another one
like it steps.

    the caller's    group 0: lr 0.1    group 1: lr 0.01, no weight decay          its schedulers change these
    steps           stage 0, of 0      stage 0, of 1      stage 1, of 0 ...       gets the settings of its batch

A stage makes update k when later batches have entered the pipeline already. So the settings of all
groups are copied when a batch is given, and belong to that batch's update on every stage, however
late.
"""

from __future__ import annotations

import collections
import copy
import gc
import inspect
import weakref
from collections.abc import MutableMapping
from typing import Any, Callable, Iterator, Mapping

import torch
from torch import nn

from ipu_pipe.errors import BadInput
from ipu_pipe.pipeline.arguments import require_head_settings
from ipu_pipe.text import describe_kind, show
from ipu_pipe.update.optimizer import Groups

# keys of a caller's parameter group that are not settings of a step
NOT_SETTINGS = ("params", "initial_lr")


def copy_setting(value: Any) -> Any:
    """Copy a setting; a learning rate may be a tensor that its scheduler changes in place."""
    return value.detach().clone() if isinstance(value, torch.Tensor) else copy.copy(value)


def _is_like(value: Any, default: Any) -> bool:
    """Return whether a setting may stand for its default: a number, or numbers, for the same."""
    if isinstance(default, (tuple, list)):
        is_sequence = isinstance(value, (tuple, list)) and len(value) == len(default)
        return is_sequence and all(map(_is_like, value, default))
    if isinstance(default, bool) or not isinstance(default, (int, float, torch.Tensor)):
        return True
    if isinstance(value, torch.Tensor):
        return value.numel() == 1
    # torch takes no whole number beyond 64 bits
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and (isinstance(value, float) or abs(value) < 2**63)


class SharedState(MutableMapping):  # type: ignore[type-arg]
    """The state of the optimizer that steps: of the caller's parameters in the caller's optimizer,
    of others apart.

    Others are the auxiliary heads and master copies that a method or precision adds; the caller's
    `state_dict` leaves them out.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._own = {p for group in optimizer.param_groups for p in group["params"]}
        self._added: dict[Any, dict[str, Any]] = collections.defaultdict(dict)

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
    """The caller's optimizer for a framework that steps it: the same groups, settings and state,
    but `step` changes nothing.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        # not the base class's: groups, state and hooks are those of the caller's
        self.optimizer = optimizer

    def __getattr__(self, name: str) -> Any:
        # the groups, the state and the defaults, also when the caller has loaded others
        return getattr(self.__dict__["optimizer"], name)

    def step(self, closure: Any = None) -> Any:
        """Return the closure's result. The pipeline has made the step, or makes it when the batch's
        backwards are done.
        """
        return None if closure is None else closure()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: the pipeline clears gradients."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the caller's optimizer."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of the caller's optimizer."""
        self.optimizer.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the caller's optimizer, which the pipeline refuses."""
        self.optimizer.add_param_group(param_group)


def _list_parts(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the modules that have something to share, the weights and the buffers, with names."""
    for name, module in model.named_modules():
        # an activation without weights may be in many models
        if next(module.parameters(), None) is not None or next(module.buffers(), None) is not None:
            yield name or type(module).__name__, module
    yield from model.named_parameters()
    yield from model.named_buffers()


def explain_closure(optimizer: torch.optim.Optimizer) -> str:
    """Return the fault of an optimizer whose step needs a closure, such as LBFGS and SAM."""
    return (
        f"optimizer: {type(optimizer).__name__}: its step evaluates the loss again, by a closure, "
        f"which a pipeline cannot: use another"
    )


class OptimizerHandle:
    """The caller's optimizer: `copy_for(groups)` makes the one that steps, `record(k)` copies the
    settings for update k.

    `heads`: the settings in which the group of auxiliary heads differs from the first group; None:
    they are in the first group. Raise `BadInput` for an optimizer that cannot step so, has
    parameters that are not the model's, or is in another handle.
    """

    # optimizer -> its handle, until the handle is released
    _in_use: weakref.WeakKeyDictionary[torch.optim.Optimizer, weakref.ref[OptimizerHandle]] = (
        weakref.WeakKeyDictionary()
    )

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: nn.Module,
        heads: Mapping[str, Any] | None = None,
    ) -> None:
        wrapped = getattr(optimizer, "optimizer", None)
        if isinstance(wrapped, torch.optim.Optimizer):
            why = (
                f"wraps {describe_kind(wrapped)}: give that one, and let the wrapper's framework "
                f"not prepare it"
            )
            raise BadInput(f"optimizer: {describe_kind(optimizer)}: {why}")
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise BadInput(
                f"optimizer: {describe_kind(optimizer)}: must be a torch.optim.Optimizer over the "
                f"model's parameters"
            )
        closure = inspect.signature(type(optimizer).step).parameters.get("closure")
        needs_closure = closure is not None and closure.default is closure.empty
        # SAM's two halves of a step
        if needs_closure or hasattr(optimizer, "second_step"):
            raise BadInput(explain_closure(optimizer))
        if heads is not None:
            require_head_settings(heads, optimizer)
        trained = {id(p) for p in model.parameters()}
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        strange = sum(id(p) not in trained for p in parameters)
        if strange:
            why = "make it from those of the model that the pipeline gets"
            raise BadInput(
                f"optimizer: {strange} of its {len(parameters)} parameters are not the model's: "
                f"{why}"
            )
        self.optimizer = optimizer
        self._model = model
        self._heads = heads
        self._member_of = {
            id(p): i for i, group in enumerate(optimizer.param_groups) for p in group["params"]
        }
        self._count = len(optimizer.param_groups)
        self._settings: dict[int, list[dict[str, Any]]] = {}
        self._is_stepping = False
        # the optimizer's `step` that has been called so that schedulers have seen it
        self._counted_step: Callable[..., Any] | None = None
        self._hook: Any = None
        self.claim()

    def claim(self) -> None:
        """Let nothing but this handle step the optimizer, until it is released. Raise `BadInput` if
        it is in another handle.
        """
        reference = self._in_use.get(self.optimizer)
        owner = None if reference is None else reference()
        if owner is self:
            return
        if owner is not None:
            raise BadInput(
                "optimizer: another Pipeline steps it: close() that one first, or make a new "
                "optimizer"
            )
        shared = self._find_shared()
        if shared:
            # a pipeline that was dropped is in a cycle with its own functions
            gc.collect()
            shared = self._find_shared()
        if shared:
            raise BadInput(
                f"model: {shared}: another open Pipeline has it: close() that one first, or give "
                f"each a model with modules and weights of its own"
            )
        self._in_use[self.optimizer] = weakref.ref(self)
        # registered on the caller's handle alone: the optimizer that steps has the caller's other
        # hooks
        self._hook = self.optimizer.register_step_pre_hook(self._refuse_step)

    def _find_shared(self) -> str:
        """Return the name of a module, weight or buffer that is in the model of another open
        pipeline, too; "" if there is none.
        """
        handles = [reference() for reference in self._in_use.values()]
        theirs = {
            id(part)
            for handle in handles
            if handle is not None and handle is not self
            for _, part in _list_parts(handle._model)
        }
        return next((name for name, part in _list_parts(self._model) if id(part) in theirs), "")

    @property
    def group_count(self) -> int:
        """The number of parameter groups: the caller's, and one for heads that have settings of
        their own.
        """
        return len(self.optimizer.param_groups) + int(self._heads is not None)

    @property
    def heads_member(self) -> int:
        """The number of the group of auxiliary heads."""
        return 0 if self._heads is None else len(self.optimizer.param_groups)

    def find_member(self, parameter: nn.Parameter) -> int | None:
        """Return the number of the caller's group of a parameter, None if it is in none."""
        return self._member_of.get(id(parameter))

    def copy_for(self, groups: Groups) -> torch.optim.Optimizer:
        """Return an optimizer like the caller's over other groups, each with a `member`, with the
        same hooks and state.
        """
        optimizer = self.optimizer
        inner = object.__new__(type(optimizer))
        inner.__dict__.update(optimizer.__dict__)
        # a scheduler has put a wrapper there, which calls the caller's optimizer
        inner.__dict__.pop("step", None)
        members = self._copy_all_settings()
        inner.param_groups = [{**members[group["member"]], **group} for group in groups]
        inner.state = SharedState(optimizer)  # type: ignore[assignment]
        return inner

    def _copy_all_settings(self) -> list[dict[str, Any]]:
        """Return the present settings of each group."""
        settings = [self._copy_settings(group) for group in self.optimizer.param_groups]
        if self._heads is not None:
            settings.append({**self._copy_settings(self.optimizer.param_groups[0]), **self._heads})
        return settings

    @staticmethod
    def _copy_settings(group: Mapping[str, Any]) -> dict[str, Any]:
        return {key: copy_setting(value) for key, value in group.items() if key not in NOT_SETTINGS}

    # ---- settings

    def export_settings(self) -> dict[str, Any]:
        """Return the kind of the caller's optimizer and the settings of its groups, as its own
        `state_dict` has them.
        """
        groups = copy.deepcopy(self.optimizer.state_dict()["param_groups"])
        return {"kind": type(self.optimizer).__name__, "groups": groups}

    def require_settings_of_kind(self, saved: Mapping[str, Any]) -> None:
        """Raise `BadInput` if settings of `export_settings` are another optimizer's."""
        kind = type(self.optimizer).__name__
        groups = self.optimizer.param_groups
        if saved["kind"] != kind:
            raise BadInput(
                f"load_state_dict: state of {saved['kind']}: this pipeline's optimizer is {kind}"
            )
        if len(saved["groups"]) != len(groups):
            count = len(saved["groups"])
            raise BadInput(
                f"load_state_dict: {count} parameter groups: this pipeline's optimizer has "
                f"{len(groups)}"
            )

    def import_settings(self, saved: Mapping[str, Any]) -> None:
        """Give the caller's groups the settings that were saved, as the optimizer's own
        `load_state_dict` does.
        """
        for group, settings in zip(self.optimizer.param_groups, saved["groups"]):
            group.update(
                {key: copy_setting(value) for key, value in settings.items() if key != "params"}
            )

    def require_parameters(self) -> None:
        """Raise `RuntimeError` if the caller has added a group, or changed the parameters of
        one.
        """
        groups = self.optimizer.param_groups
        parameters = [id(p) for group in groups for p in group.get("params", ())]
        if len(groups) != self._count or parameters != list(self._member_of):
            raise RuntimeError(
                "step: the optimizer has other parameters than when the pipeline was made: make a "
                "new pipeline"
            )

    def require_settings(self) -> None:
        """Raise `RuntimeError` for a number among the settings that is no number any more: an
        optimizer would fail on it in the middle of an update.
        """
        for group in self.optimizer.param_groups:
            for key, default in self.optimizer.defaults.items():
                value = group.get(key)
                # most are unchanged, and a look costs less than a test
                if value is not default and not _is_like(value, default):
                    raise RuntimeError(
                        f"step: optimizer: {key}: {show(value)}: must be of the kind of "
                        f"{show(default)}"
                    )

    def record(self, k: int) -> None:
        """Copy the settings of all groups as those of update k."""
        self._settings[k] = self._copy_all_settings()

    def get_settings(self, k: int, group: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the settings of one of the inner optimizer's groups for update k."""
        # randomized methods count a stage's own updates, which may be more or fewer than the
        # batches that were given
        oldest = min(self._settings)
        newest = max(self._settings)
        return self._settings[min(max(k, oldest), newest)][group["member"]]

    def forget_before(self, k: int) -> None:
        """Drop the settings of updates before k, except the newest."""
        newest = max(self._settings, default=0)
        for old in [old for old in self._settings if old < min(k, newest)]:
            del self._settings[old]

    def forget(self) -> None:
        """Drop the settings of all updates, whose numbers may come again."""
        self._settings.clear()

    # ---- the caller's `step`

    def _refuse_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if optimizer is self.optimizer and not self._is_stepping:
            raise RuntimeError(
                "optimizer.step(): the pipeline steps this optimizer, each stage in its turn: call "
                "pipe.step(x, y) alone"
            )

    def count_as_stepped(self) -> None:
        """Let the caller's learning-rate schedulers see a step of the caller's optimizer, which
        changes nothing, once.

        The first scheduler puts a function in the place of `step`, and warns if it was not called.
        """
        step = vars(self.optimizer).get("step")
        if step is self._counted_step:
            return
        self._counted_step = step
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
        """Let the caller, or another pipeline, step the optimizer again."""
        self._hook.remove()
        reference = self._in_use.get(self.optimizer)
        # another handle may have claimed it since this one was released
        if reference is not None and reference() in (self, None):
            del self._in_use[self.optimizer]
