"""A model cut into pieces that run one after another, for backends that put stages on devices of their own.

A piece is a run of *links*. Of an nn.Sequential they are its children, nn.Sequential children unfolded into theirs:

    conv1  bn1  relu  layer1.0  layer1.1 | layer2.0  layer2.1  ... | avgpool  flatten  fc
    piece 0                                piece 1                   piece 2

Any other model's forward is traced (torch.fx), its children being the links and what lies between them (additions,
reshapes) belonging to the link before. What a later piece needs of an earlier one is handed on by the pieces between:

    encoder1 -> encoder2 -> | decoder1(x, memory) | decoder2(x, memory)      crosses: (x, memory) each time

so a piece takes and gives one value: a tensor, or a nest of tensors. Modules keep their names.
"""

from __future__ import annotations

import bisect
import contextlib
import inspect
import math
import operator
from dataclasses import dataclass
from typing import Any, Dict, Iterator, List, Mapping, Sequence, Set, Tuple

import numpy as np
import torch
from torch import fx, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from ipu_pipe.errors import BadInput, first_line
from ipu_pipe.model.autocast import casting
from ipu_pipe.model.balance import balance
from ipu_pipe.model.buffers import buffers_restored
from ipu_pipe.model.modes import modes_restored
from ipu_pipe.model.stages import Extent, Partition, extents


@dataclass(frozen=True)
class Shape:
    """A tensor that crosses a cut: shape, dtype, and whether a gradient comes back for it."""

    shape: Tuple[int, ...]
    dtype: torch.dtype
    differentiable: bool

    @property
    def bytes(self) -> int:
        """Of one message."""
        return math.prod(self.shape) * torch.empty((), dtype=self.dtype).element_size()


@dataclass(frozen=True)
class Crossing:
    """What one piece hands to the next: the tensors, and how they are nested."""

    tensors: Tuple[Shape, ...]
    structure: Any

    def flatten(self, value: Any) -> List[torch.Tensor]:
        """The tensors of a value that crosses."""
        return list(tree_flatten(value)[0])

    def unflatten(self, tensors: Sequence[torch.Tensor]) -> Any:
        """The value that was flattened into `tensors`."""
        return tree_unflatten(list(tensors), self.structure)


# ---- the recorded forward


class _Tracer(fx.Tracer):
    """Records a model's forward; what is no nn.Sequential is a leaf. Branches and loops over sizes are followed as `x` has
    them; one that depends on a tensor's values cannot be recorded."""

    def __init__(self, model: nn.Module, x: torch.Tensor) -> None:
        super().__init__()
        self._model = model
        self._values: Dict[Any, Any] = {_INPUT: x}

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return type(m).forward is not nn.Sequential.forward

    def _value(self, node: fx.Node) -> Any:
        """What the forward of `x` has at this node."""
        if node not in self._values:
            for needed in node.all_input_nodes:
                self._value(needed)
            with _as_usual():
                self._values[node] = _run_node(self._model, node, self._values)
        return self._values[node]

    def to_bool(self, obj: fx.Proxy) -> bool:
        value = self._value(obj.node)
        if isinstance(value, torch.Tensor):
            raise BadInput(f"a branch depends on values of the tensor {obj.node.name}")
        return bool(value)

    def iter(self, obj: fx.Proxy) -> Iterator[Any]:
        value = self._value(obj.node)
        if isinstance(value, (tuple, list)):
            return iter([obj[i] for i in range(len(value))])  # type: ignore[index]
        return super().iter(obj)


_INPUT = "input"
_CALL, _GET = nn.Module.__call__, nn.Module.__getattr__


@contextlib.contextmanager
def _as_usual() -> Iterator[None]:
    """Modules run, inside of a recording that has every call of one recorded instead."""
    held = nn.Module.__call__, nn.Module.__getattr__
    nn.Module.__call__, nn.Module.__getattr__ = _CALL, _GET  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.__call__, nn.Module.__getattr__ = held  # type: ignore[method-assign]


def _run_node(model: nn.Module, node: fx.Node, values: Mapping[Any, Any]) -> Any:
    """The value of a node from those of the nodes it needs; the model's input is values["input"]."""
    args, keywords = fx.map_arg((node.args, node.kwargs), lambda n: values[n])
    if node.op == "call_module":
        return model.get_submodule(str(node.target))(*args, **keywords)
    if node.op == "call_function":
        return node.target(*args, **keywords)  # type: ignore[operator]
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **keywords)
    if CONSTANT in node.meta:
        return node.meta[CONSTANT]
    if node.op == "get_attr":
        owner, _, name = str(node.target).rpartition(".")
        return getattr(model.get_submodule(owner), name)
    assert node.op == "placeholder", node.op
    return args[0] if args else values[_INPUT]  # an argument that is left out has its default


CONSTANT = "ipu_pipe_constant"  # a tensor made in the forward, of nothing that it is given


