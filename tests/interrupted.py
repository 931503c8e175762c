"""Runs that are interrupted at an update of their own."""

from __future__ import annotations

import contextlib
from typing import Any, Iterator

import pytest

from ipu_pipe.backends.emulator.replay import Emulator


@contextlib.contextmanager
def interrupted_at(update: int) -> Iterator[None]:
    """Ctrl-C comes in this update of the emulator, and must end what is done here."""
    step = Emulator.step

    def interrupted(self: Any, microbatches: Any) -> Any:
        if self.update == update:
            raise KeyboardInterrupt
        return step(self, microbatches)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Emulator, "step", interrupted)
        yield
