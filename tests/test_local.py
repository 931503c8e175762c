"""Test blocks with losses of their own: definition, refusals, heads, rates, accumulation."""

from __future__ import annotations

import copy
import functools
import gc
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
from torch.nn.functional import cross_entropy

from ipu_pipe.backends.emulator.replay import Emulator
from ipu_pipe.config.load import load_config
from ipu_pipe.errors import BadInput
from ipu_pipe.local.blocks import BlockedModel, get_blocks, observe_blocks
from ipu_pipe.local.heads import AugLocal, TokenHead, make_head
from ipu_pipe.local.structures import make_blocks
from ipu_pipe.model.loss import SumOfLosses
from ipu_pipe.model.observation import observe_training
from ipu_pipe.model.stages import partition
from ipu_pipe.replay.work import Work
from ipu_pipe.run.train import train
from ipu_pipe.schedule.methods import Structure, resolve_method
from ipu_pipe.schedule.timelines import make_schedule
from ipu_pipe.schedule.versions import VersionTable
from ipu_pipe.update.apply import UpdateRules, choose_rules
from ipu_pipe.update.optimizer import make_groups
from models.resnet import preact_resnet20, resnet18
from models.transformer import transformer_lm, transformer_translation
from models.vgg import vgg11
from tests.staged_models import draw_microbatches, join_stages
from tests.support.runs import (
    DIGITS,
    ROOT,
    assert_same,
    find_checkpoint,
    list_faults,
    needs_processes,
    read_column,
)
from tools.experiments.costs import (
    Flops,
    compute_per_example,
    compute_sequential,
    make_auglocal_law,
)

UPDATES = 4
OPTIMIZERS = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=1e-3),
    "adamw": functools.partial(torch.optim.AdamW, lr=0.02, weight_decay=1e-2),
}


def make_block_layers(name: str) -> List[nn.Module]:
    """Return four blocks in a row, with one activation between two."""
    torch.manual_seed(1)
    if name == "mlp":
        middle = [
            nn.Sequential(nn.ReLU(), nn.Linear(9, 8)),
            nn.Sequential(nn.Tanh(), nn.Linear(8, 7)),
        ]
        blocks = [nn.Linear(12, 9), *middle, nn.Linear(7, 4)]
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
    optimizer: str,
    args: Dict[str, Any] = {},
) -> None:
    method, data = resolve_method(method_name), draw_microbatches(UPDATES * accumulate)
    table = VersionTable(make_schedule(method, len(part), len(data), accumulate), method)
    make = OPTIMIZERS[optimizer]
    rate = make.keywords["lr"]
    rules = UpdateRules(
        choose_rules(args, method, table.rule_lag(), accumulate),
        make(make_groups(model, part)),
        lambda k: rate,
    )
    emulator = Emulator(Work(SumOfLosses(cross_entropy), table, rules), model, part, data[0])
    for k in range(UPDATES):
        emulator.step(data[k * accumulate : (k + 1) * accumulate])
    emulator.close()


# ---- the plain definition, written out


Blocks = List[List[nn.Module]]
Heads = List[Optional[nn.Module]]


def train_blocks_plainly(
    blocks: Blocks, heads: Heads, accumulate: int, optimizer: str, every: Sequence[int] = ()
) -> None:
    """Train each block by itself, with its own loss and optimizer, on the previous block's output.

    A module in two blocks exists twice, as copies whose gradients are averaged before they step.
    """
    block_modules = [
        nn.ModuleList([*block, *([head] if head else [])]) for block, head in zip(blocks, heads)
    ]
    optimizers = [OPTIMIZERS[optimizer](modules.parameters()) for modules in block_modules]
    data = draw_microbatches(UPDATES * accumulate)
    for k in range(UPDATES):
        for x, y in data[k * accumulate : (k + 1) * accumulate]:
            entering = [x]
            for layer in [
                block[-1] for block in blocks
            ]:  # what enters each layer, of the copies that own them
                buffers = {name: b.clone() for name, b in layer.named_buffers()}
                with torch.no_grad():
                    entering.append(layer(entering[-1]))
                for name, b in layer.named_buffers():
                    b.copy_(buffers[name])
            for j, (block, head) in enumerate(zip(blocks, heads)):
                value = entering[j + 1 - len(block)].detach()
                for layer in block:
                    value = layer(value)
                loss = cross_entropy(head(value) if head else value, y)
                (loss / accumulate).backward()
        for j, block in enumerate(blocks):
            if len(block) > 1:  # its first layer is the last one of the block before
                for mine, theirs in zip(block[0].parameters(), blocks[j - 1][-1].parameters()):
                    assert torch.equal(mine, theirs), "duplicates stay equal"
                    assert mine.grad is not None and theirs.grad is not None
                    mean = (theirs.grad + mine.grad) / 2
                    mine.grad, theirs.grad = mean, mean.clone()
        for j, block_optimizer in enumerate(optimizers):
            times = every[j] if every else 1
            if (k + 1) % times == 0:
                for group in block_optimizer.param_groups:
                    for p in group["params"]:
                        if p.grad is not None and times > 1:
                            p.grad /= times
                block_optimizer.step()
                block_optimizer.zero_grad()


