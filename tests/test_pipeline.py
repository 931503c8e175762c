"""Compare a loop of one's own over `Pipeline` with `ipu_pipe.train` on the emulator: weights,
buffers and losses are equal bit for bit."""

from __future__ import annotations

import contextlib
import copy
import warnings
from pathlib import Path
from typing import Any, Dict, List, Tuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ipu_pipe
from ipu_pipe.errors import BadInput, Divergence, RunFault
from ipu_pipe.schedule.methods import METHODS, DefaultAccumulate
from tests.support.loops import (
    EPOCH,
    STAGES,
    UPDATES,
    Case,
    Loop,
    make_case_pipeline,
    make_loop_batch,
    make_perceptron,
    make_sgd,
    train_with_config,
)
from tests.support.runs import assert_same
from tests.support.slow import mark_slow

T1_T2 = {"t1": {"anneal_updates": 5}, "t2": {"decay": 0.5}}
CASES: Dict[str, Case] = {
    "pipedream_n2": Case("pipedream", 2),
    "pipemare_t1_t2": Case("pipemare", 4, T1_T2),
    "pipemare_warmup": Case("pipemare", 4, T1_T2, warmup=4),
    "pipemare_recompute": Case("pipemare", 2, {"recompute": {"segments": 2}}),
    "pipemare_hogwild": Case("pipemare", 1, {"hogwild": {"max": 4, "mean": 2}}),
    "pb_sc_lwp": Case(
        "pipelined_backprop",
        1,
        {"spike_compensation": {}, "weight_prediction": {"form": "velocity"}},
    ),
    "pb_virtual_split": Case(
        "pipelined_backprop", 1, {"split_backward": True}, others={"stages_per_device": 2}
    ),
    "pipedream_clip_delayed": Case("pipedream", 1, clip=(0.5, "delayed_global")),
    "pipedream_clip_stage": Case("pipedream", 1, clip=(0.5, "stage")),
    "gpipe_clip_global": Case("gpipe", 4, clip=(0.5, "global")),
    "gpipe_replicas": Case("gpipe", 2, replicas=2),
    "pipedream_replicas": Case("pipedream", 2, replicas=3),
    "local_overlapping_n3": Case("local_overlapping", 3),
    "local_sgd_rounds": Case("local_sgd", 1, {"local_steps": 3}),
    "local_sgd_replicas": Case("local_sgd", 1, {"local_steps": 2, "replicas": 2}),
    "diloco": Case(
        "local_sgd",
        1,
        {"local_steps": 3, "outer": {"name": "sgd", "lr": 0.7, "momentum": 0.9, "nesterov": True}},
    ),
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


@pytest.mark.parametrize("name", sorted(CASES))
def test_a_loop_gives_the_bits_of_train(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    expected, losses = train_with_config(case, tmp_path / "run")
    loop = Loop(case)
    with warnings.catch_warnings():
        # such as a scheduler's, that it stepped before the optimizer
        warnings.simplefilter("error", UserWarning)
        loop.run()
        model = loop.close()
    assert_same(expected.state_dict(), model.state_dict())
    assert loop.losses == losses


def test_dropout_draws_as_in_train(tmp_path: Path) -> None:
    case = CASES["pipemare_t1_t2"]
    expected, _ = train_with_config(case, tmp_path / "run", dropout=0.3)
    loop = Loop(case, dropout=0.3)
    torch.manual_seed(1)
    loop.run()
    assert_same(expected.state_dict(), loop.close().state_dict())
    # torch's generators are the caller's
    state = torch.get_rng_state()
    torch.manual_seed(1)
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize(
    "name", ["pipedream", "pipemare_t1_t2", "pb_sc_lwp", "pipedream_2bw", "local_sgd"]
)
def test_drains_and_rates_matter(name: str) -> None:
    """Check that drains and learning rates change the weights; otherwise the comparisons above
    would show nothing."""
    models = []
    for drains, rate_late in ((True, False), (False, False), (True, True)):
        loop = Loop(CASES[name])
        if rate_late:
            loop.scheduler.step()
        loop.run(drains=drains)
        models.append(torch.cat([p.detach().flatten() for p in loop.close().parameters()]))
    assert not torch.equal(models[0], models[1])
    assert not torch.equal(models[0], models[2])


LEAVES = {
    "gpipe": [[0], [1], [2], [3]],
    "pipedream_flush": [[0], [1], [2], [3]],
    "pipedream": [[], [], [], [0], [1]],
    "pipedream_2bw": [[], [0], [1], [2]],
    "pipemare_t1_t2": [[], [], [0], [1]],
    "local_sgd_rounds": [[], [0], [1, 2], [], [3], [4, 5]],
    "local_sgd": [[], [0], [1], [2], [3, 4], []],
}


@pytest.mark.parametrize("name", sorted(LEAVES))
def test_updates_leave_at_these_steps(name: str) -> None:
    loop = Loop(CASES[name])
    loop.run(0, len(LEAVES[name]), drains=False)
    assert loop.left == LEAVES[name]
    assert loop.pipe.updates == len(LEAVES[name])
    assert loop.pipe.in_flight == loop.pipe.updates - loop.pipe.finished
    before = loop.pipe.in_flight
    assert [update.index for update in loop.pipe.drain()] == list(
        range(loop.pipe.updates - before, loop.pipe.updates)
    )
    assert loop.pipe.in_flight == 0 and loop.pipe.drain() == []
    loop.close()


RESUMED = [name for name in sorted(CASES) if not name.endswith(("hogwild",))]


# one of each kind of state, which `make test` runs
QUICK = {
    "diloco", "gpipe_replicas", "local_overlapping", "local_sgd_rounds", "pb_virtual_split", "pipedream_2bw",
    "pipedream_clip_delayed", "pipemare_t1_t2", "randomized_nag", "spectrain", "zbv",
}  # fmt: skip


@pytest.mark.parametrize("name", mark_slow(RESUMED, QUICK.__contains__))
def test_a_saved_state_goes_on_to_the_same_bits(name: str) -> None:
    """A state resumes bitwise at every step that may drain, in a new object and in one that has
    made steps."""
    case = CASES[name]
    for at in (3, 6):
        straight = Loop(case)
        straight.run(0, at)
        straight.pipe.drain()
        state = copy.deepcopy(straight.pipe.state_dict())
        rate = straight.scheduler.state_dict()
        straight.run(at, UPDATES)
        expected = straight.close().state_dict()
        for steps_before in (0, 3):
            resumed = Loop(case)
            resumed.run(0, steps_before)
            resumed.pipe.load_state_dict(state)
            resumed.scheduler.load_state_dict(rate)
            for group in resumed.optimizer.param_groups:
                group["lr"] = resumed.scheduler.get_last_lr()[0]
            resumed.run(at, UPDATES)
            assert_same(expected, resumed.close().state_dict())


def test_a_state_goes_through_a_file(tmp_path: Path) -> None:
    loop = Loop(CASES["local_greedy"])
    loop.run(0, 4)
    torch.save(loop.pipe.state_dict(), tmp_path / "state.pt")
    loaded = torch.load(tmp_path / "state.pt", weights_only=True)
    again = Loop(CASES["local_greedy"])
    again.pipe.load_state_dict(loaded)
    with warnings.catch_warnings():
        # a new scheduler's, that it stepped before the optimizer
        warnings.simplefilter("error", UserWarning)
        for each_loop in (loop, again):
            each_loop.run(4, 8, drains=False)
            each_loop.close()
    # rates aside, which are the caller's
    assert again.pipe.updates == loop.pipe.updates
    with pytest.raises(BadInput, match="^load_state_dict: lacks"):
        Loop(CASES["gpipe"]).pipe.load_state_dict({"model": {}})
    with pytest.raises(BadInput, match="^load_state_dict: .*local_greedy"):
        Loop(CASES["gpipe"]).pipe.load_state_dict(loaded)


# ---- the caller's optimizer


def test_a_state_has_the_settings_of_the_optimizers_groups() -> None:
    """A loaded state restores the settings of the groups, as torch's load_state_dict does, so
    that a scheduler that computes a rate from the previous one continues correctly."""

    def make_scheduled_pipeline(
        optimizer_class: Any = torch.optim.SGD, **keys: Any
    ) -> Tuple[ipu_pipe.Pipeline, Any, Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
        optimizer = optimizer_class(model.parameters(), lr=0.1)
        pipe = ipu_pipe.Pipeline(
            model, F.cross_entropy, optimizer, "gpipe", stages=["1"], microbatches=1, **keys
        )
        return pipe, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)

    x, y = torch.randn(4, 4), torch.tensor([0, 1, 2, 0])
    pipe, optimizer, scheduler = make_scheduled_pipeline()
    for _ in range(5):
        pipe.step(x, y)
        scheduler.step()
    state, saved = pipe.state_dict(), scheduler.state_dict()
    again, other, going_on = make_scheduled_pipeline()
    again.load_state_dict(state)
    going_on.load_state_dict(saved)
    # also before the first step
    assert (again.updates, again.finished, other.param_groups[0]["lr"]) == (
        5,
        5,
        optimizer.param_groups[0]["lr"],
    )
    for pipeline, its_scheduler in ((pipe, scheduler), (again, going_on)):
        pipeline.step(x, y)
        its_scheduler.step()
    assert other.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"] != 0.1
    assert again.updates == 6
    assert_same(pipe.model.state_dict(), again.model.state_dict())
    with pytest.raises(
        BadInput, match="^load_state_dict: state of SGD: this pipeline's optimizer is Adam"
    ):
        make_scheduled_pipeline(torch.optim.Adam)[0].load_state_dict(state)
    with pytest.raises(BadInput, match="^clip: 1.0: must be a norm, or a pair"):
        make_scheduled_pipeline(clip="1.0")


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


def test_each_group_has_its_own_rates_and_momentum() -> None:
    """gpipe with two groups under OneCycleLR equals the plain loop; a parameter in no group does
    not change."""
    case = Case("gpipe", 2)

    def make_grouped_optimizer(model: nn.Module) -> Any:
        matrices = [p for p in model.parameters() if p.dim() > 1]
        vectors = [p for name, p in model.named_parameters() if p.dim() == 1 and name != "0.bias"]
        optimizer = torch.optim.SGD(
            [{"params": matrices, "weight_decay": 1e-2}, {"params": vectors, "momentum": 0.5}],
            lr=0.1,
            momentum=0.9,
        )
        return optimizer, torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=[0.2, 0.1], total_steps=20
        )

    plain = make_perceptron()
    optimizer, scheduler = make_grouped_optimizer(plain)
    for k in range(8):
        x, y = make_loop_batch(case, k)
        optimizer.zero_grad()
        for part, labels in zip(x.chunk(2), y.chunk(2)):
            (nn.functional.cross_entropy(plain(part), labels) / 2).backward()
        optimizer.step()
        scheduler.step()
    model = make_perceptron()
    optimizer, scheduler = make_grouped_optimizer(model)
    with make_case_pipeline(case, model, optimizer) as pipe:
        for k in range(8):
            pipe.step(*make_loop_batch(case, k))
            scheduler.step()
    assert_same(plain.state_dict(), model.state_dict())
    assert torch.equal(model[0].bias, make_perceptron()[0].bias)


def test_a_late_stage_steps_by_the_settings_of_its_batch() -> None:
    """If the rate drops to 0 after step 2, in-flight updates keep their rates and later updates
    change nothing."""
    loop = Loop(CASES["pipedream"])
    for k in range(6):
        if k == 3:
            loop.optimizer.param_groups[0]["lr"] = 0.0
        loop.pipe.step(*make_loop_batch(loop.case, k))
    other = Loop(CASES["pipedream"])
    for k in range(3):
        other.pipe.step(*make_loop_batch(other.case, k))
    weights = [dict(each_loop.close().named_parameters()) for each_loop in (loop, other)]
    for name in weights[0]:
        assert torch.equal(weights[0][name], weights[1][name])


def test_a_plateau_scheduler_needs_nothing_special() -> None:
    loop = Loop(CASES["pipemare_t1_t2"])
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(
        loop.optimizer, patience=0, threshold=1.0
    )
    for k in range(8):
        for update in loop.pipe.step(*make_loop_batch(loop.case, k)):
            scheduler.step(update.loss)
    assert loop.optimizer.param_groups[0]["lr"] < 0.05 * 1e-3
    loop.close()


def test_other_optimizers_and_loaded_states() -> None:
    """With an AdamW whose state was loaded, gpipe continues as the plain loop does."""
    case = Case("gpipe", 2)
    plain = make_perceptron()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)

    def step_plainly(k: int) -> None:
        x, y = make_loop_batch(case, k)
        optimizer.zero_grad()
        for part, labels in zip(x.chunk(2), y.chunk(2)):
            (nn.functional.cross_entropy(plain(part), labels) / 2).backward()
        optimizer.step()

    for k in range(3):
        step_plainly(k)
    model = make_perceptron()
    model.load_state_dict(plain.state_dict())
    loaded = torch.optim.AdamW(model.parameters(), lr=0.01)
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    with make_case_pipeline(case, model, loaded) as pipe:
        for k in range(3, 6):
            pipe.step(*make_loop_batch(case, k))
            step_plainly(k)
    assert_same(plain.state_dict(), model.state_dict())
    with pytest.raises(BadInput, match="^optimizer: LBFGS"):
        make_case_pipeline(case, model, torch.optim.LBFGS(model.parameters()))


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
    last.step(*make_loop_batch(case, 0))
    last.close()
    for parameters in (
        make_perceptron().parameters(),
        [*make_perceptron().parameters(), *model.parameters()],
    ):
        with pytest.raises(
            BadInput, match="^optimizer: 12 of its (12|24) parameters are not the model's"
        ):
            make_case_pipeline(case, model, make_sgd(parameters))


