"""Test that jobs start on the double with exactly the IPUs that they need, load data by
PopTorch's loader and its process, and continue, or end in one line, if a device, the data or a
measurement fails; configs for pods train, save and resume, small. Nothing here ran on an IPU."""

from __future__ import annotations

import io
import math
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, List

import pytest
import torch
from torch import nn

from ipu_pipe.backends.ipu import backend as row
from ipu_pipe.backends.ipu import blocks as ipu_blocks
from ipu_pipe.backends.ipu import engine as ipu_engine
from ipu_pipe.backends.ipu.config import DataLoading
from ipu_pipe.backends.ipu.feed import Calls, Feed, convert_input
from ipu_pipe.backends.processes import launch as processes
from ipu_pipe.backends.table import get_backend, make_engine
from ipu_pipe.config.load import load_config
from ipu_pipe.data.images import ImageFolder
from ipu_pipe.errors import BadInput, RunFault
from ipu_pipe.replay.run import Run
from ipu_pipe.run.train import train
from tests.support import ipu_runs
from tests.support.data import write_pictures
from tests.support.ipu_runs import PODS, Source, build_small_pod_job
from tests.support.runs import ROOT, read_json
from tests.support.slow import mark_slow

pytest_plugins = ["poptorch_double"]  # the fixture `poptorch`
ASYNC = {"data_loading": {"mode": "async"}}


# ---- the configs for pods


@pytest.mark.parametrize(
    "path", mark_slow(PODS, lambda path: path in PODS[::9]), ids=lambda path: str(path.stem)
)
def test_a_pods_job_starts_with_exactly_its_ipus(
    path: Path, poptorch: Any, monkeypatch: Any
) -> None:
    config, job = load_config(path), build_small_pod_job(path)
    pod = int(re.findall(r"pod(\d+)", path.stem)[0])
    assert config.data.name == "image_folder" and config.precision == "16.16"
    if path.stem.startswith("pod"):
        batch = config.micro_batch_size * config.gradient_accumulation * config.replicas
        assert config.epochs == 90 and config.optimizer.lr == pytest.approx(0.1 * batch / 256)
    if config.backend.ipu.local == "decoupled":
        assert config.backend.ipu.ipu_ids == [0, 1, 2, 3] and "4 blocks on 4 IPUs" in job.note
        compile_block(job, poptorch, monkeypatch, rank=2)
        return
    assert len(job.partition) == config.stages and config.stages * config.replicas == pod
    engine = make_engine(job, 0, job.table)
    x, y = engine.feed.take()  # type: ignore[attr-defined]
    executors = engine.executors  # type: ignore[attr-defined]
    executors.training.compile(x, y)
    executors.training.detachFromDevice()
    executors.make_inference()  # by all replicas
    assert [result.ipus for result in poptorch.recorded.compilations] == [pod, pod]
    result = poptorch.recorded.compilations[0]
    assert result.forward_stages == config.stages
    assert result.micro_batch[0][0] == config.micro_batch_size
    assert path.stem.startswith("graphcore") or result.options["location_optimizer"]["onChip"] == 0
    engine.abort()
    assert poptorch._device.ipus_by_holder == {}


def compile_block(job: Any, poptorch: Any, monkeypatch: Any, rank: int) -> None:
    """Compile a rank's block in this process, and assert that it has the rank's own IPU."""
    world = job.config.stages
    group = SimpleNamespace(get_rank=lambda: rank, get_world_size=lambda: world)
    for module in (ipu_blocks, ipu_engine):
        monkeypatch.setattr(module, "dist", group)
    monkeypatch.setattr(ipu_engine, "are_joined", lambda: True)
    run = Run.of(job, get_backend(job.config).make_options(job))
    engine = ipu_blocks.BlockEngine(run, 0, job.table)
    count = job.config.gradient_accumulation
    x = torch.zeros(engine.example.shape)
    engine.executors.training.compile(
        convert_input(torch.cat([x] * count), "16.16"), torch.cat([job.example[1]] * count)
    )
    assert list(poptorch._device.holder_by_id) == [rank]
    engine.abort()


