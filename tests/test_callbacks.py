"""Callbacks of the user in a run: the values that they see, and runs that they stop or break."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Dict, List, Optional

import pytest
import torch

import ipu_pipe
from ipu_pipe.config.load import load_config
from ipu_pipe.errors import BadInput, find_user_fault
from ipu_pipe.run.callbacks import HOOKS
from ipu_pipe.run.planning import build_for_planning
from ipu_pipe.run.train import train
from tests.callbacks_of_runs import FailingCallback, StoppingCallback
from tests.support.runs import (
    DIGITS,
    assert_same_state,
    list_faults,
    read_column,
    read_json,
    read_numbers,
    read_summary,
    read_weights,
)
from tests.test_processes import train_digits_on_emulator, train_digits_on_ranks
from tools.documented import list_blocks

SHORT = [
    "log.tensorboard=false", "evaluate.subset=64", "backend.threads=1", "data.subset=256", "data.test_subset=64",
]  # fmt: skip
NEW = "tests.callbacks_of_runs"

METHODS = {
    "gpipe": (["gradient_accumulation=4"], 3),
    "pipedream_2bw": (["gradient_accumulation=4"], 4),
    "pipemare": (["method_args={t1: {anneal_updates: 3}, t2: {decay: 0.5}}", "gradient_accumulation=1"], 8),
    "local_sgd": (["gradient_accumulation=1", "method_args={local_steps: 4}"], 4),
}  # fmt: skip


def train_short_digits(out: Path, *sets: str, **how: Any) -> Dict[str, Any]:
    return train(load_config(DIGITS, [*SHORT, *sets]), out, quiet=True, **how)


@pytest.mark.parametrize("method", METHODS)
def test_a_stopped_run_equals_a_run_planned_with_that_length(method: str, tmp_path: Path) -> None:
    (args, last), cut, planned = METHODS[method], tmp_path / "cut", tmp_path / "planned"
    sets = [f"method={method}", "stages=3", "optimizer.momentum=0.9", *args]
    report = train_short_digits(cut, *sets, "steps=16", callbacks=[StoppingCallback(3)])
    figures = report["steps"], report["planned_steps"], report["stopped"]
    assert figures == (last, 16, "it is enough")
    expected = train_short_digits(planned, *sets, f"steps={last}")
    assert expected["stopped"] is None and report["final"] == expected["final"]
    assert_same_state(cut, planned, last)
    assert read_numbers(cut) == read_numbers(planned)


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


class ValueRecorder(ipu_pipe.Callback):
    def __init__(self) -> None:
        self.steps: List[Any] = []
        self.evaluations: List[Any] = []
        self.weights: List[torch.Tensor] = []

    def on_step(self, now: ipu_pipe.Moment) -> None:
        assert isinstance(now.model, torch.nn.Module)
        self.steps.append({"step": now.step, "train_loss": now.loss, "lr": now.rate})
        self.weights.append(next(now.model.parameters()).detach().clone())

    def on_evaluation(self, now: ipu_pipe.Moment) -> Optional[ipu_pipe.Stop]:
        self.evaluations.append({"step": now.step, **now.metrics})
        return ipu_pipe.Stop() if now.step == 4 else None

    def on_end(self, now: ipu_pipe.Moment) -> None:
        assert (now.checkpoint / "model.safetensors").is_file()  # type: ignore[operator]
        self.end = now.step, now.stopped


def test_callbacks_see_the_written_figures_and_the_model(tmp_path: Path) -> None:
    recorder = ValueRecorder()
    sets = ["method=gpipe", "steps=6", "log.every=1", "micro_batch_size=8", "checkpoint.every=2"]
    sets += ["gradient_accumulation=1", "evaluate.every=0.0625"]  # of 32 updates
    report = train_short_digits(tmp_path, *sets, callbacks=[recorder])
    assert report["stopped"].endswith("ValueRecorder.on_evaluation asked for it")
    assert recorder.end == (4, report["stopped"])
    lines = [line for line in read_numbers(tmp_path) if line["step"]]
    for line in lines:
        line.pop("epoch", None)
    assert recorder.steps == [line for line in lines if "train_loss" in line]
    assert recorder.evaluations == [line for line in lines if "test_loss" in line]
    *earlier, last = recorder.weights
    assert torch.equal(last, read_weights(tmp_path, 4)["fc1.weight"])
    assert len(earlier) == 3 and not any(torch.equal(one, last) for one in earlier)


def test_hooks_may_be_attributes_that_the_constructor_sets(tmp_path: Path) -> None:
    """Story: those of an update were never called, unlike all others."""
    callback, called = ipu_pipe.Callback(), []
    for name in HOOKS:
        setattr(callback, name, lambda now, name=name: called.append(name))
    train_short_digits(tmp_path, "steps=2", callbacks=[callback])
    assert set(called) == set(HOOKS)


def test_an_exception_of_a_callback_is_reported_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(KeyError) as raised:
        train_short_digits(tmp_path / "run", "steps=4", f"callbacks=['{NEW}:FailingCallback']")
    line = str(find_user_fault(raised.value))
    assert line.startswith("callback FailingCallback.on_step after update 2: KeyError: ")
    assert "callbacks_of_runs.py" in line
    assert (tmp_path / "run" / "traceback.txt").read_text().startswith(line)


@pytest.mark.parametrize("keys, words", [
    ({"callbacks": [FailingCallback]}, "callbacks: the class FailingCallback: must be an object"),
    ({"callbacks": [len]}, "callbacks: a builtin"),

    ({"sets": "callbacks=3"}, "callbacks: 3: must be a list"),
])  # fmt: skip
def test_an_object_that_is_not_a_callback_is_refused_in_a_line(
    keys: Dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(BadInput, match=words):
        train_short_digits(tmp_path / "run", "steps=2", *[keys.pop("sets", "seed=0")], **keys)
    assert not (tmp_path / "run").exists()


class UpdateCounter(ipu_pipe.Callback):
    def __init__(self) -> None:
        self.count = 0

    def on_step(self, now: ipu_pipe.Moment) -> None:
        self.count += 1

    def state(self) -> int:
        return self.count

    def load(self, state: int) -> None:
        self.count = state


def test_a_resumed_run_restores_the_state_of_its_callbacks(tmp_path: Path, capsys: Any) -> None:
    sets = ["method=pipedream", "stages=2", "gradient_accumulation=1", "steps=8"]
    stopped = [UpdateCounter(), StoppingCallback(2)]
    train_short_digits(tmp_path, *sets, callbacks=stopped)  # ends after 3
    train(load_config(DIGITS, [*SHORT, *sets]), tmp_path, callbacks=[UpdateCounter()], resume=True)
    line = "nothing to resume (it ended early: it is enough; --resume-from 3 continues it)"
    assert line in capsys.readouterr().out
    counter = UpdateCounter()
    train_short_digits(tmp_path, *sets, callbacks=[counter], resume_from=3)
    assert counter.count == 8
    assert train_short_digits(tmp_path, *sets, resume=True)["stopped"] is None


GRADIENTS = f"callbacks=['{NEW}:ChecksumRecorder']"
REFUSED = {
    "checkpoint.restore_best": ["checkpoint=null", "early_stopping={restore_best: true}"],
    "ema.restore_best": ["ema={decay: 0.5}", "callbacks=[{entry: 'ipu_pipe:EarlyStopping', args: {restore_best: true}}]"],
    "early_stopping": ["early_stopping={patience: 1}", "evaluate.every=0"],
    "lr_schedule": ["lr_schedule={name: plateau}", "evaluate.every=0"],
    "early_stopping.metric": ["callbacks=[{entry: 'ipu_pipe:EarlyStopping', args: {metric: top5}}]"],
    # where replicas or stages step one by one
    "on_gradients": ["method=local_sgd", "gradient_accumulation=1", GRADIENTS],
    "randomized.on_gradients": ["method=randomized_pipedream", "gradient_accumulation=1", GRADIENTS],
}  # fmt: skip


@pytest.mark.parametrize("place", REFUSED)
def test_dry_runs_refuse_callbacks_that_a_run_refuses(place: str, tmp_path: Path) -> None:
    chosen = load_config(DIGITS, [*SHORT, "steps=4", *REFUSED[place]])
    faults = list_faults(build_for_planning, chosen)
    assert faults == list_faults(train, chosen, tmp_path / "run", quiet=True)
    assert place.split(".")[-1] in faults[0]


def test_a_dry_run_reads_nothing_from_a_callback_without_its_constructor() -> None:
    chosen = load_config(DIGITS, [*SHORT, "steps=4", f"callbacks=['{NEW}:DelegatingCallback']"])
    assert build_for_planning(chosen).updates == 4


# ---- the logger of docs/loop.md, with the real package, offline

SETS = [
    "method=pipedream",
    "stages=2",
    "gradient_accumulation=1",
    "micro_batch_size=8",
    "log.every=1",
    "checkpoint.every=2",
]
LOOP_PAGE = Path(__file__).resolve().parents[1] / "docs" / "loop.md"
SETTINGS = {
    "project": "tests", "mode": "offline", "settings": {"silent": True, "console": "off"}
}  # fmt: skip


def join_blocks(file: Path) -> bytes:
    """Return a wandb file's records: each block of 32 KiB begins with a header of 7 bytes, which
    may lie within a record, and so within a number.
    """
    data, size = file.read_bytes(), 2**15
    return b"".join(data[begin + 7 : begin + size] for begin in range(0, len(data), size))


def test_wandb_has_config_lines_and_summary_in_one_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = pytest.importorskip("wandb")
    (block,) = [b for b in list_blocks(LOOP_PAGE) if b.file == "wandb_log.py"]
    (tmp_path / block.file).write_text(block.text)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "wandb_log", raising=False)
    out = tmp_path / "run"
    callbacks = json.dumps([{"entry": "wandb_log:WandbLog", "args": SETTINGS}])
    for steps in (4, 6):
        sets = [*SETS, f"steps={steps}", f"callbacks={callbacks}"]
        train_short_digits(out, *sets, resume=steps == 6)
    # the process that writes the files may still be at it after a run's finish: wait for its end
    wandb.teardown()
    files = sorted((out / "wandb").glob("offline-run-*/run-*.wandb"))
    (state,) = read_json(out / "checkpoints" / "step-6" / "manifest.json")["callbacks"]
    # the second start continues the run of the first
    assert [file.name for file in files] == [f"run-{state['state']}.wandb"] * 2
    logged = b"".join(map(join_blocks, files))
    losses = read_column(out, "train_loss")
    assert len(losses) == 6
    for loss in (*losses, read_summary(out)["final"]["test_loss"]):
        assert repr(loss).encode() in logged
    assert b"micro_batch_size" in logged and b"planned_utilization" in logged
