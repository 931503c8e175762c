"""What the wheel holds and how its commands are called; tests/wheel_commands.py runs them in an environment of their own."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ipu_pipe import shipped
from ipu_pipe.errors import BadInput
from ipu_pipe.job.factories import resolve_entry

ROOT = Path(__file__).resolve().parents[1]


def test_the_wheel_has_all_folders() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    listed = text[text.index("packages = [") : text.index("]", text.index("packages = ["))]
    folders = {path.parent for path in (ROOT / "ipu_pipe").rglob("*.py")}
    folders |= {path.parent for path in (ROOT / "configs").rglob("*.yaml")} | {ROOT / "models"}
    names = {".".join(folder.relative_to(ROOT).parts) for folder in folders}
    names = {name if name.startswith("ipu_pipe") else f"ipu_pipe.{name}" for name in names}
    assert {line.strip().strip('",') for line in listed.splitlines()[1:]} - {""} == names


def test_the_description_on_an_index_leads_nowhere_into_the_clone() -> None:
    """Story: README was the description as it is; on an index its picture and its links into docs/ were broken."""
    pytest.importorskip("setuptools")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    text = runpy.run_path(str(ROOT / "setup.py"))["describe"]()
    links = re.findall(r"\]\(([^)]*)\)", text)
    assert all(link.startswith(("https:", "#")) for link in links), links
    assert "![" not in text and "](docs/" in readme
    # nothing else is lost
    without_targets = re.sub(r"!\[[^]]*\]\([^)]*\)|(?<=\])\([^)]*\)", "", readme)
    assert re.findall(r"\w+", text) == re.findall(r"\w+", without_targets)


def test_examples_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    digits = ROOT / "configs" / "mlp_digits.yaml"
    assert shipped.find_config("configs/mlp_digits.yaml") == shipped.find_config("mlp_digits") == digits
    assert shipped.find_config("configs/local/resnet20_greedy.yaml").is_file()
    assert shipped.find_config("configs/none.yaml") == Path("configs/none.yaml")
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "mlp_digits.yaml").write_text("mine: 1")
    assert shipped.find_config("configs/mlp_digits.yaml") == Path("configs/mlp_digits.yaml")


@pytest.mark.parametrize("called, said", [
    ("tools/train.py", "run: python tools/fetch_data.py x; tools/train.py"),
    ("/usr/bin/ipu-pipe", "run: ipu-pipe fetch-data x; ipu-pipe train"),
    ("C:/bin/ipu-pipe.exe", "run: ipu-pipe fetch-data x; ipu-pipe train"),
    ("/a/ipu_pipe/__main__.py", "run: python -m ipu_pipe fetch-data x; python -m ipu_pipe train"),
    ("/a/pytest/__main__.py", "run: python tools/fetch_data.py x; tools/train.py"),
])  # fmt: skip
def test_commands_are_named_as_they_are_called(called: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [called])
    assert shipped.name_commands("run: python tools/fetch_data.py x; tools/train.py") == said


def _without_models(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As where the library is installed and the user's folder has no models."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "models"]:
        monkeypatch.delitem(sys.modules, name)
    paths = [path for path in sys.path if not (Path(path or ".") / "models").is_dir()]
    monkeypatch.setattr(sys, "path", paths)
    monkeypatch.setattr(sys, "meta_path", [f for f in sys.meta_path if "editable" not in type(f).__module__ + str(f)])
    monkeypatch.chdir(tmp_path)


def test_models_come_with_the_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _without_models(monkeypatch, tmp_path)
    package: Any = ModuleType("ipu_pipe.models")
    package.__path__ = [str(ROOT / "models")]
    monkeypatch.setitem(sys.modules, "ipu_pipe.models", package)
    assert resolve_entry("models.mlp:mlp", "model.entry").__module__ == "ipu_pipe.models.mlp"
    with pytest.raises(BadInput, match="no module models.none in the current folder"):
        resolve_entry("models.none:mlp", "model.entry")


def test_the_users_own_models_come_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _without_models(monkeypatch, tmp_path)
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "mlp.py").write_text("def mlp(): return 'mine'\n")
    assert resolve_entry("models.mlp:mlp", "model.entry")() == "mine"
    for name in ("models", "models.mlp"):  # before the others come back
        del sys.modules[name]
