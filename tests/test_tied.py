"""A weight of several stages is trained as in plain PyTorch, stored and counted once, or refused with the reason."""

from __future__ import annotations

import functools
import importlib.util
import json
from pathlib import Path
from typing import Any, Callable, Dict, Tuple

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import ipu_pipe
from ipu_pipe.backends.processes import engine, layout
from ipu_pipe.config.load import configure, load_config
from ipu_pipe.cut.cutting import cut_model
from ipu_pipe.cut.verification import verify_pieces
from ipu_pipe.model.stages import begin_stage, partition
from ipu_pipe.run.build import build
from ipu_pipe.run.train import train
from ipu_pipe.schedule.methods import METHODS, resolve_method
from ipu_pipe.schedule.timelines import make_schedule
from ipu_pipe.schedule.versions import VersionTable
from tests import forked
from tests.staged_models import TIED, draw_microbatches, join_stages, make_repeating_model
from tests.support.models import Composed
from tests.support.processes import run_in_group
from tests.support.runs import (
    assert_same,
    list_faults,
    needs_processes,
    read_json,
    read_state,
    read_summary,
    read_trace_file,
    read_weights,
)
from tests.support.slow import mark_slow
from tests.test_emulator_exact import SHARING, make_seeded_stages
from tests.tied_models import (
    Gpt2,
    RenormedEmbeddingModel,
    SharedBatchNormModel,
    make_language_model,
    make_random_tokens,
)

# ---- methods


@pytest.mark.parametrize("name", [n for n, m in METHODS.items() if m.is_pipeline and n != "rows"])
def test_stages_read_one_version_of_a_microbatch_where_a_method_shares_weights(name: str) -> None:
    method = resolve_method(name)
    P = 4 * (method.order.stages_per_device if method.order else 1)
    N = P if METHODS[name].one_version else 1
    schedule = make_schedule(method, P, 10 * N, N, drains=[3 * N, 7 * N])
    forward, backward = VersionTable(schedule, method).window(0, 10 * N)
    is_one = (forward == forward[0]).all() and (backward == forward).all()
    assert is_one == METHODS[name].one_version


@pytest.mark.parametrize("name", [n for n, m in METHODS.items() if not m.one_version])
def test_other_methods_refuse_a_shared_weight_with_reason_and_remedy(name: str) -> None:
    reason = resolve_method(name).one_stage_reason
    model = join_stages(TIED["tied"]())
    (fault,) = list_faults(partition, model, torch.randn(3, 12), one_stage=reason)
    beginning = "stages: 1.0.weight on stage 1 and 3.0.weight on stage 3 are one shared weight: both uses must be in one stage: "
    assert fault.startswith(f"{beginning}with {name} ")
    holder = ", method_args: {tied: holder}" if METHODS[name].can_share_weights else ""
    assert fault.endswith(f"use method {', '.join(SHARING)}{holder}")
    reasons = {
        "local_sgd": "replicas step by themselves",
        "randomized_pipedream": "single stages step by themselves",
    }
    delays = "two delays" if METHODS[name].structure is None else "two gradients"
    assert reasons.get(name, delays) in fault


# ---- stages of a shared weight


def test_the_first_stage_that_uses_a_weight_holds_it_whatever_its_name() -> None:
    """Its name is that of the first module of the model that has it, here of the module that runs last. A module that runs
    on two stages uses its weights on both; a count of stages divides a shared weight where it may."""
    head, embedding = (nn.Linear(4, 4, bias=False) for _ in range(2))
    head.weight = embedding.weight
    middle = begin_stage(nn.Linear(4, 4))
    parts = {"head": begin_stage(head), "middle": middle, "embedding": embedding}
    model = Composed(lambda m, x: m.head(m.middle(m.embedding(x))), **parts)
    part = partition(model, torch.randn(2, 4), one_stage=None)
    assert [list(stage.parameters) for stage in part.stages] == [
        ["head.weight"],
        ["middle.weight", "middle.bias"],
        [],
    ]
    assert {name: [tuple(use) for use in uses] for name, uses in part.shared.items()} == {
        "head.weight": [(0, "embedding.weight", False), (2, "head.weight", False)]
    }
    assert [part.list_replicas(s) for s in range(3)] == [[], [], ["head.weight"]]
    repeating = partition(make_repeating_model(), torch.randn(2, 12), one_stage=None)
    assert repeating.list_replicas(2) == ["1.weight", "1.bias"]
    tied, x = join_stages(TIED["tied"]()), torch.randn(3, 12)
    assert partition(tied, x, 3, one_stage=None).list_replicas(2) == ["1.0.weight"]
    assert not partition(tied, x, 3).shared


