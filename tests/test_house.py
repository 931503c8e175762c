"""The structure of the library: a folder imports only from those above it, and there is no import circle.

Imports are read from the source, including those inside functions and those for type checkers alone.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path
from typing import Dict, List, Set, Tuple

import pytest
from typing_extensions import get_args

from ipu_pipe.backends.table import BACKENDS
from ipu_pipe.config.backend_facts import BACKEND_FACTS
from ipu_pipe.config.schema import BackendConfig
from tests.house import (
    PACKAGE,
    ROOT,
    Measure,
    begins_with_verb,
    build_import_graph,
    find_backend_questions,
    find_circles,
    find_worse,
    keep_library_modules,
    read_modules,
)

# Modules at the top of the package, which every folder may import.
BASE = ("refusals", "errors", "files", "interrupts", "launcher", "shipped", "text")
# A folder imports only from those before it.
FOLDERS = (
    "schedule", "stability", "trace", "model", "cut", "local", "update", "config", "hardware", "data", "job", "plan", "replay",
    "backends", "report", "store", "pipeline", "run", "integrations", "comparison", "cli",
)  # fmt: skip
MOST_LINES_OF_MAP = 15  # of a folder: related files share a line
FRONT = ("__init__", "__main__")  # what users import and start: above all
WITHOUT_TORCH = ("schedule", "stability", "trace", *BASE)
OUTSIDE = ("tools", "models", "tests", "configs")  # what the library may not know
MOST_BACKEND_QUESTIONS = 2  # both in config/schema.py, about the section backend.ipu


def find_layer(module: str) -> int:
    """Return 0 for the base, then the number of the folder, and the highest number for what users import."""
    parts = module.split(".")
    top = parts[1] if len(parts) > 1 else "__init__"
    if top in BASE:
        return 0
    if top in FRONT:
        return len(FOLDERS) + 1
    assert top in FOLDERS, f"{module}: give it a place in FOLDERS or BASE of tests/test_house.py"
    return 1 + FOLDERS.index(top)


def test_no_folder_imports_from_above():
    upward = [
        f"{module} imports {name}"
        for module, names in build_import_graph().items()
        for name in keep_library_modules(names)
        if find_layer(name) > find_layer(module)
    ]
    assert not upward


def test_what_builds_and_runs_a_pipeline_knows_no_key_of_a_run():
    """A loop's `Pipeline` and the run of a config are clients of the same code: what serves both has `PipelineConfig`."""
    folders = FOLDERS[: FOLDERS.index("run")]
    makers = (
        "config",
        "job",
        "plan.answer",
        "report.run_text",
        "backends.ipu.unsupported",
    )  # for runs alone
    texts = {
        name[len(PACKAGE) + 1 :]: path.read_text(encoding="utf-8")
        for name, path in read_modules().items()
    }
    imports = [
        (name, found)
        for name, text in texts.items()
        if name.partition(".")[0] in folders and not name.startswith(makers)
        for found in re.findall(r"from \w+\.config\.schema import (\([^)]*\)|.*)", text)
    ]
    assert len(imports) > 8
    assert [name for name, found in imports if re.search(r"\bConfig\b", found)] == []


def test_there_is_no_import_circle():
    assert find_circles(build_import_graph()) == []


def test_a_circle_is_detected():
    graph = {
        f"{PACKAGE}.a": {f"{PACKAGE}.b"},
        f"{PACKAGE}.b": {f"{PACKAGE}.a"},
        f"{PACKAGE}.c": {f"{PACKAGE}.a"},
    }
    assert find_circles(graph) == [f"{PACKAGE}.a", f"{PACKAGE}.b"]


def list_folders() -> List[Path]:
    """Return the library's folders, itself first."""
    return sorted(path.parent for path in (ROOT / PACKAGE).rglob("__init__.py"))


