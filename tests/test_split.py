"""Check split backwards: I and W leave the gradients of a whole backward, bit for bit, and W
reads no weights."""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Tuple

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

pytest.importorskip("torch", minversion="2.4")
from ipu_pipe.backends.processes.split import is_split_exact, run_input_backward, run_whole_backward  # noqa: E402
from tests.support.models import Composed


def make_twice() -> nn.Module:
    """Return a linear layer that runs twice and whose weight also scales the output: a product
    and another use of one weight."""
    return Composed(
        lambda m, x: m.layer(torch.tanh(m.layer(x))) * m.layer.weight.sum(), layer=nn.Linear(6, 6)
    )


def make_first_factor() -> nn.Module:
    """Return a module whose weight is the first factor of a product."""
    return Composed(
        lambda m, x: m.weight.mm(x.flatten(1)[:4]), weight=nn.Parameter(torch.randn(5, 4))
    )


def run_attention(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = m.norm(x)
    return x + m.attention(y, y, y, need_weights=False)[0]  # type: ignore[no-any-return]


def make_residual_attention() -> nn.Module:
    """Return self-attention between residual connections."""
    return Composed(
        run_attention, norm=nn.LayerNorm(8), attention=nn.MultiheadAttention(8, 2, batch_first=True)
    )


# the module, the shape of its input, the number of weights whose gradient W computes
Case = Tuple[Callable[[], nn.Module], List[int], int]
CASES: Dict[str, Case] = {
    "convolutions": (lambda: nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 3)),
                     [2, 3, 8, 8], 3),
    "transposed": (lambda: nn.Sequential(nn.ConvTranspose2d(3, 4, 3, groups=1), nn.ReLU()), [2, 3, 5, 5], 2),
    "grouped": (lambda: nn.Conv2d(4, 8, 3, groups=2, stride=2, padding=1), [2, 4, 9, 9], 2),
    "linear": (lambda: nn.Sequential(nn.Linear(6, 7), nn.GELU(), nn.Linear(7, 5, bias=False)), [4, 6], 3),
    "sequences": (lambda: nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 7), nn.Linear(7, 5, bias=False)), [4, 3, 6], 3),
    "attention": (make_residual_attention, [2, 3, 8], 3),
    "used twice": (make_twice, [4, 6], 0),
    "first factor": (make_first_factor, [4, 2, 3], 0),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_both_halves_give_the_bits_of_the_whole(name: str) -> None:
    make_module, shape, waiting_count = CASES[name]
    torch.manual_seed(0)
    module, x = make_module(), torch.randn(*shape).requires_grad_()
    weights = list(module.parameters())
    y = module(x)
    assert is_split_exact([y], [torch.randn_like(y)], [x], weights, [])
    for p in weights:
        p.grad = None
    y = module(x)
    weight_backward = run_input_backward([y], [torch.ones_like(y)], [x])
    assert all(p.grad is None for p in weights), "all gradients are added by W"
    finished = {id(node.variable) for node in weight_backward.finished}
    assert sum(id(p) not in finished for p in weights) == waiting_count
    weight_backward.add()
    assert all(p.grad is not None for p in weights)


def test_the_first_half_frees_tensors_that_the_second_does_not_need() -> None:
    module, x = (
        nn.Sequential(nn.Linear(4, 4), nn.Sigmoid(), nn.Softmax(1), nn.Linear(4, 4)),
        torch.randn(2, 4),
    )
    y = module(x)
    weight_backward = run_input_backward([y], [torch.ones_like(y)], [])
    with pytest.raises(RuntimeError, match="second time"):
        y.sum().backward()
    pointers = {t.data_ptr() for t in weight_backward.tensors}
    assert x.data_ptr() in pointers and len(pointers) == 4, (
        "the inputs and the outputs' gradients of two layers"
    )


def test_a_backward_that_cannot_run_in_parts_is_done_at_once() -> None:
    """A reentrant checkpoint cannot compute some gradients alone."""
    layer, x = nn.Linear(3, 3), torch.randn(2, 3).requires_grad_()

    def run_checkpoint() -> torch.Tensor:
        return checkpoint(layer, x, use_reentrant=True)  # type: ignore[no-any-return]

    with pytest.raises(RuntimeError):
        run_input_backward([run_checkpoint()], [torch.ones(2, 3)], [x])
    weights = list(layer.parameters())
    layer.weight.grad = torch.ones(3, 3)
    weight_backward = run_whole_backward([run_checkpoint()], [torch.ones(2, 3)], weights)
    assert torch.equal(layer.weight.grad, torch.ones(3, 3)) and x.grad is not None
    weight_backward.add()
    expected = torch.ones(3, 3) + torch.autograd.grad(layer(x).sum(), [layer.weight])[0]
    assert torch.equal(layer.weight.grad, expected)
