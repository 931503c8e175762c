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
from ipu_pipe.text import format_bytes

STREAMED = "backend.ipu.tensor_locations.optimizer.on_chip: false"
SMALL = 0.02  # shares of the time below it hold nothing back


class Binding(NamedTuple):
    """What holds a configuration back. `kind`: memory, link, bubble, imbalance or compute; the `share` of the time that it takes;
    `what` it is and what `lifts` it, in words."""

    kind: str
    share: float
    what: str
    lifts: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.what}; {self.lifts}"


def find_binding(problem: Problem, prediction: Prediction) -> Binding:
    """Return what takes most of a configuration's time besides the work itself, and what streamed optimizer state takes of it."""
    greatest = max(_list_bindings(problem, prediction), key=lambda binding: binding.share)
    if greatest.share < SMALL:
        greatest = Binding("compute", prediction.utilization, f"devices are busy {prediction.utilization:.0%} of the time",
                           "only faster or more devices would do more")  # fmt: skip
    if not problem.streamed:
        return greatest
    share = _sum_streaming_seconds(problem, prediction) / prediction.seconds
    words = f"{greatest.what}; optimizer state in streaming memory, whose traffic takes {share:.0%} of the time"
    return greatest._replace(what=words)


def _sum_streaming_seconds(problem: Problem, prediction: Prediction) -> float:
    """Return the seconds of an update that streaming takes on the stage where it takes longest."""
    on_chip = replace(problem, streamed=False)
    edges = [*prediction.starts, len(problem.units)]
    longer = [problem.get_update_seconds(unit) - on_chip.get_update_seconds(unit) for unit in problem.units]
    return max(sum(longer[a:b]) for a, b in zip(edges, edges[1:]))


def _list_bindings(problem: Problem, prediction: Prediction) -> List[Binding]:
    """Return everything that holds a configuration back, in no order."""
    asked, loads, seconds = prediction.asked, prediction.loads, prediction.seconds
    count, mean, greatest = asked.gradient_accumulation, sum(loads) / asked.depth, max(loads)
    quiet = compute_batch_time(asked.row, asked.stages, count, remove_transfers(prediction.costs)).seconds
    slowest, kind = loads.index(greatest), "stage" if asked.stages_per_device == 1 else "device"
    name = problem.units[prediction.starts[slowest]].name or "the model's beginning"
    idle = max(quiet - count * greatest, 0.0) / seconds
    reasons = [
        Binding(
            "imbalance",
            count * (greatest - mean) / seconds,
            f"{kind} {slowest} (from {name}) computes {greatest / mean - 1:.0%} more than the mean",
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
            if asked.row.flushes
            else "more microbatches an update would lift it",
        ),
    ]
    if prediction.link_busy:
        link = max(prediction.link_busy, key=lambda link: prediction.link_busy[link])
        reduces = any(link in transfer.links for transfer in prediction.costs.reduce)
        what = "all-reduces of gradients" if reduces else "activations and their gradients"
        what = "samples" if link == HOST else what
        waited, busy = (seconds - quiet) / seconds, min(prediction.link_busy[link] / seconds, 1.0)
        late = busy < waited / 2  # most of what is waited for is latency
        words = f"{waited:.0%} of the time is waited for messages, "
        if late:
            words += f"most of that for their latency; {link} itself is busy {busy:.2%} of the time, with {what}"
        else:
            words += f"{link} is busy {busy:.0%} of it, with {what}"
        faster = "links of less latency" if late else "a faster link"
        fewer = "or a greater micro_batch_size, of which there are fewer" if late else "or a cut where less crosses"
        lifts = f"{faster}, {'or more microbatches an update' if reduces else fewer}, would lift it"
        reasons.append(Binding("link", waited, words, lifts))
    if asked.recompute and not _fits_without_recomputing(problem, prediction):
        fullest = max(range(asked.depth), key=lambda s: prediction.memory[s].total)
        again = count * sum(prediction.costs.forward) / asked.depth / seconds
        reasons.append(
            Binding(
                "memory",
                again,
                f"{kind} {fullest} holds {format_bytes(prediction.memory[fullest].total)} of"
                f" {format_bytes(int(problem.memory_bytes))}; recomputing, which fits, takes {again:.0%} of the time",
                "more memory a device or more stages would lift it",
            )
        )
    return reasons


def _fits_without_recomputing(problem: Problem, prediction: Prediction) -> bool:
    asked = replace(prediction.asked, recompute=False)
    return (
        Costing(problem, asked, prediction.layout, Sums(problem.resolve(asked.method), asked.micro_batch_size)).cut()
        is not None
    )
