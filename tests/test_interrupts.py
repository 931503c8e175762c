"""Test Ctrl-C at any moment of a run: it ends soon, with exit code 130 and one line.

IPU_PIPE_INTERRUPTS=100 repeats the interrupted run 100 times, IPU_PIPE_INTERRUPT_JOBS at a time.
"""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Iterator, List, NamedTuple, Tuple

import pytest

from tests.support.processes import enable_interrupts, wait_for_file
from tests.support.runs import ROOT

REPEATS = int(os.environ.get("IPU_PIPE_INTERRUPTS", "4"))
JOBS = int(os.environ.get("IPU_PIPE_INTERRUPT_JOBS", "2"))
PATIENCE = (
    60.0  # seconds from Ctrl-C to the end on a machine as busy as may be; what hung took up to 120
)
STARTUP = 0.2  # seconds until the tool's first lines have run
# Python's own start, in which it answers Ctrl-C by itself, is not the tool's: a run counts as started after that
STARTED = "import runpy, sys; sys.argv.pop(0); print('up', flush=True); runpy.run_path(sys.argv[0], run_name='__main__')"


@pytest.fixture()
def busy_processes() -> Iterator[None]:
    """Run two busy loops beside the test; they end by their own clock if no one else ends them."""
    loop = f"import time; end = time.monotonic() + {60 + 10 * REPEATS}\nwhile time.monotonic() < end: pass"
    busy = [subprocess.Popen([sys.executable, "-c", loop]) for _ in range(2)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


class InterruptedRun(NamedTuple):
    """The outcome of a run after Ctrl-C."""

    seed: int
    moment: str
    code: int
    error: str


def interrupt_training(seed: int, out: Path) -> InterruptedRun:
    """Train the digits in a process that gets Ctrl-C at a moment drawn from `seed`.

    TensorBoard is on. Every third run gets a second Ctrl-C.
    """
    generator = random.Random(seed)
    process = subprocess.Popen(
        [sys.executable, "-c", STARTED, "tools/train.py", "configs/mlp_digits.yaml", "--out", str(out)],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=enable_interrupts,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    try:
        assert process.stdout is not None and process.stdout.readline() == "up\n"
        moment = "while it starts" if seed % 2 else "while it trains"
        wait = generator.uniform(STARTUP, 5.0)
        if seed % 2 == 0:
            wait_for_file(out / "metrics.jsonl")
            wait = generator.uniform(0.0, 2.0)
        time.sleep(wait)
        process.send_signal(signal.SIGINT)
        if seed % 3 == 0:
            time.sleep(generator.uniform(0.0, 0.3))
            process.send_signal(signal.SIGINT)
            moment += ", twice"
        _, error = process.communicate(timeout=PATIENCE)
        return InterruptedRun(seed, f"{moment}, {wait:.2f} s", process.returncode, error)
    except subprocess.TimeoutExpired:
        return InterruptedRun(seed, moment, 99, "hangs")
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_ctrl_c_at_any_moment_ends_a_run(tmp_path: Path, busy_processes: None) -> None:
    """Story: with TensorBoard on, one in five runs hung for up to two minutes in the writer's queue
    on a busy machine."""
    folders = [tmp_path / f"run-{seed}" for seed in range(REPEATS)]
    with ThreadPoolExecutor(JOBS) as pool:
        runs = list(pool.map(interrupt_training, range(REPEATS), folders))
    # ended by the signal itself, which a shell calls 130 too: while the interpreter of a run that is done is taken down
    failures = [
        run for run in runs if run.code not in (0, 130, -signal.SIGINT) or "Traceback" in run.error
    ]
    assert not failures
    assert any(run.code == 130 and "interrupted" in run.error for run in runs)


COMMAND = """
import gc, os, signal, sys, threading
from ipu_pipe import interrupts
interrupts.install_end_at_interrupt()
from ipu_pipe.errors import run_command

def ctrl_c():
    os.kill(os.getpid(), signal.SIGINT)
    for _ in range(1000):  # handled between two instructions
        pass

class Finalized:
    def __del__(self):
        ctrl_c()

def main():
    {body}

run_command(main)
"""
BODIES = {
    "in the work": "ctrl_c()",
    "twice": """
    try:
        ctrl_c()
    finally:
        ctrl_c()
""",
    "in a finalizer, where Python drops it": "Finalized(); gc.collect(); print('lost')",
    "in an import, which makes it another fault": "sys.path.insert(0, {folder!r}); import interrupted_import; print('lost')",
    "raised as another fault": """
    try:
        ctrl_c()
    except KeyboardInterrupt as error:
        raise ValueError("not printed") from error
""",
    "on the way out": "import atexit; atexit.register(ctrl_c)",
}


@pytest.mark.parametrize("when", BODIES)
def test_ctrl_c_is_one_line_wherever_it_lands(when: str, tmp_path: Path) -> None:
    (tmp_path / "interrupted_import.py").write_text(
        "import os, signal\ntry:\n    os.kill(os.getpid(), signal.SIGINT)\n    for _ in range(1000): pass\n"
        "except BaseException: pass\n"
    )
    code, output, error = run_source(COMMAND.format(body=BODIES[when].format(folder=str(tmp_path))))
    assert (code, output, error) == (130, "", "interrupted\n")


def test_a_command_that_ignores_ctrl_c_keeps_ignoring_it() -> None:
    ignoring = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
    code, output, error = run_source(ignoring + COMMAND.format(body="ctrl_c(); print('done')"))
    assert (code, output, error) == (0, "done\n", "")


def run_source(source: str) -> Tuple[int, str, str]:
    result = subprocess.run(
        [sys.executable, "-c", source], cwd=ROOT, capture_output=True, text=True, preexec_fn=enable_interrupts, timeout=60,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    return result.returncode, result.stdout, result.stderr


def test_ctrl_c_while_the_machine_is_measured_is_one_line() -> None:
    """Story: the processes that measure printed their tracebacks while they were importing."""
    command = [sys.executable, "-m", "ipu_pipe", "measure-hardware"]
    process = subprocess.Popen(
        command, cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True,
        preexec_fn=enable_interrupts, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    end = time.monotonic() + PATIENCE
    # Python's resource tracker and two processes
    while len(children.read_text().split()) < 3 and time.monotonic() < end:
        time.sleep(0.02)
    # in their imports, which take a second or more
    time.sleep(0.3)
    os.killpg(process.pid, signal.SIGINT)
    # to the end of its children, which have the stream, too
    _, error = process.communicate(timeout=PATIENCE)
    assert (process.returncode, error) == (130, "interrupted\n")


# run by make before ipu_pipe can be imported
PARTS_OF_INSTALL = ("check_torchvision.py",)
# write a page of docs, in a second
WRITERS_OF_DOCS = ("draw_prices.py", "write_keys.py")
NO_COMMAND_LINE = (*PARTS_OF_INSTALL, *WRITERS_OF_DOCS, "__init__.py")


def test_every_command_line_ends_quietly_from_its_first_line_on() -> None:
    """All tools install the handler of Ctrl-C before their own imports.

    Commands do so in `cli.run`, the others by themselves.
    """
    late: List[str] = []
    tools = [
        file for file in sorted((ROOT / "tools").glob("*.py")) if file.name not in NO_COMMAND_LINE
    ]
    for file in [ROOT / "ipu_pipe" / "cli" / "__init__.py", *tools]:
        text = file.read_text()
        if file.parent.name == "tools" and "cli.run(" in text:
            imports = re.findall("^(?:import|from) (.*)", text, re.MULTILINE)
            if imports != ["os", "sys", "ipu_pipe import cli  # noqa: E402"]:
                late.append(file.name)
        elif (
            not 0
            < text.find("interrupts.install_end_at_interrupt()")
            < text.find("ipu_pipe.errors")
        ):
            late.append(file.name)
    assert not late
    code = "import sys, ipu_pipe.cli; print([m for m in ('argparse', 'ipu_pipe.errors', 'json') if m in sys.modules])"
    assert run_source(code) == (0, "[]\n", "")
