"""Batches may be mappings, tuples, or from loaders without a length; models may return objects, or their own loss."""

from __future__ import annotations

import copy
import random
import re
from functools import partial
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset

import ipu_pipe
from ipu_pipe import BadInput
from ipu_pipe.backends.table import make_engine
from ipu_pipe.config.schema import Config
from ipu_pipe.errors import RunFault, end_process
from ipu_pipe.model.batch import (
    clone_tensors,
    list_tensors,
    map_tensors,
    take_samples,
)
from ipu_pipe.model.loss import OwnLoss, TakePart, list_fields
from ipu_pipe.report.run_text import describe_left_out
from ipu_pipe.run.build import build
from ipu_pipe.run.planning import PlanningRequest, make_planning_problem
from tests.support.flows import evaluate_on_test_set, train_updates
from tests.support.models import Composed
from tests.support.processes import run_in_group, train_on_processes
from tests.support.runs import assert_same, list_faults, needs_processes, read_column

SGD = {"name": "sgd", "lr": 0.1, "momentum": 0.9}


def configure_short_run(**keys: Any) -> Config:
    usual = {
        "stages": 2,
        "micro_batch_size": 4,
        "gradient_accumulation": 2,
        "steps": 3,
        "optimizer": SGD,
    }
    return ipu_pipe.configure(**{**usual, "log": {"tensorboard": False, "trace": False}, **keys})


def find_refusal(model: nn.Module, batches: Any, keys: Dict[str, Any] = {}, **others: Any) -> str:
    """Return the one line with which a model or its batches are refused."""
    data = batches if hasattr(batches, "train_batch") else ipu_pipe.from_loader(batches)
    (line,) = list_faults(build, configure_short_run(**keys), model, data, **others)
    return line


def assert_trains_alike(
    model: nn.Module,
    batches: List[Any],
    compute_loss: Callable[[nn.Module, Any], torch.Tensor],
    **others: Any,
) -> None:
    """Check that three updates on the emulator equal those of a plain loop, bit for bit. `compute_loss` is that of the loop."""
    plain = copy.deepcopy(model)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for k in range(3):
        optimizer.zero_grad()
        for batch in (clone_tensors(batches[m % len(batches)]) for m in (2 * k, 2 * k + 1)):
            (compute_loss(plain, batch) / 2).backward()
        optimizer.step()
    data = ipu_pipe.from_loader(batches, batches[:1])
    job = build(configure_short_run(), model, data, **others)
    flow, _ = train_updates(job, 3)
    assert evaluate_on_test_set(flow.engine, job)[0].loss is not None
    flow.engine.close()
    assert_same(dict(model.named_parameters()), dict(plain.named_parameters()))


# ---- other libraries' models


def make_hugging_model(kind: str) -> nn.Module:
    """Make a small model of Hugging Face's library, or skip the test if that is not installed."""
    pytest.importorskip("transformers")
    import third_party

    return getattr(third_party, f"make_hugging_{kind}")()  # type: ignore[no-any-return]


def draw_sentences() -> List[Dict[str, torch.Tensor]]:
    """Draw four batches of four sentences, padded after their ends."""
    draw = torch.Generator().manual_seed(1)
    ends = torch.tensor([4, 6, 2, 6])
    mask = (torch.arange(6) < ends[:, None]).long()
    ids = torch.randint(1, 31, (4, 4, 6), generator=draw)
    labels = torch.randint(0, 3, (4, 4), generator=draw)
    return [{"input_ids": x, "attention_mask": mask, "labels": y} for x, y in zip(ids, labels)]


def draw_texts() -> List[Dict[str, torch.Tensor]]:
    return [
        {**batch, "labels": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)}
        for batch in draw_sentences()
    ]


def draw_images() -> List[Dict[str, torch.Tensor]]:
    draw = torch.Generator().manual_seed(1)
    pixels = [torch.randn(4, 3, 8, 8, generator=draw) for _ in range(4)]
    return [{"pixel_values": x, "label": torch.randint(0, 3, (4,), generator=draw)} for x in pixels]


