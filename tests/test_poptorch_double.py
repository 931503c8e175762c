"""The double of PopTorch refuses what PopTorch refuses and does what it does: each rule once, mostly in tables."""

from __future__ import annotations

import copy
import gc
import inspect
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

pytest_plugins = ["poptorch_double"]  # the fixture `poptorch`
HERE = Path(__file__).parent
DATA = json.loads((HERE / "poptorch_double" / "api.json").read_text())


@pytest.fixture
def many_ipus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for several models at once, where a machine has room for the largest alone."""
    monkeypatch.setenv("POPTORCH_DOUBLE_IPUS", "64")


# ---- the models


def layers() -> nn.Sequential:
    """Three layers with a BatchNorm, the same every time."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))


class WithLoss(nn.Module):
    """The loss inside forward and returned, as PopTorch wants it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Any, y: Optional[Any] = None) -> Any:
        out = self.inner(x)
        return out if y is None else (out, F.cross_entropy(out, y))


def model(poptorch: Any, begins: Sequence[Tuple[int, str]] = ()) -> WithLoss:
    whole = WithLoss(layers())
    for place, block in begins:
        poptorch.BeginBlock(whole.inner[place], block)
    return whole


def data(count: int) -> Tuple[Any, Any]:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(count, 4, generator=generator), torch.randint(0, 3, (count,), generator=generator)


def pipeline(poptorch: Any, ipus: Sequence[int] = (0, 1), accumulation: int = 4) -> Any:
    """Options of a pipeline of blocks A, B, ... on the given IPUs."""
    stages = [poptorch.Stage("ABCDEFGH"[i]).ipu(ipu) for i, ipu in enumerate(ipus)]
    options = poptorch.Options().setExecutionStrategy(poptorch.PipelinedExecution(*stages))
    options.Training.gradientAccumulation(accumulation)
    return options


def refused(error: Any, said: str, call: Callable[[], Any]) -> None:
    with pytest.raises(error) as caught:
        call()
    assert said in str(caught.value), str(caught.value)


# ---- names and signatures


def _resolved(poptorch: Any, name: str) -> Any:
    access = DATA["api"].get(name.split(".")[0], {}).get("access")
    parts = name.split(".")
    target: Any = poptorch
    if access:  # the class of an Options' part
        target = type(getattr(poptorch.Options(), parts.pop(0)))
    for part in parts:
        target = getattr(target, part) if hasattr(target, part) else getattr(poptorch.strategies, part)
    return target


def test_every_name_has_the_signature_that_the_data_states(poptorch: Any) -> None:
    for name, entry in DATA["api"].items():
        found = _resolved(poptorch, name)
        if entry["kind"] == "property":
            assert isinstance(found, property), name
            assert (found.fset is not None) == entry.get("settable", False), name
        if "params" not in entry or (entry["kind"] == "class" and name in ("PoplarExecutor", "Error")):
            continue
        if isinstance(found, type):
            found = found.__init__
        parameters = [p for p in inspect.signature(found).parameters.values() if p.name != "self"]
        assert [p.name for p in parameters] == [p["name"] for p in entry["params"]], name
        for real, stated in zip(parameters, entry["params"]):
            assert real.kind.name == stated.get("kind", "POSITIONAL_OR_KEYWORD"), (name, real)
            expected = stated.get("default", inspect.Parameter.empty)
            if isinstance(expected, dict):
                enum, _, member = expected["enum"].partition(".")
                expected = getattr(getattr(poptorch, enum), member)
            assert real.default == expected or (real.default is expected), (name, real)


def test_enums_and_defaults_are_those_of_the_data(poptorch: Any) -> None:
    for name, entry in DATA["enums"].items():
        assert {member.name: member.value for member in getattr(poptorch, name)} == entry["values"]
    options = poptorch.Options()
    for name, value in DATA["default_option_values"].items():
        assert getattr(options, name) == value
    for name, value in DATA["default_training_values"].items():
        assert getattr(options.Training, name) == value


def test_the_double_has_no_names_of_its_own_but_recorded(poptorch: Any) -> None:
    public = {name for name in vars(poptorch) if not name.startswith("_")}
    parts = {"enums", "ops", "optim", "options", "profiling", "strategies", "recorded"}
    assert public - parts == {name.split(".")[0] for name in DATA["api"] if not name.startswith("_")} - {
        "Training", "Precision", "TensorLocations", "Distributed", "Jit", "optim", "profiling",
    } | set(DATA["enums"])  # fmt: skip
    for name in DATA["absent_names"]:
        target = poptorch.Options() if name.startswith("Options.") else poptorch
        *parts_, last = name.replace("Options.", "").split(".")
        for part in parts_:
            target = getattr(target, part)
        refused(AttributeError, last, lambda target=target, last=last: getattr(target, last))


UNKNOWN = [
    lambda p: p.trainModel,
    lambda p: p.Options().anchorMode,
    lambda p: p.Options().Training.autoRecomputation,
    lambda p: p.Options().TensorLocations.setGradientLocation,
    lambda p: p.Options().Precision.autocastEnabled,
    lambda p: p.Options()._Popart.get,
    lambda p: setattr(p.Options(), "_private", 1),
    lambda p: p.optim.Lion,
    lambda p: p.inferenceModel(nn.Linear(1, 1)).fit,
]


@pytest.mark.parametrize("ask", UNKNOWN)
def test_unknown_names_are_refused(poptorch: Any, ask: Any) -> None:
    with pytest.raises(AttributeError):
        ask(poptorch)


WRONG_ARGUMENTS = [
    lambda p: p.Options(replicas=2),
    lambda p: p.Options().deviceIterations(iterations=2),
    lambda p: p.trainingModel(nn.Linear(1, 1), opts=None),
    lambda p: p.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1, accumulation_type=torch.half),
    lambda p: p.BeginBlock(nn.Linear(1, 1), id="A"),
    lambda p: p.DataLoader(p.Options(), [1, 2], micro_batch_size=2),
]


@pytest.mark.parametrize("call", WRONG_ARGUMENTS)
def test_wrong_argument_names_are_refused(poptorch: Any, call: Any) -> None:
    with pytest.raises(TypeError):
        call(poptorch)


WRONG_VALUES = [
    (lambda p: p.Options().deviceIterations(np.int64(2)), AssertionError, "Unexpected type <class 'numpy.int64'>"),
    (lambda p: p.Options().replicationFactor(2.0), AssertionError, "Unexpected type <class 'float'>"),
    (lambda p: p.Options().Training.gradientAccumulation("4"), AssertionError, "Expected int"),
    (lambda p: p.Options().Training.gradientAccumulation(0), AssertionError, "at least 1"),
    (lambda p: p.Options().set(replication_factor=np.int32(1)), AssertionError, "Unexpected type"),
    (lambda p: setattr(p.Options(), "replicas", 2), AssertionError, "Invalid option replicas"),
    (lambda p: p.Options().outputMode(2), AssertionError, "Expected OutputMode"),
    (lambda p: p.Options().outputMode(p.OutputMode.EveryN), AssertionError, "valid positive integer"),
    (lambda p: p.Options().connectionType("Never"), AssertionError, "Expected ConnectionType"),
    (lambda p: p.Options().useIpuId(np.int64(0)), AssertionError, "Expected int"),
    (lambda p: p.Options().enableStableNorm(1), AssertionError, "Expected bool"),
    (lambda p: p.Options().setExecutionStrategy("pipelined"), AssertionError, "no execution strategy"),
    (lambda p: p.Options().setAvailableMemoryProportion({"0": 0.5}), AssertionError, "Invalid key: 0"),
    (lambda p: p.Options().setAvailableMemoryProportion({"IPU0": 1.5}), AssertionError, "between 0 and 1"),
    (lambda p: p.Options().setAvailableMemoryProportion({"IPU0": np.float32(0.5)}), AssertionError, "Dict[str, float]"),
    (lambda p: p.Options().Precision.setPartialsType("half"), ValueError, "torch.float or torch.half"),
    (lambda p: p.Options().Precision.setPartialsType(torch.bfloat16), ValueError, "torch.float or torch.half"),
    (lambda p: p.Options().Training.accumulationAndReplicationReductionType(1), ValueError, "ReductionType.Mean or"),
    (lambda p: p.Options().Training.accumulationAndReplicationReductionType(p.ReductionType.NoReduction), ValueError, "Sum"),
    (lambda p: p.Options().TensorLocations.numIOTiles(33), AssertionError, "even number between 32 and 192"),
    (lambda p: p.Options().TensorLocations.setWeightLocation({"onChip": 0}), AssertionError, "TensorLocationSettings"),
    (lambda p: p.TensorLocationSettings().useOnChipStorage(1), AssertionError, "bool"),
    (lambda p: p.Options().Distributed.configureProcessId(2, 2), AssertionError, "no process 2 among 2"),
    (lambda p: p.Options().inputReplicaGrouping(2, p.CommGroupType.Consecutive), ValueError, "larger than replication_factor"),
    (lambda p: p.Options().inputReplicaGrouping(1, p.CommGroupType.All), ValueError, "cannot be All"),
    (lambda p: p.Options().loadFromFile(__file__), RuntimeError, ""),
    (lambda p: p.Options()._Popart.set("autoRecompute", 3), RuntimeError, "Unknown uint64 option autoRecompute"),
    (lambda p: p.Options()._Popart.set("autoRecomputation", True), RuntimeError, "Unknown bool option autoRecomputation"),
    (lambda p: p.Options()._Popart.set("autoRecomputation", np.int64(3)), RuntimeError, "Unknown int64 option"),
    (lambda p: p.Options()._Popart.set("enableStableNorm", 1), RuntimeError, "Unknown uint64 option enableStableNorm"),
    (lambda p: p.Options()._Popart.setEngineOptions({"a": 1}), AssertionError, "Dict[str, str]"),
    (lambda p: p.Stage("A", 1), AssertionError, "Block IDs are supposed to be strings"),
    (lambda p: p.Stage("A").ipu("0"), AssertionError, "Expected int"),
    (lambda p: p.PipelinedExecution("A", p.Stage("B", "A")), AssertionError, "A associated with more than one stage"),
    (lambda p: p.SerialPhasedExecution(), AssertionError, "There is currently no AutoStage for PhasedExecution"),
    (lambda p: p.BeginBlock(nn.Linear(1, 1), 0), AssertionError, "Expected str"),
    (lambda p: p.BeginBlock("layer"), RuntimeError, "module is not an instance of torch.nn.Module or function."),
    (lambda p: p.BeginBlock(p.BeginBlock(nn.Linear(1, 1))), RuntimeError, "module has already been assigned to a block."),
    (lambda p: p.identity_loss(torch.ones(2), "average"), ValueError, "Unsupported reduction type"),
    (lambda p: p.trainingModel(nn.Linear(1, 1), {"replication": 1}), RuntimeError, "Expected poptorch.Options"),
    (lambda p: p.trainingModel(lambda x: x), AssertionError, "Expected Union[Module, PoplarExecutor]"),
    (lambda p: p.optim.SGD([nn.Parameter(torch.zeros(1))], lr=np.float32(0.1)), AssertionError, "Expected float"),
    (lambda p: p.optim.Adam([nn.Parameter(torch.zeros(1))], accum_type=torch.bfloat16), AssertionError, "float16"),
]  # fmt: skip


@pytest.mark.parametrize("call, error, said", WRONG_VALUES)
def test_wrong_values_are_refused(poptorch: Any, call: Any, error: Any, said: str) -> None:
    if said == "":
        refused(poptorch.options.ConfigFileError, "test_poptorch_double.py", lambda: call(poptorch))
        return
    refused(error, said, lambda: call(poptorch))
    if error is RuntimeError:
        refused(poptorch.Error, said, lambda: call(poptorch))


def test_a_bool_passes_as_an_int_as_in_poptorch(poptorch: Any) -> None:
    assert poptorch.Options().deviceIterations(True).device_iterations == 1


# ---- freezing


def test_options_are_frozen_by_a_loader_and_by_a_model_and_a_clone_is_not(poptorch: Any) -> None:
    changes = [
        lambda o: o.deviceIterations(2),
        lambda o: o.modelName("m"),
        lambda o: o.Training.gradientAccumulation(2),
        lambda o: o._Popart.set("autoRecomputation", 3),
        lambda o: o.TensorLocations.numIOTiles(32),
        lambda o: o.Precision.setPartialsType(torch.half),
        lambda o: o.Distributed.disable(),
        lambda o: o.setExecutionStrategy(poptorch.ShardedExecution()),
        lambda o: o.anchorTensor("a", "b"),
        lambda o: o.randomSeed(1),
    ]
    set_ = torch.utils.data.TensorDataset(torch.zeros(4))
    makers = [
        lambda o: poptorch.DataLoader(o, set_),
        lambda o: poptorch.trainingModel(model(poptorch), o),
        lambda o: poptorch.inferenceModel(model(poptorch), o),
    ]
    for make in makers:
        options = poptorch.Options()
        made = make(options)
        for change in changes:
            refused(AttributeError, "Can't modify frozen Options", lambda c=change, o=options: c(o))
            change(options.clone())
            change(made.options.clone())
        refused(AttributeError, "Can't modify frozen", lambda m=made: m.options.deviceIterations(3))
    assert (
        options.defaultOutputMode() and made.options.output_mode == poptorch.OutputMode.All
    )  # the executor has a copy


# ---- blocks, stages, IPUs


def test_blocks_stages_and_ipus_are_recorded_as_laid_out(poptorch: Any) -> None:
    whole = model(poptorch, [(0, "A"), (1, "B")])
    executor = poptorch.trainingModel(whole, pipeline(poptorch, [1, 0], 5))
    executor(*data(5 * 2))
    made = poptorch.recorded.compilations[0]
    assert [(block.block, block.stage, block.ipu) for block in made.blocks] == [("A", 0, 1), ("B", 1, 0)]
    assert made.stages == {0: 1, 1: 0} and made.ipus == 2 and made.recomputation == 3
    assert made.forward_stages == 3  # counted from IPU 0: 0 -> 1 -> 0 changes twice; so a pipeline begins on IPU 0
    assert made.parameters["inner.0.weight"] == 1 and made.parameters["inner.2.bias"] == 0
    assert [(loss.function, loss.stage, loss.final, loss.returned) for loss in made.losses] == [
        ("cross_entropy", 1, True, 1)
    ]
    assert made.micro_batch == [(2, 4), (2,)] and made.strategy == "PipelinedExecution"
    assert poptorch.recorded.names()[:2] == ["BeginBlock", "BeginBlock"]
    assert poptorch.recorded.of("BeginBlock")[1]["user_id"] == "B"
    assert poptorch.recorded.of("Training.gradientAccumulation") == [{"gradient_accumulation": 5}]
    assert poptorch.recorded.events == [("compile", 0), ("attach", 0), ("copyWeightsToDevice", 0), ("execute", 0)]


class Forward(nn.Module):
    """A model whose forward is a function of itself, the input and the label."""

    def __init__(self, forward: Callable[..., Any], tied: bool = False) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        if tied:
            self.c.weight = self.a.weight
        self.steps = 0
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("seen", torch.zeros(()))
        self.function = forward

    def forward(self, x: Any, y: Any) -> Any:
        return self.function(self, x, y)


def _blocks(*ids: str) -> Callable[..., Any]:
    """a, b and c, each within a block (None: in none), the loss in the last."""

    def forward(m: Any, x: Any, y: Any) -> Any:
        import poptorch

        for layer, block in zip((m.a, m.b, m.c), ids):
            poptorch.Block.start(block)
            x = layer(x)
        return F.cross_entropy(x, y)

    return forward


def _inside_with(m: Any, x: Any, y: Any) -> Any:
    import poptorch

    with poptorch.Block("A"):
        x = m.a(x)
    return F.cross_entropy(x, y)


def _overlapped(m: Any, x: Any, y: Any) -> Any:
    import poptorch

    x = poptorch.set_overlap_for_input(x, poptorch.OverlapMode.OverlapAccumulationLoop)
    return F.cross_entropy(m.a(x), y)


def _early_loss(m: Any, x: Any, y: Any) -> Any:
    import poptorch

    poptorch.Block.start("A")
    h = m.a(x)
    loss = F.cross_entropy(h, y)
    poptorch.Block.start("B")
    return m.b(h), loss


LAYOUTS = [
    (_blocks("A", "B", "D"), lambda p: pipeline(p, [0, 1, 2, 3], 7), "stage 2 is missing"),
    (_blocks("A", "B", "C"), lambda p: pipeline(p, [0, 1], 7), "Unknown Block 'C' list of expected Blocks: ['A', 'B']"),
    (_blocks("A", "B", "A"), lambda p: pipeline(p, [0, 1], 7), "can not be consumed in an earlier stage"),
    (_blocks("A", "B", "B"), lambda p: pipeline(p, [0, 1], 2), "greater than or equal to the number of pipeline stages (3)"),
    (_blocks("A", "B", "C"), lambda p: pipeline(p, [0, 1, 2], 5), "must reserve a minimum of 4"),
    (_blocks("A", "B", "B"), lambda p: pipeline(p, [0, 63], 3).replicationFactor(2), "Too many IPUs requested (128)"),
    (_blocks("A", "B", "C"), lambda p: pipeline(p, [0, 1, 3], 4), "number of pipeline stages (5)"),
    (_inside_with, lambda p: pipeline(p, [0], 1), "No active Block, all the ops must belong to a Block"),
    (_overlapped, lambda p: p.Options(), "Overlapped IO is not supported with poptorch.PipelinedExecution"),
    (_early_loss, lambda p: pipeline(p, [0, 1], 3), "Op has bad pipeline stage"),
]  # fmt: skip


@pytest.mark.parametrize("forward, options, said", LAYOUTS)
def test_layouts_that_no_pipeline_has_are_refused(poptorch: Any, forward: Any, options: Any, said: str) -> None:
    chosen = options(poptorch)
    batch = data(chosen.Training.gradient_accumulation * chosen.replication_factor)
    executor = poptorch.trainingModel(Forward(forward), chosen)
    error = AssertionError if said.startswith("Unknown Block") else poptorch.Error
    refused(error, said, lambda: executor(*batch))
    assert not executor.isCompiled() and poptorch.recorded.compilations == []


def test_a_weight_of_two_ipus_is_refused_in_a_pipeline_only(poptorch: Any) -> None:
    tied = Forward(_blocks("A", "B", "B"), tied=True)
    said = "Can not copy variable tensor a.weight between virtual graphs when pipelining"
    refused(poptorch.Error, said, lambda: poptorch.trainingModel(tied, pipeline(poptorch))(*data(4)))
    one = Forward(_blocks("A", "A", "A"), tied=True)
    poptorch.trainingModel(one, pipeline(poptorch, [0], 1))(*data(1))
    sharded = Forward(_blocks("A", "B", "B"), tied=True)
    options = poptorch.Options().setExecutionStrategy(poptorch.ShardedExecution("A", "B"))
    poptorch.trainingModel(sharded, options)(*data(1))


def test_three_ipus_are_rounded_up_when_asked(poptorch: Any) -> None:
    options = pipeline(poptorch, [0, 1, 2], 5).autoRoundNumIPUs(True)
    poptorch.trainingModel(Forward(_blocks("A", "B", "C")), options)(*data(5))
    assert poptorch.recorded.compilations[0].ipus == 4
    assert "Reserving 4 IPUs" in poptorch.recorded.warnings[0]
    simulated = pipeline(poptorch, [0, 1, 2], 5).useIpuModel(True)  # the simulator has any number
    poptorch.trainingModel(Forward(_blocks("A", "B", "C")), simulated)(*data(5))
    assert poptorch.recorded.compilations[1].ipus == 3


def test_automatic_stages(poptorch: Any) -> None:
    """SameAsIpu wants an IPU for every block; AutoIncrement counts from 1 and so leaves IPU 0 idle."""
    same = poptorch.trainingModel(Forward(_blocks("A", "B", "C")), poptorch.Options())
    refused(AssertionError, "no IPU was specified for block A", lambda: same(*data(1)))
    options = poptorch.Options()
    options.setExecutionStrategy(poptorch.PipelinedExecution(poptorch.AutoStage.AutoIncrement))
    options.Training.gradientAccumulation(7)
    poptorch.trainingModel(Forward(_blocks("A", "B", "C")), options)(*data(7))
    made = poptorch.recorded.compilations[0]
    assert made.stages == {1: 1, 2: 2, 3: 3} and (made.forward_stages, made.ipus) == (4, 4)


def test_without_blocks_everything_is_on_one_ipu_and_nothing_is_pipelined(poptorch: Any) -> None:
    poptorch.trainingModel(model(poptorch))(*data(2))
    made = poptorch.recorded.compilations[0]
    assert (made.stages, made.ipus, made.recomputation) == ({0: 0}, 1, 0)


def test_blocks_can_be_removed_and_do_nothing_on_the_cpu(poptorch: Any) -> None:
    whole = model(poptorch, [(0, "A"), (2, "B")])
    x, _ = data(2)
    assert torch.equal(whole(x), WithLoss(layers())(x))
    assert "BeginBlock(user_id=A, ipu_id=None)" in poptorch.module_repr(whole)
    poptorch.removeBlocks(whole)
    poptorch.BeginBlock(whole.inner[0], "again")


def test_blocks_by_context_decorator_and_number(poptorch: Any) -> None:
    @poptorch.BlockFunction("B", ipu_id=1)
    def last(m: Any, x: Any, y: Any) -> Any:
        return F.cross_entropy(m.b(x), y)

    def forward(m: Any, x: Any, y: Any) -> Any:
        poptorch.Block.useAutoId()
        with poptorch.Block(ipu_id=0):
            with poptorch.Block("inner", ipu_id=0):
                x = m.a(x)
        return last(m, x, y)

    options = poptorch.Options()
    options.Training.gradientAccumulation(3)
    poptorch.trainingModel(Forward(forward), options)(*data(3))
    assert [(b.block, b.stage) for b in poptorch.recorded.compilations[0].blocks] == [("0", 0), ("inner", 0), ("B", 1)]

    def between(m: Any, x: Any, y: Any) -> Any:
        with poptorch.Block("A", 0):
            with poptorch.Block("B", 0):
                x = m.a(x)
            return F.cross_entropy(m.b(x), y)  # the inner block's end ended the outer one, too

    said = "No active Block, all the ops must belong to a Block"
    refused(poptorch.Error, said, lambda: poptorch.trainingModel(Forward(between))(*data(1)))


def test_phases(poptorch: Any) -> None:
    serial = poptorch.SerialPhasedExecution(poptorch.Phase("A"), [poptorch.Stage("B")], "C")
    serial.phase(0).ipus(0)
    serial.setTensorsLiveness(poptorch.Liveness.OffChipAfterFwd).useSeparateBackwardPhase()
    refused(AssertionError, "Phase contains 1 stages but you provided 2 ipus", lambda: serial.phase(1).ipus(0, 1))
    assert serial.backendOptions()["execution_mode"] == 2 and serial.stage("B") is serial.phase(1).stage(0)
    parallel = poptorch.ParallelPhasedExecution("A", "B", "C")
    for phase, ipu in enumerate((0, 1, 1)):
        parallel.phase(phase).ipus(ipu)
    options = poptorch.Options().setExecutionStrategy(parallel)
    said = "even phases run on even IPUs"
    refused(
        poptorch.Error, said, lambda: poptorch.trainingModel(Forward(_blocks("A", "B", "C")), options.clone())(*data(1))
    )


def test_inference_wants_as_many_device_iterations_as_stages(poptorch: Any) -> None:
    whole = model(poptorch, [(0, "A"), (2, "B")]).eval()
    said = "deviceIterations must be greater than or equal to the number of pipeline stages (2)"
    refused(poptorch.Error, said, lambda: poptorch.inferenceModel(whole, pipeline(poptorch, [0, 1], 1))(data(1)[0]))
    poptorch.inferenceModel(whole, pipeline(poptorch, [0, 1], 1).deviceIterations(2))(data(4)[0])
    said = "gradientAccumulation to 1 or leave it as its default value (1)"
    refused(poptorch.Error, said, lambda: poptorch.inferenceModel(whole, pipeline(poptorch)))


# ---- losses and what a forward may do


def _identity(reduction: str) -> Callable[..., Any]:
    def forward(m: Any, x: Any, y: Any) -> Any:
        import poptorch

        first, second = m.a(x), m.b(m.a(x).detach())
        loss = F.cross_entropy(first, y) + F.cross_entropy(second, y)
        return second, poptorch.identity_loss(loss, reduction)

    return forward


def _unreturned(m: Any, x: Any, y: Any) -> Any:
    F.cross_entropy(m.b(x), y)  # dropped with all that only it needs
    return F.cross_entropy(m.a(x), y)


def _in_place(m: Any, x: Any, y: Any) -> Any:
    loss = F.cross_entropy(m.a(x), y)
    loss *= 0.5
    return loss


def _count_up(m: Any, x: Any, y: Any) -> Any:
    m.steps += 1
    return F.cross_entropy(m.a(x), y)


def _reassign(m: Any, x: Any, y: Any) -> Any:
    m.seen = m.seen + 1
    return F.cross_entropy(m.a(x), y)


def _branch(m: Any, x: Any, y: Any) -> Any:
    return F.cross_entropy(m.a(x) if x.sum() > 0 else m.b(x), y)


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return 2 * grad


FORWARDS = [
    (lambda m, x, y: m.a(x), "Error", "Couldn't find a loss in graph!"),
    (lambda m, x, y: (F.cross_entropy(m.a(x), y), F.cross_entropy(m.b(x), y)), "Error", "Multiple independent losses"),
    (lambda m, x, y: F.cross_entropy(m.a(x), y) + F.mse_loss(m.b(x), x), "Error", "poptorch.identity_loss"),
    (lambda m, x, y: 0.5 * F.cross_entropy(m.a(x), y), "DoubleRefuses", "is not itself returned"),
    (_in_place, "DoubleRefuses", "is not itself returned"),
    (lambda m, x, y: F.cross_entropy(m.a(x).detach(), y), "Error", "depends on no parameter"),
    (_branch, "Error", "static graph"),
    (lambda m, x, y: F.cross_entropy(m.a(x) * x.sum().item(), y), "Error", "item"),
    (lambda m, x, y: F.cross_entropy(m.a(x[x.sum(1).nonzero()[:, 0]]), y), "Error", "static shapes"),
    (lambda m, x, y: torch.autograd.grad(F.cross_entropy(m.a(x), y), m.a.weight)[0].sum(), "Error", "gradients and hooks"),
    (lambda m, x, y: F.cross_entropy(m.a(x), y).backward(), "Error", "gradients and hooks"),
    (_count_up, "DoubleRefuses", "the forward changes steps"),
    (lambda m, x, y: F.cross_entropy(m.a(x).tril(), y), "Error", "Unsupported ops found in compiled model: [aten::tril]"),
    (lambda m, x, y: F.cross_entropy(m.a(x), y, torch.ones(3)), "Error", 'Parameter "weight" is unsupported'),
    (lambda m, x, y: F.nll_loss(m.a(x), y, weight=torch.ones(3)), "Error", 'Parameter "weight" is unsupported'),
    (_reassign, "Error", "Buffer seen is reassigned within the model when calling the forward method."),
    (lambda m, x, y: F.cross_entropy(Double.apply(m.a(x)), y), "DoubleRefuses", "torch.autograd.Function"),
]  # fmt: skip


@pytest.mark.parametrize("forward, error, said", FORWARDS)
def test_forwards_that_cannot_be_compiled_are_refused(poptorch: Any, forward: Any, error: str, said: str) -> None:
    kind = poptorch.Error if error == "Error" else poptorch._errors.DoubleRefuses
    refused(kind, said, lambda: poptorch.trainingModel(Forward(forward))(*data(2)))


@pytest.mark.parametrize("forward, losses", [
    (_identity("none"), [("cross_entropy", False), ("cross_entropy", False), ("identity_loss", True)]),
    (_identity("sum"), [("cross_entropy", False), ("cross_entropy", False), ("identity_loss", True)]),
    (_unreturned, [("cross_entropy", True)]),
    (lambda m, x, y: (m.a(x), F.mse_loss(m.a(x), x)), [("mse_loss", True)]),
])  # fmt: skip
def test_one_final_loss_is_found_and_unreturned_ones_are_dropped(poptorch: Any, forward: Any, losses: Any) -> None:
    whole = Forward(forward)
    before = copy.deepcopy(whole.state_dict())
    executor = poptorch.trainingModel(whole)
    executor(*data(2))
    made = poptorch.recorded.compilations[0]
    assert [(loss.function, loss.final) for loss in made.losses] == losses
    if forward is _unreturned:
        assert "b.weight" not in made.parameters and torch.equal(whole.b.weight, before["b.weight"])
    assert not torch.equal(whole.a.weight, before["a.weight"])


def test_the_context_of_the_ipu_is_visible_in_forward_only(poptorch: Any) -> None:
    seen = []
    executor = poptorch.trainingModel(Forward(
        lambda m, x, y: (seen.append(poptorch.isRunningOnIpu()), F.cross_entropy(m.a(x), y))[1]
    ))  # fmt: skip
    executor(*data(2))
    assert seen == [True, True] and not poptorch.isRunningOnIpu()  # once traced, once run


# ---- batches


def test_the_batch_has_to_be_a_multiple_and_then_the_same(poptorch: Any) -> None:
    options = poptorch.Options().deviceIterations(2).replicationFactor(2).broadcastBuffers(False)
    options.Training.gradientAccumulation(2)
    executor = poptorch.trainingModel(model(poptorch), options)
    refused(AssertionError, "Invalid batch dimension", lambda: executor(*data(12)))
    x, y = data(16)
    executor(x, y)
    mismatches = [
        ((x[:8], y), "Shape mismatch for x"),
        ((x.double(), y), "Data type mismatch for x"),
        ((x, None), "Type mismatch for y"),
        ((x, 3), "Type mismatch for y"),
    ]
    for arguments, said in mismatches:
        refused(poptorch.Error, said, lambda a=arguments: executor(*a))
    refused(AssertionError, "Too many arguments", lambda: executor(x, y, x))
    refused(AssertionError, "target is not a valid parameter", lambda: executor(x, target=y))
    refused(poptorch.Error, "Mandatory parameter x missing", lambda: executor(y=y))
    executor(y=y, x=x)


@pytest.mark.parametrize("change, said", [
    (lambda x: x.requires_grad_(), "can not have requires_grad set to True"),
    (lambda x: x.bfloat16(), "Unsupported tensor input type from pytorch"),
    (lambda x: x.to(torch.complex64), "Unsupported tensor input type from pytorch"),
])  # fmt: skip
def test_inputs_the_ipu_cannot_take_are_refused(poptorch: Any, change: Any, said: str) -> None:
    x, y = data(2)
    refused(poptorch.Error, said, lambda: poptorch.trainingModel(model(poptorch))(change(x), y))


class Numbers(nn.Module):
    """Of a micro-batch: its rows, their sum, and what is no tensor."""

    def forward(self, x: Any) -> Any:
        return {"rows": x + 0, "sum": x.sum(), "name": "n", "long": x.long(), "double": x.double()}


MODES = [
    ("All", None, [0, 1, 2, 3, 4, 5, 6, 7]),
    ("Final", None, [6, 7]),
    ("EveryN", 2, [2, 3, 6, 7]),
    ("Sum", None, [12, 16]),
]


@pytest.mark.parametrize("mode, period, rows", MODES)
def test_output_modes(poptorch: Any, mode: str, period: Optional[int], rows: List[int]) -> None:
    """Four iterations of two replicas: micro-batches 0 .. 7, the replicas' side by side."""
    options = poptorch.Options().deviceIterations(4).replicationFactor(2)
    options.outputMode(getattr(poptorch.OutputMode, mode), period)
    out = poptorch.inferenceModel(Numbers(), options)(torch.arange(8.0).reshape(8, 1))
    assert out["rows"].flatten().tolist() == rows and out["sum"].tolist() == rows
    assert out["name"] == "n" and out["long"].dtype == torch.int32 and out["double"].dtype == torch.float32
    refused(poptorch.Error, "backward() cannot be called explicitly", lambda: out["sum"].backward())


