"""Compare a loop of one's own over `Pipeline` on the double of PopTorch with the emulator.

Nothing here ran on an IPU.
"""

from __future__ import annotations

import copy
import inspect
import math
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Tuple

import pytest
import torch
from torch import nn

import ipu_pipe
from ipu_pipe.backends.ipu.model_facts import ModelFacts
from ipu_pipe.backends.ipu.unsupported import check_model
from ipu_pipe.errors import BadInput, Divergence, RunFault
from ipu_pipe.refusals import Language
from ipu_pipe.schedule.methods import resolve_method
from tests.support.ipu_runs import Source, make_ipu_config, make_ipu_model, simulate_poprun
from tests.support.runs import assert_same, assert_states_close
from tests.support.slow import mark_slow

pytest_plugins = ["poptorch_double"]  # the fixture `poptorch`

UPDATES = 6
SAMPLES = 2  # of a microbatch
SGD: Dict[str, Any] = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}


class IpuCase(NamedTuple):
    """A training of `UPDATES` updates; `ipu`: the section `backend.ipu`; `others`: arguments
    that a config has too."""

    method: str = "gpipe"
    name: str = "mlp"
    microbatches: int = 16
    replicas: int = 1
    per_call: int = 1
    ipu: Dict[str, Any] = {}
    others: Dict[str, Any] = {}
    optimizer: Any = torch.optim.SGD
    settings: Dict[str, Any] = SGD
    clip: Any = None


def make_sgd_of_two_groups(parameters: Any, **settings: Any) -> torch.optim.Optimizer:
    """Return an optimizer whose first parameter has a learning rate of its own."""
    first, *others = parameters
    return torch.optim.SGD([{"params": [first], "lr": 0.2}, {"params": others}], **settings)


TWO_REPLICAS = {"broadcast_buffers": False, "auto_round_num_ipus": True}
RESIDUAL = {"stages": ["1", "2", "4"]}
CASES: Dict[str, IpuCase] = {
    "BatchNorm, clipped": IpuCase(others=RESIDUAL, name="residual", clip=(0.1, "global")),
    "pipedream_flush": IpuCase(
        "pipedream_flush", optimizer=torch.optim.AdamW, settings={"lr": 0.01, "weight_decay": 0.1}
    ),
    "calls of 2": IpuCase(per_call=2),
    "calls of 3, replicas": IpuCase(replicas=2, per_call=3, ipu=TWO_REPLICAS),
    "local losses, calls of 2": IpuCase("local_greedy", per_call=2),
    "two groups": IpuCase(optimizer=make_sgd_of_two_groups),
    "decoupled decay": IpuCase(
        optimizer=torch.optim.Adam,
        settings={"lr": 0.01, "weight_decay": 0.1, "decoupled_weight_decay": True},
    ),
}
# the IPUs' torch 2.0.1 has no such setting
if "decoupled_weight_decay" not in inspect.signature(torch.optim.Adam).parameters:
    del CASES["decoupled decay"]


def compute_rate_factor(k: int) -> float:
    """Return the share of the learning rate in update k."""
    return 1.0 / (1 + k / 4)


def make_ipu_batch(case: IpuCase, k: int, updates: int = 1) -> Tuple[torch.Tensor, torch.Tensor]:
    """Return the batch of a step of several updates, of which k is the first."""
    samples = SAMPLES * case.microbatches * case.replicas * updates
    x, y = Source().train_batch(0, k // updates, samples)
    return x, y


class IpuLoop:
    """Loop of one's own over a case, on PopTorch's double or the emulator; a call of the double
    has several updates."""

    def __init__(self, case: IpuCase, backend: str = "poptorch", **keys: Any) -> None:
        self.case = case
        self.model = make_ipu_model(case.name)
        self.optimizer = case.optimizer(self.model.parameters(), **case.settings)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, compute_rate_factor)
        arguments: Dict[str, Any] = {
            "clip": case.clip,
            "replicas": case.replicas,
            **case.others,
            **keys,
        }
        if backend == "poptorch":
            arguments["backend_args"] = {"ipu": {"device_iterations": case.per_call, **case.ipu}}
        self.pipe = ipu_pipe.Pipeline(
            self.model,
            nn.functional.cross_entropy,
            self.optimizer,
            case.method,
            microbatches=case.microbatches,
            backend=backend,
            **arguments,
        )
        self.updates: List[Any] = []

    def run(self, first: int = 0, last: int = UPDATES) -> None:
        """Make the updates first..last-1; the updates of a call have the learning rate of its
        first."""
        per_call, per_step = self.case.per_call, self.pipe.updates_per_call
        for k in range(first, last, per_step):
            self.updates += self.pipe.step(*make_ipu_batch(self.case, k, per_step))
            if (k + per_step) % per_call == 0:
                for _ in range(per_call):
                    self.scheduler.step()

    def close(self) -> Dict[str, torch.Tensor]:
        self.updates += self.pipe.close()
        return dict(self.model.state_dict())


