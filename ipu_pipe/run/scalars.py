"""Scalars for TensorBoard, each written to its events file when it is added.

TensorBoard's own writer hands its records to a thread through a queue, and closing it waits for that thread: an interrupt that
lands between the two left the thread asleep for its whole flush interval, two minutes. Here no one waits for anyone.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import time
from pathlib import Path
from typing import Any, BinaryIO, Optional

from ipu_pipe.errors import guard_writing

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
