"""Run the documented commands that train, and write down what each reached: python
tools/documented.py
"""

from __future__ import annotations

import importlib.util
import math
import os
import platform
import re
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from ipu_pipe import interrupts  # noqa: E402

if __name__ == "__main__":
    interrupts.install_end_at_interrupt()  # before the imports that take time

import json  # noqa: E402

from ipu_pipe.cli import train  # noqa: E402
from ipu_pipe.errors import BadInput, Parser, RunFault, run_command  # noqa: E402
from ipu_pipe.files import write_text  # noqa: E402
from ipu_pipe.shipped import find_config  # noqa: E402

PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs" / "tutorials").glob("*.md")),
]
HELP = "train --help"
RESULTS = ROOT / "docs" / "results" / "documented.md"
# the least test accuracy, in guesses
LEAST = 2
# seconds that a command over its limit has to end its processes
LAST = 30

# ---- the commands of a page

BLOCK = re.compile(r"^```(\w+)(?: title=\"([^\"]+)\")?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`([^`]+)`")
COMMAND = re.compile(
    r"((?:torchrun|poprun) .*?)?(?:ipu-pipe train|-m ipu_pipe train|(?:python )?tools/train\.py) (.+)"
)
# what the pages write for the reader's own config; any other word in capitals is left to the reader
ANY_CONFIG = {"CONFIG": "configs/mlp_digits.yaml"}
LEFT_OPEN = re.compile(r"\b[A-Z]{3,}\b")


class FencedBlock(NamedTuple):
    """A fenced block of a page."""

    language: str
    file: str
    text: str


class Command(NamedTuple):
    """A documented command: its page, its text, the words of its launcher and of `train`."""

    page: str
    text: str
    launcher: Tuple[str, ...]
    words: Tuple[str, ...]

    def make_arguments(self) -> List[str]:
        """Return the command as the arguments of Python."""
        launch = ["-m", "torch.distributed.run", *self.launcher[1:]] if self.launcher else []
        # torchrun's own port may be taken
        launch[2:2] = ["--standalone"] if launch and "--standalone" not in launch else []
        return [*launch, str(ROOT / "tools" / "train.py"), *self.words]


def list_blocks(page: Path) -> List[FencedBlock]:
    """Return the fenced blocks of a page."""
    return split_blocks(page.read_text(encoding="utf-8"))


def split_blocks(text: str) -> List[FencedBlock]:
    """Return the fenced blocks in the text of a page."""
    return [FencedBlock(*block) for block in BLOCK.findall(text)]


def list_commands() -> List[Command]:
    """Return the documented commands that train to the end, each once."""
    texts = {str(page.relative_to(ROOT)): page.read_text(encoding="utf-8") for page in PAGES}
    texts[HELP] = train.EPILOG.replace("\n  ", "\n    ")
    commands: Dict[Tuple[str, ...], Command] = {}
    for page, text in texts.items():
        for command in find_commands(page, text):
            commands.setdefault((*command.launcher, *command.words), command)
    return list(commands.values())


def find_commands(page: str, text: str) -> Iterator[Command]:
    """Yield the commands in the text of a page that train to the end."""
    parser = train.main.make_parser()
    for line in _list_code(text):
        match = COMMAND.match(line)
        if match is None:
            continue
        launcher = tuple(word for word in shlex.split(match[1] or "") if word != "python")
        words = tuple(ANY_CONFIG.get(word, word) for word in shlex.split(match[2], comments=True))
        args = parser.parse_known_args(words)[0]
        if not (args.dry_run or args.evaluate or args.resume or args.resume_from is not None):
            yield Command(page, line.partition(" #")[0].strip(), launcher, words)


def _list_code(text: str) -> List[str]:
    """Return the lines of a page's blocks of code, and the code inside its sentences, each on one
    line.
    """
    text = text.replace("\\\n", " ")
    outside = BLOCK.sub("", text)
    lines = [line for block in split_blocks(text) for line in block.text.splitlines()]
    lines += [line for line in outside.splitlines() if line.startswith("    ")]
    lines += INLINE.findall(outside)
    return [" ".join(line.split()) for line in lines]


# ---- running a command


class Outcome(NamedTuple):
    """What became of a command: `reached` and `seconds` of one that ended, `reason` of any other.

    `guessing`: the accuracy of a constant answer; `is_above`: whether the run's is LEAST times that.
    """

    reason: str = ""
    is_fault: bool = False
    reached: str = ""
    guessing: Optional[float] = None
    is_above: Optional[bool] = None
    seconds: float = math.nan


# what begins the line of a command's fault, and what a fault says of data and packages that are not here
ERROR = "error: "
ABSENT = re.compile(r"^data: |no module |ModuleNotFoundError")

