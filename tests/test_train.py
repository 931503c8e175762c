"""Training end to end on digits: the outputs' contract, resuming to the bit, refusals in one line."""

from __future__ import annotations

import contextlib
import functools
import json
import re
from pathlib import Path
from typing import Any, Dict, List, Tuple

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from torch import nn

import ipu_pipe
from ipu_pipe.backends.ranks import read_torch_version
from ipu_pipe.cli import train as tool
from ipu_pipe.config.load import load_config
from ipu_pipe.errors import BadInput, RunFault
from ipu_pipe.job.evaluation import evaluate
from ipu_pipe.model.timing import PassSeconds
from ipu_pipe.pipeline.build import build, set_up
from ipu_pipe.run.train import evaluate_checkpoint, train
from ipu_pipe.store import checkpoint
from ipu_pipe.store.folder import RunFolder, check_folder
from tests.command_line import run_here
from tests.interrupted import interrupted_at
from tests.support.models import Composed
from tests.support.runs import (
    DIGITS,
    ROOT,
    assert_same_weights,
    list_faults,
    read_column,
    read_metrics,
    read_summary,
    read_trace_file,
)

SHORT = [
    "steps=12", "optimizer.lr=0.3", "optimizer.momentum=0", "evaluate.every=1", "log.tensorboard=false",
    "gradient_accumulation=4", "micro_batch_size=8",
]  # fmt: skip


def config(*sets: str) -> Any:
    return load_config(DIGITS, [*SHORT, *sets])


