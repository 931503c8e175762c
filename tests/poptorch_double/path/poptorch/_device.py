"""The IPUs of the simulated machine: their number and their holders.

POPTORCH_DOUBLE_IPUS sets their number (0: no hardware). Unless it is set the machine has exactly as
many as the largest model that was alone on it: a second model gets no IPU.
"""

from __future__ import annotations

import itertools
import os
from typing import Dict, Optional

from poptorch._errors import make_cpp_error
from poptorch._record import recorded

MOST_PER_PROCESS = 64
holders = itertools.count()
ipus_by_holder: Dict[int, int] = {}  # holder -> IPUs
holder_by_id: Dict[int, int] = {}  # device id -> holder


largest = [0]  # IPUs of the largest model that was alone


def count_ipus() -> int:
    return int(os.environ.get("POPTORCH_DOUBLE_IPUS", str(MOST_PER_PROCESS)))


def round_up(ipus: int) -> int:
    """Return the next power of two."""
    return 1 << (ipus - 1).bit_length()


def reserve(ipus: int, auto_round: bool) -> int:
    """Return the number of IPUs to reserve for a model that uses `ipus`."""
    count = round_up(ipus)
    if count != ipus and not auto_round:
        raise make_cpp_error(
            f"The model specifies the use of {ipus} IPUs, however PopTorch must reserve a minimum of {count}"
        )
    if count != ipus:
        recorded.warn(f"Reserving {count} IPUs when the model specifices the use of only {ipus}")
    if count > MOST_PER_PROCESS:
        raise make_cpp_error(f"Too many IPUs requested ({count}).")
    return count


def acquire(holder: int, ipus: int, ipu_id: Optional[int]) -> None:
    """Attach IPUs to a holder. POPTORCH_WAIT_FOR_IPU would wait; the double, where no one else
    could free an IPU, never does."""
    if count_ipus() == 0:
        raise make_cpp_error(f"Failed to acquire {ipus} IPU(s): No IPU detected in the system")
    if ipus > count_ipus():
        raise make_cpp_error(
            f"Failed to acquire {ipus} IPU(s): No device found on the system with {ipus} IPUs"
        )
    if ipu_id is not None and holder_by_id.get(ipu_id, holder) != holder:
        raise make_cpp_error(f"Failed to acquire device id {ipu_id}: it is in use")
    if not ipus_by_holder:
        largest[0] = max(largest[0], ipus)
    room = count_ipus() if "POPTORCH_DOUBLE_IPUS" in os.environ else largest[0]
    if sum(ipus_by_holder.values()) + ipus > room:
        raise make_cpp_error(f"Failed to acquire {ipus} IPU(s)")
    ipus_by_holder[holder] = ipus
    if ipu_id is not None:
        holder_by_id[ipu_id] = holder


def release(holder: int) -> None:
    ipus_by_holder.pop(holder, None)
    for ipu_id in [key for key, owner in holder_by_id.items() if owner == holder]:
        del holder_by_id[ipu_id]
