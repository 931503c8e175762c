"""Lower graphs of ATen operations to functions of jax arrays.

A function is called while `jax.jit` traces it, so the interpretation of a graph costs nothing in
training.
"""

from __future__ import annotations

import operator
from typing import Any, Callable

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import fx

from ipu_pipe.backends.xla.operations import DTYPES, OPERATIONS
from ipu_pipe.backends.xla.windows import WINDOWS
from ipu_pipe.cut.graphs import describe_node

TABLE: dict[str, Callable[..., Any]] = {**OPERATIONS, **WINDOWS}
# operations whose second argument is a list of indices
_INDEXED = ("aten.index.", "aten._unsafe_index.", "aten.index_put.", "aten._unsafe_index_put.")


def list_missing(graph: fx.GraphModule) -> list[str]:
    """List the operations of a graph that cannot be lowered, with the module that made each."""
    missing = []
    for node in graph.graph.nodes:
        fault = _find_fault(node)
        if fault is not None:
            missing.append(describe_node(node, fault))
    return list(dict.fromkeys(missing))


def _find_fault(node: fx.Node) -> str | None:
    """Return the reason that an operation cannot be lowered, '' if it is unknown, None if it can
    be.
    """
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor) and value.dtype not in DTYPES:
        return f"{value.dtype} "
    # placeholders and constants are no operations; getitem takes a part of several results
    if node.op != "call_function" or node.target is operator.getitem:
        return None
    name = str(node.target)
    if name not in TABLE:
        return ""
    # jax's arrays have no strides
    if name == "aten.as_strided.default" and not _is_contiguous_view(node):
        return "strided "
    # jax needs fixed shapes, and that of a selection depends on the mask's values
    if name.startswith(_INDEXED) and _reads_mask(node):
        return "truth values in "
    return None


def _is_contiguous_view(node: fx.Node) -> bool:
    """Return whether a view has a part of the elements of a tensor, in their order."""
    source: Any = node.args[0]
    return source.meta["val"].is_contiguous() and node.meta["val"].is_contiguous()


def _reads_mask(node: fx.Node) -> bool:
    """Return whether an operation has truth values as indices, and is not a write of one number."""
    indices: Any = node.args[1]
    *others, last = [None if index is None else index.meta["val"].dtype for index in indices]
    masks = (torch.bool, torch.uint8)
    # a write of one number through a mask is a choice element by element, of fixed shape
    if last == torch.bool and not any(others) and len(node.args) > 2:
        values: Any = node.args[2]
        return values.meta["val"].ndim > 0
    return last in masks or any(dtype in masks for dtype in others)


def lower(graph: fx.GraphModule) -> Callable[..., list[Any]]:
    """Return the function of jax arrays that a graph describes; None among its results stays."""
    nodes = list(graph.graph.nodes)
    constants = {
        node: np.asarray(getattr(graph, node.target).detach())
        for node in nodes
        if node.op == "get_attr"
    }

    def run(*arguments: Any) -> list[Any]:
        values: dict[fx.Node, Any] = {node: jnp.asarray(x) for node, x in constants.items()}
        rest = iter(arguments)
        for node in nodes:
            if node.op == "placeholder":
                values[node] = next(rest)
            elif node.op == "call_function":
                args, keywords = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
                # a compiler's faults name the module
                with jax.named_scope(describe_node(node)):
                    values[node] = _call(node, args, keywords)
        return list(fx.node.map_arg(nodes[-1].args[0], values.__getitem__))

    return run


def _call(node: fx.Node, args: Any, keywords: Any) -> Any:
    if node.target is operator.getitem:
        result = args[0][args[1]]
    else:
        result = TABLE[str(node.target)](*args, **keywords)
    value = node.meta.get("val")
    # torch and jax promote types by different rules
    return result.astype(DTYPES[value.dtype]) if isinstance(value, torch.Tensor) else result
