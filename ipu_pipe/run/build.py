"""Config -> job: the model, data, stages, schedule and version table of one run, all checked, before anything trains."""

from __future__ import annotations

import importlib.util
import inspect
from dataclasses import replace
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import torch
from torch import nn

from ipu_pipe.backends import emulator
from ipu_pipe.data import DataSource, load_data
from ipu_pipe.data.labels import LabelRange, label_range
from ipu_pipe.errors import BadInput, first_line
from ipu_pipe.job.blame import attributed
from ipu_pipe.job.config import Config, Given
from ipu_pipe.job.determinism import set_numerics
from ipu_pipe.job.entries import call_entry, resolve_entry
from ipu_pipe.job.given import describe, describe_optimizer, refuse_missing, with_given, with_optimizer
from ipu_pipe.job.record import DTYPES, Job, Setup, drains_of, rate_of
from ipu_pipe.job.values import MOST_STOPS, MOST_UPDATES
from ipu_pipe.local.blocks import SumOfLosses, blocks_of, make_blocks
from ipu_pipe.model.buffers import buffers_restored
from ipu_pipe.model.precision import OwnTypes
from ipu_pipe.model.probe import Footprint, Loss, changing_buffers, drawn_unkeyed, footprint
from ipu_pipe.model.randomness import derived_seed
from ipu_pipe.model.stages import Partition, partition
from ipu_pipe.run.checkpoint import load_weights, read_weights
from ipu_pipe.schedule.methods import Method, check, resolve_method
from ipu_pipe.schedule.timelines import make_schedule
from ipu_pipe.schedule.versions import VersionTable, segment_ends
from ipu_pipe.shown import shown
from ipu_pipe.update import optimizer as update
from ipu_pipe.update import rules

BLOCK_KEYS = ("block_rates", "block_accumulation", "head")


def set_up(
    config: Config, model: Optional[nn.Module] = None, data: Optional[DataSource] = None, loss: Optional[Loss] = None
) -> Setup:
    """The model, loss and data that `config` describes, ready to run. What is given takes the place of the config's entry."""
    refuse_missing(config, model=model, data=data, loss=loss)
    device = _device(config)
    torch.manual_seed(derived_seed(config.seed, "model"))
    given = model is not None
    model = model if model is not None else make_model(config)
    _refuse_tensors(model)
    _refuse_unkeyed(model, device)
    if config.init_from:
        load_weights(model, read_weights(Path(config.init_from)), f"init_from: {config.init_from}")
    own_types = OwnTypes(model) if given else None
    model = model.to(device, DTYPES[config.precision]).train()
    data = data if data is not None else make_data(config)
    chosen_loss = loss if loss is not None else make_loss(config)
    if isinstance(chosen_loss, nn.Module):  # class weights and the like
        chosen_loss = chosen_loss.to(device)
    return Setup(config, model, chosen_loss, data, device, own_types)


def _refuse_tensors(model: nn.Module) -> None:
    """Refuse what precision, checkpoints or optimizers cannot do with the model's tensors."""
    named, state = [*model.named_parameters(), *model.named_buffers()], model.state_dict()
    modules = [(name, m) for name, m in model.named_modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag))]
    found = {
        "complex: parameters and buffers must be real": [name for name, t in named if t.dtype.is_complex],
        "no dense tensor: checkpoints hold nothing else": [
            name for name, t in state.items() if not isinstance(t, torch.Tensor) or t.layout != torch.strided
        ],
        "gradients must be dense: sparse=False gives the same numbers": [name for name, m in modules if m.sparse],
    }
    faults = []
    for fault, names in found.items():
        more = f" and {len(names) - 4} more" if len(names) > 4 else ""
        faults += [f"model: {', '.join(names[:4])}{more}: {fault}"] if names else []
    if faults:
        raise BadInput(faults)


def _refuse_unkeyed(model: nn.Module, device: torch.device) -> None:
    """Refuse modules whose draws cannot be repeated on the device."""
    names = drawn_unkeyed(model, device)
    if names:
        more = f" and {len(names) - 4} more" if len(names) > 4 else ""
        raise BadInput(
            f"model: {', '.join(names[:4])}{more}: on a GPU cuDNN draws a recurrent layer's dropout from a state of its own, "
            "which no seed reaches: use dropout=0 with nn.Dropout between layers of num_layers=1, or backend.device: cpu"
        )


