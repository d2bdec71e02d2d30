"""A pytest plugin (`-p tests.services.skips`): a test that is skipped has failed, unless its reason is allowed here."""

from __future__ import annotations

import re

import pytest

# Each reason that is accepted, as a regular expression of the whole text, and why nothing can be done about it.
ALLOWED = {
    r"ray is not installed: .*": "Ray is hundreds of megabytes for one test, and not there for each Python",
    r"network namespaces cannot be made here: .*": "they take root, and containers seldom give it all of its rights",
}


def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> None:
    """Before pytest's own hook makes a report of it."""
    if call.excinfo is not None and call.excinfo.errisinstance(pytest.skip.Exception):
        reason = str(call.excinfo.value.msg)
        if not any(re.fullmatch(pattern, reason, re.DOTALL) for pattern in ALLOWED):
            try:
                pytest.fail(f"skipped ({reason}), which is in no row of tests/services/skips.py", pytrace=False)
            except pytest.fail.Exception:
                call.excinfo = pytest.ExceptionInfo.from_current()
