"""bfloat16_mixed is exact: autocast where a backward reads its forward's weights, float32 masters elsewhere.

A caller's model has its own dtype and modes again after training.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import shutil
from pathlib import Path
from typing import Any, Dict, List, Tuple

import pytest
import torch
from torch import nn

from ipu_pipe.backends.emulator.replay import Emulator
from ipu_pipe.config.schema import Config
from ipu_pipe.errors import BadInput
from ipu_pipe.hardware.description import read_hardware
from ipu_pipe.hardware.memory import KeptCounts, compute_stage_memory
from ipu_pipe.hardware.precision import MASTERS, MIXED, resolve_precision
from ipu_pipe.hardware.unit_costs import Unit
from ipu_pipe.job.record import DTYPES
from ipu_pipe.model.precision import ModelPrecision
from ipu_pipe.model.stages import partition
from ipu_pipe.plan.candidates import Candidate
from ipu_pipe.plan.planner import search
from ipu_pipe.plan.prediction import Problem
from ipu_pipe.replay.work import Work
from ipu_pipe.report.memory import build_memory_table
from ipu_pipe.report.run_text import format_opening
from ipu_pipe.run.build import build
from ipu_pipe.run.train import evaluate_checkpoint, train
from ipu_pipe.schedule.methods import METHODS, Method, resolve_method
from ipu_pipe.schedule.timelines import make_schedule
from ipu_pipe.schedule.versions import VersionTable
from ipu_pipe.update.apply import UpdateRules, choose_rules
from ipu_pipe.update.optimizer import make_groups, replace_parameters
from tests.literal_replay import LiteralRules, LiteralStage, replay
from tests.staged_models import MODELS, draw_microbatches, join_stages
from tests.support.runs import assert_same_state, read_state, read_summary, read_weights
from tests.test_train import make_short_config

CPU, LOW = torch.device("cpu"), torch.bfloat16
SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=1e-2)
ADAMW = functools.partial(torch.optim.AdamW, lr=0.02)
autocast = functools.partial(torch.autocast, "cpu", LOW)
cross_entropy = nn.functional.cross_entropy
PREDICTION = {"weight_prediction": {"form": "velocity", "scale": 1.0}}
PB = {
    "spike_compensation": {"scale": 1.0},
    **PREDICTION,
}  # summed in another order there: not to the last bit
T1_T2 = {"t1": {"anneal_updates": 12}, "t2": {"decay": 0.135}}


def make_float32_stages(name: str) -> List[nn.Module]:
    torch.manual_seed(3)
    return MODELS[name]()


def make_float32_batches(count: int) -> List[Any]:
    return [(x.float(), y) for x, y in draw_microbatches(count)]


def emulate_in_bfloat16_mixed(
    model: nn.Module, method: Method, accumulate: int, data: List[Any], make: Any, args: Any
) -> ModelPrecision:
    row = resolve_precision(MIXED, method)
    numbers = ModelPrecision(model, row, DTYPES[row], CPU, is_given=False)
    inputs = [(x.to(numbers.inputs), y) for x, y in data]
    part = partition(model, inputs[0][0])
    schedule = make_schedule(method, len(part), len(data), accumulate)
    table = VersionTable(schedule, method)
    optimizer = make(replace_parameters(make_groups(model, part), numbers.get_trained))
    rate = make.keywords["lr"]
    rules = UpdateRules(
        choose_rules(args, method, table.rule_lag(), accumulate),
        optimizer,
        lambda k: rate,
        masters=numbers.masters,
    )
    emulator = Emulator(
        Work(numbers.convert_loss(cross_entropy), table, rules), model, part, inputs[0]
    )
    for start in range(0, len(data), accumulate):
        emulator.step(inputs[start : start + accumulate])
    emulator.close()
    return numbers


def replay_in_bfloat16_mixed(
    stages: List[nn.Module], method: Method, accumulate: int, data: List[Any], make: Any, args: Any
) -> List[LiteralStage]:
    """Train each stage by itself, literally.

    Where a backward reads other weights than its forward, passes read weights in bfloat16 and updates change float32 ones;
    BatchNorm keeps float32. Elsewhere each stage's forward and the loss run under autocast.
    """
    P = len(stages)
    schedule = make_schedule(method, P, len(data), accumulate)
    is_low = method.name in ("pipemare", "pipelined_backprop", "spectrain") and not args.get(
        "stash"
    )
    literal_stages = []
    for s, stage in enumerate(stages):
        norms = {name for name, m in stage.named_modules() if isinstance(m, nn.BatchNorm2d)}
        names = [name for name, _ in stage.named_parameters()]
        reads = {name: torch.float32 if name.rpartition(".")[0] in norms else LOW for name in names}
        rules = LiteralRules(args, method, P, s, accumulate, make.keywords["lr"])
        how: Dict[str, Any] = {"reads": reads} if is_low else {"around": autocast}
        literal_stages.append(LiteralStage(stage, make, rules, **how))

    def loss(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if is_low:
            return cross_entropy(output.float(), y)
        with autocast():
            return cross_entropy(output, y)

    inputs = [(x.to(LOW if is_low else x.dtype), y) for x, y in data]
    replay(literal_stages, schedule, method, inputs, loss)
    return literal_stages


CASES: List[Tuple[str, Dict[str, Any], Any]] = [
    ("gpipe", {}, SGD),
    ("pipedream", {}, SGD),
    ("pipedream_2bw", {}, ADAMW),
    ("pipemare", {}, ADAMW),
    ("pipemare", T1_T2, SGD),
    ("pipemare", {"recompute": {"segments": 2}, **T1_T2}, SGD),
    ("pipelined_backprop", PREDICTION, SGD),
    ("pipelined_backprop", PB, SGD),
    ("pipelined_backprop", {"stash": True}, SGD),
    ("spectrain", {}, SGD),
]


@pytest.mark.parametrize("model", ["mlp", "residual"])
@pytest.mark.parametrize(
    "name, args, make", CASES, ids=lambda v: "-".join(v) if isinstance(v, dict) else str(v)[:18]
)
def test_the_emulator_equals_the_literal_replay(
    name: str, args: Any, make: Any, model: str
) -> None:
    method, accumulate = resolve_method(name, args), 5 if name == "pipedream_2bw" else 2
    stages, data = make_float32_stages(model), make_float32_batches(accumulate * 8)
    twins = copy.deepcopy(stages)
    unsplit = join_stages(stages)
    numbers = emulate_in_bfloat16_mixed(unsplit, method, accumulate, data, make, args)
    literal_stages = replay_in_bfloat16_mixed(twins, method, accumulate, data, make, args)
    parameters = {
        f"{s}.{n}": p for s, stage in enumerate(literal_stages) for n, p in stage.parameters.items()
    }
    same = torch.equal if args is not PB else functools.partial(torch.allclose, rtol=0, atol=1e-2)
    for key, weight in unsplit.named_parameters():
        master = numbers.get_trained(weight)
        assert master.dtype == torch.float32 and same(master, parameters[key]), key
        assert torch.equal(weight, master.to(weight.dtype)), key
        is_norm = isinstance(unsplit.get_submodule(key.rpartition(".")[0]), nn.BatchNorm2d)
        assert weight.dtype == (LOW if numbers.row == MASTERS and not is_norm else torch.float32)
    for s, stage in enumerate(literal_stages):
        for key, buffer in stage.module.named_buffers():
            ours = unsplit.get_buffer(f"{s}.{key}")
            assert same(ours, buffer) and ours.dtype in (torch.float32, torch.int64), key


# ---- whole runs


def make_small_config(*over: str) -> Config:
    return make_short_config(
        "evaluate.subset=96", "model.args.width=8", "stages=3", "steps=8", *over
    )


MASTERED = ["method=pipemare", "method_args.t2={}", "precision=bfloat16_mixed"]


def make_normed_mlp() -> nn.Sequential:
    torch.manual_seed(4)
    layers = [
        nn.Linear(64, 12),
        nn.BatchNorm1d(12),
        nn.ReLU(),
        nn.Linear(12, 12),
        nn.ReLU(),
        nn.Linear(12, 10),
    ]
    return nn.Sequential(nn.Flatten(), *layers)


@pytest.mark.parametrize("method", ["gpipe", "pipemare"])
def test_bfloat16_mixed_learns_as_float32_does(method: str, tmp_path: Path) -> None:
    ends = {}
    for precision in ("float32", MIXED):
        adam = "optimizer={name: adam, lr: 0.003, momentum: null}"
        keys = [
            f"method={method}",
            f"precision={precision}",
            "steps=150",
            "evaluate.every=0",
            "micro_batch_size=16",
            adam,
        ]
        summary = train(
            make_short_config("stages=2", "gradient_accumulation=2", *keys),
            tmp_path / precision,
            quiet=True,
        )
        ends[precision] = summary["final"]["test_accuracy"]
        assert summary["precision"] == {
            "name": precision,
            "weights": "bfloat16" if precision == MIXED and method == "pipemare" else "float32",
            "autocast": "bfloat16" if precision == MIXED and method == "gpipe" else None,
            "masters": "float32" if precision == MIXED and method == "pipemare" else None,
        }
    assert ends["float32"] > 0.85 and abs(ends[MIXED] - ends["float32"]) < 0.04, ends


def test_checkpoints_hold_the_masters_and_a_run_resumes_from_them(tmp_path: Path) -> None:
    whole_run, cut = tmp_path / "whole", tmp_path / "cut"
    train(
        make_small_config(*MASTERED, "checkpoint.every=4", "checkpoint.keep=9"),
        whole_run,
        quiet=True,
    )
    shutil.copytree(whole_run, cut)
    shutil.rmtree(cut / "checkpoints" / "step-8")
    (cut / "summary.json").unlink()
    train(
        make_small_config(*MASTERED, "checkpoint.every=4", "checkpoint.keep=9"),
        cut,
        resume=True,
        quiet=True,
    )
    assert_same_state(whole_run, cut)
    assert {value.dtype for value in read_state(cut).values()} == {torch.float32}
    saved = read_weights(cut, 4)
    assert any(not torch.equal(value, value.bfloat16().float()) for value in saved.values())
    loss = evaluate_checkpoint(make_small_config(*MASTERED), cut / "checkpoints" / "step-8")[
        "test_loss"
    ]
    assert loss == read_summary(cut)["final"]["test_loss"]
    with pytest.raises(BadInput, match="precision: bfloat16_mixed -> float32"):
        train(
            make_small_config(*MASTERED[:2], "precision=float32", "steps=12"),
            cut,
            resume=True,
            quiet=True,
        )


def record_output_dtypes(model: nn.Module) -> List[torch.dtype]:
    dtypes: List[torch.dtype] = []
    model.eval()
    handle = model[1].register_forward_hook(lambda m, i, o: dtypes.append(o.dtype))  # type: ignore[index,union-attr]
    model(torch.zeros(4, 1, 8, 8))
    handle.remove()
    return dtypes


@pytest.mark.parametrize(
    "keys", [["precision=bfloat16"], ["precision=bfloat16_mixed"], MASTERED], ids=str
)
@pytest.mark.parametrize("end", ["done", "fault", "Ctrl-C", "refused"])
def test_a_callers_model_has_its_dtype_and_modes_again_at_the_end(
    end: str, keys: List[str], tmp_path: Path
) -> None:
    """Story: when the data was refused, the model had been cast and stayed so."""
    model = make_normed_mlp()
    model[2].eval()
    before, modes = copy.deepcopy(model.state_dict()), [m.training for m in model.modules()]

    class Ends(nn.CrossEntropyLoss):
        calls = 0

        def forward(self, output: Any, y: Any) -> Any:
            self.calls += torch.is_grad_enabled()
            if self.calls == 24 and end != "done":
                raise KeyboardInterrupt if end == "Ctrl-C" else ValueError("enough")
            return super().forward(output, y)

    over = ["data={name: nothing_such}"] if end == "refused" else []
    expected = {"fault": ValueError, "Ctrl-C": KeyboardInterrupt, "refused": BadInput}
    with pytest.raises(expected[end]) if end in expected else contextlib.nullcontext():
        train(
            make_small_config(*keys, *over),
            tmp_path / "run",
            model=model,
            loss=Ends(),
            quiet=True,
        )
    assert [m.training for m in model.modules()] == modes
    after = model.state_dict()
    assert {key: value.dtype for key, value in after.items()} == {
        key: value.dtype for key, value in before.items()
    }
    assert record_output_dtypes(model) == [torch.float32] and "forward" not in vars(model)
    assert torch.equal(after["1.weight"], before["1.weight"]) == (end == "refused")
    if end == "done":
        saved = read_weights(tmp_path / "run", 8)
        assert all(torch.equal(value.float(), after[key].float()) for key, value in saved.items())


def test_keep_dtype_leaves_a_callers_model_in_the_dtype_of_the_training(tmp_path: Path) -> None:
    model = make_normed_mlp()
    train(
        make_small_config("precision=bfloat16"),
        tmp_path / "run",
        model=model,
        quiet=True,
        keep_dtype=True,
    )
    assert {p.dtype for p in model.parameters()} == {LOW}
    model = make_normed_mlp()
    train(
        make_small_config(*MASTERED),
        tmp_path / "masters",
        model=model,
        quiet=True,
        keep_dtype=True,
    )
    assert [model[i].weight.dtype for i in (1, 2)] == [LOW, torch.float32]
    train(
        make_small_config("precision=bfloat16_mixed"),
        tmp_path / "autocast",
        model=make_normed_mlp(),
        quiet=True,
        keep_dtype=True,
    )


class AutocastLayers(nn.Sequential):
    """Layers under an autocast of the model's own, and a layer after them that expects autocast, too."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with autocast():
            x = self[1](self[0](x))
        return self[2](x).float()  # type: ignore[no-any-return]


