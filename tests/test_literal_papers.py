"""The emulator's weights against the papers' algorithms in NumPy alone, through the step object.

Both are in float64 and sum in different orders: they must agree to 1e-12.
"""

from __future__ import annotations

import functools
from typing import Any, Callable, Dict, List, Optional, Tuple

import numpy as np
import pytest
import torch
from torch import nn

import ipu_pipe
from ipu_pipe.schedule.methods import resolve_method
from ipu_pipe.schedule.timelines import make_schedule
from ipu_pipe.schedule.versions import VersionTable
from tests import literal_papers
from tests.literal_papers import Matrix, Microbatch, Net
from tests.test_asynchrony import make_randomized_replays

LR = 0.3
SIZES = (5, 6, 4, 7, 3)
STAGES = len(SIZES) - 1


def make_torch_net() -> nn.Sequential:
    """Return four stages, tanh after all but the last."""
    torch.manual_seed(5)
    layers: List[nn.Module] = [nn.Linear(a, b) for a, b in zip(SIZES, SIZES[1:])]
    stages = [nn.Sequential(layer, nn.Tanh()) for layer in layers[:-1]] + [layers[-1]]
    return nn.Sequential(stages[0], *map(ipu_pipe.begin_stage, stages[1:])).double()


def draw_data(count: int) -> List[Microbatch]:
    """Return `count` microbatches of three samples."""
    rng = np.random.default_rng(8)
    return [(rng.normal(size=(3, SIZES[0])), rng.integers(SIZES[-1], size=3)) for _ in range(count)]


def read_matrices(state: Dict[str, torch.Tensor]) -> Dict[str, Matrix]:
    """Return the linear layers of a state dict as matrices whose last column is the bias."""
    names = [name[: -len(".weight")] for name in state if name.endswith(".weight")]
    return {
        name: np.column_stack([state[f"{name}.weight"].numpy(), state[f"{name}.bias"].numpy()])
        for name in names
    }


def split_heads(state: Dict[str, torch.Tensor]) -> Tuple[Net, Dict[int, Matrix]]:
    """Return the network's own layers, and the heads by block."""
    prefix = "local_heads."
    matrices = read_matrices({name: value.clone() for name, value in state.items()})
    heads = {int(n[len(prefix) :]): m for n, m in matrices.items() if n.startswith(prefix)}
    return [m for n, m in matrices.items() if not n.startswith(prefix)], heads


def run_pipeline(
    data: List[Microbatch],
    method: str,
    args: Dict[str, Any],
    each: int,
    make_optimizer: Callable[..., torch.optim.Optimizer],
) -> Tuple[Dict[str, torch.Tensor], List[int]]:
    """Train through the step object, `each` microbatches a step.

    Return the state dict of the model, and the stage of each update in turn.
    """
    net = make_torch_net()
    optimizer = make_optimizer(net.parameters())
    loss = nn.functional.cross_entropy
    tensors = [(torch.from_numpy(x), torch.from_numpy(y)) for x, y in data]
    updated: List[int] = []
    with ipu_pipe.Pipeline(net, loss, optimizer, method, method_args=args, seed=4) as pipe:
        pipe.on_update(lambda update, stage, parameters: updated.append(stage))
        for k in range(0, len(tensors), each):
            xs, ys = zip(*tensors[k : k + each])
            pipe.step(torch.cat(xs), torch.cat(ys))
        pipe.drain()
        return pipe.state_dict()["model"], updated


def train_on_pipeline(
    data: List[Microbatch],
    method: str,
    args: Dict[str, Any],
    each: int = 1,
    make_optimizer: Callable[..., torch.optim.Optimizer] = functools.partial(
        torch.optim.SGD, lr=LR
    ),
) -> Tuple[Dict[str, torch.Tensor], Dict[str, torch.Tensor], List[int]]:
    """Return the state dicts before and after the training, the first by a step at rate 0, and the
    stage of each update in turn.
    """
    rest = functools.partial(torch.optim.SGD, lr=0.0)
    short = {key: value for key, value in args.items() if key != "outer"}
    start, _ = run_pipeline(data[:each], method, short, each, rest)
    return (start, *run_pipeline(data, method, args, each, make_optimizer))


def assert_agree(ours: Net, theirs: Net, start: Net) -> None:
    """Assert that two networks agree to 1e-12 and that every layer has moved."""
    for a, b, before in zip(ours, theirs, start):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-12)
        assert abs(a - before).max() > 1e-3


