"""The rules of the pipelines played out slot by slot, slowly and literally: what the closed forms are tested against.

All stages choose before any completes. `history` gives (stage, kind, microbatch) -> slot.
"""

from __future__ import annotations

from typing import Dict, List, NamedTuple, Optional, Tuple

Slots = Dict[Tuple[int, str, int], int]


class Simulated(NamedTuple):
    slots: Slots  # (stage, "F" or "B", microbatch) -> slot
    length: int
    updates: List[List[Tuple[int, int]]]  # per stage (slot, k), in order


def simulate(pipeline: str, stages: int, microbatches: int, accumulate: int, turn: int = 0) -> Simulated:
    """Play `pipeline` (a value of methods.Pipeline) from the first microbatch to the last."""
    if pipeline in ("sequential", "fill_drain", "1f1b_flush"):
        batch = 1 if pipeline == "sequential" else accumulate
        slots: Slots = {}
        length = 0
        for first in range(0, microbatches, batch):
            piece, piece_length = _stretch(pipeline, stages, min(batch, microbatches - first), turn)
            slots.update({(s, kind, m + first): slot + length for (s, kind, m), slot in piece.items()})
            length += piece_length
    else:
        slots, length = _stretch(pipeline, stages, microbatches, turn, accumulate)
    return Simulated(slots, length, [_updates(slots, s, microbatches, accumulate) for s in range(stages)])


def _updates(slots: Slots, stage: int, microbatches: int, accumulate: int) -> List[Tuple[int, int]]:
    batches = [range(k * accumulate, (k + 1) * accumulate) for k in range(microbatches // accumulate)]
    return [(max(slots[stage, "B", m] for m in batch), k) for k, batch in enumerate(batches)]


def _stretch(pipeline: str, P: int, M: int, turn: int, accumulate: int = 1) -> Tuple[Slots, int]:
    if pipeline in ("local", "local_shared"):
        return _local(P, M, accumulate if pipeline == "local_shared" else 0)
    if pipeline == "dataflow":
        return _dataflow(P, M, turn if P > 1 else 0)
    slots: Slots = {}
    forwards, backwards = [0] * P, [0] * P  # passes done on each stage
    last: List[Optional[str]] = [None] * P
    slot = 0
    while min(backwards) < M:
        chosen = [_choice(pipeline, slots, P, M, s, forwards, backwards, last[s]) for s in range(P)]
        for s, kind in enumerate(chosen):
            if kind is None:
                continue
            done = forwards if kind == "F" else backwards
            slots[s, kind, done[s]] = slot
            done[s] += 1
            last[s] = kind
        slot += 1
    return slots, slot


def _choice(
    pipeline: str, slots: Slots, P: int, M: int, s: int, forwards: List[int], backwards: List[int], last: Optional[str]
) -> Optional[str]:
    """What stage s does in this slot, knowing only what earlier slots completed."""
    m = forwards[s]
    can_forward = m < M and (s == 0 or (s - 1, "F", m) in slots)
    active = forwards[s] - backwards[s]
    if pipeline == "sequential":
        can_forward = can_forward and (s > 0 or active < 1)
    elif pipeline == "1f1b":
        can_forward = can_forward and (s > 0 or active < P)
    elif pipeline in ("1f1b_capped", "1f1b_flush"):
        can_forward = can_forward and active < P - s
    m = backwards[s]
    can_backward = m < M and (s, "F", m) in slots and (s == P - 1 or (s + 1, "B", m) in slots)
    if pipeline == "fill_drain":
        can_backward = can_backward and forwards[s] == M
    if can_forward and can_backward:
        return "F" if last == "B" else "B"
    return "F" if can_forward else "B" if can_backward else None


def _local(P: int, M: int, batch: int) -> Tuple[Slots, int]:
    """Every step, each stage forwards what arrived and, having its own loss, backwards it. With a `batch`, a stage goes on to
    the next one only when the stage behind it has done with this one, whose gradient it must have."""
    slots: Slots = {}
    step = 0
    while (P - 1, "B", M - 1) not in slots:
        done = dict(slots)  # what earlier steps completed
        for s in range(P):
            m = sum((s, "F", other) in done for other in range(M))
            arrived = m < M and (s == 0 or (s - 1, "F", m) in done)
            if batch and m and m % batch == 0 and s < P - 1:
                arrived = arrived and (s + 1, "B", m - 1) in done
            if arrived:
                slots[s, "F", m] = slots[s, "B", m] = step
        step += 1
    return slots, step


def _dataflow(P: int, M: int, turn: int) -> Tuple[Slots, int]:
    """Every step, each stage forwards what arrived and backwards what came back; the last stage turns around."""
    slots: Slots = {}
    step = 0
    while (0, "B", M - 1) not in slots:
        done = dict(slots)  # what earlier steps completed
        for s in range(P):
            for m in range(M):
                arrived = s == 0 or (s - 1, "F", m) in done
                if (s, "F", m) not in done and arrived and (m == 0 or (s, "F", m - 1) in done):
                    slots[s, "F", m] = step
                    break
            for m in range(M):
                back = (s + 1, "B", m) in done if s < P - 1 else slots.get((s, "F", m), step + 1) + turn <= step
                if (s, "B", m) not in done and back:
                    slots[s, "B", m] = step
                    break
        step += 1
    return slots, step