# ---- evaluation, prediction, the whole model


def test_evaluation_and_prediction_see_the_newest_weights() -> None:
    loop = Loop(CASES["pipedream"])
    loop.run(0, 4, drains=False)
    x, y = make_loop_batch(Case("gpipe", 3), 50)
    batches = [(x[:5], y[:5]), (x[5:], y[5:])]
    measured = loop.pipe.evaluate(
        batches, {"right": lambda output, labels: (output.argmax(1) == labels).double().mean()}
    )
    output = loop.pipe.predict(x)
    with loop.pipe.whole_model() as model:
        model.eval()
        with torch.no_grad():
            expected = model(x)
        model.train()
    assert torch.equal(output, expected)
    assert measured["loss"] == pytest.approx(
        float(nn.functional.cross_entropy(expected, y)), rel=1e-12
    )
    assert measured["right"] == pytest.approx(
        float((expected.argmax(1) == y).double().mean()), rel=1e-12
    )
    assert loop.pipe.evaluate(batches) == {"loss": measured["loss"]}
    # the updates of the drain are not lost
    assert [update.index for update in loop.pipe.step(*make_loop_batch(loop.case, 4))] == [1, 2, 3]
    loop.close()


def test_on_update_sees_each_stage_after_its_step() -> None:
    stages_by_update: Dict[int, List[int]] = {}
    loop = Loop(CASES["pipedream"])
    averages = {id(p): p.detach().clone() for p in loop.model.parameters()}

    def update_averages(update: int, stage: int, parameters: List[nn.Parameter]) -> None:
        stages_by_update.setdefault(update, []).append(stage)
        for p in parameters:
            averages[id(p)].lerp_(p.detach(), 0.5)

    loop.pipe.on_update(update_averages)
    loop.run(0, 4)
    model = loop.close()
    assert stages_by_update == {k: [0, 1, 2, 3] for k in range(4)}
    assert not any(torch.equal(averages[id(p)], p) for p in model.parameters())


