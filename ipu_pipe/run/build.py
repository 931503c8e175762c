"""Build the run of a config: a job with a known length, learning rates as functions of the update,
and the stops at which it evaluates and saves.
"""

from __future__ import annotations

import contextlib
import numbers
from dataclasses import fields
from typing import Any, Mapping, Sequence

import torch
from torch import nn

from ipu_pipe.backends.ranks import read_torch_version
from ipu_pipe.config.schema import Config
from ipu_pipe.config.sections import OWN, Description, Given
from ipu_pipe.config.values import MOST_STOPS, MOST_UPDATES
from ipu_pipe.data import DataSource
from ipu_pipe.errors import BadInput, raise_faults
from ipu_pipe.job.factories import make_scheduler
from ipu_pipe.job.metrics import prefers_greater
from ipu_pipe.job.overrides import Overrides, describe, describe_optimizer
from ipu_pipe.job.record import Job, Length, PlannedJob
from ipu_pipe.job.user_code import attribute_faults
from ipu_pipe.model.loss import Loss, OwnLoss, get_plain_loss
from ipu_pipe.model.precision import get_uncast_loss
from ipu_pipe.model.restoring import record_modes
from ipu_pipe.pipeline.build import Rates, Resolved, assemble, name_microbatches, resolve, set_up
from ipu_pipe.schedule.methods import METHODS, Method, resolve_method
from ipu_pipe.text import describe_kind
from ipu_pipe.update.rates import get_present_rate, make_plateau, make_rate, simulate_scheduler


def build(
    config: Config,
    model: nn.Module | None = None,
    data: DataSource | None = None,
    loss: Loss | str | None = None,
    *,
    done: int = 0,
    by_shape: bool = False,
    **others: Any,
) -> PlannedJob:
    """Build the run that `config` describes, with its length and its stops; `model`, `data`, `loss`
    and `others` replace the config's entries as in `set_up`.

    `done`, `by_shape`: as in `set_up`. Raise `BadInput` if anything does not fit. Exceptions of the
    user's own code pass unchanged.
    """
    objects = Overrides(model, data, loss, **others)
    with attribute_faults(lambda: "before training"), contextlib.ExitStack() as undo:
        if model is not None:
            undo.callback(record_modes(model))
        setup = set_up(
            objects.describe_in(config), done=done, by_shape=by_shape, **objects._asdict()
        )
        undo.callback(setup.precision.give_back)
        # counted first: a run that is too long to be planned is refused before its model is cut
        resolved = resolve(setup, objects, count_updates(setup.config, setup.data))
        plan = _plan(resolved, objects, done)
        # only a run that is refused leaves the model as it was
        undo.pop_all()
    return plan


def _plan(resolved: Resolved, objects: Overrides, done: int) -> PlannedJob:
    """Return the plan of a resolved run of a config. Raise `BadInput` for its faults."""
    setup = resolved.setup
    config = setup.config
    # LocalSGD's replicas, by default one a stage, are known now
    length = count_updates(config, setup.data)
    rates = _make_rates(config, objects, resolved.full_optimizer, length)
    stops = list_stops(config, length, done)
    job = assemble(
        resolved,
        length,
        rates,
        # those are of the config's optimizer, which the given one replaces
        () if objects.optimizer is not None else config.optimizer_faults(),
        find_run_faults(
            config,
            resolved.method,
            len(resolved.placed.partition),
            length.per_epoch,
            [*stops, length.updates],
        ),
    )
    with name_microbatches():
        closed = job.close(length.updates, stops)
    loss = get_uncast_loss(get_plain_loss(setup.loss))
    return PlannedJob(
        # not by asdict, which would copy the model
        **{field.name: getattr(closed, field.name) for field in fields(Job)},
        rate=rates.rate,
        plateau=rates.plateau,
        advice=resolved.advice,
        done=done,
        used=Given(
            optimizer=describe_optimizer(resolved.full_optimizer),
            loss=Description(name=OWN) if isinstance(loss, OwnLoss) else describe(loss),
        ),
    )


