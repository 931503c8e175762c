"""Whether what Python gives to a run is of the right kind: told, a line each, before anything is made of it."""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Mapping, Tuple

from torch import nn

from ipu_pipe.config.schema import Config
from ipu_pipe.config.sections import GIVEN
from ipu_pipe.data import DataSource
from ipu_pipe.errors import BadInput
from ipu_pipe.text import describe_kind


def _is_function(value: Any) -> bool:
    return callable(value) and not isinstance(value, type)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


_FLAG = (lambda value: isinstance(value, bool), "True or False")
_KINDS: Dict[str, Tuple[Callable[[Any], bool], str]] = {
    "config": (lambda value: isinstance(value, Config), "what ipu_pipe.configure or ipu_pipe.load_config gives"),
    "model": (lambda value: isinstance(value, nn.Module), "a torch.nn.Module"),
    "data": (
        lambda value: isinstance(value, DataSource) and not isinstance(value, type),
        "a DataSource, such as ipu_pipe.from_loader(train, test) gives",
    ),
    "loss": (
        lambda value: isinstance(value, str) or _is_function(value),
        "a function of outputs and labels, such as torch.nn.CrossEntropyLoss(), or the name of one",
    ),
    "output": (
        lambda value: isinstance(value, str) or _is_whole(value) or callable(value),
        "a field's name, an index, or a function of the model's output",
    ),
    "optimizer_args": (lambda value: isinstance(value, Mapping), "a mapping of arguments"),
    "lr_scheduler": (
        callable,
        "a function of an optimizer that makes a scheduler, such as functools.partial(torch.optim.lr_scheduler.StepLR, "
        "step_size=30)",
    ),
    "metrics": (
        lambda value: isinstance(value, (list, tuple, Mapping)),
        "a list of names, functions (output, y) and objects with update and compute, or a mapping that names them",
    ),
    "callbacks": (
        lambda value: isinstance(value, (list, tuple)),
        "a list of objects of classes derived from ipu_pipe.Callback",
    ),
    "resume": _FLAG,
    "resume_from": (lambda value: _is_whole(value) and value >= 1, "a whole number >= 1, the step of a checkpoint"),
    "overwrite": _FLAG,
    "quiet": _FLAG,
    "keep_dtype": _FLAG,
}


def refuse_kinds(config: Config, **given: Any) -> None:
    """Refuse (BadInput, every fault) arguments of `ipu_pipe.train` that are no such thing, or that are missing."""
    faults: List[str] = []
    for name, value in {"config": config, **given}.items():
        fits, allowed = _KINDS[name]
        if (value is not None or name == "config") and not fits(value):
            faults.append(f"{name}: {describe_kind(value)}: must be {allowed}")
    if given.get("overwrite") and (given.get("resume") or given.get("resume_from")):
        faults.append("overwrite: True: not together with resume, which keeps the run that is there")
    if isinstance(config, Config):
        said = {"model": config.model.entry, "data": config.data.name}
        faults += [
            f"{key}: missing: must be given, to ipu_pipe.train or ipu_pipe.configure"
            for key, name in said.items()
            if name == GIVEN and given.get(key) is None and getattr(config.given, key, None) is None
        ]
    if faults:
        raise BadInput(faults)
