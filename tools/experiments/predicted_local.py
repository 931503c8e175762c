"""Predict the local-updates paper's speedups and memory on IPUs (Laskin et al. 2020, Tables 1 and
3).

ResNets at 224 x 224 in 16-bit numbers train by SGD with momentum on IPU-M2000s: pipelined
backpropagation, with one update for N microbatches, against one block with an auxiliary head on
each device. Both run in lock-step on the same cut. The paper prints the cut of ResNet-34 on four
devices alone (Table 2); all others are the planner's.
"""

from __future__ import annotations

import itertools
import statistics
from dataclasses import replace
from functools import lru_cache
from typing import Any, Dict, List, NamedTuple, Sequence, Tuple

import torch

from ipu_pipe.hardware.description import LatencyFigure, SizeFigure, read_hardware
from ipu_pipe.hardware.model_units import count_units
from ipu_pipe.hardware.unit_costs import Unit
from ipu_pipe.job.factories import resolve_entry
from ipu_pipe.model.flops import HOW
from ipu_pipe.plan.blocks import BlockUnits, count_blocks
from ipu_pipe.plan.candidates import Candidate, list_layouts
from ipu_pipe.plan.prediction import Costing, Prediction, Problem, UnitSums, predict_cut
from tools.experiments.experiment import PredictedRows, make_prediction
from tools.experiments.verdicts import predict_claim, predict_number

SOURCE = "Laskin et al. 2020 (local updates)"
IMAGE = (3, 224, 224)
PRINTED_CUTS = {("resnet34", 4): ("layer2.0", "layer3.0", "layer4.0")}
BACKPROPAGATION, LOCAL = "pipedream_flush", "local_greedy"
MIB = 2**20


class Speedup(NamedTuple):
    """A row of Table 1: microbatches of `samples`, `accumulate` of them an update of
    backpropagation; speedup in percent.
    """

    network: str
    devices: int
    samples: int
    accumulate: int
    printed: float


class PrintedMemory(NamedTuple):
    """A row of Table 3 in MiB per device; N is twice the number of devices."""

    network: str
    samples: int
    devices: int
    method: str
    recompute: bool
    average: float
    greatest: float


TABLE_1 = (
    Speedup("resnet34", 4, 32, 8, 8),
    Speedup("resnet34", 8, 32, 16, 37),
    Speedup("resnet50", 4, 16, 8, 28),
    Speedup("resnet50", 8, 16, 16, 32),
    Speedup("resnet50", 8, 16, 32, 12),
    Speedup("resnet101", 8, 4, 16, 33),
    Speedup("resnet101", 8, 8, 16, 41),
)
TABLE_3 = (
    PrintedMemory("resnet34", 32, 4, BACKPROPAGATION, True, 581.2, 786.0),
    PrintedMemory("resnet34", 32, 4, BACKPROPAGATION, False, 1221.0, 2523.0),
    PrintedMemory("resnet34", 32, 4, LOCAL, False, 565.0, 788.0),
    PrintedMemory("resnet34", 32, 8, BACKPROPAGATION, True, 480.1, 748.0),
    PrintedMemory("resnet34", 32, 8, LOCAL, False, 443.5, 676.0),
    PrintedMemory("resnet50", 16, 4, BACKPROPAGATION, True, 640.2, 787.0),
    PrintedMemory("resnet50", 16, 4, BACKPROPAGATION, False, 1419.2, 2859.0),
    PrintedMemory("resnet50", 16, 4, LOCAL, False, 593.0, 785.0),
    PrintedMemory("resnet50", 16, 8, BACKPROPAGATION, True, 514.1, 819.0),
    PrintedMemory("resnet50", 16, 8, LOCAL, False, 447.4, 579.0),
    PrintedMemory("resnet101", 4, 8, BACKPROPAGATION, True, 260.8, 442.0),
    PrintedMemory("resnet101", 4, 8, LOCAL, False, 341.2, 365.0),
    PrintedMemory("resnet101", 8, 8, BACKPROPAGATION, True, 360.5, 501.0),
    PrintedMemory("resnet101", 8, 8, LOCAL, False, 390.6, 491.0),
)


# the parts of the cost model that a prediction can leave out
HOST_LINK, MESSAGES, AUXILIARY, SPARED, MOVED = EFFECTS = (
    "the link to the host",
    "messages between devices",
    "auxiliary heads",
    "the gradients that blocks spare",
    "what other operations than products move",
)


