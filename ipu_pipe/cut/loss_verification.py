"""Verify before training that the stage with the loss can compute it alone: from the output, the
labels and its own modules.

A loss may read more of a model by closure: weights, attributes that modules set, activations that
hooks keep. In one process it finds them. A process of a pipeline has live values of its own stages
only, and the loss of a block has its own block only:

    whole     x -> stage 0 -> stage 1 -> stage 2 -> loss     all modules have just run on x
    alone     stored input of stage 2 -> stage 2 -> loss     the other modules ran on other values, and their tensors are changed

The value and the gradients of the stage's own weights must be equal bit for bit, and no gradient
may reach other weights. Most losses read outputs alone; a first trial of all losses on stored
outputs finds that out.
"""

from __future__ import annotations

import contextlib
from typing import Any, Callable, Iterator, Mapping, NamedTuple, Sequence

import torch
from torch import nn
from torch.utils._pytree import tree_map

from ipu_pipe.cut.cutting import Piece
from ipu_pipe.cut.verification import change_values
from ipu_pipe.errors import summarize
from ipu_pipe.model.batch import call_model, clone_tensors, list_tensors
from ipu_pipe.model.loss import (
    BlockOutputs,
    Loss,
    LossOfOutput,
    OwnLoss,
    TakePart,
    compute_losses,
    get_block_loss,
)
from ipu_pipe.model.observation import get_storage, has_equal_values
from ipu_pipe.model.precision import get_user_loss
from ipu_pipe.model.randomness import (
    KeyedRandomness,
    RandomStates,
    derive_seed,
    restore_random_states,
)
from ipu_pipe.model.restoring import restore_all, restore_function
from ipu_pipe.model.watching import FunctionWatch, Handler
from ipu_pipe.text import list_some

# a loss may keep values of one microbatch for the next
ROUNDS = 2


class LossStage(NamedTuple):
    """A stage with a loss. `modules`: those that it holds; `run(value)`: returns the output for the
    loss.
    """

    stage: int
    modules: Sequence[nn.Module]
    run: Callable[[Any], Any]

    def list_tensors(self) -> list[torch.Tensor]:
        """Return the parameters and buffers that the stage holds."""
        return [t for module in self.modules for t in (*module.parameters(), *module.buffers())]


class LossTrial(NamedTuple):
    """A model, its loss and a microbatch (x, y), on which the loss is tried.

    `pieces`: the model's stages in order; `randomness`: the keyed draws of its modules.
    """

    model: nn.Module
    pieces: Sequence[Piece]
    loss: Loss
    example: tuple[Any, Any]
    randomness: KeyedRandomness

    def compute_loss(self, output: Any) -> torch.Tensor:
        """Return the loss of one output; the random numbers that the loss draws are the same each
        time.
        """
        seed = derive_seed("verification")
        torch.manual_seed(seed)
        RandomStates.from_seed(seed).write()
        return compute_losses(self.loss, output, self.example[1])[0]

    @contextlib.contextmanager
    def restore(self) -> Iterator[None]:
        """Restore model, loss and random states at the end of the context."""
        with restore_random_states(), restore_all(self.model), restore_function(
            get_user_loss(self.loss)
        ):
            yield


class _Result(NamedTuple):
    """The value of a loss, the gradients by the weights' ids, and the ids of the weights that its
    graph reaches.
    """

    value: torch.Tensor
    gradients: Mapping[int, torch.Tensor | None]
    reached: set[int]


def takes_output_alone(loss: Loss) -> bool:
    """Tell whether a loss is known to read outputs and labels alone: torch's own losses, and a loss
    in the output.
    """
    one = get_block_loss(loss)
    plain = get_user_loss(loss)
    if isinstance(plain, OwnLoss):
        return True
    if (
        isinstance(one, LossOfOutput)
        and one.take is not None
        and not isinstance(one.take, TakePart)
    ):
        return False
    if isinstance(plain, nn.Module):
        # a weight of classes may be a buffer of the model
        return type(plain).__module__.startswith("torch.nn.") and not plain.state_dict()
    return getattr(plain, "__module__", None) == "torch.nn.functional"


def list_foreign_reads(
    trial: LossTrial, stages: Sequence[LossStage], place: str, remedy: str
) -> list[str]:
    """Return a fault for each stage whose loss reads more than the stage holds; model and loss are
    left as they were.

    `stages`: those with losses, in order; `place`: who computes a loss, with `{stage}` for the
    number.
    """
    tensors = [*list_tensors(trial.example), *trial.model.parameters()]
    if takes_output_alone(trial.loss) or any(t.is_meta for t in tensors):
        return []
    # what fails here is tried again, stage by stage
    with contextlib.suppress(Exception):
        if _reads_outputs_alone(trial, range(len(stages))):
            return []
    faults = []
    for number, stage in enumerate(stages):
        expected = _run_whole(trial, number)
        try:
            why = _explain_difference(trial, stage, number, expected)
        # the user's loss may raise anything
        except Exception as error:
            why = f"fails ({summarize(error)[:160]})"
        if why:
            faults.append(f"loss: {why}, but {place.format(stage=stage.stage)}: {remedy}")
    return faults


