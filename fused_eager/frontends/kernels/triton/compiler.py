"""The compiler that Triton asks for beside the driver, which has refused before anything is compiled."""

from __future__ import annotations

from triton.backends.compiler import BaseBackend


class Compiler(BaseBackend):  # type: ignore[misc]  # as in `driver`
    """Compiles for no target."""

    @staticmethod
    def supports_target(target: object) -> bool:
        """Whether it compiles for a target."""
        return False


Compiler.__abstractmethods__ = frozenset()
