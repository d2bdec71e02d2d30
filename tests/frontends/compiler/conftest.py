"""What tests of the compiler door stand on: Dynamo remembers nothing of the one before."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def anew() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
