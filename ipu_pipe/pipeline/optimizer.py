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
import functools
import gc
import inspect
import math
import operator
import weakref
import zlib
from collections.abc import MutableMapping
from typing import Any, Callable, Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import nn

from ipu_pipe.errors import BadInput, summarize
from ipu_pipe.job.record import ComparedSettings
from ipu_pipe.local.blocks import HEADS
from ipu_pipe.model.shards import ShardEntries, Shards
from ipu_pipe.pipeline.arguments import explain_unlike, parse_by_stage, require_settings_of
from ipu_pipe.text import describe_kind, show
from ipu_pipe.update.optimizer import (
    ELEMENTWISE,
    MODES,
    Groups,
    RecordedSettings,
    RefusedStep,
    copy_setting,
    copy_without_groups,
    list_settings_of,
    spread_settings,
)

# keys of a caller's parameter group that are not settings of a step
NOT_SETTINGS = ("params", "initial_lr")
# and those of the pipeline's own groups
NOT_WRITTEN = (*NOT_SETTINGS, "stage", "member")


def is_same_setting(one: Any, other: Any) -> bool:
    """Return whether two values of a setting are the same."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    # by their types, too, since 1 equals True
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    # part by part, since == of lists of tensors is not a truth value
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(is_same_setting, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(is_same_setting(one[k], other[k]) for k in one)
    return bool(one == other)


def describe_setting(value: Any) -> str:
    """Return a setting as text that is the same in every process."""
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return repr(value.tolist())
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(describe_setting, value))})"
    is_plain = value is None or isinstance(value, (bool, int, float, str))
    # the repr of other objects may have an address, which differs between processes
    return repr(value) if is_plain else type(value).__name__


def is_number(value: Any) -> bool:
    """Return whether a value is one number that is not a bool or NaN; it may be in a tensor."""
    if isinstance(value, torch.Tensor):
        if value.numel() != 1 or value.is_complex() or value.dtype == torch.bool:
            return False
        value = value.item()
    return type(value) in (int, float) and value == value


def _fits(present: Any, value: Any, is_strict: bool) -> bool:
    """Return whether a saved setting may take the place of the present one; `is_strict`: None
    stands for a choice of True or False alone.
    """
    if isinstance(present, bool) or (present is None and is_strict):
        return value is None or isinstance(value, bool)
    if isinstance(present, (list, tuple)):
        return (
            isinstance(value, (list, tuple))
            and len(value) == len(present)
            and all(map(_fits, present, value, [is_strict] * len(value)))
        )
    if isinstance(present, torch.Tensor) and present.numel() != 1:
        return isinstance(value, torch.Tensor) and value.shape == present.shape
    if isinstance(present, (int, float, torch.Tensor)):
        return is_number(value)
    return present is None or type(value) is type(present)


def _ask_constructor(optimizer: torch.optim.Optimizer, settings: Mapping[str, Any]) -> list[str]:
    """Return why torch's own class refuses settings, which each class checks when it is made."""
    kind = type(optimizer)
    accepted = list_settings_of(kind)
    values = {
        key: value
        for key, value in settings.items()
        if key in accepted and type(value) is not bool and value is not None
    }
    # nesterov asks for a momentum
    values.update({key: settings[key] for key in ("nesterov", "amsgrad") if settings.get(key)})
    try:
        kind([nn.Parameter(torch.zeros(1))], **values)
    except (TypeError, ValueError) as error:
        return [summarize(error)]
    return []