def test_one_scalar_comes_back_as_a_scalar_and_the_default_modes(poptorch: Any) -> None:
    out = poptorch.inferenceModel(Numbers())(torch.ones(2, 1))
    assert out["sum"].shape == () and out["rows"].shape == (2, 1)
    options = pipeline(poptorch)
    logits, loss = poptorch.trainingModel(model(poptorch, [(0, "A"), (2, "B")]), options)(*data(8))
    assert logits.shape == (2, 3) and loss.shape == ()  # Final: of the last micro-batch
    period = poptorch.Options().deviceIterations(3).outputMode(poptorch.OutputMode.EveryN, 2)
    said = "output_return_period 2 does not divide 3"
    refused(poptorch.Error, said, lambda: poptorch.inferenceModel(Numbers(), period)(torch.ones(3, 1)))


def test_replicas_of_a_group_share_their_input(poptorch: Any) -> None:
    options = poptorch.Options().replicationFactor(4).inputReplicaGrouping(2, poptorch.CommGroupType.Consecutive)
    out = poptorch.inferenceModel(Numbers(), options)(torch.arange(2.0).reshape(2, 1))
    assert out["sum"].tolist() == [0, 0, 1, 1]


# ---- training


def _plain(updates: int, accumulation: int, optimizer: Callable[..., Any], mean: bool = True) -> nn.Module:
    """PyTorch's own training on the same micro-batches."""
    whole = layers()
    chosen = optimizer(whole.parameters())
    x, y = data(updates * accumulation * 2)
    for update in range(updates):
        chosen.zero_grad()
        for part in range(accumulation):
            begin = (update * accumulation + part) * 2
            loss = F.cross_entropy(whole(x[begin : begin + 2]), y[begin : begin + 2])
            (loss / accumulation if mean else loss).backward()
        chosen.step()
    return whole


