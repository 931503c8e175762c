"""Check faults of the user's own code and files: each is one line that names them and no file of
ours; only regular files are read."""

from __future__ import annotations

import asyncio
import functools
import importlib
import os
import sys
from pathlib import Path
from typing import Any, List

import pytest
import torch

import ipu_pipe
from ipu_pipe.backends.ranks import read_torch_version
from ipu_pipe.errors import BadInput, run_command, summarize
from ipu_pipe.files import open_file, parse_path, read_file
from ipu_pipe.model.batch import get_first_tensor
from ipu_pipe.run.callbacks import HOOKS, EarlyStopping
from ipu_pipe.run.train import evaluate_checkpoint
from ipu_pipe.store import checkpoint
from ipu_pipe.store.manifest import list_manifest_faults
from ipu_pipe.update.rates import PLATEAU_STATE
from tests.hostile.cases import PUT
from tests.hostile.faulty import Unprintable
from tests.support.runs import DIGITS, list_faults
from tests.support.slow import mark_slow
from tests.test_train import make_set_options, make_short_config, run_train_tool  # noqa: F401

if sys.platform != "linux":
    pytest.skip("pipes and devices of Linux", allow_module_level=True)

FAULTY = "tests.hostile.faulty"
PACKAGE = os.path.dirname(ipu_pipe.__file__)


def name_objects(where: str, how: str, after: int = 0) -> List[str]:
    """Return config keys that name objects of which one, or a callback, misbehaves in one method."""
    args = f"args: {{where: {where}, how: {how}, after: {after}}}"
    if where in (*HOOKS, "state", "load"):
        return [f"callbacks=[{{entry: '{FAULTY}:make_callback', {args}}}]"]
    return [
        f"model={{entry: '{FAULTY}:Model', {args}}}",
        f"data={{name: '{FAULTY}:make_faulty_data'}}", f"loss={FAULTY}:loss", f"metrics=['{FAULTY}:metric']",
        f"optimizer={{name: '{FAULTY}:Optimizer', lr: 0.1, momentum: null}}",
        f"lr_schedule={{name: '{FAULTY}:make_scheduler'}}", "stages=2",
    ]  # fmt: skip


# ---- code

# misbehaving object -> exit code, and a part of the line
MISBEHAVING = {
    # these once ended in a traceback
    ("forward", "cancelled", 2): (1, "CancelledError"),
    ("forward", "unprintable", 2): (1, "Unprintable: (its message cannot be formatted: ValueError)"),
    ("train_batch", "assertion", 1): (1, "AssertionError"),
    ("state_dict", "exit 3", 2): (1, "error: after update"),
    ("constructor", "exit", 0): (1, "called exit()"),
    # these once named a file of ours
    ("empties later", "none", 0): (2, "lr_schedule: LambdaLR: changes the optimizer's parameter groups"),
    ("empties", "none", 0): (2, "lr_schedule: LambdaLR: changes the optimizer's parameter groups"),
    ("test_batches", "signature", 0): (2, "data: TensorData.test_batches: too many positional arguments: must take (batch_size)"),
    ("train_batch", "signature", 0): (2, "data: TensorData.train_batch: too many positional arguments: must take (epoch, "),
    ("test_batches", "none", 0): (2, "data: test_batches: returned None"),
    ("train_batches_per_epoch", "text", 0): (2, "data: train_batches_per_epoch: returned a str"),
    ("loss", "object", 2): (2, "loss: returned an object"),
    ("metric", "object", 2): (2, "metrics: metric: returned an object"),
    # callbacks
    ("on_step", "cancelled"): (1, "Faulty.on_step after update 1: CancelledError"),
    # story: it was taken for the end of the command's reader, and the run ended with 0
    ("on_step", "broken pipe"): (1, "BrokenPipeError: [Errno 32] Broken pipe"),
    ("on_step", "not text"): (1, "NotText: (its message cannot be formatted: TypeError)"),
    ("on_step", "exit 3"): (1, "called exit(3)"),
    ("state", "deep"): (1, "Faulty.state: cannot be put into a checkpoint as JSON"),
    ("on_end", "signature"): (2, "Faulty.on_end: too many positional arguments: must take (now)"),
    ("load", "signature"): (2, "Faulty.load: too many positional arguments: must take (state)"),
}  # fmt: skip


