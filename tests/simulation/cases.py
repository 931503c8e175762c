"""Draw what simulated ranks train from a case's number, and compute the expected result on the
emulator."""

from __future__ import annotations

import copy
import functools
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional

import torch
from torch import nn

from ipu_pipe.backends.interface import CheckpointState, Report
from ipu_pipe.backends.ranks import run_on_main
from ipu_pipe.config.load import configure
from ipu_pipe.config.schema import Config
from ipu_pipe.data.sources import TensorData
from ipu_pipe.job.evaluation import EvaluationResult
from ipu_pipe.job.record import PlannedJob
from ipu_pipe.model.stages import begin_stage
from ipu_pipe.pipeline.flow import Flow
from ipu_pipe.run.build import build
from ipu_pipe.schedule.methods import METHODS
from tests.support.flows import evaluate_on_test_set

WIDTH, CLASSES = 4, 3
DEADLINE = 300.0  # virtual seconds
FILES = {  # of rows, and their microbatches
    "reversed.csv": 2,  # backwards in the reversed order of their forwards
    "handed_over.csv": 3,  # several activations and gradients wait at once, in another order, for the next stage of their rank
}
WHOLE = [
    name
    for name, row in METHODS.items()
    if row.is_pipeline and row.rounds is None and row.history is None and row.order is None
]
LOCAL = [name for name, row in METHODS.items() if row.structure is not None]
BY_DEVICE = [name for name, row in METHODS.items() if row.order is not None and name != "rows"]
VARIANTS: Dict[str, List[Dict[str, Any]]] = {
    "pipemare": [
        {"t1": {"anneal_updates": 4}, "t2": {"decay": 0.1}},
        {"recompute": {"segments": 2}},
        {"stash": True},
    ],
    "pipelined_backprop": [
        {"weight_prediction": {"form": "velocity", "scale": 1.0}},
        {"schedule": "1f1b"},
    ],
    "pipedream": [{"schedule": "dataflow"}, {"stash": False}],
}


@dataclass(frozen=True)
class Case:
    """A run. `keys`: of its config; `stop_after`: the number of updates after which early
    stopping is requested; `through_channels`: messages use groups of nccl."""

    model: str
    layers: int
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


