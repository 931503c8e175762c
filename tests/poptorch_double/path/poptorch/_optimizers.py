"""From the optimizer the user gave to what the executable holds: its description, its rules of change, its twin."""

from __future__ import annotations

import math
import numbers
from dataclasses import asdict, dataclass
from typing import Any, Dict, List, Mapping, Optional, Tuple

import torch

from poptorch import enums, optim
from poptorch._errors import DoubleRefuses, not_modelled, popart_error
from poptorch._signatures import API

# What PyTorch's own optimizers bake in as constants: these values, always, or never (None).
CONSTANT_AT: Dict[str, Any] = {"weight_decay": 0.0, "momentum": 0.0, "dampening": 0.0, "eps": 1e-8, "loss_scaling": 1.0,
                               "velocity_scaling": 1.0, "lr": None}  # fmt: skip
ALWAYS_CONSTANT = ("betas", "alpha", "max_weight_norm")
# [U] PopTorch passes over these without a word; an optimizer that asks for one would train otherwise than it says.
IGNORED = ("maximize", "differentiable", "capturable")


@dataclass(frozen=True)
class Description:
    """kind: SGD1 (combined), SGD2, ADAM, ...; groups: name -> (value, constant); attributes and types never change."""

    kind: str
    attributes: Dict[str, Any]
    variables: Dict[str, Tuple[Any, bool]]
    groups: List[Dict[str, Tuple[Any, bool]]]
    parameters: List[List[str]]

    def as_dict(self) -> Dict[str, Any]:
        return asdict(self)


def _kind(optimizer: Any) -> Tuple[str, str]:
    """(PopTorch's type, its class)."""
    corrects = getattr(optimizer, "bias_correction", True)
    if isinstance(optimizer, torch.optim.SGD):
        return ("SGD1" if getattr(optimizer, "use_combined_accum", False) else "SGD2"), "SGD"
    if isinstance(optimizer, torch.optim.AdamW):  # later versions of PyTorch make it an Adam
        return ("ADAMW" if corrects else "ADAMW_NO_BIAS"), "AdamW"
    if isinstance(optimizer, torch.optim.Adam):
        return "ADAM", "Adam"
    if isinstance(optimizer, torch.optim.RMSprop):
        centered = {group["centered"] for group in optimizer.param_groups}
        assert len(centered) == 1, "All parameter groups must have the same value for the 'centered' attribute"
        return ("RMSPROP_CENTERED" if centered.pop() else "RMSPROP"), "RMSprop"
    if isinstance(optimizer, optim.LAMB):
        return ("LAMB" if corrects else "LAMB_NO_BIAS"), "LAMB"
    raise AssertionError(f"Unsupported optimizer type. Types supported SGD, Adam, AdamW, RMSprop, LAMB: {optimizer!r}")


def _formatted(optimizer: Any, name: str, value: Any, family: str) -> Tuple[Any, bool]:
    """(value, whether it is a constant of the executable)."""
    values = value if name == "betas" else (value,)
    assert isinstance(values, tuple) and (name != "betas" or len(values) == 2), (
        f"Expected a pair for {name} but got {value}"
    )
    for one in values:
        is_number = isinstance(one, numbers.Number) and type(one).__module__ != "numpy"
        assert is_number, f"Expected a number for {name} but got {one} instead"
    variable = getattr(optimizer, "variable_attrs", None)
    if variable is not None:
        # the documentation calls lr always variable; the code asks whether it was given, which is the stricter
        return value, variable.isConstant(name)
    if name in ALWAYS_CONSTANT:
        return value, True
    at = 1e-2 if (family, name) == ("AdamW", "weight_decay") else CONSTANT_AT[name]
    return value, value == at


def describe(optimizer: Any, names: Mapping[int, str], options: Any) -> Description:
    """What PopTorch reads from an optimizer. `names`: of the model's parameters by identity."""
    kind, family = _kind(optimizer)
    entry = API[f"optim.{family}"]
    groups = []
    for group in optimizer.param_groups:
        _refuse_unsupported(group, family)
        numbers_ = [name for name in entry["group_vars"] if name not in ("nesterov", "amsgrad", "centered")]
        present = [name for name in numbers_ if name in group or name != "velocity_scaling"]
        groups.append({name: _formatted(optimizer, name, group[name], family) for name in present})
    scaling = getattr(optimizer, "loss_scaling", 1.0)
    variables = {"loss_scaling": _formatted(optimizer, "loss_scaling", scaling, family)}
    if options._Popart.options.get("automaticLossScalingSettings.enabled"):
        variables["loss_scaling"] = (scaling, False)
    skipped = {*entry["group_vars"], *entry["global_vars"]}
    own = [name for name in entry["extra_args"] if name not in skipped]
    attributes = {name: getattr(optimizer, name, optim.OWN_DEFAULTS.get(name, torch.float32)) for name in own}
    limit = attributes.get("max_grad_norm")
    if limit is not None and (math.isnan(limit) or limit <= 0):
        raise ValueError(f"max_grad_norm must be a positive number, not {limit}")
    parameters = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]  # KeyError, as PopTorch
    return Description(kind, attributes, variables, groups, parameters)


def _refuse_unsupported(group: Mapping[str, Any], family: str) -> None:
    if group.get("nesterov"):
        raise ValueError("Nesterov momentum is currently not supported.")
    if group.get("amsgrad"):
        raise ValueError("Only non-amsgrad Adam/AdamW optimizers are supported.")
    for name in IGNORED:
        if group.get(name):
            raise DoubleRefuses(f"{name}=True has no meaning on an IPU: PopTorch does not read it")


