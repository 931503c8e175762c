"""Hardware as data: a device, the links between devices level by level, the host. Every figure says where it comes from.

A description is a YAML file (`read_hardware`), so that an accelerator enters by a file alone. A figure is a number,
or {value, source, confirmed}; a number alone is one whose source nobody stated. Bytes, seconds, FLOPs and bytes a second
throughout; a bandwidth is that of one direction.
"""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any, Dict, Iterator, List, Mapping, Optional, Tuple, Union

from pydantic import AfterValidator, StrictBool, ValidationError, model_validator
from typing_extensions import Annotated, Literal

from ipu_pipe.config import values
from ipu_pipe.config.faults import format_faults
from ipu_pipe.config.values import MOST_SECONDS, Count, Section, key_fault, real_number
from ipu_pipe.config.yaml_files import Origins, note_origin, read_with_origins
from ipu_pipe.errors import BadInput
from ipu_pipe.hardware.precision import PRECISIONS
from ipu_pipe.shipped import find_configs
from ipu_pipe.text import escape, find_nearest, show

NOT_STATED = "not stated"
# Times are quotients of these figures and sums of many such: what is smaller would make them infinite.
LEAST_SIZE, LEAST_SHARE = 1.0, 1e-6

# Text of a description is printed: a terminal must not obey it.
Text = Annotated[str, AfterValidator(escape)]


class SourcedFigure(Section):
    """A number of a description. `confirmed`: a primary source (datasheet, paper, measurement) states it; else it is an estimate,
    and shown as one."""

    value: float
    source: Text = NOT_STATED
    confirmed: StrictBool = False

    @model_validator(mode="before")
    @classmethod
    def _of_a_number(cls, value: Any) -> Any:
        return value if isinstance(value, (Mapping, SourcedFigure)) else {"value": value}

    @model_validator(mode="after")
    def _has_a_source(self) -> "SourcedFigure":
        if self.confirmed and self.source == NOT_STATED:
            raise key_fault("confirmed", "true", "says that a primary source states the figure: needs source")
        return self


class SizeFigure(SourcedFigure):
    """Of a size or rate."""

    value: Annotated[float, real_number(f">= {LEAST_SIZE:g}", lambda value: value >= LEAST_SIZE)]


class LatencyFigure(SourcedFigure):
    """Of a latency."""

    value: Annotated[float, real_number(">= 0", lambda value: value >= 0, MOST_SECONDS, "no message takes so long")]


class ShareFigure(SourcedFigure):
    """A share of all or less."""

    value: Annotated[float, real_number(f">= {LEAST_SHARE:g} and <= 1", lambda value: LEAST_SHARE <= value <= 1)]


class PartFigure(SourcedFigure):
    """A share of less than all."""

    value: values.Share


class Rate(Section):
    """FLOPs a second in one arithmetic: the peak, and the share of it that training reaches."""

    peak_flops: SizeFigure
    achievable_share: ShareFigure


class Device(Section):
    """One device. `usable_share` of `memory_bytes` is a run's, of which `code_share` (of the whole memory) goes to code and
    exchange, on devices that hold their program in it. `bandwidth_share` of `memory_bandwidth` is reached (null: all).
    `streaming_bytes`: more memory, behind `streaming_bandwidth`."""

    memory_bytes: SizeFigure
    usable_share: ShareFigure
    code_share: Optional[PartFigure] = None
    memory_bandwidth: SizeFigure
    bandwidth_share: Optional[ShareFigure] = None
    rates: Dict[Literal["float64", "float32", "bfloat16", "float16"], Rate]
    streaming_bytes: Optional[SizeFigure] = None
    streaming_bandwidth: Optional[SizeFigure] = None

    @property
    def usable_bytes(self) -> float:
        """Bytes that a run may fill, its code included where that lies in this memory."""
        return self.memory_bytes.value * self.usable_share.value

    @property
    def bandwidth(self) -> float:
        """Bytes a second of its memory that training reaches."""
        return self.memory_bandwidth.value * (self.bandwidth_share.value if self.bandwidth_share else 1.0)

    @property
    def code_bytes(self) -> float:
        """Bytes of them that code and exchange take."""
        return self.memory_bytes.value * self.code_share.value if self.code_share else 0.0

    @model_validator(mode="after")
    def _fits(self) -> "Device":
        if not self.rates:
            raise key_fault("rates", "{}", "must state at least one of float64, float32, bfloat16, float16")
        if self.code_share and self.code_bytes >= self.usable_bytes:
            raise key_fault("code_share", self.code_share.value, "leaves nothing of usable_share")
        if (self.streaming_bytes is None) != (self.streaming_bandwidth is None):
            raise key_fault("streaming_bytes", "given or null alone", "goes with streaming_bandwidth: both or neither")
        return self


class LinkSpeed(Section):
    """`bandwidth` of each direction, which `shared_by` neighbouring devices have together, and `latency` of a message."""

    bandwidth: SizeFigure
    latency: LatencyFigure
    shared_by: Count = 1


class LinkLevel(LinkSpeed):
    """Links among the devices of a group of `holds` (null: all there are), such as a server, that no smaller group holds."""

    name: Text
    holds: Optional[Count] = None


