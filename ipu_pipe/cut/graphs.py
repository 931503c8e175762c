"""Trace the passes of a stage into pure functions, graphs of ATen operations, that any compiler can
run.

torch's own autograd is traced once per stage into one *joint* graph. It is cut into the passes by
what each of them needs:

    forward           weights, state, masks, inputs, labels  -> outputs, new state, saved tensors
    backward          weights, saved tensors, gradients      -> weight gradients, input gradients
    input gradient    weights, saved tensors, gradients      -> input gradients, tensors kept for W
    weight gradient   kept tensors                           -> weight gradients

The weights are arguments of every pass that reads them, so a backward may read another version than
its forward did. The cut decides what a backward then computes. An operation belongs to the forward
only if the forward's *outputs* need it. Cut by "does it depend on the incoming gradient", the
product `scale * rstd` of a norm's backward would move into the forward and read the forward's
scale, where autograd reads the scale of the backward: methods whose backward reads newer weights
would be wrong by 1e-5, all others exact.
"""

from __future__ import annotations

import contextlib
import operator
from dataclasses import dataclass
from typing import AbstractSet, Any, Callable, Iterable, Iterator, NamedTuple, Sequence

import torch
from torch import fx, nn
from torch.fx import traceback
from torch.nn import functional as F
from torch.utils._pytree import tree_flatten, tree_unflatten

from ipu_pipe.cut.cutting import Piece, cut_model, list_crossings
from ipu_pipe.errors import BadInput, summarize
from ipu_pipe.model.batch import map_tensors, sort_keys
from ipu_pipe.model.loss import Loss, call_loss, count_right, take_scores
from ipu_pipe.model.modes import set_mode
from ipu_pipe.model.randomness import derive_seed
from ipu_pipe.model.restoring import restore_all, restore_function
from ipu_pipe.text import list_some

aten = torch.ops.aten

# the modules whose output is the input times a mask that depends on its shape alone
DROPOUTS: dict[type[nn.Module], Callable[..., torch.Tensor]] = {
    nn.Dropout: F.dropout,
    nn.Dropout1d: F.dropout1d,
    nn.Dropout2d: F.dropout2d,
    nn.Dropout3d: F.dropout3d,
}
# the entry of a node's meta that torch copies from the forward; here {name of the innermost module}
_MODULES = "nn_module_stack"
# operations whose result shares the memory of their argument: autograd, which saves it, sees a
# weight that was overwritten
_VIEWS = {
    aten.alias.default,
    aten.as_strided.default,
    aten.detach.default,
    aten.expand.default,
    aten.permute.default,
    aten.select.int,
    aten.slice.Tensor,
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.t.default,
    aten.transpose.int,
    aten.unsqueeze.default,
    aten.view.default,
    aten._unsafe_view.default,
    operator.getitem,
}


class Mask(NamedTuple):
    """A dropout mask that a forward takes as an argument.

    `module`: the name of the module in the model; `call`: the number of its call in a forward;
    `shape`, `stride`, `dtype`: those of the tensor that it multiplies.
    """

    module: str
    call: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def draw(self, module: nn.Module, seed: int, microbatch: int) -> torch.Tensor:
        """Return the mask of a microbatch, with the bits that the module itself would draw.

        The dropout of ones is the mask. The default generator is left in another state.
        """
        key = [self.call] if self.call else []
        torch.default_generator.manual_seed(derive_seed(seed, microbatch, self.module, *key))
        ones = torch.empty_strided(self.shape, self.stride, dtype=self.dtype).fill_(1)
        return DROPOUTS[type(module)](ones, module.p, True)


def draw_masks(
    model: nn.Module, masks: Sequence[Mask], seed: int, microbatch: int
) -> list[torch.Tensor]:
    """Return the masks of a microbatch, those that every backend draws (`KeyedRandomness`)."""
    if not masks:
        return []
    with torch.random.fork_rng(devices=[]):
        return [mask.draw(model.get_submodule(mask.module), seed, microbatch) for mask in masks]


