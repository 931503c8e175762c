"""Test the memory that a plan states for stages on IPUs, which follows PopTorch's stash."""

from __future__ import annotations

from typing import Any, List, Tuple

import pytest

from ipu_pipe.config.load import load_config
from ipu_pipe.report.memory import build_memory_table
from ipu_pipe.run.build import build

KEYS = ["method=pipedream_flush", "gradient_accumulation=16", "evaluate.every=0", "steps=2"]


def read_activation_stash(*keys: str) -> List[Tuple[int, int]]:
    """Return microbatches in flight and bytes of activations, stage by stage."""
    rows = build_memory_table(build(load_config("configs/mlp_digits.yaml", [*KEYS, *keys])))
    return [(row["in_flight"], row["activation_bytes"]) for row in rows]


@pytest.mark.parametrize(
    "keys, stash",
    [
        ([], [7, 5, 3, 1]),  # 2(P-1-s) + 1
        (["method=gpipe"], [7, 5, 3, 1]),  # in PopTorch the same pipeline
        (["backend.ipu.ipus=[0, 0, 1, 1]"], [3, 3, 1, 1]),  # two stages of PopTorch's
        (["method=naive"], [1, 1, 1, 1]),
    ],
)
def test_stages_on_ipus_keep_poptorchs_stash(keys: List[str], stash: List[int]) -> None:
    plain = ["backend.name=poptorch", "backend.ipu.recomputation=none"]
    on_ipus = read_activation_stash(*plain, *keys)
    one = read_activation_stash("method=naive")
    assert [row[0] for row in on_ipus] == stash
    assert [row[1] for row in on_ipus] == [count * saved for count, (_, saved) in zip(stash, one)]


def test_the_emulator_keeps_the_microbatches_in_flight_of_its_schedule() -> None:
    assert [row[0] for row in read_activation_stash()] == [4, 3, 2, 1]


def test_recomputation_keeps_inputs_but_not_the_last_stages() -> None:
    """PopTorch recomputes in pipelines by default, on all stages but the last one."""
    with_inputs: Any = read_activation_stash("backend.name=poptorch", "recompute=true")
    assert with_inputs == read_activation_stash("backend.name=poptorch")
    plain = read_activation_stash("method=naive")
    assert with_inputs[-1] == (1, plain[-1][1])
    assert with_inputs[0] == (7, 7 * 16 * 64 * 4 + plain[0][1])
