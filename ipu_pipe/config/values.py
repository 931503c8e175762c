"""Types of the values in a config, each with its limits. No torch here: reading a config does not
wait for it.
"""

from __future__ import annotations

import math
import re
from operator import attrgetter
from typing import (
    Any,
    Callable,
    Iterable,
    List,
    NamedTuple,
    Optional,
    TypeVar,
    Union,
)

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    Strict,
    ValidationError,
    WrapValidator,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError
from typing_extensions import Annotated

from ipu_pipe.text import ALSO_CALLED, find_nearest, suggest

# Limits of numbers that have none of their own. A larger one is a slip, and would not end: a run is
# planned before it starts, in time and memory that grow with its stages and with the updates
# after which it stops to save.
# the most updates of a run: eleven days at 10 updates per second
MOST_UPDATES = 10_000_000
# the most evaluations, or checkpoints, of a run
MOST_STOPS = 1_000_000
# the most stages: the deepest pipeline in the papers has 1,000
MOST_STAGES = 4_096
# the most of anything else that is counted
MOST_COUNT = 1_000_000_000
# each thread has a stack of megabytes; with limited memory OpenMP aborts the process at 1,000
MOST_THREADS = 512
# the most weight versions
MOST_VERSIONS = 1_000_000
# the greatest value of any other setting: the product of two is still a float32
MOST_REAL = 1e18
# the longest wait: four months
MOST_SECONDS = 1e7


def to_number(value: Any) -> Optional[float]:
    """Return a finite number, which may be written as text such as "1e-3"; None for anything else,
    bools included.
    """
    try:
        # float(True) is 1.0
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def check_number(value: Any) -> Any:
    """Validate a finite number, which may be text; an integer stays one."""
    number = to_number(value)
    if number is None:
        raise ValueError("must be a number")
    return value if isinstance(value, int) else number


def say_allowed(allowed: str, *names: str) -> WrapValidator:
    """Return a validator that says in one line what a union of types allows, and which of its
    `names` may be meant. Pydantic has a line for each of the types.
    """

    def validate(value: Any, validate_union: Callable[[Any], Any]) -> Any:
        try:
            return validate_union(value)
        except ValidationError:
            raise ValueError(f"must be {allowed}{suggest(value, names)}") from None

    return WrapValidator(validate)


def check_path(value: str) -> str:
    """Validate text that can be a path: no file's name holds a NUL."""
    if "\0" in value:
        raise ValueError("contains a character that a file name cannot have")
    return value


# the kinds of devices that every torch has, and those whose names mean something else too, or are
# similar to one
DEVICES = ("cpu", "cuda")
OTHER_DEVICES = ("xpu", "npu", "hpu", "tpu", "mps", "mtia")


def validate_device(value: Any) -> Any:
    """Validate a kind of device. One that torch may have by an extension is any short word without
    another meaning; whether torch has it here is known only when torch is there.
    """
    known = (*DEVICES, *OTHER_DEVICES)
    is_word = isinstance(value, str) and re.fullmatch("[a-z][a-z0-9_]{1,31}", value) is not None
    if is_word and (value in known or not (value in ALSO_CALLED or find_nearest(value, known))):
        return value
    allowed = "cpu, cuda or another kind of device that torch has"
    raise ValueError(f"must be {allowed}{suggest(value, DEVICES)}")


def key_fault(key: str, value: Any, why: str) -> ValidationError:
    """Return the fault of one key in a section whose keys do not fit together."""
    # not as the template itself, in which braces are placeholders: `set {name: sgd}`
    fault = PydanticCustomError("setting", "{why}", {"why": why})
    detail: InitErrorDetails = {"type": fault, "loc": (key,), "input": value}
    return ValidationError.from_exception_data(key, [detail])


# stands for the present value of a key
PRESENT: Any = object()
# rejects bools and floats such as 2.0
Integer = Annotated[int, Strict()]
# used together with the limits of a float
NUMBER = BeforeValidator(check_number)
DeviceName = Annotated[str, BeforeValidator(validate_device)]
PathText = Annotated[str, AfterValidator(check_path)]
Item = TypeVar("Item")
NonEmpty = Annotated[List[Item], Field(min_length=1)]
Count = Annotated[Integer, Field(ge=1, le=MOST_COUNT)]
Updates = Annotated[Integer, Field(ge=1, le=MOST_UPDATES)]
Delayed = Annotated[Integer, Field(ge=1, le=MOST_VERSIONS)]
Stages = Annotated[Integer, Field(ge=1, le=MOST_STAGES)]
Threads = Annotated[Integer, Field(ge=1, le=MOST_THREADS)]
Whole = Annotated[Integer, Field(ge=0, le=MOST_COUNT)]
# the range of torch.Generator and of an int64 tensor
Seed = Annotated[Integer, Field(ge=0, le=2**63 - 1)]
Positive = Annotated[float, Field(gt=0, le=MOST_REAL), NUMBER]
Seconds = Annotated[float, Field(gt=0, le=MOST_SECONDS), NUMBER]
Epochs = Annotated[float, Field(gt=0, le=MOST_UPDATES), NUMBER]
Often = Annotated[Union[int, float], Field(ge=0, le=MOST_UPDATES), NUMBER]
NotNegative = Annotated[float, Field(ge=0, le=MOST_REAL), NUMBER]
Fraction = Annotated[float, Field(gt=0, le=1), NUMBER]
Share = Annotated[float, Field(ge=0, lt=1), NUMBER]
Decay = Annotated[float, Field(gt=0, lt=1), NUMBER]


class Case(NamedTuple):
    """A row of a table of checks: whether the case `applies`, and then the `key`, the `reason` and
    remedy, and the key's value.

    `value`: `PRESENT` for the value that the key has.
    """

    applies: Any
    key: str
    reason: str
    value: Any = PRESENT

    def read_value(self, section: BaseModel) -> Any:
        """Return the value that a fault shows; the key is one of `section`, with dots if it is in a
        section of that.
        """
        return attrgetter(self.key)(section) if self.value is PRESENT else self.value


AnySection = TypeVar("AnySection", bound="Section")


class Section(BaseModel):
    """Keys that belong together: unknown ones are refused, and nothing changes once it is made."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    def list_cases(self) -> Iterable[Case]:
        """Return the checks of keys that must fit together, in the order in which they are made."""
        return ()

    @model_validator(mode="after")
    def _check_cases(self: AnySection) -> AnySection:
        """Refuse the first case that applies: a later one may make sense only if the earlier ones
        do not apply.
        """
        for case in self.list_cases():
            if case.applies:
                raise key_fault(case.key, case.read_value(self), case.reason)
        return self
