"""Rehearsals: what ATen returns for a call on zeros is what shape inference says, where both know."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fused_eager.fusion_rules.spec import JAX_DTYPE

from fused_eager import fused_eager
from fused_eager.tracing import rehearsal
from fused_eager.tracing.infer import Inferred, Unknown, infer
from fused_eager.tracing.opinfo import info_of
from fused_eager.tracing.rehearsal import rehearse, rehearse_alone
from fused_eager.tracing.sizes import most_returned
from tests.op_db import OP_DB
from tests.streams import events

from .corpus import Asking, run

aten = torch.ops.aten


class Alone(Asking):
    """What a rehearsal alone says, beside what inference and a rehearsal say, and how much may be returned at most."""

    def ask(self, op: Any, args: Any, kwargs: dict[str, Any], tensors: list[torch.Tensor]) -> None:
        if info_of(op).may_resize or any(t.dtype not in JAX_DTYPE for t in tensors):
            return
        alone = rehearse_alone(op, args, kwargs, tensors)
        if alone is None:
            return
        self.asked += 1
        most = most_returned(op, args, tensors)
        if isinstance(alone, Inferred) and (most is None or sum(s.numel for s in alone.fresh) > most):
            self.differing.append(f"{op}: {alone} is more than {most} elements")
        both = infer(op, args, kwargs, tensors)
        if isinstance(both, Inferred):
            found = rehearse(op, args, kwargs, tensors, both)
            both = found if isinstance(found, Unknown) else found[0]
        if type(both) is not type(alone) or (isinstance(alone, Inferred) and alone != both):
            self.differing.append(f"{op}: {alone} instead of {both}")


def _samples(infos: Any, dtypes: tuple[torch.dtype, ...]) -> Iterator[tuple[Any, Any]]:
    for info in infos:
        for dtype in dtypes:
            if dtype in info.supported_dtypes("cpu"):
                differentiable = dtype.is_floating_point and info.supports_autograd
                samples = info.sample_inputs("cpu", dtype, requires_grad=differentiable)
                yield from ((info, sample) for sample in itertools.islice(samples, 4))


DTYPES = torch.float32, torch.int64, torch.bfloat16


@pytest.mark.thinned(8)  # an eighth is enough to see that the two have grown apart
@pytest.mark.parametrize("eighth", range(8))
def test_a_rehearsal_alone_says_what_inference_and_a_rehearsal_do(eighth: int) -> None:
    alone = Alone()
    run(alone, _samples(OP_DB[eighth::8], DTYPES))
    assert not alone.differing, "\n".join(alone.differing)
    assert alone.asked > 200


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


@pytest.mark.parametrize("values", [3, 1, 0])
@pytest.mark.parametrize("selected", ["columns", "all", "rows"])
def test_as_many_values_as_a_mask_selects_are_written_in_a_region(selected: str, values: int) -> None:
    def program() -> torch.Tensor:
        x = torch.arange(20.0).reshape(4, 5)
        mask = {"all": x.t().contiguous().t() % 7 == 3, "rows": x[:, 0] > 0, "columns": x[0] > 1}[selected]
        mask[mask.nonzero()[values:].unbind(1)] = False  # every other place of a mask that lies by columns, too
        given = torch.arange(100.0, 100 + 5 * values)
        given = {"all": given[:values], "rows": given.reshape(values, 5), "columns": given[: 4 * values].reshape(4, -1)}
        at = (slice(None), mask) if selected == "columns" else mask
        x[at] = given[selected]
        return x

    want = program()
    with events("island") as seen, fused_eager():
        got = program()
        assert torch.equal(got.clone().view(4, 5), want)
    assert [e.data["op"] for e in seen if "index_put" in e.data["op"]] == []


def test_how_many_values_a_mask_takes_is_looked_at_when_it_runs() -> None:
    x = torch.zeros(6)
    with fused_eager(), pytest.raises(RuntimeError, match="shape mismatch: value tensor of shape \\[3\\]"):
        x[torch.arange(6) > 3] = torch.ones(3)
        x.tolist()
    with fused_eager(), pytest.raises(RuntimeError, match="dtypes match"):
        x[torch.arange(6) > 2] = torch.ones(3, dtype=torch.int64)
