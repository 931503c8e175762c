"""Checks before training: run one pass to check that model, loss, data and metrics fit, and find
conflicting settings.
"""

from __future__ import annotations

from typing import Any, Mapping, Sequence

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ipu_pipe.backends.features import list_lacking
from ipu_pipe.backends.table import get_backend
from ipu_pipe.config.backend_facts import BACKEND_FACTS
from ipu_pipe.errors import BadInput, raise_faults, summarize
from ipu_pipe.job.record import Job, Setup
from ipu_pipe.model.batch import call_model, describe_tensors
from ipu_pipe.model.devices import DeviceKind, get_kind, list_accelerators
from ipu_pipe.model.loss import (
    SCORES,
    Loss,
    LossOfOutput,
    OwnLoss,
    TakePart,
    describe_output,
    find_label_range,
    get_labels,
    get_plain_loss,
    list_fields,
    take_scores,
    takes_whole_output,
)
from ipu_pipe.model.observation import Observation, observe_training
from ipu_pipe.model.precision import get_uncast_loss, get_user_loss
from ipu_pipe.model.randomness import find_unkeyed_draws
from ipu_pipe.model.restoring import restore_function
from ipu_pipe.plan.config_cut import list_shortages
from ipu_pipe.refusals import NONE, OWN_LOSS, Argument, Words, name_key
from ipu_pipe.text import describe_kind, find_alias, list_some, show
from ipu_pipe.update import coupling, rules
from ipu_pipe.update import optimizer as update
from ipu_pipe.update.clipping import explain_stage_scope


def require_device(name: str) -> DeviceKind:
    """Return the kind of device that `backend.device` names. Raise `BadInput` if torch has none
    here.
    """
    kind = get_kind(name)
    if kind.is_available():
        return kind
    if kind.is_cuda:
        raise BadInput(
            f"{Argument('device')}: cuda: this machine has no usable CUDA device: use cpu"
        )
    known = " or ".join(["cpu", *(one.name for one in list_accelerators())])
    # tpu and ipu are no devices of torch: the backends xla and poptorch have them
    meant = name if name in BACKEND_FACTS else find_alias(name, BACKEND_FACTS)
    platform = f" {name_key('backend.platform')}=tpu" if name == "tpu" else ""
    hint = f"; did you mean {name_key('backend.name')}={meant}{platform}?" if meant else ""
    raise BadInput(
        f"{Argument('device')}: {name}: torch has no such device here: must be {known}{hint}"
    )


def find_faults(job: Job, optimizer_faults: Sequence[str]) -> list[str]:
    """List all reasons to refuse the job. `optimizer_faults`: of the config's own optimizer, with
    its file.
    """
    conflicts = {
        **_find_single_stage_conflicts(job),
        **_find_copy_conflicts(job),
        **_find_misplaced_block_settings(job),
        **(_find_block_conflicts(job) if job.method.structure is not None else {}),
    }
    faults = [*list_lacking(job), *get_backend(job.config).list_faults(job)]
    method = job.method
    is_alone = method.structure is None and method.rounds is None and method.history is None
    # then one step of the optimizer has the gradients of all stages
    at_once = job.config.backend.facts.emulates and method.flushes and is_alone
    faults += [
        fault
        for part in update.list_parts(job.full_optimizer)
        for fault in coupling.list_faults(
            part, at_once, len(job.partition) > 1, method.rounds is not None
        )
    ]
    faults += list_shortages(job) if job.config.hardware is not None else []
    faults += [fault for fault, applies in conflicts.items() if applies]
    # prefer the line that names the file of the key
    faults += [
        next((line for line in optimizer_faults if line.endswith(fault)), fault)
        for fault in find_rule_faults(job, job.full_optimizer)
    ]
    # the groups of an optimizer often share a fault
    return list(dict.fromkeys(faults))


