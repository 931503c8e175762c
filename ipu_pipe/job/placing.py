"""A method's stages on a model: stages of one loss, or blocks with losses of their own."""

from __future__ import annotations

from typing import Any, NamedTuple, Optional, Sequence

from torch import nn

from ipu_pipe.config.schema import Config
from ipu_pipe.errors import BadInput
from ipu_pipe.job.import_strings import resolve_entry
from ipu_pipe.job.outputs import make_take, make_take_of_heads
from ipu_pipe.local.structures import find_structure, make_blocks
from ipu_pipe.model.cutting import Piece
from ipu_pipe.model.stages import Partition, partition
from ipu_pipe.schedule.methods import Method


class Placed(NamedTuple):
    """The model as it trains (with heads, where blocks have losses of their own), all its stages, the one of this process (None:
    all are here), what the user should know of them, and the model cut into them, where they are on devices of their own."""

    model: nn.Module
    part: Partition
    own: Optional[int] = None
    note: str = ""
    pieces: Sequence[Piece] = ()


def place_whole(config: Config, method: Method, model: nn.Module, x: Any) -> Placed:
    """All stages in this process. `x`: one microbatch of input. Raises BadInput."""
    if method.structure is not None:
        return place_blocks(config, method, model, x)
    return Placed(model, partition(model, x, config.stages, one_stage=method.one_stage))


def place_blocks(
    config: Config, method: Method, model: nn.Module, x: Any, count: Optional[int] = None,
    own: Optional[int] = None,
) -> Placed:  # fmt: skip
    """Blocks with losses of their own; `count`: how many there must be, `own`: the one of this process. Raises BadInput."""
    assert method.structure is not None
    if isinstance(config.stages, dict) and config.stages.get("by") == "time":
        raise BadInput(
            "stages.by: time: times differ from run to run, and blocks are what is trained: must be flops or parameters"
        )
    entry = config.method_args.head
    head = resolve_entry(entry, "method_args.head") if entry else None
    take = make_take(config) if find_structure(method.structure).trains_last else make_take_of_heads(config)
    made, part = make_blocks(
        model, x, method.structure, config.stages, config.seed, count, head, method.one_stage or "", take
    )
    return Placed(made, part, own)
