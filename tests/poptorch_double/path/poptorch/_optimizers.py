"""Describe the user's optimizer as the executable holds it: the description, the rules of its
changes, and its twin."""

from __future__ import annotations

import math
import numbers
from dataclasses import asdict, dataclass
from typing import Any, Dict, List, Mapping, Tuple

import torch

from poptorch import enums, optim
from poptorch._errors import DoubleRefuses, make_popart_error, make_unmodelled_error
from poptorch._record import recorded
from poptorch._signatures import API

# [U] PopTorch silently ignores these; an optimizer with one of them would train differently.
IGNORED = ("maximize", "differentiable", "capturable")


@dataclass(frozen=True)
class Description:
    """Description of an optimizer. kind: SGD1 (combined), SGD2, ADAM, ...; groups: name ->
    (value, constant); attributes and types never change."""

    kind: str
    attributes: Dict[str, Any]
    variables: Dict[str, Tuple[Any, bool]]
    groups: List[Dict[str, Tuple[Any, bool]]]
    parameters: List[List[str]]

    def to_dict(self) -> Dict[str, Any]:
        return asdict(self)


def _find_kind(optimizer: Any) -> Tuple[str, str]:
    """Return PopTorch's type of an optimizer, and its class."""
    if not isinstance(optimizer, optim.Optimizer) or not getattr(
        optimizer, "bias_correction", True
    ):
        raise make_unmodelled_error("torch's own optimizers, and those without bias correction")
    if isinstance(optimizer, torch.optim.SGD):
        return ("SGD1" if optimizer.use_combined_accum else "SGD2"), "SGD"
    for name in ("AdamW", "Adam"):  # later versions of PyTorch make an AdamW an Adam
        if isinstance(optimizer, getattr(torch.optim, name)):
            return name.upper(), name
    if isinstance(optimizer, torch.optim.RMSprop):
        centered = {group["centered"] for group in optimizer.param_groups}
        assert len(centered) == 1, (
            "All parameter groups must have the same value for the 'centered' attribute"
        )
        return ("RMSPROP_CENTERED" if centered.pop() else "RMSPROP"), "RMSprop"
    raise make_unmodelled_error(f"optimizer {type(optimizer).__name__}")


def _format_value(optimizer: Any, name: str, value: Any) -> Tuple[Any, bool]:
    """Return a value, and whether it is a constant of the executable."""
    values = value if name == "betas" else (value,)
    assert isinstance(values, tuple) and (name != "betas" or len(values) == 2), (
        f"Expected a pair for {name} but got {value}"
    )
    for one in values:
        is_number = isinstance(one, numbers.Number) and type(one).__module__ != "numpy"
        assert is_number, f"Expected a number for {name} but got {one} instead"
    # the documentation calls lr always variable; the code checks whether it was passed, which is stricter
    return value, optimizer.variable_attrs.isConstant(name)


def describe_optimizer(optimizer: Any, names: Mapping[int, str], options: Any) -> Description:
    """Return the description that PopTorch reads from an optimizer. `names`: of the model's
    parameters by identity."""
    kind, family = _find_kind(optimizer)
    entry = API[f"optim.{family}"]
    groups = []
    for group in optimizer.param_groups:
        _refuse_unsupported(group, family)
        numbers_ = [name for name in entry["group_vars"] if name not in ("amsgrad", "centered")]
        present = [name for name in numbers_ if name in group or name != "velocity_scaling"]
        groups.append({name: _format_value(optimizer, name, group[name]) for name in present})
    scaling = getattr(optimizer, "loss_scaling", 1.0)
    variables = {"loss_scaling": _format_value(optimizer, "loss_scaling", scaling)}
    if options._Popart.options.get("automaticLossScalingSettings.enabled"):
        variables["loss_scaling"] = (scaling, False)
    skipped = {*entry["group_vars"], *entry["global_vars"]}
    extra = [name for name in entry["extra_args"] if name not in skipped]
    attributes = {
        name: getattr(optimizer, name, optim.OWN_DEFAULTS.get(name, torch.float32))
        for name in extra
    }
    limit = attributes.get("max_grad_norm")
    if limit is not None and (math.isnan(limit) or limit <= 0):
        raise ValueError(f"max_grad_norm must be a positive number, not {limit}")
    parameters = [
        [names[id(p)] for p in group["params"]] for group in optimizer.param_groups
    ]  # KeyError, as PopTorch
    return Description(kind, attributes, variables, groups, parameters)


