"""Cases run in forked children of a process that has imported everything, each bounded in time and memory, and judged."""

from __future__ import annotations

import contextlib
import importlib
import os
import random
import re
import resource
import select
import shutil
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Callable, Dict, Iterator, List, NamedTuple, NoReturn, Optional, Sequence, Tuple

import yaml

from ipu_pipe.errors import run_command
from tests.hostile import (
    checkpoints,
    command_lines,
    commands,
    configs,
    data_files,
    folders,
    manifests,
    named_files,
    traces,
    user_code,
    weights,
)
from tests.hostile.cases import BASE, Bases, Case, Make

KINDS: Dict[str, Make] = {
    "configs": configs.make,
    "command_lines": command_lines.make,
    "checkpoints": checkpoints.make,
    "folders": folders.make,
    "data_files": data_files.make,
    "traces": traces.make,
    "plans": commands.make_plan,
    "commands": commands.make,
    "weights": weights.make,
    "manifests": manifests.make,
    "named_files": named_files.make,
    "user_code": user_code.make,
}
# in which turn the kinds come: most cases where most can be said
TURN = (
    *("configs", "command_lines", "checkpoints", "traces", "commands"),
    *("configs", "plans", "folders", "traces", "commands"),
    *("configs", "command_lines", "checkpoints", "data_files", "plans"),
    *("weights", "manifests", "named_files", "user_code", "user_code"),
)
TOOLS = (
    *("train", "schedule", "analyze", "plan", "collect", "measure_hardware"),
    *("fetch_data", "completion", "export"),
)
ROOT = Path(__file__).resolve().parents[2]
SECONDS = 30  # of a case
MORE_MEMORY = 3 * 2**30  # address space of a case beyond what the imports take, in bytes
MOST_WRITTEN = 2**28  # of a file
LONGEST = 2100  # characters of a fault's line
# a fault of ours that was reported as the user's: their own lines are never in our files
OURS = re.compile(re.escape(str(ROOT)) + r"/(?:ipu_pipe|tools/experiments)/[\w/]+\.py:\d+")


class Result(NamedTuple):
    """How a case ended. `bad`: what must not be, "" if nothing."""

    kind: str
    number: int
    what: str
    argv: Sequence[str]
    code: Optional[int]
    seconds: float
    bad: str
    said: str


def prepare() -> None:
    """Import all that cases need, so that none pays for it; torch on one thread before its first operation, since threads do not
    survive a fork."""
    import torch

    torch.set_num_threads(1)
    commands = [f"ipu_pipe.cli.{tool}" for tool in TOOLS]
    for name in ("sklearn.datasets", "PIL.Image", "torch.utils.tensorboard", *commands):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    for name in ("report.summary", "run.train", "run.stability", "backends.table"):
        importlib.import_module(f"ipu_pipe.{name}")
    for name in ("models.mlp", "tools.reproduce", "tools.stability", "tools.experiments.catalogue"):
        importlib.import_module(name)


def make_bases(scratch: Path) -> Bases:
    """Return the runs that cases damage: one to the end, and the same as it was after update 4."""
    bases = Bases(scratch / "interrupted", scratch / "finished")
    (scratch / "config.yaml").write_text(yaml.safe_dump(BASE, sort_keys=False))
    _quietly(Case("train", [str(scratch / "config.yaml"), "--out", str(bases.end)], ""), scratch)
    said = _quietly(
        Case(
            "train",
            [str(scratch / "config.yaml"), "--evaluate", str(bases.end / checkpoints.LAST)],
            "",
        ),
        scratch,
    )
    shutil.copytree(bases.end, bases.run)
    shutil.rmtree(bases.run / checkpoints.LAST)
    (bases.run / "summary.json").unlink()
    known = _quietly(
        Case("train", ["config.yaml", "--evaluate", str(bases.run / "checkpoints" / "step-4")], ""),
        scratch,
    )
    assert known != said, "two checkpoints that evaluate alike tell nothing apart"
    (bases.end / "evaluated.json").write_text(known)
    return bases


def _quietly(case: Case, folder: Path) -> str:
    child = _start(case, folder, "base")
    code, said, wrong = _ended(child, 10 * SECONDS)
    if code != 0:
        raise RuntimeError(f"a base run failed: {case.argv}: exit code {code}: {wrong}")
    for name in (
        Path(f"{child.out}.modules").read_text().split()
    ):  # what was imported on the way, for all that come after
        if name not in sys.modules and "." in name:
            with contextlib.suppress(Exception):
                importlib.import_module(name)
    return said


class _Child(NamedTuple):
    pid: int
    end: int  # read end of a pipe that only the child holds open
    out: Path
    started: float


def _start(case: Case, folder: Path, name: str) -> _Child:
    out = folder / f".{name}"
    end, write_end = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        os.close(end)
        _be(case, folder, out)
    os.close(write_end)
    return _Child(pid, end, out, time.monotonic())


def _be(case: Case, folder: Path, out: Path) -> NoReturn:
    """Run the case in this process, a child of its own group, and end it as Python would."""
    code = 1
    try:
        os.setpgid(0, 0)
        for number, path in ((1, f"{out}.out"), (2, f"{out}.err")):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)
        sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)
        used_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf(
            "SC_PAGE_SIZE"
        )
        resource.setrlimit(resource.RLIMIT_AS, (used_bytes + MORE_MEMORY, used_bytes + MORE_MEMORY))
        resource.setrlimit(resource.RLIMIT_FSIZE, (MOST_WRITTEN, MOST_WRITTEN))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.chdir(folder)
        for name in ("RANK", "WORLD_SIZE"):
            os.environ.pop(name, None)
        sys.argv = [f"tools/{case.tool}.py", *case.argv]
        run_command(_main_of(case.tool))
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else 0 if left.code is None else 1
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            if out.name == ".base":
                Path(f"{out}.modules").write_text("\n".join(sys.modules))
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _main_of(tool: str) -> Callable[[], None]:
    if tool == "predict":
        return commands.predict
    if tool == "call":
        return named_files.call
    module = f"ipu_pipe.cli.{tool}" if tool in TOOLS else f"tools.{tool}"
    main: Callable[[], None] = importlib.import_module(module).main
    return main


