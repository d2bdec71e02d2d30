"""Calls of a jax_op: arguments of every kind, what is written in place, autocast, gradients, and errors."""

from __future__ import annotations

import gc
import traceback
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax import lax

from fused_eager import KernelError, fused_eager, jax_op

Tensor = torch.Tensor
Array = jax.Array


def close(a: Any, b: Any) -> None:
    torch.testing.assert_close(a, b)


# ---- arguments ---------------------------------------------------------------------------------------------------


class Pair(NamedTuple):
    left: Any
    right: Any


@jax_op("op_tests::every")
def every(
    x: Tensor, more: list[Tensor], bias: Tensor | None, n: int, name: Literal["add", "mul"] = "add", *,
    s: float = 1.0, flag: bool = False, dtype: torch.dtype = torch.float32, sizes: tuple[int, ...] = (1,),
) -> tuple[Tensor, Tensor]:  # fmt: skip
    total = sum(more, x) if name == "add" else x * more[0]
    total = total * n * s + (0 if bias is None else bias)
    return (-total if flag else total).astype(dtype), total.reshape(*sizes, *total.shape)


def test_arguments_of_every_kind_and_the_schema() -> None:
    assert every.schema == ""  # torch's schemas have no default for a dtype
    x, y, b = torch.randn(3), torch.randn(3), torch.randn(3)
    close(every(x, [y, y], None, 2)[0], (x + 2 * y) * 2)
    close(every(x, [y], b, 3, "mul", s=0.5)[0], x * y * 1.5 + b)
    out = every(x, [y], bias=b, n=3, flag=True, dtype=torch.float64, sizes=[1, 1])
    close(out[0], -((x + y) * 3 + b).double())
    assert out[1].shape == (1, 1, 3)


@jax_op
def trees(pair: Pair, how: dict) -> dict:
    return {"sum": pair.left + pair.right["a"] * how["scale"], "parts": [pair.left * how["n"], how["more"][0]]}


def test_pytrees_of_tensors_in_and_out() -> None:
    x, y = torch.randn(2, 3), torch.randn(2, 3)
    for scale in (2.0, 3.0):
        out = trees(Pair(x, {"a": y}), {"scale": scale, "n": 3, "more": (y,)})
        close(out, {"sum": x + y * scale, "parts": [x * 3, y]})


@pytest.mark.parametrize("backend", ["aot_eager", "fused_eager"])
def test_dynamo_takes_pytrees_into_its_graph(backend: str) -> None:
    torch._dynamo.reset()

    def step(x: Tensor) -> dict[str, Any]:
        return trees(Pair(x.sin(), {"a": x}), {"scale": 2.0, "n": 3, "more": [x]})

    x = torch.randn(3)
    close(torch.compile(step, backend=backend, fullgraph=True)(x), step(x))


@jax_op("op_tests::by_factor")
def by_factor(x: Array, s: float, dtype: torch.dtype = torch.float32) -> Array:
    return (x * s).astype(dtype)


@jax_op("op_tests::by_schema")
def by_schema(x: Array, s: float) -> Array:
    return x * s


@jax_op("op_tests::by_named_factor")
def by_named_factor(x: Array, how: dict) -> dict:
    return {"out": x * how["s"]}


@pytest.mark.parametrize("backend", ["eager", "fused_eager"])
@pytest.mark.parametrize("op", [by_schema, by_factor, lambda x, s: by_named_factor(x, {"s": s})["out"]])
def test_a_float_that_varies_in_a_compiled_function(op: Any, backend: str) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, s: op(x * 2, s) + 1, backend=backend, fullgraph=True, dynamic=True)
    for s in (1.5, 2.5, -3.0):
        close(compiled(torch.ones(3), s), torch.full((3,), 2 * s + 1))


@jax_op("op_tests::counted")
def counted(n: int, more: list[Tensor]) -> Tensor:
    return jnp.arange(n, dtype=jnp.float32) + sum(more)


