"""Shape inference: what a call returns, or why that cannot be known."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fused_eager.fusion_rules.lowering import leaves
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from fused_eager import fused_eager
from fused_eager.tracing import infer as module
from fused_eager.tracing import rehearsal
from fused_eager.tracing.infer import Fresh, Inferred, Same, Unknown, infer
from fused_eager.tracing.opinfo import Kind, info_of
from tests.op_db import OP_DB
from tests.semantics.programs import in_process

from .corpus import Asking, run

aten = torch.ops.aten


def inferred(op: Any, *args: Any, **kwargs: Any) -> Inferred:
    leaves = [a for x in (*args, *kwargs.values()) for a in (x if isinstance(x, list) else [x])]
    found = infer(op, args, kwargs, [a for a in leaves if isinstance(a, torch.Tensor)])
    assert isinstance(found, Inferred), found
    return found


CASES = {
    "broadcast": (aten.add.Tensor, (torch.ones(3, 1), torch.ones(4))),
    "promotion": (aten.mul.Tensor, (torch.ones(3, dtype=torch.int32), torch.ones(3, dtype=torch.float16))),
    "permuted strides survive": (aten.relu.default, (torch.ones(2, 3, 4).permute(2, 0, 1),)),
    "channels last": (aten.relu.default, (torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last),)),
    "matmul": (aten.mm.default, (torch.ones(3, 4), torch.ones(4, 5))),
    "int sum": (aten.sum.dim_IntList, (torch.ones(3, 4, dtype=torch.int32), [1])),
    "two outputs": (aten.max.dim, (torch.ones(3, 4), 1)),
    "a list of outputs": (aten._foreach_add.Scalar, ([torch.ones(3), torch.ones(2, 2)], 1.0)),
    "factory": (aten.full.default, ([2, 3], 1.5)),
    "a mask, by integers": (aten.index.Tensor, (torch.ones(3, 4) > 0, [None, torch.tensor([1, 3])])),
    "bytes, by integers": (aten.index.Tensor, (torch.ones(3, 4).byte(), [torch.tensor([[0], [2]]), torch.tensor([1])])),
    "empty": (aten.cat.default, ([torch.ones(0, 3), torch.ones(2, 3)],)),
    "convolution": (
        aten.convolution.default,
        (torch.ones(2, 3, 8, 8), torch.ones(4, 3, 3, 3), None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_specs_are_what_aten_returns(name: str) -> None:
    op, args = CASES[name]
    real = op(*args)
    real = list(real) if isinstance(real, (list, tuple)) else [real]
    fresh = inferred(op, *args).fresh
    assert [(s.shape, s.dtype, s.strides) for s in fresh] == [(tuple(t.shape), t.dtype, t.stride()) for t in real]


def test_in_place_and_out_return_the_argument_itself() -> None:
    x, y = torch.ones(3), torch.ones(3)
    assert inferred(aten.add_.Tensor, x, y) == Inferred((), Same(0))
    assert inferred(aten.add.out, x, y, out=torch.ones(3)) == Inferred((), Same(2))


def test_the_structure_of_the_result_is_kept() -> None:
    found = inferred(aten.native_layer_norm.default, torch.ones(2, 4), [4], None, None, 1e-5)
    assert tuple(found.template) == (Fresh(0), Fresh(1), Fresh(2))
    assert inferred(aten._foreach_mul_.Scalar, [torch.ones(2)], 2.0).template is None


def test_a_view_in_disguise_is_told() -> None:
    @torch.library.custom_op("infer_test::maker", mutates_args=())
    def maker(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    maker.register_fake(lambda x: x.view(-1))
    assert inferred(torch.ops.infer_test.maker.default, torch.ones(2, 2)).alias
    assert not inferred(aten.clone.default, torch.ones(2, 2)).alias


UNKNOWN = {
    "shapes that do not match": (aten.mm.default, (torch.ones(2, 3), torch.ones(4, 5))),
    "values decide": (aten.nonzero.default, (torch.ones(3),)),
    "a mask decides": (aten.index.Tensor, (torch.ones(3), [torch.ones(3) > 0])),
    "a number is returned": (aten._local_scalar_dense.default, (torch.ones(()),)),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_cannot_be_known_says_why(name: str, recwarn: pytest.WarningsRecorder) -> None:
    op, args = UNKNOWN[name]
    found = infer(op, args, {}, [a for a in args if isinstance(a, torch.Tensor)])
    assert isinstance(found, Unknown) and found.reason
    assert not list(recwarn)


def test_an_out_argument_that_would_be_resized_is_for_aten() -> None:
    x, out = torch.ones(3), torch.ones(7)
    assert isinstance(infer(aten.add.out, (x, x), {"out": out}, [x, x, out]), Unknown)
    assert out.shape == (7,)


def test_values_are_neither_read_nor_written() -> None:
    x = torch.full((3,), 5.0)
    infer(aten.add_.Tensor, (x, 1), {}, [x])
    assert x.tolist() == [5.0] * 3 and x._version == 0


def test_threads_infer_at_the_same_time() -> None:
    failures: list[BaseException] = []
    start = threading.Barrier(4)

    def work() -> None:
        try:
            start.wait(30)
            for n in range(1, 60):
                x = torch.ones(n, 3)
                assert isinstance(infer(aten.mul.Tensor, (x, x), {}, [x, x]), Inferred)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert not failures


class Both(Asking):
    """What tensors on `meta` say, beside what fake tensors say."""

    def ask(self, op: Any, args: Any, kwargs: dict[str, Any], tensors: list[torch.Tensor]) -> None:
        if module._meta_suffices(op, args, tensors):
            with module.LOCK, module.silence():
                quick = module._on_meta(op, args, kwargs, tensors)
                if quick is not None:
                    self.asked += 1
                    slow = module._run(op, args, kwargs, tensors, module._fake())
                    if quick != slow:
                        self.differing.append(f"{op}: {quick} instead of {slow}")


def _first_samples(infos: Any) -> Iterator[tuple[Any, Any]]:
    for info in infos:
        dtype = torch.float32 if torch.float32 in info.supported_dtypes("cpu") else torch.int64
        differentiable = dtype.is_floating_point and info.supports_autograd
        samples = info.sample_inputs("cpu", dtype, requires_grad=differentiable)
        yield from ((info, sample) for sample in itertools.islice(samples, 1))


# One quarter is enough to see that the two have grown apart; the others are part of `make test-full`.
@pytest.mark.parametrize("quarter", [0, *[pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 3)]])
def test_meta_tensors_know_what_fake_tensors_know(quarter: int) -> None:
    both = Both()
    run(both, _first_samples(OP_DB[quarter::4]))
    assert not both.differing, "\n".join(both.differing)
    assert both.asked > 200


def _last_first(x: Any) -> Any:
    """The same numbers with the dimension behind the batch's innermost in memory; of two dimensions, transposed."""
    if not isinstance(x, torch.Tensor) or x.ndim < 2 or x.layout is not torch.strided:
        return x
    kept = (0,) if x.ndim > 3 else ()
    order = [*kept, *range(len(kept) + 1, x.ndim), len(kept)]
    back = sorted(range(x.ndim), key=order.__getitem__)
    return x.detach().permute(order).contiguous().permute(back).requires_grad_(x.requires_grad)