def _ended(child: _Child, left: float) -> Tuple[Optional[int], str, str]:
    """Exit code (None: it had to be killed; negative: by a signal), standard output and error of a child."""
    ready, _, _ = select.select([child.end], [], [], max(left, 0))
    if not ready:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
    _, status = os.waitpid(child.pid, 0)
    os.close(child.end)
    code = (
        None
        if not ready
        else -os.WTERMSIG(status)
        if os.WIFSIGNALED(status)
        else os.WEXITSTATUS(status)
    )
    said, wrong = (
        Path(f"{child.out}.{name}").read_text(encoding="utf-8", errors="replace")
        for name in ("out", "err")
    )
    return code, said, wrong


def choose(count: int) -> List[Tuple[str, int]]:
    """Return the first `count` cases: kind and number within the kind."""
    counted = dict.fromkeys(KINDS, 0)
    chosen = []
    for i in range(count):
        kind = TURN[i % len(TURN)]
        chosen.append((kind, counted[kind]))
        counted[kind] += 1
    return chosen


def make_case(kind: str, number: int, seed: int, folder: Path, bases: Bases) -> Case:
    """Return the case `number` of `kind`, its files in `folder`."""
    return KINDS[kind](random.Random(f"{seed}/{kind}/{number}"), folder, bases)


def judged(case: Case, code: Optional[int], said: str, wrong: str) -> str:
    """Return what is bad about how a case ended, or ""."""
    lines = [line for line in wrong.splitlines() if line.startswith("error: ")]
    if code is None:
        return f"hang: killed after {SECONDS} s"
    if "Traceback (most recent call last)" in wrong:
        return f"traceback: {wrong.strip().splitlines()[-1]}"
    if re.search(r"\w+Warning: ", wrong):
        return f"warning: {wrong.strip().splitlines()[-1]}"
    if code not in (0, 1, 2):
        return f"exit code: {code}"
    if code and not lines:
        return f"no line: exit code {code}, standard error {wrong[-200:]!r}"
    if any(len(line) > LONGEST or not line.isprintable() for line in lines):
        return "no line: too long, or not printable"
    if any(OURS.search(line) for line in lines):
        return f"our line: {next(filter(OURS.search, lines))}"
    if any(not line.isprintable() for line in (said + wrong).replace("\t", " ").split("\n")):
        return "not printable: on standard output or error"
    if code == 0 and case.differs is not None:
        try:
            difference = case.differs(said)
        except Exception as error:  # what it wrote cannot be read
            difference = f"its result cannot be read: {type(error).__name__}: {error}"
        return f"differs: {difference}" if difference else ""
    return ""


def run_cases(
    wanted: Sequence[Tuple[str, int]], seed: int, scratch: Path, workers: int
) -> Iterator[Result]:
    """Run the cases (kind, number), `workers` at a time, as they end."""
    bases = make_bases(scratch)
    waiting, running = list(reversed(wanted)), []  # type: ignore[var-annotated]
    while waiting or running:
        while waiting and len(running) < workers:
            kind, number = waiting.pop()
            folder = scratch / f"{kind}-{number}"
            folder.mkdir()
            case = make_case(kind, number, seed, folder, bases)
            running.append((kind, number, case, folder, _start(case, folder, "case")))
        first = min(entry[4].started for entry in running)
        ready, _, _ = select.select(
            [e[4].end for e in running], [], [], max(first + SECONDS - time.monotonic(), 0)
        )
        for entry in list(running):
            kind, number, case, folder, child = entry
            age = time.monotonic() - child.started
            if child.end in ready or age >= SECONDS:
                running.remove(entry)
                code, said, wrong = _ended(child, 0)
                yield Result(
                    kind,
                    number,
                    case.what,
                    [case.tool, *case.argv],
                    code,
                    age,
                    judged(case, code, said, wrong),
                    wrong,
                )
                shutil.rmtree(folder, ignore_errors=True)


def table(results: Sequence[Result]) -> str:
    """Return how the cases ended, a row a kind."""
    bads = (
        "traceback",
        "hang",
        "exit code",
        "no line",
        "our line",
        "differs",
        "warning",
        "not printable",
    )
    columns: List[Tuple[str, Callable[[Result], bool]]] = [("cases", lambda r: True)]
    columns += [(f"exit {code}", lambda r, code=code: r.code == code) for code in (0, 1, 2)]  # type: ignore[misc]
    columns += [(bad, lambda r, bad=bad: r.bad.startswith(bad)) for bad in bads]  # type: ignore[misc]
    lines = [f"{'kind':<14}" + "".join(f"{name:>11}" for name, _ in columns)]
    for kind in [*KINDS, "all"]:
        chosen = [r for r in results if kind in (r.kind, "all")]
        lines.append(f"{kind:<14}" + "".join(f"{sum(map(of, chosen)):>11}" for _, of in columns))
    return "\n".join(lines)


__all__ = ["KINDS", "choose", "prepare", "run_cases", "table"]