def test_on_update_sees_replicas_of_their_own_before_and_after_their_average() -> None:
    """In rounds of 3 steps with 4 replicas, `on_update` gets each replica's weights, then their
    average; the last round ends early."""
    loop = Loop(CASES["local_sgd_rounds"])
    weights: Dict[Any, List[torch.Tensor]] = {}

    def record_weights(update: Any, stage: int, parameters: List[nn.Parameter]) -> None:
        flat = torch.cat([p.detach().flatten() for p in parameters])
        weights.setdefault((int(update), update.averaged, stage), []).append(flat)

    loop.pipe.on_update(record_weights)
    loop.run(0, 5, drains=False)
    model = loop.close()
    counts = {
        (k, averaged): 4 if not averaged else 1 for k in range(5) for averaged in (False, True)
    }
    expected = {
        (k, averaged): n for (k, averaged), n in counts.items() if not averaged or k in (2, 4)
    }
    assert {key: len(copies) for key, copies in weights.items()} == {
        (k, averaged, stage): n for (k, averaged), n in expected.items() for stage in range(4)
    }
    for k in (2, 4):
        for stage in range(4):
            mean = torch.stack(weights[k, False, stage]).mean(0)
            assert torch.allclose(weights[k, True, stage][0], mean, rtol=1e-12)
    last = [p.detach().flatten() for p in [*model[8].parameters(), *model[10].parameters()]]
    assert torch.equal(weights[4, True, 3][0], torch.cat(last))


