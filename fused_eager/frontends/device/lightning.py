"""Lightning's registries get an accelerator and two strategies of this device, all named after this library.

Lightning has registries and no entry point into them, so they are filled once it has been imported. For an accelerator
that is none of its own it puts the model on the CPU, and autocast is CUDA's; both are a strategy's to say. So the
strategy is what a program names, and the accelerator alone is refused rather than trained on the CPU.
"""

from __future__ import annotations

import importlib
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

from ..context.imports import after_import

NAME = "fused_eager"
# Two halves, in packages of two names each: where they are, and what the registries and the precision are called.
_HALVES = (
    (("lightning.fabric", "lightning_fabric"), "ACCELERATOR_REGISTRY", "STRATEGY_REGISTRY", "precision"),
    (("lightning.pytorch", "pytorch_lightning"), "AcceleratorRegistry", "StrategyRegistry", "precision_plugin"),
)


def offer(device_type: str) -> None:
    """Fill the registries with what trains on `device_type`, now or when the program imports Lightning."""
    for packages, accelerators, strategies, precision in _HALVES:
        for package in packages:
            then = partial(_register, device_type, package, accelerators, strategies, precision)
            after_import(f"{package}.strategies", nullcontext, then)


def _register(device_type: str, package: str, accelerators: str, strategies: str, precision: str) -> None:
    ours = importlib.import_module(f"{package}.accelerators")
    theirs = importlib.import_module(f"{package}.strategies")
    mixed = importlib.import_module(f"{package}.plugins.precision").MixedPrecision
    made = {"kind": device_type}
    accelerator = type("FusedEagerAccelerator", (_Accelerator, ours.Accelerator), made)
    about = made | {"ours": accelerator, "mixed": mixed, precision: _precision(precision)}
    single = type("FusedEagerStrategy", (_Single, theirs.SingleDeviceStrategy), about)
    several = type("FusedEagerDDPStrategy", (_Several, theirs.DDPStrategy), about)
    getattr(ours, accelerators).register(NAME, accelerator, f"the device {device_type}")
    into = getattr(theirs, strategies)
    into.register(NAME, single, f"one device {device_type}")
    into.register(f"{NAME}_ddp", several, f"a process for each device {device_type}", process_group_backend=NAME)


def _precision(name: str) -> Any:
    """The property of a strategy that holds its precision: autocast and gradient scaling are the device's."""

    def get(self: Any) -> Any:
        return getattr(super(_Strategy, self), name)

    def set_(self: Any, plugin: Any) -> None:
        if isinstance(plugin, self.mixed) and plugin.device != self.kind:
            plugin = type(plugin)(plugin.precision, self.kind)
        getattr(super(_Strategy, type(self)), name).fset(self, plugin)

    return property(get, set_)


class _Accelerator:
    """What Lightning asks of an accelerator."""

    kind: str

    def setup_device(self, device: torch.device) -> None:
        if device.type != self.kind:
            raise ValueError(
                f"Lightning has chosen the device {str(device)!r}, as it does for an accelerator that is none of its "
                f"own. Say strategy={NAME!r}, or, for several devices, strategy='{NAME}_ddp'"
            )
        getattr(torch, self.kind).set_device(device)

    def teardown(self) -> None:
        getattr(torch, self.kind).synchronize()

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        stats: dict[str, Any] = getattr(torch, self.kind).memory_stats(device)
        return stats

    @classmethod
    def parse_devices(cls, devices: Any) -> list[int] | int:
        """Numbers of devices, or how many there are to be; -1 is all of them."""
        if isinstance(devices, str):
            numbers = [int(each) for each in devices.split(",") if each.strip()]
            devices = numbers if "," in devices else numbers[0]
        if devices == -1:
            devices = getattr(torch, cls.kind).device_count()
        if not devices or (isinstance(devices, int) and devices < 1):
            raise ValueError(f"devices={devices!r}: how many, or a list of their numbers, was expected")
        return list(devices) if not isinstance(devices, int) else devices

    @classmethod
    def get_parallel_devices(cls, devices: list[int] | int) -> list[torch.device]:
        """The device of each process. Where each is given one device, as by torchrun, that is its first."""
        there = getattr(torch, cls.kind).device_count()
        numbers = [i % there for i in range(devices)] if isinstance(devices, int) else devices
        return [torch.device(cls.kind, i) for i in numbers]

    @staticmethod
    def auto_device_count() -> int:
        return 1

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def name() -> str:
        return NAME


class _Strategy:
    """What is ours of a strategy, whatever the accelerator that Lightning has found."""

    kind: str
    ours: type[_Accelerator]
    mixed: Any

    @property
    def accelerator(self) -> Any:
        return super().accelerator  # type: ignore[misc]

    @accelerator.setter
    def accelerator(self, accelerator: Any) -> None:
        kept = accelerator if isinstance(accelerator, self.ours) else self.ours()
        super(_Strategy, type(self)).accelerator.fset(self, kept)  # type: ignore[misc]


class _Single(_Strategy):
    """One device."""

    def __init__(self, **options: Any) -> None:
        super().__init__(device=torch.device(self.kind, 0), **options)  # type: ignore[call-arg]

    @property
    def parallel_devices(self) -> list[torch.device]:
        return []  # Lightning then sets it

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device]) -> None:
        if len(devices) > 1:
            raise ValueError(f"{len(devices)} devices are a strategy of their own: say strategy='{NAME}_ddp'")
        if devices[0].type == self.kind:
            self._root_device = devices[0]


class _Several(_Strategy):
    """A process for each device. DistributedDataParallel is told nothing of them: where the model lies says it."""

    def determine_ddp_device_ids(self) -> None:
        return None

    _determine_ddp_device_ids = determine_ddp_device_ids
