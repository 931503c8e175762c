"""Test blocks with losses of their own: definition, refusals, heads, rates, accumulation."""

from __future__ import annotations

import copy
import functools
import gc
import itertools
import json
import shutil
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from ipu_pipe.config.load import load_config
from ipu_pipe.errors import BadInput
from ipu_pipe.local.blocks import BlockedModel, get_blocks, observe_blocks
from ipu_pipe.local.heads import AugLocal, TokenHead, make_head
from ipu_pipe.local.structures import make_blocks
from ipu_pipe.model.loss import SumOfLosses
from ipu_pipe.model.observation import observe_training
from ipu_pipe.model.stages import partition
from ipu_pipe.run.train import train
from ipu_pipe.schedule.methods import Structure, resolve_method
from ipu_pipe.schedule.timelines import make_schedule
from ipu_pipe.schedule.versions import VersionTable
from models.resnet import preact_resnet20
from models.transformer import transformer_lm, transformer_translation
from tests.staged_models import draw_microbatches, join_stages
from tests.support.emulating import make_emulator
from tests.support.models import Composed
from tests.support.pairs import cover_pairs
from tests.support.runs import (
    DIGITS,
    ROOT,
    assert_same,
    find_checkpoint,
    list_faults,
    needs_processes,
    read_column,
)
from tests.test_emulator_exact import OPTIMIZERS, train_in_plain_loop
from tools.experiments.costs import (
    Flops,
    compute_per_example,
    compute_sequential,
    make_auglocal_law,
)

UPDATES = 4


def make_block_layers(name: str) -> List[nn.Module]:
    """Return four blocks in a row, with one activation between two."""
    torch.manual_seed(1)
    if name == "mlp":
        second = nn.Sequential(nn.ReLU(), nn.Linear(9, 8))
        blocks = [
            nn.Linear(12, 9),
            second,
            nn.Sequential(nn.Tanh(), nn.Linear(8, 7)),
            nn.Linear(7, 4),
        ]
    else:
        norm = nn.BatchNorm2d if name == "batch_norm" else functools.partial(nn.GroupNorm, 2)
        blocks = [
            nn.Sequential(nn.Unflatten(1, (3, 2, 2)), nn.Conv2d(3, 4, 3, padding=1)),
            nn.Sequential(norm(4), nn.ReLU(), nn.Conv2d(4, 6, 3, padding=1)),
            nn.Sequential(norm(6), nn.ReLU(), nn.Conv2d(6, 6, 3, padding=1)),
            nn.Sequential(nn.Flatten(), nn.Linear(24, 4)),
        ]
    return [block.double() for block in blocks]


MODELS = ("mlp", "batch_norm", "group_norm")


def make_blocked_model(
    stages: Sequence[nn.Module], structure: Structure
) -> Tuple[BlockedModel, Any]:
    return make_blocks(join_stages(list(stages)), draw_microbatches(1)[0][0], structure, None)


def emulate_blocks(
    model: BlockedModel,
    part: Any,
    method_name: str,
    accumulate: int,
    optimizer: str = "sgd",
    args: Dict[str, Any] = {},
) -> None:
    method, data = resolve_method(method_name), draw_microbatches(UPDATES * accumulate)
    table = VersionTable(make_schedule(method, len(part), len(data), accumulate), method)
    loss = SumOfLosses(cross_entropy)
    emulator = make_emulator(model, part, table, data[0], OPTIMIZERS[optimizer], loss, args)
    for k in range(UPDATES):
        emulator.step(data[k * accumulate : (k + 1) * accumulate])
    emulator.close()


# ---- the plain definition, written out


Blocks = List[List[nn.Module]]
Heads = List[Optional[nn.Module]]


