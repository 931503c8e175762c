"""Test what the wheel contains and how its commands are named; tests/wheel_commands.py runs them
in an environment of their own."""

from __future__ import annotations

import itertools
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ipu_pipe import shipped
from ipu_pipe.cli import examples as examples_command
from ipu_pipe.errors import BadInput
from ipu_pipe.job.factories import resolve_entry
from tests.command_line import run_here
from tests.support.packages import write_broken_torchvision

ROOT = Path(__file__).resolve().parents[1]


def test_the_wheel_has_all_folders() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    (listed,) = re.findall(r"^packages = \[(.*?)\]", text, re.MULTILINE | re.DOTALL)
    files = [*(ROOT / "ipu_pipe").rglob("*.py"), *(ROOT / "configs").rglob("*.yaml")]
    folders = {file.parent for file in files} | {ROOT / "models", ROOT / "examples"}
    names = {".".join(folder.relative_to(ROOT).parts) for folder in folders}
    names = {name if name.startswith("ipu_pipe") else f"ipu_pipe.{name}" for name in names}
    assert set(re.findall(r'"([^"]+)"', listed)) == names


def test_the_description_on_an_index_leads_nowhere_into_the_clone() -> None:
    """The description for a package index has no links into the clone. Story: it was README as
    it is, with a broken picture and broken links into docs/."""
    pytest.importorskip("setuptools")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    text = runpy.run_path(str(ROOT / "setup.py"))["describe"]()
    links = re.findall(r"\]\(([^)]*)\)", text)
    assert all(link.startswith(("https:", "#")) for link in links), links
    assert "![" not in text and "](docs/" in readme
    # nothing else is lost
    without_targets = re.sub(r"!\[[^]]*\]\([^)]*\)|(?<=\])\((?!https:|#)[^)]*\)", "", readme)
    assert re.findall(r"\w+", text) == re.findall(r"\w+", without_targets)


def test_the_examples_are_listed_and_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def call(*words: Any) -> Any:
        return run_here(examples_command, *words, monkeypatch=monkeypatch, capsys=capsys)

    names = {file.name for file in (ROOT / "examples").iterdir() if file.is_file()}
    # each with a sentence
    assert {line.split(None, 1)[0] for line in call().stdout.splitlines()} == names
    copy = ["--copy", tmp_path / "mine"]
    assert call(*copy).returncode == 0
    assert {file.name for file in (tmp_path / "mine").iterdir()} == names
    assert call(*copy).stderr.startswith("error: --copy: ")
    monkeypatch.setattr(shipped, "PACKAGE", tmp_path / "nowhere" / "ipu_pipe")
    assert "this installation lacks them" in call().stderr
    # every kind of file is in the wheel
    data = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (patterns,) = re.findall(r'^"ipu_pipe.examples" = \[(.*)\]$', data, re.MULTILINE)
    kinds = {f".{kind}" for kind in re.findall(r"\*\.(\w+)", patterns)} | {".py"}
    assert {Path(name).suffix for name in names} == kinds == {*examples_command.KINDS}


def test_examples_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("configs/mlp_digits.yaml", "mlp_digits"):
        assert shipped.find_config(name) == ROOT / "configs" / "mlp_digits.yaml"
    assert shipped.find_config("configs/local/resnet20_greedy.yaml").is_file()
    assert shipped.find_config("configs/none.yaml") == Path("configs/none.yaml")
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "mlp_digits.yaml").write_text("mine: 1")
    assert shipped.find_config("configs/mlp_digits.yaml") == Path("configs/mlp_digits.yaml")


TRAIN = "run: python tools/fetch_data.py x; tools/train.py"


@pytest.mark.parametrize("command, expected", [
    ("tools/train.py", TRAIN), ("/a/pytest/__main__.py", TRAIN),
    ("C:/bin/ipu-pipe.exe", "run: ipu-pipe fetch-data x; ipu-pipe train"),
    ("/a/ipu_pipe/__main__.py", "run: python -m ipu_pipe fetch-data x; python -m ipu_pipe train"),
])  # fmt: skip
def test_commands_are_named_as_they_are_called(
    command: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [command])
    assert shipped.name_commands(TRAIN) == expected


def test_torchrun_starts_the_module_and_tools_of_the_clone_keep_their_names() -> None:
    """Stories: `torchrun --nproc_per_node 2 ipu-pipe train`, which finds no file ipu-pipe, and
    `ipu-pipe bench`, a command that does not exist."""
    text = "torchrun --nproc_per_node 2 tools/train.py a.yaml, or python tools/train.py a.yaml"
    expected = "torchrun --nproc_per_node 2 -m ipu_pipe train a.yaml, or ipu-pipe train a.yaml"
    of_clone = ", python tools/bench.py, tools/reproduce.py NAME"
    assert shipped.name_commands(text + of_clone, "ipu-pipe") == expected + of_clone


