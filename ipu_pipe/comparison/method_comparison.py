"""Compare methods on the same work: throughput, memory and communication of each, measured and
planned.

Every method trains on as many samples as the config's own. Methods whose blocks have losses of
their own update after each microbatch: they need no batch to fill a pipeline (Laskin et al. 2020, section 6).
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Callable, Dict, Mapping, Sequence

from ipu_pipe.backends.ranks import is_distributed, run_on_main
from ipu_pipe.backends.table import launch
from ipu_pipe.comparison.trainings import BYTES
from ipu_pipe.config.backend_facts import BACKEND_FACTS
from ipu_pipe.config.compare import choose_method_settings, dump_config
from ipu_pipe.config.schema import BackendConfig, Config
from ipu_pipe.errors import BadInput, RunFault, raise_faults
from ipu_pipe.files import write_json
from ipu_pipe.job.record import Job
from ipu_pipe.launcher import describe_end
from ipu_pipe.model.flops import BACKWARD, HOW
from ipu_pipe.report.analysis.text import format_table
from ipu_pipe.report.memory import plan_memory
from ipu_pipe.report.summary import plan_links, plan_shared_links
from ipu_pipe.run.planning import build_for_planning
from ipu_pipe.run.train import train
from ipu_pipe.schedule import timelines
from ipu_pipe.schedule.clock import Costs, time_updates
from ipu_pipe.schedule.methods import require_known_methods, resolve_method
from ipu_pipe.store.folder import check_folder, is_run, read_summary

ERROR = "error: "
MIB = 2**20
# "throughput", "memory" or "communication" -> method -> its figures
Comparison = Dict[str, Dict[str, Any]]


def compare_methods(
    config: Config,
    methods: Sequence[str],
    out: Path,
    steps: int | None = None,
    overwrite: bool = False,
    say: Callable[[str], None] = print,
    rounds: int = 1,
) -> Comparison:
    """Train by each of `methods` into `out/METHOD` and return the content of the three files.

    Each makes `steps` updates of the config's own batch (None: the config's number, 0: plan only).
    The methods take turns in each of `rounds`, so that a change on the machine meets all of them;
    further rounds go into `out/METHOD/round-R`. Raise `BadInput`.
    """
    _check_comparison(config, methods)
    if is_distributed():
        options = {
            "out": out,
            "methods": methods,
            "steps": steps,
            "rounds": rounds,
            "overwrite": overwrite,
        }
        # the ranks meet in every training, so that all must compare the same methods as often
        launch(config, options)
    folders = {
        name: [out / name, *(out / name / f"round-{r}" for r in range(2, rounds + 1))]
        for name in methods
    }
    # both have a memory.json; a config.yaml alone may be the user's own
    is_runs = run_on_main(lambda: is_run(out))
    raise_faults({f"--out: {out}: is the folder of a run: give another folder": is_runs})
    # all folders first: the last method's must not be refused after hours of the others
    run_on_main(
        lambda: [
            check_folder(folder, overwrite=overwrite, can_resume=False)
            for folder in itertools.chain(*folders.values())
        ]
    )
    configs, jobs = _build_jobs(config, methods, steps)
    summaries: dict[str, list[dict[str, Any]]] = {name: [] for name in configs}
    for r in range(rounds if steps != 0 else 0):
        for name, chosen in configs.items():
            size = chosen.micro_batch_size * chosen.gradient_accumulation * chosen.replicas
            round_text = f", round {r + 1} of {rounds}" if rounds > 1 else ""
            say(f"{name}: {chosen.steps} updates of {size} samples{round_text}")
            processes = len(set(jobs[name].placement)) * chosen.replicas
            summaries[name].append(run_turn(chosen, folders[name][r], processes, overwrite))
    memory_files = {name: folders[name][0] / "memory.json" for name in configs}
    return _collect_figures(jobs, summaries, memory_files)


def _check_comparison(config: Config, methods: Sequence[str]) -> None:
    """Raise `BadInput` for methods or a backend that cannot be compared."""
    require_known_methods(methods, "--methods")
    if config.backend.facts.trains_on is not None:
        where = "collect compares methods on emulator or distributed"
        raise BadInput(f"backend.name: {config.backend.name}: unsupported: {where}")


def _build_jobs(
    config: Config, methods: Sequence[str], steps: int | None
) -> tuple[dict[str, Config], dict[str, Job]]:
    """Return the config and the planned job of each method; all get the cut of the config's own
    method, whatever their order.
    """
    jobs: dict[str, Job] = {}
    # alone it shares its cut with no other
    if list(methods) != [config.method]:
        job = build_for_planning(move_to_emulator(switch_method(config, config.method, steps)))
        # stages that divide modules cannot be given to the other methods by names
        if not job.partition.spread:
            jobs[config.method] = job
            # by names, which do not change as a measured or planned cut would; one stage has none
            config = config.model_copy(update={"stages": job.partition.begin_names() or 1})
    boundaries = config.stages if isinstance(config.stages, list) else []
    configs = {name: switch_method(config, name, steps, boundaries) for name in methods}
    return configs, {
        name: jobs.get(name) or build_for_planning(move_to_emulator(chosen))
        for name, chosen in configs.items()
    }


def _collect_figures(
    jobs: Mapping[str, Job],
    summaries: Mapping[str, Sequence[Mapping[str, Any]]],
    memory_files: Mapping[str, Path],
) -> Comparison:
    """Return the content of the three files; the first method is the baseline of speedups."""
    comparison: Comparison = {"throughput": {}, "memory": {}, "communication": {}}
    first = next(iter(jobs))
    baseline = jobs[first], summaries[first]
    for name, job in jobs.items():
        runs = summaries[name]
        comparison["throughput"][name] = _describe_throughput(job, runs, *baseline)
        memory = plan_memory(job)
        if runs:
            file = memory_files[name]
            # the main process has written the file, and others may not see its disk
            memory = run_on_main(lambda: dict(json.loads(file.read_text())))
        comparison["memory"][name] = {**memory, "devices": _describe_device_memory(memory)}
        comparison["communication"][name] = _describe_communication(job, runs[0] if runs else None)
    return comparison


def write_comparison(comparison: Comparison, out: Path) -> list[Path]:
    """Write throughput.json, memory.json and communication.json into `out` and return their
    paths.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"--out: {out}: cannot be created: {error.strerror or error}") from error
    return [
        write_json(out / f"{name}.json", {"methods": methods})
        for name, methods in comparison.items()
    ]


