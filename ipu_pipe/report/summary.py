"""The contents of `summary.json`, and the traffic between stages, as planned and as measured."""

from __future__ import annotations

from typing import Any, Mapping, Sequence

from ipu_pipe.backends.interface import Report
from ipu_pipe.job.evaluation import EvaluationResult
from ipu_pipe.job.numerics import record_numerics
from ipu_pipe.job.record import Job, PlannedJob
from ipu_pipe.local.blocks import get_blocks
from ipu_pipe.report.memory import build_memory_table, compute_memory_figures
from ipu_pipe.report.position import LossTrend, Position
from ipu_pipe.report.run_text import get_model_name
from ipu_pipe.report.run_trace import StageCosts, compute_modelled_rates

SCHEMA = 2
STAGE_KEYS = (
    "parameters",
    "weight_copies",
    "weight_bytes",
    "optimizer_bytes",
    "activation_bytes",
    "forward_delay",
    "backward_delay",
)


def summarize(
    job: PlannedJob,
    position: Position,
    final: Mapping[str, float | None],
    measured: Report,
    tested: Sequence[EvaluationResult] = (),
    costs: StageCosts | None = None,
    stopped: str | None = None,
    trend: LossTrend | None = None,
) -> dict[str, Any]:
    """Return the contents of `summary.json`.

    `final`: the last evaluation by the names in `metrics.jsonl`; `tested`: the last test by block;
    `costs`: of the stages, if no device has a clock; `stopped`: why the run ended before its last
    planned update; `trend`: of the training loss of a run that is known from its start.
    """
    config = job.config
    parameters = sum(p.numel() for p in job.model.parameters())
    return {
        "schema": SCHEMA,
        "method": job.method.name,
        "backend": config.backend.name,
        "device": job.device_kind,
        "numerics": record_numerics(config.backend),
        "precision": {"name": config.precision, **job.precision.record},
        "model": {
            "entry": get_model_name(config),
            "parameters": parameters,
            "stages": len(job.partition),
        },
        "batch": {
            "micro_batch_size": config.micro_batch_size,
            "gradient_accumulation": config.gradient_accumulation,
            "replicas": config.replicas,
            "global_batch_size": job.global_batch_size,
        },
        "optimizer": job.used.optimizer.model_dump() if job.used.optimizer else None,
        # groups are those of an optimizer's parameters
        "loss": job.used.loss.model_dump(exclude={"groups"}) if job.used.loss else None,
        "steps": position.update,
        "planned_steps": job.updates,
        "stopped": stopped,
        "diverged_after": None if trend is None else trend.find_divergence(),
        "finding": None if trend is None else trend.describe(),
        "best": position.best,
        "samples": position.update * job.global_batch_size,
        "updates_per_epoch": job.updates_per_epoch,
        "initial": position.initial.to_record(),
        "final": {
            "train_loss": position.epoch_loss / position.epoch_updates
            if position.epoch_updates
            else None,
            **final,
        },
        "throughput_samples_per_second": _compute_throughput(job, position),
        **compute_busy_shares(job, measured, costs),
        "stages_begin_at": job.partition.begin_names(),
        "phases": job.describe_phases(),
        "stages": [
            {"index": index, **{key: row[key] for key in STAGE_KEYS}}
            for index, row in enumerate(build_memory_table(job, measured.optimizer_bytes))
        ],
        "links": plan_links(job)
        if measured.links is None
        else _list_measured_links(measured.links, measured),
        **_record_blocks(job, measured, tested),
        "memory": compute_memory_figures(job),
    }


def _compute_throughput(job: Job, position: Position) -> float | None:
    """Return the samples per second of the timed updates; None if none was timed."""
    if not position.seconds:
        return None
    return position.timed_updates * job.global_batch_size / position.seconds


def compute_busy_shares(
    job: Job, measured: Report, costs: StageCosts | None
) -> dict[str, float | None]:
    """Return the measured, planned and modelled busy share.

    Measured: the time in passes and updates divided by the whole span, summed over the devices. The
    rest is the bubble, which includes waits and communication. Planned: the share of the schedule's
    unit slots, or PopTorch's own figure. Modelled: by the clock with measured costs, None if costs
    were not measured; `modelled_spread` is how far they may be off by chance, as a share of them.
    """
    planned = (
        job.compute_planned_utilization() if measured.utilization is None else measured.utilization
    )
    span = sum(device.span_ns for device in measured.times or ())
    # no times where no device has a clock, as on the emulator
    busy = sum(device.busy_ns for device in measured.times or ()) / span if span else None
    # costs from FLOPs alone say nothing of how long a device is busy
    modelled = (
        compute_modelled_rates(job, costs.costs, costs.spread)
        if costs is not None and costs.are_measured
        else None
    )
    return {
        "utilization": busy,
        "bubble_fraction": None if busy is None else 1 - busy,
        "planned_utilization": planned,
        "planned_bubble_fraction": 1 - planned,
        "modelled_utilization": None if modelled is None else modelled.utilization,
        "modelled_samples_per_second": None if modelled is None else modelled.samples_per_second,
        "modelled_spread": None if modelled is None else modelled.spread,
    }


