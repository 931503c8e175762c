"""Pieces that would not be the model are refused at the start, and the model is left as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ipu_pipe.errors import BadInput
from ipu_pipe.model.cutting import pieces
from ipu_pipe.model.rehearsal import refuse_other_pieces
from tests.staged_models import Odd, Skipping, residual, whole


class Three(nn.Module):
    """Three layers; what the second does differs."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.kept = how, 1
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.drop = nn.Dropout(0.5)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.drop(self.a(x))
        if self.how == "no_grad":
            with torch.no_grad():
                h = h + self.b(h)
        elif self.how == "autocast":
            with torch.autocast("cpu", dtype=torch.bfloat16):
                h = self.b(h)
            h = h.float()
        elif self.how == "buffer":
            self.count = self.count + 1
            h = self.b(h)
        elif self.how == "random":
            h = self.b(h) + torch.rand(4)
        elif self.how == "counted":
            self.kept += 1
            h = self.b(h) if self.kept % 2 else self.b(h).relu()
        elif self.how == "size":
            h = self.b(h) if h.shape[1] == 4 else h
        else:
            h = self.b(h) + torch.arange(4.0)
        return self.c(h)  # type: ignore[no-any-return]


def rehearse(model: nn.Module, begins: Any, x: torch.Tensor) -> None:
    cut = pieces(model, begins, x)
    refuse_other_pieces(model, cut, x)


@pytest.mark.parametrize("how, told", [
    ("buffer", r"count: the forward binds another tensor to this buffer.*self.count.add_\(1\)"),
    ("random", r"stage 1: rand in the model's own forward: draws random numbers outside of the modules that stay whole"),
    ("counted", r"its forward is not the same each time: stage 1: relu once, nothing another time"),
])  # fmt: skip
def test_what_pieces_would_do_otherwise_is_refused(how: str, told: str) -> None:
    """One line each; the model is left as it was."""
    torch.manual_seed(0)
    model, x = Three(how), torch.randn(2, 4)
    state, attributes = {k: v.clone() for k, v in model.state_dict().items()}, set(vars(model))
    drawn = torch.get_rng_state()
    with pytest.raises(BadInput, match=told) as refused:
        rehearse(model, ["b", "c"], x)
    assert len(refused.value.faults) == 1
    assert torch.equal(torch.get_rng_state(), drawn) and set(vars(model)) == attributes
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters()) and not model.a._forward_hooks


@pytest.mark.parametrize("how", ["size", "constant", "no_grad", "autocast"])
def test_branches_on_sizes_and_blocks_of_a_mode_are_cut(how: str) -> None:
    """Story: a branch on a size after a module ended in a RecursionError; `_tensor_constant0` stayed on the model; weights
    frozen by no_grad got gradients, silently."""
    model, x = Three(how), torch.randn(2, 4)
    attributes = set(vars(model))
    rehearse(model, ["b", "c"], x)
    assert set(vars(model)) == attributes


def test_models_that_are_cut_exactly_pass() -> None:
    rehearse(Skipping(), ["b", "c", "d"], torch.randn(5, 12))
    rehearse(whole([stage.float() for stage in residual()]), ["1", "2", "3"], torch.randn(3, 12))
    rehearse(Odd(), ["3", "4", "5"], torch.randn(3, 1, 8, 8))
    rehearse(nn.Sequential(nn.Linear(4, 4)), [], torch.randn(2, 4))
