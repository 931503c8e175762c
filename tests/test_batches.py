"""Batches as people have them: mappings, tuples, loaders without a length; models that give objects, or their own loss."""

from __future__ import annotations

import copy
import os
import random
import traceback
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
from ipu_pipe.config.schema import BackendConfig, Config
from ipu_pipe.data.batches import split_batch
from ipu_pipe.errors import RunFault, end_process
from ipu_pipe.model.batch import check_same_shapes, clone_tensors, list_tensors, map_tensors, take_samples, walk_leaves
from ipu_pipe.model.loss import OwnLoss, TakePart, describe_output, list_fields
from ipu_pipe.report.run_text import describe_left_out
from ipu_pipe.run.build import build
from ipu_pipe.run.planning import make_problem_of
from tests import forked
from tests.support.runs import assert_same_weights, read_summary

SGD = {"name": "sgd", "lr": 0.1, "momentum": 0.9}


def settings(**keys: Any) -> Config:
    usual = {"stages": 2, "micro_batch_size": 4, "gradient_accumulation": 2, "steps": 3, "optimizer": SGD}
    return ipu_pipe.configure(**{**usual, "log": {"tensorboard": False, "trace": False}, **keys})


def refusal(model: nn.Module, batches: Any, keys: Optional[Dict[str, Any]] = None, **given: Any) -> str:
    """The one line that refuses it."""
    data = batches if hasattr(batches, "train_batch") else ipu_pipe.from_loader(batches)
    with pytest.raises(BadInput) as refused:
        build(settings(**(keys or {})), model, data, **given)
    (line,) = refused.value.faults
    return line


def train_alike(
    model: nn.Module,
    batches: List[Any],
    value: Callable[[nn.Module, Any], torch.Tensor],
    updates: int = 3,
    **given: Any,
) -> None:
    """Three updates on the emulator are a plain loop's, to the last bit. `value`: the loss of a batch there."""
    plain = copy.deepcopy(model)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for k in range(updates):
        optimizer.zero_grad()
        for batch in (clone_tensors(batches[m % len(batches)]) for m in (2 * k, 2 * k + 1)):
            (value(plain, batch) / 2).backward()
        optimizer.step()
    job = build(settings(steps=updates), model, ipu_pipe.from_loader(batches, batches[:1]), **given)
    engine = make_engine(job, 0)
    for k in range(updates):
        engine.step(k)
    assert engine.evaluate()[0].loss is not None
    engine.close()
    before = dict(plain.named_parameters())
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


# ---- other libraries' models


def hugging(kind: str) -> nn.Module:
    """A small one, where Hugging Face's library is installed."""
    pytest.importorskip("transformers")
    import third_party

    made: nn.Module = getattr(third_party, f"hugging_{kind}")()
    return made


def sentences(count: int = 4) -> List[Dict[str, torch.Tensor]]:
    """Four each, padded behind their ends."""
    draw = torch.Generator().manual_seed(1)
    ends = torch.tensor([4, 6, 2, 6])
    return [
        {
            "input_ids": torch.randint(1, 31, (4, 6), generator=draw),
            "attention_mask": (torch.arange(6) < ends[:, None]).long(),
            "labels": torch.randint(0, 3, (4,), generator=draw),
        }
        for _ in range(count)
    ]


def texts() -> List[Dict[str, torch.Tensor]]:
    return [
        {**batch, "labels": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)} for batch in sentences()
    ]


def images() -> List[Dict[str, torch.Tensor]]:
    draw = torch.Generator().manual_seed(1)
    return [
        {"pixel_values": torch.randn(4, 3, 8, 8, generator=draw), "label": torch.randint(0, 3, (4,), generator=draw)}
        for _ in range(4)
    ]


def test_masked_sentences_train_as_in_plain_pytorch() -> None:
    def value(model: nn.Module, batch: Any) -> torch.Tensor:
        return F.cross_entropy(
            model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits, batch["labels"]
        )

    train_alike(hugging("bert"), sentences(), value, output="logits")


