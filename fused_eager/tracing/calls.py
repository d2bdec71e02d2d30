"""Calls: an ATen call taken apart, and everything that its structure alone decides, worked out once.

The structure is the overload, the arguments that are part of the computation, and the tensors' sizes, strides and
dtypes. Tensors themselves and hoisted numbers are not part of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch.nn import Parameter

from fused_eager.fusion_rules.geometry import Geometry, home_shape, is_dense, overlaps_itself
from fused_eager.fusion_rules.lowering import leaves, map_leaves
from fused_eager.fusion_rules.spec import JAX_DTYPE, Spec

from ..bounded import Bounded
from ..devices.device import SEEN_AS, Device
from ..devices.home import Home, nbytes_of
from ..devices.host.device import HOST
from . import uniform
from .infer import Inferred, Unknown, infer
from .node import Hole, Ref
from .opinfo import HIDDEN_WRITES, OpInfo
from .pattern import INT64, freeze, pattern
from .rehearsal import OTHER_DTYPES, OTHER_SHAPES, is_beyond, rehearse, rehearse_alone
from .structure import Call, Output, View

Tensor = torch.Tensor
STRIDED = torch.strided
TINY = 1  # elements; such work is done by ATen before XLA would have been asked


CALLS: Bounded[Hashable, Call | Unknown] = Bounded(16_384)
_structures = itertools.count()


class Foreign(Exception):
    """An argument that is not an ordinary tensor of the device; the text says what it is."""


def shape_of(t: Tensor) -> torch.Size | None:
    """A tensor's shape; None of a nested one, and of a lazy module's parameter, which have none."""
    try:
        return t.shape
    except RuntimeError:
        return None


def _kind(t: Tensor) -> str:
    return "nested" if t.is_nested else str(t.layout).removeprefix("torch.")


def take(
    a: Any, hoist: bool, key: list[Any], tensors: list[Tensor], scalars: list[Any], device: Device = HOST
) -> None:
    """Take one argument apart: tensors, hoisted numbers, and the hashable rest."""
    kind = type(a)
    if kind is Tensor or kind is Parameter or isinstance(a, Tensor):
        if not device.holds(a) or a.layout is not STRIDED or a.is_nested:
            raise Foreign(f"a tensor is on {a.device}" if not device.holds(a) else f"a tensor is {_kind(a)}")
        try:
            key += (a.shape, a.stride(), a.dtype)
        except RuntimeError as error:
            raise Foreign(f"a {type(a).__name__} has no shape yet") from error
        tensors.append(a)
        if a.is_neg() or a.is_conj():
            key.append((a.is_neg(), a.is_conj()))
    elif hoist and (kind is float or (kind is int and a in INT64)):
        scalars.append(a)
        key.append(kind)
    elif kind is list or kind is tuple:
        key.append(len(a))
        for x in a:
            take(x, hoist, key, tensors, scalars, device)
    else:
        key.append(a if kind is int or a is None else freeze(a))


def _templates(info: OpInfo, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The arguments with `Ref` for tensors and `Hole` for hoisted numbers, numbered as `_take` takes them."""
    refs = holes = 0

    def leaf(hoist: bool) -> Any:
        def take(a: Any) -> Any:
            nonlocal refs, holes
            kind = type(a)
            if isinstance(a, Tensor):
                refs += 1
                return Ref(refs - 1)
            if hoist and (kind is float or (kind is int and a in INT64)):
                holes += 1
                return Hole(holes - 1, kind)
            return a

        return take

    done = [map_leaves(leaf(i in info.hoisted), a) for i, a in enumerate(args)]
    named = {n: map_leaves(leaf(info.names.index(n) in info.hoisted), kwargs[n]) for n in sorted(kwargs)}
    return done, named


def written(info: OpInfo, args: Any, kwargs: dict[str, Any]) -> tuple[int, ...]:
    """Which tensor arguments the call writes, as positions among its tensors."""
    hidden = HIDDEN_WRITES.get(str(info.op))
    if hidden is not None:
        flag = info.names.index(hidden[1])
        if not (args[flag] if flag < len(args) else kwargs.get(hidden[1], False)):
            return ()
    positions: dict[int, list[int]] = {}
    counter = 0
    for i, value in [*enumerate(args), *((info.names.index(n), kwargs[n]) for n in sorted(kwargs))]:
        count = sum(isinstance(leaf, Tensor) for leaf in leaves([value]))
        positions[i] = list(range(counter, counter + count))
        counter += count
    return tuple(p for i in info.written for p in positions.get(i, []))


def overlap(tensors: Sequence[Tensor], targets: Sequence[int]) -> bool:
    """Whether one of the tensors that are written overlaps itself."""
    return any(overlaps_itself(tuple(tensors[i].shape), tensors[i].stride()) for i in targets)