def _refuse_unsupported(group: Mapping[str, Any], family: str) -> None:
    if group.get("dampening"):
        raise DoubleRefuses(
            "dampening: PopART's velocity starts at zero, PyTorch's at the first gradient"
        )
    if group.get("amsgrad"):
        raise ValueError("Only non-amsgrad Adam/AdamW optimizers are supported.")
    for name in IGNORED:
        if group.get(name):
            raise DoubleRefuses(f"{name}=True has no meaning on an IPU: PopTorch does not read it")


def check_replacement(old: Description, new: Description) -> None:
    """Refuse an optimizer that a compiled executable does not accept in place of its own."""
    # [U] PopTorch keeps the compiled groups of parameters without a word
    if (old.kind, old.attributes, old.parameters) != (new.kind, new.attributes, new.parameters):
        raise make_popart_error(
            "type, attributes and parameter groups of the compiled optimizer can not change"
        )
    for before, after in [(old.variables, new.variables), *zip(old.groups, new.groups)]:
        for name, (value, constant) in before.items():
            if constant != after[name][1]:
                raise make_popart_error(
                    f"{name}: Can not replace a constant value with a non constant value."
                )
            if constant and value != after[name][0]:
                raise make_popart_error(f"{name}: Values are constant but do not match.")


def choose_mean_strategy(description: Description, options: Any) -> Any:
    """Return the time of the mean: PopTorch itself chooses Running for float16 accumulators,
    except for combined ones."""
    if description.attributes.get("accum_type") == torch.float16 and description.kind != "SGD1":
        return enums.MeanReductionStrategy.Running
    return options.Training.meanAccumulationAndReplicationReductionStrategy


def _get_values(group: Mapping[str, Tuple[Any, bool]]) -> Dict[str, Any]:
    return {name: value for name, (value, _) in group.items()}


def _name_states(kind: str, has_momentum: bool) -> Dict[str, str]:
    """Return torch's names of the state of a parameter, with PopART's (patterns/adamdecompose.cpp,
    adaptivedecompose.cpp)."""
    if kind.startswith("ADAM"):
        return {"exp_avg": "Accl1___", "exp_avg_sq": "Accl2___", "step": "Step___"}
    names = {"square_avg": "Accl1___"}
    if kind == "RMSPROP_CENTERED":
        names["grad_avg"] = "Accl2___"
    if has_momentum:
        names["momentum_buffer"] = "Accl3___"
    return names