OPTIMIZERS: Dict[str, Tuple[Callable[..., Any], Callable[..., Any]]] = {
    "sgd": (
        lambda p, ps: p.optim.SGD(ps, lr=0.1, momentum=0.9, weight_decay=0.01, loss_scaling=128.0),
        lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, weight_decay=0.01),
    ),
    "torch sgd": (lambda p, ps: torch.optim.SGD(ps, lr=0.1), lambda ps: torch.optim.SGD(ps, lr=0.1)),
    "combined": (
        lambda p, ps: p.optim.SGD(ps, lr=0.1, momentum=0.9, use_combined_accum=True, velocity_scaling=2.0),
        lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
    ),
    "adam": (lambda p, ps: p.optim.Adam(ps, lr=0.01), lambda ps: torch.optim.Adam(ps, lr=0.01)),
    "adamw": (
        lambda p, ps: p.optim.AdamW(ps, lr=0.01, betas=(0.8, 0.9), weight_decay=0.1),
        lambda ps: torch.optim.AdamW(ps, lr=0.01, betas=(0.8, 0.9), weight_decay=0.1),
    ),
    "rmsprop": (
        lambda p, ps: p.optim.RMSprop(ps, lr=0.01, momentum=0.5, centered=True),
        lambda ps: torch.optim.RMSprop(ps, lr=0.01, momentum=0.5, centered=True),
    ),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_is_plain_training_bit_for_bit(poptorch: Any, name: str) -> None:
    """Three updates of four micro-batches in two calls, BatchNorm's statistics and all, in a pipeline of two IPUs."""
    ours, plain = OPTIMIZERS[name]
    whole = model(poptorch, [(0, "A"), (1, "B")])
    executor = poptorch.trainingModel(whole, pipeline(poptorch), ours(poptorch, whole.parameters()))
    x, y = data(24)
    for part in range(3):
        executor(x[part * 8 : part * 8 + 8], y[part * 8 : part * 8 + 8])
    expected = _plain(3, 4, plain).state_dict()
    for key, value in whole.state_dict().items():
        assert torch.equal(value, expected[key.replace("inner.", "")]), key
        assert type(value) is torch.Tensor


