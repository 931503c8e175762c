"""Build small models whose stages are modules in a row, so that they run whole and stage by
stage."""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Tuple

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ipu_pipe.model.stages import begin_stage
from tests.support.models import Composed


def make_mlp_stages() -> List[nn.Module]:
    return [
        nn.Sequential(nn.Linear(12, 10), nn.Tanh()),
        nn.Sequential(nn.Linear(10, 9), nn.ReLU()),
        nn.Sequential(nn.Linear(9, 9), nn.LayerNorm(9), nn.ReLU()),
        nn.Linear(9, 4),
    ]


def make_convolution_stages() -> List[nn.Module]:
    return [
        nn.Sequential(nn.Unflatten(1, (3, 2, 2)), nn.Conv2d(3, 6, 3, padding=1)),
        nn.Sequential(nn.GroupNorm(2, 6), nn.ReLU()),
        nn.Sequential(nn.Conv2d(6, 6, 3, padding=1), nn.GroupNorm(3, 6), nn.ReLU()),
        nn.Sequential(nn.Flatten(), nn.Linear(24, 4)),
        nn.Identity(),
    ]


def make_residual_stages() -> List[nn.Module]:
    """Return stages of which three share a residual block: its input travels beside the block's
    output."""
    first = nn.Sequential(nn.Unflatten(1, (3, 2, 2)), nn.Conv2d(3, 4, 3, padding=1))
    second = nn.Sequential(nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1, bias=False))
    third = nn.Sequential(nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1))
    return [
        first,
        Composed(lambda m, x: (m.inner(x), x), inner=second),
        Composed(lambda m, pair: (m.inner(pair[0]), pair[1]), inner=third),
        Composed(lambda m, pair: pair[0] + pair[1]),
        nn.Sequential(nn.Flatten(), nn.Linear(16, 4)),
    ]


def make_tied_stages() -> List[nn.Module]:
    """Return stages of which the second and the last share a weight."""
    stages: List[nn.Module] = [
        nn.Sequential(nn.Linear(12, 9), nn.Tanh()),
        nn.Sequential(nn.Linear(9, 9), nn.Tanh()),
        nn.Sequential(nn.Linear(9, 9), nn.LayerNorm(9), nn.ReLU()),
        nn.Sequential(nn.Linear(9, 9, bias=False), nn.ReLU(), nn.Linear(9, 4)),
    ]
    stages[3][0].weight = stages[1][0].weight  # type: ignore[index]
    return stages


def make_thrice_tied_stages() -> List[nn.Module]:
    """Return stages of which three share one weight; the last has no other weight."""
    stages: List[nn.Module] = [
        nn.Sequential(nn.Linear(12, 9), nn.Tanh()),
        nn.Sequential(nn.Linear(9, 9), nn.Tanh(), nn.Linear(9, 12), nn.Tanh()),
        nn.Sequential(nn.Linear(12, 9), nn.ReLU()),
        nn.Sequential(nn.Linear(9, 12, bias=False), nn.Tanh()),
        nn.Linear(12, 9, bias=False),
    ]
    for module in (stages[2][0], stages[4]):  # type: ignore[index]
        module.weight = stages[0][0].weight  # type: ignore[index]
    return stages


# model -> stage -> name of a weight -> the previous stage that uses it, and its name there
TIES: Dict[str, Dict[int, Dict[str, Tuple[int, str]]]] = {
    "tied": {3: {"0.weight": (1, "0.weight")}},
    "thrice": {2: {"0.weight": (0, "0.weight")}, 4: {"weight": (2, "0.weight")}},
}
TIED = {"tied": make_tied_stages, "thrice": make_thrice_tied_stages}


def make_repeating_model() -> nn.Sequential:
    """Return a model in which a linear layer runs a second time, after other modules."""
    torch.manual_seed(3)
    repeated = nn.Linear(4, 4)
    return nn.Sequential(
        nn.Linear(12, 4),
        begin_stage(repeated),
        begin_stage(nn.Tanh()),
        repeated,
        begin_stage(nn.Linear(4, 4)),
    )


def make_checkpointed_stages() -> List[nn.Module]:
    """Return stages that recompute their forward in the backward, with the same dropout masks."""

    def make_stage() -> nn.Module:
        inner = nn.Sequential(nn.Linear(12, 12), nn.Dropout(0.3), nn.Tanh())
        return Composed(lambda m, x: checkpoint(m.inner, x, use_reentrant=False), inner=inner)

    return [*(make_stage() for _ in range(3)), nn.Linear(12, 4)]


def make_redrawing_stages() -> List[nn.Module]:
    """Return stages that share one dropout and draw from it three times, twice inside a
    checkpoint."""

    def forward(m: Any, x: torch.Tensor) -> Any:
        return checkpoint(lambda x: m.drop(m.linear(m.drop(x))), m.drop(x), use_reentrant=False)

    drop = nn.Dropout(0.3)
    return [Composed(forward, linear=nn.Linear(12, width), drop=drop) for width in (12, 12, 12, 4)]