class Twin:
    """The optimizer of the executable, over the device's weights, updated by descriptions only.
    SGD is PopART's own (sgd.hpp): its velocity starts at zero and is stored times the velocity
    scaling. The others use torch's mathematics."""

    def __init__(self, description: Description, weights: Mapping[str, torch.Tensor]) -> None:
        self._description = self.compiled = description
        self._names = {
            id(weights[name]): name for names in description.parameters for name in names
        }
        self._groups = [[weights[name] for name in names] for names in description.parameters]
        self.states: Dict[str, torch.Tensor] = {}
        self._optimizer: Any = None
        if description.kind.startswith("SGD"):
            self._begin_sgd()
        else:
            self._begin_other()
        self.update(description)

    def update(self, description: Description) -> None:
        self._description = description
        if self._optimizer is not None:
            for group, values in zip(self._optimizer.param_groups, description.groups):
                group.update({key: one for key, one in _get_values(values).items() if key in group})

    def step(self, unreduced: float) -> None:
        """Step the weights. `unreduced`: the factor by which the accumulators exceed the mean of
        the gradients."""
        limit = self._description.attributes.get("max_grad_norm")
        if limit is not None and limit != math.inf:
            parameters = [p for group in self._groups for p in group if p.grad is not None]
            torch.nn.utils.clip_grad_norm_(parameters, limit)
        if self._optimizer is not None:
            self._optimizer.step()
            return
        with torch.no_grad():
            for group, values in zip(self._groups, self._description.groups):
                for p in group:
                    if p.grad is not None:
                        self._step_sgd(p, _get_values(values), unreduced)

    # -- SGD

    def _compute_scale(self, group: Mapping[str, Any]) -> float:
        """Return the velocity scaling: glued to the loss scaling for the separate variant (CompilerImpl.cpp)."""
        separate = self._description.kind == "SGD2"
        return float(
            self._description.variables["loss_scaling"][0]
            if separate
            else group["velocity_scaling"]
        )

    def _begin_sgd(self) -> None:
        for group, values in zip(self._groups, self._description.groups):
            numbers_ = _get_values(values)
            for p in group if numbers_["momentum"] else []:
                name = self._names[id(p)]
                if self._description.kind == "SGD2":
                    self.states[f"Accl1___{name}"] = torch.zeros_like(p)
                else:  # it begins with the weight decay's part of the first velocity (sgd1decompose.cpp)
                    self.states[f"Accl___{name}"] = p.detach() * (
                        numbers_["weight_decay"] * self._compute_scale(numbers_)
                    )

    def _step_sgd(self, p: torch.Tensor, group: Dict[str, Any], unreduced: float) -> None:
        name, momentum, decay, scale = (
            self._names[id(p)],
            group["momentum"],
            group["weight_decay"],
            self._compute_scale(group),
        )
        direction = p.grad.add(p, alpha=decay) if decay else p.grad
        if not momentum:
            p.add_(direction, alpha=-group["lr"])
            return
        if self._description.kind == "SGD2":
            velocity = self.states[f"Accl1___{name}"].mul_(momentum).add_(direction * scale)
            if group[
                "nesterov"
            ]:  # takes the accumulator as it is: the sum, where the mean is taken after it
                velocity = (p.grad * unreduced).add(p, alpha=decay) * scale + velocity * momentum
            p.add_(velocity, alpha=-group["lr"] / scale)
            return
        if group["nesterov"]:
            raise make_unmodelled_error("Nesterov momentum with combined accumulators")
        combined = self.states[f"Accl___{name}"].add_(p.grad * scale)
        p.add_(combined, alpha=-group["lr"] / scale)
        combined.mul_(momentum).add_(p, alpha=decay * scale)

    # -- the others

    def _begin_other(self) -> None:
        kind = self._description.kind
        groups: Any = [{"params": group} for group in self._groups]
        if kind.startswith("RMSPROP"):
            self._optimizer = torch.optim.RMSprop(groups, centered=kind == "RMSPROP_CENTERED")
        else:
            self._optimizer = {"ADAM": torch.optim.Adam, "ADAMW": torch.optim.AdamW}[kind](groups)
        for group, values in zip(self._optimizer.param_groups, self._description.groups):
            has_momentum = bool(_get_values(values).get("momentum"))
            for p in group["params"]:
                # torch's RMSprop counts where PopART does not
                state = self._optimizer.state[p] = {"step": torch.zeros(())}
                for key, prefix in _name_states(kind, has_momentum).items():
                    state.setdefault(key, torch.zeros_like(p))
                    self.states[prefix + self._names[id(p)]] = state[key]

    # -- state, as a PopTorch optimizer's state dict holds it

    def read(self) -> Dict[str, Any]:
        rates = {
            f"{name}___{i}": torch.tensor(float(value))
            for i, group in enumerate(self._description.groups)
            for name, (value, constant) in group.items()
            if not constant
        }
        states = {name: value.clone() for name, value in self.states.items()}
        return {"ipu_state": states, "ipu_param": rates}

    def write(self, state: Mapping[str, Any]) -> None:
        """Write states; missing states stay as they are, with a warning. Rates are not written:
        the last one set counts (devicex.cpp, updateOptimizerTensors)."""
        for name, value in self.states.items():
            if name not in state:
                recorded.warn(f"writeOptimizerState: ignoring missing state {name}")
                continue
            if state[name].shape != value.shape or state[name].dtype != value.dtype:
                raise DoubleRefuses(
                    f"{name}: PopTorch would read the tensor's memory as {value.dtype} {tuple(value.shape)}"
                )
            value.copy_(state[name])
