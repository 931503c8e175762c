"""Predict the GPT models on V100 servers that the PipeDream-2BW paper measured (Narayanan et al.
2021, Figures 6 to 9).

The paper prints no shapes: 48 blocks of width 1920 have its 2.2 billion parameters, of width 2560
its 3.8 (3.9 in places), with a vocabulary of 50,304 whose embedding is also the head's weight; the
first and the last stage of a pipeline each have a copy. Assumed: sequences of 512, Megatron's heads
and dropout of 0.1, float16 with Adam and float32 masters, recomputation of stages. All devices are
used.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from functools import lru_cache
from typing import Any, Dict, List, Tuple

import torch
from torch import nn

from ipu_pipe.hardware.description import read_hardware
from ipu_pipe.hardware.model_units import count_units
from ipu_pipe.hardware.precision import PRECISIONS
from ipu_pipe.hardware.unit_costs import Unit
from ipu_pipe.job.factories import resolve_entry
from ipu_pipe.model.flops import HOW
from ipu_pipe.plan.candidates import Candidate, list_candidates, list_layouts
from ipu_pipe.plan.planner import search
from ipu_pipe.plan.prediction import Costing, Prediction, Problem, UnitSums, predict_fastest
from ipu_pipe.plan.tensor_parallel import predict_tensor_parallel
from tools.experiments.experiment import PredictedRows, make_prediction
from tools.experiments.verdicts import Verdict, predict_claim, predict_number

SOURCE = "Narayanan et al. 2021 (PipeDream-2BW)"
VOCABULARY, SEQUENCE, BLOCKS = 50304, 512, 48
BATCHES = (512, 2048)
# Megatron's values for the first two
HEADS = {1024: 16, 1920: 20, 2560: 32}
SERVER, DEVICES = "v100x8", 64
NAIVE, GPIPE, FLUSH, TWO_BW = "naive", "gpipe", "pipedream_flush", "pipedream_2bw"
GIGA = 1e9


class _Loss(nn.Module):
    """Cross-entropy of every token, in float32."""

    def forward(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the loss of logits (B, vocabulary, T)."""
        labels = torch.zeros(
            logits.shape[0], logits.shape[2], dtype=torch.long, device=logits.device
        )
        return nn.functional.cross_entropy(logits.float(), labels)


