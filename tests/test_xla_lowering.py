"""Every ATen operation that xla lowers gives what torch gives: values, shapes and dtypes."""

from __future__ import annotations

import itertools
import operator
from typing import Any, Dict, Iterable, List, NamedTuple, Tuple

import numpy as np
import pytest
import torch
import torch._prims  # torch.ops.prims has its operations from here
from torch import fx
from torch.utils._pytree import tree_map

jax = pytest.importorskip("jax", reason="xla needs jax: pip install 'ipu_pipe[xla]'")

from ipu_pipe.backends.xla.devices import import_jax  # noqa: E402

import_jax()
from ipu_pipe.backends.xla.lower import TABLE, list_missing, lower  # noqa: E402

INT = torch.int64
BOOL = torch.bool
NAN = float("nan")
INFINITY = float("inf")
# the end that torch gives a slice that has none
NO_END = 2**63 - 1
GENERATOR = torch.Generator().manual_seed(0)
# of a result, by its dtype: relative; integers and truth values are equal
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-6}


class Call(NamedTuple):
    """The arguments of an operation."""

    args: Tuple[Any, ...]
    keywords: Dict[str, Any]


def call(*args: Any, **keywords: Any) -> Call:
    """Return the arguments of an operation."""
    return Call(args, keywords)


