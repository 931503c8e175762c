"""Test faults outside the library: user code, other processes, environment, disks, streams."""

from __future__ import annotations

import functools
import multiprocessing
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Dict, List, Sequence, Tuple
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ipu_pipe import launcher
from ipu_pipe.backends.processes import collect, launch, lost_ranks
from ipu_pipe.backends.processes.collect import wait_for_first_replica
from ipu_pipe.backends.processes.launch import compare_requests, make_request
from ipu_pipe.backends.processes.layout import RankLayout
from ipu_pipe.backends.processes.lost_ranks import LostRank
from ipu_pipe.cli import train as tool
from ipu_pipe.comparison.method_comparison import write_comparison
from ipu_pipe.config.load import configure, load_config
from ipu_pipe.data import DataSource
from ipu_pipe.errors import BadInput, RunFault, UserFault, find_user_fault
from ipu_pipe.launcher import Launch, read_launch
from ipu_pipe.model.stages import begin_stage
from ipu_pipe.run.train import train
from ipu_pipe.schedule.methods import METHODS
from ipu_pipe.store.folder import RunFolder, read_summary
from tests import forked
from tests.command_line import run_here
from tests.support.runs import DIGITS, ROOT, list_faults, needs_processes
from tests.support.slow import mark_slow
from tools.experiments.experiment import (
    Findings,
    Outcome,
    call_with_picklable_faults,
)

# ---- the user's code


class Burnt(Exception):
    """The user's own kind of exception, which cannot leave its process."""

    def __init__(self, number: int, why: str) -> None:
        super().__init__(f"{why} {number}\nand more")


class FailingData(DataSource):
    """A data source of six microbatches an epoch, which knows what fails in a run."""

    def __init__(self, where: str) -> None:
        self.where, self.index = where, -1

    def fail(self, where: str) -> None:
        """Raise if this is what fails."""
        if where == self.where:
            raise Burnt(4, where) from KeyError("deeper")

    def train_batches_per_epoch(self, batch_size: int) -> int:
        return 6

    def train_batch(self, epoch: int, index: int, batch_size: int) -> Any:
        self.index = index
        if index in (0, 3):
            self.fail("data" if index else "planning")
        generator = torch.Generator().manual_seed(index)
        return torch.randn(batch_size, 4, generator=generator), torch.arange(batch_size) % 3

    def test_batches(self, batch_size: int) -> Any:
        self.index = -1
        self.fail("test data")
        yield torch.ones(2, 4), torch.zeros(2, dtype=torch.long)


class Fuse(nn.Module):
    """Pass an activation on, and fail in the forward or the backward of microbatch 4."""

    def __init__(self, data: FailingData) -> None:
        super().__init__()
        self.data = data

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.data.index == 4:
            self.data.fail("forward")
            x = x.clone()
            x.register_hook(lambda gradient: self.data.fail("backward"))
        return x


def make_fused_model(data: FailingData) -> nn.Module:
    """Return a model of three stages with a `Fuse` in the second."""
    return nn.Sequential(
        nn.Linear(4, 4),
        begin_stage(nn.Linear(4, 4)),
        Fuse(data),
        begin_stage(nn.Linear(4, 3)),
    )


def compute_failing_loss(data: FailingData, output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    if data.index == 4:
        data.fail("loss")
    return F.cross_entropy(output, y)


class FailingSGD(torch.optim.SGD):
    def __init__(self, data: FailingData, groups: Any) -> None:
        super().__init__(groups, lr=0.01)
        self.data, self.calls = data, 0

    def step(self, closure: Any = None) -> Any:
        self.calls += 1
        if self.calls == 2:
            self.data.fail("optimizer")
        return super().step(closure)


# what fails, or the method with which the forward fails -> the place in the fault's line
FORWARD = "update 2, microbatch 4, stage 1, forward"
CASES = {
    "forward": FORWARD,
    "backward": "update 2, microbatch 4, backward",
    "loss": "update 2, microbatch 4, stage 2, forward",
    "data": "update 1, microbatch 3, data",
    "test data": "evaluation before update 0",
    "optimizer": "update 1",
    "planning": "before training",
    "pipemare": FORWARD,
    "local_chunked": FORWARD,
}


@pytest.mark.parametrize("name", CASES)
def test_an_exception_of_user_code_keeps_its_type_and_gets_a_line_with_its_place(
    name: str, tmp_path: Path
) -> None:
    method, where = (name, "forward") if name in METHODS else ("gpipe", name)
    out = tmp_path / "run"
    data = FailingData(where)
    model = make_fused_model(data)
    sizes = {"micro_batch_size": 2, "gradient_accumulation": 2, "steps": 3}
    config = configure(method=method, **sizes, log={"tensorboard": False})
    loss = functools.partial(compute_failing_loss, data)
    optimizer = functools.partial(FailingSGD, data)
    with pytest.raises(Burnt) as error:
        train(config, out, data=data, model=model, loss=loss, optimizer=optimizer, quiet=True)
    fault = find_user_fault(error.value)
    assert fault is not None and "\n" not in str(fault)
    lines = Path(__file__).read_text().splitlines()
    (number,) = [n for n, line in enumerate(lines, 1) if line.strip().startswith("raise Burnt(4")]
    assert str(fault).startswith(f"{CASES[name]}: Burnt: {where} 4 ({__file__}:{number}, in ")
    assert fault.traceback.endswith("and more\n")
    # the user's own chain of exceptions stays
    assert isinstance(error.value.__cause__, KeyError) and "deeper" in fault.traceback
    if name != "planning":  # planning comes before the folder is created
        assert "ipu_pipe/backends/" in fault.traceback
        assert fault.traceback_file == str(out / "traceback.txt")
        assert fault.traceback in (out / "traceback.txt").read_text()
        RunFolder(out, resume=True)
        assert (out / "config.yaml").is_file() and not (out / "traceback.txt").exists()
    modules = model.modules()
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in modules)


