"""PopTorch's optimizers: torch's classes with more arguments, whose state lives on the IPU.

Arguments that were given are variable, all others are baked into the executable as constants.
"""

from __future__ import annotations

import math
from typing import Any, Dict, List

import torch

from poptorch._record import recorded
from poptorch._signatures import API, follow_api

TYPES = (torch.float16, torch.float32)
# Of the arguments that torch's optimizers have not; the types of accumulators are float32.
OWN_DEFAULTS = {"loss_scaling": 1.0, "use_combined_accum": False, "bias_correction": True, "max_grad_norm": math.inf,
                "use_tf_variant": False, "velocity_scaling": 1.0}  # fmt: skip


class VariableAttributes:
    """The hyper-parameters that may change after the model is compiled."""

    @follow_api("optim.VariableAttributes")
    def __init__(self, variable_attributes: List[str], allowed_attributes: List[str]) -> None:
        self._variable, self._allowed = list(variable_attributes), list(allowed_attributes)

    @follow_api("optim.VariableAttributes.isConstant")
    def isConstant(self, attr: str) -> bool:
        return attr not in self._variable

    @follow_api("optim.VariableAttributes.markAsConstant")
    def markAsConstant(self, attr: str) -> None:
        assert attr in self._allowed, f"Unknown attribute {attr}, allowed values: {self._allowed}"
        self._variable = [one for one in self._variable if one != attr]


class Optimizer:
    """Common part of the optimizers: a state that lives on the IPU and is read back on request."""

    @follow_api("optim.Optimizer")
    def __init__(self) -> None:
        self._state_dict: Dict[str, Any] = {"ipu_state": None, "ipu_param": None}
        self.ipu_state_is_dirty = False
        self.host_state_is_dirty = False

    def _set_up(self, extra_arguments: Dict[str, Any], variables: List[str]) -> None:
        """Store the arguments that torch lacks, with PopTorch's defaults, as attributes; check
        their types."""
        entry = API[f"optim.{type(self).__name__}"]
        for name, value in extra_arguments.items():
            chosen = OWN_DEFAULTS.get(name, torch.float32) if value is None else value
            if name.endswith("accum_type"):
                assert chosen in TYPES, (
                    "Accumulation types must be either torch.float32 or torch.float16"
                )
            if name != "velocity_scaling":
                setattr(self, name, chosen)
        # the combined variant alone scales velocities, and by group
        if extra_arguments.get("use_combined_accum"):
            scaling = (
                1.0
                if extra_arguments["velocity_scaling"] is None
                else extra_arguments["velocity_scaling"]
            )
            self.defaults["velocity_scaling"] = scaling
            for group in self.param_groups:
                group.setdefault("velocity_scaling", scaling)
        elif extra_arguments.get("velocity_scaling") is not None:
            recorded.warn(
                "velocity_scaling value ignored when using the separate variant (use_combined_accum=False)."
            )
        allowed = [*self.defaults, *entry["global_vars"]]
        self.variable_attrs = VariableAttributes(variables, allowed)

    @follow_api("optim.Optimizer.state_dict")
    def state_dict(self) -> Dict[str, Any]:
        return self.get_state_dict()

    @follow_api("optim.Optimizer.load_state_dict")
    def load_state_dict(self, state) -> None:
        torch.optim.Optimizer.load_state_dict(self, state)
        self.set_state_dict(state)

    @follow_api("optim.Optimizer.get_state_dict")
    def get_state_dict(self) -> Dict[str, Any]:
        return {**self._state_dict, **torch.optim.Optimizer.state_dict(self)}

    @follow_api("optim.Optimizer.set_state_dict")
    def set_state_dict(self, state) -> None:
        if not state:
            raise RuntimeError("Cannot load optimizer state dictionary because it is empty.")
        if not ("ipu_state" in state and "ipu_param" in state):
            raise RuntimeError("Only IPU optimizer states can be loaded onto the IPU.")
        self._state_dict = {key: state[key] for key in ("ipu_state", "ipu_param")}
        self.ipu_state_is_dirty, self.host_state_is_dirty = True, False

    @follow_api("optim.Optimizer.has_state")
    def has_state(self) -> bool:
        return (
            self._state_dict["ipu_state"] is not None and self._state_dict["ipu_param"] is not None
        )


def _make_optimizer(name: str) -> Any:
    """Return torch's class of that name with PopTorch's arguments, as the data states them."""
    parent = getattr(torch.optim, name)
    names = [param["name"] for param in API[f"optim.{name}"]["params"]]
    extra = API[f"optim.{name}"]["extra_args"]

    @follow_api(f"optim.{name}")
    def __init__(self: Any, *values: Any) -> None:
        arguments = dict(zip(names, values))
        passed = [key for key, value in arguments.items() if value is not None]
        Optimizer.__init__(self)
        parent.__init__(self, **{key: arguments[key] for key in passed if key not in extra})
        self._set_up({key: arguments[key] for key in extra}, passed)

    return type(name, (Optimizer, parent), {"__init__": __init__, "__module__": __name__})


SGD, Adam, AdamW, RMSprop = map(_make_optimizer, ("SGD", "Adam", "AdamW", "RMSprop"))