@lru_cache(maxsize=None)
def _count_units(network: str) -> Tuple[Tuple[Unit, ...], BlockUnits]:
    with torch.device("meta"):
        model = resolve_entry(f"models.resnet:{network}", "model")()
    x = torch.empty(2, *IMAGE, device="meta")
    units = count_units(model, x).units
    return units, count_blocks(model, x, units)


def predict(
    network: str,
    devices: int,
    samples: int,
    accumulate: int,
    method: str,
    recompute: bool = False,
    without: str = "",
) -> Prediction:
    """Return the prediction for a method on the cut of pipelined backpropagation, `without` one of
    `EFFECTS`.
    """
    units, blocks = _count_units(network)
    heads, first, hardware = blocks.heads, blocks.first, read_hardware("pod16")
    if without == HOST_LINK:
        hardware = hardware.model_copy(update={"host": None})
    elif without == MESSAGES:
        free = {"bandwidth": SizeFigure(value=1e18), "latency": LatencyFigure(value=0.0)}
        hardware = hardware.model_copy(
            update={"links": tuple(level.model_copy(update=free) for level in hardware.links)}
        )
    elif without == AUXILIARY:
        nothing: Dict[str, Any] = dict.fromkeys(
            (
                "forward_flops",
                "backward_flops",
                "activation_bytes",
                "forward_moved",
                "backward_moved",
            ),
            0.0,
        )
        heads = tuple(replace(head, parameters=0, **nothing) for head in heads)
    elif without == SPARED:
        first = units
    elif without == MOVED:
        units, heads, first = (
            tuple(replace(unit, forward_moved=0.0, backward_moved=1e-9) for unit in part)
            for part in (units, heads, first)
        )
    numbers = IMAGE[0] * IMAGE[1] * IMAGE[2]
    problem = Problem(units, 2.0 * numbers, hardware, 1e15, "16.16", 1, BlockUnits(heads, first))
    layout, sums = list_layouts(devices, 1)[0], UnitSums(problem, samples)
    names = [unit.name for unit in units]
    candidate = Candidate(BACKPROPAGATION, devices, 1, samples, accumulate, False)
    printed = PRINTED_CUTS.get((network, devices))
    starts = (
        [0, *map(names.index, printed)]
        if printed
        else Costing(problem, candidate, layout, sums).find_cut()
    )
    # any cut fits 1e15 bytes
    assert starts is not None
    # a block is updated after each microbatch
    updates = 1 if method == LOCAL else accumulate
    candidate = replace(
        candidate, method=method, gradient_accumulation=updates, recompute=recompute
    )
    return predict_cut(Costing(problem, candidate, layout, sums), starts)


def predict_speedup(row: Speedup, without: str = "") -> float:
    """Return the speedup of local training over pipelined backpropagation, in percent, without time
    for recomputation.

    On the paper's IPUs recomputation takes no time (its appendix E.3).
    """
    local, backpropagation = (
        predict(*row[:4], method=method, without=without) for method in (LOCAL, BACKPROPAGATION)
    )
    return 100 * (local.samples_per_second / backpropagation.samples_per_second - 1)


def compute_bound(row: Speedup) -> float:
    """Return the speedup of balanced stages without messages, (N + P - 1) / N, in percent."""
    return 100 * (row.devices - 1) / row.accumulate


def compute_mean_error(predicted: Sequence[float]) -> float:
    """Return the mean absolute difference from the printed speedups."""
    return sum(abs(value - row.printed) for value, row in zip(predicted, TABLE_1)) / len(TABLE_1)


