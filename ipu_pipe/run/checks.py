"""Checks before training: whether model, loss, data and metrics fit, by one forward, and whether the backend supports the job."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any, List, Optional, Sequence, Tuple

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map

from ipu_pipe.backends.table import get_backend
from ipu_pipe.data.batches import LabelRange, find_label_range
from ipu_pipe.errors import BadInput, summarize
from ipu_pipe.job.evaluation import load_test_batches
from ipu_pipe.job.metrics import DEFAULT
from ipu_pipe.job.record import Job, Setup, list_drains
from ipu_pipe.model.batch import call_model, count_samples, describe_tensors, get_first_tensor
from ipu_pipe.model.loss import (
    SCORES,
    Loss,
    LossOfOutput,
    OwnLoss,
    TakePart,
    describe_output,
    get_labels,
    get_plain_loss,
    list_fields,
    take_scores,
    takes_whole_output,
)
from ipu_pipe.model.meta import is_faster_on_meta, move_to_meta, to_meta, watch_value_checks
from ipu_pipe.model.precision import get_given_loss
from ipu_pipe.model.restoring import undisturbed
from ipu_pipe.text import list_some, show
from ipu_pipe.update import optimizer as update
from ipu_pipe.update import rules
from ipu_pipe.update.groups import OWN_RATES, has_own_rates

BLOCK_KEYS = ("block_rates", "block_accumulation", "head")


def find_faults(job: Job, placed: Sequence[str] = ()) -> List[str]:
    """List all reasons to refuse the job. `placed` are faults of a config's optimizer with the places that they come from."""
    reasons = [reason for check in CHECKS for reason in check(job)]
    rules_found = _rules(job)
    reasons += [next((line for line in placed if line.endswith(fault)), fault) for fault in rules_found]
    return list(dict.fromkeys(reasons))


def backend(job: Job) -> List[str]:
    """List what the backend does not support."""
    return get_backend(job.config).faults(job)


def compiled(job: Job) -> List[str]:
    """Refuse compiled modules where the whole model runs in one process, or is compiled anyway."""
    if not job.config.model.compile or job.config.backend.name == "distributed":
        return []
    return ["model.compile: true: only backend: {name: distributed} compiles the modules of its stages: must be false"]


def clipped_warmup(job: Job) -> List[str]:
    """Refuse delayed clipping with a warm-up: the norms of the synchronous warm-up are not delayed."""
    clip = job.config.clip
    if clip is not None and clip.scope == "delayed_global" and "warmup" in job.config.method_settings():
        return [
            "clip.scope: delayed_global: not together with method_args.warmup, whose norms are not delayed: use stage"
        ]
    return []


def own_buffers(job: Job) -> List[str]:
    """Refuse buffers by which copies of a layer would differ: a checkpoint has those of the first copy only.

    BatchNorm's do not matter in training.
    """
    if job.config.replicas == 1 and not (job.method.structure is not None and job.method.structure.overlap):
        return []
    names = job.effects.buffers
    if not names:
        return []
    return [
        f"model: {list_some(names)}: buffers that training changes and reads: with replicas, or layers that two blocks hold, "
        "each copy would need its own: leave them out"
    ]


def asynchrony(job: Job) -> List[str]:
    """Refuse settings that have no meaning with updates of single blocks, or with replicas that step by themselves."""
    config, method = job.config, job.method
    if method.history is None and method.rounds is None:
        return []
    why = (
        "updates single stages"
        if method.rounds is None
        else "has replicas that step by themselves (method_args.replicas)"
    )
    faults = [
        f"{key}: {getattr(config, key)}: {method.name} {why}: must be 1"
        for key in ("replicas", "gradient_accumulation")
        if getattr(config, key) > 1
    ]
    if config.clip is not None and config.clip.scope != "stage":
        faults.append(f"clip.scope: {config.clip.scope}: {method.name} {why}: must be stage")
    names = job.effects.buffers if method.rounds is not None else []
    if names:
        faults.append(
            f"model: {list_some(names)}: buffers that training changes and reads: each replica of {method.name} would have its"
            " own: leave them out"
        )
    return faults