def is_quick(case: Any) -> bool:
    """Return whether a case ends before training, or in the first forward."""
    return case[0] not in ("on_step", "state")


@pytest.mark.parametrize(
    "case", mark_slow(MISBEHAVING, is_quick), ids=lambda case: f"{case[0]}: {case[1]}"
)
def test_an_object_that_misbehaves_is_one_line(
    case: Any,
    tmp_path: Path,
    run_train_tool: Any,  # noqa: F811
) -> None:
    code, part = MISBEHAVING[case]
    sizes = ("steps=3", "checkpoint.every=1", "evaluate.every=1", "gradient_accumulation=2")
    keys = make_set_options(*name_objects(*case), *sizes)
    exit_code, _, errors = run_train_tool(DIGITS, *keys, "--out", str(tmp_path / "run"))
    assert exit_code == code, errors
    (line,) = [line for line in errors.splitlines() if line.startswith("error: ")]
    assert part in line and PACKAGE not in line and "Traceback" not in errors


def raise_bad_input(line: str) -> None:
    raise BadInput(line)


@pytest.mark.parametrize("name, main, code, line", [
    ("stdout", print, 1, "standard output: closed by the run's own code: nothing can be printed there"),
    ("stderr", raise_bad_input, 2, "x: is wrong"),
])  # fmt: skip
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


@pytest.mark.parametrize("kind", ["pipe", "zeros", "large", "folder", "socket"])
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


def call_command(line: str, path: str) -> None:
    """Call a command of `ipu_pipe.cli` on this path."""
    tool, *words = line.replace("CONFIG", DIGITS).split()
    module = importlib.import_module(f"ipu_pipe.cli.{tool}")
    module.main([word.replace("PATH", path) for word in words])


# what reads a file -> the suffix of its name, and a command line
READERS = {
    "rows": (".csv", "schedule rows --stages 4 --microbatches 4 --file PATH"),
    "method_args.file": (".csv", "train CONFIG --dry-run --set method=rows method_args.file=PATH"),
    "config": (".yaml", "train PATH --dry-run"),
    "hardware": (".yaml", "plan CONFIG --hardware PATH"),
    "init_from": (".safetensors", "train CONFIG --dry-run --set init_from=PATH"),
    "init_from.pt": (".pt", "train CONFIG --dry-run --set init_from=PATH"),
    "evaluate": (".safetensors", "train CONFIG --evaluate PATH"),
    "trace": (".json", "analyze PATH"),
    "store": (".trace", "analyze PATH"),
}


@pytest.mark.parametrize("kind", ["pipe", "zeros", "large"])
@pytest.mark.parametrize("reader", READERS)
def test_a_path_to_an_irregular_file_is_refused(reader: str, kind: str, tmp_path: Path) -> None:
    """Rows in a pipe were once waited for, and /dev/zero was read until the memory was full."""
    suffix, line = READERS[reader]
    path = tmp_path / f"odd{suffix}"
    PUT[kind](path)
    assert str(path) in list_faults(call_command, line, str(path))[0]


@pytest.mark.parametrize("name", ["manifest.json", "model.safetensors", "optimizer.safetensors"])
@pytest.mark.parametrize("kind", ["pipe", "zeros", "large"])
def test_an_irregular_file_in_a_checkpoint_is_refused(kind: str, name: str, tmp_path: Path) -> None:
    """An empty file of 4 TiB was once hashed."""
    path = checkpoint.save(tmp_path, 1, {"w": torch.zeros(1)}, {}, {})
    (path / name).unlink()
    PUT[kind](path / name)
    assert list_faults(checkpoint.load, path)[0].startswith(f"{path / name}: ")


