"""Play the rows of all stages on their devices, in the order of the slots.

Weights are immutable arrays on their stage's device, so a stashed version is a reference to its
arrays, and a pass takes the version that the table names as an argument. An update makes new
arrays and leaves the old ones alone:

    F5 reads version 2 -> versions[2]   U2 -> versions[3]   B2 reads version 2 -> versions[2]   the last reader: dropped

With a version its optimizer state is kept, if rules correct what passes read, so that a correction
is computed when it is read. The host queues passes and goes on. In updates that are traced it waits
for each pass, so that events have the pass's own time.
"""

from __future__ import annotations

import contextlib
import copy
import heapq
import sys
import time
from typing import Any, Callable, Iterable, Iterator, Sequence

import jax
import numpy as np
import torch
from torch import fx

from ipu_pipe.backends.processes.interpreter import (
    ORDER,
    RowAction,
    list_action_kinds,
    list_actions,
)
from ipu_pipe.backends.processes.trace import TraceRecorder
from ipu_pipe.backends.xla.lower import lower
from ipu_pipe.backends.xla.update import StageOptimizer
from ipu_pipe.cut.graphs import StageGraphs, count_bytes, draw_masks
from ipu_pipe.model.batch import count_samples, list_arguments
from ipu_pipe.replay.replays import Replay, ReplayPlan
from ipu_pipe.replay.run import Run
from ipu_pipe.replay.work import MicrobatchResult, Work, average, tabulate
from ipu_pipe.schedule.actions import Kind
from ipu_pipe.update.apply import PLAIN

Arrays = Sequence[Any]
# the time that programs compile before a user who has no terminal is told
SILENT_SECONDS = 10.0


def _describe_graph(graph: fx.GraphModule) -> tuple[Any, ...]:
    """Return what makes two graphs the same function: operations, settings and shapes, without
    the names of their nodes.
    """
    index = {node: i for i, node in enumerate(graph.graph.nodes)}

    def describe(value: Any) -> Any:
        return f"%{index[value]}" if isinstance(value, fx.Node) else value

    lines = []
    for node in graph.graph.nodes:
        args = fx.node.map_aggregate((node.args, node.kwargs), describe)
        value = node.meta.get("val")
        kind = (tuple(value.shape), value.dtype) if hasattr(value, "shape") else None
        constant = None
        # equal operations may still differ in a constant
        if node.op == "get_attr":
            constant = np.asarray(getattr(graph, str(node.target)).detach()).tobytes()
        # inputs and constants have numbered names, which differ between equal stages
        target = "" if node.op in ("placeholder", "get_attr") else str(node.target)
        lines.append((node.op, target, repr(args), kind, constant))
    return tuple(lines)


def make_passes(
    all_graphs: Sequence[StageGraphs], devices: Sequence[Any], is_split: bool
) -> list[StagePasses]:
    """Return the passes of all stages, each on its device. Stages of the same graphs share them, so
    that they are compiled once for each device.
    """
    compiled: dict[Any, StagePasses] = {}
    all_passes = []
    for graphs, device in zip(all_graphs, devices):
        description = (
            _describe_graph(graphs.forward),
            _describe_graph(graphs.backward),
            (graphs.outputs, graphs.inputs, graphs.labels, len(graphs.masks)),
            (len(graphs.weights), graphs.gradients, graphs.differentiable),
        )
        if description not in compiled:
            compiled[description] = StagePasses(graphs, is_split)
        # a shallow copy shares the compiled functions
        passes = copy.copy(compiled[description])
        passes.graphs, passes.device, passes.description = graphs, device, description
        all_passes.append(passes)
    return all_passes


