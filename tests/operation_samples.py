"""Record the samples of torch's own tests (`op_db`), forwards and backwards, as calls of ATen
operations.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import types
import unittest
import warnings
from typing import Any, Collection, Dict, Iterator, List, NamedTuple, Tuple

import torch
from torch.utils._pytree import tree_flatten, tree_map

from ipu_pipe.model.watching import OperationWatch

DTYPES = (torch.float64, torch.int64, torch.bool)
# samples of an operator in each dtype, calls of an operation, elements of a tensor
MOST_SAMPLES, MOST_CALLS, MOST_ELEMENTS = 6, 4, 1000
# words in the names of convolutions and pools, whose samples differ in their settings
WINDOWS, MOST_OF_WINDOWS = ("conv", "pool"), 18
# operators whose name is not that of an operation, but whose samples have it inside
COMPOSED = (
    "conv2d",
    "conv3d",
    "conv_transpose2d",
    "max_pool2d",
    "batch_norm",
    "layer_norm",
    "gelu",
    "pad",
    "interpolate",
    "cross_entropy",
    "masked_fill",
    "std",
    "float_power",
    "floor_divide",
    "matmul",
    "baddbmm",
    "diff",
    "split_list_args",
    "chunk",
    "tile",
    "broadcast_to",
    "trapezoid",
    "bfloat16",
    "double",
    "float",
    "long",
)


class Call(NamedTuple):
    """The arguments of an operation."""

    args: Tuple[Any, ...]
    keywords: Dict[str, Any]


def _list_operators(names: Collection[str]) -> Iterator[Any]:
    """Yield the operators of torch's table whose samples call operations of these names."""
    # torch's own tests compare texts by this package; their samples do not need it
    sys.modules.setdefault("expecttest", types.SimpleNamespace(TestCase=unittest.TestCase))  # type: ignore[arg-type]
    from torch.testing._internal.common_methods_invocations import op_db

    bases = {name.split(".")[1].strip("_") for name in names}
    for operator in op_db:
        last = operator.name.rpartition(".")[2]
        if {last, operator.name.replace(".", "_")} & bases or last in COMPOSED:
            yield operator


def record_samples(names: Collection[str]) -> Dict[str, List[Call]]:
    """Return calls of each of the operations: in float64, integers and truth values."""
    calls: Dict[str, List[Call]] = {name: [] for name in names}

    def record(function: Any, args: Any, keywords: Any) -> Any:
        name = str(function)
        here = calls.get(name)
        leaves = tree_flatten((args, keywords))[0]
        most = MOST_OF_WINDOWS if _has_windows(name) else MOST_CALLS
        if here is not None and len(here) < most and all(map(_is_simple, leaves)):
            here.append(Call(*tree_map(_copy, (args, keywords))))
        return function(*args, **keywords)

    for operator in _list_operators(names):
        for dtype in DTYPES[:1] if _has_windows(operator.name) else DTYPES:
            if dtype not in operator.dtypes:
                continue
            is_trained = operator.supports_autograd and dtype == torch.float64
            # some samples need what is not here, such as a library for complex numbers
            with contextlib.suppress(Exception), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                # `sample_inputs` inspects the stack for each sample, a minute where much is imported
                torch.manual_seed(0)
                samples = operator.sample_inputs_func(operator, "cpu", dtype, is_trained)
                for sample in itertools.islice(samples, MOST_SAMPLES):
                    with OperationWatch(record):
                        _run(operator, sample)
    return calls


def _has_windows(name: str) -> bool:
    return any(word in name for word in WINDOWS)


def _run(operator: Any, sample: Any) -> None:
    """Run a sample and its backward."""
    result = operator(sample.input, *sample.args, **sample.kwargs)
    outputs = [t for t in tree_flatten(result)[0] if isinstance(t, torch.Tensor)]
    inputs = tree_flatten((sample.input, sample.args, sample.kwargs))[0]
    trained = [t for t in inputs if isinstance(t, torch.Tensor) and t.requires_grad]
    roots = [t.sum() for t in outputs if t.requires_grad]
    if roots and trained:
        torch.autograd.grad(roots, trained, allow_unused=True)


def _is_simple(leaf: Any) -> bool:
    """Return whether xla may take an argument."""
    if not isinstance(leaf, torch.Tensor):
        return not isinstance(leaf, (complex, torch.Generator))
    is_small = leaf.layout is torch.strided and leaf.numel() <= MOST_ELEMENTS
    return is_small and leaf.dtype in (*DTYPES, torch.float32)


def _copy(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf
