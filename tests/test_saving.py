"""Check checkpoints in shards and in the background: the same state on any layout, whole or
absent, while training continues."""

from __future__ import annotations

import functools
import os
import shutil
import threading
from pathlib import Path
from typing import Any, Dict, List, Optional

import pytest
import torch
import torch.distributed as dist

import ipu_pipe
from ipu_pipe.backends.interface import CheckpointState
from ipu_pipe.errors import RunFault, end_process
from ipu_pipe.run.predict import predict
from ipu_pipe.run.train import train
from ipu_pipe.store import checkpoint
from tests import forked
from tests.support.runs import list_faults, needs_processes
from tests.test_processes import train_digits_on_emulator, train_digits_on_ranks
from tests.test_train import make_short_config, run_train_tool  # noqa: F401

SHARDED = "checkpoint.format=sharded"
KEYS = [
    "checkpoint.every=4", "checkpoint.keep=9", "log.every=1", "model.args.width=8", "evaluate.every=0", "evaluate.subset=64",
    "stages=2", "method=gpipe",
]  # fmt: skip


def load_last_checkpoint(path: Path) -> checkpoint.Checkpoint:
    return checkpoint.load(path / "checkpoints" / "step-12")


def assert_checkpoints_equal(ours: checkpoint.Checkpoint, theirs: checkpoint.Checkpoint) -> None:
    for part, other in zip(ours[:2], theirs[:2]):
        assert part.keys() == other.keys() and all(
            torch.equal(part[name], other[name]) for name in part
        )


# ---- in shards


@pytest.mark.slow
@needs_processes
def test_a_sharded_run_resumes_on_any_layout(tmp_path: Path) -> None:
    """Resume on other layouts, with weights that no stage uses: two ranks in shards, then the
    emulator, or three ranks from a single file."""
    settings = [
        "model.entry=tests.staged_models:OddModel",
        "model.args={}",
        "method=gpipe",
        "optimizer.name=adamw",
    ]
    settings += ["optimizer.momentum=null"]
    train_digits_on_emulator(tmp_path / "one", *settings)
    two, three = ["stages=2", SHARDED], ["stages=3", SHARDED, "checkpoint.background=true"]
    code, _, error = train_digits_on_ranks(2, tmp_path / "two", *settings, *two, "steps=8")
    assert code == 0, error
    names = {
        f"{kind}-0000{rank}-of-00002.safetensors"
        for kind in ("model", "optimizer")
        for rank in (1, 2)
    }
    last = tmp_path / "two" / "checkpoints" / "step-8"
    assert {file.name for file in last.iterdir()} == {*names, "manifest.json"}
    _read_by_dcp(last)
    assert predict(tmp_path / "two", torch.zeros(2, 64)).shape == (2, 10)
    shutil.copytree(tmp_path / "two", tmp_path / "on")

    assert train_digits_on_emulator(tmp_path / "on", *settings, resume=True)["steps"] == 12
    assert_checkpoints_equal(
        load_last_checkpoint(tmp_path / "on"), load_last_checkpoint(tmp_path / "one")
    )
    shutil.rmtree(tmp_path / "on" / "checkpoints" / "step-12")
    (tmp_path / "on" / "summary.json").unlink()
    # from here on single files, beside sharded ones
    train_digits_on_emulator(tmp_path / "on", *settings, resume=True, resume_from=4)
    code, _, error = train_digits_on_ranks(
        3, tmp_path / "on", *settings, *three, "--resume-from", "8"
    )
    assert code == 0, error
    assert_checkpoints_equal(
        load_last_checkpoint(tmp_path / "on"), load_last_checkpoint(tmp_path / "one")
    )
    assert (
        len(
            list((tmp_path / "on" / "checkpoints" / "step-12").glob("model-*-of-00003.safetensors"))
        )
        == 3
    )


def _read_by_dcp(folder: Path) -> None:
    """Check that DCP's own reader of safetensors finds every tensor."""
    from torch.distributed import checkpoint as dcp

    hf_storage = pytest.importorskip("torch.distributed.checkpoint.hf_storage")
    saved = checkpoint.load(folder)
    expected = {**saved.model, **saved.optimizer}
    state = {name: torch.zeros_like(value) for name, value in expected.items()}
    dcp.load(state, storage_reader=hf_storage.HuggingFaceStorageReader(str(folder)), no_dist=True)
    assert all(torch.equal(state[name], expected[name]) for name in expected)


