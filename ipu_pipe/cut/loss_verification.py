"""Verify before training that the stage with the loss can compute it alone: from the output, the
labels and its own modules.

A loss may read more of a model by closure: weights, attributes that modules set, activations that
hooks keep. In one process it finds them. A process of a pipeline has live values of its own stages
only, and the loss of a block has its own block only:

    whole     x -> stage 0 -> stage 1 -> stage 2 -> loss     all modules have just run on x
    alone     stored input of stage 2 -> stage 2 -> loss     the other modules ran on other values, and their tensors are changed

The value must be equal bit for bit, and no gradient may reach other weights. Most losses read
outputs alone; a first trial of all losses on stored outputs finds that out.
"""

from __future__ import annotations

import contextlib
import itertools
from typing import Any, Callable, Iterable, Iterator, Mapping, NamedTuple, Sequence

import torch
from torch import nn
from torch.utils._pytree import tree_map

from ipu_pipe.cut.cutting import Piece
from ipu_pipe.cut.verification import change_values
from ipu_pipe.errors import summarize
from ipu_pipe.model.batch import call_model, clone_tensors, get_first_tensor, list_tensors
from ipu_pipe.model.devices import seed_random
from ipu_pipe.model.loss import (
    BlockOutputs,
    Loss,
    LossOfOutput,
    OwnLoss,
    TakePart,
    compute_losses,
    get_block_loss,
)
from ipu_pipe.model.observation import get_storage
from ipu_pipe.model.precision import get_user_loss
from ipu_pipe.model.randomness import (
    KeyedRandomness,
    RandomStates,
    derive_seed,
    restore_random_states,
)
from ipu_pipe.model.restoring import restore_all, restore_function
from ipu_pipe.model.values import list_attributes, walk_tensors
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

    def call_whole(self) -> list[Any]:
        """Run the whole model on the microbatch and return its output for each loss."""
        with self.randomness.forward(0):
            return _list_outputs(call_model(self.model, clone_tensors(self.example[0])))

    def compute_loss(self, output: Any) -> torch.Tensor:
        """Return the loss of one output; the random numbers that the loss draws are the same each
        time.
        """
        seed = derive_seed("verification")
        # this seeds the device, the next line Python and numpy as well
        seed_random(seed, get_first_tensor(self.example[0]).device)
        RandomStates.from_seed(seed).write()
        # a copy, because a loss may write to its labels
        return compute_losses(self.loss, output, clone_tensors(self.example[1]))[0]

    @contextlib.contextmanager
    def restore(self) -> Iterator[None]:
        """Restore model, loss and random states at the end of the context."""
        with restore_random_states(), restore_all(self.model), restore_function(
            get_user_loss(self.loss)
        ):
            yield


class _Result(NamedTuple):
    """The values of a loss in the rounds, as text in which NaN equals NaN, and the names of the
    foreign weights to which its gradient flows.
    """

    values: list[str]
    reached: list[str]


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
    named = _name_tensors(trial.model)
    tensors = [*named.values(), *list_tensors(trial.example)]
    # meta tensors have no values to compare
    if takes_output_alone(trial.loss) or any(t.is_meta for t in tensors):
        return []
    # of each round, since a module may keep a state of its own
    outputs: list[list[Any]] = []

    def store_outputs() -> list[Any]:
        results = trial.call_whole()
        outputs.append([_detach(one) for one in results])
        return results

    expected = _compute_losses(trial, store_outputs)
    stored = iter(outputs)
    # what fails here is tried again, stage by stage
    with contextlib.suppress(Exception):
        if expected == _compute_losses(trial, lambda: list(map(_detach, next(stored))), named):
            return []
    faults = []
    for number, stage in enumerate(stages):
        try:
            why = _explain_difference(trial, stage, number, outputs, expected[number])
        # the user's loss may raise anything
        except Exception as error:
            why = f"fails ({summarize(error)[:160]})"
        if why:
            faults.append(f"loss: {why}, but {place.format(stage=stage.stage)}: {remedy}")
    return faults


def keeps_state(trial: LossTrial) -> bool:
    """Return whether a loss gives another value when it is called again with the same output; model
    and loss are left as they were.
    """
    if takes_output_alone(trial.loss) or get_first_tensor(trial.example[0]).is_meta:
        return False
    with trial.restore(), torch.enable_grad():
        output = trial.call_whole()[-1]
        # copies, because a loss may write to its output
        values = [trial.compute_loss(_detach(output)).tolist() for _ in range(2)]
    # as text, in which NaN equals NaN
    return str(values[0]) != str(values[1])


