"""Format the faults of a config, one line each: the source of the key, the key, the value and the
allowed values.
"""

from __future__ import annotations

import inspect
import re
from typing import Any, List, Mapping, Sequence, Type, get_args, get_origin

from pydantic import BaseModel
from typing_extensions import Literal

from ipu_pipe.refusals import FALSE, TRUE, Words, name_key, show_value
from ipu_pipe.text import find_nearest, show

MOST_FAULTS = 50
# the origin of the keys that Python gives
CALL = "configure"
# keys that only a run writes, never a user
WRITTEN = ("given",)
# other names of keys -> key of a run's config
KEYS_ALSO_CALLED = {
    **dict.fromkeys(
        ("batch_size", "train_batch_size", "per_device_train_batch_size", "microbatch_size"),
        "micro_batch_size",
    ),
    **dict.fromkeys(
        ("chunks", "n_microbatches", "num_microbatches", "num_micro_batches"),
        "gradient_accumulation",
    ),
    **dict.fromkeys(
        ("accumulate_grad_batches", "gradient_accumulation_steps"), "gradient_accumulation"
    ),
    **dict.fromkeys(("num_epochs", "max_epochs", "num_train_epochs"), "epochs"),
    **dict.fromkeys(("max_steps", "num_steps", "iterations"), "steps"),
    **dict.fromkeys(("amp", "fp16", "bf16", "mixed_precision", "dtype", "autocast"), "precision"),
    **dict.fromkeys(("num_stages", "devices", "world_size", "pipeline_parallel_size"), "stages"),
    **dict.fromkeys(
        ("max_grad_norm", "clip_grad_norm", "grad_clip", "gradient_clip_val"), "clip.norm"
    ),
    **dict.fromkeys(("scheduler", "lr_scheduler"), "lr_schedule"),
    **dict.fromkeys(("pretrained", "weights", "load_from"), "init_from"),
    **dict.fromkeys(("save_every", "save_steps", "checkpoint_every"), "checkpoint.every"),
    **dict.fromkeys(("eval_every", "eval_steps"), "evaluate.every"),
    **dict.fromkeys(("log_every", "log_interval", "logging_steps"), "log.every"),
    **dict.fromkeys(
        ("gradient_checkpointing", "activation_checkpointing", "checkpoint_activations"),
        "recompute",
    ),
    **dict.fromkeys(("out", "output_dir", "save_dir", "run_dir"), "--out DIR"),
    "num_warmup_steps": "lr_schedule.warmup_steps",
    "learning_rate": "optimizer.lr",
    "criterion": "loss",
    "dataset": "data",
    "metric": "metrics",
    "random_seed": "seed",
    "resume": "--resume",
    "dp_size": "replicas",
}
# type of a plain value in place of a section -> the keys of the section that it may be meant for,
# the likeliest first
LIKELY_KEYS = {str: ("entry", "name"), int: ("norm", "every"), float: ("norm", "every")}
# pydantic's type of a fault -> the message in place of pydantic's
MESSAGES = {
    **dict.fromkeys(
        ("dict_type", "model_type", "model_attributes_type"), "must be a mapping of keys to values"
    ),
    **dict.fromkeys(("string_type", "invalid_key"), "must be text"),
    **dict.fromkeys(("int_type", "int_from_float", "int_parsing"), "must be a whole number"),
    "bool_type": f"must be {TRUE} or {FALSE}",
    "missing": "must be given",
}
# pydantic's type of a fault -> the bound's name in its context, and its sign
BOUNDS = {
    "greater_than_equal": ("ge", ">="),
    "greater_than": ("gt", ">"),
    "less_than_equal": ("le", "<="),
    "less_than": ("lt", "<"),
}
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
        parts = [str(part) for part in detail["loc"] if part != "[key]"]
        kind = detail["type"]
        value = detail.get("input")
        context = detail.get("ctx", {})
        message = detail["msg"].replace("Value error, ", "").replace("Input should be", "must be")
        if kind == "setting":
            parts = [*parts, context["key"]]
            value = context["value"]
        elif kind == "extra_forbidden":
            message = f"unknown key{_suggest_key(parts, schema, forms)}"
        elif kind == "literal_error":
            near = _find_value(parts, value, re.findall("'(.*?)'", message), schema, forms)
            message = message.replace("'", "") + (f"; did you mean {near}?" if near else "")
        elif kind in BOUNDS:
            name, sign = BOUNDS[kind]
            bound = context[name]
            message = f"must be {sign} {f'{bound:g}' if isinstance(bound, float) else bound}"
        elif kind in MESSAGES:
            message = MESSAGES[kind] + (
                _suggest_section(parts, value, schema) if kind.startswith("model_") else ""
            )
        key = ".".join(parts)
        shown = "missing" if kind == "missing" else show_value(value)
        origin = find_origin(key, origins, default_origin)
        faults.append(f"{name_origin(origin)}{name_key(show(key))}: {shown}: {message}")
    more = len(details) - len(faults)
    return faults + ([f"{default_origin}: {more} more such faults"] if more else [])