# ---- the length of a run, and its stops


def count_updates(config: Config, data: DataSource) -> Length:
    """Return the length of a config's run; a batch has `gradient_accumulation` microbatches a
    replica.

    Raise `BadInput` if an epoch does not fill a batch, if settings count in epochs but the data
    have no length, or if the run has too many updates or stops to be planned.
    """
    rounds = resolve_method(config.method, config.method_settings()).rounds
    # LocalSGD's, by default one a stage, are not known at the first call
    replicas = config.replicas if rounds is None else rounds.replicas or 1
    microbatches = data.train_batches_per_epoch(config.micro_batch_size)
    evaluation = config.evaluate
    # an Integral may also be of NumPy
    if microbatches is not None and not isinstance(microbatches, numbers.Integral):
        why = "must be the microbatches of an epoch, or None"
        raise BadInput(
            f"data: train_batches_per_epoch: returned {describe_kind(microbatches)}: {why}"
        )
    milestones = config.lr_schedule.milestones
    total = config.lr_schedule.total_steps
    per_epoch = (
        None if microbatches is None else microbatches // (config.gradient_accumulation * replicas)
    )
    if per_epoch is None:
        warmup = config.method_args.warmup
        counts_epochs: dict[str, Any] = {
            "steps: null: must be the updates of the run": config.steps is None,
            f"lr_schedule.milestones: {milestones}: must be none (linear and cosine go by updates)": milestones,
            f"evaluate.every: {evaluation.every}: must be 1 or 0, after the last update, or with "
            f"evaluate.steps, in updates": evaluation.every not in (0, 1)
            and evaluation.steps is None,
            f"method_args.warmup: {warmup and warmup.epochs} epochs: must be none": warmup,
            f"method: {config.method}: draws delays by the epoch: must be another": METHODS[
                config.method
            ].history,
        }
        why = "the training data has no length, so that it has no epochs"
        raise_faults({f"{fault}: {why}": is_so for fault, is_so in counts_epochs.items()})
    elif per_epoch < 1:
        raise BadInput(
            f"data: {microbatches} microbatches an epoch do not fill one batch of "
            f"gradient_accumulation "
            f"{config.gradient_accumulation} x replicas {replicas}: lower them, micro_batch_size, "
            f"or take more data"
        )
    # without a length there are steps, or it has been refused
    updates = config.steps if config.steps is not None else config.epochs * (per_epoch or 0)
    planned = "a run is planned before it starts"
    faults: dict[str, Any] = {
        f"epochs: {config.epochs}: {updates} updates, at most {MOST_UPDATES}: {planned}": updates
        > MOST_UPDATES,
        f"lr_schedule.total_steps: {total}: must be at least the {updates} updates of the run": total
        and total < updates,
    }
    intervals = (
        ("checkpoint", config.checkpoint_every, config.checkpoint_every),
        ("evaluate", evaluation.every, evaluation.interval(per_epoch)),
    )
    for key, value, every in intervals:
        stops = updates // every if every else 0
        faults[
            f"{key}.every: {value}: {stops} times in {updates} updates, at most {MOST_STOPS}: "
            f"{planned}"
        ] = stops > MOST_STOPS
    raise_faults(faults)
    return Length(per_epoch, updates)


def list_stops(config: Config, length: Length, done: int) -> list[int]:
    """Return the updates after which the pipeline drains: evaluations and checkpoints before the
    end, and `done`, after which the run was resumed, possibly with other intervals.
    """
    # there the pipeline of the earlier start was empty
    marks: set[int] = {done} if 0 < done < length.updates else set()
    for every in (config.evaluate.interval(length.per_epoch), config.checkpoint_every):
        if every:
            marks.update(range(every, length.updates, every))
    return sorted(marks)


