"""The local-updates paper's speedups and memory on IPUs (Laskin et al. 2020, Tables 1 and 3), predicted.

ResNets at 224 x 224 in 16-bit numbers train by SGD with momentum on IPU-M2000s: pipelined backpropagation, with one update for N
microbatches, against one block with an auxiliary head on each device. Both run in lock-step on the same cut. The paper prints the
cut of ResNet-34 on four devices alone (Table 2); all others are the planner's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Callable, Dict, Iterable, List, NamedTuple, Sequence, Tuple

import torch

from ipu_pipe.hardware.description import Hardware, LatencyFigure, SizeFigure, read_hardware
from ipu_pipe.hardware.model_units import count_units
from ipu_pipe.hardware.unit_costs import Unit
from ipu_pipe.job.import_strings import resolve_entry
from ipu_pipe.model.flops import HOW
from ipu_pipe.plan.blocks import BlockUnits, count_blocks
from ipu_pipe.plan.candidates import Candidate
from ipu_pipe.plan.layouts import list_layouts
from ipu_pipe.plan.prediction import Costing, Prediction, Problem, Sums, predict_cut
from ipu_pipe.studies.experiment import PredictedRows, PredictionTable, compute_mean_error

SOURCE = "Laskin et al. 2020 (local updates)"
IMAGE = (3, 224, 224)
PRINTED_CUTS = {("resnet34", 4): ("layer2.0", "layer3.0", "layer4.0")}
BACKPROPAGATION, LOCAL = "pipedream_flush", "local_greedy"
MIB = 2**20


class Speedup(NamedTuple):
    """A row of Table 1: microbatches of `samples`, `accumulate` of them an update of backpropagation; speedup in percent."""

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
    Speedup("resnet34", 4, 32, 8, 8), Speedup("resnet34", 8, 32, 16, 37), Speedup("resnet50", 4, 16, 8, 28),
    Speedup("resnet50", 8, 16, 16, 32), Speedup("resnet50", 8, 16, 32, 12), Speedup("resnet101", 8, 4, 16, 33),
    Speedup("resnet101", 8, 8, 16, 41),
)  # fmt: skip
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


@dataclass(frozen=True)
class Effects:
    """The effects that a prediction takes into account; each entry of `WITHOUT` leaves one out."""

    hardware: Callable[[Hardware], Hardware] = lambda hardware: hardware
    units: Callable[[Unit], Unit] = lambda unit: unit
    heads: bool = True
    spares: bool = True


def _remove_messages(hardware: Hardware) -> Hardware:
    free = {"bandwidth": SizeFigure(value=1e18), "latency": LatencyFigure(value=0.0)}
    return hardware.model_copy(update={"links": tuple(level.model_copy(update=free) for level in hardware.links)})


ALL = Effects()
WITHOUT: Dict[str, Effects] = {
    "the link to the host": Effects(hardware=lambda hardware: hardware.model_copy(update={"host": None})),
    "messages between devices": Effects(hardware=_remove_messages),
    "auxiliary heads": Effects(heads=False),
    "the gradients that blocks spare": Effects(spares=False),
    "what other operations than products move": Effects(
        units=lambda unit: replace(unit, forward_moved=0.0, backward_moved=1e-9)
    ),
}


@lru_cache(maxsize=None)
def _count(network: str) -> Tuple[Tuple[Unit, ...], BlockUnits]:
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
    effects: Effects = ALL,
) -> Prediction:
    """Return the prediction for a method on the cut of pipelined backpropagation."""
    units, blocks = _count(network)
    heads = tuple(effects.units(head) for head in blocks.heads)
    if not effects.heads:
        heads = tuple(replace(head, forward_flops=0.0, backward_flops=0.0, parameters=0, activation_bytes=0.0,
                              forward_moved=0.0, backward_moved=0.0) for head in heads)  # fmt: skip
    units = tuple(effects.units(unit) for unit in units)
    first = tuple(effects.units(unit) for unit in blocks.first) if effects.spares else units
    numbers = IMAGE[0] * IMAGE[1] * IMAGE[2]
    hardware = effects.hardware(read_hardware("pod16"))
    problem = Problem(units, 2.0 * numbers, hardware, 1e15, "16.16", 1, BlockUnits(heads, first))
    layout, sums = list_layouts(devices, 1)[0], Sums(problem, samples)
    names = [unit.name for unit in units]
    candidate = Candidate(BACKPROPAGATION, devices, 1, samples, accumulate, False)
    printed = PRINTED_CUTS.get((network, devices))
    starts = [0, *map(names.index, printed)] if printed else Costing(problem, candidate, layout, sums).cut()
    assert starts is not None  # any cut fits 1e15 bytes
    updates = 1 if method == LOCAL else accumulate  # a block is updated after each microbatch
    candidate = replace(candidate, method=method, gradient_accumulation=updates, recompute=recompute)
    return predict_cut(Costing(problem, candidate, layout, sums), starts)


def predict_speedup(row: Speedup, effects: Effects = ALL) -> float:
    """Return the speedup of local training over pipelined backpropagation, in percent, without time for recomputation.

    On the paper's IPUs recomputation takes no time (its appendix E.3).
    """
    local, back = (predict(*row[:4], method=method, effects=effects) for method in (LOCAL, BACKPROPAGATION))
    return 100 * (local.samples_per_second / back.samples_per_second - 1)


def compute_bound(row: Speedup) -> float:
    """Return the speedup of balanced stages without messages, (N + P - 1) / N, in percent."""
    return 100 * (row.devices - 1) / row.accumulate


def find_best_factor(predicted: Sequence[float], printed: Sequence[float]) -> float:
    """Return the factor of the ratio of throughputs that makes the mean error least: one of the rows' own factors does."""
    factors = [(100 + b) / (100 + a) for a, b in zip(predicted, printed)]
    return min(factors, key=lambda factor: compute_mean_error([scale(a, factor) for a in predicted], printed))


