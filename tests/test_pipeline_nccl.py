"""Compare `Pipeline` over channels of nccl with the emulator, bit for bit; a double of nccl
enforces nccl's restrictions."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence

import torch
import torch.distributed as dist

from ipu_pipe.backends.processes import engine
from ipu_pipe.backends.processes.layout import RankLayout
from ipu_pipe.backends.processes.mail import REPLICAS, Link
from ipu_pipe.backends.processes.nccl import list_links
from ipu_pipe.replay.run import Run
from tests.nccl_double import NcclDouble
from tests.support.loops import Loop, make_loop_batch
from tests.support.processes import run_in_group
from tests.support.runs import assert_same, needs_processes
from tests.test_pipeline_processes import ON_PROCESSES, take_share

NAMES = (
    "gpipe",
    "pipedream",
    "pipedream_2bw",
    "pipemare_t1_t2",
    "local_greedy",
    "zbv",
    "gpipe_replicas",
)


def make_channel_factory(doubles: List[NcclDouble]) -> Any:
    """Return a function that makes gloo groups in place of nccl's, and appends their double to
    `doubles`."""

    def make_double_channels(
        run: Run, layout: RankLayout, tied: Sequence[Link]
    ) -> Optional[Dict[Link, Any]]:
        channels: Dict[Link, Any] = {}
        for replica in range(layout.replicas):
            for link in list_links(layout.stages, run.method, tied):
                pair = sorted(
                    layout.list_ranks(layout.placement[stage])[replica] for stage in link[:2]
                )
                if pair[0] != pair[1]:
                    group = dist.new_group(pair)
                    if replica == layout.replica:
                        channels[link] = group
        if layout.replicas > 1:
            channels[REPLICAS] = dist.new_group(layout.list_ranks(0))
        double = NcclDouble(list(channels.values()))
        double.__enter__()
        doubles.append(double)
        for piece in run.options.pieces:
            double.watch(piece, run.optimizer)
        return channels

    return make_double_channels


def compare_over_channels(rank: int, folder: Path) -> None:
    for name in NAMES:
        case = ON_PROCESSES[name]
        doubles: List[NcclDouble] = []
        engine.make_channels = make_channel_factory(doubles)
        # the pipeline is built from a microbatch that is not in the first batch
        example = tuple(part[:4] for part in make_loop_batch(case, 90))
        loop = Loop(case, share=take_share, example=example, backend="distributed", deadline=60)
        loop.pipe.evaluate([make_loop_batch(case, 80)])
        loop.run(0, 4)
        loop.pipe.drain()
        assert not doubles[0].count_pending(), "receives are posted while the pipeline is empty"
        loop.pipe.evaluate([make_loop_batch(case, 80)])
        loop.run(4, 8)
        state = loop.close().state_dict()
        doubles[0].__exit__()
        assert_same(torch.load(folder / f"{name}.pt"), state)


@needs_processes
def test_channels_give_the_emulators_bits(tmp_path: Path) -> None:
    for name in NAMES:
        loop = Loop(ON_PROCESSES[name])
        loop.run(0, 4)
        loop.pipe.drain()
        loop.run(4, 8)
        torch.save(loop.close().state_dict(), tmp_path / f"{name}.pt")
    run_in_group(2, compare_over_channels, tmp_path)
