"""Which device holds which stage of which replica, and what messages between them cost per byte.

Devices are numbered so that neighbours are close. Of the two ways to lay a pipeline's replicas out, one keeps the stages of a
replica together, the other the replicas of a stage:

    4 servers of 2, depth 4, width 2        stages together      0 1 | 2 3 | 0 1 | 2 3
                                            replicas together    0 0 | 1 1 | 2 2 | 3 3

Source: Narayanan et al. 2021 (PipeDream-2BW), section 4: expensive communication belongs on the links inside a server.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import List, NamedTuple, Tuple

from ipu_pipe.hardware.description import Hardware
from ipu_pipe.hardware.links import count_sharing, make_all_reduce, make_transfer
from ipu_pipe.schedule.clock import Transfer


@dataclass(frozen=True)
class ReplicaLayout:
    """`width` replicas of a pipeline of `depth` stages, the replicas of a stage or the stages of a replica together."""

    depth: int
    width: int
    replicas_together: bool

    def get_device(self, replica: int, stage: int) -> int:
        """Return the device of a replica's stage."""
        return stage * self.width + replica if self.replicas_together else replica * self.depth + stage

    def list_replicas(self, stage: int) -> List[int]:
        """Return the devices of all replicas of a stage."""
        return [self.get_device(replica, stage) for replica in range(self.width)]

    def map(self) -> List[List[int]]:
        """Return the device of each stage, replica by replica."""
        return [[self.get_device(replica, stage) for stage in range(self.depth)] for replica in range(self.width)]


def list_layouts(depth: int, width: int) -> Tuple[ReplicaLayout, ...]:
    """Return the layouts that differ."""
    stages = ReplicaLayout(depth, width, False)
    return (stages,) if depth == 1 or width == 1 else (stages, ReplicaLayout(depth, width, True))


def make_boundary_transfer(hardware: Hardware, layout: ReplicaLayout, stage: int, back: bool = False) -> Transfer:
    """Return the transfer of one byte from `stage` to the next, or back, while every replica sends one; the slowest replica's."""
    ends = (stage + 1, stage) if back else (stage, stage + 1)
    flows = [(layout.get_device(r, ends[0]), layout.get_device(r, ends[1])) for r in range(layout.width)]
    sharing = count_sharing(hardware, flows)
    transfers = [make_transfer(hardware, *flow, 1.0, at_once) for flow, at_once in zip(flows, sharing)]
    return max(transfers, key=lambda transfer: (transfer.seconds, transfer.latency))


class BoundaryTransfers(NamedTuple):
    """The transfers of one byte across each boundary between stages, onward and back."""

    onward: List[Transfer]
    back: List[Transfer]


def make_transfers(hardware: Hardware, layout: ReplicaLayout) -> BoundaryTransfers:
    """Return the transfers of all boundaries of a layout."""
    inner = range(layout.depth - 1)
    return BoundaryTransfers(
        [make_boundary_transfer(hardware, layout, s) for s in inner],
        [make_boundary_transfer(hardware, layout, s, back=True) for s in inner],
    )


def make_reduce_transfer(hardware: Hardware, layout: ReplicaLayout, stage: int, size: float) -> Transfer:
    """Return the all-reduce of `size` bytes of gradients among the replicas of a stage."""
    return make_all_reduce(hardware, layout.list_replicas(stage), size)


def scale_transfer(per_byte: Transfer, size: float) -> Transfer:
    """Return the transfer of `size` bytes from that of one byte."""
    return per_byte._replace(seconds=per_byte.seconds * size)