def find_rule_faults(job: Job, optimizer: torch.optim.Optimizer) -> list[str]:
    """List the reasons why the method's rules cannot act with the settings of an optimizer's
    groups.
    """
    args = job.config.method_settings()
    return [
        fault
        for group in optimizer.param_groups
        for fault in rules.list_conflicts(
            args, job.method, update.get_kind(optimizer, group), group
        )
    ]


def _find_single_stage_conflicts(job: Job) -> dict[str, Any]:
    """Return the settings that do not fit methods which update single stages or replicas, and the
    scopes of clipping that do not fit the method.
    """
    config = job.config
    method = job.method
    replicas = config.replicas
    accumulation = config.gradient_accumulation
    scope = config.clip and config.clip.scope
    by_stage = explain_stage_scope(config.clip.norm, len(job.partition)) if config.clip else ""
    alone = f"{method.name} updates single stages" if method.history is not None else ""
    if method.rounds is not None:
        alone = f"{method.name} has replicas that step by themselves (method_args.replicas)"
    return {
        f"ema: {method.name}: its stages, replicas or duplicates of layers step by themselves: "
        f"must be {NONE}": config.ema
        and (alone or (method.structure and method.structure.overlap)),
        f"replicas: {replicas}: {alone}: must be 1": alone and replicas > 1,
        f"{Argument('microbatches')}: {accumulation}: {alone}: must be 1": alone
        and accumulation > 1,
        f"method_args.delay_compensation: cannot be combined with loss_weight: it uses the "
        f"gradient of a microbatch's own loss, and earlier stages do not know its weight: must be "
        f"{NONE}": job.loss_weight
        and "delay_compensation" in config.method_settings()
        and job.schedule.accumulate * replicas > 1,
        f"{Argument('clip')}: {scope}: {alone}: use {by_stage}": alone
        and scope not in (None, "stage"),
        f"{Argument('clip')}: delayed_global: cannot be combined with {Argument('warmup')}, whose "
        f"norms are not delayed: "
        f"use {by_stage}": scope == "delayed_global" and "warmup" in config.method_settings(),
    }


def _find_copy_conflicts(job: Job) -> dict[str, Any]:
    """Return what several copies of a layer cannot have: a checkpoint has only the buffers and the
    mean square of the first copy.
    """
    method = job.method
    replicas = job.config.replicas
    overlaps = method.structure and method.structure.overlap
    compensation = job.config.method_settings().get("delay_compensation", {})
    return {
        f"model: {list_some(job.effects.buffers)}: buffers that training changes and reads: with "
        f"replicas, or layers that two "
        "blocks hold, each copy would need its own: leave them out": job.effects.buffers
        and (replicas > 1 or method.rounds is not None or overlaps),
        f"replicas: {replicas}: each would have its own mean square, but a checkpoint has only "
        f"one: must be 1, or "
        f"{Argument('method_args', {'delay_compensation': {'adaptive': False}})}": replicas > 1
        and compensation.get("adaptive"),
    }


def _find_misplaced_block_settings(job: Job) -> dict[str, Any]:
    """Return the settings of blocks that a method without blocks has, or that are not one for each
    block.
    """
    structure = job.method.structure
    args = job.config.method_settings()
    faults: dict[str, Any] = {}
    for key in ("block_rates", "block_accumulation", "head"):
        value = args.get(key)
        blocks = (
            f"must be one for each of {len(job.partition)} blocks"
            if structure
            else f"{job.method.name} has no blocks"
        )
        wrong = not structure or (key != "head" and len(value or ()) != len(job.partition))
        faults[f"method_args.{key}: {show(value)}: {blocks}"] = value is not None and wrong
    return faults


