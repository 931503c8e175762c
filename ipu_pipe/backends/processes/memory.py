"""Bytes of a rank's tensors by category, as they are between two actions.

A microbatch in flight keeps what autograd saved of its forward, and its inputs, labels, outputs and loss: each storage once,
weights apart. Hooks ask autograd at the first forward of each shape of inputs; others of that shape keep as much. What is sent
counts for the microbatch as long as that keeps it, too, and for the buffers after.
"""

from __future__ import annotations

import contextlib
from typing import Any, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

import torch

from ipu_pipe.backends.processes.mail import Mail
from ipu_pipe.backends.processes.trace import TraceRecorder
from ipu_pipe.backends.replicas import IndependentReplicas
from ipu_pipe.backends.work import Work
from ipu_pipe.model.batch import count_bytes
from ipu_pipe.model.observation import get_storage
from ipu_pipe.trace.events import ALLOCATED, MEMORY

TOTAL = "total"  # beside the categories: the greatest sum of all at one moment
_NAMES = tuple(MEMORY.values())
Tensors = Sequence[Optional[torch.Tensor]]


class ActivationStash:
    """Bytes that microbatches in flight keep on a stage. `weights`: tensors that are not counted."""

    def __init__(self, weights: Sequence[torch.Tensor]) -> None:
        self._weights, self.held_bytes = weights, 0
        self._bytes_by_shapes: Dict[Tuple[Any, ...], int] = {}
        self.bytes_by_microbatch: Dict[int, int] = {}

    @contextlib.contextmanager
    def watch_forward(self, m: int, entered: Tensors) -> Iterator[List[Optional[torch.Tensor]]]:
        """Count what a forward of microbatch m on `entered` keeps; what comes out is to be added to the list."""
        outputs: List[Optional[torch.Tensor]] = []
        key = (torch.is_grad_enabled(), *(None if t is None else t.shape for t in entered))
        if key in self._bytes_by_shapes:
            yield outputs
        else:
            saved: Dict[int, int] = {}

            def keep(tensor: torch.Tensor) -> torch.Tensor:
                saved[get_storage(tensor)] = tensor.untyped_storage().nbytes()
                # a result of the operation would hold itself for ever
                return tensor if tensor.is_leaf else tensor.detach()

            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                yield outputs
            saved.update((get_storage(t), t.untyped_storage().nbytes()) for t in outputs if t is not None)
            # what enters may be a part of a data set's memory
            saved.update((get_storage(t), count_bytes(t)) for t in entered if t is not None)
            weights = {get_storage(t) for t in self._weights}
            self._bytes_by_shapes[key] = sum(size for place, size in saved.items() if place not in weights)
        self.drop(m)
        self.bytes_by_microbatch[m] = self._bytes_by_shapes[key]
        self.held_bytes += self._bytes_by_shapes[key]

    def replace(self, m: int, tensors: Sequence[torch.Tensor]) -> None:
        """Count only `tensors` for microbatch m, which is between the two halves of its backward."""
        self.drop(m)
        weights = {get_storage(t) for t in self._weights}
        storages = {get_storage(t): t.untyped_storage().nbytes() for t in tensors}
        self.bytes_by_microbatch[m] = sum(size for place, size in storages.items() if place not in weights)
        self.held_bytes += self.bytes_by_microbatch[m]

    def drop(self, m: int) -> None:
        """Forget microbatch m, which is done or whose forward runs again."""
        self.held_bytes -= self.bytes_by_microbatch.pop(m, 0)


class MemoryCounters:
    """Records what a rank holds and the greatest of each category, over the updates that are recorded and the first ones, in
    which the pipeline fills. `stages`: those of the rank; `replicas`: of each of them, where they have weights of their own."""

    def __init__(
        self, work: Work, stages: Mapping[int, Any], mail: Mail, recorder: TraceRecorder,
        replicas: Sequence[IndependentReplicas] = (),
    ) -> None:  # fmt: skip
        rules, self._stages, self._mail, self._recorder = work.rules, stages, mail, recorder
        self._replicas, self._replica_bytes = replicas, sum(of_stage.held_bytes for of_stage in replicas)
        self._optimizer_states: Mapping[Any, Any] = next((stage.state for stage in rules.stages.values()), {})
        self._parameters = [p for s, stage in rules.stages.items() if s in stages for p in stage.parameters]
        tensors = list({id(t): t for stage in stages.values() for t in stage.model.tensors}.values())
        self._filled = work.update + work.schedule.stages + 2
        self._weight_bytes = count_bytes(tensors)
        self.master_bytes = count_bytes([master for _, master in rules.rounded])
        self._device = tensors[0].device if tensors else torch.device("cpu")
        self._optimizer_bytes, self._gradient_bytes, self._total = -1, 0, 0
        self._recorded: Tuple[int, ...] = (-1,) * len(MEMORY)
        self._greatest = [0] * len(MEMORY)

    def sample(self, update: int, gradients: bool = True, stepped: bool = False) -> None:
        """Count now. `gradients`: some may have come or gone since the last time; `stepped`: the optimizer has."""
        recorder = self._recorder
        if not (recorder.is_recording or update < self._filled):
            return
        if gradients:
            self._gradient_bytes = count_bytes([p.grad for p in self._parameters])
        if stepped or self._optimizer_bytes < 0:
            others = [of_stage.list_other_states() for of_stage in self._replicas]
            self._optimizer_bytes = count_bytes([self._optimizer_states, others]) + self.master_bytes
        buffers = self._mail.buffer_bytes((i, m) for i, stage in self._stages.items() for m in stage.stash.bytes_by_microbatch)
        # in the order of MEMORY
        versions = sum(stage.weights.held_bytes + stage.tied.held_bytes for stage in self._stages.values()) + self._replica_bytes
        activations = sum(stage.stash.held_bytes for stage in self._stages.values())
        now = (self._weight_bytes, versions, self._gradient_bytes, self._optimizer_bytes, activations, buffers)
        mark = recorder.mark()
        for i, value in enumerate(now):
            self._greatest[i] = max(self._greatest[i], value)
            if value != self._recorded[i]:
                recorder.count(_NAMES[i], value, mark)
        self._total = max(self._total, sum(now))
        if recorder.is_recording:
            self._recorded = now
        if self._device.type == "cuda":
            recorder.count(ALLOCATED, torch.cuda.memory_allocated(self._device), mark)

    @property
    def peaks(self) -> Dict[str, int]:
        """The greatest of each category, and of all at one moment; on a GPU what was allocated there, too."""
        peaks = {**dict(zip(MEMORY, self._greatest)), TOTAL: self._total}
        if self._device.type == "cuda":
            peaks[ALLOCATED] = torch.cuda.max_memory_allocated(self._device)
        return peaks
