"""The FLOPs of local-parallel training: a law for each structure (Laskin et al. 2020, appendix A),
and the counts that it needs.

The laws give total and sequential FLOPs from four numbers of a model: f, forward FLOPs of a layer
(the mean); x, those of an auxiliary head with its loss; r, the cost of a backward as a multiple of
its forward; L, the number of layers. K is the number of blocks. An update costs its examples and 10
FLOPs per parameter for the optimizer. *Total* is all work.
*Sequential* is the work that must be done one after another if each example has its own processor, and each block too if blocks
do not wait for one another.

    method              an example                                     divided by
    backpropagation     (1+r) (f L + x)                                batch
    local_greedy        (1+r) (f + x) L                                batch L
    local_overlapping   (f+x) L + (L-1) r (2 f + x) + r (f + x)        batch L
    local_chunked       (1+r) (f L + K x)                              batch K
    last_layers (k)     (f L + x) + r (k f + x)                        batch (L + k r) / (k (1 + r))
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any, Callable, List, Sequence, Tuple, Union

import torch
from torch import nn

from ipu_pipe.errors import BadInput
from ipu_pipe.local.blocks import Blocks
from ipu_pipe.model.flops import separate_attention

# of softmax cross-entropy, per class
LOSS_FLOPS = 5
# per parameter and update: the optimizer, and the averaging of duplicated layers
OPTIMIZER_FLOPS = 10
AVERAGING_FLOPS = 2


@dataclass(frozen=True)
class Flops:
    """The numbers f, x, r and L of a model for one example, and its parameters without auxiliary
    heads.
    """

    forward: float
    auxiliary: float
    backward: float
    layers: int
    parameters: int


@dataclass(frozen=True)
class Law:
    """The cost of a structure; k is the number of blocks of local_chunked, of layers of
    last_layers.

    `example(flops, k)` are the FLOPs of one example, `parallel(flops, k)` the divisor of the
    sequential cost besides the batch size, `update` the FLOPs per parameter and update.
    """

    example: Callable[[Flops, int], float]
    parallel: Callable[[Flops, int], float]
    update: int = OPTIMIZER_FLOPS


def _count_overlapping(c: Flops, k: int) -> float:
    f, x, r, L = c.forward, c.auxiliary, c.backward, c.layers
    return (f + x) * L + (L - 1) * r * (2 * f + x) + r * (f + x)


BACKPROPAGATION = "backpropagation"
LAWS = {
    BACKPROPAGATION: Law(
        lambda c, k: (1 + c.backward) * (c.forward * c.layers + c.auxiliary), lambda c, k: 1.0
    ),
    "local_greedy": Law(
        lambda c, k: (1 + c.backward) * (c.forward + c.auxiliary) * c.layers, lambda c, k: c.layers
    ),
    "local_overlapping": Law(
        _count_overlapping, lambda c, k: c.layers, OPTIMIZER_FLOPS + AVERAGING_FLOPS
    ),
    "local_chunked": Law(
        lambda c, k: (1 + c.backward) * (c.forward * c.layers + k * c.auxiliary), lambda c, k: k
    ),
    "last_layers": Law(
        lambda c, k: (
            (c.forward * c.layers + c.auxiliary) + c.backward * (k * c.forward + c.auxiliary)
        ),
        lambda c, k: (c.layers + k * c.backward) / (k * (1 + c.backward)),
    ),
}


def compute_per_example(method: Union[str, Law], costs: Flops, k: int = 1) -> float:
    """Return the FLOPs of one example in one update; k is the number of blocks of local_chunked, of
    layers of last_layers.
    """
    return _find_law(method).example(costs, k)


def compute_total(
    method: Union[str, Law], costs: Flops, steps: int, batch: int, k: int = 1
) -> float:
    """Return the FLOPs of `steps` updates of `batch` examples."""
    return (
        compute_per_example(method, costs, k) * steps * batch
        + steps * _find_law(method).update * costs.parameters
    )


def compute_sequential(
    method: Union[str, Law], costs: Flops, steps: int, batch: int, k: int = 1
) -> float:
    """Return the FLOPs of `steps` updates that must be done one after another, the paper's time."""
    return compute_total(method, costs, steps, batch, k) / (
        batch * _find_law(method).parallel(costs, k)
    )


