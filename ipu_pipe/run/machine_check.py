"""Check a machine: what it has, then small runs on it, each equal to the emulator.

    1xx  this process: the emulator against a plain loop of PyTorch, and on each kind of accelerator
    2xx  two processes (gloo, nccl with two CUDA devices, other accelerators): stages, replicas,
         blocks, resume
    3xx  IPUs: each row is an assumption about PopTorch that nothing but an IPU can confirm; the
         numbers are those of docs/ipu.md
    4xx  XLA's devices, of each platform that jax has: run on its CPU, on no TPU or Tenstorrent card

A row that cannot run here is listed with the reason and not counted. No row was run on an IPU.
"""

from __future__ import annotations

import contextlib
import functools
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
from ipu_pipe.backends.ranks import read_torch_version
from ipu_pipe.backends.xla.devices import list_devices, measure_product_error
from ipu_pipe.config.load import configure, merge_keys
from ipu_pipe.config.schema import Config
from ipu_pipe.errors import BadInput, summarize
from ipu_pipe.job.factories import make_data, make_model
from ipu_pipe.launcher import describe_end
from ipu_pipe.model.devices import get_kind, list_accelerators
from ipu_pipe.model.randomness import RandomStates, derive_seed
from ipu_pipe.pipeline.pipeline import Pipeline
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
# the file of the weights of a trial of sharded weights
SHARDED = "sharded.pt"

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
    # in the middle, where a row that resumes goes on
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
    `resumes`: it is stopped in the middle and resumed. `is_sharded`: a loop of the caller's
    own, whose weights FSDP2 shards over the processes. On the emulator, float64 ends within a tenth
    of the tolerance, so a difference is not rounding; where it does not, none is counted.
    """

    number: int
    what: str
    keys: dict[str, Any]
    tolerance: float = 0.0
    device_keys: dict[str, Any] = {}
    resumes: bool = False
    is_sharded: bool = False


# PopTorch's and CUDA's numbers differ from those of torch on a CPU by rounding alone
ROUNDING = 1e-4

PLAIN_TRIAL = Trial(101, "the emulator against a plain loop of PyTorch", {"stages": 1}, 1e-5)

# a device must read the weights that a parameter holds at the time of a pass
_IN_FLIGHT = {"stages": 4, "gradient_accumulation": 2, "steps": 8}
DEVICE_TRIALS = (
    Trial(102, "the emulator on an accelerator", {}, ROUNDING),
    Trial(
        103,
        "weights swapped between passes (p.data = other)",
        {"method": "pipedream", **_IN_FLIGHT},
        ROUNDING,
    ),
    Trial(
        104,
        "weights overwritten between passes (p.data.copy_(other))",
        {"method": "pipemare", **_IN_FLIGHT},
        ROUNDING,
    ),
)

PROCESS_TRIALS = (
    Trial(201, "pipeline of two stages", {}),
    Trial(202, "asynchronous pipeline with stashed weights", {"method": "pipedream"}),
    Trial(203, "two replicas, gradients all-reduced", {"stages": 1, "replicas": 2}, 1e-5),
    Trial(204, "blocks with losses of their own", {"method": "local_greedy"}),
    Trial(205, "checkpoint and resume", {"method": "pipedream_2bw"}, resumes=True),
    Trial(
        206,
        "weights sharded by FSDP2 on a device mesh",
        {"method": "pipedream", "stages": 1, "replicas": 2},
        1e-5,
        is_sharded=True,
    ),
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
        # the scaling changes in the middle of the run, and the velocity must with it
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
        _on_ipu(options={"Training.setMeanAccumulationAndReplicationReductionStrategy": "Running"}),
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


# at this rate PipeDream and 2BW end 0.016 and 0.09 from GPipe, and TF32's products 0.0004 from float32's
_FAST: dict[str, Any] = {"optimizer": {"lr": 0.3}}
XLA_TRIALS = (
    Trial(401, "a pipeline of two stages that flushes", _FAST),
    Trial(402, "stashed weights", {**_FAST, "method": "pipedream"}),
    Trial(403, "two versions, resumed", {**_FAST, "method": "pipedream_2bw"}, resumes=True),
)
# coarser products hide the difference between methods
COARSEST_PRODUCT = 1e-3


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
        "accelerators": [kind.name for kind in list_accelerators()],
        "ipus": _count_ipus(),
    }


def _measure_clock() -> int:
    """Return the least difference of two readings of the clock of traces, in ns."""
    readings = [time.perf_counter_ns() for _ in range(2000)]
    # a clock coarser than a reading gives equal ones
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
        # a finished run goes on only from an older checkpoint
        train(config, folder, quiet=True, resume_from=config.checkpoint_every)
    return read_weights(find_newest(folder))


def _compare(
    trial: Trial, where: str, actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]
) -> Row:
    """Return the row of a trial: the greatest difference of its weights by their greatest value."""
    differences = [
        # a weight may be all 0, as a new bias is
        (actual[name].cpu() - weight.cpu()).abs().max() / weight.cpu().abs().max().clamp(min=1e-6)
        for name, weight in expected.items()
        # BatchNorm's num_batches_tracked is a whole number
        if weight.is_floating_point()
    ]
    # of torch: Python's own max would pass over what is not a number
    worst = float(torch.stack(differences).max())
    # NaN is at most nothing, and so different
    verdict = EQUAL if worst <= trial.tolerance else DIFFERENT
    detail = f"{worst:.2g} apart, at most {trial.tolerance:g}"
    return Row(trial.number, where, trial.what, verdict, detail)


def _attempt(trial: Trial, where: str, run: Callable[[], dict[str, torch.Tensor]]) -> Row:
    """Return the row of a trial whose run may fail: a fault is a difference."""
    try:
        with tempfile.TemporaryDirectory() as folder:
            config = configure_trial(trial, {"name": "emulator"})
            # without an interruption, so that a resumed run is compared with one that went through
            expected = _run(trial._replace(resumes=False), config, Path(folder))
        row = _compare(trial, where, run(), expected)
        return row if row.verdict == EQUAL else _compare_with_rounding(trial, row, expected)
    # whatever the machine or its SDK does is what this check is for
    except Exception as error:
        return Row(trial.number, where, trial.what, DIFFERENT, summarize(error))


def _compare_with_rounding(trial: Trial, row: Row, expected: dict[str, torch.Tensor]) -> Row:
    """Return the row of a difference as not run if rounding alone may have made it: if on the
    emulator float64 ends further from float32 than a tenth of the tolerance.
    """
    # without a tolerance all that runs here must be equal to the bit
    if not trial.tolerance:
        return row
    trial = trial._replace(tolerance=trial.tolerance / 10, resumes=False)
    with tempfile.TemporaryDirectory() as folder:
        config = configure_trial(trial, {"name": "emulator"}, "float64")
        twin = _compare(trial, row.where, expected, _run(trial, config, Path(folder)))
    if twin.verdict == EQUAL:
        return row
    detail = f"{row.detail}; but float32 and float64 on the emulator are {twin.detail}"
    return row._replace(verdict=NOT_RUN, detail=detail)


def check_machine(say: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
    """Run all trials that this machine can run; return the report for `--json`."""
    machine = describe_machine()
    rows = []
    for row in _run_all(machine):
        # at once: all rows together take minutes
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
    missing = describe_missing_support()
    for device in machine["accelerators"]:
        yield from run_device_trials(device)
        # CUDA's processes talk by nccl, below
        if device != "cuda" and not missing:
            yield from _run_on_processes(device, {"device": device})
    if not machine["accelerators"]:
        yield from _leave_out(DEVICE_TRIALS, "accelerator", "torch has none here")
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
    for platform_name in ("cpu", "tpu", "tt"):
        yield from run_xla_trials(platform_name)


def run_device_trials(device: str) -> Iterator[Row]:
    """Run the emulator on a kind of device, and compare with the CPU."""
    for trial in DEVICE_TRIALS:
        yield _attempt(trial, device, lambda trial=trial: _run_alone(trial, {"device": device}))  # type: ignore[misc]


def _leave_out(trials: Sequence[Trial], where: str, why: str) -> Iterator[Row]:
    for trial in trials:
        yield Row(trial.number, where, trial.what, NOT_RUN, why)


def _run_alone(trial: Trial, backend: dict[str, Any]) -> dict[str, torch.Tensor]:
    with tempfile.TemporaryDirectory() as folder:
        return _run(trial, configure_trial(trial, {"name": "emulator", **backend}), Path(folder))


def _train_plainly(trial: Trial) -> dict[str, torch.Tensor]:
    """Train a trial by a loop of PyTorch alone and return the weights."""
    config = configure_trial(trial, {"name": "emulator"})
    model = _make_seeded_model(config)
    data = make_data(config)
    # those of BASE
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for k in range(config.steps or 0):
        optimizer.zero_grad()
        for m in range(config.gradient_accumulation):
            index = k * config.gradient_accumulation + m
            x, y = data.train_batch(0, index, config.micro_batch_size)
            loss = torch.nn.functional.cross_entropy(model(x), y)
            # an update's gradient is the mean over its microbatches
            (loss / config.gradient_accumulation).backward()
        optimizer.step()
    return {name: weight.detach() for name, weight in model.state_dict().items()}


def _make_seeded_model(config: Config) -> torch.nn.Module:
    RandomStates.from_seed(derive_seed(config.seed, "model")).write()
    return make_model(config)


# ---- two processes


def _train_sharded(config: Config, file: Path) -> None:
    """Train by a loop of the caller's own on a mesh of one stage and all ranks, and write the
    weights.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (1, PROCESSES), mesh_dim_names=("stages", "data"))
    model = _make_seeded_model(config)
    data = make_data(config)
    count = config.gradient_accumulation
    with Pipeline(
        model,
        torch.nn.functional.cross_entropy,
        torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        config.method,
        stages=1,
        microbatches=count,
        backend="distributed",
        process_group=mesh["stages"].get_group(),
        data_group=mesh["data"].get_group(),
        prepare_stage=lambda stage, index: fully_shard(stage, mesh=mesh["data"]),
    ) as pipe:
        for k in range(config.steps or 0):
            # replicas take turns in the data, as in a run of a config
            numbers = [(k * count + i) * PROCESSES + pipe.replica for i in range(count)]
            pipe.step(
                microbatches=[data.train_batch(0, m, config.micro_batch_size) for m in numbers]
            )
        state = pipe.state_dict()
    if dist.get_rank() == 0:
        torch.save(state["model"], file)


