"""What two methods without a pipeline's own lags add to a method (the randomized PipeDream paper): reads of the global history of
block updates, and rounds of local steps.

The global history counts block updates of all stages, in the order of (slot, stage). P stages, active stage a, read block r.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Dict, List, Mapping, Optional, Tuple

import numpy as np

from ipu_pipe.schedule.runs import IntArray
from ipu_pipe.text import show

LAWS = ("uniform", "offsets", "schedule")
ORDERS = ("random", "schedule")
DEFAULT_LOCAL_STEPS = 5  # the paper's for scaling and its Transformer

# keys of method_args -> the method that alone has them
OWN_KEYS: Dict[str, Tuple[str, ...]] = {
    "randomized_pipedream": ("delay_bound", "delays", "order", "nag"),
    "local_sgd": ("replicas", "local_steps"),
}


@dataclass(frozen=True)
class History:
    """Randomized PipeDream (Algorithm 1): each block update reads block r of the iterate `delay` block updates ago.

    `delays`: "uniform", each drawn by itself from 0..`bound`; "offsets", a constant of each block, the mean over the active
    stages of PipeDream's (appendix F's coarse model); "schedule", exactly PipeDream's. `order` of stages and microbatches:
    "random", drawn uniformly, or "schedule", PipeDream's. `bound`: None for PipeDream's greatest, P^2 - P/2. `nag`: beta of
    the extrapolation (appendix I). No delay reaches beyond a drain, as none reaches beyond the beginning.
    """

    bound: Optional[int] = None
    delays: str = "uniform"
    order: str = "random"
    nag: Optional[float] = None

    def bound_for(self, stages: int) -> int:
        """The greatest delay, in block updates."""
        return greatest_delay(stages) if self.bound is None else self.bound

    def constant(self, stages: int) -> IntArray:
        """The delays (P,) of the law "offsets"."""
        means = steady_delays(stages).mean(axis=0)
        return np.minimum(np.rint(means).astype(np.int64), self.bound_for(stages))

    def greatest_lag(self, stages: int) -> IntArray:
        """The most updates (P,) of a stage itself that a read can be behind: all block updates in between where stages are
        drawn, each P-th of them in the schedule's order."""
        delays = self.constant(stages) if self.delays == "offsets" else np.full(stages, self.bound_for(stages))
        return delays if self.order == "random" else -(-delays // stages)


@dataclass(frozen=True)
class Rounds:
    """LocalSGD (Algorithm 2): `replicas` R of the whole model (None: as many as stages) make `steps` K steps of their own each
    and are then averaged, stage by stage; a drain ends a round early."""

    replicas: Optional[int] = None
    steps: int = DEFAULT_LOCAL_STEPS


def greatest_delay(stages: int) -> int:
    """tau_max of steady PipeDream: P^2 - P/2, for odd P P^2 - (P+1)/2 (Proposition 4.1)."""
    return stages**2 - (stages + 1) // 2


def least_delay(stages: int) -> int:
    """Of steady PipeDream: floor((P-1)/2), of the last stage's own block."""
    return (stages - 1) // 2


def mean_delay(stages: int) -> float:
    """Over active stages and read blocks: (P^2 - 1)/2."""
    return (stages**2 - 1) / 2


def steady_delays(stages: int) -> IntArray:
    """tau (P, P) of steady PipeDream, [a, r]: the block updates between m's forward on stage r and its backward on a.

    tau(a, r) = floor((P-r)/2) + sum_{j=r+1}^{2P-2-a} c_j + floor(a/2), c_j = ceil(P/2) for odd j and floor(P/2) for even j: the
    rest of the forward's slot, the slots between, and the lower stages in the backward's own slot.
    """
    P = stages
    a, r = np.arange(P)[:, None], np.arange(P)[None, :]
    last = 2 * P - 2 - a
    odd = (last + 1) // 2 - (r + 1) // 2  # odd j in r+1..last
    between = odd * -(-P // 2) + (last - r - odd) * (P // 2)
    return np.asarray((P - r) // 2 + between + a // 2)


def faults(method: str, given: Mapping[str, Any]) -> List[str]:
    """What is wrong with the keys of `OWN_KEYS` that are given to a method, one line each."""
    found = []
    for owner, keys in OWN_KEYS.items():
        if owner != method:
            found += [
                f"method_args: {key}: {show(given[key])}: belongs to {owner} alone" for key in keys if key in given
            ]
    for key, least in (("delay_bound", 0), ("replicas", 1), ("local_steps", 1)):
        value = given.get(key, least)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            found.append(f"method_args: {key}: {show(value)}: must be a whole number >= {least}")
    for key, allowed in (("delays", LAWS), ("order", ORDERS)):
        if given.get(key, allowed[0]) not in allowed:
            found.append(f"method_args: {key}: {show(given[key])}: must be {', '.join(allowed[:-1])} or {allowed[-1]}")
    beta = given.get("nag", 1.0)
    if isinstance(beta, bool) or not isinstance(beta, (int, float)) or not 0 < beta < float("inf"):
        found.append(f"method_args: nag: {show(beta)}: must be a number > 0, beta of the extrapolation")
    if not found and given.get("delays") == "schedule":
        if given.get("order") != "schedule":
            found.append(
                "method_args: delays: schedule: are those of PipeDream's order of updates: set order: schedule"
            )
        if "delay_bound" in given:
            value = show(given["delay_bound"])
            found.append(f"method_args: delay_bound: {value}: delays: schedule has PipeDream's own: leave it out")
    return found


def history_of(given: Mapping[str, Any]) -> History:
    """That of checked keys."""
    beta = given.get("nag")
    return History(
        given.get("delay_bound"), given.get("delays", LAWS[0]), given.get("order", ORDERS[0]),
        None if beta is None else float(beta),
    )  # fmt: skip


def rounds_of(given: Mapping[str, Any]) -> Rounds:
    """Those of checked keys."""
    return Rounds(given.get("replicas"), given.get("local_steps", DEFAULT_LOCAL_STEPS))
