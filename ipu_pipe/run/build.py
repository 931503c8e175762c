"""Build the run of a config: a job with a known length, learning rates as functions of the update,
and the stops at which it evaluates and saves.
"""

from __future__ import annotations

import contextlib
import numbers
from typing import Any, Callable, Mapping, Sequence

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
from ipu_pipe.job.overrides import Overrides, describe, describe_given, describe_optimizer
from ipu_pipe.job.record import Job, Length, PlannedJob, RunSetup, Setup, get_fields
from ipu_pipe.job.user_code import attribute_faults
from ipu_pipe.model.loss import Loss, OwnLoss, get_plain_loss
from ipu_pipe.model.precision import get_uncast_loss
from ipu_pipe.model.restoring import record_modes
from ipu_pipe.pipeline.build import Rates, Terms, build_job, name_microbatches
from ipu_pipe.run.setup import ConfigClient
from ipu_pipe.schedule.methods import METHODS, Method, resolve_method
from ipu_pipe.text import describe_kind
from ipu_pipe.update.rates import (
    choose_anneal_updates,
    get_present_rate,
    make_plateau,
    make_rate,
    simulate_scheduler,
)

# which decide when a run stops
STOP_KEYS = "evaluate.steps, evaluate.every, checkpoint.every, steps, epochs"


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
        client = RunClient(objects.describe_in(config), objects, done, by_shape)
        setup = client.set_up()
        undo.callback(setup.precision.give_back)
        # counted first: a run that is too long to be planned is refused before its model is cut
        client.updates_per_epoch = count_updates(
            client.complete(setup).config, setup.data
        ).per_epoch
        plan = client.plan(build_job(setup, client))
        # only a run that is refused leaves the model as it was
        undo.pop_all()
    return plan


class RunClient(ConfigClient):
    """The run of a config with its length and its stops."""

    def __init__(self, config: Config, objects: Overrides, done: int, by_shape: bool) -> None:
        super().__init__(config, objects, done, by_shape)
        self._done = done
        self._stops: Sequence[int] = ()
        self._rate: Callable[[int], float] = lambda k: 0.0

    def make_terms(
        self, setup: Setup, method: Method, stages: int, optimizer: torch.optim.Optimizer
    ) -> Terms:
        """Return the length and the learning rates of the run, and its faults."""
        is_given = self._objects.optimizer is not None
        if is_given:
            described = describe_given(self._config, {"optimizer": describe_optimizer(optimizer)})
            self.changes["given"] = described.given
        config = self.complete(setup).config
        # LocalSGD's replicas, by default one a stage, are known now
        length = count_updates(config, setup.data)
        rates = _make_rates(config, self._objects, optimizer, length)
        self._rate = rates.rate
        self._stops = list_stops(config, length, self._done)
        ends = [*self._stops, length.updates]
        trace = config.log.trace
        accumulate = config.gradient_accumulation
        return Terms(
            rates,
            length,
            _choose_anneal_updates(config, length),
            # those are of the config's optimizer, which the given one replaces
            () if is_given else config.optimizer_faults(),
            find_run_faults(config, method, stages, length.per_epoch, ends),
            {
                "traced_updates": range(0) if trace is None else trace.updates(accumulate),
                "compiles_modules": config.model.compile,
                "saves_shards": config.checkpoint is not None
                and config.checkpoint.format == "sharded",
            },
        )

    def plan(self, job: Job) -> PlannedJob:
        """Return the run of the job."""
        with name_microbatches():
            closed = job.close(job.updates, self._stops)
        loss = get_uncast_loss(get_plain_loss(job.loss))
        setup = self.complete(job)
        return PlannedJob(
            # not by asdict, which would copy the model
            **{**get_fields(closed, Job), **get_fields(setup, RunSetup)},
            rate=self._rate,
            advice=self.advice,
            done=self._done,
            used=Given(
                optimizer=describe_optimizer(job.full_optimizer),
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
    faults = {
        f"checkpoint.format: sharded: needs torch 2.4 or later, this is {torch.__version__}: must "
        f"be single": is_sharded and read_torch_version() < (2, 4),
        "lr_schedule.name: plateau: follows evaluations, and this run has no interval: set "
        "evaluate.every or evaluate.steps": is_plateau and not config.evaluate.interval(per_epoch),
    }
    # of (key, the number of which every stop must be a multiple, why)
    rows = [
        (f"method_args.block_accumulation: {count}", count, "when no gathered gradient is left")
        for count in config.method_settings().get("block_accumulation", ())
    ]
    calls = config.updates_per_call
    rows.append((f"backend.ipu.device_iterations: {calls}", calls, "the updates of a call"))
    if rounds is not None and rounds.outer is not None:
        interval = rounds.interval(stages)
        rows.append(("method_args.outer", interval, "when replicas synchronize"))
    for key, every, why in rows:
        early = next((k for k in stops if k % every), None)
        where = f"{key}: an evaluation, a checkpoint or the end comes after {early} updates"
        remedy = f"must come after a multiple of {every}, {why} ({STOP_KEYS})"
        faults[f"{where}: {remedy}"] = early is not None
    return [fault for fault, applies in faults.items() if applies]


# ---- learning rates


def _choose_anneal_updates(config: Config, length: Length) -> int:
    """Return T1's K by default, from the learning-rate schedule."""
    lr_schedule = config.lr_schedule
    first_milestone = None
    if lr_schedule.milestones and length.per_epoch:
        first_milestone = round(min(lr_schedule.milestones) * length.per_epoch)
    updates = lr_schedule.total_steps or length.updates
    return choose_anneal_updates(first_milestone, lr_schedule.warmup_steps, updates)


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