def build(
    config: Config,
    model: Optional[nn.Module] = None,
    data: Optional[DataSource] = None,
    loss: Optional[Loss] = None,
    optimizer: Optional[update.OptimizerFactory] = None,
    done: int = 0,
) -> Job:
    """Build the job that `config` describes. What is given as an object takes the place of the config's entry; `done`: updates
    of the run that are done already, in a checkpoint that it goes on from.

    `optimizer`: a function from parameter groups to a torch.optim optimizer, such as
    `functools.partial(torch.optim.SGD, lr=0.1)`. Raises BadInput where anything does not fit, what the user's own code raises
    as it is.
    """
    with attributed(lambda: "before training"):
        refuse_missing(config, model=model, data=data, loss=loss, optimizer=optimizer)
        setup = set_up(with_given(config, model, data, loss, optimizer), model, data, loss)
    trained = [p for p in setup.model.parameters() if p.requires_grad]
    try:
        with attributed(lambda: "before training"):
            return _assemble(setup, optimizer, done)
    except BaseException:
        for parameter in trained:  # a method may have frozen some
            parameter.requires_grad_(True)
        if setup.own_types is not None:
            setup.own_types.give_back()
        raise


def _assemble(setup: Setup, optimizer: Optional[update.OptimizerFactory], done: int) -> Job:
    config = setup.config
    model, chosen_loss, data, device = setup.model, setup.loss, setup.data, setup.device
    per_batch = config.gradient_accumulation * config.replicas
    per_epoch = data.train_batches_per_epoch(config.micro_batch_size) // per_batch
    if per_epoch < 1:
        raise BadInput(
            f"data: {data.train_batches_per_epoch(config.micro_batch_size)} microbatches an epoch do not fill one batch of "
            f"gradient_accumulation {config.gradient_accumulation} x replicas {config.replicas}: lower them, micro_batch_size, "
            "or take more data"
        )
    updates = config.steps if config.steps is not None else config.epochs * per_epoch
    _check_length(config, updates, per_epoch)
    x, y = setup.to_device(*data.train_batch(0, 0, config.micro_batch_size))
    example = x.clone(), y.clone()  # a model that works in place must not change the data
    setup.label_range = _try_model(model, chosen_loss, example)
    args = config.method_settings()
    method = resolve_method(config.method, args)
    if method.structure is not None:
        model, part, own, note = _blocks(config, method, model, example[0])
        if config.init_from:  # again, now with the heads that it may hold
            load_weights(model, read_weights(Path(config.init_from)), f"init_from: {config.init_from}", heads_too=False)
        if method.structure.blocks is not None and config.method_args.blocks is None:  # as many as processes
            args_of = config.method_args.model_copy(update={"blocks": len(part)})
            config = config.model_copy(update={"method_args": args_of})
        chosen_loss = SumOfLosses(chosen_loss)
    else:
        part, own, note = _partition(config, model, example[0])
    if isinstance(config.stages, dict) and config.stages.get("by") == "time" and part.begins and not part.spread:
        config = config.model_copy(update={"stages": list(part.begins)})

    accumulate = config.gradient_accumulation
    check(method, len(part), updates * accumulate, accumulate)
    scope = config.clip.scope if config.clip else None
    reasons = emulator.refuses(model, chosen_loss, method, len(part), *example, clip_scope=scope)
    if scope == "delayed_global" and "warmup" in args:
        reasons.append(
            "clip.scope: delayed_global: not together with method_args.warmup, whose norms are not delayed: use stage"
        )
    if config.replicas > 1 or (method.structure is not None and method.structure.overlap):
        reasons += _own_buffers(model, example[0])
    if reasons:
        raise BadInput(reasons)
    _check_blocks(config, args, len(part), updates, per_epoch, done)
    switch = round(args["warmup"]["epochs"] * per_epoch) if "warmup" in args else 0
    drains = [k * accumulate for k in drains_of(config, updates, per_epoch, done)]
    schedule = make_schedule(method, len(part), updates * accumulate, accumulate, drains, switch * accumulate)
    table = VersionTable(schedule, method, config.seed)
    if method.segments is not None:
        segment_ends(len(part), method.segments)  # refuses more than there are stages
    groups = update.parameter_groups(model, part, config.optimizer.no_decay)
    held = groups if own is None else update.stage_groups(groups, own)
    blocks = blocks_of(model)
    if own and blocks is not None and blocks.overlap:  # this process's duplicate of the stage before
        shared = {id(p) for p in blocks.pieces[own - 1].parameters()}
        held = [*held, *update.only(update.stage_groups(groups, own - 1), shared)]
    factory = optimizer or _factory(config)
    made = factory(held)
    if optimizer is not None:
        _check_groups(made)
    _check_rules(args, method, made, config.optimizer_faults() if optimizer is None else ())
    whole = made if held is groups else factory(groups)  # a process holds its own stage's alone
    if optimizer is not None:
        config = with_optimizer(config, whole)
    used = Given(optimizer=describe_optimizer(whole), loss=describe(setup.loss))
    if config.backend.name == "poptorch":
        note = _on_ipus(config, model, part, example[0], made, updates, per_epoch)
    base = float(made.param_groups[0]["lr"])
    job = Job(
        config, model, chosen_loss, data, device, setup.own_types, part, method, schedule, table, groups, made,
        _rules(config, args, table, made, base, updates, per_epoch, switch),
        base, per_epoch, updates, example, _footprint(model, part, chosen_loss, example), note, done, used,
    )  # fmt: skip
    job.label_range = setup.label_range
    return job


