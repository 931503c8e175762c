"""Test the double of PopTorch: it refuses and computes as PopTorch 3.4 does, within the calls that
this library makes.

Sources: PopTorch and PopART, branches sdk-release-3.4 (file names are beside the tests). Nothing
here ran on an IPU.
"""

from __future__ import annotations

import json
import operator
import os
import re
import sys
from pathlib import Path
from typing import Any, Callable, List, Sequence, Tuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.support.ipu_runs import Own, simulate_poprun

pytest_plugins = ["poptorch_double"]  # the fixture `poptorch`
DATA = json.loads((Path(__file__).parent / "poptorch_double" / "api.json").read_text())


@pytest.fixture(autouse=True)
def provide_many_ipus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Provide IPUs for several models at once; by default the machine has as many as the largest
    model needs."""
    monkeypatch.setenv("POPTORCH_DOUBLE_IPUS", "64")


class FunctionModel(nn.Module):
    """Model whose forward is a function of itself, the input and the label."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(3)
            self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.steps, self.host = 0, torch.ones(4)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.function = forward

    def forward(self, x: Any, y: Any = None) -> Any:
        return self.function(self, x, y)


def forward_plainly(m: Any, x: Any, y: Any) -> Any:
    out = m.a(x)
    return out if y is None else (out, F.cross_entropy(out, y))


def draw_labeled_samples(count: int) -> Tuple[Any, Any]:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(count, 4, generator=generator), torch.randint(
        0, 3, (count,), generator=generator
    )


def build_options(poptorch: Any, ipus: Sequence[int] = (0, 1), accumulation: int = 4) -> Any:
    """Return options of a pipeline of blocks A, B, ... on the given IPUs."""
    stages = [poptorch.Stage("ABCDEFGH"[i]).ipu(ipu) for i, ipu in enumerate(ipus)]
    options = poptorch.Options().setExecutionStrategy(poptorch.PipelinedExecution(*stages))
    options.Training.gradientAccumulation(accumulation)
    return options


def make_training_model(
    poptorch: Any, forward: Any = forward_plainly, options: Any = None, optimizer: Any = None
) -> Any:
    model = FunctionModel(forward)
    result = (
        optimizer(model.parameters())
        if optimizer
        else poptorch.optim.SGD(model.parameters(), lr=0.1)
    )
    return poptorch.trainingModel(model, options, result)


def assert_raises_with(error: Any, message: str, call: Callable[[], Any]) -> None:
    """Assert that `call` raises `error`, None for any of PopTorch's, with `message` in its text."""
    kind = error or sys.modules["poptorch"].Error
    with pytest.raises(kind, match=re.escape(message)):
        call()


# ---- names and values

# one wrong name or value a mechanism that refuses it
WRONG: List[Tuple[Any, Any, str]] = [
    (lambda p: p.trainModel, AttributeError, "trainModel"),
    (lambda p: setattr(p.Options(), "_private", 1), AttributeError, "_private"),
    (lambda p: p.Options().deviceIterations(iterations=2), TypeError, "iterations"),
    (lambda p: p.Options().deviceIterations(np.int64(2)), AssertionError, "Unexpected type <class 'numpy.int64'>"),
    (lambda p: p.Options().Training.gradientAccumulation(0), AssertionError, "at least 1"),
    (lambda p: p.Options().outputMode(p.OutputMode.EveryN), NotImplementedError, "every n-th"),
    (lambda p: p.Options().setExecutionStrategy("pipelined"), AssertionError, "no execution strategy"),
    (lambda p: p.Options().setAvailableMemoryProportion({"0": 0.5}), AssertionError, "Invalid key: 0"),
    (lambda p: p.Options().Precision.setPartialsType("half"), ValueError, "torch.float or torch.half"),
    (lambda p: p.Options().TensorLocations.numIOTiles(33), AssertionError, "even number between 32 and 192"),
    (lambda p: p.Options()._Popart.set("autoRecompute", 3), None, "Unknown uint64 option autoRecompute"),
    (lambda p: p.Options()._Popart.setEngineOptions({"a": 1}), AssertionError, "Dict[str, str]"),
    (lambda p: p.PipelinedExecution(p.Stage("A"), p.Stage("A")), AssertionError, "A associated with more than one stage"),
    (lambda p: p.BeginBlock(p.BeginBlock(nn.Linear(1, 1), "A"), "B"), None, "already been assigned to a block."),
    (lambda p: p.identity_loss(torch.ones(2), "average"), ValueError, "Unsupported reduction type"),
    (lambda p: p.optim.SGD([nn.Parameter(torch.zeros(1))], lr=np.float32(0.1)), AssertionError, "Expected float"),
    (lambda p: p.DataLoader(p.Options(), [1, 2], batch_size=2), NotImplementedError, "loader"),
]  # fmt: skip


