"""Sharded checkpoints: each process writes its own files by torch.distributed.checkpoint (DCP),
without pickled metadata.

    step-120/model-00001-of-00004.safetensors       weights and buffers of the first process's stages
             optimizer-00001-of-00004.safetensors   their optimizer state
             ...
             manifest.json                          written last, by rank 0, when all processes have written their files

DCP synchronizes the processes, removes duplicates, and reports the failure of a process to all. The
files are plain safetensors of whole tensors, which DCP's `HuggingFaceStorageReader` also reads.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any, Mapping

import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult

from ipu_pipe.backends.interface import CheckpointState
from ipu_pipe.backends.ranks import report_lost_rank
from ipu_pipe.errors import RunFault
from ipu_pipe.store.checkpoint import (
    begin_step,
    delete_on_error,
    finish_step,
    guard_step,
    write_tensors,
)

KINDS = ("model", "optimizer")


def save_shard(
    folder: Path, step: int, state: CheckpointState, entries: Mapping[str, Any], group: Any
) -> Path:
    """Write this process's part of `folder/step-K`; return the folder when all processes of `group`
    have written their parts.

    `entries`: entries of the manifest; rank 0's are written. Raise `RunFault` on all processes if
    one cannot write or is lost.
    """
    tensors = {
        f"{kind}.{name}": value for kind, part in zip(KINDS, state) for name, value in part.items()
    }
    writer = ShardWriter(folder, step, state.plain, entries)
    # the names are flat already
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
    with delete_on_error(folder, step):
        try:
            with report_lost_rank():
                dcp.save(tensors, storage_writer=writer, planner=planner, process_group=group)
        except CheckpointException as error:
            # DCP wraps what every rank has raised, and one line is enough
            first = error.failures[min(error.failures)][0]
            raise (
                first
                if isinstance(first, RunFault)
                else RunFault(f"{folder / f'step-{step}'}: {first}")
            ) from None
    return folder / f"step-{step}"


class ShardWriter(dcp.StorageWriter):
    """Write the tensors of a process's DCP plan, named `kind.NAME`, into one file for each kind.

    `plain`: the plain values of the process's optimizer state, which are written into the manifest.
    """

    def __init__(
        self, folder: Path, step: int, plain: Mapping[str, Any], entries: Mapping[str, Any]
    ) -> None:
        self._folder = folder
        self._step = step
        self._plain = plain
        self._entries = entries

    def reset(self, checkpoint_id: Any = None) -> None:
        """Do nothing: a writer writes one checkpoint."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing: rank 0 makes the folder when all have planned."""

    def prepare_local_plan(self, plan: dcp.SavePlan) -> dcp.SavePlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[dcp.SavePlan]) -> list[dcp.SavePlan]:
        """Make the folder and number the processes that have something to write; called on rank
        0.
        """
        with guard_step(self._folder, self._step):
            begin_step(self._folder, self._step)
        # a process without items writes nothing and gets no number of its own
        numbers = list(itertools.accumulate(int(bool(plan.items)) for plan in plans))
        return [
            replace(plan, storage_data=f"{number:05}-of-{numbers[-1]:05}")
            for plan, number in zip(plans, numbers)
        ]

    def write_data(
        self, plan: dcp.SavePlan, planner: dcp.SavePlanner
    ) -> torch.futures.Future[list[WriteResult]]:
        """Write this process's files, and send their hashes and the plain values to rank 0."""
        by_kind: dict[str, dict[str, torch.Tensor]] = {kind: {} for kind in KINDS}
        for item in plan.items:
            # names of weights have dots of their own: only the first one divides
            kind, _, name = item.index.fqn.partition(".")
            by_kind[kind][name] = planner.resolve_data(item)  # type: ignore[assignment]
        hashes: dict[str, str] = {}
        with guard_step(self._folder, self._step):
            for kind, tensors in by_kind.items():
                if tensors:
                    name = f"{kind}-{plan.storage_data}.safetensors"
                    hashes[name] = write_tensors(self._folder, self._step, name, tensors)
        # DCP brings results of items to rank 0: one for the whole process carries all that is
        # needed there
        written: torch.futures.Future[list[WriteResult]] = torch.futures.Future()
        written.set_result([WriteResult(MetadataIndex(""), 0, (hashes, self._plain))])
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the manifest instead of DCP's metadata, and rename the folder; called on rank 0."""
        files: dict[str, str] = {}
        plain: dict[str, Any] = {}
        # one for each process
        for (result,) in results:
            files.update(result.storage_data[0])
            plain.update(result.storage_data[1])
        with guard_step(self._folder, self._step):
            finish_step(self._folder, self._step, files, {**self._entries, "optimizer": plain})

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Accept any name."""
        return True
