"""The examples run unchanged, in separate processes, with few updates."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, List

import pytest

import ipu_pipe
from tests.support.slow import mark_slow

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
# tests/test_example_loops.py
LOOPS = sorted(EXAMPLES.glob("*_loop.py"))
RUNS = [script for script in sorted(EXAMPLES.glob("*.py")) if script not in LOOPS]


def run_script(words: List[str], folder: Path) -> str:
    """Run Python with these arguments in a separate process; return its standard output."""
    path = os.pathsep.join([str(EXAMPLES.parent), os.environ.get("PYTHONPATH", "")])
    how = {
        "cwd": folder,
        "env": {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        "timeout": 240,
    }
    process = subprocess.run(
        [sys.executable, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **how
    )
    assert process.returncode == 0, process.stderr
    return str(process.stdout)


# on one process and on two, which `make test` runs
QUICK = {"fine_tuning"}


@pytest.mark.parametrize(
    "script", mark_slow(RUNS, lambda script: script.stem in QUICK), ids=lambda script: script.stem
)
def test_an_example_runs(script: Path, tmp_path: Path) -> None:
    """Examples of torchvision and timm run with the tests' torchvision where none can be imported."""
    text, prefix = script.read_text(encoding="utf-8"), []
    if "transformers" in text:
        pytest.importorskip("transformers")
    if "torchvision" in script.stem or "timm" in script.stem:
        if pytest.importorskip("tests.vision_libraries").LACKS_OPERATORS:
            prefix = ["-m", "tests.vision_libraries"]
    if "torchrun " in text.splitlines()[0]:
        prefix = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    printed = run_script([*prefix, str(script), "2"], tmp_path)
    assert "throughput: " in printed
    assert (tmp_path / "runs" / script.stem / "summary.json").is_file()


def read_output(cell: Any, stream: str) -> str:
    """Return the text that a cell printed to a stream."""
    return "".join(
        output["text"] for output in cell.get("outputs", []) if output.get("name") == stream
    )


def run_notebook(
    file: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, first: str = ""
) -> List[Any]:
    """Run a notebook in a folder, after the code `first`; return its cells, whose outputs must be of
    the kinds that are stored: who reads a notebook without running it sees what it does.
    """
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    path = os.pathsep.join([str(EXAMPLES.parent), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    # as a newcomer's, who has no data, and no network
    monkeypatch.setenv("HOME", str(folder / "home"))
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    book = nbformat.read(file, as_version=4)
    stored = [list_kinds(cell) for cell in book.cells]
    book.cells.insert(0, nbformat.v4.new_code_cell(first))
    nbclient.NotebookClient(
        book, timeout=300, resources={"metadata": {"path": str(folder)}}
    ).execute()
    assert [read_output(cell, "stderr") for cell in book.cells] == [""] * len(book.cells)
    assert [list_kinds(cell) for cell in book.cells[1:]] == stored
    return list(book.cells)


def list_kinds(cell: Any) -> List[str]:
    """List what a cell shows: streams and MIME types, each once."""
    outputs = cell.get("outputs", [])
    shown = {kind for output in outputs for kind in output.get("data", [output.get("name")])}
    return sorted(shown)


def list_shown(cells: List[Any], kind: str) -> List[str]:
    """Return the displayed outputs of a MIME type."""
    shown = [output.get("data", {}) for cell in cells for output in cell.get("outputs", [])]
    return [data[kind] for data in shown if kind in data]


@pytest.mark.slow
def test_a_notebook_runs_and_prints_its_progress_as_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    often = "import ipu_pipe.run.progress as p; p.LINE_SECONDS = p.EPOCH_SECONDS = 0.0"
    cells = run_notebook(EXAMPLES / "first_steps.ipynb", tmp_path, monkeypatch, often)
    training = [cell for cell in cells if "throughput: " in read_output(cell, "stdout")]
    assert len(training) == 1
    lines = read_output(training[0], "stdout")
    # 0.1 by chance; two epochs reach at least twice that
    accuracies = re.findall(r"\), test accuracy (\S+)", read_output(cells[-1], "stdout"))
    assert len(accuracies) == 2 and min(map(float, accuracies)) >= 0.2
    assert "\nupdate 1/" in lines and "\r" not in lines and "\x1b" not in lines
    assert list_shown(cells, "image/png")


@pytest.mark.slow
def test_the_notebook_of_a_loop_of_ones_own_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells = run_notebook(EXAMPLES / "own_loop.ipynb", tmp_path, monkeypatch)
    assert len(list_shown(cells, "image/png")) == 2
    schedule, trace, comparison = list_shown(cells, "text/html")
    assert "reads weight version" in schedule and trace.startswith("<iframe")
    assert "Loss against predicted seconds" in comparison
    printed = "".join(read_output(cell, "stdout") for cell in cells)
    assert "pipemare: staleness by stage [8, 7, 6, 5, 4, 3, 2, 1]" in printed
    assert printed.count("largest stable") >= 2
    # 0.1 by chance
    shares = re.findall(r": (\S+) of the training set right", printed)
    assert len(shares) == 2 and min(map(float, shares)) >= 0.6


@pytest.mark.parametrize("file, launcher", [("slurm.sbatch", "srun"), ("poprun.sh", "poprun")])
def test_batch_files_start_tools_train_with_resume(
    file: str, launcher: str, tmp_path: Path
) -> None:
    """The launchers are stand-ins that print their arguments."""
    stand_ins = {launcher: f'echo {launcher} "$@"', "scontrol": "echo node0; seq 100000"}
    for name, script in stand_ins.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    variables = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}", "CONFIG": "my.yaml", "OUT": "out", "HOSTS": "h0,h1", "PARTITION": "p",
        "SERVER": "s", "SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_NAME": "name", "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NODELIST": "node[0-1]", "SLURM_JOB_NUM_NODES": "2", "SLURM_GPUS_ON_NODE": "4", "SLURM_CPUS_PER_TASK": "16",
    }  # fmt: skip

    def run_batch(**changes: str) -> Any:
        words, env = ["bash", str(EXAMPLES / file), "stages=8"], {**variables, **changes}
        return subprocess.run(words, env=env, capture_output=True, text=True, timeout=60)

    process = run_batch()
    assert process.returncode == 0, process.stderr
    parts = ["tools/train.py my.yaml --out out --resume", " stages=8"]
    if launcher == "srun":
        parts += ["--nnodes 2 --nproc_per_node 4 --max_restarts 3", "--rdzv_endpoint node0:24711"]
    assert all(part in process.stdout for part in parts)
    without = run_batch(CONFIG="")
    assert without.returncode != 0 and "CONFIG" in without.stderr and not without.stdout


@pytest.mark.parametrize(
    "file", sorted([*EXAMPLES.glob("*.py"), *EXAMPLES.glob("*.ipynb")]), ids=lambda file: file.name
)
def test_an_example_uses_public_names_alone(file: Path) -> None:
    """Story: the notebook imported inner modules, which may change in any version."""
    code = file.read_text(encoding="utf-8")
    code = code.replace("ipu_pipe.integrations.transformers import PipelineTrainer", "")
    used = set(re.findall(r"\bipu_pipe\.(\w+)", code))
    for names in re.findall(r"from ipu_pipe import (.*)", code):
        used |= set(names.split(", "))
    assert used <= set(ipu_pipe.__all__)
