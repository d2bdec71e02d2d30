"""What AOTAutograd made of a graph is read in the next process, and only where it would make the same again."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from torch.nn.attention import SDPBackend, sdpa_kernel

from fused_eager.frontends.compiler import autograd_cache
from fused_eager.frontends.compiler.backend import compile_graph

ROOT = Path(__file__).parents[3]
PROGRAM = """
import torch
from torch._dynamo.utils import counters
from fused_eager import report

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.5), torch.nn.GELU(), torch.nn.Linear(16, 1))
other = torch.compile(model, backend="fused_eager", dynamic=DYNAMIC)
for rows in (4, 4, 6):
    other(torch.randn(rows, 8)).square().mean().backward()
counted = counters["aot_autograd"]
print(counted["autograd_cache_hit"], counted["autograd_cache_saved"], report().compilations)
print(sum(p.grad.double().abs().sum() for p in model.parameters()).item())
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: Any) -> Path:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "torch"))
    counters.clear()
    return tmp_path / "torch"


def compiled(f: Callable[..., Any]) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(f, backend=compile_graph, options={"cache": ""})


def hits() -> int:
    return int(counters["aot_autograd"]["autograd_cache_hit"])


@pytest.mark.parametrize("dynamic", [pytest.param(False, marks=pytest.mark.slow), True])
def test_the_next_process_traces_nothing(dynamic: bool, tmp_path: Path) -> None:
    given = {"FUSED_EAGER_CACHE": "", "FUSED_EAGER_CACHE_DIR": str(tmp_path / "ours"), "FUSED_EAGER_PROGRESS": "0"}
    program = PROGRAM.replace("DYNAMIC", str(dynamic))
    first, second = (
        subprocess.run(
            [sys.executable, "-c", program], cwd=ROOT, env={**os.environ, **given},
            capture_output=True, text=True, timeout=120, check=True,
        ).stdout.splitlines()
        for _ in range(2)
    )  # fmt: skip
    read, kept, compilations = map(int, first[0].split())
    assert not read and kept and compilations
    assert second[0] == f"{kept} 0 0"
    assert first[1] == second[1]


def test_a_program_may_go_through_a_backward_pass_again() -> None:
    """A graph that is kept has its backward pass compiled before it is known whether that runs twice."""
    for read in (0, 1):
        x = torch.randn(3, 3, requires_grad=True)
        y = compiled(lambda x: (x.exp() @ x).sin().sum())(x)
        first, second = (torch.autograd.grad(y, x, retain_graph=again)[0] for again in (True, False))
        assert torch.equal(first, second) and hits() == read


@contextmanager
def double() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


Q = torch.randn(1, 2, 8, 4, generator=torch.Generator().manual_seed(0))
AROUND: dict[str, tuple[Callable[..., Any], AbstractContextManager[Any]]] = {
    "default_dtype": (lambda x: x.to(torch.int32) + torch.ones(()), double()),
    "autocast": (lambda x: x[0, 0] @ x[0, 0].t(), torch.autocast("cpu", dtype=torch.bfloat16)),
    "attention": (
        lambda x: torch.nn.functional.scaled_dot_product_attention(x, x, x),
        sdpa_kernel(SDPBackend.MATH),
    ),
}


@pytest.mark.parametrize("name", AROUND)
def test_a_switch_that_ops_are_traced_by_is_in_the_key(name: str) -> None:
    f, around = AROUND[name]
    for context in (nullcontext(), around):
        with context:
            expected = f(Q)
            found = compiled(f)(Q)
        assert found.dtype is expected.dtype
        torch.testing.assert_close(found, expected)
    assert hits() == 0


