"""What a person sees while a run goes on: a progress bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import contextlib
import sys
import time
from typing import Iterator, Optional

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

from ipu_pipe.job.position import Measured

LINE_SECONDS = 15.0  # between lines where there is no terminal
TEST_LINE_SECONDS = 1.0  # since the last line, for one after an evaluation


class Bar:
    """Shows updates with loss, accuracy and rate, averaged over the last updates or so."""

    def __init__(self, total: int, done: int, rich: Optional[RichProgress], quiet: bool) -> None:
        self._rich, self._quiet, self._total, self._done = rich, quiet, total, done
        self._task = rich.add_task("training", total=total, completed=done, shown="") if rich else None
        self._loss: Optional[float] = None
        self._accuracy: Optional[float] = None
        self._rate = 0.0
        self._tested = ""
        self._last_line = time.monotonic()

    def advance(self, loss: float, accuracy: Optional[float], rate: float) -> None:
        """One more update is done: its mean loss, accuracy (a fraction or None) and samples a second."""
        self._done += 1
        keep = 0.95 if self._loss is not None else 0.0
        self._loss = keep * (self._loss or 0.0) + (1 - keep) * loss
        if accuracy is not None:
            self._accuracy = keep * (self._accuracy or 0.0) + (1 - keep) * accuracy
        self._rate = keep * self._rate + (1 - keep) * rate
        self._show()

    def evaluated(self, found: Measured) -> None:
        """The test set was evaluated."""
        if found.loss is not None:
            known = [f" {name} {value:.3f}" for name, value in found.metrics.items() if value is not None]
            self._tested = f", test loss {found.loss:.3f}{''.join(known)}"
        self._last_line -= LINE_SECONDS - TEST_LINE_SECONDS
        self._show()

    def _show(self) -> None:
        accuracy = f" accuracy {self._accuracy:.3f}" if self._accuracy is not None else ""
        text = f"loss {self._loss or 0.0:.3f}{accuracy}, {self._rate:.0f} samples/s{self._tested}"
        if self._rich and self._task is not None:
            self._rich.update(self._task, completed=self._done, shown=text)
        elif not self._quiet and time.monotonic() - self._last_line > LINE_SECONDS:
            self._last_line = time.monotonic()
            print(f"update {self._done}/{self._total}: {text}", file=sys.stderr, flush=True)


class Progress:
    """Where a run reports to: text on standard output, the bar on standard error. `quiet` shows neither."""

    def __init__(self, quiet: bool = False) -> None:
        self.steps = 0  # done by this process
        self._quiet = quiet
        self._console = Console(file=sys.stderr)

    def say(self, text: str) -> None:
        """Print text for the reader."""
        if not self._quiet:
            print(text, flush=True)

    @contextlib.contextmanager
    def bar(self, total: int, done: int) -> Iterator[Bar]:
        """A bar over `total` updates of which `done` are done."""
        if self._quiet or not self._console.is_terminal:
            yield Bar(total, done, None, self._quiet)
            return
        columns = BarColumn(30), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()
        shown = TextColumn("{task.fields[shown]}")
        with RichProgress(*columns, shown, console=self._console, refresh_per_second=4) as rich:
            yield Bar(total, done, rich, False)
