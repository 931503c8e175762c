"""A model cut into pieces that run one after another, for backends that put stages on devices of their own and for blocks with
losses of their own.

A stage may begin wherever a named module first runs, inside of others too. What lies where is seen in one recorded forward
(ipu_pipe.model.recording):

    encoder.layers.0  encoder.layers.1 | encoder.layers.2.mlp  add  encoder.layers.3 | encoder.ln  heads
    piece 0                              piece 1                                       piece 2

A piece takes and gives one value, a tensor or a tuple of them; the first takes the model's input, the last gives its output, and
what skips pieces is handed on by those between. The modules are the model's own, under their names. Python between modules ran
once, while recording: a mode or size of the input that is new is recorded when it comes.
"""

from __future__ import annotations

import copy
from typing import Any, Dict, List, Sequence, Tuple

import torch
from torch import nn
from torch.utils._pytree import tree_map

from ipu_pipe.errors import BadInput
from ipu_pipe.model.autocast import casting
from ipu_pipe.model.execution import answering
from ipu_pipe.model.nests import in_order, named
from ipu_pipe.model.programs import Program
from ipu_pipe.model.recording import ReadsValues, record
from ipu_pipe.model.restoring import attributes_restored, buffers_restored, modes_restored, weights_restored
from ipu_pipe.model.staging import Crossing, Shape, Staged, staged
from ipu_pipe.model.templates import Weight, keys_in, tensors_of

__all__ = ["Crossing", "Cut", "Piece", "Shape", "crossings", "pieces"]

Shapes = Tuple[Tuple[int, ...], ...]


def _shapes(value: Any) -> Shapes:
    return tuple(tuple(t.shape) for t in tensors_of(value))


class Recordings:
    """What was recorded of a model's forward with stages that begin at `begins`, by mode, shapes and dtypes of the input."""

    def __init__(self, model: nn.Module, begins: Sequence[str]) -> None:
        self.model, self.begins = model, list(begins)
        self.homes: Dict[str, int] = {}  # stage in which a module first runs, in the first recording
        self._found: Dict[Any, Staged] = {}
        self._latest: Dict[bool, Staged] = {}  # by mode

    def key(self, x: Any, training: bool) -> Any:
        """Return what tells forwards apart that need recordings of their own."""
        kinds = tuple((name, t is not None and (tuple(t.shape), t.dtype)) for name, t in named(in_order(x)))
        return (training, training or torch.is_grad_enabled(), kinds)

    def of(self, x: Any, training: bool) -> Staged:
        """That of an input like `x`, made where there is none yet."""
        key = self.key(x, training)
        if key not in self._found:
            with attributes_restored(self.model):
                self._found[key] = self.record(x, training)
        self._latest[training] = self._found[key]
        return self._found[key]

    def latest(self, training: bool) -> Staged:
        """The one that was asked for last."""
        return self._latest.get(training) or self._latest[not training]

    def entering(self, stage: int, value: Any, training: bool) -> Staged:
        """The latest of those in which tensors of such shapes enter a stage. Raises BadInput where there is none."""
        shapes = _shapes(value)
        latest = self.latest(training)
        if latest.parts[stage].entering == shapes:
            return latest
        for key, found in reversed(list(self._found.items())):
            if key[0] == training and found.parts[stage].entering == shapes:
                return found
        raise BadInput(
            f"model: {type(self.model).__name__}: stage {stage} is given tensors of shapes {list(shapes)}, and no such forward"
            " was recorded: microbatches must be of one size"
        )

    def record(self, x: Any, training: bool) -> Staged:
        """Record one more forward of `x`. It leaves all but attributes as they were."""
        try:
            made = self._record(x, training, traced=False)
        except ReadsValues:  # where models read values they may leave that out while they are traced
            made = self._record(x, training, traced=True)
        if not self.homes:
            self.homes = dict(made.homes)
        else:
            self._refuse_elsewhere(made)
        return made

    def _record(self, x: Any, training: bool, traced: bool) -> Staged:
        model = self.model
        given = tree_map(lambda t: t.detach().clone() if isinstance(t, torch.Tensor) else t, in_order(x))
        devices = [t.device for t in tensors_of(x)[:1] if t.is_cuda]
        with torch.random.fork_rng(devices=devices), buffers_restored(model), modes_restored(model), weights_restored(model):
            model.train(training)
            with torch.set_grad_enabled(training or torch.is_grad_enabled()):
                found, liveness = record(model, self.begins, given, traced)
                return staged(found, liveness, len(self.begins) + 1, self.homes)

    def _refuse_elsewhere(self, made: Staged) -> None:
        """Modules that run on a stage which does not hold them."""
        held = next(iter(self._found.values())).modules
        for stage, names in enumerate(made.modules):
            for name in names:
                home, module = self.homes[answering(name, self.homes)], self.model.get_submodule(name)
                if (
                    name not in held[stage]
                    and home != stage
                    and any(True for _ in (*module.parameters(), *module.buffers()))
                ):
                    raise BadInput(
                        f"model: {name}: runs on stage {stage}, and lies on stage {home} by the first forward in training: begin"
                        " stages where both agree"
                    )


