"""Test the learning rate that a method advises where a config sets none, and that the smallest config learns by every method."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Sequence

import pytest

from ipu_pipe.config.load import load_config
from ipu_pipe.run.build import build
from ipu_pipe.run.train import train
from ipu_pipe.schedule.methods import METHODS
from ipu_pipe.stability.recurrences import make_delayed_sgd
from ipu_pipe.stability.roots import derive_loop_gain, find_largest_stable_step
from ipu_pipe.update.rates import DEFAULT_RATE, advise_rate
from tests.support.runs import DIGITS, read_column, read_json
from tests.support.slow import mark_slow

# `rows` has no schedule of its own: a config gives it
OF_README = [method for method in METHODS if method != "rows"]
QUICK = {"gpipe", "pipemare", "pipedream_2bw"}
# the least test accuracy, where guessing reaches 0.1: six times chance. `last_layers` trains one of
# four layers: three times chance
LEAST = {"last_layers": 0.3}


def build_digits(*overrides: str) -> Any:
    return build(load_config(DIGITS, overrides))


@pytest.mark.filterwarnings("ignore:.*gradient_accumulation.* left out")
@pytest.mark.parametrize("method", mark_slow(OF_README, lambda method: method in QUICK))
def test_the_smallest_config_learns_by_every_method(method: str, tmp_path: Path) -> None:
    """Story: README's first command ended at 0.083, as did three methods of its table."""
    config = load_config(DIGITS, [f"method={method}", "log.tensorboard=false"])
    summary = train(config, tmp_path, quiet=True)
    assert summary["final"]["test_accuracy"] >= LEAST.get(method, 0.6)
    if METHODS[method].flushes:
        assert summary["final"]["test_accuracy"] >= 0.95


@pytest.mark.parametrize("delay", [0, 1, 2, 7, 67])
def test_the_advised_rate_is_a_constant_share_of_the_largest_stable_rate(delay: int) -> None:
    limits = [find_largest_stable_step(derive_loop_gain(make_delayed_sgd(D))) for D in (0, delay)]
    assert advise_rate(delay) == pytest.approx(DEFAULT_RATE * limits[1] / limits[0], rel=1e-3)
    assert advise_rate(0) == DEFAULT_RATE
    assert float(f"{advise_rate(delay):g}") == advise_rate(delay)


@pytest.mark.parametrize("overrides, delay", [
    (["method=gpipe"], 0), (["method=pipedream"], 1), (["method=pipemare"], 2),
    (["method=pipemare", "gradient_accumulation=1"], 7),
    (["method=pipemare", "optimizer.name=adam", "optimizer.momentum=null"], 2),
    (["method=pipemare", "optimizer.lr=null"], 2), (["method=randomized_pipedream", "gradient_accumulation=1"], 3.5),
])  # fmt: skip
def test_a_rate_that_is_not_set_is_the_methods(overrides: Sequence[str], delay: float) -> None:
    job = build_digits(*overrides)
    assert job.config.optimizer.lr == job.base_rate == job.rate(0) == advise_rate(delay)
    assert f"optimizer.lr: {advise_rate(delay):g}," in job.advice


@pytest.mark.parametrize("rate", [0.0, 0.3])
def test_a_rate_that_is_set_wins(rate: float) -> None:
    job = build_digits("method=pipemare", f"optimizer.lr={rate}")
    assert job.config.optimizer.lr == job.rate(0) == rate and not job.advice
    groups = "[{match: '*.bias', name: adam, lr: 1e-3}, {momentum: 0.5}]"
    optimizer = f"optimizer={{name: null, momentum: null, groups: {groups}}}"
    config = build_digits("method=pipemare", optimizer).config
    assert [one.lr for one in config.optimizer.groups] == [1e-3, advise_rate(2)]


@pytest.mark.parametrize("rate", [advise_rate(2), 0.05])
def test_the_advised_rate_is_printed_recorded_and_kept(
    rate: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that was begun with another rate continues with it."""
    short = ["method=pipemare", "log.tensorboard=false", "evaluate.every=0", "checkpoint.every=4"]
    is_advised = rate == advise_rate(2)
    own = [] if is_advised else [f"optimizer.lr={rate}"]
    train(load_config(DIGITS, [*short, *own, "steps=4"]), tmp_path)
    line = f"optimizer.lr: {advise_rate(2):g}, advised for pipemare"
    assert (line in capsys.readouterr().out) is is_advised
    assert (line in read_json(tmp_path / "record.json")[0].get("advice", [])) is is_advised
    train(load_config(DIGITS, [*short, "steps=8"]), tmp_path, resume=True, quiet=True)
    assert load_config(tmp_path / "config.yaml").optimizer.lr == rate
    assert {*read_column(tmp_path, "lr")} == {rate}


@pytest.mark.parametrize("method", ["local_sgd", "randomized_pipedream"])
def test_an_inherited_number_of_microbatches_is_left_out_where_each_is_an_update(
    method: str,
) -> None:
    """Story: README's table lists these methods, which refused its config."""
    with pytest.warns(UserWarning, match=f"gradient_accumulation: 4: left out.* {method} "):
        assert load_config(DIGITS, [f"method={method}"]).gradient_accumulation == 1
    both = load_config(DIGITS, [f"method={method}", "gradient_accumulation=4"])
    assert both.gradient_accumulation == 4
