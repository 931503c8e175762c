"""Check that dropout is drawn by (seed, microbatch, module name): the same under any partition,
method and recomputation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ipu_pipe.cut.cutting import cut_model
from ipu_pipe.errors import BadInput
from ipu_pipe.model import observation
from ipu_pipe.model.observation import observe_effects
from ipu_pipe.model.randomness import KeyedRandomness, derive_seed, list_generators
from tests.support.models import Composed

CPU = torch.device("cpu")


def run_forward(
    keyed: KeyedRandomness, model: nn.Module, x: torch.Tensor, microbatch: int = 0
) -> torch.Tensor:
    with keyed.forward(microbatch):
        return model(x)  # type: ignore[no-any-return]


def test_seeds_are_the_same_everywhere() -> None:
    assert derive_seed(0, 1, "layer") == 5184220762280779236
    assert len({derive_seed(s, m, n) for s in (0, 1) for m in range(9) for n in ("a", "b")}) == 36


def test_draws_depend_on_seed_microbatch_and_module_alone_and_leave_the_state(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, x = nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5)), torch.ones(64)
    keyed = KeyedRandomness(model, {"0": 1, "1": 1}, seed=4, device=CPU)
    torch.manual_seed(9)
    # manual_seed seeds every device, which takes 100 times as long
    monkeypatch.setattr(torch, "manual_seed", None)
    before = torch.get_rng_state()
    first, second = run_forward(keyed, model, x), run_forward(keyed, model, x)
    assert torch.equal(first, second) and torch.equal(before, torch.get_rng_state())
    assert not torch.equal(run_forward(keyed, model[0], x), run_forward(keyed, model[1], x))
    assert not torch.equal(run_forward(keyed, model, x, 1), first)
    keyed.remove()
    assert not torch.equal(model(x), model(x))


def make_drawing_module(*drawing: torch.Generator) -> nn.Module:
    """Return a module that draws from these generators, as stochastic depth draws from the CPU's
    generator on any device."""

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        for generator in drawing:
            x = x * torch.rand(x.shape[0], generator=generator)
        return x

    return Composed(forward)


def draw_around(m: Any, x: torch.Tensor) -> torch.Tensor:
    """Draw in a module that is around another one which draws."""
    return m.drop(m.drop(x) + torch.rand(8)) + torch.rand(8)


def test_on_a_gpu_the_draws_of_both_generators_are_keyed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the draws of both generators; a second CPU generator takes the place of the GPU's."""
    gpu, x = torch.Generator(), torch.ones(8)
    monkeypatch.setattr(torch.cuda, "default_generators", (gpu,))
    monkeypatch.setattr(
        observation, "list_generators", lambda device: list_generators(torch.device("cuda", 0))
    )
    cpu = torch.default_generator
    layers = [make_drawing_module(*some) for some in ((cpu,), (gpu,), (cpu, gpu))]
    model = nn.Sequential(*layers, nn.Identity(), Composed(draw_around, drop=nn.Dropout(0.5)))
    calls = observe_effects(model, x).draws
    assert calls == {"0": 1, "1": 1, "2": 1, "4": 1, "4.drop": 2}
    keyed = KeyedRandomness(model, calls, seed=4, device=torch.device("cuda", 0))
    before = [torch.get_rng_state(), gpu.get_state()]
    first, second = run_forward(keyed, model, x), run_forward(keyed, model, x)
    assert torch.equal(first, second)
    assert all(map(torch.equal, before, [torch.get_rng_state(), gpu.get_state()]))
    assert not torch.equal(run_forward(keyed, model, x, 1), first)
    keyed.remove()


def make_shared_dropout_model(way: str = "plain") -> nn.Module:
    """Make a model that shares one dropout between three layers, as T5, and runs a block twice, as ALBERT."""

    def drop_twice(m: Any, x: torch.Tensor) -> torch.Tensor:
        return m.drop(m.drop(m.block(x)))

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        x = m.drop(m.a(x))
        for _ in range(2):
            if way == "plain":
                x = m.drop(drop_twice(m, x))
            else:
                x = m.drop(checkpoint(drop_twice, m, x, use_reentrant=way == "reentrant"))
        return m.c(x)

    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))
    layers = {"a": nn.Linear(8, 8), "c": nn.Linear(8, 4)}
    return Composed(forward, **layers, block=block, drop=nn.Dropout(0.5))


def test_a_module_that_runs_again_in_a_forward_draws_again() -> None:
    """SimCSE runs an encoder twice: equal masks in both passes once made its two embeddings
    equal."""
    model, x = make_shared_dropout_model(), torch.ones(64, 8)
    calls = observe_effects(model, x).draws
    assert calls == {"block.1": 2, "drop": 7}
    keyed = KeyedRandomness(model, calls, seed=4, device=CPU)
    masks: Any = []
    model.drop.register_forward_hook(
        lambda m, inputs, output: masks.append((output == 0) & (inputs[0] != 0))
    )
    assert torch.equal(run_forward(keyed, model, x), run_forward(keyed, model, x))
    assert len({mask.numpy().tobytes() for mask in masks[:7]}) == 7
    keyed.remove()
    # the key of the first call has no call number
    alone = KeyedRandomness(model, {"block.1": 1}, seed=4, device=CPU)
    torch.manual_seed(derive_seed(4, 0, "block.1"))
    expected = model.block(x)
    assert torch.equal(run_forward(alone, model.block, x), expected)
    alone.remove()


@pytest.mark.parametrize("way", ["reentrant", "not reentrant"])
def test_a_checkpoint_in_which_modules_run_again_repeats_the_draws_of_its_forward(way: str) -> None:
    gradients = []
    for model in (make_shared_dropout_model(), make_shared_dropout_model(way)):
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()
        keyed = KeyedRandomness(model, observe_effects(model, x).draws, 0, CPU)
        outputs = [run_forward(keyed, model, x, m) for m in range(3)]
        before = torch.get_rng_state()
        for m, output in enumerate(outputs):
            with keyed.backward(m):
                output.square().sum().backward()
        assert torch.equal(before, torch.get_rng_state())
        keyed.remove()
        gradients.append([p.grad for p in model.parameters()])
    # a checkpoint may add the gradients of a shared module in another order
    torch.testing.assert_close(gradients[0], gradients[1])


def test_a_checkpoint_that_keeps_no_random_state_is_refused_where_modules_run_again() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), torch.randn(8, 4)
    keyed = KeyedRandomness(model, {"1": 2}, 0, CPU)
    with keyed.forward(0):
        model(x)
        output = checkpoint(model, x, use_reentrant=False, preserve_rng_state=False)
    with pytest.raises(BadInput), keyed.backward(0):
        output.sum().backward()
    keyed.remove()


def test_stages_draw_as_the_whole_model_does() -> None:
    model, x = make_shared_dropout_model(), torch.randn(6, 8)
    keyed = KeyedRandomness(model, observe_effects(model, x).draws, 3, CPU)
    whole = run_forward(keyed, model, x, 2)
    value: Any = x
    for piece in cut_model(model, ["c"], x):  # each piece as if on its own device
        with keyed.forward(2, piece.calls_before):
            value = piece(value)
    assert torch.equal(value, whole)
    keyed.remove()