def draw(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Draw normal numbers, integers from -4 to 4 (of uint8 from 0), or truth values."""
    if dtype == BOOL:
        return torch.rand(shape, generator=GENERATOR) > 0.5
    if dtype.is_floating_point:
        return torch.randn(shape, generator=GENERATOR, dtype=dtype)
    low = 0 if dtype == torch.uint8 else -4
    return torch.randint(low, 5, shape, generator=GENERATOR, dtype=dtype)


def draw_indices(size: int, *shape: int, low: int = 0) -> torch.Tensor:
    """Draw indices from `low` to below `size`."""
    return torch.randint(low, size, shape, generator=GENERATOR)


def fill(*values: float, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Return a tensor of these values."""
    return torch.tensor(values, dtype=dtype)


def pair_up(dtypes: Iterable[torch.dtype]) -> List[Call]:
    """Return pairs of tensors of each dtype, of equal shapes, broadcast, of no dimension, empty."""
    shapes = [((2, 3), (2, 3)), ((2, 3), (3,)), ((2, 1), (1, 3)), ((), (3,)), ((0, 3), (1, 3))]
    return [
        call(draw(*a, dtype=dtype), draw(*b, dtype=dtype)) for dtype in dtypes for a, b in shapes
    ]


# ---- cases of elementwise operations

NUMBERS = (torch.float64, INT)
ALL = (torch.float64, INT, torch.int32, torch.uint8, BOOL)
SPECIAL = fill(0.0, -0.0, 1.5, -2.5, NAN, INFINITY, -INFINITY)
SPECIAL_PAIRS = [call(SPECIAL[:, None], SPECIAL)]
MIXED_PAIRS = [call(draw(2, 3), draw(2, 3, dtype=INT)), call(draw(3, dtype=BOOL), draw(3))]
WITH_SCALARS = [
    call(draw(2, 3), 2),
    call(draw(2, 3), -0.5),
    call(draw(2, 3, dtype=INT), 2),
    call(draw(2, 3, dtype=INT), 0.5),
    call(draw(), 3.0),
]
ONE_OF_EACH = [call(draw(2, 3)), call(draw()), call(draw(0, 3)), call(SPECIAL)]
POSITIVE = [call(draw(2, 3).abs() + 0.1), call(fill(0.0, NAN, INFINITY)), call(fill(3, dtype=INT))]
BITWISE = ("bitwise_and", "bitwise_or", "bitwise_xor")
REMAINDERS = ("fmod", "remainder")
DIVIDED = [
    call(fill(5.5, -5.5, 5.5, -5.5), fill(2, 2, -2, -2)),
    call(fill(7, -7, 7, -7, dtype=INT), fill(2, 2, -2, -2, dtype=INT)),
]
DIVIDED_BY_SCALARS = [call(fill(5.5, -5.5, 4, -4), divisor) for divisor in (2, -2, 1.5, -1.5)] + [
    call(fill(7, -7, 4, -4, dtype=INT), divisor) for divisor in (2, -3)
]
COMPARISONS = ("eq", "ne", "ge", "gt", "le", "lt")

ELEMENTWISE: Dict[str, List[Call]] = {
    "aten.add.Tensor": [
        *pair_up(ALL),
        *MIXED_PAIRS,
        *SPECIAL_PAIRS,
        call(draw(2, 3), draw(3), alpha=-2),
        call(draw(3, dtype=INT), draw(3, dtype=INT), alpha=3),
        call(draw(2, 3), draw(3, dtype=INT), alpha=0.5),
        call(draw(2, 3), 1.5),
    ],
    "aten.add.Scalar": [*WITH_SCALARS, call(draw(3), 2, 3), call(draw(3, dtype=BOOL), 2)],
    "aten.sub.Tensor": [
        *pair_up(NUMBERS),
        *SPECIAL_PAIRS,
        call(draw(2, 3), draw(3), alpha=0.5),
        call(draw(3, dtype=INT), draw(3, dtype=INT), alpha=3),
    ],
    "aten.sub.Scalar": [*WITH_SCALARS, call(draw(3), 2, 3)],
    "aten.mul.Tensor": [*pair_up(ALL), *MIXED_PAIRS, *SPECIAL_PAIRS],
    "aten.mul.Scalar": [*WITH_SCALARS, call(draw(3, dtype=BOOL), 2.5)],
    "aten.div.Tensor": [
        *pair_up([torch.float64]),
        *SPECIAL_PAIRS,
        call(draw(3, dtype=INT), fill(2, 3, -4, dtype=INT)),
        call(fill(1, -1, 0, dtype=INT), fill(0, 0, 0, dtype=INT)),
        call(draw(3, dtype=BOOL), fill(2, 3, -4, dtype=INT)),
        call(draw(2, 3), 3),
    ],
    "aten.div.Scalar": WITH_SCALARS,
    **{
        f"aten.{name}.Tensor": [*pair_up(ALL), *MIXED_PAIRS, *SPECIAL_PAIRS] for name in COMPARISONS
    },
    **{
        f"aten.{name}.Scalar": [*WITH_SCALARS, call(SPECIAL, 0.0), call(SPECIAL, NAN)]
        for name in COMPARISONS
    },
    **{f"aten.{name}.Tensor": pair_up(ALL[1:]) for name in BITWISE},
    **{
        f"aten.{name}.Scalar": [call(draw(3, dtype=INT), 6), call(draw(3, dtype=BOOL), True)]
        for name in BITWISE
    },
    **{f"aten.{name}.Tensor": [*pair_up([torch.float64]), *DIVIDED] for name in REMAINDERS},
    **{f"aten.{name}.Scalar": DIVIDED_BY_SCALARS for name in REMAINDERS},
    "aten.div.Tensor_mode": [
        call(*args, rounding_mode=mode)
        for mode in (None, "floor", "trunc")
        for args, _ in (*DIVIDED, *pair_up([torch.float64]))
    ],
    "aten.div.Scalar_mode": [
        call(*args, rounding_mode=mode)
        for mode in (None, "floor", "trunc")
        for args, _ in DIVIDED_BY_SCALARS
    ],
    "aten.pow.Tensor_Scalar": [
        *[call(draw(2, 3), exponent) for exponent in (0, 1, 2, 3, -1, -2, 2.0, 3.0, 5)],
        *[call(draw(2, 3).abs(), exponent) for exponent in (0.5, -0.5, 1.7, -1.7)],
        *[call(SPECIAL, exponent) for exponent in (0, 2, 3, -1, 0.5, -2.0, NAN)],
        call(draw(2, 3), 0.5),
        call(draw(2, 3, dtype=INT), 3),
        call(draw(2, 3, dtype=INT), 2.0),
        call(draw(2, 3, dtype=INT).abs(), 0.5),
        call(draw(2, 3, dtype=torch.uint8), 2),
    ],
    "aten.pow.Tensor_Tensor": [
        call(draw(2, 3).abs(), draw(3)),
        call(draw(2, 3), draw(3, dtype=INT)),
        call(draw(2, 3, dtype=INT), draw(3, dtype=INT).abs()),
        call(fill(-2, -1, 0, 1, 2, dtype=INT), fill(3, 4, 0, 5, 62, dtype=INT)),
        *SPECIAL_PAIRS,
    ],
    "aten.pow.Scalar": [
        call(2.5, draw(2, 3)),
        call(-2, draw(2, 3, dtype=INT).abs()),
        call(10000.0, draw(3, dtype=INT)),
        call(0, SPECIAL),
        call(-1.5, SPECIAL),
    ],
    **{
        f"aten.{name}.default": [*pair_up(ALL), *MIXED_PAIRS, *SPECIAL_PAIRS]
        for name in ("maximum", "minimum", "logical_and", "logical_or", "logical_xor")
    },
    "aten.logical_not.default": [*ONE_OF_EACH, *[call(draw(2, 3, dtype=d)) for d in ALL]],
    "aten.bitwise_not.default": [call(draw(2, 3, dtype=d)) for d in ALL[1:]],
    **{
        f"aten.{name}.default": [*ONE_OF_EACH, call(draw(3, dtype=INT)), call(draw(3, dtype=BOOL))]
        for name in ("exp", "expm1", "sin", "cos", "tan", "atan", "sinh", "cosh", "tanh")
    },
    **{
        f"aten.{name}.default": [*ONE_OF_EACH, call(draw(3, dtype=INT))]
        for name in ("floor", "ceil", "trunc", "round", "isnan", "isinf")
    },
    "aten.round.default": [*ONE_OF_EACH, call(fill(-1.5, -0.5, 0.5, 1.5, 2.5))],
    "aten.atan2.default": [*pair_up([torch.float64]), *SPECIAL_PAIRS],
    "aten.expm1.default": [*ONE_OF_EACH, call(fill(-1e-9, 1e-9, 3.0, 800.0))],
    "aten.exp.default": [*ONE_OF_EACH, call(fill(-800.0, -30.0, 30.0, 800.0))],
    "aten.sigmoid.default": [*ONE_OF_EACH, call(fill(-800.0, -30.0, 30.0, 800.0))],
    "aten.tanh.default": [*ONE_OF_EACH, call(fill(-30.0, -1e-9, 1e-3, 30.0))],
    "aten.erf.default": [*ONE_OF_EACH, call(fill(-7.0, -1e-9, 0.4, 3.0, 7.0))],
    "aten.log.default": [*POSITIVE, call(fill(-1.0, 1e-300))],
    "aten.log2.default": [*POSITIVE, call(fill(-1.0, 1e-300, 8.0))],
    "aten.log1p.default": [*POSITIVE, call(fill(-2.0, -1.0, -1e-9, 1e-9, 5.0))],
    "aten.sqrt.default": [*POSITIVE, call(fill(-1.0))],
    "aten.rsqrt.default": [*POSITIVE, call(fill(-1.0))],
    "aten.reciprocal.default": [*POSITIVE, call(SPECIAL)],
    **{
        f"aten.{name}.default": [*ONE_OF_EACH, call(draw(2, 3, dtype=INT))]
        for name in ("neg", "abs", "sign", "relu")
    },
    "aten.leaky_relu.default": [*ONE_OF_EACH, call(SPECIAL, 0.2), call(SPECIAL, -0.5)],
    "aten.elu.default": [*ONE_OF_EACH, call(SPECIAL, 0.5), call(draw(9), 1.5, 1.1, 0.7)],
    "aten.hardtanh.default": [*ONE_OF_EACH, call(SPECIAL, 0, 6), call(draw(5), -0.5, 0.1)],
    "aten.clamp.Tensor": [
        call(SPECIAL, fill(-1), fill(1.25)),
        call(SPECIAL, draw(7)),
        call(SPECIAL, None, draw()),
        call(SPECIAL, min=fill(NAN)),
        call(draw(2, 3), draw(3), draw(2, 1)),
    ],
    "aten.clamp.default": [
        call(SPECIAL, -1, 1.25),
        call(SPECIAL, -1),
        call(SPECIAL, None, 1),
        call(SPECIAL, 1, -1),
        call(SPECIAL, min=0.5),
        call(SPECIAL, max=0.5),
        call(draw(2, 3, dtype=INT), -1, 2),
        call(draw(2, 3, dtype=INT), 0.5),
    ],
    "aten.where.self": [
        call(draw(2, 3, dtype=BOOL), draw(2, 3), draw(3)),
        call(draw(2, 1, dtype=BOOL), draw(3), draw()),
        call(draw(3, dtype=BOOL), draw(3, dtype=INT), draw(3)),
        call(draw(3, dtype=BOOL), draw(3, dtype=INT), draw(3, dtype=INT)),
        call(draw(7, dtype=BOOL), SPECIAL, fill(NAN)),
    ],
}

# ---- cases of products


def list_convolutions() -> List[Tuple[torch.Tensor, torch.Tensor, List[Any]]]:
    """Return (x, weight, (stride, padding, dilation, transposed, output padding, groups))."""
    plain: List[Any] = [[1, 1], [0, 0], [1, 1], False, [0, 0], 1]
    uneven: List[Any] = [[2, 3], [1, 2], [1, 2], False, [0, 0], 1]
    transposed: List[Any] = [[2, 3], [1, 0], [1, 2], True, [1, 2], 2]
    return [
        (draw(2, 4, 6, 5), draw(4, 3, 3, 3), [[1, 1], [0, 0], [1, 1], True, [0, 0], 1]),
        (draw(2, 4, 3, 4), draw(4, 3, 3, 2), transposed),
        (draw(2, 4, 6), draw(4, 3, 3), [[2], [1], [1], True, [1], 1]),
        (draw(2, 3, 6, 5), draw(4, 3, 3, 3), plain),
        (draw(2, 3, 6, 5), draw(4, 3, 1, 1), plain),
        (draw(2, 3, 8, 9), draw(4, 3, 3, 2), uneven),
        (draw(2, 4, 6, 5), draw(6, 2, 3, 3), [[2, 2], [1, 1], [1, 1], False, [0, 0], 2]),
        (draw(2, 4, 6, 5), draw(8, 1, 3, 3), [[1, 1], [1, 1], [2, 2], False, [0, 0], 4]),
        # the last row and column are read by no window
        (draw(1, 1, 6, 6), draw(1, 1, 3, 3), [[2, 2], [0, 0], [1, 1], False, [0, 0], 1]),
        (draw(2, 3, 7), draw(4, 3, 3), [[1], [0], [1], False, [0], 1]),
        (draw(2, 4, 9), draw(4, 1, 3), [[2], [2], [2], False, [0], 4]),
        (
            draw(2, 2, 4, 5, 3),
            draw(4, 1, 2, 3, 2),
            [[1, 2, 1], [1] * 3, [1] * 3, False, [0] * 3, 2],
        ),
        (draw(0, 3, 6, 5), draw(4, 3, 3, 3), plain),
    ]


def list_convolution_backwards() -> List[Call]:
    """Return the backwards of all convolutions, with each mask of what is asked."""
    calls = []
    for x, weight, settings in list_convolutions():
        y = torch.ops.aten.convolution.default(x, weight, None, *settings)
        for mask in itertools.product([True, False], repeat=3):
            bias_sizes = [y.shape[1]] if mask[2] else None
            calls.append(call(draw(*y.shape), x, weight, bias_sizes, *settings, list(mask)))
    return calls


PRODUCTS: Dict[str, List[Call]] = {
    "aten.mm.default": [
        call(draw(2, 3), draw(3, 4)),
        call(draw(3, 2).t(), draw(4, 3).t()),
        call(draw(0, 3), draw(3, 4)),
        call(draw(2, 0), draw(0, 4)),
        call(draw(2, 3, dtype=INT), draw(3, 4, dtype=INT)),
    ],
    "aten.bmm.default": [
        call(draw(5, 2, 3), draw(5, 3, 4)),
        call(draw(0, 2, 3), draw(0, 3, 4)),
        call(draw(2, 2, 3, dtype=INT), draw(2, 3, 4, dtype=INT)),
    ],
    "aten.convolution.default": [
        call(x, weight, bias, *settings)
        for x, weight, settings in list_convolutions()
        for bias in (None, draw(weight.shape[1] * settings[5] if settings[3] else weight.shape[0]))
    ],
    "aten.convolution_backward.default": list_convolution_backwards(),
}

# ---- cases of reductions

SHAPED = draw(2, 3, 4)
DIMS: List[Any] = [[0], [-1], [0, 2], [-1, 0], [0, 1, 2], []]
REDUCED = [call(SHAPED, dims, keepdim) for dims in DIMS for keepdim in (False, True)]
OF_NO_DIMENSION = [call(draw(), [0]), call(draw(), [-1], True), call(draw(), [])]


def list_pools() -> List[Tuple[torch.Tensor, List[Any]]]:
    """Return (x, (size, stride, padding, dilation, ceil_mode)) of max pools."""
    ties = draw_indices(3, 2, 2, 7, 8).double()
    return [
        (draw(2, 3, 6, 4), [[2, 2], [2, 2], [0, 0], [1, 1], False]),
        (draw(2, 3, 6, 5), [[2, 2], [2, 2], [0, 0], [1, 1], False]),
        (ties, [[3, 3], [2, 2], [1, 1], [1, 1], False]),
        (ties, [[3, 3], [1, 1], [1, 1], [1, 1], False]),
        (ties, [[3, 2], [2, 3], [1, 0], [1, 1], False]),
        (ties, [[2, 2], [3, 3], [0, 0], [1, 1], False]),
        (ties, [[2, 3], [1, 2], [1, 1], [2, 2], False]),
        (ties, [[3, 3], [2, 2], [0, 0], [1, 1], True]),
        (ties, [[3, 3], [2, 3], [1, 1], [1, 1], True]),
        (ties, [[2, 2], [2, 3], [1, 1], [2, 1], True]),
        (-ties, [[3], [2], [1], [1], False]),
        (ties[0], [[3, 3], [2, 2], [1, 1], [1, 1], False]),
        (torch.full((1, 1, 4, 4), -INFINITY).double(), [[3, 3], [2, 2], [1, 1], [1, 1], False]),
        (torch.where(ties > 1, NAN, ties), [[1, 1], [2, 2], [0, 0], [1, 1], False]),
        (fill(1, NAN, 2, 0).reshape(1, 1, 2, 2), [[2, 2], [2, 2], [0, 0], [1, 1], False]),
        (draw(0, 3, 6, 4), [[2, 2], [2, 2], [0, 0], [1, 1], False]),
    ]


def list_pool_backwards() -> List[Call]:
    """Return the backwards of all max pools."""
    calls = []
    for x, settings in list_pools():
        y, places = torch.ops.aten.max_pool2d_with_indices.default(x, *settings)
        calls.append(call(draw(*y.shape), x, *settings, places))
    return calls


def list_average_pools() -> List[Tuple[torch.Tensor, List[Any]]]:
    """Return (x, (size, stride, padding, ceil_mode, count_include_pad, divisor))."""
    images = draw(2, 3, 7, 8)
    settings: List[List[Any]] = [
        [[2, 2], [2, 2], [0, 0], False, True, None],
        [[3, 2], [], [1, 0], False, True, None],
        [[3, 3], [2, 2], [1, 1], False, True, None],
        [[3, 3], [2, 2], [1, 1], False, False, None],
        [[3, 3], [2, 3], [1, 1], True, True, None],
        [[3, 3], [2, 3], [1, 1], True, False, None],
        [[2, 2], [3, 3], [1, 1], True, False, None],
        [[2, 3], [1, 2], [1, 0], False, True, 5],
        [[2], [2], [1], True, True, None],
    ]
    pools = [(images, setting) for setting in settings]
    return [*pools, (images[0], settings[2]), (draw(0, 3, 7, 8), settings[2])]


def list_average_pool_backwards() -> List[Call]:
    """Return the backwards of all average pools."""
    calls = []
    for x, settings in list_average_pools():
        y = torch.ops.aten.avg_pool2d.default(x, *settings)
        calls.append(call(draw(*y.shape), x, *settings))
    return calls


DIVISIBLE_OR_NOT = [[1, 1], [2, 4], [3, 5], [7, 8], [9, 10]]
EXTREMES = [
    *REDUCED,
    *OF_NO_DIMENSION,
    call(SHAPED),
    call(SPECIAL, [0]),
    *[call(draw(2, 3, dtype=dtype), [1]) for dtype in ALL],
]
PLACED_EXTREMES = [
    *[call(SHAPED, dim, keepdim) for dim in (0, -1, 1) for keepdim in (False, True)],
    call(fill(1, 3, 3, 2, 1), 0),
    call(fill(1, NAN, 3, NAN), 0),
    call(draw(4, 5, dtype=INT), 1),
    call(draw(), 0),
]

REDUCTIONS: Dict[str, List[Call]] = {
    "aten.sum.dim_IntList": [
        *REDUCED,
        *OF_NO_DIMENSION,
        call(SHAPED, None),
        call(draw(0, 3), [0]),
        call(draw(2, 3, dtype=INT), [1], dtype=torch.float64),
        *[call(draw(2, 3, dtype=dtype), [1]) for dtype in ALL],
    ],
    "aten.sum.default": [
        *[call(draw(2, 3, dtype=dtype)) for dtype in ALL],
        call(draw()),
        call(draw(0)),
        call(draw(5, dtype=BOOL), dtype=torch.float64),
        call(torch.full((400,), 200, dtype=torch.uint8)),
    ],
    "aten.mean.dim": [
        *REDUCED,
        *OF_NO_DIMENSION,
        call(SHAPED, None, True),
        call(draw(0, 3), [0]),
        call(draw(2, 3, dtype=INT), [1], dtype=torch.float64),
    ],
    "aten.mean.default": [
        call(SHAPED),
        call(draw()),
        call(draw(0)),
        call(draw(5, dtype=INT), dtype=torch.float64),
    ],
    "aten.amax.default": EXTREMES,
    "aten.amin.default": EXTREMES,
    "aten.max.default": [call(SHAPED), call(draw()), call(SPECIAL), call(draw(3, dtype=INT))],
    "aten.min.default": [call(SHAPED), call(draw()), call(SPECIAL), call(draw(3, dtype=INT))],
    "aten.max.dim": PLACED_EXTREMES,
    "aten.min.dim": PLACED_EXTREMES,
    "aten.linalg_vector_norm.default": [
        *[
            call(SHAPED, order, dims, keepdim)
            for order in (2, 1, 0, 3, 0.5, INFINITY, -INFINITY)
            for dims in ([0], [-1, 0], None)
            for keepdim in (False, True)
        ],
        call(SHAPED),
        call(draw(2, 3, dtype=torch.float32), 2, [1], dtype=torch.float64),
    ],
    "aten.cumsum.default": [
        call(SHAPED, 0),
        call(SHAPED, -1),
        call(draw(3, 4, dtype=INT), 1),
        call(draw(5, dtype=BOOL), 0),
        call(draw(5, dtype=INT), 0, dtype=torch.float64),
    ],
    "aten.var.correction": [
        *[
            call(SHAPED, dims, correction=correction, keepdim=keepdim)
            for dims in ([1], [-1, 0], None)
            for correction in (None, 0, 0.5)
            for keepdim in (False, True)
        ],
        call(SHAPED),
    ],
    "aten.var_mean.correction": [
        *[
            call(SHAPED, dims, correction=correction, keepdim=keepdim)
            for dims in (*DIMS, None)
            for correction in (None, 0, 1, 0.5)
            for keepdim in (False, True)
        ],
        call(draw(1, 3), [0], correction=1),
        call(draw(1, 3), [0], correction=0),
        call(draw(), [0], correction=0),
        call(draw(1, 3), [0], correction=2),
    ],
    "aten.argmax.default": [
        *[call(SHAPED, dim, keepdim) for dim in (0, -1, 1) for keepdim in (False, True)],
        call(SHAPED),
        call(SHAPED, None, True),
        call(fill(1, 3, 3, 2)),
        call(fill(1, NAN, 3, NAN)),
        call(draw(4, 5, dtype=INT), 1),
        call(draw(), 0),
    ],
    "aten.any.default": [
        *[call(draw(2, 3, dtype=dtype)) for dtype in ALL],
        call(torch.zeros(3).double()),
        call(draw(0, dtype=BOOL)),
        call(fill(NAN)),
    ],
    "aten.any.dim": [
        *[call(draw(4, 3, dtype=BOOL), dim, keep) for dim in (0, -1) for keep in (False, True)],
        *[call(draw(4, 3, dtype=dtype), 1) for dtype in ALL],
        call(draw(dtype=BOOL), 0),
    ],
    "aten.any.dims": [
        *[call(draw(2, 3, 1, dtype=BOOL), dims, keep) for dims in DIMS for keep in (False, True)],
        call(draw(2, 3, dtype=BOOL)),
        call(draw(2, 3, dtype=torch.uint8), [0, 1]),
    ],
    "aten.max_pool2d_with_indices.default": [
        *[call(x, *settings) for x, settings in list_pools()],
        call(draw(2, 3, 6, 4), [2, 2]),
        call(draw(2, 3, 6, 4), [2, 2], [], [1, 1]),
        call(draw(2, 3, 6, 4, dtype=INT), [3, 3], [2, 2], [1, 1]),
    ],
    "aten.max_pool2d_with_indices_backward.default": list_pool_backwards(),
    "aten.avg_pool2d.default": [
        *[call(x, *settings) for x, settings in list_average_pools()],
        call(draw(2, 3, 6, 4), [2, 2]),
    ],
    "aten.avg_pool2d_backward.default": list_average_pool_backwards(),
    "aten._adaptive_avg_pool2d.default": [
        *[call(draw(2, 3, 7, 8), sizes) for sizes in DIVISIBLE_OR_NOT],
        call(draw(3, 7, 8), [2, 3]),
    ],
    "aten._adaptive_avg_pool2d_backward.default": [
        *[call(draw(2, 3, *sizes), draw(2, 3, 7, 8)) for sizes in DIVISIBLE_OR_NOT],
        call(draw(3, 2, 3), draw(3, 7, 8)),
    ],
}

# ---- cases of shapes

COPIES = [call(draw(2, 3)), call(draw(2, 3).t()), call(draw(3, dtype=INT)), call(draw())]
VIEWS = [
    call(SHAPED, [6, 4]),
    call(SHAPED, [2, -1]),
    call(SHAPED, [-1]),
    call(SHAPED, [2, 1, 3, 4]),
    call(draw(1), []),
    call(draw(), [1, -1]),
    call(draw(0, 3), [3, 0]),
    call(draw(4, dtype=BOOL), [2, 2]),
]
SLICES: List[Tuple[Any, ...]] = [
    (),
    (1,),
    (1, 1),
    (1, None, 2),
    (-1, 1, 3),
    (0, -4, -1),
    (0, -100, 2),
    (0, 2, 100),
    (0, 3, 1),
    (0, 9, 12),
    (1, 0, NO_END),
    (1, 1, NO_END, 2),
    (-2, None, None, 3),
    (-2, -5, -1, 2),
]
SLICED = draw(5, 6)

SHAPES: Dict[str, List[Call]] = {
    **{f"aten.{name}.default": COPIES for name in ("alias", "detach", "lift_fresh_copy")},
    "aten.clone.default": [*COPIES, call(SHAPED, memory_format=torch.contiguous_format)],
    **{f"aten.{name}.default": VIEWS for name in ("view", "_unsafe_view", "reshape")},
    "aten.permute.default": [
        call(SHAPED, [2, 0, 1]),
        call(SHAPED, [-1, 0, -2]),
        call(draw(), []),
    ],
    "aten.transpose.int": [
        call(SHAPED, 0, 2),
        call(SHAPED, -1, 1),
        call(SHAPED, 1, 1),
    ],
    "aten.unsqueeze.default": [call(SHAPED, dim) for dim in (0, 2, 3, -1, -4)] + [call(draw(), -1)],
    "aten.squeeze.dim": [
        call(draw(1, 3, 1), 0),
        call(draw(1, 3, 1), -1),
        call(draw(1, 3, 1), 1),
        call(draw(), 0),
        call(draw(), -1),
    ],
    "aten.squeeze.dims": [
        call(draw(1, 3, 1), [0, -1]),
        call(draw(1, 3, 1), [0, 1]),
        call(draw(1, 3, 1), [1]),
        call(draw(1, 3, 1), []),
        call(draw(), [0]),
    ],
    "aten.expand.default": [
        call(draw(1, 3), [2, 3]),
        call(draw(1, 3), [4, -1, 3]),
        call(draw(2, 1), [-1, 5]),
        call(draw(3), [2, 2, -1]),
        call(draw(), [2, 3]),
        call(draw(1, 3), [0, 3]),
        call(draw(1, 3), [2, 3], implicit=True),
    ],
    "aten.repeat.default": [
        call(draw(2, 3), [2, 1]),
        call(draw(2, 3), [3, 1, 2]),
        call(draw(), [2]),
        call(draw(2), [0]),
    ],
    "aten.flip.default": [call(SHAPED, [0]), call(SHAPED, [-1, 1]), call(SHAPED, [])],
    "aten.copy.default": [
        call(draw(2, 3), draw(2, 3)),
        call(draw(2, 3), draw(3)),
        call(draw(2, 3), draw()),
        call(draw(2, 3), draw(3, dtype=INT)),
        call(draw(3, dtype=INT), fill(1.5, -1.5, 0)),
    ],
    "aten.as_strided.default": [
        call(SHAPED, [6, 4], [4, 1]),
        call(SHAPED, [2, 1, 12], [12, 12, 1], 0),
        call(SHAPED, [2, 3], [3, 1], 5),
        call(SHAPED, [], [], 7),
    ],
    "aten.slice.Tensor": [call(SLICED, *where) for where in SLICES],
    "aten.slice_scatter.default": [
        call(SLICED, draw(*torch.ops.aten.slice.Tensor(SLICED, *where).shape), *where)
        for where in SLICES
    ],
    "aten.select.int": [call(SHAPED, dim, index) for dim in (0, 1, -1) for index in (0, 1, -1, -2)],
    "aten.select_scatter.default": [
        call(SHAPED, draw(*SHAPED.select(dim, index).shape), dim, index)
        for dim in (0, 1, -1)
        for index in (0, 1, -1, -2)
    ],
    "aten.split.Tensor": [
        call(SLICED, 2),
        call(SLICED, 5),
        call(SLICED, 9),
        call(SLICED, 3, 1),
        call(SLICED, 4, -1),
        call(draw(0, 3), 2),
    ],
    "aten.split_with_sizes.default": [
        call(SLICED, [2, 3]),
        call(SLICED, [5]),
        call(SLICED, [1, 0, 5], 1),
        call(SLICED, [2, 2, 2], -1),
    ],
    "aten.cat.default": [
        call([draw(2, 3), draw(1, 3)]),
        call([draw(2, 3), draw(2, 1), draw(2, 0)], 1),
        call([draw(2, 3), draw(2, 1)], -1),
        call([draw(2, 3)]),
        call([draw(2), draw(2, dtype=INT)]),
        # of this shape alone a tensor of no elements may be in any list
        call([draw(0), draw(2, 3)], 1),
    ],
    "aten.constant_pad_nd.default": [
        call(draw(2, 3), [1, 2]),
        call(draw(2, 3), [1, 2, 3, 0], 1.5),
        call(draw(2, 3), [-1, 2], 7),
        call(draw(2, 4), [-1, -2, 1, -1]),
        call(draw(2, 3, 4), [0, 0, 1, 1], -INFINITY),
        call(draw(2, 3, dtype=INT), [1, 0], 5),
        call(draw(2, 3, dtype=BOOL), [0, 1], True),
        call(draw(2, 3), []),
    ],
}

# ---- cases of constants and types

CONVERTED = [
    call(fill(-1.5, 0.0, 0.9, 2.5), torch.float32),
    call(fill(-1.5, 0.0, 0.9, 2.5), INT),
    call(fill(-1.5, 0.0, 0.9, 2.5), torch.int32),
    call(fill(1.5, 0.0, 0.9, 200.5), torch.uint8),
    call(SPECIAL, BOOL),
    call(draw(3, dtype=INT), torch.float64),
    call(draw(3, dtype=INT), BOOL),
    call(draw(3, dtype=BOOL), torch.float64),
    call(draw(3, dtype=BOOL), INT),
    call(fill(1 / 3, dtype=torch.float32), torch.float64),
]

CONSTANTS: Dict[str, List[Call]] = {
    "aten._to_copy.default": [
        *[call(args[0], dtype=args[1]) for args, _ in CONVERTED],
        call(draw(3)),
        call(draw(3, dtype=INT), device=torch.device("cpu")),
    ],
    "prims.convert_element_type.default": CONVERTED,
    "aten.full.default": [
        call([2, 3], 1),
        call([2, 3], 1.5),
        call([], True),
        call([2], False),
        call([0, 2], -INFINITY),
        call([2], 1, dtype=torch.float64),
        call([2], 2.7, dtype=INT),
        call([2], 2, dtype=BOOL),
        call([2], 1 / 3, dtype=torch.float64, device=torch.device("cpu"), pin_memory=False),
    ],
    "aten.full_like.default": [
        call(draw(2, 3), 1),
        call(draw(2, dtype=INT), 3),
        call(draw(2, dtype=BOOL), True),
        call(draw(2, dtype=INT), 1.5, dtype=torch.float64),
        call(draw(2, 3), True, dtype=BOOL, memory_format=torch.preserve_format),
    ],
    "aten.zeros_like.default": [
        call(draw(2, 3)),
        call(draw(dtype=INT)),
        call(draw(2, 3), dtype=BOOL, memory_format=torch.preserve_format),
    ],
    "aten.scalar_tensor.default": [
        call(1.5),
        call(3),
        call(True),
        call(-INFINITY, dtype=torch.float64),
        call(1 / 3, dtype=torch.float64),
        call(2, dtype=BOOL),
    ],
    "aten.arange.start_step": [
        call(0, 5),
        call(2, 11, 3),
        call(5, 0, -2),
        call(3, 3),
        call(0.0, 1.0, 0.1, dtype=torch.float64),
        call(0, 1, 0.25),
        call(-1.5, 2, 0.7, dtype=torch.float64),
        call(0, 5, dtype=torch.float64),
        call(0, 7, 2, dtype=torch.float32, device=torch.device("cpu")),
    ],
    "prims.iota.default": [
        call(
            length,
            start=start,
            step=step,
            dtype=dtype,
            device=torch.device("cpu"),
            requires_grad=False,
        )
        for length, start, step, dtype in [
            (5, 0, 1, INT),
            (4, 3, -2, INT),
            (0, 0, 1, INT),
            (3, 1, 2, torch.int32),
        ]
    ],
}

# ---- cases of indices

INDEXED = draw(4, 5, 3)
ROWS = fill(1, 0, -1, 2, dtype=INT)
COLUMNS = fill(0, -5, 3, 3, dtype=INT)
INDICES: List[List[Any]] = [
    [ROWS],
    [ROWS, COLUMNS],
    [ROWS[:, None], COLUMNS],
    [None, COLUMNS],
    [None, None, draw_indices(3, 2, 2, low=-3)],
    [ROWS, None, draw_indices(3, 4)],
    [None, ROWS, draw_indices(3, 4)],
    [ROWS, COLUMNS, draw_indices(3)],
    [draw_indices(4)],
    [draw_indices(4, 0)],
    [ROWS.int()],
]
# x, dimension, index
ALONG: List[Tuple[torch.Tensor, int, torch.Tensor]] = [
    (SHAPED, 0, draw_indices(2, 5, 3, 4)),
    (SHAPED, 1, draw_indices(3, 2, 1, 4)),
    (SHAPED, -1, draw_indices(4, 2, 3, 2)),
    # an index may be smaller than the tensor in other dimensions, too
    (SHAPED, 1, draw_indices(3, 1, 2, 4)),
    (SHAPED, 1, draw_indices(3, 2, 3, 1)),
    (SHAPED, 2, draw_indices(4, 1, 2, 7)),
    (SHAPED, 0, draw_indices(2, 0, 3, 4)),
    (draw(5), 0, fill(3, 1, 1, dtype=INT)),
    (draw(5), -1, fill(3, 1, 1, dtype=INT)),
    (draw(4, 3, dtype=INT), 1, draw_indices(3, 4, 1)),
]


def list_index_puts() -> List[Call]:
    """Return writes at indices: of values, of values that are broadcast, added or not."""
    calls = []
    # what is written twice at one place has no order, so that values of their own are added
    accumulated = [*INDICES, [fill(1, 1, 0, 1, dtype=INT)], [None, fill(2, 2, dtype=INT)]]
    for indices in accumulated:
        shape = torch.ops.aten.index.Tensor(INDEXED, indices).shape
        calls.append(call(INDEXED, indices, draw(*shape), True))
        calls.append(call(INDEXED, indices, draw(), True))
        calls.append(call(INDEXED, indices, draw()))
    once = [[ROWS], [None, fill(4, 0, -3, dtype=INT)], [ROWS, fill(0, 1, 3, 3, dtype=INT)]]
    for indices in once:
        shape = torch.ops.aten.index.Tensor(INDEXED, indices).shape
        calls.append(call(INDEXED, indices, draw(*shape)))
        calls.append(call(INDEXED, indices, draw(shape[-1])))
    calls.append(call(draw(4, dtype=INT), [fill(1, 1, 3, dtype=INT)], draw(3, dtype=INT), True))
    # one number may be written where truth values say so
    for mask in ([draw(4, 5, dtype=BOOL)], [draw(4, dtype=BOOL)], [None, draw(5, dtype=BOOL)]):
        calls.append(call(INDEXED, mask, draw()))
        calls.append(call(INDEXED, mask, draw(), True))
    return calls


READS: Dict[str, List[Call]] = {
    "aten.embedding.default": [
        call(draw(5, 3), draw_indices(5, 2, 4)),
        call(draw(5, 3), draw_indices(5)),
        call(draw(5, 3), draw_indices(5, 0)),
        call(draw(5, 3), draw_indices(5, 6).int()),
        call(draw(5, 3), draw_indices(5, 6), 2),
        call(draw(5, 3), draw_indices(5, 6), -1, True, False),
    ],
    "aten.gather.default": [*[call(*where) for where in ALONG], call(*ALONG[0], sparse_grad=False)],
    "aten.index_select.default": [
        call(SHAPED, 0, draw_indices(2, 5)),
        call(SHAPED, -1, draw_indices(4, 2)),
        call(SHAPED, 1, draw_indices(3, 0)),
        call(draw(4, 3, dtype=INT), 1, draw_indices(3, 4).int()),
    ],
    "aten.scatter_add.default": [
        *[call(x, dim, index, draw(*index.shape, dtype=x.dtype)) for x, dim, index in ALONG],
        # a source may be larger than the index
        call(draw(4, 5), 1, draw_indices(5, 2, 3), draw(3, 6)),
    ],
    "aten.scatter.src": [
        call(SHAPED, 1, fill(2, 0, 1, dtype=INT)[None, :, None].expand(2, 3, 4), draw(2, 3, 4)),
        call(SHAPED, 1, fill(2, 0, dtype=INT)[None, :, None].expand(1, 2, 3), draw(2, 3, 4)),
        call(draw(5), -1, fill(4, 2, dtype=INT), draw(3)),
    ],
    "aten.scatter.value": [
        *[call(*where, 1.5) for where in ALONG],
        call(draw(2, 3, dtype=INT), 1, draw_indices(3, 2, 2), 7),
        call(draw(2, 3, dtype=BOOL), 1, draw_indices(3, 2, 1), True),
    ],
    "aten.index.Tensor": [call(INDEXED, indices) for indices in INDICES],
    "aten._unsafe_index.Tensor": [call(INDEXED, indices) for indices in INDICES],
    "aten.index_put.default": list_index_puts(),
    "aten._unsafe_index_put.default": list_index_puts(),
}

CASES: Dict[str, List[Call]] = {
    **ELEMENTWISE,
    **PRODUCTS,
    **REDUCTIONS,
    **SHAPES,
    **CONSTANTS,
    **READS,
}


# ---- comparison


def find_operation(name: str) -> Any:
    """Return torch's operation of a name as the table has it."""
    namespace, operation, overload = name.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), operation), overload)


