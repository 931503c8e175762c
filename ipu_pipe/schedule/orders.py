"""Generate the pipelines that are defined by each device's order of passes, without slots:
interleaved 1F1B, looped breadth first, zero-bubble, V-shaped and DualPipe-V. `rows.play_slots`
finds the slots; `planned_orders` has the orders that are searched.

P devices with v stages each, M microbatches of a batch, d a device. A generator returns a row of
(pass, stage) for each device. Every stage does each of its passes in the order of the microbatches,
so these follow by counting: (F, 0) (F, 0) (B, 0) (F, 0) is F0 F1 B0 F2 on stage 0. A whole backward
counts as both halves.

in turn           stage s on device s mod P                  P = 2, v = 2: stages 0 2 on device 0, 1 3 on device 1
there and back    stages d and 2P-1-d on device d: a V       P = 2, v = 2: stages 0 3 on device 0, 1 2 on device 1

The drawings have a column per slot and lower case for a device's second stage; the = of a whole
backward is its second slot.
"""

from __future__ import annotations

from collections import Counter
from typing import Callable, Iterator, List
from typing import Counter as CounterOf

from ipu_pipe.errors import BadInput, raise_faults
from ipu_pipe.schedule.actions import Action, Kind, get_pass_needs
from ipu_pipe.schedule.methods import Method, Order, Timeline
from ipu_pipe.schedule.planned_orders import Pass, plan_straight, plan_v
from ipu_pipe.schedule.rows import DeviceRows, play_slots, read_csv

F, B, I, W = Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT  # noqa: E741
HALVES = {F: (F,), B: (I, W), I: (I,), W: (W,)}
Rows = List[List[Pass]]


