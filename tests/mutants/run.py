"""Put each fault of mutants.txt into a copy of the library, and run the tests that import the changed file.

    python -m tests.mutants.run                 all of them, on two processes; six minutes while the known cases find them
    python -m tests.mutants.run "drain" --jobs 1    those whose idea or file has the word
    python -m tests.mutants.run --missing       those without a result in results.json
    python -m tests.mutants.run --list          print them without a run

The case that found a fault before comes first. Where it finds nothing, all tests of these files run, small files first,
until one fails; then the others of the default suite, and then the slow ones of the same files. tests/seconds.py keeps in
the default suite what found a fault.
A fault that no test finds is printed as SURVIVED, and the command ends with code 1.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Dict, Iterator, List, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
LIST = Path(__file__).with_name("mutants.txt")
RESULTS = Path(__file__).with_name("results.json")
# these train by every part of the library, which they import by its front door
WHOLE = (
    "test_emulator_exact.py",
    "test_pipeline.py",
    "test_train.py",
    "test_rules.py",
    "test_processes_equal_emulator.py",
    "test_loss_weight.py",
    "test_modes.py",
    "test_tied.py",
    "test_seam.py",
    "test_pipeline_optimizers.py",
    "test_pipeline_state.py",
)
# these read the source, and find any change of it
READERS = ("tests/test_mutants.py", "tests/test_house.py")
# a fault may make a loop endless; no file of the default suite takes as long
DEADLINE = 900


class Mutant(NamedTuple):
    """A fault: `before`, which `file` has once, becomes `after`."""

    idea: str
    file: str
    before: str
    after: str

    def apply(self, root: Path) -> None:
        """Write the fault into the copy of the repository at `root`."""
        path = root / self.file
        text = path.read_text(encoding="utf-8")
        assert text.count(self.before) == 1, (
            f"{self.idea}: {text.count(self.before)} times in {self.file}"
        )
        path.write_text(text.replace(self.before, self.after), encoding="utf-8")


def read_mutants() -> List[Mutant]:
    """Return the faults of mutants.txt: blocks of `# idea`, `file`, lines that begin with - and with +."""
    mutants = []
    for block in re.split(r"\n\n+", LIST.read_text(encoding="utf-8").strip()):
        idea, file, *lines = block.split("\n")
        before, after = (
            "\n".join(line[1:] for line in lines if line.startswith(sign)) for sign in "-+"
        )
        mutants.append(Mutant(idea[2:], file, before, after))
    return mutants


def _list_top_level() -> List[str]:
    """List the files and folders that the repository has at its top, some of which tests read."""
    files = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return sorted({file.partition("/")[0] for file in files.stdout.splitlines()})


def list_test_files(file: str) -> List[str]:
    """Return the default suite's files that import the module of `file`, the quick ones first."""
    module = file[: -len(".py")].replace("/", ".")
    names = {module, module.rpartition(".")[0]} if module.count(".") == 1 else {module}
    paths = [
        path
        for path in (ROOT / "tests").glob("test_*.py")
        if path.name in WHOLE or names & set(_list_imports(path))
    ]
    return [f"tests/{path.name}" for path in sorted(paths, key=lambda path: path.stat().st_size)]


def _list_imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def run_mutant(mutant: Mutant, found_by: str) -> Dict[str, object]:
    """Run the tests of one fault, at first the case that found it before; return the first that fails, and the seconds."""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for name in _list_top_level():
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, root / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, root / name)
        mutant.apply(root)
        files = list_test_files(mutant.file)
        others = [f"--ignore={file}" for file in (*files, *READERS)]
        # a case that is gone is no failure
        finds_again = found_by and _find_failure(root, found_by, "-m", "") == found_by
        killed_by = (
            (found_by if finds_again else "")
            or _find_failure(root, *files)
            or _find_failure(root, *others)
            or _find_failure(root, *files, "-m", "slow")
        )
    return {"killed_by": killed_by, "seconds": round(time.monotonic() - begin)}


def _find_failure(root: Path, *arguments: str) -> str:
    """Run tests of the library at `root`; return the first that fails, an empty text if none does."""
    command = [sys.executable, "-m", "pytest", "-x", "--no-header", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        result = subprocess.run(
            command, cwd=root, env=environment, capture_output=True, text=True, timeout=DEADLINE
        )
    except subprocess.TimeoutExpired:
        return "an endless loop"
    failed = re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", result.stdout, re.MULTILINE)
    return failed[0] if failed else "" if result.returncode == 0 else "a crash"


def main() -> int:
    """Run the faults that the words choose, and print and store what found them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "words", nargs="*", help="run the faults whose idea or file has one of these"
    )
    parser.add_argument("--jobs", type=int, default=2, help="faults at a time (2)")
    parser.add_argument("--missing", action="store_true", help="run those without a result")
    parser.add_argument("--list", action="store_true", help="print the faults without a run")
    arguments = parser.parse_args()
    results = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    mutants = [
        mutant
        for mutant in read_mutants()
        if not (arguments.missing and mutant.idea in results)
        and (
            not arguments.words
            or any(word in f"{mutant.idea} {mutant.file}" for word in arguments.words)
        )
    ]
    if arguments.list:
        for mutant in mutants:
            print(f"{mutant.file}: {mutant.idea}")
        return 0
    commit = subprocess.run(
        ["git", "rev-parse", "--short=8", "HEAD"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    survivors = 0
    with ThreadPoolExecutor(arguments.jobs) as pool:
        found_by = [results.get(mutant.idea, {}).get("killed_by", "") for mutant in mutants]
        for mutant, result in zip(mutants, pool.map(run_mutant, mutants, found_by)):
            survivors += not result["killed_by"]
            results[mutant.idea] = {**result, "commit": commit}
            print(
                f"{result['killed_by'] or 'SURVIVED':60} {result['seconds']:>4} s  {mutant.idea}",
                flush=True,
            )
            RESULTS.write_text(
                json.dumps(results, indent=1, sort_keys=True) + "\n", encoding="utf-8"
            )
    print(f"{len(mutants) - survivors} of {len(mutants)} found")
    return int(survivors > 0)


if __name__ == "__main__":
    sys.exit(main())
