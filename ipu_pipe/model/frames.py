"""Find the caller's line in a traceback or in the running frames: the innermost one that is neither
torch's nor this library's.

ipu_pipe/run/loop.py        run_all
ipu_pipe/backends/...       step          <- caught here: the frames below are searched
torch/nn/modules/...    _call_impl
my_model.py:42          forward           <- returned
torch/nn/functional.py  linear
"""

from __future__ import annotations

import itertools
import os
import sys
import sysconfig
import traceback

import torch

# the separator at the end keeps neighbours out, such as a folder ipu_pipe_examples
_LIBRARY = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_TORCH = os.path.dirname(str(torch.__file__)) + os.sep
_OURS = (_LIBRARY, _TORCH)
# the two keys name one folder on most systems, and lib and lib64 on others
_STANDARD, _PACKAGES = (
    tuple({sysconfig.get_paths()[key] + os.sep for key in keys})
    for keys in (("stdlib", "platstdlib"), ("purelib", "platlib"))
)
_INSTALLED = (*_STANDARD, *_PACKAGES)


def is_ours(file: str) -> bool:
    """Return whether a file belongs to this library."""
    return file.startswith(_LIBRARY)


def find_user_frame(error: BaseException) -> traceback.FrameSummary | None:
    """Return the innermost frame of a traceback that is in neither this library nor torch,
    preferably in no installed library.
    """
    foreign = [frame for frame in list_frames(error) if not frame.filename.startswith(_OURS)]
    users = [frame for frame in foreign if not frame.filename.startswith(_INSTALLED)]
    return users[-1] if users else foreign[-1] if foreign else None


def list_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """Return the frames of a traceback without those of Python's own library, which its caller is
    to blame for.
    """
    frames = traceback.extract_tb(error.__traceback__)
    return [frame for frame in frames if not _is_standard(frame.filename)] or list(frames)


def _is_standard(file: str) -> bool:
    return file.startswith("<frozen") or (
        # site-packages lies within the folder of the standard library
        file.startswith(_STANDARD) and not file.startswith(_PACKAGES)
    )


def find_running_line() -> str:
    """Return file:line of the caller's code that called torch; '' if this library itself did.

    It is called by this library while torch runs: those frames come first, then torch's.
    """
    frame = sys._getframe()
    for library in _OURS:
        while frame.f_back is not None and frame.f_code.co_filename.startswith(library):
            frame = frame.f_back
    file = frame.f_code.co_filename
    return "" if is_ours(file) else f"{file}:{frame.f_lineno}"


def is_user_file(file: str) -> bool:
    """Return whether a file is neither this library's nor an installed one."""
    # <string> and <frozen ...> are no files, and a script's name may be relative
    return file[0] != "<" and not os.path.abspath(file).startswith((*_OURS, *_INSTALLED))


def find_user_line(outer: str) -> str:
    """Return FILE:LINE of the innermost running call of the user's code inside our function
    `outer`, '' if there is none.
    """
    frames = (frame for frame, _ in traceback.walk_stack(None))
    inner = itertools.takewhile(lambda frame: frame.f_code.co_name != outer, frames)
    lines = (f"{frame.f_code.co_filename}:{frame.f_lineno}" for frame in inner)
    return next(filter(is_user_file, lines), "")
