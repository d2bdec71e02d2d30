"""Check lowerings alone, without the runtime: every ATen op of a program runs natively and through its lowering.

As a command it sweeps torch's op_db: `python -m tests.fusion_rules.harness sin add --dtypes float32,int64`.
"""

from __future__ import annotations

import argparse
import collections
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
import torch
from fused_eager.fusion_rules import platforms
from fused_eager.fusion_rules.lower import lower
from fused_eager.fusion_rules.lowering import Check, Hoisted, NoLowering, leaves, map_leaves
from fused_eager.fusion_rules.rule import functional_twin, hoisted_names
from fused_eager.fusion_rules.spec import JAX_DTYPE, Spec, spec_of
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from fused_eager.xla import enable_x64
from tests.op_db import OP_DB

SEEDED = torch.Tag.nondeterministic_seeded


def to_jax(t: torch.Tensor) -> jax.Array:
    """A JAX array with the values of a tensor, dtype kept; a copy, for eager may write over them next."""
    t = t.detach().resolve_conj().resolve_neg().contiguous()
    if t.dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2):
        return jax.numpy.array(
            t.view(torch.int16 if t.itemsize == 2 else torch.uint8).numpy().view(JAX_DTYPE[t.dtype])
        )
    return jax.numpy.array(t.numpy())


def to_torch(a: jax.Array, like: torch.Tensor) -> torch.Tensor:
    """A tensor with the values of an array."""
    n = np.asarray(a)
    if like.dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2):
        raw = torch.int16 if like.itemsize == 2 else torch.uint8
        return (
            torch.from_numpy(np.ascontiguousarray(n).view(np.int16 if like.itemsize == 2 else np.uint8).copy())
            .view(like.dtype)
            .reshape(like.shape)
            if raw
            else like
        )
    return torch.from_numpy(np.array(n, copy=True)).reshape(like.shape)


class Given:
    """An argument that is part of what is compiled: equal to another of its type that reads the same."""

    def __init__(self, value: Any):
        self.value, self.words = value, (type(value), repr(value))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Given) and self.words == other.words

    def __hash__(self) -> int:
        return hash(self.words)


@functools.lru_cache(256)
def _compiled(
    op: Any, tree: Any, given: tuple[Given | None, ...], avals: tuple[Any, ...], out: tuple[Spec, ...], platform: str
) -> tuple[Callable[..., Any], list[Check]]:
    """A function of the arrays among an op's arguments (None in `given`), and the checks that tracing it finds.

    It is jitted, as the runtime does it: constant folding and fusion are part of what is checked.
    """
    checks: list[Check] = []

    def run(*arrays: Any) -> Any:
        rest = iter(arrays)
        args, kwargs = jax.tree.unflatten(tree, [next(rest) if g is None else g.value for g in given])
        with platforms.lowering_for(platform):  # it may be traced when another is lowered for
            results, found = lower(op, args, kwargs, out)
        checks[:] = found
        return results, [(c.bad, c.value) for c in found]

    return jax.jit(run), checks


def entered(op: Any, args: Any, kwargs: Any) -> tuple[list[Any], dict[str, Any]]:
    """An op's arguments as its lowering takes them: arrays for tensors, and hoisted numbers."""
    holes = hoisted_names(op)

    def enter(name: str, value: Any) -> Any:
        def leaf(x: Any) -> Any:
            if isinstance(x, torch.Tensor):
                return to_jax(x)
            if name in holes and type(x) in (int, float):
                return Hoisted(jax.numpy.asarray(x, type(x)), type(x))
            return x

        return map_leaves(leaf, value)

    with enable_x64(True):
        given = [enter(a.name, v) for a, v in zip(op._schema.arguments, args, strict=False)]
        return given, {k: enter(k, v) for k, v in kwargs.items()}


@dataclass(frozen=True, eq=False)
class Awaited:
    """A lowering that has been traced and not run yet: what it is of, what eager returned, and what it checks."""

    op: str
    wanted: list[torch.Tensor]
    run: Callable[..., Any]
    arrays: list[jax.Array]
    checks: list[Check]
    shown: Sequence[Any] = ()  # the arguments, to be told of


