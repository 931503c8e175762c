"""Check checkpoints in shards and in the background: the same state on any layout, whole or
absent, while training continues."""

from __future__ import annotations

import functools
import os
import shutil
import stat
import threading
import types
from pathlib import Path
from typing import Any, List

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ipu_pipe
from ipu_pipe.backends.interface import CheckpointState
from ipu_pipe.backends.ranks import read_torch_version
from ipu_pipe.errors import BadInput, RunFault, end_process
from ipu_pipe.run.predict import predict
from ipu_pipe.run.train import train
from ipu_pipe.store import checkpoint
from ipu_pipe.store.saving import Saver
from tests import forked
from tests.support.runs import assert_same, find_checkpoint, list_faults, needs_processes
from tests.support.slow import mark_slow
from tests.test_processes import train_digits_on_emulator, train_digits_on_ranks
from tests.test_train import make_short_config, run_train_tool  # noqa: F401

SHARDED, BACKGROUND = "checkpoint.format=sharded", "checkpoint.background=true"
KEYS = [
    "checkpoint.every=4", "checkpoint.keep=9", "log.every=1", "model.args.width=8", "evaluate.every=0", "evaluate.subset=64",
    "stages=2", "method=gpipe",
]  # fmt: skip


def assert_checkpoints_equal(ours: Path, theirs: Path, step: int = 12) -> None:
    """Assert that two runs' checkpoints have the same weights and optimizer state."""
    one, other = (checkpoint.load(find_checkpoint(run, step)) for run in (ours, theirs))
    assert_same(one.model, other.model)
    assert_same(one.optimizer, other.optimizer)


# ---- in shards


@pytest.mark.slow
@needs_processes
def test_a_sharded_run_resumes_on_any_layout(tmp_path: Path) -> None:
    """Resume on other layouts, with weights that no stage uses: two ranks in shards, then the
    emulator, or three ranks from a single file. The first process of two has no weights."""
    entry = "model.entry=tests.staged_models:OddModel"
    adamw = ["optimizer.name=adamw", "optimizer.momentum=null"]
    settings = [entry, "model.args={}", "method=gpipe", *adamw]
    one, two, on = (tmp_path / name for name in ("one", "two", "on"))
    train_digits_on_emulator(one, *settings)
    code, _, error = train_digits_on_ranks(2, two, *settings, "stages=2", SHARDED, "steps=8")
    assert code == 0, error
    last = two / "checkpoints" / "step-8"
    names = [f"{kind}-0000{r}-of-00002" for kind in ("model", "optimizer") for r in (1, 2)]
    assert {file.stem for file in last.iterdir()} == {*names, "manifest"}
    _read_by_dcp(last)
    assert predict(two, torch.zeros(2, 64)).shape == (2, 10)
    shutil.copytree(two, on)

    assert train_digits_on_emulator(on, *settings, resume=True)["steps"] == 12
    assert_checkpoints_equal(on, one)
    shutil.rmtree(on / "checkpoints" / "step-12")
    (on / "summary.json").unlink()
    # from here on single files, beside sharded ones
    train_digits_on_emulator(on, *settings, resume=True, resume_from=4)
    three = ["stages=3", SHARDED, BACKGROUND, "--resume-from", "8"]
    code, _, error = train_digits_on_ranks(3, on, *settings, *three)
    assert code == 0, error
    assert_checkpoints_equal(on, one)
    assert len([*(on / "checkpoints" / "step-12").glob("model-*-of-00003.safetensors")]) == 3


def _read_by_dcp(folder: Path) -> None:
    """Check that DCP's own reader of safetensors finds every tensor."""
    from torch.distributed import checkpoint as dcp

    hf_storage = pytest.importorskip("torch.distributed.checkpoint.hf_storage")
    saved = checkpoint.load(folder)
    expected = {**saved.model, **saved.optimizer}
    state = {name: torch.zeros_like(value) for name, value in expected.items()}
    dcp.load(state, storage_reader=hf_storage.HuggingFaceStorageReader(str(folder)), no_dist=True)
    assert_same(state, expected)


@needs_processes
def test_a_shard_that_fails_leaves_no_checkpoint(tmp_path: Path) -> None:
    make = forked.get_fork_server().Process
    ranks = [make(target=_save_failing_shards, args=(rank, str(tmp_path))) for rank in range(2)]
    for process in ranks:
        process.start()
    for process, code in zip(ranks, [0, 9]):
        process.join(120)
        assert process.exitcode == code
    assert checkpoint.list_steps(tmp_path / "checkpoints") == [1]


