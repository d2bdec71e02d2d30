"""Running torch without being seen: no dispatch mode and no autograd looks at what the runtime does for itself."""

from __future__ import annotations

import functools
import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch._C import DispatchKey, DispatchKeySet
from torch._C import _ForceDispatchKeyGuard as _KeyGuard  # what is patched while a context is open stands for this
from torch._C import _get_dispatch_stack_at as _at
from torch._C import _is_any_autocast_enabled as _is_autocast
from torch._C import _len_torch_dispatch_stack as _count
from torch._C import _len_torch_function_stack as _count_functions
from torch._C import _pop_torch_function_stack as _pop_function
from torch._C import _push_on_torch_dispatch_stack as _push
from torch._C import _push_on_torch_function_stack as _push_function
from torch._ops import _len_torch_dispatch_stack_pre_dispatch as _exported_modes
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._python_dispatch import _pop_mode as _pop

from . import profiled


class _Thread(threading.local):
    depth = 0  # of the runtime's own code
    functions: Sequence[Any] = ()  # the modes of torch's functions that are hidden
    is_own: bool | None = None  # it runs nothing else; None: nobody has asked


_thread = _Thread()
F = TypeVar("F", bound=Callable[..., Any])


OWN = "fused-eager"  # the names of the library's own threads begin so
STORES = "fsspecIO"  # fsspec's one thread, which runs nothing but its own code: a flush may be waiting for a store


def inside() -> bool:
    """Whether this thread is in the runtime's own code: it starts threads there, and nothing has to be settled."""
    return _thread.depth > 0 or is_own(threading.current_thread())


def is_own(thread: threading.Thread) -> bool:
    """Whether a thread runs nothing but the runtime's own code."""
    return thread.name.startswith(OWN) or thread.name == STORES or hasattr(thread, "_fused_eager")


def adopt(thread: threading.Thread) -> None:
    """Take a thread for one of the runtime's own, as those are that the library of a remote store starts."""
    thread._fused_eager = True  # type: ignore[attr-defined]


class functions_hidden:
    """No mode of torch's functions sees what the body calls: a default device (`torch.set_default_device`, `with
    torch.device(...)`) is one, and what the runtime makes for itself lies on the host.

    Torch takes such a mode off its stack where it asks it. On the stack they are where C++ has called: in a backward
    pass, and where a context ends.
    """

    __slots__ = ("before", "modes")

    def __enter__(self) -> None:
        self.before = _thread.functions
        self.modes = _thread.functions = [_pop_function() for _ in range(_count_functions())]

    def __exit__(self, *error: Any) -> None:
        _thread.functions = self.before
        for mode in reversed(self.modes):
            _push_function(mode)


def is_above() -> bool:
    """Whether there is something on this thread that a kernel in C++ would not see: modes of torch's functions, or
    autocast, which changes what is worked out on tensors of the host that stand for a device's."""
    return bool(_count_functions() or _is_autocast())


class below:
    """In the body, there is none of that."""

    __slots__ = ("autocast", "functions")

    def __enter__(self) -> None:
        self.functions, self.autocast = functions_hidden(), torch._C._DisableAutocast()
        self.functions.__enter__()
        self.autocast.__enter__()

    def __exit__(self, *error: Any) -> None:
        self.autocast.__exit__(*error)
        self.functions.__exit__(*error)


def as_kernel(kernel: F) -> F:
    """A kernel in Python that sees no more than one in C++ would."""

    @functools.wraps(kernel)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not is_above():
            return kernel(*args, **kwargs)
        with below():
            return kernel(*args, **kwargs)

    return run  # type: ignore[return-value]


@contextmanager
def functions_shown() -> Iterator[None]:
    """In the body, the modes of torch's functions that are hidden on this thread see what it calls: an op of the
    program's own, in Python, may call anything."""
    modes = _thread.functions
    for mode in reversed(modes):
        _push_function(mode)
    try:
        yield
    finally:
        for _ in modes:
            _pop_function()


