"""What a config's `precision` is in bytes, and at which of a device's rates its products are done."""

from __future__ import annotations

from typing import Dict, NamedTuple

ARITHMETIC = ("float64", "float32", "bfloat16", "float16")  # for which a device may state a rate


class Precision(NamedTuple):
    """Bytes of a number: of `activation`, `weight`, `gradient` (as accumulated), optimizer `state`, and of the `master` copy of
    the weights that the update changes, with its gradient (0: it changes the weights themselves)."""

    arithmetic: str
    activation: int
    weight: int
    gradient: int
    state: int
    master: int = 0


# float16 is no precision of a run here: it is the mixed one of the 2BW paper's GPUs, for plans alone. As in Megatron, which that
# work adapts, an update makes float32 gradients beside the master copy: with Adam 20 bytes a parameter (Megatron Core's user
# guide, "Distributed Optimizer": float16 parameters and gradients).
# IPUs: 16.32 halves the inputs alone, and what meets a float32 weight is float32; accumulators are float32 unless asked for.
PRECISIONS: Dict[str, Precision] = {
    "float64": Precision("float64", 8, 8, 8, 8),
    "float32": Precision("float32", 4, 4, 4, 4),
    "bfloat16": Precision("bfloat16", 2, 2, 2, 2),
    "float16": Precision("float16", 2, 2, 2, 4, 8),
    "16.16": Precision("float16", 2, 2, 4, 4),
    "16.32": Precision("float32", 4, 4, 4, 4),
    "32.32": Precision("float32", 4, 4, 4, 4),
}
