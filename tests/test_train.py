"""Check training end to end on digits: the outputs, bitwise resuming, refusals in one line."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any, List
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import ipu_pipe
from ipu_pipe.cli import train as tool
from ipu_pipe.config.load import load_config
from ipu_pipe.errors import BadInput, RunFault
from ipu_pipe.job.evaluation import evaluate
from ipu_pipe.model.timing import PassSeconds
from ipu_pipe.run.build import build
from ipu_pipe.run.setup import set_up
from ipu_pipe.run.train import train
from ipu_pipe.store.folder import RunFolder, check_folder
from tests.command_line import run_here
from tests.interrupted import interrupt_at
from tests.support.models import Composed
from tests.support.runs import (
    DIGITS,
    ROOT,
    assert_same_weights,
    list_faults,
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


@pytest.fixture()
def run_train_tool(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> Any:
    """Return what runs tools/train.py with arguments, and returns exit code, standard output and
    standard error."""
    monkeypatch.chdir(ROOT)
    return functools.partial(run_here, tool, monkeypatch=monkeypatch, capsys=capsys)


def make_set_options(*pairs: str) -> List[str]:
    return [item for pair in (*SHORT, *pairs) for item in ("--set", pair)]


# ---- outputs


@pytest.mark.parametrize("method", ["gpipe", "pipemare"])
def test_a_run_writes_all_outputs(method: str, tmp_path: Path, run_train_tool: Any) -> None:
    out = tmp_path / "run"
    sets = make_set_options(f"method={method}", "stages=4")
    code, output, _ = run_train_tool(DIGITS, *sets, "--out", str(out))
    last = output.splitlines()[-1].split()
    assert code == 0 and last[0] == "throughput:" and float(last[1]) > 0
    summary = read_summary(out)
    keys = ("method", "backend", "steps", "samples")
    assert [summary[key] for key in keys] == [method, "emulator", 12, 12 * 32]
    assert [*summary["batch"].values()] == [8, 4, 1, 32]
    assert summary["model"]["stages"] == len(summary["stages"]) == 4 and len(summary["links"]) == 6
    assert summary["final"]["test_loss"] < summary["initial"]["test_loss"]
    assert summary["utilization"] is summary["bubble_fraction"] is None  # no device has a clock
    planned = summary["planned_utilization"]
    assert planned + summary["planned_bubble_fraction"] == pytest.approx(1)
    assert method != "gpipe" or planned == pytest.approx(4 / 7)
    assert 0 < summary["modelled_utilization"] < 1
    assert sum(stage["parameters"] for stage in summary["stages"]) == summary["model"]["parameters"]
    training = {"train_loss", "lr", "samples_per_second"}
    for line in read_metrics(out):
        assert set(line) - {"step", "epoch"} in (training, {"test_loss", "test_accuracy"})
    passes = [event for event in read_trace_file(out)["traceEvents"] if event.get("ph") == "X"]
    assert len(passes) >= 2 * 4 * 48


# ---- resuming


def make_stateful_model() -> nn.Module:
    """Return a model with running statistics and dropout."""
    torch.manual_seed(0)
    first = [nn.Flatten(), nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2)]
    second, third = (ipu_pipe.begin_stage(nn.Linear(32, width)) for width in (32, 10))
    return nn.Sequential(*first, second, nn.ReLU(), third)


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
    out = tmp_path / "run"
    monkeypatch.setattr(stages, "time_passes", make_slow_timer("fc1"))
    with interrupt_at(8):
        train(make_short_config(*settings), out, quiet=True)
    monkeypatch.setattr(stages, "time_passes", make_slow_timer("fc5"))
    options = [*make_set_options(*settings), "--out", str(out), "--against", "gpipe", "--resume"]
    code, _, errors = run_train_tool(DIGITS, *options)
    assert code == 0, errors
    for folder in (out, out / "gpipe"):
        assert load_config(folder / "config.yaml").stages == ["relu1"]
    train(make_short_config(*settings[1:], "stages=[relu1]"), tmp_path / "named", quiet=True)
    assert_same_weights(out, tmp_path / "named")


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


@pytest.mark.parametrize("subset", [5, 130, 300])
def test_evaluation_takes_the_subset_and_no_more(subset: int) -> None:
    """The subset was once rounded up to whole batches of 128."""
    x, y = torch.randn(290, 6), torch.randint(0, 3, (290,))
    y[1:120] = -100  # these batches once had the same weight as batches without ignored labels
    model = nn.Linear(6, 3)
    config = ipu_pipe.configure(evaluate={"subset": subset})
    data = ipu_pipe.data.TensorData((x, y), (x, y))
    output, labels = model(x[:subset]).detach(), y[:subset]
    loss, metrics = evaluate(set_up(config, model, data))[-1]
    expected = float(nn.functional.cross_entropy(output, labels))
    assert loss == pytest.approx(expected, rel=1e-5)
    accuracy = (output.argmax(1) == labels)[labels != -100].float().mean()
    assert metrics["accuracy"] == pytest.approx(float(accuracy))
    y[:] = -100
    assert evaluate(set_up(config, model, data)) == [(None, {"accuracy": None})]


def test_a_checkpoint_or_state_dict_is_evaluated_alone(tmp_path: Path, run_train_tool: Any) -> None:
    """Evaluation once built the whole run, and refused configs that only training cannot run."""
    final = train(make_short_config(), tmp_path / "run", quiet=True)["final"]
    path = tmp_path / "run" / "checkpoints" / "step-12"
    weights = tmp_path / "plain.safetensors"
    save_file(load_file(path / "model.safetensors"), weights)
    # limits of training alone
    options = make_set_options(
        "method=pipedream_2bw", "stages=5", "gradient_accumulation=2", "data.subset=4"
    )
    for file in (path, weights):
        code, output, _ = run_train_tool(DIGITS, *options, "--evaluate", str(file))
        assert code == 0 and json.loads(output)["test_loss"] == final["test_loss"]
    continued = train(make_short_config(f"init_from={weights}"), tmp_path / "more", quiet=True)
    assert continued["initial"]["test_loss"] == final["test_loss"]


# ---- refusals, in one line


WRONG = {
    "no config": ([], "CONFIG"),

    "resume without a folder": ([DIGITS, "--resume"], "--out DIR"),
    "resume of nothing": ([DIGITS, "--resume-from", "4", "--out", "OUT/none"], "contains no run to resume"),
    "occupied folder": ([DIGITS, "--out", "OUT/run"], "contains another run"),
    "a file for a folder": ([DIGITS, "--out", "OUT/file"], "is a file"),

    "a comparison that is not possible": (
        [*make_set_options("gradient_accumulation=2"), "--against", "pipedream_2bw"], "pipedream_2bw"
    ),

    "too large a batch": (make_set_options("gradient_accumulation=5000"), "gradient_accumulation"),
    "data that is not there": (make_set_options("data.name=cifar10", "data.root=OUT"), "tools/fetch_data.py cifar10"),
    "a model that does not fit the data": (make_set_options("model.args.inputs=65"), "fails on a microbatch"),
    "global clipping of an asynchronous method": (
        make_set_options("method=pipemare", "clip.norm=1", "clip.scope=global"),
        "clip: {scope: stage, norm: 0.5} (norm / sqrt(stages)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_bad_input_is_one_line_and_exit_code_2(
    name: str, tmp_path: Path, run_train_tool: Any
) -> None:
    words, message = WRONG[name]
    file, run = tmp_path / "file", tmp_path / "run"
    file.write_text("")
    run.mkdir()
    (run / "config.yaml").write_text("method: gpipe\n")
    words = [word.replace("OUT", str(tmp_path)) for word in words]
    if words[:1] == ["--set"]:
        words = [DIGITS, *words, "--out", str(tmp_path / "new")]
    code, output, errors = run_train_tool(*words)
    # arguments of the model of the file are left out, with a warning
    lines = [line for line in errors.splitlines() if not line.startswith("warning: ")]
    assert code == 2 and len(lines) == 1, output + errors
    assert lines[0].startswith("error: ") and message in lines[0]
    # nothing is written or deleted
    assert {*tmp_path.iterdir()} == {file, run}


def make_derived() -> nn.Module:
    first, last = ipu_pipe.begin_stage(nn.Linear(64, 8)), ipu_pipe.begin_stage(nn.Identity())
    return Composed(
        lambda m, x: m.last(nn.functional.linear(m.first(x.flatten(1)), m.weight * 1)),
        first=first, weight=nn.Parameter(torch.randn(10, 8)), last=last,
    )  # fmt: skip


def test_derived_weights_are_refused_by_name_where_it_matters() -> None:
    with pytest.raises(BadInput, match="tensors derived from weight"):
        build(make_short_config("method=pipemare", "stages=null"), model=make_derived())
    build(make_short_config("method=pipedream", "stages=null"), model=make_derived())


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path: Path) -> None:
    wild = ["optimizer.lr=1e18", "method=pipemare"]
    with pytest.raises(RunFault, match="update .* pipemare: the training loss is"):
        train(make_short_config(*wild), tmp_path / "a", quiet=True)
    train(make_short_config(*wild, "allow_nonfinite=true"), tmp_path / "b", quiet=True)
    assert read_summary(tmp_path / "b")["final"]["test_loss"] is None


# ---- from the command line and from Python


def test_dry_run_prints_the_plan_and_writes_nothing(tmp_path: Path, run_train_tool: Any) -> None:
    # several settings follow one flag
    settings = ["--set", "micro_batch_size=8", "gradient_accumulation=3"]
    code, output, _ = run_train_tool(DIGITS, "--dry-run", "--out", str(tmp_path / "run"), *settings)
    assert code == 0 and not [*tmp_path.iterdir()]
    assert "global batch size 24" in output and "F0" in output


def test_the_readmes_example_runs() -> None:
    """The example once passed the run's folder as text, which failed."""
    model, loop = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    x = torch.randn(64, 64)
    batches = list(zip(x.split(8), x[:, :10].argmax(1).split(8)))
    output: List[Any] = []
    names = {"print": lambda *words: output.append(words)}
    names.update(my_train_loader=batches, my_test_loader=batches)
    exec(model + loop, names)
    # all updates except those that the evaluation's drain finished, then the evaluation
    assert [words[0] for words in output[:-1]] == list(range(6))
    assert set(output[-1][0]) == {"loss", "accuracy"}


