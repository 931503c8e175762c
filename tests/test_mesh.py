"""Train pipelines on parts of a DeviceMesh, beside FSDP2, tensor parallelism and the caller's own
data parallelism: the weights are those of the emulator at the global batch, to 1e-12 in float64."""

from __future__ import annotations

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
from tests.support.processes import run_in_group, wait_for_file
from tests.support.runs import needs_processes
from tests.support.slow import mark_slow

pytestmark = needs_processes
pytest.importorskip("torch.distributed.fsdp", reason="needs FSDP2")

WIDTH, CLASSES, UPDATES, SAMPLES = 8, 5, 6, 3
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
    "gpipe": {"method": "gpipe", "microbatches": 4},
    "pipedream": {"method": "pipedream", "microbatches": 1},
    "pipedream_2bw": {"method": "pipedream_2bw", "microbatches": 4},
    "pipemare": {"method": "pipemare", "microbatches": 2, "method_args": T1_T2},
    "zb_h1": {"method": "zb_h1", "microbatches": 4},
    "pipelined_backprop": {"method": "pipelined_backprop", "microbatches": 1},
    "compensated": {"method": "pipelined_backprop", "microbatches": 1, "method_args": BOTH},
}
CLIPS = {
    "none": None,
    "stage": (0.3, "stage"),
    "global": (0.3, "global"),
    "delayed": (0.3, "delayed_global"),
}
Row = Tuple[str, str, str]
# (method, optimizer, clip)
ROWS: List[Row] = [
    ("gpipe", "sgd", "none"),
    ("gpipe", "adamw", "global"),
    ("pipedream", "adamw", "stage"),
    ("pipedream_2bw", "sgd", "none"),
    ("pipedream_2bw", "adamw", "stage"),
    ("pipemare", "sgd", "delayed"),
    ("pipemare", "adamw", "none"),
    ("zb_h1", "adamw", "none"),
    ("pipelined_backprop", "sgd", "none"),
    ("compensated", "sgd", "none"),
]  # fmt: skip


def draw_mesh_batches(
    k: int, microbatches: int, replicas: int
) -> List[Tuple[torch.Tensor, torch.Tensor]]:
    """Draw the batches of update k, one for each replica."""
    generator = torch.Generator().manual_seed(100 + k)
    samples = microbatches * SAMPLES
    return [
        (
            torch.randn(samples, 6, generator=generator, dtype=torch.float64),
            torch.randint(0, CLASSES, (samples,), generator=generator),
        )
        for _ in range(replicas)
    ]


def train_mesh_row(
    row: Row, copies: int, take: Callable[[Any], Any], **keys: Any
) -> Tuple[Dict[str, Any], List[Any], Any]:
    """Train by a row, and return the state, the losses and an evaluation."""
    method = row[0]
    pipe = make_row_pipeline(row, **keys)
    losses = []
    for k in range(UPDATES):
        batches = draw_mesh_batches(k, METHODS[method]["microbatches"], copies)
        losses += [update.loss for update in pipe.step(*take(batches))]
    losses += [update.loss for update in pipe.drain()]
    # of another size than a microbatch
    test = draw_mesh_batches(UPDATES, 2, 1)[0]
    measured = pipe.evaluate([test], ["accuracy"])
    state = pipe.state_dict()
    pipe.close()
    return state, losses, measured


def join_replicas(batches: List[Any]) -> Any:
    return [torch.cat(parts) for parts in zip(*batches)]


def train_row_on_emulator(row: Row, replicas: int) -> Any:
    return train_mesh_row(row, replicas, join_replicas, replicas=replicas)


def assert_near(expected: Any, actual: Any, label: str) -> None:
    """Assert that two results are within rounding, in float64."""
    state, losses, measured = expected
    other, other_losses, other_measured = actual
    assert losses == pytest.approx(other_losses, abs=1e-12), label
    assert measured == pytest.approx(other_measured, abs=1e-12), label
    for part in ("model", "optimizer"):
        assert state[part].keys() == other[part].keys(), label
        for name, value in state[part].items():
            gap = float((value - other[part][name]).abs().max())
            assert gap < 1e-12, (label, name, gap)


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
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    def prepare(stage: nn.Module, index: int) -> None:
        blocks = [m for m in stage.modules() if isinstance(m, MeshBlock)]
        for block in blocks:
            if "tp" in mesh.mesh_dim_names:
                parallelize_module(
                    block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()}
                )
            if "dp" in mesh.mesh_dim_names:
                fully_shard(
                    block, mesh=get_data_mesh(mesh), mp_policy=inner or MixedPrecisionPolicy()
                )
        if "dp" in mesh.mesh_dim_names:
            fully_shard(stage, mesh=get_data_mesh(mesh), mp_policy=outer or MixedPrecisionPolicy())

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


def train_on_mesh(
    rank: int, folder: Path, sizes: Mapping[str, int], shards: bool, rows: List[Row]
) -> None:
    mesh = make_mesh(**sizes)
    keys = list_mesh_keys(mesh, shards)
    replica = dist.get_rank(keys["data_group"]) if "dp" in sizes else 0
    for row in rows:
        result = train_mesh_row(
            row, count_data_ranks(sizes), lambda batches: batches[replica], **keys
        )
        if rank == 0:
            torch.save(result, folder / f"{'-'.join(row)}.pt")


MESHES: Dict[str, Tuple[Dict[str, int], bool]] = {
    "pp x own data parallelism": ({"pp": 2, "dp": 2}, False),
    "pp x fsdp": ({"pp": 2, "dp": 2}, True),
    "pp x tp": ({"pp": 2, "tp": 2}, True),
    "pp x fsdp x tp": ({"pp": 2, "dp": 2, "tp": 2}, True),
    "pp x hybrid sharding": ({"pp": 2, "rep": 2, "dp": 2}, True),
}  # fmt: skip


def count_data_ranks(sizes: Mapping[str, int]) -> int:
    return sizes.get("dp", 1) * sizes.get("rep", 1)


@pytest.mark.parametrize("name", mark_slow(list(MESHES), lambda name: name == "pp x fsdp"))
def test_a_mesh_gives_the_emulators_weights(name: str, tmp_path: Path) -> None:
    sizes, shards = MESHES[name]
    ranks = 1
    for size in sizes.values():
        ranks *= size
    rows = ROWS if ranks == 4 else ROWS[:3]
    run_in_group(ranks, train_on_mesh, tmp_path, sizes, shards, rows)
    for row in rows:
        expected = train_row_on_emulator(row, count_data_ranks(sizes))
        actual = torch.load(tmp_path / f"{'-'.join(row)}.pt", weights_only=False)
        assert_near(expected, actual, f"{name}: {row}")


# ---- sequence parallelism: messages have a part of the words


def compute_word_loss(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return cross_entropy(output.flatten(0, 1), labels.flatten())


def train_on_words(row: Row, **keys: Any) -> Dict[str, Any]:
    """Train by a row on sequences of four words, and return the state."""
    net = make_net()
    pipe = ipu_pipe.Pipeline(
        net, compute_word_loss, OPTIMIZERS[row[1]](net), stages=BOUNDARIES, clip=CLIPS[row[2]],
        **METHODS[row[0]], **keys,
    )  # fmt: skip
    draw = torch.Generator().manual_seed(0)
    for _ in range(UPDATES):
        size = (2 * pipe.microbatches, 4)
        pipe.step(
            torch.randn(*size, 6, generator=draw, dtype=torch.float64),
            torch.randint(0, CLASSES, size, generator=draw),
        )
    pipe.drain()
    state = pipe.state_dict()
    pipe.close()
    return state


def train_words_in_parts(rank: int, folder: Path) -> None:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

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
    keys = {
        "backend": "distributed", "deadline": 60, "process_group": mesh["pp"].get_group(),
        "prepare_stage": lambda stage, index: parallelize_module(stage, mesh["tp"], plan),
    }  # fmt: skip
    for row in WORD_ROWS:
        state = train_on_words(row, **keys)
        if rank == 0:
            torch.save(state["model"], folder / f"{row[0]}.pt")


WORD_ROWS: List[Row] = [
    ("gpipe", "adamw", "global"),
    ("pipedream", "adamw", "stage"),
    ("pipemare", "sgd", "delayed"),
]


@pytest.mark.slow
def test_sequence_parallelism_gives_the_emulators_weights(tmp_path: Path) -> None:
    run_in_group(4, train_words_in_parts, tmp_path)
    for row in WORD_ROWS:
        weights = torch.load(tmp_path / f"{row[0]}.pt")
        for name, value in train_on_words(row)["model"].items():
            assert float((value - weights[name]).abs().max()) < 1e-12, (row, name)


# ---- columns that are replicas of one another


def measure_in_columns(rank: int, folder: Path) -> None:
    columns = [dist.new_group([r]) for r in range(2)]
    net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, CLASSES))
    pipe = ipu_pipe.Pipeline(
        net, cross_entropy, torch.optim.SGD(net.parameters(), lr=0.05), "gpipe", stages=1, microbatches=1,
        backend="distributed", deadline=60, process_group=columns[rank], data_group=dist.group.WORLD, trace=True,
    )  # fmt: skip
    batches = [[(x.float(), y) for x, y in draw_mesh_batches(k, 2, 2)] for k in range(UPDATES + 1)]
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
    replica = mesh.get_local_rank("dp")
    for row in rows:
        result = train_mesh_row(row, 2, lambda batches: batches[replica], **keys)
        if rank == 0:
            torch.save(result, folder / f"{'-'.join(row)}.pt")
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
    for row in rows:
        expected = train_row_on_emulator(row, 2)[0]["model"]
        actual = torch.load(tmp_path / f"{'-'.join(row)}.pt", weights_only=False)[0]["model"]
        for name, value in expected.items():
            assert float((value - actual[name].cpu()).abs().max()) < 1e-10, (row, name)