def _check_length(config: Config, updates: int, per_epoch: int) -> None:
    """Whether the run can be planned: what that takes grows with its updates and with the stops among them."""
    if updates > MOST_UPDATES:
        raise BadInput(
            f"epochs: {config.epochs}: {updates} updates, at most {MOST_UPDATES}: a run is planned before it starts"
        )
    for key, every in (("checkpoint", config.checkpoint.every), ("evaluate", config.evaluate.every * per_epoch)):
        if every and updates // every > MOST_STOPS:
            raise BadInput(
                f"{key}.every: {getattr(config, key).every}: {updates // every} times in {updates} updates, at most"
                f" {MOST_STOPS}: a run is planned before it starts"
            )


def _on_ipus(
    config: Config, model: nn.Module, part: Partition, x: torch.Tensor, optimizer: torch.optim.Optimizer, updates: int,
    per_epoch: int,
) -> str:  # fmt: skip
    """How IPUs will run the stages. Raises BadInput where they cannot."""
    from ipu_pipe.backends.ipu import engine as poptorch
    from ipu_pipe.backends.ipu import model as ipu_model

    facts = ipu_model.facts(model, part, x, optimizer, updates, per_epoch)
    faults = poptorch.refuses(config, facts)
    if faults:
        raise BadInput(faults)
    return poptorch.note(config, facts)


def _blocks(
    config: Config, method: Method, model: nn.Module, x: torch.Tensor
) -> Tuple[nn.Module, Partition, Optional[int], str]:
    """As `_partition`, of a method whose blocks have losses of their own: with the model that they make."""
    assert method.structure is not None
    if isinstance(config.stages, dict) and config.stages.get("by") == "time":
        raise BadInput(
            "stages.by: time: times differ from run to run, and blocks are what is trained: must be flops or parameters"
        )
    structure, count, own = method.structure, None, None
    if config.backend.name == "distributed":
        from ipu_pipe.backends.processes.engine import place_blocks

        count, own, structure = place_blocks(config, structure)
    entry = config.method_args.head
    head = resolve_entry(entry, "method_args.head") if entry else None
    made, part = make_blocks(model, x, structure, config.stages, config.seed, count, head)
    return made, part, own, ""


