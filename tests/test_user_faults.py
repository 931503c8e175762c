"""Check faults of the user's own code and files: each is one line that names them and no file of
ours; only regular files are read."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from pathlib import Path
from typing import Any, Callable, Dict, List

import pytest
import torch

import ipu_pipe
from ipu_pipe.backends.ranks import read_torch_version
from ipu_pipe.cli import (
    analyze,
    check,
    collect,
    compare,
    export,
    fetch_data,
    measure_hardware,
    plan,
    schedule,
    stability,
    train,
)
from ipu_pipe.errors import BadInput, run_command, summarize
from ipu_pipe.files import open_file, parse_path, read_file
from ipu_pipe.model.batch import get_first_tensor
from ipu_pipe.run.callbacks import EarlyStopping
from ipu_pipe.run.train import evaluate_checkpoint
from ipu_pipe.store import checkpoint
from ipu_pipe.store.manifest import list_manifest_faults
from tests.hostile.faulty import Unprintable
from tests.support.runs import DIGITS, list_faults
from tests.test_train import make_set_options, make_short_config, run_train_tool  # noqa: F401

if sys.platform != "linux":
    pytest.skip("pipes and devices of Linux", allow_module_level=True)

FAULTY = "tests.hostile.faulty"
PACKAGE = os.path.dirname(ipu_pipe.__file__)


def name_objects(where: str, how: str, after: int = 0) -> List[str]:
    """Return config keys that name objects of which one misbehaves."""
    return [
        f"model={{entry: '{FAULTY}:Model', args: {{where: {where}, how: {how}, after: {after}}}}}",
        f"data={{name: '{FAULTY}:make_faulty_data'}}", f"loss={FAULTY}:loss", f"metrics=['{FAULTY}:metric']",
        f"optimizer={{name: '{FAULTY}:Optimizer', lr: 0.1, momentum: null}}",
        f"lr_schedule={{name: '{FAULTY}:make_scheduler'}}", "stages=2",
    ]  # fmt: skip


def name_callback(where: str, how: str) -> List[str]:
    """Return the config key of a callback that misbehaves in one method."""
    return [
        f"callbacks=[{{entry: '{FAULTY}:make_callback', args: {{where: {where}, how: {how}}}}}]"
    ]


# ---- code

# misbehaving object -> exit code, and a part of the line
OBJECTS = {
    # these once ended in a traceback
    ("forward", "cancelled", 2): (1, "CancelledError"),
    ("forward", "base", 2): (1, "BaseException: base"),
    ("forward", "generator exit", 2): (1, "GeneratorExit"),
    ("forward", "unprintable", 2): (1, "Unprintable: (its message cannot be formatted: ValueError)"),
    ("train_batch", "assertion", 1): (1, "AssertionError"),
    ("state_dict", "exit 3", 2): (1, "error: after update"),
    ("constructor", "exit", 0): (1, "called exit()"),
    # these once named a file of ours
    ("empties later", "none", 0): (2, "lr_schedule: LambdaLR: changes the optimizer's parameter groups"),
    ("empties", "none", 0): (2, "lr_schedule: LambdaLR: changes the optimizer's parameter groups"),
    ("renames", "none", 0): (2, "lr_schedule: LambdaLR: changes the optimizer's parameter groups"),
    ("test_batches", "signature", 0): (2, "data: TensorData.test_batches: too many positional arguments: must take (batch_size)"),
    ("train_batch", "signature", 0): (2, "data: TensorData.train_batch: too many positional arguments: must take (epoch, "),
    ("test_batches", "none", 0): (2, "data: test_batches: returned None"),
    ("train_batches_per_epoch", "text", 0): (2, "data: train_batches_per_epoch: returned a str"),
    ("loss", "tuple", 2): (2, "loss: returned a tuple"),
    ("loss", "object", 2): (2, "loss: returned an object"),
    ("metric", "object", 2): (2, "metrics: metric: returned an object"),
}  # fmt: skip


@pytest.fixture(autouse=True)
def reset_faulty_objects() -> None:
    """Reset the objects that earlier tests stored."""
    import tests.hostile.faulty as faulty

    faulty._loss = faulty._metric = None


def assert_one_line(errors: str, part: str) -> None:
    lines = [line for line in errors.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and part in lines[0], errors
    assert PACKAGE not in lines[0] and "Traceback" not in errors


@pytest.mark.parametrize("case", OBJECTS, ids=lambda case: f"{case[0]}: {case[1]}")
def test_an_object_that_misbehaves_is_one_line(
    case: Any,
    tmp_path: Path,
    run_train_tool: Any,  # noqa: F811
) -> None:
    code, part = OBJECTS[case]
    keys = make_set_options(
        *name_objects(*case),
        "steps=3",
        "checkpoint.every=1",
        "evaluate.every=1",
        "gradient_accumulation=2",
    )
    exit_code, _, errors = run_train_tool(DIGITS, *keys, "--out", str(tmp_path / "run"))
    assert exit_code == code, errors
    assert_one_line(errors, part)


CALLBACKS = {
    ("on_step", "cancelled"): (1, "Faulty.on_step after update 1: CancelledError"),
    # story: it was taken for the end of the command's reader, and the run ended with 0
    ("on_step", "broken pipe"): (1, "BrokenPipeError: [Errno 32] Broken pipe"),
    ("on_step", "not text"): (1, "NotText: (its message cannot be formatted: TypeError)"),
    ("on_step", "unprintable"): (1, "Unprintable: (its message cannot be formatted: ValueError)"),
    ("on_step", "exit 3"): (1, "called exit(3)"),
    ("state", "deep"): (1, "Faulty.state: cannot be put into a checkpoint as JSON"),
    ("on_step", "signature"): (2, "Faulty.on_step: too many positional arguments: must take (now)"),
    ("on_end", "signature"): (2, "Faulty.on_end: too many positional arguments: must take (now)"),
    ("load", "signature"): (2, "Faulty.load: too many positional arguments: must take (state)"),
}  # fmt: skip


@pytest.mark.parametrize("case", CALLBACKS, ids=lambda case: f"{case[0]}: {case[1]}")
def test_a_callback_that_misbehaves_is_one_line(
    case: Any,
    tmp_path: Path,
    run_train_tool: Any,  # noqa: F811
) -> None:
    code, part = CALLBACKS[case]
    keys = make_set_options(*name_callback(*case), "steps=3", "checkpoint.every=1")
    exit_code, _, errors = run_train_tool(DIGITS, *keys, "--out", str(tmp_path / "run"))
    assert exit_code == code, errors
    assert_one_line(errors, part)


def _print_line(line: str) -> None:
    print(line)


def _raise_bad_input(line: str) -> None:
    raise BadInput(line)


@pytest.mark.parametrize(
    ("name", "main", "code", "line"),
    [
        (
            "stdout",
            _print_line,
            1,
            "standard output: closed by the run's own code: nothing can be printed there",
        ),
        ("stderr", _raise_bad_input, 2, "x: is wrong"),
    ],
)
def test_a_stream_that_the_users_code_closed_is_named(
    name: str, main: Any, code: int, line: str, capfd: Any
) -> None:
    """After sys.stdout.close() the exit code was once 1 without a line, and after
    sys.stderr.close() there was no line at all."""

    def close_stream() -> None:
        getattr(sys, name).close()
        main("x: is wrong")

    with pytest.MonkeyPatch.context() as patched, pytest.raises(SystemExit) as exit_info:
        patched.setattr(sys, name, open({"stdout": 1, "stderr": 2}[name], "w", closefd=False))
        run_command(close_stream)
    assert exit_info.value.code == code and capfd.readouterr().err == f"error: {line}\n"


def test_a_nest_without_a_tensor_and_an_exception_without_text() -> None:
    """Odd inputs from Python once raised an IndexError, and summarize failed on the exception
    that it should describe."""
    assert list_faults(get_first_tensor, {"a": [1, None]})[0].startswith(
        "data: a dict without a tensor"
    )
    assert summarize(Unprintable()) == "Unprintable: (its message cannot be formatted: ValueError)"


def test_early_stopping_refuses_a_state_of_another_kind() -> None:
    stopping = EarlyStopping()
    for state in (3, None, {}, {**stopping.state(), "waited": "x"}):
        assert list_faults(stopping.load, state)[0].startswith(
            "checkpoint: the state of early stopping"
        )
    stopping.load(stopping.state())


# ---- files


def put_pipe(path: Path) -> None:
    os.mkfifo(path)


def put_zeros(path: Path) -> None:
    path.symlink_to("/dev/zero")


def put_large(path: Path) -> None:
    path.touch()
    os.truncate(path, 2**42)


def put_folder(path: Path) -> None:
    path.mkdir()


def put_socket(path: Path) -> None:
    working_folder = os.getcwd()
    os.chdir(path.parent)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path.name)
    os.chdir(working_folder)


PUT: Dict[str, Callable[[Path], None]] = {
    "pipe": put_pipe, "zeros": put_zeros, "large": put_large, "folder": put_folder, "socket": put_socket,
}  # fmt: skip


@pytest.mark.parametrize("kind", PUT)
def test_only_regular_files_of_a_bounded_size_are_opened(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "x"
    PUT[kind](path)
    for read in (open_file, read_file):
        with pytest.raises(OSError):
            read(path)
    (tmp_path / "y").write_bytes(b"12345")
    assert read_file(tmp_path / "y", 5) == b"12345"
    with pytest.raises(OSError, match="5 bytes"):
        read_file(tmp_path / "y", 4)


# commands that read FILE
READERS = {
    "rows": (".csv", lambda file: schedule.main(["rows", "--stages", "4", "--microbatches", "4", "--file", file])),
    "method_args.file": (
        ".csv", lambda file: train.main([DIGITS, "--dry-run", "--set", "method=rows", f"method_args.file={file}"])
    ),
    "config": (".yaml", lambda file: train.main([file, "--dry-run"])),
    "hardware": (".yaml", lambda file: plan.main([DIGITS, "--hardware", file])),
    "init_from": (".safetensors", lambda file: train.main([DIGITS, "--dry-run", "--set", f"init_from={file}"])),
    "init_from.pt": (".pt", lambda file: train.main([DIGITS, "--dry-run", "--set", f"init_from={file}"])),
    "evaluate": (".safetensors", lambda file: train.main([DIGITS, "--evaluate", file])),
    "trace": (".json", lambda file: analyze.main([file])),
    "store": (".trace", lambda file: analyze.main([file])),
}  # fmt: skip


@pytest.mark.parametrize("kind", ["pipe", "zeros", "large"])
@pytest.mark.parametrize("reader", READERS)
def test_a_path_to_an_irregular_file_is_refused(reader: str, kind: str, tmp_path: Path) -> None:
    """Rows in a pipe were once waited for, and /dev/zero was read until the memory was full."""
    suffix, read = READERS[reader]
    path = tmp_path / f"odd{suffix}"
    PUT[kind](path)
    assert str(path) in list_faults(read, str(path))[0]


@pytest.mark.parametrize("name", ["manifest.json", "model.safetensors", "optimizer.safetensors"])
@pytest.mark.parametrize("kind", ["pipe", "zeros", "large"])
def test_an_irregular_file_in_a_checkpoint_is_refused(kind: str, name: str, tmp_path: Path) -> None:
    """An empty file of 4 TiB was once hashed."""
    path = checkpoint.save(tmp_path, 1, {"w": torch.zeros(1)}, {}, {})
    (path / name).unlink()
    PUT[kind](path / name)
    assert list_faults(checkpoint.load, path)[0].startswith(f"{path / name}: ")


NUL = "a\0b"
PYTHON: Dict[str, Callable[[str], Any]] = {
    "train": lambda name: ipu_pipe.train(make_short_config(), name),
    "train, a path": lambda name: ipu_pipe.train(make_short_config(), Path(name)),
    "load_config": lambda name: ipu_pipe.load_config(name),
    "predict": lambda name: ipu_pipe.predict(name, torch.zeros(4, 64)),
    "export": lambda name: ipu_pipe.export(name, "new.safetensors"),
    "export to": lambda name: ipu_pipe.export("run", f"{name}.safetensors"),
    "analyze_run": lambda name: ipu_pipe.analyze_run(name),
    "load_data": lambda name: ipu_pipe.load_data("mnist", root=name),
    "image_folder": lambda name: ipu_pipe.load_data("image_folder", root=name),
    "evaluate": lambda name: evaluate_checkpoint(make_short_config(), name),
    "rows": lambda name: make_short_config(f"method_args.file={name}"),
    "--out": lambda name: train.main([DIGITS, "--out", name]),
    "CONFIG": lambda name: train.main([name]),
    "--evaluate": lambda name: train.main([DIGITS, "--evaluate", name]),
    "--html": lambda name: analyze.main(["run", "--html", name]),
    "--to": lambda name: export.main(["run", "--to", name]),
    "--write": lambda name: plan.main([DIGITS, "--hardware", "v100x8", "--write", name]),
    "--file": lambda name: schedule.main(
        ["rows", "--stages", "2", "--microbatches", "4", "--file", name]
    ),
    "--root": lambda name: fetch_data.main(["mnist", "--root", name]),
    "collect": lambda name: collect.main([DIGITS, "--out", name]),
    "KEY=VALUE": lambda name: train.main([DIGITS, f"key={name}"]),
    "stability": lambda name: stability.main([name]),
    "RUN": lambda name: analyze.main([name]),
    "check": lambda name: check.main(["--to", f"{name}/file"]),
    "measure-hardware": lambda name: measure_hardware.main(["--out", f"{name}/file.yaml"]),
    "init_from": lambda name: ipu_pipe.train(make_short_config(f"init_from={name}"), "run"),
    "compare": lambda name: compare.main([DIGITS, "--out", name]),
}


@pytest.mark.parametrize("name", [NUL, "x" * 300], ids=["nul", "long"])
@pytest.mark.parametrize("call", PYTHON)
def test_a_path_that_no_file_can_have_is_refused_in_a_line(
    call: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a path once raised "ValueError: embedded null byte", or an OSError."""
    monkeypatch.chdir(tmp_path)
    assert list_faults(PYTHON[call], name)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("text", [NUL, "\ud800"])
