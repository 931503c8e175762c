"""A stage's passes as graphs of ATen operations equal autograd on the stage, also when its backward reads other weights."""

from __future__ import annotations

import functools
import operator
from typing import Any, Callable, Dict, List, Tuple

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

from ipu_pipe.cut import graphs as module_under_test
from ipu_pipe.cut.cutting import cut_model
from ipu_pipe.cut.graphs import draw_masks, trace_pieces, trace_stages
from ipu_pipe.model.observation import observe_effects
from ipu_pipe.model.randomness import KeyedRandomness
from ipu_pipe.model.stages import partition
from models import mlp, resnet, transformer, vgg
from tests.support.models import Composed

# torch 2.0, which IPUs use, cannot trace a joint graph
pytestmark = pytest.mark.skipif(
    not hasattr(torch._C, "_functorch") or torch.__version__ < "2.1", reason="torch is too old"
)

SEED = 3


IMAGES = torch.randn(3, 3, 32, 32, dtype=torch.float64)
FEATURES = torch.randn(3, 64, dtype=torch.float64)
CLASSES, WORDS = torch.randint(0, 10, (3,)), torch.randint(1, 20, (3, 8))
# model, inputs, labels, stages
Case = Tuple[Callable[[], nn.Module], torch.Tensor, torch.Tensor, int]


def make_fused_attention() -> nn.Module:
    """Make a model whose attention is torch's own function, in a layer of torch and alone."""

    def attend(m: Any, x: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(m.query(x), m.key(x), m.value(x), is_causal=True)

    # a bias of the keys has no gradient but its rounding
    projections = {name: nn.Linear(16, 16, bias=False) for name in ("query", "key", "value")}
    return nn.Sequential(
        nn.Embedding(20, 16),
        nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True),
        Composed(attend, **projections),
        nn.Flatten(),
        nn.Linear(8 * 16, 10),
    )


CASES: Dict[str, Case] = {
    "mlp": (mlp.mlp, FEATURES, CLASSES, 4),
    "preact_resnet20_batch": (
        lambda: resnet.preact_resnet20(norm="batch"),
        IMAGES[..., :16, :16],
        CLASSES,
        3,
    ),
    "vgg11": (lambda: vgg.vgg11(norm="group", width=8), IMAGES, CLASSES, 4),
    "transformer_lm": (
        lambda: transformer.transformer_lm(20, width=16, heads=2, blocks=2, context=8, dropout=0.2),
        WORDS,
        WORDS,
        3,
    ),
    "attention_residual_lm": (
        lambda: transformer.attention_residual_lm(20, 16, 2, 3, 2, 8, dropout=0.2),
        WORDS,
        WORDS,
        3,
    ),
    "fused_attention": (make_fused_attention, WORDS, CLASSES, 3),
    "transformer_translation": (
        lambda: transformer.transformer_translation(20, 20, 16, 2, 2, 32, 0.1),
        torch.stack([WORDS, WORDS.flip(1)], 1),
        WORDS,
        4,
    ),
}


class Run:
    """A model in float64, cut and traced, with a microbatch."""

    def __init__(self, case: Case) -> None:
        make_model, self.x, self.y, stages = case
        torch.manual_seed(0)
        self.model = make_model().double()
        self.begins = partition(self.model, self.x, stages).begins
        self.pieces = cut_model(self.model, self.begins, self.x)
        self.graphs = trace_pieces(self.pieces, (self.x, self.y), F.cross_entropy)
        draws = observe_effects(self.model, self.x).draws
        self.random = KeyedRandomness(self.model, draws, SEED, torch.device("cpu"))

    def list_state(self, s: int) -> List[torch.Tensor]:
        """Return a copy of the state of stage s."""
        tensors = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        return [tensors[name].detach().clone() for name in self.graphs[s].state]

    def draw_masks(self, s: int, microbatch: int) -> List[torch.Tensor]:
        """Draw the masks of a microbatch on stage s."""
        return draw_masks(self.model, self.graphs[s].masks, SEED, microbatch)


@functools.lru_cache(maxsize=None)
def get_run(name: str) -> Run:
    """Return a run, made once for all tests."""
    return Run(CASES[name])


def list_values(value: Any) -> List[torch.Tensor]:
    """Return the tensors of a crossing value."""
    return list(value) if isinstance(value, tuple) else [value]


def run_eager(
    run: Run, s: int, inputs: Any, newer: List[torch.Tensor], gradients: List[torch.Tensor]
) -> Tuple[List[torch.Tensor], List[Any]]:
    """Run stage s eagerly: forward, new weights written in place, backward; then restore the weights.

    Return the outputs and the gradients of weights and differentiable inputs."""
    graphs = run.graphs[s]
    weights = [run.model.get_parameter(name) for name in graphs.weights]
    older = [p.detach().clone() for p in weights]
    leaves = [t.detach().clone() for t in list_values(inputs)]
    asked = [leaves[i].requires_grad_() for i in graphs.differentiable]
    with run.random.forward(5, run.pieces[s].calls_before):
        output = run.pieces[s](leaves[0] if len(leaves) == 1 else tuple(leaves))
    outputs = [F.cross_entropy(output, run.y)] if graphs.labels else list_values(output)
    roots = outputs if graphs.labels else [outputs[i] for i in graphs.gradients]
    torch._foreach_copy_([p.data for p in weights], newer)
    results = torch.autograd.grad(roots, [*weights, *asked], gradients, allow_unused=True)
    torch._foreach_copy_([p.data for p in weights], older)
    return outputs, list(results)


