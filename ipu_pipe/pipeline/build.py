"""Build a job from a config: model, data, stages, schedule and version table of a run, all checked
before anything trains.
"""

from __future__ import annotations

import contextlib
import numbers
from dataclasses import replace
from pathlib import Path
from typing import Any, Callable, Mapping, NamedTuple

import torch
from torch import nn

from ipu_pipe.backends.processes.agreement import compare_models, compare_values
from ipu_pipe.backends.ranks import run_on_main
from ipu_pipe.backends.table import get_backend
from ipu_pipe.config.schema import Config
from ipu_pipe.config.sections import GIVEN, OWN, Description, Given
from ipu_pipe.config.values import MOST_STOPS, MOST_UPDATES
from ipu_pipe.data import DataSource
from ipu_pipe.data.loaders import LoaderData
from ipu_pipe.errors import BadInput, raise_faults
from ipu_pipe.hardware.precision import resolve_precision
from ipu_pipe.job.factories import (
    Placed,
    apply_settings_by_stage,
    explain_wrong_call,
    make_data,
    make_factory,
    make_loss,
    make_loss_weight,
    make_model,
    make_scheduler,
)
from ipu_pipe.job.metrics import make_metrics, prefers_greater
from ipu_pipe.job.numerics import set_numerics
from ipu_pipe.job.overrides import Overrides, describe, describe_given, describe_optimizer
from ipu_pipe.job.record import DTYPES, InitialWeights, Job, Setup, list_drains
from ipu_pipe.job.user_code import attribute_faults
from ipu_pipe.launcher import read_launch
from ipu_pipe.local.blocks import get_blocks, measure_footprint, observe_blocks, verify_losses
from ipu_pipe.model.batch import clone_tensors
from ipu_pipe.model.loss import Loss, OwnLoss, SumOfLosses, get_plain_loss
from ipu_pipe.model.meta import build_on_meta
from ipu_pipe.model.modes import enter_training
from ipu_pipe.model.observation import Observation
from ipu_pipe.model.precision import ModelPrecision, get_uncast_loss
from ipu_pipe.model.randomness import RandomStates, derive_seed
from ipu_pipe.model.restoring import record_modes
from ipu_pipe.model.stages import Footprint, make_footprint
from ipu_pipe.pipeline.checks import check_model, check_modules, find_faults
from ipu_pipe.pipeline.device_check import require_device, try_new_device
from ipu_pipe.pipeline.optimizer import OptimizerHandle
from ipu_pipe.plan.config_cut import choose_stages
from ipu_pipe.refusals import NONE, Argument
from ipu_pipe.schedule.methods import METHODS, Method, resolve_method
from ipu_pipe.schedule.timelines import OPEN, make_schedule, open_schedule
from ipu_pipe.schedule.versions import VersionTable, find_segment_ends
from ipu_pipe.store.checkpoint import find_newest, load_weights, read_weights
from ipu_pipe.text import describe_kind
from ipu_pipe.update.apply import GroupSettings, UpdateRules, choose_rules
from ipu_pipe.update.optimizer import (
    Groups,
    Member,
    call_factory,
    make_factory_of,
    make_groups,
    replace_parameters,
    select_parameters,
    select_stage,
)
from ipu_pipe.update.rates import (
    advise_rate,
    choose_anneal_updates,
    get_present_rate,
    make_plateau,
    make_rate,
    simulate_scheduler,
)


