"""Metrics of an evaluation, by name or of the user's own: sums over batches, and the values
computed from them.

A batch adds sums (of right answers, of squares), so the result does not depend on the batch size or
the number of processes. A user's function returns a value per batch, which is averaged over
samples. An object with `update(output, y)` and `compute()`, as in torchmetrics, has its own sums.
"""

from __future__ import annotations

import copy
import functools
import inspect
import math
import re
from typing import Any, Callable, Mapping, NamedTuple, Sequence

import torch

from ipu_pipe.config.sections import Entry
from ipu_pipe.errors import BadInput, raise_faults
from ipu_pipe.job.factories import call_entry, collect_results, resolve_listed
from ipu_pipe.model.loss import count_right
from ipu_pipe.text import describe_kind, find_nearest, show

# (outputs, labels, samples) -> sums (width,)
SumBatch = Callable[[Any, Any, int], torch.Tensor]
ACCURACY = "accuracy"


def prefers_greater(metric: str) -> bool:
    """Return whether greater values of a metric are better, from the beginning of its name."""
    return metric.startswith((ACCURACY, "top", "r2"))


class Metric(NamedTuple):
    """A metric: `make_sums()` returns the `sum_count` empty sums of an evaluation, and
    `compute(sums)` their value.

    The sums may be added up over processes before. The value is None if it is not defined, such as
    a share of no samples.
    """

    name: str
    sum_count: int
    make_sums: Callable[[], "MetricSums"]
    compute: Callable[[Sequence[float]], float | None]


class MetricSums:
    """One evaluation's sums of one metric, or of the loss."""

    def __init__(self, sum_batch: SumBatch, width: int) -> None:
        self._sum_batch = sum_batch
        # float32 would stop counting at 2^24 labels
        self._sums = torch.zeros(width, dtype=torch.float64)

    def add(self, output: Any, y: Any, samples: int) -> None:
        """Add a batch, on its own device: reading a batch's numbers would make the host wait for a
        GPU.
        """
        sums = self._sum_batch(output, y, samples)
        self._sums = self._sums.to(sums.device) + sums

    def sums(self) -> torch.Tensor:
        """Return the sums of all batches  # (width,)"""
        return self._sums


class _ObjectSums(MetricSums):
    """The sums of an object with `update` and `compute`; it is copied, so that each of several
    blocks has its own.
    """

    def __init__(self, name: str, metric: Any) -> None:
        self._name = name
        self._metric = copy.deepcopy(metric)
        self._batches = 0
        # the user's object may have gathered something before, which a copy has too
        if hasattr(self._metric, "reset"):
            self._metric.reset()

    def add(self, output: Any, y: Any, samples: int) -> None:
        self._metric.update(output, y)
        self._batches += 1

    def sums(self) -> torch.Tensor:
        # several processes each have a value: their mean counts, over those that saw a batch
        if not self._batches:
            return torch.zeros(2, dtype=torch.float64)
        value = _read_number(f"{self._name}.compute()", self._metric.compute(), "one number")
        return torch.stack([value, torch.ones_like(value)])


# ---- metrics of the library


def _sum_answers(output: Any, y: Any, samples: int, among: int = 1) -> torch.Tensor:
    """Return right answers, counted labels, and batches that have none  # (3,)"""
    answers = count_right(output, y, among)
    if answers is None:
        device = output.device if isinstance(output, torch.Tensor) else "cpu"
        return torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64, device=device)
    return torch.cat([answers.double(), answers.new_zeros(1).double()])


def _compute_share(sums: Sequence[float]) -> float | None:
    right, counted, without = sums
    # a share without some of the batches would look like that of the set
    return right / counted if counted and not without else None


def _sum_errors(output: Any, y: Any, samples: int, name: str) -> torch.Tensor:
    """Return the number of values, the squared and the absolute differences, the labels, and their squares  # (5,)

    A last dimension of 1 may be on outputs or labels alone.
    """
    shapes = [
        tuple(t.shape) if isinstance(t, torch.Tensor) else type(t).__name__ for t in (output, y)
    ]
    alike = [
        shape[:-1] if isinstance(shape, tuple) and shape[-1:] == (1,) else shape for shape in shapes
    ]
    if (
        isinstance(shapes[0], str)
        or isinstance(shapes[1], str)
        or (shapes[0] != shapes[1] and alike[0] != alike[1])
    ):
        raise BadInput(
            f"metrics: {name}: outputs {shapes[0]} and labels {shapes[1]}: must be tensors of one "
            f"shape"
        )
    # float64, since r2 is a small difference of large sums
    labels = y.detach().double().reshape(-1)
    errors = output.detach().double().reshape(-1) - labels
    count = errors.new_tensor(float(errors.numel()))
    return torch.stack(
        [count, errors.square().sum(), errors.abs().sum(), labels.sum(), labels.square().sum()]
    )


def _compute_r2(sums: Sequence[float]) -> float | None:
    """Return 1 - (residual sum of squares) / (total sum of squares about the mean)."""
    count, residual, _, total, squares = sums
    # not by differences from the mean, which no batch knows; float64 bears the cancellation
    about_mean = squares - total * total / count if count else 0.0
    return 1 - residual / about_mean if about_mean > 0 else None