def command(*args: str, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> Tuple[int, str, str]:
    """Exit code, standard output and standard error of tools/train.py with these arguments."""
    monkeypatch.chdir(ROOT)
    return run_here(tool, *args, monkeypatch=monkeypatch, capsys=capsys)


@pytest.fixture()
def run_tool(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> Any:
    return functools.partial(command, monkeypatch=monkeypatch, capsys=capsys)


def sets(*pairs: str) -> List[str]:
    return [item for pair in (*SHORT, *pairs) for item in ("--set", pair)]


# ---- the contract of the outputs


@pytest.mark.parametrize("method", ["gpipe", "pipedream", "pipemare"])
def test_three_kinds_of_methods_train_and_write_all_outputs(
    method: str, tmp_path: Path, run_tool: Any
) -> None:
    out = tmp_path / "run"
    code, printed, _ = run_tool(DIGITS, *sets(f"method={method}", "stages=4"), "--out", str(out))
    assert code == 0
    assert printed.splitlines()[-1].startswith("throughput: ") and printed.splitlines()[
        -1
    ].endswith(" samples/sec")
    float(printed.splitlines()[-1].split()[1])
    report = read_summary(out)
    assert report["schema"] == 2 and report["method"] == method and report["backend"] == "emulator"
    batch = {
        "micro_batch_size": 8,
        "gradient_accumulation": 4,
        "replicas": 1,
        "global_batch_size": 32,
    }
    assert report["batch"] == batch
    assert report["steps"] == 12 and report["samples"] == 12 * 32
    assert report["model"]["stages"] == len(report["stages"]) == 4 and len(report["links"]) == 6
    assert report["final"]["test_loss"] < report["initial"]["test_loss"]
    assert 0 <= report["final"]["test_accuracy"] <= 1
    assert report["utilization"] is report["bubble_fraction"] is None  # no device has a clock
    assert report["planned_utilization"] + report["planned_bubble_fraction"] == pytest.approx(1)
    assert 0 < report["modelled_utilization"] < 1
    assert sum(stage["parameters"] for stage in report["stages"]) == report["model"]["parameters"]
    trained, tested = {"train_loss", "lr", "samples_per_second"}, {"test_loss", "test_accuracy"}
    assert all(set(line) - {"step", "epoch"} in (trained, tested) for line in read_metrics(out))
    trace = read_trace_file(out)
    assert len([e for e in trace["traceEvents"] if e.get("ph") == "X"]) >= 2 * 4 * 48
    assert load_config(out / "config.yaml").method == method
    if method == "gpipe":
        assert report["planned_utilization"] == pytest.approx(4 / 7)


# ---- resuming


def with_state() -> nn.Module:
    """Return a model with running statistics and dropout."""
    torch.manual_seed(0)
    first = [nn.Flatten(), nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2)]
    return nn.Sequential(
        *first,
        ipu_pipe.begin_stage(nn.Linear(32, 32)),
        nn.ReLU(),
        ipu_pipe.begin_stage(nn.Linear(32, 10)),
    )


@pytest.mark.parametrize("method", ["pipemare", "pipedream", "pipedream_2bw", "gpipe"])
def test_resuming_continues_to_the_bit(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = [
        f"method={method}",
        "checkpoint.every=5",
        "optimizer.momentum=0.9",
        "stages=null",
        "lr_schedule.name=cosine",
    ]
    chosen = config(*keys)
    whole = train(chosen, tmp_path / "whole", model=with_state(), quiet=True)
    with interrupted_at(8):
        train(chosen, tmp_path / "cut", model=with_state(), quiet=True)
    cut = train(chosen, tmp_path / "cut", model=with_state(), resume=True, quiet=True)
    assert_same_weights(tmp_path / "whole", tmp_path / "cut")
    assert cut["final"] == whole["final"] and cut["initial"] == whole["initial"]
    assert read_column(tmp_path / "whole", "step") == read_column(tmp_path / "cut", "step")


def test_a_finished_run_says_so(tmp_path: Path, run_tool: Any) -> None:
    first = train(config(), tmp_path / "run", quiet=True)
    code, printed, _ = run_tool(DIGITS, *sets(), "--out", str(tmp_path / "run"), "--resume")
    assert code == 0 and "finished" in printed
    assert read_summary(tmp_path / "run")["final"] == first["final"]


def slow(name: str) -> Any:
    """Return a timer by which one module takes longer than all others."""

    def time_passes(model: Any, losses: Any, begins: Any, backward_flops: Any) -> PassSeconds:
        seconds = [100.0 if i == begins.get(name) else 1.0 for i in range(len(backward_flops))]
        return PassSeconds(seconds, seconds, 1)

    return time_passes


def test_stages_measured_by_time_are_measured_once(
    tmp_path: Path, monkeypatch: Any, run_tool: Any
) -> None:
    """Story: they were measured again on resuming, and other stages went on with the weights."""
    from ipu_pipe.model import stages

    chosen = ["stages={count: 2, by: time}", "method=pipedream", "checkpoint.every=5"]
    monkeypatch.setattr(stages, "time_passes", slow("fc1"))
    with interrupted_at(8):
        train(config(*chosen), tmp_path / "run", quiet=True)
    recorded = load_config(tmp_path / "run" / "config.yaml").stages
    assert recorded == ["relu1"]
    monkeypatch.setattr(stages, "time_passes", slow("fc5"))
    arguments = [DIGITS, *sets(*chosen), "--out", str(tmp_path / "run"), "--against", "gpipe"]
    code, _, complaint = run_tool(*arguments, "--resume")
    assert code == 0, complaint
    assert load_config(tmp_path / "run" / "gpipe" / "config.yaml").stages == recorded
    train(config(*chosen[1:], "stages=[relu1]"), tmp_path / "named", quiet=True)
    assert_same_weights(tmp_path / "run", tmp_path / "named")
    code, printed, _ = run_tool(*arguments, "--resume")
    timed = list((tmp_path / "run").glob("gpipe-accumulate-*"))  # those at equal time too
    assert code == 0 and timed and printed.count("nothing to resume") == 2 + len(timed)
    (
        tmp_path / "run" / "summary.json"
    ).unlink()  # another number of stages may be asked for, and it is told
    code, printed, _ = run_tool(
        DIGITS, *sets(*chosen, "stages.count=3"), "--out", str(tmp_path / "run"), "--resume"
    )
    assert code == 0 and "the run continues with another stages" in printed


@pytest.mark.parametrize("how", ["interrupted", "not finite", "finished"])
def test_a_run_leaves_an_ordinary_model(how: str, tmp_path: Path) -> None:
    """Story: after a fault or Ctrl-C the emulator's hooks stayed, and dropout drew the same mask for ever."""
    model = with_state()
    ends = {
        "interrupted": interrupted_at(8),
        "not finite": pytest.raises(RunFault, match="training loss is"),
    }
    rate = ["optimizer.lr=1e18"] if how == "not finite" else []
    with ends.get(how, contextlib.nullcontext()):
        train(
            config("stages=null", "method=pipemare", *rate),
            tmp_path / "run",
            model=model,
            quiet=True,
        )
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


def test_only_training_moves_a_buffer_that_is_bound_anew(tmp_path: Path) -> None:
    """A count of training forwards, on which the output depends."""

    def forward(m: Any, x: torch.Tensor) -> Any:
        if m.training:
            m.count = m.count + 1
        return m.inner(x.flatten(1)) * (1 + 0.01 * m.count)

    torch.manual_seed(0)
    model = Composed(forward, inner=nn.Linear(64, 10), count=torch.zeros(()))
    train(config("stages=1"), tmp_path / "run", model=model, quiet=True)
    assert float(model.count) == 12 * 4


def test_weights_to_begin_with_are_not_wanted_once_there_is_a_checkpoint(
    tmp_path: Path, run_tool: Any
) -> None:
    """Story: a run could not be resumed or evaluated when that file was gone."""
    from models.mlp import mlp

    save_file(mlp(64, 64).state_dict(), tmp_path / "first.safetensors")
    chosen = [f"init_from={tmp_path / 'first.safetensors'}", "checkpoint.every=5"]
    whole = train(config(*chosen), tmp_path / "whole", quiet=True)
    with interrupted_at(8):
        train(config(*chosen), tmp_path / "cut", quiet=True)
    (tmp_path / "first.safetensors").unlink()
    cut = train(config(*chosen), tmp_path / "cut", resume=True, quiet=True)
    assert cut["final"] == whole["final"]
    assert_same_weights(tmp_path / "cut", tmp_path / "whole")
    code, _, _ = run_tool(
        DIGITS, *sets(*chosen), "--evaluate", str(tmp_path / "cut" / "checkpoints" / "step-12")
    )
    assert code == 0


def test_limits_of_training_do_not_hold_for_evaluation(tmp_path: Path, run_tool: Any) -> None:
    """Story: evaluating built the whole run, and refused what only training cannot do."""
    report = train(config(), tmp_path / "run", quiet=True)
    path = str(tmp_path / "run" / "checkpoints" / "step-12")
    for pairs in (
        ["method=pipedream_2bw", "stages=5", "gradient_accumulation=2"],
        ["data.subset=4"],
    ):
        code, printed, _ = run_tool(DIGITS, *sets(*pairs), "--evaluate", path)
        assert code == 0 and json.loads(printed)["test_loss"] == report["final"]["test_loss"]


class Given:
    """Samples in a row for training and evaluation."""

    def __init__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.x, self.y = x, y

    def train_batches_per_epoch(self, batch_size: int) -> int:
        return len(self.x) // batch_size

    def train_batch(self, epoch: int, index: int, batch_size: int) -> Any:
        chosen = slice(index * batch_size, (index + 1) * batch_size)
        return self.x[chosen], self.y[chosen]

    def test_batches(self, batch_size: int) -> Any:
        return zip(self.x.split(batch_size), self.y.split(batch_size))


@pytest.mark.parametrize("subset", [1, 5, 128, 130, 300])
def test_evaluation_takes_the_subset_and_no_more(subset: int) -> None:
    """Story: it was rounded up to whole batches of 128."""
    x, y = torch.randn(290, 6), torch.randint(0, 3, (290,))
    y[1:120] = -100  # story: these batches counted as much as those whose labels all count
    model = nn.Linear(6, 3)
    chosen = ipu_pipe.configure(evaluate={"subset": subset})
    for loss in (nn.functional.cross_entropy, nn.CrossEntropyLoss()):
        found_loss, metrics = evaluate(set_up(chosen, model, Given(x, y), loss))[-1]
        assert found_loss == pytest.approx(
            float(loss(model(x[:subset]), y[:subset]).detach()), rel=1e-5
        )
        right = (model(x[:subset]).argmax(1) == y[:subset])[y[:subset] != -100].float().mean()
        assert metrics["accuracy"] == pytest.approx(float(right))
    y[:] = -100
    assert evaluate(set_up(chosen, model, Given(x, y))) == [(None, {"accuracy": None})]


def test_a_checkpoint_or_state_dict_is_evaluated_alone(tmp_path: Path, run_tool: Any) -> None:
    report = train(config(), tmp_path / "run", quiet=True)
    path = tmp_path / "run" / "checkpoints" / "step-12"
    assert evaluate_checkpoint(config(), path)["test_loss"] == report["final"]["test_loss"]
    is_safe = (
        read_torch_version() >= checkpoint.SAFE_TORCH
    )  # an older torch reads safetensors alone
    plain, write = (
        (tmp_path / "plain.pt", torch.save)
        if is_safe
        else (tmp_path / "plain.safetensors", save_file)
    )
    write(load_file(path / "model.safetensors"), plain)
    code, printed, _ = run_tool(DIGITS, *sets(), "--evaluate", str(plain))
    assert code == 0 and json.loads(printed)["test_accuracy"] == report["final"]["test_accuracy"]
    begun = train(config(f"init_from={plain}"), tmp_path / "more", quiet=True)
    assert begun["initial"]["test_loss"] == report["final"]["test_loss"]


# ---- what is refused, in one line


def write_config(tmp: Path) -> List[str]:
    (tmp / "run").mkdir()
    (tmp / "run" / "config.yaml").write_text(yaml.safe_dump({"method": "gpipe"}))
    return [DIGITS, "--out", str(tmp / "run")]


def write_file(tmp: Path) -> List[str]:
    (tmp / "file").write_text("")
    return [DIGITS, "--out", str(tmp / "file")]


def write_other_weights(tmp: Path) -> List[str]:
    from models.mlp import mlp

    torch.save({**mlp(64, 64).state_dict(), "other": torch.ones(1)}, tmp / "other.pt")
    return [DIGITS, *sets(f"init_from={tmp / 'other.pt'}")]


def no_model(**rest: Any) -> nn.Module:
    raise KeyError("depth")


WRONG = {
    "no config": (lambda tmp: [], "CONFIG"),
    "unknown option": (lambda tmp: [DIGITS, "--colour"], "--colour"),
    "resume without a folder": (lambda tmp: [DIGITS, "--resume"], "--out DIR"),
    "resume of nothing": (
        lambda tmp: [DIGITS, "--resume-from", "4", "--out", str(tmp / "none")], "contains no run to resume"
    ),
    "occupied folder": (write_config, "contains another run"),
    "a file for a folder": (write_file, "is a file"),
    "a model function that fails": (
        lambda tmp: [DIGITS, *sets("model.entry=tests.test_train:no_model")], "KeyError: 'depth'"
    ),
    "2BW with too few microbatches": (
        lambda tmp: [DIGITS, *sets("method=pipedream_2bw", "stages=5", "gradient_accumulation=2")], "pipedream_2bw"
    ),
    "unknown stage": (lambda tmp: [DIGITS, *sets("stages=[fc2, nowhere]")], "nowhere"),
    "too large a batch": (lambda tmp: [DIGITS, *sets("gradient_accumulation=5000")], "gradient_accumulation"),
    "unknown data": (lambda tmp: [DIGITS, "--set", "data.name=digit"], "digits"),
    "data that is not there": (
        lambda tmp: [DIGITS, *sets("data.name=cifar10", f"data.root={tmp}")], "tools/fetch_data.py cifar10"
    ),
    "model argument": (lambda tmp: [DIGITS, "--set", "model.args.wide=3"], "wide"),
    "model entry": (lambda tmp: [DIGITS, "--set", "model.entry=models.mlp:mlpp"], "mlpp"),
    "a model that does not fit the data": (lambda tmp: [DIGITS, *sets("model.args.inputs=65")], "fails on a microbatch"),
    "other weights": (write_other_weights, "other.pt"),
    "global clipping of an asynchronous method": (
        lambda tmp: [DIGITS, *sets("method=pipemare", "clip.norm=1", "clip.scope=global")],
        "scope: stage with norm: 0.5 (norm / sqrt(stages)",
    ),
    "no cuda": (lambda tmp: [DIGITS, *sets("backend.device=cuda")], "cuda"),
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [n for n in WRONG if n != "no cuda" or not torch.cuda.is_available()]
)
def test_bad_input_is_one_line_and_exit_code_2(name: str, tmp_path: Path, run_tool: Any) -> None:
    arguments, message = WRONG[name]
    before = arguments(tmp_path)
    listed = sorted(p.name for p in tmp_path.iterdir())
    out = (
        []
        if "--out" in before or "--resume" in before or not before
        else ["--out", str(tmp_path / "new")]
    )
    code, printed, complaint = run_tool(*before, *out)
    assert code == 2, printed + complaint
    lines = complaint.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: ") and message in lines[0], complaint
    assert sorted(p.name for p in tmp_path.iterdir()) == listed  # nothing is written, nothing lost


def make_derived() -> nn.Module:
    first, last = ipu_pipe.begin_stage(nn.Linear(64, 8)), ipu_pipe.begin_stage(nn.Identity())
    return Composed(
        lambda m, x: m.last(nn.functional.linear(m.first(x.flatten(1)), m.weight * 1)),
        first=first, weight=nn.Parameter(torch.randn(10, 8)), last=last,
    )  # fmt: skip


def test_derived_weights_are_refused_by_name_where_it_matters(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="tensors derived from weight"):
        train(
            config("method=pipemare", "stages=null"),
            tmp_path / "a",
            model=make_derived(),
            quiet=True,
        )
    assert not (tmp_path / "a" / "config.yaml").exists()
    train(
        config("method=pipedream", "stages=null"), tmp_path / "b", model=make_derived(), quiet=True
    )


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path: Path, run_tool: Any) -> None:
    wild = sets("optimizer.lr=1e18", "method=pipemare")
    code, _, complaint = run_tool(DIGITS, *wild, "--out", str(tmp_path / "a"))
    assert (
        code == 1
        and len([line for line in complaint.splitlines() if line.startswith("error: ")]) == 1
    )
    assert "update " in complaint and "pipemare" in complaint
    code, _, _ = run_tool(
        DIGITS, *wild, "--set", "allow_nonfinite=true", "--out", str(tmp_path / "b")
    )
    assert code == 0
    assert read_summary(tmp_path / "b")["final"]["test_loss"] is None


# ---- from the command line and from Python


def test_dry_run_prints_the_plan_and_writes_nothing(tmp_path: Path, run_tool: Any) -> None:
    code, printed, _ = run_tool(
        DIGITS, *sets("method=pipemare"), "--dry-run", "--out", str(tmp_path / "run")
    )
    assert code == 0 and not (tmp_path / "run").exists()
    for word in ("global batch size 32", "stage", "delay", "copies", "memory", "F0"):
        assert word in printed


@pytest.mark.parametrize("config_last", [False, True])
def test_several_settings_may_follow_one_flag(config_last: bool, run_tool: Any) -> None:
    settings = ["--set", "micro_batch_size=8", "gradient_accumulation=3"]
    code, printed, _ = run_tool(
        "--dry-run", *([*settings, DIGITS] if config_last else [DIGITS, *settings])
    )
    assert code == 0 and "global batch size 24" in printed


def test_the_readmes_example_runs() -> None:
    """Story: it gave the run's folder as text, which failed."""
    loop, model = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    x = torch.randn(64, 64)
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(x, x[:, :10].argmax(1)), batch_size=8
    )
    printed: List[Any] = []
    names: Dict[str, Any] = {
        "my_train_loader": loader,
        "my_test_loader": loader,
        "print": lambda *words: printed.append(words),
    }
    exec(model + loop, names)
    # the updates but those that the evaluation's drain has finished, then the evaluation
    assert [words[0] for words in printed[:-1]] == list(range(6))
    assert set(printed[-1][0]) == {"loss", "accuracy"}


