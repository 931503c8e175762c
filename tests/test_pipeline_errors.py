"""Check what a wrong call costs: it is refused by one line that names the remedy, and whatever was
not changed goes on with the same bits."""

from __future__ import annotations

import copy
import pickle
import re
import threading
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, Tuple

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import AveragedModel

import ipu_pipe
from ipu_pipe.backends.processes import lost_ranks
from ipu_pipe.errors import BadInput, Divergence, RunFault, find_user_fault
from ipu_pipe.local.blocks import HEADS
from ipu_pipe.pipeline.batches import Microbatch, copy_memory
from ipu_pipe.pipeline.turns import Turns
from ipu_pipe.schedule.methods import METHODS
from ipu_pipe.store.checkpoint import WRAPPERS, load_weights
from tests.support.loops import make_perceptron
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


FAILING: Dict[str, Callable[[ipu_pipe.Pipeline], Any]] = {
    "unknown metric": lambda pipe: pipe.evaluate([make_batch(9)], ["acc"]),
    "metrics of another kind": lambda pipe: pipe.evaluate([make_batch(9)], 5),
    "no batches": lambda pipe: pipe.evaluate(5),
    "loader": lambda pipe: pipe.evaluate(raise_in_loader()),
    "metric": lambda pipe: pipe.evaluate([make_batch(9)], [raise_in_metric]),
    "batch": lambda pipe: pipe.evaluate([(torch.zeros(2, 3), torch.zeros(2))]),
    "inputs": lambda pipe: pipe.predict(torch.zeros(2, 3, dtype=torch.float64)),
    "trace": lambda pipe: pipe.trace(),
    "callback": lambda pipe: pipe.on_update(5),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", list(FAILING))
def test_a_call_that_changed_nothing_breaks_nothing(name: str) -> None:
    # story: `evaluate(batches, ["acc"])` ended the training: "make a new pipeline"
    pipe, expected = make_pipeline(), make_pipeline()
    for one in (pipe, expected):
        train(one, 3)
        # a call that fails after its drain has drained
        one.drain()
    with pytest.raises(Exception):  # noqa: B017
        FAILING[name](pipe)
    assert pipe.state_dict()["updates"] == 3
    for one in (pipe, expected):
        train(one, 3, first=3)
        one.close()
    assert torch.equal(flatten_weights(pipe.model), flatten_weights(expected.model))


def test_metrics_are_read_before_the_drain() -> None:
    pipe = make_pipeline()
    train(pipe, 2)
    in_flight = pipe.in_flight
    assert in_flight
    with pytest.raises(BadInput, match="^metrics: acc: nearest is accuracy"):
        pipe.evaluate([make_batch(9)], ["acc"])
    assert pipe.in_flight == in_flight


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


CALLS: Dict[str, Callable[[ipu_pipe.Pipeline], Any]] = {
    "step": lambda pipe: pipe.step(*make_batch(50)),
    "drain": lambda pipe: pipe.drain(),
    "evaluate": lambda pipe: pipe.evaluate([make_batch(50)]),
    "predict": lambda pipe: pipe.predict(make_batch(50)[0]),
    "state_dict": lambda pipe: pipe.state_dict(),
    "load_state_dict": lambda pipe: pipe.load_state_dict({}),
    "close": lambda pipe: pipe.close(),
    "abort": lambda pipe: pipe.abort(),
}


@pytest.mark.parametrize("name", list(CALLS))
def test_a_call_inside_another_is_refused_by_name(name: str) -> None:
    pipe, expected = make_pipeline(), make_pipeline()
    lines: List[str] = []

    def call_again(*_: Any) -> None:
        with pytest.raises(RuntimeError) as caught:
            CALLS[name](pipe)
        lines.append(str(caught.value))

    for one in (pipe, expected):
        train(one, 1)
    pipe.on_update(call_again)
    for one in (pipe, expected):
        train(one, 4, first=1)
        one.close()
    assert lines and all(line.startswith(f"{name}: called inside ") for line in lines)
    assert torch.equal(flatten_weights(pipe.model), flatten_weights(expected.model))


def test_the_whole_model_may_be_evaluated_and_not_trained() -> None:
    pipe = make_pipeline()
    train(pipe, 2)
    with pipe.whole_model():
        pipe.evaluate([make_batch(9)])
        pipe.predict(make_batch(9)[0])
        with pytest.raises(RuntimeError, match="^step: called inside whole_model"):
            train(pipe, 1)
    train(pipe, 1)


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

    keys: Dict[str, Any] = {"stages": ["2"], "microbatches": 1}
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


def test_pipelines_over_models_of_their_own_take_turns() -> None:
    torch.manual_seed(0)
    activation = nn.Tanh()

    def make_model() -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(6, 8), activation, nn.Linear(8, 5)).double()

    together = [make_pipeline(model=make_model(), stages=["1"]) for _ in range(2)]
    for k in range(4):
        for pipe in together:
            pipe.step(*make_batch(k))
    for pipe in together:
        pipe.close()
    alone = make_pipeline(model=make_model(), stages=["1"])
    train(alone, 4)
    alone.close()
    for pipe in together:
        assert torch.equal(flatten_weights(pipe.model), flatten_weights(alone.model))