# ---- the configs


def move_to_emulator(config: Config) -> Config:
    """Return the config on the emulator, which holds all stages; its plan is the same."""
    if config.backend.facts.emulates:
        return config
    return config.model_copy(update={"backend": BackendConfig(threads=config.backend.threads)})


def switch_method(
    config: Config, name: str, steps: int | None, boundaries: Sequence[str] = ()
) -> Config:
    """Return the config with another method that does the same work.

    It trains on as many samples as `steps` updates of the config's own; chunks begin at
    `boundaries`.
    """
    steps = config.steps if steps is None else steps
    if steps is None:
        raise BadInput(
            "steps: null: set the number of updates of each method, in the config or by --steps"
        )
    # two updates at least, because the first is not timed
    changes: dict[str, Any] = {"steps": max(steps, 2)}
    if name != config.method:
        # settings of the config's method, such as two stages a device, would refuse this one
        changes.update(choose_method_settings(config, name), method=name)
        method_args = changes["method_args"]
        structure = resolve_method(name).structure
        if structure is not None:
            # blocks need no batch to fill a pipeline (Laskin et al. 2020, section 6)
            changes["steps"] *= config.gradient_accumulation
            changes["gradient_accumulation"] = 1
            changes["lr_schedule"] = config.lr_schedule.scale_updates(config.gradient_accumulation)
            # the cut that the pipelines have, so that methods differ by nothing else
            if structure.blocks is not None and boundaries:
                method_args["blocks"] = list(boundaries)
        changes["method_args"] = type(config.method_args).model_validate(method_args)
    return config.model_copy(update=changes)


# ---- the runs


