"""The memory of a rank's tensors by category, in bytes, between two actions.

A microbatch in flight keeps autograd's saved tensors and its inputs, labels, outputs and loss. Each
storage counts once; weights do not count. Hooks measure the first forward of each input shape;
later forwards of that shape keep as much. A tensor that is being sent counts for its microbatch
while the microbatch keeps it, and for the buffers afterwards.
"""

from __future__ import annotations

import contextlib
from typing import Any, Iterator, Mapping, Optional, Sequence

import torch

from ipu_pipe.backends.processes.mail import Mail
from ipu_pipe.backends.processes.trace import TraceRecorder
from ipu_pipe.model.batch import count_bytes
from ipu_pipe.model.devices import get_kind
from ipu_pipe.model.observation import get_storage
from ipu_pipe.replay.replicas import IndependentReplicas
from ipu_pipe.replay.work import Work
from ipu_pipe.trace.events import ALLOCATED, MEMORY

# the key, beside the categories, of the peak of their sum
TOTAL = "total"
_NAMES = tuple(MEMORY.values())
Tensors = Sequence[Optional[torch.Tensor]]


class ActivationBytes:
    """Count the bytes that microbatches in flight keep on a stage. `weights`: the tensors that are
    not counted.
    """

    def __init__(self, weights: Sequence[torch.Tensor]) -> None:
        self._weights = weights
        self.held_bytes = 0
        self._bytes_by_shapes: dict[tuple[Any, ...], int] = {}
        self.bytes_by_microbatch: dict[int, int] = {}

    @contextlib.contextmanager
    def watch_forward(self, m: int, inputs: Tensors) -> Iterator[list[torch.Tensor | None]]:
        """Count the bytes that the forward of microbatch m inside the context keeps.

        `inputs`: its inputs and labels. The caller adds its outputs to the list that the context
        yields.
        """
        outputs: list[torch.Tensor | None] = []
        # a forward that will be recomputed saves nothing
        key = (torch.is_grad_enabled(), *(None if t is None else t.shape for t in inputs))
        if key in self._bytes_by_shapes:
            yield outputs
        else:
            saved: dict[int, int] = {}

            def keep(tensor: torch.Tensor) -> torch.Tensor:
                # by storage, because several saved tensors may be views of one
                saved[get_storage(tensor)] = tensor.untyped_storage().nbytes()
                # a saved output of the operation would keep itself alive for ever
                return tensor if tensor.is_leaf else tensor.detach()

            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                yield outputs
            saved.update(
                (get_storage(t), t.untyped_storage().nbytes()) for t in outputs if t is not None
            )
            # inputs may be views of a data set's memory, so count only their own elements
            saved.update((get_storage(t), count_bytes(t)) for t in inputs if t is not None)
            self._bytes_by_shapes[key] = self._sum_without_weights(saved)
        # a recomputation counts anew what the first forward has kept
        self.drop(m)
        self.bytes_by_microbatch[m] = self._bytes_by_shapes[key]
        self.held_bytes += self.bytes_by_microbatch[m]

    def keep_inputs(self, m: int, inputs: Tensors) -> None:
        """Count only the inputs and labels of microbatch m, whose forward its backward repeats."""
        self.drop(m)
        self.bytes_by_microbatch[m] = sum(count_bytes(t) for t in inputs if t is not None)
        self.held_bytes += self.bytes_by_microbatch[m]

    def replace(self, m: int, tensors: Sequence[torch.Tensor]) -> None:
        """Count only `tensors` for microbatch m, which is between the two halves of its
        backward.
        """
        self.drop(m)
        self.bytes_by_microbatch[m] = self._sum_without_weights(
            {get_storage(t): t.untyped_storage().nbytes() for t in tensors}
        )
        self.held_bytes += self.bytes_by_microbatch[m]

    def _sum_without_weights(self, bytes_by_storage: Mapping[int, int]) -> int:
        # looked up each time, because loading a version gives a parameter other memory
        weights = {get_storage(t) for t in self._weights}
        return sum(size for storage, size in bytes_by_storage.items() if storage not in weights)

    def drop(self, m: int) -> None:
        """Stop counting microbatch m, which is done or whose forward runs again."""
        self.held_bytes -= self.bytes_by_microbatch.pop(m, 0)


