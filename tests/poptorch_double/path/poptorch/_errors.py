"""PopTorch's exceptions. Checks in its Python front end are mostly bare AssertionErrors, ValueErrors, AttributeErrors."""

from __future__ import annotations

RECOVERY_ACTIONS = ("IPU_RESET", "LINK_RESET", "PARTITION_RESET", "FULL_RESET")


class Error(Exception):
    """`type` is the layer it comes from (poptorch_py_error, poptorch_cpp_error, popart_exception, poplar_...)."""

    def __init__(self, message: str, type: str = "poptorch_py_error", location: str = "") -> None:
        super().__init__(f"'{type}': {message}")
        self.message, self.type, self.location = message, type, location


class RecoverableError(Error):
    """A device error after which the `recovery_action` makes the system usable again."""

    recovery_action = "IPU_RESET"


class UnrecoverableError(Error):
    """A device error: the system is to be taken out of service."""


class DoubleRefuses(AssertionError):
    """The double is stricter than PopTorch: what PopTorch would do without a word is not what the caller can want."""


def py_error(message: str) -> Error:
    """Raised by the Python front end."""
    return Error(message)


def cpp_error(message: str) -> Error:
    """Raised by PopTorch's C++ part, while compiling or executing."""
    return Error(message, "poptorch_cpp_error")


def popart_error(message: str) -> Error:
    """Raised by PopART."""
    return Error(message, "popart_exception")


def not_modelled(what: str) -> NotImplementedError:
    """PopTorch has it, the double has not."""
    return NotImplementedError(f"{what}: this test double does not model it")