def _run_on_processes(where: str, backend: dict[str, Any]) -> Iterator[Row]:
    """Run the trials of processes under torchrun, all in one group, and compare their weights."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        # this module is the program of each rank, too: `run_rank`
        command += ["--nproc_per_node", str(PROCESSES), "-m", __name__, folder, json.dumps(backend)]
        # torchrun would set it too, with a warning
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        try:
            output = subprocess.run(
                command, capture_output=True, text=True, timeout=PATIENCE, env=environment
            ).stderr
        except subprocess.TimeoutExpired:
            output = f"the processes did not end in {PATIENCE} s"
        for i, trial in enumerate(PROCESS_TRIALS):
            why_not = explain_missing_shards(trial, where)
            if why_not:
                yield from _leave_out([trial], where, why_not)
                continue
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
            yield _attempt(trial, where, functools.partial(_read_run, trial, run))


def _read_run(trial: Trial, run: Path) -> dict[str, torch.Tensor]:
    """Return the last weights of a run of two processes."""
    weights: dict[str, torch.Tensor] = (
        torch.load(run / SHARDED) if trial.is_sharded else read_weights(find_newest(run))
    )
    return weights


def explain_missing_shards(trial: Trial, where: str) -> str:
    """Return why a trial of sharded weights cannot run here, '' if it can."""
    if not trial.is_sharded:
        return ""
    if read_torch_version() < (2, 6):
        return f"needs torch 2.6, this is {torch.__version__}"
    return "" if where == "gloo" else "needs four GPUs and a group of your own: tests/test_mesh.py"


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

    settings = json.loads(backend)
    try:
        for trial in PROCESS_TRIALS:
            run = Path(folder) / str(trial.number)
            config = configure_trial(trial, {"name": "distributed", **settings})
            if explain_missing_shards(trial, "nccl" if "device" in settings else "gloo"):
                continue
            if trial.is_sharded:
                run.mkdir(parents=True, exist_ok=True)
                _train_sharded(config, run / SHARDED)
            else:
                _run(trial, config, run)
            if is_main():
                # a run that failed may have left a checkpoint, too
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
        # in half precision no run would equal the emulator
        config = configure_trial(trial, backend, "32.32")
        needed = int(config.stages) * config.replicas  # type: ignore[call-overload]
        if needed > count:
            yield Row(trial.number, "ipu", trial.what, NOT_RUN, f"needs {needed} IPUs of {count}")
            continue
        with tempfile.TemporaryDirectory() as folder:
            yield _attempt(trial, "ipu", lambda: _run(trial, config, Path(folder)))  # noqa: B023


# ---- XLA's devices


def run_xla_trials(platform_name: str) -> Iterator[Row]:
    """Run the trials of XLA's devices on a platform, with a tolerance by its products' error."""
    where = f"xla {platform_name}"
    backend = {"name": "xla", "platform": platform_name}
    try:
        device = list_devices(configure_trial(XLA_TRIALS[0], backend).backend)[0]
        product_error = measure_product_error(device)
    except BadInput as error:
        yield from _leave_out(XLA_TRIALS, where, summarize(error))
        return
    # a device may fail in any way, and the other rows are of use
    except Exception as error:
        yield Row(XLA_TRIALS[0].number, where, "a product", DIFFERENT, summarize(error))
        return
    if product_error > COARSEST_PRODUCT:
        why = f"products are {product_error:.1g} off, more than {COARSEST_PRODUCT:g}"
        yield from _leave_out(XLA_TRIALS, where, why)
        return
    for trial in XLA_TRIALS:
        trial = trial._replace(tolerance=max(ROUNDING, 5 * product_error))
        config = configure_trial(trial, backend)
        with tempfile.TemporaryDirectory() as folder:
            yield _attempt(trial, where, lambda: _run(trial, config, Path(folder)))  # noqa: B023


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
