"""The ranks of one pipeline: torch.distributed's calls, with ranks counted within its column.

A caller may run a pipeline on a part of the processes, such as one dimension of a DeviceMesh:

                 data 0   data 1
    stage 0      rank 0   rank 1       a column: ranks 0 and 2, numbered 0 and 1 here
    stage 1      rank 2   rank 3       a data group: ranks 0 and 1, which hold the same stage

Without a column all processes are one pipeline, and its ranks are the global ones. Messages to
people name global ranks (`name_rank`).
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Column:
    """A process group for the stages, its global ranks in order, and the group of the ranks that
    hold the same stages in the other columns, if there are any.
    """

    group: Any
    ranks: tuple[int, ...]
    data_group: Any = None


# of the pipeline whose call runs now
_column: Column | None = None


def make_column(group: Any, data_group: Any) -> Column | None:
    """Return the column of a process group; None if it is the default group, alone."""
    if group is None and data_group is None:
        return None
    stages = dist.group.WORLD if group is None else group
    return Column(stages, tuple(dist.get_process_group_ranks(stages)), data_group)


@contextlib.contextmanager
def enter(column: Column | None) -> Iterator[None]:
    """Count ranks within a column inside the context."""
    global _column
    before = _column
    _column = column
    # put back, because a process may have pipelines in several columns
    try:
        yield
    finally:
        _column = before


def get_data_group() -> Any:
    """Return the group of the ranks that hold this rank's stages in all columns, None if there is
    none.
    """
    return None if _column is None else _column.data_group


def get_replica() -> int:
    """Return the number of this column among those of the data group."""
    group = get_data_group()
    return 0 if group is None else dist.get_rank(group)


def count_devices(replicas: int) -> int:
    """Return the number of devices of a pipeline: the replicas of a data group are other columns."""
    world = get_world_size()
    return world if get_data_group() is not None else world // replicas


def name_rank(rank: int) -> int:
    """Return the global number of a rank of this pipeline."""
    return rank if _column is None else _column.ranks[rank]


def list_names() -> list[int]:
    """List the global numbers of all ranks of this pipeline."""
    return [name_rank(rank) for rank in range(get_world_size())]


# ---- torch.distributed's calls


def get_rank(group: Any = None) -> int:
    """Return this process's rank in a group, by default the pipeline."""
    return dist.get_rank(_choose(group))


def get_world_size(group: Any = None) -> int:
    """Return the number of ranks of a group, by default the pipeline."""
    return dist.get_world_size(_choose(group))


def isend(tensor: torch.Tensor, target: int, group: Any = None, tag: int = 0) -> Any:
    """Begin to send a tensor to a rank of the pipeline."""
    return dist.isend(tensor, name_rank(target), _choose(group), tag)


def irecv(tensor: torch.Tensor, source: int, group: Any = None, tag: int = 0) -> Any:
    """Begin to receive a tensor from a rank of the pipeline."""
    return dist.irecv(tensor, name_rank(source), _choose(group), tag)


def send(tensor: torch.Tensor, target: int, tag: int = 0) -> None:
    """Send a tensor to a rank of the pipeline."""
    dist.send(tensor, name_rank(target), _choose(None), tag)


def recv(tensor: torch.Tensor, source: int, tag: int = 0) -> None:
    """Receive a tensor from a rank of the pipeline."""
    dist.recv(tensor, name_rank(source), _choose(None), tag)


def all_gather(tensors: list[torch.Tensor], tensor: torch.Tensor, group: Any = None) -> Any:
    """Begin to gather a tensor of each rank of a group."""
    # asynchronous, because only the wait for a work takes a limit
    return dist.all_gather(tensors, tensor, group=_choose(group), async_op=True)


def begin_sum(tensor: torch.Tensor, group: Any = None) -> Any:
    """Begin to add up the tensors of all ranks of a group, in place."""
    return dist.all_reduce(tensor, group=_choose(group), async_op=True)


def all_gather_object(values: list[Any], value: Any) -> None:
    """Gather a value of each rank of the pipeline."""
    dist.all_gather_object(values, value, group=_choose(None))


def all_reduce_max(tensor: torch.Tensor) -> None:
    """Replace a tensor by its maximum over the ranks of the pipeline."""
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=_choose(None))


def broadcast_object_list(values: list[Any], source: int, group: Any = None) -> None:
    """Send the values of a rank of the pipeline to all its ranks."""
    # torch counts `src` and `dst` over all processes, even within a group
    dist.broadcast_object_list(values, src=name_rank(source), group=_choose(group))


def broadcast_from_first_column(values: list[Any]) -> None:
    """Send the values of the first column to the ranks of this stage in the others."""
    group = get_data_group()
    if group is not None:
        dist.broadcast_object_list(values, src=dist.get_process_group_ranks(group)[0], group=group)


def gather_object(value: Any, values: list[Any] | None, group: Any) -> None:
    """Gather a value of each rank of the pipeline on its first rank."""
    dist.gather_object(value, values, dst=name_rank(0), group=group)


def list_global_ranks(group: Any) -> list[int]:
    """Return the global ranks of a group."""
    return list(dist.get_process_group_ranks(group))


def new_group(ranks: Sequence[int], **how: Any) -> Any:
    """Return a new group of ranks of this pipeline, which all of them make."""
    if _column is None:
        return dist.new_group(list(ranks), **how)
    # by default torch waits for all processes, and those of other columns do not call this
    return dist.new_group(
        [name_rank(rank) for rank in ranks], use_local_synchronization=True, **how
    )


def end_group(group: Any) -> None:
    """End a group of `new_group`.

    That of a column stays until the process ends: torch names it by its ranks and the number of
    groups alive, so that the next pipeline's group would have its name, and find its addresses.
    """
    if _column is None:
        dist.destroy_process_group(group)


def set_timeouts(limits: Mapping[Any, timedelta]) -> None:
    """Give each process group the limit of its later collectives."""
    for group, limit in limits.items():
        # torch has no public way to change the limit of a group that exists
        dist.distributed_c10d._set_pg_timeout(limit, group)


def get_timeout(group: Any) -> timedelta:
    """Return the limit of a group's collectives."""
    # torch has no public way to read a group's timeout
    timeout: timedelta = group._get_backend(group._device_types[0]).options._timeout
    return timeout


def get_store() -> Any:
    """Return the store of all processes."""
    return dist.distributed_c10d._get_default_store()


def get_own_store() -> Any:
    """Return the part of the store that the pipeline's own ranks use."""
    if _column is None:
        return get_store()
    # columns count evaluations each by themselves, under the same keys
    return dist.PrefixStore("column/" + "-".join(map(str, _column.ranks)), get_store())


def _choose(group: Any) -> Any:
    return _column.group if group is None and _column is not None else group
