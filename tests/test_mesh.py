"""Train pipelines on parts of a DeviceMesh, beside FSDP2, tensor parallelism and the caller's own
data parallelism: the weights are those of the emulator at the global batch, to 1e-12 in float64."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Tuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

import ipu_pipe
from ipu_pipe.backends.processes import mail
from ipu_pipe.backends.world import get_timeout
from ipu_pipe.errors import end_process
from tests.forked import fork_ranks, get_fork_server
from tests.support import rank_group
from tests.support.processes import run_in_group, wait_for_file
from tests.support.rank_group import RankGroups
from tests.support.runs import needs_processes
from tests.support.slow import mark_slow

pytest.importorskip("torch", minversion="2.6", reason="needs FSDP2")

import torch.distributed.checkpoint as dcp  # noqa: E402
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save  # noqa: E402
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict  # noqa: E402
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # noqa: E402
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe  # noqa: E402
from torch.distributed.tensor import DTensor, Replicate, Shard  # noqa: E402
from torch.distributed.tensor.parallel import (  # noqa: E402
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

pytestmark = needs_processes
groups = rank_group.groups

WIDTH, CLASSES, UPDATES, SAMPLES = 8, 5, 6, 12
BOUNDARIES = ["blocks.2"]


class MeshBlock(nn.Module):
    """A residual perceptron of two layers, whose first can be cut by columns and second by rows."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        # Story: in `whole_model`, other ranks' masks were 0, since a state dict has none of them
        self.mask: torch.Tensor
        self.register_buffer("mask", torch.arange(WIDTH) % 3 > 0, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mask * self.down(torch.tanh(self.up(self.norm(x))))


class MeshNet(nn.Module):
    """Four blocks between a linear layer and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, WIDTH)
        self.blocks = nn.ModuleList(MeshBlock() for _ in range(4))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def make_net() -> MeshNet:
    torch.manual_seed(0)
    return MeshNet().double()


OPTIMIZERS: Dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda net: torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01),
    "adamw": lambda net: torch.optim.AdamW(net.parameters(), lr=0.01, weight_decay=0.1),
}
T1_T2 = {"t1": {"anneal_updates": 20}, "t2": {"decay": 0.5}}
BOTH = {"spike_compensation": {}, "weight_prediction": {"form": "velocity"}}
METHODS: Dict[str, Dict[str, Any]] = {
    "gpipe": {"microbatches": 4},
    "pipedream": {"microbatches": 1},
    "pipedream_2bw": {"microbatches": 4},
    "pipemare": {"microbatches": 2, "method_args": T1_T2},
    "zb_h1": {"microbatches": 4},
    "pipelined_backprop": {"microbatches": 1},
    "compensated": {"method": "pipelined_backprop", "microbatches": 1, "method_args": BOTH},
}
CLIPS: Dict[str, Any] = {
    "none": None,
    **{scope: (0.3, scope) for scope in ("stage", "global", "delayed_global")},
}
Row = Tuple[str, str, str]
# (method, optimizer, clip)
ROWS: List[Row] = [
    ("gpipe", "sgd", "none"),
    ("gpipe", "adamw", "global"),
    ("pipedream", "adamw", "stage"),
    ("pipedream_2bw", "sgd", "none"),
    ("pipedream_2bw", "adamw", "stage"),
    ("pipemare", "sgd", "delayed_global"),
    ("pipemare", "adamw", "none"),
    ("zb_h1", "adamw", "none"),
    ("pipelined_backprop", "sgd", "none"),
    ("compensated", "sgd", "none"),
]  # fmt: skip


def draw_mesh_batches(
    k: int, replicas: int, words: Tuple[int, ...] = ()
) -> List[Tuple[torch.Tensor, torch.Tensor]]:
    """Draw the batches of update k, one for each replica: of samples, or of sequences of `words`."""
    generator = torch.Generator().manual_seed(100 + k)
    size = (SAMPLES, *words)
    return [
        (
            torch.randn(*size, 6, generator=generator, dtype=torch.float64),
            torch.randint(0, CLASSES, size, generator=generator),
        )
        for _ in range(replicas)
    ]


def compute_loss(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return cross_entropy(output.flatten(0, -2), labels.flatten())


def make_row_pipeline(row: Row, net: Any = None, **keys: Any) -> ipu_pipe.Pipeline:
    method, optimizer, clip = row
    net = net or make_net()
    settings = {
        "method": method,
        "stages": BOUNDARIES,
        "clip": CLIPS[clip],
        **METHODS[method],
        **keys,
    }
    return ipu_pipe.Pipeline(net, compute_loss, OPTIMIZERS[optimizer](net), **settings)


def give_updates(
    pipe: ipu_pipe.Pipeline, updates: range, take: Callable[[Any], Any], copies: int = 2, **how: Any
) -> List[Any]:
    """Train updates on the batches of `copies` replicas. Return the results of those that are complete."""
    results = []
    for k in updates:
        results += pipe.step(*take(draw_mesh_batches(k, copies, **how)))
    return results


def train_mesh_row(
    row: Row, copies: int, take: Callable[[Any], Any], words: Tuple[int, ...] = (), **keys: Any
) -> Tuple[Dict[str, Any], List[Any], Any]:
    """Train by a row, and return the state, the losses and an evaluation."""
    pipe = make_row_pipeline(row, **keys)
    results = give_updates(pipe, range(UPDATES), take, copies, words=words) + pipe.drain()
    # of another size than a microbatch
    x, y = (part[:5] for part in draw_mesh_batches(UPDATES, 1, words)[0])
    measured = pipe.evaluate([(x, y)], [] if words else ["accuracy"])
    state = pipe.state_dict()
    pipe.close()
    return state, [update.loss for update in results], measured


def join_replicas(batches: List[Any]) -> Any:
    return [torch.cat(parts) for parts in zip(*batches)]


def train_row_on_emulator(row: Row, replicas: int) -> Any:
    return train_mesh_row(row, replicas, join_replicas, replicas=replicas)


def assert_near(expected: Any, actual: Any, label: str) -> None:
    """Assert that two results are within rounding, in float64."""
    assert expected[1] == pytest.approx(actual[1], abs=1e-12), label
    assert expected[2] == pytest.approx(actual[2], abs=1e-12), label
    assert_near_states(expected[0], actual[0], label)


def assert_near_states(state: Any, other: Any, label: str, tolerance: float = 1e-12) -> None:
    for part in ("model", "optimizer"):
        assert state[part].keys() == other[part].keys(), label
        for name, value in state[part].items():
            gap = float((value - other[part][name]).abs().max())
            assert gap <= tolerance, (label, name, gap)


def make_mesh(**sizes: int) -> Any:
    return dist.device_mesh.init_device_mesh(
        "cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes)
    )


def get_data_mesh(mesh: Any) -> Any:
    """Return the dimensions of a mesh over which FSDP2 shards: two of them are hybrid sharding."""
    return mesh["rep", "dp"] if "rep" in mesh.mesh_dim_names else mesh["dp"]


def get_data_group(mesh: Any) -> Any:
    data = get_data_mesh(mesh)
    return (data if data.ndim == 1 else data._flatten("data")).get_group()


def make_prepare(
    mesh: Any, inner: Any = None, outer: Any = None
) -> Callable[[nn.Module, int], None]:
    """Make a `prepare_stage` for the dimensions tp and dp of a mesh, with the policies of precision
    of the blocks and of the stage around them."""

    def prepare(stage: nn.Module, index: int) -> None:
        blocks = [m for m in stage.modules() if isinstance(m, MeshBlock)]
        if "tp" in mesh.mesh_dim_names:
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            for block in blocks:
                parallelize_module(block, mesh["tp"], plan)
        if "dp" in mesh.mesh_dim_names:
            for module in (*blocks, stage):
                policy = outer if module is stage else inner
                fully_shard(
                    module, mesh=get_data_mesh(mesh), mp_policy=policy or MixedPrecisionPolicy()
                )

    return prepare


def list_mesh_keys(mesh: Any, shards: bool) -> Dict[str, Any]:
    keys: Dict[str, Any] = {
        "backend": "distributed",
        "deadline": 60,
        "process_group": mesh["pp"].get_group(),
    }
    if "dp" in mesh.mesh_dim_names:
        keys["data_group"] = get_data_group(mesh)
    return {**keys, "prepare_stage": make_prepare(mesh)} if shards else keys


def take_own(mesh: Any) -> Callable[[List[Any]], Any]:
    """Return a function that takes this rank's batch."""
    return lambda batches: batches[mesh.get_local_rank("dp")]


def return_on_rank_0(rank: int, work: Callable[..., Any], *arguments: Any) -> Any:
    result = work(rank, *arguments)
    return result if rank == 0 else None


def call_ranks(groups: RankGroups, ranks: int, work: Callable[..., Any], *arguments: Any) -> Any:
    """Return the result of `work(rank, *arguments)` of rank 0."""
    return groups.call(ranks, return_on_rank_0, work, *arguments)[0]


def train_on_mesh(rank: int, sizes: Mapping[str, int], shards: bool, rows: List[Row]) -> List[Any]:
    mesh = make_mesh(**sizes)
    keys = list_mesh_keys(mesh, shards)
    replica = dist.get_rank(keys["data_group"]) if "dp" in sizes else 0
    copies = count_data_ranks(sizes)
    return [train_mesh_row(row, copies, lambda batches: batches[replica], **keys) for row in rows]


MESHES: Dict[str, Tuple[Dict[str, int], bool]] = {
    "pp x own data parallelism": ({"pp": 2, "dp": 2}, False),
    "pp x fsdp": ({"pp": 2, "dp": 2}, True),
    "pp x tp": ({"pp": 2, "tp": 2}, True),
    "pp x fsdp x tp": ({"pp": 2, "dp": 2, "tp": 2}, True),
    "pp x hybrid sharding": ({"pp": 2, "rep": 2, "dp": 2}, True),
}  # fmt: skip


def count_data_ranks(sizes: Mapping[str, int]) -> int:
    return sizes.get("dp", 1) * sizes.get("rep", 1)


@pytest.mark.parametrize("name", mark_slow(MESHES, "pp x fsdp".__eq__))
def test_a_mesh_gives_the_emulators_weights(name: str, groups: RankGroups) -> None:
    sizes, shards = MESHES[name]
    ranks = math.prod(sizes.values())
    rows = ROWS if ranks == 4 else ROWS[:3]
    for row, actual in zip(rows, call_ranks(groups, ranks, train_on_mesh, sizes, shards, rows)):
        expected = train_row_on_emulator(row, count_data_ranks(sizes))
        assert_near(expected, actual, f"{name}: {row}")


# ---- sequence parallelism: messages have a part of the words

WORD_ROWS: List[Row] = [
    ("gpipe", "adamw", "global"),
    ("pipedream", "adamw", "stage"),
    ("pipemare", "sgd", "delayed_global"),
]


def train_on_words(row: Row, **keys: Any) -> Any:
    return train_mesh_row(row, 1, join_replicas, (4,), **keys)


def train_words_in_parts(rank: int) -> List[Any]:
    mesh = make_mesh(pp=2, tp=2)
    plan = {
        "blocks.0": PrepareModuleInput(
            input_layouts=Replicate(), desired_input_layouts=Shard(1), use_local_output=True
        ),
        "blocks.*.norm": SequenceParallel(),
        "blocks.*.up": ColwiseParallel(input_layouts=Shard(1)),
        "blocks.*.down": RowwiseParallel(output_layouts=Shard(1)),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    keys = list_mesh_keys(mesh, shards=False)
    keys["prepare_stage"] = lambda stage, index: parallelize_module(stage, mesh["tp"], plan)
    return [train_on_words(row, **keys) for row in WORD_ROWS]


@pytest.mark.slow
def test_sequence_parallelism_gives_the_emulators_weights(groups: RankGroups) -> None:
    for row, actual in zip(WORD_ROWS, call_ranks(groups, 4, train_words_in_parts)):
        assert_near(train_on_words(row), actual, f"words: {row}")


# ---- columns that are replicas of one another


def measure_in_columns(rank: int, folder: Path) -> None:
    columns = [dist.new_group([r]) for r in range(2)]
    net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, CLASSES))
    pipe = ipu_pipe.Pipeline(
        net, cross_entropy, torch.optim.SGD(net.parameters(), lr=0.05), "gpipe", stages=1, microbatches=1,
        backend="distributed", deadline=60, process_group=columns[rank], data_group=dist.group.WORLD, trace=True,
    )  # fmt: skip
    batches = [[(x.float(), y) for x, y in draw_mesh_batches(k, 2)] for k in range(UPDATES + 1)]
    for k in range(UPDATES):
        pipe.step(*batches[k][rank])
    losses: List[Any] = [None] * 2
    dist.all_gather_object(losses, [pipe.evaluate([batches[-1][one]])["loss"] for one in (0, rank)])
    # one set has one value, and parts of a set their own
    assert losses[0][0] == losses[1][0] and losses[0][1] != losses[1][1]
    trace = pipe.trace(folder / "trace")
    assert (trace is None) == (rank == 1)
    if trace is not None:
        assert [device["index"] for device in trace.analysis["devices"]] == [0]
    pipe.close()