def test_learning_rates_and_clipping_reach_the_optimizer(tmp_path: Path) -> None:
    seen: List[float] = []

    class Seeing(torch.optim.SGD):
        def step(self, *args: Any) -> Any:  # type: ignore[override]
            seen.append(self.param_groups[0]["lr"])
            assert all(
                p.grad is None or p.grad.norm() <= 0.0101
                for g in self.param_groups
                for p in g["params"]
            )
            return super().step(*args)

    keys = [
        "lr_schedule={name: linear, warmup_steps: 4}",
        "clip={norm: 0.01, scope: stage}",
        "method=pipemare",
    ]
    train(config(*keys), tmp_path / "run", optimizer=functools.partial(Seeing, lr=0.4), quiet=True)
    assert len(seen) == 12 and max(seen) <= 0.4 and seen[0] < seen[3] and seen[-1] < seen[4]


# ---- a second run beside the first


def _files(folder: Path) -> Dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_the_run_to_compare_with_is_deleted_only_when_asked(tmp_path: Path, run_tool: Any) -> None:
    """Story: a run that stood in DIR/METHOD was lost without --overwrite."""
    train(config("method=gpipe"), tmp_path / "out" / "gpipe", quiet=True)
    before = _files(tmp_path)
    arguments = [DIGITS, *sets(), "--out", str(tmp_path / "out"), "--against", "gpipe"]
    code, _, complaint = run_tool(*arguments)
    assert code == 2 and "gpipe: contains another run" in complaint and complaint.count("\n") == 1
    assert _files(tmp_path) == before
    for option in ("--overwrite", "--resume"):  # a run that is finished is not run again
        code, printed, _ = run_tool(*arguments, option)
        assert (
            code == 0
            and "by pipedream" in printed
            and printed.splitlines()[-1].startswith("throughput: ")
        )


