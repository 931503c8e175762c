"""Tensors that modules and the loss keep beside weights: xla trains with them as the emulator does, sees
their changes, and refuses by module and line what a graph cannot have."""

from __future__ import annotations

import functools
import re
from contextlib import nullcontext
from typing import Any, Callable, Dict, List, NamedTuple, Optional

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ipu_pipe
from ipu_pipe.cut.graphs import trace_stages
from ipu_pipe.errors import BadInput
from tests.support.models import Composed
from tests.support.slow import mark_slow

jax = pytest.importorskip("jax", reason="xla needs jax: pip install 'ipu_pipe[xla]'")

from ipu_pipe.backends.xla import player  # noqa: E402


@pytest.fixture(autouse=True, scope="module")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Keep the compiled programs of other runs, and of the user, out of these tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


WIDTH, CLASSES, STEPS = 6, 4, 5
GLOBAL = torch.linspace(1, 2, WIDTH, dtype=torch.float64)
WEIGHTS = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
OTHERS = torch.tensor([3.0, 1.0, 1.0, 1.0], dtype=torch.float64)


def draw_rows() -> Any:
    """Draw a batch."""
    return torch.randn(8, WIDTH, dtype=torch.float64), torch.randint(0, CLASSES, (8,))


def make_three_stages(forward: Callable[..., Any], **values: Any) -> nn.Module:
    """Return a model of three stages; the middle one is `forward(module, h)`, with plain attributes."""
    middle = Composed(forward, inner=nn.Linear(WIDTH, WIDTH))
    for name, value in values.items():
        middle.__dict__[name] = value
    head = nn.Linear(WIDTH, CLASSES)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), middle, nn.Tanh(), head).double()


# ---- forwards of the middle stage


def make_masks(m: Any, x: torch.Tensor) -> torch.Tensor:
    mask = torch.tril(torch.full((WIDTH, WIDTH), 1.0, dtype=x.dtype))
    places = torch.arange(WIDTH) + torch.tensor([float(i) for i in range(WIDTH)], dtype=x.dtype)
    result: torch.Tensor = m.inner(x) @ mask + places + x.new_zeros(WIDTH)
    return result


def read_attributes(m: Any, x: torch.Tensor) -> Any:
    return m.inner(x) * m.scale * m.table["x"]


def keep_mean(m: Any, x: torch.Tensor) -> Any:
    h = m.inner(x)
    m.scale = 0.5 * m.scale + h.mean(0).detach()
    return h + m.scale


def keep_first(m: Any, x: torch.Tensor) -> Any:
    h = m.inner(x)
    before, m.kept = m.kept, h.mean(0).detach()
    return h if before is None else h + before


def count_xla_calls(m: Any, x: torch.Tensor) -> Any:
    m.calls += 1
    return m.inner(x) * m.calls


def read_global(m: Any, x: torch.Tensor) -> Any:
    return m.inner(x) * GLOBAL


def branch_on_sum(m: Any, x: torch.Tensor) -> Any:
    h = m.inner(x)
    return h * 2 if h.sum() > 0 else h


def drop_without_module(m: Any, x: torch.Tensor) -> Any:
    return F.dropout(m.inner(x), 0.5)


def stop_gradient(m: Any, x: torch.Tensor) -> Any:
    with torch.no_grad():
        return m.inner(x)


# ---- losses