@dataclass(frozen=True)
class StageGraphs:
    """The passes of one stage as functions of tensors; their arguments and results are flat lists.

    `weights`: the names of the trained parameters in the model, in the order of the arguments.
    `state`: buffers and parameters that are not trained. `masks`: the dropout masks. `inputs`,
    `labels`: the tensors of a microbatch that enter. `outputs`: the tensors that leave; of the last
    stage the loss, and (right, counted) labels if `counts_labels`. `saved`: the tensors that a
    forward leaves to its backward. `gradients`: the outputs whose gradients a backward takes, by
    index. `differentiable`: the inputs whose gradients it returns. `kept`: the tensors that the
    input gradient leaves to the weight gradient. A gradient that does not exist is None.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule
    input_gradient: fx.GraphModule
    weight_gradient: fx.GraphModule
    weights: tuple[str, ...]
    state: tuple[str, ...]
    masks: tuple[Mask, ...]
    inputs: int
    labels: int
    outputs: int
    gradients: tuple[int, ...]
    differentiable: tuple[int, ...]
    saved: tuple[torch.Tensor, ...]
    kept: tuple[torch.Tensor, ...]
    counts_labels: bool = False

    def format_text(self) -> str:
        """Return the code of all passes, with the names of the weights and the bytes that are
        stored.
        """
        lines = [
            f"weights: {', '.join(self.weights) or 'none'}",
            f"state: {', '.join(self.state) or 'none'}",
            f"saved: {len(self.saved)} tensors, {count_bytes(self.saved)} bytes",
        ]
        for name in ("forward", "backward", "input_gradient", "weight_gradient"):
            code = getattr(self, name).code.strip()
            lines += ["", f"# {name}", code.replace("def forward(", f"def {name}(", 1)]
        return "\n".join(lines)

    @property
    def saved_bytes(self) -> int:
        """The bytes that a microbatch in flight stores on the stage, by the tensors' shapes."""
        return count_bytes(self.saved)


