"""Draw what simulated ranks train from a case's number, and compute the expected result on the
emulator."""

from __future__ import annotations

import copy
import functools
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple, Optional

import torch
from torch import nn

from ipu_pipe.backends.interface import CheckpointState, Report
from ipu_pipe.backends.ranks import run_on_main
from ipu_pipe.config.load import configure
from ipu_pipe.data.sources import TensorData
from ipu_pipe.job.evaluation import EvaluationResult
from ipu_pipe.job.record import PlannedJob
from ipu_pipe.pipeline.flow import Flow
from ipu_pipe.run.build import build
from ipu_pipe.schedule.methods import METHODS, resolve_method
from tests.staged_models import (
    MODELS,
    TIED,
    SkippingModel,
    join_stages,
    make_checkpointed_stages,
    make_redrawing_stages,
    make_repeating_model,
)
from tests.support.flows import evaluate_on_test_set
from tests.test_rules import ROWS as RULES

DEADLINE = 300.0  # virtual seconds
SAMPLES, SIZE = 512, 2  # of the data, and of a microbatch
FILES = {  # of rows, and their microbatches
    "reversed.csv": 2,  # backwards in the reversed order of their forwards
    "handed_over.csv": 3,  # several activations and gradients wait at once, in another order, for the next stage of their rank
}


def list_settings() -> List[Dict[str, Any]]:
    """Return keys of configs: each method that processes run, its variants, and the update rules
    whose delays are the pipeline's own."""
    others = ("randomized_pipedream", "rows", "local_chunked", "last_layers")
    names = [name for name in METHODS if name not in others]
    settings: List[Dict[str, Any]] = [{"method": name} for name in names]
    for file, count in FILES.items():
        args = {"file": str(Path(__file__).with_name(file))}
        settings.append({"method": "rows", "method_args": args, "gradient_accumulation": count})
    split, two = {"split_backward": True}, {"stages_per_device": 2}
    for name in ("pipedream", "pipelined_backprop"):
        settings += [{"method": name, "method_args": split}, {"method": name, **two}]
        settings.append({"method": name, "method_args": split, **two})
    variants: List[Any] = [
        ("pipedream", {**split, "activation_limit": 2}),
        ("pipedream", {"schedule": "1f1b_capped"}),
        ("pipedream", {"schedule": "dataflow"}),
        ("pipedream", {"stash": False}),
        ("pipemare", {"stash": True}),
        ("local_chunked", {"blocks": 2}),
        ("last_layers", {"layers": 1}),
        ("local_sgd", {"replicas": 3, "local_steps": 2}),
        ("local_sgd", {"replicas": 2, "local_steps": 4, "outer": {"mix": 0.25}}),
        ("local_sgd", {"replicas": 3, "local_steps": 4, "outer": {"fragments": 2, "delay": 1, "mix": 0.5}}),
        ("local_sgd", {"replicas": 3, "local_steps": 4, "outer": {"fragments": "per_stage", "offset": 1}}),
    ]  # fmt: skip
    rows = [row for row in RULES.values() if not resolve_method(row.method, row.args).delay]
    variants += [
        (row.method, {**row.args, **({"warmup": row.switch} if row.switch else {})}) for row in rows
    ]
    return settings + [{"method": name, "method_args": args} for name, args in variants]


SETTINGS = list_settings()

MAKERS: Dict[str, Callable[[], List[nn.Module]]] = {
    **MODELS,
    **TIED,
    "checkpointed": make_checkpointed_stages,
    "redrawing": make_redrawing_stages,
    "deep": lambda: [nn.Sequential(nn.Linear(12, 12), nn.Tanh()) for _ in range(8)] + [nn.Linear(12, 4)],
}  # fmt: skip
NAMES = [*MAKERS, "skipping", "skipping-frozen", "twice", *3 * ["deep"]]


def make_simulated_model(name: str) -> nn.Module:
    """Return a model of `tests/staged_models.py`, or a deep one, with the same weights each time."""
    torch.manual_seed(3)
    if name.startswith("skipping"):
        return SkippingModel(trains_scale=name == "skipping")
    return make_repeating_model() if name == "twice" else join_stages(MAKERS[name]())


@dataclass(frozen=True)
class Case:
    """A run. `keys`: of its config; `stop_after`: the number of updates after which early
    stopping is requested; `through_channels`: messages use groups of nccl."""

    model: str
    devices: int
    keys: Dict[str, Any]
    stop_after: Optional[int] = None
    through_channels: bool = False

    @property
    def ranks(self) -> int:
        """Return the number of ranks."""
        return self.devices * int(self.keys.get("replicas", 1))


class Result(NamedTuple):
    """Result of a run on the main rank: losses by update, evaluations, states of its checkpoints
    (the last at the end), and the report of its measurements."""

    losses: List[float]
    evaluations: List[List[EvaluationResult]]
    states: List[Optional[CheckpointState]]
    report: Optional[Report] = None


