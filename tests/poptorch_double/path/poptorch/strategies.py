"""Stages and execution strategies: the IPU and the pipeline stage of a block, always from
explicit stages."""

from __future__ import annotations

from typing import Any, Dict

from poptorch._errors import make_unmodelled_error
from poptorch._signatures import follow_api


class Stage:
    """Blocks that run on one IPU."""

    @follow_api("Stage")
    def __init__(self, *block_ids: str) -> None:
        assert all(isinstance(b, str) for b in block_ids), (
            f"Block IDs are supposed to be strings but got {block_ids}"
        )
        self.blocks = block_ids
        self._stage_id = -1
        self._ipu: Any = None

    @follow_api("Stage.ipu")
    def ipu(self, ipu: int) -> "Stage":
        assert ipu >= 0, f"an IPU is counted from 0, not {ipu}"
        self._ipu = ipu
        return self


class PipelinedExecution:
    """Strategy in which stages run at the same time on different microbatches."""

    execution_mode = 0

    @follow_api("PipelinedExecution")
    def __init__(self, *args):
        self._block_map: Dict[str, Stage] = {}
        for index, stage in enumerate(args):
            if not isinstance(stage, Stage):
                raise make_unmodelled_error("stages other than poptorch.Stage")
            stage._stage_id = index
            for block in stage.blocks:
                assert block not in self._block_map, f"{block} associated with more than one stage"
                self._block_map[block] = stage
        if self._block_map:

            class Local:
                """Class that is local to this call; PopTorch has such an object too, so that
                pickle refuses the options."""

            self._local = Local()

    @follow_api("_IExecutionStrategy.stage")
    def stage(self, block_id):
        assert block_id in self._block_map, f"Unknown block {block_id}"
        return self._block_map[block_id]

    def find_stage(self, block: Any) -> Stage:
        assert block in self._block_map, (
            f"Unknown Block '{block}' list of expected Blocks: {list(self._block_map)}"
        )
        return self._block_map[block]

    def backendOptions(self) -> Dict[str, Any]:
        return {"execution_mode": self.execution_mode}


class ShardedExecution(PipelinedExecution):
    """Strategy in which one IPU works at a time."""

    execution_mode = 1

    @follow_api("ShardedExecution")
    def __init__(self, *args):
        super().__init__(*args)