def _save_failing_shards(rank: int, path: str) -> None:
    from ipu_pipe.store.shards import save_shard

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}/store", rank=rank, world_size=2)
    folder = Path(path) / "checkpoints"
    # a tied weight of both ranks is written once; the manifest has the plain values of both
    model = {f"{rank}.weight": torch.full((2,), float(rank)), "tied": torch.ones(3)}
    step = {f"{rank}.weight/step": torch.tensor(4.0)}
    state = CheckpointState(model, step, {f"{rank}.weight/plain": rank})
    saved = checkpoint.load(save_shard(folder, 1, state, {"updates": 7}, None))
    assert {*saved.model} == {"0.weight", "1.weight", "tied"} and saved.manifest["updates"] == 7
    assert saved.manifest["optimizer"] == {"0.weight/plain": 0, "1.weight/plain": 1}
    assert saved.model["1.weight"].tolist() == [1.0, 1.0]
    assert {*saved.optimizer} == {"0.weight/step", "1.weight/step"}

    flush = checkpoint._flush

    def fail_to_flush(file: Path) -> None:
        if file.name == "optimizer-00002-of-00002.safetensors":
            raise OSError(28, "No space left on device", str(file))
        flush(file)

    checkpoint._flush = fail_to_flush
    # on both ranks
    with pytest.raises(RunFault, match="step-2: cannot write the checkpoint.*optimizer-00002"):
        save_shard(folder, 2, state, {}, None)
    dist.barrier()
    assert [*folder.iterdir()] == [folder / "step-1"]

    # as if by kill -9 while writing
    checkpoint._flush = flush if rank == 0 else lambda file: os._exit(9)
    with pytest.raises(RunFault, match="lost"):
        save_shard(folder, 3, state, {}, None)
    assert not (folder / "step-3").exists()
    end_process(0)


# ---- in the background


class DelayedWriter(ipu_pipe.Callback):
    """A callback that delays each checkpoint by two updates, records the order of events, and keeps
    changing the container that it returned as its state."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, interrupts_at: int = 0) -> None:
        self.seen: List[str] = []
        self.may_write, self.interrupts_at = threading.Semaphore(0), interrupts_at
        self.real = checkpoint.save
        monkeypatch.setattr(checkpoint, "save", self.write)

    def write(self, folder: Path, step: int, *args: Any) -> Path:
        assert self.may_write.acquire(timeout=60), "training waits for a checkpoint"
        return self.real(folder, step, *args)

    def on_step(self, now: ipu_pipe.Moment) -> None:
        self.seen.append(str(now.step))
        if now.step in (6, 10, self.interrupts_at):
            self.may_write.release()
        if now.step == self.interrupts_at:
            raise KeyboardInterrupt

    def on_evaluation(self, now: ipu_pipe.Moment) -> None:
        self.may_write.release()  # for the last checkpoint, after the end of training

    def on_checkpoint(self, now: ipu_pipe.Moment) -> None:
        assert now.checkpoint is not None and (now.checkpoint / "manifest.json").is_file()
        self.seen.append(now.checkpoint.name)

    def state(self) -> Any:
        return {"seen": self.seen}


def test_training_continues_while_a_checkpoint_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A callback's own list, stored by reference, once had the values of later updates when the
    manifest was written."""
    before, beside = tmp_path / "before", tmp_path / "beside"
    train(make_short_config(*KEYS), before, quiet=True)
    writer = DelayedWriter(monkeypatch)
    train(make_short_config(*KEYS, BACKGROUND), beside, quiet=True, callbacks=[writer])
    order = ["4", "5", "6", "step-4", "9"]
    assert [event for event in writer.seen if event in order] == order
    assert writer.seen.index("10") < writer.seen.index("step-8")
    assert writer.seen[-1] == "step-12"  # the end waits for it
    for step in (4, 8, 12):  # a checkpoint is a copy: training has changed the weights since
        assert_checkpoints_equal(before, beside, step)
        (callback,) = checkpoint.load(find_checkpoint(beside, step)).manifest["callbacks"]
        assert [event for event in callback["state"]["seen"] if event.isdigit()][-1] == str(step)


