"""Dropout drawn by (seed, microbatch, module name): the same under any partition, method and recomputation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ipu_pipe.model import probe
from ipu_pipe.model.probe import random_modules
from ipu_pipe.model.randomness import KeyedRandomness, derived_seed, generators
from ipu_pipe.schedule.methods import resolve_method
from tests.staged_models import batches, whole
from tests.test_emulator_exact import OPTIMIZERS, emulate

CPU = torch.device("cpu")


def drop() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 8), nn.Dropout(0.5), nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 4)).double()


def test_seeds_are_the_same_everywhere() -> None:
    assert derived_seed(0, 1, "layer") == 5184220762280779236
    assert len({derived_seed(s, m, n) for s in (0, 1) for m in range(9) for n in ("a", "b")}) == 36


def test_draws_depend_on_seed_microbatch_and_module_alone_and_leave_the_state() -> None:
    model, x = nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5)), torch.ones(64)
    keyed = KeyedRandomness(model, ["0", "1"], seed=4, device=CPU)
    torch.manual_seed(9)
    before = torch.get_rng_state()
    first, again = model(x), model(x)
    assert torch.equal(first, again) and torch.equal(before, torch.get_rng_state())
    assert not torch.equal(model[0](x), model[1](x))
    keyed.microbatch = 1
    assert not torch.equal(model(x), first)
    keyed.remove()
    assert not torch.equal(model(x), model(x))


def test_the_division_into_stages_does_not_change_what_is_drawn() -> None:
    data, ends = batches(12), []
    for marked in (False, True):
        model: Any = drop()
        model = whole(list(model)) if marked else model
        emulate(model, resolve_method("gpipe"), 3, data, OPTIMIZERS["sgd"])
        ends.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(p, q) for p, q in zip(*ends))


class Depth(nn.Module):
    """Draws from the generators that it is given, as stochastic depth does from the CPU's whatever the device of its input."""

    def __init__(self, *drawing: torch.Generator) -> None:
        super().__init__()
        self.drawing = drawing

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for generator in self.drawing:
            x = x * torch.rand(x.shape[0], generator=generator)
        return x


def test_on_a_gpu_the_draws_of_both_generators_are_keyed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A generator takes the place of the GPU's."""
    gpu, x = torch.Generator(), torch.ones(8)
    monkeypatch.setattr(torch.cuda, "default_generators", (gpu,))
    monkeypatch.setattr(probe, "generators", lambda device: generators(torch.device("cuda", 0)))
    layers = [Depth(torch.default_generator), Depth(gpu), Depth(torch.default_generator, gpu), nn.Identity()]
    model = nn.Sequential(*layers)
    assert random_modules(model, x) == ["0", "1", "2"]
    keyed = KeyedRandomness(model, ["0", "1", "2"], seed=4, device=torch.device("cuda", 0))
    before = [torch.get_rng_state(), gpu.get_state()]
    first, again = model(x), model(x)
    assert torch.equal(first, again)
    assert all(torch.equal(a, b) for a, b in zip(before, [torch.get_rng_state(), gpu.get_state()]))
    keyed.microbatch = 1
    assert not torch.equal(model(x), first)
    keyed.remove()


def test_seeding_asks_the_generator_and_no_other_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.manual_seed takes 100 times as long, for the same numbers."""
    model, x = nn.Sequential(nn.Dropout(0.5)), torch.ones(64)
    torch.manual_seed(derived_seed(4, 0, "0"))
    expected = model(x)
    keyed = KeyedRandomness(model, ["0"], seed=4, device=CPU)
    monkeypatch.setattr(torch, "manual_seed", None)
    assert torch.equal(model(x), expected)
    keyed.remove()


def test_a_second_forward_that_a_checkpoint_breaks_off_leaves_nothing_behind() -> None:
    """It draws what the first one drew, if the backward is said to be of the same microbatch."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Dropout(0.5))
    keyed, x = KeyedRandomness(model, ["1", "2"], 0, torch.device("cpu")), torch.randn(8, 4)
    found = []
    for way in (lambda: model(x), lambda: checkpoint(model, x, use_reentrant=False)):
        model.zero_grad()
        outputs = []
        for keyed.microbatch in range(3):
            outputs.append(way())
        for keyed.microbatch in range(3):
            outputs[keyed.microbatch].square().sum().backward()
        found.append(model[0].weight.grad)
    assert torch.equal(*found) and len(keyed._kept) <= 1
    keyed.remove()
