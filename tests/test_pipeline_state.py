"""States of `Pipeline`: wrong ones are refused by one line and change nothing; right ones give the same bits in any object."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Sequence, Tuple

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import ipu_pipe
from ipu_pipe.errors import BadInput
from tests.support.models import Composed
from tests.support.processes import run_in_group
from tests.support.runs import needs_processes

MOMENTS = ("fresh", "used", "in flight")
# settings of torch's optimizers that are True or False, or None
CHOICES = (
    "amsgrad", "capturable", "decoupled_weight_decay", "differentiable", "foreach", "fused",
    "maximize", "nesterov",
)  # fmt: skip


class MovingCenter(nn.Module):
    """A loss that keeps the mean of the outputs so far, as DINO's does."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(4, dtype=torch.float64))

    def forward(self, output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = cross_entropy(output - self.center, y)
        if output.requires_grad:
            self.center.mul_(0.9).add_(output.detach().mean(0), alpha=0.1)
        return loss


def make_batch(k: int) -> Tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(k)
    x = torch.randn(4, 6, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 4, (4,), generator=generator)


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(8, 4)).double()


make_sgd = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def make_pipeline(
    method: str = "pipedream",
    optimizer: Callable[..., torch.optim.Optimizer] = make_sgd,
    loss: Any = cross_entropy,
    **keys: Any,
) -> ipu_pipe.Pipeline:
    model = make_model()
    keys = {"stages": ["2", "4"], "microbatches": 2, **keys}
    return ipu_pipe.Pipeline(model, loss, optimizer(model.parameters()), method, **keys)


def bring_to(moment: str, pipe: ipu_pipe.Pipeline) -> ipu_pipe.Pipeline:
    """Let a pipeline make no step, or some of other batches, of which updates are in flight."""
    for k in range(0 if moment == "fresh" else 5):
        pipe.step(*make_batch(k + 50))
    if moment == "used":
        pipe.drain()
    assert bool(pipe.in_flight) == (moment == "in flight")
    return pipe


def flatten(model: nn.Module) -> torch.Tensor:
    return torch.cat([t.detach().double().flatten() for t in model.state_dict().values()])


def finish(pipe: ipu_pipe.Pipeline, first: int, end: int = 6) -> torch.Tensor:
    """Make the steps `first` to `end`, and return the final weights."""
    for k in range(first, end):
        pipe.step(*make_batch(k))
    pipe.close()
    return flatten(pipe.model)


# ---- wrong states


def list_leaves(value: Any, path: Tuple[Any, ...] = ()) -> Iterator[Tuple[Any, ...]]:
    """Yield the paths of all entries, containers too."""
    if path:
        yield path
    keys = value if isinstance(value, dict) else ()
    for key in range(len(value)) if isinstance(value, list) else keys:
        yield from list_leaves(value[key], (*path, key))


def get_at(state: Any, path: Tuple[Any, ...]) -> Any:
    return functools.reduce(lambda value, key: value[key], path, state)


def list_substitutes(value: Any) -> List[Any]:
    """List values of other types, shapes and dtypes than `value`."""
    others = [None, True, "x", -1, float("nan"), torch.zeros(2, 3, 5), {}, []]
    if isinstance(value, torch.Tensor):
        others += [value.int() if value.is_floating_point() else value.double(), value.float()]
    return others


def is_right(path: Tuple[Any, ...], old: Any, new: Any) -> bool:
    """Return whether a value is another right one in its place: a choice of the optimizer's, or a
    number that it takes."""
    if isinstance(new, torch.Tensor):
        return isinstance(old, torch.Tensor) and (new.dtype, new.shape) == (old.dtype, old.shape)
    if isinstance(old, torch.Tensor):
        return False
    if path[-1] in CHOICES:
        return new is None or isinstance(new, bool)
    is_equal = type(new) is type(old) and new == old
    return is_equal or (path[-1] == "dampening" and type(new) is int)