@pytest.mark.parametrize("call, error, message", WRONG)
def test_wrong_names_and_values_are_refused(
    poptorch: Any, call: Any, error: Any, message: str
) -> None:
    assert_raises_with(error, message, lambda: call(poptorch))


def test_options_are_frozen_by_a_model(poptorch: Any) -> None:
    options = poptorch.Options()
    result = make_training_model(poptorch, options=options)
    for frozen in (options, result.options):
        for change in (
            lambda o: o.deviceIterations(2),
            lambda o: o.Training.gradientAccumulation(2),
            lambda o: o._Popart.set("autoRecomputation", 3),
        ):
            with pytest.raises(AttributeError, match="Can't modify frozen Options"):
                change(frozen)


# ---- blocks, stages, IPUs


def make_blocks(*ids: str) -> Callable[..., Any]:
    """Return a forward of layers a, b and c, each in its block, with the loss in the last."""

    def forward(m: Any, x: Any, y: Any) -> Any:
        import poptorch

        for layer, block in zip((m.a, m.b, m.c), ids):
            poptorch.Block.start(block)
            x = layer(x)
        return x if y is None else F.cross_entropy(x, y)

    return forward


def forward_with_tied_weight(m: Any, x: Any, y: Any) -> Any:
    import poptorch

    poptorch.Block.start("A")
    x = m.a(x)
    poptorch.Block.start("B")
    return F.cross_entropy(F.linear(x, m.a.weight), y)


LAYOUTS = [
    (make_blocks("A", "B", "D"), lambda p: build_options(p, [0, 1, 2, 3], 7), "stage 2 is missing"),
    (make_blocks("A", "B", "C"), lambda p: build_options(p, [0, 1], 7), "Unknown Block 'C' list of expected Blocks: ['A', 'B']"),
    (make_blocks("A", "B", "A"), lambda p: build_options(p, [0, 1], 7), "can not be consumed in an earlier stage"),
    (make_blocks("A", "B", "B"), lambda p: build_options(p, [0, 1], 2), "number of pipeline stages (3)"),
    (make_blocks("A", "B", "C"), lambda p: build_options(p, [0, 1, 2], 5), "must reserve a minimum of 4"),
    (make_blocks("A", "B", "B"), lambda p: build_options(p, [0, 63], 3).replicationFactor(2), "Too many IPUs requested (128)"),
    (forward_with_tied_weight, lambda p: build_options(p), "Can not copy variable tensor a.weight between virtual graphs"),
]  # fmt: skip


@pytest.mark.parametrize("forward, options, message", LAYOUTS)
def test_impossible_layouts_are_refused(
    poptorch: Any, forward: Any, options: Any, message: str
) -> None:
    chosen = options(poptorch)
    count = 2 * chosen.Training.gradient_accumulation * chosen.replication_factor
    run = make_training_model(poptorch, forward, chosen)
    assert_raises_with(
        (poptorch.Error, AssertionError), message, lambda: run(*draw_labeled_samples(count))
    )
    if forward is forward_with_tied_weight:  # an inference pipeline, too, has to be full
        options = build_options(poptorch, accumulation=1)
        run = poptorch.inferenceModel(FunctionModel(make_blocks("A", "B", "B")), options)
        line = "deviceIterations must be greater than or equal"
        assert_raises_with(None, line, lambda: run(draw_labeled_samples(2)[0]))


# ---- forwards


def forward_under_no_grad(m: Any, x: Any, y: Any) -> Any:
    with torch.no_grad():
        x = m.a(x)
    return F.cross_entropy(m.b(x), y)


def forward_that_counts(m: Any, x: Any, y: Any) -> Any:
    m.steps += 1
    return F.cross_entropy(m.a(x), y)


def forward_that_reassigns(m: Any, x: Any, y: Any) -> Any:
    m.seen = m.seen + 1
    return F.cross_entropy(m.a(x), y)