def run_frozen(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Return a layer's output without a gradient, and without a change of its buffers."""
    with torch.no_grad():
        return functional_call(layer, {n: b.clone() for n, b in layer.named_buffers()}, (x,))


def train_blocks_plainly(
    blocks: Blocks,
    heads: Heads,
    accumulate: int,
    optimizer: str = "sgd",
    every: Sequence[int] = (1, 1, 1, 1),
) -> None:
    """Train each block by itself, with its own loss and optimizer, on the previous block's output.

    A module in two blocks exists twice, as copies whose gradients are averaged before they step.
    """
    data = draw_microbatches(UPDATES * accumulate)
    optimizers = [
        OPTIMIZERS[optimizer](nn.ModuleList([*block, *filter(None, [head])]).parameters())
        for block, head in zip(blocks, heads)
    ]
    for k in range(UPDATES):
        for x, y in data[k * accumulate : (k + 1) * accumulate]:
            entering = [x]
            # what enters each layer, of the copies that own them
            for block in blocks:
                entering.append(run_frozen(block[-1], entering[-1]))
            for j, (block, head) in enumerate(zip(blocks, heads)):
                value = nn.Sequential(*block)(entering[j + 1 - len(block)])
                (cross_entropy(head(value) if head else value, y) / accumulate).backward()
        for previous, block in zip(blocks, blocks[1:]):
            if len(block) > 1:  # its first layer is the last one of the block before
                for mine, theirs in zip(block[0].parameters(), previous[-1].parameters()):
                    assert torch.equal(mine, theirs), "duplicates stay equal"
                    mean = (theirs.grad + mine.grad) / 2  # type: ignore[operator]
                    mine.grad, theirs.grad = mean, mean.clone()
        for block_optimizer, times in zip(optimizers, every):
            if (k + 1) % times == 0:
                for p in block_optimizer.param_groups[0]["params"]:
                    p.grad /= times
                block_optimizer.step()
                block_optimizer.zero_grad()


def copy_heads(model: BlockedModel) -> Heads:
    blocks = get_blocks(model)
    assert blocks is not None
    return [copy.deepcopy(blocks.get_head(j)) for j in range(len(blocks.pieces))]


def assert_blocks_equal(model: BlockedModel, expected: nn.Module, heads: Heads) -> None:
    states = {
        f"local_heads.{j}.{key}": value
        for j, head in enumerate(heads)
        if head
        for key, value in head.state_dict().items()
    }
    assert_same(model.state_dict(), {**expected.state_dict(), **states})


def cut_into_one_each(stages: List[nn.Module]) -> Blocks:
    return [[stage] for stage in stages]


def cut_into_overlapping(stages: List[nn.Module]) -> Blocks:
    return [[stages[0]], *[[copy.deepcopy(stages[j - 1]), stages[j]] for j in range(1, 4)]]


# method -> its structure, and the blocks of its plain definition
DEFINITIONS = {
    "local_greedy": (Structure(), cut_into_one_each),
    "local_overlapping": (Structure(overlap=1), cut_into_overlapping),
}
CASES = {
    "-".join(map(str, values)): values
    for values in itertools.product(DEFINITIONS, MODELS, (1, 3), OPTIMIZERS)
}


@pytest.mark.parametrize("case", cover_pairs(CASES))
def test_methods_are_their_plain_definitions(case: str) -> None:
    method, name, accumulate, optimizer = CASES[case]
    structure, cut = DEFINITIONS[method]
    stages = make_block_layers(name)
    model, part = make_blocked_model(stages, structure)
    expected, heads = copy.deepcopy(stages), copy_heads(model)
    emulate_blocks(model, part, method, accumulate, optimizer)
    train_blocks_plainly(cut(expected), heads, accumulate, optimizer)
    assert_blocks_equal(model, join_stages(expected), heads)


@pytest.mark.parametrize(
    "name, cut", [("mlp", ()), ("batch_norm", ("2",)), ("group_norm", ("1", "3"))]
)
def test_chunks_are_their_plain_definition_and_one_is_plain_training(
    name: str, cut: Tuple[str, ...]
) -> None:
    stages = make_block_layers(name)
    model, part = make_blocked_model(stages, Structure(blocks=cut or 1))
    expected, heads = copy.deepcopy(stages), copy_heads(model)
    edges = [0, *map(int, cut), 4]
    emulate_blocks(model, part, "local_chunked", 2)
    chunks = [[nn.Sequential(*expected[a:b])] for a, b in zip(edges, edges[1:])]
    train_blocks_plainly(chunks, heads, 2)
    assert_blocks_equal(model, join_stages(expected), heads)
    assert len(part) == len(cut) + 1 and heads[-1] is None


def test_the_last_layers_train_and_the_others_stay() -> None:
    """The statistics of the others' norms change, too."""
    stages = make_block_layers("batch_norm")
    model, part = make_blocked_model(stages, Structure(layers=2))
    expected = copy.deepcopy(stages)
    emulate_blocks(model, part, "last_layers", 2)
    whole = join_stages(expected)
    trained = [p for layer in expected[2:] for p in layer.parameters()]
    make_optimizer = lambda parameters: OPTIMIZERS["sgd"](trained)  # noqa: E731
    train_in_plain_loop(whole, draw_microbatches(2 * UPDATES), 2, make_optimizer)
    assert_blocks_equal(model, whole, [None, None])
    blocks = get_blocks(model)
    assert blocks is not None and not any(p.requires_grad for p in stages[0].parameters())
    blocks.unfreeze()
    assert all(p.requires_grad for p in stages[0].parameters())


def test_blocks_have_rates_and_accumulation_of_their_own() -> None:
    stages = make_block_layers("mlp")
    model, part = make_blocked_model(stages, Structure())
    expected, heads = copy.deepcopy(stages), copy_heads(model)
    emulate_blocks(model, part, "local_greedy", 1, args={"block_accumulation": [1, 2, 4, 1]})
    train_blocks_plainly(cut_into_one_each(expected), heads, 1, every=[1, 2, 4, 1])
    assert_blocks_equal(model, join_stages(expected), heads)
    before = copy.deepcopy(model.state_dict())
    emulate_blocks(model, part, "local_greedy", 1, args={"block_rates": [0.0, 1.0, 0.0, 1.0]})
    pairs = [(name, torch.equal(value, before[name])) for name, value in model.state_dict().items()]
    assert {name.split(".")[0] for name, same in pairs if not same} == {"1", "3", "local_heads"}


# ---- heads and boundaries


def test_heads_are_built_by_model_family() -> None:
    out, tokens, images = torch.randn(2, 10), torch.randn(2, 5, 8), torch.randn(2, 6, 4, 4)
    head = make_head(nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6)), images, out)
    names = [type(m).__name__ for m in head.children()]
    assert names == ["BatchNorm2d", "ReLU", "AdaptiveAvgPool2d", "Flatten", "Linear"]
    first = next(make_head(nn.Sequential(nn.GroupNorm(2, 6)), images, out).children())
    assert isinstance(first, nn.GroupNorm) and first.num_groups == 6
    head = make_head(nn.Identity(), tokens, torch.randn(2, 30, 5))
    assert isinstance(head, TokenHead) and head(tokens).shape == (2, 30, 5)
    assert make_head(nn.Identity(), tokens, out)(tokens).shape == (2, 10)
    assert isinstance(make_head(nn.Identity(), torch.randn(2, 5), out), nn.Linear)
    with pytest.raises(BadInput, match=r"^model: .*\(2, 3, 4, 5, 6\)"):
        make_head(nn.Identity(), torch.randn(2, 3, 4, 5, 6), out)


