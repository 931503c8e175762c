"""Whole runs under torchrun: all outputs, measured traffic, resuming on another layout, faults."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List

import pytest
import torch

from ipu_pipe.backends.processes.collect import free, zero_freed
from ipu_pipe.backends.processes.layout import RankLayout
from ipu_pipe.backends.processes.mail import Mail, Message
from ipu_pipe.backends.processes.trace import TraceRecorder
from ipu_pipe.backends.processes.update import ReplicaGroup, average_over_replicas
from ipu_pipe.config.load import load_config
from ipu_pipe.cut.crossing import TensorSpec
from ipu_pipe.run.train import train
from ipu_pipe.store.checkpoint import FILES
from ipu_pipe.store.folder import lock_folder
from tests import forked
from tests.support.processes import enable_interrupts, run_in_group
from tests.support.runs import (
    DIGITS,
    ROOT,
    assert_same_state,
    list_faults,
    needs_processes,
    read_numbers,
    read_summary,
    read_trace_file,
)

SHORT = [
    "steps=12", "optimizer.lr=0.02", "log.tensorboard=false", "gradient_accumulation=4", "micro_batch_size=8",
    "checkpoint.every=4", "checkpoint.keep=9", "evaluate.subset=100", "backend.threads=1",
]  # fmt: skip

pytestmark = needs_processes


def make_command_line(out: Path, *args: str) -> List[str]:
    """Return arguments of tools/train.py, on the digits."""
    sets = [*SHORT, "backend.name=distributed", *[a for a in args if "=" in a]]
    options = [a for a in args if "=" not in a]
    return [DIGITS, "--out", str(out), *[i for pair in sets for i in ("--set", pair)], *options]


def train_digits_on_ranks(ranks: int, out: Path, *args: str) -> forked.CommandOutput:
    """Train on forked ranks. Return exit code, standard output and standard error, without torchrun's part."""
    return forked.run_ranks(ranks, "train", make_command_line(out, *args))


def train_digits_on_emulator(out: Path, *sets: str, **how: Any) -> Dict[str, Any]:
    return train(load_config(DIGITS, [*SHORT, *sets]), out, quiet=True, **how)


def train_digits_on_both(tmp_path: Path, ranks: int, *how: str) -> Dict[str, Any]:
    """Check that ranks and the emulator end in equal weights, state, metrics and results. Return the emulator's summary."""
    code, _, error = train_digits_on_ranks(ranks, tmp_path / "ranks", *how)
    assert code == 0, error
    expected = train_digits_on_emulator(tmp_path / "one", *how)
    assert_same_state(tmp_path / "ranks", tmp_path / "one", 12)
    assert read_numbers(tmp_path / "ranks") == read_numbers(tmp_path / "one")
    assert read_summary(tmp_path / "ranks")["final"] == expected["final"]
    return expected


# ---- torchrun


def open_torchrun(out: Path, *args: str, options: str) -> "subprocess.Popen[str]":
    """Start tools/train.py by torchrun."""
    launcher = [sys.executable, "-m", "torch.distributed.run", *options.split()]
    return subprocess.Popen(
        [*launcher, str(ROOT / "tools" / "train.py"), *make_command_line(out, *args)],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"}, preexec_fn=enable_interrupts,
    )  # fmt: skip


@pytest.mark.slow
def test_two_nodes_give_the_emulators_weights_and_all_outputs(tmp_path: Path) -> None:
    with socket.socket() as free_socket:
        free_socket.bind(("localhost", 0))
        port = free_socket.getsockname()[1]
    how = ["method=pipedream", "stages=2"]
    meeting = f"--nnodes 2 --nproc_per_node 1 --master_addr localhost --master_port {port}"
    out = tmp_path / "ranks"
    nodes = [open_torchrun(out, *how, options=f"{meeting} --node_rank {n}") for n in range(2)]
    outputs = [node.communicate(timeout=240) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], outputs
    expected = train_digits_on_emulator(tmp_path / "one", *how)
    assert_same_state(out, tmp_path / "one", 12)
    assert read_numbers(out) == read_numbers(tmp_path / "one")
    report, printed = read_summary(out), "".join(output for output, _ in outputs)
    assert report["backend"] == "distributed" and printed.count("throughput: ") == 1
    # the sent bytes are the planned ones
    assert report["links"] == sorted(expected["links"], key=lambda link: (link["src"], link["dst"]))
    trace = read_trace_file(out)
    assert trace["otherData"]["modelled"] is False
    starts = [event["ts"] for event in trace["traceEvents"] if event.get("ph") == "X"]
    assert len(starts) >= 2 * 48 * 2 and min(starts) >= 0


