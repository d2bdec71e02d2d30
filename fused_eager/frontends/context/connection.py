"""Connecting the compiled follower with the runtime's objects: which they are, and what it asks in Python."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch._ops import OpOverload

from fused_eager.cache.exits import call_at_exit

from ... import profiled
from ...config import Config
from ...devices.buffer import LOCK
from ...devices.host import buffers, unwritten
from ...devices.storage import FLAGS_AT
from ...executing import run
from ...follower.build import NAME
from ...follower.spec import Treatment
from ...log import site
from ...log.events import LOG
from ...policy.autotuner import Autotuner
from ...policy.hotness import Backoff
from ...policy.policy import Policy
from ...recording import native, other_devices, pending
from ...tracing.opinfo import Kind, OpInfo, info_of
from ...tracing.stream import STREAMS, DeviceInput, NativeInput, Node, Stream
from ...tracing.trace import Step
from . import intercept, readers

# What is not here goes to Python.
TREATMENT = {
    Kind.VIEW: Treatment.VIEW,
    Kind.ALLOCATE: Treatment.VIEW,
    Kind.COMPUTE: Treatment.COMPUTE,
    Kind.RANDOM: Treatment.NATIVE_AT_MOST,
    Kind.CHECK: Treatment.NATIVE_AT_MOST,
}


def treatment_of(name: str, overload: str) -> tuple[OpInfo | None, bool, int]:
    """What is known of an overload, whether it writes a list, and how it is treated."""
    namespace, _, name = name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), name, None)
    op = getattr(packet, overload or "default", None)
    if not isinstance(op, OpOverload):
        return None, False, Treatment.OTHER
    info = info_of(op)
    if op is torch.ops.aten._local_scalar_dense.default:
        return info, info.writes_list, Treatment.READ
    return info, info.writes_list, TREATMENT.get(info.kind, Treatment.OTHER)


def settings_of(config: Config) -> tuple[bool, bool, bool, int]:
    """`spec.SETTINGS` of a context's options."""
    follows = config.mode == "fused" and config.follower != "python" and config.log != "ops"
    return follows, config.measures, config.islands == "allow", config.max_pending


def shared() -> dict[str, Any]:
    """What is named in `follower.spec`."""
    named: dict[str, Any] = {
        "table": buffers.TABLE,
        "streams": STREAMS.refs,
        "deferred": run.DEFERRED,
        "site": vars(site),
        "acquire": LOCK.acquire,
        "release": LOCK.release,
        "native_input": pending.native_input,
        "open_native": native.open_native,
        "must_stay": native.must_stay,
        "is_awaited": native.is_awaited,
        "passed_to_other_device": other_devices.passed,
        "release_buffer": buffers.HostBuffer.release,
        "with_scalars": Node.with_scalars,
        "treatment_of": treatment_of,
        "settings_of": settings_of,
        "is_internal": site.is_internal,
        "count": LOG.count,
        "was_read": readers.was_read,
        "read_again": readers.read_again,
        "flags_at": FLAGS_AT,
        "unwritten": unwritten.address(),
        "unwritten_least": unwritten.LEAST,
        "unwritten_most": unwritten.MOST,
    }
    return {kind.__name__: kind for kind in _CLASSES} | named


def load(path: Path) -> ModuleType:
    """Load what has been built, and register its kernels.

    Raises:
        ImportError, RuntimeError, AttributeError: it was made for another torch, or another state of the runtime.
    """
    found = importlib.util.spec_from_file_location(NAME, path)
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    module.connect(**shared())
    module.open(not profiled.on)
    call_at_exit(module.open, False)  # a thread that goes on would look for an interpreter
    return module


_CLASSES = (
    intercept.FrontDoor,
    buffers.HostBuffer,
    Stream,
    Step,
    Node,
    Policy,
    Autotuner,
    Backoff,
    DeviceInput,
    NativeInput,
    site.Place,
)
