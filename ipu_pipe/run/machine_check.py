"""Check a machine: what it has, then small runs on it, each equal to the emulator.

    1xx  this process: the emulator against a plain loop of PyTorch, and on a CUDA device
    2xx  two processes (gloo, and nccl with two CUDA devices): stages, replicas, blocks, resume
    3xx  IPUs: each row is an assumption about PopTorch that nothing but an IPU can confirm; the
         numbers are those of docs/ipu.md

A row that cannot run here is listed with the reason and not counted. No row was run on an IPU.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Callable, Iterator, NamedTuple, Sequence

import torch
import torch.distributed as dist

from ipu_pipe import __version__
from ipu_pipe.backends.processes.launch import describe_missing_support
from ipu_pipe.config.load import configure, merge_keys
from ipu_pipe.config.schema import Config
from ipu_pipe.errors import summarize
from ipu_pipe.job.factories import make_data, make_model
from ipu_pipe.launcher import describe_end
from ipu_pipe.model.devices import get_kind
from ipu_pipe.model.randomness import RandomStates, derive_seed
from ipu_pipe.report.analysis.text import format_table
from ipu_pipe.run.train import train
from ipu_pipe.store.checkpoint import find_newest, read_weights

EQUAL = "equal"
DIFFERENT = "different"
NOT_RUN = "not run"
PROCESSES = 2
# seconds that the two processes may take
PATIENCE = 300
# the file of the first error of the two processes
FIRST_ERROR = "error"

BASE: dict[str, Any] = {
    "model": {
        "entry": "models.mlp:mlp",
        "args": {"inputs": 12, "width": 16, "layers": 4, "classes": 5},
    },
    "data": {"name": "synthetic", "shape": [12], "classes": 5, "subset": 192, "test_subset": 8},
    "method": "pipedream_flush",
    "stages": 2,
    "micro_batch_size": 2,
    "gradient_accumulation": 4,
    "optimizer": {"name": "sgd", "lr": 0.05, "momentum": 0.9},
    "steps": 4,
    "evaluate": {"every": 0},
    "checkpoint": {"every": 2},
    "log": {"tensorboard": False},
}
CONVOLUTIONS: dict[str, Any] = {
    "model": {
        # smooth: a ReLU near zero would turn rounding into another network
        "entry": "models.convnet:convnet",
        "args": {"classes": 5},
    },
    "data": {"name": "synthetic", "shape": [3, 8, 8], "classes": 5, "subset": 64, "test_subset": 4},
}
BYTES: dict[str, Any] = {
    "model": {"args": {"norm": "group", "bytes": True}},
    "data": {"bytes": True},
}


class Trial(NamedTuple):
    """A small run that must end with the emulator's weights, up to `tolerance` of their greatest.

    `keys`: its changes of BASE. `device_keys`: further changes that the emulator does not have.
    `resumes`: it is stopped in the middle and resumed. On the emulator, float64 ends within a tenth
    of the tolerance, so a difference is not rounding.
    """

    number: int
    what: str
    keys: dict[str, Any]
    tolerance: float = 0.0
    device_keys: dict[str, Any] = {}
    resumes: bool = False


# PopTorch's and CUDA's numbers differ from those of torch on a CPU by rounding alone
ROUNDING = 1e-4

PLAIN_TRIAL = Trial(101, "the emulator against a plain loop of PyTorch", {"stages": 1}, 1e-5)
CUDA_TRIAL = Trial(102, "the emulator on a CUDA device", {}, ROUNDING)

PROCESS_TRIALS = (
    Trial(201, "pipeline of two stages", {}),
    Trial(202, "asynchronous pipeline with stashed weights", {"method": "pipedream"}),
    Trial(203, "two replicas, gradients all-reduced", {"stages": 1, "replicas": 2}, 1e-5),
    Trial(204, "blocks with losses of their own", {"method": "local_greedy"}),
    Trial(205, "checkpoint and resume", {"method": "pipedream_2bw"}, resumes=True),
)


def _on_ipu(**ipu: Any) -> dict[str, Any]:
    return {"backend": {"ipu": ipu}}


IPU_TRIALS = (
    Trial(301, "one IPU: an update is the mean of its microbatches", {"stages": 1}, ROUNDING),
    Trial(302, "a pipeline flushes before each update", {}, ROUNDING),
    Trial(303, "replicas: gradients are averaged over them", {"replicas": 2}, ROUNDING),
    Trial(
        304,
        "fused blocks: a detached boundary stops the gradient",
        {"method": "local_greedy"},
        ROUNDING,
    ),
    Trial(305, "optimizer state can be read and written back", {}, ROUNDING, resumes=True),
    Trial(
        306,
        "SGD's velocity is kept times the loss scaling",
        {},
        ROUNDING,
        _on_ipu(loss_scaling=[[0, 16], [2, 128]]),
    ),
    Trial(307, "output_mode sum: the same weights", {}, ROUNDING, _on_ipu(output_mode="sum")),
    Trial(
        308,
        "use_combined_accum: the same momentum",
        {},
        ROUNDING,
        _on_ipu(use_combined_accum=True),
    ),
    Trial(
        309,
        "Nesterov with a running mean is PyTorch's",
        {"optimizer": {"nesterov": True}},
        ROUNDING,
        _on_ipu(mean_reduction_strategy="running"),
    ),
    Trial(310, "Adam is PyTorch's", {"optimizer": {"name": "adam", "momentum": None}}, ROUNDING),
    Trial(
        311,
        "max_grad_norm clips by the norm of all stages",
        {"clip": {"norm": 0.05, "scope": "global"}},
        ROUNDING,
    ),
    Trial(312, "two updates in a call", {}, ROUNDING, _on_ipu(device_iterations=2)),
    Trial(313, "BatchNorm's running statistics come back", CONVOLUTIONS, ROUNDING),
    Trial(
        314,
        "8-bit images are normalized on the IPU",
        merge_keys(CONVOLUTIONS, BYTES),
        ROUNDING,
    ),
)


class Row(NamedTuple):
    """The result of a trial: `verdict` is equal, different or not run; `detail` says how far the
    weights are apart, or why it did not run."""

    number: int
    where: str
    what: str
    verdict: str
    detail: str


# ---- the machine


def describe_machine() -> dict[str, Any]:
    """Return what this machine has: versions, threads, clocks, CUDA devices, backends, IPUs."""
    cuda = get_kind("cuda")
    devices = range(cuda.count_devices() if cuda.is_available() else 0)
    return {
        "ipu_pipe": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": platform.platform(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "clock_ns": _measure_clock(),
        "gloo": dist.is_available() and dist.is_gloo_available(),
        "nccl": dist.is_available() and dist.is_nccl_available(),
        "cuda_devices": [cuda.get_name(i) for i in devices],
        "ipus": _count_ipus(),
    }


def _measure_clock() -> int:
    """Return the least difference of two readings of the clock of traces, in ns."""
    readings = [time.perf_counter_ns() for _ in range(2000)]
    return min(b - a for a, b in zip(readings, readings[1:]) if b > a)


def _count_ipus() -> str:
    """Return PopTorch's version and the largest power of two of IPUs that it can attach."""
    if importlib.util.find_spec("poptorch") is None:
        return "PopTorch is not installed"
    try:
        import poptorch

        counts = [n for n in (1, 2, 4, 8, 16, 32, 64) if poptorch.ipuHardwareIsAvailable(n)]
        version = getattr(poptorch, "__version__", "unknown")
        return f"PopTorch {version}, {max(counts, default=0)} IPUs"
    # its import fails in several ways where the SDK is not enabled
    except Exception as error:
        return f"PopTorch cannot be imported: {summarize(error)}"


