"""Checkpoints in shards and in the background: the same state on any layout, whole or absent, and training goes on."""

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
from tests.test_processes import emulate, run
from tests.test_train import config, run_tool  # noqa: F401

SHARDED = "checkpoint.format=sharded"
KEYS = [
    "checkpoint.every=4", "checkpoint.keep=9", "log.every=1", "model.args.width=8", "evaluate.every=0", "evaluate.subset=64",
    "stages=2", "method=gpipe",
]  # fmt: skip


def hold(path: Path) -> checkpoint.Checkpoint:
    return checkpoint.load(path / "checkpoints" / "step-12")


def assert_equal(ours: checkpoint.Checkpoint, theirs: checkpoint.Checkpoint) -> None:
    for part, other in zip(ours[:2], theirs[:2]):
        assert part.keys() == other.keys() and all(
            torch.equal(part[name], other[name]) for name in part
        )


# ---- in shards


@needs_processes
def test_a_sharded_run_goes_on_on_any_layout(tmp_path: Path) -> None:
    """The model has weights that no stage uses. Two ranks in shards, then the emulator; or three ranks, from a single file."""
    how = [
        "model.entry=tests.staged_models:Odd",
        "model.args={}",
        "method=gpipe",
        "optimizer.name=adamw",
    ]
    how += ["optimizer.momentum=null"]
    emulate(tmp_path / "one", *how)
    two, three = ["stages=2", SHARDED], ["stages=3", SHARDED, "checkpoint.background=true"]
    code, _, error = run(2, tmp_path / "two", *how, *two, "steps=8")
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

    assert emulate(tmp_path / "on", *how, resume=True)["steps"] == 12
    assert_equal(hold(tmp_path / "on"), hold(tmp_path / "one"))
    shutil.rmtree(tmp_path / "on" / "checkpoints" / "step-12")
    (tmp_path / "on" / "summary.json").unlink()
    emulate(
        tmp_path / "on", *how, resume=True, resume_from=4
    )  # single files from here on, and sharded ones beside them
    code, _, error = run(3, tmp_path / "on", *how, *three, "--resume-from", "8")
    assert code == 0, error
    assert_equal(hold(tmp_path / "on"), hold(tmp_path / "one"))
    assert (
        len(
            list((tmp_path / "on" / "checkpoints" / "step-12").glob("model-*-of-00003.safetensors"))
        )
        == 3
    )


def _read_by_dcp(folder: Path) -> None:
    """DCP's own reader of safetensors finds every tensor."""
    from torch.distributed import checkpoint as dcp

    hf_storage = pytest.importorskip("torch.distributed.checkpoint.hf_storage")
    saved = checkpoint.load(folder)
    expected = {**saved.model, **saved.optimizer}
    state = {name: torch.zeros_like(value) for name, value in expected.items()}
    dcp.load(state, storage_reader=hf_storage.HuggingFaceStorageReader(str(folder)), no_dist=True)
    assert all(torch.equal(state[name], expected[name]) for name in expected)


@needs_processes
def test_only_processes_that_write_are_numbered(tmp_path: Path) -> None:
    """A first process without weights made 00002 and 00003 of 2."""
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
    ranks = [context.Process(target=_fail, args=(rank, str(tmp_path))) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(120)
    assert [process.exitcode for process in ranks] == [0, 9]
    assert checkpoint.list_steps(tmp_path / "checkpoints") == [1]


def _fail(rank: int, path: str) -> None:
    from ipu_pipe.store.shards import save_shard

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}/store", rank=rank, world_size=2)
    folder = Path(path) / "checkpoints"
    # a tied weight, which both hold, is written once; plain values of both come into the manifest
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

    real = checkpoint._flush

    def refuse(file: Path) -> None:
        if file.name == "optimizer-00002-of-00002.safetensors":
            raise OSError(28, "No space left on device", str(file))
        real(file)

    checkpoint._flush = refuse
    with pytest.raises(
        RunFault, match="step-2: cannot write the checkpoint.*optimizer-00002"
    ):  # on both
        save_shard(folder, 2, state, {}, None)
    dist.barrier()
    assert [file.name for file in folder.iterdir()] == ["step-1"]

    checkpoint._flush = (
        real if rank == 0 else lambda file: os._exit(9)
    )  # as by kill -9, in the midst of writing
    with pytest.raises(RunFault, match="lost"):
        save_shard(folder, 3, state, {}, None)
    assert not (folder / "step-3").exists()
    end_process(0)