MODELS: Dict[str, Callable[[], List[nn.Module]]] = {
    "mlp": make_mlp_stages,
    "convolution": make_convolution_stages,
    "residual": make_residual_stages,
}


def join_stages(stages: List[nn.Module]) -> nn.Sequential:
    """Return the unsplit model, with a boundary before every stage."""
    return nn.Sequential(*[begin_stage(stage) for stage in stages])


class SkippingModel(nn.Module):
    """A model with skip connections across stages, a weight of its own and a check of its input."""

    def __init__(self, trains_scale: bool = True) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((12,), 0.5), requires_grad=trains_scale)
        self.a, self.b, self.c, self.d = (nn.Linear(12, 12) for _ in range(4))
        self.head = nn.Linear(12, 4)
        self.norm = nn.BatchNorm1d(12)
        for module in (self.b, self.c, self.d):
            begin_stage(module)

    def forward(self, x: torch.Tensor, extra: Any = None) -> torch.Tensor:
        if x.dim() != 2 or extra is not None:
            raise ValueError("x: must have two dimensions")
        first = self.a(x)
        second = self.b(first)
        third = self.c(second * self.scale) + first
        return self.head(self.d(self.norm(third)) + first + second)


def make_flat_skipping() -> nn.Module:
    """Return a model for digits in which a value and a weight of the model skip a stage."""

    def forward(m: Any, x: torch.Tensor) -> Any:
        first = m.a(m.flatten(x))
        return m.b(first) * m.scale + first

    a, b = nn.Linear(64, 10), begin_stage(nn.Linear(10, 10))
    return Composed(
        forward, flatten=nn.Flatten(), a=a, b=b, scale=nn.Parameter(torch.full((10,), 0.5))
    )


def make_forces() -> nn.Module:
    """Return a model for digits whose forward calls autograd: its first stage returns an
    energy's gradient."""

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            x = x.flatten(1).detach().requires_grad_()
            return torch.autograd.grad(m.energy(x).sum(), x, create_graph=m.training)[0]

    force = Composed(forward, energy=nn.Sequential(nn.Linear(64, 8), nn.Tanh()))
    return nn.Sequential(force, begin_stage(nn.Linear(64, 10)))


class ShrinkingModel(nn.Sequential):
    """A model for digits whose forward shrinks one of its own weights."""

    def __init__(self) -> None:
        inner = nn.Linear(64, 8)
        inner.register_forward_pre_hook(shrink_weight)
        super().__init__(nn.Flatten(), inner, begin_stage(nn.Linear(8, 10)))


def shrink_weight(module: nn.Module, inputs: Any) -> None:
    module.weight.data.mul_(0.9)  # type: ignore[operator,union-attr]


def make_cut_checkpoint() -> nn.Module:
    """Return a model for digits with a stage boundary inside a checkpoint."""

    def forward(m: Any, x: torch.Tensor) -> Any:
        return checkpoint(lambda x: m.b(m.a(x).tanh()), m.flatten(x), use_reentrant=False)

    return Composed(
        forward, flatten=nn.Flatten(), a=nn.Linear(64, 8), b=begin_stage(nn.Linear(8, 10))
    )


class OddModel(nn.Sequential):
    """A model for digits with a buffer that all stages share, an unused buffer and stages that
    begin with an in-place ReLU."""

    def __init__(self) -> None:
        table = nn.Module()
        table.register_buffer("values", torch.linspace(0.5, 1.5, 16))
        turn = lambda m, x: m.linear(x) * m.table.values  # noqa: E731
        first, second = (Composed(turn, linear=nn.Linear(16, 16), table=table) for _ in range(2))
        layers = [first, nn.ReLU(inplace=True), second, nn.ReLU(inplace=True), nn.Linear(16, 10)]
        super().__init__(nn.Flatten(), nn.Linear(64, 16), *[begin_stage(layer) for layer in layers])
        self.register_buffer("unused", torch.tensor(7))


def make_gate() -> nn.Module:
    """Return a model for digits whose first stage runs one of two layers, depending on the
    microbatch."""
    choose = lambda m, x: m.a(x) if int(x.sum() * 10) % 2 else m.b(x)  # noqa: E731
    gated = Composed(
        lambda m, x: choose(m, m.flatten(x)),
        flatten=nn.Flatten(),
        a=nn.Linear(64, 10),
        b=nn.Linear(64, 10),
    )
    return nn.Sequential(gated, begin_stage(nn.Linear(10, 10)))


def make_sorting() -> nn.Module:
    """Return a model for digits whose second stage sorts, which XLA's table of operations lacks."""
    sorting = Composed(lambda m, x: m.linear(x.sort().values), linear=nn.Linear(10, 10))
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10), begin_stage(sorting))


def draw_microbatches(
    count: int, size: int = 3, dtype: Any = torch.float64
) -> List[Tuple[torch.Tensor, torch.Tensor]]:
    """Return `count` random microbatches of `size` samples that fit every model of this module."""
    generator = torch.Generator().manual_seed(5)
    return [
        (
            torch.randn(size, 12, generator=generator, dtype=dtype),
            torch.randint(0, 4, (size,), generator=generator),
        )
        for _ in range(count)
    ]
