"""Type promotion without SymPy: the computation dtype is that of torch's own rule, for every pair and many triples."""

from __future__ import annotations

import itertools

import pytest
import torch
from fused_eager.fusion_rules.promotion import (
    DIMENSIONED,
    NUMBER,
    SCALAR,
    computation_dtype,
    number_dtype,
    promoted,
)
from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND as Promote
from torch._prims_common import elementwise_dtypes

DTYPES = (
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
    torch.float32, torch.float64, torch.complex64, torch.complex128,
)  # fmt: skip
OPERANDS = [(d, DIMENSIONED) for d in DTYPES] + [(d, SCALAR) for d in DTYPES] + [
    (k, NUMBER) for k in (bool, int, float, complex)
]  # fmt: skip


def _as_torch_sees(kind, sort):
    return kind(1) if sort == NUMBER else torch.empty((1,) if sort == DIMENSIONED else (), dtype=kind, device="meta")


@pytest.mark.parametrize("default", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("number", [1, 2, 3])
def test_the_dtype_is_the_one_that_torch_computes_in(default, number):
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        differing = []
        for operands in itertools.combinations_with_replacement(OPERANDS, number):
            seen = [_as_torch_sees(*operand) for operand in operands]
            ours = promoted([(number_dtype(k) if sort == NUMBER else k, sort) for k, sort in operands])
            for kind in Promote:
                wanted = elementwise_dtypes(*seen, type_promotion_kind=kind)[0]
                got = computation_dtype(ours, kind, default)
                if got is not wanted:
                    differing.append((operands, kind, wanted, got))
    finally:
        torch.set_default_dtype(before)
    assert not differing, differing[:5]


def test_no_operand_computes_in_bool():
    assert computation_dtype(promoted([]), Promote.DEFAULT, torch.float32) is torch.bool
