"""The cost of local-parallel training, by the law of each structure, and the counts of a model that the laws need."""

from __future__ import annotations

import contextlib
from typing import Any, Dict, List, Sequence, Tuple, Union

import torch
from torch import nn

from ipu_pipe.errors import BadInput
from ipu_pipe.local import structures
from ipu_pipe.local.blocks import Blocks
from ipu_pipe.local.structures import STRUCTURES, Flops, Law
from ipu_pipe.model.flops import separate_attention

# of softmax cross-entropy, per class
LOSS_FLOPS = 5
BACKPROPAGATION = "backpropagation"
LAWS = {BACKPROPAGATION: structures.BACKPROPAGATION, **{name: row.law for name, row in STRUCTURES.items()}}


def compute_per_example(method: Union[str, Law], costs: Flops, k: int = 1) -> float:
    """Return the FLOPs of one example in one update; k is the number of blocks of local_chunked, of layers of last_layers."""
    return _find_law(method).example(costs, k)


def compute_total(method: Union[str, Law], costs: Flops, steps: int, batch: int, k: int = 1) -> float:
    """Return the FLOPs of `steps` updates of `batch` examples."""
    return compute_per_example(method, costs, k) * steps * batch + steps * _find_law(method).update * costs.parameters


def compute_sequential(method: Union[str, Law], costs: Flops, steps: int, batch: int, k: int = 1) -> float:
    """Return the FLOPs of `steps` updates that must be done one after another, the paper's time."""
    return compute_total(method, costs, steps, batch, k) / (batch * _find_law(method).parallel(costs, k))


def make_auglocal_law(depths: Sequence[int]) -> Law:
    """Return the law of AugLocal's heads: the head of layer l is d_l layers like the model's, f each, and a usual head, x.

    An example costs (1+r) (f (L + sum of d_l) + x L); the sequential part is (1+r) (f + f max d_l + x).
    """

    def example(c: Flops, k: int) -> float:
        return (1 + c.backward) * (c.forward * (c.layers + sum(depths)) + c.auxiliary * c.layers)

    def parallel(c: Flops, k: int) -> float:
        return example(c, k) / ((1 + c.backward) * (c.forward * (1 + max(depths, default=0)) + c.auxiliary))

    return Law(example, parallel)


def _find_law(method: Union[str, Law]) -> Law:
    if isinstance(method, Law):
        return method
    if method not in LAWS:
        raise BadInput(f"method: {method}: has no cost law, must be one of {', '.join(LAWS)}")
    return LAWS[method]


# ---- counting on the modules themselves


def count_by_paper(blocks: Blocks, x: torch.Tensor, classes: int) -> Flops:
    """Count a multi-layer perceptron as the paper does, with r = 1.5. Raise `BadInput` for other modules.

    A linear layer of I inputs and N outputs has (2 I N - I) + N FLOPs, its ReLU 2 N, softmax cross-entropy 5 per class.
    """
    samples = len(x)
    counts = [0.0 for _ in blocks.pieces]

    def count(module: nn.Module, inputs: Any, output: Any) -> float:
        if isinstance(module, nn.Linear):
            products = 2 * module.in_features * module.out_features - module.in_features
            return float(products + (module.out_features if module.bias is not None else 0))
        if isinstance(module, nn.ReLU):
            return float(2 * output.numel() // samples)
        if isinstance(module, (nn.Flatten, nn.Identity)):
            return 0.0
        raise BadInput(
            f"model: {type(module).__name__}: the paper has no count for it, only for linear layers and ReLUs"
        )

    heads = [flops + LOSS_FLOPS * classes for flops in _count_forward(blocks, x, count, counts)]
    if not heads:
        raise BadInput("model: one block has no auxiliary head to count")
    auxiliary = sum(heads) / len(heads)
    layers = len(blocks.pieces)
    # the last block ends with the model's own head
    forward = (sum(counts) + LOSS_FLOPS * classes - auxiliary) / layers
    parameters = sum(p.numel() for p in blocks.model.parameters())
    return Flops(forward, auxiliary, 1.5, layers, parameters)


def count_by_torch(blocks: Blocks, x: torch.Tensor) -> Flops:
    """Count a model of blocks by PyTorch's counter of matrix products, with r = 2: a backward is two products for each one."""
    from torch.utils.flop_counter import FlopCounterMode

    totals = []
    for forward in (blocks.model, blocks.outputs):
        with separate_attention(), torch.no_grad(), FlopCounterMode(display=False) as counter:
            forward(x)
        totals.append(counter.get_total_flops() / len(x))
    heads, layers = len(blocks.heads), len(blocks.pieces)
    auxiliary = (totals[1] - totals[0]) / heads
    # the last block ends with the model's own head
    return Flops((totals[0] - auxiliary) / layers, auxiliary, 2.0, layers, sum(p.numel() for p in blocks.model.parameters()))


def _count_forward(blocks: Blocks, x: torch.Tensor, count: Any, counts: List[float]) -> List[float]:
    """Add the FLOPs of each block for an example to `counts`; return those of the heads."""
    heads = [0.0 for _ in blocks.heads]
    places: Dict[int, Tuple[List[float], int]] = {}
    for index, piece in enumerate(blocks.pieces):
        places.update({id(module): (counts, index) for module in piece.modules()})
    for place, head in enumerate(blocks.heads.values()):
        places.update({id(module): (heads, place) for module in head.modules()})

    def add(module: nn.Module, inputs: Any, output: Any) -> None:
        where, index = places[id(module)]
        where[index] += count(module, inputs, output)

    modules = nn.ModuleList([*blocks.pieces, *blocks.heads.values()]).modules()
    with contextlib.ExitStack() as hooks, torch.no_grad():
        for module in modules:
            if not module._modules:
                hooks.enter_context(module.register_forward_hook(add))
        blocks.outputs(x)
    return heads


# ---- fronts


def find_front(points: Sequence[Tuple[float, float]]) -> List[Tuple[float, float]]:
    """Return the Pareto front of (sequential, total) costs: points that no other point improves in one without loss in the
    other."""
    front: List[Tuple[float, float]] = []
    for point in sorted(set(points)):
        if not front or point[1] < front[-1][1]:
            front.append(point)
    return front
