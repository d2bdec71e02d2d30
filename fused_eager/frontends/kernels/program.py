"""Programs: what a torch op of the user's computes for given static arguments, as a function of flat arrays.

A program takes the op's tensors (`operands`) and its Python numbers, both flat, and returns a flat list of arrays. It
is known by a digest of all that decides what it computes, and traced once for each kind of arguments, by JAX as the
user's own code would be: with 64-bit numbers only where some of the arguments have them. `derive` makes programs of
programs.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from fused_eager.fusion_rules.programs import PROGRAMS
from fused_eager.fusion_rules.spec import JAX_DTYPE, TORCH_DTYPE

from ...bounded import Bounded
from ...errors import FusedEagerError
from ...xla import enable_x64
from . import platforms

Aval = Any  # jax.ShapeDtypeStruct
Form = tuple[tuple[tuple[int, ...], torch.dtype], ...]  # shapes and dtypes
Kinds = tuple[type, ...]  # of numbers
Mode = tuple[bool | str | None, ...]
_WIDE = frozenset({torch.float64, torch.int64, torch.complex128, torch.uint64})
_LOCK = threading.RLock()


class KernelError(FusedEagerError, TypeError):
    """A function that is to be an op, or its declaration, or what it was called with, does not fit."""


@dataclass(frozen=True, slots=True)
class Traced:
    """A program for arguments of given shapes: its jaxpr, and how its flat results are put together."""

    jaxpr: ClosedJaxpr
    specs: Form  # of the results
    tree: Any  # of JAX


class Program:
    """A function of flat arrays, with a title for people and a name for keys, which begins with the digest.

    `call(operands, numbers)` returns `(results, tree)`: a flat list of arrays, and how they are put together where the
    program is the user's own function. `mode` is what `mode_of` says of how it is traced.
    """

    def __init__(
        self, title: str, digest: str, call: Callable[..., tuple[list[Any], Any]], mode: Mode, recipe: str = ""
    ):
        self.title = title
        self.digest = digest
        self.recipe = recipe
        self.name = f"{digest}:{recipe}" if recipe else digest
        self.call = call
        self.mode = mode
        self.x64 = bool(mode[0])
        self._traced: Bounded[Hashable, Traced] = Bounded(256)
        self._derived: dict[Hashable, Program] = {}

    def derived(self, how: Hashable, make: Callable[[], Program]) -> Program:
        """A program made of this one, made once."""
        found = self._derived.get(how)
        if found is None:
            with _LOCK:
                found = self._derived.get(how)
                if found is None:
                    found = self._derived[how] = known(make())
        return found

    def traced(self, operands: Form, kinds: Kinds) -> Traced:
        """The program for operands of these shapes and dtypes and numbers of these types."""
        key = operands, kinds
        found = self._traced.get(key)
        if found is None:
            with _LOCK:
                found = self._traced.get(key)
                if found is None:
                    found = self._traced[key] = self._trace(operands, kinds)
        return found

    @contextmanager
    def tracing(self) -> Iterator[None]:
        """JAX's switches are as they were where the op was called, on whichever thread it is traced."""
        with ExitStack() as stack:
            stack.enter_context(enable_x64(self.x64))
            stack.enter_context(jax.disable_jit(False))
            for name, value in zip(_SWITCHES, self.mode[1:], strict=True):
                stack.enter_context(getattr(jax, name)(value))
            yield

    def _trace(self, operands: Form, kinds: Kinds) -> Traced:
        tree: list[Any] = [None]

        def flat(arrays: Sequence[jax.Array], numbers: Sequence[jax.Array]) -> list[Any]:
            results, tree[0] = self.call(list(arrays), list(numbers))
            return results

        with self.tracing():
            jaxpr = jax.make_jaxpr(flat)(list(avals(operands)), number_avals(kinds, self.x64))
            by_platform = platforms.prepared(jaxpr)
        specs = []
        for i, aval in enumerate(jaxpr.out_avals):
            dtype = TORCH_DTYPE.get(np.dtype(aval.dtype)) if not jax.dtypes.issubdtype(
                aval.dtype, jax.dtypes.extended) else None
            if dtype is None:
                raise KernelError(f"{self.title} returns {aval.dtype} as result {i}: torch has no such dtype")
            specs.append((tuple(aval.shape), dtype))
        return Traced(by_platform, tuple(specs), tree[0])

    def lower(self, operands: Sequence[jax.Array], numbers: Sequence[jax.Array]) -> list[jax.Array]:
        """The program inside of another trace, which may have 64-bit numbers on."""
        form = tuple((tuple(x.shape), TORCH_DTYPE[np.dtype(x.dtype)]) for x in operands)
        kinds = tuple(_kind(n) for n in numbers)
        found = self.traced(form, kinds)
        given = [
            jnp.asarray(n, aval.dtype) for n, aval in zip(numbers, number_avals(kinds, self.x64), strict=True)
        ]
        return list(jaxpr_as_fun(found.jaxpr)(*operands, *given))


