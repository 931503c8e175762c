"""Compare PipelineTrainer with transformers' own Trainer, and its processes with its emulator."""

from __future__ import annotations

import copy
import functools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Callable, Dict, List

import pytest
import torch
from torch.distributed import TCPStore

from ipu_pipe.errors import BadInput
from tests import forked
from tests.support.packages import write_broken_torchvision
from tests.support.runs import ROOT, assert_states_close, list_faults
from tests.support.slow import mark_slow

transformers = pytest.importorskip("transformers", minversion="5")
pytest.importorskip("accelerate")
from ipu_pipe.integrations import transformers as integration  # noqa: E402
from tests import third_party  # noqa: E402

PipelineTrainer = integration.PipelineTrainer

LINES = ("step", "epoch", "loss", "learning_rate", "eval_loss", "eval_right")
SEQUENCES = {"gpt2": 10, "bert": 8}


def draw_samples(kind: str, count: int, seed: int = 0) -> List[Dict[str, torch.Tensor]]:
    """Return sentences for a language model with a random number of ignored labels (one sentence
    ignores all), or sentences with a class."""
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for i in range(count):
        ids = torch.randint(0, 31, (SEQUENCES[kind],), generator=generator)
        labels = torch.randint(0, 3, (), generator=generator)
        if kind == "gpt2":
            labels = ids.clone()
            labels[: int(torch.randint(0, 9, (), generator=generator)) if i else 10] = -100
        samples.append({"input_ids": ids, "labels": labels})
    return samples


def make_hugging_model(kind: str) -> torch.nn.Module:
    torch.manual_seed(1)
    return third_party.make_hugging_gpt2() if kind == "gpt2" else third_party.make_hugging_bert()  # type: ignore[no-any-return]