# ---- trials


def configure_trial(trial: Trial, backend: dict[str, Any], precision: str = "float32") -> Config:
    """Return the config of a trial on a backend."""
    # another model has other arguments, and needs other data
    base = {k: v for k, v in BASE.items() if k not in ("model", "data") or k not in trial.keys}
    keys = merge_keys(base, trial.keys)
    keys = merge_keys(keys, {"backend": backend, "precision": precision})
    return configure(**keys)


def _run(trial: Trial, config: Config, folder: Path) -> dict[str, torch.Tensor]:
    """Train by a trial's config and return the weights of its last checkpoint."""
    train(config, folder, quiet=True)
    if trial.resumes:
        train(config, folder, quiet=True, resume_from=config.checkpoint_every)
    return read_weights(find_newest(folder))


def _compare(
    trial: Trial, where: str, actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]
) -> Row:
    """Return the row of a trial: the greatest difference of its weights by their greatest value."""
    worst = 0.0
    for name, weight in expected.items():
        if weight.is_floating_point():
            scale = max(float(weight.abs().max()), 1e-6)
            greatest = (actual[name].cpu() - weight.cpu()).abs().max()
            worst = max(worst, float(greatest) / scale)
    verdict = EQUAL if worst <= trial.tolerance else DIFFERENT
    detail = f"{worst:.2g} apart, at most {trial.tolerance:g}"
    return Row(trial.number, where, trial.what, verdict, detail)