# ---- refusals: at the call, without any change


def test_a_batch_must_divide_into_microbatches() -> None:
    loop = Loop(Case("pipedream_flush", 4))
    x, y = make_loop_batch(loop.case, 0)
    for arguments in ((x[:14], y[:14]), (x, y[:8]), (x[:0], y[:0])):
        with pytest.raises(ValueError, match="^step: "):
            loop.pipe.step(*arguments)
    with pytest.raises(ValueError, match="^step: 2 microbatches: must be 4"):
        loop.pipe.step(microbatches=[(x, y)] * 2)
    # nothing was changed, and divided microbatches are taken
    loop.pipe.step(microbatches=list(zip(x.chunk(4), y.chunk(4))))
    # another size of microbatches is right on the emulator
    loop.pipe.step(x[:8], y[:8])
    assert loop.pipe.updates == 2
    loop.close()


def test_steps_outside_of_training_are_refused() -> None:
    loop = Loop(CASES["gpipe"])
    batch = make_loop_batch(loop.case, 0)
    with torch.no_grad(), pytest.raises(RuntimeError, match="no_grad"):
        loop.pipe.step(*batch)
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(RuntimeError, match="autocast"):
        loop.pipe.step(*batch)
    loop.run(0, 2)
    loop.close()


def test_an_error_breaks_the_object() -> None:
    loop = Loop(CASES["pipedream"])
    loop.run(0, 3, drains=False)
    x, y = make_loop_batch(loop.case, 3)
    with pytest.raises(IndexError):
        loop.pipe.step(x, y + 7)
    for call in (
        lambda: loop.pipe.step(x, y),
        loop.pipe.drain,
        loop.pipe.state_dict,
        lambda: loop.pipe.evaluate([(x, y)]),
    ):
        with pytest.raises(RunFault, match="earlier call has failed"):
            call()
    assert loop.pipe.close() == []
    # the model is an ordinary one
    loop.model(x).sum().backward()


