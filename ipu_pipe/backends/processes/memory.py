"""What a rank's tensors take, by category, as they are between two actions.

What a microbatch stashes is what autograd saved of its forward, and what else is kept of it (inputs, labels, outputs, loss):
each storage once, weights apart. Autograd is asked by hooks at the first forward of each shape of inputs; others of that shape
keep as much. What is sent counts for the stash as long as this has it, and for the buffers when it has not.
"""

from __future__ import annotations

import contextlib
from typing import Any, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

import torch

from ipu_pipe.backends.processes.mail import Mail
from ipu_pipe.backends.processes.place import Place
from ipu_pipe.backends.processes.ties import Tied
from ipu_pipe.backends.weights import WeightStore
from ipu_pipe.model.observation import storage
from ipu_pipe.trace.events import ALLOCATED, MEMORY
from ipu_pipe.update.apply import UpdateRules

TOTAL = "total"  # beside the categories: the greatest sum of all at one moment
_NAMES = tuple(MEMORY.values())
Key = Tuple[Any, ...]


def size_of(tensors: Sequence[Optional[torch.Tensor]]) -> int:
    """Bytes of what these show."""
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)


class Stash:
    """What microbatches keep on a stage whose `own` tensors are known: `held`, the bytes of those in flight."""

    def __init__(self, own: Sequence[torch.Tensor]) -> None:
        self._own, self.held = own, 0
        self._known: Dict[Key, int] = {}
        self._in_flight: Dict[int, int] = {}  # by microbatch

    @property
    def microbatches(self) -> Mapping[int, int]:
        """Those in flight, with their bytes."""
        return self._in_flight

    @contextlib.contextmanager
    def watched(self, m: int, entered: Sequence[Optional[torch.Tensor]]) -> Iterator[List[Optional[torch.Tensor]]]:
        """A forward of microbatch m on what `entered`; what comes out is added to the list."""
        kept: List[Optional[torch.Tensor]] = []
        key = (torch.is_grad_enabled(), *(None if t is None else t.shape for t in entered))
        if key in self._known:
            yield kept
        else:
            saved: Dict[int, int] = {}

            def keep(tensor: torch.Tensor) -> torch.Tensor:
                saved[storage(tensor)] = tensor.untyped_storage().nbytes()
                return tensor if tensor.is_leaf else tensor.detach()  # a result would hold itself for ever

            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                yield kept
            saved.update((storage(t), t.untyped_storage().nbytes()) for t in kept if t is not None)
            # what enters may be part of a data set's memory
            saved.update((storage(t), size_of([t])) for t in entered if t is not None)
            weights = {storage(t) for t in self._own}
            self._known[key] = sum(size for place, size in saved.items() if place not in weights)
        self.drop(m)
        self._in_flight[m] = self._known[key]
        self.held += self._known[key]

    def drop(self, m: int) -> None:
        """Microbatch m is done, or its forward is done again."""
        self.held -= self._in_flight.pop(m, 0)


class Memory:
    """Counters of what the stage at `place` holds and the greatest of each, from updates that are recorded and the first ones of
    a run, `first` and on, in which the pipeline fills."""

    def __init__(
        self,
        place: Place,
        rules: UpdateRules,
        parameters: Sequence[torch.nn.Parameter],
        weights: WeightStore,
        tied: Tied,
        stash: Stash,
        mail: Mail,
        first: int,
    ) -> None:
        self._states: Mapping[Any, Any] = next((stage.state for stage in rules.stages.values()), {})
        self._parameters, self._weights, self._tied = parameters, weights, tied
        self._stash, self._mail, self._own = stash, mail, size_of(place.held)
        self.masters = size_of([master for _, master in rules.rounded])
        self._device, self._filled = place.device, first + place.layout.depth + 2
        self._state, self._gradients, self._total = -1, 0, 0
        self._before: Tuple[int, ...] = (-1,) * len(MEMORY)
        self._greatest = [0] * len(MEMORY)

    def sample(self, update: int, gradients: bool = True, state: bool = False) -> None:
        """Now. `gradients`: some may have come or gone since the last time; `state`: the optimizer has stepped."""
        timeline = self._mail.timeline
        if not (timeline.is_recording or update < self._filled):
            return
        if gradients:
            self._gradients = size_of([p.grad for p in self._parameters])
        if state or self._state < 0:
            own = [v for s in self._states.values() for v in s.values() if torch.is_tensor(v)]
            self._state = size_of(own) + self.masters
        buffers = self._mail.buffer_bytes(self._stash.microbatches)
        # in the order of MEMORY
        versions = self._weights.held_bytes + self._tied.held_bytes
        now = (self._own, versions, self._gradients, self._state, self._stash.held, buffers)
        moment, greatest, before = timeline.mark(), self._greatest, self._before
        for place, value in enumerate(now):
            if value > greatest[place]:
                greatest[place] = value
            if value != before[place]:
                timeline.count(_NAMES[place], value, moment)
        self._total = max(self._total, sum(now))
        if timeline.is_recording:
            self._before = now  # else it was not told
        if self._device.type == "cuda":
            timeline.count(ALLOCATED, torch.cuda.memory_allocated(self._device), moment)

    @property
    def peaks(self) -> Dict[str, int]:
        """The greatest of each category, and of all at one moment; on a GPU what was allocated there, too."""
        found = {**dict(zip(MEMORY, self._greatest)), TOTAL: self._total}
        if self._device.type == "cuda":
            found[ALLOCATED] = torch.cuda.max_memory_allocated(self._device)
        return found
