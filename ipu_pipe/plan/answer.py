"""Format the answer of the planner as text, as JSON, and as a config that trains its best
configuration.
"""

from __future__ import annotations

import re
from typing import Any

from ipu_pipe.config.compare import dump_config
from ipu_pipe.config.load import configure, parse_yaml
from ipu_pipe.config.schema import Config
from ipu_pipe.config.sections import MethodArgs
from ipu_pipe.errors import BadInput
from ipu_pipe.hardware.description import Hardware, read_hardware
from ipu_pipe.job.record import Job
from ipu_pipe.plan.candidates import Candidate
from ipu_pipe.plan.config_cut import predict_config_cut
from ipu_pipe.plan.planner import STREAMED, Answer, Bottleneck
from ipu_pipe.plan.prediction import Prediction, Problem
from ipu_pipe.schedule.methods import METHODS
from ipu_pipe.text import format_bytes, format_estimate

# the most devices whose numbers are printed by replica
MOST_LISTED_DEVICES = 64


def list_stage_modules(problem: Problem, prediction: Prediction) -> list[str]:
    """Return the first module of each stage but stage 0, as a config's `stages` may name them."""
    return [problem.units[start].name for start in prediction.starts[1:]]


def _name_schedule(candidate: Candidate) -> str | None:
    """Return the schedule as `method_args` name it; None for the method's own."""
    return None if candidate.schedule is None else candidate.schedule.value


def convert_to_json(answer: Answer) -> dict[str, Any]:
    """Return the answer for programs."""
    return {
        "hardware": answer.problem.hardware.name,
        "devices": answer.devices,
        "predicted": True,
        "plans": [
            {
                "method": prediction.candidate.method,
                "depth": prediction.candidate.depth,
                "stages_per_device": prediction.candidate.stages_per_device,
                "schedule": _name_schedule(prediction.candidate),
                "width": prediction.candidate.width,
                "micro_batch_size": prediction.candidate.micro_batch_size,
                "gradient_accumulation": prediction.candidate.gradient_accumulation,
                "recompute": prediction.candidate.recompute,
                "stages": list_stage_modules(answer.problem, prediction),
                "samples_per_second": prediction.samples_per_second,
                "utilization": prediction.utilization,
                "global_batch_size": prediction.candidate.global_batch_size,
                "memory_bytes": [memory.total for memory in prediction.memory],
                "activation_bytes": [memory.activations for memory in prediction.memory],
                "binding": str(bottleneck),
                "devices": prediction.layout.list_devices(),
            }
            for prediction, bottleneck in answer.plans
        ],
        "refused": [{"reason": reason, "count": count} for reason, count in answer.refused.items()],
        "smallest_change": answer.smallest_change,
    }


def format_answer(answer: Answer) -> str:
    """Return the answer for people: a table of the configurations, then the best one's stages,
    devices and reasons.
    """
    problem = answer.problem
    hardware = answer.problem.hardware
    lines = [
        f"{answer.devices} devices of {hardware.name}, {format_bytes(problem.memory_bytes)} usable "
        f"on each; "
        f"precision {problem.precision}; all figures are predicted",
        "",
    ]
    if problem.streamed:
        lines[1:1] = [f"optimizer state in streaming memory: {STREAMED}"]
    if answer.plans:
        lines += [*_format_table(answer), "", *_format_best(problem, *answer.plans[0]), ""]
    else:
        lines += [
            f"no configuration fits; the smallest change that makes one fit: "
            f"{answer.smallest_change}",
            "",
        ]
    lines += [
        f"{count} configurations not listed: {reason}" for reason, count in answer.refused.items()
    ]
    unconfirmed = [
        line
        for line, (_, figure) in zip(hardware.format_figures(), hardware.list_figures())
        if not figure.confirmed
    ]
    if unconfirmed:
        lines += [
            "",
            "hardware figures without confirmation by a primary source:",
            *(f"  {line}" for line in unconfirmed),
        ]
    return "\n".join(lines)