@pytest.mark.parametrize("mode", ["off", "fused", "strict", "debug"])
def test_a_call_may_be_without_tensors(mode: str) -> None:
    torch._dynamo.reset()
    with fused_eager(mode=mode):
        close(counted(3, []) + 1, torch.tensor([1.0, 2.0, 3.0]))
    close(torch.compile(lambda: counted(2, []) + 1, backend="fused_eager")(), torch.tensor([1.0, 2.0]))
    x = torch.ones(3, requires_grad=True)
    counted(3, [x, x]).sum().backward()
    close(x.grad, torch.full((3,), 2.0))


def test_static_arguments_are_part_of_the_program_by_value_and_traced_ones_are_not() -> None:
    seen = []

    @jax_op("op_tests::kinds", static=["s"], traced=["n"])
    def kinds(x: Array, s: float, n: int) -> Array:
        jax.debug.callback  # noqa: B018 - a name of a library
        assert isinstance(s, float) and not isinstance(n, int)
        return x * s + n

    x = torch.zeros(2)
    for s, n in ((1.0, 1), (1.0, 2), (2.0, 2), (2.0, 5)):
        close(kinds(x, s, n), x + n)
        seen.append(len(kinds._bases))
    assert seen == [1, 1, 2, 2]


def test_a_schema_in_words() -> None:
    @jax_op("op_tests::worded", schema="(Tensor x, Tensor(a!) cache, float s=2.0, int n=1) -> Tensor")
    def worded(x, cache, s, n):  # type: ignore[no-untyped-def]
        return x * s, cache + n

    x, cache = torch.randn(3), torch.zeros(3)
    close(worded(x, cache, n=4), x * 2)
    close(cache, torch.full((3,), 4.0))
    close(torch.ops.op_tests.worded(x, cache, 3.0), x * 3)
    close(cache, torch.full((3,), 5.0))


def test_strides_views_and_dtypes() -> None:
    @jax_op("op_tests::twice")
    def twice(x: Array) -> Array:
        return x + x

    base = torch.arange(24.0).reshape(4, 6)
    for x in (base.t(), base[::2, 1:4], base[0], base[:0], torch.tensor(2.0), base.to(torch.bfloat16), base.half(),
              base.long(), base.to(torch.int8), base > 3, torch.complex(base, -base).conj()):  # fmt: skip
        for mode in ("off", "fused", "strict"):
            with fused_eager(mode=mode):
                out = twice(x)
            wanted = x + x if x.dtype != torch.bool else x
            assert out.dtype == wanted.dtype and out.is_contiguous()
            close(out, wanted.contiguous())


def test_64_bit_numbers_only_where_an_argument_has_them() -> None:
    @jax_op("op_tests::filled")
    def filled(x: Array) -> Array:
        return x + jnp.ones(3)

    assert filled(torch.zeros(3)).dtype == torch.float32
    assert filled(torch.zeros(3, dtype=torch.float64)).dtype == torch.float64
    assert filled(torch.zeros(3, dtype=torch.bfloat16)).dtype == torch.float32
    with fused_eager():
        assert filled(torch.zeros(3) * 2).dtype == torch.float32


# ---- in place ----------------------------------------------------------------------------------------------------


@jax_op("op_tests::update", mutates_args=["cache"])
def update(cache: Tensor, new: Tensor, at: int) -> None:
    return cache.at[at].set(new)


@pytest.mark.parametrize("mode", ["off", "fused", "strict", "debug"])
def test_what_is_declared_is_written_in_place(mode: str) -> None:
    cache = torch.zeros(4, 3)
    view, version = cache[1], cache._version
    new = torch.randn(3, requires_grad=True)
    with fused_eager(mode=mode):
        for at in (1, 3):
            assert update(cache, new.detach() * 2, at) is None
        total = view.sum()
    close(cache, torch.stack([torch.zeros(3), new.detach() * 2, torch.zeros(3), new.detach() * 2]))
    close(total, new.detach().sum() * 2)
    assert cache._version == version + 2
    with fused_eager(mode=mode):
        own = torch.zeros(4, 3) * 1
        update(own, new, 2)
        own.sum().backward()
    close(new.grad, torch.ones(3))