@pytest.mark.slow
def test_columns_agree_on_an_evaluation_and_write_one_trace(tmp_path: Path) -> None:
    """Story: BatchNorm's statistics differ between columns, so that a scheduler fed by an evaluation set other rates; all
    columns wrote one file at once, whose analysis had the devices of the others, idle."""
    run_in_group(2, measure_in_columns, tmp_path)


# ---- GPUs: FSDP2's collectives and posted receives share a device; not run on hardware


def train_on_gpu_mesh(rank: int, folder: Path, rows: List[Row], most_posted: int) -> None:
    torch.cuda.set_device(rank)
    os.environ.update(RANK=str(rank), WORLD_SIZE="4", LOCAL_RANK=str(rank))
    dist.init_process_group(
        "cpu:gloo,cuda:nccl", init_method=f"file://{folder}/store", rank=rank, world_size=4
    )
    mail.MAX_POSTED = most_posted
    mesh = dist.device_mesh.init_device_mesh("cuda", (2, 2), mesh_dim_names=("pp", "dp"))
    keys = {**list_mesh_keys(mesh, shards=True), "device": "cuda"}
    states = [train_mesh_row(row, 2, take_own(mesh), **keys)[0]["model"] for row in rows]
    if rank == 0:
        torch.save(states, folder / "states.pt")
    dist.barrier()
    end_process(0)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("most_posted", [1, 3])