def _list_unconfirmed(hardware: Hardware) -> list[str]:
    """Return the keys of the figures that no primary source confirms."""
    return [key for key, figure in hardware.list_figures() if not figure.confirmed]


def format_predicted(hardware: Hardware, value: float) -> str:
    """Return a predicted time or rate with the digits that it deserves: two where figures of the
    hardware are not confirmed.
    """
    return format_estimate(value, 2 if _list_unconfirmed(hardware) else 3)


def format_rate_confidence(hardware: Hardware) -> str:
    """Return a line on how far a predicted throughput can be trusted."""
    figures = hardware.list_figures()
    unconfirmed = _list_unconfirmed(hardware)
    return (
        f"confidence: {len(unconfirmed)} of {len(figures)} figures of {hardware.name} are "
        f"estimates or from secondary sources, so samples/s may be off by a factor of 2 or more; "
        f"memory may be too, by tile"
    )


def _format_table(answer: Answer) -> list[str]:
    lines = [
        "    samples/s  method                  depth x width  microbatch x accumulation  recompute"
        "  busy  fullest device       activations  bottleneck"
    ]
    for rank, (prediction, bottleneck) in enumerate(answer.plans, 1):
        candidate = prediction.candidate
        # the devices differ: early stages keep more microbatches
        fullest = max(prediction.memory, key=lambda memory: memory.total)
        name = candidate.method + (
            f" v={candidate.stages_per_device}" if candidate.stages_per_device > 1 else ""
        )
        name += f" {_name_schedule(candidate)}" if candidate.schedule is not None else ""
        rate = format_predicted(answer.problem.hardware, prediction.samples_per_second)
        lines.append(
            f"{rank:2d} {rate:>10s}  {name:22s} {candidate.depth:6d} x "
            f"{candidate.width:<5d}"
            f" {candidate.micro_batch_size:11d} x {candidate.gradient_accumulation:<12d}"
            f" {'yes' if candidate.recompute else 'no':>9s} {prediction.utilization:6.0%} "
            f"{format_bytes(fullest.total):>15s}"
            f" {format_bytes(fullest.activations):>18s}"
            f"  {bottleneck.kind} ({bottleneck.share:.0%})"
        )
    return lines


def _format_best(problem: Problem, prediction: Prediction, bottleneck: Bottleneck) -> list[str]:
    work = prediction.work
    total = sum(prediction.work)
    lines = [
        "stages of the best configuration",
        "stage  begins with                      share of the work     memory     activations"
        + ("  (memory of its device)" if prediction.candidate.stages_per_device > 1 else ""),
    ]
    for s, start in enumerate(prediction.starts):
        # the memory of a device, which all its stages share
        memory = prediction.memory[prediction.candidate.placement[s]]
        name = problem.units[start].name or "(start of the model)"
        lines.append(
            f"{s:5d}  {name:30s} {work[s] / total:18.1%} {format_bytes(memory.total):>10s} "
            f"{format_bytes(memory.activations):>15s}"
        )
    lines += ["", f"bottleneck: {bottleneck}"]
    devices = prediction.candidate.devices
    # of one replica, or of one stage, the numbers are plain: 0, 1, 2 and so on
    if (
        prediction.candidate.width > 1
        and prediction.candidate.depth > 1
        and devices <= MOST_LISTED_DEVICES
    ):
        lines += [
            "",
            "devices of each replica, by stage (neighbouring devices have adjacent numbers):",
        ]
        lines += [
            f"  replica {r}: {' '.join(map(str, row))}"
            for r, row in enumerate(prediction.layout.list_devices())
        ]
    return lines


