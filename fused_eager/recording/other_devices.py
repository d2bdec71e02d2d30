"""Elsewhere: what lies on a device that is not fused (CUDA, meta) goes to torch at once, and is counted.

Such an op waits for nothing, and nobody waits for it: what is pending or under way lies in the host's memory. A GPU's
kernel is launched in 10 us, so it may take little: where nobody reads the event log while it is written, the ops of a
kind are told of together, when it is read.
"""

from __future__ import annotations

from typing import Any

import torch

from ..config import Config
from ..executing.island import judge
from ..log import site
from ..log.events import LOG
from ..log.reasons import NOT_FUSED
from ..quiet import call
from ..tracing.opinfo import OpInfo

Tensor = torch.Tensor


def device_of(args: Any, kwargs: dict[str, Any]) -> str:
    """The device of an op's tensors, if there are any and none is in the host's memory; else ""."""
    found: Tensor | None = None
    for a in (*args, *kwargs.values()) if kwargs else args:
        for t in a if type(a) is list or type(a) is tuple else (a,):
            if isinstance(t, Tensor):
                if t.is_cpu:
                    return ""
                found = t
    return "" if found is None else str(found.device)


def run(config: Config, info: OpInfo, args: Any, kwargs: dict[str, Any], device: str) -> Any:
    """Run an op whose tensors are all on `device`, natively.

    Raises:
        IslandRefused: the options refuse what runs natively.
    """
    if config.islands != "allow":
        judge(config, info.op, site.here(), f"{device} {NOT_FUSED}")
    passed(info, device)
    return call(info.op, args, kwargs)


def wait(device: str) -> None:
    """Return when all work of `device` is done, and raise what it has failed with."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is not None and device.startswith(accelerator.type):
        torch.accelerator.synchronize(torch.device(device))


_waiting: dict[tuple[int, str], tuple[object, list[int]]] = {}  # ops since they were told of, and in which log


def passed(info: OpInfo, device: str) -> None:
    """Count an op that runs natively on `device`."""
    key = info.number, device
    log, count = _waiting.get(key, (None, [0]))
    if log is LOG.volume and not LOG.sinks:
        count[0] += 1
        return
    said = {"op": str(info.op), "reason": f"{device} {NOT_FUSED}", "site": str(site.describe(site.here()))}
    if LOG.sinks:
        LOG.emit("island", **said, times=1)
        return
    since = [1]
    _waiting[key] = LOG.volume, since

    def tell() -> dict[str, Any]:
        _waiting.pop(key, None)
        return {**said, "times": since[0]}

    LOG.emit_when_read("island", tell)
