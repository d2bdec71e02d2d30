"""The context itself: nesting, switching, decorating; and other machinery of torch that runs inside it."""

from __future__ import annotations

import copy
import warnings
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fused_eager import OptionError, current_mode, fused_eager, sync

from .programs import check, in_process

Program = Callable[[], Any]
PROGRAMS: dict[str, Program] = {}


def program(function: Program) -> Program:
    PROGRAMS[function.__name__] = function
    return function


def test_nesting_and_switching() -> None:
    seen = [current_mode()]
    with fused_eager(mode="fused"):
        x = torch.ones(3) * 2
        seen.append(current_mode())
        with fused_eager(mode="debug"):
            y = x + 1
            seen.append(current_mode())
            with fused_eager(mode="off"):
                seen.append(current_mode())
                x.add_(1)
                assert x.numpy().tolist() == [3.0] * 3
                with fused_eager(mode="strict"):
                    seen.append(current_mode())
                    z = x * y
                seen.append(current_mode())
                z.mul_(2)
            z.add_(1)
            with fused_eager():
                seen.append(current_mode())
        w = z + x
        x.zero_()
        seen.append(current_mode())
    seen.append(current_mode())
    assert seen == ["off", "fused", "debug", "off", "strict", "off", "debug", "fused", "off"]
    assert (x.tolist(), y.tolist(), z.tolist(), w.tolist()) == ([0.0] * 3, [3.0] * 3, [19.0] * 3, [22.0] * 3)


def test_off_outside_and_fused_inside() -> None:
    with fused_eager(mode="off"):
        x = torch.ones(3)
        with fused_eager(mode="fused"):
            y = x * 2
        assert current_mode() == "off"
        y.add_(1)
    assert y.tolist() == [3.0] * 3


def test_one_object_entered_again(mode: str) -> None:
    context = fused_eager(mode=mode)
    with context:
        x = torch.ones(3) * 2
        with context:
            y = x + 1
        z = y + 1
    with context:
        w = z + 1
    assert w.tolist() == [5.0] * 3


def test_decorator(mode: str) -> None:
    @fused_eager(mode=mode)
    def power(x: torch.Tensor, n: int) -> torch.Tensor:
        """Docs."""
        assert current_mode() == mode
        return x if n == 0 else power(x, n - 1) * x

    assert power(torch.full((2,), 2.0), 3).tolist() == [16.0, 16.0]
    assert power.__name__ == "power" and power.__doc__ == "Docs." and current_mode() == "off"


def test_decorator_without_parentheses() -> None:
    @fused_eager
    def double(x: torch.Tensor) -> torch.Tensor:
        """Docs."""
        assert current_mode() == "fused"
        return x * 2

    assert double(torch.ones(2)).tolist() == [2.0, 2.0]
    assert double.__name__ == "double" and double.__doc__ == "Docs."


def test_what_runs_in_pieces_cannot_be_decorated() -> None:
    def pieces() -> Iterator[int]:
        yield 1

    async def waits() -> None: ...

    async def both() -> AsyncIterator[int]:
        yield 1

    for function, kind in ((pieces, "a generator"), (waits, "a coroutine"), (both, "an asynchronous generator")):
        for decorate in (fused_eager, fused_eager(mode="strict")):
            with pytest.raises(TypeError, match=rf"{function.__name__}, which is {kind}: .*`with fused_eager"):
                decorate(function)


@pytest.mark.parametrize("thing", [torch.nn.Linear, torch.nn.Linear(2, 2), 3], ids=["class", "module", "number"])
def test_what_is_no_function_cannot_be_decorated(thing: Any) -> None:
    """Its parameters, or that it is a class, would be lost."""
    with pytest.raises(TypeError, match=r"decorates functions and methods, and .* is none\. Write `with fused_eager"):
        fused_eager()(thing)