FORWARDS: List[Tuple[Any, str, str]] = [
    (lambda m, x, y: m.a(x), "Error", "Couldn't find a loss in graph!"),
    (lambda m, x, y: (F.cross_entropy(m.a(x), y), F.cross_entropy(m.b(x), y)), "Error", "Multiple independent losses"),
    (lambda m, x, y: 0.5 * F.cross_entropy(m.a(x), y), "DoubleRefuses", "is not itself returned"),
    (lambda m, x, y: F.cross_entropy(m.a(x).detach(), y), "Error", "depends on no parameter"),
    (lambda m, x, y: F.cross_entropy(m.a(x) * x.sum().item(), y), "Error", "item"),
    (forward_that_counts, "DoubleRefuses", "the forward changes steps"),
    (forward_that_reassigns, "Error", "Buffer seen is reassigned within the model when calling the forward method."),
    # RequiresGrad.cpp: whether a node needs a gradient depends on its inputs alone
    (forward_under_no_grad, "DoubleRefuses", "torch.no_grad() has no effect"),
    (lambda m, x, y: F.cross_entropy(Own.apply(m.a(x)), y), "DoubleRefuses", "torch.no_grad() has no effect"),
    # TypeInferenceHandler.cpp: a tensor of the host in the graph
    (lambda m, x, y: F.cross_entropy(m.a(x) * m.host, y), "Error", "expected an IPU tensor, got a CPU tensor"),
    # ErrorOnUnsupportedAten.cpp: no handler, or none known
    (lambda m, x, y: F.cross_entropy(m.a(x), y, label_smoothing=0.1), "Error", "[aten::masked_select]"),
    (lambda m, x, y: F.cross_entropy(m.a(x).tril(), y), "NotImplementedError", "tril"),
    (lambda m, x, y: F.cross_entropy(m.a(x), y, m.seen.expand(4)), "Error", 'Parameter "weight" is unsupported'),
]  # fmt: skip


@pytest.mark.parametrize("forward, error, message", FORWARDS)
def test_forwards_that_cannot_be_compiled_are_refused(
    poptorch: Any, forward: Any, error: str, message: str
) -> None:
    kinds = {"Error": poptorch.Error, "DoubleRefuses": poptorch._errors.DoubleRefuses}
    run = make_training_model(poptorch, forward)
    kind = kinds.get(error, NotImplementedError)
    assert_raises_with(kind, message, lambda: run(*draw_labeled_samples(2)))


def test_integer_buffers_are_constants(poptorch: Any, monkeypatch: Any) -> None:
    """JitDispatch.cpp, addParameter: integer buffers are never updated, and not copied back."""

    def forward(m: Any, x: Any, y: Any) -> Any:
        m.count.add_(1)
        m.seen.add_(1)
        return m.count.clone(), F.cross_entropy(m.a(x) * m.count, y)

    options = poptorch.Options().deviceIterations(2).outputMode(poptorch.OutputMode.All)
    result = make_training_model(poptorch, forward, options)
    counts, _ = result(*draw_labeled_samples(4))
    assert counts.tolist() == [1, 1]
    state = result.model.state_dict()
    assert state["count"] == 0 and state["seen"] == 2


# ---- batches, outputs, times


def test_the_batch_has_to_be_a_multiple_and_then_the_same(poptorch: Any) -> None:
    options = poptorch.Options().deviceIterations(2).replicationFactor(2)
    options.Training.gradientAccumulation(2)
    result = make_training_model(poptorch, options=options)
    with pytest.raises(AssertionError, match="Invalid batch dimension"):
        result(*draw_labeled_samples(12))
    x, y = draw_labeled_samples(16)
    result(x, y)
    fresh = make_training_model(poptorch)
    for model, inputs, message in (
        (result, (x[:8], y), "Shape mismatch for x"),
        (result, (x.double(), y), "Data type mismatch for x"),
        (result, (x, None), "Type mismatch for y"),
        (fresh, (x.clone().requires_grad_(), y), "requires_grad"),
        (fresh, (x.bfloat16(), y), "Unsupported tensor input type"),
    ):
        with pytest.raises(poptorch.Error, match=message):
            model(*inputs)


# ---- optimizers


def train_with_momentum(poptorch: Any) -> Any:
    """Return the executor after an update of SGD with momentum."""

    def choose_sgd(parameters: Any) -> Any:
        return poptorch.optim.SGD(parameters, lr=0.1, momentum=0.9)

    result = make_training_model(poptorch, optimizer=choose_sgd)
    result(*draw_labeled_samples(8))
    return result