def count_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of tensors by their shapes."""
    return sum(t.numel() * t.element_size() for t in tensors)


def trace_stages(
    model: nn.Module, begins: Sequence[str], example: tuple[Any, Any], loss: Loss
) -> list[StageGraphs]:
    """Return the graphs of all stages of a model that is cut before each of the modules `begins`.

    `example`: (x, y), the inputs and labels of a microbatch; every other must have its shapes. The
    model is left as it was. Raise `BadInput` if a stage cannot be traced.

        for graphs in ipu_pipe.trace_stages(model, ["block2", "block4"], (x, y), F.cross_entropy):
            print(graphs.format_text())
    """
    return trace_pieces(cut_model(model, begins, example[0]), example, loss)


def trace_pieces(
    pieces: Sequence[Piece], example: tuple[Any, Any], loss: Loss
) -> list[StageGraphs]:
    """Return the graphs of the pieces of a cut model (`trace_stages`)."""
    model = pieces[0].cut.model
    crossings = list_crossings(pieces)
    x, y = example
    value: Any = map_tensors(lambda t: t.detach().clone(), sort_keys(x))
    graphs = []
    with restore_all(model), restore_function(loss):
        set_mode(model, True)
        for s, piece in enumerate(pieces):
            is_last = s == len(pieces) - 1
            entering = [spec.differentiable for spec in crossings[s - 1].tensors] if s else None
            stage = _Stage(piece, entering, value, y if is_last else None, loss)
            output, masks = stage.observe()
            try:
                graphs.append(stage.trace(masks))
            except BadInput:
                raise
            # torch's tracer may raise anything on a user's model
            except Exception as error:
                raise BadInput(
                    f"model: stage {s} cannot be traced into a graph: {summarize(error)}"
                ) from error
            value = map_tensors(torch.Tensor.detach, output)
    return graphs


class _Stage:
    """A piece with a microbatch, to be traced. `entering`: which of its inputs are differentiable,
    None for the batch itself.
    """

    def __init__(
        self, piece: Piece, entering: Sequence[bool] | None, value: Any, y: Any, loss: Loss
    ) -> None:
        model = piece.cut.model
        self.piece = piece
        self.loss = loss
        self.has_loss = y is not None
        self.value_leaves, self.value_spec = tree_flatten(value)
        self.label_leaves, self.label_spec = tree_flatten(y)
        self.inputs = [t for t in self.value_leaves if isinstance(t, torch.Tensor)]
        self.labels = [t for t in self.label_leaves if isinstance(t, torch.Tensor)]
        self.entering = list(entering) if entering is not None else [False] * len(self.inputs)
        names = {id(t): name for name, t in reversed([*model.named_buffers()])}
        names.update({id(t): name for name, t in reversed([*model.named_parameters()])})
        tensors = {id(t): t for t in piece.list_tensors()}
        self.weights = {names[i]: t for i, t in tensors.items() if t.requires_grad}
        self.state = {names[i]: t for i, t in tensors.items() if not t.requires_grad}
        self.dropouts = {
            name: module
            for name, module in model.named_modules()
            if type(module) in DROPOUTS and any(module is m for m in piece.modules())
        }
        tables = {id(table): table for m in piece.modules() for table in _list_tables(m)}
        # every place that holds one of the tensors, tied ones too
        self._places = [
            (table, key, names[id(t)])
            for table in tables.values()
            for key, t in table.items()
            if t is not None
        ]

    # ---- one run of the piece

    def observe(self) -> tuple[Any, list[Mask]]:
        """Run the piece once; return its output and the masks that its dropout modules draw."""
        masks: list[Mask] = []

        def drop(name: str, x: torch.Tensor) -> torch.Tensor:
            call = self.piece.calls_before.get(name, 0) + sum(m.module == name for m in masks)
            masks.append(Mask(name, call, tuple(x.shape), x.stride(), x.dtype))
            return x.clone()

        with self._replace_dropouts(drop), torch.enable_grad():
            value = tree_unflatten(self.value_leaves, self.value_spec)
            return self.piece(map_tensors(torch.clone, value)), masks

    @contextlib.contextmanager
    def _replace_dropouts(
        self, drop: Callable[[str, torch.Tensor], torch.Tensor]
    ) -> Iterator[None]:
        """Call `drop(name, x)` in place of the forward of each dropout module in training."""
        active = {n: m for n, m in self.dropouts.items() if m.training and m.p}
        try:
            for name, module in active.items():
                module.forward = lambda x, name=name: drop(name, x)
            yield
        finally:
            for module in active.values():
                del module.forward

    @contextlib.contextmanager
    def _swap_tensors(self, tensors: dict[str, torch.Tensor]) -> Iterator[None]:
        """Let the piece's modules hold other tensors inside the context, which are put into
        `tensors` again at its end, because a forward may assign a buffer.
        """
        originals = [table[key] for table, key, _ in self._places]
        try:
            for table, key, name in self._places:
                table[key] = tensors[name]
            yield
            for table, key, name in self._places:
                tensors[name] = table[key]
        finally:
            for (table, key, _), original in zip(self._places, originals):
                table[key] = original

    @contextlib.contextmanager
    def _name_modules(self) -> Iterator[None]:
        """Write the name of the innermost running module into the meta of the nodes it makes."""
        stack: list[str] = []

        def begin(name: str) -> Callable[..., None]:
            def push(*_: Any) -> None:
                stack.append(name)
                traceback.current_meta[_MODULES] = {name}

            return push

        def end(*_: Any) -> None:
            stack.pop()
            traceback.current_meta[_MODULES] = set(stack[-1:])

        handles = []
        inside = {id(m) for m in self.piece.modules()}
        for name, module in self.piece.cut.model.named_modules():
            if id(module) in inside:
                handles.append(module.register_forward_pre_hook(begin(name)))
                handles.append(module.register_forward_hook(end))
        try:
            with traceback.preserve_node_meta():
                yield
        finally:
            for handle in handles:
                handle.remove()

    # ---- the joint graph and its cut

    def trace(self, masks: Sequence[Mask]) -> StageGraphs:
        """Return the graphs of the piece's passes."""
        counts_labels = False
        gradients: tuple[int, ...] = ()
        groups = [
            len(self.weights),
            len(self.state),
            len(masks),
            len(self.inputs),
            len(self.labels),
        ]

        def run(*flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
            nonlocal counts_labels, gradients
            weights, state, given_masks, inputs, labels = _split(flat, groups)
            unused_masks = list(given_masks)
            tensors = dict(zip(self.weights, weights))
            # a forward may change them in place, and arguments may not be changed
            tensors.update({name: t.clone() for name, t in zip(self.state, state)})
            value = _fill(self.value_leaves, self.value_spec, [t.clone() for t in inputs])
            # the loss may read weights of the stage too
            with self._swap_tensors(tensors):
                with self._replace_dropouts(lambda name, x: x * unused_masks.pop(0)):
                    output = self.piece(value)
                if self.has_loss:
                    y = _fill(self.label_leaves, self.label_spec, labels)
                    loss = call_loss(self.loss, output, y)
                    counts = count_right(take_scores(self.loss, output), y)
                    counts_labels = counts is not None
                    output = (loss, counts) if counts_labels else (loss,)
            leaves = [t for t in tree_flatten(output)[0] if isinstance(t, torch.Tensor)]
            gradients = tuple(i for i, t in enumerate(leaves) if t.requires_grad)
            # an output may be an input, which the tracer refuses
            return (
                *(t.clone() for t in leaves),
                *(tensors[name].detach().clone() for name in self.state),
            )

        mask_tensors = [
            torch.empty_strided(m.shape, m.stride, dtype=m.dtype).fill_(1) for m in masks
        ]
        requires = [True] * groups[0] + [False] * (groups[1] + groups[2])
        requires += self.entering + [False] * groups[4]
        flat = [*self.weights.values(), *self.state.values(), *mask_tensors]
        flat += [*self.inputs, *self.labels]
        arguments = [t.detach().clone().requires_grad_(r) for t, r in zip(flat, requires)]
        with self._name_modules():
            joint = _trace_joint(run, arguments)
        _refuse_draws(joint, self.piece.stage)
        passes = _Passes(joint, groups, requires)
        return StageGraphs(
            passes.extract_forward(),
            passes.extract_backward(),
            *passes.split_backward(),
            weights=tuple(self.weights),
            state=tuple(self.state),
            masks=tuple(masks),
            inputs=groups[3],
            labels=groups[4],
            outputs=len(passes.outputs) - groups[1],
            gradients=gradients,
            differentiable=tuple(i for i, d in enumerate(self.entering) if d),
            saved=tuple(node.meta["val"] for node in passes.saved),
            kept=tuple(node.meta["val"] for node in passes.kept),
            counts_labels=counts_labels,
        )


def _list_tables(module: nn.Module) -> list[dict[str, Any]]:
    return [module._parameters, module._buffers]


def _split(values: Sequence[Any], sizes: Sequence[int]) -> list[Sequence[Any]]:
    """Split a sequence into consecutive parts."""
    parts = []
    first = 0
    for size in sizes:
        parts.append(values[first : first + size])
        first += size
    return parts


def _fill(leaves: Sequence[Any], spec: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """Return the nest with other tensors in place of its own."""
    rest = iter(tensors)
    return tree_unflatten(
        [next(rest) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], spec
    )


def _trace_joint(run: Callable[..., Any], arguments: list[torch.Tensor]) -> Any:
    """Trace a function and its gradients into one graph of core ATen operations."""
    # a private part of torch, which the IPUs' torch 2.0.1 does not have
    from torch._functorch.aot_autograd import aot_export_joint_simple

    needs_gradient = any(t.requires_grad for t in arguments)
    with _write_out_attention():
        joint: Any = aot_export_joint_simple(
            run, tuple(arguments), trace_joint=needs_gradient, decompositions=_list_decompositions()
        )
    _separate_weight_gradients(joint.graph)
    joint.graph.eliminate_dead_code()
    return joint


def _write_out_attention() -> contextlib.AbstractContextManager[None]:
    """Return a context in which torch's attention is traced as plain operations, not as a call of
    the CPU's fused kernel, which no compiler has. Torch before 2.3 has no such context.
    """
    try:
        from torch.nn.attention import SDPBackend, sdpa_kernel
    except ImportError:
        return contextlib.nullcontext()
    return sdpa_kernel(SDPBackend.MATH)


def _list_decompositions() -> dict[Any, Any]:
    from torch._decomp import core_aten_decompositions, get_decompositions

    table = dict(core_aten_decompositions())
    further = [
        aten.native_batch_norm_backward,
        aten.native_group_norm_backward,
        aten.native_layer_norm_backward,
        aten._native_batch_norm_legit_functional,
        aten.native_batch_norm,
        aten._native_batch_norm_legit,
        aten.native_group_norm,
        aten.native_layer_norm,
        aten.addmm,
        aten.baddbmm,
        aten.gelu,
        aten.gelu_backward,
        aten.threshold_backward,
        aten.nll_loss_forward,
        aten.nll_loss_backward,
        aten._log_softmax,
        aten._log_softmax_backward_data,
        aten._softmax,
        aten._softmax_backward_data,
        aten.embedding_dense_backward,
        aten.t,
        aten.rsub,
        aten.silu,
        aten.silu_backward,
        aten._unsafe_index_put,
        aten.masked_fill,
    ]
    table.update(get_decompositions(further))
    return table


def _separate_weight_gradients(graph: fx.Graph) -> None:
    """Let a convolution's backward compute the gradients of input and weight in two operations.

    The weight's gradient needs the weight's shape alone, so its operation gets zeros in place of
    it.
    """
    for node in list(graph.nodes):
        if node.target is not aten.convolution_backward.default:
            continue
        gradient, x, weight, *settings, mask = node.args
        with graph.inserting_before(node):
            of_input = graph.call_function(
                node.target, (gradient, x, weight, *settings, [mask[0], False, False])
            )
            value = weight.meta["val"]
            zeros = graph.call_function(
                aten.full.default, (list(value.shape), 0), {"dtype": value.dtype}
            )
            zeros.meta = dict(weight.meta)
            of_weight = graph.call_function(
                node.target, (gradient, x, zeros, *settings, [False, *mask[1:]])
            )
            of_input.meta = dict(node.meta)
            of_weight.meta = dict(node.meta)
        for user in list(node.users):
            user.replace_input_with(node, of_weight if user.args[1] else of_input)
        graph.erase_node(node)


def find_module(node: fx.Node) -> str:
    """Return the name of the module whose forward made a node, or for a backward the module whose
    tensors it reads.
    """
    unvisited = [node]
    seen = {node}
    for candidate in unvisited:
        names = set(candidate.meta.get(_MODULES, ())) - {""}
        if names:
            return str(names.pop())
        inputs = [i for i in reversed(candidate.all_input_nodes) if i not in seen]
        unvisited += inputs
        seen.update(inputs)
    return "the model itself"


def _refuse_draws(joint: fx.GraphModule, stage: int) -> None:
    """Raise `BadInput` if an operation draws random numbers, which a graph would draw once for
    all.
    """
    names = {
        f"{find_module(node)} ({node.target})"
        for node in joint.graph.nodes
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    }
    if names:
        raise BadInput(
            f"model: stage {stage}: {list_some(sorted(names))} draws random numbers in a graph: "
            "use nn.Dropout modules"
        )


class _Passes:
    """The cut of a joint graph into passes. `groups`: the number of weights, state, masks, inputs
    and labels among its arguments; `requires`: which arguments get a gradient.
    """

    def __init__(self, joint: fx.GraphModule, groups: Sequence[int], requires: list[bool]) -> None:
        self._joint = joint
        self._order = {node: i for i, node in enumerate(joint.graph.nodes)}
        places = [node for node in joint.graph.nodes if node.op == "placeholder"]
        count = sum(groups)
        self._arguments = places[:count]
        self._weights = places[: groups[0]]
        self._tangents = places[count:]
        results = list(joint.graph.nodes)[-1].args[0]
        outputs = len(results) - (count if any(requires) else 0)
        self.outputs = list(results[:outputs])
        by_argument = list(results[outputs:]) or [None] * count
        self.weight_gradients = by_argument[: groups[0]]
        first = sum(groups[:3])
        self.input_gradients = [
            by_argument[first + i] for i in range(groups[3]) if requires[first + i]
        ]
        self._weight_views = self._list_weight_views()
        self.saved = self._find_saved()
        self.kept: list[fx.Node] = []

    def _list_weight_views(self) -> set[fx.Node]:
        """Return the weights, and the views that depend on nothing else."""
        views = set(self._weights)
        for node in self._joint.graph.nodes:
            inputs = node.all_input_nodes
            if node.target in _VIEWS and inputs and all(i in views for i in inputs):
                views.add(node)
        return views

    def _find_saved(self) -> list[fx.Node]:
        """Return the tensors that a backward needs of its forward: of those that the forward's
        outputs need, no matter what depends on the gradients, the last ones.
        """
        needed = _add_elements(_list_ancestors(self.outputs))
        saved: set[fx.Node] = set()
        seen: set[fx.Node] = set()
        unvisited = _list_nodes([*self.weight_gradients, *self.input_gradients])
        while unvisited:
            node = unvisited.pop()
            if node in seen:
                continue
            seen.add(node)
            if node in self._weights or node in self._tangents:
                continue
            is_constant = node.op != "placeholder" and not _list_ancestors([node]) & set(
                self._arguments
            )
            if node.op == "placeholder" or (
                node in needed and node not in self._weight_views and not is_constant
            ):
                saved.add(node)
            else:
                unvisited += node.all_input_nodes
        return sorted(saved, key=self._order.__getitem__)

    def extract_forward(self) -> fx.GraphModule:
        """Return the graph of the forward."""
        return self._extract(self._arguments, [*self.outputs, *self.saved])

    def extract_backward(self) -> fx.GraphModule:
        """Return the graph of the backward."""
        return self._extract(
            [*self._weights, *self.saved, *self._tangents],
            [*self.weight_gradients, *self.input_gradients],
        )

    def split_backward(self) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Return the graphs of the input gradient and of the weight gradient, which reads no
        weights.

        What reads a weight, and what that needs, belongs to the input gradient.
        """
        ends = {*self._weights, *self.saved, *self._tangents}
        in_backward = _list_ancestors([*self.weight_gradients, *self.input_gradients], stop=ends)
        readers = [
            node
            for node in in_backward - ends
            if any(i in self._weights for i in node.all_input_nodes)
        ]
        early = _list_ancestors([*self.input_gradients, *readers], stop=ends) | ends
        early = _add_elements(early)
        gradients = _list_nodes(self.weight_gradients)
        late = _list_ancestors(gradients, stop=early) - early
        needed = {i for node in late for i in node.all_input_nodes if i in early}
        needed |= {node for node in gradients if node in early}
        self.kept = sorted(needed, key=self._order.__getitem__)
        of_input = self._extract(
            [*self._weights, *self.saved, *self._tangents], [*self.input_gradients, *self.kept]
        )
        return of_input, self._extract(self.kept, self.weight_gradients)

    def _extract(self, arguments: Sequence[fx.Node], results: Sequence[Any]) -> fx.GraphModule:
        """Return the part of the joint graph that computes `results` from `arguments`."""
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        for node in arguments:
            copies[node] = graph.placeholder(node.name)
            copies[node].meta = dict(node.meta)
        needed = _list_ancestors(results, stop=set(arguments))
        for node in self._joint.graph.nodes:
            if node in needed and node not in copies:
                copies[node] = graph.node_copy(node, copies.__getitem__)
        graph.output([copies[r] if isinstance(r, fx.Node) else None for r in results])
        return fx.GraphModule(self._joint, graph)


def _list_nodes(results: Iterable[Any]) -> list[fx.Node]:
    return [result for result in results if isinstance(result, fx.Node)]


def _add_elements(nodes: set[fx.Node]) -> set[fx.Node]:
    """Add the elements of the nodes that return several tensors, of which none may be stored."""
    users = {user for node in nodes for user in node.users}
    return nodes | {user for user in users if user.target is operator.getitem}


def _list_ancestors(
    results: Iterable[Any], stop: AbstractSet[fx.Node] = frozenset()
) -> set[fx.Node]:
    """Return the nodes that `results` need, themselves included, not beyond the nodes `stop`."""
    ancestors: set[fx.Node] = set()
    unvisited = _list_nodes(results)
    while unvisited:
        node = unvisited.pop()
        if node not in ancestors:
            ancestors.add(node)
            if node not in stop:
                unvisited += node.all_input_nodes
    return ancestors
