"""Cut a model into pieces that run one after another, for stages on separate devices and for blocks
with losses of their own.

A stage may begin wherever a named module first runs, also inside other modules. One recorded
forward (ipu_pipe.cut.recording) tells which operations belong to which stage:

    encoder.layers.0  encoder.layers.1 | encoder.layers.2.mlp  add  encoder.layers.3 | encoder.ln  heads
    piece 0                              piece 1                                       piece 2

A piece takes and returns one value, a tensor or a tuple of tensors. The first piece takes the
model's input and the last returns its output. Pieces pass on the tensors that skip them. The
modules are the model's own, under their names. Python code between modules runs only during the
recording, so a new mode or a new input size is recorded when it first comes.

    record_forward -> Recording -> split_recording -> StagedRecording -> Program: the steps of one
    stage, run by a Piece

A `Cut` keeps the recordings and programs of all its pieces.
"""

from __future__ import annotations

import contextlib
import copy
from dataclasses import dataclass
from typing import (
    Any,
    Callable,
    Container,
    ContextManager,
    Iterator,
    Mapping,
    MutableMapping,
    NamedTuple,
    Sequence,
)

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from ipu_pipe.cut.crossing import Crossing, TensorSpec, get_memory_order
from ipu_pipe.cut.recording import (
    AutogradState,
    Key,
    ReadsValues,
    RecordedCall,
    Recording,
    Template,
    Value,
    Weight,
    record_forward,
)
from ipu_pipe.errors import BadInput
from ipu_pipe.model.batch import (
    clone_tensors,
    flatten_tensors,
    list_leaves,
    map_tensors,
    sort_keys,
    walk_leaves,
)
from ipu_pipe.model.modes import set_mode
from ipu_pipe.model.observation import find_home, join_name, observe_execution
from ipu_pipe.model.precision import enter_model_autocast, is_cast
from ipu_pipe.model.restoring import restore_all

# ---- a recording, split into stages


@dataclass(frozen=True)
class StageCalls:
    """One stage of a recording.

    `inputs`: the values and weights that it receives; `input_shapes`: their shapes; `copied`: the
    inputs that it overwrites, and so copies first; `output`: the value that it passes on.
    """

    calls: list[RecordedCall]
    inputs: list[Key]
    output: Template
    copied: set[Key]
    input_shapes: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class StagedRecording:
    """A recording that is split into stages.

    `homes`: module -> the stage in which it first runs; `written`: the parameters that the forward
    changes; `runs`: (stage, module) -> number of runs.
    """

    stages: list[StageCalls]
    crossings: list[Crossing]
    homes: Mapping[str, int]
    written: set[str]
    runs: Mapping[tuple[int, str], int]

    @property
    def modules(self) -> list[list[str]]:
        """The modules that each stage calls, in the order of their first runs."""
        return [
            list(dict.fromkeys(c.target for c in stage.calls if isinstance(c.target, str)))
            for stage in self.stages
        ]


