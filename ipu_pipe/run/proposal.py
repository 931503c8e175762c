"""Propose a config for a model of one's own on given hardware, with a reason at each key.

    [1] run the model once: the shape that it takes, and its classes
    [2] let the planner choose stages, replicas and microbatches (`search`), all predicted
    [3] write them into a text with comments, and read it back as a config

The proposal is a beginning: random data of the shape stand in for the user's.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import NamedTuple, Sequence

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from ipu_pipe.config.load import configure, parse_yaml
from ipu_pipe.config.schema import Config
from ipu_pipe.errors import BadInput, summarize
from ipu_pipe.hardware.description import read_hardware
from ipu_pipe.job.factories import make_model
from ipu_pipe.model.modes import set_mode
from ipu_pipe.plan.answer import format_predicted, list_stage_modules
from ipu_pipe.plan.candidates import Candidate, list_candidates
from ipu_pipe.plan.planner import search
from ipu_pipe.plan.prediction import Prediction, Problem
from ipu_pipe.run.planning import PlanningRequest, make_planning_problem

# flushes at every update, so its numbers are those of plain training
METHOD = "pipedream_flush"
# updates of an epoch of the random data
UPDATES = 4


class Wish(NamedTuple):
    """What a config is proposed for: the model's import string, the hardware's name, the shape of a
    sample, the most samples of an update, and the number of stages, None: the planner's."""

    entry: str
    hardware: str
    shape: Sequence[int]
    batch: int
    stages: int | None = None


def suggest_config(wish: Wish) -> str:
    """Return the YAML text of a config, which loads. Raise `BadInput` if there is none."""
    in_lockstep = read_hardware(wish.hardware).lockstep
    model = make_model(configure(model={"entry": wish.entry}))
    classes = _count_classes(model, wish.shape)
    marked = sum(getattr(m, "begins_stage", False) for m in model.modules())
    # each mark begins a stage after the first
    stages = marked + 1 if marked else wish.stages
    if wish.stages is not None and stages != wish.stages:
        why = f"{wish.entry} marks {stages} with begin_stage: must be {stages}, or left out"
        raise BadInput(f"--stages: {wish.stages}: {why}")
    precision = "16.16" if in_lockstep else "float32"
    problem, prediction = _choose(_make_base(wish, classes), wish, stages, precision)
    lines = [
        *_describe_data(wish, classes, prediction.candidate),
        *_describe_stages(wish, problem, prediction, bool(marked)),
        *_describe_hardware(wish, problem, prediction.candidate, model),
    ]
    text = "\n".join([*lines, ""])
    # read back, so that no proposal is handed over which a run would refuse
    configure(**parse_yaml(text, "new"))
    return text


# ---- [1] the model


def _count_classes(model: nn.Module, shape: Sequence[int]) -> int:
    """Return the number of classes of a model that takes samples of `shape`."""
    text = ",".join(map(str, shape))
    set_mode(model, training=False)
    try:
        with torch.no_grad():
            output = model(torch.zeros(2, *shape))
    # the user's model may raise anything
    except Exception as error:
        raise BadInput(
            f"--shape: {text}: the model fails on samples of this shape: {summarize(error)}"
        ) from error
    if not isinstance(output, torch.Tensor) or output.dim() != 2:
        kind = tuple(output.shape) if isinstance(output, torch.Tensor) else type(output).__name__
        raise BadInput(
            f"--shape: {text}: two samples give {kind}: must be scores of classes, (2, classes); "
            "for others write the config by hand (docs/configuration.md)"
        )
    return output.shape[1]


# ---- [2] the plan


def _make_base(wish: Wish, classes: int) -> Config:
    """Return a config of one stage, of which the planner counts the model's costs."""
    return configure(
        model={"entry": wish.entry},
        data={"name": "synthetic", "shape": [*wish.shape], "classes": classes, "subset": 8},
        method=METHOD,
        micro_batch_size=2,
        optimizer={"name": "sgd", "lr": 0.1, "momentum": 0.9},
        steps=1,
        hardware=wish.hardware,
    )


def _choose(
    config: Config, wish: Wish, stages: int | None, precision: str
) -> tuple[Problem, Prediction]:
    """Return the planning problem and the fastest prediction that fits."""
    request = PlanningRequest(methods=[METHOD], batch=wish.batch, precision=precision)
    problem = make_planning_problem(config, request).problem
    candidates = _list_runnable(problem, wish.batch, stages)
    if not candidates:
        devices = problem.hardware.devices
        raise BadInput(
            f"--hardware: {wish.hardware}: no pipeline of {stages or 'any number of'} stages on "
            f"{devices} devices has at most {wish.batch} samples in an update: the stages must "
            "divide the devices, and an update needs 2 x stages - 1 microbatches: change the "
            "marks, --stages or --batch"
        )
    # optimizer state moves to streaming memory only where nothing fits otherwise
    for tried in (problem, replace(problem, streamed=True)):
        best = search(tried, candidates, 1).best
        if best:
            return tried, best[0]
    raise BadInput(f"--hardware: {wish.hardware}: no cut of the model fits: take more devices")


