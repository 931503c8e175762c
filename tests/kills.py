"""Kill the ranks of a run again and again: after all restarts it must end with the numbers of a run that was never killed.

    attempt 0   rank 1 dies at its moment 37     a moment: an action, a file that is renamed into place, or a line of metrics
    attempt 1   rank 0 dies at its moment 12     the others get SIGTERM, and all are restarted, as torchrun does
    attempt 2   ends                             weights, optimizer state and metrics are, bit for bit, the emulator's

A run on XLA devices (`--backend xla`) is one process, and must end with the numbers of such a run that was never killed.

`python -m tests.kills --kills 200 --seed 0` prints each run; repeat a failed one with `--kills 1 --seed SEED`.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional, Sequence

from torch.distributed import TCPStore

from ipu_pipe.config.load import load_config
from ipu_pipe.run.train import train
from tests import forked
from tests.support.runs import read_numbers, read_summary

KILLS = 3  # of a run, at most
PATIENCE = 60.0  # seconds of an attempt
DIGITS = forked.ROOT / "configs" / "mlp_digits.yaml"
METHODS = ("pipedream", "pipedream_flush", "pipedream_2bw", "gpipe", "pipemare", "local_greedy")
XLA_METHODS = (*METHODS[:-1], "pipelined_backprop")
# backend -> the number of its processes, and the settings that it needs
RANKS = {"distributed": 2, "xla": 1}
BACKEND_SETTINGS = {
    "distributed": ["backend.name=distributed", "backend.threads=1", "backend.deadline=30"],
    "xla": ["backend.name=xla", "backend.threads=1", "backend.devices=2"],
}


class Kill(NamedTuple):
    """The rank to kill, and at which moment after its start."""

    rank: int
    moment: int


class Start(NamedTuple):
    """One start of a run: which in a row, whom to kill, the command line and the job's name."""

    attempt: int
    kill: Optional[Kill]
    arguments: Sequence[str]
    job: str


def draw_settings(draw: random.Random, backend: str) -> Dict[str, Any]:
    """Draw the keys of a short run."""
    optimizer = draw.choice(({"name": "sgd"}, {"name": "adamw", "momentum": "null"}))
    methods = XLA_METHODS if backend == "xla" else METHODS
    return {
        **{f"optimizer.{key}": value for key, value in optimizer.items()},
        "method": draw.choice(methods), "stages": 2, "steps": draw.randint(10, 14), "gradient_accumulation": 2,
        "micro_batch_size": 4, "optimizer.lr": 0.01,
        "model.args": "{inputs: 64, width: 8, layers: 2, classes: 10}", "evaluate": "{steps: 3, subset: 20}",
        "checkpoint.every": draw.randint(1, 3), "checkpoint.keep": 2, "log": "{every: 1, tensorboard: false}",
    }  # fmt: skip


def run_seed(seed: int, out: Path, backend: str = "distributed") -> int:
    """Train a run that is killed up to `KILLS` times; return the number of kills. Raise `AssertionError` unless it ends as a run
    that was never killed."""
    draw = random.Random(seed)
    settings = [f"{key}={value}" for key, value in draw_settings(draw, backend).items()]
    sets = [*settings, *BACKEND_SETTINGS[backend]]
    if backend == "xla" and "method=pipelined_backprop" in settings and draw.random() < 0.5:
        sets += ["backend.devices=1", "backend.program=slot", "log.trace=null"]
    ranks = RANKS[backend]
    whole, killed = out / "whole", out / "killed"
    if backend == "xla":
        start = Start(0, None, [str(DIGITS), "--out", str(whole), "--set", *sets], f"whole-{seed}")
        codes, output = run_attempt(start, ranks, out / "attempt-whole")
        assert codes == [0], output
    else:
        config = load_config(str(DIGITS), [*settings, "backend.threads=1"])
        train(config, whole, quiet=True)
    arguments = [str(DIGITS), "--out", str(killed), "--set", *sets]
    kills = 0
    for attempt in range(100):
        kill = Kill(draw.randrange(ranks), draw.randint(1, 30)) if kills < KILLS else None
        start = Start(attempt, kill, arguments, f"kills-{seed}")
        codes, output = run_attempt(start, ranks, out / f"attempt-{attempt}")
        kills += -signal.SIGKILL in codes
        if not any(codes):
            break
        assert -signal.SIGKILL in codes, (
            f"attempt {attempt}, {kill}: no rank was killed, the exit codes are {codes}:\n{output}"
        )
    compare_runs(whole, killed)
    return kills


