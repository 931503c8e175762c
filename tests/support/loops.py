"""Train one case in two ways: by a loop over `Pipeline`, and by `train` from a config."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Tuple

import torch
from torch import nn

import ipu_pipe
from ipu_pipe.replay.replays import RandomizedReplays
from ipu_pipe.schedule.methods import resolve_method
from ipu_pipe.schedule.timelines import make_schedule
from ipu_pipe.schedule.versions import VersionTable

SAMPLES = 4  # of a microbatch
UPDATES = 12
EPOCH = 6  # updates; `train` drains after each
STAGES = ["2", "5", "8"]
make_sgd = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=1e-4)


class Case(NamedTuple):
    """The arguments of a training by `Pipeline`, which a config has too; `warmup` is in updates."""

    method: str
    microbatches: int = 1
    args: Dict[str, Any] = {}
    warmup: int = 0
    clip: Optional[Tuple[float, str]] = None
    replicas: int = 1
    others: Dict[str, Any] = {}
    stages: Any = STAGES


def make_perceptron(dropout: float = 0.0) -> nn.Sequential:
    """Return a float64 perceptron of 5 layers with a BatchNorm, whose stages begin at `STAGES`."""
    torch.manual_seed(0)
    layers = [nn.Linear(6, 8), nn.Tanh()]
    layers += [nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh()]
    layers += [nn.Linear(8, 8), nn.Dropout(dropout), nn.Tanh()]
    layers += [nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 5)]
    return nn.Sequential(*layers).double()


class Stream:
    """A data source whose microbatch i is drawn from seed i; an epoch has `per_epoch`."""

    def __init__(self, per_epoch: int = 10**9) -> None:
        self.per_epoch = per_epoch

    def train_batches_per_epoch(self, batch_size: int) -> int:
        return self.per_epoch

    def train_batch(
        self, epoch: int, index: int, batch_size: int
    ) -> Tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(epoch * self.per_epoch + index)
        x = torch.randn(batch_size, 6, generator=generator, dtype=torch.float64)
        return x, torch.randint(0, 5, (batch_size,), generator=generator)

    def test_batches(self, batch_size: int) -> Iterator[Any]:
        yield self.train_batch(0, 10**6, 7)


def count_microbatches(case: Case) -> int:
    """Return the microbatches of a step, of all replicas."""
    method, stages = resolve_method(case.method, case.args), count_stages(case)
    if method.rounds is not None:
        return method.rounds.replicas or stages
    return case.microbatches * case.replicas


def count_stages(case: Case) -> int:
    return case.stages if isinstance(case.stages, int) else len(case.stages) + 1


def make_loop_batch(case: Case, k: int) -> Tuple[torch.Tensor, torch.Tensor]:
    """Return batch k: the microbatches that `train` reads, one replica after another."""
    method, count = resolve_method(case.method, case.args), count_microbatches(case)
    numbers = range(k * count, (k + 1) * count)
    if method.history is not None:
        stages = count_stages(case)
        table = VersionTable(make_schedule(method, stages, UPDATES, 1), method, 0)
        draws = RandomizedReplays(table, method.history, EPOCH, 0)
        numbers = draws.list_microbatches(k * stages, (k + 1) * stages)
    elif method.rounds is None and case.replicas > 1:
        N, R = case.microbatches, case.replicas
        numbers = [k * count + i * R + r for r in range(R) for i in range(N)]
    parts = [Stream().train_batch(0, int(i), SAMPLES) for i in numbers]
    return torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])


def compute_rate_share(k: int) -> float:
    """Return the share of the learning rate in update k."""
    return 1.0 / (1 + k / 10)


def train_with_config(
    case: Case, folder: Path, dropout: float = 0.0, **objects: Any
) -> Tuple[nn.Module, List[float]]:
    """Train by `ipu_pipe.train` on the emulator, with a drain after each epoch. Return the model
    and the updates' losses."""
    model, losses = make_perceptron(dropout), []
    args = dict(case.args)
    if case.warmup:
        args["warmup"] = {"epochs": case.warmup / EPOCH}
    keys = {
        "method": case.method,
        "stages": case.stages,
        "gradient_accumulation": case.microbatches,
        "micro_batch_size": SAMPLES,
        "replicas": case.replicas,
        "epochs": UPDATES // EPOCH,
        "precision": "float64",
        "checkpoint": None,
        "metrics": [],
        "log": {"trace": None, "tensorboard": False},
        **case.others,
    }
    if args:
        keys["method_args"] = args
    if case.clip is not None:
        keys["clip"] = {"norm": case.clip[0], "scope": case.clip[1]}

    class Record(ipu_pipe.Callback):
        def on_step(self, moment: ipu_pipe.Moment) -> None:
            losses.append(moment.losses[-1])

    ipu_pipe.train(
        ipu_pipe.configure(**keys),
        folder,
        model=model,
        data=Stream(EPOCH * count_microbatches(case)),  # type: ignore[arg-type]
        loss=nn.functional.cross_entropy,
        optimizer=make_sgd,
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(
            optimizer, compute_rate_share
        ),
        callbacks=[Record()],
        **objects,
        quiet=True,
        overwrite=True,
    )
    return model, losses


