"""Build a job: model, loss and data, stages, versions, optimizer and update rules, all checked before
anything trains.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any, Callable, Collection, Iterator, Mapping, NamedTuple, Sequence

import torch
from torch import nn

from ipu_pipe.backends import world
from ipu_pipe.backends.processes.agreement import compare_models, compare_values
from ipu_pipe.backends.ranks import run_on_main
from ipu_pipe.backends.table import get_backend
from ipu_pipe.config.schema import PipelineConfig
from ipu_pipe.data import DataSource
from ipu_pipe.errors import BadInput, raise_faults
from ipu_pipe.hardware.precision import resolve_precision
from ipu_pipe.job.factories import (
    Placed,
)
from ipu_pipe.job.numerics import set_numerics
from ipu_pipe.job.overrides import qualify
from ipu_pipe.job.record import DTYPES, ComparedSettings, Job, Length, Setup, get_fields
from ipu_pipe.local.blocks import get_blocks, measure_footprint, observe_blocks, verify_losses
from ipu_pipe.model.batch import clone_tensors
from ipu_pipe.model.devices import seed_random
from ipu_pipe.model.loss import (
    Loss,
    LossOfOutput,
    LossWeight,
    OwnLoss,
    SumOfLosses,
    TakePart,
    get_plain_loss,
)
from ipu_pipe.model.modes import enter_training
from ipu_pipe.model.observation import Observation
from ipu_pipe.model.precision import ModelPrecision
from ipu_pipe.model.randomness import RandomStates, derive_seed
from ipu_pipe.model.stages import Footprint, make_footprint
from ipu_pipe.pipeline.checks import check_model, check_modules, find_faults
from ipu_pipe.pipeline.optimizer import OptimizerHandle
from ipu_pipe.pipeline.sharding import PrepareStage, prepare_stages
from ipu_pipe.plan.config_cut import choose_stages
from ipu_pipe.refusals import NONE, OWN_LOSS, Argument
from ipu_pipe.schedule.methods import Method, resolve_method
from ipu_pipe.schedule.timelines import open_schedule
from ipu_pipe.schedule.versions import VersionTable, find_segment_ends
from ipu_pipe.update.apply import GroupSettings, UpdateRules, choose_rules
from ipu_pipe.update.optimizer import (
    Groups,
    Member,
    OptimizerFactory,
    call_factory,
    count_most_moments,
    make_factory_of,
    make_groups,
    replace_parameters,
    select_parameters,
    select_stage,
)


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


class Terms(NamedTuple):
    """What a client says of a pipeline whose model is divided.

    `anneal_updates`: T1's K, where the config leaves it open. `optimizer_faults`: of the config's
    own optimizer, with its file; `faults`: other reasons to refuse the run. `fields`: further ones
    of the job.
    """

    rates: Rates
    length: Length = Length()
    anneal_updates: int | None = None
    optimizer_faults: Sequence[str] = ()
    faults: Sequence[str] = ()
    fields: Mapping[str, Any] = {}


class Client:
    """Whoever has a pipeline built: a caller's loop, or the run of a config. `make_setup` and
    `build_job` call its methods, in this order.

    `is_given`: the model is the caller's. `replaces_weights`: a checkpoint will be loaded, so that
    ranks may differ in them. `updates_per_epoch`: in which the config counts; None: in updates.
    """

    is_given = True
    replaces_weights = False
    updates_per_epoch: int | None = None

    def load_weights(self, model: nn.Module) -> None:
        """Load the initial weights, if they are not the model's own."""

    def try_out(self, setup: Setup) -> None:
        """Try what will be asked of the model besides training, once a training pass has worked."""

    def count_moments(self) -> int:
        """Return the tensors of a weight's shape that the optimizer keeps, for predictions."""
        raise NotImplementedError

    def load_heads(self, model: nn.Module) -> None:
        """Load initial weights of heads, which the method has added by now."""

    def prepare(
        self, setup: Setup, method: Method, placed: Placed, x: Any, draws: Collection[str]
    ) -> None:
        """Change the stages that are here, of which `x` is an input and `draws` the modules that
        draw random numbers.
        """

    def group(
        self, setup: Setup, placed: Placed, table: VersionTable
    ) -> tuple[Groups, OptimizerFactory]:
        """Return the parameter groups of all stages, with their settings, and the optimizer as a
        function of groups.
        """
        raise NotImplementedError

    def make_terms(
        self, setup: Setup, method: Method, stages: int, optimizer: torch.optim.Optimizer
    ) -> Terms:
        """Return the terms of the pipeline, whose `optimizer` has the groups of all stages."""
        raise NotImplementedError


