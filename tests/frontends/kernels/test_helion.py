"""Helion's kernels as ops: three of them, on CPU tensors and on the device, in a process of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from fused_eager.frontends.kernels import content
from fused_eager.frontends.kernels.content import Content, NoContent

from . import helion_examples

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = '''
import torch, helion, helion.language as hl
import fused_eager.tpu
from fused_eager import jax_op

@helion.kernel(config=helion.Config(block_sizes=[8, 128]), static_shapes=True)
def add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    for tile in hl.tile(out.size()):
        out[tile] = x[tile] + y[tile]
    return out

@helion.kernel(config=helion.Config(block_sizes=[8]), static_shapes=True)
def softmax(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    for tile in hl.tile(x.size(0)):
        out[tile, :] = torch.nn.functional.softmax(x[tile, :], dim=1)
    return out

@helion.kernel(config=helion.Config(block_sizes=[16, 16, 16]), static_shapes=True)
def product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    out = torch.empty([x.size(0), y.size(1)], dtype=x.dtype, device=x.device)
    for rows, columns in hl.tile([x.size(0), y.size(1)]):
        acc = hl.zeros([rows, columns], dtype=torch.float32)
        for k in hl.tile(x.size(1)):
            acc = torch.addmm(acc, x[rows, k], y[k, columns])
        out[rows, columns] = acc
    return out

@jax_op("helions::add")
def my_add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return add.jax_fn(x, y)

@jax_op("helions::softmax")
def my_softmax(x: torch.Tensor) -> torch.Tensor:
    return softmax.jax_fn(x)

@jax_op("helions::product")
def my_product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return product.jax_fn(x, y)

for device in ("cpu", "tpu"):
    x, y = torch.randn(32, 128), torch.randn(32, 128)
    a, b = x.to(device), y.to(device)
    torch.testing.assert_close(my_add(a * 2, b).cpu(), x * 2 + y)
    torch.testing.assert_close(my_softmax(a).cpu(), x.softmax(1))
    torch.testing.assert_close(my_product(a, b.t().contiguous()).cpu(), x @ y.t(), rtol=1e-4, atol=1e-4)
    assert my_add(a, b).device.type == device
print("done")
'''


def test_three_kernels_on_both_kinds_of_tensors(tmp_path: Path) -> None:
    pytest.importorskip("helion", reason="the package helion is not installed")
    (tmp_path / "program.py").write_text(PROGRAM)  # Helion reads a kernel's lines
    environ = {**os.environ, "HELION_BACKEND": "pallas", "HELION_PALLAS_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "program.py"], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=300
    )
    assert done.stdout.endswith("done\n"), done.stderr[-3000:]


EXAMPLES = Path(os.environ.get("HELION_EXAMPLES", ROOT / "build" / "helion" / "examples"))
DIFFER = {"add, broadcast", "cross_entropy", "kl_div", "concatenate", "matmul_split_k"}  # see docs/kernels.md


@pytest.mark.parametrize(
    "names",
    [
        ["softmax, in two passes", "rms_norm", "matmul"],
        pytest.param([n for n in helion_examples.EXAMPLES if n not in DIFFER], marks=pytest.mark.slow),
    ],
    ids=["three", "all"],
)
def test_helions_own_examples_on_the_device(names: list[str]) -> None:
    pytest.importorskip("helion", reason="the package helion is not installed")
    if not EXAMPLES.is_dir():
        pytest.skip(f"there are no examples of Helion's in {EXAMPLES}; HELION_EXAMPLES says where they are")
    settings = {"HELION_BACKEND": "pallas", "HELION_PALLAS_INTERPRET": "1", "HELION_AUTOTUNE_EFFORT": "none"}
    command = [sys.executable, "-m", helion_examples.__name__, str(EXAMPLES), *names]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **settings}, capture_output=True, text=True, timeout=600
    )
    told = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [t["example"] for t in told] == names, done.stderr[-3000:]
    assert [t for t in told if t["result"] != "equal"] == []


class Kept:
    def __init__(self, number: int):
        self.number = number
        self.lock = threading.Lock()
        self.calls: list[int] = []


def test_of_some_classes_only_what_decides_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NoContent, match="lock"):
        Content("f", Kept(1))
    monkeypatch.setitem(content._DECISIVE, f"{__name__}.Kept", ("number",))
    one, same, other = Kept(1), Kept(1), Kept(2)
    same.calls.append(3)
    before = Content("f", one)
    assert before.digest == Content("f", same).digest != Content("f", other).digest
    one.calls.append(3)
    assert before.is_current()
    one.number = 1000
    assert not before.is_current()