def test_a_comparison_that_is_not_possible_is_reported_first(tmp_path: Path, run_tool: Any) -> None:
    """Story: it was told after the first run had taken its time."""
    arguments = [
        DIGITS,
        *sets("gradient_accumulation=2"),
        "--out",
        str(tmp_path / "out"),
        "--against",
        "pipedream_2bw",
    ]
    code, _, complaint = run_tool(*arguments)
    assert code == 2 and "pipedream_2bw" in complaint and not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_comparison_without_a_test_set_is_unknown(tmp_path: Path, run_tool: Any) -> None:
    pairs = sets("data={name: 'tests.test_train:without_tests'}")
    code, printed, complaint = run_tool(
        DIGITS, *pairs, "--out", str(tmp_path / "out"), "--against", "gpipe"
    )
    assert code == 0, complaint
    assert "test loss unknown by pipedream, unknown by gpipe: unknown" in printed


def without_tests() -> Any:
    x = torch.randn(64, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(64) % 10
    return ipu_pipe.from_loader(
        torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, labels), batch_size=8)
    )


def test_one_update_has_no_throughput(tmp_path: Path, run_tool: Any) -> None:
    code, printed, _ = run_tool(DIGITS, *sets("steps=1"), "--out", str(tmp_path / "out"))
    assert code == 0 and printed.splitlines()[-1] == "throughput: not measured (one update only)"