def _find_block_conflicts(job: Job) -> dict[str, Any]:
    """Return the settings that local methods do not support: fault -> whether it applies."""
    config = job.config
    clip = job.config.clip
    structure = job.method.structure
    by_stage = explain_stage_scope(clip.norm, len(job.partition)) if clip else ""
    gathers = bool(config.method_args.block_accumulation)
    overlaps = structure is not None and structure.overlap
    return {
        f"{Argument('clip')}: {clip and clip.scope}: a block knows only its own gradients: use {by_stage}": clip
        and clip.scope != "stage",
        f"replicas: {config.replicas}: not with method_args.block_accumulation: use "
        f"{Argument('microbatches')}": gathers and config.replicas > 1,
        "clip: local_overlapping: a layer's gradient is the mean of two blocks', which are not "
        "clipped": overlaps and clip,
        "method_args.block_accumulation: not with local_overlapping, whose blocks share gradients "
        "at each update": overlaps and gathers,
        f"replicas: {config.replicas}: not with local_overlapping, whose layers have duplicates "
        f"already": overlaps and config.replicas > 1,
    }


# classes that wrap a module: their names, hooks and order of execution are not the model's own
WRAPPERS = {
    "OptimizedModule": "torch.compile",
    "DataParallel": "DataParallel",
    "DistributedDataParallel": "DistributedDataParallel",
    "FullyShardedDataParallel": "FullyShardedDataParallel",
    "FSDPModule": "fully_shard",
    "ScriptModule": "torch.jit",
    "PoplarExecutor": "a PopTorch executor",
    "DeepSpeedEngine": "DeepSpeed",
}


SHARD_LATER = "; shard its stages after the cut, by Pipeline(prepare_stage=...)"


def check_modules(model: nn.Module, loss: Any, device: torch.device) -> None:
    """Raise `BadInput` for modules and tensors of model and loss that stages, checkpoints or
    optimizers do not support.
    """
    sparse = []
    for name, module in model.named_modules():
        place = f"model: {name}" if name else "model"
        # first of all: a lazy parameter has no shape, which what follows reads
        if any(map(is_lazy, (*module.parameters(recurse=False), *module.buffers(recurse=False)))):
            why = (
                "is lazy: its weights have no shape yet: state its sizes, or run a batch through "
                "the model first"
            )
            raise BadInput(f"{place}: {why}")
        # by name: PopTorch and DeepSpeed may not be installed, and fully_shard adds a base class
        kinds = [
            WRAPPERS[kind.__name__] for kind in type(module).__mro__ if kind.__name__ in WRAPPERS
        ]
        # module.compile() does not change the class
        if getattr(module, "_compiled_call_impl", None) is not None:
            kinds.append("torch.compile")
        if kinds:
            why = (
                f"is wrapped by {kinds[0]}: give the model itself, which the backend divides "
                f"over its devices"
            )
            is_sharded = kinds[0] in ("FullyShardedDataParallel", "fully_shard")
            raise BadInput(f"{place}: {why}{SHARD_LATER if is_sharded else ''}")
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            sparse.append(name)
    state = model.state_dict()
    # a model may have a `state_dict` of its own
    if not isinstance(state, Mapping):
        raise BadInput(
            f"model: state_dict: returned {describe_kind(state)}: must return names to tensors"
        )
    # a loss may use weights of the model, which are trained with it
    trained = set(model.parameters())
    of_loss = loss.named_parameters() if isinstance(loss, nn.Module) else ()
    untrained = [name for name, p in of_loss if p.requires_grad and p not in trained]
    names_by_fault = {
        # by name: the IPUs' torch 2.0.1 has no such class to import
        f"is sharded (a DTensor): give whole weights{SHARD_LATER}": [
            name for name, p in model.named_parameters() if type(p.data).__name__ == "DTensor"
        ],
        "complex: parameters must be real": [
            name for name, p in model.named_parameters() if p.dtype.is_complex
        ],
        "is not a dense tensor: checkpoints support only dense tensors": [
            name
            for name, t in state.items()
            if not isinstance(t, torch.Tensor) or t.layout != torch.strided
        ],
        "gradients must be dense: sparse=False gives the same numbers": sparse,
        "on a GPU cuDNN draws a recurrent layer's dropout from a private state, which no seed "
        "reaches: use dropout=0 with nn.Dropout between layers of num_layers=1, or "
        f"{Argument('device', 'cpu')}": find_unkeyed_draws(model, device),
    }
    faults = [
        f"model: {list_some(names)}: {fault}" for fault, names in names_by_fault.items() if names
    ]
    if untrained:
        why = (
            "no optimizer would train the loss's own parameters: put them into the model, or "
            "requires_grad_(False)"
        )
        faults.append(f"loss: {type(loss).__name__}: {list_some(untrained)}: {why}")
    raise_faults(faults)


