"""Measures of the library's source, printed by `make lint`. A measure may not get worse than its stored value.

    python -m tests.house           print every measure beside its stored value and its aim
    python -m tests.house --store   write today's values into tests/house.json; a value that rises needs its reason in the commit

Static measures come from the source; the others from small runs of configs/mlp_digits.yaml under `sys.setprofile`.
"""

from __future__ import annotations

import argparse
import ast
import functools
import io
import json
import re
import subprocess
import sys
import tokenize
from collections import Counter
from pathlib import Path
from typing import Dict, FrozenSet, Iterator, List, NamedTuple, Set

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "ipu_pipe"
STORED = ROOT / "tests" / "house.json"


class Measure(NamedTuple):
    """One measure: `aim` is the value to work towards; `down` says whether smaller is better; `slack` is tolerated noise."""

    name: str
    aim: float
    down: bool = True
    slack: float = 0


MEASURES = (
    Measure("code tokens", 275000),
    Measure("tokens a code line", 9.5, slack=0.01),
    Measure("lines of 30 tokens or more, %", 0.5, slack=0.01),
    Measure("lines over 100 columns, %", 1, slack=0.01),
    Measure("tuple assignments", 150),
    Measure("files", 155),
    Measure("files under 60 lines", 15),
    Measure("modules imported by one other alone", 25),
    Measure("share of import statements, %", 8, slack=0.1),
    Measure("functions called refuse, check or faults", 45),
    Measure("doubled class names", 0),
    Measure("dispatch modes over a forward", 4),
    Measure("docstrings that begin with a verb, %", 85, down=False, slack=0.1),
    Measure("function names that begin with a verb, %", 35, down=False, slack=0.1),
    Measure("functions with a bare local name", 0),
    Measure("code lines in the longest function's body", 60),
    Measure("most parameters of a private function", 8),
    Measure("tests: helper names in several files", 20),
    Measure("tests: helpers' docstrings that begin with a verb, %", 85, down=False, slack=0.1),
    Measure("README words", 1000),
    Measure("files in building a job", 35),
    Measure("files in one update, emulator", 14),
    Measure("files in one update, processes", 18),
    Measure("functions in one update, processes", 90),
    Measure("forwards before the first update", 3),
)
BARE_LOCALS = {"found", "made", "held", "kept", "own", "told", "each", "given"}
# Functions that answer a question or convert may begin with these, docstrings may not.
NAME_ONLY = {"is", "has", "can", "to", "from", "with", "as", "on"}


def read_modules() -> Dict[str, Path]:
    """Return the library's modules, name -> path. A folder's __init__ has the folder's name."""
    modules = {}
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        modules[name[: -len(".__init__")] if name.endswith(".__init__") else name] = path
    return modules


def iterate_imports(module: str, path: Path, known: Dict[str, Path]) -> Iterator[str]:
    """Yield the names of all modules that `module` imports, inside functions and for type checkers too."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = (
                package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            )
            source = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                # `from ipu_pipe import __version__` reads a fact about the package, not one of its parts.
                if (source, alias.name) != (PACKAGE, "__version__"):
                    inner = f"{source}.{alias.name}"
                    yield inner if inner in known else source


def build_import_graph() -> Dict[str, Set[str]]:
    """Return the imports of every module of the library, module -> imported modules."""
    modules = read_modules()
    return {name: set(iterate_imports(name, path, modules)) for name, path in modules.items()}


def keep_library_modules(names: Set[str]) -> Set[str]:
    """Return those of `names` that belong to the library."""
    return {name for name in names if name.partition(".")[0] == PACKAGE}


def find_circles(graph: Dict[str, Set[str]]) -> List[str]:
    """Return the modules that import themselves by way of others."""

    def reach(start: str) -> Set[str]:
        seen: Set[str] = set()
        todo = [start]
        while todo:
            for name in keep_library_modules(graph.get(todo.pop(), set())) - seen:
                seen.add(name)
                todo.append(name)
        return seen

    return [module for module in graph if module in reach(module)]


def find_backend_questions(tree: ast.Module, names: Set[str]) -> List[int]:
    """Return the lines of a module that ask which backend of these names it is, instead of what the backend supports.

    Such a line compares with a name, alone, in a collection or by a constant of the module, or looks up or matches one; or it
    does so with `backend.name`, whatever the other side is.
    """

    def is_asked(node: ast.AST) -> bool:
        is_attribute = isinstance(node, ast.Attribute) and node.attr == "name"
        return is_attribute and "backend" in (
            getattr(node.value, "attr", ""),
            getattr(node.value, "id", ""),
        )

    def is_name(node: ast.AST) -> bool:
        is_text = (
            isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in names
        )
        is_constant = isinstance(node, ast.Name) and node.id in constants
        is_collection = isinstance(node, (ast.Tuple, ast.List, ast.Set)) and any(
            map(is_name, node.elts)
        )
        return is_text or is_constant or is_asked(node) or is_collection

    constants: Set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.Assign) and is_name(node.value):
            constants |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    lines = []
    for node in ast.walk(tree):
        is_comparison = isinstance(node, ast.Compare) and any(
            map(is_name, (node.left, *node.comparators))
        )
        is_lookup = isinstance(node, ast.Subscript) and any(map(is_asked, ast.walk(node.slice)))
        is_case = type(node).__name__ == "MatchValue" and is_name(node.value)
        if is_comparison or is_lookup or is_case:
            lines.append(node.lineno)
    return lines


# Tokens that are no code.
SILENT = (
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
)


def count_tokens(text: str, code: Set[int]) -> Counter:
    """Return the number of tokens of code by line; `code`: the lines of `find_code_lines`."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    lines = (token.start[0] for token in tokens if token.type not in SILENT)
    return Counter(line for line in lines if line in code)


