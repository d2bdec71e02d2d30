"""Systems of others that can run beside ours in one process: torchax, PyTorch over JAX.

Imported only when one of its columns is asked for, and only inside the functions: importing torchax names torch's spare
device "jax" for the rest of the process and turns a fast path of attention off, which is put back here, so that plain
eager stays what it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils._mode_utils import no_dispatch

_compilations = 0
# What draws the numbers of a workload while it is set up: functions that make a tensor, and ops that fill one.
_MAKERS = (torch.rand, torch.randn, torch.randint, torch.randperm)
_FILLERS = (torch.ops.aten.normal_, torch.ops.aten.uniform_)


@cache
def _torchax() -> ModuleType:
    """The library. Raises ModuleNotFoundError with what to install where it is absent."""
    import jax

    fast_attention = torch.backends.mha.get_fastpath_enabled()
    try:
        import torchax
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{error.name} is not installed (the extra `peers` brings it)") from None
    torch.backends.mha.set_fastpath_enabled(fast_attention)
    jax.monitoring.register_event_duration_secs_listener(_count)
    return torchax


def _count(event: str, seconds: float, **_: Any) -> None:
    global _compilations
    _compilations += event == "/jax/core/compile/backend_compile_duration"


def compilations() -> int:
    """What JAX has compiled for anybody in this process, since a column of this module was first asked for."""
    return _compilations


@contextmanager
def running() -> Iterator[None]:
    """Torchax's eager mode: whatever is made in here is on its device. What it needs of torch ends with the context."""
    fast_attention = torch.backends.mha.get_fastpath_enabled()
    with _torchax().default_env(), torch.device("jax"):
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            yield
        except RuntimeError as error:
            if "does not require grad" not in str(error):
                raise
            # No fault of the workload: `F.linear(x, weight).requires_grad` is False there, and so is what is jitted.
            raise RuntimeError(
                "torchax hides linear layers, attention and what is jitted from torch's autograd; it trains with "
                "jax.grad and optax, a loop that the user writes anew"
            ) from error
        finally:
            torch.backends.mha.set_fastpath_enabled(fast_attention)


@contextmanager
def placed() -> Iterator[None]:
    """A workload that is set up in here lies on torchax's device and has the numbers that plain eager draws.

    Torchax would draw others, from JAX, and no result could be compared. It lets ops be replaced, so an environment of
    its own draws them as torch does; steps run in the usual one, where dropout is torchax's.
    """
    environment = _torchax().tensor.Environment()
    for maker in _MAKERS:
        environment.override_op_definition(maker, _made_by_torch(maker))
    for filler in _FILLERS:
        environment.override_op_definition(filler, _filled_by_torch(filler))
    with environment, torch.device("jax"):
        yield


def _on_the_device(tensor: Tensor) -> Tensor:
    return _torchax().default_env().to_xla(tensor)


def _made_by_torch(maker: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def make(*args: Any, **options: Any) -> Tensor:
        with no_dispatch():
            return _on_the_device(maker(*args, **{**options, "device": "cpu"}))

    return make


def _filled_by_torch(filler: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def fill(tensor: Any, *args: Any, **options: Any) -> Tensor:
        with no_dispatch():
            empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
            drawn = _on_the_device(filler(empty, *args, **options))
        return tensor.apply_jax_(lambda _: drawn.jax())

    return fill


def jitted(function: Any) -> Any:
    """What a user of torchax does by hand: the model or the function, compiled as a whole."""
    return _torchax().compile(function)


def fetched(tensor: Tensor) -> Tensor:
    """A result as an ordinary tensor on the CPU."""
    return tensor.to("cpu")


def wait() -> None:
    """Until every array in the process has its value: a step does not say which ones it has written."""
    import jax

    for platform in {jax.default_backend(), "cpu"}:  # on a machine with a GPU they may lie on either
        for array in jax.live_arrays(platform):
            if not array.is_deleted():
                array.block_until_ready()