# ---- controls: what the care is for


# ---- states


def make_row_pipeline(row: Row, **keys: Any) -> ipu_pipe.Pipeline:
    method, optimizer, clip = row
    net = make_net()
    return ipu_pipe.Pipeline(
        net,
        cross_entropy,
        OPTIMIZERS[optimizer](net),
        stages=BOUNDARIES,
        clip=CLIPS[clip],
        **METHODS[method],
        **keys,
    )


def give_updates(
    pipe: ipu_pipe.Pipeline, row: Row, updates: range, take: Callable[[Any], Any]
) -> None:
    for k in updates:
        pipe.step(*take(draw_mesh_batches(k, METHODS[row[0]]["microbatches"], 2)))


STATEFUL: Row = ("pipedream_2bw", "adamw", "stage")


def require_equal_states(one: Any, other: Any) -> None:
    for part in ("model", "optimizer"):
        assert one[part].keys() == other[part].keys()
        assert all(torch.equal(value, other[part][name]) for name, value in one[part].items())


def require_whole_model(pipe: ipu_pipe.Pipeline, state: Dict[str, Any], rank: int) -> None:
    """Assert that a sharded pipeline gives whole models, copies that may not be changed."""
    x = draw_mesh_batches(9, 1, 1)[0][0]
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


def save_and_load_on_mesh(rank: int, folder: Path) -> None:
    """Load the emulator's state before the first step and after one; save the mesh's."""
    import torch.distributed.checkpoint as dcp

    mesh = make_mesh(pp=2, dp=2)
    keys = list_mesh_keys(mesh, shards=True)
    loaded = torch.load(folder / "emulator.pt", weights_only=False)

    def take(batches: List[Any]) -> Any:
        return batches[mesh.get_local_rank("dp")]

    for is_used in (False, True):
        with make_row_pipeline(STATEFUL, **keys) as pipe:
            if is_used:
                give_updates(pipe, STATEFUL, range(9, 10), take)
            pipe.load_state_dict(loaded)
            give_updates(pipe, STATEFUL, range(3, 5), take)
            state = pipe.state_dict()
            part = pipe.state_dict(sharded=True)
            weight = part["model"]["blocks.1.up.weight" if rank < 2 else "blocks.3.up.weight"]
            assert weight.to_local().numel() * 2 == weight.numel()
            dcp.save(part, checkpoint_id=folder / f"dcp-{is_used}")
            give_updates(pipe, STATEFUL, range(5, 7), take)
            later = pipe.state_dict()
            pipe.load_state_dict(part)
            give_updates(pipe, STATEFUL, range(5, 7), take)
            again = pipe.state_dict()
            if rank == 0:
                require_equal_states(later, again)
                torch.save(state, folder / f"mesh-{is_used}.pt")
            if is_used:
                require_whole_model(pipe, again, rank)