def check_model(setup: Setup, example: tuple[Any, Any], labels: Any) -> Observation:
    """Run a training pass of a microbatch, and return its observation.

    Raise `BadInput` if the model does not fit the data or the loss, or cannot learn.
    `labels`: the example's labels on the CPU, with values even if the example is on the meta
    device. The labels that the loss allows go to `setup.label_range`.
    """
    model, loss, (x, y) = setup.model, setup.loss, example
    output: Any = None
    taken: Any = None
    value: Any = None

    def run(x: Any, y: Any) -> Any:
        # if the pass fails, these tell the message how far it came
        nonlocal output, taken, value
        output = call_model(model, x)
        taken = take_scores(loss, output)
        setup.label_range = find_label_range(
            get_uncast_loss(get_plain_loss(loss)), taken, get_labels(y)
        )
        if setup.label_range is not None:
            # before the loss: a label out of range is an assertion in a GPU's kernel, after which
            # CUDA is lost
            setup.label_range.check(get_labels(labels))
        value = loss(output, y)
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            # report errors of a device's kernels here, not at the next synchronization
            get_kind(value.device).synchronize()
        return value

    try:
        # a loss may keep a state, which must begin the run as if this pass had not been
        with restore_function(get_user_loss(loss)):
            seen = observe_training(model, x, y, run)
    except BadInput:
        raise
    # the user's model may raise anything
    except Exception as error:
        raise BadInput(
            _explain_failure(loss, example, output, taken, value, summarize(error))
        ) from error
    take = loss.take if isinstance(loss, (LossOfOutput, OwnLoss)) else None
    if isinstance(output, torch.Tensor) and isinstance(take, TakePart):
        raise BadInput(
            f"model.output: {take.key}: the model returns {describe_output(output)}, which has no "
            f"parts: leave it out"
        )
    # (1,) is one number, too
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        raise BadInput("loss: must return one number, the mean over the microbatch")
    buffers = dict(model.named_buffers())
    changed = [name for name in seen.effects.buffers if buffers[name].is_complex()]
    if changed:
        why = (
            "complex, and training changes it: keep its real and its imaginary part in a buffer "
            "each"
        )
        raise BadInput(f"model: {list_some(changed)}: {why}")
    if not value.requires_grad:
        raise BadInput(
            "loss: depends on no parameter of the model that needs a gradient: nothing to train"
        )
    return seen


def _explain_failure(
    loss: Loss, example: tuple[Any, Any], output: Any, taken: Any, value: Any, error: str
) -> str:
    """Return the fault of a training pass that ended by an `error` of the user's code; what it did
    not reach is None.
    """
    (x, y), fields = example, list_fields(output)
    if fields and takes_whole_output(loss):
        likely = SCORES if SCORES in fields else fields[0]
        which = Words(
            f'take one in the loss, as in output["{likely}"]',
            f"set which one, as in model.output: {likely}",
        )
        return (
            f"model: returns {describe_output(output)}, but the loss takes one of these ({error}): "
            f"{which}, or use {OWN_LOSS} if the output has its own loss"
        )
    # the model has returned, and the loss has not
    if output is not None and value is None:
        returned = describe_output(output)
        if taken is None and isinstance(loss, LossOfOutput):
            return f"model.output: it fails on the model's output, {returned}: {error}"
        return (
            f"loss: it fails on the model's output, {returned} and labels "
            f"{describe_tensors(get_labels(y))}: {error}"
        )
    labelled = (
        f", which {OWN_LOSS} calls with the labels too"
        if isinstance(get_plain_loss(loss), OwnLoss)
        else ""
    )
    return f"model: it fails on a microbatch of shape {describe_tensors(x)}{labelled}: {error}"
