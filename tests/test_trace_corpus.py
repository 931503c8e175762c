"""What was built into recordings of PyTorch's runtime and of loops is what `analyze` names.

The recordings are stored (`tests/support/trace_corpus.py` made them); two are made anew by a slow test.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Dict, Set, Tuple

import numpy as np
import pytest
import torch

from ipu_pipe.report.analysis.analyze import analyze
from ipu_pipe.report.analysis.text import format_analysis
from ipu_pipe.trace.reading import read_trace
from tests.support.runs import needs_processes
from tests.support.trace_corpus import CORPUS, Recording, extract_corpus, record_cases

# what the bottleneck may be called; a row of none has a stage that is no slower than the others
VERDICTS = {
    "stage": {"stage"},
    "replica": {"stage"},
    "link": {"link"},
    "one link": {"link"},
    "data": {"data"},
    "host": {"host"},
    "cores": {"stage", "link", "communication"},
    "none": {"stage"},
}
SPLIT = ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")
SKEW_NS = 1_000_000_000
needs_names = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13),
    reason="dist.record_comm and the names of passes are of torch 2.13",
)
Links = Set[Tuple[int, int]]


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    extract_corpus(folder)
    return folder


def list_pipelines(case: Recording) -> Tuple[Tuple[int, ...], ...]:
    """Return the ranks of each pipeline by their stages."""
    ranks = np.arange(case.ranks).reshape(*case.sizes.values())
    of_pipeline = np.moveaxis(ranks, [*case.sizes].index("pp"), -1).reshape(-1, case.sizes["pp"])
    return tuple(map(tuple, of_pipeline.tolist()))


def list_devices(case: Recording) -> Set[int]:
    """Return the ranks that may be named as the device of the bottleneck."""
    pipelines = list_pipelines(case)
    count = case.sizes["pp"]
    if case.cause in ("stage", "replica"):
        position = case.slow % count
        if case.schedule in SPLIT:
            position = min(case.slow, 2 * count - 1 - case.slow)
        of_stage = {pipeline[position] for pipeline in pipelines}
        return {max(of_stage)} if case.cause == "replica" else of_stage
    if case.cause in ("data", "host"):
        return {pipeline[0] for pipeline in pipelines}
    if case.cause == "one link":
        return {pipeline[-2] for pipeline in pipelines}
    return {rank for pipeline in pipelines for rank in pipeline}


def check_verdict(case: Recording, figures: Dict[str, Any]) -> None:
    worst = figures["bottleneck"]
    assert worst["what"] in VERDICTS[case.cause], worst["why"]
    assert worst["device"] in list_devices(case), worst["why"]
    if case.cause in ("stage", "replica"):
        assert worst["stage"] == case.slow
    if case.cause == "replica":
        assert "replica" in worst["do"]
    if case.cause == "cores":
        assert "share cores" in worst["why"]
    if case.cause == "none":
        assert figures["imbalance"] < 0.2


def list_links(figures: Dict[str, Any]) -> Links:
    return {(link["src"], link["dst"]) for link in figures["links"]}


def list_right_links(case: Recording) -> Links:
    pairs = [pair for pipeline in list_pipelines(case) for pair in zip(pipeline, pipeline[1:])]
    return {*pairs, *((b, a) for a, b in pairs)}


@pytest.mark.parametrize("name", CORPUS)
def test_the_cause_that_was_built_in_is_named(name: str, corpus: Path) -> None:
    case = CORPUS[name]
    figures = analyze(read_trace(corpus / name), name)
    check_verdict(case, figures)
    # Story: the text for people ended in a KeyError where the cause was data or the host.
    text = format_analysis(figures)
    # a fact of all files is one note, and a column without values is left out
    assert text.count("no kernels") == 1 and "latency" not in text and " forward" in text
    assert list_links(figures) == list_right_links(case)
    replicas = len(list_pipelines(case))
    halves = [row["input_gradient_ns"] for row in figures["stages"]]
    assert any(halves) == ("weight gradient" in text) == (case.schedule in SPLIT)
    forwards = [row["microbatches"] for row in figures["stages"]]
    assert forwards == [replicas * 8] * case.sizes["pp"] * case.stages
    assert not any("not known" in note for note in figures["notes"])


@pytest.mark.parametrize("name", CORPUS)
def test_hosts_with_other_clocks_change_no_verdict(name: str, corpus: Path, tmp_path: Path) -> None:
    """The ranks of each place in the pipeline are on a host of their own, whose clock is ahead."""
    case = CORPUS[name]
    for pipeline in list_pipelines(case):
        for position, rank in enumerate(pipeline):
            content = json.loads((corpus / name / f"rank{rank}.json").read_text())
            content["host_name"] = f"host{position}"
            content["baseTimeNanoseconds"] += SKEW_NS * position
            (tmp_path / f"rank{rank}.json").write_text(json.dumps(content))
    figures = analyze(read_trace(tmp_path), name)
    assert figures["span_ns"] < 4 * SKEW_NS / 2
    if case.cause != "cores":
        check_verdict(case, figures)


@pytest.mark.parametrize("name", CORPUS)
def test_without_a_ranks_file_nothing_is_invented(name: str, corpus: Path, tmp_path: Path) -> None:
    """The links are right or absent, and the analysis says that a file is missing."""
    case = CORPUS[name]
    for path in sorted((corpus / name).iterdir())[:-1]:
        (tmp_path / path.name).write_bytes(path.read_bytes())
    figures = analyze(read_trace(tmp_path), name)
    assert list_links(figures) <= list_right_links(case)
    assert any(f"of {case.ranks} ranks" in note for note in figures["notes"])


@needs_processes
@pytest.mark.slow
@needs_names
@pytest.mark.parametrize("name", ["1f1b_pp_dp_stage", "loop_labels_link", "zbv_stage"])
def test_a_recording_made_anew_has_the_same_verdict(name: str, tmp_path: Path) -> None:
    record_cases(tmp_path, {name: CORPUS[name]})
    check_verdict(CORPUS[name], analyze(read_trace(tmp_path / name), name))
