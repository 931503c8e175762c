"""Settings of all tests: one thread, so that results do not depend on the number of cores, and the same examples in each run."""

from __future__ import annotations

import os
from typing import Any, Dict, List

os.environ.setdefault(
    "OMP_NUM_THREADS", "1"
)  # read when NumPy and torch are imported; the tests' processes get it, too

import pytest
import torch
from hypothesis import settings

from tests.seconds import read_dear_cases, read_nightly_cases

torch.set_num_threads(1)
settings.register_profile("ipu_pipe", deadline=None, derandomize=True, database=None)
settings.load_profile("ipu_pipe")


@pytest.hookimpl(tryfirst=True)  # before pytest selects by marks
def pytest_collection_modifyitems(items: List[pytest.Item]) -> None:
    """Mark the dear and the nightly cases, and skip tests marked `gpu` on a machine without a GPU."""
    dear_cases, nightly_cases = read_dear_cases(), read_nightly_cases()
    for item in items:
        if item.nodeid in dear_cases:
            item.add_marker(pytest.mark.slow)
        if item.nodeid in nightly_cases:
            item.add_marker(pytest.mark.nightly)
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the files that took longest, where --durations asks for times."""
    if not terminalreporter.config.getoption("durations"):
        return
    seconds: Dict[str, float] = {}
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                file = report.nodeid.partition("::")[0]
                seconds[file] = seconds.get(file, 0) + report.duration
    terminalreporter.section("slowest files")
    for file in sorted(seconds, key=seconds.__getitem__, reverse=True)[:30]:
        terminalreporter.write_line(f"{seconds[file]:6.0f}s {file}")