def test_a_missing_state_is_skipped_with_a_warning_and_the_last_rate_counts(poptorch: Any) -> None:
    """Sources: poptorch.cpp, writeOptimizerState; devicex.cpp, updateOptimizerTensors."""
    result = train_with_momentum(poptorch)
    optimizer = result._optimizer
    state = optimizer.state_dict()["ipu_state"]
    del state["Accl1___a.bias"]
    result.copyWeightsToHost()
    optimizer.param_groups[0]["lr"] = 0.5
    optimizer.load_state_dict({**optimizer.state_dict(), "ipu_state": state})
    result.setOptimizer(optimizer)
    assert "ignoring missing state Accl1___a.bias" in poptorch.recorded.warnings[-1]
    assert optimizer.param_groups[0]["lr"] == 0.5 and result._description.groups[0]["lr"][0] == 0.5
    plain_state = torch.optim.Optimizer.state_dict(optimizer)
    assert_raises_with(
        RuntimeError, "Only IPU optimizer states", lambda: optimizer.load_state_dict(plain_state)
    )
    state["Accl1___a.weight"] = state["Accl1___a.weight"].half()
    optimizer.load_state_dict({**optimizer.state_dict(), "ipu_state": state})
    refuses = poptorch._errors.DoubleRefuses
    assert_raises_with(refuses, "Accl1___a.weight", lambda: result.setOptimizer(optimizer))
    # a constant of the compiled optimizer does not change
    optimizer.variable_attrs.markAsConstant("momentum")
    assert_raises_with(None, "momentum", lambda: result.setOptimizer(optimizer))


@pytest.mark.parametrize("optimizer, error, message", [
    (lambda p, ps: torch.optim.SGD(ps, lr=0.1), NotImplementedError, "torch's own"),
    (lambda p, ps: p.optim.SGD(ps, lr=0.1, momentum=0.9, dampening=0.5), AssertionError, "dampening"),
    (lambda p, ps: p.optim.Adam(ps, lr=0.1, amsgrad=True), ValueError, "Only non-amsgrad"),
    (lambda p, ps: p.optim.SGD(ps, lr=0.1, maximize=True), AssertionError, "maximize=True has no meaning"),
    (lambda p, ps: p.optim.SGD(list(ps)[1:], lr=0.1), AssertionError, "in no group of the optimizer: a.weight"),
])  # fmt: skip
def test_unsupported_optimizers_are_refused(
    poptorch: Any, optimizer: Any, error: Any, message: str
) -> None:
    def make() -> Any:
        return make_training_model(poptorch, optimizer=lambda ps: optimizer(poptorch, ps))

    assert_raises_with(error, message, make)


# ---- weights and devices


def test_the_host_sees_trained_weights_when_it_touches_them(poptorch: Any) -> None:
    result = make_training_model(poptorch)
    model = result.model
    before = model.a.weight.detach().clone()
    result(*draw_labeled_samples(2))
    events, copy = poptorch.recorded.events, ("copyWeightsToHost", 0)
    assert copy not in events
    assert not torch.equal(model.a.weight, before) and events.count(copy) == 1
    result(*draw_labeled_samples(2))
    result.destroy()
    assert events.count(copy) == 2
    assert type(model) is FunctionModel and type(model.a.weight) is nn.Parameter
    poptorch.trainingModel(model)
    line = "already been wrapped"
    assert_raises_with(RuntimeError, line, lambda: poptorch.trainingModel(model))