class Striding(TorchDispatchMode):
    """Collects the ops of which inference makes other strides than ATen."""

    def __init__(self) -> None:
        super().__init__()
        self.differing: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        given = [t for t in leaves([args, kwargs]) if isinstance(t, torch.Tensor)]
        if info_of(func).kind is not Kind.COMPUTE or not all(t.layout is torch.strided for t in given):
            return out
        found = infer(func, args, kwargs, given)
        made = [t for t in leaves([out]) if isinstance(t, torch.Tensor) and not any(t is g for g in given)]
        if isinstance(found, Inferred) and len(found.fresh) == len(made):
            for t, spec in zip(made, found.fresh, strict=True):
                pairs = zip(t.shape, t.stride(), spec.strides, strict=True)
                if t.numel() and any(size > 1 and one != other for size, one, other in pairs):
                    self.differing.add(func._schema.name)
        return out


@pytest.mark.slow
@pytest.mark.parametrize("quarter", range(4))
def test_where_strides_are_not_known_is_in_a_table(quarter: int) -> None:
    striding = Striding()
    for info in OP_DB[quarter::4]:
        if torch.float32 not in info.supported_dtypes("cpu"):
            continue
        samples = list(info.sample_inputs("cpu", torch.float32, requires_grad=info.supports_autograd))
        for sample in samples[:: max(1, len(samples) // 8)]:
            with contextlib.suppress(RuntimeError, AssertionError), striding:
                given, args, kwargs = tree_map(_last_first, (sample.input, tuple(sample.args), dict(sample.kwargs)))
                out = info.op(given, *args, **kwargs)
                ends = [t.sum() for t in leaves([out]) if isinstance(t, torch.Tensor) and t.requires_grad]
                if ends:
                    torch.stack([end.real for end in ends]).sum().backward()
    assert striding.differing <= rehearsal._OTHER_STRIDES


LARGE = torch.zeros(4, 9, 60, 60).contiguous(memory_format=torch.channels_last)
STRIDED = {
    "unbatched pooling": lambda: torch.max_pool3d(_last_first(torch.zeros(1, 64, 20, 20, 20)).squeeze(0), 2),
    "padding": lambda: F.pad(LARGE, (1, 1, 1, 1), "reflect"),
    "shuffled": lambda: F.pixel_shuffle(LARGE, 3),
    "power of a number": lambda: 2.0**LARGE,
    "quotient": lambda: LARGE // torch.tensor(3.0),
    "flags": lambda: torch.logical_and(torch.zeros(300, 1, 300).transpose(0, 1), torch.zeros(300, 300).t()),
}


@pytest.mark.parametrize("options", [{"mode": "strict"}, {"compile": "wait", "native": "never"}], ids=str)
@pytest.mark.parametrize("name", STRIDED)
def test_large_results_have_the_strides_of_eager(name: str, options: dict[str, Any]) -> None:
    want = STRIDED[name]()
    with fused_eager(progress=False, **options):
        got = STRIDED[name]()
        assert got.shape == want.shape and got.stride() == want.stride()
    assert got.stride() == want.stride() and torch.equal(got, want)


A = torch.ops.aten
FORMATS = [torch.contiguous_format, torch.channels_last]


@pytest.mark.parametrize("kernel", [1, 3])
@pytest.mark.parametrize("of_image", FORMATS, ids=str)
@pytest.mark.parametrize("of_weight", FORMATS, ids=str)
def test_convolutions_and_batch_norm_in_all_formats(
    kernel: int, of_image: torch.memory_format, of_weight: torch.memory_format
) -> None:
    """Where meta tensors are asked they say what ATen does, and they are where nothing is channels-last."""
    x = torch.randn(2, 8, 6, 6).to(memory_format=of_image)
    w = torch.randn(4, 8, kernel, kernel).to(memory_format=of_weight)
    how = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    y = A.convolution(x, w, None, *how)
    mean, v = torch.randn(8), torch.rand(8)
    calls: list[tuple[torch._ops.OpOverload, tuple[object, ...]]] = [
        (A.convolution.default, (x, w, None, *how)),
        (A.convolution_backward.default, (y, x, w, None, *how, [True, True, False])),
    ]
    for training in (True, False):
        saved = A.native_batch_norm(x, mean, mean, mean.clone(), v.clone(), training, 0.1, 1e-5)[1:]
        calls.append((A.native_batch_norm.default, (x, mean, mean, mean, v, training, 0.1, 1e-5)))
        calls.append((A.native_batch_norm_backward.default, (x, x, mean, mean, v, *saved, training, 1e-5, [True] * 3)))
    asked = []
    for op, args in calls:
        tensors = [t for t in args if isinstance(t, torch.Tensor)]
        found = module.infer(op, args, {}, tensors)
        assert isinstance(found, Inferred)
        real = op(*[a.clone() if isinstance(a, torch.Tensor) else a for a in args])
        outputs = [t for t in leaves([real]) if isinstance(t, torch.Tensor)]
        for spec, t in zip(found.fresh, outputs, strict=True):
            assert spec.shape == tuple(t.shape)
            assert all(a == b for n, a, b in zip(t.shape, spec.strides, t.stride(), strict=True) if n > 1)
        asked.append(module._meta_suffices(op, args, tensors))
    plain = kernel == 3 and of_image is of_weight is torch.contiguous_format
    assert asked == [plain, plain, True, True, False, True]


def test_torchs_compiler_is_imported_where_nothing_else_knows_what_a_call_returns() -> None:
    said = in_process("""
        import sys, torch
        from torch.nn import functional as F
        from fused_eager import fused_eager

        x, weight, places = torch.ones(2, 3, 8, 8), torch.ones(4, 3, 3, 3), torch.tensor([0, 1])
        for mode in ({"compile": "auto", "native": "measured"}, {"compile": "wait"}, {"native": "never"}):
            with fused_eager(**mode):
                y = torch.relu(F.conv2d(x, weight, padding=1)).flatten(1)[places]
                y = F.layer_norm(torch.softmax(y @ y.mT, 1), (2,)) + torch.arange(2)
                print(torch.cat([y, y]).sum(0).tolist(), "torch._dynamo" in sys.modules)
        with fused_eager(compile="wait"):
            print(F.grid_sample(x, torch.zeros(2, 1, 1, 2), align_corners=False).shape, "torch._dynamo" in sys.modules)
    """)
    assert said == "[0.0, 4.0] False\n" * 3 + "torch.Size([2, 3, 1, 1]) True\n"


def test_a_loop_of_growing_lengths_indices_and_masks_imports_neither_torchs_compiler_nor_sympy() -> None:
    said = in_process("""
        import sys
        import torch
        from fused_eager import fused_eager

        table, index = torch.arange(32.0).reshape(8, 4), torch.tensor([1, 3])

        def loop():
            x, grown, seen = torch.ones(64), torch.ones(1, 4), []
            for i in range(400):
                x = x * 1.01 + table.sum()
                masked = table[table > i % 7]
                grown = torch.cat([grown, table[index]]) if i % 40 else torch.ones(1, 4)
                seen.append(float((grown * 2).sum() + x[0] / x.sum() + masked.mean()))
            return seen

        plain = loop()
        with fused_eager(compile="auto", native="measured"):
            ours = loop()
        assert all(abs(a - b) <= 1e-5 * abs(b) for a, b in zip(ours, plain, strict=True))
        print([name for name in ("torch._dynamo", "sympy") if name in sys.modules])
    """)
    assert said == "[]\n"
