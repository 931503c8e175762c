"""List the candidates of a plan (width, depth, microbatch, accumulation, recomputation), and the
layouts of their replicas.

A candidate uses all devices as w replicas of a pipeline of d devices. Its global batch, microbatch
x accumulation x w, is at most the greatest that the user allows. Devices are numbered so that
neighbours are close. There are two layouts: the stages of a replica together, or the replicas of a
stage together:

    4 servers of 2, depth 4, width 2        stages together      0 1 | 2 3 | 0 1 | 2 3
                                            replicas together    0 0 | 1 1 | 2 2 | 3 3

Source: Narayanan et al. 2021 (PipeDream-2BW), section 4: expensive communication belongs on the
links inside a server.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import Callable, Iterator, NamedTuple, Sequence

from ipu_pipe.errors import raise_faults
from ipu_pipe.hardware.description import Hardware, count_sharing, make_transfer
from ipu_pipe.schedule.clock import Transfer
from ipu_pipe.schedule.methods import METHODS, Method, Reads, Timeline
from ipu_pipe.text import show, suggest

# without zb_auto, which searches for each order and would take a third of a plan's time;
# `--methods` may name it
BY_DEVICE = (
    "interleaved_1f1b",
    "zb_h1",
    "zb_h2",
    "interleaved_zb",
    "zbv",
    "v_half",
    "v_min",
    "dualpipe_v",
)
USUAL = ("pipedream_2bw", "pipedream_flush", "gpipe", *BY_DEVICE)
IN_LOCKSTEP = ("pipedream_flush",)
# no pipeline; a file of one size; as slow as interleaved_1f1b with the activations of the whole
# batch
UNPLANNED = ("naive", "rows", "looped_bfs")
# methods in which a stage is a block
LOCAL = ("local_greedy", "local_chunked")
# the numbers of stages on a device that are tried if stages are placed in turn
INTERLEAVED = (2, 3, 4)
# the most stages of a replica for methods that are given by each device's order of passes
MOST_STAGES = 32


# a candidate has no row of its own, and asks for it many times
@lru_cache(maxsize=None)
def get_method(name: str, stages_per_device: int, schedule: Timeline | None = None) -> Method:
    """Return a method's row with `stages_per_device`; `schedule`: instead of the method's own."""
    row = METHODS[name] if schedule is None else replace(METHODS[name], pipeline=schedule)
    return (
        replace(row, order=replace(row.order, stages_per_device=stages_per_device))
        if row.order is not None
        else row
    )


def list_schedules(row: Method) -> tuple[Timeline | None, ...]:
    """Return the schedules with which a method is planned, None for its own; the first of equally
    fast ones is taken.

    1F1B with a cap on every stage holds fewer activations than 1F1B with a cap on the first, mostly
    in the same time.
    """
    return (Timeline.ONE_F_ONE_B_CAPPED, None) if row.pipeline is Timeline.ONE_F_ONE_B else (None,)


@dataclass(frozen=True)
class Candidate:
    """A configuration without the boundaries of its stages: `width` replicas of a pipeline of
    `depth` devices.

    `recompute`: the backward recomputes activations from each stage's input. `schedule`: instead of
    the method's own, as in a config's method_args.
    """

    method: str
    depth: int
    width: int
    micro_batch_size: int
    gradient_accumulation: int
    recompute: bool
    stages_per_device: int = 1
    schedule: Timeline | None = None

    @property
    def method_row(self) -> Method:
        """Return the method: its row of METHODS with the candidate's schedule and stages per
        device.
        """
        return get_method(self.method, self.stages_per_device, self.schedule)

    @property
    def stages(self) -> int:
        """Return the number of stages of a replica."""
        return self.depth * self.stages_per_device

    @property
    def placement(self) -> tuple[int, ...]:
        """Return the device of each stage, numbered within its replica."""
        order = self.method_row.order
        return tuple(range(self.depth)) if order is None else order.place(self.stages)

    @property
    def devices(self) -> int:
        """Return the number of devices of all replicas."""
        return self.depth * self.width

    @property
    def shape(self) -> tuple[str, int, int, int, bool]:
        """Return all fields but the microbatch, the accumulation and the schedule."""
        return self.method, self.depth, self.stages_per_device, self.width, self.recompute

    @property
    def global_batch_size(self) -> int:
        """Return the samples of an update."""
        return self.micro_batch_size * self.gradient_accumulation * self.width


def list_candidates(
    methods: Sequence[str],
    devices: int,
    units: int,
    greatest_batch: int,
    recomputes: Sequence[bool] = (False, True),
) -> Iterator[Candidate]:
    """Yield all configurations of a model of `units` units on all `devices`, for updates of at most
    `greatest_batch` samples.

    Microbatches are powers of two; the accumulation fills the batch. A single stage is not a
    pipeline: it is planned once, for the first of the methods.
    """
    for depth in (d for d in range(1, min(devices, units) + 1) if devices % d == 0):
        width = devices // depth
        for size in list_powers_of_two(greatest_batch // width):
            for method in methods if depth > 1 else methods[:1]:
                # a single stage has no order to choose
                schedules = list_schedules(METHODS[method]) if depth > 1 else (None,)
                for v in _list_stages_per_device(METHODS[method], depth, units):
                    for accumulate in _list_accumulations(
                        get_method(method, v), depth, greatest_batch // (size * width)
                    ):
                        for recompute, schedule in product(recomputes, schedules):
                            yield Candidate(
                                method, depth, width, size, accumulate, recompute, v, schedule
                            )


def _list_stages_per_device(row: Method, depth: int, units: int) -> list[int]:
    """Return the numbers of stages that each device may have; methods with generated orders have at
    most MOST_STAGES in all.
    """
    if row.order is None:
        return [1]
    tried = (row.order.stages_per_device,) if row.order.fixed else INTERLEAVED
    return [v for v in tried if depth * v <= min(units, MOST_STAGES)]


def _list_accumulations(row: Method, depth: int, most: int) -> list[int]:
    """Return the microbatches per update to try: the most that the batch holds.

    GPipe holds the activations of all of them and may do with fewer; two weight versions (2BW) need
    as many as stages. Methods by device are tried with two microbatches for each device at least,
    interleaved stages with whole rounds.
    """
    if row.forward_reads is Reads.DOUBLE_BUFFERED and most < depth:
        return []
    if row.order is not None:
        if most < 2 * depth:
            return []
        return [
            # interleaved stages run whole rounds of devices
            most - most % depth if not row.order.is_v and not row.order.fixed else most
        ]
    if row.pipeline is Timeline.FILL_DRAIN:
        # its halves: with fewer microbatches fewer activations are kept
        return [most >> k for k in range(most.bit_length())]
    return [most]


def list_powers_of_two(most: int) -> list[int]:
    """Return 1, 2, 4, ..., up to `most`."""
    return [1 << k for k in range(most.bit_length())]


def choose_methods(
    configured: str,
    asked: Sequence[str] | None,
    lockstep: bool,
    say: Callable[[str], None] = lambda text: None,
) -> list[str]:
    """Return the methods to rank: `asked` if given, else the `configured` one, if the planner
    supports it, and the usual ones.

    Devices in lock-step have only the methods that they run. Raise `BadInput` for a method that the
    planner does not support.
    """
    pipelines = [name for name, row in METHODS.items() if row.is_pipeline and name not in UNPLANNED]
    planned = [*pipelines, *LOCAL]
    if asked is not None:
        faults = [
            f"--methods: {show(name)}: must be of {', '.join(planned)}{suggest(name, planned)}"
            for name in asked
            if name not in planned
        ]
        faults += [
            f"--methods: {name}: devices in lock-step, such as IPUs, cannot run it: must be of "
            f"{', '.join(IN_LOCKSTEP)}"
            for name in asked
            # PopTorch's pipelines have no generated orders
            if lockstep and name in planned and METHODS[name].order is not None
        ]
        raise_faults(faults)
        return list(asked)
    row = METHODS.get(configured)
    if (row is None or row.structure is not None) and configured not in LOCAL:
        planned_instead = "other methods" if row is None else "pipelines of one loss"
        say(f"method: {configured}: unsupported by the planner: planning {planned_instead} instead")
    first = [configured] if configured in (LOCAL if lockstep else planned) else []
    return list(dict.fromkeys([*first, *(IN_LOCKSTEP if lockstep else USUAL)]))


# ---- layouts


@dataclass(frozen=True)
class ReplicaLayout:
    """The devices of `width` replicas of a pipeline of `depth` devices.

    `replicas_together`: neighbouring devices have the same stage; otherwise they have neighbouring
    stages of a replica. `placement`: the device of each stage, numbered within its replica; empty
    if each device has one stage.
    """

    depth: int
    width: int
    replicas_together: bool
    placement: tuple[int, ...] = ()

    @property
    def stages(self) -> int:
        """Return the number of stages of a replica."""
        return len(self.placement) or self.depth

    def get_device(self, replica: int, stage: int) -> int:
        """Return the device of a replica's stage."""
        position = self.placement[stage] if self.placement else stage
        return (
            position * self.width + replica
            if self.replicas_together
            else replica * self.depth + position
        )

    def list_replicas(self, stage: int) -> list[int]:
        """Return the devices of all replicas of a stage."""
        return [self.get_device(replica, stage) for replica in range(self.width)]

    def list_devices(self) -> list[list[int]]:
        """Return the device of each stage by replica."""
        return [
            [self.get_device(replica, stage) for stage in range(self.stages)]
            for replica in range(self.width)
        ]