NUL = "a\0b"
COMMANDS = [
    "train CONFIG --out PATH", "train PATH", "train CONFIG --evaluate PATH", "train CONFIG key=PATH", "analyze PATH",
    "analyze run --html PATH", "export run --to PATH", "plan CONFIG --hardware v100x8 --write PATH", "stability PATH",
    "schedule rows --stages 2 --microbatches 4 --file PATH", "fetch_data mnist --root PATH", "collect CONFIG --out PATH",
    "compare CONFIG --out PATH", "check --to PATH/file", "measure_hardware --out PATH/file.yaml",
]  # fmt: skip
CALLS = {
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
    "init_from": lambda name: ipu_pipe.train(make_short_config(f"init_from={name}"), "run"),
    **{line: functools.partial(call_command, line) for line in COMMANDS},
}


@pytest.mark.parametrize("name", [NUL, "x" * 300], ids=["nul", "long"])
@pytest.mark.parametrize("call", CALLS)
def test_a_path_that_no_file_can_have_is_refused_in_a_line(
    call: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a path once raised "ValueError: embedded null byte", or an OSError."""
    monkeypatch.chdir(tmp_path)
    assert list_faults(CALLS[call], name)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("text", [NUL, "\ud800"])
def test_a_path_must_be_encodable_by_the_system(text: str) -> None:
    assert list_faults(parse_path, text, "--out")[0].startswith("--out: ")
    assert parse_path(os.fsdecode(b"a\xff"), "--out") == Path(os.fsdecode(b"a\xff"))


# ---- state dicts and manifests

STATE_DICTS = {
    "3: is a key of type int": lambda: {3: torch.zeros(1)},
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
WHOLE = {
    "schema": 3, "step": 4, "updates": 6, "keys": {"a.b": [1, None]}, "position": POSITION, "optimizer": {"w/hist": [1]},
    "callbacks": [{"name": "C", "state": None}], "files": {"model.safetensors": "0" * 64}, "of a later version": 1,
}  # fmt: skip
# changed key -> a wrong value, and the place that the fault names
FORGED = [
    ("files", [1], "files: "), ("files", None, "files: "), ("files", {"../model.safetensors": "0"}, "files: ../model"),
    ("files", {"..": "0"}, "files: .."), ("files", {"model.safetensors": 3}, "files.model.safetensors"),
    ("optimizer", "x", "optimizer: x"), ("keys", 3, "keys: 3"), ("callbacks", ["x"], "callbacks.0: x"),
    ("callbacks", [{"name": "C"}], "callbacks.0.state"), ("step", 4.5, "step: 4.5"), ("updates", "6", "updates: 6"),
    ("updates", True, "updates: True"), ("position", [4], "position: "),
    ("position", {**POSITION, "initial": [1, 2]}, "position.initial.1: 2"),
    ("position", {**POSITION, "initial": [1]}, "position.initial"),
    ("position", {**POSITION, "best_value": {}}, "position.best_value"), ("position", {**POSITION, "more": 1}, "position.more"),
    ("position", {**POSITION, "plateau": {"rate": 0.1}}, "position.plateau.num_bad_epochs"),
]  # fmt: skip


@pytest.mark.parametrize("key, value, place", FORGED)
def test_a_forged_manifest_is_refused_by_key(key: str, value: Any, place: str) -> None:
    assert list_manifest_faults(WHOLE) == []
    assert list_manifest_faults({**WHOLE, key: value})[0].startswith(place)


def test_optional_entries_of_a_manifest_are_accepted() -> None:
    """Callbacks and plateau may be missing, and the position may be of an earlier version."""
    for changes in (
        {"callbacks": None},
        {"position": {**POSITION, "plateau": dict.fromkeys(("rate", *PLATEAU_STATE), 0.0)}},
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
