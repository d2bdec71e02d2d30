"""Run a program by eager and by the runtime, tell how they differ, and shrink what does."""

from __future__ import annotations

import contextlib
import itertools
import math
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import CodeType
from typing import Any

import numpy as np
import torch
from torch.testing._internal.two_tensor import TwoTensor

import fused_eager as fe
from fused_eager.compiling import background
from fused_eager.devices.host.buffers import TABLE
from fused_eager.policy import hotness

from .generate import LARGEST, RUNS, Program, namespace

# Relative to the largest number of a tensor, because what was large on the way may have cancelled.
TOLERANCE = {torch.float64: 1e-8, torch.float32: 2e-3, torch.bfloat16: 6e-2, torch.float16: 2e-2}


@dataclass
class Outcome:
    """What a program left: its variables, what it read on the way, or the exception that it raised."""

    variables: dict[str, Any]
    seen: list[Any]
    error: BaseException | None = None
    kept: tuple[Any, ...] = ()


class Invalid(Exception):
    """Eager itself does not run the program, or its numbers are not fit for comparison."""


def compiled(program: Program) -> CodeType:
    """The program as code."""
    return compile(program.source(), "<program>", "exec")


def _context(mode: str) -> fe.fused_eager:
    """A mode, or "auto": fused, where ATen runs what is not compiled yet."""
    options = {"progress": False, "cache": "off", "validate": True}
    if mode == "auto":
        return fe.fused_eager(mode="fused", compile="auto", **options)
    return fe.fused_eager(mode=mode, compile="wait", **options)


def run(program: Program, mode: str | None, number: int = 0, code: CodeType | None = None) -> Outcome:
    """Run a program by eager (None) or in a mode. What it leaves is read after the context has ended.

    `number` is its variable `run`; `code`, the same for all runs, lets one be followed by the next.
    """
    env, default = namespace(number), torch.get_default_dtype()
    code = code or compiled(program)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with contextlib.nullcontext() if mode is None else _context(mode):
                exec(code, env)
        variables = {k: v for k, v in env.items() if isinstance(v, torch.Tensor)}
        return Outcome(variables, [*env["seen"], *env["kept"].items()], kept=tuple(env["kept"].values()))
    except Exception as error:
        return Outcome({}, env["seen"], error)
    finally:
        torch.set_default_dtype(default)


def compare(want: Outcome, got: Outcome, program: Program | None = None) -> str:
    """How two outcomes of a program differ; "" if they do not."""
    tolerance = TOLERANCE[torch.float64 if program is None else _loosest(program)]
    # Version counters are torch's affair where it clones an inference tensor (the copy is counted), where `out=` is
    # resized (counted when any dispatch mode is active, ours or another), and where the autograd engine adds gradients
    # up (in place only when no mode is active).
    versions = program is None or re.search("inference_mode|out=|autograd.grad", program.source()) is None
    if got.error is not None:
        text = str(got.error).partition("\n")[0]
        return f"raises {type(got.error).__name__}: {text[:300]}"
    if list(want.variables) != list(got.variables):
        return f"variables {list(got.variables)} instead of {list(want.variables)}"
    if len(want.seen) != len(got.seen):
        return f"read {len(got.seen)} things instead of {len(want.seen)}"
    for i, (a, b) in enumerate(zip(want.seen, got.seen, strict=True)):
        found = _differ(a, b, tolerance)
        if found:
            return f"seen[{i}] {found}"
    for name, a in want.variables.items():
        found = _differ(a, got.variables[name], tolerance)
        found = found or _differ_in_looks(a, got.variables[name], tolerance, versions)
        if found:
            return f"{name} {found}"
    if _sharing(want.variables) != _sharing(got.variables):
        return f"share memory like {_sharing(got.variables)} instead of {_sharing(want.variables)}"
    return ""


def _sharing(variables: dict[str, torch.Tensor]) -> list[int]:
    seen: dict[int, int] = {}
    return [seen.setdefault(v.untyped_storage()._cdata, len(seen)) for v in variables.values()]