@pytest.mark.parametrize("name", mark_slow(CASES, lambda name: name == "two groups"))
def test_a_loop_gives_the_weights_and_losses_of_the_emulator(poptorch: Any, name: str) -> None:
    """Others show that the emulator's loop and `train` on either give the same weights."""
    case = CASES[name]
    loop, emulator_loop = IpuLoop(case), IpuLoop(case, "emulator")
    assert loop.pipe.updates_per_call == case.per_call and emulator_loop.pipe.updates_per_call == 1
    loop.run()
    emulator_loop.run()
    assert loop.pipe.finished == loop.pipe.updates == UPDATES and loop.pipe.in_flight == 0
    weights = loop.close()
    assert_same(weights, emulator_loop.close())
    assert [update.index for update in loop.updates] == list(range(UPDATES))
    losses = [[update.loss for update in each.updates] for each in (loop, emulator_loop)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert poptorch._device.ipus_by_holder == {}
    # else the comparison would show nothing
    start = make_ipu_model(case.name).state_dict()
    assert any(not torch.equal(start[key], value) for key, value in weights.items())


# ---- between steps


def test_it_evaluates_and_predicts_on_the_ipus(poptorch: Any) -> None:
    """Evaluation and prediction equal the emulator's before the first step and between steps,
    for any number of samples, and training continues."""
    case = CASES["calls of 2"]
    x, y = make_ipu_batch(case, 7)
    example = x[:SAMPLES], y[:SAMPLES]
    loops = [IpuLoop(case, backend, example=example) for backend in ("poptorch", "emulator")]
    for first in (0, 2):
        ours, theirs = (
            loop.pipe.evaluate([(x, y), (x[:5], y[:5])], ["accuracy"]) for loop in loops
        )
        assert ours == pytest.approx(theirs, rel=1e-5)
        outputs = [loop.pipe.predict(x[:11]) for loop in loops]
        assert outputs[0].shape == (11, 4) and torch.allclose(*outputs, atol=1e-5)
        for loop in loops:
            loop.run(first, first + 2)
            assert loop.pipe.drain() == []
        # an evaluation would have brought the weights, too
        with loops[0].pipe.whole_model() as ours_whole, loops[1].pipe.whole_model() as theirs_whole:
            assert_states_close(ours_whole.state_dict(), theirs_whole.state_dict(), 1e-6)
    assert_states_close(loops[0].close(), loops[1].close(), 1e-6)


def test_an_evaluation_that_fails_leaves_the_ipus_to_training(poptorch: Any) -> None:
    """Story: the inference model kept the IPUs, and the next step could not acquire them."""
    loops = [IpuLoop(CASES["calls of 2"], backend) for backend in ("poptorch", "emulator")]
    x, y = make_ipu_batch(loops[0].case, 7)
    for loop in loops:
        loop.run(0, 2)
        with pytest.raises(ZeroDivisionError):
            loop.pipe.evaluate((x / (1 // left), y) for left in (1, 0))
        with pytest.raises(ZeroDivisionError):
            loop.pipe.evaluate([(x, y)], {"share": lambda output, y: 1 / 0})
        assert loop.pipe.predict(x[:0]).shape == (0, 4)
        loop.run(2, 4)
    assert_states_close(loops[0].close(), loops[1].close(), 1e-6)


def test_memory_schedule_and_trace_are_those_of_the_ipus(poptorch: Any, tmp_path: Path) -> None:
    loop = IpuLoop(CASES["calls of 2"], trace=range(4))
    loop.run()
    memory = loop.pipe.memory()
    assert len(memory["stages"]) == 4 and memory["stages"][0]["weight_copies"] == 1
    assert loop.pipe.schedule.stages == 4
    loop.pipe.trace(tmp_path)
    assert (tmp_path / "trace.html").exists()
    loop.pipe.close()


@pytest.mark.parametrize("detaches", [True, False])
def test_an_evaluation_uploads_the_weights_once(
    poptorch: Any, monkeypatch: Any, detaches: bool
) -> None:
    """Story: the first evaluation after a step uploaded them three times: when the model was
    compiled, before the call, and by PopTorch's own check in the call."""
    monkeypatch.setenv("POPTORCH_DOUBLE_IPUS", "8")
    loop = IpuLoop(IpuCase(ipu={"detach_for_evaluation": detaches}))
    batch = make_ipu_batch(loop.case, 7)
    results = set()
    for k in range(3):
        loop.run(k, k + 1)
        poptorch.recorded.events.clear()
        results.add(loop.pipe.evaluate([batch], ["accuracy"])["loss"])
        assert [name for name, _ in poptorch.recorded.events].count("copyWeightsToDevice") == 1
    assert len(results) == 3
    loop.pipe.close()


# ---- states


@pytest.mark.parametrize(
    "name", ["calls of 2", pytest.param("local losses, calls of 2", marks=pytest.mark.slow)]
)
def test_a_saved_state_goes_on_to_the_same_bits(poptorch: Any, name: str) -> None:
    """A state resumes bitwise in a new object, and in one that has made steps."""
    case = CASES[name]
    straight = IpuLoop(case)
    straight.run(0, 4)
    state, rate = copy.deepcopy(straight.pipe.state_dict()), straight.scheduler.state_dict()
    straight.run(4, UPDATES)
    expected = straight.close()
    for steps_before in (0, 2):
        resumed = IpuLoop(case)
        resumed.run(0, steps_before)
        resumed.pipe.load_state_dict(state)
        resumed.scheduler.load_state_dict(rate)
        resumed.optimizer.param_groups[0]["lr"] = resumed.scheduler.get_last_lr()[0]
        resumed.run(4, UPDATES)
        assert resumed.pipe.updates == UPDATES
        assert_same(expected, resumed.close())


def save_loop(case: IpuCase, backend: str = "poptorch", updates: int = 1) -> Dict[str, Any]:
    """Return the state of a loop after some updates."""
    loop = IpuLoop(case, backend)
    loop.run(0, updates)
    state = loop.pipe.state_dict()
    loop.close()
    return state


def test_a_state_that_cannot_go_on_is_refused(poptorch: Any) -> None:
    state = save_loop(IpuCase())
    adam = IpuCase(optimizer=torch.optim.Adam, settings={"lr": 0.01})
    # a state of an earlier version does not name its optimizer
    old = {k: v for k, v in state.items() if k not in ("loss", "contents", "settings")}
    for case, backend, loaded, line in (
        (adam, "poptorch", state, "load_state_dict: state of SGD: this pipeline's optimizer is Adam"),
        (adam, "poptorch", {**old, "format": 1}, "optimizer: the state that was loaded has no "),
        (IpuCase(), "emulator", state, "load_state_dict: the optimizer state is PopTorch's"),
        (IpuCase(), "poptorch", save_loop(IpuCase(), "emulator"),
         "optimizer: the state that was loaded is torch.optim's"),
        (IpuCase(per_call=2), "poptorch", save_loop(IpuCase(), updates=3),
         ".*device_iterations: 2: must divide the 3 updates"),
    ):  # fmt: skip
        other = IpuLoop(case, backend)
        with pytest.raises(BadInput, match=f"^{line}"), other.pipe:
            other.pipe.load_state_dict(loaded)
            other.run(3, 3 + case.per_call)
    assert poptorch._device.ipus_by_holder == {}


# ---- faults


def test_a_batch_that_does_not_fit_changes_nothing(poptorch: Any) -> None:
    case = CASES["calls of 2"]
    straight, loop = IpuLoop(case), IpuLoop(case)
    straight.run()
    expected = straight.close()
    x, y = make_ipu_batch(case, 0)
    pairs = [(x[i : i + 1], y[i : i + 1]) for i in range(32)]
    for args, keys, line in (
        ((x[:31], y[:31]), {}, "31 samples does not divide into 32 microbatches"),
        ((), {"microbatches": pairs[:16]}, "16 microbatches: must be 32"),
    ):
        with pytest.raises(ValueError, match=line):
            loop.pipe.step(*args, **keys)
    loop.run(0, 2)
    with pytest.raises(ValueError, match="a microbatch of 1 samples: must have 2"):
        loop.pipe.step(x, y)
    loop.run(2, UPDATES)
    assert_same(loop.close(), expected)


def test_the_caller_can_neither_step_nor_watch_updates(poptorch: Any) -> None:
    loop = IpuLoop(IpuCase())
    with pytest.raises(BadInput, match="^on_update: PopTorch keeps the weights on the IPUs"):
        loop.pipe.on_update(lambda update, stage, parameters: None)
    loop.run(0, 1)
    with pytest.raises(RuntimeError, match="^optimizer.step"):
        loop.optimizer.step()
    loop.optimizer.param_groups[0]["momentum"] = 0.5
    line = "^optimizer.momentum: 0.5: .*0.9: only the learning rate may change"
    with pytest.raises(BadInput, match=line):
        loop.run(1, 2)
    # before the step, so that the loop goes on; story: it could not
    loop.optimizer.param_groups[0]["momentum"] = SGD["momentum"]
    loop.run(1, 2)
    loop.pipe.close()
    assert poptorch._device.ipus_by_holder == {}


OWN_LOOP = "a loop of your own"
REFUSED: List[Tuple[IpuCase, Dict[str, Any], str]] = [
    (IpuCase(microbatches=4), {}, "microbatches: 4: a PopTorch pipeline of 4 stages needs at least"),
    (IpuCase(clip=(1.0, "stage")), {}, "clip: stage"),
    (IpuCase("local_greedy", ipu={"local": "decoupled"}), {}, "backend_args.ipu.local: decoupled"),
    (IpuCase(ipu={"data_loading": {"mode": "async"}}), {}, f"backend_args.ipu.data_loading.mode: async: {OWN_LOOP}"),
    (IpuCase(ipu={"compile_only": True}), {}, f"backend_args.ipu.compile_only: True: {OWN_LOOP}"),
    (IpuCase(), {"process_group": "gloo"}, "process_group: backend poptorch has no processes"),
]  # fmt: skip


@pytest.mark.parametrize(("case", "keys", "line"), REFUSED)
def test_unsupported_arguments_are_refused_as_by_train(
    poptorch: Any, case: IpuCase, keys: Dict[str, Any], line: str
) -> None:
    with pytest.raises(BadInput) as error:
        IpuLoop(case, **keys).run(0, 1)
    assert any(fault.startswith(line) for fault in error.value.faults), error.value.faults
    assert "PoplarExecutor.compile" not in poptorch.recorded.names()


def test_several_instances_of_poprun_are_refused(poptorch: Any, monkeypatch: Any) -> None:
    settings = make_ipu_config(on="poptorch", replicas=2, stages=4)
    method = resolve_method("gpipe", {})
    facts = ModelFacts(4, {}, [1, 2, 3], [], [], ("sgd", [{}]), has_loop=True)
    assert check_model(settings, method, facts) == []
    simulate_poprun(monkeypatch, 2, 0, 1)
    (fault,) = check_model(settings, method, facts)
    assert Language.PYTHON.say(fault).startswith(
        "backend: poptorch: a loop of your own drives the IPUs of one process"
    )


def test_a_nan_loss_ends_the_loop(poptorch: Any) -> None:
    loop = IpuLoop(IpuCase("naive", microbatches=2))
    x, y = make_ipu_batch(loop.case, 0)
    line = "^update 0 of method naive: the training loss is nan; its batch has numbers"
    with pytest.raises(Divergence, match=line):
        loop.pipe.step(x * math.nan, y)
    loop.pipe.close()
    assert poptorch._device.ipus_by_holder == {}


@pytest.mark.parametrize("is_saved", [False, True])
def test_a_device_error_ends_the_loop_since_its_batches_are_not_kept(
    poptorch: Any, is_saved: bool
) -> None:
    """Story: repeating the updates since the last state would have read the example in place of
    batches that no longer exist."""
    loop = IpuLoop(IpuCase())
    line = r"after update 2: device error \(IPU_RESET\): .*batches are not kept.*state_dict"
    with pytest.raises(RunFault, match=line), loop.pipe:
        loop.run(0, 2)
        if is_saved:
            loop.pipe.state_dict()
        poptorch.recorded.fail("execute", 1)
        loop.run(2, 3)
    assert poptorch._device.ipus_by_holder == {}
    assert not any(len(module._forward_pre_hooks) for module in loop.model.modules())