def set_up(
    config: Config,
    model: nn.Module | None = None,
    data: DataSource | None = None,
    loss: Loss | str | None = None,
    *,
    done: int = 0,
    by_shape: bool = False,
    **others: Any,
) -> Setup:
    """Make the model, loss, data and metrics that `config` describes, ready to run.

    `model`, `data`, `loss` and `others` (fields of `Overrides`) replace the config's entries.
    `done`: the updates of the checkpoint from which the run resumes. `by_shape`: model and
    microbatches are on the meta device (see `ipu_pipe.run.planning`).
    """
    objects = Overrides(model, data, loss, **others)
    objects.require_entries(config)
    kind = require_device(config.backend.device)
    if not by_shape:
        try_new_device(kind.name)
    _set_process_state(config)
    device = torch.device("meta" if by_shape else config.backend.device)
    if model is None:
        with build_on_meta() if by_shape else contextlib.nullcontext():
            model = make_model(config)
    data = make_data(config) if data is None else data
    _require_callable_source(data)
    config = config.model_copy(update={"micro_batch_size": choose_batch_size(config, data)})
    loss_of_output = make_loss(config, objects)
    plain_loss = get_plain_loss(loss_of_output)
    check_modules(model, plain_loss, device)
    # ranks that disagree would send tensors that the receiver does not expect
    compare_models(model)
    initial_weights = _load_initial_weights(model, config) if config.init_from else None
    compare_values(model, plain_loss, replaces_weights=done > 0)
    # it may have class weights
    if isinstance(plain_loss, nn.Module):
        plain_loss.to(device)
    metrics = make_metrics(config.metrics if objects.metrics is None else objects.metrics)
    facts = config.backend.facts
    method = resolve_method(config.method, config.method_settings())
    precision_row = resolve_precision(config.precision, method)
    came_evaluating = enter_training(model)
    # convert the model last, so that an earlier failure leaves the caller's model as it was
    precision = ModelPrecision(
        model, precision_row, DTYPES[precision_row], device, objects.model is not None
    )
    return Setup(
        config,
        model,
        precision.convert_loss(loss_of_output),
        data,
        device,
        precision,
        metrics,
        getattr(loss_of_output, "asks", ()),
        facts.trains_on or config.backend.device,
        facts.emulates,
        initial_weights,
        label_range=None,
        came_evaluating=came_evaluating,
        loss_weight=make_loss_weight(config, objects, loss_of_output),
    )


def _set_process_state(config: Config) -> None:
    """Set the numerics, the threads and all global random generators as the config says."""
    set_numerics(config.backend)
    if config.backend.threads:
        torch.set_num_threads(config.backend.threads)
    seed = derive_seed(config.seed, "model")
    torch.manual_seed(seed)
    # models and data sources may draw from Python's and numpy's generators too
    RandomStates.from_seed(seed).write()


def _require_callable_source(data: DataSource) -> None:
    """Raise `BadInput` if a method of the data source, or its validation set, cannot be called as a
    run calls it.
    """
    arguments = {
        "train_batch": ("epoch", "index", "batch_size"),
        "test_batches": ("batch_size",),
        "train_batches_per_epoch": ("batch_size",),
    }
    reasons = {
        name: explain_wrong_call(getattr(data, name), *names) for name, names in arguments.items()
    }
    raise_faults(
        [f"data: {type(data).__name__}.{name}: {why}" for name, why in reasons.items() if why]
    )
    validation = getattr(data, "validation", None)
    if validation is not None and not callable(getattr(validation, "test_batches", None)):
        why = "must be a DataSource, whose test set is the validation set"
        raise BadInput(f"data: validation: {describe_kind(validation)}: {why}")


def choose_batch_size(config: Config, data: DataSource) -> int:
    """Return the samples of a microbatch: the config's, or those of a loader's batches if the
    config does not set them.
    """
    if "micro_batch_size" in config.model_fields_set or not isinstance(data, LoaderData):
        return config.micro_batch_size
    return data.read_batch_size() or config.micro_batch_size


def _load_initial_weights(
    model: nn.Module, config: Config, heads_too: bool = True
) -> InitialWeights | None:
    """Load the weights of `init_from` into the model. Raise `BadInput` if they do not fit.

    Return which of them were loaded if not all need to fit (`strict: false`), else None.
    """
    init_from = config.init_from
    assert init_from is not None
    state = model.state_dict()
    tensors = None
    try:
        path = find_newest(Path(init_from.path))
        tensors = read_weights(path)
        left_out, new = load_weights(model, tensors, str(path), heads_too, init_from.strict)
    except BadInput as error:
        faults = [f"init_from: {fault}" for fault in error.faults]
        if tensors is not None:
            fits = any(
                name in state and state[name].shape == value.shape
                for name, value in tensors.items()
            )
            faults[-1] += (
                "; init_from: {path: ..., strict: false} takes what fits"
                if fits
                else "; nothing in it fits"
            )
        raise BadInput(faults) from None
    return (
        None
        if init_from.strict
        else InitialWeights(str(path), len(state) - len(new), left_out, new)
    )


