"""Test the views of a pipeline: schedule, versions, trace and memory, on the emulator and on
processes."""

from __future__ import annotations

import html
import json
from pathlib import Path
from typing import Any, Dict

import pytest
import torch

import ipu_pipe
from ipu_pipe.errors import BadInput, RunFault
from ipu_pipe.report.analysis.analyze import read_and_analyze
from ipu_pipe.trace.events import find_updates
from tests.support.loops import Loop
from tests.support.processes import run_in_group
from tests.support.runs import assert_same, needs_processes
from tests.test_pipeline import CASES
from tests.test_pipeline_processes import ON_PROCESSES, take_share

NAMES = [
    "pipedream",
    "pipemare_warmup",
    "pb_virtual_split",
    "local_greedy",
    "local_sgd_rounds",
    "zbv",
]


def list_updates(file: Path, accumulate: int) -> set:
    """Return the updates that have a forward or an update in a trace."""
    trace, _ = read_and_analyze(file)
    events = trace.events.select(trace.events.is_kind("forward", "update"))
    return set(find_updates(events, accumulate).tolist())


@pytest.mark.parametrize("name", NAMES)
def test_every_method_draws_its_schedule_and_versions(name: str) -> None:
    loop = Loop(CASES[name])
    with pytest.raises(RunFault, match="^(schedule|versions): .*first step"):
        loop.pipe.schedule  # noqa: B018
    loop.run(0, 7)
    if name == "pipedream":
        # drained after 6 updates
        assert loop.pipe.versions.forward(0, 8)[0].tolist() == [0, 0, 0, 0, 1, 2, 6, 6]
    drawing = loop.pipe.schedule._repr_html_()
    assert drawing == loop.pipe.versions._repr_html_() and "reads weight version" in drawing
    assert repr(loop.pipe.versions).startswith(
        f"{CASES[name].method}: {len(loop.pipe.partition)} stages"
    )
    loop.close()


@pytest.mark.parametrize("name", NAMES)
def test_the_emulators_trace_is_modelled_and_changes_nothing(name: str, tmp_path: Path) -> None:
    plain, loop = Loop(CASES[name]), Loop(CASES[name], trace=range(2, 6))
    plain.run(0, 9)
    loop.run(0, 5, drains=False)
    state = torch.get_rng_state()
    shown = loop.pipe.trace(tmp_path / "begun")
    assert torch.equal(state, torch.get_rng_state())
    loop.run(5, 9)
    assert shown is not None and shown.analysis["modelled"]
    last = loop.pipe.trace(tmp_path / "done")
    assert last is not None
    accumulate = loop.pipe.schedule.accumulate
    assert list_updates(shown.file, accumulate) == {2, 3, 4}
    assert list_updates(last.file, accumulate) == {2, 3, 4, 5}
    assert "forward" in loop.pipe.schedule._repr_html_()
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
    assert json.dumps(shown.analysis)
    assert str(shown.analysis["devices"][0]["index"]) in repr(shown)
    # by default each call writes into a new folder
    first, second = loop.pipe.trace(), loop.pipe.trace()
    assert first is not None and second is not None and first.file != second.file
    assert ipu_pipe.analyze_run(first.file)["method"] == "pipedream"
    loop.close()
    with pytest.raises(RunFault, match="closed"):
        loop.pipe.trace()


def test_a_trace_that_was_not_recorded(tmp_path: Path) -> None:
    for wrong in (0.5, range(0), range(5, 2), range(-1, 3), range(6, 2, -1), [1, 2]):
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


@pytest.mark.parametrize("name", [*NAMES, "randomized_pipedream"])
def test_memory_is_planned_for_every_method(name: str) -> None:
    loop, other = Loop(CASES[name]), Loop(CASES[name])
    for each_loop in (loop, other):
        each_loop.run(0, 3, drains=False)
    memory = loop.pipe.memory()
    assert [row["index"] for row in memory["stages"]] == [*range(len(loop.pipe.partition))]
    delays = loop.pipe.versions.greatest_lag().tolist()
    assert [row["forward_delay"] for row in memory["stages"]] == delays
    size = sum(p.numel() * p.element_size() for p in loop.model.parameters())
    assert sum(row["weight_bytes"] for row in memory["stages"]) >= size
    assert memory["peak_memory"][0]["weights"] >= size
    assert json.dumps(memory)
    for each_loop in (loop, other):
        each_loop.run(3, 5, drains=False)
    assert_same(other.close().state_dict(), loop.close().state_dict())


# ---- processes


def compare_shown_traces(rank: int, folder: Path) -> None:
    for name in ("pipedream", "local_sgd_rounds", "zbv"):
        case = ON_PROCESSES[name]
        keys: Dict[str, Any] = {"backend": "distributed", "backend_args": {"deadline": 60}}
        plain = Loop(case, share=take_share, **keys)
        plain.run(0, 9)
        expected = plain.close().state_dict()
        loop = Loop(case, share=take_share, trace=range(2, 6), **keys)
        loop.run(0, 5, drains=False)
        begun = loop.pipe.trace(folder / name / "begun")
        memory = loop.pipe.memory()
        loop.run(5, 9)
        done = loop.pipe.trace(folder / name / "done")
        accumulate = loop.pipe.schedule.accumulate
        assert "reads weight version" in loop.pipe.schedule._repr_html_()
        assert_same(expected, loop.close().state_dict())
        if rank:
            assert begun is None and done is None and memory == {}
            continue
        assert begun is not None and done is not None
        assert not done.analysis["modelled"]
        assert list_updates(begun.file, accumulate) <= {2, 3, 4}, name
        assert list_updates(done.file, accumulate) == {2, 3, 4, 5}, name
        assert {device["index"] for device in done.analysis["devices"]} == {0, 1}
        assert len(memory["peak_memory"]) == 2 and all(
            peaks["total"] > 0 for peaks in memory["peak_memory"]
        )
        assert "iframe" in done._repr_html_()


@pytest.mark.slow
@needs_processes
def test_the_trace_of_processes_is_measured(tmp_path: Path) -> None:
    run_in_group(2, compare_shown_traces, tmp_path)


class _CountingLoss(torch.nn.Module):
    """Mean squared error, divided by the number of its calls."""

    calls = 0

    def forward(self, output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return (output - y).square().mean() / self.calls


def test_a_trace_leaves_the_state_of_the_loss_as_it_is(tmp_path: Path) -> None:
    model, loss = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)), _CountingLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pipe = ipu_pipe.Pipeline(
        model, loss, optimizer, "gpipe", stages=2, microbatches=1, trace=range(1)
    )
    pipe.step(torch.ones(2, 2), torch.zeros(2, 2))
    pipe.trace(tmp_path)
    assert loss.calls == 1
    pipe.close()


def trace_past_a_freeze(rank: int, folder: Path) -> None:
    keys: Dict[str, Any] = {"backend": "distributed", "backend_args": {"deadline": 60}}
    loop = Loop(ON_PROCESSES["gpipe"], share=take_share, trace=True, **keys)
    loop.run(0, 2)
    next(loop.model.parameters()).requires_grad_(False)
    loop.run(2, 4)
    trace = loop.pipe.trace(folder)
    accumulate = loop.pipe.schedule.accumulate
    loop.close()
    assert trace is None or list_updates(trace.file, accumulate) == {0, 1, 2, 3}


@pytest.mark.slow
@needs_processes
def test_stages_that_are_built_again_go_on_with_the_trace(tmp_path: Path) -> None:
    run_in_group(2, trace_past_a_freeze, tmp_path)
