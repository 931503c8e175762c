"""Types of the values in a config, each with its limits and one message. No torch here: reading a config does not wait for it."""

from __future__ import annotations

import math
from typing import Any, Callable, Optional, Union

from pydantic import BaseModel, BeforeValidator, ConfigDict
from pydantic_core import PydanticCustomError
from typing_extensions import Annotated

# Limits of numbers that have none of their own. A larger one is a slip, and would not end: a run is planned before it starts, in
# time and memory that grow with its stages and with the updates after which it stops to save.
MOST_UPDATES = 10_000_000  # of a run: at 10 updates a second eleven days
MOST_STOPS = 1_000_000  # evaluations, or checkpoints, of a run
MOST_STAGES = 4_096  # of a pipeline: the deepest that the papers emulate has 1,000
MOST_COUNT = 1_000_000_000  # of anything else
MOST_THREADS = 512  # each has a stack of megabytes: where memory is limited, OpenMP ends the process for 1,000
MOST_REAL = 1e18  # of any other setting: the product of two is still a float32
MOST_SECONDS = 1e7  # of waiting: four months


def integer(
    low: int, high: Optional[int] = None, most: int = MOST_COUNT, why: str = "no run has so many"
) -> BeforeValidator:
    """Validate an integer in [low, high]; reject bools and floats. Without `high` the limit is `most`, for the reason `why`."""
    allowed = f">= {low}" if high is None else f"from {low} to {high}"

    def check(value: Any) -> int:
        is_integer = isinstance(value, int) and not isinstance(value, bool)
        if not is_integer or value < low or (high is not None and value > high):
            raise ValueError(f"must be a whole number {allowed}")
        if high is None and value > most:
            raise ValueError(f"must be a whole number {allowed}, at most {most}: {why}")
        return int(value)

    return BeforeValidator(check)


def to_number(value: Any) -> Optional[float]:
    """Return a finite number, which may be written as text such as "1e-3"; None for anything else, bools included."""
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def real_number(
    allowed: str,
    fits: Callable[[float], bool],
    most: float = MOST_REAL,
    why: str = "what it is multiplied with overflows",
) -> BeforeValidator:
    """Validate a finite number that `fits`, in words `allowed`, up to `most` for the reason `why`."""

    def check(value: Any) -> float:
        number = to_number(value)
        if number is None or not fits(number):
            raise ValueError(f"must be a number {allowed}")
        if number > most:
            raise ValueError(f"must be a number {allowed}, at most {most:g}: {why}")
        return number

    return BeforeValidator(check)


def interval(value: Any) -> float:
    """Validate a number of epochs between two evaluations, or a share of one; 0 for never. An integer stays one."""
    number = to_number(value)
    if number is None or number < 0 or number > MOST_UPDATES:
        raise ValueError(f"must be a number of epochs >= 0, at most {MOST_UPDATES}: no run has so many")
    return int(value) if isinstance(value, int) else number


def key_fault(key: str, value: Any, why: str) -> PydanticCustomError:
    """Return the fault of one key in a section whose keys do not fit together."""
    return PydanticCustomError("setting", "{why}", {"key": key, "value": value, "why": why})


def check_path(value: Any) -> Any:
    """Validate text that can be a path: no file's name holds a NUL or half a character."""
    if isinstance(value, str) and any(c == "\0" or "\ud800" <= c <= "\udfff" for c in value):
        raise ValueError("holds a character that no file name can")
    return value


PathText = Annotated[str, BeforeValidator(check_path)]
Count = Annotated[int, integer(1)]
Updates = Annotated[int, integer(1, most=MOST_UPDATES, why="a run is planned before it starts")]
Delayed = Annotated[int, integer(1, most=1_000_000, why="so many versions of the weights are kept")]
Stages = Annotated[int, integer(1, most=MOST_STAGES, why="a schedule is planned before it starts")]
Threads = Annotated[int, integer(1, most=MOST_THREADS, why="no machine has so many cores")]
Whole = Annotated[int, integer(0)]
Seed = Annotated[int, integer(0, 2**63 - 1)]  # what torch.Generator and a tensor of int64 hold
Positive = Annotated[float, real_number("> 0", lambda value: value > 0)]
Seconds = Annotated[float, real_number("> 0", lambda value: value > 0, MOST_SECONDS, "no wait is so long")]
Epochs = Annotated[float, real_number("> 0", lambda value: value > 0, MOST_UPDATES, "no run has so many")]
Often = Annotated[Union[int, float], BeforeValidator(interval)]
NotNegative = Annotated[float, real_number(">= 0", lambda value: value >= 0)]
Fraction = Annotated[float, real_number("> 0 and <= 1", lambda value: 0 < value <= 1)]
Share = Annotated[float, real_number(">= 0 and < 1", lambda value: 0 <= value < 1)]


class Section(BaseModel):
    """Keys that belong together: unknown ones are refused, and nothing changes once it is made."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
