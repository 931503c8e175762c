"""Train on XLA devices of the CPU, beside the emulator, in a process of its own.

python -m tests.xla_runs WORK CASE..., where WORK is a function of this file and CASE one of the table
it takes.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import weakref
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple, Tuple

import torch
from torch import nn
from torch.nn import functional as F

import ipu_pipe
from ipu_pipe.config.load import load_config
from ipu_pipe.pipeline.flow import Flow
from ipu_pipe.run import train as run
from ipu_pipe.run.build import build
from ipu_pipe.schedule.versions import VersionTable, count_weight_copies
from models.resnet import preact_resnet20
from models.transformer import transformer_lm
from tests.support.models import Composed
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
# of methods whose slots can be programs: name -> settings
_PB = "method=pipelined_backprop"
SLOT_CASES: Dict[str, List[str]] = {
    "accumulated": [_PB, "gradient_accumulation=4", SGD],
    "rules": [*CASES["pipelined_backprop"], "gradient_accumulation=1"],
    "by_difference": [_PB, "method_args={weight_prediction: {form: difference}}", SGD],
    "spectrain": CASES["spectrain"],
    "cosine": [_PB, "lr_schedule={name: cosine}", SGD],
    "pipemare": CASES["pipemare"],
    "no_decay": [_PB, "optimizer={name: sgd, lr: 0.05, weight_decay: 0.1, no_decay: ['*bias']}"],
}
STEPS = 6
COMMON = [f"steps={STEPS}", "epochs=null", "evaluate=null", "stages=4", "precision=float64"]
XLA = ["backend.name=xla", "backend.devices=4"]
ONE = ["backend.name=xla", "backend.devices=1"]
SLOT = [*ONE, "backend.program=slot", "log.trace=null"]


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


def measure_state_distance(a: Dict[str, Any], b: Dict[str, Any]) -> float:
    """Return the greatest difference of two states' tensors; infinity if their names differ."""
    if a.keys() != b.keys():
        return float("inf")
    return max(float((t.double() - b[name].double()).abs().max()) for name, t in a.items())


def measure_share(first: Dict[str, Any], expected: Dict[str, Any], actual: Dict[str, Any]) -> float:
    """Return how far weights are from the expected ones, as a share of their movement from the first ones."""
    difference, movement = (
        sum(float((expected[n] - other[n]).double().square().sum()) for n in first)
        for other in (actual, first)
    )
    return (difference / movement) ** 0.5


def compare(settings: List[str]) -> Dict[str, Any]:
    """Compare four devices with the emulator, and with one device."""
    four, alone = _compare(settings, *XLA), _compare(settings, *ONE)
    return {**four, "one_device": four == alone}


def _compare(settings: List[str], *others: str) -> Dict[str, Any]:
    first, expected, losses = train(settings)
    _, state, xla_losses = train(settings, *others)
    return {
        "weights": measure_share(first, expected.model, state.model),
        "losses": max(abs(a - b) for a, b in zip(losses, xla_losses)),
        "optimizer": measure_state_distance(expected.optimizer, state.optimizer),
    }


def compare_slots(settings: List[str]) -> Dict[str, Any]:
    """Compare programs of whole slots with the emulator."""
    return _compare(settings, *SLOT)


def compare_float32(settings: List[str]) -> Dict[str, Any]:
    """Compare four devices with the emulator in single precision."""
    return _compare([*settings, "precision=float32"], *XLA)


