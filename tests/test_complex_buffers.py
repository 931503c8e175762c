"""Models with a constant complex buffer, such as a table of rotations, train: it stays complex, crosses boundaries and is saved.

Story: every run with such a buffer was refused, although complex activations trained right.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, Dict

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ipu_pipe
from ipu_pipe.config.load import configure
from ipu_pipe.run.build import build
from ipu_pipe.run.train import train
from tests.support.models import Composed
from tests.support.runs import assert_same, list_faults, read_weights
from tests.test_emulator_exact import train_in_plain_loop

ROTATIONS = torch.polar(torch.ones(4), torch.arange(4.0))


def rotate(m: Any, parts: Any) -> Any:
    x, rotations = parts
    return torch.view_as_complex(m.inner(x).float().reshape(-1, 4, 2)) * rotations, rotations


def read_rotation(m: Any, parts: Any) -> Any:
    z, rotations = parts
    real = torch.view_as_real(z * rotations.conj()).flatten(1)
    return m.inner(real.to(m.inner.weight.dtype))


def make_rotation_model(persistent: bool = True) -> Any:
    """Return a layer with a table of rotations, which it returns too, and two layers that read it."""
    torch.manual_seed(0)
    table = Composed(lambda m, x: (m.inner(x), m.rotations), inner=nn.Linear(8, 8))
    table.register_buffer("rotations", ROTATIONS.clone(), persistent=persistent)
    reader = Composed(read_rotation, inner=nn.Linear(8, 4))
    return nn.Sequential(table, Composed(rotate, inner=nn.Linear(8, 8)), reader)


def draw_rotation_batches() -> Any:
    draw = torch.Generator().manual_seed(1)
    inputs, labels = (
        torch.randn(8, 4, 8, generator=draw),
        torch.randint(0, 4, (8, 4), generator=draw),
    )
    return list(zip(inputs, labels))


def make_case_arguments(case: Any, **keys: Any) -> Dict[str, Any]:
    """Return the arguments of `train`. `case`: whether the buffer is persistent, and the method."""
    persistent, method = case
    config = configure(
        method=method, gradient_accumulation=2, steps=4, stages=["1"], evaluate={"every": 0}, checkpoint={"every": 2},
        optimizer={"name": "sgd", "lr": 0.05}, **keys,
    )  # fmt: skip
    batches = draw_rotation_batches()
    data, model = ipu_pipe.from_loader(batches, batches[:1]), make_rotation_model(persistent)
    return {"config": config, "model": model, "data": data, "loss": F.cross_entropy}


@pytest.mark.parametrize("persistent", [True, False])
def test_weights_are_those_of_a_plain_loop(tmp_path: Path, persistent: bool) -> None:
    """Also of a run that resumes: there a persistent buffer is loaded from the checkpoint, since the new model has other
    values."""
    arguments = make_case_arguments((persistent, "gpipe"))
    train(out=tmp_path, quiet=True, **arguments)
    model = make_rotation_model(persistent)
    make_sgd = functools.partial(torch.optim.SGD, lr=0.05)
    train_in_plain_loop(model, draw_rotation_batches(), 2, make_sgd)
    assert_same(arguments["model"].state_dict(), model.state_dict())
    assert ("0.rotations" in read_weights(tmp_path)) == persistent
    again = make_case_arguments((persistent, "gpipe"))
    if persistent:
        again["model"][0].rotations.zero_()
    train(out=tmp_path, quiet=True, resume_from=2, **again)
    assert_same(again["model"].state_dict(), model.state_dict())


@pytest.mark.parametrize("precision", ["float64", "bfloat16", "bfloat16_mixed"])
def test_a_buffer_stays_complex_in_every_precision(tmp_path: Path, precision: str) -> None:
    """At the end the caller's model has its original dtype and values again."""
    arguments = make_case_arguments((True, "gpipe"), precision=precision)
    table, dtypes = arguments["model"][0], set()
    table.register_forward_hook(lambda module, inputs, output: dtypes.add(output[1].dtype))
    train(out=tmp_path, quiet=True, **arguments)
    assert dtypes == {torch.complex128 if precision == "float64" else torch.complex64}
    assert table.rotations.dtype == torch.complex64 and torch.equal(table.rotations, ROTATIONS)


def rotate_buffer(m: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        m.z.mul_(1j)
    return m.inner(x) * m.z.real  # type: ignore[no-any-return]


def test_a_complex_buffer_that_training_changes_is_refused() -> None:
    arguments = make_case_arguments((True, "gpipe"))
    z = torch.ones(4, dtype=torch.cfloat)
    arguments["model"] = Composed(rotate_buffer, inner=nn.Linear(8, 4), z=z)
    arguments["config"] = arguments["config"].model_copy(update={"stages": 1})
    (fault,) = list_faults(build, **arguments)
    assert fault.startswith("model: z: complex, and training changes it")
