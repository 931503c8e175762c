"""Which memory holds what depends on a model's input or weights, followed operation by operation through one forward.

    input, weights    live               arange, full, ones of sizes    not: every stage can make them again
    relu(live)        live               live += 1                      written, in this stage

Memory is known by its storage, so that views and what is changed in place need no rule of their own.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Sequence, Set

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from ipu_pipe.model.nests import tensors_in
from ipu_pipe.model.observation import storage

ANYWHERE = -1  # in place of a stage: of weights and buffers, which every stage may read by name
READS = {"_local_scalar_dense", "equal", "is_nonzero", "allclose"}  # operations that give Python a tensor's values


class Liveness(TorchDispatchMode):
    """Follows the forward of a model whose stage is `stage`. `read(operation)` is called where values of live memory reach
    Python, `hidden(operation)` where memory of an earlier stage is read that nobody handed on: both only raise."""

    def __init__(
        self,
        weights: Sequence[torch.Tensor],
        given: Sequence[torch.Tensor],
        read: Callable[[str], None],
        hidden: Callable[[str], None],
    ) -> None:
        super().__init__()
        self.stage = 0
        self._made: Dict[int, int] = {storage(t): ANYWHERE for t in weights}  # live memory -> stage
        self._made.update({storage(t): 0 for t in given})
        self._handed: Set[int] = set()  # memory that this stage was handed
        self._written: Dict[int, Set[int]] = {}  # stage -> memory
        self._kept: List[Any] = [*weights, *given]
        self._since: Set[int] = set()  # memory that the node that runs has made
        self._read, self._hidden = read, hidden
        self._writing: Dict[Any, List[Any]] = {}  # operation -> what it writes: numbers and names of arguments

    def enter(self, stage: int) -> None:
        """The next stage begins."""
        self.stage = stage
        self._handed = set()

    def begin(self) -> None:
        """A node begins to run."""
        self._since = set()

    def hand(self, tensor: torch.Tensor) -> None:
        """This stage has been given `tensor`."""
        self._handed.add(storage(tensor))

    def is_live(self, tensor: torch.Tensor) -> bool:
        """Whether it depends on the input, or on weights."""
        return storage(tensor) in self._made

    def is_written(self, tensor: torch.Tensor, stage: int) -> bool:
        """Whether that stage wrote into its memory."""
        return storage(tensor) in self._written.get(stage, ())

    def _keep(self, tensor: torch.Tensor) -> None:
        """Memory that is freed shall not come again under its number."""
        self._kept.append(StorageWeakRef(tensor.untyped_storage()) if tensor.layout is torch.strided else tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = {storage(t) for t in tensors_in((*args, *kwargs.values()))}
        stages = [self._made[place] for place in given if place in self._made]
        if stages:
            name = func.overloadpacket.__name__
            if name in READS:
                self._read(name)
            earlier = [s for s in given if ANYWHERE < self._made.get(s, ANYWHERE) < self.stage]
            if any(place not in self._handed for place in earlier):
                self._hidden(name)
        result = func(*args, **kwargs)
        for tensor in tensors_in((result,)):
            place = storage(tensor)
            if place in given:
                continue
            self._since.add(place)
            self._keep(tensor)
            if stages:
                self._made[place] = self.stage
        for place in self._writes(func, args, kwargs):
            self._written.setdefault(self.stage, set()).add(place)
            if stages or place not in self._since:
                self._made.setdefault(place, self.stage)
        return result

    def _writes(self, func: Any, args: Any, kwargs: Any) -> List[int]:
        if func not in self._writing:
            arguments = func._schema.arguments
            self._writing[func] = [
                (i, argument.name)
                for i, argument in enumerate(arguments)
                if argument.alias_info is not None and argument.alias_info.is_write
            ]
        found = [args[i] if i < len(args) else kwargs.get(name) for i, name in self._writing[func]]
        return [storage(t) for t in tensors_in(found)]