def test_device_iterations_are_updates_of_one_call_and_sum_is_a_choice(poptorch: Any) -> None:
    def sgd(parameters: Any) -> Any:
        return torch.optim.SGD(parameters, lr=0.1)

    for mean in (True, False):
        whole, options = model(poptorch), poptorch.Options().deviceIterations(3)
        kind = poptorch.ReductionType.Mean if mean else poptorch.ReductionType.Sum
        options.Training.gradientAccumulation(2).accumulationAndReplicationReductionType(kind)
        executor = poptorch.trainingModel(whole, options, sgd(whole.parameters()))
        executor(*data(12))
        expected = _plain(3, 2, sgd, mean).state_dict()
        assert all(torch.equal(v, expected[k[6:]]) for k, v in whole.state_dict().items())
    assert [run.updates for run in poptorch.recorded.runs] == [3, 3]


@pytest.mark.parametrize("strategy", ["Running", "Post", "PostAndLoss"])
def test_means_are_the_same_whenever_they_are_taken(poptorch: Any, strategy: str) -> None:
    found = []
    for replicas, accumulation in ((1, 6), (2, 3)):
        whole = nn.Sequential(nn.Linear(4, 3))
        whole.load_state_dict({"0.weight": torch.ones(3, 4) / 7, "0.bias": torch.zeros(3)})
        options = poptorch.Options().replicationFactor(replicas)
        options.Training.gradientAccumulation(accumulation)
        options.Training.setMeanAccumulationAndReplicationReductionStrategy(
            getattr(poptorch.MeanReductionStrategy, strategy)
        )
        executor = poptorch.trainingModel(WithLoss(whole), options, torch.optim.SGD(whole.parameters(), lr=0.5))
        executor(*data(12))
        found.append(whole[0].weight.detach())
    torch.testing.assert_close(found[0], found[1])