def blocks(job: Job) -> List[str]:
    """Refuse rates and accumulation by block that do not fit the blocks, and clipping and replicas with local methods."""
    config, args, method = job.config, job.config.method_settings(), job.method
    blocks, updates = len(job.part), job.updates
    faults = []
    for key in ("block_rates", "block_accumulation"):
        if key in args and len(args[key]) != blocks:
            faults.append(f"method_args.{key}: {show(args[key])}: must be one for each of {blocks} blocks")
    for every in args.get("block_accumulation", ()):
        wrong = [k for k in [*list_drains(config, updates, job.updates_per_epoch, job.done), updates] if k % every]
        if wrong:
            faults.append(
                f"method_args.block_accumulation: {every}: an evaluation or checkpoint comes after {wrong[0]} updates, it must"
                f" come after a multiple of {every}, when no gathered gradient is left (evaluate.every, checkpoint.every, steps)"
            )
            break
    if method.structure is None:
        absent = [key for key in BLOCK_KEYS if args.get(key) is not None]
        return faults + [f"method_args.{key}: {method.name} has no blocks" for key in absent]
    overlap, gathers, replicas = bool(method.structure.overlap), bool(args.get("block_accumulation")), config.replicas
    if config.clip and config.clip.scope != "stage":
        faults.append(f"clip.scope: {config.clip.scope}: a block knows no gradient but its own: must be stage")
    if overlap and config.clip:
        faults.append("clip: local_overlapping: a layer's gradient is the mean of two blocks', which are not clipped")
    if overlap and gathers:
        faults.append(
            "method_args.block_accumulation: not with local_overlapping, whose blocks share gradients at each update"
        )
    if overlap and replicas > 1:
        faults.append(f"replicas: {replicas}: not with local_overlapping, whose layers have duplicates already")
    if gathers and replicas > 1:
        faults.append(f"replicas: {replicas}: not with method_args.block_accumulation: use gradient_accumulation")
    return faults


def group_rates(job: Job) -> List[str]:
    """Refuse parameter groups with rates of their own where a rule corrects weights by the rate."""
    if job.rules.read_rates and has_own_rates(job.optimizer, job.base_rate):
        return [f"{OWN_RATES}: not with a rule that corrects weights by the rate: must have one"]
    return []


def _rules(job: Job) -> List[str]:
    """Refuse update rules that are not defined on the optimizer, in any of its groups."""
    args, kind = job.config.method_settings(), update.get_kind(job.optimizer)
    faults = [
        fault for group in job.optimizer.param_groups for fault in rules.find_faults(args, job.method, kind, group)
    ]
    return list(dict.fromkeys(faults))


CHECKS = (backend, compiled, asynchrony, clipped_warmup, own_buffers, blocks, group_rates)


FEW = 2  # samples; a batch norm refuses one


