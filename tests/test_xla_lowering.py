"""Every ATen operation that xla lowers gives what torch gives: values, shapes and dtypes."""

from __future__ import annotations

import operator
from typing import Any, Dict, List, Tuple

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
from tests.operation_samples import Call, record_samples  # noqa: E402

CPU = torch.device("cpu")
INT = torch.int64
BOOL = torch.bool
NAN = float("nan")
INFINITY = float("inf")
GENERATOR = torch.Generator().manual_seed(0)
# of a result, by its dtype: relative; integers and truth values are equal
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-6}


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


SPECIAL = fill(0.0, -0.0, 1.5, -2.5, NAN, INFINITY, -INFINITY)

# ---- cases by hand: of what torch's samples do not call, or not with all settings


def list_masked_backwards() -> List[Call]:
    """Return the backwards of a transposed convolution, each of one gradient."""
    settings = [[2, 3], [1, 0], [1, 2], True, [0, 0], 2]
    x, weight = draw(2, 4, 7, 9), draw(4, 2, 3, 2)
    y = torch.ops.aten.convolution.default(x, weight, None, *settings)
    return [
        call(draw(*y.shape), x, weight, [y.shape[1]], *settings, [i == only for i in range(3)])
        for only in range(3)
    ]


# settings of an average pool of 7 x 8: with a stride that leaves out the last elements
AVERAGES: List[List[Any]] = [
    [[2, 2], [3, 3], [1, 1], True, False, None],
    # the padding counts, but not what is behind it
    [[4, 4], [3, 3], [1, 1], True, True, None],
    [[2, 2], [3, 4], [0, 0], False, True, None],
]
TIES = draw_indices(3, 2, 2, 7, 8).double()
# settings of a max pool of numbers of which many are equal
TIED: List[List[Any]] = [
    [[3, 3], [2, 2], [1, 1], [1, 1], False],
    [[2, 2], [2, 3], [1, 1], [2, 1], True],
]
CONVERTED = [
    *[call(fill(-1.5, 0.0, 0.9, 2.5), dtype) for dtype in (torch.float32, INT, torch.int32)],
    call(fill(1.5, 0.0, 0.9, 200.5), torch.uint8),
    call(SPECIAL, BOOL),
    *[call(draw(3, dtype=INT), dtype) for dtype in (torch.float64, BOOL)],
    *[call(draw(3, dtype=BOOL), dtype) for dtype in (torch.float64, INT)],
    call(fill(1 / 3, dtype=torch.float32), torch.float64),
]
INDEXED = draw(4, 5, 3)
ROWS = fill(1, 0, -1, 2, dtype=INT)
COLUMNS = fill(0, -5, 3, 3, dtype=INT)
INDICES: List[List[Any]] = [
    [ROWS, COLUMNS],
    [ROWS[:, None], COLUMNS],
    [None, COLUMNS],
    [None, None, draw_indices(3, 2, 2, low=-3)],
    [ROWS, None, draw_indices(3, 4)],
    [draw_indices(4, 0)],
    [ROWS.int()],
]


def list_index_puts() -> List[Call]:
    """Return writes at indices: of values, of values that are broadcast, added or not."""
    calls = []
    # what is written twice at one place has no order, so that values of their own are added
    for indices in [*INDICES, [fill(1, 1, 0, 1, dtype=INT)]]:
        shape = torch.ops.aten.index.Tensor(INDEXED, indices).shape
        calls += [call(INDEXED, indices, draw(*shape), True), call(INDEXED, indices, draw())]
    once = [ROWS, fill(0, 1, 3, 3, dtype=INT)]
    calls += [call(INDEXED, once, draw(*shape)) for shape in ((4, 3), (3,))]
    # one number may be written where truth values say so
    for mask in ([draw(4, 5, dtype=BOOL)], [draw(4, dtype=BOOL)], [None, draw(5, dtype=BOOL)]):
        calls += [call(INDEXED, mask, draw(), *others) for others in ((), (True,))]
    return calls


# what an empty tensor has is written before it is read: shape and dtype alone are compared
EMPTY: Dict[str, List[Call]] = {
    "aten.empty.memory_format": [call([2, 3]), call([0], dtype=INT, device=CPU)],
    "aten.empty_permuted.default": [call([2, 3], [1, 0], dtype=torch.float64), call([], [])],
    "aten.new_empty_strided.default": [
        call(draw(2, 3), [4, 2], [2, 1]),
        call(draw(2, 3), [4], [1], dtype=INT),
    ],
}


# ---- the table

