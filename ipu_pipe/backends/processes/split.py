"""Split backwards: compute the input gradient of a stage now (I) and its weight gradients later
(W).

    graph      y <- conv2 <- relu <- bn1 <- conv1 <- x          <-  gradients flow this way
    I(m)            |g2      .       .       |g1      gx         send gx; keep g1, g2, the saved inputs of conv1 and conv2,
                                                                 and the finished gradients of bn1;
                                                                 drop everything else
    W(m)       w2 += f(g2, x2)   w1 += f(g1, x1)   bn1 += ...    call the same functions as a whole backward

W computes the weight gradients that are separate products (`_OPERATIONS`). Gradients of other
weights (norms, embeddings, added biases) cost almost nothing within I; W only adds them, so that
all gradients of a microbatch are added at its W. W reads no
weights: there may be an update between I and W.
"""

from __future__ import annotations

from typing import Any, Callable, NamedTuple, Optional, Sequence, Tuple

import torch

# torch 2.0.1, which IPUs use, imports this file and splits nothing
if hasattr(torch.autograd.graph, "GradientEdge"):
    from torch.autograd.graph import GradientEdge

# None is the gradient of a loss
Gradients = Sequence[Optional[torch.Tensor]]
# a node of autograd's graph, and the index of its output
Edge = Tuple[Any, int]


class _Operation(NamedTuple):
    """A node whose weight gradients W computes. `edges`: index of a gradient in the node's results
    -> edge to the weight.
    """

    node: Any
    edges: dict[int, Edge]
    leaves: list[Any]


class WeightGradients:
    """The work that I leaves to W.

    `products`: for each product its function, the gradient to call it with, and the edges to the
    weights by index of the function's results. `finished`: gradients that I has computed, by the
    node that accumulates them. `tensors`: all tensors that are stored until W.
    """

    def __init__(self) -> None:
        self.products: list[
            tuple[Callable[[torch.Tensor], Gradients], torch.Tensor, dict[int, Edge]]
        ] = []
        self.finished: dict[Any, torch.Tensor] = {}
        self.tensors: list[torch.Tensor] = []

    def take(self, weight: torch.Tensor) -> torch.Tensor | None:
        """Remove the finished gradient of a weight, so that W does not add it, and return it; None
        if it is zero.
        """
        return next(
            (self.finished.pop(node) for node in list(self.finished) if node.variable is weight),
            None,
        )

    def add(self) -> None:
        """Carry out W: compute the remaining gradients and add all of them to the gradients of the
        weights.
        """
        edges: list[GradientEdge] = []
        gradients: list[torch.Tensor] = []
        for compute, gradient, edges_by_index in self.products:
            computed = compute(gradient)
            for index, edge in edges_by_index.items():
                value = computed[index]
                assert value is not None
                edges.append(GradientEdge(*edge))
                gradients.append(value)
        if edges:
            # from the edges on, because a transposition or a cast may lie before the weight
            torch.autograd.backward(edges, gradients)  # type: ignore[arg-type]
        for node, gradient in self.finished.items():
            # the node that adds to the weight's gradient in a whole backward, too
            node(gradient)


def run_whole_backward(
    roots: Sequence[torch.Tensor], gradients: Gradients, weights: Sequence[torch.Tensor]
) -> WeightGradients:
    """Carry out I of a stage whose backward cannot be split: compute all gradients now and leave
    only the addition to W.
    """
    deferred = WeightGradients()
    # set aside, because W adds the microbatch's gradients as a whole backward does
    accumulated = [p.grad for p in weights]
    for p in weights:
        p.grad = None
    torch.autograd.backward(roots, gradients)  # type: ignore[arg-type]
    deferred.finished = {_get_leaf(p): p.grad for p in weights if p.grad is not None}
    for p, gradient in zip(weights, accumulated):
        p.grad = gradient
    deferred.tensors += deferred.finished.values()
    return deferred