def _look(t: torch.Tensor, what: str) -> Any:
    try:
        return getattr(t, what)
    except RuntimeError as error:  # a view that autograd has lost track of, for one
        return str(error)


def _differ_in_looks(a: torch.Tensor, b: torch.Tensor, tolerance: float, versions: bool) -> str:
    for what in ("requires_grad", "is_leaf", "_version")[: 3 if versions else 2]:
        looks = _look(a, what), _look(b, what)
        if looks[0] != looks[1]:
            return f"{what} is {looks[1]} instead of {looks[0]}"
    if a.storage_offset() != b.storage_offset():
        return f"begins at {b.storage_offset()} instead of {a.storage_offset()}"
    if _look(a, "is_leaf") is True and a.grad is not None:
        if b.grad is None:
            return "has no gradient"
        # How a gradient lies in memory is the autograd engine's choice, another one where any mode is active.
        return _differ(*[t.grad.clone(memory_format=torch.contiguous_format) for t in (a, b)], tolerance)
    return ""


def _differ(a: Any, b: Any, tolerance: float) -> str:
    if type(a) is not type(b):
        return f"is a {type(b).__name__} instead of a {type(a).__name__}"
    if isinstance(a, torch.Tensor):
        return _differ_in_tensors(a, b, tolerance)
    if isinstance(a, np.ndarray):
        return _differ_in_values(torch.from_numpy(a), torch.from_numpy(b), tolerance)
    if isinstance(a, (list, tuple)):
        if len(a) != len(b):
            return f"has {len(b)} elements instead of {len(a)}"
        return next((found for x, y in zip(a, b, strict=True) if (found := _differ(x, y, tolerance))), "")
    if isinstance(a, (float, np.floating)):
        # A sum that was read: as exact as the numbers in it.
        near = math.isclose(a, b, rel_tol=1e-2, abs_tol=1e-2) or (a != a and b != b)
        return "" if near else f"is {b!r} instead of {a!r}"
    return "" if a == b else f"is {b!r} instead of {a!r}"


def _parts(t: torch.Tensor) -> list[torch.Tensor]:
    """The plain tensors that one of a subclass, or a sparse one, is made of."""
    if isinstance(t, TwoTensor):
        return [t.a, t.b]
    if type(t) not in (torch.Tensor, torch.nn.Parameter):
        t = t.as_subclass(torch.Tensor)
    if t.layout is torch.sparse_coo:
        return [t._indices().detach(), t._values().detach()]
    return [t.clone() if t._is_zerotensor() else t]


def _differ_in_tensors(a: torch.Tensor, b: torch.Tensor, tolerance: float) -> str:
    looks = [(t.layout, t.shape, t._is_zerotensor(), t.is_sparse and t.is_coalesced()) for t in (a, b)]
    if looks[0] != looks[1]:
        return f"is {looks[1]} instead of {looks[0]}"
    for x, y in zip(_parts(a), _parts(b), strict=True):
        if found := _differ_in_values(x, y, tolerance):
            return found
    return ""


def _differ_in_values(a: torch.Tensor, b: torch.Tensor, tolerance: float) -> str:
    looks = [(t.dtype, tuple(t.shape), t.stride()) for t in (a, b)]
    if looks[0] != looks[1]:
        return f"is {looks[1]} instead of {looks[0]}"
    a, b = a.detach().resolve_conj().resolve_neg(), b.detach().resolve_conj().resolve_neg()
    if not a.is_floating_point():
        return "" if torch.equal(a, b) else f"is {b.tolist()} instead of {a.tolist()}"
    scale = 1 + float(a.abs().max()) if a.numel() else 1.0
    atol = max(TOLERANCE.get(a.dtype, 0.0), tolerance) * scale
    if not torch.allclose(a.double(), b.double(), rtol=0, atol=atol, equal_nan=True):
        return f"is {b.tolist()} instead of {a.tolist()}"
    return ""



