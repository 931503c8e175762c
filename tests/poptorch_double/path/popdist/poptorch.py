"""Options that poprun fills in; what poprun decides cannot be set."""

from __future__ import annotations

from typing import Any, NoReturn

from poptorch import options as _options
from poptorch._signatures import DATA

import popdist

FORBIDDEN = DATA["popdist"]["poptorch.Options"]["forbidden"]


def make_refusal(name: str) -> Any:
    def refuse_call(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(f"Cannot call `{name}` with popdist.poptorch.Options")

    return refuse_call


class _Distributed(_options._DistributedOptions):
    """Rank and world size from the launcher."""


class Options(_options.Options):
    """poptorch.Options of one instance: its local replicas, its rank."""

    def __init__(self, ipus_per_replica: int = 1) -> None:
        if not isinstance(ipus_per_replica, int) or ipus_per_replica < 1:
            raise ValueError(
                f"ipus_per_replica must be a whole number >= 1, not {ipus_per_replica!r}"
            )
        super().__init__()
        distributed = _Distributed()
        distributed.set(
            num_distributed_processes=popdist.getNumInstances(),
            distributed_process_id=popdist.getInstanceIndex(),
        )
        self.__dict__.update(Distributed=distributed, _ipus_per_replica=ipus_per_replica)
        self.set(replication_factor=popdist.getNumLocalReplicas())


for _name in FORBIDDEN:
    _owner, _, _method = _name.rpartition(".")
    setattr(_Distributed if _owner else Options, _method, make_refusal(_name))
