"""What the caller writes, loads or reads between two calls reaches every copy that a pipeline has of it: masters of rounded
weights, replicas, the stages of other ranks, and the optimizer that steps."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any, Callable, Dict, List, Tuple

import pytest
import torch
from torch import nn

import ipu_pipe
from tests.support.acts import Counting
from tests.support.processes import run_in_group

Batches = List[Tuple[torch.Tensor, torch.Tensor]]
MASTERS: Dict[str, Any] = {"method": "pipemare", "precision": "bfloat16_mixed"}
LOCAL_SGD: Dict[str, Any] = {
    "method": "local_sgd",
    "method_args": {"replicas": 2, "local_steps": 1},
    "microbatches": None,
}
TWO_REPLICAS: Dict[str, Any] = {"method": "gpipe", "replicas": 2}


def draw_batches(count: int) -> Batches:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(8, 4, generator=generator), torch.randn(8, 4, generator=generator))
        for _ in range(count)
    ]


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


def fill_inside(pipe: ipu_pipe.Pipeline) -> None:
    with pipe.whole_model() as model:
        assert model is not None
        fill(model)


@pytest.mark.parametrize("arguments", [MASTERS, LOCAL_SGD], ids=["masters", "local_sgd"])
@pytest.mark.parametrize(
    "write",
    [
        lambda pipe: fill(pipe.model),
        fill_inside,
        lambda pipe: pipe.model.load_state_dict(
            {name: torch.ones_like(value) for name, value in pipe.model.state_dict().items()}
        ),
    ],
    ids=["in place", "whole_model", "load_state_dict"],
)
def test_weights_that_the_caller_writes_are_trained_on(
    write: Callable[[ipu_pipe.Pipeline], Any], arguments: Dict[str, Any]
) -> None:
    """Story: the next update wrote the masters over them, or averaged them with the other replica's."""
    model, optimizer = make_small(lr=0.0)
    pipe = pipe_of(model, optimizer, **arguments)
    for number, batch in enumerate(draw_batches(2)):
        if number:
            pipe.drain()
            write(pipe)
        pipe.step(*batch)
    state = pipe.state_dict()["model"]
    assert all(bool((value == 1).all()) for value in state.values())


def test_weights_of_replicas_are_not_changed_where_they_differ() -> None:
    """Within a round, and with an outer optimizer, a write would reach one replica alone."""
    first, second = draw_batches(2)
    for arguments, drains in (
        ({**LOCAL_SGD, "method_args": {"replicas": 2, "local_steps": 4}}, False),
        ({**LOCAL_SGD, "method_args": {**LOCAL_SGD["method_args"], "outer": {"lr": 0.7}}}, True),
    ):
        model, optimizer = make_small()
        pipe = pipe_of(model, optimizer, **arguments)
        pipe.step(*first)
        if drains:
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


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
@pytest.mark.parametrize("act", [swap_and_evaluate, fail_inside, write_and_load, load_entries])
def test_masters_keep_their_bits_where_nothing_has_changed(
    act: Callable[[ipu_pipe.Pipeline], None], optimizer: Any
) -> None:
    """Story: what was written and put back, or cast by `load_state_dict`, had bfloat16's bits in the masters."""
    states = []
    for acts in (False, True):
        model, own = make_small(
            optimizer, **({"momentum": 0.9} if optimizer is torch.optim.SGD else {})
        )
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
    torch.testing.assert_close(*states, rtol=0, atol=0)


def test_a_loaded_state_ends_what_was_refused() -> None:
    model, optimizer = make_small()
    outer = {**LOCAL_SGD["method_args"], "outer": {"lr": 0.7}}
    pipe = pipe_of(model, optimizer, **{**LOCAL_SGD, "method_args": outer})
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


