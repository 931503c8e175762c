"""The facts of each backend: what it supports. Code outside the backends' own folder reads these
flags; it never compares backend names.

    config.backend.facts.uses_processes     of a config's backend
    BACKEND_FACTS[name].uses_processes      of a name, such as a trace's

A backend's functions are its row in `ipu_pipe.backends.table`, which only folders above that one
import.
"""

from __future__ import annotations

from typing import NamedTuple


class BackendFacts(NamedTuple):
    """Hold the facts of a backend. A `why_...` is the cause in a message, '' if there is none.

    Where it computes
    `emulates`: one process holds all weight versions; batches for a GPU are copied from pinned
    memory. `uses_processes`: the launcher's processes, as many as it says, each with its stages,
    its replica's samples and a copy of tied weights. `trains_on`: the device that trains, if it is
    not the config's; one process drives all of these. `host_sees_devices`: the host that records a
    trace sees each device; otherwise it sees the calls of all together. `waits_for_actions`: that
    host waits for each action, so that no two run at once. `counts_devices`: the config may name a
    platform and how many of its devices.

    How it computes
    `takes_any_size`: microbatches may differ in their number of samples. `compiles_updates`:
    updates run in a program that is compiled for one such number. `has_precision_in_bits`:
    `precision` may be given in bits of passes and weights. `clips_any_optimizer`: `clip` is
    supported with every optimizer.

    What others may see and set
    `loads_poptorch_state`: the optimizer's state may be PopTorch's. `why_weights_are_hidden`,
    `why_gradients_are_hidden`: the host has none of them after an update.
    """

    emulates: bool = False
    uses_processes: bool = False
    trains_on: str | None = None
    host_sees_devices: bool = True
    waits_for_actions: bool = False
    counts_devices: bool = False
    takes_any_size: bool = False
    compiles_updates: bool = False
    has_precision_in_bits: bool = False
    clips_any_optimizer: bool = True
    loads_poptorch_state: bool = False
    why_weights_are_hidden: str = ""
    why_gradients_are_hidden: str = ""


BACKEND_FACTS: dict[str, BackendFacts] = {
    "emulator": BackendFacts(emulates=True, takes_any_size=True),
    "distributed": BackendFacts(uses_processes=True),
    "poptorch": BackendFacts(
        trains_on="ipu",
        host_sees_devices=False,
        compiles_updates=True,
        has_precision_in_bits=True,
        clips_any_optimizer=False,
        loads_poptorch_state=True,
        why_weights_are_hidden="PopTorch keeps the weights on the IPUs",
        why_gradients_are_hidden="PopTorch keeps the gradients on the IPUs",
    ),
    "xla": BackendFacts(
        waits_for_actions=True,
        counts_devices=True,
        compiles_updates=True,
        clips_any_optimizer=False,
        why_weights_are_hidden="xla keeps the weights on its devices",
        why_gradients_are_hidden="xla keeps the gradients on its devices",
    ),
}
