"""What the caller writes, loads or reads between two calls reaches every copy that a pipeline has of it: masters of rounded
weights, replicas, the stages of other ranks, and the optimizer that steps."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any, Callable, Dict, List, Tuple

import pytest
import torch
from torch import nn

import ipu_pipe
from tests.support.acts import Counting
from tests.support.models import Composed
from tests.support.processes import run_in_group
from tests.support.runs import assert_same

MOMENTUM = functools.partial(torch.optim.SGD, momentum=0.9)
Batches = List[Tuple[torch.Tensor, torch.Tensor]]
MASTERS = {"method": "pipemare", "precision": "bfloat16_mixed"}
OUTER = {"lr": 0.7}


def set_local_sgd(**args: Any) -> Dict[str, Any]:
    """Return the arguments of a pipeline by LocalSGD on two replicas."""
    return {"method": "local_sgd", "method_args": {"replicas": 2, **args}, "microbatches": None}


def draw_batches(count: int) -> Batches:
    generator = torch.Generator().manual_seed(1)
    return [tuple(torch.randn(2, 8, 4, generator=generator)) for _ in range(count)]


def make_small(
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD, **settings: Any
) -> Tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    return model, optimizer(model.parameters(), **{"lr": 0.1, **settings})


def pipe_of(
    model: nn.Module, optimizer: torch.optim.Optimizer, **arguments: Any
) -> ipu_pipe.Pipeline:
    settings = {"stages": 2, "microbatches": 1, **arguments}
    return ipu_pipe.Pipeline(model, nn.functional.mse_loss, optimizer, **settings)


def fill(model: nn.Module) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(1.0)


def test_weights_of_replicas_are_not_changed_where_they_differ() -> None:
    """Within a round, and with an outer optimizer, a write would reach one replica alone."""
    first, second = draw_batches(2)
    for args in ({"local_steps": 4}, {"local_steps": 1, "outer": OUTER}):
        model, optimizer = make_small()
        pipe = pipe_of(model, optimizer, **set_local_sgd(**args))
        pipe.step(*first)
        if "outer" in args:
            pipe.drain()
        fill(model)
        with pytest.raises(RuntimeError, match="weight: was changed.*replicas"):
            pipe.step(*second)
        pipe.abort()


def swap_and_evaluate(pipe: ipu_pipe.Pipeline) -> None:
    newest = {name: value.clone() for name, value in pipe.model.state_dict().items()}
    fill(pipe.model)
    pipe.evaluate(draw_batches(1))
    pipe.model.load_state_dict(newest)


def fail_inside(pipe: ipu_pipe.Pipeline) -> None:
    with pytest.raises(KeyError), pipe.whole_model():
        raise KeyError


def write_and_load(pipe: ipu_pipe.Pipeline) -> None:
    state = pipe.state_dict()
    fill(pipe.model)
    pipe.load_state_dict(state)


def load_entries(pipe: ipu_pipe.Pipeline) -> None:
    optimizer = pipe._handle.optimizer
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


@pytest.mark.parametrize("optimizer", [MOMENTUM, torch.optim.Adam], ids=["SGD", "Adam"])
@pytest.mark.parametrize("act", [swap_and_evaluate, fail_inside, write_and_load, load_entries])
def test_masters_keep_their_bits_where_nothing_has_changed(
    act: Callable[[ipu_pipe.Pipeline], None], optimizer: Any
) -> None:
    """Story: what was written and put back, or cast by `load_state_dict`, had bfloat16's bits in the masters."""
    states = []
    for acts in (False, True):
        model, own = make_small(optimizer)
        pipe = pipe_of(model, own, **MASTERS)
        for number, batch in enumerate(draw_batches(5)):
            if number == 3:
                pipe.drain()
                if acts:
                    act(pipe)
            pipe.step(*batch)
        states.append(pipe.state_dict()["model"])
        pipe.close()
        # the caller may step the weights that are left
        nn.functional.mse_loss(model(batch[0].bfloat16()).float(), batch[1]).backward()
        own.step()
    assert_same(*states)


