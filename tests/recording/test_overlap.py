"""Memory that is written and read by one op: what eager refuses is refused, at the op's own line."""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from fused_eager import fused_eager
from fused_eager.tracing.opinfo import info_of
from tests.op_db import OP_DB

Tensor = torch.Tensor
Call = tuple[Any, tuple[Any, ...], dict[str, Any]]

FOLLOWERS = ("python", "compiled")


@pytest.mark.parametrize("follower", FOLLOWERS)
@pytest.mark.parametrize("compile", ["auto", "wait"])
def test_a_line_that_went_well_is_refused_when_its_operands_overlap(follower: str, compile: str) -> None:
    refused: list[int] = []
    with fused_eager(compile=compile, native="never", follower=follower, cache="off"):
        for turn in range(8):
            x = torch.arange(4.0) * 2
            source = x if turn in (5, 7) else x * 1
            try:
                x.index_add_(0, torch.arange(4), source)
            except RuntimeError as error:
                assert "refer to a single memory location" in str(error)
                refused.append(turn)
            else:
                assert x.tolist() == [0.0, 4.0, 8.0, 12.0]
    assert refused == [5, 7]


@pytest.mark.parametrize("follower", FOLLOWERS)
def test_a_pointwise_op_may_write_the_very_view_that_it_reads(follower: str) -> None:
    with fused_eager(compile="wait", native="never", follower=follower, cache="off"):
        for turn in range(6):
            x = torch.arange(4.0) + 1
            x.mul_(x if turn % 2 else x * 1)
            torch.add(x, 1, out=x)
            assert x.tolist() == [2.0, 5.0, 10.0, 17.0]


# ---- every op that writes, over operands that share memory ---------------------------------------------------------

UNSAFE = ("rrelu_with_noise", "resize", "set_")  # eager itself writes beyond memory that is shared


class _Recorder(TorchDispatchMode):
    """Notes one call of each overload and dtypes, with copies of what it was given and returned."""

    def __init__(self, calls: dict[Any, tuple[Any, Any, Any, Any]]):
        super().__init__()
        self.calls = calls

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        key = (str(func), *[str(t.dtype) for t in _tensors((args, kwargs))])
        if func.namespace != "aten" or key in self.calls:
            return func(*args, **kwargs)
        given = _copy((args, kwargs))
        out = func(*args, **kwargs)
        self.calls[key] = (func, *given, _copy(out))
        return out


def _tensors(tree: Any) -> list[Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor) and x.layout is torch.strided]


def _copy(tree: Any) -> Any:
    return tree_map(lambda x: x.clone() if isinstance(x, Tensor) and x.layout is torch.strided else x, tree)


def _calls_of(info: Any) -> dict[Any, tuple[Any, Any, Any, Any]]:
    calls: dict[Any, tuple[Any, Any, Any, Any]] = {}
    for dtype in {torch.float32, torch.int64, torch.bool} & set(info.supported_dtypes("cpu")):
        torch.manual_seed(0)
        for sample in itertools.islice(info.sample_inputs("cpu", dtype), 3):
            for function in filter(None, (info.op, info.inplace_variant)):
                first, args, kwargs = _copy((sample.input, tuple(sample.args), sample.kwargs))
                # An in-place variant may not take this sample, and some ops are for GPUs alone.
                with contextlib.suppress(Exception), torch.no_grad(), _Recorder(calls):
                    function(first, *args, **kwargs)
    return calls


def _writers(calls: dict[Any, tuple[Any, Any, Any, Any]]) -> Iterator[Call]:
    """The recorded calls that write in place. Not those with `out=`: some resize it, and eager itself then writes
    beyond memory that is shared."""
    for func, args, kwargs, _ in calls.values():
        if func._schema.is_mutable and not any(a.is_out for a in func._schema.arguments):
            yield func, args, kwargs