class Scale(nn.Module):
    """Multiply by a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("factor", torch.ones(()))
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.factor


@pytest.mark.parametrize("how", ["in place", "whole_model", "replaced"])
def test_a_buffer_that_the_caller_changes_is_that_of_all_replicas(how: str) -> None:
    models = []
    for arguments in ({}, TWO_REPLICAS):
        torch.manual_seed(0)
        model = nn.Sequential(Scale(), nn.Tanh(), nn.Linear(4, 4))
        pipe = pipe_of(model, torch.optim.SGD(model.parameters(), lr=0.1), **arguments)
        for number, batch in enumerate(draw_batches(3)):
            if number == 1 and how == "in place":
                model[0].factor.fill_(3.0)
            elif number == 1 and how == "replaced":
                model[0].factor = torch.full((), 3.0)
            elif number == 1:
                with pipe.whole_model() as whole:
                    assert whole is not None
                    whole[0].factor.fill_(3.0)
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
        torch.testing.assert_close(
            entries, pipe.state_dict()["optimizer"]["0.weight/momentum_buffer"]
        )
    torch.testing.assert_close(
        states[0] - states[1], torch.full((4, 4), 0.09), rtol=1e-3, atol=1e-6
    )


def test_prediction_inside_whole_model_reads_rounded_weights() -> None:
    model, optimizer = make_small()
    pipe = pipe_of(model, optimizer, **MASTERS)
    batch = draw_batches(1)[0]
    pipe.step(*batch)
    outside = pipe.predict(batch[0]), pipe.evaluate([batch])
    with pipe.whole_model() as whole:
        assert whole is not None and whole[0].weight.dtype == torch.float32
        gradient = whole[0].weight.grad = torch.ones(4, 4)
        inside = pipe.predict(batch[0]), pipe.evaluate([batch])
        assert whole[0].weight.dtype == torch.float32 and whole[0].weight.grad is gradient
    assert torch.equal(inside[0], outside[0]) and inside[1] == outside[1]


def train_plainly(optimizer_class: Any, batches: Batches, **settings: Any) -> Dict[str, Any]:
    model, optimizer = make_small(optimizer_class, **settings)
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
    expected = train_plainly(Counting, draw_batches(4), in_state=in_state)
    model = train_counting("emulator", 3, in_state=in_state)
    torch.testing.assert_close(model.state_dict(), expected, rtol=0, atol=0)


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
    for batch in batches[3:]:
        pipe.step(*batch)
    pipe.close()
    other, other_optimizer = make_small(Counting, in_state=True)
    resumed = pipe_of(other, other_optimizer, method="gpipe")
    resumed.load_state_dict(saved)
    other_optimizer.load_state_dict(of_optimizer)
    for batch in batches[3:]:
        resumed.step(*batch)
    resumed.close()
    torch.testing.assert_close(other.state_dict(), model.state_dict(), rtol=0, atol=0)


def test_a_loop_may_evaluate_first_in_inference_mode() -> None:
    model, optimizer = make_small()
    batch = draw_batches(1)[0]
    pipe = pipe_of(model, optimizer, example=batch)
    with torch.inference_mode():
        pipe.evaluate([batch])
    pipe.step(*batch)


# ---- on ranks


def check_copies_on_rank(rank: int, folder: Path) -> None:
    """Check as one of two ranks what the tests above check on the emulator."""
    batches = draw_batches(6)
    # the whole model has the masters of both ranks
    model, optimizer = make_small(lr=0.0)
    pipe = pipe_of(model, optimizer, backend="distributed", deadline=60, **MASTERS)
    pipe.step(*batches[0])
    for everywhere in (False, True):
        with pipe.whole_model(everywhere=everywhere) as whole:
            for value in [] if whole is None else whole.state_dict().values():
                assert value.dtype == torch.float32 and not value.isnan().any()
            if everywhere:
                assert whole is not None
                fill(whole)
    pipe.step(*batches[1])
    state = pipe.state_dict()
    assert all(bool((value == 1).all()) for value in state.get("model", {}).values())
    pipe.close()
    # two stages of one rank step apart
    expected = train_plainly(Counting, batches[:4])
    trained = train_counting("distributed", 3).state_dict()
    torch.testing.assert_close(trained, expected, rtol=0, atol=0)
    # the optimizer's own state is loaded after the pipeline's, and has the entries of rank 0's stages
    model, optimizer = make_small(momentum=0.9)
    pipe = pipe_of(model, optimizer, backend="distributed", deadline=60)
    for batch in batches[:3]:
        pipe.step(*batch)
    file = io.BytesIO()
    torch.save({"pipe": pipe.state_dict(), "optimizer": optimizer.state_dict()}, file)
    written = [file.getvalue()]
    torch.distributed.broadcast_object_list(written, 0)
    for batch in batches[3:]:
        pipe.step(*batch)
    pipe.close()
    other, other_optimizer = make_small(momentum=0.9)
    resumed = pipe_of(other, other_optimizer, backend="distributed", deadline=60)
    saved = torch.load(io.BytesIO(written[0]), weights_only=True)
    resumed.load_state_dict(saved["pipe"])
    other_optimizer.load_state_dict(saved["optimizer"])
    for batch in batches[3:]:
        resumed.step(*batch)
    resumed.close()
    torch.testing.assert_close(other.state_dict(), model.state_dict(), rtol=0, atol=0)
    # a round that does not end, closed where no gradients are recorded
    model, optimizer = make_small()
    outer = {"replicas": 2, "local_steps": 4, "outer": {"lr": 0.7}}
    arguments = {**LOCAL_SGD, "method_args": outer, "backend": "distributed", "deadline": 60}
    pipe = pipe_of(model, optimizer, **arguments)
    for batch in batches[:2]:
        pipe.step(*batch)
    with torch.no_grad(), pytest.warns(UserWarning, match="cannot drain"):
        assert pipe.close()


@pytest.mark.slow
def test_ranks_share_what_they_have_copies_of(tmp_path: Path) -> None:
    run_in_group(2, check_copies_on_rank, tmp_path)
