"""Plan orders by durations: devices alternate input gradients and forwards, and weight gradients fill the waits.

This is the heuristic of Qi et al. 2023 (Zero Bubble, sections 3 and 6), in rounds. Before a pass that has to wait, a device does
the weight gradients that fit into the wait. It also does one that does not fit, if it would otherwise have waited longer than any
other device so far: the span of the slowest device decides, so the others may lose as much time as it has lost.
"""

from __future__ import annotations

import math
from itertools import product
from typing import Callable, Dict, List, Optional, Sequence, Tuple

from ipu_pipe.schedule.actions import Kind, get_pass_needs
from ipu_pipe.schedule.methods import Order

F, I, W = Kind.FORWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT  # noqa: E741
# (kind, stage)
Pass = Tuple[Kind, int]


class Plan:
    """The planned passes of the devices. By device: `free`: the end of its last pass; `held`: its activations; `waited`: its
    waiting time since its first forward."""

    def __init__(self, order: Order, P: int, M: int, allowed: Sequence[float]) -> None:
        """`allowed`: the waiting time of each device in an earlier plan; others may wait as long as its slowest device did."""
        self.order, self.microbatches = order, M
        self.placement = order.place(P * order.stages_per_device)
        self.seconds = {kind: time / order.stages_per_device for kind, time in zip((F, I, W), order.durations)}
        # one microbatch on one stage counts 1
        self.most = order.activation_limit * P * order.stages_per_device
        self.frees = {F: 1.0, I: order.weight_share - 1, W: -order.weight_share}
        self.ends: Dict[Pass, List[float]] = {(kind, s): [] for kind in (F, I, W) for s in range(len(self.placement))}
        self.rows: List[List[Pass]] = [[] for _ in range(P)]
        # by device: the stages of delayed weight gradients, oldest first
        self.late: List[List[int]] = [[] for _ in range(P)]
        self.free, self.held, self.waited = [0.0] * P, [0.0] * P, [0.0] * P
        self.spare = [max(allowed, default=0.0) - wait for wait in allowed] or [0.0] * P

    def count(self, kind: Kind, stage: int) -> int:
        """Return the number of microbatches for which this pass is planned."""
        return len(self.ends[kind, stage])

    def find_ready(self, kind: Kind, stage: int) -> Optional[float]:
        """Return the time when the inputs of the next pass are ready; None if its needs are not planned, or none is left."""
        m, ready = self.count(kind, stage), 0.0
        if m == self.microbatches:
            return None
        for need, offset in get_pass_needs(kind):
            other = stage + offset
            if 0 <= other < len(self.placement):
                if self.count(need, other) <= m:
                    return None
                is_message = self.placement[other] != self.placement[stage]
                ready = max(ready, self.ends[need, other][m] + self.order.link * is_message)
        return ready

    def put(self, kind: Kind, stage: int) -> None:
        """Append a pass, which must be ready, to its device's row."""
        device, ready = self.placement[stage], self.find_ready(kind, stage)
        assert ready is not None, (kind, stage)
        begin = max(ready, self.free[device])
        if self.rows[device]:
            self.waited[device] += begin - self.free[device]
        self.free[device] = begin + self.seconds[kind]
        self.ends[kind, stage].append(self.free[device])
        self.held[device] += self.frees[kind]
        self.rows[device].append((kind, stage))
        if kind is I:
            self.late[device].append(stage)

    def put_late(self, device: int) -> None:
        """Append the oldest weight gradient."""
        self.put(W, self.late[device].pop(0))

    def fits(self, device: int, count: int = 1) -> bool:
        """Return whether the device may hold the activations of `count` more forwards."""
        return self.held[device] + count <= self.most + 1e-9

    def allow(self, device: int) -> float:
        """Return the time that a device may wait without becoming the slowest."""
        return max(*self.waited, self.spare[device]) - self.waited[device]

    def put_filled(self, kind: Kind, stage: int, may_wait: float) -> None:
        """Append a pass, and before it the weight gradients that free memory for it or fit into its wait.

        If it would still wait longer than `may_wait`, append one more weight gradient, which delays it.
        """
        device, ready = self.placement[stage], self.find_ready(kind, stage)
        assert ready is not None
        while kind is F and not self.fits(device):
            self.put_late(device)
        while self.late[device] and self.free[device] + self.seconds[W] <= ready:
            self.put_late(device)
        if self.late[device] and ready - self.free[device] > may_wait:
            self.put_late(device)
        self.put(kind, stage)

    def finish(self) -> None:
        """Append the remaining weight gradients."""
        for device, late in enumerate(self.late):
            while late:
                self.put_late(device)


