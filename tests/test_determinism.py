"""The numeric settings of runs on a GPU are set and recorded; runs on other devices set nothing."""

from __future__ import annotations

import os
from typing import Iterator

import pytest
import torch

from ipu_pipe.config.load import load_config
from ipu_pipe.config.schema import BackendConfig
from ipu_pipe.errors import BadInput
from ipu_pipe.job.numerics import CUBLAS, record_numerics, set_numerics
from tests.support.runs import DIGITS


@pytest.fixture(autouse=True)
def restored_settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Restore the numeric settings of this process after the test."""
    monkeypatch.setenv(CUBLAS, "")
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    deterministic = torch.are_deterministic_algorithms_enabled()
    before = cudnn.deterministic, cudnn.benchmark, cudnn.allow_tf32, matmul.allow_tf32
    yield
    cudnn.deterministic, cudnn.benchmark, cudnn.allow_tf32, matmul.allow_tf32 = before
    torch.use_deterministic_algorithms(deterministic)
    if hasattr(torch.utils, "deterministic"):
        torch.utils.deterministic.fill_uninitialized_memory = True


def test_a_gpu_computes_deterministically_and_in_full_float32_by_default() -> None:
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    cudnn.benchmark, cudnn.allow_tf32, matmul.allow_tf32 = True, True, True
    set_numerics(BackendConfig(device="cuda"))
    assert os.environ[CUBLAS] == ":4096:8" and torch.are_deterministic_algorithms_enabled()
    assert record_numerics(BackendConfig(device="cuda")) == {
        "deterministic_algorithms": True, "cudnn_deterministic": True, "cudnn_benchmark": False, "cublas_workspace": ":4096:8",
        "tf32_convolutions": False, "tf32_matrix_products": False,
    }  # fmt: skip
    os.environ[CUBLAS] = ":16:8"
    set_numerics(BackendConfig(device="cuda"))
    assert os.environ[CUBLAS] == ":16:8"  # as deterministic, and set by the user
    set_numerics(BackendConfig(device="cuda", deterministic=False, tf32=True))
    assert not torch.are_deterministic_algorithms_enabled() and not cudnn.deterministic
    assert cudnn.allow_tf32 and matmul.allow_tf32


def test_without_a_gpu_nothing_is_set() -> None:
    set_numerics(BackendConfig())
    assert not os.environ[CUBLAS] and not torch.are_deterministic_algorithms_enabled()
    assert record_numerics(BackendConfig()) is None


@pytest.mark.parametrize("change", ["backend.tf32=true", "backend.deterministic=false"])
def test_settings_of_gpus_are_refused_elsewhere(change: str) -> None:
    with pytest.raises(
        BadInput, match=rf"{change.split('=')[0]}: .*belongs to backend.device cuda, not cpu"
    ):
        load_config(DIGITS, [change])