@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_a_models_own_loss_trains_as_in_plain_pytorch(kind: str) -> None:
    model, batches = hugging(kind), sentences() if kind == "bert" else texts()
    train_alike(model, batches, lambda model, batch: model(**batch).loss, loss="model")


def test_images_by_name_train_as_in_plain_pytorch() -> None:
    def value(model: nn.Module, batch: Any) -> torch.Tensor:
        return F.cross_entropy(model(batch["pixel_values"]).logits.double(), batch["label"])

    train_alike(hugging("vit"), images(), value, output=lambda found: found[0].double())


@pytest.mark.parametrize("method", ["pipedream", "pipemare"])
def test_methods_that_read_old_weights_take_mappings(method: str) -> None:
    """Their checks shuffle the inputs and look what is saved."""
    keys = {"method": method, "gradient_accumulation": 1}
    if method == "pipemare":
        keys["method_args"] = {"recompute": {"segments": 2}}
    engine = make_engine(build(settings(**keys), hugging("bert"), ipu_pipe.from_loader(sentences()), "model"), 0)
    assert all(engine.step(k)[0].loss > 0 for k in range(3))
    engine.close()


# ---- batches of every form


class Two(nn.Module):
    """Of two inputs in the ways that people write it."""

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


class Named(NamedTuple):
    a: torch.Tensor
    b: torch.Tensor


DRAWN = torch.Generator().manual_seed(2)
PARTS = [
    (torch.randn(4, 3, generator=DRAWN), torch.randn(4, 2, generator=DRAWN), torch.randint(0, 4, (4,), generator=DRAWN))
    for _ in range(4)
]


class Packed(dict):  # type: ignore[type-arg]
    """A mapping of a library's own."""


