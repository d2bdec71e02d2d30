"""Uniform calls: what torch says of one holds for another shape, for every pointwise op and dtype of torch's corpus."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch.testing._internal.opinfo.core import BinaryUfuncInfo, UnaryUfuncInfo

from fused_eager import fused_eager
from fused_eager.tracing import calls, infer, uniform
from fused_eager.tracing.opinfo import info_of
from tests.op_db import OP_DB
from tests.streams import stable_shapes

aten = torch.ops.aten


def recalled(op: Any, first: list[Any], second: list[Any]) -> infer.Inferred | None:
    """What is known of the second call when the first has been inferred."""
    found = []
    for args in (first, second):
        key: list[Any] = [op]
        tensors: list[torch.Tensor] = []
        for a in args:
            calls.take(a, False, key, tensors, [])
        form = uniform.form(info_of(op), key, tensors)
        found.append(uniform.recall(form, tensors))
        inferred = infer.infer(op, args, {}, tensors)
        if isinstance(inferred, infer.Inferred):
            uniform.remember(form, tensors, inferred)
    return found[1]


def test_another_shape_is_not_asked_for_again() -> None:
    uniform._KNOWN.clear()
    out = recalled(aten.add.Tensor, [torch.ones(3, 4), torch.ones(3, 4)], [torch.ones(5, 7), torch.ones(5, 7)])
    assert out is not None and [(s.shape, s.strides) for s in out.fresh] == [((5, 7), (7, 1))]


@pytest.mark.parametrize(
    ("op", "first", "second"),
    [
        (aten.add.Tensor, [torch.ones(3, 4), torch.ones(4)], [torch.ones(5, 7), torch.ones(7)]),
        (aten.add.Tensor, [torch.ones(3, 4), torch.ones(3, 4)], [torch.ones(5, 1), torch.ones(5, 1)]),
        (aten.add.Tensor, [torch.ones(3, 4), torch.ones(3, 4)], [torch.ones(7), torch.ones(7)]),
        (aten.add.Tensor, [torch.ones(3, 4), torch.ones(3, 4)], [torch.ones(5, 7).int(), torch.ones(5, 7)]),
        (aten.exp.default, [torch.ones(3, 4)], [torch.ones(7, 5).t()]),
        (aten.linalg_cross.default, [torch.ones(2, 3), torch.ones(2, 3)], [torch.ones(2, 4), torch.ones(2, 4)]),
        (aten.cumsum.default, [torch.ones(3, 4), 0], [torch.ones(5, 7), 0]),
    ],
    ids=["broadcast", "size 1", "rank", "dtype", "strides", "not pointwise", "scan"],
)
def test_what_differs_in_more_than_the_shape_is(op: Any, first: list[Any], second: list[Any]) -> None:
    uniform._KNOWN.clear()
    assert recalled(op, first, second) is None


SHAPES = ((3, 4), (5, 7))
DTYPES = (torch.float32, torch.float64, torch.int64, torch.bool, torch.bfloat16, torch.complex64)
POINTWISE = [o for o in OP_DB if isinstance(o, (UnaryUfuncInfo, BinaryUfuncInfo)) and "jiterator" not in o.name]


def test_it_holds_for_every_pointwise_op_of_the_corpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is recalled of a call is what torch says of it, for the shape that it has."""
    compared: set[str] = set()
    asked: list[Any] = []
    known_of, recall = calls._known, uniform.recall

    def noted(info: Any, form: Any, tensors: Any, args: Any, kwargs: Any) -> Any:
        asked[:] = [info.op, args, kwargs, tensors]
        return known_of(info, form, tensors, args, kwargs)

    def watched(form: Any, tensors: Any) -> Any:
        known = recall(form, tensors)
        if known is not None:
            truth = infer.infer(*asked)
            assert isinstance(truth, infer.Inferred), (asked[0], truth)
            assert (truth.fresh, repr(truth.template)) == (known.fresh, repr(known.template)), asked[0]
            compared.add(str(asked[0]))
        return known

    monkeypatch.setattr(calls, "_known", noted)
    monkeypatch.setattr(uniform, "recall", watched)
    calls.CALLS.clear()
    # Shapes that other tests have changed too often would send ops past the recording.
    with stable_shapes(), fused_eager(mode="fused"):
        for op in POINTWISE:
            for dtype in [d for d in DTYPES if d in op.dtypes]:
                for shape in SHAPES:
                    tensors = [torch.ones(shape, dtype=dtype) for _ in range(1 + isinstance(op, BinaryUfuncInfo))]
                    with contextlib.suppress(RuntimeError, TypeError, ValueError):  # what takes other arguments
                        op.op(*tensors)
    assert len(compared) > 90


def test_a_recalled_call_is_not_run_on_zeros_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """`where` has unusual dtypes, so its first call is rehearsed; lengths that change afterwards are not."""
    uniform._KNOWN.clear()
    rehearsed = []
    for name in ("rehearse", "rehearse_alone"):
        function = getattr(calls, name)
        monkeypatch.setattr(calls, name, lambda *args, f=function: rehearsed.append(args) or f(*args))
    with fused_eager():
        for n in (5001, 5003, 5011, 5023):
            x = torch.randn(n)
            got = torch.where(x > 0, x, -x)
            assert got.sum().item() == pytest.approx(x.abs().sum().item())
    wheres = [args for args in rehearsed if args[0] is aten.where.self]
    assert len(wheres) == 1
