"""Check that a saved state resumes bitwise: every kind of method, every scope of clipping, steps that may drain."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, Dict, Iterable, List

import pytest
import torch

from tests.support.loops import Case, Loop
from tests.support.slow import mark_slow
from tests.test_pipeline import CASES, GIVEN, PB, T1_T2

UPDATES = 7
# norms of earlier updates, which clip later ones, begin anew after a drain, and are late by up to 7 updates
UPDATES_OF_DELAYED_NORMS = 15
# a run that saves at several steps is resumed from each of them
SAVES = [1, 4]
# other steps of an object that loads a state, a multiple of the rounds below
USED = 6
# two devices of two stages in PyTorch's format, with backwards in another order than the microbatches'
BACKWARDS = """\
0F0,0F1,0F2,0F3,,0B3,0B0,0B1,0B2
,1F0,1F1,1F2,1F3,1B3,1B0,1B1,1B2
"""
ADAM = functools.partial(torch.optim.Adam, lr=0.05)
BLOCKS = {"block_rates": [1, 2, 1, 1], "block_accumulation": [1, 2, 1, 3]}
STREAMS = {"name": "sgd", "fragments": 2, "delay": 1, "mix": 0.5, "momentum": 0.9}


def count_zeros(y: torch.Tensor) -> float:
    return float((y == 0).sum())


# each with state of its own
RESUMED: Dict[str, Case] = {
    **{name: CASES[name] for name in (*GIVEN, "zbv")},
    "pipemare_delayed": Case("pipemare", 2, T1_T2, clip=(0.1, "delayed_global")),
    "pb_difference": Case(PB, 1, {"weight_prediction": {"form": "difference"}}),
    "pb_feedback": Case(PB, 1, {"error_feedback": {}}, clip=(0.1, "stage")),
    "pipedream_adaptive": Case("pipedream", 1, {"delay_compensation": {"adaptive": True}}),
    "pipedream_weights": Case("pipedream", 2, others={"loss_weight": count_zeros}),
    "pipedream_2bw_replicas": Case("pipedream_2bw", 4, replicas=2),
    "local_greedy_blocks": Case("local_greedy", 1, BLOCKS),
    "local_greedy_adam": Case("local_greedy", 1, clip=(0.1, "stage")),
    "local_sgd_adam": Case("local_sgd", 1, {"local_steps": 3}, clip=(0.1, "stage")),
    "diloco_streams": Case("local_sgd", 1, {"local_steps": 4, "outer": STREAMS}),
    "rows_backwards": Case("rows", 4, stages=["5"]),
}
# steps that may drain, in rounds of an outer optimizer or of accumulating blocks
ROUNDS = {"diloco": [3, 6], "diloco_streams": [2, 4], "local_greedy_blocks": [6]}
# one of each kind of state, which `make test` runs
QUICK = {"pipedream", "pipemare", "local_greedy_blocks", "diloco_streams", "rows_backwards"}


class ResumableLoop(Loop):
    """A loop with a scheduler that computes each rate from the one before."""

    def __init__(self, name: str, folder: Path) -> None:
        case = RESUMED[name]
        if case.method == "rows":
            (folder / "rows.csv").write_text(BACKWARDS, encoding="utf-8")
            case = case._replace(args={"file": str(folder / "rows.csv")})
        keys = {"make_optimizer": ADAM} if name.endswith("_adam") else {}
        super().__init__(case, **keys)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.parts = {"pipe": self.pipe, "optimizer": self.optimizer, "scheduler": self.scheduler}

    def save(self, file: Path) -> None:
        torch.save({name: part.state_dict() for name, part in self.parts.items()}, file)

    def load_file(self, file: Path, names: Iterable[str]) -> None:
        states = torch.load(file, weights_only=True)
        for name in names:
            self.parts[name].load_state_dict(states[name])
        # the pipeline's state has the settings of the optimizer's groups, before the first step
        rate = self.optimizer.param_groups[0]["lr"]
        assert rate == states["optimizer"]["param_groups"][0]["lr"]

    def end(self) -> List[Any]:
        """Close the pipeline, and return the last states of pipeline, model and optimizer."""
        state = self.pipe.state_dict() if self.pipe.can_drain else {}
        return [state, self.close().state_dict(), self.optimizer.state_dict()]


def assert_same_ends(expected: Any, actual: Any) -> None:
    """Assert that nested values are the same, tensors bit for bit."""
    if isinstance(expected, torch.Tensor):
        assert torch.equal(expected, actual)
    elif isinstance(expected, (dict, list, tuple)):
        assert len(expected) == len(actual)
        for key in expected if isinstance(expected, dict) else range(len(expected)):
            assert_same_ends(expected[key], actual[key])
    else:
        assert expected == actual


@pytest.mark.parametrize("name", mark_slow(sorted(RESUMED), QUICK.__contains__))
@pytest.mark.filterwarnings("ignore:close")
def test_a_saved_state_goes_on_to_the_same_bits(name: str, tmp_path: Path) -> None:
    """A run that resumes from a saved state ends like the run that saved it."""
    saves, clip = ROUNDS.get(name, SAVES), RESUMED[name].clip
    is_delayed = clip is not None and clip[1] == "delayed_global"
    count = UPDATES_OF_DELAYED_NORMS if is_delayed else UPDATES

    def run(loop: ResumableLoop, first: int) -> None:
        for k in range(first, count):
            loop.run(k, k + 1, drains=False)
            if k + 1 in saves:
                loop.save(tmp_path / f"{k + 1}.pt")

    straight = ResumableLoop(name, tmp_path)
    run(straight, 0)
    expected = straight.end()
    # a new object before its first step, and one that has made other steps
    for at, before in [*((at, 0) for at in saves), (saves[0], USED)]:
        resumed = ResumableLoop(name, tmp_path)
        resumed.run(0, before, drains=False)
        names = resumed.parts if before else ("pipe", "scheduler")
        resumed.load_file(tmp_path / f"{at}.pt", names)
        resumed.losses.clear()
        run(resumed, at)
        assert_same_ends(expected, resumed.end())
        assert resumed.losses == straight.losses[at:]