def count_right(prediction: Any) -> Dict[str, float]:
    return {"right": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


STAGE = {"gpt2": "transformer.h.1", "bert": "bert.encoder.layer.1"}


def make_trainer(folder: Path, kind: str = "gpt2", method: str = "", **changes: Any) -> Any:
    """Return a Trainer, or with a method a PipelineTrainer, on 21 samples in batches of 2 and
    updates of 4 batches.

    An epoch has 3 updates; the last one has 3 batches, of which the last has one sample.
    """
    settings = {
        "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "num_train_epochs": 2, "logging_steps": 1,
        "eval_strategy": "epoch", "save_strategy": "epoch", "report_to": [], "learning_rate": 0.01, "warmup_steps": 2,
        "weight_decay": 0.1, "max_grad_norm": 0.5, "use_cpu": True, "disable_tqdm": True,
    }  # fmt: skip
    pipeline = {"method": method, "stages": [STAGE[kind]], **changes.pop("pipeline", {})}
    arguments = {"compute_metrics": count_right, "eval_dataset": draw_samples(kind, 5, 1)}
    arguments.update(model=None, train_dataset=draw_samples(kind, 21), callbacks=None, data_collator=None)  # fmt: skip
    arguments.update({key: changes.pop(key) for key in [*arguments] if key in changes})
    arguments["model"] = arguments["model"] or make_hugging_model(kind)
    arguments["args"] = transformers.TrainingArguments(str(folder), **{**settings, **changes})
    if method:
        return PipelineTrainer(**arguments, pipeline=pipeline)
    return transformers.Trainer(**arguments)


def read_log(trainer: Any) -> List[Dict[str, float]]:
    return [{key: line[key] for key in LINES if key in line} for line in trainer.state.log_history]


def call_at_events(**functions: Callable[..., Any]) -> Any:
    """Return a callback that calls functions of state, control and model at these events."""
    callback = transformers.TrainerCallback()

    def call(args: Any, *moment: Any, event: str, model: Any, **others: Any) -> None:
        functions[event](*moment, model)

    for event in functions:
        setattr(callback, event, functools.partial(call, event=event))
    return callback


def set_flag(update: int, flag: str) -> Any:
    """Return a callback that sets a flag of the control after an update."""

    def set_after_update(state: Any, control: Any, model: Any) -> None:
        if state.global_step == update:
            setattr(control, flag, True)

    return call_at_events(on_step_end=set_after_update)


def is_same_model(a: torch.nn.Module, b: Any) -> bool:
    other = b if isinstance(b, dict) else b.state_dict()
    return all(torch.equal(value, other[name]) for name, value in a.state_dict().items())


# ---- against Trainer


def assert_logs_close(log: Any, expected: Any, **tolerance: float) -> None:
    """Assert that two logs are equal up to rounding."""
    assert len(log) == len(expected)
    for line, other in zip(log, expected):
        assert line == pytest.approx(other, rel=1e-6, **tolerance)


def assert_trainers_close(ours: Any, theirs: Any) -> None:
    """Assert that two trainers are equal up to rounding: padded batches, clipping norms and
    divisions are summed in another order."""
    assert_logs_close(read_log(ours), read_log(theirs), abs=1e-6)
    for (name, p), q in zip(ours.model.named_parameters(), theirs.model.parameters()):
        # Adam divides by values near zero
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.slow
def test_a_torchvision_that_cannot_be_imported_is_named_in_one_line(tmp_path: Path) -> None:
    write_broken_torchvision(tmp_path)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    command = [sys.executable, "-c", "import ipu_pipe.integrations.transformers"]
    completed = subprocess.run(command, env=environment, stderr=subprocess.PIPE, text=True)
    assert completed.returncode == 1 and completed.stderr.count("Traceback") == 1
    line = completed.stderr.splitlines()[-1]
    parts = ("0.1.2", f"torch {torch.__version__}", "torchvision::nms", "pip uninstall torchvision")
    assert all(part in line for part in parts), line


@pytest.mark.parametrize(
    "kind, changes",
    [("gpt2", {}), ("bert", {"label_smoothing_factor": 0.1, "lr_scheduler_type": "cosine"})],
)
def test_a_method_that_flushes_trains_as_trainer_does(
    kind: str, changes: Dict[str, Any], tmp_path: Path
) -> None:
    theirs, ours = (
        make_trainer(tmp_path / name, kind, method, **changes)
        for name, method in (("theirs", ""), ("ours", "pipedream_flush"))
    )
    assert ours.train().training_loss == pytest.approx(theirs.train().training_loss, rel=1e-6)
    assert_trainers_close(ours, theirs)
    assert ours.state.total_flos == theirs.state.total_flos > 0
    a, b = (one.predict(draw_samples(kind, 3, 2)).predictions for one in (ours, theirs))
    torch.testing.assert_close(torch.tensor(a), torch.tensor(b), rtol=1e-4, atol=1e-5)
    files, expected = (
        {str(path.relative_to(tmp_path / one)) for path in (tmp_path / one).rglob("*")}
        for one in ("ours", "theirs")
    )
    assert files == expected and "checkpoint-6" in files


def add_adapters(model: torch.nn.Module) -> Any:
    """Return GPT-2 with LoRA adapters that change its outputs from the beginning."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        r=2, target_modules=["c_attn"], lora_dropout=0.0, init_lora_weights=False
    )
    return peft.get_peft_model(model, config)


SGD = {"optim": "sgd", "learning_rate": 1.0, "warmup_steps": 0}
OFTEN = {"eval_strategy": "steps", "eval_steps": 1, "num_train_epochs": 4}
# what both trainers are made with; `prepare` is called with each of them
UNCLIPPED: Dict[str, Callable[[], Dict[str, Any]]] = {
    "labels": dict,
    "short": lambda: {"kind": "bert"},
    "adapters": lambda: {
        "model": add_adapters(make_hugging_model("gpt2")),
        "pipeline": {"stages": [f"base_model.model.{STAGE['gpt2']}"]},
    },
    "smoothing": lambda: {"kind": "bert", "label_smoothing_factor": 0.1},
    # 1/61 in float32, times 61, is not 1; Adam would round the difference away
    "many": lambda: {
        "gradient_accumulation_steps": 61, "per_device_train_batch_size": 1, "train_dataset": draw_samples("gpt2", 61), **SGD,
    },
    # the mean of each batch is divided by 5, and by 1 in the last update
    "means": lambda: {"kind": "bert", "gradient_accumulation_steps": 5, "optim": "sgd", "prepare": expect_means},
    # a warm-up begins at 0, where rates have no proportion: all groups once had the rate of the first
    "groups": lambda: {"prepare": set_groups},
    # rates were once recorded ahead as one schedule
    "schedules": lambda: {"prepare": set_schedules},
    "plateau": lambda: {
        "kind": "bert", "lr_scheduler_type": "reduce_lr_on_plateau", "learning_rate": 0.05, "metric_for_best_model": "loss",
        "lr_scheduler_kwargs": {"patience": 0, "factor": 0.5}, "warmup_steps": 0, **OFTEN,
    },
    "early stop": lambda: {
        "kind": "bert", "learning_rate": 0.05, "num_train_epochs": 6, "load_best_model_at_end": True, "save_strategy": "epoch",
        "metric_for_best_model": "right", "save_total_limit": 1, "callbacks": [transformers.EarlyStoppingCallback(2)],
    },
    "stop": lambda: {"callbacks": [set_flag(5, "should_training_stop")], "save_strategy": "epoch"},
    "end of an epoch": lambda: {"callbacks": [set_flag(2, "should_epoch_stop")]},
    # the second training keeps the optimizer
    "twice": lambda: {"prepare": lambda trainer: trainer.train()},
}  # fmt: skip


def expect_means(trainer: Any) -> None:
    trainer.model_accepts_loss_kwargs = False


def set_groups(trainer: Any) -> None:
    """Give the optimizer two groups with rates of their own."""
    parameters = list(trainer.model.parameters())
    groups = [{"params": parameters[:5], "lr": 0.01}, {"params": parameters[5:], "lr": 0.001}]
    trainer.optimizer = torch.optim.AdamW(groups)


def set_schedules(trainer: Any) -> None:
    set_groups(trainer)
    halve = [lambda k: 1.0, lambda k: 0.5**k]
    trainer.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(trainer.optimizer, halve)


EVENTS = ("on_step_begin", "on_optimizer_step", "on_step_end", "on_evaluate", "on_save")


@pytest.mark.parametrize("name", mark_slow(UNCLIPPED, ["labels", "adapters"].__contains__))
def test_gpipe_without_clipping_is_trainer_to_the_last_bit(name: str, tmp_path: Path) -> None:
    """Train updates of 3 microbatches (1/3 is rounded); the last one has 2, of which one has a
    single sample.

    Short batches were once padded with samples whose labels are ignored, and a sum over them is
    rounded otherwise.
    """
    unclipped = {"gradient_accumulation_steps": 3, "max_grad_norm": 0.0, "save_strategy": "no"}
    trainers = []
    events = {"": [], "gpipe": []}
    for method, seen in events.items():
        changes = {**unclipped, **UNCLIPPED[name]()}
        prepare = changes.pop("prepare", lambda trainer: None)
        trainer = make_trainer(tmp_path / (method or "theirs"), method=method, **changes)
        prepare(trainer)
        record = {
            event: lambda state, *_, event=event, seen=seen: seen.append((event, state.global_step))
            for event in EVENTS
        }
        trainer.add_callback(call_at_events(**record))
        trainer.train()
        trainers.append(trainer)
    theirs, ours = trainers
    assert is_same_model(ours.model, theirs.model)
    assert events[""] == events["gpipe"]
    assert ours.state.best_metric == theirs.state.best_metric
    assert_logs_close(read_log(ours), read_log(theirs))


def test_modules_keep_the_modes_of_the_beginning(tmp_path: Path) -> None:
    """A dropout that is off stays off; a model that a callback leaves in evaluation mode, as those
    that generate text do, is trained in training mode."""
    models = []
    evaluating = call_at_events(on_step_end=lambda state, control, model: model.eval())
    for rate, is_off in ((0.0, False), (0.5, True), (0.5, False)):
        model = make_hugging_model("bert").train()
        model.dropout.p = rate
        model.dropout.train(not is_off)
        keys = {"save_strategy": "no", "callbacks": [evaluating]}
        make_trainer(tmp_path, "bert", "gpipe", model=model, **keys).train()
        models.append(model)
    assert is_same_model(models[1], models[0]) and not is_same_model(models[1], models[2])


@pytest.mark.slow
def test_a_resumed_run_has_the_rates_of_its_checkpoint(tmp_path: Path) -> None:
    """Trainer does so, too, and each resumes the other's checkpoints. The log once had the
    checkpoint's rates while the pipeline trained with the new ones."""
    make_trainer(tmp_path / "first", max_steps=3).train()
    theirs, ours = (
        make_trainer(tmp_path / name, method=method, learning_rate=0.02, weight_decay=0.0)
        for name, method in (("theirs", ""), ("ours", "gpipe"))
    )
    for trainer in (theirs, ours):
        trainer.train(resume_from_checkpoint=str(tmp_path / "first" / "checkpoint-3"))
    assert_trainers_close(ours, theirs)
    again = make_trainer(tmp_path / "again")
    again.train(resume_from_checkpoint=str(tmp_path / "ours" / "checkpoint-6"))
    assert is_same_model(again.model, ours.model)


class OwnLoss(PipelineTrainer):  # type: ignore[misc, valid-type]
    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(model, inputs, *args, **kwargs)


@pytest.mark.parametrize(
    "name", ["", "next_sentence_label", "output_router_logits", "num_labels", "OwnLoss"]
)
def test_only_labels_that_a_known_loss_ignores_pad_a_batch(name: str, tmp_path: Path) -> None:
    """A model with one label regresses, also to -100: whole numbers as values once gave a loss
    of 5004 instead of 9."""
    torch.manual_seed(1)
    model = third_party.make_hugging_bert(1 if name == "num_labels" else 3)
    trainer = make_trainer(tmp_path, "bert", "gpipe", model=model)
    batch = {"labels": torch.zeros(1, dtype=torch.long)}
    if name == "next_sentence_label":
        batch[name] = batch["labels"]
    if name == "output_router_logits":
        model.config.output_router_logits = True
    if name == "OwnLoss":
        trainer.__class__ = OwnLoss
    assert trainer.can_ignore(batch) == (not name)


def test_a_subclass_knows_the_group_that_another_has_joined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PipelineTrainer, "_has_joined", True)
    monkeypatch.setitem(globals(), "PipelineTrainer", type("Own", (PipelineTrainer,), {}))
    assert not make_trainer(tmp_path, method="gpipe")._has_joined  # one process has no group
    assert not integration.PipelineTrainer._has_joined


