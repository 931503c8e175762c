"""Record a corpus of small traces with PyTorch's own profiler, each with a cause that is built in.

Processes with gloo train by `torch.distributed.pipelining` or by a loop of isend and irecv. A pass
is a sleep of a millisecond inside an operation, so that a recording is the same on any machine;
what is slow is slower by a factor of 20 or more:

    stage      the passes of one stage sleep longer
    replica    the passes of one stage sleep longer in the second pipeline alone
    link       each message reaches its receiver late
    one link   each message reaches the last rank of the pipeline late
    data       the first stage gets its batch late, from torch's DataLoader
    host       the first stage gets its batch late, and nothing records that
    cores      all ranks compute on one core of the machine
    none       nothing

    python -m tests.support.trace_corpus [NAME...]    # record anew, and write tests/traces.tar.xz
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import socket
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any, Callable, ContextManager, Dict, Iterator, List, NamedTuple, Optional
from unittest import mock

import torch
from torch import distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from tests import forked

ARCHIVE = Path(__file__).resolve().parents[1] / "traces.tar.xz"
WIDTH = 16
MICROBATCHES = 4
UPDATES = 2
# seconds
PASS = 0.001
SLOW = 0.024
LOADS = 0.16


class Recording(NamedTuple):
    """A case of the corpus. `mesh`: the names of its dimensions, each with its ranks if they are
    not two; `marks`: how the loop is annotated (plain, ranges, labels, both), where labels are of
    `dist.record_comm`; `slow`: the index of the slow stage; `stages`: on a device.
    """

    schedule: str
    cause: str
    mesh: str = "pp"
    marks: str = "plain"
    slow: int = 1
    stages: int = 1
    shapes: bool = False

    @property
    def sizes(self) -> Dict[str, int]:
        """Return the number of ranks of each dimension of the mesh."""
        pairs = (re.fullmatch(r"([a-z]+)(\d*)", part) for part in self.mesh.split(","))
        return {pair.group(1): int(pair.group(2) or 2) for pair in pairs if pair is not None}

    @property
    def ranks(self) -> int:
        """Return the number of processes."""
        return math.prod(self.sizes.values())


CORPUS: Dict[str, Recording] = {
    "gpipe_none": Recording("ScheduleGPipe", "none"),
    "gpipe_stage": Recording("ScheduleGPipe", "stage", slow=0),
    "gpipe_link": Recording("ScheduleGPipe", "link"),
    "gpipe_data": Recording("ScheduleGPipe", "data"),
    "1f1b_none": Recording("Schedule1F1B", "none"),
    "1f1b_stage": Recording("Schedule1F1B", "stage", shapes=True),
    "1f1b_link": Recording("Schedule1F1B", "link", shapes=True),
    "1f1b_data": Recording("Schedule1F1B", "data"),
    "1f1b_host": Recording("Schedule1F1B", "host"),
    "interleaved_none": Recording("ScheduleInterleaved1F1B", "none", stages=2),
    "interleaved_stage": Recording("ScheduleInterleaved1F1B", "stage", stages=2, slow=2),
    "interleaved_link": Recording("ScheduleInterleaved1F1B", "link", stages=2),
    "interleaved_data": Recording("ScheduleInterleaved1F1B", "data", stages=2),
    "zbv_stage": Recording("ScheduleZBVZeroBubble", "stage", stages=2, slow=3),
    "dualpipev_link": Recording("ScheduleDualPipeV", "link", stages=2),
    "1f1b_4_stage": Recording("Schedule1F1B", "stage", "pp4", slow=2),
    "1f1b_4_one_link": Recording("Schedule1F1B", "one link", "pp4"),
    "1f1b_cores": Recording("Schedule1F1B", "cores", "pp4", shapes=True),
    "1f1b_dp_pp_stage": Recording("Schedule1F1B", "stage", "dp,pp"),
    "1f1b_pp_dp_stage": Recording("Schedule1F1B", "stage", "pp,dp", shapes=True),
    "1f1b_pp_dp_link": Recording("Schedule1F1B", "link", "pp,dp"),
    "1f1b_pp_dp_none": Recording("Schedule1F1B", "none", "pp,dp"),
    "1f1b_pp_dp_replica": Recording("Schedule1F1B", "replica", "pp,dp"),
    "1f1b_pp_fsdp_stage": Recording("Schedule1F1B", "stage", "pp,fsdp", slow=0),
    "gpipe_pp_dp_data": Recording("ScheduleGPipe", "data", "pp,dp"),
    "gpipe_dp_pp_replica": Recording("ScheduleGPipe", "replica", "dp,pp", slow=0),
    "gpipe_pp_tp_stage": Recording("ScheduleGPipe", "stage", "pp,tp", slow=0),
    "1f1b_pp_tp_stage": Recording("Schedule1F1B", "stage", "pp,tp"),
    "interleaved_dp_pp_stage": Recording(
        "ScheduleInterleaved1F1B", "stage", "dp,pp", stages=2, slow=3
    ),
    "loop_stage": Recording("loop", "stage"),
    "loop_link": Recording("loop", "link"),
    "loop_ranges_none": Recording("loop", "none", marks="ranges"),
    "loop_ranges_stage": Recording("loop", "stage", marks="ranges"),
    "loop_ranges_link": Recording("loop", "link", marks="ranges"),
    "loop_ranges_host": Recording("loop", "host", marks="ranges"),
    "loop_labels_stage": Recording("loop", "stage", marks="labels"),
    "loop_labels_link": Recording("loop", "link", marks="labels"),
    "loop_both_none": Recording("loop", "none", marks="both"),
    "loop_4_labels_stage": Recording("loop", "stage", "pp4", marks="labels", slow=2),
    "loop_both_pp_dp_stage": Recording("loop", "stage", "pp,dp", marks="both", slow=0),
}


class Slept(torch.autograd.Function):
    """An operation that takes its time, whatever else the machine does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        time.sleep(ctx.seconds)
        return gradient * 1.0, None


