"""Test hints for users of other libraries, and for a run that diverges."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Callable, List

import pytest
import torch
import torch.distributed.fsdp
from torch import nn

from ipu_pipe.config.faults import KEYS_ALSO_CALLED
from ipu_pipe.config.schema import BackendConfig, Config
from ipu_pipe.errors import RunFault
from ipu_pipe.pipeline.checks import check_modules
from ipu_pipe.report.run_text import format_closing, format_opening
from ipu_pipe.run.build import build
from ipu_pipe.run.train import train
from tests.support.runs import list_faults
from tests.test_train import make_short_config

HINTS = {
    "learning_rate=0.1": "unknown key, nearest is optimizer.lr",
    "chunks=4": "unknown key, nearest is gradient_accumulation",  # story: nearest was epochs
    "output_dir=x": "unknown key, nearest is --out DIR",  # story: nearest was optimizer
    "backend=cuda": "did you mean backend.device=cuda?",
    "backend=xla": "did you mean backend.name=xla?",
    "optimizer=adam": "{name, lr, momentum, nesterov and 8 more}; did you mean optimizer.name=adam?",
    "clip=1": "must be a mapping of keys to values: {norm, scope}",
}


@pytest.mark.parametrize("text", list(HINTS))
def test_words_of_other_libraries_get_hints(text: str) -> None:
    assert list_faults(make_short_config, text)[0].endswith(HINTS[text])


def test_every_alias_hints_at_an_existing_key() -> None:
    for name, here in KEYS_ALSO_CALLED.items():
        assert name not in Config.model_fields
        assert f"nearest is {here}" in list_faults(make_short_config, f"{name}=1")[0]
        if "." in here:  # a key of a section is known
            assert "unknown key" not in list_faults(make_short_config, f"{here}=[]")[0]


# ---- wrapped models


def make_flat_linear() -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))


def wrap_linear(wrap: Callable[[nn.Module], Any]) -> nn.Module:
    model = make_flat_linear()
    model[1] = wrap(model[1])
    return model


# with the name of the mixin of torch.distributed.fsdp.fully_shard
FSDPModule = type("FSDPModule", (nn.Linear,), {})


def compile_in_place() -> nn.Module:
    model = make_flat_linear()
    # as by model.compile(), which torch 2.0 has not
    model._compiled_call_impl = len  # type: ignore[assignment]
    return model


WRAPPED = {
    "model: is wrapped by torch.compile: ": [lambda: torch.compile(make_flat_linear()), compile_in_place],
    # story: its hooks raised a RuntimeError
    "model: is wrapped by torch.jit: ": [lambda: torch.jit.script(make_flat_linear())],
    # story: these were trained inside it
    "model: 1: is wrapped by DataParallel: ": [lambda: wrap_linear(nn.DataParallel)],
    "model: 1: is wrapped by torch.compile: ": [lambda: wrap_linear(torch.compile)],
    "model: 1: is wrapped by fully_shard: ": [lambda: wrap_linear(lambda linear: FSDPModule(64, 10))],
}  # fmt: skip


@pytest.mark.parametrize("beginning", list(WRAPPED))
@pytest.mark.filterwarnings("ignore")
def test_a_wrapped_model_is_refused_by_the_wrappers_name(beginning: str) -> None:
    for wrap in WRAPPED[beginning]:
        (fault,) = list_faults(check_modules, wrap(), None, torch.device("cpu"))
        assert fault.startswith(beginning)


# ---- unused keys


def test_steps_beside_epochs_report_which_is_used() -> None:
    both = build(make_short_config("steps=5", "epochs=3"))
    line = "steps: 5 overrides epochs: 3, which is ignored"
    assert format_opening(both).splitlines()[0] == line
    agreeing = build(make_short_config("steps=null", "epochs=2"))
    same = build(make_short_config(f"steps={agreeing.updates}", "epochs=2"))
    assert "overrides" not in format_opening(agreeing) + format_opening(same)


ALONE = "stages: with one stage there is no pipeline: "


@pytest.mark.parametrize("keys, is_expected", [
    (["method=gpipe", "stages=1"], True),
    (["method=pipedream", "stages=1"], True),
    (["method=pipedream", "stages=2"], False),
    (["method=pipemare", "stages=1", "method_args={constant_delay: {updates: 2}}"], False),
    (["method=last_layers", "stages=1", "method_args={layers: 1}"], False),
])  # fmt: skip
def test_one_stage_under_a_pipelines_method_is_reported(keys: List[str], is_expected: bool) -> None:
    assert (ALONE in format_opening(build(make_short_config(*keys)))) == is_expected


# ---- the closing lines

REPORT = {
    "method": "gpipe", "model": {"stages": 2}, "steps": 2, "batch": {"global_batch_size": 8},
    "initial": {"test_loss": 1.0}, "final": {"test_loss": 1.0, "train_loss": 1.0},
    "stages": [{"forward_delay": 0, "weight_copies": 1}], "stopped": None, "finding": "no fall",
    "utilization": None, "modelled_utilization": None, "planned_utilization": 0.5,
    "throughput_samples_per_second": None,
}  # fmt: skip


@pytest.mark.parametrize("keys, advice", [
    ([], "ipu-pipe stability RUN/config.yaml measures"),
    (["backend.name=distributed"], "ipu-pipe stability RUN/config.yaml --set backend.name=emulator measures"),
    (["backend.name=xla"], ""),
    (["optimizer.name=adam", "optimizer.momentum=null"], ""),
    (["method=local_greedy"], ""),
])  # fmt: skip
def test_the_closing_lines_advise_no_command_that_refuses_the_run(
    keys: List[str], advice: str
) -> None:
    """Story: xla's runs were sent to a command that refuses xla."""
    config = make_short_config(*keys)
    job = build(config.model_copy(update={"backend": BackendConfig()}))
    text = format_closing(replace(job, config=config), REPORT, Path("RUN"))
    assert (advice in text) if advice else ("stability" not in text)
    assert "finding: no fall; another optimizer.lr may help" in text