def _find_best(
    order: Order, P: int, M: int, run: Callable[[Plan, Tuple[bool, ...]], None], choices: int
) -> List[List[Pass]]:
    """Return the rows of the plan whose slowest device waits least, over all `choices`; repeat each while it improves."""
    best: Optional[Plan] = None
    for chosen in product((True, False), repeat=choices):
        allowed: Sequence[float] = ()
        while True:
            plan = Plan(order, P, M, allowed)
            run(plan, chosen)
            if best is None or max(plan.waited) < max(best.waited):
                best = plan
            if allowed and max(plan.waited) >= max(allowed):
                break
            allowed = plan.waited
    assert best is not None
    return best.rows


def plan_v(order: Order, P: int, M: int) -> List[List[Pass]]:
    """Plan two stages on each device, there and back (ZBV), within the activations of 1F1B. P = 2, M = 4, unit times:

    device 0  F0 F1 F2 f0 i0 w0 f1 i1 w1 F3 I0 W0 f2 i2 w2 I1 W1 f3 i3 I2 w3 I3 W2 W3 .
    device 1  .  F0 f0 F1 f1 i0 w0 F2 I0 W0 f2 i1 w1 F3 I1 W1 f3 i2 I2 i3 I3 w2 W2 w3 W3
    """

    def run(plan: Plan, chosen: Tuple[bool, ...]) -> None:
        _warm_up_v(plan, P)
        for _ in range(2 * M):
            backs = [_choose_input_gradient(plan, d, 2 * P - 1 - d) for d in range(P)]
            for d in (*reversed([d for d in range(P) if backs[d] < P]), *(d for d in range(P) if backs[d] >= P)):
                if plan.count(I, backs[d]) < M:
                    plan.put_filled(I, backs[d], plan.allow(d) if backs[d] < P or chosen[0] else math.inf)
            for d in range(P):
                stage = next((s for s in (2 * P - 1 - d, d) if plan.find_ready(F, s) is not None), None)
                if stage is not None:
                    plan.put_filled(F, stage, plan.allow(d) if chosen[1] else math.inf)
        plan.finish()

    # fewer microbatches do not fill a V; `orders.make_device_rows` leaves out the surplus
    M = max(M, 2 * P)
    return _find_best(order, P, M, run, 2)


def _choose_input_gradient(plan: Plan, there: int, back: int) -> int:
    """Return the stage of a device whose input gradient is next: the one on the way to stage 0 if it is ready."""
    if plan.count(I, there) >= plan.count(I, back):
        return back
    is_left = plan.count(I, back) < plan.microbatches
    return back if is_left and plan.find_ready(I, there) is None else there