def split_recording(
    recording: Recording, count: int, homes: Mapping[str, int], unread: Container[str]
) -> StagedRecording:
    """Split a recording into `count` stages. Raise `BadInput` if a stage uses a weight of a later
    stage.

    `homes`: the stages of modules that ran in an earlier recording, where their weights stay.
    `unread`: the weights of the last stage that no operation of the forward reads.
    """
    # what the first recording has decided stays, whatever runs first in this one
    homes = {**recording.homes, **homes}
    stage_of_call = {call.index: call.stage for call in recording.calls}
    # the stage that makes a value or holds a weight, and the last stage that uses it
    source: dict[Key, int] = {}
    last_use: dict[Key, int] = {}
    uses = [(key, call.stage, call.name) for call in recording.calls for key in call.arguments.keys]
    for key, stage, name in [
        *uses,
        *((key, count - 1, "the output") for key in recording.output.keys),
    ]:
        if isinstance(key, Value):
            source[key] = stage_of_call[key.call]
        else:
            source[key] = find_home(key.name, homes, unread, count - 1)
            # stages hand values and weights to later ones alone
            if source[key] > stage:
                raise BadInput(
                    f"model: {key.name}: {name} uses it on stage {stage}, but it belongs to stage "
                    f"{source[key]}, where its"
                    " module first runs: begin that stage earlier"
                )
        last_use[key] = max(last_use.get(key, 0), stage)

    def get_tensor(key: Key) -> torch.Tensor:
        return recording.tensors[key] if isinstance(key, Value) else recording.weights[key.name]

    # by cut: weights, then values in order
    crossing_keys: list[list[Key]] = []
    for cut in range(count - 1):
        # also what a stage only passes on, such as a skip connection
        keys = [key for key in last_use if source[key] <= cut < last_use[key]]
        crossing_keys.append(
            sorted(
                keys, key=lambda key: (key.call, key.leaf) if isinstance(key, Value) else (-1, 0)
            )
        )
    stages = []
    for s in range(count):
        inputs = crossing_keys[s - 1] if s else []
        copied: set[Key] = {
            key
            for key in inputs
            if isinstance(key, Value) and recording.is_written(recording.tensors[key], s)
        }
        input_shapes = tuple(tuple(get_tensor(key).shape) for key in inputs)
        output = recording.output if s == count - 1 else _make_crossing_template(crossing_keys[s])
        stages.append(
            StageCalls(
                [c for c in recording.calls if c.stage == s], inputs, output, copied, input_shapes
            )
        )
    crossings = [
        Crossing(tuple(_make_spec(get_tensor(key)) for key in keys)) for keys in crossing_keys
    ]
    weights = recording.weights.items()
    written = {
        name
        for name, weight in weights
        if any(recording.is_written(weight, s) for s in range(count))
    }
    return StagedRecording(stages, crossings, recording.homes, written, recording.runs)


def _make_spec(tensor: torch.Tensor) -> TensorSpec:
    return TensorSpec(
        tuple(tensor.shape), tensor.dtype, tensor.requires_grad, get_memory_order(tensor)
    )


def _make_crossing_template(keys: Sequence[Key]) -> Template:
    """Return the template of a crossing value: one tensor, or a tuple."""
    # the leaves of the example only give the nest its form
    return Template(tuple(keys), tree_flatten(0 if len(keys) == 1 else (0,) * len(keys))[1])


class _Step(NamedTuple):
    """A call of a program, whose arguments and results are indices in the program's list of values.

    `arguments`: the last of them have the keywords `names`; `template`: the nest of the arguments,
    None if they are flat; `results`: (leaf of the result, index) for the leaves that are needed;
    `freed`: values that no later step needs.
    """

    function: Callable[..., Any]
    arguments: list[int]
    names: tuple[str, ...]
    template: Template | None
    results: list[tuple[int, int]]
    freed: list[int]


UNCHANGED = AutogradState()