def copy_heads(model: BlockedModel) -> Heads:
    blocks = get_blocks(model)
    assert blocks is not None
    return [copy.deepcopy(blocks.get_head(j)) for j in range(len(blocks.pieces))]


def assert_blocks_equal(model: BlockedModel, expected: nn.Module, heads: Heads) -> None:
    named_heads = {f"local_heads.{j}": head for j, head in enumerate(heads) if head}
    states = {
        f"{prefix}.{key}": value
        for prefix, head in named_heads.items()
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


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("method", DEFINITIONS)
def test_methods_are_their_plain_definitions(
    method: str, name: str, accumulate: int, optimizer: str
) -> None:
    structure, cut = DEFINITIONS[method]
    stages = make_block_layers(name)
    model, part = make_blocked_model(stages, structure)
    expected, heads = copy.deepcopy(stages), copy_heads(model)
    emulate_blocks(model, part, method, accumulate, optimizer)
    train_blocks_plainly(cut(expected), heads, accumulate, optimizer)
    assert_blocks_equal(model, join_stages(expected), heads)


@pytest.mark.parametrize("cut", [(), ("2",), ("1", "3")])
@pytest.mark.parametrize("name", MODELS)
def test_chunks_are_their_plain_definition_and_one_is_plain_training(
    name: str, cut: Tuple[str, ...]
) -> None:
    stages = make_block_layers(name)
    model, part = make_blocked_model(stages, Structure(blocks=cut or 1))
    expected, heads = copy.deepcopy(stages), copy_heads(model)
    edges = [0, *map(int, cut), 4]
    emulate_blocks(model, part, "local_chunked", 2, "sgd")
    train_blocks_plainly(
        [[nn.Sequential(*expected[a:b])] for a, b in zip(edges, edges[1:])], heads, 2, "sgd"
    )
    assert_blocks_equal(model, join_stages(expected), heads)
    assert len(part) == len(cut) + 1 and heads[-1] is None


def test_the_last_layers_train_and_the_others_stay() -> None:
    stages = make_block_layers("batch_norm")
    model, part = make_blocked_model(stages, Structure(layers=2))
    expected = copy.deepcopy(stages)
    emulate_blocks(model, part, "last_layers", 2, "sgd")
    front = nn.Sequential(*expected[:2]).train()
    optimizer = OPTIMIZERS["sgd"]([p for layer in expected[2:] for p in layer.parameters()])
    data = draw_microbatches(2 * UPDATES)
    for k in range(UPDATES):
        for x, y in data[2 * k : 2 * k + 2]:
            with torch.no_grad():
                value = front(x)
            (cross_entropy(expected[3](expected[2](value)), y) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_blocks_equal(model, join_stages(expected), [None, None])
    blocks = get_blocks(model)
    assert blocks is not None and not any(p.requires_grad for p in stages[0].parameters())
    blocks.unfreeze()
    assert all(p.requires_grad for p in stages[0].parameters())


def test_blocks_have_rates_and_accumulation_of_their_own() -> None:
    stages = make_block_layers("mlp")
    model, part = make_blocked_model(stages, Structure())
    expected, heads = copy.deepcopy(stages), copy_heads(model)
    emulate_blocks(model, part, "local_greedy", 1, "sgd", {"block_accumulation": [1, 2, 4, 1]})
    train_blocks_plainly(cut_into_one_each(expected), heads, 1, "sgd", every=[1, 2, 4, 1])
    assert_blocks_equal(model, join_stages(expected), heads)
    model, part = make_blocked_model(make_block_layers("mlp"), Structure())
    before = copy.deepcopy(model.state_dict())
    emulate_blocks(model, part, "local_greedy", 1, "sgd", {"block_rates": [0.0, 1.0, 0.0, 1.0]})
    changed = {
        name.split(".")[0]
        for name, value in model.state_dict().items()
        if not torch.equal(value, before[name])
    }
    assert changed == {"1", "3", "local_heads"}


# ---- heads and boundaries


def test_heads_are_built_by_model_family() -> None:
    images = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6))
    out = torch.randn(2, 10)
    head = make_head(images, torch.randn(2, 6, 4, 4), out)
    assert [type(m) for m in head.children()] == [
        nn.BatchNorm2d,
        nn.ReLU,
        nn.AdaptiveAvgPool2d,
        nn.Flatten,
        nn.Linear,
    ]
    head = make_head(nn.Sequential(nn.GroupNorm(2, 6)), torch.randn(1, 6, 4, 4), out)
    first = next(head.children())
    assert isinstance(first, nn.GroupNorm) and first.num_groups == 6
    head = make_head(nn.Identity(), torch.randn(2, 5, 8), torch.randn(2, 30, 5))
    assert isinstance(head, TokenHead) and head(torch.randn(2, 5, 8)).shape == (2, 30, 5)
    assert make_head(nn.Identity(), torch.randn(2, 5, 8), out)(torch.randn(2, 5, 8)).shape == (
        2,
        10,
    )
    assert isinstance(make_head(nn.Identity(), torch.randn(2, 5), out), nn.Linear)
    with pytest.raises(BadInput, match=r"^model: .*\(2, 3, 4, 5, 6\)"):
        make_head(nn.Identity(), torch.randn(2, 3, 4, 5, 6), out)


