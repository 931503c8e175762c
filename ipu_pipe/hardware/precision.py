"""The table of precisions, for predictions of memory and time: bytes of each kind of number, and
the arithmetic of products.

A run takes its precision from `ipu_pipe.model.precision`.
"""

from __future__ import annotations

from typing import NamedTuple

from ipu_pipe.schedule.methods import Method, Reads

MIXED = "bfloat16_mixed"
MASTERS = "bfloat16_masters"


class Precision(NamedTuple):
    """Bytes of a number of each kind.

    `arithmetic`: the number format in which products are computed, which picks the device's rate.
    `master`: the float32 weights that an update changes, with their gradient (0: it changes the
    weights themselves). `cast`: a low-precision copy of a weight, kept for each microbatch in
    flight. `data_bytes`: an input (0: as `activation`).
    """

    arithmetic: str
    activation: int
    weight: int
    gradient: int
    state: int
    master: int = 0
    cast: int = 0
    data_bytes: int = 0

    @property
    def data(self) -> int:
        """Return the bytes of a number that enters the model."""
        return self.data_bytes or self.activation


# float16 is for plans only, no run uses it: mixed precision on the GPUs of the 2BW paper. As in
# Megatron, which that work adapts, an update makes float32 gradients beside the master copy: with
# Adam 20 bytes a parameter (Megatron Core's user guide, "Distributed Optimizer": float16
# parameters and gradients). bfloat16_masters replaces bfloat16_mixed for methods that write
# versions (`resolve_precision`); gradients are summed in float32. IPUs: 16.32 halves the inputs
# alone, and what meets a float32 weight is float32; accumulators are float32 unless asked for.
PRECISIONS: dict[str, Precision] = {
    "float64": Precision("float64", 8, 8, 8, 8),
    "float32": Precision("float32", 4, 4, 4, 4),
    "bfloat16": Precision("bfloat16", 2, 2, 2, 2),
    MIXED: Precision("bfloat16", 2, 4, 4, 4, cast=2, data_bytes=4),
    MASTERS: Precision("bfloat16", 2, 2, 4, 4, master=4),
    "float16": Precision("float16", 2, 2, 2, 4, master=8),
    "16.16": Precision("float16", 2, 2, 4, 4),
    "16.32": Precision("float32", 4, 4, 4, 4, data_bytes=2),
    "32.32": Precision("float32", 4, 4, 4, 4),
}


def resolve_precision(precision: str, method: Method) -> str:
    """Return the row of PRECISIONS that a config's `precision` means for a method.

    Autocast keeps for the backward the copies that it cast of the forward's weights. Where the
    backward must read other weights than its forward these would silently be the wrong ones, so
    these methods store the weights themselves in bfloat16.
    """
    rereads_newer_weights = method.is_stale and method.backward_reads is not Reads.STASHED
    return MASTERS if precision == MIXED and rereads_newer_weights else precision
