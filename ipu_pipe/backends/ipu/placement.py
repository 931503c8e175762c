"""The methods that PopTorch runs, the IPU of each stage, and the pipeline that they make.

    stages         0   1   2   3   4                 ipus: [0, 1, 1, 2, 3]
    IPUs           0 | 1   1 | 2 | 3                 F = 4 forward stages, 2F - 1 = 7 stages in training

A pipeline of PopTorch's is filled, runs the microbatches of one update and is flushed: every pass reads the newest weights, and
all orders of forwards and backwards in between come to the same. Blocks with losses of their own are one graph in it.

Sources: PopTorch, branch sdk-release-3.4 (popart_compiler/source/CompilerImpl.cpp), and PopART
(willow/src/transforms/pipeline.cpp). Not run on hardware.
"""

from __future__ import annotations

import importlib.util
from dataclasses import fields, replace
from enum import Enum
from typing import List, NamedTuple, Optional, Tuple

from ipu_pipe.backends.ipu.config import IpuConfig, show_key
from ipu_pipe.config.schema import Config
from ipu_pipe.schedule.methods import Method, Pipeline, Reads, Structure


class Execution(str, Enum):
    """PopTorch's execution strategies, by the names of their classes."""

    SHARDED = "ShardedExecution"  # one stage at a time
    PIPELINED = "PipelinedExecution"


class Runs(NamedTuple):
    """A row: methods with this pipeline and these reads, by `execution`. `flushes`: before every update. `blocks`: these have
    losses of their own, and no layer is in two of them."""

    pipeline: Pipeline
    forward_reads: Reads
    backward_reads: Reads
    flushes: bool
    blocks: bool
    execution: Execution


RUNS = (
    Runs(Pipeline.SEQUENTIAL, Reads.NEWEST, Reads.NEWEST, True, False, Execution.SHARDED),
    Runs(Pipeline.FILL_DRAIN, Reads.NEWEST, Reads.NEWEST, True, False, Execution.PIPELINED),
    Runs(Pipeline.ONE_F_ONE_B_FLUSH, Reads.NEWEST, Reads.NEWEST, True, False, Execution.PIPELINED),
    Runs(Pipeline.LOCAL, Reads.NEWEST, Reads.NEWEST, False, True, Execution.PIPELINED),
)
_FREE = (
    "name",
    "source",
    "default_accumulate",
    "structure",
    "one_version",
)  # of a method's fields: alter nothing here, or judged apart
_NEAREST = {
    "pipedream": "pipedream_flush (1F1B with a flush), or local_greedy, whose blocks wait for no gradient",
    "pipedream_2bw": "pipedream_flush with a larger gradient_accumulation",
    "pipemare": "pipedream_flush, or local_greedy",
    "pipelined_backprop": "pipedream_flush, or local_greedy",
    "spectrain": "pipedream_flush, or local_greedy",
    "local_overlapping": "local_greedy, or local_chunked with larger blocks",
}


def get_execution(method: Method) -> Optional[Execution]:
    """Return how PopTorch runs the method; None where no row says that it does. What a row does not state must be as in a plain
    method, so that a new field of methods is refused where it says anything."""
    blocks = method.structure is not None
    for row in RUNS:
        stated = {**row._asdict(), "turn": 0}
        as_stated = row.blocks == blocks and all(
            getattr(method, field.name) == stated.get(field.name, field.default)
            for field in fields(method)
            if field.name not in _FREE
        )
        if as_stated and (method.structure is None or _is_plain(method.structure)):
            return row.execution
    return None


def _is_plain(structure: Structure) -> bool:
    """Tell whether blocks, however many and whichever train, share no layer."""
    return replace(structure, blocks=None, layers=None) == Structure()


def is_pipelined(method: Method) -> bool:
    """Tell whether PopTorch runs the method as a pipeline. A method that it does not run is judged as one, so that its other
    faults are told, too."""
    return get_execution(method) is not Execution.SHARDED