def make_wrong_states(state: Dict[str, Any]) -> Iterator[Tuple[str, Dict[str, Any]]]:
    """Yield changed states with the change: each entry left out, and replaced by one value of another kind; entries of one
    kind are many, so that each kind meets every value."""
    turn = itertools.count()
    for path in list_leaves(state):
        if path[0] == "contents" and len(path) > 2:
            continue
        old = get_at(state, path)
        changed = copy.deepcopy(state)
        # another number of a parameter, or a drain less, is not another kind of value
        if isinstance(get_at(changed, path[:-1]), dict):
            del get_at(changed, path[:-1])[path[-1]]
            yield f"{path} left out", changed
        others = [new for new in list_substitutes(old) if not is_right(path, old, new)]
        # those of the whole state alone have too few of their kind
        for new in others if len(path) == 1 else [others[next(turn) % len(others)]]:
            changed = copy.deepcopy(state)
            get_at(changed, path[:-1])[path[-1]] = new
            yield f"{path} = {type(new).__name__} {getattr(new, 'dtype', new)}", changed


def make_state(**keys: Any) -> Dict[str, Any]:
    with make_pipeline(**keys) as pipe:
        for k in range(3):
            pipe.step(*make_batch(k))
        return pipe.state_dict()


def resume_and_finish(state: Dict[str, Any], **keys: Any) -> torch.Tensor:
    """Load a state of three steps into a new pipeline, and return the final weights."""
    pipe = make_pipeline(**keys)
    pipe.load_state_dict(state)
    return finish(pipe, 3)


ADAM = functools.partial(torch.optim.Adam, lr=0.01)


@pytest.mark.parametrize(
    "moment, optimizer", [("fresh", make_sgd), ("used", ADAM), ("in flight", make_sgd)]
)
def test_every_wrong_state_is_refused_by_one_line_and_changes_nothing(
    moment: str, optimizer: Callable[..., torch.optim.Optimizer]
) -> None:
    state = make_state(optimizer=optimizer, loss=MovingCenter())
    plain, pipe = (
        bring_to(moment, make_pipeline(optimizer=optimizer, loss=MovingCenter())) for _ in range(2)
    )
    count = 0
    for change, wrong in make_wrong_states(state):
        try:
            pipe.load_state_dict(wrong)
        except BadInput as error:
            assert str(error).startswith("load_state_dict: ") and "\n" not in str(error), change
            count += 1
        else:
            pytest.fail(f"{change}: accepted")
    assert count > 100
    assert torch.equal(finish(pipe, 0), finish(plain, 0))


def test_other_wrong_states_are_refused() -> None:
    state = make_state()
    more = {**state["optimizer"], "9.weight/momentum_buffer": torch.ones(1)}
    wrong = [
        (None, ""), (3, ""), ([], ""), ("x", ""), ({}, "lacks"), ({"model": {}}, "lacks"),
        ({**state, "drains": [2, 1, 3]}, "drains: .*must grow"), ({**state, "updates": 10**30}, "updates"),
        ({**state, "method": "gpipe"}, "state of method gpipe"), ({**state, "optimizer": more}, "optimizer: 9.weight"),
    ]  # fmt: skip
    pipe = make_pipeline()
    for one, line in wrong:
        with pytest.raises(BadInput, match=f"^load_state_dict: .*{line}"):
            pipe.load_state_dict(one)
    adam = make_pipeline(optimizer=ADAM)
    with pytest.raises(BadInput, match="state of SGD: this pipeline's optimizer is Adam"):
        adam.load_state_dict(state)


def test_a_state_of_the_first_format_is_read() -> None:
    """States had no list of contents, no state of a loss, and at first no settings."""
    state = make_state()
    old = {k: v for k, v in state.items() if k not in ("contents", "loss", "settings")}
    assert torch.equal(resume_and_finish({**old, "format": 1}), resume_and_finish(state))


def test_the_entries_of_another_precision_are_cast_together_as_in_torch() -> None:
    state = make_state()
    halves = {key: value.float() for key, value in state["optimizer"].items()}
    with make_pipeline() as pipe:
        pipe.load_state_dict({**state, "optimizer": halves})
        pipe.step(*make_batch(3))
        entries = pipe.state_dict()["optimizer"].values()
        assert {value.dtype for value in entries} == {torch.float64}


# ---- right states


class Harmonic(torch.optim.Optimizer):
    """A rate of lr / k; k is in the group, as Prodigy's d and schedule-free's k are."""

    def __init__(self, params: Any, lr: float = 0.2, k: Any = 0) -> None:
        super().__init__(params, {"lr": lr, "k": k})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            # in place, if it is a tensor
            group["k"] += 1
            group["made"] = int(group["k"])
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["lr"] / int(group["k"]))


