"""Autograd runs above the point of interception: gradients, graphs, hooks and errors are eager's."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as fwAD
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from .programs import check, in_process

Program = Callable[[], Any]
PROGRAMS: dict[str, Program] = {}


def program(function: Program) -> Program:
    PROGRAMS[function.__name__] = function
    return function


def leaf(n: int = 4) -> torch.Tensor:
    return torch.arange(1.0, n + 1).requires_grad_()


@program
def simple_backward() -> Any:
    x = leaf()
    y = (x * x).sin()
    y.sum().backward()
    return x, y, x.grad


@program
def backward_twice_refused() -> Any:
    y = (leaf() ** 2).sum()
    y.backward()
    y.backward()


@program
def accumulate() -> Any:
    x = leaf()
    for i in range(3):
        (x * (i + 1)).sum().backward()
    return x.grad


@program
def grad_is_shared_then_zeroed() -> Any:
    x = leaf()
    (x * x).sum().backward()
    g = x.grad
    (x * 3).sum().backward()
    same = g is x.grad
    g.zero_()
    return same, x.grad, g


@program
def inplace_on_leaf_refused() -> Any:
    leaf().add_(1)


@program
def inplace_on_view_of_leaf_refused() -> Any:
    leaf()[1:].add_(1)


@program
def inplace_on_intermediate() -> Any:
    x = leaf()
    y = x * 2
    y.mul_(3).add_(1)
    y[1:].mul_(torch.ones(3) * 2)
    y.sum().backward()
    return x.grad, y


@program
def inplace_through_view_of_intermediate() -> Any:
    x = leaf(6)
    y = x * 2
    v = y.view(2, 3)[1]
    v.pow_(2)
    (y * 3).sum().backward()
    return x.grad, y, v


@program
def saved_then_modified() -> Any:
    x = leaf()
    y = x.exp()
    y.add_(1)
    y.sum().backward()


@program
def saved_input_then_modified() -> Any:
    x = leaf()
    y = x * 1
    z = y * y
    y.mul_(2)
    z.sum().backward()


@program
def parameter_modified_before_backward() -> Any:
    w = leaf()
    y = (w * w).sum()
    with torch.no_grad():
        w.add_(1)
    y.backward()


@program
def data_modified_before_backward() -> Any:
    w = leaf()
    y = (w * w).sum()
    w.data.add_(1)
    y.backward()
    return w.grad


@program
def versions_of_leaves() -> Any:
    w = leaf()
    with torch.no_grad():
        w.add_(1)
        w[1:].mul_(2)
        w.view(2, 2)[0].zero_()
        torch.add(w, 1, out=w)
        w.copy_(w * 2)
        torch._foreach_add_([w], 1.0)
        torch._foreach_mul_([w, w[:2]], 2.0)
        w.normal_()
        w.data.add_(1)
        w.detach().add_(1)
    return w._version


@program
def an_optimizer_step_between_forward_and_backward_refused() -> Any:
    w = leaf()
    opt = torch.optim.Adam([w], lr=0.1, foreach=True)
    loss = (w * w).sum()
    loss.backward(retain_graph=True)
    opt.step()
    loss.backward()


@program
def a_plain_optimizer_step_between_forward_and_backward_refused() -> Any:
    w = leaf()
    opt = torch.optim.SGD([w], lr=0.1, foreach=False)
    loss = (w * w).sum()
    loss.backward(retain_graph=True)
    opt.step()
    loss.backward()


@program
def tensor_hooks() -> Any:
    seen: list[Any] = []
    x = leaf()
    y = x * 2
    y.register_hook(lambda g: seen.append(g.clone()))
    y.register_hook(lambda g: g * 10)
    x.register_hook(lambda g: seen.append(g.sum().item()))
    y.retain_grad()
    (y * y).sum().backward()
    return x.grad, y.grad, seen


@program
def post_accumulate_hook_steps() -> Any:
    p = nn.Parameter(torch.ones(3))

    def step(q: torch.Tensor) -> None:
        with torch.no_grad():
            q.add_(q.grad, alpha=-0.1)
        q.grad = None

    p.register_post_accumulate_grad_hook(step)
    for _ in range(3):
        (p * p).sum().backward()
    return p, p.grad


@program
def module_hooks() -> Any:
    seen: list[Any] = []
    m = nn.Linear(3, 2)
    with torch.no_grad():
        m.weight.copy_(torch.arange(6.0).view(2, 3))
        m.bias.zero_()
    m.register_forward_pre_hook(lambda mod, a: (a[0] * 2,))
    m.register_forward_hook(lambda mod, a, out: out + 1)
    m.register_full_backward_hook(lambda mod, gi, go: seen.append((go[0].clone(), gi[0].clone())))
    x = torch.ones(2, 3, requires_grad=True)
    m(x).sum().backward()
    return m.weight.grad, x.grad, seen


@program
def node_hooks_and_graph() -> Any:
    x = leaf()
    y = (x * 2).relu()
    seen: list[Any] = []
    y.grad_fn.register_prehook(lambda g: seen.append(g[0] * 1))
    y.sum().backward()
    return seen, y.grad_fn.name(), [type(f).__name__ for f, _ in y.grad_fn.next_functions]


def _block(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.dropout(torch.tanh(x @ w), 0.5) * x.sum()


@program
def checkpoint_reentrant() -> Any:
    x, w = leaf().view(2, 2).detach().requires_grad_(), torch.eye(2, requires_grad=True)
    y = checkpoint(_block, x, w, use_reentrant=True)
    y.sum().backward()
    return y, x.grad, w.grad


@program
def checkpoint_non_reentrant() -> Any:
    x, w = leaf().view(2, 2).detach().requires_grad_(), torch.eye(2, requires_grad=True)
    y = checkpoint(_block, x, w, use_reentrant=False)
    y.sum().backward()
    return y, x.grad, w.grad


@program
def checkpoint_nested() -> Any:
    x = leaf()

    def inner(t: torch.Tensor) -> torch.Tensor:
        return t.sin().exp()

    def outer(t: torch.Tensor) -> torch.Tensor:
        return checkpoint(inner, t * 2, use_reentrant=False).cos()

    checkpoint(outer, x, use_reentrant=False).sum().backward()
    return x.grad


@program
def checkpoint_selective() -> Any:
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        keep = op is torch.ops.aten.mm.default
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    x = leaf().view(2, 2).detach().requires_grad_()
    y = checkpoint(
        lambda t: torch.mm(t, t).sin(),
        x,
        use_reentrant=False,
        context_fn=lambda: create_selective_checkpoint_contexts(policy),
    )
    y.sum().backward()
    return y, x.grad


@program
def saved_tensor_hooks() -> Any:
    x = leaf()
    packed: list[Any] = []

    def pack(t: torch.Tensor) -> int:
        packed.append(t.detach().clone())
        return len(packed) - 1

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda i: packed[i]):
        y = (x * x).exp()
    y.sum().backward()
    return x.grad, packed


@program
def save_on_cpu() -> Any:
    x = leaf()
    with torch.autograd.graph.save_on_cpu():
        y = (x * x).exp()
    y.sum().backward()
    return x.grad


@program
def double_backward() -> Any:
    x = leaf()
    y = (x**3).sum()
    (g,) = torch.autograd.grad(y, x, create_graph=True)
    (h,) = torch.autograd.grad((g * g).sum(), x, create_graph=True)
    h.sum().backward()
    return g, h, x.grad


@program
def gradient_penalty() -> Any:
    m = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    for p in m.parameters():
        nn.init.constant_(p, 0.3)
    x = torch.linspace(-1, 1, 6).view(2, 3).requires_grad_()
    (g,) = torch.autograd.grad(m(x).sum(), x, create_graph=True)
    ((g.norm(dim=1) - 1) ** 2).mean().backward()
    return [p.grad for p in m.parameters()]


@program
def functional_transforms() -> Any:
    x = torch.arange(1.0, 5.0)

    def f(t: torch.Tensor) -> torch.Tensor:
        return (t.sin() * t).sum()

    return (
        torch.func.grad(f)(x),
        torch.func.vmap(torch.func.grad(f))(torch.stack([x, x * 2])),
        torch.func.jacrev(lambda t: t**2)(x),
        torch.func.jacfwd(lambda t: t**2)(x),
        torch.func.vjp(lambda t: t.exp() * 2, x)[1](torch.ones(4)),
        torch.func.vmap(lambda a, b: a @ b, in_dims=(0, None))(torch.ones(3, 2, 2), torch.ones(2, 2)),
        torch.func.grad_and_value(f)(x),
    )


@program
def functional_in_place() -> Any:
    def f(t: torch.Tensor) -> torch.Tensor:
        u = t * 2
        u[1:].mul_(3)
        u.add_(1)
        return u.sum()

    x = torch.arange(1.0, 5.0)
    return torch.func.grad(f)(x), torch.func.functionalize(f)(x), torch.func.vmap(f)(torch.stack([x, x]))


@program
def vmap_random() -> Any:
    f = torch.func.vmap(lambda t: t + torch.randn(2), randomness="different")
    g = torch.func.vmap(lambda t: F.dropout(t, 0.5), randomness="same")
    return f(torch.zeros(3, 2)), g(torch.ones(3, 4))


@program
def vmap_prints_and_items_refused() -> Any:
    return torch.func.vmap(lambda t: t.sum().item())(torch.ones(2, 2))


@program
def vmap_repr() -> Any:
    seen: list[Any] = []

    def f(t: torch.Tensor) -> torch.Tensor:
        seen.append(repr(t + 1))
        return t

    torch.func.vmap(f)(torch.ones(2, 2))
    return seen


@program
def per_sample_gradients() -> Any:
    m = nn.Linear(3, 1)
    nn.init.constant_(m.weight, 0.5)
    nn.init.zeros_(m.bias)
    params = {k: v.detach() for k, v in m.named_parameters()}

    def loss(p: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return ((torch.func.functional_call(m, p, (x,)) - y) ** 2).sum()

    x, y = torch.arange(6.0).view(2, 3), torch.ones(2, 1)
    return torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(params, x, y)


@program
def forward_mode() -> Any:
    import torch.autograd.forward_ad as fwd

    with fwd.dual_level():
        d = fwd.make_dual(torch.arange(1.0, 4.0), torch.ones(3))
        out = fwd.unpack_dual((d * d).sin() + 3)
        return out.primal, out.tangent


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, k: float) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.k = k
        return x * x * k

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return 2 * x * g * ctx.k, None


class Dirty(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return g * 2


class TwoWays(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor) -> Any:
        return x.exp(), (x > 2)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(output[0])
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor, _: Any) -> torch.Tensor:
        return g * ctx.saved_tensors[0]


@program
def custom_functions() -> Any:
    x = leaf()
    y = Square.apply(x, 0.5)
    z = Dirty.apply(y * 1)
    e, m = TwoWays.apply(x)
    (z.sum() + e.sum()).backward()
    return x.grad, y, z, e, m, torch.func.vmap(TwoWays.apply)(torch.ones(2, 2))


@program
def custom_function_with_numpy() -> Any:
    class ThroughNumpy(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return torch.from_numpy(x.detach().numpy() * 2)

        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
            return torch.as_tensor(g.numpy() * 2)

    x = leaf()
    ThroughNumpy.apply(x * 3).sum().backward()
    return x.grad


@program
def gradcheck() -> Any:
    x = torch.linspace(0.1, 0.9, 3, dtype=torch.float64, requires_grad=True)
    return torch.autograd.gradcheck(lambda t: (t * t).exp().sum(), (x,))


@program
def no_grad_and_enable() -> Any:
    x = leaf()
    with torch.no_grad():
        a = x * 2
        with torch.enable_grad():
            b = x * 3
    with torch.set_grad_enabled(False):
        c = x * 4
    return a, b, c, torch.is_grad_enabled()


@program
def zeros_laid_out_like_a_part_of_a_storage() -> Any:
    """What forward-mode AD makes a tangent of whose memory is to be laid out like its primal's."""
    out = []
    part, shrunk = torch.ones(5).mul(2).narrow(0, 1, 2), torch.ones(5).mul(2).resize_(2)
    for like in (torch.ones(2).mul(2), torch.ones(2).mul(2), part, shrunk):
        zeros = torch.ops.aten._new_zeros_with_same_feature_meta(torch.ones(3, 2) * 2, like, self_num_batch_dims=1)
        out += [zeros, zeros.storage_offset(), zeros.untyped_storage().nbytes(), zeros.stride()]
    return out