def hide_models(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Make `models` importable neither from the clone nor from the user's folder, as after an
    installation."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "models"]:
        monkeypatch.delitem(sys.modules, name)
    paths = [path for path in sys.path if not (Path(path or ".") / "models").is_dir()]
    monkeypatch.setattr(sys, "path", paths)
    monkeypatch.setattr(
        sys,
        "meta_path",
        [f for f in sys.meta_path if "editable" not in type(f).__module__ + str(f)],
    )
    monkeypatch.chdir(tmp_path)


def test_models_come_with_the_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hide_models(monkeypatch, tmp_path)
    package = ModuleType("ipu_pipe.models")
    package.__path__ = [str(ROOT / "models")]
    monkeypatch.setitem(sys.modules, "ipu_pipe.models", package)
    for name in ("mlp", "convnet"):  # the second one imports another model
        made = resolve_entry(f"models.{name}:{name}", "model.entry")
        assert made.__module__ == f"ipu_pipe.models.{name}"
    with pytest.raises(BadInput, match="no module models.none in the current folder"):
        resolve_entry("models.none:mlp", "model.entry")


def test_the_users_own_models_come_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hide_models(monkeypatch, tmp_path)
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "mlp.py").write_text("def mlp(): return 'mine'\n")
    assert resolve_entry("models.mlp:mlp", "model.entry")() == "mine"
    for name in ("models", "models.mlp"):  # before the others come back
        del sys.modules[name]


def run_torchvision_check(environment: Path, packages: Path) -> str:
    """Run tools/check_torchvision.py with `packages` before the installed ones, and return its
    output."""
    script = str(ROOT / "tools" / "check_torchvision.py")
    code = f"import runpy, sys; sys.prefix = {str(environment)!r}; runpy.run_path({script!r}, run_name='__main__')"
    variables = {**os.environ, "PYTHONPATH": str(packages)}
    return subprocess.check_output([sys.executable, "-c", code], env=variables, text=True)


def test_an_environment_has_no_torchvision_that_cannot_be_imported(tmp_path: Path) -> None:
    packages = tmp_path / "packages"
    packages.mkdir()
    for _ in range(2):  # an environment is installed again
        write_broken_torchvision(packages)
        (line,) = run_torchvision_check(tmp_path, packages).splitlines()
        assert "torchvision 0.1.2" in line and "operator torchvision::nms does not exist" in line
        assert list(packages.iterdir()) == []
        moved = {path.name for path in (tmp_path / "torchvision_aside").iterdir()}
        assert moved == {"torchvision", "torchvision-0.1.2.dist-info"}
    # one that can be imported stays
    write_broken_torchvision(packages)
    (packages / "torchvision" / "__init__.py").write_text("")
    assert run_torchvision_check(tmp_path, packages) == ""
    assert (packages / "torchvision").is_dir()


@pytest.mark.parametrize("name", ["py310-torch2.13", "py311-torch2.13"])
def test_readme_names_the_pair_that_is_tested(name: str) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    tested = (ROOT / "constraints" / f"{name}.txt").read_text().splitlines()
    pair = re.findall(r"pip install (torch==\S+) (torchvision==\S+) --index-url", readme)
    assert pair == [tuple(line for line in tested if line.startswith(("torch==", "torchvision==")))]


def test_ci_runs_as_on_a_machine_that_was_never_used(tmp_path: Path) -> None:
    """CI runs with an empty home, cache and temporary folder. Story: tests read a text in the
    cache of the machine that CI ran on, and failed on every other one."""
    pip, npm, stand_in = (tmp_path / x for x in (".config/pip/pip.conf", ".npmrc", "make"))
    pip.parent.mkdir(parents=True)
    for file in (pip, npm):
        file.write_text("")
    stand_in.write_text('#!/bin/sh\nenv\nls -A "$HOME" "$XDG_CACHE_HOME" "$TMPDIR"\n')
    stand_in.chmod(0o755)
    home = dict.fromkeys(("HOME", "TMPDIR", "IPU_PIPE_DATA", "IPU_PIPE_INTERRUPTS"), str(tmp_path))
    variables = {**home, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYENV_ROOT": "set"}
    words = ["bash", str(ROOT / ".ci" / "run")]
    lines = subprocess.check_output(words, env=variables, text=True).splitlines()
    environment = dict(line.split("=", 1) for line in lines if "=" in line)
    assert not [name for name in environment if name.startswith("IPU_PIPE_")]
    kept = {"PIP_CONFIG_FILE": str(pip), "NPM_CONFIG_USERCONFIG": str(npm), "PYENV_ROOT": "set"}
    assert kept.items() <= environment.items()
    folders = {environment[name] for name in ("HOME", "XDG_CACHE_HOME", "TMPDIR")}
    # each is empty, another one, and gone afterwards
    assert {line for line in lines if line and "=" not in line} == {f"{x}:" for x in folders}
    assert str(tmp_path) not in folders and not any(Path(folder).exists() for folder in folders)


def test_every_test_is_run_by_make_test_or_by_make_test_slow() -> None:
    """Each test that is not nightly runs in exactly one of `make test` and `make test-slow`, and CI runs both."""
    texts = {name: (ROOT / name).read_text() for name in ("Makefile", "pyproject.toml", ".ci/run")}
    (default,) = re.findall(r"^addopts = .* -m '([^']*)'", texts["pyproject.toml"], re.MULTILINE)
    pattern = r"^(test[-a-z]*): install\n\t\$\(PYTEST\)(?: -m '([^']*)')?(?: --durations \d+)?$"
    chosen = dict(re.findall(pattern, texts["Makefile"], re.MULTILINE))
    assert chosen.keys() == {"test", "test-slow", "test-all"}
    for slow, nightly, browser in itertools.product((False, True), repeat=3):
        # what is nightly is slow, too
        marks = {"slow": slow or nightly, "nightly": nightly, "browser": browser}
        runs = {target: eval(marked or default, {}, marks) for target, marked in chosen.items()}
        assert runs["test-all"] == (not browser)
        assert runs["test"] + runs["test-slow"] == (not browser and not nightly)
    in_ci = re.findall(r"^ *make (test[-a-z]*)", texts[".ci/run"], re.MULTILINE)
    assert in_ci == ["test", "test-slow"]