def count_versions(settings: List[str]) -> Dict[str, Any]:
    """Return by stage the greatest bytes of old versions: those that the report says, those of the
    arrays that were alive after an action, and the versions beside the newest by the table.
    """
    job = build(load_config(DIGITS, [*COMMON, *settings, *XLA]))
    flow = Flow(job)
    player = flow.engine._player  # type: ignore[attr-defined]
    # id -> an array that was made; it may be that of a later one by now
    made: List[Dict[int, Any]] = [{} for _ in player.stages]
    alive = [0] * len(player.stages)

    def note(s: int, arrays: List[Any]) -> List[Any]:
        made[s].update({id(x): weakref.ref(x) for x in arrays})
        return arrays

    def run(kind: Any, stage: Any, number: int) -> None:
        play(kind, stage, number)
        s = stage.stage
        newest = _list_arrays(stage)
        note(s, newest)
        held = [x for x in (one() for one in made[s].values()) if x is not None]
        alive[s] = max(alive[s], sum(x.nbytes for x in held) - sum(x.nbytes for x in newest))

    for stage in player.stages:
        note(stage.stage, _list_arrays(stage))
        correct = stage.optimizer.correct
        stage.optimizer.correct = lambda *a, s=stage.stage, correct=correct: note(s, correct(*a))
    play, player._act = player._act, run
    for _ in range(STEPS):
        flow.give()
    flow.drain()
    copies = count_weight_copies(VersionTable(job.schedule, job.method))
    return {
        "report": flow.engine.report().version_bytes,
        "alive": alive,
        "table": [(int(n) - 1) * s.stepped_bytes for n, s in zip(copies, player.stages)],
    }


def drain_slots(settings: List[str]) -> Dict[str, Any]:
    """Drain a pipeline in the middle. Return whether slots count the messages that actions do, and
    how many programs they compiled.
    """
    links = []
    for others in (SLOT, [*ONE, "backend.program=action"]):
        flow = Flow(build(load_config(DIGITS, [*COMMON, *settings, *others])))
        for _ in range(2):
            for _ in range(STEPS // 2):
                flow.give()
            flow.drain()
        links.append(flow.engine.report().links)
        if others is SLOT:
            programs = flow.engine._player._program._cache_size()  # type: ignore[attr-defined]
    return {"links": links[0] == links[1] and len(links[0]) == 6, "programs": programs}


def _list_arrays(stage: Any) -> List[Any]:
    """List the arrays of a stage's newest weights, and of its state if versions keep it."""
    states = stage.optimizer.states if stage.optimizer.corrects_reads else []
    return [*stage.weights, *(x for one in states for x in one.values())]


class Cut(NamedTuple):
    """A run that begins on one backend and goes on, from its half, on another; `method`: of `CASES`."""

    first: List[str]
    then: List[str]
    method: str = "pipemare"


CUTS = {
    "four": Cut(XLA, XLA),
    "one_after_four": Cut(XLA, ONE),
    "slots": Cut(SLOT, SLOT),
    "to_emulator": Cut(XLA, []),
    "from_emulator": Cut([], XLA),
    "slots_to_emulator": Cut(SLOT, []),
    "slots_from_emulator": Cut([], SLOT),
}


def go_on(cut: Cut) -> Dict[str, Any]:
    """Cut a run off after half of its updates and resume it. Return how far it is from the whole
    run, and how far the whole run moved since.
    """
    half = STEPS // 2
    settings = [
        *COMMON,
        *CASES[cut.method],
        f"checkpoint.every={half}",
        "checkpoint.keep=9",
        "log.every=1",
    ]
    with tempfile.TemporaryDirectory() as name:
        whole, resumed = Path(name) / "whole", Path(name) / "cut"
        run.train(load_config(DIGITS, [*settings, *cut.first]), whole, quiet=True)
        shutil.copytree(whole, resumed)
        shutil.rmtree(find_checkpoint(resumed, STEPS))
        (resumed / "summary.json").unlink()
        run.train(load_config(DIGITS, [*settings, *cut.then]), resumed, resume=True, quiet=True)
        end = read_state(whole)
        losses = [read_column(path, "train_loss") for path in (whole, resumed)]
        return {
            "state": measure_state_distance(end, read_state(resumed)),
            "losses": max(abs(a - b) for a, b in zip(*losses)),
            "moved": measure_state_distance(end, read_state(resumed, half)),
        }


# ---- loops of a caller's own


class Loop(NamedTuple):
    """A model, its microbatches' inputs, an optimizer and the pipeline's settings."""

    make_model: Callable[[], nn.Module]
    draw: Callable[[], Tuple[torch.Tensor, torch.Tensor]]
    make_optimizer: Callable[[Any], torch.optim.Optimizer]
    method: str
    settings: Dict[str, Any]


WORDS, CLASSES = 50, 5


def _make_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.05, momentum=0.9)


def _make_adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, 1e-3)