def test_a_mesh_of_gpus_gives_the_emulators_weights(most_posted: int, tmp_path: Path) -> None:
    if torch.cuda.device_count() < 4:
        pytest.skip("needs four GPUs")
    rows: List[Row] = [("gpipe", "sgd", "none"), ("pipedream", "sgd", "none"), ROWS[4]]
    fork_ranks(4, train_on_gpu_mesh, tmp_path, rows, most_posted, of=get_fork_server())
    states = torch.load(tmp_path / "states.pt", map_location="cpu")
    for row, actual in zip(rows, states):
        for name, value in train_row_on_emulator(row, 2)[0]["model"].items():
            assert float((value - actual[name]).abs().max()) < 1e-10, (row, name)


# ---- states

STATEFUL: Row = ("pipedream_2bw", "adamw", "stage")


def require_whole_model(pipe: ipu_pipe.Pipeline, state: Dict[str, Any], rank: int) -> None:
    """Assert that a sharded pipeline gives whole models, copies that may not be changed."""
    x = draw_mesh_batches(9, 1)[0][0]
    predicted = pipe.predict(x)
    for everywhere in (False, True):
        with pipe.whole_model(everywhere=everywhere) as model:
            assert (model is None) == (not everywhere and rank > 1)
            if model is not None:
                assert float((model.eval()(x) - predicted).abs().max()) < 1e-12
                assert not state or torch.equal(model.head.weight, state["model"]["head.weight"])
    with pytest.raises(RuntimeError, match="changed in a copy"):
        with pipe.whole_model(everywhere=True) as model:
            nn.init.zeros_(model.head.weight)


