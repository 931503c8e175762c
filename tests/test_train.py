"""Check training end to end on digits: the outputs, bitwise resuming, refusals in one line."""

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
from ipu_pipe.pipeline.build import set_up
from ipu_pipe.run.build import build
from ipu_pipe.run.train import evaluate_checkpoint, train
from ipu_pipe.store import checkpoint
from ipu_pipe.store.folder import RunFolder, check_folder
from tests.command_line import run_here
from tests.interrupted import interrupt_at
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


def make_short_config(*sets: str) -> Any:
    return load_config(DIGITS, [*SHORT, *sets])


def run_train_here(
    *args: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> Tuple[int, str, str]:
    """Run tools/train.py with these arguments; return exit code, standard output and standard
    error."""
    monkeypatch.chdir(ROOT)
    return run_here(tool, *args, monkeypatch=monkeypatch, capsys=capsys)


@pytest.fixture()
def run_train_tool(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> Any:
    return functools.partial(run_train_here, monkeypatch=monkeypatch, capsys=capsys)


def make_set_options(*pairs: str) -> List[str]:
    return [item for pair in (*SHORT, *pairs) for item in ("--set", pair)]


# ---- outputs


@pytest.mark.parametrize("method", ["gpipe", "pipedream", "pipemare"])
def test_three_kinds_of_methods_train_and_write_all_outputs(
    method: str, tmp_path: Path, run_train_tool: Any
) -> None:
    out = tmp_path / "run"
    code, output, _ = run_train_tool(
        DIGITS, *make_set_options(f"method={method}", "stages=4"), "--out", str(out)
    )
    assert code == 0
    assert output.splitlines()[-1].startswith("throughput: ") and output.splitlines()[-1].endswith(
        " samples/sec"
    )
    float(output.splitlines()[-1].split()[1])
    summary = read_summary(out)
    assert (
        summary["schema"] == 2 and summary["method"] == method and summary["backend"] == "emulator"
    )
    batch = {
        "micro_batch_size": 8,
        "gradient_accumulation": 4,
        "replicas": 1,
        "global_batch_size": 32,
    }
    assert summary["batch"] == batch
    assert summary["steps"] == 12 and summary["samples"] == 12 * 32
    assert summary["model"]["stages"] == len(summary["stages"]) == 4 and len(summary["links"]) == 6
    assert summary["final"]["test_loss"] < summary["initial"]["test_loss"]
    assert 0 <= summary["final"]["test_accuracy"] <= 1
    assert summary["utilization"] is summary["bubble_fraction"] is None  # no device has a clock
    assert summary["planned_utilization"] + summary["planned_bubble_fraction"] == pytest.approx(1)
    assert 0 < summary["modelled_utilization"] < 1
    assert sum(stage["parameters"] for stage in summary["stages"]) == summary["model"]["parameters"]
    training_keys, evaluation_keys = (
        {"train_loss", "lr", "samples_per_second"},
        {"test_loss", "test_accuracy"},
    )
    assert all(
        set(line) - {"step", "epoch"} in (training_keys, evaluation_keys)
        for line in read_metrics(out)
    )
    trace = read_trace_file(out)
    assert len([e for e in trace["traceEvents"] if e.get("ph") == "X"]) >= 2 * 4 * 48
    assert load_config(out / "config.yaml").method == method
    if method == "gpipe":
        assert summary["planned_utilization"] == pytest.approx(4 / 7)


# ---- resuming


def make_stateful_model() -> nn.Module:
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
    settings = [
        f"method={method}",
        "checkpoint.every=5",
        "optimizer.momentum=0.9",
        "stages=null",
        "lr_schedule.name=cosine",
    ]
    config = make_short_config(*settings)
    whole = train(config, tmp_path / "whole", model=make_stateful_model(), quiet=True)
    with interrupt_at(8):
        train(config, tmp_path / "cut", model=make_stateful_model(), quiet=True)
    resumed = train(config, tmp_path / "cut", model=make_stateful_model(), resume=True, quiet=True)
    assert_same_weights(tmp_path / "whole", tmp_path / "cut")
    assert resumed["final"] == whole["final"] and resumed["initial"] == whole["initial"]
    assert read_column(tmp_path / "whole", "step") == read_column(tmp_path / "cut", "step")


def test_resuming_a_finished_run_prints_that_it_is_finished(
    tmp_path: Path, run_train_tool: Any
) -> None:
    first = train(make_short_config(), tmp_path / "run", quiet=True)
    code, output, _ = run_train_tool(
        DIGITS, *make_set_options(), "--out", str(tmp_path / "run"), "--resume"
    )
    assert code == 0 and "finished" in output
    assert read_summary(tmp_path / "run")["final"] == first["final"]


def make_slow_timer(name: str) -> Any:
    """Return a timer by which one module takes longer than all others."""

    def time_passes(model: Any, losses: Any, begins: Any, backward_flops: Any) -> PassSeconds:
        seconds = [100.0 if i == begins.get(name) else 1.0 for i in range(len(backward_flops))]
        return PassSeconds(seconds, seconds, [0.0] * len(seconds))

    return time_passes


@pytest.mark.slow
def test_stages_measured_by_time_are_measured_once(
    tmp_path: Path, monkeypatch: Any, run_train_tool: Any
) -> None:
    """The stages were once measured again on resuming, and other stages continued with the
    weights."""
    from ipu_pipe.model import stages

    settings = ["stages={count: 2, by: time}", "method=pipedream", "checkpoint.every=5"]
    monkeypatch.setattr(stages, "time_passes", make_slow_timer("fc1"))
    with interrupt_at(8):
        train(make_short_config(*settings), tmp_path / "run", quiet=True)
    recorded = load_config(tmp_path / "run" / "config.yaml").stages
    assert recorded == ["relu1"]
    monkeypatch.setattr(stages, "time_passes", make_slow_timer("fc5"))
    arguments = [
        DIGITS,
        *make_set_options(*settings),
        "--out",
        str(tmp_path / "run"),
        "--against",
        "gpipe",
    ]
    code, _, errors = run_train_tool(*arguments, "--resume")
    assert code == 0, errors
    assert load_config(tmp_path / "run" / "gpipe" / "config.yaml").stages == recorded
    train(make_short_config(*settings[1:], "stages=[relu1]"), tmp_path / "named", quiet=True)
    assert_same_weights(tmp_path / "run", tmp_path / "named")
    code, output, _ = run_train_tool(*arguments, "--resume")
    runs_at_equal_time = list((tmp_path / "run").glob("gpipe-accumulate-*"))
    assert (
        code == 0
        and runs_at_equal_time
        and output.count("nothing to resume") == 2 + len(runs_at_equal_time)
    )
    # another number of stages may be requested, and is reported
    (tmp_path / "run" / "summary.json").unlink()
    code, output, _ = run_train_tool(
        DIGITS,
        *make_set_options(*settings, "stages.count=3"),
        "--out",
        str(tmp_path / "run"),
        "--resume",
    )
    assert code == 0 and "the run continues with another stages" in output


@pytest.mark.parametrize("ending", ["interrupted", "not finite", "finished"])
def test_a_run_leaves_an_ordinary_model(ending: str, tmp_path: Path) -> None:
    """After a fault or Ctrl-C the emulator's hooks once stayed, and dropout drew the same mask
    for ever."""
    model = make_stateful_model()
    contexts = {
        "interrupted": interrupt_at(8),
        "not finite": pytest.raises(RunFault, match="training loss is"),
    }
    rate = ["optimizer.lr=1e18"] if ending == "not finite" else []
    with contexts.get(ending, contextlib.nullcontext()):
        train(
            make_short_config("stages=null", "method=pipemare", *rate),
            tmp_path / "run",
            model=model,
            quiet=True,
        )
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


def test_only_training_changes_a_buffer_that_is_rebound(tmp_path: Path) -> None:
    """The buffer counts training forwards, and the output depends on it."""

    def forward(m: Any, x: torch.Tensor) -> Any:
        if m.training:
            m.count = m.count + 1
        return m.inner(x.flatten(1)) * (1 + 0.01 * m.count)

    torch.manual_seed(0)
    model = Composed(forward, inner=nn.Linear(64, 10), count=torch.zeros(()))
    train(make_short_config("stages=1"), tmp_path / "run", model=model, quiet=True)
    assert float(model.count) == 12 * 4


def test_initial_weights_are_not_needed_once_a_checkpoint_exists(
    tmp_path: Path, run_train_tool: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run once could not be resumed or evaluated when that file was missing."""
    from models.mlp import mlp

    save_file(mlp(64, 64).state_dict(), tmp_path / "first.safetensors")
    settings = [f"init_from={tmp_path / 'first.safetensors'}", "checkpoint.every=5"]
    whole = train(make_short_config(*settings), tmp_path / "whole", quiet=True)
    with interrupt_at(8):
        train(make_short_config(*settings), tmp_path / "cut")
    assert "cut: --resume continues after update 5\n" in capsys.readouterr().out
    (tmp_path / "first.safetensors").unlink()
    resumed = train(make_short_config(*settings), tmp_path / "cut", resume=True, quiet=True)
    assert resumed["final"] == whole["final"]
    assert_same_weights(tmp_path / "cut", tmp_path / "whole")
    code, _, _ = run_train_tool(
        DIGITS,
        *make_set_options(*settings),
        "--evaluate",
        str(tmp_path / "cut" / "checkpoints" / "step-12"),
    )
    assert code == 0


def test_limits_of_training_do_not_apply_to_evaluation(tmp_path: Path, run_train_tool: Any) -> None:
    """Evaluation once built the whole run, and refused configs that only training cannot run."""
    report = train(make_short_config(), tmp_path / "run", quiet=True)
    path = str(tmp_path / "run" / "checkpoints" / "step-12")
    for pairs in (
        ["method=pipedream_2bw", "stages=5", "gradient_accumulation=2"],
        ["data.subset=4"],
    ):
        code, output, _ = run_train_tool(DIGITS, *make_set_options(*pairs), "--evaluate", path)
        assert code == 0 and json.loads(output)["test_loss"] == report["final"]["test_loss"]


class TensorRows:
    """A data source that serves the samples of two tensors in their order."""

    def __init__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.x, self.y = x, y

    def train_batches_per_epoch(self, batch_size: int) -> int:
        return len(self.x) // batch_size

    def train_batch(self, epoch: int, index: int, batch_size: int) -> Any:
        rows = slice(index * batch_size, (index + 1) * batch_size)
        return self.x[rows], self.y[rows]

    def test_batches(self, batch_size: int) -> Any:
        return zip(self.x.split(batch_size), self.y.split(batch_size))


@pytest.mark.parametrize("subset", [1, 5, 128, 130, 300])
def test_evaluation_takes_the_subset_and_no_more(subset: int) -> None:
    """The subset was once rounded up to whole batches of 128."""
    x, y = torch.randn(290, 6), torch.randint(0, 3, (290,))
    y[1:120] = -100  # these batches once had the same weight as batches without ignored labels
    model = nn.Linear(6, 3)
    config = ipu_pipe.configure(evaluate={"subset": subset})
    for loss in (nn.functional.cross_entropy, nn.CrossEntropyLoss()):
        evaluated_loss, metrics = evaluate(set_up(config, model, TensorRows(x, y), loss))[-1]
        assert evaluated_loss == pytest.approx(
            float(loss(model(x[:subset]), y[:subset]).detach()), rel=1e-5
        )
        accuracy = (model(x[:subset]).argmax(1) == y[:subset])[y[:subset] != -100].float().mean()
        assert metrics["accuracy"] == pytest.approx(float(accuracy))
    y[:] = -100
    assert evaluate(set_up(config, model, TensorRows(x, y))) == [(None, {"accuracy": None})]


def test_a_checkpoint_or_state_dict_is_evaluated_alone(tmp_path: Path, run_train_tool: Any) -> None:
    report = train(make_short_config(), tmp_path / "run", quiet=True)
    path = tmp_path / "run" / "checkpoints" / "step-12"
    assert (
        evaluate_checkpoint(make_short_config(), path)["test_loss"] == report["final"]["test_loss"]
    )
    # an older torch reads safetensors alone
    is_safe = read_torch_version() >= checkpoint.SAFE_TORCH
    weights_file, write = (
        (tmp_path / "plain.pt", torch.save)
        if is_safe
        else (tmp_path / "plain.safetensors", save_file)
    )
    write(load_file(path / "model.safetensors"), weights_file)
    code, output, _ = run_train_tool(DIGITS, *make_set_options(), "--evaluate", str(weights_file))
    assert code == 0 and json.loads(output)["test_accuracy"] == report["final"]["test_accuracy"]
    continued = train(make_short_config(f"init_from={weights_file}"), tmp_path / "more", quiet=True)
    assert continued["initial"]["test_loss"] == report["final"]["test_loss"]


# ---- refusals, in one line


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
    return [DIGITS, *make_set_options(f"init_from={tmp / 'other.pt'}")]


def fail_to_make_model(**rest: Any) -> nn.Module:
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
        lambda tmp: [DIGITS, *make_set_options("model.entry=tests.test_train:fail_to_make_model")], "KeyError: 'depth'"
    ),
    "2BW with too few microbatches": (
        lambda tmp: [DIGITS, *make_set_options("method=pipedream_2bw", "stages=5", "gradient_accumulation=2")], "pipedream_2bw"
    ),
    "unknown stage": (lambda tmp: [DIGITS, *make_set_options("stages=[fc2, nowhere]")], "nowhere"),
    "too large a batch": (lambda tmp: [DIGITS, *make_set_options("gradient_accumulation=5000")], "gradient_accumulation"),
    "unknown data": (lambda tmp: [DIGITS, "--set", "data.name=digit"], "digits"),
    "data that is not there": (
        lambda tmp: [DIGITS, *make_set_options("data.name=cifar10", f"data.root={tmp}")], "tools/fetch_data.py cifar10"
    ),
    "model argument": (lambda tmp: [DIGITS, "--set", "model.args.wide=3"], "wide"),
    "model entry": (lambda tmp: [DIGITS, "--set", "model.entry=models.mlp:mlpp"], "mlpp"),
    "a model that does not fit the data": (
        lambda tmp: [DIGITS, *make_set_options("model.args.inputs=65")], "fails on a microbatch"
    ),
    "other weights": (write_other_weights, "other.pt"),
    "global clipping of an asynchronous method": (
        lambda tmp: [DIGITS, *make_set_options("method=pipemare", "clip.norm=1", "clip.scope=global")],
        "clip: {scope: stage, norm: 0.5} (norm / sqrt(stages)",
    ),
    "no cuda": (lambda tmp: [DIGITS, *make_set_options("backend.device=cuda")], "cuda"),
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [n for n in WRONG if n != "no cuda" or not torch.cuda.is_available()]
)
def test_bad_input_is_one_line_and_exit_code_2(
    name: str, tmp_path: Path, run_train_tool: Any
) -> None:
    arguments, message = WRONG[name]
    before = arguments(tmp_path)
    listed = sorted(p.name for p in tmp_path.iterdir())
    out = (
        []
        if "--out" in before or "--resume" in before or not before
        else ["--out", str(tmp_path / "new")]
    )
    code, output, errors = run_train_tool(*before, *out)
    assert code == 2, output + errors
    # arguments of the model of the file are left out, with a warning
    lines = [line for line in errors.splitlines() if not line.startswith("warning: ")]
    assert len(lines) == 1 and lines[0].startswith("error: ") and message in lines[0], errors
    assert sorted(p.name for p in tmp_path.iterdir()) == listed  # nothing is written or deleted


def make_derived() -> nn.Module:
    first, last = ipu_pipe.begin_stage(nn.Linear(64, 8)), ipu_pipe.begin_stage(nn.Identity())
    return Composed(
        lambda m, x: m.last(nn.functional.linear(m.first(x.flatten(1)), m.weight * 1)),
        first=first, weight=nn.Parameter(torch.randn(10, 8)), last=last,
    )  # fmt: skip


def test_derived_weights_are_refused_by_name_where_it_matters(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="tensors derived from weight"):
        train(
            make_short_config("method=pipemare", "stages=null"),
            tmp_path / "a",
            model=make_derived(),
            quiet=True,
        )
    assert not (tmp_path / "a" / "config.yaml").exists()
    train(
        make_short_config("method=pipedream", "stages=null"),
        tmp_path / "b",
        model=make_derived(),
        quiet=True,
    )


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path: Path, run_train_tool: Any) -> None:
    arguments = make_set_options("optimizer.lr=1e18", "method=pipemare")
    code, _, errors = run_train_tool(DIGITS, *arguments, "--out", str(tmp_path / "a"))
    assert (
        code == 1 and len([line for line in errors.splitlines() if line.startswith("error: ")]) == 1
    )
    assert "update " in errors and "pipemare" in errors
    code, _, _ = run_train_tool(
        DIGITS, *arguments, "--set", "allow_nonfinite=true", "--out", str(tmp_path / "b")
    )
    assert code == 0
    assert read_summary(tmp_path / "b")["final"]["test_loss"] is None


# ---- from the command line and from Python


def test_dry_run_prints_the_plan_and_writes_nothing(tmp_path: Path, run_train_tool: Any) -> None:
    code, output, _ = run_train_tool(
        DIGITS, *make_set_options("method=pipemare"), "--dry-run", "--out", str(tmp_path / "run")
    )
    assert code == 0 and not (tmp_path / "run").exists()
    for word in ("global batch size 32", "stage", "delay", "copies", "memory", "F0"):
        assert word in output


@pytest.mark.parametrize("config_last", [False, True])
def test_several_settings_may_follow_one_flag(config_last: bool, run_train_tool: Any) -> None:
    settings = ["--set", "micro_batch_size=8", "gradient_accumulation=3"]
    code, output, _ = run_train_tool(
        "--dry-run", *([*settings, DIGITS] if config_last else [DIGITS, *settings])
    )
    assert code == 0 and "global batch size 24" in output


def test_the_readmes_example_runs() -> None:
    """The example once passed the run's folder as text, which failed."""
    model, loop = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    x = torch.randn(64, 64)
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(x, x[:, :10].argmax(1)), batch_size=8
    )
    output: List[Any] = []
    names: Dict[str, Any] = {
        "my_train_loader": loader,
        "my_test_loader": loader,
        "print": lambda *words: output.append(words),
    }
    exec(model + loop, names)
    # all updates except those that the evaluation's drain finished, then the evaluation
    assert [words[0] for words in output[:-1]] == list(range(6))
    assert set(output[-1][0]) == {"loss", "accuracy"}


def test_learning_rates_and_clipping_reach_the_optimizer(tmp_path: Path) -> None:
    rates: List[float] = []

    class RateRecorder(torch.optim.SGD):
        def step(self, *args: Any) -> Any:  # type: ignore[override]
            rates.append(self.param_groups[0]["lr"])
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
    train(
        make_short_config(*keys),
        tmp_path / "run",
        optimizer=functools.partial(RateRecorder, lr=0.4),
        quiet=True,
    )
    # a copy is stepped once, to find out whether it couples parameters
    rates = rates[-12:]
    assert len(rates) == 12 and max(rates) <= 0.4 and rates[0] < rates[3] and rates[-1] < rates[4]


# ---- a comparison with a second run


def _read_all_files(folder: Path) -> Dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_the_run_to_compare_with_is_deleted_only_when_asked(
    tmp_path: Path, run_train_tool: Any
) -> None:
    """A run in DIR/METHOD was once lost without --overwrite."""
    train(make_short_config("method=gpipe"), tmp_path / "out" / "gpipe", quiet=True)
    before = _read_all_files(tmp_path)
    arguments = [DIGITS, *make_set_options(), "--out", str(tmp_path / "out"), "--against", "gpipe"]
    code, _, errors = run_train_tool(*arguments)
    assert code == 2 and "gpipe: contains another run" in errors and errors.count("\n") == 1
    assert _read_all_files(tmp_path) == before
    for option in ("--overwrite", "--resume"):  # a finished run is not repeated
        code, output, _ = run_train_tool(*arguments, option)
        assert (
            code == 0
            and "by pipedream" in output
            and output.splitlines()[-1].startswith("throughput: ")
        )


def test_a_comparison_that_is_not_possible_is_reported_first(
    tmp_path: Path, run_train_tool: Any
) -> None:
    """The fault was once reported only after the first run had finished."""
    arguments = [
        DIGITS,
        *make_set_options("gradient_accumulation=2"),
        "--out",
        str(tmp_path / "out"),
        "--against",
        "pipedream_2bw",
    ]
    code, _, errors = run_train_tool(*arguments)
    assert code == 2 and "pipedream_2bw" in errors and not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_comparison_without_a_test_set_is_unknown(tmp_path: Path, run_train_tool: Any) -> None:
    pairs = make_set_options("data={name: 'tests.test_train:make_data_without_tests'}")
    code, output, errors = run_train_tool(
        DIGITS, *pairs, "--out", str(tmp_path / "out"), "--against", "gpipe"
    )
    assert code == 0, errors
    assert "test loss unknown by pipedream, unknown by gpipe: unknown" in output


def make_data_without_tests() -> Any:
    x = torch.randn(64, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(64) % 10
    return ipu_pipe.from_loader(
        torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, labels), batch_size=8)
    )


def test_one_update_has_no_throughput(tmp_path: Path, run_train_tool: Any) -> None:
    code, output, _ = run_train_tool(
        DIGITS, *make_set_options("steps=1"), "--out", str(tmp_path / "out")
    )
    assert code == 0 and output.splitlines()[-1] == "throughput: not measured (one update only)"


def test_the_folder_of_data_may_come_from_the_environment(
    tmp_path: Path, monkeypatch: Any, run_train_tool: Any
) -> None:
    """$IPU_PIPE_DATA once overrode the config's own data.root, and became an argument of data
    entries."""
    monkeypatch.setenv("IPU_PIPE_DATA", str(tmp_path / "variable"))
    for root, place in ((str(tmp_path / "own"), "own"), ("null", "variable")):
        code, _, errors = run_train_tool(
            DIGITS, *make_set_options("data.name=mnist", f"data.root={root}", "steps=1")
        )
        assert code == 2 and str(tmp_path / place / "mnist") in errors
    code, _, errors = run_train_tool(
        DIGITS,
        *make_set_options("data={name: 'tests.test_train:make_data_without_tests'}"),
        "--dry-run",
    )
    assert code == 0, errors


# ---- models that cannot be trained or saved


def make_complex() -> nn.Module:
    weight = nn.Parameter(torch.randn(10, dtype=torch.cfloat))
    return Composed(
        lambda m, x: (m.inner(x.flatten(1)) * m.w).real, inner=nn.Linear(64, 10), w=weight
    )


class ExtraStateModel(nn.Sequential):
    def get_extra_state(self) -> Any:
        return {"version": 1}

    def set_extra_state(self, state: Any) -> None:
        pass


class SparseBuffer(nn.Linear):
    def __init__(self) -> None:
        super().__init__(64, 10)
        self.register_buffer("near", torch.eye(3).to_sparse())


class FailingLinear(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise KeyError("x")


@pytest.mark.parametrize("model, message", [
    (make_complex(), "model: w: complex"),  # it once became real without a message
    # checkpoints once ended in a traceback
    (ExtraStateModel(nn.Flatten(), nn.Linear(64, 10)), "model: _extra_state: is not a dense tensor"),
    (SparseBuffer(), "model: near: is not a dense tensor"),
    (nn.Sequential(nn.Embedding(9, 4, sparse=True)), "model: 0: gradients must be dense"),
    (nn.Sequential(nn.Flatten(), FailingLinear(64, 10)),
     "model: it fails on a microbatch of shape (8, 1, 8, 8), torch.float32: Key"),
])  # fmt: skip
def test_models_that_cannot_be_trained_or_kept_are_refused(model: nn.Module, message: str) -> None:
    (fault,) = list_faults(build, make_short_config("stages=1"), model=model)
    assert fault.startswith(message)


def test_an_optimizer_of_other_groups_is_refused() -> None:
    """A factory that ignored its groups once ended in a KeyError."""
    model = make_stateful_model()
    for factory, message in (
        (
            lambda groups: torch.optim.SGD(model.parameters(), lr=0.1),
            "must be made from the groups",
        ),
        (lambda groups: None, "returned None"),
    ):
        with pytest.raises(BadInput, match=message):
            build(make_short_config("stages=null"), model=model, optimizer=factory)


def test_a_loss_may_be_the_class_of_a_module() -> None:
    """The class itself was once called, and the message blamed the model."""
    assert isinstance(
        build(make_short_config("loss=torch.nn:CrossEntropyLoss")).loss, nn.CrossEntropyLoss
    )
    with pytest.raises(BadInput, match="^loss.blank_size: missing"):
        build(make_short_config("loss=tests.test_train:SizedLoss"))


class SizedLoss(nn.Module):
    def __init__(self, blank_size: int) -> None:
        super().__init__()


def test_a_model_that_works_in_place_leaves_the_data(tmp_path: Path) -> None:
    """Every observation of the first microbatch before training once halved it."""
    data = make_data_without_tests()
    first = data.train_batch(0, 0, 8)[0].clone()
    in_place = Composed(lambda m, x: m.inner(x.flatten(1).mul_(0.5)), inner=nn.Linear(64, 10))
    build(make_short_config("stages=1"), model=in_place, data=data)
    assert torch.equal(data.train_batch(0, 0, 8)[0], first)


@pytest.mark.skipif(
    not Path("/dev/full").exists(), reason="a device on which nothing can be written"
)
def test_metrics_that_cannot_be_written_are_a_fault(tmp_path: Path) -> None:
    """A full disk once ended in a traceback."""
    run = RunFolder(tmp_path / "run")
    run.open_metrics(0)
    run.write_metrics({"step": 1})
    run.close()
    run._metrics = open("/dev/full", "w")
    with pytest.raises(RunFault, match="metrics.jsonl: cannot be written: No space left on device"):
        run.write_metrics({"step": 2})
    run.close()  # prints nothing
    (tmp_path / "run" / "metrics.jsonl").unlink()
    (tmp_path / "run" / "metrics.jsonl").mkdir()
    with pytest.raises(RunFault, match="metrics.jsonl"):
        run.open_metrics(1)


def test_a_loss_without_a_gradient_is_refused() -> None:
    """The first backward once ended in a traceback."""
    model = make_stateful_model().requires_grad_(False)
    model.spare = nn.Linear(3, 3)  # trainable, but unused in the forward
    count_right = lambda x, y: (x.argmax(1) == y).float().mean()  # noqa: E731
    for model_of_loss, loss in (
        (model, nn.functional.cross_entropy),
        (make_stateful_model(), count_right),
    ):
        model_of_loss.forward = functools.partial(_run_without_spare, model_of_loss)  # type: ignore[method-assign]
        with pytest.raises(BadInput, match="nothing to train"):
            build(make_short_config("stages=1"), model=model_of_loss, loss=loss)


def _run_without_spare(model: Any, x: torch.Tensor) -> torch.Tensor:
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
    model = make_stateful_model()
    model[1].requires_grad_(False)
    model[5].bias.requires_grad_(False)
    # its weights belong to the last stage, but the forward does not read them
    model[7].spare = nn.Linear(3, 3)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    rules = ["method_args={t2: {}}"] if method == "pipemare" else []
    config = make_short_config(
        f"method={method}", *rules, "stages=null", "optimizer=null", f"optimizer={optimizer}"
    )
    train(config, tmp_path / "run", model=model, quiet=True)
    same_as_before = {name for name, p in model.named_parameters() if torch.equal(p, before[name])}
    assert same_as_before == {"1.weight", "1.bias", "5.bias", "7.spare.weight", "7.spare.bias"}


class ForbiddenPath(type(Path())):  # type: ignore[misc]
    """A path in a folder that may not be read; tests may run as root, which can read every
    folder."""

    def stat(self, **keys: Any) -> Any:
        raise PermissionError(13, "Permission denied", str(self))


def test_a_folder_that_may_not_be_read_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check whether a file exists once ended in a traceback."""
    for resume in (False, True):
        with pytest.raises(BadInput, match="^--out: .*Permission denied"):
            check_folder(ForbiddenPath(tmp_path / "run"), resume)


def test_scalars_that_cannot_be_written_are_a_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.utils.tensorboard import SummaryWriter

    def fail_to_write(*args: Any, **keys: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(SummaryWriter, "add_scalar", fail_to_write)
    with pytest.raises(RunFault, match="tensorboard: .*No space left on device"):
        train(make_short_config("log.tensorboard=true"), tmp_path / "run", quiet=True)


def test_a_run_without_checkpoints_writes_none_and_starts_again(
    tmp_path: Path, capsys: Any
) -> None:
    plain = train(make_short_config("steps=6"), tmp_path / "plain", quiet=True)
    assert (tmp_path / "plain" / "checkpoints").is_dir()
    without = train(make_short_config("steps=6", "checkpoint=null"), tmp_path / "run", quiet=True)
    assert not (tmp_path / "run" / "checkpoints").exists()
    assert without["final"] == plain["final"]
    longer = train(make_short_config("steps=12", "checkpoint=null"), tmp_path / "run", resume=True)
    assert (
        longer["final"]
        == train(make_short_config("steps=12"), tmp_path / "longer", quiet=True)["final"]
    )
    assert "from the beginning" in capsys.readouterr().out


def test_the_best_weights_need_checkpoints(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="^checkpoint: null: .*restore_best"):
        train(
            make_short_config("checkpoint=null", "early_stopping={restore_best: true}"),
            tmp_path / "run",
            quiet=True,
        )
    assert not (tmp_path / "run").exists()
