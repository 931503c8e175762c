"""Batches as people have them: mappings, tuples, loaders without a length; models that give objects, or their own loss."""

from __future__ import annotations

import copy
import random
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
from ipu_pipe.backends.ipu.backend import list_faults as list_ipu_faults
from ipu_pipe.backends.table import make_engine
from ipu_pipe.config.schema import Config
from ipu_pipe.data.sources import split_batch
from ipu_pipe.errors import RunFault, end_process
from ipu_pipe.model.batch import (
    check_same_shapes,
    clone_tensors,
    list_tensors,
    map_tensors,
    take_samples,
    walk_leaves,
)
from ipu_pipe.model.loss import OwnLoss, TakePart, describe_output, list_fields
from ipu_pipe.pipeline.build import build
from ipu_pipe.report.run_text import describe_left_out
from ipu_pipe.run.planning import make_planning_problem
from tests.support.flows import train_updates
from tests.support.models import Composed
from tests.support.processes import check_two_processes, run_in_group, train_on_processes
from tests.support.runs import assert_same, list_faults, needs_processes, read_column

SGD = {"name": "sgd", "lr": 0.1, "momentum": 0.9}


def settings(**keys: Any) -> Config:
    usual = {
        "stages": 2,
        "micro_batch_size": 4,
        "gradient_accumulation": 2,
        "steps": 3,
        "optimizer": SGD,
    }
    return ipu_pipe.configure(**{**usual, "log": {"tensorboard": False, "trace": False}, **keys})


def refusal(model: nn.Module, batches: Any, keys: Dict[str, Any] = {}, **others: Any) -> str:
    """Return the one line that refuses it."""
    data = batches if hasattr(batches, "train_batch") else ipu_pipe.from_loader(batches)
    (line,) = list_faults(build, settings(**keys), model, data, **others)
    return line


def train_alike(
    model: nn.Module,
    batches: List[Any],
    value: Callable[[nn.Module, Any], torch.Tensor],
    **others: Any,
) -> None:
    """Check that three updates on the emulator are a plain loop's, to the last bit. `value`: the loss of a batch there."""
    plain = copy.deepcopy(model)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for k in range(3):
        optimizer.zero_grad()
        for batch in (clone_tensors(batches[m % len(batches)]) for m in (2 * k, 2 * k + 1)):
            (value(plain, batch) / 2).backward()
        optimizer.step()
    flow, _ = train_updates(
        build(settings(), model, ipu_pipe.from_loader(batches, batches[:1]), **others), 3
    )
    assert flow.engine.evaluate()[0].loss is not None
    flow.engine.close()
    assert_same(dict(model.named_parameters()), dict(plain.named_parameters()))


# ---- other libraries' models


def hugging(kind: str) -> nn.Module:
    """Return a small model, where Hugging Face's library is installed."""
    pytest.importorskip("transformers")
    import third_party

    return getattr(third_party, f"make_hugging_{kind}")()  # type: ignore[no-any-return]


def sentences() -> List[Dict[str, torch.Tensor]]:
    """Return four batches of four sentences, padded after their ends."""
    draw = torch.Generator().manual_seed(1)
    ends = torch.tensor([4, 6, 2, 6])
    return [
        {
            "input_ids": torch.randint(1, 31, (4, 6), generator=draw),
            "attention_mask": (torch.arange(6) < ends[:, None]).long(),
            "labels": torch.randint(0, 3, (4,), generator=draw),
        }
        for _ in range(4)
    ]


def texts() -> List[Dict[str, torch.Tensor]]:
    return [
        {**one, "labels": one["input_ids"].masked_fill(one["attention_mask"] == 0, -100)}
        for one in sentences()
    ]


def images() -> List[Dict[str, torch.Tensor]]:
    draw = torch.Generator().manual_seed(1)
    return [
        {
            "pixel_values": torch.randn(4, 3, 8, 8, generator=draw),
            "label": torch.randint(0, 3, (4,), generator=draw),
        }
        for _ in range(4)
    ]


def test_masked_sentences_train_as_in_plain_pytorch() -> None:
    def value(model: nn.Module, batch: Any) -> torch.Tensor:
        output = model(batch["input_ids"], attention_mask=batch["attention_mask"])
        return F.cross_entropy(output.logits, batch["labels"])

    train_alike(hugging("bert"), sentences(), value, output="logits")