def test_what_is_written_has_to_fit() -> None:
    @jax_op("op_tests::grown", mutates_args=["x"])
    def grown(x: Tensor) -> None:
        return jnp.concatenate([x, x])

    with pytest.raises(KernelError, match=r"returned torch.float32\[4\] as the new value of 'x', which is .*\[2\]"):
        grown(torch.zeros(2))
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        update(torch.zeros(4, 3, requires_grad=True), torch.zeros(3), 1)


# ---- autocast ----------------------------------------------------------------------------------------------------


def test_autocast_by_argument() -> None:
    seen = {}

    @jax_op("op_tests::product", autocast={"x": "lower", "w": torch.float32})
    def product(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return (x @ w.astype(x.dtype)) + b.astype(x.dtype)

    x, w, b = torch.randn(2, 3), torch.randn(3, 4, dtype=torch.bfloat16), torch.randn(4)
    for mode in ("off", "fused"):
        with fused_eager(mode=mode), torch.autocast("cpu", dtype=torch.bfloat16):
            seen[mode] = product(x, w, b)
        assert seen[mode].dtype == torch.bfloat16
    assert product(x, w, b).dtype == torch.float32
    close(seen["off"], seen["fused"])
    torch._dynamo.reset()
    for op in (torch.compile(lambda *args: product(*args), backend="fused_eager"), torch.ops.op_tests.product):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            close(op(x, w, b), seen["off"])


# ---- gradients ---------------------------------------------------------------------------------------------------


def test_the_users_own_gradient_is_used() -> None:
    @jax.custom_vjp
    def tripled(x: Array) -> Array:
        return jnp.sin(x)

    # Not what is right, so that one sees which it was.
    tripled.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (3 * jnp.cos(x) * g,))

    @jax_op("op_tests::tripled")
    def op(x: Array) -> Array:
        return tripled(x)

    x = torch.randn(4, requires_grad=True)
    for mode in ("off", "fused"):
        with fused_eager(mode=mode):
            (g,) = torch.autograd.grad(op(x).sum(), x, create_graph=True)
            (gg,) = torch.autograd.grad(g.sum(), x)
        close(g, 3 * torch.cos(x))
        close(gg, -3 * torch.sin(x))


def test_what_jax_cannot_differentiate_fails_on_the_way_back_alone() -> None:
    @jax_op("op_tests::halved")
    def halved(x: Array) -> Array:
        return lax.while_loop(lambda v: v.sum() > 1, lambda v: v / 2, x)

    x = torch.full((4,), 3.0, requires_grad=True)
    out = halved(x)
    close(out.detach(), torch.full((4,), 0.1875))
    with pytest.raises(RuntimeError, match=r"op_tests::halved has no gradient: JAX says .*while_loop"):
        out.sum().backward()
    dual = torch.func.jvp(halved, (x.detach(),), (torch.ones(4),))[1]
    close(dual, torch.full((4,), 0.0625))


def test_integers_and_results_without_gradients() -> None:
    @jax_op("op_tests::mixed")
    def mixed(x: Array, i: Array) -> tuple[Array, Array, Array]:
        return x[i], jnp.argmax(x), x * 2

    x, i = torch.randn(5, requires_grad=True), torch.tensor([1, 1, 4])
    a, b, c = mixed(x, i)
    assert a.requires_grad and not b.requires_grad and b.dtype == torch.int64 and c.requires_grad
    (a.sum() + c[0]).backward()
    close(x.grad, torch.tensor([2.0, 2.0, 0.0, 0.0, 1.0]))
    with torch.no_grad():
        assert not mixed(x, i)[0].requires_grad
    with torch.inference_mode():
        assert mixed(x, i)[0].is_inference()


def test_complex_gradients_are_torchs() -> None:
    @jax_op("op_tests::spun")
    def spun(z: Array) -> Array:
        return z * jnp.exp(1j * z) * jnp.conj(z)

    z = torch.randn(3, dtype=torch.complex128, requires_grad=True)
    own = z * torch.exp(1j * z) * z.conj()
    for a, b in zip(*[torch.autograd.grad(torch.view_as_real(f).sin().sum(), z) for f in (spun(z), own)], strict=True):
        close(a, b)
    assert torch.autograd.gradcheck(spun, z, check_forward_ad=True)