class Program:
    """The steps of one stage of one recording, on a model's modules.

    All arguments and results of its steps have an index in one list of values: constants, weights
    (which are read at each run) and the results of calls. `compiles`: call each module by
    torch.compile. `is_cast`: the model's forward runs under autocast.
    """

    def __init__(self, model: nn.Module, stage: StageCalls, compiles: bool = False) -> None:
        self._model = model
        self.is_cast = is_cast(model)
        self._indices: dict[Key, int] = {}
        # the list of values before a run; None for weights and results
        self._constants: list[Any] = []
        self._weights: list[tuple[int, nn.Module, str]] = []
        self._inputs = [self._add_value(key) for key in stage.inputs]
        self._copied = [self._indices[key] for key in stage.copied]
        # (leaf, index) of the model's input
        self._model_input: list[tuple[int, int]] = []
        last_use: dict[Key, int] = {}
        for call in stage.calls:
            last_use.update(dict.fromkeys(call.arguments.keys, call.index))
        # by call
        needed_results: dict[int, list[Value]] = {}
        for key in {**last_use, **dict.fromkeys(stage.output.keys)}:
            if isinstance(key, Value) and key not in self._indices:
                needed_results.setdefault(key.call, []).append(key)
        for key in stage.output.keys:
            # what leaves the stage is not freed
            last_use.pop(key, None)
        # consecutive steps with the same state
        self._steps: list[tuple[AutogradState, list[_Step]]] = []
        for call in stage.calls:
            results = [
                (key.leaf, self._get_index(key)) for key in needed_results.get(call.index, ())
            ]
            if call.target is None:
                self._model_input = results
                continue
            function = (
                model.get_submodule(call.target) if isinstance(call.target, str) else call.target
            )
            if compiles and isinstance(call.target, str):
                # with the fallback a compiled dropout draws the same numbers as an uncompiled one
                function = torch.compile(function, options={"fallback_random": True})  # type: ignore[arg-type]
            if not self._steps or self._steps[-1][0] != call.state:
                self._steps.append((call.state, []))
            template = call.arguments
            arguments = [self._get_index(leaf) for leaf in template.leaves]
            args, keywords = tree_unflatten(list(range(len(arguments))), template.spec)
            # the usual call has no nests, and need not rebuild any at each run
            is_flat = [*args, *keywords.values()] == list(range(len(arguments)))
            freed = [self._indices[key] for key in template.keys if last_use.get(key) == call.index]
            step = _Step(
                function, arguments, tuple(keywords), None if is_flat else template, results, freed
            )
            self._steps[-1][1].append(step)
        # a weight that crosses is cloned, because it may be updated before it is sent
        self._output = [
            (self._get_index(leaf), isinstance(leaf, Weight)) for leaf in stage.output.leaves
        ]
        self._output_spec = stage.output.spec

    def _add_value(self, leaf: Any) -> int:
        """Return the index of a new value."""
        is_key = isinstance(leaf, (Value, Weight))
        if is_key:
            self._indices[leaf] = len(self._constants)
        self._constants.append(None if is_key else leaf)
        return len(self._constants) - 1

    def _get_index(self, leaf: Any) -> int:
        """Return the index of an argument or a result of a step, a new one if it has none."""
        if isinstance(leaf, (Value, Weight)) and leaf in self._indices:
            return self._indices[leaf]
        if isinstance(leaf, Weight):
            path, _, name = leaf.name.rpartition(".")
            self._weights.append((len(self._constants), self._model.get_submodule(path), name))
        return self._add_value(leaf)

    def run(self, value: Any) -> Any:
        """Run the stage and return the input of the next piece, or the model's output."""
        # a copy, so that no tensor of a run stays in the program
        values = self._constants.copy()
        for index, owner, name in self._weights:
            # read in each run, since a parameter may have been replaced
            values[index] = getattr(owner, name)
        for index, tensor in zip(self._inputs, value if len(self._inputs) > 1 else (value,)):
            values[index] = tensor
        for index in self._copied:
            values[index] = values[index].clone()
        leaves: Sequence[Any] = ()
        if self._model_input:
            leaves = (value,) if isinstance(value, torch.Tensor) else list_leaves(value)
        for leaf, index in self._model_input:
            values[index] = leaves[leaf]
        for state, steps in self._steps:
            with contextlib.nullcontext() if state == UNCHANGED else _enter_state(state):
                for function, arguments, names, template, results, freed in steps:
                    args = [values[index] for index in arguments]
                    if template is not None:
                        args, keywords = tree_unflatten(args, template.spec)
                        result = function(*args, **keywords)
                    elif names:
                        count = len(args) - len(names)
                        result = function(*args[:count], **dict(zip(names, args[count:])))
                    else:
                        result = function(*args)
                    if results:
                        leaves = (
                            (result,) if isinstance(result, torch.Tensor) else list_leaves(result)
                        )
                        for leaf, index in results:
                            values[index] = leaves[leaf]
                    for index in freed:
                        values[index] = None
                # drop the references to the last step's tensors
                args = []
                result = None
                leaves = ()
        output = [
            values[index].clone() if is_weight else values[index]
            for index, is_weight in self._output
        ]
        return tree_unflatten(output, self._output_spec)


def _enter_state(state: AutogradState) -> ContextManager[Any]:
    """Enter the grad mode and the autocast that the recorded forward has set."""
    stack = contextlib.ExitStack()
    if state.grad is not None:
        stack.enter_context(torch.set_grad_enabled(state.grad))
    for device, on, dtype in state.autocast:
        stack.enter_context(torch.autocast(device, dtype=dtype, enabled=on))
    return stack


