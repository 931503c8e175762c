"""Doors through which a file could run code: a git repository around a run, and the modules that a config names."""

from __future__ import annotations

import importlib
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Dict, Set

import pytest
import torch

import ipu_pipe
from ipu_pipe.cli import COMMANDS
from ipu_pipe.report.provenance import find_commit
from tests.command_line import run_here
from tests.support.runs import ROOT
from tests.support.slow import mark_slow

GIT = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-c", "protocol.file.allow=always"]


def run_git(folder: Path, *command: str) -> str:
    """Run git in `folder` and return its output."""
    finished = subprocess.run(
        [*GIT, *command], cwd=folder, check=True, capture_output=True, text=True
    )
    return finished.stdout.strip()


def make_repository(folder: Path) -> None:
    """Make a repository with one commit of two files."""
    folder.mkdir()
    (folder / "a").write_text("1\n")
    (folder / "b").write_text("2\n")
    for command in ("init -q -b work", "add .", "commit -qm first"):
        run_git(folder, *command.split())


def write_program(file: Path, marker: Path) -> None:
    """Write a hostile program, which leaves `marker`."""
    file.parent.mkdir(exist_ok=True)
    file.write_text(f"#!/bin/sh\n: > {shlex.quote(str(marker))}\nexit 1\n")
    file.chmod(0o755)


# door -> git commands that put PROGRAM behind it
DOORS = {
    "fsmonitor": ["config core.fsmonitor PROGRAM"],
    "of a worktree": ["config extensions.worktreeConfig true", "config --worktree core.fsmonitor PROGRAM"],
    "hook": [],
    "attributes": ["config filter.x.clean PROGRAM"],
    # cannot be overridden by git -c
    "odd name": ["config filter.a=b.clean PROGRAM"],
    "transport": [
        "config core.repositoryFormatVersion 1", "config extensions.partialClone origin", "config remote.origin.url ext::PROGRAM",
        "config remote.origin.promisor true", "config protocol.ext.allow always", "update-index a",
    ],
    "submodule": ["submodule --quiet add INNER inner", "commit -qm second", "-C inner config core.fsmonitor PROGRAM"],
}  # fmt: skip


def open_door(door: str, folder: Path, program: Path, marker: Path) -> None:
    """Put the program behind a door of the repository."""
    if door == "submodule":
        make_repository(folder.with_name("inner"))
    elif door == "hook":
        write_program(folder / ".git" / "hooks" / "post-index-change", marker)
    elif door in ("attributes", "odd name"):
        name = "x" if door == "attributes" else "a=b"
        (folder / ".gitattributes").write_text(f"* filter={name}\n")
    elif door == "transport":
        # a partial clone fetches a missing object by a program
        tree = run_git(folder, "rev-parse", "HEAD^{tree}")
        (folder / ".git" / "objects" / tree[:2] / tree[2:]).unlink()
        # the index stores the tree's name, so that no tree would be read
        (folder / "a").write_text("3\n")
    for command in DOORS[door]:
        words = command.replace("PROGRAM", str(program)).replace("INNER", "../inner").split()
        run_git(folder, *words)


@pytest.mark.parametrize("door", DOORS)
def test_the_record_runs_no_program_of_the_repository(door: str, tmp_path: Path) -> None:
    """Story: a run in a folder with a hostile .git/config ran the program of core.fsmonitor, since it called `git status`."""
    folder, marker = tmp_path / "repository", tmp_path / "ran"
    make_repository(folder)
    write_program(tmp_path / "hostile", marker)
    open_door(door, folder, tmp_path / "hostile", marker)
    commit = run_git(folder, "rev-parse", "HEAD")
    marker.unlink() if marker.exists() else None

    def change_times() -> None:
        # git reads the content of files with other times, through filters
        for path in (folder / "a", folder / "b"):
            os.utime(path, (1_000_000_000, 1_000_000_000))

    change_times()
    record = find_commit(folder)
    assert not marker.exists()
    assert record is not None and record["commit"] == commit
    assert record["dirty"] is (None if door == "transport" else False)
    # the door works: git itself runs the program
    change_times()
    subprocess.run(["git", "status", "--porcelain"], cwd=folder, capture_output=True, check=False)
    assert marker.exists()