def test_inputs_that_share_memory_are_another_graph() -> None:
    def f(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        a.add_(1)
        return a * b

    x = torch.zeros(8)
    for shares in (False, True, False):
        a, b = x.clone(), x.clone()
        compiled(f)(a, a[:] if shares else b)
        a, b = x.clone(), x.clone()
        out = compiled(f)(a[:4], a[:4] if shares else b[:4])
        assert out.tolist() == ([1.0] * 4 if shares else [0.0] * 4)


@pytest.mark.slow
def test_inductor_and_we_share_no_graph(monkeypatch: Any) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return (x.sin() * 2).sum(0)

    x = torch.randn(4, 4)
    for backend in ("inductor", compile_graph, "inductor"):
        torch._dynamo.reset()
        options = {"cache": ""} if callable(backend) else None
        torch.testing.assert_close(torch.compile(f, backend=backend, options=options)(x), f(x))
        assert not callable(backend) or hits() == 0
    assert compiled(f)(x) is not None and hits() == 2  # inductor's second, and this one


@pytest.mark.parametrize("what", ["a_custom_op", "a_number"])
def test_what_has_changed_is_not_read(what: str) -> None:
    library = torch.library.Library("kept_or_not", "DEF")
    for factor in (2.0, 5.0):

        @torch.library.custom_op("kept_or_not::scaled", mutates_args=())
        def scaled(x: torch.Tensor) -> torch.Tensor:
            return x * 2

        scaled.register_fake(lambda x: torch.empty_like(x))
        scaled.register_autograd(lambda ctx, g, factor=factor: g * factor)
        f = scaled if what == "a_custom_op" else lambda x, factor=factor: x * torch.tensor([factor, 1.0])
        x = torch.ones(2, requires_grad=True)
        compiled(f)(x).sum().backward()
        assert x.grad is not None and x.grad[0] == factor
    assert hits() == 0
    del library


def test_a_folder_of_others_is_neither_read_nor_written(folder: Path) -> None:
    folder.mkdir(mode=0o755)
    folder.chmod(0o777)
    f = compiled(lambda x: x.sin() + 1)
    torch.testing.assert_close(f(torch.zeros(3)), torch.ones(3))
    assert not list(folder.rglob("aotautograd/*")) and not counters["aot_autograd"]["autograd_cache_miss"]


@pytest.mark.parametrize("how", ["cut", "nonsense"])
def test_a_file_that_is_broken_is_no_error(how: str, folder: Path) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return x.sin() + 2

    for turn in range(2):
        torch.testing.assert_close(compiled(f)(torch.zeros(3)), torch.full((3,), 2.0))
        files = [path for path in folder.rglob("aotautograd/*/*") if path.is_file()]
        assert files, turn
        for path in files:
            path.write_bytes(path.read_bytes()[:100] if how == "cut" else b"nonsense")
    assert hits() == 0


def test_without_our_cache_nothing_is_kept(folder: Path) -> None:
    torch.compile(lambda x: x.cos() + 1, backend=compile_graph, options={"cache": "off"})(torch.zeros(3))
    assert not list(folder.rglob("aotautograd/*"))


def test_the_key_asks_none_of_inductors_generators() -> None:
    """They take a second to import, which is most of what reading a graph saves."""
    program = (
        "import sys, torch\n"
        "torch.compile(lambda x: x.sin() + 1, backend='fused_eager', options={'cache': ''})(torch.zeros(3))\n"
        "assert not {'torch._inductor.lowering', 'torch._inductor.select_algorithm'} & set(sys.modules)\n"
    )
    environment = {**os.environ, "FUSED_EAGER_PROGRESS": "0"}
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=environment, check=True, timeout=120)
    assert autograd_cache  # the module whose key it is


def test_a_float_that_varies_is_no_constant_of_the_first() -> None:
    def f(x: torch.Tensor, a: float) -> Any:
        return x * a, a + 1, x.clamp(max=a)

    for _ in range(2):  # the second time, as in the next process
        g, x = compiled(f), torch.ones(3)
        for a in (0.5, 0.7, 1e-3, 2.0):
            torch.testing.assert_close(g(x, a), f(x, a), rtol=1e-6, atol=0)