def save_and_load_on_mesh(rank: int, folder: Path, loaded: Any) -> List[Any]:
    """Load the emulator's state before the first step and after one. Return the mesh's after two steps."""
    mesh = make_mesh(pp=2, dp=2)
    states = []
    for is_used in (False, True):
        with make_row_pipeline(STATEFUL, **list_mesh_keys(mesh, shards=True)) as pipe:

            def train(*updates: int) -> Dict[str, Any]:
                give_updates(pipe, range(*updates), take_own(mesh))
                return pipe.state_dict()

            if is_used:
                train(9, 10)
            pipe.load_state_dict(loaded)
            states.append(train(3, 5))
            part = pipe.state_dict(sharded=True)
            weight = part["model"]["blocks.1.up.weight" if rank < 2 else "blocks.3.up.weight"]
            assert weight.to_local().numel() * 2 == weight.numel()
            dcp.save(part, checkpoint_id=folder / f"dcp-{is_used}")
            later = train(5, 7)
            pipe.load_state_dict(part)
            again = train(5, 7)
            if rank == 0:
                assert_near_states(later, again, "its own part", tolerance=0)
            if is_used:
                require_whole_model(pipe, again, rank)
    return states


@pytest.mark.slow
def test_a_state_goes_from_the_emulator_to_a_mesh_and_back(
    groups: RankGroups, tmp_path: Path
) -> None:
    emulated = []
    with make_row_pipeline(STATEFUL, replicas=2) as pipe:
        for updates in (range(3), range(3, 5), range(5, 7)):
            give_updates(pipe, updates, join_replicas)
            emulated.append(pipe.state_dict())
    first, expected, last = emulated
    states = call_ranks(groups, 4, save_and_load_on_mesh, tmp_path, first)
    for is_used, state in zip((False, True), states):
        assert_near_states(expected, state, f"loaded into a used pipeline: {is_used}")
        # what torch.distributed.checkpoint has joined is the whole state
        dcp_to_torch_save(tmp_path / f"dcp-{is_used}", tmp_path / "joined.pt")
        joined = torch.load(tmp_path / "joined.pt", weights_only=False)
        assert_near_states(state, joined, "joined", tolerance=0)
        for loaded in (state, joined):
            with make_row_pipeline(STATEFUL, replicas=2) as pipe:
                pipe.load_state_dict(loaded)
                give_updates(pipe, range(5, 7), join_replicas)
                assert_near_states(last, pipe.state_dict(), "back on the emulator")


