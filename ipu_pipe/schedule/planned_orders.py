"""Plan the order of passes on each device from their durations: the zero-bubble heuristic behind
`zb_auto` and `zbv`.

`plan_straight` (one stage a device) and `plan_v` (two, in a V) return each device's row of
forwards, input gradients and weight gradients; `orders.py` writes down by rule the orders that need
no durations. Method: Qi et al. 2023 (Zero Bubble), sections 3 and 6. Input gradients and forwards
alternate; weight gradients, which no other pass needs, fill the waits. Only the slowest device's
span counts, so every other device may wait as long as the slowest has waited (its slack). The
heuristic is repeated with each combination of its options and with the slack of the plan before,
and the plan whose slowest device waits least wins.

A pass is added in four steps (`Plan.add_with_fillers`):

    [1] a forward needs memory        weight gradients before it, until their activations are freed
    [2] it waits for its inputs       the delayed weight gradients that fit into the wait
    [3] it still waits too long       one more weight gradient, although this delays the pass
    [4] the pass

For example device 0 has done F0 F1 I0 (unit times), the inputs of I1 arrive at 4.5, and W0 is
delayed. The wait from 3 to 4.5 has room for W0; the rest of 0.5 is lost, which is harmless if
another device has waited 0.5 already.
"""

from __future__ import annotations

import math
from itertools import product
from typing import Callable, Sequence, Tuple

from ipu_pipe.schedule.actions import Kind, get_pass_needs
from ipu_pipe.schedule.methods import Order

F, I, W = Kind.FORWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT  # noqa: E741
# (kind, stage)
Pass = Tuple[Kind, int]


class Plan:
    """The planned passes of P devices and their times in an ideal run.

    By device: `rows`: its passes; `delayed_weight_gradients`: the stages of weight gradients that
    are still to be done, oldest first; `free_at`: the end of its last pass; `activations`: those
    that it holds, 1 for a microbatch on one stage; `waited`: its waiting time since its first
    forward.
    """

    def __init__(self, order: Order, P: int, M: int, earlier_waits: Sequence[float]) -> None:
        """`earlier_waits`: of the devices in an earlier plan: each may now wait as much as the
        slowest waited longer than it.
        """
        self.order = order
        self.microbatches = M
        self.placement = order.place(P * order.stages_per_device)
        self.duration = {
            kind: time / order.stages_per_device for kind, time in zip((F, I, W), order.durations)
        }
        self.limit = order.activation_limit * P * order.stages_per_device
        self.activation_change = {F: 1.0, I: order.weight_share - 1, W: -order.weight_share}
        self.ends: dict[Pass, list[float]] = {
            (kind, s): [] for kind in (F, I, W) for s in range(len(self.placement))
        }
        self.rows: list[list[Pass]] = [[] for _ in range(P)]
        self.delayed_weight_gradients: list[list[int]] = [[] for _ in range(P)]
        self.free_at = [0.0] * P
        self.activations = [0.0] * P
        self.waited = [0.0] * P
        # the first plan has none before it
        self._spare = [max(earlier_waits, default=0.0) - wait for wait in earlier_waits] or [
            0.0
        ] * P

    def count(self, kind: Kind, stage: int) -> int:
        """Return the number of microbatches for which this pass is planned."""
        return len(self.ends[kind, stage])

    def find_ready(self, kind: Kind, stage: int) -> float | None:
        """Return the time when the inputs of the next pass are ready; None if its needs are not
        planned, or none is left.
        """
        m = self.count(kind, stage)
        ready = 0.0
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

    def has_room(self, device: int, count: int = 1) -> bool:
        """Return whether the device may hold the activations of `count` more forwards."""
        # sums of shares may exceed the limit by rounding alone
        return self.activations[device] + count <= self.limit + 1e-9

    def find_slack(self, device: int) -> float:
        """Return the time that a device may wait without becoming the slowest."""
        return max(*self.waited, self._spare[device]) - self.waited[device]

    def add(self, kind: Kind, stage: int) -> None:
        """Append a pass, which must be ready, to its device's row."""
        device = self.placement[stage]
        ready = self.find_ready(kind, stage)
        assert ready is not None, (kind, stage)
        begin = max(ready, self.free_at[device])
        # the wait before a device's first forward belongs to the pipeline, not to the plan
        if self.rows[device]:
            self.waited[device] += begin - self.free_at[device]
        self.free_at[device] = begin + self.duration[kind]
        self.ends[kind, stage].append(self.free_at[device])
        self.activations[device] += self.activation_change[kind]
        self.rows[device].append((kind, stage))
        if kind is I:
            self.delayed_weight_gradients[device].append(stage)

    def add_weight_gradient(self, device: int) -> None:
        """Append the oldest delayed weight gradient."""
        self.add(W, self.delayed_weight_gradients[device].pop(0))

    def add_with_fillers(self, kind: Kind, stage: int, allowed_wait: float) -> None:
        """Append a pass, which may wait for `allowed_wait`, and weight gradients before it, in the
        steps of the drawing.
        """
        device = self.placement[stage]
        ready = self.find_ready(kind, stage)
        assert ready is not None
        # [1]
        while kind is F and not self.has_room(device):
            self.add_weight_gradient(device)
        # [2]
        while (
            self.delayed_weight_gradients[device]
            and self.free_at[device] + self.duration[W] <= ready
        ):
            self.add_weight_gradient(device)
        # [3]
        if self.delayed_weight_gradients[device] and ready - self.free_at[device] > allowed_wait:
            self.add_weight_gradient(device)
        # [4]
        self.add(kind, stage)

    def finish(self) -> None:
        """Append the remaining weight gradients."""
        for device, delayed in enumerate(self.delayed_weight_gradients):
            while delayed:
                self.add_weight_gradient(device)