def _check_blocks(config: Config, args: Dict[str, Any], blocks: int, updates: int, per_epoch: int, done: int) -> None:
    """Whether rates and accumulation by block fit the blocks and the run, and clipping and replicas the method."""
    faults = []
    for key in ("block_rates", "block_accumulation"):
        if key in args and len(args[key]) != blocks:
            faults.append(f"method_args.{key}: {shown(args[key])}: must be one for each of {blocks} blocks")
    for every in args.get("block_accumulation", ()):
        wrong = [k for k in [*drains_of(config, updates, per_epoch, done), updates] if k % every]
        if wrong:
            faults.append(
                f"method_args.block_accumulation: {every}: an evaluation or checkpoint comes after {wrong[0]} updates, it must"
                f" come after a multiple of {every}, when no gathered gradient is left (evaluate.every, checkpoint.every, steps)"
            )
            break
    method = resolve_method(config.method, args)
    if method.structure is None:
        faults += [f"method_args.{key}: {method.name} has no blocks" for key in BLOCK_KEYS if args.get(key) is not None]
    else:
        if config.clip and config.clip.scope != "stage":
            faults.append(f"clip.scope: {config.clip.scope}: a block knows no gradient but its own: must be stage")
        if method.structure.overlap and config.clip:
            faults.append(
                "clip: local_overlapping: a layer's gradient is the mean of two blocks', which are not clipped"
            )
        if method.structure.overlap and args.get("block_accumulation"):
            faults.append(
                "method_args.block_accumulation: not with local_overlapping, whose blocks share gradients at each update"
            )
        if method.structure.overlap and config.replicas > 1:
            faults.append(
                f"replicas: {config.replicas}: not with local_overlapping, whose layers have duplicates already"
            )
        if args.get("block_accumulation") and config.replicas > 1:
            faults.append(
                f"replicas: {config.replicas}: not with method_args.block_accumulation: use gradient_accumulation"
            )
    if faults:
        raise BadInput(faults)


def _footprint(model: nn.Module, part: Partition, loss: Loss, example: Tuple[torch.Tensor, torch.Tensor]) -> Footprint:
    """As seen in one microbatch. Blocks with losses of their own take these where they are: only activations are handed on."""
    blocks = blocks_of(model)
    overlap, alone = (blocks.overlap, blocks) if blocks is not None else (0, None)
    if alone is not None:
        alone.overlap = 0
    found = footprint(model, part, loss, *example)
    if alone is not None:
        alone.overlap = overlap
    if blocks is None:
        return found
    if blocks.overlap:  # the layer behind is on each block's device, too
        saved = found.saved_bytes
        found = replace(found, saved_bytes=tuple(own + (saved[s - 1] if s else 0) for s, own in enumerate(saved)))
    return replace(found, boundary_bytes=tuple(sum(t.bytes for t in crossing.tensors) for crossing in blocks.crossings))


def _own_buffers(model: nn.Module, x: torch.Tensor) -> List[str]:
    """Why replicas cannot be resumed exactly: a checkpoint holds the buffers of the first one. BatchNorm's do not matter in
    training."""
    names = changing_buffers(model, x)
    if not names:
        return []
    shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    return [
        f"model: {shown}: buffers that training changes and reads: with replicas, or layers that two blocks hold, each copy "
        "would need its own: leave them out"
    ]


def _partition(config: Config, model: nn.Module, x: torch.Tensor) -> Tuple[Partition, Optional[int], str]:
    """The stages; on the distributed backend that of this process, and what the user should know: there is one stage a process
    of a replica, neighbours of the model's own taken together where there are fewer processes."""
    if config.backend.name != "distributed":
        return partition(model, x, config.stages), None, ""
    from ipu_pipe.backends.processes.engine import place_stages

    return place_stages(config, model, x)


def _rules(
    config: Config,
    args: Dict[str, Any],
    table: VersionTable,
    optimizer: torch.optim.Optimizer,
    base: float,
    updates: int,
    per_epoch: int,
    switch: int,
) -> rules.UpdateRules:
    """The run's update rules; T1's K, where it is not given, from the learning-rate schedule."""
    if "t1" in args and args["t1"]["anneal_updates"] is None:
        schedule = config.lr_schedule
        first = round(min(schedule.milestones) * per_epoch) if schedule.milestones else None
        args = {**args, "t1": {"anneal_updates": rules.anneal_default(first, schedule.warmup_steps, updates)}}
    return rules.UpdateRules(
        args, table.method, table.rule_lag(), config.gradient_accumulation, optimizer,
        lambda k: rate_of(config, base, k, updates, per_epoch), switch,
    )  # fmt: skip


