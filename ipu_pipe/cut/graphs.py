"""Trace the passes of a stage into pure functions, graphs of ATen operations, that any compiler can
run.

torch's own autograd is traced once per stage into one *joint* graph. It is cut into the passes by
what each of them needs:

    forward           weights, state, masks, inputs, labels  -> outputs, new state, saved tensors
    backward          weights, saved tensors, gradients      -> weight gradients, input gradients
    input gradient    weights, saved tensors, gradients      -> input gradients, tensors kept for W
    weight gradient   kept tensors                           -> weight gradients

The weights are arguments of every pass that reads them, so a backward may read another version than
its forward did. So is every other tensor that a module or the loss keeps: buffers, class weights, a
mask in an attribute are *state*, of which a forward returns the new values. Tensors that a forward
makes of Python's numbers (positions, causal masks) are constants of the graph. A tensor that is
neither is refused, because nobody would see that it has changed.

The cut decides what a backward then computes. An operation belongs to the forward only if the
forward's *outputs* need it. Cut by "does it depend on the incoming gradient", the
product `scale * rstd` of a norm's backward would move into the forward and read the forward's
scale, where autograd reads the scale of the backward: methods whose backward reads newer weights
would be wrong by 1e-5, all others exact.
"""

from __future__ import annotations

import contextlib
import operator
from dataclasses import dataclass
from functools import lru_cache
from typing import AbstractSet, Any, Callable, Collection, Iterable, Iterator, NamedTuple, Sequence

import torch
from torch import fx, nn
from torch.fx import traceback
from torch.nn import functional as F
from torch.utils._pytree import tree_flatten, tree_unflatten

from ipu_pipe.cut.cutting import Piece, cut_model, list_crossings
from ipu_pipe.errors import BadInput, summarize
from ipu_pipe.model.batch import count_bytes, list_tensors, map_tensors, sort_keys
from ipu_pipe.model.frames import find_running_line, find_user_frame
from ipu_pipe.model.loss import Loss, call_loss, count_right, take_scores
from ipu_pipe.model.modes import set_mode
from ipu_pipe.model.precision import get_user_loss
from ipu_pipe.model.randomness import derive_seed
from ipu_pipe.model.restoring import restore_all, restore_function
from ipu_pipe.model.values import Source, list_attributes, list_values_of, name_place, walk_tensors
from ipu_pipe.model.watching import FunctionWatch
from ipu_pipe.text import list_some

aten = torch.ops.aten

# the modules whose output is the input times a mask that depends on its shape alone
DROPOUTS: dict[type[nn.Module], Callable[..., torch.Tensor]] = {
    nn.Dropout: F.dropout,
    nn.Dropout1d: F.dropout1d,
    nn.Dropout2d: F.dropout2d,
    nn.Dropout3d: F.dropout3d,
}
# the entry of a node's meta that torch copies from the forward; here {name of the innermost module:
# line of the caller's}
_MODULES = "nn_module_stack"
_KEEP = "keep it in a buffer of a fixed shape"
# a loss, among the names of modules
_LOSS = "the loss"
# what torch's tracer raises where Python reads the values of a tensor
_READS_VALUES = (
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "GuardOnDataDependentSymNode",
)


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
        return DROPOUTS[type(module)](ones, module.p, True)  # True: in training


def draw_masks(
    model: nn.Module, masks: Sequence[Mask], seed: int, microbatch: int
) -> list[torch.Tensor]:
    """Return the masks of a microbatch, those that every backend draws (`KeyedRandomness`)."""
    if not masks:
        return []
    # the masks are drawn on the CPU, so that no GPU's generator has to be saved
    with torch.random.fork_rng(devices=[]):
        return [mask.draw(model.get_submodule(mask.module), seed, microbatch) for mask in masks]


class _Held(NamedTuple):
    """A value that a module or the loss keeps beside the model's weights and buffers. `source`:
    where, None where a forward may not change it (closures, containers); `version`: of a tensor.
    """

    value: Any
    source: Source | None
    version: int | None

    def is_same(self, other: _Held) -> bool:
        """Return whether the other is the same tensor, unwritten, or the same number."""
        if isinstance(self.value, torch.Tensor):
            return self.value is other.value and self.version == other.version
        # a NaN is not equal to itself
        return bool(self.value == other.value) or self.value is other.value


