"""Descriptions of hardware (a device, the links between devices level by level, the host) and the
time of messages on the links.

    devices 0 1 2 3   4 5 6 7         device       memory, FLOP/s by precision
            -------   -------         links[0]     joins 4 devices: a server
            -----------------         links[1]     joins all servers
            host      host            host         sends the samples

A description is a YAML file: a named one of configs/hardware/, the user's own, or `this`, the
machine itself, which a command measures into the user's cache. Every figure says where it comes
from: it is a number, or {value, source, confirmed}; a number alone has no stated source. The units
are bytes, seconds, FLOPs and bytes per second. A bandwidth is that of one direction.
"""

from __future__ import annotations

import functools
import socket
from collections import Counter
from pathlib import Path
from typing import Any, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple, Union

from pydantic import AfterValidator, Field, StrictBool, ValidationError, model_validator
from typing_extensions import Annotated, Literal

from ipu_pipe.config import values
from ipu_pipe.config.faults import format_faults
from ipu_pipe.config.load import Origins, note_origin, read_yaml
from ipu_pipe.config.values import MOST_REAL, MOST_SECONDS, NUMBER, Case, Count, DeviceName, Section
from ipu_pipe.errors import BadInput
from ipu_pipe.hardware.precision import PRECISIONS
from ipu_pipe.schedule.clock import Transfer
from ipu_pipe.shipped import find_configs
from ipu_pipe.text import escape, show, suggest

NOT_STATED = "not stated"
# Times are sums of quotients of these figures. Smaller figures would make them infinite.
LEAST_SIZE = 1.0
LEAST_SHARE = 1e-6

# Text of a description is printed: a terminal must not obey it.
Text = Annotated[str, AfterValidator(escape)]


class SourcedFigure(Section):
    """A number of a description. `confirmed`: a primary source (datasheet, paper, measurement)
    states it; otherwise it is an estimate, and shown as one."""

    value: float
    source: Text = NOT_STATED
    confirmed: StrictBool = False

    @model_validator(mode="before")
    @classmethod
    def _accept_number(cls, value: Any) -> Any:
        return value if isinstance(value, (Mapping, SourcedFigure)) else {"value": value}

    def list_cases(self) -> Iterator[Case]:
        why = "says that a primary source states the figure: needs source"
        yield Case(self.confirmed and self.source == NOT_STATED, "confirmed", why)


class SizeFigure(SourcedFigure):
    """A size or rate."""

    value: Annotated[float, Field(ge=LEAST_SIZE, le=MOST_REAL), NUMBER]


class LatencyFigure(SourcedFigure):
    """A latency."""

    value: Annotated[float, Field(ge=0, le=MOST_SECONDS), NUMBER]


class ShareFigure(SourcedFigure):
    """A share in (0, 1]."""

    value: Annotated[float, Field(ge=LEAST_SHARE, le=1), NUMBER]


class ShareBelowOneFigure(SourcedFigure):
    """A share in [0, 1)."""

    value: values.Share


class Rate(Section):
    """FLOPs per second in one arithmetic: the peak, and the share of it that training reaches."""

    peak_flops: SizeFigure
    achievable_share: ShareFigure


class Device(Section):
    """One device. A run may use `usable_share` of `memory_bytes`, of which `code_share` (of the
    whole memory) goes to code and exchange on devices that hold their program in it.
    `bandwidth_share` of `memory_bandwidth` is reached (null: all). `streaming_bytes`: more memory,
    at `streaming_bandwidth`. `activation_padding`: bytes that a stored activation takes, of one
    byte by its shape (null: 1).
    """

    memory_bytes: SizeFigure
    usable_share: ShareFigure
    code_share: Optional[ShareBelowOneFigure] = None
    memory_bandwidth: SizeFigure
    bandwidth_share: Optional[ShareFigure] = None
    rates: Dict[Literal["float64", "float32", "bfloat16", "float16"], Rate]
    streaming_bytes: Optional[SizeFigure] = None
    streaming_bandwidth: Optional[SizeFigure] = None
    activation_padding: Optional[SizeFigure] = None

    @property
    def usable_bytes(self) -> float:
        """Return the bytes that a run may fill, its code included where that is in this memory."""
        return self.memory_bytes.value * self.usable_share.value

    @property
    def bandwidth(self) -> float:
        """Return the bytes per second of its memory that training reaches."""
        return self.memory_bandwidth.value * (
            self.bandwidth_share.value if self.bandwidth_share else 1.0
        )

    @property
    def code_bytes(self) -> float:
        """Return the usable bytes that code and exchange take."""
        return self.memory_bytes.value * self.code_share.value if self.code_share else 0.0

    def list_cases(self) -> Iterator[Case]:
        yield Case(
            not self.rates,
            "rates",
            "must state at least one of float64, float32, bfloat16, float16",
        )
        is_filled = self.code_share is not None and self.code_bytes >= self.usable_bytes
        yield Case(
            is_filled,
            "code_share",
            "leaves nothing of usable_share",
            self.code_share and self.code_share.value,
        )
        is_alone = (self.streaming_bytes is None) != (self.streaming_bandwidth is None)
        yield Case(
            is_alone,
            "streaming_bytes",
            "goes with streaming_bandwidth: both or neither",
            "given or null alone",
        )


