"""How sharp a loss is where a run starts: the largest eigenvalue of its Hessian on a batch, by power iteration."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any, ContextManager, Iterator, List, Optional, Sequence, Tuple

import torch
from torch import nn

from ipu_pipe.errors import BadInput, summarize
from ipu_pipe.model.batch import call_model, clone_tensors
from ipu_pipe.model.loss import Loss
from ipu_pipe.model.probe import observe_effects
from ipu_pipe.model.restoring import undisturbed

Vector = List[torch.Tensor]


@dataclass(frozen=True)
class Curvature:
    """`value`: the Hessian's largest eigenvalue; `shares`: of its eigenvector's square, by stage; `residual`: |Hv - value v|
    / value of the last iteration; `discrepancy`: as multiples of the value, by how much the gradient along v falls when the
    backward's weights alone move along v (PipeMare's Delta / lambda), where it was asked for."""

    value: float
    shares: Tuple[float, ...]
    iterations: int
    residual: float
    discrepancy: Optional[float] = None


def sharpest(
    model: nn.Module,
    loss: Loss,
    x: Any,
    y: Any,
    stages: Sequence[Sequence[nn.Parameter]],
    iterations: int = 100,
    tolerance: float = 0.01,
    seed: int = 0,
    discrepancy: bool = False,
) -> Curvature:
    """By power iteration from a vector drawn by `seed`, until the residual is at most `tolerance` or so many `iterations`;
    where the eigenvalue of the greatest magnitude is negative, it is subtracted and the iteration goes on. A Hessian-vector
    product is the gradient of (gradient . vector), from one forward of the batch: norms as in training, modules that draw
    random numbers as in evaluation. The model is left as found. `stages`: the parameters that move, by stage.

    Raises BadInput where the model cannot be differentiated twice, or curves nowhere upwards.
    """
    parameters = [p for own in stages for p in own]
    generator = torch.Generator().manual_seed(seed)
    start = [torch.randn(p.shape, generator=generator).to(p.device, p.dtype) for p in parameters]
    with undisturbed(model), _twice_differentiable():
        _deterministic(model, x)
        try:
            gradient = _gradient(model, loss, x, y, parameters, create_graph=True)
            value, v, done, residual = _power(lambda v: _product(gradient, parameters, v), start, iterations, tolerance)
        except (RuntimeError, NotImplementedError) as error:
            raise BadInput(
                f"model: its curvature cannot be measured: {summarize(error)}: give it by --curvature"
            ) from error
        if not value > 0:
            raise BadInput(
                f"model: in {done} iterations no direction was found in which its loss curves upwards: more --iterations, or"
                " give it by --curvature"
            )
        squares = iter([float((part**2).sum()) for part in v])
        shares = tuple(sum(next(squares) for _ in own) for own in stages)
        apart = _discrepancy(model, loss, x, y, parameters, v) / value if discrepancy else None
    return Curvature(value, shares, done, residual, apart)


def _deterministic(model: nn.Module, x: Any) -> None:
    names = observe_effects(model, x).draws
    model.train()
    for name in names:
        model.get_submodule(name).training = False


def _twice_differentiable() -> ContextManager[Any]:
    """Attention by plain operations: its fused kernels have no second derivative."""
    try:
        from torch.nn.attention import SDPBackend, sdpa_kernel
    except ImportError:  # torch 2.0 has no fused kernel for CPUs that train
        return contextlib.nullcontext()
    return sdpa_kernel(SDPBackend.MATH)


def _gradient(
    model: nn.Module,
    loss: Loss,
    x: Any,
    y: Any,
    parameters: Sequence[nn.Parameter],
    create_graph: bool = False,
) -> Vector:
    found = torch.autograd.grad(
        loss(call_model(model, clone_tensors(x)), y), list(parameters), create_graph=create_graph, allow_unused=True
    )
    return [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found)]


def _product(gradient: Vector, parameters: Sequence[nn.Parameter], v: Vector) -> Vector:
    curved = [(g, part) for g, part in zip(gradient, v) if g.requires_grad]
    if not curved:
        return [torch.zeros_like(part) for part in v]
    found = torch.autograd.grad(
        [g for g, _ in curved], list(parameters), [part for _, part in curved], retain_graph=True, allow_unused=True
    )
    return [torch.zeros_like(part) if h is None else h for h, part in zip(found, v)]


def _dot(a: Vector, b: Vector) -> float:
    return float(sum((p * q).sum() for p, q in zip(a, b)))


def _power(product: Any, v: Vector, iterations: int, tolerance: float) -> Tuple[float, Vector, int, float]:
    """(eigenvalue, unit vector, iterations, residual)."""
    shift, done, residual, value = 0.0, 0, float("inf"), 0.0
    length = _dot(v, v) ** 0.5
    v = [part / length for part in v]
    while done < iterations:
        done += 1
        moved = product(v)
        value = _dot(v, moved)
        off = sum(float(((h - value * part) ** 2).sum()) for h, part in zip(moved, v)) ** 0.5
        residual = off / abs(value) if value else float("inf")
        if residual <= tolerance:
            if value > 0:
                break
            shift = min(shift, value)  # the negative end: next the positive one
        moved = [h - shift * part for h, part in zip(moved, v)]
        length = _dot(moved, moved) ** 0.5
        if not length:
            break
        v = [part / length for part in moved]
    return value, v, done, residual


def _discrepancy(model: nn.Module, loss: Loss, x: Any, y: Any, parameters: Sequence[nn.Parameter], v: Vector) -> float:
    """-v . (the gradient's derivative by the weights that the backward reads) v: a central difference, by weights written in
    place between forward and backward."""
    far = 1e-3 * float(sum((p.detach() ** 2).sum() for p in parameters)) ** 0.5
    with _moved_between(parameters, v, far) as plus:
        ahead = plus(model, loss, x, y)
    with _moved_between(parameters, v, -far) as minus:
        behind = minus(model, loss, x, y)
    return -(_dot(ahead, v) - _dot(behind, v)) / (2 * far)


@contextlib.contextmanager
def _moved_between(parameters: Sequence[nn.Parameter], v: Vector, far: float) -> Iterator[Any]:
    """A gradient whose backward reads weights moved by far v; put back at the end."""
    before = [p.detach().clone() for p in parameters]

    def gradient(model: nn.Module, loss: Loss, x: Any, y: Any) -> Vector:
        value = loss(call_model(model, clone_tensors(x)), y)
        for p, part in zip(parameters, v):
            p.data.add_(part, alpha=far)
        found = torch.autograd.grad(value, list(parameters), allow_unused=True)
        return [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found)]

    try:
        yield gradient
    finally:
        for p, value in zip(parameters, before):
            p.data.copy_(value)