class StagePasses:
    """The compiled passes of a stage. `trained`: the weights that have a gradient. `device`: where
    they run. `description`: equal for stages that compute the same functions.
    """

    device: Any
    description: tuple[Any, ...]

    def __init__(self, graphs: StageGraphs, is_split: bool) -> None:
        self.graphs = graphs
        output: Any = graphs.backward.graph.output_node().args[0]
        gradients = list(output)
        # the others are frozen, or nothing depends on them
        self.trained = [i for i in range(len(graphs.weights)) if gradients[i] is not None]
        states = len(graphs.state)
        outputs = graphs.outputs
        run_forward = lower(graphs.forward)

        def forward(weights: Arrays, state: Arrays, others: Arrays) -> Any:
            results = run_forward(*weights, *state, *others)
            return (
                results[:outputs],
                results[outputs : outputs + states],
                results[outputs + states :],
            )

        # compiled when it is first called, once for each device
        self.forward = jax.jit(forward)
        self.backward = self._compile_backward(graphs.backward, len(graphs.weights))
        if is_split:
            inputs = len(graphs.differentiable)
            self.input_gradient = self._compile_backward(
                graphs.input_gradient, inputs, is_half=True
            )
            run_weights = lower(graphs.weight_gradient)

            def weight_gradient(tensors: Arrays, total: Arrays | None) -> list[Any]:
                return _add([g for g in run_weights(*tensors) if g is not None], total)

            self.weight_gradient = jax.jit(weight_gradient)

    def _compile_backward(
        self, graph: Any, leading: int, is_half: bool = False
    ) -> Callable[..., Any]:
        """Compile a backward to (weight gradients or tensors kept, input gradients).

        `leading`: the results that come first: the gradients of all weights, to which those of
        earlier microbatches are added. `is_half`: the input gradients, before the tensors kept.
        """
        run = lower(graph)

        def backward(
            weights: Arrays, saved: Arrays, gradients: Arrays, total: Arrays | None = None
        ) -> Any:
            results = run(*weights, *saved, *gradients)
            if is_half:
                return results[leading:], results[:leading]
            # a frozen stage has no weights, and still sends gradients to the stage before
            return _add([results[i] for i in self.trained], total), results[leading:]

        return jax.jit(backward)


def _add(terms: Arrays, total: Arrays | None) -> list[Any]:
    """Return the sums of two lists of arrays; of one if there is no other."""
    return list(terms) if total is None else [a + b for a, b in zip(total, terms)]


class CompileNotes:
    """Tell the user which pass was compiled: on a terminal each, elsewhere once it takes long.

    `keys`: of the passes that will be. A pass is compiled when it runs first.
    """

    def __init__(self, keys: Iterable[Any]) -> None:
        self._waiting = set(keys)
        self._count = len(self._waiting)
        self._seconds = 0.0

    @contextlib.contextmanager
    def note(self, key: Any, name: str) -> Iterator[None]:
        """Tell that the pass `name` was compiled inside the context, if its `key` still waits."""
        begin = time.perf_counter()
        yield
        if key not in self._waiting:
            return
        self._waiting.remove(key)
        seconds = time.perf_counter() - begin
        self._seconds += seconds
        if sys.stderr.isatty() or self._seconds > SILENT_SECONDS:
            count = f"{self._count - len(self._waiting)} of {self._count}"
            print(f"xla: compiled {name} in {seconds:.1f} s ({count})", file=sys.stderr)


def list_outputs(graph: fx.GraphModule) -> list[Any]:
    """Return tensors like those that a graph returns; None for those that it does not."""
    results: Any = graph.graph.output_node().args[0]
    return [None if node is None else node.meta["val"] for node in results]


