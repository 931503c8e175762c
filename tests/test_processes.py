"""Whole runs under torchrun: all outputs, measured traffic, resuming on another layout, faults."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
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
    needs_processes,
    read_numbers,
    read_summary,
    read_trace_file,
    read_weights,
)
from tests.support.slow import mark_slow

SHORT = [
    "steps=12", "optimizer.lr=0.02", "log.tensorboard=false", "gradient_accumulation=4", "micro_batch_size=8",
    "checkpoint.every=4", "checkpoint.keep=9", "evaluate.subset=100", "backend.threads=1",
]  # fmt: skip

pytestmark = needs_processes


def make_command_line(out: Path, *args: str) -> List[str]:
    """Return arguments of tools/train.py, on the digits."""
    sets = [*SHORT, "backend.name=distributed", *[a for a in args if "=" in a]]
    return [
        DIGITS,
        "--out",
        str(out),
        *[i for pair in sets for i in ("--set", pair)],
        *[a for a in args if "=" not in a],
    ]


def open_torchrun(ranks: int, out: Path, *args: str, restarts: int = 0) -> "subprocess.Popen[str]":
    """Start tools/train.py by torchrun."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(ranks), "--master_port", "0", "--rdzv_endpoint",
        "localhost:0", "--rdzv_backend", "c10d", "--max_restarts", str(restarts),
        str(ROOT / "tools" / "train.py"), *make_command_line(out, *args),
    ]  # fmt: skip
    return subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"}, preexec_fn=enable_interrupts,
    )  # fmt: skip


def train_digits_on_ranks(ranks: int, out: Path, *args: str) -> forked.CommandOutput:
    """Train on forked ranks. Return exit code, standard output and standard error, without torchrun's part."""
    return forked.run_ranks(ranks, "train", make_command_line(out, *args))


def train_digits_by_torchrun(ranks: int, out: Path, *args: str) -> forked.CommandOutput:
    """Train by torchrun; return the same."""
    process = open_torchrun(ranks, out, *args)
    printed, error = process.communicate(timeout=240)
    return forked.CommandOutput(process.returncode, printed, error)


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


@contextlib.contextmanager
def start_torchrun(
    ranks: int, out: Path, *args: str, restarts: int = 0
) -> Iterator["subprocess.Popen[str]"]:
    """Start torchrun; at the end, kill it and its ranks if they still run."""
    process = open_torchrun(ranks, out, *args, restarts=restarts)
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
    deadline = time.monotonic() + 120
    while not is_there():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)


def test_a_run_gives_the_emulators_weights_and_all_outputs(tmp_path: Path) -> None:
    rules = [
        "method=pipemare",
        "stages=4",
        "method_args={t1: {anneal_updates: 5}, t2: {decay: 0.5}}",
    ]
    code, printed, error = train_digits_by_torchrun(4, tmp_path / "ranks", *rules)
    assert code == 0, error
    expected = train_digits_on_emulator(tmp_path / "one", *rules)
    assert_same_state(tmp_path / "ranks", tmp_path / "one", 12)
    report = read_summary(tmp_path / "ranks")
    assert report["backend"] == "distributed" and report["final"] == expected["final"]
    assert report["initial"] == expected["initial"]
    assert (
        printed.splitlines()[-1].startswith("throughput: ") and printed.count("throughput: ") == 1
    )
    # the sent bytes are the planned ones
    assert report["links"] == sorted(expected["links"], key=lambda link: (link["src"], link["dst"]))
    assert [s["optimizer_bytes"] for s in report["stages"]] == [
        s["optimizer_bytes"] for s in expected["stages"]
    ]
    trace = read_trace_file(tmp_path / "ranks")
    assert trace["otherData"]["modelled"] is False
    starts = [event["ts"] for event in trace["traceEvents"] if event.get("ph") == "X"]
    assert len(starts) >= 4 * 48 * 2 and min(starts) >= 0
    assert read_numbers(tmp_path / "ranks") == read_numbers(tmp_path / "one")


