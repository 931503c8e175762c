"""What a person sees while a run goes on: a progress bar on a terminal; in a file, a pipe or a notebook a line now and then."""

from __future__ import annotations

import contextlib
import sys
import time
from typing import Callable, Iterator, Optional

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

from ipu_pipe.job.position import Measured
from ipu_pipe.text import escape_lines

LINE_SECONDS = 30.0  # between lines where there is no terminal
EPOCH_SECONDS = 1.0  # the same, at an epoch's end or after an evaluation
Clock = Callable[[], float]  # seconds


class Bar:
    """Shows updates with loss, accuracy and rate, averaged over the last updates or so. Without a `rich` bar it gives lines to
    `tell`, if there is one, by the `clock`."""

    def __init__(
        self,
        total: int,
        done: int,
        per_epoch: Optional[int],
        rich: Optional[RichProgress] = None,
        tell: Optional[Callable[[str], None]] = None,
        clock: Clock = time.monotonic,
    ) -> None:
        self._rich, self._tell, self._clock = rich, tell, clock
        self._total, self._done, self._per_epoch = total, done, per_epoch
        self._task = rich.add_task("training", total=total, completed=done, shown="") if rich else None
        self._loss: Optional[float] = None
        self._accuracy: Optional[float] = None
        self._rate = 0.0
        self._tested = ""
        self._last_line = clock()
        self._ends_epoch = False  # the last update did, and its line waits for an evaluation, which may come

    def advance(self, loss: float, accuracy: Optional[float], rate: float) -> None:
        """One more update is done: its mean loss, accuracy (a fraction or None) and samples a second."""
        self.end_epoch()
        self._done += 1
        keep = 0.95 if self._loss is not None else 0.0
        self._loss = keep * (self._loss or 0.0) + (1 - keep) * loss
        if accuracy is not None:
            self._accuracy = keep * (self._accuracy or 0.0) + (1 - keep) * accuracy
        self._rate = keep * self._rate + (1 - keep) * rate
        self._ends_epoch = self._per_epoch is not None and self._done % self._per_epoch == 0
        self._show(False)

    def evaluated(self, found: Measured) -> None:
        """The test set was evaluated."""
        if found.loss is not None:
            known = [f" {name} {value:.3f}" for name, value in found.metrics.items() if value is not None]
            self._tested = f", test loss {found.loss:.3f}{''.join(known)}"
        self._ends_epoch = False
        self._show(True)

    def end_epoch(self) -> None:
        """Show the end of an epoch that no evaluation has shown."""
        if self._ends_epoch:
            self._ends_epoch = False
            self._show(True)

    def _show(self, soon: bool) -> None:
        """Show where the run is; as a line if the last one is long ago, or `soon` thereafter."""
        accuracy = f" accuracy {self._accuracy:.3f}" if self._accuracy is not None else ""
        text = f"loss {self._loss or 0.0:.3f}{accuracy}, {self._rate:.0f} samples/s{self._tested}"
        now = self._clock()
        if self._rich and self._task is not None:
            self._rich.update(self._task, completed=self._done, shown=text)
        elif self._tell and now - self._last_line >= (EPOCH_SECONDS if soon else LINE_SECONDS):
            self._last_line = now
            epochs = f", epoch {round(self._done / self._per_epoch, 2):g}" if self._per_epoch else ""
            self._tell(f"update {self._done}/{self._total}{epochs}: {text}")


class Progress:
    """Where a run reports to: text on standard output, the bar on standard error. `quiet` shows neither."""

    def __init__(self, quiet: bool = False) -> None:
        self.steps = 0  # done by this process
        self._quiet = quiet

    def say(self, text: str) -> None:
        """Print text for the reader."""
        if not self._quiet:
            print(escape_lines(text), flush=True)

    @contextlib.contextmanager
    def bar(self, total: int, done: int, per_epoch: Optional[int]) -> Iterator[Bar]:
        """A bar over `total` updates of which `done` are done, `per_epoch` of them an epoch, None where there are none."""
        console = Console(file=sys.stderr)
        if self._quiet:
            yield Bar(total, done, per_epoch)
        elif not sys.stderr.isatty() or not console.is_terminal or console.is_dumb_terminal:
            # a notebook shows standard error as faults
            bar = Bar(total, done, per_epoch, tell=self.say if console.is_jupyter else _on_standard_error)
            yield bar
            bar.end_epoch()
        else:
            columns = BarColumn(30), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()
            shown = TextColumn("{task.fields[shown]}")
            with RichProgress(*columns, shown, console=console, refresh_per_second=4) as rich:
                yield Bar(total, done, per_epoch, rich)


def _on_standard_error(text: str) -> None:
    print(escape_lines(text), file=sys.stderr, flush=True)
