"""Lower an op that has no row of its own through torch's decomposition.

The decomposition runs over meta tensors under a mode that computes the JAX value of every op on the side. View ops
need no rule: a meta tensor has real strides and a real (empty) storage, so `geometry` reads and writes through them
as it does for the user's own tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._decomp import decomposition_table
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from .deferred import jax, jnp
from .geometry import Geometry, home_shape, read, write
from .lowering import Context, Hoisted, NoLowering, apply_rule, conform, leaves, map_leaves
from .rule import functional_twin, rule_for
from .spec import JAX_DTYPE, spec_of, torch_dtype

# Decompositions that are not fit for lowering, each with its reason: they would win over the island that is right.
DENIED: dict[str, str] = {
    # Eager raises; the decomposition writes into the next plane.
    "aten.max_unpool2d.default": "its indices are not checked plane by plane",
    "aten.max_unpool3d.default": "its indices are not checked plane by plane",
}


def decomposition_of(op: OpOverload) -> Callable[..., Any] | None:
    """torch's decomposition of a functional overload, None if it has none that we trust."""
    if str(op) in DENIED:
        return None
    found = decomposition_table.get(op)
    if found is not None:
        return found
    return op.decompose if is_composite(op) else None


def is_composite(op: OpOverload) -> bool:
    """Whether an overload is nothing but calls of others. A few have a kernel for CPUs besides, which eager calls, and
    which takes what the composition does not (`native_channel_shuffle` of nothing)."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return has_kernel(op.name(), "CompositeImplicitAutograd") and not has_kernel(op.name(), "CPU")


def geometry_of(t: torch.Tensor) -> Geometry:
    """The geometry of a strided tensor over its storage."""
    return Geometry(tuple(t.shape), tuple(t.stride()), int(t.storage_offset()), t.dtype, t.is_conj(), t.is_neg())


class Interpreter(TorchDispatchMode):
    """Computes, next to ops on meta tensors, the JAX value of every storage they write."""

    def __init__(self, cx: Context):
        super().__init__()
        self.cx = cx
        # Keyed by storage address; the storage is kept so that no address is used twice while we run.
        self.homes: dict[int, tuple[torch.UntypedStorage, jax.Array]] = {}
        self.open: list[OpOverload] = []

    def bind(self, value: jax.Array) -> torch.Tensor:
        """A meta tensor that stands for `value`."""
        t = torch.empty(value.shape, dtype=torch_dtype(value), device="meta")
        self._store(t, value)
        return t

    def _store(self, t: torch.Tensor, value: jax.Array) -> None:
        storage = t.untyped_storage()
        g = geometry_of(t)
        dense = storage.nbytes() == t.numel() * t.dtype.itemsize
        if dense:
            blank = jnp.zeros(home_shape(spec_of(t)), JAX_DTYPE[t.dtype])
        else:
            known = self.homes.get(storage._cdata)
            blank = known[1] if known else jnp.zeros(storage.nbytes() // t.dtype.itemsize, JAX_DTYPE[t.dtype])
        self.homes[storage._cdata] = (storage, write(blank, g, value))

    def value(self, t: torch.Tensor) -> jax.Array:
        """The JAX value of a meta tensor.

        Raises:
            NoLowering: the decomposition reads memory that nothing wrote, or a tensor from outside.
        """
        storage = t.untyped_storage()
        home = self.homes.get(storage._cdata)
        if home is None:
            if storage.nbytes():
                raise NoLowering("the decomposition reads a tensor that it did not make")
            return jnp.zeros(tuple(t.shape), JAX_DTYPE[t.dtype])
        return read(home[1], geometry_of(t))

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prims":
            with self:
                return _prim_in_aten(func)(*args, **kwargs)
        rule = rule_for(func)
        # Below autograd `reshape` arrives whole, which may be a view or a copy: what it calls tells.
        if rule is None and (is_composite(func) or not func.is_view):
            twin = functional_twin(func)
            inner = None if twin is None else decomposition_of(twin)
            if func._schema.is_mutable or inner is None:
                if str(func) in (
                    "aten.empty.memory_format",
                    "aten.empty_strided.default",
                    "aten.new_empty.default",
                    "aten.empty_like.default",
                    "aten.new_empty_strided.default",
                ):
                    return self._blank(func, args, kwargs)
                raise NoLowering(f"no rule for {func}")
            return self.run(func, inner, args, kwargs)
        out = func(*args, **kwargs)
        if func.is_view:
            return out
        assert rule is not None
        self._compute(func, rule, args, kwargs, out)
        return out

    def run(self, op: OpOverload, decomposition: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a decomposition of `op` under this interpreter.

        Raises:
            NoLowering: the decomposition leads back to `op`.
        """
        if op in self.open:
            raise NoLowering(f"the decomposition of {op} leads back to it")
        self.open.append(op)
        try:
            with self:
                return decomposition(*args, **kwargs)
        finally:
            self.open.pop()

    def _blank(self, func: OpOverload, args: Any, kwargs: Any) -> torch.Tensor:
        out = func(*args, **{**kwargs, "device": torch.device("meta")})
        self._store(out, jnp.zeros(tuple(out.shape), JAX_DTYPE[out.dtype]))
        return out

    def _compute(self, func: OpOverload, rule: Any, args: Any, kwargs: Any, out: Any) -> None:
        def enter(leaf: Any) -> Any:
            return self.value(leaf) if isinstance(leaf, torch.Tensor) else leaf

        schema = func._schema
        kept = {
            k: map_leaves(enter, v)
            for k, v in kwargs.items()
            if not any(a.is_out and a.name == k for a in schema.arguments)
        }
        targets = [t for t in leaves([out]) if isinstance(t, torch.Tensor)]
        inner = Context(tuple(spec_of(t) for t in targets), bounds=self.cx.bounds)
        results = apply_rule(rule, inner, [map_leaves(enter, a) for a in args], kept)
        self.cx.checks.extend(inner.checks)
        for t, value in zip(targets, conform(str(func), results, inner.out), strict=True):
            self._store(t, value)


def _prim_in_aten(func: OpOverload) -> Callable[..., Any]:
    """The ATen spelling of a prim that a reference implementation uses."""
    name = func._schema.name.partition("::")[2]
    prim = getattr(torch._prims, name, None)
    impl = getattr(prim, "impl_aten", None)
    if impl is None:
        raise NoLowering(f"no ATen form of {func}")
    return impl


def lower_by_decomposition(op: OpOverload, args: Any, kwargs: dict[str, Any], cx: Context) -> list[jax.Array]:
    """The results of `op`, computed by running torch's decomposition over JAX values.

    Raises:
        NoLowering: torch has no decomposition, or it leads to an op without a rule.
    """
    decomposition = decomposition_of(op)
    if decomposition is None:
        raise NoLowering(f"{op} has no lowering and no decomposition")
    interpreter = Interpreter(cx)

    def enter(leaf: Any) -> Any:
        if isinstance(leaf, Hoisted):
            # A decomposition takes numbers as numbers: it may branch on them.
            raise NoLowering(f"{op} would need the value of a hoisted scalar")
        return interpreter.bind(leaf) if isinstance(leaf, jax.Array) else leaf

    bound = [map_leaves(enter, a) for a in args]
    named = {k: map_leaves(enter, v) for k, v in kwargs.items()}
    with torch.no_grad():
        out = interpreter.run(op, decomposition, bound, named)
    return [interpreter.value(t) for t in leaves([out]) if isinstance(t, torch.Tensor)]
