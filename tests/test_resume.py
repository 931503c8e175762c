"""Check that a run resumes from a whole checkpoint of its own alone; each refusal is one line
with the reason."""

from __future__ import annotations

import functools
import random
import shutil
import time
from pathlib import Path
from typing import Any, Dict, Iterator, List

import pytest
import torch
import yaml
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from ipu_pipe.config.compare import ROLES, dump_config
from ipu_pipe.config.load import load_config
from ipu_pipe.config.schema import Config
from ipu_pipe.config.sections import InitFrom
from ipu_pipe.run.build import build
from ipu_pipe.run.predict import predict
from ipu_pipe.run.resume import check_run
from ipu_pipe.run.train import check, evaluate_checkpoint, train
from ipu_pipe.store import checkpoint
from tests.interrupted import interrupt_at
from tests.support.models import Composed
from tests.support.runs import (
    DIGITS,
    ROOT,
    assert_same_weights,
    assert_states_close,
    list_faults,
    read_column,
    read_metrics,
    read_numbers,
    read_weights,
)
from tests.test_train import make_set_options, make_short_config, run_train_tool  # noqa: F401

BASE = [
    "method=pipemare", "method_args.t2={}", "optimizer.momentum=0.9", "checkpoint.every=4", "checkpoint.keep=9", "log.every=1",
    "model.args.width=8", "evaluate.every=0", "evaluate.subset=64", "stages=3",
]  # fmt: skip
ADAM = "optimizer={name: adam, lr: 0.003, momentum: null}"


def configure_here(*overrides: str) -> Any:
    return make_short_config(*BASE, *overrides)


