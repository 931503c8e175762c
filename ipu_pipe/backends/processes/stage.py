"""Run the passes of one stage on a rank: forward, recomputation and backward of a microbatch.

The interpreter calls one method of `Stage` for each action of the schedule. The method receives the
tensors that it needs from another stage (`Mail`), loads the weight version that the pass must read,
computes, and sends the result on.

The newest version needs no lookup: it is whatever the parameters hold now, because an update
changes them in place when its turn in the schedule comes. Older versions (stashed, predicted) come
from the weight store.

    actions of stage s    F5   B2   U2   F6   B3   U3
    newest version        w2   w2   w3   w3   w3   w4      pipedream: B3 reads the version that F3 read, which was stashed
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import (
    Any,
    Callable,
    ContextManager,
    Iterator,
    List,
    NamedTuple,
    Optional,
    Sequence,
    Tuple,
)

import numpy as np
import torch

from ipu_pipe.backends.processes.gathering import Gathering
from ipu_pipe.backends.processes.input_kinds import InputKinds
from ipu_pipe.backends.processes.layout import RankLayout
from ipu_pipe.backends.processes.local import LocalBlock
from ipu_pipe.backends.processes.mail import (
    BACKWARD,
    FORWARD,
    RECOMPUTE,
    TIED,
    Mail,
    Message,
    Shapes,
)
from ipu_pipe.backends.processes.memory import ActivationBytes
from ipu_pipe.backends.processes.split import (
    WeightGradients,
    is_split_exact,
    run_input_backward,
    run_whole_backward,
)
from ipu_pipe.backends.processes.ties import TiedWeights, Ties
from ipu_pipe.backends.processes.trace import TraceRecorder
from ipu_pipe.cut.crossing import Crossing
from ipu_pipe.cut.cutting import Piece
from ipu_pipe.local.blocks import get_activation
from ipu_pipe.model.batch import clone_tensors, list_tensors
from ipu_pipe.model.loss import compute_losses, compute_zero_losses, count_right, take_scores
from ipu_pipe.model.precision import get_user_loss
from ipu_pipe.model.randomness import KeyedRandomness
from ipu_pipe.model.restoring import restore_all, restore_buffers, restore_function
from ipu_pipe.replay.replays import Replay, ReplayPlan
from ipu_pipe.replay.weights import Views, WeightStore, make_weight_store
from ipu_pipe.replay.work import LossShare, MicrobatchResult, Work
from ipu_pipe.schedule.actions import Kind, get_pass_needs
from ipu_pipe.schedule.methods import Reads
from ipu_pipe.schedule.versions import find_segment_ends, find_segment_heads

# the tensors for the next stage, and the microbatch's result if the stage has a loss
Outputs = Tuple[List[torch.Tensor], Optional[MicrobatchResult]]


class Ends(NamedTuple):
    """The tensors at the ends of a stage for one kind of inputs.

    `entering`: those that a forward receives, None if its input is the data; `leaving`: those that
    the next stage receives; `before`, `after`: those whose gradients it sends and receives.
    """

    entering: Crossing | None
    leaving: Crossing | None
    before: Crossing | None
    after: Crossing | None


@dataclass
class StageModel:
    """The part of the model that a rank holds for one `stage`, with everything that the stage's
    passes need.

    `crossings`: the tensors that cross each cut. `read_microbatch(m)`: returns microbatch m as (x,
    y), for the first stage and stages with a loss. `checksums`: CRC-32 of each microbatch that was
    read, until it is compared with other ranks'. `random`: the modules' keyed draws, None if no
    module draws. `local`: the block of a stage with a loss of its own. `ties`: the weights that
    other stages use too. `weigh_update(k)`: returns the weights of the microbatches of update k, by
    microbatch; None if all count the same. `example`: a microbatch to load kernels with (`nccl`),
    because a loop gives each of its own once; None: the next one. `kinds`: of the microbatches'
    inputs; None: all are like the first. `recomputes`: a backward runs the forward again.
    """

    layout: RankLayout
    stage: int
    piece: Piece
    crossings: Sequence[Crossing]
    read_microbatch: Callable[[int], tuple[Any, Any]]
    device: torch.device
    random: KeyedRandomness | None = None
    local: LocalBlock | None = None
    ties: Ties = Ties()
    checksums: dict[int, int] = field(default_factory=dict)
    weigh_update: Callable[[int], dict[int, LossShare]] | None = None
    example: tuple[Any, Any] | None = None
    kinds: InputKinds | None = None
    recomputes: bool = False

    def __post_init__(self) -> None:
        s = self.stage
        local = self.local
        self.is_first = s == 0
        self.is_last = s == self.layout.stages - 1
        # the auxiliary head, and the previous stage's piece if blocks overlap
        self.head = local.head if local is not None else None
        self.previous = local.previous if local is not None else None
        self.has_loss = self.head is not None or self.is_last
        self.modules = [
            module for module in (self.piece, self.previous, self.head) if module is not None
        ]
        ends = self._make_ends(self.crossings)
        self._ends = {0: ends}
        # of the first microbatch
        self.entering = ends.entering

    def list_entries(self, crossings: Sequence[Crossing]) -> list[Crossing | None]:
        """Return the tensors that each stage receives, None if its input is the data."""
        return [None, *crossings] if self.local is None else self.local.list_entries(crossings)

    def _make_ends(self, crossings: Sequence[Crossing]) -> Ends:
        s = self.stage
        entries = self.list_entries(crossings)
        leaving, after = (None, None) if self.is_last else (entries[s + 1], crossings[s])
        return Ends(entries[s], leaving, crossings[s - 1] if s else None, after)

    def get_ends(self, m: int) -> Ends:
        """Return the tensors at the stage's ends for microbatch m."""
        # microbatches of the first kind are not listed
        number = 0 if self.kinds is None else self.kinds.of_microbatch.get(m, 0)
        # a kind comes up in training, so its ends are made when it is first used
        if number not in self._ends:
            assert self.kinds is not None
            self._ends[number] = self._make_ends(self.kinds.crossings[number])
        return self._ends[number]

    @cached_property
    def tensors(self) -> list[torch.Tensor]:
        """The stage's parameters and buffers, each once."""
        tensors = [
            t
            for piece in (self.piece, self.previous)
            if piece is not None
            for t in piece.list_tensors()
        ]
        if self.head is not None:
            tensors += [*self.head.parameters(), *self.head.buffers()]
        return list({id(t): t for t in tensors}.values())

    def load_data(self, m: int, is_trial: bool = False) -> tuple[Any, Any]:
        """Return inputs and labels of microbatch m, None for the one that the stage does not need.

        `is_trial`: return the example's, if there is one.
        """
        if self.entering is not None and not self.has_loss:
            return None, None
        x, y = (
            clone_tensors(self.example)
            if is_trial and self.example is not None
            else self.read_microbatch(m)
        )
        return x if self.entering is None else None, y if self.has_loss else None

    def key_draws(self, m: int, piece: Piece | None) -> ContextManager[None]:
        """Make the random draws of microbatch m repeatable: in the forward of `piece`, or in the
        backward if `piece` is None (activation checkpoints run forwards again there)."""
        if self.random is None:
            return nullcontext()
        # one sequence over all replicas, so that no two of them draw alike
        number = m * self.layout.replicas + self.layout.replica
        return (
            self.random.backward(number)
            if piece is None
            else self.random.forward(number, piece.calls_before)
        )


