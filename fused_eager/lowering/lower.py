"""Lowering: a region becomes one JAX function over the homes of its inputs."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fused_eager.fusion_rules.geometry import Geometry, disjoint, filled, is_dense, overwrite, read, reinterpret, write
from fused_eager.fusion_rules.lower import lower
from fused_eager.fusion_rules.lowering import Check, Hoisted, NoLowering, map_leaves

from ..planning.donation import guards
from ..planning.plan import Region
from ..tracing.stream import Hole, Node, Ref, Use, starts
from .failed import NodeFailed
from .overlap import Behind, Writes, behind_results, reads_disjoint
from .rewrites import LAYOUTS


@dataclass(eq=False)
class Function:
    """A region as a function of `(*inputs, floats, ints, *scratch)`, to be traced once; it does not read scratch.

    `floats` and `ints` are the hoisted numbers of all nodes in order, as float64 and int64 vectors: two arguments,
    however many learning rates there are. It returns the outputs and one int64 array of shape `[checks, 2]` with
    (failed, offending value). `checks` holds, after tracing, (node index, check) for each row.
    """

    nodes: Sequence[Node]
    region: Region
    bounds: bool
    checks: list[tuple[int, Check]] = field(default_factory=list)
    behind: Behind = field(default_factory=dict)

    def __call__(self, *arrays: jax.Array) -> tuple[list[jax.Array], jax.Array]:
        self.checks.clear()
        floats, ints = arrays[len(self.region.inputs) :][:2]
        homes: dict[int, jax.Array] = dict(zip(self.region.inputs, arrays, strict=False))
        views: dict[Use, jax.Array] = {}
        self.behind.clear()
        numbers = {float: iter(range(floats.size)), int: iter(range(ints.size))}
        source = {float: floats, int: ints}
        layouts = LAYOUTS.here(self.nodes, self.region)
        for i in self.region.nodes:
            node = self.nodes[i]
            scalars = [Hoisted(source[type(s)][next(numbers[type(s)])], type(s)) for s in node.scalars]
            reads = []
            for use in node.uses:
                if use.start is None and use in views:
                    reads.append(views[use])
                    continue
                try:
                    reads.append(_read(homes[use.vid], use, scalars))
                except Exception as error:
                    raise NodeFailed(i, f"a view cannot be lowered: {error}") from error
                if use.start is None:
                    views[use] = reads[-1]
            self._node(i, node, reads, scalars, homes, layouts)
            self._guard(node, homes, arrays)
            layouts.passed(node)
        rows = [jnp.stack([c.bad.astype(jnp.int64), c.value]) for _, c in self.checks]
        flags = jnp.stack(rows) if rows else jnp.zeros((1, 2), jnp.int64)
        return [_by_rows(homes[v]) for v in self.region.outputs], flags

    def _guard(self, node: Node, homes: dict[int, jax.Array], arrays: Sequence[jax.Array]) -> None:
        """What a node writes over an input that has to be kept is that input where a check before it has failed.

        Its readers get that, too: with one value for them and another one handed out, XLA:TPU makes two loops of an
        optimizer's step, each over all of its memory.
        """
        for result in node.results if self.checks else ():
            if result.vid not in self._guards:
                continue
            p, before = self._guards[result.vid]
            bad = [c.bad for i, c in self.checks if i in before]
            if bad:
                failed = functools.reduce(lax.bitwise_or, bad)
                homes[result.vid] = lax.select(failed, arrays[p], homes[result.vid])

    @functools.cached_property
    def _guards(self) -> dict[int, tuple[int, frozenset[int]]]:
        """Outputs that are written over an input: where that is among the inputs, and the nodes they depend on."""
        r = self.region
        found = guards(self.nodes, r.nodes, r.inputs, r.outputs, r.donated)
        return {r.outputs[k]: (p, before) for k, p, before in found}

    def _node(
        self,
        index: int,
        node: Node,
        reads: list[jax.Array],
        scalars: list[Hoisted],
        homes: dict[int, jax.Array],
        layouts: Any,
    ) -> None:
        def fill(leaf: Any) -> Any:
            if isinstance(leaf, Ref):
                return reads[leaf.index]
            return scalars[leaf.index] if isinstance(leaf, Hole) else leaf

        if node.twin is None:
            raise NodeFailed(index, "ATen has no functional overload of it")
        outs = {a.name for a in node.op._schema.arguments if a.is_out}
        args = [map_leaves(fill, a) for a in node.args]
        kwargs = {k: map_leaves(fill, v) for k, v in node.kwargs.items() if k not in outs}
        specs = tuple(r.spec for r in node.results)
        try:
            with disjoint(reads_disjoint(node, self.behind)):
                values, checks = lower(node.twin, args, kwargs, specs, self.bounds, layouts.places(node, reads))
        except NoLowering as error:
            raise NodeFailed(index, str(error), lasting=True) from None
        except Exception as error:
            raise NodeFailed(index, f"its lowering failed: {type(error).__name__}: {error}") from error
        self.checks.extend((index, c) for c in checks)
        writes, read = Writes(node, self.behind), behind_results(node, self.behind)
        for result, value, start in zip(node.results, values, starts(node), strict=True):
            dtype, shape = result.home
            with disjoint(result.base is None or writes.are_disjoint(result)):
                if result.base is None:
                    homes[result.vid] = filled(shape, dtype, result.geometry, value)
                elif start is None:
                    homes[result.vid] = write(homes[result.base], result.geometry, value)
                else:
                    homes[result.vid] = _write_at(homes[result.base], result.geometry, value, scalars[start].value)
            # A written part is the end of a loop: what reads it later is computed from finished memory.
            self.behind[result.vid] = read if result.base is None else frozenset()


def _by_rows(home: jax.Array) -> jax.Array:
    """`home` as a result: JAX would have it lie in memory as the equation asks that it comes from (images by pixels,
    say), and a reshape asks for nothing."""
    return home if home.ndim < 2 else lax.reshape(lax.reshape(home, (home.size,)), home.shape)


def _read(home: jax.Array, use: Use, scalars: list[Hoisted]) -> jax.Array:
    if use.start is None:
        return read(home, use.geometry)
    flat = reinterpret(home.reshape(-1), use.geometry.dtype)
    return read(lax.dynamic_slice(flat, (scalars[use.start].value,), (use.extent,)), use.geometry)


def _write_at(home: jax.Array, g: Geometry, value: jax.Array, start: jax.Array) -> jax.Array:
    """`home` with a part that begins at element `start` overwritten: its view `g`, of the same dtype."""
    if 0 in g.size:
        return home
    flat = home.reshape(-1)
    if is_dense(g.size, g.stride):
        return overwrite(flat, filled((math.prod(g.size),), g.dtype, g, value), (start,)).reshape(home.shape)
    extent = 1 + sum((n - 1) * s for n, s in zip(g.size, g.stride, strict=True))
    part = write(lax.dynamic_slice(flat, (start,), (extent,)), g, value)
    with disjoint(False):  # what lies in the gaps is read of the same value
        return overwrite(flat, part, (start,)).reshape(home.shape)