@dataclass(frozen=True)
class StageGraphs:
    """The passes of one stage as functions of tensors; their arguments and results are flat lists.

    `weights`: the names of the trained parameters in the model, in the order of the arguments.
    `state`: buffers, parameters that are not trained, and other tensors that modules or the loss
    keep; `sources`: where the host has them. `masks`: the dropout masks. `inputs`, `labels`: the
    tensors of a microbatch that enter. `outputs`: the tensors that leave; of the last stage the
    loss, and (right, counted) labels if `counts_labels`. `saved`: the tensors that a forward leaves
    to its backward. `gradients`: the outputs whose gradients a backward takes, by index.
    `differentiable`: the inputs whose gradients it returns, `returned` those whose gradients exist.
    `kept`: the tensors that the input gradient leaves to the weight gradient. A gradient that does
    not exist is None.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule
    input_gradient: fx.GraphModule
    weight_gradient: fx.GraphModule
    weights: tuple[str, ...]
    state: tuple[str, ...]
    sources: tuple[Source, ...]
    masks: tuple[Mask, ...]
    inputs: int
    labels: int
    outputs: int
    gradients: tuple[int, ...]
    differentiable: tuple[int, ...]
    returned: frozenset[int]
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
    # a forward may write to its input
    value: Any = map_tensors(lambda t: t.detach().clone(), sort_keys(x))
    stages: list[tuple[_Stage, list[Mask]]] = []
    graphs: list[StageGraphs] = []
    # a loss may count its calls, and this one is none of training
    with restore_all(model), restore_function(loss):
        set_mode(model, True)
        for s, piece in enumerate(pieces):
            is_last = s == len(pieces) - 1
            entering = [spec.differentiable for spec in crossings[s - 1].tensors] if s else None
            stage = _Stage(piece, entering, value, sort_keys(y) if is_last else None, loss)
            with stage.explain_errors():
                output, masks = stage.observe()
            stages.append((stage, masks))
            # each stage has a graph of its own, which does not reach into another's
            value = map_tensors(torch.Tensor.detach, output)
        # the last stage first, which tells what gradients come back to the stage before
        for stage, masks in reversed(stages):
            with stage.explain_errors():
                graphs.insert(0, stage.trace(masks, graphs[0].returned if graphs else None))
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
        names = {id(t): name for name, t in [*model.named_buffers(), *model.named_parameters()]}
        # by id, as the names are
        tensors = {id(t): t for t in piece.list_tensors()}
        self.weights = {names[i]: t for i, t in tensors.items() if t.requires_grad}
        # the running modules, the innermost last
        self._running: list[str] = []
        # whether anything that leaves has a gradient
        self._trains = False
        self.dropouts = {
            name: module
            for name, module in model.named_modules()
            # a subclass may have another forward, whose draws are refused
            if type(module) in DROPOUTS and any(module is m for m in piece.modules())
        }
        tables = {id(t): t for m in piece.modules() for t in (m._parameters, m._buffers)}
        # every place that holds one of the tensors, tied ones too
        self._places: list[tuple[Any, Any, str]] = [
            (table, key, names[id(t)])
            for table in tables.values()
            for key, t in table.items()
            if t is not None
        ]
        self.state = {
            name: Source(table, key)
            for table, key, name in self._places
            if name not in self.weights
        }
        # what a forward keeps that was not there before
        self._new: list[str] = []
        # id of a tensor that no forward changes -> its name and place
        self._constants: dict[int, tuple[str, Source]] = {}

    @contextlib.contextmanager
    def explain_errors(self) -> Iterator[None]:
        """Raise `BadInput` for what torch's tracer raises, with the module and the caller's line."""
        try:
            yield
        except BadInput:
            raise
        # it may raise anything on a user's model
        except Exception as error:
            frame = find_user_frame(error)
            line = "" if frame is None else f", {frame.filename}:{frame.lineno}"
            where = (self._running or ["the model itself"])[-1]
            raise BadInput(
                f"model: stage {self.piece.stage} cannot be traced into a graph: {where}{line}: "
                f"{self._explain(error)}"
            ) from error

    def _explain(self, error: Exception) -> str:
        # by name, because torch defines them in modules that are not public
        if type(error).__name__ in _READS_VALUES:
            return "a graph cannot depend on the values of a tensor (if, item, nonzero)"
        if "functional graph" in str(error) or "fake buffer" in str(error):
            names = f" ({list_some(self._new)})" if self._new else ""
            return f"a tensor that is not a buffer changes from forward to forward{names}: {_KEEP}"
        return summarize(error)

    # ---- one run of the piece

    def observe(self) -> tuple[Any, list[Mask]]:
        """Run the piece once; return its output and the masks that its dropout modules draw."""
        masks: list[Mask] = []
        before = dict(self._list_held())

        def drop(name: str, x: torch.Tensor) -> torch.Tensor:
            call = self.piece.calls_before.get(name, 0) + sum(m.module == name for m in masks)
            masks.append(Mask(name, call, tuple(x.shape), x.stride(), x.dtype))
            return x.clone()

        tensors = [t.clone().requires_grad_(r) for t, r in zip(self.inputs, self.entering)]
        with self._replace_dropouts(drop), torch.enable_grad():
            # a copy, because an argument that has a gradient may not be written
            value = _fill(self.value_leaves, self.value_spec, [t.clone() for t in tensors])
            output = leaving = self.piece(value)
            if self.has_loss:
                y = _fill(self.label_leaves, self.label_spec, [t.clone() for t in self.labels])
                leaving = call_loss(self.loss, output, y)
        self._trains = any(t.requires_grad for t in list_tensors(leaving))
        self._compare_held(before, dict(self._list_held()))
        return output, masks

    def _list_held(self) -> Iterator[tuple[str, _Held]]:
        """Yield by name the tensors and numbers that modules and the loss keep beside the model's
        weights and buffers.
        """
        for module_name, module in self.piece.cut.model.named_modules():
            for name, value, source in list_attributes(module_name, vars(module)):
                yield from _walk_held(name, value, source)
        if self.has_loss:
            for name, value, source in list_values_of(get_user_loss(self.loss)):
                yield from _walk_held(name_place(("loss", name)), value, source)

    def _compare_held(self, before: dict[str, _Held], after: dict[str, _Held]) -> None:
        """Take the tensors that the forward has changed for state, and the others for constants.
        Raise `BadInput` for other changes, which a graph would not make.
        """
        self._new = [name for name in after if name not in before]
        for name, earlier in before.items():
            now = after.get(name)
            if now is not None and earlier.is_same(now):
                if isinstance(earlier.value, torch.Tensor):
                    # a closure or a container has no place that could be assigned
                    source = earlier.source or Source({name: earlier.value}, name)
                    self._constants[id(earlier.value)] = name, source._replace(is_written=False)
            elif now is None or earlier.source is None or not _is_alike(earlier.value, now.value):
                raise BadInput(
                    f"model: stage {self.piece.stage}: {name}: a forward changes it, but a graph "
                    f"would not: {_KEEP}"
                )
            else:
                self.state[name] = earlier.source
                self._places.append((earlier.source.table, earlier.source.key, name))

    @contextlib.contextmanager
    def _replace_dropouts(
        self, drop: Callable[[str, torch.Tensor], torch.Tensor]
    ) -> Iterator[None]:
        """Call `drop(name, x)` in place of the forward of each dropout module in training."""
        active = {n: m for n, m in self.dropouts.items() if m.training and m.p}
        try:
            for name, module in active.items():
                # on the object, where it hides the method of its class until it is deleted
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
        """Write the name of the innermost running module, and the caller's line, into the meta of
        the nodes it makes.
        """

        def begin(name: str) -> Callable[..., None]:
            return lambda *_: self._running.append(name)

        def end(*_: Any) -> None:
            self._running.pop()

        def note(function: Any, args: Any, keywords: Any) -> Any:
            name = self._running[-1] if self._running else ""
            traceback.current_meta[_MODULES] = {name: find_running_line()}
            return function(*args, **keywords)

        handles = []
        inside = {id(m) for m in self.piece.modules()}
        for name, module in self.piece.cut.model.named_modules():
            if id(module) in inside:
                handles.append(module.register_forward_pre_hook(begin(name)))
                handles.append(module.register_forward_hook(end))
        try:
            with traceback.preserve_node_meta(), FunctionWatch(note):
                yield
        finally:
            for handle in handles:
                handle.remove()

    # ---- the joint graph and its cut

    def trace(self, masks: Sequence[Mask], arriving: Collection[int] | None) -> StageGraphs:
        """Return the graphs of the piece's passes. `arriving`: the outputs whose gradients the next
        stage returns, None for the last stage.
        """
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
            # in the order in which the forward asks for them
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
                    # a fault in the loss names it in place of a module
                    self._running.append(_LOSS)
                    y = _fill(self.label_leaves, self.label_spec, labels)
                    loss = call_loss(self.loss, output, y)
                    counts = count_right(take_scores(self.loss, output), y)
                    counts_labels = counts is not None
                    output = (loss, counts) if counts_labels else (loss,)
                    self._running.pop()
            leaves = [t for t in tree_flatten(output)[0] if isinstance(t, torch.Tensor)]
            gradients = tuple(i for i, t in enumerate(leaves) if t.requires_grad)
            # an output may be an input, which the tracer refuses
            return (
                *(t.clone() for t in leaves),
                *(tensors[name].detach().clone() for name in self.state),
            )

        requires = [True] * groups[0] + [False] * (groups[1] + groups[2])
        # labels have no gradient, nor have state and masks
        requires += self.entering + [False] * groups[4]
        # of a stage under no_grad, or whose weights are frozen
        requires = [r and self._trains for r in requires]
        arguments = [
            t.detach().clone().requires_grad_(r)
            for t, r in zip(self._list_arguments(masks), requires)
        ]
        with self._name_modules():
            joint = _trace_joint(run, arguments)
        _refuse_draws(joint, self.piece.stage)
        self._lift_constants(joint, groups, requires)
        absent = [arriving is not None and i not in arriving for i in gradients]
        passes = _Passes(joint, groups, requires, absent)
        differentiable = [i for i, d in enumerate(self.entering) if d]
        return StageGraphs(
            passes.extract_forward(),
            passes.extract_backward(),
            *passes.split_backward(),
            weights=tuple(self.weights),
            state=tuple(self.state),
            sources=tuple(self.state.values()),
            masks=tuple(masks),
            inputs=groups[3],
            labels=groups[4],
            outputs=len(passes.outputs) - groups[1],
            gradients=gradients,
            differentiable=tuple(differentiable),
            returned=frozenset(
                i for i, g in zip(differentiable, passes.input_gradients) if g is not None
            ),
            saved=tuple(node.meta["val"] for node in passes.saved),
            kept=tuple(node.meta["val"] for node in passes.kept),
            counts_labels=counts_labels,
        )

    def _list_arguments(self, masks: Sequence[Mask]) -> list[torch.Tensor]:
        """Return the arguments of a forward: weights, state, masks, inputs and labels."""
        state = [source.value for source in self.state.values()]
        ones = [torch.empty_strided(m.shape, m.stride, dtype=m.dtype).fill_(1) for m in masks]
        return [*self.weights.values(), *state, *ones, *self.inputs, *self.labels]

    def _lift_constants(self, joint: Any, groups: list[int], requires: list[bool]) -> None:
        """Make the caller's tensors that a graph reads arguments: state that stays as it is."""
        places = [node for node in joint.graph.nodes if node.op == "placeholder"]
        first = sum(groups[:2])
        lifted: dict[str, fx.Node] = {}
        for node in [node for node in joint.graph.nodes if node.op == "get_attr"]:
            name = self._find_constant(getattr(joint, node.target), node)
            if name is None:
                continue
            if name not in lifted:
                with joint.graph.inserting_before(places[first]):
                    lifted[name] = joint.graph.placeholder(f"constant_{len(lifted)}")
                lifted[name].meta = dict(node.meta)
            node.replace_all_uses_with(lifted[name])
            joint.graph.erase_node(node)
        *_, end = joint.graph.nodes
        results = list(end.args[0])
        # after the outputs comes a gradient, or None, for each argument
        outputs = len(results) - (sum(groups) if any(requires) else 0)
        if any(requires):
            results[outputs + first : outputs + first] = [None] * len(lifted)
        results[outputs:outputs] = lifted.values()
        end.args = (tuple(results),)
        groups[1] += len(lifted)
        requires[first:first] = [False] * len(lifted)

    def _find_constant(self, tensor: torch.Tensor, node: fx.Node) -> str | None:
        """Return the name of the caller's tensor that a node reads, None for a tensor that the
        forward has made. Raise `BadInput` if it is neither, because a change would not be seen.
        """
        name, source = self._constants.get(id(tensor), ("", None))
        if source is not None:
            self.state[name] = source
            return name
        # what torch.tensor(1.0) in a forward becomes: Python's numbers, which do not change
        is_literal = all(user.target is aten.lift_fresh_copy.default for user in node.users)
        # of the code between modules, which has run when the model was cut
        if is_literal or any(tensor is t for t in self.piece.list_constants()):
            return None
        reader = next(iter(node.users))
        raise BadInput(
            f"model: stage {self.piece.stage}: {describe_node(reader)} reads a tensor of shape "
            f"{tuple(tensor.shape)} that neither the stage's modules nor the loss hold: register it "
            "as a buffer"
        )