def compute_masked_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    output = model(batch["input_ids"], attention_mask=batch["attention_mask"])
    return F.cross_entropy(output.logits, batch["labels"])


def compute_image_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch["pixel_values"]).logits.double(), batch["label"])


@pytest.mark.parametrize("kind, draw, compute_loss, others", [
    ("bert", draw_sentences, compute_masked_loss, {"output": "logits"}),
    ("gpt2", draw_texts, lambda model, batch: model(**batch).loss, {"loss": "model"}),
    ("vit", draw_images, compute_image_loss, {"output": lambda output: output[0].double()}),
], ids=["masked sentences", "own loss", "images by name"])  # fmt: skip
def test_other_libraries_models_train_as_in_plain_pytorch(
    kind: str, draw: Any, compute_loss: Any, others: Any
) -> None:
    assert_trains_alike(make_hugging_model(kind), draw(), compute_loss, **others)


def test_methods_that_read_old_weights_take_mappings() -> None:
    """The checks of such methods shuffle the inputs and inspect the saved tensors."""
    args = {"recompute": {"segments": 2}}
    config = configure_short_run(method="pipemare", gradient_accumulation=1, method_args=args)
    data = ipu_pipe.from_loader(draw_sentences())
    flow, results = train_updates(build(config, make_hugging_model("bert"), data, "model"), 3)
    assert all(result.loss > 0 for result in results)
    flow.engine.close()


# ---- batches of every form


