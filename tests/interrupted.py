"""Interrupt a run at a chosen update."""

from __future__ import annotations

import contextlib
from typing import Any, Iterator

import pytest

from ipu_pipe.backends.emulator.replay import Emulator


@contextlib.contextmanager
def interrupt_at(update: int) -> Iterator[None]:
    """Interrupt the emulator in this update, as Ctrl-C does; assert that the block ends with KeyboardInterrupt."""
    step = Emulator.advance

    def step_or_interrupt(self: Any, microbatches: Any) -> Any:
        if self.update == update:
            raise KeyboardInterrupt
        return step(self, microbatches)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Emulator, "advance", step_or_interrupt)
        yield