FORMS: Dict[str, Callable[[Any, Any, Any], Any]] = {
    "tuple of three": lambda a, b, y: (a, b, y),
    "list, as a DataLoader gives": lambda a, b, y: [a, b, y],
    "pair with a tuple": lambda a, b, y: ((a, b), y),
    "nested deeper": lambda a, b, y: (((a, b),), y),
    "mapping in a tuple": lambda a, b, y: (a, {"b": b}, y),
    "named tuple": lambda a, b, y: (Named(a, b), y),
    "mapping": lambda a, b, y: Packed(a=a, b=b, target=y),
    "pair with a mapping": lambda a, b, y: ({"b": b, "a": a}, y),
    "None for what is not given": lambda a, b, y: {"a": a, "b": b, "scale": None, "label": y},
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_batch_trains_as_in_plain_pytorch(form: str) -> None:
    batches = [FORMS[form](*parts) for parts in PARTS]

    def value(model: nn.Module, batch: Any) -> torch.Tensor:
        flat = [t for t in list_tensors(batch) if t.dim() == 2 and t.shape[1] in (2, 3)]
        a, b = sorted(flat, key=lambda t: -t.shape[1])
        return F.cross_entropy(model(a, b), next(t for t in list_tensors(batch) if t.dim() == 1))

    train_alike(Two(), batches, value)


def test_a_model_that_gives_its_scores_and_its_loss() -> None:
    """As nanoGPT does: the loss is the one number of the tuple; accuracy is told of what `output` takes."""
    batches = [{"a": a, "b": b, "labels": y} for a, b, y in PARTS]
    train_alike(Two(), batches, lambda model, batch: model(**batch)[1], loss="model")
    train_alike(Two(), [tuple(parts) for parts in PARTS], lambda model, batch: model(*batch)[1], loss="model")
    job = build(settings(), Two(), ipu_pipe.from_loader(batches, batches), "model", output=0)
    engine = make_engine(job, 0)
    found, model = engine.evaluate()[0], job.model
    right = sum(int((model(a, b).argmax(dim=1) == y).sum()) for a, b, y in PARTS)
    assert found.accuracy == right / 16 and found.loss == pytest.approx(
        sum(model(a, b, y)[1].item() for a, b, y in PARTS) / 4
    )
    engine.close()


def test_a_model_that_gives_nothing_but_its_loss_needs_no_labels() -> None:
    class Rebuilds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside, self.outside = nn.Linear(3, 2), nn.Linear(2, 3)

        def forward(self, a: torch.Tensor) -> torch.Tensor:
            return (self.outside(self.inside(a)) - a).square().mean()

    train_alike(Rebuilds(), [a for a, _, _ in PARTS], lambda model, a: model(a), loss="model")


def test_labels_by_another_name(tmp_path: Path) -> None:
    batches = [{"a": a, "b": b, "answers": y} for a, b, y in PARTS]
    data = ipu_pipe.from_loader(batches, batches, labels="answers")
    report = ipu_pipe.train(settings(), tmp_path / "run", model=Two(), data=data, quiet=True)
    assert report["final"]["test_accuracy"] is not None and report["steps"] == 3
    whole = ipu_pipe.train(
        settings(evaluate={"subset": 6}), tmp_path / "few", model=Two(), data=data, quiet=True, loss="cross_entropy"
    )
    assert whole["loss"]["name"] == "torch.nn.functional.cross_entropy" and whole["final"]["test_accuracy"] * 6 % 1 == 0


def test_nests() -> None:
    nest = {"a": torch.zeros(4, 2), "b": [torch.ones(4), (None, Named(torch.ones(4, 1), torch.zeros(4)))]}
    assert [name for name, _ in walk_leaves(nest)] == ["a", "b.0", "b.1.0", "b.1.1.0", "b.1.1.1"]
    part = take_samples(nest, 3)
    assert (
        [t.shape[0] for t in list_tensors(part)] == [3] * 4
        and part["b"][1][0] is None
        and part["b"][1][1].a.shape == (3, 1)
    )
    own = clone_tensors(nest)
    own["b"][1][1].b.fill_(5)
    assert nest["b"][1][1].b.sum() == 0
    assert map_tensors(torch.Tensor.numel, nest) == {"a": 8, "b": [4, (None, Named(4, 4))]}


# ---- what is refused


def test_outputs_that_are_no_tensor_are_told() -> None:
    line = refusal(hugging("bert"), sentences())
    assert "SequenceClassifierOutput(logits)" in line and "model.output: logits" in line and "loss: model" in line
    assert refusal(hugging("bert"), sentences(), output="scores") == (
        "model.output: scores: the model returns SequenceClassifierOutput(logits)"
    )
    assert "model.output: 7: the model returns" in refusal(hugging("bert"), sentences(), output=7)
    unlabelled = [{k: v for k, v in batch.items() if k != "labels"} for batch in sentences()]
    line = refusal(hugging("bert"), unlabelled, loss="model")
    assert "loss: model" in line and "SequenceClassifierOutput(logits)" in line and "does the model get the labels?" in line
    line = refusal(Two(), [{"a": a, "labels": y} for a, _, y in PARTS], {"loss": "model"}, output="logits")
    assert "model.output: logits: the model returns tuple(0, 1)" in line


def test_batches_that_cannot_be_are_told() -> None:
    a, b, y = PARTS[0]
    for batch, words in (
        ({"a": a, "b": b}, ("a, b", "labels, label, target, targets", "from_loader(..., labels=NAME)", "loss: model")),
        (a, ("is a Tensor", "(inputs, labels)")),
        ([a], ("is a list of one", "(inputs, labels)")),
        ((a, y.tolist()), ("labels: 0", "of type int", "must be a tensor")),
        (({"a": a, "b": "text"}, y), ("inputs: b", "of type str", "must be a tensor")),
        ({"a": a, "scale": 2.0, "label": y}, ("inputs: scale", "of type float", "must be a tensor")),
        ((a, b[:3], y), ("1 has the shape (3, 2), 0 (4, 3)", "samples")),
        ({"a": a, "scale": torch.tensor(2.0), "label": y}, ("scale has the shape ()", "samples")),
        (({}, y), ("batches of 4", "contain no tensor")[1:]),
        ((None, y), ("contain no tensor",)),
    ):
        line = refusal(Two(), [batch] * 4)
        assert line.startswith("data: ") and all(word in line for word in words), line
    line = refusal(Two(), ipu_pipe.from_loader([{"a": a, "label": y}] * 4, labels="other"))
    assert "a, label" in line and "has no other" in line
    assert "it fails on a microbatch of shape a (4, 3), torch.float32; wrong (4, 2)" in refusal(
        Two(), [{"a": a, "wrong": b, "label": y}] * 4
    )


def test_ipus_take_pairs_of_tensors() -> None:
    from ipu_pipe.backends.ipu.backend import list_faults

    a, b, y = PARTS[0]
    job = build(settings(), Two(), ipu_pipe.from_loader([(a, b, y)] * 4))
    (fault,) = list_faults(job)
    assert fault.startswith("data: ")
    job = build(settings(), Two(), ipu_pipe.from_loader([(a, y)] * 4), output=lambda scores: scores)
    assert "model.output: IPUs" in list_faults(job)[0]


def test_heads_of_blocks_give_what_is_taken_already() -> None:
    keys = {"method": "local_greedy", "stages": ["1"]}
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 4))
    pairs = [(a, y) for a, _, y in PARTS]
    line = refusal(model, pairs, keys, output=lambda scores: scores)
    assert line.startswith("model.output: (given in Python): local_greedy") and "name of a field, or an index" in line
    data = ipu_pipe.from_loader([a for a, _, _ in PARTS])

    class Squares(nn.Sequential):
        def forward(self, a: Any) -> Any:
            return super().forward(a).square().mean()

    assert refusal(Squares(*model), data, {**keys, "loss": "model"}).startswith("loss: model: local_greedy: the heads")
    build(settings(**{**keys, "method": "last_layers", "method_args": {"layers": 1}}), Squares(*model), data, "model")


