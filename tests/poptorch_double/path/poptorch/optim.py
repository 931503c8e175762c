"""PopTorch's optimizers: torch's classes with more arguments, whose state lives on the IPU.

Arguments that were given are variable, all others are baked into the executable as constants.
"""

from __future__ import annotations

import math
from typing import Any, Dict, Iterable, List, Optional, Tuple

import torch

from poptorch._record import recorded
from poptorch._signatures import API, typed

TYPES = (torch.float16, torch.float32)
# Of the arguments that torch's optimizers have not; the types of accumulators are float32.
OWN_DEFAULTS = {"loss_scaling": 1.0, "use_combined_accum": False, "bias_correction": True, "max_grad_norm": math.inf,
                "use_tf_variant": False, "velocity_scaling": 1.0}  # fmt: skip


class VariableAttributes:
    """Which hyper-parameters may change after the model is compiled."""

    @typed("optim.VariableAttributes")
    def __init__(self, variable_attributes: List[str], allowed_attributes: List[str]) -> None:
        self._variable, self._allowed = list(variable_attributes), list(allowed_attributes)

    @typed("optim.VariableAttributes.isConstant")
    def isConstant(self, attr: str) -> bool:
        return attr not in self._variable

    @typed("optim.VariableAttributes.markAsConstant")
    def markAsConstant(self, attr: str) -> None:
        self._check(attr)
        self._variable = [one for one in self._variable if one != attr]

    @typed("optim.VariableAttributes.markAsVariable")
    def markAsVariable(self, attr: str) -> None:
        self._check(attr)
        self._variable.append(attr)

    def _check(self, attr: str) -> None:
        assert attr in self._allowed, f"Unknown attribute {attr}, allowed values: {self._allowed}"


class Optimizer:
    """What the optimizers share: a state that lives on the IPU and is read back when it is asked for."""

    @typed("optim.Optimizer")
    def __init__(self) -> None:
        self._state_dict: Dict[str, Any] = {"ipu_state": None, "ipu_param": None}
        self.ipu_state_is_dirty = False
        self.host_state_is_dirty = False

    def _set_up(self, own: Dict[str, Any], variables: List[str]) -> None:
        """Keep the arguments torch has not, with PopTorch's defaults, as attributes; check their types."""
        entry = API[f"optim.{type(self).__name__}"]
        for name, value in own.items():
            chosen = OWN_DEFAULTS.get(name, torch.float32) if value is None else value
            if name.endswith("accum_type"):
                assert chosen in TYPES, "Accumulation types must be either torch.float32 or torch.float16"
            if name != "velocity_scaling":
                setattr(self, name, chosen)
        if own.get("use_combined_accum"):  # the only variant that scales velocities, and by group
            scaling = 1.0 if own["velocity_scaling"] is None else own["velocity_scaling"]
            self.defaults["velocity_scaling"] = scaling
            for group in self.param_groups:
                group.setdefault("velocity_scaling", scaling)
        elif own.get("velocity_scaling") is not None:
            recorded.warn("velocity_scaling value ignored when using the separate variant (use_combined_accum=False).")
        allowed = [*self.defaults, *entry["global_vars"]]
        self.variable_attrs = VariableAttributes(variables, allowed)

    @typed("optim.Optimizer.state_dict")
    def state_dict(self) -> Dict[str, Any]:
        return self.get_state_dict()

    @typed("optim.Optimizer.load_state_dict")
    def load_state_dict(self, state) -> None:
        torch.optim.Optimizer.load_state_dict(self, state)
        self.set_state_dict(state)

    @typed("optim.Optimizer.get_state_dict")
    def get_state_dict(self) -> Dict[str, Any]:
        return {**self._state_dict, **torch.optim.Optimizer.state_dict(self)}

    @typed("optim.Optimizer.set_state_dict")
    def set_state_dict(self, state) -> None:
        if not state:
            raise RuntimeError("Cannot load optimizer state dictionary because it is empty.")
        if not ("ipu_state" in state and "ipu_param" in state):
            raise RuntimeError("Only IPU optimizer states can be loaded onto the IPU.")
        self._state_dict = {key: state[key] for key in ("ipu_state", "ipu_param")}
        self.ipu_state_is_dirty, self.host_state_is_dirty = True, False

    @typed("optim.Optimizer.has_state")
    def has_state(self) -> bool:
        return self._state_dict["ipu_state"] is not None and self._state_dict["ipu_param"] is not None

    def __getstate__(self) -> Dict[str, Any]:
        state = {key: value for key, value in self.__dict__.items() if key not in ("state_dict", "step")}
        return {**state, "ipu_state_is_dirty": self.has_state(), "host_state_is_dirty": False}


