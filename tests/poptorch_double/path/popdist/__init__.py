"""A test double of PopDist. Variables of the same meaning simulate poprun's environment. [U] their
real names.

POPDIST_NUM_INSTANCES, POPDIST_INSTANCE_INDEX and POPDIST_NUM_LOCAL_REPLICAS; without the first
there is no poprun.
"""

import os

_initialised = False


def init() -> None:
    global _initialised
    if _initialised:  # [U] PopDist's reaction
        raise RuntimeError("popdist.init() was called twice")
    _initialised = True


def isPopdistEnvSet() -> bool:
    return "POPDIST_NUM_INSTANCES" in os.environ


def _read_number(name: str, default: int) -> int:
    if isPopdistEnvSet() and not _initialised:  # [U] PopDist's reaction
        raise RuntimeError("call popdist.init() first")
    return int(os.environ.get(name, str(default)))


def getInstanceIndex() -> int:
    return _read_number("POPDIST_INSTANCE_INDEX", int(os.environ.get("RANK", "0")))


def getNumInstances() -> int:
    return _read_number("POPDIST_NUM_INSTANCES", 1)


def getNumLocalReplicas() -> int:
    return _read_number("POPDIST_NUM_LOCAL_REPLICAS", 1)


def getNumTotalReplicas() -> int:
    return getNumInstances() * getNumLocalReplicas()
