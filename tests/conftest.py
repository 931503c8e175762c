"""Settings of all tests: one thread, so that results do not depend on the number of cores, and the same examples in each run."""

from __future__ import annotations

import os
from typing import List

os.environ.setdefault(
    "OMP_NUM_THREADS", "1"
)  # read when NumPy and torch are imported; the tests' processes get it, too

import pytest
import torch
from hypothesis import settings

from tests.seconds import read_dear_cases

torch.set_num_threads(1)
settings.register_profile("ipu_pipe", deadline=None, derandomize=True, database=None)
settings.load_profile("ipu_pipe")


@pytest.hookimpl(tryfirst=True)  # before pytest selects by marks
def pytest_collection_modifyitems(items: List[pytest.Item]) -> None:
    """Mark the dear cases slow, and skip tests marked `gpu` on a machine without a GPU."""
    dear_cases = read_dear_cases()
    for item in items:
        if item.nodeid in dear_cases:
            item.add_marker(pytest.mark.slow)
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))
