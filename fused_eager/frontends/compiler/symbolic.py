"""Symbolic: a function that was traced at several sizes, as one function of sizes that are symbols.

The traces have to be the same steps on the same values, of which only whole numbers differ: those of shapes, and those
that are computed with. Each has to be a polynomial in the sizes, of the second degree at most in each, which is found
at some of the samples and has to hold at the others. Then the steps are traced once more, with JAX's symbols.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from fractions import Fraction
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from fused_eager.fusion_rules.padded import Refused

from ...lowering.padding import formula_of
from ...lowering.straight_line import CALLS

# Sizes at which numbers are found, and at which they are checked, for each symbol in turn: no two symbols are ever
# equal, and odd and even ones, multiples of three and others are among them.
_FIT = ((6, 11, 17), (7, 13, 20), (8, 15, 22))
_CHECK = ((20, 131), (27, 260), (31, 75))
MOST = len(_FIT)  # symbols


class Unlike(Refused):
    """Why the traces are not one function of the sizes."""


def samples(names: Sequence[str], ranges: Mapping[str, tuple[int, float]]) -> list[dict[str, int]]:
    """Sizes to trace at: the first three to the power of the number of names are a grid, the others check it.

    Raises:
        Unlike: there are too many names, or the range of one is too narrow.
    """
    if len(names) > MOST:
        raise Unlike(f"{len(names)} sizes vary, and {MOST} may")
    fit, check = [], []
    for name, *wanted in zip(names, _FIT, _CHECK, strict=False):
        low, high = ranges[name]
        found = [n for n in (*wanted[0], *wanted[1]) if low <= n <= high]
        more = (n for n in itertools.count(max(low, 2)) if n not in found)
        while len(found) < 5:
            n = next(more)
            if n > high:
                raise Unlike(f"{name} has less than five values between {low} and {high}")
            found.append(n)
        fit.append(found[:3])
        check.append(found[3:5])
    points = [*itertools.product(*fit), *zip(*check, strict=True)]
    return [dict(zip(names, point, strict=True)) for point in points]


class Polynomials:
    """Numbers, known at all samples, as polynomials in symbols.

    `symbols` are JAX's, by the names in the samples.
    """

    def __init__(self, samples: Sequence[Mapping[str, int]], symbols: Mapping[str, Any]):
        self.samples = samples
        self.symbols = symbols
        self.names = list(symbols)
        grid = samples[: 3 ** len(self.names)]
        # For each symbol, the coefficients of the three parabolas that are 1 at one of its sizes and 0 at the others.
        self.bases = [
            _lagrange(sorted({s[name] for s in grid}, key=[s[name] for s in grid].index)) for name in self.names
        ]
        self._known: dict[tuple[int, ...], Any] = {}

    def number(self, values: Sequence[int]) -> Any:
        """The whole number that is so much at the samples: an int, or an expression of JAX's.

        Raises:
            Unlike: there is no such polynomial.
        """
        key = tuple(map(int, values))
        if any(a != b for a, b in zip(key, values, strict=True)):
            raise Unlike("a size is a fraction of another")
        if len(set(key)) == 1:
            return key[0]
        if key not in self._known:
            self._known[key] = self._fitted(key)
        return self._known[key]

    def _fitted(self, values: tuple[int, ...]) -> Any:
        count = 3 ** len(self.names)
        terms: dict[tuple[int, ...], Fraction] = {}
        for value, at in zip(values[:count], itertools.product(range(3), repeat=len(self.names)), strict=True):
            for powers in itertools.product(range(3), repeat=len(self.names)):
                share = math.prod(
                    (b[k][p] for b, k, p in zip(self.bases, at, powers, strict=True)), start=Fraction(value)
                )
                terms[powers] = terms.get(powers, Fraction(0)) + share
        terms = {powers: c for powers, c in terms.items() if c}
        if any(c.denominator != 1 for c in terms.values()):
            raise Unlike("a size is a fraction of another")
        for value, sample in zip(values[count:], self.samples[count:], strict=True):
            if value != sum(c * math.prod(sample[n] ** p for n, p in zip(self.names, powers, strict=True))
                            for powers, c in terms.items()):  # fmt: skip
                raise Unlike("a size is no polynomial in the others")
        made: Any = 0
        for powers, c in terms.items():
            made = made + int(c) * math.prod(self.symbols[n] ** p for n, p in zip(self.names, powers, strict=True) if p)
        return made


def _lagrange(xs: Sequence[int]) -> list[list[Fraction]]:
    found = []
    for k, x in enumerate(xs):
        a, b = (y for i, y in enumerate(xs) if i != k)
        over = (x - a) * (x - b)
        found.append([Fraction(a * b, over), Fraction(-a - b, over), Fraction(1, over)])
    return found


def numbers_of(vectors: Sequence[Sequence[Any]], polynomials: Polynomials, dtype: str) -> Any:
    """Python numbers that a function is called with, one vector at each sample, as an array.

    Raises:
        Unlike: they are not so many at each size, or one is no function of the sizes that is known.
    """
    if len({len(v) for v in vectors}) > 1:
        raise Unlike("it is not called with as many numbers at each size")
    run = _Run(polynomials)
    made = [jnp.asarray(run.scalar(values, np.dtype(dtype))) for values in zip(*vectors, strict=True)]
    return jnp.stack(made) if made else jnp.zeros(0, dtype)


def generalised(traces: Sequence[ClosedJaxpr], polynomials: Polynomials) -> Callable[..., list[Any]]:
    """The function of traces at all samples, of arrays whose shapes have the symbols.

    What it is called under has to be a trace of JAX's for an export. It raises Unlike.
    """

    def call(*arrays: Any) -> list[Any]:
        return _Run(polynomials).closed(traces, arrays)

    return call


class _Run:
    """The traces, step by step."""

    def __init__(self, polynomials: Polynomials):
        self.number = polynomials.number

    def closed(self, traces: Sequence[ClosedJaxpr], arrays: Sequence[Any]) -> list[Any]:
        jaxprs = [t.jaxpr for t in traces]
        constants = [self._constant(values) for values in zip(*(t.consts for t in traces), strict=True)]
        return self.open(jaxprs, [*constants, *arrays])

    def open(self, jaxprs: Sequence[Jaxpr], arrays: Sequence[Any]) -> list[Any]:
        """The results of jaxprs, of their constants and arguments."""
        numbers: list[dict[Any, int]] = [{} for _ in jaxprs]  # of variables, in the order in which they come
        values: list[Any] = []

        def bind(variables: Sequence[Any], value: Any) -> None:
            for known, v in zip(numbers, variables, strict=True):
                known[v] = len(values)
            values.append(value)

        def taken(atoms: Sequence[Any]) -> Any:
            if len({type(a) is Literal for a in atoms}) > 1:
                raise Unlike("a value is a number at another size")
            if isinstance(atoms[0], Literal):
                return self.scalar([a.val for a in atoms], atoms[0].aval.dtype)
            found = {known[a] for known, a in zip(numbers, atoms, strict=True)}
            if len(found) > 1:
                raise Unlike("another value is taken at another size")
            return values[found.pop()]

        for variables, value in zip(
            zip(*([*j.constvars, *j.invars] for j in jaxprs), strict=True), arrays, strict=True
        ):
            bind(variables, value)
        if len({len(j.eqns) for j in jaxprs}) > 1:
            raise Unlike("it has not as many steps at each size")
        for equations in zip(*(j.eqns for j in jaxprs), strict=True):
            if len({(e.primitive, len(e.invars), len(e.outvars)) for e in equations}) > 1:
                raise Unlike("its steps are others at another size")
            given = [taken(atoms) for atoms in zip(*(e.invars for e in equations), strict=True)]
            made = self._step(equations, given)
            for variables, value in zip(zip(*(e.outvars for e in equations), strict=True), made, strict=True):
                self._check(variables, value, equations[0].primitive.name)
                bind(variables, value)
        return [taken(atoms) for atoms in zip(*(j.outvars for j in jaxprs), strict=True)]

    def _check(self, variables: Sequence[Any], value: Any, name: str) -> None:
        """See that a result has the shape that it has at all samples."""
        shape = [self.number(sizes) for sizes in zip(*(v.aval.shape for v in variables), strict=True)]
        if shape != list(value.shape) or value.dtype != variables[0].aval.dtype:
            raise Unlike(f"{name} makes something of another shape")

    def _step(self, equations: Sequence[Any], given: list[Any]) -> Sequence[Any]:
        name, params = equations[0].primitive.name, [e.params for e in equations]
        if equations[0].effects:
            raise Unlike(f"{name} does more than compute")
        if name in CALLS:
            inner = [p[CALLS[name]] for p in params]
            return self.closed([j if isinstance(j, ClosedJaxpr) else ClosedJaxpr(j, ()) for j in inner], given)
        if name in _CONTROL:
            return _CONTROL[name](self, params, given)
        merged = {key: self._merged([p[key] for p in params], f"{key} of {name}") for key in params[0]}
        made = equations[0].primitive.bind(*given, **merged)
        return made if equations[0].primitive.multiple_results else [made]

    def _merged(self, values: Sequence[Any], what: str) -> Any:
        first = values[0]
        if any(type(v) is not type(first) for v in values):
            raise Unlike(f"{what} is of another type at another size")
        if isinstance(first, (Jaxpr, ClosedJaxpr)):
            if len({str(v) for v in values}) > 1:
                raise Unlike(f"{what} is another one at another size")
            return first
        if isinstance(first, (int, np.integer)) and not isinstance(first, (bool, Enum)):
            return self.number(values)
        if isinstance(first, (tuple, list)):
            if len({len(v) for v in values}) > 1:
                raise Unlike(f"{what} is longer at another size")
            parts = [self._merged(each, what) for each in zip(*values, strict=True)]
            return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)
        if dataclasses.is_dataclass(first) and not isinstance(first, type):
            fields = [f.name for f in dataclasses.fields(first)]
            if any(getattr(v, f) != getattr(first, f) for v in values for f in fields):
                raise Unlike(f"{what} is another one at another size")
            return first
        if any(v is not first and v != first for v in values):
            raise Unlike(f"{what} is another one at another size")
        return first

    def _constant(self, values: Sequence[Any]) -> Any:
        arrays = [np.asarray(v) for v in values]
        if len({(a.dtype, a.shape, a.tobytes()) for a in arrays}) > 1:
            if arrays[0].ndim or len({a.dtype for a in arrays}) > 1:
                raise Unlike("a constant depends on the size")
            return self.scalar(values, arrays[0].dtype)
        return values[0]

    def scalar(self, values: Sequence[Any], dtype: Any) -> Any:
        """A number that is computed with: what a lowering makes of a size."""
        found = [np.asarray(v, dtype) for v in values]
        if len({v.tobytes() for v in found}) == 1:
            return found[0]
        real = jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer)
        made = formula_of(found, np.dtype(dtype), self.number) if real else None
        if made is None:
            raise Unlike("a number is no polynomial in the sizes, nor a fraction of one that is")
        formula, whole = made
        return formula(jnp.asarray(whole, "int64")).astype(dtype)

    # ---- control flow ----

    def _ways(self, closed: Sequence[ClosedJaxpr], more: Sequence[Any] = ()) -> Callable[..., list[Any]]:
        return lambda *arrays: self.closed(closed, [*more, *arrays])

    def _cond(self, params: Sequence[Any], given: list[Any]) -> Sequence[Any]:
        ways = [self._ways(closed) for closed in zip(*(p["branches"] for p in params), strict=True)]
        platforms = params[0].get("branches_platforms")
        if not platforms:
            return list(lax.switch(given[0].astype(jnp.int32), ways, *given[1:]))
        named = {name: way for names, way in zip(platforms, ways, strict=True) for name in names or ["default"]}
        return list(lax.platform_dependent(*given[1:], **named))

    def _while(self, params: Sequence[Any], given: list[Any]) -> Sequence[Any]:
        first, second = params[0]["cond_nconsts"], params[0]["cond_nconsts"] + params[0]["body_nconsts"]
        goes_on = self._ways([p["cond_jaxpr"] for p in params], given[:first])
        body = self._ways([p["body_jaxpr"] for p in params], given[first:second])
        return list(lax.while_loop(lambda x: goes_on(*x)[0], lambda x: body(*x), given[second:]))

    def _scan(self, params: Sequence[Any], given: list[Any]) -> Sequence[Any]:
        first, carried = params[0]["num_consts"], params[0]["num_carry"]
        body = self._ways([p["jaxpr"] for p in params], given[:first])

        def step(carry: Any, rows: Any) -> Any:
            made = body(*carry, *rows)
            return made[:carried], made[carried:]

        state, rows = given[first : first + carried], given[first + carried :]
        length = self.number([p["length"] for p in params])
        last, stacked = lax.scan(step, state, rows, length=length, reverse=params[0]["reverse"])
        return [*last, *stacked]


_CONTROL: Mapping[str, Callable[[_Run, Sequence[Any], list[Any]], Sequence[Any]]] = {
    "cond": _Run._cond, "while": _Run._while, "scan": _Run._scan,
}  # fmt: skip
