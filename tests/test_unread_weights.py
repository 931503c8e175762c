"""A weight that no operation of the forward reads belongs to the last stage, where the loss runs.

Story: a loss called the model's head on chunks of the last activations. The head did not run in the forward, so its weights
went to the first stage. The emulator trained them with its delay and rate, silently, and processes refused the loss.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, Iterator, List, Tuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ipu_pipe
from ipu_pipe.config.load import configure
from ipu_pipe.cut.cutting import cut_model
from ipu_pipe.cut.verification import verify_pieces
from ipu_pipe.local.blocks import verify_losses
from ipu_pipe.model.observation import observe_training
from ipu_pipe.model.stages import make_footprint, partition
from ipu_pipe.run.build import build
from tests.support.models import Composed
from tests.support.runs import list_faults

pytest_plugins = ["poptorch_double"]  # the fixture `poptorch`
Loss = Callable[[Any, torch.Tensor], torch.Tensor]
X, Y = torch.eye(4, dtype=torch.float64), torch.tensor([0, 1, 2, 0])
CORRECTED = {"t1": {"anneal_updates": 5}, "t2": {"decay": 0.5}}
# method -> microbatches of an update, and the settings of its rules
METHODS: Dict[str, Tuple[int, Dict[str, Any]]] = {
    "gpipe": (1, {}),
    "pipedream": (1, {}),
    "pipedream_2bw": (2, {}),
    "pipemare": (1, CORRECTED),
}


def run_backbone(m: Any, x: torch.Tensor) -> Any:
    return m.b(torch.tanh(m.a(x)))


def run_with_head(m: Any, x: torch.Tensor) -> Any:
    return m.head(run_backbone(m, x))


def make_model(run: Callable[..., Any] = run_backbone, **parts: Any) -> Any:
    """Return a model of layers a and b, of which b begins stage 1, and of a head."""
    torch.manual_seed(0)
    layers = {"a": nn.Linear(4, 8), "b": nn.Linear(8, 8), "head": nn.Linear(8, 3)}
    return Composed(run, **{**layers, **parts}).double()


def call_head(model: Any) -> Loss:
    return lambda h, y: F.cross_entropy(model.head(h), y)


def call_head_in_chunks(model: Any) -> Loss:
    """Return a loss that never has the logits of all samples at once."""

    def loss(h: torch.Tensor, y: torch.Tensor) -> Any:
        parts = zip(h.chunk(2), y.chunk(2))
        sums = (
            F.cross_entropy(model.head(part), labels, reduction="sum") for part, labels in parts
        )
        return sum(sums) / len(y)

    return loss


def draw_batches(size: int, count: int = 8) -> Iterator[Tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        x = torch.randn(size, 4, generator=generator, dtype=torch.float64)
        yield x, torch.randint(0, 3, (size,), generator=generator)


def train(model: Any, loss: Loss, method: str, **keys: Any) -> List[float]:
    """Train 8 updates and return their losses."""
    microbatches, args = METHODS[method]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-2)
    pipe = ipu_pipe.Pipeline(
        model, loss, optimizer, method, stages=["b"], microbatches=microbatches, method_args=args, **keys
    )  # fmt: skip
    updates = []
    for batch in draw_batches(4 * microbatches):
        updates += pipe.step(*batch)
    return [update.loss for update in updates + pipe.close()]


def measure_distance(a: nn.Module, b: nn.Module) -> float:
    others = b.state_dict()
    return max(float((t - others[name]).abs().max()) for name, t in a.state_dict().items())


@pytest.mark.parametrize("method", METHODS)
def test_a_head_in_the_loss_is_trained_as_in_the_model(method: str) -> None:
    """Bit for bit if the sums have one order; in chunks within rounding."""
    inside, outside, chunked = make_model(run_with_head), make_model(), make_model()
    losses = train(inside, F.cross_entropy, method)
    assert train(outside, call_head(outside), method) == losses
    assert measure_distance(inside, outside) == 0
    in_chunks = train(chunked, call_head_in_chunks(chunked), method)
    assert in_chunks == pytest.approx(losses, abs=1e-12)
    assert measure_distance(inside, chunked) < 1e-12


def test_a_head_in_the_loss_is_trained_on_xla() -> None:
    """The graph of the last stage has the loss, so the head's weights are its arguments."""
    pytest.importorskip("jax")
    expected, model, method = make_model(run_with_head), make_model(), "pipemare"
    train(expected, F.cross_entropy, method)
    train(model, call_head_in_chunks(model), method, backend="xla")
    assert measure_distance(expected, model) < 1e-12


def make_head_run(method: str) -> Dict[str, Any]:
    """Return a run of the chunked loss, a row of tests/test_processes_equal_emulator.py."""
    torch.manual_seed(1)
    model = make_model(head=nn.Sequential(nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 3)))
    microbatches, args = METHODS[method]
    batches = list(draw_batches(4, 2 * microbatches))
    config = configure(
        method=method, method_args=args, stages=["b"], micro_batch_size=4, gradient_accumulation=microbatches, steps=8,
        precision="float64", checkpoint={"every": 4}, metrics=[],
        optimizer={"name": "sgd", "lr": 0.1, "momentum": 0.9, "weight_decay": 0.01},
    )  # fmt: skip
    data = ipu_pipe.from_loader(batches, batches[:1])
    return {"config": config, "model": model, "data": data, "loss": call_head_in_chunks(model)}


# ---- the stage of each weight


def read_in_training(m: Any, x: torch.Tensor) -> Any:
    return run_backbone(m, x + m.early if m.training else x)


def read_in_evaluation(m: Any, x: torch.Tensor) -> Any:
    return run_backbone(m, x if m.training else x + m.early)


