"""Build a job: model, loss and data, stages, versions, optimizer and update rules, all checked before
anything trains.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any, Callable, Iterator, NamedTuple, Sequence

import torch
from torch import nn

from ipu_pipe.backends import world
from ipu_pipe.backends.processes.agreement import compare_models, compare_values
from ipu_pipe.backends.ranks import run_on_main
from ipu_pipe.backends.table import get_backend
from ipu_pipe.config.schema import Config
from ipu_pipe.config.sections import GIVEN
from ipu_pipe.data import DataSource
from ipu_pipe.data.loaders import LoaderData
from ipu_pipe.errors import BadInput, raise_faults
from ipu_pipe.files import parse_path
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
)
from ipu_pipe.job.metrics import make_metrics
from ipu_pipe.job.numerics import set_numerics
from ipu_pipe.job.overrides import Overrides, describe_given, describe_optimizer
from ipu_pipe.job.record import DTYPES, InitialWeights, Job, Length, Setup
from ipu_pipe.local.blocks import get_blocks, measure_footprint, observe_blocks, verify_losses
from ipu_pipe.model.batch import clone_tensors
from ipu_pipe.model.devices import seed_random
from ipu_pipe.model.loss import Loss, SumOfLosses, get_plain_loss
from ipu_pipe.model.meta import build_on_meta
from ipu_pipe.model.modes import enter_training
from ipu_pipe.model.observation import Observation
from ipu_pipe.model.precision import ModelPrecision
from ipu_pipe.model.randomness import RandomStates, derive_seed
from ipu_pipe.model.stages import Footprint, make_footprint
from ipu_pipe.pipeline.checks import check_model, check_modules, find_faults, require_device
from ipu_pipe.pipeline.optimizer import OptimizerHandle
from ipu_pipe.pipeline.sharding import PrepareStage, prepare_stages
from ipu_pipe.plan.config_cut import choose_stages
from ipu_pipe.refusals import NONE, Argument
from ipu_pipe.schedule.methods import Method, resolve_method
from ipu_pipe.schedule.timelines import OPEN, open_schedule
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
    require_device(config.backend.device)
    device = torch.device("meta" if by_shape else config.backend.device)
    # before the model is made, whose initial weights are drawn from these generators
    _set_process_state(config, device)
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
    # after loading, because each rank reads the file itself and may have another
    compare_values(model, plain_loss, replaces_weights=done > 0)
    # it may have class weights
    if isinstance(plain_loss, nn.Module):
        plain_loss.to(device)
    metrics = make_metrics(config.metrics if objects.metrics is None else objects.metrics)
    facts = config.backend.facts
    method = resolve_method(config.method, config.method_settings())
    precision_row = resolve_precision(config.precision, method)
    loss_weight = make_loss_weight(config, objects, loss_of_output)
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
        # known with the first output (`check_model`)
        label_range=None,
        came_evaluating=came_evaluating,
        loss_weight=loss_weight,
    )


def _set_process_state(config: Config, device: torch.device) -> None:
    """Set the numerics, the threads, the global random generators and that of `device` as the config
    says.
    """
    set_numerics(config.backend)
    if config.backend.threads:
        torch.set_num_threads(config.backend.threads)
    seed = derive_seed(config.seed, "model")
    seed_random(seed, device)
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
    # a number that was set counts, also if it is the default
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
        path = find_newest(parse_path(init_from.path, "path"))
        tensors = read_weights(path)
        left_out, new = load_weights(model, tensors, str(path), heads_too, init_from.strict)
    except BadInput as error:
        faults = [f"init_from: {fault}" for fault in error.faults]
        if tensors is not None:
            fits = any(
                name in state and state[name].shape == value.shape
                for name, value in tensors.items()
            )
            # one remedy for all of them, after the last
            faults[-1] += (
                "; init_from: {path: ..., strict: false} takes what fits"
                if fits
                else "; nothing in it fits"
            )
        raise BadInput(faults) from None
    return (
        None
        # all names fit, or the load has raised
        if init_from.strict
        else InitialWeights(str(path), len(state) - len(new), left_out, new)
    )


class Resolved(NamedTuple):
    """A run whose config is complete: `setup` has the model in its stages, and the config with what
    was left open.

    `placed`: the stages, and which of them are here. `example`: the first microbatch;
    `observation`: of a training pass of it. `switch`: the updates of the synchronous warm-up.
    `table`: the weight versions that passes read, by a schedule whose end is open. `optimizer`: of
    the stages that this process trains; `full_optimizer`: of all. `advice`: a line about the
    learning rate that the method advised; empty if the config has its own.
    """

    setup: Setup
    method: Method
    placed: Placed
    example: tuple[Any, Any]
    observation: Observation
    footprint: Footprint
    switch: int
    table: VersionTable
    optimizer: torch.optim.Optimizer
    full_optimizer: torch.optim.Optimizer
    advice: str


def resolve(
    setup: Setup,
    objects: Overrides,
    length: Length,
    handle: OptimizerHandle | None = None,
    prepare: PrepareStage | None = None,
) -> Resolved:
    """Divide the model into its stages, and complete the config: no config is replaced after this.

    `length`: in which the config counts epochs. `handle`: the optimizer of a caller's loop; None:
    the config's. `prepare`: shards the stages of this rank.
    """
    setup, placed, example, observation, footprint = _divide(setup)
    stage_count = len(placed.partition)
    method = _resolve_method(setup.config)
    # one replica per stage by default
    if method.rounds is not None and method.rounds.replicas is None:
        setup = replace(setup, config=setup.config.with_method_args(replicas=stage_count))
        method = _resolve_method(setup.config)
    config = setup.config
    if method.segments is not None:
        # raises if there are more segments than stages
        find_segment_ends(stage_count, method.segments)
    warmup = config.method_args.warmup
    # a loop counts its warm-up in updates
    switch = 0 if warmup is None else round(warmup.epochs * (length.per_epoch or 1))
    # replicas with weights of their own take turns in one schedule
    accumulate = (
        config.gradient_accumulation if method.rounds is None else method.rounds.replicas or 1
    )
    with name_microbatches():
        schedule = open_schedule(method, stage_count, accumulate, (), switch)
    table = VersionTable(schedule, method, config.seed)
    setup, advice = _fill_open_rates(setup, objects, table)
    config = setup.config
    if prepare is not None:
        assert handle is not None
        draws = observation.effects.draws
        prepare_stages(prepare, setup, method, placed, example[0], handle, draws)
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
        switch,
        table,
        optimizer,
        full_optimizer,
        advice,
    )


@contextlib.contextmanager
def name_microbatches() -> Iterator[None]:
    """Name the microbatches of an update in the faults of schedules, which call them accumulate."""
    try:
        yield
    except BadInput as error:
        raise BadInput(
            # only at the place of the fault, not in the text after it
            [line.replace("accumulate:", f"{Argument('microbatches')}:", 1) for line in error.lines]
        ) from None


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
        # a function that gives no weight is reported before the first update
        setup.weigh(first_batch, "update 0, microbatch 0")
    # clone, because a model that works in place must not change the data
    example = clone_tensors(setup.move_to_device(inputs, labels))
    observation = check_model(setup, example, labels)
    if config.leaves_stages_to_planner:
        processes = (
            world.count_devices(config.replicas) if config.backend.facts.uses_processes else None
        )
        # only on the main process, because each process would measure its own machine
        begins = run_on_main(
            lambda: choose_stages(config, method, setup.model, loss, example, processes)
        )
        # no begins: the plan is one stage
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
        # again, now that the model has heads
        observation = observe_blocks(model, loss, example)
        footprint = measure_footprint(model, partition, observation)
    if placed.pieces or method.structure is not None:
        # a loss may read a part of the model that is on another stage
        verify_losses(model, placed.pieces, loss, example, observation.effects.draws)
    if (
        isinstance(config.stages, dict)
        and config.stages.get("by") == "time"
        and partition.begins
        and not partition.spread
    ):
        # another measurement would cut elsewhere, and a resumed run needs the same cut
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
        # only their count matters: `choose_member` knows the group of each parameter
        members = [Member()] * handle.group_count
        choose_member = handle.choose_member
        handle.masters = setup.precision.masters
        # before the optimizer is made, whose groups get the settings by stage
        handle.set_delays(table.rule_lag().tolist())
    groups = make_groups(
        setup.model, placed.partition, config.optimizer.no_decay, members, choose_member
    )
    # master copies, where there are any, are stepped in place of the weights
    groups = replace_parameters(groups, setup.precision.get_trained)
    apply_settings_by_stage(config, groups, table.rule_lag().tolist())
    local_groups = _select_local_groups(groups, placed)
    factory = (
        make_factory(config) if objects.optimizer is None else make_factory_of(objects.optimizer)
    )
    optimizer = call_factory(factory, local_groups)
    # the same function has just returned an optimizer of such groups
    return optimizer, optimizer if local_groups is groups else factory(groups)


class Rates(NamedTuple):
    """The learning rates of a run before its update rules.

    `base`: the rate of which all others are shares, 0 if `settings` has each group's own; `rate(k)`:
    of update k; `plateau`: follows evaluations; `settings`: of each update and parameter group, if
    the groups' rates do not stay in proportion.
    """

    base: float
    rate: Callable[[int], float]
    plateau: torch.optim.lr_scheduler.ReduceLROnPlateau | None = None
    settings: GroupSettings | None = None


def assemble(
    resolved: Resolved,
    length: Length,
    rates: Rates,
    optimizer_faults: Sequence[str] = (),
    run_faults: Sequence[str] = (),
) -> Job:
    """Build the job from what is resolved, with learning rates and update rules. Raise `BadInput`
    with all conflicts.

    `optimizer_faults`: of the config's own optimizer, with its file; `run_faults`: other reasons to
    refuse the run.
    """
    setup = resolved.setup
    method = resolved.method
    config = setup.config
    chosen = choose_rules(
        _complete_rule_settings(config, length),
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
        schedule=resolved.table.schedule,
        table=resolved.table,
        full_optimizer=resolved.full_optimizer,
        optimizer=resolved.optimizer,
        rules=rules,
        base_rate=rates.base,
        updates_per_epoch=length.per_epoch,
        updates=length.updates,
        example=resolved.example,
        footprint=resolved.footprint,
        observation=resolved.observation,
        note=placed.note,
        pieces=placed.pieces,
        placement=tuple(placed.placement) or resolved.table.schedule.device_of_stage,
    )
    # at the end, where all is known, so that one attempt shows all conflicts
    raise_faults([*find_faults(job, optimizer_faults), *run_faults])
    job.note = job.note or get_backend(config).describe(job)
    # nothing can be refused any more, and the copies are as large as the model
    job.precision.forget_given_values()
    return job


def _complete_rule_settings(config: Config, length: Length) -> dict[str, Any]:
    """Return the settings of the method's rules. The learning-rate schedule gives T1's K by
    default.

    Raise `BadInput` if a run whose end is not known leaves K open.
    """
    args = config.method_settings()
    if "t1" not in args or args["t1"]["anneal_updates"] is not None:
        return args
    if length.updates == OPEN:
        raise BadInput(
            f"method_args.t1.anneal_updates: {NONE}: the run's end is not known: must be a number "
            "of updates"
        )
    lr_schedule = config.lr_schedule
    first_milestone = None
    if lr_schedule.milestones and length.per_epoch:
        first_milestone = round(min(lr_schedule.milestones) * length.per_epoch)
    updates = lr_schedule.total_steps or length.updates
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