@pytest.mark.parametrize("name", ["pipedream", "local_greedy", "randomized_nag"])
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


def test_a_refused_pipeline_does_not_release_the_optimizer_of_another() -> None:
    """Its end once took the optimizer from the pipeline that had got it since."""
    model = make_perceptron()
    optimizer = make_sgd(model.parameters())
    refused = make_case_pipeline(CASES["pipedream"], model, optimizer)
    with pytest.raises(BadInput):
        refused.step(torch.zeros(4, 3), torch.zeros(4, dtype=torch.long))
    other = make_case_pipeline(CASES["pipedream"], model, optimizer)
    with pytest.raises(BadInput, match="^optimizer: another Pipeline steps it"):
        refused.step(*make_loop_batch(CASES["pipedream"], 0))
    refused.close()
    with pytest.raises(BadInput, match="^optimizer: another Pipeline steps it"):
        make_case_pipeline(CASES["pipedream"], model, optimizer)
    other.step(*make_loop_batch(CASES["pipedream"], 0))
    other.close()


def test_leaving_with_an_exception_does_not_drain() -> None:
    loop = Loop(CASES["pipedream"])
    with pytest.raises(KeyError):
        with loop.pipe:
            loop.run(0, 3, drains=False)
            raise KeyError
    with pytest.raises(RunFault, match="closed"):
        loop.pipe.drain()