def test_a_path_must_be_encodable_by_the_system(text: str) -> None:
    assert list_faults(parse_path, text, "--out")[0].startswith("--out: ")
    assert parse_path(os.fsdecode(b"a\xff"), "--out") == Path(os.fsdecode(b"a\xff"))


# ---- state dicts and manifests

STATE_DICTS: Dict[str, Callable[[], Any]] = {
    "3: is a key of type int": lambda: {3: torch.zeros(1)},
    "(1, 2): is a key of type tuple": lambda: {(1, 2): torch.zeros(1)},
    "None: is a key of type NoneType": lambda: {None: torch.zeros(1)},
    "w: is sparse_coo": lambda: {"w": torch.eye(2).to_sparse()},
    "w: is sparse_csr": lambda: {"w": torch.eye(2).to_sparse_csr()},
    "w: is quantized": lambda: {"w": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)},
    "w: is nested": lambda: {"w": torch.nested.nested_tensor([torch.zeros(1), torch.zeros(2)])},
    "w: is without values": lambda: {"w": torch.zeros(2, device="meta")},
    "is not a plain state dict": lambda: {"w": torch.zeros(1), "epoch": 3},
}


@pytest.mark.skipif(
    read_torch_version() < checkpoint.SAFE_TORCH, reason="such a torch reads safetensors alone"
)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("fault", STATE_DICTS)
def test_odd_state_dicts_are_refused_by_name(fault: str, tmp_path: Path) -> None:
    """Numbers as keys once raised an AttributeError in our code; sparse and quantized tensors
    raised a RuntimeError of PyTorch."""
    torch.save(STATE_DICTS[fault](), tmp_path / "w.pt")
    assert fault in list_faults(checkpoint.read_tensors, tmp_path / "w.pt")[0]


