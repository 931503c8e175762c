"""The moving average of the weights equals torch's, also on processes and after a resume, and evaluations measure it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, Optional

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch.optim.swa_utils import AveragedModel

import ipu_pipe
from ipu_pipe.config.load import load_config
from ipu_pipe.errors import BadInput, RunFault
from ipu_pipe.run.train import check, evaluate_checkpoint, train
from tests.support.models import Composed
from tests.support.runs import (
    DIGITS,
    assert_same,
    assert_same_state,
    list_faults,
    read_column,
    read_summary,
    read_weights,
)
from tests.test_processes import train_digits_on_emulator, train_digits_on_ranks

SETS = [
    "ema={decay: 0.9}", "stages=2", "micro_batch_size=8", "data.subset=256", "data.test_subset=64", "log.tensorboard=false",
    "log.trace=false", "backend.threads=1", "checkpoint.every=4", "optimizer.momentum=0.9",
]  # fmt: skip
CONV = "{entry: 'tests.test_ema:make_convolutions'}"


def make_convolutions(**model_args: Any) -> torch.nn.Module:
    """Make a small model with BatchNorm. The arguments of the config's file are ignored."""
    torch.manual_seed(0)
    first = torch.nn.Sequential(
        torch.nn.Conv2d(1, 3, 3), torch.nn.BatchNorm2d(3), torch.nn.ReLU(), torch.nn.Flatten()
    )
    return Composed(lambda m, x: m.last(m.first(x)), first=first, last=torch.nn.Linear(3 * 36, 10))


class AverageFollower(ipu_pipe.Callback):
    """Compute torch's own average of the model during the run."""

    average: Optional[Any] = None

    def on_step(self, now: ipu_pipe.Moment) -> None:
        assert now.model is not None
        if self.average is None:
            self.average = AveragedModel(
                now.model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
            )
        self.average.update_parameters(now.model)


def read_averages(out: Path) -> Dict[str, torch.Tensor]:
    return load_file(out / "ema.safetensors")


def train_with_average(out: Path, *sets: str, **how: Any) -> Dict[str, Any]:
    return train(load_config(DIGITS, [*SETS, *sets]), out, quiet=True, **how)


@pytest.mark.skipif(
    not hasattr(torch.optim.swa_utils, "get_ema_multi_avg_fn"),
    reason="torch before 2.1 has no such average",
)
def test_evaluations_measure_the_average_which_is_torchs(tmp_path: Path) -> None:
    sets = [
        "method=gpipe", "gradient_accumulation=2", "steps=7", f"model={CONV}",
        "optimizer={name: adam, lr: 0.01, momentum: null}",
    ]  # fmt: skip
    follower = AverageFollower()
    report = train_with_average(tmp_path / "run", *sets, callbacks=[follower])
    averages = read_averages(tmp_path / "run")
    assert follower.average is not None
    assert_same(averages, follower.average.module.state_dict())
    newest = read_weights(tmp_path / "run")
    assert not torch.equal(averages["last.weight"], newest["last.weight"])
    assert torch.equal(averages["first.1.running_mean"], newest["first.1.running_mean"])
    config = load_config(DIGITS, [*SETS, *sets])
    measured = evaluate_checkpoint(config, tmp_path / "run" / "ema.safetensors")
    assert measured["test_loss"] == report["final"]["test_loss"]
    assert measured["test_loss"] != evaluate_checkpoint(config, tmp_path / "run")["test_loss"]


@pytest.mark.parametrize("method", ["gpipe", "pipemare"])
def test_a_loop_has_the_average_of_each_stages_own_updates(method: str) -> None:
    compute_loss = torch.nn.functional.cross_entropy

    def make_pipeline() -> ipu_pipe.Pipeline:
        torch.manual_seed(0)
        layers = [
            torch.nn.Linear(4, 6),
            torch.nn.BatchNorm1d(6),
            torch.nn.ReLU(),
            torch.nn.Linear(6, 3),
        ]
        model = torch.nn.Sequential(*layers)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return ipu_pipe.Pipeline(
            model, compute_loss, optimizer, method, stages=2, microbatches=2, ema=0.9
        )

    averages: Dict[Any, torch.Tensor] = {}

    def follow(update: int, stage: int, parameters: Any) -> None:
        for p in parameters:
            newest = p.detach().clone()
            averages[p] = averages[p].lerp(newest, 0.1) if p in averages else newest

    pipe = make_pipeline()
    pipe.on_update(follow)
    batches = [(torch.randn(8, 4), torch.randint(0, 3, (8,))) for _ in range(6)]
    for batch in batches[:5]:
        pipe.step(*batch)
    found = pipe.averages()
    names = dict(pipe.model.named_parameters())
    assert_same(found, {name: averages[p] for name, p in names.items()})
    newest = {name: p.detach().clone() for name, p in names.items()}
    measured = pipe.evaluate(batches[:1])
    assert_same(newest, names)
    averaged = make_pipeline().model
    averaged.load_state_dict({**pipe.model.state_dict(), **found})
    x, y = batches[0]
    assert measured["loss"] == pytest.approx(compute_loss(averaged.eval()(x), y).item(), rel=1e-6)
    # the state has the averages
    other = make_pipeline()
    other.load_state_dict(pipe.state_dict())
    for each in (pipe, other):
        each.step(*batches[5])
    assert_same(pipe.averages(), other.averages())
    # nobody moves the average of a frozen weight: its average is the weight
    pipe.model[0].weight.requires_grad_(False)
    pipe.step(*batches[5])
    assert names.keys() - pipe.averages().keys() == {"0.weight"}


