"""Metrics of an evaluation, by name or of the user's own: what batches add, and what the sums over them come to.

What a batch adds are sums (of right answers, of squares), so that batches of any size, and processes, come to the same as all
samples at once. A function of the user's own gives a value a batch, averaged by samples; an object with `update(output, y)` and
`compute()`, as those of torchmetrics are, keeps its own sums.
"""

from __future__ import annotations

import copy
import functools
import inspect
import math
import re
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple, Union

import torch
from torch import nn

from ipu_pipe.config.sections import Entry
from ipu_pipe.errors import BadInput
from ipu_pipe.job.import_strings import call_entry, resolve_entry
from ipu_pipe.model.asking import labels_of
from ipu_pipe.text import describe_kind, find_nearest, show

OfBatch = Callable[[Any, Any, int], torch.Tensor]  # outputs, labels, samples -> sums (width,)
IGNORED = -100  # the label that cross-entropy leaves out
ACCURACY = "accuracy"


class Metric(NamedTuple):
    """`begin()` gives what one evaluation adds to; its sums (width,), over all processes, are `value`'s, None where there is
    none."""

    name: str
    width: int
    begin: Callable[[], "Counting"]
    value: Callable[[Sequence[float]], Optional[float]]


class Counting:
    """One evaluation's sums of one metric, of batches that add up."""

    def __init__(self, of_batch: OfBatch, width: int) -> None:
        self._of_batch, self._sums = of_batch, torch.zeros(width, dtype=torch.float64)

    def add(self, output: Any, y: Any, samples: int) -> None:
        """A batch's outputs and labels; all stays on its device, since to read a batch's numbers would hold a GPU up."""
        found = self._of_batch(output, y, samples)
        self._sums = self._sums.to(found.device) + found

    def sums(self) -> torch.Tensor:
        """(width,) of all batches."""
        return self._sums


class _KeptByObject(Counting):
    """The same of an object that adds up by itself; its copy, so that each of several blocks has its own."""

    def __init__(self, own: Any) -> None:
        self._own, self._batches = copy.deepcopy(own), 0
        if hasattr(self._own, "reset"):
            self._own.reset()

    def add(self, output: Any, y: Any, samples: int) -> None:
        self._own.update(output, y)
        self._batches += 1

    def sums(self) -> torch.Tensor:
        value = float(self._own.compute()) if self._batches else 0.0
        return torch.tensor([value, float(self._batches > 0)], dtype=torch.float64)


# ---- what the library knows by name


def count_right(output: Any, y: Any, among: int = 1) -> Optional[torch.Tensor]:
    """(right, counted): labels that are `among` so many greatest outputs, and labels that are not -100 (which cross-entropy
    leaves out). None unless outputs are (b, classes, ...) and labels whole numbers (b, ...)."""
    y = labels_of(y)
    if not isinstance(output, torch.Tensor) or not isinstance(y, torch.Tensor) or y.is_floating_point():
        return None
    if output.dim() != y.dim() + 1 or output.shape[0] != y.shape[0] or output.shape[2:] != y.shape[1:]:
        return None
    if among == 1:
        right = output.detach().argmax(dim=1) == y
    else:
        found = output.detach().topk(min(among, output.shape[1]), dim=1).indices
        right = (found == y.unsqueeze(1)).any(dim=1)
    return torch.stack([right.sum(), (y != IGNORED).sum()])


def _answers(output: Any, y: Any, among: int) -> torch.Tensor:
    """Right, counted, batches without answers."""
    found = count_right(output, y, among)
    if found is None:
        device = output.device if isinstance(output, torch.Tensor) else "cpu"
        return torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64, device=device)
    return torch.cat([found.double(), found.new_zeros(1).double()])


def _share(sums: Sequence[float]) -> Optional[float]:
    right, counted, without = sums
    return right / counted if counted and not without else None


def _differences(name: str, output: Any, y: Any) -> Tuple[torch.Tensor, torch.Tensor]:
    """Outputs less labels and labels, flat and in float64; a last dimension of 1 may be on one of them alone."""
    shapes = [tuple(t.shape) if isinstance(t, torch.Tensor) else type(t).__name__ for t in (output, y)]
    alike = [shape[:-1] if isinstance(shape, tuple) and shape[-1:] == (1,) else shape for shape in shapes]
    if isinstance(shapes[0], str) or isinstance(shapes[1], str) or (shapes[0] != shapes[1] and alike[0] != alike[1]):
        raise BadInput(f"metrics: {name}: outputs {shapes[0]} and labels {shapes[1]}: must be tensors of one shape")
    labels = y.detach().double().reshape(-1)
    return output.detach().double().reshape(-1) - labels, labels


def _squares(output: Any, y: Any, samples: int) -> torch.Tensor:
    """Number of values, squared differences."""
    apart, _ = _differences("mse", output, y)
    return torch.stack([apart.new_tensor(float(apart.numel())), apart.square().sum()])


def _absolutes(output: Any, y: Any, samples: int) -> torch.Tensor:
    apart, _ = _differences("mae", output, y)
    return torch.stack([apart.new_tensor(float(apart.numel())), apart.abs().sum()])


def _determination(output: Any, y: Any, samples: int) -> torch.Tensor:
    """Number of values, squared differences, labels, their squares."""
    apart, labels = _differences("r2", output, y)
    count = apart.new_tensor(float(apart.numel()))
    return torch.stack([count, apart.square().sum(), labels.sum(), labels.square().sum()])


