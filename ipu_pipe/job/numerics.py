"""Settings of a GPU's arithmetic: the same numbers in every run, and float32 in full, unless the config says otherwise.

                    torch's own            here                              asked otherwise by
    kernels         the fastest today      the same each time                backend.deterministic: false
    convolutions    TF32 (10 bit)          float32 (23 bit)                  backend.tf32: true
    matrix products float32                float32                           backend.tf32: true

They apply to the whole process and are set before anything runs on the GPU; the CPU does not need them.
"""

from __future__ import annotations

import os
from typing import Any, Dict, Optional

import torch

from ipu_pipe.config.schema import BackendConfig

CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
REPEATABLE = (":4096:8", ":16:8")  # workspaces with which cuBLAS gives the same numbers each time, by its manual


def set_numerics(backend: BackendConfig) -> None:
    """Set what `backend` asks for if it trains on a GPU. Where an operation has no deterministic kernel, torch warns."""
    if backend.device != "cuda":
        return
    if backend.deterministic and os.environ.get(CUBLAS) not in REPEATABLE:
        os.environ[CUBLAS] = REPEATABLE[0]  # read when cuBLAS is first asked
    torch.backends.cudnn.deterministic = backend.deterministic
    # benchmark mode takes the algorithm that happens to be the fastest
    torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(backend.deterministic, warn_only=True)
    if hasattr(torch.utils, "deterministic"):
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # for debugging alone
    torch.backends.cuda.matmul.allow_tf32 = backend.tf32
    torch.backends.cudnn.allow_tf32 = backend.tf32


def record_numerics(backend: BackendConfig) -> Optional[Dict[str, Any]]:
    """Return the settings as they are now, for the run's record; None if no GPU trains."""
    if backend.device != "cuda":
        return None
    return {
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "cudnn_deterministic": torch.backends.cudnn.deterministic,
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "cublas_workspace": os.environ.get(CUBLAS),
        "tf32_convolutions": torch.backends.cudnn.allow_tf32,
        "tf32_matrix_products": torch.backends.cuda.matmul.allow_tf32,
    }
