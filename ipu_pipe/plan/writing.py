"""A plan as a config that trains it."""

from __future__ import annotations

import re
from typing import Any

from ipu_pipe.config.comparing import dump_config
from ipu_pipe.config.load import configure
from ipu_pipe.config.method_args import MethodArgs
from ipu_pipe.config.schema import Config
from ipu_pipe.config.yaml_files import parse_yaml
from ipu_pipe.errors import BadInput
from ipu_pipe.plan.answer import begin_names
from ipu_pipe.plan.prediction import Prediction, Problem
from ipu_pipe.schedule.methods import METHODS


def _off_chip(backend: Any) -> Any:
    """The backend with the optimizer's state in streaming memory."""
    locations = backend.ipu.tensor_locations
    optimizer = locations.optimizer.model_copy(update={"on_chip": False})
    ipu = backend.ipu.model_copy(update={"tensor_locations": locations.model_copy(update={"optimizer": optimizer})})
    return backend.model_copy(update={"ipu": ipu})


def planned_config(config: Config, problem: Problem, found: Prediction, hardware: Any) -> str:
    """The text of the config `config` changed to what was found; `hardware` as the user named it. Settings of the method
    (`method_args`) stay where the method does. Raises BadInput where that is no config that trains."""
    asked = found.asked
    changes = {
        "method": asked.method,
        "stages": begin_names(problem, found) or 1,
        "micro_batch_size": asked.micro_batch_size,
        "gradient_accumulation": asked.gradient_accumulation,
        "replicas": asked.width,
        "recompute": asked.recompute,
        "precision": problem.precision,
        "hardware": hardware,
    }
    own, local = config.method_args, METHODS[asked.method].structure is not None
    if asked.method != config.method:
        own = MethodArgs(head=config.method_args.head if local else None)
    if asked.method == "local_chunked":
        own = own.model_copy(update={"blocks": begin_names(problem, found) or 1})
    changes["method_args"] = own
    if problem.streamed and config.backend.ipu is not None:
        changes["backend"] = _off_chip(config.backend)
    text = dump_config(config.model_copy(update=changes))
    try:
        configure(**parse_yaml(text, "--write"))  # checked before anything is written
    except BadInput as error:
        raise BadInput([re.sub("^configure: ", "--write: ", fault) for fault in error.faults]) from None
    return text
