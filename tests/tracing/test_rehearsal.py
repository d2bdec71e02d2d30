"""Rehearsals: what ATen returns for a call on zeros is what shape inference says, where both know."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fused_eager.fusion_rules.lowering import leaves
from fused_eager.fusion_rules.spec import JAX_DTYPE
from torch.utils._python_dispatch import TorchDispatchMode

from fused_eager import fused_eager
from fused_eager.tracing import rehearsal
from fused_eager.tracing.infer import Inferred, Unknown, infer
from fused_eager.tracing.opinfo import Kind, info_of
from fused_eager.tracing.rehearsal import rehearse, rehearse_alone
from fused_eager.tracing.sizes import most_returned
from tests.op_db import OP_DB
from tests.streams import events

aten = torch.ops.aten


class Both(TorchDispatchMode):
    """Asks of each op both; `asked` counts those that a rehearsal alone knows, `differing` names those that differ."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0
        self.differing: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [t for t in leaves([args, kwargs]) if isinstance(t, torch.Tensor)]
        plain = all(type(t) is torch.Tensor and t.layout == torch.strided and t.dtype in JAX_DTYPE for t in tensors)
        info = info_of(func)
        if plain and info.kind is Kind.COMPUTE and not info.may_resize:
            alone = rehearse_alone(func, args, kwargs, tensors)
            if alone is not None:
                self.asked += 1
                if isinstance(alone, Inferred):
                    most = most_returned(func, args, tensors)
                    assert most is not None and sum(s.numel for s in alone.fresh) <= most, (func, most, alone)
                both = infer(func, args, kwargs, tensors)
                if isinstance(both, Inferred):
                    found = rehearse(func, args, kwargs, tensors, both)
                    both = found if isinstance(found, Unknown) else found[0]
                if type(both) is not type(alone) or (isinstance(alone, Inferred) and alone != both):
                    self.differing.append(f"{func}: {alone} instead of {both}")
        return func(*args, **kwargs)


def _samples(infos: Any, dtypes: tuple[torch.dtype, ...]) -> Iterator[tuple[Any, Any]]:
    for info in infos:
        for dtype in dtypes:
            if dtype in info.supported_dtypes("cpu"):
                differentiable = dtype.is_floating_point and info.supports_autograd
                samples = info.sample_inputs("cpu", dtype, requires_grad=differentiable)
                yield from ((info, sample) for _, sample in zip(range(4), samples, strict=False))


DTYPES = torch.float32, torch.int64, torch.bfloat16


@pytest.mark.thinned(8)  # an eighth is enough to see that the two have grown apart
@pytest.mark.parametrize("eighth", range(8))
def test_a_rehearsal_alone_says_what_inference_and_a_rehearsal_do(eighth: int) -> None:
    asked, differing = 0, []
    for info, sample in _samples(OP_DB[eighth::8], DTYPES):
        with Both() as both:
            try:
                out = info.op(sample.input, *sample.args, **sample.kwargs)
                ends = [t for t in leaves([out]) if isinstance(t, torch.Tensor) and t.requires_grad]
                inputs = [t for t in leaves([sample.input, sample.args]) if isinstance(t, torch.Tensor)]
                inputs = [t for t in inputs if t.requires_grad]
                if ends and inputs:
                    torch.autograd.grad([t.sum() for t in ends], inputs, allow_unused=True)
            except (RuntimeError, AssertionError):
                pass  # what torch refuses here is no matter of what is returned
        asked += both.asked
        differing += both.differing
    assert not differing, "\n".join(differing)
    assert asked > 200


@pytest.mark.parametrize("rows", [3, 2**19], ids=["small", "large"])
def test_dtypes_are_atens_where_an_op_is_given_several(rows: int) -> None:
    # As autocast does: FakeTensor has the statistics in bfloat16.
    args = torch.zeros(rows, 64, dtype=torch.bfloat16), [64], torch.ones(64), torch.zeros(64), 1e-5
    with fused_eager(compile="wait", native="never"):
        out = aten.native_layer_norm.default(*args)
        assert [t.dtype for t in out] == [torch.bfloat16, torch.float32, torch.float32]


def test_where_that_cannot_be_rehearsed_aten_runs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for limit in ("SMALL", "LARGE", "HUGE"):
        monkeypatch.setattr(rehearsal, limit, 8)
    args = torch.ones(5, 3, dtype=torch.bfloat16), [3], torch.ones(3), torch.zeros(3), 1e-5
    with fused_eager(compile="wait", native="never"), events("island") as seen:
        for _ in range(2):
            out = aten.native_layer_norm.default(*args)
            assert [t.dtype for t in out] == [torch.bfloat16, torch.float32, torch.float32]
    assert {e.data["op"] for e in seen} == {"aten.native_layer_norm.default"}
    assert "too large to rehearse" in seen[0].data["reason"]


def test_the_column_of_a_large_matrix_is_as_large_as_the_matrix() -> None:
    """Its zeros would be written, and eager touches no more than the column."""
    near, far = torch.ones(2, 2)[:, 0], torch.empty_strided((2,), (rehearsal.LARGE,))
    assert isinstance(rehearse_alone(aten.exp.default, (near,), {}, [near]), Inferred)
    assert rehearse_alone(aten.exp.default, (far,), {}, [far]) is None
