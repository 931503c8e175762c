"""The optimizer as people have it, made into a function of the parameter groups: one a stage, so that updates are told apart.

factory     functools.partial(torch.optim.SGD, lr=0.1)          called with the groups
class       torch.optim.AdamW with its arguments                the same
instance    torch.optim.SGD(model.parameters(), lr=0.1)         its class and the settings of each of its groups, copied
"""

from __future__ import annotations

import functools
import inspect
from typing import Any, Dict, List, Mapping, Optional

import torch

from ipu_pipe.errors import BadInput
from ipu_pipe.text import describe_kind
from ipu_pipe.update.groups import Groups
from ipu_pipe.update.optimizer import OptimizerFactory

WHAT = (
    "a torch.optim class (with optimizer_args, or as (class, {...})), an optimizer, or a function of parameter groups"
)


def factory_of(given: Any, args: Optional[Mapping[str, Any]] = None) -> OptimizerFactory:
    """What makes the optimizer that Python gave. Raises BadInput."""
    if isinstance(given, tuple) and len(given) == 2 and inspect.isclass(given[0]) and isinstance(given[1], Mapping):
        given, args = given[0], {**given[1], **(args or {})}
    if isinstance(given, torch.optim.Optimizer):
        if args:
            raise BadInput("optimizer_args: not together with an optimizer that is made: its own settings are taken")
        return _Like(given)
    if (inspect.isclass(given) and not issubclass(given, torch.optim.Optimizer)) or not callable(given):
        raise BadInput(f"optimizer: {describe_kind(given)}: must be {WHAT}")
    return _Calling(given, dict(args or {}))


class _Calling:
    """A class or a function with its arguments; what it does not take is told in a line."""

    def __init__(self, made_by: Any, args: Dict[str, Any]) -> None:
        self._made_by, self._args = made_by, args

    def __call__(self, groups: Groups) -> torch.optim.Optimizer:
        named = self._made_by.func if isinstance(self._made_by, functools.partial) else self._made_by
        if not self._args and not inspect.isclass(named):
            return self._made_by(groups)  # type: ignore[no-any-return]
        name = getattr(named, "__name__", type(named).__name__)
        try:
            if named is self._made_by:
                inspect.signature(named).bind(groups, **self._args)
            return self._made_by(groups, **self._args)  # type: ignore[no-any-return]
        except (TypeError, ValueError) as error:
            raise BadInput(f"optimizer: {name}: {error}") from error


class _Like:
    """Makes an optimizer of the same class and settings as one that exists, of the same parameters."""

    def __init__(self, own: torch.optim.Optimizer) -> None:
        if own.state:
            raise BadInput(
                f"optimizer: {type(own).__name__}: has stepped already, and its state is not taken over: give a new one, or its"
                " class and arguments"
            )
        self._kind, self._defaults = type(own), own.defaults
        self._settings = {
            id(p): (number, {key: value for key, value in group.items() if key not in ("params", "initial_lr")})
            for number, group in enumerate(own.param_groups)
            for p in group["params"]
        }

    def __call__(self, groups: Groups) -> torch.optim.Optimizer:
        taken = inspect.signature(self._kind.__init__).parameters
        usual = {key: value for key, value in self._defaults.items() if key in taken}
        return self._kind([own for group in groups for own in self._divided(group)], **usual)

    def _divided(self, group: Mapping[str, Any]) -> List[Dict[str, Any]]:
        """A stage's group in those of the optimizer that is copied, in its order."""
        others = {key: value for key, value in group.items() if key != "params"}
        if not any(p.numel() for p in group["params"]):  # of a stage without weights
            return [dict(group)]
        missing = sum(id(p) not in self._settings for p in group["params"])
        if missing:
            raise BadInput(
                f"optimizer: {self._kind.__name__}: does not hold {missing} of the {len(group['params'])} parameters of stage"
                f" {group['stage']}: it must be made of those of the model that is given; what is not to be trained needs"
                " requires_grad_(False)"
            )
        found: Dict[int, Dict[str, Any]] = {}
        for p in group["params"]:
            number, settings = self._settings[id(p)]
            found.setdefault(number, {**settings, **others, "params": []})["params"].append(p)
        return [found[number] for number in sorted(found)]