def test_the_pieces_self_check_adds_gradients_as_autograd_does() -> None:
    """One piece uses the weight twice and the next piece once: the sum of two gradients does not occur in the whole model."""
    model = join_stages(make_seeded_stages("thrice", torch.float32))
    x = draw_microbatches(1, 16, torch.float32)[0][0]
    verify_pieces(model, cut_model(model, ["4"], x), x)


# ---- one weight of several stages of an asynchronous method: method_args {tied: holder}

HOLDING: Dict[str, Dict[str, Any]] = {
    "pipedream": {},
    "pipelined_backprop": {"stash": True},
    "pipemare": {"stash": True, "t1": {"anneal_updates": 20}},
}


def draw_tied_tokens(k: int) -> Tuple[torch.Tensor, torch.Tensor]:
    x = torch.randint(0, 11, (6, 4), generator=torch.Generator().manual_seed(k))
    return x, (x * 3 + 1) % 11


def make_tied_net() -> Any:
    """Return an embedding, three layers, and a head that is the embedding."""
    torch.manual_seed(0)

    def forward(m: Any, x: torch.Tensor) -> Any:
        x = m.embedding(x)
        for layer in m.layers:
            x = x + torch.tanh(layer(x))
        return m.head(x).transpose(1, 2)

    layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
    head = nn.Linear(6, 11, bias=False)
    net = Composed(forward, embedding=nn.Embedding(11, 6), layers=layers, head=head).double()
    net.head.weight = net.embedding.weight
    return net


def train_holding(method: str, drains_at: int = -1, **keys: Any) -> Tuple[Any, Any]:
    """Train four stages, with a drain after a step. Return the weights and the versions that forwards read."""
    net, args = make_tied_net(), {"tied": "holder", **HOLDING[method]}
    sgd = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    stages = ["layers.0", "layers.1", "head"]
    with ipu_pipe.Pipeline(
        net, cross_entropy, sgd, method, stages=stages, microbatches=1, method_args=args, **keys
    ) as pipe:
        for k in range(12):
            pipe.step(*draw_tied_tokens(k))
            if k == drains_at:
                pipe.drain()
        versions = pipe.versions.forward(0, 12)
        return pipe.state_dict().get("model", {}), versions


def train_holding_weights(method: str, **keys: Any) -> Dict[str, torch.Tensor]:
    return dict(train_holding(method, 7, **keys)[0])


@pytest.mark.parametrize("method", ["pipedream", "pipelined_backprop"])
def test_a_tied_weight_has_the_version_of_its_first_stage_in_all_uses(method: str) -> None:
    """By hand: each stage reads versions of its own, and the tied weight those of stage 0."""
    trained, versions = train_holding(method)
    net = make_tied_net()
    named = dict(net.named_parameters())
    history = [{name: p.detach().clone() for name, p in named.items()}]
    momenta = {name: torch.zeros_like(p) for name, p in named.items()}
    for m in range(12):
        for name, p in named.items():
            stage = 0 if "layers" not in name else min(int(name.split(".")[1]) + 1, 2)
            p.data = history[int(versions[stage, m])][name].clone()
            p.grad = None
        x, y = draw_tied_tokens(m)
        cross_entropy(net(x), y).backward()
        for name, p in named.items():
            momenta[name] = 0.9 * momenta[name] + p.grad
        history.append({name: w - 0.1 * momenta[name] for name, w in history[-1].items()})
    assert int(versions[0, 11]) < int(versions[3, 11])
    for name, value in history[-1].items():
        assert float((trained[name] - value).abs().max()) < 1e-12, name


