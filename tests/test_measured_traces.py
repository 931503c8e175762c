"""Test traces of processes: waits, work, bytes and memory, also after a kill and a resume."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from pathlib import Path
from typing import Any, Dict, List

import numpy as np
import pytest
import torch

from ipu_pipe.backends.interface import Report
from ipu_pipe.backends.processes.trace import (
    StreamClock,
    TraceRecorder,
    make_stream_clock,
)
from ipu_pipe.config.load import configure
from ipu_pipe.errors import end_process
from ipu_pipe.run import loop
from ipu_pipe.run.train import train
from ipu_pipe.trace.events import (
    KINDS,
    MEMORY,
    PAYLOADS,
    Event,
    Events,
    Trace,
    find_updates,
)
from ipu_pipe.trace.store import read_store
from tests import forked, sleeping_model
from tests.sleeping_model import BATCH, CLASSES, WIDTH
from tests.support.processes import wait_for_file
from tests.support.runs import needs_processes, read_json

UPDATES = 30


def train_sleeping_model(folder: Path, resume: bool = False, **keys: Any) -> None:
    """Train the sleeping model on two stages, by default by PipeDream."""
    config = configure(
        stages=["two"], micro_batch_size=BATCH, evaluate={"every": 0}, optimizer={"lr": 0.01, "momentum": 0.9},
        **{"method": "pipedream", **keys},
    )  # fmt: skip
    model, data = sleeping_model.make_sleeping_model(), sleeping_model.make_sleeping_data()
    train(config, folder, model=model, data=data, resume=resume, quiet=True)


def start_ranks(folder: Path, **keys: Any) -> List[Any]:
    """Start two processes that train the sleeping model."""
    with socket.socket() as free_socket:
        free_socket.bind(("localhost", 0))
        port = free_socket.getsockname()[1]
    context = forked.get_fork_server()
    ranks = [
        context.Process(target=train_sleeping_rank, args=(rank, str(folder), port, keys))
        for rank in range(2)
    ]
    for rank in ranks:
        rank.start()
    return ranks


def finish_ranks(ranks: List[Any]) -> None:
    """Wait for processes, which must end well."""
    for rank in ranks:
        rank.join(200)
    assert [rank.exitcode for rank in ranks] == [0, 0]


def train_sleeping_rank(rank: int, folder: str, port: int, keys: Dict[str, Any]) -> None:
    os.environ.update(
        RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT=str(port)
    )
    torch.set_num_threads(1)
    write_end = loop.TrainingLoop._write_end

    def write_report(*arguments: Any) -> Any:
        report = next(argument for argument in arguments if isinstance(argument, Report))._asdict()
        measured = {key: report[key] for key in ("times", "peak_memory")}
        (Path(folder) / "measured.json").write_text(json.dumps(measured))
        return write_end(*arguments)

    loop.TrainingLoop._write_end = write_report  # type: ignore[method-assign]
    backend = {"name": "distributed", "threads": 1}
    train_sleeping_model(Path(folder) / "run", backend=backend, **keys)
    (Path(folder) / f"slept-{rank}.json").write_text(json.dumps(sleeping_model.passes))
    end_process(0)


def read_rank_trace(folder: Path, rank: int) -> Trace:
    return read_store(folder / "run" / "trace" / f"rank-{rank}.trace")


@pytest.fixture(scope="module")
def sleeping_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run of the sleeping model on two processes."""
    folder = tmp_path_factory.mktemp("slept")
    finish_ranks(start_ranks(folder, steps=UPDATES, log={"tensorboard": False}))
    return folder


@pytest.mark.slow
@needs_processes
def test_busy_time_equals_timers_inside_the_model(sleeping_run: Path) -> None:
    """Story: device 0 seemed busy 99.5 % of the time; a backward included its wait."""
    times = read_json(sleeping_run / "measured.json")["times"]
    events = read_rank_trace(sleeping_run, 0).events
    updates = events.select(events.is_kind("update"))
    begin, end = int(updates.end[0]), int(updates.end[-1])
    slept = [(a, b) for stage, a, b in read_json(sleeping_run / "slept-0.json") if stage == 0]
    work = events.select(events.is_kind("forward", "backward"))
    truth, found = (
        sum(max(0, min(b, end) - max(a, begin)) for a, b in intervals) / (end - begin)
        for intervals in (slept, zip(work.start.tolist(), work.end.tolist()))
    )
    assert 0.05 < truth < 0.3 and abs(found - truth) < 0.03
    busy, wait, _, span = times[0]
    # which no timer in the model sees
    own_updates = int((updates.end - updates.start)[1:].sum()) / span
    assert abs(busy / span - own_updates - truth) < 0.03
    # loaded machines sleep longer
    assert wait / span > 0.5 and all(sum(device[:3]) <= device[3] for device in times)
    assert times[1][0] / times[1][3] > 0.5  # the bottleneck
    waits = events.select(events.is_kind("wait") & (events.carries == PAYLOADS.index("gradients")))
    assert len(waits.start) == UPDATES and set(waits.peer.tolist()) == {1}