def _find_best(
    order: Order,
    P: int,
    M: int,
    fill: Callable[[Plan, tuple[bool, ...]], None],
    choices: int,
) -> list[list[Pass]]:
    """Return the rows of the plan whose slowest device waits least, of all answers to `choices`
    yes-or-no questions.

    fill(plan, answers): adds all passes. The waits of each plan are the next one's `earlier_waits`
    as long as that helps.
    """
    # the paper's heuristic tries every combination too: no single one is best for all durations
    best: Plan | None = None
    for answers in product((True, False), repeat=choices):
        earlier_waits: Sequence[float] = ()
        while True:
            plan = Plan(order, P, M, earlier_waits)
            fill(plan, answers)
            if best is None or max(plan.waited) < max(best.waited):
                best = plan
            if earlier_waits and max(plan.waited) >= max(earlier_waits):
                break
            earlier_waits = plan.waited
    assert best is not None
    return best.rows


def plan_v(order: Order, P: int, M: int) -> list[list[Pass]]:
    """Plan two stages on each device, there and back (ZBV), within the activations of 1F1B. P = 2,
    M = 4, unit times; small letters are passes of the device's returning stage, P to 2 P - 1:

    device 0  F0 F1 F2 f0 i0 w0 f1 i1 w1 F3 I0 W0 f2 i2 w2 I1 W1 f3 i3 I2 w3 I3 W2 W3 .
    device 1  .  F0 f0 F1 f1 i0 w0 F2 I0 W0 f2 i1 w1 F3 I1 W1 f3 i2 I2 i3 I3 w2 W2 w3 W3
    """

    def fill(plan: Plan, answers: tuple[bool, ...]) -> None:
        # whether input gradients of the stages back, and forwards, may wait only as long as the
        # slack
        back_within_slack, forwards_within_slack = answers
        _warm_up_v(plan, P)
        for _ in range(2 * M):
            next_stage = [_choose_input_gradient(plan, d, 2 * P - 1 - d) for d in range(P)]
            # gradients reach the returning stages P to 2 P - 1 in the order of the devices, and the
            # outbound stages 0 to P - 1 in the opposite order
            there = [d for d in range(P) if next_stage[d] < P]
            back = [d for d in range(P) if next_stage[d] >= P]
            for d in (*reversed(there), *back):
                # of the last microbatches there may be none left
                if plan.count(I, next_stage[d]) < M:
                    plan.add_with_fillers(
                        I,
                        next_stage[d],
                        plan.find_slack(d) if d in there or back_within_slack else math.inf,
                    )
            for d in range(P):
                stage = next(
                    (s for s in (2 * P - 1 - d, d) if plan.find_ready(F, s) is not None),
                    None,
                )
                if stage is not None:
                    plan.add_with_fillers(
                        F, stage, plan.find_slack(d) if forwards_within_slack else math.inf
                    )
        plan.finish()

    # fewer microbatches do not fill a V; `orders.make_device_rows` leaves out the surplus
    M = max(M, 2 * P)
    return _find_best(order, P, M, fill, 2)


def _choose_input_gradient(plan: Plan, there: int, back: int) -> int:
    """Return the stage of a device whose input gradient is next: the one on the way to stage 0 if
    it is ready.
    """
    if plan.count(I, there) >= plan.count(I, back):
        return back
    is_left = plan.count(I, back) < plan.microbatches
    return back if is_left and plan.find_ready(I, there) is None else there