PICTURES, TOKENS = torch.randn(2, 3, 16, 16), torch.randint(0, 11, (2, 5))


@pytest.mark.parametrize("make, x", [
    (preact_resnet20, PICTURES),
    (functools.partial(transformer_lm, vocabulary=11, width=8, heads=2, blocks=3, context=5), TOKENS),
], ids=["preact", "transformer"])  # fmt: skip
def test_the_projects_models_can_be_chunked(make: Any, x: torch.Tensor) -> None:
    model = make()
    blocked_model, part = make_blocks(model, x, Structure(blocks=3), None)
    outputs = blocked_model.train()(x)
    assert len(outputs) == 3 and len({tuple(o.shape) for o in outputs}) == 1 and len(part) == 3
    assert torch.equal(blocked_model.eval()(x), model.eval()(x))
    assert set(model.state_dict()) < set(blocked_model.state_dict())


def test_a_loss_that_fails_leaves_the_blocks_overlapping() -> None:
    stages = [nn.Linear(4, 4) for _ in range(2)]
    model, _ = make_blocks(nn.Sequential(*stages), torch.ones(2, 4), Structure(overlap=1), ["1"])
    with pytest.raises(ZeroDivisionError):
        observe_blocks(model, lambda output, y: 1 / 0, (torch.ones(2, 4), torch.zeros(2)))
    assert get_blocks(model).overlap == 1