def draw_case(rng: random.Random) -> Case:
    """Return a random case, which may be refused: not every method supports every key."""
    devices = rng.choice((2, 2, 2, 3, 3, 4))
    model = rng.choice(("mlp", "mlp", "tied", "norm", "dropout", "skipping"))
    family = rng.choice(
        (
            "whole",
            "whole",
            "by device",
            "by device",
            "virtual",
            "virtual",
            "local",
            "local_sgd",
            "rows",
        )
    )
    stages = devices * rng.choice((1, 1, 1, 2)) + rng.choice((0, 0, 0, 1))
    keys: Dict[str, Any] = {}
    if family == "whole":
        keys["method"] = rng.choice(WHOLE)
        keys["method_args"] = rng.choice([{}, *VARIANTS.get(keys["method"], [])])
    elif family == "by device":
        keys["method"] = rng.choice(BY_DEVICE)
        order = METHODS[keys["method"]].order
        assert order is not None
        per_device = order.stages_per_device if order.fixed else rng.choice((1, 2))
        stages = devices * per_device
        if not order.fixed:
            keys["stages_per_device"] = per_device
    elif family == "virtual":
        devices, per_device = rng.choice((2, 2, 2, 3)), rng.choice((1, 2))
        keys.update(
            method=rng.choice(("pipedream", "pipelined_backprop")), stages_per_device=per_device
        )
        if per_device == 1 or rng.random() < 0.5:
            keys["method_args"] = {"split_backward": True}
        stages = per_device * devices
    elif family == "rows":
        file = rng.choice(list(FILES))
        keys.update(method="rows", method_args={"file": str(Path(__file__).with_name(file))})
        devices, stages, model = 2, 4, rng.choice((model, "skipping"))
    elif family == "local":
        keys["method"], stages = rng.choice(LOCAL), devices
        model = rng.choice(("mlp", "norm", "dropout"))
        if keys["method"] == "local_chunked":
            keys["method_args"] = {"blocks": devices}
    else:
        keys.update(
            method="local_sgd",
            method_args={"replicas": rng.choice((2, 3)), "local_steps": rng.choice((1, 2))},
        )
        stages = min(stages, 4)
    row = METHODS[keys["method"]]
    accumulate = rng.choice((1, 1, 2, 3)) if row.order is None else devices * rng.choice((1, 1, 2))
    if family == "rows":
        accumulate = FILES[file]
    if keys["method"] == "pipedream_2bw":
        accumulate = max(accumulate, stages)
    if family == "virtual":
        accumulate = rng.choice((1, 2))
    keys["gradient_accumulation"] = (
        1 if family == "local_sgd" or keys["method"] == "naive" else accumulate
    )
    if rng.random() < 0.25 and devices < 4 and family != "local_sgd":
        keys["replicas"] = 2
    if rng.random() < 0.3 and family in ("whole", "by device", "virtual"):
        keys["clip"] = {
            "norm": 0.3,
            "scope": rng.choice(("stage", "global" if row.flushes else "delayed_global")),
        }
    keys["optimizer"] = rng.choice((
        {"name": "adamw", "lr": 0.01, "weight_decay": 0.01}, *2 * ({"name": "sgd", "lr": 0.05, "momentum": 0.9},)
    ))  # fmt: skip
    # a few more than fill the pipeline where it never drains
    updates = (
        rng.randint(2, 3)
        if row.flushes
        else max(2, min(stages + rng.randint(0, 2), 5) // accumulate)
    )
    keys["steps"] = 2 * keys["method_args"]["local_steps"] if family == "local_sgd" else updates
    keys["stages"] = stages
    keys["micro_batch_size"] = 2 if model == "norm" else rng.choice((1, 2))
    keys["evaluate"] = {"steps": 2} if rng.random() < 0.15 else {"every": 0}
    if rng.random() < 0.2:
        keys["checkpoint"] = {"every": rng.choice((1, 2))}
    stop_after = None
    if rng.random() < 0.4:
        keys["steps"] += 1 if family != "local_sgd" else int(keys["method_args"]["local_steps"])
        stop_after = rng.randint(1, keys["steps"] - 2)
    layers = stages + rng.choice((0, 1)) if model != "tied" else max(stages, 4)
    through_channels = rng.random() < 0.25
    if "replicas" in keys:  # two, whose sum has one order
        keys["reduction"] = rng.choice(("exact", "fast"))
    return Case(model, layers, devices, keys, stop_after, through_channels)


class SkippingModel(nn.Module):
    """Model whose first activation skips stages."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [begin_stage(nn.Linear(WIDTH, WIDTH)) for _ in range(layers - 1)]
        )
        self.head = begin_stage(nn.Linear(WIDTH, CLASSES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute logits (B, CLASSES) of x (B, WIDTH)."""
        first = x
        for number, layer in enumerate(self.layers):
            x = layer(x).tanh()
            if number == 0:
                first = x
        return self.head(x + first)  # type: ignore[no-any-return]


def make_simulated_model(name: str, count: int) -> nn.Module:
    """Return a small model, with the same weights each time."""
    torch.manual_seed(7)
    if name == "skipping":
        return SkippingModel(count)
    layers: List[nn.Module] = []
    for number in range(count - 1):
        linear = nn.Linear(WIDTH, WIDTH)
        if name == "tied" and number in (count - 3, count - 2):
            linear.weight = layers[0][0].weight  # type: ignore[index]
        extra = {"norm": nn.BatchNorm1d(WIDTH), "dropout": nn.Dropout(0.25)}.get(name)
        layers.append(nn.Sequential(*[m for m in (linear, extra, nn.Tanh()) if m is not None]))
    return nn.Sequential(
        *[begin_stage(layer) for layer in layers], begin_stage(nn.Linear(WIDTH, CLASSES))
    )


@functools.lru_cache(maxsize=1)
def make_simulated_data() -> TensorData:
    """Return random samples, the same each time."""
    generator = torch.Generator().manual_seed(5)
    x, y = (
        torch.randn(512, WIDTH, generator=generator),
        torch.randint(0, CLASSES, (512,), generator=generator),
    )
    return TensorData((x, y), (x[:4], y[:4]), 0)


def make_case_config(case: Case, backend: str) -> Config:
    """Return a case's config."""
    backend_keys = {"name": backend, **({"deadline": DEADLINE} if backend == "distributed" else {})}
    log = {"trace": None, "tensorboard": False}
    return configure(**{"log": log, **case.keys, "backend": backend_keys})


def build_job(case: Case, backend: str = "distributed") -> PlannedJob:
    """Return the job of a rank, or of the emulator."""
    return build(
        make_case_config(case, backend),
        make_simulated_model(case.model, case.layers),
        make_simulated_data(),
    )


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
            result.states.append(copy_state(engine.collect_state()))
        if case.stop_after is not None and flow.given < end:
            end = min(end, run_on_main(lambda: find_stopping_end(flow, case)))
    result.losses.extend(step.loss for _, step in flow.drain())
    if job.config.evaluate.steps:
        result.evaluations.append(evaluate_on_test_set(engine, job))
    result.states.append(copy_state(engine.collect_state()))
    return result


def find_stopping_end(flow: Flow, case: Case) -> int:
    """Return the update at which a run ends that is stopped once `stop_after` updates are known
    on the main rank."""
    if flow.left < (case.stop_after or 0):
        return flow.given + 10**6
    return flow.given if flow.is_empty else flow.find_end(flow.left - 1)


def copy_state(state: Optional[CheckpointState]) -> Optional[CheckpointState]:
    """Return a state that training no longer changes."""
    return copy.deepcopy(state)


def run_on_emulator(case: Case) -> Result:
    """Return the result of a case on the emulator."""
    job = build_job(case, "emulator")
    flow = Flow(job)
    result = train_job(flow, job, case)
    flow.engine.close()
    return result
