"""A state of `Pipeline.state_dict`, read whole before anything of it is set.

state (the caller's)     anything                                refused with one line, nothing has changed
  parse_state            types, names, shapes, numbers
SavedState               copies, which fit the model, the optimizer and the loss
  Pipeline               sets all of it, or waits for the first step with what needs an engine
"""

from __future__ import annotations

import copy
import json
import math
from typing import AbstractSet, Any, Iterable, Iterator, Mapping, NamedTuple, Sequence

import torch
from torch import nn

from ipu_pipe.backends.interface import POPTORCH_PREFIX, CheckpointState
from ipu_pipe.backends.ranks import are_joined
from ipu_pipe.errors import BadInput
from ipu_pipe.local.blocks import HEADS
from ipu_pipe.pipeline.optimizer import OptimizerHandle
from ipu_pipe.store.checkpoint import check_weights, describe_wrapper
from ipu_pipe.text import list_some, show
from ipu_pipe.update.apply import AVERAGE
from ipu_pipe.update.optimizer import COUNTS, export_state, import_state

# the first has no `contents`, no `loss` and maybe no `settings`; `state_dict` returns the newest
FIRST_FORMAT = 1
FORMAT = 2
KEYS = {
    1: ("method", "model", "optimizer", "plain", "updates", "drains"),
    2: (
        "method",
        "model",
        "optimizer",
        "plain",
        "loss",
        "settings",
        "updates",
        "drains",
        "contents",
    ),
}
# no loop makes more updates; their microbatches are counted in 64 bits
MOST_UPDATES = 1 << 40


class SavedState(NamedTuple):
    """A state that fits: copies of tensors, the settings of the optimizer's groups (None in states
    of earlier versions), the position, and the place of a part (None for a whole state).

    `is_handed_over`: the model has the weights already, and the caller's optimizer its entries.
    `stages`: the modules at which the second and later stages begin; None in states of earlier
    versions, and for stages that divide modules. `ranks`: the processes that it was collected from.
    """

    model: dict[str, torch.Tensor]
    optimizer: dict[str, torch.Tensor]
    plain: dict[str, Any]
    loss: dict[str, Any]
    settings: Mapping[str, Any] | None
    updates: int
    drains: list[int]
    layout: Any = None
    is_handed_over: bool = False
    stages: list[str] | None = None
    ranks: int = 1


def describe_state(
    state: CheckpointState,
    method: str,
    settings: Any,
    updates: int,
    drains: Iterable[int],
    layout: Mapping[str, Any] | None = None,
    stages: Sequence[str] | None = None,
    ranks: int = 1,
) -> dict[str, Any]:
    """Return a copy of an engine's state, with the settings, the position, the place of a part, the
    cut and the number of processes, as `parse_state` reads it.
    """
    described = {
        **({} if ranks == 1 else {"ranks": ranks}),
        **({} if layout is None else {"layout": layout}),
        **({} if stages is None else {"stages": list(stages)}),
        "format": FORMAT,
        "method": method,
        "model": {name: value.clone() for name, value in state.model.items()},
        "optimizer": {name: value.clone() for name, value in state.optimizer.items()},
        "plain": copy.deepcopy(state.plain),
        "loss": copy.deepcopy(dict(state.loss)),
        "settings": settings,
        "updates": updates,
        "drains": list(drains),
    }
    # by which it is noticed, when the state is loaded, that something was taken out of it
    return {**described, "contents": sorted(_list_paths(described))}


def _list_paths(value: Any, path: str = "") -> Iterator[str]:
    """Yield the paths of all leaves of mappings and lists."""
    if isinstance(value, Mapping):
        items: Iterable[tuple[Any, Any]] = value.items()
    elif isinstance(value, (list, tuple)):
        items = enumerate(value)
    else:
        yield path
        return
    for key, inner in items:
        yield from _list_paths(inner, f"{path}/{key}" if path else str(key))


