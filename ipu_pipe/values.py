"""The checked values of which sections of a config are made. No torch here: reading a config does not wait for it."""

from __future__ import annotations

import math
from typing import Any, Callable, Optional

from pydantic import BaseModel, BeforeValidator, ConfigDict
from pydantic_core import PydanticCustomError
from typing_extensions import Annotated


def whole(low: int, high: Optional[int] = None) -> BeforeValidator:
    """A whole number from `low` to `high`; a true is no 1, a 2.0 no 2."""
    allowed = f">= {low}" if high is None else f"from {low} to {high}"

    def check(value: Any) -> int:
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        if not is_whole or value < low or (high is not None and value > high):
            raise ValueError(f"must be a whole number {allowed}")
        return int(value)

    return BeforeValidator(check)


def number(value: Any) -> Optional[float]:
    """A finite number, also one written as text, such as "1e-3"; a true is no 1."""
    try:
        found = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return found if math.isfinite(found) else None


def real(allowed: str, fits: Callable[[float], bool]) -> BeforeValidator:
    """A number that `fits`."""

    def check(value: Any) -> float:
        found = number(value)
        if found is None or not fits(found):
            raise ValueError(f"must be a number {allowed}")
        return found

    return BeforeValidator(check)


def fault_at(key: str, value: Any, why: str) -> PydanticCustomError:
    """The fault of one key in a section whose keys do not fit together."""
    return PydanticCustomError("setting", "{why}", {"key": key, "value": value, "why": why})


Count = Annotated[int, whole(1)]
Whole = Annotated[int, whole(0)]
Seed = Annotated[int, whole(0, 2**63 - 1)]  # what torch.Generator and a tensor of int64 hold
Positive = Annotated[float, real("> 0", lambda value: value > 0)]
NotNegative = Annotated[float, real(">= 0", lambda value: value >= 0)]
Fraction = Annotated[float, real("> 0 and <= 1", lambda value: 0 < value <= 1)]
Share = Annotated[float, real(">= 0 and < 1", lambda value: 0 <= value < 1)]


class Section(BaseModel):
    """Keys that belong together: unknown ones are refused, nothing changes once it is made."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
