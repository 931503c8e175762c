"""What goes wrong in one process of several, told with rank, stage and action."""

from __future__ import annotations

import contextlib
from typing import Iterator

from ipu_pipe.backends.processes.player import RowPlayer
from ipu_pipe.errors import BadInput, RunFault
from ipu_pipe.job.user_code import attribute_fault, find_user_frame


@contextlib.contextmanager
def named_faults(player: RowPlayer) -> Iterator[None]:
    """What goes wrong here is told with rank, stage and action, once for all processes: another rank's end as a RunFault,
    what code of the user's own raises as itself."""
    try:
        yield
    except (BadInput, RunFault):
        raise
    except Exception as error:
        text = " ".join(str(error).split())
        layout, mail = player.place.layout, player.mail
        where, waited = f"rank {layout.rank}, stage {layout.stage}", mail.waiting_for
        is_lost = any(word in text for word in ("onnection", "imed out", "imeout"))
        if is_lost and (waited is not None or find_user_frame(error) is None):
            who = "another rank" if waited is None else f"rank {waited}"
            text = f"{who} is lost, or made no progress within {mail.limit.total_seconds():g} s"
            raise RunFault(f"{where}, action {player.doing}: {text}") from error
        attribute_fault(error, f"{where}, {player.whereabouts}")
        raise