def test_devices_are_attached_and_released(poptorch: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("POPTORCH_DOUBLE_IPUS", "2")
    assert poptorch.ipuHardwareIsAvailable(2) and not poptorch.ipuHardwareIsAvailable(4)
    result = make_training_model(poptorch, make_blocks("A", "B", "B"), build_options(poptorch))
    inference = poptorch.inferenceModel(FunctionModel(forward_plainly))
    result(*draw_labeled_samples(8))
    x = draw_labeled_samples(2)[0]
    assert_raises_with(None, "Failed to acquire 1 IPU(s)", lambda: inference(x))
    result.detachFromDevice()
    inference(x)
    assert_raises_with(None, "Failed to acquire 2 IPU(s)", result.attachToDevice)
    inference.destroy()
    result.attachToDevice()
    assert_raises_with(None, "Device is already attached", result.attachToDevice)
    monkeypatch.setenv("POPTORCH_DOUBLE_IPUS", "0")
    other = poptorch.inferenceModel(FunctionModel(forward_plainly))
    assert_raises_with(None, "No IPU detected", lambda: other(x))


def test_an_offline_target_compiles_and_does_not_run(poptorch: Any) -> None:
    """CompilerImpl.cpp: an offline target accepts neither a device's id nor a cycle counter."""
    batch = draw_labeled_samples(2)
    result = make_training_model(poptorch, options=poptorch.Options().useOfflineIpuTarget(2))
    result.compile(*batch)
    with pytest.raises(AssertionError, match="Trying to run a model on an offline device"):
        result(*batch)
    for name, message in (
        ("useIpuId", "targeting a specific id"),
        ("logCycleCount", "only supported on actual IPU hardware"),
        ("useIpuModel", "cannot be used if the IPU model"),
    ):
        options = poptorch.Options().useOfflineIpuTarget(2)
        getattr(options, name)(True)
        with pytest.raises(poptorch.Error, match=message):
            make_training_model(poptorch, options=options).compile(*batch)


def test_an_ordered_fault_loses_the_device(poptorch: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("POPTORCH_DOUBLE_IPUS", "8")
    result = make_training_model(poptorch)
    poptorch.recorded.fail("execute", 2)
    result(*draw_labeled_samples(2))
    with pytest.raises(poptorch.RecoverableError) as caught:
        result(*draw_labeled_samples(2))
    assert caught.value.recovery_action == "IPU_RESET"
    # this executor is lost, and so are the trained weights
    for call in (lambda: result(*draw_labeled_samples(2)), result.model.state_dict):
        assert_raises_with(poptorch.RecoverableError, "simulated", call)
    make_training_model(poptorch)(*draw_labeled_samples(2))


# ---- data and launchers


class Items(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Data set of items with the id of the loading process, which exits at item `at`."""

    def __init__(self, at: int) -> None:
        self.at = at

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        if index == self.at:
            raise SystemExit(3)
        return torch.full((2,), float(index)), torch.tensor([os.getpid()])


def test_a_worker_is_a_process_of_its_own_whose_batches_are_overwritten(poptorch: Any) -> None:
    arguments = {
        "batch_size": None, "drop_last": False, "mode": poptorch.DataLoaderMode.Async, "shuffle": False,
        "auto_distributed_partitioning": False, "async_options": {"load_indefinitely": False},
    }  # fmt: skip
    loader = poptorch.DataLoader(poptorch.Options(), Items(9), **arguments)
    batches = list(loader)
    assert len(batches) == 4 and batches[0][0].isnan().all() and batches[0][1].tolist() == [-1]
    breaking = poptorch.DataLoader(poptorch.Options(), Items(1), **arguments)
    source = iter(breaking)
    batch, process = next(source)
    assert batch.tolist() == [0, 0] and int(process) != os.getpid()
    assert_raises_with(
        AssertionError, "An error occurred in the data fetcher", lambda: next(source)
    )
    line = "failed to start"
    assert_raises_with(
        None, line, lambda: poptorch.DataLoader(poptorch.Options(), Items(0), **arguments)
    )
    # drop_last=True is the default
    with pytest.raises(ValueError, match="batch_size=None option disables auto-batching"):
        poptorch.DataLoader(poptorch.Options(), Items(9), **{**arguments, "drop_last": True})


def test_popdist_fills_the_options_in_and_keeps_them(poptorch: Any, monkeypatch: Any) -> None:
    import popdist.poptorch

    simulate_poprun(monkeypatch, 2, 1, 4)
    assert_raises_with(RuntimeError, "popdist.init()", lambda: popdist.poptorch.Options())
    popdist.init()
    options = popdist.poptorch.Options(ipus_per_replica=2)
    assert isinstance(options, poptorch.Options) and popdist.getNumTotalReplicas() == 8
    distributed = options.Distributed
    assert (options.replication_factor, distributed.processId, distributed.numProcesses) == (
        4,
        1,
        2,
    )
    for name in DATA["popdist"]["poptorch.Options"]["forbidden"]:
        call = operator.attrgetter(name)(options)
        assert_raises_with(RuntimeError, f"Cannot call `{name}` with popdist", call)