def compare_runs(whole: Path, killed: Path) -> None:
    """Raise `AssertionError` unless both runs ended with the same numbers, and none left a file."""
    summary, final = (read_summary(run) for run in (whole, killed))
    for name in ("model", "optimizer"):
        file = f"checkpoints/step-{summary['steps']}/{name}.safetensors"
        assert (killed / file).read_bytes() == (whole / file).read_bytes(), file
    lines, expected = read_numbers(killed), read_numbers(whole)
    assert lines == expected, f"metrics.jsonl: {lines}, of the run never killed {expected}"
    assert (final["initial"], final["final"]) == (summary["initial"], summary["final"])
    left = [*killed.rglob(".*"), *killed.rglob("*.part")]
    assert not left, left


def run_attempt(start: Start, world: int, output_folder: Path) -> Any:
    """Start `world` ranks; when one dies, end the others. Return their exit codes and output."""
    output_folder.mkdir(parents=True)
    # it outlives its ranks; torchrun makes a new one for every attempt
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    variables = {
        "TORCHELASTIC_RESTART_COUNT": str(start.attempt),
        "TORCHELASTIC_RUN_ID": start.job,
    }
    ranks = []
    for rank in range(world):
        environment = {**forked.make_rank_environment(rank, world, store.port), **variables}
        arguments = start.kill, list(start.arguments), str(output_folder / str(rank)), environment
        ranks.append(forked.get_fork_server().Process(target=_run_rank, args=arguments))
    for process in ranks:
        process.start()
    end = time.monotonic() + PATIENCE
    while any(process.is_alive() for process in ranks) and time.monotonic() < end:
        if any(process.exitcode for process in ranks):
            time.sleep(0.1)  # torchrun's interval of polling
            for process in ranks:
                process.terminate()
            break
        time.sleep(0.01)
    hung = []
    for rank, process in enumerate(ranks):
        process.join(PATIENCE)
        if process.is_alive():
            hung.append(rank)
            process.kill()
            process.join()
    output = "".join(path.read_text() for path in sorted(output_folder.iterdir()))
    # a hung rank that is killed here has the exit code of a rank that was to die
    assert not hung, (
        f"attempt {start.attempt}, {start.kill}: ranks {hung} did not end within {PATIENCE:g} s:\n{output}"
    )
    return [process.exitcode for process in ranks], output


def _run_rank(
    kill: Optional[Kill], arguments: List[str], output: str, variables: Dict[str, str]
) -> None:
    if kill is not None and kill.rank == int(variables["RANK"]):
        _die_at(kill.moment, "backend.name=xla" in arguments)
    forked.run_forked_command("train", arguments, output, variables)


def _die_at(moment: int, on_xla: bool) -> None:
    """Arrange that this process kills itself at moment number `moment`."""
    from ipu_pipe.backends.processes.memory import MemoryCounters
    from ipu_pipe.store.folder import RunFolder

    left = moment

    def count(function: Any) -> Any:
        def count_and_call(*arguments: Any, **keywords: Any) -> Any:
            nonlocal left
            left -= 1
            if not left:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **keywords)

        return count_and_call

    os.replace = count(os.replace)
    RunFolder.write_metrics = count(RunFolder.write_metrics)  # type: ignore[method-assign]
    MemoryCounters.sample = count(MemoryCounters.sample)  # type: ignore[method-assign]  # after each action
    if on_xla:
        from ipu_pipe.backends.xla.player import Player
        from ipu_pipe.backends.xla.slots import SlotPlayer

        Player._act = count(Player._act)  # type: ignore[method-assign]
        SlotPlayer._play_slot = count(SlotPlayer._play_slot)  # type: ignore[method-assign]


def main() -> int:
    """Run seeds until `--kills` ranks were killed."""
    parser = argparse.ArgumentParser(prog="python -m tests.kills", description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument(
        "--seed", type=int, default=0, help="of the first run; each later run has the next one"
    )
    parser.add_argument("--backend", choices=sorted(RANKS), default="distributed")
    arguments = parser.parse_args()
    begin, kills, failed, seed = time.monotonic(), 0, 0, arguments.seed
    while kills < arguments.kills:
        with tempfile.TemporaryDirectory() as folder:
            try:
                kills += run_seed(seed, Path(folder), arguments.backend)
                print(
                    f"seed {seed}: {kills} of {arguments.kills} kills, {time.monotonic() - begin:.0f} s",
                    flush=True,
                )
            except Exception as error:
                failed, kills = failed + 1, kills + KILLS
                again = f"make kills KILLS=1 SEED={seed} BACKEND={arguments.backend}"
                print(f"seed {seed} failed: {again}\n{type(error).__name__}: {error}", flush=True)
        seed += 1
    print(
        f"{seed - arguments.seed - failed} of {seed - arguments.seed} runs ended as if never killed"
    )
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