def _recorded(model: nn.Module, x: torch.Tensor, left_out: Dict[str, Any]) -> fx.Graph:
    """One recording. Constants, which it puts on the model as attributes, go with their nodes."""
    before = set(vars(model))
    try:
        graph = _Tracer(model, x).trace(model, left_out)
        for node in graph.nodes:
            if node.op == "get_attr" and node.target in vars(model) and node.target not in before:
                node.meta[CONSTANT] = vars(model)[str(node.target)]
        return graph
    finally:
        for name in set(vars(model)) - before:
            delattr(model, name)


def _trace(model: nn.Module, x: torch.Tensor) -> fx.Graph:
    """The model's forward as nodes, the same in training and in evaluation. Raises BadInput."""
    defaults = list(inspect.signature(model.forward).parameters.values())[1:]
    left_out = {p.name: p.default for p in defaults if p.default is not p.empty}
    devices = [x.device] if x.is_cuda else []
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=devices), buffers_restored(model), modes_restored(model):
            found = [_recorded(model.train(mode), x, dict(left_out)) for mode in (True, False)]
            if str(found[0]) != str(found[1]):
                raise BadInput(
                    "it differs between training and evaluation outside its modules (use nn.Dropout and the like)"
                )
    except Exception as error:  # whatever fx cannot record
        said = str(error) if isinstance(error, BadInput) else first_line(error)
        raise BadInput(
            f"model: {type(model).__name__}: a backend that runs stages on devices of their own records the model's forward: "
            f"{said}: make the model an nn.Sequential, or use backend: {{name: emulator}}"
        ) from error
    return found[0]


def links_of(model: nn.Module, x: torch.Tensor) -> List[Tuple[str, nn.Module]]:
    """(name, module) of the model's links in the order in which they run on input `x`. Raises BadInput where its forward
    cannot be recorded."""
    names = [str(node.target) for node in _trace(model, x).nodes if node.op == "call_module"]
    return [(name, model.get_submodule(name)) for name in names]


# ---- where to cut


def cuttable(found: Sequence[Extent]) -> List[int]:
    """The links, by their extents, before which the model may be cut: those with which a stage begins. What begins inside a
    link (a residual block, say), after something of it has run, is left out."""
    reached = np.maximum.accumulate([p.last for p in found])
    return [i for i in range(1, len(found)) if found[i].first > reached[i - 1]]


def merge_stages(model: nn.Module, part: Partition, count: int, x: torch.Tensor) -> List[str]:
    """Names of the modules at which `count` stages begin that are consecutive stages of `part` taken together, the greatest
    sum of FLOPs being least. Empty for one. Raises BadInput where there are not so many cuts."""
    names = [name for name, _ in links_of(model, x)]
    found = extents(model, part, x, names)
    starts = cuttable(found)
    if count > len(starts) + 1:
        inside = len(part) - 1 - len(starts)
        raise BadInput(
            f"stages: {len(part)}: the model can be cut into at most {len(starts) + 1} devices' parts, {count} are asked for"
            + (f": {inside} of its stages begin inside a module of its top-level sequence" if inside > 0 else "")
        )
    edges = [0, *starts, len(names)]
    costs = [sum(p.flops for p in found[a:b]) for a, b in zip(edges, edges[1:])]
    return [names[edges[k]] for k in balance(costs, count)[1:]]


# ---- pieces