def check_replacement(old: Description, new: Description) -> None:
    """What a compiled executable accepts in place of the optimizer it was compiled with."""
    if old.kind != new.kind:
        raise popart_error(f"New Optimizer of type {new.kind} can not replace the compiled one of type {old.kind}")
    if old.attributes != new.attributes:
        changed = sorted(name for name in old.attributes if old.attributes[name] != new.attributes.get(name))
        raise popart_error(f"{', '.join(changed)}: attributes of the compiled optimizer can not change")
    if old.parameters != new.parameters:  # [U] PopTorch keeps the compiled groups without a word
        raise popart_error("the compiled optimizer's parameter groups can not change: other groups or other parameters")
    for before, after in [(old.variables, new.variables), *zip(old.groups, new.groups)]:
        for name, (value, constant) in before.items():
            if constant != after[name][1]:
                raise popart_error(f"{name}: Can not replace a constant value with a non constant value.")
            if constant and value != after[name][0]:
                raise popart_error(f"{name}: Values are constant but do not match.")


def mean_strategy(description: Description, options: Any) -> Any:
    """When the mean is taken: PopTorch itself chooses Running for float16 accumulators, but for combined ones."""
    if description.attributes.get("accum_type") == torch.float16 and description.kind != "SGD1":
        return enums.MeanReductionStrategy.Running
    return options.Training.meanAccumulationAndReplicationReductionStrategy


class Twin:
    """The optimizer of the executable: torch's own over the device's weights, fed by descriptions only.

    Its update is torch's: [U] PopART starts velocities at zero, so that with dampening its first step differs.
    """

    def __init__(self, description: Description, weights: Mapping[str, torch.Tensor]) -> None:
        self._description = self.compiled = description
        groups = [{"params": [weights[name] for name in names]} for names in description.parameters]
        self._names = {id(weights[name]): name for names in description.parameters for name in names}
        self._optimizer = _TWINS[description.kind](groups, description)
        self.update(description)

    def update(self, description: Description) -> None:
        self._description = description
        for group, values in zip(self._optimizer.param_groups, description.groups):
            group.update({name: value for name, (value, _) in values.items() if name in group})

    def step(self) -> None:
        limit = self._description.attributes.get("max_grad_norm")
        if limit is not None and limit != math.inf:
            held = [p for group in self._optimizer.param_groups for p in group["params"] if p.grad is not None]
            torch.nn.utils.clip_grad_norm_(held, limit)
        self._optimizer.step()

    def read(self) -> Dict[str, Any]:
        """As a PopTorch optimizer's state dict holds it. [U] the real names of the tensors."""
        state = {}
        for p, values in self._optimizer.state.items():
            for kind, value in values.items():
                state[f"{kind}___{self._names[id(p)]}"] = value.clone() if isinstance(value, torch.Tensor) else value
        groups = [{name: value for name, (value, _) in group.items()} for group in self._description.groups]
        return {"ipu_state": state, "ipu_param": {f"{i}.{k}": v for i, g in enumerate(groups) for k, v in g.items()}}

    def write_parameters(self, values: Mapping[str, Any]) -> None:
        """Rates and the like, which PopTorch writes back with the state when it attaches (`writeOptimizerState`)."""
        for index, group in enumerate(self._optimizer.param_groups):
            group.update({name: values[f"{index}.{name}"] for name in list(group) if f"{index}.{name}" in values})

    def write(self, state: Optional[Mapping[str, Any]]) -> None:
        for p in [p for group in self._optimizer.param_groups for p in group["params"]]:
            self._optimizer.state.pop(p, None)
            mine = f"___{self._names[id(p)]}"
            values = {key[: -len(mine)]: value for key, value in (state or {}).items() if key.endswith(mine)}
            if values:
                self._optimizer.state[p] = {
                    kind: value.clone() if isinstance(value, torch.Tensor) else value for kind, value in values.items()
                }


def _sgd(groups: List[Dict[str, Any]], description: Description) -> Any:
    return torch.optim.SGD(groups, lr=0.1)


def _adam(groups: List[Dict[str, Any]], description: Description) -> Any:
    return torch.optim.Adam(groups)


def _adamw(groups: List[Dict[str, Any]], description: Description) -> Any:
    return torch.optim.AdamW(groups)


def _rmsprop(groups: List[Dict[str, Any]], description: Description) -> Any:
    if description.attributes.get("use_tf_variant"):
        raise not_modelled("RMSprop(use_tf_variant=True)")
    return torch.optim.RMSprop(groups, centered=description.kind == "RMSPROP_CENTERED")


def _lamb(groups: List[Dict[str, Any]], description: Description) -> Any:
    return optim.LAMB(groups, bias_correction=description.kind == "LAMB")


def _not_modelled(groups: List[Dict[str, Any]], description: Description) -> Any:
    raise not_modelled(f"optimizer {description.kind}")


_TWINS = {"SGD1": _sgd, "SGD2": _sgd, "ADAM": _adam, "ADAMW": _adamw, "ADAMW_NO_BIAS": _not_modelled,
          "RMSPROP": _rmsprop, "RMSPROP_CENTERED": _rmsprop, "LAMB": _lamb, "LAMB_NO_BIAS": _lamb}  # fmt: skip