def _split(arguments: Dict[str, Any], kind: str) -> Tuple[Dict[str, Any], Dict[str, Any], List[str]]:
    """(torch's arguments that were given, PopTorch's own, names of all that were given) of a constructor's locals()."""
    arguments = {key: value for key, value in arguments.items() if key not in ("self", "__class__")}
    own = API[f"optim.{kind}"]["extra_args"]
    given = [key for key, value in arguments.items() if value is not None]
    torchs = {key: arguments[key] for key in given if key not in own}
    return torchs, {key: arguments[key] for key in own}, given


class SGD(Optimizer, torch.optim.SGD):
    """Stochastic gradient descent; with `use_combined_accum` accumulator and velocity are one tensor."""

    @typed("optim.SGD")
    def __init__(
        self,
        params: Iterable,
        lr: float,
        momentum: Optional[float] = None,
        dampening: Optional[float] = None,
        weight_decay: Optional[float] = None,
        nesterov: Optional[bool] = None,
        maximize: Optional[bool] = None,
        foreach: Optional[bool] = None,
        differentiable: Optional[bool] = None,
        loss_scaling: Optional[float] = None,
        velocity_scaling: Optional[float] = None,
        use_combined_accum: Optional[bool] = None,
        accum_type: Optional[torch.dtype] = None,
        velocity_accum_type: Optional[torch.dtype] = None,
        max_grad_norm: Optional[float] = None,
    ) -> None:
        torchs, own, given = _split(locals(), "SGD")
        Optimizer.__init__(self)
        torch.optim.SGD.__init__(self, **torchs)
        self._set_up(own, given)


class Adam(Optimizer, torch.optim.Adam):
    """Adam without AMSGrad."""

    @typed("optim.Adam")
    def __init__(
        self,
        params: Iterable,
        lr: Optional[float] = None,
        betas: Optional[Tuple[float, float]] = None,
        eps: Optional[float] = None,
        weight_decay: Optional[float] = None,
        amsgrad: Optional[bool] = None,
        foreach: Optional[bool] = None,
        maximize: Optional[bool] = None,
        capturable: Optional[bool] = None,
        differentiable: Optional[bool] = None,
        fused: Optional[bool] = None,
        loss_scaling: Optional[float] = None,
        accum_type: Optional[torch.dtype] = None,
        first_order_momentum_accum_type: Optional[torch.dtype] = None,
        second_order_momentum_accum_type: Optional[torch.dtype] = None,
        max_grad_norm: Optional[float] = None,
    ) -> None:
        torchs, own, given = _split(locals(), "Adam")
        Optimizer.__init__(self)
        torch.optim.Adam.__init__(self, **torchs)
        self._set_up(own, given)


class AdamW(Optimizer, torch.optim.AdamW):
    """Adam with decoupled weight decay."""

    @typed("optim.AdamW")
    def __init__(
        self,
        params: Iterable,
        lr: Optional[float] = None,
        betas: Optional[Tuple[float, float]] = None,
        eps: Optional[float] = None,
        weight_decay: Optional[float] = None,
        amsgrad: Optional[bool] = None,
        maximize: Optional[bool] = None,
        foreach: Optional[bool] = None,
        capturable: Optional[bool] = None,
        differentiable: Optional[bool] = None,
        fused: Optional[bool] = None,
        loss_scaling: Optional[float] = None,
        bias_correction: Optional[bool] = None,
        accum_type: Optional[torch.dtype] = None,
        first_order_momentum_accum_type: Optional[torch.dtype] = None,
        second_order_momentum_accum_type: Optional[torch.dtype] = None,
        max_grad_norm: Optional[float] = None,
    ) -> None:
        torchs, own, given = _split(locals(), "AdamW")
        Optimizer.__init__(self)
        torch.optim.AdamW.__init__(self, **torchs)
        self._set_up(own, given)


class RMSprop(Optimizer, torch.optim.RMSprop):
    """RMSprop, in PyTorch's or TensorFlow's variant."""

    @typed("optim.RMSprop")
    def __init__(
        self,
        params: Iterable,
        lr: Optional[float] = None,
        alpha: Optional[float] = None,
        eps: Optional[float] = None,
        weight_decay: Optional[float] = None,
        momentum: Optional[float] = None,
        centered: Optional[bool] = None,
        foreach: Optional[bool] = None,
        maximize: Optional[bool] = None,
        differentiable: Optional[bool] = None,
        loss_scaling: Optional[float] = None,
        accum_type: Optional[torch.dtype] = None,
        first_order_momentum_accum_type: Optional[torch.dtype] = None,
        second_order_momentum_accum_type: Optional[torch.dtype] = None,
        use_tf_variant: Optional[bool] = None,
    ) -> None:
        torchs, own, given = _split(locals(), "RMSprop")
        Optimizer.__init__(self)
        torch.optim.RMSprop.__init__(self, **torchs)
        self._set_up(own, given)