def test_stages_on_processes_take_one_shape() -> None:
    a, b, _ = PARTS[0]
    check_same_shapes({"a": a, "b": None}, {"a": b.new_zeros(4, 3), "b": None}, 5)
    with pytest.raises(BadInput) as refused:
        check_same_shapes({"a": a[:, :2]}, {"a": a}, 5)
    (line,) = refused.value.faults
    assert (
        line.startswith("data: microbatch 5: inputs: a: of shape (4, 2), of the first microbatch (4, 3)")
        and "pad" in line
    )


def test_fields_of_outputs() -> None:
    pair = Named(torch.zeros(1), torch.ones(2))
    assert list_fields(pair) == ["a", "b"] and list_fields((1, 2)) == [0, 1] and list_fields({"x": 1}) == ["x"]
    assert describe_output(pair) == "Named(a, b)" and describe_output(torch.zeros(2, 3)) == "a tensor of shape (2, 3)"
    assert TakePart("b")(pair) is pair.b and TakePart(1)(pair) is pair.b and TakePart(-1)({"x": 3, "y": 4}) == 4
    assert TakePart("b")(pair.a) is pair.a  # a tensor is the output itself
    assert OwnLoss()(pair, None) is pair.a and OwnLoss()({"loss": pair.a, "other": pair.a}, None) is pair.a


def test_a_whole_batch_goes_to_a_model_with_a_loss_of_its_own() -> None:
    a, b, y = PARTS[0]
    held = {"a": a, "labels": y}
    assert split_batch(held, whole=True) == (held, y) and split_batch(held)[0] == {"a": a}
    assert split_batch((a, b, y), whole=True)[0] == (a, b, y) and split_batch((a, b, y))[0] == (a, b)
    assert split_batch({"a": a}, whole=True)[1] is None


