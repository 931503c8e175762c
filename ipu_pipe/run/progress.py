"""What a person sees while a run goes on: a progress bar on a terminal; in a file, a pipe or a notebook a line now and then."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any, BinaryIO, Callable, Iterator, Optional

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

    def evaluated(self, found: EvaluationResult) -> None:
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


Log = Callable[..., None]  # takes a record as keywords


def log_nothing(**record: Any) -> None:
    """Log nothing."""


@contextlib.contextmanager
def open_log(run: Optional[RunFolder], tensorboard: bool, done: int, say: Callable[[str], None]) -> Iterator[Log]:
    """What logs a run's records into its folder; nothing where there is none (another process writes). `done`: updates that are
    done already, whose scalars stay."""
    if run is None:
        yield log_nothing
        return
    if not tensorboard or not has_tensorboard():
        if tensorboard:
            say("TensorBoard is not installed (extra `board`): no scalars are written")
        yield lambda **record: run.metric(record)
        return

    def log(**record: Any) -> None:
        run.metric(record)
        for name, value in record.items():
            values = {f"{name}/{i}": v for i, v in enumerate(value)} if isinstance(value, list) else {name: value}
            for key, number in values.items():
                if name not in ("step", "epoch") and number is not None:
                    scalars.add(key, number, record["step"])

    with contextlib.closing(ScalarFile(run.path / "tensorboard", done + 1 if done else None)) as scalars:
        yield log


def has_tensorboard() -> bool:
    """Whether TensorBoard's writer is installed."""
    return importlib.util.find_spec("tensorboard") is not None


VERSION = "brain.Event:2"  # of the format, the first record of a file


class ScalarFile:
    """A new events file in `folder`. `purge_from`: TensorBoard is to forget what earlier files of the folder hold from that step
    on (a resumed run makes it again). Raises RunFault where the disk refuses. Needs the package tensorboard."""

    def __init__(self, folder: Path, purge_from: Optional[int] = None) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._summary, self._folder = event_pb2, summary_pb2, folder
        with guard_writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            self._file = _new_file(folder)
        self._records = RecordWriter(self._file)
        self._write(event_pb2.Event(wall_time=time.time(), file_version=VERSION))
        if purge_from is not None:
            began = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._write(event_pb2.Event(wall_time=time.time(), step=purge_from, session_log=began))

    def add(self, name: str, value: float, step: int) -> None:
        """The value of `name` after update `step`, on disk when this returns. Raises RunFault."""
        point = self._summary.Summary.Value(tag=name, simple_value=float(value))
        summary = self._summary.Summary(value=[point])
        self._write(self._event.Event(wall_time=time.time(), step=step, summary=summary))

    def close(self) -> None:
        """Close the file; nothing is waiting to be written."""
        with contextlib.suppress(OSError):
            self._file.close()

    def _write(self, event: Any) -> None:
        with guard_writing(self._folder):
            self._records.write(event.SerializeToString())
            self._records.flush()


def _new_file(folder: Path) -> BinaryIO:
    """By TensorBoard's own naming; the last number tells files of one process and second apart. TensorBoard reads a folder's
    files in the order of their names."""
    for number in itertools.count():
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{number}"
        with contextlib.suppress(FileExistsError):
            return open(folder / name, "xb")
    raise AssertionError
