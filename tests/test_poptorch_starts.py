"""Test that jobs start on the double with exactly the IPUs that they need, load data by
PopTorch's loader and its process, and continue, or end in one line, if a device, the data or a
measurement fails. Nothing here ran on an IPU."""

from __future__ import annotations

import functools
import io
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, List

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ipu_pipe.backends.ipu import backend as row
from ipu_pipe.backends.ipu import blocks as ipu_blocks
from ipu_pipe.backends.ipu import engine as ipu_engine
from ipu_pipe.backends.ipu.config import DataLoading
from ipu_pipe.backends.ipu.feed import Calls, Feed, convert_input
from ipu_pipe.backends.ipu.profile import CallTimes
from ipu_pipe.backends.processes import launch as processes
from ipu_pipe.backends.table import get_backend, make_engine
from ipu_pipe.config.load import load_config
from ipu_pipe.data.images import ImageFolder
from ipu_pipe.errors import BadInput, RunFault
from ipu_pipe.replay.run import Run
from ipu_pipe.run.build import build
from models.transformer import transformer_lm, transformer_translation
from tests.support import ipu_runs
from tests.support.data import write_pictures
from tests.support.ipu_runs import PODS, Source, build_small_pod_job, make_ipu_model
from tests.support.runs import assert_same_weights, read_json
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
        compile_blocks(job, poptorch, monkeypatch, pod)
        return
    assert len(job.partition) == config.stages and config.stages * config.replicas == pod
    engine = make_engine(job, 0, job.table)
    x, y = engine.feed.take()  # type: ignore[attr-defined]
    executors = engine.executors  # type: ignore[attr-defined]
    assert (
        len(x) == job.global_batch_size and x.dtype == convert_input(job.example[0], "16.16").dtype
    )
    executors.training.compile(x, y)
    assert sum(poptorch._device.ipus_by_holder.values()) == poptorch._device.largest[0] == pod
    executors.training.detachFromDevice()
    executors.make_inference()
    assert (
        sum(poptorch._device.ipus_by_holder.values()) == poptorch._device.largest[0] == pod
    )  # by all replicas
    assert [result.ipus for result in poptorch.recorded.compilations] == [pod, pod]
    result = poptorch.recorded.compilations[0]
    assert (
        result.forward_stages == config.stages
        and result.micro_batch[0][0] == config.micro_batch_size
    )
    assert path.stem.startswith("graphcore") or result.options["location_optimizer"]["onChip"] == 0
    (loader,) = poptorch.recorded.of("DataLoader")
    assert loader["mode"] == poptorch.DataLoaderMode.Async and loader["drop_last"] is False
    engine.abort()
    assert poptorch._device.ipus_by_holder == {}


def compile_blocks(job: Any, poptorch: Any, monkeypatch: Any, pod: int) -> None:
    """Compile every rank's block, one after the other in this process, and assert that each has
    its own IPU."""
    monkeypatch.setenv("POPTORCH_DOUBLE_IPUS", str(pod))
    engines = []
    for rank in range(pod):
        group = SimpleNamespace(get_rank=lambda rank=rank: rank, get_world_size=lambda: pod)
        for module in (ipu_blocks, ipu_engine):
            monkeypatch.setattr(module, "dist", group)
        monkeypatch.setattr(ipu_engine, "are_joined", lambda: True)
        run = Run.of(job, get_backend(job.config).make_options(job))
        engine = ipu_blocks.BlockEngine(run, 0, job.table)
        x, y = job.example
        shape = x.shape if not rank else engine.example.shape
        count = job.config.gradient_accumulation
        one = x if not rank else torch.zeros(shape)
        engine.executors.training.compile(
            convert_input(torch.cat([one] * count), "16.16"), torch.cat([y] * count)
        )
        engines.append(engine)
    assert sorted(poptorch._device.holder_by_id) == list(range(pod))
    for engine in engines:
        engine.abort()


# ---- small runs


def configure_small_run(ipu: Any = None, **keys: Any) -> Any:
    """Return a config of four updates of 4 microbatches on two IPUs."""
    return ipu_runs.make_ipu_config(
        on="poptorch", ipu=ipu, **{"gradient_accumulation": 4, "steps": 4, "stages": 2, **keys}
    )


def run_small(settings: Any, out: Path, **keys: Any) -> None:
    ipu_runs.train_small_run(settings, out, "two", **keys)