def scale(percent: float, factor: float) -> float:
    """Return a speedup in percent with the ratio of throughputs multiplied by `factor`."""
    return (100 + percent) * factor - 100


def predict_speedups() -> PredictedRows:
    """Predict the seven speedups, with no constant fitted to them, and with one fitted on the other six."""
    printed = [row.printed for row in TABLE_1]
    predicted = [predict_speedup(row) for row in TABLE_1]
    bounds = [compute_bound(row) for row in TABLE_1]
    fitted = []  # each with the factor that fits the other six rows best
    for i, value in enumerate(predicted):
        others = predicted[:i] + predicted[i + 1 :], printed[:i] + printed[i + 1 :]
        fitted.append(scale(value, find_best_factor(*others)))

    def compute_least_error(candidates: Iterable[List[float]]) -> float:
        return min(compute_mean_error(values, printed) for values in candidates)

    errors = {
        "no constant fitted": compute_mean_error(predicted, printed),
        "one factor of the ratio, fitted on the other six": compute_mean_error(fitted, printed),
        "balanced bound (N+P-1)/N": compute_mean_error(bounds, printed),
        "the bound times the best constant": compute_least_error(
            [b * c / 1000 for b in bounds] for c in range(1, 1500)
        ),
        "the bound minus the best constant": compute_least_error([b - c / 10 for b in bounds] for c in range(400)),
    }
    errors_without = {
        name: compute_mean_error([predict_speedup(row, effects) for row in TABLE_1], printed)
        for name, effects in WITHOUT.items()
    }
    rows: List[Dict[str, Any]] = [
        {
            "network": row.network, "devices": row.devices, "batch": f"{row.samples} x {row.accumulate}",
            "cut": "the paper's" if (row.network, row.devices) in PRINTED_CUTS else "the planner's",
            "printed": row.printed, "predicted": round(a, 1), "error": round(a - row.printed, 1), "left_out": round(b, 1),
            "bound": round(c, 1),
        }
        for row, a, b, c in zip(TABLE_1, predicted, fitted, bounds)
    ]  # fmt: skip
    notes = [f"mean absolute error, points: {name}: {error:.1f}" for name, error in errors.items()]
    notes += [f"without {name}: {error:.1f}" for name, error in errors_without.items()]
    notes += [f"FLOPs {HOW}"]
    error = errors["no constant fitted"]
    return PredictedRows(rows, notes, [] if error <= 8 else [f"mean error {error:.1f} points, aim at most 8"])


