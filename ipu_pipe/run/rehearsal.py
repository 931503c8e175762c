"""Rehearse a config on a machine that has neither its devices nor its data.

    [1] judge the config as it stands: its faults, its stages, and memory and times in its own
        precision, all predicted; for IPUs, what their SDK would refuse when it compiles
    [2] run two updates of a small batch on the emulator in float32, save, resume and export them
    [3] say whether it fits, and what to change if it does not

Not run on hardware: the figures of [1] come from the descriptions in configs/hardware.
"""

from __future__ import annotations

import functools
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any, Callable, Iterator, NamedTuple

import numpy as np
import torch

from ipu_pipe.backends.table import get_backend
from ipu_pipe.config.compare import dump_config
from ipu_pipe.config.load import configure, parse_yaml
from ipu_pipe.config.schema import Config
from ipu_pipe.config.sections import DataConfig
from ipu_pipe.data.stand_in import ENTRY
from ipu_pipe.errors import BadInput, raise_faults
from ipu_pipe.hardware.description import read_hardware
from ipu_pipe.job.record import PlannedJob
from ipu_pipe.plan.answer import format_predicted, format_rate_confidence
from ipu_pipe.plan.candidates import Candidate
from ipu_pipe.plan.config_cut import ConfigCut, predict_config_cut
from ipu_pipe.plan.planner import search
from ipu_pipe.report.analysis.text import format_table
from ipu_pipe.report.memory import build_memory_table
from ipu_pipe.report.run_text import format_opening
from ipu_pipe.run.export import export
from ipu_pipe.run.planning import build_for_planning, replace_missing_data
from ipu_pipe.run.train import train
from ipu_pipe.schedule.methods import resolve_method
from ipu_pipe.text import format_bytes

# the batch of the run on the emulator: samples of a microbatch, replicas, updates
SAMPLES = 2
REPLICAS = 2
UPDATES = 2
# pods of IPUs by size, for a config that names no hardware
PODS = ("pod4", "pod16", "pod64")


class Rehearsal(NamedTuple):
    """The result of a rehearsal: `text` for people, and why the config does not fit its hardware,
    None if it fits or if there is no prediction."""

    text: str
    misfit: str | None


def rehearse(config: Config, say: Callable[[str], None] = lambda text: None) -> Rehearsal:
    """Rehearse a config. Raise `BadInput` with all faults that would refuse it on its hardware."""
    config = _choose_hardware(config, say)
    # shortened: planning takes longer for more updates, and tells the same
    job = build_for_planning(_shorten(config, _count_round(config)))
    # first: nothing else is worth its time if the devices refuse the run
    raise_faults(get_backend(job.config).predict_refusals(job))
    cut = None
    unpredicted = (
        "no prediction: the config names no hardware: --set hardware=NAME, of configs/hardware or "
        "a file"
    )
    if config.hardware is not None:
        try:
            cut = predict_config_cut(job)
        except BadInput as error:
            # the run itself can be tried, too, where it cannot be predicted
            unpredicted = f"no prediction for {config.hardware}: {error.faults[0]}"
    stages = config.stages
    if config.leaves_stages_to_planner:
        # asked again, the planner would cut for the small batch
        stages = job.partition.begin_names() or 1
    data = _replace_own_data(config.data, job)
    small = _make_small(config.model_copy(update={"stages": stages, "data": data}), job)
    stand_in = "" if data is config.data else f" in the shape of {config.data.name}"
    say(
        f"rehearsing {small.steps} updates on the emulator: arithmetic in float32 on the CPU, "
        f"micro_batch_size {small.micro_batch_size}, gradient_accumulation "
        f"{small.gradient_accumulation}, replicas {small.replicas}, data {small.data.name}{stand_in}"
    )
    tried = _try_out(small)
    if cut is None:
        return Rehearsal("\n".join([format_opening(job), "", tried, unpredicted]), None)
    misfit = _explain_misfit(cut)
    verdict = misfit or f"fits {cut.problem.hardware.name} (predicted)"
    lines = [format_opening(job), "", *_format_stages(job, cut), "", tried, verdict]
    return Rehearsal("\n".join(lines), misfit)


def _choose_hardware(config: Config, say: Callable[[str], None]) -> Config:
    """Return a config for IPUs with the smallest pod that has enough of them, if it names none."""
    if config.hardware is not None or config.backend.facts.trains_on is None:
        return config
    stages = config.stages
    count = len(stages) + 1 if isinstance(stages, list) else stages
    # where the planner chooses the number of stages there is at least one
    needed = (count if isinstance(count, int) else 1) * config.replicas
    pod = next((name for name in PODS if read_hardware(name).devices >= needed), PODS[-1])
    say(f"hardware: null: judged on {pod}, the smallest that has {needed} IPUs")
    return config.model_copy(update={"hardware": pod})


