"""The digest of a function: what it computes decides it, and where it stands does not."""

from __future__ import annotations

import dataclasses
import enum
import functools
import threading
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from fused_eager.frontends.kernels.content import Content, NoContent, digest_of, library_of

BASE = """
import functools, jax, jax.numpy as jnp, numpy as np
SCALE = 2.0
TABLE = [1, 2]
class Config:
    width = 3
    def twice(self): return self.width * 2
CONFIG = Config()
def helper(x, k=1): return jnp.tanh(x) * SCALE + k
def made(n):
    def inner(x): return helper(x) * n + TABLE[0]
    return inner
def function(x):
    "What it does."
    y = [v * 2 for v in (x, x)]
    return made(3)(y[0]) + CONFIG.twice() + jax.jit(lambda v: v + 1)(x)
"""


def function_of(source: str, file: str = "a.py") -> Any:
    module = types.ModuleType("somewhere")
    exec(compile(source, file, "exec"), module.__dict__)
    return module.__dict__["function"]


def digest(source: str, file: str = "a.py") -> str:
    return digest_of(function_of(source, file), "function")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("SCALE = 2.0", "SCALE = 2.5"),
        ("TABLE = [1, 2]", "TABLE = [1, 3]"),
        ("TABLE[0]", "TABLE[1]"),
        ("width = 3", "width = 4"),
        ("self.width * 2", "self.width * 3"),
        ("jnp.tanh", "jnp.sinh"),
        ("k=1", "k=2"),
        ("made(3)", "made(4)"),
        ("v + 1", "v - 1"),
        ("v * 2 for", "v * 4 for"),
        ("(y[0])", "(y[1])"),
    ],
)
def test_an_edit_is_another_digest(old: str, new: str) -> None:
    assert old in BASE
    assert digest(BASE.replace(old, new)) != digest(BASE)


@pytest.mark.parametrize(
    "other",
    [
        "\n\n\n# a comment\n" + BASE,
        BASE.replace("What it does.", "What it really does."),
        BASE.replace("SCALE = 2.0", "SCALE = 1.0 + 1.0"),
        BASE + "\nUNUSED = 7\ndef other(x): return x\n",
        BASE.replace("class Config:", "class Config:\n    'Words.'"),
    ],
)
def test_what_computes_the_same_has_the_same_digest(other: str) -> None:
    assert digest(other, "/elsewhere/b.py") == digest(BASE)


def test_what_is_exchanged_while_the_program_runs_is_seen() -> None:
    function = function_of(BASE)
    space = function.__globals__
    first = Content("function", function)
    assert first.is_current()
    for change in (
        lambda: space.update(SCALE=3.0),
        lambda: space["TABLE"].append(5),
        lambda: setattr(space["CONFIG"], "width", 8),
        lambda: setattr(space["Config"], "width", 9),
        lambda: setattr(space["helper"], "__defaults__", (5,)),
        lambda: setattr(space["helper"], "__code__", (lambda x, k=1: x * k).__code__),
    ):
        before = Content("function", function)
        assert before.is_current()
        change()
        assert not before.is_current()
        Content("function", function)
    function = function_of(BASE)
    space = function.__globals__
    space["SCALE"] = 3.5
    same = Content("function", function)
    space["SCALE"] = float("3.5")
    assert not same.is_current() and Content("function", function).digest == same.digest


def test_closures_cells_and_arrays_are_seen() -> None:
    table, n = np.arange(4.0), 2

    def function(x: Any) -> Any:
        return x * table * n

    first = Content("function", function)
    table[1] = 7
    assert not first.is_current()
    second = Content("function", function)
    n = 3
    assert not second.is_current()
    assert len({first.digest, second.digest, Content("function", function).digest}) == 3


@dataclasses.dataclass(frozen=True)
class Settings:
    width: int
    names: tuple[str, ...] = ("a",)


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value: Any):
        self.value = value


class Colour(enum.Enum):
    RED = 1


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, 1.0), (1, True), (0.0, -0.0), ("a", b"a"), ((1, 2), [1, 2]), ({1: 2}, {1: 3}), ({1, 2}, {1, 3}),
        (np.float32(1), np.float64(1)), (np.zeros(2), np.zeros((2, 1))), (jnp.zeros(2), jnp.ones(2)),
        (torch.float32, torch.float64), (Settings(1), Settings(2)), (Slotted(1), Slotted(2)), (slice(1), slice(2)),
        (functools.partial(max, 1), functools.partial(max, 2)), (jnp.sin, jnp.cos), (np.sin, np.cos), (len, max),
        (jax.jit(lambda x: x + 1), jax.jit(lambda x: x + 2)), (Settings, Slotted), (float("nan"), 1.0),
        (jax.custom_jvp(lambda x: x), jax.custom_jvp(lambda x: x * 2)), (Slotted(1).__init__, Slotted(2).__init__),
        (np.dtype("int8"), np.dtype("int16")), (range(3), range(4)), (jax.lax.add_p, jax.lax.mul_p),
    ],
)  # fmt: skip
def test_values_are_told_apart(one: Any, other: Any) -> None:
    assert digest_of(one, "x") != digest_of(other, "x")
    assert digest_of(one, "x") == digest_of(one, "x")


def test_what_refers_to_itself_has_an_end() -> None:
    def even(n: int) -> bool:
        return n == 0 or odd(n - 1)

    def odd(n: int) -> bool:
        return n != 0 and even(n - 1)

    ring: list[Any] = []
    ring.append(ring)
    assert digest_of(even, "x") != digest_of(odd, "x")
    assert digest_of(ring, "x")


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (torch.zeros(2), "is a torch.Tensor"),
        (threading.Lock(), "no content"),
        ((i for i in range(3)), "no content"),
        (np.array([object()]), "Python objects"),
    ],
)
def test_what_has_no_content_is_refused_by_name(value: Any, words: str) -> None:
    def function(x: Any) -> Any:
        return x, value

    with pytest.raises(NoContent, match=words) as error:
        digest_of(function, "function")
    assert "value, which function closes over" in str(error.value)


def test_libraries_count_by_their_versions() -> None:
    assert library_of("numpy").startswith("numpy ") and library_of("jax.nn").startswith("jax ")
    assert library_of("functools").startswith("python ") and library_of("__main__") == library_of(__name__) == ""
