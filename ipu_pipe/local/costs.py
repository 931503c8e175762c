"""What local-parallel training costs: total and sequential FLOPs (Laskin et al. 2020, appendix A).

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
from typing import Any, Dict, List, Sequence, Tuple

import torch
from torch import nn

from ipu_pipe.errors import BadInput
from ipu_pipe.local.blocks import Blocks
from ipu_pipe.model.probe import Loss

OPTIMIZER_FLOPS = 10  # a parameter and step
AVERAGING_FLOPS = 2  # a parameter and step, of duplicated layers
LOSS_FLOPS = 5  # a class: softmax cross-entropy
BACKPROPAGATION = "backpropagation"
METHODS = (BACKPROPAGATION, "local_greedy", "local_overlapping", "local_chunked", "last_layers")


@dataclass(frozen=True)
class Costs:
    """FLOPs of a model for one example: `forward` of a layer (mean), `auxiliary` of a head with its loss, `backward` as a
    multiple of the forward; `layers`, `parameters` without auxiliary heads."""

    forward: float
    auxiliary: float
    backward: float
    layers: int
    parameters: int


def per_example(method: str, costs: Costs, k: int = 1) -> float:
    """FLOPs of one example in one step. `k`: blocks of local_chunked, layers of last_layers."""
    f, x, r, L = costs.forward, costs.auxiliary, costs.backward, costs.layers
    if method == "local_greedy":
        return (1 + r) * (f + x) * L
    if method == "local_overlapping":
        return (f + x) * L + (L - 1) * r * (2 * f + x) + r * (f + x)
    if method == "local_chunked":
        return (1 + r) * (f * L + k * x)
    if method == "last_layers":
        return (f * L + x) + r * (k * f + x)
    _check(method)
    return (1 + r) * (f * L + x)


def total(method: str, costs: Costs, steps: int, batch: int, k: int = 1) -> float:
    """FLOPs of `steps` updates of `batch` examples."""
    update = OPTIMIZER_FLOPS * costs.parameters
    if method == "local_overlapping":
        update += AVERAGING_FLOPS * costs.parameters
    return per_example(method, costs, k) * steps * batch + steps * update


def sequential(method: str, costs: Costs, steps: int, batch: int, k: int = 1) -> float:
    """FLOPs of `steps` updates that must follow one another, the paper's time."""
    r, L = costs.backward, costs.layers
    _check(method)
    parallel = {
        BACKPROPAGATION: 1.0, "local_greedy": L, "local_overlapping": L, "local_chunked": k,
        "last_layers": (L + k * r) / (k * (1 + r)),
    }[method]  # fmt: skip
    return total(method, costs, steps, batch, k) / (batch * parallel)


def _check(method: str) -> None:
    if method not in METHODS:
        raise BadInput(f"method: {method}: has no cost law, must be of {', '.join(METHODS)}")


# ---- counting on the modules themselves


def counted_by_paper(blocks: Blocks, x: torch.Tensor, classes: int) -> Costs:
    """The four numbers of a multi-layer perceptron by the paper's counting: a linear layer of I inputs and N outputs
    (2 I N - I) + N, its ReLU 2 N, softmax cross-entropy 5 a class, r = 1.5. Raises BadInput for other modules."""
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
            f"model: {type(module).__name__}: the paper states no count for it, only for linear layers and ReLUs"
        )

    own = _run(blocks, x, count, counts)
    heads = [own_head + LOSS_FLOPS * classes for own_head in own]
    if not heads:
        raise BadInput("model: one block has no auxiliary head to count")
    auxiliary = sum(heads) / len(heads)
    layers = len(blocks.pieces)
    forward = (sum(counts) + LOSS_FLOPS * classes - auxiliary) / layers  # the last block ends with the model's own head
    return Costs(forward, auxiliary, 1.5, layers, _parameters(blocks))


def _run(blocks: Blocks, x: torch.Tensor, count: Any, counts: List[float]) -> List[float]:
    """Fill `counts` with each block's FLOPs for an example; returns those of the heads."""
    heads = [0.0 for _ in blocks.heads]
    places: Dict[int, Tuple[List[float], int]] = {}
    for index, piece in enumerate(blocks.pieces):
        places.update({id(module): (counts, index) for module in piece.modules()})
    for place, head in enumerate(blocks.heads.values()):
        places.update({id(module): (heads, place) for module in head.modules()})
    handles = []

    def add(module: nn.Module, inputs: Any, output: Any) -> None:
        where, index = places[id(module)]
        where[index] += count(module, inputs, output)

    counted: List[nn.Module] = [*blocks.pieces, *blocks.heads.values()]
    for part in counted:
        for module in part.modules():
            if not any(True for _ in module.children()):
                handles.append(module.register_forward_hook(add))
    try:
        with torch.no_grad():
            blocks.outputs(x)
    finally:
        for handle in handles:
            handle.remove()
    return heads


def counted(blocks: Blocks, loss: Loss, x: torch.Tensor, y: torch.Tensor) -> Costs:
    """The four numbers of any model, by PyTorch's counter of the FLOPs of products and convolutions, forward and backward
    (torch 2.1 or later). A multiplication and an addition are two."""
    try:
        from torch.utils.flop_counter import FlopCounterMode
    except ImportError:
        raise BadInput("FLOPs are counted by torch.utils.flop_counter: needs torch 2.1 or later") from None

    def flops(work: Any) -> Tuple[float, Any]:
        with FlopCounterMode(display=False) as counter:
            result = work()
        return float(counter.get_total_flops()) / len(x), result

    from ipu_pipe.local.blocks import one_activation

    forward, heads, value = 0.0, [], x
    for index, piece in enumerate(blocks.pieces):
        entering = value
        own, value = flops(lambda: piece(entering))
        forward += own
        head = blocks.head(index)
        if head is not None:
            activation = one_activation(value)
            heads.append(flops(lambda: head(activation))[0])
    result = loss(value, y)
    trained = [p for p in blocks.model.parameters() if p.requires_grad]
    backward, _ = flops(lambda: torch.autograd.grad(result, trained, allow_unused=True))
    auxiliary = sum(heads) / len(heads) if heads else 0.0
    layers = len(blocks.pieces)
    return Costs((forward - auxiliary) / layers, auxiliary, backward / forward, layers, _parameters(blocks))


def _parameters(blocks: Blocks) -> int:
    return sum(p.numel() for p in blocks.model.parameters())


# ---- fronts


def front(points: Sequence[Tuple[float, float]]) -> List[Tuple[float, float]]:
    """The Pareto front of (sequential, total) costs: the points than which no other is less in one and no more in the other."""
    kept: List[Tuple[float, float]] = []
    for point in sorted(set(points)):
        if not kept or point[1] < kept[-1][1]:
            kept.append(point)
    return kept
