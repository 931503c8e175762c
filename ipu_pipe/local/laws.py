"""The laws of what local-parallel training costs: total and sequential FLOPs (Laskin et al. 2020, appendix A).

All laws go by four numbers of a model: f, forward FLOPs of a layer (the mean); x, of an auxiliary head with its loss; r, how many
times its forward a backward costs; L, layers. K: blocks. A step costs its examples and 10 FLOPs a parameter for the optimizer.
*Total* is all work; *sequential* the work that must follow one another when each example, and each block where blocks do not wait
for one another, has a processor of its own.

    method              an example                                     divided by
    backpropagation     (1+r) (f L + x)                                batch
    local_greedy        (1+r) (f + x) L                                batch L
    local_overlapping   (f+x) L + (L-1) r (2 f + x) + r (f + x)        batch L
    local_chunked       (1+r) (f L + K x)                              batch K
    last_layers (k)     (f L + x) + r (k f + x)                        batch (L + k r) / (k (1 + r))
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Callable

OPTIMIZER_FLOPS = 10  # a parameter and step
AVERAGING_FLOPS = 2  # a parameter and step, of duplicated layers


@dataclass(frozen=True)
class Flops:
    """FLOPs of a model for one example: `forward` of a layer (mean), `auxiliary` of a head with its loss, `backward` as a
    multiple of the forward; `layers`, `parameters` without auxiliary heads."""

    forward: float
    auxiliary: float
    backward: float
    layers: int
    parameters: int


@dataclass(frozen=True)
class Law:
    """`example(costs, k)`: FLOPs of one example in one step; `parallel(costs, k)`: what the total is divided by beside the
    batch; `update`: FLOPs a parameter and step. `k`: blocks of local_chunked, layers of last_layers."""

    example: Callable[[Flops, int], float]
    parallel: Callable[[Flops, int], float]
    update: int = OPTIMIZER_FLOPS


def _overlapping(c: Flops, k: int) -> float:
    f, x, r, L = c.forward, c.auxiliary, c.backward, c.layers
    return (f + x) * L + (L - 1) * r * (2 * f + x) + r * (f + x)


BACKPROPAGATION = Law(lambda c, k: (1 + c.backward) * (c.forward * c.layers + c.auxiliary), lambda c, k: 1.0)
GREEDY = Law(lambda c, k: (1 + c.backward) * (c.forward + c.auxiliary) * c.layers, lambda c, k: c.layers)
OVERLAPPING = Law(_overlapping, lambda c, k: c.layers, OPTIMIZER_FLOPS + AVERAGING_FLOPS)
CHUNKED = Law(lambda c, k: (1 + c.backward) * (c.forward * c.layers + k * c.auxiliary), lambda c, k: k)
LAST = Law(
    lambda c, k: (c.forward * c.layers + c.auxiliary) + c.backward * (k * c.forward + c.auxiliary),
    lambda c, k: (c.layers + k * c.backward) / (k * (1 + c.backward)),
)
