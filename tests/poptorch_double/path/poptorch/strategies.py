"""Stages, phases and execution strategies: which IPU and which pipeline stage a block is given."""

from __future__ import annotations

from typing import Any, Dict, List, Tuple, Union

from poptorch._signatures import typed
from poptorch.enums import AutoStage, Liveness


class Stage:
    """Blocks that run on one IPU."""

    @typed("Stage")
    def __init__(self, *block_ids: str) -> None:
        assert all(isinstance(b, str) for b in block_ids), f"Block IDs are supposed to be strings but got {block_ids}"
        self._blocks = block_ids
        self._stage_id = -1
        self._phase_id = -1
        self._ipu: Any = None

    @property
    def blocks(self) -> Tuple[str, ...]:
        return self._blocks

    @typed("Stage.ipu")
    def ipu(self, ipu: int) -> "Stage":
        assert ipu >= 0, f"an IPU is counted from 0, not {ipu}"
        self._ipu = ipu
        return self


class Phase:
    """Stages that run in parallel."""

    @typed("Phase")
    def __init__(self, *arg: Union[str, Stage]) -> None:
        if all(isinstance(one, Stage) for one in arg):
            self.stages: List[Stage] = list(arg)
            return
        kinds = str([type(one) for one in arg])
        assert all(isinstance(one, str) for one in arg), (
            f"All arguments must either be block IDs (strings) or Stages: {kinds}"
        )
        self.stages = [Stage(*arg)]

    @typed("Phase.stage")
    def stage(self, idx):
        return self.stages[idx]

    @typed("Phase.ipus")
    def ipus(self, *ipus):
        assert len(ipus) == len(self.stages), (
            f"Phase contains {len(self.stages)} stages but you provided {len(ipus)} ipus"
        )
        for stage, ipu in zip(self.stages, ipus):
            stage.ipu(ipu)


class _Listed:
    """Stage of a block from an explicit list."""

    def __init__(self, block_map: Dict[str, Stage]) -> None:
        self._block_map = block_map

    def stage(self, block: str, ipu: Any) -> Stage:
        assert block in self._block_map, (
            f"Unknown Block '{block}' list of expected Blocks: {list(self._block_map.keys())}"
        )
        return self._block_map[block]


class _Automatic:
    """Stage of a block by a rule. AutoIncrement counts from 1, as the code does, not from 0, as the docs say."""

    def __init__(self, auto_stage: Any) -> None:
        self._auto_stage = auto_stage
        self._next = 1
        self._block_map: Dict[str, Stage] = {}

    def stage(self, block: str, ipu: Any) -> Stage:
        if block not in self._block_map:
            stage = Stage(block)
            if self._auto_stage == AutoStage.SameAsIpu:
                assert ipu is not None, (
                    f"poptorch.AutoStage.SameAsIpu was selected but no IPU was specified for block {block}"
                )
                stage._stage_id = ipu
            else:
                stage._stage_id = self._next
                self._next += 1
            self._block_map[block] = stage
        return self._block_map[block]


class _IExecutionStrategy:
    execution_mode = 0
    block_map: Dict[str, Stage]

    @typed("_IExecutionStrategy.stage")
    def stage(self, block_id):
        assert block_id in self._block_map, f"Unknown block {block_id}"
        return self._block_map[block_id]

    def _manager(self) -> Any:
        """A fresh one for every trace."""
        raise NotImplementedError

    def backendOptions(self) -> Dict[str, Any]:
        return {"execution_mode": self.execution_mode}


def _map(block_map: Dict[str, Stage], stage: Stage) -> None:
    for block in stage.blocks:
        assert block not in block_map, f"{block} associated with more than one stage"
        block_map[block] = stage


class PipelinedExecution(_IExecutionStrategy):
    """Stages run at the same time on different micro-batches."""

    @typed("PipelinedExecution")
    def __init__(self, *args):
        self._block_map: Dict[str, Stage] = {}
        self._auto_stage = AutoStage.SameAsIpu
        if len(args) == 1 and isinstance(args[0], AutoStage):
            self._auto_stage, args = args[0], ()
        for index, arg in enumerate(args):
            if isinstance(arg, str):
                arg = Stage(arg)
            elif not isinstance(arg, Stage):
                assert isinstance(arg, (list, tuple)) and all(isinstance(one, str) for one in arg), (
                    f"a stage is a poptorch.Stage, a block ID or a list of block IDs, not {arg!r}"
                )
                arg = Stage(*arg)
            arg._stage_id = index
            _map(self._block_map, arg)
        if self._block_map:

            class Local:
                """PopTorch keeps an object of a class that is local to this call, so that pickle refuses the options."""

            self._local = Local()

    def _manager(self) -> Any:
        return _Listed(self._block_map) if self._block_map else _Automatic(self._auto_stage)


class ShardedExecution(PipelinedExecution):
    """One IPU works at a time."""

    execution_mode = 1

    @typed("ShardedExecution")
    def __init__(self, *args):
        super().__init__(*args)


class _IPhasedExecution(_IExecutionStrategy):
    execution_mode = 2

    @typed("_IPhasedExecution")
    def __init__(self, *phases: Union[Phase, List[Stage], List[str]]) -> None:
        assert phases, "There is currently no AutoStage for PhasedExecution, please explicitly specify the phases"
        self._tensors_liveness = Liveness.AlwaysLive
        self._separate_backward_phase = False
        self._phases: List[Phase] = []
        self._block_map: Dict[str, Stage] = {}
        for index, given in enumerate(phases):
            phase = given if isinstance(given, Phase) else Phase(*(given if isinstance(given, list) else [given]))
            self._phases.append(phase)
            for stage in phase.stages:
                stage._phase_id = index
                _map(self._block_map, stage)

    def _manager(self) -> Any:
        return _Listed(self._block_map)

    @typed("_IPhasedExecution.phase")
    def phase(self, phase: int) -> Phase:
        assert phase >= 0, "Phases are identified by positive integers"
        return self._phases[phase]

    @typed("_IPhasedExecution.useSeparateBackwardPhase")
    def useSeparateBackwardPhase(self, use: bool = True):
        self._separate_backward_phase = use
        return self

    def backendOptions(self) -> Dict[str, Any]:
        return {
            **super().backendOptions(),
            "separate_backward_phase": self._separate_backward_phase,
            "tensors_liveness": int(self._tensors_liveness),
            "serial_phases_execution": isinstance(self, SerialPhasedExecution),
        }


class ParallelPhasedExecution(_IPhasedExecution):
    """Phases alternate between the even and the odd IPUs."""

    @typed("ParallelPhasedExecution")
    def __init__(self, *phases: Union[Phase, List[Stage], List[str]]) -> None:
        super().__init__(*phases)

    @typed("ParallelPhasedExecution.sendTensorsOffChipAfterFwd")
    def sendTensorsOffChipAfterFwd(self, off_chip: bool = True) -> "ParallelPhasedExecution":
        self._tensors_liveness = Liveness.OffChipAfterFwd if off_chip else Liveness.AlwaysLive
        return self


class SerialPhasedExecution(_IPhasedExecution):
    """All phases run one after another on one group of IPUs."""

    @typed("SerialPhasedExecution")
    def __init__(self, *phases: Union[Phase, List[Stage], List[str]]) -> None:
        super().__init__(*phases)

    @typed("SerialPhasedExecution.setTensorsLiveness")
    def setTensorsLiveness(self, liveness: "Liveness") -> "SerialPhasedExecution":
        self._tensors_liveness = liveness
        return self