def recorded_twice(model: nn.Module, begins: Sequence[str], x: Any, then: Any) -> Tuple[Staged, Staged]:
    """The first forward in training, of `x`, and the one after it, of an input of the same shapes: a model that counts its
    forwards, or looks at values, may do something else then."""
    with attributes_restored(model):
        one, other = (Recordings(model, begins).record(given, training=True) for given in (x, then))
    return one, other


class _Owned(nn.Module):
    """The parameters and buffers of a module that is not here as a whole: the same tables, what stands in one stands in the
    other."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._parameters, self._buffers = module._parameters, module._buffers
        self._non_persistent_buffers_set = set(module._non_persistent_buffers_set)


class Cut:
    """A model cut where stages begin."""

    def __init__(self, model: nn.Module, recordings: Recordings, first: Staged) -> None:
        self.model, self.recordings, self.first = model, recordings, first
        self._programs: Dict[Tuple[int, int], Program] = {}
        self.compiles = False  # whether pieces call compiled modules from their next new program on
        self.crossings = list(first.crossings)
        self.gradient_orders: List[List[Tuple[int, ...]]] = []  # by cut and tensor, where the pieces were rehearsed
        self.names = first.modules  # by stage, of the modules that are called
        inside = {id(m) for names in self.names for name in names for m in model.get_submodule(name).modules()}
        self.owners: List[List[str]] = [[] for _ in self.names]  # by stage, of those that own tensors besides
        for name, module in model.named_modules():
            if id(module) not in inside and (module._parameters or module._buffers):
                self.owners[recordings.homes[answering(name, recordings.homes)]].append(name)

    @classmethod
    def of(cls, model: nn.Module, begins: Sequence[str], x: Any) -> Cut:
        """Of a model that takes `x` in training. Raises BadInput."""
        recordings = Recordings(model, begins)
        return cls(model, recordings, recordings.of(x, training=True))

    def on(self, model: nn.Module) -> Cut:
        """The same of a copy of the model, or of as much of it as there is."""
        made = copy.copy(self)
        made.model, made._programs = model, {}
        return made

    def remember_gradients(self, orders: Sequence[Sequence[Tuple[int, ...]]]) -> None:
        """Note the order in which the dimensions of each crossing tensor's gradient lie in memory."""
        self.gradient_orders = [list(own) for own in orders]
        for i, (crossing, own) in enumerate(zip(self.crossings, orders)):
            self.crossings[i] = Crossing(tuple(t.with_gradient_in(order) for t, order in zip(crossing.tensors, own)))

    def compile(self) -> None:
        """Have pieces call modules that torch.compile has compiled, from now on."""
        self.compiles, self._programs = True, {}

    def is_prepared(self, x: Any, training: bool) -> bool:
        """Tell whether a forward like that of `x` has been recorded."""
        return self.recordings.key(x, training) in self.recordings._found

    def prepare(self, x: Any, training: bool) -> List[Crossing]:
        """What crosses each cut for the input `x`. Stages behind the first, which see no input, know by it what enters them."""
        return self.recordings.of(x, training).crossings

    def program(self, stage: int, value: Any, training: bool) -> Program:
        """What a stage does that is given `value`."""
        if torch.jit.is_tracing() or self.model is not self.recordings.model:  # a copy sees microbatches of one size
            found = self.recordings.latest(training)
        elif stage == 0:
            found = self.recordings.of(value, training)
        else:
            found = self.recordings.entering(stage, value, training)
        key = (id(found), stage)
        if key not in self._programs:
            self._programs[key] = Program(self.model, found.parts[stage], found.base, self.compiles)
        return self._programs[key]


