"""The driver: active where the device is registered and there is no GPU, and never made."""

from __future__ import annotations

import sys
from typing import Any

import torch
from triton.backends.driver import DriverBase

from fused_eager.errors import FusedEagerError

_REFUSED = """\
a Triton kernel cannot run on the device {name!r}. Triton compiles for GPUs, from tensors of theirs; this process has no
such GPU, and what is on {name!r} is compiled by XLA. Write the kernel in Pallas or JAX (docs/kernels.md: one source for
CPU, GPU and TPU; Helion makes Pallas kernels of PyTorch-like code), or have the program take its way in plain PyTorch.\
"""


class Driver(DriverBase):  # type: ignore[misc]  # Triton is not among what the types are checked against
    """Refuses, where Triton would find no driver at all."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        name = torch._C._get_privateuse1_backend_name()
        raise FusedEagerError(_REFUSED.format(name=name))

    @staticmethod
    def is_active() -> bool:
        """Whether Triton's own drivers leave the matter to this one: two active ones would be an error, too."""
        door = sys.modules.get("fused_eager.frontends.device.registration")  # Triton without the device loads nothing
        return bool(door and door.registered()) and not torch.cuda.is_available() and not torch.xpu.is_available()


# Triton wants classes that are concrete, and each release may ask for more methods. None of these is ever called.
Driver.__abstractmethods__ = frozenset()