@pytest.mark.parametrize(
    "model, x",
    [
        (resnet18(classes=10, small_images=True), torch.randn(2, 3, 16, 16)),
        (preact_resnet20(), torch.randn(2, 3, 16, 16)),
        (vgg11(), torch.randn(2, 3, 32, 32)),
        (
            transformer_lm(vocabulary=11, width=8, heads=2, blocks=3, context=5),
            torch.randint(0, 11, (2, 5)),
        ),
    ],
    ids=["resnet", "preact", "vgg", "transformer"],
)
def test_the_projects_models_can_be_chunked(model: nn.Module, x: torch.Tensor) -> None:
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
    """Layers and depths equal those that ChenxiangMA/AugLocal (commit 98c90d6) prints for its
    ResNet-32 of 16 layers.

    Its arguments are `--aux_net_depth 3 --pyramid_coeff 0.5`.
    """
    heads, L = AugLocal(3, 0.5), 16
    depths = [
        max(1, round(3 * (1 - (i * 0.5) / (L - 2)) + (i * 0.5) / (L - 2) * 1)) for i in range(L - 1)
    ]
    assert [heads.compute_depth(i, L) for i in range(L - 1)] == depths == [3] * 7 + [2] * 8
    assert (
        heads.pick(0, L) == [5, 10, 15]
        and heads.pick(3, L) == [7, 11, 15]
        and heads.pick(8, L) == [12, 15]
    )
    assert heads.pick(13, L) == [14, 15] and heads.pick(14, L) == [15]
    assert [AugLocal(5, 0.0).compute_depth(i, L) for i in (0, 14)] == [5, 5]
    # a layer's head in the shapes of the layers that it picks, channels doubled with stride 2, then the usual head
    convolutions = [nn.Conv2d(3, 4, 3, 1, 1), nn.Conv2d(4, 4, 3, 1, 1), nn.Conv2d(4, 8, 3, 2, 1)]
    model = nn.Sequential(*convolutions, nn.BatchNorm2d(8))
    x, activations = torch.randn(2, 3, 8, 8), []
    for module in model[:3]:
        x = module(x)
        activations.append(x)
    head = AugLocal(2, 0.0).make(model, 0, activations, torch.zeros(2, 5))
    assert [type(layer).__name__ for layer in head] == [
        "ResidualLayer",
        "ResidualLayer",
        "Sequential",
    ]
    assert (
        head[0].conv1.out_channels == 8
        and head[0].conv1.stride == (2, 2)
        and head[1].conv1.stride == (1, 1)
    )
    assert all(module.training for module in head.modules())
    assert head.eval()(activations[0]).shape == (2, 5)
    assert head[0].norm1.num_batches_tracked == 0
    with pytest.raises(BadInput, match="method_args.head: depth"):
        AugLocal(1).make(model, 0, [torch.zeros(2, 7, 4), torch.zeros(2, 7, 4)], torch.zeros(2, 5))