@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_a_models_own_loss_trains_as_in_plain_pytorch(kind: str) -> None:
    model, batches = hugging(kind), sentences() if kind == "bert" else texts()
    train_alike(model, batches, lambda model, batch: model(**batch).loss, loss="model")


def test_images_by_name_train_as_in_plain_pytorch() -> None:
    def value(model: nn.Module, batch: Any) -> torch.Tensor:
        return F.cross_entropy(model(batch["pixel_values"]).logits.double(), batch["label"])

    train_alike(hugging("vit"), images(), value, output=lambda output: output[0].double())


@pytest.mark.parametrize(
    "method, args", [("pipedream", {}), ("pipemare", {"recompute": {"segments": 2}})]
)
def test_methods_that_read_old_weights_take_mappings(method: str, args: Dict[str, Any]) -> None:
    """Their checks shuffle the inputs and look what is saved."""
    keys = {"method": method, "gradient_accumulation": 1, "method_args": args}
    job = build(settings(**keys), hugging("bert"), ipu_pipe.from_loader(sentences()), "model")
    flow, results = train_updates(job, 3)
    assert all(result.loss > 0 for result in results)
    flow.engine.close()


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
    (
        torch.randn(4, 3, generator=DRAWN),
        torch.randn(4, 2, generator=DRAWN),
        torch.randint(0, 4, (4,), generator=DRAWN),
    )
    for _ in range(4)
]
PAIRS = [(a, y) for a, _, y in PARTS]
NAMED_PAIRS = [{"a": a, "b": b, "labels": y} for a, b, y in PARTS]


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
    train_alike(Two(), NAMED_PAIRS, lambda model, batch: model(**batch)[1], loss="model")
    train_alike(Two(), PARTS, lambda model, batch: model(*batch)[1], loss="model")
    job = build(
        settings(), Two(), ipu_pipe.from_loader(NAMED_PAIRS, NAMED_PAIRS), "model", output=0
    )
    engine = make_engine(job, 0)
    result, model = engine.evaluate()[0], job.model
    assert (
        result.accuracy
        == sum(int((model(a, b).argmax(dim=1) == y).sum()) for a, b, y in PARTS) / 16
    )
    assert result.loss == pytest.approx(sum(model(a, b, y)[1].item() for a, b, y in PARTS) / 4)
    engine.close()


def test_a_model_that_gives_nothing_but_its_loss_needs_no_labels() -> None:
    rebuild = lambda m, a: (m.outside(m.inside(a)) - a).square().mean()  # noqa: E731
    rebuilding = Composed(rebuild, inside=nn.Linear(3, 2), outside=nn.Linear(2, 3))
    train_alike(rebuilding, [a for a, _, _ in PARTS], lambda model, a: model(a), loss="model")


def test_labels_by_another_name(tmp_path: Path) -> None:
    batches = [{"a": a, "b": b, "answers": y} for a, b, y in PARTS]
    data = ipu_pipe.from_loader(batches, batches, labels="answers")
    report = ipu_pipe.train(settings(), tmp_path / "run", model=Two(), data=data, quiet=True)
    assert report["final"]["test_accuracy"] is not None and report["steps"] == 3
    config = settings(evaluate={"subset": 6})
    few = ipu_pipe.train(
        config, tmp_path / "few", model=Two(), data=data, quiet=True, loss="cross_entropy"
    )
    assert (
        few["loss"]["name"] == "torch.nn.functional.cross_entropy"
        and few["final"]["test_accuracy"] * 6 % 1 == 0
    )


def test_nests() -> None:
    nest = {
        "a": torch.zeros(4, 2),
        "b": [torch.ones(4), (None, Named(torch.ones(4, 1), torch.zeros(4)))],
    }
    assert [name for name, _ in walk_leaves(nest)] == ["a", "b.0", "b.1.0", "b.1.1.0", "b.1.1.1"]
    part = take_samples(nest, 3)
    assert map_tensors(lambda tensor: tuple(tensor.shape), part) == {
        "a": (3, 2),
        "b": [(3,), (None, Named((3, 1), (3,)))],
    }
    clone = clone_tensors(nest)
    clone["b"][1][1].b.fill_(5)
    assert nest["b"][1][1].b.sum() == 0
    assert map_tensors(torch.Tensor.numel, nest) == {"a": 8, "b": [4, (None, Named(4, 4))]}


# ---- what is refused