def name_origin(origin: str) -> str:
    """Return the beginning of a fault: a key's file or option, or `configure`, which a caller of
    `Pipeline` has not called.
    """
    return str(Words("" if origin == CALL else f"{origin}: ", f"{origin}: "))


def find_origin(key: str, origins: Mapping[str, str], default: str) -> str:
    """Return the file or option that `key`, or its section, came from; `default` if it is not
    known.
    """
    while key and key not in origins:
        key = key.rpartition(".")[0]
    return origins.get(key, default) or default


def _suggest_section(parts: List[str], value: Any, schema: Schema) -> str:
    """Return the section as it would be with the value that was given in its place, or the key of
    the section that has this value (backend.device=cuda).
    """
    field = schema.model_fields.get(parts[0]) if len(parts) == 1 else None
    section = _find_section(field.annotation) if field is not None else None
    if section is None:
        return ""
    meant = [key for key in LIKELY_KEYS.get(type(value), ()) if key in section.model_fields]
    names = _list_values(section.model_fields[meant[0]]) if meant else []
    if not names:
        return f", such as {{{meant[0]}: {show(value)}}}" if meant else ""
    near = _find_value([*parts, meant[0]], value, names, schema, {})
    if not near:
        return f", such as {{{meant[0]}: {names[0]}}}"
    return f"; did you mean {near if '=' in near else f'{parts[0]}.{meant[0]}={near}'}?"


def _list_values(field: Any) -> List[str]:
    """Return the values that a key's type lists; none if it lists none."""
    alternatives = (field.annotation, *get_args(field.annotation))
    return [name for one in alternatives if get_origin(one) is Literal for name in get_args(one)]


def _find_value(
    parts: List[str],
    value: Any,
    names: Sequence[str],
    schema: Schema,
    forms: Mapping[str, Schema],
) -> str:
    """Return which of a key's `names` may be meant, or the key beside it with this value
    (backend.device=cuda); "" if none.
    """
    section = _find_section_of(parts, schema, forms)
    near = find_nearest(value, names, cutoff=1.0)
    if near or section is None:
        return near or find_nearest(value, names)
    for key, field in section.model_fields.items():
        near = find_nearest(value, _list_values(field), cutoff=1.0)
        if near:
            return f"{name_key('.'.join([*parts[:-1], key]))}={near}"
    return find_nearest(value, names)


def _find_section_of(parts: List[str], schema: Schema, forms: Mapping[str, Schema]) -> Any:
    """Return the section that contains a key, None if its type does not say which."""
    section: Any = schema
    # in a list or mapping of sections, an index or a key follows
    is_index = False
    for name in parts[:-1]:
        if is_index:
            is_index = False
            continue
        field = section.model_fields.get(name)
        section = forms.get(name) or (_find_section(field.annotation) if field else None)
        is_index = field is not None and get_origin(field.annotation) in (list, tuple, dict)
        if section is None:
            return None
    return section


def _suggest_key(parts: List[str], schema: Schema, forms: Mapping[str, Schema]) -> str:
    """Return the known key that is nearest to an unknown one, or all that are known in its
    section.
    """
    section = _find_section_of(parts, schema, forms)
    # the key may belong to another form of `stages`
    if section is None or parts[-1] in section.model_fields:
        return ""
    near = (
        find_key(parts[-1], section)
        if len(parts) == 1
        else _find_key_in_section(parts[-1], section)
    )
    near = near or find_nearest(parts[-1], section.model_fields, cutoff=0.5)
    return f", nearest is {near}" if near else f", allowed are {', '.join(section.model_fields)}"


def find_key(word: str, schema: Schema) -> str:
    """Return the key of a config that a word says without a misspelling: "lr" says optimizer.lr; ""
    if none.

    Several keys are separated by "or".
    """
    fields = schema.model_fields
    key = word.lower().replace("-", "_")
    alias = KEYS_ALSO_CALLED.get(key, "")
    if alias.startswith("--") or alias.partition(".")[0] in fields:
        return alias
    return word if word.partition(".")[0] in fields else _find_key_in_section(key, schema)


def _find_key_in_section(key: str, schema: Schema) -> str:
    fields = schema.model_fields
    sections = [
        name
        for name in fields
        if name not in WRITTEN and key in _list_keys(fields[name].annotation)
    ]
    return " or ".join(f"{name}.{key}" for name in sections)


def _list_keys(annotation: Any) -> List[str]:
    """Return the keys of the section in a type; none if there is no section."""
    section = _find_section(annotation)
    return list(section.model_fields) if section is not None else []


def _find_section(annotation: Any) -> Any:
    types = (annotation, *getattr(annotation, "__args__", ()))
    return next((one for one in types if inspect.isclass(one) and issubclass(one, BaseModel)), None)