@pytest.mark.parametrize("is_on", [True, False])
def test_tensorboard_is_named_where_it_has_files(is_on: bool) -> None:
    job = build(make_short_config(f"log.tensorboard={str(is_on).lower()}"))
    assert ("tensorboard" in format_closing(job, REPORT, Path("RUN"))) == is_on


# ---- diverged

WILD = ["optimizer.lr=1e18", "optimizer.momentum=0", "stages=4", "evaluate.every=0"]


def read_divergence_message(out: Path, *keys: str) -> str:
    """Train at a rate that diverges and return the message."""
    with pytest.raises(RunFault) as error:
        train(make_short_config(*WILD, *keys), out, quiet=True)
    return str(error.value)


def test_a_diverged_run_reports_stage_rule_and_remedy(tmp_path: Path) -> None:
    """SGD without momentum at a delay of D is stable below 2 sin(pi / (4 D + 2)) / curvature.

    PipeMare, Lemma 1: with D = 7 the numerator is 0.209, without delay 2.
    """
    keys = ["method=pipemare", "gradient_accumulation=1", "lr_schedule={warmup_steps: 20}"]
    message = read_divergence_message(tmp_path / "a", *keys)
    for part in (
        "; stage 0 tolerates the smallest learning rate (its weights are 7 updates stale): ",
        "stable up to 0.209 / curvature, 0.1 times the limit without delay, and uses ",
        "; with t1 it tolerates 7 times as much",
        "tools/stability.py CONFIG measures the curvature",
    ):
        assert part in message
    # rules that the run already has are not recommended
    assert "with t1 it" not in read_divergence_message(
        tmp_path / "b", *keys, "method_args={t1: {}}"
    )


@pytest.mark.parametrize("keys, message", [
    (["method=gpipe"], "rules against staleness cannot help; clip: {norm: ...} may help"),
    (["method=gpipe", "clip={norm: 1e18}"], "rules against staleness cannot help"),
    (["method=local_greedy"], "; no stage reads stale weights in this run, so"),
    (["method=pipemare", "method_args={warmup: {epochs: 1}}"], "; no stage reads stale weights in this run, so"),
    (["method=pipedream", "optimizer={name: adam, momentum: null}"], "1 update stale): method_args: {t1: {}} lowers"),
])  # fmt: skip
def test_the_message_of_a_diverged_run_fits_its_method(
    keys: List[str], message: str, tmp_path: Path
) -> None:
    assert message in read_divergence_message(tmp_path / "run", *keys)
