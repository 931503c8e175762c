"""One program a slot: all that the stages of a dataflow pipeline do in a slot, compiled into one
program for one device.

In each slot every stage runs a forward, a backward and perhaps an update, on different microbatches,
so that neighboring stages of the same shape run as one, with their arrays stacked (`jax.vmap`): the
small products of P blocks become one batched product, and the host queues one program instead of 3 P.

    slot 29     F29 F28 F27 F26     messages of slot 28 -> forwards, backwards, updates -> messages
                B23 B24 B25 B26
                U23 U24 U25 U26

Between slots the program's arrays stay on the device (`GroupState`). What a forward leaves to its
backward is written into a ring, at the row of its slot. In the first and the last slots of a pipeline
not all stages have work: they compute with what is there, and their results are left out.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Callable, NamedTuple, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from ipu_pipe.backends.processes.trace import TraceRecorder
from ipu_pipe.backends.xla.player import Arrays, CompileNotes, Player, StagePlayer, list_outputs
from ipu_pipe.backends.xla.update import Numbers, step_stage
from ipu_pipe.cut.graphs import StageGraphs, draw_masks
from ipu_pipe.errors import BadInput
from ipu_pipe.model.batch import count_samples, list_arguments
from ipu_pipe.refusals import name_key
from ipu_pipe.replay.run import Run
from ipu_pipe.replay.work import Work
from ipu_pipe.schedule.actions import Kind
from ipu_pipe.update.apply import PLAIN, UpdateRules
from ipu_pipe.update.rules import STEP, VELOCITY

# the stages of the same shape from which on a program a slot is the default
FEWEST_EQUAL = 4
_STEP_SIZE = Numbers._fields.index("step_size")
_ROOT = Numbers._fields.index("root")


class GroupState(NamedTuple):
    """The arrays of n stages of the same shape between two slots, each stacked (n, ...).

    `total`: the gradients of an update that is not complete, None if an update has one microbatch.
    `saved`: by row of the ring, (rows, n, ...). `inputs`, `gradients`: the messages from the
    previous and the next stages that the next slot's passes take; stage 0 takes the host's.
    """

    weights: Arrays
    state: Arrays
    optimizer: Sequence[dict[str, Any]]
    total: Arrays | None
    saved: Arrays
    inputs: Arrays
    gradients: Arrays


class SlotFeed(NamedTuple):
    """What the host gives a group of n stages in a slot.

    `does` (3, n): which stages run a forward, a backward, an update. `row`: the ring's row of this
    slot. `numbers` (n, weights, numbers).
    `forward_factors`, `backward_factors`: entry of the state -> (n, weights), what a correction
    adds. `masks`: of dropout.
    """

    does: Any
    row: Any
    numbers: Any
    forward_factors: dict[str, Any]
    backward_factors: dict[str, Any]
    masks: Arrays


def _describe_stage(stage: StagePlayer) -> tuple[Any, ...]:
    """Return what makes two stages compute the same function of their arrays."""
    optimizer = stage.optimizer
    return (
        stage.passes.description,
        (tuple(optimizer.stepped), optimizer.options, optimizer.list_rules(0)),
        stage.is_last,
    )


def group_stages(stages: Sequence[StagePlayer]) -> list[list[StagePlayer]]:
    """Group neighboring stages that compute the same function."""
    groups: list[list[StagePlayer]] = []
    last = None
    for stage in stages:
        description = _describe_stage(stage)
        if description == last:
            groups[-1].append(stage)
        else:
            groups.append([stage])
        last = description
    return groups


def chooses_slots(program: str | None, stages: Sequence[StagePlayer]) -> bool:
    """Return whether a program a slot runs: if the options say so, or leave it open and most stages
    are the same blocks without a convolution, of several of which XLA's CPU makes slow ones.
    """
    if program is not None:
        return program == "slot"
    greatest = max(group_stages(stages), key=len)
    convolves = "convolution" in greatest[0].passes.graphs.forward.code
    return len(greatest) >= FEWEST_EQUAL and not convolves


# ---- the program


def _map(function: Callable[..., Any], n: int, *arguments: Any) -> Any:
    """Call a function of one stage's arrays for n stages whose arrays are stacked."""
    if n > 1:
        return jax.vmap(function)(*arguments)
    # one stage needs no batched operations
    results = function(*jax.tree.map(lambda x: x[0], arguments))
    return jax.tree.map(lambda x: jnp.expand_dims(x, 0), results)