def test_the_law_of_heads_of_layers() -> None:
    flops = Flops(10.0, 1.0, 2.0, 4, 100)
    law = make_auglocal_law([2, 1, 1])
    # four layers, heads of 2, 1 and 1 more, and four usual heads; the slowest is the first: its layer, two more and a head
    assert compute_per_example(law, flops) == 3 * (10 * 8 + 4)
    assert compute_sequential(law, flops, 5, 2) == pytest.approx(
        5 * 2 * 3 * (10 * 3 + 1) / 2 + 5 * 1000 * 31 / 84 / 2
    )


def test_boundaries_that_a_skip_connection_crosses_are_refused() -> None:
    with pytest.raises(BadInput, match="^stages: layer1.0.conv2: 2 "):
        make_blocks(
            preact_resnet20(),
            torch.randn(2, 3, 16, 16),
            Structure(blocks=("layer1.0.conv2",)),
            None,
        )
    model = transformer_translation(20, 20, width=8, heads=2, layers=2, feedforward=8)
    with pytest.raises(BadInput, match="^stages: .*decoder2: 2 "):
        make_blocks(model, torch.randint(1, 20, (2, 2, 5)), Structure(blocks=("decoder2",)), None)


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
        "steps=6",
        "log.tensorboard=false",
        "log.every=2",
        "evaluate.subset=100",
        "stages=4",
        "backend.threads=1",
    ]
    return train(load_config(DIGITS, [*short, *sets]), out, quiet=True, **others)


@pytest.mark.parametrize("head", ["tests.test_local:make_bias_head", "{depth: 2, pyramid: 0.0}"])
def test_a_run_reports_every_head_and_resumes(head: str, tmp_path: Path) -> None:
    sets, out = (
        ["method=local_greedy", f"method_args.head={head}", "checkpoint.every=3"],
        tmp_path / "a",
    )
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
    resumed_report = train_digits_blocks(out, *sets, resume=True)
    assert (
        resumed_report["final"] == report["final"] and resumed_report["blocks"] == report["blocks"]
    )
    # the weights serve other methods: the heads are left out
    other = train_digits_blocks(
        tmp_path / "b", "method=gpipe", f"init_from={find_checkpoint(out, 6) / 'model.safetensors'}"
    )
    assert other["initial"]["test_accuracy"] == report["final"]["test_accuracy"]


@pytest.mark.parametrize(
    "method, setting, place",
    [
        ("local_greedy", "method_args.t2={}", "method_args.t2: "),
        ("gpipe", "method_args.blocks=2", "method_args.blocks: 2: "),
        ("local_greedy", "method_args.layers=2", "method_args.layers: 2: "),
        ("local_chunked", "method_args.blocks=0", "method_args.blocks: 0: "),
        ("local_chunked", "method_args.blocks=[nothing]", "nothing: "),
        ("local_chunked", "method_args.blocks=40", "method_args.blocks: 40: "),
        ("last_layers", "method_args.layers=9", "method_args.layers: 9: "),
        ("local_greedy", "method_args.block_rates=[1.0]", "method_args.block_rates: "),
        ("gpipe", "method_args.block_rates=[1.0]", "method_args.block_rates: "),
        (
            "local_chunked",
            "method_args.block_accumulation=[1, 4]",
            "method_args.block_accumulation",
        ),
        (
            "local_greedy",
            "clip={norm: 1.0, scope: global}",
            "clip: {scope: stage, norm: 0.5} (norm / sqrt(stages)",
        ),
        ("local_overlapping", "clip={norm: 1.0, scope: stage}", "clip: "),
        (
            "local_overlapping",
            "method_args.block_accumulation=[1, 1, 1, 1]",
            "method_args.block_accumulation",
        ),
        ("local_overlapping", "method_args.overlap=2", "overlap: 2: "),
        ("local_greedy", "stages={count: 4, by: time}", "stages"),
        ("local_overlapping", "replicas=2", "replicas: 2: "),
        ("local_greedy", "method_args.head=tests.test_local:make_wrong_head", "method_args.head: "),
        ("local_greedy", "method_args.head=tests.test_local:nothing", "method_args.head: "),
    ],
)
def test_arguments_that_do_not_fit_the_method_are_refused(
    method: str, setting: str, place: str, tmp_path: Path
) -> None:
    faults = list_faults(
        train_digits_blocks, tmp_path / "run", "micro_batch_size=8", f"method={method}", setting
    )
    assert any(place in fault for fault in faults) and not (tmp_path / "run").exists()


