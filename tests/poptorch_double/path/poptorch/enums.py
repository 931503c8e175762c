"""PopTorch's enums, members and values from api.json."""

from poptorch._signatures import DATA, make_enum

__all__ = list(DATA["enums"])
globals().update({name: make_enum(name, __name__) for name in __all__})