@pytest.mark.slow
def test_a_state_goes_from_the_emulator_to_a_mesh_and_back(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    with make_row_pipeline(STATEFUL, replicas=2) as pipe:
        give_updates(pipe, STATEFUL, range(3), join_replicas)
        torch.save(pipe.state_dict(), tmp_path / "emulator.pt")
        give_updates(pipe, STATEFUL, range(3, 5), join_replicas)
        expected = pipe.state_dict()
        give_updates(pipe, STATEFUL, range(5, 7), join_replicas)
        last = pipe.state_dict()
    run_in_group(4, save_and_load_on_mesh, tmp_path)
    for is_used in (False, True):
        state = torch.load(tmp_path / f"mesh-{is_used}.pt", weights_only=False)
        assert_near((expected, [], {}), (state, [], {}), f"loaded into a used pipeline: {is_used}")
        # what torch.distributed.checkpoint has joined is the whole state
        dcp_to_torch_save(tmp_path / f"dcp-{is_used}", tmp_path / "joined.pt")
        joined = torch.load(tmp_path / "joined.pt", weights_only=False)
        require_equal_states(state, joined)
        for loaded in (state, joined):
            with make_row_pipeline(STATEFUL, replicas=2) as pipe:
                pipe.load_state_dict(loaded)
                give_updates(pipe, STATEFUL, range(5, 7), join_replicas)
                assert_near((last, [], {}), (pipe.state_dict(), [], {}), "back on the emulator")


def load_tied(share: Callable[[Any], Any], **keys: Any) -> Any:
    """Load the whole state and a part of it, with a weight that has two names in the first stage."""
    net = make_net()
    net.blocks[1].norm = net.blocks[0].norm
    optimizer = OPTIMIZERS["sgd"](net)
    with ipu_pipe.Pipeline(
        net, cross_entropy, optimizer, "gpipe", stages=BOUNDARIES, microbatches=2, **keys
    ) as pipe:
        for k, is_sharded in enumerate((False, True)):
            pipe.step(*draw_mesh_batches(k, 2, 1)[0])
            state = pipe.state_dict(sharded=is_sharded)
            pipe.step(*draw_mesh_batches(9, 2, 1)[0])
            pipe.load_state_dict(state if is_sharded else share(state))
        pipe.step(*draw_mesh_batches(2, 2, 1)[0])
        return pipe.state_dict(), [], {}


def load_tied_on_mesh(rank: int, folder: Path) -> None:
    from torch.distributed.fsdp import fully_shard

    def share(state: Any) -> Any:
        states = [state]
        dist.broadcast_object_list(states, src=0)
        return states[0]

    mesh = make_mesh(pp=2, dp=1)
    keys = list_mesh_keys(mesh, shards=False)
    keys["prepare_stage"] = lambda stage, index: fully_shard(stage, mesh=mesh["dp"])
    result = load_tied(share, **keys)
    if rank == 0:
        torch.save(result, folder / "tied.pt")


def test_a_state_with_a_tied_weight_is_loaded_into_a_mesh(tmp_path: Path) -> None:
    """Story: the first stage's ranks compared the weight's two names with all processes, and hung."""
    run_in_group(2, load_tied_on_mesh, tmp_path, seconds=60)
    actual = torch.load(tmp_path / "tied.pt", weights_only=False)
    assert_near(load_tied(lambda state: state), actual, "tied")


# ---- the caller's optimizer, whose state is that of the shards


def is_early(name: str) -> bool:
    """Return whether a weight belongs to the first stage."""
    return name.split(".")[0] == "stem" or name[:8] in ("blocks.0", "blocks.1")


def use_the_callers_optimizer(rank: int, folder: Path) -> None:
    """Read and replace the state of the caller's optimizer, and step it after the pipeline."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
    from torch.distributed.tensor import DTensor

    mesh = make_mesh(pp=2, dp=2)
    keys = list_mesh_keys(mesh, shards=True)
    replica = mesh.get_local_rank("dp")
    pipe = make_row_pipeline(STATEFUL, **keys)
    optimizer = pipe.optimizer.optimizer
    give_updates(pipe, STATEFUL, range(3), lambda batches: batches[replica])
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
    give_updates(pipe, STATEFUL, range(3, 4), lambda batches: batches[replica])
    after = pipe.state_dict()
    pipe.close()
    if rank == 0:
        torch.save((state, after), folder / "states.pt")
    # an ordinary optimizer over FSDP2's weights again
    for weight in optimizer.state:
        weight.grad = torch.zeros_like(weight)
    optimizer.step()
    assert all(int(entries["step"]) == 5 for entries in optimizer.state.values())


@pytest.mark.slow
def test_the_callers_optimizer_has_the_state_of_the_shards(tmp_path: Path) -> None:
    """Story: it stayed empty."""
    run_in_group(4, use_the_callers_optimizer, tmp_path)
    state, after = torch.load(tmp_path / "states.pt", weights_only=False)
    for key in state["optimizer"]:
        if key.endswith("/exp_avg"):
            state["optimizer"][key] *= 2
    with make_row_pipeline(STATEFUL, replicas=2) as pipe:
        pipe.load_state_dict(state)
        give_updates(pipe, STATEFUL, range(3, 4), join_replicas)
        assert_near((pipe.state_dict(), [], {}), (after, [], {}), "entries that were replaced")


# ---- an oracle that others made: PyTorch's own pipelines over FSDP2


def compare_with_pytorch(rank: int, folder: Path, in_bfloat16: bool) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    mesh = make_mesh(pp=2, dp=2)
    replica, index = mesh.get_local_rank("dp"), mesh.get_local_rank("pp")
    row: Row = ("gpipe", "adamw", "none")
    prepare = make_prepare(mesh)
    if in_bfloat16:
        low = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
        wide = MixedPrecisionPolicy(**low, output_dtype=torch.float64)
        prepare = make_prepare(mesh, MixedPrecisionPolicy(**low), wide)
    keys = {**list_mesh_keys(mesh, shards=True), "prepare_stage": prepare}
    state, _, _ = train_mesh_row(row, 2, lambda batches: batches[replica], **keys)

    net = make_net()
    halves = nn.Sequential(net.stem, *net.blocks[:2]), nn.Sequential(*net.blocks[2:], net.head)
    half = halves[index]
    prepare(half, index)
    optimizer = OPTIMIZERS["adamw"](half)
    stage = PipelineStage(half, index, 2, torch.device("cpu"), group=mesh["pp"].get_group())
    schedule = ScheduleGPipe(stage, METHODS["gpipe"]["microbatches"], loss_fn=cross_entropy)
    for k in range(UPDATES):
        x, y = draw_mesh_batches(k, METHODS["gpipe"]["microbatches"], 2)[replica]
        optimizer.zero_grad()
        schedule.step(x) if index == 0 else schedule.step(target=y)
        optimizer.step()
    theirs = {
        name: p.full_tensor() for name, p in net.named_parameters() if hasattr(p, "full_tensor")
    }
    ours = [None]
    if rank == 0:
        ours = [state["model"]]
    dist.broadcast_object_list(ours, src=0)
    assert theirs and all(torch.equal(value, ours[0][name]) for name, value in theirs.items())
    if rank == 0:
        torch.save(ours[0], folder / "ours.pt")


@pytest.mark.slow
@pytest.mark.parametrize("in_bfloat16", [False, True])
def test_gpipe_beside_fsdp_equals_pytorchs_own(in_bfloat16: bool, tmp_path: Path) -> None:
    run_in_group(4, compare_with_pytorch, tmp_path, in_bfloat16)
    exact = train_row_on_emulator(("gpipe", "adamw", "none"), 2)[0]["model"]
    gap = float(
        (exact["head.weight"] - torch.load(tmp_path / "ours.pt")["head.weight"]).abs().max()
    )
    assert (gap > 1e-6) == in_bfloat16


# ---- what a caller does between two calls


def halve_weights_after_calls(rank: int, folder: Path) -> None:
    """Write the shards in the model after an evaluation and a prediction, which gather weights."""
    pipe = make_row_pipeline(STATEFUL, **list_mesh_keys(make_mesh(pp=1, dp=2), shards=True))
    state = halve_weights(pipe, lambda batches: batches[rank])
    if rank == 0:
        torch.save(state, folder / "state.pt")


def halve_weights(pipe: ipu_pipe.Pipeline, take: Callable[[Any], Any]) -> Any:
    test = draw_mesh_batches(9, 1, 1)
    calls: List[Callable[[], Any]] = [
        lambda: pipe.evaluate(test),
        lambda: pipe.predict(test[0][0]),
    ]
    for k, call in enumerate(calls):
        give_updates(pipe, STATEFUL, range(k, k + 1), take)
        call()
        with torch.no_grad():
            for weight in pipe.model.parameters():
                weight.mul_(0.5)
    measured = pipe.evaluate(test)
    state = pipe.state_dict()
    pipe.close()
    return state, [], measured


def test_writes_after_an_evaluation_reach_the_shards(tmp_path: Path) -> None:
    """Story: they went into the whole weights that FSDP2 had gathered, and were lost."""
    run_in_group(2, halve_weights_after_calls, tmp_path)
    expected = halve_weights(make_row_pipeline(STATEFUL, replicas=2), join_replicas)
    actual = torch.load(tmp_path / "state.pt", weights_only=False)
    assert_near(expected, actual, "halved")


# ---- a rank that is lost within FSDP2's collectives


def lose_a_rank(rank: int, folder: Path, method: str, is_killed: bool) -> None:
    """Let rank 3, of the second column, stop in its third step; the others write their errors."""
    mesh = make_mesh(pp=2, dp=2)
    row: Row = (method, "sgd", "stage")
    pipe = make_row_pipeline(row, **{**list_mesh_keys(mesh, shards=True), "deadline": 3})

    def stop(module: nn.Module, inputs: Any) -> None:
        if pipe.updates == 3 and rank == 3:
            for other in range(0 if is_killed else 3):
                wait_for_file(folder / f"{other}.txt")
            end_process(0)

    pipe.model.blocks[3].up.register_forward_pre_hook(stop)
    try:
        give_updates(pipe, row, range(6), lambda batches: batches[mesh.get_local_rank("dp")])
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
    give_updates(pipe, ("gpipe", "sgd", "none"), range(1), lambda batches: batches[0])
    assert get_timeout(group) < limit

    def fail(module: nn.Module, inputs: Any) -> None:
        raise RuntimeError("not a collective")

    pipe.model.blocks[0].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError if rank < 2 else ipu_pipe.RunFault) as caught:
        give_updates(pipe, ("gpipe", "sgd", "none"), range(1), lambda batches: batches[0])
    assert ("not a collective" if rank < 2 else "is lost") in str(caught.value)
    pipe.abort()
    assert get_timeout(group) == limit
    end_process(0)


@pytest.mark.slow
def test_errors_within_passes_stay_the_callers_and_limits_come_back(tmp_path: Path) -> None:
    run_in_group(4, meet_errors_and_limits, tmp_path)


# ---- what is refused


def meet_refusals(rank: int, folder: Path) -> None:
    from torch.distributed.fsdp import fully_shard

    mesh = make_mesh(pp=2, dp=2)
    keys = list_mesh_keys(mesh, shards=True)
    x, y = draw_mesh_batches(0, 4, 1)[0]

    def refuse(words: str, build: Callable[[], Any]) -> None:
        with pytest.raises(ipu_pipe.BadInput, match=words):
            build()

    def begin(
        make: Any = OPTIMIZERS["sgd"], seed: int = 0, net: Any = None, **changes: Any
    ) -> None:
        net = make_net() if net is None else net
        if seed:
            nn.init.normal_(net.head.weight, std=float(seed))
        arguments = {"stages": BOUNDARIES, "microbatches": 4, **keys, **changes}
        pipe = ipu_pipe.Pipeline(
            net, cross_entropy, make(net), arguments.pop("method", "gpipe"), **arguments
        )
        try:
            pipe.step(x, y)
        finally:
            pipe.abort()

    refuse("data_group: without process_group", lambda: begin(process_group=None))
    refuse("is in process_group, too", lambda: begin(data_group=mesh["pp"].get_group()))
    refuse("replicas: 3: data_group has 2 ranks", lambda: begin(replicas=3))
    refuse(
        "prepare_stage: returned a .*Linear",
        lambda: begin(prepare_stage=lambda stage, index: nn.Linear(1, 1)),
    )
    refuse("prepare_stage: 3: must be a function", lambda: begin(prepare_stage=3))
    # story: InternalTorchDynamoError
    refuse(
        "prepare_stage: stage.compile.*compile these instead",
        lambda: begin(prepare_stage=lambda stage, index: stage.compile()),
    )
    refuse("prepare_stage: blocks.[02].rise.weight", lambda: begin(prepare_stage=rename_up))
    # over all ranks, also those of other stages
    refuse(
        "holds another stage",
        lambda: begin(prepare_stage=lambda stage, index: fully_shard(stage) and None),
    )
    refuse(
        "optimizer: Muon: not beside",
        lambda: begin(
            make=lambda net: torch.optim.Muon([p for p in net.parameters() if p.ndim == 2])
        ),
    )
    refuse(
        "optimizer: Adafactor: not beside",
        lambda: begin(make=lambda net: torch.optim.Adafactor(net.parameters())),
    )
    for method in ("local_greedy", "local_sgd"):
        refuse(f"method: {method}: not beside", lambda m=method: begin(method=m, microbatches=1))
    refuse("ema: not beside", lambda: begin(ema=0.9))
    refuse(
        "delay_compensation: not beside",
        lambda: begin(method="pipedream", microbatches=1, method_args={"delay_compensation": {}}),
    )
    tied = make_net()
    tied.blocks[3].norm = tied.blocks[0].norm
    refuse("used by several stages", lambda: begin(net=tied))
    # each column alone has one value: only the data group can see it
    here = mesh.get_local_rank("dp")
    refuse("head.weight.*rank 0 has .*rank 1 has", lambda: begin(seed=1 + here))
    for key, values in DIFFERENT.items():
        words = f"{key}: rank 0 has .*, rank 1 has .*: must be the same on all ranks"
        refuse(words, lambda k=key, v=values: begin(**{k: v[here]}))
    wrong_pairs = [dist.new_group([0, 3]), dist.new_group([1, 2])]
    refuse(
        "this rank's number: rank . has 0, rank . has 1.*a data_group holds one stage",
        lambda: begin(data_group=wrong_pairs[rank in (1, 2)]),
    )
    sharded = make_net()
    make_prepare(mesh)(sharded, 0)
    refuse("shard its stages after the cut", lambda: begin(net=sharded))


DIFFERENT = {
    "method": ["gpipe", "pipedream_flush"],
    "stages": [["blocks.2"], ["blocks.1"]],
    "clip": [None, 1.0],
    "reduction": ["exact", "fast"],
}


def rename_up(stage: nn.Module, index: int) -> None:
    for module in list(stage.modules()):
        if isinstance(module, MeshBlock):
            module.rise = module.up
            del module.up


class DroppingNet(MeshNet):
    """A net that draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.drop(x))