@needs_processes
def test_only_processes_that_write_are_numbered(tmp_path: Path) -> None:
    """A first process without weights once made the file numbers 00002 and 00003 of 2."""
    from torch.distributed.checkpoint import SavePlan

    from ipu_pipe.store.shards import ShardWriter

    full: Any = object()
    plans = ShardWriter(tmp_path, 1, {}, {}).prepare_global_plan(
        [SavePlan([]), SavePlan([full]), SavePlan([full])]
    )
    assert [plan.storage_data for plan in plans[1:]] == ["00001-of-00002", "00002-of-00002"]


@needs_processes
def test_a_shard_that_fails_leaves_no_checkpoint(tmp_path: Path) -> None:
    context = forked.get_fork_server()
    ranks = [
        context.Process(target=_save_failing_shards, args=(rank, str(tmp_path)))
        for rank in range(2)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(120)
    assert [process.exitcode for process in ranks] == [0, 9]
    assert checkpoint.list_steps(tmp_path / "checkpoints") == [1]


def _save_failing_shards(rank: int, path: str) -> None:
    from ipu_pipe.store.shards import save_shard

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}/store", rank=rank, world_size=2)
    folder = Path(path) / "checkpoints"
    # a tied weight of both ranks is written once; the manifest has the plain values of both
    model = {f"{rank}.weight": torch.full((2,), float(rank)), "tied": torch.ones(3)}
    state = CheckpointState(
        model, {f"{rank}.weight/step": torch.tensor(4.0)}, {f"{rank}.weight/plain": rank}
    )
    assert save_shard(folder, 1, state, {"updates": 7}, None) == folder / "step-1"
    saved = checkpoint.load(folder / "step-1")
    assert {*saved.model} == {"0.weight", "1.weight", "tied"} and saved.manifest["updates"] == 7
    assert saved.manifest["optimizer"] == {"0.weight/plain": 0, "1.weight/plain": 1}
    assert float(saved.model["1.weight"][0]) == 1.0 and {*saved.optimizer} == {
        "0.weight/step",
        "1.weight/step",
    }

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
    assert [file.name for file in folder.iterdir()] == ["step-1"]

    # as if by kill -9 while writing
    checkpoint._flush = flush if rank == 0 else lambda file: os._exit(9)
    with pytest.raises(RunFault, match="lost"):
        save_shard(folder, 3, state, {}, None)
    assert not (folder / "step-3").exists()
    end_process(0)


def test_an_older_torch_cannot_write_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", "2.0.1+cpu")
    (fault,) = list_faults(
        lambda: train(make_short_config(*KEYS, SHARDED), tmp_path / "run", quiet=True)
    )
    assert fault.startswith("checkpoint.format: sharded: needs")
    assert not (tmp_path / "run").exists()


# ---- in the background


