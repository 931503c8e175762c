"""Format the text that a run prints: its plan before the start, and the summary at the end."""

from __future__ import annotations

from pathlib import Path
from shlex import quote
from typing import Any, Mapping, Sequence

from ipu_pipe.config.schema import Config
from ipu_pipe.hardware.precision import MASTERS, MIXED
from ipu_pipe.job.record import InitialWeights, Job, PlannedJob
from ipu_pipe.job.stability import list_inapplicable
from ipu_pipe.model.flops import HOW
from ipu_pipe.model.modes import describe_modes
from ipu_pipe.model.stages import describe_stages
from ipu_pipe.plan.answer import format_config_cut
from ipu_pipe.report.analysis.text import format_table
from ipu_pipe.report.memory import build_memory_table, compute_memory_figures
from ipu_pipe.schedule.rows import format_text
from ipu_pipe.text import list_some

MIB = 2**20
SHOWN_STAGES = 12
# FLOPs per printed unit (GFLOPs)
FLOPS_SHOWN = 1e9
# a predicted throughput that is wrong by a larger factor is reported
PREDICTION_BAND = 2.0


def format_opening(job: PlannedJob, done: int = 0) -> str:
    """Format the plan in a few lines, for the start of a run; `done`: updates of earlier starts."""
    config = job.config
    parameters = sum(p.numel() for p in job.model.parameters())
    lines = [job.note] if job.note else []
    lines += [*_describe_unused_keys(job), *describe_modes(job.model, job.came_evaluating)]
    lines += [_format_init_from(job.initial_weights)] if job.initial_weights is not None else []
    others = job.precision.list_other_dtypes()
    if others:
        lines.append(
            f"precision: the model has {' and '.join(others)}; it is trained in {config.precision} "
            f"and cast back at the end"
        )
    # mixed precision has two forms
    if config.precision == MIXED:
        lines.append(
            f"precision {MIXED}: weights in bfloat16 with float32 master copies: a backward of "
            f"{job.method.name} "
            "reads other weights than its forward, but autocast would cache copies of the forward's"
            if job.precision.row == MASTERS
            else f"precision {MIXED}: forward and loss under autocast, weights and updates in "
            f"float32"
        )
    lines += [
        *describe_left_out(job),
        f"{get_model_name(config)}: {parameters:,} parameters on {len(job.partition)} stages; "
        f"method {job.method.name}, "
        f"backend {config.backend.name} on {job.device_kind}",
        f"global batch size {job.global_batch_size} = micro_batch_size {config.micro_batch_size} x "
        f"gradient_accumulation {config.gradient_accumulation} x replicas {job.replica_count}; "
        f"{job.updates - done} updates, "
        + (
            f"{job.updates_per_epoch} per epoch"
            if job.updates_per_epoch is not None
            else "data of unknown length"
        ),
    ]
    lines += [job.advice] if job.advice else []
    return "\n".join(lines)


def _describe_unused_keys(job: PlannedJob) -> list[str]:
    """Describe keys of the config that have no effect."""
    config = job.config
    method = job.method
    lines = []
    # the default of epochs does not contradict steps, only a value that the user wrote
    if config.steps is not None and "epochs" in config.model_fields_set:
        if job.updates_per_epoch is None or config.epochs * job.updates_per_epoch != config.steps:
            lines.append(
                f"steps: {config.steps} overrides epochs: {config.epochs}, which is ignored"
            )
    # other methods differ from plain training even on one stage
    of_stages = (
        method.structure is None
        and method.history is None
        and method.rounds is None
        and method.delay is None
    )
    if len(job.partition) == 1 and of_stages:
        lines.append(
            f"stages: with one stage there is no pipeline: {method.name} is plain training"
        )
    return lines


def _format_init_from(weights: InitialWeights) -> str:
    left_out = [f"{name} ({why})" for name, why in weights.left_out.items()]
    return (
        f"init_from: {weights.path}: {weights.taken} parameters and buffers loaded; "
        f"not loaded: {list_some(left_out) or 'none'}; new in the model: "
        f"{list_some(weights.new) or 'none'}"
    )


def describe_left_out(job: Job) -> list[str]:
    """Describe in a line the number of training samples that no update uses; [] if all are used, or
    if it is not known.
    """
    if job.updates_per_epoch is None:
        return []
    size = job.config.micro_batch_size
    batch = job.global_batch_size
    # a source that tells its samples also counts those that fill no microbatch
    samples = getattr(job.data, "train_samples", None) or size * (
        job.data.train_batches_per_epoch(size) or 0
    )
    left_out = samples - job.updates_per_epoch * batch
    if left_out <= 0:
        return []
    return [
        f"data: {left_out:,} of {samples:,} training samples are left out of each epoch: they do "
        f"not fill a batch of {batch}"
    ]


STAGE_HEAD = (
    "stage",
    "begins with",
    "parameters",
    "delay",
    "copies",
    "in flight",
    "memory (MiB)",
    "forward",
    "backward",
    "share",
    "sends (bytes)",
)