# prints the share of the most frequent test label, which a constant answer reaches; fails where the
# model's package or the data are not here
GUESS = """
import collections, sys
from pathlib import Path
from ipu_pipe.config.load import load_config
from ipu_pipe.errors import run_command
from ipu_pipe.job.factories import make_data, resolve_entry

def main():
    config = load_config(sys.argv[1], sys.argv[2:])
    resolve_entry(config.model.entry, "model.entry")
    data = make_data(config)
    labels = collections.Counter(n for _, y in data.test_batches(256) for n in y.flatten().tolist())
    print(max(labels.values()) / sum(labels.values()))

sys.path.insert(0, "")
run_command(main)
"""


def run_documented(command: Command, limit: float) -> Outcome:
    """Run a command in a new folder with the files of its page, for at most `limit` minutes."""
    with tempfile.TemporaryDirectory(prefix="documented-") as temporary:
        folder = Path(temporary)
        if (ROOT / command.page).is_file():
            for block in list_blocks(ROOT / command.page):
                if block.file:
                    (folder / block.file).write_text(block.text, encoding="utf-8")
        try:
            reason = find_obstacle(command, folder)
        except BadInput as error:
            return Outcome("; ".join(error.faults), is_fault=True)
        if reason:
            return Outcome(reason)
        args = train.main.make_parser().parse_args(command.words)
        config = _find_file(args.config, folder)
        code, guessing, fault = _run_python(["-c", GUESS, config, *args.set], folder, limit)
        if code:
            return Outcome(fault, is_fault=ABSENT.search(fault) is None)
        start = time.monotonic()
        if code == 0:
            # the last --out counts
            words = [*command.make_arguments(), "--out", "run"]
            code, _, fault = _run_python(words, folder, limit)
        seconds = time.monotonic() - start
        if code is None:
            return Outcome(f"over the limit of {limit:g} minutes")
        if code != 0:
            return Outcome(f"exit code {code}: {fault}", is_fault=True)
        summary = json.loads((folder / "run" / "summary.json").read_text(encoding="utf-8"))
        return _judge(summary["final"], float(guessing), seconds)


def _judge(final: Dict[str, Any], guessing: float, seconds: float) -> Outcome:
    """Return the outcome of a run that ended."""
    accuracy = final.get("test_accuracy")
    if accuracy is not None:
        above = accuracy >= LEAST * guessing
        return Outcome("", False, f"test accuracy {accuracy:.3f}", guessing, above, seconds)
    key = "test_loss" if final.get("test_loss") is not None else "train_loss"
    return Outcome(reached=f"{key.replace('_', ' ')} {final[key]:.4g}", seconds=seconds)


def find_obstacle(command: Command, folder: Path) -> str:
    """Return why a command cannot run on this machine; "" if it can. Raise `BadInput` if its config
    is wrong.
    """
    # imported here, because a list of the commands needs no torch
    import torch

    from ipu_pipe.config.load import load_config

    if "poprun" in command.launcher or any("backend.ipu." in word for word in command.words):
        return "needs IPUs"
    open_words = LEFT_OPEN.findall(" ".join(command.words))
    if open_words:
        return f"{', '.join(open_words)}: left to the reader"
    args = train.main.make_parser().parse_args(command.words)
    file = _find_file(args.config, folder)
    if not Path(file).is_file():
        return f"{args.config}: a config of the reader's, or one that an earlier command writes"
    config = load_config(file, args.set)
    needed = {"poptorch": "poptorch", "xla": "jax"}.get(config.backend.name)
    if needed is not None and importlib.util.find_spec(needed) is None:
        return "needs IPUs and PopTorch" if needed == "poptorch" else f"needs {needed}"
    if str(config.backend.device).startswith("cuda") and not torch.cuda.is_available():
        return "needs a CUDA device"
    return ""


def _find_file(config: str, folder: Path) -> str:
    """Return the path of the config that a command names in `folder`."""
    own = folder / config
    # the command runs in another folder than this one
    return str(own if own.is_file() else find_config(config).resolve())


def _run_python(
    arguments: Sequence[str], folder: Path, limit: float
) -> Tuple[Optional[int], str, str]:
    """Run Python in `folder` for at most `limit` minutes. Return its exit code, None for one that
    was over the limit, its output, and the last line of its errors.
    """
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    output, errors = folder / ".output", folder / ".errors"
    with output.open("wb") as out, errors.open("wb") as err:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
        )
        code: Optional[int] = None
        try:
            code = process.wait(60 * limit)
        except subprocess.TimeoutExpired:
            pass
        finally:
            if code is None:
                # torchrun ends its processes first
                process.terminate()
                try:
                    process.wait(LAST)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
    lines = errors.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    told = [line for line in lines if line.startswith(ERROR)] or lines
    told_last = "".join(told[-1:])
    told_last = told_last[len(ERROR) :] if told_last.startswith(ERROR) else told_last
    return code, output.read_text(encoding="utf-8", errors="replace"), told_last