def test_a_loaded_state_ends_what_was_refused() -> None:
    model, optimizer = make_small()
    pipe = pipe_of(model, optimizer, **set_local_sgd(local_steps=1, outer=OUTER))
    first, second = draw_batches(2)
    pipe.step(*first)
    state = pipe.state_dict()
    # hooks are no copies
    optimizer.register_step_post_hook(lambda *arguments: None)
    pipe.step(*second)
    pipe.drain()
    fill(model)
    with pytest.raises(RuntimeError, match="load_state_dict"):
        pipe.step(*second)
    pipe.load_state_dict(state)
    pipe.step(*second)


def test_a_buffer_that_the_caller_replaces_is_that_of_all_replicas() -> None:
    models = []
    for replicas in (1, 2):
        torch.manual_seed(0)
        scale = Composed(
            lambda m, x: m.linear(x) * m.factor, linear=nn.Linear(4, 4), factor=torch.ones(())
        )
        model = nn.Sequential(scale, nn.Tanh(), nn.Linear(4, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        pipe = pipe_of(model, optimizer, method="gpipe", replicas=replicas)
        for number, batch in enumerate(draw_batches(3)):
            if number == 1:
                scale.factor = torch.full((), 3.0)
            pipe.step(*batch)
        pipe.close()
        models.append(model.state_dict())
    # the mean of two means of four is the mean of eight but for rounding
    torch.testing.assert_close(*models, rtol=1e-6, atol=1e-6)


def test_entries_of_before_the_first_step_belong_to_masters() -> None:
    """Story: training began without the momentum that the caller's optimizer had."""
    states = []
    for momentum in (0.0, 1.0):
        model, optimizer = make_small(momentum=0.9)
        for p in model.parameters():
            optimizer.state[p]["momentum_buffer"] = torch.full_like(p, momentum)
        pipe = pipe_of(model, optimizer, **MASTERS)
        pipe.step(*draw_batches(1)[0])
        states.append(pipe.state_dict()["model"]["0.weight"])
        # and are in the caller's optimizer
        entries = optimizer.state_dict()["state"][0]["momentum_buffer"]
        saved = pipe.state_dict()["optimizer"]["0.weight/momentum_buffer"]
        torch.testing.assert_close(entries, saved)
    # rate x momentum x buffer
    assert (states[0] - states[1]).numpy() == pytest.approx(0.09, rel=1e-3)


def test_prediction_inside_whole_model_reads_rounded_weights() -> None:
    model, optimizer = make_small()
    pipe = pipe_of(model, optimizer, **MASTERS)
    batch = draw_batches(1)[0]
    pipe.step(*batch)
    outside = pipe.predict(batch[0]), pipe.evaluate([batch])
    with pipe.whole_model():
        weight = model[0].weight
        gradient = weight.grad = torch.ones(4, 4)
        inside = pipe.predict(batch[0]), pipe.evaluate([batch])
        assert model[0].weight.dtype == torch.float32 and model[0].weight.grad is gradient
    assert torch.equal(inside[0], outside[0]) and inside[1] == outside[1]


def train_plainly(batches: Batches, **settings: Any) -> Dict[str, Any]:
    model, optimizer = make_small(Counting, **settings)
    for x, y in batches:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    return model.state_dict()


def train_counting(backend: str, stages: int, **settings: Any) -> nn.Module:
    model, optimizer = make_small(Counting, **settings)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: 1.0)
    pipe = pipe_of(model, optimizer, method="gpipe", stages=stages, backend=backend)
    for x, y in draw_batches(4):
        pipe.step(x, y)
        scheduler.step()
    pipe.close()
    if not settings.get("in_state"):
        assert optimizer.param_groups[0]["k"] == 4
    return model


@pytest.mark.parametrize("in_state", [False, True], ids=["groups", "state"])
def test_an_optimizer_counts_one_step_an_update(in_state: bool) -> None:
    """Story: it counted a step for each stage, and one more for the first scheduler."""
    expected = train_plainly(draw_batches(4), in_state=in_state)
    assert_same(train_counting("emulator", 3, in_state=in_state).state_dict(), expected)


class FirstGroups(torch.optim.SGD):
    """An optimizer that looks at its first group."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        assert self.param_groups[0]["lr"]
        return super().step(closure)


def test_a_stage_without_weights_has_no_step() -> None:
    model, optimizer = make_small(FirstGroups)
    pipe = pipe_of(
        model, optimizer, method="randomized_pipedream", stages=["1", "2", "3"], microbatches=None
    )
    for batch in draw_batches(4):
        pipe.step(*batch)


def test_each_stage_counts_its_own_steps() -> None:
    """A stage that steps alone must not count for the others."""
    model, optimizer = make_small(Counting)
    pipe = pipe_of(model, optimizer, method="randomized_pipedream", stages=3, microbatches=None)
    counts: Dict[int, int] = {}
    pipe.on_update(
        lambda update, stage, parameters: counts.update({stage: counts.get(stage, 0) + 1})
    )
    for batch in draw_batches(6):
        pipe.step(*(torch.cat([t] * 3) for t in batch))
    groups = pipe._require_job().optimizer.param_groups
    pipe.close()
    assert {group["stage"]: group["k"] for group in groups} == counts


def test_entries_under_the_optimizers_own_keys_are_the_callers() -> None:
    """They are in `optimizer.state_dict()`, and a state without them says so."""
    model, optimizer = make_small(Counting, in_state=True)
    pipe = pipe_of(model, optimizer, method="gpipe")
    batches = draw_batches(6)
    for batch in batches[:3]:
        pipe.step(*batch)
    with pytest.warns(UserWarning, match="keys of its own, count, which"):
        saved = pipe.state_dict()
    of_optimizer = copy.deepcopy(optimizer.state_dict())
    other, other_optimizer = make_small(Counting, in_state=True)
    resumed = pipe_of(other, other_optimizer, method="gpipe")
    resumed.load_state_dict(saved)
    other_optimizer.load_state_dict(of_optimizer)
    for batch in batches[3:]:
        pipe.step(*batch)
        resumed.step(*batch)
    assert_same(other.state_dict(), model.state_dict())


def test_a_loop_may_evaluate_first_in_inference_mode() -> None:
    model, optimizer = make_small()
    batch = draw_batches(1)[0]
    pipe = pipe_of(model, optimizer, example=batch)
    with torch.inference_mode():
        pipe.evaluate([batch])
    pipe.step(*batch)


# ---- on ranks


def check_copies_on_rank(rank: int, folder: Path) -> None:
    """Check as one of two ranks what a walk of tests/test_seam.py does not do."""
    on_ranks = {"backend": "distributed", "deadline": 60}
    batches = draw_batches(6)
    # two stages of one rank step apart
    assert_same(train_counting("distributed", 3).state_dict(), train_plainly(batches[:4]))
    # the optimizer's own state is loaded after the pipeline's, and has the entries of rank 0's stages
    model, optimizer = make_small(MOMENTUM)
    pipe = pipe_of(model, optimizer, **on_ranks)
    for batch in batches[:3]:
        pipe.step(*batch)
    saved = [copy.deepcopy({"pipe": pipe.state_dict(), "optimizer": optimizer.state_dict()})]
    torch.distributed.broadcast_object_list(saved, 0)
    for batch in batches[3:]:
        pipe.step(*batch)
    pipe.close()
    other, other_optimizer = make_small(MOMENTUM)
    resumed = pipe_of(other, other_optimizer, **on_ranks)
    resumed.load_state_dict(saved[0]["pipe"])
    other_optimizer.load_state_dict(saved[0]["optimizer"])
    for batch in batches[3:]:
        resumed.step(*batch)
    resumed.close()
    assert_same(other.state_dict(), model.state_dict())
    # a round that does not end, closed where no gradients are recorded
    model, optimizer = make_small()
    pipe = pipe_of(model, optimizer, **set_local_sgd(local_steps=4, outer=OUTER), **on_ranks)
    for batch in batches[:2]:
        pipe.step(*batch)
    with torch.no_grad(), pytest.warns(UserWarning, match="cannot drain"):
        assert pipe.close()


@pytest.mark.slow
def test_ranks_share_what_they_have_copies_of(tmp_path: Path) -> None:
    run_in_group(2, check_copies_on_rank, tmp_path)
