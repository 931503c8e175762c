"""The IPUs of the simulated machine: how many there are and who holds them.

POPTORCH_DOUBLE_IPUS says how many (0: no hardware). Unless it is set the machine has exactly as many as the largest model
that was alone on it: a second model finds no IPU left.
"""

from __future__ import annotations

import itertools
import os
from typing import Dict, Optional

from poptorch._errors import cpp_error
from poptorch._record import recorded

MOST_PER_PROCESS = 64
holders = itertools.count()
held: Dict[int, int] = {}  # holder -> IPUs
held_ids: Dict[int, int] = {}  # device id -> holder


largest = [0]  # IPUs of the largest model that was alone


def total() -> int:
    return int(os.environ.get("POPTORCH_DOUBLE_IPUS", str(MOST_PER_PROCESS)))


def rounded(ipus: int) -> int:
    """Return the next power of two."""
    return 1 << (ipus - 1).bit_length()


def reserve(ipus: int, auto_round: bool) -> int:
    """IPUs that have to be reserved for a model that uses so many."""
    count = rounded(ipus)
    if count != ipus and not auto_round:
        raise cpp_error(
            f"The model specifies the use of {ipus} IPUs, however PopTorch must reserve a minimum of {count}"
        )
    if count != ipus:
        recorded.warn(f"Reserving {count} IPUs when the model specifices the use of only {ipus}")
    if count > MOST_PER_PROCESS:
        raise cpp_error(f"Too many IPUs requested ({count}).")
    return count


def acquire(holder: int, ipus: int, ipu_id: Optional[int]) -> None:
    """Attach. POPTORCH_WAIT_FOR_IPU would wait; the double, in which nobody else could free an IPU, never does."""
    if total() == 0:
        raise cpp_error(f"Failed to acquire {ipus} IPU(s): No IPU detected in the system")
    if ipus > total():
        raise cpp_error(
            f"Failed to acquire {ipus} IPU(s): No device found on the system with {ipus} IPUs"
        )
    if ipu_id is not None and held_ids.get(ipu_id, holder) != holder:
        raise cpp_error(f"Failed to acquire device id {ipu_id}: it is in use")
    if not held:
        largest[0] = max(largest[0], ipus)
    room = total() if "POPTORCH_DOUBLE_IPUS" in os.environ else largest[0]
    if sum(held.values()) + ipus > room:
        raise cpp_error(f"Failed to acquire {ipus} IPU(s)")
    held[holder] = ipus
    if ipu_id is not None:
        held_ids[ipu_id] = holder


def release(holder: int) -> None:
    held.pop(holder, None)
    for ipu_id in [key for key, owner in held_ids.items() if owner == holder]:
        del held_ids[ipu_id]
