"""Sizes that vary under `torch.compile`: few compilations, eager's values, and a reason where it is one for each."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fused_eager.compiling import buckets
from fused_eager.compiling.buckets import bucket_of
from fused_eager.frontends.compiler import graphs
from fused_eager.frontends.compiler.backend import compile_graph
from fused_eager.log.events import Event

from .programs import Block

Tensor = torch.Tensor
ROOT = Path(__file__).parent.parent.parent.parent


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies behind the valid part of an input is no number, or one that is out of every range."""

    def put(room: Any, x: Tensor) -> Any:
        dtype, shape = room.home
        whole = torch.full(shape, float("nan") if dtype.is_floating_point else 97, dtype=dtype)
        whole[tuple([slice(n) for n in x.shape])] = x
        return room.device.put(whole)

    monkeypatch.setattr(buckets._Room, "put", put)


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.block, self.head = nn.Embedding(11, 8), Block(8, 2, 0.25), nn.Linear(8, 11)

    def forward(self, x: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.block(self.words(x)))[:, :-1].flatten(0, 1), x[:, 1:].flatten())


def written(x: Tensor) -> tuple[Tensor, ...]:
    """Parts of memory whose size does not change are written and read: from its front, and to its end."""
    n, a = x.shape[0], torch.arange(210.0).view(30, 7)
    b = a.sin()
    a[:n] += x
    b[30 - n :] = x * 2
    more = torch.cat([x, x * 2, x[:3]])
    return a, b, a[30 - n :].cos(), b[3 : 3 + n] * x, more[n : 2 * n + 1].cos(), more[n + 2 :] * 2


def placed(x: Tensor) -> tuple[Tensor, ...]:
    """Rows are written at places that are values, into memory that varies and that does not; and filled up."""
    n = x.shape[0]
    at, twice = torch.arange(n) * 2, torch.arange(2 * n) * 2
    whole, first = torch.zeros(100, 7), torch.arange(2)
    return (
        whole.index_copy(0, at, x),
        whole.index_put((twice,), torch.stack([x.detach(), x.detach() * 2]).reshape(-1, 7)),
        whole.scatter_reduce(0, at[:, None].expand(n, 7), x, "amax"),
        x.index_put((first,), torch.tensor(0.5)),
        x.index_add(0, first, torch.ones(2, 7)),
        F.pad(x, (0, 0, 0, 32 - n), value=2.0),
    )


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(7, 9), nn.GELU(), nn.LayerNorm(9), nn.Linear(9, 3))


PROGRAMS: dict[str, tuple[Callable[[], Any], Callable[[int], Tensor]]] = {
    "mlp": (mlp, lambda n: torch.randn(n, 7)),
    "loss": (lambda: (lambda x: (x.tanh().mean() + x.sum(0).std(), x.shape[0])), lambda n: torch.randn(n, 7)),
    "length": (Classifier, lambda n: torch.randint(11, (2, n))),
    "in place": (lambda: (lambda x: (x.mul_(2).sum(), x[1:], x.t())), lambda n: torch.randn(n, 7)),
    "cache": (lambda: (lambda x: torch.cat([x, x[:2] * 2])), lambda n: torch.randn(n, 7)),
    "part": (lambda: written, lambda n: torch.randn(n, 7)),
    "places": (lambda: placed, lambda n: torch.randn(n, 7)),
}
SIZES = [9, 14, 24, 17, 15, 13, 19, 16, 23]  # in two buckets, and the first by itself


@pytest.mark.usefixtures("poisoned")
@pytest.mark.thinned(4)
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n in ("length", "places") else n for n in PROGRAMS]
)
def test_a_bucket_of_sizes_is_compiled_once_and_computes_what_eager_does(name: str, seen: list[Event]) -> None:
    make, argument = PROGRAMS[name]
    torch.manual_seed(0)
    plain = make()
    other = copy.deepcopy(plain)
    compiled = torch.compile(other, backend=compile_graph, dynamic=True)
    for n in SIZES:
        found = []
        x = argument(n)
        for function, own in ((compiled, other), (plain, plain)):
            torch.manual_seed(n)
            given = x.clone()
            out = function(given.requires_grad_() if x.is_floating_point() and name != "in place" else given)
            outs = [t for t in (out if isinstance(out, tuple) else (out,)) if isinstance(t, Tensor)]
            leaves = [*own.parameters()] if isinstance(own, nn.Module) else []
            leaves += [given] if given.requires_grad else []
            gradients = torch.autograd.grad(sum(t.sin().sum() for t in outs), leaves) if leaves else ()
            found.append([*outs, given, *gradients, *(own.buffers() if isinstance(own, nn.Module) else ())])
            strides = [t.stride() for t in outs]
        torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-5)
        assert [t.stride() for t in found[0][: len(strides)]] == strides
    graphs = [e.data for e in seen if e.kind == "graph"]
    assert {d["bucket"] for d in graphs} == {"", "13 to 16", "17 to 24"}, {d["unpadded"] for d in graphs}
    sides = len({d["backward"] for d in graphs})
    assert sum(d["bucket"] == "" for d in graphs) == sides, {d["unpadded"] for d in graphs}  # the first size
    assert sum(e.kind in ("compile", "cache-load") for e in seen) <= 3 * sides * (2 if name == "length" else 1)