class Hardware(Section):
    """So many `devices`, numbered from 0, in groups of neighbours by `links`, the smallest first. `lockstep`: the stages of a
    pipeline begin each cycle together, when the slowest is done with the last (PopTorch's pipelines)."""

    name: Text
    about: Text = ""
    devices: Count
    lockstep: StrictBool = False
    device: Device
    links: Tuple[LinkLevel, ...] = ()
    host: Optional[LinkSpeed] = None

    @model_validator(mode="after")
    def _nests(self) -> "Hardware":
        inner = 1
        for place, level in enumerate(self.links):
            if level.holds is None:
                if level is not self.links[-1]:
                    raise key_fault(f"links.{place}.holds", "null", "only the last level may hold all there are")
            elif level.holds <= inner and place or level.holds % inner:
                raise key_fault(
                    f"links.{place}.holds", level.holds, f"must be a larger multiple of {inner}, the level's inside"
                )
            inner = level.holds or inner
        if not self._holds(self.devices):
            raise key_fault(
                "devices", self.devices, f"must be at most {self.most_devices}: no level of links holds more"
            )
        return self

    @property
    def most_devices(self) -> Optional[int]:
        """How many devices the links can join; None: any number."""
        return self.links[-1].holds if self.links else 1

    def _holds(self, devices: int) -> bool:
        return self.most_devices is None or devices <= self.most_devices

    def with_devices(self, devices: int) -> "Hardware":
        """The same with another number of devices. Raises BadInput where no level of links joins so many."""
        if devices < 1 or not self._holds(devices):
            most = "" if self.most_devices is None else f" to {self.most_devices}, all that its links join"
            raise BadInput(f"--devices: {show(devices)}: hardware {self.name}: must be a whole number from 1{most}")
        return self.model_copy(update={"devices": devices})

    def rate(self, precision: str) -> float:
        """FLOPs a second that training in a config's `precision` reaches on a device. Raises BadInput where none is stated."""
        arithmetic = PRECISIONS[precision].arithmetic
        found: Optional[Rate] = dict(self.device.rates).get(arithmetic)  # type: ignore[call-overload]
        if found is None:
            stated = ", ".join(self.device.rates)
            raise BadInput(
                f"precision: {precision}: hardware {self.name} states no rate for {arithmetic}: device.rates has {stated}"
            )
        return found.peak_flops.value * found.achievable_share.value

    def figures(self) -> List[Tuple[str, SourcedFigure]]:
        """Every figure with its key, as in the file."""
        return list(_figures("", self))

    def figure_lines(self) -> List[str]:
        """Every figure in a line for people: key, value, source, and whether no primary source confirms it."""
        return [
            f"{key} {figure.value:g} ({figure.source}{'' if figure.confirmed else '; not confirmed'})"
            for key, figure in self.figures()
        ]


def _figures(key: str, value: Any) -> Iterator[Tuple[str, SourcedFigure]]:
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
        yield from _figures(f"{key}.{name}" if key else str(name), part)


HARDWARE_FOLDER = find_configs() / "hardware"
THIS = "this"
COMMAND = "python tools/measure_hardware.py"


def list_hardware() -> List[str]:
    """What can be asked for by name."""
    return [*sorted(path.stem for path in HARDWARE_FOLDER.glob("*.yaml")), THIS]


def find_this_file() -> Path:
    """Where the measured description of this machine is: by its name, since homes are shared by machines."""
    return Path.home() / ".cache" / "ipu_pipe" / "hardware" / f"{socket.gethostname()}.yaml"


def read_hardware(asked: Union[str, Mapping[str, Any]], key: str = "--hardware") -> Hardware:
    """The description that is `asked` for by name or file, or given as a mapping of a file's keys. `key` says in faults who asks.
    Raises BadInput with every fault found."""
    if not isinstance(asked, str):
        origins: Origins = {}
        note_origin(dict(asked), "", key, origins)
        return _checked({"name": "given", **asked}, origins, key)
    path = _file(asked, key)
    origins = {}
    raw = read_with_origins(path, origins)
    return _checked({"name": THIS if asked == THIS else path.stem, **raw}, origins, str(path))


def _file(asked: str, key: str) -> Path:
    if asked == THIS:
        path = find_this_file()
        if not path.is_file():
            raise BadInput(f"{key}: this: this machine is not measured yet: {COMMAND} writes {path}")
        return path
    if asked in list_hardware():
        return HARDWARE_FOLDER / f"{asked}.yaml"
    path = Path(asked)
    if path.suffix not in (".yaml", ".yml"):
        near = find_nearest(asked, list_hardware())
        hint = f"; did you mean {near}?" if near else ""
        raise BadInput(f"{key}: {show(asked)}: must be one of {', '.join(list_hardware())} or a YAML file{hint}")
    return path


def _checked(raw: Dict[str, Any], origins: Origins, place: str) -> Hardware:
    try:
        return Hardware.model_validate(raw)
    except ValidationError as error:
        raise BadInput(format_faults(error.errors(), origins, place, Hardware, {})) from None