def test_a_loss_that_is_not_finite_is_reported_when_its_update_leaves() -> None:
    loop = Loop(CASES["pipedream"])
    loop.run(0, 1, drains=False)
    x, y = make_loop_batch(loop.case, 1)
    loop.pipe.step(x * float("nan"), y)
    loop.pipe.step(*make_loop_batch(loop.case, 2))
    assert [update.index for update in loop.pipe.step(*make_loop_batch(loop.case, 3))] == [0]
    with pytest.raises(Divergence, match="^update 1 "):
        loop.pipe.step(*make_loop_batch(loop.case, 4))


ROUNDS = {
    "diloco": (CASES["diloco"], 3),
    "blocks": (Case("local_greedy", 1, {"block_accumulation": [1, 2, 1, 3]}), 6),
    "streams": (
        Case(
            "local_sgd", 1, {"local_steps": 4, "outer": {"name": "sgd", "fragments": 2, "delay": 1}}
        ),
        2,
    ),
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
        expectation: Any = contextlib.nullcontext()
        if not each_loop.pipe.can_drain:
            expectation = pytest.warns(UserWarning, match="^close: .*without that step")
        with expectation:
            models.append(each_loop.close().state_dict())
        assert each_loop.pipe.in_flight == 0 and len(each_loop.losses) == 8
    assert_same(*models)


# keys of a state
STATE = {"format": 1, "model": {}, "optimizer": {}, "plain": {}, "updates": 0, "drains": []}


def step_under_no_grad(pipe: ipu_pipe.Pipeline, x: Any, y: Any) -> None:
    with torch.no_grad():
        pipe.step(x, y)


def step_under_autocast(pipe: ipu_pipe.Pipeline, x: Any, y: Any) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        pipe.step(x, y)


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


CALLS: List[Any] = [
    lambda pipe, x, y: pipe.step(),
    lambda pipe, x, y: pipe.step(x),
    lambda pipe, x, y: pipe.step(x, y[:-1]),
    lambda pipe, x, y: pipe.step(x[:7], y[:7]),
    lambda pipe, x, y: pipe.step(x.tolist(), y.tolist()),
    lambda pipe, x, y: pipe.step(x, y, microbatches=[(x, y)] * 2),
    lambda pipe, x, y: pipe.step(microbatches=iter([(x, y)] * 3)),
    lambda pipe, x, y: pipe.step(microbatches=[(x, y), (x, None)]),
    lambda pipe, x, y: pipe.step(microbatches=[(x, y), x]),
    lambda pipe, x, y: pipe.load_state_dict({}),
    lambda pipe, x, y: pipe.load_state_dict({**STATE, "method": "naive"}),
    step_under_no_grad,
    step_under_autocast,
    step_in_another_mode,
    step_with_other_parameters,
]


@pytest.mark.parametrize(
    "name", ["pipedream_n2", "pipemare_recompute", "gpipe_clip_global", "local_overlapping_n3"]
)
def test_calls_that_are_refused_change_nothing(name: str) -> None:
    """A refused call changes neither weights nor counters: the loop continues to the bits of one
    without such calls."""
    case = CASES[name]._replace(microbatches=2)
    plain, loop = Loop(case), Loop(case)
    plain.run(0, 6, drains=False)
    for k in range(6):
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


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ({"method": "pipdream"}, "method: pipdream"),
        ({"method": "pipedream", "microbatches": 0}, "microbatches: 0"),
        ({"method": "pipedream_2bw", "microbatches": 2}, "microbatches: 2"),
        ({"method": "gpipe", "stages": "finest"}, "microbatches: None"),
        ({"method": "gpipe", "method_args": {"t2": {}}}, "method_args"),
        ({"method": "pipedream", "clip": (1.0, "global")}, "clip: global"),
        ({"method": "pipemare", "method_args": {"t1": {}}}, "method_args.t1.anneal_updates"),
        ({"method": "pipemare", "method_args": {"warmup": {"epochs": 1}}}, "method_args.warmup"),
        ({"method": "gpipe", "replicas": 0}, "replicas: 0"),
        ({"method": "gpipe", "stages": ["nowhere"]}, "stages"),
        ({"method": "gpipe", "precision": "float16"}, "precision: float16"),
        ({"method": "spectrain", "optimizer": torch.optim.Adam}, "method: adam"),
        ({"method": "randomized_pipedream", "microbatches": 3}, "microbatches: 3"),
        (
            {"method": "gpipe", "microbatches": 8, "precision": "float32", "backend": "poptorch"},
            "backend: poptorch: PopTorch is not installed",
        ),
        ({"method": "gpipe", "backend": "tpu"}, "backend: tpu"),
    ],
)
def test_arguments_that_do_not_fit(arguments: Dict[str, Any], line: str) -> None:
    """`Pipeline` refuses by the same table as a config, in the words of its arguments."""
    model = make_perceptron()
    keys = {"stages": STAGES, **arguments}
    optimizer = keys.pop("optimizer", make_sgd)(model.parameters())
    with pytest.raises(BadInput) as error:
        pipe = ipu_pipe.Pipeline(model, nn.functional.cross_entropy, optimizer, **keys)
        pipe.step(*make_loop_batch(Case("gpipe", 4), 0))
    assert any(fault.startswith(line) for fault in error.value.faults), error.value.faults


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


