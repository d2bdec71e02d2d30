"""The device of a target: what regions are compiled for, and no tensor is on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import jax
import numpy as np
import torch

from fused_eager.fusion_rules.spec import Spec

from ..devices.buffer import Buffer, Table
from ..devices.device import Device
from .target import Target
from .topology import devices

# The target that the device stands for in this process, where a program is run to be compiled for one.
STOOD_FOR: list[TargetDevice] = []


class TargetDevice(Device):
    """The first device of a target. The entries that are made for it serve all of the kind."""

    has_memory = False
    is_here = False

    def __init__(self, target: Target):
        self.target = target
        self.name = str(target)
        self.table = Table()

    @property
    def xla(self) -> jax.Device:
        """The device, as XLA's compiler describes it. Raises as `topology.devices`."""
        return devices(self.target)[0]

    def holds(self, t: torch.Tensor) -> bool:
        """No tensor is."""
        return False

    def new(self, spec: Spec, nbytes: int) -> tuple[torch.Tensor, Buffer]:
        """Refused."""
        self._refuse()

    def buffer(self, storage: torch.UntypedStorage) -> Buffer | None:
        """None."""
        return None

    def put(self, t: torch.Tensor) -> jax.Array:
        """Refused."""
        self._refuse()

    def fetch(self, array: jax.Array) -> torch.Tensor:
        """Refused."""
        self._refuse()

    def numbers(self, numbers: Sequence[float | int], dtype: torch.dtype, kept: list[np.ndarray]) -> jax.Array:
        """Refused."""
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise AssertionError(f"{self.name} is a target: regions are compiled for it, and nothing runs on it")