def find_run_faults(
    config: Config, method: Method, stages: int, per_epoch: int | None, stops: Sequence[int]
) -> list[str]:
    """List the keys of a run that its method or backend does not support, and the stops, where it
    evaluates, saves or ends, at which its replicas or blocks have a round unfinished.
    """
    rounds = method.rounds
    is_plateau = config.lr_schedule.name == "plateau"
    is_sharded = config.checkpoint is not None and config.checkpoint.format == "sharded"
    # every stop is a multiple of it
    interval = 1
    if rounds is not None and rounds.outer is not None:
        interval = rounds.interval(stages)
    unsynchronized = next((k for k in stops if k % interval), None)
    counts = config.method_settings().get("block_accumulation", ())
    every, unapplied = next(((n, k) for n in counts for k in stops if k % n), (0, 0))
    faults = {
        f"checkpoint.format: sharded: needs torch 2.4 or later, this is {torch.__version__}: must "
        f"be single": is_sharded and read_torch_version() < (2, 4),
        "lr_schedule.name: plateau: follows evaluations, and this run has no interval: set "
        "evaluate.every or evaluate.steps": is_plateau and not config.evaluate.interval(per_epoch),
        f"method_args.outer: an evaluation, a checkpoint or the end comes after {unsynchronized} "
        f"steps, it must come after a "
        f"multiple of {interval}, when replicas synchronize (evaluate.steps, evaluate.every, "
        f"checkpoint.every, steps)": unsynchronized is not None,
        f"method_args.block_accumulation: {every}: an evaluation or checkpoint comes after "
        f"{unapplied} updates, it "
        "must come after a multiple, when no gathered gradient is left (evaluate.every, "
        "checkpoint.every, steps)": every,
    }
    return [fault for fault, applies in faults.items() if applies]


# ---- learning rates


def _make_rates(
    config: Config, objects: Overrides, optimizer: torch.optim.Optimizer, length: Length
) -> Rates:
    """Make the learning rates that `lr_schedule` describes, from the rates of the optimizer's
    groups.
    """
    settings = config.lr_schedule
    updates = length.updates
    per_epoch = length.per_epoch
    per_call = config.updates_per_call
    # it must not be 0, because all rates are shares of it
    base = next((float(group["lr"]) for group in optimizer.param_groups if group["lr"]), 0.0)
    if settings.name == "plateau":
        mode = "max" if prefers_greater(settings.metric or "loss") else "min"
        # a mode of the user's wins
        plateau = make_plateau(base, {"mode": mode, **(settings.args or {})})
        # a factor, such as that of a warm-up: the rate itself is the plateau's
        share = make_rate(settings, 1.0, updates, per_epoch, per_call)
        # read anew in each update, since evaluations change it
        return Rates(base, lambda k: get_present_rate(plateau) * share(k), plateau)
    if not settings.is_played:
        return Rates(base, make_rate(settings, base, updates, per_epoch, per_call))
    if settings.interval == "epoch" and per_epoch is None:
        raise BadInput("lr_schedule.interval: epoch: the data have no epochs: must be update")
    every = per_epoch if settings.interval == "epoch" and per_epoch else 1
    make_torch_scheduler = objects.lr_scheduler or make_scheduler(config)
    scheduled = simulate_scheduler(
        make_torch_scheduler, optimizer, base, updates, every, len(config.optimizer.members)
    )
    # the updates of a call run on the device by themselves, all at the rate of the first
    played = [scheduled[k - k % per_call] for k in range(updates)]
    differ = any(len(set(rates)) > 1 for rates in played)

    def get_settings(k: int, group: Mapping[str, Any]) -> Mapping[str, Any]:
        # randomized methods may update one stage more often than the run has steps
        return {"lr": played[min(k, updates - 1)][group["member"]]}

    return Rates(
        base, lambda k: played[min(k, updates - 1)][0], None, get_settings if differ else None
    )