def meet_refusals_of_tensor_parallelism(rank: int, folder: Path) -> None:
    """Train wrongly beside tensor parallelism, whose ranks no group of the pipeline joins."""
    mesh = make_mesh(pp=2, tp=2)
    keys = {**list_mesh_keys(mesh, shards=True), "stages": BOUNDARIES, "microbatches": 2}
    here = mesh.get_local_rank("tp")
    whole, cut, other = make_net(), make_net(), make_net()
    make_prepare(mesh)(cut, 0)
    nn.init.constant_(other.head.weight, float(here))
    torch.manual_seed(0)
    rows = [
        (cut, 0, 0, "is sharded .a DTensor.: give whole weights; shard its stages after the cut"),
        (DroppingNet().double(), 0, 0, "model: drop: draws random numbers"),
        (other, 0, 0, "head.weight: values .*: rank . has .*must have the same model"),
        (whole, here, 0, "inputs of the first microbatch .*: rank . has .*read the same batches"),
        (make_net(), 0, here, "seed: rank . has 0, rank . has 1"),
    ]
    for net, k, seed, words in rows:
        optimizer = OPTIMIZERS["sgd"](net)
        pipe = ipu_pipe.Pipeline(net, cross_entropy, optimizer, seed=seed, **keys)
        with pytest.raises(ipu_pipe.BadInput, match=words):
            pipe.step(*draw_mesh_batches(k, 2, 1)[0])
        pipe.abort()


@pytest.mark.slow
def test_what_does_not_fit_is_refused_by_name(tmp_path: Path) -> None:
    run_in_group(4, meet_refusals, tmp_path)


@pytest.mark.slow
def test_ranks_of_tensor_parallelism_that_differ_are_refused(tmp_path: Path) -> None:
    """Story: they trained, each by other numbers."""
    run_in_group(4, meet_refusals_of_tensor_parallelism, tmp_path)


# ---- a language model of transformers