def run_input_backward(
    roots: Sequence[torch.Tensor],
    gradients: Gradients,
    inputs: Sequence[torch.Tensor],
    immediate: Sequence[torch.Tensor] = (),
) -> WeightGradients:
    """Carry out I: put the gradients of the tensors `inputs` into them, and return the work of W.

    `gradients`: the gradients of `roots`. `immediate`: the weights whose gradients I computes
    itself.
    """
    # indices and masks of a batch have no gradient
    inputs = [t for t in inputs if t.requires_grad]
    operations, leaves = _list_operations(
        roots, {id(t) for t in inputs}, {id(t) for t in immediate}
    )
    deferred = WeightGradients()
    # before the backward, which frees the saved tensors of the nodes
    prepared = [
        _OPERATIONS[operation.node.name()](operation.node, deferred.tensors)
        for operation in operations
    ]
    edges = [GradientEdge(operation.node, 0) for operation in operations]
    weights = [leaf.variable for leaf in leaves]
    # `grad` refuses an empty list
    if not (inputs or weights or edges):
        return deferred
    # one call, so that nodes that several results need run once
    values = torch.autograd.grad(roots, [*inputs, *weights, *edges], gradients, allow_unused=True)
    for t, value in zip(inputs, values):
        t.grad = value
    values = values[len(inputs) :]
    deferred.finished = {leaf: value for leaf, value in zip(leaves, values) if value is not None}
    for operation, compute, value in zip(operations, prepared, values[len(leaves) :]):
        if value is not None:
            deferred.products.append((compute, value, operation.edges))
            deferred.tensors.append(value)
    deferred.tensors += deferred.finished.values()
    return deferred


def _list_operations(
    roots: Sequence[torch.Tensor], input_ids: set[int], immediate_ids: set[int]
) -> tuple[list[_Operation], list[Any]]:
    """Walk a graph; return the operations whose weight gradients can wait, and the leaves of the
    other weights.
    """
    operations: list[_Operation] = []
    immediate_leaves: dict[Any, None] = {}
    unvisited = [t.grad_fn for t in roots if t.grad_fn is not None]
    found_nodes = set(unvisited)
    # an output that is a weight itself has no node to walk from
    for root in roots:
        if root.grad_fn is None and root.requires_grad and id(root) not in input_ids:
            immediate_leaves[_get_leaf(root)] = None
    while unvisited:
        node = unvisited.pop()
        operation = _Operation(node, {}, []) if node.name() in _OPERATIONS else None
        for index, edge in enumerate(node.next_functions):
            child = edge[0]
            if child is None:
                continue
            leaf = _follow(child)
            if leaf is None:
                if child not in found_nodes:
                    found_nodes.add(child)
                    unvisited.append(child)
            elif id(leaf.variable) in input_ids:
                continue
            elif (
                operation is not None
                and index in _WEIGHT_INDICES[node.name()]
                and id(leaf.variable) not in immediate_ids
            ):
                operation.edges[index] = edge
                operation.leaves.append(leaf)
            else:
                immediate_leaves[leaf] = None
        if operation is not None and operation.edges:
            operations.append(operation)
    # I computes the gradient of a weight that is used in both ways, because autograd sums all uses
    # before it accumulates
    while True:
        mixed = [
            operation
            for operation in operations
            if any(leaf in immediate_leaves for leaf in operation.leaves)
        ]
        if not mixed:
            return operations, list(immediate_leaves)
        immediate_leaves.update(
            dict.fromkeys(leaf for operation in mixed for leaf in operation.leaves)
        )
        operations = [operation for operation in operations if operation not in mixed]


def _follow(node: Any) -> Any:
    """Return the leaf at the end of a chain of operations with one argument (transposition, cast),
    None if there is no leaf.
    """
    following = node.next_functions
    while len(following) == 1 and following[0][0] is not None:
        node = following[0][0]
        following = node.next_functions
    return node if not following and hasattr(node, "variable") else None


