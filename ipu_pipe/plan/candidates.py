"""What a plan chooses from: every width, depth, microbatch, accumulation and recomputation with equal replication.

Source: Narayanan et al. 2021 (PipeDream-2BW), section 4. All devices of a configuration are w replicas of a pipeline of d stages;
its global batch, microbatch x accumulation x w, is at most the greatest that the user allows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Iterator, List, Sequence, Tuple

from ipu_pipe.schedule.methods import METHODS, Pipeline, Reads


@dataclass(frozen=True)
class Candidate:
    """A configuration but for its boundaries: `depth` stages, `width` replicas of the pipeline. `recompute`: activations are
    computed again before the backward from each stage's input."""

    method: str
    depth: int
    width: int
    micro_batch_size: int
    gradient_accumulation: int
    recompute: bool

    @property
    def devices(self) -> int:
        """Return the number of devices."""
        return self.depth * self.width

    @property
    def shape(self) -> Tuple[str, int, int, bool]:
        """Return all but how an update's samples are divided."""
        return self.method, self.depth, self.width, self.recompute

    @property
    def global_batch_size(self) -> int:
        """Return the samples of an update."""
        return self.micro_batch_size * self.gradient_accumulation * self.width


def list_candidates(
    methods: Sequence[str], devices: int, units: int, greatest_batch: int, recomputes: Sequence[bool] = (False, True)
) -> Iterator[Candidate]:
    """Yield all configurations of a model of `units` units on all `devices`, for updates of at most `greatest_batch` samples.

    Microbatches are powers of two; the accumulation fills the batch. One stage is no pipeline: it is planned once, for the first
    of the methods.
    """
    for depth in (d for d in range(1, min(devices, units) + 1) if devices % d == 0):
        width = devices // depth
        for size in _list_powers_of_two(greatest_batch // width):
            for method in methods if depth > 1 else methods[:1]:
                for accumulate in _list_accumulations(method, depth, greatest_batch // (size * width)):
                    for recompute in recomputes:
                        yield Candidate(method, depth, width, size, accumulate, recompute)


def _list_accumulations(method: str, depth: int, most: int) -> List[int]:
    """Return the microbatches per update to try: the most that the batch holds.

    GPipe holds the activations of all of them and may do with fewer; two weight versions (2BW) need as many as stages.
    """
    row = METHODS[method]
    if row.forward_reads is Reads.DOUBLE_BUFFERED and most < depth:
        return []
    if row.pipeline is Pipeline.FILL_DRAIN:
        return [most >> k for k in range(most.bit_length())]
    return [most]


def _list_powers_of_two(most: int) -> List[int]:
    return [1 << k for k in range(most.bit_length())]
