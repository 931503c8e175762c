"""Writing the checkpoints of a run: whole by the main process or in shards by each, at once or beside the training.

    main thread      ... U8 | state, copied | U9 ....... U10 ... | callbacks, older ones deleted | U11 ...
    in background                           | files, manifest, name |
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Union

import torch

from ipu_pipe.backends.interface import CheckpointState
from ipu_pipe.run import checkpoint


class Saver:
    """Writes checkpoints into `folder`, one after another. `group`: of all processes, if each writes its part; else None."""

    def __init__(self, folder: Path, group: Any = None) -> None:
        self._folder, self._group = folder, group
        self._thread: Optional[threading.Thread] = None
        self._outcome: List[Union[Path, BaseException]] = []

    def start(self, step: int, state: CheckpointState, facts: Mapping[str, Any], background: bool) -> None:
        """Write the checkpoint of `step`, or in `background` begin to, from a copy. The one before must be finished."""
        assert self._thread is None and not self._outcome
        if not background:
            self._write(step, state, facts)
            return
        state = state._replace(model=_copy(state.model), optimizer=_copy(state.optimizer))
        self._thread = threading.Thread(target=self._write, args=(step, state, facts), name="ipu_pipe saving", daemon=True)
        self._thread.start()

    def _write(self, step: int, state: CheckpointState, facts: Mapping[str, Any]) -> None:
        try:
            if self._group is None:
                path = checkpoint.save(self._folder, step, state.model, state.optimizer, facts)
            else:
                from ipu_pipe.run.shards import save_shard  # which PopTorch's torch cannot import

                path = save_shard(self._folder, step, state, facts, self._group)
            self._outcome.append(path)
        except BaseException as error:  # Ctrl-C too, where it is the main thread
            self._outcome.append(error)

    def finish(self, waits: bool = True) -> Optional[Path]:
        """Return the folder of the checkpoint that was started, when it is whole, and None ever after until the next.

        Unless it `waits`, return None while it is being written. Raise what has ended the writing.
        """
        if self._thread is not None:
            if self._thread.is_alive() and not waits:
                return None
            self._thread.join()
            self._thread = None
        outcome = self._outcome.pop() if self._outcome else None
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome


def _copy(tensors: Mapping[str, torch.Tensor]) -> Dict[str, torch.Tensor]:
    return {name: value.detach().to("cpu", copy=True) for name, value in tensors.items()}