@needs_processes
def test_communicated_bytes_are_the_size_of_activations_and_gradients(sleeping_run: Path) -> None:
    size = BATCH * WIDTH * 4
    for device, carried, peer in ((0, "activations", 1), (1, "gradients", 0)):
        messages = []
        for rank, kind, other in ((device, "send", peer), (peer, "recv", device)):
            events = read_rank_trace(sleeping_run, rank).events
            # no two events of a rank overlap
            assert (events.start[1:] >= events.end[:-1]).all()
            assert {*events.device.tolist()} == {*events.stage.tolist()} == {rank}
            of_kind = events.is_kind(kind) & (events.carries == PAYLOADS.index(carried))
            messages.append(events.select(of_kind))
            assert messages[-1].bytes.tolist() == [size] * UPDATES
            assert messages[-1].microbatch.tolist() == list(range(UPDATES))
            assert {*messages[-1].peer.tolist()} == {other}
        # by one clock, a message arrives after it was sent
        assert (messages[1].end - messages[0].start > -1_000_000).all()
    links = read_json(sleeping_run / "run" / "summary.json")["links"]
    assert [link["bytes_per_microbatch"] for link in links] == [size, size]


@needs_processes
def test_memory_equals_the_bytes_of_the_tensors(sleeping_run: Path) -> None:
    peaks = read_json(sleeping_run / "measured.json")["peak_memory"]
    first, last = 4 * (WIDTH * WIDTH + WIDTH), 4 * (WIDTH * CLASSES + CLASSES)
    across, labels = 4 * BATCH * WIDTH, 8 * BATCH
    for device, (peak, weights) in enumerate(zip(peaks, (first, last))):
        assert peak["weights"] == peak["gradients"] == peak["optimizer"] == weights
        assert peak["total"] <= sum(peak[name] for name in MEMORY)
        counters = read_rank_trace(sleeping_run, device).counters
        for name, counter in MEMORY.items():
            assert counters.value[counters.name == counter].max() == peak[name]
    # the copy that the first stage's backward reads
    assert [peak["versions"] for peak in peaks] == [first, 0]
    # two microbatches in flight: inputs and outputs; on the last stage inputs, labels, the log of the softmax, the loss
    # and the sum of the labels' weights
    assert peaks[0]["activations"] == 2 * (across + across)
    assert peaks[1]["activations"] == across + labels + 4 * BATCH * CLASSES + 4 + 4


@needs_processes
def test_the_metadata_describe_the_run_and_its_units(sleeping_run: Path) -> None:
    metadata = read_rank_trace(sleeping_run, 1).metadata
    expected = {
        "schema": 1,
        "method": "pipedream",
        "device_of_stage": [0, 1],
        "step_samples": BATCH,
    }
    assert expected.items() <= metadata.items()
    one, two = metadata["units"]
    assert [(unit["name"], unit["stage"]) for unit in (one, two)] == [("one", 0), ("two", 1)]
    assert one["forward_flops"] == 2 * BATCH * WIDTH * WIDTH
    assert two["backward_flops"] == 2 * 2 * BATCH * WIDTH * CLASSES
    assert two["crossing_bytes"] == 4 * BATCH * WIDTH


@pytest.mark.slow
@needs_processes
def test_a_killed_run_leaves_its_trace_and_a_resumed_run_continues_it(tmp_path: Path) -> None:
    keys = {
        "log": {"tensorboard": False, "trace": {"begin": 2, "end": 400}}, "checkpoint": {"every": 10}, "steps": 45,
        "clip": {"norm": 1.0, "scope": "delayed_global"},
    }  # fmt: skip
    ranks = start_ranks(tmp_path, **keys)
    checkpoints = tmp_path / "run" / "checkpoints"
    wait_for_file(checkpoints / "step-30")
    for rank in ranks:
        os.kill(rank.pid, signal.SIGKILL)
        rank.join()
    killed_traces = [read_rank_trace(tmp_path, rank) for rank in range(2)]
    newest_step = max(int(path.name[5:]) for path in checkpoints.glob("step-*"))
    finish_ranks(start_ranks(tmp_path, resume=True, **keys))
    for rank, before in enumerate(killed_traces):
        # clipping by norms of others divides an update into parts
        updates = {*before.events.microbatch[before.events.is_kind("update")].tolist()}
        assert updates == {*range(2, len(updates) + 2)} and len(updates) > 20
        trace = read_rank_trace(tmp_path, rank)
        events = trace.events
        updates = events.microbatch[events.is_kind("update") & (events.version >= 0)]
        assert sorted({*updates.tolist()}) == list(range(2, 45))  # nothing lost, nothing twice
        assert (events.start[1:] >= events.end[:-1]).all()
        old = find_updates(before.events, 1) < newest_step
        count = int(old.sum())
        assert np.flatnonzero(events.is_kind("pause")).tolist() == [count]
        lengths = (before.events.end - before.events.start)[old]
        assert ((events.end - events.start)[:count] == lengths).all()
        norms = events.is_kind("wait") & (events.carries == PAYLOADS.index("norms"))
        assert norms.any() and {*events.peer[norms].tolist()} == {1 - rank}
        # also counters that changed before the window
        assert {*trace.counters.name.tolist()} == {*MEMORY.values()}