class DelayedWriter(ipu_pipe.Callback):
    """A callback that delays each checkpoint by two updates and records the order of events."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, interrupts_at: Optional[int] = None
    ) -> None:
        self.seen: List[str] = []
        self.may_write, self.interrupts_at, self.real = (
            threading.Semaphore(0),
            interrupts_at,
            checkpoint.save,
        )
        monkeypatch.setattr(checkpoint, "save", self.write)

    def write(self, folder: Path, step: int, *args: Any) -> Path:
        assert self.may_write.acquire(timeout=60), (
            "training did not go on while a checkpoint was to be written"
        )
        return self.real(folder, step, *args)

    def on_step(self, now: ipu_pipe.Moment) -> None:
        self.seen.append(str(now.step))
        if now.step in (6, 10):
            self.may_write.release()
        if now.step == self.interrupts_at:
            self.may_write.release()
            raise KeyboardInterrupt

    def on_evaluation(self, now: ipu_pipe.Moment) -> None:
        self.may_write.release()  # for the last checkpoint, after the end of training

    def on_checkpoint(self, now: ipu_pipe.Moment) -> None:
        assert now.checkpoint is not None and (now.checkpoint / "manifest.json").is_file()
        self.seen.append(now.checkpoint.name)


def test_training_continues_while_a_checkpoint_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(make_short_config(*KEYS), tmp_path / "before", quiet=True)
    delayed_writer = DelayedWriter(monkeypatch)
    train(
        make_short_config(*KEYS, "checkpoint.background=true"),
        tmp_path / "beside",
        quiet=True,
        callbacks=[delayed_writer],
    )
    find_event = delayed_writer.seen.index
    assert (
        find_event("6") < find_event("step-4") < find_event("9")
        and find_event("10") < find_event("step-8")
        and len(delayed_writer.seen) == 15
    )
    assert delayed_writer.seen[-1] == "step-12"  # the end waits for it
    for step in (4, 8, 12):  # a checkpoint is a copy: training has changed the weights since
        same_step = [
            checkpoint.load(tmp_path / out / "checkpoints" / f"step-{step}")
            for out in ("before", "beside")
        ]
        assert_checkpoints_equal(*same_step)


def test_ctrl_c_waits_for_a_checkpoint_and_the_run_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        delayed_writer = DelayedWriter(patched, interrupts_at=5)
        train(
            make_short_config(*KEYS, "checkpoint.background=true"),
            tmp_path / "run",
            quiet=True,
            callbacks=[delayed_writer],
        )
    assert checkpoint.list_steps(tmp_path / "run" / "checkpoints") == [4]
    train(
        make_short_config(*KEYS, "checkpoint.background=true"),
        tmp_path / "run",
        quiet=True,
        resume=True,
    )
    train(make_short_config(*KEYS), tmp_path / "one", quiet=True)
    assert_checkpoints_equal(
        load_last_checkpoint(tmp_path / "run"), load_last_checkpoint(tmp_path / "one")
    )


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
    with pytest.raises(
        RunFault, match="step-8: cannot write the checkpoint.*part/(model|optimizer|manifest)"
    ):
        train(make_short_config(*KEYS, "checkpoint.background=true"), tmp_path / "run", quiet=True)
    assert {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()} == {"step-4"}


class HistoryCallback(ipu_pipe.Callback):
    """A callback that keeps changing the containers that it returned as its state."""

    def __init__(self) -> None:
        self.steps: List[int] = []
        self.by_name: Dict[str, Any] = {"inner": {"steps": self.steps}}

    def on_step(self, now: ipu_pipe.Moment) -> None:
        self.steps.append(now.step)
        self.by_name[f"step-{now.step}"] = [now.step]

    def state(self) -> Dict[str, Any]:
        return self.by_name


class HistorySGD(torch.optim.SGD):
    """SGD with state in containers of plain values that are changed in place."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state.setdefault("hist", []).append(len(state.get("hist", ())))
                state.setdefault("inner", {"counts": [0]})["counts"][0] += 1


def _assert_manifests_equal(tmp_path: Path, *others: str, **objects: Any) -> None:
    """Assert that checkpoints written late, in the background, have the manifests of those
    written at once."""
    manifests = []
    for out, background in (("at_once", "false"), ("late", "true")):
        arguments = {name: make() for name, make in objects.items()}
        train(
            make_short_config(*KEYS, *others, f"checkpoint.background={background}"),
            tmp_path / out,
            quiet=True,
            **arguments,
        )
        run_manifests = [
            checkpoint.load(tmp_path / out / "checkpoints" / f"step-{step}").manifest
            for step in (4, 8, 12)
        ]
        for manifest in run_manifests:
            # these two depend on the clock; the files' hashes are compared
            manifest["position"].pop("seconds")
            manifest["keys"].pop("checkpoint", None)
        manifests.append(run_manifests)
    assert manifests[0] == manifests[1]