def _count_round(config: Config) -> int:
    """Return the updates after a multiple of which a run may stop: those of a round of replicas, or
    those that make a step of every block.
    """
    settings = config.method_settings()
    rounds = resolve_method(config.method, settings).rounds
    if rounds is not None and rounds.outer is not None:
        return rounds.steps
    # NumPy's, since Python's own came with 3.9
    return int(np.lcm.reduce(settings.get("block_accumulation", [1])))


def _shorten(config: Config, round_length: int) -> Config:
    """Return the config with few updates, on a backend that this process can plan."""
    few = UPDATES * config.updates_per_call * round_length
    changes: dict[str, Any] = {"steps": min(few, config.steps or few)}
    if config.backend.facts.uses_processes:
        changes["backend"] = config.backend.model_copy(update={"name": "emulator"})
    if config.checkpoint is not None:
        changes["checkpoint"] = config.checkpoint.model_copy(update={"every": None})
    shortened = config.model_copy(update=changes)
    # else the plan would say that the user's epochs are overridden
    shortened.model_fields_set.discard("epochs")
    return shortened


def _replace_own_data(data: DataConfig, job: PlannedJob) -> DataConfig:
    """Return random images of the same shape in place of the user's own, whose evaluations may take
    hours; other data as they are.
    """
    x, y = job.example
    if ":" not in data.name or not all(isinstance(part, torch.Tensor) for part in (x, y)):
        return data
    # synthetic data are real numbers, with one class a sample
    if not x.is_floating_point() or y.is_floating_point() or y.dim() != 1:
        return data
    # any model of classes has two
    keys = {"name": "synthetic", "shape": [*x.shape[1:]], "classes": 2}
    return DataConfig.model_validate(keys)


def _make_small(config: Config, job: PlannedJob) -> Config:
    """Return the config of the run on the emulator: small batches, float32, random data unless only
    the user's own function can make it. `job`: the config's own.
    """
    config, _ = replace_missing_data(config)
    has_own_data = ":" in config.data.name and config.data.name != ENTRY
    # by YAML: a config is frozen, and its keys are to be changed
    keys = parse_yaml(dump_config(config), "rehearse")
    stages = config.stages
    count = len(stages) + 1 if isinstance(stages, list) else stages
    # enough to fill the pipeline; the emulator needs no more
    least = count if isinstance(count, int) else 2 * SAMPLES
    # a loader's batches have a size of their own
    samples = config.micro_batch_size if has_own_data else min(config.micro_batch_size, SAMPLES)
    replicas = min(config.replicas, REPLICAS)
    accumulate = config.gradient_accumulation
    method = job.method
    is_table = method.delay is not None and method.delay.table is not None
    # a table of delays or a file of rows is made for a number of microbatches
    if not is_table and not (method.order is not None and method.order.file):
        accumulate = min(accumulate, max(least, 2))
    if method.rounds is not None and method.rounds.outer is not None:
        outer = method.rounds.outer
        # the shortest round, since a run stops only between two
        shortest = outer.count_fragments(len(job.partition)) * (outer.delay + 1)
        keys["method_args"]["local_steps"] = shortest
        config = config.with_method_args(local_steps=shortest)
    round_length = _count_round(config)
    # replicas with weights of their own take as many batches
    shares = replicas if method.rounds is None else job.replica_count
    enough = 2 * UPDATES * samples * accumulate * shares
    # a function of the user's need not take these keys
    if not has_own_data:
        keys["data"].update(subset=enough, test_subset=SAMPLES, validation=None)
    keys.update(
        backend={"name": "emulator", "threads": config.backend.threads},
        precision="float32",
        # this small run need not fit the hardware
        hardware=None,
        micro_batch_size=samples,
        gradient_accumulation=accumulate,
        replicas=replicas,
        steps=UPDATES * round_length,
        # at the end alone, but early stopping and a plateau need an interval
        evaluate={"steps": UPDATES * round_length},
        checkpoint={"every": round_length},
        # the user's callbacks may write elsewhere, or end the run
        callbacks=[],
    )
    known = {name: value for name, value in keys.items() if name in Config.model_fields}
    return configure(**known)


