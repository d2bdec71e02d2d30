"""Random programs. The generator runs eagerly what it writes, so that what it writes next makes sense."""

from __future__ import annotations

import contextlib
import copy
import inspect
import pickle
import random
import re
import textwrap
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.utils.checkpoint

import fused_eager as fe

from . import helpers, statements
from .kinds import KINDS

LARGEST = 1e3  # what is larger than that is left out: rounding errors grow with it
# What `run` is when a program is run: again with the same shapes, where it is followed; with other numbers and shapes,
# where it is followed for a while; and as at first.
RUNS = (0, 0, 1, 0)
SHARE = 0.45  # of the statements of further kinds, in programs that have any
MOST = 600  # elements of a tensor

_HEADER = """\
import copy, pickle
import numpy as np
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
import fused_eager as fe
"""
_IMPORTED = ("Any", "Callable", "ClassVar", "torch")
_HELPERS = {k: v for k, v in vars(helpers).items() if not k.startswith("_") and k not in _IMPORTED}


@dataclass(frozen=True)
class Program:
    """Statements before, in and after one loop. Exact text in, exact text out: a program is its source."""

    before: tuple[str, ...]
    body: tuple[str, ...]
    after: tuple[str, ...]
    rounds: int
    dtype: str
    seed: int

    def source(self) -> str:
        """The program without its header; it expects `seen` and `run` and leaves its variables."""
        lines = [f"torch.manual_seed({self.seed} + run)", f"D = {self.dtype}", "i = 0", *self.before]
        if self.body:
            lines += [f"for i in range({self.rounds}):", *(textwrap.indent(s, "    ") for s in self.body)]
        return "\n".join([*lines, *self.after]) + "\n"

    def script(self, mode: str) -> str:
        """A script that shows what eager and a mode make of the program."""
        body = textwrap.indent(self.source(), "    ")
        used = any(re.search(rf"\b{name}\b", body) for name in _HELPERS)
        return (
            f"{_HEADER}{inspect.getsource(helpers) if used else ''}\n\n"
            f"def program(run):\n    seen, kept = [], {{}}\n{body}"
            f"    return seen, kept, {{k: v for k, v in locals().items() if isinstance(v, torch.Tensor)}}\n\n\n"
            f"for run in {RUNS}:\n    print(program(run))\n"
            f'    with fe.fused_eager(mode="{mode}"):\n        out = program(run)\n    print(out)\n'
        )

    def statements(self) -> int:
        return len(self.before) + len(self.body) + len(self.after)

    def without(self, chosen: set[int]) -> Program:
        """The program without the statements of these numbers."""
        kept = [s for i, s in enumerate((*self.before, *self.body, *self.after)) if i not in chosen]
        a = sum(i not in chosen for i in range(len(self.before)))
        b = a + sum(i not in chosen for i in range(len(self.before), len(self.before) + len(self.body)))
        return replace(self, before=tuple(kept[:a]), body=tuple(kept[a:b]), after=tuple(kept[b:]))


def namespace(run: int = 0) -> dict[str, Any]:
    """What a program may use."""
    helpers.Named.names.clear()
    helpers.Redispatched.ops.clear()
    modules = {"torch": torch, "F": torch.nn.functional, "np": np, "copy": copy, "pickle": pickle, "fe": fe}
    return {**modules, **_HELPERS, "seen": [], "kept": {}, "run": run}


class Misfit(Exception):
    """A template that cannot be filled in here."""


