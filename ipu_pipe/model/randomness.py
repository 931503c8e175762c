"""Random numbers: seeds, states of the generators, and keyed draws inside a model.

Every backend draws the same dropout masks: a module's draws are seeded by (seed, microbatch, module
name); from its second call in a forward on also by the number of the call. So recomputation repeats
them, and another cut of the model does not change them.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
from typing import Any, Iterator, Mapping, NamedTuple

import numpy as np
import torch
from torch import nn

from ipu_pipe.errors import BadInput
from ipu_pipe.model.devices import fork_random, get_kind, list_generators

# a bit that no seed of `derive_seed` has
MARK_BIT = 1 << 63
# more than the calls of a forward
POSITIONS = 1 << 20


def derive_seed(*key: object) -> int:
    """Return a 63-bit seed that depends on all of `key` and nothing else, the same on every machine
    and Python version.
    """
    # hash() of a string differs from process to process
    digest = hashlib.blake2b("/".join(map(str, key)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@contextlib.contextmanager
def draw_from(state: torch.Tensor) -> Iterator[None]:
    """Set the CPU's generator to `state` inside the context, so that a part of a forward repeats
    its draws.
    """
    # the draws of GPUs are left alone: without a list it would save their states
    with torch.random.fork_rng(devices=[]):
        torch.set_rng_state(state)
        yield


class RandomStates(NamedTuple):
    """The states of the global generators: PyTorch's on the CPU, Python's and numpy's."""

    torch: torch.Tensor
    python: tuple[Any, ...]
    numpy: Any

    @classmethod
    def read(cls) -> "RandomStates":
        """Read the current states."""
        return cls(torch.get_rng_state(), random.getstate(), np.random.get_state())

    @classmethod
    def from_seed(cls, seed: int) -> "RandomStates":
        """Return the states that `seed` gives, without changing any generator."""
        # numpy takes seeds of 32 bits
        numpy_state = np.random.RandomState(seed % 2**32).get_state()
        return cls(
            torch.Generator().manual_seed(seed).get_state(),
            random.Random(seed).getstate(),
            numpy_state,
        )

    def write(self) -> None:
        """Put the global generators into these states."""
        torch.set_rng_state(self.torch)
        random.setstate(self.python)
        np.random.set_state(self.numpy)


@contextlib.contextmanager
def restore_random_states(device: torch.device | None = None) -> Iterator[None]:
    """Put the global generators, and that of `device` if it has one, back into their states at the
    end of the block.
    """
    states = RandomStates.read()
    with fork_random(device):
        try:
            yield
        finally:
            states.write()