class LinkSpeed(Section):
    """`bandwidth` of each direction, which `shared_by` neighbouring devices have together, and
    `latency` of a message.
    """

    bandwidth: SizeFigure
    latency: LatencyFigure
    shared_by: Count = 1


class LinkLevel(LinkSpeed):
    """Links between devices of one group of `holds` devices (null: all there are), such as a
    server, but of different smaller groups."""

    name: Text
    holds: Optional[Count] = None


class Machine(Section):
    """The machine that a description was measured on: its `name`, and `threads` of the process that
    was a device, on a CPU.
    """

    name: Text
    device: DeviceName
    threads: Count = 1


class Hardware(Section):
    """`devices`, numbered from 0, in groups of neighbours by `links`, the smallest group first.
    `fixed`: there are no more of them to join, as in a rack that is sold whole. `lockstep`: the
    stages of a pipeline begin each cycle together, when the slowest has finished the previous one
    (PopTorch's pipelines). `measured_on`: null for figures of other origin."""

    name: Text
    about: Text = ""
    measured_on: Optional[Machine] = None
    devices: Count
    fixed: StrictBool = False
    lockstep: StrictBool = False
    device: Device
    links: Tuple[LinkLevel, ...] = ()
    host: Optional[LinkSpeed] = None

    def list_cases(self) -> Iterator[Case]:
        # the devices of a group of the level inside
        inner = 1
        for index, level in enumerate(self.links):
            holds = level.holds
            key = f"links.{index}.holds"
            yield Case(
                holds is None and level is not self.links[-1],
                key,
                "only the last level may hold all there are",
                holds,
            )
            # `index`: the first level may hold a single device
            is_no_multiple = holds is not None and (holds <= inner and index or holds % inner)
            yield Case(
                is_no_multiple,
                key,
                f"must be a larger multiple of {inner}, the level's inside",
                holds,
            )
            inner = holds or inner
        too_many = self.devices > (self.most_devices or self.devices)
        yield Case(
            too_many,
            "devices",
            f"must be at most {self.most_devices}: no level of links holds more",
        )

    @property
    def most_devices(self) -> Optional[int]:
        """Return how many devices the links can join; None: any number."""
        if self.fixed:
            return self.devices
        return self.links[-1].holds if self.links else 1  # without links no device reaches another

    def with_devices(self, devices: int) -> "Hardware":
        """Return a copy with another number of devices. Raise `BadInput` if no level of links
        connects them.
        """
        if not 1 <= devices <= (self.most_devices or devices):
            most = self.most_devices
            limit = "" if most is None else f" to {most}, all that there are or its links join"
            needs = "" if most is None or devices <= most else f"needs {show(devices)} of {most}: "
            raise BadInput(
                f"--devices: {show(devices)}: hardware {self.name}: {needs}must be an integer from "
                f"1{limit}"
            )
        return self.model_copy(update={"devices": devices})

    def explain_shortage(self, devices: int, how: str) -> Optional[str]:
        """Return the fault of a config that needs more `devices` than there are, which `how`
        counts; None if they are enough.
        """
        if devices <= self.devices:
            return None
        remedy = (
            "take fewer stages or replicas, a description with more devices, or null for no "
            "prediction"
        )
        return f"hardware: {self.name}: needs {devices} of {self.devices} devices ({how}): {remedy}"

    def find_rate(self, precision: str) -> float:
        """Return the FLOPs per second of training in `precision` on a device. Raise `BadInput` if
        the description has none.
        """
        arithmetic = PRECISIONS[precision].arithmetic
        rate: Optional[Rate] = dict(self.device.rates).get(arithmetic)  # type: ignore[call-overload]
        if rate is None:
            stated = ", ".join(self.device.rates)
            raise BadInput(
                f"precision: {precision}: hardware {self.name} states no rate for {arithmetic}: "
                f"device.rates has {stated}"
            )
        return rate.peak_flops.value * rate.achievable_share.value

    def list_figures(self) -> List[Tuple[str, SourcedFigure]]:
        """Return every figure with its key, as in the file."""
        return list(_walk_figures("", self))

    def format_figures(self) -> List[str]:
        """Return a line per figure: key, value, source, and whether no primary source confirms
        it.
        """
        return [
            f"{key} {figure.value:g} "
            f"({figure.source}{'' if figure.confirmed else '; not confirmed'})"
            for key, figure in self.list_figures()
        ]