class Centered(nn.Module):
    """A loss with a moving center."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(CLASSES, dtype=torch.float64))

    def forward(self, output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.center = 0.9 * self.center + 0.1 * output.detach().mean(0)
        return F.cross_entropy(output - self.center, y)


def close_over() -> Any:
    """Return a loss that closes over its class weights."""
    weight = WEIGHTS.clone()
    return lambda output, y: F.cross_entropy(output, y, weight=weight)


class Case(NamedTuple):
    """A model, a loss, and a change by the caller after three steps: between calls, or in
    `whole_model`. It is equal up to `bound`. `pack`: nests the batch of a step."""

    make: Callable[[], nn.Module]
    make_loss: Callable[[], Any] = lambda: F.cross_entropy
    change: Optional[Callable[[Any, Any], Any]] = None
    is_inside: bool = False
    bound: float = 1e-12
    pack: Callable[..., Any] = lambda i, x, y: (x, y)


def pack_by_name(i: int, x: torch.Tensor, y: torch.Tensor) -> Any:
    """Return mappings whose keys are not sorted, and in another order every other step."""
    parts = {"x": x, "others": 2 * x}, {"y": y, "others": (y + 1) % CLASSES}
    return [dict(reversed(part.items())) if i % 2 else part for part in parts]


class TwoInputs(nn.Sequential):
    def forward(self, x: torch.Tensor, others: torch.Tensor) -> Any:
        return super().forward(x - others.square())


def compute_two_losses(output: torch.Tensor, y: Any) -> torch.Tensor:
    return F.cross_entropy(output, y["y"]) + 0.1 * F.cross_entropy(output, y["others"])


def make_plain() -> nn.Module:
    return make_three_stages(lambda m, x: m.inner(x))


def make_attributes() -> nn.Module:
    ones = torch.ones(WIDTH, dtype=torch.float64)
    return make_three_stages(read_attributes, scale=ones * 2, table={"x": ones * 3})


def make_memory() -> nn.Module:
    return make_three_stages(keep_mean, scale=torch.zeros(WIDTH, dtype=torch.float64))


def make_single() -> nn.Module:
    """Return a model in float32, whose sums in double precision are exact."""
    model: Any = make_plain().float()
    model[0] = Composed(lambda m, x: m.inner(x.float()), inner=nn.Linear(WIDTH, WIDTH))
    return model


def flip_rows(model: Any, loss: Any) -> None:
    weight = model[1].inner.weight.data
    weight.copy_(weight.flip(0))


def double_scale(model: Any, loss: Any) -> None:
    model[1].scale = model[1].scale * 2


CASES: Dict[str, Case] = {
    "masks made in the forward": Case(lambda: make_three_stages(make_masks)),
    "kept state": Case(make_memory, Centered),
    "no gradient": Case(lambda: make_three_stages(stop_gradient)),
    "attribute replaced": Case(make_attributes, change=double_scale),
    "attribute written": Case(make_attributes, change=lambda m, _: m[1].table["x"].mul_(2)),
    "closure written": Case(
        make_plain, close_over, lambda _, loss: loss.__closure__[0].cell_contents.copy_(OTHERS)
    ),
    "argument replaced": Case(
        make_plain,
        lambda: functools.partial(F.cross_entropy, weight=WEIGHTS.clone()),
        lambda _, loss: loss.keywords.update(weight=OTHERS),
    ),
    "object's weight replaced": Case(
        make_plain,
        lambda: nn.CrossEntropyLoss(WEIGHTS.clone()),
        lambda _, loss: loss.weight.copy_(OTHERS),
    ),
    "attribute, inside": Case(make_attributes, Centered, double_scale, True),
    "state, inside": Case(make_memory, Centered, lambda m, _: m[1].scale.zero_(), True),
    "the loss's state, inside": Case(
        make_plain, Centered, lambda _, loss: loss.center.fill_(2), True
    ),
    # Story: tensors of one shape changed places, as a tokenizer's ids and mask would.
    "batches by name": Case(
        lambda: TwoInputs(*make_plain()), lambda: compute_two_losses, pack=pack_by_name
    ),
    # Story: sums of each weight were compared, which its rows in another order do not change.
    "rows in another order, inside": Case(
        make_single, change=flip_rows, is_inside=True, bound=1e-5
    ),
}
QUICK = ("kept state", "no gradient", "closure written", "batches by name")


def train_xla_case(case: Case, backend: str) -> List[torch.Tensor]:
    """Train five steps; return losses and weights."""
    torch.manual_seed(0)
    model, loss = case.make(), case.make_loss()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=0.1)
    settings: Any = {"stages": ["1", "3"], "microbatches": 4, "backend": backend}
    losses = []
    with ipu_pipe.Pipeline(model, loss, optimizer, "pipedream", **settings) as pipe:
        for i in range(STEPS):
            if i == 3 and case.change is not None:
                losses += [] if case.is_inside else pipe.drain()
                with pipe.whole_model() if case.is_inside else nullcontext():
                    case.change(model, loss)
            losses += pipe.step(*case.pack(i, *draw_rows()))
        losses += pipe.drain()
    tensors = [t.clone() for t in model.state_dict().values()]
    kept = loss.state_dict().values() if isinstance(loss, nn.Module) else ()
    return [torch.tensor([update.loss for update in losses]), *tensors, *kept]


def measure_gap(a: List[torch.Tensor], b: List[torch.Tensor]) -> float:
    """Return the greatest difference."""
    return max(float((x - y).abs().max()) for x, y in zip(a, b))


@pytest.mark.parametrize("name", mark_slow(CASES, QUICK.__contains__))
def test_xla_trains_as_the_emulator(name: str) -> None:
    case = CASES[name]
    expected = train_xla_case(case, "emulator")
    assert measure_gap(expected, train_xla_case(case, "xla")) < case.bound
    if case.change is not None:
        assert measure_gap(expected, train_xla_case(case._replace(change=None), "emulator")) > 1e-3


def make_two_stages(model: nn.Module, optimizer: Any, backend: str = "xla") -> ipu_pipe.Pipeline:
    keys: Any = {"stages": ["3"], "microbatches": 2, "backend": backend}
    return ipu_pipe.Pipeline(model, F.cross_entropy, optimizer, **keys)


def test_a_momentum_may_begin_late_and_labels_of_another_kind_are_refused() -> None:
    """Stories: the first velocity was dampened; class probabilities were read as labels."""
    models = [make_plain(), make_plain()]
    models[1].load_state_dict(models[0].state_dict())
    for model, backend in zip(models, ("emulator", "xla")):
        torch.manual_seed(0)
        optimizer = torch.optim.SGD(model.parameters(), 0.05, dampening=0.5)
        with make_two_stages(model, optimizer, backend) as pipe:
            for momentum in (0.0, 0.9, 0.9):
                optimizer.param_groups[0]["momentum"] = momentum
                pipe.step(*draw_rows())
    assert measure_gap(*(list(m.state_dict().values()) for m in models)) < 1e-12
    pipe = make_two_stages(models[1], optimizer)
    x, y = draw_rows()
    pipe.step(x, y)
    with pytest.raises(BadInput, match=r"labels: \(4, 4\), torch.float64, of the first"):
        pipe.step(x, F.one_hot(y, CLASSES).double())
    pipe.close()


def test_training_goes_on_after_an_evaluation_that_fails() -> None:
    """Story: the weights that it had brought to the host were taken for changes by the caller."""
    model = make_plain()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    with make_two_stages(model, optimizer) as pipe:
        pipe.step(*draw_rows())
        with pytest.raises(ZeroDivisionError):
            pipe.evaluate([draw_rows()], {"share": lambda output, y: 1 / 0})
        assert [update.index for update in pipe.step(*draw_rows())] == [1]


@pytest.mark.slow
def test_a_change_of_what_the_devices_change_is_refused_elsewhere() -> None:
    """The host's value is an old one."""
    case = Case(make_plain, Centered, lambda _, loss: loss.center.zero_())
    with pytest.raises(RuntimeError, match="center: was changed after the last call"):
        train_xla_case(case, "xla")