@pytest.fixture(scope="module")
def trained_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a finished run with checkpoints after 4, 8 and 12 updates; tests must
    not change it."""
    out = tmp_path_factory.mktemp("trained") / "run"
    train(configure_here(), out, quiet=True)
    return out


@pytest.fixture
def copied_run(trained_run: Path, tmp_path: Path) -> Path:
    """Return a copy of the run."""
    return Path(shutil.copytree(trained_run, tmp_path / "copy"))


@pytest.fixture
def killed_run(copied_run: Path) -> Path:
    """Return a copy of the run as if it was killed after 8 updates."""
    shutil.rmtree(copied_run / "checkpoints" / "step-12")
    (copied_run / "summary.json").unlink()
    return copied_run


@pytest.fixture
def step_8(killed_run: Path) -> Path:
    """Return the folder of the newest checkpoint of the killed run."""
    return killed_run / "checkpoints" / "step-8"


def resume_run(out: Path, *overrides: str, **keys: Any) -> Dict[str, Any]:
    return train(configure_here(*overrides), out, resume=True, quiet=True, **keys)


def read_times(folder: Path) -> Dict[Path, int]:
    """Return when each file was written last."""
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


def list_refusals(out: Path, *overrides: str) -> List[str]:
    return list_faults(resume_run, out, *overrides)


@pytest.fixture(scope="module")
def resumed_job(trained_run: Path) -> Any:
    """Return the job that resumes the run after 8 updates."""
    return build(configure_here(), done=8)


# ---- damaged checkpoints


def damage_bytes(data: bytes, count: int) -> Iterator[bytes]:
    """Yield the bytes with one bit flipped at each end, in the middle and at `count` random places,
    then cut, and one byte longer."""
    draw = random.Random(count)
    for place in [0, 7, 8, 9, len(data) // 2, len(data) - 1, *draw.sample(range(len(data)), count)]:
        yield data[:place] + bytes([data[place] ^ 1 << draw.randrange(8)]) + data[place + 1 :]
    for length in (0, 1, len(data) // 2, len(data) - 1):
        yield data[:length]
    yield data + b" "


@pytest.mark.parametrize("name", ["manifest.json", "model.safetensors", "optimizer.safetensors"])
def test_every_flipped_bit_and_every_cut_is_detected(name: str, step_8: Path) -> None:
    """A run with a flipped bit in its position once resumed from update 0 with exit code 0."""
    file = step_8 / name
    content = file.read_bytes()
    for data in damage_bytes(content, 120 if name == "manifest.json" else 20):
        file.write_bytes(data)
        (fault,) = list_faults(checkpoint.load, file.parent)
        assert fault.startswith(f"{file}: corrupt checkpoint") and "--resume-from 4" in fault
    file.write_bytes(content)
    checkpoint.load(file.parent)


def test_a_damaged_checkpoint_is_one_line_of_the_command(
    killed_run: Path,
    step_8: Path,
    run_train_tool: Any,  # noqa: F811
) -> None:
    file, out = step_8 / "manifest.json", ["--out", str(killed_run)]
    file.write_text(file.read_text().replace('"update": 8', '"update": 0'))
    run_tool = functools.partial(run_train_tool, DIGITS, *make_set_options(*BASE))
    for arguments in ([*out, "--resume"], ["--evaluate", str(step_8)]):
        code, _, complaint = run_tool(*arguments)
        assert code == 2 and complaint.count("\n") == 1
        assert f"{file}: corrupt checkpoint" in complaint
    code, _, complaint = run_tool(*out, "--resume-from", "4")
    assert code == 0, complaint


@pytest.mark.parametrize("name", ["", "model.safetensors"])
def test_initial_weights_must_be_undamaged(name: str, step_8: Path, tmp_path: Path) -> None:
    path = step_8 / name
    # another run
    settings = ["seed=3", "method=gpipe", "method_args={}", ADAM, "steps=1", f"init_from={path}"]
    config = configure_here(*settings)
    report = train(config, tmp_path / "new", quiet=True)
    assert report["initial"]["test_loss"] == evaluate_checkpoint(config, path)["test_loss"]
    data = bytearray((step_8 / "model.safetensors").read_bytes())
    data[-3] ^= 1
    (step_8 / "model.safetensors").write_bytes(data)
    for use in (lambda: evaluate_checkpoint(config, path), lambda: build(config)):
        assert "corrupt checkpoint" in list_faults(use)[0]


# ---- checkpoints of another run


DECIDING = {
    "seed": "seed=7",
    "method": "method=pipelined_backprop",
    "method_args.t2.decay": "method_args.t2.decay=0.3",
    "optimizer.name": ADAM,
    "clip.norm": "clip={norm: 1, scope: stage}",
    "micro_batch_size": "micro_batch_size=4",
    "data.subset": "data.subset=640",
}  # fmt: skip


@pytest.mark.parametrize("key", list(DECIDING))
def test_a_checkpoint_of_another_run_is_refused_by_key(
    key: str, killed_run: Path, step_8: Path
) -> None:
    """A checkpoint of another seed, method, rate or optimizer was once accepted."""
    assert f"config.yaml: {key}: " in str(list_refusals(killed_run, DECIDING[key]))
    # the other run's folder with this checkpoint
    (killed_run / "config.yaml").write_text(dump_config(configure_here(DECIDING[key])))
    faults = list_refusals(killed_run, DECIDING[key])
    assert f"{step_8}: {key}: saved with " in str(faults)
    assert checkpoint.list_steps(step_8.parent) == [4, 8]


FREE = {
    "log": "log.every=5",
    "where a checkpoint was": "checkpoint.every=7",  # the pipeline is empty after update 8 in both
    "evaluation": "evaluate.subset=32",
    "backend": "backend.deadline=100",
    "stages": "stages=2",
    "reduction": "reduction=fast",
    "more steps": "steps=14",
}  # fmt: skip


@pytest.mark.parametrize("name", list(FREE))
def test_keys_with_a_free_role_may_change(name: str, killed_run: Path) -> None:
    report = resume_run(killed_run, FREE[name])
    assert report["steps"] == (14 if name == "more steps" else 12)


def test_a_run_may_only_grow(copied_run: Path, capsys: Any) -> None:
    """A longer run that was killed before its first checkpoint was once taken for a finished
    one."""
    (line,) = list_refusals(copied_run, "steps=10")
    assert line.startswith(f"--resume: {copied_run / 'config.yaml'}: steps: 12 -> 10: ")
    whole, longer = (configure_here(f"steps={n}") for n in (12, 16))
    assert train(whole, copied_run, resume=True)["steps"] == 12
    assert "nothing to resume" in capsys.readouterr().out
    with interrupt_at(12):
        train(longer, copied_run, resume=True)
    output = capsys.readouterr().out
    assert "the run continues with another steps: 12 -> 16" in output
    assert "--resume continues after update 12\n" in output
    assert train(longer, copied_run, resume=True)["steps"] == 16
    assert "resuming after update 12" in capsys.readouterr().out
    steps = [line["step"] for line in read_metrics(copied_run) if "lr" in line]
    assert steps == list(range(1, 17))


def test_every_key_of_the_config_has_a_role() -> None:
    assert set(Config.model_fields) <= set(ROLES)


def test_a_checkpoint_in_the_folder_of_another_step_is_refused(
    killed_run: Path, step_8: Path
) -> None:
    shutil.rmtree(step_8)
    (step_8.parent / "step-4").rename(step_8)
    (line,) = list_refusals(killed_run)
    assert line.startswith(f"{step_8}: step: ")


# ---- tensors


@pytest.mark.parametrize("name, value", [
    ("fc2.weight/momentum_buffer", torch.zeros(8, 9)),  # another shape
    ("fc1.bias/t2_delta", torch.zeros(9)),  # a rule's shape
    ("fc9.weight/momentum_buffer", torch.zeros(8)),  # unknown parameter
])  # fmt: skip
def test_optimizer_state_that_does_not_fit_the_model_is_refused(
    name: str, value: torch.Tensor, resumed_job: Any, trained_run: Path
) -> None:
    path = trained_run / "checkpoints" / "step-8"
    saved = checkpoint.load(path)
    check_run(resumed_job, trained_run, saved)
    saved.optimizer[name] = value
    (line,) = list_faults(check_run, resumed_job, trained_run, saved)
    assert line.startswith(f"{path}: optimizer: {name.partition('/')[0]}")


def test_weights_of_another_precision_are_refused_before_anything_is_written(
    killed_run: Path, step_8: Path
) -> None:
    saved = checkpoint.load(step_8)
    wide_weights = {name: value.double() for name, value in saved.model.items()}
    checkpoint.save(step_8.parent, 8, wide_weights, saved.optimizer, saved.manifest)
    before = read_times(killed_run)
    lines = list_refusals(killed_run)
    assert all(line.startswith((f"{step_8}: model: ", f"{step_8}: 5 more")) for line in lines)
    assert before == read_times(killed_run)


def test_weights_of_a_wrapped_model_are_refused_in_one_line_everywhere(
    killed_run: Path, step_8: Path
) -> None:
    """Story: the line of a resumed run was one for each entry of the optimizer, and none named the
    wrapper."""
    saved = checkpoint.load(step_8)
    weights, entries = (
        {f"_orig_mod.{name}": value for name, value in part.items()} for part in saved[:2]
    )
    checkpoint.save(step_8.parent, 8, weights, entries, saved.manifest)
    config = configure_here(f"init_from={step_8}")
    for call in (
        lambda: resume_run(killed_run),
        lambda: build(config),
        lambda: predict(killed_run, torch.zeros(2, 1, 8, 8)),
    ):
        (line,) = list_faults(call)
        assert "every name begins with _orig_mod., " in line


@pytest.mark.parametrize("optimizer", ["optimizer.momentum=0.9", ADAM])
def test_a_parameter_that_never_had_a_gradient_has_no_entries(
    optimizer: str, tmp_path: Path
) -> None:
    used, spare = torch.nn.Linear(64, 10), torch.nn.Linear(3, 3)
    model = Composed(lambda m, x: m.used(x.flatten(1)), used=used, spare=spare)
    overrides = ["method=gpipe", "method_args={}", "stages=1", "model.args={}", optimizer]
    train(configure_here(*overrides), tmp_path, model=model, quiet=True)
    resume_run(tmp_path, *overrides, resume_from=4, model=model)


# ---- before the first checkpoint


def test_resuming_where_there_is_no_run_yet_starts_one(
    trained_run: Path, tmp_path: Path, capsys: Any
) -> None:
    train(configure_here(), tmp_path, resume=True)
    assert f"--resume: {tmp_path}: contains no run yet: " in capsys.readouterr().out
    assert_same_weights(tmp_path, trained_run)


def test_a_dry_run_refuses_the_folder_that_the_run_would_refuse(
    killed_run: Path,
    run_train_tool: Any,  # noqa: F811
) -> None:
    arguments = [DIGITS, *make_set_options(*BASE), "--dry-run", "--out", str(killed_run)]
    before = read_times(killed_run)
    for place, *options in (
        ["--out"],
        ["--resume-from", "--resume-from", "5"],
        ["--resume", "--resume", "--set", "seed=7"],
    ):
        code, _, complaint = run_train_tool(*arguments, *options)
        assert code == 2 and f"{place}: " in complaint and str(killed_run) in complaint
    for options in (["--resume"], ["--resume-from", "4"], ["--overwrite"]):
        assert run_train_tool(*arguments, *options)[0] == 0
    assert before == read_times(killed_run)


def test_resuming_in_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "trace.json.gz").write_bytes(b"")
    assert list_refusals(tmp_path) == [f"--resume: {tmp_path}: contains no run to resume"]


# ---- checkpoints of earlier versions


def test_a_run_whose_trace_was_counted_in_microbatches_resumes(
    trained_run: Path, killed_run: Path
) -> None:
    recorded = yaml.safe_load((killed_run / "config.yaml").read_text())
    del recorded["log"]["trace"]
    recorded["log"]["trace_microbatches"] = 64
    (killed_run / "config.yaml").write_text(yaml.safe_dump(recorded))
    train(configure_here(), killed_run, resume=True)
    assert_same_weights(killed_run, trained_run)


def test_a_checkpoint_without_a_manifest_is_refused_with_a_remedy(
    killed_run: Path, step_8: Path
) -> None:
    """Checkpoints of the first version had a state.json in its place."""
    manifest, file = step_8 / "manifest.json", step_8 / "model.safetensors"
    manifest.rename(step_8 / "state.json")
    (line,) = list_refusals(killed_run)
    assert line.startswith(f"{manifest}: ") and f"init_from: {file}" in line
    build(configure_here(f"init_from={file}"))


# ---- an earlier checkpoint, and the remains of a kill


def test_a_run_resumes_from_an_earlier_checkpoint(
    trained_run: Path,
    copied_run: Path,
    run_train_tool: Any,  # noqa: F811
) -> None:
    arguments = [DIGITS, *make_set_options(*BASE), "--out", str(copied_run), "--resume-from"]
    for wrong in (["5"], ["4", "--resume"], ["x"], ["4", "--against", "gpipe"]):
        code, _, complaint = run_train_tool(*arguments, *wrong)
        assert code == 2 and "--resume" in complaint and complaint.count("\n") == 1
        assert wrong != ["5"] or "--resume-from: 5: " in complaint and "4, 8, 12" in complaint
    assert checkpoint.list_steps(copied_run / "checkpoints") == [4, 8, 12]
    code, output, complaint = run_train_tool(*arguments, "4")
    assert code == 0 and "deleted, will be written again: step-8, step-12" in output, complaint
    assert_same_weights(copied_run, trained_run)
    lines, expected = (read_numbers(run) for run in (copied_run, trained_run))
    assert lines == expected


def test_checkpoints_after_an_earlier_one_are_deleted_at_once(copied_run: Path) -> None:
    with interrupt_at(4):
        train(configure_here(), copied_run, resume_from=4, quiet=True)
    assert checkpoint.list_steps(copied_run / "checkpoints") == [4]
    assert not (copied_run / "summary.json").exists()


def test_leftovers_are_cleared_away(killed_run: Path, step_8: Path) -> None:
    checkpoints = step_8.parent
    # a pruned checkpoint, which must not return
    shutil.copytree(step_8, checkpoints / ".step-12.old")
    (checkpoints / ".step-7.part").write_text("a file")
    shutil.copytree(step_8, checkpoints / ".step-9.part")
    resume_run(killed_run)
    assert {path.name for path in checkpoints.iterdir()} == {"step-4", "step-8", "step-12"}


def test_a_run_with_initial_weights_is_resumed_twice(tmp_path: Path, trained_run: Path) -> None:
    """The file of the weights is not needed once a checkpoint exists.

    The first resume once wrote init_from: null into config.yaml, and the second was refused.
    """
    file, run = tmp_path / "first.safetensors", tmp_path / "run"
    shutil.copy(trained_run / "checkpoints" / "step-4" / "model.safetensors", file)
    settings = [f"init_from={file}", "steps=8"]
    config = configure_here(*settings)
    final = train(config, run, quiet=True)["final"]
    file.unlink()
    (run / "summary.json").unlink()  # as if killed
    check(config, run, resume=True)
    for _ in range(2):
        assert resume_run(run, *settings, resume_from=4)["final"] == final
    assert load_config(run / "config.yaml").init_from == InitFrom(path=str(file))
    evaluated = evaluate_checkpoint(config, run / "checkpoints" / "step-8")
    assert evaluated["test_loss"] == final["test_loss"]


# ---- foreign files


def test_an_older_torch_reads_safetensors_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trained_run: Path
) -> None:
    """Before 2.6, torch.load(weights_only=True) could be made to run code (CVE-2025-32434)."""
    file = tmp_path / "plain.pt"
    torch.save({"weight": torch.ones(2)}, file)
    monkeypatch.setattr(torch, "__version__", "2.5.1+cpu")
    (fault,) = list_faults(checkpoint.read_tensors, file)
    assert fault.startswith(f"{file}: ") and "torch 2.6" in fault
    assert checkpoint.read_weights(trained_run / "checkpoints" / "step-4")
    monkeypatch.setattr(torch, "__version__", "2.6.0")
    assert set(checkpoint.read_tensors(file)) == {"weight"}


# ---- runs of an earlier version

# Run folders as commit e74f3b72 wrote them after 4 updates in float64, without their records; `end.safetensors` has the
# weights that the same commit reached when it resumed them up to 8 updates.
OLD_RUNS = ROOT / "tests" / "old_runs"


@pytest.mark.parametrize("name", sorted(path.name for path in OLD_RUNS.iterdir()))
def test_an_old_run_ends_as_it_would_have_ended(name: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(OLD_RUNS / name, run)
    settings = ["steps=8", "backend.name=emulator", "checkpoint.format=single"]
    train(load_config(run / "config.yaml", settings), run, resume=True, quiet=True)
    # float64 sums in another order differ by less; an optimizer state that is 1 % off differs by far more
    assert_states_close(read_weights(run, 8), load_file(OLD_RUNS / name / "end.safetensors"), 1e-12)


# ---- scalars


def test_tensorboard_shows_each_update_of_a_resumed_run_once(tmp_path: Path) -> None:
    config = configure_here("steps=6", "log.tensorboard=true")
    with interrupt_at(5):
        train(config, tmp_path, quiet=True)
    # files of one second and process are in the order of a count's letters, 10 before 9
    time.sleep(1)
    train(config, tmp_path, resume=True, quiet=True)
    accumulator = EventAccumulator(str(tmp_path / "tensorboard"))
    accumulator.Reload()
    shown = [(event.step, event.value) for event in accumulator.Scalars("train_loss")]
    losses = read_column(tmp_path, "train_loss")
    assert shown == [(step, pytest.approx(loss)) for step, loss in enumerate(losses, 1)]
    assert len(shown) == 6