def format_plan(job: PlannedJob) -> str:
    """Format the text of `--dry-run`: stages, schedule, delays, planned memory and traffic,
    FLOPs.
    """
    table = build_memory_table(job)
    weights, state, activations = (
        sum(row[f"{kind}_bytes"] for row in table) / MIB
        for kind in ("weight", "optimizer", "activation")
    )
    utilization = job.compute_planned_utilization()
    lines = [
        format_opening(job),
        "",
        *_format_stage_table(job, table),
        "",
        "delay: updates between the weights that a forward reads and the update by its gradient "
        "(maximum in the steady state)",
        "memory: weight versions, gradients, optimizer state and activations in flight, planned "
        "from one microbatch",
        f"total: {weights:.1f} MiB weights, {state:.1f} MiB optimizer state, {activations:.1f} MiB "
        f"activations",
        *_format_memory_figures(job),
        _format_flops(job),
        "sends: activations per microbatch to the next stage, which sends back their gradients",
        "",
        *format_config_cut(job),
        f"schedule: {job.schedule.slot_count:,} slots, stages busy in {utilization:.1%} of them "
        "(planned, fill and drain included)",
        "",
        *_draw_schedule_begin(job),
    ]
    return "\n".join(lines)


def _count_gflops(job: Job) -> tuple[list[float], list[float]]:
    """Return the GFLOPs of each stage's forward and backward per sample; no backward if it is not
    known.
    """
    # the footprint counts a microbatch, the table a sample
    per = FLOPS_SHOWN * job.config.micro_batch_size
    forward = [flops / per for flops in job.footprint.forward_flops]
    backward = [flops / per for flops in job.footprint.backward_flops or ()]
    return forward, backward


def _add_gflops(forward: list[float], backward: list[float]) -> list[float]:
    return [f + b for f, b in zip(forward, backward)] if backward else forward


def _format_stage_table(job: Job, table: Sequence[Mapping[str, int]]) -> list[str]:
    """Format a row for each stage; of many, the first and the last ones."""
    forward, backward = _count_gflops(job)
    gflops = _add_gflops(forward, backward)
    whole = sum(gflops)
    last = len(table) - 1
    rows = []
    for (s, name, parameters), row in zip(describe_stages(job.partition, job.model), table):
        size = sum(
            row[f"{kind}_bytes"] for kind in ("weight", "optimizer", "activation", "gradient")
        )
        rows.append(
            [
                f"{s}",
                name or "(no weights)",
                f"{parameters:,}",
                f"{row['forward_delay']}",
                f"{row['weight_copies']}",
                f"{row['in_flight']}",
                f"{size / MIB:.2f}",
                f"{forward[s]:.4g}",
                f"{backward[s]:.4g}" if backward else "-",
                f"{gflops[s] / whole:.1%}" if whole else "-",
                f"{job.footprint.boundary_bytes[s]:,}" if s < last else "-",
            ]
        )
    lines = format_table(STAGE_HEAD, rows, left=2, most=len(rows))
    if len(rows) <= SHOWN_STAGES:
        return lines
    half = SHOWN_STAGES // 2
    # 1: the head
    return [*lines[: 1 + half], "  ...", *lines[-half:]]


def _format_flops(job: Job) -> str:
    forward, backward = _count_gflops(job)
    gflops = _add_gflops(forward, backward)
    whole = sum(gflops)
    backward_total = f"{sum(backward):.4g}" if backward else "-"
    line = (
        f"forward, backward: GFLOPs per sample ({HOW}), in total {sum(forward):.4g} and "
        f"{backward_total}"
    )
    if not whole:
        return line
    ratio = max(gflops) * len(gflops) / whole
    return f"{line}; the largest stage has {ratio:.2f} times the mean"


def _format_memory_figures(job: Job) -> list[str]:
    figures = compute_memory_figures(job)
    if figures is None:
        return []
    return [
        f"weights, gradients and optimizer state: {figures['weight_optimizer_copies']:.2f} times "
        f"the weights, "
        f"{figures['weight_optimizer_ratio']:.2f} times that of the synchronous method"
    ]


def _draw_schedule_begin(job: Job) -> list[str]:
    if len(job.partition) > 40:
        return [f"the schedule has {len(job.partition)} rows: ipu-pipe schedule prints it"]
    return [
        "first slots:",
        # far enough for the first microbatch to come back to stage 0
        format_text(job.schedule, last_slot=max(24, 2 * len(job.partition) + 6)),
    ]


def get_model_name(config: Config) -> str:
    """Return the config's entry of the model, or the class of a model that Python passed."""
    model = config.given.model if config.given is not None else None
    return config.model.entry if model is None else model.name