def test_heads_of_layers_are_those_of_auglocal() -> None:
    """Layers and depths equal those that ChenxiangMA/AugLocal (commit 98c90d6) prints for its ResNet-32 of 16 layers.

    Its arguments are `--aux_net_depth 3 --pyramid_coeff 0.5`.
    """
    heads, L = AugLocal(3, 0.5), 16
    assert [heads.compute_depth(i, L) for i in range(L - 1)] == [3] * 7 + [2] * 8
    picked = {i: heads.pick(i, L) for i in (0, 3, 8, 13, 14)}
    assert picked == {0: [5, 10, 15], 3: [7, 11, 15], 8: [12, 15], 13: [14, 15], 14: [15]}
    # a layer's head in the shapes of the layers that it picks, channels doubled with stride 2, then the usual head
    sizes = [(3, 4, 1), (4, 4, 1), (4, 8, 2)]
    layers = [nn.Conv2d(a, b, 3, stride, 1) for a, b, stride in sizes]
    model = nn.Sequential(*layers, nn.BatchNorm2d(8))
    x, activations = torch.randn(2, 3, 8, 8), []
    for module in layers:
        x = module(x)
        activations.append(x)
    head = AugLocal(2, 0.0).make(model, 0, activations, torch.zeros(2, 5))
    names = [type(layer).__name__ for layer in head]
    assert names == ["ResidualLayer", "ResidualLayer", "Sequential"]
    assert head[0].conv1.out_channels == 8 and all(module.training for module in head.modules())
    assert [head[i].conv1.stride for i in (0, 1)] == [(2, 2), (1, 1)]
    assert head.eval()(activations[0]).shape == (2, 5) and head[0].norm1.num_batches_tracked == 0
    with pytest.raises(BadInput, match="method_args.head: depth"):
        AugLocal(1).make(model, 0, [torch.zeros(2, 7, 4)] * 2, torch.zeros(2, 5))


def test_the_law_of_heads_of_layers() -> None:
    flops = Flops(10.0, 1.0, 2.0, 4, 100)
    law = make_auglocal_law([2, 1, 1])
    # four layers, heads of 2, 1 and 1 more, and four usual heads; the slowest is the first: its layer, two more and a head
    assert compute_per_example(law, flops) == 3 * (10 * 8 + 4)
    assert compute_sequential(law, flops, 5, 2) == pytest.approx(
        5 * 2 * 3 * (10 * 3 + 1) / 2 + 5 * 1000 * 31 / 84 / 2
    )


@pytest.mark.parametrize("make, x, begin", [
    (preact_resnet20, PICTURES, "layer1.0.conv2"),
    (functools.partial(transformer_translation, 20, 20, width=8, heads=2, layers=2, feedforward=8),
     torch.ones(2, 2, 5, dtype=torch.int64), "decoder2"),
])  # fmt: skip
def test_boundaries_that_a_skip_connection_crosses_are_refused(
    make: Any, x: Any, begin: str
) -> None:
    with pytest.raises(BadInput, match=f"^stages: .*{begin}: 2 "):
        make_blocks(make(), x, Structure(blocks=(begin,)), None)


