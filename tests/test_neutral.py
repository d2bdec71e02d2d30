"""What knows of one kind of memory or of one compiler lies behind the seam: everything else serves any device."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.test_layout import ROOT, imports, short

# The stages that every op of every device passes through.
PIPELINE = ("compiling", "executing", "log", "lowering", "planning", "policy", "recording", "tracing")
# Of them the host's: XLA:CPU's own, and running through ATen at once, which needs values in memory.
HOSTS = (
    *("compiling/xla_cpu", "lowering/xla_cpu"),
    *("recording/native.py", "recording/shadow.py", "recording/other_devices.py", "executing/materialize.py"),
)
NEUTRAL = [
    path
    for stage in PIPELINE
    for path in sorted((ROOT / "fused_eager" / stage).rglob("*.py"))
    if not path.relative_to(ROOT / "fused_eager").as_posix().startswith(HOSTS)
]

# The host as a value: the device where none is named, and that of whoever waits. All else of its folder is nobody's
# business.
THE_HOST = ("fused_eager.devices.host.device.HOST", "fused_eager.devices.host.device.INLINE")
WORDS = re.compile(r"\b(glibc|mmap|madvise|malloc|ctypes|data_ptr|cpu)\b")
# Modules that say one of these words all the same, and why they may.
MAY_SAY = {
    "fused_eager/compiling/compile.py": "the platform that is traced for where none is named",
    "fused_eager/compiling/surroundings.py": "the processor is a part of the keys of what XLA compiles for it",
    "fused_eager/lowering/rewrites.py": "the platform column of rewrites",
    "fused_eager/lowering/straight_line.py": "the platform column of JAX's own primitives",
    "fused_eager/planning/forms.py": "the device that a form in a key leaves out",
    "fused_eager/tracing/calls.py": "what every tensor is seen as while shapes are inferred",
}


def reaches_in(source: str, package: str) -> list[str]:
    """What a module imports of the host's folder."""
    found = (name for _, name in imports(source, package))
    return [name for name in found if name.startswith("fused_eager.devices.host") and name not in THE_HOST]


def said(source: str) -> Iterator[tuple[int, str]]:
    """Line and word of the words that a module says, in names and texts but for its docstrings."""
    docs: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            docs.update(range(node.lineno, (node.end_lineno or 0) + 1))
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT and token.start[0] not in docs:
            yield from ((token.start[0], word) for word in WORDS.findall(token.string))


@pytest.mark.parametrize("path", NEUTRAL, ids=short)
def test_the_pipeline_does_not_know_which_device_it_serves(path: Path) -> None:
    source = path.read_text()
    package = ".".join(path.relative_to(ROOT).parts[:-1])
    assert reaches_in(source, package) == []
    words = list(said(source))
    assert bool(words) == (short(path) in MAY_SAY), words


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("from ..devices.host.heap import WATCH", 1),
        ("def f():\n    from ..devices.host import heap, trap", 2),
        ("from ..devices.host.device import HOST, Host", 1),
        ("from ..devices.host.device import HOST", 0),
        ("from ..devices.buffer import LOCK", 0),
    ],
)
def test_reaching_into_the_host_is_seen(source: str, count: int) -> None:
    assert len(reaches_in(source, "fused_eager.executing")) == count


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("import ctypes", ["ctypes"]),
        ("x = t.data_ptr()", ["data_ptr"]),
        ("if platform == 'cpu':\n    pass", ["cpu"]),
        ('"""Of glibc."""\n# and malloc\nx = 1', []),
        ("is_cpu = 1", []),
    ],
)
def test_words_of_one_device_are_seen(source: str, words: list[str]) -> None:
    assert [word for _, word in said(source)] == words


def test_the_interface_of_a_device_is_short() -> None:
    assert len((ROOT / "fused_eager/devices/device.py").read_text().splitlines()) <= 250


def test_the_parts_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    """How many lines are neutral, the host's and the accelerator's: printed, for whoever reads the run."""

    def lines(*places: str) -> int:
        paths = {path for place in places for path in (ROOT / "fused_eager").glob(place)}
        return sum(len(path.read_text().splitlines()) for path in paths)

    neutral = sum(len(path.read_text().splitlines()) for path in NEUTRAL)
    host = lines("devices/host/*.py", *(f"{p}/*.py" if not p.endswith(".py") else p for p in HOSTS))
    accelerator = lines("devices/accelerator.py")
    with capsys.disabled():
        print(f"\nlines: pipeline {neutral}, of the host alone {host}, of the accelerator alone {accelerator}")
    assert neutral > host > accelerator > 0
