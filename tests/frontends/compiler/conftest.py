"""What tests of the compiler door stand on: Dynamo remembers nothing of the one before, and events are seen."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from fused_eager.log.events import LOG, Event


@pytest.fixture(autouse=True)
def anew() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def seen() -> Iterator[list[Event]]:
    events: list[Event] = []
    LOG.sinks.append(events.append)
    yield events
    LOG.sinks.remove(events.append)
