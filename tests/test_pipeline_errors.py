"""Check what a wrong call costs: it is refused by one line that names the remedy, and whatever was
not changed goes on with the same bits."""

from __future__ import annotations

import copy
import pickle
import re
import threading
from pathlib import Path
from typing import Any, Callable, Dict, List, Tuple

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import AveragedModel

import ipu_pipe
from ipu_pipe.errors import BadInput, find_user_fault
from ipu_pipe.local.blocks import HEADS
from ipu_pipe.pipeline.batches import Microbatch, copy_memory
from ipu_pipe.pipeline.turns import Turns
from ipu_pipe.store.checkpoint import WRAPPERS, load_weights
from tests.support.loops import make_perceptron
from tests.support.models import Composed
from tests.support.processes import run_in_group
from tests.support.runs import list_faults, needs_processes
from tests.test_example_loops import PAGE
from tools.documented import list_blocks

Batch = Tuple[torch.Tensor, torch.Tensor]


def make_batch(k: int, samples: int = 4) -> Batch:
    generator = torch.Generator().manual_seed(k)
    x = torch.randn(samples, 6, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 5, (samples,), generator=generator)


def make_pipeline(
    method: str = "pipedream", loss: Any = cross_entropy, model: Any = None, **keys: Any
) -> ipu_pipe.Pipeline:
    model = model or make_perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return ipu_pipe.Pipeline(
        model, loss, optimizer, method, **{"stages": ["2", "5"], "microbatches": 2, **keys}
    )


def flatten_weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def train(pipe: ipu_pipe.Pipeline, batches: int, first: int = 0) -> None:
    for k in range(first, first + batches):
        pipe.step(*make_batch(k))


# ---- a call that changed nothing breaks nothing


def raise_in_loader() -> Any:
    yield make_batch(90)
    raise OSError("the disk is gone")


def raise_in_metric(output: Any, y: Any) -> float:
    raise KeyError("mine")


FAILING = [
    lambda pipe: pipe.evaluate([make_batch(9)], ["acc"]),
    lambda pipe: pipe.evaluate([make_batch(9)], 5),
    lambda pipe: pipe.evaluate(5),
    lambda pipe: pipe.evaluate(raise_in_loader()),
    lambda pipe: pipe.evaluate([make_batch(9)], [raise_in_metric]),
    lambda pipe: pipe.evaluate([(torch.zeros(2, 3), torch.zeros(2))]),
    lambda pipe: pipe.predict(torch.zeros(2, 3, dtype=torch.float64)),
    lambda pipe: pipe.trace(),
    lambda pipe: pipe.on_update(5),  # type: ignore[arg-type]
]


def test_calls_that_changed_nothing_break_nothing() -> None:
    # story: `evaluate(batches, ["acc"])` ended the training: "make a new pipeline"
    pipe, expected = make_pipeline(), make_pipeline()
    for one in (pipe, expected):
        train(one, 3)
        # a call that fails after its drain has drained
        one.drain()
    lines = []
    for call in FAILING:
        with pytest.raises(Exception) as caught:  # noqa: B017
            call(pipe)
        lines.append(str(caught.value))
    assert lines[0].startswith("metrics: acc: nearest is acc")
    assert pipe.state_dict()["updates"] == 3
    assert_goes_on_alike(pipe, expected, 3)


def assert_goes_on_alike(pipe: ipu_pipe.Pipeline, expected: ipu_pipe.Pipeline, first: int) -> None:
    """Train both further, from batch `first` on; assert that their weights are equal at the end."""
    for one in (pipe, expected):
        train(one, 3, first)
        one.close()
    assert torch.equal(flatten_weights(pipe.model), flatten_weights(expected.model))


class WithOwnLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = make_perceptron()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return cross_entropy(self.body(x), y)


def test_a_pair_without_labels_is_evaluated_by_the_models_own_loss() -> None:
    pipe = make_pipeline(model=WithOwnLoss(), loss=None, stages=["body.2", "body.5"])
    x, y = make_batch(0)
    pipe.step({"x": x, "y": y})
    batch = {"x": x, "y": y}
    assert pipe.evaluate([(batch, None)]) == pipe.evaluate([batch])


# ---- calls inside a call


