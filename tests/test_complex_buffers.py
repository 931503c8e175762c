"""Models with a constant complex buffer, such as a table of rotations, train: it stays complex, crosses boundaries and is saved.

Story: every run with such a buffer was refused, although complex activations trained right.
"""

from __future__ import annotations

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

ANGLES = torch.arange(4.0)


class RotationTable(nn.Module):
    """A linear layer with a table of rotations, which it returns too."""

    def __init__(self, persistent: bool) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.register_buffer("rotations", torch.polar(torch.ones(4), ANGLES), persistent=persistent)

    def forward(self, x: torch.Tensor) -> Any:
        return self.inner(x), self.rotations


class Rotation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, parts: Any) -> Any:
        x, rotations = parts
        return torch.view_as_complex(self.inner(x).float().reshape(-1, 4, 2)) * rotations, rotations


class RotationReader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 4)

    def forward(self, parts: Any) -> Any:
        z, rotations = parts
        return self.inner(
            torch.view_as_real(z * rotations.conj()).flatten(1).to(self.inner.weight.dtype)
        )


def make_rotation_model(persistent: bool = True) -> Any:
    torch.manual_seed(0)
    return nn.Sequential(RotationTable(persistent), Rotation(), RotationReader())


def draw_rotation_batches() -> Any:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(4, 8, generator=generator), torch.randint(0, 4, (4,), generator=generator))
        for _ in range(8)
    ]


def make_rotation_arguments(
    persistent: bool = True, method: str = "gpipe", **keys: Any
) -> Dict[str, Any]:
    config = configure(
        method=method, gradient_accumulation=2, steps=4, stages=["1"], evaluate={"every": 0}, checkpoint={"every": 2},
        optimizer={"name": "sgd", "lr": 0.05}, **keys,
    )  # fmt: skip
    batches = draw_rotation_batches()
    data = ipu_pipe.from_loader(batches, batches[:1])
    return {
        "config": config,
        "model": make_rotation_model(persistent),
        "data": data,
        "loss": F.cross_entropy,
    }


@pytest.mark.parametrize("persistent", [True, False])
def test_weights_are_those_of_a_plain_loop(tmp_path: Path, persistent: bool) -> None:
    arguments = make_rotation_arguments(persistent)
    train(out=tmp_path, quiet=True, **arguments)
    model = make_rotation_model(persistent)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for m, (x, y) in enumerate(draw_rotation_batches()):
        (F.cross_entropy(model(x), y) / 2).backward()
        if m % 2:
            optimizer.step()
            optimizer.zero_grad()
    assert_same(arguments["model"].state_dict(), model.state_dict())
    assert ("0.rotations" in read_weights(tmp_path)) == persistent


@pytest.mark.parametrize("precision", ["float32", "float64", "bfloat16", "bfloat16_mixed"])
def test_a_buffer_stays_complex_in_every_precision(tmp_path: Path, precision: str) -> None:
    """At the end the caller's model has its original dtype and values again."""
    arguments = make_rotation_arguments(precision=precision)
    dtypes = []
    record_dtype = lambda module, inputs, output: dtypes.append(output[1].dtype)  # noqa: E731
    arguments["model"][0].register_forward_hook(record_dtype)
    train(out=tmp_path, quiet=True, **arguments)
    assert set(dtypes) == {torch.complex128 if precision == "float64" else torch.complex64}
    rotations = arguments["model"][0].rotations
    assert rotations.dtype == torch.complex64 and torch.equal(
        rotations, torch.polar(torch.ones(4), ANGLES)
    )


@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_a_run_resumes_with_its_buffer(tmp_path: Path, precision: str) -> None:
    """The buffer is loaded from the checkpoint: the new model has other values here."""
    train(out=tmp_path / "straight", quiet=True, **make_rotation_arguments(precision=precision))
    train(out=tmp_path / "resumed", quiet=True, **make_rotation_arguments(precision=precision))
    arguments = make_rotation_arguments(precision=precision)
    arguments["model"][0].rotations.zero_()
    train(out=tmp_path / "resumed", quiet=True, resume=True, resume_from=2, **arguments)
    assert_same(read_weights(tmp_path / "straight"), read_weights(tmp_path / "resumed"))
    assert torch.equal(arguments["model"][0].rotations, torch.polar(torch.ones(4), ANGLES))


def make_case_arguments(case: Any) -> Dict[str, Any]:
    persistent, method = case
    return make_rotation_arguments(persistent, method)


def rotate_buffer(m: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        m.z.mul_(1j)
    return m.inner(x) * m.z.real  # type: ignore[no-any-return]


def test_a_complex_buffer_that_training_changes_is_refused() -> None:
    arguments = make_rotation_arguments()
    arguments["model"] = Composed(
        rotate_buffer, inner=nn.Linear(8, 4), z=torch.ones(4, dtype=torch.cfloat)
    )
    arguments["config"] = arguments["config"].model_copy(update={"stages": 1})
    (fault,) = list_faults(build, **arguments)
    assert fault.startswith("model: z: complex, and training changes it")
