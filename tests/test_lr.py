"""Test learning-rate schedules against PyTorch's own, and their limits."""

from __future__ import annotations

from typing import Any, Callable, List

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim import lr_scheduler

from ipu_pipe.config.sections import LrSchedule
from ipu_pipe.update.rates import compute_rate

BASE = 0.4


def list_torch_rates(make: Callable[[torch.optim.Optimizer], Any], updates: int) -> List[float]:
    """Return the rates of a torch scheduler that is stepped after every update."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=BASE)
    scheduler = make(optimizer)
    rates = []
    for _ in range(updates):
        rates.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        scheduler.step()
    return rates


def compute_schedule_rates(updates: int, updates_per_epoch: int = 10, **keys: Any) -> List[float]:
    """Return the rates of our schedule."""
    settings = LrSchedule(**keys)
    return [compute_rate(settings, BASE, k, updates, updates_per_epoch) for k in range(updates)]


# milestones in epochs of 10 updates; the others fall to 0
@pytest.mark.parametrize("keys, make", [
    ({"name": "step", "milestones": [2, 3.5], "gamma": 0.5}, lambda o: lr_scheduler.MultiStepLR(o, [20, 35], 0.5)),
    ({"name": "constant"}, lambda o: lr_scheduler.ConstantLR(o, 1.0)),
    ({"name": "cosine"}, lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=40)),
    ({"name": "linear"}, lambda o: lr_scheduler.LinearLR(o, 1.0, 0.0, total_iters=40)),
])  # fmt: skip
def test_rates_equal_those_of_pytorch(keys: Any, make: Any) -> None:
    expected = list_torch_rates(make, 40)
    assert compute_schedule_rates(40, 10, **keys) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("name", ["cosine", "linear"])
def test_warm_up_rises_linearly_to_the_full_rate_and_the_rest_follows(name: str) -> None:
    rates = compute_schedule_rates(48, name=name, warmup_steps=8)
    assert rates[:8] == pytest.approx([BASE * k / 8 for k in range(1, 9)], rel=1e-9)
    assert rates[8:] == pytest.approx(compute_schedule_rates(40, name=name), rel=1e-12)


def test_warm_up_does_not_shift_the_milestones() -> None:
    rates = compute_schedule_rates(40, 10, name="step", milestones=[2], gamma=0.1, warmup_steps=5)
    assert rates[4:20] == [BASE] * 16 and rates[20:] == pytest.approx([BASE * 0.1] * 20)


@given(
    st.sampled_from(["constant", "cosine", "linear", "step"]),
    st.integers(0, 30),
    st.integers(1, 30),
    st.integers(0, 60),
)
def test_no_rate_is_negative_or_above_the_base(
    name: str, warmup: int, updates: int, k: int
) -> None:
    milestones = [1] if name == "step" else []
    settings = LrSchedule(name=name, warmup_steps=warmup, milestones=milestones)  # type: ignore[arg-type]
    assert 0 <= compute_rate(settings, BASE, k, updates, 4) <= BASE