class TwoInputs(nn.Module):
    """A model of two inputs, which takes them in any form of FORMS."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.out = nn.Linear(3, 5), nn.Linear(2, 5), nn.Linear(5, 4)

    def forward(self, a: Any, b: Any = None, labels: Any = None, scale: Any = None) -> Any:
        if isinstance(a, (tuple, list)):
            a, b = a
        if isinstance(b, dict):
            b = b["b"]
        hidden = torch.tanh(self.a(a) + (0 if b is None else self.b(b)))
        scores = self.out(hidden) if scale is None else self.out(hidden) * scale
        return scores if labels is None else (scores, F.cross_entropy(scores, labels))


class InputPair(NamedTuple):
    a: torch.Tensor
    b: torch.Tensor


GENERATOR = torch.Generator().manual_seed(2)
NUMBERS = torch.randn(4, 4, 5, generator=GENERATOR)
LABELS = torch.randint(0, 4, (4, 4), generator=GENERATOR)
PARTS = [(x[:, :3].clone(), x[:, 3:].clone(), y.clone()) for x, y in zip(NUMBERS, LABELS)]
PAIRS = [(a, y) for a, _, y in PARTS]
NAMED_PAIRS = [{"a": a, "b": b, "labels": y} for a, b, y in PARTS]


class PackedBatch(dict):  # type: ignore[type-arg]
    """A mapping type of another library."""


FORMS: Dict[str, Callable[[Any, Any, Any], Any]] = {
    "tuple of three": lambda a, b, y: (a, b, y),
    "list, as a DataLoader gives": lambda a, b, y: [a, b, y],
    "pair with a tuple": lambda a, b, y: ((a, b), y),
    "nested deeper": lambda a, b, y: (((a, b),), y),
    "mapping in a tuple": lambda a, b, y: (a, {"b": b}, y),
    "named tuple": lambda a, b, y: (InputPair(a, b), y),
    "mapping": lambda a, b, y: PackedBatch(a=a, b=b, target=y),
    "pair with a mapping": lambda a, b, y: ({"b": b, "a": a}, y),
    "None for a missing input": lambda a, b, y: {"a": a, "b": b, "scale": None, "label": y},
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_batch_trains_as_in_plain_pytorch(form: str) -> None:
    batches = [FORMS[form](*parts) for parts in PARTS]

    def compute_loss(model: nn.Module, batch: Any) -> torch.Tensor:
        b, a, y = sorted(list_tensors(batch), key=lambda t: (-t.dim(), t.shape[-1]))
        return F.cross_entropy(model(a, b), y)

    assert_trains_alike(TwoInputs(), batches, compute_loss)


def test_a_model_that_returns_its_scores_and_its_loss_trains_as_in_plain_pytorch() -> None:
    """As in nanoGPT: the loss is the one scalar of the tuple, and accuracy is of the output that `output` selects."""
    model, run = TwoInputs(), configure_short_run()
    assert_trains_alike(model, NAMED_PAIRS, lambda model, batch: model(**batch)[1], loss="model")
    assert_trains_alike(model, PARTS, lambda model, batch: model(*batch)[1], loss="model")
    job = build(run, model, ipu_pipe.from_loader(NAMED_PAIRS, NAMED_PAIRS), "model", output=0)
    engine = make_engine(job, 0, job.table)
    result = evaluate_on_test_set(engine, job)[0]
    right = sum(int((model(a, b).argmax(dim=1) == y).sum()) for a, b, y in PARTS)
    assert result.accuracy == right / 16
    assert result.loss == pytest.approx(sum(model(a, b, y)[1].item() for a, b, y in PARTS) / 4)
    engine.close()


def test_a_model_that_returns_its_loss_alone_needs_no_labels() -> None:
    rebuild = lambda m, a: (m.outside(m.inside(a)) - a).square().mean()  # noqa: E731
    rebuilding = Composed(rebuild, inside=nn.Linear(3, 2), outside=nn.Linear(2, 3))
    batches = [a for a, _, _ in PARTS]
    assert_trains_alike(rebuilding, batches, lambda model, a: model(a), loss="model")


def test_labels_may_have_another_name(tmp_path: Path) -> None:
    batches = [{"a": a, "b": b, "answers": y} for a, b, y in PARTS]
    data, config = ipu_pipe.from_loader(batches, batches, labels="answers"), {"subset": 6}
    run = configure_short_run(evaluate=config)
    report = ipu_pipe.train(run, tmp_path, model=TwoInputs(), data=data, quiet=True)
    assert report["final"]["test_accuracy"] * 6 % 1 == 0 and report["steps"] == 3


def test_nested_batches_keep_their_structure() -> None:
    pair = InputPair(torch.ones(4, 1), torch.zeros(4))
    nest = {"a": torch.zeros(4, 2), "b": [torch.ones(4), (None, pair)]}
    part = map_tensors(lambda tensor: tuple(tensor.shape), take_samples(nest, 3))
    assert part == {"a": (3, 2), "b": [(3,), (None, InputPair((3, 1), (3,)))]}
    clone = clone_tensors(nest)
    clone["b"][1][1].b.fill_(5)
    assert pair.b.sum() == 0


# ---- refusals


def test_outputs_that_are_not_tensors_are_reported() -> None:
    bert, returns = make_hugging_model("bert"), "returns SequenceClassifierOutput(logits)"
    line = find_refusal(bert, draw_sentences())
    assert returns in line and "model.output: logits" in line and "loss: model" in line
    assert (
        find_refusal(bert, draw_sentences(), output="scores")
        == f"model.output: scores: the model {returns}"
    )
    assert f"model.output: 7: the model {returns}" in find_refusal(bert, draw_sentences(), output=7)
    unlabelled = [{k: v for k, v in batch.items() if k != "labels"} for batch in draw_sentences()]
    line = find_refusal(bert, unlabelled, loss="model")
    assert "loss: model" in line and "SequenceClassifierOutput(logits)" in line
    line = find_refusal(TwoInputs(), NAMED_PAIRS, {"loss": "model"}, output="logits")
    assert "model.output: logits: the model returns tuple(0, 1)" in line


A, B, Y = PARTS[0]
SCALAR = torch.tensor(2.0)


@pytest.mark.parametrize("batch, words", [
    ({"a": A, "b": B}, ("a, b", "labels, label, target, targets", "from_loader(..., labels=NAME)", "loss: model")),
    (A, ("is a Tensor", "(inputs, labels)")),
    ([A], ("is a list of one", "(inputs, labels)")),
    ((A, Y.tolist()), ("labels: 0", "of type int", "must be a tensor")),
    (({"a": A, "b": "text"}, Y), ("inputs: b", "of type str", "must be a tensor")),
    ((A, B[:3], Y), ("1 has the shape (3, 2), 0 (4, 3)", "samples")),
    ({"a": A, "scale": SCALAR, "label": Y}, ("scale has the shape ()", "samples")),
    (({}, Y), ("contain no tensor",)), ((None, Y), ("contain no tensor",)),
    ({"a": A, "wrong": B, "label": Y}, ("it fails on a microbatch of shape a (4, 3), torch.float32; wrong (4, 2)",)),
], ids=lambda value: None)  # fmt: skip
def test_impossible_batches_are_reported(batch: Any, words: Any) -> None:
    line = find_refusal(TwoInputs(), [batch] * 4)
    assert all(word in line for word in words), line


def test_a_name_of_labels_that_batches_lack_is_reported() -> None:
    named = ipu_pipe.from_loader([{"a": A, "label": Y}] * 4, labels="other")
    line = find_refusal(TwoInputs(), named)
    assert "a, label" in line and "has no other" in line


def test_heads_of_blocks_refuse_a_selected_output_and_the_models_loss() -> None:
    keys = {"method": "local_greedy", "stages": ["1"]}
    layers = make_linear_layers()
    line = find_refusal(layers, PAIRS, keys, output=lambda scores: scores)
    assert re.match("model.output: .*lambda>: local_greedy takes", line)
    squares = Composed(lambda m, a: m.layers(a).square().mean(), layers=layers)
    data = ipu_pipe.from_loader([a for a, _, _ in PARTS])
    line = find_refusal(squares, data, {**keys, "stages": ["layers.1"], "loss": "model"})
    assert line.startswith("loss: model: local_greedy: the heads")
    last = {"method": "last_layers", "method_args": {"layers": 1}, "stages": ["layers.1"]}
    build(configure_short_run(**last), squares, data, "model")


def test_fields_of_outputs() -> None:
    pair = InputPair(torch.zeros(1), torch.ones(2))
    fields = [list_fields(output) for output in (pair, (1, 2), {"x": 1})]
    assert fields == [["a", "b"], [0, 1], ["x"]]
    assert TakePart("b")(pair) is TakePart(1)(pair) is TakePart(-1)({"x": 3, "y": pair.b}) is pair.b
    assert TakePart("b")(pair.a) is pair.a  # a tensor is the output itself
    assert OwnLoss()({"loss": pair.a, "other": pair.a}, None) is OwnLoss()(pair, None) is pair.a


# ---- loaders without a length


class RandomStream(IterableDataset):  # type: ignore[type-arg]
    """A stream of `count` samples a pass, drawn from the global random state."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[Any]:
        for _ in range(self.count):
            yield torch.rand(3), torch.randint(0, 4, ())


