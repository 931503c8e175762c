"""Methods compared on the same work: throughput, memory and communication of each, as measured and as the schedule says.

Every method trains on as many samples as the config's own. Methods with losses of their own update after each microbatch:
they need no batch to fill a pipeline (Laskin et al. 2020, section 6).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence

from ipu_pipe.backends.table import backend_of
from ipu_pipe.errors import BadInput
from ipu_pipe.job.record import Job
from ipu_pipe.job.schema import Config
from ipu_pipe.model.flops import BACKWARD, HOW
from ipu_pipe.report.memory import memory_table
from ipu_pipe.report.traffic import links, shared_links
from ipu_pipe.run.folder import check_folder
from ipu_pipe.run.folder_lock import refuse_used
from ipu_pipe.run.planning import planned
from ipu_pipe.run.training import train
from ipu_pipe.schedule import timelines
from ipu_pipe.schedule.clock import Costs, clock
from ipu_pipe.schedule.methods import METHODS, resolve_method
from ipu_pipe.written import write_json

MIB = 2**20


def collect(
    config: Config,
    methods: Sequence[str],
    out: Path,
    steps: Optional[int] = None,
    overwrite: bool = False,
    say: Callable[[str], None] = print,
) -> Dict[str, Dict[str, Any]]:
    """Run each of `methods` for `steps` updates of the config's own batch (its own number if None, 0: plan only) into
    `out/METHOD`. Returns what the three files hold: "throughput", "memory", "communication". Raises BadInput."""
    for name in methods:
        if name not in METHODS:
            raise BadInput(f"--methods: {name}: must be of {', '.join(METHODS)}")
    if len(set(methods)) != len(methods):
        raise BadInput(f"--methods: {','.join(methods)}: a method is named twice")
    if not backend_of(config).emulates:
        raise BadInput(f"backend.name: {config.backend.name}: methods are compared on the emulator, in one process")
    made: Dict[str, Job] = {}
    if list(methods) != [config.method]:  # one cut for all, the config's own, whatever their order
        job = planned(of_method(config, config.method, steps))
        part = job.part
        if not part.spread:
            made[config.method] = job
            config = config.model_copy(update={"stages": part.begin_names() or 1})
    boundaries = config.stages if isinstance(config.stages, list) else []
    wished = {name: of_method(config, name, steps, boundaries) for name in methods}
    found: Dict[str, Dict[str, Any]] = {"throughput": {}, "memory": {}, "communication": {}}
    for name in wished:
        check_folder(out / name, False, overwrite)
        refuse_used(out / name)
    rates: Dict[str, Optional[float]] = {}
    for name, chosen in wished.items():
        size = chosen.micro_batch_size * chosen.gradient_accumulation * chosen.replicas
        say(f"{name}: {chosen.steps} updates of {size} samples")
        job = made.get(name) or planned(chosen)
        rate = rates[name] = modelled_rate(job)
        first = rates[methods[0]]
        if steps == 0:
            report: Mapping[str, Any] = {"links": links(job), "shared_layer_links": shared_links(job)}
            memory = {"stages": [{"index": s, **row} for s, row in enumerate(memory_table(job))]}
            speed, busy = None, job.utilization()
        else:
            report = train(chosen, out / name, overwrite=overwrite, quiet=True)
            memory = json.loads((out / name / "memory.json").read_text())
            speed, busy = report["throughput_samples_per_second"], report["utilization"]
        found["throughput"][name] = {
            "samples_per_second": speed,
            "gradient_accumulation": chosen.gradient_accumulation,
            "utilization": busy,
            "utilization_steady": timelines.utilization(job.method, len(job.part), chosen.gradient_accumulation),
            "modelled_speedup": None if rate is None or first is None else rate / first,
        }
        found["memory"][name] = {**memory, "devices": _device_memory(memory["stages"])}
        found["communication"][name] = _communication(report, len(job.part))
    return found


def of_method(config: Config, name: str, steps: Optional[int], boundaries: Sequence[str] = ()) -> Config:
    """The config with another method, doing the same work: as many samples in `steps` of the config's own updates, chunks that
    begin at `boundaries`."""
    steps = config.steps if steps is None else steps
    if steps is None:
        raise BadInput("steps: null: must be given, in the config or by --steps: how many updates each method makes")
    changes: Dict[str, Any] = {"steps": max(steps, 2)}  # the first update is not timed
    if name != config.method:
        empty = type(config.method_args)()
        own = {key: value for key, value in config.method_settings().items() if key == "head"}
        structure = resolve_method(name).structure
        if structure is not None:
            changes["steps"] *= config.gradient_accumulation
            changes["gradient_accumulation"] = 1
            warm = config.lr_schedule.warmup_steps * config.gradient_accumulation
            changes["lr_schedule"] = config.lr_schedule.model_copy(update={"warmup_steps": warm})
            if structure.blocks is not None and boundaries:
                own["blocks"] = list(boundaries)
        changes["method"], changes["method_args"] = name, empty.model_copy(update=own)
    return config.model_copy(update=changes)


def modelled_rate(job: Job) -> Optional[float]:
    """Microbatches in a unit of time in the steady state, by the schedule and each stage's FLOPs, auxiliary heads included; a
    backward counts twice its forward, messages and updates nothing. None where layers are shared or frozen: the FLOPs of a stage
    do not say its time then."""
    structure = job.method.structure
    if structure is not None and (structure.overlap or structure.layers is not None):
        return None
    stages, accumulate = len(job.part), job.schedule.accumulate
    length = accumulate * -(-4 * stages // accumulate)
    flops = job.footprint.forward_flops
    costs = Costs(flops, [BACKWARD * f for f in flops], [0.0] * stages)
    times = []
    for count in (length, 2 * length):
        schedule = timelines.make_schedule(job.method, stages, count, accumulate)
        times.append(clock(schedule, costs).finish)
    return length / (times[1] - times[0])


def _device_memory(stages: Sequence[Mapping[str, Any]]) -> List[Dict[str, int]]:
    kinds = ("weight_bytes", "gradient_bytes", "optimizer_bytes", "activation_bytes")
    return [{"index": row["index"], "bytes": sum(row[kind] for kind in kinds)} for row in stages]


def _communication(report: Mapping[str, Any], devices: int) -> Dict[str, Any]:
    links, shared = (
        [{key: link[key] for key in ("src", "dst", "bytes_per_microbatch")} for link in report.get(kind) or ()]
        for kind in ("links", "shared_layer_links")
    )

    def passing(end: str, device: int) -> int:
        return sum(link["bytes_per_microbatch"] for link in [*links, *shared] if link[end] == device)

    amounts = [
        {"index": d, "received_bytes": passing("dst", d), "transmitted_bytes": passing("src", d)}
        for d in range(devices)
    ]
    return {"links": links, **({"shared_layer_links": shared} if shared else {}), "devices": amounts}


def write(found: Mapping[str, Mapping[str, Any]], out: Path) -> List[Path]:
    """Write throughput.json, memory.json and communication.json into `out`."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"--out: {out}: cannot be made: {error.strerror or error}") from error
    return [write_json(out / f"{name}.json", {"methods": methods}) for name, methods in found.items()]