@pytest.mark.parametrize(
    "method, decay, line",
    [
        ("pipedream", 2.0, "ema: 2.0: must be less than 1"),
        ("pipedream", True, "ema: True: must be a number"),
        ("randomized_pipedream", 0.9, "ema: randomized_pipedream: its stages, .*: must be None"),
        ("pipedream", None, "averages: the pipeline keeps none: make it with ema=0.999"),
    ],
)
def test_an_average_is_refused_in_the_words_of_a_loop(method: str, decay: Any, line: str) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings: Dict[str, Any] = {"stages": 2, "method": method, "ema": decay}
    with pytest.raises(BadInput, match=f"^{line}"):
        pipe = ipu_pipe.Pipeline(model, torch.nn.functional.mse_loss, optimizer, **settings)
        pipe.step(torch.zeros(2, 2), torch.zeros(2, 2))
        pipe.averages()


def test_the_average_does_not_change_training_and_a_resume_continues_it(tmp_path: Path) -> None:
    sets = ["method=pipedream", "gradient_accumulation=1"]
    train_with_average(tmp_path / "cut", *sets, "steps=4")
    train_with_average(tmp_path / "cut", *sets, "steps=8", resume=True)
    train_with_average(tmp_path / "whole", *sets, "steps=8")
    assert_same_state(tmp_path / "cut", tmp_path / "whole", 8)
    assert_same(read_averages(tmp_path / "cut"), read_averages(tmp_path / "whole"))
    train_with_average(tmp_path / "without", *sets, "steps=8", "ema=null")
    assert_same(read_weights(tmp_path / "without"), read_weights(tmp_path / "whole"))
    (fault,) = list_faults(
        train_with_average, tmp_path / "cut", *sets, "steps=12", "ema.decay=0.5", resume=True
    )
    assert "ema.decay" in fault


def test_processes_keep_the_emulators_average(tmp_path: Path) -> None:
    """pipemare in bfloat16_mixed trains float32 masters: the masters are averaged, and rounded for evaluations."""
    sets = [
        "method=pipemare",
        "gradient_accumulation=1",
        "stages=2",
        "ema={decay: 0.9}",
        "precision=bfloat16_mixed",
    ]
    code, _, error = train_digits_on_ranks(2, tmp_path / "ranks", *sets)
    assert code == 0, error
    report = train_digits_on_emulator(tmp_path / "one", *sets)
    assert_same(read_averages(tmp_path / "ranks"), read_averages(tmp_path / "one"))
    assert_same_state(tmp_path / "ranks", tmp_path / "one", 12)
    assert read_summary(tmp_path / "ranks")["final"] == report["final"]
    assert read_column(tmp_path / "ranks", "test_loss") == read_column(
        tmp_path / "one", "test_loss"
    )


def test_a_full_disk_at_the_end_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Story: the writer of safetensors raises no OSError, so that it was a traceback."""

    def raise_full_disk(*args: Any, **keys: Any) -> None:
        raise SafetensorError("I/O error: No space left on device")

    monkeypatch.setattr("safetensors.torch.serialize_file", raise_full_disk)
    with pytest.raises(RunFault, match="ema.safetensors: cannot be written"):
        train_with_average(tmp_path / "run", "steps=4", "checkpoint=null")


def make_tied_classifier() -> torch.nn.Module:
    """Make a model whose two layers share a weight."""
    first, last = (
        torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10, bias=False)),
        torch.nn.Linear(64, 10),
    )
    last.weight = first[1].weight
    return Composed(lambda m, x: m.first(x) + m.last(x.flatten(1)), first=first, last=last)


def test_the_averages_of_tied_weights_load_under_both_names(tmp_path: Path) -> None:
    report = train_with_average(
        tmp_path / "run", "method=gpipe", "stages=1", "steps=4", model=make_tied_classifier()
    )
    averages = read_averages(tmp_path / "run")
    assert torch.equal(averages["first.1.weight"], averages["last.weight"])
    data = ipu_pipe.load_data("digits", test_subset=64)
    outputs = ipu_pipe.predict(
        tmp_path / "run" / "ema.safetensors", data, into=make_tied_classifier()
    )
    labels = torch.cat([y for _, y in data.test_batches(64)])
    assert float((outputs.argmax(1) == labels).double().mean()) == report["final"]["test_accuracy"]


def test_a_resumed_run_removes_its_averages_which_are_never_the_best_weights(
    tmp_path: Path,
) -> None:
    class FailingCallback(ipu_pipe.Callback):
        def on_start(self, now: ipu_pipe.Moment) -> None:
            assert (now.step, now.checkpoint) == (4, tmp_path / "run" / "checkpoints" / "step-4")
            raise KeyError

    train_with_average(tmp_path / "run", "steps=4")
    (fault,) = list_faults(ipu_pipe.export, tmp_path / "run", tmp_path / "best.safetensors", "best")
    assert fault.startswith("--step: best: ")
    with pytest.raises(KeyError):
        train_with_average(tmp_path / "run", "steps=8", resume=True, callbacks=[FailingCallback()])
    assert not (tmp_path / "run" / "ema.safetensors").exists()


BAD = {
    "ema={decay: 1}": "ema.decay: 1: ", "ema={decay: 0}": "ema.decay: 0: ", "ema={decay: x}": "ema.decay: x: ",
    "ema={}": "ema.decay: ",
    "early_stopping={restore_best: true}": "early_stopping.restore_best: ", "method=local_sgd": "ema: local_sgd: ",
    "method=randomized_pipedream": "ema: randomized_pipedream: ",
}  # fmt: skip


@pytest.mark.parametrize("value", BAD)
def test_settings_without_an_average_are_refused(value: str, tmp_path: Path) -> None:
    sets = [*SETS, "steps=4", "gradient_accumulation=1", value]
    (fault,) = list_faults(lambda: check(load_config(DIGITS, sets), tmp_path / "run"))
    assert BAD[value] in fault