def run_turn(config: Config, out: Path, processes: int, overwrite: bool = False) -> dict[str, Any]:
    """Train by `config` into `out` and return the summary; start `processes` processes if the run
    needs them.

    Raise `RunFault` if one of them fails, with its message.
    """
    # under torchrun this process is one of those that train
    if config.backend.facts.emulates or is_distributed():
        return train(config, out, overwrite=overwrite, quiet=True)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.yaml"
        file.write_text(dump_config(config), encoding="utf-8")
        command = [
            # not torchrun by its name, which may be another environment's
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nnodes",
            "1",
            "--nproc_per_node",
            str(processes),
            "--rdzv_backend",
            "c10d",
            "--rdzv_endpoint",
            # port 0 is any free one, so that two comparisons on a machine do not meet
            "localhost:0",
            "-m",
            "ipu_pipe",
            "train",
            str(file),
            "--out",
            str(out),
            *(["--overwrite"] if overwrite else []),
        ]
        # the processes get the same import path and one core each
        path = os.pathsep.join(map(os.path.abspath, sys.path))
        # the user's own number of threads wins, the path does not
        environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": path}
        finished = subprocess.run(
            command,
            # the run's own lines would come between those of the comparison
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            # what a library prints may not be UTF-8
            errors="replace",
        )
    summary = read_summary(out)
    if finished.returncode or summary is None:
        lines = finished.stderr.splitlines()
        # the run's own lines; torchrun adds many about its agent
        errors = [line[len(ERROR) :] for line in lines if line.startswith(ERROR)]
        reason = "; ".join(errors) or describe_end(finished.stderr)
        reason = reason or f"exit code {finished.returncode}"
        raise RunFault(f"{config.method} on {processes} processes: {reason}")
    return summary


# ---- figures of the table