class unobserved:
    """No dispatch mode is active in the body, nor one of torch's functions, nothing is recorded for autograd, and no
    profiler is told of it. Not `_DisableTorchDispatch`: the lowering of a decomposition needs a mode of its own inside.

    A class, and not torch's `_disable_current_modes` where nothing is being exported: it is entered at every flush.

    Nor does the collector run: finalizers of the program's may call torch, and would find no mode that sees it, and the
    runtime's work half done. It comes a moment later. A thread that compiles for a minute holds it off for nobody.
    """

    __slots__ = ("autocast", "collected", "exported", "functions", "grad", "hidden", "modes")

    def __enter__(self) -> None:
        own = _thread.is_own
        if own is None:
            own = _thread.is_own = is_own(threading.current_thread())
        self.collected = not own and gc.isenabled()
        if self.collected:
            gc.disable()
        _thread.depth += 1
        self.exported: Any = None
        if _exported_modes():
            self.exported = _disable_current_modes()
            self.exported.__enter__()
        self.modes = [_pop() for _ in range(_count())] if _count() else ()
        self.functions = functions_hidden() if _count_functions() else None
        if self.functions is not None:
            self.functions.__enter__()
        self.grad = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)
        self.autocast = torch._C._DisableAutocast()
        self.autocast.__enter__()
        self.hidden = profiled.hidden() if profiled.on else None
        if self.hidden is not None:
            self.hidden.__enter__()

    def __exit__(self, *error: Any) -> None:
        if self.hidden is not None:
            self.hidden.__exit__(*error)
        self.autocast.__exit__(*error)
        torch._C._set_grad_enabled(self.grad)
        if self.functions is not None:
            self.functions.__exit__(*error)
        for mode in reversed(self.modes):
            _push(mode)
        if self.exported is not None:
            self.exported.__exit__(*error)
        _thread.depth -= 1
        if self.collected:
            gc.enable()


@contextmanager
def without(mode: TorchDispatchMode) -> Iterator[None]:
    """`mode`, wherever it is on this thread's stack of modes, does not see what the body runs; the others do.

    Not `_DisableTorchDispatch`: torch's printing holds a guard in its frame that restores the thread's dispatch keys
    when the frame goes. After an exception that is late, and would switch off every later mode of the thread.
    """
    modes = stack()
    restack([other for other in modes if other is not mode])
    try:
        yield
    finally:
        restack(modes)


# What torch leaves to be done lazily. Inside a dispatch mode it is left undone for good: a kernel that conjugates a
# tensor of its own on the way (`linalg.lstsq` for its residuals) goes on with the one that is not.
_LAZY = DispatchKeySet(DispatchKey.Conjugate) | DispatchKeySet(DispatchKey.Negative) \
    | DispatchKeySet(DispatchKey.ZeroTensor)


class as_eager:
    """In the body, below a dispatch mode, ATen's kernels find conjugations and negations done, as they do in eager.

    Wanted for complex numbers alone, and for whatever may make some: it takes 3 us.
    """

    __slots__ = ("guard",)
    undone = _LAZY

    def __enter__(self) -> None:
        excluded = torch._C._dispatch_tls_local_exclude_set()
        self.guard = _KeyGuard(torch._C._dispatch_tls_local_include_set(), excluded - self.undone)
        self.guard.__enter__()

    def __exit__(self, *error: Any) -> None:
        self.guard.__exit__(*error)


class counting_writes(as_eager):
    """In the body, ATen's kernels count what they write one by one as new versions, as they do in eager for the
    elements of a list; and refuse to write inference tensors, which have none."""

    __slots__ = ()
    undone = _LAZY | DispatchKeySet(DispatchKey.ADInplaceOrView)


def uncompiled(function: F) -> F:
    """Have Dynamo run `function`, and all that it calls, as they are written.

    Where a part of a program is compiled, Dynamo takes the frames of a kernel in Python, or of a hook, for more of that
    program. It goes on into JAX, whose NumPy it compiles as well: in the middle of a compilation, which then waits for
    itself.
    """
    frames = torch._C._dynamo.eval_frame
    skip = frames._FrameAction.SKIP
    inner: Any = function
    while isinstance(inner, functools.partial):
        inner = inner.func
    code = getattr(inner, "__code__", None)
    if code is not None:
        frames.set_code_exec_strategy(code, frames._FrameExecStrategy(skip, skip))
    return function


def call(op: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """Call an op below a dispatch mode, as eager does."""
    for a in args:
        first = a[0] if isinstance(a, (list, tuple)) and a else a
        if isinstance(first, torch.Tensor) and first.dtype.is_complex:
            with as_eager():
                return through(op, args, kwargs)
    return through(op, args, kwargs)


def through(op: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call an op of the program's that has come as far as to our mode."""
    return profiled.through(op, args, kwargs) if profiled.on else op(*args, **kwargs)


def stack() -> list[TorchDispatchMode]:
    """This thread's modes, the one that sees an op first at the end."""
    return [_at(i) for i in range(_count())]


def restack(modes: list[TorchDispatchMode]) -> None:
    """Make `modes` this thread's modes."""
    while _count():
        _pop()
    for mode in modes:
        _push(mode)


def restore_keys() -> None:
    """Make this thread's dispatch keys say whether it has modes, as they do after every change of its stack."""
    modes = stack()
    if modes:
        restack(modes)
    else:
        _push(TorchDispatchMode())
        _pop()


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """In the body, torch's default dtype is what it was when something was recorded, or a key made."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
