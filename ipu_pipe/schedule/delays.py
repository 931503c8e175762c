"""Delays that a method states instead of a schedule, in two units: a stage's own updates, and
updates of all stages.

    Delay      a stage's own updates between the version that a pass reads and the use of its gradient: constant, or drawn
    History    the global history (randomized PipeDream paper) counts the block updates of all stages in the order of (slot,
               stage); block r is the weights of stage r

The delays that a schedule has by itself are counted in `versions` (a stage's own updates) and
`global_history`. P stages, a the stage that updates, r the block that is read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Sequence

import numpy as np
from numpy.typing import NDArray

from ipu_pipe.errors import BadInput
from ipu_pipe.schedule.stretches import IntArray

# ---- delays in a stage's own updates


@dataclass(frozen=True)
class Delay:
    """The delay between the version that a forward reads and its backward's, in updates, if the
    schedule does not determine it.

    `drawn` false: always `greatest` = D (Kosson et al. 2021, appendices F and G.2), or
    `table[s][i]` on stage s for microbatch i of an update, P rows of N, as in cyclic data
    parallelism (Fournier and Oyallon 2024). `drawn` true: each pass draws from the exponential
    distribution over the integers 0..D (PipeMare, appendix E) with expectation `mean`, one number
    or one per stage; None means the stage's own greatest lag in the method's pipeline.
    """

    greatest: int
    drawn: bool = False
    mean: tuple[float, ...] | None = None
    table: tuple[tuple[int, ...], ...] | None = None

    @classmethod
    def make_constant(cls, updates: int | Sequence[Sequence[int]]) -> Delay:
        """Return a constant delay of D updates, or the delays of a table."""
        if isinstance(updates, int):
            return cls(updates)
        return cls(max(map(max, updates)), table=tuple(map(tuple, updates)))

    def find_greatest(self, stages: int) -> IntArray:
        """Return the greatest delay of each stage, (P,)."""
        return (
            np.full(stages, self.greatest)
            if self.table is None
            else np.array(self.table).max(axis=1)
        )


def find_mean_delays(delay: Delay, stages: int, lags: IntArray | None) -> NDArray[np.float64]:
    """Return the expectation (P,) of drawn delays: the stated one, or the pipeline's own `lags`
    (P,).

    Raise `BadInput` if no exponential distribution over 0..D has that expectation.
    """
    if delay.mean is None:
        assert lags is not None, "the pipeline's lags replace a mean that is not stated"
        means = lags.astype(np.float64)
    elif len(delay.mean) in (1, stages):
        means = np.broadcast_to(np.asarray(delay.mean, np.float64), (stages,))
    else:
        raise BadInput(
            f"method_args.hogwild.mean: {list(delay.mean)}: must be one number or one for each of "
            f"{stages} stages"
        )
    if (means > delay.greatest / 2).any():
        raise BadInput(
            f"method_args.hogwild.max: {delay.greatest}: an exponential distribution over 0..max "
            f"has a mean of at most max/2;"
            f" the greatest mean here is {means.max():g}: max must be at least {2 * means.max():g}"
        )
    return means


class DelaySampler:
    """Draw delays from P(d) ~ q^d on 0..D, the exponential distribution over integers.

    A delay depends only on (seed, microbatch, stage), not on the order of calls. `BLOCK`
    microbatches share a generator.
    """

    # a generator takes far longer to seed than to draw from
    BLOCK = 256

    def __init__(self, delay: Delay, means: NDArray[np.float64], seed: int) -> None:
        self._seed = seed
        # (P, D + 1), ascending to 1
        self._thresholds = np.stack(
            [np.cumsum(_compute_probabilities(mean, delay.greatest)) for mean in means]
        )
        self._blocks: dict[int, IntArray] = {}

    def __call__(self, first: int, last: int) -> IntArray:
        """Return the delays (P, last - first) of the microbatches [first, last)."""
        if last <= first:
            return np.zeros((len(self._thresholds), 0), np.int64)
        blocks = range(first // self.BLOCK, (last - 1) // self.BLOCK + 1)
        delays = np.concatenate([self._draw_block(block) for block in blocks], axis=1)
        start = blocks[0] * self.BLOCK
        return delays[:, first - start : last - start]

    def _draw_block(self, block: int) -> IntArray:
        if block not in self._blocks:
            # a long run must not keep all blocks: one that is asked for again is drawn again
            if len(self._blocks) > 64:
                self._blocks.clear()
            uniform = (
                np.random.default_rng((self._seed, block))
                .random((self.BLOCK, len(self._thresholds)))
                .T  # (P, BLOCK)
            )
            delays = [
                np.searchsorted(row, values, side="right")
                for row, values in zip(self._thresholds, uniform)
            ]
            # by rounding the last threshold may be below 1
            self._blocks[block] = np.minimum(np.stack(delays), self._thresholds.shape[1] - 1)
        return self._blocks[block]


def _compute_probabilities(mean: float, greatest: int) -> NDArray[np.float64]:
    """Return the probabilities (D + 1,) of 0..D, proportional to q^d, with expectation `mean` <=
    D/2; q by bisection.
    """
    values = np.arange(greatest + 1)
    low = 0.0
    high = 1.0
    # more halvings than a float64 has digits, also of a q near 0
    for _ in range(200):
        q = (low + high) / 2
        weights = q**values
        low, high = (q, high) if (weights * values).sum() / weights.sum() < mean else (low, q)
    # `high` stays exactly 1, the uniform distribution, if the mean is D/2
    weights = high**values
    return np.asarray(weights / weights.sum())


# ---- delays in the global history of block updates


@dataclass(frozen=True)
class History:
    """The delays of randomized PipeDream (Algorithm 1): a block update reads block r of an iterate
    some block updates ago.

    delays: "uniform": drawn independently from 0..`bound`; "offsets": a constant of each block,
        PipeDream's mean over the active stages (appendix F's coarse model); "schedule": exactly
        PipeDream's.
    order of stages and microbatches: "random": drawn uniformly; "schedule": PipeDream's.
    bound: None for PipeDream's greatest delay, P^2 - P/2. nag: beta of the extrapolation (appendix
    I). No delay reaches back beyond a drain or the beginning.
    """

    LAWS: ClassVar[tuple[str, ...]] = ("uniform", "offsets", "schedule")
    ORDERS: ClassVar[tuple[str, ...]] = ("random", "schedule")

    bound: int | None = None
    delays: str = "uniform"
    order: str = "random"
    nag: float | None = None

    def get_bound(self, stages: int) -> int:
        """Return the greatest delay, in block updates."""
        return compute_greatest_delay(stages) if self.bound is None else self.bound

    def compute_offsets(self, stages: int) -> IntArray:
        """Return the delays (P,) of the law "offsets"."""
        means = compute_steady_delays(stages).mean(axis=0)
        return np.minimum(np.rint(means).astype(np.int64), self.get_bound(stages))

    def greatest_lag(self, stages: int) -> IntArray:
        """Return the greatest lag (P,) of a read in updates of the stage itself.

        If stages are drawn, all block updates in between may be the stage's own; in the schedule's
        order every P-th one is.
        """
        delays = (
            self.compute_offsets(stages)
            if self.delays == "offsets"
            else np.full(stages, self.get_bound(stages))
        )
        return delays if self.order == "random" else -(-delays // stages)


def compute_greatest_delay(stages: int) -> int:
    """Return tau_max of steady PipeDream: P^2 - P/2, for odd P P^2 - (P+1)/2 (Proposition 4.1)."""
    return stages**2 - (stages + 1) // 2


def compute_least_delay(stages: int) -> int:
    """Return the least delay of steady PipeDream: floor((P-1)/2), for the last stage's own
    block.
    """
    return (stages - 1) // 2


def compute_mean_delay(stages: int) -> float:
    """Return the mean delay of steady PipeDream over active stages and read blocks: (P^2 - 1)/2."""
    return (stages**2 - 1) / 2


def compute_steady_delays(stages: int) -> IntArray:
    """Return tau (P, P) of steady PipeDream, [a, r]: the block updates between m's forward on stage
    r and its backward on a.

    tau(a, r) = floor((P-r)/2) + sum_{j=r+1}^{2P-2-a} c_j + floor(a/2), c_j = ceil(P/2) for odd j
    and floor(P/2) for even j: the rest of the forward's slot, the slots between, and the lower
    stages in the backward's own slot.
    """
    P = stages
    a = np.arange(P)[:, None]
    r = np.arange(P)[None, :]
    last = 2 * P - 2 - a
    # the number of odd j in r+1..last
    odd = (last + 1) // 2 - (r + 1) // 2
    between = odd * -(-P // 2) + (last - r - odd) * (P // 2)
    return np.asarray((P - r) // 2 + between + a // 2)