def _explain_difference(trial: LossTrial, stage: LossStage, number: int, expected: _Result) -> str:
    """Return what the loss `number` reads besides what its stage holds; "" if it reads nothing
    else.
    """
    held_ids = {id(t) for t in stage.list_tensors()}
    elsewhere = {
        id(t) for piece in trial.pieces if piece.stage != stage.stage for t in piece.list_tensors()
    }
    actual = _run_alone(trial, stage, number)
    reached = actual.reached - held_ids
    if not reached:
        compared = held_ids - elsewhere
        if _is_same(expected, actual, compared):
            return ""
        # if the loss itself varies, a difference proves nothing
        if not _is_same(expected, _run_whole(trial, number), compared):
            return ""
    reads = _Reads(trial, stage)
    _run_alone(trial, stage, number, reads.note)
    return f"reads {reads.describe(reached)}"


def _is_same(expected: _Result, actual: _Result, weights: set[int]) -> bool:
    """Tell whether two losses and their gradients of `weights`, given by id, are equal."""
    if expected.value.dtype != actual.value.dtype or not has_equal_values(
        expected.value, actual.value
    ):
        return False
    pairs = [(expected.gradients.get(weight), actual.gradients.get(weight)) for weight in weights]
    return all(
        a is b or (a is not None and b is not None and has_equal_values(a, b)) for a, b in pairs
    )


# ---- runs of model and loss


def _reads_outputs_alone(trial: LossTrial, numbers: Sequence[int]) -> bool:
    """Tell whether the losses read their outputs alone; `numbers`: the indices of the outputs.

    Store the outputs and compute their losses; then overwrite the values that modules keep, and all
    weights and buffers, and compute the losses of the same outputs again. They must be equal and
    reach no weight.
    """
    weights = [*trial.model.parameters()]
    with trial.restore(), torch.enable_grad():
        _run_on_other_values(trial, numbers, weights)
        with trial.randomness.forward(0):
            output = call_model(trial.model, clone_tensors(trial.example[0]))
        outputs = [_get_output(output, number) for number in numbers]
        expected = [trial.compute_loss(_detach(one)) for _ in range(ROUNDS) for one in outputs]
    with trial.restore(), torch.enable_grad():
        _run_on_other_values(trial, numbers, weights)
        with _change_tensors([*weights, *trial.model.buffers()]):
            actual = [trial.compute_loss(_detach(one)) for _ in range(ROUNDS) for one in outputs]
    reached = set().union(*map(_find_leaves, actual))
    return reached.isdisjoint(map(id, weights)) and all(map(has_equal_values, expected, actual))


def _run_whole(trial: LossTrial, number: int) -> _Result:
    """Return the loss of an output, given by its number, where all modules have just run.

    The modules first run on other values, so that a value that the loss reads from an earlier run
    changes the result.
    """
    with trial.restore(), torch.enable_grad():
        _run_on_other_values(trial, [number], [*trial.model.parameters()])
        for _ in range(ROUNDS):
            with trial.randomness.forward(0):
                output = call_model(trial.model, clone_tensors(trial.example[0]))
            loss = trial.compute_loss(_get_output(output, number))
        return _Result(loss.detach(), _compute_gradients(trial, loss), set())


def _run_alone(
    trial: LossTrial, stage: LossStage, number: int, note: Handler | None = None
) -> _Result:
    """Return the loss of a stage where only its own modules have just run; `note` watches the
    functions that it calls.
    """
    held_storages = {get_storage(t) for t in stage.list_tensors()}
    tensors = [*trial.model.parameters(), *trial.model.buffers()]
    others = [t for t in tensors if get_storage(t) not in held_storages]
    earlier = [piece for piece in trial.pieces if piece.stage < stage.stage]
    calls_before = trial.pieces[stage.stage].calls_before if trial.pieces else {}
    with trial.restore(), torch.enable_grad():
        value = clone_tensors(trial.example[0])
        with trial.randomness.forward(0):
            for piece in earlier:
                value = _detach(piece(value))
        _run_on_other_values(trial, [number], [*trial.model.parameters()])
        for _ in range(ROUNDS):
            _run_on_other_values(trial, [number], others, earlier)
            with _change_tensors(others):
                with trial.randomness.forward(0, calls_before):
                    output = stage.run(_detach(value))
                with FunctionWatch(note) if note is not None else contextlib.nullcontext():
                    loss = trial.compute_loss(output)
        reached = _find_leaves(loss) & {id(p) for p in trial.model.parameters()}
        gradients = (
            {}
            if reached - {id(t) for t in stage.list_tensors()}
            else _compute_gradients(trial, loss)
        )
        return _Result(loss.detach(), gradients, reached)