# ---- everyday messages


def make_float_net(*_: Any) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 5))


class NeedsClosure(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        assert closure is not None, "SAM needs a closure"


def make_meta_model() -> nn.Module:
    with torch.device("meta"):
        return make_float_net()


def step_once(batch: Any = None, optimizer: Any = None, **keys: Any) -> Any:
    """Return the updates of a first step of small batches in float32."""
    model = keys.pop("model", None) or make_float_net()
    make_optimizer = optimizer or torch.optim.SGD
    arguments = {"stages": 2, "microbatches": 2, **keys}
    pipe = ipu_pipe.Pipeline(
        model, cross_entropy, make_optimizer(model.parameters(), lr=0.1), **arguments
    )
    x, y = make_batch(0)
    return pipe.step(*((x.float(), y) if batch is None else batch))


X, Y = make_batch(0)
NAN = X.float().clone()
NAN[3, 2] = float("nan")
# what is given -> the beginning of the line, and its remedy
LINES: Dict[str, Tuple[Dict[str, Any], str, str]] = {
    "bf16": ({"precision": "bf16"}, "precision: bf16: ", "bfloat16_mixed or bfloat16"),
    "float16 model": ({"model": make_float_net().half()}, "model: float16: ", "bfloat16_mixed"),
    "meta model": ({"model": make_meta_model()}, "model: 0.weight, .* meta device", "to_empty"),
    "pair": ({"batch": ((X.float(), Y),)}, "step: y is None", r"step\(\*batch\)"),
    "more stages than layers": ({"stages": 9, "microbatches": None}, "stages: 9: ", "at most 3"),
    "not a number": ({"batch": (NAN, Y)}, "update 0 of .* nan; its batch has numbers", "the data"),
    "SAM": ({"optimizer": NeedsClosure}, "optimizer: NeedsClosure: ", "closure"),
    "sparse": ({"batch": (X.to_sparse(), Y)}, "step: a tensor of the batch is sparse", "to_dense"),
    "example": ({"example": 5}, "example: 5: must be a pair", r"\(x, y\)"),
    "warmup": ({"warmup": None}, "warmup: None: ", "number of updates"),
    "method_args": ({"method_args": [1]}, "method_args: .*1.*: must be a mapping", "None"),
    "clip": ({"clip": "1"}, "clip: 1: must be a norm", "pair"),
}


@pytest.mark.parametrize("name", list(LINES))
def test_an_everyday_mistake_is_named_with_its_remedy(name: str) -> None:
    keys, beginning, remedy = LINES[name]
    with pytest.raises((BadInput, ValueError, Divergence), match=rf"^{beginning}.*{remedy}"):
        step_once(**keys)


@pytest.mark.parametrize("value", ["x", [1.0], True, 10**30, 1j, torch.zeros(2)])
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


@pytest.mark.parametrize("method", ["gpipe", "pipedream", "local_greedy", "local_sgd"])
def test_a_norm_alone_has_the_scope_that_the_method_can_clip_by(method: str) -> None:
    scope = "global" if METHODS[method].flushes else "stage"
    microbatches = None if method == "local_sgd" else 2
    weights = []
    for clip in (0.5, (0.5, scope)):
        pipe = make_pipeline(method, clip=clip, stages=["5"], microbatches=microbatches)
        train(pipe, 4)
        pipe.close()
        weights.append(flatten_weights(pipe.model))
    assert torch.equal(*weights)


def test_a_pipeline_shows_what_it_trains_and_how_far() -> None:
    pipe = make_pipeline()
    train(pipe, 2)
    assert repr(pipe) == (
        "Pipeline(method='pipedream', stages=3, microbatches=2, backend='emulator', updates=2, "
        "in_flight=1)"
    )
    pipe.close()
    assert repr(pipe).endswith("in_flight=0, closed)")


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod."])
def test_a_prefix_of_weights_is_named_once(prefix: str) -> None:
    # story: `init_from` said "missing" once for each tensor, and nobody named the prefix
    model = make_perceptron()
    saved = {prefix + name: value for name, value in model.state_dict().items()}
    for strict in (True, False):
        with pytest.raises(
            BadInput, match=rf"begins with {prefix}, .*name\[{len(prefix)}:\]"
        ) as caught:
            load_weights(model, saved, "weights.safetensors", strict=strict)
        assert len(caught.value.faults) == 1


def wrap_inside(model: nn.Module, part: str) -> nn.Module:
    """Return the model with its last layer inside a wrapper, as torch.compile makes one."""
    wrapper = nn.Module()
    wrapper.add_module(part, model[-1])  # type: ignore[index]
    model[-1] = wrapper  # type: ignore[index]
    return model


WRAPPED: Dict[str, Callable[[], nn.Module]] = {
    "module": lambda: AveragedModel(make_perceptron()),
    **{
        part: lambda part=part: wrap_inside(make_perceptron(), part)  # type: ignore[misc]
        for part in WRAPPERS
    },
}


@pytest.mark.parametrize("part", WRAPPED)
def test_wrappers_inside_names_are_named_once_with_a_remedy_that_works(part: str) -> None:
    # story: only a prefix of all names was named, not that of an AveragedModel, which has a count
    # beside, nor a compiled layer's
    model, wrapped = make_perceptron(), WRAPPED[part]()
    weights = wrapped.state_dict()
    (fault,) = list_faults(load_weights, model, weights, "weights.pt")
    assert fault.startswith("weights.pt: ") and f"has {part} in its name" in fault
    # the remedy that the line prints
    renamed = eval(fault.partition("leave it out: ")[2], {"re": re, "weights": weights})
    renamed.pop("n_averaged", None)
    assert not load_weights(model, renamed, "weights.pt").left_out
    (fault,) = list_faults(load_weights, WRAPPED[part](), make_perceptron().state_dict(), "w")
    assert fault.startswith("w: the model is wrapped: ") and "inside the wrapper" in fault


def test_the_remedy_keeps_names_that_end_like_a_wrapper() -> None:
    layers = {"submodule": nn.Linear(2, 2), "last": nn.Linear(2, 2)}
    model = nn.ModuleDict(layers)
    weights = nn.ModuleDict({**layers, "last": nn.DataParallel(layers["last"])}).state_dict()
    (fault,) = list_faults(load_weights, model, weights, "weights.pt")
    renamed = eval(fault.partition("leave it out: ")[2], {"re": re, "weights": weights})
    assert set(renamed) == set(model.state_dict())


def test_a_prefix_is_named_where_the_model_has_heads() -> None:
    # the model's own heads, which a file without them does not replace, hid it
    model = make_perceptron()
    saved = {f"model.{name}": value for name, value in model.state_dict().items()}
    model.add_module(HEADS, nn.ModuleDict({"0": nn.Linear(2, 2)}))
    (fault,) = list_faults(load_weights, model, saved, "weights.pt", heads_too=False)
    assert "every name begins with model., " in fault


def test_weights_that_fit_in_part_say_what_a_wrapper_hides() -> None:
    model, wrapped = make_perceptron(), wrap_inside(make_perceptron(), "_orig_mod")
    left_out, new = load_weights(model, wrapped.state_dict(), "weights.pt", strict=False)
    assert len(left_out) == len(new) == 2
    for name, reason in left_out.items():
        assert reason.endswith(f"but {name.replace('_orig_mod.', '')}, without its wrapper")


class Inside(nn.Module):
    """A wrapper of the caller's own, which a pipeline takes."""

    def __init__(self) -> None:
        super().__init__()
        self.module = make_perceptron()

    def forward(self, x: torch.Tensor) -> Any:
        return self.module(x)


def test_a_state_of_a_wrapped_model_is_refused_in_one_line() -> None:
    states = []
    for model, stages in ((make_perceptron(), ["5"]), (Inside(), ["module.5"])):
        pipe = make_pipeline(model=model, stages=stages)
        train(pipe, 2)
        states.append(pipe.state_dict())
        pipe.close()
    for model, stages, state in (
        (make_perceptron(), ["5"], states[1]),
        (Inside(), ["module.5"], states[0]),
    ):
        pipe = make_pipeline(model=model, stages=stages)
        (fault,) = list_faults(pipe.load_state_dict, state)
        assert fault.startswith("load_state_dict: model: ") and "module." in fault
        assert fault.endswith("load it into a pipeline over a model with these names")
        pipe.load_state_dict(states[isinstance(model, Inside)])
        train(pipe, 1)
        pipe.close()


# ---- batches that stay in flight


def train_from_a_ring(rank: int, folder: Path, method: str, ring: bool) -> None:
    """Train on two ranks with batches in memory of their own, or in memory that is used again."""
    pipe = make_pipeline(method, stages=["5"], backend="distributed", deadline=60)
    x, y = make_batch(0)
    for k in range(6):
        new_x, new_y = make_batch(k)
        if ring:
            x.copy_(new_x)
            y.copy_(new_y)
            pipe.step(x, y)
            x.fill_(99.0)
            y.fill_(0)
        else:
            pipe.step(new_x, new_y)
    pipe.close()
    torch.save(flatten_weights(pipe.model), folder / f"{rank}-{ring}.pt")


@needs_processes
@pytest.mark.parametrize("method", ["pipedream", "gpipe"])
def test_the_memory_of_a_batch_may_be_used_again_on_processes(tmp_path: Path, method: str) -> None:
    # story: autograd's in-place error, or "ranks have different labels: do not shard"
    for ring in (False, True):
        folder = tmp_path / str(ring)
        folder.mkdir()
        run_in_group(2, train_from_a_ring, folder, method, ring)
    weights = [torch.load(tmp_path / str(ring) / f"0-{ring}.pt") for ring in (False, True)]
    assert torch.equal(*weights)


def test_copies_of_a_batch_have_its_strides() -> None:
    base = torch.arange(60.0).reshape(6, 10)
    views = (base, base.T, base[:, 1:7:2], base.expand(3, 6, 10), base[0].unfold(0, 4, 1), base[:0])
    for view in views:
        copied = copy_memory(Microbatch(view, None)).x
        assert torch.equal(copied, view) and copied.stride() == view.stride()
        if view.numel():
            assert copied.data_ptr() != view.data_ptr()


# ---- two pipelines of one training: the page's GAN

GanBatches = List[Tuple[torch.Tensor, torch.Tensor]]


def make_gan() -> Tuple[nn.Module, nn.Module, GanBatches]:
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
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (generator, critic)]
    ones, zeros = torch.ones(8, 1).double(), torch.zeros(8, 1).double()
    for z, real in batches:
        samples = torch.cat([real, generator(z).detach()])
        losses = (
            lambda: measure(critic(generator(z)), ones),  # noqa: B023
            lambda: measure(critic(samples), torch.cat([ones, zeros])),  # noqa: B023
        )
        for i in (1, 0):
            optimizers[i].zero_grad()
            losses[i]().backward()
            optimizers[i].step()
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