def measure_error(expected: Any, actual: Any) -> float:
    """Return the greatest difference as a share of the greatest value; 0 if both are None."""
    if expected is None or actual is None:
        absent = expected if actual is None else actual
        return 0.0 if absent is None or not absent.any() else float("inf")
    expected, actual = expected.detach().double(), actual.detach().double()
    return float((expected - actual).abs().max() / expected.abs().max().clamp(min=1e-30))


def compare_with_autograd(run: Run) -> List[Tuple[str, float]]:
    """Return (name, error) of every result of every stage under weights that are overwritten before the backward. Check
    that the halves of a backward give its bits."""
    errors = []
    inputs = run.x
    for s, graphs in enumerate(run.graphs):
        torch.manual_seed(s)
        weights = [run.model.get_parameter(name).detach().clone() for name in graphs.weights]
        newer = [w + 0.05 * torch.randn_like(w) for w in weights]
        state = run.list_state(s)
        labels = [run.y] if graphs.labels else []
        masks = run.draw_masks(s, 5)
        results = graphs.forward(*weights, *state, *masks, *list_values(inputs), *labels)
        outputs = results[: graphs.outputs]
        new_state = results[graphs.outputs : graphs.outputs + len(state)]
        saved = results[graphs.outputs + len(state) :]
        gradients = [torch.randn_like(outputs[i]) for i in graphs.gradients]
        expected, expected_gradients = run_eager(run, s, inputs, newer, gradients)
        actual = graphs.backward(*newer, *saved, *gradients)
        errors += [
            (f"{s} {name}", measure_error(a, b))
            for names, one, other in (
                (["output"] * len(outputs), expected, outputs),
                (graphs.state, run.list_state(s), new_state),
                ([*graphs.weights, *graphs.differentiable], expected_gradients, actual),
            )
            for name, a, b in zip(names, one, other)
        ]
        early = graphs.input_gradient(*newer, *saved, *gradients)
        count = len(graphs.differentiable)
        assert len(early) - count == len(graphs.kept)
        late = graphs.weight_gradient(*early[count:])
        for whole, half in zip(actual, [*late, *early[:count]]):
            assert whole is half is None or torch.equal(whole, half)
        inputs = tuple(t.detach() for t in expected) if len(expected) > 1 else expected[0].detach()
    return errors


@pytest.mark.parametrize("name", CASES)
def test_graphs_equal_autograd_under_overwritten_weights(name: str) -> None:
    wrong = [error for error in compare_with_autograd(get_run(name)) if not error[1] < 1e-12]
    assert not wrong


def test_tracing_leaves_the_model_as_it_was() -> None:
    run = Run(CASES["vgg11"])
    before = {name: t.clone() for name, t in run.model.state_dict().items()}
    state = torch.get_rng_state()
    run.model.eval()
    trace_stages(run.model, run.begins, (run.x, run.y), F.cross_entropy)
    assert not run.model.training
    assert all(torch.equal(before[name], t) for name, t in run.model.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())
    assert all("forward" not in vars(module) for module in run.model.modules())


def test_shared_and_unused_weights_have_a_sum_and_no_gradient() -> None:
    shared = nn.Linear(4, 4)
    model = Composed(
        lambda m, x: m.head(m.b(m.a(x))),
        a=shared,
        b=shared,
        unused=nn.Linear(4, 4),
        head=nn.Linear(4, 10),
        frozen=nn.Parameter(torch.ones(2), requires_grad=False),
    )
    run = Run((lambda: model, FEATURES[:, :4], CLASSES, 1))
    graphs = run.graphs[0]
    assert set(graphs.weights) == {n for n, _ in run.model.named_parameters()} - {"frozen"}
    assert all(error < 1e-12 for _, error in compare_with_autograd(run))
    results = graphs.backward.graph.output_node().args[0]
    names = {name for name, result in zip(graphs.weights, results) if result is None}
    assert names == {"unused.weight", "unused.bias"}


def test_a_graph_has_its_zeros_on_the_device_of_the_weight() -> None:
    """Story: on CUDA the backward of a convolution would have mixed CPU and CUDA."""
    shapes = {"gradient": (2, 4, 6, 6), "x": (2, 3, 8, 8), "weight": (4, 3, 3, 3)}
    graph = fx.Graph()
    arguments = [graph.placeholder(name) for name in shapes]
    for argument in arguments:
        argument.meta["val"] = torch.empty(shapes[argument.name], device="meta")
    sizes = ([4], [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [True, True, True])
    both = graph.call_function(torch.ops.aten.convolution_backward.default, (*arguments, *sizes))
    graph.output([graph.call_function(operator.getitem, (both, i)) for i in range(3)])
    module_under_test._separate_weight_gradients(graph)
    (zeros,) = (n for n in graph.nodes if n.target is torch.ops.aten.full.default)
    assert zeros.kwargs["device"].type == "meta"


def test_a_weight_gradient_reads_no_weight_and_a_first_stage_has_no_input_gradient() -> None:
    for name in ("mlp", "preact_resnet20_batch", "transformer_lm"):
        run = get_run(name)
        assert run.graphs[0].differentiable == ()
        for graphs in run.graphs:
            shapes = [t.shape for t in graphs.kept]
            places = [n for n in graphs.weight_gradient.graph.nodes if n.op == "placeholder"]
            assert [n.meta["val"].shape for n in places] == shapes
            assert not {n.name for n in places} & {
                f"primals_{i + 1}" for i in range(len(graphs.weights))
            }