class SleepingStage(nn.Module):
    """A layer whose pass sleeps; `group`: the ranks that share the layer and add up its outputs."""

    def __init__(self, seconds: float, group: Optional[Any], computes: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.seconds = seconds
        self.group = group
        self.computes = computes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(x)
        if self.computes:
            square = torch.ones(500, 500) @ torch.ones(500, 500)
            return y + square[0, 0] * 0
        y = Slept.apply(y, self.seconds)
        if self.group is not None:
            dist.all_reduce(y.detach(), group=self.group)
        return y


class SlowBatches(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return UPDATES

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.seconds)
        return torch.ones(MICROBATCHES * 2, WIDTH)


class SlowWork:
    """A message that its receiver has only so long after it was sent."""

    def __init__(self, work: Any) -> None:
        self.work = work

    def wait(self, *arguments: Any) -> Any:
        time.sleep(SLOW)
        return self.work.wait(*arguments)


class Rank(NamedTuple):
    """A process of a recording, and the groups that it belongs to by the mesh's dimensions."""

    case: Recording
    mesh: Any

    @property
    def devices(self) -> int:
        """Return the number of ranks of the pipeline."""
        return self.case.sizes["pp"]

    @property
    def position(self) -> int:
        """Return the place in the pipeline."""
        return int(self.mesh.get_local_rank("pp"))

    @property
    def receives_late(self) -> bool:
        """Tell whether its messages are late."""
        is_last = self.position == self.devices - 1
        return self.case.cause == "link" or self.case.cause == "one link" and is_last

    def get_group(self, name: str) -> Optional[Any]:
        """Return the process group of a dimension, None if the mesh does not have it."""
        return self.mesh.get_group(name) if name in self.case.sizes else None

    def make_stage(self, index: int) -> nn.Module:
        """Make a stage, sharded if the mesh shards it."""
        in_replica = self.case.cause == "replica" and self.mesh.get_local_rank("dp") == 1
        is_slow = (self.case.cause == "stage" or in_replica) and index == self.case.slow
        seconds = SLOW if is_slow else PASS
        stage = SleepingStage(seconds, self.get_group("tp"), self.case.cause == "cores")
        if "fsdp" in self.case.sizes:
            from torch.distributed.fsdp import fully_shard

            fully_shard(stage, mesh=self.mesh["fsdp"])
        return stage

    def finish_update(self, optimizer: torch.optim.Optimizer) -> None:
        """Add up the gradients of replicas, and update the weights."""
        group = self.get_group("dp")
        if group is not None:
            for parameter in optimizer.param_groups[0]["params"]:
                dist.all_reduce(parameter.grad, group=group)
        optimizer.step()
        optimizer.zero_grad()


def make_runtime_update(rank: Rank) -> Callable[[torch.Tensor], None]:
    """Return a function that trains one batch by PyTorch's runtime."""
    from torch.distributed import pipelining
    from torch.distributed.pipelining import schedules

    case = rank.case
    count = rank.devices * case.stages
    indices = [*range(rank.position, count, rank.devices)]
    if case.schedule in ("ScheduleZBVZeroBubble", "ScheduleDualPipeV"):
        indices = [rank.position, count - 1 - rank.position]
    modules = {index: rank.make_stage(index) for index in indices}
    stages = [
        pipelining.PipelineStage(
            module, index, count, torch.device("cpu"), group=rank.get_group("pp")
        )
        for index, module in modules.items()
    ]
    make_schedule = getattr(schedules, case.schedule)
    is_multi = issubclass(make_schedule, schedules.PipelineScheduleMulti)
    schedule = make_schedule(
        stages if is_multi else stages[0], MICROBATCHES, loss_fn=nn.functional.mse_loss
    )
    optimizer = torch.optim.SGD(nn.ModuleList(modules.values()).parameters(), lr=0.01)

    def update(x: torch.Tensor) -> None:
        arguments = [x] if any(stage.is_first for stage in stages) else []
        targets = {"target": x} if any(stage.is_last for stage in stages) else {}
        schedule.step(*arguments, **targets)
        rank.finish_update(optimizer)

    return update


class Loop:
    """A loop of isend and irecv, all forwards first."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        self.module = rank.make_stage(rank.position)
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.01)
        self.has_ranges = rank.case.marks in ("ranges", "both")
        self.has_labels = rank.case.marks in ("labels", "both")
        self.works: List[Any] = []

    def mark(self, name: str) -> ContextManager[Any]:
        return record_function(name if self.has_ranges else "part of the loop")

    def label(self, name: str) -> ContextManager[Any]:
        text = f"PP::{name} (stage {self.rank.position})"
        return dist.record_comm(text) if self.has_labels else record_function("another part")

    def get_peer(self, step: int) -> Optional[int]:
        place = self.rank.position + step
        if not 0 <= place < self.rank.devices:
            return None
        return dist.get_global_rank(self.rank.get_group("pp"), place)

    def send(self, x: torch.Tensor, step: int, name: str) -> None:
        peer = self.get_peer(step)
        if peer is not None:
            with self.label(name):
                self.works.append(dist.isend(x, peer, group=self.rank.get_group("pp")))

    def receive(self, default: torch.Tensor, step: int, name: str) -> torch.Tensor:
        peer = self.get_peer(step)
        if peer is None:
            return default
        x = torch.empty(2, WIDTH)
        with self.label(name):
            work = dist.irecv(x, peer, group=self.rank.get_group("pp"))
            (SlowWork(work) if self.rank.receives_late else work).wait()
        return x

    def update(self, batch: torch.Tensor) -> None:
        passes = []
        for m in range(MICROBATCHES):
            x = self.receive(batch[2 * m : 2 * m + 2].clone(), -1, "fwd_recv").requires_grad_(True)
            with self.mark(f"Forward {m}"):
                y = self.module(x)
            passes.append((x, y))
            self.send(y.detach(), 1, "fwd_send")
        for m, (x, y) in enumerate(passes):
            gradient = self.receive(torch.ones_like(y), 1, "bwd_recv")
            with self.mark(f"Backward {m}"):
                y.backward(gradient)
            self.send(x.grad, -1, "bwd_send")
        for work in self.works:
            work.wait()
        self.works = []
        self.rank.finish_update(self.optimizer)


def delay_runtime_messages() -> ContextManager[Any]:
    """Return a context in which each message of PyTorch's runtime reaches its receiver late."""
    from torch.distributed.pipelining import schedules

    post = schedules._batch_p2p

    def batch(operations: List[Any], desc: Optional[str] = None) -> List[Any]:
        works = post(operations, desc)
        return [SlowWork(w) if o.op is dist.irecv else w for o, w in zip(operations, works)]

    return mock.patch.object(schedules, "_batch_p2p", batch)


def record(case: Recording) -> Any:
    """Train UPDATES batches and return the profiler with their trace."""
    sizes = case.sizes
    mesh = dist.init_device_mesh("cpu", (*sizes.values(),), mesh_dim_names=(*sizes,))
    rank = Rank(case, mesh)
    update = Loop(rank).update if case.schedule == "loop" else make_runtime_update(rank)
    update(torch.ones(MICROBATCHES * 2, WIDTH))
    late = delay_runtime_messages() if rank.receives_late else contextlib.nullcontext()
    cores = os.sched_getaffinity(0)
    if case.cause == "cores":
        os.sched_setaffinity(0, {min(cores)})
    delay = LOADS if rank.position == 0 and case.cause in ("data", "host") else 0.0
    dataset = SlowBatches(delay)
    loaded: Any = map(dataset.__getitem__, range(UPDATES))
    dist.barrier()
    with late, profile(activities=[ProfilerActivity.CPU], record_shapes=case.shapes) as profiler:
        if case.cause == "data":
            loaded = torch.utils.data.DataLoader(dataset, batch_size=None)
        for x in loaded:
            update(x)
    os.sched_setaffinity(0, cores)
    dist.barrier()
    return profiler


def _record_all(rank: int, ranks: int, folder: str, cases: Dict[str, Recording], port: int) -> None:
    os.environ.update(
        forked.make_rank_environment(rank, ranks, port), TORCHELASTIC_USE_AGENT_STORE="False"
    )
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    for name, case in cases.items():
        path = Path(folder) / name / f"rank{rank}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        record(case).export_chrome_trace(str(path))
        shrink(path)
    dist.barrier()
    os._exit(0)


def shrink(path: Path) -> None:
    """Write a trace anew without what makes it large and says nothing of time: operations inside
    other operations, arrows, identities."""
    content = json.loads(path.read_text())
    records = [*list_outermost(e for e in content["traceEvents"] if e.get("ph") == "X")]
    threads: Dict[Any, int] = {}
    for e in records:
        args = e.pop("args", {})
        args = {k: args[k] for k in ("Concrete Inputs", "Input type", "Input Dims") if k in args}
        is_message = e["name"].startswith("c10d") or e["cat"] == "user_annotation"
        e.update({"args": args} if args and is_message else {})
        e["pid"] = 0
        e["tid"] = threads.setdefault(e["tid"], len(threads))
    kept = ("schemaVersion", "distributedInfo", "baseTimeNanoseconds")
    content = {key: content[key] for key in kept if key in content}
    content.update(host_name="host", traceEvents=records)
    path.write_text(json.dumps(content, separators=(",", ":")))


def list_outermost(records: Iterator[Dict[str, Any]]) -> Iterator[Dict[str, Any]]:
    """Yield the records without operations that lie inside another operation of their thread."""
    reach: Dict[Any, float] = {}
    for e in sorted(records, key=lambda e: (e["ts"], -e["dur"])):
        if e["cat"] == "cpu_op" and not e["name"].startswith("c10d"):
            if e["ts"] + e["dur"] <= reach.get(e["tid"], 0.0):
                continue
            reach[e["tid"]] = e["ts"] + e["dur"]
        yield e


def record_cases(folder: Path, cases: Dict[str, Recording]) -> None:
    """Record cases, those of one number of ranks in the same processes."""
    for ranks in sorted({case.ranks for case in cases.values()}):
        chosen = {name: case for name, case in cases.items() if case.ranks == ranks}
        with socket.socket() as free_socket:
            free_socket.bind(("localhost", 0))
            port = free_socket.getsockname()[1]
        forked.fork_ranks(ranks, _record_all, ranks, str(folder), chosen, port, seconds=300)


def extract_corpus(folder: Path) -> None:
    """Extract the stored traces, a folder each."""
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder)


def store_corpus(folder: Path) -> None:
    """Store the traces of a folder, equal traces as equal bytes."""
    with tarfile.open(ARCHIVE, "w:xz", preset=9) as archive:
        for path in sorted(folder.glob("*/*.json")):
            entry = tarfile.TarInfo(str(path.relative_to(folder)))
            entry.size = path.stat().st_size
            with path.open("rb") as file:
                archive.addfile(entry, file)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        if ARCHIVE.exists():
            extract_corpus(Path(name))
        record_cases(Path(name), {key: CORPUS[key] for key in sys.argv[1:] or CORPUS})
        store_corpus(Path(name))