def _measure_density(text: str, tree: ast.AST, code: Set[int], totals: Counter) -> None:
    """Add the measures of how dense a file's lines are."""
    by_line = count_tokens(text, code)
    totals["tokens"] += sum(by_line.values())
    totals["dense"] += sum(count >= 30 for count in by_line.values())
    totals["wide"] += sum(len(line) > 100 for line in text.split("\n"))
    for node in ast.walk(tree):
        is_pair = isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple)
        totals["tuples"] += is_pair and isinstance(node.value, ast.Tuple)


def find_code_lines(text: str, tree: ast.AST) -> Set[int]:
    """Return the numbers of the lines that hold code: no comments, docstrings or blank lines."""
    code: Set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in SILENT:
            code.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(tree):
        if isinstance(
            node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        ) and ast.get_docstring(node):
            docstring = node.body[0]
            code -= set(range(docstring.lineno, (docstring.end_lineno or docstring.lineno) + 1))
    return code


@functools.lru_cache(maxsize=None)
def read_verbs() -> FrozenSet[str]:
    """Return the verbs with which names and docstrings of this library begin (tests/house_verbs.txt)."""
    return frozenset((ROOT / "tests" / "house_verbs.txt").read_text(encoding="utf-8").split())


def begins_with_verb(docstring: str) -> bool:
    """Tell whether a docstring begins with an imperative: "Sum the losses ...", not "Sum of the losses"."""
    words = re.findall(r"[\w'-]+", docstring)[:2]
    return bool(words) and words[0].lower() in read_verbs() and words[1:] != ["of"]


def measure_source() -> Dict[str, float]:
    """Return the measures that need only the source."""
    modules, graph = read_modules(), build_import_graph()
    importers: Counter = Counter()
    for name, imported in graph.items():
        importers.update(keep_library_modules(imported) - {name})
    totals: Counter = Counter()
    classes: Counter = Counter()
    public_names = read_public_names()
    for path in modules.values():
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
        code = find_code_lines(text, tree)
        totals["code"] += len(code)
        _measure_density(text, tree, code, totals)
        totals["small"] += path.name != "__init__.py" and len(text.splitlines()) < 60
        for function in find_functions(tree):
            totals["longest"] = max(totals["longest"], count_body_lines(function, code))
        for function in find_private_functions(tree, public_names):
            totals["parameters"] = max(totals["parameters"], count_parameters(function))
        for node in ast.walk(tree):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                totals["imports"] += (node.end_lineno or node.lineno) - node.lineno + 1
            elif isinstance(node, ast.ClassDef):
                classes[node.name] += not node.name.startswith("_")
                totals["modes"] += any(
                    re.search(r"Torch(Dispatch|Function)Mode$", ast.unparse(b)) for b in node.bases
                )
            elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                _count_function(node, totals)
    single = [n for n, p in modules.items() if p.name != "__init__.py" and importers[n] == 1]
    return {
        "code tokens": totals["tokens"],
        "tokens a code line": round(totals["tokens"] / totals["code"], 2),
        "lines of 30 tokens or more, %": round(100 * totals["dense"] / totals["code"], 2),
        "lines over 100 columns, %": round(100 * totals["wide"] / totals["code"], 2),
        "tuple assignments": totals["tuples"],
        "files": len(modules),
        "files under 60 lines": totals["small"],
        "modules imported by one other alone": len(single),
        "share of import statements, %": round(100 * totals["imports"] / totals["code"], 1),
        "functions called refuse, check or faults": totals["checks"],
        "doubled class names": sum(count > 1 for count in classes.values()),
        "dispatch modes over a forward": totals["modes"],
        "docstrings that begin with a verb, %": round(
            100 * totals["verb docs"] / totals["docs"], 1
        ),
        "function names that begin with a verb, %": round(
            100 * totals["verb names"] / totals["names"], 1
        ),
        "functions with a bare local name": totals["bare"],
        "code lines in the longest function's body": totals["longest"],
        "most parameters of a private function": totals["parameters"],
        **measure_tests(),
        "README words": len((ROOT / "README.md").read_text(encoding="utf-8").split()),
    }