def load_tied(share: Callable[[Any], Any], **keys: Any) -> Any:
    """Load the whole state and a part of it, with a weight that has two names in the first stage."""
    net = make_net()
    net.blocks[1].norm = net.blocks[0].norm
    with make_row_pipeline(("gpipe", "sgd", "none"), net, microbatches=2, **keys) as pipe:
        for k, is_sharded in enumerate((False, True)):
            pipe.step(*draw_mesh_batches(k, 1)[0])
            state = pipe.state_dict(sharded=is_sharded)
            pipe.step(*draw_mesh_batches(9, 1)[0])
            pipe.load_state_dict(state if is_sharded else share(state))
        pipe.step(*draw_mesh_batches(2, 1)[0])
        return pipe.state_dict()


def load_tied_on_mesh(rank: int) -> Any:
    def share(state: Any) -> Any:
        states = [state]
        dist.broadcast_object_list(states, src=0)
        return states[0]

    mesh = make_mesh(pp=2, dp=1)
    keys = list_mesh_keys(mesh, shards=False)
    keys["prepare_stage"] = lambda stage, index: fully_shard(stage, mesh=mesh["dp"])
    return load_tied(share, **keys)


def test_a_state_with_a_tied_weight_is_loaded_into_a_mesh(groups: RankGroups) -> None:
    """Story: the first stage's ranks compared the weight's two names with all processes, and hung."""
    actual = call_ranks(groups, 2, load_tied_on_mesh)
    assert_near_states(load_tied(lambda state: state), actual, "tied")


# ---- the caller's optimizer, whose state is that of the shards


def is_early(name: str) -> bool:
    """Return whether a weight belongs to the first stage."""
    return name.split(".")[0] == "stem" or name[:8] in ("blocks.0", "blocks.1")


def use_the_callers_optimizer(rank: int) -> Any:
    """Read and replace the state of the caller's optimizer, and step it after the pipeline."""
    mesh = make_mesh(pp=2, dp=2)
    pipe = make_row_pipeline(STATEFUL, **list_mesh_keys(mesh, shards=True))
    optimizer = pipe.optimizer.optimizer
    give_updates(pipe, range(3), take_own(mesh))
    pipe.drain()
    state = pipe.state_dict()
    memory = pipe.memory()
    if rank == 0:
        # float64; the stage's half of two moments of each weight, and its step counts
        whole = [
            sum(8 * p.numel() for n, p in make_net().named_parameters() if is_first == is_early(n))
            for is_first in (True, False)
        ]
        for stage, device, size in zip(memory["stages"], memory["peak_memory"], whole):
            assert abs(device["weights"] - size / 2) <= 64
            assert abs(device["versions"] - size) <= 128
            assert abs(stage["weight_bytes"] - stage["weight_copies"] * size / 2) <= 128
            assert abs(stage["optimizer_bytes"] - size) <= 128
    names = {p: name for name, p in pipe.model.named_parameters()}
    assert len(optimizer.state) == 14
    for weight, entries in optimizer.state.items():
        assert isinstance(entries["exp_avg"], DTensor)
        whole = entries["exp_avg"].full_tensor()
        if rank == 0:
            assert torch.equal(whole, state["optimizer"][f"{names[weight]}/exp_avg"])
    assert len(get_optimizer_state_dict(pipe.model, optimizer)["state"]) == 14
    # as torch's functions load: new tensors, which the next step takes
    for entries in optimizer.state.values():
        entries["exp_avg"] = entries["exp_avg"] * 2
    give_updates(pipe, range(3, 4), take_own(mesh))
    after = pipe.state_dict()
    pipe.close()
    # an ordinary optimizer over FSDP2's weights again
    for weight in optimizer.state:
        weight.grad = torch.zeros_like(weight)
    optimizer.step()
    assert all(int(entries["step"]) == 5 for entries in optimizer.state.values())
    return state, after


