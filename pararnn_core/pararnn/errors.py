"""Every error and warning that pararnn raises by its own name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pararnn.stats import NewtonStats


class UntraceableError(TypeError):
    """A step uses an operation that the expression graph cannot hold."""


class BackendUnavailableError(RuntimeError):
    """A backend was named that cannot run here; the message says why."""


class NewtonDivergenceError(RuntimeError):
    """A solve ended non-finite or above ``residual_fail``.

    ``stats`` holds what was known when it stopped, so that a report needs no second run.
    """

    def __init__(self, message: str, stats: NewtonStats | None = None) -> None:
        super().__init__(message)
        self.stats = stats


class AgreementError(RuntimeError):
    """The parallel and the sequential run differ by more than the tolerance; ``report`` has the numbers."""

    def __init__(self, message: str, report: Any = None) -> None:
        super().__init__(message)
        self.report = report


class NotConvergedWarning(UserWarning):
    """A solve with a pinned iteration count stopped before its agreement estimate met the tolerance."""
