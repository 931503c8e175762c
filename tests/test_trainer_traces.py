"""Passes are read from the names that trainers give them, and from patterns of the user."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Dict, List, Tuple

import pytest

from ipu_pipe.errors import BadInput
from ipu_pipe.report.analysis.analyze import analyze
from ipu_pipe.trace.pass_names import FUNCTIONS, RANGES
from ipu_pipe.trace.reading import read_trace

# a forward and a backward of microbatch 0, as the sources name them
NAMES: Dict[str, Tuple[str, str, str]] = {
    "torch": ("user_annotation", "PP:{rank}F0", "PP:{rank}B0"),
    "torch's ScheduleGPipe, Accelerate": ("user_annotation", "Forward 0", "Backward 0"),
    "Lightning": (
        "user_annotation",
        "[pl][profile][Strategy]DDPStrategy.training_step",
        "[pl][profile][Strategy]DDPStrategy.backward",
    ),
    "Megatron-Core": (
        "python_function",
        "/opt/Megatron-LM/megatron/core/pipeline_parallel/schedules.py(403): forward_step",
        "/opt/Megatron-LM/megatron/core/pipeline_parallel/schedules.py(539): backward_step",
    ),
    "DeepSpeed": (
        "python_function",
        "deepspeed/runtime/pipe/engine.py(722): _exec_forward_pass",
        "deepspeed/runtime/pipe/engine.py(815): _exec_backward_pass",
    ),
}
OTHERS = {
    "user_annotation": "Optimizer.zero_grad#Adam.zero_grad",
    "python_function": "megatron/core/pipeline_parallel/schedules.py(1): get_forward_backward_func",
}
# of two ranks: kind, begin, end; rank 0 waits for the gradients of rank 1
RANKS = [
    [("forward", 0, 50), ("send", 55, 70), ("recv", 60, 230), ("backward", 230, 280)],
    [("recv", 10, 70), ("forward", 70, 100), ("backward", 103, 200), ("send", 205, 230)],
]


def make_span(category: str, name: str, begin: float, end: float, tid: int = 1, **args: Any) -> Any:
    times = {"ts": begin, "dur": end - begin}
    return {"ph": "X", "cat": category, "name": name, "pid": 0, "tid": tid, **times, "args": args}


def make_host_records(rank: int, names: Tuple[str, str, str]) -> List[Any]:
    """Return operations and messages of a host, and a range around each pass."""
    category, *of_kinds = names
    by_kind = dict(zip(("forward", "backward"), of_kinds))
    records = [make_span(category, OTHERS[category], 0, 300)]
    for kind, begin, end in RANKS[rank]:
        if kind in by_kind:
            name = by_kind[kind].format(rank=rank)
            # a function of a trainer calls another one of the same name
            records += [
                make_span(category, name, begin - 1, end + 1),
                make_span(category, name, begin, end),
            ]
            records.append(make_span("cpu_op", "op", begin, end))
        else:
            records.append(make_span("user_annotation", f"gloo:{kind}", begin, end))
    return records


def make_device_records(rank: int, names: Tuple[str, str, str]) -> List[Any]:
    """Return what the host launches, and kernels that run 1000 us later. Another thread than that
    of the range launches the backward.
    """
    category, *of_kinds = names
    by_kind = dict(zip(("forward", "backward"), of_kinds))
    records = []
    kernels = [make_span("kernel", "of before", 900, 910, 7, correlation=99)]
    for number, (kind, begin, end) in enumerate(RANKS[rank], 1):
        call, thread, link = 10 * number, 1 + (kind == "backward"), {"correlation": number}
        args = {"Collective name": kind, "Dst Rank": str(1 - rank), "Src Rank": str(1 - rank)}
        args.update({"In msg nelems": 10, "dtype": "BFloat16"})
        kernel, stream = "ncclDevKernel_SendRecv", 8 + (kind == "recv")
        if kind in by_kind:
            name = by_kind[kind].format(rank=rank)
            records.append(make_span(category, name, call, call + 8))
            kernel, stream, args = "gemm", 7, {}
        launch = "cuda_runtime", "cudaLaunchKernel", call + 2, call + 3, thread
        records.append(make_span(*launch, **link))
        kernels.append(
            make_span("kernel", kernel, 1000 + begin, 1000 + end, stream, **link, **args)
        )
    return [*records, *kernels]


def write_ranks(folder: Path, records: List[List[Any]], **keys: Any) -> Path:
    folder.mkdir()
    for rank, of_rank in enumerate(records):
        info = {"rank": rank, "world_size": len(records), **keys}
        content = {"distributedInfo": info, "host_name": "one", "traceEvents": of_rank}
        (folder / f"rank{rank}.json").write_text(json.dumps(content))
    return folder


def list_passes(folder: Path, passes: Any = ()) -> List[Tuple[Any, ...]]:
    events = read_trace(folder, passes).events.rows()
    kinds = ("forward", "backward", "send", "recv")
    return [(e.device, e.stage, e.kind, e.microbatch, e.peer) for e in events if e.kind in kinds]


PASSES = [
    (0, 0, "forward", 0, -1), (0, 0, "send", 0, 1), (0, 0, "recv", 0, 1), (0, 0, "backward", 0, -1),
    (1, 1, "recv", 0, 0), (1, 1, "forward", 0, -1), (1, 1, "backward", 0, -1), (1, 1, "send", 0, 0),
]  # fmt: skip


@pytest.mark.parametrize("trainer", [*RANGES, *FUNCTIONS])
@pytest.mark.parametrize("make", [make_host_records, make_device_records])
def test_passes_by_the_names_of_trainers(trainer: str, make: Any, tmp_path: Path) -> None:
    folder = write_ranks(tmp_path / "run", [make(rank, NAMES[trainer]) for rank in (0, 1)])
    assert sorted(list_passes(folder)) == sorted(PASSES)
    figures = analyze(read_trace(folder), "run")
    first, second = figures["devices"]
    # Story: rank 0 waited for rank 1's compute, and was told to send less. It is ready to receive
    # at 60, and rank 1 computes until 200; from then on the message is on its way. Its own message
    # takes until 70. What rank 1 waits before its first kernel or operation is no wait.
    has_device = make is make_device_records
    assert first["waits_for"] == {"1": 130_000}
    assert second["waits_for"].get("0", 0) == 40_000 * has_device
    assert first["communication_ns"] == 20_000 + 30_000
    worst = figures["bottleneck"]
    assert (worst["what"], worst["stage"], worst["device"]) == ("stage", 1, 1)
    times = [(stage["forward_ns"], stage["backward_ns"]) for stage in figures["stages"]]
    assert times == [(50_000, 50_000), (30_000, 97_000)]
    links = [
        (link["src"], link["dst"], link["carries"], link["bytes"]) for link in figures["links"]
    ]
    # a host's messages do not tell their size
    size = 20 if has_device else None
    assert links == [(0, 1, "activations", size), (1, 0, "gradients", size)]


def test_replicas_of_a_trainer_without_a_pipeline_have_one_stage(tmp_path: Path) -> None:
    """Story: two ranks that only average gradients were stages 0 and 1."""
    records = [
        make_span(NAMES["Lightning"][0], NAMES["Lightning"][1], 0, 20),
        make_span("cpu_op", "op", 1, 19),
        make_span("user_annotation", "gloo:all_reduce", 20, 30),
    ]
    groups = [{"pg_name": "0", "ranks": [0, 1]}]
    folder = write_ranks(tmp_path / "run", [records, records], pg_config=groups)
    assert list_passes(folder) == [(0, 0, "forward", 0, -1), (1, 0, "forward", 0, -1)]


@pytest.mark.parametrize("make", [make_host_records, make_device_records])
def test_patterns_of_the_user(make: Any, tmp_path: Path) -> None:
    names = ("user_annotation", "trainer/fwd/{rank}/0", "trainer/bwd/{rank}/0")
    functions = ("python_function", "my/loop.py(12): do_f", "my/loop.py(40): do_b")
    # each rank has a loop of its own
    folder = write_ranks(tmp_path / "run", [make(0, names), make(1, functions)])
    named = r"^trainer/(?P<kind>fwd|bwd)/(?P<stage>\d)/(?P<microbatch>\d)$"
    patterns = [named, r"loop\.py\(\d+\): do_(?P<kind>[fb])$"]
    assert sorted(list_passes(folder, patterns)) == sorted(PASSES)


BAD = {
    "(": "not a regular expression",
    "fwd": "(?P<kind>...)",
    "(?P<kind>fwd)(?P<mb>1)": "group mb",
    "trainer/(?P<kind>f)w": "",
    "trainer/(?P<kind>fw)": "kind fw",
    "(?P<kind>fwd)/(?P<stage>a)": "stage a",
    "(?P<kind>fwd)(?P<microbatch>/)": "microbatch /",
    "nothing(?P<kind>fwd)": "ranges are Optimizer.zero_grad",
}


@pytest.mark.parametrize("pattern", BAD)
def test_bad_patterns_are_refused_in_one_line(pattern: str, tmp_path: Path) -> None:
    records = make_host_records(0, ("user_annotation", "trainer/fwd/a", "trainer/bwd/a"))
    folder = write_ranks(tmp_path / "run", [records])
    if not BAD[pattern]:
        assert list_passes(folder, pattern)
        return
    with pytest.raises(BadInput) as fault:
        read_trace(folder, [pattern])
    (line,) = str(fault.value).splitlines()
    assert line.startswith("--passes: ") and pattern in line and BAD[pattern] in line


@pytest.mark.slow
def test_a_recording_of_lightning(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning.pytorch")
    import torch
    from lightning.pytorch.profilers import PyTorchProfiler

    class Module(lightning.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(64, 64)

        def training_step(self, batch: Any, index: int) -> Any:
            return self.linear(batch).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters())

    schedule = torch.profiler.schedule(wait=1, warmup=1, active=3)
    profiler = PyTorchProfiler(tmp_path, "t", export_to_chrome=True, schedule=schedule)
    silent = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
    trainer = lightning.Trainer(max_steps=8, accelerator="cpu", profiler=profiler, **silent)
    trainer.fit(Module(), torch.utils.data.DataLoader(torch.ones(64, 64), batch_size=8))  # type: ignore[arg-type]
    (path,) = tmp_path.glob("*.json")
    (stage,) = analyze(read_trace(path), "run")["stages"]
    assert stage["microbatches"] == 3
    assert min(stage["forward_ns"], stage["backward_ns"], stage["update_ns"]) > 0