def _run_on_other_values(
    trial: LossTrial,
    numbers: Sequence[int],
    others: Sequence[torch.Tensor],
    pieces: Sequence[Piece] | None = None,
) -> None:
    """Run the model and its losses, or only `pieces`, on another input and with other values of the
    weights among `others`.

    `numbers`: those of the losses. Afterwards, values that modules and hooks have kept are those of
    another microbatch.
    """
    x = tree_map(change_values, trial.example[0])
    weights = [t for t in others if isinstance(t, nn.Parameter)]
    # the model or the loss may refuse such values; then the kept ones stay
    with contextlib.suppress(Exception), _change_tensors(weights), trial.randomness.forward(1):
        for piece in pieces or ():
            x = _detach(piece(x))
        if pieces is None:
            output = call_model(trial.model, x)
            for number in numbers:
                trial.compute_loss(_get_output(output, number))


def _get_output(output: Any, number: int) -> Any:
    return output[number] if isinstance(output, BlockOutputs) else output


def _detach(value: Any) -> Any:
    """Return copies of a nest's tensors, without their graphs, which may be overwritten."""
    return tree_map(
        lambda t: (
            t.detach().requires_grad_(t.requires_grad).clone() if isinstance(t, torch.Tensor) else t
        ),
        value,
    )


@contextlib.contextmanager
def _change_tensors(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Change the values of `tensors` inside the context, in their own memory, as views of them must
    change too.
    """
    # expanded tensors cannot be written
    written = [t.data for t in tensors if t.layout is torch.strided and 0 not in t.stride()]
    # a GPU may have no room for them
    values = [t.to("cpu", copy=True) for t in written]
    try:
        for t in written:
            if t.is_floating_point() or t.is_complex():
                t.mul_(1.5).add_(0.125)
            else:
                t.copy_(t.logical_not() if t.dtype is torch.bool else t + 1)
        yield
    finally:
        for t, value in zip(written, values):
            t.copy_(value)


def _compute_gradients(trial: LossTrial, loss: torch.Tensor) -> dict[int, torch.Tensor | None]:
    """Return the gradients of a loss by the ids of the weights."""
    if loss.requires_grad:
        with trial.randomness.backward(0):
            loss.backward()
    return {id(p): p.grad for p in trial.model.parameters()}


def _find_leaves(loss: torch.Tensor) -> set[int]:
    """Return the ids of the tensors at the ends of a loss's graph."""
    if loss.grad_fn is None:
        return {id(loss)}
    leaves: set[int] = set()
    visited: set[Any] = {loss.grad_fn}
    waiting: list[Any] = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if hasattr(node, "variable"):
            leaves.add(id(node.variable))
        following = {child for child, _ in node.next_functions if child is not None} - visited
        visited |= following
        waiting += following
    return leaves


# ---- names of what a loss reads


class _Reads:
    """The tensors of a model, besides those of `stage`, with which a loss calls torch's
    functions.
    """

    def __init__(self, trial: LossTrial, stage: LossStage) -> None:
        self._model = trial.model
        self._pieces = trial.pieces
        self._own_modules = {id(m) for module in stage.modules for m in module.modules()}
        self._own_tensors = {id(t) for t in stage.list_tensors()}
        # kind and stage -> names, in order
        self._names: dict[str, dict[str, None]] = {}

    def note(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Call a function, and note the tensors of the model among its arguments."""
        arguments = {id(t) for t in list_tensors((args, kwargs))}
        for kind, name, tensor in self._walk_tensors():
            if id(tensor) in arguments:
                self._names.setdefault(kind, {})[name] = None
        return function(*args, **kwargs)

    def _walk_tensors(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        for kind, named in (
            ("parameters", self._model.named_parameters()),
            ("buffers", self._model.named_buffers()),
        ):
            for name, tensor in named:
                if id(tensor) not in self._own_tensors:
                    yield f"{kind}{self._name_stage(tensor)}", name, tensor
        for name, module in self._model.named_modules():
            attributes = vars(module).items() if id(module) not in self._own_modules else ()
            for key, value in attributes:
                # the tables of nn.Module
                if not isinstance(value, dict) or key not in ("_parameters", "_buffers"):
                    for tensor in list_tensors(value):
                        yield "attributes of modules", f"{name}.{key}" if name else key, tensor

    def _name_stage(self, tensor: torch.Tensor) -> str:
        holders = [
            piece.stage for piece in self._pieces if any(t is tensor for t in piece.list_tensors())
        ]
        return f" of stage {holders[0]}" if holders else ""

    def describe(self, reached: set[int]) -> str:
        """Describe the noted tensors, or else the weights on which the loss depends by way of
        tensors that a hook has kept.
        """
        kinds = [f"{kind} ({list_some(list(names))})" for kind, names in self._names.items()]
        if not kinds and reached:
            named = [(name, p) for name, p in self._model.named_parameters() if id(p) in reached]
            stages = list(dict.fromkeys(self._name_stage(p) for _, p in named))
            kinds = [
                f"activations{stages[0]} (they depend on {list_some([name for name, _ in named])})"
            ]
        return " and ".join(kinds) or "values of other stages (of modules or hooks)"
