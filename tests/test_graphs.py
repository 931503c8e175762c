"""A stage's passes as graphs of ATen operations equal autograd on the stage, also when its backward reads other weights."""

from __future__ import annotations

import operator
from typing import Any, Callable, Dict, List, Tuple

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

from ipu_pipe.cut import graphs as module_under_test
from ipu_pipe.cut.cutting import cut_model
from ipu_pipe.cut.graphs import draw_masks, trace_pieces, trace_stages
from ipu_pipe.errors import BadInput
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


def draw_image(size: int) -> torch.Tensor:
    """Draw a microbatch of three images."""
    return torch.randn(3, 3, size, size, dtype=torch.float64)


def draw_tokens(*shape: int) -> torch.Tensor:
    """Draw a microbatch of tokens that are not padding."""
    return torch.randint(1, 20, (3, *shape))


# model, inputs, labels, stages
Case = Tuple[Callable[[], nn.Module], Callable[[], Any], Callable[[], Any], int]


def draw_classes() -> torch.Tensor:
    """Draw labels of ten classes."""
    return torch.randint(0, 10, (3,))


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
    "mlp": (mlp.mlp, lambda: torch.randn(3, 64, dtype=torch.float64), draw_classes, 4),
    "preact_resnet20_group": (resnet.preact_resnet20, lambda: draw_image(16), draw_classes, 3),
    "preact_resnet20_batch": (
        lambda: resnet.preact_resnet20(norm="batch"),
        lambda: draw_image(16),
        draw_classes,
        3,
    ),
    "vgg11": (
        lambda: vgg.vgg11(norm="group", width=8),
        lambda: draw_image(32),
        draw_classes,
        4,
    ),
    "transformer_lm": (
        lambda: transformer.transformer_lm(20, width=16, heads=2, blocks=2, context=8, dropout=0.2),
        lambda: draw_tokens(8),
        lambda: draw_tokens(8),
        3,
    ),
    "attention_residual_lm": (
        lambda: transformer.attention_residual_lm(20, 16, 2, 3, 2, 8, dropout=0.2),
        lambda: draw_tokens(8),
        lambda: draw_tokens(8),
        3,
    ),
    "fused_attention": (make_fused_attention, lambda: draw_tokens(8), draw_classes, 3),
    "transformer_translation": (
        lambda: transformer.transformer_translation(20, 20, 16, 2, 2, 32, 0.1),
        lambda: draw_tokens(2, 8),
        lambda: draw_tokens(8),
        4,
    ),
}


class Run:
    """A model in float64, cut and traced, with a microbatch."""

    def __init__(self, case: Case) -> None:
        make_model, draw_inputs, draw_labels, stages = case
        torch.manual_seed(0)
        self.model = make_model().double()
        self.x = draw_inputs()
        self.y = draw_labels()
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


@pytest.fixture(scope="module")
def runs() -> Dict[str, Run]:
    """The runs that tests of this module have made, by case."""
    return {}


def get_run(runs: Dict[str, Run], name: str) -> Run:
    """Return a run, made once for all tests."""
    if name not in runs:
        runs[name] = Run(CASES[name])
    return runs[name]


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
    for i in graphs.differentiable:
        leaves[i].requires_grad_()
    for p in weights:
        p.grad = None
    with run.random.forward(5, run.pieces[s].calls_before):
        output = run.pieces[s](leaves[0] if len(leaves) == 1 else tuple(leaves))
    outputs = list_values(output)
    roots = [outputs[i] for i in graphs.gradients] if not graphs.labels else []
    if graphs.labels:
        outputs = roots = [F.cross_entropy(output, run.y)]
    for p, value in zip(weights, newer):
        p.data.copy_(value)
    torch.autograd.backward(roots, gradients)
    for p, value in zip(weights, older):
        p.data.copy_(value)
    return outputs, [p.grad for p in weights] + [leaves[i].grad for i in graphs.differentiable]


def measure_error(expected: Any, actual: Any) -> float:
    """Return the greatest difference as a share of the greatest value; 0 if both are None."""
    if expected is None or actual is None:
        absent = expected if actual is None else actual
        return 0.0 if absent is None or not absent.any() else float("inf")
    expected, actual = expected.detach().double(), actual.detach().double()
    return float((expected - actual).abs().max() / expected.abs().max().clamp(min=1e-30))


def compare_with_autograd(run: Run) -> List[Tuple[str, float]]:
    """Return (name, error) of every result of every stage under weights that are overwritten before the backward."""
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
        saved = results[graphs.outputs + len(state) :]
        gradients = [torch.randn_like(outputs[i]) for i in graphs.gradients]
        expected, expected_gradients = run_eager(run, s, inputs, newer, gradients)
        actual = graphs.backward(*newer, *saved, *gradients)
        names = [*graphs.weights, *(f"input {i}" for i in graphs.differentiable)]
        errors += [(f"{s} output", measure_error(a, b)) for a, b in zip(expected, outputs)]
        new_state = results[graphs.outputs : graphs.outputs + len(state)]
        errors += [
            (f"{s} {name}", measure_error(a, b))
            for name, a, b in zip(graphs.state, run.list_state(s), new_state)
        ]
        errors += [
            (f"{s} {name}", measure_error(a, b))
            for name, a, b in zip(names, expected_gradients, actual)
        ]
        inputs = tuple(t.detach() for t in expected) if len(expected) > 1 else expected[0].detach()
    return errors