def _walk_figures(key: str, value: Any) -> Iterator[Tuple[str, SourcedFigure]]:
    if isinstance(value, SourcedFigure):
        yield key, value
        return
    if isinstance(value, Section):
        parts: Any = ((name, getattr(value, name)) for name in type(value).model_fields)
    elif isinstance(value, Mapping):
        parts = value.items()
    elif isinstance(value, tuple):
        parts = enumerate(value)
    else:
        return
    for name, part in parts:
        yield from _walk_figures(f"{key}.{name}" if key else str(name), part)


# ---- by name or file

HARDWARE_FOLDER = find_configs() / "hardware"
THIS = "this"
COMMAND = "python tools/measure_hardware.py"


def list_hardware() -> List[str]:
    """Return the names that `read_hardware` knows."""
    return [*sorted(path.stem for path in HARDWARE_FOLDER.glob("*.yaml")), THIS]


def find_this_file() -> Path:
    """Return the path of this machine's measured description, named by host, since machines share
    homes.
    """
    return Path.home() / ".cache" / "ipu_pipe" / "hardware" / f"{socket.gethostname()}.yaml"


def read_hardware(source: Union[str, Mapping[str, Any]], key: str = "--hardware") -> Hardware:
    """Read a description by its name or file, or from a mapping of a file's keys.

    `key`: the config key that faults name. Raise `BadInput` with all faults.
    """
    if not isinstance(source, str):
        origins: Origins = {}
        note_origin(dict(source), "", key, origins)
        return _validate({"name": "given", **source}, origins, key)
    path = _find_file(source, key)
    origins = {}
    # what a description `extends` may be a named one
    raw = read_yaml(path, origins, functools.partial(_find_named, key=f"{path}: extends"))
    return _validate({"name": THIS if source == THIS else path.stem, **raw}, origins, str(path))


def _find_file(name: str, key: str) -> Path:
    """Return the file of a named description, or the user's own file."""
    named = _find_named(name, key)
    if named is not None:
        return named
    path = Path(name)
    if path.suffix not in (".yaml", ".yml"):
        known = list_hardware()
        raise BadInput(
            f"{key}: {show(name)}: must be one of {', '.join(known)} or a YAML "
            f"file{suggest(name, known)}"
        )
    return path


def _find_named(name: str, key: str) -> Optional[Path]:
    """Return the file of a named description, None if there is none. Raise `BadInput` for this
    machine's if it is not measured.
    """
    if name == THIS:
        path = find_this_file()
        if not path.is_file():
            raise BadInput(
                f"{key}: this: this machine is not measured yet: {COMMAND} writes {path}"
            )
        return path
    return HARDWARE_FOLDER / f"{name}.yaml" if name in list_hardware() else None


def _validate(raw: Dict[str, Any], origins: Origins, file_or_key: str) -> Hardware:
    try:
        return Hardware.model_validate(raw)
    except ValidationError as error:
        raise BadInput(format_faults(error.errors(), origins, file_or_key, Hardware, {})) from None


# ---- predicted times of messages and all-reduces, and the links that they occupy
#
# Devices are numbered so that neighbours are close: the devices of one server are consecutive.

# (source device, target device)
Flow = Tuple[int, int]