class MemoryCounters:
    """Record a rank's memory and the peak of each category, during recorded updates and while the
    pipeline fills.

    `stages`: the rank's stages by number; `replicas`: the replicas with weights of their own, one
    record per stage.
    """

    def __init__(
        self,
        work: Work,
        stages: Mapping[int, Any],
        mail: Mail,
        recorder: TraceRecorder,
        replicas: Sequence[IndependentReplicas] = (),
    ) -> None:
        rules = work.rules
        self._stages = stages
        self._mail = mail
        self._recorder = recorder
        self._replicas = replicas
        self._replica_bytes = sum(stage_replicas.held_bytes for stage_replicas in replicas)
        # one mapping for all stages: the optimizer's own state
        self._optimizer_states: Mapping[Any, Any] = next(
            (stage.state for stage in rules.stages.values()), {}
        )
        self._parameters = [
            p for s, stage in rules.stages.items() if s in stages for p in stage.parameters
        ]
        tensors = list(
            {id(t): t for stage in stages.values() for t in stage.model.tensors}.values()
        )
        self._end_of_fill = work.update + work.schedule.stages + 2
        self._weight_bytes = count_bytes(tensors)
        is_sharded = rules.masters is not None and rules.masters.are_in_weights
        # the masters of shards lie in the weights' memory, which is counted above
        masters = [] if is_sharded else [master for _, master in rules.weight_master_pairs]
        self.master_bytes = count_bytes(masters)
        self._device = tensors[0].device if tensors else torch.device("cpu")
        kind = get_kind(self._device)
        # None if the device has no memory of its own
        self._kind = kind if kind.is_accelerator else None
        self._optimizer_bytes = -1
        self._gradient_bytes = 0
        self._total_peak = 0
        self._recorded: tuple[int, ...] = (-1,) * len(MEMORY)
        self._peaks = [0] * len(MEMORY)

    def continue_from(self, previous: MemoryCounters) -> None:
        """Go on with the peaks of an interpreter that this one's replaces, in which the pipeline
        has filled before.
        """
        # the same list, so that the peaks are of the whole run
        self._peaks = previous._peaks
        self._total_peak = previous._total_peak
        self._end_of_fill = previous._end_of_fill

    def sample(
        self, update: int, gradients_changed: bool = True, has_stepped: bool = False
    ) -> None:
        """Measure now. `gradients_changed`: they may differ from the last call; `has_stepped`: the
        optimizer has stepped.
        """
        recorder = self._recorder
        if not (recorder.is_recording or update < self._end_of_fill):
            return
        if gradients_changed:
            self._gradient_bytes = count_bytes([p.grad for p in self._parameters])
        # counted after steps alone, because no pass changes the state
        if has_stepped or self._optimizer_bytes < 0:
            others = [stage_replicas.list_other_states() for stage_replicas in self._replicas]
            self._optimizer_bytes = (
                count_bytes([self._optimizer_states, others]) + self.master_bytes
            )
        stages = self._stages.items()
        buffers = self._mail.count_buffer_bytes(
            (i, m) for i, stage in stages for m in stage.activations.bytes_by_microbatch
        )
        # in the order of MEMORY
        versions = (
            sum(stage.weights.held_bytes + stage.tied.held_bytes for stage in self._stages.values())
            + self._replica_bytes
        )
        activations = sum(stage.activations.held_bytes for stage in self._stages.values())
        bytes_by_category = (
            self._weight_bytes,
            versions,
            self._gradient_bytes,
            self._optimizer_bytes,
            activations,
            buffers,
        )
        mark = recorder.mark()
        for i, value in enumerate(bytes_by_category):
            self._peaks[i] = max(self._peaks[i], value)
            # a counter holds until the next one
            if value != self._recorded[i]:
                recorder.count(_NAMES[i], value, mark)
        self._total_peak = max(self._total_peak, sum(bytes_by_category))
        # what is measured without recording is not in the trace, so the next value is written
        if recorder.is_recording:
            self._recorded = bytes_by_category
        if self._kind is not None:
            allocated = self._kind.read_allocated_bytes(self._device)
            if allocated is not None:
                recorder.count(ALLOCATED, allocated, mark)

    @property
    def peaks(self) -> dict[str, int]:
        """The peak of each category and of their sum; on a GPU also the peak of the allocator."""
        peaks = {**dict(zip(MEMORY, self._peaks)), TOTAL: self._total_peak}
        peak = None if self._kind is None else self._kind.read_peak_bytes(self._device)
        if peak is not None:
            peaks[ALLOCATED] = peak
        return peaks