def _explain_difference(
    trial: LossTrial,
    stage: LossStage,
    number: int,
    outputs: Sequence[Sequence[Any]],
    expected: _Result,
) -> str:
    """Return what loss `number` reads besides what its stage holds; "" if it reads nothing else.

    `outputs`: of each round those for all losses.
    """
    # by storages, since a tied weight or a view is the same memory under another name
    held_storages = {get_storage(t) for t in stage.list_tensors()}
    named = _name_tensors(trial.model).items()
    foreign = {name: t for name, t in named if get_storage(t) not in held_storages}
    calls_before = trial.pieces[stage.stage].calls_before if trial.pieces else {}
    inputs: list[Any] = []

    def store_input() -> list[Any]:
        value = clone_tensors(trial.example[0])
        with trial.randomness.forward(0):
            for piece in trial.pieces[: stage.stage]:
                value = _detach(piece(value))
        inputs.append(value)
        # their losses are not used: the forward was played for the input alone
        return list(map(_detach, outputs[0]))

    _compute_losses(trial, store_input)
    # a cycle, because `run_stage` is played again to name what the loss reads
    rounds = itertools.cycle(zip(inputs, outputs))

    def run_stage() -> list[Any]:
        value, others = next(rounds)
        results = list(map(_detach, others))
        with trial.randomness.forward(0, calls_before):
            results[number] = stage.run(_detach(value))
        return results

    actual = _compute_losses(trial, run_stage, foreign)[number]
    # if the loss itself varies, other values prove nothing
    if actual == expected or (
        not actual.reached and _compute_losses(trial, trial.call_whole)[number] != expected
    ):
        return ""
    read: dict[str, None] = {}

    def note(function: Any, args: Any, kwargs: Any) -> Any:
        arguments = {id(t) for t in list_tensors((args, kwargs))}
        read.update((n, None) for n, t in _walk_tensors(trial.model, stage) if id(t) in arguments)
        return function(*args, **kwargs)

    _compute_losses(trial, run_stage, foreign, note)
    if read:
        return f"reads {list_some(list(read))} of the model"
    if actual.reached:
        return f"reads activations that depend on {list_some(actual.reached)}"
    return "reads values of other stages (of modules or hooks)"


def _name_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters and buffers of a model by their names."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _walk_tensors(model: nn.Module, stage: LossStage) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters, buffers and attributes of a model that `stage` does not hold."""
    held_modules = {id(m) for module in stage.modules for m in module.modules()}
    held_tensors = {id(t) for t in stage.list_tensors()}
    named = list(_name_tensors(model).items())
    for name, module in model.named_modules():
        for key, value, _ in list_attributes(name, vars(module)):
            if id(module) not in held_modules:
                named += walk_tensors(key, value)
    return ((name, tensor) for name, tensor in named if id(tensor) not in held_tensors)


# ---- runs of model and loss


def _compute_losses(
    trial: LossTrial,
    forward: Callable[[], Sequence[Any]],
    foreign: Mapping[str, torch.Tensor] = {},
    note: Handler | None = None,
) -> list[_Result]:
    """Return the losses of `forward`'s outputs, with other values of the tensors `foreign`.

    The model first runs on another input and with other weights, so that a value that a loss reads
    from an earlier run changes the result. `note` watches the functions that losses
    call.
    """
    values: list[list[str]] = []
    with trial.restore(), torch.enable_grad():
        # the model may refuse such values; then the kept ones stay
        with contextlib.suppress(Exception), _change_tensors(
            trial.model.parameters()
        ), trial.randomness.forward(1):
            call_model(trial.model, tree_map(change_values, trial.example[0]))
        with _change_tensors(foreign.values()):
            for _ in range(ROUNDS):
                # a loss that reads one of `foreign` gives another value in here
                outputs = forward()
                with FunctionWatch(note) if note is not None else contextlib.nullcontext():
                    losses = [trial.compute_loss(output) for output in outputs]
                values.append([f"{loss.dtype} {loss.tolist()}" for loss in losses])
        results = zip(zip(*values), losses)
        return [_Result(list(texts), _find_reached(loss, foreign)) for texts, loss in results]


def _find_reached(loss: torch.Tensor, named: Mapping[str, torch.Tensor]) -> list[str]:
    """Return the names of the weights to which the gradient of a loss flows."""
    weights = {name: t for name, t in named.items() if t.requires_grad}
    if not (loss.requires_grad and weights):
        return []
    # the losses of blocks may share parts of one graph
    gradients = torch.autograd.grad(loss, [*weights.values()], retain_graph=True, allow_unused=True)
    return [name for name, gradient in zip(weights, gradients) if gradient is not None]


def _list_outputs(output: Any) -> list[Any]:
    return list(output) if isinstance(output, BlockOutputs) else [output]


def _detach(value: Any) -> Any:
    """Return copies of a nest's tensors, without their graphs, which may be overwritten."""
    return tree_map(
        lambda t: (
            # the copy is no leaf, which autograd would not let a loss write to
            t.detach().requires_grad_(t.requires_grad).clone() if isinstance(t, torch.Tensor) else t
        ),
        value,
    )


@contextlib.contextmanager
def _change_tensors(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
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
                # a sum is not defined for truth values in place
                t.copy_(t.logical_not() if t.dtype is torch.bool else t + 1)
        yield
    finally:
        for t, value in zip(written, values):
            t.copy_(value)