def build_graph(name: str, calls: List[Call]) -> Tuple[fx.GraphModule, List[Any], List[Any]]:
    """Return a graph of calls of an operation, its arguments and torch's results.

    An element of a call's results is a result of its own; None is left out.
    """
    function = find_operation(name)
    graph = fx.Graph()
    arguments: List[torch.Tensor] = []
    results = []
    expected = []

    def add_argument(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        arguments.append(value)
        node = graph.placeholder(f"x{len(arguments)}")
        node.meta["val"] = value
        return node

    for args, keywords in calls:
        result = function(*args, **keywords)
        args, keywords = tree_map(add_argument, (args, keywords))
        node = graph.call_function(function, args, keywords)
        node.meta["val"] = result
        if isinstance(result, torch.Tensor):
            results.append(node)
            expected.append(result)
            continue
        for i, part in enumerate(result):
            if part is not None:
                results.append(graph.call_function(operator.getitem, (node, i)))
                results[-1].meta["val"] = part
                expected.append(part)
    graph.output(results)
    return fx.GraphModule({}, graph), arguments, expected


def describe_difference(actual: Any, expected: torch.Tensor) -> str:
    """Return how a result differs from torch's; empty if it does not."""
    actual = np.asarray(actual)
    values = expected.detach().numpy()
    if (actual.shape, actual.dtype) != (values.shape, values.dtype):
        return f"{actual.dtype}{actual.shape} instead of {values.dtype}{values.shape}"
    tolerance = TOLERANCES.get(expected.dtype, 0)
    # a sum of terms that cancel is as exact as the terms
    if np.allclose(actual, values, rtol=tolerance, atol=tolerance, equal_nan=True):
        return ""
    return f"{actual} instead of {values}"


def list_differences(name: str, calls: List[Call]) -> List[str]:
    """Return the differences of an operation from torch."""
    graph, arguments, expected = build_graph(name, calls)
    assert list_missing(graph) == []
    results = jax.jit(lower(graph))(*[jax.numpy.asarray(t.numpy()) for t in arguments])
    assert len(results) == len(expected)
    differences = [describe_difference(a, b) for a, b in zip(results, expected)]
    nodes = graph.graph.output_node().args[0]
    return [f"{nodes[i]}: {text}" for i, text in enumerate(differences) if text]


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(CASES))
def test_an_operation_gives_what_torch_gives(name: str) -> None:
    assert list_differences(name, CASES[name]) == []


