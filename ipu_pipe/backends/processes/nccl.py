"""Channels for nccl: a process group for each link between two stages, because nccl has no tags.

A link is (source stage, target stage, kind of message); its channel is the process group that
carries it. Two properties of nccl shape this file:

    [1] The first message of a group makes its two ranks wait for each other. Ranks that began with
        different groups would deadlock, so every rank uses all its channels once, in the same
        order, before anything else (`use_channels_once`).
    [2] A posted receive occupies the GPU until its message arrives, and a kernel that is used for
        the first time is loaded only when the GPU is idle. So a rank runs every kernel of a step
        once before its first receive (`load_kernels`). It posts no receive across a moment when the
        pipeline is empty, because an evaluation, with kernels of its own, may run then.

Tested over gloo, with a double whose groups behave like this. Not run on two GPUs.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
from typing import Any, Callable, Iterator, Mapping, Sequence

import torch
from torch import nn

from ipu_pipe.backends import world
from ipu_pipe.backends.processes.launch import make_group
from ipu_pipe.backends.processes.layout import RankLayout
from ipu_pipe.backends.processes.lost_ranks import answer_within, detect_lost_rank, wait_for_channel
from ipu_pipe.backends.processes.mail import BACKWARD, FORWARD, RECOMPUTE, REPLICAS, SHARED, Link
from ipu_pipe.backends.processes.stage import Stage
from ipu_pipe.backends.processes.update import keep_version_counters
from ipu_pipe.launcher import read_launch
from ipu_pipe.model.devices import DeviceKind, get_kind
from ipu_pipe.model.restoring import restore_all
from ipu_pipe.replay.run import Run
from ipu_pipe.replay.work import LossShare, Work
from ipu_pipe.schedule.methods import Method
from ipu_pipe.update import clipping
from ipu_pipe.update.apply import UpdateRules


def list_links(stages: int, method: Method, tied: Sequence[Link] = ()) -> list[Link]:
    """Return the links from stage 0 on, in the order in which every rank uses its channels first.

    `tied`: the links of tied weights, which come last.
    """
    links: list[Link] = []
    for s in range(stages - 1):
        links.append((s, s + 1, FORWARD))
        # blocks with losses of their own get no gradient back
        if method.structure is not None:
            if method.structure.overlap:
                links += [(s, s + 1, SHARED), (s + 1, s, SHARED)]
            continue
        if method.segments is not None:
            links.append((s, s + 1, RECOMPUTE))
        links.append((s + 1, s, BACKWARD))
    return [*links, *tied]


def make_channels(run: Run, layout: RankLayout, tied: Sequence[Link]) -> dict[Link, Any] | None:
    """Return a group for each link and one for the rank's replicas (`REPLICAS`), None if tensors go
    through the host's memory.

    Tensors go through the host if a rank has no GPU of its own, if nccl is missing, or if the order
    is read from a CSV file (`method_args.file`): both ends of a link may then order microbatches
    differently, which needs tags. The groups' timeout is a day, because a receive may be posted
    long before its message; the mail's deadline limits a wait.
    """
    kind = get_kind(run.device)
    if (
        not kind.is_accelerator
        or not _has_each_a_device(kind)
        or (run.method.order is not None and run.method.order.file)
    ):
        return None
    channels: dict[Link, Any] = {}
    options: dict[str, Any] = {
        "timeout": datetime.timedelta(days=1),
        "backend": kind.get_group_backend(),
    }
    # the caller has made this group
    if layout.column is not None:
        channels[REPLICAS] = world.get_data_group()
    # a column makes its own alone
    copies = layout.replicas if layout.column is None else 1
    for replica in range(copies):
        for link in list_links(layout.stages, run.method, tied):
            pair = sorted(layout.list_ranks(layout.placement[stage])[replica] for stage in link[:2])
            # only its two ranks make a column's pair
            is_other = layout.column is not None and layout.rank not in pair
            if pair[0] == pair[1] or is_other:
                continue
            # making a group is collective: every rank takes part in those of other replicas, and
            # drops them
            group = make_group(pair, run.options.deadline, **options)
            if layout.column is not None or replica == layout.replica:
                channels[link] = group
    for device in range(layout.devices) if copies > 1 else ():
        ranks = layout.list_ranks(device)
        group = make_group(ranks, run.options.deadline, **options)
        if layout.rank in ranks:
            channels[REPLICAS] = group
    return channels


def _has_each_a_device(kind: DeviceKind) -> bool:
    """Tell whether every rank has a device of its own, and a backend that connects them."""
    has_backend = kind.get_group_backend() is not None
    here = has_backend and read_launch().local_world <= kind.count_devices()
    # all ranks must decide alike, else one would wait in a group that another never makes
    everywhere = [here] * world.get_world_size()
    world.all_gather_object(everywhere, here)
    return all(everywhere)


def use_channels_once(
    channels: Mapping[Link, Any],
    links: Sequence[Link],
    layout: RankLayout,
    device: torch.device,
    limit: datetime.timedelta,
) -> None:
    """Use each of this rank's channels once, in the order of `links` (the same on all ranks), and
    its replicas' group last.
    """
    for link in links:
        source, target = map(layout.find_rank, link[:2])
        if source != target and layout.rank in (source, target):
            exchange, other = (
                (world.isend, target) if layout.rank == source else (world.irecv, source)
            )
            _complete(
                functools.partial(exchange, torch.zeros(1, device=device), other, channels[link]),
                [world.name_rank(other)],
                limit,
            )
    if REPLICAS in channels:
        value = torch.zeros(1, device=device)
        group = channels[REPLICAS]
        _complete(
            functools.partial(world.begin_sum, value, group), world.list_global_ranks(group), limit
        )


def _complete(
    begin: Callable[[], Any], ranks: Sequence[int] | None, limit: datetime.timedelta
) -> None:
    """Begin a channel's first operation and wait until it is complete; `ranks`: the other ranks,
    all if None.
    """
    with detect_lost_rank(ranks, limit):
        # nccl waits for the other rank's first use without a limit
        wait_for_channel(answer_within(limit.total_seconds(), begin), limit)


def load_kernels(work: Work, stage: Stage, parameters: Sequence[nn.Parameter]) -> None:
    """Run forward, backward and update of this stage once, so that all kernels are loaded, and undo
    their effects.

    Inputs from another stage are zeros.
    """
    model = stage.model
    rules = work.rules
    m = stage.newest_forward + 1
    with _restore_state(model.modules, rules):
        x, labels = model.load_data(m, is_trial=True)
        inputs = [x] if x is not None else []
        for shape in model.entering.tensors if model.entering is not None else ():
            zeros = torch.zeros(shape.message_shape, dtype=shape.dtype, device=model.device)
            inputs.append(zeros.requires_grad_(shape.differentiable and model.local is None))
        outputs, result = stage.run(m, inputs, labels)
        # any weight loads the kernels of weighted losses
        weight = LossShare(1.0, 1.0) if work.weighs else None
        ends = [
            t
            for t in (outputs if result is None else [work.scale_loss(result.loss, weight)])
            if t.requires_grad
        ]
        if ends:
            torch.autograd.backward(ends, [torch.ones_like(t) for t in ends])
        rules.collect()
        bound = work.clip[0] if work.clip else float("inf")
        with keep_version_counters(parameters):
            rules.step(
                # rules act from the switch on, and their kernels must be loaded, too
                max(stage.version, rules.switch),
                lambda k: clipping.clip_to_norm(
                    bound, parameters, clipping.compute_gradient_norms(parameters)
                ),
                [model.stage],
            )
        # all kernels must have run before the first receive occupies the GPU
        get_kind(model.device).synchronize()


@contextlib.contextmanager
def _restore_state(modules: Sequence[nn.Module], rules: UpdateRules) -> Iterator[None]:
    """Put back weights, gradients, buffers, modes, random states and the optimizer's state."""
    parameters = [p for stage in rules.stages.values() for p in stage.parameters]
    # one mapping for all stages: the optimizer's own
    state: Any = next(iter(rules.stages.values())).state
    saved_state = {
        p: {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in entries.items()}
        for p, entries in state.items()
    }
    saved = [(p, p.detach().clone(), p.grad) for p in parameters]
    with contextlib.ExitStack() as stack:
        for module in modules:
            stack.enter_context(restore_all(module))
        try:
            yield
        finally:
            # by a copy: the step has changed this memory
            for p, value, gradient in saved:
                p.data.copy_(value)
                p.grad = gradient
            # cleared first: a first step may have added entries to an empty state
            state.clear()
            state.update(saved_state)