def check_model(model: nn.Module, loss: Loss, example: Tuple[Any, Any], labels: Any) -> Optional[LabelRange]:
    """Run a forward of the microbatch with the loss, so that a model that does not fit the data, or cannot learn, is told in one
    line. `labels`: the example's, with their numbers where it is a shape. Returns what labels the loss allows, where it is
    known. Raises BadInput."""
    x, y = example
    device, is_meta = get_first_tensor(x).device, get_first_tensor(x).is_meta
    devices = [device] if device.type == "cuda" else []
    output: Any = None
    taken: Any = None
    value: Any = None
    try:
        with contextlib.ExitStack() as inside:
            inside.enter_context(torch.random.fork_rng(devices=devices))
            inside.enter_context(move_to_meta(model) if is_meta else undisturbed(model))
            output = None if is_meta else _few(model, x)
            if output is None:
                output = call_model(model, x)
            taken = take_scores(loss, output)
            allowed = find_label_range(get_given_loss(get_plain_loss(loss)), taken, get_labels(y))
            if allowed is not None:
                allowed.check(get_labels(labels))
            value = loss(output, y)
            if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_meta:
                value.item()  # what a GPU's kernels find wrong is told here, not wherever the run waits for them next
    except BadInput:
        raise
    except Exception as error:  # whatever the user's model raises
        if list_fields(output) and takes_whole_output(loss):
            raise BadInput(
                f"model: returns {describe_output(output)}, and the loss wants one of these ({summarize(error)}): say which is"
                f" the output, as model.output: {_likely(output)}, or take loss: model if it holds its own"
            ) from error
        if output is not None and value is None:
            key = "model.output" if taken is None and isinstance(loss, LossOfOutput) else "loss"
            returned = describe_output(output) + (
                f" and labels {describe_tensors(get_labels(y))}" if key == "loss" else ""
            )
            raise BadInput(f"{key}: it fails on what the model returns, {returned}: {summarize(error)}") from error
        labelled = ", which loss: model calls with the labels too" if isinstance(get_plain_loss(loss), OwnLoss) else ""
        raise BadInput(
            f"model: it fails on a microbatch of shape {describe_tensors(x)}{labelled}: {summarize(error)}"
        ) from error
    if (
        isinstance(output, torch.Tensor)
        and isinstance(loss, (LossOfOutput, OwnLoss))
        and isinstance(loss.take, TakePart)
    ):
        said = loss.take.key
        raise BadInput(
            f"model.output: {said}: the model returns {describe_output(output)}, of which it is no part: leave it out"
        )
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        raise BadInput("loss: must give one number, the mean over the microbatch")
    if not value.requires_grad:
        raise BadInput("loss: depends on no parameter of the model that needs a gradient: nothing to train")
    return allowed


def check_metrics(setup: Setup) -> None:
    """Run the metrics on a batch of the test set, as evaluations will, before anything is written.

    Raise `BadInput` for one that fails.
    """
    metrics = [metric for metric in setup.metrics if metric not in DEFAULT]  # which fits all
    if not metrics or setup.device.type == "meta":
        return
    devices = [setup.device] if setup.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), torch.no_grad(), undisturbed(setup.model):
        setup.model.eval()
        for x, labels in itertools.islice(load_test_batches(setup), 1):
            taken, y = take_scores(setup.loss, call_model(setup.model, x)), get_labels(labels)
            for metric in metrics:
                try:
                    metric.begin().add(taken, y, count_samples(x))
                except BadInput:
                    raise
                except Exception as error:  # whatever the user's metric raises
                    kinds = f"{describe_output(taken)} and labels {describe_tensors(y)}"
                    raise BadInput(f"metrics: {metric.name}: fails on {kinds}: {summarize(error)}") from error


def _likely(output: Any) -> Any:
    return SCORES if SCORES in list_fields(output) else list_fields(output)[0]


def _few(model: nn.Module, x: Any) -> Any:
    """Return outputs of the shape of the microbatch's, with the numbers of its first samples repeated.

    Return None where these do not tell what all samples would: where the forward of all fails by shape, or looks at values.
    """
    if not isinstance(x, torch.Tensor) or len(x) <= FEW or not x.is_floating_point() or not is_faster_on_meta(model, x):
        return None
    try:
        with move_to_meta(model), watch_value_checks() as looks, torch.no_grad():
            whole = model(to_meta(x))
        if looks():
            return None
        few = model(x[:FEW].clone())
        again = torch.arange(len(x)) % FEW
        repeated = tree_map(lambda t: t[again] if isinstance(t, torch.Tensor) else t, few)
    except Exception:  # a model for microbatches of one size, say: all samples tell
        return None
    shapes = [
        [t.shape if isinstance(t, torch.Tensor) else t for t in tree_flatten(value)[0]] for value in (whole, repeated)
    ]
    return repeated if shapes[0] == shapes[1] else None