def _record(
    model: nn.Module,
    begins: Sequence[str],
    x: Any,
    training: bool,
    homes: dict[str, int],
    unread: Container[str],
) -> StagedRecording:
    """Record one more forward of `x` in stages; the model is left as it was."""

    def record(pretends_tracing: bool) -> StagedRecording:
        batch = map_tensors(lambda t: t.detach().clone(), sort_keys(x))
        # in evaluation as the caller has it: `make_key` tells the two apart
        with restore_all(model), torch.set_grad_enabled(training or torch.is_grad_enabled()):
            set_mode(model, training)
            recording = record_forward(model, begins, batch, pretends_tracing)
            return split_recording(recording, len(begins) + 1, homes, unread)

    try:
        return record(pretends_tracing=False)
    # models that branch on values may skip these branches while they are traced
    except ReadsValues:
        return record(pretends_tracing=True)


class _TablePart(MutableMapping[str, Any]):
    """The entries `names` of a module's table of parameters or buffers; reads and writes go
    through to that table, in which tensors may be replaced.
    """

    def __init__(self, table: MutableMapping[str, Any], names: Container[str]) -> None:
        self._table = table
        self._names = names

    def __getitem__(self, name: str) -> Any:
        if name not in self._names:
            raise KeyError(name)
        return self._table[name]

    def __setitem__(self, name: str, tensor: Any) -> None:
        self._table[name] = tensor

    def __delitem__(self, name: str) -> None:
        del self._table[name]

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._table if name in self._names)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class _PartialModule(nn.Module):
    """The parameters and buffers `names` of a module of which only a part runs in a piece."""

    def __init__(self, module: nn.Module, names: Container[str]) -> None:
        super().__init__()
        self._parameters = _TablePart(module._parameters, names)  # type: ignore[assignment]
        self._buffers = _TablePart(module._buffers, names)  # type: ignore[assignment]
        self._non_persistent_buffers_set = set(module._non_persistent_buffers_set)


