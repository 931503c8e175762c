"""What the PipeDream-2BW paper measured with GPT models on V100 servers (Narayanan et al. 2021, Figures 6, 7 and 9), predicted.

The paper prints no shapes: 48 blocks of width 1920 are its 2.2 billion parameters, of width 2560 its 3.8 (3.9 in places), with a
vocabulary of 50,304 whose embedding is also the head's weight; on a pipeline's first and last stage each has a copy. Sequences of
512, Megatron's heads and dropout of 0.1, float16 with Adam and float32 masters, recomputation of stages. All devices are used.
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
from ipu_pipe.job.import_strings import resolve_entry
from ipu_pipe.model.flops import HOW
from ipu_pipe.plan.candidates import Candidate, list_candidates
from ipu_pipe.plan.layouts import list_layouts
from ipu_pipe.plan.prediction import Costing, Prediction, Problem, Sums, predict_cut
from ipu_pipe.plan.search import search
from ipu_pipe.studies.predictions import Predicted

SOURCE = "Narayanan et al. 2021 (PipeDream-2BW)"
VOCABULARY, SEQUENCE, BLOCKS = 50304, 512, 48
BATCHES = (512, 2048)
HEADS = {1024: 16, 1920: 20, 2560: 32}  # Megatron's for the first two
SERVER, DEVICES = "v100x8", 64
NAIVE, GPIPE, FLUSH, TWO_BW = "naive", "gpipe", "pipedream_flush", "pipedream_2bw"
GIGA = 1e9


class _Loss(nn.Module):
    """Cross-entropy of every place, in float32."""

    def forward(self, logits: torch.Tensor) -> torch.Tensor:
        """logits: (B, vocabulary, T)."""
        labels = torch.zeros(logits.shape[0], logits.shape[2], dtype=torch.long, device=logits.device)
        return nn.functional.cross_entropy(logits.float(), labels)


@lru_cache(maxsize=None)
def gpt_units(width: int, blocks: int = BLOCKS) -> Tuple[Unit, ...]:
    """Embedding, blocks, norm, head and loss; the first block is counted, the others are like it. The loss is in float32 whatever
    the precision."""
    with torch.device("meta"):
        model = resolve_entry("models.transformer:transformer_lm", "model")(
            VOCABULARY, width, HEADS.get(width, width // 128), 1, SEQUENCE, 0.1
        )
        whole = nn.Sequential(OrderedDict([*model.named_children(), ("loss", _Loss())]))
    first, block, *rest, loss = count_units(whole, torch.zeros(2, SEQUENCE, dtype=torch.long, device="meta")).units
    halved = 4 / PRECISIONS["float16"].activation  # float16 makes of all sizes
    loss = replace(
        loss,
        activation_bytes=halved * loss.activation_bytes,
        forward_moved=halved * loss.forward_moved,
        backward_moved=halved * loss.backward_moved,
    )
    return (first, *(replace(block, name=f"block{i + 1}") for i in range(blocks)), *rest, loss)


def problem(units: Tuple[Unit, ...], devices: int = DEVICES) -> Problem:
    """On so many of the paper's devices."""
    hardware = read_hardware(SERVER).with_devices(devices)
    return Problem(units, 8.0 * SEQUENCE, hardware, hardware.device.usable_bytes, "float16", "adam")