def make_bias_head(activation: torch.Tensor, output: torch.Tensor) -> nn.Module:
    """Return a head as a user writes one."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(activation[0].numel(), output.shape[1], bias=False)
    )


def make_wrong_head(activation: torch.Tensor, output: torch.Tensor) -> nn.Module:
    return nn.Linear(activation.shape[1], 3)


def train_digits_blocks(out: Path, *sets: str, **others: Any) -> Any:
    """Train on the digits and return the report."""
    short = [
        "steps=6", "log.tensorboard=false", "log.every=2", "evaluate.subset=100", "stages=4", "backend.threads=1",
    ]  # fmt: skip
    return train(load_config(DIGITS, [*short, *sets]), out, quiet=True, **others)


@pytest.mark.parametrize("head", ["tests.test_local:make_bias_head", "{depth: 2, pyramid: 0.0}"])
def test_a_run_reports_every_head_and_resumes(head: str, tmp_path: Path) -> None:
    sets = ["method=local_greedy", f"method_args.head={head}", "checkpoint.every=3"]
    out = tmp_path / "a"
    report = train_digits_blocks(out, *sets)
    assert [block["index"] for block in report["blocks"]] == [0, 1, 2, 3]
    assert report["blocks"][-1]["test_accuracy"] == report["final"]["test_accuracy"]
    for key, usual in (("block_train_loss", "train_loss"), ("block_test_accuracy", "test_loss")):
        assert [len(values) for values in read_column(out, key)] == [4] * len(
            read_column(out, usual)
        )
    assert [(link["src"], link["dst"]) for link in report["links"]] == [(0, 1), (1, 2), (2, 3)]
    shutil.rmtree(find_checkpoint(out, 6))
    (out / "summary.json").unlink()
    resumed = train_digits_blocks(out, *sets, resume=True)
    assert [resumed[key] for key in ("final", "blocks")] == [report["final"], report["blocks"]]
    # the weights serve other methods: the heads are left out
    other = train_digits_blocks(
        tmp_path / "b", "method=gpipe", f"init_from={find_checkpoint(out, 6) / 'model.safetensors'}"
    )
    assert other["initial"]["test_accuracy"] == report["final"]["test_accuracy"]


GREEDY, OVERLAPPING = "local_greedy", "local_overlapping"


@pytest.mark.parametrize("method, setting, place", [
    (GREEDY, "method_args.t2={}", "method_args.t2: "), ("gpipe", "method_args.blocks=2", "method_args.blocks: 2: "),
    (GREEDY, "method_args.layers=2", "method_args.layers: 2: "), ("local_chunked", "method_args.blocks=[nothing]", "nothing: "),
    ("local_chunked", "method_args.blocks=40", "blocks: 40: "), ("last_layers", "method_args.layers=9", "layers: 9: "),
    (GREEDY, "method_args.block_rates=[1.0]", "block_rates: "), ("gpipe", "method_args.block_rates=[1.0]", "block_rates: "),
    ("local_chunked", "method_args.block_accumulation=[1, 4]", "method_args.block_accumulation"),
    (GREEDY, "clip={norm: 1.0, scope: global}", "clip: {scope: stage, norm: 0.5} (norm / sqrt(stages)"),
    (OVERLAPPING, "clip={norm: 1.0, scope: stage}", "clip: "), (OVERLAPPING, "replicas=2", "replicas: 2: "),
    (OVERLAPPING, "method_args.block_accumulation=[1, 1, 1, 1]", "method_args.block_accumulation"),
    (OVERLAPPING, "method_args.overlap=2", "overlap: 2: "), (GREEDY, "stages={count: 4, by: time}", "stages"),
    (GREEDY, "method_args.head=tests.test_local:make_wrong_head", "method_args.head: "),
    (GREEDY, "method_args.head=tests.test_local:nothing", "method_args.head: "),
])  # fmt: skip
def test_arguments_that_do_not_fit_the_method_are_refused(
    method: str, setting: str, place: str, tmp_path: Path
) -> None:
    sets = "micro_batch_size=8", f"method={method}", setting
    faults = list_faults(train_digits_blocks, tmp_path / "run", *sets)
    assert any(place in fault for fault in faults) and not (tmp_path / "run").exists()


def test_weights_of_the_model_itself_have_duplicates() -> None:
    """The model has a parameter of its own, used in the first block."""
    torch.manual_seed(0)
    layers = {name: nn.Linear(a, b) for name, a, b in (("a", 12, 12), ("b", 12, 8), ("c", 8, 4))}
    forward = lambda m, x: m.c(m.b(m.a(x + m.place)))  # noqa: E731
    model, x = Composed(forward, **layers, place=nn.Parameter(torch.zeros(12))), torch.randn(2, 12)
    make_blocks(model, x, Structure(), ["b", "c"])
    blocked_model, _ = make_blocks(model, x, Structure(overlap=1), ["b", "c"])
    outputs = blocked_model.train()(x)
    sum(output.sum() for output in outputs[1:]).backward()  # the first block's own loss apart
    assert model.place.grad is None
    get_blocks(blocked_model).average_duplicates()  # type: ignore[union-attr]
    assert model.place.grad.abs().sum() > 0
    # as vector_to_parameters does: the weights are in other memory
    for p in model.parameters():
        p.data = 2 * p.data
    with torch.no_grad():
        without_duplicates = blocked_model(x)
    assert all(map(torch.equal, blocked_model(x), without_duplicates))


def make_inplace_head(activation: torch.Tensor, output: torch.Tensor) -> nn.Module:
    return nn.Sequential(nn.ReLU(inplace=True), nn.Linear(activation.shape[1], output.shape[1]))


@pytest.mark.parametrize("head, wrap", [(make_inplace_head, lambda x: x), (None, lambda x: (x,))])
def test_a_head_may_begin_in_place_and_the_one_input_may_be_in_a_tuple(
    head: Any, wrap: Any
) -> None:
    """Story: an input in a tuple, as a loader gives it, was refused, because all of the model ran in the last block."""
    model, x = nn.Sequential(nn.Linear(12, 9), nn.Linear(9, 4)), torch.randn(3, 12)
    blocked_model, _ = make_blocks(model, wrap(x), Structure(), ["1"], head=head)
    assert torch.equal(blocked_model.train()(x)[-1], model(x))
    assert torch.equal(blocked_model.eval()(x), model(x))


def test_observing_a_model_frees_its_activations() -> None:
    """Story: each observation kept a graph, and so the weights that processes free."""

    def observe_model() -> Any:
        model = nn.Sequential(nn.Linear(12, 500), nn.ReLU(), nn.Linear(500, 4))
        x, y = torch.randn(64, 12), torch.randint(0, 4, (64,))
        partition(model, x)
        for _ in range(3):
            observe_training(model, x, y, lambda x, y: cross_entropy(model(x), y))
        return weakref.ref(model[0].weight)

    weight = observe_model()
    gc.collect()
    assert weight() is None


def test_a_refused_job_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.ReLU(), nn.Linear(12, 10))
    sets = ["method=last_layers", 'stages=["3"]', "clip={norm: 1.0, scope: global}"]
    with pytest.raises(BadInput, match="clip.scope: global"):
        train_digits_blocks(tmp_path / "run", *sets, model=model)
    assert all(p.requires_grad for p in model.parameters())


# ---- processes


def test_blocks_send_half_of_a_pipelines_traffic(tmp_path: Path) -> None:
    """Also with replicas, and gradients that are clipped by block."""
    more = "replicas=2", "clip={norm: 0.5, scope: stage}"
    links = [
        train_digits_blocks(tmp_path / method, f"method={method}", "steps=2", *more)["links"]
        for method in ("pipedream", "local_greedy")
    ]
    totals = [sum(link["bytes"] for link in of_method) for of_method in links]
    assert totals[0] == 2 * totals[1] > 0


@pytest.mark.slow
@needs_processes
def test_the_equality_tool_compares_processes_with_the_emulator() -> None:
    tool = "tools/equality.py --ranks 2 --models mlp --json --cases local_greedy".split()
    result = subprocess.run([sys.executable, *tool], cwd=ROOT, capture_output=True, text=True)
    (row,) = json.loads(result.stdout)["rows"]
    assert row["difference"] == result.returncode == 0 < row["bytes"]