def _warm_up_v(plan: Plan, P: int) -> None:
    """Begin as many microbatches as fit before the first one comes back, then alternate until all
    devices have equally many.
    """
    for d in range(P):
        plan.add(F, d)
    for d in reversed(range(P)):
        ready = plan.find_ready(F, 2 * P - 1 - d)
        assert ready is not None
        while (
            d < P - 1
            and plan.has_room(d, 2 + 2 * d)
            and plan.free_at[d] + plan.duration[F] <= ready
            and plan.count(F, d) < plan.microbatches
        ):
            for other in range(d + 1):
                plan.add(F, other)
        plan.add(F, 2 * P - 1 - d)
    there = True
    for d in range(1, P):
        while sum(plan.count(F, s) for s in (d, 2 * P - 1 - d)) < sum(
            plan.count(F, s) for s in (d - 1, 2 * P - d)
        ):
            for other in reversed(range(d, P)):
                stage = other if there else 2 * P - 1 - other
                if plan.count(F, stage) < plan.microbatches:
                    plan.add(F, stage)
            there = not there


def plan_straight(order: Order, P: int, M: int) -> list[list[Pass]]:
    """Plan one stage on each device within a limit (ZB-1p with limit 1, ZB-2p with 2). P = 3, M =
    6, limit 2, unit times:

    device 0  F0 F1 F2 F3 F4 I0 F5 W0 I1 W1 I2 W2 I3 W3 I4 W4 I5 W5 .  .
    device 1  .  F0 F1 F2 I0 F3 I1 F4 I2 F5 I3 W0 I4 W1 I5 W2 W3 W4 W5 .
    device 2  .  .  F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 F5 I5 W0 W1 W2 W3 W4 W5
    """

    def fill(plan: Plan, answers: tuple[bool, ...]) -> None:
        protects_first_backward, backward_first, never_waits = answers
        _warm_up_straight(plan, P, protects_first_backward)
        for _ in range(1, M):
            forwards = [
                plan.count(F, d) < M and not (backward_first and _should_delay_forward(plan, d))
                for d in range(P)
            ]
            for d in range(P):
                # if a later device has no forward now, it would only store the activations
                if all(forwards[d:]):
                    plan.add_with_fillers(F, d, 0.0 if never_waits else plan.find_slack(d))
            for d in reversed(range(P)):
                # without forwards device 0 would only wait
                while d == 0 and plan.count(F, 0) == M and plan.delayed_weight_gradients[0]:
                    plan.add_weight_gradient(0)
                plan.add_with_fillers(I, d, 0.0 if never_waits else plan.find_slack(d))
        plan.finish()

    return _find_best(order, P, M, fill, 3)


def _warm_up_straight(plan: Plan, P: int, protects_first_backward: bool) -> None:
    """Begin microbatches until the first one comes back, more on each device than on the next.

    `protects_first_backward`: begin none that would delay the first one's backward.
    """
    for d in range(P):
        plan.add(F, d)
    forward = plan.duration[F]
    counts = [0] * P
    # the end of the first input gradient of the next device
    back = plan.free_at[P - 1] + plan.duration[I]
    for d in reversed(range(P - 1)):
        begin = plan.free_at[d]
        while counts[d] + 1 < plan.microbatches and plan.has_room(d, counts[d] + 1):
            if (
                begin + forward > back + plan.order.link
                if protects_first_backward
                else begin >= back + plan.order.link
            ):
                break
            counts[d], begin = counts[d] + 1, begin + forward
        back = max(begin, back + plan.order.link) + plan.duration[I]
    for d in range(1, P):
        if counts[d] + 1 < plan.microbatches:
            counts[d] = max(min(counts[d], counts[d - 1] - 1), 0)
    for d, count in enumerate(counts):
        for _ in range(count):
            plan.add(F, d)
    for d in reversed(range(P)):
        plan.add(I, d)


def _should_delay_forward(plan: Plan, device: int) -> bool:
    """Return whether a forward would delay the device's next input gradient by more than it may
    wait.
    """
    if device + 1 == len(plan.rows) or plan.count(F, device) < plan.count(F, device + 1) + 2:
        return False
    arrival = plan.free_at[device + 1] + plan.duration[F] + plan.duration[I] + plan.order.link
    # the weight gradients that must come before the forward, to make room for its activations
    needed = 0
    activations = plan.activations[device]
    while activations + 1 > plan.limit + 1e-9 and needed < len(
        plan.delayed_weight_gradients[device]
    ):
        needed = needed + 1
        activations = activations + plan.activation_change[W]
    begin = plan.free_at[device]
    if begin >= arrival:
        return True
    return begin + plan.duration[F] + needed * plan.duration[
        W
    ] > arrival and arrival - begin <= plan.find_slack(device)