@lru_cache(maxsize=None)
def count_gpt(width: int, blocks: int = BLOCKS) -> Tuple[Unit, ...]:
    """Return the units embedding, blocks, norm, head and loss; the first block is counted, the
    others are equal to it.
    """
    with torch.device("meta"):
        model = resolve_entry("models.transformer:transformer_lm", "model")(
            VOCABULARY, width, HEADS.get(width, width // 128), 1, SEQUENCE, 0.1
        )
        whole = nn.Sequential(OrderedDict([*model.named_children(), ("loss", _Loss())]))
    first, block, *rest, loss = count_units(
        whole, torch.zeros(2, SEQUENCE, dtype=torch.long, device="meta")
    ).units
    # the loss stays in float32: undo the scaling by which the precision float16 shrinks all sizes
    scale = 4 / PRECISIONS["float16"].activation
    loss = replace(
        loss,
        activation_bytes=scale * loss.activation_bytes,
        forward_moved=scale * loss.forward_moved,
        backward_moved=scale * loss.backward_moved,
    )
    return (first, *(replace(block, name=f"block{i + 1}") for i in range(blocks)), *rest, loss)


def make_problem(units: Tuple[Unit, ...], devices: int = DEVICES) -> Problem:
    """Return the planning problem of a model on some of the paper's devices."""
    hardware = read_hardware(SERVER).with_devices(devices)
    return Problem(
        units, 8.0 * SEQUENCE, hardware, hardware.device.usable_bytes, "float16", moments=2
    )


def cut_equally(units: Tuple[Unit, ...], depth: int) -> List[int]:
    """Return the first units of stages that have the same number of blocks (the paper's section
    3.3).
    """
    blocks = sum(unit.name.startswith("block") for unit in units)
    return [0, *(1 + blocks * s // depth for s in range(1, depth))]


def compute_fullest_bytes(problem: Problem, prediction: Prediction) -> float:
    """Return the bytes of the fullest stage.

    Megatron does not recompute the logits and their loss: the last stage keeps those of all its
    microbatches in flight.
    """
    sizes = [float(memory.total) for memory in prediction.memory]
    candidate = prediction.candidate
    in_flight = candidate.gradient_accumulation if candidate.method == GPIPE else 1
    logits = (
        sum(unit.activation_bytes for unit in problem.units[-2:])
        * PRECISIONS["float16"].activation
        / 4
    )
    sizes[-1] += (in_flight - 1) * candidate.micro_batch_size * logits
    return max(sizes)


# ---- Figures 6, 7 and 9


def predict_throughputs(width: int, depth: int, batch: int) -> Dict[str, float]:
    """Return samples per second of the four systems with updates of `batch` samples on 64 devices
    (Figure 6).

    All stages have the same number of blocks. The paper's updates have d g microbatches on d
    stages; g = 1 for the smaller batch makes microbatches of 8. GPipe flushes as often as its
    memory requires.
    """
    problem, replicas = make_problem(count_gpt(width)), DEVICES // depth
    starts, size = cut_equally(problem.units, depth), min(BATCHES) // DEVICES
    count = batch // replicas // size

    def predict_method(method: str, microbatches: int) -> Prediction:
        return predict_fastest(
            problem, Candidate(method, depth, replicas, size, microbatches, True), starts
        )

    def fits(microbatches: int) -> bool:
        return (
            compute_fullest_bytes(problem, predict_method(GPIPE, microbatches))
            <= problem.memory_bytes
        )

    rates = {
        method: predict_method(method, count).samples_per_second
        for method in (NAIVE, FLUSH, TWO_BW)
    }
    flush_after = next((n for n in range(count, 1, -1) if count % n == 0 and fits(n)), 1)
    return {**rates, GPIPE: predict_method(GPIPE, flush_after).samples_per_second}


def predict_memory() -> Dict[str, float]:
    """Return the bytes of the fullest of 8 devices by method: 2.2 billion parameters, batches of 64
    (Figure 7).
    """
    problem = make_problem(count_gpt(1920), 8)
    starts = cut_equally(problem.units, 8)
    return {
        method: compute_fullest_bytes(
            problem, predict_fastest(problem, Candidate(method, 8, 1, 8, 8, True), starts)
        )
        for method in NAMES
    }


def find_largest_model(depth: int) -> float:
    """Return the parameters of the largest GPT that 2BW trains on 64 devices in pipelines of
    `depth` (Figure 9).

    It has 64 blocks, as many on each stage, microbatches of 1, and the greatest width, a multiple
    of 256, that fits.
    """
    parameters = 0.0
    for width in range(512, 16384, 256):
        problem = make_problem(count_gpt(width, 64))
        candidate = Candidate(TWO_BW, depth, DEVICES // depth, 1, depth, True)
        costing = Costing(
            problem, candidate, list_layouts(depth, candidate.width)[0], UnitSums(problem, 1)
        )
        if (
            max(
                memory.total for memory in costing.compute_memory(cut_equally(problem.units, depth))
            )
            > problem.memory_bytes
        ):
            break
        # the head's weight is the embedding's
        parameters = sum(unit.parameters for unit in problem.units[:-2])
    return parameters


def choose_depth(width: int, batch: int) -> int:
    """Return the depth of the planner's best pipeline for 2BW."""
    problem = make_problem(count_gpt(width))
    candidates = list_candidates([TWO_BW], DEVICES, len(problem.units), batch, (True,))
    pipelines = [candidate for candidate in candidates if candidate.depth > 1]
    return search(problem, pipelines, 1).best[0].candidate.depth


def compare_tensor_parallel(width: int, depth: int, devices: int, batch: int) -> float:
    """Return 2BW's throughput over that of tensor parallelism with as many parts (section 5.2),
    both with recomputation.
    """
    problem, replicas = make_problem(count_gpt(width), devices), devices // depth
    candidate = Candidate(TWO_BW, depth, replicas, 8, batch // replicas // 8, True)
    pipeline = predict_fastest(problem, candidate, cut_equally(problem.units, depth))
    tensor = predict_tensor_parallel(problem, devices, depth, batch)
    assert tensor is not None
    return pipeline.samples_per_second / tensor.samples_per_second


def predict_batches(depth: int, size: int) -> List[float]:
    """Return samples per second of 2BW for the batches of Figure 8: 1.3 billion parameters, 24
    blocks of width 2048.
    """
    problem, replicas = make_problem(count_gpt(2048, 24)), DEVICES // depth
    candidates = [
        Candidate(TWO_BW, depth, replicas, size, batch // replicas // size, True)
        for batch in FIGURE_8_BATCHES
    ]
    starts = cut_equally(problem.units, depth)
    return [
        predict_fastest(problem, candidate, starts).samples_per_second for candidate in candidates
    ]


# ---- the table

# parameters, width, and the depth that the paper's planner chose
MODELS = (("2.2 billion", 1920, 8), ("3.8 billion", 2560, 16))
# of Figure 6: a system over another, batch, printed ratio (up to, for the models tried)
RATIOS = (
    (FLUSH, NAIVE, 512, 4.1),
    (FLUSH, NAIVE, 2048, 5.3),
    (TWO_BW, NAIVE, 2048, 6.1),
    (TWO_BW, GPIPE, 512, 3.2),
    (FLUSH, GPIPE, 512, 2.1),
    (FLUSH, GPIPE, 2048, 3.0),
    (TWO_BW, FLUSH, 512, 1.6),
    (TWO_BW, FLUSH, 2048, 1.15),
)
# 2BW over tensor parallelism: parameters, width, ways, devices, batch, printed
TENSOR = (("2.2 billion", 1920, 8, 8, 256, 1.3), ("3.8 billion", 2560, 16, 64, 512, 20.0))
# (depth, microbatch) pairs, and batches
FIGURE_8, FIGURE_8_BATCHES = ((4, 8), (8, 8), (8, 32)), (2048, 4096, 8192)
# the fastest first
ORDER = (TWO_BW, FLUSH, GPIPE, NAIVE)
NAMES = {NAIVE: "inter-layer", GPIPE: "GPipe", FLUSH: "Flush", TWO_BW: "2BW"}


def predict_2bw() -> PredictedRows:
    """Predict ratios of throughput, orders of memory and of model sizes, and the planner's
    choices.
    """
    rows: List[Dict[str, Any]] = []
    verdicts: List[Verdict] = []

    def add(figure: str, what: str, printed: Any, *predicted: Any) -> None:
        row = {
            "figure": figure,
            "what": what,
            "printed": printed,
            **dict(zip(("small", "large"), predicted)),
        }
        if isinstance(printed, float):
            row["error"] = ", ".join(f"{value / printed - 1:+.0%}" for value in predicted)
        rows.append(row)

    def add_claim(claim: str, gap: float) -> None:
        verdicts.append(predict_claim(claim, gap > 0, gap))

    rates = {
        (width, batch): predict_throughputs(width, depth, batch)
        for _, width, depth in MODELS
        for batch in BATCHES
    }
    for faster, slower, batch, printed in RATIOS:
        # the paper compares with inter-layer parallelism only for the smaller model
        models = MODELS[:1] if slower == NAIVE else MODELS
        ratios = [
            round(rates[width, batch][faster] / rates[width, batch][slower], 2)
            for _, width, _ in models
        ]
        add("6", f"{NAMES[faster]} over {NAMES[slower]}, batch {batch}", printed, *ratios)
        claim = (
            f"Figure 6: {NAMES[faster]} is at most {printed} times as fast as {NAMES[slower]}, "
            f"batch {batch}"
        )
        verdicts.append(predict_number(claim, str(printed), max(ratios), at_most=True))
    order = ", ".join(NAMES[method] for method in ORDER)
    for (width, batch), rate in rates.items():
        lead = min(rate[a] / rate[b] - 1 for a, b in zip(ORDER, ORDER[1:]))
        add_claim(f"Figure 6, width {width}, batch {batch}: the order is {order}", lead)
    over_tensor = []
    for name, width, ways, devices, batch, printed in TENSOR:
        ratio = round(compare_tensor_parallel(width, ways, devices, batch), 2)
        over_tensor.append(ratio)
        add(
            "6",
            f"2BW over tensor parallelism, {name} on {devices}, {ways} ways, batch {batch}",
            printed,
            ratio,
        )
        claim = (
            f"Figure 6: 2BW is {printed:g} times as fast as tensor parallelism, {name} on {devices}"
        )
        verdicts.append(predict_number(claim, f"{printed:g}", ratio))
    add_claim(
        "Figure 6: 2BW is faster than tensor parallelism, the more so between servers",
        min(over_tensor[0], over_tensor[1] / over_tensor[0]) - 1,
    )
    memory = predict_memory()
    for method, size in sorted(memory.items(), key=lambda item: item[1]):
        fits = "does not fit" if method == GPIPE else None
        add(
            "7", f"fullest of 8 devices, batch 64, GB: {NAMES[method]}", fits, round(size / GIGA, 1)
        )
    growth = (
        min(
            memory[FLUSH] / memory[NAIVE],
            memory[TWO_BW] / memory[FLUSH],
            memory[GPIPE] / memory[TWO_BW],
        )
        - 1
    )
    add_claim("Figure 7: memory grows from inter-layer over Flush and 2BW to GPipe", growth)
    limit = make_problem(count_gpt(1920), 8).memory_bytes
    add_claim(
        "Figure 7: GPipe alone does not fit",
        min(
            memory[GPIPE] / limit - 1,
            *(1 - memory[method] / limit for method in (NAIVE, FLUSH, TWO_BW)),
        ),
    )
    rates_8 = {(depth, size): predict_batches(depth, size) for depth, size in FIGURE_8}
    for (depth, size), by_batch in rates_8.items():
        shown = ", ".join(f"{rate:.0f}" for rate in by_batch)
        add(
            "8",
            f"samples/s, depth {depth}, microbatch {size}, batches of 2048, 4096, 8192: {shown}",
            None,
        )
    add_claim(
        "Figure 8: throughput grows with the batch",
        min(b / a - 1 for by_batch in rates_8.values() for a, b in zip(by_batch, by_batch[1:])),
    )
    add_claim(
        "Figure 8: 8 deep, microbatches of 32 are faster than of 8",
        min(large / small - 1 for small, large in zip(rates_8[8, 8], rates_8[8, 32])),
    )
    sizes = {depth: find_largest_model(depth) / GIGA for depth in (4, 8, 16, 32, 64)}
    for depth, size in sizes.items():
        printed_size, almost = (30.0, " (printed: almost)") if depth == 64 else (None, "")
        add(
            "9",
            f"largest model, depth {depth}, billions of parameters{almost}",
            printed_size,
            round(size, 1),
        )
    growth = min(sizes[2 * depth] - sizes[depth] for depth in (4, 8, 16, 32))
    verdicts.append(
        predict_claim("Figure 9: a deeper pipeline holds a larger model", growth >= 0, growth)
    )
    claim = "Figure 9: almost 30 billion parameters at depth 64"
    verdicts.append(predict_number(claim, "30", sizes[64]))
    printed_depths = " and ".join(str(depth) for *_, depth in MODELS)
    for batch in BATCHES:
        depths = [choose_depth(width, batch) for _, width, _ in MODELS]
        add("choice", f"depth of the best pipeline, batch {batch}", printed_depths, *depths)
        for (name, _, depth), chosen in zip(MODELS, depths):
            claim = f"the planner's choice for {name} with batches of {batch} is {depth} deep"
            verdicts.append(predict_claim(claim, chosen == depth, chosen - depth))
    notes = [
        "assumed: 48 blocks of width 1920 and 2560, vocabulary 50,304, sequences of 512, float16 "
        "with Adam, recomputation by"
        " stage, as many blocks on each stage except for the planner's own choice, microbatches of "
        "8 (batches of 512 with as many"
        " microbatches as stages); GPipe flushes after as many as fit, and its last stage keeps "
        "the logits of all of them",
        f"FLOPs {HOW}",
        "tensor parallelism by a closed form (plan/tensor_parallel.py), its best microbatch; "
        "Figure 8's shape and smaller"
        " microbatch are assumed",
        'the paper\'s ratios of Figure 6 are the greatest ("up to") of the models and batches that it tried; only those of Flush'
        " over GPipe, and of 2BW over Flush for batches of 2048, are stated plainly",
    ]
    return PredictedRows(rows, notes, verdicts)


TABLE_2BW = make_prediction(
    "plan_2bw",
    "PipeDream-2BW on 64 V100s",
    f"{SOURCE}, Figures 6 to 9",
    {
        "figure": "figure",
        "what": "what",
        "printed": "printed in the paper",
        "small": "predicted, 2.2 billion, 8 deep",
        "large": "predicted, 3.8 billion, 16 deep",
        "error": "error",
    },
    predict_2bw,
)