def predict_speedups() -> PredictedRows:
    """Predict the seven speedups, with no constant fitted to them, and without each of the
    effects.
    """
    predicted = [predict_speedup(row) for row in TABLE_1]
    bounds = [compute_bound(row) for row in TABLE_1]
    errors = {
        "no constant fitted": compute_mean_error(predicted),
        "balanced bound (N+P-1)/N": compute_mean_error(bounds),
        "the bound times the best constant": min(
            compute_mean_error([b * c / 1000 for b in bounds]) for c in range(1, 1500)
        ),
        "the bound minus the best constant": min(
            compute_mean_error([b - c / 10 for b in bounds]) for c in range(400)
        ),
        "the best constant alone": compute_mean_error(
            [statistics.median(row.printed for row in TABLE_1)] * len(TABLE_1)
        ),
    }
    errors_without = {
        effect: compute_mean_error([predict_speedup(row, effect) for row in TABLE_1])
        for effect in EFFECTS
    }
    rows: List[Dict[str, Any]] = [
        {
            "network": row.network,
            "devices": row.devices,
            "batch": f"{row.samples} x {row.accumulate}",
            "cut": "the paper's" if (row.network, row.devices) in PRINTED_CUTS else "the planner's",
            "printed": row.printed,
            "predicted": round(a, 1),
            "error": round(a - row.printed, 1),
            "bound": round(b, 1),
        }
        for row, a, b in zip(TABLE_1, predicted, bounds)
    ]
    notes = [f"mean absolute error, points: {name}: {error:.1f}" for name, error in errors.items()]
    notes += [f"without {name}: {error:.1f}" for name, error in errors_without.items()]
    notes.append(f"FLOPs {HOW}")
    verdicts = [
        predict_number(
            f"{row.network}, {row.devices} devices, {row.accumulate} microbatches of "
            f"{row.samples}: {row.printed} %",
            str(row.printed),
            value,
            "points",
        )
        for row, value in zip(TABLE_1, predicted)
    ]
    by_microbatches = {
        row.accumulate: value
        for row, value in zip(TABLE_1, predicted)
        if row[:3] == ("resnet50", 8, 16)
    }
    verdicts += [
        predict_claim(
            "local training is faster in all seven rows (difference: the least speedup)",
            min(predicted) > 0,
            min(predicted),
        ),
        predict_claim(
            "resnet50, 8 devices: 32 microbatches gain less than 16",
            by_microbatches[16] > by_microbatches[32],
            by_microbatches[16] - by_microbatches[32],
        ),
    ]
    return PredictedRows(rows, notes, verdicts)


def predict_memory() -> PredictedRows:
    """Predict the memory per IPU, its errors, and the pairs of rows whose order differs from the
    paper's.
    """
    rows: List[Dict[str, Any]] = []
    for row in TABLE_3:
        prediction = predict(
            row.network, row.devices, row.samples, 2 * row.devices, row.method, row.recompute
        )
        sizes = [memory.total / MIB for memory in prediction.memory]
        average, greatest = sum(sizes) / len(sizes), max(sizes)
        rows.append(
            {
                "network": row.network,
                "samples": row.samples,
                "devices": row.devices,
                "method": "local"
                if row.method == LOCAL
                else "backpropagation, recompute"
                if row.recompute
                else "backpropagation",
                "printed": row.average,
                "predicted": round(average, 1),
                "error": f"{average / row.average - 1:+.0%}",
                "printed_max": row.greatest,
                "predicted_max": round(greatest, 1),
                "error_max": f"{greatest / row.greatest - 1:+.0%}",
            }
        )
    verdicts, pairs = [], len(rows) * (len(rows) - 1) // 2
    for what, end in (("averages", ""), ("greatest values", "_max")):
        swapped = _count_swapped_pairs(rows, f"predicted{end}", f"printed{end}")
        claim = (
            f"all {pairs} pairs of {what} are in the printed order (difference: pairs that are not)"
        )
        verdicts.append(predict_claim(claim, not swapped, swapped))
    notes = [
        "predictions count weights, gradients, momentum, stashed activations and a stated share of "
        "code and exchange (20 %), not"
        " the temporary memory of operations while they run",
    ]
    return PredictedRows(rows, notes, verdicts)


def _count_swapped_pairs(rows: Sequence[Dict[str, Any]], predicted: str, printed: str) -> int:
    """Return the number of pairs of rows that the paper has in the other order."""
    pairs = itertools.combinations(rows, 2)
    return sum((a[predicted] - b[predicted]) * (a[printed] - b[printed]) < 0 for a, b in pairs)


SPEEDUP_TABLE = make_prediction(
    "plan_local_table1",
    "Speedup of chunked local training over pipelined backpropagation on IPUs, percent",
    f"{SOURCE}, Table 1",
    {
        "network": "network",
        "devices": "IPUs",
        "batch": "microbatch x number",
        "cut": "cut",
        "printed": "printed in the paper",
        "predicted": "predicted, nothing fitted",
        "error": "error, points",
        "bound": "balanced bound",
    },
    predict_speedups,
)
MEMORY_TABLE = make_prediction(
    "plan_local_table3",
    "Memory per IPU, MiB",
    f"{SOURCE}, Table 3",
    {
        "network": "network",
        "samples": "microbatch",
        "devices": "IPUs",
        "method": "method",
        "printed": "average, printed",
        "predicted": "average, predicted",
        "error": "error",
        "printed_max": "greatest, printed",
        "predicted_max": "greatest, predicted",
        "error_max": "error",
    },
    predict_memory,
)
