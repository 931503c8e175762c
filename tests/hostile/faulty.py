"""User objects that misbehave: each raises, returns or does something odd in one of its methods.

The config names a function here and the fault: `{entry: tests.hostile.faulty:make_callback, args: {where: on_step, how: ...}}`.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any, Callable, Dict, List

import torch
from torch import nn

import ipu_pipe
from ipu_pipe.data import load_data


class Unprintable(Exception):
    """An exception whose text cannot be formatted."""

    def __str__(self) -> str:
        raise ValueError("no text")

    __repr__ = __str__


class NotText(RuntimeError):
    """An exception whose `str` is not a text."""

    def __str__(self) -> str:
        return 3  # type: ignore[return-value]


class Loop(Exception):
    """An exception that is its own cause."""

    def __init__(self) -> None:
        self.__cause__ = self


# how -> the exception that is raised
RAISING: Dict[str, Callable[[], BaseException]] = {
    "unprintable": Unprintable, "not text": NotText, "own cause": Loop, "cancelled": asyncio.CancelledError,
    "generator exit": GeneratorExit, "base": lambda: BaseException("base"), "exit": SystemExit,
    "exit 0": lambda: SystemExit(0), "exit 3": lambda: SystemExit(3), "exit text": lambda: SystemExit("over"),
    "exit object": lambda: SystemExit(Unprintable()), "exit true": lambda: SystemExit(True),
    "stop iteration": lambda: StopIteration(3), "memory": MemoryError, "recursion": lambda: _recurse(),
    "assertion": AssertionError, "os": OSError, "broken pipe": lambda: BrokenPipeError(32, "Broken pipe"),
    "not implemented": NotImplementedError,
    "lines": lambda: RuntimeError("\x1b[31mred\nmore\u2028lines\ud800"), "empty": lambda: ValueError("\n \n"),
    "long": lambda: ValueError("a" * 100_000), "bad input": lambda: ipu_pipe.BadInput("own: fault"),
}  # fmt: skip
# how -> what is returned instead of the result
RETURNED: Dict[str, Callable[[], Any]] = {
    "stdout": lambda: sys.stdout.close(), "stderr": lambda: sys.stderr.close(), "deep": lambda: _nest(2000),
    "none": lambda: None, "tuple": lambda: (torch.zeros(()), 1), "number": lambda: 3, "text": lambda: "text",
    "nan": lambda: float("nan"), "dict": lambda: {3: {1, 2}}, "object": object, "tensor": lambda: torch.zeros(3),
}  # fmt: skip
HOW = [*RAISING, *RETURNED]


def misbehave(how: str) -> Any:
    """Raise or return something odd."""
    if how in RAISING:
        raise RAISING[how]()
    return RETURNED[how]()


def _recurse() -> Any:
    return _recurse() + 1


def _nest(depth: int) -> Any:
    nest: Any = 1
    for _ in range(depth):
        nest = [nest]
    return nest


def take_no_argument() -> None:
    """Take no argument, so that every call with one fails."""


class _LateFault:
    """Return the real result for the first `after` calls, then misbehave."""

    def __init__(self, how: str, after: int, real: Callable[..., Any]) -> None:
        self._how, self._after, self._real = how, after, real

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._after -= 1
        if self._after >= 0:
            return self._real(*args, **kwargs)
        return (
            take_no_argument(*args, **kwargs) if self._how == "signature" else misbehave(self._how)
        )


def make_callback(where: str, how: str, after: int = 0) -> ipu_pipe.Callback:
    """Return a callback whose method `where` misbehaves after `after` calls."""
    callback = ipu_pipe.Callback()
    method = (
        take_no_argument if how == "signature" else _LateFault(how, after, getattr(callback, where))
    )
    kind = type("Faulty", (ipu_pipe.Callback,), {where: staticmethod(method)})
    faulty: ipu_pipe.Callback = kind()
    return faulty


CHOSEN: List[Any] = ["", "", 0]


def set_fault(where: str, how: str, after: int) -> None:
    """Set the one fault of `Model`, `make_faulty_data`, `loss`, `metric`, `Optimizer` and `make_scheduler`."""
    global _loss, _metric
    CHOSEN[:] = [where, how, after]
    _loss = _metric = None


def _wrap(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
    where, how, after = CHOSEN
    if where != name:
        return real
    return take_no_argument if how == "signature" else _LateFault(how, after, real)


class Model(nn.Module):
    """Two layers with at most one misbehaving method."""

    def __init__(self, where: str, how: str, after: int, **others: Any) -> None:
        super().__init__()
        set_fault(where, how, after)
        if where == "constructor":
            _LateFault(how, 0, int)()
        self.a, self.b = nn.Linear(64, 8), nn.Linear(8, 10)
        for name in ("forward", "state_dict", "load_state_dict"):
            if where == name:
                setattr(self, name, _wrap(name, getattr(self, name)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.b(self.a(x.flatten(1)).relu())
        return scores


def make_faulty_data(seed: int = 0) -> Any:
    """Return digits whose methods may misbehave."""
    data = load_data("digits", None, 0, subset=64, test_subset=32)
    for name in ("train_batch", "test_batches", "train_batches_per_epoch"):
        setattr(data, name, _wrap(name, getattr(data, name)))
    return data


def loss(output: torch.Tensor, y: torch.Tensor) -> Any:
    """Return the cross-entropy, or misbehave."""
    global _loss
    if _loss is None:
        _loss = _wrap("loss", nn.functional.cross_entropy)
    return _loss(output, y)


_loss: Any = None
_metric: Any = None


def metric(output: torch.Tensor, y: torch.Tensor) -> Any:
    """Return a mean, or misbehave."""
    global _metric
    if _metric is None:
        _metric = _wrap("metric", lambda output, y: output.mean())
    return _metric(output, y)


class Optimizer(torch.optim.SGD):
    """SGD whose step may misbehave."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        if CHOSEN[0] == "optimizer":
            _LateFault(CHOSEN[1], 0, int)()
        super().__init__(params, lr=lr)
        self.step = _wrap("step", super().step)  # type: ignore[method-assign]


def make_scheduler(optimizer: torch.optim.Optimizer) -> Any:
    """Return a scheduler that may misbehave."""
    real = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: 1.0)
    where, how, after = CHOSEN
    if where == "empties":
        optimizer.param_groups.clear()
    elif where == "empties later":
        real.step = lambda epoch=None: optimizer.param_groups.clear()  # type: ignore[method-assign]
    elif where == "renames":
        optimizer.param_groups[0].pop("lr")
    elif where == "rate":
        optimizer.param_groups[0]["lr"] = misbehave(how)
    elif where == "scheduler":
        return _LateFault(how, 0, int)()
    real.step = _wrap("scheduler step", real.step)  # type: ignore[method-assign]
    return real