def _try_out(config: Config) -> str:
    """Train, save, resume and export by a small config; return a line on what was tried."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        first = train(config, run, quiet=True)
        # from the first checkpoint: after the last one the run is finished, and nothing would be
        # resumed
        first_step = first["steps"] // UPDATES
        resumed = train(config, run, resume_from=first_step, quiet=True)
        export(run, Path(folder) / "model.safetensors")
    loss = first["final"]["train_loss"]
    same = "with the same loss" if resumed["final"] == first["final"] else "WITH ANOTHER LOSS"
    return (
        f"rehearsed on the emulator (float32, CPU): {first['steps']} updates of "
        f"{first['batch']['global_batch_size']} samples, training loss {loss:.4g}; "
        f"saved, resumed after {'the first' if first_step == 1 else first_step} {same}, exported"
    )


HEAD = (
    "stage",
    "begins with",
    "parameters",
    "GFLOPs",
    "in flight",
    "activations",
    "weights",
    "optimizer",
    "total",
    "of memory",
    "forward (ms)",
    "backward (ms)",
)


def _format_stages(job: PlannedJob, cut: ConfigCut) -> list[str]:
    """Format the predicted figures of each stage, then those of the whole pipeline."""
    problem, prediction, bottleneck = cut
    table = build_memory_table(job)
    forward = job.footprint.forward_flops
    backward = job.footprint.backward_flops or [0.0] * len(forward)
    names = job.partition.begin_names()
    show = functools.partial(format_predicted, problem.hardware)
    rows = []
    for s, device in enumerate(prediction.candidate.placement):
        memory = prediction.memory[device]
        optimizer = "streamed" if problem.streamed else format_bytes(memory.optimizer)
        # a footprint is of a microbatch, the table of a sample
        gflops = (forward[s] + backward[s]) / (1e9 * job.config.micro_batch_size)
        rows.append(
            [
                str(s),
                names[s - 1] if s else "(start)",
                f"{table[s]['parameters']:,}",
                f"{gflops:.3g}",
                str(table[s]["in_flight"]),
                format_bytes(memory.activations),
                format_bytes(memory.weights + memory.versions),
                optimizer,
                format_bytes(memory.total),
                f"{memory.total / problem.memory_bytes:.1%}",
                show(1e3 * prediction.costs.forward[s]),
                show(1e3 * prediction.costs.backward[s]),
            ]
        )
    name = problem.hardware.name
    usable = format_bytes(int(problem.memory_bytes))
    lines = [
        f"predicted on {name} in precision {problem.precision}, not measured; {usable} on each "
        f"device, GFLOPs by sample, times by microbatch"
    ]
    if prediction.candidate.recompute:
        lines.append("backwards recompute: a stage keeps its inputs and one microbatch's rest")
    lines += [
        *format_table(HEAD, rows, left=2, most=len(rows)),
        "total: with gradients and 20 % for code where the hardware file says so",
        f"an update takes {show(1e3 * prediction.seconds)} ms: "
        f"{show(prediction.samples_per_second)} samples/s, devices busy "
        f"{prediction.utilization:.0%}, bubble and waiting "
        f"{1 - prediction.utilization:.0%}",
        format_rate_confidence(problem.hardware),
        f"bottleneck: {bottleneck}",
    ]
    return lines


# ---- what to change


def _explain_misfit(cut: ConfigCut) -> str | None:
    """Return which stage does not fit and the smallest change with which all do; None if all fit."""
    problem, prediction, _ = cut
    fullest = max(range(len(prediction.memory)), key=lambda d: prediction.memory[d].total)
    needed = prediction.memory[fullest]
    if needed.total <= problem.memory_bytes and problem.fits_streaming(0):
        return None
    kinds = needed._asdict()
    largest = max(kinds, key=lambda kind: kinds[kind])
    fault = (
        f"does not fit {problem.hardware.name}: device {fullest} needs "
        f"{format_bytes(needed.total)} of {format_bytes(int(problem.memory_bytes))}, most of it "
        f"{largest} ({format_bytes(kinds[largest])}), predicted"
    )
    for candidate, streamed, change in _list_changes(cut):
        best = search(replace(problem, streamed=streamed), [candidate], 1).best
        if best:
            return f"{fault}: it would fit with {change}"
    return f"{fault}: take more stages, or a smaller model"


def _list_changes(cut: ConfigCut) -> Iterator[tuple[Candidate, bool, str]]:
    """Yield changed candidates, the least change first, whether optimizer state is streamed, and
    the change in words."""
    problem = cut.problem
    candidate = cut.prediction.candidate
    # the least change: stages, replicas and microbatches stay as many
    yield candidate, problem.streamed, "another cut (stages: {count: N, by: hardware})"
    can_stream = problem.hardware.device.streaming_bytes is not None
    if can_stream and not problem.streamed:
        yield (
            candidate,
            True,
            "backend.ipu.options.TensorLocations.setOptimizerLocation.useOnChipStorage=false and the planner's cut",
        )
    if not candidate.recompute:
        change = "recompute=true"
        yield replace(candidate, recompute=True), problem.streamed, change
    # the samples of an update stay, because the learning rate was chosen for them
    of_replica = candidate.micro_batch_size * candidate.gradient_accumulation
    samples = candidate.micro_batch_size
    while samples > 1:
        # half as many, or somewhat fewer
        samples = next(count for count in range(samples // 2, 0, -1) if of_replica % count == 0)
        accumulate = of_replica // samples
        changed = replace(
            candidate,
            recompute=True,
            micro_batch_size=samples,
            gradient_accumulation=accumulate,
        )
        change = f"micro_batch_size={samples} gradient_accumulation={accumulate}"
        if not candidate.recompute:
            change += " recompute=true"
        yield changed, can_stream or problem.streamed, change