def test_gradients_within_gradients() -> None:
    @jax_op("op_tests::same")
    def same(x: Array) -> Array:
        return x * 1

    x = torch.randn(3)
    found = torch.func.grad(lambda v: torch.func.grad(lambda u: (same(u) ** 3).sum())(v).sum())(x)
    close(found, 6 * x)


def test_functions_of_functions() -> None:
    @jax_op("op_tests::wave")
    def wave(x: Array, w: Array) -> Array:
        return jnp.sin(x * w)

    x, w = torch.randn(3, 4), torch.randn(4)
    from torch.func import grad, hessian, jacfwd, jacrev, vmap

    def plain(x: Tensor, w: Tensor) -> Tensor:
        return torch.sin(x * w)

    for op in (lambda f: vmap(f, (0, None))(x, w), lambda f: vmap(f, (None, 0))(x[0], x), lambda f: jacrev(f)(x, w),
               lambda f: jacfwd(f)(x[0], w), lambda f: hessian(lambda x: f(x, w).sum())(x[0]),
               lambda f: vmap(grad(lambda a, b: f(a, b).sum()), (0, None))(x, w),
               lambda f: grad(lambda v: grad(lambda u: (f(u, w) ** 3).sum())(v).sum())(x[0]),
               lambda f: vmap(vmap(f, (0, 0)), (0, None))(x, w)):  # fmt: skip
        close(op(wave), op(plain))


def test_saved_tensors_are_held_to_their_versions_and_freed() -> None:
    @jax_op("op_tests::squared")
    def squared(x: Array) -> Array:
        return x * x

    x = torch.randn(3, requires_grad=True)
    y = x * 1
    out = squared(y)
    y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
    out = squared(x * 1).sum()
    out.backward()
    with pytest.raises(RuntimeError, match="second time"):
        out.backward()
    gc.collect()
    before = len([o for o in gc.get_objects() if isinstance(o, Tensor)])
    for _ in range(4):
        squared(x * 1).sum().backward()
    assert len([o for o in gc.get_objects() if isinstance(o, Tensor)]) <= before + 1


# ---- what changes meanwhile --------------------------------------------------------------------------------------

FACTOR = 2.0


