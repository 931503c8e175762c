"""A plan as words, as JSON, and as a config that trains it. All of it is predicted."""

from __future__ import annotations

import re
from typing import Any, Dict, List, Optional

from ipu_pipe.config.compare import dump_config
from ipu_pipe.config.load import configure, parse_yaml
from ipu_pipe.config.schema import Config
from ipu_pipe.config.sections import MethodArgs
from ipu_pipe.errors import BadInput
from ipu_pipe.job.record import Job
from ipu_pipe.plan.candidates import Candidate
from ipu_pipe.plan.of_config import predict_own_cut
from ipu_pipe.plan.planner import STREAMED, Answer, Binding
from ipu_pipe.plan.prediction import Prediction, Problem
from ipu_pipe.schedule.methods import METHODS
from ipu_pipe.text import format_bytes

# the most devices whose map is printed
MAP_SHOWN = 64


def list_begins(problem: Problem, prediction: Prediction) -> List[str]:
    """Return the modules at which stages 1 and on begin, as a config's `stages` may name them."""
    return [problem.units[start].name for start in prediction.starts[1:]]


def _name_schedule(asked: Candidate) -> Optional[str]:
    """Return the schedule as `method_args` name it; None for the method's own."""
    return None if asked.schedule is None else asked.schedule.value


def convert_to_json(answer: Answer) -> Dict[str, Any]:
    """Return the answer for programs."""
    return {
        "hardware": answer.problem.hardware.name,
        "devices": answer.devices,
        "predicted": True,
        "plans": [
            {
                "method": prediction.asked.method,
                "depth": prediction.asked.depth,
                "stages_per_device": prediction.asked.stages_per_device,
                "schedule": _name_schedule(prediction.asked),
                "width": prediction.asked.width,
                "micro_batch_size": prediction.asked.micro_batch_size,
                "gradient_accumulation": prediction.asked.gradient_accumulation,
                "recompute": prediction.asked.recompute,
                "stages": list_begins(answer.problem, prediction),
                "samples_per_second": prediction.samples_per_second,
                "utilization": prediction.utilization,
                "global_batch_size": prediction.asked.global_batch_size,
                "memory_bytes": [memory.total for memory in prediction.memory],
                "activation_bytes": [memory.activations for memory in prediction.memory],
                "binding": str(reason),
                "devices": prediction.layout.map(),
            }
            for prediction, reason in answer.plans
        ],
        "refused": [{"reason": reason, "count": count} for reason, count in answer.refused.items()],
        "smallest_change": answer.smallest_change,
    }


def format_answer(answer: Answer) -> str:
    """Return the answer for people: a table of the configurations, then the best one's stages, devices and reasons."""
    problem, hardware = answer.problem, answer.problem.hardware
    lines = [
        f"{answer.devices} devices of {hardware.name}, {format_bytes(problem.memory_bytes)} usable on each; "
        f"precision {problem.precision}; all figures are predicted",
        "",
    ]
    if problem.streamed:
        lines[1:1] = [f"optimizer state in streaming memory: {STREAMED}"]
    if answer.plans:
        lines += [*_format_table(answer), "", *_format_best(problem, *answer.plans[0]), ""]
    else:
        lines += [f"nothing fits; the smallest change that would: {answer.smallest_change}", ""]
    lines += [f"{count} other configurations: {reason}" for reason, count in answer.refused.items()]
    unconfirmed = [
        line for line, (_, figure) in zip(hardware.format_figures(), hardware.list_figures()) if not figure.confirmed
    ]
    if unconfirmed:
        lines += [
            "",
            "figures of the hardware that no primary source confirms:",
            *(f"  {line}" for line in unconfirmed),
        ]
    return "\n".join(lines)


def _format_table(answer: Answer) -> List[str]:
    lines = [
        "    samples/s  method                  depth x width  microbatch x accumulation  recompute"
        "  busy  fullest device  of it activations  held back by"
    ]
    for place, (prediction, reason) in enumerate(answer.plans, 1):
        asked, fullest = prediction.asked, max(prediction.memory, key=lambda memory: memory.total)
        name = asked.method + (f" v={asked.stages_per_device}" if asked.stages_per_device > 1 else "")
        name += f" {_name_schedule(asked)}" if asked.schedule is not None else ""
        lines.append(
            f"{place:2d} {prediction.samples_per_second:10.4g}  {name:22s} {asked.depth:6d} x {asked.width:<5d}"
            f" {asked.micro_batch_size:11d} x {asked.gradient_accumulation:<12d} {'yes' if asked.recompute else 'no':>9s} "
            f"{prediction.utilization:6.0%} {format_bytes(fullest.total):>15s} {format_bytes(fullest.activations):>18s}"
            f"  {reason.kind} ({reason.share:.0%})"
        )
    return lines


