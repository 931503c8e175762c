"""The order of the folders: each imports only from those above it, without circles.

    errors interrupts key_faults launched orphans shipped shown values written yaml_files < schedule < stability < trace < model
        < local < update < hardware < data < job < plan < backends < report < run < studies < cli

Imports are read from the source, those inside functions and those for type checkers included.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from typing import Dict, Iterator, List, Set, Tuple

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "ipu_pipe"

# modules at the top, below every folder
BASE = (
    "errors",
    "interrupts",
    "key_faults",
    "launched",
    "orphans",
    "shipped",
    "shown",
    "values",
    "written",
    "yaml_files",
)
FOLDERS = (
    "schedule", "stability", "trace", "model", "local", "update", "hardware", "data", "job", "plan", "backends", "report",
    "run", "studies", "cli",
)  # fmt: skip
FRONT = ("__init__", "__main__")  # what users import and start: above all
WITHOUT_TORCH = ("schedule", "stability", "trace", *BASE)
OUTSIDE = ("tools", "models", "tests", "configs")  # what the library may not know

# upward imports that still stand: one that is gone must be taken out
KNOWN_UPWARD: Set[Tuple[str, str]] = set()


def modules() -> Dict[str, Path]:
    """The library's modules by name; a folder's __init__ bears the folder's name."""
    found = {}
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        found[name[: -len(".__init__")] if name.endswith(".__init__") else name] = path
    return found


def imports(module: str, path: Path, known: Dict[str, Path]) -> Iterator[str]:
    """What a module imports anywhere in it: names of the library's modules, and of others as they are written."""
    todo: List[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    while todo:
        node = todo.pop()
        todo += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            source = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                if (source, alias.name) == (PACKAGE, "__version__"):  # a fact about the package, not a part of it
                    continue
                inner = f"{source}.{alias.name}"
                yield inner if inner in known else source


def edges() -> Dict[str, Set[str]]:
    known = modules()
    return {module: set(imports(module, path, known)) for module, path in known.items()}


def layer(module: str) -> int:
    """0 for the base, then the folders in order, and last what users import. Fails for what has no place."""
    parts = module.split(".")
    top = parts[1] if len(parts) > 1 else "__init__"
    if top in BASE:
        return 0
    if top in FRONT:
        return len(FOLDERS) + 1
    assert top in FOLDERS, f"{module}: has no place among the layers: {' < '.join(FOLDERS)}, or base: {', '.join(BASE)}"
    return 1 + FOLDERS.index(top)


def own(names: Set[str]) -> Set[str]:
    return {name for name in names if name.partition(".")[0] == PACKAGE}


def test_imports_go_upwards_nowhere():
    upward = {(a, b) for a, names in edges().items() for b in own(names) if layer(b) > layer(a)}
    new, gone = sorted(upward - KNOWN_UPWARD), sorted(KNOWN_UPWARD - upward)
    assert not new, "\n".join(f"{a} imports {b}, which stands above it" for a, b in new)
    assert not gone, f"no longer there, take it out of KNOWN_UPWARD: {gone}"


def test_there_is_no_circle():
    graph = edges()

    def reached(start: str) -> Set[str]:
        seen: Set[str] = set()
        todo = [start]
        while todo:
            for name in own(graph.get(todo.pop(), set())) - seen:
                seen.add(name)
                todo.append(name)
        return seen

    assert [module for module in graph if module in reached(module)] == []


def test_the_library_knows_nothing_of_what_is_built_on_it():
    wrong = [(a, b) for a, names in edges().items() for b in names if b.partition(".")[0] in OUTSIDE]
    assert not wrong


def test_schedules_and_the_base_are_read_without_torch():
    wrong = [
        (a, b)
        for a, names in edges().items()
        for b in names
        if a != PACKAGE and a.split(".")[1] in WITHOUT_TORCH and b.partition(".")[0] in ("torch", "poptorch")
    ]
    assert not wrong


def test_importing_the_package_imports_no_torch_and_no_poptorch():
    quiet = [m for m in modules() if m == PACKAGE or m.split(".")[1] in WITHOUT_TORCH]
    code = f"import sys, {', '.join(quiet)}; print([m for m in ('torch', 'torch.distributed', 'poptorch') if m in sys.modules])"
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (ended.stdout.strip(), ended.stderr) == ("[]", "")
