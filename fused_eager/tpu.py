"""`import fused_eager.tpu`: this process has the device `tpu` from here on."""

from __future__ import annotations

from .frontends.device.registration import register

register("tpu")

__all__ = ["register"]
