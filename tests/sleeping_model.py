"""A model whose stages sleep, with timers of its own inside its forward and backward."""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import Any, List, Tuple

import torch
from torch import nn

from ipu_pipe.data import TensorData

WIDTH, CLASSES, BATCH = 12, 5, 6
SECONDS = (0.002, 0.02)  # of a pass of stage 0 and of stage 1
slept: List[Tuple[int, int, int]] = []  # stage, begin and end (perf_counter_ns) of each pass


class _Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, stage: int) -> torch.Tensor:
        ctx.stage = stage
        _sleep(stage)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        _sleep(ctx.stage)
        return gradient, None


def _sleep(stage: int) -> None:
    begun = time.perf_counter_ns()
    time.sleep(SECONDS[stage])
    slept.append((stage, begun, time.perf_counter_ns()))


class Sleeping(nn.Module):
    def __init__(self, stage: int) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Slow.apply(x, self.stage)  # type: ignore[no-any-return,no-untyped-call]


def model() -> nn.Module:
    return nn.Sequential(
        OrderedDict(fc1=nn.Linear(WIDTH, WIDTH), sleep1=Sleeping(0), fc2=nn.Linear(WIDTH, CLASSES), sleep2=Sleeping(1))
    )


def data() -> TensorData:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(600, WIDTH, generator=generator), torch.randint(CLASSES, (600,), generator=generator)
    return TensorData((x, y), (x[:BATCH], y[:BATCH]), seed=0)
