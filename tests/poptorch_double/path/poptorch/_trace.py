"""Trace one forward as PopTorch's compiler does: operations with block, stage and IPU, and the losses.

forward   block A: conv relu | block B: conv  linear  loss |           ops, in order
outputs   (logits, loss)                                               unneeded ops are dropped, as by PopTorch
layout    stage 0 on IPU 0   | stage 1 on IPU 1                        checked by PopTorch's and PopART's rules
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import (
    Any,
    Callable,
    Dict,
    FrozenSet,
    Iterator,
    List,
    Mapping,
    Optional,
    Sequence,
    Set,
    Tuple,
)

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map

from poptorch._errors import DoubleRefuses, make_cpp_error, make_popart_error, make_unmodelled_error
from poptorch._record import Loss, Placement

current: Optional["Trace"] = None  # the trace in progress

LOSSES = frozenset(
    "binary_cross_entropy binary_cross_entropy_with_logits cosine_embedding_loss cross_entropy ctc_loss "
    "gaussian_nll_loss hinge_embedding_loss huber_loss kl_div l1_loss margin_ranking_loss mse_loss multi_margin_loss "
    "multilabel_margin_loss multilabel_soft_margin_loss nll_loss poisson_nll_loss smooth_l1_loss soft_margin_loss "
    "triplet_margin_loss triplet_margin_with_distance_loss".split()
)
# what no graph that is built before it runs can have, and why
STATIC = {
    ("backward", "grad", "register_hook", "register_post_accumulate_grad_hook"):
        "gradients and hooks do not exist inside the forward of an IPU model",
    ("item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__", "__array__"):
        "the value of an IPU tensor is not known while the graph is built (static graph)",
    ("nonzero", "unique", "unique_consecutive", "masked_select", "argwhere"):
        "the shape of its result depends on values (static shapes)",
}  # fmt: skip
# Operations that PopTorch has handlers of: those of the models and losses that are tried here. Others are refused.
OPERATIONS = frozenset(
    "_set_grad_enabled __eq__ __get__ __getitem__ adaptive_avg_pool2d add add_ arange argmax batch_norm bmm cat chunk clone "
    "contiguous conv1d conv2d cross_entropy detach dim div dropout embedding eq expand flatten float gelu group_norm "
    "is_floating_point l1_loss layer_norm linear log_softmax masked_fill matmul max_pool2d mean mse_loss mul mul_ ne nll_loss "
    "ones permute pow relu reshape scaled_dot_product_attention sigmoid size softmax square squeeze stack sub sum tanh to "
    "transpose unbind unflatten unsqueeze view view_as zeros".split()
)
SEES_INDEXING = not torch.__version__.startswith(
    "2.0"
)  # there a TorchFunctionMode does not get tensor[index]


# ---- nested structures of tensors


def list_leaves(structure: Any) -> List[Any]:
    """Return the leaves of nested tuples, lists and dictionaries, in order."""
    return list(tree_flatten(structure)[0])


def map_tensors(structure: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    """Return the structure with `function(tensor)` in place of every tensor."""
    return tree_map(lambda x: function(x) if isinstance(x, torch.Tensor) else x, structure)


def list_tensors(structure: Any) -> List[torch.Tensor]:
    return [leaf for leaf in list_leaves(structure) if isinstance(leaf, torch.Tensor)]


# ---- tracing


@dataclass
class Op:
    """An operation; its tensors by identity."""

    name: str
    at: Placement
    inputs: Tuple[int, ...]
    outputs: Tuple[int, ...]
    loss: Optional[str] = None


class Trace(TorchFunctionMode):
    """Context in which every torch function that makes a tensor is recorded, and refused if the
    IPU does not support it."""

    def __init__(
        self,
        strategy: Any,
        model: torch.nn.Module,
        inputs: Sequence[torch.Tensor],
        training: bool,
        mixes_halves: bool,
    ) -> None:
        super().__init__()
        self.is_training = training
        self.mixes_halves = mixes_halves  # half inputs, float32 weights
        self.strategy = strategy
        self.active = Placement("", 0, 0)  # before any block: IPU 0, stage 0
        self.ops: List[Op] = []
        named = [*model.named_parameters(), *model.named_buffers()]
        self._names = {id(t): name for name, t in named}
        self._references: List[Any] = list(inputs)  # so that no identity is used twice
        self._known = {*self._names, *map(id, inputs)}  # tensors that are on the IPU
        attributes = [value for module in model.modules() for value in vars(module).values()]
        self._host_tensors = {id(one) for one in attributes if isinstance(one, torch.Tensor)}
        self._host_tensors -= self._known

    # -- blocks

    def begin(self, block: Optional[str], ipu: Optional[int]) -> None:
        """Begin a block. A stage's own IPU precedes the block's; without either it is the
        stage's id."""
        stage = self.strategy.find_stage(block)
        place = stage._ipu if stage._ipu is not None else ipu
        number = stage._stage_id
        self.active = Placement(str(block), number, number if place is None else place)

    def mark_loss(self, function: str, loss: torch.Tensor) -> None:
        """Mark the operation that made `loss` as a loss."""
        maker = next(op for op in reversed(self.ops) if id(loss) in op.outputs)
        maker.loss = function

    # -- operations

    def __enter__(self) -> Any:
        global current
        current = self
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        global current
        current = None
        super().__exit__(*error)

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Optional[Dict[str, Any]] = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        self._refuse_operation(name)
        has_third = args[2:3] not in ((), (None,))  # a weight of classes, or a bias
        if name in ("cross_entropy", "nll_loss") and (
            kwargs.get("weight") is not None or has_third
        ):
            raise make_cpp_error(f'Parameter "weight" is unsupported for aten::{name}')
        for asked, op in (("label_smoothing", "masked_select"), ("is_causal", "tril")):
            if kwargs.get(asked):
                raise make_cpp_error(f"Unsupported ops found in compiled model: [aten::{op}].")
        inputs = list_tensors([args, kwargs])
        for tensor in inputs:
            self._check_place(name, tensor)
        if (
            name.startswith("conv")
            and self.mixes_halves
            and (kwargs.get("bias") is not None or has_third)
        ):
            # torch 2.0.1's own
            raise RuntimeError("Input type (c10::Half) and bias type (float) should be the same")
        result = func(*args, **kwargs)
        outputs = list_tensors(result)
        if name == "__setitem__":
            outputs = [args[0]]
        if outputs:
            self._record_operation(name, inputs, outputs)
        if not torch.is_grad_enabled() and self.is_training and name != "detach":
            if any(t.requires_grad for t in inputs) and any(t.is_floating_point() for t in outputs):
                raise DoubleRefuses(
                    f"{name}: torch.no_grad() has no effect on an IPU (RequiresGrad.cpp)"
                )
        return result

    def _check_place(self, name: str, tensor: torch.Tensor) -> None:
        """Refuse a tensor of the host: a tensor must be an input, a parameter, a buffer, or made
        in the trace."""
        if isinstance(tensor.grad_fn, torch.autograd.function.BackwardCFunction):
            raise DoubleRefuses(
                f"{name} takes a tensor made by {type(tensor.grad_fn).__name__}, which no IPU runs"
            )
        if id(tensor) in self._host_tensors or (SEES_INDEXING and id(tensor) not in self._known):
            raise make_cpp_error(
                f"{name}: expected an IPU tensor, got a CPU tensor of shape {list(tensor.shape)}"
            )

    def _refuse_operation(self, name: str) -> None:
        for names, why in STATIC.items():
            if name in names:
                raise make_cpp_error(f"{name}: {why}")
        if name not in OPERATIONS:
            raise make_unmodelled_error(f"torch's {name} (does PopTorch have a handler of it?)")

    def _record_operation(
        self, name: str, inputs: List[torch.Tensor], outputs: List[torch.Tensor]
    ) -> None:
        self._references += [*inputs, *outputs]
        self._known.update(map(id, outputs))
        loss = name if name in LOSSES else None
        self.ops.append(
            Op(name, self.active, tuple(map(id, inputs)), tuple(map(id, outputs)), loss)
        )

    # -- needed operations

    def keep_needed(
        self, outputs: Sequence[torch.Tensor], written: Sequence[torch.Tensor]
    ) -> List[Op]:
        """Return the operations that the outputs and the buffers written in place need; all others are dropped."""
        needed, living = {id(t) for t in [*outputs, *written]}, []
        for op in reversed(self.ops):
            if needed.intersection(op.outputs):
                needed.update(op.inputs)
                living.append(op)
        return living[::-1]

    def list_variable_uses(self, ops: Sequence[Op]) -> Iterator[Tuple[str, Op]]:
        """Yield every use of a parameter or buffer."""
        for op in ops:
            for tensor in op.inputs:
                if tensor in self._names:
                    yield self._names[tensor], op