# The value of each metric of errors, from the sums of `_sum_errors`.
_ERRORS: dict[str, Callable[[Sequence[float]], float | None]] = {
    "mse": lambda sums: sums[1] / sums[0] if sums[0] else None,
    "rmse": lambda sums: math.sqrt(sums[1] / sums[0]) if sums[0] else None,
    "mae": lambda sums: sums[2] / sums[0] if sums[0] else None,
    "r2": _compute_r2,
}


# one object a name: two of one name differ by their functions, and `in DEFAULT` must find it
@functools.lru_cache(maxsize=None)
def _find_metric(name: str) -> Metric:
    """Return the library's metric of that name."""
    if name in _ERRORS:
        return Metric(
            name, 5, lambda: MetricSums(functools.partial(_sum_errors, name=name), 5), _ERRORS[name]
        )
    top = re.fullmatch(r"top([1-9]\d{0,8})", name)
    if top is None and name != ACCURACY:
        near = find_nearest(name, (ACCURACY, *_ERRORS))
        known = (
            f"must be one of {', '.join((ACCURACY, *_ERRORS))}, top5 (or another number), or "
            f"an import string module:name"
        )
        raise BadInput(f"metrics: {show(name)}: {f'nearest is {near}' if near else known}")
    sum_answers = functools.partial(_sum_answers, among=int(top.group(1)) if top else 1)
    return Metric(name, 3, lambda: MetricSums(sum_answers, 3), _compute_share)


DEFAULT = (_find_metric(ACCURACY),)


# ---- the user's own


def _read_number(name: str, returned: Any, expected: str) -> torch.Tensor:
    """Return the value that a user's metric has returned as a tensor in float64  # ()

    Raise `BadInput` with what is `expected` if it is not one number.
    """
    try:
        # detached: a mean of values that kept their graphs would keep all batches
        value = torch.as_tensor(returned, dtype=torch.float64).detach()
    except (TypeError, ValueError, RuntimeError) as error:
        raise BadInput(
            f"metrics: {name}: returned {describe_kind(returned)}: must return {expected}"
        ) from error
    if value.numel() != 1:
        raise BadInput(
            f"metrics: {name}: returned a tensor of shape {tuple(value.shape)}: must return "
            f"{expected}"
        )
    return value.reshape(())


def _make_own_metric(name: str, metric: Any) -> Metric:
    """Return the metric of a function (output, y) -> value, or of an object with update and
    compute.
    """
    if hasattr(metric, "update") and hasattr(metric, "compute"):
        return Metric(
            name,
            2,
            lambda: _ObjectSums(name, metric),
            lambda sums: sums[0] / sums[1] if sums[1] else None,
        )

    def sum_batch(output: Any, y: Any, samples: int) -> torch.Tensor:
        value = _read_number(name, metric(output, y), "one number per batch")
        return torch.stack([value.new_tensor(float(samples)), value * samples])

    return Metric(
        name,
        2,
        lambda: MetricSums(sum_batch, 2),
        lambda sums: sums[1] / sums[0] if sums[0] else None,
    )


def _make_metric(value: Any, name: str | None) -> Metric:
    """Return the metric of a name, an import string, an `Entry`, a function or an object."""
    if isinstance(value, str) and ":" not in value:
        return _find_metric(value)
    if isinstance(value, (str, Entry)):
        metric, args, place = resolve_listed(value, "metrics")
        # calling it makes the metric
        if args or inspect.isclass(metric):
            metric = call_entry(metric, args, place)
        value = metric
        name = place.rpartition(":")[2].rpartition(".")[2]
    # a class has these functions, too, but gathers nothing
    has_sums = hasattr(value, "update") and hasattr(value, "compute") and not inspect.isclass(value)
    if not has_sums and (
        not callable(value) or inspect.isclass(value) or isinstance(value, Mapping)
    ):
        allowed = "must be a name, a function (output, y), or an object with update and compute"
        raise BadInput(f"metrics: {describe_kind(value)}: {allowed}")
    return _make_own_metric(name or str(getattr(value, "__name__", type(value).__name__)), value)


def make_metrics(chosen: Sequence[Any] | Mapping[str, Any]) -> tuple[Metric, ...]:
    """Return the metrics of a list of names, import strings, Entries, functions and objects, or of
    a mapping from names to them.

    Raise `BadInput` with every fault found.
    """
    pairs = (
        list(chosen.items()) if isinstance(chosen, Mapping) else [(None, value) for value in chosen]
    )
    metrics: list[Metric] = collect_results(pairs, lambda pair: _make_metric(pair[1], pair[0]))
    names = [metric.name for metric in metrics]
    faults = [
        f"metrics: {name}: appears twice" for name in dict.fromkeys(names) if names.count(name) > 1
    ]
    faults += ["metrics: loss: is always there"] if "loss" in names else []
    # names become keys of the run's files
    wrong = [name for name in names if not (isinstance(name, str) and re.fullmatch(r"\w+", name))]
    faults += [f"metrics: {show(name)}: must be letters, digits and _" for name in wrong]
    raise_faults(faults)
    return tuple(metrics)