def _make_lstm() -> nn.Module:
    """Make a classifier of the last word by an LSTM of two layers in both directions."""
    return Composed(
        lambda m, x: m.head(m.lstm(m.words(x))[0][:, -1]),
        words=nn.Embedding(WORDS, 8),
        lstm=nn.LSTM(8, 8, 2, batch_first=True, bidirectional=True),
        head=nn.Linear(16, CLASSES),
    )


def _draw_text() -> Tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(0, WORDS, (8, 8)), torch.randint(0, WORDS, (8, 8))


def _draw_classes() -> Tuple[torch.Tensor, torch.Tensor]:
    return _draw_text()[0], torch.randint(0, CLASSES, (8,))


def _draw_photos() -> Tuple[torch.Tensor, torch.Tensor]:
    # BatchNorm of fewer samples than eight at 1 x 1 pixel is ill-conditioned
    return torch.randn(32, 3, 32, 32, dtype=torch.float64), torch.randint(0, CLASSES, (32,))


def _make_resnet() -> nn.Module:
    return preact_resnet20(norm="batch")


def _make_gpt2() -> nn.Module:
    # the library takes seconds to import
    from tests.third_party_models import make_gpt2

    # its attention draws with torch's function, not with a module
    return make_gpt2(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)


def _make_lm() -> nn.Module:
    return transformer_lm(WORDS, width=16, heads=2, blocks=4, context=8, dropout=0.2)


_THREE = {"backend_args": {}, "stages": 3, "microbatches": 4}
_FOUR = {"backend_args": {"devices": 4}, "stages": 4, "microbatches": 4}
_SLOTS = {"backend_args": {"devices": 1, "program": "slot"}, "stages": 6, "microbatches": 1}
LOOPS: Dict[str, Loop] = {
    # first, since jax begins with the devices of the first loop
    "resnet20": Loop(_make_resnet, _draw_photos, _make_sgd, "pipemare", _FOUR),
    "transformer": Loop(_make_lm, _draw_text, _make_adamw, "pipedream_2bw", _FOUR),
    "gpt2": Loop(_make_gpt2, _draw_text, _make_sgd, "pipedream_2bw", _THREE),
    "lstm": Loop(_make_lstm, _draw_classes, _make_sgd, "pipedream", _THREE),
    "transformer_slots": Loop(_make_lm, _draw_text, _make_adamw, "pipelined_backprop", _SLOTS),
}


def train_loop(loop: Loop, backend: str) -> Tuple[Dict[str, Any], Dict[str, Any], List[float]]:
    """Train in a loop of one's own; return the first state, the last one and the losses."""
    torch.manual_seed(0)
    model = loop.make_model().double()
    first = {name: t.clone() for name, t in model.state_dict().items()}
    settings = {**loop.settings, "method": loop.method, "backend": backend}
    if backend == "emulator":
        del settings["backend_args"]
    optimizer = loop.make_optimizer(model.parameters())
    losses = []
    with ipu_pipe.Pipeline(model, F.cross_entropy, optimizer, **settings) as pipe:
        for _ in range(STEPS):
            losses += [update.loss for update in pipe.step(*loop.draw())]
        losses += [update.loss for update in pipe.drain()]
    return first, model.state_dict(), losses


def compare_loop(loop: Loop) -> Dict[str, Any]:
    """Return how far a loop on xla is from the emulator's, weights and statistics as a share of
    their movement.
    """
    first, expected, losses = train_loop(loop, "emulator")
    _, state, xla_losses = train_loop(loop, "xla")
    assert len(losses) == len(xla_losses) == STEPS
    return {
        "state": measure_share(first, expected, state),
        "losses": max(abs(a - b) for a, b in zip(losses, xla_losses)),
    }


# work -> the table of its cases
WORK: Dict[Callable[..., Dict[str, Any]], Dict[str, Any]] = {
    **dict.fromkeys((compare, compare_float32, count_versions), CASES),
    **dict.fromkeys((compare_slots, drain_slots), SLOT_CASES),
    go_on: CUTS,
    compare_loop: LOOPS,
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    work, cases = {one.__name__: (one, cases) for one, cases in WORK.items()}[sys.argv[1]]
    print(json.dumps({name: work(cases[name]) for name in sys.argv[2:] or cases}))