@pytest.mark.parametrize("method", ["local_sgd", "randomized_pipedream"])
def test_a_method_whose_replicas_or_stages_take_their_own_microbatches(
    method: str, tmp_path: Path
) -> None:
    """An update once had one microbatch only, so an epoch of Trainer's was two epochs of the
    run."""
    arguments = {
        "method": method,
        "max_grad_norm": 0.0,
        "train_dataset": draw_samples("gpt2", 24),
    }
    trainer = make_trainer(tmp_path, gradient_accumulation_steps=2, **arguments)
    assert trainer.train().global_step == 12
    losses = [line["loss"] for line in read_log(trainer) if "loss" in line]
    assert losses[-1] < losses[0] < 4
    with pytest.raises(BadInput, match="^gradient_accumulation_steps: 4: "):
        make_trainer(tmp_path, gradient_accumulation_steps=4, **arguments).train()


# ---- processes


METHODS = ("pipedream_flush", "pipedream")
# samples in batches of equal size, which processes need; the last update has 3 of 4 batches
EVEN = 22
DELAYED = {"clip": {"scope": "delayed_global"}}


def train_by(method: str, folder: Path, where: str) -> None:
    """Train with a method, and save weights, log, predictions, and the models that callbacks get, of
    which one saves the model and logs."""
    changes = {"train_dataset": draw_samples("gpt2", EVEN)}
    if method == "pipedream":
        changes["pipeline"] = DELAYED
    if method == "gpipe":
        # a run with a short batch, which a callback ends
        changes = {"callbacks": [set_flag(5, "should_training_stop")]}
    predicted: List[torch.Tensor] = []
    models: List[Any] = []

    def keep_predictions(prediction: Any) -> Dict[str, float]:
        predicted.append(torch.from_numpy(prediction.predictions))
        return count_right(prediction)

    def keep_model(state: Any, control: Any, model: Any) -> None:
        models.append(copy.deepcopy(model.state_dict()))

    def save_model(*moment: Any) -> None:
        keep_model(*moment)
        trainer.save_model(str(folder / f"own-{where}"))

    trainer = make_trainer(
        folder / where[:4], method=method, compute_metrics=keep_predictions, **changes
    )
    callback = call_at_events(
        on_train_begin=lambda *moment: trainer.log({"callback": 1.0}),
        on_evaluate=keep_model,
        on_save=save_model,
    )
    trainer.add_callback(callback)
    trainer.train()
    results = (trainer.model.state_dict(), read_log(trainer), predicted, models)
    torch.save(results, folder / f"results.{where}")


