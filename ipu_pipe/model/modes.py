"""Put a model into training or evaluation mode, and leave in evaluation mode the modules that came
in it.

    handed over                                 trained
    model in training, bn in evaluation mode    the same: bn.eval() before a run freezes its statistics
    model in evaluation mode (from_pretrained)  all in training mode: the mode says nothing about single modules

`enter_training` decides this once, when a run is built. From then on the model is in its training
modes, and an evaluation restores them at its end (`ipu_pipe.model.restoring.restore_modes`).
"""

from __future__ import annotations

from typing import Mapping

from torch import nn

from ipu_pipe.text import list_some


def is_evaluating(model: nn.Module) -> bool:
    """Return whether a model is in evaluation mode; a wrapper of adapters (PEFT) has the mode of
    the model in it.
    """
    get_base_model = getattr(model, "get_base_model", None)
    return not (get_base_model() if callable(get_base_model) else model).training


def enter_training(model: nn.Module) -> bool:
    """Put a model into the modes in which it is trained; return whether the model itself came in
    evaluation mode.

    `model.train()`, which a user's class may override, decides. Modules that came in evaluation
    mode go back to it, unless the model itself came in it.
    """
    came_evaluating = is_evaluating(model)
    evaluating = (
        [] if came_evaluating else [module for module in model.modules() if not module.training]
    )
    model.train()
    for module in evaluating:
        # not eval(), which would take the modules inside with it
        module.training = False
    return came_evaluating


def set_mode(model: nn.Module, training: bool) -> None:
    """Put a model into evaluation mode, or into training mode if it is not in it: then each module
    keeps its mode.
    """
    if not training:
        model.eval()
    elif not model.training:
        model.train()


def describe_modes(model: nn.Module, came_evaluating: bool) -> list[str]:
    """Describe the modes of a model in training, a line each; [] if it came, and is trained, in
    training mode throughout.
    """
    lines = ["model: came in evaluation mode: trained in training mode"] if came_evaluating else []
    evaluating = [name for name, module in model.named_modules() if not module.training]
    if evaluating:
        inside = set(evaluating)
        outermost = [name for name in evaluating if name.rpartition(".")[0] not in inside]
        modules = f"{len(evaluating)} modules stay" if len(evaluating) > 1 else "1 module stays"
        lines.append(f"model: {modules} in evaluation mode: {list_some(outermost)}")
    return lines


def find_changed_mode(model: nn.Module, before: Mapping[nn.Module, bool]) -> str:
    """Return the name of the first module whose mode differs from that `before`, '' if there is
    none.
    """
    # walking through the names costs ten times as much, and every step asks
    if all(module.training == mode for module, mode in before.items()):
        return ""
    for name, module in model.named_modules():
        # a module that came after `before` has no mode to compare with
        if module.training != before.get(module, module.training):
            return name or type(model).__name__
    return ""