def make_device_rows(method: Method, stages: int, microbatches: int) -> DeviceRows:
    """Return the rows of all devices for a batch of M `microbatches` on S `stages`.

    Raise `BadInput` for sizes that the order does not support.
    """
    order = method.order
    assert order is not None
    if method.pipeline is Timeline.ROWS:
        return _read_file(order.file, stages, microbatches)
    generated = microbatches
    # generate whole rounds and leave out the last microbatches
    # the order repeats only in whole rounds of devices
    if not method.flushes:
        generated = -(-microbatches // get_period(order, stages)) * get_period(order, stages)
    rows = ORDERS[method.pipeline](order, stages // order.stages_per_device, generated)
    return DeviceRows(
        [list(_number_microbatches(row, microbatches)) for row in rows], order.place(stages)
    )


def _number_microbatches(row: list[Pass], microbatches: int) -> Iterator[Action]:
    """Yield the actions of a row: number the microbatches of each pass on each stage in order, up
    to `microbatches`.
    """
    done: CounterOf[Pass] = Counter()
    for kind, stage in row:
        microbatch = done[HALVES[kind][0], stage]
        done.update((half, stage) for half in HALVES[kind])
        if microbatch < microbatches:
            yield Action(kind, microbatch, stage)


def _read_file(name: str, stages: int, microbatches: int) -> DeviceRows:
    """Read a file of rows. Raise `BadInput` unless it has these numbers of stages and
    microbatches.
    """
    if not name:
        raise BadInput("method_args.file: none: method rows needs the name of a CSV file")
    device_rows = read_csv(name)
    count = 1 + max(action.index for row in device_rows.rows for action in row)
    faults = []
    if len(device_rows.placement) != stages:
        faults.append(f"stages: {stages}: {name} has {len(device_rows.placement)}")
    if count != microbatches:
        faults.append(f"accumulate: {microbatches}: {name} has {count} microbatches, one batch")
    raise_faults(faults)
    return device_rows


# ---- stages placed in turn


def interleaved_1f1b(order: Order, P: int, M: int) -> Rows:
    """Alternate forwards and whole backwards after a warm-up, P microbatches at a time on each
    stage. P = 2, v = 2, M = 4:

    device 0  F0 F1 f0 f1 F2 b0 F3 b1 f2 B0 f3 B1 .  b2 .  b3 B2 B3
    device 1  .  F0 F1 f0 b0 f1 b1 F2 B0 F3 B1 f2 b2 f3 b3 B2 B3 .
    """
    return _alternate(order.stages_per_device, P, M, (B,), ahead=2)


def interleaved_zb(order: Order, P: int, M: int) -> Rows:
    """Split the backwards: half the warm-up suffices, and weight gradients fill the end. v = 1 is
    ZB-H1. P = 3, v = 1, M = 4:

    device 0  F0 F1 F2 .  .  I0 W0 F3 I1 W1 I2 W2 I3 W3
    device 1  .  F0 F1 .  I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
    device 2  .  .  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3
    """
    return _alternate(order.stages_per_device, P, M, (I, W), ahead=1)


def zb_h2(order: Order, P: int, M: int) -> Rows:
    """Warm up twice as long as ZB-H1, which fills the wait for the first backward. P = 3, M = 6:

    device 0  F0 F1 F2 F3 F4 I0 W0 F5 I1 W1 I2 W2 I3 W3 I4 W4 I5 W5 .  .
    device 1  .  F0 F1 F2 I0 F3 I1 F4 I2 W0 F5 I3 W1 I4 W2 I5 W3 W4 W5 .
    device 2  .  .  F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 W0 F5 I5 W1 W2 W3 W4 W5
    """
    return _alternate(1, P, M, (I, W), ahead=2)


def continuous_1f1b(order: Order, P: int, M: int) -> Rows:
    """Update after every microbatch without a drain: interleaved 1F1B, or ZB-H1 with more in flight
    up to the activation limit.

    P = 3, v = 1, split backwards, limit 1 (* an update), M = 4:

    device 0  F0 F1 F2 .  .  I0 W0* F3 I1 W1* I2 W2* I3 W3*
    device 1  .  F0 F1 .  I0 F2 I1 W0* F3 I2 W1* I3 W2* W3*
    device 2  .  .  F0 I0 F1 I1 F2 I2 W0* F3 I3 W1* W2* W3*
    """
    v = order.stages_per_device
    if not order.splits:
        return _alternate(v, P, M, (B,), ahead=2)
    return _alternate(v, P, M, (I, W), ahead=1, extra=round((order.activation_limit - 1) * P * v))


def get_period(order: Order, stages: int) -> int:
    """Return the period of `continuous_1f1b` in microbatches, the number of devices."""
    return stages // order.stages_per_device


def _alternate(
    v: int,
    P: int,
    M: int,
    backward: tuple[Kind, ...],
    ahead: int,
    extra: int = 0,
) -> Rows:
    """Warm up by `ahead` forwards for each later device, then alternate; delay weight gradients
    until all devices hold the same number of microbatches.

    `backward`: (B,), or (I, W) of split ones. `extra`: additional microbatches in flight on every
    device; early devices begin them earlier, late devices delay weight gradients. For example P =
    3, v = 1, split, `ahead` 1, M = 4:

    device 0  warm-up F F    then F I W F I W I W I W
    device 1  warm-up F      then F I F I W F I W I W W     W delayed by 1
    device 2  no warm-up          F I F I F I W F I W W W   W delayed by 2
    """
    # with one stage a device there is nothing to interleave, and any number of microbatches fits
    rounds = max(M // P, 1) if v > 1 else 1
    if M % rounds:
        raise BadInput(
            f"accumulate: {M}: must be a multiple of {rounds}, the number of rounds of {P} "
            f"microbatches"
        )
    # microbatches that a stage does before its device continues with the next stage
    group = M // rounds
    rows = []
    for d in range(P):
        stages = [k // group % v * P + d for k in range(v * M)]
        # backwards visit a device's stages in the opposite order
        stages_back = [(v - 1) * P + 2 * d - stage for stage in stages]
        # early devices have room to begin more, since their first backward comes last
        early = extra * (P - 1 - d) // max(P - 1, 1)
        warm_up = (v - 1) * group + ahead * (P - 1 - d) + early
        delay = (v - 1) * group + ahead * d + extra - early
        row = [(F, stage) for stage in stages[:warm_up]]
        for k, stage in enumerate(stages_back):
            row += [(F, later) for later in stages[warm_up + k : warm_up + k + 1]]
            row.append((backward[0], stage))
            if W in backward and k >= delay:
                row.append((W, stages_back[k - delay]))
        if W in backward:
            row += [(W, stage) for stage in stages_back[max(len(stages) - delay, 0) :]]
        rows.append(row)
    return rows


def looped_bfs(order: Order, P: int, M: int) -> Rows:
    """Run the whole batch through one stage of a device after the other, and back. P = 2, v = 2, M
    = 2:

    device 0  F0 F1 f0 f1 .  .  b0 b1 B0 B1
    device 1  .  F0 F1 f0 f1 b0 b1 B0 B1 .
    """
    stages = [range(d, order.stages_per_device * P, P) for d in range(P)]
    return [
        [(F, stage) for stage in row for _ in range(M)]
        + [(B, stage) for stage in reversed(row) for _ in range(M)]
        for row in stages
    ]


# ---- stages placed there and back


def v_half(order: Order, P: int, M: int) -> Rows:
    """Repeat a block in which microbatches pass the first stages slowly: half the activations of
    1F1B. P = 4, M = 3:

    device 0  F0 F1 F2 .  .  .  .  f0 i0 f1 i1 f2 i2 w0 w1 I0 W0 I1 w2 I2 W1 W2 .
    device 1  .  F0 F1 F2 .  .  f0 .  f1 i0 f2 i1 w0 i2 I0 w1 I1 W0 I2 w2 W1 W2 .
    device 2  .  .  F0 F1 F2 f0 .  f1 .  f2 i0 w0 i1 I0 i2 I1 W0 I2 w1 W1 w2 W2 .
    device 3  .  .  .  F0 f0 F1 f1 F2 f2 .  .  i0 I0 i1 I1 i2 I2 w0 W0 w1 W1 w2 W2
    """
    # with an even number of devices two blocks would meet in one slot (Qi et al. 2024)
    gap = 0 if P % 2 else 3
    return _repeat_blocks(
        [[2 * d, 3 * P - d - 2, 3 * P + gap + 2 * d - 1, 6 * P + gap - d - 2] for d in range(P)],
        M,
    )


def v_min(order: Order, P: int, M: int) -> Rows:
    """Repeat a block in which a microbatch passes without a wait: a third of the activations of
    1F1B. P = 4, M = 3:

    device 0  F0 F1 F2 .  .  .  .  f0 i0 w0 .  .  f1 i1 w1 I0 W0 .  .  f2 i2 I1 w2 W1 .  .  .  I2 W2
    device 1  .  F0 F1 F2 .  .  f0 .  .  i0 w0 f1 .  .  I0 i1 W0 w1 f2 .  I1 i2 W1 w2 .  .  I2 W2 .
    device 2  .  .  F0 F1 .  f0 .  f1 .  .  i0 w0 F2 I0 W0 .  i1 f2 w1 I1 W1 .  i2 w2 .  I2 W2 .  .
    device 3  .  .  .  F0 f0 F1 f1 .  .  .  .  i0 I0 w0 W0 F2 f2 i1 I1 w1 W1 .  .  i2 I2 w2 W2 .  .
    """
    # with a multiple of three devices two blocks would meet in one slot (Qi et al. 2024)
    gap = 0 if P % 3 else 2
    return _repeat_blocks(
        [[d, 2 * P - d - 1, 2 * P + gap + d, 4 * P + gap - d - 1] for d in range(P)],
        M,
    )


def _repeat_blocks(blocks: list[list[int]], M: int) -> Rows:
    """Repeat a block every six slots; `blocks`: for each device the slots of microbatch 0's F
    there, F back, I back and I there.

    Weight gradients fill the gaps. Then passes are moved to earlier slots where possible
    (`_pull_earlier`).
    """
    P = len(blocks)
    rows = []
    for d, block in enumerate(blocks):
        passes: list[Pass] = [(F, d), (F, 2 * P - 1 - d), (I, 2 * P - 1 - d), (I, d)]
        planned = {
            slot + 6 * m: device_pass for m in range(M) for slot, device_pass in zip(block, passes)
        }
        row: list[Pass] = []
        delayed: list[Pass] = []
        for slot in range(max(planned) + 1):
            if slot in planned:
                kind, stage = planned[slot]
                row.append((kind, stage))
                # its products exist from the input gradient on, and nobody waits for it
                delayed += [(W, stage)] if kind is I else []
            elif delayed:
                row.append(delayed.pop(0))
        rows.append(row + delayed)
    return _pull_earlier(rows, M)


def _pull_earlier(rows: Rows, M: int) -> Rows:
    """Choose for each device, slot by slot, the first pass of its row that is ready and does not
    exceed the rows' peak activations.

    A weight gradient keeps its position until the device has begun all microbatches; after that it
    only fills slots.
    """
    change = {F: 1, I: 0, W: -1}
    limit = max(
        sum(change[kind] for kind, _ in row[:end]) for row in rows for end in range(len(row) + 1)
    )
    stages = 2 * len(rows)
    done: CounterOf[Pass] = Counter()
    in_flight = [0] * len(rows)
    remaining, pulled = [list(row) for row in rows], [[] for _ in rows]  # type: Rows, Rows

    def is_ready(kind: Kind, stage: int) -> bool:
        needs = [
            (need, stage + offset)
            for need, offset in get_pass_needs(kind)
            if 0 <= stage + offset < stages
        ]
        return all(done[need] > done[kind, stage] for need in needs)

    def choose(device: int) -> list[Action]:
        tried: set[Pass] = set()
        filler = None
        # the activations after the passes that the chosen one would overtake, and the most of them
        activations = peak = in_flight[device]
        for position, (kind, stage) in enumerate(remaining[device]):
            # of several passes of a kind on a stage only the first can be next
            if (kind, stage) not in tried:
                tried.add((kind, stage))
                if is_ready(kind, stage) and (kind is not F or peak < limit):
                    # the index of these actions is the position in the row
                    action = Action(kind, position, stage)
                    if kind is not W or (position == 0 and done[F, device] < M):
                        return [action]
                    filler = filler or action
            activations += change[kind]
            peak = max(peak, activations)
            # F, I and W of two stages
            if len(tried) == 6:
                break
        return [filler] if filler is not None else []

    def complete(action: Action, slot: int) -> None:
        device = min(action.stage, stages - 1 - action.stage)
        kind, stage = remaining[device].pop(action.index)
        pulled[device].append((kind, stage))
        done[kind, stage] += 1
        in_flight[device] += change[kind]

    play_slots(len(rows), choose, complete)
    return pulled


def dualpipe_v(order: Order, P: int, M: int) -> Rows:
    """Pair forwards of one direction with backwards of the other, as F then B; split backwards at
    the ends. P = 2, M = 4:

    device 0  F0 F1 F2 f0 i0 w0 f1 F3 b1 =  f2 B0 =  b2 =  f3 .  B1 =  b3 =  I2 W2 I3 W3
    device 1  .  F0 f0 F1 f1 F2 b0 =  f2 B0 =  F3 b1 =  f3 B1 =  b2 =  B2 =  i3 I3 w3 W3
    """
    # with fewer the two directions never meet
    if M < 2 * P:
        raise BadInput(
            f"accumulate: {M}: dualpipe_v needs at least as many microbatches as stages, {2 * P}"
        )
    rows = []
    for d in range(P):
        there = d
        back = 2 * P - 1 - d
        row: list[Pass] = [(F, there)] * (2 * (P - 1 - d))
        row += [(F, there), (F, back)] * (d + 1)
        row += [(I, back), (W, back), (F, back)] * (P - 1 - d)
        row += [(F, there), (B, back), (F, back), (B, there)] * (M - 2 * P + d + 1)
        row += [(B, back), (F, back), (B, there)] * (P - 1 - d)
        # the last backwards: d + 1 are whole, d + 1 input gradients, and for the rest W and I
        # alternate
        last = [back, there] * (d + 1) + [there] * (P - 1 - d)
        whole = last[: d + 1]
        split = last[d + 1 : 2 * d + 2]
        rest = last[2 * d + 2 :]
        delayed: list[Pass] = [(W, stage) for stage in split + rest]
        row += [(B, stage) for stage in whole] + [(I, stage) for stage in split]
        for weight_gradient, stage in zip(delayed, rest):
            row += [weight_gradient, (I, stage)]
        rows.append(row + delayed[len(rest) :])
    return rows


ORDERS: dict[Timeline, Callable[[Order, int, int], Rows]] = {
    Timeline.CONTINUOUS_1F1B: continuous_1f1b,
    Timeline.INTERLEAVED_1F1B: interleaved_1f1b,
    Timeline.LOOPED_BFS: looped_bfs,
    Timeline.INTERLEAVED_ZB: interleaved_zb,
    Timeline.ZB_H2: zb_h2,
    Timeline.ZB_AUTO: plan_straight,
    Timeline.ZBV: plan_v,
    Timeline.V_HALF: v_half,
    Timeline.V_MIN: v_min,
    Timeline.DUALPIPE_V: dualpipe_v,
}