@pytest.mark.slow
def test_the_callers_optimizer_has_the_state_of_the_shards(groups: RankGroups) -> None:
    """Story: it stayed empty."""
    state, after = call_ranks(groups, 4, use_the_callers_optimizer)
    for key in state["optimizer"]:
        if key.endswith("/exp_avg"):
            state["optimizer"][key] *= 2
    with make_row_pipeline(STATEFUL, replicas=2) as pipe:
        pipe.load_state_dict(state)
        give_updates(pipe, range(3, 4), join_replicas)
        assert_near_states(pipe.state_dict(), after, "entries that were replaced")


# ---- an oracle that others made: PyTorch's own pipelines over FSDP2


PLAIN: Row = ("gpipe", "adamw", "none")


def compare_with_pytorch(rank: int, in_bfloat16: bool) -> torch.Tensor:
    mesh = make_mesh(pp=2, dp=2)
    index = mesh.get_local_rank("pp")
    prepare = make_prepare(mesh)
    if in_bfloat16:
        low = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
        wide = MixedPrecisionPolicy(**low, output_dtype=torch.float64)
        prepare = make_prepare(mesh, MixedPrecisionPolicy(**low), wide)
    keys = {**list_mesh_keys(mesh, shards=True), "prepare_stage": prepare}
    state, _, _ = train_mesh_row(PLAIN, 2, take_own(mesh), **keys)

    net = make_net()
    halves = nn.Sequential(net.stem, *net.blocks[:2]), nn.Sequential(*net.blocks[2:], net.head)
    half = halves[index]
    prepare(half, index)
    optimizer = OPTIMIZERS["adamw"](half)
    stage = PipelineStage(half, index, 2, torch.device("cpu"), group=mesh["pp"].get_group())
    schedule = ScheduleGPipe(stage, METHODS["gpipe"]["microbatches"], loss_fn=cross_entropy)
    for k in range(UPDATES):
        x, y = take_own(mesh)(draw_mesh_batches(k, 2))
        optimizer.zero_grad()
        schedule.step(x) if index == 0 else schedule.step(target=y)
        optimizer.step()
    theirs = {
        name: p.full_tensor() for name, p in net.named_parameters() if hasattr(p, "full_tensor")
    }
    ours = [state["model"] if rank == 0 else None]
    dist.broadcast_object_list(ours, src=0)
    assert theirs and all(torch.equal(value, ours[0][name]) for name, value in theirs.items())
    return ours[0]["head.weight"]


@pytest.mark.slow
@pytest.mark.parametrize("in_bfloat16", [False, True])
def test_gpipe_beside_fsdp_equals_pytorchs_own(in_bfloat16: bool, groups: RankGroups) -> None:
    ours = call_ranks(groups, 4, compare_with_pytorch, in_bfloat16)
    exact = train_row_on_emulator(PLAIN, 2)[0]["model"]["head.weight"]
    assert (float((exact - ours).abs().max()) > 1e-6) == in_bfloat16


# ---- what a caller does between two calls


def halve_weights_after_calls(rank: int) -> Any:
    """Write the shards in the model after an evaluation and a prediction, which gather weights."""
    mesh = make_mesh(pp=1, dp=2)
    return halve_weights(
        make_row_pipeline(STATEFUL, **list_mesh_keys(mesh, shards=True)), take_own(mesh)
    )


