"""Show the progress of a run: a bar on a terminal, lines elsewhere, and the scalars in
metrics.jsonl and TensorBoard's files.
"""

from __future__ import annotations

import contextlib
import sys
import time
from typing import Any, Callable, Iterator, Mapping

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as RichProgress

from ipu_pipe.errors import guard_writing, print_progress
from ipu_pipe.job.evaluation import EvaluationResult
from ipu_pipe.store.folder import RunFolder

# seconds between lines without a terminal, and before a line at an epoch's end or after an
# evaluation
LINE_SECONDS = 30.0
EPOCH_SECONDS = 1.0


class Bar:
    """Moving averages of loss, accuracy and samples per second, shown by
    `show(updates done, text, is_milestone)`.

    The end of an epoch and an evaluation are milestones.
    """

    def __init__(
        self, done: int, per_epoch: int | None, show: Callable[[int, str, bool], None]
    ) -> None:
        self._show = show
        self._done = done
        self._per_epoch = per_epoch
        self._averages: dict[str, float] = {}
        self._tested = ""
        # the line of an epoch's end waits for the evaluation that may follow
        self._ends_epoch = False

    def advance(self, loss: float | None, accuracy: float | None, rate: float) -> None:
        """Add an update: its mean loss and accuracy (a fraction), each None if undefined, and
        samples a second.
        """
        self.end_epoch()
        self._done += 1
        for name, value in (("loss", loss), ("accuracy", accuracy), ("rate", rate)):
            if value is not None:
                # else the average would begin near 0
                keep = 0.95 if name in self._averages else 0.0
                self._averages[name] = keep * self._averages.get(name, 0.0) + (1 - keep) * value
        self._ends_epoch = self._per_epoch is not None and self._done % self._per_epoch == 0
        self._update(False)

    def show_evaluation(self, result: EvaluationResult, split: str = "test") -> None:
        """Show the result of an evaluation."""
        if result.loss is not None:
            metrics = [
                f" {name} {value:.3f}"
                for name, value in result.metrics.items()
                if value is not None
            ]
            self._tested = f", {split} loss {result.loss:.3f}{''.join(metrics)}"
        # the line of the evaluation is that of the epoch's end, too
        self._ends_epoch = False
        self._update(True)

    def end_epoch(self) -> None:
        """Show the end of an epoch that no evaluation has shown."""
        if self._ends_epoch:
            self._ends_epoch = False
            self._update(True)

    def _update(self, is_milestone: bool) -> None:
        means = self._averages
        accuracy = f" accuracy {means['accuracy']:.3f}" if "accuracy" in means else ""
        text = (
            f"loss {means.get('loss', 0.0):.3f}{accuracy}, {means.get('rate', 0.0):.0f} "
            f"samples/s{self._tested}"
        )
        self._show(self._done, text, is_milestone)


class Lines:
    """Print a line of progress by `print_line` if the last line is `LINE_SECONDS` old, or
    `EPOCH_SECONDS` if `is_milestone`.
    """

    def __init__(
        self,
        total: int,
        per_epoch: int | None,
        print_line: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        unit: str = "update",
    ) -> None:
        self._total = total
        self._unit = unit
        self._per_epoch = per_epoch
        self._print_line = print_line
        self._clock = clock
        # the first line comes after LINE_SECONDS, too: a short run has its closing lines alone
        self._last = clock()

    def __call__(self, done: int, text: str, is_milestone: bool) -> None:
        """Print a line if the last one is old enough."""
        if self._clock() - self._last >= (EPOCH_SECONDS if is_milestone else LINE_SECONDS):
            self._last = self._clock()
            epochs = f", epoch {round(done / self._per_epoch, 2):g}" if self._per_epoch else ""
            self._print_line(f"{self._unit} {done}/{self._total}{epochs}: {text}")


class Progress:
    """The messages of a run on standard output and its bar on standard error; neither if
    `quiet`.
    """

    def __init__(self, quiet: bool = False) -> None:
        # updates of this process
        self.steps = 0
        self._quiet = quiet

    def say(self, text: str) -> None:
        """Print text, unless quiet."""
        if not self._quiet:
            print_progress(text, sys.stdout)

    @contextlib.contextmanager
    def show_bar(
        self, total: int, done: int, per_epoch: int | None, unit: str = "update"
    ) -> Iterator[Bar]:
        """Show a bar over `total` updates, of which `done` are done; `per_epoch` updates are an
        epoch (None: no epochs). `unit`: what is counted, if it is not updates.
        """
        console = Console(file=sys.stderr)
        if self._quiet:
            yield Bar(done, per_epoch, lambda done, text, is_milestone: None)
        # rich believes FORCE_COLOR that there is a terminal, and would draw bars into a log file
        elif not sys.stderr.isatty() or not console.is_terminal or console.is_dumb_terminal:
            # a notebook shows standard error as faults
            print_line = (
                self.say if console.is_jupyter else lambda text: print_progress(text, sys.stderr)
            )
            bar = Bar(done, per_epoch, Lines(total, per_epoch, print_line, unit=unit))
            yield bar
            bar.end_epoch()
        else:
            columns = (
                BarColumn(30),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
            )
            shown = TextColumn("{task.fields[shown]}")
            with RichProgress(*columns, shown, console=console, refresh_per_second=4) as rich:
                task = rich.add_task("training", total=total, completed=done, shown="")
                yield Bar(
                    done,
                    per_epoch,
                    lambda done, text, is_milestone: rich.update(task, completed=done, shown=text),
                )


# ---- the files of scalars

# a function that takes a record as keywords
Log = Callable[..., None]
# seconds between two writes of TensorBoard's thread, and the longest wait for it when a run is
# interrupted
FLUSH_SECONDS = 1.0


def flatten_line(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a line of metrics.jsonl as scalars that are not None; lists become `name/0`, `name/1`,
    ...
    """
    flat: dict[str, Any] = {}
    for name, value in record.items():
        flat.update(
            {f"{name}/{i}": v for i, v in enumerate(value)}
            if isinstance(value, list)
            else {name: value}
        )
    return {name: value for name, value in flat.items() if value is not None}


def log_nothing(**record: Any) -> None:
    """Accept a record and write nothing."""


@contextlib.contextmanager
def open_log(run: RunFolder | None, tensorboard: bool, done: int) -> Iterator[Log]:
    """Yield a function that logs records into metrics.jsonl and TensorBoard's events; `run` None:
    it logs nothing.

    `done`: the updates before this start; TensorBoard hides later events of earlier starts. Raise
    `RunFault` if the disk refuses.
    """
    if run is None:
        yield log_nothing
        return
    if not tensorboard:
        yield lambda **record: run.write_metrics(record)
        return
    # this import takes 0.3 s
    from torch.utils.tensorboard import SummaryWriter

    folder = run.path / "tensorboard"
    with guard_writing(folder):
        writer = SummaryWriter(
            str(folder), purge_step=done + 1 if done else None, flush_secs=FLUSH_SECONDS
        )

    def log(**record: Any) -> None:
        run.write_metrics(record)
        for name, number in flatten_line(record).items():
            # TensorBoard's axis is the step
            if name not in ("step", "epoch"):
                with guard_writing(folder):
                    writer.add_scalar(name, number, record["step"])

    try:
        yield log
    finally:
        # metrics.jsonl on the same disk has raised the same error
        with contextlib.suppress(OSError):
            writer.close()