# the third one has float32 masters of rounded weights
KINDS: Dict[str, Dict[str, Any]] = {
    "float64": {}, "bfloat16": {"precision": "bfloat16"},
    "masters": {"method": "pipemare", "precision": "bfloat16_mixed"},
    "state of a loss": {"loss": MovingCenter}, "state in groups": {"optimizer": Harmonic},
}  # fmt: skip


def make_of_kind(kind: str) -> ipu_pipe.Pipeline:
    keys = dict(KINDS[kind])
    make_loss = keys.pop("loss", lambda: cross_entropy)
    return make_pipeline(loss=make_loss(), **keys)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_state_gives_the_same_bits_in_any_object(moment: str, kind: str) -> None:
    """Story: a moving center of a loss began at 0 again after a resume."""
    straight = make_of_kind(kind)
    for k in range(3):
        straight.step(*make_batch(k))
        if k != 1:
            straight.drain()
    state = copy.deepcopy(straight.state_dict())
    assert state["drains"] == [1, 3]
    assert "center" not in state.get("loss", {}) or state["loss"]["center"].any()
    expected = finish(straight, 3)
    pipe = bring_to(moment, make_of_kind(kind))
    pipe.load_state_dict(state)
    assert (pipe.updates, pipe.finished) == (3, 3)
    assert torch.equal(finish(pipe, 3), expected)


def write_weight(pipe: ipu_pipe.Pipeline) -> None:
    with torch.no_grad():
        pipe.model[0].weight.zero_()


def write_entries(pipe: ipu_pipe.Pipeline) -> None:
    for entries in pipe.optimizer.state.values():
        entries["momentum_buffer"].zero_()
    assert len(pipe.optimizer.state) == len(list(pipe.model.parameters()))
    # a refused step loads nothing
    with pytest.raises(ValueError, match="does not divide"):
        pipe.step(*(t[:1] for t in make_batch(3)))


@pytest.mark.parametrize(
    "write, keys",
    [
        (write_weight, KINDS["float64"]),
        (write_weight, KINDS["bfloat16"]),
        (write_weight, KINDS["masters"]),
        (write_entries, {}),
        (write_entries, {"method": "gpipe"}),
    ],
)
def test_what_is_written_after_loading_is_trained_on(write: Any, keys: Any) -> None:
    """The state was loaded once more with the first step, over what the loop had written."""
    state = make_state(**keys)
    ends = []
    for moment, writes in (("fresh", True), ("used", True), ("fresh", False)):
        pipe = bring_to(moment, make_pipeline(**keys))
        pipe.load_state_dict(state)
        is_used = moment == "used" and write is write_weight
        with pipe.whole_model() if is_used else contextlib.nullcontext():
            if writes:
                write(pipe)
        ends.append(finish(pipe, 3))
    assert torch.equal(ends[0], ends[1]) and not torch.equal(ends[0], ends[2])


def test_a_loaded_state_is_a_copy() -> None:
    """The caller's tensors were read at the first step, whatever was in them by then."""
    state = make_state()
    expected = resume_and_finish(copy.deepcopy(state))
    pipe = make_pipeline()
    pipe.load_state_dict(state)
    for value in [*state["model"].values(), *state["optimizer"].values()]:
        value.zero_()
    state["plain"]["0.weight/other"] = 5
    state["drains"].append(99)
    assert torch.equal(finish(pipe, 3), expected)


