"""Uneven microbatches: `loss_weight` weighs them in an update's gradient and loss, alike on the emulator and on processes.

gradient    (loss_m * (w_m R / W)).backward() for m = 0 ... N-1 on each of R replicas, then the mean over the replicas
loss        sum of loss_m w_m / W, from left to right in float64
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ipu_pipe
from ipu_pipe.errors import BadInput, RunFault
from ipu_pipe.local.blocks import average_gradients
from ipu_pipe.model.loss import CountTokens, make_token_count
from ipu_pipe.schedule.methods import Reads, resolve_method
from tests.staged_models import draw_microbatches, join_stages
from tests.support.processes import check_two_processes, run_in_group, train_on_processes
from tests.support.runs import (
    assert_same,
    assert_same_weights,
    list_faults,
    needs_processes,
    read_column,
    read_numbers,
    read_weights,
)
from tests.test_emulator_exact import (
    OPTIMIZERS,
    VARIANTS,
    assert_equals_stages,
    make_seeded_stages,
    train_literally,
    train_on_emulator,
)

N, IGNORED = 4, -100
Batch = Tuple[torch.Tensor, torch.Tensor]
SGD = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9)


def make_token_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(13, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 13))


def make_token_batches(counts: Sequence[int]) -> List[Batch]:
    """Return a batch (2, 10) for each count, with labels on the first `count` tokens of a row."""
    generator = torch.Generator().manual_seed(1)
    batches_of_tokens = []
    for count in counts:
        x = torch.randint(0, 13, (2, 10), generator=generator)
        y = torch.randint(0, 13, (2, 10), generator=generator)
        y[:, count:] = IGNORED
        batches_of_tokens.append((x, y))
    return batches_of_tokens


def compute_token_loss(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the mean over the tokens of a microbatch, NaN with NaN gradients if there are none."""
    labels = y.flatten()
    counts = labels != IGNORED
    losses = F.cross_entropy(output.flatten(0, 1), labels.clamp(min=0), reduction="none")
    return (losses * counts).sum() / counts.sum()


def count_first_row(y: torch.Tensor) -> int:
    """Return the number of labels in the first row, which is not that of all tokens."""
    return int((y[0] != IGNORED).sum())


# the second update has a microbatch without tokens, the third has none at all, the fourth's first replica has none
UNEVEN = [1, 9, 4, 10, 3, 0, 7, 2, 0, 0, 0, 0, 0, 5, 0, 8]


def configure_uneven(method: str = "gpipe", **keys: Any) -> Any:
    settings: Dict[str, Any] = {
        "gradient_accumulation": N, "steps": 4, "stages": ["3"], "evaluate": {"every": 0}, "checkpoint": {"every": 2},
        "log": {"tensorboard": False, "every": 1}, "metrics": [],
    }  # fmt: skip
    return ipu_pipe.configure(method=method, **{**settings, **keys})


def describe_run(
    method: str = "gpipe", counts: Sequence[int] = UNEVEN, **keys: Any
) -> Dict[str, Any]:
    """Return the arguments of `ipu_pipe.train` for uneven microbatches."""
    objects = {name: keys.pop(name) for name in ("loss", "model") if name in keys}
    weight = keys.pop("weight", "tokens")
    config = configure_uneven(
        method, **({"loss_weight": weight} if isinstance(weight, str) else {}), **keys
    )
    data = ipu_pipe.from_loader(make_token_batches(counts), make_token_batches(counts[:1]))
    arguments = {
        "model": make_token_model(),
        "loss": compute_token_loss,
        "data": data,
        "optimizer": SGD,
        "config": config,
        **objects,
    }
    return arguments if isinstance(weight, str) else {**arguments, "loss_weight": weight}