def _check_groups(optimizer: Any) -> None:
    """Whether what the user's function made is an optimizer of the parameter groups that it was given."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise BadInput(f"optimizer: gave a {type(optimizer).__name__}, must give a torch.optim.Optimizer")
    if not all("stage" in group for group in optimizer.param_groups):
        raise BadInput(
            "optimizer: made of other parameters: must be made of the groups it is given, as functools.partial(torch.optim.SGD, "
            "lr=0.1) is"
        )


def _check_rules(
    args: Dict[str, Any], method: Method, optimizer: torch.optim.Optimizer, placed: Sequence[str]
) -> None:
    """Whether the rules are defined on the optimizer that trains, in all its groups. `placed`: faults of a config's own, with
    the places that they come from."""
    kind = update.kind(optimizer)
    found = [fault for group in optimizer.param_groups for fault in rules.faults(args, method, kind, group)]
    if found:
        raise BadInput([next((line for line in placed if line.endswith(f)), f) for f in dict.fromkeys(found)])


def _device(config: Config) -> torch.device:
    if config.backend.device == "cuda" and not torch.cuda.is_available():
        raise BadInput("backend.device: cuda: this machine has no usable CUDA device: use cpu")
    set_numerics(config.backend)
    if config.backend.threads:
        torch.set_num_threads(config.backend.threads)
    return torch.device(config.backend.device)


def make_model(config: Config) -> nn.Module:
    """The config's model, built on the CPU in float32."""
    model = call_entry(resolve_entry(config.model.entry, "model.entry"), config.model.args, "model.args")
    if not isinstance(model, nn.Module):
        raise BadInput(f"model.entry: {config.model.entry}: gave a {type(model).__name__}, must give a torch.nn.Module")
    return model


def make_data(config: Config) -> DataSource:
    """The config's data set, or what its import string gives."""
    options = config.data.options()
    if ":" in config.data.name:
        made = call_entry(resolve_entry(config.data.name, "data.name"), options, "data")
        if not isinstance(made, DataSource):
            raise BadInput(
                f"data.name: {config.data.name}: gave a {type(made).__name__}, must give an ipu_pipe.data.DataSource"
            )
        return made
    return load_data(config.data.name, seed=config.seed, **options)


def make_loss(config: Config) -> Loss:
    """Mean cross-entropy, or the config's own loss (outputs, labels) -> scalar; a module class is made into one."""
    if config.loss == "cross_entropy":
        return nn.functional.cross_entropy
    chosen: Any = resolve_entry(config.loss, "loss")
    if inspect.isclass(chosen) and issubclass(chosen, nn.Module):
        chosen = call_entry(chosen, {}, "loss")
    called: Callable[[Any, Any], torch.Tensor] = chosen
    return called


def _factory(config: Config) -> update.OptimizerFactory:
    settings: Dict[str, Any] = config.optimizer.settings()
    reference = config.optimizer.reference_batch_size
    if reference:
        size = config.micro_batch_size * config.gradient_accumulation * config.replicas
        momentum = settings.get("momentum") or 0.0
        settings["lr"], settings["momentum"] = rules.scaled_for_update_size(settings["lr"], momentum, reference, size)
    return update.optimizer_factory(config.optimizer.name, **settings)


def _try_model(model: nn.Module, loss: Loss, example: Tuple[torch.Tensor, torch.Tensor]) -> Optional[LabelRange]:
    """One forward with the loss, so that a model that does not fit the data, or cannot learn, is told in one line. Returns what
    labels the loss allows, where it is known."""
    x, y = example
    devices = [x.device] if x.is_cuda else []
    try:
        with torch.random.fork_rng(devices=devices), buffers_restored(model):
            output = model(x)
            allowed = label_range(loss, output, y)
            if allowed is not None:
                allowed.check(y)
            value = loss(output, y)
            if isinstance(value, torch.Tensor) and value.numel() == 1:
                value.item()  # what a GPU's kernels find wrong is told here, not wherever the run waits for them next
    except BadInput:
        raise
    except Exception as error:  # whatever the user's model raises
        raise BadInput(
            f"model: it fails on a microbatch of shape {tuple(x.shape)}, {x.dtype}: {first_line(error)}"
        ) from error
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        raise BadInput("loss: must give one number, the mean over the microbatch")
    if not value.requires_grad:
        raise BadInput("loss: depends on no parameter of the model that needs a gradient: nothing to train")
    return allowed


def has_tensorboard() -> bool:
    """Whether TensorBoard's writer is installed."""
    return importlib.util.find_spec("tensorboard") is not None