def _draw(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    # 0 is a valid index, whatever the integers index
    if not (dtype.is_floating_point or dtype.is_complex):
        return torch.zeros(*shape, dtype=dtype, device=device)
    return torch.randn(*shape, dtype=dtype, device=device)


class BufferBefore(NamedTuple):
    """A buffer before a forward: the table that has it, its name, the tensor, its count of writes,
    and a copy.
    """

    table: dict[str, Any]
    name: str
    tensor: torch.Tensor
    writes: int
    copied: torch.Tensor

    def has_changed(self) -> bool:
        """Return whether the forward has written it, through .data too, or bound another tensor."""
        now = self.table[self.name]
        is_written = now is not self.tensor or now._version != self.writes
        return is_written or not torch.equal(now, self.copied)


@dataclass
class _InFlight:
    """A microbatch between its forward and its backward on this stage. `inputs`: the batch's
    inputs, or the received tensors. `by_backward`: its backward runs the forward again, with the
    `buffers` that this one changed.
    """

    replay: Replay
    inputs: list[Any]
    labels: Any
    outputs: list[torch.Tensor]
    loss: torch.Tensor | None
    tied_version: int
    by_backward: bool
    buffers: Sequence[BufferBefore] = ()


class Stage:
    """Carry out the passes of a stage.

    `version`: the version of the weights in memory; `newest_forward`: the newest microbatch whose
    forward is done; `results`: the results of microbatches whose update is not done.
    """

    def __init__(self, work: Work, model: StageModel, mail: Mail, recorder: TraceRecorder) -> None:
        self.model = model
        self._work = work
        self._mail = mail
        self._recorder = recorder
        layout = model.layout
        ties = model.ties
        # the one column of this stage in arrays of all stages, (P, ...)
        self._here = slice(model.stage, model.stage + 1)
        self._plan = ReplayPlan(work.make_replays([layout.replica]), work.rules, work.microbatch)
        self.weights = make_weight_store(work, [model.stage], [work.update])
        # the base class is the store that keeps nothing
        self._keeps_versions = type(self.weights) is not WeightStore or bool(ties.copies_of)
        self._is_tied = bool(
            ties.gradients_to or ties.gradients_from or ties.copies_of or ties.copied_to
        )
        # both need what one microbatch adds, before it is added to the earlier ones
        self._separates_gradients = self._is_tied or work.rules.compensates
        self.tied = TiedWeights(ties, model.stage, mail, work.update)
        self.gathering = Gathering(model.piece, work.schedule.accumulate)
        self.activations = ActivationBytes(model.tensors)
        self._trained = [t for t in model.tensors if t.is_leaf and t.requires_grad]
        self.results: dict[int, MicrobatchResult] = {}
        self.version = work.update
        self.newest_forward = work.microbatch - 1
        self._in_flight: dict[int, _InFlight] = {}
        loss = get_user_loss(work.loss)
        # with what a forward may change: running statistics, what a loss keeps
        self._run_modules = [
            *model.modules,
            *([loss] if model.has_loss and isinstance(loss, torch.nn.Module) else []),
        ]
        # (table, name) of the buffers that a forward changes; None: not known before the first one
        self._changed_buffers: list[tuple[dict[str, Any], str]] | None = None
        # microbatch -> its weight until its backward
        self._weights: dict[int, LossShare] = {}
        # microbatch -> the weight gradients that I leaves to W
        self._deferred_weight_gradients: dict[int, WeightGradients] = {}
        # False: I computes the weight gradients too, and W only adds them
        self.splits = True
        # set by the interpreter
        self.sample_memory: Callable[[], None] = lambda: None
        heads = find_segment_heads(find_segment_ends(layout.stages, work.method.segments or 0))
        # such a stage stores its input, so it needs no recomputation of the previous stage
        self._begins_segment = bool(heads[model.stage])
        self._ends_segment = model.is_last or bool(heads[model.stage + 1])
        needs = {
            kind: list(self._find_needs(kind))
            for kind in (Kind.FORWARD, Kind.RECOMPUTE, Kind.BACKWARD)
        }
        self._needs = {**needs, Kind.INPUT_GRADIENT: needs[Kind.BACKWARD], Kind.WEIGHT_GRADIENT: []}

    # ---- the messages that passes need

    def list_needs(self, kind: Kind, m: int) -> Iterator[tuple[Message, Shapes]]:
        """Yield the messages that a pass of microbatch m needs, with their shapes."""
        for source, message_kind, shapes in self._needs[kind]:
            yield Message(message_kind, m, source, self.model.stage), shapes

    def _find_needs(self, kind: Kind) -> Iterator[tuple[int, str, Shapes]]:
        model = self.model
        s = self.model.stage
        # a forward whose input is the data waits for no message
        if not (kind is Kind.FORWARD and model.entering is None):
            for need in get_pass_needs(kind, model.local is not None, self._begins_segment):
                source = s + need.offset
                # needs of the same stage (offset 0) are met by the order of its row
                if need.offset and 0 <= source < model.layout.stages:
                    yield source, kind.value, self._find_shapes(kind, source)
        if kind is Kind.BACKWARD:
            for source, shapes in model.ties.list_needs(TIED):
                yield source, TIED, shapes

    def _find_shapes(self, kind: Kind, source: int) -> Shapes:
        if kind is Kind.FORWARD and self.model.entering is not None:
            return self.model.entering.tensors
        # cut c lies between stages c and c + 1, whichever of the two sends
        crossing = self.model.crossings[min(source, self.model.stage)].tensors
        return (
            tuple(t.gradient for t in crossing if t.differentiable)
            if kind is Kind.BACKWARD
            else crossing
        )

    # ---- passes

    def forward(self, m: int) -> None:
        """Carry out F(m); its event begins when its inputs have arrived."""
        model = self.model
        recorder = self._recorder
        s = self.model.stage
        start = recorder.mark()
        # once an update: a mean by weights needs the labels of all its microbatches before its
        # first backward
        if model.weigh_update is not None and model.has_loss and m not in self._weights:
            self._weights.update(model.weigh_update(m // self._work.schedule.accumulate))
        x, labels = model.load_data(m)
        if x is not None or labels is not None:
            recorder.add("wait", m, start, carries="data")
        inputs: list[Any] = [x]
        if model.entering is not None:
            inputs = self._mail.receive(Message(FORWARD, m, s - 1, s))
        # only here are the inputs seen; later stages hear of a new kind by a message
        elif model.kinds is not None:
            model.kinds.note(m, x)
        ends = model.get_ends(m)
        replay = self._plan.replay(m, self._here)
        version = int(replay.forward.versions[0])
        tied_version = self._find_tied_version(m, version)
        # may wait for the holder's message, so it comes before the mark of the forward's begin
        if self._is_tied:
            self.tied.load(tied_version)
        start = recorder.mark()
        # with a local loss no gradient goes back, so its input needs none
        if ends.entering is not None and model.local is None:
            inputs = ends.entering.require_gradients(inputs)
        self._load(replay.forward)
        # by segments a pass of its own runs the forward again, else the backward
        by_segments = replay.recompute is not None
        by_backward = model.recomputes and not by_segments
        buffers = self._copy_buffers() if by_backward else []
        # without a graph: its activations are what recomputation saves
        with torch.set_grad_enabled(not by_segments):
            # copies for the first time, because the model and the loss may write to what they get
            is_repeated = by_segments or by_backward
            values = clone_tensors((inputs, labels)) if is_repeated else (inputs, labels)
            outputs, result = self._run_and_count_bytes(m, *values)
        in_flight = _InFlight(
            replay,
            inputs,
            labels,
            outputs,
            result.loss if result else None,
            tied_version,
            by_backward,
        )
        if by_backward:
            # with a graph until here, because a forward may ask whether it has one
            outputs = [t.detach() for t in outputs]
            in_flight.outputs, in_flight.loss = [], None
            in_flight.buffers = self._select_changed(buffers)
            self.sample_memory()
            self.activations.keep_inputs(m, list_tensors([*inputs, labels]))
        self._in_flight[m] = in_flight
        # a file of rows may have run a later microbatch's forward before
        self.newest_forward = max(m, self.newest_forward)
        if result is not None:
            # the loss itself would keep the microbatch's graph alive until the update
            self.results[m] = result._replace(loss=result.loss.detach())
        recorder.add(Kind.FORWARD.word, m, start, version=version)
        # after the event: a pass ends before its result is sent
        if ends.leaving is not None:
            self._mail.send(Message(FORWARD, m, s, s + 1), outputs)

    def _find_tied_version(self, m: int, version: int) -> int:
        """Return the version of the copies of tied weights that the passes of microbatch m read:
        `version`, as all weights of the stage, or that of the holder's forward.
        """
        # the only one: copies from several holders are refused where versions differ (`layout`)
        holder = next(iter(self.model.ties.copies_of), None)
        if holder is None or not self._work.method.holder_decides:
            return version
        return int(self._plan.replay(m, slice(holder, holder + 1)).forward.versions[0])

    def _load(self, views: Views) -> None:
        """Put the weights that a pass reads into the parameters."""
        self.weights.load(views)
        self.gathering.begin_pass(int(views.versions[0]), int(views.codes[0]))

    def _run_and_count_bytes(self, m: int, inputs: list[Any], labels: Any) -> Outputs:
        with self.activations.watch_forward(m, list_tensors([*inputs, labels])) as counted_outputs:
            outputs, result = self.run(m, inputs, labels)
            counted_outputs += [*outputs, result.loss if result else None]
        return outputs, result

    def _copy_buffers(self) -> list[BufferBefore]:
        """Copy the buffers that a forward changes; all before the first one, which shows them."""
        changed = self._changed_buffers
        if changed is None:
            tables = [module._buffers for root in self._run_modules for module in root.modules()]
            changed = [(table, n) for table in tables for n in table if table[n] is not None]
        return [
            BufferBefore(table, n, table[n], table[n]._version, table[n].clone())
            for table, n in changed
        ]

    def _select_changed(self, buffers: list[BufferBefore]) -> list[BufferBefore]:
        """Return the buffers that forwards change, which the first one shows."""
        if self._changed_buffers is None:
            buffers = [buffer for buffer in buffers if buffer.has_changed()]
            self._changed_buffers = [(buffer.table, buffer.name) for buffer in buffers]
        return buffers

    def _run_again(self, m: int, in_flight: _InFlight) -> None:
        """Run the forward of a microbatch again, for its backward, with the weights in memory."""
        # By segments only the second forward has a graph, in which a loss may change what it keeps.
        modules = self._run_modules if in_flight.by_backward else [self.model.piece]
        with ExitStack() as stack:
            # the first forward has updated them already
            for module in modules:
                stack.enter_context(restore_buffers(module))
            for buffer in in_flight.buffers:
                buffer.table[buffer.name] = buffer.copied
            in_flight.outputs, result = self._run_and_count_bytes(
                m, in_flight.inputs, in_flight.labels
            )
        in_flight.loss = result.loss if result else None

    def run(self, m: int, inputs: Sequence[Any], labels: Any) -> Outputs:
        """Return the tensors for the next stage, and the result of the microbatch if the stage has
        a loss.
        """
        model = self.model
        ends = model.get_ends(m)
        if model.kinds is not None:
            model.kinds.use(m)
        value = inputs[0] if ends.entering is None else ends.entering.from_messages(inputs)
        if model.previous is not None:
            # only the previous stage itself changes the running statistics of its piece
            with restore_buffers(model.previous), model.key_draws(m, model.previous):
                value = model.previous(value)
        piece_input = value
        with model.key_draws(m, model.piece):
            output = model.piece(value)
            scored_output = output if model.head is None else model.head(get_activation(output))
        outputs: list[torch.Tensor] = []
        if ends.leaving is not None:
            # with an overlap the next stage runs this piece itself, from this stage's input
            outputs = ends.leaving.to_messages(
                piece_input if model.local is not None and model.local.overlaps else output
            )
        if not model.has_loss:
            return outputs, None
        weight = self._weights.get(m)
        # a mean over no labels is NaN, which a weight of 0 would not remove
        if weight is not None and not weight.share:
            loss = compute_zero_losses(self._work.loss, scored_output)[0]
        else:
            loss = compute_losses(self._work.loss, scored_output, labels)[0]
        return outputs, MicrobatchResult(
            loss, count_right(take_scores(self._work.loss, scored_output), labels), weight
        )

    def recompute(self, m: int) -> None:
        """Carry out R(m): run the forward again with the weights that are in memory now."""
        in_flight = self._in_flight[m]
        s = self.model.stage
        received = None
        if not self._begins_segment:
            received = self._mail.receive(Message(RECOMPUTE, m, s - 1, s))
        start = self._recorder.mark()
        if received is not None:
            entering = self.model.get_ends(m).entering
            assert entering is not None
            # the backward takes its input gradients from these, where the new graph begins
            in_flight.inputs = entering.require_gradients(received)
        assert in_flight.replay.recompute is not None
        self._load(in_flight.replay.recompute)
        self._run_again(m, in_flight)
        self._recorder.add(Kind.RECOMPUTE.word, m, start, version=self.version)
        if not self._ends_segment:
            self._mail.send(Message(RECOMPUTE, m, s, s + 1), in_flight.outputs)

    def backward(self, m: int, kind: Kind = Kind.BACKWARD) -> None:
        """Carry out B(m), or I(m), which leaves the weight gradients to W(m), if `kind` is the
        input gradient.
        """
        model = self.model
        ends = model.get_ends(m)
        in_flight = self._in_flight[m]
        s = self.model.stage
        is_local = model.local is not None
        gradients: list[torch.Tensor] = []
        if not model.is_last and not is_local:
            gradients = self._mail.receive(Message(BACKWARD, m, s + 1, s))
        tied = self.tied.receive_gradients(m) if self._is_tied else []
        start = self._recorder.mark()
        version = int(in_flight.replay.backward.versions[0])
        # the newest weights are read without a lookup, so that a wrong order would go unnoticed
        if self._work.method.backward_reads is Reads.NEWEST:
            assert version == self.version, (
                f"stage {s}, {kind.value}{m}: reads version {version}, in memory is {self.version}"
            )
        self._load(in_flight.replay.backward)
        self.gathering.begin_backward()
        if self._is_tied:
            decides = self._work.method.holder_decides
            self.tied.load(in_flight.tied_version if decides else version)
        if in_flight.by_backward:
            self._run_again(m, in_flight)
            # the backward frees what this has kept
            self.sample_memory()
        roots: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        if in_flight.loss is not None:
            roots = [(self._work.scale_loss(in_flight.loss, self._weights.pop(m, None)), None)]
        elif not is_local:
            # zipped with the gradients below, which come for differentiable outputs alone
            assert ends.after is not None
            outputs = [
                t for t, spec in zip(in_flight.outputs, ends.after.tensors) if spec.differentiable
            ]
            roots = [
                (t, g)
                for t, g in zip(outputs, ends.after.unpack_gradients(gradients))
                if t.requires_grad
            ]
        # as further roots: autograd adds them to this stage's own gradient in the whole model's
        # order
        roots += tied
        with model.key_draws(m, None):
            self._run_backward(m, kind, in_flight, [t for t, _ in roots], [g for _, g in roots])
        input_gradients: list[torch.Tensor] = []
        # a block with a loss of its own sends no gradient back
        before = None if is_local else ends.before
        if before is not None:
            input_gradients = before.collect_gradients(in_flight.inputs)
        # before `_release`, which keeps all versions that microbatches in flight read
        del self._in_flight[m]
        self._release()
        self._recorder.add(kind.word, m, start, version=version)
        if before is not None:
            self._mail.send(Message(BACKWARD, m, s, s - 1), input_gradients)
        if self._is_tied:
            self.tied.send_gradients(m)
        # shared layers are sent with the last backward of a batch, when their gradients are
        # complete
        update, rest = divmod(m + 1, self._work.schedule.accumulate)
        if model.local is not None and not rest:
            model.local.send_gradients(update - 1, s, self._mail)

    def _run_backward(
        self,
        m: int,
        kind: Kind,
        in_flight: _InFlight,
        roots: list[torch.Tensor],
        gradients: list[torch.Tensor | None],
    ) -> None:
        if kind is Kind.BACKWARD:
            with self._separate_gradients() if self._separates_gradients else nullcontext():
                # none at a stage up to which nothing is trained
                if roots:
                    torch.autograd.backward(roots, gradients)  # type: ignore[arg-type]
            if self._work.rules.weight_master_pairs:
                self._work.rules.collect()
            self.activations.drop(m)
            return
        deferred = WeightGradients()
        # gradients of tied weights leave with this microbatch, so that they cannot wait for W
        if roots and self.splits:
            deferred = run_input_backward(
                roots, gradients, list_tensors(in_flight.inputs), self.tied.weights
            )
        elif roots:
            deferred = run_whole_backward(roots, gradients, self._trained)
        if self._is_tied:
            self.tied.take_gradients(deferred)
        self._deferred_weight_gradients[m] = deferred
        self.activations.replace(m, deferred.tensors)

    @contextmanager
    def _separate_gradients(self) -> Iterator[None]:
        """Keep the gradients of the backward inside the context apart from accumulated ones.

        This concerns weights that other stages hold, and all weights if a rule corrects the
        gradients of each microbatch.
        """
        with ExitStack() as stack:
            # the store has one stage, its number 0
            stack.enter_context(
                self._work.rules.compensate(
                    self.version, [self.model.stage], lambda _: self.weights.compute_age(0)
                )
            )
            if self._is_tied:
                stack.enter_context(self.tied.separate_gradients())
            yield

    def add_weight_gradients(self, m: int) -> None:
        """Carry out W(m): add the weight gradients that I(m) has left."""
        # W needs no message, so no wait comes before its mark
        start = self._recorder.mark()
        self._deferred_weight_gradients.pop(m).add()
        # before `collect`, which moves the gradients on
        self.gathering.reduce_left()
        self._work.rules.collect()
        self.activations.drop(m)
        self._recorder.add(Kind.WEIGHT_GRADIENT.word, m, start)

    def verify_split(self, example: tuple[Any, Any]) -> bool:
        """Return whether I and W give the same bits as B, on the microbatch `example` or on random
        inputs; else do not split.
        """
        model = self.model
        # copies, because a model and a loss may write to what they get
        x, labels = clone_tensors(example)
        inputs = [x]
        with ExitStack() as stack:
            for module in model.modules:
                stack.enter_context(restore_all(module))
            stack.enter_context(restore_function(get_user_loss(self._work.loss)))
            if model.entering is not None:
                messages = [
                    _draw(spec.message_shape, spec.dtype, model.device)
                    for spec in model.entering.tensors
                ]
                inputs = model.entering.require_gradients(messages)
            # the number keys draws alone: no microbatch is read
            outputs, result = self.run(self.newest_forward + 1, inputs, labels)
            roots = [t for t in (outputs if result is None else [result.loss]) if t.requires_grad]
            gradients = [
                _draw(t.shape, t.dtype, t.device) if result is None else None for t in roots
            ]
            differentiable = [t for t in list_tensors(inputs) if t.requires_grad]
            # nothing is trained up to this stage
            if not roots:
                return True
            # a user's module whose backward cannot run in parts may raise anything
            with suppress(Exception):
                # stays so if the comparison raises
                self.splits = False
                self.splits = is_split_exact(
                    roots, gradients, differentiable, self._trained, self.tied.weights
                )
        return self.splits

    # ---- weight versions before and after an update

    def stash_weights(self) -> None:
        """Stash the weights that backwards of microbatches in flight, or later forwards, still read
        and the update overwrites.
        """
        if not self._keeps_versions:
            return
        method = self._work.method
        codes = set()
        if method.backward_reads is Reads.STASHED:
            # older versions were stashed when they were superseded
            reads = [in_flight.replay.backward for in_flight in self._in_flight.values()]
            codes = {int(read.codes[0]) for read in reads if read.versions[0] == self.version}
            # 2BW: forwards after this update still read the version before it
            if method.forward_reads is Reads.DOUBLE_BUFFERED:
                versions = np.full(self._work.schedule.stages, self.version)
                codes |= self._plan.find_later_reads(versions, self.newest_forward)[
                    self.model.stage
                ]
        self.weights.stash_before_update([codes])

    def advance_version(self) -> None:
        """Count the weights in memory as the next version."""
        self.version += 1
        self._release()

    def _release(self) -> None:
        """Drop the versions that no later pass reads."""
        if not self._keeps_versions:
            return
        versions = [
            int(in_flight.replay.backward.versions[0]) for in_flight in self._in_flight.values()
        ]
        # 2BW: the next forward, too, may read a version that is no longer the newest
        if self.newest_forward + 1 < self._work.schedule.microbatches:
            versions.append(
                int(self._plan.replay(self.newest_forward + 1, self._here).forward.versions[0])
            )
        # without a later reader every version may go
        self.weights.release(np.array([min(versions, default=np.iinfo(np.int64).max)]))
        if not self._is_tied:
            return
        if self._work.method.holder_decides:
            versions = [in_flight.tied_version for in_flight in self._in_flight.values()]
            if self.newest_forward + 1 < self._work.schedule.microbatches:
                versions.append(self._find_tied_version(self.newest_forward + 1, self.version))
        self.tied.release(min(versions, default=self.version))

    def continue_from(self, previous: Stage) -> None:
        """Go on with what a stage of an earlier stretch of the run, now empty, has found out."""
        self.splits = previous.splits
        self.activations = previous.activations
        # peaks are of the whole run, and the new stores begin at 0
        self.weights.peak_bytes = previous.weights.peak_bytes
        self.tied.peak_bytes = previous.tied.peak_bytes

    @property
    def peak_version_bytes(self) -> int:
        """The peak bytes of weight versions besides the weights in the parameters."""
        return self.weights.peak_bytes + self.tied.peak_bytes

    def load_newest(self) -> None:
        """Put the newest weights into the parameters; no microbatch may be in flight."""
        self.weights.load_newest()
        self.gathering.drop()
        self.tied.load(self.version)

    def remove_hooks(self) -> None:
        """Remove the hooks from the model."""
        if self.model.random is not None:
            self.model.random.remove()