def make_linear_layers() -> nn.Module:
    """Make two layers, with the same weights in each call."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 4))


def make_streaming_data(count: int = 22) -> Any:
    return ipu_pipe.from_loader(DataLoader(RandomStream(count), batch_size=4), PAIRS[:1])


def test_a_loader_without_a_length_begins_anew_where_it_ends() -> None:
    data = make_streaming_data(10)  # two full batches a pass
    assert data.train_batches_per_epoch(4) is None and data.train_samples is None
    batches = [data.train_batch(0, index, 4) for index in range(5)]
    assert len({float(x.sum()) for x, _ in batches}) == 5  # each pass draws anew
    torch.rand(3)
    for index in (3, 3, 4, 1, 0):
        assert torch.equal(make_streaming_data(10).train_batch(0, index, 4)[0], batches[index][0])
        assert torch.equal(data.train_batch(0, index, 4)[0], batches[index][0])


def train_on_stream(out: Path, model: nn.Module, resume: bool = False, **keys: Any) -> Any:
    config, data = configure_short_run(**keys), make_streaming_data()
    return ipu_pipe.train(config, out, model=model, data=data, quiet=True, resume=resume)


def test_a_run_by_steps_resumes_in_the_middle_of_a_stream(tmp_path: Path) -> None:
    keys = {"evaluate": {"steps": 2}, "checkpoint": {"every": 4}}
    whole, cut, resumed = (make_linear_layers() for _ in range(3))
    report = train_on_stream(tmp_path / "whole", whole, steps=6, **keys)
    assert report["updates_per_epoch"] is None and report["steps"] == 6
    tested = [loss for loss in read_column(tmp_path / "whole", "test_loss") if loss is not None]
    assert len(tested) == 4  # before, and after each 2 updates
    train_on_stream(tmp_path / "two", cut, steps=4, **keys)
    torch.rand(7)
    train_on_stream(tmp_path / "two", resumed, True, steps=6, **keys)
    assert_same(whole.state_dict(), resumed.state_dict())


def test_a_microbatch_is_a_batch_of_the_loader_by_default(tmp_path: Path) -> None:
    """Story: plans with a loader's data were refused, since they read two samples."""
    for steps in (2, 3):
        how: Dict[str, Any] = {"steps": steps, "micro_batch_size": None}
        report = train_on_stream(tmp_path, make_linear_layers(), steps == 3, **how)
        assert report["steps"] == steps and report["batch"]["micro_batch_size"] == 4
    line = find_refusal(TwoInputs(), make_streaming_data(), {"micro_batch_size": 8})
    assert "batches of 4, micro_batch_size is 8" in line
    named = {
        "model": {"entry": "tests.test_batches:make_linear_layers"},
        "data": {"name": "tests.test_batches:make_streaming_data"},
    }
    config = ipu_pipe.configure(**named, gradient_accumulation=2, steps=2)
    for measure, samples in ((False, []), (True, [2, 4])):
        problem = make_planning_problem(config, PlanningRequest("v100x8", measure=measure))
        (first, *_) = problem.problem.units
        assert problem.batch == 8 and [pass_.samples for pass_ in first.measured] == samples