SHARING = {
    "pipedream": ["method=pipedream", "stages=4"],
    "delayed norm": ["method=pipemare", "stages=4", "clip={norm: 0.5, scope: delayed_global}"],
    "global norm": ["method=gpipe", "stages=4", "clip={norm: 0.5, scope: global}"],
    "replicas": ["method=pipedream", "stages=2", "replicas=2"],
    "interleaved": ["method=interleaved_1f1b", "stages=4", "stages_per_device=2"],
    "V-shaped": ["method=zbv", "stages=4"],
    "mixed": ["method=dualpipe_v", "stages=4"],
    "split": ["method=pipedream", "stages=4", "stages_per_device=2", "method_args={split_backward: true}"],
    "finest": ["method=pipedream", "stages=finest"],
    "outer": [
        "method=local_sgd", "stages=4", "steps=4", "gradient_accumulation=1",
        "method_args={replicas: 3, local_steps: 4, outer: {}}",
    ],
}  # fmt: skip


QUICK = {"delayed norm", "replicas", "mixed", "split"}


@pytest.mark.parametrize("name", mark_slow(SHARING, QUICK.__contains__))
def test_stages_that_share_a_process_hand_their_values_over(name: str, tmp_path: Path) -> None:
    """Only values between stages of two processes are sent; the trace has the halves of split backwards."""
    settings = SHARING[name]
    code, _, error = train_digits_on_ranks(2, tmp_path, "steps=2", "evaluate.every=0", *settings)
    assert code == 0, error
    crossing = {(link["src"], link["dst"]) for link in read_summary(tmp_path)["links"]}
    v_shaped = {(0, 1), (2, 3)}
    expected_links = {"zbv": v_shaped, "dualpipe_v": v_shaped}.get(settings[0][7:], {(1, 2)})
    if "stages_per_device=2" in settings:
        expected_links = {(0, 1), (1, 2), (2, 3)}
    if "replicas=2" in settings:
        expected_links = set()
    assert crossing == {pair for a, b in expected_links for pair in ((a, b), (b, a))}
    trace = read_trace_file(tmp_path)
    kinds = {event.get("cat") for event in trace["traceEvents"]}
    is_split = (
        settings[0] in ("method=zbv", "method=dualpipe_v") or "split_backward" in settings[-1]
    )
    assert ({"input gradient", "weight gradient"} <= kinds) == is_split
    assert ("backward" in kinds) == (not is_split or settings[0] == "method=dualpipe_v")


PASSES_OF_ROWS = """0F1,0F0,0F3,0F2,,,,,0B3,0I1,0I0,0B2,0W1,0W0
,,1F0,1F1,1I1,1F3,1B3,1F2,1B2,1I0,1W1,1W0
"""


def test_rows_of_a_file_train_in_their_own_order(tmp_path: Path) -> None:
    """Forwards and backwards out of order, whole and split ones: the sums of the gradients have other last bits than gpipe's."""
    (tmp_path / "rows.csv").write_text(PASSES_OF_ROWS)
    file = f"method_args.file={tmp_path / 'rows.csv'}"
    train_digits_on_emulator(tmp_path / "rows", "stages=2", "method=rows", file)
    train_digits_on_emulator(tmp_path / "gpipe", "stages=2", "method=gpipe")
    ours, theirs = (read_weights(tmp_path / name, 12) for name in ("rows", "gpipe"))
    assert any(not torch.equal(ours[key], theirs[key]) for key in ours)


def test_the_default_number_of_stages_is_that_which_the_method_places(tmp_path: Path) -> None:
    code, _, error = train_digits_on_ranks(
        2, tmp_path / "run", "method=zbv", "steps=1", "evaluate.every=0"
    )
    assert code == 0, error
    assert read_summary(tmp_path / "run")["model"]["stages"] == 4


