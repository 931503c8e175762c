"""Randomness inside a model, drawn from (seed, microbatch, module name) and so from nothing else.

Every backend then draws the same dropout masks, recomputation repeats them, and cutting the model elsewhere keeps them.
"""

from __future__ import annotations

import hashlib
from typing import Any, List, Sequence

import torch
from torch import nn


def derived_seed(*key: object) -> int:
    """A 63-bit seed that depends on all of `key` and nothing else, the same on every machine and Python version."""
    digest = hashlib.blake2b("/".join(map(str, key)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class KeyedRandomness:
    """Seeds the named modules' draws in training, and leaves the random state around them as it was.

    `microbatch` is set by the backend before each forward. The modules must not hold one another.
    """

    def __init__(self, model: nn.Module, names: Sequence[str], seed: int, device: torch.device) -> None:
        self.microbatch = 0
        self._seed, self._cuda = seed, device if device.type == "cuda" else None
        self._kept: List[Any] = []
        self._handles: List[Any] = []
        for name in names:
            module = model.get_submodule(name)
            self._handles.append(module.register_forward_pre_hook(self._seeding(name)))
            self._handles.append(module.register_forward_hook(self._restore))

    def _seeding(self, name: str) -> Any:
        def before(module: nn.Module, inputs: Any) -> None:
            if module.training:
                cuda = torch.cuda.get_rng_state(self._cuda) if self._cuda is not None else None
                self._kept.append((torch.get_rng_state(), cuda))
                torch.manual_seed(derived_seed(self._seed, self.microbatch, name))

        return before

    def _restore(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if module.training:
            cpu, cuda = self._kept.pop()
            torch.set_rng_state(cpu)
            if self._cuda is not None and cuda is not None:
                torch.cuda.set_rng_state(cuda, self._cuda)

    def remove(self) -> None:
        """Take the hooks off the model."""
        for handle in self._handles:
            handle.remove()