def test_a_complex_weight_is_not_loaded_into_a_real_one() -> None:
    """The imaginary part was once dropped, with a warning."""
    tensors = {"weight": torch.zeros(2, 3, dtype=torch.complex64), "bias": torch.zeros(2)}
    fault = "f: weight: is complex, the model's is real"
    assert list_faults(checkpoint.load_weights, torch.nn.Linear(3, 2), tensors, "f") == [fault]


POSITION = {
    "update": 4,
    "initial": [0.5, {"accuracy": None}],
    "best_value": None,
    "best_step": None,
}
PLATEAU = {"rate": 0.1, "best": None, "num_bad_epochs": 0, "cooldown_counter": 0, "last_epoch": 2}
WHOLE: Dict[str, Any] = {
    "schema": 3, "step": 4, "updates": 6, "keys": {"a.b": [1, None]}, "position": POSITION, "optimizer": {"w/hist": [1]},
    "callbacks": [{"name": "C", "state": None}], "files": {"model.safetensors": "0" * 64}, "of a later version": 1,
}  # fmt: skip
FORGED = [
    ({"files": [1]}, "files: "), ({"files": None}, "files: "), ({"files": {"../model.safetensors": "0" * 64}}, "files: ../model"),
    ({"files": {"/dev/zero": "0" * 64}}, "files: /dev/zero"), ({"files": {"..": "0"}}, "files: .."),
    ({"files": {"model.safetensors": 3}}, "files.model.safetensors"),
    ({"files": {"model.safetensors": {"bytes": 3, "sha256": "0" * 64}}}, "files.model.safetensors"),
    ({"optimizer": "x"}, "optimizer: x"), ({"optimizer": []}, "optimizer: "), ({"keys": 3}, "keys: 3"),
    ({"callbacks": ["x"]}, "callbacks.0: x"), ({"callbacks": [{"name": "C"}]}, "callbacks.0.state"), ({"step": 4.5}, "step: 4.5"),
    ({"updates": "6"}, "updates: 6"), ({"updates": True}, "updates: True"), ({"position": [4]}, "position: "),
    ({"position": {**POSITION, "initial": [1, 2]}}, "position.initial.1: 2"),
    ({"position": {**POSITION, "initial": [1]}}, "position.initial"),
    ({"position": {**POSITION, "initial": 3}}, "position.initial: 3"),
    ({"position": {**POSITION, "best_value": {}}}, "position.best_value"),
    ({"position": {**POSITION, "more": 1}}, "position.more"),
    ({"position": {**POSITION, "plateau": {"rate": 0.1}}}, "position.plateau.num_bad_epochs"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "place"), FORGED)
def test_a_forged_manifest_is_refused_by_key(changes: Dict[str, Any], place: str) -> None:
    assert list_manifest_faults(WHOLE) == []
    assert list_manifest_faults({**WHOLE, **changes})[0].startswith(place)


def test_optional_entries_of_a_manifest_are_accepted() -> None:
    """Callbacks and plateau may be missing, and the position may be of an earlier version."""
    for changes in (
        {"callbacks": None},
        {"position": {**POSITION, "plateau": PLATEAU}},
        {"position": {**POSITION, "best_loss": 0.5, "epoch_loss": float("nan"), "seconds": 3}},
    ):
        assert list_manifest_faults({**WHOLE, **changes}) == []


def test_the_users_own_exception_passes_unchanged_through_python(tmp_path: Path) -> None:
    class CancellingCallback(ipu_pipe.Callback):
        def on_step(self, now: ipu_pipe.Moment) -> None:
            raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        ipu_pipe.train(
            make_short_config("steps=2"),
            tmp_path / "run",
            callbacks=[CancellingCallback()],
            quiet=True,
        )
    assert (tmp_path / "run" / "traceback.txt").is_file()