def _mean(sums: Sequence[float]) -> Optional[float]:
    return sums[1] / sums[0] if sums[0] else None


def _root(sums: Sequence[float]) -> Optional[float]:
    return math.sqrt(sums[1] / sums[0]) if sums[0] else None


def _r2(sums: Sequence[float]) -> Optional[float]:
    """1 - (residual sum of squares) / (total sum of squares about the mean)."""
    count, residual, total, squares = sums
    about = squares - total * total / count if count else 0.0
    return 1 - residual / about if about > 0 else None


_NAMED: Dict[str, Tuple[OfBatch, int, Callable[[Sequence[float]], Optional[float]]]] = {
    ACCURACY: (lambda output, y, samples: _answers(output, y, 1), 3, _share),
    "mse": (_squares, 2, _mean),
    "rmse": (_squares, 2, _root),
    "mae": (_absolutes, 2, _mean),
    "r2": (_determination, 4, _r2),
}
NAMES = (*_NAMED, "top5 (or another number)")


@functools.lru_cache(maxsize=None)
def named_metric(name: str) -> Metric:
    """The library's metric of that name. Raises BadInput."""
    among = re.fullmatch(r"top([1-9]\d{0,8})", name)
    if among:
        most = int(among.group(1))
        return _adding(name, lambda output, y, samples: _answers(output, y, most), 3, _share)
    if name not in _NAMED:
        near = find_nearest(name, list(_NAMED), 1)
        allowed = (
            f"nearest is {near}" if near else f"must be one of {', '.join(NAMES)}, or an import string module:name"
        )
        raise BadInput(f"metrics: {show(name)}: {allowed}")
    return _adding(name, *_NAMED[name])


def _adding(name: str, of_batch: OfBatch, width: int, value: Callable[[Sequence[float]], Optional[float]]) -> Metric:
    return Metric(name, width, lambda: Counting(of_batch, width), value)


# ---- the user's own


def _own(name: str, metric: Any) -> Metric:
    """Of a function (output, y) -> value, or an object with update and compute."""
    if hasattr(metric, "update") and hasattr(metric, "compute"):
        return Metric(name, 2, lambda: _KeptByObject(metric), _kept)

    def of_batch(output: Any, y: Any, samples: int) -> torch.Tensor:
        value = metric(output, y)
        if not isinstance(value, torch.Tensor):
            value = torch.tensor(float(value), dtype=torch.float64)
        if value.numel() != 1:
            raise BadInput(
                f"metrics: {name}: gave a tensor of shape {tuple(value.shape)}, must give one number a batch"
            )
        value = value.detach().double().reshape(())
        return torch.stack([value.new_tensor(float(samples)), value * samples])

    return Metric(name, 2, lambda: Counting(of_batch, 2), _mean)


def _kept(sums: Sequence[float]) -> Optional[float]:
    return sums[0] / sums[1] if sums[1] else None


def load_metric(entry: str, args: Mapping[str, Any]) -> Metric:
    """What an import string names: a class is made into an object, as is what arguments are given for."""
    found: Any = resolve_entry(entry, "metrics")
    if args or inspect.isclass(found):
        found = call_entry(found, args, f"metrics.{entry}")
    return make_metric(found, entry.rpartition(":")[2].rpartition(".")[2])


def make_metric(value: Any, name: Optional[str] = None) -> Metric:
    """A metric from Python: a name, an import string, a function or an object. Raises BadInput."""
    if isinstance(value, str):
        return load_metric(value, {}) if ":" in value else named_metric(value)
    keeps = hasattr(value, "update") and hasattr(value, "compute") and not inspect.isclass(value)
    if not keeps and (not callable(value) or inspect.isclass(value) or isinstance(value, Mapping)):
        raise BadInput(
            f"metrics: {describe_kind(value)}: must be a name, a function (output, y), or an object with update and compute"
        )
    return _own(name or str(getattr(value, "__name__", type(value).__name__)), value)


def make_metrics(chosen: Union[Sequence[Any], Mapping[str, Any]]) -> Tuple[Metric, ...]:
    """The metrics of a list of names, import strings, Entries, functions and objects, or of a mapping that names functions
    and objects. Raises BadInput, a line each."""
    found: List[Metric] = []
    faults: List[str] = []
    pairs = list(chosen.items()) if isinstance(chosen, Mapping) else [(None, value) for value in chosen]
    for name, value in pairs:
        try:
            if isinstance(value, Entry):
                found.append(load_metric(value.entry, value.args))
            else:
                found.append(make_metric(value, name))
        except BadInput as error:
            faults += error.faults
    names = [metric.name for metric in found]
    faults += [f"metrics: {name}: is there twice" for name in dict.fromkeys(names) if names.count(name) > 1]
    faults += [f"metrics: {name}: is always there" for name in names if name == "loss"]
    faults += [
        f"metrics: {show(name)}: must be letters, digits and _"
        for name in names
        if not (isinstance(name, str) and re.fullmatch(r"\w+", name))
    ]
    if faults:
        raise BadInput(faults)
    return tuple(found)


DEFAULT = (named_metric(ACCURACY),)


def is_cross_entropy(loss: Any) -> bool:
    """Whether a loss is cross-entropy as a mean over all labels but -100."""
    if isinstance(loss, nn.CrossEntropyLoss):
        return loss.weight is None and loss.ignore_index == IGNORED
    return loss is nn.functional.cross_entropy