def halve_weights(pipe: ipu_pipe.Pipeline, take: Callable[[Any], Any]) -> Any:
    test = draw_mesh_batches(9, 1)
    calls: List[Callable[[], Any]] = [
        lambda: pipe.evaluate(test),
        lambda: pipe.predict(test[0][0]),
    ]
    for k, call in enumerate(calls):
        give_updates(pipe, range(k, k + 1), take)
        call()
        with torch.no_grad():
            for weight in pipe.model.parameters():
                weight.mul_(0.5)
    measured = pipe.evaluate(test)
    state = pipe.state_dict()
    pipe.close()
    return state, [], measured


def test_writes_after_an_evaluation_reach_the_shards(groups: RankGroups) -> None:
    """Story: they went into the whole weights that FSDP2 had gathered, and were lost."""
    actual = call_ranks(groups, 2, halve_weights_after_calls)
    expected = halve_weights(make_row_pipeline(STATEFUL, replicas=2), join_replicas)
    assert_near(expected, actual, "halved")


# ---- a rank that is lost within FSDP2's collectives


def lose_a_rank(rank: int, folder: Path, method: str, is_killed: bool) -> None:
    """Let rank 3, of the second column, stop in its third step; the others write their errors."""
    mesh = make_mesh(pp=2, dp=2)
    pipe = make_row_pipeline(
        (method, "sgd", "stage"), **{**list_mesh_keys(mesh, shards=True), "deadline": 3}
    )

    def stop(module: nn.Module, inputs: Any) -> None:
        if pipe.updates == 3 and rank == 3:
            for other in range(0 if is_killed else 3):
                wait_for_file(folder / f"{other}.txt")
            end_process(0)

    pipe.model.blocks[3].up.register_forward_pre_hook(stop)
    try:
        give_updates(pipe, range(6), take_own(mesh))
    except Exception as error:
        (folder / f"{rank}.txt").write_text(f"{type(error).__name__}: {error}")
    end_process(0)


LOSSES = ["gpipe killed", "pipedream waits"]


@pytest.mark.parametrize("loss", mark_slow(LOSSES, lambda loss: loss == "gpipe killed"))
def test_a_rank_lost_within_fsdp_is_named_in_all_columns(loss: str, tmp_path: Path) -> None:
    """Story: ranks 0 and 2 ended with gloo's own line, and others named a rank that waited too."""
    method, how = loss.split()
    run_in_group(4, lose_a_rank, tmp_path, method, how == "killed")
    for rank in range(3):
        line = (tmp_path / f"{rank}.txt").read_text()
        assert line.startswith(f"RunFault: rank {rank}, stage "), line
        assert ": rank 3 is lost" in line, line


def meet_errors_and_limits(rank: int, folder: Path) -> None:
    mesh = make_mesh(pp=2, dp=2)
    group = mesh["dp"].get_group()
    limit = get_timeout(group)
    pipe = make_row_pipeline(("gpipe", "sgd", "none"), **list_mesh_keys(mesh, shards=True))
    give_updates(pipe, range(1), take_own(mesh))
    assert get_timeout(group) < limit

    def fail(module: nn.Module, inputs: Any) -> None:
        raise RuntimeError("not a collective")

    pipe.model.blocks[0].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError if rank < 2 else ipu_pipe.RunFault) as caught:
        give_updates(pipe, range(1), take_own(mesh))
    assert ("not a collective" if rank < 2 else "is lost") in str(caught.value)
    pipe.abort()
    assert get_timeout(group) == limit
    end_process(0)


@pytest.mark.slow
def test_errors_within_passes_stay_the_callers_and_limits_come_back(tmp_path: Path) -> None:
    run_in_group(4, meet_errors_and_limits, tmp_path)


# ---- what is refused


