"""The examples run as they stand, with few updates; loops of one's own run in a plain process, as a user runs them."""

from __future__ import annotations

import difflib
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict, List

import pytest
import torch

from tests.support.runs import assert_same

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
LOOPS = sorted(EXAMPLES.glob("*_loop.py"))
RUNS = [script for script in sorted(EXAMPLES.glob("*.py")) if script not in LOOPS]


def run_as_user(script: Path, folder: Path, ranks: int, *arguments: str) -> str:
    """Run a script in a plain process, or by torchrun on several. Return what it prints."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)] if ranks > 1 else []
    path = os.pathsep.join([str(EXAMPLES.parent), os.environ.get("PYTHONPATH", "")])
    how = {"cwd": folder, "env": {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}, "timeout": 240}
    command = [sys.executable, *launch, str(script), *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **how)  # type: ignore[call-overload]
    assert done.returncode == 0, done.stderr
    return str(done.stdout)


@pytest.mark.parametrize("script", RUNS, ids=lambda script: script.stem)
def test_an_example_runs(script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    pytest.importorskip("tests.third_party")
    monkeypatch.chdir(tmp_path)
    if "torchrun " in script.read_text(encoding="utf-8").splitlines()[0]:
        printed = run_as_user(script, tmp_path, 2, "2")
    else:
        monkeypatch.setattr(sys, "argv", [str(script), "2"])
        runpy.run_path(str(script), run_name="__main__")
        printed = capsys.readouterr().out
    assert "throughput: " in printed
    assert (tmp_path / "runs" / script.stem / "summary.json").is_file()


# ---- loops of one's own


@pytest.mark.parametrize("name", ["plain_loop", "own_loop"])
def test_a_loop_runs(name: str, tmp_path: Path) -> None:
    printed = run_as_user(EXAMPLES / f"{name}.py", tmp_path, 1)
    # 0.1 by chance
    assert printed.startswith("test accuracy ") and float(printed.split()[-1]) > 0.8


def test_accelerate_has_the_same_losses_and_rates_on_two_ranks(tmp_path: Path) -> None:
    """Accelerate's own scheduler steps once for each process, so on two ranks its rates would fall twice as fast."""
    pytest.importorskip("accelerate")
    one, two = (run_as_user(EXAMPLES / "accelerate_loop.py", tmp_path, ranks, "2") for ranks in (1, 2))
    assert one == two
    lines = one.splitlines()
    assert [line.split()[-1] for line in lines[:-1]] == ["0.010000", "0.000000"]
    assert lines[-1].startswith("test accuracy ")