def test_a_slow_writer_saves_the_state_of_the_checkpoints_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A callback's own list, stored by reference, once had the values of later updates when the
    manifest was written.

    The whole manifest is compared: callbacks, the optimizer's plain values, the position, the
    plateau.
    """
    save, step_done = checkpoint.save, threading.Condition()
    steps: List[int] = [0]

    class StepCounter(ipu_pipe.Callback):
        def on_step(self, now: ipu_pipe.Moment) -> None:
            with step_done:
                steps.append(now.step)
                step_done.notify_all()

    def save_late(folder: Path, step: int, *args: Any) -> Path:
        if threading.current_thread() is not threading.main_thread():
            with step_done:
                assert step_done.wait_for(lambda: steps[-1] >= min(step + 2, 12), 60), (
                    "training waits for a checkpoint"
                )
        return save(folder, step, *args)

    monkeypatch.setattr(checkpoint, "save", save_late)
    _assert_manifests_equal(
        tmp_path,
        "lr_schedule={name: plateau, args: {patience: 1}}",
        "evaluate.steps=2",
        callbacks=lambda: [StepCounter(), HistoryCallback()],
        optimizer=lambda: functools.partial(HistorySGD, lr=0.1),
    )
    checkpoints = tmp_path / "late" / "checkpoints"
    manifest = checkpoint.load(checkpoints / "step-4").manifest
    assert manifest["callbacks"][1]["state"]["inner"] == {"steps": [1, 2, 3, 4]}
    assert all(
        value == [0, 1, 2, 3]
        for key, value in manifest["optimizer"].items()
        if key.endswith("/hist")
    )


@needs_processes
@pytest.mark.parametrize("format", ["single", "sharded"])
def test_the_arguments_of_a_saver_may_change_at_once(
    format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ipu_pipe.store import shards
    from ipu_pipe.store.saving import Saver

    may_write = threading.Event()
    saved_values: List[Any] = []

    def record_save(folder: Path, step: int, model: Any, optimizer: Any, entries: Any) -> Path:
        assert may_write.wait(60)
        saved_values.extend([model, optimizer, entries])
        return folder

    def record_shard(
        folder: Path, step: int, state: CheckpointState, entries: Any, group: Any
    ) -> Path:
        record_save(folder, step, state.model, state.optimizer, entries)
        saved_values.append(state.plain)
        return folder

    monkeypatch.setattr(checkpoint, "save", record_save)
    monkeypatch.setattr(shards, "save_shard", record_shard)
    state = CheckpointState({"w": torch.ones(2)}, {"w/m": torch.ones(2)}, {"w/hist": [1]})
    entries = {"callbacks": [{"name": "A", "state": {"seen": [1]}}]}
    saver = Saver(tmp_path, group=None if format == "single" else object())
    saver.start(4, state, entries, (), background=True)
    state.model["w"].zero_()
    state.optimizer["w/m"].zero_()
    state.plain["w/hist"].append(2)
    entries["callbacks"][0]["state"]["seen"].append(2)  # type: ignore[index]
    may_write.set()
    saver.wait()
    assert saved_values[0]["w"].tolist() == saved_values[1]["w/m"].tolist() == [1.0, 1.0]
    assert saved_values[2] == {"callbacks": [{"name": "A", "state": {"seen": [1]}}]}
    assert format == "single" or saved_values[3] == {"w/hist": [1]}


@pytest.mark.parametrize("background", [False, True])
def test_state_that_json_cannot_store_ends_the_run_with_one_line(
    background: bool, tmp_path: Path
) -> None:
    """Tensors in a list of an optimizer's state, or a callback's state nested 2,000 deep, once
    raised a RecursionError."""

    class TensorListSGD(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            super().step()
            self.state[self.param_groups[0]["params"][0]]["list"] = [torch.zeros(1)]

    class DeepCallback(ipu_pipe.Callback):
        def state(self) -> Any:
            deep: Any = 1
            for _ in range(2000):
                deep = [deep]
            return deep

    keys = [*KEYS, f"checkpoint.background={str(background).lower()}"]
    with pytest.raises(RunFault, match="step-4: cannot write the checkpoint: .*Tensor.*"):
        train(
            make_short_config(*keys),
            tmp_path / "a",
            quiet=True,
            optimizer=functools.partial(TensorListSGD, lr=0.1),
        )
    with pytest.raises(
        RunFault, match="DeepCallback.state: cannot be put into a checkpoint as JSON"
    ):
        train(make_short_config(*keys), tmp_path / "b", quiet=True, callbacks=[DeepCallback()])