def test_a_model_with_its_own_autocast_is_observed_under_autocast() -> None:
    """Story: the search for its stages ran outside of autocast, where the model fails."""
    model = AutocastLayers(nn.Flatten(), nn.Linear(64, 12), nn.Linear(12, 10))
    assert (
        len(build(make_small_config("precision=bfloat16_mixed", "stages=2"), model=model).partition)
        == 2
    )


def test_the_meaning_of_a_precision_is_printed() -> None:
    assert "forward and loss under autocast" in format_opening(
        build(make_small_config("precision=bfloat16_mixed"))
    )
    assert "a backward of pipemare reads other weights than its forward" in format_opening(
        build(make_small_config(*MASTERED))
    )
    with pytest.raises(
        BadInput, match="precision: float16: must be .*; did you mean bfloat16_mixed"
    ):
        make_small_config("precision=float16")
    with pytest.raises(BadInput, match="precision: bfloat16_mixed: is not supported on IPUs"):
        make_small_config("precision=bfloat16_mixed", "backend={name: poptorch}", "method=gpipe")


@pytest.mark.parametrize("method", sorted(METHODS))
def test_a_method_resolves_to_autocast_or_masters(method: str) -> None:
    """Autocast's copies of weights are right only if no backward reads other weights than its forward."""
    writes = method in ("pipemare", "pipelined_backprop", "spectrain")
    assert resolve_precision(MIXED, METHODS[method]) == (MASTERS if writes else MIXED)
    assert resolve_precision("bfloat16", METHODS[method]) == "bfloat16"


