"""Which methods PopTorch runs, and how: a table. What is in none of its rows is refused, until someone says that it runs.

A pipeline of PopTorch's is filled, runs the microbatches of one update and is flushed: every pass reads the newest weights, and
all orders of forwards and backwards in between come to the same. Blocks with losses of their own are one graph in it.
"""

from __future__ import annotations

from dataclasses import fields, replace
from enum import Enum
from typing import List, NamedTuple, Optional

from ipu_pipe.schedule.methods import Method, Pipeline, Reads, Structure


class Execution(str, Enum):
    """PopTorch's execution strategies, by the names of their classes."""

    SHARDED = "ShardedExecution"  # one stage at a time
    PIPELINED = "PipelinedExecution"


class Runs(NamedTuple):
    """A row: methods with this pipeline and these reads, by `execution`. `flushes`: before every update. `blocks`: these have
    losses of their own, and no layer is in two of them."""

    pipeline: Pipeline
    forward_reads: Reads
    backward_reads: Reads
    flushes: bool
    blocks: bool
    execution: Execution


RUNS = (
    Runs(Pipeline.SEQUENTIAL, Reads.NEWEST, Reads.NEWEST, True, False, Execution.SHARDED),
    Runs(Pipeline.FILL_DRAIN, Reads.NEWEST, Reads.NEWEST, True, False, Execution.PIPELINED),
    Runs(Pipeline.ONE_F_ONE_B_FLUSH, Reads.NEWEST, Reads.NEWEST, True, False, Execution.PIPELINED),
    Runs(Pipeline.LOCAL, Reads.NEWEST, Reads.NEWEST, False, True, Execution.PIPELINED),
)
_FREE = (
    "name",
    "source",
    "default_accumulate",
    "structure",
    "one_version",
)  # of a method's fields: alter nothing here, or judged apart
_NEAREST = {
    "pipedream": "pipedream_flush (1F1B with a flush), or local_greedy, whose blocks wait for no gradient",
    "pipedream_2bw": "pipedream_flush with a larger gradient_accumulation",
    "pipemare": "pipedream_flush, or local_greedy",
    "pipelined_backprop": "pipedream_flush, or local_greedy",
    "spectrain": "pipedream_flush, or local_greedy",
    "local_overlapping": "local_greedy, or local_chunked with larger blocks",
}


def execution_of(method: Method) -> Optional[Execution]:
    """How PopTorch runs the method; None where no row says that it does. What a row does not state must be as in a plain
    method: a field that is new to methods is refused where it says anything."""
    blocks = method.structure is not None
    for row in RUNS:
        stated = {**row._asdict(), "turn": 0}
        as_stated = row.blocks == blocks and all(
            getattr(method, field.name) == stated.get(field.name, field.default)
            for field in fields(method)
            if field.name not in _FREE
        )
        if as_stated and (method.structure is None or _is_plain(method.structure)):
            return row.execution
    return None


def _is_plain(structure: Structure) -> bool:
    """Whether blocks, however many and whichever train, share no layer."""
    return replace(structure, blocks=None, layers=None) == Structure()


def is_pipelined(method: Method) -> bool:
    """Whether PopTorch runs the method as a pipeline. What it does not run is judged as one: its other faults are told, too."""
    return execution_of(method) is not Execution.SHARDED


def method_faults(method: Method) -> List[str]:
    """Why PopTorch cannot run the method, and which near one it can."""
    if execution_of(method) is not None:
        return []
    nearest = _NEAREST.get(method.name, "gpipe or pipedream_flush")
    if method.is_stale:
        return [
            f"method: {method.name}: a PopTorch pipeline is flushed at every weight update and keeps one version of "
            f"the weights, so no pass can read old ones: use {nearest}, or backend.name emulator or distributed"
        ]
    if method.structure is not None and method.structure.overlap:
        return [
            f"method: {method.name}: a layer's weights would be on two IPUs, which PopART refuses in a pipeline: use "
            f"{nearest}"
        ]
    return [
        f"method: {method.name}: nobody has said that PopTorch runs its schedule ({method.pipeline.value}) with its reads "
        f"({method.forward_reads.value}, {method.backward_reads.value}): use {nearest}, or backend.name emulator or distributed"
    ]