class StagePlayer:
    """One stage: its passes, weights by version, and the microbatches in flight."""

    def __init__(self, run: Run, work: Work, stage: int, passes: StagePasses) -> None:
        self.stage = stage
        self.is_last = stage == len(run.partition) - 1
        self.passes = passes
        self.peak_bytes = 0
        # the bytes of the optimizer's state that a version keeps
        self._kept_state_bytes = 0
        parameters = dict(run.model.named_parameters())
        self._parameters = [parameters[name] for name in passes.graphs.weights]
        trained = [self._parameters[i] for i in passes.trained]
        # what an update adds its first gradients to, and the gradients of outputs that are known
        zeros = [np.zeros(p.shape, p.detach().numpy().dtype) for p in trained]
        # None with one microbatch an update, whose gradients are the total
        self._zeros = self.put(zeros) if work.accumulate > 1 else None
        self.known_gradients = self._list_known_gradients(work.accumulate)
        self.optimizer = StageOptimizer(run.rules, stage, trained, self.put)
        # what a version has of its own: weights that are never stepped are shared
        stepped = [trained[i] for i in self.optimizer.stepped]
        self.stepped_bytes = sum(p.numel() * p.element_size() for p in stepped)
        self.load()
        self.begin(work)

    def put(self, value: Any) -> Any:
        """Return a copy of an array, or of a list of arrays, on the stage's device."""
        # jax may use NumPy's memory as it is, and torch writes to that memory later
        values = [np.array(x) for x in value] if isinstance(value, list) else np.array(value)
        return jax.device_put(values, self.passes.device)

    def _list_known_gradients(self, accumulate: int) -> dict[int, Any]:
        """Return by output the gradient that a backward takes: of the loss its share in the
        update, of other outputs zeros, for one that the next stage does not differentiate.
        """
        graphs = self.passes.graphs
        outputs = list_outputs(self.passes.graphs.forward)
        # of the loss 1 / N; of a tensor that crosses zeros, for one that the next stage sends no
        # gradient of
        make = torch.ones if graphs.labels or self.is_last else torch.zeros
        values = [outputs[i] for i in graphs.gradients]
        tensors = [make(tuple(v.shape), dtype=v.dtype) / accumulate for v in values]
        return dict(zip(graphs.gradients, self.put([t.numpy() for t in tensors])))

    def load(self) -> None:
        """Take weights, state and the optimizer's state from the model on the host."""
        graphs = self.passes.graphs
        self.weights = [self.put(p.detach().numpy()) for p in self._parameters]
        self.state = [self.put(source.value.detach().numpy()) for source in graphs.sources]
        self.optimizer.load()

    def begin(self, work: Work) -> None:
        """Begin from an empty pipeline with the work's first update."""
        self.work = work
        self.version = work.update
        self.newest_forward = work.microbatch - 1
        # the microbatches that the pipeline takes before it is empty
        self.end = work.schedule.microbatches
        self._plan = ReplayPlan(work.make_replays([0]), work.rules, work.microbatch)
        self._here = slice(self.stage, self.stage + 1)
        self._following: Replay | None = None
        # version -> weights, and the optimizer's state if reads are corrected by it
        self._versions: dict[int, tuple[Arrays, Any]] = {}
        self.replays: dict[int, Replay] = {}
        self.saved: dict[int, Arrays] = {}
        self.kept: dict[int, Arrays] = {}
        self.total = self._zeros
        # (version, code) -> corrected weights, and the bytes of those that are copies
        self._corrected: dict[tuple[int, int], tuple[Arrays, int]] = {}
        self._keep_newest()

    def _keep_newest(self) -> None:
        state = None
        if self.optimizer.corrects_reads:
            # the arrays are immutable, so that the list alone is copied
            state = list(self.optimizer.states)
            self._kept_state_bytes = sum(x.nbytes for one in state for x in one.values())
        self._versions[self.version] = (self.weights, state)
        self.optimizer.count_version(self.version)

    def drop_arrays(self) -> None:
        """Leave the arrays to somebody else, until they are gathered again."""
        # a slot's program takes over their memory
        self.weights = self.state = []
        self.optimizer.states = []
        self._versions.clear()

    def count_message_bytes(self, target: int) -> int:
        """Return the bytes of a message to a neighboring stage."""
        graphs = self.passes.graphs
        if target > self.stage:
            return count_bytes(list_outputs(graphs.forward)[: graphs.outputs])
        of_inputs = list_outputs(graphs.backward)[len(graphs.weights) :]
        return count_bytes([t for t in of_inputs if t is not None])

    def read_replay(self, m: int) -> Replay:
        """Return the replay of a microbatch whose forward begins."""
        # `release` has often looked it up already
        following = self._following
        if following is None or following.microbatch != m:
            following = self._plan.replay(m, self._here)
        self._following = None
        self.newest_forward = max(m, self.newest_forward)
        self.replays[m] = following
        return following

    def read(self, versions: Any, codes: Any) -> Arrays:
        """Return the weights that a pass reads."""
        # one stage, so that each array has one element
        version = int(versions[0])
        code = int(codes[0])
        weights, state = self._versions[version]
        if code == PLAIN:
            return weights
        if (version, code) not in self._corrected:
            trained = self.passes.trained
            # computed once for all passes that read it alike
            corrected = self.optimizer.correct(version, code, [weights[i] for i in trained], state)
            by_index = dict(zip(trained, corrected))
            view = [by_index.get(i, w) for i, w in enumerate(weights)]
            size = sum(x.nbytes for x, plain in zip(view, weights) if x is not plain)
            self._corrected[version, code] = view, size
            self._count_versions()
        return self._corrected[version, code][0]

    def update(self, k: int) -> None:
        """Make update k."""
        trained = self.passes.trained
        if self.total is not None and trained:
            gradients = [self.total[i] for i in self.optimizer.stepped]
            old = [self.weights[i] for i in trained]
            new = dict(zip(trained, self.optimizer.step(k, old, gradients)))
            # weights without a step are the same arrays in all versions
            self.weights = [new.get(i, w) for i, w in enumerate(self.weights)]
        self.total = self._zeros
        self.version += 1
        self._keep_newest()
        self.release()

    def release(self) -> None:
        """Drop the versions that no later pass reads."""
        # usually one version is alone, and nothing needs to be looked up
        if len(self._versions) > 1 or self._corrected:
            self._drop(self._find_oldest())
        self._count_versions()

    def _count_versions(self) -> None:
        old = (len(self._versions) - 1) * (self.stepped_bytes + self._kept_state_bytes)
        self.count_held(old + sum(size for _, size in self._corrected.values()))

    def count_held(self, size: int) -> None:
        """Count the bytes of versions and corrected copies beside the newest weights; what an
        update or a pass holds while it runs does not count.
        """
        self.peak_bytes = max(self.peak_bytes, size)

    def _find_oldest(self) -> int:
        """Return the oldest version that a later pass reads."""
        needed = [int(r.backward.versions[0]) for r in self.replays.values()]
        following = self.newest_forward + 1
        if following < self.end:
            if self._following is None:
                # kept for `read_replay`, which asks for the same one next
                self._following = self._plan.replay(following, self._here)
            needed.append(int(self._following.forward.versions[0]))
        return min(needed, default=self.version)

    def _drop(self, oldest: int) -> None:
        """Drop the versions before `oldest`, except the newest."""
        for version in [v for v in self._versions if v < oldest and v != self.version]:
            del self._versions[version]
        for view in [view for view in self._corrected if view[0] not in self._versions]:
            del self._corrected[view]

    def export(self) -> None:
        """Put the newest weights, state and optimizer state into the model on the host."""
        written = [*zip(self._parameters, self.weights)]
        for source, array in zip(self.passes.graphs.sources, self.state):
            if source.is_written:
                written.append((source.value, array))
        with torch.no_grad():
            for tensor, array in written:
                # np.array copies, because jax's own memory is read-only, of which torch warns
                tensor.copy_(torch.from_numpy(np.array(array)))
        self.optimizer.export(self.version > 0)