REFUSED: Dict[str, Tuple[str, Call]] = {
    "unknown": ("aten.cumprod.default", call(draw(2, 3), 0)),
    "torch.float16": ("aten.neg.default", call(draw(2, 3, dtype=torch.float16))),
    "strides": ("aten.as_strided.default", call(draw(2, 3), [2, 2], [1, 2])),
    "strides of a source": ("aten.as_strided.default", call(draw(3, 2).t(), [6], [1])),
    "truth values read": ("aten.index.Tensor", call(draw(4, 3), [draw(4, dtype=BOOL)])),
    "truth values with indices": (
        "aten.index_put.default",
        call(draw(4, 3), [draw_indices(4, 2), fill(1, 1, 0, dtype=BOOL)], draw()),
    ),
    "truth values with values": (
        "aten.index_put.default",
        call(draw(4, 3), [draw(4, dtype=BOOL)], draw(3)),
    ),
}


@pytest.mark.parametrize("kind", sorted(REFUSED))
def test_an_operation_that_is_not_supported_is_refused_by_name(kind: str) -> None:
    name, asked = REFUSED[kind]
    graph, _, _ = build_graph(name, [asked])
    assert any(name in line for line in list_missing(graph))


# what an empty tensor has is written before it is read: shape and dtype alone are compared
EMPTY: Dict[str, List[Call]] = {
    "aten.empty.memory_format": [call([2, 3]), call([0], dtype=INT, device=torch.device("cpu"))],
    "aten.empty_permuted.default": [call([2, 3], [1, 0], dtype=torch.float64), call([], [])],
    "aten.new_empty_strided.default": [
        call(draw(2, 3), [4, 2], [2, 1]),
        call(draw(2, 3), [4], [1], dtype=INT),
    ],
}


@pytest.mark.parametrize("name", sorted(EMPTY))
def test_an_empty_tensor_has_the_shape_and_dtype_of_torch(name: str) -> None:
    graph, arguments, expected = build_graph(name, EMPTY[name])
    assert list_missing(graph) == []
    for a, b in zip(lower(graph)(*[t.numpy() for t in arguments]), expected):
        assert (a.shape, np.asarray(a).dtype) == (b.shape, b.numpy().dtype)


def test_an_index_that_is_out_of_range_gives_nan() -> None:
    """torch raises an error, which a compiled program cannot."""
    indices = jax.numpy.asarray([1, 5])
    weight = jax.numpy.ones((5, 2))
    for name, args in {
        "aten.embedding.default": (weight, indices),
        "aten.index_select.default": (weight, 0, indices),
        "aten.gather.default": (weight, 0, indices[:, None]),
    }.items():
        values = np.asarray(TABLE[name](*args))
        assert np.isfinite(values[0]).all() and np.isnan(values[1]).all(), name


def test_every_operation_of_the_table_has_a_case() -> None:
    assert {*CASES, *EMPTY} == set(TABLE)
    assert all(CASES.values())