def _describe_throughput(
    job: Job,
    runs: Sequence[Mapping[str, Any]],
    baseline_job: Job,
    baseline_runs: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """Return the throughput of a method, with its speedup against the baseline, the first method.

    On the emulator one machine does the work of all devices, so there is no measured speedup.
    """

    def compute_median(key: str, runs: Sequence[Mapping[str, Any]] = runs) -> float | None:
        # the emulator measures no busy share, and processes model none
        values = [run[key] for run in runs if run.get(key) is not None]
        return statistics.median(values) if values else None

    def divide(value: float | None, other: float | None) -> float | None:
        return None if value is None or other is None else value / other

    rate = "throughput_samples_per_second"
    speedup = divide(compute_median(rate), compute_median(rate, baseline_runs))
    accumulate = job.config.gradient_accumulation
    return {
        "samples_per_second": compute_median(rate),
        "samples_per_second_by_round": [run[rate] for run in runs if run[rate] is not None],
        "modelled_samples_per_second": compute_median("modelled_samples_per_second"),
        "gradient_accumulation": accumulate,
        "utilization": compute_median("utilization"),
        "modelled_utilization": compute_median("modelled_utilization"),
        "modelled_spread": compute_median("modelled_spread"),
        "planned_utilization": job.compute_planned_utilization(),
        "planned_utilization_steady": timelines.compute_utilization(
            job.method, len(job.partition), accumulate
        ),
        "measured_speedup": None
        if not runs or BACKEND_FACTS[runs[0]["backend"]].emulates
        else speedup,
        "modelled_speedup": divide(compute_modelled_rate(job), compute_modelled_rate(baseline_job)),
    }


def compute_modelled_rate(job: Job) -> float | None:
    """Return the microbatches in a unit of time in the steady state, from the schedule and the
    FLOPs of each stage.

    Auxiliary heads are included; a backward costs twice its forward, messages and updates nothing.
    None where layers are shared or frozen, since the FLOPs of a stage do not give its time then.
    """
    structure = job.method.structure
    if structure is not None and (structure.overlap or structure.layers is not None):
        return None
    N = job.schedule.accumulate
    flops = job.footprint.forward_flops
    costs = Costs(flops, [BACKWARD * f for f in flops], [0.0] * len(flops))
    # the updates of four times as many microbatches as there are stages
    count = -(-4 * len(flops) // N)
    # of two lengths, so that filling and draining cancel
    lengths = [timelines.make_schedule(job.method, len(flops), k * count * N, N) for k in (1, 2)]
    short, long = (time_updates(schedule, costs, job.placement)[-1] for schedule in lengths)
    return float(count * N / (long - short))


def _describe_device_memory(memory: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the planned bytes of each device, and its measured peak if there is one."""
    planned = memory["devices"]
    peaks = memory.get("peak_memory") or []
    # the emulator has one device; with replicas there are more devices than planned ones
    if len(peaks) != len(planned):
        peaks = [None] * len(planned)
    return [
        {
            "index": row["index"],
            "bytes": sum(row[kind] for kind in BYTES),
            "measured_bytes": peak.get("total") if peak else None,
        }
        for row, peak in zip(planned, peaks)
    ]


def _describe_communication(job: Job, run: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the links that a run measured (without one, and on the emulator, as planned) beside
    the planned ones.
    """
    links: dict[str, list[dict[str, Any]]] = {}
    for kind, plan in {
        "links": plan_links(job),
        "shared_layer_links": plan_shared_links(job),
    }.items():
        planned = {(link["src"], link["dst"]): link["bytes_per_microbatch"] for link in plan}
        links[kind] = [
            {
                **{key: link[key] for key in ("src", "dst", "bytes_per_microbatch")},
                "planned_bytes_per_microbatch": planned.get((link["src"], link["dst"]), 0),
            }
            for link in (plan if run is None else run.get(kind) or ())
        ]
    devices = {
        d: {"index": d, "received_bytes": 0, "transmitted_bytes": 0}
        for d in sorted(set(job.placement))
    }
    for link in itertools.chain(*links.values()):
        devices[job.placement[link["dst"]]]["received_bytes"] += link["bytes_per_microbatch"]
        devices[job.placement[link["src"]]]["transmitted_bytes"] += link["bytes_per_microbatch"]
    # only methods with local losses have any
    if not links["shared_layer_links"]:
        del links["shared_layer_links"]
    return {**links, "devices": list(devices.values())}


# ---- as text


def make_comparison_table(comparison: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the comparison as text: measured, modelled and planned figures."""
    rows = [
        [
            "",
            "samples/s",
            "by round",
            "busy",
            "busy",
            "busy",
            "speedup",
            "speedup",
            "fullest device",
            "fullest device",
            "traffic",
            "traffic",
        ],
        [
            "",
            "measured",
            "measured",
            "measured",
            "modelled",
            "planned",
            "measured",
            "modelled",
            "measured, MiB",
            "planned, MiB",
            "measured, MiB",
            "planned, MiB",
        ],
        *(_make_row(comparison, name) for name in comparison["throughput"]),
    ]
    return "\n".join(
        [
            *format_table(rows[0], rows[1:], left=1, most=len(rows)),
            "",
            *_describe_traffic(comparison["communication"]),
            "",
            "samples/s: median over the rounds; the emulator runs all devices one after another "
            "on this machine.",
            "busy: share of time in passes and updates: measured on processes; modelled: the "
            "simulated schedule with the",
            "measured passes of each stage, ± the share by which repeated passes differ; planned: "
            "the schedule's unit slots.",
            "traffic: per microbatch, over all links.",
            f"speedup: relative to the first method; modelled: the simulated schedule with times "
            f"from each stage's FLOPs ({HOW}).",
        ]
    )


def _make_row(comparison: Mapping[str, Mapping[str, Any]], name: str) -> list[str]:
    throughput = comparison["throughput"][name]
    traffic = comparison["communication"][name]
    rates = throughput["samples_per_second_by_round"]
    devices = comparison["memory"][name]["devices"]
    peaks = [
        device["measured_bytes"] / MIB for device in devices if device["measured_bytes"] is not None
    ]
    links = [*traffic["links"], *traffic.get("shared_layer_links", ())]
    # the emulator has no speedup, and sends nothing
    is_measured = throughput["measured_speedup"] is not None
    spread = throughput["modelled_spread"]
    within = "" if spread is None else f" ± {spread:.1%}"
    link_mib = sum(link["bytes_per_microbatch"] for link in links) / MIB if is_measured else None
    return [
        name,
        _show(throughput["samples_per_second"], ".1f"),
        f"{min(rates):.1f} to {max(rates):.1f}" if len(rates) > 1 else "-",
        _show(throughput["utilization"], ".1%"),
        _show(throughput["modelled_utilization"], ".1%") + within,
        _show(throughput["planned_utilization"], ".1%"),
        *(_show(throughput[key], ".2f") for key in ("measured_speedup", "modelled_speedup")),
        _show(max(peaks, default=None), ".1f"),
        f"{max(device['bytes'] for device in devices) / MIB:.1f}",
        _show(link_mib, ".3f"),
        f"{sum(link['planned_bytes_per_microbatch'] for link in links) / MIB:.3f}",
    ]


def _describe_traffic(methods: Mapping[str, Any]) -> list[str]:
    """Return the lines of a table of the bytes that each device receives and sends for a
    microbatch.
    """
    count = max(len(traffic["devices"]) for traffic in methods.values())
    rows = [["MiB per microbatch", "", *(f"device {d}" for d in range(count))]]
    for name, traffic in methods.items():
        for key in ("received", "transmitted"):
            rows.append(
                [
                    name,
                    key,
                    *(f"{device[f'{key}_bytes'] / MIB:.4f}" for device in traffic["devices"]),
                    # a method with several stages a device has fewer
                    *["-"] * (count - len(traffic["devices"])),
                ]
            )
    return format_table(rows[0], rows[1:], left=2, most=len(rows))


def _show(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