def test_finding_nan_is_refused_where_nobody_would_look(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(2)
    for mode in ("fused", "strict"):
        refused = pytest.raises(OptionError, match=f"'check_nan' needs mode 'debug', and .* is in mode '{mode}'")
        with refused, fused_eager(mode=mode, check_nan=True):
            pass
    with fused_eager(mode="debug", check_nan=True):
        with fused_eager(mode="fused"):  # inherited, not asked for
            assert (x + 1).tolist() == [2.0, 2.0]
        with pytest.raises(FloatingPointError):
            x.log().neg().div(0)
    with fused_eager(mode="off", check_nan=True):
        assert x.div(0).isinf().all()
    monkeypatch.setenv("FUSED_EAGER_CHECK_NAN", "1")
    with pytest.raises(OptionError, match="check_nan"), fused_eager(mode="fused"):
        pass
    assert (x + 1).tolist() == [2.0, 2.0]


def test_options_that_equal_allowed_ones_are_told_all_the_same() -> None:
    for _ in range(2):
        fused_eager(mode="debug", check_nan=True)
        with pytest.raises(OptionError, match="check_nan"):
            fused_eager(mode="debug", check_nan=1)
        with pytest.raises(OptionError, match="check_nam"):
            fused_eager(mode="debug", check_nam=None)
        with pytest.raises(OptionError, match="report"):
            fused_eager(mode="debug", report=[])


def test_a_wrong_option_is_refused_where_it_is_written() -> None:
    with pytest.raises(OptionError, match="fused"):
        fused_eager(mode="fast")
    with pytest.raises(OptionError, match="max_pending"):
        fused_eager(max_pendng=3)


def test_the_environment_names_the_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSED_EAGER_MODE", "strict")
    with fused_eager():
        assert current_mode() == "strict"
    with fused_eager(mode="debug"):
        assert current_mode() == "debug"


def test_nothing_stays_patched(mode: str) -> None:
    names = ("numpy", "__repr__", "data_ptr", "tolist", "__deepcopy__", "untyped_storage")
    before = [vars(torch.Tensor).get(n) for n in names] + [torch.autograd.backward, torch.Tensor.numpy]
    with fused_eager(mode=mode):
        torch.ones(3) * 2
    assert [vars(torch.Tensor).get(n) for n in names] + [torch.autograd.backward, torch.Tensor.numpy] == before


def test_sync_outside_is_nothing() -> None:
    sync()


def test_a_bounded_stream() -> None:
    with fused_eager(mode="fused", max_pending=10, max_region=4):
        x = torch.ones(3)
        for _ in range(35):
            x = x + 1
    assert x.tolist() == [36.0] * 3


@program
def meta_tensors() -> Any:
    t = torch.zeros(3, device="meta")
    m = nn.Linear(3, 4, device="meta")
    with torch.device("meta"):
        e = torch.ones(2) + 1
        n = nn.LayerNorm(3)
    full = torch.full_like(t, 2.0)
    return (
        t,
        t + 1,
        m.weight.device,
        m(t),
        e,
        n.weight,
        full,
        torch.arange(3, device="meta"),
        m.to_empty(device="cpu").weight.shape,
    )


@program
def custom_op_without_result_has_effects() -> Any:
    seen: list[float] = []
    lib = torch.library.Library("semantics_a", "FRAGMENT")
    try:
        lib.define("log(Tensor x) -> ()")
        lib.impl("log", lambda x: seen.append(x.sum().item()), "CPU")
        torch.library.register_fake("semantics_a::log", lambda x: None, lib=lib)
        x = torch.ones(3) * 2
        torch.ops.semantics_a.log(x)
        torch.ops.semantics_a.log(x + 1)
        return x + 1, seen
    finally:
        sync()  # a library must not go while its ops are pending
        lib._destroy()


@program
def custom_op_that_writes() -> Any:
    lib = torch.library.Library("semantics_b", "FRAGMENT")
    try:
        lib.define("inc(Tensor(a!) x, Tensor y) -> Tensor")
        lib.impl("inc", lambda x, y: x.add_(1) + y, "CPU")
        torch.library.register_fake("semantics_b::inc", lambda x, y: torch.empty_like(x), lib=lib)
        x, z = torch.ones(3) * 2, torch.empty(8).fill_(1.0)
        sync()
        a = torch.ops.semantics_b.inc(x, x)
        b = torch.ops.semantics_b.inc(z[2:4], x[:2])
        c = torch.ops.semantics_b.inc(z[1::3], x)
        return x, z, a, b, c
    finally:
        sync()  # a library must not go while its ops are pending
        lib._destroy()


@program
def custom_op_that_draws() -> Any:
    lib = torch.library.Library("semantics_c", "FRAGMENT")
    try:
        lib.define("noise(Tensor x) -> Tensor")
        lib.impl("noise", lambda x: x + torch.rand(3), "CPU")
        torch.library.register_fake("semantics_c::noise", lambda x: torch.empty_like(x), lib=lib)
        a = torch.ops.semantics_c.noise(torch.ones(3))
        return a, torch.rand(3)
    finally:
        sync()  # a library must not go while its ops are pending
        lib._destroy()


@program
def custom_op_decorated() -> Any:
    @torch.library.custom_op("semantics_d::sincos", mutates_args=())
    def sincos(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.sin(), x.cos()

    sincos.register_fake(lambda x: (torch.empty_like(x), torch.empty_like(x)))
    sincos.register_autograd(
        lambda ctx, a, b: a * ctx.saved_tensors[1] - b * ctx.saved_tensors[0],
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*output),
    )
    x = torch.ones(3, requires_grad=True)
    a, b = sincos(x * 1)
    (a + b).sum().backward()
    return a, b, x.grad


@program
def other_modes() -> Any:
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils.flop_counter import FlopCounterMode

    seen: list[str] = []

    class Log(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with Log():
        a = (torch.ones(3) + 1).sum().item()
    with FlopCounterMode(display=False) as flops:
        torch.ones(4, 4) @ torch.ones(4, 4)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        b = (torch.ones(3) + 2).sum().item()
    return seen, a, b, flops.get_total_flops()


@program
def fake_tensors_inside() -> Any:
    from torch._subclasses.fake_tensor import FakeTensorMode

    x = torch.ones(3) * 2
    with FakeTensorMode(allow_non_fake_inputs=True):
        f = torch.empty(3)
        g = f + 1
    return type(g).__name__, tuple(g.shape), x


@program
def traced_by_fx() -> Any:
    from torch.fx.experimental.proxy_tensor import make_fx

    g = make_fx(lambda x: (x + 1).sin() @ torch.eye(3))(torch.ones(3))
    return [str(n.target) for n in g.graph.nodes], g(torch.zeros(3))


@program
def scripted() -> Any:
    @torch.jit.script
    def f(x: torch.Tensor, n: int) -> torch.Tensor:
        for _ in range(n):
            if bool(x.sum() > 100):
                x = x / 2
            else:
                x = x * 2 + 1
        return x

    x = torch.ones(4) * 1
    return [f(x, i) for i in range(6)]


@program
def traced_by_jit() -> Any:
    f = torch.jit.trace(lambda x: (x * 2).relu(), torch.ones(3))
    return f(torch.ones(3) * -3), f(torch.ones(3))


@program
def compiled() -> Any:
    f = torch.compile(lambda x: (x * 2).relu(), backend="eager")
    return f(torch.ones(3) * 3)


@program
def higher_order_cond() -> Any:
    return torch.cond(torch.tensor(True), lambda x: x + 1, lambda x: x - 1, (torch.ones(2),))


@program
def flex_attention() -> Any:
    from torch.nn.attention.flex_attention import flex_attention as flex

    q = torch.linspace(0, 1, 32).view(1, 1, 4, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return flex(q, q, q, score_mod=lambda s, b, h, i, j: s + (i - j))


class Plain(torch.Tensor):
    pass


class Logged(torch.Tensor):
    seen: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.append(getattr(func, "__name__", str(func)))
        return super().__torch_function__(func, types, args, kwargs or {})


class Wrapped(torch.Tensor):
    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, inner.size(), dtype=inner.dtype, strides=inner.stride())

    def __init__(self, inner: torch.Tensor):
        self.inner = inner

    def __repr__(self) -> str:
        return f"Wrapped({self.inner})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from torch.utils._pytree import tree_map

        bare = tree_map(lambda t: t.inner if isinstance(t, Wrapped) else t, (args, kwargs or {}))
        out = func(*bare[0], **bare[1])
        return tree_map(lambda t: Wrapped(t) if isinstance(t, torch.Tensor) else t, out)


@program
def subclasses_with_torch_function() -> Any:
    s = (torch.ones(3) * 2).as_subclass(Plain)
    t = s + 1
    Logged.seen.clear()
    g = (torch.ones(3) * 2).as_subclass(Logged)
    h = g.add(1)
    values = h.tolist(), h.numpy().tolist(), repr(h), h.data_ptr() == h.data_ptr()
    return (
        type(t).__name__,
        t.tolist(),
        repr(t),
        type(t[1:]).__name__,
        (t + torch.ones(3)).sum().item(),
        values,
        list(Logged.seen),
    )


@program
def subclasses_with_torch_dispatch() -> Any:
    from torch.testing._internal.two_tensor import TwoTensor

    w = Wrapped(torch.ones(3) * 2)
    y = (w + 1) * torch.ones(3)
    t = TwoTensor(torch.ones(3) * 2, torch.ones(3) * 3)
    r = (t * t).sum()
    return type(y).__name__, y.inner, repr(y), y.sum().inner, r.a, r.b, repr(t * 1)


@program
def sparse_tensors() -> Any:
    i, v = torch.tensor([[0, 1], [1, 0]]) * 1, torch.ones(2) * 3
    s = torch.sparse_coo_tensor(i, v, (2, 2))
    w = torch.ones(2, 2) * 1
    w.add_(s)
    v2 = s.coalesce().values()
    v2.add_(1)
    c = (torch.eye(2) * 2).to_sparse_csr()
    return (
        s.to_dense(),
        torch.sparse.mm(s, torch.ones(2, 2) * 2),
        repr(s),
        v2,
        w,
        (s * 2 + s).to_dense(),
        c.values(),
        c @ (torch.ones(2, 2) * 3),
        repr(c),
        (torch.eye(3) * 2).to_sparse().mul_(2).to_dense(),
    )


@program
def sparse_values_written() -> Any:
    s = torch.sparse_coo_tensor(torch.tensor([[0, 1], [1, 0]]), torch.ones(2), (2, 2), is_coalesced=True)
    s._values().add_(5)
    first = repr(s), s.to_dense()
    s._values().mul_(2)
    return first, s.to_dense(), (s + s).to_dense(), copy.deepcopy(s).to_dense()


@program
def nested_tensors() -> Any:
    n = torch.nested.nested_tensor([torch.ones(2) * 2, torch.ones(3) * 3])
    return [x.clone() for x in (n * 2).unbind()], torch.nested.to_padded_tensor(n, 0.0)


@program
def quantized_tensors() -> Any:
    q = torch.quantize_per_tensor(torch.ones(3) * 1.5, 0.1, 0, torch.qint8)
    return q.dequantize(), q.int_repr(), q.q_scale()


@program
def mkldnn_tensors() -> Any:
    m = (torch.ones(2, 2) * 2).to_mkldnn()
    return m.to_dense(), F.relu(m).to_dense()


@program
def lazy_modules() -> Any:
    m = nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d())
    m(torch.ones(2, 4))
    return [tuple(p.shape) for p in m.parameters()], type(m[0]).__name__


@program
def state_dicts() -> Any:
    a, b = nn.Linear(3, 3), nn.Linear(3, 3)
    b.load_state_dict(a.state_dict())
    with torch.no_grad():
        a.weight.add_(1)
    b2 = copy.deepcopy(b)
    b2.load_state_dict({k: v * 2 for k, v in b.state_dict().items()}, assign=True)
    return a.weight - b.weight, b2.weight / b.weight, b2(torch.ones(1, 3)).shape, b.double().half().float().weight.dtype


@program
def helpers_of_training() -> Any:
    m = nn.Linear(2, 2)
    nn.init.ones_(m.weight)
    nn.init.zeros_(m.bias)
    opt = torch.optim.SGD(m.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(m(torch.ones(1, 2)).sum()).backward()
    scaler.unscale_(opt)
    scaler.step(opt)
    scaler.update()
    average = torch.optim.swa_utils.AveragedModel(m)
    average.update_parameters(m)
    x = torch.ones(3, requires_grad=True)
    lbfgs = torch.optim.LBFGS([x], lr=0.5, line_search_fn="strong_wolfe")

    def closure() -> torch.Tensor:
        lbfgs.zero_grad()
        loss = ((x - 2) ** 2).sum()
        loss.backward()
        return loss

    lbfgs.step(closure)
    return m.weight, scaler.get_scale(), average.module.weight, x


@program
def warnings_are_torchs_own() -> Any:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.add(torch.ones(3), 1, out=torch.ones(2))
        F.mse_loss(torch.ones(2, 1), torch.ones(2))
    return sorted(str(w.message)[:60] for w in caught)


@program
def mkldnn_rnn() -> Any:
    m = nn.LSTM(3, 4, 2)
    for p in m.parameters():
        nn.init.constant_(p, 0.1)
    x = torch.linspace(-1, 1, 15).view(5, 1, 3)
    train = m(x)
    train[0].sum().backward()
    m.eval()
    with torch.no_grad():
        return train, m(x), [p.grad for p in m.parameters()]


@pytest.mark.thinned(4)
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.filterwarnings("ignore")
def test_program(name: str, mode: str) -> None:
    check(PROGRAMS[name], mode, versions=False)


@pytest.mark.thinned(2)
@pytest.mark.parametrize(
    "options",
    [{"mode": "debug", "check_nan": True}, {"mode": "strict"}, {"compile": "wait", "native": "never"}, {"verify": 1.0}],
    ids=str,
)
def test_a_context_within_one_that_rests(options: dict[str, Any]) -> None:
    """A program begins natively, as nothing is saved up yet that recording may cost; in what is asked for within, ops
    are recorded all the same, each time."""
    said = in_process(f"""
        import torch
        from fused_eager import fused_eager
        from fused_eager.devices.host.buffers import TABLE
        options = {options!r}
        with fused_eager(compile="auto", native="measured", progress=False):
            for _ in range(3):
                with fused_eager(**options):
                    try:
                        y = (torch.ones(3) - 2).log()
                        print("recorded" if TABLE else "not seen", y.isnan().all().item())
                    except FloatingPointError as error:
                        print("checked", "aten.log.default" in str(error))
                (torch.ones(3) + 1).tolist()
    """)
    assert said.split() == ["checked" if "check_nan" in options else "recorded", "True"] * 3