# ---- failures on processes


def fail_on_one_rank(rank: int, folder: Path) -> None:
    """Fail in one rank's loss, with a deadline beyond the test's; then train a new pipeline."""
    calls = []

    def fail_in_time(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 9:
            raise KeyError("mine")
        return cross_entropy(output, y)

    keys: Dict[str, Any] = {"stages": ["5"], "backend": "distributed", "deadline": 10_000}
    pipe = make_pipeline(loss=fail_in_time, **keys)
    # the loss is on rank 1
    expected = (KeyError, "mine") if rank else (RunFault, "rank 1 has left step .* with an error")
    with pytest.raises(expected[0], match=expected[1]):
        train(pipe, 8)
    pipe.close()
    again = make_pipeline(**keys)
    train(again, 3)
    again.close()


def hang_on_one_rank(rank: int, folder: Path) -> None:
    """Hang in the ninth loss, on rank 1, until rank 0 has given up its wait for the gradients."""
    calls: List[int] = []

    def hang_in_time(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        while len(calls) == 9 and not (folder / "fault").exists():
            time.sleep(0.01)
        return cross_entropy(output, y)

    prefix = str(folder / "record_")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lost_ranks, "WARM_UP", 0.1)
        patch.setenv("TORCH_FR_DUMP_TEMP_FILE", prefix)
        pipe = make_pipeline(loss=hang_in_time, stages=["5"], backend="distributed", deadline=1)
        with pytest.raises(RunFault) as fault:
            train(pipe, 8)
        pipe.close()
    if rank == 0:
        (folder / "fault").write_text(str(fault.value))


@needs_processes
def test_at_the_deadline_the_message_is_named_and_the_flight_recorder_dumped(
    tmp_path: Path,
) -> None:
    run_in_group(2, hang_on_one_rank, tmp_path)
    fault = (tmp_path / "fault").read_text()
    assert re.search("stage 0 waits for gradients of microbatch [0-9]+ from stage 1", fault)
    dump = tmp_path / "record_0"
    # torch 2.13 records the collectives of gloo, and no messages
    if hasattr(torch._C._distributed_c10d, "_dump_fr_trace"):
        assert str(dump) in fault
    assert dump.exists() == (str(dump) in fault)
    if dump.exists():
        entries = pickle.loads(dump.read_bytes())["entries"]
        assert {entry["profiling_name"].split(":")[0] for entry in entries} == {"gloo"}


def make_other_numbers_of_steps(rank: int, folder: Path) -> None:
    """Close on one rank while the other goes on; then train a new pipeline in the same group."""
    pipe = make_pipeline(stages=["5"], backend="distributed", deadline=2)
    with pytest.raises(RunFault, match="all ranks must call the same methods"):
        train(pipe, 6 + 2 * rank)
        pipe.close()
    pipe.close()
    again = make_pipeline(stages=["5"], backend="distributed", deadline=60)
    train(again, 3)
    again.close()
    torch.save(flatten_weights(again.model), folder / f"again-{rank}.pt")


@needs_processes
def test_a_rank_that_fails_ends_the_others_at_once(tmp_path: Path) -> None:
    # story: they waited for the deadline, though the reason was in the store
    run_in_group(2, fail_on_one_rank, tmp_path)


@needs_processes
def test_after_other_numbers_of_steps_a_new_pipeline_trains(tmp_path: Path) -> None:
    # story: the new pipeline's first message met the old one's last, and gloo ended the process
    run_in_group(2, make_other_numbers_of_steps, tmp_path)
    expected = make_pipeline(stages=["5"])
    train(expected, 3)
    expected.close()
    assert torch.equal(torch.load(tmp_path / "again-0.pt"), flatten_weights(expected.model))


# ---- models and losses that write to what they get


class Shift(nn.Module):
    """Add a number to the input, in place or not."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.in_place = in_place

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.add_(0.5) if self.in_place else x + 0.5


def train_a_writer(writes: str, method: str, args: Dict[str, Any], **keys: Any) -> torch.Tensor:
    """Train a model whose first operation, or whose loss, may write in place to what it gets."""
    torch.manual_seed(0)
    layers = [Shift(writes == "inputs"), nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)]
    model = nn.Sequential(*layers).double()

    def loss(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return cross_entropy(output, y.sub_(1) if writes == "labels" else y - 1)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    keys = {"microbatches": 2, "method_args": args, **keys}
    with ipu_pipe.Pipeline(model, loss, optimizer, method, stages=["3"], **keys) as pipe:
        for k in range(5):
            generator = torch.Generator().manual_seed(k)
            x = torch.randn(8, 4, generator=generator, dtype=torch.float64)
            pipe.step(x, torch.randint(1, 4, (8,), generator=generator))
    return flatten_weights(model)


WRITERS: List[Tuple[str, Dict[str, Any]]] = [
    ("gpipe", {}),
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