def make_small(path: Path) -> Any:
    """Return the config with images of 32x32, few microbatches and at most two replicas."""
    config = load_config(path)
    data = "name: synthetic, shape: [3, 32, 32], classes: 1000, subset: 512, test_subset: 8, root: null, threads: null"
    changes = [
        "hardware=null", "backend.ipu.data_loading.mode=sync", "backend.ipu.executable_cache=null", f"data={{{data}}}",
        # BatchNorm of few numbers is not a number in half precision
        f"micro_batch_size={8 if config.model.args['norm'] == 'batch' else 2}",
        f"gradient_accumulation={max(2 * config.stages - 1, 2)}", "replicas=2", "steps=2", "checkpoint={every: 1}",
    ]  # fmt: skip
    return load_config(path, changes)


# of about 40 s each, one of each kind
@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["pod16_resnet18_local", "pod16_resnet18_pipelined", "graphcore_pod16_resnet50"]
)
def test_a_config_trains_saves_and_resumes_on_the_double(
    name: str, poptorch: Any, monkeypatch: Any, tmp_path: Path
) -> None:
    monkeypatch.setenv("POPTORCH_DOUBLE_IPUS", "64")
    config = make_small(ROOT / "configs" / "pod" / f"{name}.yaml")
    first = train(config, tmp_path, quiet=True)["final"]
    assert math.isfinite(first["train_loss"]) and math.isfinite(first["test_loss"])
    resumed = train(config, tmp_path, quiet=True, resume_from=1)
    assert resumed["final"]["test_loss"] == pytest.approx(first["test_loss"], rel=1e-3)


# ---- small runs


def configure_small_run(ipu: Any = None, **keys: Any) -> Any:
    """Return a config of four updates of 4 microbatches on two IPUs."""
    return ipu_runs.make_ipu_config(
        on="poptorch", ipu=ipu, **{"gradient_accumulation": 4, "steps": 4, "stages": 2, **keys}
    )


def run_small(settings: Any, out: Path, **keys: Any) -> None:
    ipu_runs.train_small_run(settings, out, "two", **keys)


# ---- loading


@pytest.mark.parametrize("at, error, kind, line", [
    (9, ValueError("no such\npicture"), RunFault, "poptorch: loading data: ValueError: no such$"),
    (9, BadInput("data.root: x.jpg: is no picture"), BadInput, "data.root: x.jpg: is no picture$"),
    (1, OSError("disk"), RunFault, "poptorch: loading data: OSError: disk$"),  # while the process starts
    (9, SystemExit(1), RunFault, ".*the worker process exited without an error message .*/dev/shm"),
])  # fmt: skip
def test_a_fault_of_the_loading_process_is_reported_with_its_cause(
    poptorch: Any, tmp_path: Path, capfd: Any, at: int, error: Any, kind: Any, line: str
) -> None:
    with pytest.raises(kind, match=f"^{line}"):
        run_small(configure_small_run(ASYNC), tmp_path, data=Source(at, error))
    assert "Traceback" not in capfd.readouterr().err


