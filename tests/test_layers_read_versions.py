"""Test that each layer's forward and backward read their weight versions, by explicit formulas."""

from __future__ import annotations

from typing import Any, Callable, Dict, Tuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ipu_pipe.replay.replays import Views
from ipu_pipe.replay.weights import OverwritingStore, SwappingStore

torch.manual_seed(0)


def _make_norm_gradient(normalize: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return the input gradient of y = normalize(x) * weight + bias as a function of the weight
    that the backward reads."""

    def compute_gradient(x: torch.Tensor, weight: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        x = x.detach().clone().requires_grad_()
        shape = [1, -1] + [1] * (x.dim() - 2) if x.dim() == 4 else [-1]
        return torch.autograd.grad(normalize(x), x, g * weight.view(shape))[0]

    return compute_gradient


# layer, input, and the input's gradient from (input, weight that the backward reads, output's gradient)
LAYERS: Dict[str, Tuple[nn.Module, torch.Tensor, Any]] = {
    "Linear": (nn.Linear(5, 4), torch.randn(3, 5), lambda x, w, g: g @ w),
    "Conv2d": (
        nn.Conv2d(3, 4, 3, padding=1), torch.randn(2, 3, 6, 6), lambda x, w, g: F.conv_transpose2d(g, w, padding=1)
    ),
    "GroupNorm": (nn.GroupNorm(2, 4), torch.randn(2, 4, 3, 3), _make_norm_gradient(lambda x: F.group_norm(x, 2))),
    "BatchNorm2d": (
        nn.BatchNorm2d(4), torch.randn(3, 4, 3, 3), _make_norm_gradient(lambda x: F.batch_norm(x, None, None, training=True))
    ),
    "LayerNorm": (nn.LayerNorm(6), torch.randn(3, 6), _make_norm_gradient(lambda x: F.layer_norm(x, (6,)))),
    "Embedding": (nn.Embedding(7, 3), torch.randint(0, 7, (2, 4)), None),
}  # fmt: skip


@pytest.mark.parametrize("kind, backward_version", [(OverwritingStore, 1), (SwappingStore, 0)])
@pytest.mark.parametrize("name", list(LAYERS))
def test_forward_and_backward_read_their_versions(
    name: str, kind: Any, backward_version: int
) -> None:
    layer, x, gradient = LAYERS[name]
    layer = layer.double()
    old = [torch.randn_like(p) for p in layer.parameters()]
    new = [torch.randn_like(p) for p in layer.parameters()]
    for p, value in zip(layer.parameters(), old):
        p.data = value.clone()
    history = kind([list(layer.parameters())], [0])
    history.stash_before_update([{0}])
    for p, value in zip(layer.parameters(), new):  # the optimizer's step
        p.data.copy_(value)

    x = x.double().requires_grad_() if x.is_floating_point() else x
    history.load(Views(np.array([0]), np.array([0])))
    assert all(torch.equal(p.data, value) for p, value in zip(layer.parameters(), old))
    output = layer(x)
    g = torch.randn_like(output)
    history.load(Views(np.array([backward_version]), np.array([0])))
    output.backward(g)
    if gradient is not None:
        read = (new if backward_version else old)[0]
        other = (old if backward_version else new)[0]
        assert torch.allclose(x.grad, gradient(x.detach(), read, g), rtol=1e-10, atol=1e-12)
        assert not torch.allclose(x.grad, gradient(x.detach(), other, g), rtol=1e-3)
    else:
        assert torch.equal(output, F.embedding(x, old[0]))
    history.load_newest()
    assert all(torch.equal(p.data, value) for p, value in zip(layer.parameters(), new))


def test_a_linear_layer_does_not_see_a_pointer_swap_after_its_forward() -> None:
    """Linear saves a view of its storage, so the newest values must be written into it."""
    layer, x = (
        nn.Linear(3, 3, bias=False).double(),
        torch.randn(2, 3, dtype=torch.float64, requires_grad=True),
    )
    output, old = layer(x), layer.weight.detach().clone()
    layer.weight.data = torch.randn(3, 3, dtype=torch.float64)
    g = torch.randn_like(output)
    output.backward(g)
    assert torch.allclose(x.grad, g @ old)  # type: ignore[arg-type]