def _overlaid(w: Tensor, a: Tensor, shift: int) -> tuple[Tensor, Tensor] | None:
    """Copies of two tensors over one memory, the second `shift` elements of the first after it."""
    begin = shift * w.itemsize
    if begin % a.itemsize or w.is_complex() != a.is_complex():
        return None
    memory = torch.zeros(max(w.nbytes, begin + a.nbytes), dtype=torch.uint8)
    first, second = (memory[at : at + t.nbytes].view(t.dtype).view(t.shape) for at, t in ((0, w), (begin, a)))
    first.copy_(w)
    second.copy_(a)
    return first, second


def _variants(call: Call) -> Iterator[tuple[str, Callable[[], tuple[Any, Any]]]]:
    """The call with a tensor that it writes laid over another one in several ways, or expanded."""
    op, args, kwargs = call
    flat, spec = tree_flatten((list(args), kwargs))
    names = [a.name for a in op._schema.arguments]
    positions, at = [], 0
    for i, value in [*enumerate(args), *((names.index(k), v) for k, v in kwargs.items())]:
        count = len(tree_flatten(value)[0])
        alias = op._schema.arguments[i].alias_info
        if alias is not None and alias.is_write:
            positions += [k for k in range(at, at + count) if isinstance(flat[k], Tensor)]
        at += count
    usable = [k for k, x in enumerate(flat) if isinstance(x, Tensor) and x.layout is torch.strided and x.numel()]

    def with_parts(parts: dict[int, Tensor]) -> tuple[Any, Any]:
        return tree_unflatten([parts[k] if k in parts else _copy(x) for k, x in enumerate(flat)], spec)

    def over(w: int, a: int, shift: int) -> tuple[Any, Any] | None:
        laid = _overlaid(flat[w], flat[a], shift)
        return None if laid is None else with_parts({w: laid[0], a: laid[1]})

    def twice(w: int, a: int) -> tuple[Any, Any]:
        one = flat[a].clone()
        return with_parts({w: one, a: one})

    def expanded(w: int) -> tuple[Any, Any]:
        longest = max(range(flat[w].ndim), key=lambda d: flat[w].shape[d])
        return with_parts({w: flat[w].narrow(longest, 0, 1).clone().expand(flat[w].shape)})

    for w in [k for k in positions if k in usable]:
        for a in [k for k in usable if k != w]:
            if flat[a].shape == flat[w].shape and flat[a].dtype == flat[w].dtype:
                yield f"{op}: {w} is {a}", lambda w=w, a=a: twice(w, a)
            for shift in (0, 1):
                if _overlaid(flat[w], flat[a], shift) is not None:
                    yield f"{op}: {w} over {a}, {shift}", lambda w=w, a=a, shift=shift: over(w, a, shift)
        if flat[w].ndim and max(flat[w].shape) > 1:
            yield f"{op}: {w} expanded", lambda w=w: expanded(w)


def _attempt(op: Any, made: tuple[Any, Any]) -> str:
    torch.manual_seed(0)
    try:
        op(*made[0], **made[1])
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return ""


def _touch(t: Tensor) -> None:
    """Write a tensor's own values into it, so that it is pending."""
    if not t.is_contiguous():
        return
    if t.dtype is torch.bool:
        t.logical_or_(torch.zeros((), dtype=torch.bool))
    elif t.dtype not in (torch.uint16, torch.uint32, torch.uint64):
        t.add_(0)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["fused", "strict"])
@pytest.mark.parametrize("part", range(0, len(OP_DB), 40))
def test_every_op_that_writes_refuses_what_eager_refuses(part: int, mode: str) -> None:
    wrong = []
    for info in OP_DB[part : part + 40]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            calls = [c for c in _writers(_calls_of(info)) if not any(name in str(c[0]) for name in UNSAFE)]
            for call in calls:
                if info_of(call[0]).written == ():
                    continue
                for label, make in _variants(call):
                    expected, made = _attempt(call[0], make()), make()
                    with fused_eager(mode=mode, compile="wait", native="never", cache="off", progress=False):
                        for t in _tensors(made):
                            _touch(t)
                        found = _attempt(call[0], made)
                        del made, t  # nothing of it is wanted: nothing need be compiled
                    if found != expected:
                        wrong.append(f"{label}\n  eager: {expected}\n  here: {found}")
    assert not wrong, "\n".join(wrong)