def format_config_cut(job: Job) -> list[str]:
    """Return lines for `--dry-run`: predicted figures of the job's stages on the config's hardware;
    none without hardware.
    """
    if job.config.hardware is None:
        return []
    name = (
        job.config.hardware
        if isinstance(job.config.hardware, str)
        else "the hardware of the config"
    )
    try:
        problem, prediction, bottleneck = predict_config_cut(job)
    except BadInput as error:
        # a dry run shows all else without a prediction, too
        return [*(f"no prediction for {name}: {fault}" for fault in error.faults), ""]
    limit = problem.memory_bytes
    costs = prediction.costs
    hardware = problem.hardware
    rate = format_predicted(hardware, prediction.samples_per_second)

    def show_ms(seconds: float) -> str:
        return format_predicted(hardware, 1e3 * seconds)

    lines = [
        f"predicted on {problem.hardware.name}, not measured",
        "stage  forward (ms)  backward (ms)     memory   share of usable",
    ]
    for s, device in enumerate(prediction.candidate.placement):
        memory = prediction.memory[device]
        share = f"{memory.total / limit:17.1%}{'  does not fit' if memory.total > limit else ''}"
        lines.append(
            f"{s:5d} {show_ms(costs.forward[s]):>13s} {show_ms(costs.backward[s]):>14s} "
            f"{format_bytes(memory.total):>10s} {share}"
        )
    lines += [
        f"predicted {rate} samples/s, devices busy "
        f"{prediction.utilization:.0%} of the time, "
        f"{format_bytes(int(limit))} usable on each",
        f"predicted bottleneck: {bottleneck}",
        "",
    ]
    return lines


def make_planned_config(
    config: Config, problem: Problem, prediction: Prediction, hardware: Any
) -> str:
    """Return the YAML text of `config` changed to the predicted configuration; `hardware`: as the
    user named it.

    `method_args` are kept if the method stays the same. Raise `BadInput` if the result is not a
    valid config.
    """
    candidate = prediction.candidate
    changes = {
        "method": candidate.method,
        # a single stage begins with the model, so that there is no name for the list
        "stages": list_stage_modules(problem, prediction) or 1,
        # others have one stage on a device, the default
        "stages_per_device": None
        if candidate.method_row.order is None
        else candidate.stages_per_device,
        "micro_batch_size": candidate.micro_batch_size,
        "gradient_accumulation": candidate.gradient_accumulation,
        "replicas": candidate.width,
        "recompute": candidate.recompute,
        "precision": problem.precision,
        "hardware": hardware,
    }
    if isinstance(hardware, str) and candidate.devices > read_hardware(hardware).devices:
        # the name alone would have fewer devices
        changes["hardware"] = problem.hardware.model_dump(mode="json", exclude_none=True)
    # the plan is of whole backwards
    method_args = config.method_args.model_copy(
        update=dict.fromkeys(("split_backward", "activation_limit"))
    )
    local = METHODS[candidate.method].structure is not None
    if candidate.method != config.method:
        # the old method's settings would be refused; heads are of all local methods
        method_args = MethodArgs(head=config.method_args.head if local else None)
    if candidate.method == "local_chunked":
        method_args = method_args.model_copy(
            # its blocks are the stages, and must begin where the plan cuts
            update={"blocks": list_stage_modules(problem, prediction) or 1}
        )
    # None: the method's own schedule
    changes["method_args"] = method_args.model_copy(update={"schedule": _name_schedule(candidate)})
    if problem.streamed and config.backend.ipu is not None:
        ipu = config.backend.ipu.stream_state()
        changes["backend"] = config.backend.model_copy(update={"ipu": ipu})
    planned = config.model_copy(update=changes)
    # PopTorch's pipelines recompute unless they are set not to
    if planned.recomputes and not candidate.recompute:
        ipu = planned.backend.ipu.model_copy(update={"recomputation": "none"})
        backend = planned.backend.model_copy(update={"ipu": ipu})
        planned = planned.model_copy(update={"backend": backend})
    text = dump_config(planned)
    try:
        # check the config before anything is written
        configure(**parse_yaml(text, "--write"))
    except BadInput as error:
        raise BadInput(
            # the user of the command has called no `configure`
            [re.sub("^configure: ", "--write: ", fault) for fault in error.faults]
        ) from None
    return text
