"""Room: which large results of a region no donated input makes room for, so that they go to scratch memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from ..devices.device import Device
from ..devices.home import Home, nbytes_of
from .plan import Region


def wanted(region: Region, homes: Mapping[int, Home], device: Device) -> tuple[Home, ...]:
    """The large results of a region on a device for which no donated input makes room."""
    return tuple(homes[region.outputs[p]] for p in roomless(region, homes, device))


def roomless(region: Region, homes: Mapping[int, Home], device: Device) -> list[int]:
    """Which of a region's outputs these are."""
    if device.scratch_from is None:
        return []
    given = Counter(homes[region.inputs[p]] for p in region.donated)
    found = []
    for position, vid in enumerate(region.outputs):
        home = homes[vid]
        if given[home]:
            given[home] -= 1
        elif nbytes_of(home) >= device.scratch_from:
            found.append(position)
    return found