def _select(does: Any, new: Any, old: Any) -> Any:
    """Return the new arrays of the stages that have work, and the old ones of the others."""

    def select(a: Any, b: Any) -> Any:
        # `does` is (n,), the arrays are (n, ...)
        return jnp.where(does.reshape(-1, *[1] * (a.ndim - 1)), a, b)

    return jax.tree.map(select, new, old)


class Group:
    """Neighboring stages of the same shape, run as one by the program. `depth`: the slots between a
    forward of its first stage and its backward.
    """

    def __init__(self, stages: Sequence[StagePlayer], accumulate: int, depth: int) -> None:
        self.stages = list(stages)
        self.here = slice(stages[0].stage, stages[-1].stage + 1)
        self.passes = stages[0].passes
        self.graphs: StageGraphs = self.passes.graphs
        self.optimizer = stages[0].optimizer
        self.is_last = stages[0].is_last
        # a row is read before it is written; a backward in the slot of its forward needs none
        self.rows = depth
        self._accumulates = accumulate > 1
        # a schedule may begin to decay weights at any update
        self._options = tuple(o._replace(decays=True) for o in self.optimizer.options)
        self._rules = self.optimizer.list_rules(0)
        # of forwards and of backwards: the entries with which weights were corrected so far
        self._entries: tuple[set[str], set[str]] = set(), set()

    def make_state(self, inputs: Sequence[torch.Tensor]) -> GroupState:
        """Stack the arrays of the stages, with empty rings and messages. `inputs`: such as
        enter the first stage.
        """
        graphs = self.graphs
        stages = self.stages
        n = len(stages)

        def stack(arrays: Sequence[Any]) -> Any:
            return np.stack([np.asarray(x) for x in arrays])

        def make_empty(like: Sequence[torch.Tensor], *leading: int) -> list[Any]:
            return [torch.zeros((*leading, *t.shape), dtype=t.dtype).numpy() for t in like]

        weights = [stack(x) for x in zip(*(s.weights for s in stages))]
        state = [stack(x) for x in zip(*(s.state for s in stages))]
        states = zip(*(s.optimizer.states for s in stages))
        optimizer = [{key: stack([x[key] for x in row]) for key in row[0]} for row in states]
        trained = [weights[i] for i in self.passes.trained]
        known = stages[0].known_gradients
        return GroupState(
            weights,
            state,
            optimizer,
            [np.zeros_like(x) for x in trained] if self._accumulates else None,
            make_empty(graphs.saved, self.rows, n) if self.rows else [],
            make_empty(inputs, n if stages[0].stage else n - 1),
            [np.stack([np.asarray(known[i])] * n) for i in graphs.gradients],
        )

    # ---- the parts of the program

    def run_forwards(
        self, old: GroupState, feed: SlotFeed, labels: Arrays
    ) -> tuple[Any, Arrays, GroupState]:
        """Run a slot's forwards; return their outputs, what they leave and the state."""

        def forward(
            weights: Arrays,
            optimizer: Sequence[dict[str, Any]],
            factors: dict[str, Any],
            state: Arrays,
            others: Arrays,
        ) -> Any:
            read = self._correct(weights, optimizer, factors)
            return self.passes.forward(read, state, others)

        others = [*feed.masks, *old.inputs, *labels]
        outputs, state, saved = _map(
            forward,
            len(self.stages),
            old.weights,
            old.optimizer,
            feed.forward_factors,
            old.state,
            others,
        )
        # a stage without work has computed with what was there, and keeps its state
        state = _select(feed.does[0], list(state), list(old.state))
        return outputs, saved, old._replace(state=state)

    def run_backwards(
        self, old: GroupState, feed: SlotFeed, left: Arrays, saved: Arrays
    ) -> tuple[Any, GroupState]:
        """Run a slot's backwards and updates; return the gradients of the inputs and the state.
        `left`: what the slot's forwards have left; `saved`: what the backwards read, empty if it is
        what the same slot's forwards have left.
        """

        def backward(
            weights: Arrays,
            optimizer: Sequence[dict[str, Any]],
            factors: dict[str, Any],
            saved: Arrays,
            gradients: Arrays,
        ) -> Any:
            read = self._correct(weights, optimizer, factors)
            return self.passes.backward(read, saved, gradients, None)

        n = len(self.stages)
        writes = zip(old.saved, left)
        rings = [lax.dynamic_update_index_in_dim(ring, x, feed.row, 0) for ring, x in writes]
        gradients, of_inputs = _map(
            backward,
            n,
            old.weights,
            old.optimizer,
            feed.backward_factors,
            saved or left,
            old.gradients,
        )
        if old.total is not None:
            sums = [a + b for a, b in zip(old.total, gradients)]
            gradients = _select(feed.does[1], sums, list(old.total))
        new = self._update(old._replace(saved=rings), feed, gradients)
        if old.total is not None:
            zeros = [jnp.zeros_like(x) for x in gradients]
            new = new._replace(total=_select(feed.does[2], zeros, gradients))
        return of_inputs, new

    def _update(self, old: GroupState, feed: SlotFeed, gradients: Arrays) -> GroupState:
        stepped = self.optimizer.stepped
        indices = [self.passes.trained[i] for i in stepped]
        if not indices:
            return old
        step = partial(step_stage, self._options, self._rules)
        before = [old.weights[i] for i in indices]
        stepped_gradients = [gradients[i] for i in stepped]
        results = _map(
            step, len(self.stages), feed.numbers, before, stepped_gradients, list(old.optimizer)
        )
        weights, optimizer = _select(feed.does[2], results, (before, list(old.optimizer)))
        by_index = dict(zip(indices, weights))
        weights = [by_index.get(i, w) for i, w in enumerate(old.weights)]
        return old._replace(weights=weights, optimizer=optimizer)

    # ---- what the host gives

    def list_numbers(self, made: Any) -> Any:
        """Return the numbers of the stages' next updates, (n, weights, numbers); `made`: the
        updates of every stage so far.
        """
        # rates and other numbers may differ between the stages of a group, operations may not
        rows = [s.optimizer.list_numbers(int(made[s.stage])) for s in self.stages]
        options = self.optimizer.options
        if any(s.optimizer.options != options for s in self.stages):
            raise BadInput(
                f"optimizer: momentum, nesterov: changed during the run: set "
                f"{name_key('backend.program')}=action"
            )
        shape = (len(rows), len(rows[0]), len(Numbers._fields))
        return np.array(rows, self.optimizer.dtype).reshape(shape)

    def count_steps(self, numbers: Any) -> Any:
        """Return the numbers with the bias corrections of Adam by the steps so far."""
        if all(option.kind == "sgd" for option in self._options):
            return numbers
        fields = dict(zip(Numbers._fields, np.moveaxis(numbers.astype(np.float64), -1, 0)))
        # steps of this stage so far, and the one to come: Adam counts from 1
        counts = np.array([stage.optimizer.counts for stage in self.stages]) + 1
        # a copy, because the program of the slot before may not have read the numbers yet
        numbers = numbers.copy()
        numbers[..., _STEP_SIZE] = fields["lr"] / (1 - fields["beta1"] ** counts)
        numbers[..., _ROOT] = np.sqrt(1 - fields["beta2"] ** counts)
        return numbers

    def list_factors(self, which: int, codes: Any, made: Any) -> dict[str, Any]:
        """Return what the corrections of the forwards (`which` 0) or backwards (1) add: entry of
        the state -> (n, weights).
        """
        rows = [
            {}
            if codes[s.stage] == PLAIN
            else s.optimizer.list_corrections(int(codes[s.stage]), int(made[s.stage]))
            for s in self.stages
        ]
        # an entry stays in the program, which is compiled for its entries, with factors of zero
        entries = self._entries[which]
        entries.update(*rows)
        none = [0.0] * len(self.optimizer.stepped)
        return {
            entry: np.array([row.get(entry, none) for row in rows]) for entry in sorted(entries)
        }

    def _correct(
        self, weights: Arrays, optimizer: Sequence[dict[str, Any]], factors: dict[str, Any]
    ) -> list[Any]:
        """Return one stage's weights as the rules correct them for a pass."""
        read = list(weights)
        for entry, row in factors.items():
            # SGD's step is its velocity times the rate, which is in the factor
            name = VELOCITY if entry == STEP else entry
            for j, (i, state) in enumerate(zip(self.optimizer.stepped, optimizer)):
                number = self.passes.trained[i]
                if name in state:
                    read[number] = read[number] + row[j].astype(read[number].dtype) * state[name]
        return read