def test_the_schedule_and_its_versions() -> None:
    loop = Loop(CASES["pipedream"])
    with pytest.raises(RunFault, match="^schedule: "):
        _ = loop.pipe.schedule
    loop.run(0, EPOCH)
    pipe = loop.pipe
    assert pipe.schedule.update_count > EPOCH and pipe.schedule.stages == 4
    assert pipe.versions.forward(0, EPOCH)[0].tolist() == [0, 0, 0, 0, 1, 2]
    assert len(pipe.partition) == 4 and pipe.replicas == 1 and pipe.replica == 0
    assert loop.close()[0].weight.dtype == torch.float64


@pytest.mark.parametrize("method", ["gpipe", "pipedream", "pipemare"])
def test_microbatches_have_weights(method: str, tmp_path: Path) -> None:
    """Weights of microbatches count as in `train`, also weights of 0 and updates without any
    weight."""

    def weigh(y: torch.Tensor) -> float:
        return float((y == 0).sum())

    case = Case(method, 2)
    expected, losses = train_with_config(case, tmp_path / "run", loss_weight=weigh)
    loop = Loop(case, loss_weight=weigh)
    loop.run()
    assert_same(expected.state_dict(), loop.close().state_dict())
    assert loop.losses == losses
    unweighted = Loop(case)
    unweighted.run()
    assert not torch.equal(unweighted.close()[0].weight, expected[0].weight)


def test_stages_are_planned_for_a_hardware():
    """Stages can be planned for a hardware. Story: a message requested the devices, for which
    there was no argument."""
    layers = [nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    stages = {"count": 2, "by": "hardware"}
    keys = {"stages": stages, "microbatches": 2, "hardware": "m2000"}
    with ipu_pipe.Pipeline(model, nn.functional.cross_entropy, optimizer, **keys) as pipe:
        assert pipe.microbatches == 2
        pipe.step(torch.randn(4, 8), torch.zeros(4, dtype=torch.long))
        assert len(pipe.partition) == 2
