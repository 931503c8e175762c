"""What messages and all-reduces take on the links of a description, and which links they occupy. Predicted, not measured.

Devices are numbered so that neighbours are close: those of one server follow one another.
"""

from __future__ import annotations

from collections import Counter
from typing import List, Optional, Sequence, Tuple

from ipu_pipe.errors import BadInput
from ipu_pipe.hardware.description import Hardware, LinkLevel, LinkSpeed
from ipu_pipe.schedule.clock import Transfer

Flow = Tuple[int, int]  # from one device to another


def find_level(hardware: Hardware, devices: Sequence[int]) -> Optional[LinkLevel]:
    """Return the smallest level that joins all `devices`; None where they are one. Raises BadInput where none does."""
    if len(set(devices)) == 1:
        return None
    for level in hardware.links:
        if level.holds is None or len({device // level.holds for device in devices}) == 1:
            return level
    raise BadInput(f"hardware {hardware.name}: links: no level joins devices {min(devices)} and {max(devices)}")


def count_sharing(hardware: Hardware, flows: Sequence[Flow]) -> List[int]:
    """Return for each flow how many of the simultaneous `flows` use its link, itself included.

    A link is shared by the neighbours at its two ends (`Level.shared_by`) at the flow's level; the fuller end counts.
    """
    levels = [find_level(hardware, flow) for flow in flows]
    ends: List[Tuple[Tuple[int, int], Tuple[int, int]]] = []
    for flow, level in zip(flows, levels):
        assert level is not None, "a flow goes to another device"
        source, target = (device // level.shared_by for device in flow)
        ends.append(((id(level), source), (id(level), target)))
    leaving, entering = Counter(source for source, _ in ends), Counter(target for _, target in ends)
    return [max(leaving[source], entering[target]) for source, target in ends]


def compute_message_seconds(link: LinkSpeed, size: float, at_once: int = 1) -> float:
    """Return latency + at_once size / bandwidth: `size` bytes while `at_once` such messages share the link."""
    return link.latency.value + at_once * size / link.bandwidth.value


def make_transfer(hardware: Hardware, source: int, target: int, size: float, at_once: int = 1) -> Transfer:
    """Return the transfer of `size` bytes; it occupies the way out of the source's neighbours and the way in to the target's.

    `at_once`: pipelines that do the same at the same time and share these links, of which the clock plays one.
    """
    level = find_level(hardware, (source, target))
    if level is None:
        return Transfer()
    ways = (f"{level.name} from {_name_sharing(level, source)}", f"{level.name} to {_name_sharing(level, target)}")
    return Transfer(at_once * size / level.bandwidth.value, level.latency.value, ways)


def _name_sharing(level: LinkLevel, device: int) -> str:
    """Name the neighbours with which a device shares its link."""
    first = device // level.shared_by * level.shared_by
    last = first + level.shared_by - 1
    return f"device {first}" if first == last else f"devices {first} to {last}"


def compute_host_seconds(hardware: Hardware, devices: Sequence[int], size: float) -> float:
    """Return the seconds until `size` bytes for each of `devices` have come from their hosts; 0 if no host is described."""
    if hardware.host is None:
        return 0.0
    sharing = Counter(device // hardware.host.shared_by for device in devices)
    return compute_message_seconds(hardware.host, size, max(sharing.values()))


def compute_all_reduce_seconds(link: LinkSpeed, size: float, replicas: int, at_once: int = 1) -> float:
    """Return 2 (r-1)/r size / bandwidth + 2 (r-1) latencies, an all-reduce over a ring of r `replicas`; 0 for one.

    Each sends a part of size / r to its neighbour 2 (r-1) times: r-1 for the sums, r-1 to hand them round.
    """
    if replicas == 1:
        return 0.0
    steps = 2 * (replicas - 1)
    return at_once * steps / replicas * size / link.bandwidth.value + steps * link.latency.value


def make_all_reduce(hardware: Hardware, devices: Sequence[int], size: float, at_once: int = 1) -> Transfer:
    """Return the transfer of an all-reduce of `size` bytes among `devices`; it occupies the ways of all on their level.

    `at_once`: such rings that use these at the same time, of which the clock plays one.
    """
    level = find_level(hardware, devices)
    if level is None:
        return Transfer()
    ways = dict.fromkeys(
        f"{level.name} {way} {_name_sharing(level, device)}" for device in devices for way in ("from", "to")
    )
    count = len(devices)
    latency = 2 * (count - 1) * level.latency.value
    return Transfer(compute_all_reduce_seconds(level, size, count, at_once) - latency, latency, tuple(ways))
