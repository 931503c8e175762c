"""Callbacks and metrics that runs of the tests name by import strings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, List, Optional

import torch

import ipu_pipe
from ipu_pipe.data.sources import compute_checksum


class Ends(ipu_pipe.Callback):
    """Ends a run after update `after`, and writes down what it saw into `file`."""

    def __init__(self, after: int, file: Optional[str] = None) -> None:
        self.after, self.file, self.calls = after, file, []  # type: ignore[var-annotated]

    def on_step(self, now: ipu_pipe.Moment) -> Optional[ipu_pipe.Stop]:
        self.calls.append(["step", now.step, now.loss, now.rate, now.epoch])
        return ipu_pipe.Stop("it is enough") if now.step == self.after else None

    def on_evaluation(self, now: ipu_pipe.Moment) -> None:
        self.calls.append(
            ["evaluation", now.step, now.metrics["test_loss"], now.metrics["test_accuracy"]]
        )

    def on_checkpoint(self, now: ipu_pipe.Moment) -> None:
        assert now.checkpoint is not None
        assert (now.checkpoint / "manifest.json").is_file()
        self.calls.append(["checkpoint", now.step, now.checkpoint.name])

    def on_end(self, now: ipu_pipe.Moment) -> None:
        self.calls.append(["end", now.step, now.stopped])
        if self.file is not None:
            Path(self.file).write_text(json.dumps(self.calls))

    def state(self) -> Any:
        return {"seen": len(self.calls)}


class Fails(ipu_pipe.Callback):
    """Raises after update 2."""

    def on_step(self, now: ipu_pipe.Moment) -> None:
        if now.step == 2:
            raise KeyError("no such thing")


class Exits(ipu_pipe.Callback):
    """Calls exit() after update 2."""

    def __init__(self, code: Optional[int] = None) -> None:
        self.code = code

    def on_step(self, now: ipu_pipe.Moment) -> None:
        if now.step == 2:
            raise SystemExit(self.code)


class Spread:
    """A metric with sums of its own, as torchmetrics' have: the greatest output less the smallest."""

    def __init__(self, scale: float = 1.0) -> None:
        self.scale, self.seen = scale, []  # type: ignore[var-annotated]

    def reset(self) -> None:
        self.seen: List[torch.Tensor] = []

    def update(self, output: torch.Tensor, y: torch.Tensor) -> None:
        self.seen.append(output.detach().flatten())

    def compute(self) -> torch.Tensor:
        every = torch.cat(self.seen)
        return self.scale * (every.max() - every.min())


def confidence(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the mean greatest probability."""
    return output.softmax(dim=1).amax(dim=1).mean()


class Watches(ipu_pipe.Callback):
    """Writes a checksum of every tensor that it sees into `file`: gradients at each update, weights where they are whole."""

    wants_model = True

    def __init__(self, file: Optional[str] = None) -> None:
        self.file, self.seen = file, []  # type: ignore[var-annotated]

    def _note(self, moment: str, now: ipu_pipe.Moment, tensors: Any) -> None:
        self.seen.append(
            [moment, now.step, {name: compute_checksum(value) for name, value in tensors.items()}]
        )

    def _note_model(self, moment: str, now: ipu_pipe.Moment) -> None:
        assert now.model is not None
        self._note(moment, now, now.model.state_dict())

    def on_start(self, now: ipu_pipe.Moment) -> None:
        self._note_model("start", now)

    def on_gradients(self, now: ipu_pipe.Moment) -> None:
        self._note("gradients", now, now.gradients)

    def on_step(self, now: ipu_pipe.Moment) -> None:
        assert not now.gradients

    def on_evaluation(self, now: ipu_pipe.Moment) -> None:
        self._note_model("evaluation", now)

    def on_checkpoint(self, now: ipu_pipe.Moment) -> None:
        self._note_model("checkpoint", now)

    def on_end(self, now: ipu_pipe.Moment) -> None:
        self._note_model("end", now)
        if self.file is not None:
            Path(self.file).write_text(json.dumps(self.seen))


class Wraps(ipu_pipe.Callback):
    """Passes every attribute that it lacks on to another callback, which its constructor makes."""

    def __init__(self) -> None:
        self.inner = ipu_pipe.Callback()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)