def test_gradients_are_clipped_by_their_global_norm(poptorch: Any) -> None:
    whole = model(poptorch)
    before = [p.detach().clone() for p in whole.parameters()]
    executor = poptorch.trainingModel(whole, None, poptorch.optim.SGD(whole.parameters(), lr=1.0, max_grad_norm=0.01))
    executor(*data(2))
    step = sum(float((a - b.detach()).square().sum()) for a, b in zip(before, whole.parameters())) ** 0.5
    assert step == pytest.approx(0.01, rel=1e-3)


def test_batch_norm_with_replicas(poptorch: Any) -> None:
    """Refused unless every replica has buffers of its own; the host then reads the first replica's."""
    options = poptorch.Options().replicationFactor(2)
    x, y = data(8)
    said = "PopTorch does not support broadcasting buffers."
    refused(poptorch.Error, said, lambda: poptorch.trainingModel(model(poptorch), options.clone())(x, y))
    poptorch.inferenceModel(model(poptorch).eval(), options.clone())(x)  # nothing is written
    whole, alone = model(poptorch), layers()
    executor = poptorch.trainingModel(whole, options.broadcastBuffers(False))
    executor(x, y)
    alone(x[:4])
    assert torch.equal(whole.inner[1].running_mean, alone[1].running_mean)
    assert executor._program.buffers[1]["inner.1.running_mean"].ne(alone[1].running_mean).any()


def test_modes_and_python_values_are_those_of_the_compilation(poptorch: Any) -> None:
    whole = model(poptorch)
    executor = poptorch.trainingModel(whole)
    executor(*data(2))
    whole.eval()
    mean = whole.inner[1].running_mean.clone()
    executor(*data(2))
    assert not torch.equal(mean, whole.inner[1].running_mean)


def test_half_weights_are_stored_with_their_precision(poptorch: Any) -> None:
    whole = model(poptorch).half()
    out, loss = poptorch.trainingModel(whole, None, torch.optim.SGD(whole.parameters(), lr=0.1))(
        data(2)[0].half(), data(2)[1]
    )
    assert whole.inner[0].weight.dtype == torch.float16 and out.dtype == torch.float16


def test_random_numbers_are_the_devices_own(poptorch: Any) -> None:
    def dropped(seed: int) -> Any:
        options = poptorch.Options().randomSeed(seed)
        executor = poptorch.inferenceModel(nn.Dropout(0.5), options)
        torch.manual_seed(0)
        first, host = executor(torch.ones(64)), torch.rand(1)
        assert torch.equal(host, torch.manual_seed(0) and torch.rand(1))  # the host's stay untouched
        state = executor.rng_state
        second = executor(torch.ones(64))
        executor.rng_state = state
        assert state[0] == seed and torch.equal(second, executor(torch.ones(64))) and not torch.equal(first, second)
        return first

    assert torch.equal(dropped(1), dropped(1)) and not torch.equal(dropped(1), dropped(2))


# ---- optimizers


def _set(**changes: Any) -> Callable[..., Any]:
    def change(poptorch: Any, optimizer: Any, parameters: Any) -> Any:
        optimizer.param_groups[0].update(changes)
        return optimizer

    return change


SET_OPTIMIZER = [
    ("torch.optim.SGD(ps, lr=0.1)", _set(lr=0.2), ""),
    ("torch.optim.SGD(ps, lr=0.1, momentum=0.9)", _set(momentum=0.8), ""),
    (
        "torch.optim.SGD(ps, lr=0.1)",
        _set(momentum=0.9),
        "momentum: Can not replace a constant value with a non constant",
    ),
    ("torch.optim.Adam(ps, lr=0.1)", _set(betas=(0.8, 0.9)), "betas: Values are constant but do not match."),
    ("p.optim.Adam(ps, lr=0.1, betas=(0.9, 0.9))", _set(betas=(0.8, 0.9)), ""),
    ("p.optim.Adam(ps, lr=0.1)", _set(eps=1e-3), "eps: Values are constant but do not match."),
    ("p.optim.Adam(ps)", _set(lr=0.5), "lr: Values are constant but do not match."),
    (
        "p.optim.SGD(ps, lr=0.1)",
        lambda p, o, ps: p.optim.SGD(ps, lr=0.1, accum_type=torch.half),
        "accum_type: attributes",
    ),
    (
        "p.optim.SGD(ps, lr=0.1)",
        lambda p, o, ps: p.optim.Adam(ps, lr=0.1),
        "can not replace the compiled one of type SGD2",
    ),
    ("p.optim.SGD(ps, lr=0.1)", lambda p, o, ps: p.optim.SGD(ps, lr=0.1, use_combined_accum=True), "SGD1"),
    ("p.optim.SGD(ps, lr=0.1)", lambda p, o, ps: p.optim.SGD(ps[:1], lr=0.1), "parameter groups can not change"),
]


@pytest.mark.parametrize("made, change, said", SET_OPTIMIZER)
def test_what_of_an_optimizer_may_change_once_it_is_compiled(poptorch: Any, made: str, change: Any, said: str) -> None:
    whole = model(poptorch)
    parameters = list(whole.parameters())
    optimizer = eval(made, {"torch": torch, "p": poptorch, "ps": parameters})
    executor = poptorch.trainingModel(whole, None, optimizer)
    executor(*data(2))
    changed = change(poptorch, optimizer, parameters)
    if said:
        refused(poptorch.Error, said, lambda: executor.setOptimizer(changed))
    else:
        executor.setOptimizer(changed)
        executor(*data(2))


def test_a_changed_rate_has_no_effect_before_set_optimizer(poptorch: Any) -> None:
    whole = model(poptorch)
    optimizer = poptorch.optim.SGD(whole.parameters(), lr=0.1)
    executor = poptorch.trainingModel(whole, None, optimizer)
    executor.compile(*data(2))
    optimizer.param_groups[0]["lr"] = 0.0
    before = whole.inner[0].weight.detach().clone()
    executor(*data(2))
    between = whole.inner[0].weight.detach().clone()
    executor.setOptimizer(optimizer)
    executor(*data(2))
    assert not torch.equal(before, between) and torch.equal(between, whole.inner[0].weight)
    optimizer.variable_attrs.markAsConstant("weight_decay")
    refused(AssertionError, "Unknown attribute colour", lambda: optimizer.variable_attrs.markAsVariable("colour"))


@pytest.mark.filterwarnings("ignore:Detected call of")
def test_an_optimizer_set_while_detached_waits_for_the_next_attachment(poptorch: Any) -> None:
    """And the state read when it was detached, written back after it, brings the old rate again."""
    whole = model(poptorch)
    optimizer = poptorch.optim.SGD(whole.parameters(), lr=0.1, momentum=0.9)
    executor = poptorch.trainingModel(whole, None, optimizer)
    executor(*data(2))
    executor.detachFromDevice()
    optimizer.param_groups[0]["lr"] = 0.0
    executor.setOptimizer(optimizer)
    twin = executor._program.twin._optimizer.param_groups[0]
    assert twin["lr"] == 0.1
    executor.attachToDevice()
    assert twin["lr"] == 0.1
    executor.setOptimizer(optimizer)  # nothing new to the front end, so that nothing is sent
    assert twin["lr"] == 0.1
    optimizer.param_groups[0]["lr"] = 0.05
    executor.setOptimizer(optimizer)
    assert twin["lr"] == 0.05


