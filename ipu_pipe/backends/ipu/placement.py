"""How PopTorch runs a method, the IPU of each stage, the pipeline that they make, and the replicas of this process.

    stages         0   1   2   3   4                 ipus: [0, 1, 1, 2, 3]
    IPUs           0 | 1   1 | 2 | 3                 F = 4 forward stages, 2F - 1 = 7 stages in training

A pipeline of PopTorch's is filled, runs the microbatches of one update and is flushed: every pass reads the newest weights, and
all orders of forwards and backwards in between come to the same. Blocks with losses of their own are one graph in it.

Sources: PopTorch, branch sdk-release-3.4 (popart_compiler/source/CompilerImpl.cpp), and PopART
(willow/src/transforms/pipeline.cpp). Not run on hardware. No torch and no PopTorch is imported here.
"""

from __future__ import annotations

import importlib.util
from typing import Any, Callable, List, NamedTuple, Optional, Tuple

from ipu_pipe.backends.ipu.config import IpuConfig
from ipu_pipe.config.schema import Config
from ipu_pipe.errors import BadInput
from ipu_pipe.schedule.methods import Method, Pipeline, Reads, Structure

SHARDED, PIPELINED = "ShardedExecution", "PipelinedExecution"  # PopTorch's classes; sharded: one stage at a time

# pipeline -> how PopTorch runs it, whether it is flushed before every update, whether its blocks have losses of their own
RUNS = {
    Pipeline.SEQUENTIAL: (SHARDED, True, False),
    Pipeline.FILL_DRAIN: (PIPELINED, True, False),
    Pipeline.ONE_F_ONE_B_FLUSH: (PIPELINED, True, False),
    Pipeline.LOCAL: (PIPELINED, False, True),
}


def get_execution(method: Method) -> Optional[str]:
    """Return how PopTorch runs the method; None where no row says that it does. What a row does not state must be as in a plain
    method, so that a new field of methods is refused where it says anything."""
    execution, flushes, in_blocks = RUNS.get(method.pipeline, (None, False, False))
    blocks = method.structure
    runs = Method(
        method.name, method.pipeline, 0, Reads.NEWEST, Reads.NEWEST, flushes, method.default_accumulate, method.source,
        structure=None if blocks is None else Structure(blocks.blocks, layers=blocks.layers), one_version=method.one_version,
    )  # fmt: skip
    return execution if method == runs and in_blocks == (blocks is not None) else None


def is_pipelined(method: Method) -> bool:
    """Tell whether PopTorch runs the method as a pipeline. A method that it does not run is judged as one, so that its other
    faults are told, too."""
    return get_execution(method) != SHARDED


class Placement(NamedTuple):
    """Stage s on IPU `ipu_of[s]` of each replica."""

    ipu_of: Tuple[int, ...]

    @property
    def runs(self) -> List[Tuple[int, List[int]]]:
        """List (IPU, stages): neighbouring stages on one IPU are one of PopTorch's stages."""
        runs: List[Tuple[int, List[int]]] = []
        for stage, ipu in enumerate(self.ipu_of):
            if runs and runs[-1][0] == ipu:
                runs[-1][1].append(stage)
            else:
                runs.append((ipu, [stage]))
        return runs

    @property
    def forward_stages(self) -> int:
        """Count F: how often the IPU changes in a forward, plus one."""
        return len(self.runs)

    @property
    def ipus(self) -> int:
        """Count the IPUs of one replica, idle ones below the highest included."""
        return max(self.ipu_of) + 1

    @property
    def least_accumulation(self) -> int:
        """Count the microbatches that an update of a pipeline needs: as many as it has stages in training, 2F - 1."""
        return 2 * self.forward_stages - 1

    def cycles(self, accumulation: int) -> int:
        """Count the pipeline cycles of an update, fill and flush included: a cycle holds a forward and a backward of every
        stage."""
        return accumulation + 2 * self.forward_stages - 2


def place_stages(ipu: IpuConfig, stages: int) -> Placement:
    """Stage s on IPU s, unless `ipus` says otherwise."""
    return Placement(tuple(ipu.ipus) if ipu.ipus is not None else tuple(range(stages)))


def round_up_ipus(ipus: int) -> int:
    """Return the power of two that PopTorch attaches for that many IPUs."""
    return 1 << (ipus - 1).bit_length()


def is_under_poprun() -> bool:
    """Tell whether Graphcore's launcher started several processes; each then counts its own replicas."""
    if importlib.util.find_spec("popdist") is None:
        return False
    import popdist

    return bool(popdist.isPopdistEnvSet())


class Instance(NamedTuple):
    """This process's share: replicas `first` to `first + replicas`. `base`: makes popdist's options, None without poprun."""

    first: int
    replicas: int
    base: Optional[Callable[[int], Any]] = None


def read_instance(config: Config) -> Instance:
    """Return this process's share of the run. Raise `BadInput` if poprun started another number of replicas."""
    if not is_under_poprun():
        return Instance(0, config.replicas)
    import popdist
    import popdist.poptorch

    popdist.init()
    local, total = popdist.getNumLocalReplicas(), popdist.getNumTotalReplicas()
    if total != config.replicas:
        raise BadInput(f"replicas: {config.replicas}: poprun started {total} (--num-replicas): must be the same")
    return Instance(
        popdist.getInstanceIndex() * local, local, lambda ipus: popdist.poptorch.Options(ipus_per_replica=ipus)
    )