def test_randomized_pipedream_is_algorithm_1() -> None:
    """Its draws are those that it states, within the paper's bounds; its weights follow."""
    bound = 6
    source = make_randomized_replays({"delay_bound": bound}, P=STAGES, M=30)
    count = 30 * STAGES
    data = draw_data(count)
    start, end, updated = train_on_pipeline(
        data, "randomized_pipedream", {"delay_bound": bound}, STAGES
    )
    stages = source.list_stages(0, count)
    delays = source.list_delays(0, count)
    assert updated == stages.tolist()
    assert (delays <= np.minimum(bound, np.arange(count))).all() and delays.max() == bound
    net = split_heads(start)[0]
    expected = literal_papers.train_by_block_updates(net, data, LR, stages, delays)
    assert_agree(split_heads(end)[0], expected, net)


@pytest.mark.parametrize("local_steps", [1, 4])
def test_local_sgd_is_algorithm_2(local_steps: int) -> None:
    data = draw_data(36)
    args = {"replicas": 3, "local_steps": local_steps}
    start, end, _ = train_on_pipeline(data, "local_sgd", args, 3)
    net = split_heads(start)[0]
    expected = literal_papers.train_local_sgd(net, data, LR, 3, local_steps)
    assert_agree(split_heads(end)[0], expected, net)


def test_diloco_is_nesterov_over_rounds_of_adamw() -> None:
    data = draw_data(36)
    outer = {"name": "sgd", "lr": 0.7, "momentum": 0.9, "nesterov": True}
    args = {"replicas": 3, "local_steps": 4, "outer": outer}
    start, end, _ = train_on_pipeline(
        data, "local_sgd", args, 3, functools.partial(torch.optim.AdamW, lr=0.02, weight_decay=0.1)
    )
    net = split_heads(start)[0]
    expected = literal_papers.train_diloco(net, data, 3, 4, (0.02, 0.1), (0.7, 0.9))
    assert_agree(split_heads(end)[0], expected, net)


def test_hogwilds_delays_are_truncated_exponentials_and_its_weights_are_equation_16() -> None:
    greatest = 9
    means = [3.5, 2.0, 1.0, 0.25]
    args = {"hogwild": {"max": greatest, "mean": means}, "stash": True}
    method = resolve_method("pipemare", args)
    table = VersionTable(make_schedule(method, STAGES, 20_000, 1), method, seed=4)
    delays = np.arange(20_000) - table.forward(0, 20_000)
    for mean, row in zip(means, delays[:, greatest:]):
        counts = np.bincount(row, minlength=greatest + 1)
        expected_counts = literal_papers.compute_truncated_exponential(mean, greatest) * len(row)
        excess = ((counts - expected_counts) ** 2 / expected_counts)[expected_counts > 1].sum()
        assert excess < 33.7  # chi-square with 9 degrees of freedom: 1 in 10,000
    assert abs(np.corrcoef(delays[:, greatest:]) - np.eye(STAGES)).max() < 0.03
    data = draw_data(40)
    start, end, _ = train_on_pipeline(data, "pipemare", args)
    net = split_heads(start)[0]
    expected = literal_papers.train_hogwild(net, data, LR, delays[:, :40])
    assert_agree(split_heads(end)[0], expected, net)


STRUCTURES: Dict[str, Tuple[Dict[str, Any], List[List[int]]]] = {
    "local_greedy": ({}, [[0], [1], [2], [3]]),
    "local_chunked": ({"blocks": ["2"]}, [[0, 1], [2, 3]]),
    "local_overlapping": ({}, [[0], [0, 1], [1, 2], [2, 3]]),
    "last_layers": ({"layers": 2}, [[2, 3]]),
}


@pytest.mark.parametrize("method", STRUCTURES)
def test_local_structures_are_those_of_section_3(method: str) -> None:
    """Each block learns from its own head's loss; of the last layers' method, the others stay."""
    args, blocks = STRUCTURES[method]
    data = draw_data(40)
    start, end, _ = train_on_pipeline(data, method, args)
    (net, first_heads), (ours, last_heads) = split_heads(start), split_heads(end)
    heads: List[Optional[Matrix]] = [first_heads.get(j) for j in range(len(blocks))]
    expected, trained = literal_papers.train_blocks(net, heads, data, LR, blocks)
    assert len(first_heads) == len(blocks) - 1
    assert_agree(ours[blocks[0][0] :], expected[blocks[0][0] :], net[blocks[0][0] :])
    for layer, before in zip(ours[: blocks[0][0]], net):
        assert (layer == before).all()
    for j, head in last_heads.items():
        assert_agree([head], [trained[j]], [first_heads[j]])