# ---- the final loss


def find_losses(
    ops: Sequence[Op], outputs: Sequence[Any], training: bool
) -> Tuple[List[Loss], Optional[int]]:
    """Return all remaining losses, and the place of the final one among the outputs (in training).

    A loss that another loss uses is demoted. PopTorch takes the gradient of the remaining one,
    whatever else is computed from it, so that `0.5 * cross_entropy(...)` silently trains with the
    unscaled loss: the double requires the final loss itself among the outputs.
    """
    before: Dict[int, FrozenSet[int]] = {}  # tensor -> losses it is computed from
    demoted: Set[int] = set()
    for index, op in enumerate(ops):
        behind = frozenset().union(*[before.get(tensor, frozenset()) for tensor in op.inputs])
        if op.loss is not None:
            demoted |= behind
            behind = frozenset([index])
        for tensor in op.outputs:
            before[tensor] = behind | (
                before.get(tensor, frozenset()) if op.loss is None else frozenset()
            )
    marked = [index for index, op in enumerate(ops) if op.loss is not None]
    final = [index for index in marked if index not in demoted]
    places = {id(output): place for place, output in reversed(list(enumerate(outputs)))}
    losses = []
    for index in marked:
        op = ops[index]
        changed = {tensor for later in ops[index + 1 :] for tensor in later.outputs}  # in place
        returned = next(
            (places[tensor] for tensor in op.outputs if tensor in places and tensor not in changed),
            None,
        )
        losses.append(
            Loss(str(op.loss), op.at.stage, op.at.ipu, training and index in final, returned)
        )
    if not training:
        return losses, None
    if not final:
        raise make_cpp_error("Couldn't find a loss in graph!")
    if len(final) > 1:
        raise make_cpp_error("Multiple independent losses found in graph.")
    last = next(loss for loss in losses if loss.final)
    if last.returned is None:
        raise DoubleRefuses(f"the final loss, of {last.function}, is not itself returned")
    return losses, last.returned


