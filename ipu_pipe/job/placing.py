"""A method's stages on a model: stages of one loss, or blocks with losses of their own; and what they take of its output."""

from __future__ import annotations

from typing import Any, NamedTuple, Optional, Sequence

from torch import nn

from ipu_pipe.config.schema import Config
from ipu_pipe.errors import BadInput
from ipu_pipe.job.factories import make_take, resolve_head
from ipu_pipe.local.structures import find_structure, make_blocks
from ipu_pipe.model.cutting import Piece
from ipu_pipe.model.stages import Partition, partition
from ipu_pipe.schedule.methods import Method


class Placed(NamedTuple):
    """A model placed on devices.

    model: as it trains: with heads, where blocks have losses of their own.
    held: the stages of this process; None: all stages are here.
    placement: the device of each stage; empty: stage s is on device s.
    note: what the user should know of the stages.
    pieces: the model cut into its stages, where they are on devices of their own.
    """

    model: nn.Module
    part: Partition
    held: Optional[Sequence[int]] = None
    placement: Sequence[int] = ()
    note: str = ""
    pieces: Sequence[Piece] = ()


def place_whole(config: Config, method: Method, model: nn.Module, x: Any) -> Placed:
    """Place all stages in this process. `x`: one microbatch of input. Raise `BadInput` if the model has no such stages."""
    if method.structure is not None:
        return place_blocks(config, method, model, x)
    return Placed(model, partition(model, x, config.stages, one_stage=method.one_stage))


def place_blocks(
    config: Config, method: Method, model: nn.Module, x: Any, count: Optional[int] = None, held: Optional[int] = None
) -> Placed:
    """Place blocks with losses of their own. `count`: how many there must be; `held`: the block of this process."""
    assert method.structure is not None
    if isinstance(config.stages, dict) and config.stages.get("by") == "time":
        why = "times differ from run to run, and blocks are what is trained: must be flops or parameters"
        raise BadInput(f"stages.by: time: {why}")
    take = make_take(config, of_heads=not find_structure(method.structure).trains_last)
    model, part = make_blocks(
        model, x, method.structure, config.stages, config.seed, count, resolve_head(config), method.one_stage or "", take
    )
    return Placed(model, part, None if held is None else [held])