def find_level(hardware: Hardware, devices: Sequence[int]) -> Optional[LinkLevel]:
    """Return the smallest level that connects all `devices`, None for one device. Raise `BadInput`
    if there is none.
    """
    if len(set(devices)) == 1:
        return None
    for level in hardware.links:
        # all are in one group of the level
        if level.holds is None or len({device // level.holds for device in devices}) == 1:
            return level
    raise BadInput(
        f"hardware {hardware.name}: links: no level joins devices {min(devices)} and {max(devices)}"
    )


def count_sharing(hardware: Hardware, flows: Sequence[Flow]) -> List[int]:
    """Return for each flow how many of the simultaneous `flows` use its link, itself included.

    A link is shared by the neighbours at its two ends (`LinkSpeed.shared_by`) at the flow's level;
    the fuller end counts.
    """
    levels = [find_level(hardware, flow) for flow in flows]
    # by flow: the groups of neighbours that share the link's two ends
    ends: List[Tuple[Tuple[int, int], Tuple[int, int]]] = []
    for flow, level in zip(flows, levels):
        assert level is not None, "a flow goes to another device"
        source, target = (device // level.shared_by for device in flow)
        # with the level, since the groups of every level are numbered from 0
        ends.append(((id(level), source), (id(level), target)))
    # apart, because a bandwidth is that of one direction
    leaving = Counter(source for source, _ in ends)
    entering = Counter(target for _, target in ends)
    return [max(leaving[source], entering[target]) for source, target in ends]


def compute_message_seconds(link: LinkSpeed, size: float, sharing: int = 1) -> float:
    """Return latency + sharing x size / bandwidth: `size` bytes while `sharing` such messages share
    the link.
    """
    return link.latency.value + sharing * size / link.bandwidth.value


def make_transfer(
    hardware: Hardware, source: int, target: int, size: float, sharing: int = 1
) -> Transfer:
    """Return the transfer of `size` bytes; it occupies the link out of the source's neighbours and
    the link into the target's.

    `sharing`: pipelines that do the same at the same time and share these links, of which the clock
    plays one.
    """
    level = find_level(hardware, (source, target))
    if level is None:
        return Transfer()
    links = (
        f"{level.name} from {_name_sharing(level, source)}",
        f"{level.name} to {_name_sharing(level, target)}",
    )
    return Transfer(sharing * size / level.bandwidth.value, level.latency.value, links)


def _name_sharing(level: LinkLevel, device: int) -> str:
    """Name the neighbours with which a device shares its link."""
    first = device // level.shared_by * level.shared_by
    last = first + level.shared_by - 1
    return f"device {first}" if first == last else f"devices {first} to {last}"


def compute_host_seconds(hardware: Hardware, devices: Sequence[int], size: float) -> float:
    """Return the seconds until `size` bytes for each of `devices` have come from their hosts; 0 if
    no host is described.
    """
    if hardware.host is None:
        return 0.0
    # the host that serves most devices is the last one to be done
    sharing = Counter(device // hardware.host.shared_by for device in devices)
    return compute_message_seconds(hardware.host, size, max(sharing.values()))


def compute_all_reduce_seconds(
    link: LinkSpeed, size: float, replicas: int, sharing: int = 1
) -> float:
    """Return 2 (r-1)/r size / bandwidth + 2 (r-1) latencies, an all-reduce over a ring of r
    `replicas`; 0 for one.

    Each sends a part of size / r to its neighbour 2 (r-1) times: r-1 for the sums, r-1 to hand them
    round.
    """
    if replicas == 1:
        return 0.0
    steps = 2 * (replicas - 1)
    return sharing * steps / replicas * size / link.bandwidth.value + steps * link.latency.value


def make_all_reduce(hardware: Hardware, devices: Sequence[int], size: float) -> Transfer:
    """Return the transfer of an all-reduce of `size` bytes among `devices`; it occupies the links
    of all on their level.
    """
    level = find_level(hardware, devices)
    if level is None:
        return Transfer()
    links = dict.fromkeys(
        f"{level.name} {end} {_name_sharing(level, device)}"
        for device in devices
        for end in ("from", "to")
    )
    count = len(devices)
    # kept apart from the seconds: a link is not occupied while a message is on its way
    latency = 2 * (count - 1) * level.latency.value
    return Transfer(compute_all_reduce_seconds(level, size, count) - latency, latency, tuple(links))
