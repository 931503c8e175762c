"""One job on XLA devices, which one process drives through jax.

The devices hold the newest weights. The model and the optimizer on the host get them when someone
looks: for an evaluation, a checkpoint, a prediction, and at the end.
"""

from __future__ import annotations

import contextlib
from typing import Any, Collection, Iterable, Mapping

from ipu_pipe.backends.interface import CheckpointState, HostModelEngine, Report, StepResult
from ipu_pipe.backends.processes.trace import TraceRecorder
from ipu_pipe.backends.xla.devices import XlaOptions
from ipu_pipe.backends.xla.player import Player, StagePlayer, make_passes
from ipu_pipe.backends.xla.slots import SlotPlayer, chooses_slots
from ipu_pipe.backends.xla.update import list_unsupported
from ipu_pipe.job.user_code import attribute_faults
from ipu_pipe.replay.run import Run
from ipu_pipe.replay.work import Work
from ipu_pipe.schedule.actions import SPLIT_PASSES
from ipu_pipe.schedule.versions import VersionTable
from ipu_pipe.trace.events import concatenate_events


class XlaEngine(HostModelEngine):
    """Play all stages on their XLA devices."""

    def __init__(self, run: Run, first_update: int, table: VersionTable) -> None:
        super().__init__(run)
        self._first_update = first_update
        work = Work.of(run, first_update, table)
        options: XlaOptions = run.options
        devices = options.devices
        is_split = work.schedule.passes == SPLIT_PASSES
        # a placement may name more rows than there are devices
        placed = [devices[device % len(devices)] for device in run.placement]
        all_passes = make_passes(options.graphs, placed, is_split)
        stages = [StagePlayer(run, work, s, passes) for s, passes in enumerate(all_passes)]
        recorders = [
            TraceRecorder(device, 0, run.trace) for device in range(max(run.placement) + 1)
        ]
        for recorder in recorders:
            recorder.begin_update(first_update)
        player = SlotPlayer if chooses_slots(options.program, stages) else Player
        self._player: Player = player(run, work, stages, recorders)
        all_sources = [zip(graphs.state, graphs.sources) for graphs in options.graphs]
        self._written = [n for row in all_sources for n, source in row if source.is_written]

    # ---- updates

    @property
    def stale_values(self) -> Collection[str]:
        return self._written if self.newest_model is None else ()

    @property
    def update(self) -> int:
        return self._player.update

    def give(self, k: int, cut: float) -> None:
        self._advance(cut, k + 1)

    def finish(self, batches: int, table: VersionTable) -> None:
        self._advance(float("inf"), batches)

    def _advance(self, cut: float, batches: int) -> None:
        # set first: a fault in the middle leaves the host's weights old
        self.newest_model = None
        with attribute_faults(lambda: f"update {self._player.update}, {self._player.doing}"):
            self._player.advance(cut, batches)

    def take(self, k: int) -> StepResult:
        return StepResult(*self._player.take(k))

    def reopen(self, update: int, table: VersionTable, is_loaded: bool = False) -> None:
        if is_loaded:
            # the state was loaded into the host's model and optimizer
            for stage in self._player.stages:
                stage.load()
        else:
            self._player.gather()
        self._player.begin(Work.of(self.run, update, table))

    # ---- the host's model

    def copy_to_host(self) -> None:
        self._player.gather()
        for stage in self._player.stages:
            stage.export()

    def collect_state(self) -> CheckpointState | None:
        state = super().collect_state()
        assert state is not None
        # copies, because a checkpoint may be written while training goes on
        return state._replace(model={name: t.clone() for name, t in state.model.items()})

    # ---- measurements and the end

    def report(self) -> Report | None:
        player = self._player
        player.gather()
        stages = player.stages
        events = None
        if self.run.trace:
            events = concatenate_events([recorder.read_events() for recorder in player.recorders])
        return Report(
            [stage.optimizer.count_bytes() for stage in stages],
            [stage.peak_bytes for stage in stages],
            player.links,
            events,
            (player.update - self._first_update) * player.work.schedule.accumulate,
            peak_memory=self._measure_peaks(),
        )

    def _measure_peaks(self) -> list[dict[str, int]] | None:
        """Return the peak bytes of each device, None if the devices do not count them."""
        # by id, because stages may share a device
        devices = {s.passes.device.id: s.passes.device for s in self._player.stages}
        stats = [device.memory_stats() for device in devices.values()]
        if not all(stats):
            return None
        return [{"total": int(one["peak_bytes_in_use"])} for one in stats if one]

    def list_setting_faults(self, groups: Iterable[Mapping[str, Any]]) -> list[str]:
        return list_unsupported(groups)

    def abort(self) -> None:
        # after a fault the arrays may be lost with their device
        with contextlib.suppress(Exception):
            self.update_host()