SLICED = draw(5, 6)
SLICES: List[Tuple[Any, ...]] = [(1, None, 2), (-2, -5, -1, 2)]
WITH_SCALARS = [
    *[call(draw(2, 3), number) for number in (2, -0.5)],
    *[call(draw(2, 3, dtype=INT), number) for number in (2, 0.5)],
]
DIVIDED = [call(fill(5.5, -5.5, 4, -4), divisor) for divisor in (2, -1.5)] + [
    call(fill(7, -7, 4, -4, dtype=INT), divisor) for divisor in (2, -3)
]
PUTS, READS = list_index_puts(), [call(INDEXED, indices) for indices in INDICES]
CASES: Dict[str, List[Call]] = {
    **{f"aten.{name}.Scalar": WITH_SCALARS for name in ("ne", "gt", "le", "lt")},
    **{
        f"aten.bitwise_{name}.Scalar": [call(draw(3, dtype=INT), 6), call(draw(3) > 0, True)]
        for name in ("and", "or", "xor")
    },
    **{f"aten.{name}.Scalar": DIVIDED for name in ("fmod", "remainder")},
    "aten.div.Scalar_mode": [
        call(*args, rounding_mode=mode) for mode in (None, "floor", "trunc") for args, _ in DIVIDED
    ],
    "aten.pow.Scalar": [call(2.5, draw(2, 3)), call(0, SPECIAL), call(-1.5, SPECIAL)],
    # of -0 and -inf a root differs from the power
    "aten.pow.Tensor_Scalar": [call(SPECIAL, power) for power in (0, 3, -1, 0.5, -0.5)],
    "aten.clamp.default": [
        *[call(SPECIAL, *ends) for ends in ((-1, 1.25), (None, 1), (1, -1))],
        call(draw(2, 3, dtype=INT), 0.5),
    ],
    "aten.elu.default": [call(draw(9), 1.5, 1.1, 0.7)],
    "aten.convolution.default": [
        call(draw(0, 3, 6, 5), draw(4, 3, 3, 3), None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1),
    ],
    "aten.convolution_backward.default": list_masked_backwards(),
    "aten.max_pool2d_with_indices.default": [
        *[call(TIES, *settings) for settings in (*TIED, [[2, 2]])],
        call(torch.full((1, 1, 4, 4), -INFINITY).double(), *TIED[0]),
        call(fill(1, NAN, 2, 0).reshape(1, 1, 2, 2), [2, 2]),
        call(draw(2, 3, 6, 4, dtype=INT), [3, 3], [2, 2], [1, 1]),
    ],
    "aten.avg_pool2d.default": [call(draw(2, 3, 7, 8), *settings) for settings in AVERAGES],
    **{f"aten.{name}.default": [call(draw(2, 3).t())] for name in ("alias", "lift_fresh_copy")},
    "aten.reshape.default": [call(draw(2, 3), [3, -1])],
    "aten.copy.default": [
        call(draw(2, 3), draw(3)),
        call(draw(3, dtype=INT), fill(1.5, -1.5, 0)),
    ],
    "aten.slice_scatter.default": [
        call(SLICED, draw(*torch.ops.aten.slice.Tensor(SLICED, *where).shape), *where)
        for where in SLICES
    ],
    # Story: writes into a tensor of no dimension, which torch's samples have, crashed.
    "aten.gather.default": [call(fill(1, 2), -1, draw_indices(2))],
    "aten._to_copy.default": [call(args[0], dtype=args[1]) for args, _ in CONVERTED],
    "prims.convert_element_type.default": CONVERTED,
    "prims.iota.default": [
        call(n, start=start, step=step, dtype=dtype, device=CPU, requires_grad=False)
        for n, start, step, dtype in [(5, 0, 1, INT), (4, 3, -2, torch.int32)]
    ],
    **dict.fromkeys(("aten.index.Tensor", "aten._unsafe_index.Tensor"), READS),
    **dict.fromkeys(("aten.index_put.default", "aten._unsafe_index_put.default"), PUTS),
}
# torch and jax differ where no number is right: (the operation, on values that are not finite)
UNORDERED = ("aten.fmod.Tensor", "aten.remainder.Tensor")


@pytest.fixture(scope="module")
def samples() -> Dict[str, List[Call]]:
    """Return the calls in the samples of torch's own tests, by operation."""
    return record_samples(set(TABLE) - set(EMPTY))


def make_special(one: Call) -> Call:
    """Return a call on 0, NaN, infinities, -0 in all combinations, in place of float64 numbers."""
    count = len(SPECIAL)

    def replace(number: int, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.dtype != torch.float64:
            return value
        places = torch.arange(value.numel()) // (count if number else 1) % count
        return SPECIAL[places].reshape(value.shape)

    return Call(tuple(replace(i, value) for i, value in enumerate(one.args)), one.keywords)


def list_calls(name: str, samples: Dict[str, List[Call]]) -> List[Call]:
    """Return the calls of an operation: torch's samples, on special values, and those by hand."""
    # some are refused
    calls = [one for one in samples[name] if not list_missing(build_graph(name, [one])[0])]
    is_pointwise = torch.Tag.pointwise in find_operation(name).tags
    if is_pointwise and name not in UNORDERED:
        calls += map(make_special, samples[name][:2])
    return [*calls, *CASES.get(name, [])]


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


@pytest.mark.parametrize("name", sorted({*TABLE} - {*EMPTY}))
def test_an_operation_gives_what_torch_gives(name: str, samples: Dict[str, List[Call]]) -> None:
    calls = list_calls(name, samples)
    assert calls and list_differences(name, calls) == []


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


@pytest.mark.parametrize("shape, dim", [((4, 6), 1), ((4, 6), -2), ((3, 4, 5), 1), ((6,), 0)])
def test_tenstorrents_chips_read_and_write_one_index_a_row_by_marks(
    shape: Tuple[int, ...], dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = jax.numpy.asarray(draw(*shape).numpy())
    indices = jax.numpy.asarray(draw_indices(shape[dim], *shape).narrow(dim, 0, 1).numpy())
    functions = {
        "gather": lambda x, i: TABLE["aten.gather.default"](x, dim, i),
        "scatter": lambda x, i: TABLE["aten.scatter.value"](x, dim, i, 0.5),
    }
    for name, function in functions.items():
        usual = function(x, indices)
        program = jax.jit(function).trace(x, indices).lower(lowering_platforms=("tt",))
        assert f"stablehlo.{name}" not in program.as_text()
        with monkeypatch.context() as patch:
            patch.setattr(jax.lax, "platform_dependent", lambda *args, tt, default: tt(*args))
            assert (function(x, indices) == usual).all()
            is_read = name == "gather"
            assert not is_read or np.isnan(function(x, indices + 99)).all()
