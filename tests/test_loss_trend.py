"""Test the line at the end of a run whose training loss never fell: only such runs print it."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any, List

import pytest

from ipu_pipe.cli import train
from ipu_pipe.report.position import LossTrend
from tests.command_line import run_here
from tests.support.runs import DIGITS, ROOT

WARNING = "the training loss did not fall"


def describe_trend(losses: List[float], planned: int = 0) -> Any:
    trend = LossTrend(planned or len(losses))
    for loss in losses:
        trend.add(loss)
    return trend.describe()


def draw_losses(
    seed: int, count: int, deviation: float, start: float = 2.3, end: float = 2.3
) -> List[float]:
    generator = random.Random(seed)
    means = (start + (end - start) * i / count for i in range(count))
    return [generator.gauss(mean, deviation) for mean in means]


@pytest.mark.parametrize("count", [20, 50, 1000])
@pytest.mark.parametrize("deviation", [0.0, 0.01, 0.5])
def test_losses_that_stay_or_rise_are_reported(count: int, deviation: float) -> None:
    rising = {"end": 2.3 + 10 * deviation}
    texts = [describe_trend(draw_losses(seed, count, deviation)) for seed in range(20)]
    assert texts.count(None) <= 2
    assert all(describe_trend(draw_losses(seed, count, deviation, **rising)) for seed in range(20))
    # losses that are not finite do not count as a fall
    assert describe_trend([2.3] * 60 + [math.nan] * 40)


@pytest.mark.parametrize("seed", range(5))
def test_losses_that_fall_are_not_reported(seed: int) -> None:
    falling = [
        draw_losses(seed, count, fall / 10, end=2.3 - fall)
        for count in (50, 1000)
        for fall in (0.05, 1.0)
    ]
    early = [2.3 - 0.11 * i for i in range(20)] + draw_losses(seed, 980, 0.02, 0.1, 0.1)
    risen = draw_losses(seed, 500, 0.1, end=0.5) + draw_losses(seed, 500, 0.1, 0.5, 3.0)
    by_the_first_update = [2.3, *draw_losses(seed, 199, 0.001, 0.01, 0.01)]
    for losses in (*falling, early, risen, by_the_first_update):
        assert describe_trend(losses) is None


@pytest.mark.parametrize("losses, planned, is_judged", [
    ([2.3] * 19, 0, False), ([2.3] * 20, 0, True), ([math.nan] * 100, 0, False), ([], 0, False),
    # stopped early: of 1,000 planned updates only two tenths
    ([2.3] * 299, 1000, False), ([2.3] * 300, 1000, True),
])  # fmt: skip
def test_too_few_updates_are_not_judged(losses: Any, planned: int, is_judged: bool) -> None:
    assert (describe_trend(losses, planned) is not None) == is_judged


@pytest.mark.parametrize("high", [7.5, 1.6e14, math.inf, math.nan])
def test_a_run_that_diverged_says_after_which_update(high: float) -> None:
    """Story: a run at a loss of 1.6e14 ended with "did not fall below its start"."""
    text = describe_trend([2.3, 2.2, 9.0, *[2.0] * 17, *[high] * 4])
    assert "diverged after update 20:" in text and "did not fall" not in text
    # a peak at the end is shorter than a tenth of the run
    assert "diverged" not in str(describe_trend([2.3, *[1.0] * 38, high]))
    # thrice the first loss is the limit
    assert "diverged" not in describe_trend([2.3] * 20 + [6.8] * 4)


@pytest.mark.slow
def test_a_run_that_learns_nothing_is_reported(
    tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    """The line points to the theory of the run's delays.

    Story: a run at a loss of ln 10, which had learned nothing, ended like a good one.
    """
    monkeypatch.chdir(ROOT)
    short = ["steps=40", "log.tensorboard=false", "evaluate.every=0"]

    def train_and_print(*keys: str, option: str = "--overwrite") -> str:
        arguments = (DIGITS, "--set", *short, *keys, "--out", str(tmp_path / "run"), option)
        result = run_here(train, *arguments, monkeypatch=monkeypatch, capsys=capsys)
        assert result.returncode == 0, result.stderr
        return result.stdout

    output = train_and_print("optimizer.lr=1e-12")
    assert WARNING in output and f"stability {tmp_path / 'run' / 'config.yaml'}" in output
    assert WARNING not in train_and_print("optimizer.lr=0.1")
    assert WARNING not in train_and_print("optimizer.lr=1e-12", "steps=10")
    # the start of a resumed run is not known
    train_and_print("optimizer.lr=1e-12", "steps=20", "checkpoint.every=20")
    assert WARNING not in train_and_print(
        "optimizer.lr=1e-12", "steps=60", "checkpoint.every=20", option="--resume"
    )