def _walk_held(name: str, value: Any, source: Source | None) -> Iterator[tuple[str, _Held]]:
    """Yield a number, or the tensors in a value, by name."""
    if type(value) in (bool, int, float):
        yield name, _Held(value, source, None)
    for inner, tensor in walk_tensors(name, value):
        # tensors of inference mode do not count their versions
        version = None if tensor.is_inference() else tensor._version
        yield inner, _Held(tensor, source if tensor is value else None, version)


def _is_alike(before: Any, now: Any) -> bool:
    """Return whether a tensor has taken the place of one of its shape and type."""
    if not isinstance(before, torch.Tensor) or not isinstance(now, torch.Tensor):
        return False
    return before.shape == now.shape and before.dtype == now.dtype


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
    from torch._subclasses import FakeTensorMode

    needs_gradient = any(t.requires_grad for t in arguments)
    # tensors that are no arguments come into the graph as they are
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes = tuple(mode.from_tensor(t) for t in arguments)
    with _write_out_attention():
        joint: Any = aot_export_joint_simple(
            run, fakes, trace_joint=needs_gradient, decompositions=_list_decompositions()
        )
    _separate_weight_gradients(joint.graph)
    # one half of a convolution's backward may be unused, as of the first layer
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


@lru_cache(maxsize=None)
def _list_decompositions() -> dict[Any, Any]:
    """Return the operations that are traced as others, with the functions that do so; torch looks
    through all operations to list them.
    """
    from torch._decomp import core_aten_decompositions, get_decompositions

    table = dict(core_aten_decompositions())
    further = [
        aten._native_batch_norm_legit_functional,
        aten.native_batch_norm,
        aten._native_batch_norm_legit,
        aten.native_group_norm,
        aten.native_layer_norm,
        aten.addmm,
        aten.gelu,
        aten._log_softmax,
        aten._softmax,
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
            kind = {"dtype": value.dtype, "device": value.device}
            zeros = graph.call_function(aten.full.default, (list(value.shape), 0), kind)
            zeros.meta = dict(weight.meta)
            of_weight = graph.call_function(
                node.target, (gradient, x, zeros, *settings, [False, *mask[1:]])
            )
            of_input.meta = dict(node.meta)
            of_weight.meta = dict(node.meta)
        for user in list(node.users):
            # the users take elements: 0 is the gradient of the input, 1 and 2 those of weight and
            # bias
            user.replace_input_with(node, of_weight if user.args[1] else of_input)
        graph.erase_node(node)


def describe_node(node: fx.Node, fault: str = "") -> str:
    """Return the name of the module whose forward made a node, or for a backward the module whose
    tensors it reads; in brackets its operation, after `fault`, and the caller's line.
    """
    unvisited = [node]
    seen = {node}
    # breadth first: the nearest module is the one to name
    for candidate in unvisited:
        for module, line in candidate.meta.get(_MODULES, {}).items():
            if module:
                at = f" at {line}" if line else ""
                return f"{module} ({fault}{node.target}{at})"
        inputs = [i for i in reversed(candidate.all_input_nodes) if i not in seen]
        unvisited += inputs
        seen.update(inputs)
    return f"the model itself ({fault}{node.target})"


def _refuse_draws(joint: fx.GraphModule, stage: int) -> None:
    """Raise `BadInput` if an operation draws random numbers, which a graph would draw once for
    all.
    """
    names = {
        describe_node(node)
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
    and labels among its arguments; `requires`: which arguments get a gradient; `absent`: which
    gradients of outputs never come, because the next stage does not differentiate them.
    """

    def __init__(
        self,
        joint: fx.GraphModule,
        groups: Sequence[int],
        requires: list[bool],
        absent: Sequence[bool],
    ) -> None:
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
        # a graph without gradients ends with the outputs
        by_argument = list(results[outputs:]) or [None] * count
        # a weight that no gradient reaches has None, as in autograd, not zeros: optimizers skip it
        if any(absent):
            present = [t for t, is_absent in zip(self._tangents, absent) if not is_absent]
            reached = self._list_dependents(present)
            by_argument = [g if g in reached else None for g in by_argument]
        self.weight_gradients = by_argument[: groups[0]]
        first = sum(groups[:3])
        self.input_gradients = [
            by_argument[first + i] for i in range(groups[3]) if requires[first + i]
        ]
        self._weight_views = self._list_weight_views()
        self.saved = self._find_saved()
        self.kept: list[fx.Node] = []

    def _list_dependents(self, sources: Iterable[fx.Node]) -> set[fx.Node]:
        """Return the nodes that depend on one of `sources`, themselves included."""
        dependents = set(sources)
        # a graph lists its nodes after those that they read
        for node in self._joint.graph.nodes:
            if not dependents.isdisjoint(node.all_input_nodes):
                dependents.add(node)
        return dependents

    def _list_weight_views(self) -> set[fx.Node]:
        """Return the weights, and the views that depend on nothing else."""
        views = set(self._weights)
        # nodes come after their inputs, so that one pass finds views of views
        for node in self._joint.graph.nodes:
            inputs = node.all_input_nodes
            if inputs and _is_view(node) and all(i in views for i in inputs):
                views.add(node)
        return views

    def _find_saved(self) -> list[fx.Node]:
        """Return the tensors that a backward needs of its forward: of those that the forward's
        outputs need, no matter what depends on the gradients, the last ones.
        """
        needed = _add_elements(_list_ancestors(self.outputs))
        varying = self._list_dependents(self._arguments)
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
            # what no argument makes is made again, and views of weights, of those that it reads
            if node.op == "placeholder" or (
                node in needed and node not in self._weight_views and node in varying
            ):
                saved.add(node)
            else:
                unvisited += node.all_input_nodes
        # by their place in the graph, because a set of nodes has another order in each process
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
        # an update may come between the halves: the second must not read weights
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
        # a weight gradient that comes out on the way to the input gradient is handed over
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


def _is_view(node: fx.Node) -> bool:
    """Return whether a node's result shares the memory of its argument: autograd, which saves it,
    sees a weight that was overwritten.
    """
    # these two are no views by their signatures
    others = (operator.getitem, aten._unsafe_view.default)
    return node.target in others or getattr(node.target, "is_view", False)


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