class LoopClient(Client):
    """A caller's loop, whose optimizer is in `handle`. `prepare_stage`: shards the stages of this
    rank, or None. `traced`: the updates whose events are recorded.
    """

    def __init__(
        self, handle: OptimizerHandle, prepare_stage: PrepareStage | None, traced: range
    ) -> None:
        self._handle = handle
        self._prepare_stage = prepare_stage
        self._traced = traced

    def count_moments(self) -> int:
        """Return those of the caller's optimizer."""
        return count_most_moments(self._handle.optimizer)

    def prepare(
        self, setup: Setup, method: Method, placed: Placed, x: Any, draws: Collection[str]
    ) -> None:
        """Shard the stages."""
        if self._prepare_stage is not None:
            prepare_stages(self._prepare_stage, setup, method, placed, x, self._handle, draws)

    def group(
        self, setup: Setup, placed: Placed, table: VersionTable
    ) -> tuple[Groups, OptimizerFactory]:
        """Return the caller's groups, divided by stage, and copies of the optimizer for groups."""
        handle = self._handle
        handle.masters = setup.precision.masters
        # before the optimizer is made, whose groups get the settings by stage
        handle.set_delays(table.rule_lag().tolist())
        # only their count matters: `choose_member` knows the group of each parameter
        members = [Member()] * handle.group_count
        groups = make_groups(
            setup.model, placed.partition, (), members, choose_member=handle.choose_member
        )
        # a function of groups: the caller's own optimizer never steps
        return groups, make_factory_of(handle.copy_for)

    def make_terms(
        self, setup: Setup, method: Method, stages: int, optimizer: torch.optim.Optimizer
    ) -> Terms:
        """Return the rates of an optimizer whose groups have the settings of the caller's at each
        step.
        """
        settings = self._handle.get_settings
        first_group = optimizer.param_groups[0]
        rates = Rates(0.0, lambda k: float(settings(k, first_group)["lr"]), None, settings)
        # randomized methods count a stage's own updates, not the batches of the settings
        compared = self._handle.compared if method.history is None else ComparedSettings()
        return Terms(rates, fields={"traced_updates": self._traced, "compared": compared})


def make_setup(
    config: PipelineConfig,
    model: nn.Module,
    data: DataSource,
    loss: Loss,
    loss_weight: LossWeight | None,
    device: torch.device,
    client: Client,
) -> Setup:
    """Check model and loss, and bring them to the device and in the precision of `config`."""
    plain_loss = get_plain_loss(loss)
    check_modules(model, plain_loss, device)
    # ranks that disagree would send tensors that the receiver does not expect
    compare_models(model)
    client.load_weights(model)
    # after loading, because each rank reads the file itself and may have another
    compare_values(model, plain_loss, replaces_weights=client.replaces_weights)
    # it may have class weights
    if isinstance(plain_loss, nn.Module):
        plain_loss.to(device)
    facts = config.backend.facts
    precision_row = resolve_precision(config.precision, _resolve_method(config))
    came_evaluating = enter_training(model)
    # convert the model last, so that an earlier failure leaves the caller's model as it was
    precision = ModelPrecision(model, precision_row, DTYPES[precision_row], device, client.is_given)
    return Setup(
        config,
        model,
        precision.convert_loss(loss),
        data,
        device,
        precision,
        getattr(loss, "asks", ()),
        facts.trains_on or config.backend.device,
        facts.emulates,
        # known with the first output (`check_model`)
        label_range=None,
        came_evaluating=came_evaluating,
        loss_weight=loss_weight,
    )


def set_process_state(config: PipelineConfig, device: torch.device) -> None:
    """Set the numerics, the threads, the global random generators and that of `device` as the config
    says. A model that is made afterwards draws its weights from them.
    """
    set_numerics(config.backend)
    if config.backend.threads:
        torch.set_num_threads(config.backend.threads)
    seed = derive_seed(config.seed, "model")
    seed_random(seed, device)
    # models and data sources may draw from Python's and numpy's generators too
    RandomStates.from_seed(seed).write()


