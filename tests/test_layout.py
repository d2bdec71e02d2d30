"""The shape of the repository as tests: who imports whom, how long a module may be, what the public face promises."""

from __future__ import annotations

import ast
import importlib
import re
import sys
from collections.abc import Collection, Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

import fused_eager
from fused_eager.config import OPTIONS

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = {"fused_eager": "fused_eager", "cache": "fused_eager.cache", "fusion_rules": "fused_eager.fusion_rules"}
SOURCES = sorted(path for folder in (*FOLDERS, "examples", "benchmarks") for path in (ROOT / folder).rglob("*.py"))
LIMIT = 450

# folder -> what it may import of this project, and what it may import of nobody's.
LAYERS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "cache": (("fused_eager.cache",), ("torch", "jax", "jaxlib")),
    "fusion_rules": (("fused_eager.fusion_rules",), ()),
}


def imports(source: str, package: str) -> Iterator[tuple[int, str]]:
    """Line and absolute name of everything that `source`, a module of `package`, imports, inside functions too.

    `from a import b` counts as `a.b`, which is a's submodule or a name in it: either way it is a that is imported.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            start = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{start}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            yield from ((node.lineno, str(a.value)) for a in node.args[:1] if isinstance(a, ast.Constant))


def inside(name: str, packages: tuple[str, ...]) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages)


def violations(source: str, folder: str, inner: tuple[str, ...] = ()) -> list[str]:
    """The imports by which a module in `folder`, or in a folder in it, breaks the dependency direction."""
    own, never = LAYERS[folder]
    return [
        f"line {line}: {name}"
        for line, name in imports(source, ".".join([FOLDERS[folder], *inner]))
        if inside(name, never) or (inside(name, ("fused_eager",)) and not inside(name, own))
    ]


def short(path: Path) -> str:
    return str(path.relative_to(ROOT))


LAYERED = [path for path in SOURCES if path.relative_to(ROOT).parts[0] in LAYERS]


@pytest.mark.parametrize("path", LAYERED, ids=short)
def test_imports_run_one_way(path: Path) -> None:
    folder, *inner, _ = path.relative_to(ROOT).parts
    assert violations(path.read_text(), folder, tuple(inner)) == []


# The packages of the runtime, each of which may import those before it, wherever in a module the import stands.
# A module beside them, in fused_eager/ itself, is for all.
PACKAGES = (
    *("log", "ranks", "policy", "devices", "targets", "tracing", "planning", "lowering", "compiling"),
    *("follower", "executing", "recording", "frontends.context", "frontends.device", "frontends.collectives"),
    *("frontends.kernels", "frontends.compiler", "reporting", "commands"),
)
RUNTIME = [path for path in (ROOT / "fused_eager").rglob("*.py") if path.name != "__main__.py"]

# What is imported of a later one all the same, by module: for types, or once it is asked for.
LATE = {
    "fused_eager/__init__.py": ("fused_eager",),  # the face of all
    # What comes with the device.
    "fused_eager/frontends/device/registration.py": (
        "fused_eager.frontends.collectives",
        "fused_eager.frontends.kernels",
    ),
    "fused_eager/tpu.py": ("fused_eager.frontends.device",),  # a name for its registration
    "fused_eager/frontends/context/context.py": ("fused_eager.reporting.writer",),
    "fused_eager/frontends/device/doors.py": ("fused_eager.reporting.writer",),
}


def listed(package: str) -> str:
    """The package of the order that a folder belongs to: itself, or the one that it lies in."""
    while package and package not in PACKAGES:
        package = package.rpartition(".")[0]
    return package


def upward(source: str, package: str) -> list[str]:
    """The imports of a module of `package`, "" for fused_eager itself, that are of a later one."""
    place = listed(package)
    later = PACKAGES[PACKAGES.index(place) + 1 :] if place else PACKAGES
    found = imports(source, f"fused_eager.{package}" if package else "fused_eager")
    return [name for _, name in found if inside(name, tuple(f"fused_eager.{of}" for of in later))]


@pytest.mark.parametrize("path", RUNTIME, ids=short)
def test_packages_of_the_runtime_import_those_before_them(path: Path) -> None:
    found = upward(path.read_text(), ".".join(path.relative_to(ROOT / "fused_eager").parts[:-1]))
    assert [name for name in found if not inside(name, LATE.get(short(path), ()))] == []


def project() -> dict[str, Any]:
    """pyproject.toml."""
    toml = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    found: dict[str, Any] = toml.loads((ROOT / "pyproject.toml").read_text())
    return found


def test_types_of_what_users_import_are_strict() -> None:
    overrides = project()["tool"]["mypy"]["overrides"]
    (strict,) = (row for row in overrides if row.get("disallow_any_generics"))
    homes = {f"fused_eager.{home}" for home in fused_eager._HOMES.values()}
    assert homes <= set(strict["module"])
    assert strict["disallow_untyped_calls"] and strict["warn_return_any"] and not strict["implicit_reexport"]


@pytest.mark.parametrize(
    ("package", "line", "count"),
    [
        ("devices", "from ..tracing.stream import Node", 1),
        ("devices", "from .. import quiet, executing", 1),
        ("devices", "class C:\n    from fused_eager.frontends.context import context", 1),
        ("", "from .log.events import LOG", 1),
        ("devices", "if TYPE_CHECKING:\n    from ..tracing.stream import Node", 1),
        ("devices", "def f():\n    from ..frontends.context import context", 1),
        ("devices", "from ..log.events import LOG\nfrom . import device\nfrom ..xla import device", 0),
        ("devices", "if TYPE_CHECKING:\n    from ..log.events import LOG", 0),
        ("frontends.context", "from fused_eager.fusion_rules.spec import Spec", 0),
        ("lowering.xla_cpu", "from ..straight_line import Program\nfrom ...tracing.node import Node", 0),
        ("lowering.xla_cpu", "from ...compiling.compile import trace", 1),
    ],
)
def test_an_import_of_a_later_package_is_seen(package: str, line: str, count: int) -> None:
    assert len(upward(line, package)) == count


def test_each_folder_of_the_runtime_has_its_place_in_the_order() -> None:
    folders = {".".join(path.relative_to(ROOT / "fused_eager").parts[:-1]) for path in RUNTIME}
    assert {listed(folder) for folder in folders - {"", "frontends"}} == set(PACKAGES)


# ---- circles -----------------------------------------------------------------------------------------------------


Edges = dict[str, dict[str, int]]  # from each module to those that it imports, and on which line


def installed(path: Path) -> str:
    """The name by which a module of FOLDERS is imported."""
    folder, *inner = path.relative_to(ROOT).with_suffix("").parts
    return ".".join([FOLDERS[folder], *inner]).removesuffix(".__init__")


def edges(sources: dict[str, str], packages: Collection[str]) -> Edges:
    """Who imports whom of `sources`: at the top of a module, inside functions and for types alike."""
    found: Edges = {}
    for name, source in sources.items():
        found[name] = to = {}
        for line, imported in imports(source, name if name in packages else name.rpartition(".")[0]):
            # `from a import b` is of the module a.b, or else of a thing in a.
            module = next((m for m in (imported, imported.rpartition(".")[0]) if m in sources), name)
            if module != name:
                to.setdefault(module, line)
    return found


def shortest_circle(of: Edges) -> list[str]:
    """The modules of the shortest circle of imports, in their order; none if there is no circle."""
    best: list[str] = []
    for start in of:
        came: dict[str, str] = {}  # from where each was reached first
        reached = [start]
        for module in reached:
            for to in of[module]:
                if to not in came:
                    came[to] = module
                    reached.append(to)
        if start in came:
            circle = [start]
            while came[circle[0]] != start:
                circle.insert(0, came[circle[0]])
            if not best or len(circle) < len(best):
                best = [start, *circle[:-1]]
    return best


def told(circle: list[str], of: Edges) -> str:
    steps = zip(circle, [*circle[1:], circle[0]], strict=True)
    return " -> ".join([*(f"{a}:{of[a][b]}" for a, b in steps), circle[0]])


def test_no_imports_form_a_circle() -> None:
    paths = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    packages = {installed(path) for path in paths if path.name == "__init__.py"}
    found = edges({installed(path): path.read_text() for path in paths}, packages)
    circle = shortest_circle(found)
    assert not circle, f"these import one another (module:line): {told(circle, found)}"


@pytest.mark.parametrize(
    ("sources", "circle"),
    [
        ({"p.a": "from . import b", "p.b": "from .a import f"}, "p.a:1 -> p.b:1 -> p.a"),
        ({"p.a": "from .b import f", "p.b": "def f():\n    from . import a"}, "p.a:1 -> p.b:2 -> p.a"),
        ({"p.a": "import p.b", "p.b": "if TYPE_CHECKING:\n    from .a import A"}, "p.a:1 -> p.b:2 -> p.a"),
        ({"p.a": "import p.b", "p.b": "import p.c", "p.c": "import p.a\nimport p.b"}, "p.b:1 -> p.c:2 -> p.b"),
        ({"p.a": "import p.b", "p.b": "import p.c", "p.c": "import p.a"}, "p.a:1 -> p.b:1 -> p.c:1 -> p.a"),
        ({"p": "from .a import f", "p.a": "import p.b", "p.b": "from . import name"}, "p:1 -> p.a:1 -> p.b:1 -> p"),
        ({"p.a": "import_module('p.b')", "p.b": "from p import a"}, "p.a:1 -> p.b:1 -> p.a"),
        ({"p": "from .a import f", "p.a": "from . import b", "p.b": "import torch"}, ""),
    ],
)
def test_a_circle_is_found(sources: dict[str, str], circle: str) -> None:
    found = edges(sources, {"p"})
    shortest = shortest_circle(found)
    assert (told(shortest, found) if shortest else "") == circle


@pytest.mark.parametrize(
    ("folder", "line"),
    [
        ("cache", "import torch"),
        ("cache", "import jax.numpy as jnp"),
        ("cache", "from jaxlib import xla_client"),
        ("cache", "def f():\n    from torch import nn"),
        ("cache", "import importlib; importlib.import_module('torch')"),
        ("cache", "import fused_eager"),
        ("cache", "from fused_eager.log import events"),
        ("cache", "from ..log import events"),
        ("cache", "from ..fusion_rules import spec"),
        ("cache", "from fused_eager.fusion_rules.spec import Spec"),
        ("fusion_rules", "from fused_eager.config import Config"),
        ("fusion_rules", "from fused_eager import fused_eager"),
        ("fusion_rules", "from fused_eager.cache import key"),
        ("fusion_rules", "from ..frontends.context.context import fused_eager"),
    ],
)
def test_a_wrong_import_is_seen(folder: str, line: str) -> None:
    assert len(violations(line, folder)) == 1


@pytest.mark.parametrize(
    ("folder", "line"),
    [
        ("cache", "import hashlib, torchlike"),
        ("cache", "from fused_eager.cache.key import Key"),
        ("cache", "from fused_eager.cache import key"),
        ("cache", "from . import key"),
        ("cache", "from .key import Key"),
        ("fusion_rules", "import torch, jax"),
        ("fusion_rules", "from fused_eager.fusion_rules import spec"),
    ],
)
def test_a_right_import_is_let_pass(folder: str, line: str) -> None:
    assert violations(line, folder) == []


def test_every_folder_has_modules_to_check() -> None:
    for folder in FOLDERS:
        assert len([path for path in SOURCES if path.relative_to(ROOT).parts[0] == folder]) > 3


@pytest.mark.parametrize("path", SOURCES, ids=short)
def test_a_person_can_read_each_module_in_one_sitting(path: Path) -> None:
    lines = len(path.read_text().splitlines())
    assert lines <= LIMIT, f"{short(path)} has {lines} lines, at most {LIMIT} are allowed: split it by idea"


@pytest.mark.parametrize("path", [p for p in SOURCES if p.read_text().strip()], ids=short)
def test_each_module_says_what_it_is(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text()))


def test_every_environment_variable_is_in_the_registry() -> None:
    known = {option.env for option in OPTIONS.values()}
    texts = [*SOURCES, ROOT / "Makefile", ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    unknown = {
        f"{short(path)}: {name}"
        for path in texts
        for name in re.findall(r"\bFUSED_EAGER_[A-Z0-9][A-Z0-9_]*", path.read_text())
        if name not in known
    }
    assert not unknown, f"add a row to fused_eager/config.py for {sorted(unknown)}"


def test_every_package_is_installed() -> None:
    found = {
        ".".join([FOLDERS[parts[0]], *parts[1:]])
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("__init__.py")
        if (parts := path.relative_to(ROOT).parts[:-1])
    }
    setup = project()["tool"]["setuptools"]
    assert set(setup["packages"]) == found
    assert {setup["package-dir"][name]: name for name in FOLDERS.values()} == FOLDERS
    for folder, package in FOLDERS.items():
        for path in (ROOT / folder).rglob("*.*"):
            if path.suffix not in (".py", ".pyc"):
                name = ".".join([package, *path.relative_to(ROOT / folder).parts[:-1]])
                assert any(fnmatch(path.name, kind) for kind in setup["package-data"].get(name, ())), short(path)


def test_public_names_exist_and_are_documented() -> None:
    assert fused_eager.__all__
    for name in fused_eager.__all__:
        thing = getattr(fused_eager, name)
        assert (getattr(thing, "__doc__", None) or "").strip(), f"fused_eager.{name} has no docstring"


# ---- words -------------------------------------------------------------------------------------------------------

# What nobody in the field uses, and what is said instead.
UNUSUAL = {
    "aside": "bypass", "spell": "option text", "pace": "autotuner", "stretch": "segment", "whole": "iteration, entire",
    "witness": "shadow run", "contest": "op autotuner", "settle": "finalize", "vacate": "release",
    "apart": "subprocess", "telling": "diagnostics", "backlog": "deferred checks", "elsewhere": "other devices",
    "leaving": "shutdown", "collecting": "gc hooks", "looking": "sync point",
}  # fmt: skip


def unusual(source: str) -> list[str]:
    """The functions, classes, constants and attributes of a module that are named after one of these."""
    tree = ast.parse(source)
    names = {node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    names |= {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)}
    for body in [tree.body, *(node.body for node in ast.walk(tree) if isinstance(node, ast.ClassDef))]:
        for node in body:
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            names |= {t.id for t in targets if isinstance(t, ast.Name)}
    words = re.compile(rf"(^|_)({'|'.join(UNUSUAL)})(s|d|_|$)")
    return sorted(name for name in names if words.search(re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()))


@pytest.mark.parametrize("path", [p for folder in FOLDERS for p in (ROOT / folder).rglob("*.py")], ids=short)
def test_nothing_is_named_after_a_word_that_nobody_uses(path: Path) -> None:
    assert path.stem not in UNUSUAL and unusual(path.read_text()) == []


@pytest.mark.parametrize(
    "line",
    ["def settle(): pass", "class _Looking: pass", "APART = 4", "x._elsewhere = 1", "def is_settled(): pass",
     "class C:\n    whole: bool = True"],
)  # fmt: skip
def test_such_a_name_is_seen(line: str) -> None:
    assert len(unusual(line)) == 1
