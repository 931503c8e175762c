"""Test the views of a pipeline: schedule, versions, trace and memory, on the emulator and on
processes."""

from __future__ import annotations

import html
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ipu_pipe.errors import BadInput, RunFault
from ipu_pipe.report.analysis.analyze import read_and_analyze
from ipu_pipe.trace.events import find_updates
from tests.support.loops import Loop
from tests.support.processes import run_in_group
from tests.support.runs import assert_same, needs_processes
from tests.support.slow import mark_slow
from tests.test_backend_facts import CountingLoss
from tests.test_pipeline import CASES
from tests.test_pipeline_processes import ON_PROCESSES, take_share
from tests.test_pipeline_state import make_batch, make_pipeline

NAMES = [
    "pipedream",
    "pipemare_warmup",
    "pb_virtual_split",
    "local_greedy",
    "local_sgd_rounds",
    "zbv",
]
ON_TWO = {"backend": "distributed", "backend_args": {"deadline": 60}}


def list_updates(trace: Any, loop: Loop) -> set:
    """Return the updates that have a forward or an update in a loop's trace."""
    events = read_and_analyze(trace.file)[0].events
    passes = events.select(events.is_kind("forward", "update"))
    return set(find_updates(passes, loop.pipe.schedule.accumulate).tolist())


def test_the_versions_of_a_pipeline_are_those_that_it_read() -> None:
    loop = Loop(CASES["pipedream"])
    with pytest.raises(RunFault, match="^(schedule|versions): .*first step"):
        loop.pipe.schedule  # noqa: B018
    # drained after 6 updates
    loop.run(0, 7)
    assert loop.pipe.versions.forward(0, 8)[0].tolist() == [0, 0, 0, 0, 1, 2, 6, 6]


@pytest.mark.parametrize(
    "name", mark_slow([*NAMES, "randomized_pipedream"], lambda name: name == "pipemare_warmup")
)
def test_the_emulators_views_change_nothing(name: str, tmp_path: Path) -> None:
    is_traced = name in NAMES
    plain, loop = Loop(CASES[name]), Loop(CASES[name], trace=range(2, 6) if is_traced else None)
    plain.run(0, 9)
    loop.run(0, 5, drains=False)
    memory = loop.pipe.memory()
    assert [row["index"] for row in memory["stages"]] == [*range(len(loop.pipe.partition))]
    delays = loop.pipe.versions.greatest_lag().tolist()
    assert [row["forward_delay"] for row in memory["stages"]] == delays
    size = sum(p.numel() * p.element_size() for p in loop.model.parameters())
    assert sum(row["weight_bytes"] for row in memory["stages"]) >= size
    assert memory["peak_memory"][0]["weights"] >= size
    assert json.dumps(memory)
    if is_traced:
        state = torch.get_rng_state()
        begun = loop.pipe.trace(tmp_path / "begun")
        assert torch.equal(state, torch.get_rng_state())
        loop.run(5, 9)
        assert begun is not None and begun.analysis["modelled"]
        assert list_updates(begun, loop) == {2, 3, 4}
        assert list_updates(loop.pipe.trace(tmp_path / "done"), loop) == {2, 3, 4, 5}
        drawing = loop.pipe.schedule._repr_html_()
        assert drawing == loop.pipe.versions._repr_html_() and "reads weight version" in drawing
    else:
        loop.run(5, 9)
    assert_same(plain.close().state_dict(), loop.close().state_dict())
    assert plain.losses == loop.losses


def test_a_notebook_shows_the_page_of_a_trace(tmp_path: Path) -> None:
    loop = Loop(CASES["pipedream"], trace=True)
    loop.run(0, 4, drains=False)
    shown = loop.pipe.trace(tmp_path / "new" / "folder")
    assert shown is not None
    page = shown.page.read_text(encoding="utf-8")
    frame = shown._repr_html_()
    content = frame.split('srcdoc="')[1].split('"')[0]
    assert html.unescape(content) == page and "<script" in page and "<" not in content
    # by default each call writes into a new folder
    first, second = loop.pipe.trace(), loop.pipe.trace()
    assert first is not None and second is not None and first.file != second.file
    loop.close()
    with pytest.raises(RunFault, match="closed"):
        loop.pipe.trace()


def test_a_trace_that_was_not_recorded(tmp_path: Path) -> None:
    for wrong in (0.5, range(0), range(-1, 3), range(6, 2, -1), [1, 2]):
        with pytest.raises(BadInput, match="^trace: "):
            Loop(CASES["gpipe"], trace=wrong)
    for trace in (None, False, range(3, 5)):
        loop = Loop(CASES["gpipe"], trace=trace)
        with pytest.raises(RunFault, match="first step"):
            loop.pipe.trace()
        loop.run(0, 2)
        with pytest.raises(BadInput, match="^trace: "):
            loop.pipe.trace(tmp_path)
        assert not list(tmp_path.iterdir())
        # which breaks nothing
        loop.run(2, 3)
        loop.close()


# ---- processes


def compare_shown_traces(rank: int, folder: Path) -> None:
    for name in ("pipedream", "local_sgd_rounds", "zbv"):
        plain = Loop(ON_PROCESSES[name], share=take_share, **ON_TWO)
        plain.run(0, 9)
        expected = plain.close().state_dict()
        loop = Loop(ON_PROCESSES[name], share=take_share, trace=range(2, 6), **ON_TWO)
        loop.run(0, 5, drains=False)
        begun = loop.pipe.trace(folder / name / "begun")
        memory = loop.pipe.memory()
        loop.run(5, 9)
        done = loop.pipe.trace(folder / name / "done")
        assert_same(expected, loop.close().state_dict())
        if rank:
            assert begun is None and done is None and memory == {}
            continue
        assert done is not None and not done.analysis["modelled"]
        assert list_updates(begun, loop) <= {2, 3, 4}, name
        assert list_updates(done, loop) == {2, 3, 4, 5}, name
        assert {device["index"] for device in done.analysis["devices"]} == {0, 1}
        totals = [peaks["total"] for peaks in memory["peak_memory"]]
        assert len(totals) == 2 and min(totals) > 0


@pytest.mark.slow
@needs_processes
def test_the_trace_of_processes_is_measured(tmp_path: Path) -> None:
    run_in_group(2, compare_shown_traces, tmp_path)


def test_a_trace_leaves_the_state_of_the_loss_as_it_is(tmp_path: Path) -> None:
    loss = CountingLoss()
    with make_pipeline("gpipe", loss=loss, trace=range(1)) as pipe:
        pipe.step(*make_batch(0))
        pipe.trace(tmp_path)
        assert loss.calls == pipe.microbatches


def trace_past_a_freeze(rank: int, folder: Path) -> None:
    loop = Loop(ON_PROCESSES["gpipe"], share=take_share, trace=True, **ON_TWO)
    loop.run(0, 2)
    next(loop.model.parameters()).requires_grad_(False)
    loop.run(2, 4)
    trace = loop.pipe.trace(folder)
    loop.close()
    assert trace is None or list_updates(trace, loop) == {0, 1, 2, 3}


@pytest.mark.slow
@needs_processes
def test_stages_that_are_built_again_go_on_with_the_trace(tmp_path: Path) -> None:
    run_in_group(2, trace_past_a_freeze, tmp_path)