@pytest.mark.parametrize("mode", ["off", "fused", "strict"])
def test_a_global_that_changes_is_seen_at_the_next_call(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    @jax_op("op_tests::by_global")
    def by_global(x: Array) -> Array:
        return x * FACTOR

    x = torch.ones(2)
    with fused_eager(mode=mode):
        outs = []
        for factor in (2.0, 3.0, 2.0):
            monkeypatch.setitem(globals(), "FACTOR", factor)
            outs.append(by_global(x) + 1)
    assert [o.tolist()[0] for o in outs] == [3.0, 4.0, 3.0]


def test_a_name_that_is_declared_again_is_the_new_function_and_the_old_one_works_on() -> None:
    def make(n: int) -> Any:
        @jax_op("op_tests::again")
        def again(x: Array) -> Array:
            return x * n

        return again

    first, second = make(2), make(5)
    x = torch.ones(2)
    with fused_eager():
        a, b, c = first(x), second(x), torch.ops.op_tests.again(x)
    assert (a[0], b[0], c[0]) == (2, 5, 5)

    @jax_op("op_tests::again")
    def again(x: Array, y: Array) -> Array:
        return x + y

    assert again(x, x)[0] == 2 and first(x)[0] == 2
    with pytest.raises(KernelError, match=r"declared again with the schema .*, and torch.ops keeps the first"):
        torch.ops.op_tests.again(x)
    torch._dynamo.reset()
    torch._dynamo.trace_rules.clear_lru_cache()  # as the start of a process group does
    assert torch.compile(lambda x: first(x) + second(x), backend="eager", fullgraph=True)(x)[0] == 7


# ---- errors ------------------------------------------------------------------------------------------------------


def test_an_error_inside_names_the_users_line() -> None:
    @jax_op("op_tests::wrong")
    def wrong(x: Array) -> Array:
        y = x + 1
        return y @ jnp.ones((7, 7))  # the line that is wrong

    for mode in ("off", "fused", "strict", "debug"):
        with fused_eager(mode=mode), pytest.raises(TypeError, match="dot_general") as error:
            wrong(torch.ones(2, 3))
        assert any("the line that is wrong" in (f.line or "") for f in traceback.extract_tb(error.value.__traceback__))
    with fused_eager():
        assert (torch.ones(2) + 1).tolist() == [2, 2]


@pytest.mark.parametrize("backend", ["eager", "fused_eager"])
def test_an_error_inside_of_a_compiled_function_names_the_users_line(backend: str) -> None:
    @jax_op("op_tests::wrong_there")
    def wrong_there(x: Array) -> Array:
        return x @ jnp.ones((7, 7))  # the line that is wrong

    torch._dynamo.reset()
    with pytest.raises(Exception, match=r"test_op.py:\d+, in wrong_there: return x @ jnp.ones"):
        torch.compile(lambda x: wrong_there(x) + 1, backend=backend)(torch.ones(2, 3))


def test_an_op_may_call_the_function_of_another_which_is_part_of_its_content() -> None:
    def inner(factor: float) -> Any:
        @jax_op("op_tests::inner")
        def inner(x: Array) -> Array:
            return x * factor

        return inner

    def outer(op: Any) -> Any:
        @jax_op("op_tests::outer")
        def outer(x: Array) -> Array:
            return op.function(x) + 1

        return outer

    one, two = outer(inner(2.0)), outer(inner(3.0))
    assert (one(torch.ones(1)).item(), two(torch.ones(1)).item()) == (3, 4)
    assert one.version() != two.version() == outer(inner(3.0)).version()


def test_numbers_of_numpys_are_taken_for_pythons() -> None:
    @jax_op("op_tests::by_numpy", traced=["n"])
    def by_numpy(x: Array, s: float, n: int, how: dict) -> Array:
        return x * s + n * how["by"]

    for s in (1 / np.sqrt(4), np.float32(0.5), 0.5):
        assert by_numpy(torch.ones(2), s, np.int64(3), {"by": np.float64(2.0)}).tolist() == [6.5, 6.5]
    assert len(by_numpy._bases) == 1


def declare(function: Any, *args: Any, **kwargs: Any) -> Any:
    return lambda: jax_op(*args, **kwargs)(function)


def bare(x, n):  # type: ignore[no-untyped-def]
    return x


def typed(x: Array, n: int) -> Array:
    return x


def starred(*x: Array) -> Array:
    return x[0]


def half(x: Array, n: int = 2.5) -> Array:  # type: ignore[assignment]
    return x


def nothing(x: Array = None) -> Array:  # type: ignore[assignment]
    return x


def number(z: complex) -> Array:
    return jnp.ones(2)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (declare(bare), "parameter 'x' of bare has no annotation; allowed are torch.Tensor or jax.Array"),
        (declare(starred), r"takes \*x"),
        (declare(number), "annotated <class 'complex'>; allowed are"),
        (declare(half), "'n' of half is annotated int, and its default is 2.5"),
        (declare(nothing), r"'x' of nothing is annotated Array, and its default is None: write Array \| None"),
        (declare(lambda x: x), "has no name: give one"),
        (declare(typed, "typed"), "is none of an op: it is like 'mylib::rotary'"),
        (declare(typed, "aten::typed"), "torch's own: choose another namespace"),
        (declare(typed, "op_tests::t", mutates_args="x"), r"mutates_args is 'x': write a list of names, \['x'\]"),
        (declare(typed, "op_tests::t", mutates_args=["y"]), "mutates_args names 'y', which typed has not; .* are x, n"),
        (declare(typed, "op_tests::t", mutates_args=["n"]), "no tensor of typed"),
        (declare(typed, "op_tests::t", static=["x"]), "tensors are not static"),
        (declare(typed, "op_tests::t", traced=["x"]), "no int or float"),
        (declare(typed, "op_tests::t", autocast={"n": "lower"}), "names 'n'; its tensors are x"),
        (declare(typed, "op_tests::t", autocast="higher"), "is 'higher'; allowed are 'lower' and"),
        (declare(typed, "op_tests::t", schema="(Tensor x) -> Tensor"), "has the arguments x, the function x, n"),
        (declare(typed, "op_tests::t", schema="(Tensor x, int n"), "is none: .*; one is"),
        (declare(typed, "op_tests::t", schema="(Tensor x, int n) -> int"), "returns int; an op returns tensors"),
        (declare(typed, "op_tests::t", schema="(Tensor(a) x, int n) -> Tensor(a)"), "is aliased: results never are"),
        (declare(torch.nn.ReLU()), "decorates a JAX function"),
        (declare(3), "decorates a JAX function"),
    ],
)
def test_bad_declarations(make: Any, words: str) -> None:
    with pytest.raises(KernelError, match=words):
        make()