def _list_compiled(work: Work, stage: StagePlayer) -> list[Kind]:
    """List the kinds of actions of a stage that run a program."""
    kinds = {*list_action_kinds(work)}
    # an update without trained weights computes nothing
    if not stage.passes.trained:
        kinds.remove(Kind.UPDATE)
    marks = [stretch.whole for stretch in work.schedule.stretches]
    is_whole = [mark is not None and mark[stage.stage] for mark in marks]
    # a schedule may mix whole and split backwards
    if any(np.any(mark) for mark in is_whole):
        kinds.add(Kind.BACKWARD)
    if all(np.all(mark) for mark in is_whole):
        kinds -= {Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT}
    return [*kinds]


class Player:
    """Play the actions of all stages in the order of their slots.

    `recorders`: of each device. `results`: update -> (its microbatches' results, samples). `links`:
    (source, target) -> (bytes, messages). `update`: the next update that not all stages have made.
    """

    def __init__(
        self,
        run: Run,
        work: Work,
        stages: Sequence[StagePlayer],
        recorders: Sequence[TraceRecorder],
    ) -> None:
        self._run = run
        self.stages = stages
        self.recorders = recorders
        self.results: dict[int, tuple[list[Any], int]] = {}
        self.links: dict[tuple[int, int], tuple[int, int]] = {}
        self.doing = "start"
        self._carry_out: dict[Kind, Callable[[StagePlayer, int], Any]] = {
            Kind.FORWARD: self._forward,
            Kind.BACKWARD: self._backward,
            Kind.INPUT_GRADIENT: self._input_gradient,
            Kind.WEIGHT_GRADIENT: self._weight_gradient,
            Kind.UPDATE: self._update,
        }
        # stages of the same passes on one device share what is compiled; numbers, because
        # descriptions are long
        shared: dict[Any, int] = {}
        self._programs = [
            shared.setdefault((s.passes.description, s.passes.device.id), s.stage) for s in stages
        ]
        self.notes = CompileNotes(
            (program, kind)
            for program, stage in zip(self._programs, stages)
            for kind in _list_compiled(work, stage)
        )
        self.begin(work)

    def begin(self, work: Work) -> None:
        """Begin from an empty pipeline with the work's first update."""
        self.work = work
        self.update = work.update
        for stage in self.stages:
            stage.begin(work)
        # microbatch -> its batch, until its last forward; results of its forward
        self._batches: dict[int, Any] = {}
        self._microbatch_results: dict[int, Any] = {}
        self._samples: dict[int, int] = {}
        # (stage, microbatch) -> inputs, gradients of outputs by index
        self._inputs: dict[tuple[int, int], Arrays] = {}
        self._gradients: dict[tuple[int, int], dict[int, Any]] = {}
        self._next_action: RowAction | None = None
        kinds = list_action_kinds(work)
        rows = [self._read_row(s, kind) for s in range(len(self.stages)) for kind in kinds]
        # each row is in the order of its slots, so that no list of all actions is needed
        self._row = heapq.merge(*rows)

    def _read_row(self, stage: int, kind: Kind) -> Iterator[RowAction]:
        for actions in list_actions(self.work, kind, stage, [stage]):
            yield from actions

    def advance(self, cut: float, batches: int) -> None:
        """Carry out the actions of slots before `cut` that belong to this many batches; at an
        infinite cut no more of them come before the pipeline begins anew.
        """
        accumulate = self.work.schedule.accumulate
        # `release` must not wait for forwards that never come
        if cut == float("inf"):
            for stage in self.stages:
                stage.end = batches * accumulate
        while self.update < batches:
            action = next(self._row) if self._next_action is None else self._next_action
            self._next_action = action
            if action.slot >= cut:
                return
            self._next_action = None
            kind = ORDER[action.order]
            batch = action.number if kind is Kind.UPDATE else action.number // accumulate
            # an action of a batch that never begins is left out
            if batch < batches:
                self._act(kind, self.stages[action.stage], action.number)

    def _act(self, kind: Kind, stage: StagePlayer, number: int) -> None:
        self.doing = f"stage {stage.stage}, action {kind.value}{number}"
        recorder = self.recorders[self._run.placement[stage.stage] % len(self.recorders)]
        recorder.stage = stage.stage
        start = recorder.mark()
        with self.notes.note(
            (self._programs[stage.stage], kind), f"stage {stage.stage}'s {kind.word}"
        ):
            computed = self._carry_out[kind](stage, number)
        if recorder.is_recording:
            # only where events are recorded: a wait would stop the host's queueing
            jax.block_until_ready(computed)
            # an update has counted its version already
            version = stage.version - 1 if kind is Kind.UPDATE else stage.version
            if number in stage.replays and kind is Kind.FORWARD:
                version = int(stage.replays[number].forward.versions[0])
            recorder.add(kind.word, number, start, version=version)
        if kind is Kind.UPDATE:
            recorder.begin_update(self.update)

    def _send(self, source: int, target: int, arrays: Arrays) -> Arrays:
        """Put arrays onto another stage's device, and count the message."""
        size, messages = self.links.get((source, target), (0, 0))
        sent = sum(x.nbytes for x in arrays)
        self.links[source, target] = (size + sent, messages + 1)
        device = self.stages[target].passes.device
        # arrays are immutable, so that both stages may have them
        if device == self.stages[source].passes.device:
            return arrays
        return jax.device_put(list(arrays), device)

    # ---- one function for each kind of action

    def _forward(self, stage: StagePlayer, m: int) -> Any:
        s = stage.stage
        graphs = stage.passes.graphs
        is_last = s == len(self.stages) - 1
        if m not in self._batches:
            # read by the first stage, and kept for the labels of the last
            x, y = self._run.load(m)
            self._batches[m] = x, y
            self._samples[m] = count_samples(x)
        x, y = self._batches[m]
        inputs = self._inputs.pop((s, m), None)
        if inputs is None:
            # the first stage: nobody has sent it inputs
            inputs = stage.put([t.detach().numpy() for t in list_arguments(x)])
        labels = stage.put([t.numpy() for t in list_arguments(y)]) if is_last else []
        # drawn on the host as the emulator draws them
        masks = draw_masks(self._run.model, graphs.masks, self._run.seed, m)
        replay = stage.read_replay(m)
        weights = stage.read(*replay.forward)
        arguments = [*(stage.put(masks) if masks else []), *inputs, *labels]
        outputs, stage.state, saved = stage.passes.forward(weights, stage.state, arguments)
        stage.saved[m] = saved
        if is_last:
            del self._batches[m]
            self._microbatch_results[m] = outputs
        else:
            self._inputs[s + 1, m] = self._send(s, s + 1, outputs)
        return outputs

    def _list_gradients(self, stage: StagePlayer, m: int) -> Arrays:
        """Return the gradients of the outputs that a backward takes."""
        known = stage.known_gradients
        # the last stage gets none: its loss has a known gradient
        by_output = self._gradients.pop((stage.stage, m), known)
        return [by_output.get(i, known[i]) for i in stage.passes.graphs.gradients]

    def _backward(self, stage: StagePlayer, m: int) -> Any:
        stage.total, of_inputs = self._run_backward(stage, m, stage.passes.backward, stage.total)
        del stage.replays[m]
        stage.release()
        # returned for the wait of a recorded event
        return stage.total, of_inputs

    def _input_gradient(self, stage: StagePlayer, m: int) -> Any:
        stage.kept[m], of_inputs = self._run_backward(stage, m, stage.passes.input_gradient)
        del stage.replays[m]
        stage.release()
        return stage.kept[m], of_inputs

    def _run_backward(
        self, stage: StagePlayer, m: int, run: Callable[..., Any], *total: Arrays | None
    ) -> Any:
        """Run a backward, and send the input gradients to the previous stage."""
        s = stage.stage
        weights = stage.read(*stage.replays[m].backward)
        gradients = self._list_gradients(stage, m)
        computed, of_inputs = run(weights, stage.saved.pop(m), gradients, *total)
        if s:
            # nothing is sent for an input without a gradient
            present = [g for g in of_inputs if g is not None]
            indices = [
                i for i, g in zip(stage.passes.graphs.differentiable, of_inputs) if g is not None
            ]
            self._gradients[s - 1, m] = dict(zip(indices, self._send(s, s - 1, present)))
        return computed, of_inputs

    def _weight_gradient(self, stage: StagePlayer, m: int) -> Any:
        stage.total = stage.passes.weight_gradient(stage.kept.pop(m), stage.total)
        return stage.total

    def _update(self, stage: StagePlayer, k: int) -> Any:
        stage.update(k)
        if stage.stage == len(self.stages) - 1:
            self.collect_results(k)
        self.update = min(one.version for one in self.stages)
        return stage.weights

    def collect_results(self, k: int) -> None:
        """Keep the results of an update that the last stage has made."""
        count = self.work.schedule.accumulate
        numbers = range(k * count, (k + 1) * count)
        outputs = [self._microbatch_results.pop(m) for m in numbers]
        samples = sum(self._samples.pop(m) for m in numbers)
        self.results[k] = (outputs, samples)

    def gather(self) -> None:
        """Give the stages their newest arrays, if they have others."""

    def take(self, k: int) -> tuple[float | None, float | None, int]:
        """Return mean loss, accuracy and samples of an update; the host waits for them here."""
        outputs, samples = self.results.pop(k)
        results = []
        for row in outputs:
            value, *counts = (torch.from_numpy(np.array(x)) for x in row)
            results.append(MicrobatchResult(value, counts[0] if counts else None))
        loss, accuracy = average(tabulate(results))
        return loss, accuracy, samples
