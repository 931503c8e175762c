"""Small models whose stages are modules in a row, so that they can run whole and stage by stage."""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Tuple

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ipu_pipe.model.stages import begin_stage


class Split(nn.Module):
    """Begins a residual block: its input goes on beside what the block makes of it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
        return self.inner(x), x


class Beside(nn.Module):
    """Inside a residual block: works on the first of two tensors."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, pair: Tuple[torch.Tensor, torch.Tensor]) -> Tuple[torch.Tensor, torch.Tensor]:
        return self.inner(pair[0]), pair[1]


class Join(nn.Module):
    """Ends a residual block."""

    def forward(self, pair: Tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return pair[0] + pair[1]


def mlp() -> List[nn.Module]:
    return [
        nn.Sequential(nn.Linear(12, 10), nn.Tanh()),
        nn.Sequential(nn.Linear(10, 9), nn.ReLU()),
        nn.Sequential(nn.Linear(9, 9), nn.LayerNorm(9), nn.ReLU()),
        nn.Linear(9, 4),
    ]


def convolution() -> List[nn.Module]:
    return [
        nn.Sequential(nn.Unflatten(1, (3, 2, 2)), nn.Conv2d(3, 6, 3, padding=1)),
        nn.Sequential(nn.GroupNorm(2, 6), nn.ReLU()),
        nn.Sequential(nn.Conv2d(6, 6, 3, padding=1), nn.GroupNorm(3, 6), nn.ReLU()),
        nn.Sequential(nn.Flatten(), nn.Linear(24, 4)),
        nn.Identity(),
    ]


def residual() -> List[nn.Module]:
    return [
        nn.Sequential(nn.Unflatten(1, (3, 2, 2)), nn.Conv2d(3, 4, 3, padding=1)),
        Split(nn.Sequential(nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1, bias=False))),
        Beside(nn.Sequential(nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1))),
        Join(),
        nn.Sequential(nn.Flatten(), nn.Linear(16, 4)),
    ]


def tied() -> List[nn.Module]:
    """The second stage's weight is the last one's, too."""
    made: List[nn.Module] = [
        nn.Sequential(nn.Linear(12, 9), nn.Tanh()),
        nn.Sequential(nn.Linear(9, 9), nn.Tanh()),
        nn.Sequential(nn.Linear(9, 9), nn.LayerNorm(9), nn.ReLU()),
        nn.Sequential(nn.Linear(9, 9, bias=False), nn.ReLU(), nn.Linear(9, 4)),
    ]
    made[3][0].weight = made[1][0].weight  # type: ignore[index]
    return made


def thrice() -> List[nn.Module]:
    """A weight of three stages, of which the last one has no other."""
    made: List[nn.Module] = [
        nn.Sequential(nn.Linear(12, 9), nn.Tanh()),
        nn.Sequential(nn.Linear(9, 9), nn.Tanh(), nn.Linear(9, 12), nn.Tanh()),
        nn.Sequential(nn.Linear(12, 9), nn.ReLU()),
        nn.Sequential(nn.Linear(9, 12, bias=False), nn.Tanh()),
        nn.Linear(12, 9, bias=False),
    ]
    for later in (made[2][0], made[4]):  # type: ignore[index]
        later.weight = made[0][0].weight  # type: ignore[index]
    return made


# of the stages of a model: name of a weight -> the stage before that uses it, and its name there
TIES: Dict[str, Dict[int, Dict[str, Tuple[int, str]]]] = {
    "tied": {3: {"0.weight": (1, "0.weight")}},
    "thrice": {2: {"0.weight": (0, "0.weight")}, 4: {"weight": (2, "0.weight")}},
}
TIED = {"tied": tied, "thrice": thrice}


def twice() -> nn.Sequential:
    """A module of two weights that runs again after others."""
    torch.manual_seed(3)
    again = nn.Linear(4, 4)
    return nn.Sequential(
        nn.Linear(12, 4), begin_stage(again), begin_stage(nn.Tanh()), again, begin_stage(nn.Linear(4, 4))
    )


