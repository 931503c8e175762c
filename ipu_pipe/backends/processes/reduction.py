"""Gradients averaged over the replicas of a stage before each update, on the device where they are.

    exact   gathered, and added up in the order of the replicas: the emulator's bits
    fast    added up by the backend's own all-reduce, in buckets, each begun as soon as its gradients are there

    the last backward of an update      layer 4 | layer 3 | layer 2 | layer 1 | U
    fast                                         [ bucket of 4, 3 ]  [ of 2, 1 ]

A GPU's gradients stay there where replicas have nccl (`cuda.make_channels`), and go through the host's memory otherwise.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any, Dict, Iterator, List, NamedTuple, Sequence, Set, Tuple

import torch

from ipu_pipe.backends.processes.mail import Mail
from ipu_pipe.errors import RunFault

BUCKET_BYTES = 4 << 20


class ReplicaGroup(NamedTuple):
    """The ranks of a stage in all replicas: a process group of gloo, one of nccl (None where gradients go through the host),
    and whether their sum is the backend's own."""

    host: Any
    device: Any = None
    is_fast: bool = False

    @property
    def of_gradients(self) -> Any:
        """The process group that the gradients go through."""
        return self.host if self.device is None else self.device


def average_over_replicas(parameters: Sequence[torch.nn.Parameter], mail: Mail, group: ReplicaGroup) -> None:
    """Replace gradients by their mean over the ranks of a group, added up in the order of the replicas.

    A gradient that a rank does not have is zero there; one that none has stays None. One message a dtype.
    """
    has_gradient = torch.tensor([p.grad is not None for p in parameters], dtype=torch.int32)
    somewhere = torch.stack(mail.all_gather(has_gradient, group.host)).amax(dim=0)
    chosen = [p for p, reached in zip(parameters, somewhere.tolist()) if reached]
    for dtype in dict.fromkeys(p.dtype for p in chosen):
        of_dtype = [p for p in chosen if p.dtype == dtype]
        flat = _flatten(of_dtype, group)
        replicas = mail.all_gather(flat, group.of_gradients)
        mean = (functools.reduce(torch.add, replicas) / len(replicas)).to(of_dtype[0].device)
        for p, part in zip(of_dtype, mean.split([p.numel() for p in of_dtype])):
            p.grad = part.view_as(p)


def _flatten(parameters: Sequence[torch.nn.Parameter], group: ReplicaGroup) -> torch.Tensor:
    """Return all gradients in one tensor, on the device if the group is there, else on the host."""
    flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in parameters])
    return flat if group.device is not None else flat.cpu()


class OverlappedAverage:
    """Replaces a stage's gradients by their mean over its replicas, by all-reduces that run beside its last backward.

    `microbatches`: whose gradients make an update. Every rank begins the buckets in the same order, whichever gradients come
    first or not at all, as PyTorch's DistributedDataParallel does (Li et al. 2020, section 3.2.3). `begins_early`: false where a
    rule corrects the gradients of a whole pass, which are final at its end alone.
    """

    def __init__(
        self, parameters: Sequence[torch.nn.Parameter], mail: Mail, group: ReplicaGroup, microbatches: int,
        bucket_bytes: int = BUCKET_BYTES, begins_early: bool = True,
    ) -> None:  # fmt: skip
        self._mail, self._group, self._microbatches = mail, group, microbatches
        self._buckets = divide_into_buckets(parameters, bucket_bytes)
        self._bucket_of = {p: number for number, bucket in enumerate(self._buckets) for p in bucket}
        self._passes = 0  # of the next update, so far
        self._awaited: List[Set[torch.nn.Parameter]] = []  # in the last pass: by bucket, gradients still to come
        self._begun: List[Tuple[torch.Tensor, Any]] = []  # by bucket, its sum and the work that makes it
        trained = [p for p in self._bucket_of if begins_early and p.requires_grad]
        self._hooks = [p.register_post_accumulate_grad_hook(self._note) for p in trained]

    @contextlib.contextmanager
    def add_pass(self) -> Iterator[None]:
        """Count the pass inside, which adds the gradients of a microbatch; in an update's last, begin the sums."""
        self._passes += 1
        is_last = self._passes == self._microbatches
        if is_last:
            self._awaited = [set(bucket) for bucket in self._buckets]
        yield
        # parameters whose gradient autograd has not reported by now are unused, or get it without autograd
        if is_last:
            self._awaited = [set() for _ in self._buckets]
            self._begin()
            self._awaited = []

    def _note(self, p: torch.nn.Parameter) -> None:
        """Note that autograd has added to a gradient."""
        if not self._awaited:
            return
        number = self._bucket_of[p]
        if number < len(self._begun):
            raise RunFault(
                f"reduction: fast: a gradient of shape {tuple(p.shape)} comes in several parts in one backward (as of a reentrant"
                " checkpoint), the later after its sum over the replicas had begun: use reduction: exact"
            )
        self._awaited[number].discard(p)
        self._begin()

    def _begin(self) -> None:
        """Begin the sums of the next buckets of which nothing is awaited any more."""
        while len(self._begun) < len(self._buckets) and not self._awaited[len(self._begun)]:
            bucket = self._buckets[len(self._begun)]
            # whether there is a gradient goes along, as a number behind each
            is_there = torch.tensor([float(p.grad is not None) for p in bucket], dtype=bucket[0].dtype)
            gradients = _flatten(bucket, self._group)
            total = torch.cat([gradients, is_there.to(gradients.device)])
            self._begun.append((total, self._mail.begin_sum(total, self._group.of_gradients)))
            for p in bucket:
                p.grad = None

    def finish(self) -> None:
        """Wait for the sums and put the means into the gradients."""
        group = self._group.of_gradients
        count = torch.distributed.get_world_size(group)
        for bucket, (total, work) in zip(self._buckets, self._begun):
            self._mail.wait_for_all(work, group)
            *sums, replicas_with = (total / count).to(bucket[0].device).split([*(p.numel() for p in bucket), len(bucket)])
            for p, mean, share in zip(bucket, sums, replicas_with.tolist()):
                p.grad = mean.view_as(p) if share else None
        self._passes, self._begun = 0, []

    def remove_hooks(self) -> None:
        """Take the hooks off the parameters."""
        for hook in self._hooks:
            hook.remove()


def divide_into_buckets(parameters: Sequence[torch.nn.Parameter], most_bytes: int) -> List[List[torch.nn.Parameter]]:
    """Divide parameters, the last first, as backwards reach them, into buckets of one dtype and of at most so many bytes.

    A parameter that is larger has a bucket of its own.
    """
    buckets: List[List[torch.nn.Parameter]] = []
    open_buckets: Dict[torch.dtype, Tuple[List[torch.nn.Parameter], int]] = {}
    for p in reversed(parameters):
        bucket, size = open_buckets.get(p.dtype, ([], most_bytes))
        bytes_ = p.numel() * p.element_size()
        if size + bytes_ > most_bytes:
            bucket, size = [], 0
            buckets.append(bucket)
        bucket.append(p)
        open_buckets[p.dtype] = bucket, size + bytes_
    return buckets