# ---- recording without processes


def test_updates_in_the_window_are_recorded_and_gaps_are_pauses() -> None:
    recorder = TraceRecorder(0, 0, range(2, 8, 3))
    for update in range(9):
        recorder.begin_update(update)
        recorder.add("forward", update, recorder.mark(), version=update)
        recorder.add("update", update, recorder.mark(), version=update + 1)
    events = recorder.read_events()
    assert [(KINDS[kind], int(m)) for kind, m in zip(events.kind, events.microbatch)] == [
        ("forward", 2), ("update", 2), ("pause", -1), ("forward", 5), ("update", 5)
    ]  # fmt: skip
    assert (events.start[1:] >= events.end[:-1]).all()


def test_totals_cover_the_timed_steps_whatever_is_recorded() -> None:
    recorder, durations = TraceRecorder(0, 0, range(0)), {"wait": 5, "recv": 70, "send": 7}
    now = [1000]
    recorder.mark = lambda: now[0]
    recorder.begin_update(0)
    for is_timed in (False, True):
        recorder.begin_step(is_timed)
        for kind in ("wait", "recv", "forward", "send", "update", "evaluate"):
            start = recorder.mark()
            now[0] += durations.get(kind, 100)
            recorder.add(kind, 0, start)
        recorder.end_step()
    assert recorder.times == (200, 5, 77, 382)
    assert len(recorder.read_events().start) == 0


class Stream:
    """A GPU's stream: work takes its time there while the host continues."""

    def __init__(self) -> None:
        self.free = 0.0  # ms at which the stream has finished all work
        self.host = 0.0

    def work(self, ms: float) -> None:
        self.free = max(self.free, self.host) + ms

    def event(self) -> "StreamEvent":
        return StreamEvent(self)


class StreamEvent:
    def __init__(self, stream: Stream) -> None:
        self.stream, self.at = stream, -1.0

    def record(self) -> None:
        self.at = self.stream.free = max(self.stream.free, self.stream.host)

    def query(self) -> bool:
        return self.at <= self.stream.host

    def elapsed_time(self, other: "StreamEvent") -> float:
        return other.at - self.at


def test_events_of_a_gpu_have_the_times_of_its_stream() -> None:
    """The host issues a forward of 30 ms within 1 ms, then waits 50 ms for a message.

    The GPU waits 21 ms of these.
    """
    stream = Stream()

    def synchronize() -> None:
        stream.host = max(stream.host, stream.free)

    recorder = TraceRecorder(0, 0, range(9), StreamClock(stream.event, synchronize))
    recorder.begin_update(0)
    recorder.begin_step(True)
    begin = recorder.mark()
    stream.work(30)
    stream.host += 1
    waits = recorder.add("forward", 0, begin, version=0)
    stream.host += 50
    recorder.add("wait", 0, waits, peer=1, carries="gradients")
    begin = recorder.mark()
    stream.work(60)
    recorder.add("backward", 0, begin, version=0)
    recorder.count("weights (bytes)", 5, recorder.mark())
    recorder.end_step()
    recorder.flush()
    assert stream.host == 51 and len(recorder._pending) == 3  # a running backward is not waited for
    events = recorder.read_events()
    assert [(KINDS[k], e) for k, e in zip(events.kind, (events.end - events.start) // 10**6)] == [
        ("forward", 30), ("wait", 21), ("backward", 60)
    ]  # fmt: skip
    assert (events.start[1:] >= events.end[:-1]).all()
    assert recorder.times == (90 * 10**6, 21 * 10**6, 0, 111 * 10**6)


@pytest.mark.gpu
def test_marks_of_a_gpu() -> None:
    clock = make_stream_clock(torch.device("cuda"))
    recorder = TraceRecorder(0, 0, range(9), clock)
    recorder.begin_update(0)
    a = torch.randn(4096, 4096, device="cuda")
    begin, host = recorder.mark(), time.perf_counter_ns()
    for _ in range(50):
        a @ a
    recorder.add("forward", 0, begin)
    issue_ns = time.perf_counter_ns() - host
    events = recorder.read_events()
    assert int(events.end[0] - events.start[0]) > issue_ns


def test_updates_of_events() -> None:
    """Passes belong to the update of their microbatch, four a batch; evaluations to none."""
    rows = [
        ("forward", 7, 3, ""), ("send", 7, -1, "activations"), ("update", 1, 2, ""), ("wait", 1, -1, "norms"),
        ("average", 1, -1, "gradients"), ("checkpoint", -1, 2, ""), ("evaluate", -1, 0, ""),
    ]  # fmt: skip
    events = [
        Event(0, 0, kind, m, 0, 1, version, None, -1, what) for kind, m, version, what in rows
    ]
    assert find_updates(Events.from_rows(events), 4).tolist() == [1, 1, 1, 1, 1, 1, -1]
