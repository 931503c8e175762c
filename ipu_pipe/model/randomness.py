"""Randomness inside a model, drawn from (seed, microbatch, module name) and so from nothing else.

Every backend then draws the same dropout masks, recomputation repeats them, and cutting the model elsewhere keeps them.
"""

from __future__ import annotations

import hashlib
from typing import Any, Dict, List, Sequence

import torch
from torch import nn


def derived_seed(*key: object) -> int:
    """A 63-bit seed that depends on all of `key` and nothing else, the same on every machine and Python version."""
    digest = hashlib.blake2b("/".join(map(str, key)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def generators(device: torch.device) -> List[torch.Generator]:
    """Those that a module on `device` may draw from: the CPU's, which stochastic depth asks on any device, and the GPU's own."""
    if device.type != "cuda":
        return [torch.default_generator]
    index = torch.cuda.current_device() if device.index is None else device.index
    return [torch.default_generator, torch.cuda.default_generators[index]]


class KeyedRandomness:
    """Seeds the named modules' draws in training, and leaves the random state around them as it was.

    `microbatch` is set by the backend before each forward, and before each backward, in which checkpoints run forwards again. The
    modules must not hold one another.
    """

    def __init__(self, model: nn.Module, names: Sequence[str], seed: int, device: torch.device) -> None:
        self.microbatch = 0
        self._seed = seed
        self._generators = generators(device) if names else []
        self._kept: Dict[str, List[torch.Tensor]] = {}  # by module: a checkpoint breaks its second forward off, anywhere
        self._handles: List[Any] = []
        for name in names:
            module = model.get_submodule(name)
            self._handles.append(module.register_forward_pre_hook(self._seeding(name)))
            self._handles.append(module.register_forward_hook(self._restoring(name)))

    def _seeding(self, name: str) -> Any:
        def before(module: nn.Module, inputs: Any) -> None:
            if module.training:
                self._kept[name] = [generator.get_state() for generator in self._generators]
                seed = derived_seed(self._seed, self.microbatch, name)
                for generator in self._generators:  # torch.manual_seed asks every kind of device: 100 times as long
                    generator.manual_seed(seed)

        return before

    def _restoring(self, name: str) -> Any:
        def after(module: nn.Module, inputs: Any, output: Any) -> None:
            if module.training:
                for generator, state in zip(self._generators, self._kept.pop(name)):
                    generator.set_state(state)

        return after

    def remove(self) -> None:
        """Take the hooks off the model."""
        for handle in self._handles:
            handle.remove()