def _warm_up_v(plan: Plan, P: int) -> None:
    """Begin as many microbatches as fit before the first one comes back, then alternate until all devices have equally many."""
    for d in range(P):
        plan.put(F, d)
    for d in reversed(range(P)):
        ready = plan.find_ready(F, 2 * P - 1 - d)
        assert ready is not None
        while (
            d < P - 1
            and plan.fits(d, 2 + 2 * d)
            and plan.free[d] + plan.seconds[F] <= ready
            and plan.count(F, d) < plan.microbatches
        ):
            for other in range(d + 1):
                plan.put(F, other)
        plan.put(F, 2 * P - 1 - d)
    there = True
    for d in range(1, P):
        while sum(plan.count(F, s) for s in (d, 2 * P - 1 - d)) < sum(plan.count(F, s) for s in (d - 1, 2 * P - d)):
            for other in reversed(range(d, P)):
                stage = other if there else 2 * P - 1 - other
                if plan.count(F, stage) < plan.microbatches:
                    plan.put(F, stage)
            there = not there


def plan_straight(order: Order, P: int, M: int) -> List[List[Pass]]:
    """Plan one stage on each device within a limit (ZB-1p with limit 1, ZB-2p with 2). P = 3, M = 6, limit 2, unit times:

    device 0  F0 F1 F2 F3 F4 I0 F5 W0 I1 W1 I2 W2 I3 W3 I4 W4 I5 W5 .  .
    device 1  .  F0 F1 F2 I0 F3 I1 F4 I2 F5 I3 W0 I4 W1 I5 W2 W3 W4 W5 .
    device 2  .  .  F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 F5 I5 W0 W1 W2 W3 W4 W5
    """

    def run(plan: Plan, chosen: Tuple[bool, ...]) -> None:
        waits_once, backward_first, never_waits = chosen
        _warm_up_straight(plan, P, waits_once)
        for _ in range(1, M):
            forwards = [plan.count(F, d) < M and not (backward_first and _is_better_late(plan, d)) for d in range(P)]
            for d in range(P):
                # if a later device has no forward now, it would only store the activations
                if all(forwards[d:]):
                    plan.put_filled(F, d, 0.0 if never_waits else plan.allow(d))
            for d in reversed(range(P)):
                if d == 0 and plan.count(F, 0) == M:
                    while plan.late[0]:
                        plan.put_late(0)
                plan.put_filled(I, d, 0.0 if never_waits else plan.allow(d))
        plan.finish()

    return _find_best(order, P, M, run, 3)


def _warm_up_straight(plan: Plan, P: int, waits_once: bool) -> None:
    """Begin microbatches until the first one comes back, more on each device than on the next.

    `waits_once`: begin none that would delay the first one's backward.
    """
    for d in range(P):
        plan.put(F, d)
    forward, counts = plan.seconds[F], [0] * P
    # the end of the first input gradient of the next device
    back = plan.free[P - 1] + plan.seconds[I]
    for d in reversed(range(P - 1)):
        begin = plan.free[d]
        while counts[d] + 1 < plan.microbatches and plan.fits(d, counts[d] + 1):
            if begin + forward > back + plan.order.link if waits_once else begin >= back + plan.order.link:
                break
            counts[d], begin = counts[d] + 1, begin + forward
        back = max(begin, back + plan.order.link) + plan.seconds[I]
    for d in range(1, P):
        if counts[d] + 1 < plan.microbatches:
            counts[d] = max(min(counts[d], counts[d - 1] - 1), 0)
    for d, count in enumerate(counts):
        for _ in range(count):
            plan.put(F, d)
    for d in reversed(range(P)):
        plan.put(I, d)


def _is_better_late(plan: Plan, device: int) -> bool:
    """Return whether a forward would delay the device's next input gradient by more than it may wait."""
    if device + 1 == len(plan.rows) or plan.count(F, device) < plan.count(F, device + 1) + 2:
        return False
    arrival = plan.free[device + 1] + plan.seconds[F] + plan.seconds[I] + plan.order.link
    room, activations = 0, plan.held[device]
    while activations + 1 > plan.most + 1e-9 and room < len(plan.late[device]):
        room, activations = room + 1, activations + plan.frees[W]
    begin = plan.free[device]
    if begin >= arrival:
        return True
    return begin + plan.seconds[F] + room * plan.seconds[W] > arrival and arrival - begin <= plan.allow(device)