def equal_cut(units: Tuple[Unit, ...], depth: int) -> List[int]:
    """First units of stages with as many blocks each (the paper's section 3.3)."""
    blocks = sum(unit.name.startswith("block") for unit in units)
    return [0, *(1 + blocks * s // depth for s in range(1, depth))]


def single_worker_flops() -> float:
    """FLOPs a second of the 355M-parameter GPT (24 blocks of 1024) on one device; the paper states about 45e12, from which the
    share of the peak in its hardware's file comes."""
    given = problem(gpt_units(1024, 24), 1)
    sums = Sums(given, 8)
    asked = Candidate(FLUSH, 1, 1, 8, 1, False)
    costs = Costing(given, asked, list_layouts(1, 1)[0], sums).costs([0])
    flops = sum(unit.forward_flops + unit.backward_flops for unit in given.units)
    return 8 * flops / (costs.forward[0] + costs.backward[0])


# ---- memory


def kept_logits(units: Tuple[Unit, ...], samples: int) -> float:
    """Bytes of a microbatch behind the blocks, which Megatron does not recompute: logits and their loss."""
    behind = units[-2:]
    sizes = PRECISIONS["float16"]
    return samples * sum(unit.activation_bytes for unit in behind) * sizes.activation / 4


def fullest(given: Problem, found: Prediction) -> float:
    """Bytes of the fullest stage, with the logits of all microbatches that its last stage has in flight."""
    sizes = [float(memory.total) for memory in found.memory]
    flying = _flying(found.asked)
    sizes[-1] += (flying - 1) * kept_logits(given.units, found.asked.micro_batch_size)
    return max(sizes)


def _flying(asked: Candidate) -> int:
    """Microbatches that the last stage holds at once."""
    return asked.gradient_accumulation if asked.method == GPIPE else 1


def predict(given: Problem, asked: Candidate, starts: List[int]) -> Prediction:
    """On the better of its layouts."""
    sums = Sums(given, asked.micro_batch_size)
    found = [predict_cut(Costing(given, asked, layout, sums), starts) for layout in list_layouts(asked.depth, asked.width)]
    return max(found, key=lambda each: each.samples_per_second)


# ---- Figure 6


def throughputs(width: int, depth: int, batch: int) -> Dict[str, float]:
    """Samples a second of the four systems with updates of `batch` samples on 64 devices, on stages with as many blocks each. The
    paper's updates have d g microbatches on d stages; that the smaller batch has g = 1 makes microbatches of 8. GPipe flushes as
    often as its memory asks for: after `flushed` microbatches."""
    given, replicas = problem(gpt_units(width)), DEVICES // depth
    starts, size = equal_cut(given.units, depth), min(BATCHES) // DEVICES
    count = batch // replicas // size

    def made(method: str, number: int) -> Prediction:
        return predict(given, Candidate(method, depth, replicas, size, number, True), starts)

    rates = {method: made(method, count).samples_per_second for method in (NAIVE, FLUSH, TWO_BW)}
    flushed = next(
        (n for n in range(count, 1, -1) if count % n == 0 and fullest(given, made(GPIPE, n)) <= given.memory_bytes), 1
    )
    return {**rates, GPIPE: made(GPIPE, flushed).samples_per_second, "flushed": float(flushed)}


# ---- Figure 9


def largest(depth: int) -> float:
    """Parameters of the largest GPT that 2BW trains on 64 devices in pipelines of `depth`, with microbatches of 1: 64 blocks, as
    many on each stage, and the greatest width, a multiple of 256, that fits."""
    found = 0.0
    for width in range(512, 16384, 256):
        given = problem(gpt_units(width, 64))
        asked = Candidate(TWO_BW, depth, DEVICES // depth, 1, depth, True)
        costing = Costing(given, asked, list_layouts(depth, asked.width)[0], Sums(given, 1))
        if max(memory.total for memory in costing.memories(equal_cut(given.units, depth))) > given.memory_bytes:
            break
        found = sum(unit.parameters for unit in given.units[:-2])  # the head's weight is the embedding's
    return found


# ---- the table


def chosen(width: int, batch: int) -> int:
    """The depth of the planner's best pipeline for 2BW."""
    given = problem(gpt_units(width))
    asked = [each for each in list_candidates([TWO_BW], DEVICES, len(given.units), batch, (True,)) if each.depth > 1]
    return search(given, asked, 1).best[0].asked.depth


MODELS = (
    ("2.2 billion", 1920, 8),
    ("3.8 billion", 2560, 16),
)  # parameters, width, and the depth that the paper's planner chose
RATIOS = (  # of Figure 6: a system over another, batch, printed (up to, for the models tried)
    (FLUSH, NAIVE, 512, 4.1), (FLUSH, NAIVE, 2048, 5.3), (TWO_BW, NAIVE, 2048, 6.1), (TWO_BW, GPIPE, 512, 3.2),
    (FLUSH, GPIPE, 512, 2.1), (FLUSH, GPIPE, 2048, 3.0), (TWO_BW, FLUSH, 512, 1.6), (TWO_BW, FLUSH, 2048, 1.15),
)  # fmt: skip
NAMES = {NAIVE: "inter-layer", GPIPE: "GPipe", FLUSH: "Flush", TWO_BW: "2BW"}


def table_2bw() -> Predicted:
    """Ratios of throughput, orderings of memory and of model sizes, and the planner's choices."""
    rows: List[Dict[str, Any]] = []
    differences: List[str] = []

    def add(figure: str, what: str, printed: Any, *predicted: Any) -> None:
        rows.append({"figure": figure, "what": what, "printed": printed, **dict(zip(("small", "large"), predicted))})

    rates = {(width, batch): throughputs(width, depth, batch) for _, width, depth in MODELS for batch in BATCHES}
    for (
        one,
        other,
        batch,
        printed,
    ) in RATIOS:  # against inter-layer parallelism the paper states the smaller model's alone
        models = MODELS[:1] if other == NAIVE else MODELS
        found = [rates[width, batch][one] / rates[width, batch][other] for _, width, _ in models]
        add("6", f"{NAMES[one]} over {NAMES[other]}, batch {batch}", printed, *(round(each, 2) for each in found))
    for (width, batch), rate in rates.items():
        order = sorted(NAMES, key=lambda name: -rate[name])
        if order != [TWO_BW, FLUSH, GPIPE, NAIVE]:
            differences.append(
                f"Figure 6, width {width}, batch {batch}: in the order {', '.join(NAMES[n] for n in order)}"
            )
    differences += _memory(add)
    sizes = {depth: largest(depth) / GIGA for depth in (4, 8, 16, 32, 64)}
    for depth, size in sizes.items():
        add(
            "9",
            f"largest model, depth {depth}, billions of parameters",
            "almost 30" if depth == 64 else None,
            round(size, 1),
        )
    if list(sizes.values()) != sorted(sizes.values()):
        differences.append("Figure 9: a deeper pipeline holds no larger model")
    for batch in BATCHES:
        depths = [chosen(width, batch) for _, width, _ in MODELS]
        add(
            "choice",
            f"depth of the best pipeline, batch {batch}",
            " and ".join(str(depth) for *_, depth in MODELS),
            *depths,
        )
        differences += [
            f"the planner's choice for {name} with batches of {batch}: {found} deep, the paper's {depth}"
            for (name, _, depth), found in zip(MODELS, depths)
            if found != depth
        ]
    return Predicted(
        "plan_2bw",
        "PipeDream-2BW on 64 V100s",
        f"{SOURCE}, Figures 6, 7 and 9",
        (("figure", "figure"), ("what", "what"), ("printed", "printed in the paper"),
         ("small", "predicted, 2.2 billion, 8 deep"), ("large", "predicted, 3.8 billion, 16 deep")),
        rows,
        ["assumed: 48 blocks of width 1920 and 2560, vocabulary 50,304, sequences of 512, float16 with Adam, recomputation by"
         " stage, as many blocks on each stage but for the planner's own choice, microbatches of 8 (batches of 512 with as many"
         " microbatches as stages); GPipe flushes after as many as fit, the logits of all of which its last stage keeps",
         f"FLOPs {HOW}",
         "the paper's ratios of Figure 6 are the greatest (\"up to\") of the models and batches that it tried"],
        differences,
    )  # fmt: skip


def _memory(add: Any) -> List[str]:
    """Figure 7: the fullest device of eight, 2.2 billion parameters, batches of 64; GPipe is out of memory there."""
    given = problem(gpt_units(1920), 8)
    starts = equal_cut(given.units, 8)
    found = {
        method: fullest(given, predict(given, Candidate(method, 8, 1, 8, 8, True), starts)) / GIGA for method in NAMES
    }
    for method, size in sorted(found.items(), key=lambda each: each[1]):
        add(
            "7",
            f"fullest of 8 devices, batch 64, GB: {NAMES[method]}",
            "does not fit" if method == GPIPE else None,
            round(size, 1),
        )
    wrong = []
    if not found[NAIVE] <= found[FLUSH] < found[TWO_BW] < found[GPIPE]:
        wrong.append("Figure 7: not in the order inter-layer, Flush, 2BW, GPipe")
    if (found[GPIPE] * GIGA > given.memory_bytes) != (found[TWO_BW] * GIGA <= given.memory_bytes):
        wrong.append("Figure 7: GPipe alone should not fit")
    return wrong