def build(
    config: Config,
    model: nn.Module | None = None,
    data: DataSource | None = None,
    loss: Loss | str | None = None,
    *,
    done: int = 0,
    by_shape: bool = False,
    **others: Any,
) -> Job:
    """Build the job that `config` describes; `model`, `data`, `loss` and `others` replace the
    config's entries as in `set_up`.

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
        job = assemble(resolve(setup, objects, done), objects, done)
        # only a run that is refused leaves the model as it was
        undo.pop_all()
    return job


class Resolved(NamedTuple):
    """A run whose config is complete: `setup` has the model in its stages, and the config with what
    was left open.

    `placed`: the stages, and which of them are here. `example`: the first microbatch;
    `observation`: of a training pass of it. `per_epoch`, `updates`: the updates of an epoch (None
    if the data has no length) and of the run. `switch`: the updates of the synchronous warm-up.
    `table`: the schedule and the weight versions that its passes read. `optimizer`: of the stages
    that this process trains; `full_optimizer`: of all. `advice`: a line about the learning rate that
    the method advised; empty if the config has its own.
    """

    setup: Setup
    method: Method
    placed: Placed
    example: tuple[Any, Any]
    observation: Observation
    footprint: Footprint
    per_epoch: int | None
    updates: int
    switch: int
    table: VersionTable
    optimizer: torch.optim.Optimizer
    full_optimizer: torch.optim.Optimizer
    advice: str


def resolve(
    setup: Setup, objects: Overrides, done: int = 0, handle: OptimizerHandle | None = None
) -> Resolved:
    """Divide the model into its stages, and complete the config: no config is replaced after this.

    `handle`: the optimizer of a loop of the caller's own, whose end and rates are not known ahead;
    None for a run that is planned. A loop counts its warm-up in updates.
    """
    per_epoch, updates = _count_updates(setup) if handle is None else (None, OPEN)
    setup, placed, example, observation, footprint = _divide(setup)
    stage_count = len(placed.partition)
    method = _resolve_method(setup.config)
    # one replica per stage by default
    if method.rounds is not None and method.rounds.replicas is None:
        setup = replace(setup, config=setup.config.with_method_args(replicas=stage_count))
        method = _resolve_method(setup.config)
        if handle is None:
            per_epoch, updates = _count_updates(setup)
    config = setup.config
    if method.segments is not None:
        # raises if there are more segments than stages
        find_segment_ends(stage_count, method.segments)
    warmup = config.method_args.warmup
    switch = 0
    if warmup is not None:
        switch = round(warmup.epochs * (per_epoch or 0 if handle is None else 1))
    # replicas with weights of their own take turns in one schedule
    accumulate = (
        config.gradient_accumulation if method.rounds is None else method.rounds.replicas or 1
    )
    try:
        if handle is not None:
            schedule = open_schedule(method, stage_count, accumulate, (), switch)
        else:
            drains = [k * accumulate for k in list_drains(config, updates, per_epoch, done)]
            microbatches = updates * accumulate
            schedule = make_schedule(
                method, stage_count, microbatches, accumulate, drains, switch * accumulate
            )
    # schedules call the config's gradient_accumulation `accumulate`
    except BadInput as error:
        raise BadInput(
            [line.replace("accumulate:", f"{Argument('microbatches')}:", 1) for line in error.lines]
        ) from None
    table = VersionTable(schedule, method, config.seed)
    setup, advice = _fill_open_rates(setup, objects, table)
    config = setup.config
    optimizer, full_optimizer = _make_optimizers(setup, objects, placed, table, handle)
    if objects.optimizer is not None:
        described = describe_given(config, {"optimizer": describe_optimizer(full_optimizer)})
        setup = replace(setup, config=described)
    return Resolved(
        setup,
        method,
        placed,
        example,
        observation,
        footprint,
        per_epoch,
        updates,
        switch,
        table,
        optimizer,
        full_optimizer,
        advice,
    )


def _fill_open_rates(setup: Setup, objects: Overrides, table: VersionTable) -> tuple[Setup, str]:
    """Set the learning rates that the config leaves to the method; return a line about them.

    The delays of methods that update single stages count all stages' updates, of which a stage makes
    one in P.
    """
    optimizer = setup.config.optimizer
    # an optimizer from Python has a rate of its own
    if not optimizer.leaves_rate_open or optimizer.name == GIVEN:
        return setup, ""
    lags = table.rule_lag() / (len(table.rule_lag()) if table.method.history is not None else 1)
    # an optimizer from Python has a rate of its own, and its config the same one under each method
    is_given = objects.optimizer is not None
    delay = 0.0 if is_given else float(lags.max())
    rate = advise_rate(delay)
    rates = [rate] * len(optimizer.members)
    config = setup.config.model_copy(update={"optimizer": optimizer.fill_rates(rates)})
    line = (
        f"optimizer.lr: {rate:g}, advised for {table.method.name} (greatest delay {delay:g} "
        f"updates); --set optimizer.lr=X sets another"
    )
    return replace(setup, config=config), "" if is_given else line


def _resolve_method(config: Config) -> Method:
    return resolve_method(config.method, config.method_settings())


def _divide(setup: Setup) -> tuple[Setup, Placed, tuple[Any, Any], Observation, Footprint]:
    """Divide the model into its stages, after a training pass of the first microbatch.

    Return the setup with that model, its loss and the config of the stages; the stages; the
    microbatch and the observation of the pass; and the stages' costs.
    """
    config = setup.config
    loss = setup.loss
    method = _resolve_method(config)
    first_batch = setup.data.train_batch(0, 0, config.micro_batch_size)
    inputs, labels = setup.split_batch(first_batch)
    if setup.loss_weight is not None and setup.device.type != "meta":
        setup.weigh(first_batch, "update 0, microbatch 0")
    # clone, because a model that works in place must not change the data
    example = clone_tensors(setup.move_to_device(inputs, labels))
    observation = check_model(setup, example, labels)
    if config.leaves_stages_to_planner:
        processes = (
            read_launch().world // config.replicas if config.backend.facts.uses_processes else None
        )
        # only on the main process, because each process would measure its own machine
        begins = run_on_main(
            lambda: choose_stages(config, method, setup.model, loss, example, processes)
        )
        config = config.model_copy(update={"stages": begins or 1})
    placed = get_backend(config).place(config, method, setup.model, example[0])
    model = placed.model
    partition = placed.partition
    if method.structure is None:
        footprint = make_footprint(model, partition, observation)
    else:
        # load again, now that the model has heads, which may be among the weights
        if config.init_from:
            _load_initial_weights(model, config, heads_too=False)
        # one block per process by default
        if method.structure.blocks is not None and config.method_args.blocks is None:
            config = config.with_method_args(blocks=len(partition))
        loss = SumOfLosses(loss)
        observation = observe_blocks(model, loss, example)
        footprint = measure_footprint(model, partition, observation)
    if placed.pieces or method.structure is not None:
        verify_losses(model, placed.pieces, loss, example, observation.effects.draws)
    if (
        isinstance(config.stages, dict)
        and config.stages.get("by") == "time"
        and partition.begins
        and not partition.spread
    ):
        config = config.model_copy(update={"stages": list(partition.begins)})
    return (
        replace(setup, config=config, model=model, loss=loss),
        placed,
        example,
        observation,
        footprint,
    )


def _make_optimizers(
    setup: Setup,
    objects: Overrides,
    placed: Placed,
    table: VersionTable,
    handle: OptimizerHandle | None,
) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    """Make the optimizer of the stages of this process, and that of all stages, which may be the
    same.
    """
    config = setup.config
    members = [Member(one.match, one.ndim) for one in config.optimizer.groups] or [Member()]
    choose_member = None
    if handle is not None:
        members = [Member()] * handle.group_count
        choose_member = handle.choose_member
        handle.set_delays(table.rule_lag().tolist())
    groups = make_groups(
        setup.model, placed.partition, config.optimizer.no_decay, members, choose_member
    )
    groups = replace_parameters(groups, setup.precision.get_trained)
    apply_settings_by_stage(config, groups, table.rule_lag().tolist())
    local_groups = _select_local_groups(groups, placed)
    factory = (
        make_factory(config) if objects.optimizer is None else make_factory_of(objects.optimizer)
    )
    optimizer = call_factory(factory, local_groups)
    return optimizer, optimizer if local_groups is groups else factory(groups)


def assemble(
    resolved: Resolved, objects: Overrides, done: int = 0, handle: OptimizerHandle | None = None
) -> Job:
    """Build the job from what is resolved, with learning rates and update rules. Raise `BadInput`
    if they conflict.
    """
    setup = resolved.setup
    method = resolved.method
    full_optimizer = resolved.full_optimizer
    config = setup.config
    schedule = resolved.table.schedule
    if handle is None:
        rates = _make_rates(config, objects, full_optimizer, resolved.updates, resolved.per_epoch)
    else:
        first_group = full_optimizer.param_groups[0]
        settings = handle.get_settings
        rates = _Rates(0.0, lambda k: float(settings(k, first_group)["lr"]), None, settings)
    chosen = choose_rules(
        _complete_rule_settings(resolved),
        method,
        resolved.table.rule_lag(),
        config.gradient_accumulation,
    )
    rules = UpdateRules(
        chosen,
        resolved.optimizer,
        rates.rate,
        resolved.switch,
        setup.precision.masters,
        rates.base,
        None if config.ema is None else config.ema.decay,
        rates.settings,
    )
    placed = resolved.placed
    job = Job(
        **vars(setup),
        partition=placed.partition,
        method=method,
        schedule=schedule,
        table=resolved.table,
        full_optimizer=full_optimizer,
        optimizer=resolved.optimizer,
        rules=rules,
        base_rate=rates.base,
        rate=rates.rate,
        plateau=rates.plateau,
        updates_per_epoch=resolved.per_epoch,
        updates=resolved.updates,
        example=resolved.example,
        footprint=resolved.footprint,
        observation=resolved.observation,
        note=placed.note,
        advice=resolved.advice,
        done=done,
        used=Given(optimizer=describe_optimizer(full_optimizer), loss=_describe_loss(setup.loss)),
        pieces=placed.pieces,
        placement=tuple(placed.placement) or schedule.device_of_stage,
    )
    # randomized methods count a stage's own updates, not the batches of the settings
    if handle is not None and method.history is None:
        job.compared = handle.compared
    raise_faults(
        find_faults(job, () if objects.optimizer is not None else config.optimizer_faults())
    )
    job.note = job.note or get_backend(config).describe(job)
    job.precision.forget_given_values()
    return job


def _describe_loss(loss: Loss) -> Description:
    """Return the description of the user's loss for the run's record."""
    plain_loss = get_uncast_loss(get_plain_loss(loss))
    return Description(name=OWN) if isinstance(plain_loss, OwnLoss) else describe(plain_loss)


def _complete_rule_settings(resolved: Resolved) -> dict[str, Any]:
    """Return the settings of the method's rules. The learning-rate schedule gives T1's K by
    default.

    Raise `BadInput` if a run whose end is not known leaves K open.
    """
    config = resolved.setup.config
    args = config.method_settings()
    if "t1" not in args or args["t1"]["anneal_updates"] is not None:
        return args
    if resolved.updates == OPEN:
        raise BadInput(
            f"method_args.t1.anneal_updates: {NONE}: the run's end is not known: must be a number "
            "of updates"
        )
    lr_schedule = config.lr_schedule
    first_milestone = None
    if lr_schedule.milestones and resolved.per_epoch:
        first_milestone = round(min(lr_schedule.milestones) * resolved.per_epoch)
    updates = lr_schedule.total_steps or resolved.updates
    anneal = choose_anneal_updates(first_milestone, lr_schedule.warmup_steps, updates)
    return {**args, "t1": {"anneal_updates": anneal}}


def _select_local_groups(groups: Groups, placed: Placed) -> Groups:
    """Return the parameter groups of the stages of this process; `groups` itself if all stages are
    here.
    """
    if placed.local_stages is None:
        return groups
    local_groups = [group for stage in placed.local_stages for group in select_stage(groups, stage)]
    first = placed.local_stages[0]
    blocks = get_blocks(placed.model) if first else None
    # an overlapping block has a duplicate of the previous stage's layers
    if blocks is not None and blocks.overlap:
        shared = {id(p) for p in blocks.pieces[first - 1].parameters()}
        local_groups += select_parameters(select_stage(groups, first - 1), shared)
    return local_groups


class _Rates(NamedTuple):
    """The learning rates of a run before its update rules.

    `base`: the rate of which all others are shares; `rate(k)`: of update k; `plateau`: follows
    evaluations; `settings`: of each update and parameter group, if the groups' rates do not stay in
    proportion.
    """

    base: float
    rate: Callable[[int], float]
    plateau: torch.optim.lr_scheduler.ReduceLROnPlateau | None = None
    settings: GroupSettings | None = None


def _make_rates(
    config: Config,
    objects: Overrides,
    optimizer: torch.optim.Optimizer,
    updates: int,
    per_epoch: int | None,
) -> _Rates:
    """Make the learning rates that `lr_schedule` describes, from the rates of the optimizer's
    groups.
    """
    settings = config.lr_schedule
    per_call = config.updates_per_call
    # it must not be 0, because all rates are shares of it
    base = next((float(group["lr"]) for group in optimizer.param_groups if group["lr"]), 0.0)
    if settings.name == "plateau":
        mode = "max" if prefers_greater(settings.metric or "loss") else "min"
        plateau = make_plateau(base, {"mode": mode, **(settings.args or {})})
        share = make_rate(settings, 1.0, updates, per_epoch, per_call)
        return _Rates(base, lambda k: get_present_rate(plateau) * share(k), plateau)
    if not settings.is_played:
        return _Rates(base, make_rate(settings, base, updates, per_epoch, per_call))
    if settings.interval == "epoch" and per_epoch is None:
        raise BadInput("lr_schedule.interval: epoch: the data have no epochs: must be update")
    every = per_epoch if settings.interval == "epoch" and per_epoch else 1
    make_torch_scheduler = objects.lr_scheduler or make_scheduler(config)
    scheduled = simulate_scheduler(
        make_torch_scheduler, optimizer, base, updates, every, len(config.optimizer.members)
    )
    played = [scheduled[k - k % per_call] for k in range(updates)]
    differ = any(len(set(rates)) > 1 for rates in played)

    def get_settings(k: int, group: Mapping[str, Any]) -> Mapping[str, Any]:
        # randomized methods may update one stage more often than the run has steps
        return {"lr": played[min(k, updates - 1)][group["member"]]}

    return _Rates(
        base, lambda k: played[min(k, updates - 1)][0], None, get_settings if differ else None
    )


def _count_updates(setup: Setup) -> tuple[int | None, int]:
    """Return (updates of an epoch or None, updates of the run); a batch has `gradient_accumulation`
    microbatches a replica.

    Raise `BadInput` if an epoch does not fill a batch, if settings count in epochs but the data
    have no length, or if the run has too many updates or stops to be planned.
    """
    config = setup.config
    rounds = _resolve_method(setup.config).rounds
    replicas = config.replicas if rounds is None else rounds.replicas or 1
    microbatches = setup.data.train_batches_per_epoch(config.micro_batch_size)
    evaluation = config.evaluate
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
    return per_epoch, updates