class RecordingSource(Source):
    """Data source that records the indices of each request for several microbatches."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: List[Any] = []

    def train_batches(self, epoch: int, indices: Any, size: int) -> Any:
        self.requests.append(list(indices))
        pairs = [super(RecordingSource, self).train_batch(epoch, index, size) for index in indices]
        return torch.cat([x for x, _ in pairs]), torch.cat([y for _, y in pairs])


def test_a_calls_microbatches_are_read_together(poptorch: Any, tmp_path: Path) -> None:
    """Story: microbatches were requested one at a time, so that no more threads decoded images
    than a microbatch has samples."""
    source = RecordingSource()
    run_small(configure_small_run(), tmp_path, data=source)
    assert [*range(4)] in source.requests and max(map(len, source.requests)) == 4


def test_images_are_read_by_a_forked_process(
    poptorch: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    """Story: a forked process has no threads of its parent, and waited for them without end."""
    write_pictures(tmp_path, 4, train=4, val=4)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    source = ImageFolder(str(tmp_path), seed=1, size=8, threads=1)
    first = source.train_batch(0, 0, 2)  # its threads are there
    settings = configure_small_run(gradient_accumulation=2, method="naive")
    calls = Calls(source, settings, 4, range(2), range(1))
    feed = Feed(calls, DataLoading(mode="async", sharing_strategy="fork"), poptorch.Options())
    x, y = feed.take()
    # the worker's report of its faults
    assert [path.suffix for path in tmp_path.glob("ipu_pipe-*")] == [".json"]
    feed.close()
    assert list(tmp_path.glob("ipu_pipe-*")) == []
    assert torch.equal(x[:2], first[0]) and torch.equal(y[:2], first[1]) and len(x) == 4


# ---- devices


@pytest.mark.parametrize("ipu, ipus, events", [
    (ASYNC, "", ["compile", "attach", "detach", "compile", "attach"]),
    ({"options": {"useOfflineIpuTarget": 2}, "executable_cache": "cache"}, "0", ["compile", "compile"]),
])  # fmt: skip
def test_compiling_alone_takes_the_ipus_of_one_model_or_of_none(
    poptorch: Any, tmp_path: Path, capsys: Any, monkeypatch: Any, ipu: Any, ipus: str, events: Any
) -> None:
    if ipus:
        monkeypatch.setenv("POPTORCH_DOUBLE_IPUS", ipus)
    with pytest.raises(SystemExit) as exit_error:
        run_small(configure_small_run({"compile_only": True, **ipu}), tmp_path)
    assert exit_error.value.code == 0
    assert "compiled for 2 IPUs x replicas 1" in capsys.readouterr().out
    recorded = [event for event, _ in poptorch.recorded.events]
    assert [event for event in recorded if event in ("compile", "attach", "detach")] == events
    assert [one.training for one in poptorch.recorded.compilations] == [True, False]
    assert poptorch._device.ipus_by_holder == {}
    assert poptorch.recorded.runs == poptorch.recorded.of("DataLoader") == []


@pytest.mark.slow
def test_all_replicas_evaluate_and_combined_velocities_are_scaled(
    poptorch: Any, tmp_path: Path
) -> None:
    ipu = {"use_combined_accum": True, "loss_scaling": 64.0}
    run_small(configure_small_run(ipu, replicas=2), tmp_path)
    # microbatch x stages x replicas, of 50 samples
    evaluated = [one.shapes[0][0] for one in poptorch.recorded.runs if not one.updates]
    assert evaluated == [2 * 2 * 2] * (2 * 7)
    # combined velocities are scaled as the loss is
    groups = ipu_runs.find_compilation(poptorch).optimizer["groups"]
    assert {group["velocity_scaling"][0] for group in groups} == {64.0}


# ---- around it


def test_class_weights_are_refused_with_a_remedy(poptorch: Any, tmp_path: Path) -> None:
    with pytest.raises(RunFault, match=r"Parameter .weight. is unsupported .*reduction='none'"):
        run_small(configure_small_run(), tmp_path, loss=nn.CrossEntropyLoss(weight=torch.ones(4)))


def test_a_run_continues_without_latencies(poptorch: Any, tmp_path: Path, monkeypatch: Any) -> None:
    def raise_mismatch(self: Any) -> Any:
        raise AssertionError("Internal PopTorch error: mismatching number of start timestamps")

    for name in ("getLatency", "getHostIpuLatency", "cycleCount"):
        monkeypatch.setattr(poptorch.PoplarExecutor, name, raise_mismatch)
    run_small(configure_small_run({"options": {"logCycleCount": True}}), tmp_path)
    content = read_json(tmp_path / "ipu.json")
    assert set(content["latency_seconds"]) == {"compute", "ipu_to_host"}
    assert content["cycles_of_the_last_call"] is None


def test_poptorch_is_imported_with_a_stderr_that_is_a_file(poptorch: Any, monkeypatch: Any) -> None:
    import builtins

    real, descriptors = builtins.__import__, []

    def import_and_record(name: str, *rest: Any, **keys: Any) -> Any:
        if name == "poptorch":
            descriptors.append(sys.stderr.fileno())
        return real(name, *rest, **keys)

    notebook = io.StringIO()
    monkeypatch.setattr(builtins, "__import__", import_and_record)
    monkeypatch.setattr(sys, "stderr", notebook)
    row.start(configure_small_run(), {})
    assert len(descriptors) == 1 and sys.stderr is notebook


@pytest.mark.parametrize(("version", "taken_down"), [("2.0.1+cpu", 0), ("2.4.0", 1)])
def test_a_group_that_could_hang_when_taken_down_stays(
    version: str, taken_down: int, monkeypatch: Any
) -> None:
    calls: List[int] = []
    group = SimpleNamespace(
        is_initialized=lambda: True,
        barrier=lambda: None,
        destroy_process_group=lambda: calls.append(1),
    )
    monkeypatch.setattr(processes, "dist", group)
    monkeypatch.setattr(torch, "__version__", version)
    processes.leave()
    assert len(calls) == taken_down