def find_functions(tree: ast.AST) -> List[ast.FunctionDef]:
    """Return all functions and methods of a module, inner ones too."""
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]


def find_private_functions(tree: ast.AST, public_names: Set[str]) -> List[ast.FunctionDef]:
    """Return the functions that are not of the package's public face: these, and public classes' `__init__`."""
    public = [f for f in find_functions(tree) if f.name in public_names]
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.name in public_names:
            public += [f for f in find_functions(node) if f.name == "__init__"]
    return [function for function in find_functions(tree) if function not in public]


def count_body_lines(function: ast.FunctionDef, code: Set[int]) -> int:
    """Return the lines of code of a function without its signature; `code`: see `find_code_lines`."""
    return len(code & set(range(function.body[0].lineno, (function.end_lineno or 0) + 1)))


def count_parameters(function: ast.FunctionDef) -> int:
    """Return the number of a function's parameters; `self` and `cls` are none."""
    arguments = function.args
    names = [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    return sum(name not in ("self", "cls") for name in names)


def read_public_names() -> Set[str]:
    """Return the names of the package's public face, whose functions may have a parameter a key."""
    tree = ast.parse((ROOT / PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    texts = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
    return {text for text in texts if isinstance(text, str)}


def measure_tests() -> Dict[str, float]:
    """Return the measures of the tests' helpers: functions of tests/ that are no test.

    A script's `main` and the hostile inputs' `make`, which their driver calls by name, are not
    counted as doubled names.
    """
    files: Dict[str, Set[Path]] = {}
    totals: Counter = Counter()
    for path in sorted((ROOT / "tests").rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("test_"):
                files.setdefault(node.name, set()).add(path)
        for function in find_functions(tree):
            docstring = ast.get_docstring(function)
            if docstring and not function.name.startswith("test_"):
                totals["docs"] += 1
                totals["verb docs"] += begins_with_verb(docstring)
    doubled = [name for name, paths in files.items() if len(paths) > 1]
    return {
        "tests: helper names in several files": len(set(doubled) - {"main", "make"}),
        "tests: helpers' docstrings that begin with a verb, %": round(
            100 * totals["verb docs"] / totals["docs"], 1
        ),
    }


def _count_function(node: ast.AST, totals: Counter) -> None:
    assert isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    is_property = any("property" in ast.unparse(decorator) for decorator in node.decorator_list)
    if not node.name.startswith("__") and not is_property:
        totals["names"] += 1
        totals["verb names"] += node.name.strip("_").split("_")[0] in read_verbs() | NAME_ONLY
    totals["checks"] += bool(re.search(r"(^|_)(refuse|check|faults?)(_|$)", node.name))
    docstring = ast.get_docstring(node)
    if docstring:
        totals["docs"] += 1
        totals["verb docs"] += begins_with_verb(docstring)
    stored = {
        n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
    }
    totals["bare"] += bool(stored & BARE_LOCALS)


def measure_runs() -> Dict[str, float]:
    """Return the measures that need a run: each run is a process of its own (tests/house_runs.py)."""
    values: Dict[str, float] = {}
    command = [sys.executable, "-m", "tests.house_runs"]
    for which in ("emulator", "processes"):
        ended = subprocess.run(
            [*command, which], cwd=ROOT, capture_output=True, text=True, timeout=240
        )
        assert ended.returncode == 0, ended.stderr
        values.update(json.loads(ended.stdout.splitlines()[-1]))
    return values


def find_worse(values: Dict[str, float], stored: Dict[str, float]) -> List[str]:
    """Return one line for each measure that is worse than its stored value."""
    lines = []
    for measure in MEASURES:
        if measure.name in values and measure.name in stored:
            change = values[measure.name] - stored[measure.name]
            if (change if measure.down else -change) > measure.slack:
                lines.append(
                    f"{measure.name}: {values[measure.name]:g}, stored {stored[measure.name]:g}"
                )
    return lines


def main() -> None:
    """Print the measures; with --store, write them down; exit with 1 if one got worse and is not stored."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--store", action="store_true", help="write today's values into tests/house.json"
    )
    arguments = parser.parse_args()
    values = {**measure_source(), **measure_runs()}
    stored = json.loads(STORED.read_text(encoding="utf-8")) if STORED.exists() else {}
    print(f"{'measure':55}{'today':>9}{'stored':>9}{'aim':>9}")
    for measure in MEASURES:
        known = f"{stored[measure.name]:g}" if measure.name in stored else "-"
        print(f"{measure.name:55}{values[measure.name]:>9g}{known:>9}{measure.aim:>9g}")
    if arguments.store:
        STORED.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
        return
    worse = find_worse(values, stored)
    for line in worse:
        print(f"error: worse than stored: {line}", file=sys.stderr)
    sys.exit(1 if worse else 0)


if __name__ == "__main__":
    main()