@program
def inference_mode() -> Any:
    x = torch.arange(6.0).view(2, 3)
    m = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.LayerNorm(3))
    for p in m.parameters():
        nn.init.constant_(p, 0.3)
    with torch.inference_mode():
        y = m(x)
        z = y.t().reshape(-1).contiguous()
        w = x.to(torch.float64).flatten()
        v = (x + 1).view(3, 2)
        v.add_(1)
        u = (x * 2).t().contiguous().expand(2, 3, 2).reshape(3, 4)
        t = (x * 2).type_as(w)
        s = torch.matmul(x, x.t()).softmax(-1)
        d = F.dropout(x, 0.5)
        c = torch.einsum("ij,kj->ik", x + 1, x)
        return y, z, w, v, u, t, s, d, c, (x + 1).reshape(6), (x + 1).t().reshape(6), (x + 1).t().flatten()


@program
def inference_tensor_in_autograd_refused() -> Any:
    with torch.inference_mode():
        x = torch.ones(3) * 2
    w = torch.ones(3, requires_grad=True)
    (x * w).sum().backward()


@program
def inference_tensor_inplace_outside_refused() -> Any:
    with torch.inference_mode():
        x = torch.ones(3) * 2
    x.add_(1)


@program
def inference_mode_complex() -> Any:
    with torch.inference_mode():
        z = torch.complex(torch.ones(3), torch.arange(3.0))
        return z.conj().resolve_conj(), z.conj() * 2, z.conj().imag.resolve_neg()


