"""Test that runs of an earlier version can be resumed and end as they would have ended.

`tests/old_runs` has run folders as commit e74f3b72 wrote them after 4 updates in float64, without
their records. `end.safetensors` has the weights that the same commit reached when it resumed them
up to 8 updates.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file

from ipu_pipe.config.load import load_config
from ipu_pipe.run.train import train
from tests.support.runs import ROOT, assert_states_close, read_weights

OLD_RUNS = ROOT / "tests" / "old_runs"
# float64 sums in another order differ by less than this; an optimizer state that is 1 % off differs by far more
ROUNDING = 1e-12


@pytest.mark.parametrize("name", sorted(path.name for path in OLD_RUNS.iterdir()))
def test_an_old_run_can_be_resumed(name: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(OLD_RUNS / name, run)
    config = load_config(
        run / "config.yaml", ["steps=8", "backend.name=emulator", "checkpoint.format=single"]
    )
    train(config, run, resume=True, quiet=True)
    assert_states_close(
        read_weights(run, 8), load_file(OLD_RUNS / name / "end.safetensors"), ROUNDING
    )