@pytest.mark.parametrize("name", CASES)
def test_graphs_equal_autograd_under_overwritten_weights(runs: Dict[str, Run], name: str) -> None:
    wrong = [error for error in compare_with_autograd(get_run(runs, name)) if not error[1] < 1e-12]
    assert not wrong


@pytest.mark.parametrize("name", CASES)
def test_the_halves_of_a_backward_give_its_bits(runs: Dict[str, Run], name: str) -> None:
    run = get_run(runs, name)
    for graphs in run.graphs:
        weights = [run.model.get_parameter(name).detach() for name in graphs.weights]
        saved = [
            torch.ones(t.shape, dtype=t.dtype)
            if not t.is_floating_point()
            else torch.randn(t.shape, dtype=t.dtype).abs() + 0.5
            for t in graphs.saved
        ]
        gradients = [
            torch.randn(node.meta["val"].shape, dtype=torch.float64)
            for node in graphs.backward.graph.nodes
            if node.op == "placeholder"
        ][len(weights) + len(saved) :]
        whole = graphs.backward(*weights, *saved, *gradients)
        early = graphs.input_gradient(*weights, *saved, *gradients)
        count = len(graphs.differentiable)
        late = graphs.weight_gradient(*early[count:])
        assert len(early) - count == len(graphs.kept)
        for a, b in zip(whole, [*late, *early[:count]]):
            assert (a is None and b is None) or torch.equal(a, b)


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
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        return m.head(m.b(m.a(x)))  # type: ignore[no-any-return]

    def make() -> nn.Module:
        shared = nn.Linear(4, 4)
        model = Composed(forward, a=shared, b=shared, unused=nn.Linear(4, 4), head=nn.Linear(4, 10))
        model.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        return model

    run = Run((make, lambda: torch.randn(3, 4, dtype=torch.float64), draw_classes, 1))
    graphs = run.graphs[0]
    assert set(graphs.weights) == {n for n, _ in run.model.named_parameters()} - {"frozen"}
    assert all(error < 1e-12 for _, error in compare_with_autograd(run))
    results = graphs.backward.graph.output_node().args[0]
    names = {name for name, result in zip(graphs.weights, results) if result is None}
    assert names == {"unused.weight", "unused.bias"}


def test_a_graph_has_its_zeros_on_the_device_of_the_weight() -> None:
    """Story: on CUDA the backward of a convolution would have mixed CPU and CUDA."""
    tensors = [torch.empty(s, device="meta") for s in ((2, 4, 6, 6), (2, 3, 8, 8), (4, 3, 3, 3))]
    graph = fx.Graph()
    arguments = [graph.placeholder(name) for name in ("gradient", "x", "weight")]
    for argument, tensor in zip(arguments, tensors):
        argument.meta["val"] = tensor
    sizes = ([4], [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [True, True, True])
    both = graph.call_function(torch.ops.aten.convolution_backward.default, (*arguments, *sizes))
    graph.output([graph.call_function(operator.getitem, (both, i)) for i in range(3)])
    module_under_test._separate_weight_gradients(graph)
    (zeros,) = (n for n in graph.nodes if n.target is torch.ops.aten.full.default)
    assert zeros.kwargs["device"].type == "meta"


def test_functional_dropout_is_refused_with_its_module() -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(m.inner(x), 0.5)

    dropping = Composed(forward, inner=nn.Linear(4, 4)).double()
    model = nn.Sequential(nn.Linear(4, 4), dropping, nn.Linear(4, 10)).double()
    x, y = torch.randn(3, 4, dtype=torch.float64), draw_classes()
    with pytest.raises(BadInput, match=r"1 \(aten.native_dropout"):
        trace_stages(model, ["2"], (x, y), F.cross_entropy)


def test_a_weight_gradient_reads_no_weight_and_a_first_stage_has_no_input_gradient(
    runs: Dict[str, Run],
) -> None:
    for name in ("mlp", "preact_resnet20_batch", "transformer_lm"):
        run = get_run(runs, name)
        assert run.graphs[0].differentiable == ()
        for graphs in run.graphs:
            shapes = [t.shape for t in graphs.kept]
            places = [n for n in graphs.weight_gradient.graph.nodes if n.op == "placeholder"]
            assert [n.meta["val"].shape for n in places] == shapes
            assert not {n.name for n in places} & {
                f"primals_{i + 1}" for i in range(len(graphs.weights))
            }