@pytest.mark.parametrize("forward, values, line", [
    (read_global, {}, r"1 \(aten.mul.Tensor at .*test_xla_values.py:\d+"),
    (branch_on_sum, {}, r"1, .*test_xla_values.py:\d+: .*values of a tensor"),
    (drop_without_module, {}, r"1 \(aten.native_dropout"),
    (count_xla_calls, {"calls": 0}, r"1\.calls: "),
    (keep_first, {"kept": None}, r"\(1\.kept\): keep it in a buffer"),
], ids=["global", "branch", "dropout", "counter", "from None"])  # fmt: skip
def test_a_refusal_names_module_and_line(forward: Any, values: Any, line: str) -> None:
    model = make_three_stages(forward, **values)
    with pytest.raises(BadInput, match=r"model: stage 1.*" + line) as caught:
        trace_stages(model, ["1", "3"], draw_rows(), F.cross_entropy)
    assert len(caught.value.faults) == 1 and "\n" not in caught.value.faults[0]


def test_a_compiled_pass_is_told_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    notes = player.CompileNotes([1e9, -1.0])
    for silent, lines in ((1e9, 0), (-1.0, 1)):
        monkeypatch.setattr(player, "SILENT_SECONDS", silent)
        for _ in range(2):
            with notes.note(silent, "stage 0's forward"):
                pass
        assert capsys.readouterr().err.count("xla: compiled stage 0's forward") == lines


@pytest.mark.slow
def test_as_many_passes_are_told_as_are_compiled(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Story: a schedule that mixes whole and split backwards ended with "5 of 4"."""
    monkeypatch.setattr(player, "SILENT_SECONDS", -1.0)
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))
    # nor is an update without weights compiled
    model[1].requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    keys: Any = {"stages": ["1", "2", "3"], "microbatches": 8, "backend": "xla"}
    with ipu_pipe.Pipeline(model, F.cross_entropy, optimizer, "dualpipe_v", **keys) as pipe:
        pipe.step(torch.randn(8, 2), torch.zeros(8, dtype=torch.long))
    error = capsys.readouterr().err
    counts = re.findall(r"\((\d+) of (\d+)\)", error)
    assert counts and counts[-1][0] == counts[-1][1] == str(len(counts))
    assert "stage 1's update" not in error
