"""A GPU's clock: marks are events on its stream, since the host only asks for work there and goes on.

    host     asks F0 | asks F1 | waits for B0's gradients ..........| asks B0
    stream   m  F0  m m   F1   m . . idle . . . . . . . . . . . . . m   B0   m       m: a mark, passed in this order

A mark after a wait is put on the stream when the host goes on, so the wait's length there is the time in which the GPU had
nothing to do. (Shown by a double of events; no GPU has run it.)
"""

from __future__ import annotations

import time
from typing import Any, Callable, Deque, Iterator, Tuple

import torch

Pending = Tuple[Any, Any, Callable[[int, int], None]]


class StreamClock:
    """Of the current stream of the current device. `event`: makes one; `finish`: waits until the GPU has nothing to do."""

    def __init__(
        self,
        event: Callable[[], Any] = lambda: torch.cuda.Event(enable_timing=True),
        finish: Callable[[], None] = lambda: torch.cuda.synchronize(),
    ) -> None:
        self._event, self._finish = event, finish
        self.anchor()

    def mark(self) -> Any:
        """Now, on the stream."""
        event = self._event()
        event.record()
        return event

    def anchor(self) -> None:
        """Wait for the GPU, and take the host's clock then: what is measured from an event far back is not exact, in
        milliseconds as a float32."""
        self._finish()
        self._first = self.mark()
        self._finish()
        self._first_ns = time.perf_counter_ns()

    def passed(self, pending: Deque[Pending], wait: bool) -> Iterator[Tuple[int, int, Callable[[int, int], None]]]:
        """What of `pending`, in order, lies behind the GPU (all of it, if need be after a `wait`), by the host's clock."""
        if wait:
            self._finish()
        last = None
        while pending and (wait or pending[0][1].query()):
            start, last, keep = pending.popleft()
            yield self._ns(start), self._ns(last), keep
        if last is not None:
            self._first_ns, self._first = self._ns(last), last

    def _ns(self, mark: Any) -> int:
        return self._first_ns + round(self._first.elapsed_time(mark) * 1e6)