SETTINGS = ["core.fileMode true", "core.autocrlf true", "core.fileMode false", "core.eol crlf"]


@pytest.mark.parametrize("setting", mark_slow(SETTINGS, SETTINGS[0].__eq__))
def test_the_settings_of_a_repository_decide_what_has_changed(setting: str, tmp_path: Path) -> None:
    """Check the answer against `git status` in the repository, for every setting on which it depends."""
    folder = tmp_path / "r"
    make_repository(folder)
    run_git(folder, "config", *setting.split())
    answers = []

    def compare() -> None:
        commit = find_commit(folder)
        assert commit is not None
        status = run_git(folder, "status", "--porcelain", "--untracked-files=no")
        assert commit["dirty"] == bool(status)
        answers.append(commit["dirty"])

    compare()
    (folder / ".gitattributes").write_text("a text\n")
    (folder / "a").write_bytes(b"1\r\n")
    compare()
    run_git(folder, "checkout", "a")
    (folder / "a").chmod(0o755)
    compare()
    (folder / "b").write_text("other\n")
    compare()
    assert answers[::3] == [False, True]


def test_a_setting_cannot_bring_in_another(tmp_path: Path) -> None:
    """The value of a copied setting is text from the repository, which may contain a line break."""
    folder, marker = tmp_path / "r", tmp_path / "ran"
    make_repository(folder)
    write_program(tmp_path / "hostile", marker)
    (folder / ".gitattributes").write_text("* filter=x\n")
    run_git(folder, "config", "core.eol", f'lf\n[filter "x"]\nclean = {tmp_path / "hostile"}')
    (folder / "a").write_text("3\n")
    assert find_commit(folder) == {
        "repository": str(folder),
        "commit": run_git(folder, "rev-parse", "HEAD"),
        "dirty": True,
    }
    assert not marker.exists()


# ---- a config's modules are imported

# The modules of a config's keys: each writes a file when it is imported, and its `make` is the value of its key.
MODULES = {
    "model.entry": "from models.mlp import mlp as make",
    "model.output": "def make(output): return output",
    "data.name": "from ipu_pipe.data import load_data\ndef make(**settings): return load_data('digits')",
    "loss": "from torch.nn.functional import cross_entropy as make",
    "loss_weight": "def make(y): return float(len(y))",
    "metrics": "def make(output, y): return 0.5",
    "callbacks": "import ipu_pipe\nclass make(ipu_pipe.Callback): pass",
    "optimizer.name": "from torch.optim import SGD as make",
    "lr_schedule.name": "from torch.optim.lr_scheduler import ConstantLR as make",
    "method_args.head": "from torch import nn\ndef make(x, output): return nn.Linear(x.shape[1], output.shape[1])",
}
CONFIG = """
model: {entry: "model_entry:make", args: {inputs: 64, width: 16, layers: 4, classes: 10}, output: OUTPUT}
data: {name: "data_name:make"}
loss: "loss:make"
loss_weight: "loss_weight:make"
metrics: ["metrics:make"]
callbacks: ["callbacks:make"]
optimizer: {name: "optimizer_name:make", lr: 0.1}
lr_schedule: {name: "lr_schedule_name:make"}
method: METHOD
method_args: {head: HEAD}
stages: 2
micro_batch_size: 16
gradient_accumulation: 2
steps: 2
evaluate: null
"""
# row of the table in docs/configuration.md, "A config is code" -> a command line
LINES = {
    "`train CONFIG`": "train c.yaml --out again --overwrite --quiet",
    "`train CONFIG --dry-run`": "train c.yaml --dry-run",
    "`collect CONFIG`": "collect c.yaml --methods METHOD --steps 0 --out compared --overwrite",
    "`compare CONFIG`": "compare c.yaml --methods METHOD --seeds 1 --rates 1 --set callbacks=[]",
    "`train CONFIG --evaluate PATH`": "train c.yaml --evaluate run",
    "`stability CONFIG`": "stability c.yaml --curvature 1",
    "`plan CONFIG`": "plan c.yaml --hardware v100x8",
    "`rehearse CONFIG`": "rehearse c.yaml",
    "`export RUN --to FOLDER`": "export run --to folder",
    "`export RUN --to FILE.safetensors`": "export run --to METHOD.safetensors",
    "`analyze RUN`": "analyze run",
}