# ---- the page


def format_page(outcomes: Dict[Command, Outcome], limit: float, machine: str) -> str:
    """Format the outcomes as a page."""
    ended = {command: one for command, one in outcomes.items() if one.reached}
    others = {command: one for command, one in outcomes.items() if not one.reached}
    lines = [
        "# Documented commands",
        "",
        "    make documented        # python tools/documented.py",
        "",
        f"runs the commands of README, the guides, the tutorials and `{HELP}` that train to the end, each in",
        f"a folder of its own with the files of its page, for at most {limit:g} minutes. `CONFIG` is `{ANY_CONFIG['CONFIG']}`.",
        "*Guessing* is the share of the most frequent test label. The last columns say whether the final test accuracy",
        f"is at least {LEAST} times that, and how long the command took, start and evaluations included.",
        "",
        machine,
        "",
        "| command | page | reached | guessing | above guessing | seconds |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for command, one in ended.items():
        guessing = "" if one.guessing is None else f"{one.guessing:.3f}"
        above = {None: "", True: "yes", False: "no"}[one.is_above]
        lines.append(
            f"| {_format_command(command)} | {one.reached} | {guessing} | {above} | {one.seconds:.0f} |"
        )
    lines += ["", "## Not run to the end", "", "| command | page | why |", "| --- | --- | --- |"]
    lines += [f"| {_format_command(command)} | {one.reason} |" for command, one in others.items()]
    return "\n".join(lines) + "\n"


def _format_command(command: Command) -> str:
    """Format a command and its page as two cells of a table."""
    text = command.text.replace("|", "\\|")
    return f"`{text}` | {command.page}"


def _describe_machine() -> str:
    """Return the line of a page that names the machine and the versions."""
    import torch

    from ipu_pipe.report.provenance import describe_machine, name_commit

    machine = describe_machine()
    commit = name_commit(ROOT, 12)
    memory = machine["memory_bytes"]
    parts = [
        str(machine["cpu"]),
        f"{machine['cores']} cores",
        *([] if memory is None else [f"{memory / 2**30:.0f} GiB"]),
        ", ".join(machine["gpus"]) or "no GPU",
        f"threads of torch: {machine['threads']}",
        f"Python {platform.python_version()}",
        f"torch {torch.__version__}",
        *([] if commit is None else [f"commit {commit}"]),
    ]
    return f"Machine: {', '.join(parts)}."


# ---- the command line


def make_parser() -> Parser:
    """Build the parser of the command line."""
    p = Parser(
        prog="tools/documented.py",
        description="Run the commands of README.md, docs/*.md, docs/tutorials/*.md and train --help "
        "that train to the end\n"
        "(not --dry-run, --resume, --evaluate), each in a folder of its own, and write a table of "
        "what each reached.\n"
        "Exit 1 if any fails. A command over its limit, or one that needs what this machine has "
        "not, is listed with the reason.",
    )
    p.add_argument(
        "--limit",
        type=float,
        default=15,
        metavar="MINUTES",
        help="time limit of a command (default 15)",
    )
    p.add_argument("--only", metavar="TEXT", help="run the commands that contain TEXT")
    p.add_argument("--list", action="store_true", help="print the commands; run nothing")
    p.add_argument(
        "--out",
        type=Path,
        default=RESULTS,
        metavar="FILE",
        help="the page to write, after every command (default: docs/results/documented.md)",
    )
    return p


def main() -> None:
    """Run the command line."""
    args = make_parser().parse_args()
    if not 0 < args.limit < math.inf:
        raise BadInput(f"--limit: {args.limit:g}: must be greater than 0 and finite")
    commands = list_commands()
    chosen = [one for one in commands if args.only is None or args.only in one.text]
    if not chosen:
        raise BadInput(f"--only: {args.only}: no documented command contains it; --list shows them")
    if args.list:
        print("\n".join(f"{one.page}: {one.text}" for one in chosen))
        return
    outcomes = {
        one: Outcome("not reached yet" if one in chosen else f"left out by --only {args.only}")
        for one in commands
    }
    machine = _describe_machine()
    for command in chosen:
        outcome = outcomes[command] = run_documented(command, args.limit)
        above = {None: "", True: "", False: f", below {LEAST} times guessing"}[outcome.is_above]
        print(f"{command.text}: {outcome.reached or outcome.reason}{above}", flush=True)
        write_text(args.out, format_page(outcomes, args.limit, machine))
    failed = [command.text for command, outcome in outcomes.items() if outcome.is_fault]
    if failed:
        raise RunFault(f"{len(failed)} of {len(chosen)} commands failed: {'; '.join(failed)}")


if __name__ == "__main__":
    run_command(main)