def read_docstring(folder: Path) -> str:
    """Return the docstring of a folder's __init__ as it is written, with its indents."""
    tree = ast.parse((folder / "__init__.py").read_text(encoding="utf-8"))
    return ast.get_docstring(tree, clean=False) or ""


def read_map(folder: Path) -> List[Tuple[List[str], List[str]]]:
    """Return each line of a folder's map as its files and the names that it gives them in backquotes."""
    map_line = re.compile(r"^(?: {4})?([a-z][a-z_., ]*?)  +(\S.*)$", flags=re.MULTILINE)
    lines = map_line.findall(read_docstring(folder))
    return [(files.split(", "), re.findall(r"`(\w+)`", text)) for files, text in lines]


def list_definitions(path: Path) -> Set[str]:
    """Return the functions, classes and constants of a file."""
    names: Set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names.update(target.id for target in targets if isinstance(target, ast.Name))
    return names


@pytest.mark.parametrize("folder", list_folders(), ids=lambda path: str(path.relative_to(ROOT)))
def test_the_map_of_a_folder_names_its_files(folder: Path):
    """A reader begins at a folder's __init__: it names every file once, and none that has moved."""
    mapped = [name for files, _ in read_map(folder) for name in files]
    files = [path for path in folder.iterdir() if path.is_file() and path.name[0] not in "_."]
    names = [path.name[: -len(".py")] if path.suffix == ".py" else path.name for path in files]
    names += [path.parent.name for path in folder.glob("*/__init__.py")]
    assert sorted(mapped) == sorted(set(names) - {"py.typed"})
    assert len(read_map(folder)) <= MOST_LINES_OF_MAP