def run_rank(rank: int, port: int, work: Callable[..., None], arguments: Any) -> None:
    os.environ.update(forked.make_rank_environment(rank, 2, port))
    work(*arguments, f"rank{rank}")
    os._exit(0)


def run_on_ranks(work: Callable[..., None], *arguments: Any) -> None:
    """Run `work(*arguments, "rank0")` on the first of two processes, and so on the other one."""
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    forked.fork_ranks(2, run_rank, store.port, work, arguments)


@pytest.fixture(scope="module")
def train_everywhere(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return what trains with a method on two processes and on the emulator, once, and returns the folder of both."""

    @functools.lru_cache(maxsize=None)
    def train(method: str) -> Path:
        folder = tmp_path_factory.mktemp(method)
        run_on_ranks(train_by, method, folder)
        train_by(method, folder, "emulator")
        return folder

    return train


# a run of a method takes seconds
PROCESS_METHODS = mark_slow([*METHODS, "gpipe"], lambda method: method == "pipedream")


@pytest.mark.parametrize("method", PROCESS_METHODS)
def test_processes_train_as_the_emulator(
    method: str, train_everywhere: Callable[[str], Path]
) -> None:
    """Stories: other ranks than the first evaluated with NaN for the weights of other stages; so did
    a callback that saved the model, or generated text; its log() went to the others in the place of
    the control."""
    folder = train_everywhere(method)
    weights, log, predicted, models = torch.load(folder / "results.emulator")
    # processes pad the short batch of this run, so that sums are rounded otherwise
    is_padded = method == "gpipe"
    atol = 1e-4 if is_padded else 0.0
    for rank in range(2):
        results = torch.load(folder / f"results.rank{rank}")
        weights_here, log_here, predicted_here, models_here = results
        torch.testing.assert_close(predicted, predicted_here, rtol=1e-4, atol=1e-4)
        assert_states_close(weights, weights_here, atol)
        if is_padded:
            assert_logs_close(log_here, log, abs=1e-6)
        else:
            assert log_here == log
        # callbacks run on the first: an evaluation and a checkpoint after each epoch
        assert len(models_here) == (0 if rank else 4)
        for expected, model in zip(models, models_here):
            assert_states_close(expected, model, atol)
    saved = {path.parent.name for path in folder.glob("own-*/*.safetensors")}
    assert saved == {"own-emulator", "own-rank0"} and len(models) == 4


@pytest.mark.slow
def test_losses_leave_a_pipeline_later_and_none_is_lost(
    train_everywhere: Callable[[str], Path],
) -> None:
    """A line of the log has the mean loss of the updates that left since the previous line; all
    leave before an evaluation."""
    logs = []
    for method in METHODS:
        _, log, _, _ = torch.load(train_everywhere(method) / "results.emulator")
        logs.append({line["step"]: line["loss"] for line in log if "loss" in line})
    flushed, pipelined = logs
    assert list(flushed) == [1, 2, 3, 4, 5, 6]
    assert list(pipelined) == [2, 3, 5, 6]
    # update 0 reads the same weights in both
    assert pipelined[2] == flushed[1]


def test_a_run_of_processes_resumes_in_the_emulator(
    train_everywhere: Callable[[str], Path], tmp_path: Path
) -> None:
    """Story: with `eval_on_start` a resumed run always failed, because its pipeline has no stages
    before its first step."""
    trainer = make_trainer(
        tmp_path,
        method="pipedream",
        pipeline=DELAYED,
        train_dataset=draw_samples("gpt2", EVEN),
        eval_on_start=True,
    )
    folder = train_everywhere("pipedream")
    trainer.train(resume_from_checkpoint=str(folder / "rank" / "checkpoint-3"))
    weights, log, _, _ = torch.load(folder / "results.emulator")
    resumed_log = read_log(trainer)
    evaluations = [line for line in resumed_log if line["step"] == 3 and "eval_loss" in line]
    assert len(evaluations) == 2 and evaluations[0] == evaluations[1]
    resumed_log.remove(evaluations[1])
    assert is_same_model(trainer.model, weights) and resumed_log == log


# ---- processes of which the first one differs


DEADLINE = {"backend": {"deadline": 10}}


def raise_error(trainer: Any) -> None:
    raise KeyError("mine")


# what fails on the first process -> what its callback does, the errors of both ranks
FAILURES = {
    "call": (lambda trainer: trainer.save_model(), "BadInput", "BadInput", "on_step_end: "),
    "error": (raise_error, "KeyError", "RunFault", "KeyError: 'mine'"),
    "save": (lambda trainer: None, "FileExistsError", "RunFault", "FileExistsError: "),
}


def run_unlike_metrics(folder: Path, where: str) -> None:
    """Train with metrics of which each rank has its own, and save what the rank decided by them."""
    scores = iter({"rank0": [0.5, 0.25], "rank1": [0.125, 0.75]}[where])
    trainer = make_trainer(
        folder / "best", "bert", "gpipe", max_steps=2, eval_strategy="steps", eval_steps=1, save_strategy="best",
        metric_for_best_model="score", compute_metrics=lambda _: {"score": next(scores)}, pipeline=DEADLINE,
        lr_scheduler_type="reduce_lr_on_plateau", lr_scheduler_kwargs={"patience": 0, "mode": "max"}, warmup_steps=0,
    )  # fmt: skip
    trainer.train()
    state = trainer.state
    decided = (state.best_metric, state.best_global_step, trainer.optimizer.param_groups[0]["lr"])
    flags = [state.is_local_process_zero, state.is_world_process_zero]
    torch.save((decided, flags), folder / where)


def run_failures(folder: Path, where: str) -> None:
    """Train where the first process fails, and save the errors with which this rank ends."""
    errors = {}
    for name, (fail, *_) in FAILURES.items():
        out = folder / name
        out.mkdir(exist_ok=True)
        # a file in the place of the checkpoint's folder
        (out / "checkpoint-1").touch()
        trainer = make_trainer(
            out, "bert", "gpipe", max_steps=2, pipeline=DEADLINE, eval_strategy="no",
            save_strategy="steps" if name == "save" else "no", save_steps=1,
        )  # fmt: skip
        call = functools.partial(fail, trainer)
        trainer.add_callback(call_at_events(on_step_end=lambda *moment, call=call: call()))
        with pytest.raises(Exception) as error:
            trainer.train()
        errors[name] = (error.typename, str(error.value))
    torch.save(errors, folder / where)


@pytest.mark.slow
def test_all_ranks_decide_by_the_metrics_of_the_first(tmp_path: Path) -> None:
    """Story: a rank whose own metric was better waited alone for the others to save."""
    run_on_ranks(run_unlike_metrics, tmp_path)
    decided, flags = zip(*(torch.load(tmp_path / f"rank{rank}") for rank in range(2)))
    assert decided[0] == decided[1] == (0.5, 1, pytest.approx(0.001))
    assert flags == ([True, True], [False, False])


@pytest.mark.slow
def test_a_failure_of_the_first_process_ends_all(tmp_path: Path) -> None:
    """Story: the others waited until their deadline."""
    run_on_ranks(run_failures, tmp_path)
    first, second = (torch.load(tmp_path / f"rank{rank}") for rank in range(2))
    for name, (_, *kinds, text) in FAILURES.items():
        assert [first[name][0], second[name][0]] == kinds
        assert text in second[name][1]


# ---- random draws of a collator, callbacks


def mask_at_random(samples: List[Any]) -> Dict[str, torch.Tensor]:
    batch = {key: torch.stack([one[key] for one in samples]) for key in samples[0]}
    batch["labels"] = batch["labels"].masked_fill(torch.rand(batch["labels"].shape) < 0.3, -100)
    return batch


def make_dropout_gpt2() -> Any:
    model = make_hugging_model("gpt2")
    model.transformer.drop.p = 0.5
    return model


def test_a_resumed_run_draws_the_same_batches_and_masks(tmp_path: Path) -> None:
    arguments = {
        "method": "pipedream", "data_collator": mask_at_random, "save_strategy": "steps", "save_steps": 5, "max_grad_norm": 0.0,
    }  # fmt: skip
    whole, resumed = (
        make_trainer(tmp_path / name, model=make_dropout_gpt2(), **arguments)
        for name in ("whole", "resumed")
    )
    whole.train()
    torch.rand(3)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-5"))
    assert is_same_model(resumed.model, whole.model)
    assert read_log(resumed) == read_log(whole)


def test_a_method_that_does_not_flush_ends_where_a_callback_stops_it(tmp_path: Path) -> None:
    """Batches were once started ahead, so the run continued until update 6."""
    trainer = make_trainer(
        tmp_path, method="pipedream", callbacks=[set_flag(5, "should_training_stop")], eval_strategy="no", save_strategy="no",
        max_grad_norm=0.0, gradient_accumulation_steps=1,
    )  # fmt: skip
    assert trainer.train().global_step == 5


def test_a_callback_evaluates_where_it_requests(tmp_path: Path) -> None:
    """The pipeline drains for the evaluation, so the run equals one with `eval_steps` there."""
    arguments = {"max_grad_norm": 0.0, "save_strategy": "no", "max_steps": 3}
    by_callback, by_steps, without = (
        make_trainer(tmp_path, method="pipedream", **arguments, **changes)
        for changes in (
            {"callbacks": [set_flag(2, "should_evaluate")], "eval_strategy": "no"},
            {"eval_strategy": "steps", "eval_steps": 2},
            {"eval_strategy": "no"},
        )
    )
    for trainer in (by_callback, by_steps, without):
        trainer.train()
    assert read_log(by_callback)[:3] == read_log(by_steps)[:3]
    assert is_same_model(by_callback.model, by_steps.model)
    assert not is_same_model(by_callback.model, without.model)


# ---- refusals


class GradientCallback(transformers.TrainerCallback):  # type: ignore[misc]
    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """See the gradients."""


@pytest.mark.parametrize("key, changes", [
    ("bf16", {"bf16": True}),
    ("activation_checkpointing", {"activation_checkpointing": True}),
    ("neftune_noise_alpha", {"neftune_noise_alpha": 5.0}),
    ("save_on_each_node", {"save_on_each_node": True}),
    ("pipeline.replicas", {"pipeline": {"replicas": 2}}),
    ("pipeline.method", {"pipeline": {"method": "gpype"}}),
    ("pipeline.backend.name", {"pipeline": {"backend": {"name": "poptorch"}}}),
    ("callbacks", {"callbacks": [GradientCallback()]}),
])  # fmt: skip
def test_unsupported_arguments_are_refused_by_name(
    key: str, changes: Dict[str, Any], tmp_path: Path
) -> None:
    faults = list_faults(make_trainer, tmp_path, **{"method": "gpipe", **changes})
    assert [fault.partition(": ")[0] for fault in faults] == [key]


def test_faults_found_only_in_training_are_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer(tmp_path, method="gpipe")
    trainer.args.tf32 = True  # TrainingArguments refuse it on a CPU
    assert [fault.partition(": ")[0] for fault in trainer._list_faults()] == ["tf32"]
    with pytest.raises(BadInput, match="^clip: global: "):
        make_trainer(tmp_path, method="pipedream").train()
    monkeypatch.setattr(integration, "is_distributed", lambda: True)
    with pytest.raises(BadInput, match="^hyperparameter_search: "):
        trainer.hyperparameter_search()