def check_method(method: Method) -> List[str]:
    """Return why PopTorch cannot run the method, and which similar one it can."""
    if get_execution(method) is not None:
        return []
    nearest = _NEAREST.get(method.name, "gpipe or pipedream_flush")
    if method.is_stale:
        return [
            f"method: {method.name}: a PopTorch pipeline is flushed at every weight update and keeps one version of "
            f"the weights, so no pass can read old ones: use {nearest}, or backend.name emulator or distributed"
        ]
    if method.structure is not None and method.structure.overlap:
        return [
            f"method: {method.name}: a layer's weights would be on two IPUs, which PopART refuses in a pipeline: use "
            f"{nearest}"
        ]
    return [
        f"method: {method.name}: nobody has said that PopTorch runs its schedule ({method.pipeline.value}) with its reads "
        f"({method.forward_reads.value}, {method.backward_reads.value}): use {nearest}, or backend.name emulator or distributed"
    ]


MOST_IPUS = 64  # of one process


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


def check_placement(config: Config, ipu: IpuConfig, method: Method, stages: int) -> List[str]:
    """Return what is wrong with that many stages on their IPUs."""
    if ipu.ipus is not None and len(ipu.ipus) != stages:
        return [f"{show_key('ipus', ipu.ipus)}: must name an IPU for each of {stages} stages"]
    place, faults = place_stages(ipu, stages), []
    if place.ipu_of[0] != 0:
        faults.append(
            f"{show_key('ipus', ipu.ipus)}: the first stage must be on IPU 0, which PopTorch counts as a stage anyhow"
        )
    accumulation, least = config.gradient_accumulation, place.least_accumulation
    if is_pipelined(method) and place.ipus > 1 and accumulation < least:
        faults.append(
            f"gradient_accumulation: {accumulation}: a PopTorch pipeline of {place.forward_stages} stages needs at "
            f"least 2 x {place.forward_stages} - 1 = {least} microbatches an update: raise it (and lower "
            "micro_batch_size), take fewer stages, or method naive"
        )
    wished = ipu.inference_device_iterations
    if wished is not None and is_pipelined(method) and wished < place.forward_stages:
        faults.append(
            f"{show_key('inference_device_iterations', wished)}: a pipeline of {place.forward_stages} stages needs as many "
            "at least"
        )
    if isinstance(ipu.available_memory_proportion, list) and len(ipu.available_memory_proportion) != place.ipus:
        faults.append(
            f"{show_key('available_memory_proportion', ipu.available_memory_proportion)}: must be one number, or "
            f"{place.ipus}, one an IPU"
        )
    return faults + _check_ipu_count(config, ipu, place)


def is_under_poprun() -> bool:
    """Tell whether Graphcore's launcher started several processes; each then counts its own replicas."""
    if importlib.util.find_spec("popdist") is None:
        return False
    import popdist

    return bool(popdist.isPopdistEnvSet())


def _check_ipu_count(config: Config, ipu: IpuConfig, place: Placement) -> List[str]:
    replicas = config.replicas
    total = place.ipus * replicas
    said = f"{place.ipus} IPUs x replicas {replicas} = {total}" if replicas > 1 else f"{total} IPUs"
    if ipu.use_ipu_model or ipu.offline_target is not None:
        return []
    whole_powers = total & (total - 1) == 0
    if not whole_powers and not ipu.auto_round_num_ipus:
        return [
            f"stages: {said}: IPUs are reserved by powers of 2, here {round_up_ipus(total)}: take another number of stages "
            "or replicas, put two stages on one with backend.ipu.ipus, or auto_round_num_ipus: true, which leaves "
            f"{round_up_ipus(total) - total} idle"
        ]
    if round_up_ipus(total) > MOST_IPUS and not is_under_poprun():
        return [
            f"replicas: {replicas}: {said}: a process drives at most {MOST_IPUS}: take fewer, or start several "
            "processes with poprun --num-instances"
        ]
    return []