class Branches(nn.Module):
    """A model with a layer that only positive inputs use."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.rare, self.last = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        return self.last(h + self.rare(h) if x.sum() > 0 else h)


@pytest.mark.parametrize("optimizer", [make_sgd, ADAM])
def test_a_rollback_leaves_no_state_of_parameters_that_had_none(
    optimizer: Callable[..., torch.optim.Optimizer],
) -> None:
    x, y = torch.eye(4), torch.arange(4)
    ends = []
    for rolls_back in (False, True):
        torch.manual_seed(0)
        model = Branches()
        pipe = ipu_pipe.Pipeline(
            model, cross_entropy, optimizer(model.parameters()), stages=["last"], microbatches=2
        )
        pipe.step(-x, y)
        state = copy.deepcopy(pipe.state_dict())
        assert not any(key.startswith("rare") for key in state["optimizer"])
        if rolls_back:
            for _ in range(4):
                pipe.step(x, y)
            pipe.load_state_dict(state)
            assert pipe.state_dict()["optimizer"].keys() == state["optimizer"].keys()
        pipe.step(x, y)
        pipe.close()
        ends.append(flatten(model))
    assert torch.equal(*ends)


def test_a_state_can_be_taken_right_after_loading() -> None:
    state = make_state(loss=MovingCenter())
    pipe = make_pipeline(loss=MovingCenter())
    pipe.load_state_dict(state)
    pipe.optimizer.param_groups[0]["lr"] = 0.05
    with torch.no_grad():
        pipe.model[0].bias.zero_()
    taken = pipe.state_dict()
    assert taken.keys() == state.keys() and taken["contents"] == state["contents"]
    assert not taken["model"]["0.bias"].any() and taken["settings"]["groups"][0]["lr"] == 0.05
    for key in ("updates", "drains", "method"):
        assert taken[key] == state[key]
    assert torch.equal(resume_and_finish(taken, loss=MovingCenter()), finish(pipe, 3))


# ---- the loss's own state


def train_with_center(folder: Path, updates: int, resume: bool = False) -> torch.Tensor:
    parts = [make_batch(k) for k in range(6)]
    config = ipu_pipe.configure(
        method="gpipe", steps=updates, stages=["2"], precision="float64", evaluate={"every": 0}, lr_schedule=None,
    )  # fmt: skip
    model = make_model()
    ipu_pipe.train(
        config, folder, model=model, data=ipu_pipe.from_loader(parts, parts[:1]),
        loss=MovingCenter(), optimizer=make_sgd(model.parameters()), quiet=True, resume=resume,
    )  # fmt: skip
    return flatten(model)


def test_a_run_resumes_with_the_state_of_its_loss(tmp_path: Path) -> None:
    whole = train_with_center(tmp_path / "whole", 6)
    train_with_center(tmp_path / "parts", 3)
    assert torch.equal(train_with_center(tmp_path / "parts", 6, resume=True), whole)


def make_centered(**keys: Any) -> ipu_pipe.Pipeline:
    return make_pipeline("gpipe", loss=MovingCenter(), stages=["2"], **keys)


def save_and_load_on_ranks(rank: int, folder: Path) -> None:
    ends = []
    for is_sharded in (False, True):
        pipe = make_centered(backend="distributed")
        for k in range(3):
            pipe.step(*make_batch(k))
        states = [copy.deepcopy(pipe.state_dict(sharded=is_sharded))]
        if not is_sharded:
            if rank == 0:
                saved = {"pipe": states[0], "optimizer": pipe.optimizer.optimizer.state_dict()}
                torch.save(saved, folder / "saved.pt")
            torch.distributed.broadcast_object_list(states, src=0)
            assert states[0]["loss"]["center"].any()
        pipe.close()
        pipe = make_centered(backend="distributed")
        pipe.load_state_dict(states[0])
        again = pipe.state_dict(sharded=is_sharded)
        assert not again or again["contents"] == states[0]["contents"]
        ends.append(finish(pipe, 3))
    torch.save(ends, folder / f"ends-{rank}.pt")


@needs_processes
def test_rank_0_gets_the_state_of_the_last_stages_loss(tmp_path: Path) -> None:
    run_in_group(2, save_and_load_on_ranks, tmp_path)
    end = finish(make_centered(), 0)
    for rank in range(2):
        assert all(torch.equal(one, end) for one in torch.load(tmp_path / f"ends-{rank}.pt"))
    # Story: the optimizer of rank 0, which a loop may save and load too, has the entries of its own
    # stage alone; in one process those of the others were lost
    saved = torch.load(tmp_path / "saved.pt")
    emulated = make_centered()
    emulated.load_state_dict(saved["pipe"])
    emulated.optimizer.optimizer.load_state_dict(saved["optimizer"])
    assert torch.equal(finish(emulated, 3), end)
    # a state that the caller clears is cleared, wherever it was saved
    ends = []
    for ranks in (1, 2):
        emulated = make_centered()
        emulated.load_state_dict({**saved["pipe"], "ranks": ranks})
        emulated.optimizer.optimizer.state.clear()
        ends.append(finish(emulated, 3))
    assert torch.equal(*ends) and not torch.equal(ends[0], end)


@pytest.mark.parametrize("stages", [2, {"count": 2, "by": "flops"}])
def test_a_resumed_loop_keeps_the_cut_that_its_first_microbatch_decided(stages: Any) -> None:
    """Story: the microbatch after the checkpoint had another length, by which the same number of stages was balanced
    elsewhere, so that PipeDream read other weights without a word."""

    def make() -> ipu_pipe.Pipeline:
        torch.manual_seed(0)
        mean = Composed(lambda module, x: x.mean(1))
        first = [nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), mean]
        model = nn.Sequential(*first, nn.Linear(16, 64), nn.Linear(64, 3))
        optimizer = make_sgd(model.parameters())
        return ipu_pipe.Pipeline(model, cross_entropy, optimizer, stages=stages, microbatches=1)

    def train(pipe: ipu_pipe.Pipeline, lengths: Sequence[int]) -> None:
        for length in lengths:
            x = torch.randn(4, length, 8, generator=torch.Generator().manual_seed(length))
            pipe.step(x, torch.tensor([0, 1, 2, 0]))

    straight, resumed, fresh = make(), make(), make()
    train(straight, [100, 101, 102])
    state = straight.state_dict()
    resumed.load_state_dict(state)
    for pipe in (straight, resumed, fresh):
        train(pipe, [1, 1, 1])
    cuts = [pipe.partition.begin_names() for pipe in (straight, resumed, fresh)]
    assert cuts[0] == cuts[1] != cuts[2]
    straight.close()
    resumed.close()
    assert torch.equal(flatten(straight.model), flatten(resumed.model))
    with pytest.raises(BadInput, match="^load_state_dict: stages: 3: must be a list of modules"):
        make().load_state_dict({**state, "stages": 3})


def load_tied_part(**keys: Any) -> torch.Tensor:
    """Load a part of a state after a step, with a weight that has two names in the first stage."""
    torch.manual_seed(0)
    layers = [nn.Linear(width, 4) for width in (6, 4, 4, 4)]
    layers[2].weight = layers[1].weight
    model = nn.Sequential(*layers).double()
    optimizer = make_sgd(model.parameters())
    pipe = ipu_pipe.Pipeline(model, cross_entropy, optimizer, stages=["3"], microbatches=2, **keys)
    pipe.step(*make_batch(0))
    state = pipe.state_dict(sharded=True)
    pipe.step(*make_batch(1))
    pipe.load_state_dict(state)
    return finish(pipe, 2, 3)


def load_tied_part_on_ranks(rank: int, folder: Path) -> None:
    torch.save(load_tied_part(backend="distributed", deadline=20), folder / f"{rank}.pt")


@needs_processes
def test_a_part_is_loaded_where_another_stage_has_a_tied_weight(tmp_path: Path) -> None:
    """Story: the rank of the other stage said that its two names differ: it has NaN there."""
    run_in_group(2, load_tied_part_on_ranks, tmp_path)
    assert torch.equal(torch.load(tmp_path / "1.pt"), load_tied_part())


def train_in_two_phases(**keys: Any) -> List[torch.Tensor]:
    """Train by two pipelines, one after another, over one model, optimizer and loss; return the
    loss's state after each, and the weights."""
    model, loss, seen = make_model(), MovingCenter(), []
    optimizer = make_sgd(model.parameters())
    for method in ("gpipe", "pipedream"):
        with ipu_pipe.Pipeline(
            model, loss, optimizer, method, stages=["2"], microbatches=1, **keys
        ) as pipe:
            for k in range(3):
                pipe.step(*make_batch(k))
        seen.append(loss.center.clone())
    return [*seen, flatten(model)]


def train_in_two_phases_on_ranks(rank: int, folder: Path) -> None:
    torch.save(train_in_two_phases(backend="distributed"), folder / f"{rank}.pt")


@needs_processes
def test_every_rank_has_the_loss_after_the_end(tmp_path: Path) -> None:
    """Story: only the last stage's rank had it, so the next pipeline said that the ranks differ."""
    run_in_group(2, train_in_two_phases_on_ranks, tmp_path)
    expected = train_in_two_phases()
    for rank in range(2):
        assert all(map(torch.equal, torch.load(tmp_path / f"{rank}.pt"), expected))