@pytest.mark.parametrize("validate", [True, False])
def test_large_rows_of_any_number_are_run_in_blocks(validate: bool, seen: list[Event]) -> None:
    def f(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        y = F.gelu(F.layer_norm(x, [256], w))
        return x + y, y.amax(1)

    compiled = torch.compile(f, backend=compile_graph, dynamic=True, options={"validate": validate})
    w = torch.randn(256)
    for n in (6000, 7001, 5003, 20, 6000, 8192):  # one of them too short to gain
        x = torch.randn(n, 256)
        torch.testing.assert_close(compiled(x, w), f(x, w))
    told = [e.data["bucket"] for e in seen if e.kind == "graph"]
    assert told == ["", "any, in blocks of rows", "any, in blocks of rows", "17 to 24", "any, in blocks of rows"]
    assert sum(e.kind in ("compile", "cache-load") for e in seen) <= 3


def test_rows_that_depend_on_each_other_are_not_run_in_blocks(seen: list[Event]) -> None:
    compiled = torch.compile(lambda x: x - x.mean(0), backend=compile_graph, dynamic=True)
    for n in (6000, 7001, 6500):
        x = torch.randn(n, 256)
        torch.testing.assert_close(compiled(x), x - x.mean(0))
    assert [e.data["bucket"] for e in seen if e.kind == "graph"] == ["", "6145 to 8192", "6145 to 8192"]


def test_sizes_that_are_always_alike_are_one(seen: list[Event]) -> None:
    """A symbol for each tensor is what Dynamo makes of caches that grow."""

    def f(token: Tensor, caches: list[Tensor]) -> list[Tensor]:
        return [torch.cat([cache, token * at]).tanh() for at, cache in enumerate(caches)]

    with torch.fx.experimental._config.patch(use_duck_shape=False):
        compiled = torch.compile(f, backend=compile_graph, dynamic=True)
        caches = [torch.randn(n, 3) for n in (9, 9)]
        for _ in range(6):
            token = torch.randn(1, 3)
            expected = f(token, caches)
            caches = compiled(token, caches)
            torch.testing.assert_close(caches, expected)
        caches = [torch.randn(n, 3) for n in (20, 12)]  # and now they are not
        torch.testing.assert_close(compiled(token, caches), f(token, caches))
    told = [(e.data["bucket"], e.data["unpadded"]) for e in seen if e.kind == "graph"]
    assert told[1:] == [("9 to 12", "")] * 3 + [("13 to 16", "")] * 2 + [("", "2 sizes change at a time")]


def test_a_bucket_of_several_regions(seen: list[Event]) -> None:
    """What one region hands to the next is padded there, and may be overwritten."""
    f: Callable[[Tensor], Tensor] = lambda x: (x.softmax(0) * 2).exp().cumsum(1).tanh() + x.sum(0)  # noqa: E731
    for validate in (True, False):
        torch._dynamo.reset()
        options = {"max_region": 2, "validate": validate}
        compiled = torch.compile(f, backend=compile_graph, dynamic=True, options=options)
        for n in (9, 13, 14, 13, 16):
            x = torch.randn(n, 5)
            torch.testing.assert_close(compiled(x), f(x))
    assert [e.data["bucket"] for e in seen if e.kind == "graph"] == ["", "13 to 16", "13 to 16", "13 to 16"] * 2


def test_what_buckets_run_does_not_count_as_a_form(monkeypatch: pytest.MonkeyPatch, seen: list[Event]) -> None:
    monkeypatch.setattr(graphs, "FORMS", 2)
    f: Callable[[Tensor], Tensor] = lambda x: x.softmax(0) + x.sum(0)  # noqa: E731
    compiled = torch.compile(f, backend=compile_graph, dynamic=True)
    for n, width in [(9, 4), (13, 4), (30, 4), (14, 9), (15, 9), (20, 11), (20, 11), (60, 11), (20, 11)]:
        x = torch.randn(n, width)
        torch.testing.assert_close(compiled(x), f(x))
    told = [(e.data["bucket"], e.data["unfit"][:13]) for e in seen if e.kind == "graph"]
    alone, buckets = [(b, u) for b, u in told if not b], [b for b, u in told if b]
    assert alone == [("", ""), ("", "its sizes kee")]
    assert buckets == ["13 to 16", "25 to 32", "13 to 16", "49 to 64"]


def test_what_cannot_be_padded_is_compiled_for_each_size_and_says_why(seen: list[Event]) -> None:
    f: Callable[[Tensor], Tensor] = lambda x: x.sort(0)[0] * 2  # noqa: E731
    compiled = torch.compile(f, backend=compile_graph, dynamic=True)
    for n in (9, 11, 30, 50, 31):
        x = torch.randn(n, 3)
        assert torch.equal(compiled(x), f(x))
    told = [(e.data["bucket"], e.data["unpadded"]) for e in seen if e.kind == "graph"]
    assert told == [("", ""), *[("", "a sort along it")] * 4]


def test_what_gets_smaller_as_the_size_grows_is_not_padded(seen: list[Event]) -> None:
    f: Callable[[Tensor], Tensor] = lambda x: torch.arange(40 - x.shape[0]).sum() + x.sum()  # noqa: E731
    compiled = torch.compile(f, backend=compile_graph, dynamic=True)
    for n in (9, 14, 13):
        assert compiled(torch.ones(n)) == f(torch.ones(n))
    assert {e.data["unpadded"] for e in seen if e.kind == "graph"} == {"", "a value gets smaller as the size grows"}


def test_sizes_for_which_a_graph_is_not_made_are_left_out_of_a_bucket(seen: list[Event]) -> None:
    table = torch.randn(20, 3)
    f: Callable[[Tensor], Tensor] = lambda x: x.softmax(0) + table[: x.shape[0]]  # noqa: E731
    compiled = torch.compile(f, backend=compile_graph, dynamic=True)
    for n in (9, 18, 20, 17):
        x = torch.randn(n, 3)
        torch.testing.assert_close(compiled(x), f(x))
    with pytest.raises(RuntimeError):
        compiled(torch.randn(21, 3))
    by_pairs = torch.compile(lambda x: x.view(x.shape[0] // 2, 2, 3).sum(1), backend=compile_graph, dynamic=True)
    for n in (8, 10, 12):
        x = torch.randn(n, 3)
        torch.testing.assert_close(by_pairs(x), x.view(n // 2, 2, 3).sum(1))
    told = [(e.data["bucket"], e.data["unpadded"]) for e in seen if e.kind == "graph"]
    few = ("", "few sizes of its bucket belong to this graph")
    assert told == [("", ""), *[("17 to 20", "")] * 3, ("", ""), few, few]


@pytest.mark.parametrize("rows", [4, 30])
def test_a_place_in_a_cache_that_counts_on_is_compiled_once_for_a_bucket(rows: int, seen: list[Event]) -> None:
    class Cache:
        def __init__(self) -> None:
            self.memory, self.at = torch.zeros(rows, 3), 0

    def f(cache: Cache, x: Tensor) -> Tensor:
        cache.memory[cache.at] = x
        cache.at += 1
        return cache.memory[: cache.at].sum(0)

    compiled, ours, plain = torch.compile(f, backend=compile_graph), Cache(), Cache()
    for _ in range(min(rows, 16)):
        x = torch.randn(3)
        torch.testing.assert_close(compiled(ours, x), f(plain, x))
        torch.testing.assert_close(ours.memory, plain.memory)
    if rows > 16:  # two of them are constants to Dynamo
        assert sum(e.kind in ("compile", "cache-load") for e in seen) <= 6


def test_an_index_is_checked_against_the_size_and_not_against_the_bucket() -> None:
    compiled = torch.compile(lambda x, i: x[i] * 2, backend=compile_graph, dynamic=True)
    x = torch.arange(24.0)
    at = torch.tensor([0, 8])
    for n in (9, 14, 13):
        assert compiled(x[:n].clone(), at).tolist() == [0, 16]
    with pytest.raises(IndexError, match="index 13 is out of bounds for dimension 0 with size 13"):
        compiled(x[:13].clone(), torch.tensor([0, 13]))
    assert compiled(x[:14].clone(), torch.tensor([0, 13])).tolist() == [0, 26]


PROGRAM = """
import torch
from fused_eager.compiling.caching import keeper
from fused_eager.config import resolve
from fused_eager.frontends.compiler.backend import compile_graph
from fused_eager.log.events import LOG
kinds = []
LOG.sinks.append(lambda e: kinds.append(e.kind))
f = torch.compile(lambda x: torch.softmax(x * 2, 0).mean(), backend=compile_graph, dynamic=True)
for n in (9, 13, 14, 16):
    assert abs(f(torch.ones(n, 3)).item() * n - 1) < 1e-5
keeper(resolve()).flush()
print(kinds.count("compile"), kinds.count("cache-load"))
"""


@pytest.mark.slow
def test_another_process_finds_the_executable_of_a_bucket(tmp_path: Path) -> None:
    environment = {**os.environ, "FUSED_EAGER_CACHE_DIR": str(tmp_path), "FUSED_EAGER_CACHE": ""}
    told = [
        subprocess.run([sys.executable, "-c", PROGRAM], env=environment, cwd=ROOT, capture_output=True, text=True)
        for _ in range(2)
    ]
    assert [t.stdout.split() for t in told] == [["2", "0"], ["0", "2"]], told[0].stderr + told[1].stderr


def test_buckets_hold_every_size_once() -> None:
    found = [bucket_of(n) for n in range(2, 3000)]
    assert all(b.low <= n <= b.high and b.low < b.middle < b.high for n, b in enumerate(found, 2))
    ends = sorted({(b.low, b.high) for b in found})
    assert [low for low, _ in ends] == [2, *[high + 1 for _, high in ends[:-1]]]
    assert all(2 * b.high <= 3 * n + 2 for n, b in enumerate(found, 2) if n > 8)
