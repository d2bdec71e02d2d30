"""What the front door knows about an overload: its kind, what it writes, what it hoists."""

from __future__ import annotations

import pytest
import torch

from fused_eager.tracing.opinfo import Kind, info_of

aten = torch.ops.aten

KINDS = {
    Kind.VIEW: [
        aten.view.default, aten.t.default, aten.slice.Tensor, aten.detach.default, aten.as_strided.default,
        aten.expand.default, aten._unsafe_view.default, aten.view.dtype, aten.split.Tensor,
        aten.alias.default, aten.unfold.default, aten.view_as_real.default, aten._conj.default,
    ],
    Kind.METADATA: [
        aten.transpose_.default, aten.set_.source_Tensor, aten.unsqueeze_.default, aten.resize_.default,
        aten.squeeze_.default, aten.t_.default, aten.detach_.default,
    ],
    Kind.ALLOCATE: [
        aten.empty.memory_format, aten.empty_like.default, aten.empty_strided.default, aten.new_empty.default,
    ],
    Kind.RANDOM: [
        aten.normal_.default, aten.bernoulli.p, aten.rand.default, aten.randperm.default, aten.native_dropout.default,
        aten.multinomial.default, aten.rand_like.default,
    ],
    Kind.VALUES: [
        aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default, aten.equal.default,
        aten._unique2.default, aten.is_pinned.default,  # where there is a GPU, the latter looks at the data pointer
    ],
    Kind.CHECK: [aten._linalg_check_errors.default, aten._assert_async.msg, aten._assert_scalar.default],
    Kind.COMPUTE: [
        aten.add.Tensor, aten.add_.Tensor, aten.add.out, aten.zeros.default, aten.mm.default, aten.copy_.default,
        aten.full.default, aten._foreach_add_.Scalar, aten.sort.default, aten.clone.default, aten.convolution.default,
    ],
}  # fmt: skip


@pytest.mark.parametrize(("kind", "op"), [(k, op) for k, ops in KINDS.items() for op in ops], ids=str)
def test_kinds(kind: Kind, op: torch._ops.OpOverload) -> None:
    assert info_of(op).kind is kind


def test_no_view_of_aten_is_recorded() -> None:
    """A view that were recorded as a computation would lose its aliasing: silently wrong after a write."""
    wrong = []
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, full = name.partition("::")
        if namespace != "aten":
            continue
        packet, _, overload = full.partition(".")
        op = getattr(getattr(aten, packet), overload or "default", None)
        if op is None:
            continue
        returns_alias = any(r.alias_info is not None and not r.alias_info.is_write for r in op._schema.returns)
        if returns_alias and info_of(op).kind in (Kind.COMPUTE, Kind.RANDOM, Kind.ALLOCATE):
            wrong.append(str(op))
    assert not wrong


@pytest.mark.parametrize(
    ("op", "written"),
    [
        (aten.add.Tensor, []), (aten.add_.Tensor, ["self"]), (aten.add.out, ["out"]),
        (aten.sort.values, ["values", "indices"]), (aten._foreach_mul_.Scalar, ["self"]),
        (aten.native_batch_norm.default, ["running_mean", "running_var"]),
        (aten._fused_adam_.default, ["self", "grads", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs"]),
    ],
    ids=str,
)  # fmt: skip
def test_written_arguments(op: torch._ops.OpOverload, written: list[str]) -> None:
    info = info_of(op)
    assert [info.names[i] for i in info.written] == written


def test_hoisted_arguments_are_numbers_of_a_lowered_op() -> None:
    info = info_of(aten.add.Tensor)
    assert {info.names[i] for i in info.hoisted} >= {"alpha"}
    assert info_of(aten.add_.Tensor).hoisted == info.hoisted


def test_one_info_per_overload_with_a_number_of_its_own() -> None:
    ops = [op for ops in KINDS.values() for op in ops]
    assert info_of(aten.add.Tensor) is info_of(aten.add.Tensor)
    assert len({info_of(op).number for op in ops}) == len(ops)


def test_why_an_op_is_an_island_is_said_in_words() -> None:
    assert info_of(aten.add.Tensor).island == ""

    @torch.library.custom_op("opinfo_test::plain", mutates_args=())
    def plain(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    assert info_of(torch.ops.opinfo_test.plain.default).island == "it has no lowering"
    assert info_of(torch.ops.opinfo_test.plain.default).kind is Kind.CUSTOM

    @torch.library.custom_op("opinfo_test::writes", mutates_args=("x",))
    def writes(x: torch.Tensor) -> None:
        x.add_(1)

    info = info_of(torch.ops.opinfo_test.writes.default)
    assert info.twin is None and "functional" in info.island and info.kind is Kind.CUSTOM
    assert [info.names[i] for i in info.written] == ["x"]
