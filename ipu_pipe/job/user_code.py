"""Faults in the user's own code: tell their file and line, and the current activity of the run."""

from __future__ import annotations

import contextlib
import traceback
from pathlib import Path
from typing import Any, Callable, Iterator, NoReturn

from torch import nn

from ipu_pipe.errors import BadInput, RunFault, UserFault, find_user_fault, summarize, walk_causes
from ipu_pipe.model.frames import find_user_frame, is_ours, list_frames
from ipu_pipe.model.stages import Partition
from ipu_pipe.text import show


@contextlib.contextmanager
def attribute_faults(where: Callable[[], str]) -> Iterator[None]:
    """Attach a `UserFault`, whose line begins with `where`, to an exception of the user's code (see
    `raise_attributed`).
    """
    try:
        yield
    # Ctrl-C is no fault of the code that it meets
    except KeyboardInterrupt:
        raise
    # also what is no Exception, such as asyncio.CancelledError
    except BaseException as error:
        raise_attributed(error, where())


def raise_attributed(error: BaseException, where: str) -> NoReturn:
    """Raise an exception of the user's code, with a `UserFault` at the end of its chain of causes.

    An `exit()` becomes a `RunFault`, because the run would end with exit code 0 and without a
    summary. The line names the user's file; one that names a file of ours is a bug in ipu_pipe,
    unless the user's object returned what it must not.
    """
    if isinstance(error, SystemExit):
        if is_own_exit(error):
            raise error
        raise RunFault(f"{where}: {describe_exit(error)}") from error
    if not isinstance(error, (BadInput, RunFault)) and find_user_fault(error) is None:
        # the user's object may have failed without a frame of its own
        frame = find_user_frame(error) or list_frames(error)[-1]
        line = (
            f"{where}: {summarize(error)[:400]} ({frame.filename}:{frame.lineno}, in {frame.name})"
        )
        fault = UserFault(
            line, "".join(traceback.format_exception(type(error), error, error.__traceback__))
        )
        # at the end, so that the causes which the user's code has given stay
        list(walk_causes(error))[-1].__cause__ = fault
    raise error


def is_own_exit(error: SystemExit) -> bool:
    """Return whether this library itself ended the process, as after a signal, and not the user's
    code.
    """
    return is_ours(traceback.extract_tb(error.__traceback__)[-1].filename)


def describe_exit(error: SystemExit) -> str:
    """Describe a call of `exit()` in a fault, with the remedy."""
    code = "" if error.code is None else show(error.code)
    return (
        f"called exit({code}): the run has no summary; a callback ends a run by returning "
        f"ipu_pipe.Stop(reason)"
    )


@contextlib.contextmanager
def save_traceback(folder: Path) -> Iterator[None]:
    """Write the traceback of a `UserFault` to `folder/traceback.txt`, if there is such a folder and
    space.
    """
    try:
        yield
    except BaseException as error:
        fault = find_user_fault(error)
        if fault is not None and folder.is_dir():
            # on a full disk report the error that ended the run, not this one
            with contextlib.suppress(OSError):
                file = folder / "traceback.txt"
                file.write_text(f"{fault}\n\n{fault.traceback}", encoding="utf-8", errors="replace")
                fault.traceback_file = str(file)
        raise


class StageWatch:
    """Track the running stage of an unsplit model by hooks on the first module of each stage.

    Set `stage` to 0 before each forward. `remove`, or leaving the context, removes the hooks.
    """

    def __init__(self, model: nn.Module, part: Partition) -> None:
        self.stage = 0
        modules = dict(model.named_modules())
        self._hooks: list[Any] = []
        for name, stage in part.begins.items():
            if name in modules:
                self._hooks.append(modules[name].register_forward_pre_hook(self._make_hook(stage)))

    def __enter__(self) -> StageWatch:
        return self

    def __exit__(self, *exc: object) -> None:
        self.remove()

    def _make_hook(self, stage: int) -> Callable[[nn.Module, Any], None]:
        def enter(module: nn.Module, inputs: Any) -> None:
            # a module of an earlier stage that runs again does not lead back to that stage
            self.stage = max(self.stage, stage)

        return enter

    def remove(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