def read_by_name(m: Any, x: torch.Tensor) -> Any:
    return F.linear(run_backbone(m, x), m.head.weight, m.head.bias)


def make_mixture() -> nn.Module:
    """Return a mixture of two experts, of which the second gets no sample."""
    experts = nn.ModuleList([nn.Linear(4, 8), nn.Linear(4, 8)])
    return Composed(lambda m, x: m.experts[0](x), experts=experts)


def make_parameter() -> nn.Parameter:
    return nn.Parameter(torch.ones(4))


# model -> weights -> their stage
PLACES: Dict[str, Tuple[Callable[[], Any], Dict[str, int]]] = {
    "head": (make_model, {"a.weight": 0, "b.weight": 1, "head.weight": 1, "head.bias": 1}),
    "read and unread parameters of one module": (
        lambda: make_model(read_in_training, early=make_parameter(), late=make_parameter(), mean=torch.zeros(4)),
        {"early": 0, "late": 1, "mean": 1},
    ),
    "read in evaluation": (
        lambda: make_model(read_in_evaluation, early=make_parameter()),
        {"early": 0},
    ),
    "an expert without samples": (
        lambda: make_model(a=make_mixture()),
        {"a.experts.0.weight": 0, "a.experts.1.weight": 0, "head.weight": 1},
    ),
    "of a whole module": (
        lambda: make_model(a=Composed(lambda m, x: m.inner(x), inner=nn.Linear(4, 8), kept=make_parameter())),
        {"a.inner.weight": 0, "a.kept": 0},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", PLACES)
def test_stages_and_pieces_agree_where_a_weight_belongs(case: str) -> None:
    make, expected = PLACES[case]
    model = make()
    part, pieces = partition(model, X, ["b"]), cut_model(model, ["b"], X)
    stage_of = part.stage_of()
    assert not part.shared and stage_of.keys() == dict(model.named_parameters()).keys()
    first, second = held = [set(piece.select_state()) for piece in pieces]
    assert first | second == set(model.state_dict()) and not first & second
    for name, stage in expected.items():
        assert stage_of.get(name, stage) == stage and name in held[stage]
    verify_pieces(model, pieces, X)


@pytest.mark.parametrize(
    "stages, last", [(2, 1), ({"count": 2, "by": "parameters"}, 1), ({"finest": 5}, 4), (1, 0)]
)
def test_every_choice_of_stages_has_them_in_its_last(stages: Any, last: int) -> None:
    part = partition(make_model(), X, stages)
    assert len(part) == last + 1
    assert set(part.stages[last].parameters) >= {"head.weight", "head.bias"}


def test_no_stage_begins_at_a_module_that_only_the_loss_calls() -> None:
    model = make_model()
    (fault,) = list_faults(partition, model, X, 3)
    assert fault.startswith("stages: 3: must be at most 2")
    part = partition(model, X, ["b"])
    loss = call_head(model)
    observation = observe_training(model, X, Y, lambda x, y: loss(model(x), y))
    footprint = make_footprint(model, part, observation)
    assert [unit["name"] for unit in footprint.units] == ["", "b"]
    # samples x inputs x outputs of b and of the head
    assert footprint.forward_flops[1] == 2 * 4 * (8 * 8 + 8 * 3)


# ---- losses


def verify_loss(model: Any, loss: Loss) -> None:
    pieces = cut_model(model, ["b"], X)
    verify_pieces(model, pieces, X)
    verify_losses(model, pieces, loss, (X, Y), {})


def test_processes_take_a_loss_that_reads_the_head() -> None:
    model = make_model(scale=nn.Parameter(torch.ones(())), weights=torch.ones(3))
    verify_loss(model, call_head_in_chunks(model))
    verify_loss(model, lambda h, y: F.cross_entropy(model.head(h) * model.scale, y, model.weights))


def penalize(model: Any) -> Any:
    return model.a.weight.pow(2).sum()


def run_with_penalty(m: Any, x: torch.Tensor) -> Any:
    h = m.a(x)
    term = penalize(m)
    return m.head(m.b(h)), term


def test_processes_refuse_a_loss_that_reads_an_earlier_stage_and_the_advice_works() -> None:
    model, advised = make_model(), make_model(run_with_penalty)
    loss = call_head(model)
    (fault,) = list_faults(verify_loss, model, lambda h, y: loss(h, y) + penalize(model))
    assert fault.startswith("loss: reads a.weight of the model")
    verify_loss(advised, lambda output, y: F.cross_entropy(output[0], y) + output[1])


def test_a_model_may_return_a_weight() -> None:
    """Story: in evaluation the whole model's output was the weight itself, which had a gradient, and
    the pieces' was a copy; so the model was refused."""
    model = make_model(lambda m, x: (run_backbone(m, x), m.head.weight))
    pieces = cut_model(model, ["b"], X)
    verify_pieces(model, pieces, X)
    assert "head.weight" in pieces[1].list_weights()


def test_blocks_and_ipus_refuse_it(poptorch: Any) -> None:
    """The first block's loss would train a weight of the last block."""
    ipus = {"backend": {"name": "poptorch", "ipu": {}}, "gradient_accumulation": 4}
    batches = [(X.float(), Y)] * 4
    data = ipu_pipe.from_loader(batches, batches)
    for method, keys, reason in (
        ("local_greedy", {}, "block 0 "),
        ("gpipe", ipus, "PopTorch compiles"),
    ):
        model = make_model().float()
        config = configure(method=method, stages=["b"], micro_batch_size=4, steps=2, **keys)
        (fault,) = list_faults(build, config, model, data, loss=call_head(model))
        assert fault.startswith(f"loss: reads head.weight, head.bias of the model, but {reason}")