# ---- the layout


@dataclass(frozen=True)
class Layout:
    stages: Dict[int, int]
    ipus_per_replica: int
    forward_stages: int
    parameters: Dict[str, int]
    pipelined: bool


def lay_out(
    trace: Trace, ops: Sequence[Op], losses: Sequence[Loss], parameters: Mapping[str, Any]
) -> Layout:
    """Return the checked stages and IPUs of the operations."""
    ipus = [op.at.ipu for op in ops]
    used = max(len(set(ipus)), max(ipus, default=0) + 1)
    changes = sum(a != b for a, b in zip([0, *ipus], ipus))
    pipelined = trace.strategy.execution_mode == 0 and used > 1  # silently off on one IPU
    stages: Dict[int, int] = {}
    where: Dict[str, int] = {}
    for op in ops:
        ipu = stages.setdefault(op.at.stage, op.at.ipu)
        if pipelined and ipu != op.at.ipu:
            raise make_popart_error(
                f"Ops have the same pipeline stage {op.at.stage}, but different virtual graph ids"
            )
    for name, op in trace.list_variable_uses(ops):
        ipu = where.setdefault(name, op.at.ipu)
        if pipelined and ipu != op.at.ipu:
            raise make_popart_error(
                f"Can not copy variable tensor {name} between virtual graphs when pipelining"
            )
    if pipelined:
        _check_order(ops, losses)
        missing = {*range(max(stages) + 1)} - {*stages}
        if missing:
            raise make_popart_error(f"pipeline stage {min(missing)} is missing")
    return Layout(
        stages, used, changes + 1, {n: i for n, i in where.items() if n in parameters}, pipelined
    )


def _check_order(ops: Sequence[Op], losses: Sequence[Loss]) -> None:
    maker_of: Dict[int, Op] = {}
    for op in ops:
        for tensor in op.inputs:
            earlier = maker_of.get(tensor)
            if earlier is not None and earlier.at.stage > op.at.stage:
                raise make_popart_error(
                    f"{op.name}: a tensor can not be consumed in an earlier stage than it is produced"
                )
        maker_of.update(dict.fromkeys(op.outputs, op))
    last = next((loss.stage for loss in losses if loss.final), None)
    for op in ops:
        if last is not None and op.at.stage > 2 * last:  # where its backward would have to be
            raise make_popart_error(
                f"Op has bad pipeline stage: {op.name} in {op.at.stage}, loss in {last}"
            )