class Generator:
    """Builds one program, statement by statement."""

    def __init__(self, seed: int, kinds: tuple[str, ...] = ()):
        self.random = random.Random(seed)
        self.kinds = kinds
        self.further = random.Random(f"{seed} {kinds}")  # so that programs without further kinds stay what they are
        self.seed = seed
        self.env = namespace()
        self.names: list[str] = []
        self.inexact: set[int] = set()  # storages whose values rounding has touched
        self.kept: list[torch.UntypedStorage] = []  # so that no address is used twice, and a seed gives one program
        self.in_loop = False
        self.dtype = self.random.choice(["torch.float64"] * 3 + ["torch.float32"] * 2)

    # -- choosing operands

    def pick(self, wanted: Callable[[torch.Tensor], bool]) -> str:
        """A variable, the later ones more likely."""
        fit = [n for n in self.names if isinstance(self.env.get(n), torch.Tensor) and wanted(self.env[n])]
        if not fit:
            raise Misfit
        return self.random.choice(fit[-8:] if self.random.random() < 0.7 else fit)

    def is_exact(self, t: torch.Tensor) -> bool:
        """Whether rounding cannot have changed it; in a loop that is known of whole numbers alone."""
        if not t.is_floating_point():
            return True
        return not self.in_loop and t.untyped_storage()._cdata not in self.inexact

    def number(self) -> str:
        fixed = ["0.5", "-0.0", "0.0", "1.0", "-1", "2", "0.1", "3", "1.5", "-0.25"]
        moving = ["0.1 * i", "i", "float(i)", "0.5 - i"]
        between = ["0.5 * run", "run"]
        return self.random.choice(fixed + moving if self.in_loop else fixed + between)

    def small_shape(self) -> str:
        r = self.random
        size = r.choice([0, 1, 1, 2, 2, 2, 3])
        sizes = ["0" if r.random() < 0.02 else r.choice("122334") for _ in range(size)]
        if sizes and r.random() < 0.1:
            sizes[0] += " + run"
        return f"({', '.join(sizes)}{',' * (size == 1)})"

    def fill(self, template: str) -> tuple[str, list[str]]:
        """A template with its placeholders filled in, and the variables it mentions."""
        used: list[str] = []

        def place(match: re.Match[str]) -> str:
            kind = match.group(1)
            if kind in "sktha":
                return {
                    "s": self.number, "k": lambda: str(self.random.randint(0, 4)), "h": self.small_shape,
                    "t": lambda: self.random.choice(["D", "D", "torch.float32", "torch.int64", "torch.int32"]),
                    "a": lambda: used_new,
                }[kind]()
            if kind in "dr":
                t = self.env[used[0]] if used else torch.zeros(1)
                if kind == "d":
                    if t.dim() == 0:
                        raise Misfit
                    return str(self.random.randint(-t.dim(), t.dim() - 1))
                return self.shape_like(t)
            wanted: dict[str, Callable[[torch.Tensor], bool]] = {
                "f": lambda t: t.is_floating_point(),
                "n": lambda t: not t.is_floating_point() and t.dtype is not torch.bool,
                "b": lambda t: t.dtype is torch.bool,
                "x": lambda t: True,
                "e": self.is_exact,
                "w": lambda t: t.is_floating_point() and _is_writable(t),
            }
            used.append(self.pick(wanted[kind]))
            return used[-1]

        used_new = f"t{len(self.names)}"
        # An expression that names one operand several times means the same one: {x}.view_as({x}) with odds of a half.
        text = re.sub(r"\{([a-z])\}", place, template)
        return text, used

    def shape_like(self, t: torch.Tensor) -> str:
        n = t.numel()
        ways = ["(-1,)", f"({n},)", f"(1, {n})"] + [f"({k}, {n // k})" for k in (2, 3) if n % k == 0 and n]
        return self.random.choice(ways)

    # -- adding statements

    def add(self, text: str, into: list[str], exact: bool) -> bool:
        """Run a statement; keep it if it runs and what it leaves is fit for the next."""
        before = {n: self.env.get(n) for n in self.names}
        kept = dict(self.env["kept"])
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                exec(compile(text, "<fuzz>", "exec"), self.env)
            if not all(map(_small, self.env["kept"].values())):
                raise Misfit
        except Exception:
            self.env.update(before, kept=kept)
            return False
        for name in list(self.env):
            value = self.env[name]
            if isinstance(value, torch.Tensor) and value.layout is torch.strided:
                self.kept.append(value.untyped_storage())
            if isinstance(value, torch.Tensor) and name not in self.names and re.fullmatch(r"t\d+", name):
                self.names.append(name)
            if isinstance(value, torch.Tensor) and not (_has_memory(value) and _fit(value)):
                if name in before and _has_memory(before[name]):
                    self.env[name] = before[name]
                else:
                    del self.env[name]
                    self.names = [n for n in self.names if n != name]
                return False
        self.names = [n for n in self.names if isinstance(self.env.get(n), torch.Tensor)]
        if not exact:
            self.mark(text)
        into.append(text)
        return True

    def mark(self, text: str) -> None:
        """What an inexact statement mentions or makes may be inexact from here on."""
        for name in re.findall(r"\bt\d+\b", text):
            t = self.env.get(name)
            if isinstance(t, torch.Tensor) and t.is_floating_point():
                self.inexact.add(t.untyped_storage()._cdata)

    def statement(self, into: list[str]) -> bool:
        """Try to add one random statement."""
        r = self.random
        if self.kinds and self.further.random() < SHARE:
            return self.further_statement(into)
        family = r.choices(
            ["exact", "smooth", "views", "writes", "reads", "blocks", "leaf", "delete"], [22, 24, 16, 26, 4, 4, 2, 2]
        )[0]
        try:
            if family == "leaf":
                name = f"t{len(self.names)}"
                return self.add(f"{name} = torch.randn({self.small_shape()}, dtype=D, requires_grad=True)", into, False)
            if family == "delete":
                name = self.pick(lambda t: True)
                return not self.in_loop and self.add(f"del {name}", into, True)
            table = {
                "exact": statements.EXACT, "smooth": statements.SMOOTH, "views": statements.VIEWS,
                "writes": statements.WRITES, "reads": statements.READS, "blocks": statements.BLOCKS,
            }[family]
            text, used = self.fill(r.choice(table))
        except Misfit:
            return False
        if "out=" in text and not text.startswith(("torch.add", "torch.mul")) and self.overlap(used):
            return False  # reading what it overwrites: what comes out is ATen's affair, and differs from loop to loop
        exact = family in ("exact", "views", "reads") and all(
            self.is_exact(self.env[u]) or not self.env[u].is_floating_point() for u in used
        )
        if family in ("exact", "smooth", "views"):
            text = f"{self.target(text)} = {text}"
        elif self.in_loop and "\n" not in text and r.random() < 0.2:
            text = f"if i % 3 == {r.randint(0, 1)}:\n    {text}"
        return self.add(text, into, exact)

    def further_statement(self, into: list[str]) -> bool:
        """Try to add one random statement of a further kind."""
        table = KINDS[self.further.choice(self.kinds)]
        template = self.further.choice(table)
        try:
            for name in re.findall(r"kept\['\w+'\]|\bjit\d", template):
                made = {f"kept[{key!r}]" for key in self.env["kept"]} | self.env.keys()
                makers = [t for t in table if t.startswith(f"{name} = ") and t.count(name) == 1]
                if name not in made and template not in makers:
                    self.add(self.fill(self.further.choice(makers))[0], into, False)
            return self.add(self.fill(template)[0], into, False)
        except Misfit:
            return False

    def overlap(self, used: list[str]) -> bool:
        """Whether the last operand shares memory with another."""
        storages = [self.env[u].untyped_storage()._cdata for u in used]
        return storages[-1] in storages[:-1]

    def target(self, text: str) -> str:
        """A new variable, or an old one that is overwritten (in a loop only by a value of its dtype)."""
        r = self.random
        if r.random() < 0.25:
            with contextlib.suppress(Exception):
                env = dict(self.env)
                made = eval(text, env)
                same = [n for n in self.names if self.env[n].dtype == made.dtype and self.env[n].dim() == made.dim()]
                if same:
                    return r.choice(same)
        return f"t{max([int(n[1:]) for n in self.names], default=-1) + 1}"

    def build(self) -> Program:
        """The program."""
        r = self.random
        exec(f"torch.manual_seed({self.seed} + run)\nD = {self.dtype}\ni = 0", self.env)
        before: list[str] = []
        body: list[str] = []
        after: list[str] = []
        for template in ("torch.randn({h}, dtype=D)", "torch.randn({h}, dtype=D)", "torch.randint(-4, 5, {h})",
                         "torch.randint(0, 2, {h}).bool()"):
            self.add(f"t{len(self.names)} = {self.fill(template)[0]}", before, True)
        self.several(before, r.randint(3, 12))
        if r.random() < 0.6:
            self.in_loop = True
            self.several(body, r.randint(2, 9))
            self.in_loop = False
            for name in self.names:
                t = self.env[name]
                if isinstance(t, torch.Tensor) and t.is_floating_point():  # no gradient is None
                    self.inexact.add(t.untyped_storage()._cdata)
        self.several(after, r.randint(1, 8))
        return Program(tuple(before), tuple(body), tuple(after), r.choice([2, 3, 3, 5, 8]), self.dtype, self.seed)

    def several(self, into: list[str], count: int) -> None:
        for _ in range(count):
            for _ in range(12):
                if self.statement(into):
                    break