def test_the_folder_of_data_may_come_from_the_environment(
    tmp_path: Path, monkeypatch: Any, run_tool: Any
) -> None:
    """Story: $IPU_PIPE_DATA took the place of the config's own data.root, and became an argument of data entries."""
    monkeypatch.setenv("IPU_PIPE_DATA", str(tmp_path / "variable"))
    for root, place in ((str(tmp_path / "own"), "own"), ("null", "variable")):
        code, _, complaint = run_tool(
            DIGITS, *sets("data.name=mnist", f"data.root={root}"), "--dry-run"
        )
        assert code == 2 and str(tmp_path / place / "mnist") in complaint
    code, _, complaint = run_tool(
        DIGITS, *sets("data={name: 'tests.test_train:without_tests'}"), "--dry-run"
    )
    assert code == 0, complaint


# ---- what cannot be trained or kept


def make_complex() -> nn.Module:
    weight = nn.Parameter(torch.randn(10, dtype=torch.cfloat))
    return Composed(
        lambda m, x: (m.inner(x.flatten(1)) * m.w).real, inner=nn.Linear(64, 10), w=weight
    )


class Extra(nn.Sequential):
    def get_extra_state(self) -> Any:
        return {"version": 1}

    def set_extra_state(self, state: Any) -> None:
        pass


