"""One call of a pipeline at a time: a call inside another one, or beside one of another thread, is
refused by name.

    step ................................    whole_model ......................
        on_update, loss or model                 predict, state_dict  allowed
            step, drain, close    refused        step, drain, close   refused
"""

from __future__ import annotations

import contextlib
import functools
import threading
from typing import Any, Callable, Iterator, TypeVar, cast

from ipu_pipe.backends import world
from ipu_pipe.errors import say_in
from ipu_pipe.refusals import Language

# calls that may be made inside the body of `with pipe.whole_model():`
IN_WHOLE_MODEL = ("evaluate", "predict", "state_dict")

Call = TypeVar("Call", bound=Callable[..., Any])


class Turns:
    """The call that is under way, of whichever thread; inside it ranks count within the
    pipeline's `column`.
    """

    def __init__(self, column: world.Column | None = None) -> None:
        self._column = column
        self._lock = threading.Lock()
        # its thread and name; None also for a moment after it begins and before it ends
        self._under_way: tuple[int, str] | None = None

    @contextlib.contextmanager
    def take(self, call: str) -> Iterator[None]:
        """Make `call` the one under way. Raise `RuntimeError` if there is one already."""
        # never wait: a call inside another one of the same thread would wait forever
        if self._lock.acquire(blocking=False):
            self._under_way = threading.get_ident(), call
            try:
                with world.enter(self._column):
                    yield
            finally:
                # before the release, after which another thread sets its own
                self._under_way = None
                self._lock.release()
            return
        # read once, because another thread may end its call here
        thread, outer = self._under_way or (None, "a call")
        is_nested = thread == threading.get_ident()
        if is_nested and outer == "whole_model" and call in IN_WHOLE_MODEL:
            yield
            return
        if is_nested:
            raise RuntimeError(
                f"{call}: called inside {outer}, by a callback, a loss, a model or the body of a "
                f"`with`: call it when {outer} has returned"
            )
        raise RuntimeError(
            f"{call}: another thread is in {outer}: a pipeline makes one call at a time: use "
            f"one thread, or a lock"
        )


def take_turn(call: Call) -> Call:
    """Let a method of `Pipeline` take its turn, under its own name, and name arguments in its
    faults.
    """

    @functools.wraps(call)
    def take(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self._turns.take(call.__name__), say_in(Language.PYTHON):
            return call(self, *args, **kwargs)

    return cast(Call, take)