def test_ctrl_c_waits_for_a_checkpoint_and_the_run_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, config = tmp_path / "run", make_short_config(*KEYS, BACKGROUND)
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        train(config, run, quiet=True, callbacks=[DelayedWriter(patched, interrupts_at=5)])
    assert checkpoint.list_steps(run / "checkpoints") == [4]
    train(config, run, quiet=True, resume=True)
    train(make_short_config(*KEYS), tmp_path / "one", quiet=True)
    assert_checkpoints_equal(run, tmp_path / "one")


@pytest.mark.parametrize("fails_at", [0, 1, 2])
def test_a_failure_in_the_background_ends_the_run(
    fails_at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fail at the first, second and last file of the second checkpoint; the first checkpoint
    stays whole."""
    flush, flushed_files = checkpoint._flush, []

    def fail_to_flush(file: Path) -> None:
        if ".step-8.part" in str(file):
            flushed_files.append(file.name)
            if len(flushed_files) > fails_at:
                raise OSError(28, "No space left on device", str(file))
        flush(file)

    monkeypatch.setattr(checkpoint, "_flush", fail_to_flush)
    with pytest.raises(RunFault, match="step-8: cannot write the checkpoint.*part/(mod|opt|man)"):
        train(make_short_config(*KEYS, BACKGROUND), tmp_path, quiet=True)
    assert [*(tmp_path / "checkpoints").iterdir()] == [find_checkpoint(tmp_path, 4)]


@needs_processes
@pytest.mark.parametrize("format", ["single", "sharded"])
def test_the_arguments_of_a_saver_may_change_at_once(
    format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ipu_pipe.store import shards

    may_write, saved = threading.Event(), []

    def record(folder: Path, step: int, *values: Any) -> Path:
        assert may_write.wait(60)
        saved.extend(values)
        return folder

    monkeypatch.setattr(checkpoint, "save", record)
    monkeypatch.setattr(shards, "save_shard", record)
    state = CheckpointState({"w": torch.ones(1)}, {"w/m": torch.ones(1)}, {"w/hist": [1]})
    entries = {"callbacks": [{"state": [1]}]}
    saver = Saver(tmp_path, group=None if format == "single" else object())
    saver.start(4, state, entries, (), background=True)
    state.model["w"].zero_()
    state.optimizer["w/m"].zero_()
    state.plain["w/hist"].append(2)
    entries["callbacks"][0]["state"].append(2)
    may_write.set()
    saver.wait()
    if format == "sharded":
        written, written_entries, _ = saved
        assert written.plain == {"w/hist": [1]}
        saved = [written.model, written.optimizer, written_entries]
    expected = [{"w": torch.ones(1)}, {"w/m": torch.ones(1)}, {"callbacks": [{"state": [1]}]}]
    assert saved == expected


class TensorListSGD(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        self.state[self.param_groups[0]["params"][0]]["list"] = [torch.zeros(1)]


@pytest.mark.parametrize("background", mark_slow(["false", "true"], "true".__eq__))
def test_state_that_json_cannot_store_ends_the_run_with_one_line(
    background: str, tmp_path: Path
) -> None:
    """Tensors in a list of an optimizer's state once raised a RecursionError."""
    config = make_short_config(*KEYS, f"checkpoint.background={background}")
    optimizer = functools.partial(TensorListSGD, lr=0.1)
    with pytest.raises(RunFault, match="step-4: cannot write the checkpoint: .*Tensor.*"):
        train(config, tmp_path, quiet=True, optimizer=optimizer)


# ---- the files of a checkpoint


def save_small_checkpoint(folder: Path, step: int) -> Path:
    model = nn.Linear(3, 2)
    state, position = {"weight/momentum": torch.ones(2, 3)}, {"position": {"update": step}}
    return checkpoint.save(folder, step, model.state_dict(), state, position)


def test_a_checkpoint_can_be_written_on_windows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Story: on Windows every checkpoint failed with "Bad file descriptor".

    A file open for reading was flushed, and a folder was opened.
    """
    open_here, writable, flushed = os.open, set(), []

    def open_as_windows(path: Any, flags: int, *mode: int) -> int:
        assert not os.path.isdir(path)
        handle = open_here(path, flags, *mode)
        if flags & (os.O_RDWR | os.O_WRONLY):
            writable.add(handle)
        return handle

    monkeypatch.setattr(os, "open", open_as_windows)
    monkeypatch.setattr(os, "fsync", flushed.append)
    # in this module alone, since pathlib reads os.name too
    monkeypatch.setattr(checkpoint, "os", types.SimpleNamespace(**{**vars(os), "name": "nt"}))
    path = save_small_checkpoint(tmp_path, 3)
    assert checkpoint.load(path).manifest["step"] == 3
    # two files of tensors and the manifest
    assert len(flushed) == 3 and {*flushed} <= writable


def test_folders_are_flushed_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file on disk is lost if the entry in its folder is not."""
    kinds = []
    flush_here = os.fsync

    def record_flush(handle: int) -> None:
        kinds.append("folder" if stat.S_ISDIR(os.fstat(handle).st_mode) else "file")
        flush_here(handle)

    monkeypatch.setattr(os, "fsync", record_flush)
    save_small_checkpoint(tmp_path / "checkpoints", 3)
    assert kinds == ["file"] * 3 + ["folder"] * 3


def test_a_tied_weight_is_loaded_by_any_of_its_names_but_not_by_two_that_differ() -> None:
    """Story: the last of two different values was loaded silently, and files with one of the names were refused."""
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    weight = model[1].weight = model[0].weight
    values = dict(zip(("0.weight", "1.weight"), torch.randn(2, 3, 3)))
    for name, value in values.items():
        checkpoint.load_weights(model, {name: value}, "file")
        assert torch.equal(weight, value)
    with pytest.raises(BadInput, match="file: 1.weight: differs from 0.weight, which is the same"):
        checkpoint.load_weights(model, values, "file")
    assert torch.equal(weight, values["1.weight"])
    checkpoint.load_weights(model, values, "file", strict=False)
    assert torch.equal(weight, values["0.weight"])


@pytest.mark.parametrize("file", ["optimizer.safetensors", "manifest.json"])
def test_a_missing_file_is_named(tmp_path: Path, file: str) -> None:
    path = save_small_checkpoint(tmp_path, 3)
    (path / file).unlink()
    (line,) = list_faults(checkpoint.load, path)
    assert line.startswith(f"{path / file}: corrupt checkpoint") and "missing" in line


def test_another_schema_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "SCHEMA", 99)
        path = save_small_checkpoint(tmp_path, 3)
    fault = list_faults(checkpoint.load, path)[0]
    assert fault.startswith(f"{path / 'manifest.json'}: schema: 99: ")
    assert f"init_from: {path / 'model.safetensors'}" in fault
    for weights in (path, path / "model.safetensors"):  # the remedy in the line works
        assert set(checkpoint.read_weights(weights)) == {"weight", "bias"}