def format_closing(
    job: PlannedJob,
    report: Mapping[str, Any],
    folder: Path,
    predicted: tuple[str, float] | None = None,
) -> str:
    """Format the readable summary at the end of a job's run; its last line is the throughput.
    `predicted`: a hardware's name, and the samples per second predicted on it.
    """
    first = report["initial"]
    last = report["final"]
    delays = [stage["forward_delay"] for stage in report["stages"]]
    copies = [stage["weight_copies"] for stage in report["stages"]]
    lines = [
        "",
        f"{report['method']} on {report['model']['stages']} stages: {report['steps']} updates of "
        f"{report['batch']['global_batch_size']} samples",
        f"  {', '.join(_format_tests(first, last))}, training loss "
        f"{format_number(last['train_loss'], 4)}",
        f"  busy: {format_busy(report)}",
        f"  greatest delay {_format_range(delays)} updates; weight copies {_format_range(copies)} per "
        f"stage",
        "  files:",
        f"    {folder / 'summary.json'}   all figures",
    ]
    # by the folder: a run may trace nothing, or save nothing
    if (folder / "trace.json.gz").is_file():
        lines.append(
            f"    {folder / 'trace.json.gz'}  timeline of each device: open it in ui.perfetto.dev"
        )
    tensorboard = (
        f"; tensorboard --logdir {quote(str(folder))}" if job.config.log.tensorboard else ""
    )
    lines.append(f"    {folder / 'metrics.jsonl'}  losses and rates by update{tensorboard}")
    if (folder / "checkpoints").is_dir():
        lines.append(f"    {folder / 'checkpoints'}    weights")
    if report["stopped"] is not None:
        # below the first line, before the figures, which are those of a shorter run
        lines.insert(
            2,
            f"  ended after {report['steps']} of {report['planned_steps']} updates: "
            f"{report['stopped']}",
        )
    if report["finding"] is not None:
        lines.append(
            f"  finding: {report['finding']}; another optimizer.lr may help{_advise_rate(job, folder)}"
        )
    measured = report["throughput_samples_per_second"]
    if predicted is not None and measured is not None:
        name, rate = predicted
        error = (
            f"the prediction is {abs(rate / measured - 1):.1%} too "
            f"{'high' if rate > measured else 'low'}"
        )
        lines.append(
            f"  predicted on {name}: {rate:.1f} samples/s, measured: {measured:.1f}; {error}"
        )
        if not 1 / PREDICTION_BAND <= rate / measured <= PREDICTION_BAND:
            lines.append(
                f"  finding: the prediction is off by more than a factor of {PREDICTION_BAND:g}: "
                f"do not plan by it. Either"
                f" {name} is not this machine (measure_hardware describes it), or the model's "
                f"parts are too small for rates alone"
                " (plan --measure times them), or other work kept the machine busy"
            )
    return "\n".join([*lines, format_throughput(report)])


def _advise_rate(job: PlannedJob, folder: Path) -> str:
    """Return how the stability of a job's run is measured, "" where the command refuses it."""
    facts = job.config.backend.facts
    # the command builds the job by its config alone, in one process
    is_built = job.config.given is None and (facts.emulates or facts.uses_processes)
    if not is_built or list_inapplicable(job):
        return ""
    change = "" if facts.emulates else " --set backend.name=emulator"
    return (
        f": ipu-pipe stability {quote(str(folder / 'config.yaml'))}{change} measures the "
        f"curvature at this run's checkpoints"
    )


def _format_tests(first: Mapping[str, Any], last: Mapping[str, Any]) -> list[str]:
    """Format the test loss and the known metrics, before and after training."""
    # of the last evaluation: metrics may have come after the run's first start
    names = [name for name in last if name.startswith("test_") and name != "test_loss"]
    # accuracy is in the record also where it is not asked for
    known = [(name, 3) for name in names if first.get(name) is not None or last[name] is not None]
    held_out = last.get("validation_loss")
    validated = [] if held_out is None else [f"validation loss {format_number(held_out, 4)}"]
    return [
        *validated,
        *(
            f"test {name[5:]} {format_number(first.get(name), digits)} -> "
            f"{format_number(last[name], digits)}"
            for name, digits in [*known[:1], ("test_loss", 4), *known[1:]]
        ),
    ]


def format_busy(report: Mapping[str, Any]) -> str:
    """Format the share of the devices' time in passes and updates, from a summary, each figure with
    its origin.
    """
    # a summary of an earlier version has none
    spread = report.get("modelled_spread")
    repeat = "" if spread is None else f", which repeat within {spread:.1%}"
    # in the order of trust: what devices showed, what was simulated, what was only planned
    origins = {
        "utilization": "measured on the devices",
        "modelled_utilization": f"modelled (the schedule with the stages' measured passes{repeat})",
        "planned_utilization": "planned (of the schedule's unit slots)",
    }
    return ", ".join(
        f"{report[key]:.1%} {what}" for key, what in origins.items() if report[key] is not None
    )


def format_throughput(report: Mapping[str, Any]) -> str:
    """Format the line `throughput: N samples/sec`, from a summary."""
    rate = report["throughput_samples_per_second"]
    return (
        f"throughput: {rate:.1f} samples/sec"
        if rate is not None
        else "throughput: not measured (one update only)"
    )


def format_number(value: float | None, digits: int) -> str:
    """Format a number with `digits` decimals; "unknown" for None."""
    return "unknown" if value is None else f"{value:.{digits}f}"


def _format_range(values: Sequence[int]) -> str:
    return str(values[0]) if min(values) == max(values) else f"{min(values)} to {max(values)}"
