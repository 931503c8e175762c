"""Check that a run resumes from a whole checkpoint of its own alone; each refusal is one line
with the reason."""

from __future__ import annotations

import hashlib
import json
import random
import resource
import shutil
from pathlib import Path
from typing import Any, Dict, List

import pytest
import torch
import yaml

from ipu_pipe.config.compare import ROLES, Role, dump_config
from ipu_pipe.config.load import load_config
from ipu_pipe.config.schema import Config
from ipu_pipe.config.sections import InitFrom
from ipu_pipe.errors import BadInput, RunFault
from ipu_pipe.run.build import build
from ipu_pipe.run.predict import predict
from ipu_pipe.run.resume import check_run
from ipu_pipe.run.train import evaluate_checkpoint, train
from ipu_pipe.store import checkpoint
from tests.interrupted import interrupt_at
from tests.support.models import Composed
from tests.support.runs import DIGITS, assert_same_weights, list_faults, read_metrics, read_numbers
from tests.test_train import make_set_options, make_short_config, run_train_tool  # noqa: F401

BASE = [
    "method=pipemare", "method_args.t2={}", "optimizer.momentum=0.9", "checkpoint.every=4", "checkpoint.keep=9", "log.every=1",
    "model.args.width=8", "evaluate.every=0", "evaluate.subset=64", "stages=3",
]  # fmt: skip
ADAM = "optimizer={name: adam, lr: 0.003, momentum: null}"


def make_settings(*overrides: str) -> List[str]:
    return [*BASE, *overrides]


@pytest.fixture(scope="module")
def trained_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a finished run with checkpoints after 4, 8 and 12 updates; tests must
    not change it."""
    out = tmp_path_factory.mktemp("trained") / "run"
    train(make_short_config(*make_settings()), out, quiet=True)
    return out


@pytest.fixture
def killed_run(trained_run: Path, tmp_path: Path) -> Path:
    """Return a copy of the run as if it was killed after 8 updates."""
    out = tmp_path / "cut"
    shutil.copytree(trained_run, out)
    shutil.rmtree(out / "checkpoints" / "step-12")
    (out / "summary.json").unlink()
    return out


def resume_run(out: Path, *overrides: str, **keys: Any) -> Dict[str, Any]:
    return train(
        make_short_config(*make_settings(*overrides)), out, resume=True, quiet=True, **keys
    )


def list_refusals(out: Path, *overrides: str) -> List[str]:
    return list_faults(resume_run, out, *overrides)


@pytest.fixture(scope="module")
def resumed_job(trained_run: Path) -> Any:
    """Return the job that resumes the run after 8 updates."""
    return build(make_short_config(*make_settings()), done=8)


def write_schema_2(path: Path) -> None:
    """Rewrite a checkpoint's manifest in schema 2, which has a mapping for each file."""
    manifest = checkpoint.load(path).manifest
    files = {
        name: {
            "bytes": (path / name).stat().st_size,
            "sha256": hashlib.sha256((path / name).read_bytes()).hexdigest(),
        }
        for name in checkpoint.FILES
    }
    body = {
        "sha256": "0" * 64, "schema": 2, "step": manifest["step"], "updates": manifest["updates"], "stages": [2, 2, 2],
        "files": files, "keys_sha256": "1" * 64, "keys": manifest["keys"],
    }  # fmt: skip
    text = json.dumps(body, indent=1) + "\n"
    (path / "manifest.json").write_text(
        text.replace("0" * 64, hashlib.sha256(text.encode()).hexdigest(), 1)
    )


def write_schema_1(path: Path) -> None:
    """Rewrite a checkpoint in the format before manifests."""
    manifest = checkpoint.load(path).manifest
    hashes = {
        name: hashlib.sha256((path / name).read_bytes()).hexdigest() for name in checkpoint.FILES
    }
    state = {
        "position": manifest["position"],
        "optimizer": manifest["optimizer"],
        "step": manifest["step"],
    }
    (path / "state.json").write_text(json.dumps({**state, "schema": 1, "sha256": hashes}, indent=1))
    (path / "manifest.json").unlink()


# ---- damaged checkpoints