@jax.jit
def _read_rings(rings: Sequence[Arrays], rows: Sequence[Any]) -> list[list[Any]]:
    """Read the rows of all groups' rings that the backwards of a slot need.

    It is a program of its own: in one that also writes the rings, XLA would copy them.
    """
    return [[ring[row, np.arange(len(row))] for ring in group] for group, row in zip(rings, rows)]


def _play(
    groups: Sequence[Group], states: Any, feeds: Any, saved: Any, x: Arrays, labels: Arrays
) -> Any:
    """Run one slot of all groups; return their states and the last stage's outputs."""
    states = list(states)
    # the host's microbatch in front of what the group's own stages have sent
    entering = [jnp.concatenate([a[None], b]) for a, b in zip(x, states[0].inputs)]
    states[0] = states[0]._replace(inputs=entering)
    outputs: list[Any] = []
    all_left = []
    for i, group in enumerate(groups):
        mine = [jnp.expand_dims(t, 0) for t in labels] if group.is_last else []
        sent, left, states[i] = group.run_forwards(states[i], feeds[i], mine)
        outputs.append(sent)
        all_left.append(left)
    # after all forwards: a backward in the slot of its forward reads what that has left
    of_inputs = []
    for i, group in enumerate(groups):
        returned, states[i] = group.run_backwards(states[i], feeds[i], all_left[i], saved[i])
        of_inputs.append(dict(zip(group.graphs.differentiable, returned)))
    for i, group in enumerate(groups):
        # the first stage takes what comes from the stage before, which the host gives to stage 0
        inputs = [a[-1:] for a in outputs[i - 1]] if i else [a[:0] for a in states[i].inputs]
        if len(group.stages) > 1:
            inputs = [jnp.concatenate([a, b[:-1]]) for a, b in zip(inputs, outputs[i])]
        gradients = states[i].gradients
        if not group.is_last:
            pairs = zip(group.graphs.gradients, gradients)
            here, following = of_inputs[i], of_inputs[i + 1]
            gradients = [_shift(here.get(j), following.get(j), like) for j, like in pairs]
        states[i] = states[i]._replace(inputs=inputs, gradients=gradients)
    return states, [x[-1] for x in outputs[-1]]