def traced(op: Any, given: list[Any], named: dict[str, Any], targets: list[torch.Tensor]) -> Awaited:
    """An op's lowering on entered arguments, for results like `targets`, traced.

    What has been traced is kept for a while: samples of an op often differ in values alone, and their gradients are
    the same few ops.
    """
    with enable_x64(True):
        flat, tree = jax.tree.flatten([given, named], is_leaf=lambda x: x is None or isinstance(x, torch.dtype))
        arrays = [v for v in flat if isinstance(v, jax.Array)]
        constants = tuple(None if isinstance(v, jax.Array) else Given(v) for v in flat)
        specs = tuple(spec_of(t) for t in targets)
        run, checks = _compiled(op, tree, constants, tuple(a.aval for a in arrays), specs, platforms.current())
        run.trace(*arrays)  # type: ignore[attr-defined]
    wanted = [t.detach().resolve_conj().resolve_neg().clone() for t in targets]
    return Awaited(str(op), wanted, run, arrays, checks)


# Results, and of each check whether it is bad and the value that it is about.
Results = tuple[list[jax.Array], list[tuple[Any, Any]]]
AT_ONCE = 32


def results_of(awaited: Sequence[Awaited]) -> Iterator[tuple[Awaited, Results | Exception]]:
    """Run lowerings, up to 32 compiled together: each takes a sixth of what it would take by itself.

    One that comes several times, with other values, is compiled once and run several times.
    """
    for begin in range(0, len(awaited), AT_ONCE):
        yield from _together(awaited[begin : begin + AT_ONCE])


def _together(awaited: Sequence[Awaited]) -> Iterator[tuple[Awaited, Results | Exception]]:
    rounds: list[dict[Callable[..., Any], Awaited]] = []
    for a in awaited:
        free = next((r for r in rounds if a.run not in r), None)
        if free is None:
            rounds.append(free := {})
        free[a.run] = a
    runs = list(rounds[0])
    if len(runs) == 1:  # it is kept, as a function made for several is not
        yield from [(a, _alone(a)) for a in awaited]
        return
    together = jax.jit(lambda groups: [run(*group) for run, group in zip(runs, groups, strict=True)])
    for some in rounds:
        try:
            with enable_x64(True):
                found = together([some.get(run, rounds[0][run]).arrays for run in runs])
        except Exception:  # whose it is shows when each is by itself
            for a in some.values():
                yield a, _alone(a)
        else:
            yield from [(some[run], r) for run, r in zip(runs, found, strict=True) if run in some]


def _alone(a: Awaited) -> Results | Exception:
    try:
        with enable_x64(True):
            return a.run(*a.arrays)
    except Exception as error:
        return error


