"""The lines of metrics.jsonl, and the same as TensorBoard's scalars."""

from __future__ import annotations

import contextlib
import importlib.util
from typing import Any, Callable, Iterator, Optional

from ipu_pipe.run.folder import RunDir
from ipu_pipe.run.scalars import ScalarFile

Log = Callable[..., None]  # takes a record as keywords


def nothing(**record: Any) -> None:
    """Log nothing."""


@contextlib.contextmanager
def log_of(run: Optional[RunDir], tensorboard: bool, done: int, say: Callable[[str], None]) -> Iterator[Log]:
    """What logs a run's records into its folder; nothing where there is none (another process writes). `done`: updates that are
    done already, whose scalars stay."""
    if run is None:
        yield nothing
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