@jax_op("op_tests::called")
def called(x: Tensor, s: float, n: int = 1) -> Tensor:
    return x * s * n


@jax_op("op_tests::two")
def two(x: Tensor) -> Tensor:
    return x, x


@jax_op("op_tests::words")
def words(x: Tensor) -> Tensor:
    return "x"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: called(2.0, 1.0), r"was given 2.0 \(of type float\) for 'x', which has to be a tensor"),
        (lambda x: called(x, x), "was given a Tensor for 's', which has to be a float"),
        (lambda x: called(x, "1"), r"was given '1' \(of type str\) for 's', which has to be a float"),
        (lambda x: called(x), "was not given s"),
        (lambda x: called(x, 1.0, 2, 3), "takes 3 arguments by position, and 4 were given"),
        (lambda x: called(x, 1.0, m=3), "was given 'm' which it has not; its parameters are x, s, n"),
        (lambda x: called(x, 1.0, x=x), "was given 'x' twice"),
        (lambda x: called(x, 1.0, x), "'n', which has to be static, and so no tensor"),
        (lambda x: two(x), "returned 2 arrays, and is declared to return 1 results"),
        (lambda x: words(x), "returned a str; it may return arrays and numbers"),
        (lambda x: called(x.to(torch.complex32), 1.0), "ComplexHalf|complex32"),
    ],
)
def test_bad_calls(call: Any, message: str) -> None:
    for mode in ("off", "fused"):
        with fused_eager(mode=mode), pytest.raises(KernelError, match=message):
            call(torch.ones(2))


def test_what_a_function_must_not_close_over() -> None:
    weight = torch.ones(2)

    @jax_op("op_tests::closed")
    def closed(x: Array) -> Array:
        return x * weight.numpy()

    with pytest.raises(KernelError, match=r"weight, which closed closes over, is a torch.Tensor"):
        closed(torch.ones(2))


def test_jaxs_switches_are_those_of_the_call_on_whichever_thread_it_is_traced() -> None:
    @jax_op("op_tests::multiplied")
    def multiplied(x: Array, y: Array) -> Array:
        return x @ y

    x = torch.randn(4, 4)
    multiplied(x, x)
    with jax.default_matmul_precision("float32"):
        with fused_eager():
            out = multiplied(x * 1, x)
        close(out, x @ x)
    named = [str(p.traced((((4, 4), torch.float32),) * 2, ()).jaxpr) for p in multiplied._bases.values()]
    assert len(named) == 2 and ["HIGHEST" in text for text in named] == [False, True]
    with jax.numpy_dtype_promotion("strict"), pytest.raises(Exception, match="promotion"):
        multiplied(x, x.double())


def test_an_int_that_no_tensor_holds_is_refused() -> None:
    @jax_op("op_tests::moved", traced=["n"])
    def moved(x: Array, n: int) -> Array:
        return x + n

    assert moved(torch.zeros(2, dtype=torch.int64), 2**40).tolist() == [2**40] * 2
    with pytest.raises(KernelError, match="an int of more than 32 bits"):
        moved(torch.zeros(2, dtype=torch.int32), 2**40)