class SharedState(MutableMapping):  # type: ignore[type-arg]
    """The state of the optimizer that steps: of the caller's parameters in the caller's optimizer,
    of others apart.

    Others are the auxiliary heads that a method adds; the caller's `state_dict` leaves them out.
    Entries under a key of the optimizer's own, which is no parameter, are the caller's, too.
    `masters`: the parameters that step in place of the caller's, if there are any; the entries of a
    shard are DTensors in the caller's optimizer.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, masters: Any = None) -> None:
        self._optimizer = optimizer
        self._masters = Shards([]) if masters is None else masters
        self._own = {p for group in optimizer.param_groups for p in group["params"]}
        self._added: dict[Any, dict[str, Any]] = collections.defaultdict(dict)

    def _find(self, parameter: Any) -> tuple[Any, Any, bool]:
        """Return the dictionary that has a parameter's entries, the parameter there, and whether
        they are those of a shard.
        """
        weight = self._masters.get_weight(parameter)
        is_callers = weight in self._own or not isinstance(weight, torch.Tensor)
        is_shard = weight is not parameter and self._masters.are_in_weights
        # `load_state_dict` of the caller's optimizer makes a new dictionary
        return (self._optimizer.state if is_callers else self._added), weight, is_shard

    def __getitem__(self, parameter: Any) -> Any:
        states, weight, is_shard = self._find(parameter)
        entries = states[weight]
        return ShardEntries(entries, weight, self._masters) if is_shard else entries

    def __setitem__(self, parameter: Any, value: Any) -> None:
        states, weight, is_shard = self._find(parameter)
        states[weight] = {} if is_shard else value
        if is_shard:
            self[parameter].update(value)

    def __delitem__(self, parameter: Any) -> None:
        states, weight, _ = self._find(parameter)
        del states[weight]

    def __contains__(self, parameter: Any) -> bool:
        states, weight, _ = self._find(parameter)
        return weight in states

    def get(self, parameter: Any, default: Any = None) -> Any:
        """Return the entries of a parameter, `default` if it has none: `[]` would make them."""
        return self[parameter] if parameter in self else default

    def setdefault(self, parameter: Any, default: Any = None) -> Any:
        """Return the entries of a parameter, which are `default` if it has none."""
        if parameter not in self:
            self[parameter] = default
        return self[parameter]

    def __iter__(self) -> Iterator[Any]:
        yield from map(self._masters.get, list(self._optimizer.state))
        yield from map(self._masters.get, list(self._added))

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
    they are in the first group. `by_stage`: the settings that differ by stage. Raise `BadInput` for
    an optimizer that cannot step so, has parameters that are not the model's, or is in another
    handle.
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
        by_stage: Mapping[str, Any] | None = None,
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
        # of the class, because a scheduler puts a function of its own into the object
        closure = inspect.signature(type(optimizer).step).parameters.get("closure")
        needs_closure = closure is not None and closure.default is closure.empty
        # SAM's two halves of a step
        if needs_closure or hasattr(optimizer, "second_step"):
            raise BadInput(explain_closure(optimizer))
        for group in optimizer.param_groups:
            for key, default in optimizer.defaults.items():
                if why := explain_unlike(group.get(key), default):
                    raise BadInput(f"optimizer: {key}: {why}")
        if heads is not None:
            require_settings_of(optimizer, "heads", heads)
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
        self._by_stage = {} if by_stage is None else parse_by_stage(by_stage, optimizer)
        # the settings of each stage that differ, and the rates of which its own are shares
        self._of_stages: list[dict[str, Any]] = []
        self._first_rates = [
            # a scheduler that was made before has changed `lr` and keeps the first one here
            float(group.get("initial_lr", group["lr"])) if "lr" in group else 0.0
            for group in optimizer.param_groups
        ]
        self._member_of = {
            id(p): i for i, group in enumerate(optimizer.param_groups) for p in group["params"]
        }
        self._count = len(optimizer.param_groups)
        self._settings: dict[int, list[RecordedSettings]] = {}
        # of each group: the settings as the caller's group had them last, and the newest record
        self._seen: list[dict[str, Any]] = []
        self._newest: list[RecordedSettings] = []
        self._records = 0
        # setting -> its values in all groups, and their checksum
        self._digests: dict[str, tuple[list[Any], int]] = {}
        # torch's own optimizers write nothing into their groups
        self.may_write_settings = type(optimizer) not in ELEMENTWISE
        # the method that switches the optimizer that steps to "eval" or "train"
        self.switch: weakref.WeakMethod[Callable[[str], None]] | None = None
        self.is_evaluating = False
        # every update's learning rates are multiplied by it, whatever a scheduler has set
        self.rate_factor = 1.0
        # what steps in place of the model's parameters: master copies, or shards
        self.masters: Any = None
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
        self.require_unshared(self._model, self)
        # weak on both sides: a pipeline that was dropped without `close` must not hold its
        # optimizer
        self._in_use[self.optimizer] = weakref.ref(self)
        # registered on the caller's handle alone: the optimizer that steps has the caller's other
        # hooks
        self._hook = self.optimizer.register_step_pre_hook(RefusedStep(self.optimizer))
        if all(callable(getattr(type(self.optimizer), name, None)) for name in MODES):
            for name in MODES:
                vars(self.optimizer)[name] = functools.partial(self._pass_on, name)

    def _pass_on(self, mode: str) -> None:
        """Switch the optimizer that steps to "eval" or "train"."""
        switch = None if self.switch is None else self.switch()
        if switch is None:
            getattr(type(self.optimizer), mode)(self.optimizer)
        else:
            switch(mode)
        self.is_evaluating = mode == "eval"

    @classmethod
    def require_unshared(cls, model: nn.Module, owner: OptimizerHandle | None = None) -> None:
        """Raise `BadInput` if another open pipeline than `owner`'s has a module, weight or buffer of
        the model.
        """
        shared = cls._find_shared(model, owner)
        if shared:
            # a pipeline that was dropped is in a cycle with its own functions
            gc.collect()
            shared = cls._find_shared(model, owner)
        if shared:
            raise BadInput(
                f"model: {shared}: another open Pipeline has it: close() that one first, or give "
                f"each a model with modules and weights of its own"
            )

    @classmethod
    def _find_shared(cls, model: nn.Module, owner: OptimizerHandle | None) -> str:
        """Return the name of a module, weight or buffer that is in the model of another open
        pipeline, too; "" if there is none.
        """
        handles = [reference() for reference in cls._in_use.values()]
        theirs = {
            id(part)
            for handle in handles
            if handle is not None and handle is not owner
            for _, part in _list_parts(handle._model)
        }
        return next((name for name, part in _list_parts(model) if id(part) in theirs), "")

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

    def choose_member(self, name: str, parameter: nn.Parameter) -> int | None:
        """Return the caller's group of a parameter, or the one of auxiliary heads, which the method
        adds; None if it is in none.
        """
        if name.startswith(HEADS):
            return self.heads_member
        return self._member_of.get(id(parameter))

    def replace_parameters(self, new: Mapping[nn.Parameter, nn.Parameter], shards: Shards) -> None:
        """Put sharded parameters, with their entries, in the caller's places in the groups."""
        for group in self.optimizer.param_groups:
            group["params"] = [new.get(p, p) for p in group["params"]]
        state = self.optimizer.state
        for whole, weight in new.items():
            if weight is not whole and whole in state:
                state[weight] = shards.shard_entries(state.pop(whole), weight)
        self._member_of = {
            id(p): i for i, group in enumerate(self.optimizer.param_groups) for p in group["params"]
        }

    def copy_for(self, groups: Groups) -> torch.optim.Optimizer:
        """Return an optimizer like the caller's over other groups, each with a `member`, with the
        same hooks and state.
        """
        optimizer = self.optimizer
        inner = copy_without_groups(optimizer)
        # a new optimizer has been given no setting yet
        self._seen = []
        self._newest = []
        members = self._copy_all_settings()
        inner.param_groups = [
            {**members[group["member"]], **self._list_own(group), **group} for group in groups
        ]
        if self._has_rounded_weights:
            self._cast_entries(lambda weight: self.masters.get(weight).dtype)
            # not by hooks, of which the second is not called after an error
            vars(optimizer)["load_state_dict"] = self._load_entries
        inner.state = SharedState(optimizer, self.masters)  # type: ignore[assignment]
        return inner

    @property
    def _has_rounded_weights(self) -> bool:
        return self.masters is not None and not self.masters.are_in_weights

    def _load_entries(self, state_dict: Any) -> None:
        """Load a state into the caller's optimizer, which casts entries to the dtype of its
        parameters: to that of the masters.
        """
        with self.masters.put_in_place():
            type(self.optimizer).load_state_dict(self.optimizer, state_dict)

    def _cast_entries(self, choose_dtype: Callable[[Any], torch.dtype]) -> None:
        """Cast the entries of the shape of their weight."""
        for weight, entries in self.optimizer.state.items():
            for key, value in entries.items() if isinstance(weight, torch.Tensor) else ():
                is_like = isinstance(value, torch.Tensor) and value.shape == weight.shape
                if is_like and value.dim() and value.is_floating_point():
                    entries[key] = value.to(choose_dtype(weight))

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

    def parse_settings(self, saved: Any) -> dict[str, Any]:
        """Return a copy of settings of `export_settings`. Raise `BadInput` if they are another
        optimizer's, or do not fit it.
        """
        source = "settings"
        if not isinstance(saved, Mapping) or not {"kind", "groups"} <= set(saved):
            raise BadInput(f"{source}: {show(saved)}: must have kind and groups")
        kind = type(self.optimizer).__name__
        groups = self.optimizer.param_groups
        if saved["kind"] != kind:
            raise BadInput(f"state of {show(saved['kind'])}: this pipeline's optimizer is {kind}")
        is_list = isinstance(saved["groups"], (list, tuple))
        if not is_list or not all(isinstance(group, Mapping) for group in saved["groups"]):
            raise BadInput(f"{source}: groups: {show(saved['groups'])}: must be a list of groups")
        if len(saved["groups"]) != len(groups):
            count = len(saved["groups"])
            raise BadInput(f"{count} parameter groups: this pipeline's optimizer has {len(groups)}")
        for number, (group, settings) in enumerate(zip(groups, saved["groups"])):
            place = f"{source}: groups: {number}"
            faults = [
                f"{place}: {key}: {show(value)}: {fault}"
                for key, value in settings.items()
                for fault in [self._find_fault(group, key, value)]
                if fault
            ]
            if "lr" not in settings:
                faults.append(f"{place}: lacks lr")
            if not faults and not self.may_write_settings:
                faults = [f"{place}: {why}" for why in _ask_constructor(self.optimizer, settings)]
            if faults:
                raise BadInput(faults[0])
        return copy.deepcopy(dict(saved))

    def _find_fault(self, group: Mapping[str, Any], key: Any, value: Any) -> str:
        """Return what is wrong with a saved setting of a group, "" if nothing."""
        if key == "params":
            count = len(group["params"])
            is_list = isinstance(value, (list, tuple)) and all(
                type(n) is int and n >= 0 for n in value
            )
            return (
                "" if is_list and len(value) == count else f"must be numbers of {count} parameters"
            )
        if key in ("lr", "initial_lr"):
            is_rate = is_number(value) and 0 <= float(value) < math.inf
            return (
                "" if is_rate or group.get(key) is None else "must be a finite number, at least 0"
            )
        if key not in group:
            return ""
        is_strict = not self.may_write_settings
        return "" if _fits(group[key], value, is_strict) else f"this optimizer has {group[key]}"

    def list_own_keys(self) -> list[str]:
        """List the keys of the caller's optimizer's state that are no parameters."""
        return [str(key) for key in self.optimizer.state if not isinstance(key, torch.Tensor)]

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
                if value is not default and (why := explain_unlike(value, default)):
                    raise RuntimeError(f"step: optimizer: {key}: {why}")

    def record(self, k: int) -> None:
        """Copy the settings of all groups as those of update k.

        A setting that the caller has not changed keeps the number of its change, so that it is not
        written over what the optimizer itself has made of it.
        """
        present = self._copy_all_settings()
        self._seen = self._seen or [{} for _ in present]
        newest = self._newest or [RecordedSettings() for _ in present]
        self._records += 1
        self._newest = [
            self._note_changes(*of_group) for of_group in zip(present, self._seen, newest)
        ]
        self._settings[k] = self._newest

    def _note_changes(
        self, present: dict[str, Any], seen: dict[str, Any], last: RecordedSettings
    ) -> RecordedSettings:
        recorded = RecordedSettings()
        for key, value in present.items():
            if key not in seen or not is_same_setting(value, seen[key]):
                seen[key] = recorded[key] = value
                recorded.changes[key] = self._records
            # what the optimizer itself has added is not the caller's to set
            elif key in last:
                recorded[key] = last[key]
                recorded.changes[key] = last.changes[key]
        return recorded

    def write_back(self, group: Mapping[str, Any], before: Mapping[str, Any]) -> None:
        """Give the caller's group what the optimizer has written into one of its own in a step;
        `before`: the settings before the step.
        """
        member = group["member"]
        # the settings of heads are not in the caller's groups
        if member == len(self.optimizer.param_groups):
            return
        for key, value in group.items():
            is_same = key in before and is_same_setting(value, before[key])
            if key in NOT_WRITTEN or is_same:
                continue
            self.optimizer.param_groups[member][key] = copy_setting(value)
            # a learning rate passes through rules, so it is taken as if the caller had set it
            if key == "lr" or not self._seen:
                continue
            self._seen[member][key] = copy_setting(value)
            # heads have the first group's settings where they have none of their own
            if member == 0 and self._heads is not None and key not in self._heads:
                self._seen[self.heads_member][key] = copy_setting(value)

    # ---- the same settings on all ranks

    @property
    def compared(self) -> ComparedSettings:
        """The settings that are compared between ranks, which the constructor of the optimizer
        takes: what it adds itself may be at another update.
        """
        accepted = list_settings_of(type(self.optimizer))
        names = sorted(name for name in self.optimizer.defaults if name in accepted)
        return ComparedSettings(names, lambda k: self._digest(k, names))

    def describe_settings(self) -> dict[str, str]:
        """Return the settings of all groups by place, as text."""
        names = self.compared.names
        return {
            f"optimizer: group {number}: {name}": describe_setting(group[name])
            for number, group in enumerate(self.optimizer.param_groups)
            for name in names
            if name in group
        }

    def _digest(self, k: int, names: Sequence[str]) -> list[int]:
        """Return a checksum of each setting in update k, over all groups."""
        groups = self._settings[k]
        return [self._digest_setting(name, [g.get(name) for g in groups]) for name in names]

    def _digest_setting(self, name: str, values: list[Any]) -> int:
        # most settings are the same objects as in the update before
        before, digest = self._digests.get(name, ([], 0))
        if len(before) != len(values) or any(map(operator.is_not, before, values)):
            digest = zlib.crc32("; ".join(map(describe_setting, values)).encode())
            self._digests[name] = values, digest
        return digest

    def set_delays(self, delays: Sequence[float]) -> None:
        """Spread the settings that differ by stage over stages with these delays in updates (P,).

        Raise `BadInput` for settings that the optimizer refuses, or that are not as many.
        """
        self._of_stages = spread_settings(self._by_stage, delays, "by_stage")
        for settings in self._of_stages if self._by_stage else ():
            require_settings_of(self.optimizer, "by_stage", settings)

    def get_settings(self, k: int, group: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the settings of one of the inner optimizer's groups for update k."""
        # randomized methods count a stage's own updates, which may be more or fewer than the
        # batches that were given
        oldest = min(self._settings)
        newest = max(self._settings)
        settings = self._settings[min(max(k, oldest), newest)][group["member"]]
        settings = self._divide(settings, group) if self._by_stage else settings
        return settings if self.rate_factor == 1.0 else self._scale(settings)

    def _scale(self, settings: RecordedSettings) -> RecordedSettings:
        """Return the settings with the learning rate multiplied by `rate_factor`."""
        scaled = RecordedSettings()
        scaled.update(settings, lr=float(settings["lr"]) * self.rate_factor)
        scaled.changes = settings.changes
        return scaled

    def _list_own(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings by stage of a group; those that heads were given go before them."""
        settings = self._of_stages[group["stage"]] if self._by_stage else {}
        is_heads = self._heads is not None and group["member"] == self.heads_member
        return {k: v for k, v in settings.items() if not (is_heads and k in (self._heads or ()))}

    def _divide(self, settings: RecordedSettings, group: Mapping[str, Any]) -> RecordedSettings:
        """Return the settings of a group's stage; its learning rate stays in proportion to the
        caller's, which a scheduler changes.
        """
        of_stage = self._list_own(group)
        divided = RecordedSettings()
        divided.update(settings, **of_stage)
        divided.changes = settings.changes
        # heads that have no rate of their own have the first group's
        first = self._first_rates[group["member"] % len(self._first_rates)]
        if "lr" in of_stage and first:
            divided["lr"] = float(settings["lr"]) * float(of_stage["lr"]) / first
        return divided

    def forget_before(self, k: int) -> None:
        """Drop the settings of updates before k, except the newest."""
        newest = max(self._settings, default=0)
        for old in [old for old in self._settings if old < min(k, newest)]:
            del self._settings[old]

    def forget(self) -> None:
        """Drop the settings of all updates, whose numbers may come again."""
        self._settings.clear()

    def count_as_stepped(self) -> None:
        """Mark the caller's optimizer as stepped, since its learning-rate schedulers warn before its
        first step.
        """
        optimizer: Any = self.optimizer
        # torch's own mark; before torch 2.4 its schedulers count the steps
        optimizer._opt_called = True
        if hasattr(optimizer, "_step_count"):
            optimizer._step_count += 1

    def release(self) -> None:
        """Let the caller, or another pipeline, step the optimizer again."""
        self._hook.remove()
        reference = self._in_use.get(self.optimizer)
        # another handle may have claimed it since this one was released
        if reference is None or reference() is not self:
            return
        for name in ("load_state_dict", *MODES):
            vars(self.optimizer).pop(name, None)
        if self._has_rounded_weights:
            # the caller may step the rounded weights
            self._cast_entries(lambda weight: weight.dtype)
        del self._in_use[self.optimizer]