@pytest.mark.parametrize("folder", list_folders(), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_defines_the_names_that_the_map_gives_it(folder: Path):
    wrong = []
    for files, names in read_map(folder):
        paths = [folder / f"{file}.py" for file in files]
        defined = {name for path in paths if path.is_file() for name in list_definitions(path)}
        wrong += [name for name in names if name not in defined]
    assert not wrong


def test_the_map_of_the_library_has_the_order_of_the_imports():
    mapped = [name for files, _ in read_map(ROOT / PACKAGE) for name in files]
    assert sorted(mapped[: len(BASE)]) == sorted(BASE)
    assert mapped[len(BASE) :] == list(FOLDERS)


def test_an_update_of_the_emulator_enters_no_cut():
    """Stages in one process need no recording, crossing or piece: `cut` serves other backends, and blocks."""
    code = "from tests.test_house import print_files_of_an_update; print_files_of_an_update()"
    # in a process of its own, because it is profiled
    command = [sys.executable, "-c", code]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    folders = {Path(name).parent.name for name in ended.stdout.split()}
    assert {"replay", "emulator"} <= folders, ended.stderr
    assert "cut" not in folders


def print_files_of_an_update() -> None:
    """Print the files of the library that one update of the emulator enters, for the test above."""
    import torch

    import ipu_pipe
    from tests.house_runs import Tally

    model = torch.nn.Sequential(torch.nn.Linear(4, 4), ipu_pipe.begin_stage(torch.nn.Linear(4, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = torch.nn.functional.cross_entropy
    pipe = ipu_pipe.Pipeline(model, loss, optimizer, method="pipedream", microbatches=2)
    x, y = torch.ones(4, 4), torch.zeros(4, dtype=torch.long)
    # checks and the first batch's observation come before
    pipe.step(x, y)
    tally = Tally()
    tally.start()
    pipe.step(x, y)
    tally.stop()
    print(*tally.files)


def test_the_library_does_not_know_what_is_built_on_it():
    wrong = [
        (a, b)
        for a, names in build_import_graph().items()
        for b in names
        if b.partition(".")[0] in OUTSIDE
    ]
    assert not wrong


def list_named_modules(path: Path, modules: Dict[str, Path]) -> Set[str]:
    """Return the modules that strings of a file name by their ends, such as "analysis.picture" or "backends.table:launch"."""
    strings = [
        node.value
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant)
    ]
    names = [text.partition(":")[0] for text in strings if isinstance(text, str)]
    return {
        module
        for module in modules
        for name in names
        if "." in name and f".{module}".endswith(f".{name}")
    }


def test_every_module_is_used_by_a_command_or_a_public_name():
    """What only experiments use belongs to tools/experiments."""
    modules, graph = read_modules(), build_import_graph()
    entries = [
        name
        for name in modules
        if name.split(".")[1:2] in ([], ["__main__"], ["cli"], ["integrations"])
    ]
    used: Set[str] = set()
    while entries:
        name = entries.pop()
        if name not in used:
            used.add(name)
            entries += keep_library_modules(graph[name]) | list_named_modules(
                modules[name], modules
            )
    unused = [
        name for name, path in modules.items() if name not in used and path.name != "__init__.py"
    ]
    assert not unused


def test_no_place_outside_the_backends_asks_for_a_backends_name():
    """It asks what the backend supports (`BackendFacts`); the config's own checks of `backend.ipu` alone ask for the name."""
    questions = [
        f"{module}:{line}"
        for module, path in read_modules().items()
        if not module.startswith(f"{PACKAGE}.backends")
        for line in find_backend_questions(
            ast.parse(path.read_text(encoding="utf-8")), set(BACKENDS)
        )
    ]
    assert len(questions) <= MOST_BACKEND_QUESTIONS, questions


@pytest.mark.parametrize(
    "line",
    [
        "a = config.backend.name == 'processes'",
        "a = 'processes' != b",
        "a = config.backend.name in OTHERS",
        "a = b in ('x', 'processes')",
        "P = 'processes'\na = b == P",
        "a = {'x': 1}[job.config.backend.name]",
    ],
)
def test_a_question_for_a_backends_name_is_found(line):
    assert len(find_backend_questions(ast.parse(line), {"processes"})) == 1


@pytest.mark.parametrize(
    "line",
    [
        "a = {'backend': config.backend.name}",
        "a = FACTS.get('processes')",
        "a = config.backend.facts.emulates",
        "a = b == 'x'",
    ],
)
def test_other_uses_of_a_backends_name_are_no_questions(line):
    assert not find_backend_questions(ast.parse(line), {"processes"})


def test_every_backend_has_a_row_of_functions_and_a_row_of_facts():
    names = get_args(BackendConfig.model_fields["name"].annotation)
    assert list(BACKENDS) == list(BACKEND_FACTS) == list(names)


def test_schedules_and_the_base_are_read_without_torch():
    wrong = [
        (a, b)
        for a, names in build_import_graph().items()
        for b in names
        if a != PACKAGE
        and a.split(".")[1] in WITHOUT_TORCH
        and b.partition(".")[0] in ("torch", "poptorch")
    ]
    assert not wrong


def test_importing_the_package_imports_no_torch_and_no_poptorch():
    quiet = [m for m in read_modules() if m == PACKAGE or m.split(".")[1] in WITHOUT_TORCH]
    code = f"import sys, {', '.join(quiet)}; print([m for m in ('torch', 'torch.distributed', 'poptorch') if m in sys.modules])"
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert (ended.stdout.strip(), ended.stderr) == ("[]", "")


def test_a_measure_that_got_worse_is_named():
    stored = {"code tokens": 100, "docstrings that begin with a verb, %": 90}
    assert find_worse({"code tokens": 101, "docstrings that begin with a verb, %": 91}, stored) == [
        "code tokens: 101, stored 100"
    ]
    assert find_worse({"code tokens": 99, "docstrings that begin with a verb, %": 80}, stored) == [
        "docstrings that begin with a verb, %: 80, stored 90"
    ]
    assert Measure("x", 1).down


def test_an_imperative_is_distinguished_from_a_noun_phrase():
    assert begins_with_verb("Return the loss.") and begins_with_verb("Sum the losses.")
    assert not begins_with_verb("Sum of the losses.") and not begins_with_verb("The loss.")
