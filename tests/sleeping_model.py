"""A model whose stages sleep, and record the times of their forwards and backwards."""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import Any, List

import torch
from torch import nn

from ipu_pipe.data import TensorData

WIDTH, CLASSES, BATCH = 12, 5, 6
SECONDS = (0.004, 0.04)  # of a pass of stage 0 and of stage 1
passes: List[List[int]] = []  # stage, begin and end (perf_counter_ns) of each forward and backward


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, stage: int) -> torch.Tensor:
        ctx.stage = stage
        time.sleep(SECONDS[stage])
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        begin_ns = time.perf_counter_ns()
        time.sleep(SECONDS[ctx.stage])
        passes.append([ctx.stage, begin_ns, time.perf_counter_ns()])
        return gradient, None


def _record_gradient_time(parameter: torch.Tensor) -> None:
    passes[-1][2] = time.perf_counter_ns()


class Stage(nn.Module):
    def __init__(self, stage: int, width: int) -> None:
        super().__init__()
        self.stage, self.fc = stage, nn.Linear(WIDTH, width)
        for parameter in self.fc.parameters():
            parameter.register_post_accumulate_grad_hook(_record_gradient_time)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        begin_ns = time.perf_counter_ns()
        output: torch.Tensor = _Sleep.apply(self.fc(x), self.stage)  # type: ignore[no-untyped-call]
        passes.append([self.stage, begin_ns, time.perf_counter_ns()])
        return output


def make_sleeping_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(OrderedDict(one=Stage(0, WIDTH), two=Stage(1, CLASSES)))


def make_sleeping_data() -> TensorData:
    generator = torch.Generator().manual_seed(0)
    x, y = (
        torch.randn(600, WIDTH, generator=generator),
        torch.randint(CLASSES, (600,), generator=generator),
    )
    return TensorData((x, y), (x[:BATCH], y[:BATCH]), seed=0)