def test_outputs_that_are_no_tensor_are_reported() -> None:
    bert, returns = hugging("bert"), "returns SequenceClassifierOutput(logits)"
    line = refusal(bert, sentences())
    assert returns in line and "model.output: logits" in line and "loss: model" in line
    assert (
        refusal(bert, sentences(), output="scores") == f"model.output: scores: the model {returns}"
    )
    assert f"model.output: 7: the model {returns}" in refusal(bert, sentences(), output=7)
    unlabelled = [{k: v for k, v in batch.items() if k != "labels"} for batch in sentences()]
    line = refusal(bert, unlabelled, loss="model")
    assert "loss: model" in line and "SequenceClassifierOutput(logits)" in line
    line = refusal(Two(), NAMED_PAIRS, {"loss": "model"}, output="logits")
    assert "model.output: logits: the model returns tuple(0, 1)" in line


def test_batches_that_cannot_be_are_reported() -> None:
    a, b, y = PARTS[0]
    for batch, words in (
        (
            {"a": a, "b": b},
            (
                "a, b",
                "labels, label, target, targets",
                "from_loader(..., labels=NAME)",
                "loss: model",
            ),
        ),
        (a, ("is a Tensor", "(inputs, labels)")),
        ([a], ("is a list of one", "(inputs, labels)")),
        ((a, y.tolist()), ("labels: 0", "of type int", "must be a tensor")),
        (({"a": a, "b": "text"}, y), ("inputs: b", "of type str", "must be a tensor")),
        (
            {"a": a, "scale": 2.0, "label": y},
            ("inputs: scale", "of type float", "must be a tensor"),
        ),
        ((a, b[:3], y), ("1 has the shape (3, 2), 0 (4, 3)", "samples")),
        ({"a": a, "scale": torch.tensor(2.0), "label": y}, ("scale has the shape ()", "samples")),
        (({}, y), ("contain no tensor",)),
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
    (fault,) = list_ipu_faults(build(settings(), Two(), ipu_pipe.from_loader(PARTS)))
    assert fault.startswith("data: ")
    job = build(settings(), Two(), ipu_pipe.from_loader(PAIRS), output=lambda scores: scores)
    assert "model.output: IPUs" in list_ipu_faults(job)[0]


def test_heads_of_blocks_give_what_is_taken_already() -> None:
    keys = {"method": "local_greedy", "stages": ["1"]}
    model = make_linear()
    line = refusal(model, PAIRS, keys, output=lambda scores: scores)
    assert (
        line.startswith("model.output: (given in Python): local_greedy")
        and "name of a field, or an index" in line
    )
    data = ipu_pipe.from_loader([a for a, _, _ in PARTS])

    class Squares(nn.Sequential):
        def forward(self, a: Any) -> Any:
            return super().forward(a).square().mean()

    assert refusal(Squares(*model), data, {**keys, "loss": "model"}).startswith(
        "loss: model: local_greedy: the heads"
    )
    build(
        settings(**{**keys, "method": "last_layers", "method_args": {"layers": 1}}),
        Squares(*model),
        data,
        "model",
    )


def test_stages_on_processes_take_one_shape() -> None:
    a, b, _ = PARTS[0]
    check_same_shapes({"a": a, "b": None}, {"a": b.new_zeros(4, 3), "b": None}, 5)
    (line,) = list_faults(check_same_shapes, {"a": a[:, :2]}, {"a": a}, 5)
    assert line.startswith(
        "data: microbatch 5: inputs: a: of shape (4, 2), of the first microbatch (4, 3)"
    )


def test_fields_of_outputs() -> None:
    pair = Named(torch.zeros(1), torch.ones(2))
    assert (
        list_fields(pair) == ["a", "b"]
        and list_fields((1, 2)) == [0, 1]
        and list_fields({"x": 1}) == ["x"]
    )
    assert (
        describe_output(pair) == "Named(a, b)"
        and describe_output(torch.zeros(2, 3)) == "a tensor of shape (2, 3)"
    )
    assert (
        TakePart("b")(pair) is pair.b
        and TakePart(1)(pair) is pair.b
        and TakePart(-1)({"x": 3, "y": 4}) == 4
    )
    assert TakePart("b")(pair.a) is pair.a  # a tensor is the output itself
    assert (
        OwnLoss()(pair, None) is pair.a
        and OwnLoss()({"loss": pair.a, "other": pair.a}, None) is pair.a
    )


def test_a_whole_batch_goes_to_a_model_with_a_loss_of_its_own() -> None:
    a, b, y = PARTS[0]
    batch = {"a": a, "labels": y}
    assert split_batch(batch, whole=True) == (batch, y) and split_batch(batch)[0] == {"a": a}
    assert split_batch((a, b, y), whole=True)[0] == (a, b, y) and split_batch((a, b, y))[0] == (
        a,
        b,
    )
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
    """Return two layers, with the same weights each time."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 4))


def streamed(count: int = 22) -> Any:
    return ipu_pipe.from_loader(DataLoader(Stream(count), batch_size=4), PAIRS[:1])


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
    models = [make_linear() for _ in range(3)]
    whole = ipu_pipe.train(
        settings(**keys), tmp_path / "whole", model=models[0], data=streamed(), quiet=True
    )
    assert whole["updates_per_epoch"] is None and whole["steps"] == 6
    tested = [loss for loss in read_column(tmp_path / "whole", "test_loss") if loss is not None]
    assert len(tested) == 4  # before, and after each 2 updates
    ipu_pipe.train(
        settings(**{**keys, "steps": 4}),
        tmp_path / "two",
        model=models[1],
        data=streamed(),
        quiet=True,
    )
    torch.rand(7)
    ipu_pipe.train(
        settings(**keys),
        tmp_path / "two",
        model=models[2],
        data=streamed(),
        quiet=True,
        resume=True,
    )
    assert_same(models[0].state_dict(), models[2].state_dict())


def test_a_microbatch_is_a_batch_of_the_loader_where_the_config_does_not_say(
    tmp_path: Path,
) -> None:
    model, twin, first = make_linear(), make_linear(), tmp_path / "unsaid"
    keys: Dict[str, Any] = {"stages": 2, "log": {"tensorboard": False, "trace": False}}
    run = ipu_pipe.train(
        ipu_pipe.configure(steps=2, **keys), first, model=model, data=streamed(), quiet=True
    )
    assert run["batch"]["micro_batch_size"] == 4
    explicit = ipu_pipe.configure(steps=2, micro_batch_size=4, **keys)
    ipu_pipe.train(explicit, tmp_path / "said", model=twin, data=streamed(), quiet=True)
    assert_same(model.state_dict(), twin.state_dict())
    longer = ipu_pipe.train(
        ipu_pipe.configure(steps=3, **keys),
        first,
        model=model,
        data=streamed(),
        quiet=True,
        resume=True,
    )
    assert longer["steps"] == 3 and longer["batch"]["micro_batch_size"] == 4
    assert "batches of 4, micro_batch_size is 8" in refusal(
        Two(), streamed(), {"micro_batch_size": 8}
    )
    data = {
        "name": "tests.test_batches:streamed"
    }  # plans of a loader's data were refused: they asked for two samples
    config = ipu_pipe.configure(
        model={"entry": "tests.test_batches:make_linear"},
        data=data,
        gradient_accumulation=2,
        steps=2,
    )
    for measure in (False, True):
        problem = make_planning_problem(config, "v100x8", measure=measure)
        assert (
            problem.batch == 8
            and [pass_.samples for pass_ in problem.problem.units[0].measured]
            == [2, 4][: 2 * measure]
        )


def test_what_counts_in_epochs_is_refused_without_a_length() -> None:
    line = refusal(Two(), streamed(), {"steps": None})
    assert line.startswith(
        "steps: null: must be the updates of the run: the training data has no length"
    )
    keys: Dict[str, Any] = {
        "method": "pipemare", "method_args": {"warmup": {"epochs": 1}}, "evaluate": {"every": 0.5},
        "lr_schedule": {"name": "step", "milestones": [1]},
    }  # fmt: skip
    faults = list_faults(build, settings(**keys), Two(), streamed())
    assert [fault.partition(":")[0] for fault in faults] == [
        "lr_schedule.milestones",
        "evaluate.every",
        "method_args.warmup",
    ]
    line = refusal(
        Two(), streamed(), {"method": "randomized_pipedream", "gradient_accumulation": 1}
    )
    assert line.startswith(
        "method: randomized_pipedream: draws delays by the epoch"
    ) and line.endswith("has no epochs")


def test_loaders_that_give_no_batch_are_refused() -> None:
    a, y = PAIRS[0]
    once = ipu_pipe.from_loader(iter([(a, y)] * 3))
    build(settings(), Two(), once)
    with pytest.raises(BadInput, match="ended after 3 batches .can it be iterated over twice"):
        once.train_batch(0, 3, 4)
    assert "gives no batch of 4 samples" in refusal(Two(), iter([]))
    assert "gives no batch of 4 samples" in refusal(Two(), DataLoader(Stream(3), batch_size=4))
    assert "batches of 3, micro_batch_size is 4" in refusal(
        Two(), ((a[:3], y[:3]) for _ in range(3))
    )
    for name in ("test", "validation"):
        with pytest.raises(
            BadInput, match=f"{name} loader is a generator, which can be iterated over only once"
        ):
            ipu_pipe.from_loader([], **{name: (batch for batch in PARTS)})


# ---- samples that no update has


def test_samples_left_out_are_reported() -> None:
    x, y = torch.randn(23, 3), torch.randint(0, 4, (23,))
    loader = DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=4)
    keys = {"steps": None}
    # the second does not say how many samples there are: its full microbatches do
    for batches, words in ((loader, "7 of 23 "), (PAIRS[:3], "4 of 12 ")):
        (line,) = describe_left_out(build(settings(**keys), Two(), ipu_pipe.from_loader(batches)))
        assert line.startswith(f"data: {words}") and line.endswith(" batch of 8")
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


RUNS: Dict[str, Callable[[], Dict[str, Any]]] = {
    "three": lambda: {"model": Two(), "data": PARTS, "stages": ["out"]},
    "own": lambda: {"model": Two(), "data": NAMED_PAIRS, "loss": "model", "stages": ["out"]},
    "bert": lambda: {
        "model": hugging("bert"),
        "data": sentences(),
        "output": "logits",
        "stages": ["bert.encoder.layer.1"],
    },
    "gpt2": lambda: {
        "model": hugging("gpt2"),
        "data": texts(),
        "loss": "model",
        "stages": ["transformer.h.1"],
    },
    "vit": lambda: {"model": hugging("vit"), "data": images(), "output": "logits"},
    "blocks": lambda: {
        "model": hugging("vit"),
        "data": images(),
        "output": "logits",
        "method": "local_greedy",
    },
    "noisy": lambda: {"model": make_linear(), "data": Noisy()},
    "seeded": lambda: {"model": make_linear(), "data": Noisy(np.random.default_rng(5))},
    "unseeded": lambda: {"model": make_linear(), "data": Noisy(np.random.default_rng())},
}


def make_arguments(case: str) -> Dict[str, Any]:
    """Return the arguments of `train`, the same each time."""
    torch.manual_seed(3)
    arguments = RUNS[case]()
    data = arguments.pop("data")
    keys = {key: arguments.pop(key) for key in ("stages", "method") if key in arguments}
    if case == "blocks":
        keys["stages"] = [
            name for name, _ in arguments["model"].named_modules() if name.endswith("layers.1")
        ]
    is_list = isinstance(data, list)
    loaders = (data, data[:2]) if is_list else (DataLoader(data, batch_size=4, shuffle=True),)
    config = settings(checkpoint={"every": 3}, **keys)
    return {"config": config, "data": ipu_pipe.from_loader(*loaders), **arguments}


@pytest.mark.slow
@needs_processes
def test_two_processes_train_on_any_batch_as_the_emulator(tmp_path: Path) -> None:
    check_two_processes(
        tmp_path, {case: partial(make_arguments, case) for case in RUNS if case != "unseeded"}
    )


def differing_rank(rank: int, folder: Path) -> None:
    """Train as a rank of a run whose data draw from the operating system's entropy."""
    with pytest.raises(RunFault) as raised:
        train_on_processes(rank, folder, {"unseeded": partial(make_arguments, "unseeded")})
    if rank == 0:
        (folder / "fault").write_text(str(raised.value))
    end_process(0)


@needs_processes
def test_ranks_that_draw_different_batches_end_the_run_with_a_line(tmp_path: Path) -> None:
    """They trained the inputs of one batch with the labels of another, at chance, and said nothing."""
    run_in_group(2, differing_rank, tmp_path)
    line = (tmp_path / "fault").read_text()
    assert (
        line.startswith("data: Noisy: update 0: rank 0 and rank 1 ") and len(line.splitlines()) == 1
    )
    assert not (tmp_path / "two" / "unseeded" / "summary.json").exists()