def _view(t: Tensor) -> View:
    """A view of native memory becomes an input that is just the block it touches, from its first element on.

    So `x[i:i+4]` gives the same region for every i: the offset is an address, not part of the computation.
    """
    size, stride, dtype = tuple(t.shape), t.stride(), t.dtype
    spec = Spec(size, dtype, stride, SEEN_AS)
    dense = is_dense(size, stride)
    if dense:
        block = home_shape(spec)
    else:
        block = (1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True)) if 0 not in size else 0,)
    geometry = Geometry(size, stride, 0, dtype, dtype.is_complex and t.is_conj(), t.is_neg())
    return View(geometry, (dtype, block), dtype.itemsize, spec.nbytes if dense else -1, spec)


def _output(spec: Spec) -> Output:
    home: Home = (spec.dtype, home_shape(spec))
    if not is_dense(spec.shape, spec.strides):
        reach = 1 + sum((n - 1) * s for n, s in zip(spec.shape, spec.strides, strict=True)) if spec.numel else 0
        home = (spec.dtype, (reach,))
    return Output(spec, Geometry(spec.shape, spec.strides, 0, spec.dtype), home, nbytes_of(home))


def _known(
    info: OpInfo, form: Hashable | None, tensors: list[Tensor], args: Any, kwargs: dict[str, Any]
) -> Inferred | Unknown | None:
    """What a call returns, where that is known without inference."""
    if kwargs.get("pin_memory") or info.op._schema.name == "aten::_pin_memory":
        return Unknown("what it returns lies in pinned memory")
    unfit = [t.dtype for t in tensors if t.dtype not in JAX_DTYPE]
    if unfit:
        return Unknown(f"XLA has no {unfit[0]}")
    if info.may_resize:
        return Unknown("ATen may resize what it writes")
    known = uniform.recall(form, tensors)
    return known if known is not None else rehearse_alone(info.op, args, kwargs, tensors)


def _inferred(
    info: OpInfo, tensors: list[Tensor], args: Any, kwargs: dict[str, Any]
) -> tuple[Inferred, str] | Unknown:
    """What a call returns, and why its first run has to be ATen's, or ""."""
    inferred = infer(info.op, args, kwargs, tensors)
    if isinstance(inferred, Unknown):
        return inferred
    if any(s.device.type != "cpu" for s in inferred.fresh):
        return Unknown(f"it makes a tensor on {inferred.fresh[0].device}")
    return rehearse(info.op, args, kwargs, tensors, inferred)


def known_call(
    info: OpInfo, key: tuple[Any, ...], tensors: list[Tensor], args: Any, kwargs: dict[str, Any]
) -> Call | Unknown | None:
    """Work out what the structure of a call decides, and remember it by `key`; None if it takes inference."""
    form = uniform.form(info, key, tensors)
    known = _known(info, form, tensors, args, kwargs)
    if isinstance(known, Inferred):
        uniform.remember(form, tensors, known)
        return make_call(info, key, tensors, args, kwargs, known)
    if known is not None:
        CALLS[key] = known
    return known


def new_call(
    info: OpInfo, key: tuple[Any, ...], tensors: list[Tensor], args: Any, kwargs: dict[str, Any]
) -> Call | Unknown:
    """Work out what the structure of a call decides, and remember it by `key`."""
    known = known_call(info, key, tensors, args, kwargs)
    if known is not None:
        return known
    found = _inferred(info, tensors, args, kwargs)
    if isinstance(found, Unknown):
        CALLS[key] = found
        return found
    inferred, doubt = found
    if not (doubt or is_beyond(info.op, tensors, inferred)):
        uniform.remember(uniform.form(info, key, tensors), tensors, inferred)
    return make_call(info, key, tensors, args, kwargs, inferred, doubt)


def make_call(
    info: OpInfo,
    key: tuple[Any, ...],
    tensors: list[Tensor],
    args: Any,
    kwargs: dict[str, Any],
    inferred: Inferred,
    doubt: str = "",
) -> Call:
    """What the structure of a call decides, remembered by `key`, where what it returns is known."""
    targets = written(info, args, kwargs)
    done, named = _templates(info, args, kwargs)
    views = tuple([_view(t) for t in tensors])
    seen = iter([v.geometry for v in views])
    hoisted = info.hoisted
    rows = tuple([row for i, a in enumerate(args) for row in pattern((a,), seen, i in hoisted)])
    call = Call(
        inferred.template,
        done,
        named,
        views,
        tuple(_output(s) for s in inferred.fresh),
        targets,
        overlap(tensors, targets),
        inferred.alias,
        all(t.numel() <= TINY for t in tensors) and all(s.numel <= TINY for s in inferred.fresh),
        info.island or doubt,
        next(_structures),
        set(),
        rows,
        tuple([(n, pattern((kwargs[n],), seen, info.names.index(n) in hoisted)) for n in sorted(kwargs)]),
        doubt if doubt in (OTHER_SHAPES, OTHER_DTYPES) else "",
    )
    CALLS[key] = call
    return call