def test_settings_in_epochs_are_refused_without_a_length() -> None:
    line = find_refusal(TwoInputs(), make_streaming_data(), {"steps": None})
    assert line.startswith("steps: null: must be the updates of the run: ")
    keys: Dict[str, Any] = {
        "method": "pipemare", "method_args": {"warmup": {"epochs": 1}}, "evaluate": {"every": 0.5},
        "lr_schedule": {"name": "step", "milestones": [1]},
    }  # fmt: skip
    faults = list_faults(build, configure_short_run(**keys), TwoInputs(), make_streaming_data())
    places = [fault.partition(":")[0] for fault in faults]
    assert places == ["lr_schedule.milestones", "evaluate.every", "method_args.warmup"]
    keys = {"method": "randomized_pipedream", "gradient_accumulation": 1}
    line = find_refusal(TwoInputs(), make_streaming_data(), keys)
    assert line.startswith("method: randomized_pipedream: draws delays by the epoch")


def test_loaders_that_give_no_batch_are_refused() -> None:
    once = ipu_pipe.from_loader(iter([PAIRS[0]] * 3))
    build(configure_short_run(), TwoInputs(), once)
    with pytest.raises(BadInput, match="ended after 3 batches .can it be iterated over twice"):
        once.train_batch(0, 3, 4)
    short = DataLoader(RandomStream(3), batch_size=4)
    for loader, words in (
        (iter([]), "gives no batch of 4 samples"),
        (short, "gives no batch of 4 samples"),
        (iter([(A[:3], Y[:3])] * 3), "batches of 3, micro_batch_size is 4"),
    ):
        assert words in find_refusal(TwoInputs(), loader)
    for name in ("test", "validation"):
        with pytest.raises(BadInput, match=f"{name} loader is a generator, which can be"):
            ipu_pipe.from_loader([], **{name: (batch for batch in PARTS)})


# ---- samples that no update reads