def make_case_pipeline(
    case: Case, model: nn.Module, optimizer: Any, **keys: Any
) -> ipu_pipe.Pipeline:
    """Return the pipeline of a case."""
    method = resolve_method(case.method, case.args)
    alone = method.rounds is not None or method.history is not None
    return ipu_pipe.Pipeline(
        model,
        nn.functional.cross_entropy,
        optimizer,
        case.method,
        stages=case.stages,
        microbatches=None if alone else case.microbatches,
        method_args=case.args,
        warmup=case.warmup,
        clip=case.clip,
        replicas=case.replicas,
        **{**case.others, **keys},
    )


class Loop:
    """Run a user's loop over a case, with the drains of `train_with_config`.

    `run(first, last)` trains these updates; `share` takes this process's part of a batch.
    """

    def __init__(
        self,
        case: Case,
        dropout: float = 0.0,
        share: Callable[..., Any] = lambda pipe, x, y: (x, y),
        make_optimizer: Callable[..., Any] = make_sgd,
        **keys: Any,
    ):
        self.case, self._share = case, share
        self.model = make_perceptron(dropout)
        self.optimizer = make_optimizer(self.model.parameters())
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, compute_rate_share)
        self.pipe = make_case_pipeline(case, self.model, self.optimizer, **keys)
        self.losses: List[float] = []
        self.left: List[List[int]] = []

    def run(self, first: int = 0, last: int = UPDATES, drains: bool = True) -> None:
        for k in range(first, last):
            updates = self.pipe.step(*self._share(self.pipe, *make_loop_batch(self.case, k)))
            self.scheduler.step()
            self.left.append([update.index for update in updates])
            if drains and (k + 1) % EPOCH == 0:
                updates += self.pipe.drain()
            self.losses += [update.loss for update in updates]

    def load(self, state: Any, scheduler: Any) -> None:
        """Load a state of the pipeline and of the scheduler, and the scheduler's rate."""
        self.pipe.load_state_dict(state)
        self.scheduler.load_state_dict(scheduler)
        for group in self.optimizer.param_groups:
            group["lr"] = self.scheduler.get_last_lr()[0]

    def close(self) -> nn.Module:
        self.losses += [update.loss for update in self.pipe.close()]
        return self.model


def take_share(
    pipe: ipu_pipe.Pipeline, x: torch.Tensor, y: torch.Tensor
) -> Tuple[torch.Tensor, torch.Tensor]:
    """Return this replica's part of a batch."""
    return x.chunk(pipe.replicas)[pipe.replica], y.chunk(pipe.replicas)[pipe.replica]