class Scale(nn.Module):
    """Multiply by a weight, whose present value the backward reads, as a normalization does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


def train_with_replaced_weight(**keys: Any) -> Dict[str, torch.Tensor]:
    """Give a tied weight another tensor between two steps; a later backward of its copy's stage
    reads it again, after newer versions."""
    torch.manual_seed(0)
    layers = [Scale(), nn.Tanh(), Scale(), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 8)]
    model = nn.Sequential(*layers).double()
    model[2].weight = model[0].weight
    pipe = ipu_pipe.Pipeline(
        model, cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        "pipedream", stages=["2", "4", "5"], method_args={"tied": "holder"}, **keys,
    )  # fmt: skip
    with pipe:
        for k in range(9):
            x = torch.randn(3, 8, generator=torch.Generator().manual_seed(k), dtype=torch.float64)
            pipe.step(x, torch.arange(3))
            if k == 1:
                with pipe.whole_model(everywhere=True) as whole:
                    whole[0].weight.data = whole[0].weight.data * 0.5
    return model.state_dict()


# the weights that a training ends with
TRAININGS: Dict[str, Callable[..., Dict[str, torch.Tensor]]] = {
    "replaced": train_with_replaced_weight,
    **{method: functools.partial(train_holding_weights, method) for method in HOLDING},
}


def train_tied_on_ranks(rank: int, folder: Path, name: str) -> None:
    weights = TRAININGS[name](backend="distributed", deadline=60)
    if rank == 0:
        torch.save(weights, folder / "weights.pt")


@needs_processes
@pytest.mark.parametrize("name", mark_slow(TRAININGS, lambda name: name == "replaced"))
def test_processes_hold_tied_weights_as_the_emulator(name: str, tmp_path: Path) -> None:
    """Story: after a caller had replaced a weight, the backward of its copy read the one from before."""
    run_in_group(4, train_tied_on_ranks, tmp_path, name)
    assert_same(torch.load(tmp_path / "weights.pt"), TRAININGS[name]())


@pytest.mark.parametrize("method", ["pipemare", "spectrain", "local_greedy", "local_sgd"])
def test_methods_whose_passes_read_several_versions_have_no_holder(method: str) -> None:
    (fault,) = list_faults(resolve_method, method, {"tied": "holder"})
    assert fault.startswith(f"method_args.tied: holder: with {method} ")


# ---- runs

ADAM = {"name": "adam", "lr": 0.01, "weight_decay": 0.01}
third_party = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None,
    reason="needs transformers",
)


def make_tied_config(method: str, **keys: Any) -> Any:
    """Return a config of six updates of 4 microbatches of 2 samples."""
    base: Dict[str, Any] = {
        "micro_batch_size": 2, "gradient_accumulation": 4, "steps": 6, "optimizer": ADAM,
        "log": {"every": 1, "tensorboard": False}, "checkpoint": {"every": 3, "keep": 9},
    }  # fmt: skip
    return configure(method=method, **{**base, **keys})


def make_seeded_language_model(kind: str, **args: Any) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return make_language_model(**args) if kind == "lm" else Gpt2(**args)


@pytest.mark.parametrize("kind", ["lm", pytest.param("gpt2", marks=third_party)])
def test_a_run_is_plain_training_and_its_checkpoint_fits_the_plain_model(
    tmp_path: Path, kind: str
) -> None:
    ours, plain, loaded = (make_seeded_language_model(kind) for _ in range(3))
    data = make_random_tokens()
    settings = make_tied_config("pipedream_flush", clip={"norm": 0.3, "scope": "global"})
    summary = train(settings, tmp_path, model=ours, data=data, quiet=True)
    optimizer = torch.optim.Adam(plain.parameters(), lr=0.01, weight_decay=0.01)
    for m in range(24):
        epoch, index = divmod(m, data.train_batches_per_epoch(2))
        x, y = data.train_batch(epoch, index, 2)
        (cross_entropy(plain(x), y) / 4).backward()
        if m % 4 == 3:
            nn.utils.clip_grad_norm_(plain.parameters(), 0.3, foreach=False)
            optimizer.step()
            optimizer.zero_grad()
    loaded.load_state_dict(read_weights(tmp_path), strict=True)
    assert len(summary["stages"]) >= 3
    for a, b, c in zip(ours.parameters(), plain.parameters(), loaded.parameters()):
        assert torch.equal(a, b) and torch.equal(c, b)


def test_a_weight_is_counted_once_besides_its_replica(tmp_path: Path) -> None:
    stages = []
    for tied in (True, False):
        model = make_seeded_language_model("lm", tied=tied)
        data, out = make_random_tokens(), tmp_path / str(tied)
        train(make_tied_config("gpipe", steps=1), out, model=model, data=data, quiet=True)
        stages.append(read_json(out / "memory.json")["stages"])
    size = 23 * 8
    for number, (ours, theirs) in enumerate(zip(*stages), 1):
        fewer = size * (number == len(stages[0]))
        assert ours["parameters"] == theirs["parameters"] - fewer
        # the replica is there
        assert ours["weight_bytes"] == theirs["weight_bytes"]
        assert ours["gradient_bytes"] == theirs["gradient_bytes"]
        assert ours["optimizer_bytes"] == theirs["optimizer_bytes"] - 8 * fewer - 4 * bool(fewer)
    entries = [name for name in read_state(tmp_path / "True") if name.startswith("optimizer/")]
    of_embedding = {name.rpartition("/")[2] for name in entries if "embedding.tokens" in name}
    assert of_embedding == {"exp_avg", "exp_avg_sq", "step"}
    assert not any(name.startswith("optimizer/head") for name in entries)


@pytest.mark.slow
@needs_processes
def test_processes_with_replicas_send_and_hold_what_was_planned(tmp_path: Path) -> None:
    how: Dict[str, Any] = {
        "model": {"entry": "tests.tied_models:make_language_model"}, "data": {"name": "tests.tied_models:make_random_tokens"},
        "method": "pipedream_flush", "micro_batch_size": 2, "gradient_accumulation": 4, "steps": 4, "optimizer": ADAM,
        "clip": {"norm": 0.3, "scope": "global"}, "stages": ["block2"], "replicas": 2, "backend": {"threads": 1},
        "log": {"every": 1, "tensorboard": False},
    }  # fmt: skip
    file, ranks = tmp_path / "run.yaml", tmp_path / "ranks"
    file.write_text(json.dumps(how))  # which is YAML
    more = ["--out", str(ranks), "--set", "backend.name=distributed"]
    done = forked.run_ranks(4, "train", [str(file), *more])
    assert done.code == 0, done.error
    expected = train(load_config(str(file), []), tmp_path / "one", quiet=True)
    links = read_summary(ranks)["links"]
    assert links == sorted(expected["links"], key=lambda link: (link["src"], link["dst"]))
    size = 23 * 8 * 4  # of the embedding
    (back,) = [link for link in links if link["src"] == 1]
    assert back["bytes"] == 16 * (size + 2 * 6 * 8 * 4) and back["messages"] == 32
    held = [device["weights"] for device in read_json(ranks / "memory.json")["peak_memory"]]
    assert held == [stage["weight_bytes"] for stage in expected["stages"]] * 2  # the replica, too
    events = read_trace_file(ranks)["traceEvents"]
    sends = [e for e in events if e.get("ph") == "X" and e["name"].startswith("send")]
    carried = [e["args"].get("carries") for e in sends]
    assert carried.count("tied gradients") == 2 * 16 and carried.count("weights") == 2 * 4


def make_apart() -> nn.Module:
    apart = RenormedEmbeddingModel()
    apart[2].weight = nn.Parameter(apart[0].weight.data)
    return apart


@pytest.mark.parametrize("method, make, beginning", [
    ("pipemare", make_language_model, "stages: embedding.tokens.weight on stage 0 and head.weight on stage 3 are one"),
    ("gpipe", SharedBatchNormModel, "model: 1.running_mean"),
    ("gpipe", RenormedEmbeddingModel, "model: 0.weight: the forward changes this weight (max_norm of an embedding?)"),
    ("gpipe", make_apart, "model: 0.weight on stage 0 and 2.weight on stage 1 are two parameters in one memory"),
])  # fmt: skip
def test_weights_that_processes_cannot_share_are_refused(
    method: str, make: Any, beginning: str, monkeypatch: Any
) -> None:
    monkeypatch.setattr(layout, "run_on_main", lambda work: work())
    chosen = make_tied_config(method, gradient_accumulation=1 if METHODS[method].is_stale else 4)
    x = make_random_tokens().train_batch(0, 0, 2)[0]
    x = torch.randn(2, 12) if make is SharedBatchNormModel else x
    (fault,) = list_faults(layout._place_stages, chosen, METHODS[method], make(), x, 2, 0)
    assert fault.startswith(beginning)


def test_processes_refuse_copies_of_two_holders_and_a_corrected_tied_weight() -> None:
    net, x = make_tied_net(), draw_tied_tokens(0)[0]
    net.layers[2].weight = net.layers[0].weight
    # the embedding and layers.0 are of two stages, the head and layers.2 of one
    cut = cut_model(net, ["layers.0", "layers.2"], x)
    method = resolve_method("pipedream", {"tied": "holder"})
    effects = verify_pieces(net, cut, x)
    (fault,) = list_faults(layout.require_separable, net, method, cut, (0, 1, 2), effects)
    assert fault.startswith("model: stage 2 uses weights that stages 0 and 1 hold")
    # the emulator can
    args = {"weight_prediction": {"scale": 1}}
    chosen = make_tied_config(
        "pipedream_2bw", method_args=args, optimizer={"name": "sgd", "lr": 0.1, "momentum": 0.9}
    )
    job = build(chosen, model=make_language_model(), data=make_random_tokens())
    (fault,) = engine.list_faults(job)
    assert fault.startswith(
        "method_args.weight_prediction: corrects embedding.tokens.weight, which "
    )