def test_an_older_torch_cannot_write_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", "2.0.1+cpu")
    (fault,) = list_faults(lambda: train(config(*KEYS, SHARDED), tmp_path / "run", quiet=True))
    assert fault.startswith("checkpoint.format: sharded: needs")
    assert not (tmp_path / "run").exists()


# ---- in the background


class Beside(ipu_pipe.Callback):
    """Lets a checkpoint be written two updates after it was begun, and notes what happened when."""

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
        self.may_write.release()  # of the last one, before which training has ended

    def on_checkpoint(self, now: ipu_pipe.Moment) -> None:
        assert now.checkpoint is not None and (now.checkpoint / "manifest.json").is_file()
        self.seen.append(now.checkpoint.name)


def test_training_goes_on_while_a_checkpoint_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(config(*KEYS), tmp_path / "before", quiet=True)
    beside = Beside(monkeypatch)
    train(
        config(*KEYS, "checkpoint.background=true"),
        tmp_path / "beside",
        quiet=True,
        callbacks=[beside],
    )
    at = beside.seen.index
    assert at("6") < at("step-4") < at("9") and at("10") < at("step-8") and len(beside.seen) == 15
    assert beside.seen[-1] == "step-12"  # which the end has waited for
    for step in (4, 8, 12):  # a copy: training has changed the weights meanwhile
        same_step = [
            checkpoint.load(tmp_path / out / "checkpoints" / f"step-{step}")
            for out in ("before", "beside")
        ]
        assert_equal(*same_step)


def test_ctrl_c_waits_for_a_checkpoint_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        beside = Beside(patched, interrupts_at=5)
        train(
            config(*KEYS, "checkpoint.background=true"),
            tmp_path / "run",
            quiet=True,
            callbacks=[beside],
        )
    assert checkpoint.list_steps(tmp_path / "run" / "checkpoints") == [4]
    train(config(*KEYS, "checkpoint.background=true"), tmp_path / "run", quiet=True, resume=True)
    train(config(*KEYS), tmp_path / "one", quiet=True)
    assert_equal(hold(tmp_path / "run"), hold(tmp_path / "one"))