class SparseBuffer(nn.Linear):
    def __init__(self) -> None:
        super().__init__(64, 10)
        self.register_buffer("near", torch.eye(3).to_sparse())


class Failing(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise KeyError("x")


@pytest.mark.parametrize("model, message", [
    (make_complex(), "model: w: complex"),  # story: it became real without a word
    (Extra(nn.Flatten(), nn.Linear(64, 10)), "model: _extra_state: is not a dense tensor"),  # story: checkpoints gave a traceback
    (SparseBuffer(), "model: near: is not a dense tensor"),
    (nn.Sequential(nn.Embedding(9, 4, sparse=True)), "model: 0: gradients must be dense"),
    (nn.Sequential(nn.Flatten(), Failing(64, 10)), "model: it fails on a microbatch of shape (8, 1, 8, 8), torch.float32: Key"),
])  # fmt: skip
def test_models_that_cannot_be_trained_or_kept_are_refused(model: nn.Module, message: str) -> None:
    (fault,) = list_faults(build, config("stages=1"), model=model)
    assert fault.startswith(message)


def test_an_optimizer_of_other_groups_is_refused() -> None:
    """Story: a factory that ignored the groups it was given ended in a KeyError."""
    model = with_state()
    for factory, message in (
        (
            lambda groups: torch.optim.SGD(model.parameters(), lr=0.1),
            "must be made from the groups",
        ),
        (lambda groups: None, "returned None"),
    ):
        with pytest.raises(BadInput, match=message):
            build(config("stages=null"), model=model, optimizer=factory)


def test_a_loss_may_be_the_class_of_a_module() -> None:
    """Story: the class itself was called, and the model blamed."""
    assert isinstance(build(config("loss=torch.nn:CrossEntropyLoss")).loss, nn.CrossEntropyLoss)
    with pytest.raises(BadInput, match="^loss.blank_size: missing"):
        build(config("loss=tests.test_train:Sized"))


class Sized(nn.Module):
    def __init__(self, blank_size: int) -> None:
        super().__init__()


def test_a_model_that_works_in_place_leaves_the_data(tmp_path: Path) -> None:
    """Story: every look at the first microbatch before training halved it."""
    data = without_tests()
    first = data.train_batch(0, 0, 8)[0].clone()
    in_place = Composed(lambda m, x: m.inner(x.flatten(1).mul_(0.5)), inner=nn.Linear(64, 10))
    build(config("stages=1"), model=in_place, data=data)
    assert torch.equal(data.train_batch(0, 0, 8)[0], first)


@pytest.mark.skipif(
    not Path("/dev/full").exists(), reason="a device on which nothing can be written"
)
def test_metrics_that_cannot_be_written_are_a_fault(tmp_path: Path) -> None:
    """Story: a full disk gave a traceback."""
    run = RunFolder(tmp_path / "run")
    run.open_metrics(0)
    run.write_metrics({"step": 1})
    run.close()
    run._metrics = open("/dev/full", "w")
    with pytest.raises(RunFault, match="metrics.jsonl: cannot be written: No space left on device"):
        run.write_metrics({"step": 2})
    run.close()  # says nothing more
    (tmp_path / "run" / "metrics.jsonl").unlink()
    (tmp_path / "run" / "metrics.jsonl").mkdir()
    with pytest.raises(RunFault, match="metrics.jsonl"):
        run.open_metrics(1)


def test_a_loss_without_a_gradient_is_refused() -> None:
    """Story: the first backward gave a traceback."""
    model = with_state().requires_grad_(False)
    model.spare = nn.Linear(3, 3)  # trainable, and no part of the forward
    counted = lambda x, y: (x.argmax(1) == y).float().mean()  # noqa: E731
    for built, loss in ((model, nn.functional.cross_entropy), (with_state(), counted)):
        built.forward = functools.partial(_without_spare, built)  # type: ignore[method-assign]
        with pytest.raises(BadInput, match="nothing to train"):
            build(config("stages=1"), model=built, loss=loss)


def _without_spare(model: Any, x: torch.Tensor) -> torch.Tensor:
    for name, module in model.named_children():
        x = x if name == "spare" else module(x)
    return x


@pytest.mark.parametrize(
    "optimizer", ["{name: sgd, lr: 0.1, momentum: 0.9}", "{name: adamw, lr: 0.01}"]
)
@pytest.mark.parametrize("method", ["pipemare", "pipedream"])
def test_parameters_that_are_frozen_or_unused_stay_as_they_are(
    optimizer: str, method: str, tmp_path: Path
) -> None:
    model = with_state()
    model[1].requires_grad_(False)
    model[5].bias.requires_grad_(False)
    model[7].spare = nn.Linear(3, 3)  # its weights lie on the last stage, and nothing reads them
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    rules = ["method_args={t2: {}}"] if method == "pipemare" else []
    chosen = config(
        f"method={method}", *rules, "stages=null", "optimizer=null", f"optimizer={optimizer}"
    )
    train(chosen, tmp_path / "run", model=model, quiet=True)
    same_as_before = {name for name, p in model.named_parameters() if torch.equal(p, before[name])}
    assert same_as_before == {"1.weight", "1.bias", "5.bias", "7.spare.weight", "7.spare.bias"}


class Forbidden(type(Path())):  # type: ignore[misc]
    """A path in a folder that may not be read: root, which tests may run as, reads them all."""

    def stat(self, **keys: Any) -> Any:
        raise PermissionError(13, "Permission denied", str(self))


def test_a_folder_that_may_not_be_read_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Story: asking whether a file is there gave a traceback."""
    for resume in (False, True):
        with pytest.raises(BadInput, match="^--out: .*Permission denied"):
            check_folder(Forbidden(tmp_path / "run"), resume)


def test_scalars_that_cannot_be_written_are_a_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.utils.tensorboard import SummaryWriter

    def full(*args: Any, **keys: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(SummaryWriter, "add_scalar", full)
    with pytest.raises(RunFault, match="tensorboard: .*No space left on device"):
        train(config("log.tensorboard=true"), tmp_path / "run", quiet=True)


def test_a_run_without_checkpoints_writes_none_and_starts_again(
    tmp_path: Path, capsys: Any
) -> None:
    plain = train(config("steps=6"), tmp_path / "plain", quiet=True)
    assert (tmp_path / "plain" / "checkpoints").is_dir()
    without = train(config("steps=6", "checkpoint=null"), tmp_path / "run", quiet=True)
    assert not (tmp_path / "run" / "checkpoints").exists()
    assert without["final"] == plain["final"]
    longer = train(config("steps=12", "checkpoint=null"), tmp_path / "run", resume=True)
    assert longer["final"] == train(config("steps=12"), tmp_path / "longer", quiet=True)["final"]
    assert "from the beginning" in capsys.readouterr().out


def test_the_best_weights_need_checkpoints(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="^checkpoint: null: .*restore_best"):
        train(
            config("checkpoint=null", "early_stopping={restore_best: true}"),
            tmp_path / "run",
            quiet=True,
        )
    assert not (tmp_path / "run").exists()