def train_weighted_plainly(
    data: Sequence[Batch], weigh: Callable[[torch.Tensor], float], replicas: int = 1
) -> Tuple[nn.Module, List[Optional[float]]]:
    """Train by plain PyTorch as `loss_weight` is defined. Return the model and the losses."""
    model = make_token_model()
    parameters = list(model.parameters())
    optimizer = SGD(parameters)
    size = N * replicas
    losses: List[Optional[float]] = []
    for start in range(0, len(data), size):
        batch = data[start : start + size]
        weights = [weigh(y) for _, y in batch]
        total = sum(weights)
        weighted_loss = 0.0
        by_replica: List[List[Any]] = []
        for replica in range(replicas):
            for p in parameters:
                p.grad = torch.zeros_like(p)
            for (x, y), weight in list(zip(batch, weights))[replica::replicas]:
                if weight:
                    (compute_token_loss(model(x), y) * (weight * replicas / total)).backward()
            by_replica.append([p.grad for p in parameters])
        for (x, y), weight in zip(batch, weights):
            weighted_loss += compute_token_loss(model(x), y).item() * weight if weight else 0.0
        for index, p in enumerate(parameters):
            p.grad = average_gradients([gradients[index] for gradients in by_replica])
        optimizer.step()
        losses.append(weighted_loss / total if total else None)
    return model, losses


def count_labels(y: torch.Tensor) -> int:
    return int((y != IGNORED).sum())


# ---- the definition


@pytest.mark.parametrize("method", ["naive", "gpipe", "pipedream_flush", "zb_h1"])
def test_an_update_is_the_plain_weighted_loop(method: str, tmp_path: Path) -> None:
    """Story: an update was the mean of its microbatches' means.

    A token of a short microbatch counted ten times.
    """
    arguments = describe_run(method)
    ipu_pipe.train(out=tmp_path, quiet=True, **arguments)
    model, losses = train_weighted_plainly(make_token_batches(UNEVEN), count_labels)
    assert_same(arguments["model"].state_dict(), model.state_dict())
    assert read_column(tmp_path, "train_loss") == losses and losses[2] is None


def test_the_gradient_is_that_of_all_tokens_at_once(tmp_path: Path) -> None:
    arguments = describe_run(counts=UNEVEN[:8], steps=2)
    ipu_pipe.train(out=tmp_path, quiet=True, **arguments)
    model = make_token_model()
    optimizer, data = SGD(model.parameters()), make_token_batches(UNEVEN[:8])
    for start in (0, N):
        x, y = (torch.cat(parts) for parts in zip(*data[start : start + N]))
        optimizer.zero_grad()
        compute_token_loss(model(x), y).backward()
        optimizer.step()
    for p, q in zip(arguments["model"].parameters(), model.parameters()):
        assert torch.allclose(p, q, rtol=0, atol=1e-6)


@pytest.mark.parametrize("replicas", [2, 3])
def test_replicas_add_up_their_weights(replicas: int, tmp_path: Path) -> None:
    counts = (UNEVEN * replicas)[: len(UNEVEN) * replicas]
    # with two replicas the second update's first replica has no token
    counts[8:16] = [0, 5, 0, 9, 0, 1, 0, 4]
    arguments = describe_run(counts=counts, replicas=replicas)
    ipu_pipe.train(out=tmp_path, quiet=True, **arguments)
    model, losses = train_weighted_plainly(make_token_batches(counts), count_labels, replicas)
    assert_same(arguments["model"].state_dict(), model.state_dict())
    assert read_column(tmp_path, "train_loss") == losses


@pytest.mark.parametrize(
    "weight", [f"{__name__}:count_first_row", count_first_row], ids=["import", "function"]
)
def test_a_function_of_the_labels_weighs_them(weight: Any, tmp_path: Path) -> None:
    arguments = describe_run(weight=weight)
    ipu_pipe.train(out=tmp_path, quiet=True, **arguments)
    model, _ = train_weighted_plainly(make_token_batches(UNEVEN), count_first_row)
    assert_same(arguments["model"].state_dict(), model.state_dict())


