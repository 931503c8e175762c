"""Write the checkpoints of a run: by the main process or by each process its part, at once or in
the background.

main thread      ... U8 | state, copied | U9 ....... U10 ... | callbacks, older ones deleted | U11 ...
in background                           | files, manifest, name |
"""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any, Mapping, Sequence

import torch

from ipu_pipe.backends.interface import CheckpointState
from ipu_pipe.store import checkpoint


class Saver:
    """Write checkpoints into `folder`, one after another, and delete older ones. Every process of a
    run has a saver.

    `group`: the group of all processes if each writes its part, else None. `keep`: the number of
    checkpoints to keep besides the best ones, None on processes that delete none. `newest`: the
    folder of the newest complete checkpoint. `is_saving`: a checkpoint was started and is not
    finished.
    """

    def __init__(self, folder: Path, group: Any = None, keep: int | None = None) -> None:
        self._folder = folder
        self._group = group
        self._keep = keep
        self.newest: Path | None = None
        self.is_saving = False
        self._best_steps: Sequence[int | None] = ()
        self._thread: threading.Thread | None = None
        self._written: Path | None = None
        self._error: BaseException | None = None

    def start(
        self,
        step: int,
        state: CheckpointState | None,
        entries: Mapping[str, Any],
        best_steps: Sequence[int | None],
        background: bool,
    ) -> None:
        """Write the checkpoint of `step`; with `background` begin to write a copy of it. The
        previous one must be finished.

        `state` is None if another process writes the checkpoint. `best_steps`: the steps of
        checkpoints to keep. Raise `RunFault` if JSON cannot hold `entries` or the plain values of
        `state`.
        """
        assert not self.is_saving
        self.is_saving = True
        self._best_steps = best_steps
        if state is None:
            return
        if not background:
            self._write(step, state, entries)
            return
        # callbacks and optimizers may hand over lists and dicts that they go on changing
        with checkpoint.guard_step(self._folder, step):
            entries, plain = json.loads(json.dumps([dict(entries), state.plain]))
        # the next updates write into the tensors while the files are written
        state = CheckpointState(_copy(state.model), _copy(state.optimizer), plain)
        self._thread = threading.Thread(
            target=self._write, args=(step, state, entries), name="ipu_pipe saving", daemon=True
        )
        self._thread.start()

    def _write(self, step: int, state: CheckpointState, entries: Mapping[str, Any]) -> None:
        try:
            if self._group is None:
                self._written = checkpoint.save(
                    self._folder, step, state.model, state.optimizer, entries
                )
            else:
                # PopTorch's torch cannot import this module
                from ipu_pipe.store.shards import save_shard

                self._written = save_shard(self._folder, step, state, entries, self._group)
        # in the main thread this may be Ctrl-C
        except BaseException as error:
            self._error = error

    def wait(self) -> None:
        """Wait until nothing is being written. Raise the error that ended the writing."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error = self._error
        self._error = None
        if error is not None:
            raise error

    def finish(self, waits: bool = True) -> bool:
        """Return, once per checkpoint, whether the started checkpoint is complete now, and delete
        older ones then.

        Without `waits`, return False while it is being written, and always if another process
        writes it. Raise the error that ended the writing.
        """
        # a thread that has ended has stored its result or its error
        is_writing = self._thread is not None and self._thread.is_alive()
        if not self.is_saving or (is_writing and not waits):
            return False
        self.wait()
        if self._written is None and not waits:
            return False
        # only when the new one is whole: a disk that fills up must not cost the old ones
        if self._written is not None and self._keep is not None:
            checkpoint.prune(self._folder, self._keep, self._best_steps)
        self.newest = self._written
        self._written = None
        self.is_saving = False
        return True


def _copy(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    # copied also where it is on the CPU already
    return {name: value.detach().to("cpu", copy=True) for name, value in tensors.items()}