def test_samples_left_out_are_reported() -> None:
    x, y = torch.randn(23, 3), torch.randint(0, 4, (23,))
    loader = DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=4)
    # the list has no count of samples, so that its full microbatches are counted
    for batches, words in ((loader, "7 of 23 "), (PAIRS[:3], "4 of 12 ")):
        job = build(configure_short_run(steps=None), TwoInputs(), ipu_pipe.from_loader(batches))
        (line,) = describe_left_out(job)
        assert line.startswith(f"data: {words}") and line.endswith(" batch of 8")
    assert describe_left_out(build(configure_short_run(), TwoInputs(), make_streaming_data())) == []


# ---- on two processes


class Noisy(Dataset[Any]):
    """A data set that draws its samples from the global generators, or from `own`."""

    def __init__(self, own: Optional[np.random.Generator] = None) -> None:
        self.own = own

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Any:
        y = random.randrange(4)
        noise = np.random.rand(3) if self.own is None else self.own.random(3)
        return torch.tensor(noise + y, dtype=torch.float32), y


def test_workers_that_persist_draw_by_the_pass_alone() -> None:
    """Story: they drew on from the previous pass, so that a resumed run had other samples."""
    through, resumed = (
        ipu_pipe.from_loader(DataLoader(Noisy(), 4, num_workers=1, persistent_workers=True))
        for _ in range(2)
    )
    through.train_batch(0, 3, 4)
    expected = [x for m in range(4) for x in resumed.train_batch(1, m, 4)]
    actual = [x for m in range(4) for x in through.train_batch(1, m, 4)]
    assert all(map(torch.equal, actual, expected))


# case -> the model's kind, its batches, and the end of the name of the module that begins the last stage
HUGGING: Dict[str, Any] = {
    "bert": ("bert", draw_sentences, "bert.encoder.layer.1"),
    "gpt2": ("gpt2", draw_texts, "transformer.h.1"),
    "vit": ("vit", draw_images, ""),
    "blocks": ("vit", draw_images, "layers.1"),
}


def make_batch_arguments(case: str) -> Dict[str, Any]:
    """Make the arguments of `train` for a case, the same in each call."""
    torch.manual_seed(3)
    objects: Dict[str, Any] = {"loss": "model"} if case in ("own", "gpt2") else {}
    keys: Dict[str, Any] = {"method": "local_greedy"} if case == "blocks" else {}
    if case in HUGGING:
        kind, draw, end = HUGGING[case]
        model, data = make_hugging_model(kind), draw()
        if end:
            keys["stages"] = [name for name, _ in model.named_modules() if name.endswith(end)]
        if case != "gpt2":
            objects["output"] = "logits"
    elif case in ("three", "own"):
        model, data, keys["stages"] = (
            TwoInputs(),
            PARTS if case == "three" else NAMED_PAIRS,
            ["out"],
        )
    else:
        own = {
            "noisy": None,
            "seeded": np.random.default_rng(5),
            "unseeded": np.random.default_rng(),
        }
        model, data = make_linear_layers(), Noisy(own[case])
    is_list = isinstance(data, list)
    loaders = (data, data[:2]) if is_list else (DataLoader(data, batch_size=4, shuffle=True),)
    config = configure_short_run(checkpoint={"every": 3}, **keys)
    return {"config": config, "model": model, "data": ipu_pipe.from_loader(*loaders), **objects}


def train_differing_rank(rank: int, folder: Path) -> None:
    """Train as a rank whose data are drawn from the operating system's entropy; rank 0 writes the fault into a file."""
    with pytest.raises(RunFault) as raised:
        train_on_processes(rank, folder, {"unseeded": partial(make_batch_arguments, "unseeded")})
    if rank == 0:
        (folder / "fault").write_text(str(raised.value))
    end_process(0)


@needs_processes
def test_ranks_that_draw_different_batches_end_the_run_with_a_line(tmp_path: Path) -> None:
    """Story: they trained the inputs of one batch with the labels of another, at chance, without a message."""
    run_in_group(2, train_differing_rank, tmp_path)
    line = (tmp_path / "fault").read_text()
    assert (
        line.startswith("data: Noisy: update 0: rank 0 and rank 1 ") and len(line.splitlines()) == 1
    )
    assert not (tmp_path / "two" / "unseeded" / "summary.json").exists()