@pytest.mark.parametrize(
    "method, args",
    VARIANTS,
    ids=lambda v: v if isinstance(v, str) else "-".join(map(str, v.values())),
)
def test_every_method_weighs_as_the_literal_replay(method: str, args: Any) -> None:
    stages = make_seeded_stages("mlp")
    if len(stages) % args.get("stages_per_device", 1):
        args = {**args, "stages_per_device": len(stages)}
    chosen = resolve_method(method, args)
    count = 5 + (len(stages) if chosen.forward_reads is Reads.DOUBLE_BUFFERED else 0)
    data = draw_microbatches(count * 6)
    # the labels of the first microbatch cannot be read, so its loss must not be
    data[0] = data[0][0], torch.full_like(data[0][1], 99)
    weights = [float(m * 7 % 5) for m in range(len(data))]
    totals = [sum(weights[start : start + count]) for start in range(0, len(data), count)]
    shares = [weight / totals[m // count] for m, weight in enumerate(weights)]
    twin, unsplit = make_seeded_stages("mlp"), join_stages(stages)
    train_on_emulator(unsplit, chosen, count, data, OPTIMIZERS["sgd"], weights=weights)
    train_literally(twin, chosen, count, data, OPTIMIZERS["sgd"], shares=shares)
    assert_equals_stages(unsplit, twin)


def test_equal_weights_change_no_bit() -> None:
    data, one, other = (
        draw_microbatches(24),
        join_stages(make_seeded_stages("mlp")),
        join_stages(make_seeded_stages("mlp")),
    )
    chosen = resolve_method("pipedream")
    train_on_emulator(one, chosen, 3, data, OPTIMIZERS["sgd"])
    train_on_emulator(other, chosen, 3, data, OPTIMIZERS["sgd"], weights=[7.0] * 24)
    assert_same(one.state_dict(), other.state_dict())


@pytest.mark.parametrize("method", ["local_sgd", "randomized_pipedream"])
def test_an_update_of_one_microbatch_has_its_whole_loss(method: str, tmp_path: Path) -> None:
    """Weights change nothing except where they are 0: then the loss is not read."""
    full = [count or 1 for count in UNEVEN]
    how: Dict[str, Any] = {"gradient_accumulation": 1, "steps": 6, "checkpoint": None}
    weighted, plain = (
        describe_run(method, full, **how),
        describe_run(method, full, weight=lambda y: 1, **how),
    )
    ipu_pipe.train(out=tmp_path / "weighted", quiet=True, **weighted)
    ipu_pipe.train(out=tmp_path / "plain", quiet=True, **plain)
    assert_same(weighted["model"].state_dict(), plain["model"].state_dict())
    empty = describe_run(method, [0] * len(UNEVEN), **how)
    ipu_pipe.train(out=tmp_path / "empty", quiet=True, **empty)
    assert_same(empty["model"].state_dict(), make_token_model().state_dict())
    assert set(read_column(tmp_path / "empty", "train_loss")) == {None}


# ---- no weight


def test_an_update_without_weight_changes_nothing_and_has_no_loss(tmp_path: Path) -> None:
    arguments = describe_run(counts=[0] * N + UNEVEN[:4], steps=2, checkpoint={"every": 1})
    report = ipu_pipe.train(out=tmp_path, quiet=True, **arguments)
    assert_same(read_weights(tmp_path, 1), make_token_model().state_dict())
    first, second = read_column(tmp_path, "train_loss")
    assert first is None and report["final"]["train_loss"] == second > 0


class OwnLoss(nn.Module):
    """A model that computes its own loss."""

    def __init__(self) -> None:
        super().__init__()
        self.body = make_token_model()

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> Dict[str, torch.Tensor]:
        logits = self.body(inputs)
        return {"loss": compute_token_loss(logits, labels), "logits": logits}


def test_a_models_own_loss_is_weighed_too(tmp_path: Path) -> None:
    own = OwnLoss()
    data = [{"inputs": x, "labels": y} for x, y in make_token_batches(UNEVEN)]
    config = configure_uneven(loss="model", loss_weight="tokens", stages=["body.3"])
    ipu_pipe.train(
        config,
        tmp_path,
        model=own,
        data=ipu_pipe.from_loader(data, data[:1]),
        optimizer=SGD,
        quiet=True,
    )
    model, losses = train_weighted_plainly(make_token_batches(UNEVEN), count_labels)
    assert_same(own.body.state_dict(), model.state_dict())
    assert read_column(tmp_path, "train_loss") == losses


def test_a_resumed_run_reads_the_same_weights(tmp_path: Path) -> None:
    ipu_pipe.train(out=tmp_path / "whole", quiet=True, **describe_run("pipedream"))
    ipu_pipe.train(out=tmp_path / "parts", quiet=True, **describe_run("pipedream", steps=2))
    ipu_pipe.train(out=tmp_path / "parts", quiet=True, resume=True, **describe_run("pipedream"))
    assert_same_weights(tmp_path / "whole", tmp_path / "parts")
    assert read_numbers(tmp_path / "whole")[-2:] == read_numbers(tmp_path / "parts")[-2:]
    unweighted = {**describe_run(), "config": configure_uneven("pipedream", steps=6)}
    faults = list_faults(
        ipu_pipe.train, out=tmp_path / "parts", quiet=True, resume=True, **unweighted
    )
    assert any("loss_weight: tokens -> null" in fault for fault in faults)


def test_a_weight_function_is_recorded_and_required_when_resuming(tmp_path: Path) -> None:
    ipu_pipe.train(out=tmp_path, quiet=True, **describe_run(weight=count_first_row, steps=2))
    saved_config = ipu_pipe.load_config(str(tmp_path / "config.yaml"))
    assert saved_config.given.loss_weight.name.endswith("count_first_row")  # type: ignore[union-attr]
    arguments = describe_run(weight=count_first_row)
    del arguments["loss_weight"]
    faults = list_faults(ipu_pipe.train, out=tmp_path, quiet=True, resume=True, **arguments)
    assert any(fault.startswith("given.loss_weight: ") for fault in faults)


# ---- processes

METHODS: Dict[str, Dict[str, Any]] = {
    "gpipe": {}, "pipedream": {}, "pipedream_2bw": {}, "zb_h1": {}, "pipedream_flush": {},
    "pipemare": {"method_args": {"recompute": {"segments": 1}}},
    "interleaved_1f1b": {"stages": ["1", "2", "3"], "stages_per_device": 2},
    "local_sgd": {"gradient_accumulation": 1},
}  # fmt: skip


@pytest.mark.slow
@needs_processes
def test_two_processes_weigh_as_the_emulator(tmp_path: Path) -> None:
    runs = {name: functools.partial(describe_run, name, **keys) for name, keys in METHODS.items()}
    runs["replicas"] = functools.partial(
        describe_run, counts=[*UNEVEN, *UNEVEN[::-1]], replicas=2, stages=1
    )
    check_two_processes(tmp_path, runs)
    for name in runs:
        assert read_numbers(tmp_path / "one" / name) == read_numbers(tmp_path / "two" / name), name
    model, losses = train_weighted_plainly(make_token_batches(UNEVEN), count_labels)
    assert_same(read_weights(tmp_path / "two" / "gpipe"), model.state_dict())
    assert read_column(tmp_path / "two" / "gpipe", "train_loss") == losses


def describe_blocks() -> Dict[str, Any]:
    """Return the arguments of a run of blocks, in which some microbatches have no weight."""
    generator = torch.Generator().manual_seed(3)
    data = []
    for count in UNEVEN:
        y = torch.randint(0, 4, (10,), generator=generator)
        y[count:] = IGNORED
        data.append((torch.randn(10, 6, generator=generator), y))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    config = configure_uneven("local_greedy", stages=["2"], loss_weight="tokens")
    return {
        "config": config,
        "model": model,
        "data": ipu_pipe.from_loader(data, data[:1]),
        "optimizer": SGD,
    }


@needs_processes
def test_each_block_on_a_process_weighs_its_own_loss(tmp_path: Path) -> None:
    check_two_processes(tmp_path, {"blocks": describe_blocks})
    numbers = read_numbers(tmp_path / "two" / "blocks")
    assert numbers == read_numbers(tmp_path / "one" / "blocks")
    assert [line["block_train_loss"] for line in numbers if "block_train_loss" in line][2] == [
        None,
        None,
    ]


@needs_processes
def test_replicas_of_a_pipeline_add_up_their_weights(tmp_path: Path) -> None:
    """The last stages of both replicas add up their weights, also where one replica has none."""
    counts = [*UNEVEN, 0, 5, 0, 9, 0, 1, 0, 4, *UNEVEN[:8]]
    runs = {"four": functools.partial(describe_run, "pipedream", counts, replicas=2)}
    ipu_pipe.train(out=tmp_path / "one" / "four", quiet=True, **runs["four"]())
    run_in_group(4, train_on_processes, tmp_path, runs)
    assert_same_weights(tmp_path / "one" / "four", tmp_path / "two" / "four")
    assert read_numbers(tmp_path / "one" / "four") == read_numbers(tmp_path / "two" / "four")


# ---- faults


@pytest.mark.parametrize(
    "value", [-1, float("nan"), float("inf"), "many", None, True, torch.ones(2)]
)
def test_an_invalid_weight_ends_the_run_in_one_line(value: Any, tmp_path: Path) -> None:
    """The invalid weight belongs to the second update: the first one is valid."""
    later = {5: value}
    calls: List[int] = []

    def weigh(y: torch.Tensor) -> Any:
        calls.append(0)
        # the first call looks at microbatch 0 before training
        return later.get(len(calls) - 2, 1)

    with pytest.raises(RunFault) as fault:
        ipu_pipe.train(out=tmp_path, quiet=True, **describe_run(weight=weigh))
    assert str(fault.value).startswith("loss_weight: update 1, microbatch 5: ")


@pytest.mark.parametrize("weight", ["token", "tests.test_loss_weight:nothing"])
def test_an_unknown_weight_is_refused(weight: str, tmp_path: Path) -> None:
    faults = list_faults(
        ipu_pipe.train, out=tmp_path / "run", quiet=True, **describe_run(weight=weight)
    )
    assert len(faults) == 1 and faults[0].startswith(f"loss_weight: {weight}: ")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("precision", ["bfloat16", "bfloat16_mixed"])
def test_a_refused_weight_leaves_the_model_as_it_was(precision: str, tmp_path: Path) -> None:
    """Story: the model stayed in bfloat16, or its forward under autocast."""
    job = describe_run(weight="tests.test_loss_weight:nothing", precision=precision)
    (fault,) = list_faults(ipu_pipe.train, out=tmp_path / "run", quiet=True, **job)
    assert fault.startswith("loss_weight: ")
    assert {p.dtype for p in job["model"].parameters()} == {torch.float32}
    assert "forward" not in vars(job["model"])


def test_tokens_are_the_labels_that_the_loss_does_not_ignore() -> None:
    y = torch.tensor([[1, 0, -100], [2, 3, 0]])
    ignored = {
        F.cross_entropy: 5, nn.CrossEntropyLoss(ignore_index=0): 4, functools.partial(F.cross_entropy, ignore_index=3): 5,
        compute_token_loss: 5,
    }  # fmt: skip
    for loss, count in ignored.items():
        assert make_token_count(loss)(y) == count
    with pytest.raises(BadInput, match="reduction"):
        make_token_count(nn.CrossEntropyLoss(reduction="sum"))
    for labels in (y.double(), None, (y, y)):
        with pytest.raises(BadInput, match="loss_weight: tokens"):
            CountTokens(-100)(labels)


def test_a_rule_that_uses_the_gradient_of_one_microbatch_is_refused(tmp_path: Path) -> None:
    how: Dict[str, Any] = {"method_args": {"delay_compensation": {"scale": 0.5}}}
    faults = list_faults(
        ipu_pipe.train, out=tmp_path, quiet=True, **describe_run("pipedream", **how)
    )
    assert len(faults) == 1 and faults[0].startswith(
        "method_args.delay_compensation: cannot be combined with loss_weight"
    )
    ipu_pipe.train(
        out=tmp_path, quiet=True, **describe_run("pipedream", gradient_accumulation=1, **how)
    )


def test_metrics_are_json_where_an_update_has_no_loss(tmp_path: Path) -> None:
    losses: List[Optional[float]] = []

    class Watch(ipu_pipe.Callback):
        def on_step(self, now: Any) -> None:
            losses.append(now.loss)

    ipu_pipe.train(out=tmp_path, quiet=True, callbacks=[Watch()], **describe_run())
    assert losses[2] is None and None not in losses[:2]
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert all("NaN" not in line and json.loads(line) for line in lines)