def _loosest(program: Program) -> torch.dtype:
    text = program.source()
    if "bfloat16" in text:
        return torch.bfloat16
    return torch.float32 if "float32" in text or ".float()" in text or "complex" in text else torch.float64


def check(program: Program, mode: str) -> str:
    """How a mode differs from eager in one of the program's runs; "" if it does not.

    Raises:
        Invalid: eager does not run the program.
    """
    found = _differs_in_some_run(program, mode)
    if found and "raises" not in found:
        # Rounding or a mistake? Rounding goes away with more digits. (Where all is float64, it is the same program.)
        try:
            if not _differs_in_some_run(in_double(program), mode):
                return ""
        except Invalid:
            return found
    return found


def _differs_in_some_run(program: Program, mode: str) -> str:
    # Each program is another stream, not another shape of one.
    hotness.SKELETONS.variants.clear()
    code = compiled(program)
    for turn, number in enumerate(RUNS if mode in ("fused", "auto") else RUNS[:1]):
        want = run(program, None, number, code)
        if want.error is not None:
            if turn:
                continue  # with other shapes it may be no program
            raise Invalid(str(want.error))
        for v in (*want.variables.values(), *itertools.chain(*map(_parts, want.kept))):
            if v.is_floating_point() and v.numel() and not float(v.detach().abs().max()) < LARGEST * 10:
                raise Invalid("its numbers grow")
        try:
            found = compare(want, run(program, mode, number, code), program)
            if number % 2:
                background.wait()  # so that some turns are compiled by then, and some are not
        finally:
            for b in [b for b in TABLE.values() if b.stream is not None]:
                del TABLE[b.cdata]  # what a failure left must not fail the next program
        if found:
            return f"{f'in turn {turn} ' if turn else ''}{found}"
    return ""


def in_double(program: Program) -> Program:
    """The same program in float64 throughout."""

    def widen(text: str) -> str:
        return re.sub(r"torch\.(float32|bfloat16)", "torch.float64", text.replace(".float()", ".double()"))

    return replace(
        program, before=("torch.set_default_dtype(D)", *map(widen, program.before)),
        body=tuple(map(widen, program.body)),
        after=tuple(map(widen, program.after)), dtype="torch.float64",
    )


def repaired(program: Program) -> Program | None:
    """The program without the statements that eager refuses (in a later round of the loop, say).

    None if that comes to no end.
    """
    for _ in range(12):
        outcome = run(program, None)
        if outcome.error is None:
            return program
        line = _failing_statement(program, outcome.error)
        if line is None:
            return None
        program = program.without({line})
    return None


def _failing_statement(program: Program, error: BaseException) -> int | None:
    trace, line = error.__traceback__, None
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "<program>":
            line = trace.tb_lineno
        trace = trace.tb_next
    if line is None:
        return None
    at = 4  # the first line after the three that set the program up
    for i, statement in enumerate((*program.before, *program.body, *program.after)):
        if i == len(program.before) and program.body:
            at += 1
        height = statement.count("\n") + 1
        if at <= line < at + height:
            return i
        at += height
    return None


def shrink(program: Program, fails: Callable[[Program], bool], patience: int = 400) -> Program:
    """The smallest program found that still fails: fewer statements, fewer rounds."""
    tries = 0

    def still(candidate: Program) -> bool:
        nonlocal tries
        tries += 1
        try:
            return fails(candidate)
        except Invalid:
            return False

    size = max(1, program.statements() // 2)
    while size and tries < patience:
        start, shorter = 0, False
        while start < program.statements() and tries < patience:
            candidate = program.without(set(range(start, start + size)))
            if still(candidate):
                program, shorter = candidate, True
            else:
                start += size
        if not shorter or size > 1:
            size = size // 2 if size > 1 else (1 if shorter else 0)
    for rounds in (1, 2, 3):
        if rounds < program.rounds and still(replace(program, rounds=rounds)):
            return replace(program, rounds=rounds)
    return program