# ---- loaders without a length


class Stream(IterableDataset):  # type: ignore[type-arg]
    """Samples in an order that it draws as it goes, from the global random state, `count` a pass."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[Any]:
        for _ in range(self.count):
            yield torch.rand(3), torch.randint(0, 4, ())


def make_linear() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 4))


def streamed(count: int = 22) -> Any:
    return ipu_pipe.from_loader(DataLoader(Stream(count), batch_size=4), [(PARTS[0][0], PARTS[0][2])])


def test_a_loader_without_a_length_begins_anew_where_it_ends() -> None:
    data = streamed(10)  # two full batches a pass
    assert data.train_batches_per_epoch(4) is None and data.train_samples is None
    batches = [data.train_batch(0, index, 4) for index in range(5)]
    assert len({float(x.sum()) for x, _ in batches}) == 5  # each pass draws anew
    torch.rand(3)
    for index in (3, 3, 4, 1, 0):
        assert torch.equal(streamed(10).train_batch(0, index, 4)[0], batches[index][0])
        assert torch.equal(data.train_batch(0, index, 4)[0], batches[index][0])


def test_a_run_by_steps_goes_on_where_it_was(tmp_path: Path) -> None:
    keys = {"steps": 6, "evaluate": {"steps": 2}, "checkpoint": {"every": 4}}
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 4))]
    models += [copy.deepcopy(models[0]) for _ in range(2)]
    whole = ipu_pipe.train(settings(**keys), tmp_path / "whole", model=models[0], data=streamed(), quiet=True)
    assert whole["updates_per_epoch"] is None and whole["steps"] == 6
    lines = (tmp_path / "whole/metrics.jsonl").read_text().splitlines()
    assert (
        sum('"test_loss": 1' in line or '"test_loss": 0' in line for line in lines) == 4
    )  # before, and after each 2 updates
    ipu_pipe.train(settings(**{**keys, "steps": 4}), tmp_path / "two", model=models[1], data=streamed(), quiet=True)
    torch.rand(7)
    ipu_pipe.train(settings(**keys), tmp_path / "two", model=models[2], data=streamed(), quiet=True, resume=True)
    for a, b in zip(models[0].parameters(), models[2].parameters()):
        assert torch.equal(a, b)


def test_a_microbatch_is_a_batch_of_the_loader_where_the_config_does_not_say(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, first = make_linear(), tmp_path / "unsaid"
    twin = copy.deepcopy(model)
    keys: Dict[str, Any] = {"stages": 2, "log": {"tensorboard": False, "trace": False}}
    run = ipu_pipe.train(ipu_pipe.configure(steps=2, **keys), first, model=model, data=streamed(), quiet=True)
    assert run["batch"]["micro_batch_size"] == 4
    said = ipu_pipe.configure(steps=2, micro_batch_size=4, **keys)
    ipu_pipe.train(said, tmp_path / "said", model=twin, data=streamed(), quiet=True)
    for a, b in zip(model.parameters(), twin.parameters()):
        assert torch.equal(a, b)
    longer = ipu_pipe.train(ipu_pipe.configure(steps=3, **keys), first, model=model, data=streamed(), quiet=True, resume=True)
    assert longer["steps"] == 3 and longer["batch"]["micro_batch_size"] == 4
    assert "batches of 4, micro_batch_size is 8" in refusal(Two(), streamed(), {"micro_batch_size": 8})
    data = {"name": "tests.test_batches:streamed"}  # plans of a loader's data were refused: they asked for two samples
    config = ipu_pipe.configure(model={"entry": "tests.test_batches:make_linear"}, data=data, gradient_accumulation=2, steps=2)
    for measure in (False, True):
        problem = make_problem_of(config, "v100x8", measure=measure)
        assert problem.batch == 8 and [pass_.samples for pass_ in problem.problem.units[0].measured] == [2, 4][: 2 * measure]


def test_what_counts_in_epochs_is_refused_without_a_length() -> None:
    line = refusal(Two(), streamed(), {"steps": None})
    assert line == (
        "steps: null: must be the updates of the run: the training data has no length, so that it has no epochs"
    )
    with pytest.raises(BadInput) as refused:
        keys: Dict[str, Any] = {
            "method": "pipemare",
            "method_args": {"warmup": {"epochs": 1}},
            "evaluate": {"every": 0.5},
        }
        keys["lr_schedule"] = {"name": "step", "milestones": [1]}
        build(settings(**keys), Two(), streamed())
    assert [fault.partition(":")[0] for fault in refused.value.faults] == [
        "lr_schedule.milestones", "evaluate.every", "method_args.warmup",
    ]  # fmt: skip
    line = refusal(Two(), streamed(), {"method": "randomized_pipedream", "gradient_accumulation": 1})
    assert line.startswith("method: randomized_pipedream: draws delays by the epoch")


def test_loaders_that_give_no_batch_are_refused() -> None:
    a, _, y = PARTS[0]
    once = ipu_pipe.from_loader(iter([(a, y)] * 3))
    build(settings(), Two(), once)
    with pytest.raises(BadInput, match="ended after 3 batches .can it be iterated over twice"):
        once.train_batch(0, 3, 4)
    assert "gives no batch of 4 samples" in refusal(Two(), iter([]))
    assert "gives no batch of 4 samples" in refusal(Two(), DataLoader(Stream(3), batch_size=4))
    assert "batches of 3, micro_batch_size is 4" in refusal(Two(), ((a[:3], y[:3]) for _ in range(3)))
    for name in ("test", "validation"):
        with pytest.raises(BadInput, match=f"{name} loader is a generator, which gives its batches once"):
            ipu_pipe.from_loader([], **{name: (batch for batch in PARTS)})


# ---- samples that no update has


def test_samples_left_out_are_told() -> None:
    x, y = torch.randn(23, 3), torch.randint(0, 4, (23,))
    loader = DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=4)
    keys = {"steps": None}
    told_of = describe_left_out(build(settings(**keys), Two(), ipu_pipe.from_loader(loader)))
    assert told_of == ["data: 7 of 23 training samples are left out of each epoch: they fill no batch of 8"]
    pairs = [(a, y) for a, _, y in PARTS][
        :3
    ]  # a loader that does not say how many samples there are: full microbatches tell
    told_of = describe_left_out(build(settings(**keys), Two(), ipu_pipe.from_loader(pairs)))
    assert told_of == ["data: 4 of 12 training samples are left out of each epoch: they fill no batch of 8"]
    assert describe_left_out(build(settings(), Two(), streamed())) == []
    for name, options, count in (("digits", {}, 1437), ("synthetic", {"subset": 30}, 30)):
        data = ipu_pipe.load_data(name, **options)
        assert data.train_samples == count  # type: ignore[attr-defined]


# ---- on two processes


class Noisy(Dataset[Any]):
    """Draws as it reads: from the global generators, or from `own`."""

    def __init__(self, own: Optional[np.random.Generator] = None) -> None:
        self.own = own

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Any:
        y = random.randrange(4)
        noise = np.random.rand(3) if self.own is None else self.own.random(3)
        return torch.tensor(noise + y, dtype=torch.float32), y


def noisy(own: Optional[np.random.Generator] = None) -> Any:
    return DataLoader(Noisy(own), batch_size=4, shuffle=True)


def as_trained(case: str) -> Dict[str, Any]:
    """Model, data and what else `train` is given, the same each time."""
    torch.manual_seed(3)
    made: Dict[str, Callable[[], Dict[str, Any]]] = {
        "three": lambda: {"model": Two(), "data": [(a, b, y) for a, b, y in PARTS]},
        "own": lambda: {"model": Two(), "data": [{"a": a, "b": b, "labels": y} for a, b, y in PARTS], "loss": "model"},
        "bert": lambda: {"model": hugging("bert"), "data": sentences(), "output": "logits"},
        "gpt2": lambda: {"model": hugging("gpt2"), "data": texts(), "loss": "model"},
        "vit": lambda: {"model": hugging("vit"), "data": images(), "output": "logits"},
        "noisy": lambda: {"model": nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 4)), "data": noisy()},
        "seeded": lambda: {
            "model": nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 4)),
            "data": noisy(np.random.default_rng(5)),
        },
        "unseeded": lambda: {
            "model": nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 4)),
            "data": noisy(np.random.default_rng()),
        },
        "blocks": lambda: {"model": hugging("vit"), "data": images(), "output": "logits"},
    }
    given = made[case]()
    stages = {"three": ["out"], "own": ["out"], "bert": ["bert.encoder.layer.1"], "gpt2": ["transformer.h.1"]}
    stages["blocks"] = [name for name, _ in given["model"].named_modules() if name.endswith("layers.1")]
    method = "local_greedy" if case == "blocks" else "gpipe"
    config = settings(stages=stages.get(case, 2), checkpoint={"every": 3}, method=method)
    tested = given["data"][:2] if isinstance(given["data"], list) else None
    return {**given, "config": config, "data": ipu_pipe.from_loader(given["data"], tested), "quiet": True}


def one_rank(rank: int, folder: Path, cases: List[str]) -> None:
    """A process of two, forked from one that has imported all."""
    os.environ.update(RANK=str(rank), WORLD_SIZE="2")
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    try:
        for case in cases:
            how = as_trained(case)
            backend = BackendConfig(name="distributed", deadline=60)
            ipu_pipe.train(how.pop("config").model_copy(update={"backend": backend}), folder / "two" / case, **how)
        torch.distributed.barrier()
    except BaseException:
        traceback.print_exc()
        end_process(1)
    end_process(0)


@pytest.mark.skipif(tuple(map(int, torch.__version__.split(".")[:2])) < (2, 4), reason="needs torch 2.4")
def test_two_processes_train_on_any_batch_as_the_emulator(tmp_path: Path) -> None:
    cases = ["three", "own", "bert", "gpt2", "vit", "blocks", "noisy", "seeded"]
    for case in cases:
        how = as_trained(case)
        ipu_pipe.train(how.pop("config"), tmp_path / "one" / case, **how)
    forked.in_ranks(2, one_rank, tmp_path, cases)
    for case in cases:
        one, two = tmp_path / "one" / case, tmp_path / "two" / case
        assert_same_weights(one, two)
        assert read_summary(one)["final"] == read_summary(two)["final"], case


def differing_rank(rank: int, folder: Path) -> None:
    """A rank of a run whose data draw from the operating system's entropy."""
    os.environ.update(RANK=str(rank), WORLD_SIZE="2")
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    how = as_trained("unseeded")
    backend = BackendConfig(name="distributed", deadline=60)
    try:
        ipu_pipe.train(how.pop("config").model_copy(update={"backend": backend}), folder / "run", **how)
    except RunFault as fault:
        if rank == 0:
            (folder / "fault").write_text(str(fault))
        end_process(0)
    end_process(1)


@pytest.mark.skipif(tuple(map(int, torch.__version__.split(".")[:2])) < (2, 4), reason="needs torch 2.4")
def test_ranks_that_draw_different_batches_end_the_run_with_a_line(tmp_path: Path) -> None:
    """They trained the inputs of one batch with the labels of another, at chance, and said nothing."""
    forked.in_ranks(2, differing_rank, tmp_path)
    line = (tmp_path / "fault").read_text()
    assert line.startswith("data: Noisy: update 0: rank 0 and rank 1 ") and len(line.splitlines()) == 1
    assert not (tmp_path / "run" / "summary.json").exists()
