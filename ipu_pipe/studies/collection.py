"""Methods compared on the same work: throughput, memory and communication of each, as measured and as the schedule says.

Every method trains on as many samples as the config's own. Methods with losses of their own update after each microbatch:
they need no batch to fill a pipeline (Laskin et al. 2020, section 6).
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence

from ipu_pipe.backends.ranks import is_distributed, run_on_main
from ipu_pipe.backends.table import BACKENDS, get_backend, launch
from ipu_pipe.config.schema import BackendConfig, Config
from ipu_pipe.errors import BadInput
from ipu_pipe.files import write_json
from ipu_pipe.job.record import Job
from ipu_pipe.model.flops import BACKWARD
from ipu_pipe.report.memory import build_memory_table
from ipu_pipe.report.summary import plan_links, plan_shared_links
from ipu_pipe.run.folder import check_folder, check_unlocked
from ipu_pipe.run.planning import build_for_planning
from ipu_pipe.schedule import timelines
from ipu_pipe.schedule.clock import Costs, clock
from ipu_pipe.schedule.methods import METHODS, resolve_method
from ipu_pipe.studies.turns import turn


def collect(
    config: Config,
    methods: Sequence[str],
    out: Path,
    steps: Optional[int] = None,
    overwrite: bool = False,
    say: Callable[[str], None] = print,
    rounds: int = 1,
) -> Dict[str, Dict[str, Any]]:
    """Run each of `methods` for `steps` updates of the config's own batch (its own number if None, 0: plan only) into
    `out/METHOD`, one after another, and so again in each further round into `out/METHOD/round-R`, so that what changes on the
    machine meets all alike. Returns what the three files hold: "throughput", "memory", "communication". Raises BadInput."""
    for name in methods:
        if name not in METHODS:
            raise BadInput(f"--methods: {name}: must be of {', '.join(METHODS)}")
    if len(set(methods)) != len(methods):
        raise BadInput(f"--methods: {','.join(methods)}: a method is named twice")
    if get_backend(config).trains_on is not None:
        raise BadInput(f"backend.name: {config.backend.name}: methods are compared on emulator or distributed")
    if is_distributed():
        launch(config, {"out": out, "methods": methods, "steps": steps, "rounds": rounds, "overwrite": overwrite})
    made: Dict[str, Job] = {}
    if list(methods) != [config.method]:  # one cut for all, the config's own, whatever their order
        job = build_for_planning(emulated(of_method(config, config.method, steps)))
        part = job.part
        if not part.spread:
            made[config.method] = job
            config = config.model_copy(update={"stages": part.begin_names() or 1})
    boundaries = config.stages if isinstance(config.stages, list) else []
    wished = {name: of_method(config, name, steps, boundaries) for name in methods}
    folders = {name: [out / name, *(out / name / f"round-{r}" for r in range(2, rounds + 1))] for name in wished}
    run_on_main(lambda: _check([folder for own in folders.values() for folder in own], overwrite))
    jobs = {name: made.get(name) or build_for_planning(emulated(chosen)) for name, chosen in wished.items()}
    summaries: Dict[str, List[Dict[str, Any]]] = {name: [] for name in wished}
    for r in range(rounds if steps != 0 else 0):
        for name, chosen in wished.items():
            size = chosen.micro_batch_size * chosen.gradient_accumulation * chosen.replicas
            say(
                f"{name}: {chosen.steps} updates of {size} samples"
                + (f", round {r + 1} of {rounds}" if rounds > 1 else "")
            )
            processes = len(jobs[name].part) * chosen.replicas
            summaries[name].append(turn(chosen, folders[name][r], processes, overwrite))
    found: Dict[str, Dict[str, Any]] = {"throughput": {}, "memory": {}, "communication": {}}
    for name, job in jobs.items():
        runs = summaries[name]
        found["throughput"][name] = _throughput(job, runs, jobs[methods[0]], summaries[methods[0]])
        stages = [{"index": s, **row} for s, row in enumerate(build_memory_table(job))]
        memory = _read_on_main(folders[name][0] / "memory.json") if runs else {"stages": stages}
        found["memory"][name] = {**memory, "devices": _device_memory(memory)}
        found["communication"][name] = _communication(job, runs[0] if runs else None)
    return found


def emulated(config: Config) -> Config:
    """The config on the emulator, which holds all stages: what is planned is the same."""
    if get_backend(config).emulates:
        return config
    return config.model_copy(update={"backend": BackendConfig(threads=config.backend.threads)})


def _check(folders: Sequence[Path], overwrite: bool) -> None:
    for folder in folders:
        check_folder(folder, False, overwrite)
        check_unlocked(folder)


def _read_on_main(file: Path) -> Dict[str, Any]:
    return run_on_main(lambda: dict(json.loads(file.read_text())))


def _throughput(
    job: Job, runs: Sequence[Mapping[str, Any]], first_job: Job, first_runs: Sequence[Mapping[str, Any]]
) -> Dict[str, Any]:
    """Of a method, beside those of the first one. On the emulator one machine does all devices' work: its speed says nothing of
    theirs, and there is no measured speedup."""
    rates, first_rates = (
        _values(runs, "throughput_samples_per_second"),
        _values(first_runs, "throughput_samples_per_second"),
    )
    stages, accumulate = len(job.part), job.config.gradient_accumulation
    here, there = modelled_rate(job), modelled_rate(first_job)
    has_devices = bool(rates) and not BACKENDS[runs[0]["backend"]].emulates
    return {
        "samples_per_second": statistics.median(rates) if rates else None,
        "samples_per_second_by_round": rates,
        "modelled_samples_per_second": _median(runs, "modelled_samples_per_second"),
        "gradient_accumulation": accumulate,
        "utilization": _median(runs, "utilization"),
        "modelled_utilization": _median(runs, "modelled_utilization"),
        "planned_utilization": job.planned_utilization(),
        "planned_utilization_steady": timelines.compute_utilization(job.method, stages, accumulate),
        "measured_speedup": statistics.median(rates) / statistics.median(first_rates) if has_devices else None,
        "modelled_speedup": None if here is None or there is None else here / there,
    }


def _values(runs: Sequence[Mapping[str, Any]], key: str) -> List[float]:
    return [run[key] for run in runs if run[key] is not None]


def _median(runs: Sequence[Mapping[str, Any]], key: str) -> Optional[float]:
    values = _values(runs, key)
    return statistics.median(values) if values else None


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


def _device_memory(memory: Mapping[str, Any]) -> List[Dict[str, Any]]:
    """Bytes of each device as planned, and the greatest that it held at once, where that was measured."""
    kinds = ("weight_bytes", "gradient_bytes", "optimizer_bytes", "activation_bytes")
    peaks = memory.get("peak_memory") or []
    if len(peaks) != len(memory["stages"]):  # the emulator's are one device's, replicas' others'
        peaks = [None] * len(memory["stages"])
    return [
        {
            "index": row["index"],
            "bytes": sum(row[kind] for kind in kinds),
            "measured_bytes": peak.get("total") if peak else None,
        }
        for row, peak in zip(memory["stages"], peaks)
    ]


def _communication(job: Job, run: Optional[Mapping[str, Any]]) -> Dict[str, Any]:
    """Links as a run measured them (without one, and on the emulator, as planned), and what was planned beside them."""
    found: Dict[str, List[Dict[str, Any]]] = {}
    for kind, own in {"links": plan_links(job), "shared_layer_links": plan_shared_links(job)}.items():
        expected = {(link["src"], link["dst"]): link["bytes_per_microbatch"] for link in own}
        found[kind] = [
            {
                **{key: link[key] for key in ("src", "dst", "bytes_per_microbatch")},
                "planned_bytes_per_microbatch": expected.get((link["src"], link["dst"]), 0),
            }
            for link in (own if run is None else run.get(kind) or ())
        ]

    def passing(end: str, device: int) -> int:
        return sum(link["bytes_per_microbatch"] for each in found.values() for link in each if link[end] == device)

    amounts = [
        {"index": d, "received_bytes": passing("dst", d), "transmitted_bytes": passing("src", d)}
        for d in range(len(job.part))
    ]
    shared = found.pop("shared_layer_links")
    return {**found, **({"shared_layer_links": shared} if shared else {}), "devices": amounts}


def write(found: Mapping[str, Mapping[str, Any]], out: Path) -> List[Path]:
    """Write throughput.json, memory.json and communication.json into `out`."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"--out: {out}: cannot be made: {error.strerror or error}") from error
    return [write_json(out / f"{name}.json", {"methods": methods}) for name, methods in found.items()]