@pytest.mark.parametrize("fails_at", [0, 1, 2])
def test_what_fails_in_the_background_ends_the_run(
    fails_at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the first, second and last file of the second checkpoint; the first one stays whole."""
    real, calls = checkpoint._flush, []

    def refuse(file: Path) -> None:
        if ".step-8.part" in str(file):
            calls.append(file.name)
            if len(calls) > fails_at:
                raise OSError(28, "No space left on device", str(file))
        real(file)

    monkeypatch.setattr(checkpoint, "_flush", refuse)
    with pytest.raises(
        RunFault, match="step-8: cannot write the checkpoint.*part/(model|optimizer|manifest)"
    ):
        train(config(*KEYS, "checkpoint.background=true"), tmp_path / "run", quiet=True)
    assert {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()} == {"step-4"}


class Remembers(ipu_pipe.Callback):
    """Hands its own containers to checkpoints and goes on changing them."""

    def __init__(self) -> None:
        self.steps: List[int] = []
        self.by_name: Dict[str, Any] = {"inner": {"steps": self.steps}}

    def on_step(self, now: ipu_pipe.Moment) -> None:
        self.steps.append(now.step)
        self.by_name[f"step-{now.step}"] = [now.step]

    def state(self) -> Dict[str, Any]:
        return self.by_name


class RemembersSteps(torch.optim.SGD):
    """SGD whose state has containers of plain values, changed in place."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state.setdefault("hist", []).append(len(state.get("hist", ())))
                state.setdefault("inner", {"counts": [0]})["counts"][0] += 1


def _compare_manifests(tmp_path: Path, *others: str, **objects: Any) -> None:
    """Every checkpoint that was written late, in the background, has the manifest of one written at once."""
    manifests = []
    for out, background in (("at_once", "false"), ("late", "true")):
        made = {name: make() for name, make in objects.items()}
        train(
            config(*KEYS, *others, f"checkpoint.background={background}"),
            tmp_path / out,
            quiet=True,
            **made,
        )
        saved = [
            checkpoint.load(tmp_path / out / "checkpoints" / f"step-{step}").manifest
            for step in (4, 8, 12)
        ]
        for manifest in saved:
            # these two depend on the clock; the files' hashes are compared
            manifest["position"].pop("seconds")
            manifest["keys"].pop("checkpoint", None)
        manifests.append(saved)
    assert manifests[0] == manifests[1]


def test_a_slow_writer_saves_the_state_of_the_checkpoints_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A callback's own list, stored by reference, had the values of later updates when the manifest was written.

    Everything that a manifest holds is compared: callbacks, the optimizer's plain values, the position, the plateau.
    """
    real, done = checkpoint.save, threading.Condition()
    steps: List[int] = [0]

    class Counts(ipu_pipe.Callback):
        def on_step(self, now: ipu_pipe.Moment) -> None:
            with done:
                steps.append(now.step)
                done.notify_all()

    def save_late(folder: Path, step: int, *args: Any) -> Path:
        if threading.current_thread() is not threading.main_thread():
            with done:
                assert done.wait_for(lambda: steps[-1] >= min(step + 2, 12), 60), (
                    "training waits for a checkpoint"
                )
        return real(folder, step, *args)

    monkeypatch.setattr(checkpoint, "save", save_late)
    _compare_manifests(
        tmp_path,
        "lr_schedule={name: plateau, args: {patience: 1}}",
        "evaluate.steps=2",
        callbacks=lambda: [Counts(), Remembers()],
        optimizer=lambda: functools.partial(RemembersSteps, lr=0.1),
    )
    late = tmp_path / "late" / "checkpoints"
    manifest = checkpoint.load(late / "step-4").manifest
    assert manifest["callbacks"][1]["state"]["inner"] == {"steps": [1, 2, 3, 4]}
    assert all(
        value == [0, 1, 2, 3]
        for key, value in manifest["optimizer"].items()
        if key.endswith("/hist")
    )


@needs_processes
@pytest.mark.parametrize("format", ["single", "sharded"])
def test_what_a_saver_was_given_may_change_at_once(
    format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ipu_pipe.store import shards
    from ipu_pipe.store.saving import Saver

    may_write = threading.Event()
    written: List[Any] = []

    def save(folder: Path, step: int, model: Any, optimizer: Any, entries: Any) -> Path:
        assert may_write.wait(60)
        written.extend([model, optimizer, entries])
        return folder

    def save_shard(
        folder: Path, step: int, state: CheckpointState, entries: Any, group: Any
    ) -> Path:
        save(folder, step, state.model, state.optimizer, entries)
        written.append(state.plain)
        return folder

    monkeypatch.setattr(checkpoint, "save", save)
    monkeypatch.setattr(shards, "save_shard", save_shard)
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
    assert written[0]["w"].tolist() == written[1]["w/m"].tolist() == [1.0, 1.0]
    assert written[2] == {"callbacks": [{"name": "A", "state": {"seen": [1]}}]}
    assert format == "single" or written[3] == {"w/hist": [1]}


@pytest.mark.parametrize("background", [False, True])
def test_what_json_cannot_hold_ends_the_run_in_a_line(background: bool, tmp_path: Path) -> None:
    """Tensors in a list of an optimizer's state, and a callback's state 2,000 deep: RecursionError."""

    class Lists(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            super().step()
            self.state[self.param_groups[0]["params"][0]]["list"] = [torch.zeros(1)]

    class Deep(ipu_pipe.Callback):
        def state(self) -> Any:
            deep: Any = 1
            for _ in range(2000):
                deep = [deep]
            return deep

    keys = [*KEYS, f"checkpoint.background={str(background).lower()}"]
    with pytest.raises(RunFault, match="step-4: cannot write the checkpoint: .*Tensor.*"):
        train(config(*keys), tmp_path / "a", quiet=True, optimizer=functools.partial(Lists, lr=0.1))
    with pytest.raises(RunFault, match="Deep.state: cannot be put into a checkpoint as JSON"):
        train(config(*keys), tmp_path / "b", quiet=True, callbacks=[Deep()])
