"""Collectives as programs of one rank's part: what XLA's devices do with each other.

A part is flat. The programs run on each of the devices of a mesh with the one axis `AXIS`, by the same name on all. As
the op `fused_eager::collective` one of them can be recorded like any other op (`lower_collectives`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .deferred import jax

Program = Callable[..., Any]
AXIS = "ranks"


def summed(x: Any, kind: str, size: int) -> Any:
    """The parts' sum, average, minimum or maximum, on each device."""
    wide = _wide(x)
    if kind not in ("MIN", "MAX"):
        return _averaged(jax.lax.psum(wide, AXIS), kind, size).astype(x.dtype)
    out = jax.lax.pmin(wide, AXIS) if kind == "MIN" else jax.lax.pmax(wide, AXIS)
    if jax.numpy.issubdtype(x.dtype, jax.numpy.floating):  # between devices XLA leaves NaN out
        some = jax.lax.psum(jax.numpy.isnan(wide).astype(jax.numpy.int32), AXIS)
        out = jax.numpy.where(some > 0, jax.numpy.nan, out)
    return out.astype(x.dtype)


def scattered(x: Any, kind: str, size: int) -> Any:
    """Of the parts' sum or average, a device's own piece."""
    out = jax.lax.psum_scatter(_wide(x.reshape(size, -1)), AXIS, scatter_dimension=0)
    return _averaged(out, kind, size).astype(x.dtype)


def _wide(x: Any) -> Any:
    """Half types as float32, so that a sum is rounded once."""
    return x.astype(jax.numpy.float32) if x.dtype in (jax.numpy.float16, jax.numpy.bfloat16) else x


def _averaged(total: Any, kind: str, size: int) -> Any:
    return total / size if kind == "AVG" else total


def gathered(x: Any, kind: str, size: int) -> Any:
    """All parts, one behind another, on each device."""
    return jax.lax.all_gather(x, AXIS, tiled=True)


def chosen(x: Any, kind: str, size: int) -> Any:
    """The part of one rank, `kind` by its number, on each device: its bits, as a sum of floats would lose some."""
    is_bool, is_float = x.dtype == bool, jax.numpy.issubdtype(x.dtype, jax.numpy.floating)
    word = jax.numpy.dtype(f"uint{8 * x.dtype.itemsize}") if is_bool or is_float else x.dtype
    bits = x.astype(word) if is_bool else jax.lax.bitcast_convert_type(x, word)
    sent = jax.lax.psum(jax.numpy.where(jax.lax.axis_index(AXIS) == int(kind), bits, 0), AXIS).astype(word)
    return sent.astype(bool) if is_bool else jax.lax.bitcast_convert_type(sent, x.dtype)


def exchanged(x: Any, kind: str, size: int) -> Any:
    """Of each part a device's own piece, one behind another."""
    return jax.lax.all_to_all(x.reshape(size, -1), AXIS, split_axis=0, concat_axis=0).reshape(-1)


PROGRAMS: dict[str, Program] = {p.__name__: p for p in (summed, scattered, gathered, chosen, exchanged)}


def named(devices: Sequence[Any]) -> str:
    """Devices of JAX's, of all processes, by their platform and numbers."""
    return f"{devices[0].platform}:{','.join(str(d.id) for d in devices)}"


@functools.lru_cache(maxsize=64)
def mesh(devices: str) -> Any:
    """The mesh of devices that are `named` so."""
    platform, _, ids = devices.partition(":")
    numbers = {d.id: d for d in jax.devices(platform)}
    return jax.sharding.Mesh(tuple(numbers[int(n)] for n in ids.split(",")), (AXIS,))


def _refused(x: torch.Tensor, program: str, kind: str, devices: str, number: int) -> torch.Tensor:
    raise RuntimeError(f"a collective between the devices {devices} runs in a region of XLA's, and not op by op")


def _shape(x: torch.Tensor, program: str, kind: str, devices: str, number: int) -> torch.Tensor:
    size = devices.count(",") + 1
    count = {"gathered": x.numel() * size, "scattered": x.numel() // size}.get(program, x.numel())
    return x.new_empty(count)


_LIBRARY = torch.library.Library("fused_eager", "FRAGMENT")
# Two that are alike otherwise are told apart by their number, or ranks might take one for the other.
_LIBRARY.define("collective(Tensor x, str program, str kind, str devices, int number) -> Tensor")
_LIBRARY.impl("collective", _refused, "CPU")
_LIBRARY.impl("collective", _shape, "Meta")
