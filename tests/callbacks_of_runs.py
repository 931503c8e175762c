"""Callbacks and metrics that configs of the tests name by import strings."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any, List, Optional

import torch

import ipu_pipe
from ipu_pipe.data.sources import compute_checksum


class StoppingCallback(ipu_pipe.Callback):
    """Stop a run after update `after`; at its end write every call with its figures into `file`."""

    def __init__(self, after: int, file: Optional[str] = None) -> None:
        self.after, self.file, self.calls = after, file, []  # type: ignore[var-annotated]

    def on_step(self, now: ipu_pipe.Moment) -> Optional[ipu_pipe.Stop]:
        self.calls.append(["step", now.step, now.loss, now.rate, now.epoch])
        return ipu_pipe.Stop("it is enough") if now.step == self.after else None

    def on_evaluation(self, now: ipu_pipe.Moment) -> None:
        self.calls.append(["evaluation", now.step, dict(now.metrics)])

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


class FailingCallback(ipu_pipe.Callback):
    """Raise a KeyError after update 2."""

    def on_step(self, now: ipu_pipe.Moment) -> None:
        if now.step == 2:
            raise KeyError("no such thing")


class Spread:
    """A metric with a state, as torchmetrics' metrics: the greatest output minus the smallest."""

    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale
        self.reset()

    def reset(self) -> None:
        self.outputs: List[torch.Tensor] = []

    def update(self, output: torch.Tensor, y: torch.Tensor) -> None:
        self.outputs.append(output.detach().flatten())

    def compute(self) -> torch.Tensor:
        every = torch.cat(self.outputs)
        return self.scale * (every.max() - every.min())


def confidence(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the mean greatest probability."""
    return output.softmax(dim=1).amax(dim=1).mean()


class ChecksumRecorder(ipu_pipe.Callback):
    """Write checksums of the gradients of each update and of all weights at the other calls into `file`."""

    wants_model = True

    def __init__(self, file: Optional[str] = None) -> None:
        self.file, self.checksums = file, []  # type: ignore[var-annotated]
        for moment in ("start", "evaluation", "checkpoint"):
            setattr(self, f"on_{moment}", functools.partial(self._note_model, moment))

    def _note(self, moment: str, now: ipu_pipe.Moment, tensors: Any) -> None:
        checksums = {name: compute_checksum(value) for name, value in tensors.items()}
        self.checksums.append([moment, now.step, checksums])

    def _note_model(self, moment: str, now: ipu_pipe.Moment) -> None:
        assert now.model is not None
        self._note(moment, now, now.model.state_dict())

    def on_gradients(self, now: ipu_pipe.Moment) -> None:
        self._note("gradients", now, now.gradients)

    def on_step(self, now: ipu_pipe.Moment) -> None:
        assert not now.gradients

    def on_end(self, now: ipu_pipe.Moment) -> None:
        self._note_model("end", now)
        if self.file is not None:
            Path(self.file).write_text(json.dumps(self.checksums))


class DelegatingCallback(ipu_pipe.Callback):
    """Delegate every missing attribute to another callback, which the constructor makes."""

    def __init__(self) -> None:
        self.inner = ipu_pipe.Callback()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)