@pytest.mark.slow
def test_a_run_resumes_on_another_layout(tmp_path: Path) -> None:
    """gpipe's numbers do not depend on the stages: four ranks, then two, then the emulator end in the numbers of one run."""
    how = ["method=gpipe", "stages=4", "optimizer.momentum=0.9"]
    whole = train_digits_on_emulator(tmp_path / "whole", *how)
    out = tmp_path / "cut"
    code, _, error = train_digits_on_ranks(4, out, *how)
    assert code == 0, error
    for step in (8, 12):  # as if killed after the first checkpoint
        shutil.rmtree(out / "checkpoints" / f"step-{step}")
    (out / "summary.json").unlink()
    code, printed, error = train_digits_on_ranks(2, out, *how, "stages=2", "--resume")
    assert code == 0 and "resuming after update 4" in printed, error
    assert_same_state(out, tmp_path / "whole")
    shutil.rmtree(out / "checkpoints" / "step-12")
    (out / "summary.json").unlink()
    again = train_digits_on_emulator(out, *how, resume=True)
    assert_same_state(out, tmp_path / "whole")
    assert again["final"]["test_loss"] == whole["final"]["test_loss"]


def _list_children(parent: int) -> List[int]:
    """Return the processes that `parent` has started, from /proc/PID/stat: "PID (name) state PPID ..."."""
    children = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(file.read_text().rpartition(")")[2].split()[1]) == parent:
                children.append(int(file.parent.name))
    return children


needs_proc = pytest.mark.skipif(
    not Path("/proc/self/stat").exists(), reason="finds the processes in /proc"
)


@pytest.mark.slow
@needs_proc
def test_a_killed_rank_ends_the_job_and_is_named_and_a_restarted_run_resumes(
    tmp_path: Path,
) -> None:
    how = ["steps=30000", "checkpoint.every=20", "stages=2", "evaluate.every=0"]
    with start_torchrun(2, tmp_path / "run", *how, restarts=1) as process:
        wait_until(process, (tmp_path / "run" / "checkpoints" / "step-20").is_dir)
        os.kill(max(_list_children(process.pid)), signal.SIGKILL)
        assert process.stdout is not None
        restarted = next(line for line in process.stdout if line.startswith("restart 1 "))
        resumed = next(line for line in process.stdout if line.startswith("resuming after update "))
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=60)
    assert (
        process.returncode != 0
        and str(tmp_path / "run") in restarted
        and int(resumed.split()[3]) >= 20
    )
    (fault,) = [line for line in error.splitlines() if line.startswith("error: ")]
    assert "rank 0, stage 0, action" in fault and "is lost" in fault, error
    for step in (tmp_path / "run" / "checkpoints").glob("step-*"):
        assert set(FILES) | {"manifest.json"} == {file.name for file in step.iterdir()}


@pytest.mark.slow
@needs_proc
def test_a_rank_without_progress_ends_the_job_at_the_deadline(tmp_path: Path) -> None:
    """Story: rank 0 named rank 1, which waited for rank 2 itself."""
    how = [
        "steps=30000",
        "checkpoint.every=20",
        "stages=3",
        "evaluate.every=0",
        "backend.deadline=10",
    ]
    with start_torchrun(3, tmp_path / "run", *how) as process:
        wait_until(process, (tmp_path / "run" / "checkpoints" / "step-20").is_dir)
        stuck = max(_list_children(process.pid))
        os.kill(stuck, signal.SIGSTOP)
        assert process.stderr is not None
        fault = next(line for line in process.stderr if line.startswith("error: "))
        os.kill(stuck, signal.SIGKILL)  # which the launcher would do after half a minute
        process.communicate(timeout=60)
    assert process.returncode != 0 and "rank 2 is lost, or made no progress within 10 s" in fault