class KeyedRandomness:
    """Seed the draws of the named modules in training, inside the contexts `forward` and
    `backward`.

    `calls`: module -> the number of its runs in a forward
    (`ipu_pipe.model.observation.ForwardEffects`).

    If a module runs more than once, the number of a call must be known when
    `torch.utils.checkpoint` runs a part of the forward again in the backward. So between the calls
    the CPU's generator carries a mark: its seed tells the *position* in the forward, which is the
    number of calls so far of each module. A checkpoint stores the generator's state and restores
    it:

        forward     mark 0   drop (call 0)   mark 1   checkpoint[ drop (call 1) ]   mark 2
        backward                             mark 1   checkpoint[ drop (call 1) ]
    """

    def __init__(
        self, model: nn.Module, calls: Mapping[str, int], seed: int, device: torch.device
    ) -> None:
        self._seed = seed
        # the most calls so far of each module in one forward
        self._max_calls = dict(calls)
        self._generators = list_generators(device) if calls else []
        # module -> states before its call; kept by name, because a checkpoint may break off its
        # second forward anywhere
        self._saved: dict[str, list[torch.Tensor]] = {}
        # None outside the two contexts, where draws are not keyed
        self._microbatch: int | None = None
        # by position: module -> the number of its calls so far; position 0 is the beginning of the
        # forward
        self._counts_by_position: list[dict[str, int]] = [{}]
        self._positions: dict[frozenset[tuple[str, int]], int] = {frozenset(): 0}
        self._position: int | None = None
        self._is_backward = False
        self._handles: list[Any] = []
        for name in calls:
            module = model.get_submodule(name)
            self._handles.append(module.register_forward_pre_hook(self._make_seeding_hook(name)))
            self._handles.append(module.register_forward_hook(self._make_restoring_hook(name)))

    @contextlib.contextmanager
    def forward(self, microbatch: int, before: Mapping[str, int] | None = None) -> Iterator[None]:
        """Key the draws of a forward, or of a part of it; `before`: module -> calls in the parts
        before.
        """
        counts = {name: count for name, count in (before or {}).items() if name in self._max_calls}
        with self._enter_pass(microbatch, self._get_position(counts)):
            yield

    @contextlib.contextmanager
    def backward(self, microbatch: int) -> Iterator[None]:
        """Key the draws of a backward, in which checkpoints run parts of the forward again."""
        with self._enter_pass(microbatch, None):
            yield

    @contextlib.contextmanager
    def _enter_pass(self, microbatch: int, position: int | None) -> Iterator[None]:
        self._microbatch = microbatch
        self._position = position
        self._is_backward = position is None
        state = self._generators[0].get_state() if self._needs_marks else None
        if state is not None and position is not None:
            self._set_mark(position)
        try:
            yield
        finally:
            self._microbatch = None
            if state is not None:
                self._generators[0].set_state(state)

    # ---- positions

    @property
    def _needs_marks(self) -> bool:
        return any(count > 1 for count in self._max_calls.values())

    @property
    def _first_mark(self) -> int:
        """The mark of this microbatch's position 0."""
        return MARK_BIT + derive_seed(self._seed, self._microbatch) // POSITIONS * POSITIONS

    def _set_mark(self, position: int) -> None:
        self._generators[0].manual_seed(self._first_mark + position)

    def _read_mark(self) -> int | None:
        """Return the position that the CPU's generator carries, None if it carries none."""
        position = self._generators[0].initial_seed() % (1 << 64) - self._first_mark
        return position if 0 <= position < len(self._counts_by_position) else None

    def _get_position(self, counts: dict[str, int]) -> int:
        """Return the position with these numbers of calls, a new one if there is none."""
        position = self._positions.setdefault(
            frozenset(counts.items()), len(self._counts_by_position)
        )
        if position == len(self._counts_by_position):
            self._counts_by_position.append(counts)
        return position

    def _number_call(self, name: str) -> int:
        """Return the number, from 0, of the call of a module that begins."""
        if self._needs_marks:
            position = self._read_mark()
            self._position = position if position is not None else self._position
        # a checkpoint without preserve_rng_state
        if self._position is None:
            if self._max_calls[name] > 1:
                raise BadInput(
                    f"model: {name}: draws random numbers, runs several times in a forward, and a "
                    f"checkpoint without"
                    " preserve_rng_state runs it again: set preserve_rng_state=True"
                )
            return 0
        counts = self._counts_by_position[self._position]
        number = counts.get(name, 0)
        self._max_calls[name] = max(self._max_calls[name], number + 1)
        self._position = self._get_position({**counts, name: number + 1})
        return number

    # ---- hooks

    def _make_seeding_hook(self, name: str) -> Any:
        def seed_draws(module: nn.Module, inputs: Any) -> None:
            if module.training and self._microbatch is not None:
                self._saved[name] = [generator.get_state() for generator in self._generators]
                number = self._number_call(name)
                seed = derive_seed(
                    self._seed, self._microbatch, name, *([number] if number else [])
                )
                # not torch.manual_seed, which seeds every device type and takes 100 times as long
                for generator in self._generators:
                    generator.manual_seed(seed)

        return seed_draws

    def _make_restoring_hook(self, name: str) -> Any:
        def restore_states(module: nn.Module, inputs: Any, output: Any) -> None:
            if module.training and self._microbatch is not None:
                for generator, state in zip(self._generators, self._saved.pop(name)):
                    generator.set_state(state)
                if (
                    self._needs_marks
                    and self._position is not None
                    and self._read_mark() is not None
                ):
                    self._set_mark(self._position)
                    # the next checkpoint restores its own mark
                    if self._is_backward:
                        self._position = None

        return restore_states

    def remove(self) -> None:
        """Remove the hooks from the model."""
        for handle in self._handles:
            handle.remove()


def find_unkeyed_draws(model: nn.Module, device: torch.device) -> list[str]:
    """Return the names of modules that draw from a private state, which no seed of a microbatch
    reaches: cuDNN's recurrent layers have one for the dropout between their layers."""
    if not get_kind(device).is_cuda:
        return []
    modules = [(name, m) for name, m in model.named_modules() if isinstance(m, nn.RNNBase)]
    return [name for name, m in modules if m.dropout > 0 and m.num_layers > 1]
