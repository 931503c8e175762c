"""The progress of a run: a bar on a terminal, lines elsewhere, and the scalars in metrics.jsonl and TensorBoard's files."""

from __future__ import annotations

import contextlib
import sys
import time
from typing import Any, Callable, Iterator, Optional

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

from ipu_pipe.errors import guard_writing
from ipu_pipe.job.evaluation import EvaluationResult
from ipu_pipe.run.folder import RunFolder
from ipu_pipe.text import escape_lines

LINE_SECONDS = 30.0  # between lines where there is no terminal
EPOCH_SECONDS = 1.0  # the same, at an epoch's end or after an evaluation
Clock = Callable[[], float]  # seconds


class Bar:
    """A progress bar with loss, accuracy and samples a second, each a moving average over updates.

    Without a `rich` bar it passes lines to `tell`, if there is one, at most one in `LINE_SECONDS` of the `clock`.
    """

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
        self._ends_epoch = False  # whether the last update did: its line waits for the evaluation that may follow

    def advance(self, loss: float, accuracy: Optional[float], rate: float) -> None:
        """Add an update: its mean loss, accuracy (a fraction or None) and samples a second."""
        self.end_epoch()
        self._done += 1
        keep = 0.95 if self._loss is not None else 0.0
        self._loss = keep * (self._loss or 0.0) + (1 - keep) * loss
        if accuracy is not None:
            self._accuracy = keep * (self._accuracy or 0.0) + (1 - keep) * accuracy
        self._rate = keep * self._rate + (1 - keep) * rate
        self._ends_epoch = self._per_epoch is not None and self._done % self._per_epoch == 0
        self._show(False)

    def show_evaluation(self, result: EvaluationResult) -> None:
        """Show the result of an evaluation."""
        if result.loss is not None:
            metrics = [f" {name} {value:.3f}" for name, value in result.metrics.items() if value is not None]
            self._tested = f", test loss {result.loss:.3f}{''.join(metrics)}"
        self._ends_epoch = False
        self._show(True)

    def end_epoch(self) -> None:
        """Show the end of an epoch that no evaluation has shown."""
        if self._ends_epoch:
            self._ends_epoch = False
            self._show(True)

    def _show(self, soon: bool) -> None:
        """Update the bar, or print a line if the last one is LINE_SECONDS old (EPOCH_SECONDS if `soon`)."""
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
    """The messages of a run on standard output and its bar on standard error; neither if `quiet`."""

    def __init__(self, quiet: bool = False) -> None:
        self.steps = 0  # updates done by this process
        self._quiet = quiet

    def say(self, text: str) -> None:
        """Print text, unless quiet."""
        if not self._quiet:
            print(escape_lines(text), flush=True)

    @contextlib.contextmanager
    def show_bar(self, total: int, done: int, per_epoch: Optional[int]) -> Iterator[Bar]:
        """Show a bar over `total` updates, of which `done` are done; `per_epoch` updates are an epoch (None: no epochs)."""
        console = Console(file=sys.stderr)
        if self._quiet:
            yield Bar(total, done, per_epoch)
        elif not sys.stderr.isatty() or not console.is_terminal or console.is_dumb_terminal:
            # a notebook marks standard error as faults
            bar = Bar(total, done, per_epoch, tell=self.say if console.is_jupyter else _print_to_standard_error)
            yield bar
            bar.end_epoch()
        else:
            columns = BarColumn(30), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()
            shown = TextColumn("{task.fields[shown]}")
            with RichProgress(*columns, shown, console=console, refresh_per_second=4) as rich:
                yield Bar(total, done, per_epoch, rich)


def _print_to_standard_error(text: str) -> None:
    print(escape_lines(text), file=sys.stderr, flush=True)


# ---- the files of scalars

Log = Callable[..., None]  # takes a record as keywords
FLUSH_SECONDS = 1.0  # between two writes of TensorBoard's thread, and so the longest wait for it when a run is interrupted


def log_nothing(**record: Any) -> None:
    """Accept a record and write nothing."""


@contextlib.contextmanager
def open_log(run: Optional[RunFolder], tensorboard: bool, done: int) -> Iterator[Log]:
    """Yield a function that logs records into metrics.jsonl and TensorBoard's events; nothing if another process writes.

    `done` is the number of updates done before: of an earlier start TensorBoard shows these only. Raise `RunFault` if the disk
    refuses.
    """
    if run is None:
        yield log_nothing
        return
    if not tensorboard:
        yield lambda **record: run.write_metrics(record)
        return
    from torch.utils.tensorboard import SummaryWriter  # takes 0.3 s

    folder = run.path / "tensorboard"
    with guard_writing(folder):
        writer = SummaryWriter(str(folder), purge_step=done + 1 if done else None, flush_secs=FLUSH_SECONDS)

    def log(**record: Any) -> None:
        run.write_metrics(record)
        for name, value in record.items():
            values = {f"{name}/{i}": v for i, v in enumerate(value)} if isinstance(value, list) else {name: value}
            for key, number in values.items():
                if name not in ("step", "epoch") and number is not None:
                    with guard_writing(folder):
                        writer.add_scalar(key, number, record["step"])

    try:
        yield log
    finally:
        with contextlib.suppress(OSError):  # metrics.jsonl, on the same disk, has raised it
            writer.close()
