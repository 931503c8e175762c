"""Run cases in forks of a process that has imported everything, limit their time and memory, and judge how they end."""

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
from collections import Counter
from pathlib import Path
from typing import Callable, Dict, Iterator, List, NamedTuple, NoReturn, Optional, Sequence, Tuple

from ipu_pipe.cli import COMMANDS
from ipu_pipe.errors import run_command
from tests.hostile import (
    checkpoints,
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
from tests.hostile.cases import Bases, Case, CaseMaker, write_config

KINDS: Dict[str, CaseMaker] = {
    "configs": configs.make_config_case,
    "checkpoints": checkpoints.make_checkpoint_case,
    "folders": folders.make_folder_case,
    "data_files": data_files.make_data_file_case,
    "traces": traces.make_trace_case,
    "commands": commands.make_command_case,
    "weights": weights.make_weights_case,
    "manifests": manifests.make_manifest_case,
    "named_files": named_files.make_named_file_case,
    "user_code": user_code.make_user_code_case,
}
# the order of the kinds: the most cases for those with the most variants
TURN = (
    *("configs", "commands", "checkpoints", "traces", "commands"),
    *("configs", "commands", "folders", "traces", "commands"),
    *("configs", "commands", "checkpoints", "data_files", "commands"),
    *("weights", "manifests", "named_files", "user_code", "user_code"),
)
ROOT = Path(__file__).resolve().parents[2]
SECONDS = 60  # of a case
MORE_MEMORY = 3 * 2**30  # address space of a case beyond what the imports take, in bytes
MOST_WRITTEN = 2**28  # of a file
LONGEST = 2100  # characters of a fault's line
# a bug of ours that is reported as the user's: the lines of user code are never in our files
OURS = re.compile(re.escape(str(ROOT)) + r"/(?:ipu_pipe|tools/experiments)/[\w/]+\.py:\d+")


class Result(NamedTuple):
    """The end of a case. `bad`: the violated rule, "" if none; `error_output`: standard error."""

    kind: str
    number: int
    mutation: str
    argv: Sequence[str]
    code: Optional[int]
    seconds: float
    bad: str
    error_output: str


def import_everything() -> None:
    """Import everything that cases need, so that no case pays for it. Torch gets one thread before its first operation, since
    threads do not survive a fork."""
    import torch

    torch.set_num_threads(1)
    # not xla's: its threads would not survive a fork
    parts = (
        "report.summary",
        "run.train",
        "run.stability",
        "backends.emulator.engine",
        "data.sets",
    )
    ours = [f"ipu_pipe.{part}" for part in (*parts, *(f"cli.{command}" for command in COMMANDS))]
    tools = ["models.mlp", "tools.reproduce", "tools.experiments.catalogue"]
    for name in ("sklearn.datasets", "PIL.Image", "torch.utils.tensorboard", *tools, *ours):
        # an optional package may be absent
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def make_bases(scratch: Path) -> Bases:
    """Train the run that cases damage; return its folder at the end and as it was after update 4."""
    bases = Bases(scratch / "interrupted", scratch / "finished")
    write_config(scratch)
    config = str(scratch / "config.yaml")

    def run(*argv: str) -> str:
        return _run_base_case(Case("train", [config, *argv], ""), scratch)

    run("--out", str(bases.end))
    evaluation = run("--evaluate", str(bases.end / checkpoints.LAST))
    shutil.copytree(bases.end, bases.run)
    shutil.rmtree(bases.run / checkpoints.LAST)
    (bases.run / "summary.json").unlink()
    earlier_evaluation = run("--evaluate", str(bases.run / "checkpoints" / "step-4"))
    assert earlier_evaluation != evaluation, "two checkpoints must not have the same figures"
    (bases.end / "evaluated.json").write_text(earlier_evaluation)
    return bases


def _run_base_case(case: Case, folder: Path) -> str:
    child = _start_child(case, folder, "base")
    code, output, error_output = _wait_for_child(child, 10 * SECONDS)
    if code != 0:
        raise RuntimeError(f"a base run failed: {case.argv}: exit code {code}: {error_output}")
    return output


class _Child(NamedTuple):
    pid: int
    end: int  # read end of a pipe that only the child holds open
    out: Path
    started: float


def _start_child(case: Case, folder: Path, name: str) -> _Child:
    out = folder / f".{name}"
    end, write_end = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        os.close(end)
        _run_in_child(case, folder, out)
    os.close(write_end)
    return _Child(pid, end, out, time.monotonic())


def _run_in_child(case: Case, folder: Path, out: Path) -> NoReturn:
    """Run the case in this process, a child of its own group, and end it as Python would."""
    code = 1
    try:
        os.setpgid(0, 0)
        for number, path in ((1, f"{out}.out"), (2, f"{out}.err")):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)
        sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * os.sysconf("SC_PAGE_SIZE") + MORE_MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        resource.setrlimit(resource.RLIMIT_FSIZE, (MOST_WRITTEN, MOST_WRITTEN))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.chdir(folder)
        for name in ("RANK", "WORLD_SIZE"):
            os.environ.pop(name, None)
        sys.argv = [f"tools/{case.tool}.py", *case.argv]
        run_command(_find_main(case.tool))
    except SystemExit as exit:
        code = exit.code if isinstance(exit.code, int) else 0 if exit.code is None else 1
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _find_main(tool: str) -> Callable[[], None]:
    if tool == "predict":
        return commands.predict_run
    module = f"ipu_pipe.cli.{tool}" if tool in COMMANDS else f"tools.{tool}"
    main: Callable[[], None] = importlib.import_module(module).main
    return main