CALLS = {
    "step": lambda pipe: pipe.step(*make_batch(50)),
    "drain": lambda pipe: pipe.drain(),
    "evaluate": lambda pipe: pipe.evaluate([make_batch(50)]),
    "predict": lambda pipe: pipe.predict(make_batch(50)[0]),
    "state_dict": lambda pipe: pipe.state_dict(),
    "load_state_dict": lambda pipe: pipe.load_state_dict({}),
    "close": lambda pipe: pipe.close(),
    "abort": lambda pipe: pipe.abort(),
}


def test_a_call_inside_another_is_refused_by_name() -> None:
    pipe, expected = make_pipeline(), make_pipeline()
    refused: List[str] = []

    def call_again(*_: Any) -> None:
        for name, call in CALLS.items():
            with pytest.raises(RuntimeError, match=f"^{name}: called inside "):
                call(pipe)
            refused.append(name)

    for one in (pipe, expected):
        train(one, 1)
    pipe.on_update(call_again)
    assert_goes_on_alike(pipe, expected, 1)
    assert {*refused} == {*CALLS}


def test_a_second_thread_is_refused_by_name() -> None:
    entered, may_end = threading.Event(), threading.Event()

    def wait_in_loss(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if threading.current_thread() is not threading.main_thread():
            entered.set()
            assert may_end.wait(60)
        return cross_entropy(output, y)

    pipe = make_pipeline("gpipe", wait_in_loss)
    train(pipe, 1)
    thread = threading.Thread(target=train, args=(pipe, 1))
    thread.start()
    assert entered.wait(60)
    with pytest.raises(RuntimeError, match="^evaluate: another thread is in step"):
        pipe.evaluate([make_batch(9)])
    may_end.set()
    thread.join()
    assert pipe.updates == 2
    train(pipe, 1)


def test_a_call_beside_one_that_just_begins_is_refused() -> None:
    """Story: the newest call's thread was looked at, also after it had ended: its next call was let in
    beside another thread's that had the lock, and not yet its own name there.
    """
    turns = Turns()
    with turns.take("whole_model"):
        pass
    assert turns._lock.acquire(blocking=False)
    with pytest.raises(RuntimeError, match="^predict: another thread is in a call: "):
        with turns.take("predict"):
            pass


def test_a_fault_of_an_evaluation_counts_the_steps_of_randomized_methods() -> None:
    """Story: it counted updates of single stages: "before update 4" after two steps of two stages."""

    def fail_in_evaluation(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if not torch.is_grad_enabled():
            raise ZeroDivisionError
        return cross_entropy(output, y)

    keys = {"stages": ["2"], "microbatches": 1}
    pipe = make_pipeline("randomized_pipedream", fail_in_evaluation, **keys)
    train(pipe, 2)
    with pytest.raises(ZeroDivisionError) as caught:
        pipe.evaluate([make_batch(9)])
    fault = find_user_fault(caught.value)
    assert str(fault).startswith("evaluation before update 2: ")


# ---- copies, and pipelines that share


@pytest.mark.parametrize("make_copy", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_copy_is_refused_with_the_remedy(make_copy: Callable[[Any], Any]) -> None:
    # story: the copy's `close` freed the caller's optimizer
    pipe = make_pipeline()
    train(pipe, 1)
    with pytest.raises(TypeError, match=r"^Pipeline: cannot be copied or pickled.*state_dict\(\)"):
        make_copy(pipe)
    train(pipe, 1)


def test_two_open_pipelines_share_no_modules_and_no_weights(tmp_path: Path) -> None:
    # story: the second one trained the first one's weight versions, 0.124 off
    first = make_pipeline()
    model = first.model
    assert isinstance(model, nn.Sequential)
    tied = make_perceptron()
    tied[2].weight = model[2].weight
    sharing = {"Sequential": model, "0": nn.Sequential(model[0], nn.Linear(8, 5)), "2.weight": tied}
    for name, other in sharing.items():
        with pytest.raises(BadInput, match=rf"^model: {name}: another open Pipeline.*close\(\)"):
            make_pipeline(model=other, stages=1)
    # a run of a config does not train it either
    config = ipu_pipe.configure(method="gpipe", stages=1, steps=1, micro_batch_size=4)
    data = ipu_pipe.from_loader([(torch.randn(4, 6), torch.zeros(4).long())], [])
    with pytest.raises(BadInput, match="^model: Sequential: another open Pipeline"):
        ipu_pipe.train(config, tmp_path / "run", model=model, data=data)
    assert not (tmp_path / "run").exists()
    # an activation has nothing to share
    apart = nn.Sequential(nn.Linear(6, 8), model[1], nn.Linear(8, 5)).double()
    make_pipeline(model=apart, stages=["2"]).close()
    train(first, 1)
    first.close()
    train(make_pipeline(model=model), 1)


BEYOND = torch.tensor(1e300, dtype=torch.float64)


@pytest.mark.parametrize("value", ["x", True, 10**30, 1e300, BEYOND, torch.zeros(2)])
def test_a_setting_that_is_no_number_is_refused_before_the_batch_is_given(value: Any) -> None:
    pipe = make_pipeline()
    train(pipe, 1)
    group = pipe.optimizer.param_groups[0]
    rate, group["lr"] = group["lr"], value
    with pytest.raises(RuntimeError, match="^step: optimizer: lr: "):
        train(pipe, 1)
    group["lr"] = rate
    train(pipe, 1)
    assert pipe.updates == 2


@pytest.mark.parametrize("settings, keys, place", [
    ({"lr": 1e300}, {}, "optimizer: lr: "),
    ({"lr": BEYOND}, {}, "optimizer: lr: "),
    ({"dampening": 1e300}, {}, "optimizer: dampening: "),
    ({}, {"by_stage": {"lr": [0.1, 1e300]}}, "by_stage: lr: "),
    ({}, {"method": "local_greedy", "heads": {"weight_decay": 1e300}}, "heads: weight_decay: "),
])  # fmt: skip
def test_a_setting_beyond_float32_is_refused_before_the_first_batch(
    settings: Any, keys: Any, place: str
) -> None:
    """Story: PyTorch's optimizer failed in the middle of the first update."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 5))
    optimizer = torch.optim.SGD(model.parameters(), **{"lr": 0.1, **settings})
    with pytest.raises(BadInput, match=f"^{place}.*float32"):
        pipe = ipu_pipe.Pipeline(model, cross_entropy, optimizer, stages=["1"], **keys)
        pipe.step(torch.randn(4, 6), torch.zeros(4).long())


class ScaledSGD(torch.optim.SGD):
    """An optimizer with a setting of several numbers."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, 0.1)
        self.defaults["scales"] = torch.ones(3)
        self.param_groups[0]["scales"] = torch.ones(3)


def test_a_setting_may_be_several_numbers() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 5))
    optimizer = ScaledSGD(model.parameters())
    with ipu_pipe.Pipeline(model, cross_entropy, optimizer, stages=["1"]) as pipe:
        pipe.step(torch.randn(4, 6), torch.zeros(4).long())
        optimizer.param_groups[0]["scales"] = torch.zeros(2)
        with pytest.raises(RuntimeError, match="^step: optimizer: scales: "):
            pipe.step(torch.randn(4, 6), torch.zeros(4).long())


@pytest.mark.parametrize("method, scope", [("gpipe", "global"), ("pipedream", "stage")])
def test_a_norm_alone_has_the_scope_that_the_method_can_clip_by(method: str, scope: str) -> None:
    weights = []
    for clip in (0.5, (0.5, scope)):
        pipe = make_pipeline(method, clip=clip)
        train(pipe, 4)
        pipe.close()
        weights.append(flatten_weights(pipe.model))
    assert torch.equal(*weights)


@pytest.mark.parametrize(
    "prefix, strict", [("module.", False), ("module._orig_mod.", True), ("model.", True)]
)
def test_a_prefix_of_weights_is_named_once(prefix: str, strict: bool) -> None:
    # story: `init_from` said "missing" once for each tensor, and nobody named the prefix
    model = make_perceptron()
    saved = {prefix + name: value for name, value in model.state_dict().items()}
    # the model's own heads, which a file without them does not replace, hid it
    if strict:
        model.add_module(HEADS, nn.ModuleDict({"0": nn.Linear(2, 2)}))
    keys = {"strict": strict, "heads_too": False}
    (fault,) = list_faults(load_weights, model, saved, "weights.safetensors", **keys)
    assert f"begins with {prefix}, " in fault and f"name[{len(prefix)}:]" in fault


def make_layers() -> nn.ModuleDict:
    # the first name ends like a wrapper's
    return nn.ModuleDict({"submodule": nn.Linear(2, 2), "last": nn.Linear(2, 2)})


def wrap_last(part: str) -> nn.Module:
    """Return the layers with the last one inside a wrapper, as torch.compile makes one."""
    layers = make_layers()
    layers["last"] = nn.ModuleDict({part: layers["last"]})
    return layers


@pytest.mark.parametrize("part", ["averaged", *WRAPPERS])
def test_wrappers_inside_names_are_named_once_with_a_remedy_that_works(part: str) -> None:
    # story: only a prefix of all names was named, not that of an AveragedModel, which has a count
    # beside, nor a compiled layer's
    model = make_layers()
    wrapped = AveragedModel(model) if part == "averaged" else wrap_last(part)
    weights = wrapped.state_dict()
    (fault,) = list_faults(load_weights, model, weights, "weights.pt")
    named = "module" if part == "averaged" else part
    assert fault.startswith("weights.pt: ") and f"has {named} in its name" in fault
    # the remedy that the line prints
    renamed = eval(fault.partition("leave it out: ")[2], {"re": re, "weights": weights})
    renamed.pop("n_averaged", None)
    assert set(renamed) == set(model.state_dict())
    assert not load_weights(model, renamed, "weights.pt").left_out
    (fault,) = list_faults(load_weights, wrapped, model.state_dict(), "w")
    assert fault.startswith("w: the model is wrapped: ") and "inside the wrapper" in fault


def test_weights_that_fit_in_part_say_what_a_wrapper_hides() -> None:
    weights = wrap_last("_orig_mod").state_dict()
    left_out, new = load_weights(make_layers(), weights, "weights.pt", strict=False)
    assert len(left_out) == len(new) == 2
    for name, reason in left_out.items():
        assert reason.endswith(f"but {name.replace('_orig_mod.', '')}, without its wrapper")


def test_a_state_of_a_wrapped_model_is_refused_in_one_line() -> None:
    def wrap_whole() -> nn.Module:
        # a pipeline takes a wrapper of the caller's own
        return Composed(lambda wrapper, x: wrapper.module(x), module=make_perceptron())

    layouts = [(make_perceptron, ["5"]), (wrap_whole, ["module.5"])]
    states = []
    for make_model, stages in layouts:
        pipe = make_pipeline(model=make_model(), stages=stages)
        train(pipe, 2)
        states.append(pipe.state_dict())
        pipe.close()
    for (make_model, stages), own, other in zip(layouts, states, reversed(states)):
        pipe = make_pipeline(model=make_model(), stages=stages)
        (fault,) = list_faults(pipe.load_state_dict, other)
        assert fault.startswith("load_state_dict: model: ") and "module." in fault
        assert fault.endswith("load it into a pipeline over a model with these names")
        pipe.load_state_dict(own)
        train(pipe, 1)
        pipe.close()


# ---- batches that stay in flight


def train_from_a_ring(rank: int, folder: Path) -> None:
    """Train on two ranks with batches in memory that is used again."""
    for method in ("pipedream", "gpipe"):
        pipe = make_pipeline(method, stages=["5"], backend="distributed", deadline=60)
        x, y = make_batch(0)
        for k in range(6):
            for memory, new in zip((x, y), make_batch(k)):
                memory.copy_(new)
            pipe.step(x, y)
            x.fill_(99.0)
            y.fill_(0)
        pipe.close()
        torch.save(flatten_weights(pipe.model), folder / f"{method}-{rank}.pt")


@needs_processes
def test_the_memory_of_a_batch_may_be_used_again_on_processes(tmp_path: Path) -> None:
    # story: autograd's in-place error, or "ranks have different labels: do not shard"
    run_in_group(2, train_from_a_ring, tmp_path)
    for method in ("pipedream", "gpipe"):
        expected = make_pipeline(method, stages=["5"])
        train(expected, 6)
        expected.close()
        trained = torch.load(tmp_path / f"{method}-0.pt")
        assert torch.equal(trained, flatten_weights(expected.model))


def test_copies_of_a_batch_have_its_strides() -> None:
    base = torch.arange(60.0).reshape(6, 10)
    views = (base, base.T, base[:, 1:7:2], base.expand(3, 6, 10), base[0].unfold(0, 4, 1), base[:0])
    for view in views:
        copied = copy_memory(Microbatch(view, None)).x
        assert torch.equal(copied, view) and copied.stride() == view.stride()
        if view.numel():
            assert copied.data_ptr() != view.data_ptr()


# ---- two pipelines of one training: the page's GAN


def make_gan() -> Tuple[nn.Module, nn.Module, List[Batch]]:
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    critic = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    batches = [
        (torch.randn(8, 4, dtype=torch.float64), torch.randn(8, 2, dtype=torch.float64))
        for _ in range(4)
    ]
    return generator, critic, batches


def train_gan_plainly() -> torch.Tensor:
    measure = nn.functional.binary_cross_entropy_with_logits
    generator, critic, batches = make_gan()
    of_generator, of_critic = (
        torch.optim.SGD(model.parameters(), lr=0.1) for model in (generator, critic)
    )
    ones, zeros = torch.ones(8, 1).double(), torch.zeros(8, 1).double()
    for z, real in batches:
        of_critic.zero_grad()
        samples = torch.cat([real, generator(z).detach()])
        measure(critic(samples), torch.cat([ones, zeros])).backward()
        of_critic.step()
        of_generator.zero_grad()
        measure(critic(generator(z)), ones).backward()
        of_generator.step()
    return torch.cat([flatten_weights(generator), flatten_weights(critic)])


def train_gan_of_the_page(**keys: Any) -> torch.Tensor:
    (block,) = (one for one in list_blocks(PAGE) if one.file == "gan.py")
    names: Dict[str, Any] = {}
    exec(compile(block.text, str(PAGE), "exec"), names)
    generator, critic, batches = make_gan()
    names["train"](generator, critic, batches, stages=["2"], **keys)
    return torch.cat([flatten_weights(generator), flatten_weights(critic)])


def save_gan(rank: int, folder: Path) -> None:
    torch.save(
        train_gan_of_the_page(backend="distributed", deadline=60), folder / f"weights-{rank}.pt"
    )


def test_the_gan_of_the_page_has_plain_pytorchs_weights() -> None:
    assert torch.equal(train_gan_plainly(), train_gan_of_the_page())


@needs_processes
def test_the_gan_of_the_page_has_plain_pytorchs_weights_on_processes(tmp_path: Path) -> None:
    run_in_group(2, save_gan, tmp_path)
    assert torch.equal(train_gan_plainly(), torch.load(tmp_path / "weights-1.pt"))


# ---- models and losses that write to what they get


def train_a_writer(writes: str, method: str, args: Dict[str, Any], **keys: Any) -> torch.Tensor:
    """Train a model whose first operation, or whose loss, may write in place to what it gets."""
    shift = Composed(lambda module, x: x.add_(0.5) if writes == "inputs" else x + 0.5)
    model = nn.Sequential(shift, *make_perceptron())

    def loss(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return cross_entropy(output, y.sub_(1) if writes == "labels" else y - 1)

    pipe = make_pipeline(method, loss, model, stages=["3"], method_args=args, **keys)
    for k in range(5):
        x, y = make_batch(k, 8)
        pipe.step(x, y + 1)
    pipe.close()
    return flatten_weights(model)


WRITERS = [
    ("pipemare", {"recompute": {"segments": 1}}),
    ("local_greedy", {}),
    ("zb_h1", {}),
]


def write_on_two_ranks(rank: int, folder: Path) -> None:
    for method, args in WRITERS:
        # one stage writes to the inputs, another one to the labels
        for writes in ("inputs", "labels"):
            weights = train_a_writer(writes, method, args, backend="distributed", deadline=60)
            torch.save(weights, folder / f"{method}-{writes}-{rank}.pt")


@pytest.mark.parametrize("writes", ["inputs", "labels"])
@pytest.mark.parametrize("method, args", WRITERS, ids=[method for method, _ in WRITERS])
def test_a_write_in_place_changes_nothing(method: str, args: Dict[str, Any], writes: str) -> None:
    """Story: a recomputation read the inputs and labels that the first forward had changed."""
    expected = train_a_writer("nothing", method, args)
    assert torch.equal(train_a_writer(writes, method, args), expected)


@needs_processes
@pytest.mark.slow
def test_a_write_in_place_changes_nothing_on_processes(tmp_path: Path) -> None:
    """Story: a trial of the loss read labels that an earlier one had changed, and autograd took a
    write to one microbatch for a write to all of its batch.
    """
    run_in_group(2, write_on_two_ranks, tmp_path)
    for method, args in WRITERS:
        expected = train_a_writer("nothing", method, args)
        files = sorted(tmp_path.glob(f"{method}-*.pt"))
        assert len(files) == 4 and all(torch.equal(torch.load(f), expected) for f in files), method


def test_a_pipeline_shows_what_it_trains_and_how_far() -> None:
    pipe = make_pipeline()
    train(pipe, 2)
    assert repr(pipe) == (
        "Pipeline(method='pipedream', stages=3, microbatches=2, backend='emulator', updates=2, "
        "in_flight=1)"
    )
    pipe.close()
    assert repr(pipe).endswith("in_flight=0, closed)")
