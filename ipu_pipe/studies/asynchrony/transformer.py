"""Experiment (e): the character Transformer, trained as any other run, on the emulator."""

from __future__ import annotations

import json
import statistics
import tempfile
from pathlib import Path
from typing import Any, Dict, List, Tuple

from ipu_pipe.config.load import configure
from ipu_pipe.schedule.methods import resolve_method
from ipu_pipe.schedule.timelines import make_schedule
from ipu_pipe.studies.asynchrony.block_runs import jobs_for, microbatches_for

STAGES, SLOTS, STEP, WINDOW = 16, 2078, 2.0**-3, 64

# 0.7 M parameters
MODEL = {"vocabulary": 84, "width": 64, "heads": 4, "blocks": STAGES - 2, "context": 32, "gpt2": False}

Run = Tuple[str, str, Dict[str, Any], float, List[Tuple[int, int, float]]]


def transformer_runs(seed: int, slots: int = SLOTS) -> List[Run]:
    """PipeDream, and LocalSGD with K = 1, 4 and 8, in so many slots; of LocalSGD's jobs whole steps of all replicas."""
    found = [_run("PipeDream", "pipedream", {}, microbatches_for(slots, STAGES), 1, slots, seed)]
    for K in (1, 4, 8):
        steps = jobs_for(slots, STAGES, STAGES, K) // STAGES
        args = {"replicas": STAGES, "local_steps": K}
        found.append(_run(f"LocalSGD K={K}", "local_sgd", args, steps, STAGES, slots, seed))
    return found


def _run(label: str, method: str, args: Dict[str, Any], steps: int, width: int, slots: int, seed: int) -> Run:
    """One training run; its loss is the mean over the microbatches of the last `WINDOW` or so before each point."""
    from ipu_pipe.run.train import train  # torch and all the rest

    config = configure(
        model={"entry": "models.transformer:transformer_lm", "args": MODEL},
        data={"name": "shakespeare", "context": 32, "test_subset": 64},
        method=method, method_args=args, micro_batch_size=16, steps=steps, seed=seed,
        optimizer={"name": "sgd", "lr": STEP}, evaluate={"every": 0}, backend={"threads": 1},
        log={"every": 1, "tensorboard": False}, checkpoint={"keep": 1},
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        train(config, folder, quiet=True)
        lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    losses = [record["train_loss"] for record in map(json.loads, lines) if "train_loss" in record]
    end = make_schedule(resolve_method(method, args), STAGES, steps * width, width).slot_count
    every = max(WINDOW // width, 1)
    points = range(every, steps + 1, every)
    curve = [(k * width * STAGES, k * end // steps, statistics.mean(losses[k - every : k])) for k in points]
    return label, method, args, STEP, curve