def test_a_loop_of_lightning_runs(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    printed = run_as_user(EXAMPLES / "lightning_loop.py", tmp_path, 1, "60")
    assert "after 60 updates: test accuracy 0." in printed


def read_loop(name: str) -> List[str]:
    """Return the lines of an example after its docstring."""
    return (EXAMPLES / f"{name}.py").read_text(encoding="utf-8").splitlines()[1:]


def test_loops_are_short_and_three_lines_make_a_pipeline() -> None:
    differences = list(difflib.ndiff(read_loop("plain_loop"), read_loop("own_loop")))
    added = [line[2:] for line in differences if line.startswith("+ ") and line[2:] and not line[2:].startswith("import ")]
    assert [line.split("(")[0].strip() for line in added] == ["pipe = ipu_pipe.Pipeline", "pipe.step", "pipe.close"]
    assert len(LOOPS) == 4
    assert [script.name for script in LOOPS if len(script.read_text(encoding="utf-8").splitlines()) > 60] == []


def train_in_place(folder: Path, name: str, changes: Dict[str, str]) -> Dict[str, Any]:
    """Run a loop with some of its text changed, for two epochs. Return its weights."""
    text = "\n".join(read_loop(name))
    for old, new in changes.items():
        assert text.count(old) == 1
        text = text.replace(old, new)
    script = folder / f"{name}.py"
    script.write_text(text.replace("range(epochs)", "range(2)"), encoding="utf-8")
    return dict(runpy.run_path(str(script))["model"].state_dict())


@pytest.mark.parametrize("microbatches", [1, 4])
def test_with_gpipe_the_weights_are_the_plain_loops(
    microbatches: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit; with several microbatches those of a loop that accumulates their gradients in the same order."""
    monkeypatch.setattr(sys, "argv", ["loop"])
    chunks = f"for part, labels_of_part in zip(x.chunk({microbatches}), y.chunk({microbatches})):"
    accumulation = {
        "        loss = cross_entropy(model(x), y)\n": f"        {chunks}\n",
        "        loss.backward()": f"            (cross_entropy(model(part), labels_of_part) / {microbatches}).backward()",
    }
    plain = train_in_place(tmp_path, "plain_loop", accumulation)
    method = {'method="pipemare"': 'method="gpipe"', "microbatches=4": f"microbatches={microbatches}"}
    assert_same(plain, train_in_place(tmp_path, "own_loop", method))
    # with other weights than those of a method that does not flush
    asynchronous = train_in_place(tmp_path, "own_loop", {})
    assert any(not torch.equal(value, asynchronous[name]) for name, value in plain.items())


# ---- notebooks and batch files


def said(cell: Any, stream: str) -> str:
    return "".join(output["text"] for output in cell.get("outputs", []) if output.get("name") == stream)


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*.ipynb")), ids=lambda file: file.stem)
def test_a_notebook_runs_and_its_progress_is_lines(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    path = os.pathsep.join([str(EXAMPLES.parent), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", path)
    book = nbformat.read(file, as_version=4)
    assert all(cell.get("outputs", []) == [] for cell in book.cells), "is kept without outputs"
    often = "import ipu_pipe.run.progress as p; p.LINE_SECONDS = p.EPOCH_SECONDS = 0.0"
    book.cells.insert(0, nbformat.v4.new_code_cell(often))
    nbclient.NotebookClient(book, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    training: List[Any] = [cell for cell in book.cells if "throughput: " in said(cell, "stdout")]
    assert len(training) == 1
    lines = said(training[0], "stdout")
    assert "\nupdate 1/" in lines and "\r" not in lines and "\x1b" not in lines
    assert [said(cell, "stderr") for cell in book.cells] == [""] * len(book.cells)
    assert any("image/png" in output.get("data", {}) for cell in book.cells for output in cell.get("outputs", []))


@pytest.mark.parametrize("file, launcher", [("slurm.sbatch", "srun"), ("poprun.sh", "poprun")])
def test_batch_files_start_tools_train_with_resume(file: str, launcher: str, tmp_path: Path) -> None:
    """The launchers are stand-ins that print what they are asked for."""
    for name, script in ((launcher, f'echo {launcher} "$@"'), ("scontrol", "echo node0; seq 100000")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    variables = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}", "CONFIG": "my.yaml", "OUT": "out", "HOSTS": "h0,h1", "PARTITION": "p",
        "SERVER": "s", "SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_NAME": "name", "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NODELIST": "node[0-1]", "SLURM_JOB_NUM_NODES": "2", "SLURM_GPUS_ON_NODE": "4", "SLURM_CPUS_PER_TASK": "16",
    }  # fmt: skip
    how: Dict[str, Any] = {"capture_output": True, "text": True, "timeout": 60}
    done = subprocess.run(["bash", str(EXAMPLES / file), "stages=8"], env=variables, **how)
    assert done.returncode == 0, done.stderr
    assert "tools/train.py my.yaml --out out --resume" in done.stdout and "stages=8" in done.stdout.split()
    if launcher == "srun":
        assert "--nnodes 2 --nproc_per_node 4 --max_restarts 3" in done.stdout
        assert "--rdzv_endpoint node0:24711 --rdzv_id 4711" in done.stdout
    without = subprocess.run(["bash", str(EXAMPLES / file)], env={**variables, "CONFIG": ""}, **how)
    assert without.returncode != 0 and "CONFIG" in without.stderr and not without.stdout