def draw_case(number: int, rng: random.Random) -> Case:
    """Return a case of a setting, drawn otherwise. It may be refused: not every method supports
    every key."""
    keys = copy.deepcopy(SETTINGS[number % len(SETTINGS)])
    method, row, args = keys["method"], METHODS[keys["method"]], keys.setdefault("method_args", {})
    replicas = 2 if rng.random() < 0.25 and row.rounds is None else 1
    devices = rng.choice((2, 2, 3, 4)) if replicas == 1 else rng.choice((1, 2))
    per_device = keys.get("stages_per_device") or rng.choice((1, 1, 2))
    if row.order is not None and not row.order.fixed and method != "rows":
        keys["stages_per_device"] = per_device
    elif row.order is not None:
        devices, per_device = (2, 2) if method == "rows" else (devices, row.order.stages_per_device)
    elif row.structure is not None:
        per_device = 1
    stages = keys["stages"] = devices * per_device
    count = rng.choice((1, 1, 2, 4)) if row.order is None else devices * rng.choice((1, 2))
    if row.rounds is not None or method == "naive":
        count = 1
    elif method == "pipedream_2bw":
        count = max(count, stages)
    count = keys.setdefault("gradient_accumulation", count)
    if "warmup" in args:
        args["warmup"] = {"epochs": args["warmup"] * count * replicas * SIZE / SAMPLES}
    local_steps = args.get("local_steps", 1)
    # a few more than fill the pipeline where it never drains
    steps = (
        rng.randint(2, 3) if row.flushes else max(3, min(stages + rng.randint(1, 4), 7) // count)
    )
    keys["steps"] = 2 * local_steps if row.rounds is not None else steps
    stop_after = None
    if rng.random() < 0.3:
        keys["steps"] += local_steps
        stop_after = rng.randint(1, keys["steps"] - 2)
    if rng.random() < 0.3 and row.is_pipeline:
        scopes = ("stage", "global" if row.flushes else "delayed_global")
        keys["clip"] = {"norm": 0.3, "scope": rng.choice(scopes)}
    sgd = {"name": "sgd", "lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}
    keys["optimizer"] = rng.choice((sgd, sgd, {"name": "adamw", "lr": 0.01, "weight_decay": 0.01}))
    keys["precision"] = rng.choice(("float32", "float32", "float64", "bfloat16_mixed"))
    keys["evaluate"] = {"steps": 2} if rng.random() < 0.15 else {"every": 0}
    if rng.random() < 0.2:
        keys["checkpoint"] = {"every": rng.choice((1, 2))}
    if replicas == 2:  # a sum of two has one order
        keys.update(replicas=2, reduction=rng.choice(("exact", "fast")))
    return Case(rng.choice(NAMES), devices, keys, stop_after, rng.random() < 0.25)


@functools.lru_cache(maxsize=1)
def make_simulated_data() -> TensorData:
    """Return random samples, the same each time."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(SAMPLES, 12, generator=generator)
    y = torch.randint(0, 4, (SAMPLES,), generator=generator)
    return TensorData((x, y), (x[:4], y[:4]), 0)


def build_job(case: Case, backend: str = "distributed") -> PlannedJob:
    """Return the job of a rank, or of the emulator."""
    settings = {"name": backend, **({"deadline": DEADLINE} if backend == "distributed" else {})}
    log = {"trace": None, "tensorboard": False}
    config = configure(log=log, micro_batch_size=SIZE, backend=settings, **case.keys)
    return build(config, make_simulated_model(case.model), make_simulated_data())


def train_job(flow: Flow, job: PlannedJob, case: Case) -> Result:
    """Train as `run.loop` does, and return the result."""
    engine = flow.engine
    result = Result([], [], [])
    end = job.updates
    if job.config.evaluate.steps:
        result.evaluations.append(evaluate_on_test_set(engine, job))
    while flow.given < end:
        evaluates, saves = job.plan_pauses(flow.given + 1)
        flow.give()
        updates = [*flow.take(), *(flow.drain() if evaluates or saves or flow.given == end else ())]
        result.losses.extend(step.loss for _, step in updates)
        if flow.given < job.updates and evaluates:
            result.evaluations.append(evaluate_on_test_set(engine, job))
        if flow.given < job.updates and saves:
            result.states.append(copy.deepcopy(engine.collect_state()))
        if case.stop_after is not None and flow.given < end:
            end = min(end, run_on_main(lambda: find_stopping_end(flow, case)))
    result.losses.extend(step.loss for _, step in flow.drain())
    if job.config.evaluate.steps:
        result.evaluations.append(evaluate_on_test_set(engine, job))
    result.states.append(copy.deepcopy(engine.collect_state()))
    return result


def find_stopping_end(flow: Flow, case: Case) -> int:
    """Return the update at which a run ends that is stopped once `stop_after` updates are known
    on the main rank."""
    if flow.left < (case.stop_after or 0):
        return flow.given + 10**6
    return flow.given if flow.is_empty else flow.find_end(flow.left - 1)


def run_on_emulator(case: Case) -> Result:
    """Return the result of a case on the emulator."""
    job = build_job(case, "emulator")
    flow = Flow(job)
    result = train_job(flow, job, case)
    flow.engine.close()
    return result
