"""Train on XLA devices of the CPU, beside the emulator, in a process of its own.

python -m tests.xla_runs compare_short|compare|resume|move CASE...
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any, Callable, Dict, List, Tuple

import torch

from ipu_pipe.config.load import load_config
from ipu_pipe.pipeline.build import build
from ipu_pipe.pipeline.flow import Flow
from ipu_pipe.run import train as run
from tests.support.runs import DIGITS, find_checkpoint, read_column, read_state

ADAMW = "optimizer={name: adamw, lr: 0.001, weight_decay: 0.1}"
SGD = "optimizer={name: sgd, lr: 0.05, momentum: 0.9, weight_decay: 0.01}"
# name -> settings
CASES: Dict[str, List[str]] = {
    "gpipe": ["method=gpipe"],
    "zb_h1": ["method=zb_h1", "gradient_accumulation=4"],
    "pipedream": ["method=pipedream", ADAMW],
    "pipedream_2bw": ["method=pipedream_2bw"],
    "pipemare": [
        "method=pipemare",
        "method_args={t1: {anneal_updates: 10}, t2: {decay: 0.5}}",
        ADAMW,
    ],
    "pipelined_backprop": [
        "method=pipelined_backprop",
        "method_args={spike_compensation: {scale: 1}, gradient_shrinking: {factor: 0.9}}",
        SGD,
    ],
    "spectrain": ["method=spectrain"],
}
STEPS = 6
COMMON = [f"steps={STEPS}", "epochs=null", "evaluate=null", "stages=4", "precision=float64"]
XLA = ["backend.name=xla", "backend.devices=4"]


def train(settings: List[str], *others: str) -> Tuple[Any, Any, List[float]]:
    """Train the smallest config in float64. Return its first weights, its state and its losses."""
    job = build(load_config(DIGITS, [*COMMON, *settings, *others]))
    first = {name: t.clone() for name, t in job.model.state_dict().items()}
    flow = Flow(job)
    results = []
    for _ in range(STEPS):
        flow.give()
        results += flow.take()
    results += flow.drain()
    state = flow.engine.collect_state()
    return first, state, [result.loss for _, result in results]


def measure_distance(a: Dict[str, Any], b: Dict[str, Any]) -> float:
    """Return the greatest difference of two states' tensors; infinity if their names differ."""
    if a.keys() != b.keys():
        return float("inf")
    return max(float((t.double() - b[name].double()).abs().max()) for name, t in a.items())


def compare_short(settings: List[str]) -> Dict[str, Any]:
    """Return how far two devices are from the emulator, as a share of the weights' movement."""
    return _compare([*settings, "stages=2"], "backend.name=xla", "backend.devices=2")[0]


def compare(settings: List[str]) -> Dict[str, Any]:
    """Compare four devices with the emulator, and with one device."""
    distances, state = _compare(settings, *XLA)
    _, alone, _ = train(settings, "backend.name=xla", "backend.devices=1")
    same = all(torch.equal(t, alone.model[name]) for name, t in state.model.items())
    return {**distances, "one_device": same}


def _compare(settings: List[str], *others: str) -> Tuple[Dict[str, Any], Any]:
    first, expected, losses = train(settings)
    _, state, xla_losses = train(settings, *others)
    pairs = [(expected.model[name], state.model[name], first[name]) for name in first]
    difference = sum(float((a - b).square().sum()) for a, b, _ in pairs) ** 0.5
    movement = sum(float((a - c).square().sum()) for a, _, c in pairs) ** 0.5
    distances = {
        "weights": difference / movement,
        "losses": max(abs(a - b) for a, b in zip(losses, xla_losses)),
        "optimizer": measure_distance(expected.optimizer, state.optimizer),
    }
    return distances, state


def train_cut_run(settings: List[str], folder: Path, first: List[str], then: List[str]) -> Path:
    """Train a run on the backend `first`, cut it off after half of its updates, and resume it on
    the backend `then`. Return its folder; the whole run is `folder`/whole.
    """
    half = STEPS // 2
    common = [*COMMON, *settings, f"checkpoint.every={half}", "checkpoint.keep=9", "log.every=1"]
    whole = folder / "whole"
    run.train(load_config(DIGITS, [*common, *first]), whole, quiet=True)
    cut = folder / "cut"
    shutil.copytree(whole, cut)
    shutil.rmtree(find_checkpoint(cut, STEPS))
    (cut / "summary.json").unlink()
    run.train(load_config(DIGITS, [*common, *then]), cut, resume=True, quiet=True)
    return cut


def resume(settings: List[str]) -> Dict[str, Any]:
    """Return whether a run that is resumed on xla has the bits of one that was not cut off."""
    with tempfile.TemporaryDirectory() as name:
        cut = train_cut_run(settings, Path(name), XLA, XLA)
        a = read_state(Path(name) / "whole")
        b = read_state(cut)
        losses = [read_column(path, "train_loss") for path in (Path(name) / "whole", cut)]
        middle = measure_distance(a, read_state(cut, STEPS // 2))
    return {"state": measure_distance(a, b), "losses": losses[0] == losses[1], "moved": middle}


def move(settings: List[str]) -> Dict[str, Any]:
    """Return how far a run that goes from xla to the emulator, and back, is from the emulator's."""
    results = {}
    for name, (first, then) in {"to_emulator": (XLA, []), "to_xla": ([], XLA)}.items():
        with tempfile.TemporaryDirectory() as folder:
            cut = train_cut_run(settings, Path(folder), first, then)
            results[name] = measure_distance(read_state(Path(folder) / "whole"), read_state(cut))
    return results


WORK: Dict[str, Callable[[List[str]], Dict[str, Any]]] = {
    work.__name__: work for work in (compare_short, compare, resume, move)
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    asked = WORK[sys.argv[1]]
    print(json.dumps({name: asked(CASES[name]) for name in sys.argv[2:]}))