def _attempt(trial: Trial, where: str, run: Callable[[], dict[str, torch.Tensor]]) -> Row:
    """Return the row of a trial whose run may fail: a fault is a difference."""
    try:
        with tempfile.TemporaryDirectory() as folder:
            config = configure_trial(trial, {"name": "emulator"})
            expected = _run(trial._replace(resumes=False), config, Path(folder))
        return _compare(trial, where, run(), expected)
    # whatever the machine or its SDK does is what this check is for
    except Exception as error:
        return Row(trial.number, where, trial.what, DIFFERENT, summarize(error))


def check_machine(say: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
    """Run all trials that this machine can run; return the report for `--json`."""
    machine = describe_machine()
    rows = []
    for row in _run_all(machine):
        say(f"{row.number} {row.what}: {row.verdict} ({row.detail})")
        rows.append(row)
    counts = {v: sum(row.verdict == v for row in rows) for v in (EQUAL, DIFFERENT, NOT_RUN)}
    return {
        "schema": 1,
        "machine": machine,
        "rows": [row._asdict() for row in rows],
        "equal": counts[EQUAL],
        "different": counts[DIFFERENT],
        "not_run": counts[NOT_RUN],
    }


def _run_all(machine: dict[str, Any]) -> Iterator[Row]:
    yield _attempt(PLAIN_TRIAL, "cpu", lambda: _train_plainly(PLAIN_TRIAL))
    if machine["cuda_devices"]:
        yield _attempt(CUDA_TRIAL, "cuda", lambda: _run_alone(CUDA_TRIAL, {"device": "cuda"}))
    else:
        yield from _leave_out([CUDA_TRIAL], "cuda", "no CUDA device")
    missing = describe_missing_support()
    if missing or not machine["gloo"]:
        yield from _leave_out(PROCESS_TRIALS, "gloo", missing or "torch.distributed has no gloo")
    else:
        yield from _run_on_processes("gloo", {})
    has_devices = machine["nccl"] and len(machine["cuda_devices"]) >= PROCESSES
    if missing or not has_devices:
        needs = f"needs {PROCESSES} CUDA devices and nccl"
        yield from _leave_out(PROCESS_TRIALS, "nccl", missing or needs)
    else:
        yield from _run_on_processes("nccl", {"device": "cuda"})
    yield from run_ipu_trials(machine["ipus"])


def _leave_out(trials: Sequence[Trial], where: str, why: str) -> Iterator[Row]:
    for trial in trials:
        yield Row(trial.number, where, trial.what, NOT_RUN, why)


def _run_alone(trial: Trial, backend: dict[str, Any]) -> dict[str, torch.Tensor]:
    with tempfile.TemporaryDirectory() as folder:
        return _run(trial, configure_trial(trial, {"name": "emulator", **backend}), Path(folder))


def _train_plainly(trial: Trial) -> dict[str, torch.Tensor]:
    """Train a trial by a loop of PyTorch alone and return the weights."""
    config = configure_trial(trial, {"name": "emulator"})
    seed = derive_seed(config.seed, "model")
    torch.manual_seed(seed)
    RandomStates.from_seed(seed).write()
    model = make_model(config)
    data = make_data(config)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for k in range(config.steps or 0):
        optimizer.zero_grad()
        for m in range(config.gradient_accumulation):
            index = k * config.gradient_accumulation + m
            x, y = data.train_batch(0, index, config.micro_batch_size)
            loss = torch.nn.functional.cross_entropy(model(x), y)
            (loss / config.gradient_accumulation).backward()
        optimizer.step()
    return {name: weight.detach() for name, weight in model.state_dict().items()}


# ---- two processes


def _run_on_processes(where: str, backend: dict[str, Any]) -> Iterator[Row]:
    """Run the trials of processes under torchrun, all in one group, and compare their weights."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc_per_node", str(PROCESSES), "-m", __name__, folder, json.dumps(backend)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        try:
            output = subprocess.run(
                command, capture_output=True, text=True, timeout=PATIENCE, env=environment
            ).stderr
        except subprocess.TimeoutExpired:
            output = f"the processes did not end in {PATIENCE} s"
        for i, trial in enumerate(PROCESS_TRIALS):
            run = Path(folder) / str(trial.number)
            if not (run / "done").is_file():
                why = find_first_error(Path(folder), output)
                yield Row(trial.number, where, trial.what, DIFFERENT, why)
                # the ranks ended at this trial
                rest = PROCESS_TRIALS[i + 1 :]
                yield from _leave_out(rest, where, f"the processes ended at row {trial.number}")
                return
            # the emulator runs on the CPU, whose sums have another order than a GPU's
            if backend:
                trial = trial._replace(tolerance=ROUNDING)
            yield _attempt(trial, where, lambda run=run: read_weights(find_newest(run)))  # type: ignore[misc]


def find_first_error(folder: Path, output: str) -> str:
    """Return why the ranks ended: the error of the first one that failed, or how it ended by
    torchrun's output.
    """
    with contextlib.suppress(FileNotFoundError):
        return (folder / FIRST_ERROR).read_text(encoding="utf-8")
    return describe_end(output) or "the processes left no checkpoint"


def run_rank(folder: str, backend: str) -> None:
    """Run the trials of processes as one rank of torchrun."""
    from ipu_pipe.backends.ranks import is_main
    from ipu_pipe.backends.table import leave

    try:
        for trial in PROCESS_TRIALS:
            run = Path(folder) / str(trial.number)
            config = configure_trial(trial, {"name": "distributed", **json.loads(backend)})
            _run(trial, config, run)
            if is_main():
                (run / "done").touch()
        leave()
    except Exception as error:
        # a rank that fails later fails because the first one is gone
        file = Path(folder) / FIRST_ERROR
        with contextlib.suppress(FileExistsError), open(file, "x", encoding="utf-8") as stream:
            stream.write(summarize(error))
        raise


# ---- IPUs


def run_ipu_trials(ipus: str) -> Iterator[Row]:
    """Run the trials of IPUs; `ipus`: what `describe_machine` found. Not run on hardware."""
    if not ipus.endswith(" IPUs"):
        yield from _leave_out(IPU_TRIALS, "ipu", ipus)
        return
    count = int(ipus.split()[-2])
    for trial in IPU_TRIALS:
        backend = merge_keys({"name": "poptorch"}, trial.device_keys.get("backend", {}))
        config = configure_trial(trial, backend, "32.32")
        needed = int(config.stages) * config.replicas  # type: ignore[call-overload]
        if needed > count:
            yield Row(trial.number, "ipu", trial.what, NOT_RUN, f"needs {needed} IPUs of {count}")
            continue
        with tempfile.TemporaryDirectory() as folder:
            yield _attempt(trial, "ipu", lambda: _run(trial, config, Path(folder)))  # noqa: B023


def format_report(report: dict[str, Any]) -> str:
    """Return the report for people: the machine, a table of the rows, and the counts."""
    machine = [f"{key}: {value}" for key, value in report["machine"].items()]
    head = ("no.", "where", "what", "verdict", "detail")
    rows = [[str(value) for value in row.values()] for row in report["rows"]]
    counts = (
        f"{report['equal']} equal, {report['different']} different; {report['not_run']} not run "
        f"here"
    )
    return "\n".join([*machine, "", *format_table(head, rows, left=5, most=len(rows)), "", counts])


if __name__ == "__main__":
    run_rank(*sys.argv[1:])
