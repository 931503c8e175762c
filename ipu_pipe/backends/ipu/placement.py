"""Decide how PopTorch runs a job: its execution class for the method, the IPU of each stage, and
this process's replicas.

    stages         0   1   2   3   4                 backend.ipu.ipus: [0, 1, 1, 2, 3]
    IPUs           0 | 1   1 | 2 | 3                 F = 4 PopTorch stages in a forward, 2F - 1 = 7 in training

Neighboring stages on one IPU are one stage for PopTorch. Its pipeline fills, runs the microbatches
of one update and flushes. All passes read the newest weights, so gpipe and pipedream_flush give the
same weights and are the same execution. A local-parallel model, with a loss for each block, is
compiled as one graph.

Sources: PopTorch, branch sdk-release-3.4 (popart_compiler/source/CompilerImpl.cpp), and PopART
(willow/src/transforms/pipeline.cpp). Not run on hardware. Importing this module imports neither
torch nor PopTorch.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
from typing import Any, Callable, NamedTuple

from ipu_pipe.backends.ipu.config import IpuConfig
from ipu_pipe.errors import BadInput
from ipu_pipe.schedule.methods import Method, Reads, Structure, Timeline

# PopTorch's classes; a sharded model runs one stage at a time
SHARDED = "ShardedExecution"
PIPELINED = "PipelinedExecution"

# pipeline -> (PopTorch's class, whether it flushes before every update, whether its blocks have
# losses of their own)
EXECUTIONS = {
    Timeline.SEQUENTIAL: (SHARDED, True, False),
    Timeline.FILL_DRAIN: (PIPELINED, True, False),
    Timeline.ONE_F_ONE_B_FLUSH: (PIPELINED, True, False),
    Timeline.LOCAL: (PIPELINED, False, True),
}


def get_execution(method: Method) -> str | None:
    """Return PopTorch's class for the method, None if PopTorch does not run it.

    Every other field must have its default value, so that a field that is added to `Method` is
    refused until this table allows it.
    """
    execution, flushes, in_blocks = EXECUTIONS.get(method.pipeline, (None, False, False))
    blocks = method.structure
    supported = Method(
        method.name,
        method.pipeline,
        0,
        Reads.NEWEST,
        Reads.NEWEST,
        flushes,
        method.default_accumulate,
        method.source,
        structure=None if blocks is None else Structure(blocks.blocks, layers=blocks.layers),
        one_version=method.one_version,
    )
    return execution if method == supported and in_blocks == (blocks is not None) else None


def is_pipelined(method: Method) -> bool:
    """Tell whether PopTorch runs the method as a pipeline.

    A method that PopTorch does not run counts as one, so that its other faults are listed too.
    """
    return get_execution(method) != SHARDED


class Placement(NamedTuple):
    """The IPU of each stage: stage s is on IPU `ipu_by_stage[s]` of each replica."""

    ipu_by_stage: tuple[int, ...]

    @property
    def poptorch_stages(self) -> list[tuple[int, list[int]]]:
        """The stages that PopTorch counts, each as (IPU, its stages): neighboring stages on one IPU
        are one.
        """
        stages = enumerate(self.ipu_by_stage)
        return [
            (ipu, [stage for stage, _ in group])
            for ipu, group in itertools.groupby(stages, lambda pair: pair[1])
        ]

    @property
    def forward_stages(self) -> int:
        """The number of PopTorch's stages in a forward, F."""
        return len(self.poptorch_stages)

    @property
    def ipu_count(self) -> int:
        """The number of IPUs of one replica, including idle ones below the highest."""
        return max(self.ipu_by_stage) + 1

    @property
    def least_accumulation(self) -> int:
        """The fewest microbatches that an update may have: the number of PopTorch's stages in
        training, 2F - 1.
        """
        return 2 * self.forward_stages - 1

    def count_cycles(self, accumulation: int) -> int:
        """Return the pipeline cycles of an update with fill and flush; in a cycle every stage does
        a forward and a backward.
        """
        return accumulation + 2 * self.forward_stages - 2


def place_stages(ipu: IpuConfig, stages: int) -> Placement:
    """Place stage s on IPU s, unless `ipus` says otherwise."""
    return Placement(tuple(ipu.ipus) if ipu.ipus is not None else tuple(range(stages)))


def round_up_ipus(ipus: int) -> int:
    """Return the power of two that PopTorch attaches for that many IPUs."""
    return 1 << (ipus - 1).bit_length()


def is_under_poprun() -> bool:
    """Tell whether Graphcore's launcher started several processes; each then counts its own
    replicas.
    """
    if importlib.util.find_spec("popdist") is None:
        return False
    import popdist

    return bool(popdist.isPopdistEnvSet())


@functools.lru_cache(maxsize=None)
def initialize_popdist() -> None:
    """Call `popdist.init()`, once a process: nothing says that it may be called again."""
    import popdist

    popdist.init()


class PoprunShare(NamedTuple):
    """This process's replicas: `replicas` of them, from number `first` on.

    `make_options`: returns popdist's options for a number of IPUs per replica; None without poprun.
    """

    first: int
    replicas: int
    make_options: Callable[[int], Any] | None = None


def read_poprun_share(replicas: int) -> PoprunShare:
    """Return this process's share of the run's replicas: all without poprun. Raise `BadInput` if poprun
    started another number.
    """
    if not is_under_poprun():
        return PoprunShare(0, replicas)
    import popdist
    import popdist.poptorch

    initialize_popdist()
    local = popdist.getNumLocalReplicas()
    total = popdist.getNumTotalReplicas()
    if total != replicas:
        raise BadInput(
            f"replicas: {replicas}: poprun started {total} (--num-replicas): must be the same"
        )
    return PoprunShare(
        popdist.getInstanceIndex() * local,
        local,
        lambda ipus: popdist.poptorch.Options(ipus_per_replica=ipus),
    )