def _wait_for_child(child: _Child, seconds: float) -> Tuple[Optional[int], str, str]:
    """Wait for a child; return its exit code (None: killed at the limit; negative: by a signal), standard output and error."""
    ready, _, _ = select.select([child.end], [], [], max(seconds, 0))
    if not ready:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
    _, status = os.waitpid(child.pid, 0)
    os.close(child.end)
    code = -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
    output, error_output = (
        Path(f"{child.out}.{name}").read_text(encoding="utf-8", errors="replace")
        for name in ("out", "err")
    )
    return code if ready else None, output, error_output


def list_cases(count: int) -> List[Tuple[str, int]]:
    """Return the first `count` cases: kind, and number within the kind."""
    counted = dict.fromkeys(KINDS, 0)
    chosen = []
    for i in range(count):
        kind = TURN[i % len(TURN)]
        chosen.append((kind, counted[kind]))
        counted[kind] += 1
    return chosen


def make_numbered_case(kind: str, number: int, seed: int, folder: Path, bases: Bases) -> Case:
    """Make case `number` of `kind`, with its files in `folder`."""
    return KINDS[kind](random.Random(f"{seed}/{kind}/{number}"), folder, bases)


def judge_case(case: Case, code: Optional[int], output: str, error_output: str) -> str:
    """Return the rule that a case violates, with details, or ""."""
    lines = [line for line in error_output.splitlines() if line.startswith("error: ")]
    if code is None:
        return f"hang: killed after {SECONDS} s"
    if "Traceback (most recent call last)" in error_output:
        return f"traceback: {error_output.strip().splitlines()[-1]}"
    if re.search(r"\w+Warning: ", error_output):
        return f"warning: {error_output.strip().splitlines()[-1]}"
    if code not in (0, 1, 2):
        return f"exit code: {code}"
    if code and not lines:
        return f"no line: exit code {code}, standard error {error_output[-200:]!r}"
    if any(len(line) > LONGEST or not line.isprintable() for line in lines):
        return "no line: too long, or not printable"
    if any(OURS.search(line) for line in lines):
        return f"our line: {next(filter(OURS.search, lines))}"
    shown = (output + error_output).replace("\t", " ").split("\n")
    if not all(line.isprintable() for line in shown):
        return "not printable: on standard output or error"
    if code == 0 and case.find_difference is not None:
        try:
            difference = case.find_difference(output)
        except Exception as error:  # its output cannot be read
            difference = f"its result cannot be read: {type(error).__name__}: {error}"
        return f"differs: {difference}" if difference else ""
    return ""


def run_cases(
    cases: Sequence[Tuple[str, int]], seed: int, scratch: Path, workers: int
) -> Iterator[Result]:
    """Run the cases (kind, number), `workers` at a time; yield each result as its case ends."""
    bases = make_bases(scratch)
    waiting, running = list(reversed(cases)), []  # type: ignore[var-annotated]
    while waiting or running:
        while waiting and len(running) < workers:
            kind, number = waiting.pop()
            folder = scratch / f"{kind}-{number}"
            folder.mkdir()
            case = make_numbered_case(kind, number, seed, folder, bases)
            running.append((kind, number, case, folder, _start_child(case, folder, "case")))
        first = min(entry[4].started for entry in running)
        ready, _, _ = select.select(
            [e[4].end for e in running], [], [], max(first + SECONDS - time.monotonic(), 0)
        )
        for entry in list(running):
            kind, number, case, folder, child = entry
            age = time.monotonic() - child.started
            if child.end in ready or age >= SECONDS:
                running.remove(entry)
                code, output, error_output = _wait_for_child(child, 0)
                bad = judge_case(case, code, output, error_output)
                argv = [case.tool, *case.argv]
                yield Result(kind, number, case.mutation, argv, code, age, bad, error_output)
                shutil.rmtree(folder, ignore_errors=True)


def format_results(results: Sequence[Result]) -> str:
    """Format how many cases of each kind ended how."""
    ends = Counter((r.kind, r.bad.partition(":")[0] or f"exit code {r.code}") for r in results)
    return "\n".join(f"{count:>6} {kind}: {end}" for (kind, end), count in sorted(ends.items()))