class Cut:
    """A model that is cut where stages begin, with a recording for each mode and for each set of
    input shapes and dtypes.
    """

    def __init__(self, model: nn.Module, begins: Sequence[str], x: Any) -> None:
        """Cut a model whose input in training is like `x`. Raise `BadInput` if it cannot be cut."""
        self.model = model
        self.begins = list(begins)
        self.recorded_model = model
        # a copy, which lacks modules, gets microbatches of one size only
        self._is_copy = False
        # module -> the stage in which it first runs, in the first recording
        self._homes: dict[str, int] = {}
        self._unread = observe_execution(model, x).unread
        # the most recently used recording is the last
        self._recordings: dict[Any, StagedRecording] = {}
        self._programs: dict[tuple[int, int], Program] = {}
        # whether new programs call compiled modules
        self.compiles = False
        self.first = self._find_recording(x, training=True)
        # the list itself, in which `remember_gradients` puts others in place
        self.crossings = self.first.crossings
        # by stage: the modules that it calls, and the tensors that other modules own
        self.names = self.first.modules
        inside = {
            id(m)
            for names in self.names
            for name in names
            for m in model.get_submodule(name).modules()
        }
        self.owners: list[dict[str, list[str]]] = [{} for _ in self.names]
        for name, module in model.named_modules():
            # a module that a piece calls has its tensors with it
            for tensor in () if id(module) in inside else (*module._parameters, *module._buffers):
                home = self._find_home(join_name(name, tensor))
                self.owners[home].setdefault(name, []).append(tensor)

    def _find_home(self, weight: str) -> int:
        """Return the stage of a parameter or buffer of a module that no piece calls."""
        return find_home(weight, self._homes, self._unread, len(self.begins))

    def copy_to(self, model: nn.Module) -> Cut:
        """Return the same cut of a copy of the model; the copy may lack modules of other stages."""
        # shallow: both have the same recordings, also those that come later
        other = copy.copy(self)
        other.model = model
        other._is_copy = True
        # a program holds the modules of the model for which it was made
        other._programs = {}
        return other

    def record_elsewhere(self, model: nn.Module) -> None:
        """Record other forwards from now on by a copy of the model on the meta device: the model's
        own weights are sharded.
        """
        self.recorded_model = model

    @property
    def is_recorded_elsewhere(self) -> bool:
        """Whether forwards are recorded by a copy of the model: its weights are sharded."""
        return self.recorded_model is not self.model

    def count_runs(self, names: Container[str]) -> dict[tuple[int, str], int]:
        """Return (stage, module) -> number of runs in the latest training forward, for `names`."""
        runs = self.list_latest(training=True)[0].runs
        return {run: count for run, count in runs.items() if run[1] in names}

    def remember_gradients(self, orders: Sequence[Sequence[tuple[int, ...]]]) -> None:
        """Store, for each crossing tensor of the latest training forward, the order of its
        gradient's dimensions in memory.
        """
        crossings = self.list_latest(training=True)[0].crossings
        for i, (crossing, tensor_orders) in enumerate(zip(crossings, orders)):
            crossings[i] = Crossing(
                tuple(
                    t.with_gradient_order(order)
                    for t, order in zip(crossing.tensors, tensor_orders)
                )
            )

    def compile(self) -> None:
        """Make pieces call modules by torch.compile from now on."""
        self.compiles = True
        # those that exist call the modules themselves
        self._programs = {}

    def is_prepared(self, x: Any, training: bool) -> bool:
        """Tell whether a forward like that of `x` has been recorded."""
        return make_key(x, training) in self._recordings

    def prepare(self, x: Any, training: bool) -> list[Crossing]:
        """Record the forward of `x` and return the crossing of each cut.

        Later stages do not see `x`, so only this tells them the shapes that enter them.
        """
        return self._find_recording(x, training).crossings

    def find_program(self, stage: int, value: Any, training: bool) -> Program:
        """Return the program of a stage for the input `value`."""
        if torch.jit.is_tracing() or self._is_copy:
            staged = self.list_latest(training)[0]
        elif stage == 0:
            staged = self._find_recording(value, training)
        else:
            staged = self._find_by_input_shapes(stage, value, training)
        # recordings have no hash; `_recordings` keeps them alive, so that an id is not given again
        key = (id(staged), stage)
        if key not in self._programs:
            self._programs[key] = Program(self.model, staged.stages[stage], self.compiles)
        return self._programs[key]

    def list_latest(self, training: bool) -> list[StagedRecording]:
        """Return all recordings: first those of the mode, and among them the most recently used
        first.
        """
        keys = [*reversed(list(self._recordings))]
        return [self._recordings[key] for key in sorted(keys, key=lambda key: key[0] != training)]

    def _find_recording(self, x: Any, training: bool) -> StagedRecording:
        """Return the recording of an input like `x`; record it if there is none."""
        key = make_key(x, training)
        # taken out and put back, which makes it the last one in the dict
        staged = self._recordings.pop(key, None)
        if staged is None:
            if self.is_recorded_elsewhere:
                # shapes are enough, and the copy has nothing else
                x = map_tensors(lambda t: t.to("meta"), x)
            staged = _record(
                self.recorded_model, self.begins, x, training, self._homes, self._unread
            )
            if self._homes:
                self._require_homes(staged)
            # the first recording decides where weights are, for all later ones
            self._homes = self._homes or dict(staged.homes)
        self._recordings[key] = staged
        return staged

    def _find_by_input_shapes(self, stage: int, value: Any, training: bool) -> StagedRecording:
        """Return the latest recording in which tensors of these shapes enter a stage. Raise
        `BadInput` if there is none.
        """
        shapes = tuple(tuple(t.shape) for t in flatten_tensors(value))
        for recording in self.list_latest(training):
            if recording.stages[stage].input_shapes == shapes:
                return recording
        raise BadInput(
            f"model: {type(self.model).__name__}: stage {stage} gets tensors of shapes "
            f"{list(shapes)}, but no such forward was"
            " recorded: all microbatches must have one size"
        )

    def _require_homes(self, staged: StagedRecording) -> None:
        """Raise BadInput if a module runs on a stage that does not hold it."""
        for stage, (names, names_here) in enumerate(zip(staged.modules, self.names)):
            for name in names:
                module = self.model.get_submodule(name)
                tensors = (*module.named_parameters(name), *module.named_buffers(name))
                others = {self._find_home(tensor) for tensor, _ in tensors} - {stage}
                if name not in names_here and others:
                    raise BadInput(
                        f"model: module {name} belongs to stage {min(others)} (first training forward) "
                        f"but runs on stage {stage}: choose"
                        " boundaries so that one stage calls it"
                    )


