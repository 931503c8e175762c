"""Stages and execution strategies: which IPU and which pipeline stage a block is given, always from explicit stages."""

from __future__ import annotations

from typing import Any, Dict, Tuple

from poptorch._errors import not_modelled
from poptorch._signatures import typed


class Stage:
    """Blocks that run on one IPU."""

    @typed("Stage")
    def __init__(self, *block_ids: str) -> None:
        assert all(isinstance(b, str) for b in block_ids), (
            f"Block IDs are supposed to be strings but got {block_ids}"
        )
        self._blocks = block_ids
        self._stage_id = -1
        self._ipu: Any = None

    @property
    def blocks(self) -> Tuple[str, ...]:
        return self._blocks

    @typed("Stage.ipu")
    def ipu(self, ipu: int) -> "Stage":
        assert ipu >= 0, f"an IPU is counted from 0, not {ipu}"
        self._ipu = ipu
        return self


class _Listed:
    """Stage of a block from an explicit list."""

    def __init__(self, block_map: Dict[str, Stage]) -> None:
        self._block_map = block_map

    def stage(self, block: str, ipu: Any) -> Stage:
        assert block in self._block_map, (
            f"Unknown Block '{block}' list of expected Blocks: {list(self._block_map.keys())}"
        )
        return self._block_map[block]


def _map(block_map: Dict[str, Stage], stage: Stage) -> None:
    for block in stage.blocks:
        assert block not in block_map, f"{block} associated with more than one stage"
        block_map[block] = stage


class PipelinedExecution:
    """Stages run at the same time on different micro-batches."""

    execution_mode = 0

    @typed("PipelinedExecution")
    def __init__(self, *args):
        self._block_map: Dict[str, Stage] = {}
        for index, stage in enumerate(args):
            if not isinstance(stage, Stage):
                raise not_modelled("stages other than poptorch.Stage")
            stage._stage_id = index
            _map(self._block_map, stage)
        if self._block_map:

            class Local:
                """PopTorch keeps an object of a class that is local to this call, so that pickle refuses the options."""

            self._local = Local()

    @typed("_IExecutionStrategy.stage")
    def stage(self, block_id):
        assert block_id in self._block_map, f"Unknown block {block_id}"
        return self._block_map[block_id]

    def _manager(self) -> "_Listed":
        """Return a fresh list of blocks for every trace."""
        return _Listed(self._block_map)

    def backendOptions(self) -> Dict[str, Any]:
        return {"execution_mode": self.execution_mode}


class ShardedExecution(PipelinedExecution):
    """One IPU works at a time."""

    execution_mode = 1

    @typed("ShardedExecution")
    def __init__(self, *args):
        super().__init__(*args)
