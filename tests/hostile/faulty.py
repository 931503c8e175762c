"""Objects of a user's own that misbehave: each raises, returns or does something odd in one of its methods.

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
    """An exception whose text cannot be made."""

    def __str__(self) -> str:
        raise ValueError("no text")

    __repr__ = __str__


class UnprintableBase(BaseException):
    """The same, of no `Exception`."""

    def __str__(self) -> str:
        raise ValueError("no text")

    __repr__ = __str__


class NotText(RuntimeError):
    """An exception whose text is no text."""

    def __str__(self) -> str:
        return 3  # type: ignore[return-value]


class Loop(Exception):
    """An exception that is its own cause."""

    def __init__(self) -> None:
        self.__cause__ = self


def fail(error: BaseException) -> Any:
    """Raise."""
    raise error


def _close(stream: Any) -> None:
    stream.close()


def _recurse(depth: int = 0) -> int:
    return _recurse(depth + 1) + 1


def _nest(depth: int) -> Any:
    nest: Any = 1
    for _ in range(depth):
        nest = [nest]
    return nest


HOW: Dict[str, Callable[[], Any]] = {
    "unprintable": lambda: fail(Unprintable()),
    "unprintable base": lambda: fail(UnprintableBase()),
    "not text": lambda: fail(NotText()),
    "own cause": lambda: fail(Loop()),
    "cancelled": lambda: fail(asyncio.CancelledError()),
    "generator exit": lambda: fail(GeneratorExit()),
    "base": lambda: fail(BaseException("base")),
    "exit": lambda: fail(SystemExit()),
    "exit 0": lambda: sys.exit(0),
    "exit 3": lambda: sys.exit(3),
    "exit text": lambda: sys.exit("over"),
    "exit object": lambda: fail(SystemExit(Unprintable())),
    "exit true": lambda: fail(SystemExit(True)),
    "stop iteration": lambda: fail(StopIteration(3)),
    "memory": lambda: fail(MemoryError()),
    "recursion": _recurse,
    "assertion": lambda: fail(AssertionError()),
    "os": lambda: fail(OSError()),
    "broken pipe": lambda: fail(BrokenPipeError(32, "Broken pipe")),
    "not implemented": lambda: fail(NotImplementedError()),
    "lines": lambda: fail(RuntimeError("\x1b[31mred\nmore\u2028lines\ud800")),
    "empty": lambda: fail(ValueError("\n \n")),
    "long": lambda: fail(ValueError("a" * 100_000)),
    "bad input": lambda: fail(ipu_pipe.BadInput("own: fault")),
    "stdout": lambda: _close(sys.stdout),
    "stderr": lambda: _close(sys.stderr),
    "deep": lambda: _nest(2000),
    "none": lambda: None,
    "tuple": lambda: (torch.zeros(()), 1),
    "number": lambda: 3,
    "text": lambda: "text",
    "nan": lambda: float("nan"),
    "dict": lambda: {3: {1, 2}},
    "object": lambda: object(),
    "tensor": lambda: torch.zeros(3),
}  # fmt: skip


RAISING = list(HOW)[: list(HOW).index("stdout")]


def wrong_signature() -> None:
    """Take no argument, whatever a caller gives."""


class _Counted:
    """Return the right result for the first calls, then misbehave."""

    def __init__(self, how: str, after: int, real: Callable[..., Any]) -> None:
        self._how, self._after, self._real = how, after, real

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._after -= 1
        if self._after >= 0:
            return self._real(*args, **kwargs)
        return wrong_signature(*args, **kwargs) if self._how == "signature" else HOW[self._how]()


def make_callback(where: str, how: str, after: int = 0) -> ipu_pipe.Callback:
    """Return a callback, of whose methods one misbehaves."""
    callback = ipu_pipe.Callback()
    method = (
        wrong_signature if how == "signature" else _Counted(how, after, getattr(callback, where))
    )
    kind = type("Faulty", (ipu_pipe.Callback,), {where: staticmethod(method)})
    faulty: ipu_pipe.Callback = kind()
    return faulty


CHOSEN: List[Any] = ["", "", 0]


def choose(where: str, how: str, after: int) -> None:
    """Choose what `model`, `data`, `loss`, `metric`, `optimizer` and `scheduler` do."""
    CHOSEN[:] = [where, how, after]


def _wrap(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
    where, how, after = CHOSEN
    if where != name:
        return real
    return wrong_signature if how == "signature" else _Counted(how, after, real)


class Model(nn.Module):
    """Two layers."""

    def __init__(self, where: str, how: str, after: int, **others: Any) -> None:
        super().__init__()
        choose(where, how, after)
        if where == "constructor":
            _Counted(how, 0, int)()
        self.a, self.b = nn.Linear(64, 8), nn.Linear(8, 10)
        for name in ("forward", "state_dict", "load_state_dict"):
            if where == name:
                setattr(self, name, _wrap(name, getattr(self, name)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.b(self.a(x.flatten(1)).relu())
        return scores


def make_data(seed: int = 0) -> Any:
    """Return digits with one method that misbehaves."""
    data = load_data("digits", None, 0, subset=64, test_subset=32)
    for name in ("train_batch", "test_batches", "train_batches_per_epoch"):
        setattr(data, name, _wrap(name, getattr(data, name)))
    return data


def loss(output: torch.Tensor, y: torch.Tensor) -> Any:
    """Return the cross-entropy, or what was chosen."""
    global _loss
    if _loss is None:
        _loss = _wrap("loss", nn.functional.cross_entropy)
    return _loss(output, y)


_loss: Any = None
_metric: Any = None


def metric(output: torch.Tensor, y: torch.Tensor) -> Any:
    """Return a mean, or what was chosen."""
    global _metric
    if _metric is None:
        _metric = _wrap("metric", lambda output, y: output.mean())
    return _metric(output, y)


class Optimizer(torch.optim.SGD):
    """SGD whose step misbehaves."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        if CHOSEN[0] == "optimizer":
            _Counted(CHOSEN[1], 0, int)()
        super().__init__(params, lr=lr)
        self.step = _wrap("step", super().step)  # type: ignore[method-assign]
        self._plain = _wrap("optimizer state", dict)

    def state_dict(self) -> Any:
        """Return the state."""
        return super().state_dict()


def make_scheduler(optimizer: torch.optim.Optimizer) -> Any:
    """Return a scheduler that misbehaves."""
    real = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: 1.0)
    where, how, after = CHOSEN
    if where == "empties":
        optimizer.param_groups.clear()
    elif where == "empties later":
        real.step = lambda epoch=None: optimizer.param_groups.clear()  # type: ignore[method-assign]
    elif where == "renames":
        optimizer.param_groups[0].pop("lr")
    elif where == "rate":
        optimizer.param_groups[0]["lr"] = HOW[how]()
    elif where == "scheduler":
        return _Counted(how, 0, int)()
    real.step = _wrap("scheduler step", real.step)  # type: ignore[method-assign]
    return real