class LoweringCheck(TorchDispatchMode):
    """Runs every functional op both ways and records `(op, problem)`; ops without a lowering are counted."""

    def __init__(self, rtol: float | None = None, atol: float | None = None):
        super().__init__()
        self.rtol, self.atol = rtol, atol
        self._problems: list[tuple[str, str]] = []
        self._awaited: list[Awaited] = []
        self.missing: collections.Counter[str] = collections.Counter()
        self._checked: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.is_view or SEEDED in func.tags or any(a.name == "out" or a.is_out for a in func._schema.arguments):
            return func(*args, **kwargs)
        twin = functional_twin(func)
        tensors = [x for x in leaves([args, kwargs]) if isinstance(x, torch.Tensor)]
        plain = all(
            type(x).__module__.startswith("torch") and x.layout == torch.strided and x.dtype in JAX_DTYPE
            for x in tensors
        )
        if twin is None or not plain:
            self.missing[str(func)] += 1
            return func(*args, **kwargs)
        given, named = entered(twin, args, kwargs)  # before eager, which may write over them
        out = func(*args, **kwargs)
        targets = [t for t in leaves([out]) if isinstance(t, torch.Tensor)]
        if any(t.dtype not in JAX_DTYPE or t.layout != torch.strided for t in targets):
            self.missing[str(func)] += 1
            return out
        shown = [tuple(x.shape) if isinstance(x, torch.Tensor) else x for x in leaves([args, kwargs])]
        try:
            found = traced(twin, given, named, targets)
        except NoLowering:
            self.missing[str(func)] += 1
            return out
        except Exception as error:  # a broken row is this harness's finding, whatever it raises
            self._problems.append((str(func), f"{type(error).__name__}: {str(error)[:300]}"))
            return out
        self._awaited.append(replace(found, op=str(func), shown=shown))
        if len(self._awaited) == AT_ONCE:
            self._compare()
        return out

    @property
    def problems(self) -> list[tuple[str, str]]:
        """What has been found so far: (op, what is wrong with its lowering)."""
        self._compare()
        return self._problems

    @property
    def checked(self) -> collections.Counter[str]:
        """How many calls of each op have been compared so far."""
        self._compare()
        return self._checked

    def _compare(self) -> None:
        """Run the lowerings that are awaited, and compare what they return with what eager has returned."""
        awaited, self._awaited = self._awaited, []
        with _disable_current_modes():
            for a, found in results_of(awaited):
                if isinstance(found, Exception):
                    self._problems.append((a.op, f"{type(found).__name__}: {str(found)[:300]}"))
                    continue
                self._checked[a.op] += 1
                for t, r in zip(a.wanted, found[0], strict=True):
                    loose = self.rtol is not None and (t.is_floating_point() or t.is_complex())
                    bounds = {"rtol": self.rtol, "atol": self.atol} if loose else {}
                    try:
                        torch.testing.assert_close(to_torch(r, t), t, equal_nan=True, check_stride=False, **bounds)
                    except AssertionError as error:
                        self._problems.append((a.op, f"args {a.shown}: {str(error)[:400]}"))


jax.tree_util.register_pytree_node(Hoisted, lambda h: ((h.value,), h.kind), lambda kind, c: Hoisted(c[0], kind))


def sweep(names: list[str] | None, dtypes: list[torch.dtype], limit: int = 40, backward: bool = True) -> LoweringCheck:
    """Run op_db samples (forward and, where differentiable, backward) under `LoweringCheck`."""
    mode = LoweringCheck()
    for info in OP_DB:
        if names and info.name not in names and info.formatted_name not in names:
            continue
        for dtype in dtypes:
            if dtype not in info.supported_dtypes("cpu"):
                continue
            grad = backward and info.supports_autograd and dtype in info.supported_backward_dtypes("cpu")
            for i, sample in enumerate(info.sample_inputs("cpu", dtype, requires_grad=grad)):
                if i >= limit:
                    break
                with mode:
                    try:
                        out = info.op(sample.input, *sample.args, **sample.kwargs)
                        for t in leaves([sample.output_process_fn_grad(out)]):
                            if grad and isinstance(t, torch.Tensor) and t.requires_grad:
                                t.sum().abs().backward(retain_graph=True)
                    except (RuntimeError, NotImplementedError) as error:
                        mode.problems.append((info.formatted_name, f"native: {str(error)[:150]}"))
    return mode


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="op_db names; none for all")
    parser.add_argument("--dtypes", default="float32")
    parser.add_argument("--limit", type=int, default=40, help="samples per op and dtype")
    parser.add_argument("--no-backward", action="store_true")
    args = parser.parse_args()
    mode = sweep(args.names, [getattr(torch, d) for d in args.dtypes.split(",")], args.limit, not args.no_backward)
    shown: collections.Counter[str] = collections.Counter()
    for op, problem in mode.problems:
        shown[op] += 1
        if shown[op] <= 2:
            print(f"FAIL {op}: {problem}")
    print("failing:", dict(shown))
    print("without lowering:", dict(mode.missing.most_common()))
    print(f"{sum(mode.checked.values())} calls of {len(mode.checked)} overloads agree or are listed above")


if __name__ == "__main__":
    main()