def parse_state(
    state: Any, method: str, handle: OptimizerHandle, loads_poptorch_state: bool
) -> SavedState:
    """Return a copy of a state. Raise `BadInput` if it is not a state of this method and optimizer.

    The tensors are compared with the model by `check_tensors`.
    """
    state = _require_keys(state)
    _require_contents(state)
    model = _copy_tensors(state, "model")
    optimizer = _copy_tensors(state, "optimizer")
    plain = _require_mapping(state, "plain")
    if state["method"] != method:
        raise BadInput(f"state of method {show(state['method'])}: this pipeline has {method}")
    if any(f"/{POPTORCH_PREFIX}:" in key for key in optimizer) and not loads_poptorch_state:
        raise BadInput('the optimizer state is PopTorch\'s: only backend="poptorch" can load it')
    updates = _require_count("updates", state["updates"])
    drains = state["drains"]
    if not isinstance(drains, (list, tuple)):
        raise BadInput(f"drains: {show(drains)}: must be a list of updates")
    drains = [_require_count("drains", k) for k in drains]
    # a state is taken where the pipeline has drained; only before the first update it has not
    if drains != sorted(set(drains)) or drains[-1:] != [updates][: len(drains) or updates]:
        raise BadInput(f"drains: {drains}: must grow, and end with the updates, {updates}")
    # states of earlier versions have no settings
    settings = state.get("settings")
    if "settings" in state:
        settings = handle.parse_settings(settings)
    if "layout" in state:
        _require_mapping(state, "layout")
    stages = state.get("stages", [])
    is_list = isinstance(stages, (list, tuple)) and all(isinstance(s, str) for s in stages)
    if not is_list:
        raise BadInput(f"stages: {show(stages)}: must be a list of modules")
    return SavedState(
        model,
        optimizer,
        copy.deepcopy(dict(plain)),
        copy.deepcopy(dict(_require_mapping(state, "loss"))) if "loss" in state else {},
        settings,
        updates,
        drains,
        copy.deepcopy(state.get("layout")),
        stages=list(stages) if "stages" in state else None,
        ranks=_require_count("ranks", state.get("ranks", 1)),
    )


def _require_keys(state: Any) -> Mapping[str, Any]:
    if not isinstance(state, Mapping) or "format" not in state:
        raise BadInput(
            "lacks format: must be a result of Pipeline.state_dict on rank 0, or with sharded=True"
        )
    number = state["format"]
    # not by `in` alone, for which True is 1
    if type(number) is not int or number not in KEYS:
        raise BadInput(f"format {show(number)}: this version reads {', '.join(map(str, KEYS))}")
    # torch.distributed.checkpoint, which joins parts, drops mappings that are empty
    state = {**({"plain": {}, "loss": {}} if "layout" in state else {}), **state}
    missing = [key for key in KEYS[number] if key not in state]
    if missing:
        raise BadInput(
            f"lacks {', '.join(missing)}: must be a result of Pipeline.state_dict on "
            f"rank 0, or with sharded=True"
        )
    return state


def _require_contents(state: Mapping[str, Any]) -> None:
    """Raise `BadInput` if something has been taken out of a state since it was made."""
    if "contents" not in state:
        return
    contents = state["contents"]
    is_list = isinstance(contents, (list, tuple)) and all(isinstance(c, str) for c in contents)
    if not is_list or "format" not in contents:
        raise BadInput("contents: must be the list of names that state_dict has made")
    present = set(_list_paths(state))
    # a container that something else has replaced is named by the check of its type
    leaves = {path for path in present if path not in contents}
    # missing weights, or a prefix of their names, are named when they are compared with the model
    missing = [
        path
        for path in contents
        if path not in present
        and not path.startswith("model/")
        and not any(path.startswith(f"{leaf}/") for leaf in leaves)
    ]
    if missing:
        raise BadInput(f"lacks {list_some(missing)}: must be the whole state that was saved")


