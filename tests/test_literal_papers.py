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
from ipu_pipe.errors import BadInput
from ipu_pipe.schedule.methods import resolve_method
from ipu_pipe.schedule.timelines import make_schedule
from ipu_pipe.schedule.versions import VersionTable
from ipu_pipe.update.apply import UpdateRules, choose_rules
from ipu_pipe.update.optimizer import OptimizersByGroup, make_factory_of
from models.optimizers import BasisRotation
from tests import literal_papers
from tests.literal_papers import Matrix, Microbatch, Net
from tests.test_asynchrony import make_randomized_replays
from tests.test_emulator_exact import train_on_emulator

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


def assert_agree(ours: Net, theirs: Net, start: Net, tolerance: float = 1e-12) -> None:
    """Assert that two networks agree and that every layer has moved."""
    for a, b, before in zip(ours, theirs, start):
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance)
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


def list_pipedream_delays(stages: int, updates: int) -> np.ndarray:
    """Return the delays (stages, updates) of PipeDream's 1F1B with an update a microbatch."""
    return np.array([[min(t, stages - 1 - s) for t in range(updates)] for s in range(stages)])


def test_gap_aware_divides_each_gradient_by_its_gap() -> None:
    data = draw_data(40)
    make_optimizer = functools.partial(torch.optim.SGD, lr=LR, momentum=0.5)
    args = {"schedule": "1f1b_capped", "gap_aware": {"decay": 0.75}}
    start, end, _ = train_on_pipeline(data, "pipedream", args, 1, make_optimizer)
    net = split_heads(start)[0]
    step = literal_papers.make_gap_aware_step(LR, 0.5, 0.75)
    delays = list_pipedream_delays(STAGES, len(data))
    expected = literal_papers.train_with_delays(net, data, step, delays)
    assert_agree(split_heads(end)[0], expected, net)


def make_rotation(parameters: Any, lr: float) -> torch.optim.Optimizer:
    """Return basis rotation for matrices and AdamW for the rest."""
    groups = [dict(group) for group in parameters]
    parts = []
    for number, kind in enumerate(
        (functools.partial(BasisRotation, frequency=3), torch.optim.AdamW)
    ):
        chosen = [
            {**group, "params": [p for p in group["params"] if (p.dim() == 2) == (number == 0)]}
            for group in groups
        ]
        parts.append(
            kind([{**group, "member": number} for group in chosen], lr=lr, weight_decay=0.1)
        )
    return OptimizersByGroup(parts)


def test_basis_rotation_is_adam_in_the_eigenbases_of_covariances() -> None:
    """Square matrices and more samples than columns: eigenvectors are unique but for their sign,
    which changes nothing."""
    torch.manual_seed(5)
    stages = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)] + [nn.Linear(4, 4)]
    net = nn.Sequential(stages[0], *map(ipu_pipe.begin_stage, stages[1:])).double()
    start = split_heads(net.state_dict())[0]
    rng = np.random.default_rng(8)
    data = [(rng.normal(size=(9, 4)), rng.integers(4, size=9)) for _ in range(30)]
    tensors = [(torch.from_numpy(x), torch.from_numpy(y)) for x, y in data]
    method = resolve_method("pipedream", {"schedule": "1f1b_capped"})
    make_optimizer = functools.partial(make_rotation, lr=0.02)
    train_on_emulator(net, method, 1, tensors, make_optimizer)
    ours = split_heads(net.state_dict())[0]
    step = literal_papers.make_rotated_step(start, 0.02, 0.1, 3)
    expected = literal_papers.train_with_delays(start, data, step, list_pipedream_delays(4, 30))
    # softmax's gradients sum to 0: along that axis rounding is divided by eps, 1e-8
    assert_agree(ours, expected, start, 1e-8)


def test_basis_rotation_refuses_what_is_not_a_matrix() -> None:
    groups = [{"params": list(make_torch_net().parameters()), "stage": 0}]
    with pytest.raises(BadInput, match="^optimizer: BasisRotation: .*ndim: 2"):
        make_factory_of(BasisRotation)(groups)


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_error_feedback_is_the_papers_for_a_delay_of_one(decay: float) -> None:
    """AdamW under a schedule of rates; one weight has no gradient in two updates, the other one
    gets its first gradient late."""
    rng = np.random.default_rng(3)
    weights = [nn.Parameter(torch.from_numpy(rng.normal(size=(3, 2)))) for _ in range(2)]
    rates = [0.1 * 0.8**k for k in range(12)]
    groups = [{"params": weights, "stage": 0}]
    optimizer = torch.optim.AdamW(groups, lr=0.1, weight_decay=decay)
    args = {"error_feedback": {"scale": 1.0}}
    method = resolve_method("pipedream_2bw")
    chosen = choose_rules(args, method, np.array([1.0]), 1)
    rules = UpdateRules(chosen, optimizer, lambda k: rates[k])
    expected = [p.detach().numpy().copy() for p in weights]
    literal = [literal_papers.FedBackAdamW(w, decay) for w in expected]
    missing = {(4, 0), (5, 0), (9, 0), (0, 1), (1, 1)}
    for k, rate in enumerate(rates):
        for i, p in enumerate(weights):
            g = None if (k, i) in missing else rng.normal(size=(3, 2))
            p.grad = None if g is None else torch.from_numpy(g)
            expected[i] = literal[i].step(expected[i], g, rate)
        rules.step(k, None)
        for p, w in zip(weights, expected):
            np.testing.assert_allclose(p.detach().numpy(), w, rtol=0, atol=1e-14)


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_2bw_with_error_feedback_is_the_papers_algorithm(decay: float) -> None:
    """Each gradient is of the mean of four microbatches, at weights one update old."""
    data = draw_data(48)
    make_optimizer = functools.partial(torch.optim.AdamW, lr=0.02, weight_decay=decay)
    args = {"error_feedback": {}}
    start, end, _ = train_on_pipeline(data, "pipedream_2bw", args, 4, make_optimizer)
    net = split_heads(start)[0]
    literal = [literal_papers.FedBackAdamW(w, decay) for w in net]
    batches = [tuple(map(np.concatenate, zip(*data[k : k + 4]))) for k in range(0, 48, 4)]
    delays = np.tile(np.minimum(1, np.arange(12)), (STAGES, 1))
    expected = literal_papers.train_with_delays(
        net, batches, lambda j, now, read, g: literal[j].step(now, g, 0.02), delays
    )
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
