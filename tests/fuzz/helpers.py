"""What the statements of the further kinds use: subclasses, scripted functions, threads, profiles.

A program's script holds this module's source, so it needs nothing but torch.
"""

import itertools
import linecache
import threading
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.autograd.forward_ad as fwAD  # noqa: F401 - for programs
from torch.testing._internal.two_tensor import TwoTensor  # noqa: F401 - for programs


class Plain(torch.Tensor):
    """A subclass that adds nothing."""


class Named(torch.Tensor):
    """A subclass that writes down which functions it is given."""

    names: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.names.append(getattr(func, "__name__", "?"))
        return super().__torch_function__(func, types, args, kwargs or {})


class Redispatched(torch.Tensor):
    """A subclass that hands each op on below itself."""

    ops: ClassVar[list[str]] = []

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.ops.append(str(func))
        return super().__torch_dispatch__(func, types, args, kwargs or {})


def laid_out(grad: torch.Tensor) -> torch.Tensor:
    """A copy of a gradient, row by row: how it lies is the engine's choice, another one where any mode is active."""
    return grad.to_dense() if grad.is_sparse else grad.clone(memory_format=torch.contiguous_format)


_NUMBERS = itertools.count()


def scripted(*lines: str) -> Any:
    """A TorchScript function of a tensor `x` and a number `s`: its last line is what it returns."""
    body = "".join(f"    {line}\n" for line in (*lines[:-1], f"return {lines[-1]}"))
    name = f"scripted{next(_NUMBERS)}"
    source = f"def {name}(x, s: float):\n{body}"
    # torch.jit.script asks for the source of what it is given.
    linecache.cache[f"/{name}.py"] = (len(source), None, source.splitlines(True), f"/{name}.py")
    env: dict[str, Any] = {"torch": torch, "__name__": __name__}
    exec(compile(source, f"/{name}.py", "exec"), env)
    return torch.jit.script(env[name])


def curve(x: torch.Tensor) -> torch.Tensor:
    """Something to trace."""
    return x.sin() * 2 + torch.tensor(2.0)


# Made before there is a context.
OUTSIDE = [
    scripted("x * torch.tensor(2.0) + s"),
    scripted("y = x.clone()", "y.mul_(s)", "y + x.sin()"),
    scripted("y = torch.zeros_like(x)", "for i in range(3):", "    y = y + x * i", "y"),
    scripted("if x.dim() > 1:", "    x = x.sum(0)", "torch.cat([x.flatten(), torch.tensor([2.0, s]).to(x.dtype)])"),
]


class Thread:
    """A thread that computes something, and what it computed or raised."""

    def __init__(self, work: Callable[[], Any]):
        self.work = work
        self.made: Any = None
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.made = self.work()
        except Exception as error:
            self.error = error

    def join(self) -> Any:
        self.thread.join()
        if self.error is not None:
            raise self.error
        return self.made


def profiled(work: Callable[[], Any], **options: Any) -> tuple[Any, list[Any]]:
    """What was computed, and the ops that a profiler saw on top, with their shapes, in an order of no meaning."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], **options) as profile:
        made = work()
    # What an op calls in turn is the affair of who computes it.
    ops = [e for e in profile.events() if e.name.startswith("aten::") and e.cpu_parent is None]
    return made, sorted((e.name, str(e.input_shapes)) for e in ops)


def refused(work: Callable[[], Any]) -> str:
    """The first line of the words with which a call is refused; "" if it is not."""
    try:
        work()
    except (RuntimeError, ValueError, IndexError) as error:
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"
    return ""
