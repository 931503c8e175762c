"""Forward FLOPs of what runs between two looks, by PyTorch's own counter: matrix products, convolutions and attention, also those
that are called as functions. A multiplication and an addition are two.

torch 2.0 has no counter: there the layers' own formulas are taken (`by_formula`), which leave out attention and functional calls
and count 2 an output for other modules with weights. `HOW` says which.
"""

from __future__ import annotations

import contextlib
from typing import Any, Dict, Iterator, Optional

import torch
from torch import nn

try:
    from torch.utils.flop_counter import FlopCounterMode
except ImportError:  # torch 2.0
    FlopCounterMode = None  # type: ignore[assignment,misc]

HOW = (
    "counted by PyTorch"
    if FlopCounterMode is not None
    else f"by formulas of linear and convolution layers (torch {torch.__version__} has no counter): attention and functional "
    "calls are left out"
)


class Meter:
    """FLOPs since the last look."""

    def __init__(self, counter: Any) -> None:
        self._counter, self._seen = counter, 0

    def read(self) -> float:
        """FLOPs since the last `read`."""
        total = int(self._counter.get_total_flops())
        new, self._seen = total - self._seen, total
        return float(new)


@contextlib.contextmanager
def metered() -> Iterator[Optional[Meter]]:
    """A meter of all that runs inside; None where this PyTorch has no counter."""
    if FlopCounterMode is None:
        yield None
        return
    with _separate_attention(), FlopCounterMode(display=False, custom_mapping=_uncounted()) as counter:
        yield Meter(counter)


def _uncounted() -> Dict[Any, Any]:
    """Formulas of operations of the CPU that PyTorch's counter does not know."""
    found = {}
    for name, formula in (("_scaled_dot_product_flash_attention_for_cpu", _attention), ("mkldnn_rnn_layer", _recurrent)):
        operation = getattr(torch.ops.aten, name, None)
        if operation is not None:
            found[operation] = formula
    return found


def _attention(query: Any, key: Any, value: Any, *rest: Any, **options: Any) -> int:
    """query (b, h, n, d), key (b, h, m, d), value (b, h, m, e): the products with keys and with values."""
    batch, heads, length, width = query.shape
    return int(2 * batch * heads * length * key.shape[-2] * (width + value.shape[-1]))


def _recurrent(x: Any, into: Any, again: Any, *rest: Any, **options: Any) -> int:
    """One layer of an LSTM: x (n, b, i), weights from the input and from the state before."""
    return int(2 * x.shape[0] * x.shape[1] * (into.numel() + again.numel()))


_attention._get_raw = True  # type: ignore[attr-defined]
_recurrent._get_raw = True  # type: ignore[attr-defined]


@contextlib.contextmanager
def _separate_attention() -> Iterator[None]:
    """Without the fused attention that layers take in evaluation without gradients, of which the counter sees nothing."""
    switches = getattr(torch.backends, "mha", None)
    if switches is None:
        with torch.enable_grad():  # with gradients they do not take it
            yield
        return
    held = switches.get_fastpath_enabled()
    switches.set_fastpath_enabled(False)
    try:
        yield
    finally:
        switches.set_fastpath_enabled(held)


def by_formula(module: nn.Module, inputs: Any, output: Any) -> float:
    """Forward FLOPs of the module's own parameters."""
    weight = getattr(module, "weight", None)
    if not isinstance(output, torch.Tensor) or not isinstance(weight, torch.Tensor):
        return 0.0
    if isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        return 2.0 * output.numel() * weight[0].numel()
    if isinstance(module, (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)):
        return 2.0 * inputs[0].numel() * weight[0].numel()
    if isinstance(module, nn.Linear):
        return 2.0 * output.numel() * weight.shape[1]
    return 0.0 if isinstance(module, nn.Embedding) else 2.0 * output.numel()
