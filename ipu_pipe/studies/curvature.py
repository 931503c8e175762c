"""The largest eigenvalue of the Hessian of a loss on a batch, by power iteration."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any, Callable, ContextManager, List, Optional, Sequence, Tuple

import torch
from torch import nn

from ipu_pipe.errors import BadInput, summarize
from ipu_pipe.model.batch import call_model, clone_tensors
from ipu_pipe.model.loss import Loss
from ipu_pipe.model.observation import observe_effects
from ipu_pipe.model.restoring import undisturbed

Vector = List[torch.Tensor]


@dataclass(frozen=True)
class Curvature:
    """The largest eigenvalue (`value`) of a Hessian, its eigenvector v by stage, and how well the iteration converged.

    `shares` are the stages' shares of the square of v, `residual` is |Hv - value v| / value of the last iteration. `discrepancy`,
    if it was measured, is by how much the gradient along v falls when the weights of the backward alone move along v, as a
    multiple of the value (PipeMare's Delta / lambda).
    """

    value: float
    shares: Tuple[float, ...]
    iterations: int
    residual: float
    discrepancy: Optional[float] = None


def measure_curvature(
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
    """Measure the curvature by power iteration from a vector drawn by `seed`.

    It ends when the residual is at most `tolerance`, or after `iterations`. If the eigenvalue of the greatest magnitude is
    negative, it is subtracted and the iteration goes on. A Hessian-vector product is the gradient of (gradient . vector)
    from one forward of the batch, with norms as in training and random modules as in evaluation. The model is left as it
    was. `stages` are the parameters that move, by stage. Raise `BadInput` if the model cannot be differentiated twice or has
    no positive curvature.
    """
    parameters = [p for stage in stages for p in stage]
    generator = torch.Generator().manual_seed(seed)
    start = [torch.randn(p.shape, generator=generator).to(p.device, p.dtype) for p in parameters]

    def compute_loss() -> torch.Tensor:
        return loss(call_model(model, clone_tensors(x)), y)

    with undisturbed(model), _allow_second_derivatives():
        _fix_random_modules(model, x)
        try:
            gradient = _differentiate(compute_loss(), parameters, create_graph=True)
            value, v, done, residual = _iterate(
                lambda v: _multiply_hessian(gradient, parameters, v), start, iterations, tolerance
            )
        except (RuntimeError, NotImplementedError) as error:
            raise BadInput(
                f"model: its curvature cannot be measured: {summarize(error)}: give it by --curvature"
            ) from error
        if not value > 0:
            raise BadInput(
                f"model: found no direction of positive curvature in {done} iterations; raise --iterations or"
                " give it by --curvature"
            )
        squares = iter([float((part**2).sum()) for part in v])
        shares = tuple(sum(next(squares) for _ in stage) for stage in stages)
        discrepancy_value = _measure_discrepancy(compute_loss, parameters, v) / value if discrepancy else None
    return Curvature(value, shares, done, residual, discrepancy_value)


def _fix_random_modules(model: nn.Module, x: Any) -> None:
    names = observe_effects(model, x).draws
    model.train()
    for name in names:
        model.get_submodule(name).training = False


def _allow_second_derivatives() -> ContextManager[Any]:
    """Return a context in which attention uses plain operations: its fused kernels have no second derivative."""
    try:
        from torch.nn.attention import SDPBackend, sdpa_kernel
    except ImportError:  # torch 2.0 has no fused kernel for CPUs that train
        return contextlib.nullcontext()
    return sdpa_kernel(SDPBackend.MATH)


def _differentiate(
    values: Any, parameters: Sequence[nn.Parameter], weights: Optional[Vector] = None, **graph: bool
) -> Vector:
    """Return the gradient of a scalar, or of the sum of `values` times `weights`; zeros for a parameter without a part in it."""
    gradients = torch.autograd.grad(values, list(parameters), weights, allow_unused=True, **graph)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, gradients)]


def _multiply_hessian(gradient: Vector, parameters: Sequence[nn.Parameter], v: Vector) -> Vector:
    curved = [(g, part) for g, part in zip(gradient, v) if g.requires_grad]
    if not curved:
        return [torch.zeros_like(part) for part in v]
    return _differentiate([g for g, _ in curved], parameters, [part for _, part in curved], retain_graph=True)


def _dot(a: Vector, b: Vector) -> float:
    return float(sum((p * q).sum() for p, q in zip(a, b)))


def _iterate(product: Any, v: Vector, iterations: int, tolerance: float) -> Tuple[float, Vector, int, float]:
    """Return (eigenvalue, unit vector, iterations, residual)."""
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
            shift = min(shift, value)  # the negative end of the spectrum: go on with the positive one
        moved = [h - shift * part for h, part in zip(moved, v)]
        length = _dot(moved, moved) ** 0.5
        if not length:
            break
        v = [part / length for part in moved]
    return value, v, done, residual


def _measure_discrepancy(
    compute_loss: Callable[[], torch.Tensor], parameters: Sequence[nn.Parameter], v: Vector
) -> float:
    """Return -v . (derivative of the gradient by the weights that the backward reads) v.

    It is a central difference, with weights written in place between forward and backward.
    """
    far = 1e-3 * float(sum((p.detach() ** 2).sum() for p in parameters)) ** 0.5
    before = [p.detach().clone() for p in parameters]

    def compute_slope(distance: float) -> float:
        """Return the gradient along v of a pass whose backward reads weights moved by `distance` times v."""
        value = compute_loss()
        try:
            for p, part in zip(parameters, v):
                p.data.add_(part, alpha=distance)
            gradient = _differentiate(value, parameters)
        finally:
            for p, weights in zip(parameters, before):
                p.data.copy_(weights)
        return _dot(gradient, v)

    return -(compute_slope(far) - compute_slope(-far)) / (2 * far)