def _shift(here: Any, following: Any, like: Any) -> Any:
    """Return the gradients of n stages' outputs: of all but the last by the stages themselves, of
    the last by the next group's first stage; None is zeros.
    """
    here = jnp.zeros_like(like) if here is None else here
    last = jnp.zeros_like(like[-1:]) if following is None else following[:1]
    return jnp.concatenate([here[1:], last])


# ---- the host


class SlotPlayer(Player):
    """Play slots by one program each, with the arrays of all stages on one device.

    In slot t of a pipeline that began with microbatch 0, stage s of P runs F(t - s) and
    B(t - s - d), d = 2 (P - 1 - s) + the method's turn, and update k after B(N (k + 1) - 1).
    """

    def __init__(
        self,
        run: Run,
        work: Work,
        stages: Sequence[StagePlayer],
        recorders: Sequence[TraceRecorder],
    ) -> None:
        count = len(stages)
        self._numbers = np.arange(count)
        # the slots between a stage's forward of a microbatch and its backward
        self._depths = 2 * (count - 1 - self._numbers) + work.method.turn
        # compiled once for all pipelines of the run
        self._groups = [
            Group(group, work.accumulate, int(self._depths[group[0].stage]))
            for group in group_stages(stages)
        ]
        # donated, so that the new states take the memory of the old ones
        self._program = jax.jit(partial(_play, self._groups), donate_argnums=0)
        # the forwards and the backwards of each stage so far
        self._sent = np.zeros((2, count), np.int64)
        super().__init__(run, work, stages, recorders)
        self.notes = CompileNotes(["slot"])

    def begin(self, work: Work) -> None:
        super().begin(work)
        self._first = work.microbatch
        self._entering = work.microbatch
        self._made = np.full(len(self.stages), work.update)
        self._first_slot = self._find_first_slot(work)
        self._eras = _Eras(work.rules)
        x, y = self._run.example
        # any values until a batch comes: stages without work compute with them
        self._x: Arrays = [t.numpy() for t in list_arguments(x)]
        self._y: Arrays = [t.numpy() for t in list_arguments(y)]
        entering = list_arguments(x)
        states = []
        for group in self._groups:
            states.append(group.make_state(entering))
            entering = list_outputs(group.graphs.forward)[: group.graphs.outputs]
        self._states = jax.device_put(states, self.stages[0].passes.device)
        # the program takes over the memory of its states, so that nobody else may hold them
        for stage in self.stages:
            stage.drop_arrays()
        # the settings of the newest slot, and what was made of them
        self._settings: tuple[Any, ...] | None = None
        self._feeds: list[tuple[Any, dict[str, Any], dict[str, Any]]] = []

    def _find_first_slot(self, work: Work) -> int:
        """Return the first slot; assert that the schedule is the pipeline of this class."""
        schedule = work.schedule
        end = min(self._first + int(self._depths[0]) + 2, schedule.microbatches)
        forward = schedule.slots(Kind.FORWARD, self._first, end)
        backward = schedule.slots(Kind.BACKWARD, self._first, end)
        # the program's order is this pipeline's alone, whatever the schedule says
        assert (forward == forward[:1] + self._numbers[:, None]).all()
        assert (backward == forward + self._depths[:, None]).all()
        return int(forward[0, 0])

    def advance(self, cut: float, batches: int) -> None:
        """Play the slots before `cut`, of the actions that belong to this many batches."""
        end = batches * self.work.accumulate
        while self.update < batches and self._entering - self._first + self._first_slot < cut:
            self._play_slot(end)
            self._entering += 1

    def _play_slot(self, end: int) -> None:
        """Play one slot, of the actions of the microbatches before `end`."""
        entering = self._entering
        last = len(self.stages) - 1
        self.doing = f"microbatch {entering} enters"
        # (P,): the microbatch at each stage in this slot, which may not exist
        forward = entering - self._numbers
        backward = forward - self._depths
        runs = [(self._first <= m) & (m < end) for m in (forward, backward)]
        updates = runs[1] & ((backward + 1) % self.work.accumulate == 0)
        does = np.stack([*runs, updates])
        # the forward of a backward of this slot was as many slots ago as it is deep
        rows = [
            ((entering - self._depths[group.here]) % max(group.rows, 1)).astype(np.int32)
            for group in self._groups
        ]
        self._read_batch(forward, runs[0])
        self._make_settings(backward)
        feeds = [
            self._feed(group, entering, does, forward, *settings)
            for group, settings in zip(self._groups, self._feeds)
        ]
        saved = _read_rings([s.saved for s in self._states], rows)
        with self.notes.note("slot", "the program of a slot"):
            self._states, outputs = self._program(self._states, feeds, saved, self._x, self._y)
        if runs[0][last]:
            self._microbatch_results[int(forward[last])] = outputs
        self._sent += np.stack(runs)
        self._finish_updates(updates)

    def _read_batch(self, forward: Any, runs: Any) -> None:
        """Read what enters the first stage, and the labels of what enters the last."""
        if runs[0]:
            m = int(forward[0])
            x, y = self._run.load(m)
            # copies, because the program may read them after the data source has gone on
            self._batches[m] = [np.array(t) for t in list_arguments(y)]
            self._samples[m] = count_samples(x)
            self._x = [np.array(t.detach()) for t in list_arguments(x)]
        if runs[-1]:
            # the last stage's microbatch entered P - 1 slots ago
            self._y = self._batches.pop(int(forward[-1]))

    # ---- the settings of a slot

    def _make_settings(self, backward: Any) -> None:
        """Make the numbers of the updates and the factors of the corrections, unless they are
        those of the slot before.
        """
        rules = self.work.rules
        updates = self._made
        # the version that the forward of each stage's backward has read
        read = np.maximum(backward - self._depths, self._first)
        codes = (
            rules.encode_forwards(updates),
            rules.encode_backwards(updates, np.minimum(read // self.work.accumulate, updates)),
        )
        eras = self._eras.list(updates)
        # the first step has no velocity to keep (`Numbers.kept`)
        is_first = updates == self.work.update
        settings = (eras, *(code.tolist() for code in codes), is_first.tolist())
        # most slots have the settings of the one before
        if settings != self._settings:
            self._settings = settings
            self._feeds = [
                (
                    group.list_numbers(updates),
                    *(group.list_factors(i, code, updates) for i, code in enumerate(codes)),
                )
                for group in self._groups
            ]
            for group, (_, *factors) in zip(self._groups, self._feeds):
                for stage in group.stages:
                    stage.count_held(sum(map(bool, factors)) * stage.stepped_bytes)

    def _feed(
        self,
        group: Group,
        entering: int,
        does: Any,
        forward: Any,
        numbers: Any,
        forward_factors: dict[str, Any],
        backward_factors: dict[str, Any],
    ) -> SlotFeed:
        """Return what a group gets in a slot."""
        here = group.here
        masks = self._draw_masks(group, forward, does[0]) if group.graphs.masks else []
        return SlotFeed(
            does[:, here],
            np.int32(entering % max(group.rows, 1)),
            group.count_steps(numbers),
            forward_factors,
            backward_factors,
            masks,
        )

    def _draw_masks(self, group: Group, forward: Any, runs: Any) -> list[Any]:
        """Return the dropout masks of a group's forwards, stacked."""
        drawn = []
        for stage in group.stages:
            masks = stage.passes.graphs.masks
            # a stage without work draws as well, for arrays of one shape; its result is left out
            m = int(forward[stage.stage]) if runs[stage.stage] else self._first
            drawn.append(draw_masks(self._run.model, masks, self._run.seed, m))
        return [np.stack([t.numpy() for t in row]) for row in zip(*drawn)]

    # ---- counts, and the arrays of the stages

    def _finish_updates(self, updates: Any) -> None:
        """Count the updates of a slot, and collect the results of one that the last stage made."""
        for s in np.flatnonzero(updates).tolist():
            self.stages[s].optimizer.count_step()
        if updates[-1]:
            self.collect_results(int(self._made[-1]))
        self._made = self._made + updates
        self.update = int(self._made.min())

    def gather(self) -> None:
        """Give the stages their newest arrays, and count the messages."""
        states = jax.tree.map(np.asarray, self._states)
        for group, state in zip(self._groups, states):
            for i, stage in enumerate(group.stages):
                stage.version = int(self._made[stage.stage])
                stage.weights = [x[i] for x in state.weights]
                stage.state = [x[i] for x in state.state]
                stage.optimizer.states = [
                    {name: x[i] for name, x in entry.items()} for entry in state.optimizer
                ]
        for s, (forward, backward) in enumerate(self._sent.T.tolist()):
            for target, count in ((s + 1, forward), (s - 1, backward)):
                if 0 <= target < len(self.stages) and count:
                    size = self.stages[s].count_message_bytes(target)
                    self.links[s, target] = (count * size, count)


class _Eras:
    """Number the stretches of updates with the same settings, so that what follows from settings is
    made once in each.
    """

    def __init__(self, rules: UpdateRules) -> None:
        self._rules = rules
        self._settings: Any = None
        self._count = 0
        self._eras: dict[int, int] = {}

    def list(self, updates: Any) -> list[int]:
        """Return the stretch of each of these updates, whose numbers never go back."""
        numbers: list[int] = updates.tolist()
        # in the order of the updates: an era ends where settings change
        for k in sorted(set(numbers) - self._eras.keys()):
            settings = self._rules.list_settings(k)
            self._count += settings != self._settings
            self._settings = settings
            self._eras[k] = self._count
        oldest = min(numbers)
        for k in [k for k in self._eras if k < oldest]:
            del self._eras[k]
        return [self._eras[k] for k in numbers]
