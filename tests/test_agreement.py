"""Ranks with different models are refused before any tensor is sent, with the first difference."""

from __future__ import annotations

import errno
import functools
from pathlib import Path
from typing import Any, Callable, Dict, Optional

import pytest
import torch
from torch import nn

import ipu_pipe
from ipu_pipe.backends.ranks import run_on_main
from ipu_pipe.errors import BadInput, RunFault
from ipu_pipe.run import loop
from ipu_pipe.store import checkpoint
from tests.support.processes import run_in_group, wait_for_file
from tests.support.runs import assert_same, list_faults, needs_processes

pytestmark = needs_processes
SGD = functools.partial(torch.optim.SGD, lr=0.1)


class Net(nn.Module):
    """Three layers; the caller chooses the name of the second and the width between the first two."""

    def __init__(self, name: str = "b", width: int = 6) -> None:
        super().__init__()
        self.a = nn.Linear(6, width)
        self.add_module(name, nn.Linear(width, 6))
        self.c = nn.Linear(6, 3)
        self.register_buffer("scale", torch.ones(()), persistent=False)

    def forward(self, x: torch.Tensor) -> Any:
        a, b, c = self.children()
        return c(torch.tanh(b(torch.tanh(a(x) * self.scale))))


def make_net_arguments(model: nn.Module, **keys: Any) -> Dict[str, Any]:
    torch.manual_seed(1)
    settings: Dict[str, Any] = {
        "method": "gpipe", "steps": 2, "gradient_accumulation": 2, "stages": ["c"], "log": {"tensorboard": False},
        "backend": {"name": "distributed", "deadline": 60}, **keys,
    }  # fmt: skip
    batches = [(torch.randn(4, 6), torch.arange(4) % 3) for _ in range(4)]
    return {
        "config": ipu_pipe.configure(**settings), "model": model, "data": ipu_pipe.from_loader(batches, batches[:1]),
        "optimizer": SGD, "quiet": True,
    }  # fmt: skip


def change_one_value(model: nn.Module) -> None:
    with torch.no_grad():
        model.c.bias[0] += 1e-6  # type: ignore[index, operator]


def freeze_first_weight(model: nn.Module) -> None:
    model.a.weight.requires_grad_(False)  # type: ignore[union-attr, operator]


# difference -> (function that changes a model or returns another; beginning of the line; value on each rank)
DIFFERENCES: Dict[str, Any] = {
    "shape": (lambda model: Net(width=5), "model: a.weight: shape: ", ("(6, 6)", "(5, 6)")),
    "dtype": (nn.Module.double, "model: a.weight: dtype: ", ("torch.float32", "torch.float64")),
    "requires_grad": (freeze_first_weight, "model: a.weight: requires_grad: ", ("True", "False")),
    "name": (lambda model: Net("d"), "model: b.weight: shape: ", ("(6, 6)", "nothing")),
    "mode": (lambda model: model.a.eval() and None, "model: a: training: ", ("True", "False")),
    "weight": (change_one_value, "model: c.bias: values", ()),
    "buffer": (lambda model: model.scale.mul_(2) and None, "model: scale: values", ()),
}


def make_differing_model(
    rank: int, change: Callable[[nn.Module], Optional[nn.Module]]
) -> nn.Module:
    """Make the model of a rank; that of the last rank is changed."""
    torch.manual_seed(0)
    model = Net()
    if rank == torch.distributed.get_world_size() - 1:
        model = change(model) or model  # type: ignore[assignment]
    return model


def check_refusals(rank: int, folder: Path, keys: Dict[str, Any]) -> None:
    """Check as one rank that every difference is refused with the right line."""
    last = torch.distributed.get_world_size() - 1
    for name, (change, begin, values) in DIFFERENCES.items():
        model = make_differing_model(rank, change)
        (fault,) = list_faults(
            ipu_pipe.train, out=folder / name, **make_net_arguments(model, **keys)
        )
        assert fault.startswith(begin) and f"rank {last} has " in fault, fault
        assert all(value in fault for value in values), fault
    loss = nn.CrossEntropyLoss(torch.ones(3) * (rank + 1))
    (fault,) = list_faults(
        ipu_pipe.train, out=folder / "loss", loss=loss, **make_net_arguments(Net(), **keys)
    )
    assert fault.startswith("loss: weight: values")


