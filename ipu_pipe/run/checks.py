"""Why a job that is built cannot run: one ordered list of checks, each a function from the job to its reasons."""

from __future__ import annotations

from typing import List, Sequence

from ipu_pipe.backends.table import get_backend
from ipu_pipe.job.record import Job, list_drains
from ipu_pipe.model.probe import changing_buffers
from ipu_pipe.text import list_some, show
from ipu_pipe.update import optimizer as update
from ipu_pipe.update import rules
from ipu_pipe.update.groups import OWN_RATES, has_own_rates

BLOCK_KEYS = ("block_rates", "block_accumulation", "head")


def faults(job: Job, placed: Sequence[str] = ()) -> List[str]:
    """All reasons to refuse the job, in order. `placed`: faults of a config's own optimizer, with the places that they come
    from."""
    found = [reason for check in CHECKS for reason in check(job)]
    rules_found = _rules(job)
    found += [next((line for line in placed if line.endswith(fault)), fault) for fault in rules_found]
    return list(dict.fromkeys(found))


def backend(job: Job) -> List[str]:
    """What its backend cannot."""
    return get_backend(job.config).faults(job)


def clipped_warmup(job: Job) -> List[str]:
    """Norms of the synchronous warm-up are not delayed."""
    clip = job.config.clip
    if clip is not None and clip.scope == "delayed_global" and "warmup" in job.config.method_settings():
        return [
            "clip.scope: delayed_global: not together with method_args.warmup, whose norms are not delayed: use stage"
        ]
    return []


def own_buffers(job: Job) -> List[str]:
    """Why replicas cannot be resumed exactly: a checkpoint holds the buffers of the first one. BatchNorm's do not matter in
    training."""
    if job.config.replicas == 1 and not (job.method.structure is not None and job.method.structure.overlap):
        return []
    names = changing_buffers(job.model, job.example[0])
    if not names:
        return []
    return [
        f"model: {list_some(names)}: buffers that training changes and reads: with replicas, or layers that two blocks hold, "
        "each copy would need its own: leave them out"
    ]


def asynchrony(job: Job) -> List[str]:
    """What methods with block updates, or with replicas of their own, have no meaning for."""
    config, method = job.config, job.method
    if method.history is None and method.rounds is None:
        return []
    why = (
        "updates single stages"
        if method.rounds is None
        else "has replicas that step by themselves (method_args.replicas)"
    )
    found = [
        f"{key}: {getattr(config, key)}: {method.name} {why}: must be 1"
        for key in ("replicas", "gradient_accumulation")
        if getattr(config, key) > 1
    ]
    if config.clip is not None and config.clip.scope != "stage":
        found.append(f"clip.scope: {config.clip.scope}: {method.name} {why}: must be stage")
    names = changing_buffers(job.model, job.example[0]) if method.rounds is not None else []
    if names:
        found.append(
            f"model: {list_some(names)}: buffers that training changes and reads: each replica of {method.name} would have its"
            " own: leave them out"
        )
    return found


def blocks(job: Job) -> List[str]:
    """Whether rates and accumulation by block fit the blocks and the run, and clipping and replicas the method."""
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
    """Where parameter groups have rates of their own."""
    if job.rules.read_rates and has_own_rates(job.optimizer, job.base_rate):
        return [f"{OWN_RATES}: not with a rule that corrects weights by the rate: must have one"]
    return []


def _rules(job: Job) -> List[str]:
    """Whether the rules are defined on the optimizer that trains, in all its groups."""
    args, kind = job.config.method_settings(), update.kind(job.optimizer)
    found = [fault for group in job.optimizer.param_groups for fault in rules.faults(args, job.method, kind, group)]
    return list(dict.fromkeys(found))


CHECKS = (backend, asynchrony, clipped_warmup, own_buffers, blocks, group_rates)