def _record_blocks(
    job: Job, measured: Report, tested: Sequence[EvaluationResult]
) -> dict[str, Any]:
    """Return for methods with local losses the test metrics of each block's head (the model's own
    last), and the traffic of gradients of shared layers, which `links` does not contain."""
    if job.method.structure is None:
        return {}
    # stages that do not train have no head, and come first
    first = len(job.partition) - len(tested)
    blocks = [{"index": first + i, **result.to_record()} for i, result in enumerate(tested)]
    shared = (
        plan_shared_links(job)
        if measured.shared is None
        else _list_measured_links(measured.shared, measured)
    )
    return {"blocks": blocks, "shared_layer_links": shared}


def _list_measured_links(
    sent: Mapping[tuple[int, int], tuple[int, int]], measured: Report
) -> list[dict[str, int]]:
    """Return the traffic that was measured since the run was last resumed."""
    return [_build_link(link, *sent[link], measured.microbatches) for link in sorted(sent)]


def plan_links(job: Job) -> list[dict[str, int]]:
    """Return the planned traffic between stages, a row for each direction: activations on,
    gradients back where they cross, and for tied weights each microbatch's gradient and each
    update's weights. A stage that also computes the previous stage's last layer receives the input
    of that layer (the second stage has the input).
    """
    microbatches = job.schedule.microbatches
    updates = job.schedule.update_count
    structure = job.method.structure
    ahead = structure.overlap if structure is not None else 0
    first_trained = min(group["stage"] for group in job.full_optimizer.param_groups)
    # tensors that are sent between two stages at the same time are one message; (source, target) ->
    # its bytes
    sizes: dict[tuple[int, int], int] = {}
    for s, size in enumerate(job.footprint.boundary_bytes):
        if not ahead or s + ahead < len(job.partition) - 1:
            sizes[s + ahead, s + ahead + 1] = size
            # no gradient is sent to stages that are all frozen
            if structure is None:
                sizes[s + 1, s] = size if s >= first_trained else 0
    tied_gradients: dict[tuple[int, int], int] = {}
    tied_weights: dict[tuple[int, int], int] = {}
    for name, uses in job.partition.list_tied(job.model).items():
        weight = job.model.get_parameter(name)
        size = weight.numel() * weight.element_size()
        # each backward's gradient goes to the previous user, an update's weights from the first
        # user to the others
        for before, user in zip(uses, uses[1:]):
            tied_gradients[user.stage, before.stage] = (
                tied_gradients.get((user.stage, before.stage), 0) + size
            )
            tied_weights[uses[0].stage, user.stage] = (
                tied_weights.get((uses[0].stage, user.stage), 0) + size
            )
    # (source, target) -> bytes and messages of the whole run
    traffic: dict[tuple[int, int], tuple[int, int]] = {}
    for count, message_bytes in (
        (microbatches, sizes),
        (microbatches, tied_gradients),
        (updates, tied_weights),
    ):
        for link, size in message_bytes.items():
            sent_bytes, messages = traffic.get(link, (0, 0))
            traffic[link] = sent_bytes + size * count, messages + count
    return [
        _build_link(link, sent_bytes, messages, microbatches)
        for link, (sent_bytes, messages) in traffic.items()
        # transfers within a device are not messages
        if job.placement[link[0]] != job.placement[link[1]]
    ]


def plan_shared_links(job: Job) -> list[dict[str, int]]:
    """Return the planned traffic of gradients of shared layers, which neighbours exchange in each
    update; none without an overlap."""
    blocks = get_blocks(job.model)
    rows = []
    messages = job.schedule.update_count
    # the next stage's device holds a copy of each piece but the last
    for s, piece in enumerate(blocks.pieces[:-1] if blocks is not None and blocks.overlap else ()):
        size = messages * sum(
            p.numel() * p.element_size() for p in piece.parameters() if p.requires_grad
        )
        rows += [
            _build_link(link, size, messages, job.schedule.microbatches)
            for link in ((s, s + 1), (s + 1, s))
        ]
    return rows


def _build_link(
    link: tuple[int, int], size: int, messages: int, microbatches: int
) -> dict[str, int]:
    # since the last resumption there may be none
    share = size // max(microbatches, 1)
    return {
        "src": link[0],
        "dst": link[1],
        "bytes": size,
        "messages": messages,
        "bytes_per_microbatch": share,
    }
