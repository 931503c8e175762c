"""torch.optim's optimizers by name. All stages of a process share one, whose state (momentum and the like) is kept by parameter
and so by stage.
"""

from __future__ import annotations

import functools
from typing import Any, Callable

import torch

from ipu_pipe.errors import BadInput
from ipu_pipe.update.groups import Groups

OptimizerFactory = Callable[[Groups], torch.optim.Optimizer]


def optimizer_factory(name: str, **settings: Any) -> OptimizerFactory:
    """`sgd`, `adam` or `adamw` of torch.optim with these settings, as a function of the parameter groups."""
    kinds = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
    if name not in kinds:
        raise BadInput(f"optimizer.name: {name}: must be one of {', '.join(kinds)}")
    return functools.partial(kinds[name], **settings)


def kind(optimizer: torch.optim.Optimizer) -> str:
    """sgd, adam or adamw for PyTorch's own classes, else the class's name: a subclass may step otherwise."""
    kinds = {torch.optim.SGD: "sgd", torch.optim.Adam: "adam", torch.optim.AdamW: "adamw"}
    return kinds.get(type(optimizer), type(optimizer).__name__)