def test_schedulers_work_on_the_optimizers(poptorch: Any) -> None:
    whole = model(poptorch)
    optimizer = poptorch.optim.SGD(whole.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    executor = poptorch.trainingModel(whole, None, optimizer)
    rates = []
    for _ in range(3):
        executor(*data(2))
        rates.append(executor._program.twin._optimizer.param_groups[0]["lr"])
        optimizer._step_count = 1  # the optimizer's own step never runs
        scheduler.step()
        executor.setOptimizer(optimizer)
    assert rates == [0.1, 0.05, 0.025]
    assert optimizer.state_dict()["ipu_state"]
    assert pickle.loads(pickle.dumps(optimizer)).has_state()  # as it was last read


BAD_OPTIMIZERS = [
    ("torch.optim.Adagrad(ps, lr=0.1)", AssertionError, "Unsupported optimizer type"),
    (
        "torch.optim.SGD(ps, lr=0.1, momentum=0.9, nesterov=True)",
        ValueError,
        "Nesterov momentum is currently not supported.",
    ),
    ("torch.optim.Adam(ps, amsgrad=True)", ValueError, "Only non-amsgrad Adam/AdamW optimizers are supported."),
    ("torch.optim.SGD(ps, lr=0.1, maximize=True)", AssertionError, "maximize=True has no meaning"),
    ("changed(torch.optim.Adam(ps), betas=[0.9, 0.99])", AssertionError, "Expected a pair for betas"),
    ("torch.optim.SGD(ps, lr=numpy.float32(0.1))", AssertionError, "Expected a number for lr"),
    ("torch.optim.SGD(ps[1:], lr=0.1)", AssertionError, "parameters in no group of the optimizer: inner.0.weight"),
    ("torch.optim.SGD([*ps, torch.nn.Parameter(torch.zeros(1))], lr=0.1)", KeyError, ""),
]


@pytest.mark.parametrize("made, error, said", BAD_OPTIMIZERS)
def test_optimizers_that_no_ipu_has_are_refused(poptorch: Any, made: str, error: Any, said: str) -> None:
    whole = model(poptorch)

    def changed(optimizer: Any, **values: Any) -> Any:
        optimizer.param_groups[0].update(values)
        return optimizer

    optimizer = eval(made, {"torch": torch, "ps": list(whole.parameters()), "numpy": np, "changed": changed})
    refused(error, said, lambda: poptorch.trainingModel(whole, None, optimizer))


@pytest.mark.usefixtures("many_ipus")
def test_optimizer_state_moves_between_executors_but_not_from_torch(poptorch: Any) -> None:
    """Four updates are two and two with weights and state carried over, also through a pickle."""
    first = model(poptorch)
    optimizer = poptorch.optim.Adam(first.parameters(), lr=0.01)
    executor = poptorch.trainingModel(first, None, optimizer)
    executor(*data(2))
    executor(*data(2))
    saved = pickle.loads(pickle.dumps((first.state_dict(), optimizer.state_dict())))
    assert {"ipu_state", "ipu_param", "param_groups"} <= set(saved[1]) and saved[1]["ipu_state"]
    executor(*data(2))

    second = model(poptorch)
    second.load_state_dict(saved[0])
    other = poptorch.optim.Adam(second.parameters(), lr=0.01)
    other.load_state_dict(saved[1])
    again = poptorch.trainingModel(second, None, other)
    again(*data(2))
    assert all(torch.equal(a, b) for a, b in zip(first.state_dict().values(), second.state_dict().values()))

    native = torch.optim.Adam(second.parameters())
    said = "Only IPU optimizer states can be loaded onto the IPU."
    refused(RuntimeError, said, lambda: other.load_state_dict(native.state_dict()))


def test_lamb_takes_steps_of_the_weights_length(poptorch: Any) -> None:
    whole = model(poptorch)
    before = whole.inner[0].weight.detach().clone()
    executor = poptorch.trainingModel(whole, None, poptorch.optim.LAMB(whole.parameters(), lr=0.1))
    executor(*data(2))
    step = (whole.inner[0].weight.detach() - before).norm() / before.norm()
    assert float(step) == pytest.approx(0.1, rel=1e-4)


# ---- weights between host and device


def test_an_executor_that_is_dropped_takes_its_weights_along(poptorch: Any) -> None:
    """The model keeps no executor alive: a result that nobody fetched in time is gone."""
    whole = model(poptorch)
    before = copy.deepcopy(whole.state_dict())
    poptorch.trainingModel(whole)(*data(2))
    assert torch.equal(whole.state_dict()["inner.0.weight"], before["inner.0.weight"])


def test_the_host_sees_trained_weights_when_it_touches_them(poptorch: Any) -> None:
    whole = model(poptorch)
    weight = whole.inner[0].weight
    executor = poptorch.trainingModel(whole)
    kept = executor._model.inner[0].weight.data
    executor(*data(2))
    copies = lambda: poptorch.recorded.events.count(("copyWeightsToHost", 0))  # noqa: E731
    raw = torch.empty(0).set_(kept.untyped_storage()) if hasattr(kept, "untyped_storage") else kept
    stale = raw.clone()
    assert copies() == 0
    assert weight.sum() is not None and copies() == 1  # a reference taken long before
    assert not torch.equal(stale, raw)
    whole.state_dict()
    assert copies() == 1
    executor(*data(2))
    assert executor.copyWeightsToHostIfNeeded() and not executor.copyWeightsToHostIfNeeded() and copies() == 2
    assert "PoplarExecutor.copyWeightsToHost" not in poptorch.recorded.names()  # nobody asked


def test_copying_to_the_device_loses_what_it_trained(poptorch: Any) -> None:
    whole = model(poptorch)
    before = copy.deepcopy(whole.state_dict())
    executor = poptorch.trainingModel(whole)
    executor(*data(2))
    executor.copyWeightsToDevice()
    assert torch.equal(whole.state_dict()["inner.0.weight"], before["inner.0.weight"])
    executor.load_state_dict({name: torch.zeros_like(value) for name, value in before.items()})
    out, _ = executor(*data(2))
    assert out.abs().sum() == 0


@pytest.mark.usefixtures("many_ipus")
def test_an_inference_model_follows_training_if_it_was_wrapped_after(poptorch: Any) -> None:
    x, y = data(2)
    whole = model(poptorch)
    early = poptorch.inferenceModel(whole.eval())
    training = poptorch.trainingModel(whole.train())
    late = poptorch.inferenceModel(whole)
    first = early(x), late(x)
    training(x, y)
    second = early(x), late(x)
    assert torch.equal(first[0], second[0]) and not torch.equal(first[1], second[1])
    early.copyWeightsToDevice()
    assert torch.equal(early(x), late(x))


def test_wrapping_and_unwrapping(poptorch: Any) -> None:
    whole = model(poptorch)
    kind = type(whole)
    executor = poptorch.trainingModel(whole)
    assert type(whole).__name__ == "PoptorchWithLoss" and executor.model is whole
    executor.destroy()  # a no-op before the first compilation
    said = "Model has already been wrapped in 'poptorch.trainingModel'."
    refused(RuntimeError, said, lambda: poptorch.trainingModel(whole))
    executor(*data(2))
    twin = pickle.loads(pickle.dumps(copy.deepcopy(whole)))
    assert type(twin) is kind and type(twin.inner[0].weight) is nn.Parameter
    trained = twin.state_dict()["inner.0.weight"]
    executor.destroy()
    assert type(whole) is kind and type(whole.inner[0].weight) is nn.Parameter
    assert torch.equal(trained, whole.inner[0].weight)
    refused(poptorch.Error, "Model has not been compiled or has been destroyed.", executor.copyWeightsToHost)
    poptorch.trainingModel(whole)(*data(2))


def test_a_buffer_of_another_class_is_refused(poptorch: Any) -> None:
    whole = model(poptorch)
    whole.register_buffer("odd", nn.Parameter(torch.zeros(1)).detach().as_subclass(type("T", (torch.Tensor,), {})))
    refused(poptorch.Error, "All buffers must be an instance of torch.Tensor", lambda: poptorch.trainingModel(whole))


# ---- devices


def test_devices_are_held_and_given_back(poptorch: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("POPTORCH_DOUBLE_IPUS", "2")
    assert poptorch.ipuHardwareIsAvailable(2) and not poptorch.ipuHardwareIsAvailable(4)
    assert poptorch.ipuHardwareVersion() == 2
    training = poptorch.trainingModel(model(poptorch, [(0, "A"), (2, "B")]), pipeline(poptorch))
    inference = poptorch.inferenceModel(model(poptorch))
    training(*data(4 * 2))
    assert training.isAttachedToDevice()
    refused(poptorch.Error, "Failed to acquire 1 IPU(s)", lambda: inference(data(2)[0]))
    training.detachFromDevice()
    inference(data(2)[0])
    refused(poptorch.Error, "Device is not attached", training.detachFromDevice)
    refused(poptorch.Error, "Failed to acquire 2 IPU(s)", training.attachToDevice)
    inference.destroy()
    training.attachToDevice()
    refused(poptorch.Error, "Device is already attached", training.attachToDevice)
    del training  # gone, with its IPUs; a traceback of the refusals may hold it in a circle
    gc.collect()
    one, other = (poptorch.Options().useIpuId(5) for _ in range(2))
    first = poptorch.inferenceModel(model(poptorch), one)
    first(data(2)[0])
    refused(
        poptorch.Error, "device id 5: it is in use", lambda: poptorch.inferenceModel(model(poptorch), other)(data(2)[0])
    )
    monkeypatch.setenv("POPTORCH_DOUBLE_IPUS", "0")
    refused(AssertionError, "No IPU hardware available on this system", poptorch.ipuHardwareVersion)
    refused(poptorch.Error, "No IPU detected", lambda: poptorch.inferenceModel(model(poptorch))(data(2)[0]))


def test_detaching_keeps_weights_and_optimizer(poptorch: Any) -> None:
    found = []
    for detaches in (False, True):
        whole = model(poptorch)
        executor = poptorch.trainingModel(whole, None, poptorch.optim.Adam(whole.parameters(), lr=0.1))
        executor(*data(2))
        if detaches:
            executor.detachFromDevice()
        executor(*data(2))
        found.append(whole.state_dict()["inner.0.weight"])
    assert torch.equal(*found)


def test_an_offline_target_compiles_and_does_not_run(poptorch: Any, tmp_path: Path) -> None:
    options = pipeline(poptorch, [0, 1, 2, 3], 7).useOfflineIpuTarget()
    whole = model(poptorch, [(0, "A"), (1, "B"), (2, "C")])
    options.setExecutionStrategy(poptorch.PipelinedExecution("A", "B", "C"))
    executor = poptorch.trainingModel(whole, options)
    refused(AssertionError, "Trying to run a model on an offline device", lambda: executor(*data(14)))
    with pytest.raises(AttributeError, match="local object"):  # which explicit stages put into the options
        executor.compileAndExport(str(tmp_path / "new" / "m.poptorch"), *data(14))
    assert executor.isCompiled() and not executor.isAttachedToDevice()
    assert poptorch.recorded.compilations[0].ipus == 3  # no power of two needed, no device taken
    refused(AssertionError, "Trying to attach to an offline device", executor.attachToDevice)
    simulated = poptorch.Options().useIpuModel(True).useOfflineIpuTarget()
    said = "cannot be used if the IPU model is enabled"
    refused(poptorch.Error, said, lambda: poptorch.inferenceModel(model(poptorch), simulated).compile(data(2)[0]))


@pytest.mark.usefixtures("many_ipus")
def test_saving_and_loading(poptorch: Any, tmp_path: Path) -> None:
    whole = model(poptorch)
    executor = poptorch.trainingModel(whole, None, poptorch.optim.Adam(whole.parameters(), lr=0.1))
    refused(poptorch.Error, "has not been compiled", lambda: executor.save(str(tmp_path / "m")))
    executor(*data(2))
    executor.save(str(tmp_path / "full"))
    executor.save(str(tmp_path / "bare"), export_model=False)
    executor(*data(2))
    loaded = poptorch.load(str(tmp_path / "full"), lambda options: options.modelName("again"))
    assert loaded.isCompiled() and loaded.options.model_name == "again"
    loaded(*data(2))
    assert torch.equal(loaded.model.state_dict()["inner.0.weight"], whole.state_dict()["inner.0.weight"])
    refused(AssertionError, "export_model=False", lambda: poptorch.load(str(tmp_path / "bare")))
    again = poptorch.trainingModel(model(poptorch))
    again.loadExecutable(str(tmp_path / "bare"))
    assert again.isCompiled()


@pytest.mark.usefixtures("many_ipus")
def test_faults_of_the_device_can_be_ordered_and_a_retry_starts_anew(poptorch: Any) -> None:
    whole = model(poptorch)
    executor = poptorch.trainingModel(whole)
    poptorch.recorded.fail("execute", 2)
    executor(*data(2))
    with pytest.raises(poptorch.RecoverableError) as caught:
        executor(*data(2))
    assert caught.value.recovery_action == "IPU_RESET" and isinstance(caught.value, poptorch.Error)
    assert caught.value.type == "poplar_recoverable_error" and caught.value.message == "simulated device fault"
    refused(poptorch.RecoverableError, "simulated", lambda: executor(*data(2)))  # this executor is lost
    refused(poptorch.RecoverableError, "simulated", whole.state_dict)  # and what it had trained
    poptorch.trainingModel(model(poptorch))(*data(2))
    poptorch.recorded.fail("compile", 1, poptorch.UnrecoverableError("broken", "poplar_unrecoverable_error"))
    refused(poptorch.UnrecoverableError, "broken", lambda: poptorch.trainingModel(model(poptorch))(*data(2)))
    refused(ValueError, "no event explode", lambda: poptorch.recorded.fail("explode"))
    poptorch.recorded.clear()
    assert poptorch.recorded.calls == []


@pytest.mark.usefixtures("many_ipus")
def test_timings(poptorch: Any) -> None:
    options = pipeline(poptorch).deviceIterations(2).logCycleCount(True)
    executor = poptorch.trainingModel(model(poptorch, [(0, "A"), (2, "B")]), options)
    assert executor.getLatency() == (0.0, 0.0, 0.0) and executor.getPerfCounters()["input"] == [[]]
    refused(poptorch.Error, "Please run the model at least once", executor.cycleCount)
    executor(*data(16))
    shortest, longest, mean = executor.getLatency()
    assert 0 < shortest <= mean <= longest and executor.getComputeLatency()[1] < longest
    assert executor.getHostIpuLatency()[0] > 0 and executor.getIpuHostLatency()[0] > 0
    counters = executor.getPerfCounters()
    assert len(counters["input"]) == 2 and len(counters["output"][0]) == 2
    assert executor.cycleCount() == 1000 * 2 * (4 + 2)  # D x (GA + 2F - 2) pipeline cycles
    assert executor.compilationTime().total_seconds() > 0
    quiet = poptorch.inferenceModel(model(poptorch), poptorch.Options().showCompilationProgressBar(False))
    quiet(data(2)[0])
    refused(poptorch.Error, "progress bar", quiet.compilationTime)
    refused(poptorch.Error, "Please set option logCycleCount to True", quiet.cycleCount)


def test_options_that_contradict_the_model_are_refused(poptorch: Any) -> None:
    sharded = poptorch.TensorLocationSettings().useReplicatedTensorSharding(True)
    options = poptorch.Options()
    options.TensorLocations.setOptimizerLocation(sharded)
    said = "replicated tensor sharding needs more than one replica"
    refused(poptorch.Error, said, lambda: poptorch.trainingModel(model(poptorch), options)(*data(2)))
    overlap = poptorch.Options().setExecutionStrategy(poptorch.ShardedExecution())
    run = lambda: poptorch.trainingModel(Forward(_overlapped), overlap.clone())(*data(2))  # noqa: E731
    refused(poptorch.Error, "No IO tiles allocated.", run)
    overlap.TensorLocations.numIOTiles(32)
    refused(poptorch.Error, "Unsupported output mode for overlapped IO.", run)
    overlap.outputMode(poptorch.OutputMode.All)
    run()


@pytest.mark.usefixtures("many_ipus")
def test_named_buffers_hooks_and_what_is_not_modelled(poptorch: Any) -> None:
    whole, called = model(poptorch).eval(), []
    handle = poptorch.registerPreCompileHook(lambda: called.append("before"))
    poptorch.registerPostCompileHook(lambda: called.append("after"))
    executor = poptorch.inferenceModel(whole, poptorch.Options().updatableNamedBuffers(["inner.1.running_mean"]))
    x = data(2)[0]
    first = executor(x)
    with torch.no_grad():
        whole.inner[1].running_mean.fill_(3.0)
        whole.inner[2].weight.fill_(3.0)
    assert torch.equal(first, executor(x))
    executor.copyNamedBuffersToDevice()
    second = executor(x)
    executor.copyWeightsToDevice()
    assert not torch.equal(first, second) and not torch.equal(second, executor(x))
    handle.remove()
    poptorch.inferenceModel(whole)(x)
    assert called == ["before", "after", "after"]
    refused(NotImplementedError, "poptorch.CPU: this test double does not model it", lambda: poptorch.CPU(whole, "id"))


# ---- data


def test_the_loaders_batch_is_the_calls_and_what_is_left_over_is_dropped(poptorch: Any) -> None:
    options = poptorch.Options().deviceIterations(2).replicationFactor(2)
    options.Training.gradientAccumulation(3)
    set_ = torch.utils.data.TensorDataset(torch.arange(30.0))
    loader = poptorch.DataLoader(options, set_, batch_size=1)
    assert loader.combinedBatchSize == 12 and len(loader) == 2
    assert [batch.tolist() for (batch,) in loader] == [list(range(12)), list(range(12, 24))]
    assert list(poptorch.DataLoader(options, set_, batch_size=3)) == []  # the whole set is less than a batch
    kept = poptorch.DataLoader(options, set_, drop_last=False)
    assert [len(batch) for (batch,) in kept] == [12, 12, 6] and "not divisible" in poptorch.recorded.warnings[-1]
    with pytest.raises(
        ValueError, match="batch_size=None option disables auto-batching"
    ):  # drop_last=True is the default
        poptorch.DataLoader(options, set_, batch_size=None)
    assert poptorch.DataLoader(options, set_, batch_size=None, drop_last=False).combinedBatchSize is None
    executor = poptorch.inferenceModel(Numbers(), poptorch.Options().deviceIterations(4))
    with pytest.raises(poptorch.Error, match="Shape mismatch for x"):
        for (batch,) in poptorch.DataLoader(executor.options, set_, drop_last=False):
            executor(batch)


def test_asynchronous_batches_are_overwritten(poptorch: Any) -> None:
    set_ = torch.utils.data.TensorDataset(torch.arange(6.0), torch.arange(6))
    loader = poptorch.DataLoader(poptorch.Options(), set_, batch_size=2, mode=poptorch.DataLoaderMode.Async)
    taken = list(loader)
    assert len(taken) == 3 and taken[0][0].isnan().all() and taken[0][1].tolist() == [-1, -1]
    assert [x.clone().tolist() for x, _ in loader] == [[0, 1], [2, 3], [4, 5]]
    loader.terminate()
    refused(AssertionError, "terminated", lambda: iter(loader))
    again = poptorch.DataLoader(
        poptorch.Options(), set_, batch_size=4, drop_last=False, mode=poptorch.DataLoaderMode.AsyncRebatched,
        rebatched_worker_size=1,
    )  # fmt: skip
    assert len(again) == 2 and [len(x) for x, _ in again] == [4, 2]
    refused(
        poptorch.Error, "already uses an AsynchronousDataAccessor", lambda: poptorch.AsynchronousDataAccessor(again)
    )
    again.terminate()
    unpicklable = [lambda: 0]
    with pytest.raises((pickle.PicklingError, AttributeError)):
        poptorch.AsynchronousDataAccessor(unpicklable)


class Broken(torch.utils.data.Dataset):
    """Batches before item `at`, with the process that made them, which ends there."""

    def __init__(self, at: int) -> None:
        self.at = at

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        if index == self.at:
            raise SystemExit(3)
        return torch.full((2,), float(index)), torch.tensor([os.getpid()])


def test_a_worker_is_a_process_of_its_own_and_all_that_is_told_is_its_end(poptorch: Any) -> None:
    how = {"batch_size": None, "drop_last": False, "mode": poptorch.DataLoaderMode.Async}
    options = pipeline(poptorch)
    source = iter(poptorch.DataLoader(options, Broken(1), **how))
    batch, process = next(source)
    assert batch.tolist() == [0, 0] and int(process) != os.getpid()
    refused(AssertionError, "An error occurred in the data fetcher", lambda: next(source))
    refused(poptorch.Error, "worker thread failed to start", lambda: poptorch.DataLoader(options, Broken(0), **how))
    with pytest.raises(AttributeError, match="local object"):  # with a batch size the options go to the worker, too
        poptorch.DataLoader(options, Broken(0), mode=poptorch.DataLoaderMode.Async)


def test_loaders_of_several_processes_take_parts(poptorch: Any) -> None:
    set_ = torch.utils.data.TensorDataset(torch.arange(10.0))
    parts = []
    for rank in range(2):
        options = poptorch.Options()
        options.Distributed.configureProcessId(rank, 2)
        parts.append([float(x) for (batch,) in poptorch.DataLoader(options, set_, batch_size=2) for x in batch])
        said = "you must set poptorch.Options.randomSeed()"
        refused(AssertionError, said, lambda o=options: poptorch.DataLoader(o, set_, shuffle=True))
        said = "`batch_sampler` option is mutually exclusive"
        refused(poptorch.Error, said, lambda o=options: poptorch.DataLoader(o, set_, batch_sampler=[[0]]))
    assert parts == [[0, 1, 2, 3], [4, 5, 6, 7]]
    shuffled = []
    for rank in range(2):
        options = poptorch.Options().randomSeed(3)
        options.Distributed.configureProcessId(rank, 2)
        shuffled += [
            float(x) for (batch,) in poptorch.DataLoader(options, set_, batch_size=1, shuffle=True) for x in batch
        ]
    assert sorted(shuffled) == list(range(10)) != shuffled


# ---- around it


def test_popdist_fills_the_options_in_and_keeps_them(poptorch: Any, monkeypatch: Any) -> None:
    import popdist.poptorch

    assert not popdist.isPopdistEnvSet() and popdist.getInstanceIndex() == 0
    for name, value in {"NUM_INSTANCES": 2, "INSTANCE_INDEX": 1, "NUM_LOCAL_REPLICAS": 4}.items():
        monkeypatch.setenv(f"POPDIST_{name}", str(value))
    refused(RuntimeError, "popdist.init()", lambda: popdist.poptorch.Options())
    popdist.init()
    options = popdist.poptorch.Options(ipus_per_replica=2)
    assert isinstance(options, poptorch.Options) and popdist.getNumTotalReplicas() == 8
    assert (options.replication_factor, options.Distributed.processId, options.Distributed.numProcesses) == (4, 1, 2)
    for name in DATA["popdist"]["poptorch.Options"]["forbidden"]:
        target: Any = options
        for part in name.split("."):
            target = getattr(target, part)
        refused(RuntimeError, f"Cannot call `{name}` with popdist.poptorch.Options", target)
    executor = poptorch.trainingModel(Forward(lambda m, x, y: F.cross_entropy(m.a(x), y)), options.clone())
    refused(poptorch.Error, "popdist.poptorch.Options was told 2", lambda: executor(*data(4)))
    known = {name.rpartition(".")[2] for name in DATA["popdist"]}
    assert {n for n in vars(popdist) if not n.startswith("_") and n not in ("os", "poptorch")} == known - {"Options"}


@pytest.mark.usefixtures("many_ipus")
def test_mpirun_alone_makes_options_distributed(poptorch: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "3")
    options = poptorch.Options()
    assert (options.Distributed.processId, options.Distributed.numProcesses) == (3, 4)
    executor = poptorch.trainingModel(model(poptorch), options)
    refused(NotImplementedError, "averaging gradients over processes", lambda: executor(*data(2)))
    options = poptorch.Options()
    options.Distributed.disable()
    poptorch.trainingModel(model(poptorch), options)(*data(2))


def test_environment_and_files_set_options(poptorch: Any, monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.setenv("POPTORCH_CACHE_DIR", "cache")
    monkeypatch.setenv("POPTORCH_DEFAULT_OPTIONS", '{"deviceIterations": 3, "Training.gradientAccumulation": [5]}')
    options = poptorch.Options()
    assert options._Popart.options["cachePath"] == "cache" and options.device_iterations == 3
    (tmp_path / "o.conf").write_text("replicationFactor(2)\noutputMode(poptorch.OutputMode.All)\n")
    assert options.loadFromFile(str(tmp_path / "o.conf")).replication_factor == 2
    assert options.Training.gradient_accumulation == 5 and options.toDict()["enableEngineCaching"] is True


def test_profiles_appear_when_the_engine_is_gone_and_pva_reads_them(poptorch: Any, tmp_path: Path) -> None:
    import pva

    options = pipeline(poptorch).enableProfiling(str(tmp_path)).modelName("m")
    executor = poptorch.trainingModel(model(poptorch, [(0, "A"), (2, "B")]), options)
    executor(*data(8))
    assert not (tmp_path / "m" / "profile.pop").exists()
    executor.destroy()
    report = pva.openReport(str(tmp_path / "m" / "profile.pop"), str(tmp_path / "debug.cbor"))
    assert report.compilation.target.numIPUs == 2 and report.poplarVersion.string == "3.4.0"
    assert len(report.compilation.tiles) == 2 * report.compilation.target.tilesPerIpu
    assert report.execution.steps[0].ipus[1].activeCycles.cyclesTo.max == 500


def test_the_double_can_be_imported_by_a_process_of_its_own(tmp_path: Path) -> None:
    script = (
        "import poptorch, torch\n"
        "m = poptorch.inferenceModel(torch.nn.Linear(2, 2))\n"
        "m(torch.ones(1, 2))\n"
        "try: m(torch.ones(1, 2))\n"
        "except poptorch.RecoverableError as error: print(error.recovery_action)\n"
    )
    environment = {
        **os.environ, "PYTHONPATH": str(HERE / "poptorch_double" / "path"), "OMP_NUM_THREADS": "1",
        "POPTORCH_DOUBLE_FAIL": "execute:2:RecoverableError:LINK_RESET",
        "POPTORCH_DOUBLE_RECORD": str(tmp_path / "record.json"),
    }  # fmt: skip
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert done.stdout == "LINK_RESET\n", done.stderr
    record = json.loads((tmp_path / "record.json").read_text())
    assert [call["name"] for call in record["calls"]] == ["inferenceModel", *["PoplarExecutor.__call__"] * 2]
    assert len(record["runs"]) == 1 and record["compilations"][0]["training"] is False


def test_installing_is_undone() -> None:
    import poptorch_double

    assert poptorch_double.install().__version__ == "3.4.0" and "poptorch" in sys.modules
    poptorch_double.remove()
    assert "poptorch" not in sys.modules and poptorch_double.PATH not in sys.path