def test_arguments_of_a_method_change_how_it_resolves() -> None:
    assert resolve_precision(MIXED, resolve_method("pipemare", {"stash": True})) == MIXED
    assert resolve_precision(MIXED, resolve_method("pipedream", {"stash": False})) == MASTERS
    assert (
        resolve_precision(
            MIXED, resolve_method("pipelined_backprop", {"constant_delay": {"updates": 2}})
        )
        == MASTERS
    )
    assert resolve_precision(MIXED, resolve_method("pipemare", {"hogwild": {"max": 3}})) == MIXED


@pytest.mark.parametrize(
    "keys", [["precision=bfloat16_mixed", "method=pipedream"], MASTERED], ids=str
)
def test_memory_is_what_was_planned(keys: List[str], tmp_path: Path) -> None:
    job = build(make_small_config(*keys, "optimizer.momentum=0.9"))
    out = train(make_small_config(*keys, "optimizer.momentum=0.9"), tmp_path / "run", quiet=True)
    memory = json.loads((tmp_path / "run" / "memory.json").read_text())
    numbers = sum(p.numel() for p in job.model.parameters())
    size = 2 if "method=pipemare" in keys else 4
    planned = build_memory_table(job)
    (peak,) = memory["peak_memory"]
    assert peak["weights"] == size * numbers and peak["gradients"] == 4 * numbers
    state_bytes = (1 + ("method=pipemare" in keys)) * 4 * numbers  # momentum; the masters
    ruled = [stage for stage in job.partition.stages if job.rules.list_entries(stage.index)]
    state_bytes += sum(
        4 * job.model.get_parameter(name).numel() for stage in ruled for name in stage.parameters
    )
    assert peak["optimizer"] == state_bytes == sum(row["optimizer_bytes"] for row in planned)
    assert sum(row["gradient_bytes"] for row in planned) == peak["gradients"]
    copies = sum(row["weight_bytes"] for row in planned)
    assert copies == peak["weights"] + peak["versions"] or "method=pipemare" in keys
    assert out["steps"] == 8


