"""Train on four XLA devices of the CPU, beside the emulator, in a process of its own: `python -m tests.xla_runs CASE`."""

from __future__ import annotations

import json
import sys
from typing import Any, Dict, List, Tuple

import torch

from ipu_pipe.config.load import load_config
from ipu_pipe.pipeline.build import build
from ipu_pipe.pipeline.flow import Flow
from tests.support.runs import DIGITS

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


def train(settings: List[str], *others: str) -> Tuple[Any, Any, List[float]]:
    """Train the smallest config in float64. Return its first weights, its state and its losses."""
    common = [f"steps={STEPS}", "epochs=null", "evaluate=null", "stages=4", "precision=float64"]
    job = build(load_config(DIGITS, [*common, *settings, *others]))
    first = {name: t.clone() for name, t in job.model.state_dict().items()}
    flow = Flow(job)
    results = []
    for _ in range(STEPS):
        flow.give()
        results += flow.take()
    results += flow.drain()
    state = flow.engine.collect_state()
    return first, state, [result.loss for _, result in results]


def compare(settings: List[str]) -> Dict[str, Any]:
    """Return how far xla is from the emulator, as a share of the weights' movement."""
    first, expected, losses = train(settings)
    _, state, xla_losses = train(settings, "backend.name=xla", "backend.devices=4")
    _, alone, _ = train(settings, "backend.name=xla", "backend.devices=1")
    pairs = [(expected.model[name], state.model[name], first[name]) for name in first]
    difference = sum(float((a - b).square().sum()) for a, b, _ in pairs) ** 0.5
    movement = sum(float((a - c).square().sum()) for a, _, c in pairs) ** 0.5
    return {
        "weights": difference / movement,
        "losses": max(abs(a - b) for a, b in zip(losses, xla_losses)),
        "optimizer": max(
            float((t.double() - state.optimizer[name].double()).abs().max())
            for name, t in expected.optimizer.items()
        ),
        "names": sorted(expected.optimizer) == sorted(state.optimizer),
        "one_device": all(torch.equal(t, alone.model[name]) for name, t in state.model.items()),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps({name: compare(CASES[name]) for name in sys.argv[1:]}))