def meet_refusals(rank: int) -> None:
    mesh = make_mesh(pp=2, dp=2)
    # each column alone has one value: only the data group can see it
    here = mesh.get_local_rank("dp")
    tied, drawn, sharded = make_net(), make_net(), make_net()
    tied.blocks[3].norm = tied.blocks[0].norm
    nn.init.normal_(drawn.head.weight, std=float(1 + here))
    make_prepare(mesh)(sharded, 0)
    wrong_pairs = [dist.new_group([0, 3]), dist.new_group([1, 2])]
    refused: Dict[str, Dict[str, Any]] = {
        "data_group: without process_group": {"process_group": None},
        "is in process_group, too": {"data_group": mesh["pp"].get_group()},
        "replicas: 3: data_group has 2 ranks": {"replicas": 3},
        "prepare_stage: returned a .*Linear": {"prepare_stage": lambda *_: nn.Linear(1, 1)},
        "prepare_stage: 3: must be a function": {"prepare_stage": 3},
        # story: InternalTorchDynamoError
        "prepare_stage: stage.compile": {"prepare_stage": lambda stage, _: stage.compile()},
        "prepare_stage: blocks.[02].rise.weight": {"prepare_stage": rename_up},
        # over all ranks, also those of other stages
        "holds another stage": {"prepare_stage": lambda stage, _: fully_shard(stage) and None},
        "optimizer: Muon: not beside": {"make": make_muon},
        "optimizer: Adafactor: not beside": {
            "make": lambda net: torch.optim.Adafactor(net.parameters())
        },
        "method: local_greedy: not beside": {"method": "local_greedy", "microbatches": 1},
        "method: local_sgd: not beside": {"method": "local_sgd", "microbatches": 1},
        "ema: not beside": {"ema": 0.9},
        "delay_compensation: not beside": {
            "method": "pipedream",
            "microbatches": 1,
            "method_args": {"delay_compensation": {}},
        },
        "used by several stages": {"net": tied},
        "head.weight.*rank 0 has .*rank 1 has": {"net": drawn},
        "this rank's number: rank . has 0, rank . has 1": {
            "data_group": wrong_pairs[rank in (1, 2)]
        },
        "shard its stages after the cut": {"net": sharded},
        **{f"{key}: rank 0 has .*, rank 1 has": {key: DIFFERENT[key][here]} for key in DIFFERENT},
    }
    usual = {"stages": BOUNDARIES, "microbatches": 4, "method": "gpipe", "make": OPTIMIZERS["sgd"]}
    for words, changes in refused.items():
        keys = {**usual, "net": make_net(), **list_mesh_keys(mesh, shards=True), **changes}
        net, make = keys.pop("net"), keys.pop("make")
        with pytest.raises(ipu_pipe.BadInput, match=words):
            pipe = ipu_pipe.Pipeline(net, cross_entropy, make(net), **keys)
            try:
                pipe.step(*draw_mesh_batches(0, 1)[0])
            finally:
                pipe.abort()


DIFFERENT = {
    "method": ["gpipe", "pipedream_flush"],
    "stages": [["blocks.2"], ["blocks.1"]],
    "clip": [None, 1.0],
    "reduction": ["exact", "fast"],
}


def make_muon(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Muon([p for p in net.parameters() if p.ndim == 2])


def rename_up(stage: nn.Module, index: int) -> None:
    for module in list(stage.modules()):
        if isinstance(module, MeshBlock):
            module.rise = module.up
            del module.up


def meet_refusals_of_tensor_parallelism(rank: int) -> None:
    """Train wrongly beside tensor parallelism, whose ranks no group of the pipeline joins."""
    mesh = make_mesh(pp=2, tp=2)
    keys = {**list_mesh_keys(mesh, shards=True), "stages": BOUNDARIES, "microbatches": 2}
    here = mesh.get_local_rank("tp")
    whole, cut, other, dropping = (make_net() for _ in range(4))
    dropping.blocks[0].norm = nn.Dropout(0.3)
    make_prepare(mesh)(cut, 0)
    nn.init.constant_(other.head.weight, float(here))
    torch.manual_seed(0)
    rows = [
        (cut, 0, 0, "is sharded .a DTensor.: give whole weights; shard its stages after the cut"),
        (dropping, 0, 0, "model: blocks.0.norm: draws random numbers"),
        (other, 0, 0, "head.weight: values .*: rank . has .*must have the same model"),
        (whole, here, 0, "inputs of the first microbatch .*: rank . has .*read the same batches"),
        (make_net(), 0, here, "seed: rank . has 0, rank . has 1"),
    ]
    for net, k, seed, words in rows:
        optimizer = OPTIMIZERS["sgd"](net)
        pipe = ipu_pipe.Pipeline(net, cross_entropy, optimizer, seed=seed, **keys)
        with pytest.raises(ipu_pipe.BadInput, match=words):
            pipe.step(*draw_mesh_batches(k, 1)[0])
        pipe.abort()


@pytest.mark.slow
@pytest.mark.parametrize("meet", [meet_refusals, meet_refusals_of_tensor_parallelism])
def test_what_does_not_fit_is_refused_by_name(
    meet: Callable[[int], None], groups: RankGroups
) -> None:
    """Story: ranks of tensor parallelism that differ trained, each by other numbers."""
    groups.call(4, meet)
