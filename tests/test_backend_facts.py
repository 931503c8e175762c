"""Backends' facts: each backend's row in the table decides what is refused and what is advised."""

from __future__ import annotations

from typing import Any

import pytest

from ipu_pipe.config.load import load_config
from ipu_pipe.errors import BadInput
from ipu_pipe.job.stability import explain_divergence
from ipu_pipe.pipeline.build import build
from ipu_pipe.pipeline.checks import find_faults
from ipu_pipe.run.callbacks import Callback, require_supported_callbacks
from tests.support.runs import DIGITS

BACKENDS = ("emulator", "distributed", "poptorch", "xla")
COMPILED = ("poptorch", "xla")  # weights and gradients stay on their devices


def build_job(backend: str, *settings: str) -> Any:
    """Build the smallest config's job on the emulator, then state that it runs on `backend`.

    So only the backend's facts differ: neither its launcher nor its software is needed.
    """
    job = build(load_config(DIGITS, ["method=gpipe", *settings]))
    settings = ["method=pipedream_flush", "gradient_accumulation=8", f"backend.name={backend}"]
    section = load_config(DIGITS, settings).backend
    job.config = job.config.model_copy(update={"backend": section})
    return job


def list_conflicts(job: Any, key: str) -> list:
    """Return the refusals of a job that begin with `key`."""
    return [fault for fault in find_faults(job, []) if fault.startswith(key)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_only_processes_compile_the_modules_of_stages(backend: str) -> None:
    job = build_job(backend)
    model = job.config.model.model_copy(update={"compile": True})
    job.config = job.config.model_copy(update={"model": model})
    assert bool(list_conflicts(job, "model.compile")) == (backend != "distributed")


@pytest.mark.parametrize("backend", BACKENDS)
def test_learning_rates_follow_evaluations_unless_they_are_compiled(backend: str) -> None:
    job = build_job(backend, "lr_schedule.name=plateau", "evaluate.steps=4")
    assert bool(list_conflicts(job, "lr_schedule.name")) == (backend == "poptorch")


@pytest.mark.parametrize("backend", BACKENDS)
def test_averages_of_weights_need_weights_on_the_host(backend: str) -> None:
    job = build_job(backend, "ema={decay: 0.9}")
    assert bool(list_conflicts(job, "ema")) == (backend in COMPILED)


@pytest.mark.parametrize("backend", BACKENDS)
def test_callbacks_on_gradients_need_gradients_on_the_host(backend: str) -> None:
    class WatchGradients(Callback):
        def on_gradients(self, now: Any) -> None:
            """Read the gradients."""

    job = build_job(backend)
    if backend in COMPILED:
        with pytest.raises(BadInput, match="on_gradients"):
            require_supported_callbacks(job, [WatchGradients()])
    else:
        require_supported_callbacks(job, [WatchGradients()])


@pytest.mark.parametrize("backend", BACKENDS)
def test_clipping_is_advised_where_every_optimizer_clips(backend: str) -> None:
    assert ("clip:" in explain_divergence(build_job(backend), 0)) == (backend not in COMPILED)