def _small(t: Any) -> bool:
    """Whether what is kept, which may be sparse or of a subclass, is no more than a program should hold."""
    return isinstance(t, torch.Tensor) and t.numel() <= MOST and t.dim() <= 4


def _is_writable(t: torch.Tensor) -> bool:
    try:
        return not (t.requires_grad and t.is_leaf)
    except RuntimeError:  # a view that autograd has lost track of: looking at its history raises
        return False


def _has_memory(t: Any) -> bool:
    """False for what torch itself can make with out= over memory that NumPy holds: whoever reads it dies."""
    return not isinstance(t, torch.Tensor) or t.layout is not torch.strided or not t.numel() or t.data_ptr() != 0


def _fit(t: torch.Tensor) -> bool:
    if t.numel() > MOST or t.dim() > 5 or t.is_nested or t.layout is not torch.strided:
        return False
    if t.dtype is torch.bool or not t.numel():
        return True
    with torch.no_grad():
        plain = t.detach()
        return not plain.is_complex() and bool(torch.isfinite(plain).all()) and float(plain.abs().max()) < LARGEST


def generate(seed: int, kinds: tuple[str, ...] = ()) -> Program:
    """The program of a seed, with statements of further kinds: always the same one for one version of torch."""
    state = torch.get_rng_state()
    try:
        return Generator(seed, kinds).build()
    finally:
        torch.set_rng_state(state)