def make_auglocal_law(depths: Sequence[int]) -> Law:
    """Return the law of AugLocal's heads: the head of layer l is d_l layers like the model's, f
    each, and a usual head, x.

    An example costs (1+r) (f (L + sum of d_l) + x L); the sequential part is (1+r) (f + f max d_l +
    x).
    """

    def example(c: Flops, k: int) -> float:
        return (1 + c.backward) * (c.forward * (c.layers + sum(depths)) + c.auxiliary * c.layers)

    def parallel(c: Flops, k: int) -> float:
        return example(c, k) / (
            (1 + c.backward) * (c.forward * (1 + max(depths, default=0)) + c.auxiliary)
        )

    return Law(example, parallel)


def _find_law(method: Union[str, Law]) -> Law:
    if isinstance(method, Law):
        return method
    if method not in LAWS:
        raise BadInput(f"method: {method}: has no cost law, must be one of {', '.join(LAWS)}")
    return LAWS[method]


# ---- counting on the modules themselves


def count_by_paper(blocks: Blocks, x: torch.Tensor, classes: int) -> Flops:
    """Count a multi-layer perceptron as the paper does, with r = 1.5. Raise `BadInput` for other
    modules.

    A linear layer of I inputs and N outputs has (2 I N - I) + N FLOPs, its ReLU 2 N, softmax
    cross-entropy 5 per class.
    """
    by_block, by_head = _count_forward(blocks, x)
    heads = [flops + LOSS_FLOPS * classes for flops in by_head]
    if not heads:
        raise BadInput("model: one block has no auxiliary head to count")
    auxiliary = sum(heads) / len(heads)
    layers = len(blocks.pieces)
    # the last block ends with the model's own head
    forward = (sum(by_block) + LOSS_FLOPS * classes - auxiliary) / layers
    parameters = sum(p.numel() for p in blocks.model.parameters())
    return Flops(forward, auxiliary, 1.5, layers, parameters)


def count_by_torch(blocks: Blocks, x: torch.Tensor) -> Flops:
    """Count a model of blocks by PyTorch's counter of matrix products, with r = 2: a backward is
    two products for each one.
    """
    from torch.utils.flop_counter import FlopCounterMode

    totals = []
    for forward in (blocks.model, blocks.compute_outputs):
        with separate_attention(), torch.no_grad(), FlopCounterMode(display=False) as counter:
            forward(x)
        totals.append(counter.get_total_flops() / len(x))
    heads, layers = len(blocks.heads), len(blocks.pieces)
    auxiliary = (totals[1] - totals[0]) / heads
    # the last block ends with the model's own head
    return Flops(
        (totals[0] - auxiliary) / layers,
        auxiliary,
        2.0,
        layers,
        sum(p.numel() for p in blocks.model.parameters()),
    )


def _count_forward(blocks: Blocks, x: torch.Tensor) -> Tuple[List[float], List[float]]:
    """Return the FLOPs of each block, and of each head, for an example."""
    by_block, by_head = [0.0 for _ in blocks.pieces], [0.0 for _ in blocks.heads]
    # id of a module -> where its FLOPs are added
    counters = {
        id(module): (by_block, i)
        for i, piece in enumerate(blocks.pieces)
        for module in piece.modules()
    }
    for i, head in enumerate(blocks.heads.values()):
        counters.update({id(module): (by_head, i) for module in head.modules()})

    def add(module: nn.Module, inputs: Any, output: Any) -> None:
        counts, index = counters[id(module)]
        counts[index] += _count_layer(module, output, len(x))

    with contextlib.ExitStack() as hooks, torch.no_grad():
        for module in nn.ModuleList([*blocks.pieces, *blocks.heads.values()]).modules():
            if not module._modules:
                hooks.enter_context(module.register_forward_hook(add))
        blocks.compute_outputs(x)
    return by_block, by_head


def _count_layer(module: nn.Module, output: torch.Tensor, samples: int) -> float:
    if isinstance(module, nn.Linear):
        products = 2 * module.in_features * module.out_features - module.in_features
        return float(products + (module.out_features if module.bias is not None else 0))
    if isinstance(module, nn.ReLU):
        return float(2 * output.numel() // samples)
    if isinstance(module, (nn.Flatten, nn.Identity)):
        return 0.0
    raise BadInput(
        f"model: {type(module).__name__}: the paper has no count for it, only for linear layers "
        f"and ReLUs"
    )


# ---- fronts


def find_front(points: Sequence[Tuple[float, float]]) -> List[Tuple[float, float]]:
    """Return the Pareto front of (sequential, total) costs: points that no other point improves in
    one without loss in the other."""
    front: List[Tuple[float, float]] = []
    for point in sorted(set(points)):
        if not front or point[1] < front[-1][1]:
            front.append(point)
    return front