class OffsetModel(nn.Sequential):
    """A model with a parameter of its own, used in the first block."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(12, 12), nn.Linear(12, 8), nn.Linear(8, 4))
        self.place = nn.Parameter(torch.zeros(12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return self[2](self[1](self[0](x + self.place)))


def test_weights_of_the_model_itself_have_duplicates() -> None:
    torch.manual_seed(0)
    model, x = OffsetModel(), torch.randn(2, 12)
    make_blocks(model, x, Structure(), ["1", "2"])
    blocked_model, _ = make_blocks(model, x, Structure(overlap=1), ["1", "2"])
    outputs = blocked_model.train()(x)
    sum(output.sum() for output in outputs[1:]).backward()  # the first block's own loss apart
    assert model.place.grad is None
    blocks = get_blocks(blocked_model)
    assert blocks is not None
    blocks.average_duplicates()
    assert model.place.grad is not None and model.place.grad.abs().sum() > 0


def test_a_head_may_begin_in_place() -> None:
    def make_inplace_head(activation: torch.Tensor, output: torch.Tensor) -> nn.Module:
        return nn.Sequential(nn.ReLU(inplace=True), nn.Linear(activation.shape[1], output.shape[1]))

    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(12, 9), nn.Linear(9, 4)), torch.randn(3, 12)
    blocked_model, _ = make_blocks(model, x, Structure(), ["1"], head=make_inplace_head)
    assert torch.equal(blocked_model.train()(x)[-1], model(x)) and torch.equal(
        blocked_model.eval()(x), model(x)
    )


def test_a_run_resumes_only_with_its_own_blocks(tmp_path: Path) -> None:
    out, sets = tmp_path / "run", ["method=local_greedy", "stages=[fc2, fc4]", "checkpoint.every=3"]
    train_digits_blocks(out, *sets)
    (out / "summary.json").unlink()
    with pytest.raises(BadInput, match="stages.*the config of a run cannot change"):
        train_digits_blocks(out, *sets, "stages=[fc3, fc4]", resume=True)
    # a new run from its weights takes the heads along
    train_digits_blocks(
        tmp_path / "again", *sets, f"init_from={find_checkpoint(out, 6) / 'model.safetensors'}"
    )
    key = "block_test_accuracy"
    assert read_column(out, key)[-1] == read_column(tmp_path / "again", key)[0]


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


def test_clipping_by_block_and_replicas_train(tmp_path: Path) -> None:
    assert (
        train_digits_blocks(
            tmp_path, "method=local_chunked", "replicas=2", "clip={norm: 0.5, scope: stage}"
        )["steps"]
        == 6
    )


# ---- processes


@pytest.mark.slow
@needs_processes
def test_processes_give_the_emulators_weights_and_half_the_traffic() -> None:
    cases = "pipedream local_greedy local_chunked local_overlapping last_layers"
    arguments = f"tools/equality.py --ranks 2 4 --models mlp resnet20-batchnorm --json --cases {cases}".split()
    result = subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    rows = {(r["case"], r["model"], r["ranks"]): r for r in json.loads(result.stdout)["rows"]}
    assert len(rows) == 2 * (4 * 2 + 1) and all(r["difference"] == 0 for r in rows.values())
    for model in ("mlp", "resnet20-batchnorm"):
        for ranks in (2, 4):
            whole_way, half_way = (
                rows[case, model, ranks]["bytes"] for case in ("pipedream", "local_greedy")
            )
            assert whole_way == 2 * half_way > 0