def test_prune_keeps_the_newest_and_the_best(tmp_path: Path) -> None:
    for step in (2, 10, 9, 30, 40):
        save_small_checkpoint(tmp_path, step)
    checkpoint.prune(tmp_path, keep=2, best=[None, 9])
    assert {path.name for path in tmp_path.iterdir()} == {"step-9", "step-30", "step-40"}


@pytest.mark.skipif(
    read_torch_version() < checkpoint.SAFE_TORCH, reason="such a torch reads safetensors alone"
)
def test_plain_state_dicts_load_and_other_files_do_not(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    torch.save(model.state_dict(), tmp_path / "plain.pt")
    assert_same(checkpoint.read_tensors(tmp_path / "plain.pt"), model.state_dict())
    torch.save(model, tmp_path / "module.pt")  # a pickled module: its code must not run
    (tmp_path / "text.pt").write_text("hello")
    torch.save({"epoch": 3}, tmp_path / "other.pt")
    for name in ("module.pt", "text.pt", "other.pt", "absent.pt"):
        with pytest.raises(BadInput, match=name):
            checkpoint.read_tensors(tmp_path / name)


def test_weights_that_do_not_fit_are_named() -> None:
    tensors = {"weight": torch.ones(2, 4), "extra": torch.ones(1)}
    assert list_faults(checkpoint.load_weights, nn.Linear(3, 2), tensors, "file.pt") == [
        "file.pt: bias: missing, the model needs it",
        "file.pt: extra: the model has no such parameter or buffer",
        "file.pt: weight: shape (2, 4), the model has (2, 3)",
    ]
