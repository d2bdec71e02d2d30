"""`torch.compile(backend="tpu")` on tensors of the device: its graphs' ops are recorded in the device's own stream."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from fused_eager.frontends.compiler.backend import compile_graph
from fused_eager.frontends.device.dynamo import tpu
from fused_eager.log.events import LOG, Event

from .compare import TPU

Tensor = torch.Tensor


def test_a_compiled_model_trains_as_on_the_cpu() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 1))
    model, x = copy.deepcopy(plain).to(TPU), torch.randn(3, 4)
    plain(x).sum().backward()
    seen: list[Event] = []
    LOG.sinks.append(seen.append)
    try:
        y = torch.compile(model, backend=compile_graph)(x.to(TPU))
        y.sum().backward()
        torch.testing.assert_close(y.detach().cpu(), plain(x).detach())
        grads = [(p.grad.cpu(), q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True)]  # type: ignore[union-attr]
    finally:
        LOG.sinks.remove(seen.append)
    for found, expected in grads:
        torch.testing.assert_close(found, expected)
    assert all("recorded as they come" in e.data["unfit"] for e in seen if e.kind == "graph")
    assert not [e for e in seen if e.kind == "island"]


def test_an_optimizer_counts_the_steps_of_each_of_its_groups() -> None:
    """Dynamo moved the count of one group as it traced the next, and its graph went on counting in what was moved."""
    found = []
    for device in ("cpu", TPU):
        weights = [nn.Parameter(torch.ones(3, device=device)) for _ in range(2)]
        optimizer = torch.optim.Adam([{"params": [w], "lr": lr} for w, lr in zip(weights, (0.1, 0.01), strict=True)])
        step = torch.compile(optimizer.step, backend=tpu) if device == TPU else optimizer.step
        for at, second in enumerate((1.0, None, 1.0)):  # without a gradient there is another graph
            for w, by in zip(weights, (1.0, second), strict=True):
                w.grad = None if by is None else torch.full((3,), by * (at - 0.5), device=device)
            step()
        counts = [optimizer.state[w]["step"].item() for w in weights]
        found.append(([w.detach().cpu() for w in weights], counts))
    assert found[1][1] == [3, 2]
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize("backend", [tpu, compile_graph], ids=["tpu", "fused_eager"])
def test_dynamo_looks_at_nothing_that_happens_between_two_graphs(backend: Any) -> None:
    """It took the frames of a read's kernel for more of the program, and JAX's NumPy below them for a graph to compile:
    in the middle of the compilation that it would have waited for."""
    parameter = nn.Parameter(torch.ones(3, device=TPU))
    optimizer = torch.optim.SGD([parameter], lr=0.5, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

    def step(x: Tensor) -> tuple[Any, ...]:
        y = torch.rand_like(x)
        torch._dynamo.graph_break()
        if y.sum() < 100:
            y = y * 0 + x
        parameter.grad = y * parameter.detach()
        optimizer.step()
        scheduler.step()
        return y, y.tolist(), y.cpu().numpy().sum(), parameter.detach().cpu()

    compiled = torch.compile(step, backend=backend)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for wanted in (0.5, 0.15):
            y, numbers, total, moved = compiled(torch.ones(3, device=TPU))
            assert (y.tolist(), numbers, total) == ([1] * 3, [1] * 3, 3)
            torch.testing.assert_close(moved, torch.full((3,), wanted))
    assert not [w for w in warned if "Dynamo" in str(w.message)]


def test_an_error_of_a_graph_names_the_line_of_the_program() -> None:
    def chosen(x: Tensor, at: Tensor) -> Tensor:
        return x[at] * 2

    line = chosen.__code__.co_firstlineno + 1
    with pytest.raises(IndexError, match=f"index 7 is out of bounds.* at {__file__}:{line}"):
        torch.compile(chosen, backend=tpu)(torch.ones(3, device=TPU), torch.tensor([7], device=TPU)).tolist()


BOTH = pytest.mark.parametrize("backend", [tpu, compile_graph], ids=["tpu", "fused_eager"])


@BOTH
def test_a_part_that_is_computed_again_draws_the_same_numbers(backend: Any) -> None:
    def part(x: Tensor) -> Tensor:
        return F.dropout(x, 0.5).sin()

    whole: Callable[[Tensor], Tensor] = lambda x: checkpoint(part, x, use_reentrant=False)  # noqa: E731
    for function in (whole, torch.compile(whole, backend=backend)):
        for seed in (0, 1):
            torch.manual_seed(seed)
            x = torch.ones(200, device=TPU, requires_grad=True)
            y = function(x)
            between = torch.rand(1, device=TPU)
            y.sum().backward()
            assert x.grad is not None and torch.equal((y == 0).cpu(), (x.grad == 0).cpu())
            drawn = [t.detach().cpu() for t in (y, between, torch.rand(1, device=TPU))]
            if function is whole and seed == 0:
                first = drawn
            assert seed or all(map(torch.equal, drawn, first))


@BOTH
def test_a_part_that_is_repeated_has_gradients(backend: Any) -> None:
    part: Callable[[Tensor], Tensor] = torch.compiler.nested_compile_region(lambda x: x.sin() * x)
    x = torch.ones(3, device=TPU, requires_grad=True)
    torch.compile(lambda x: part(part(x)), backend=backend)(x).sum().backward()
    y = torch.ones(3, requires_grad=True)
    z = y.sin() * y
    (z.sin() * z).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad.cpu(), y.grad)


@BOTH
def test_a_compiled_optimizer_takes_its_learning_rate_from_the_device(backend: Any) -> None:
    """Its counters are on the host, and what they are corrected by is divided in place."""
    found = []
    for device in (TPU, "cpu"):
        torch._dynamo.reset()
        parameter = nn.Parameter(torch.arange(3.0, device=device))
        optimizer = torch.optim.AdamW([parameter], lr=torch.tensor(0.1, device=device))
        step = torch.compile(optimizer.step, backend=backend) if device == TPU else optimizer.step
        for _ in range(2):
            parameter.grad = torch.ones(3, device=device)
            step()
        found.append(parameter.detach().cpu())
    torch.testing.assert_close(*found)


def test_what_is_written_on_the_host_is_no_copy_of_it() -> None:
    there = torch.tensor(0.5, device=TPU)
    numbers = [torch.tensor(2.0), torch.tensor(3.0)]
    torch._foreach_div_(numbers, there)
    numbers[0].add_(there)
    assert [n.item() for n in numbers] == [4.5, 6.0]
    for call in (lambda: torch._foreach_add_([there, numbers[0]], 1), lambda: torch.ones(2).add_(there)):
        with pytest.raises(RuntimeError, match="same device"):
            call()


def test_the_device_has_one_set_of_options() -> None:
    x = torch.ones(2, device=TPU)
    for mode in ("reduce-overhead", "max-autotune"):
        assert torch.compile(lambda x: x + 1, backend=tpu, mode=mode)(x).tolist() == [2, 2]
    assert torch.compile(lambda x: x + 2, backend=tpu, options={"native": "never"})(x).tolist() == [3, 3]
    for options, said in (({"max_region": 7}, "set FUSED_EAGER_MAX_REGION"), ({"nope": 1}, "nope")):
        with pytest.raises(BackendCompilerFailed, match=f"OptionError: (.|\n)*{said}"):
            torch.compile(lambda x: x + 3, backend=tpu, options=options)(x)


@pytest.mark.parametrize(
    "how", [{}, {"mode": "max-autotune"}, {"options": {"triton.cudagraphs": True}}, {"dynamic": True}], ids=str
)
def test_no_backend_is_the_devices_own(how: dict[str, Any]) -> None:
    """Without a backend torch means inductor, which makes kernels for another library's TPUs."""
    x = torch.arange(4.0, device=TPU)
    found = torch.compile(lambda x: torch.relu(x) * 2, fullgraph=True, **how)(x)
    assert found.device == TPU and found.tolist() == [0, 2, 4, 6]
    assert torch.compile(lambda n: torch.ones(n, device="tpu") * 2, **how)(3).tolist() == [2, 2, 2]


def test_an_op_of_which_torch_knows_the_shape_only_by_calling_it() -> None:
    """A fake tensor says that it is on the device; what is like it was made by reading its memory."""
    with FakeTensorMode():
        x = torch.ones(2, device=TPU)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert torch.binomial(x, x).device == TPU
    found = torch.compile(lambda n, p: torch.binomial(n, p) + 1, backend=tpu, fullgraph=True)
    assert found(torch.full((2,), 3.0, device=TPU), torch.ones(2, device=TPU)).tolist() == [4, 4]
