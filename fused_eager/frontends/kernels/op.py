"""The op: a decorated JAX function as something to call with tensors, and as an op in `torch.ops`.

A call takes its arguments apart into tensors, numbers and static values, finds the program for the static ones, and
calls the torch op of `dispatch` with it. What happens then (autograd, recording, running) is torch's and the runtime's
business. So the op itself is a composition of ops, with no kernel of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch.utils import _pytree

from fused_eager.fusion_rules.spec import JAX_DTYPE

from ...quiet import uncompiled
from ..context.imports import after_import
from ..context.tracers import DYNAMO, have_called, have_traced, leave_us_out
from . import program as programs
from . import recipes, shapes
from .content import Content, NoContent, digest_of
from .dispatch import define, packet, take_none
from .program import KernelError, Mode, Program
from .signature import MISSING, NUMBER, STATIC, TENSOR, TENSORS, Parameter, Signature

Tensor = torch.Tensor
_NARROW = frozenset({torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.bool})
_FLOATS = (float, torch.SymFloat)  # the second in a graph of Dynamo's, where a float varies
LOWER = "lower"  # of an argument's autocast rule: the dtype that autocast computes products in


class Static:
    """In a pytree of arguments: a leaf that is part of the program."""

    __slots__ = ("value",)

    def __init__(self, value: Any):
        self.value = value


class JaxOp:
    """A JAX function as a torch op: called with tensors it returns tensors.

    Attributes:
        name: as in `torch.ops`, like "mylib::rotary".
        function: the JAX function.
        schema: torch's; "" where a pytree is among the arguments or results.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        name: str,
        signature: Signature,
        mutates: Sequence[str],
        autocast: Mapping[str, Any],
        options: Mapping[str, Any],
    ):
        functools.update_wrapper(self, function)
        self.function = function
        self.name = name
        self.schema = signature.schema
        self.signature = signature
        self.mutates = tuple(mutates)
        self._autocast = dict(autocast)
        self._options = dict(options)
        self._parameters = signature.parameters
        self._ops = packet(name)
        self._content: Content | None = None
        self._bases: dict[Hashable, Program] = {}
        self._versions: dict[str, str] = {}
        self.named = False  # until `declare` has entered it in `torch.ops`, and until another one has the name
        recipes.offer(name, self._remade)
        self._namespace, _, self._base = name.partition("::")
        self.as_node = self.apply  # for torch.compile, where there is no schema
        if not self.schema:
            have_called(self)

    def __repr__(self) -> str:
        return f"<jax_op {self.name}{self.schema}>"

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    # ---- calls ---------------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the op.

        Raises:
            KernelError: an argument is not what the declaration says.
            Exception: what the function raises while JAX traces it, from its own line.
        """
        if torch.compiler.is_compiling():
            if not self.schema:
                return self.as_node(*args, **kwargs)
            op = getattr(getattr(torch.ops, self._namespace), self._base)
            # What is exported is loaded in other processes, which know the op by its name.
            overload = "default" if torch.compiler.is_exporting() and self.has_name() else self.version()
            return getattr(op, overload)(*args, **kwargs)
        return self.apply(*args, **kwargs)

    def has_name(self) -> bool:
        """Whether the op's name in `torch.ops` stands for this function, and not for one declared later."""
        return self.named

    def version(self) -> str:
        """The overload in `torch.ops` that stands for what the function is now: its name has a part of a digest, so
        that what Dynamo and its caches keep of a graph is of this very function, of programs that are made of it as
        they are made now, and of JAX's switches as they are."""
        digest = programs.digest(self._current().digest, programs.mode_of(jax.config.jax_enable_x64))
        found = self._versions.get(digest)
        if found is None:
            found = self._versions[digest] = f"v{digest[:16]}"
            define(self.name, found, self.schema, self.apply)
        return found

    def apply(self, *args: Any, **kwargs: Any) -> Any:
        """The op as a composition of the ops that `dispatch` defines."""
        values = self._bound(args, kwargs)
        operands, numbers, found = self._taken(values)
        if not operands:
            take_none(self.name)
        results = self._ops["call"](operands, numbers, found.name)
        return self._returned(found, values, operands, numbers, results)

    def taken(self, *args: Any, **kwargs: Any) -> tuple[list[Tensor], list[int | float], Program]:
        """What a call comes to: its tensors, its numbers and the program for all else."""
        return self._taken(self._bound(args, kwargs))

    def _taken(self, values: list[Any]) -> tuple[list[Tensor], list[int | float], Program]:
        operands: list[Tensor] = []
        numbers: list[int | float] = []
        static: list[Hashable] = []
        for p, value in zip(self._parameters, values, strict=True):
            self._take(p, value, operands, numbers, static)
        if self._autocast:
            operands = self._cast(values, operands)
        if any(type(n) is int and not -(2**31) <= n < 2**31 for n in numbers) and all(
            t.dtype in _NARROW for t in operands
        ):
            raise KernelError(f"{self.name} was given an int of more than 32 bits, and no tensor holds such")
        return operands, numbers, self._program(operands, numbers, static, values)

    def _bound(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        parameters = self._parameters
        if len(args) == len(parameters) and not kwargs and not any(p.keyword for p in parameters):
            return list(args)
        positional = [p for p in parameters if not p.keyword]
        if len(args) > len(positional):
            raise KernelError(f"{self.name} takes {len(positional)} arguments by position, and {len(args)} were given")
        given = {p.name: a for p, a in zip(positional, args)}  # noqa: B905 - fewer may be given
        for name, value in kwargs.items():
            if name in given or all(p.name != name for p in parameters):
                own = ", ".join(p.name for p in parameters)
                why = "twice" if name in given else f"which it has not; its parameters are {own}"
                raise KernelError(f"{self.name} was given {name!r} {why}")
            given[name] = value
        missing = [p.name for p in parameters if p.name not in given and p.default is MISSING]
        if missing:
            raise KernelError(f"{self.name} was not given {', '.join(missing)}")
        return [given.get(p.name, p.default) for p in parameters]

    def _take(
        self, p: Parameter, value: Any, operands: list[Tensor], numbers: list[int | float], static: list[Hashable]
    ) -> None:
        """Take one argument apart. What goes to `static` says all that the other two lists do not."""
        kind = p.kind
        if kind is TENSOR:
            if isinstance(value, Tensor):
                operands.append(value)
                static.append(1)
            elif value is None and p.optional:
                static.append(0)
            else:
                raise self._unfit(p, value, "a tensor")
        elif kind is NUMBER:
            value = _of_python(value)
            if type(value) is int and p.schema != "int":
                value = float(value)
            if type(value) not in ((int, torch.SymInt) if p.schema == "int" else _FLOATS):
                raise self._unfit(p, value, "an int" if p.schema == "int" else "a float")
            if type(value) is int and not -(2**63) <= value < 2**63:
                raise self._unfit(p, value, "an int of 64 bits")
            numbers.append(value)
        elif kind is TENSORS:
            if not isinstance(value, (list, tuple)) or not all(isinstance(t, Tensor) for t in value):
                raise self._unfit(p, value, "a list of tensors")
            operands += value
            static.append(len(value))
        elif kind is STATIC:
            static.append(self._static(p, value))
        else:
            leaves, spec = _leaves(value)
            for leaf in leaves:
                if isinstance(leaf, Tensor):
                    operands.append(leaf)
                    static.append(Tensor)
                elif type(leaf) in _FLOATS:
                    numbers.append(leaf)
                    static.append(float)
                else:
                    static.append(self._static(p, leaf))
            static.append(str(spec))

    def _static(self, p: Parameter, value: Any) -> Hashable:
        if isinstance(value, torch.SymInt):  # what it is here is guarded from here on
            value = int(value)
        elif isinstance(value, torch.SymBool):
            value = bool(value)
        elif isinstance(value, torch.SymFloat):
            value = float(value)
        if isinstance(value, Tensor):
            raise self._unfit(p, value, "static, and so no tensor")
        if isinstance(value, list):
            value = tuple(value)
        try:
            hash(value)
        except TypeError:
            try:  # part of the program by value
                return ("by value", digest_of(value, f"argument {p.name!r} of {self.name}"))
            except NoContent as error:
                raise KernelError(str(error)) from error
        return type(value), value

    def _unfit(self, p: Parameter, value: Any, wanted: str) -> KernelError:
        kind = type(value).__name__
        shown = f"a {kind}" if isinstance(value, Tensor) else f"{value!r:.60} (of type {kind})"
        return KernelError(f"{self.name} was given {shown} for {p.name!r}, which has to be {wanted}")

    def _cast(self, values: Sequence[Any], operands: list[Tensor]) -> list[Tensor]:
        """Operands as autocast would have them, by the rule of their argument."""
        done: list[Tensor] = []
        at = 0
        for p, value in zip(self._parameters, values, strict=True):
            count = sum(isinstance(leaf, Tensor) for leaf in _pytree.tree_leaves(value))
            rule = self._autocast.get(p.name)
            for t in operands[at : at + count]:
                kind = t.device.type
                if rule is not None and t.is_floating_point() and torch.is_autocast_enabled(kind):
                    wanted = torch.get_autocast_dtype(kind) if rule == LOWER else rule
                    t = t.to(wanted) if t.dtype != torch.float64 else t
                done.append(t)
            at += count
        return done

    # ---- programs ------------------------------------------------------------------------------------------------

    def _program(
        self, operands: Sequence[Tensor], numbers: Sequence[int | float], static: Sequence[Any], values: Sequence[Any]
    ) -> Program:
        given = [v for v in values if isinstance(v, torch.dtype)]
        mode = programs.mode_of(programs.is_wide([*given, *[t.dtype for t in operands]], numbers))
        content = self._current()
        key = content.digest, mode, tuple(static)
        found = self._bases.get(key)
        if found is None:
            found = self._bases[key] = self._made(content.digest, mode, values)
        return found

    def _current(self) -> Content:
        content = self._content
        if content is not None and content.is_current():
            return content
        try:
            self._content = content = Content(self._base, self.function, self._options)
        except NoContent as error:
            raise KernelError(
                f"{self.name} cannot be an op: {error}. What a function refers to is part of what is compiled, so it "
                "has to be plain values, arrays, functions and classes"
            ) from error
        return content

    def _made(self, content: str, mode: Mode, values: Sequence[Any]) -> Program:
        plan = [self._plan(p, value) for p, value in zip(self._parameters, values, strict=True)]
        stable = [
            (p.name, p.kind, p.keyword, digest_of(told, f"argument {p.name!r} of {self.name}"))
            for p, (told, _) in zip(self._parameters, plan, strict=True)
        ]
        name = self.name
        digest = programs.digest(content, mode, stable, self.mutates, self.signature.returns)
        function, parameters, builders = self.function, self._parameters, [build for _, build in plan]

        def call(operands: list[Any], numbers: list[Any]) -> tuple[list[Any], Any]:
            arrays, scalars = iter(operands), iter(numbers)
            given = [build(arrays, scalars) for build in builders]
            args = [v for p, v in zip(parameters, given, strict=True) if not p.keyword]
            named = {p.name: v for p, v in zip(parameters, given, strict=True) if p.keyword}
            return self._flat(function(*args, **named))

        recipe = recipes.of_op(name, content, mode, [_entry(p, v) for p, v in zip(parameters, values, strict=True)])
        return programs.known(Program(name, digest, call, mode, recipe))

    def _remade(self, content: str, mode: Mode, entries: Sequence[Any]) -> Program | None:
        """A program by its recipe, if this is the function that it was of."""
        digest = self._current().digest
        if not digest.startswith(content) or len(entries) != len(self._parameters):
            return None
        values = [
            [None] * e if p.kind is TENSORS else None if p.kind is TENSOR and not e else e
            for p, e in zip(self._parameters, entries, strict=True)
        ]
        return self._made(digest, mode, values)

    def _plan(self, p: Parameter, value: Any) -> tuple[Any, Callable[[Any, Any], Any]]:
        """What is fixed of an argument, as plain values, and what makes it of arrays and scalars again."""
        if p.kind is TENSOR:
            missing = value is None
            return missing, lambda arrays, scalars: None if missing else next(arrays)
        if p.kind is NUMBER:
            return None, lambda arrays, scalars: next(scalars)
        if p.kind is TENSORS:
            count = len(value)
            return count, lambda arrays, scalars: [next(arrays) for _ in range(count)]
        if p.kind is STATIC:
            fixed = _fixed(value)
            return fixed, lambda arrays, scalars: fixed
        leaves, spec = _leaves(value)
        fixed = [
            Tensor if isinstance(x, Tensor) else float if type(x) in _FLOATS else Static(_fixed(x)) for x in leaves
        ]

        def build(arrays: Any, scalars: Any) -> Any:
            whole = [next(arrays) if x is Tensor else next(scalars) if x is float else x.value for x in fixed]
            return _pytree.tree_unflatten(whole, spec)

        return (str(spec), [x.value if isinstance(x, Static) else [x.__name__] for x in fixed]), build

    def _flat(self, returned: Any) -> tuple[list[Any], Any]:
        """What the function returned as a flat list: new values of the arguments it writes, last."""
        declared, mutated = self.signature.returns, len(self.mutates)
        if mutated and declared == 0:
            returned = (returned,) if mutated == 1 and not isinstance(returned, tuple) else returned
        leaves, tree = jax.tree_util.tree_flatten(returned)
        wanted = declared if declared is None or declared < 0 else declared + mutated
        if wanted is not None and wanted >= 0 and len(leaves) != wanted:
            what = f"{declared} results" + (f" and new values of {', '.join(self.mutates)}" if mutated else "")
            raise KernelError(f"{self.name} returned {len(leaves)} arrays, and is declared to return {what}")
        for leaf in leaves:
            if not isinstance(leaf, (jax.Array, int, float, complex, bool)) and not hasattr(leaf, "dtype"):
                raise KernelError(f"{self.name} returned a {type(leaf).__name__}; it may return arrays and numbers")
        return [jnp.asarray(leaf) for leaf in leaves], tree

    def _returned(
        self, found: Program, values: Sequence[Any], operands: Sequence[Tensor], numbers: Any, results: list[Tensor]
    ) -> Any:
        if self.mutates:
            results = self._write(values, results)
        declared = self.signature.returns
        if declared == 1:
            return results[0]
        if declared is None:
            tree = found.traced(shapes.concrete(operands), shapes.kinds_of(numbers)).tree
            return jax.tree_util.tree_unflatten(tree, results)
        return None if declared == 0 else list(results) if declared < 0 else tuple(results)

    def _write(self, values: Sequence[Any], results: list[Tensor]) -> list[Tensor]:
        """Write the last results into the arguments that the op is declared to change."""
        split = len(results) - len(self.mutates)
        by_name = {p.name: v for p, v in zip(self._parameters, values, strict=True)}
        for name, new in zip(self.mutates, results[split:], strict=True):
            target = by_name[name]
            if new.shape != target.shape or new.dtype != target.dtype:
                raise KernelError(
                    f"{self.name} returned {new.dtype}{list(new.shape)} as the new value of {name!r}, "
                    f"which is {target.dtype}{list(target.shape)}"
                )
        for i, name in enumerate(self.mutates):
            for other in self.mutates[:i]:
                if shapes.share_memory(by_name[other], by_name[name]):
                    raise KernelError(
                        f"{self.name} was given tensors for {other!r} and {name!r} that share memory, and it changes "
                        "both: which of two values is to stay there?"
                    )
        for name, new in zip(self.mutates, results[split:], strict=True):
            by_name[name].copy_(new)
        return results[:split]


def _of_python(value: Any) -> Any:
    """A number of numpy's, as `1 / np.sqrt(n)` is one, as Python's own."""
    return value.item() if isinstance(value, (np.floating, np.integer)) else value


def _leaves(tree: Any) -> tuple[list[Any], Any]:
    leaves, spec = _pytree.tree_flatten(tree)
    return [x.item() if isinstance(x, np.floating) else x for x in leaves], spec


def _entry(p: Parameter, value: Any) -> Any:
    """What a recipe says of an argument."""
    if p.kind is TENSORS:
        return len(value)
    if p.kind is STATIC:
        return int(value) if isinstance(value, torch.SymInt) else value
    return {TENSOR: value is not None, NUMBER: None}.get(p.kind, object)


def _fixed(value: Any) -> Any:
    """A static value as the function gets it."""
    if isinstance(value, torch.SymInt):
        return int(value)
    if isinstance(value, list):
        return tuple(value)
    if isinstance(value, torch.dtype) and value in JAX_DTYPE:
        return JAX_DTYPE[value]
    return value


have_traced(JaxOp.__call__)
uncompiled(JaxOp.apply)
after_import(DYNAMO, nullcontext, leave_us_out)
for constant in (JaxOp.version, JaxOp.has_name):
    vars(constant)["_dynamo_marked_constant"] = True  # torch._dynamo.assume_constant_result