def _is_running(pid: int) -> bool:
    """Return whether the process exists and is not a zombie."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def _wait_for_end(pids: List[int], seconds: float) -> bool:
    """Return whether all processes end within `seconds`."""
    until = time.monotonic() + seconds
    while any(map(_is_running, pids)) and time.monotonic() < until:
        time.sleep(0.05)
    return not any(map(_is_running, pids))


@pytest.mark.slow
@needs_proc
def test_ranks_end_with_their_launcher_and_the_run_resumes(tmp_path: Path) -> None:
    """Story: the ranks of a killed launcher went on, and a resumed run wrote into the same folder beside them."""
    how = ["steps=30000", "stages=2", "evaluate.every=0", "checkpoint.keep=1"]

    def list_steps() -> List[int]:
        return [int(path.name[5:]) for path in (tmp_path / "run" / "checkpoints").glob("step-*")]

    with start_torchrun(2, tmp_path / "run", *how) as process:
        wait_until(process, list_steps)
        ranks = _list_children(process.pid)
        assert len(ranks) == 2
        process.send_signal(signal.SIGKILL)
        try:
            assert _wait_for_end(ranks, 60)
        finally:  # they have no launcher any more by which `launched` could find them
            for rank in filter(_is_running, ranks):
                os.kill(rank, signal.SIGKILL)
    newest = max(list_steps())
    with start_torchrun(2, tmp_path / "run", *how, "--resume") as process:
        wait_until(process, lambda: any(step > newest for step in list_steps()))
        process.send_signal(signal.SIGINT)
        printed, error = process.communicate(timeout=60)
    assert f"resuming after update {newest}" in printed, error


@pytest.mark.slow
@needs_proc
def test_a_folder_in_use_is_reported_once_and_ctrl_c_to_the_launcher_ends_all(
    tmp_path: Path,
) -> None:
    out = tmp_path / "run"
    with lock_folder(out):
        code, _, error = train_digits_on_ranks(2, out, "stages=2")
    (fault,) = [line for line in error.splitlines() if line.startswith("error: ")]
    assert code != 0 and f"process {os.getpid()} writes a run there" in fault
    with start_torchrun(2, out, "steps=30000", "stages=2", "log.tensorboard=true") as process:
        wait_until(process, (out / "checkpoints").exists)
        ranks = _list_children(process.pid)
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=60)
        assert process.returncode != 0 and _wait_for_end(ranks, 60)
    assert not [
        line for line in error.splitlines() if "tools/train.py" in line and "File" in line
    ], error


@pytest.mark.slow
def test_two_nodes_run_unchanged(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    settings = (*SHORT, "backend.name=distributed", "method=pipedream", "stages=2")
    nodes = [
        subprocess.Popen(
            [
                sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node_rank", str(node), "--nproc_per_node", "1",
                "--master_addr", "localhost", "--master_port", str(port), str(ROOT / "tools" / "train.py"), DIGITS,
                "--out", str(tmp_path / "ranks"),
                *[item for pair in settings for item in ("--set", pair)],
            ],
            cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for node in range(2)
    ]  # fmt: skip
    for node in nodes:
        _, error = node.communicate(timeout=240)
        assert node.returncode == 0, error
    train_digits_on_emulator(tmp_path / "one", "method=pipedream", "stages=2")
    assert_same_state(tmp_path / "ranks", tmp_path / "one", 12)


def test_weights_of_a_cut_module_cannot_be_read_anew(tmp_path: Path) -> None:
    how = [
        "model.entry=tests.staged_models:make_flat_skipping",
        "model.args={}",
        "stages=[b]",
        "gradient_accumulation=1",
    ]
    code, _, error = train_digits_on_ranks(2, tmp_path / "run", *how, "method=pipemare")
    assert code != 0 and "error: model: scale: weights of a cut module" in error
    assert not (tmp_path / "run").exists()
    code, _, error = train_digits_on_ranks(2, tmp_path / "run", *how, "method=pipedream")
    assert code == 0, error


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
    kinds = [
        ((50, 3), torch.float32),
        ((7,), torch.bfloat16),
        ((), torch.float32),
        ((4,), torch.float32),
    ]
    gradients = [
        [torch.randn(shape, generator=generator).to(dtype) for shape, dtype in kinds]
        for _ in range(3)
    ]
    parameters = [torch.nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape, dtype in kinds]
    for p, gradient in zip(parameters[:3], gradients[rank]):
        p.grad = gradient.clone() if p.dim() or rank != 1 else None
    gradients[1][2].zero_()
    real = torch.distributed.all_gather
    torch.distributed.all_gather = lambda every, own, **how: (
        messages.append(own) or real(every, own, **how)
    )  # type: ignore[func-returns-value]
    average_over_replicas(parameters, make_two_rank_mail(rank), ReplicaGroup(None))
    for i, p in enumerate(parameters[:3]):
        expected = (gradients[0][i] + gradients[1][i] + gradients[2][i]) / 3
        assert p.grad is not None and p.grad.shape == p.shape and torch.equal(p.grad, expected)
    assert parameters[3].grad is None and [message.dtype for message in messages] == [
        torch.int32,
        torch.float32,
        torch.bfloat16,
    ]


def test_weights_of_other_processes_are_freed() -> None:
    layer = torch.nn.Linear(1000, 1000)
    free(layer.parameters())
    assert layer.weight.shape == (1000, 1000) and layer.weight.untyped_storage().nbytes() == 4


def test_freed_weights_are_zero_during_shape_inference() -> None:
    """Story: the first evaluation failed in a module that asserts finite inputs, and in a grouped matrix product (Mixtral's
    experts), which needs dense weights."""
    layer = torch.nn.Linear(3, 3)
    freed = free(layer.parameters())
    with zero_freed(freed):
        assert bool(torch.isfinite(layer(torch.ones(2, 3))).all()) and layer.weight.stride() == (
            3,
            1,
        )
    assert bool(layer.weight.isnan().all()) and bool(layer.bias.isnan().all())


@pytest.mark.parametrize("how, message", [
    (["method=pipemare", "method_args.constant_delay={updates: 2}"], "are the pipeline's own there: use backend.name: emulator"),
    (["method=gpipe", "clip={norm: 1.0, scope: delayed_global}"], "use clip: {scope: global, norm: 1}"),
    (["method=pipedream", "stages=1"], "at most 1 device"),
    (["method=zbv", "stages=2"], "error: stages: 2: "),
    (["method=dualpipe_v", "stages=4", "gradient_accumulation=3"], "error: gradient_accumulation: 3: "),
    (["method=interleaved_1f1b", "stages=8", "stages_per_device=4"], "error: stages: 8: "),  # they divide modules
])  # fmt: skip
def test_settings_without_meaning_on_processes_are_refused(
    how: List[str], message: str, tmp_path: Path
) -> None:
    code, _, error = train_digits_on_ranks(2, tmp_path / "run", "stages=2", *how)
    lines = [line for line in error.splitlines() if line.startswith("error: ")]
    assert code != 0 and len(lines) == 1 and message in lines[0]


def test_one_process_under_a_launcher_may_be_the_emulator_and_evaluates_once(
    tmp_path: Path,
) -> None:
    code, printed, error = train_digits_on_ranks(
        1, tmp_path / "run", "backend.name=emulator", "steps=4"
    )
    assert code == 0 and "throughput: " in printed, error
    weights = str(tmp_path / "run" / "checkpoints" / "step-4")
    code, printed, error = train_digits_on_ranks(
        2, tmp_path / "other", "stages=2", "--evaluate", weights
    )
    assert code == 0 and json.loads(printed)["weights"] == weights, error


@pytest.mark.slow
def test_bad_input_is_reported_once(tmp_path: Path) -> None:
    code, _, error = train_digits_by_torchrun(
        2, tmp_path / "run", "method=pipedream_2bw", "gradient_accumulation=1", "stages=2"
    )
    assert code != 0 and error.count("error: ") == 1 and "two weight versions" in error


@pytest.mark.slow
def test_without_a_launcher_the_error_names_the_command(tmp_path: Path) -> None:
    arguments = [DIGITS, "--out", str(tmp_path / "run"), "--set", "backend.name=distributed"]
    done = subprocess.run(
        [sys.executable, "tools/train.py", *arguments], cwd=ROOT, capture_output=True, text=True
    )
    assert (
        done.returncode == 2
        and "torchrun --nproc_per_node" in done.stderr
        and len(done.stderr.splitlines()) == 1
    )
