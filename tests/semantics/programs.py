"""One program, run by plain eager and by every mode, and everything a user can see of its results compared.

`check(program)` is the whole interface. A program is a function without arguments; what it returns (tensors in nested
lists, tuples and dicts, numbers, strings) is read once after the context has ended and once inside it.
"""

from __future__ import annotations

import contextlib
import math
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fused_eager import fused_eager, report

MODES = ("debug", "strict", "fused")
Program = Callable[[], Any]


@dataclass(frozen=True)
class Outcome:
    """What a program did: the description of its result, or the exception it raised."""

    value: Any = None
    error: BaseException | None = None


@dataclass(frozen=True)
class Seen:
    """A tensor as a user sees it. `group` tells which tensors of one result share memory."""

    looks: dict[str, Any]
    values: torch.Tensor


def _look(t: torch.Tensor, groups: dict[int, int]) -> Seen:
    looks: dict[str, Any] = {
        "type": type(t).__name__,
        "dtype": t.dtype,
        "shape": tuple(t.shape),
        "device": t.device,
        "layout": t.layout,
        "requires_grad": t.requires_grad,
        "is_leaf": t.is_leaf,
        "grad_fn": type(t.grad_fn).__name__,
        "inference": t.is_inference(),
        "conj": t.is_conj(),
        "neg": t.is_neg(),
    }
    if not t.is_inference():
        looks["version"] = t._version
    if t.layout is torch.strided:
        storage = t.untyped_storage()
        looks["strides"] = t.stride()
        looks["offset"] = t.storage_offset()
        looks["shares memory with"] = groups.setdefault(storage._cdata, len(groups))
    with torch.no_grad():
        if t.device.type == "meta":
            values = torch.zeros(())
        elif t.layout is torch.strided and not t.is_quantized and type(t) in (torch.Tensor, torch.nn.Parameter):
            # Through Python numbers: an independent reader, and a copy that nothing can change afterwards.
            plain = t.detach().resolve_conj().resolve_neg()
            if plain.dtype in (torch.bfloat16, torch.float16) or (
                plain.dtype.itemsize == 1 and plain.is_floating_point()
            ):
                plain = plain.to(torch.float32)
            values = torch.tensor(plain.tolist(), dtype=plain.dtype).reshape(t.shape)
        else:
            values = t.detach().clone()
    return Seen(looks, values)


def describe(value: Any) -> Any:
    """A result in a form that outlives its tensors."""
    groups: dict[int, int] = {}

    def walk(v: Any) -> Any:
        if isinstance(v, torch.Tensor):
            return _look(v, groups)
        if isinstance(v, (list, tuple)):
            return [walk(x) for x in v]
        if isinstance(v, dict):
            return {k: walk(x) for k, x in v.items()}
        return v

    return walk(value)


def run(program: Program, mode: str, inside: bool = False, **options: Any) -> Outcome:
    """Run a program in a mode ("eager": without the library) from the same random state, and describe its result."""
    torch.manual_seed(20240607)
    context = contextlib.nullcontext() if mode == "eager" else fused_eager(mode=mode, **options)
    try:
        with context:
            value = program()
            if inside:
                value = describe(value)
        return Outcome(value if inside else describe(value))
    except Exception as error:
        return Outcome(error=error)


def compare(expected: Any, actual: Any, where: str = "result", versions: bool = True) -> None:
    """Assert that two descriptions are the same, floats within torch's own tolerance for their dtype."""
    if isinstance(expected, Seen):
        assert isinstance(actual, Seen), f"{where}: {actual!r} is not a tensor"
        different = {k: (v, actual.looks.get(k)) for k, v in expected.looks.items() if actual.looks.get(k) != v}
        if not versions:
            different.pop("version", None)
        assert not different, f"{where}: (eager, here) differ in {different}"
        torch.testing.assert_close(
            actual.values,
            expected.values,
            equal_nan=True,
            msg=lambda m: f"{where}: {m}\n{actual.values}\n{expected.values}",
            **_tolerance(expected.looks["dtype"]),
        )
    elif isinstance(expected, list):
        assert isinstance(actual, list) and len(expected) == len(actual), f"{where}: {actual!r} is not {expected!r}"
        for i, (e, a) in enumerate(zip(expected, actual, strict=True)):
            compare(e, a, f"{where}[{i}]", versions)
    elif isinstance(expected, dict):
        assert list(expected) == list(actual), f"{where}: {list(actual)} are not {list(expected)}"
        for k in expected:
            compare(expected[k], actual[k], f"{where}[{k!r}]", versions)
    elif isinstance(expected, float):
        assert isinstance(actual, float), f"{where}: {actual!r} is not {expected!r}"
        same = math.isclose(expected, actual, rel_tol=1e-5, abs_tol=1e-7) or (expected != expected and actual != actual)
        assert same, f"{where}: {actual!r} is not {expected!r}"
    else:
        assert type(expected) is type(actual) and expected == actual, f"{where}: {actual!r} is not {expected!r}"


def _tolerance(dtype: torch.dtype) -> dict[str, float]:
    low = {torch.bfloat16: 1.6e-2, torch.float16: 1e-3}.get(dtype)
    return {} if low is None else {"rtol": low, "atol": 1e-5}


def same_error(expected: BaseException | None, actual: BaseException | None) -> None:
    """Assert that both failed in the same way: eager's exception type, and its text (more may follow)."""
    if expected is None:
        if actual is not None:
            raise AssertionError(f"raised {type(actual).__name__}: {actual}") from actual
        return
    assert actual is not None, f"did not raise {type(expected).__name__}: {expected}"
    if type(actual) is not type(expected):
        raise AssertionError(
            f"raised {type(actual).__name__}: {actual}\nnot {type(expected).__name__}: {expected}"
        ) from actual
    first = str(expected).splitlines()[0] if str(expected) else ""
    assert first in str(actual), f"said {actual}\nnot {expected}"


def check(program: Program, mode: str, versions: bool = True, **options: Any) -> None:
    """Assert that `program` does in `mode` what it does in plain eager.

    `versions=False` leaves out the version counters: autograd's engine adds gradients in place when nobody else holds
    them, which is its own affair.
    """
    expected = run(program, "eager")
    for inside in (False, True):
        actual = run(program, mode, inside, **options)
        same_error(expected.error, actual.error)
        if expected.error is None:
            compare(
                expected.value, actual.value, "result read inside" if inside else "result read afterwards", versions
            )


def in_process(code: str, seconds: float = 60) -> str:
    """What a program in a process of its own prints: for what may crash, hang or fork. It has to end well."""
    environ = {**os.environ, "PYTHONFAULTHANDLER": "1", "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=seconds, env=environ
        )
    except subprocess.TimeoutExpired as late:
        said = (late.stdout or b"").decode() + (late.stderr or b"").decode()
        raise AssertionError(f"did not end within {seconds} s; it said: {said}") from None
    assert done.returncode == 0, f"ended with {done.returncode}:\n{done.stdout}\n{done.stderr[-3000:]}"
    return done.stdout


@contextlib.contextmanager
def compilations(at_most: int):  # type: ignore[no-untyped-def]
    """Assert that the body compiles at most so many regions."""
    before = report().compilations
    yield
    done = report().compilations - before
    assert done <= at_most, (
        f"{done} regions were compiled, at most {at_most} expected: {report().facts.compiles[-done:]}"
    )