def _list_runnable(problem: Problem, batch: int, stages: int | None) -> list[Candidate]:
    """Return the candidates that a pipeline in lock-step has enough microbatches for."""
    devices = problem.hardware.devices
    return [
        candidate
        for candidate in list_candidates([METHOD], devices, len(problem.units), batch)
        if candidate.schedule is None
        and stages in (None, candidate.depth)
        and candidate.gradient_accumulation >= 2 * candidate.depth - 1
    ]


# ---- [3] the text


def _describe_data(wish: Wish, classes: int, candidate: Candidate) -> list[str]:
    module = wish.entry.partition(":")[0]
    samples = UPDATES * candidate.global_batch_size
    return [
        f"# {wish.entry} on {wish.hardware}, proposed by ipu-pipe new. Change what you like: "
        "docs/configuration.md has all keys.",
        f'model: {{entry: "{wish.entry}"}}  # its arguments: args: {{name: value}}',
        "",
        "# Random samples stand in for your data. Yours come from a function of yours that returns",
        "# ipu_pipe.from_loader(train_loader, test_loader), with batches of micro_batch_size "
        "(docs/data.md). Then write:",
        f'# data: {{name: "{module}:load_data"}}',
        f"data: {{name: synthetic, shape: {[*wish.shape]}, classes: {classes}, subset: {samples}, "
        "test_subset: 64}",
        "loss: cross_entropy  # or module:function, of the output and the labels",
        "optimizer: {name: sgd, lr: 0.1, momentum: 0.9}",
        "epochs: 1",
        "",
    ]


def _describe_stages(
    wish: Wish, problem: Problem, prediction: Prediction, marked: bool
) -> list[str]:
    candidate = prediction.candidate
    # with quotes: Sequential's names are numbers
    modules = json.dumps(list_stage_modules(problem, prediction))
    stages = f"stages: {modules if candidate.depth > 1 else 1}"
    rate = format_predicted(problem.hardware, prediction.samples_per_second)
    samples = (
        f"{candidate.micro_batch_size} x {candidate.gradient_accumulation} x {candidate.width}"
    )
    return [
        "# 1F1B: the pipeline is flushed at every update: the numbers are those of plain training.",
        f"method: {METHOD}",
        *(
            [f"# {candidate.depth} stages, where the model's begin_stage marks are"]
            if marked
            else [
                "# Where stages 1 and later begin: the planner's choice. Marks in the model "
                "(begin_stage) or a number do it, too.",
                stages,
            ]
        ),
        f"# stages {candidate.depth} x replicas {candidate.width} = {candidate.devices} devices; "
        f"{samples} = {candidate.global_batch_size} samples an update;",
        f"# predicted: {rate} samples/s. ipu-pipe plan ranks other choices.",
        f"replicas: {candidate.width}",
        f"micro_batch_size: {candidate.micro_batch_size}",
        f"gradient_accumulation: {candidate.gradient_accumulation}",
        f"recompute: {str(candidate.recompute).lower()}  # of activations in the backward",
        "",
        f"hardware: {wish.hardware}  # for predictions and for whether it fits",
    ]


def _describe_hardware(
    wish: Wish, problem: Problem, candidate: Candidate, model: nn.Module
) -> list[str]:
    if not problem.hardware.lockstep:
        return [
            f"precision: {problem.precision}",
            "# The emulator computes the numbers in one process. For one a device, by torchrun:",
            "# backend: {name: distributed}",
        ]
    lines = [
        "precision: 16.16  # half-precision weights and arithmetic; 32.32 is float32",
        "backend:",
        "  name: poptorch  # not run on hardware: docs/ipu.md",
        "  ipu:",
        "    loss_scaling: 128  # keeps small gradients above the least half-precision number",
        "    stochastic_rounding: true  # half-precision weights lose no small updates on average",
        "    partials: half  # sums of products in half precision: faster, less memory",
    ]
    if candidate.depth > 1 and not candidate.recompute:
        lines.append("    recomputation: none  # PopTorch's pipelines recompute unless told not to")
    if problem.streamed:
        lines += [
            "    options:",
            "      # the state does not fit beside the weights",
            "      TensorLocations: {setOptimizerLocation: {useOnChipStorage: false}}",
        ]
    has_statistics = any(
        isinstance(m, _NormBase) and m.running_mean is not None for m in model.modules()
    )
    if has_statistics and candidate.width > 1:
        lines.append(
            "    broadcast_buffers: false  # BatchNorm: the first replica's statistics count"
        )
    return lines