def predict_memory() -> PredictedRows:
    """Predict the memory per IPU, its errors, and the pairs of rows whose order differs from the paper's."""
    rows: List[Dict[str, Any]] = []
    for row in TABLE_3:
        prediction = predict(row.network, row.devices, row.samples, 2 * row.devices, row.method, row.recompute)
        sizes = [memory.total / MIB for memory in prediction.memory]
        average, greatest = sum(sizes) / len(sizes), max(sizes)
        rows.append({
            "network": row.network, "samples": row.samples, "devices": row.devices,
            "method": "local" if row.method == LOCAL else "backpropagation, recompute" if row.recompute else "backpropagation",
            "printed": row.average, "predicted": round(average, 1), "error": f"{average / row.average - 1:+.0%}",
            "printed_max": row.greatest, "predicted_max": round(greatest, 1), "error_max": f"{greatest / row.greatest - 1:+.0%}",
        })  # fmt: skip
    differences = [
        *_list_swapped_pairs(rows, "predicted", "printed"),
        *_list_swapped_pairs(rows, "predicted_max", "printed_max"),
    ]
    pairs = len(rows) * (len(rows) - 1) // 2
    wrong = [len(_list_swapped_pairs(rows, f"predicted{end}", f"printed{end}")) for end in ("", "_max")]
    notes = [
        f"{pairs - wrong[0]} of {pairs} pairs of averages and {pairs - wrong[1]} of greatest values are in the printed order",
        "predictions count weights, gradients, momentum, stashed activations and a stated share of code and exchange (20 %), not"
        " the temporary memory of operations while they run",
    ]
    return PredictedRows(rows, notes, differences)


def _list_swapped_pairs(rows: Sequence[Dict[str, Any]], predicted: str, printed: str) -> List[str]:
    """Return the pairs of rows that the paper has in the other order, in words."""
    what = "greatest" if predicted.endswith("max") else "average"

    def name(row: Dict[str, Any]) -> str:
        return f"{row['network']}, {row['samples']} on {row['devices']}, {row['method']}"

    return [
        f"{what}: {name(a)}: predicted {a[predicted]:.0f}, printed {a[printed]:.0f}; "
        f"{name(b)}: {b[predicted]:.0f}, {b[printed]:.0f}"
        for i, a in enumerate(rows)
        for b in rows[i + 1 :]
        if (a[predicted] - b[predicted]) * (a[printed] - b[printed]) < 0
    ]


SPEEDUP_TABLE = PredictionTable(
    "plan_local_table1",
    "Speedup of chunked local training over pipelined backpropagation on IPUs, percent",
    f"{SOURCE}, Table 1",
    (
        ("network", "network"), ("devices", "IPUs"), ("batch", "microbatch x number"), ("cut", "cut"),
        ("printed", "printed in the paper"), ("predicted", "predicted, nothing fitted"), ("error", "error, points"),
        ("left_out", "predicted, one factor fitted on the other six rows"), ("bound", "balanced bound"),
    ),
    predict_speedups,
)  # fmt: skip
MEMORY_TABLE = PredictionTable(
    "plan_local_table3",
    "Memory per IPU, MiB",
    f"{SOURCE}, Table 3",
    (
        ("network", "network"), ("samples", "microbatch"), ("devices", "IPUs"), ("method", "method"),
        ("printed", "average, printed"), ("predicted", "average, predicted"), ("error", "error"),
        ("printed_max", "greatest, printed"), ("predicted_max", "greatest, predicted"), ("error_max", "error"),
    ),
    predict_memory,
)  # fmt: skip
