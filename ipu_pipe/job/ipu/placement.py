"""Where stages run: their IPUs, the cycles of the pipeline that they make, and what cannot be placed.

    stages         0   1   2   3   4                 ipus: [0, 1, 1, 2, 3]
    IPUs           0 | 1   1 | 2 | 3                 F = 4 forward stages, 2F - 1 = 7 stages in training

Sources: PopTorch, branch sdk-release-3.4 (popart_compiler/source/CompilerImpl.cpp), and PopART
(willow/src/transforms/pipeline.cpp). Not run on hardware.
"""

from __future__ import annotations

import importlib.util
from typing import List, NamedTuple, Tuple

from ipu_pipe.config.schema import Config
from ipu_pipe.job.ipu.config import IpuConfig, key_said
from ipu_pipe.job.ipu.methods import is_pipelined
from ipu_pipe.schedule.methods import Method

MOST_IPUS = 64  # of one process


class Placement(NamedTuple):
    """Stage s on IPU `ipu_of[s]` of each replica."""

    ipu_of: Tuple[int, ...]

    @property
    def runs(self) -> List[Tuple[int, List[int]]]:
        """(IPU, stages): neighbours on one IPU are one of PopTorch's stages."""
        found: List[Tuple[int, List[int]]] = []
        for stage, ipu in enumerate(self.ipu_of):
            if found and found[-1][0] == ipu:
                found[-1][1].append(stage)
            else:
                found.append((ipu, [stage]))
        return found

    @property
    def forward_stages(self) -> int:
        """F: how often the IPU changes in a forward, plus one."""
        return len(self.runs)

    @property
    def ipus(self) -> int:
        """IPUs of one replica, idle ones below the highest included."""
        return max(self.ipu_of) + 1

    @property
    def least_accumulation(self) -> int:
        """Microbatches that an update must have in a pipeline: as many as stages in training, 2F - 1."""
        return 2 * self.forward_stages - 1

    def cycles(self, accumulation: int) -> int:
        """Pipeline cycles of an update, fill and flush included: a cycle holds a forward and a backward of every stage."""
        return accumulation + 2 * self.forward_stages - 2


def placement(ipu: IpuConfig, stages: int) -> Placement:
    """Stage s on IPU s, unless `ipus` says otherwise."""
    return Placement(tuple(ipu.ipus) if ipu.ipus is not None else tuple(range(stages)))


def reserved(ipus: int) -> int:
    """The power of two that PopTorch attaches for so many IPUs."""
    return 1 << (ipus - 1).bit_length()


def placement_faults(config: Config, ipu: IpuConfig, method: Method, stages: int) -> List[str]:
    """What is wrong with so many stages on their IPUs."""
    if ipu.ipus is not None and len(ipu.ipus) != stages:
        return [f"{key_said('ipus', ipu.ipus)}: must name an IPU for each of {stages} stages"]
    place, faults = placement(ipu, stages), []
    if place.ipu_of[0] != 0:
        faults.append(
            f"{key_said('ipus', ipu.ipus)}: the first stage must be on IPU 0, which PopTorch counts as a stage anyhow"
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
            f"{key_said('inference_device_iterations', wished)}: a pipeline of {place.forward_stages} stages needs as many "
            "at least"
        )
    if isinstance(ipu.available_memory_proportion, list) and len(ipu.available_memory_proportion) != place.ipus:
        faults.append(
            f"{key_said('available_memory_proportion', ipu.available_memory_proportion)}: must be one number, or "
            f"{place.ipus}, one an IPU"
        )
    return faults + _count_faults(config, ipu, place)


def under_poprun() -> bool:
    """Whether Graphcore's launcher started several processes: each then counts its own replicas, once it has asked."""
    if importlib.util.find_spec("popdist") is None:
        return False
    import popdist

    return bool(popdist.isPopdistEnvSet())


def _count_faults(config: Config, ipu: IpuConfig, place: Placement) -> List[str]:
    replicas = config.replicas
    total = place.ipus * replicas
    said = f"{place.ipus} IPUs x replicas {replicas} = {total}" if replicas > 1 else f"{total} IPUs"
    if ipu.use_ipu_model or ipu.offline_target is not None:
        return []
    whole_powers = total & (total - 1) == 0
    if not whole_powers and not ipu.auto_round_num_ipus:
        return [
            f"stages: {said}: IPUs are reserved by powers of 2, here {reserved(total)}: take another number of stages "
            "or replicas, put two stages on one with backend.ipu.ipus, or auto_round_num_ipus: true, which leaves "
            f"{reserved(total) - total} idle"
        ]
    if reserved(total) > MOST_IPUS and not under_poprun():
        return [
            f"replicas: {replicas}: {said}: a process drives at most {MOST_IPUS}: take fewer, or start several "
            "processes with poprun --num-instances"
        ]
    return []