class Piece(nn.Module):
    """One stage of a cut model: it takes what the one before gives. `names`: of the modules that it calls, which are the model's
    own, in the order of their first runs."""

    def __init__(self, cut: Cut, stage: int) -> None:
        super().__init__()
        self.cut, self.stage = cut, stage
        self.names = cut.names[stage]
        self.links = nn.ModuleList([cut.model.get_submodule(name) for name in self.names])
        self.owned = nn.ModuleList([_Owned(cut.model.get_submodule(name)) for name in cut.owners[stage]])
        self.copies_input = False  # it is given what others need as it is
        self.calls_before: Dict[str, int] = {}  # how often each module runs in the stages before
        for (earlier, name), count in cut.first.runs.items():
            if earlier < stage:
                self.calls_before[name] = self.calls_before.get(name, 0) + count

    def on(self, model: nn.Module) -> Piece:
        """The same of a copy of its model, or of as much of that as lies here."""
        made = Piece(self.cut.on(model), self.stage)
        made.copies_input = self.copies_input
        return made

    def forward(self, value: Any) -> Any:
        """What the next piece takes, or the model's output."""
        if self.copies_input:
            value = tree_map(lambda t: t.clone() if isinstance(t, torch.Tensor) else t, value)
        value = value if self.stage else in_order(value)
        program = self.cut.program(self.stage, value, self.training)
        with casting(self.cut.model):  # one region, as around the whole: a weight is cast once
            return program.run(value)

    def state(self) -> Dict[str, torch.Tensor]:
        """The part of the model's state dict that lies here."""
        own = {id(t) for t in self.tensors()}
        return {name: t.detach() for name, t in self.cut.model.state_dict(keep_vars=True).items() if id(t) in own}

    def weights(self) -> List[str]:
        """Names of the trained parameters that lie here, each by its first in the model."""
        own = {id(p) for p in self.parameters() if p.requires_grad}
        return [name for name, p in self.cut.model.named_parameters() if id(p) in own]

    def weights_handed_on(self) -> List[str]:
        """Of these, the ones that a later piece is given with the activations."""
        handed = {key.name for key in keys_in(self.cut.first.parts[self.stage].leaves) if isinstance(key, Weight)}
        return [name for name in self.weights() if name in handed]

    def tensors(self) -> List[torch.Tensor]:
        """Its parameters and buffers."""
        return [*self.parameters(), *self.buffers()]


def pieces(model: nn.Module, begins: Sequence[str], x: Any) -> List[Piece]:
    """The model, which takes `x` in training, cut before each of `begins`, names of modules in the order in which they run."""
    cut = Cut.of(model, begins, x)
    return [Piece(cut, stage) for stage in range(len(cut.names))]


def crossings(parts: Sequence[Piece]) -> List[Crossing]:
    """What crosses each cut in training."""
    return parts[0].cut.crossings
