"""What holds a configuration back, by how much of its time, and what would lift it.

The time of a batch is taken apart: what devices compute on average, what they wait because a stage is slower than the average
(imbalance), because the pipeline fills and drains or updates (bubble), because messages are under way (link). What recomputation
takes is charged to the memory that asks for it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import List, NamedTuple

from ipu_pipe.plan.batches import compute_batch_time
from ipu_pipe.plan.prediction import Costing, Prediction, Problem, Sums, remove_transfers
from ipu_pipe.schedule.clock import HOST
from ipu_pipe.schedule.methods import METHODS
from ipu_pipe.text import format_bytes

STREAMED = "backend.ipu.tensor_locations.optimizer.on_chip: false"
SMALL = 0.02  # shares of the time below it hold nothing back


class Binding(NamedTuple):
    """`kind`: memory, link, bubble, imbalance or compute. `share` of the time that it takes; `what` it is; what `lifts` it."""

    kind: str
    share: float
    what: str
    lifts: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.what}; {self.lifts}"


def find_binding(problem: Problem, found: Prediction) -> Binding:
    """What takes most of a configuration's time besides the work itself; and what streamed optimizer state takes of it."""
    greatest = max(_held_back(problem, found), key=lambda each: each.share)
    if greatest.share < SMALL:
        greatest = Binding("compute", found.utilization, f"devices are busy {found.utilization:.0%} of the time",
                           "only faster or more devices would do more")  # fmt: skip
    if not problem.streamed:
        return greatest
    share = _streaming_seconds(problem, found) / found.seconds
    said = f"{greatest.what}; optimizer state in streaming memory, whose traffic takes {share:.0%} of the time"
    return greatest._replace(what=said)


def _streaming_seconds(problem: Problem, found: Prediction) -> float:
    """Of an update, the longest of all stages'."""
    on_chip = replace(problem, streamed=False)
    edges = [*found.starts, len(problem.units)]
    longer = [problem.update_seconds(unit) - on_chip.update_seconds(unit) for unit in problem.units]
    return max(sum(longer[a:b]) for a, b in zip(edges, edges[1:]))


def _held_back(problem: Problem, found: Prediction) -> List[Binding]:
    asked, work, seconds = found.asked, found.work, found.seconds
    count, mean, greatest = asked.gradient_accumulation, sum(work) / asked.depth, max(work)
    quiet = compute_batch_time(METHODS[asked.method], asked.depth, count, remove_transfers(found.costs)).seconds
    slowest = work.index(greatest)
    name = problem.units[found.starts[slowest]].name or "the model's beginning"
    idle = max(quiet - count * greatest, 0.0) / seconds
    reasons = [
        Binding(
            "imbalance",
            count * (greatest - mean) / seconds,
            f"stage {slowest} (from {name}) computes {greatest / mean - 1:.0%} more than the mean",
            "boundaries inside its modules, or a depth that divides the model better, would lift it",
        ),
        # a model on one device has no pipeline to fill or drain: beside its passes it updates its weights
        Binding(
            "compute",
            idle,
            f"{idle:.0%} of the time goes to updating the weights",
            "more microbatches an update would lift it",
        )
        if asked.depth == 1
        else Binding(
            "bubble",
            idle,
            f"{idle:.0%} of the time goes to filling, draining and updating",
            "more microbatches an update (a greater batch), fewer stages or a method that does not flush would lift it"
            if METHODS[asked.method].flushes
            else "more microbatches an update would lift it",
        ),
    ]
    if found.link_busy:
        link = max(found.link_busy, key=lambda each: found.link_busy[each])
        reduces = any(link in each.links for each in found.costs.reduce)
        what = "all-reduces of gradients" if reduces else "activations and their gradients"
        what = "samples" if link == HOST else what
        waited, busy = (seconds - quiet) / seconds, min(found.link_busy[link] / seconds, 1.0)
        late = busy < waited / 2  # most of what is waited for is latency
        said = f"{waited:.0%} of the time is waited for messages, "
        if late:
            said += f"most of that for their latency; {link} itself is busy {busy:.2%} of the time, with {what}"
        else:
            said += f"{link} is busy {busy:.0%} of it, with {what}"
        faster = "links of less latency" if late else "a faster link"
        fewer = "or a greater micro_batch_size, of which there are fewer" if late else "or a cut where less crosses"
        lifts = f"{faster}, {'or more microbatches an update' if reduces else fewer}, would lift it"
        reasons.append(Binding("link", waited, said, lifts))
    if asked.recompute and not _fits_without(problem, found):
        fullest = max(range(asked.depth), key=lambda s: found.memory[s].total)
        again = count * sum(found.costs.forward) / asked.depth / seconds
        reasons.append(
            Binding(
                "memory",
                again,
                f"stage {fullest} holds {format_bytes(found.memory[fullest].total)} of {format_bytes(int(problem.memory_bytes))};"
                f" recomputing, which fits, takes {again:.0%} of the time",
                "more memory a device or more stages would lift it",
            )
        )
    return reasons


def _fits_without(problem: Problem, found: Prediction) -> bool:
    asked = replace(found.asked, recompute=False)
    return (
        Costing(problem, asked, found.layout, Sums(problem.of(asked.method), asked.micro_batch_size)).cut() is not None
    )