class Piece(nn.Module):
    """Nodes of a model's forward that run one after another: from what the pieces before hand on to what those behind need.

    The modules are the model's own; `names` are theirs in it.
    """

    def __init__(self, model: nn.Module, nodes: Sequence[fx.Node], enters: Sequence[fx.Node], leaves: Any) -> None:
        super().__init__()
        self.names = list(dict.fromkeys(str(node.target) for node in nodes if node.op == "call_module"))
        self.links = nn.ModuleList([model.get_submodule(name) for name in self.names])
        self._own = [str(node.target) for node in nodes if node.op == "get_attr" and CONSTANT not in node.meta]
        self._whole = [model]  # in a list: not a child
        # whether its first module overwrites what it is given, which autograd allows of copies only
        self.begins_in_place = False
        self._nodes, self._enters, self._leaves = list(nodes), list(enters), leaves
        self._last_of = _last_uses(self._nodes, self._leaves)

    def forward(self, value: Any) -> Any:
        """What the next piece takes, or the model's output."""
        if self.begins_in_place:
            value = tree_map(lambda t: t.clone() if t.is_floating_point() else t, value)
        with casting(self._whole[0]):
            return self._run(value)

    def _run(self, value: Any) -> Any:
        values: Dict[Any, Any] = {_INPUT: value}
        if self._enters:
            values = dict(zip(self._enters, value if len(self._enters) > 1 else (value,)))
        for node in self._nodes:
            values[node] = _run_node(self._whole[0], node, values)
            for done in self._last_of.get(node, ()):
                del values[done]
        return fx.map_arg(self._leaves, lambda node: _apart(values[node]))

    def state(self) -> Dict[str, torch.Tensor]:
        """The part of the model's state dict that lies here."""
        held = {
            f"{name}.{key}": value
            for name, link in zip(self.names, self.links)
            for key, value in link.state_dict().items()
        }
        whole = self._whole[0].state_dict() if self._own else {}
        return {**held, **{name: whole[name] for name in self._own if name in whole}}

    def own_weights(self) -> List[str]:
        """Weights of the model itself, of no module of it, that are used here and train."""
        own = {id(p) for p in self._whole[0].parameters(recurse=False) if p.requires_grad}
        return [name for name in self._own if id(operator.attrgetter(name)(self._whole[0])) in own]

    def weights_handed_on(self) -> List[str]:
        """Weights of the model itself that a later piece uses."""
        own = {id(p): name for name, p in self._whole[0].named_parameters() if p.requires_grad}
        used: List[fx.Node] = []
        fx.map_arg(self._leaves, used.append)
        gotten = [_run_node(self._whole[0], node, {}) for node in used if node.op == "get_attr"]
        return [own[id(p)] for p in gotten if id(p) in own]

    def tensors(self) -> List[torch.Tensor]:
        """Its parameters and buffers."""
        own = [operator.attrgetter(name)(self._whole[0]) for name in self._own]
        return [*self.parameters(), *self.buffers(), *own]


def _last_uses(nodes: Sequence[fx.Node], leaves: Any) -> Dict[fx.Node, List[fx.Node]]:
    """Node -> those whose values no later one of `nodes` needs."""
    needed: Set[fx.Node] = set()
    fx.map_arg(leaves, needed.add)
    last: Dict[fx.Node, List[fx.Node]] = {}
    for node in reversed(nodes):
        last[node] = [n for n in dict.fromkeys([node, *node.all_input_nodes]) if n not in needed]
        needed.update(last[node])
    return last


def writes_over(part: nn.Module, value: Any) -> bool:
    """Whether the first thing that a module does is to overwrite what it is given."""
    leaves = tree_map(lambda t: t.detach().clone().requires_grad_(t.is_floating_point()), value)
    try:
        part(leaves)
    except RuntimeError as error:
        return "leaf Variable that requires grad" in str(error)
    return False


def _apart(value: Any) -> Any:
    """A weight that is handed on: a copy, since it may be updated before it is through."""
    return value.clone() if isinstance(value, nn.Parameter) else value


def pieces(model: nn.Module, begins: Sequence[str], x: torch.Tensor) -> List[Piece]:
    """The model, which takes `x`, cut before each of `begins`, names of links or of nn.Sequentials around them."""
    nodes = list(_trace(model, x).nodes)
    called = [(i, f"{node.target}.") for i, node in enumerate(nodes) if node.op == "call_module"]
    starts = [next(i for i, name in called if name.startswith(f"{begin}.")) for begin in begins]
    place = {node: 0 if node.op == "get_attr" else bisect.bisect_right(starts, i) for i, node in enumerate(nodes)}
    nodes.sort(key=lambda node: node.op != "get_attr")  # weights of the model itself lie on stage 0
    crossing = [
        [n for n in nodes if place[n] <= cut and any(place[user] > cut for user in n.users)]
        for cut in range(len(begins))
    ]
    made = []
    for number in range(len(begins) + 1):
        own = [node for node in nodes if place[node] == number and node.op != "output"]
        enters = crossing[number - 1] if number else []
        leaves: Any = next(node for node in nodes if node.op == "output").args[0]
        if number < len(begins):
            leaves = crossing[number][0] if len(crossing[number]) == 1 else tuple(crossing[number])
        made.append(Piece(model, own, enters, leaves))
    return made


def crossings(parts: Sequence[Piece], model: nn.Module, x: torch.Tensor) -> List[Crossing]:
    """What crosses each cut, seen in one forward of the microbatch `x`; it also finds out which pieces begin in place."""
    seen: List[Crossing] = []
    value: Any = x
    with buffers_restored(model), modes_restored(model):
        model.eval()
        for part in parts:
            part.begins_in_place = part is not parts[0] and writes_over(part, value)
            with torch.no_grad():
                value = part(value)
            if part is parts[-1]:
                break
            tensors, structure = tree_flatten(value)
            others = [type(t).__name__ for t in tensors if not isinstance(t, torch.Tensor)]
            if others:
                raise BadInput(
                    f"model: a {others[0]} would cross between devices after {part.names[-1]}: must be tensors"
                )
            shapes = tuple(Shape(tuple(t.shape), t.dtype, t.is_floating_point()) for t in tensors)
            seen.append(Crossing(shapes, structure))
    return seen