def _format_best(problem: Problem, prediction: Prediction, reason: Binding) -> List[str]:
    work, total = prediction.work, sum(prediction.work)
    lines = [
        "the best one's stages",
        "stage  begins with                      share of the work     memory  of it activations"
        + ("  (of its device)" if prediction.asked.stages_per_device > 1 else ""),
    ]
    for s, start in enumerate(prediction.starts):
        memory = prediction.memory[prediction.asked.placement[s]]
        name = problem.units[start].name or "(the model's beginning)"
        lines.append(
            f"{s:5d}  {name:30s} {work[s] / total:18.1%} {format_bytes(memory.total):>10s} "
            f"{format_bytes(memory.activations):>15s}"
        )
    lines += ["", f"held back by {reason}"]
    devices = prediction.asked.devices
    if prediction.asked.width > 1 and prediction.asked.depth > 1 and devices <= MAP_SHOWN:
        lines += ["", "devices of each replica's stages, neighbours numbered next to one another:"]
        lines += [f"  replica {r}: {' '.join(map(str, row))}" for r, row in enumerate(prediction.layout.map())]
    return lines


def format_own_cut(job: Job) -> List[str]:
    """Return lines for `--dry-run`: what the config's stages would do on the hardware that it names; none if it names none."""
    if job.config.hardware is None:
        return []
    name = job.config.hardware if isinstance(job.config.hardware, str) else "the hardware given"
    try:
        problem, prediction, reason = predict_own_cut(job)
    except BadInput as error:
        return [*(f"not predicted on {name}: {fault}" for fault in error.faults), ""]
    limit, costs = problem.memory_bytes, prediction.costs
    lines = [
        f"predicted on {problem.hardware.name}, nothing here is measured",
        "stage  forward (ms)  backward (ms)     memory  of the usable",
    ]
    for s, device in enumerate(prediction.asked.placement):
        memory = prediction.memory[device]
        share = f"{memory.total / limit:14.1%}{'  does not fit' if memory.total > limit else ''}"
        lines.append(
            f"{s:5d} {1e3 * costs.forward[s]:13.4g} {1e3 * costs.backward[s]:14.4g} {format_bytes(memory.total):>10s} {share}"
        )
    lines += [
        f"predicted {prediction.samples_per_second:.4g} samples/s, devices busy {prediction.utilization:.0%} of the time, "
        f"{format_bytes(int(limit))} usable on each",
        f"predicted to be held back by {reason}",
        "",
    ]
    return lines


def _move_off_chip(backend: Any) -> Any:
    """Return the backend with the optimizer's state in streaming memory."""
    locations = backend.ipu.tensor_locations
    optimizer = locations.optimizer.model_copy(update={"on_chip": False})
    ipu = backend.ipu.model_copy(update={"tensor_locations": locations.model_copy(update={"optimizer": optimizer})})
    return backend.model_copy(update={"ipu": ipu})


def make_planned_config(config: Config, problem: Problem, prediction: Prediction, hardware: Any) -> str:
    """Return the text of `config` changed to a prediction; `hardware` as the user named it.

    Settings of the method (`method_args`) stay where the method does. Raise `BadInput` where that is not a valid config.
    """
    asked = prediction.asked
    changes = {
        "method": asked.method,
        "stages": list_begins(problem, prediction) or 1,
        "stages_per_device": None if asked.row.order is None else asked.stages_per_device,
        "micro_batch_size": asked.micro_batch_size,
        "gradient_accumulation": asked.gradient_accumulation,
        "replicas": asked.width,
        "recompute": asked.recompute,
        "precision": problem.precision,
        "hardware": hardware,
    }
    # the plan is of whole backwards
    method_args = config.method_args.model_copy(update=dict.fromkeys(("split_backward", "activation_limit")))
    local = METHODS[asked.method].structure is not None
    if asked.method != config.method:
        method_args = MethodArgs(head=config.method_args.head if local else None)
    if asked.method == "local_chunked":
        method_args = method_args.model_copy(update={"blocks": list_begins(problem, prediction) or 1})
    changes["method_args"] = method_args.model_copy(update={"schedule": _name_schedule(asked)})
    if problem.streamed and config.backend.ipu is not None:
        changes["backend"] = _move_off_chip(config.backend)
    text = dump_config(config.model_copy(update=changes))
    try:
        # check the config before anything is written
        configure(**parse_yaml(text, "--write"))
    except BadInput as error:
        raise BadInput([re.sub("^configure: ", "--write: ", fault) for fault in error.faults]) from None
    return text