def table(found: Mapping[str, Mapping[str, Any]]) -> str:
    """The comparison as text."""
    lines = [
        "method                  samples/s   busy (steady)   speedup by FLOPs   greatest device (MiB)   MiB a microbatch crosses"
    ]
    for name, speed in found["throughput"].items():
        rate = "-" if speed["samples_per_second"] is None else f"{speed['samples_per_second']:.1f}"
        most = max(device["bytes"] for device in found["memory"][name]["devices"]) / MIB
        crossing = sum(device["transmitted_bytes"] for device in found["communication"][name]["devices"]) / MIB
        gain = "-" if speed["modelled_speedup"] is None else f"{speed['modelled_speedup']:.2f}"
        lines.append(
            f"{name:22s} {rate:>10s} {speed['utilization_steady']:>15.1%} {gain:>18s} {most:>23.1f} {crossing:>29.3f}"
        )
    count = max(len(traffic["devices"]) for traffic in found["communication"].values())
    lines += ["", "a microbatch, MiB             " + "  ".join(f"device {d:<9d}" for d in range(count))]
    for name, traffic in found["communication"].items():
        for key in ("received", "transmitted"):
            amounts = "  ".join(f"{device[f'{key}_bytes'] / MIB:<16.4f}" for device in traffic["devices"])
            lines.append(f"{name:17s} {key:12s}{amounts}".rstrip())
    lines += [
        "",
        "samples/s: of this machine, which does all devices' work in turn on the emulator. busy: of the schedule's slots.",
        f"speedup by FLOPs: the schedule with each stage's FLOPs as times ({HOW}), against the first method.",
    ]
    return "\n".join(lines)