def make_key(x: Any, training: bool) -> Any:
    """Return the key of a forward's recording: mode, whether gradients are on, shapes and dtypes of
    the input.
    """
    if isinstance(x, (tuple, list)) and len(x) == 1:
        # a model is called alike with both, and a blocked one does not know which it was
        x = x[0]
    leaves = [("", x)] if isinstance(x, torch.Tensor) else walk_leaves(sort_keys(x))
    # an argument that is None is another forward than one that is a tensor
    kinds = tuple((name, t is not None and (tuple(t.shape), t.dtype)) for name, t in leaves)
    return (training, training or torch.is_grad_enabled(), kinds)


class Piece(nn.Module):
    """One stage of a cut model as a module.

    `names`: the modules of the model that it calls, in the order of their first runs; `called`:
    these modules. `partial`: the modules around them whose own tensors belong to this stage.
    `copies_input`: clone the input, because others need it unchanged. `calls_before`: module -> the
    number of its runs in earlier stages.
    """

    def __init__(self, cut: Cut, stage: int) -> None:
        super().__init__()
        self.cut = cut
        self.stage = stage
        self.names = cut.names[stage]
        self.called = nn.ModuleList([cut.model.get_submodule(name) for name in self.names])
        self.partial = nn.ModuleList(
            [
                _PartialModule(cut.model.get_submodule(name), tensors)
                for name, tensors in cut.owners[stage].items()
            ]
        )
        self.copies_input = False
        self.calls_before: dict[str, int] = {}
        # dropout is keyed by the number of a call in the whole forward, not in the piece
        for (earlier, name), count in cut.first.runs.items():
            if earlier < stage:
                self.calls_before[name] = self.calls_before.get(name, 0) + count

    def copy_to(self, model: nn.Module) -> Piece:
        """Return the same piece of a copy of the model; the copy may lack modules of other
        stages.
        """
        other = Piece(self.cut.copy_to(model), self.stage)
        other.copies_input = self.copies_input
        return other

    def forward(self, value: Any) -> Any:
        """Return the input of the next piece, or the model's output."""
        if self.copies_input:
            value = clone_tensors(value)
        # recordings number the leaves of the input in the order of sorted keys
        value = value if self.stage or isinstance(value, torch.Tensor) else sort_keys(value)
        program = self.cut.find_program(self.stage, value, self.training)
        if not program.is_cast:
            return program.run(value)
        # one autocast region, as for the whole model, so that a weight is cast once
        with enter_model_autocast(self.cut.model):
            return program.run(value)

    def select_state(self) -> dict[str, torch.Tensor]:
        """Return the piece's part of the model's state dict."""
        ids = {id(t) for t in self.list_tensors()}
        return {
            name: t.detach()
            # keep_vars gives the tensors themselves, whose ids can be compared
            for name, t in self.cut.model.state_dict(keep_vars=True).items()
            if id(t) in ids
        }

    def list_constants(self) -> list[torch.Tensor]:
        """Return the tensors that the code between the modules has made without the input."""
        staged = self.cut.list_latest(self.training)[0]
        leaves = [
            leaf for call in staged.stages[self.stage].calls for leaf in call.arguments.leaves
        ]
        leaves += staged.stages[self.stage].output.leaves
        return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]

    def list_weights(self) -> list[str]:
        """Return the names of the piece's trained parameters, each by its first name in the
        model.
        """
        ids = {id(p) for p in self.parameters() if p.requires_grad}
        return [name for name, p in self.cut.model.named_parameters() if id(p) in ids]

    def list_passed_weights(self) -> list[str]:
        """Return the names of the weights that the piece passes to a later piece with the
        activations.
        """
        crossing = {
            key.name
            for key in self.cut.first.stages[self.stage].output.keys
            if isinstance(key, Weight)
        }
        return [name for name in self.list_weights() if name in crossing]

    def list_tensors(self) -> list[torch.Tensor]:
        """Return the parameters and buffers of the piece."""
        return [*self.parameters(), *self.buffers()]


def cut_model(model: nn.Module, begins: Sequence[str], x: Any) -> list[Piece]:
    """Cut the model before each of the modules `begins`, which run in this order; `x`: an input in
    training.
    """
    cut = Cut(model, begins, x)
    return [Piece(cut, stage) for stage in range(len(cut.names))]


def list_crossings(pieces: Sequence[Piece]) -> list[Crossing]:
    """Return the crossing of each cut in training."""
    return pieces[0].cut.crossings