@program
def autocast() -> Any:
    m = nn.Linear(4, 4)
    nn.init.constant_(m.weight, 0.3)
    nn.init.zeros_(m.bias)
    x = torch.linspace(0, 1, 8).view(2, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = m(x)
        z = y @ y.t()
        s = z.softmax(-1)
        loss = F.mse_loss(s, torch.zeros(2, 2))
        n = F.layer_norm(y, (4,))
        q = torch.bmm(x.view(1, 2, 4), x.view(1, 4, 2)) + 1
    loss.backward()
    return y, z, s, loss, n, q, m.weight.grad


@program
def autocast_ends_before_the_flush() -> Any:
    x = torch.linspace(0, 1, 16).view(4, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = x @ x
        p = torch.prod(y.float().bfloat16(), 0)
        c = F.conv1d(x.view(1, 4, 4), x.view(4, 4, 1))
    return y, p, c, x @ x


@program
def autocast_begins_before_the_flush() -> Any:
    x = torch.linspace(0, 1, 16).view(4, 4)
    y = torch.mm(x, x)
    p = torch.prod((x > 0.3).bfloat16() + 1, 0)  # exact: products of bfloat16 are rounded in another order than ATen's
    c = F.conv1d(x.view(1, 4, 4), x.view(4, 4, 1))
    q = torch.linalg.vecdot(x, x)
    i = F.interpolate(x.view(1, 1, 4, 4), scale_factor=2, mode="bicubic")
    s = torch.svd(x)[1]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return y.sum().item(), p.tolist(), c.tolist(), q.tolist(), i.tolist(), s.tolist(), y, p, c


@program
def lstm_and_gru() -> Any:
    torch.manual_seed(0)
    lstm, gru = nn.LSTM(3, 4, 2, batch_first=True), nn.GRU(3, 4, bidirectional=True)
    x = torch.linspace(-1, 1, 24).view(2, 4, 3)
    y, (h, c) = lstm(x)
    packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([4, 2]), batch_first=True)
    z, _ = lstm(packed)
    padded, lengths = nn.utils.rnn.pad_packed_sequence(z, batch_first=True)
    g, k = gru(x.transpose(0, 1))
    (y.sum() + padded.sum() + g.sum()).backward()
    return y, h, c, padded, lengths, g, k, lstm.weight_hh_l0.grad, gru.weight_ih_l0.grad


@program
def attention() -> Any:
    torch.manual_seed(0)
    q = torch.randn(2, 2, 4, 8, requires_grad=True)
    y = F.scaled_dot_product_attention(q, q * 2, q + 1, is_causal=True)
    y.sum().backward()
    m = nn.MultiheadAttention(8, 2, batch_first=True)
    z, w = m(q[0], q[0], q[0])
    e = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    t = e(q[0])
    e.eval()
    with torch.no_grad():
        fast = e(q[0])
    return y, q.grad, z, w, t, fast


@program
def parametrizations() -> Any:
    m = nn.utils.parametrizations.weight_norm(nn.Linear(3, 2))
    nn.init.constant_(m.parametrizations.weight.original1, 0.5)
    nn.init.zeros_(m.bias)
    y = m(torch.ones(1, 3))
    y.sum().backward()
    return y, m.parametrizations.weight.original1.grad


@program
def retain_graph_and_grad_of_grad_none() -> Any:
    x = leaf()
    y = x * 2
    g = torch.autograd.grad(y.sum(), [x, torch.ones(1, requires_grad=True)], allow_unused=True, retain_graph=True)
    h = torch.autograd.grad(y, x, torch.ones(2, 4), is_grads_batched=True)
    return g, h


@program
def backward_with_inputs_and_gradient() -> Any:
    x, w = leaf(), leaf()
    y = x * w
    y.backward(torch.arange(4.0), inputs=[x])
    return x.grad, w.grad


@program
def anomaly_mode_finds_nan() -> Any:
    with warnings.catch_warnings(), torch.autograd.detect_anomaly(check_nan=True):
        warnings.simplefilter("ignore")
        x = torch.zeros(2, requires_grad=True)
        (x.sqrt() * 0).sum().backward()


@program
def sparse_gradient() -> Any:
    e = nn.Embedding(5, 2, sparse=True)
    nn.init.constant_(e.weight, 1.0)
    e(torch.tensor([1, 3, 1])).pow(2).sum().backward()
    g = e.weight.grad
    before = g.coalesce().values().tolist(), g.coalesce().indices().tolist()
    torch.optim.SGD(e.parameters(), lr=0.1).step()
    return before, e.weight, g.is_sparse


@program
def graph_shared_between_two_losses() -> Any:
    x = leaf()
    h = (x * 2).tanh()
    h.sum().backward(retain_graph=True)
    first = x.grad.clone()
    (h * h).sum().backward()
    return first, x.grad


@program
def clip_and_norm() -> Any:
    ps = [nn.Parameter(torch.arange(3.0)), nn.Parameter(torch.ones(2, 2))]
    sum((p**2).sum() for p in ps).backward()
    total = nn.utils.clip_grad_norm_(ps, 1.0)
    nn.utils.clip_grad_value_(ps, 0.3)
    return total, [p.grad for p in ps]


@program
def grad_modes_of_views() -> Any:
    x = leaf(6)
    with torch.no_grad():
        v = x.view(2, 3)
    return v, x.view(2, 3), x.detach().view(3, 2), x.data


FORWARD_MODE = {
    "jvp": "torch.func.jvp(lambda t: t.exp() * 2, (x,), (torch.ones(4),))",
    "hessian": "torch.func.hessian(lambda t: (t.sin() * t).sum())(x)",
    "linearize": "torch.func.linearize(lambda t: t.sin() * 2, x)[1](torch.ones(4))",
    "zero tensor": "torch._efficientzerotensor((4,)) + x, torch._efficientzerotensor((4,)).clone()",
}


def test_forward_mode_with_zero_tensors(mode: str) -> None:
    said = in_process(f"""
        import torch
        from fused_eager import fused_eager
        x = torch.arange(1.0, 5.0)
        for name, function in {FORWARD_MODE}.items():
            expected = eval(function)
            with fused_eager(mode={mode!r}):
                actual = eval(function)
            torch.testing.assert_close(actual, expected, msg=name)
            print(name)
    """)
    assert said.splitlines() == list(FORWARD_MODE)


@pytest.mark.thinned(5)
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.filterwarnings("ignore")
def test_program(name: str, mode: str) -> None:
    check(PROGRAMS[name], mode, versions=False)


def _train(optimizer: Callable[..., torch.optim.Optimizer], schedule: bool) -> Any:
    torch.manual_seed(0)
    m = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    opt = optimizer(m.parameters())
    sched = torch.optim.lr_scheduler.ExponentialLR(opt, 0.9) if schedule else None
    x = torch.linspace(-1, 1, 24).view(6, 4)
    y = x.sum(1, keepdim=True)
    losses = []
    for _ in range(5):
        opt.zero_grad()
        loss = F.mse_loss(m(x), y)
        loss.backward()
        opt.step()
        if sched:
            sched.step()
        losses.append(loss.detach())
    state = opt.state_dict()["state"]
    return losses, list(m.parameters()), [dict(s) for s in state.values()]


OPTIMIZERS = {
    f"{name} foreach={foreach} {options}": (lambda ps, c=cls, f=foreach, o=options: c(ps, foreach=f, **o))
    for foreach in (False, True)
    for name, cls, options in (
        ("SGD", torch.optim.SGD, {"lr": 0.05}),
        ("SGD", torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
        ("Adam", torch.optim.Adam, {"lr": 0.01, "amsgrad": True}),
        ("AdamW", torch.optim.AdamW, {"lr": 0.01}),
    )
}
OPTIMIZERS["AdamW fused"] = lambda ps: torch.optim.AdamW(ps, lr=0.01, fused=True)
OPTIMIZERS["SGD fused"] = lambda ps: torch.optim.SGD(ps, lr=0.01, momentum=0.9, fused=True)
OPTIMIZERS["Adam tensor lr"] = lambda ps: torch.optim.Adam(ps, lr=torch.tensor(0.01))


@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer(name: str, mode: str) -> None:
    check(lambda: _train(OPTIMIZERS[name], schedule=True), mode, versions=False)


def _zero_tensors() -> list[Any]:
    """Zero tensors, which have no memory, and what comes of them: which results are such is told as well."""
    zero, x = torch._efficientzerotensor((3,)), torch.ones(3) * 2
    square = torch._efficientzerotensor((3, 3))
    made = [
        zero, zero * x, zero * 2, zero / x, zero + zero, zero.view(3, 1), zero + x, x + zero, zero.clone(), -zero,
        zero.sum(), square @ torch.ones(3, 3), square @ x, torch.ones(3).copy_(zero), (x * 1).add_(zero),
        zero.double(), torch.zeros_like(zero), torch.cat([zero, x]), torch.dot(zero, x),
    ]  # fmt: skip
    return [(t._is_zerotensor(), t.clone()) for t in made]


def test_zero_tensors_stay_such(mode: str) -> None:
    def program() -> Any:
        return [_zero_tensors() for _ in range(3)]

    check(program, mode)


def test_a_missing_tangent_is_a_zero_tensor(mode: str) -> None:
    def program() -> Any:
        with fwAD.dual_level():
            d = fwAD.make_dual(torch.ones(3) * 2, torch.ones(3) * 3)
            picked = torch.where(torch.tensor([True, False, True]), d, torch.zeros(3))
            made = [picked, torch.lerp(d, torch.ones(3), 0.5), torch.stack([torch.zeros(3), d]), d * torch.ones(3)]
            return [fwAD.unpack_dual(t).tangent.clone() for t in made]

    check(program, mode)


def test_zero_tensors_meet_numbers(mode: str) -> None:
    """Below a mode, C++ that works with a number as a tensor hands the number on, which most ops do not take."""

    def program() -> Any:
        zero = torch._efficientzerotensor((2, 3))
        return [t.clone() for t in (zero + 1, 2.5 + zero, zero - True, zero * 3, zero / 2, 1 - zero, zero + 1j)]

    check(program, mode)