def _require_mapping(state: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = state[key]
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise BadInput(f"{key}: {type(value).__name__}: must map names to values")
    return value


def _copy_tensors(state: Mapping[str, Any], key: str) -> dict[str, torch.Tensor]:
    """Return copies, because the caller may go on to use its tensors."""
    tensors = _require_mapping(state, key)
    for name, value in tensors.items():
        if not isinstance(value, torch.Tensor):
            raise BadInput(f"{key}: {name}: {show(value)}: must be a tensor")
        if value.layout != torch.strided or value.is_meta or value.is_quantized:
            raise BadInput(f"{key}: {name}: must be a dense tensor with values")
    return {name: value.detach().clone() for name, value in tensors.items()}


def _require_count(key: str, value: Any) -> int:
    if type(value) is not int or not 0 <= value <= MOST_UPDATES:
        raise BadInput(f"{key}: {show(value)}: must be a whole number, at least 0")
    return value


# ---- against the model, the optimizer's parameters and the loss


def select_averages(state: CheckpointState, model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the moving averages of the weights in an engine's state, by all names of each."""
    suffix = f"/{AVERAGE}"
    averages = {
        key[: -len(suffix)]: value.clone()
        for key, value in state.optimizer.items()
        if key.endswith(suffix)
    }
    # the average of a tied weight is stored under the first of its names
    first: dict[nn.Parameter, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if first.setdefault(parameter, name) in averages:
            averages[name] = averages[first[parameter]]
    return averages


def check_tensors(
    saved: SavedState,
    model: nn.Module,
    parameters: Mapping[str, nn.Parameter],
    is_elementwise: bool,
) -> None:
    """Raise `BadInput` if the tensors of a state do not fit.

    `parameters`: those that the optimizer may step, by name. `is_elementwise`: the optimizer's
    state has the shape of its parameter, but for counts.
    """
    state = model.state_dict()
    for name, value in saved.model.items():
        # names that do not fit are told together, by `check_weights`
        if name in state and _get_kind(value) != _get_kind(state[name]):
            raise BadInput(
                f"model: {name}: is {_name(value.dtype)}, the model has {_name(state[name].dtype)}"
            )
    present = [(name, value) for name, value in saved.model.items() if name in state]
    _require_one_dtype(
        "model",
        [
            # a module may keep its statistics in more bits than another
            (
                name,
                _name(state[name].dtype) + ("" if name in parameters else name.rpartition(".")[0]),
                value,
            )
            for name, value in present
        ],
    )
    # the names of the optimizer's state and of its contents have it too: renaming the weights alone
    # would lead to the next refusal
    wrapper = describe_wrapper(
        state, saved.model, "load it into a pipeline over a model with these names"
    )
    if wrapper:
        raise BadInput(f"model: {wrapper}")
    # a part lacks the tensors of other stages: the model's own stand in for them
    check_weights(model, saved.model if saved.layout is None else {**state, **saved.model}, "model")
    _check_optimizer(saved, parameters, is_elementwise)


def _check_optimizer(
    saved: SavedState, parameters: Mapping[str, nn.Parameter], is_elementwise: bool
) -> None:
    entries = []
    for key, value in [*saved.optimizer.items(), *saved.plain.items()]:
        name, _, entry = key.rpartition("/")
        place = f"optimizer: {key}"
        parameter = parameters.get(name)
        if parameter is None:
            # heads are made with the first step
            if name.startswith(HEADS):
                continue
            raise BadInput(f"{place}: the model has no parameter of that name")
        # such entries have shapes of their own, which nobody knows here
        if entry.startswith(f"{POPTORCH_PREFIX}:") or not is_elementwise:
            continue
        # entries of replicas and of the outer optimizer have a prefix
        kind = entry.rpartition(".")[2]
        if kind in COUNTS:
            _require_number(place, value)
            if isinstance(value, torch.Tensor):
                entries.append((key, entry, value))
        # an entry may be None, as SGD's momentum_buffer was without momentum in earlier torch
        elif value is not None:
            if not isinstance(value, torch.Tensor) or value.shape != parameter.shape:
                raise BadInput(
                    f"{place}: {_describe(value)}: the parameter has {tuple(parameter.shape)}"
                )
            entries.append((key, f"{entry} of {_name(parameter.dtype)}", value))
            if not value.is_floating_point() and parameter.is_floating_point():
                raise BadInput(f"{place}: is {_name(value.dtype)}: must be floating point")
    _require_one_dtype("optimizer", entries)


def _require_number(place: str, value: Any) -> None:
    number = value
    if isinstance(value, torch.Tensor):
        if value.dim() or value.is_complex() or value.dtype == torch.bool:
            raise BadInput(f"{place}: {_describe(value)}: must be one number")
        number = value.item()
    # type, not isinstance: True is an int, too
    if type(number) not in (int, float) or not 0 <= number < math.inf:
        raise BadInput(f"{place}: {show(number)}: must be a number, at least 0")


def _require_one_dtype(where: str, entries: Iterable[tuple[str, str, torch.Tensor]]) -> None:
    """Raise `BadInput` if entries (name, group, tensor) of one group have several dtypes: a state
    of another precision has another one for all.
    """
    first: dict[str, tuple[str, torch.dtype]] = {}
    for name, group, value in entries:
        other, dtype = first.setdefault(group, (name, value.dtype))
        if value.dtype != dtype:
            raise BadInput(f"{where}: {name}: is {_name(value.dtype)}, {other} is {_name(dtype)}")


def check_loss(saved: Mapping[str, Any], loss: Any) -> None:
    """Raise `BadInput` if the state of a loss does not fit the caller's."""
    state = loss.state_dict() if isinstance(loss, nn.Module) else {}
    for name, value in saved.items():
        if name not in state:
            raise BadInput(f"loss: {name}: this pipeline's loss has no such state")
        if _describe(value) != _describe(state[name]):
            raise BadInput(
                f"loss: {name}: is {_describe(value)}, the loss has {_describe(state[name])}"
            )
    missing = [name for name in state if name not in saved]
    # a state of the first format has nothing of the loss
    if saved and missing:
        raise BadInput(f"loss: lacks {list_some(missing)}")


def is_joined(saved: SavedState, names: AbstractSet[str]) -> bool:
    """Return whether a state with a rank's layout has the parts of all ranks, which
    torch.distributed.checkpoint joins; `names`: of the model's weights and buffers.
    """
    if saved.layout is None or not names <= saved.model.keys():
        return False
    # where all stages are on one device, a part of a replica has all names by itself
    places = saved.layout.get("placement")
    return not (isinstance(places, list) and places and places == places[:1] * len(places))


def check_layout(saved: Any, here: Mapping[str, Any] | None) -> None:
    """Raise `BadInput` if a part of a state is another rank's, or of other stages."""
    # as JSON, which writes alike the tuples and lists that a way through files may exchange
    if json.dumps(saved, default=str) != json.dumps(here, default=str):
        why = "a part fits its own rank with the same ranks and stages: load that, or a whole state"
        raise BadInput(f"layout {saved}: this rank has {here}: {why}")


def _get_kind(value: torch.Tensor) -> str:
    """Return the kind of number: complex numbers may be saved as pairs."""
    is_real = value.is_floating_point() or value.is_complex()
    return "real" if is_real else "bool" if value.dtype == torch.bool else "integer"


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{_name(value.dtype)} {tuple(value.shape)}"
    return type(value).__name__


def _name(dtype: torch.dtype) -> str:
    return str(dtype).rpartition(".")[2]


def cast_entries(
    tensors: Mapping[str, torch.Tensor], parameters: Mapping[str, nn.Parameter]
) -> dict[str, torch.Tensor]:
    """Return the optimizer's entries of its parameters' shapes in the parameters' dtypes."""
    cast = {}
    for key, value in tensors.items():
        parameter = parameters.get(key.rpartition("/")[0])
        is_like = parameter is not None and value.dim() and value.is_floating_point()
        cast[key] = value.to(parameter.dtype) if is_like and parameter is not None else value
    return cast


# ---- between loading and the first step


def hand_over(saved: SavedState, model: nn.Module, optimizer: torch.optim.Optimizer) -> SavedState:
    """Put the entries of the caller's parameters into the optimizer, and return the state without
    the weights that are in the model already: it keeps those of heads, and those that the model has
    rounded.
    """
    names = _list_names(model, optimizer)
    callers = set(names.values())
    tensors = {key: t for key, t in saved.optimizer.items() if _is_callers(key, callers)}
    plain = {key: value for key, value in saved.plain.items() if _is_callers(key, callers)}
    import_state(optimizer, names, tensors, copy.deepcopy(plain))
    state = model.state_dict()
    rest = {
        name: value
        for name, value in saved.model.items()
        if name not in state or state[name].dtype != value.dtype
    }
    return saved._replace(model=rest, is_handed_over=True)


def take_back(saved: SavedState, model: nn.Module, optimizer: torch.optim.Optimizer) -> SavedState:
    """Return a state with the caller's entries of now, and without the weights that the caller has
    written since it was handed over.
    """
    if not saved.is_handed_over:
        return saved
    state = model.state_dict()
    rest = {
        name: value
        for name, value in saved.model.items()
        if name not in state or _is_rounded(state[name], value)
    }
    names = _list_names(model, optimizer)
    callers = set(names.values())
    tensors, plain = export_state(optimizer, names)
    # the state of a rank's optimizer, which the caller may have loaded since, has no entries of other
    # ranks' stages; one that the caller has cleared has none
    if (are_joined() or saved.ranks > 1) and (tensors or plain):
        callers = {key.rpartition("/")[0] for key in (*tensors, *plain)}
    others = {key: t for key, t in saved.optimizer.items() if not _is_callers(key, callers)}
    plain_others = {key: v for key, v in saved.plain.items() if not _is_callers(key, callers)}
    return saved._replace(
        model=rest, optimizer={**others, **tensors}, plain={**plain_others, **plain}
    )


def _is_callers(key: str, names: set[str]) -> bool:
    """Return whether an entry is one of the caller's optimizer, and not of a head, a replica or an
    outer optimizer, whose entries have a prefix.
    """
    name, _, entry = key.rpartition("/")
    return "." not in entry and name in names


def _list_names(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[nn.Parameter, str]:
    """Return the names of the parameters that the optimizer has."""
    here = {p for group in optimizer.param_groups for p in group["params"]}
    return {p: name for name, p in model.named_parameters() if p in here}


def _is_rounded(now: torch.Tensor, saved: torch.Tensor) -> bool:
    return now.shape == saved.shape and torch.equal(now, saved.to(now.device, now.dtype))
