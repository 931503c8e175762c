"""Format the faults of a config, one line each: the source of the key, the key, the value and the
allowed values.
"""

from __future__ import annotations

import inspect
import re
from typing import Any, List, Mapping, Sequence, Type, get_args

from pydantic import BaseModel

from ipu_pipe.config.values import DEVICES
from ipu_pipe.refusals import Words, name_key, show_value
from ipu_pipe.text import find_nearest, list_some, show, suggest

# a file of thousands of wrong keys has a fault for each
MOST_FAULTS = 50
# the origin of the keys that Python gives
CALL = "configure"
# keys that only a run writes, never a user
WRITTEN = ("given",)
# key of a run's config -> its names in other libraries
OTHER_NAMES = {
    "micro_batch_size": "batch_size train_batch_size per_device_train_batch_size microbatch_size",
    "gradient_accumulation": "chunks n_microbatches num_microbatches num_micro_batches "
    "accumulate_grad_batches gradient_accumulation_steps",
    "epochs": "num_epochs max_epochs num_train_epochs",
    "steps": "max_steps num_steps iterations",
    "precision": "amp fp16 bf16 mixed_precision dtype autocast",
    "stages": "num_stages devices world_size pipeline_parallel_size",
    "clip.norm": "max_grad_norm clip_grad_norm grad_clip gradient_clip_val",
    "lr_schedule": "scheduler lr_scheduler",
    "lr_schedule.warmup_steps": "num_warmup_steps",
    "optimizer.lr": "learning_rate",
    "init_from": "pretrained weights load_from",
    "checkpoint.every": "save_every save_steps checkpoint_every",
    "evaluate.every": "eval_every eval_steps",
    "log.every": "log_every log_interval logging_steps",
    "recompute": "gradient_checkpointing activation_checkpointing checkpoint_activations",
    "loss": "criterion",
    "data": "dataset",
    "metrics": "metric",
    "seed": "random_seed",
    "replicas": "dp_size",
    "--out DIR": "out output_dir save_dir run_dir",
    "--resume": "resume",
}
KEYS_ALSO_CALLED = {word: key for key, words in OTHER_NAMES.items() for word in words.split()}
Schema = Type[BaseModel]


def format_faults(
    details: Sequence[Any],
    origins: Mapping[str, str],
    default_origin: str,
    schema: Schema,
    forms: Mapping[str, Schema],
) -> List[str]:
    """Return a line for each of pydantic's faults, the first `MOST_FAULTS` of them.

    details: of a `ValidationError` of `schema`.
    origins: key with dots -> the file or option that it came from; `default_origin`: used if that
    is not known.
    forms: the sections of keys whose types do not say which section they hold.
    """
    faults = []
    for detail in details[:MOST_FAULTS]:
        # pydantic marks the key of a mapping so, which is no part of its name
        parts = [str(part) for part in detail["loc"] if part != "[key]"]
        key = ".".join(parts)
        kind = detail["type"]
        value = "missing" if kind == "missing" else show_value(detail["input"])
        # pydantic puts the first before a ValueError of ours; the second begins its own messages
        message = detail["msg"].replace("Value error, ", "").replace("Input should be", "must be")
        if kind == "extra_forbidden":
            section = _find_section(parts[:-1], schema, forms)
            message = f"unknown key{_suggest_key(parts[-1], section)}"
        # a value in the place of a section
        elif kind == "model_type":
            section = _find_section(parts, schema, forms)
            fields = {} if section is None else section.model_fields
            message = "must be a mapping of keys to values"
            message += f": {{{list_some([*fields])}}}" if fields else ""
            if "name" in fields and isinstance(detail["input"], str):
                message += f"; did you mean {key}.{_choose_field(value, fields)}={value}?"
        elif kind == "literal_error":
            # pydantic's message quotes each value of a Literal
            message += suggest(detail["input"], re.findall("'(.*?)'", message))
        origin = name_origin(key, origins, default_origin)
        faults.append(f"{origin}{name_key(show(key))}: {value}: {message}")
    more = len(details) - len(faults)
    return faults + ([f"{default_origin}: {more} more such faults"] if more else [])


def name_origin(key: str, origins: Mapping[str, str], default: str) -> str:
    """Return the beginning of a fault: the file or option that `key`, or its section, came from,
    `default` if it is not known. A caller of `Pipeline` has not called `configure` and reads none.
    """
    # a fault may be at a key that nobody wrote: the section around it has an origin
    while key and key not in origins:
        key = key.rpartition(".")[0]
    origin = origins.get(key, default) or default
    return str(Words("" if origin == CALL else f"{origin}: ", f"{origin}: "))


def find_key(word: str, schema: Schema) -> str:
    """Return the key of a config that a word says without a misspelling: "lr" says optimizer.lr; ""
    if none.

    Several keys are separated by "or".
    """
    fields = schema.model_fields
    key = word.lower().replace("-", "_")
    alias = KEYS_ALSO_CALLED.get(key, "")
    # an option, not a key: --out DIR
    if alias.startswith("--") or alias.partition(".")[0] in fields:
        return alias
    if word.partition(".")[0] in fields:
        return word
    sections = {name: _get_section(field.annotation) for name, field in fields.items()}
    return " or ".join(
        f"{name}.{key}"
        for name, section in sections.items()
        if section is not None and name not in WRITTEN and key in section.model_fields
    )


def _choose_field(value: str, fields: Mapping[str, Any]) -> str:
    """Return the field that a text in the place of its section says."""
    return "device" if "device" in fields and value in DEVICES else "name"


def _suggest_key(word: str, section: Any) -> str:
    """Return the known key that is nearest to an unknown one of a section, or all that it has."""
    # the key may belong to another form of `stages`
    if section is None or word in section.model_fields:
        return ""
    near = find_key(word, section) or find_nearest(word, section.model_fields, cutoff=0.5)
    return f", nearest is {near}" if near else f", allowed are {', '.join(section.model_fields)}"


def _find_section(parts: Sequence[str], schema: Schema, forms: Mapping[str, Schema]) -> Any:
    """Return the section at a place, None if the types on the way do not say which."""
    section: Any = schema
    for part in parts:
        field = section.model_fields.get(part)
        # an index in a list of sections, or a key in a mapping of them, is no field
        if field is not None:
            section = forms.get(part) or _get_section(field.annotation)
        if section is None:
            return None
    return section


def _get_section(annotation: Any) -> Any:
    """Return the first section in a type, such as a list of sections, None if there is none."""
    if inspect.isclass(annotation) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(_get_section, get_args(annotation))), None)
