"""Read the process groups of a run from its profiler's files: which ranks may form a pipeline.

A mesh of several dimensions has a group for each row of each dimension, and PyTorch records all of
them (`distributedInfo.pg_config`). Groups of one shape divide the ranks; one such partition is the
pipelines, another one the replicas or shards. Their names are the user's, so that the messages
decide which is which (`trace.pipelining`).

    mesh (pp, dp) of 4 ranks     0 1     groups (0, 2) (1, 3): two pipelines
                                 2 3            (0, 1) (2, 3): two stages with two replicas each
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any, Iterator, List, Sequence, Tuple

import numpy as np

from ipu_pipe.trace.events import Events
from ipu_pipe.trace.kineto import RankRecords, encode_local

# groups that together hold each rank once, in the order of the ranks within each group
Partition = List[Tuple[int, ...]]
MOST_RANKS = 1 << 20


def list_partitions(ranks: Sequence[int], records: Sequence[RankRecords]) -> list[Partition]:
    """Return the ways in which the process groups divide the ranks, small groups first; one group
    of all ranks is among them. A group may have ranks whose files are missing.
    """
    groups_by_shape = defaultdict(set)
    for group in (group for of_rank in records for group in _read_groups(of_rank.keys)):
        # the groups of one dimension of a mesh have their ranks at equal distances
        groups_by_shape[tuple(rank - group[0] for rank in group)].add(group)
    partitions = []
    for groups in groups_by_shape.values():
        members = sorted(rank for group in groups for rank in group)
        # each rank once, and none of the trace's ranks missing
        if members == sorted({*members, *ranks}):
            partitions.append(sorted(groups))
    if not any(len(groups) == 1 for groups in partitions):
        partitions.append([tuple(sorted(ranks))])
    return sorted(partitions, key=lambda groups: len(groups[0]))


def _read_groups(keys: dict[str, Any]) -> Iterator[tuple[int, ...]]:
    """Yield the groups of several ranks that a file lists."""
    info = keys.get("distributedInfo")
    listed = info.get("pg_config") if isinstance(info, dict) else None
    for group in listed if isinstance(listed, list) else ():
        ranks = group.get("ranks") if isinstance(group, dict) else None
        if isinstance(ranks, list) and len(ranks) > 1:
            # by type: True is no rank
            if all(type(rank) is int and 0 <= rank < MOST_RANKS for rank in ranks):
                yield tuple(ranks)


def resolve_peers(events: Events, group: Sequence[int] | None) -> Events:
    """Return a rank's events with the ranks of peers that are recorded as places in the group; with
    -1 where the group is not known.
    """
    # (events,): peers that are known are taken for place 0 here, and not used
    place = encode_local(np.minimum(events.peer, -2))
    # a place beyond the group is of a larger one, of all ranks
    rank_at = np.arange(max(int(place.max(initial=0)), len(group or ())) + 1)
    rank_at[: len(group or ())] = group or ()
    peer = np.where(events.peer < -1, rank_at[place] if group else -1, events.peer)
    return events._replace(peer=peer.astype(np.int32))
