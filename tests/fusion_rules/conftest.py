"""What a test asserts of lowerings is judged when it has ended, all of it compiled together."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest

from . import errors


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, Any, Any]:
    try:
        found = yield
        errors.judge()
        return found
    finally:
        errors.forget()