@contextlib.contextmanager
def start_torchrun(out: Path, *args: str) -> Iterator["subprocess.Popen[str]"]:
    """Start torchrun on two ranks, with a restart; at the end, kill it and its ranks if they still run."""
    ranks = "--nproc_per_node 2 --master_port 0 --rdzv_endpoint localhost:0 --rdzv_backend c10d"
    process = open_torchrun(out, *args, options=f"{ranks} --max_restarts 1")
    try:
        yield process
    finally:
        workers = _list_children(process.pid)
        process.kill()
        for worker in filter(_is_running, workers):
            os.kill(worker, signal.SIGKILL)
        process.communicate(timeout=60)


def wait_until(process: "subprocess.Popen[str]", is_there: Callable[[], Any]) -> None:
    """Wait until `is_there()`, while the process runs."""
    deadline = time.monotonic() + 240
    while not is_there():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)


def _list_children(parent: int) -> List[int]:
    """Return the processes that `parent` has started."""
    with contextlib.suppress(OSError):
        children = Path(f"/proc/{parent}/task/{parent}/children").read_text()
        return [int(pid) for pid in children.split()]
    return []


def _is_running(pid: int) -> bool:
    """Return whether the process exists and is not a zombie."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def _wait_for_end(pids: List[int]) -> bool:
    """Return whether all processes end within a minute."""
    until = time.monotonic() + 60
    while any(map(_is_running, pids)) and time.monotonic() < until:
        time.sleep(0.05)
    return not any(map(_is_running, pids))


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds the processes in /proc")
def test_a_job_ends_with_a_rank_its_launcher_or_ctrl_c_and_resumes(tmp_path: Path) -> None:
    """Story: the ranks of a killed launcher went on, and a resumed run wrote into the same folder beside them."""
    out, how = tmp_path / "run", ["steps=30000", "checkpoint.every=20", "stages=2", "evaluate.every=0"]  # fmt: skip

    def list_steps() -> List[int]:
        return [int(path.name[5:]) for path in (out / "checkpoints").glob("step-*")]

    with start_torchrun(out, *how) as process:
        wait_until(process, list_steps)
        assert process.stdout is not None and process.stderr is not None
        os.kill(max(_list_children(process.pid)), signal.SIGKILL)
        fault = next(line for line in process.stderr if line.startswith("error: "))
        assert "rank 0, stage 0, action" in fault and "is lost" in fault
        restarted = next(line for line in process.stdout if line.startswith("restart 1 "))
        resumed = next(line for line in process.stdout if line.startswith("resuming after update "))
        assert str(out) in restarted and int(resumed.split()[3]) >= 20
        ranks = _list_children(process.pid)
        assert len(ranks) == 2
        process.send_signal(signal.SIGKILL)
        try:
            assert _wait_for_end(ranks)
        finally:  # they have no launcher any more by which they could be found
            for rank in filter(_is_running, ranks):
                os.kill(rank, signal.SIGKILL)
    for step in (out / "checkpoints").glob("step-*"):
        assert set(FILES) | {"manifest.json"} == {file.name for file in step.iterdir()}
    newest = max(list_steps())
    with start_torchrun(out, *how, "--resume") as process:
        wait_until(process, lambda: any(step > newest for step in list_steps()))
        ranks = _list_children(process.pid)
        process.send_signal(signal.SIGINT)
        printed, error = process.communicate(timeout=60)
        assert process.returncode != 0 and _wait_for_end(ranks)
    assert f"resuming after update {newest}" in printed, error
    assert not [line for line in error.splitlines() if "tools/train.py" in line and "File" in line]


# ---- forked ranks


SPLIT = {"input gradient", "weight gradient"}
# settings -> links between the two ranks, and kinds of backwards; dualpipe_v places four stages by default
SHARING: Dict[str, Any] = {
    "method=pipedream stages=4": ({(1, 2)}, {"backward"}),
    "method=pipedream stages=2 replicas=2": (set(), {"backward"}),
    "method=dualpipe_v": ({(0, 1), (2, 3)}, {"backward", *SPLIT}),
    "method=pipedream stages=4 stages_per_device=2 method_args.split_backward=true": (
        {(0, 1), (1, 2), (2, 3)}, SPLIT
    ),
}  # fmt: skip


def train_sharing(rank: int, folder: Path) -> None:
    """Train each row of SHARING as a rank."""
    for number, settings in enumerate(SHARING):
        sets = ["backend.name=distributed", "steps=2", "evaluate.every=0", *settings.split()]
        train_digits_on_emulator(folder / str(number), *sets)


@pytest.mark.slow
def test_stages_that_share_a_process_hand_their_values_over(tmp_path: Path) -> None:
    """Only values between stages of two processes are sent; the trace has the halves of split backwards."""
    run_in_group(2, train_sharing, tmp_path)
    for number, (links, backwards) in enumerate(SHARING.values()):
        crossing = {(link["src"], link["dst"]) for link in read_summary(tmp_path / str(number))["links"]}  # fmt: skip
        assert crossing == {pair for a, b in links for pair in ((a, b), (b, a))}
        events = read_trace_file(tmp_path / str(number))["traceEvents"]
        assert {event.get("cat") for event in events} & {"backward", *SPLIT} == backwards


REFUSED = {  # settings -> part of the line
    "method=pipemare stages=2 method_args.constant_delay.updates=2": "are the pipeline's own there: use backend.name: emulator",
    "method=gpipe stages=2 clip.norm=1.0 clip.scope=delayed_global": "use clip: {scope: global, norm: 1}",
    "method=pipedream stages=1": "at most 1 device",
    "method=zbv stages=2": "stages: 2: ",
    "method=dualpipe_v stages=4 gradient_accumulation=3": "gradient_accumulation: 3: ",
    "method=interleaved_1f1b stages=8 stages_per_device=4": "stages: 8: ",  # they divide modules
    "method=pipemare stages=[b] model.entry=tests.staged_models:make_flat_skipping model.args={}": (
        "model: scale: weights of a cut module"
    ),
}  # fmt: skip


def check_refusals_of_settings(rank: int, folder: Path) -> None:
    """Check as a rank that each row of REFUSED is one line."""
    for number, (settings, message) in enumerate(REFUSED.items()):
        sets = ["backend.name=distributed", *settings.split()]
        (fault,) = list_faults(train_digits_on_emulator, folder / str(number), *sets)
        assert message in fault, fault


def test_settings_without_meaning_on_processes_are_refused(tmp_path: Path) -> None:
    run_in_group(2, check_refusals_of_settings, tmp_path)
    assert not list(tmp_path.glob("[0-9]*"))


def test_without_a_launcher_the_error_names_the_command(tmp_path: Path) -> None:
    (fault,) = list_faults(train_digits_on_emulator, tmp_path / "run", "backend.name=distributed")
    assert "torchrun --nproc_per_node" in fault


def test_a_fault_of_all_ranks_is_printed_once(tmp_path: Path) -> None:
    with lock_folder(tmp_path / "run"):
        code, _, error = train_digits_on_ranks(2, tmp_path / "run", "stages=2")
    (fault,) = [line for line in error.splitlines() if line.startswith("error: ")]
    assert code == 2 and f"process {os.getpid()} writes a run there" in fault


@pytest.mark.slow
def test_one_process_under_a_launcher_may_be_the_emulator_and_evaluates_once(
    tmp_path: Path,
) -> None:
    run = tmp_path / "run"
    code, printed, error = train_digits_on_ranks(1, run, "backend.name=emulator", "steps=4")
    assert code == 0 and "throughput: " in printed, error
    weights = str(run / "checkpoints" / "step-4")
    code, printed, error = train_digits_on_ranks(
        2, tmp_path / "other", "stages=2", "--evaluate", weights
    )
    assert code == 0 and json.loads(printed)["weights"] == weights, error


# ---- parts


def test_buffers_of_completed_sends_are_released(tmp_path: Path) -> None:
    """Under gloo a send is known to be complete only after a wait for it."""
    run_in_group(2, _send_many, tmp_path)


def _send_many(rank: int, folder: Path) -> None:
    count, mail = 200, make_two_rank_mail(rank)
    if rank == 0:
        for m in range(count):
            mail.send(Message("F", m, 0, 1), [torch.full((3,), float(m))])
        assert mail.count_buffer_bytes([]) < 50 * 3 * 4  # of 200 messages
        mail.flush()
    else:
        shapes = (TensorSpec((3,), torch.float32, True),)
        mail.expect([(Message("F", m, 0, 1), shapes) for m in range(count)])
        assert all(float(mail.receive(Message("F", m, 0, 1))[0][0]) == m for m in range(count))


def make_two_rank_mail(rank: int) -> Mail:
    return Mail(
        RankLayout(rank, (0, 1)), torch.device("cpu"), TraceRecorder(rank, rank, range(0)), 60.0
    )


def test_the_mean_over_replicas_is_the_emulators_whatever_their_number(tmp_path: Path) -> None:
    """Three replicas: the order of the sum shows."""
    run_in_group(3, _average, tmp_path)


def _average(rank: int, folder: Path) -> None:
    """Check one message per dtype, of tensors on the host. A gradient that one replica lacks counts as zero."""
    generator = torch.Generator().manual_seed(3)
    messages: List[torch.Tensor] = []
    shapes = {(50, 3): torch.float32, (7,): torch.bfloat16, (): torch.float32, (4,): torch.float32}
    parameters = [torch.nn.Parameter(torch.zeros(s, dtype=d)) for s, d in shapes.items()]
    gradients = [
        [torch.randn(p.shape, generator=generator).to(p.dtype) for p in parameters[:3]]
        for _ in range(3)
    ]
    for p, gradient in zip(parameters, gradients[rank]):
        p.grad = gradient.clone() if p.dim() or rank != 1 else None
    gradients[1][2].zero_()
    real = torch.distributed.all_gather
    torch.distributed.all_gather = lambda every, own, **how: (
        messages.append(own) or real(every, own, **how)
    )  # type: ignore[func-returns-value]
    average_over_replicas(parameters, make_two_rank_mail(rank), ReplicaGroup(None))
    for p, *parts in zip(parameters, *gradients):
        expected = (parts[0] + parts[1] + parts[2]) / 3
        assert p.grad is not None and p.grad.shape == p.shape and torch.equal(p.grad, expected)
    assert parameters[3].grad is None
    assert [m.dtype for m in messages] == [torch.int32, torch.float32, torch.bfloat16]


def test_freed_weights_have_no_memory_and_are_zero_during_shape_inference() -> None:
    """Story: the first evaluation failed in a module that asserts finite inputs, and in a grouped matrix product (Mixtral's
    experts), which needs dense weights."""
    layer = torch.nn.Linear(1000, 1000)
    freed = free(layer.parameters())
    assert layer.weight.shape == (1000, 1000) and layer.weight.untyped_storage().nbytes() == 4
    with zero_freed(freed):
        assert bool(torch.isfinite(layer(torch.ones(2, 1000))).all())
        assert layer.weight.stride() == (1000, 1)
    assert bool(layer.weight.isnan().all()) and bool(layer.bias.isnan().all())
