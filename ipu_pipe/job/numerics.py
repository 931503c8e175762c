"""The settings of a GPU's arithmetic: equal numbers in every run and full float32, unless the
config says otherwise.

                    torch's default        here                              changed by
    kernels         the fastest today      the same each time                backend.deterministic: false
    convolutions    TF32 (10 bit)          float32 (23 bit)                  backend.tf32: true
    matrix products float32                float32                           backend.tf32: true

They apply to the whole process and are set before anything runs on the GPU; the CPU does not need
them.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from ipu_pipe.config.schema import BackendConfig
from ipu_pipe.model.devices import get_kind

CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
# workspaces with which cuBLAS is deterministic, according to its manual
REPEATABLE = (":4096:8", ":16:8")


def set_numerics(backend: BackendConfig) -> None:
    """Set the numerics of `backend` if it trains on a GPU; torch warns if an operation has no
    deterministic kernel.
    """
    if not get_kind(backend.device).is_cuda:
        return
    if backend.deterministic and os.environ.get(CUBLAS) not in REPEATABLE:
        # cuBLAS reads it at its first use
        os.environ[CUBLAS] = REPEATABLE[0]
    torch.backends.cudnn.deterministic = backend.deterministic
    # benchmark mode takes the algorithm that happens to be the fastest
    torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(backend.deterministic, warn_only=True)
    if hasattr(torch.utils, "deterministic"):
        # filling memory is only for debugging
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cuda.matmul.allow_tf32 = backend.tf32
    torch.backends.cudnn.allow_tf32 = backend.tf32


def record_numerics(backend: BackendConfig) -> dict[str, Any] | None:
    """Return the present settings for the run's record, None if no GPU trains."""
    if not get_kind(backend.device).is_cuda:
        return None
    return {
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "cudnn_deterministic": torch.backends.cudnn.deterministic,
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "cublas_workspace": os.environ.get(CUBLAS),
        "tf32_convolutions": torch.backends.cudnn.allow_tf32,
        "tf32_matrix_products": torch.backends.cuda.matmul.allow_tf32,
    }