def list_layouts(
    depth: int, width: int, placement: tuple[int, ...] = ()
) -> tuple[ReplicaLayout, ...]:
    """Return the layouts of `width` replicas; both are the same if there is one replica or a
    pipeline of one device.
    """
    stages_together = ReplicaLayout(depth, width, False, placement)
    if depth == 1 or width == 1:
        return (stages_together,)
    return stages_together, ReplicaLayout(depth, width, True, placement)


def make_boundary_transfer(
    hardware: Hardware, layout: ReplicaLayout, stage: int, back: bool = False
) -> Transfer:
    """Return the transfer of one byte from `stage` to the next, or `back`, while every replica
    sends one: the slowest of them.
    """
    # a link may have another speed in each direction
    ends = (stage + 1, stage) if back else (stage, stage + 1)
    flows = [
        (layout.get_device(r, ends[0]), layout.get_device(r, ends[1])) for r in range(layout.width)
    ]
    # both stages are on one device
    if flows[0][0] == flows[0][1]:
        return Transfer()
    sharing = count_sharing(hardware, flows)
    transfers = [
        make_transfer(hardware, *flow, 1.0, at_once) for flow, at_once in zip(flows, sharing)
    ]
    return max(transfers, key=lambda transfer: (transfer.seconds, transfer.latency))


class BoundaryTransfers(NamedTuple):
    """The transfers of one byte across each boundary between stages, onward and back."""

    onward: list[Transfer]
    back: list[Transfer]


def make_transfers(hardware: Hardware, layout: ReplicaLayout) -> BoundaryTransfers:
    """Return the transfers of all boundaries of a layout."""
    inner = range(layout.stages - 1)
    return BoundaryTransfers(
        [make_boundary_transfer(hardware, layout, s) for s in inner],
        [make_boundary_transfer(hardware, layout, s, back=True) for s in inner],
    )


def scale_transfer(per_byte: Transfer, size: float) -> Transfer:
    """Return the transfer of `size` bytes, given the transfer of one byte."""
    # a latency does not grow with the size
    return per_byte._replace(seconds=per_byte.seconds * size)
