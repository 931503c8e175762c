"""Compare a loop of one's own over `Pipeline` with `ipu_pipe.train` on the emulator: weights,
buffers and losses are equal bit for bit."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import warnings
from pathlib import Path
from typing import Any, Callable, Dict, List

import pytest
import torch
from torch import nn

import ipu_pipe
from ipu_pipe.errors import BadInput, RunFault
from ipu_pipe.schedule.methods import METHODS, DefaultAccumulate
from tests.support.loops import (
    Case,
    Loop,
    make_case_pipeline,
    make_loop_batch,
    make_perceptron,
    make_sgd,
    train_with_config,
)
from tests.support.runs import assert_same

PB = "pipelined_backprop"
OUTER = {"name": "sgd", "lr": 0.7, "momentum": 0.9, "nesterov": True}
T1_T2 = {"t1": {"anneal_updates": 5}, "t2": {"decay": 0.5}}
CASES: Dict[str, Case] = {
    "pipedream_n2": Case("pipedream", 2),
    "pipemare_t1_t2": Case("pipemare", 4, T1_T2),
    "pipemare_warmup": Case("pipemare", 4, T1_T2, warmup=4),
    "pipemare_recompute": Case("pipemare", 2, {"recompute": {"segments": 2}}),
    "pipemare_hogwild": Case("pipemare", 1, {"hogwild": {"max": 4, "mean": 2}}),
    "pb_sc_lwp": Case(PB, 1, {"spike_compensation": {}, "weight_prediction": {"form": "velocity"}}),
    "pb_virtual_split": Case(PB, 1, {"split_backward": True}, others={"stages_per_device": 2}),
    "pipedream_clip_delayed": Case("pipedream", 1, clip=(0.5, "delayed_global")),
    "pipedream_clip_stage": Case("pipedream", 1, clip=(0.5, "stage")),
    "gpipe_clip_global": Case("gpipe", 4, clip=(0.5, "global")),
    "gpipe_replicas": Case("gpipe", 2, replicas=2),
    "pipedream_replicas": Case("pipedream", 2, replicas=3),
    "local_overlapping_n3": Case("local_overlapping", 3),
    "local_sgd_rounds": Case("local_sgd", 1, {"local_steps": 3}),
    "local_sgd_replicas": Case("local_sgd", 1, {"local_steps": 2, "replicas": 2}),
    "diloco": Case("local_sgd", 1, {"local_steps": 3, "outer": OUTER}),
    "delay_compensation": Case("pipedream", 2, {"delay_compensation": {}}),
    "gap_aware": Case("pipedream", 2, {"gap_aware": {}}),
    "recompute": Case("gpipe", 2, others={"recompute": True}),
    "randomized_nag": Case("randomized_pipedream", 1, {"nag": 0.5}),
}
for _name, _method in METHODS.items():
    _default = 4 if _method.flushes or _method.default_accumulate is DefaultAccumulate.STAGES else 1
    if _name != "rows":
        CASES[_name] = Case(
            _name, 1 if _method.rounds is not None or _method.history is not None else _default
        )


# cases that differ in how a step is given, and updates leave; other orders of passes are compared elsewhere
GIVEN = [name for name in CASES if name not in METHODS or METHODS[name].order is None]


@pytest.mark.parametrize("name", GIVEN)
def test_a_loop_gives_the_bits_of_train(name: str, tmp_path: Path) -> None:
    """Dropouts draw alike, and torch's generators stay the caller's."""
    case = CASES[name]
    # a mask belongs to the number of its microbatch, of which randomized methods draw some again
    dropout = 0.0 if case.method == "randomized_pipedream" else 0.3
    expected, losses = train_with_config(case, tmp_path / "run", dropout=dropout)
    loop = Loop(case, dropout=dropout)
    state = torch.get_rng_state()
    with warnings.catch_warnings():
        # such as a scheduler's, that it stepped before the optimizer
        warnings.simplefilter("error", UserWarning)
        loop.run()
        model = loop.close()
    assert torch.equal(state, torch.get_rng_state())
    assert_same(expected.state_dict(), model.state_dict())
    assert loop.losses == losses


# ---- the caller's optimizer


def test_the_optimizer_stays_the_callers_handle() -> None:
    for name in ("pipedream", "local_greedy"):
        loop = Loop(CASES[name])
        loop.run(0, 3)
        loop.pipe.drain()
        state = loop.optimizer.state_dict()
        # one momentum for each of the caller's parameters, none for heads of blocks
        assert len(state["state"]) == len(list(loop.model.parameters()))
        with pytest.raises(RuntimeError, match="^optimizer.step"):
            loop.optimizer.step()
        loop.run(3, 5)
        loop.close()
        # it is an ordinary optimizer again
        loop.model(make_loop_batch(loop.case, 0)[0]).sum().backward()
        loop.optimizer.step()


def test_a_scheduler_may_be_made_in_the_middle() -> None:
    model = make_perceptron()
    optimizer = make_sgd(model.parameters())
    hooks: List[int] = []
    optimizer.register_step_post_hook(lambda *arguments: hooks.append(1))
    with make_case_pipeline(Case("gpipe", 2), model, optimizer) as pipe, warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        pipe.step(*make_loop_batch(Case("gpipe", 2), 0))
        # a hook of the caller's own sees the updates alone
        assert len(hooks) == 1
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        pipe.step(*make_loop_batch(Case("gpipe", 2), 1))
        scheduler.step()


def test_an_optimizer_belongs_to_one_pipeline_and_its_model() -> None:
    case = CASES["pipedream"]
    model = make_perceptron()
    optimizer = make_sgd(model.parameters())
    first = make_case_pipeline(case, model, optimizer)
    first.step(*make_loop_batch(case, 0))
    with pytest.raises(BadInput, match="^optimizer: another Pipeline steps it"):
        make_case_pipeline(case, model, optimizer)
    first.close()
    # one that was refused, or that was never used, does not hold it
    refused = make_case_pipeline(case, model, optimizer)
    with pytest.raises(BadInput, match="^model: it fails"):
        refused.step(torch.zeros(4, 3, dtype=torch.float64), torch.zeros(4, dtype=torch.long))
    make_case_pipeline(case, model, optimizer)
    last = make_case_pipeline(case, model, optimizer)
    # nor does the end of a refused one release it from the pipeline that has got it since
    with pytest.raises(BadInput, match="^optimizer: another Pipeline steps it"):
        refused.step(*make_loop_batch(case, 0))
    refused.close()
    with pytest.raises(BadInput, match="^optimizer: another Pipeline steps it"):
        make_case_pipeline(case, model, optimizer)
    last.step(*make_loop_batch(case, 0))
    last.close()
    more = [*make_perceptron().parameters(), *model.parameters()]
    with pytest.raises(BadInput, match="^optimizer: 12 of its 24 parameters are not the model's"):
        make_case_pipeline(case, model, make_sgd(more))


# ---- evaluation, prediction, the whole model


def test_evaluation_and_prediction_see_the_newest_weights() -> None:

    def count_right(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return (output.argmax(1) == labels).double().mean()

    loop = Loop(CASES["pipedream"])
    loop.run(0, 4, drains=False)
    assert (loop.pipe.updates, loop.pipe.finished, loop.pipe.in_flight) == (4, 1, 3)
    x, y = make_loop_batch(Case("gpipe", 3), 50)
    measured = loop.pipe.evaluate([(x[:5], y[:5]), (x[5:], y[5:])], {"right": count_right})
    output = loop.pipe.predict(x)
    with loop.pipe.whole_model() as model, torch.no_grad():
        expected = model.eval()(x)
        model.train()
    assert torch.equal(output, expected)
    loss = float(nn.functional.cross_entropy(expected, y))
    right = float(count_right(expected, y))
    assert measured == pytest.approx({"loss": loss, "right": right}, rel=1e-12)
    # the updates of the drain are not lost
    assert [update.index for update in loop.pipe.step(*make_loop_batch(loop.case, 4))] == [1, 2, 3]
    loop.close()


def test_on_update_sees_replicas_of_their_own_before_and_after_their_average() -> None:
    """In rounds of 3 steps with 4 replicas, `on_update` gets each replica's weights, then their
    average; the last round ends early."""
    loop = Loop(CASES["local_sgd_rounds"])
    weights: Dict[Any, List[torch.Tensor]] = {}

    def record_weights(update: Any, stage: int, parameters: List[nn.Parameter]) -> None:
        flat = nn.utils.parameters_to_vector(parameters).detach().clone()
        weights.setdefault((int(update), update.averaged, stage), []).append(flat)

    loop.pipe.on_update(record_weights)
    loop.run(0, 5, drains=False)
    model = loop.close()
    own, averaged = ({key for key in weights if key[1] == is_mean} for is_mean in (False, True))
    assert own == set(itertools.product(range(5), [False], range(4)))
    assert averaged == set(itertools.product([2, 4], [True], range(4)))
    assert {len(weights[key]) for key in own} == {4}
    for k, is_mean, stage in averaged:
        (mean,) = weights[k, is_mean, stage]
        copies = torch.stack(weights[k, False, stage])
        assert torch.allclose(mean, copies.mean(0), rtol=1e-12)
    last = nn.utils.parameters_to_vector(model[8:].parameters())
    assert torch.equal(weights[4, True, 3][0], last)


# ---- refusals: at the call, without any change


def test_an_error_breaks_the_object() -> None:
    loop = Loop(CASES["pipedream"])
    loop.run(0, 3, drains=False)
    x, y = make_loop_batch(loop.case, 3)
    with pytest.raises(IndexError):
        loop.pipe.step(x, y + 7)
    for call in (lambda: loop.pipe.step(x, y), loop.pipe.drain, loop.pipe.state_dict):
        with pytest.raises(RunFault, match="earlier call has failed"):
            call()
    assert loop.pipe.close() == []
    # the model is an ordinary one
    loop.model(x).sum().backward()


@pytest.mark.parametrize("name", ["pipedream", "local_greedy"])
def test_a_refused_first_step_changes_nothing(name: str) -> None:
    """A user mends the batch and steps again, with the weights of a loop that was never refused."""
    reference = Loop(CASES[name], dropout=0.3)
    loop = Loop(CASES[name], dropout=0.3)
    x, y = make_loop_batch(loop.case, 0)
    before = copy.deepcopy(loop.model.state_dict())
    random_state = torch.get_rng_state()
    for wrong in ((x[:, :3], y), (x, y + 7)):
        with pytest.raises((BadInput, IndexError)):
            loop.pipe.step(*wrong)
        assert loop.pipe.updates == loop.pipe.in_flight == 0
        assert_same(before, loop.model.state_dict())
        assert torch.equal(random_state, torch.get_rng_state())
    for other in (reference, loop):
        torch.manual_seed(1)
        other.run()
    assert_same(reference.close().state_dict(), loop.close().state_dict())
    assert reference.losses == loop.losses


STREAMS = {"name": "sgd", "fragments": 2, "delay": 1}
ROUNDS = {
    "diloco": (CASES["diloco"], 3),
    "blocks": (Case("local_greedy", 1, {"block_accumulation": [1, 2, 1, 3]}), 6),
    "streams": (Case("local_sgd", 1, {"local_steps": 4, "outer": STREAMS}), 2),
}


@pytest.mark.parametrize("name", sorted(ROUNDS))
def test_rounds_drain_at_their_end_only(name: str) -> None:
    """Within a round, calls that drain are refused and change nothing; closing leaves out the
    end of the round and warns."""
    case, length = ROUNDS[name]
    plain, loop = Loop(case), Loop(case)
    plain.run(0, 8, drains=False)
    batch = make_loop_batch(Case("gpipe", 3), 50)
    for k in range(8):
        loop.run(k, k + 1, drains=False)
        assert loop.pipe.can_drain == ((k + 1) % length == 0)
        if loop.pipe.can_drain:
            continue
        following = -(-(k + 1) // length) * length
        calls = (
            loop.pipe.drain,
            loop.pipe.state_dict,
            lambda: loop.pipe.evaluate([batch]),
            lambda: loop.pipe.predict(batch[0]),
            lambda: loop.pipe.whole_model().__enter__(),
            lambda: loop.pipe.load_state_dict({**STATE, "method": case.method}),
        )
        for call in calls:
            with pytest.raises(ValueError, match=f"next time is after {following}"):
                call()
    models = []
    for each_loop in (plain, loop):
        expectation = contextlib.nullcontext()
        if not each_loop.pipe.can_drain:
            expectation = pytest.warns(UserWarning, match="^close: .*without that step")
        with expectation:
            models.append(each_loop.close().state_dict())
        assert each_loop.pipe.in_flight == 0 and len(each_loop.losses) == 8
    assert_same(*models)


# keys of a state
STATE = {"format": 1, "model": {}, "optimizer": {}, "plain": {}, "updates": 0, "drains": []}


def step_inside(make_context: Callable[[], Any]) -> Callable[..., None]:
    """Return a call of `step` inside a context."""

    def step(pipe: ipu_pipe.Pipeline, x: Any, y: Any) -> None:
        with make_context():
            pipe.step(x, y)

    return step


def step_in_another_mode(pipe: ipu_pipe.Pipeline, x: Any, y: Any) -> None:
    pipe.model.eval()
    try:
        pipe.step(x, y)
    finally:
        pipe.model.train()


def step_with_other_parameters(pipe: ipu_pipe.Pipeline, x: Any, y: Any) -> None:
    parameters = pipe.optimizer.param_groups[0]["params"]
    first = parameters[0]
    parameters[0] = nn.Parameter(first.detach().clone())
    try:
        pipe.step(x, y)
    finally:
        parameters[0] = first


CALLS = [
    lambda pipe, x, y: pipe.step(),
    lambda pipe, x, y: pipe.step(x),
    lambda pipe, x, y: pipe.step(x, y[:-1]),
    lambda pipe, x, y: pipe.step(x[:7], y[:7]),
    lambda pipe, x, y: pipe.step(x[:0], y[:0]),
    lambda pipe, x, y: pipe.step(x.tolist(), y.tolist()),
    lambda pipe, x, y: pipe.step(x, y, microbatches=[(x, y)] * 2),
    lambda pipe, x, y: pipe.step(microbatches=iter([(x, y)] * 3)),
    lambda pipe, x, y: pipe.step(microbatches=[(x, y), (x, None)]),
    lambda pipe, x, y: pipe.step(microbatches=[(x, y), x]),
    lambda pipe, x, y: pipe.load_state_dict({}),
    lambda pipe, x, y: pipe.load_state_dict({**STATE, "method": "naive"}),
    step_inside(torch.no_grad),
    step_inside(functools.partial(torch.autocast, "cpu", dtype=torch.bfloat16)),
    step_in_another_mode,
    step_with_other_parameters,
]


@pytest.mark.parametrize("name", ["pipedream_n2", "pipemare_recompute", "local_overlapping_n3"])
def test_calls_that_are_refused_change_nothing(name: str) -> None:
    """A refused call changes neither weights nor counters: the loop continues to the bits of one
    without such calls."""
    case = CASES[name]._replace(microbatches=2)
    plain, loop = Loop(case), Loop(case)
    plain.run(0, 4, drains=False)
    for k in range(4):
        counts = loop.pipe.updates, loop.pipe.in_flight, loop.pipe.finished
        for call in CALLS:
            # a mode is compared with that of the first step
            if k == 0 and call is step_in_another_mode:
                continue
            with pytest.raises(
                (ValueError, RuntimeError), match="^(step|load_state_dict): [^\n]*$"
            ):
                call(loop.pipe, *make_loop_batch(case, k))
        assert counts == (loop.pipe.updates, loop.pipe.in_flight, loop.pipe.finished)
        loop.run(k, k + 1, drains=False)
    assert plain.left == loop.left
    assert_same(plain.close().state_dict(), loop.close().state_dict())
    assert plain.losses == loop.losses


def test_microbatches_have_weights(tmp_path: Path) -> None:
    """Weights of microbatches count as in `train`, also weights of 0 and updates without any."""

    def weigh(y: torch.Tensor) -> float:
        return float((y == 0).sum())

    case = Case("pipedream", 2)
    expected, losses = train_with_config(case, tmp_path / "run", loss_weight=weigh)
    loop = Loop(case, loss_weight=weigh)
    loop.run()
    assert_same(expected.state_dict(), loop.close().state_dict())
    assert loop.losses == losses
    unweighted = Loop(case)
    unweighted.run()
    assert not torch.equal(unweighted.close()[0].weight, expected[0].weight)


def test_stages_are_planned_for_a_hardware() -> None:
    """Stages can be planned for a hardware. Story: a message requested the devices, for which
    there was no argument."""
    case = Case("gpipe", 2, stages={"count": 2, "by": "hardware"})
    model = make_perceptron().float()
    x, y = make_loop_batch(Case("gpipe", 2), 0)
    optimizer = make_sgd(model.parameters())
    with make_case_pipeline(case, model, optimizer, hardware="m2000") as pipe:
        pipe.step(x.float(), y)
        assert len(pipe.partition) == 2


def test_modules_keep_the_modes_that_they_come_with() -> None:
    loop = Loop(CASES["pipedream"])
    statistics = loop.model[3].eval().running_mean.clone()
    with pytest.warns(UserWarning, match="1 module stays in evaluation mode: 3"):
        loop.run(0, 3)
    loop.pipe.evaluate([make_loop_batch(loop.case, 0)])
    loop.run(3, 5)
    loop.model.eval()
    with pytest.raises(RuntimeError, match="mode"):
        loop.run(5, 6)
    loop.model.train()
    loop.model[3].eval()
    loop.run(5, 6)
    assert torch.equal(loop.close()[3].running_mean, statistics)
    whole = Loop(CASES["pipedream"])
    whole.model.eval()
    with pytest.warns(UserWarning, match="came in evaluation mode"):
        whole.run(0, 3)
    assert not torch.equal(whole.close()[3].running_mean, statistics)