class Counting(nn.Module):
    """Fail in the twenty-first forward of a training."""

    count = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += self.training and torch.is_grad_enabled()
        if self.count > 20:
            raise Burnt(20, "counted")
        return x


def make_failing_model() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10), Counting())


FAILING = ["model.entry=tests.test_faults:make_failing_model", "model.args={}", "log.tensorboard=false"]  # fmt: skip


@pytest.mark.parametrize("flags", [[], ["--traceback"]])
def test_a_command_prints_one_line_or_with_a_flag_the_traceback(
    flags: List[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    args = [DIGITS, "--out", str(tmp_path), "--set", *FAILING, "stages=1", *flags]
    code, _, errors = run_here(tool, *args, monkeypatch=monkeypatch, capsys=capsys)
    *others, last = errors.splitlines()
    assert code == 1 and bool(others) == ("Traceback (most recent call last)" in errors)
    assert bool(others) == bool(flags)
    assert last.startswith("error: update ") and "stage 0, forward: Burnt: counted 20" in last
    end = f"the traceback is in {tmp_path / 'traceback.txt'}"
    assert f"{__file__}:" in last and last.endswith(end)


def test_a_fault_can_be_pickled_out_of_its_process() -> None:
    """A worker's exception may be of a type that cannot be rebuilt elsewhere; its line can."""

    def raise_error() -> Any:
        raise Burnt(1, "x") from UserFault("update 1: it failed", "all of it")

    with pytest.raises(UserFault) as fault_info:
        call_with_picklable_faults(raise_error, ())
    fault_info.value.traceback_file = "a/file"
    copied = pickle.loads(pickle.dumps(fault_info.value))
    figures = str(copied), copied.traceback, copied.traceback_file
    assert figures == ("update 1: it failed", "all of it", "a/file")


# ---- variables of launchers


@pytest.mark.parametrize("variables, message", [
    ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK: 2: must be a whole number from 0 to 1"),
    ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK: -1: must be"),
    ({"RANK": "0", "WORLD_SIZE": "9" * 5000}, "WORLD_SIZE: 9999"),
    ({"RANK": "0", "WORLD_SIZE": "0"}, "WORLD_SIZE: 0: must be a whole number of processes"),
    ({"RANK": "1"}, "RANK: 1: set without WORLD_SIZE"),
    ({"WORLD_SIZE": "4"}, "WORLD_SIZE: 4: set without RANK"),
    ({"LOCAL_RANK": "x"}, "LOCAL_RANK: x: must be"),
    ({"MASTER_PORT": "99999"}, "MASTER_PORT: 99999: must be a port from 1 to 65535"),
])  # fmt: skip
def test_variables_of_a_launcher_are_validated(
    variables: Dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (fault,) = read_launch(variables).faults
    assert fault.startswith(message) and len(fault) < 200
    for key, value in variables.items():
        monkeypatch.setenv(key, value)
    assert list_faults(train, load_config(DIGITS), "nowhere") == [fault]  # on the emulator, too


def test_an_empty_variable_is_not_set() -> None:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")
    assert read_launch(dict.fromkeys(names, " ")) == Launch()


@needs_processes
def test_a_launcher_without_a_meeting_place_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value in (("RANK", "0"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(key, value)
    with pytest.raises(BadInput, match="MASTER_ADDR: missing.*MASTER_PORT: missing"):
        train(load_config(DIGITS, ["backend.name=distributed"]), "nowhere")


# ---- joining


def find_free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return int(free.getsockname()[1])


def join_and_report(
    rank: int, ranks: Sequence[int], port: int, faults: Any, how: Dict[str, Any]
) -> None:
    """Join a group as one rank of a launcher without a store of its own, and report the fault."""
    if rank not in ranks:
        os._exit(0)
    lost_ranks.WARM_UP = 0.0
    launch.ANSWER = how.get("answer", 30.0)  # both in this fork alone
    variables = {"MASTER_ADDR": how.get("address", "127.0.0.1"), "TORCHELASTIC_USE_AGENT_STORE": "False"}  # fmt: skip
    os.environ.update(forked.make_rank_environment(rank, 2, port), **variables)
    deadline, seed = how.get("deadline", 1.0), how.get("seeds", (0, 0))[rank]
    sets = ["backend.name=distributed", f"backend.deadline={deadline}", f"seed={seed}"]
    try:
        launch.join(load_config(DIGITS, sets), {})
    except (BadInput, RunFault) as error:
        faults.put((type(error).__name__, str(error)))
    os._exit(0)


def join_ranks(ranks: Sequence[int], port: int = 0, **how: Any) -> List[Tuple[str, str]]:
    """Let ranks join a group of two, each in a fork. Return the kind and the line of each rank's
    fault."""
    faults = multiprocessing.get_context("fork").SimpleQueue()
    forked.fork_ranks(2, join_and_report, ranks, port or find_free_port(), faults, how)
    reports = []
    while not faults.empty():
        reports.append(faults.get())
    return reports


@needs_processes
@pytest.mark.parametrize("rank", [0, 1])
def test_a_missing_rank_is_reported_within_the_limit(rank: int) -> None:
    ((kind, line),) = join_ranks([rank])
    assert kind == "RunFault" and "the 2 ranks did not meet at 127.0.0.1:" in line
    assert "MASTER_PORT" in line
    # torch counts the ranks that came; without rank 0 nobody does
    assert ("1/2 clients joined" if rank == 0 else "timed out") in line


@needs_processes
def test_ranks_with_different_requests_are_refused_with_both_values() -> None:
    faults = join_ranks([0, 1], seeds=(1, 2), deadline=60.0)
    fault = "seed: rank 0 has 1, rank 1 has 2: must be the same on all ranks"
    assert faults == [("BadInput", fault)] * 2
    # where a rank's data are may differ
    first, second = (
        make_request(load_config(DIGITS, [f"data.root=/node{i}"]), {"--out": Path(f"{i}")})
        for i in range(2)
    )
    (line,) = compare_requests(first, second, 0, 1)
    assert line.startswith('--out: rank 0 has "0", rank 1 has "1": ')
    assert compare_requests(second, first, 1, 0) == [line]


def join_again(rank: int, port: int) -> None:
    """Join, leave, and join again at the same store, rank 1 later than rank 0."""
    os.environ.update(forked.make_rank_environment(rank, 2, port))
    config = load_config(DIGITS, ["backend.name=distributed", "backend.deadline=60"])
    launch.join(config, {})
    launch.leave()
    time.sleep(1.0 * rank)
    launch.join(config, {})
    os._exit(0)


@needs_processes
def test_ranks_leave_and_join_again_at_the_store_of_a_launcher() -> None:
    """Story: a rank that joined again found the other's address in the group before, where nobody
    listened any more, and a second training in one process failed now and then."""
    store = torch.distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    forked.fork_ranks(2, join_again, store.port)


@needs_processes
def test_a_rank_0_that_is_unknown_or_does_not_answer_is_reported() -> None:
    """A stopped rank 0 listens but does not answer, and torch would wait without end."""
    with socket.socket() as used:
        used.bind(("localhost", 0))
        used.listen(8)
        port = used.getsockname()[1]
        rows = [
            (join_ranks([0], port), [str(port), "in use"]),
            (join_ranks([1], port, answer=0.5), ["no answer", f"127.0.0.1:{port}"]),
            (join_ranks([1], address="no.such.host.invalid"), ["no.such.host.invalid"]),
        ]
    for ((kind, line),), words in rows:
        assert kind == "RunFault" and all(word in line for word in words)


def join_with_a_stopped_rank(rank: int, port: int, victim: int, at: str, faults: Any) -> None:
    """Join a group of two; rank `victim` is stopped while connecting or before `make_group`."""
    os.environ.update(
        forked.make_rank_environment(rank, 2, port), TORCHELASTIC_USE_AGENT_STORE="False"
    )  # rank 0 keeps the store
    connect = torch.distributed.init_process_group

    def connect_or_stop(*args: Any, **keywords: Any) -> None:
        if rank == victim and at == "connecting":
            os.kill(os.getpid(), signal.SIGSTOP)
        connect(*args, **keywords)

    torch.distributed.init_process_group = connect_or_stop  # in this fork alone
    try:
        launch.join(load_config(DIGITS, ["backend.name=distributed", "backend.deadline=0.5"]), {})
        if rank == victim:
            os.kill(os.getpid(), signal.SIGSTOP)
        launch.make_group([0, 1], 0.5)
    except RunFault as error:
        faults.put(str(error))
    os._exit(0)


@pytest.mark.slow
@needs_processes
@pytest.mark.parametrize("at", ["connecting", "grouping"])
@pytest.mark.parametrize("victim", mark_slow([0, 1], lambda victim: victim == 0))
def test_a_rank_that_is_stopped_while_joining_ends_the_others(
    at: str, victim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other ranks end within the limit.

    Story: torch asks the store of a stopped rank 0 without a limit, and gave other groups half an
    hour: the others hung.
    """
    monkeypatch.setattr(launch, "ANSWER", 0.5)
    monkeypatch.setattr(lost_ranks, "WARM_UP", 1.5)
    fork = multiprocessing.get_context("fork")
    faults, port = fork.SimpleQueue(), find_free_port()
    ranks = [
        fork.Process(target=join_with_a_stopped_rank, args=(r, port, victim, at, faults))
        for r in range(2)
    ]
    try:
        for rank in ranks:
            rank.start()
        ranks[1 - victim].join(90)
        assert ranks[1 - victim].exitcode == 0
        assert f"rank {1 - victim}:" in faults.get() and faults.empty()
    finally:
        for rank in ranks:
            rank.kill()


@needs_processes
def test_replicas_wait_for_an_evaluation_as_long_as_it_progresses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = torch.distributed.HashStore()
    monkeypatch.setattr(torch.distributed.distributed_c10d, "_get_default_store", lambda: store)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group=None: 1)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group=None: 2)
    mail = SimpleNamespace(limit=timedelta(seconds=60))
    now = 0.0
    evaluated: List[int] = []

    def wait(replica: int) -> None:
        wait_for_first_replica(RankLayout(replica, (0,), 2), mail, "done")

    def evaluate_a_batch(seconds: float) -> None:
        """Let 50 s pass, in which the first replica evaluates one of its batches, or ends."""
        nonlocal now
        now += 50
        if evaluated:
            store.add("ipu_pipe/evaluated", evaluated.pop())
        elif now > 300:
            wait(0)

    # a clock of its own, because a busy machine would let a short limit pass
    monkeypatch.setattr(
        collect, "time", SimpleNamespace(monotonic=lambda: now, sleep=evaluate_a_batch)
    )
    with pytest.raises(LostRank):
        wait(1)
    # 400 s in all, which is longer than the limit
    now, evaluated = 0.0, [1] * 8
    wait(1)
    assert now >= 400 and not evaluated


def test_waits_of_an_earlier_object_lead_to_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Story: a pipeline after a failed one followed the waits of that failure, to a rank that was
    well; and a rank could name itself as lost."""
    store = torch.distributed.HashStore()
    monkeypatch.setattr(lost_ranks, "NOTICE", 0.0)
    monkeypatch.setattr(torch.distributed.distributed_c10d, "_get_default_store", lambda: store)

    def find_lost(rank: int, waits_for: Sequence[int]) -> List[int]:
        monkeypatch.setattr(torch.distributed, "get_rank", lambda group=None: rank)
        with pytest.raises(LostRank) as error, lost_ranks.detect_lost_rank(waits_for):
            raise RuntimeError
        return error.value.ranks

    assert find_lost(1, [2]) == [2] and find_lost(0, [0, 1]) == [2]
    lost_ranks.CallRecord(is_shared=True).close()
    assert find_lost(0, [0, 1]) == [1]
    assert find_lost(1, [0]) == [0]


def test_sigterm_ends_a_process_that_waits_outside_python() -> None:
    script = """
import ctypes
from ipu_pipe.backends.processes.lost_ranks import Termination
Termination.PATIENCE = 0.5
Termination.watch()
mutex, libc = ctypes.create_string_buffer(128), ctypes.CDLL(None)  # all zeros: PTHREAD_MUTEX_INITIALIZER
libc.pthread_mutex_lock(mutex)
print("waits", flush=True)
libc.pthread_mutex_lock(mutex)  # for ever, and no signal interrupts it
"""
    process = subprocess.Popen(
        [sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "waits\n"
    process.send_signal(signal.SIGTERM)
    try:
        assert process.wait(60) == 143
    finally:
        process.kill()


@needs_processes
def test_a_user_fault_on_one_rank_is_reported_by_that_rank_alone(tmp_path: Path) -> None:
    backend = ["backend.name=distributed", "backend.deadline=60", "backend.threads=1"]
    sets = [*FAILING, 'stages=["1"]', *backend, "method=pipedream"]
    result = forked.run_ranks(2, "train", [DIGITS, "--out", str(tmp_path), "--set", *sets], 120)
    assert result.code == 1, result  # the exit code of rank 0
    (line,) = result.error.splitlines()
    assert line.startswith("error: rank 1, stage 1, update ")
    assert f"Burnt: counted 20 ({__file__}:" in line
    assert "Burnt: counted 20\nand more" in (tmp_path / "traceback.txt").read_text()


# ---- workers


def watch_launchers(rank: int) -> None:
    """Assert whom the process that imported the library watches after its launcher has exited, and
    whom a fork of it watches."""
    parents: List[int] = []
    record = mock.patch.object(launcher, "end_with", lambda parent, line: parents.append(parent))
    with record, mock.patch.object(os, "getppid", lambda: 1):
        for process in (launcher._STARTED[0], 2):
            with mock.patch.object(os, "getpid", lambda process=process: process):
                launcher.end_with_launcher()
    assert parents == [launcher._STARTED[1], 1]


def test_a_launcher_that_exits_while_torch_is_imported_is_not_forgotten() -> None:
    """Story: the watchdog then watched the process that orphans get as their parent, for ever."""
    assert launcher._STARTED == (os.getpid(), os.getppid())
    # in a fork, because a watchdog of this process would see another parent, too, and end it
    forked.fork_ranks(1, watch_launchers)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at processes in /proc")
def test_workers_end_with_the_process_that_started_them() -> None:
    script = """
import multiprocessing, os, threading, time
from pathlib import Path
from tools.experiments.experiment import Request, run_all
if __name__ == "__main__":
    def report():
        while not multiprocessing.active_children():
            time.sleep(0.02)
        print(*[child.pid for child in multiprocessing.active_children()], flush=True)
    threading.Thread(target=report, daemon=True).start()
    run_all(time.sleep, {"a": (60,)}, Request(Path(".")), str)
"""
    parent = subprocess.Popen(
        [sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    workers = [int(pid) for pid in parent.stdout.readline().split()]
    assert workers
    parent.kill()
    parent.wait(60)
    end = time.monotonic() + 60
    while any(_is_alive(pid) for pid in workers) and time.monotonic() < end:
        time.sleep(0.05)
    left = [pid for pid in workers if _is_alive(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


# ---- disks and streams


@pytest.mark.parametrize("redirected, code, begin", [
    (">&-", 1, "error: standard output: is closed"),
    ("2>&- <&- >/dev/null", 0, ""),
    (">/dev/full", 1, "error: standard output: cannot be written: No space left on device"),
])  # fmt: skip
def test_closed_and_full_outputs_are_reported_in_a_line(
    redirected: str, code: int, begin: str
) -> None:
    words = f"{sys.executable} tools/schedule.py pipedream --stages 2 --microbatches 4 {redirected}"
    result = subprocess.run(["sh", "-c", words], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    assert result.returncode == code and result.stderr.startswith(begin)
    assert len(result.stderr.splitlines()) == bool(begin)


def test_a_pipe_in_a_runs_folder_does_not_hang_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "metrics.jsonl")
    os.mkfifo(tmp_path / "summary.json")
    folder = RunFolder(tmp_path, resume=True)
    assert read_summary(tmp_path) is None
    with pytest.raises(RunFault, match="metrics.jsonl: is not a file"):
        folder.open_metrics(3)


def test_results_that_cannot_be_written_are_reported_with_their_file(tmp_path: Path) -> None:
    (tmp_path / "throughput.json").mkdir()
    with pytest.raises(RunFault, match="throughput.json: cannot be written: Is a directory"):
        write_comparison({"throughput": {}}, tmp_path)
    (tmp_path / "results.json").mkdir()
    with pytest.raises(RunFault, match="results.json: cannot be written: Is a directory"):
        Outcome({}, "", tmp_path, Findings({}, [], "", [], [])).write(tmp_path)