def test_a_plan_counts_memory_by_each_methods_resolved_precision() -> None:
    unit = Unit("a", 1e6, 2e6, 1000, 400.0, 2000.0, 4)
    plain = read_hardware("h100x8")
    problem = Problem((unit,), 256.0, plain, 1e9, MIXED, 2)
    problems = [problem, problem.adapt_to("pipemare")]
    assert (
        [adapted.precision for adapted in problems]
        == [problem.adapt_to("pipedream").precision, MASTERS]
        == [MIXED, MASTERS]
    )
    assert [adapted.input_bytes for adapted in problems] == [256.0, 128.0]
    memories = [
        compute_stage_memory(
            unit,
            0.0,
            KeptCounts(2, 0, 3),
            precision=adapted.precision,
            samples=2,
            moments=adapted.moments,
        )
        for adapted in problems
    ]
    # weights and an older version; gradients; moments and master; activations of half size, in the first
    # case with autocast's copies of the weights
    assert [tuple(memory)[:5] for memory in memories] == [
        (4000, 4000, 4000, 8000, 0),
        (2000, 2000, 4000, 12000, 0),
    ]
    assert [memory.activations for memory in memories] == [3 * (2 * 1000 + 2000), 3 * 2 * 1000]
    candidate = Candidate("pipemare", 1, 1, 2, 1, False)
    assert search(problem, [candidate], 1).best[0].memory[0].weights == 2000
