"""The exceptions and warnings of this library. Errors of the user's program keep eager's own types."""

from __future__ import annotations


class FusedEagerError(RuntimeError):
    """Base of everything this library raises about itself."""


class ValidationError(FusedEagerError):
    """A stage handed on something that breaks its contract: a defect of this library, never of the program."""


class IslandRefused(FusedEagerError):
    """An op would have run natively although `islands="refuse"`."""


class LostValue(FusedEagerError):
    """A tensor's value was never computed because an earlier op failed; `__cause__` is that failure."""


class BudgetExceeded(FusedEagerError, AssertionError):
    """The body of `expect(...)` compiled, waited or ran natively more often than allowed; the text says where and why.

    `report` is the `Report` of the body.
    """

    report: object = None


class WrongResult(UserWarning):
    """A region's values differ from ATen's by more than rounding; ATen's are used. The text says which op and where."""


class ExportError(FusedEagerError):
    """A program that cannot be exported; the text says which op stands in the way, on which line, and why."""
