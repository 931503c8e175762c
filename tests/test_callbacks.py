"""Callbacks of the user in a run: the values that they see, and runs that they stop or break."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Dict, List, Optional

import pytest
import torch

import ipu_pipe
from ipu_pipe.config.load import load_config
from ipu_pipe.errors import BadInput, RunFault, find_user_fault
from ipu_pipe.run.planning import build_for_planning
from ipu_pipe.run.train import train
from tests import forked
from tests.callbacks_of_runs import FailingCallback, StoppingCallback
from tests.support.runs import (
    DIGITS,
    assert_same_state,
    list_faults,
    read_json,
    read_numbers,
    read_summary,
    read_weights,
)
from tests.test_processes import train_digits_on_emulator, train_digits_on_ranks

SHORT = [
    "log.tensorboard=false",
    "evaluate.subset=64",
    "backend.threads=1",
    "data.subset=256",
    "data.test_subset=64",
]
NEW = "tests.callbacks_of_runs"

# method -> arguments, and the updates of a run that is stopped after update 3: it finishes the microbatches in flight
METHODS = {
    "gpipe": (["gradient_accumulation=4"], 3),
    "pipedream": (["gradient_accumulation=2"], 4),
    "pipedream_2bw": (["gradient_accumulation=4"], 4),
    "pipemare": (
        ["method_args={t1: {anneal_updates: 3}, t2: {decay: 0.5}}", "gradient_accumulation=1"],
        8,
    ),
    "spectrain": (["gradient_accumulation=1"], 7),
    "local_greedy": (["gradient_accumulation=1"], 7),
    "local_sgd": (["gradient_accumulation=1", "method_args={local_steps: 4}"], 4),
}


def train_short_digits(out: Path, *sets: str, **how: Any) -> Dict[str, Any]:
    return train(load_config(DIGITS, [*SHORT, *sets]), out, quiet=True, **how)


@pytest.mark.parametrize("method", METHODS)
def test_a_stopped_run_equals_a_run_planned_with_that_length(method: str, tmp_path: Path) -> None:
    args, last = METHODS[method]
    sets = [f"method={method}", "stages=3", "optimizer.momentum=0.9", *args]
    cut = train_short_digits(tmp_path / "cut", *sets, "steps=16", callbacks=[StoppingCallback(3)])
    assert (cut["steps"], cut["planned_steps"], cut["stopped"]) == (last, 16, "it is enough")
    planned = train_short_digits(tmp_path / "planned", *sets, f"steps={last}")
    assert planned["stopped"] is None and cut["final"] == planned["final"]
    assert_same_state(tmp_path / "cut", tmp_path / "planned", last)
    assert read_numbers(tmp_path / "cut") == read_numbers(tmp_path / "planned")


@pytest.mark.slow
def test_processes_end_where_the_emulator_does(tmp_path: Path) -> None:
    """Two stages of pipedream that are stopped at update 5 end after 6, with norms in flight that no update needs any more."""
    metrics = f"metrics=[accuracy, top3, '{NEW}:confidence', {{entry: '{NEW}:Spread', args: {{scale: 2}}}}]"
    sets = [
        "method=pipedream",
        "stages=2",
        "gradient_accumulation=1",
        "clip={norm: 0.5, scope: delayed_global}",
        metrics,
    ]
    ends = f"callbacks=[{{entry: '{NEW}:StoppingCallback', args: {{after: 5, file: {tmp_path}/ranks.json}}}}]"
    code, printed, error = train_digits_on_ranks(2, tmp_path / "ranks", *sets, ends)
    assert code == 0, error
    assert "ended after 6 of 12 updates: it is enough" in printed
    stopping = StoppingCallback(5, str(tmp_path / "one.json"))
    one = train_digits_on_emulator(tmp_path / "one", *sets, callbacks=[stopping])
    assert_same_state(tmp_path / "ranks", tmp_path / "one", 6)
    assert read_summary(tmp_path / "ranks")["final"] == one["final"]
    assert read_json(tmp_path / "ranks.json") == read_json(tmp_path / "one.json")


def test_callbacks_see_the_written_figures_and_the_model(tmp_path: Path) -> None:
    class ValueRecorder(ipu_pipe.Callback):
        def __init__(self) -> None:
            self.records: List[Any] = []

        def on_step(self, now: ipu_pipe.Moment) -> None:
            assert isinstance(now.model, torch.nn.Module)
            self.records.append(
                (now.step, now.loss, now.rate, float(next(now.model.parameters()).detach().sum()))
            )

        def on_evaluation(self, now: ipu_pipe.Moment) -> Optional[ipu_pipe.Stop]:
            self.records.append(("evaluated", now.step, dict(now.metrics)))
            return ipu_pipe.Stop() if now.step == 4 else None

        def on_end(self, now: ipu_pipe.Moment) -> None:
            assert (now.checkpoint / "model.safetensors").is_file()  # type: ignore[operator]
            self.records.append(("end", now.step, now.stopped))

    recorder, out = ValueRecorder(), tmp_path / "run"
    sets = [
        "method=gpipe",
        "steps=6",
        "log.every=1",
        "micro_batch_size=8",
        "gradient_accumulation=1",
        "checkpoint.every=2",
    ]
    report = train_short_digits(
        out, *sets, "evaluate.every=0.0625", callbacks=[recorder]
    )  # of 32 updates
    assert report["stopped"].endswith("ValueRecorder.on_evaluation asked for it")
    lines = read_numbers(out)
    assert [(s[0], s[1], s[2]) for s in recorder.records if isinstance(s[0], int)] == [
        (line["step"], line["train_loss"], line["lr"]) for line in lines if "train_loss" in line
    ]
    evaluations = [line for line in lines if "test_loss" in line and line["step"]]
    assert [s[1:] for s in recorder.records if s[0] == "evaluated"] == [
        (line["step"], {"test_loss": line["test_loss"], "test_accuracy": line["test_accuracy"]})
        for line in evaluations
    ]
    sums = [s[3] for s in recorder.records if isinstance(s[0], int)]
    assert len(set(sums)) == 4 and sums[-1] in [
        float(value.sum()) for value in read_weights(out, 4).values()
    ]
    assert recorder.records[-1] == ("end", 4, report["stopped"])


def test_an_exception_of_a_callback_is_reported_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(KeyError) as raised:
        train_short_digits(tmp_path / "run", "steps=4", f"callbacks=['{NEW}:FailingCallback']")
    line = str(find_user_fault(raised.value))
    assert line.startswith(
        "callback FailingCallback.on_step after update 2: KeyError: 'no such thing'"
    )
    assert "callbacks_of_runs.py" in line
    assert (tmp_path / "run" / "traceback.txt").read_text().startswith(line)


@pytest.mark.parametrize("args", ["{}", "{code: 0}", "{code: 3}"])
def test_a_callback_that_calls_exit_ends_the_run_as_a_fault(tmp_path: Path, args: str) -> None:
    """Story: the run ended with exit code 0 and without a summary."""
    out = tmp_path / "run"
    sets = [
        f"--set={key}"
        for key in (
            *SHORT,
            "steps=4",
            f"callbacks=[{{entry: '{NEW}:ExitingCallback', args: {args}}}]",
        )
    ]
    output = forked.run_command("train", DIGITS, f"--out={out}", *sets)
    assert output.code == 1 and output.error.splitlines()[-1].startswith(
        "error: callback ExitingCallback.on_step after update 2: "
    )
    assert not (out / "summary.json").exists()


def test_a_data_source_that_calls_exit_ends_the_run_as_a_fault(tmp_path: Path) -> None:
    class Data:
        def __init__(self) -> None:
            self.inner = ipu_pipe.load_data("digits")
            self.train_batches_per_epoch, self.test_batches = (
                self.inner.train_batches_per_epoch,
                self.inner.test_batches,
            )

        def train_batch(self, epoch: int, index: int, batch_size: int) -> Any:
            if index == 5:
                sys.exit()
            return self.inner.train_batch(epoch, index, batch_size)

    with pytest.raises(RunFault):
        train_short_digits(tmp_path / "run", "steps=8", data=Data())
    assert not (tmp_path / "run" / "summary.json").exists()


class WrongCallback(ipu_pipe.Callback):
    def on_step(self, now: ipu_pipe.Moment) -> Any:
        return True


def test_an_object_that_is_not_a_callback_is_refused_in_a_line(tmp_path: Path) -> None:
    for callback, words in (
        (FailingCallback, "callbacks: the class FailingCallback: must be an object"),
        (len, "callbacks: a builtin"),
    ):
        with pytest.raises(BadInput, match=words):
            train_short_digits(tmp_path / "run", "steps=2", callbacks=[callback])
    with pytest.raises(BadInput, match=r"callbacks: .*tests\.nothing:X.*no module"):
        train_short_digits(tmp_path / "run", "steps=2", "callbacks=['tests.nothing:X']")
    with pytest.raises(BadInput, match="callbacks: 3: must be a list"):
        load_config(DIGITS, ["callbacks=3"])
    assert not (tmp_path / "run").exists()
    with pytest.raises(
        RunFault, match="WrongCallback.on_step: returned a bool: must return None or ipu_pipe.Stop"
    ):
        train_short_digits(tmp_path / "run", "steps=2", callbacks=[WrongCallback()])


def test_a_resumed_run_restores_the_state_of_its_callbacks(tmp_path: Path, capsys: Any) -> None:
    class UpdateCounter(ipu_pipe.Callback):
        def __init__(self) -> None:
            self.count = 0

        def on_step(self, now: ipu_pipe.Moment) -> None:
            self.count += 1

        def state(self) -> int:
            return self.count

        def load(self, state: int) -> None:
            self.count = state

    sets = ["method=pipedream", "stages=2", "gradient_accumulation=1", "steps=8"]
    train_short_digits(
        tmp_path / "cut", *sets, callbacks=[UpdateCounter(), StoppingCallback(2)]
    )  # ends after 3
    train(
        load_config(DIGITS, [*SHORT, *sets]),
        tmp_path / "cut",
        callbacks=[UpdateCounter()],
        resume=True,
    )
    assert (
        "nothing to resume (it ended early: it is enough; --resume-from 3 continues it)"
        in capsys.readouterr().out
    )
    counter = UpdateCounter()
    train_short_digits(tmp_path / "cut", *sets, callbacks=[counter], resume_from=3)
    assert counter.count == 8
    assert train_short_digits(tmp_path / "cut", *sets, resume=True)["stopped"] is None


REFUSED = {
    "checkpoint.restore_best": ["checkpoint=null", "early_stopping={restore_best: true}"],
    "ema.restore_best": [
        "ema={decay: 0.5}",
        "callbacks=[{entry: 'ipu_pipe:EarlyStopping', args: {restore_best: true}}]",
    ],
    "early_stopping": ["early_stopping={patience: 1}", "evaluate.every=0"],
    "lr_schedule": ["lr_schedule={name: plateau}", "evaluate.every=0"],
    "early_stopping.metric": [
        "callbacks=[{entry: 'ipu_pipe:EarlyStopping', args: {metric: top5}}]"
    ],
    "on_gradients": [
        "method=local_sgd",
        "gradient_accumulation=1",
        f"callbacks=['{NEW}:ChecksumRecorder']",
    ],
}


@pytest.mark.parametrize("place", REFUSED)
def test_dry_runs_refuse_callbacks_that_a_run_refuses(place: str, tmp_path: Path) -> None:
    chosen = load_config(DIGITS, [*SHORT, "steps=4", *REFUSED[place]])
    faults = list_faults(build_for_planning, chosen)
    assert faults == list_faults(train, chosen, tmp_path / "run", quiet=True)
    assert all(part in faults[0] for part in place.split(".")[-1:])


def test_a_dry_run_reads_nothing_from_a_callback_without_its_constructor() -> None:
    chosen = load_config(DIGITS, [*SHORT, "steps=4", f"callbacks=['{NEW}:DelegatingCallback']"])
    assert build_for_planning(chosen).updates == 4
