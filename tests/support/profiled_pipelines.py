"""Traces of PyTorch's profiler made here: pipelines of torch.distributed.pipelining on processes.

The compute of a stage is a sleep inside an operation that the profiler records, so that the same
stage is the slow one on any machine, however busy.

    python -m tests.support.profiled_pipelines FOLDER Schedule1F1B 2 2,12 [slow link, ms]
"""

from __future__ import annotations

import os
import socket
import sys
import time
from pathlib import Path
from typing import Any, List, Sequence

import torch
from torch import distributed as dist
from torch import nn

from tests import forked

WIDTH = 16
MICROBATCHES = 4
UPDATES = 3
# seconds of a unit of a stage's compute, forward; its backward takes as long
UNIT = 0.004


class Slept(torch.autograd.Function):
    """An operation that takes its time, whatever else the machine does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        time.sleep(ctx.seconds)
        return gradient * 1.0, None


class SleepingStage(nn.Module):
    def __init__(self, units: int) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.units = units

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = Slept.apply(self.linear(x), self.units * UNIT)
        return y


def make_traces(
    folder: Path,
    schedule: str,
    ranks: int,
    units: Sequence[int],
    slow_link: float = 0.0,
    shapes: bool = False,
) -> Path:
    """Train on `ranks` processes and write a trace for each. `units`: of each stage's compute;
    `slow_link`: milliseconds that each message takes before its receiver has it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with socket.socket() as free_socket:
        free_socket.bind(("localhost", 0))
        port = free_socket.getsockname()[1]
    forked.fork_ranks(
        ranks,
        _train,
        str(folder),
        schedule,
        ranks,
        list(units),
        slow_link,
        shapes,
        port,
        of=forked.get_fork_server(),
    )
    return folder


def _train(
    rank: int,
    folder: str,
    name: str,
    ranks: int,
    units: List[int],
    slow_link: float,
    shapes: bool,
    port: int,
) -> None:
    from torch.distributed import pipelining
    from torch.distributed.pipelining import schedules

    os.environ.update(
        forked.make_rank_environment(rank, ranks, port), TORCHELASTIC_USE_AGENT_STORE="False"
    )
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    make_schedule = getattr(schedules, name)
    is_v = name in ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")
    own = [rank, 2 * ranks - 1 - rank] if is_v else [*range(rank, len(units), ranks)]
    stages = [
        pipelining.PipelineStage(
            SleepingStage(units[index]), index, len(units), torch.device("cpu")
        )
        for index in own
    ]
    is_multi = issubclass(make_schedule, schedules.PipelineScheduleMulti)
    schedule = make_schedule(
        stages if is_multi else stages[0], MICROBATCHES, loss_fn=nn.functional.mse_loss
    )
    if slow_link:
        _slow_down(slow_link / 1000)
    optimizer = torch.optim.SGD([p for s in stages for p in s.submod.parameters()], lr=0.01)
    x = torch.ones(MICROBATCHES * 2, WIDTH)
    arguments = [x] if any(stage.is_first for stage in stages) else []
    targets = {"target": x} if any(stage.is_last for stage in stages) else {}

    def update() -> None:
        schedule.step(*arguments, **targets)
        optimizer.step()
        optimizer.zero_grad()

    update()
    dist.barrier()
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(
        activities=activities, profile_memory=True, record_shapes=shapes
    ) as profiler:
        for _ in range(UPDATES):
            update()
    profiler.export_chrome_trace(f"{folder}/rank{rank}.json")
    dist.barrier()
    os._exit(0)


def _slow_down(seconds: float) -> None:
    """Let a receive be through only so long after it was posted and sent."""
    post, send_batch = dist.irecv, dist.batch_isend_irecv

    class SlowWork:
        def __init__(self, work: Any) -> None:
            self.work = work

        def wait(self, *arguments: Any) -> Any:
            time.sleep(seconds)
            return self.work.wait(*arguments)

    def batch(operations: List[Any]) -> List[Any]:
        works = send_batch(operations)
        return [SlowWork(w) if o.op is post else w for o, w in zip(operations, works)]

    dist.batch_isend_irecv = batch


if __name__ == "__main__":
    make_traces(
        Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), [int(n) for n in sys.argv[4].split(",")],
        *(float(n) for n in sys.argv[5:]),
    )  # fmt: skip