# ---- a comparison with a second run


def test_the_run_to_compare_with_is_deleted_only_when_asked(
    tmp_path: Path, run_train_tool: Any
) -> None:
    """A run in DIR/METHOD was once lost without --overwrite."""
    train(make_short_config("method=gpipe"), tmp_path / "out" / "gpipe", quiet=True)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    arguments = [DIGITS, *make_set_options(), "--out", str(tmp_path / "out"), "--against", "gpipe"]
    code, _, errors = run_train_tool(*arguments)
    assert code == 2 and "gpipe: contains another run" in errors and errors.count("\n") == 1
    assert before == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    # a finished run is not repeated
    code, output, _ = run_train_tool(*arguments, "--resume")
    assert code == 0 and "by pipedream" in output


def make_data_without_tests() -> Any:
    x = torch.randn(64, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(64) % 10
    return ipu_pipe.from_loader(list(zip(x.split(8), labels.split(8))))


def test_one_update_without_a_test_set_is_compared_without_figures(
    tmp_path: Path, monkeypatch: Any, run_train_tool: Any
) -> None:
    # it once became an argument of data entries
    monkeypatch.setenv("IPU_PIPE_DATA", str(tmp_path))
    sets = make_set_options("data={name: 'tests.test_train:make_data_without_tests'}", "steps=1")
    arguments = [DIGITS, *sets, "--out", str(tmp_path / "out"), "--against", "gpipe"]
    code, output, errors = run_train_tool(*arguments)
    assert code == 0, errors
    assert "test loss unknown by pipedream, unknown by gpipe: unknown" in output
    assert output.splitlines()[-1] == "throughput: not measured (one update only)"


# ---- models that cannot be trained or saved


class ExtraStateModel(nn.Sequential):
    def get_extra_state(self) -> Any:
        return {"version": 1}

    def set_extra_state(self, state: Any) -> None:
        pass


def test_a_state_that_checkpoints_cannot_keep_is_refused() -> None:
    """Checkpoints once ended in a traceback; test_pipeline_refusals.py has other such models."""
    model = ExtraStateModel(nn.Flatten(), nn.Linear(64, 10))
    (fault,) = list_faults(build, make_short_config("stages=1"), model=model)
    assert fault.startswith("model: _extra_state: is not a dense tensor")


def test_an_optimizer_of_other_groups_is_refused() -> None:
    """A factory that ignored its groups once ended in a KeyError."""
    optimizer = torch.optim.SGD([torch.ones(1)], lr=1.0)
    with pytest.raises(BadInput, match="must be made from the groups"):
        build(make_short_config(), optimizer=lambda groups: optimizer)


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
    run._metrics = open("/dev/full", "w")
    with pytest.raises(RunFault, match="metrics.jsonl: cannot be written: No space left on device"):
        run.write_metrics({"step": 2})
    run.close()  # prints nothing
    (tmp_path / "run" / "metrics.jsonl").mkdir()
    with pytest.raises(RunFault, match="metrics.jsonl"):
        run.open_metrics(1)


def test_a_loss_without_a_gradient_is_refused() -> None:
    """The first backward once ended in a traceback."""
    # trainable, but unused in the forward
    frozen, spare = nn.Linear(64, 10).requires_grad_(False), nn.Linear(3, 3)
    model = Composed(lambda m, x: m.frozen(x.flatten(1)), frozen=frozen, spare=spare)
    count_right = lambda x, y: (x.argmax(1) == y).float().mean()  # noqa: E731
    for keys in ({"model": model}, {"loss": count_right}):
        with pytest.raises(BadInput, match="nothing to train"):
            build(make_short_config("stages=1"), **keys)


@pytest.mark.parametrize("method, optimizer", [
    ("pipedream", "{name: adamw, lr: 0.01}"),
    ("pipemare", "{name: sgd, lr: 0.1, momentum: 0.9}"),
])  # fmt: skip
def test_parameters_that_are_frozen_or_unused_stay_as_they_are(
    method: str, optimizer: str, tmp_path: Path
) -> None:
    model = make_stateful_model()
    model[1].requires_grad_(False)
    model[5].bias.requires_grad_(False)
    # its weights belong to the last stage, but the forward does not read them
    model[7].spare = nn.Linear(3, 3)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    rules = ["method_args={t2: {}}"] if method == "pipemare" else []
    keys = [f"method={method}", *rules, "stages=null", "optimizer=null", f"optimizer={optimizer}"]
    train(make_short_config(*keys), tmp_path / "run", model=model, quiet=True)
    same_as_before = {name for name, p in model.named_parameters() if torch.equal(p, before[name])}
    assert same_as_before == {"1.weight", "1.bias", "5.bias", "7.spare.weight", "7.spare.bias"}


@pytest.mark.parametrize("resume", [False, True])
def test_a_folder_that_may_not_be_read_is_one_line(
    resume: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check whether a file exists once ended in a traceback. Root can read every folder."""
    monkeypatch.setattr(type(tmp_path), "stat", Mock(side_effect=PermissionError("not allowed")))
    with pytest.raises(BadInput, match="^--out: .*not allowed"):
        check_folder(tmp_path / "run", resume)


def test_scalars_that_cannot_be_written_are_a_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.utils.tensorboard import SummaryWriter

    monkeypatch.setattr(SummaryWriter, "add_scalar", Mock(side_effect=OSError("no space")))
    with pytest.raises(RunFault, match="tensorboard: .*no space"):
        train(make_short_config("log.tensorboard=true"), tmp_path / "run", quiet=True)


def test_a_run_without_checkpoints_writes_none_and_starts_again(
    tmp_path: Path, capsys: Any
) -> None:
    out, config = tmp_path / "run", make_short_config("checkpoint=null")
    train(make_short_config("steps=6", "checkpoint=null"), out, quiet=True)
    longer = train(config, out, resume=True)
    assert "from the beginning" in capsys.readouterr().out
    assert not (out / "checkpoints").exists()
    assert longer["final"] == train(config, tmp_path / "planned", quiet=True)["final"]