def damage_bytes(data: bytes, count: int, seed: int) -> Any:
    """Yield (damage, bytes): one bit flipped at each end, in the middle and at `count` random
    places, then the file cut or one byte longer."""
    draw = random.Random(seed)
    for place in [0, 7, 8, 9, len(data) // 2, len(data) - 1, *draw.sample(range(len(data)), count)]:
        bit = draw.randrange(8)
        yield (
            f"bit {bit} of byte {place}",
            data[:place] + bytes([data[place] ^ 1 << bit]) + data[place + 1 :],
        )
    for length in (0, 1, len(data) // 2, len(data) - 1):
        yield f"{length} bytes", data[:length]
    yield "a byte more", data + b" "


@pytest.mark.parametrize("name", ["manifest.json", "model.safetensors", "optimizer.safetensors"])
def test_every_flipped_bit_and_every_cut_is_detected(name: str, killed_run: Path) -> None:
    """A run with a flipped bit in its position once resumed from update 0 with exit code 0."""
    folder = killed_run / "checkpoints" / "step-8"
    file, content = folder / name, (folder / name).read_bytes()
    for damage, data in damage_bytes(
        content, 120 if name == "manifest.json" else 20, seed=len(name)
    ):
        file.write_bytes(data)
        (fault,) = list_faults(checkpoint.load, folder)
        assert fault.startswith(f"{file}: corrupt checkpoint") and "--resume-from 4" in fault, (
            damage,
            fault,
        )
    file.write_bytes(content)
    checkpoint.load(folder)


def test_a_damaged_checkpoint_is_one_line_of_the_command(
    killed_run: Path,
    run_train_tool: Any,  # noqa: F811
) -> None:
    path = killed_run / "checkpoints" / "step-8"
    file = path / "manifest.json"
    file.write_text(file.read_text().replace('"update": 8', '"update": 0'))
    for arguments in (["--out", str(killed_run), "--resume"], ["--evaluate", str(path)]):
        code, _, complaint = run_train_tool(DIGITS, *make_set_options(*make_settings()), *arguments)
        assert (
            code == 2 and complaint.count("\n") == 1 and f"{file}: corrupt checkpoint" in complaint
        )
    code, _, complaint = run_train_tool(
        DIGITS, *make_set_options(*make_settings()), "--out", str(killed_run), "--resume-from", "4"
    )
    assert code == 0, complaint


@pytest.mark.parametrize("source", ["folder", "file"])
def test_initial_weights_must_be_undamaged(source: str, killed_run: Path, tmp_path: Path) -> None:
    folder = killed_run / "checkpoints" / "step-8"
    path = folder if source == "folder" else folder / "model.safetensors"
    # another run
    settings = ["seed=3", "method=gpipe", "method_args={}", ADAM, "steps=1", f"init_from={path}"]
    report = train(make_short_config(*make_settings(*settings)), tmp_path / "new", quiet=True)
    assert (
        report["initial"]["test_loss"]
        == evaluate_checkpoint(make_short_config(*make_settings(*settings)), path)["test_loss"]
    )
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[-3] ^= 1
    (folder / "model.safetensors").write_bytes(data)
    with pytest.raises(BadInput, match="corrupt checkpoint"):
        evaluate_checkpoint(make_short_config(*make_settings(*settings)), path)
    with pytest.raises(BadInput, match="corrupt checkpoint"):
        train(make_short_config(*make_settings(*settings)), tmp_path / "again", quiet=True)


# ---- checkpoints of another run


DECIDING = {
    "seed": ["seed=7"],
    "method": ["method=pipelined_backprop"],
    "method_args.t2.decay": ["method_args.t2.decay=0.3"],
    "optimizer.name": [ADAM],
    "clip.norm": ["clip={norm: 1, scope: stage}"],
    "micro_batch_size": ["micro_batch_size=4"],
    "data.subset": ["data.subset=640"],
}  # fmt: skip


@pytest.mark.parametrize("key", list(DECIDING))
def test_a_checkpoint_of_another_run_is_refused_by_key(key: str, killed_run: Path) -> None:
    """A checkpoint of another seed, method, rate or optimizer was once accepted."""
    faults = list_refusals(killed_run, *DECIDING[key])
    assert any(
        f": {key}: " in fault and "the config of a run cannot change" in fault for fault in faults
    ), faults
    (killed_run / "config.yaml").write_text(
        dump_config(make_short_config(*make_settings(*DECIDING[key])))
    )  # the other run's folder with this checkpoint
    faults = list_refusals(killed_run, *DECIDING[key])
    place = f"{killed_run / 'checkpoints' / 'step-8'}: {key}: saved with "
    assert any(fault.startswith(place) and "this run has" in fault for fault in faults), faults
    assert not (killed_run / "checkpoints" / "step-12").exists()


FREE = {
    "log": ["log.every=5"],
    "where a checkpoint was": ["checkpoint.every=7"],  # the pipeline is empty after update 8 in both
    "evaluation": ["evaluate.every=0", "evaluate.subset=32"],
    "backend": ["backend.threads=1", "backend.deadline=100"],
    "stages": ["stages=2"],
    "reduction": ["reduction=fast"],
    "more steps": ["steps=14"],
}  # fmt: skip


@pytest.mark.parametrize("name", list(FREE))
def test_keys_with_a_free_role_may_change(name: str, killed_run: Path) -> None:
    report = resume_run(killed_run, *FREE[name])
    steps = 14 if name == "more steps" else 12
    assert report["steps"] == steps and (killed_run / "checkpoints" / f"step-{steps}").is_dir()


def test_a_run_may_only_grow(trained_run: Path, killed_run: Path, capsys: Any) -> None:
    """A longer run that was killed before its first checkpoint was once taken for a finished
    one."""
    assert list_refusals(killed_run, "steps=10") == [
        f"--resume: {killed_run / 'config.yaml'}: steps: 12 -> 10: may only grow"
    ]
    finished_run = killed_run.parent / "ended"
    shutil.copytree(trained_run, finished_run)
    assert (
        train(
            make_short_config(*make_settings("lr_schedule.name=constant")),
            finished_run,
            resume=True,
        )["steps"]
        == 12
    )
    assert "nothing to resume" in capsys.readouterr().out
    with interrupt_at(12):
        train(make_short_config(*make_settings("steps=16")), finished_run, resume=True)
    assert "the run continues with another steps: 12 -> 16" in capsys.readouterr().out
    longer = train(make_short_config(*make_settings("steps=16")), finished_run, resume=True)
    assert "resuming after update 12" in capsys.readouterr().out
    assert longer["steps"] == 16
    assert [line["step"] for line in read_metrics(finished_run) if "lr" in line] == list(
        range(1, 17)
    )


def test_every_key_of_the_config_has_a_role() -> None:
    assert set(Config.model_fields) <= set(ROLES)
    assert {key for key, role in ROLES.items() if role in (Role.FREE, Role.GROWS)} == {
        "steps", "epochs", "log", "checkpoint", "evaluate", "backend", "stages", "hardware", "metrics", "callbacks",
        "early_stopping", "reduction",
    }  # fmt: skip
    assert {key for key, role in ROLES.items() if role is Role.DECIDES} == {
        "model", "data", "loss", "given", "init_from", "seed", "precision", "method", "method_args", "optimizer", "lr_schedule",
        "clip", "micro_batch_size", "gradient_accumulation", "replicas", "loss_weight",
    }  # fmt: skip


def test_a_checkpoint_in_the_folder_of_another_step_is_refused(killed_run: Path) -> None:
    folder = killed_run / "checkpoints" / "step-8"
    shutil.rmtree(folder)
    (killed_run / "checkpoints" / "step-4").rename(folder)
    (line,) = list_refusals(killed_run)
    assert line.startswith(f"{folder}: step: ")


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
    killed_run: Path,
) -> None:
    path = killed_run / "checkpoints" / "step-8"
    saved = checkpoint.load(path)
    wide_weights = {name: value.double() for name, value in saved.model.items()}
    checkpoint.save(path.parent, 8, wide_weights, saved.optimizer, saved.manifest)
    files_before = {path: path.read_bytes() for path in killed_run.rglob("*") if path.is_file()}
    lines = list_refusals(killed_run)
    assert all(line.startswith((f"{path}: model: ", f"{path}: 5 more")) for line in lines)
    assert {
        path: path.read_bytes() for path in killed_run.rglob("*") if path.is_file()
    } == files_before


def test_weights_of_a_wrapped_model_are_refused_in_one_line_everywhere(killed_run: Path) -> None:
    """Story: the line of a resumed run was one for each entry of the optimizer, and none named the
    wrapper."""
    path = killed_run / "checkpoints" / "step-8"
    saved = checkpoint.load(path)
    weights = {f"_orig_mod.{name}": value for name, value in saved.model.items()}
    entries = {f"_orig_mod.{name}": value for name, value in saved.optimizer.items()}
    checkpoint.save(path.parent, 8, weights, entries, saved.manifest)
    (line,) = list_refusals(killed_run)
    assert line.startswith(f"{path}: model: every name begins with _orig_mod., ")
    config = make_short_config(*make_settings(f"init_from={path}"))
    for call in (
        lambda: evaluate_checkpoint(config, path),
        lambda: build(config),
        lambda: predict(killed_run, torch.zeros(2, 1, 8, 8)),
    ):
        (line,) = list_faults(call)
        assert f"{path}: every name begins with _orig_mod., " in line and "name[10:]" in line


def test_a_parameter_that_never_had_a_gradient_has_no_entries(tmp_path: Path) -> None:
    def make_spare() -> torch.nn.Module:
        torch.manual_seed(0)
        return Composed(
            lambda m, x: m.used(x.flatten(1)),
            used=torch.nn.Linear(64, 10),
            spare=torch.nn.Linear(3, 3),
        )

    overrides = ["method=gpipe", "method_args={}", "stages=1", "model.args={}"]
    for optimizer in ("optimizer.momentum=0.9", ADAM):
        out = tmp_path / optimizer[:12]
        train(
            make_short_config(*make_settings(*overrides, optimizer)),
            out,
            model=make_spare(),
            quiet=True,
        )
        resume_run(out, *overrides, optimizer, resume_from=4, model=make_spare())


# ---- before the first checkpoint


def test_resuming_where_there_is_no_run_yet_starts_one(
    trained_run: Path, tmp_path: Path, capsys: Any
) -> None:
    train(make_short_config(*make_settings()), tmp_path / "new", resume=True)
    assert (
        f"--resume: {tmp_path / 'new'}: contains no run yet: it starts from the beginning"
        in capsys.readouterr().out
    )
    assert_same_weights(tmp_path / "new", trained_run)


def test_a_dry_run_refuses_the_folder_that_the_run_would_refuse(
    killed_run: Path,
    run_train_tool: Any,  # noqa: F811
) -> None:
    arguments = [DIGITS, *make_set_options(*make_settings()), "--dry-run", "--out", str(killed_run)]
    before = {path: path.stat().st_mtime_ns for path in killed_run.rglob("*")}
    refused_options: Dict[str, List[str]] = {
        "--out": [], "--resume-from": ["--resume-from", "5"], "--resume": ["--resume", "--set", "optimizer.lr=0.2"],
    }  # fmt: skip
    for option, options in refused_options.items():
        code, _, complaint = run_train_tool(*arguments, *options)
        assert code == 2 and f"{option}: " in complaint and str(killed_run) in complaint
    assert (
        run_train_tool(*arguments, "--resume")[0]
        == run_train_tool(*arguments, "--resume-from", "4")[0]
        == run_train_tool(*arguments, "--overwrite")[0]
        == 0
    )
    assert before == {path: path.stat().st_mtime_ns for path in killed_run.rglob("*")}


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
    train(make_short_config(*make_settings()), killed_run, resume=True)
    assert_same_weights(killed_run, trained_run)


def test_only_the_weights_of_a_schema_2_checkpoint_can_be_loaded(
    killed_run: Path, tmp_path: Path
) -> None:
    folder = killed_run / "checkpoints" / "step-8"
    weights = checkpoint.load(folder).model
    write_schema_2(folder)
    (line,) = list_refusals(killed_run)
    file = folder / "model.safetensors"
    assert (
        line.startswith(f"{folder / 'manifest.json'}: schema: 2: ") and f"init_from: {file}" in line
    )
    for path in (folder, file):
        loaded = checkpoint.read_weights(path)
        assert all(torch.equal(loaded[name], weights[name]) for name in weights)
    train(
        make_short_config(*make_settings(f"init_from={file}", "steps=1")),
        tmp_path / "new",
        quiet=True,
    )


def test_a_checkpoint_without_a_manifest_is_refused_with_a_remedy(
    killed_run: Path, tmp_path: Path
) -> None:
    folder = killed_run / "checkpoints" / "step-8"
    write_schema_1(folder)
    (line,) = list_refusals(killed_run)
    file = folder / "model.safetensors"
    assert line.startswith(f"{folder / 'manifest.json'}: ") and f"init_from: {file}" in line
    train(
        make_short_config(*make_settings(f"init_from={file}", "steps=1")),
        tmp_path / "new",
        quiet=True,
    )


# ---- an earlier checkpoint, and the remains of a kill


def test_a_run_resumes_from_an_earlier_checkpoint(
    trained_run: Path,
    tmp_path: Path,
    run_train_tool: Any,  # noqa: F811
) -> None:
    out = tmp_path / "run"
    shutil.copytree(trained_run, out)

    lines_before = [line for line in read_numbers(out) if "lr" in line]
    arguments = [DIGITS, *make_set_options(*make_settings()), "--out", str(out)]
    code, _, complaint = run_train_tool(*arguments, "--resume-from", "5")
    assert code == 2 and "--resume-from: 5: " in complaint and "there are 4, 8, 12" in complaint
    assert checkpoint.list_steps(out / "checkpoints") == [4, 8, 12]
    code, output, complaint = run_train_tool(*arguments, "--resume-from", "4")
    assert code == 0 and "deleted, will be written again: step-8, step-12" in output, complaint
    assert_same_weights(out, trained_run)
    assert [line for line in read_numbers(out) if "lr" in line] == lines_before
    for wrong in (["4", "--resume"], ["x"], ["4", "--against", "gpipe"]):
        code, _, complaint = run_train_tool(*arguments, "--resume-from", *wrong)
        assert code == 2 and "--resume" in complaint and complaint.count("\n") == 1


def test_checkpoints_after_an_earlier_one_are_deleted_at_once(
    trained_run: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    shutil.copytree(trained_run, out)
    with interrupt_at(4):
        train(make_short_config(*make_settings()), out, resume_from=4, quiet=True)
    assert checkpoint.list_steps(out / "checkpoints") == [4] and not (out / "summary.json").exists()


def test_leftovers_are_cleared_away(killed_run: Path) -> None:
    folder = killed_run / "checkpoints"
    # a pruned checkpoint, which must not return
    shutil.copytree(folder / "step-4", folder / ".step-12.old")
    (folder / ".step-7.part").write_text("a file")
    (folder / ".step-9.part").mkdir()
    (folder / ".step-9.part" / "model.safetensors").write_text("half")
    resume_run(killed_run)
    assert {path.name for path in folder.iterdir()} == {"step-4", "step-8", "step-12"}


@pytest.mark.parametrize("limit", [100, 1000, 2500])
def test_a_full_disk_is_a_fault_and_earlier_checkpoints_stay(limit: int, killed_run: Path) -> None:
    """Limit the size of files, which fails as a full disk does; 2,500 bytes end in another file
    than 1,000."""
    folder = killed_run / "checkpoints"
    saved = checkpoint.load(folder / "step-8")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        with pytest.raises(RunFault) as error:
            checkpoint.save(folder, 12, saved.model, saved.optimizer, saved.manifest)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "step-12: cannot write the checkpoint" in str(error.value)
    assert {path.name for path in folder.iterdir()} == {"step-4", "step-8"}
    checkpoint.load(folder / "step-8")


def test_a_run_with_initial_weights_is_resumed_twice(
    tmp_path: Path,
    trained_run: Path,
    run_train_tool: Any,  # noqa: F811
) -> None:
    """The first resume once wrote init_from: null into config.yaml, and the second was refused."""
    weights_file = tmp_path / "first.safetensors"
    shutil.copy(trained_run / "checkpoints" / "step-4" / "model.safetensors", weights_file)
    settings = [f"init_from={weights_file}", "steps=8"]
    train(make_short_config(*make_settings(*settings)), tmp_path / "run", quiet=True)
    weights_file.unlink()
    arguments = [
        DIGITS,
        *make_set_options(*make_settings(*settings)),
        "--dry-run",
        "--out",
        str(tmp_path / "run"),
        "--resume-from",
        "4",
    ]
    assert run_train_tool(*arguments)[0] == 0
    for _ in range(2):
        resume_run(tmp_path / "run", *settings, resume_from=4)
    assert load_config(tmp_path / "run" / "config.yaml").init_from == InitFrom(
        path=str(weights_file)
    )


# ---- foreign files


def test_an_older_torch_reads_safetensors_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trained_run: Path
) -> None:
    """Before 2.6, torch.load(weights_only=True) could be made to run code (CVE-2025-32434)."""
    file = tmp_path / "plain.pt"
    torch.save({"weight": torch.ones(2)}, file)
    monkeypatch.setattr(torch, "__version__", "2.5.1+cpu")
    (fault,) = list_faults(checkpoint.read_tensors, file)
    assert (
        fault.startswith(f"{file}: ")
        and "safetensors.torch.save_file" in fault
        and "torch 2.6" in fault
    )
    assert checkpoint.read_weights(trained_run / "checkpoints" / "step-4")
    monkeypatch.setattr(torch, "__version__", "2.6.0")
    assert set(checkpoint.read_tensors(file)) == {"weight"}