def _get_leaf(weight: torch.Tensor) -> Any:
    # the graph of a view leads to the node that accumulates the weight's gradient
    return weight.view_as(weight).grad_fn.next_functions[0][0]  # type: ignore[union-attr]


def _prepare_convolution(
    node: Any, stored: list[torch.Tensor]
) -> Callable[[torch.Tensor], Gradients]:
    x = node._saved_input
    # for its shape alone: the mask leaves out the input's gradient, which would read it
    weight = node._saved_weight
    settings = (
        node._saved_bias_sym_sizes_opt,
        node._saved_stride,
        node._saved_padding,
        node._saved_dilation,
        node._saved_transposed,
        node._saved_output_padding,
        node._saved_groups,
    )
    # without the gradient of the input, which I has computed
    mask = [False, *(child is not None for child, _ in node.next_functions[1:])]
    stored.append(x)
    backward = torch.ops.aten.convolution_backward.default
    return lambda gradient: backward(gradient, x, weight, *settings, mask)


def _prepare_product(node: Any, stored: list[torch.Tensor]) -> Callable[[torch.Tensor], Gradients]:
    """Return the function that computes the gradients of a product's second factor (m, n) and of
    its bias, as autograd does.
    """
    is_sum = len(node.next_functions) == 3
    x = node._saved_mat1 if is_sum else node._saved_self
    # addmm with other factors scales the products, which `compute` does not
    assert not is_sum or (node._saved_alpha == 1 and node._saved_beta == 1)
    stored.append(x)
    # mat2 is (rows, columns), column by column in memory if its first stride is 1
    rows = node._saved_mat2_sym_sizes[0]
    strides = node._saved_mat2_sym_strides
    is_transposed = strides[0] == 1 and strides[1] == rows
    bias = node.next_functions[0][0] if is_sum else None

    def compute(gradient: torch.Tensor) -> Gradients:
        # autograd chooses by the factor's layout, and the other product would round differently
        factor = gradient.t().mm(x).t() if is_transposed else x.t().mm(gradient)
        if not is_sum:
            return None, factor
        # the bias was expanded over the rows, so that its gradient is their sum
        return None if bias is None else gradient.sum_to_size(gradient.shape[1:]), None, factor

    return compute


_OPERATIONS: dict[str, Callable[[Any, list[torch.Tensor]], Callable[[torch.Tensor], Gradients]]] = {
    "ConvolutionBackward0": _prepare_convolution,
    "AddmmBackward0": _prepare_product,
    "MmBackward0": _prepare_product,
}
_WEIGHT_INDICES = {"ConvolutionBackward0": (1, 2), "AddmmBackward0": (0, 2), "MmBackward0": (1,)}


def is_split_exact(
    roots: Sequence[torch.Tensor],
    gradients: Gradients,
    inputs: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    immediate: Sequence[torch.Tensor],
) -> bool:
    """Return whether I and W give the gradients of a whole backward, bit for bit.

    The gradients are added to random ones. W runs with weights of NaN, because it must read none.
    """
    sums = [torch.randn_like(p) for p in weights]

    def begin() -> None:
        for t in inputs:
            t.grad = None
        for p, value in zip(weights, sums):
            p.grad = value.clone()

    # the whole backward first, which keeps the graph for I
    begin()
    torch.autograd.backward(roots, gradients, retain_graph=True)  # type: ignore[arg-type]
    expected = [t.grad for t in (*inputs, *weights)]
    begin()
    deferred = run_input_backward(roots, gradients, inputs, immediate)
    values = [p.data for p in weights]
    for p in weights:
        # a product with NaN would show in the gradients
        p.data = torch.full_like(p, float("nan"))
    try:
        deferred.add()
    finally:
        for p, value in zip(weights, values):
            p.data = value
    pairs = zip(expected, [t.grad for t in (*inputs, *weights)])
    return all(a is b or (a is not None and b is not None and torch.equal(a, b)) for a, b in pairs)
