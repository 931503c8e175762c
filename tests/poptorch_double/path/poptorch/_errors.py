"""PopTorch's exceptions. Checks in its Python front end are mostly bare AssertionErrors, ValueErrors, AttributeErrors."""

from __future__ import annotations


class Error(Exception):
    """PopTorch's error. `type` is the layer that raises it (poptorch_py_error,
    poptorch_cpp_error, popart_exception, poplar_...)."""

    def __init__(self, message: str, type: str = "poptorch_py_error", location: str = "") -> None:
        super().__init__(f"'{type}': {message}")
        self.message, self.type, self.location = message, type, location


class RecoverableError(Error):
    """A device error after which the `recovery_action` makes the system usable again."""

    recovery_action = "IPU_RESET"


class UnrecoverableError(Error):
    """A device error after which the system must be taken out of service."""


class DoubleRefuses(AssertionError):
    """Raised where the double is stricter than PopTorch: PopTorch would silently do something
    that the caller cannot want."""


def make_py_error(message: str) -> Error:
    """Return an error of the Python front end."""
    return Error(message)


def make_cpp_error(message: str) -> Error:
    """Return an error of PopTorch's C++ part, of compiling or executing."""
    return Error(message, "poptorch_cpp_error")


def make_popart_error(message: str) -> Error:
    """Return an error of PopART."""
    return Error(message, "popart_exception")


def make_unmodelled_error(what: str) -> NotImplementedError:
    """Return the error for a feature that PopTorch has and the double lacks."""
    return NotImplementedError(f"{what}: this test double does not model it")
