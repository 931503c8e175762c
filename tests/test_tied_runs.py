"""Whole runs of language models whose head is the embedding: plain PyTorch's numbers, and one copy of the weight in reports
and checkpoints."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any, Dict, List

import pytest
import torch
from torch import nn

from ipu_pipe.config.load import configure, load_config
from ipu_pipe.run.build import build
from ipu_pipe.run.train import train
from ipu_pipe.schedule.methods import METHODS
from ipu_pipe.store.checkpoint import delete_steps
from tests import forked
from tests.support.runs import (
    assert_same_state,
    list_faults,
    needs_processes,
    read_state,
    read_summary,
    read_trace_file,
    read_weights,
)
from tests.tied_models import (
    Gpt2,
    RenormedEmbeddingModel,
    SharedBatchNormModel,
    make_language_model,
    make_random_tokens,
)

ADAM = {"name": "adam", "lr": 0.01, "weight_decay": 0.01}
SGD = {"name": "sgd", "lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}
third_party = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="needs transformers"
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


def train_tied_plainly(
    model: nn.Module, updates: int, optimizer: Dict[str, Any], norm: float
) -> None:
    """Train `model` as the config of `make_tied_config` does, in plain PyTorch."""
    kinds = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD}
    settings = {key: value for key, value in optimizer.items() if key != "name"}
    steps: Any = kinds[optimizer["name"]](model.parameters(), **settings)
    data = make_random_tokens()
    for k in range(updates):
        for m in range(4 * k, 4 * k + 4):
            epoch, index = divmod(m, data.train_batches_per_epoch(2))
            x, y = data.train_batch(epoch, index, 2)
            (nn.functional.cross_entropy(model(x), y) / 4).backward()
        nn.utils.clip_grad_norm_(model.parameters(), norm, foreach=False)
        steps.step()
        steps.zero_grad()


@pytest.mark.parametrize("method, kind, optimizer", [
    ("naive", "lm", ADAM), ("pipedream_flush", "lm", SGD), pytest.param("gpipe", "gpt2", ADAM, marks=third_party),
])  # fmt: skip
def test_a_run_is_plain_training_and_its_checkpoint_fits_the_plain_model(
    tmp_path: Path, method: str, kind: str, optimizer: Dict[str, Any]
) -> None:
    ours, plain = make_seeded_language_model(kind), make_seeded_language_model(kind)
    norm = 0.3
    settings = make_tied_config(method, optimizer=optimizer, clip={"norm": norm, "scope": "global"})
    summary = train(settings, tmp_path, model=ours, data=make_random_tokens(), quiet=True)
    train_tied_plainly(plain, 6, optimizer, norm)
    assert len(summary["stages"]) >= 3
    for (name, a), b in zip(ours.named_parameters(), plain.parameters()):
        assert torch.equal(a, b), name
    weights = read_weights(tmp_path)
    assert weights.keys() == plain.state_dict().keys()
    loaded = make_seeded_language_model(kind)
    loaded.load_state_dict(weights, strict=True)
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), plain.parameters()))


def test_a_weight_is_counted_once_besides_its_replica(tmp_path: Path) -> None:
    tied, untied = (make_seeded_language_model("lm", tied=tied) for tied in (True, False))
    lines: List[Any] = []
    for place, result in (("tied", tied), ("own", untied)):
        train(
            make_tied_config("gpipe"),
            tmp_path / place,
            model=result,
            data=make_random_tokens(),
            quiet=True,
        )
        lines.append(json.loads((tmp_path / place / "memory.json").read_text())["stages"])
    size = tied.embedding.tokens.weight.numel()  # type: ignore[union-attr, operator]
    for before, (ours, theirs) in enumerate(zip(*lines)):
        is_last = before == len(lines[0]) - 1
        assert ours["parameters"] == theirs["parameters"] - is_last * size
        assert [
            ours[key] for key in ("weight_bytes", "gradient_bytes")
        ] == [  # the replica is there
            theirs[key] for key in ("weight_bytes", "gradient_bytes")
        ]
        assert ours["optimizer_bytes"] == theirs["optimizer_bytes"] - is_last * (2 * 4 * size + 4)
    names = {
        name.partition("/")[2]
        for name in read_state(tmp_path / "tied")
        if name.startswith("optimizer/")
    }
    assert {n for n in names if n.startswith(("embedding.tokens", "head"))} == {
        f"embedding.tokens.weight/{entry}" for entry in ("exp_avg", "exp_avg_sq", "step")
    }


@pytest.mark.parametrize(
    "method, why",
    [
        ("pipedream", "two delays"),
        ("local_greedy", "two gradients"),
        ("randomized_pipedream", "single stages"),
    ],
)
def test_a_method_that_cannot_tie_is_refused_before_anything_is_written(
    tmp_path: Path, method: str, why: str
) -> None:
    arguments = {
        "model": make_seeded_language_model("lm"),
        "data": make_random_tokens(),
        "quiet": True,
    }
    (fault,) = list_faults(
        train, make_tied_config(method, gradient_accumulation=1), tmp_path / "run", **arguments
    )
    assert not (tmp_path / "run").exists()
    assert (
        "embedding.tokens.weight on stage 0 and head.weight on stage 3 are one shared weight"
        in fault
    )
    assert why in fault and "gpipe" in fault and method in fault


# ---- on processes


def write_tied_config(out: Path, method: str, **keys: Any) -> Path:
    """Write the config file of a run into `out`, and return its path."""
    base: Dict[str, Any] = {
        "model": {"entry": "tests.tied_models:make_language_model"}, "data": {"name": "tests.tied_models:make_random_tokens"},
        "method": method,
        "micro_batch_size": 2, "gradient_accumulation": 4, "steps": 6, "optimizer": SGD, "backend": {"threads": 1},
        "log": {"every": 1, "tensorboard": False}, "checkpoint": {"every": 3, "keep": 9},
    }  # fmt: skip
    file = out.parent / f"{out.name}.yaml"
    file.write_text(json.dumps({**base, **keys}))  # which is YAML
    return file


def train_tied_on_ranks(ranks: int, out: Path, method: str, *more: str, **keys: Any) -> List[str]:
    """Train on processes and return the faults. `more`: arguments of the command."""
    arguments = [
        str(write_tied_config(out, method, **keys)),
        "--out",
        str(out),
        "--set",
        "backend.name=distributed",
        *more,
    ]
    done = forked.run_ranks(ranks, "train", arguments)
    faults = [line for line in done.error.splitlines() if line.startswith("error: ")]
    assert done.code == 0 or faults, done.error
    return faults


def train_tied_on_emulator(out: Path, method: str, **keys: Any) -> Dict[str, Any]:
    num_threads = torch.get_num_threads()
    try:
        return train(load_config(str(write_tied_config(out, method, **keys)), []), out, quiet=True)
    finally:
        torch.set_num_threads(num_threads)


@pytest.mark.slow
@needs_processes
def test_processes_with_replicas_send_and_hold_what_was_planned(tmp_path: Path) -> None:
    how: Dict[str, Any] = {
        "optimizer": ADAM, "clip": {"norm": 0.3, "scope": "global"}, "stages": ["block2"], "replicas": 2, "steps": 4,
    }  # fmt: skip
    assert train_tied_on_ranks(4, tmp_path / "ranks", "pipedream_flush", **how) == []
    expected = train_tied_on_emulator(tmp_path / "one", "pipedream_flush", **how)
    result = read_summary(tmp_path / "ranks")
    assert result["links"] == sorted(expected["links"], key=lambda link: (link["src"], link["dst"]))
    size = 23 * 8 * 4  # of the embedding
    (back,) = [link for link in result["links"] if link["src"] == 1]
    assert back["bytes"] == 16 * (size + 2 * 6 * 8 * 4) and back["messages"] == 32
    weight_bytes = [
        device["weights"]
        for device in json.loads((tmp_path / "ranks" / "memory.json").read_text())["peak_memory"]
    ]
    planned = [stage["weight_bytes"] for stage in expected["stages"]]
    assert weight_bytes == planned * 2  # the replica, too
    trace = read_trace_file(tmp_path / "ranks")
    sends = [e for e in trace["traceEvents"] if e.get("ph") == "X" and e["name"].startswith("send")]
    carried = [e["args"].get("carries") for e in sends]
    assert carried.count("tied gradients") == 2 * 16 and carried.count("weights") == 2 * 4


@pytest.mark.slow
@needs_processes
@third_party
def test_a_checkpoint_of_processes_resumes_on_the_emulator(tmp_path: Path) -> None:
    out = tmp_path / "ranks"
    gpt2 = {"entry": "tests.tied_models:Gpt2", "args": {"dropout": 0.1, "layers": 4}}
    assert train_tied_on_ranks(4, out, "pipedream_2bw", model=gpt2) == []
    train_tied_on_emulator(tmp_path / "whole", "pipedream_2bw", model=gpt2)
    assert_same_state(out, tmp_path / "whole", 3)
    assert_same_state(out, tmp_path / "whole")
    delete_steps(out / "checkpoints", [6])
    (out / "summary.json").unlink()
    train(
        load_config(str(write_tied_config(out, "pipedream_2bw", model=gpt2)), []),
        out,
        quiet=True,
        resume=True,
    )
    assert_same_state(out, tmp_path / "whole")
    make_seeded_language_model("gpt2", layers=4).load_state_dict(read_weights(out), strict=True)


def test_weights_that_processes_cannot_share_are_refused(tmp_path: Path, monkeypatch: Any) -> None:
    from ipu_pipe.backends.processes import engine, layout

    monkeypatch.setattr(layout, "run_on_main", lambda work: work())

    def place_and_list_fault(method: str, model: nn.Module, x: torch.Tensor) -> str:
        chosen = make_tied_config(
            method, gradient_accumulation=1 if METHODS[method].is_stale else 4
        )
        (fault,) = list_faults(layout._place_stages, chosen, METHODS[method], model, x, 2, 0)
        return str(fault)

    fault = place_and_list_fault(
        "pipemare", make_seeded_language_model("lm"), make_random_tokens().train_batch(0, 0, 2)[0]
    )
    assert (
        "embedding.tokens.weight on stage 0 and head.weight on stage 3 are one shared weight"
        in fault
    )
    assert "with pipemare stages may read different versions" in fault
    fault = place_and_list_fault("gpipe", SharedBatchNormModel(), torch.randn(2, 12))
    assert fault.startswith("model: 1.running_mean") and "stages 0 and 1" in fault
    fault = place_and_list_fault(
        "gpipe", RenormedEmbeddingModel(), make_random_tokens().train_batch(0, 0, 2)[0]
    )
    assert fault.startswith(
        "model: 0.weight: the forward changes this weight (max_norm of an embedding?)"
    )
    apart = RenormedEmbeddingModel()
    apart[2].weight = nn.Parameter(apart[0].weight.data)
    fault = place_and_list_fault("gpipe", apart, make_random_tokens().train_batch(0, 0, 2)[0])
    assert fault.startswith(
        "model: 0.weight on stage 0 and 2.weight on stage 1 are two parameters in one memory"
    )
    how = make_tied_config(
        "pipedream_2bw", optimizer=SGD, method_args={"weight_prediction": {"scale": 1}}
    )
    job = build(
        how, model=make_seeded_language_model("lm"), data=make_random_tokens()
    )  # the emulator can
    (fault,) = engine.list_faults(job)
    assert fault.startswith(
        "method_args.weight_prediction: corrects embedding.tokens.weight, which several stages use"
    )