def read_documented_imports() -> Dict[str, Set[str]]:
    """Return the keys whose modules each command imports, by the documentation."""
    text = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    section = text.partition("## A config is code\n")[2].partition("\n## ")[0]
    rows = [line.split("|")[1:3] for line in section.splitlines() if line.startswith("| `")]
    return {
        command: set(re.findall(r"`([a-z_.]+)`", keys))
        for commands, keys in rows
        for command in re.findall("`[^`]+`", commands)
    }


# no config has all keys, since a method with heads refuses a function for the output
VARIANTS = (
    {"METHOD": "gpipe", "OUTPUT": '"model_output:make"', "HEAD": "null"},
    {"METHOD": "local_greedy", "OUTPUT": "null", "HEAD": '"method_args_head:make"'},
)


def test_commands_import_the_documented_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run's folder holds a config, and `--dry-run` builds the model: these are doors, too."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    modules = {key: key.replace(".", "_") for key in MODULES}
    for key, text in MODULES.items():
        (tmp_path / f"{modules[key]}.py").write_text(
            f"open('imported_{key}', 'w').close()\n{text}\n"
        )
    importlib.invalidate_caches()

    def list_imported() -> Set[str]:
        """Return the keys whose modules were imported since the last call."""
        for name in modules.values():
            sys.modules.pop(name, None)
        files = list(tmp_path.glob("imported_*"))
        for file in files:
            file.unlink()
        return {file.name.partition("_")[2] for file in files}

    imported = {
        "`predict(RUN, ...)`": set(),
        **{row: set() for row in LINES},
    }
    for values in VARIANTS:
        text = CONFIG
        for name, value in values.items():
            text = text.replace(name, value)
        (tmp_path / "c.yaml").write_text(text)
        config = ipu_pipe.load_config("c.yaml")
        assert list_imported() == set()
        ipu_pipe.train(config, "run", quiet=True, overwrite=True)
        list_imported()
        ipu_pipe.predict("run", torch.zeros(2, 64))
        imported["`predict(RUN, ...)`"] |= list_imported()
        for row, line in LINES.items():
            command, *arguments = line.replace("METHOD", values["METHOD"]).split()
            module = importlib.import_module(f"ipu_pipe.cli.{command}")
            result = run_here(module, *arguments, monkeypatch=monkeypatch, capsys=capsys)
            # this model has no save_pretrained, and local methods have no delay to examine
            refusals = ("export run --to folder", "stability c.yaml --curvature 1")
            is_refused = line in refusals[: 1 + (values["METHOD"] == "local_greedy")]
            assert result.returncode == (2 if is_refused else 0), result
            imported[row] |= list_imported()
    assert imported == read_documented_imports()


def name_command(row: str) -> str:
    """Return the command of a row of the table, as its module is named."""
    return re.split(r"[^\w-]", row.strip("`"))[0].replace("-", "_")


def test_every_command_that_reads_a_config_is_tried() -> None:
    """Story: `rehearse` was added to the commands, and neither list had it."""
    reading = set()
    for name in COMMANDS:
        module = importlib.import_module(f"ipu_pipe.cli.{name}")
        # a run's folder holds a config
        if {"config", "run"} & set(module.main.make_parser().list_positional()):
            reading.add(name)
    assert set(map(name_command, LINES)) == reading


def test_readme_names_the_commands_that_import() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    importing, _, harmless = (
        readme.partition("A config names code to import")[2].partition("\n\n")[0].partition(". ")
    )
    for row, keys in read_documented_imports().items():
        assert f"`{name_command(row)}" in (importing if keys else harmless), row
    assert "--dry-run" in importing


def test_the_page_lists_every_command() -> None:
    text = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    section = text.partition("## Commands\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^- (`[\w-]+`): ", section, re.MULTILINE)
    assert set(map(name_command, rows)) == set(COMMANDS)