class Checkpointed(nn.Module):
    """Runs its forward a second time in the backward, and draws the same again."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(width, 12), nn.Dropout(0.3), nn.Tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)  # type: ignore[no-any-return]


def checkpointed() -> List[nn.Module]:
    return [*(Checkpointed(12) for _ in range(3)), nn.Linear(12, 4)]


class Redrawing(nn.Module):
    """Draws three times by a dropout that other stages draw by too, twice of these inside of a checkpoint."""

    def __init__(self, drop: nn.Module, width: int = 12) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(12, width), drop

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def run(x: torch.Tensor) -> torch.Tensor:
            return self.drop(self.linear(self.drop(x)))  # type: ignore[no-any-return]

        return checkpoint(run, self.drop(x), use_reentrant=False)  # type: ignore[no-any-return]


def redrawing() -> List[nn.Module]:
    drop = nn.Dropout(0.3)
    return [*(Redrawing(drop) for _ in range(3)), Redrawing(drop, 4)]


MODELS: Dict[str, Callable[[], List[nn.Module]]] = {"mlp": mlp, "convolution": convolution, "residual": residual}


def whole(stages: List[nn.Module]) -> nn.Sequential:
    """The unsplit model, annotated at every stage."""
    return nn.Sequential(*[begin_stage(stage) for stage in stages])


class Skipping(nn.Module):
    """No sequence: values skip stages, and the model has a weight and a branch of its own."""

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


class FlatSkipping(nn.Module):
    """Skipping, on the digits."""

    def __init__(self) -> None:
        super().__init__()
        self.flatten = nn.Flatten()
        self.a, self.b = nn.Linear(64, 10), begin_stage(nn.Linear(10, 10))
        self.scale = nn.Parameter(torch.full((10,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.a(self.flatten(x))
        return self.b(first) * self.scale + first


class Force(nn.Module):
    """Asks for a gradient inside of its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(64, 8), nn.Tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            x = x.flatten(1).detach().requires_grad_()
            return torch.autograd.grad(self.energy(x).sum(), x, create_graph=self.training)[0]


class Forces(nn.Sequential):
    """On the digits: classes from the gradient of an energy."""

    def __init__(self) -> None:
        super().__init__(Force(), begin_stage(nn.Linear(64, 10)))


class Shrinking(nn.Sequential):
    """On the digits: the forward writes a weight."""

    def __init__(self) -> None:
        inner = nn.Linear(64, 8)
        inner.register_forward_pre_hook(shrink)
        super().__init__(nn.Flatten(), inner, begin_stage(nn.Linear(8, 10)))


def shrink(module: nn.Module, inputs: Any) -> None:
    module.weight.data.mul_(0.9)  # type: ignore[operator,union-attr]


class CutCheckpoint(nn.Module):
    """On the digits: a checkpoint inside of which a stage begins."""

    def __init__(self) -> None:
        super().__init__()
        self.flatten, self.a, self.b = nn.Flatten(), nn.Linear(64, 8), begin_stage(nn.Linear(8, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda x: self.b(self.a(x).tanh()), self.flatten(x), use_reentrant=False)  # type: ignore[no-any-return]


class Turned(nn.Module):
    """A layer that shares a table with others."""

    def __init__(self, table: nn.Module) -> None:
        super().__init__()
        self.linear, self.table = nn.Linear(16, 16), table

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.table.values  # type: ignore[operator]


class Odd(nn.Sequential):
    """On the digits: a buffer that layers on all stages share, one that none uses, a stage that begins in place."""

    def __init__(self) -> None:
        table = nn.Module()
        table.register_buffer("values", torch.linspace(0.5, 1.5, 16))
        layers = [Turned(table), nn.ReLU(inplace=True), Turned(table), nn.ReLU(inplace=True), nn.Linear(16, 10)]
        super().__init__(nn.Flatten(), nn.Linear(64, 16), *[begin_stage(layer) for layer in layers])
        self.register_buffer("unused", torch.tensor(7))


class Gated(nn.Module):
    """On the digits: which of two layers runs depends on the microbatch."""

    def __init__(self) -> None:
        super().__init__()
        self.flatten, self.a, self.b = nn.Flatten(), nn.Linear(64, 10), nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.flatten(x)
        return self.a(x) if int(x.sum() * 10) % 2 else self.b(x)


class Gate(nn.Sequential):
    """Gated as one stage of a sequence."""

    def __init__(self) -> None:
        super().__init__(Gated(), begin_stage(nn.Linear(10, 10)))


def batches(count: int, size: int = 3, dtype: Any = torch.float64) -> List[Tuple[torch.Tensor, torch.Tensor]]:
    """Random microbatches for any of the models."""
    generator = torch.Generator().manual_seed(5)
    return [
        (torch.randn(size, 12, generator=generator, dtype=dtype), torch.randint(0, 4, (size,), generator=generator))
        for _ in range(count)
    ]