@pytest.mark.parametrize(
    "ranks, keys", [(2, {}), pytest.param(4, {"replicas": 2}, marks=pytest.mark.slow)]
)
def test_ranks_with_other_models_are_refused_by_the_first_difference(
    ranks: int, keys: Dict[str, Any], tmp_path: Path
) -> None:
    """Story: other shapes ended in gloo's abort ("rank 1 is lost"), and with other values each stage trained its rank's."""
    run_in_group(ranks, check_refusals, tmp_path, keys)


def train_again(rank: int, folder: Path) -> None:
    """Train twice with one model, and resume with values that the checkpoint replaces."""
    torch.manual_seed(0)
    model = Net()
    for name in ("first", "second"):
        ipu_pipe.train(out=folder / name, **make_net_arguments(model))
    torch.manual_seed(rank)
    resumed = Net()
    ipu_pipe.train(out=folder / "second", resume=True, **make_net_arguments(resumed, steps=4))
    ipu_pipe.train(out=folder / "second", resume=True, **make_net_arguments(model, steps=6))
    torch.save(model.state_dict(), folder / f"{rank}.pt")


def test_a_trained_model_and_values_that_a_checkpoint_replaces_agree(tmp_path: Path) -> None:
    run_in_group(2, train_again, tmp_path)
    assert_same(*(torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1)))


class Unsaved(ipu_pipe.Callback):
    """A callback whose state no checkpoint can hold."""

    def state(self) -> Any:
        return 1 / 0


LINES = {"tensorboard": False, "every": 1}


class Failing(ipu_pipe.Callback):
    """A callback that fails with a line of metrics.jsonl."""

    def on_log(self, moment: Any) -> None:
        raise ZeroDivisionError("division by zero")


def refuse_to_write(*args: Any, **keys: Any) -> Any:
    raise OSError(errno.ENOSPC, "disk full")


# file of the run -> (where its writing fails, settings and arguments of the run)
REFUSED: Dict[str, Any] = {
    "config": ((loop, "write_text"), {}),
    "checkpoint": ((checkpoint, "write_tensors"), {}),
    "averages": ((checkpoint, "save_tensors"), {"ema": {"decay": 0.5}, "checkpoint": None}),
}


def fail_on_rank_0_alone(rank: int, folder: Path) -> None:
    """Check as one rank that faults of rank 0 are raised on every rank."""
    for error in (RunFault("disk full"), KeyError("disk full"), BadInput("disk full")):

        def fail(error: Exception = error) -> None:
            raise error

        expected = type(error) if rank == 0 or isinstance(error, BadInput) else RunFault
        with pytest.raises(expected, match="disk full"):
            run_on_main(fail)
    for name, (place, keys) in REFUSED.items():
        with pytest.MonkeyPatch.context() as patch:
            if rank == 0:
                patch.setattr(*place, refuse_to_write)
            with pytest.raises((OSError, RunFault), match="disk full"):
                ipu_pipe.train(out=folder / name, **make_net_arguments(Net(), **keys))
    with pytest.raises(RunFault if rank else ZeroDivisionError, match="division by zero"):
        ipu_pipe.train(out=folder / "state", callbacks=[Unsaved()], **make_net_arguments(Net()))
    # between two passes, for which rank 1 waits; both ranks live on until both have ended their runs
    with pytest.raises(RunFault if rank else ZeroDivisionError, match="rank 0|division by zero"):
        waiting = {"name": "distributed", "deadline": 600}
        arguments = make_net_arguments(Net(), log=LINES, backend=waiting)
        ipu_pipe.train(out=folder / "step", callbacks=[Failing()], **arguments)
    (folder / f"{rank}.ended").touch()
    wait_for_file(folder / f"{1 - rank}.ended")


@pytest.mark.slow
def test_a_fault_of_rank_0_alone_ends_all_ranks_with_its_reason(tmp_path: Path) -> None:
    """Story: the others waited for rank 0, and named it as lost."""
    run_in_group(2, fail_on_rank_0_alone, tmp_path)