# ---- loading


def test_a_fault_of_the_loading_process_is_reported_with_its_cause(
    poptorch: Any, tmp_path: Path, capfd: Any
) -> None:
    cases = [
        (
            9,
            ValueError("no such\npicture"),
            RunFault,
            "poptorch: loading data: ValueError: no such",
        ),
        (
            9,
            BadInput("data.root: x.jpg: is no picture"),
            BadInput,
            "data.root: x.jpg: is no picture",
        ),
        (
            1,
            OSError("disk"),
            RunFault,
            "poptorch: loading data: OSError: disk",
        ),  # while the process starts
    ]
    for at, error, kind, line in cases:
        with pytest.raises(kind) as caught:
            run_small(configure_small_run(ASYNC), tmp_path, data=Source(at, error))
        assert str(caught.value) == line
    with pytest.raises(
        RunFault,
        match="the worker process exited without an error message .*: is there room .*/dev/shm",
    ):
        run_small(configure_small_run(ASYNC), tmp_path, data=Source(9, SystemExit(1)))
    assert "Traceback" not in capfd.readouterr().err


def test_a_report_is_removed_when_the_feed_is_closed(
    poptorch: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    options = poptorch.Options()
    calls = Calls(Source(), configure_small_run(), 10, range(2), range(1))
    feed = Feed(calls, DataLoading(mode="async", sharing_strategy="fork"), options)
    assert [path.suffix for path in tmp_path.glob("ipu_pipe-*")] == [".json"] and len(
        feed.take()
    ) == 2
    feed.close()
    assert list(tmp_path.glob("ipu_pipe-*")) == []


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
    run_small(configure_small_run(), tmp_path / "together", data=source)
    run_small(configure_small_run(), tmp_path / "alone")
    assert [*range(4)] in source.requests and max(map(len, source.requests)) == 4
    assert_same_weights(tmp_path / "together", tmp_path / "alone")


def test_images_are_read_by_a_forked_process(poptorch: Any, tmp_path: Path) -> None:
    """Story: a forked process has no threads of its parent, and waited for them without end."""
    write_pictures(tmp_path, 4, train=4, val=4)
    source = ImageFolder(str(tmp_path), seed=1, size=8, threads=1)
    first = source.train_batch(0, 0, 2)  # its threads are there
    settings = configure_small_run(gradient_accumulation=2, method="naive")
    calls = Calls(source, settings, 4, range(2), range(1))
    feed = Feed(calls, DataLoading(mode="async", sharing_strategy="fork"), poptorch.Options())
    x, y = feed.take()
    feed.close()
    assert torch.equal(x[:2], first[0]) and torch.equal(y[:2], first[1]) and len(x) == 4


# ---- devices


@pytest.mark.slow
def test_a_lost_device_that_cannot_be_read_gives_its_ipus_back(
    poptorch: Any, tmp_path: Path, capsys: Any
) -> None:
    """destroy() raises before it frees anything, and the frames of the error refer to the
    session: with exactly as many IPUs as the job needs, the next session gets them only after
    all of that is gone."""
    run_small(configure_small_run(), tmp_path / "plain")
    for optimizer in (ipu_runs.SGD, {"name": "adam", "lr": 0.01}):
        poptorch.recorded.fail("execute", 14)  # 13 calls evaluate
        run_small(configure_small_run(optimizer=optimizer), tmp_path / "lost")
        assert "restarting from update 0; repeating 0 updates" in capsys.readouterr().err
        if optimizer["name"] == "sgd":
            assert_same_weights(tmp_path / "plain", tmp_path / "lost")
    assert poptorch._device.largest == [2] and poptorch._device.ipus_by_holder == {}


def test_a_stored_fault_keeps_no_ipu_in_use(poptorch: Any, tmp_path: Path) -> None:
    poptorch.recorded.fail(
        "execute", 15, poptorch.UnrecoverableError("dead", "poplar_unrecoverable_error")
    )
    with pytest.raises(RunFault, match="poplar_unrecoverable_error: dead") as caught:
        run_small(configure_small_run(), tmp_path)
    assert poptorch._device.ipus_by_holder == {} and caught.value.__cause__ is not None


def test_compiling_alone_takes_the_ipus_of_one_model(
    poptorch: Any, tmp_path: Path, capsys: Any
) -> None:
    with pytest.raises(SystemExit) as exit_error:
        run_small(configure_small_run({"compile_only": True, **ASYNC}), tmp_path)
    assert (
        exit_error.value.code == 0
        and "compiled for 2 IPUs x replicas 1; nothing was run" in capsys.readouterr().out
    )
    assert [event for event, _ in poptorch.recorded.events if event in ("compile", "attach", "detach")] == [
        "compile", "attach", "detach", "compile", "attach",
    ]  # fmt: skip
    assert poptorch._device.ipus_by_holder == {} and poptorch.recorded.of("DataLoader") == []


def test_all_replicas_evaluate_and_round_to_nearest(poptorch: Any, tmp_path: Path) -> None:
    run_small(configure_small_run({"stochastic_rounding": True}, replicas=2), tmp_path)
    training, inference = (
        next(c.options for c in poptorch.recorded.compilations if c.training == kind)
        for kind in (True, False)
    )
    assert (
        training["enableStochasticRounding"] is True
        and inference["enableStochasticRounding"] is False
    )
    assert inference["replication_factor"] == 2
    evaluated = [one.shapes[0][0] for one in poptorch.recorded.runs if not one.updates]
    assert (
        set(evaluated) == {2 * 2 * 2} and len(evaluated) == 2 * 7
    )  # microbatch x stages x replicas, of 50 samples


# ---- optimizers


def test_the_optimizer_of_the_caller_counts_not_the_configs(poptorch: Any) -> None:
    def build_job(ipu: Any, users_optimizer: Any, **keys: Any) -> Any:
        return build(
            configure_small_run(ipu, **keys),
            make_ipu_model("two"),
            Source(),
            optimizer=users_optimizer,
        )

    sgd = functools.partial(torch.optim.SGD, lr=0.1)
    build_job({"use_combined_accum": True}, sgd, optimizer={"name": "adam"})
    build_job({}, sgd, optimizer={"name": "sgd", "momentum": 0.9, "nesterov": True})
    with pytest.raises(BadInput, match="optimizer.amsgrad: true: "):
        build_job({}, functools.partial(torch.optim.Adam, lr=0.1, amsgrad=True))
    with pytest.raises(BadInput, match="optimizer.nesterov: true: "):
        build_job({}, functools.partial(sgd, momentum=0.9, nesterov=True))
    strategy = "Training.setMeanAccumulationAndReplicationReductionStrategy"
    running = {"options": {strategy: "Running"}}
    build_job(running, functools.partial(sgd, momentum=0.9, nesterov=True))


def test_combined_velocities_are_scaled_as_the_loss_is(poptorch: Any, tmp_path: Path) -> None:
    run_small(
        configure_small_run({"use_combined_accum": True, "loss_scaling": 64.0}, steps=2), tmp_path
    )
    groups = next(c.optimizer["groups"] for c in poptorch.recorded.compilations if c.training)
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
    assert (
        set(content["latency_seconds"]) == {"compute", "ipu_to_host"}
        and content["cycles_of_the_last_call"] is None
    )
    assert CallTimes(range(1)).latency == {}


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


class OperationRecorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: List[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def test_transformers_use_no_operation_that_poptorch_lacks() -> None:
    sizes = {"width": 16, "heads": 2, "dropout": 0.0}
    tokens = torch.randint(1, 9, (2, 7), generator=torch.Generator().manual_seed(0))
    translation = transformer_translation(9, 9, layers=1, feedforward=8, **sizes)  # type: ignore[arg-type]
    for model, x in ((transformer_lm(9, blocks=1, context=8, **sizes), tokens),  # type: ignore[arg-type]
                     (translation, torch.stack((tokens, tokens), 1))):  # fmt: skip
        with OperationRecorder() as recorder, torch.no_grad():
            whole = model(x)
        assert recorder.seen and not any("tril" in name or "triu" in name for name in recorder.seen)
        assert whole.shape[-1] == 7
    lm = transformer_lm(9, blocks=1, context=8, **sizes)  # type: ignore[arg-type]
    with torch.no_grad():
        assert torch.allclose(
            lm(tokens)[..., :4], lm(tokens[:, :4]), atol=1e-6
        )  # no position reads later tokens
    assert not any("mask" in name for name in lm.state_dict())