def known(program: Program) -> Program:
    """The program, found by its name from now on; the one that is known already where there is one."""
    PROGRAMS.setdefault(program.name, program.lower)
    return owner_of(program.name) or program


def owner_of(name: str) -> Program | None:
    """The program of this process that has a name."""
    owner = getattr(PROGRAMS.get(name), "__self__", None)
    return owner if isinstance(owner, Program) else None


def _kind(number: Any) -> type:
    if isinstance(number, (bool, complex)):
        return type(number)
    return {"f": float, "i": int}[np.dtype(number.dtype).kind] if hasattr(number, "dtype") else type(number)


def avals(form: Form) -> tuple[Aval, ...]:
    """What JAX traces operands with."""
    return tuple(jax.ShapeDtypeStruct(shape, JAX_DTYPE[dtype]) for shape, dtype in form)


def number_avals(kinds: Kinds, x64: bool) -> list[Aval]:
    """What JAX traces Python numbers with: scalars that take on the dtype of the arrays that they meet."""
    return [jax.ShapeDtypeStruct((), _NUMBERS[kind][x64], weak_type=True) for kind in kinds]


_NUMBERS: dict[type, tuple[str, str]] = {float: ("float32", "float64"), int: ("int32", "int64")}


def form_of(tensors: Sequence[torch.Tensor]) -> Form:
    """Shapes and dtypes of tensors."""
    return tuple([(tuple(t.shape), t.dtype) for t in tensors])


# JAX's switches that decide what a function computes, by the names of the contexts that set them.
_SWITCHES = (
    "default_matmul_precision", "numpy_dtype_promotion", "numpy_rank_promotion", "default_prng_impl",
    "threefry_partitionable",
)  # fmt: skip


def mode_of(x64: bool) -> Mode:
    """How a function is traced now: with 64-bit numbers or not, and by JAX's switches."""
    values = [getattr(jax.config, f"jax_{name}") for name in _SWITCHES]
    return (x64, *[v.value if isinstance(v, enum.Enum) else v for v in values])


def is_wide(dtypes: Sequence[torch.dtype], numbers: Sequence[int | float]) -> bool:
    """Whether a function is traced with 64-bit numbers: where the program has them on, or an argument has them."""
    if jax.config.jax_enable_x64 or not _WIDE.isdisjoint(dtypes):
        return True
    return any(type(n) is int and not -(2**31) <= n < 2**31 for n in numbers)


@functools.cache
def own_digest() -> bytes:
    """What stands for the code that makes programs of functions: that of this folder, and JAX, by whose code it is
    decided what derivatives keep."""
    total = hashlib.sha256(b"fused-eager/programs/1\0" + jax.__version__.encode() + b"\0")
    for path in sorted(Path(__file__).parent.glob("*.py"), key=lambda p: p.name):
        total.update(path.name.encode() + b"\0" + path.read_bytes())
    return total.digest()


def digest(*parts: object) -> str:
    """32 hex digits that stand for plain values and for the code that makes programs of them."""
    return hashlib.sha256(own_digest() + repr(parts).encode()).hexdigest()[:32]