def build_job(setup: Setup, client: Client) -> Job:
    """Divide the model into its stages, and make its optimizer and update rules. Raise `BadInput`
    with all conflicts.
    """
    setup, placed, example, observation, footprint = _divide(setup, client)
    config = setup.config
    method = _resolve_method(config)
    table, switch = _plan_versions(config, method, len(placed.partition), client.updates_per_epoch)
    client.prepare(setup, method, placed, example[0], observation.effects.draws)
    optimizer, full_optimizer = _make_optimizers(setup, client, placed, table)
    terms = client.make_terms(setup, method, len(placed.partition), full_optimizer)
    rates = terms.rates
    settings = config.method_settings()
    if "t1" in settings and settings["t1"]["anneal_updates"] is None:
        if terms.anneal_updates is None:
            raise BadInput(
                f"method_args.t1.anneal_updates: {NONE}: the run's end is not known: must be a "
                f"number of updates"
            )
        settings = {**settings, "t1": {"anneal_updates": terms.anneal_updates}}
    rules = UpdateRules(
        choose_rules(settings, method, table.rule_lag(), config.gradient_accumulation),
        optimizer,
        rates.rate,
        switch,
        setup.precision.masters,
        rates.base,
        None if config.ema is None else config.ema.decay,
        rates.settings,
    )
    job = Job(
        **get_fields(setup, Setup),
        partition=placed.partition,
        method=method,
        schedule=table.schedule,
        table=table,
        full_optimizer=full_optimizer,
        optimizer=optimizer,
        rules=rules,
        base_rate=rates.base,
        updates_per_epoch=terms.length.per_epoch,
        updates=terms.length.updates,
        example=example,
        footprint=footprint,
        observation=observation,
        note=placed.note,
        pieces=placed.pieces,
        placement=tuple(placed.placement) or table.schedule.device_of_stage,
        plateau=rates.plateau,
        **terms.fields,
    )
    # at the end, where all is known, so that one attempt shows all conflicts
    raise_faults([*find_faults(job, terms.optimizer_faults), *terms.faults])
    job.note = job.note or get_backend(config).describe(job)
    # nothing can be refused any more, and the copies are as large as the model
    job.precision.forget_given_values()
    return job


def _plan_versions(
    config: PipelineConfig, method: Method, stages: int, updates_per_epoch: int | None
) -> tuple[VersionTable, int]:
    """Return the weight versions that passes read, by a schedule whose end is open, and the updates
    of the synchronous warm-up.
    """
    if method.segments is not None:
        # raises if there are more segments than stages
        find_segment_ends(stages, method.segments)
    warmup = config.method_args.warmup
    # a loop counts its warm-up in updates
    switch = 0 if warmup is None else round(warmup.epochs * (updates_per_epoch or 1))
    # replicas with weights of their own take turns in one schedule
    accumulate = (
        config.gradient_accumulation if method.rounds is None else method.rounds.replicas or 1
    )
    with name_microbatches():
        schedule = open_schedule(method, stages, accumulate, (), switch)
    return VersionTable(schedule, method, config.seed), switch


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


def _resolve_method(config: PipelineConfig) -> Method:
    return resolve_method(config.method, config.method_settings())


def _divide(
    setup: Setup, client: Client
) -> tuple[Setup, Placed, tuple[Any, Any], Observation, Footprint]:
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
    client.try_out(setup)
    if config.leaves_stages_to_planner:
        processes = (
            world.count_devices(config.replicas) if config.backend.facts.uses_processes else None
        )
        # only on the main process, because each process would measure its own machine
        begins = run_on_main(
            lambda: choose_stages(
                config, method, setup.model, loss, example, client.count_moments(), processes
            )
        )
        # no begins: the plan is one stage
        config = config.model_copy(update={"stages": begins or 1})
    # last_layers trains by the model's own output and has no heads
    has_heads = method.structure is not None and method.structure.layers is None
    take = get_take_of_heads(loss, method.name) if has_heads else None
    placed = get_backend(config).place(config, method, setup.model, example[0], take)
    model = placed.model
    partition = placed.partition
    if method.structure is None:
        footprint = make_footprint(model, partition, observation)
    else:
        client.load_heads(model)
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
    # one replica per stage by default
    if method.rounds is not None and method.rounds.replicas is None:
        config = config.with_method_args(replicas=len(partition))
    return (
        replace(setup, config=config, model=model, loss=loss),
        placed,
        example,
        observation,
        footprint,
    )


def get_take_of_heads(loss: Loss, method: str) -> TakePart | None:
    """Return the part of the model's output that heads stand in for; None for all of it. Raise
    `BadInput` for a loss that cannot be that of heads.
    """
    if isinstance(loss, OwnLoss):
        why = (
            "the heads of its blocks give no loss of their own: must be a loss of their outputs, "
            "such as cross_entropy"
        )
        raise BadInput(f"{OWN_LOSS}: {method}: {why}")
    take = loss.take if isinstance(loss, LossOfOutput) else None
    if take is None or isinstance(take, TakePart):
        return take
    why = "takes the outputs of its blocks' heads: must be the name of a field, or an index"
    raise BadInput(f"model.output: {qualify(take)}: {method} {why}")


def _make_optimizers(
    setup: Setup, client: Client, placed: Placed, table: VersionTable
) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    """Make the optimizer of the stages of this process, and that of all stages, which may be the
    same.
    """
    groups, factory = client.group(setup, placed, table)
    # master copies, where there are any, are stepped in place of the weights
    groups = replace_parameters(groups, setup.precision.get_trained)
    local_groups = _select_local_groups(groups, placed)
    optimizer = call_factory(factory, local_groups)
    # the same function has just returned an optimizer of such groups
    return optimizer, optimizer if local_groups is groups else factory(groups)


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
